# SPDX-License-Identifier: Apache-2.0
"""Routing's kernels without a GPU, in Triton's interpreter."""

import ml_dtypes
import numpy as np
from absl.testing import absltest, parameterized
from harness.triton_interpreter import Tensor, gpu_arithmetic
from moe import oracle

# isort: split
from third_party.aiter.kernels.moe import family, sort, topk


def _new(*shape):
  """What no kernel writes is seen."""
  return Tensor(np.full(shape, 1 << 30, np.int32))


class TopKTest(parameterized.TestCase):

  @parameterized.product(
      problem=((1, 7, 1, 3, 1, 8), (1, 16, 1, 16, 1, 16), (4, 3, 2, 5, 4, 4),
               (3, 8, 1, 8, 4, 8), (2, 1, 1, 1, 2, 2)),
      by_sum=(False, True), dtype=(np.float32, ml_dtypes.bfloat16))
  def test_choice(self, problem, by_sum, dtype):
    groups, size, topk_groups, k, wide_groups, wide_size = problem
    rng = np.random.default_rng(0)
    x = (rng.integers(-3, 4, (7, groups * size)) / 2).astype(dtype)
    x[1], x[2, ::2], x[3, 1:] = -np.inf, np.nan, -0.0
    ids = _new(7, k)
    with gpu_arithmetic(), np.errstate(all="ignore"):
      topk.moe_topk[(2,)](
          Tensor(x), ids, 7, groups, size, topk_groups, k,
          family.FEATURES["by_sum"] if by_sum else 0, TILE_M=4,
          GROUPS=wide_groups, SIZE=wide_size)
    want = oracle.choose(x, k, groups, topk_groups, by_sum)
    np.testing.assert_array_equal(ids.array, want)


class SortTest(parameterized.TestCase):

  @parameterized.parameters(
      (1, 1, 1), (40, 5, 1), (40, 5, 4), (37, 3, 8), (64, 17, 1))
  def test_sort(self, entries, experts, block):
    ids = np.random.default_rng(entries).integers(
        -1, experts + 1, entries).astype(np.int32)
    parts = -(-entries // 8)
    counts, place, partial = _new(experts), _new(entries), _new(parts, experts)
    order = Tensor(np.full(entries + experts * (block - 1), 9, np.int32))
    given = Tensor(ids)
    with gpu_arithmetic():
      sort.moe_count[(parts,)](
          given, partial, order, entries, experts, block, TILE_M=8, TILE_N=4)
      sort.moe_scan[(-(-experts // 4),)](
          partial, counts, parts, experts, TILE_M=2, TILE_N=4)
      sort.moe_place[(parts,)](
          given, partial, counts, place, order, entries, experts, block,
          TILE_M=8, TILE_N=4)
    for a, b in zip((counts, place, order), oracle.sort(ids, experts, block)):
      np.testing.assert_array_equal(a.array, b)


if __name__ == "__main__":
  absltest.main()
