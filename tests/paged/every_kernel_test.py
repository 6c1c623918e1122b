# SPDX-License-Identifier: Apache-2.0
"""Every kernel of paged attention for AMD GPUs runs on a simulated one.

A call comes to a kernel by its dtypes, its head dimensions, its rows and what
else the kernel leaves to another.
"""

import re

from absl.testing import absltest, parameterized
from harness import simulator
from paged import numbers_test as paged_test
from paged.cases import Case

_SHORT = ((1, 100), (1, 33))
_LONG = ((1, 300),)
_MIXED = ((20, 40), (3, 70))


class PagedKernelsTest(paged_test.PagedTestCase):

  @parameterized.parameters(
      *simulator.groups("paged_attend", "dtype", "dims", "symbol"))
  def test_kernels(self, dtype, dims, symbol, symbols):
    d, = dims
    fast = "_fast_" in symbol
    any_call = "unaligned" not in symbol
    made_for = symbol.split("_no_")[0]
    kind = re.search(r"_bytes_(e4m3\w+|e5m2|int8)$", made_for)
    cache = kind.group(1) if kind else "int8" if "_bytes" in made_for else ""
    decode = "many_rows" not in made_for
    case = Case(
        dtype=dtype, d=d if fast else 20 if any_call else d - 16,
        dv=0 if fast else 12 if any_call else 16,
        lengths=_SHORT if decode else _MIXED, decode=decode, cache=cache,
        hq=4, hk=1, scale="head" if cache else "none",
        window=(40, 0) if fast and "_window" not in symbol else (-1, -1),
        page=64 if "_small_pages" in symbol else 16)
    with simulator.launched(self, symbols):
      self.check(case)

  @parameterized.parameters(
      *simulator.groups("paged_merge", "dtype", "dims", "symbol"))
  def test_merge(self, dtype, dims, symbol, symbols):
    del symbol
    with simulator.launched(self, symbols):
      self.check(Case(dtype=dtype, lengths=_LONG, hq=2, hk=1, d=dims[0]))


if __name__ == "__main__":
  absltest.main()
