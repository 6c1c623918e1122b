# SPDX-License-Identifier: Apache-2.0
"""Writes into paged KV caches as an operator: formulas, kernels, transforms.

A cache is a pool of pages, each of `page_size` tokens; a slot is a token's
place in it, `page * page_size + offset`. Where a token's numbers lie in their
page differs by layout, but is always an affine function: a Side. It is all
that the formula and the kernels know of a layout.
"""

from __future__ import annotations

import functools
import math
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np

import jax
from jax import lax
from jax._src.aiter.core import rounding
from jax._src.aiter.core.dims import take
from jax._src.aiter.core.dispatch import absent, like
from jax._src.aiter.core.operator import Key, operator, with_axis
from jax._src.aiter.core.partition import axes_of_arguments

# Columns that lie together in every layout: those of 16 bytes.
_RUN_BYTES = 16
E5M2 = rounding.Kind(jnp.dtype(jnp.float8_e5m2), 57344.0, 2, 15, 0x7B, 0x7F)
# What a cache of bytes may hold.
KINDS = {"int8": rounding.INT8, "float8_e4m3fn": rounding.E4M3FN,
         "float8_e4m3fnuz": rounding.E4M3FNUZ, "float8_e5m2": E5M2}
# An indexer's scale is that of a largest magnitude of at least this.
INDEXER_FLOOR = 1e-4

# Layout -> names of the dimensions of K's cache and, if it is another, V's. A
# "run" is of 16 bytes of columns; where there is one, "col" counts inside it.
# Likewise "run_offset" and "offset" of the tokens of a page. A page of "all" is
# divided by _sides alone.
_NHD = ("page", "offset", "head", "col")
_HND = ("page", "head", "offset", "col")
_X = ("page", "head", "run", "offset", "col")
LAYOUTS = {
    "NHD": (_NHD, _NHD),
    "HND": (_HND, _HND),
    "x": (_X, ("page", "head", "col", "offset")),
    "asm": (_X, ("page", "head", "run_offset", "col", "offset")),
    "interleaved": (("page", "offset", "head", "side", "col"),),
    "mla": (("page", "offset", "col"),),
    "mla_seg": (("page", "all"),),
    "indexer": (("page", "all"),),
    "indexer_tiles": (("page", "all"),),
    # Pages as they are: key and value are some, and slots their numbers.
    "pages": ((), ()),
}
_DTYPES = {"float16": "fp16", "bfloat16": "bf16", "float32": "fp32",
           "int8": "i8"}


class Config(NamedTuple):
  """Static facts of a call; hashable.

  Attributes:
    layout: of LAYOUTS.
    page_size: tokens of a page.
    mode: "copy" keeps numbers as they are; "cast" divides them by a given scale
      and rounds; "token" finds a scale for each token and head, "block" one for
      each block of slots and head.
    kind: what "cast", "token" and "block" round to; of KINDS.
    value_col: of "mla", V's first column.
    block: of "block", slots that share a scale.
    heads_first: arrays of scales have the heads before pages or slots.
    floor: the least amax that a scale is of.
    power: scales are powers of two, the least that are not smaller.
  """
  layout: str
  page_size: int
  mode: str = "copy"
  kind: str = ""
  value_col: int = 0
  block: int = 0
  heads_first: bool = False
  floor: float = float(rounding.AMAX_FLOOR)
  power: bool = False


class Operands(NamedTuple):
  """Arrays of a call; an absent one is None.

  Attributes:
    k_cache: [pages, ...] by the layout.
    v_cache: likewise; None if V is in k_cache, or is not.
    k_scale: of a "cast", float32 [1] or [heads]. Of a "token", float32
      [pages, heads, page_size], or [heads, slots]; of a "block",
      [blocks, heads], or [heads, blocks]. None of an indexer, whose scales lie
      in its pages.
    v_scale: likewise.
    key: [tokens, heads, cols].
    value: [tokens, heads, cols of V], or None.
    slots: int32 [tokens].
  """
  k_cache: jax.Array
  v_cache: jax.Array | None
  k_scale: jax.Array | None
  v_scale: jax.Array | None
  key: jax.Array
  value: jax.Array | None
  slots: jax.Array


class Caches(NamedTuple):
  """Results of a call: its caches, and the scales that it writes."""
  k_cache: jax.Array
  v_cache: jax.Array | None
  k_scale: jax.Array | None
  v_scale: jax.Array | None


class Side(NamedTuple):
  """Where K, or V, lies in a cache, in elements of it.

  The element of a token at `offset` of a page, a head and a column is

    start + page * .page + offset // .split * .run_offset
      + offset % .split * .offset + head * .head
      + column // run * .run + column % run * .col

  with a `run` of 16 bytes.
  """
  start: int
  page: int
  run_offset: int
  offset: int
  split: int
  head: int
  run: int
  col: int


class Scales(NamedTuple):
  """Where scales lie: start + page * .page + offset * .offset + head * .head.

  Of a "block", .page is the step from block to block, and .offset is 0.
  """
  start: int
  page: int
  offset: int
  head: int


def run_of(cache) -> int:
  """Elements of 16 bytes."""
  return _RUN_BYTES // cache.dtype.itemsize


def page_size(layout: str, k_cache) -> int:
  """Tokens of a page, of a layout that tells."""
  return dict(zip(LAYOUTS[layout][0], k_cache.shape))["offset"]


def side_of(names, cache, start: int = 0) -> Side:
  """The Side of a cache whose dimensions have these names."""
  sizes, strides, stride = {}, {}, 1
  for name, size in zip(reversed(names), reversed(cache.shape)):
    sizes[name], strides[name] = size, stride
    stride *= size
  col, offset = strides["col"], strides["offset"]
  whole = "run_offset" not in names
  return Side(
      start, strides["page"], offset if whole else strides["run_offset"],
      0 if whole else offset, 1 if whole else sizes["offset"],
      strides.get("head", 0), strides.get("run", run_of(cache) * col), col)


def tokens_of(names, cache, page, offset):
  """Tokens [tokens, ...] of a cache whose dimensions have these names.

  Zeros of a page past the end; the other dimensions are in their order, runs
  of columns joined.
  """
  run = cache.shape[-1]
  index = {"page": page, "offset": offset}
  if "run_offset" in names:
    index = {"page": page, "run_offset": offset // run, "offset": offset % run}
  t = take(
      cache, tuple(index.get(name, slice(None)) for name in names), 0)
  if names[0] == "head":
    t = jnp.swapaxes(t, 0, 1)
  # Advanced indices apart from each other come to the front.
  return t.reshape(*t.shape[:2], -1) if "run" in names else t


def sides(cfg: Config, operands: Operands) -> tuple[Side, Side | None]:
  """Where K and V lie."""
  cache, key, value = operands.k_cache, operands.key, operands.value
  names = LAYOUTS[cfg.layout]
  run, heads, cols = run_of(cache), key.shape[1], key.shape[2]
  if cfg.layout == "mla_seg":
    page = cache.shape[1]
    segment = lambda start, n: Side(start, page, n, 0, 1, 0, run, 1)
    return (segment(0, cols),
            segment(cfg.page_size * cols, value.shape[2]))
  if cfg.layout == "indexer":
    return Side(0, cache.shape[1], heads * cols, 0, 1, cols, run, 1), None
  if cfg.layout == "indexer_tiles":
    # Tiles of 16 tokens by 16 bytes, those of 16 tokens one after another.
    return Side(0, cache.shape[1], 16 * heads * cols, 16, 16, 16 * cols, 256,
                1), None
  k_side = side_of(names[0], cache)
  if value is None:
    return k_side, None
  if operands.v_cache is not None:
    return k_side, side_of(names[1], operands.v_cache)
  # The stride of "side", as a head has both.
  start = cache.shape[-1] if cfg.layout == "interleaved" else cfg.value_col
  return k_side, k_side._replace(start=start)


def scales(cfg: Config, operands: Operands) -> tuple[Scales, Scales]:
  """Where the scales of K and V lie; a given one is the same on all pages."""
  size = cfg.page_size

  def where(scale):
    if cfg.mode in ("copy", "cast"):
      return Scales(0, 0, 0, int(scale is not None and scale.shape[0] > 1))
    if scale is None:
      heads, cols = operands.key.shape[1:]
      # Behind the bytes of the page's tokens, four bytes each.
      return Scales(size * heads * cols // 4, operands.k_cache.shape[-1] // 4,
                    heads, 1)
    if cfg.mode == "block":
      return Scales(0, *((1, 0, scale.shape[1]) if cfg.heads_first
                         else (scale.shape[1], 0, 1)))
    if cfg.heads_first:
      return Scales(0, size, 1, scale.shape[1])
    return Scales(0, scale.shape[1] * size, 1, size)

  return where(operands.k_scale), where(operands.v_scale)


# -----------------------------------------------------------------------------
# The formulas in jax.numpy


def _where_slots(cfg: Config, cache, slots):
  """(page, offset) of each token; a page past the end for those to skip."""
  pages, size = cache.shape[0], cfg.page_size
  stored = (slots >= 0) & (slots < pages * size)
  return jnp.where(stored, slots // size, pages), slots % size


def winners(cfg: Config, cache, slots):
  """int32 [slots]: the token that is written there, the last one; or -1."""
  count = cache.shape[0] * cfg.page_size
  stored = (slots >= 0) & (slots < count)
  return jnp.full(count, -1, jnp.int32).at[
      jnp.where(stored, slots, count)].max(
          jnp.arange(slots.shape[0], dtype=jnp.int32), mode="drop")


def _in_page(side: Side, run: int, offset, heads: int, cols: int):
  """Elements in a page: offset's shape + [heads, cols]."""
  token = offset // side.split * side.run_offset + (
      offset % side.split * side.offset)
  head = jnp.arange(heads, dtype=jnp.int32)[:, None] * side.head
  col = jnp.arange(cols, dtype=jnp.int32)
  col = col // run * side.run + col % run * side.col
  return side.start + token[..., None, None] + (head + col)


def _window(side: Side, run: int, cache, heads: int, cols: int):
  """Sizes of a piece of a token that lies together, in the cache's dimensions.

  The last dimensions, of which the first may be cut; others are 1.
  """
  if side.col != 1:
    piece = 1
  elif side.run != run:
    piece = math.gcd(run, cols)
  else:
    piece = heads * cols if side.head == cols or heads == 1 else cols
  if piece > cache.shape[-1] and piece != math.prod(cache.shape[-2:]):
    piece = cols
  window = [1] * cache.ndim
  for axis in reversed(range(1, cache.ndim)):
    window[axis] = min(piece, cache.shape[axis])
    piece //= window[axis]
  return window


def _scatter(cfg: Config, side: Side, run: int, cache, rows, slots):
  """The cache with rows [tokens, heads, cols] at their slots."""
  tokens, heads, cols = rows.shape
  page, offset = _where_slots(cfg, cache, slots)
  window = _window(side, run, cache, heads, cols)
  pieces = heads * cols // math.prod(window)
  at = _in_page(side, run, offset, heads, cols).reshape(
      tokens, pieces, -1)[..., 0]
  # Not of the cache as a matrix: XLA's CPUs would copy what has a dimension of
  # 1 into another layout and back.
  index = []
  for size in reversed(cache.shape[1:]):
    index.insert(0, at % size)
    at = at // size
  index.insert(0, jnp.broadcast_to(page[:, None], at.shape))
  axes = tuple(range(cache.ndim))
  return lax.scatter(
      cache, jnp.stack(index, -1), rows.reshape(tokens, pieces, *window),
      lax.ScatterDimensionNumbers(
          update_window_dims=tuple(2 + i for i in axes),
          inserted_window_dims=(), scatter_dims_to_operand_dims=axes),
      mode=lax.GatherScatterMode.FILL_OR_DROP)


class _Image(NamedTuple):
  """What each element of a cache is, in arrays of its shape.

  Attributes:
    token: the token that is written there, or -1.
    head: its head.
    place: its place in a token's [heads, cols].
    slot: its slot.
    inside: whether it is of the side.
  """
  token: jax.Array
  head: jax.Array
  place: jax.Array
  slot: jax.Array
  inside: jax.Array


def _image(cfg: Config, side: Side, run: int, cache, rows, slots) -> _Image:
  _, heads, cols = rows.shape
  pages, *rest = cache.shape
  size = cfg.page_size
  at = _in_page(side, run, jnp.arange(size, dtype=jnp.int32), heads, cols)
  what = jnp.full(math.prod(rest), -1, jnp.int32).at[at.reshape(-1)].set(
      jnp.arange(size * heads * cols, dtype=jnp.int32))
  # Of a loop that carries the cache nothing of its size is made beforehand.
  what, _ = lax.optimization_barrier((what, cache))
  offset, place = what // (heads * cols), what % (heads * cols)
  slot = jnp.arange(pages, dtype=jnp.int32)[:, None] * size + offset
  whole = lambda t: jnp.broadcast_to(t, slot.shape).reshape(cache.shape)
  token = winners(cfg, cache, slots).at[slot].get(mode="clip")
  return _Image(whole(jnp.where(what >= 0, token, -1)), whole(place // cols),
                whole(place), whole(slot), whole(what >= 0))


def _bytes(t):
  return lax.bitcast_convert_type(t, jnp.uint8)


def _put(cfg: Config, side: Side, cache, rows, slots):
  """_scatter, in place of every dtype."""
  run = run_of(cache)
  if 0 in cache.shape or 0 in rows.shape:
    return cache
  if jnp.dtype(cache.dtype).itemsize > 1 or cache.dtype in (
      jnp.int8, jnp.uint8):
    return _scatter(cfg, side, run, cache, rows, slots)
  # XLA's CPUs scatter no float8: the whole cache would become float16 and back.
  # What is elementwise stays in place, if it is of the cache's own shape.
  image = _image(cfg, side, run, cache, rows, slots)
  new = _bytes(rows).reshape(-1).at[
      jnp.maximum(image.token, 0) * math.prod(rows.shape[1:]) + image.place
  ].get(mode="clip")
  return lax.bitcast_convert_type(
      jnp.where(image.token >= 0, new, _bytes(cache)), cache.dtype)


def _scale_of(cfg: Config, amax):
  kind = KINDS[cfg.kind]
  # Not jnp.maximum, which loses a NaN on some GPUs.
  scale = rounding.f32_scale(jnp.where(amax < cfg.floor, cfg.floor, amax), kind)
  if cfg.power:
    bits = lax.bitcast_convert_type(scale, jnp.uint32)
    up = (bits + 0x7FFFFF) & jnp.uint32(0xFF800000)
    scale = lax.bitcast_convert_type(
        jnp.where(bits > 0x7F800000, bits, up), jnp.float32)
  return scale


def _token_side(cfg, side, where, cache, scale_cache, rows, slots):
  """(cache, scales) after tokens with a scale for each and its heads."""
  rows = rows.astype(jnp.float32)
  kind = KINDS[cfg.kind]
  scale = _scale_of(cfg, rounding.amax(rows, -1))
  codes = rounding.round_to(rounding.divide(rows, scale[..., None]), kind)
  if scale_cache is None:  # In the page, as bytes.
    codes = _bytes(codes)
    cache = _put(cfg, side, cache, codes, slots)
    as_bytes = Side(4 * where.start, 4 * where.page, 4 * where.offset, 0, 1,
                    4 * where.head, run_of(cache), 1)
    # By shifts: with open sizes JAX exports no cast to more, smaller elements.
    word = lax.bitcast_convert_type(scale, jnp.uint32)[..., None]
    parts = (word >> (8 * jnp.arange(4, dtype=jnp.uint32))).astype(jnp.uint8)
    return _put(cfg, as_bytes, cache, parts, slots), None
  cache = _put(cfg, side, cache, codes, slots)
  # A pool of its own, of which a page has heads in front or behind.
  page, offset = _where_slots(cfg, cache, slots)
  if not cfg.heads_first:
    return cache, scale_cache.at[page, :, offset].set(scale, mode="drop")
  stored = page < cache.shape[0]
  slot = jnp.where(stored, slots, scale_cache.shape[1])
  return cache, scale_cache.at[:, slot].set(scale.T, mode="drop")


def _block_side(cfg, side, cache, scale_cache, rows, slots):
  """(cache, scales) after tokens with a scale for each block and head."""
  kind = KINDS[cfg.kind]
  rows = rows.astype(jnp.float32)
  count = jnp.arange(rows.shape[0], dtype=jnp.int32)
  old = scale_cache.T if cfg.heads_first else scale_cache  # [blocks, heads]
  token = winners(cfg, cache, slots)
  by_block = token.reshape(-1, cfg.block)
  first = jnp.argmax(by_block >= 0, 1)[:, None]
  written, fresh = jnp.any(by_block >= 0, 1), by_block[:, 0] >= 0
  # What the first of a block's new tokens finds stands for the block.
  leader = jnp.where(
      written, jnp.take_along_axis(by_block, first, 1)[:, 0], -1)
  wins = (slots >= 0) & (
      token.at[slots].get(mode="fill", fill_value=-1) == count)
  block = jnp.where(wins, slots // cfg.block, old.shape[0])
  amax = jnp.zeros(old.shape, jnp.int32).at[block].max(
      lax.bitcast_convert_type(rounding.amax(rows, -1), jnp.int32),
      mode="drop")
  found = _scale_of(cfg, lax.bitcast_convert_type(amax, jnp.float32))
  scale = jnp.where(~fresh[:, None] & (old > found), old, found)
  scale = jnp.where(written[:, None], scale, old)
  moved = (written & ~fresh)[:, None] & (old != scale)
  own = lambda t: t.at[block].get(mode="clip")[..., None]  # [tokens, heads, 1]
  codes = _bytes(rounding.round_to(
      rounding.divide(rows, own(scale)), kind)).reshape(-1)
  # What becomes of each number that a block may hold.
  held = lax.bitcast_convert_type(
      jnp.arange(256, dtype=jnp.uint8), cache.dtype).astype(jnp.float32)
  becomes = _bytes(rounding.round_to(
      rounding.divide(held * own(old), own(scale)), kind)).reshape(-1)
  image = _image(cfg, side, run_of(cache), cache, rows, slots)
  before, heads = _bytes(cache), rows.shape[1]
  of_block = image.slot // cfg.block
  lead = jnp.maximum(leader.at[of_block].get(mode="clip"), 0)
  after = becomes.at[
      (lead * heads + image.head) * 256 + before.astype(jnp.int32)
  ].get(mode="clip")
  moves = image.inside & moved.reshape(-1).at[
      of_block * heads + image.head].get(mode="clip")
  new = codes.at[
      jnp.maximum(image.token, 0) * math.prod(rows.shape[1:]) + image.place
  ].get(mode="clip")
  cache = lax.bitcast_convert_type(
      jnp.where(image.token >= 0, new, jnp.where(moves, after, before)),
      cache.dtype)
  return cache, scale.T if cfg.heads_first else scale


def _cast(cfg: Config, rows, scale, dtype):
  """Rows, divided by a given scale and rounded."""
  if cfg.mode == "copy":
    return rows.astype(dtype)
  rows = rows.astype(jnp.float32)
  if scale is not None:
    rows = rounding.divide(rows, scale[None, :, None])
  return rounding.round_to(rows, KINDS[cfg.kind])


def reference(cfg: Config, operands: Operands) -> Caches:
  """The write in jax.numpy."""
  if cfg.layout == "pages":
    return _as_rows(operands, functools.partial(reference, Config("NHD", 1)))
  k_cache, v_cache, k_scale, v_scale, key, value, slots = operands
  k_side, v_side = sides(cfg, operands)
  if cfg.mode in ("copy", "cast"):
    k_cache = _put(cfg, k_side, k_cache,
                   _cast(cfg, key, k_scale, k_cache.dtype), slots)
    if value is not None:
      pool = k_cache if v_cache is None else v_cache
      pool = _put(cfg, v_side, pool, _cast(cfg, value, v_scale, pool.dtype),
                  slots)
      k_cache, v_cache = (pool, None) if v_cache is None else (k_cache, pool)
    return Caches(k_cache, v_cache, None, None)
  if 0 in key.shape or 0 in k_cache.shape:
    return Caches(k_cache, v_cache, k_scale, v_scale)
  if cfg.mode == "block":
    write = lambda side, _, *args: _block_side(cfg, side, *args)
  else:
    write = functools.partial(_token_side, cfg)
  where = scales(cfg, operands)
  k_cache, k_scale = write(k_side, where[0], k_cache, k_scale, key, slots)
  if value is not None:
    v_cache, v_scale = write(v_side, where[1], v_cache, v_scale, value, slots)
  return Caches(k_cache, v_cache, k_scale, v_scale)


# -----------------------------------------------------------------------------
# The operator


def _serves(cfg: Config, operands: Operands) -> Key | None:
  rows = [t for t in (operands.key, operands.value) if t is not None]
  if cfg.mode == "copy":
    size = jnp.dtype(operands.k_cache.dtype).itemsize
    return Key("cache_copy", {1: "int8", 2: "bfloat16", 4: "float32"}[size],
               ())
  cols = () if cfg.mode == "cast" else (max(t.shape[-1] for t in rows),)
  return Key(f"cache_{cfg.mode}", operands.key.dtype.name, cols)


def _kernel(cfg: Config, call, operands: Operands) -> Caches:
  if cfg.layout == "pages":
    return _as_rows(operands,
                    functools.partial(_kernel, Config("NHD", 1), call))
  k_cache, _, k_scale, v_scale, key, value, slots = operands
  pools = Caches(*operands[:4])
  if cfg.mode in ("copy", "cast"):
    pools = pools._replace(k_scale=None, v_scale=None)
  dtypes = (k_cache.dtype, k_cache.dtype, jnp.float32, jnp.float32)
  k_side, v_side = sides(cfg, operands)
  k_where, v_where = scales(cfg, operands)
  winner = winners(cfg, k_cache, slots) if cfg.mode == "block" else None
  numbers = lambda t: np.asarray(t, np.int64)
  # Scales that are given are read alone.
  call = call._replace(aliases={
      i: i for i, t in enumerate(pools) if t is not None})
  results = call(
      [like(k_cache, (0,) if t is None else t.shape, dtype)
       for t, dtype in zip(pools, dtypes)],
      *(absent(t, dtype) for t, dtype in zip(operands, dtypes)), key,
      absent(value, key.dtype), slots, absent(winner, jnp.int32),
      kind=cfg.kind, page_size=np.int64(cfg.page_size),
      block=np.int64(cfg.block),
      k_side=numbers(k_side), v_side=numbers(v_side or k_side),
      k_scales=numbers(k_where), v_scales=numbers(v_where),
      floor=np.float32(cfg.floor), power=cfg.power)
  return Caches(*(None if t is None else new
                  for t, new in zip(pools, results)))


def _as_rows(operands: Operands, write) -> Caches:
  """A write of whole pages: rows of one head, in pages of one token."""
  rows = lambda t: None if t is None else t.reshape(
      t.shape[0], 1, math.prod(t.shape[1:]))
  pool = lambda t: None if t is None else rows(t)[:, None]
  out = write(Operands(
      pool(operands.k_cache), pool(operands.v_cache), None, None,
      rows(operands.key), rows(operands.value), operands.slots))
  return jax.tree.map(lambda t, like: t.reshape(like.shape), out,
                      Caches(*operands[:2], None, None))


def _specs(cfg: Config, operands: Operands):
  """Names of all dimensions: "h" are heads, "d1", "d2", ... those of pages."""
  names = LAYOUTS[cfg.layout]
  cache = lambda i: tuple("h" if n == "head" else "_" for n in names[i])
  rows = ("_", "h" if "head" in names[0] else "_", "_")
  if cfg.layout == "pages":
    rows = ("_", *(f"d{i}" for i in range(1, operands.key.ndim)))
    cache = lambda i: rows

  def scale(t):
    if t is None:
      return None
    if cfg.mode == "cast":
      return ("h",) if t.shape[0] == operands.key.shape[1] > 1 else ("_",)
    if cfg.heads_first:
      return ("h", "_")
    return ("_", "h", "_")[:t.ndim]

  pools = Caches(cache(0), None if operands.v_cache is None else cache(1),
                 scale(operands.k_scale), scale(operands.v_scale))
  results = pools
  if cfg.mode in ("copy", "cast"):
    results = pools._replace(k_scale=None, v_scale=None)
  return (Operands(*pools, rows, None if operands.value is None else rows,
                   ("_",)),), results


def _plan(cfg: Config, run, mesh, args):
  """Heads are divided as those of the cache are."""
  (specs,), _ = _specs(cfg, *args)
  return axes_of_arguments(mesh, (specs.k_cache,), _SPLIT,
                           (args[0].k_cache,)), run


def _batch(cfg: Config, op, size: int, mapped, operands: Operands) -> Caches:
  """One call for all elements, whose pages lie one after another."""
  mapped, = mapped
  whole = with_axis(size, mapped, operands)
  if cfg.heads_first or (cfg.mode == "cast" and (
      mapped.k_scale or mapped.v_scale)):  # No pages in front.
    return lax.map(op, whole)
  flat = jax.tree.map(lambda t: t.reshape(-1, *t.shape[2:]), whole)
  count = whole.k_cache.shape[1] * cfg.page_size
  first = count * jnp.arange(size, dtype=jnp.int32)[:, None]
  slots = jnp.where((whole.slots >= 0) & (whole.slots < count),
                    whole.slots + first, -1)
  if cfg.mode == "cast":
    flat = flat._replace(k_scale=operands.k_scale, v_scale=operands.v_scale)
  out = op(flat._replace(slots=slots.reshape(-1)))
  return jax.tree.map(lambda t: t.reshape(size, -1, *t.shape[1:]), out)


_SPLIT = ("h", "d")
# One for each mode: each has its own target.
_OPERATORS = {
    mode: operator(
        target=f"cache_{mode}", kernel=_kernel, reference=reference,
        specs=_specs, split=_SPLIT, serves=_serves, dtypes=_DTYPES,
        batch=_batch, plan=_plan)
    for mode in ("copy", "cast", "token", "block")
}


def write(cfg: Config, operands: Operands) -> Caches:
  """The write, by a kernel where there is one."""
  return _OPERATORS[cfg.mode](cfg, operands)
