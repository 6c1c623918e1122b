# SPDX-License-Identifier: Apache-2.0
"""Latent attention's kernels in Triton's interpreter, without a GPU."""

import dataclasses

import numpy as np
from absl.testing import absltest, parameterized
from harness.cases import DTYPES, check_error
from harness.triton_interpreter import Tensor, gpu_arithmetic
from mla import cases
from mla.cases import Case

# isort: split
from third_party.aiter.kernels.mla import attend
from third_party.aiter.kernels.paged import merge
from third_party.aiter.kernels.paged.family import FLAGS, KINDS

_ALL = sum(FLAGS.values())
_TILE_M, _TILE_N = 16, 16
_SMALL = Case(lora=32, rope=16, lengths=cases.MIXED, heads=3)


class MlaKernelTest(parameterized.TestCase):

  def run_kernels(self, case: Case, splits=1, kind=None, flags=_ALL,
                  partial=True, merge_cols=1, last_pages=True):
    """Runs them and compares with the oracle."""
    p = cases.Problem(case)
    tokens, heads, cols = p.q.shape
    lora = case.lora
    if kind is None:
      kind = KINDS.index(case.cache) if case.cache else -2
    cache = Tensor(p.cache.view(np.uint8) if case.cache else p.cache)
    new = lambda *shape, dtype=np.float32: Tensor(np.full(shape, 77, dtype))
    out, lse = new(tokens, heads, lora, dtype=p.q.dtype), new(heads, tokens)
    parts = new(splits, tokens, heads, lora)
    parts_lse = new(splits, tokens, heads)
    kv_scale = np.float32(p.kv_scale or 1)
    sinks = np.zeros(heads, np.float32) if p.sink is None else p.sink
    on = dict(cu_seqlens=True, indptr=True, last_pages=last_pages,
              window=case.causal, lse=True, soft_cap=case.logit_cap > 0,
              sink=case.sink, odd_pages=case.page & (case.page - 1) != 0)
    bits = sum(FLAGS[n] for n, holds in on.items() if holds)
    lengths = p.last if last_pages else np.array(
        [k for _, k in case.lengths], np.int32)
    b, stride = len(case.lengths), p.cache.shape[-1]
    head = 1 << (lora - 1).bit_length()
    with gpu_arithmetic(), np.errstate(all="ignore"):
      attend.mla_attend[(tokens * heads // _TILE_M + b + 1, splits)](
          Tensor(p.q), cache, cache, out, lse, parts, parts_lse,
          Tensor(np.reshape(kv_scale * np.float32(p.q_scale or 1), 1)),
          Tensor(np.reshape(kv_scale, 1)), Tensor(sinks), Tensor(p.indices),
          Tensor(p.indptr), Tensor(lengths), Tensor(p.cu), Tensor(p.cu), 0,
          case.page * stride, stride, tokens, b,
          0, heads, cols, lora, p.cache.shape[0], case.page,
          case.page.bit_length() - 1, len(p.indices), splits, 1, 2**30,
          0 if case.causal else 2**30, case.sm_scale, float(case.logit_cap),
          KINDS.index(case.cache) if case.cache else 0, bits, TILE_M=_TILE_M,
          TILE_N=_TILE_N, HEAD=head, ROPE=16, FLAGS=flags, KIND=kind, NATIVE=-1,
          CHEAP_CAST=False, PARTIAL=partial)
      if splits > 1:
        merge.paged_merge[(tokens * heads * merge_cols,)](
            parts, parts_lse, out, lse, tokens, heads, lora, splits, merge_cols,
            bits, TILE_N=4, HEAD=head, MERGE_COLS=16, OVERLAPS=False)
    exact, exact_lse = p.exact()
    plain, _ = p.exact(DTYPES[case.dtype])
    check_error(self, out.array, exact, plain, case.dtype, str(case))
    empty = exact_lse == -np.inf
    np.testing.assert_array_equal(lse.array == -np.inf, empty)
    np.testing.assert_allclose(
        np.where(empty, 0, lse.array), np.where(empty, 0, exact_lse),
        rtol=1e-4, atol=1e-4 * (1 + 9 * (case.cache == "int8")))

  @parameterized.product(splits=[1, 3], partial=[True, False],
                         last_pages=[True, False])
  def test_plain(self, splits, partial, last_pages):
    self.run_kernels(_SMALL, splits, partial=partial, last_pages=last_pages)

  def test_rows_shared(self):
    """Programs that have a row's parts together, some columns each."""
    self.run_kernels(_SMALL, 3, merge_cols=16)

  @parameterized.parameters(*KINDS)
  def test_bytes(self, cache):
    case = dataclasses.replace(_SMALL, cache=cache, scales=True)
    self.run_kernels(case)
    self.run_kernels(case, kind=-1)

  @parameterized.parameters(
      dict(causal=False), dict(logit_cap=2.0), dict(sink=True),
      dict(holes=True, page=4), dict(page=7), dict(page=1), dict(width=64),
      dict(lora=20, rope=12), dict(heads=40), dict(dtype="fp16"),
      dict(rope=0, lora=24),
      dict(sink=True, logit_cap=3.0, holes=True, cache="e5m2", scales=True,
           page=3))
  def test_features(self, **options):
    self.run_kernels(dataclasses.replace(_SMALL, **options), splits=2)

  def test_flags_left_out(self):
    """A row that leaves a feature to others gives the same without it."""
    left = ("soft_cap", "sink", "odd_pages")
    self.run_kernels(_SMALL, flags=_ALL - sum(FLAGS[n] for n in left))


if __name__ == "__main__":
  absltest.main()
