# SPDX-License-Identifier: Apache-2.0
"""fwd.py's attention of 64 and 128 columns for CDNA's matrix units, in Gluon.

Scores are [keys, rows] and the output [columns, rows], so that a lane's weights
are its operand of the second product. A wave computes all of a tile's scores of
its 32 rows. The head dimension lies in LDS in parts of 32: one is read while
the one before it is multiplied.

gfx950 copies tiles straight to LDS, into the half that is not read. There each
wave keeps both units busy. Beside the matrix instructions that make a tile's
scores it shrinks the output and takes half of the exponentials of the tile
before it; beside those that multiply values it finds the largest scores and
takes the other half. The one barrier of a tile is in the middle of these: what
is left of them hides the first reads of the next tile's keys.

gfx942 has LDS for one tile of two programs, and brings the next one by way of
registers; its two programs a unit hide each other's exponentials.

Of aligned heads, with nothing that changes scores but a window, or a bias of
one row for all (scores.ONE_ROW), for which both have gfx942's loop. Scores
begin with the bias: keys get three more columns, its parts of 8 bits each, and
rows as many ones. Keys and values that it hides are read as zeros.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.amd.cdna3 import buffer_load, mfma
from triton.experimental.gluon.language.amd.cdna4 import async_copy
from triton.experimental.gluon.language.amd.hint import sched_barrier

from third_party.aiter.kernels.mha import parts_mfma as parts
from third_party.aiter.kernels.mha import scores

PART = parts.PART


@gluon.constexpr_function
def _turned(keys, head):
  """How four waves copy values: a lane columns of 4 neighbouring keys."""
  cols = [[0, 1 << i] for i in range(head.bit_length() - 1)]
  own = len(cols) - 4  # Of a lane; two bits are lanes' and two are waves'.
  return gl.DistributedLinearLayout(
      reg_bases=cols[:own] + [[1, 0], [2, 0]],
      lane_bases=[[4, 0], [8, 0], [16, 0], [32, 0]] + cols[own:own + 2],
      warp_bases=cols[own + 2:], block_bases=[], shape=[keys, head])


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
def _first(data, tile, N: gl.constexpr):
  """A tile's first element."""
  ptr, stride, len_k = data
  return ptr + (tile * N).to(gl.int64) * stride


@gluon.jit
def _present(data, tile, at):
  """Where a tile's elements lie from its first one: of keys behind the last one
  of the sequence, where that is."""
  ptr, stride, len_k = data
  N: gl.constexpr = at.shape[0]
  key = gl.arange(0, N, gl.SliceLayout(1, at.type.layout))[:, None]
  return gl.where(key < len_k - tile * N, at, at - key * stride)


@gluon.jit
def _copy(ptr, at, smem):
  """Begins to copy a tile's quarters to LDS."""
  N: gl.constexpr = at.shape[0]
  for i in gl.static_range(4):
    async_copy.buffer_load_to_shared(smem.slice(i * N, N), ptr, at + i * PART)


@gluon.jit
def _copy_tile(data, tile, at, smem):
  """As _copy, of a tile that may be the sequence's last one."""
  _copy(_first(data, tile, at.shape[0]), _present(data, tile, at), smem)


@gluon.jit
def _bias(row, tile, N: gl.constexpr, LAYOUT: gl.constexpr):
  """Begins to load a tile's biases; what lies behind the last one is hidden."""
  ptr, count = row
  key = gl.arange(0, N, LAYOUT)
  return buffer_load(ptr + tile * N, key, mask=key < count - tile * N,
                     other=float("-inf"))


@gluon.jit
def _seen(bias):
  """A bit for each of 64 keys, whose biases lanes have: whether it is seen."""
  return gl.inline_asm("v_cmp_lg_f32_e64 $0, $1, $2", "=s,v,s",
                       (bias, float("-inf")), gl.int64, is_pure=True)


@gluon.jit
def _begin(bias, inverse, TILE_M: gl.constexpr, S: gl.constexpr):
  """What a tile's scores begin with: the biases by `inverse` for every row."""
  A: gl.constexpr = gl.DotOperandLayout(0, S, 4)
  B: gl.constexpr = gl.DotOperandLayout(1, S, 4)
  N: gl.constexpr = bias.shape[0]
  K: gl.constexpr = S.instr_shape[2]
  rest = bias * inverse
  part = gl.arange(0, K, gl.SliceLayout(0, A))[None, :]
  a = gl.zeros([N, K], gl.bfloat16, A)
  for i in gl.static_range(3):
    bits = rest.to(gl.int32, bitcast=True)
    own = (bits >> 16).to(gl.int16).to(gl.bfloat16, bitcast=True)
    a = gl.where(part == i, own[:, None], a)
    # Of what is hidden nothing is left; infinity less itself is no number.
    rest = gl.where(bias > float("-inf"),
                    rest - (bits & -65536).to(gl.float32, bitcast=True), 0.0)
  ones = gl.full([K, TILE_M], 1.0, gl.bfloat16, B)
  return mfma(a, ones, gl.zeros([N, TILE_M], gl.float32, S))


@gluon.jit
def _buffer_load(ptr, at, seen, ROW: gl.constexpr):
  """Begins to load of keys that are seen; zeros of others."""
  if ROW:
    key = gl.arange(0, at.shape[0], gl.SliceLayout(1, at.type.layout))
    shown = (seen >> key.to(gl.int64)) & 1
    x = buffer_load(ptr, at, mask=(shown != 0)[:, None], other=0.0)
  else:
    x = buffer_load(ptr, at)
  return x


@gluon.jit
def _load(data, tile, at, seen, PARTS: gl.constexpr, ROW: gl.constexpr):
  """Begins to load a tile of keys in so many parts."""
  ptr = _first(data, tile, at.shape[0])
  at = _present(data, tile, at)
  x = ()
  for i in gl.static_range(PARTS):
    x = x + (_buffer_load(ptr, at + i * PART, seen, ROW),)
  return x


@gluon.jit
def _load_values(data, tile, at, seen, ROW: gl.constexpr):
  """Begins to load a tile of values."""
  return _buffer_load(_first(data, tile, at.shape[0]),
                      _present(data, tile, at), seen, ROW)


@gluon.jit
def _store(smem, parts):
  N: gl.constexpr = parts[0].shape[0]
  for i in gl.static_range(len(parts)):
    smem.slice(i * N, N).store(parts[i])


@gluon.jit
def _keys(smem, i: gl.constexpr, half: gl.constexpr, S: gl.constexpr):
  """Half of the keys of a quarter, as the left operand. The wait for its copy
  was for all waves."""
  N: gl.constexpr = smem.shape[0] // 8
  return async_copy.load_shared_relaxed(
      smem.slice((2 * i + half) * N, N), gl.DotOperandLayout(0, S, 8))


@gluon.jit
def _values(smem, i: gl.constexpr, half: gl.constexpr, S: gl.constexpr):
  """As _keys; a lane has 4 keys, as many as of its scores lie together."""
  N: gl.constexpr = smem.shape[0] // 8
  return async_copy.load_shared_relaxed(
      smem.slice((2 * i + half) * N, N).permute([1, 0]),
      gl.DotOperandLayout(0, S, 4))


@gluon.jit
def _hide(s, n0, m0, len_k, window, ROW: gl.constexpr = False):
  """s, with -inf where a row does not see a key.

  ROW: keys are counted anew, or a lane's would be kept, a register each.
  """
  key = gl.arange(0, s.shape[0], gl.SliceLayout(1, s.type.layout))[:, None]
  if ROW:
    key = gl.inline_asm_elementwise("v_mov_b32 $0, $1", "=v,v", [key], gl.int32,
                                    False, 1)
  row = gl.arange(0, s.shape[1], gl.SliceLayout(0, s.type.layout))
  position = row + (m0 + window.offset - n0)
  last = gl.minimum(position + window.right, len_k - 1 - n0)
  shown = (key >= (position - window.left)[None, :]) & (key <= last[None, :])
  return gl.where(shown, s, float("-inf"))


@gluon.jit
def _split(x):
  """A lane's scores of either half of the keys."""
  return x.reshape([2, x.shape[0] // 2, x.shape[1]]).permute([1, 2, 0]).split()


@gluon.jit
def _join(x0, x1, S: gl.constexpr):
  """What _split gave."""
  x = gl.join(x0, x1).permute([2, 0, 1])
  return gl.convert_layout(x.reshape([2 * x.shape[1], x.shape[2]]), S)


@gluon.jit
def _attend_copied(
    sums, q, k, v, m0, window, steps, full, edges, scale, dtype: gl.constexpr,
    TILE_M: gl.constexpr, TILE_N: gl.constexpr, S: gl.constexpr
):
  """m, l and acc of all tiles, copied straight to LDS."""
  m, l, acc = sums
  HALF: gl.constexpr = TILE_N // 2
  K: gl.constexpr = parts.copied(TILE_N, (4, 8, 16, 32), (1, 2))
  V: gl.constexpr = parts.copied(TILE_N, (1, 2, 4, 8), (16, 32))
  k_at = parts.places(k[1], TILE_N, TILE_N, PART, K)
  v_at = parts.places(v[1], TILE_N, TILE_N, PART, V)
  tile = parts.tile_at(0, steps, edges)
  following = parts.tile_at(1, steps, edges)
  after = parts.tile_at(2, steps, edges)
  keys = gl.allocate_shared_memory(dtype, [2, 4 * TILE_N, PART],
                                   _padded(TILE_N))
  _copy_tile(k, tile, k_at, keys.index(0))
  _copy_tile(k, following, k_at, keys.index(1))
  async_copy.commit_group()
  # By way of LDS, where values are later.
  q = parts.columns(q[0], q[1], q[2], 128, S)
  values = gl.allocate_shared_memory(
      dtype, [2, 4 * TILE_N, PART], gl.SwizzledSharedLayout(8, 1, 1, [1, 0]))
  _copy_tile(v, tile, v_at, values.index(0))
  async_copy.commit_group()
  async_copy.wait_group(1)
  zero = gl.zeros([HALF, TILE_M], gl.float32, S)
  s0 = zero
  s1 = zero
  for i in gl.static_range(4):
    s0 = mfma(_keys(keys.index(0), i, 0, S), q[i], s0)
    s1 = mfma(_keys(keys.index(0), i, 1, S), q[i], s1)
  s0 = _hide(s0, tile * TILE_N, m0, k[2], window)
  s1 = _hide(s1, tile * TILE_N + HALF, m0, k[2], window)
  m, alpha = parts.largest(gl.maximum(s0, s1), m, scale)
  async_copy.wait_group(0)
  _copy_tile(k, after, k_at, keys.index(0))
  _copy_tile(v, following, v_at, values.index(1))
  async_copy.commit_group()
  k0 = _keys(keys.index(1), 0, 0, S)
  k1 = _keys(keys.index(1), 1, 0, S)
  k2 = _keys(keys.index(1), 2, 0, S)
  p0 = gl.exp2(parts.exponents(s0, m, scale))
  s1 = parts.exponents(s1, m, scale)
  slot = 0
  # What these steps copy, keys three tiles behind and values two, is of tiles
  # that all see, which follow each other.
  inside = gl.maximum(full - 3, 0)
  k_ptr = _first(k, edges[1] + 3, TILE_N)
  v_ptr = _first(v, edges[1] + 2, TILE_N)
  for part in gl.static_range(2):
    if part == 1:
      following = parts.tile_at(inside + 1, steps, edges)
      after = parts.tile_at(inside + 2, steps, edges)
    for step in range(inside * part, inside if part == 0 else steps - 1):
      k_tile = keys.index(1 - slot)
      v_tile = values.index(slot)
      # k0 to k3 are the quarters of half of the keys, k4 to k7 of the other
      # half; v0 and v1, and so on, the halves of a quarter. The scheduler finds
      # a place for each instruction between two barriers.
      k3 = _keys(k_tile, 3, 0, S)
      s0 = mfma(k0, q[0], zero)
      p1 = gl.exp2(s1)
      k4 = _keys(k_tile, 0, 1, S)
      s0 = mfma(k1, q[1], s0)
      k5 = _keys(k_tile, 1, 1, S)
      s0 = mfma(k2, q[2], s0)
      l = parts.faded(l, alpha) + parts.own(p0)
      p0 = parts.operand(p0, dtype, False)
      k6 = _keys(k_tile, 2, 1, S)
      s0 = mfma(k3, q[3], s0)
      sched_barrier()
      fade = gl.convert_layout(alpha, gl.SliceLayout(0, S))[None, :]
      a0, a1, a2, a3 = acc
      k7 = _keys(k_tile, 3, 1, S)
      s1 = mfma(k4, q[0], zero)
      l += parts.own(p1)
      p1 = parts.operand(p1, dtype, False)
      a0 = a0 * fade
      v0 = _values(v_tile, 0, 0, S)
      s1 = mfma(k5, q[1], s1)
      a1 = a1 * fade
      v1 = _values(v_tile, 0, 1, S)
      s1 = mfma(k6, q[2], s1)
      a2 = a2 * fade
      s1 = mfma(k7, q[3], s1)
      a3 = a3 * fade
      sched_barrier()
      if part == 1:
        if step + 1 >= full:
          s0 = _hide(s0, following * TILE_N, m0, k[2], window)
          s1 = _hide(s1, following * TILE_N + HALF, m0, k[2], window)
      v2 = _values(v_tile, 1, 0, S)
      v3 = _values(v_tile, 1, 1, S)
      a0 = mfma(v0, p0, a0)
      m, alpha = parts.largest(gl.maximum(s0, s1), m, scale)
      v4 = _values(v_tile, 2, 0, S)
      a0 = mfma(v1, p1, a0)
      v5 = _values(v_tile, 2, 1, S)
      a1 = mfma(v2, p0, a1)
      x0, x1 = _split(parts.exponents(s0, m, scale))
      v6 = _values(v_tile, 3, 0, S)
      a1 = mfma(v3, p1, a1)
      x0 = gl.exp2(x0)
      v7 = _values(v_tile, 3, 1, S)
      a2 = mfma(v4, p0, a2)
      s1 = parts.exponents(s1, m, scale)
      sched_barrier()
      if part == 1:
        following = after
        after = parts.tile_at(step + 3, steps, edges)
      # Nobody reads this step's tiles any more, and what the next one reads was
      # copied since the one before.
      async_copy.wait_group(0)
      if part == 0:
        _copy(k_ptr, k_at, keys.index(1 - slot))
      else:
        _copy_tile(k, after, k_at, keys.index(1 - slot))
      a2 = mfma(v5, p1, a2)
      k_tile = keys.index(slot)
      k0 = _keys(k_tile, 0, 0, S)
      sched_barrier()
      k1 = _keys(k_tile, 1, 0, S)
      a3 = mfma(v6, p0, a3)
      p0 = _join(x0, gl.exp2(x1), S)
      k2 = _keys(k_tile, 2, 0, S)
      if part == 0:
        _copy(v_ptr, v_at, values.index(slot))
      else:
        _copy_tile(v, following, v_at, values.index(slot))
      async_copy.commit_group()
      a3 = mfma(v7, p1, a3)
      acc = a0, a1, a2, a3
      if part == 0:
        k_ptr += TILE_N * k[1].to(gl.int64)
        v_ptr += TILE_N * v[1].to(gl.int64)
      slot = 1 - slot
  async_copy.wait_group(0)
  p1 = gl.exp2(s1)
  l = parts.faded(l, alpha) + parts.own(p0) + parts.own(p1)
  p0 = parts.operand(p0, dtype, False)
  p1 = parts.operand(p1, dtype, False)
  v_tile = values.index(slot)
  fade = gl.convert_layout(alpha, gl.SliceLayout(0, S))[None, :]
  out = ()
  for i in gl.static_range(4):
    a = mfma(_values(v_tile, i, 0, S), p0, acc[i] * fade)
    out = out + (mfma(_values(v_tile, i, 1, S), p1, a),)
  return m, l, out


@gluon.jit
def _attend_loaded(
    sums, q, k, v, row, m0, window, steps, full, edges, scale,
    dtype: gl.constexpr, CHEAP_CAST: gl.constexpr, TILE_M: gl.constexpr,
    TILE_N: gl.constexpr, HEAD: gl.constexpr, ROW: gl.constexpr,
    S: gl.constexpr
):
  """m, l and acc of all tiles, by way of registers to LDS.

  row, if ROW: the biases, and how many they are.
  """
  m, l, acc = sums
  PARTS: gl.constexpr = HEAD // PART
  q = parts.columns(q[0], q[1], q[2], HEAD, S)
  K: gl.constexpr = parts.copied(TILE_N, (1, 2, 4, 8), (16, 32))
  KEYS: gl.constexpr = gl.DotOperandLayout(0, S, 8)
  VALUES: gl.constexpr = gl.DotOperandLayout(0, S, 4)
  k_at = parts.places(k[1], TILE_N, TILE_N, PART, K)
  v_at = parts.places(v[1], TILE_N, TILE_N, HEAD, _turned(TILE_N, HEAD))
  keys = gl.allocate_shared_memory(
      dtype, [PARTS * TILE_N, PART], gl.SwizzledSharedLayout(8, 2, 4, [1, 0]))
  # Columns of 4 keys in 8 bytes.
  values = gl.allocate_shared_memory(
      dtype, [HEAD, TILE_N], gl.SwizzledSharedLayout(4, 1, 16, [1, 0]))
  tile = parts.tile_at(0, steps, edges)
  # Biases of a tile's scores, and which keys of the next one are seen.
  OF_S: gl.constexpr = gl.SliceLayout(1, VALUES)
  LANES: gl.constexpr = gl.BlockedLayout([1], [64], [gl.num_warps()], [0])
  bias = 0.0
  lanes = 0.0
  seen = 0
  if ROW:
    inverse = 1.0 / scale * scores.LOG2E
    seen = _seen(_bias(row, tile, TILE_N, LANES))
    bias = _bias(row, tile, TILE_N, OF_S)
    lanes = _bias(row, parts.tile_at(1, steps, edges), TILE_N, LANES)
  _store(keys, _load(k, tile, k_at, seen, PARTS, ROW))
  values.store(_load_values(v, tile, v_at, seen, ROW).permute([1, 0]))
  for part in gl.static_range(2):
    for step in range(full * part, full if part == 0 else steps):
      following = parts.tile_at(step + 1, steps, edges)
      if ROW:
        seen = _seen(lanes)
      k_next = _load(k, following, k_at, seen, PARTS, ROW)
      s = gl.zeros([TILE_N, TILE_M], gl.float32, S)
      if ROW:
        s = _begin(bias, inverse, TILE_M, S)
        bias = _bias(row, following, TILE_N, OF_S)
      k_part = keys.slice(0, TILE_N).load(KEYS)
      for i in gl.static_range(PARTS):
        k_after = k_part
        if i + 1 < PARTS:
          k_after = keys.slice((i + 1) * TILE_N, TILE_N).load(KEYS)
        s = mfma(k_part, q[i], s)
        k_part = k_after
      sched_barrier()
      _store(keys, k_next)
      v_next = _load_values(v, following, v_at, seen, ROW)
      if ROW:
        lanes = _bias(row, parts.tile_at(step + 2, steps, edges), TILE_N, LANES)
      if part == 1:
        s = _hide(s, tile * TILE_N, m0, k[2], window, ROW)
      m, alpha = parts.largest(s, m, scale)
      p = gl.exp2(parts.exponents(s, m, scale))
      l = parts.faded(l, alpha) + parts.own(p)
      p = parts.operand(p, dtype, CHEAP_CAST)
      fade = gl.convert_layout(alpha, gl.SliceLayout(0, S))[None, :]
      v_part = values.slice(0, PART).load(VALUES)
      v_after = values.slice(PART, PART).load(VALUES)
      added = ()
      for i in gl.static_range(PARTS):
        added = added + (mfma(v_part, p, acc[i] * fade),)
        v_part = v_after
        if i + 2 < PARTS:
          v_after = values.slice((i + 2) * PART, PART).load(VALUES)
      acc = added
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
    TILE_M: gl.constexpr, TILE_N: gl.constexpr, HEAD: gl.constexpr,
    CHEAP_CAST: gl.constexpr, FEATURES: gl.constexpr, CDNA: gl.constexpr,
):
  """As fwd.py's. Grid: (heads, tiles of rows, batch)."""
  WAVES: gl.constexpr = gl.num_warps()
  ROW: gl.constexpr = FEATURES & scores.ONE_ROW != 0
  gl.static_assert(ROW or FEATURES == 0)
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
  m = gl.zeros_like(r).to(gl.float32) + gl.maximum(m_first, parts.LOWEST)
  SUMS: gl.constexpr = parts.sums(WAVES)
  l = gl.zeros([2, 4, TILE_M], gl.float32, SUMS) + gl.where(
      m_first == float("-inf"), 0.0, 1.0 / 8)
  acc = ()
  for _ in gl.static_range(HEAD // PART):
    acc = acc + (gl.zeros([PART, TILE_M], gl.float32, S),)
  if steps > 0:
    dtype: gl.constexpr = q.dtype.element_ty
    q_data = q, stride_q, len_q - m0
    edges = low, full_low, full_high
    full = full_high - full_low
    scale = softmax_scale * scores.LOG2E
    k_data = k, stride_k, len_k
    v_data = v, stride_v, len_k
    if CDNA == 4 and not ROW:
      gl.static_assert(HEAD == 128)
      m, l, acc = _attend_copied(
          (m, l, acc), q_data, k_data, v_data, m0, window, steps, full, edges,
          scale, dtype, TILE_M, TILE_N, S)
    else:
      biases = (bias_f32 + b * batch_stride_bias + head * nhead_stride_bias,
                len_k)
      m, l, acc = _attend_loaded(
          (m, l, acc), q_data, k_data, v_data, biases, m0, window, steps, full,
          edges, scale, dtype, CHEAP_CAST, TILE_M, TILE_N, HEAD, ROW, S)

  l = gl.convert_layout(gl.sum(gl.sum(l, 1), 0), gl.SliceLayout(0, S))
  live = (r < len_q - m0) & ((l > 0) | (l != l))
  l_safe = gl.where(live, l, 1.0)
  gl.store(lse + r, gl.where(live, m * scores.LN2 + gl.log(l_safe),
                             float("-inf")), mask=r < q_rows - m0)
  factor = 1.0 / l_safe
  x = ()
  for i in gl.static_range(HEAD // PART):
    y = gl.where(live[None, :], acc[i] * factor[None, :], 0.0)
    x = x + (y.to(out.dtype.element_ty),)
  parts.write(out, stride_o, x, q_rows - m0)
