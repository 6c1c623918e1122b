# SPDX-License-Identifier: Apache-2.0
"""A kernel and a wheel that are built twice are equal byte for byte."""

import os
import pathlib
import subprocess

from absl.testing import absltest, parameterized

ROOT = pathlib.Path(__file__).absolute().parents[2]
KERNEL = os.environ["KERNEL"]


class ReproducibleTest(parameterized.TestCase):
  @parameterized.parameters(".co", ".json")
  def test_kernel(self, suffix):
    once = ROOT / f"tests/kernel_once/{KERNEL}{suffix}"
    again = ROOT / f"tests/kernel_again/{KERNEL}{suffix}"
    self.assertEqual(once.read_bytes(), again.read_bytes())

  def test_kernel_of_another_environment(self):
    arch = KERNEL.rpartition("_")[2]
    out = pathlib.Path(self.create_tempdir().full_path)
    subprocess.run(
      [
        ROOT / "third_party/aiter/aot/compile",
        f"--csv={ROOT / 'third_party/aiter/configs/mha.csv'}",
        f"--arch={arch}",
        f"--select=^{KERNEL}$",
        f"--out-dir={out / 'objects'}",
      ],
      check=True,
      cwd=out,
      env={
        "HOME": str(out),
        "LANG": "C",
        "PATH": os.environ["PATH"],
        "PYTHONHASHSEED": "1",
        "PYTHONPATH": str(ROOT),
        "TMPDIR": str(out),
        "USER": "somebody",
      },
    )
    self.assertEqual(
      (out / f"objects/{KERNEL}.co").read_bytes(),
      (ROOT / f"tests/kernel_once/{KERNEL}.co").read_bytes(),
    )

  def test_wheel(self):
    (once,) = ROOT.glob("build/jax_aiter/*.whl")
    (again,) = ROOT.glob("tests/jax_aiter_again/*.whl")
    self.assertEqual(once.name, again.name)
    self.assertEqual(once.read_bytes(), again.read_bytes())


if __name__ == "__main__":
  absltest.main()
