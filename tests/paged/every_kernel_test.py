# SPDX-License-Identifier: Apache-2.0
"""Every kernel of paged attention for AMD GPUs runs on a simulated one.

A call comes to a kernel by its dtypes, its head dimensions, its rows and what
else the kernel leaves to another.
"""

import dataclasses
import re

import numpy as np
from absl.testing import absltest, parameterized
from harness import simulator
from paged import cases
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
    fast, padded = "_fast_" in symbol, "_padded_" in symbol
    any_call = "unaligned" not in symbol
    made_for = symbol.split("_no_")[0]
    kind = re.search(r"_bytes_(e4m3fnuz|e4m3fn|e5m2|int8)", made_for)
    scale = "token" if "_token_scales" in made_for else "head"
    cache = kind.group(1) if kind else "int8" if "_bytes" in made_for else ""
    decode = "many_rows" not in made_for
    layouts = ("asm", "x") if "_shuffled" in made_for else ("NHD", "HND")
    changed = dict(soft_cap=30.0 * ("_soft_cap" not in symbol),
                   slopes="_alibi" not in symbol)
    # Of pages of 16 padded kernels would take a general one's calls.
    page = (64 if "_small_pages" in symbol else 8 if "_tiny_pages" in made_for
            else 16 if fast or padded or any_call else 24 if decode else 8)
    if cache and not (fast or padded or any_call):
      cache, scale = "e5m2", "token"  # Others have padded kernels.
    case = Case(
        dtype=dtype, d=d if fast else 20 if any_call else d - 16,
        dv=0 if fast else 12 if any_call else 16,
        lengths=_SHORT if decode else _MIXED, decode=decode, cache=cache,
        hq=4, hk=1, scale=scale if cache else "none", layout=layouts[0],
        window=(40, 0) if fast and "_window" not in symbol else (-1, -1),
        page=page, **(changed if padded and not decode else {}))
    with simulator.launched(self, symbols):
      self.check(case)
      if padded:
        self.check(dataclasses.replace(
            case, d=d, dv=0, layout=layouts[1], window=(40, 0), page=48,
            sinks=True, decode=False, lengths=(
                ((3, 100), (1, 33)) if decode else _MIXED), **changed))
      if scale == "token" and dtype == "fp16" and "e4m3" in cache:
        # Weights with their scales are no numbers of float16; results are.
        problem = cases.Problem(case)
        problem.v = (problem.v.astype(np.float32) / 64).astype(problem.v.dtype)
        problem.v_scale *= 2.0**17
        cases.check(self, problem, cases.call(problem), of_tokens=case.decode)

  @parameterized.parameters(
      *simulator.groups("paged_merge", "dtype", "dims", "symbol"))
  def test_merge(self, dtype, dims, symbol, symbols):
    del symbol
    with simulator.launched(self, symbols):
      self.check(Case(dtype=dtype, lengths=_LONG, hq=2, hk=1, d=dims[0]))


if __name__ == "__main__":
  absltest.main()
