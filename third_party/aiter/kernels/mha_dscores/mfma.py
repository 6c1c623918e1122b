# SPDX-License-Identifier: Apache-2.0
"""dq of the scores' gradients that mha/bwd_mfma.py kept, for CDNA, in Gluon.

A lane of that pass has four rows of one key, and stores them side by side. Here
a lane is to have four keys of one row as its operand: it loads four rows of
four keys, and multiplies one row after the other. So an instruction's columns
are every fourth row, and gradients come from memory without LDS, once.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.amd.cdna3 import buffer_load, mfma

from third_party.aiter.kernels.mha import bwd_mfma, scores
from third_party.aiter.kernels.mha import parts_mfma as parts

# With the constant KEEPS, by which gradients of scores have the place of dbias.
mha_dscores_bwd = bwd_mfma.mha_bwd_dkdv

ROWS = bwd_mfma.ROWS
# Keys that one program of the other pass has, which sees the same rows.
KEYS = gl.constexpr(4 * ROWS)


@gluon.constexpr_function
def _matrix(cdna):
  """A product whose columns four waves divide."""
  return gl.amd.AMDMFMALayout(
      version=cdna, instr_shape=[16, 16, 16 * (cdna - 2)], transposed=False,
      warps_per_cta=[1, 4])


@gluon.constexpr_function
def _kept():
  """How four waves load gradients of 256 rows and 32 keys: a lane 4 rows of two
  neighbouring keys, eight lanes the other keys of 8 rows."""
  return gl.DistributedLinearLayout(
      reg_bases=[[1], [2], [4], [64], [128]],
      lane_bases=[[8], [256], [512], [1024], [16], [32]],
      warp_bases=[[2048], [4096]], block_bases=[], shape=[8192])


@gluon.jit
def _load(data, key, len_k):
  """Begins to load a tile of keys, and gradients of rows that have them."""
  k, k_at, stride_k, ds, ds_at, row_tile, seq, window, _mask, _one_row = data
  key_row = gl.arange(0, ROWS, gl.SliceLayout(1, k_at.type.layout))[:, None]
  k_tile = buffer_load(
      k + key.to(gl.int64) * stride_k, k_at, mask=key_row < len_k - key,
      other=0.0)
  n0 = key // KEYS * KEYS
  low, _, _, high = parts.row_tiles(
      n0, gl.minimum(n0 + KEYS, len_k), seq, window, ROWS, 0)
  ds_tile = buffer_load(
      ds + key.to(gl.int64) * ROWS, ds_at,
      mask=(row_tile >= low) & (row_tile < high), other=0.0)
  return k_tile, ds_tile


@gluon.jit
def _load_shown(data, key, len_k, FEATURES: gl.constexpr):
  """Begins to load which keys of a tile a mask of one row shows."""
  k, k_at, stride_k, ds, ds_at, row_tile, seq, window, mask, one_row = data
  shown = 0
  if FEATURES & scores.HAS_MASK:
    row = gl.arange(0, ROWS, gl.SliceLayout(1, k_at.type.layout))
    shown = buffer_load(
        mask + key, row, mask=row < gl.where(one_row, len_k - key, 0), other=1)
  return shown


@gluon.jit
def _turn(smem, k_tile, shown, FEATURES: gl.constexpr):
  """Stores a tile of keys turned; hidden ones, which may be NaN, as zeros."""
  if FEATURES & scores.HAS_MASK:
    k_tile = gl.where(shown[:, None] != 0, k_tile, 0.0)
  smem.store(k_tile.permute([1, 0]))


@gluon.jit
def _operand(ds, S: gl.constexpr):
  """Gradients [keys, rows], every fourth row side by side."""
  ds = ds.reshape([8, 4, 2, 2, 4, 2, 2, 4]).permute([2, 4, 3, 6, 7, 0, 1, 5])
  return gl.convert_layout(
      ds.reshape([ROWS, 8 * ROWS]), gl.DotOperandLayout(1, S, 4))


@gluon.jit
def mha_dscores_dq(
    k, dbias, dq, stride_k, nhead_stride_k, batch_stride_k,
    stride_dq, nhead_stride_dq, batch_stride_dq,
    stride_dbias, nhead_stride_dbias, batch_stride_dbias,
    seqlen_q, seqlen_k, nhead_q, nhead_k, softmax_scale,
    window_left, window_right, flags,
    mask, stride_mask, nhead_stride_mask, batch_stride_mask,
    TILE_M: gl.constexpr, TILE_N: gl.constexpr, HEAD: gl.constexpr,
    CDNA: gl.constexpr, FEATURES: gl.constexpr,
):
  """dq of TILE_M rows of one head. What a mask of one row hides may be NaN.

  Grid: (heads, tiles of rows, batch).
  """
  gl.static_assert(
      TILE_N == ROWS and TILE_M == 8 * ROWS and gl.num_warps() == 4)
  # Heads that share keys run on one die, which has these in its cache.
  head_k = gl.program_id(0) % nhead_k
  head = head_k * (nhead_q // nhead_k) + gl.program_id(0) // nhead_k
  # Last rows first: under a causal mask they have the most to do.
  tile_m = gl.num_programs(1) - 1 - gl.program_id(1)
  b = gl.program_id(2).to(gl.int64)
  parts.assume_stride(stride_k)
  parts.assume_stride(stride_dq)
  m0 = tile_m * TILE_M
  left = seqlen_q - m0
  h = head.to(gl.int64)
  k += b * batch_stride_k + head_k.to(gl.int64) * nhead_stride_k
  dq += (b * batch_stride_dq + h * nhead_stride_dq
         + m0.to(gl.int64) * stride_dq)
  mask += b * batch_stride_mask + h * nhead_stride_mask
  first_tile = tile_m * (TILE_M // ROWS)
  stride_tile = stride_dbias * ROWS
  dbias += (b * batch_stride_dbias + h * nhead_stride_dbias
            + first_tile.to(gl.int64) * stride_tile)
  seq = scores.Sequence(0, seqlen_q, seqlen_q, 0, seqlen_k, seqlen_k)
  window = scores.Window(
      parts.offset_of(seq, flags), window_left, window_right, 0)
  _, low, _, _, high = parts.key_tiles(
      m0, gl.minimum(m0 + TILE_M, seqlen_q), seq, window, ROWS, 0)

  S: gl.constexpr = _matrix(CDNA)
  T: gl.constexpr = bwd_mfma._loaded(HEAD)
  D: gl.constexpr = _kept()
  row = gl.arange(0, ROWS, gl.SliceLayout(1, T))[:, None]
  k_at = row * stride_k + gl.arange(0, HEAD, gl.SliceLayout(0, T))[None, :]
  at = gl.arange(0, TILE_M * TILE_N, D)
  row_tile = at // (ROWS * TILE_N)
  ds_at = row_tile * stride_tile + at % (ROWS * TILE_N)
  data = (k, k_at, stride_k, dbias, ds_at, row_tile + first_tile, seq, window,
          mask, stride_mask == 0)
  TURNED: gl.constexpr = gl.SwizzledSharedLayout(4, 2, 8, [1, 0])
  turned = gl.allocate_shared_memory(
      k.dtype.element_ty, [2, HEAD, ROWS], TURNED)
  total = bwd_mfma._zeros(HEAD, TILE_M, S)
  if high > low:
    shown = _load_shown(data, low * ROWS, seqlen_k, FEATURES)
    k_next, ds = _load(data, low * ROWS, seqlen_k)
    _turn(turned.index(0), k_next, shown, FEATURES)
    for tile in range(low, high):
      place = (tile - low) % 2
      key = gl.minimum(tile + 1, high - 1) * ROWS
      shown = _load_shown(data, key, seqlen_k, FEATURES)
      k_next, ds_next = _load(data, key, seqlen_k)
      operand = _operand(ds, S)
      sums = ()
      for i in gl.static_range(len(total)):
        sums = sums + (mfma(
            bwd_mfma._turned(turned.index(place), i, S, True), operand,
            total[i]),)
      total = sums
      _turn(turned.index(1 - place), k_next, shown, FEATURES)
      ds = ds_next
  result = ()
  for i in gl.static_range(len(total)):
    x = total[i].reshape([parts.PART, 4, TILE_M // 4]).permute([0, 2, 1])
    result = result + (x.reshape([parts.PART, TILE_M]),)
  bwd_mfma._write(dq, stride_dq, result, -softmax_scale, left, left)
