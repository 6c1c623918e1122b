# SPDX-License-Identifier: Apache-2.0
"""Every attention kernel for sm_90 that a row is made for runs on a GPU."""

from absl.testing import absltest, parameterized
from attention import calls
from attention import numbers_test as mha_test

from jax._src.aiter.core import dispatch

ARCH = "sm_90"


class HopperTest(mha_test.MhaTestCase):

  @parameterized.parameters(
      (call, *size) for call in calls.CALLS for size in calls.sizes(call))
  def test_call(self, call, dims, dtype):
    dqk, dv = dims
    options, _ = calls.CALLS[call]
    self.check(mha_test.Case(
        **dict(dtype=dtype, b=2, sq=150, sk=264, hq=2, hk=1, dqk=dqk, dv=dv)
        | options))

  def test_no_row_is_left_out(self):
    rows = calls.rows("cuda", ARCH, ("padded",))
    self.assertNotEmpty(rows)
    for *_, symbols in calls.cover("cuda", ARCH):
      rows -= set(symbols)
    self.assertEmpty(rows)


if __name__ == "__main__":
  if ARCH in dispatch.architectures("cuda"):
    absltest.main()
