# SPDX-License-Identifier: Apache-2.0
"""Tests with AddressSanitizer and UBSan in our C++.

The cases are those of the module that the environment names (MODULE): numbers,
every kernel, or every call of HIP failing in turn. The installed `_aiter.so`
and simulated GPU are built with the sanitizers; the interpreter, JAX and XLA
are not. A report of theirs ends the process.
"""

import importlib
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
            os.environ | {"LD_PRELOAD": preload(),
                          "AMDGPU_SIM_CHECKS": "+all"})

# pylint: disable=g-import-not-at-top
from absl.testing import absltest


class SanitizerTest(absltest.TestCase):

  def test_sanitizer_is_there(self):
    maps = pathlib.Path("/proc/self/maps").read_text()
    self.assertIn("libasan", maps)
    self.assertIn("_aiter.so", maps)


_cases = vars(importlib.import_module(os.environ["MODULE"]))
globals().update({
    name: value for name, value in _cases.items()
    if isinstance(value, type) and name.endswith("Test")})


if __name__ == "__main__":
  absltest.main()
