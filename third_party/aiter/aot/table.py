# SPDX-License-Identifier: Apache-2.0
"""The rows of configs/<family>.csv: what is to be built, and from what.

  table.py --out-bzl TABLE.bzl FAMILY...

TABLE.bzl has the rows, the sources of each kernel's module and the
architectures, for kernels.bzl. kernel_table.bzl runs this while Bazel loads, so
that each row is an action: a changed row then recompiles one kernel, a changed
source what imports it, and a removed row leaves no trace.
"""

import argparse
import ast
import csv
import functools
import itertools
import pathlib
import re

from third_party.aiter.aot import archs
from third_party.aiter.aot import family as family_lib

ROOT = pathlib.Path(__file__).absolute().parents[3]
_CONFIGS = "third_party/aiter/configs"
_KERNELS = "third_party.aiter.kernels"

_KEY = ["op", "grade", "arch", "dtype"]
# Of these a line may have several.
_SEVERAL = ("arch", "dtype")
# KernelInfo and ProblemKey of the library have as many.
MAX_DIMS = 4


def options(row):
  """'waves_per_eu=2 CHEAP=1' -> ({'waves_per_eu': 2}, {'CHEAP': 1})."""
  build, constants = {}, {}
  for item in (row.get("options") or "").split():
    key, value = item.split("=", 1)
    value = int(value) if re.fullmatch(r"-?\d+", value) else value.replace(
        ";", ",")
    (constants if key.isupper() else build)[key] = value
  return build, constants


def dims(row):
  """The sizes that a kernel is for: the columns between dtype and tile_m."""
  columns = list(row)
  return [int(row[c]) for c in columns[len(_KEY):columns.index("tile_m")]]


def tile(row):
  return [int(row.get(c, 0)) for c in ("tile_m", "tile_n", "tile_k")]


def symbol(row):
  """The row's unique name."""
  sizes = dims(row) or ["x".join(map(str, tile(row)))]
  cells = [row["op"], row["grade"], row["dtype"], *map(str, sizes), row["arch"]]
  build, constants = options(row)
  if made_for := build.get("features"):
    cells.append(made_for.replace("+", "_"))
  if "cluster" in build:
    cells.append(f"cluster{build['cluster']}")
  if "PINGPONG" in constants:
    cells.append("pingpong")
  if "may" in build:
    cells.append("any")
  if left_out := build.get("excludes"):
    cells.append("no_" + left_out.replace("+", "_"))
  return "_".join(cells)


def features(row, option):
  """The features that an option of a row names: family.named.

  Raises:
    ValueError: the family has no such feature.
  """
  names = family_lib.named(row, option)
  known = family_lib.family_of(row["op"]).features
  if unknown := names - set(known):
    raise ValueError(f"{symbol(row)}: {option} {', '.join(sorted(unknown))},"
                     f" but features are {', '.join(known)}")
  return sorted(names)


def module(row):
  """The file of kernels/ that has the row's kernel, as "norm.fwd"."""
  build, _ = options(row)
  if "module" in build:
    return build["module"]
  return family_lib.family_of(row["op"]).ops[row["op"]].module


def _rows(columns, cells):
  """The rows of a line: one for each arch and dtype of "gfx90a+gfx942"."""
  given = dict(zip(columns, cells))
  several = [given[column].split("+") for column in _SEVERAL]
  for values in itertools.product(*several):
    yield given | dict(zip(_SEVERAL, values))


def read(path):
  """symbol -> (header, line, row) of each row of a table.

  A line whose arch or dtype has several between + is as many rows, and `line`
  that of one.

  Raises:
    ValueError: the table is not one of kernels, a row has too few or too many
      cells, two rows have one name, or one names what is not declared.
  """
  lines = [line.strip() for line in
           pathlib.Path(path).read_text(encoding="utf-8").splitlines()]
  header, *lines = [line for line in lines if line and line[0] != "#"]
  columns = header.split(",")
  if columns[:len(_KEY)] != _KEY or "tile_m" not in columns:
    raise ValueError(
        f"{path}: columns must begin with {','.join(_KEY)} and have tile_m")
  sizes = columns[len(_KEY):columns.index("tile_m")]
  if len(sizes) > MAX_DIMS:
    raise ValueError(f"{path}: a row has {len(sizes)} sizes, but may have"
                     f" {MAX_DIMS}: {', '.join(sizes)}")
  found = {}
  for line, cells in zip(lines, csv.reader(lines)):
    if len(cells) != len(columns):
      raise ValueError(
          f"{path}: {len(cells)} cells for {len(columns)} columns: {line}")
    for row in _rows(columns, cells):
      name = symbol(row)
      if name in found:
        raise ValueError(f"{path}: {name} stands twice")
      for option in ("excludes", "features", "may"):
        features(row, option)
      if row["op"] not in family_lib.family_of(row["op"]).ops:
        raise ValueError(f"{path}: {row['op']} is no operator of its family")
      if row["arch"] not in archs.ARCHS:
        raise ValueError(
            f"{path}: no architecture {row['arch']} in archs.csv: {line}")
      found[name] = (header, ",".join(row.values()), row)
  return found


@functools.cache
def _imports(path):
  """Files of kernels/ that a Python file imports, relative to ROOT."""
  files = []
  for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
    names = []
    if isinstance(node, ast.Import):
      names = [alias.name for alias in node.names]
    elif isinstance(node, ast.ImportFrom) and not node.level:
      names = [node.module,
               *(f"{node.module}.{alias.name}" for alias in node.names)]
    for name in names:
      file = name.replace(".", "/") + ".py"
      if name.startswith(_KERNELS + ".") and (ROOT / file).is_file():
        files.append(file)
  return files


def sources(*modules):
  """What modules of kernels/ are made from: they and all that they import.

  Args:
    *modules: as "norm.fwd".

  Returns:
    Files relative to the tree's root, sorted.
  """
  found = set()
  new = {f"{_KERNELS}.{m}".replace(".", "/") + ".py" for m in modules}
  while new:
    found |= new
    new = {file for path in new for file in _imports(ROOT / path)} - found
  return sorted(found)


def _bzl(families):
  """The text of TABLE.bzl."""
  rows, modules = [], {}
  for family in families:
    table = ROOT / _CONFIGS / f"{family}.csv"
    for name, (header, line, row) in read(table).items():
      if family_lib.family_name(row["op"]) != family:
        raise ValueError(f"{table}: {name} is not of family {family}")
      source = module(row)
      if source not in modules:
        modules[source] = sources(source, f"{family}.family")
      rows.append(
          f"    struct(arch = {row['arch']!r}, module = {source!r},"
          f" symbol = {name!r}, header = {header!r}, line = {line!r}),")
  lines = ["ROWS = [", *rows, "]", "", "SOURCES = {"]
  for source, files in sorted(modules.items()):
    lines += [f"    {source!r}: {files!r},"]
  lines += ["}", "", "ARCHS = ["]
  for arch in archs.ARCHS.values():
    lines.append(f"    struct(name = {arch.name!r}, platform ="
                 f" {arch.platform!r}, ci = {arch.ci}),")
  return "\n".join([*lines, "]", ""])


def main():
  parser = argparse.ArgumentParser()
  parser.add_argument("--out-bzl", required=True)
  parser.add_argument("families", nargs="+", metavar="FAMILY")
  args = parser.parse_args()
  pathlib.Path(args.out_bzl).write_text(_bzl(args.families), encoding="utf-8")


if __name__ == "__main__":
  main()
