# SPDX-License-Identifier: Apache-2.0
"""Times attention of float8 tensors beside that of bfloat16.

  python mha_fp8.py                 shapes.MHA_FP8
  python mha_fp8.py --smoke         tiny sizes, on any platform

Prints a table and writes mha_fp8.csv to --out. The exit code is 1 if float8's
numbers are not those of bfloat16.

  fp8      flash_attn_fp8_pertensor_func, of the type that the GPU multiplies
  blocks   the same with scales for each 128 keys
  packed   its packed form, of sequences of one length
  bf16     flash_attn_func, of the same numbers
  cudnn    jax.nn.dot_product_attention in bfloat16
"""

import functools
import itertools
import sys

import jax.numpy as jnp
import numpy as np
import report
from shapes import MHA_FP8, MHA_FP8_SMOKE

import jax
from jax.experimental import aiter

IMPLEMENTATIONS = ("fp8", "blocks", "packed", "bf16", "cudnn")
SETS = 2


def call(name: str, causal: bool, q, k, v):
  if name == "cudnn":
    return jax.nn.dot_product_attention(
      q, k, v, is_causal=causal, implementation="cudnn")
  if name == "bf16":
    return aiter.flash_attn_func(q, k, v, causal=causal)
  b, s, _, _ = q.shape
  if name == "packed":
    starts = jnp.arange(b + 1, dtype=jnp.int32) * s
    out = aiter.flash_attn_varlen_fp8_pertensor_func(
      *(t.reshape(b * s, *t.shape[2:]) for t in (q, k, v)), None, None, None,
      starts, starts, causal=causal)
    return out.reshape(b, s, *out.shape[1:])
  scale = None
  if name == "blocks":
    scale = jnp.ones((b, k.shape[2], -(-s // 128)))
  return aiter.flash_attn_fp8_pertensor_func(
    q, k, v, None, scale, scale, causal=causal)


def arrays(shape, seed: int):
  """q, k and v in float8."""
  _, b, hq, hk, s, d, _ = shape
  keys = jax.random.split(jax.random.key(seed), 3)
  make = lambda key, heads: jax.random.normal(
    key, (b, s, heads, d)).astype(aiter.float8_dtype())
  return make(keys[0], hq), make(keys[1], hk), make(keys[2], hk)


def time_of(function, sets, seconds: float):
  """(the result of the first arguments, seconds of a call)."""
  turns = itertools.cycle(sets)
  return np.asarray(function(*sets[0]), np.float32), report.median_time(
    lambda: function(*next(turns)), jax.block_until_ready, seconds)


def measure(shape, names, seconds: float):
  """Rows of the CSV file, and what is wrong in words."""
  name, b, hq, _, s, d, causal = shape
  flops = 4 * b * hq * s * s * d / (2 if causal else 1)
  sets = [arrays(shape, seed) for seed in range(SETS)]
  rows, results = [], {}
  for which in names:
    prepare = (lambda t: t.astype(jnp.bfloat16)) if which in (
      "bf16", "cudnn") else lambda t: t
    own = [[prepare(t) for t in args] for args in sets]
    function = jax.jit(functools.partial(call, which, causal))
    try:
      results[which], time = time_of(function, own, seconds)
    except Exception as e:  # of another's kernel, has any type
      if which != "cudnn":
        raise
      print(f"{name}: no {which}: {(str(e).splitlines() or [''])[0][:90]}")
      continue
    row = {"name": name, "batch": b, "q_heads": hq, "seq": s, "head_dim": d,
           "causal": causal, "implementation": which, "us": time * 1e6,
           "tflops": flops / time / 1e12}
    rows.append(row)
    print(f"{name:<12}{b:>4} x {s:<7}{which:<8}{row['us']:>10.1f} us"
          f"{row['tflops']:>8.1f} TFLOP/s", flush=True)
  wrong = []
  for which in ("fp8", "blocks", "packed"):
    if which in results and "bf16" in results:
      error = np.abs(results[which] - results["bf16"]).max()
      if not error < 0.1 * np.abs(results["bf16"]).max():
        wrong.append(f"{shape}, {which}: error {error:.1e}")
  return rows, wrong


def table(found: list[dict]) -> list[list[str]]:
  """The header and a line a shape."""
  lines = [["shape", "batch x tokens", "head dim", "causal",
            *(f"{name} TFLOP/s" for name in IMPLEMENTATIONS)]]
  fields = ("name", "batch", "seq", "head_dim", "causal")
  for key in dict.fromkeys(tuple(r[f] for f in fields) for r in found):
    mine = {r["implementation"]: r for r in found
            if tuple(r[f] for f in fields) == key}
    lines.append([
      key[0], f"{key[1]} x {key[2]}", str(key[3]), "yes" if key[4] else "no",
      *(f"{mine[name]['tflops']:.0f}" if name in mine else "-"
        for name in IMPLEMENTATIONS)])
  return lines


def main() -> int:
  args = report.told(
    report.parser(__doc__, "mha_fp8", IMPLEMENTATIONS, ("bfloat16",)))
  print(report.title(aiter.float8_dtype().name))
  found, wrong = [], []
  for shape in MHA_FP8_SMOKE if args.smoke else MHA_FP8:
    rows, errors = measure(shape, args.implementations, args.seconds)
    found += rows
    wrong += errors
  return report.finish(
    args, "mha_fp8", found, table(found),
    "TFLOP/s: operations of both products, divided by the time.", wrong)


if __name__ == "__main__":
  sys.exit(main())
