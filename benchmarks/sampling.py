# SPDX-License-Identifier: Apache-2.0
"""Time of sampling and of top-k, beside what JAX and PyTorch have.

  python benchmarks/sampling.py [--smoke] [--markdown FILE]
  python benchmarks/sampling.py --random 20

Peers of `sample` are the same in jax.numpy, "xla", with the rows sorted, of
`top_k` lax.top_k, and torch.topk where there is one, and of
`top_k_per_row_prefill`, "select", these with the columns sorted (torch's are
not). Logits are normal, of a standard deviation of 2; tokens of "xla" are drawn
by jax.random.categorical, so that what is compared are the columns that may be
drawn: none of ours may be outside of them. GB/s counts the logits once.
"""

import functools
import random
import sys

import jax.numpy as jnp
import numpy as np
import report
import shapes

import jax
from jax import lax
from jax.experimental import aiter

OURS = "aiter"
SETS = 2


def limited(x, top_k, top_p):
  """Logits, -inf where they are not kept; by sorting."""
  x = x.astype(jnp.float32)
  if top_k == 0 and top_p == 1:
    return x
  down = -jnp.sort(-x, -1)
  limit = down[:, top_k - 1 if top_k else -1, None]
  if top_p < 1:
    shares = jnp.cumsum(jax.nn.softmax(down, -1), -1)
    last = jnp.sum(shares < top_p, -1, keepdims=True)
    limit = jnp.maximum(limit, jnp.take_along_axis(down, last, -1))
  return jnp.where(x >= limit, x, -jnp.inf)


def functions(shape: shapes.Sampling):
  """{implementation: function of x and a key} for a problem."""
  if shape.function == "top_k":
    return {OURS: lambda x, _: aiter.top_k(x, shape.top_k),
            "xla": lambda x, _: tuple(lax.top_k(x, shape.top_k))}
  if shape.function == "select":
    ends = np.arange(shape.rows) * shape.cols // (2 * shape.rows)
    starts, ends = jnp.zeros_like(ends), jnp.asarray(shape.cols - ends)
    outside = jnp.arange(shape.cols) >= ends[:, None]
    return {
        OURS: lambda x, _: aiter.top_k_per_row_prefill(
            x, starts, ends, shape.top_k),
        "xla": lambda x, _: jnp.sort(lax.top_k(
            jnp.where(outside, -jnp.inf, x), shape.top_k)[1], -1)}
  if shape.function == "greedy":
    return {OURS: lambda x, _: aiter.greedy_sample(x),
            "xla": lambda x, _: jnp.argmax(x, -1)}
  limits = dict(top_k=shape.top_k, top_p=shape.top_p)
  return {OURS: lambda x, key: aiter.sample(x, key, **limits),
          "xla": lambda x, key: jax.random.categorical(
            key, limited(x, **limits))}


def torch_time(shape: shapes.Sampling, dtype: str, seconds: float):
  """Seconds of torch.topk, or None without it or without a GPU."""
  try:
    import torch
  except ImportError:
    return None
  if shape.function not in ("top_k", "select") or not torch.cuda.is_available():
    return None
  sets = [torch.randn(shape.rows, shape.cols, device="cuda",
                      dtype=getattr(torch, dtype)) for _ in range(SETS)]
  return report.median_time(
      lambda: [torch.topk(x, shape.top_k) for x in sets],
      lambda _: torch.cuda.synchronize(), seconds) / SETS


def wrong(shape: shapes.Sampling, x, ours, xla) -> bool:
  """Whether ours are not what they may be."""
  if shape.function != "sample":
    return any(not np.array_equal(a, b) for a, b in zip(
        *(jax.tree.leaves(jax.device_get(t)) for t in (ours, xla))))
  # Sums of float32 may put a column on either side of a limit of XLA's.
  kept = jax.jit(functools.partial(
      limited, top_k=shape.top_k, top_p=min(1, shape.top_p + 1e-4)))(x)
  return bool(jnp.any(jnp.take_along_axis(kept, ours[:, None], -1) == -jnp.inf))


def measure(shape: shapes.Sampling, dtype: str, seconds: float):
  """Returns (rows of the CSV file, what went wrong) of one problem."""
  # Drawn in float32: normal numbers of bfloat16 end at the 256th part, and
  # hundreds of a row are its largest.
  sets = [(2 * jax.random.normal(jax.random.key(i), (shape.rows, shape.cols))
           ).astype(dtype) for i in range(SETS)]
  times, results = {}, {}
  for name, function in functions(shape).items():
    # With one key for all, XLA draws its noise once.
    args = [(x, jax.random.key(i)) for i, x in enumerate(sets)]
    times[name], results[name] = report.time_in_turn(function, args, seconds)
  if (found := torch_time(shape, dtype, seconds)) is not None:
    times["torch"] = found
  size = shape.rows * shape.cols * jnp.dtype(dtype).itemsize
  rows = [{**shape._asdict(), "dtype": dtype, "implementation": name,
           "us": t * 1e6, "gb_per_s": size / t / 1e9}
          for name, t in times.items()]
  print(f"{shape}: " + ", ".join(
      f"{name} {t * 1e6:.0f} us" for name, t in times.items()), flush=True)
  bad = wrong(shape, sets[0], results[OURS], results["xla"])
  return rows, [f"{shape}: wrong columns"] if bad else []


def table(rows: list[dict]) -> list[list[str]]:
  """Returns the header and a line a problem: microseconds."""
  names = [OURS, "xla", "torch"]
  lines = [["function", "rows x cols", "top_k", "top_p",
            *(f"{n} us" for n in names), "GB/s", "best other / aiter"]]
  problems = {}
  for row in rows:
    key = tuple(row[n] for n in shapes.Sampling._fields)
    problems.setdefault(key, {})[row["implementation"]] = row
  for (function, count, cols, k, p), found in problems.items():
    others = [row["us"] for n, row in found.items() if n != OURS]
    lines.append([
        function, f"{count} x {cols}", str(k), f"{p:g}",
        *(f"{found[n]['us']:.0f}" if n in found else "-" for n in names),
        f"{found[OURS]['gb_per_s']:.0f}",
        f"{min(others) / found[OURS]['us']:.2f}"])
  return lines


def drawn(count: int, seed: int) -> list[shapes.Sampling]:
  """Returns problems whose sizes are drawn at random."""
  rng = random.Random(seed)
  found = []
  for _ in range(count):
    function = rng.choice(("sample", "sample", "top_k", "greedy"))
    cols = rng.choice((32000, 128256, 151936, rng.randrange(1000, 270000)))
    top_k = rng.choice((1, 8, 50, 500, 1000))
    found.append(shapes.Sampling(
        function, rng.randrange(1, 257), cols,
        0 if function == "greedy" or function == "sample" and rng.random() < 0.3
        else top_k,
        rng.choice((1.0, 0.5, 0.9, 0.99)) if function == "sample" else 1.0))
  return found


def main() -> int:
  args = report.told(report.parser(
      __doc__, "sampling", dtypes=("bfloat16", "float32"), draws=True))
  problems = shapes.SAMPLING_SMOKE if args.smoke else shapes.SAMPLING
  problems = problems + drawn(args.random, args.seed)
  print(report.title(args.dtype))
  rows, off = [], []
  for shape in problems:
    more, bad = measure(shape, args.dtype, args.seconds)
    rows += more
    off += bad
  return report.finish(
      args, "sampling", rows, table(rows),
      "GB/s: bytes of the logits, read once, divided by the time", off)


if __name__ == "__main__":
  sys.exit(main())
