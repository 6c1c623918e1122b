# SPDX-License-Identifier: Apache-2.0
"""The operators with the oldest JAX that our wheels say they work with.

One function of each kind, forward and backward, and exported with open sizes.
"""

import pathlib
import re

import jax.numpy as jnp
import jaxlib.version
import numpy as np
from absl.testing import absltest, parameterized
from harness import operators, transforms

import jax
from jax.experimental import aiter

ROOT = pathlib.Path(__file__).absolute().parents[2]
VERSION = re.search(
    r'MIN_JAX_VERSION = "(.*)"', (ROOT / "version.bzl").read_text())[1]
# The first of those that call the same kernels.
CASES = {case.targets: case for case in reversed(operators.CASES)}.values()

# Functions whose results say so of a key that a query does not see, or of an
# entry that a row does not have.
_HIDE = ("fp8_mqa_logits", "topk_plain_of_rows")


class OldestTest(parameterized.TestCase):

  def test_version(self):
    self.assertEqual(jax.__version__, VERSION)
    self.assertEqual(jaxlib.version.__version__, VERSION)

  @parameterized.named_parameters((case.name, case) for case in CASES)
  def test_function(self, case):
    run = operators.program(case)
    exported = jax.export.export(
        run, platforms=["cpu", "rocm", "cuda"],
        disabled_checks=aiter.EXPORT_CHECKS)(*operators.types_of(case))
    for target in case.targets:
      self.assertIn(f"@hip_aiter_{target}", exported.mlir_module())
    args = operators.arrays_of(case, operators.SIZES[0])
    for leaf in jax.tree.leaves(jax.device_get(run(*args))):
      if jnp.issubdtype(leaf.dtype, jnp.floating):
        leaf = np.asarray(leaf, np.float32)
        hidden = (case.name in _HIDE) & (leaf == -np.inf)
        self.assertTrue((np.isfinite(leaf) | hidden).all())
    transforms.assert_close(self, exported.call(*args), run(*args), 1e-2)


if __name__ == "__main__":
  absltest.main()
