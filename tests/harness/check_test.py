# SPDX-License-Identifier: Apache-2.0
"""python -m jax.experimental.aiter: what it asks the kernels, and says."""

import contextlib
import io
from unittest import mock

import jax.numpy as jnp
from absl.testing import absltest
from harness import machine  # noqa: F401  sets XLA's flags

from jax._src.aiter import check
from jax._src.aiter.core import dispatch
from jax._src.aiter.core.check import Check


class CheckTest(absltest.TestCase):

  def test_kernels_are_those_of_the_calls(self):
    """What each line would launch is asked for as the call itself asks."""
    asked = set()

    def kernels(op, arch, dtype, dims, features):
      self.assertEqual(arch, "gfx942")
      asked.add((op, dtype))
      if dims == (256, 256):
        raise ValueError("no row")
      return [f"{op}_{'_'.join((dtype, *features))}"]

    module = mock.Mock(kernels=kernels)
    module.architectures.return_value = ["gfx942"]
    checks = [c for family in check.families() for c in family.checks()]
    out = io.StringIO()
    with (mock.patch.object(check.gpu_aiter, "load", lambda platform: module),
          mock.patch.object(dispatch, "architectures", lambda platform: ()),
          contextlib.redirect_stdout(out)):
      check._describe_kernels(checks, "rocm", "gfx942")
    lines = out.getvalue().splitlines()
    for one in checks:
      self.assertTrue(any(line.startswith(f"    {one.name} ")
                          for line in lines), one.name)
    self.assertContainsSubset(
        {("mha_fwd", "bf16"), ("mha_bwd", "bf16"), ("norm_fwd", "bf16"),
         ("norm_bwd", "bf16"), ("gemm", "bf16"), ("gemm", "e2m1"),
         ("quant", "bf16"), ("rope_rotate", "bf16"),
         ("activation_fwd", "bf16"), ("cache_copy", "bf16"),
         ("cache_cast", "bf16"), ("cache_token", "bf16"),
         ("cache_block", "bf16"), ("paged_attend", "bf16"),
         ("mla_attend", "bf16"), ("fused_qk_latent", "bf16"),
         ("fused_qk_heads", "bf16"), ("fused_qk_rows", "bf16"),
         ("indexer_logits", "e4m3fn")}, asked)
    self.assertIn("the reference (no row)", out.getvalue())

  def test_wrong_numbers_are_said(self):
    x = jnp.ones((4, 4), jnp.bfloat16)
    with contextlib.redirect_stdout(io.StringIO()) as out:
      good = check._right(Check("good", lambda x: x, lambda x: x, [x]))
      bad = check._right(Check("bad", lambda x: x * 1.1, lambda x: x, [x]))
    self.assertEqual((good, bad), (True, False))
    self.assertIn("WRONG", out.getvalue().splitlines()[1])


if __name__ == "__main__":
  absltest.main()
