# SPDX-License-Identifier: Apache-2.0
"""Runs the Python blocks of README.md and docs/*.md, each file in one process.

The blocks of a file share their names, as a reader who types them in order
would have them. They run on the CPU, as eight devices, so that the sharding
examples have a mesh.
"""

import os
import pathlib
import re
import subprocess
import sys
import tempfile

from absl.testing import absltest, parameterized

ROOT = pathlib.Path(__file__).absolute().parents[2]
FILES = [*sorted(ROOT.glob("*.md")), *sorted((ROOT / "docs").glob("*.md"))]
BLOCK = re.compile(r"^```python\n(.*?)^```$", re.MULTILINE | re.DOTALL)
# Bazel shows a test what it declares; links out of these lead elsewhere in the
# tree and are followed in a checkout only.
SHOWN = ("README.md", "CHANGELOG.md", "CONTRIBUTING.md", "LICENSE", "docs",
         "examples", "benchmarks")
LINK = re.compile(r"\]\((?!https?:)([^)#]*)#?([^)]*)\)")


def blocks(path: pathlib.Path) -> str:
  """Returns a file's Python blocks as one program with the file's lines."""
  text = path.read_text()
  lines = [""] * (text.count("\n") + 1)
  for match in BLOCK.finditer(text):
    first = text.count("\n", 0, match.start(1))
    for i, line in enumerate(match[1].splitlines()):
      lines[first + i] = line
  return "\n".join(lines)


def anchors(path: pathlib.Path) -> set[str]:
  """Returns what a link to a section of a document may name."""
  titles = re.findall(r"^#+ (.*)$", path.read_text(), re.MULTILINE)
  return {
    re.sub(r"[^\w -]", "", title.lower()).replace(" ", "-") for title in titles
  }


class ReadmeTest(parameterized.TestCase):
  def test_files_are_found(self):
    self.assertTrue(blocks(ROOT / "README.md").strip())

  @parameterized.parameters(f for f in FILES if blocks(f).strip())
  def test_blocks_run(self, path):
    with tempfile.TemporaryDirectory() as folder:
      # The name and line numbers of the document, for the traceback.
      program = pathlib.Path(folder) / f"{path.name}.py"
      program.write_text(blocks(path))
      environment = os.environ | {
        "JAX_PLATFORMS": "cpu",
        "XLA_FLAGS": "--xla_force_host_platform_device_count=8",
        "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
      }
      done = subprocess.run(
        [sys.executable, program],
        env=environment,
        cwd=folder,
        capture_output=True,
        text=True,
        check=False,
      )
    self.assertEqual(done.returncode, 0, f"{path.name}:\n{done.stderr}")

  def test_functions_are_listed(self):
    """Written anew the list is as it is."""
    done = subprocess.run(
      [sys.executable, ROOT / "docs/functions.py"],
      env=os.environ | {
        "JAX_PLATFORMS": "cpu",
        "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
      },
      capture_output=True,
      text=True,
      check=True,
    )
    self.assertMultiLineEqual(
      done.stdout, (ROOT / "docs/functions.md").read_text()
    )

  @parameterized.parameters(*FILES)
  def test_links_lead_somewhere(self, path):
    for target, anchor in LINK.findall(path.read_text()):
      to = path.parent / target if target else path
      top = os.path.relpath(to, ROOT).split(os.sep)[0]
      if "TEST_SRCDIR" in os.environ and top not in SHOWN:
        continue
      self.assertTrue(to.exists(), f"{path.name} links to {target}")
      if anchor:
        self.assertIn(anchor, anchors(to), f"{path.name} links to {target}")


if __name__ == "__main__":
  absltest.main()
