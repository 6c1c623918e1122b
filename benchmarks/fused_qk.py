# SPDX-License-Identifier: Apache-2.0
"""Times latent attention's fused rotation, norm and write into the cache.

  python fused_qk.py            shapes.FUSED_QK
  python fused_qk.py --smoke    tiny sizes, on any platform

Prints a table and writes fused_qk.csv to --out. The exit code is 1 if our
numbers are not those of jax.numpy. The figure is the rate at which a call reads
its operands and writes its results.

  aiter    fused_qk_rope_concat_and_cache_mla
  apart    our rms_norm, rope of both, and concat_and_cache_mla
  xla      the formula in jax.numpy, whose write is a scatter
"""

import functools
import sys

import jax.numpy as jnp
import numpy as np
import report
from shapes import FUSED_QK, FUSED_QK_SMOKE, FusedQk

import jax
from jax.experimental import aiter

OURS = "aiter"
IMPLEMENTATIONS = (OURS, "apart", "xla")
_PAGE = 64


def arrays(shape: FusedQk, dtype):
  """(kv, q_nope, q_pe, kv_c, k_pe, weight, slots, positions, cos, sin)."""
  t, h, lora, rope = shape.tokens, shape.heads, shape.lora, shape.rope
  keys = iter(jax.random.split(jax.random.key(0), 8))
  normal = lambda *size: jax.random.normal(next(keys), size, jnp.dtype(dtype))
  pages = 2 * t // _PAGE + 2
  own = dtype if shape.cache == "bfloat16" else shape.cache
  angles = jax.random.uniform(next(keys), (4096, rope // 2), maxval=7.0)
  rng = np.random.default_rng(0)
  return (jnp.zeros((pages, _PAGE, lora + rope), own), normal(t, h, lora),
          normal(t, h, rope), normal(t, lora), normal(t, rope), normal(lora),
          jnp.asarray(rng.permutation(pages * _PAGE)[:t], jnp.int32),
          jnp.asarray(rng.integers(0, 4096, t), jnp.int32), jnp.cos(angles),
          jnp.sin(angles))


def ours(kv, q_nope, q_pe, kv_c, k_pe, weight, slots, positions, cos, sin):
  return aiter.fused_qk_rope_concat_and_cache_mla(
    q_nope, q_pe, kv_c, k_pe, kv, slots, positions, cos, sin,
    kv_norm_weight=weight)[::-1]


def apart(kv, q_nope, q_pe, kv_c, k_pe, weight, slots, positions, cos, sin):
  cos, sin = (t.astype(q_pe.dtype) for t in (cos, sin))
  turn = functools.partial(
    aiter.rope, cos=cos, sin=sin, layout="thd", positions=positions)
  kv = aiter.concat_and_cache_mla(
    aiter.rms_norm(kv_c, weight), turn(k_pe[:, None])[:, 0], kv, slots)
  return kv, jnp.concatenate([q_nope, turn(q_pe)], -1)


def plain(kv, q_nope, q_pe, kv_c, k_pe, weight, slots, positions, cos, sin):
  wide = lambda t: t.astype(jnp.float32)
  cos, sin = cos[positions], sin[positions]

  def turn(x, cos, sin):
    a, b = jnp.split(wide(x), 2, -1)
    return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], -1)

  c = wide(kv_c)
  c *= jax.lax.rsqrt(jnp.mean(c * c, -1, keepdims=True) + 1e-6) * wide(weight)
  row = jnp.concatenate([c, turn(k_pe, cos, sin)], -1)
  if kv.dtype.itemsize == 1:
    largest = float(jnp.finfo(kv.dtype).max)
    row = jnp.clip(row, -largest, largest)
  flat = kv.reshape(-1, kv.shape[-1]).at[slots].set(row.astype(kv.dtype))
  q = jnp.concatenate(
    [q_nope, turn(q_pe, cos[:, None], sin[:, None]).astype(q_pe.dtype)], -1)
  return flat.reshape(kv.shape), q


def measure(shape: FusedQk, names, dtype, seconds: float):
  """Rows of the CSV file, and what is wrong in words."""
  functions = {OURS: ours, "apart": apart, "xla": plain}
  rows, results = [], {}
  for name in names:
    args = arrays(shape, dtype)
    call = jax.jit(functions[name], donate_argnums=0)
    kv, q = call(*args)
    results[name] = [np.asarray(t, np.float32) for t in (kv, q)]
    rest = args[1:]
    held = [kv]

    def step(call=call, held=held, rest=rest):
      held[0], q = call(held[0], *rest)
      return q

    time = report.median_time(step, jax.block_until_ready, seconds)
    row = {**shape._asdict(), "implementation": name, "us": time * 1e6,
           "gb_per_s": shape.bytes(kv.dtype.itemsize) / time / 1e9}
    rows.append(row)
    print(f"{shape.tokens:>6} x {shape.heads:<5}{shape.cache:<15}{name:<7}"
          f"{row['us']:>10.1f} us{row['gb_per_s']:>8.0f} GB/s", flush=True)
  wrong = []
  if OURS in results and "xla" in results:
    for what, one, other in zip(("the cache", "queries"), results[OURS],
                                results["xla"]):
      error = np.abs(one - other).max() / np.abs(other).max()
      if not error < (0.08 if shape.cache != "bfloat16" else 0.01):
        wrong.append(f"{shape}: {what} by {error:.1e} of the largest number")
  return rows, wrong


def table(found: list[dict]) -> list[list[str]]:
  """The header and a line a shape: microseconds, and our rate."""
  lines = [["tokens x heads", "cache", *(f"{n} us" for n in IMPLEMENTATIONS),
            "GB/s"]]
  fields = ("tokens", "heads", "cache")
  for key in dict.fromkeys(tuple(r[f] for f in fields) for r in found):
    mine = {r["implementation"]: r for r in found
            if tuple(r[f] for f in fields) == key}
    lines.append([
      f"{key[0]} x {key[1]}", key[2],
      *(f"{mine[n]['us']:.1f}" if n in mine else "-" for n in IMPLEMENTATIONS),
      f"{mine[OURS]['gb_per_s']:.0f}" if OURS in mine else "-"])
  return lines


def main() -> int:
  parser = report.parser(__doc__, "fused_qk", IMPLEMENTATIONS,
                         ("bfloat16", "float16"))
  args = parser.parse_args()
  print(report.title(args.dtype))
  found, wrong = [], []
  for shape in FUSED_QK_SMOKE if args.smoke else FUSED_QK:
    rows, errors = measure(shape, args.implementations, args.dtype,
                           0.02 if args.smoke else args.seconds)
    found += rows
    wrong += errors
  return report.finish(
    args, "fused_qk", found, table(found),
    "GB/s: bytes of operands and results, divided by the time.", wrong)


if __name__ == "__main__":
  sys.exit(main())
