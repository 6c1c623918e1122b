# SPDX-License-Identifier: Apache-2.0
"""Time of grouped products, of routing and of layers of experts.

  python benchmarks/moe.py [--smoke] [--markdown FILE]
  python benchmarks/moe.py --random 20

Peers of a product are jax.lax.ragged_dot, "xla", and torch._grouped_mm; of
routing (topk_softmax and the sort of its ids) lax.top_k and a stable argsort;
of a layer the same with lax.ragged_dot. A peer that has no room for a problem
is left out. Products of eight and of four bits have none. Weights' bytes are
those of groups that have rows.
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
from jax._src.aiter.moe import api
from jax.experimental import aiter

OURS = "aiter"
BYTES = {"i8": jnp.int8, "fp8": jnp.float8_e4m3fn,
         "fp8_block": jnp.float8_e4m3fn}
# Products whose matrices have four bits, and their scales' dtypes.
FOUR_BITS = {"mx": jnp.uint8, "i4": jnp.bfloat16}
# Bytes of a weight, where it has not two.
WEIGHT_BYTES = dict.fromkeys(BYTES, 1) | dict.fromkeys(FOUR_BITS, 0.5)
# What a copy of the operands that XLA's own product makes may take.
ROOM = 24 << 30


def sizes_of(shape: shapes.Experts) -> np.ndarray:
  """Rows of each group, int32."""
  m, g = shape.m, shape.experts
  if shape.sizes == "even":
    shares = np.ones(g)
  elif shape.sizes == "skewed":
    shares = np.where(np.arange(g) % 4 == 3, 0, 1.0)
    shares[0] = shares[1:].sum() or 1
  else:
    shares = np.random.default_rng(0).dirichlet(np.full(g, 2.0))
  ends = np.round(np.cumsum(shares) / shares.sum() * m).astype(np.int32)
  return np.diff(ends, prepend=0).astype(np.int32)


def arrays_of(shape: shapes.Experts, seed: int):
  """The arrays of a problem; a layer's weights are those of the last."""
  keys = jax.random.split(jax.random.key(seed), 4)
  normal = lambda key, *s: jax.random.normal(key, s, jnp.bfloat16)
  g, m, n, k = shape.experts, shape.m, shape.n, shape.k
  if shape.what == "route":
    return (jax.random.normal(keys[0], (m, g), jnp.float32),)
  if shape.what == "layer":
    logits = jax.random.normal(keys[3], (m, g), jnp.float32)
    return (normal(keys[0], m, k), normal(keys[1], g, 2 * n, k),
            normal(keys[2], g, k, n), *aiter.topk_softmax(logits, shape.topk))
  if shape.what in BYTES:
    a, b = (normal(key, *s).astype(BYTES[shape.what])
            for key, s in zip(keys, ((m, k), (g, n, k))))
    along = lambda size: -(-size // 128)
    scales = ((m, along(k)), (g, along(n), along(k))) if (
        shape.what == "fp8_block") else ((m, 1), (g, n, 1))
    return (a, b, *map(jnp.ones, scales), jnp.asarray(sizes_of(shape)))
  if shape.what in FOUR_BITS:
    b = jax.random.bits(keys[1], (g, n, k // 2), jnp.uint8)
    one = jnp.full((g, n, k // 32), 127 if shape.what == "mx" else 1,
                   FOUR_BITS[shape.what])
    return normal(keys[0], m, k), b, one, jnp.asarray(sizes_of(shape))
  b = {"nn": (g, k, n), "nt": (g, n, k), "tn": (m, n)}[shape.what]
  return normal(keys[0], m, k), normal(keys[1], *b), jnp.asarray(
      sizes_of(shape))


def xla_sorted(ids, experts):
  """(sizes of groups, order of the entries) by JAX's own functions."""
  flat = ids.reshape(-1)
  return (jnp.bincount(flat, length=experts).astype(jnp.int32),
          jnp.argsort(flat, stable=True))


def xla_layer(x, w1, w2, weights, ids):
  m, k = ids.shape
  sizes, order = xla_sorted(ids, w1.shape[0])
  h = lax.ragged_dot(x[order // k], w1.swapaxes(1, 2), sizes)
  gate, up = jnp.split(h, 2, -1)
  y = lax.ragged_dot(jax.nn.silu(gate) * up, w2.swapaxes(1, 2), sizes)
  y = jnp.zeros_like(y).at[order].set(y).reshape(m, k, -1)
  return jnp.einsum("mk,mkd->md", weights.astype(y.dtype), y)


def functions(shape: shapes.Experts):
  """{implementation: function} of a problem's arrays."""
  g, topk = shape.experts, shape.topk
  if shape.what == "route":
    def route(x):
      weights, ids = aiter.topk_softmax(x, topk, True)
      found = api.sort_by_expert(ids, g)
      return weights, ids, found.counts, found.order - 1

    def xla_route(x):
      weights, ids = lax.top_k(jax.nn.softmax(x, -1), topk)
      weights /= weights.sum(-1, keepdims=True)
      return weights, ids, *xla_sorted(ids, g)

    return {OURS: route, "xla": xla_route}
  if shape.what == "layer":
    return {OURS: aiter.fused_moe, "xla": xla_layer}
  if shape.what in BYTES:
    return {OURS: aiter.grouped_gemm_i8 if shape.what == "i8"
            else aiter.grouped_gemm_fp8}
  if shape.what == "mx":
    return {OURS: lambda a, b, scale, sizes: aiter.grouped_gemm_fp4(
        a, b, None, scale, sizes)}
  if shape.what == "i4":
    return {OURS: aiter.grouped_gemm_i4}
  if shape.what == "tn":
    def xla_tn(a, b, sizes):
      dims = lax.RaggedDotDimensionNumbers(
          (((0,), (0,)), ((), ())), lhs_ragged_dimensions=[0],
          rhs_group_dimensions=[])
      return lax.ragged_dot_general(a, b, sizes, dims)

    return {OURS: lambda a, b, sizes: aiter.tgmm(
        a.T, b, sizes, jnp.bfloat16), "xla": xla_tn}
  transposed = shape.what == "nt"
  return {
      OURS: functools.partial(aiter.ragged_dot, transpose_rhs=transposed),
      "xla": lambda a, b, sizes: lax.ragged_dot(
          a, b.swapaxes(1, 2) if transposed else b, sizes)}


def torch_time(shape: shapes.Experts, seconds: float):
  """Seconds of torch._grouped_mm; None where there is none."""
  if not report.HAS_TORCH or shape.what not in ("nn", "nt", "tn"):
    return None
  import torch
  torch.cuda.empty_cache()
  if not torch.cuda.is_available() or not hasattr(torch, "_grouped_mm"):
    return None
  draw = lambda *s: torch.randn(*s, device="cuda", dtype=torch.bfloat16)
  g, m, n, k = shape.experts, shape.m, shape.n, shape.k
  ends = torch.tensor(np.cumsum(sizes_of(shape)), dtype=torch.int32,
                      device="cuda")
  a = draw(m, k)
  b = {"nn": lambda: draw(g, k, n), "tn": lambda: draw(m, n),
       "nt": lambda: draw(g, n, k).transpose(-2, -1)}[shape.what]()
  a = a.t() if shape.what == "tn" else a
  try:
    return report.median_time(
        lambda: torch._grouped_mm(a, b, offs=ends),
        lambda _: torch.cuda.synchronize(), seconds)
  except RuntimeError as e:
    print(f"{shape}: torch: {str(e).splitlines()[0]}")
    return None


def has_room(shape: shapes.Experts) -> bool:
  """Whether XLA's product may expand an operand for every group."""
  wide = {"tn": shape.k + shape.n, "layer": shape.topk * shape.k}.get(
      shape.what, shape.k)
  return shape.what == "route" or 2 * shape.experts * shape.m * wide < ROOM


def wrong(shape: shapes.Experts, results) -> bool:
  """Whether ours are not XLA's."""
  ours, xla = (jax.tree.leaves(jax.device_get(t)) for t in results)
  if shape.what == "route":
    return any(not np.allclose(a, b, rtol=1e-4) for a, b in zip(ours, xla))
  a, b = (np.asarray(t[0], np.float32) for t in (ours, xla))
  return bool(np.abs(a - b).max() > 0.02 * np.abs(b).max())


def measure(shape: shapes.Experts, seconds: float):
  """Returns (rows of the CSV file, what went wrong) of one problem."""
  args = [arrays_of(shape, 0)]
  times, results = {}, []
  for name, function in functions(shape).items():
    if name != OURS and not has_room(shape):
      continue
    program = report.InTurn(function, args)
    times[name] = program.time(args, seconds)
    results.append(program(args)[0])
  bad = len(results) > 1 and wrong(shape, results)
  results.clear()
  if (found := torch_time(shape, seconds)) is not None:
    times["torch"] = found
  flops = 2 * shape.m * shape.n * shape.k * (
      3 * shape.topk if shape.what == "layer" else 1)
  used = int((sizes_of(shape) > 0).sum())
  weights = used * shape.n * shape.k * (
      6 if shape.what == "layer" else WEIGHT_BYTES.get(shape.what, 2))
  rows = [{**shape._asdict(), "implementation": name, "us": t * 1e6,
           "tflop_per_s": flops / t / 1e12, "gb_per_s": weights / t / 1e9}
          for name, t in times.items()]
  print(f"{shape}: " + ", ".join(
      f"{name} {t * 1e6:.0f} us" for name, t in times.items())
        + f"; {rows[0]['tflop_per_s']:.0f} TFLOP/s,"
          f" {rows[0]['gb_per_s']:.0f} GB/s", flush=True)
  return rows, [f"{shape}: wrong numbers"] if bad else []


def table(rows: list[dict]) -> list[list[str]]:
  """Returns the header and a line a problem."""
  names = [OURS, "xla", "torch"]
  lines = [["what", "experts", "m x n x k", "topk", "sizes",
            *(f"{n} us" for n in names), "TFLOP/s", "GB/s",
            "best other / aiter"]]
  problems = {}
  for row in rows:
    key = tuple(row[n] for n in shapes.Experts._fields)
    problems.setdefault(key, {})[row["implementation"]] = row
  for (what, experts, m, n, k, topk, sizes), found in problems.items():
    others = [row["us"] for name, row in found.items() if name != OURS]
    lines.append([
        what, str(experts), f"{m} x {n} x {k}", str(topk), sizes,
        *(f"{found[name]['us']:.0f}" if name in found else "-"
          for name in names),
        f"{found[OURS]['tflop_per_s']:.0f}", f"{found[OURS]['gb_per_s']:.0f}",
        f"{min(others) / found[OURS]['us']:.2f}" if others else "-"])
  return lines


def drawn(count: int, seed: int) -> list[shapes.Experts]:
  """Returns problems whose sizes are drawn at random."""
  rng = random.Random(seed)
  found = []
  for _ in range(count):
    what = rng.choice(("nn", "nt", "tn", "layer"))
    experts = rng.choice((4, 8, 16, 32, 64, 128))
    n, k = (128 * rng.randrange(4, 33) for _ in range(2))
    topk = rng.randrange(1, 9) if what == "layer" else 1
    found.append(shapes.Experts(
        what, experts, rng.choice((64, 512, 4096, rng.randrange(1, 16384))), n,
        k, min(topk, experts), rng.choice(("even", "skewed", "random"))))
  return found


def main() -> int:
  args = report.told(
      report.parser(__doc__, "moe", dtypes=("bfloat16",), draws=True))
  problems = shapes.MOE_SMOKE if args.smoke else shapes.MOE
  if args.random:
    problems = drawn(args.random, args.seed)
  print(report.title(args.dtype))
  rows, off = [], []
  for shape in problems:
    more, bad = measure(shape, args.seconds)
    rows += more
    off += bad
  return report.finish(
      args, "moe", rows, table(rows),
      "GB/s: bytes of the weights, read once, divided by the time", off)


if __name__ == "__main__":
  sys.exit(main())
