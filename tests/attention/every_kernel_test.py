# SPDX-License-Identifier: Apache-2.0
"""Every attention kernel for AMD GPUs runs on a simulated one, and runs right.

Calls come to a kernel by their sizes, dtype and features.
"""

from absl.testing import absltest, parameterized
from attention import numbers_test as mha_test
from harness import simulator


class MhaKernelsTest(mha_test.MhaTestCase):

  # Tiles of queries are up to 128 rows and tiles of keys up to 128: of two
  # tiles of each the second is cut, and the window cuts the first.
  FAST = [
      dict(sq=150, sk=150, causal=True, window=(140, -1)),
      dict(sq=70, sk=150, hq=2, hk=1),
  ]
  GENERAL = [
      dict(sq=71, sk=99, causal=True, bias="bhqk", alibi="h", sink="h",
           mask="b11k"),
      dict(sq=40, sk=71, cap=3.0, dropout=0.3, window=(9, 9, 2), use_lse=True,
           hq=2, hk=1, mask="1hqk", bias="1h1k"),
  ]

  @parameterized.parameters(*simulator.groups("mha_", "grade", "dtype", "dims"))
  def test_kernels(self, grade, dtype, dims, symbols):
    dqk, dv = dims
    if not dqk:  # A kernel for all head dims and dtypes.
      dtype, dqk, dv = "bf16", 32, 32
    with simulator.launched(self, symbols):
      for options in self.FAST if grade == "fast" else self.GENERAL:
        self.check(mha_test.Case(
            b=1, dtype=dtype, dqk=dqk, dv=dv, **options))


if __name__ == "__main__":
  absltest.main()
