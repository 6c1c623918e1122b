# SPDX-License-Identifier: Apache-2.0
"""Every kernel of latent attention for AMD GPUs runs on a simulated one.

A call comes to a kernel by its dtypes, its columns, its rows (here of two
queries for each of two sequences, half of them of none) and what else the
kernel leaves to another.
"""

import re

from absl.testing import absltest, parameterized
from harness import simulator
from mla import numbers_test as mla_test
from mla.cases import Case


class MlaKernelsTest(mla_test.MlaTestCase):

  @parameterized.parameters(
      *simulator.groups("mla_attend", "dtype", "dims", "symbol"))
  def test_kernels(self, dtype, dims, symbol, symbols):
    lora, rope, rows = dims
    if "_padded_" in symbol:
      # More than the next smaller one has.
      lora, rope = lora - 32, rope - 16
    elif "_fast_" not in symbol:
      lora, rope = 96, 16
    kind = re.search(r"_bytes_(e4m3\w+?)_no_", symbol)
    cache = kind.group(1) if kind else "int8" if "_bytes_no" in symbol else ""
    with simulator.launched(self, symbols):
      self.check(Case(
          dtype=dtype, lora=lora, rope=rope, heads=rows // 2 or 20,
          lengths=((1, 60), (1, 33)), cache=cache,
          logit_cap=0.0 if "_soft_cap" in symbol else 3.0,
          page=16 if "_odd_pages" in symbol else 24))

  @parameterized.parameters(
      dict(), dict(holes=True), dict(heads=41, lengths=((2, 150),)),
      dict(page=7, holes=True))
  def test_many_tiles(self, **options):
    """Of 64 rows, over several tiles of keys that are loaded ahead."""
    self.check(Case(**{"heads": 64, "lengths": ((1, 170), (1, 97), (1, 1)),
                       "page": 4, "holes": False} | options))

  @parameterized.parameters(*simulator.groups("mla_merge", "dtype", "symbol"))
  def test_merge(self, dtype, symbol, symbols):
    del symbol
    with simulator.launched(self, symbols):
      self.check(Case(dtype=dtype, lora=96, rope=16, lengths=((1, 530),),
                      heads=2))


if __name__ == "__main__":
  absltest.main()
