# SPDX-License-Identifier: Apache-2.0
"""benchmarks/predict.py, which needs no AITER for our own kernels."""

import csv
import os
import pathlib
import subprocess
import sys

from absl.testing import absltest

ROOT = pathlib.Path(__file__).absolute().parents[2]


class PredictTest(absltest.TestCase):

  def test_one_problem(self):
    out = pathlib.Path(self.create_tempdir().full_path)
    table = out / "table.md"
    table.write_text("<!-- amd MI300X: begin -->\n<!-- amd MI300X: end -->\n")
    done = subprocess.run(
        [sys.executable, ROOT / "benchmarks/predict.py", "--only",
         "product 16 x 4096", "--out", out, "--markdown", table],
        env=os.environ | {
            "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
        capture_output=True, text=True, check=False)
    self.assertEqual(done.returncode, 0, done.stdout + done.stderr)
    with open(out / "predict.csv") as stream:
      (row,) = csv.DictReader(stream)
    self.assertEqual(row["problem"], "bf16 product 16 x 4096 x 4096")
    self.assertEqual(row["device"], "MI300X")
    # No faster than memory, no slower than five times that and two launches.
    memory = 2 * 4096 * 4096 / 5.3e6
    self.assertBetween(float(row["us"]), memory, 5 * memory + 10)
    self.assertEqual(row["aiter_us"], "")
    self.assertIn("| bf16 product 16 x 4096 x 4096 |", table.read_text())


if __name__ == "__main__":
  absltest.main()
