# SPDX-License-Identifier: Apache-2.0
"""Attention with AddressSanitizer and UBSan in our C++.

The installed `_aiter.so` and simulated GPU are built with them; the
interpreter, JAX and XLA are not. A report of theirs ends the process.
"""

import importlib.util
import os
import pathlib
import re
import subprocess
import sys


def preload() -> str:
  """The sanitizer that the simulator is linked to, and C++'s library.

  The sanitizer must come before all else, and finds C++'s exceptions only if
  their library is there when it starts.
  """
  (place,) = importlib.util.find_spec(
      "_rocm_sdk_core").submodule_search_locations
  library = pathlib.Path(place, "lib/libamdhip64.so.7")
  needed = subprocess.run(
      ["ldd", library], capture_output=True, text=True, check=True).stdout
  return " ".join(
      re.search(rf"=> (\S*/{name}\.so\S*)", needed)[1]
      for name in ("libasan", r"libstdc\+\+"))


if "LD_PRELOAD" not in os.environ:
  os.execve(sys.executable, [sys.executable, *sys.argv],
            os.environ | {"LD_PRELOAD": preload()})

# pylint: disable=g-import-not-at-top
import aiter_mha_test
from absl.testing import absltest, parameterized
from aiter_mha_test import FEATURES, Case

import jax
from jax.experimental import aiter


class AsanTest(aiter_mha_test.MhaTestCase):

  def test_sanitizer_is_there(self):
    maps = pathlib.Path("/proc/self/maps").read_text()
    self.assertIn("libasan", maps)
    self.assertIn("_aiter.so", maps)

  @parameterized.parameters("causal", "streaming", "bias", "dropout", "packed")
  def test_numbers(self, feature):
    options = FEATURES[feature]
    if feature == "packed":
      options = dict(packed=True, lengths=((40, 30), (0, 5), (1, 35)))
    self.check(Case(b=1, sq=40, sk=50, hq=2, hk=1, **options))

  def test_general_kernels(self):
    self.check(Case(b=1, sq=33, sk=40, hq=1, hk=1, dqk=24, dtype="fp16"))

  def test_errors(self):
    q = jax.numpy.zeros((1, 8, 2, 64))
    with self.assertRaisesRegex(ValueError, "k"):
      aiter.flash_attn_func(q, q[..., :32], q)


if __name__ == "__main__":
  absltest.main()
