# SPDX-License-Identifier: Apache-2.0
"""jax.experimental.aiter: its names, and what running it asks and says."""

import ast
import contextlib
import io
import pathlib
import subprocess
import sys
from unittest import mock

import jax.numpy as jnp
from absl.testing import absltest
from harness import machine  # noqa: F401  sets XLA's flags

from jax._src.aiter import check
from jax._src.aiter.core import dispatch
from jax._src.aiter.core.check import Check
from jax.experimental import aiter


class NamesTest(absltest.TestCase):
  """Names are imported when they are asked for."""

  def test_all_are_there(self):
    for name in aiter.__all__:
      self.assertIn(name, dir(aiter))
      self.assertEqual(callable(getattr(aiter, name)), name.islower(), name)
    with self.assertRaisesRegex(AttributeError, "'no_such_function'"):
      _ = aiter.no_such_function

  def test_type_checkers_see_the_same(self):
    stub = pathlib.Path(aiter.__file__).with_suffix(".pyi").read_text()
    (listed,) = (ast.literal_eval(node.value) for node in ast.parse(stub).body
                 if isinstance(node, ast.Assign))
    self.assertEqual(listed, aiter.__all__)

  def test_families_that_are_not_used_are_not_imported(self):
    code = ("import sys; from jax.experimental import aiter; aiter.rms_norm;"
            "print([m for m in ('norm', 'attention', 'moe')"
            " if f'jax._src.aiter.{m}.api' in sys.modules])")
    result = subprocess.run(
        [sys.executable, "-c", code], check=True, text=True,
        capture_output=True, env={"PYTHONPATH": ":".join(sys.path)})
    self.assertEqual(result.stdout.strip(), "['norm']")


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
