# SPDX-License-Identifier: Apache-2.0
"""The kernels' arithmetic without a GPU.

Triton's interpreter runs the Triton kernels, forward and every gradient, on
NumPy arrays, with small tiles so that a short sequence has full, cut and dead
ones. Results are held to the float64 formula as numbers_test.py does.
"""

import math

import ml_dtypes
import numpy as np
from absl.testing import absltest, parameterized
from attention import oracle
from harness.triton_interpreter import Tensor, gpu_arithmetic

from third_party.aiter.kernels.mha import bwd as mha_bwd
from third_party.aiter.kernels.mha import family, scores
from third_party.aiter.kernels.mha import fwd as mha_fwd
from third_party.aiter.kernels.mha import gaps as mha_gaps
from third_party.aiter.kernels.mha_f32 import bwd as f32_bwd
from third_party.aiter.kernels.mha_f32 import fwd as f32_fwd

_UNBOUNDED = 2**30


def _strides(x):
  """(row, head, batch) strides of [b, s, h, d] or [total, h, d]."""
  s = [n // x.itemsize for n in x.strides]
  return (s[-3], s[-2], s[0] if x.ndim == 4 else 0)


class _Case:
  """One call of the operator: its operands, launches and results."""

  def __init__(
      self, dtype=np.float16, general=False, b=1, hq=2, hk=1, sq=48, sk=64,
      dqk=32, dv=None, block=None, tile_m=16, tile_n=16, heads_first=False,
      left=-1, right=-1, sink_tokens=0, top_left=False, sink=False, bias=None,
      bias_f32=False, mask=None, slopes=False, cap=0.0, dropout_p=0.0,
      dlse=False, skip=0, scale=None, cu_q=None, cu_k=None, pad_q=None,
      pad_k=None, packed=False,
  ):
    rng = np.random.default_rng(sq * 1000 + sk)
    dv = dv or dqk
    self.dtype, self.general, self.packed = dtype, general, packed
    self.tile_m, self.tile_n, self.heads_first = tile_m, tile_n, heads_first
    self.b = b = len(cu_q) - 1 if packed else b
    if packed:
      sq, sk = (pad_q or cu_q)[-1] + 3, (pad_k or cu_k)[-1] + 5
    self.sizes = (b, sq, sk, hq, hk, dqk, dv)
    lead = () if packed else (b,)
    random = lambda *s: rng.standard_normal(s, np.float32)
    tensor = lambda *s: random(*lead, *s).astype(dtype)
    self.q, self.k = tensor(sq, hq, dqk), tensor(sk, hk, dqk)
    self.v, self.do = tensor(sk, hk, dv), tensor(sq, hq, dv)
    lse_shape = (*lead, hq, sq)
    self.dlse = random(*lse_shape) if dlse else None
    self.sink = random(b, hq) if sink else None
    self.slopes = rng.random((b, hq), np.float32) if slopes else None
    self.bias = None
    # Shapes are of b, hq, sq and sk; a shorter one is of the first of them.
    full = lambda shape: (*shape, *(b, hq, sq, sk)[len(shape):])
    if bias:
      self.bias = random(*full(bias)).astype(np.float32 if bias_f32 else dtype)
    self.mask = None
    if mask:
      self.mask = rng.random(full(mask)) < 0.6
    self.key = (123456789, 3987654321)
    self.origin = (7, 40)
    state = np.zeros((b, hq, 6), np.uint32)
    state[..., :2] = self.key
    state[..., 2], state[..., 3] = np.mgrid[:b, :hq]
    state[..., 4:] = self.origin
    self.state = state
    self.cu = [cu_q, cu_k, pad_q, pad_k]
    self.scale = dqk**-0.5 if scale is None else scale
    flag = lambda bit, on: bit.value if on else 0
    self.flags = (
        flag(scores.HAS_BIAS, bias) | flag(scores.BIAS_F32, bias_f32)
        | flag(scores.ALIBI, slopes) | flag(scores.SINK, sink)
        | flag(scores.DROPOUT, dropout_p) | flag(scores.PACKED, packed)
        | flag(scores.CU_SEQLENS_Q, cu_q) | flag(scores.CU_SEQLENS_K, cu_k)
        | flag(scores.CU_SEQLENS_Q_PADDED, pad_q)
        | flag(scores.CU_SEQLENS_K_PADDED, pad_k)
        | flag(scores.TOP_LEFT, top_left) | flag(scores.DLSE, dlse)
        | flag(scores.HAS_MASK, mask))
    threshold = int(math.floor(np.float64(np.float32(dropout_p)) * 2**32))
    self.scalars = (
        float(self.scale), float(cap), int(np.uint32(threshold).view(np.int32)),
        float(np.float32(1 / (1 - np.float64(np.float32(dropout_p))))),
        left if left >= 0 else _UNBOUNDED, right if right >= 0 else _UNBOUNDED,
        sink_tokens, skip, self.flags)
    self.skip = skip
    made_for = "+".join(
        name for name, there in dict(
            bias=bias, bias_f32=bias_f32, mask=mask, alibi=slopes,
            dropout=dropout_p, soft_cap=cap, sink_tokens=sink_tokens,
        ).items() if there)
    constants = family.FAMILY.constants(dict(
        op="mha_fwd", grade="general" if general else "padded", arch="gfx942",
        dqk=str(block or dqk), dv=str(block or dv), tile_m=str(tile_m),
        tile_n=str(tile_n), options="excludes=unaligned" + (
            f" features={made_for}" if made_for else "")))
    names = ("HEAD", "TAIL", "BLOCK_DV", "DV_TAIL", "CHEAP_CAST")
    self.blocks = {name: constants[name] for name in names}
    # The interpreter hands over a number as it is, not as a constexpr.
    self.blocks["FEATURES"] = type(scores.MAYBE)(constants["FEATURES"])
    self.blocks["LANE_KEYS"] = 4 if heads_first or b == 1 else 0
    self.grade = dict(
        PADDED=general or block is not None, HEADS_FIRST=heads_first)
    sequences = []
    for i in range(b):
      nq = cu_q[i + 1] - cu_q[i] if cu_q else sq
      nk = cu_k[i + 1] - cu_k[i] if cu_k else sk
      at = ((pad_q or cu_q)[i], (pad_k or cu_k)[i]) if packed else (0, 0)
      sequences.append((at[0], nq, at[1], nk))
    self.reference = dict(
        dlse=self.dlse, sequences=sequences, scale=self.scale,
        mask=oracle.Mask(left, right, sink_tokens, top_left), cap=cap,
        bias=self._hiding_bias(), slopes=self.slopes, sink=self.sink,
        key=self.key, dropout_p=dropout_p, origin=self.origin, skip=skip)

  def _hiding_bias(self):
    """Bias and mask in one, as the oracle takes them."""
    bias = self.bias
    if self.mask is not None:
      bias = np.where(self.mask, 0 if bias is None else bias, -np.inf)
    if bias is None:
      return None
    _, sq, sk, *_ = self.sizes
    return np.broadcast_to(bias, (*bias.shape[:2], sq, sk))

  def _grid(self, tile, heads, rows):
    tiles = rows // tile + self.b if self.packed else -(-rows // tile)
    grid = [tiles, heads, 1 if self.packed else self.b]
    if self.heads_first:
      grid[:2] = grid[1::-1]
    return tuple(grid)

  def _clear_gaps(self, rows, lengths, starts, padded):
    """Makes (rows, their lse, its heads) zero where no sequence has them.

    `padded`: the flag that says that sequences begin at `starts`.
    """
    tensor, lse, heads = rows
    words = Tensor(tensor.array.reshape(len(tensor.array), -1).view(np.uint32))
    of_keys = padded.value == scores.CU_SEQLENS_K_PADDED.value
    flags = (scores.CU_SEQLENS_Q_PADDED.value
             if self.flags & padded.value else 0)
    count, row_words = words.shape
    mha_gaps.mha_gaps[(-(-count // 16),)](
        words, lse, lengths, starts, row_words, lse.shape[-1], self.b, count,
        heads, 0 if of_keys else self.skip, flags, TILE_M=16, TILE_N=2)

  def run(self):
    """Launches every kernel: a dict of results as oracle.attention's."""
    b, sq, sk, hq, hk, _, dv = self.sizes
    tensor = lambda x: Tensor(np.zeros(16, np.float32) if x is None else x)
    new = lambda like: Tensor(np.full(like.shape, np.nan, like.dtype))
    lse_shape = (hq, sq) if self.packed else (b, hq, sq)
    float_rows = lambda value: Tensor(np.full(lse_shape, value, np.float32))
    q, k, v, do = (Tensor(x) for x in (self.q, self.k, self.v, self.do))
    out, dq, dk, dvt = (new(x) for x in (self.do, self.q, self.k, self.v))
    lse, delta = float_rows(np.nan), float_rows(np.nan)
    # What no kernel writes must have been there before.
    d_slopes = float_rows(0.0 if self.packed else np.nan)
    d_sink = Tensor(np.full((b, hq), np.nan, np.float32))
    cu = [Tensor(np.asarray(c or [0], np.int32)) for c in self.cu]
    bias, mask, dbias = tensor(self.bias), tensor(None), tensor(None)
    if self.mask is not None:
      mask = Tensor(self.mask.astype(np.uint8))
    if self.packed:
      self._clear_gaps((out, lse, hq), cu[0], cu[2], scores.CU_SEQLENS_Q_PADDED)
      self._clear_gaps((dq, lse, 0), cu[0], cu[2], scores.CU_SEQLENS_Q_PADDED)
      for gradient in (dk, dvt):
        self._clear_gaps((gradient, lse, 0), cu[1], cu[3],
                         scores.CU_SEQLENS_K_PADDED)

    def plane_strides(t):
      """Strides of rows, keys, heads and batches, 0 where one is for all."""
      if t is None:
        return (0, 1, 0, 0)
      s = [0 if n == 1 else stride // t.itemsize
           for n, stride in zip(t.shape, t.strides)]
      return (*s[2:], s[1], s[0])

    planes = (*plane_strides(self.bias), *plane_strides(self.mask))
    dbias_strides, bias_shape = (0, 0, 0), (1, 1)
    if self.bias is not None:
      bias_shape = self.bias.shape[:2]
      dbias = Tensor(np.full((*bias_shape, sq, sk), np.nan, np.float32))
      dbias_strides = (sk, sq * sk, bias_shape[1] * sq * sk)
    slopes, sink, state = (
        tensor(x) for x in (self.slopes, self.sink, self.state))
    lse_strides = (sq, 0 if self.packed else hq * sq)
    strides = lambda *xs: [n for x in xs for n in _strides(x.array)]
    tiles = dict(TILE_M=self.tile_m, TILE_N=self.tile_n, **self.blocks)

    by_rows = self._grid(self.tile_m, hq, sq)
    by_keys = self._grid(self.tile_n, hk, sk)
    f32 = self.dtype == np.float32
    if f32:
      scale, *_, left, right, _, skip, flags = self.scalars
      rest = (*lse_strides, *self.sizes, scale, left, right, skip, flags)
      tiles = dict(
          TILE_M=self.tile_m, TILE_N=self.tile_n, PRECISION="ieee",
          HEADS_FIRST=self.heads_first, **{
              name: 1 << (d - 1).bit_length()
              for name, d in zip(("HEAD", "BLOCK_DV"), self.sizes[-2:])})
      f32_fwd.mha_f32_fwd[by_rows](
          q, k, v, out, lse, *cu, *strides(q, k, v, out), *rest, **tiles)
    else:
      mha_fwd.mha_fwd[by_rows](
          q, k, v, out, lse, bias, bias, mask, slopes, sink, state, *cu,
          *strides(q, k, v, out), *lse_strides, *planes, *self.sizes,
          *self.scalars, **tiles, **self.grade)
    mha_bwd.mha_bwd_delta[(-(-sq // self.tile_m), hq, 1 if self.packed else b)](
        out, do, tensor(self.dlse), delta, *strides(out, do), *lse_strides,
        b, sq, hq, dv, self.flags,
        TILE_M=self.tile_m,
        BLOCK_DV=1 << (self.sizes[-1] - 1).bit_length())
    arguments = (
        q, k, v, do, lse, delta, dq, dk, dvt, dbias, d_slopes, bias, bias,
        mask, slopes, state, *cu, *strides(q, k, v, do, dq, dk, dvt),
        *lse_strides, *planes, *dbias_strides, *self.sizes, *bias_shape,
        *self.scalars)
    if f32:
      f32_bwd.mha_f32_bwd_dkdv[by_keys](
          q, k, v, do, lse, delta, dk, dvt, *cu,
          *strides(q, k, v, do, dk, dvt), *rest, **tiles)
      f32_bwd.mha_f32_bwd_dq[by_rows](
          q, k, v, do, lse, delta, dq, *cu, *strides(q, k, v, do, dq), *rest,
          **tiles)
    else:
      mha_bwd.mha_bwd_dkdv[by_keys](*arguments, **tiles, **self.grade)
      mha_bwd.mha_bwd_dq[by_rows](*arguments, **tiles, **self.grade)
    result = dict(out=out, lse=lse, dq=dq, dk=dk, dv=dvt)
    if self.bias is not None:
      grid = (-(-sk // self.tile_n), -(-sq // self.tile_m),
              bias_shape[0] * bias_shape[1])
      mha_bwd.mha_bwd_dbias[grid](*arguments, **tiles)
      result["dbias"] = dbias
    if self.sink is not None:
      mha_bwd.mha_bwd_dsink[(hq, b)](
          lse, delta, sink, d_sink, cu[0], cu[2], *lse_strides, b, sq, hq,
          self.skip, self.flags, TILE_M=32)
      result["dsink"] = d_sink
    result = {n: x.array.astype(np.float64) for n, x in result.items()}
    if self.slopes is not None:
      rows = d_slopes.array.astype(np.float64)
      if self.packed:
        result["dslopes"] = np.stack([
            rows[:, s:s + n].sum(1)
            for s, n, _, _ in self.reference["sequences"]])
      else:
        result["dslopes"] = rows.sum(-1)
    return result

  def expected(self, dtype=None):
    result = oracle.attention(
        self.q, self.k, self.v, self.do, dtype=dtype, **self.reference)
    if self.bias is not None:  # Of its own batches and heads, not the mask's.
      axes = tuple(i for i in range(2) if self.bias.shape[i] == 1)
      result["dbias"] = result["dbias"].sum(axes, keepdims=True)
    return result


_CU_Q, _CU_K = (0, 17, 17, 50, 51), (0, 20, 40, 40, 77)
_PAD_Q, _PAD_K = (0, 20, 25, 60, 64), (0, 22, 48, 48, 90)
_CASES = dict(
    full=dict(),
    bf16=dict(dtype=ml_dtypes.bfloat16),
    causal=dict(right=0, b=2, hq=4, hk=2),
    causal_more_queries=dict(right=0, sq=60, sk=7),
    causal_ragged=dict(sq=37, sk=51, right=0),
    window=dict(left=10, right=5, sq=60, sk=60),
    window_wide=dict(left=70, right=33, sq=130, sk=111, tile_n=32),
    window_left=dict(left=45, sq=90, sk=75),
    top_left=dict(left=4, right=0, sq=50, sk=20, top_left=True),
    decode=dict(sq=1, sk=77, right=0),
    sink=dict(sink=True, right=0, sq=40, sk=20, dlse=True),
    no_keys=dict(sk=0, sink=True),
    unequal_head_dims=dict(dqk=96, dv=64, right=0),
    heads_first=dict(heads_first=True, right=0, b=2, hq=4, hk=2),
    packed=dict(packed=True, cu_q=_CU_Q, cu_k=_CU_K, right=0),
    packed_padded=dict(
        packed=True, cu_q=_CU_Q, cu_k=_CU_K, pad_q=_PAD_Q, pad_k=_PAD_K,
        left=12, right=3, sink=True, hq=4, hk=2, dlse=True),
    packed_skip=dict(packed=True, cu_q=_CU_Q, cu_k=_CU_K, skip=1, sink=True),
    dense_lengths=dict(
        b=3, cu_q=(0, 17, 17, 60), cu_k=(0, 20, 60, 60), sq=48, sk=50, right=0,
        sink=True),
    padded=dict(block=32, dqk=24, dv=16, right=0),
    padded_tails=dict(block=96, dqk=72, dv=80),
    bias=dict(b=2, bias=(1, 2), sq=37, sk=48, right=0),
    bias_window=dict(bias=(1, 2), sq=37, sk=56, left=20, right=3, b=2),
    bias_f32=dict(b=2, bias=(2, 1), bias_f32=True, sq=37, sk=48),
    bias_of_keys=dict(b=2, bias=(2, 1, 1), sq=37, sk=48, right=0),
    mask=dict(b=2, mask=(2, 2), sq=37, sk=48),
    mask_of_keys=dict(
        b=2, mask=(2, 1, 1), hq=4, hk=2, sq=37, sk=48, block=32, dqk=24),
    mask_of_lengths=dict(
        b=2, mask=(2, 1), cu_q=(0, 17, 54), cu_k=(0, 20, 50), sq=40, sk=40),
    alibi=dict(slopes=True, right=0, b=2, hq=4, hk=2),
    alibi_lanes=dict(slopes=True, left=20, sq=45, sk=53),
    soft_cap=dict(cap=3.0, right=0),
    soft_cap_window=dict(cap=3.0, left=17, right=0, sq=70, sk=70, b=2),
    dropout=dict(dropout_p=0.3, right=0, b=2),
    sink_tokens=dict(
        left=8, right=3, sink_tokens=20, sq=60, sk=50, tile_n=32),
    sink_tokens_in_the_first_tile=dict(
        left=8, right=0, sink_tokens=3, sq=60, sk=60, b=2),
    dropout_and_bias=dict(dropout_p=0.3, bias=(1, 2), right=0, sk=48),
    general=dict(general=True, block=32, dqk=24, dv=16),
    general_bias=dict(general=True, b=2, bias=(1, 2), sq=37, sk=45, right=0),
    general_bias_f32=dict(
        general=True, b=2, bias=(2, 1), bias_f32=True, sq=37, sk=45),
    general_bias_of_keys=dict(
        general=True, b=2, bias=(2, 1, 1), sq=37, sk=45, right=0),
    general_bias_of_rows=dict(
        general=True, b=2, bias=(1, 2, 37, 1), bias_f32=True, sq=37, sk=45),
    general_bias_of_heads=dict(
        general=True, b=2, bias=(1, 2, 1, 1), sq=37, sk=45),
    general_mask=dict(general=True, b=2, mask=(2, 2), sq=37, sk=45),
    general_mask_of_keys=dict(
        general=True, b=2, mask=(2, 1, 1), hq=4, hk=2, sq=37, sk=45),
    general_mask_of_rows=dict(
        general=True, b=2, mask=(2, 1, 37, 1), sq=37, sk=45),
    general_mask_and_bias=dict(
        general=True, b=2, mask=(2, 1, 1), bias=(1, 2), sq=37, sk=45, right=0,
        dqk=40, dv=24, block=64),
    general_alibi=dict(general=True, slopes=True, right=0, b=2, hq=4, hk=2),
    general_soft_cap=dict(general=True, cap=3.0, right=0),
    general_large_soft_cap=dict(general=True, cap=1e6, scale=1.0),
    general_dropout=dict(general=True, dropout_p=0.3, right=0, b=2),
    general_sink_tokens=dict(
        general=True, left=8, right=3, sink_tokens=20, sq=60, sk=50,
        tile_n=32),
    general_negative_scale=dict(general=True, scale=-0.2, right=0),
    general_all=dict(
        general=True, b=2, hq=4, hk=2, bias=(2, 4), mask=(2, 4), slopes=True,
        cap=5.0,
        dropout_p=0.2, sink=True, left=20, right=2, sink_tokens=3, sq=45, sk=53,
        dlse=True, dqk=40, dv=24, block=64),
    f32=dict(dtype=np.float32, dqk=24, dv=16, sq=37, sk=51, right=0),
    f32_window=dict(
        dtype=np.float32, left=10, right=5, sq=60, sk=60, b=2, hq=4, hk=2,
        heads_first=True, dlse=True, scale=-0.2),
    f32_packed=dict(
        dtype=np.float32, packed=True, cu_q=_CU_Q, cu_k=_CU_K, pad_q=_PAD_Q,
        pad_k=_PAD_K, left=12, right=3, skip=1),
    f32_dense_lengths=dict(
        dtype=np.float32, b=3, cu_q=(0, 17, 17, 60), cu_k=(0, 20, 60, 60),
        sq=48, sk=50, right=0, top_left=True),
    general_packed_all=dict(
        general=True, packed=True, cu_q=_CU_Q, cu_k=_CU_K, pad_q=_PAD_Q,
        slopes=True, cap=4.0, dropout_p=0.25, sink=True, left=12, right=1,
        sink_tokens=2, hq=4, hk=2),
)


class KernelTest(parameterized.TestCase):

  def setUp(self):
    super().setUp()
    self.enter_context(gpu_arithmetic())

  @parameterized.named_parameters(*_CASES.items())
  def test_matches_formula(self, config):
    case = _Case(**config)
    actual = case.run()
    exact, plain = case.expected(), case.expected(case.dtype)
    # In float32 the rounded exponent of base 2 weighs as much as a result.
    epsilon = float(ml_dtypes.finfo(case.dtype).eps) * (
        2 if case.dtype == np.float32 else 1)
    for name, value in actual.items():
      want = exact[name]
      np.testing.assert_array_equal(
          np.isinf(want), np.isinf(value), err_msg=name)
      error = np.where(np.isinf(want), 0, value - np.where(
          np.isinf(want), 0, want))
      allowed = np.where(np.isinf(want), 0, plain[name] - np.where(
          np.isinf(want), 0, want))
      size = np.abs(np.where(np.isinf(want), 0, want)).max(initial=0)
      self.assertLessEqual(
          np.abs(error).max(initial=0),
          2 * np.abs(allowed).max(initial=0) + epsilon * max(size, 0.1), name)

  @parameterized.named_parameters(
      ("full", dict(), False), ("edge", dict(right=0, sq=32, sk=32), False),
      ("general", dict(general=True, right=0, sq=32, sk=32), False),
      ("whole_row", dict(right=0), True))
  def test_nan_is_not_lost(self, config, whole_row):
    case = _Case(**config)
    if whole_row:
      case.q[0, 3, 1] = np.nan
    else:
      case.k[0, 3, 0, 5] = np.nan
    result = case.run()
    want = np.isnan(case.expected()["out"]).all(-1)
    np.testing.assert_array_equal(np.isnan(result["out"]).any(-1), want)
    np.testing.assert_array_equal(
        np.isnan(result["lse"]), np.moveaxis(want, 1, 2))

  @parameterized.named_parameters(
      ("mask", dict(mask=(1, 1, 1))),
      ("general_mask", dict(mask=(1, 1, 1), general=True)),
      ("mask_of_heads", dict(mask=(1, 2, 1), hk=2)),
      ("general_mask_and_cut_rows", dict(mask=(1, 1, 1), sq=40, general=True)),
      ("mask_and_cut_rows", dict(mask=(1, 1, 1), sq=40)),
      ("mask_and_bias", dict(mask=(1, 1, 1), bias=(1, 2), general=True)))
  def test_hidden_keys_hold_anything(self, config):
    """Neither they nor their values reach a result, whole tiles of them too."""
    case = _Case(**config)
    case.mask[..., :33] = False
    case.reference["bias"] = case._hiding_bias()
    clean = case.run()
    for h in range(case.k.shape[2]):
      head = h if case.mask.shape[1] > 1 else 0
      hidden = ~case.mask[0, head, 0]
      case.k[0, hidden, h] = np.nan
      case.v[0, hidden, h] = np.inf
    dirty = case.run()
    for name, value in clean.items():
      self.assertTrue(np.isfinite(value).all(), name)
      np.testing.assert_array_equal(value, dirty[name], err_msg=name)

  @parameterized.parameters(False, True)
  def test_keys_that_a_bias_hides_from_a_row_hold_anything(self, general):
    case = _Case(general=general, bias=(1, 1), bias_f32=True)
    case.bias[..., :5, 40:] = -np.inf
    clean = case.run()
    case.k[0, 45, 0] = np.nan
    dirty = case.run()
    for name in ("out", "lse"):
      rows = (np.s_[:, :5], np.s_[:, :, :5])[name == "lse"]
      np.testing.assert_array_equal(clean[name][rows], dirty[name][rows])
    self.assertTrue(np.isnan(dirty["out"][:, 5:]).all())


if __name__ == "__main__":
  absltest.main()
