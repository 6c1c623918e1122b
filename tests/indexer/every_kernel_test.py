# SPDX-License-Identifier: Apache-2.0
"""Every kernel of the family for AMD GPUs runs on a simulated one."""

from absl.testing import absltest, parameterized
from harness import simulator
from indexer import numbers_test as indexer_test
from indexer.cases import Case


class IndexerKernelsTest(indexer_test.IndexerTestCase):

  @parameterized.parameters(
      *simulator.groups("indexer_logits", "dtype", "symbol"))
  def test_kernels(self, dtype, symbol, symbols):
    paged = "paged" in symbol and "no_paged" not in symbol
    with simulator.launched(self, symbols):
      self.check(Case(kind="float8_" + dtype, keys=100, **(dict(
          page=16, lengths=(100, 37), tiles=True) if paged else {})))


if __name__ == "__main__":
  absltest.main()
