# SPDX-License-Identifier: Apache-2.0
"""Every kernel of routing for AMD GPUs runs on a simulated one.

A choice comes to its kernel by its dtype and how many experts there are.
"""

import jax.numpy as jnp
import numpy as np
from absl.testing import absltest, parameterized
from harness import cases, simulator
from moe import numbers_test as moe_test
from moe import oracle

import jax
from jax._src.aiter.moe import op as moe_op


class MoeKernelsTest(parameterized.TestCase):

  @parameterized.parameters(*simulator.groups("moe_topk", "dtype", "dims"))
  def test_choice(self, dtype, dims, symbols):
    groups, size = dims[:2]
    x = moe_test.logits_of(5, groups * (size - 3), cases.DTYPES[dtype],
                           levels=4)
    x[1, 5:], x[2] = np.nan, -np.inf
    with simulator.launched(self, symbols):
      for by_sum in (False, True):
        cfg = moe_op.TopK(6, groups, -(-groups // 2), by_sum)
        got = jax.jit(lambda x, cfg=cfg: moe_op.choose(
            cfg, moe_op.Scores(x)))(jnp.asarray(x))
        np.testing.assert_array_equal(got, oracle.choose(x, *cfg))

  @parameterized.parameters(*simulator.groups(
      "moe_(count|scan|place)", "dtype"))
  def test_sort(self, _, symbols):
    # Of many parts: more than moe_scan adds up at once.
    ids = np.random.default_rng(0).integers(-1, 42, 65 * 256 + 7, np.int32)
    with simulator.launched(self, symbols):
      got = jax.jit(lambda ids: moe_op.sort(
          moe_op.Sort(40, 4), moe_op.Entries(ids)))(ids)
    for a, b in zip(got, oracle.sort(ids, 40, 4)):
      np.testing.assert_array_equal(a, b)


if __name__ == "__main__":
  absltest.main()
