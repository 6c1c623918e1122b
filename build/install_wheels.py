# SPDX-License-Identifier: Apache-2.0
"""Installs wheels into a folder that becomes a place to import from."""

import argparse
import compileall
import pathlib
import py_compile
import zipfile


def install(wheel_path: pathlib.Path, site: pathlib.Path) -> None:
  """Unpacks one wheel; two wheels may not differ in a file."""
  with zipfile.ZipFile(wheel_path) as wheel:
    for member in wheel.infolist():
      if member.is_dir():
        continue
      name = member.filename
      parts = pathlib.PurePosixPath(name).parts
      if parts[0].endswith(".data"):
        # Scripts and headers are no use here.
        if parts[1] not in ("purelib", "platlib"):
          continue
        name = "/".join(parts[2:])
      # Bazel takes no blanks in the names of a folder's files.
      if " " in name:
        continue
      path = site / name
      content = wheel.read(member)
      if path.exists():
        if path.read_bytes() == content:
          continue
        raise FileExistsError(f"{wheel_path.name}: another wheel has {name}")
      path.parent.mkdir(parents=True, exist_ok=True)
      path.write_bytes(content)
      if member.external_attr >> 16 & 0o111:
        path.chmod(0o755)


def main() -> None:
  parser = argparse.ArgumentParser(fromfile_prefix_chars="@")
  parser.add_argument("site", type=pathlib.Path)
  parser.add_argument("wheels", type=pathlib.Path, nargs="+")
  args = parser.parse_args()
  for wheel in args.wheels:
    install(wheel, args.site)
  compileall.compile_dir(
    args.site,
    quiet=2,
    stripdir=args.site,
    # Neither a time stamp nor a look at the source: the same bytes always.
    invalidation_mode=py_compile.PycInvalidationMode.UNCHECKED_HASH,
    workers=0,
  )


if __name__ == "__main__":
  main()
