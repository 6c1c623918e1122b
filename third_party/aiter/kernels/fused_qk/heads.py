# SPDX-License-Identifier: Apache-2.0
"""Heads of queries, keys and values, made and stored in one launch.

RMSNorm of queries and keys, rotation, rounding to 8 bits and the write into a
paged cache. A program has TILE_M rows, which are heads of queries, of keys or
of values of one token after the other: few heads fill a tile too.

A head's columns come in three parts: the first and the second numbers of the
pairs that are rotated, and the rest. Where all are pairs of neighbours, they
are one part, of which a thread reads 16 bytes at once and not two.
"""

import triton
import triton.language as tl

from third_party.aiter.kernels.cache import write
from third_party.aiter.kernels.core.rounding import divide, magnitude
from third_party.aiter.kernels.fused_qk import latent
from third_party.aiter.kernels.fused_qk.family import FLAGS as _FLAGS

GPTJ = latent.GPTJ
NORM = latent.NORM
CACHE_BYTES = latent.CACHE_BYTES
Q_BYTES = latent.Q_BYTES
K_SCALED = latent.K_SCALED
Q_SCALED = latent.Q_SCALED
V_SCALED = tl.constexpr(_FLAGS["v_scaled"])
GEMMA = tl.constexpr(_FLAGS["gemma"])  # The weight is 1 + weight.
JOINT = tl.constexpr(_FLAGS["joint"])  # One norm of all heads of a token.
SECTIONS = tl.constexpr(_FLAGS["sections"])  # Of pairs, each by a position.
# Of each three pairs the second is of the second section, and the third of the
# third, up to these sections' ends.
INTERLEAVED = tl.constexpr(_FLAGS["interleaved"])
F32_TABLES = tl.constexpr(_FLAGS["f32_tables"])
TOKEN = tl.constexpr(_FLAGS["token"])  # Scales of the cache are found.
KV_OUT = tl.constexpr(_FLAGS["kv_out"])  # Keys and values are results too.
K_RUNS = tl.constexpr(_FLAGS["k_runs"])  # Columns lie by 16 bytes.
V_RUNS = tl.constexpr(_FLAGS["v_runs"])
RUNS = write.RUNS
base_of = write._base
place_of = write._place
put = latent._put
scale_of = write._scale_of
store_in_cache = write._store
codes = write.codes


@triton.jit
def _each(heads, flags, TILE_M: tl.constexpr):
  """Rows of a token: its heads; of a joint norm, whole tiles."""
  if flags & JOINT:
    heads = tl.cdiv(heads, TILE_M) * TILE_M
  return heads


@triton.jit
def _tiles(tokens, heads, flags, TILE_M: tl.constexpr):
  return tl.cdiv(tokens * _each(heads, flags, TILE_M), TILE_M)


@triton.jit
def _rows(tile, tokens, heads, flags, TILE_M: tl.constexpr):
  """(tokens, heads, whether they are there) of a tile, [TILE_M, 1]."""
  each = _each(heads, flags, TILE_M)
  first = tile * TILE_M
  token = first // each
  r = first - token * each + tl.arange(0, TILE_M)[:, None]
  ahead = r // each
  token += ahead
  head = r - ahead * each
  return token.to(tl.int64), head, (token < tokens) & (head < heads)


@triton.jit
def _columns(dim, pairs, first, flags, HALF: tl.constexpr, REST: tl.constexpr,
             ALIGN: tl.constexpr, NEAR: tl.constexpr = 0):
  """(columns, whether they are there) of the parts of a head."""
  if NEAR:
    c = tl.arange(0, 2 * HALF)[None, :]
    cols = (c,)
    there = (c < dim,)
  else:
    c = tl.arange(0, HALF)[None, :]
    near = (flags & GPTJ) != 0
    c1 = first + tl.where(near, 2 * c, c)
    cols = (c1, c1 + tl.where(near, 1, pairs))
    there = (c < pairs, c < pairs)
  if REST:
    r = tl.arange(0, REST)
    c = tl.where(r < first, r, r + 2 * pairs)
    c = tl.max_contiguous(tl.multiple_of(c, ALIGN), ALIGN)
    cols += (c[None, :],)
    there += ((r < dim - 2 * pairs)[None, :],)
  return cols, there


@triton.jit
def _load(x, at, inside, cols, there):
  """The parts of heads that begin at `at`, in float32."""
  parts = ()
  for i in tl.static_range(len(cols)):
    parts += (tl.load(x + (at + cols[i]), inside & there[i], 0.0).to(
        tl.float32),)
  return parts


@triton.jit
def _squares(parts):
  """The sum of the squares of each head: [heads, 1]."""
  if len(parts) == 1:
    total = tl.sum(parts[0] * parts[0], 1, keep_dims=True)
  else:
    total = tl.sum(parts[0] * parts[0] + parts[1] * parts[1], 1, keep_dims=True)
  for i in tl.static_range(2, len(parts)):
    total += tl.sum(parts[i] * parts[i], 1, keep_dims=True)
  return total


@triton.jit
def _normalised(parts, x, start, weight, head, heads, dim, cols, there, eps,
                flags, TILE_M: tl.constexpr, FLAGS: tl.constexpr):
  """The parts of heads, of which a token's are `heads` from `start` on."""
  at = tl.zeros([1, 1], tl.int32)
  if JOINT & FLAGS:
    at = tl.where((flags & JOINT) != 0, tl.minimum(head, heads - 1) * dim, 0)
  w = _load(weight, at, at >= 0, cols, there)
  total = _squares(parts)
  count = dim
  if JOINT & FLAGS:
    if JOINT & flags:
      total = tl.zeros([TILE_M, 1], tl.float32)
      for h0 in range(0, heads, TILE_M):
        h = h0 + tl.arange(0, TILE_M)[:, None]
        total += _squares(_load(x, start + h * dim, h < heads, cols, there))
      total = tl.zeros([TILE_M, 1], tl.float32) + tl.sum(total, 0)
      count = heads * dim
  scale = 1.0 / tl.sqrt_rn(total / count + eps)
  shift = tl.where((flags & GEMMA) != 0, 1.0, 0.0)
  out = ()
  for i in tl.static_range(len(parts)):
    out += (parts[i] * scale * (w[i] + shift),)
  return out


@triton.jit
def _tables(token, inside, given, flags, HALF: tl.constexpr,
            FLAGS: tl.constexpr):
  """(cosines, sines) of tokens, [rows, HALF].

  given: (positions, cos, sin, cos_own, sin_own, tokens, table_rows,
  table_stride, pairs, section_0, section_1).
  """
  positions, cos, sin, cos_own, sin_own, tokens, table_rows = given[:7]
  table_stride, pairs, section_0, section_1 = given[7:]
  c = tl.arange(0, HALF)[None, :]
  row = tl.load(positions + token, inside, 0)
  if SECTIONS & FLAGS:
    part = (c >= section_0).to(tl.int32) + (c >= section_1).to(tl.int32)
    if flags & INTERLEAVED:
      part = tl.where((c % 3 == 1) & (c < section_0), 1,
                      tl.where((c % 3 == 2) & (c < section_1), 2, 0))
    part = tl.where((flags & SECTIONS) != 0, part, 0)
    row = tl.load(positions + (token + part.to(tl.int64) * tokens), inside, 0)
  row = tl.minimum(tl.maximum(row, 0), table_rows - 1)
  at = row.to(tl.int64) * table_stride + c
  inside = inside & (c < pairs)
  if flags & F32_TABLES:
    u = tl.load(cos + at, inside, 0.0)
    v = tl.load(sin + at, inside, 0.0)
  else:
    u = tl.load(cos_own + at, inside, 0.0).to(tl.float32)
    v = tl.load(sin_own + at, inside, 0.0).to(tl.float32)
  return u, v


@triton.jit
def _made(x, token, head, inside, stride, weight, heads, dim, cols, there,
          given, eps, flags, TILE_M: tl.constexpr, HALF: tl.constexpr,
          FLAGS: tl.constexpr):
  """Heads of queries or keys, normalised and rotated."""
  start = token * stride
  parts = _load(x, start + head * dim, inside, cols, there)
  cos, sin = _tables(token, inside, given, flags, HALF, FLAGS)
  if flags & NORM:
    parts = _normalised(parts, x, start, weight, head, heads, dim, cols, there,
                        eps, flags, TILE_M, FLAGS)
  if len(parts) == 1:
    a, b = tl.split(tl.reshape(parts[0], [TILE_M, HALF, 2]))
    out = tl.join(a * cos - b * sin, b * cos + a * sin)
    out = (tl.reshape(out, [TILE_M, 2 * HALF]),)
  else:
    out = (parts[0] * cos - parts[1] * sin, parts[1] * cos + parts[0] * sin)
  for i in tl.static_range(2, len(parts)):
    out += (parts[i],)
  return out


@triton.jit
def _store(parts, cols, there, inside, token, head, heads, dim, out, cache,
           cache_bytes, scale, side, scale_side, slot, num_slots, page_size,
           kind, flags, scaled, places, NATIVE: tl.constexpr):
  """Keys or values to the cache, and to an array of their own."""
  if flags & KV_OUT:
    at = (token * heads + head) * dim
    for i in tl.static_range(len(parts)):
      tl.store(out + (at + cols[i]), parts[i].to(out.dtype.element_ty),
               inside & there[i])
  stored, page, offset = place_of(slot, num_slots, tl.maximum(page_size, 1))
  inside = inside & stored
  base = base_of(side, page, offset, head)
  if flags & CACHE_BYTES:
    if flags & TOKEN:
      m = tl.max(magnitude(parts[0]), 1, keep_dims=True)
      for i in tl.static_range(1, len(parts)):
        m = tl.maximum(m, tl.max(magnitude(parts[i]), 1, keep_dims=True))
      s = scale_of(m, 1e-10, kind, 0)
      at = (scale_side[0] + page.to(tl.int64) * scale_side[1]
            + offset * scale_side[2] + head * scale_side[3])
      tl.store(scale + at, s, inside)
      for i in tl.static_range(len(parts)):
        x = codes(divide(parts[i], s), kind, NATIVE)
        store_in_cache(cache_bytes, x, side, base, cols[i],
                       inside & there[i], dim, places, 16)
    else:
      s = tl.full(head.shape, 1.0, tl.float32)
      if scaled:
        s = tl.load(scale + head * scale_side[3], inside, 1.0)
      for i in tl.static_range(len(parts)):
        x = codes(latent.divide_by_any(parts[i], s), kind, NATIVE)
        store_in_cache(cache_bytes, x, side, base, cols[i],
                       inside & there[i], dim, places, 16)
  else:
    for i in tl.static_range(len(parts)):
      store_in_cache(cache, parts[i].to(cache.dtype.element_ty), side, base,
                     cols[i], inside & there[i], dim, places, 8)


@triton.jit
def fused_qk_heads(
    q, k, v, q_weight, k_weight, cos, sin, cos_own, sin_own, positions, slots,
    q_scale, k_scale, v_scale, q_out, q_out_bytes, k_out, v_out, k_cache,
    k_bytes, v_cache, v_bytes,
    k_start, k_page, k_run_offset, k_offset, k_split, k_head, k_run, k_col,
    v_start, v_page, v_run_offset, v_offset, v_split, v_head, v_run, v_col,
    k_scale_start, k_scale_page, k_scale_offset, k_scale_head,
    v_scale_start, v_scale_page, v_scale_offset, v_scale_head,
    tokens, heads, k_heads, v_heads, q_stride, k_stride, v_stride, dim, pairs,
    first, table_rows, table_stride, section_0, section_1, num_slots, page_size,
    kind, q_kind, eps, flags,
    TILE_M: tl.constexpr, HALF: tl.constexpr, REST: tl.constexpr,
    ALIGN: tl.constexpr, FLAGS: tl.constexpr, SURE: tl.constexpr,
    NATIVE: tl.constexpr,
):
  """Semantics in include/aiter/fused_qk.h.

  A token's queries, keys and values begin at multiples of their strides. Sides
  and scales are as kernels/cache/write.py has them; without a cache num_slots
  is 0. Rows of both tables are table_stride apart. FLAGS: those that may be
  set. SURE: those that are.

  Grid: (tiles of queries, of keys and of values).
  """
  flags = (flags | SURE) & FLAGS
  k_places = (RUNS if K_RUNS & SURE else
              tl.where((flags & K_RUNS) != 0, RUNS, 0))
  v_places = (RUNS if V_RUNS & SURE else
              tl.where((flags & V_RUNS) != 0, RUNS, 0))
  tile = tl.program_id(0)
  q_tiles = _tiles(tokens, heads, flags, TILE_M)
  k_tiles = _tiles(tokens, k_heads, flags, TILE_M)
  if tile < q_tiles + k_tiles:
    cols, there = _columns(dim, pairs, first, flags, HALF, REST, ALIGN,
                           GPTJ & SURE)
    given = (positions, cos, sin, cos_own, sin_own, tokens, table_rows,
             table_stride, pairs, section_0, section_1)
    if tile < q_tiles:
      token, head, inside = _rows(tile, tokens, heads, flags, TILE_M)
      x = _made(q, token, head, inside, q_stride, q_weight, heads, dim, cols,
                there, given, eps, flags, TILE_M, HALF, FLAGS)
      at = (token * heads + head) * dim
      for i in tl.static_range(len(x)):
        put(q_out, q_out_bytes, at + cols[i], x[i], inside & there[i], q_scale,
            (flags & Q_BYTES) != 0, (flags & Q_SCALED) != 0, q_kind, NATIVE)
    else:
      token, head, inside = _rows(
          tile - q_tiles, tokens, k_heads, flags, TILE_M)
      slot = tl.load(slots + token, inside & (num_slots > 0), -1)
      x = _made(k, token, head, inside, k_stride, k_weight, k_heads, dim, cols,
                there, given, eps, flags, TILE_M, HALF, FLAGS)
      _store(x, cols, there, inside, token, head, k_heads, dim, k_out, k_cache,
             k_bytes, k_scale,
             (k_start, k_page, k_run_offset, k_offset, k_split, k_head, k_run,
              k_col),
             (k_scale_start, k_scale_page, k_scale_offset, k_scale_head), slot,
             num_slots, page_size, kind, flags, (flags & K_SCALED) != 0,
             k_places, NATIVE)
  else:
    cols, there = _columns(dim, pairs, first, flags & ~GPTJ, HALF, REST, ALIGN,
                           GPTJ & SURE)
    token, head, inside = _rows(
        tile - q_tiles - k_tiles, tokens, v_heads, flags, TILE_M)
    slot = tl.load(slots + token, inside & (num_slots > 0), -1)
    x = _load(v, token * v_stride + head * dim, inside, cols, there)
    _store(x, cols, there, inside, token, head, v_heads, dim, v_out, v_cache,
           v_bytes, v_scale,
           (v_start, v_page, v_run_offset, v_offset, v_split, v_head, v_run,
            v_col),
           (v_scale_start, v_scale_page, v_scale_offset, v_scale_head), slot,
           num_slots, page_size, kind, flags, (flags & V_SCALED) != 0,
           v_places, NATIVE)
