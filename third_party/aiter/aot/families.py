# SPDX-License-Identifier: Apache-2.0
"""Writes what the families (kernels/*/family.py) and archs.csv say, as C++.

  families.py --out-archs ARCHS.h --out-features FEATURES.h --out-grids GRIDS.h
      FAMILY.PY...

ARCHS.h has the architectures (configs/archs.csv). FEATURES.h has each family's
features as constants, aiter::k<Family><Feature>, the names of all for messages
and look-ups, and what tensor maps may describe, aiter::k<Family>Tensor<Name>.
GRIDS.h has each operator's grid, aiter::k<Op>Grid. They depend on the
declarations alone, not on the platform or on what rows there are.
"""

import argparse
import ast
import pathlib

from third_party.aiter.aot import family as family_lib
from third_party.aiter.aot.archs import ARCHS

_HEADER = """\
// Written by third_party/aiter/aot/families.py.
"""


def camel(name):
  """'sink_tokens' -> 'SinkTokens'."""
  return "".join(part.capitalize() for part in name.split("_"))


def feature_constant(family, feature):
  """The C++ constant of a feature's bits: kMhaSinkTokens."""
  return f"k{camel(family)}{camel(feature)}"


def tensor_constant(family, tensor):
  """The C++ constant of a tensor that tensor maps describe: kMhaTensorDq."""
  return f"k{camel(family)}Tensor{camel(tensor)}"


def grid_constant(op, grid_if=""):
  """The C++ constant of an operator's grid: kMhaFwdGridHeadsFirst."""
  return f"k{camel(op)}Grid{camel(grid_if.lower())}"


_OPERATORS = {ast.Add: "+", ast.Sub: "-", ast.Mult: "*", ast.FloorDiv: "/",
              ast.BitAnd: "&"}


class _Axis:
  """An axis of a grid (family.Op) in C++.

  Attributes:
    name: what messages call it.
    size: the expression.
  """

  def __init__(self, text, family_name, family):
    self._text = text
    self._family_name = family_name
    self._family = family
    tree = ast.parse(text).body[0]
    self.name = text
    if isinstance(tree, ast.Assign):
      self.name = tree.targets[0].id.replace("_", " ")
    self.size = self._cpp(tree.value)

  def _cpp(self, tree):
    match tree:
      case ast.Constant(value=int(number)):
        return f"int64_t{{{number}}}"
      case ast.Name(id=name) if name.isupper():
        if name.lower() in self._family.features:
          return feature_constant(self._family_name, name.lower())
      case ast.Name(id="tile_m" | "tile_n" | "tile_k" as tile):
        return f"int64_t{{k.{tile}}}"
      case ast.Name(id=field):
        return f"int64_t{{p.{field}}}"
      case ast.BinOp(op=op) if type(op) in _OPERATORS:
        return (f"({self._cpp(tree.left)} {_OPERATORS[type(op)]}"
                f" {self._cpp(tree.right)})")
      case ast.IfExp():
        return (f"({self._cpp(tree.test)} ? {self._cpp(tree.body)}"
                f" : {self._cpp(tree.orelse)})")
      case ast.Call(func=ast.Name(id="min" | "max" as f), args=[a, b]):
        return f"std::{f}<int64_t>({self._cpp(a)}, {self._cpp(b)})"
      case ast.Call(func=ast.Name(id="ceil"),
                    args=[ast.BinOp(left=a, op=ast.Div(), right=b)]):
        return f"CeilDiv({self._cpp(a)}, {self._cpp(b)})"
    raise ValueError(
        f"{self._family_name}: {ast.unparse(tree)} of grid axis {self._text!r}"
        " is not what family.Op accepts")


def _grid(name, text, family_name, family):
  """A C++ constant of type Grid."""
  if not 1 <= len(text) <= 3:
    raise ValueError(f"{name} has {len(text)} axes, but must have 1 to 3")
  axes = [_Axis(axis, family_name, family) for axis in text]
  names = ", ".join(f'"{axis.name}"' for axis in axes)
  return [
      f"inline constexpr Grid {name} = {{",
      f"    {{{names}}},",
      "    []([[maybe_unused]] const KernelInfo& k, const void* params,",
      "       int64_t* sizes) {",
      f"      const auto& p = *static_cast<const {camel(family_name)}Params*>("
      "params);",
      *(f"      sizes[{i}] = {axis.size};" for i, axis in enumerate(axes)),
      "    }};\n",
  ]


def grids(families):
  """The header of all grids.

  Args:
    families: name -> Family.

  Raises:
    ValueError: an expression is not one that family.Op describes.
  """
  lines = [
      _HEADER +
      "#ifndef AITER_SRC_CORE_GRIDS_H_\n#define AITER_SRC_CORE_GRIDS_H_\n",
      "#include <algorithm>\n#include <cstdint>\n",
      '#include "third_party/aiter/src/core/check.h"',
      '#include "third_party/aiter/src/core/features.h"',
      '#include "third_party/aiter/src/core/kernel_table.h"',
      *(f'#include "third_party/aiter/src/{name}_params.h"'
        for name in families),
      "\nnamespace aiter {\n",
  ]
  for name, family in families.items():
    written = {}
    for op, declared in family.ops.items():
      for grid_if, text in {"": declared.grid, **declared.grid_if}.items():
        constant = grid_constant(op, grid_if)
        same = written.setdefault(tuple(text), constant)
        if same == constant:
          lines += _grid(constant, text, name, family)
        else:
          lines.append(f"inline constexpr const Grid& {constant} = {same};\n")
  lines += ["}  // namespace aiter\n", "#endif  // AITER_SRC_CORE_GRIDS_H_\n"]
  return "\n".join(lines)


def features(families):
  """The header of all features.

  Args:
    families: name -> Family.
  """
  lines = [
      _HEADER +
      "#ifndef AITER_SRC_CORE_FEATURES_H_\n#define AITER_SRC_CORE_FEATURES_H_",
      "\n#include <cstdint>\n\nnamespace aiter {\n",
      "// Bits of features that are those of the kernels' argument `flags`.",
      f"inline constexpr uint32_t kKernelFlags ="
      f" {(1 << family_lib.FIRST_SELECTING) - 1:#x};\n",
      "// A feature that calls of a family may ask of its kernels.",
      "struct FeatureInfo {",
      "  const char* name;",
      "  const char* message;  // What a message calls it.",
      "  uint32_t bits;",
      "};\n",
      "struct FamilyInfo {",
      "  const char* name;",
      "  const FeatureInfo* features;",
      "  int num_features;",
      "};\n",
  ]
  for name, family in families.items():
    for feature, bits in family.features.items():
      lines.append("inline constexpr uint32_t"
                   f" {feature_constant(name, feature)} = {bits:#x};")
    general_only = sum(family.features[f] for f in family.general_only)
    lines += ["// What every kernel of the grade \"fast\" excludes.",
              "inline constexpr uint32_t"
              f" {feature_constant(name, 'general_only')} = {general_only:#x};"]
    lines.append(
        f"inline constexpr FeatureInfo k{camel(name)}Features[] = {{")
    for feature, bits in family.features.items():
      message = family.messages.get(feature, feature.replace("_", " "))
      lines.append(f'    {{"{feature}", "{message}", {bits:#x}}},')
    # An array of no elements would not be one: the last row is no row.
    lines += ["    {},", "};"]
    lines += [
        f"inline constexpr uint8_t {tensor_constant(name, tensor)} = {i};"
        for i, tensor in enumerate(family.tensors)]
    lines.append("")
  lines.append("inline constexpr FamilyInfo kFamilies[] = {")
  lines += [
      f'    {{"{name}", k{camel(name)}Features, {len(family.features)}}},'
      for name, family in families.items()]
  lines += ["};", "\n}  // namespace aiter\n",
            "#endif  // AITER_SRC_CORE_FEATURES_H_\n"]
  return "\n".join(lines)


def archs():
  """The header of configs/archs.csv."""
  lines = [
      _HEADER +
      "#ifndef AITER_SRC_CORE_ARCHS_H_\n#define AITER_SRC_CORE_ARCHS_H_\n",
      "namespace aiter {\n",
      "// A line of configs/archs.csv.",
      "struct ArchInfo {",
      "  const char* name;",
      "  // CUDA's compute capabilities that run its objects, times ten; 0 of",
      "  // AMD's, which run on themselves alone.",
      "  int first_capability;",
      "  int last_capability;",
      "  int shared_bytes;     // Most shared memory of one block.",
      "  int multiprocessors;  // Of its largest device.",
      "  int gb_per_s;         // Of that one's memory.",
      "  // Its float8 type of 4 exponent bits; empty if it multiplies none.",
      "  const char* float8;",
      "};\n",
      "inline constexpr ArchInfo kArchs[] = {",
  ]
  for arch in ARCHS.values():
    first, last = arch.capabilities
    lines.append(f'    {{"{arch.name}", {first}, {last}, {arch.lds_bytes},'
                 f' {arch.multiprocessors}, {arch.gb_per_s}, "{arch.fp8}"}},')
  lines += ["};\n", "}  // namespace aiter\n",
            "#endif  // AITER_SRC_CORE_ARCHS_H_\n"]
  return "\n".join(lines)


def main():
  parser = argparse.ArgumentParser()
  parser.add_argument("--out-archs", required=True)
  parser.add_argument("--out-features", required=True)
  parser.add_argument("--out-grids", required=True)
  parser.add_argument("declarations", nargs="+", metavar="FAMILY.PY")
  args = parser.parse_args()
  names = sorted(pathlib.Path(d).parent.name for d in args.declarations)
  families = {name: family_lib.family(name) for name in names}
  pathlib.Path(args.out_archs).write_text(archs(), encoding="utf-8")
  pathlib.Path(args.out_features).write_text(
      features(families), encoding="utf-8")
  pathlib.Path(args.out_grids).write_text(grids(families), encoding="utf-8")


if __name__ == "__main__":
  main()
