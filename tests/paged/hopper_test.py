# SPDX-License-Identifier: Apache-2.0
"""Every kernel of paged attention that a row for sm_90 is made for, on a GPU.

A call comes to the kernel that its features choose; of many calls those run
that come to one which none before came to with as many rows, or with such head
dimensions: a power of two or not. Shards of the test run side by side, each
with OPENBLAS_NUM_THREADS=1.
"""

import itertools

import numpy as np
from absl.testing import absltest, parameterized
from harness.cases import DTYPES
from paged import cases
from paged import numbers_test as paged_test
from paged.cases import Case

from jax._src.aiter.core import dispatch
from jaxlib import gpu_aiter

ARCH = "sm_90"
_DIMS = ((128, 0), (64, 0), (32, 0), (256, 0), (96, 80), (48, 32), (192, 0),
         (72, 40), (136, 0), (20, 0), (36, 0), (100, 0))
_PAGES = (64, 16, 8, 48, 3)
# Keys in many parts and in one, in pages some of which are absent; steps of one
# row, of few, of many that see few keys or not, in few tiles of rows or not,
# and of one with few heads.
_STEPS = (
    dict(decode=True, lengths=((1, 1500), (1, 70), (1, 0), (1, 1))),
    dict(decode=False, lengths=((2, 1500), (3, 70), (0, 9), (1, 0)),
         window=(300, -1), sinks=True),
    dict(decode=False, lengths=((40, 150), (70, 70), (3, 260), (20, 0))),
    dict(decode=False, lengths=((40, 150), (70, 70), (3, 2000), (20, 0))),
    dict(decode=False, lengths=((700, 3000), (70, 70), (3, 900), (20, 0))),
    dict(decode=True, hq=8, lengths=((1, 1500), (1, 70), (1, 0), (1, 1))))
# Steps have far fewer tiles of 64 rows than two a multiprocessor, or more.
_FEW_TILES = 128
# Of the calls, which shards share.
_PARTS = 32
_LAYOUTS = ("NHD", "x", "asm")
_SCORES = (dict(), dict(soft_cap=3.0), dict(slopes=True),
           dict(soft_cap=3.0, slopes=True))
_CACHES = (("", "none"), *itertools.product(cases.BYTES, ("head", "token")))


def _calls():
  """(step, Case) of every kind, plain ones first; a tile has rows of heads."""
  for layout, scores, (cache, scale), dtype, (d, dv), page, (step, options) in (
      itertools.product(_LAYOUTS, _SCORES, _CACHES, ("bf16", "fp16", "fp32"),
                        _DIMS, _PAGES, enumerate(_STEPS))):
    if layout != "NHD" and (d % 16 or dv or page % 16 or dtype == "fp32"):
      continue
    if dtype != "fp32" or (max(d, dv) <= 128 and not cache):
      yield step, Case(dtype=dtype, d=d, dv=dv, page=page, cache=cache,
                       scale=scale, hk=2, holes=True, layout=layout, **scores,
                       **{"hq": 24, **options})


def _features(c: Case) -> list[str]:
  """What a call asks of a kernel, as src/paged.cc finds it."""
  dv = c.dv or c.d
  run = 16 // (1 if c.cache else np.dtype(DTYPES[c.dtype]).itemsize)
  batch = len(c.lengths)
  rows = sum(n for n, _ in c.lengths) * c.hq // c.hk
  # Of tables and queries as cases.Problem makes them.
  bound = (-(-max(n for _, n in c.lengths) // c.page) + 1) * c.page
  tokens = sum(n for n, _ in c.lengths) + (0 if c.decode else 3)
  keys = max(bound - tokens // batch // 2, bound // 2)
  if c.window[0] >= 0:
    keys = min(keys, c.window[0] + max(c.window[1], 0))
  few = keys <= (1800 if max(c.d, dv) <= 64 else 560)
  few_tiles = (rows >= 32 * batch and not few
               and c.hk * (rows // 64 + batch) < _FEW_TILES)
  asked = {
      "cu_seqlens": not c.decode,
      "window": c.window != (-1, -1) or not c.decode,
      "soft_cap": c.soft_cap > 0,
      "alibi": c.slopes,
      "sink": c.sinks,
      "token_scales": c.scale in ("page", "token"),
      "partial": c.d != dv or c.d & (c.d - 1) != 0,
      "unaligned": c.d % run + dv % run != 0,
      "shuffled": c.layout != "NHD",
      "odd_pages": c.page & (c.page - 1) != 0,
      "small_pages": c.page % 64 != 0,
      "tiny_pages": c.page % 16 != 0,
      # Queries of one sequence are not known; a step's rows are 12 or 4.
      "unshared": not c.decode or batch == 1,
      "several_rows": rows > 8 * batch,
      "many_rows": rows >= 32 * batch,
      "short": few or few_tiles,
      "few_tiles": few_tiles,
      "bytes": bool(c.cache),
      c.cache: bool(c.cache),
  }
  return [name for name, is_asked in asked.items() if is_asked]


def _calls_by_kernel():
  """(calls to run, kernels that none comes to): a name, a step and a Case."""
  module = gpu_aiter.load("cuda")
  left = {
      kernel["symbol"] for kernel in module.table()
      if kernel["op"] == "paged_attend" and kernel["arch"] == ARCH
      and kernel["grade"] in ("fast", "padded")}
  assert left, "the library has no kernels"
  chosen, seen = [], set()
  for step, case in _calls():
    features = _features(case)
    name, *_ = module.kernels("paged_attend", ARCH, case.dtype,
                              [max(case.d, case.dv)], features)
    call = name, step, case.layout, "partial" in features
    if call not in seen:
      seen.add(call)
      left.discard(name)
      chosen.append((name, step, case))
  return chosen, left


class HopperTest(paged_test.PagedTestCase):

  @classmethod
  def setUpClass(cls):
    super().setUpClass()
    cls.calls, cls.left = _calls_by_kernel()

  def test_every_row_has_a_call(self):
    self.assertEmpty(self.left)

  @parameterized.parameters(*range(_PARTS))
  def test_rows(self, part):
    for name, step, case in self.calls[part::_PARTS]:
      with self.subTest(name, step=step, layout=case.layout, d=case.d):
        self.check(case)

  @parameterized.product(longest=(2000, 4000), page=(16, 64), d=(64, 128))
  def test_wide_tables(self, longest, page, d):
    """Of two kernels the one returns that is not for so many keys."""
    prompts = ((500, 500), (400, 420), (560, 560))
    self.check(Case(dtype="bf16", d=d, page=page, hq=24, hk=2, decode=False,
                    lengths=(*prompts, (1, longest))))


if __name__ == "__main__":
  if ARCH in dispatch.architectures("cuda"):
    absltest.main()
