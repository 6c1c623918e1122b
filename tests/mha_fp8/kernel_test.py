# SPDX-License-Identifier: Apache-2.0
"""The kernels of float8 attention without a GPU, in Triton's interpreter.

Tiles are small, so that rows and keys fill some, cut others and leave none of
the rest.
"""

import dataclasses

import numpy as np
from absl.testing import absltest, parameterized
from harness.triton_interpreter import Tensor, gpu_arithmetic
from mha_fp8.cases import KINDS, Case, Problem

# isort: split
from third_party.aiter.kernels.mha_fp8 import columns, family, fwd

_TILE_M, _TILE_N, _BLOCK = 16, 32, 128
_CASE = Case(lengths=((37, 150),) * 2, d=32)
_RAGGED = Case(lengths=((5, 21), (20, 170), (0, 9), (20, 4), (7, 0)), d=32,
               packed=True, gap=3)


def _columns(p: Problem, ordered=False):
  """Values transposed by the kernel: [b or 1, hk, dv, columns]."""
  c = p.case
  b = len(c.lengths)
  rows, hk, dv = p.v.shape
  keys = rows if c.packed else c.lengths[0][1]
  size = -(-keys // _BLOCK) * _BLOCK + (b * _BLOCK if c.packed else 0)
  out = Tensor(np.full((1 if c.packed else b, hk, dv, size), 77, np.uint8))
  columns.mha_fp8_columns[(size // _BLOCK, hk, out.array.shape[0])](
      Tensor(p.v.view(np.uint8)), out, Tensor(p.cu[1]), b, keys, hk, dv, size,
      family.FLAGS["packed"] if c.packed else 0, TILE_N=_BLOCK,
      HEAD=max(16, 1 << (dv - 1).bit_length()), ORDERED=ordered,
      OVERLAPS=False)
  return out.array.view(p.v.dtype)


def _transposed(p: Problem):
  """The same by NumPy, in order."""
  c = p.case
  starts = p.cu[1]
  count = len(c.lengths)
  rows, hk, dv = p.v.shape
  size = (-(-rows // _BLOCK) + count) * _BLOCK if c.packed else (
      -(-c.lengths[0][1] // _BLOCK) * _BLOCK)
  out = np.zeros((1 if c.packed else count, hk, dv, size), p.v.dtype)
  for i in range(count):
    t = p.v[starts[i]:starts[i + 1]]
    at = (starts[i] // _BLOCK + i) * _BLOCK if c.packed else 0
    out[0 if c.packed else i, :, :, at:at + len(t)] = t.transpose(1, 2, 0)
  return out


class KernelTest(parameterized.TestCase):

  def run_kernel(self, case: Case, heads_first=False):
    p = Problem(case)
    c, b = case, len(case.lengths)
    rows, hq, d = p.q.shape
    dv = c.dv or d
    v = _columns(p)
    full = lambda t: np.ones((b, c.hk, 1), np.float32) if t is None else (
        np.broadcast_to(t.reshape(b if t.ndim > 1 else 1, -1, t.shape[-1]
                                  if t.ndim == 3 else 1),
                        (b, c.hk, t.shape[-1] if t.ndim == 3 else 1)))
    scale = d**-0.5 if c.softmax_scale is None else c.softmax_scale
    scales = full(p.k_scale) * full(p.q_scale) * scale / np.log(2)
    v_scales = np.broadcast_to(full(p.v_scale), scales.shape)
    sinks = np.broadcast_to(p.sink, (b, hq))
    left, right = c.window[0], 0 if c.causal else c.window[1]
    left, right = (2**30 if w < 0 else w for w in (left, right))
    flags = sum(family.FLAGS[n] for n, on in (
        ("packed", c.packed), ("sink", bool(c.sink))) if on)
    seqlens = (rows, p.k.shape[0]) if c.packed else c.lengths[0]
    out = Tensor(np.full((rows, hq, dv), 77, np.float32))
    lse = Tensor(np.full(
        (hq, rows) if c.packed else (b, hq, seqlens[0]), 77, np.float32))
    tiles = (seqlens[0] // _TILE_M + b + 1 if c.packed
             else -(-seqlens[0] // _TILE_M))
    grid = (tiles, hq) if not heads_first else (hq, tiles)
    with gpu_arithmetic(), np.errstate(all="ignore"):
      fwd.mha_fp8_fwd[(*grid, 1 if c.packed else b)](
          Tensor(p.q), Tensor(p.k), Tensor(v), out, lse,
          Tensor(scales.astype(np.float32)), Tensor(v_scales), Tensor(sinks),
          *(Tensor(cu) for cu in p.cu), b, *seqlens, hq, c.hk, d, dv,
          v.shape[3], scales.shape[2], left, right, flags, TILE_M=_TILE_M,
          TILE_N=_TILE_N, HEAD=max(16, 1 << (max(d, dv) - 1).bit_length()),
          WEIGHT_BITS=8 if c.kind == "e4m3fn" else 7,
          BLOCKS=scales.shape[2] > 1, HEADS_FIRST=heads_first)
    exact, exact_lse = p.exact()
    kind = KINDS[c.kind]
    rounded, _ = p.exact(lambda p: p.astype(kind).astype(np.float64))
    got_lse = lse.array
    if not c.packed:
      got_lse = np.moveaxis(got_lse, 0, 1).reshape(hq, -1)
    empty = np.isneginf(exact_lse)
    np.testing.assert_array_equal(np.isneginf(got_lse), empty)
    np.testing.assert_allclose(np.where(empty, 0, got_lse),
                               np.where(empty, 0, exact_lse), atol=1e-4)
    self.assertLessEqual(abs(out.array - exact).max(),
                         2 * abs(rounded - exact).max() + 1e-3)

  @parameterized.product(
      case=[_CASE, _RAGGED], options=[
          dict(), dict(causal=True, sink="bh"), dict(window=(20, 5)),
          dict(scale="block"), dict(scale="head", dv=16)])
  def test_options(self, case, options):
    self.run_kernel(dataclasses.replace(case, **options))

  @parameterized.product(case=[_CASE, _RAGGED], ordered=[False, True])
  def test_columns(self, case, ordered):
    p = Problem(case)
    want = _transposed(p)
    if ordered:
      t, j = np.divmod(np.arange(16), 4)
      want = want.reshape(-1, 16)[:, 2 * t + j % 2 + j // 2 * 8].reshape(
          want.shape)
    np.testing.assert_array_equal(
        _columns(p, ordered).view(np.uint8), want.view(np.uint8))

  def test_other_kind(self):
    self.run_kernel(dataclasses.replace(_CASE, kind="e4m3fnuz"), True)


if __name__ == "__main__":
  absltest.main()
