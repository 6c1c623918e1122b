# SPDX-License-Identifier: Apache-2.0
"""Unpacks parts of a wheel into the current directory."""

import argparse
import compileall
import pathlib
import py_compile
import zipfile


def main() -> None:
  parser = argparse.ArgumentParser()
  parser.add_argument("wheel", type=pathlib.Path)
  parser.add_argument(
    "--compile", action=argparse.BooleanOptionalAction, default=False
  )
  parser.add_argument("--include", nargs="*", default=[])
  parser.add_argument("--exclude", nargs="*", default=[])
  args = parser.parse_args()

  include = tuple(args.include) or ("",)
  exclude = tuple(args.exclude)
  with zipfile.ZipFile(args.wheel) as wheel:
    for member in wheel.infolist():
      name = member.filename
      if not name.startswith(include) or name.startswith(exclude):
        continue
      # Bazel would take these for packages of its own.
      if pathlib.PurePath(name).name in ("BUILD", "BUILD.bazel", "WORKSPACE"):
        continue
      path = wheel.extract(member)
      if member.external_attr >> 16 & 0o111:
        pathlib.Path(path).chmod(0o755)
  if args.compile:
    compileall.compile_dir(
      ".",
      quiet=2,
      # Neither a time stamp nor a look at the source: the same bytes always.
      invalidation_mode=py_compile.PycInvalidationMode.UNCHECKED_HASH,
    )


if __name__ == "__main__":
  main()
