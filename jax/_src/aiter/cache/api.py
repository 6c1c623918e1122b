# SPDX-License-Identifier: Apache-2.0
"""Writes into paged KV caches, and what moves their pages: public functions.

A function takes caches and returns them: donate them (`donate_argnums`), and
they are written in place. Undonated, XLA copies each once, and the result is
the same. A `slot` is `page * page_size + offset`; a token whose slot is
negative or past the last page is skipped. If a slot is given twice, what it
then holds is one of its tokens in each number, not the same on every platform;
where scales are found by blocks it is the last token.
"""

from __future__ import annotations

import functools
from typing import Any

import jax.numpy as jnp

import jax
from jax import lax
from jax._src.aiter.cache import op
from jax._src.aiter.cache.op import Config, Operands
from jax._src.aiter.core import arguments
from jax._src.aiter.core.dims import last_start, take
from jax._src.aiter.core.partition import vary_together

_FLOATS = ("float16", "bfloat16", "float32")
_FP8 = ("float8_e4m3fn", "float8_e4m3fnuz", "float8_e5m2")
_BYTES = ("int8", *_FP8)
_LAYOUTS = ("NHD", "HND", "x", "asm", "interleaved")
_NO_GRADIENT = "use jax.lax.stop_gradient"


# -----------------------------------------------------------------------------
# Checks


def _check_rank(function: str, name: str, t, rank: int) -> None:
  if t.ndim != rank:
    raise arguments.bad(function, name, arguments.describe(t),
                        f"an array of rank {rank}")


def _check(function: str, name: str, t, dtypes, rank: int) -> None:
  arguments.check_dtype(function, name, t, dtypes)
  _check_rank(function, name, t, rank)


def _check_shape(function: str, name: str, t, shape, meaning: str) -> None:
  if t.shape != tuple(shape):
    raise arguments.bad(function, name, arguments.describe(t),
                        f"shape {list(shape)}: {meaning}")


def _integers(function: str, name: str, t, rank: int):
  """The array in int32, whose ends are no slots."""
  arguments.check_integers(function, name, t)
  _check_rank(function, name, t, rank)
  return jnp.asarray(arguments.int32(t))


def _check_rows(function: str, names, key, value) -> None:
  """Keys and values of tokens, [tokens, heads, cols]."""
  for name, t in zip(names, (key, value)):
    _check(function, name, t, (*_FLOATS, *_BYTES), 3)
  if key.dtype != value.dtype:
    raise arguments.bad(function, f"dtypes of {' and '.join(names)}",
                        f"{key.dtype} and {value.dtype}", "one dtype",
                        TypeError)
  if key.shape[:2] != value.shape[:2]:
    raise arguments.bad(function, names[1], arguments.describe(value),
                        f"shape {[*key.shape[:2], 'cols']}, as {names[0]}")


def _cache_shape(layout: str, side: int, cache, page_size, heads, cols):
  """The shape that a cache must have, by its own pages."""
  run = op.run_of(cache)
  sizes = {"page": cache.shape[0], "head": heads, "col": cols, "side": 2,
           "offset": page_size}
  names = op.LAYOUTS[layout][side]
  if "run" in names:
    sizes |= {"run": -(-cols // run), "col": run}
  if "run_offset" in names:
    sizes |= {"run_offset": -(-page_size // run), "offset": run}
  return [sizes[n] for n in names]


def check_caches(function: str, layout: str, key, value, caches) -> None:
  """Caches of a layout with names for their dimensions."""
  k_name, k_cache = caches[0]
  for i, (name, cache) in enumerate(caches):
    _check(function, name, cache, (*_FLOATS, *_BYTES),
           len(op.LAYOUTS[layout][i]))
    if cache.dtype != k_cache.dtype:
      raise arguments.bad(function, f"{name}'s dtype", cache.dtype,
                          f"{k_cache.dtype}, as {k_name}", TypeError)
  heads = key.shape[1]
  size = op.page_size(layout, k_cache)
  meaning = f"layout {layout} of {heads} heads"
  if "run" in op.LAYOUTS[layout][0]:
    run = op.run_of(k_cache)
    if key.shape[2] % run:
      raise arguments.bad(
          function, "key", arguments.describe(key),
          f"a multiple of {run} columns with layout {layout} in "
          f"{k_cache.dtype}")
    if layout == "asm" and size % run:
      raise arguments.bad(
          function, k_name, arguments.describe(k_cache),
          f"pages of a multiple of {run} tokens with layout {layout}")
  for i, ((name, cache), rows) in enumerate(zip(caches, (key, value))):
    _check_shape(function, name, cache, _cache_shape(
        layout, i, k_cache, size, heads, rows.shape[2]), meaning)
  if len(caches) == 1 and key.shape != value.shape:
    raise arguments.bad(function, "value", arguments.describe(value),
                        f"shape {list(key.shape)}: {meaning}")


def _mode(function: str, cache, rows) -> str:
  """How rows come into a cache: "copy" or "cast"."""
  to, given = jnp.dtype(cache.dtype).name, jnp.dtype(rows.dtype).name
  if to == given or (to in _FLOATS and given in _FLOATS):
    return "copy"
  if given in _FLOATS:
    return "cast"
  raise arguments.bad(function, "dtype of the cache", to,
                      f"{given}, which is what it is given", TypeError)


def static_scale(function: str, name: str, scale, mode: str, heads: int, like):
  """A scale of dequantisation as float32 [1] or [heads], or None."""
  if scale is None:
    return None
  if mode == "copy":
    raise arguments.bad(function, name, "given",
                        f"None with a cache of {jnp.dtype(like.dtype).name} "
                        "that keeps numbers as they are")
  scale = jnp.asarray(arguments.operand(function, name, scale))
  if scale.dtype.name not in (*_FLOATS, "float64"):
    raise arguments.bad(function, f"{name}'s dtype", scale.dtype,
                        " or ".join(_FLOATS), TypeError)
  if scale.shape not in ((), (1,), (heads,)):
    raise arguments.bad(function, name, arguments.describe(scale),
                        f"shape [], [1] or [{heads}], one a head")
  return scale.astype(jnp.float32).reshape(-1)


@functools.partial(jax.jit, static_argnums=(0, 1), inline=True)
def _write(function: str, cfg: Config, operands: Operands):
  """op.write of checked arguments, as a tuple without what is absent."""
  @arguments.no_gradient(function, _NO_GRADIENT)
  def run(operands):
    out = op.write(cfg, vary_together(operands))
    return tuple(t for t in out if t is not None)

  return run(operands)


def _store(function: str, layout: str, page_size: int, key, value, k_cache,
           v_cache, slots, k_scale, v_scale, **config):
  """"copy" or "cast" of checked rows into checked caches."""
  mode = _mode(function, k_cache, key)
  heads = key.shape[1]
  k_scale = static_scale(function, "k_scale", k_scale, mode, heads, k_cache)
  v_scale = static_scale(function, "v_scale", v_scale, mode, heads, k_cache)
  kind = jnp.dtype(k_cache.dtype).name if mode == "cast" else ""
  if mode == "copy":
    key = key.astype(k_cache.dtype)
    value = None if value is None else value.astype(k_cache.dtype)
  cfg = Config(layout, page_size, mode, kind, **config)
  return _write(function, cfg, Operands(
      k_cache, v_cache, k_scale, v_scale, key, value, slots))


# -----------------------------------------------------------------------------
# Keys and values


def write_kv_cache(
    key: jax.Array,
    value: jax.Array,
    k_cache: jax.Array,
    v_cache: jax.Array | None,
    slot_mapping: jax.Array,
    *,
    layout: str = "NHD",
    k_scale: jax.Array | float | None = None,
    v_scale: jax.Array | float | None = None,
) -> tuple[jax.Array, ...]:
  """Stores tokens' keys and values in a paged cache.

  With `x` elements in 16 bytes of the caches, their shapes are by layout

    "NHD"          [pages, page_size, heads, d] of both
    "HND"          [pages, heads, page_size, d] of both
    "x"            K [pages, heads, d / x, page_size, x],
                   V [pages, heads, d, page_size]
    "asm"          K as "x", V [pages, heads, page_size / x, d, x]
    "interleaved"  one cache [pages, page_size, heads, 2, d]; v_cache is None

  "x" and "asm" are AITER's and vLLM's; [pages, page_size, 2 * heads, d] with
  head h of K at 2h is "interleaved", reshaped.

  A cache of 8-bit numbers takes `key / k_scale`, divided in float32 as IEEE 754
  has it and rounded to nearest, ties to even; what is beyond the format becomes
  its largest number, infinities too, and NaN stays (0 in int8). Caches of other
  floats take numbers as they are, rounded to their dtype; so does any cache of
  key's own dtype.

  Args:
    key: [tokens, heads, d], float16, bfloat16, float32 or the caches' dtype.
    value: [tokens, heads, d of V], key's dtype.
    k_cache: float16, bfloat16, float32, float8_e4m3fn, float8_e4m3fnuz,
      float8_e5m2 or int8. Donate it.
    v_cache: likewise, k_cache's dtype.
    slot_mapping: integers [tokens].
    layout: as above.
    k_scale: scale of dequantisation, float [], [1] or [heads]; 1 by default.
      Only for a cache that quantises.
    v_scale: likewise.

  Returns:
    (k_cache, v_cache); of "interleaved" (k_cache,).

  Raises:
    TypeError: an argument of the wrong type or dtype.
    ValueError: a shape or value that cannot be; the message names it.
  """
  return _write_kv("write_kv_cache", key, value, k_cache, v_cache,
                   slot_mapping, layout, k_scale, v_scale)


def _write_kv(function, key, value, k_cache, v_cache, slot_mapping, layout,
              k_scale, v_scale):
  arguments.choice(function, "layout", layout, _LAYOUTS)
  _check_rows(function, ("key", "value"), key, value)
  caches = [("k_cache", k_cache)]
  if len(op.LAYOUTS[layout]) > 1:
    caches.append(("v_cache", v_cache))
  elif v_cache is not None:
    raise arguments.bad(function, "v_cache", "given",
                        f"None with layout {layout}")
  check_caches(function, layout, key, value, caches)
  slots = _integers(function, "slot_mapping", slot_mapping, 1)
  _check_shape(function, "slot_mapping", slots, key.shape[:1], "a slot a token")
  return _store(function, layout, op.page_size(layout, k_cache), key, value,
                k_cache, v_cache, slots, k_scale, v_scale)


def reshape_and_cache_flash(
    key: jax.Array,
    value: jax.Array,
    k_cache: jax.Array,
    v_cache: jax.Array,
    slot_mapping: jax.Array,
    *,
    k_scale: jax.Array | float | None = None,
    v_scale: jax.Array | float | None = None,
) -> tuple[jax.Array, jax.Array]:
  """`write_kv_cache` of layout "NHD", under AITER's and vLLM's name."""
  return _write_kv("reshape_and_cache_flash", key, value, k_cache, v_cache,
                   slot_mapping, "NHD", k_scale, v_scale)


def reshape_and_cache(
    key: jax.Array,
    value: jax.Array,
    k_cache: jax.Array,
    v_cache: jax.Array,
    slot_mapping: jax.Array,
    *,
    k_scale: jax.Array | float | None = None,
    v_scale: jax.Array | float | None = None,
    asm_layout: bool = False,
) -> tuple[jax.Array, jax.Array]:
  """`write_kv_cache` of layout "x" or, so told, "asm", under AITER's name."""
  function = "reshape_and_cache"
  asm = arguments.flag(function, "asm_layout", asm_layout)
  return _write_kv(function, key, value, k_cache, v_cache, slot_mapping,
                   "asm" if asm else "x", k_scale, v_scale)


def append_kv(
    k_new: jax.Array,
    v_new: jax.Array,
    slot_mapping: jax.Array,
    k_pool: jax.Array,
    v_pool: jax.Array,
    *,
    k_scale: jax.Array | float | None = None,
    v_scale: jax.Array | float | None = None,
    kv_cache_dtype: str = "auto",
) -> tuple[jax.Array, jax.Array]:
  """`write_kv_cache` of layout "NHD", under jax-aiter's name.

  Args:
    k_new: key.
    v_new: value.
    slot_mapping: as there.
    k_pool: k_cache.
    v_pool: v_cache.
    k_scale: as there.
    v_scale: as there.
    kv_cache_dtype: "auto", which is the pools' own, its name, or "fp8".

  Returns:
    (k_pool, v_pool).

  Raises:
    TypeError: as write_kv_cache.
    ValueError: as write_kv_cache.
  """
  function = "append_kv"
  arguments.check_cache_kind(function, "k_pool", k_pool, kv_cache_dtype)
  return _write_kv(function, k_new, v_new, k_pool, v_pool, slot_mapping, "NHD",
                   k_scale, v_scale)


def kv_cache_update(
    new_kv: jax.Array,
    slices: jax.Array,
    kv_cache: jax.Array,
    num_slices: jax.Array | None = None,
    *,
    page_size: int | None = None,
) -> jax.Array:
  """Copies runs of tokens into a cache, under tpu-inference's name.

  For each of the first `num_slices` columns (dst, src, length) of slices,
  `kv_cache[dst:dst + length] = new_kv[src:src + length]`, where the cache's
  tokens count through its pages. If a token is of several runs, the largest
  place counts.

  Args:
    new_kv: [tokens, 2 * heads, d], K of head h at 2h and V behind it.
    slices: int32 [3, n].
    kv_cache: [slots, 2 * heads, d] or [pages, page_size, 2 * heads, d], in
      new_kv's dtype. Donate it.
    num_slices: int32 [] or [1]; n by default.
    page_size: tokens of a page; is checked, and changes nothing.

  Returns:
    kv_cache.

  Raises:
    TypeError: as write_kv_cache.
    ValueError: as write_kv_cache.
  """
  function = "kv_cache_update"
  _check(function, "new_kv", new_kv, (*_FLOATS, *_BYTES), 3)
  arguments.check_is_array(function, "kv_cache", kv_cache, optional=False)
  if (kv_cache.ndim not in (3, 4)
      or kv_cache.shape[-2:] != new_kv.shape[-2:]):
    raise arguments.bad(function, "kv_cache", arguments.describe(kv_cache),
                        f"shape [slots, ...] or [pages, page_size, ...] with "
                        f"{list(new_kv.shape[1:])}, as new_kv")
  if kv_cache.dtype != new_kv.dtype:
    raise arguments.bad(function, "kv_cache's dtype", kv_cache.dtype,
                        f"{new_kv.dtype}, as new_kv", TypeError)
  slices = _integers(function, "slices", slices, 2)
  if slices.shape[0] != 3:
    raise arguments.bad(function, "slices", arguments.describe(slices),
                        "shape [3, n]")
  if page_size is not None:
    arguments.number(
        function, "page_size", page_size,
        "an integer >= 1, and of a cache of pages theirs",
        lambda n: n >= 1 and (kv_cache.ndim == 3 or n == kv_cache.shape[1]),
        int)
  count = slices.shape[1]
  if num_slices is not None:
    num_slices = jnp.asarray(
        arguments.operand(function, "num_slices", num_slices))
    if num_slices.shape not in ((), (1,)) or not jnp.issubdtype(
        num_slices.dtype, jnp.integer):
      raise arguments.bad(function, "num_slices",
                          arguments.describe(num_slices),
                          "an integer of shape [] or [1]")
    count = num_slices.reshape(())
  dst, src, length = slices
  token = jnp.arange(new_kv.shape[0], dtype=jnp.int32)[:, None]
  inside = (token >= src) & (token - src < length) & (
      jnp.arange(slices.shape[1]) < count)
  slots = jnp.max(jnp.where(inside, dst + (token - src), -1), 1, initial=-1)
  pages = kv_cache if kv_cache.ndim == 4 else kv_cache[:, None]
  out, = _store(function, "NHD", pages.shape[1], new_kv, None, pages, None,
                slots, None, None)
  return out.reshape(kv_cache.shape)


# -----------------------------------------------------------------------------
# Scales that are found


def _quantised(function, key, value, k_cache, v_cache, k_scales, v_scales,
               slot_mapping, asm_layout, scale_shape, block):
  """Both kinds of quantised writes.

  Args:
    scale_shape: (pages, page_size, heads) -> the shape of an array of scales,
      whose heads are first or second.
    block: page_size -> slots that share a scale; None for one a token.
  """
  layout = "asm" if arguments.flag(function, "asm_layout", asm_layout) else "x"
  _check_rows(function, ("key", "value"), key, value)
  if key.dtype.name not in _FLOATS:
    raise arguments.bad(function, "key's dtype", key.dtype,
                        " or ".join(_FLOATS), TypeError)
  check_caches(function, layout, key, value,
                [("k_cache", k_cache), ("v_cache", v_cache)])
  kind = jnp.dtype(k_cache.dtype).name
  if kind not in _BYTES:
    raise arguments.bad(function, "k_cache's dtype", kind, " or ".join(_BYTES),
                        TypeError)
  pages, size, heads = k_cache.shape[0], k_cache.shape[3], key.shape[1]
  shape = scale_shape(pages, size, heads)
  for name, t in (("k_dequant_scales", k_scales),
                  ("v_dequant_scales", v_scales)):
    _check(function, name, t, ("float32",), len(shape))
    _check_shape(function, name, t, shape, f"asm_layout is {layout == 'asm'}")
  slots = _integers(function, "slot_mapping", slot_mapping, 1)
  _check_shape(function, "slot_mapping", slots, key.shape[:1], "a slot a token")
  cfg = Config(layout, size, "block" if block else "token", kind,
               block=block or 0, heads_first=layout == "x")
  return _write(function, cfg, Operands(
      k_cache, v_cache, k_scales, v_scales, key, value, slots))


def reshape_and_cache_with_pertoken_quant(
    key: jax.Array,
    value: jax.Array,
    k_cache: jax.Array,
    v_cache: jax.Array,
    k_dequant_scales: jax.Array,
    v_dequant_scales: jax.Array,
    slot_mapping: jax.Array,
    *,
    asm_layout: bool = False,
) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
  """Stores keys and values with a scale for each token and head.

  The numbers of a token's head are those of `per_token_quant`: scale =
  max(amax, 1e-10) / largest. Scales of tokens that are skipped stay.

  Args:
    key: [tokens, heads, d], float16, bfloat16 or float32.
    value: [tokens, heads, d of V].
    k_cache: int8 or float8, layout "x" or "asm" of `write_kv_cache`. Donate it.
    v_cache: likewise.
    k_dequant_scales: float32 [heads, pages * page_size]; with asm_layout
      [pages, heads, page_size]. Donate it.
    v_dequant_scales: likewise.
    slot_mapping: integers [tokens].
    asm_layout: caches are of layout "asm".

  Returns:
    (k_cache, v_cache, k_dequant_scales, v_dequant_scales).

  Raises:
    TypeError: as write_kv_cache.
    ValueError: as write_kv_cache.
  """
  shape = lambda pages, size, heads: (
      (pages, heads, size) if asm_layout else (heads, pages * size))
  return _quantised("reshape_and_cache_with_pertoken_quant", key, value,
                    k_cache, v_cache, k_dequant_scales, v_dequant_scales,
                    slot_mapping, asm_layout, shape, None)


def _block_quantised(function, key, value, k_cache, v_cache, k_scales,
                     v_scales, slot_mapping, asm_layout, block):
  arguments.check_is_array(function, "key", key, optional=False)
  arguments.check_is_array(function, "k_cache", k_cache, optional=False)
  if k_cache.ndim != 5:
    raise arguments.bad(function, "k_cache", arguments.describe(k_cache),
                        "an array of rank 5")
  pages, size = k_cache.shape[0], k_cache.shape[3]
  block = block or size
  if size < 1 or block % size or pages * size % block:
    raise arguments.bad(
        function, "k_cache", arguments.describe(k_cache),
        f"pages that fill blocks of {max(block, 1)} slots")
  def shape(pages, size, heads):
    blocks = pages * size // block
    return (blocks, heads) if asm_layout else (heads, blocks)
  return _quantised(function, key, value, k_cache, v_cache, k_scales, v_scales,
                    slot_mapping, asm_layout, shape, block)


def reshape_and_cache_with_block_quant(
    key: jax.Array,
    value: jax.Array,
    k_cache: jax.Array,
    v_cache: jax.Array,
    k_dequant_scales: jax.Array,
    v_dequant_scales: jax.Array,
    slot_mapping: jax.Array,
    *,
    asm_layout: bool = False,
) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
  """Stores keys and values with a scale for each page and head.

  A call finds `scale = max(amax, 1e-10) / largest` of all tokens that it writes
  into a page. If one of them is the page's first, the page starts anew: that is
  its scale, and what else it held has no meaning. Else the larger one of this
  scale and the page's counts; if it is the new one, what the page holds is
  rounded anew, `round(number * old / new)` with each step in float32. All new
  tokens are rounded once, with the final scale.

  So a result does not depend on the order of a call's tokens. AITER's kernel
  writes them one after another, and rounds again what the same call wrote
  before: numbers then differ by a step, and scales do not.

  Args:
    key: [tokens, heads, d], float16, bfloat16 or float32.
    value: [tokens, heads, d of V].
    k_cache: int8 or float8, layout "x" or "asm" of `write_kv_cache`. Donate it.
    v_cache: likewise.
    k_dequant_scales: float32 [heads, pages]; with asm_layout [pages, heads].
      Donate it.
    v_dequant_scales: likewise.
    slot_mapping: integers [tokens]. Of a slot that is given twice the
      last token counts.
    asm_layout: caches are of layout "asm".

  Returns:
    (k_cache, v_cache, k_dequant_scales, v_dequant_scales).

  Raises:
    TypeError: as write_kv_cache.
    ValueError: as write_kv_cache.
  """
  return _block_quantised(
      "reshape_and_cache_with_block_quant", key, value, k_cache, v_cache,
      k_dequant_scales, v_dequant_scales, slot_mapping, asm_layout, None)


def reshape_and_cache_with_block_quant_for_asm_pa(
    key: jax.Array,
    value: jax.Array,
    k_cache: jax.Array,
    v_cache: jax.Array,
    k_dequant_scales: jax.Array,
    v_dequant_scales: jax.Array,
    slot_mapping: jax.Array,
    *,
    asm_layout: bool = True,
    ori_block_size: int = 128,
) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
  """`reshape_and_cache_with_block_quant` of blocks of several pages.

  A scale is for `ori_block_size` slots, of neighbouring pages; of these blocks
  there are pages * page_size / ori_block_size.

  Args:
    key: as there.
    value: as there.
    k_cache: as there.
    v_cache: as there.
    k_dequant_scales: float32 [heads, blocks]; with asm_layout [blocks, heads].
    v_dequant_scales: likewise.
    slot_mapping: as there.
    asm_layout: as there.
    ori_block_size: 128 or 256.

  Returns:
    (k_cache, v_cache, k_dequant_scales, v_dequant_scales).

  Raises:
    TypeError: as write_kv_cache.
    ValueError: as write_kv_cache.
  """
  function = "reshape_and_cache_with_block_quant_for_asm_pa"
  block = arguments.number(function, "ori_block_size", ori_block_size,
                           "128 or 256", lambda n: n in (128, 256), int)
  return _block_quantised(
      function, key, value, k_cache, v_cache, k_dequant_scales,
      v_dequant_scales, slot_mapping, asm_layout, block)


# -----------------------------------------------------------------------------
# Latent caches and the indexer's


def _mla(function, kv_c, k_pe, slot_mapping, scale):
  for name, t in (("kv_c", kv_c), ("k_pe", k_pe)):
    _check(function, name, t, (*_FLOATS, *_BYTES), 2)
  if kv_c.dtype != k_pe.dtype or kv_c.shape[0] != k_pe.shape[0]:
    raise arguments.bad(function, "k_pe", arguments.describe(k_pe),
                        f"{kv_c.dtype}[{kv_c.shape[0]}, cols], as kv_c")
  slots = _integers(function, "slot_mapping", slot_mapping, 1)
  _check_shape(function, "slot_mapping", slots, kv_c.shape[:1],
               "a slot a token")
  if scale is not None:
    scale = jnp.asarray(arguments.operand(function, "scale", scale))
    if scale.size != 1:
      raise arguments.bad(function, "scale", arguments.describe(scale),
                          "shape [] or [1]")
  return slots, scale


def concat_and_cache_mla(
    kv_c: jax.Array,
    k_pe: jax.Array,
    kv_cache: jax.Array,
    slot_mapping: jax.Array,
    *,
    scale: jax.Array | float | None = None,
) -> jax.Array:
  """Stores latent vectors and their rotated keys, side by side.

  Args:
    kv_c: [tokens, lora], dtypes as key of `write_kv_cache`.
    k_pe: [tokens, rope].
    kv_cache: [pages, page_size, lora + rope], or wider: rope is then behind
      lora rounded up to a multiple of 128, as tpu-inference has it with 640
      columns for 512 and 64. Dtypes as there. Donate it.
    slot_mapping: integers [tokens].
    scale: as k_scale there, of both; [] or [1].

  Returns:
    kv_cache.

  Raises:
    TypeError: as write_kv_cache.
    ValueError: as write_kv_cache.
  """
  function = "concat_and_cache_mla"
  slots, scale = _mla(function, kv_c, k_pe, slot_mapping, scale)
  _check(function, "kv_cache", kv_cache, (*_FLOATS, *_BYTES), 3)
  lora, rope = kv_c.shape[1], k_pe.shape[1]
  width = kv_cache.shape[2]
  first = lora if width == lora + rope else -(-lora // 128) * 128
  if first + rope > width:
    raise arguments.bad(
        function, "kv_cache", arguments.describe(kv_cache),
        f"{lora + rope} columns, or at least "
        f"{-(-lora // 128) * 128 + rope}")
  out, = _store(function, "mla", kv_cache.shape[1], kv_c[:, None],
                k_pe[:, None], kv_cache, None, slots, scale, scale,
                value_col=first)
  return out


def concat_and_cache_mla_seg(
    kv_c: jax.Array,
    k_pe: jax.Array,
    kv_cache: jax.Array,
    slot_mapping: jax.Array,
    *,
    page_size: int,
    scale: jax.Array | float | None = None,
) -> jax.Array:
  """`concat_and_cache_mla` with all latent vectors of a page in front.

  Args:
    kv_c: as there.
    k_pe: as there.
    kv_cache: [pages, page_size * (lora + rope)]: a page's latent vectors
      [page_size, lora], then its rotated keys [page_size, rope]. Donate it.
    slot_mapping: as there.
    page_size: tokens of a page.
    scale: as there.

  Returns:
    kv_cache.

  Raises:
    TypeError: as write_kv_cache.
    ValueError: as write_kv_cache.
  """
  function = "concat_and_cache_mla_seg"
  slots, scale = _mla(function, kv_c, k_pe, slot_mapping, scale)
  size = arguments.number(function, "page_size", page_size, "an integer >= 1",
                          lambda n: n >= 1, int)
  _check(function, "kv_cache", kv_cache, (*_FLOATS, *_BYTES), 2)
  _check_shape(function, "kv_cache", kv_cache, (
      kv_cache.shape[0], size * (kv_c.shape[1] + k_pe.shape[1])),
      f"pages of {size} tokens")
  out, = _store(function, "mla_seg", size, kv_c[:, None], k_pe[:, None],
                kv_cache, None, slots, scale, scale)
  return out


def _indexer(function, head_dim, kv_cache, quant_block_size, preshuffle,
             quant_dtype):
  """(kind, groups of a token, layout) of an indexer's cache."""
  _check(function, "kv_cache", kv_cache, ("uint8",), 3)
  accepted = ("float8_e4m3fn", "float8_e4m3fnuz")
  kind = arguments.dtype_name(
      function, "quant_dtype", accepted[0] if quant_dtype is None
      else quant_dtype, accepted)
  size = arguments.number(
      function, "quant_block_size", quant_block_size,
      f"a multiple of 16 that divides {head_dim}",
      lambda n: n > 0 and n % 16 == 0 and head_dim % n == 0, int)
  groups = head_dim // size
  if kv_cache.shape[2] != head_dim + 4 * groups:
    raise arguments.bad(
        function, "kv_cache", arguments.describe(kv_cache),
        f"{head_dim + 4 * groups} columns: {head_dim} bytes and {groups} "
        "scales of four")
  tiles = arguments.flag(function, "preshuffle", preshuffle)
  if tiles and kv_cache.shape[1] % 16:
    raise arguments.bad(function, "kv_cache", arguments.describe(kv_cache),
                        "pages of a multiple of 16 tokens with preshuffle")
  return kind, groups, "indexer_tiles" if tiles else "indexer"


def indexer_k_quant_and_cache(
    k: jax.Array,
    kv_cache: jax.Array,
    slot_mapping: jax.Array,
    *,
    quant_block_size: int = 128,
    scale_fmt: str | None = None,
    preshuffle: bool = False,
    quant_dtype: Any = None,
) -> jax.Array:
  """Stores the keys of DeepSeek's indexer in float8 with their scales.

  A page has first its tokens' bytes, [page_size, d], or with `preshuffle` tiles
  of 16 tokens by 16 bytes, [page_size / 16, d / 16, 16, 16]; then their float32
  scales, [page_size, d / quant_block_size]. A scale is
  `max(amax, 1e-4) / largest`, in float32, for quant_block_size neighbours.

  Args:
    k: [tokens, d], float16, bfloat16 or float32.
    kv_cache: uint8 [pages, page_size, d + 4 * d / quant_block_size]. Donate it.
    slot_mapping: integers [tokens].
    quant_block_size: a multiple of 16 that divides d.
    scale_fmt: "ue8m0" for scales that are powers of two, the least not smaller
      than the quotient above; None for the quotient.
    preshuffle: as above.
    quant_dtype: float8_e4m3fn, the default, or float8_e4m3fnuz.

  Returns:
    kv_cache.

  Raises:
    TypeError: as write_kv_cache.
    ValueError: as write_kv_cache.
  """
  function = "indexer_k_quant_and_cache"
  _check(function, "k", k, _FLOATS, 2)
  kind, groups, layout = _indexer(function, k.shape[1], kv_cache,
                                  quant_block_size, preshuffle, quant_dtype)
  arguments.choice(function, "scale_fmt", scale_fmt, (None, "ue8m0"))
  slots = _integers(function, "slot_mapping", slot_mapping, 1)
  _check_shape(function, "slot_mapping", slots, k.shape[:1], "a slot a token")
  pages, size, width = kv_cache.shape
  cfg = Config(layout, size, "token", kind, floor=op.INDEXER_FLOOR,
               power=scale_fmt is not None)
  out, = _write(function, cfg, Operands(
      kv_cache.reshape(pages, size * width), None, None, None,
      k.reshape(-1, groups, k.shape[1] // groups), None, slots))
  return out.reshape(kv_cache.shape)


# -----------------------------------------------------------------------------
# Pages to dense, and pages to pages


def _gathered_slots(function, block_table, cu_seq_lens, total_tokens, pages,
                    size):
  """The slot of each token of packed sequences; -1 behind the last one."""
  table = _integers(function, "block_table", block_table, 2)
  cu = _integers(function, "cu_seq_lens", cu_seq_lens, 1)
  _check_shape(function, "cu_seq_lens", cu, (table.shape[0] + 1,),
               "a bound more than rows of block_table")
  arguments.check_cumulative(function, "cu_seq_lens", cu_seq_lens, None)
  total = arguments.number(function, "total_tokens", total_tokens,
                           "an integer >= 0", lambda n: n >= 0, int)
  token = jnp.arange(total, dtype=jnp.int32)
  sequence = last_start(cu, token)
  at = token - cu.at[sequence].get(mode="clip")
  page = take(table, (sequence, at // size), -1)
  inside = (sequence >= 0) & (token < cu[-1]) & (page >= 0) & (page < pages)
  return jnp.where(inside, page * size + at % size, -1)


def gather_kv_cache(
    k_cache: jax.Array,
    v_cache: jax.Array | None,
    block_table: jax.Array,
    cu_seq_lens: jax.Array,
    *,
    total_tokens: int,
    layout: str = "NHD",
) -> tuple[jax.Array, jax.Array]:
  """Keys and values of packed sequences, out of their pages.

  In jax.numpy: XLA's gather, which it fuses with what follows, such as a
  product with scales.

  Args:
    k_cache: by its layout, as `write_kv_cache`.
    v_cache: likewise.
    block_table: integers [sequences, n], the pages of each.
    cu_seq_lens: integers [sequences + 1], where each begins in the
      result: 0 first, and in order.
    total_tokens: tokens of the result, known while tracing.
    layout: as there.

  Returns:
    (k, v), [total_tokens, heads, d] each in the caches' dtype; 0 behind the
    last sequence, and where its table names no page.

  Raises:
    TypeError: as write_kv_cache.
    ValueError: as write_kv_cache.
  """
  function = "gather_kv_cache"
  arguments.choice(function, "layout", layout, _LAYOUTS)
  names = op.LAYOUTS[layout]
  caches = [k_cache] if len(names) == 1 else [k_cache, v_cache]
  for name, cache, dims in zip(("k_cache", "v_cache"), caches, names):
    _check(function, name, cache, (*_FLOATS, *_BYTES), len(dims))
  pages, size = k_cache.shape[0], op.page_size(layout, k_cache)
  slots = _gathered_slots(function, block_table, cu_seq_lens, total_tokens,
                          pages, size)
  page = jnp.where(slots < 0, pages, slots // size)
  offset = slots % size

  out = [op.tokens_of(dims, cache, page, offset)
         for cache, dims in zip(caches, names)]
  if len(out) == 1:  # [tokens, heads, 2, d]
    return out[0][:, :, 0], out[0][:, :, 1]
  return tuple(out)


def cp_gather_indexer_k_quant_cache(
    kv_cache: jax.Array,
    block_table: jax.Array,
    cu_seq_lens: jax.Array,
    *,
    total_tokens: int,
    head_dim: int,
    quant_block_size: int = 128,
    preshuffle: bool = False,
    quant_dtype: Any = None,
) -> tuple[jax.Array, jax.Array]:
  """The indexer's keys of packed sequences, out of their pages.

  Args:
    kv_cache: as `indexer_k_quant_and_cache` returns it.
    block_table: as in `gather_kv_cache`.
    cu_seq_lens: as there.
    total_tokens: as there.
    head_dim: columns d of a key.
    quant_block_size: as it was written.
    preshuffle: as it was written.
    quant_dtype: as it was written.

  Returns:
    (k, scale): float8 [total_tokens, d] and float32 [total_tokens,
    d / quant_block_size]; 0 behind the last sequence.

  Raises:
    TypeError: as write_kv_cache.
    ValueError: as write_kv_cache.
  """
  function = "cp_gather_indexer_k_quant_cache"
  head_dim = arguments.number(function, "head_dim", head_dim,
                              "an integer >= 1", lambda n: n >= 1, int)
  kind, groups, layout = _indexer(function, head_dim, kv_cache,
                                  quant_block_size, preshuffle, quant_dtype)
  pages, size, width = kv_cache.shape
  slots = _gathered_slots(function, block_table, cu_seq_lens, total_tokens,
                          pages, size)
  flat = jnp.asarray(kv_cache).reshape(pages, size * width)
  page = jnp.where(slots < 0, pages, slots // size)[:, None]
  offset = (slots % size)[:, None]
  col = jnp.arange(head_dim)
  if layout == "indexer_tiles":
    at = (offset // 16 * 16 * head_dim + offset % 16 * 16
          + col // 16 * 256 + col % 16)
  else:
    at = offset * head_dim + col
  at_page = lambda at: take(flat, (page, at), 0)
  scale = at_page(
      size * head_dim + offset * 4 * groups + jnp.arange(4 * groups))
  return (lax.bitcast_convert_type(at_page(at), op.KINDS[kind].dtype),
          lax.bitcast_convert_type(scale.reshape(-1, groups, 4), jnp.float32))


def swap_blocks(
    src: jax.Array,
    dst: jax.Array,
    block_mapping: jax.Array,
) -> jax.Array:
  """Copies pages of one cache into another.

  Args:
    src: [pages, ...], any layout whose pages are first.
    dst: [pages of dst, ...], src's dtype and pages. Donate it.
    block_mapping: integers [n, 2]: a page of src, and the one of dst that
      it goes to. A pair that names none is skipped.

  Returns:
    dst.

  Raises:
    TypeError: as write_kv_cache.
    ValueError: as write_kv_cache.
  """
  out, = _copy_pages("swap_blocks", (src,), (dst,), block_mapping)
  return out


def copy_blocks(
    k_caches: Any,
    v_caches: Any,
    block_mapping: jax.Array,
) -> tuple[Any, Any]:
  """Copies pages inside caches, as when a sequence is continued twice.

  All pages are read before one is written.

  Args:
    k_caches: [pages, ...], or a sequence of such, one a layer. Donate them.
    v_caches: likewise, as many.
    block_mapping: as in swap_blocks.

  Returns:
    (k_caches, v_caches); lists if sequences were given.

  Raises:
    TypeError: as write_kv_cache.
    ValueError: as write_kv_cache.
  """
  function = "copy_blocks"
  if isinstance(k_caches, (list, tuple)) != isinstance(
      v_caches, (list, tuple)) or (isinstance(k_caches, (list, tuple))
                                   and len(k_caches) != len(v_caches)):
    raise arguments.bad(function, "v_caches", f"a {type(v_caches).__name__}",
                        "as many caches as k_caches", TypeError)
  if not isinstance(k_caches, (list, tuple)):
    pair = (k_caches, v_caches)
    return _copy_pages(function, pair, pair, block_mapping)
  pairs = [_copy_pages(function, pair, pair, block_mapping)
           for pair in zip(k_caches, v_caches)]
  return [k for k, _ in pairs], [v for _, v in pairs]


def _copy_pages(function, sources, pools, block_mapping):
  """The pools with some pages of the sources: one array each, or K and V."""
  named = ("src", "dst") if function == "swap_blocks" else ("k_caches",) * 2
  for i, (source, pool) in enumerate(zip(sources, pools)):
    names = named if i == 0 else ("v_caches",) * 2
    for name, t in zip(names, (source, pool)):
      _check(function, name, t, (*_FLOATS, *_BYTES, "uint8"),
             max(getattr(t, "ndim", 2), 2))
    if source.dtype != pool.dtype or source.shape[1:] != pool.shape[1:]:
      raise arguments.bad(function, names[1], arguments.describe(pool),
                          f"pages as {arguments.describe(source)} has them")
    if source.shape[0] != sources[0].shape[0]:
      raise arguments.bad(function, names[0], arguments.describe(source),
                          f"{sources[0].shape[0]} pages, as k_caches")
  pairs = _integers(function, "block_mapping", block_mapping, 2)
  if pairs.shape[1] != 2:
    raise arguments.bad(function, "block_mapping", arguments.describe(pairs),
                        "shape [n, 2]")
  if pairs.shape[0] == 0 or 0 in sources[0].shape:
    return pools
  page, to = pairs[:, 0], pairs[:, 1]
  to = jnp.where((page >= 0) & (page < sources[0].shape[0]), to, -1)
  rows = [jnp.asarray(t).at[page].get(mode="clip") for t in sources]
  together = len(rows) == 1 or pools[0].dtype == pools[1].dtype
  groups = [range(len(rows))] if together else [(0,), (1,)]
  out = []
  for group in groups:
    k, v = (*[pools[i] for i in group], None)[:2]
    key, value = (*[rows[i] for i in group], None)[:2]
    out += _write(function, Config("pages", 1), Operands(
        k, v, None, None, key, value, to))
  return tuple(out)
