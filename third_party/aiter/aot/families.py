# SPDX-License-Identifier: Apache-2.0
"""Writes what the families declare (kernels/*/family.py) as C++.

  families.py --out-features FEATURES.h FAMILY.PY...

FEATURES.h has each family's features as constants, aiter::k<Family><Feature>,
and the names of all for messages and look-ups. It depends on the declarations
alone, not on the platform or on what rows there are.
"""

import argparse
import pathlib

from third_party.aiter.aot import family as family_lib

_HEADER = """\
// Written by third_party/aiter/aot/families.py.
"""


def camel(name):
  """'sink_tokens' -> 'SinkTokens'."""
  return "".join(part.capitalize() for part in name.split("_"))


def feature_constant(family, feature):
  """The C++ constant of a feature's bits: kMhaSinkTokens."""
  return f"k{camel(family)}{camel(feature)}"


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
    lines += ["    {},", "};\n"]
  lines.append("inline constexpr FamilyInfo kFamilies[] = {")
  lines += [
      f'    {{"{name}", k{camel(name)}Features, {len(family.features)}}},'
      for name, family in families.items()]
  lines += ["};", "\n}  // namespace aiter\n",
            "#endif  // AITER_SRC_CORE_FEATURES_H_\n"]
  return "\n".join(lines)


def main():
  parser = argparse.ArgumentParser()
  parser.add_argument("--out-features", required=True)
  parser.add_argument("declarations", nargs="+", metavar="FAMILY.PY")
  args = parser.parse_args()
  names = sorted(pathlib.Path(d).parent.name for d in args.declarations)
  families = {name: family_lib.family(name) for name in names}
  pathlib.Path(args.out_features).write_text(
      features(families), encoding="utf-8")


if __name__ == "__main__":
  main()
