# SPDX-License-Identifier: Apache-2.0
"""Attention over paged KV caches as an operator: formula, kernel, transforms.

Decode and mixed batches, every layout, tables of even or packed rows are one
operator: queries [tokens, hq, d] of sequences whose keys lie in pages. Where a
token lies in a page is an affine function, a Side of cache/op.py, and so is
where its scale lies. The formula walks over tiles of queries and keys as the
kernel does: what it keeps does not grow with the keys.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np

import jax
from jax import lax
from jax._src.aiter.cache import op as cache_op
from jax._src.aiter.core.dims import at_most, is_known, last_start, take
from jax._src.aiter.core.dispatch import absent, like
from jax._src.aiter.core.operator import Key, operator, with_axis
from jax._src.aiter.core.partition import axes_of_arguments, vary_like

# Layout -> names of the dimensions of K's cache and, if it is another, V's.
LAYOUTS = {
    **{name: cache_op.LAYOUTS[name]
       for name in ("NHD", "HND", "x", "asm", "interleaved")},
    # Pallas': all pages of a head lie together.
    "heads_first": (("head", "page", "offset", "col"),) * 2,
    # Values are the first columns of keys, which are one head's.
    "mla": (("page", "offset", "head", "col"),),
}
DTYPES = {"float16": "fp16", "bfloat16": "bf16", "float32": "fp32"}
# Caches of bytes -> the kernels' names of what they hold.
KINDS = {"int8": "int8", "float8_e4m3fn": "e4m3fn",
         "float8_e4m3fnuz": "e4m3fnuz", "float8_e5m2": "e5m2"}
# Rows of the smallest tile, and of one that many rows are worth.
_FEW_ROWS, _MANY_ROWS = 16, 32
# Programs that fill any device, among which few sequences' keys are divided;
# with few queries, whose results are small, on CUDA often enough for sequences
# of different lengths. Parts are of so many keys at least, and so many at most.
_PROGRAMS, _PART, _MAX_SPLITS = 2048, 256, 128
_PROGRAMS_DECODE = {"cuda": 8192, "rocm": _PROGRAMS}
# (programs, parts) of latent attention, one of whose rows of keys is as much as
# many heads'. On ROCm programs share all keys, so that the first and the last
# part of a sequence may be smaller than others. There room for twice the parts
# is for sequences that are longer than the batch's others: 128 MiB of scratch
# (16 rows of 512 float32 a program), which all layers share. More would pay
# where one sequence has most of the keys, and nowhere else.
_LATENT = {"cuda": (_PROGRAMS, 256), "rocm": (2 * _PROGRAMS, 512)}
# Pages of a multiple of so many tokens have kernels of their own.
_LARGE_PAGE = 64
# Positions, with a window added, are 32 bits.
_MAX_LENGTH = 1 << 30


class Config(NamedTuple):
  """Static facts of a call; hashable.

  Attributes:
    layout: of LAYOUTS.
    page_size: tokens of a page.
    softmax_scale: of the scores.
    seqlen_q: queries of each sequence; 0 if they are packed.
    heads: of K and V, if the cache has room for more; else 0.
    window: keys to the left and right of a query's own that it sees; -1 for no
      bound.
    soft_cap: of the scores; 0 for none.
    k_scale: names of the dimensions of K's scales, of "page", "offset" and
      "head" in any order.
    v_scale: likewise.
    return_lse: whether lse is a result.
    dv: columns of the values of layout mla; else 0.
    cp_world_size: of layout mla: so many caches have a sequence's tokens, each
      of which is the next one's.
    last_pages: whether lengths are those of the last pages, of a table with
      indptr.
  """
  layout: str
  page_size: int
  softmax_scale: float
  seqlen_q: int = 0
  heads: int = 0
  window: tuple[int, int] = (-1, -1)
  soft_cap: float = 0.0
  k_scale: tuple[str, ...] = ()
  v_scale: tuple[str, ...] = ()
  return_lse: bool = False
  dv: int = 0
  cp_world_size: int = 1
  last_pages: bool = False


class Operands(NamedTuple):
  """Arrays of a call; an absent one is None.

  Attributes:
    q: [tokens, hq, d].
    k_cache: by the layout.
    v_cache: likewise; None if values are in k_cache.
    k_scale: float32, dimensions as Config names them; [1] if it names none.
    v_scale: likewise.
    table: int32 [b, n], or [pages of all sequences] with indptr.
    indptr: int32 [b + 1], where each sequence's pages begin in table.
    lengths: int32 [b], keys of each sequence, new ones too; or, as Config says,
      of its last page, before which all are full.
    cu_seqlens: int32 [b + 1], where each sequence's queries begin. Without it
      every sequence has Config.seqlen_q.
    sinks: float32 [hq]; the kernel takes [b, hq] too.
    slopes: likewise.
    places: int32 [b], of several caches: query i of sequence b stands at key
      (places[b] + i) // cp_world_size of this one's, rounded down.
  """
  q: jax.Array
  k_cache: jax.Array
  v_cache: jax.Array | None
  k_scale: jax.Array
  v_scale: jax.Array
  table: jax.Array
  indptr: jax.Array | None
  lengths: jax.Array
  cu_seqlens: jax.Array | None = None
  sinks: jax.Array | None = None
  slopes: jax.Array | None = None
  places: jax.Array | None = None


class Shape(NamedTuple):
  """Sizes of a call, and where K and V lie."""
  pages: int
  hk: int
  dv: int
  k_side: cache_op.Side
  v_side: cache_op.Side


def shape_of(cfg: Config, x: Operands) -> Shape:
  names = LAYOUTS[cfg.layout]
  sizes = dict(zip(names[0], x.k_cache.shape))
  k_side = cache_op.side_of(names[0], x.k_cache)
  if cfg.dv:
    dv, v_side = cfg.dv, k_side
  elif x.v_cache is None:
    dv, v_side = x.q.shape[-1], k_side._replace(start=x.k_cache.shape[-1])
  else:
    dv = dict(zip(names[1], x.v_cache.shape))["col"]
    v_side = cache_op.side_of(names[1], x.v_cache)
    if cfg.layout == "asm":
      dv = x.v_cache.shape[-2]
  return Shape(sizes["page"], cfg.heads or sizes["head"], dv, k_side, v_side)


# -----------------------------------------------------------------------------
# The formula in jax.numpy


def _scales(names, scale, page, offset, heads: int):
  """Scales of tokens, [tokens, heads] or what broadcasts to it."""
  index = {"page": page[:, None], "offset": offset[:, None],
           "head": jnp.arange(heads)}
  if not names:
    return scale.reshape(1, 1)
  return jnp.broadcast_to(scale[tuple(index[n] for n in names)],
                          (page.shape[0], heads))


def keys_and_values(cfg: Config, x: Operands, shape: Shape, page, offset):
  """Dequantised keys and values of tokens, [tokens, heads, d] in float32.

  Those of absent pages, which are past the end, are zeros.
  """
  names = LAYOUTS[cfg.layout]
  k = cache_op.tokens_of(names[0], x.k_cache, page, offset)
  if cfg.dv:
    v = k
  elif x.v_cache is None:
    k, v = k[:, :, 0], k[:, :, 1]
  else:
    v = cache_op.tokens_of(names[1], x.v_cache, page, offset)
  first = jnp.where(page < shape.pages, page, 0)
  scaled = lambda t, dim, names, scale: (
      t[:, :shape.hk, :dim].astype(jnp.float32)
      * _scales(names, scale, first, offset, shape.hk)[..., None])
  return (scaled(k, x.q.shape[-1], cfg.k_scale, x.k_scale),
          scaled(v, shape.dv, cfg.v_scale, x.v_scale))


class _Tiles(NamedTuple):
  """Tiles of `rows` queries of one sequence each.

  Attributes:
    rows: of a tile.
    starts: int32 [b], first query of each sequence.
    ends: int32 [b], the one behind its last.
    index: int32 [tiles], the sequence of each tile.
    tile: int32 [tiles], its number there.
  """
  rows: int
  starts: jax.Array
  ends: jax.Array
  index: jax.Array
  tile: jax.Array


def _tiles(cfg: Config, x: Operands) -> _Tiles:
  """All tiles; of packed queries some may be empty."""
  tokens, batch = x.q.shape[0], x.lengths.shape[0]
  if x.cu_seqlens is None:
    rows, each = cfg.seqlen_q, -(-cfg.seqlen_q // _FEW_ROWS)
    starts = jnp.arange(batch, dtype=jnp.int32) * rows
    tile = jnp.arange(batch * each, dtype=jnp.int32)
    return _Tiles(min(rows, _FEW_ROWS), starts, starts + rows, tile // each,
                  tile % each)
  rows = _FEW_ROWS
  cu = jnp.clip(x.cu_seqlens, 0, tokens)
  starts, ends = cu[:-1], cu[1:]
  first = starts // rows + jnp.arange(batch, dtype=jnp.int32)
  slot = jnp.arange(tokens // rows + batch, dtype=jnp.int32)
  index = jnp.maximum(last_start(first, slot), 0)
  return _Tiles(rows, starts, ends, index, slot - take(first, index, 0))


def _pages_of(x: Operands, i):
  """Where a sequence's pages begin in the flat table, and how many it has."""
  if x.indptr is None:
    return i * x.table.shape[1], x.table.shape[1]
  begin = jnp.clip(x.indptr[i], 0, x.table.shape[0])
  return begin, jnp.minimum(x.indptr[i + 1], x.table.shape[0]) - begin


def _lengths(cfg: Config, x: Operands):
  """int32 [b], keys of each sequence."""
  if not cfg.last_pages:
    return x.lengths
  pages = jnp.diff(x.indptr)
  return jnp.where(pages > 0, (pages - 1) * cfg.page_size + x.lengths, 0)


def _attend(cfg: Config, x: Operands, shape: Shape, tiles: _Tiles, sinks, at):
  """(rows or those past the end, out, lse) of tile at[1] of sequence at[0]."""
  i, tile = at
  tokens, hq, d = x.q.shape
  hk, group, rows = shape.hk, hq // shape.hk, tiles.rows
  size, (left, right) = cfg.page_size, cfg.window
  room = _PART if not is_known(shape.pages) else min(
      _PART, max(shape.pages * size, 1))
  start, end = tiles.starts[i], tiles.ends[i]
  row = start + tile * rows + jnp.arange(rows, dtype=jnp.int32)
  live = row < end
  length = jnp.clip(x.lengths[i], 0, _MAX_LENGTH)
  first, count = _pages_of(x, i)
  # Keys of the queries.
  begin = length - (end - start) if x.places is None else x.places[i]
  own = (row - start + begin) // cfg.cp_world_size
  stop = jnp.minimum(length, jnp.clip(count, 0, length // size + 1) * size)
  last = (end - start - 1 + begin) // cfg.cp_world_size
  if right >= 0:
    stop = jnp.minimum(stop, jnp.minimum(own[-1], last) + right + 1)
  low = jnp.maximum(own[0] - left, 0) if left >= 0 else jnp.int32(0)
  q = x.q.at[jnp.where(live, row, tokens)].get(mode="fill", fill_value=0)
  q = q.astype(jnp.float32).reshape(rows, hk, group, d)

  def more(carry):
    return carry[0] < stop

  def step(carry):
    n0, acc, m, l = carry
    n = n0 + jnp.arange(room, dtype=jnp.int32)
    place = first + jnp.minimum(n // size, jnp.maximum(count, 1) - 1)
    page = x.table.reshape(-1).at[place].get(mode="fill", fill_value=-1)
    shown = (n < stop) & (page >= 0) & (page < shape.pages)
    page = jnp.where(shown, page, shape.pages)
    k, v = keys_and_values(cfg, x, shape, page, n % size)
    s = jnp.einsum("mhgd,nhd->hgmn", q, k, precision=lax.Precision.HIGHEST)
    s *= cfg.softmax_scale
    if cfg.soft_cap:
      s = cfg.soft_cap * jnp.tanh(s / cfg.soft_cap)
    ahead = n - own[:, None]
    if x.slopes is not None:
      s -= x.slopes.reshape(hk, group, 1, 1) * jnp.abs(ahead)
    seen = jnp.broadcast_to(shown, ahead.shape)
    if left >= 0:
      seen &= ahead >= -left
    if right >= 0:
      seen &= ahead <= right
    s = jnp.where(seen, s, -jnp.inf)
    m_new = jnp.maximum(m, s.max(-1))
    m_exp = jnp.where(m_new == -jnp.inf, 0, m_new)
    p = jnp.exp(s - m_exp[..., None])
    alpha = jnp.exp(m - m_exp)
    v = jnp.where(shown[:, None, None], v, 0)
    acc = acc * alpha[..., None] + jnp.einsum(
        "hgmn,nhd->hgmd", p, v, precision=lax.Precision.HIGHEST)
    return n0 + room, acc, m_new, l * alpha + p.sum(-1)

  m = jnp.broadcast_to(sinks[..., None], (hk, group, rows)).astype(jnp.float32)
  l = (m != -jnp.inf).astype(jnp.float32)
  acc = jnp.zeros((hk, group, rows, shape.dv), jnp.float32)
  _, acc, m, l = lax.while_loop(more, step, tuple(
      vary_like(t, q) for t in (low // room * room, acc, m, l)))
  safe = jnp.where(l == 0, 1, l)
  acc /= safe[..., None]
  lse = jnp.where(l == 0, -jnp.inf, m + jnp.log(safe))
  return (jnp.where(live, row, tokens),
          acc.reshape(hq, rows, shape.dv).swapaxes(0, 1).astype(x.q.dtype),
          lse.reshape(hq, rows).T)


def reference(cfg: Config, x: Operands):
  """(out, lse) in jax.numpy; lse None if it is not asked for."""
  shape, tiles = shape_of(cfg, x), _tiles(cfg, x)
  x = x._replace(lengths=_lengths(cfg, x))
  tokens, hq, _ = x.q.shape
  sinks = jnp.float32(-jnp.inf) if x.sinks is None else x.sinks
  sinks = jnp.broadcast_to(sinks, hq)
  out = vary_like(jnp.zeros((tokens, hq, shape.dv), x.q.dtype), x.q)
  lse = vary_like(jnp.full((tokens, hq), -jnp.inf, jnp.float32), x.q)
  if at_most(tokens, 0) or at_most(x.lengths.shape[0], 0):
    pass
  elif at_most(shape.pages, 0) or at_most(x.table.size, 0):
    # Nobody sees a key: a row's softmax is of its sink alone.
    row = jnp.arange(tokens, dtype=jnp.int32)
    live = (row >= tiles.starts[0]) & (row < tiles.ends[-1])
    lse = jnp.where(live[:, None], sinks, lse)
  else:
    of_groups = sinks.reshape(shape.hk, hq // shape.hk)
    row, acc, row_lse = lax.map(
        lambda at: _attend(cfg, x, shape, tiles, of_groups, at),
        (tiles.index, tiles.tile))
    flat = row.reshape(-1)
    out = out.at[flat].set(acc.reshape(-1, hq, shape.dv), mode="drop")
    lse = lse.at[flat].set(row_lse.reshape(-1, hq), mode="drop")
  return out, lse.T if cfg.return_lse else None


# -----------------------------------------------------------------------------
# The kernel


def _many_rows(cfg: Config, x: Operands, shape: Shape) -> bool:
  """Whether sequences have, as is known, more rows than decoding has."""
  group = x.q.shape[1] // shape.hk
  rows = (cfg.seqlen_q * group if cfg.seqlen_q else
          x.q.shape[0] * group // jax.core.max_dim(x.lengths.shape[0], 1))
  return is_known(rows) and rows >= _MANY_ROWS


def _unshared(x: Operands, shape: Shape) -> bool:
  """Whether, as is known, a block of CUDA's is rather one sequence's alone.

  There is one sequence, or one may have more rows than a small tile.
  """
  tokens, batch = x.q.shape[0], x.lengths.shape[0]
  if not (is_known(tokens) and is_known(batch)):
    return False
  mixed = x.cu_seqlens is not None and tokens > batch
  return (batch == 1 or mixed
          or tokens * (x.q.shape[1] // shape.hk) > _FEW_ROWS * batch)


def _splits(platform: str, cfg: Config, x: Operands, shape: Shape) -> int:
  """Parts that a sequence's keys are divided into at most, for scratch.

  With many programs there are none; the library may take fewer.
  """
  tokens, hq, _ = x.q.shape
  batch, group = x.lengths.shape[0], hq // shape.hk
  if x.cu_seqlens is None:
    tiles = batch * -(-max(cfg.seqlen_q, 1) * group // _FEW_ROWS)
  else:
    tiles = tokens * group // _FEW_ROWS + batch
  keys = x.table.shape[-1] * cfg.page_size
  programs, most = (_PROGRAMS if _many_rows(cfg, x, shape) else
                    _PROGRAMS_DECODE[platform]), _MAX_SPLITS
  if cfg.dv:
    programs, most = _LATENT[platform]
  parts = programs // (shape.hk * tiles)
  if cfg.dv and platform == "rocm":
    parts += jax.core.min_dim(parts - 1, 1)
  least = jax.core.min_dim(jax.core.min_dim(parts, most),
                           (keys + _PART - 1) // _PART)
  return jax.core.max_dim(least, 1)


def _strides(names, scale):
  """Where scales lie: strides as of aiter/cache.h's cache_scales."""
  strides, stride = {}, 1
  for name, size in zip(reversed(names), reversed(scale.shape)):
    strides[name], stride = stride, stride * size
  return [0, *(strides.get(n, 0) for n in ("page", "offset", "head"))]


def kernel(cfg: Config, call, x: Operands):
  shape = shape_of(cfg, x)
  tokens, hq, _ = x.q.shape
  splits = _splits(call.platform, cfg, x, shape)
  no_parts = is_known(splits) and splits == 1
  numbers = lambda t: np.asarray(t, np.int64)
  counts = call.platform == "cuda" and _many_rows(cfg, x, shape)
  out, lse, *_ = call(
      (like(x.q, (tokens, hq, shape.dv), x.q.dtype),
       like(x.q, (hq, tokens) if cfg.return_lse else (0,), jnp.float32),
       like(x.q, (0,) if no_parts else (splits, tokens, hq, shape.dv),
            jnp.float32),
       like(x.q, (0,) if no_parts else (splits, tokens, hq), jnp.float32),
       like(x.q, (2,) if counts else (0,), jnp.int32)),
      x.q, x.k_cache, absent(x.v_cache, x.k_cache.dtype), x.k_scale, x.v_scale,
      x.table, absent(x.indptr, jnp.int32), x.lengths,
      absent(x.cu_seqlens, jnp.int32), absent(x.sinks, jnp.float32),
      absent(x.slopes, jnp.float32), absent(x.places, jnp.int32),
      page_size=np.int64(cfg.page_size), nhead_k=np.int64(shape.hk),
      seqlen_q=np.int64(cfg.seqlen_q),
      cp_world_size=np.int64(cfg.cp_world_size),
      last_pages=np.int64(cfg.last_pages),
      page_axis=np.int64(LAYOUTS[cfg.layout][0].index("page")),
      k_side=numbers(shape.k_side), v_side=numbers(shape.v_side),
      k_scales=numbers(_strides(cfg.k_scale, x.k_scale)),
      v_scales=numbers(_strides(cfg.v_scale, x.v_scale)),
      window_left=np.int64(cfg.window[0]), window_right=np.int64(cfg.window[1]),
      softmax_scale=np.float32(cfg.softmax_scale),
      logits_soft_cap=np.float32(cfg.soft_cap))
  return out, lse if cfg.return_lse else None


def features(cfg: Config, x: Operands, shape: Shape):
  """What the call asks of the kernels; src/paged.cc has the same of buffers."""
  d, size = x.q.shape[-1], cfg.page_size
  run = cache_op.run_of(x.k_cache)
  kind = KINDS.get(x.k_cache.dtype.name)
  shuffled = cfg.layout in ("x", "asm")
  per_token = {"page", "offset"} & {*cfg.k_scale, *cfg.v_scale}
  on = {
      "cu_seqlens": x.cu_seqlens is not None, "indptr": x.indptr is not None,
      "window": cfg.window != (-1, -1), "soft_cap": cfg.soft_cap > 0,
      "alibi": x.slopes is not None, "sink": x.sinks is not None,
      "token_scales": bool(per_token), "lse": cfg.return_lse,
      "partial": d != shape.dv or d & (d - 1) != 0 or d < 16,
      "unaligned": (d % run != 0 or shape.dv % run != 0
                    or shuffled and size % run != 0),
      "shuffled": shuffled,
      "odd_pages": size & (size - 1) != 0,
      "last_pages": cfg.last_pages,
      "small_pages": size % _LARGE_PAGE != 0,
      "unshared": _unshared(x, shape),
      "many_rows": _many_rows(cfg, x, shape),
      "bytes": kind is not None, kind: kind is not None,
  }
  return tuple(name for name, holds in on.items() if holds)


def is_empty(x: Operands) -> bool:
  """Whether there is nothing for a kernel to do."""
  return any(at_most(n, 0) for t in x if t is not None for n in t.shape)


def serves(cfg: Config, x: Operands) -> Key | None:
  if is_empty(x):
    return None
  shape = shape_of(cfg, x)
  return Key("paged_attend", x.q.dtype.name,
             (max(x.q.shape[-1], shape.dv),), features(cfg, x, shape),
             everywhere=x.q.dtype != jnp.float32)


# -----------------------------------------------------------------------------
# The operator. KV heads partition, and with them their query heads; and so do
# tokens, "t", with the sequences that all have as many, "b". What divides pages
# is gathered: they are for shard_map.


def specs_of_tokens(x: Operands) -> Operands:
  """Names of the dimensions that calls of all layouts have."""
  b = "_" if x.cu_seqlens is not None else "b"
  specs = Operands(*(None if t is None else ("_",) * t.ndim for t in x))
  return specs._replace(
      q=("t", "_", "_"), lengths=(b,),
      table=("_",) if x.indptr is not None else (b, "_"),
      places=None if x.places is None else (b,))


def divided_tokens(cfg: Config, run, mesh, x: Operands, heads=()):
  """Mesh axes of tokens and of sequences, and the function of one shard.

  Args:
    cfg: of the call.
    run: (Operands) -> results, of one device.
    mesh: the mesh.
    x: the operands.
    heads: axes that divide heads.
  """
  specs = specs_of_tokens(x)
  axes = axes_of_arguments(
      mesh, (specs.q, specs.lengths), _TOKENS, (x.q, x.lengths))
  axes = axes.get("t") or axes.get("b") or ()
  parts = math.prod(mesh.shape[a] for a in axes)
  packed, batch = x.cu_seqlens is not None, x.lengths.shape[0]
  # Places are counted from a sequence's last token, which a shard may not have.
  placed = cfg.window != (-1, -1) or x.slopes is not None
  if ({*axes} & {*heads} or (x.q.shape[0] if packed else batch) % parts
      or packed and x.places is None and placed and cfg.window[1] != 0):
    axes = ()
  if not axes:
    return {}, run

  def lower(x: Operands):
    rank = lax.axis_index(axes).astype(jnp.int32)
    if not packed:
      if x.indptr is not None:
        own = batch // parts
        x = x._replace(indptr=lax.dynamic_slice_in_dim(
            x.indptr, rank * own, own + 1))
      return run(x)
    # Sequences are all here, most of them without a row.
    rows, cu = x.q.shape[0], x.cu_seqlens
    own = jnp.clip(cu - rank * rows, 0, rows)
    missing = cu - rank * rows - own  # Rows of other shards, before or behind.
    x = x._replace(cu_seqlens=own)
    if x.places is not None:
      return run(x._replace(places=x.places - missing[:-1]))
    if placed:
      # A last page may have fewer tokens than none.
      behind = jnp.clip(missing[1:], 0, jnp.diff(cu))
      x = x._replace(lengths=x.lengths - behind)
    return run(x)

  return {"t": axes, "b": () if packed else axes}, lower


def _specs(cfg: Config, x: Operands):
  hk = shape_of(cfg, x).hk
  q_head = "h" if x.q.shape[1] == hk else "g"
  kv_head = "_" if cfg.heads else "h"
  names = LAYOUTS[cfg.layout]
  cache = lambda i: tuple(kv_head if n == "head" else "_" for n in names[i])
  scale = lambda names: tuple(
      kv_head if n == "head" else "_" for n in names) or ("_",)
  given = lambda t, spec: None if t is None else spec
  specs = specs_of_tokens(x)._replace(
      q=("t", q_head, "_"), k_cache=cache(0),
      v_cache=given(x.v_cache, cache(-1)), k_scale=scale(cfg.k_scale),
      v_scale=scale(cfg.v_scale), sinks=given(x.sinks, (q_head,)),
      slopes=given(x.slopes, (q_head,)))
  return (specs,), (("t", q_head, "_"),
                    (q_head, "t") if cfg.return_lse else None)


def _plan(cfg: Config, run, mesh, args):
  """KV heads are divided as the cache's are, or else as q's."""
  x, = args
  (specs,), _ = _specs(cfg, x)
  if cfg.heads:
    return divided_tokens(cfg, run, mesh, x)
  found = axes_of_arguments(mesh, (specs.k_cache, specs.q), ("h", "g"),
                            (x.k_cache, x.q))
  axes = found.get("h") or found.get("g") or ()
  parts = int(np.prod([mesh.shape[a] for a in axes]))
  if shape_of(cfg, x).hk % parts:
    axes = ()
  tokens, run = divided_tokens(cfg, run, mesh, x, axes)
  return {"h": axes, "g": axes, **tokens}, run


def in_turn(cfg: Config, op, size, mapped, x):
  """A mapped axis: one call after another."""
  del cfg
  return lax.map(op, with_axis(size, *mapped, x))


_TOKENS = ("t", "b")
_SPLIT = ("h", "g", *_TOKENS)

# (Config, Operands) -> (out [tokens, hq, dv], lse [hq, tokens] or None)
attend = operator(
    target="paged_attend", kernel=kernel, reference=reference, specs=_specs,
    split=_SPLIT, serves=serves, dtypes=DTYPES, plan=_plan, batch=in_turn)
