# SPDX-License-Identifier: Apache-2.0
"""Times what stands between projections and attention, fused.

  python fused_qk.py         shapes.FUSED_HEADS, FUSED_QK and FUSED_ROWS
  python fused_qk.py --smoke                tiny sizes, on any platform
  python fused_qk.py --only heads           or latent, or rows
  python fused_qk.py --random 20 --seed 3   so many drawn ones, behind them

Prints a table and writes fused_qk.csv to --out. The exit code is 1 if our
numbers are not those of jax.numpy. The figure is the rate at which a call reads
its operands and writes its results. Calls follow each other in one program, so
that what it costs to begin one from Python is not counted.

  aiter    fused_qk_norm_rope_cache; fused_qk_rope_concat_and_cache_mla; of
           rows fused_qk_rmsnorm, gated_rmsnorm and inverse_rope with _quant
  apart    our rms_norm and rope of both, and write_kv_cache or
           concat_and_cache_mla; of rows our norms, rope and per_group_quant
  xla      the formula in jax.numpy, whose write is a scatter; of heads, of
           layout "NHD" alone; not of rows
"""

import functools
import sys

import jax.numpy as jnp
import numpy as np
import report
import shapes
from shapes import FusedHeads, FusedQk, FusedRows

import jax
from jax import lax
from jax.experimental import aiter

OURS = "aiter"
IMPLEMENTATIONS = (OURS, "apart", "xla")
_PAGE = 64
# Calls of a program, of up to so many tokens and of more.
_FEW, _CALLS, _LARGE_CALLS = 1024, 32, 4
_FP8 = "float8_e4m3fn"


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


def heads_arrays(shape: FusedHeads, dtype):
  """(k_cache, v_cache, qkv, weights, slots, positions, cos, sin)."""
  t, d = shape.tokens, shape.dim
  keys = iter(jax.random.split(jax.random.key(0), 8))
  normal = lambda *size: jax.random.normal(next(keys), size, jnp.dtype(dtype))
  pages = 2 * t // _PAGE + 2
  own = jnp.dtype(dtype if shape.cache == "bfloat16" else shape.cache)
  x = 16 // own.itemsize
  k, v = {
    "NHD": ((pages, _PAGE, shape.k_heads, d),) * 2,
    "HND": ((pages, shape.k_heads, _PAGE, d),) * 2,
    "x": ((pages, shape.k_heads, d // x, _PAGE, x),
          (pages, shape.k_heads, d, _PAGE)),
    "asm": ((pages, shape.k_heads, d // x, _PAGE, x),
            (pages, shape.k_heads, _PAGE // x, d, x)),
  }[shape.layout]
  angles = jax.random.uniform(next(keys), (4096, d // 2), maxval=7.0)
  rng = np.random.default_rng(0)
  return (jnp.zeros(k, own), jnp.zeros(v, own),
          normal(t, (shape.heads + 2 * shape.k_heads) * d), normal(d),
          normal(d), jnp.asarray(rng.permutation(pages * _PAGE)[:t], jnp.int32),
          jnp.asarray(rng.integers(0, 4096, t), jnp.int32), jnp.cos(angles),
          jnp.sin(angles))


def heads_ours(shape: FusedHeads, k_cache, v_cache, qkv, q_weight, k_weight,
               slots, positions, cos, sin):
  q, *caches = aiter.fused_qk_norm_rope_cache(
    qkv, None, None, k_cache, v_cache, slots, positions, cos, sin,
    q_weight=q_weight, k_weight=k_weight, layout=shape.layout,
    num_heads=(shape.heads, shape.k_heads))
  return *caches, q


def _parts(shape: FusedHeads, qkv):
  whole = qkv.reshape(shape.tokens, -1, shape.dim)
  return jnp.split(whole, (shape.heads, shape.heads + shape.k_heads), 1)


def heads_apart(shape: FusedHeads, k_cache, v_cache, qkv, q_weight, k_weight,
                slots, positions, cos, sin):
  q, k, v = _parts(shape, qkv)
  q, k = aiter.rope_2c(
    aiter.rms_norm(q, q_weight), aiter.rms_norm(k, k_weight), cos, sin,
    layout="thd", positions=positions)
  return *aiter.write_kv_cache(
    k, v, k_cache, v_cache, slots, layout=shape.layout), q


def heads_plain(shape: FusedHeads, k_cache, v_cache, qkv, q_weight, k_weight,
                slots, positions, cos, sin):
  q, k, v = _parts(shape, qkv)
  cos, sin = cos[positions][:, None], sin[positions][:, None]

  def made(x, weight):
    x = x.astype(jnp.float32)
    x *= jax.lax.rsqrt(jnp.mean(x * x, -1, keepdims=True) + 1e-6) * (
      weight.astype(jnp.float32))
    a, b = jnp.split(x, 2, -1)
    return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], -1)

  def stored(cache, rows):
    if cache.dtype.itemsize == 1:
      largest = float(jnp.finfo(cache.dtype).max)
      rows = jnp.clip(rows.astype(jnp.float32), -largest, largest)
    flat = cache.reshape(-1, *rows.shape[1:])
    return flat.at[slots].set(rows.astype(cache.dtype)).reshape(cache.shape)

  return (stored(k_cache, made(k, k_weight)), stored(v_cache, v),
          made(q, q_weight).astype(q.dtype))


def rows_arrays(shape: FusedRows, dtype):
  """Arrays of each kind, in the order of ours."""
  t = shape.tokens
  keys = iter(jax.random.split(jax.random.key(0), 6))
  normal = lambda *size: jax.random.normal(next(keys), size, jnp.dtype(dtype))
  if shape.kind == "gated_quant":
    return normal(t, 32, 128), normal(t, 32, 128), normal(128)
  if shape.kind == "inverse":
    angles = jax.random.uniform(next(keys), (4096, 32), maxval=7.0)
    return (normal(t, 64, 512), jnp.arange(t) * 37 % 4096, jnp.cos(angles),
            jnp.sin(angles))
  qk = normal(t, 1536), normal(1536), normal(t, 512), normal(512)
  return (*qk, normal(t, 1536)) if shape.kind == "qk_quant" else qk


def rows_ours(shape: FusedRows, *args):
  if shape.kind == "gated_quant":
    return aiter.gated_rmsnorm_fp8_group_quant(*args, quant_dtype=_FP8)
  if shape.kind == "inverse":
    return aiter.inverse_rope_group_quant(
      *args, 8, quant_dtype=_FP8, scale_dtype="float32")
  q, q_weight, k, k_weight, *residual = args
  if not residual:
    return aiter.fused_qk_rmsnorm(q, q_weight, 1e-6, k, k_weight)
  out = aiter.fused_qk_rmsnorm_group_quant(
    q, q_weight, 1e-6, k, k_weight, None, *residual, quant_dtype=_FP8)
  return out.q, out.q_scale, out.k, out.q_residual_out


def rows_apart(shape: FusedRows, *args):
  quantised = functools.partial(aiter.per_group_quant, quant_dtype=_FP8)
  if shape.kind == "gated_quant":
    x, z, weight = args
    y = aiter.rms_norm(x, weight) * jax.nn.silu(z)
    return quantised(y.reshape(shape.tokens, -1))
  if shape.kind == "inverse":
    o, positions, cos, sin = args
    turned = aiter.rope(
      o[..., 448:], cos.astype(o.dtype), -sin.astype(o.dtype), layout="thd",
      positions=positions, rotate_style="gptj")
    o = jnp.concatenate([o[..., :448], turned], -1)
    return quantised(o.reshape(shape.tokens, 8, -1))
  q, q_weight, k, k_weight, *residual = args
  k = aiter.rms_norm(k, k_weight)
  if not residual:
    return aiter.rms_norm(q, q_weight), k
  y, total = aiter.rms_norm_with_add(q, *residual, q_weight)
  return *quantised(y), k, total


def calls(shape):
  """(name -> function, arguments' maker, how many of them are caches)."""
  if isinstance(shape, FusedQk):
    return {OURS: ours, "apart": apart, "xla": plain}, arrays, 1
  if isinstance(shape, FusedRows):
    return ({name: functools.partial(fn, shape) for name, fn in (
      (OURS, rows_ours), ("apart", rows_apart))}, rows_arrays, 0)
  found = {OURS: heads_ours, "apart": heads_apart}
  if shape.layout == "NHD":
    found["xla"] = heads_plain
  return ({name: functools.partial(fn, shape) for name, fn in found.items()},
          heads_arrays, 2)


def named(shape) -> dict:
  """What a line says of a shape."""
  if isinstance(shape, FusedQk):
    return {"kind": "latent", "tokens": shape.tokens, "heads": shape.heads,
            "cache": shape.cache}
  if isinstance(shape, FusedRows):
    return {"kind": shape.kind, "tokens": shape.tokens, "heads": "",
            "cache": ""}
  return {"kind": "heads", "tokens": shape.tokens,
          "heads": f"{shape.heads}/{shape.k_heads} x {shape.dim}",
          "cache": f"{shape.cache} {shape.layout}"}


def in_turn(function, caches: int, count: int):
  """A program: so many calls, each of which writes the last one's caches.

  It returns the caches, and what else each call has made.
  """

  def program(*args):
    pools, rest, made = args[:caches], args[caches:], []
    for _ in range(count):
      out, rest = lax.optimization_barrier((function(*pools, *rest), rest))
      pools = out[:caches]
      made.append(out[caches:])
    return pools, made

  return jax.jit(program, donate_argnums=tuple(range(caches)))


def measure(shape, names, dtype, seconds: float, few: int):
  """Rows of the CSV file, and what is wrong in words.

  Args:
    shape: the problem.
    names: of implementations.
    dtype: of the arrays.
    seconds: to measure each for.
    few: calls of a program, where they are short.
  """
  functions, make, caches = calls(shape)
  rows, results = [], {}
  for name in names:
    if name not in functions:
      continue
    args = make(shape, dtype)
    count = few if shape.tokens <= _FEW else _LARGE_CALLS
    call = in_turn(functions[name], caches, count)
    itemsize = args[0].dtype.itemsize
    pools, made = call(*args)
    out = (*pools, *made[-1])
    results[name] = [np.asarray(t, np.float32) for t in out]
    bounds = [0.13 if t.dtype.itemsize == 1 else 0.02 for t in out]
    rest, held = args[caches:], [pools]

    def step(call=call, held=held, rest=rest):
      held[0], made = call(*held[0], *rest)
      return made

    time = report.median_time(step, jax.block_until_ready, seconds) / count
    row = {**named(shape), "implementation": name, "us": time * 1e6,
           "gb_per_s": shape.bytes(itemsize) / time / 1e9}
    rows.append(row)
    print(f"{row['kind']:<12}{row['tokens']:>6} x {row['heads']:<14}"
          f"{row['cache']:<20}{name:<7}"
          f"{row['us']:>10.1f} us{row['gb_per_s']:>8.0f} GB/s", flush=True)
  wrong = []
  other = "xla" if "xla" in results else "apart"
  if OURS in results and other in results:
    for i, (one, two, bound) in enumerate(
      zip(results[OURS], results[other], bounds)):
      error = np.abs(one - two).max() / np.abs(two).max()
      # Of 8 bits a number may be the next one, which of e4m3 is up to an
      # eighth away; those of "apart" are rounded three times.
      if not error < bound:
        wrong.append(f"{shape}: result {i} by {error:.1e} of the largest")
  return rows, wrong


def table(found: list[dict]) -> list[list[str]]:
  """The header and a line a shape: microseconds, and our rate."""
  lines = [["what", "tokens x heads", "cache",
            *(f"{n} us" for n in IMPLEMENTATIONS), "GB/s"]]
  fields = ("kind", "tokens", "heads", "cache")
  for key in dict.fromkeys(tuple(r[f] for f in fields) for r in found):
    mine = {r["implementation"]: r for r in found
            if tuple(r[f] for f in fields) == key}
    lines.append([
      key[0], f"{key[1]} x {key[2]}", key[3],
      *(f"{mine[n]['us']:.1f}" if n in mine else "-" for n in IMPLEMENTATIONS),
      f"{mine[OURS]['gb_per_s']:.0f}" if OURS in mine else "-"])
  return lines


def main() -> int:
  parser = report.parser(__doc__, "fused_qk", IMPLEMENTATIONS,
                         ("bfloat16", "float16"), draws=True)
  parser.add_argument("--only", choices=("heads", "latent", "rows"))
  args = report.told(parser)
  print(report.title(args.dtype))
  listed = {"heads": shapes.FUSED_HEADS, "latent": shapes.FUSED_QK,
            "rows": shapes.FUSED_ROWS}
  if args.smoke:
    listed = {"heads": shapes.FUSED_HEADS_SMOKE,
              "latent": shapes.FUSED_QK_SMOKE,
              "rows": shapes.FUSED_ROWS_SMOKE}
  if args.only:
    listed = {args.only: listed[args.only]}
  found, wrong = [], []
  for shape in (*(s for some in listed.values() for s in some),
                *shapes.random_fused_heads(args.random, args.seed)):
    rows, errors = measure(shape, args.implementations, args.dtype,
                           args.seconds, 2 if args.smoke else _CALLS)
    found += rows
    wrong += errors
  return report.finish(
    args, "fused_qk", found, table(found),
    "GB/s: bytes of operands and results, divided by the time.", wrong)


if __name__ == "__main__":
  sys.exit(main())
