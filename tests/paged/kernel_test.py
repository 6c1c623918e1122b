# SPDX-License-Identifier: Apache-2.0
"""Kernels of paged attention without a GPU, in Triton's interpreter.

Tiles are small, so that rows and keys fill some, cut others and leave none of
the rest, and keys are divided into more parts than there are.
"""

import dataclasses

import numpy as np
from absl.testing import absltest, parameterized
from harness.cases import DTYPES, check_error
from harness.triton_interpreter import Tensor, gpu_arithmetic
from paged import cases
from paged.cases import Case

# isort: split
from third_party.aiter.kernels.paged import (
    attend,
    family,
    merge,
    merge_hopper,
    merge_rows,
)

_ALL = sum(family.FLAGS.values())
_TILE_M, _TILE_N = 16, 16
_SHUFFLED = ("x", "asm")
_MIXED = ((5, 21), (1, 40), (0, 12), (3, 0), (9, 33))


def _new(*shape, dtype=np.float32):
  """What no kernel writes is seen."""
  return Tensor(np.full(shape, 77, dtype))


def _or(t, other):
  return Tensor(np.asarray(other if t is None else t))


def _stride(names, shape):
  strides = np.cumprod((1, *shape[:0:-1]))[::-1].tolist()
  return dict(zip(names, strides))


def _side(layout, shape, run, start=0, values=False):
  """(start, page, head, token, split, run_token, run, col) of a cache."""
  names = {
      "NHD": "page offset head col", "HND": "page head offset col",
      "heads_first": "head page offset col",
      "interleaved": "page offset head side col",
      "x": "page head col offset" if values else "page head run offset col",
      "asm": ("page head run_offset col offset" if values
              else "page head run offset col"),
  }[layout].split()
  s = _stride(names, shape)
  split = shape[-1] if "run_offset" in names else 1
  return (start, s["page"], s["head"], s["offset"], split,
          s.get("run_offset", s["offset"]), s.get("run", run * s["col"]),
          s["col"])


def _scale_strides(scale, layout):
  """(page, head, token)."""
  ndim = 0 if scale is None else scale.ndim
  if ndim == 3:
    names = ("page", "head", "offset")
    if layout == "heads_first":
      names = ("head", "page", "offset")
    s = _stride(names, scale.shape)
    return s["page"], s["head"], s["offset"]
  return {0: (0, 0, 0), 1: (0, 1, 0),
          2: (scale.shape[-1] if ndim else 0, 1, 0)}[ndim]


class PagedKernelTest(parameterized.TestCase):

  def run_kernels(self, case: Case, splits=1, kind=None, flags=_ALL, csr=False,
                  large_pages=False, own=False, programs=99, one_axis=False,
                  last_pages=False):
    """Runs them and compares with the oracle.

    own: sinks and slopes are an array of [batch, hq].
    one_axis: the grid has no program without a part, if there are splits.
    last_pages: with csr: lengths are those of the last pages, and so below
      nothing of sequences whose tables are too long, and more than a page of
      those whose are too short.
    """
    p = cases.Problem(case)
    tokens, hq, d = p.q.shape
    v = p.k if p.v is None else p.v
    dv = case.dv or d
    names = list(family.KINDS)
    in_bytes = bool(case.cache)
    if kind is None:
      kind = names.index(case.cache) if in_bytes else -2
    run = 16 // p.k.dtype.itemsize
    k_side = _side(case.layout, p.k.shape, run)
    v_side = _side(case.layout, v.shape, run, values=True)
    if p.v is None:
      v_side = (p.k.shape[-1], *k_side[1:])
    axis = 1 if case.layout == "heads_first" else 0
    on = dict(
        cu_seqlens=not case.decode, indptr=csr, last_pages=last_pages,
        window=p.scores()["window"] != (-1, -1), soft_cap=case.soft_cap > 0,
        alibi=case.slopes, sink=case.sinks, lse=True, partial=True,
        token_scales=case.scale in ("page", "token"),
        shuffled=case.layout in _SHUFFLED,
        odd_pages=case.page & (case.page - 1) != 0)
    bits = sum(family.FLAGS[n] for n, holds in on.items() if holds)
    table, indptr, width = p.table, np.zeros(1, np.int32), p.table.shape[1]
    lengths = p.lengths
    if csr:
      counts = [max(len(row) - i % 2, 0) for i, row in enumerate(p.table)]
      table = np.concatenate([row[:n] for row, n in zip(p.table, counts)])
      indptr = np.cumsum([0, *counts]).astype(np.int32)
      width = len(table)
      if last_pages:
        lengths = (lengths - (np.array(counts) - 1) * case.page).astype(
            np.int32)
    raw = lambda t: Tensor(t.view(np.uint8) if in_bytes else t)
    caches = raw(p.k), raw(v)
    caches = caches[0], caches[0] if p.v is None else caches[1]
    head = max(16, 1 << (max(d, dv) - 1).bit_length())
    out, lse = _new(tokens, hq, dv, dtype=p.q.dtype), _new(hq, tokens)
    parts = _new(splits, tokens, hq, dv)
    parts_lse = _new(splits, tokens, hq)
    window = [2**30 if w < 0 else w for w in p.scores()["window"]]
    group, b = hq // case.hk, len(p.lengths)
    tiles = (tokens * group // _TILE_M + b + 1 if not case.decode
             else b * -(-group // _TILE_M))
    ks, vs = (_scale_strides(s, case.layout) for s in (p.k_scale, p.v_scale))
    steps = (hq, hq) if own else (0, 0)
    sinks, slopes = (np.tile(t, (b, 1)) if own else t
                     for t in (p.sinks, p.slopes))
    grid = (tiles * case.hk, splits)
    if one_axis and splits > 1:
      grid = (programs * min(b, 2) + tiles * case.hk,)
    scale = d ** -0.5 if case.softmax_scale is None else case.softmax_scale
    with gpu_arithmetic(), np.errstate(all="ignore"):
      attend.paged_attend[grid](
          Tensor(p.q), *caches, *caches, out, lse, parts,
          parts_lse, _or(p.k_scale, np.ones(1, np.float32)),
          _or(p.v_scale, np.ones(1, np.float32)), Tensor(sinks),
          Tensor(slopes), Tensor(table), Tensor(indptr), Tensor(lengths),
          Tensor(p.cu), *k_side, *ks, *v_side, *vs, run, tokens,
          b, 1, hq, case.hk, group, d, dv, p.k.shape[axis], case.page,
          case.page.bit_length() - 1, width, splits, programs, *window, *steps,
          scale,
          float(case.soft_cap),
          names.index(case.cache) if in_bytes else 0, bits, TILE_M=_TILE_M,
          TILE_N=_TILE_N, HEAD=head, FLAGS=flags, KIND=kind, NATIVE=-1,
          CHEAP_CAST=False, LARGE_PAGES=large_pages, ONE_LANE=False,
          PRECISION="ieee", ONE_AXIS=one_axis, OVERLAPS=False)
      results = [(out, lse)]
      if splits > 1:
        cols = 4 if one_axis else 1
        results += [(Tensor(out.array.copy()), Tensor(lse.array.copy()))
                    for _ in range(2)]
        for (kernel, options), result in zip(
            ((merge.paged_merge, {}),
             (merge_hopper.paged_merge, {"FEW_N": 4})), results):
          kernel[(tokens * hq * cols,)](
              parts, parts_lse, *result, tokens, hq, dv, splits, cols, bits,
              TILE_N=2, HEAD=head, MERGE_COLS=4, OVERLAPS=False, **options)
        merge_rows.paged_merge[(-(-tokens * hq // 8),)](
            parts, parts_lse, *results[2], tokens, hq, dv, splits, bits,
            TILE_M=8, TILE_N=16, HEAD=head, OVERLAPS=False)
    if csr:
      for row, n in zip(p.table, counts):
        row[n:] = -1
    exact, exact_lse = p.exact()
    plain, _ = p.exact(DTYPES[case.dtype])
    empty = exact_lse == -np.inf
    for out, lse in results:
      check_error(self, out.array, exact, plain, case.dtype, str(case))
      np.testing.assert_array_equal(lse.array == -np.inf, empty)
      np.testing.assert_allclose(
          np.where(empty, 0, lse.array), np.where(empty, 0, exact_lse),
          rtol=1e-4, atol=1e-4 * (1 + 9 * (case.cache == "int8")))

  @parameterized.product(
      case=[Case(d=32), Case(d=32, decode=False, lengths=_MIXED)],
      splits=[1, 3], one_axis=[False, True])
  def test_plain(self, case, splits, one_axis):
    self.run_kernels(case, splits, one_axis=one_axis)

  @parameterized.product(programs=[4, 9, 30], one_axis=[False, True])
  def test_shares(self, programs, one_axis):
    """Long sequences are divided, short ones not, and no key is lost."""
    for decode, lengths in ((True, ((1, 300), (1, 9), (1, 90))),
                            (False, ((5, 200), (1, 40), (0, 12), (9, 33)))):
      for window in ((-1, -1), (70, -1)):
        self.run_kernels(Case(d=32, decode=decode, lengths=lengths,
                              window=window), splits=5, programs=programs,
                         one_axis=one_axis)

  @parameterized.parameters(attend.LANES.value - 1, attend.LANES.value + 2)
  def test_many_sequences(self, count):
    """More than are looked at together."""
    lengths = [(i % 7 != 3, 29 * i % 31) for i in range(count - 2)]
    lengths = ((1, 70), *((int(n), k) for n, k in lengths), (1, 50))
    self.run_kernels(Case(d=32, hq=2, hk=1, decode=False, lengths=lengths),
                     splits=4, programs=40, one_axis=True)

  @parameterized.parameters(*family.KINDS)
  def test_bytes(self, cache):
    case = Case(d=32, cache=cache, scale="head")
    self.run_kernels(case)
    self.run_kernels(case, kind=-1)

  @parameterized.parameters(
      ("HND", ""), ("heads_first", "e4m3fn"), ("interleaved", ""), ("x", ""),
      ("x", "e4m3fn"), ("asm", "e4m3fn"))
  def test_layouts(self, layout, cache):
    self.run_kernels(Case(
        d=32, dv=0 if layout == "interleaved" else 16, layout=layout,
        cache=cache, scale="token" if cache else "none"))

  @parameterized.parameters(
      dict(window=(9, -1)), dict(window=(4, 2), causal=False),
      dict(soft_cap=2.0), dict(slopes=True), dict(sinks=True),
      dict(holes=True), dict(page=7), dict(page=1), dict(d=20, dv=12),
      dict(hq=40), dict(softmax_scale=-0.3), dict(dtype="fp16"),
      dict(cache="int8", scale="token"), dict(cache="int8", scale="page"),
      dict(sinks=True, slopes=True, soft_cap=3.0, window=(7, -1), holes=True,
           cache="e5m2", scale="token", page=3))
  def test_features(self, **options):
    self.run_kernels(dataclasses.replace(
        Case(d=32, decode=False, lengths=_MIXED), **options), splits=2)

  @parameterized.parameters(True, False)
  def test_sinks_and_slopes_of_each_sequence(self, decode):
    lengths = Case().lengths if decode else _MIXED
    self.run_kernels(Case(d=32, decode=decode, lengths=lengths, sinks=True,
                          slopes=True), own=True)

  @parameterized.parameters(False, True)
  def test_packed_table(self, last_pages):
    self.run_kernels(Case(d=32, holes=True), csr=True, last_pages=last_pages)
    self.run_kernels(
        Case(d=32, decode=False, lengths=_MIXED, page=4), splits=2, csr=True,
        last_pages=last_pages)
    self.run_kernels(Case(d=32), splits=3, csr=True, programs=12,
                     one_axis=True, last_pages=last_pages)

  @parameterized.parameters(
      dict(), dict(cache="e4m3fn", holes=True), dict(page=48, window=(20, -1)),
      dict(layout="x", dv=16))
  def test_large_pages(self, **options):
    """A tile's keys lie in one page."""
    for decode, lengths in ((True, ((1, 100), (1, 0), (1, 37))),
                            (False, ((5, 70), (20, 33)))):
      case = Case(**{**dict(d=32, page=32, decode=decode, lengths=lengths),
                     **options})
      self.run_kernels(case, splits=2, large_pages=True)

  def test_flags_left_out(self):
    """A row that leaves a feature to others gives the same without it."""
    left = ("window", "soft_cap", "alibi", "shuffled", "odd_pages")
    self.run_kernels(Case(d=32, dv=16), flags=_ALL - sum(
        family.FLAGS[name] for name in left))


if __name__ == "__main__":
  absltest.main()
