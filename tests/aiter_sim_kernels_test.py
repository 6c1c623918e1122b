# SPDX-License-Identifier: Apache-2.0
"""Every AMD kernel of the wheel runs on a simulated GPU, and runs right.

The tests come from the table of kernels in the installed module: one for each
grade, dtype and head dims. A kernel that its test does not launch fails it.
"""

import time

import aiter_mha_test
import simulator
from absl.testing import absltest, parameterized
from aiter_mha_test import Case

from jax._src.aiter import dispatch
from jaxlib import gpu_aiter

ARCH, = dispatch.architectures("rocm")

# Tiles of queries are up to 128 rows and tiles of keys up to 128: of two tiles
# of each the second is cut, and the window cuts the first.
FAST = [
    dict(sq=150, sk=150, causal=True, window=(140, -1)),
    dict(sq=70, sk=150, hq=2, hk=1),
]
GENERAL = [
    dict(sq=71, sk=99, causal=True, bias="bhqk", alibi="h", sink="h"),
    dict(sq=40, sk=71, cap=3.0, dropout=0.3, window=(9, 9, 2), use_lse=True,
         hq=2, hk=1),
]


def groups():
  """(grade, dtype, dqk, dv) -> the symbols of its kernels."""
  found = {}
  for kernel in gpu_aiter.load("rocm").kernels():
    if kernel["arch"] == ARCH and kernel["op"].startswith("mha_"):
      key = (kernel["grade"], kernel["dtype"], *kernel["dims"])
      found.setdefault(key, []).append(kernel["symbol"])
  return found


class KernelsTest(aiter_mha_test.MhaTestCase):

  def test_there_are_kernels(self):
    """Both grades of both dtypes, forward and backward."""
    self.assertGreaterEqual(len(groups()), 16)

  @parameterized.parameters(*(
      (*key, symbols) for key, symbols in groups().items()))
  def test_kernels(self, grade, dtype, dqk, dv, symbols):
    if not dqk:  # A kernel for all head dims and dtypes.
      dtype, dqk, dv = "bf16", 32, 32
    before = [simulator.launches(symbol) for symbol in symbols]
    start, executed = time.monotonic(), self.executed(symbols)
    for options in FAST if grade == "fast" else GENERAL:
      self.check(Case(b=1, dtype=dtype, dqk=dqk, dv=dv, **options))
    seconds = time.monotonic() - start
    executed = self.executed(symbols) - executed
    print(f"{len(symbols)} kernels, {executed} instructions, {seconds:.2f} s")
    self.assertGreater(executed, 0)
    for symbol, count in zip(symbols, before):
      self.assertGreater(simulator.launches(symbol), count, symbol)

  def executed(self, symbols):
    return sum(simulator.instructions(symbol) for symbol in symbols)


if __name__ == "__main__":
  absltest.main()
