# SPDX-License-Identifier: Apache-2.0
"""Every kernel of grouped products for AMD GPUs runs on a simulated one.

A call comes to a kernel by its dtype, how long its groups or how large their
matrices are, and whether rows are aligned.
"""

import numpy as np
from absl.testing import absltest, parameterized
from gmm import numbers_test as gmm_test
from gmm import oracle
from harness import cases, simulator

import jax
from jax._src.aiter.gmm import op as gmm_op

# Rows of a group that a kernel of any length is for, sides of matrices, and
# what is added up in so many steps that a pipeline comes back to its buffers.
_MANY, _WIDE, _DEEP = 1025, 136, 336


def _problem(op, dtype, dims, aligned):
  """(m, k, n, sizes) of a call that comes to a kernel."""
  several = len({tuple(d) for o, t, d, ok, _ in simulator.groups(
      "gmm_", "op", "dtype", "dims", "aligned")
                 if (o, t, ok) == (op, dtype, aligned)}) > 1
  bound = dims[0]
  m, k, n = 60, 40 if aligned else 37, 80 if aligned else 70
  sizes = [30, 0, 9]
  if op == "gmm_tn":
    if not bound and several:
      k, n = _WIDE, _WIDE
      m, sizes = _DEEP + 30, [_DEEP, 0, 9]
  elif bound == 16:
    m, sizes = 24 if aligned else 21, [13, 0, 9]
  elif not bound and several:
    # One group of many rows, most of which are not there.
    m, k, n, sizes = _MANY, _DEEP, 32, [17]
  return m, k, n, sizes


class GmmKernelsTest(gmm_test.EndsTestCase):

  @parameterized.parameters(*simulator.groups(
      "gmm_n._epilogue", "op", "dtype", "dims", "aligned"))
  def test_ends(self, op, dtype, dims, aligned, symbols):
    with simulator.launched(self, symbols):
      self.check_ends(*_problem(op, dtype, dims, aligned), op[4:6],
                      gmm_test.ENDS[:3], dtype)

  @parameterized.parameters(*simulator.groups(
      "gmm_(nn|nt|tn)$", "op", "dtype", "dims", "aligned"))
  def test_kernels(self, op, dtype, dims, aligned, symbols):
    layout = op.removeprefix("gmm_")
    plans = [s for _, s in simulator.groups("gmm_plan", "op")]
    rng = np.random.default_rng(0)
    m, k, n, sizes = _problem(op, dtype, dims, aligned)
    a = gmm_test.integers(rng, m, k, dtype=dtype)
    b = (gmm_test.integers(rng, m, n, dtype=dtype) if layout == "tn"
         else gmm_test.integers(rng, len(sizes), k, n, dtype=dtype))
    want = (oracle.rows_by_rows if layout == "tn" else oracle.rows_times)(
        a, b, sizes)
    given = b.swapaxes(1, 2) if layout == "nt" else b
    for out in (dtype, "fp32"):
      cfg = gmm_op.Config(np.dtype(cases.DTYPES[out]).name, layout)
      with simulator.launched(self, symbols + sum(plans, [])):
        got = jax.jit(lambda *x, cfg=cfg: gmm_op.product(
            cfg, gmm_op.Operands(*x)))(a, given, np.array(sizes, np.int32))
      np.testing.assert_array_equal(
          np.asarray(got), want.astype(cases.DTYPES[out]))
    if layout == "nt":
      cfg = gmm_op.Config(np.dtype(cases.DTYPES[dtype]).name, "nt",
                          gates="halves", activation="silu")
      with simulator.launched(self, symbols + sum(plans, [])):
        got = jax.jit(lambda *x: gmm_op.scaled(cfg, gmm_op.Operands(*x)))(
            a, given, np.array(sizes, np.int32))
      gate, up = np.split(want.astype(cases.DTYPES[dtype]).astype(float), 2, 1)
      np.testing.assert_allclose(
          np.asarray(got, float), gate / (1 + np.exp(-np.maximum(gate, -600)))
          * up, rtol=2**-7, atol=1e-6)


class ScaledKernelsTest(gmm_test.ScaledTestCase):

  @parameterized.parameters(*simulator.groups(
      "gmm_(row|block)", "op", "dtype", "dims"))
  def test_kernels(self, op, dtype, dims, symbols):
    own = [t for o, t, _ in simulator.groups(
        "gmm_(row|block)", "op", "dtype") if o == op]
    # Kernels for any float8 serve the type that no other does.
    kinds = {"i8": "i8", "e4m3fn": "fn", "e4m3fnuz": "fnuz"}
    other = next(t for t in ("e4m3fn", "e4m3fnuz") if t not in own)
    m, sizes = (22, (13, 0, 5)) if dims[0] == 16 else (60, (40, 0, 17))
    with simulator.launched(self, symbols):
      self.check(kinds[other if dtype == "any" else dtype], m, 144, 160, sizes,
                 op == "gmm_block")


class PackedKernelsTest(gmm_test.PackedTestCase):

  def test_kernels(self):
    """gfx90a has none of four bits."""
    groups = simulator.groups("gmm_(mx|i4)", "op", "dtype", "dims")
    for op, dtype, dims, symbols in groups:
      several = any(d[0] for o, t, d, _ in groups if (o, t) == (op, dtype))
      m, sizes = (60, (40, 0, 17)) if not dims[0] and several else (
          22, (13, 0, 5))
      with self.subTest(op=op, dtype=dtype, dims=dims):
        with simulator.launched(self, symbols):
          self.check("i4" if op == "gmm_i4" else dtype, m, 160, 96, sizes)


if __name__ == "__main__":
  absltest.main()
