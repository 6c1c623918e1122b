# SPDX-License-Identifier: Apache-2.0
"""Writes a wheel whose bytes depend on its content alone.

With --base, the wheel is a published one with files added and its version and
requirements changed; everything else of it is kept.
"""

import argparse
import base64
import hashlib
import pathlib
import re
import zipfile

# The first moment that a zip file can name.
_TIME = (1980, 1, 1, 0, 0, 0)


def _requirement_lines(metadata: str, added: list[str]) -> str:
  """Puts Requires-Dist lines after the last header of METADATA."""
  headers, blank, body = metadata.partition("\n\n")
  lines = [headers.rstrip("\n")]
  lines += [f"Requires-Dist: {requirement}" for requirement in added]
  return "\n".join(lines) + (blank or "\n\n") + body


class Wheel:
  """The files of a wheel, by path."""

  def __init__(self, name: str, version: str, tag: str):
    self.files: dict[str, bytes] = {}
    self.executable: set[str] = set()
    self._name = name
    self._version = version
    self._tag = tag
    self._dist_info = f"{name}-{version}.dist-info"

  def add(self, path: str, content: bytes, executable: bool = False) -> None:
    if path in self.files:
      raise ValueError(f"{self._name}: two files for {path}")
    self.files[path] = content
    if executable:
      self.executable.add(path)

  def describe(
    self,
    requires: list[str],
    extras: list[str],
    summary: str,
    requires_python: str,
    description: str,
  ) -> None:
    """Writes the metadata of a wheel of ours."""
    lines = [
      "Metadata-Version: 2.4",
      f"Name: {self._name}",
      f"Version: {self._version}",
      f"Summary: {summary}",
      "License-Expression: Apache-2.0",
      "License-File: LICENSE",
      f"Requires-Python: {requires_python}",
      "Description-Content-Type: text/markdown",
    ]
    lines += [f"Requires-Dist: {requirement}" for requirement in requires]
    for extra in extras:
      name, requirement = extra.split("=", 1)
      lines += [
        f"Provides-Extra: {name}",
        f'Requires-Dist: {requirement}; extra == "{name}"',
      ]
    metadata = "\n".join(lines) + "\n\n" + description
    self.add(f"{self._dist_info}/METADATA", metadata.encode())
    self._add_wheel_file("aiter_jax")

  def repackage(self, base: pathlib.Path, requires: list[str]) -> None:
    """Takes over a published wheel under this one's version."""
    with zipfile.ZipFile(base) as wheel:
      (record,) = (
        name for name in wheel.namelist() if name.endswith(".dist-info/RECORD")
      )
      dist_info = record.split("/")[0]
      version = dist_info.removesuffix(".dist-info").split("-")[1]
      if version != self._version.split("+")[0]:
        raise ValueError(f"{base.name} is not of {self._version}")
      for member in wheel.infolist():
        if member.is_dir() or member.filename in (
          record,
          f"{dist_info}/WHEEL",
        ):
          continue
        content = wheel.read(member)
        path = member.filename
        if path.startswith(dist_info + "/"):
          path = self._dist_info + path[len(dist_info) :]
        if path == f"{self._dist_info}/METADATA":
          metadata = content.decode()
          metadata = re.sub(
            r"(?m)^Version: .*$",
            f"Version: {self._version}",
            metadata,
            count=1,
          )
          content = _requirement_lines(metadata, requires).encode()
        self.add(path, content, bool(member.external_attr >> 16 & 0o111))
    self._add_wheel_file("aiter_jax, from " + base.name)

  def add_license(self, content: bytes, name: str) -> None:
    self.add(f"{self._dist_info}/licenses/{name}", content)

  def _add_wheel_file(self, generator: str) -> None:
    python, abi, platforms = self._tag.split("-")
    tags = [f"{python}-{abi}-{platform}" for platform in platforms.split(".")]
    lines = [
      "Wheel-Version: 1.0",
      f"Generator: {generator}",
      f"Root-Is-Purelib: {str(abi == 'none').lower()}",
    ]
    lines += [f"Tag: {tag}" for tag in tags]
    self.add(f"{self._dist_info}/WHEEL", ("\n".join(lines) + "\n").encode())

  def write(self, path: pathlib.Path) -> None:
    record_path = f"{self._dist_info}/RECORD"
    record = []
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as wheel:
      # RECORD is last, as installers that stream a wheel want it.
      for name in [*sorted(self.files), record_path]:
        if name == record_path:
          content = "\n".join([*record, f"{record_path},,", ""]).encode()
        else:
          content = self.files[name]
          digest = base64.urlsafe_b64encode(hashlib.sha256(content).digest())
          digest = digest.rstrip(b"=").decode()
          record.append(f"{name},sha256={digest},{len(content)}")
        member = zipfile.ZipInfo(name, _TIME)
        member.compress_type = zipfile.ZIP_DEFLATED
        mode = 0o100755 if name in self.executable else 0o100644
        member.external_attr = mode << 16
        wheel.writestr(member, content, compresslevel=9)


def main() -> None:
  parser = argparse.ArgumentParser(fromfile_prefix_chars="@")
  parser.add_argument("--out", type=pathlib.Path, required=True)
  parser.add_argument("--name", required=True)
  parser.add_argument("--version", required=True)
  parser.add_argument("--tag", required=True)
  parser.add_argument("--base", type=pathlib.Path)
  parser.add_argument("--summary", default="")
  parser.add_argument("--requires-python", default="")
  parser.add_argument("--requires", action="append", default=[])
  parser.add_argument("--extra", action="append", default=[])
  parser.add_argument("--license", type=pathlib.Path, required=True)
  parser.add_argument("--description", type=pathlib.Path)
  parser.add_argument(
    "--file",
    action="append",
    default=[],
    help="PATH_IN_WHEEL=FILE",
  )
  args = parser.parse_args()

  wheel = Wheel(args.name, args.version, args.tag)
  if args.base:
    wheel.repackage(args.base, args.requires)
    wheel.add_license(args.license.read_bytes(), "LICENSE.aiter")
  else:
    description = args.description.read_text("utf-8")
    wheel.describe(
      args.requires,
      args.extra,
      args.summary,
      args.requires_python,
      description,
    )
    wheel.add_license(args.license.read_bytes(), "LICENSE")
  for item in args.file:
    path, source = item.split("=", 1)
    wheel.add(path, pathlib.Path(source).read_bytes(), path.endswith(".so"))
  wheel.write(args.out)


if __name__ == "__main__":
  main()
