# SPDX-License-Identifier: Apache-2.0
"""What is in the wheels, and what `_aiter.so` in them asks of a machine."""

import base64
import email.parser
import hashlib
import io
import pathlib
import re
import subprocess
import sys
import zipfile

from absl.testing import absltest, parameterized
from elftools.elf import elffile

ROOT = pathlib.Path(__file__).absolute().parents[2]
WHEELS = sorted(ROOT.glob("build/*/*.whl"))
ADD_ONS = [w for w in WHEELS if re.match(r"jax_aiter_(rocm7|cuda13)-", w.name)]
PLUGINS = [w for w in WHEELS if w.name.startswith("jax_rocm7_plugin-")]
VERSIONS = dict(
  re.findall(r'^(\w+) = "(.*)"$', (ROOT / "version.bzl").read_text(), re.M)
)
MAX_MEGABYTES = 30
# What only the machine that builds has.
MACHINE = re.compile(rb"/(?:root|home|tmp|work)/[\w.]|execroot|linux-sandbox")


def name_of(wheel: pathlib.Path) -> str:
  return wheel.name.split("-")[0]


def named(wheels):
  """Test parameters with names that no path is in."""
  return [("_".join(w.name.split("-")[:3:2]), w) for w in wheels]


def metadata(wheel: zipfile.ZipFile):
  (path,) = (n for n in wheel.namelist() if n.endswith(".dist-info/METADATA"))
  return email.parser.Parser().parsestr(wheel.read(path).decode())


def module(path: pathlib.Path) -> bytes:
  with zipfile.ZipFile(path) as wheel:
    (name,) = (n for n in wheel.namelist() if n.endswith("/_aiter.so"))
    return wheel.read(name)


class WheelTest(parameterized.TestCase):
  def test_wheels_are_found(self):
    self.assertLen(ADD_ONS, 2)
    self.assertLen(PLUGINS, 3)
    self.assertLen(WHEELS, 6)

  @parameterized.named_parameters(named(WHEELS))
  def test_record(self, path):
    with zipfile.ZipFile(path) as wheel:
      self.assertIsNone(wheel.testzip())
      names = wheel.namelist()
      self.assertLen(set(names), len(names))
      record = names[-1]
      self.assertEndsWith(record, ".dist-info/RECORD")
      listed = set()
      for line in wheel.read(record).decode().splitlines():
        name, digest, size = line.rsplit(",", 2)
        listed.add(name)
        if name == record:
          continue
        content = wheel.read(name)
        expected = base64.urlsafe_b64encode(hashlib.sha256(content).digest())
        self.assertEqual(digest, "sha256=" + expected.rstrip(b"=").decode())
        self.assertLen(content, int(size))
      self.assertEqual(listed, set(names))

  @parameterized.named_parameters(named(WHEELS))
  def test_metadata(self, path):
    _, version, *tag = path.name.removesuffix(".whl").split("-")
    with zipfile.ZipFile(path) as wheel:
      described = metadata(wheel)
      self.assertEqual(described["Name"].replace("-", "_"), name_of(path))
      self.assertEqual(described["Version"], version)
      self.assertEqual(described["Requires-Python"], ">=3.12")
      self.assertEndsWith(version, VERSIONS["VERSION"])
      (name,) = (n for n in wheel.namelist() if n.endswith("dist-info/WHEEL"))
      self.assertIn("Tag: " + "-".join(tag), wheel.read(name).decode())
      licenses = [
        wheel.read(n) for n in wheel.namelist() if ".dist-info/licenses/" in n
      ]
      self.assertIn((ROOT / "LICENSE").read_bytes(), licenses)

  @parameterized.named_parameters(named(WHEELS))
  def test_size(self, path):
    self.assertLess(path.stat().st_size, MAX_MEGABYTES * 1e6)

  @parameterized.named_parameters(named(WHEELS))
  def test_no_path_of_the_building_machine(self, path):
    with zipfile.ZipFile(path) as wheel:
      for name in wheel.namelist():
        # The published plugin's own libraries are as they are.
        if path in PLUGINS and not (
          name.endswith("/_aiter.so") or ".dist-info/" in name
        ):
          continue
        self.assertNotRegex(wheel.read(name), MACHINE, name)

  def test_python_wheel_has_every_module(self):
    (path,) = (w for w in WHEELS if name_of(w) == "jax_aiter")
    sources = {"jaxlib/gpu_aiter.py"}
    for package in ("jax/_src/aiter", "jax/experimental/aiter", "jax_aiter"):
      sources |= {
        str(source.relative_to(ROOT))
        for source in (ROOT / package).rglob("*.py*")
        if source.suffix in (".py", ".pyi")
      }
    with zipfile.ZipFile(path) as wheel:
      installed = {n for n in wheel.namelist() if ".dist-info/" not in n}
      self.assertEqual(installed, sources)
      for name in sources:
        self.assertEqual(wheel.read(name), (ROOT / name).read_bytes())
      extras = metadata(wheel).get_all("Provides-Extra")
    self.assertCountEqual(extras, ["rocm7", "cuda13"])

  @parameterized.named_parameters(named(ADD_ONS))
  def test_add_on_is_one_module(self, path):
    plugin = name_of(path).removeprefix("jax_aiter_")
    with zipfile.ZipFile(path) as wheel:
      installed = [n for n in wheel.namelist() if ".dist-info/" not in n]
      requires = metadata(wheel).get_all("Requires-Dist")
    self.assertEqual(installed, [f"jax_{plugin}_plugin/_aiter.so"])
    self.assertIn("jax-aiter==" + VERSIONS["VERSION"], requires)
    self.assertTrue(any(f"jax-{plugin}-plugin" in r for r in requires))
    self.assertIn("-cp312-abi3-", path.name)

  @parameterized.named_parameters(named(PLUGINS))
  def test_plugin_keeps_the_published_files(self, path):
    python_tag = path.name.split("-")[2]
    # The published wheels lie in the external repository's folder.
    (base,) = ROOT.parent.glob(
      f"*pypi_rocm/wheels/jax_rocm7_plugin-*-{python_tag}-*.whl"
    )
    with zipfile.ZipFile(path) as ours, zipfile.ZipFile(base) as published:
      theirs = {n for n in published.namelist() if ".dist-info/" not in n}
      added = {n for n in ours.namelist() if ".dist-info/" not in n} - theirs
      self.assertEqual(added, {"jax_rocm7_plugin/_aiter.so"})
      for name in theirs:
        self.assertEqual(ours.read(name), published.read(name))
      before, after = metadata(published), metadata(ours)
    self.assertEqual(
      after["Version"],
      f"{before['Version']}+aiter{VERSIONS['VERSION']}",
    )
    self.assertEqual(
      after.get_all("Requires-Dist"),
      [
        *before.get_all("Requires-Dist"),
        "jax-aiter==" + VERSIONS["VERSION"],
      ],
    )
    self.assertEqual(before.get_payload(), after.get_payload())

  @parameterized.named_parameters(named(ADD_ONS + PLUGINS))
  def test_module_exports_its_entry_alone(self, path):
    elf = elffile.ELFFile(io.BytesIO(module(path)))
    symbols = elf.get_section_by_name(".dynsym").iter_symbols()
    defined = [
      s.name
      for s in symbols
      if s["st_shndx"] not in ("SHN_UNDEF", "SHN_ABS")
      and s["st_info"]["bind"] in ("STB_GLOBAL", "STB_WEAK")
    ]
    self.assertEqual(defined, ["PyInit__aiter"])

  @parameterized.parameters("rocm", "cuda")
  def test_module_has_these_kernels(self, platform):
    """The code objects of this build, not those of an earlier one."""
    blob = ROOT / "third_party/aiter" / platform / "aiter/kernels.bin"
    (wheel,) = (w for w in WHEELS if w.name.startswith("jax_aiter_" + platform))
    self.assertTrue(blob.read_bytes() in module(wheel))

  @parameterized.named_parameters(named(ADD_ONS + PLUGINS))
  def test_module_needs_no_driver(self, path):
    elf = elffile.ELFFile(io.BytesIO(module(path)))
    tags = list(elf.get_section_by_name(".dynamic").iter_tags())
    needed = {t.needed for t in tags if t.entry.d_tag == "DT_NEEDED"}
    self.assertContainsSubset(
      needed,
      {
        "ld-linux-x86-64.so.2",
        "libc.so.6",
        "libdl.so.2",
        "libgcc_s.so.1",
        "libm.so.6",
        "libpthread.so.0",
        "libstdc++.so.6",
      },
    )
    self.assertNotIn("DT_RPATH", [t.entry.d_tag for t in tags])
    self.assertNotIn("DT_RUNPATH", [t.entry.d_tag for t in tags])

  @parameterized.named_parameters(named(ADD_ONS))
  def test_platform_tag_is_true(self, path):
    shown = subprocess.run(
      [sys.executable, "-m", "auditwheel", "show", path],
      capture_output=True,
      text=True,
      check=False,
    )
    self.assertEqual(shown.returncode, 0, shown.stderr)
    self.assertIn(
      f'"{VERSIONS["PLATFORM_TAG"]}"', " ".join(shown.stdout.split())
    )


if __name__ == "__main__":
  absltest.main()
