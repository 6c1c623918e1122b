# SPDX-License-Identifier: Apache-2.0
"""Every operator exports: for each platform, and with sizes left open.

What a platform's kernel is for must be in a program exported for it, whatever
the exporting process may run itself, and only there. A program of unknown
sizes must do at any size what the function does.
"""

import importlib.util
from unittest import mock

import jax.numpy as jnp
from absl.testing import absltest, parameterized
from harness import machine, transforms
from harness.operators import CASES, SIZES, Case, arrays_of, program, types_of

import jax
from jax._src.aiter.core import dispatch
from jax._src.aiter.fused_qk import norms
from jax._src.aiter.moe import api as moe
from jax.experimental import aiter

PREFIXES = {"rocm": "hip", "cuda": "cu"}
PLATFORMS = (*PREFIXES, "cpu")
NAMED = tuple((case.name, case) for case in CASES)


def export(case: Case, types, *platforms):
  return jax.export.export(
      program(case), platforms=platforms,
      disabled_checks=aiter.EXPORT_CHECKS)(*types)


class ExportTest(parameterized.TestCase):

  def assert_calls(self, case, exported, platforms):
    """The program calls a case's targets on these platforms, and no others."""
    text = exported.mlir_module()
    for platform, prefix in PREFIXES.items():
      for target in case.targets:
        self.assertEqual(f"@{prefix}_aiter_{target}" in text,
                         platform in platforms, (platform, target))
      if platform not in platforms or not case.targets:
        self.assertNotIn(f"@{prefix}_aiter_", text)

  @parameterized.named_parameters(*machine.daily(NAMED, 4))
  def test_open_sizes(self, case):
    """One program for all platforms and sizes does what the function does."""
    exported = export(case, types_of(case), *PLATFORMS)
    self.assert_calls(case, exported, PLATFORMS)
    if importlib.util.find_spec("flatbuffers"):  # an option of JAX's
      exported = jax.export.deserialize(exported.serialize())
    # As one program: where both are the same it is compiled once.
    both = jax.jit(lambda *arrays: (
        exported.call(*arrays), program(case)(*arrays)))
    for sizes in SIZES:
      got, want = both(*arrays_of(case, sizes))
      self.assertEqual(jax.tree.structure(got), jax.tree.structure(want))
      for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want)):
        if jnp.issubdtype(a.dtype, jnp.integer):
          transforms.assert_same(self, a, b)
        else:
          # Sums are taken in another order at most.
          transforms.assert_close(self, a, b, tolerance=1e-2)

  @parameterized.named_parameters(*NAMED)
  def test_platforms(self, case):
    """Each platform's program has that platform's kernels, if it has any."""
    for platform in PLATFORMS:
      exported = export(case, arrays_of(case, SIZES[0]), platform)
      self.assert_calls(case, exported, (platform,))

  @parameterized.parameters(("",), ("cpu",), ("rocm",), ("cuda,cpu",))
  def test_settings_do_not_matter(self, settings):
    """What JAX_PLATFORMS says is for this process, not for who is exported to.
    """
    enabled = tuple(p for p in PREFIXES if not settings or p in settings)
    jax.clear_caches()
    self.addCleanup(jax.clear_caches)
    case = dict(NAMED)["rms_norm"]
    program.cache_clear()
    with mock.patch.object(dispatch, "platforms_enabled", lambda: enabled):
      exported = export(case, arrays_of(case, SIZES[0]), *PLATFORMS)
    self.assert_calls(case, exported, PLATFORMS)

  @parameterized.parameters(norms.NormedQk, moe.Permuted, moe.Places)
  def test_named_tuples(self, kind):
    """JAX knows how to serialise results that have fields."""
    with self.assertRaisesRegex(ValueError, "Duplicate serialization"):
      jax.export.register_namedtuple_serialization(
          kind, serialized_name="another")

  def test_checks(self):
    """Without the constant nothing is serialised; it has every target."""
    case = dict(NAMED)["rms_norm"]
    with self.assertRaisesRegex(ValueError, "hip_aiter_norm_fwd"):
      jax.export.export(program(case), platforms=["rocm"])(
          *arrays_of(case, SIZES[0]))
    named = {check.is_custom_call() for check in aiter.EXPORT_CHECKS}
    targets = {target for case in CASES for target in case.targets}
    # Staged only where a GPU is seen that has its kernels.
    targets |= {"mha_one_pass", "mha_dscores"}
    self.assertEqual(named, {
        f"{prefix}_aiter_{target}" for prefix in PREFIXES.values()
        for target in targets})

  def test_every_function_has_a_case(self):
    """What is public, and no type or constant, is exported above."""
    names = [name for name in aiter.__all__ if name.islower()]
    without = {"float8_dtype", "get_kv_cache_shape",
               "get_kv_cache_shape_hd64", "get_mla_kv_cache_shape",
               # Inside a shard_map, and what puts arrays into its order.
               "context_parallel_attention", "context_parallel_merge",
               "context_parallel_paged_decode", "context_parallel_positions",
               "expert_parallel_moe", "reorder_causal_load_balancing",
               "inverse_reorder_causal_load_balancing"}
    for name in names:
      self.assertTrue(
          name in without or any(c.name.startswith(name) for c in CASES), name)


if __name__ == "__main__":
  absltest.main()
