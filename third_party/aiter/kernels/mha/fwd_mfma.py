# SPDX-License-Identifier: Apache-2.0
"""fwd.py's attention of head dimension 128 for CDNA's matrix units, in Gluon.

Scores are [keys, rows] and the output [columns, rows], so that a lane's weights
are its operand of the second product. A wave computes all of a tile's scores of
its 32 rows. The head dimension lies in LDS in quarters: one is read while the
one before it is multiplied.

gfx950 copies tiles straight to LDS, into the half that is not read. There the
exponentials of a tile stand between the matrix instructions that make the next
one's scores: each wave keeps both units busy. gfx942 has LDS for one tile of
two programs, and brings the next one by way of registers; its two programs a
unit hide each other's exponentials.

Of aligned heads, with nothing that changes scores but a window.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.amd.cdna3 import buffer_load, mfma
from triton.experimental.gluon.language.amd.cdna4 import async_copy
from triton.experimental.gluon.language.amd.hint import sched_barrier
from triton.experimental.gluon.language.amd.slice import slice as part_of

from third_party.aiter.kernels.mha import parts_mfma as parts
from third_party.aiter.kernels.mha import scores

HEAD = gl.constexpr(128)
PART = parts.PART


@gluon.constexpr_function
def _sums(waves):
  """[2, 4, rows]: four numbers of each of a row's two lanes in _matrix."""
  return gl.DistributedLinearLayout(
      reg_bases=[[0, 1, 0], [0, 2, 0]],
      lane_bases=[[0, 0, 1 << i] for i in range(5)] + [[1, 0, 0]],
      warp_bases=[[0, 0, 32 << i] for i in range(waves.bit_length() - 1)],
      block_bases=[], shape=[2, 4, 32 * waves])


@gluon.constexpr_function
def _copied(keys, first, then):
  """How four waves copy a quarter, 8 columns a lane: the keys of one wave count
  by `first`, waves by `then`."""
  return gl.DistributedLinearLayout(
      reg_bases=[[0, 1], [0, 2], [0, 4]],
      lane_bases=[[0, 8], [0, 16], *([key, 0] for key in first)],
      warp_bases=[[key, 0] for key in then], block_bases=[], shape=[keys, 32])


@gluon.constexpr_function
def _turned(keys):
  """How four waves copy values: a lane 8 columns of 4 neighbouring keys."""
  return gl.DistributedLinearLayout(
      reg_bases=[[0, 1], [0, 2], [0, 4], [1, 0], [2, 0]],
      lane_bases=[[4, 0], [8, 0], [16, 0], [32, 0], [0, 8], [0, 16]],
      warp_bases=[[0, 32], [0, 64]], block_bases=[], shape=[keys, 128])


@gluon.constexpr_function
def _padded(keys):
  """Quarters of keys in LDS, one behind the other, for copies of 1024 bytes in
  one piece.

  Such a piece has every fourth key. Reads of 16 bytes take keys 0 to 3, 20 to
  23, 8 to 11 and 28 to 31 at once, which so lie in different banks.
  """
  rows = [4, 8, 16, 32, 1, 2, keys, 2 * keys]
  return gl.PaddedSharedLayout(
      [[512, 8]], [[0, 1 << i] for i in range(5)] + [[row, 0] for row in rows],
      [], [4 * keys, 32])


@gluon.jit
def _tile(data, tile, at, CHECK: gl.constexpr):
  """A tile's first element, and where the others lie from there.

  CHECK: of keys behind the sequence's last one, where the tile's first one is.
  """
  ptr, stride, len_k = data
  N: gl.constexpr = at.shape[0]
  if CHECK:
    key = gl.arange(0, N, gl.SliceLayout(1, at.type.layout))[:, None]
    at = gl.where(key < len_k - tile * N, at, at - key * stride)
  return ptr + (tile * N).to(gl.int64) * stride, at


@gluon.jit
def _copy(data, tile, at, smem, CHECK: gl.constexpr):
  """Begins to copy a tile's quarters to LDS."""
  ptr, at = _tile(data, tile, at, CHECK)
  N: gl.constexpr = at.shape[0]
  for i in gl.static_range(4):
    async_copy.buffer_load_to_shared(smem.slice(i * N, N), ptr, at + i * PART)


@gluon.jit
def _load(data, tile, at):
  """Begins to load a tile's quarters of keys."""
  ptr, at = _tile(data, tile, at, True)
  return (buffer_load(ptr, at), buffer_load(ptr, at + PART),
          buffer_load(ptr, at + 2 * PART), buffer_load(ptr, at + 3 * PART))


@gluon.jit
def _store(smem, parts):
  N: gl.constexpr = parts[0].shape[0]
  for i in gl.static_range(4):
    smem.slice(i * N, N).store(parts[i])


@gluon.jit
def _keys(smem, i: gl.constexpr, S: gl.constexpr):
  """A quarter, as the left operand. The wait for its copy was for all waves."""
  N: gl.constexpr = smem.shape[0] // 4
  return async_copy.load_shared_relaxed(
      smem.slice(i * N, N), gl.DotOperandLayout(0, S, 8))


@gluon.jit
def _values(smem, i: gl.constexpr, S: gl.constexpr):
  """As _keys; a lane has 4 keys, as many as of its scores lie together."""
  N: gl.constexpr = smem.shape[0] // 4
  return async_copy.load_shared_relaxed(
      smem.slice(i * N, N).permute([1, 0]), gl.DotOperandLayout(0, S, 4))


@gluon.jit
def _hide(s, n0, m0, len_k, window):
  """s, with -inf where a row does not see a key."""
  key = gl.arange(0, s.shape[0], gl.SliceLayout(1, s.type.layout))[:, None]
  row = gl.arange(0, s.shape[1], gl.SliceLayout(0, s.type.layout))
  position = row + (m0 + window.offset - n0)
  last = gl.minimum(position + window.right, len_k - 1 - n0)
  shown = (key >= (position - window.left)[None, :]) & (key <= last[None, :])
  return gl.where(shown, s, float("-inf"))


@gluon.jit
def _largest(s, m, scale):
  """The new m, what to take from scores, and what sums so far shrink by."""
  m_new = gl.maximum(m, gl.max(s, 0) * scale)
  # A row that has seen no key yet: anything finite keeps the NaN away.
  m_exp = gl.where(m_new == float("-inf"), 0.0, m_new)
  return m_new, m_exp, gl.exp2(m - m_exp)


@gluon.jit
def _weights(s, m_exp, scale):
  return gl.exp2(s * scale - m_exp[None, :])


@gluon.jit
def _own(p):
  """Sums of each lane's own weights; lanes add theirs up at the end."""
  own = gl.sum(p.reshape([p.shape[0] // 8, 2, 4, p.shape[1]]), 0)
  return gl.convert_layout(own, _sums(gl.num_warps()))


@gluon.jit
def _faded(l, alpha):
  ROWS: gl.constexpr = gl.SliceLayout(0, gl.SliceLayout(1, l.type.layout))
  return l * gl.convert_layout(alpha, ROWS)[None, None, :]


@gluon.jit
def _operand(p, dtype: gl.constexpr, CHEAP_CAST: gl.constexpr):
  """Weights as the right operand: in the lanes that have them."""
  return gl.convert_layout(parts.cast(p, dtype, CHEAP_CAST),
                           gl.DotOperandLayout(1, p.type.layout, 4))


@gluon.jit
def _half(x, i: gl.constexpr, DIM: gl.constexpr):
  """Half of a tile's keys, which are its dimension DIM."""
  if DIM == 0:
    return part_of(x, [x.shape[0] // 2, x.shape[1]], [x.shape[0] // 2 * i, 0])
  else:
    return part_of(x, [x.shape[0], x.shape[1] // 2], [0, x.shape[1] // 2 * i])


@gluon.jit
def _add(acc, v, p0, p1):
  return mfma(_half(v, 1, 1), p1, mfma(_half(v, 0, 1), p0, acc))


@gluon.jit
def _attend_copied(
    sums, q, k, v, m0, window, steps, full, edges, scale, dtype: gl.constexpr,
    TILE_M: gl.constexpr, TILE_N: gl.constexpr, S: gl.constexpr
):
  """m, l and acc of all tiles, copied straight to LDS."""
  m, l, acc = sums
  K: gl.constexpr = _copied(TILE_N, (4, 8, 16, 32), (1, 2))
  V: gl.constexpr = _copied(TILE_N, (1, 2, 4, 8), (16, 32))
  k_at = parts.places(k[1], TILE_N, TILE_N, PART, K)
  v_at = parts.places(v[1], TILE_N, TILE_N, PART, V)
  keys = gl.allocate_shared_memory(dtype, [2, 4 * TILE_N, PART],
                                   _padded(TILE_N))
  values = gl.allocate_shared_memory(
      dtype, [2, 4 * TILE_N, PART], gl.SwizzledSharedLayout(8, 1, 1, [1, 0]))
  slot = 0
  tile = parts.tile_at(0, steps, edges)
  following = parts.tile_at(1, steps, edges)
  _copy(k, tile, k_at, keys.index(0), True)
  async_copy.commit_group()
  _copy(v, tile, v_at, values.index(0), True)
  _copy(k, following, k_at, keys.index(1), True)
  async_copy.commit_group()
  async_copy.wait_group(1)
  s = gl.zeros([TILE_N, TILE_M], gl.float32, S)
  for i in gl.static_range(4):
    s = mfma(_keys(keys.index(0), i, S), q[i], s)
  s = _hide(s, tile * TILE_N, m0, k[2], window)
  m, m_exp, alpha = _largest(s, m, scale)
  # Copies two tiles behind need no check before the last two that all see.
  inside = gl.maximum(full - 2, 0)
  for part in gl.static_range(2):
    for step in range(inside * part, inside if part == 0 else steps - 1):
      after = parts.tile_at(step + 2, steps, edges)
      # What a step multiplies was copied in the one before it.
      async_copy.wait_group(0)
      _copy(k, after, k_at, keys.index(slot), part == 1)
      k_tile = keys.index(1 - slot)
      v_tile = values.index(slot)
      k0 = _keys(k_tile, 0, S)
      k1 = _keys(k_tile, 1, S)
      sched_barrier()
      _copy(v, following, v_at, values.index(1 - slot), part == 1)
      async_copy.commit_group()
      # The scheduler finds a place for each instruction between two barriers.
      p0 = _weights(_half(s, 0, 0), m_exp, scale)
      sched_barrier()
      s_next = mfma(k0, q[0], gl.zeros([TILE_N, TILE_M], gl.float32, S))
      sched_barrier()
      k2 = _keys(k_tile, 2, S)
      s_next = mfma(k1, q[1], s_next)
      l = _faded(l, alpha) + _own(p0)
      p0 = _operand(p0, dtype, False)
      sched_barrier()
      k3 = _keys(k_tile, 3, S)
      s_next = mfma(k2, q[2], s_next)
      p1 = _weights(_half(s, 1, 0), m_exp, scale)
      v0 = _values(v_tile, 0, S)
      sched_barrier()
      s_next = mfma(k3, q[3], s_next)
      l += _own(p1)
      p1 = _operand(p1, dtype, False)
      sched_barrier()
      if part == 1:
        if step + 1 >= full:
          s_next = _hide(s_next, following * TILE_N, m0, k[2], window)
      s = s_next
      fade = gl.convert_layout(alpha, gl.SliceLayout(0, S))[None, :]
      a0, a1, a2, a3 = acc
      v1 = _values(v_tile, 1, S)
      a0 = _add(a0 * fade, v0, p0, p1)
      m, m_exp, alpha = _largest(s, m, scale)
      sched_barrier()
      v2 = _values(v_tile, 2, S)
      a1 = _add(a1 * fade, v1, p0, p1)
      v3 = _values(v_tile, 3, S)
      sched_barrier()
      a2 = _add(a2 * fade, v2, p0, p1)
      a3 = _add(a3 * fade, v3, p0, p1)
      acc = a0, a1, a2, a3
      following = after
      slot = 1 - slot
  async_copy.wait_group(0)
  p = _weights(s, m_exp, scale)
  l = _faded(l, alpha) + _own(p)
  p = _operand(p, dtype, False)
  v_tile = values.index(slot)
  fade = gl.convert_layout(alpha, gl.SliceLayout(0, S))[None, :]
  a0, a1, a2, a3 = acc
  a0 = mfma(_values(v_tile, 0, S), p, a0 * fade)
  a1 = mfma(_values(v_tile, 1, S), p, a1 * fade)
  a2 = mfma(_values(v_tile, 2, S), p, a2 * fade)
  a3 = mfma(_values(v_tile, 3, S), p, a3 * fade)
  return m, l, (a0, a1, a2, a3)


@gluon.jit
def _attend_loaded(
    sums, q, k, v, m0, window, steps, full, edges, scale, dtype: gl.constexpr,
    CHEAP_CAST: gl.constexpr, TILE_M: gl.constexpr, TILE_N: gl.constexpr,
    S: gl.constexpr
):
  """m, l and acc of all tiles, by way of registers to LDS."""
  m, l, acc = sums
  K: gl.constexpr = _copied(TILE_N, (1, 2, 4, 8), (16, 32))
  KEYS: gl.constexpr = gl.DotOperandLayout(0, S, 8)
  VALUES: gl.constexpr = gl.DotOperandLayout(0, S, 4)
  k_at = parts.places(k[1], TILE_N, TILE_N, PART, K)
  v_at = parts.places(v[1], TILE_N, TILE_N, HEAD, _turned(TILE_N))
  keys = gl.allocate_shared_memory(
      dtype, [4 * TILE_N, PART], gl.SwizzledSharedLayout(8, 2, 4, [1, 0]))
  # Columns of 4 keys in 8 bytes.
  values = gl.allocate_shared_memory(
      dtype, [HEAD, TILE_N], gl.SwizzledSharedLayout(4, 1, 16, [1, 0]))
  tile = parts.tile_at(0, steps, edges)
  _store(keys, _load(k, tile, k_at))
  v_ptr, at = _tile(v, tile, v_at, True)
  values.store(buffer_load(v_ptr, at).permute([1, 0]))
  for part in gl.static_range(2):
    for step in range(full * part, full if part == 0 else steps):
      following = parts.tile_at(step + 1, steps, edges)
      k_next = _load(k, following, k_at)
      s = gl.zeros([TILE_N, TILE_M], gl.float32, S)
      k_part = keys.slice(0, TILE_N).load(KEYS)
      for i in gl.static_range(4):
        k_after = k_part
        if i < 3:
          k_after = keys.slice((i + 1) * TILE_N, TILE_N).load(KEYS)
        s = mfma(k_part, q[i], s)
        k_part = k_after
      sched_barrier()
      _store(keys, k_next)
      v_ptr, at = _tile(v, following, v_at, True)
      v_next = buffer_load(v_ptr, at)
      if part == 1:
        s = _hide(s, tile * TILE_N, m0, k[2], window)
      m, m_exp, alpha = _largest(s, m, scale)
      p = _weights(s, m_exp, scale)
      l = _faded(l, alpha) + _own(p)
      p = _operand(p, dtype, CHEAP_CAST)
      fade = gl.convert_layout(alpha, gl.SliceLayout(0, S))[None, :]
      a0, a1, a2, a3 = acc
      v0 = values.slice(0, PART).load(VALUES)
      v1 = values.slice(PART, PART).load(VALUES)
      a0 = mfma(v0, p, a0 * fade)
      v2 = values.slice(2 * PART, PART).load(VALUES)
      a1 = mfma(v1, p, a1 * fade)
      v3 = values.slice(3 * PART, PART).load(VALUES)
      a2 = mfma(v2, p, a2 * fade)
      a3 = mfma(v3, p, a3 * fade)
      acc = a0, a1, a2, a3
      sched_barrier()
      values.store(v_next.permute([1, 0]))
      tile = following
  return m, l, acc


@gluon.jit
def mha_fwd(
    q, k, v, out, lse, bias, bias_f32, mask, alibi_slopes, sink, dropout_state,
    cu_seqlens_q, cu_seqlens_k, cu_seqlens_q_padded, cu_seqlens_k_padded,
    stride_q, nhead_stride_q, batch_stride_q,
    stride_k, nhead_stride_k, batch_stride_k,
    stride_v, nhead_stride_v, batch_stride_v,
    stride_o, nhead_stride_o, batch_stride_o,
    nhead_stride_lse, batch_stride_lse,
    stride_bias, key_stride_bias, nhead_stride_bias, batch_stride_bias,
    stride_mask, key_stride_mask, nhead_stride_mask, batch_stride_mask,
    batch, seqlen_q, seqlen_k, nhead_q, nhead_k, hdim_q, hdim_v,
    softmax_scale, logits_soft_cap, drop_threshold, rp_keep,
    window_left, window_right, sink_tokens, min_seqlen_q, flags,
    TILE_M: gl.constexpr, TILE_N: gl.constexpr, CHEAP_CAST: gl.constexpr,
    CDNA: gl.constexpr,
):
  """As fwd.py's. Grid: (heads, tiles of rows, batch)."""
  WAVES: gl.constexpr = gl.num_warps()
  gl.static_assert(WAVES == 4 and TILE_M == 128 and TILE_N == 64)
  head = gl.program_id(0)
  # Last rows first: under a causal mask they have the most to do.
  tile_m = gl.num_programs(1) - 1 - gl.program_id(1)
  index = gl.program_id(2)
  b = index.to(gl.int64)
  if flags & scores.PACKED:
    index, tile_m = parts.find_sequence(tile_m, cu_seqlens_q, batch, TILE_M)
    b = gl.to_tensor(0).to(gl.int64)
  q_start, len_q = parts.extent(
      index, cu_seqlens_q, cu_seqlens_q_padded, seqlen_q, flags,
      scores.CU_SEQLENS_Q, scores.CU_SEQLENS_Q_PADDED)
  k_start, len_k = parts.extent(
      index, cu_seqlens_k, cu_seqlens_k_padded, seqlen_k, flags,
      scores.CU_SEQLENS_K, scores.CU_SEQLENS_K_PADDED)
  q_rows = seqlen_q
  if flags & scores.PACKED:
    q_rows = len_q
  if (min_seqlen_q > 0) & (len_q <= min_seqlen_q):
    len_q = 0
  m0 = tile_m * TILE_M
  if m0 >= q_rows:
    return

  parts.assume_stride(stride_q)
  parts.assume_stride(stride_k)
  parts.assume_stride(stride_v)
  parts.assume_stride(stride_o)
  head_k = (head // (nhead_q // nhead_k)).to(gl.int64)
  row = (q_start + m0).to(gl.int64)
  q += b * batch_stride_q + row * stride_q + head.to(gl.int64) * nhead_stride_q
  out += (b * batch_stride_o + row * stride_o
          + head.to(gl.int64) * nhead_stride_o)
  lse += b * batch_stride_lse + head * nhead_stride_lse + row
  k += (b * batch_stride_k + k_start.to(gl.int64) * stride_k
        + head_k * nhead_stride_k)
  v += (b * batch_stride_v + k_start.to(gl.int64) * stride_v
        + head_k * nhead_stride_v)

  seq = scores.Sequence(q_start, q_rows, len_q, k_start, seqlen_k, len_k)
  window = scores.Window(
      parts.offset_of(seq, flags), window_left, window_right, sink_tokens)
  _, low, full_low, full_high, high = parts.key_tiles(
      m0, gl.minimum(m0 + TILE_M, len_q), seq, window, TILE_N, 0)
  steps = high - low

  S: gl.constexpr = parts.matrix(CDNA, WAVES)
  r = gl.arange(0, TILE_M, gl.SliceLayout(0, S))
  # A sink is a key without a value: it opens m and l.
  m_first = float("-inf")
  if flags & scores.SINK:
    m_first = gl.load(sink + index * nhead_q + head) * scores.LOG2E
  m = gl.zeros_like(r).to(gl.float32) + m_first
  SUMS: gl.constexpr = _sums(WAVES)
  l = gl.zeros([2, 4, TILE_M], gl.float32, SUMS) + gl.where(
      m_first == float("-inf"), 0.0, 1.0 / 8)
  zero = gl.zeros([PART, TILE_M], gl.float32, S)
  acc = zero, zero, zero, zero
  if steps > 0:
    dtype: gl.constexpr = q.dtype.element_ty
    q_parts = parts.columns(q, stride_q, len_q - m0, HEAD, S)
    edges = low, full_low, full_high
    full = full_high - full_low
    scale = softmax_scale * scores.LOG2E
    k_data = k, stride_k, len_k
    v_data = v, stride_v, len_k
    if CDNA == 4:
      m, l, acc = _attend_copied(
          (m, l, acc), q_parts, k_data, v_data, m0, window, steps, full, edges,
          scale, dtype, TILE_M, TILE_N, S)
    else:
      m, l, acc = _attend_loaded(
          (m, l, acc), q_parts, k_data, v_data, m0, window, steps, full, edges,
          scale, dtype, CHEAP_CAST, TILE_M, TILE_N, S)

  l = gl.convert_layout(gl.sum(gl.sum(l, 1), 0), gl.SliceLayout(0, S))
  live = (r < len_q - m0) & ((l > 0) | (l != l))
  l_safe = gl.where(live, l, 1.0)
  stored = r < q_rows - m0
  gl.store(lse + r, gl.where(live, m * scores.LN2 + gl.log(l_safe),
                             float("-inf")), mask=stored)
  factor = 1.0 / l_safe
  col = gl.arange(0, PART, gl.SliceLayout(1, S))[:, None]
  o_at = r[None, :] * stride_o + col
  for i in gl.static_range(4):
    x = gl.where(live[None, :], acc[i] * factor[None, :], 0.0)
    gl.store(out + (o_at + i * PART), x.to(out.dtype.element_ty),
             mask=stored[None, :])
