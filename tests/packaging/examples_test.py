# SPDX-License-Identifier: Apache-2.0
"""Runs the example and the benchmarks at a small size, as a user would."""

import csv
import dataclasses
import json
import os
import pathlib
import subprocess
import sys
from unittest import mock

import numpy as np
from absl.testing import absltest, parameterized

import jax

ROOT = pathlib.Path(__file__).absolute().parents[2]
# Those that families have, beside what these have in common.
BENCHMARKS = sorted(
  family.name
  for family in (ROOT / "jax/_src/aiter").iterdir()
  if (ROOT / f"benchmarks/{family.name}.py").exists()
) + ["experts", "options"]

# As in harness/machine.py: most of the time is that of compiling.
ALL = os.environ.get("AITER_TESTS") == "all"
_XLA_FLAGS = (
  ""
  if ALL
  else "--xla_backend_optimization_level=0"
  " --xla_llvm_disable_expensive_passes=true"
)


def run(script: str, *flags: str) -> subprocess.CompletedProcess:
  environment = os.environ | {
    "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
    "XLA_FLAGS": _XLA_FLAGS,
  }
  return subprocess.run(
    [sys.executable, ROOT / script, *flags],
    env=environment,
    capture_output=True,
    text=True,
    check=False,
  )


class ExamplesTest(parameterized.TestCase):
  def test_train_gpt(self):
    out = pathlib.Path(self.create_tempdir().full_path)
    done = run("examples/train_gpt.py", "--steps", "3", "--out", str(out))
    self.assertEqual(done.returncode, 0, done.stdout + done.stderr)
    self.assertIn("largest difference of the two losses", done.stdout)
    with open(out / "loss.csv") as f:
      rows = list(csv.DictReader(f))
    self.assertLen(rows, 3)
    for row in rows:
      self.assertAlmostEqual(float(row["aiter"]), float(row["jax"]), places=3)
    self.assertNotEmpty((out / "sample.txt").read_text())
    # The same over four devices, without the run that it is compared with.
    done = run(
      "examples/train_gpt.py",
      *("--steps", "3", "--out", str(out), "--run", "aiter"),
      *("--mesh", "data=2,context=2"),
    )
    self.assertEqual(done.returncode, 0, done.stdout + done.stderr)
    result = json.loads((out / "aiter.json").read_text())
    self.assertStartsWith(result["device"], "4 x ")
    for loss, row in zip(result["loss"], rows, strict=True):
      self.assertAlmostEqual(loss, float(row["jax"]), places=3)
    done = run(
      "examples/serve_gpt.py",
      *("--weights", str(out / "weights.npz"), "--requests", "5"),
      *("--sequences", "3", "--width", "24"),
    )
    self.assertEqual(done.returncode, 0, done.stdout + done.stderr)
    self.assertIn(" 2 programs\n", done.stdout)
    self.assertIn("differ between the two: 0 of 5", done.stdout)
    if "matplotlib is not installed" not in done.stdout:
      self.assertTrue((out / "loss.png").exists())

  def test_serve_gpt_with_latent_attention(self):
    done = run(
      "examples/serve_gpt.py",
      *("--mla", "--requests", "4", "--sequences", "2", "--width", "24"),
    )
    self.assertEqual(done.returncode, 0, done.stdout + done.stderr)
    self.assertIn(" 2 programs\n", done.stdout)
    self.assertIn("differ between the two: 0 of 4", done.stdout)

  def test_serve_gpt_of_as_many_tokens_as_sequences(self):
    """A step of packed prompts has the width of one token of each."""
    done = run(
      "examples/serve_gpt.py",
      *("--requests", "4", "--sequences", "16", "--width", "16"),
    )
    self.assertEqual(done.returncode, 0, done.stdout + done.stderr)
    self.assertIn("differ between the two: 0 of 4", done.stdout)

  def test_tiny_gpt(self):
    done = run("examples/tiny_gpt.py", "--steps", "2")
    self.assertEqual(done.returncode, 0, done.stdout + done.stderr)
    self.assertIn("apart at most, and the texts are the same", done.stdout)

  def test_train_moe(self):
    done = run("examples/train_moe.py", "--steps", "3")
    self.assertEqual(done.returncode, 0, done.stdout + done.stderr)
    self.assertIn("largest difference of the two losses", done.stdout)

  @parameterized.parameters((0, 4), (3, 0), (120, 9))
  def test_engine_refuses(self, prompt, new_tokens):
    """What would never end, or has no room; the engine goes on after it."""
    with mock.patch.object(sys, "path", [*sys.path, str(ROOT / "examples")]):
      import serve_gpt  # noqa: PLC0415
    cfg = dataclasses.replace(
      serve_gpt.Config(
        **dataclasses.asdict(serve_gpt.train_gpt.PRESETS["small"])
      ),
      layers=1,
    )
    params = serve_gpt.init(cfg, jax.random.key(0))
    with self.assertRaisesRegex(ValueError, r"\(2, 0, 8, 16, 8\)"):
      serve_gpt.Engine(params, cfg, 2, 0, 8)
    engine = serve_gpt.Engine(params, cfg, 2, 8, 8)
    with self.assertRaisesRegex(ValueError, "tokens from -1 to 3"):
      engine.run([serve_gpt.Request(np.array([3, -1]), 1)])
    of = lambda n, new: serve_gpt.Request(np.ones(n, np.int32), new)
    with self.assertRaisesRegex(
      ValueError, f"{prompt} tokens and {new_tokens} new ones"
    ):
      engine.run([of(3, 2), of(prompt, new_tokens)])
    requests = [of(3, 2), of(9, 1), of(1, 3)]
    engine.run(r for r in requests)
    self.assertEqual([len(r.text) for r in requests], [2, 1, 3])

  @parameterized.parameters(
    ("serve_gpt", "--requests", "0"),
    ("serve_gpt", "--seed", "-1"),
    ("serve_gpt", "--weights", "nowhere.npz"),
    ("serve_gpt", "--preset", "gpu", "--weights", __file__),
    ("train_gpt", "--steps", "0"),
    ("train_moe", "--steps", "-3"),
  )
  def test_refuses(self, example, *flags):
    done = run(f"examples/{example}.py", *flags)
    self.assertEqual(done.returncode, 2)
    self.assertIn(flags[0], done.stderr.split("error: ")[1])

  @parameterized.parameters("tensor=2", "context=256")
  def test_train_gpt_refuses_meshes(self, mesh):
    done = run("examples/train_gpt.py", "--mesh", mesh)
    self.assertEqual(done.returncode, 2)
    self.assertIn("--mesh", done.stderr)

  @parameterized.parameters(*BENCHMARKS[:: 1 if ALL else 4])
  def test_benchmark(self, op):
    out = pathlib.Path(self.create_tempdir().full_path)
    page = out / "table.md"
    page.write_text("What a page has.\n")
    done = run(
      f"benchmarks/{op}.py",
      "--smoke",
      "--out",
      str(out),
      "--markdown",
      str(page),
    )
    self.assertEqual(done.returncode, 0, done.stdout + done.stderr)
    with open(out / f"{op}.csv") as f:
      rows = list(csv.DictReader(f))
    self.assertNotEmpty(rows)
    if op == "attention":
      self.assertContainsSubset(
        {"smoke", "smoke_causal", "smoke_window", "smoke_varlen"},
        {row["shape"] for row in rows},
      )
      self.assertEqual(
        {"forward", "backward", "both"}, {row["pass"] for row in rows}
      )
    self.assertStartsWith(
      page.read_text(), f"What a page has.\n<!-- {op}: begin -->\n"
    )
    self.assertIn("| --- |", page.read_text())

  def test_attention_draws_problems_and_compares_with_the_named_peers(self):
    out = pathlib.Path(self.create_tempdir().full_path)
    table = out / "table.md"
    table.write_text("<!-- drawn: begin -->\n<!-- drawn: end -->\n")
    done = run(
      "benchmarks/attention.py",
      *("--smoke", "--random", "2", "--seed", "1", "--only", "random"),
      *("--peers", "xla", "--out", str(out), "--markdown", str(table)),
      *("--marker", "drawn"),
    )
    self.assertEqual(done.returncode, 0, done.stdout + done.stderr)
    for which in ("forward", "backward", "both"):
      self.assertIn(f"{which} against the best peer", done.stdout)
    with open(out / "attention.csv") as f:
      rows = list(csv.DictReader(f))
    self.assertEqual({"random0", "random1"}, {row["shape"] for row in rows})
    self.assertIn("| random0 | forward |", table.read_text())

  def test_llama_step(self):
    out = pathlib.Path(self.create_tempdir().full_path)
    done = run(
      "benchmarks/llama_step.py",
      *("--smoke", "--out", str(out), "--markdown", str(out / "table.md")),
    )
    self.assertEqual(done.returncode, 0, done.stdout + done.stderr)
    with open(out / "llama_step.csv") as f:
      rows = list(csv.DictReader(f))
    self.assertLen(rows, 6)
    self.assertIn("| none |", (out / "table.md").read_text())

  def test_shapes_are_listed_in_the_docs(self):
    table = run("benchmarks/shapes.py").stdout
    self.assertIn(table, (ROOT / "docs/performance.md").read_text())


if __name__ == "__main__":
  absltest.main()
