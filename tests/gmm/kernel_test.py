# SPDX-License-Identifier: Apache-2.0
"""The grouped products' kernels without a GPU, in Triton's interpreter.

Operands are small integers, so that every sum is exact, whatever the tiles.
"""

import ml_dtypes
import numpy as np
from absl.testing import absltest, parameterized
from gmm import oracle
from harness.triton_interpreter import Tensor, gpu_arithmetic

# isort: split
from third_party.aiter.kernels.gmm import family, gmm

_BF16 = ml_dtypes.bfloat16


def plan_of(sizes, m, tile_rows, lead=False, tile=(4, 2)):
  """What gmm_plan writes, up to the last tile; tile: entries, groups."""
  groups = len(sizes) - lead
  tiles = -(-m // tile_rows) + groups + 1 if tile_rows else groups
  plan = Tensor(np.full((tiles + 1, 4), 1 << 30, np.int32))
  with gpu_arithmetic():
    gmm.gmm_plan[(-(-(tiles + 1) // tile[0]),)](
        Tensor(np.array(sizes, np.int32)), plan, m, groups, tile_rows, tiles,
        family.FEATURES["lead"] if lead else 0, TILE_M=tile[0], TILE_N=tile[1])
  return plan.array


class PlanTest(parameterized.TestCase):

  @parameterized.parameters(
      ((5, 0, 19, 0, 8), 32), ((0, 0), 9), ((0, 17, 3), 32), ((40, 9), 32),
      ((9, -4, 9), 20), ((1,) * 20, 20), ((2**31 - 1,) * 9, 33))
  def test_tiles(self, *problem):
    sizes, m = problem
    for lead in (False, True):
      for tile_rows in (1, 4, 16, 64):
        owners = oracle.runs(sizes, m)
        owners.append((owners[-1][1], m))
        names = [*range(len(sizes)), -1]
        if lead:
          names = [-1, *range(len(sizes) - 1), -1]
        want = [(g, row, end) for g, (first, end) in zip(names, owners)
                for row in range(first, end, tile_rows)]
        plan = plan_of(sizes, m, tile_rows, lead)
        self.assertEqual(plan[0, 0], len(want))
        np.testing.assert_array_equal(plan[1:len(want) + 1, :3], want)

  def test_each_group_once(self):
    sizes = (5, 0, 19, 0, 8, 3)
    for lead in (0, 1):
      plan = plan_of(sizes, 32, 0, bool(lead))
      want = [(g, *run) for g, run in enumerate(oracle.runs(sizes, 32)[lead:])]
      self.assertEqual(plan[0, 0], len(want))
      np.testing.assert_array_equal(plan[1:, :3], want)


class GmmTest(parameterized.TestCase):

  @parameterized.product(
      op=("nn", "nt", "tn"),
      problem=(((13, 0, 20), 40, 24, 40, 8), ((7, 30), 37, 20, 13, 1),
               ((50,), 37, 8, 16, 8)),
      wide=(False, True), xcds=(0, 1))
  def test_products(self, op, problem, wide, xcds):
    sizes, m, k, n, align = problem
    rng = np.random.default_rng(0)
    draw = lambda *shape: rng.integers(-4, 5, shape).astype(_BF16)
    a = draw(m, k)
    b = draw(m, n) if op == "tn" else draw(len(sizes), k, n)
    want = (oracle.rows_by_rows if op == "tn" else oracle.rows_times)(
        a, b, sizes)
    if op == "nt":
      b = np.ascontiguousarray(b.swapaxes(1, 2))
    tile_m, tile_n = 16, 16
    plan = plan_of(sizes, m, 0 if op == "tn" else tile_m)
    out, out_f32 = (Tensor(np.full(want.shape, np.nan, t))
                    for t in (_BF16, np.float32))
    rows = k if op == "tn" else 0
    tiles = (len(plan) - 1) * -(-n // tile_n) * (-(-rows // tile_m) or 1)
    # The interpreter has one lane.
    lane, gmm.gemm.first_lane = gmm.gemm.first_lane, lambda x: x
    try:
      with gpu_arithmetic(), np.errstate(all="ignore"):
        getattr(gmm, f"gmm_{op}")[(tiles,)](
            Tensor(a), Tensor(b), Tensor(plan), out, out_f32, n, k,
            family.FEATURES["out_f32"] if wide else 0, TILE_M=tile_m,
            TILE_N=tile_n, TILE_K=16, GROUP_M=2, XCDS=xcds, ALIGN=align,
            SLICES=1)
    finally:
      gmm.gemm.first_lane = lane
    np.testing.assert_array_equal(
        (out_f32 if wide else out).array.astype(np.float64),
        want.astype(np.float32 if wide else _BF16).astype(np.float64))

  @parameterized.parameters(
      (((13, 0, 20), 40, 24, 40, 8), 16, 1, 0),
      (((7, 30), 37, 20, 13, 1), 32, 8, 1))
  def test_gated(self, problem, tile_n, slices, xcds):
    """Gates are small enough for their products to be exact."""
    sizes, m, k, n, align = problem
    rng = np.random.default_rng(0)
    a, b = (rng.integers(-1, 2, s).astype(_BF16)
            for s in ((m, k), (len(sizes), 2 * n, k)))
    h = oracle.rows_times(a, b.swapaxes(1, 2), sizes)
    gate, up = np.split(h, 2, 1)
    want = gate / (1 + np.exp(-gate)) * up
    plan = plan_of(sizes, m, 16)
    out = Tensor(np.full((m, n), np.nan, _BF16))
    lane, gmm.gemm.first_lane = gmm.gemm.first_lane, lambda x: x
    try:
      with gpu_arithmetic(), np.errstate(all="ignore"):
        gmm.gmm_nt[((len(plan) - 1) * -(-2 * n // tile_n),)](
            Tensor(a), Tensor(b), Tensor(plan), out, out, n, k,
            family.FEATURES["gated"], TILE_M=16, TILE_N=tile_n, TILE_K=16,
            GROUP_M=2, XCDS=xcds, ALIGN=align, SLICES=slices)
    finally:
      gmm.gemm.first_lane = lane
    np.testing.assert_allclose(
        out.array.astype(np.float64), want, rtol=2**-8, atol=1e-6)

  @parameterized.product(
      problem=(((13, 0, 20), 40, 24, 40, 8), ((7, 30), 37, 20, 13, 1)),
      ends=(("nn", "none", "gelu"), ("nt", "none", "relu"),
            ("nn", "pairs", "swiglu"), ("nt", "pairs", "gelu_tanh"),
            ("nt", "halves", "silu")))
  def test_epilogue(self, problem, ends):
    sizes, m, k, n, align = problem
    layout, gates, activation = ends
    rng = np.random.default_rng(0)
    columns = n if gates == "none" else 2 * n
    a, b = (rng.integers(-1, 2, s).astype(_BF16)
            for s in ((m, k), (len(sizes), k, columns)))
    bias = rng.standard_normal((len(sizes), columns), np.float32)
    h = oracle.rows_times(a, b, sizes)
    for (first, end), row in zip(oracle.runs(sizes, m), bias):
      h[first:end] += row
    want = oracle.ended(h, gates, activation, 1.5 * (columns > n), 1.7)
    if layout == "nt":
      b = np.ascontiguousarray(b.swapaxes(1, 2))
    flags = family.FEATURES["bias"]
    if gates != "none":
      flags |= family.FEATURES["gated"]
    if gates == "pairs":
      flags |= family.FEATURES["pairs"]
    plan = plan_of(sizes, m, 16)
    out = Tensor(np.full((m, n), np.nan, _BF16))
    number = {"none": 0, "relu": 1, "gelu": 2, "gelu_tanh": 3, "silu": 4,
              "swiglu": 5}[activation]
    alpha = 1.7 if activation == "swiglu" else 1.0
    with gpu_arithmetic(), np.errstate(all="ignore"):
      getattr(gmm, f"gmm_{layout}_epilogue")[
          ((len(plan) - 1) * -(-columns // 16),)](
              Tensor(a), Tensor(b), Tensor(plan), out, out, Tensor(bias), n, k,
              number, alpha, 1.5, 1.5, flags, TILE_M=16, TILE_N=16, TILE_K=16,
              GROUP_M=2, XCDS=0, ALIGN=align, SLICES=1)
    np.testing.assert_allclose(
        out.array.astype(np.float64), want, rtol=2**-8, atol=1e-5)

  @parameterized.product(
      kind=("row", "block"), dtype=(np.int8, ml_dtypes.float8_e4m3fn,
                                    ml_dtypes.float8_e4m3fnuz),
      bits=(False, True))
  def test_scaled(self, kind, dtype, bits):
    if dtype is np.int8 and (kind == "block" or bits):
      return
    m, k, n, sizes = 40, 176, 144, (17, 0, 20)
    rng = np.random.default_rng(0)
    a, b = (rng.integers(-4, 5, s).astype(np.float32).astype(dtype)
            for s in ((m, k), (3, n, k)))
    power = lambda *s: np.exp2(rng.integers(-1, 2, s)).astype(np.float32)
    wide_a, wide_b = a.astype(np.float64), b.astype(np.float64)
    if kind == "row":
      scales = power(m), power(3, n)
      wide_a = wide_a * scales[0][:, None]
      wide_b = wide_b * scales[1][..., None]
    else:
      scales = power(m, 2), power(3, 2, 2)
      wide_a = wide_a * np.repeat(scales[0], 128, 1)[:, :k]
      wide_b = wide_b * np.repeat(np.repeat(
          scales[1], 128, 1)[:, :n], 128, 2)[:, :, :k]
    want = oracle.rows_times(wide_a, wide_b.swapaxes(1, 2), sizes)
    if bits:
      a, b = a.view(np.uint8), b.view(np.uint8)
    flags = family.FEATURES["out_f32"]
    if dtype is ml_dtypes.float8_e4m3fnuz:
      flags |= family.FEATURES["fnuz"]
    plan = plan_of(sizes, m, 16)
    out, out_f32 = (Tensor(np.full(want.shape, np.nan, t))
                    for t in (_BF16, np.float32))
    promote = dict(PROMOTE=False) if kind == "row" else {}
    with gpu_arithmetic(), np.errstate(all="ignore"):
      getattr(gmm, f"gmm_{kind}")[((len(plan) - 1) * 5,)](
          Tensor(a), Tensor(b), *map(Tensor, scales), Tensor(plan), out,
          out_f32, n, k, flags, TILE_M=16, TILE_N=32, TILE_K=128, GROUP_M=2,
          XCDS=0, ALIGN=16, SLICES=1, **promote)
    np.testing.assert_array_equal(out_f32.array, want.astype(np.float32))


  @parameterized.parameters(
      ("mx", False, (17, 0, 20)), ("mx", True, (40,)), ("i4", True, (40,)))
  def test_packed(self, kind, unpack, sizes):
    m, k, n, groups = 40, 96, 48, len(sizes)
    rng = np.random.default_rng(0)
    a = rng.integers(-4, 5, (m, k)).astype(_BF16)
    b = rng.integers(0, 16, (groups, n, k)).astype(np.uint8)
    power = rng.integers(-1, 2, (groups, n, k // 32))
    halves = np.array([0, 1, 2, 3, 4, 6, 8, 12]) / 2
    wide = (np.where(b & 8, -1, 1) * halves[b & 7] if kind == "mx"
            else (b.astype(np.int64) ^ 8) - 8)
    want = oracle.rows_times(
        a, (wide * np.exp2(np.repeat(power, 32, 2))).swapaxes(1, 2), sizes)
    packed = b[..., ::2] | b[..., 1::2] << 4
    plan = plan_of(sizes, m, 16)
    out, out_f32 = (Tensor(np.full(want.shape, np.nan, t))
                    for t in (_BF16, np.float32))
    if kind == "mx":
      scales = np.zeros(1, np.uint8), (power + 127).astype(np.uint8)
      more = dict(FORMAT="bf16", UNPACK=unpack)
    else:
      scales = np.exp2(power).astype(_BF16),
      more = {}
    with gpu_arithmetic(), np.errstate(all="ignore"):
      getattr(gmm, f"gmm_{kind}")[((len(plan) - 1) * 2,)](
          Tensor(a), Tensor(packed), *map(Tensor, scales), Tensor(plan), out,
          out_f32, n, k, family.FEATURES["out_f32"], TILE_M=16, TILE_N=32,
          TILE_K=64, GROUP_M=2, XCDS=0, SLICES=1, **more)
    np.testing.assert_array_equal(out_f32.array, want.astype(np.float32))


if __name__ == "__main__":
  absltest.main()
