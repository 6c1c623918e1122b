# SPDX-License-Identifier: Apache-2.0
"""Embeds compiled kernels in a C++ library.

Reads the JSON descriptions that compile.py wrote, with the code object of each
beside it, for one platform, and writes

  --out-blob    all code objects, compressed in groups, one after another
  --out-asm     assembly that includes the blob
  --out-header  a C++ struct per list of kernel arguments, laid out as the
                kernels read it, and a function that fills it by name
  --out-inc     the table of kernels: what each is for, where its object lies;
                the rows of --tuned whose kernels are among them

Output depends on the set of inputs alone, not on their order or location.
"""

import argparse
import csv
import hashlib
import itertools
import json
import lzma
import pathlib
import re
import zlib

from third_party.aiter.aot import family as family_lib
from third_party.aiter.aot.archs import ARCHS
from third_party.aiter.aot.families import (
    camel,
    feature_constant,
    grid_constant,
    tensor_constant,
)
from third_party.aiter.aot.table import MAX_DIMS

# Of groups in the blob and of objects in a group.
_ALIGNMENT = 16
# Neighbours are alike, so they are compressed together: 14.4 MB for sm_90's of
# 72. A kernel's first launch decompresses its group up to its end, about 2 ms
# for all of this; groups of twice as many bytes take 13.3 MB and 4 ms.
_GROUP_BYTES = 128 << 10
_FILTERS = [{"id": lzma.FILTER_LZMA2, "preset": 6, "dict_size": _GROUP_BYTES}]
_TYPES = {
    "*": ("const void*", 8),
    "i32": ("int32_t", 4),
    "u32": ("uint32_t", 4),
    "i64": ("int64_t", 8),
    "u64": ("uint64_t", 8),
    "f32": ("float", 4),
    "hidden": ("const void*", 8),
}
_TENSOR_MAP_BYTES = 128
_TENSOR_MAP_ALIGNMENT = 64

_HEADER = """\
// Written by third_party/aiter/aot/embed.py.
"""


def _constant(name):
  return "k" + camel(name)


def _feature_bits(family, names):
  return " | ".join(
      feature_constant(family, name) for name in sorted(names)) or "0"


def _sizes(name, sizes):
  """C++ initializer of up to MAX_DIMS sizes."""
  if len(sizes) > MAX_DIMS:
    raise ValueError(
        f"{name} has {len(sizes)} sizes, but may have {MAX_DIMS}: {sizes}")
  return "{" + ", ".join(str(int(size)) for size in sizes) + "}"


class _ArgList:
  """An argument list that kernels of one op share, and its C++ struct.

  Attributes:
    family: "mha" for the op "mha_fwd".
    params: the C++ struct that the arguments' values come from.
    name: the C++ struct; an op's second list of arguments has number 2.
    members: (declaration, initializer, offset, member's name) per argument.
    tensor_maps: names of the arguments that are tensor maps.
  """

  def __init__(self, op, family, number, args):
    self.family = family
    self.params = f"{camel(family)}Params"
    self.name = name = f"{camel(op)}Args" + (str(number) if number > 1 else "")
    self.members = []
    self.tensor_maps = []
    offset = 0
    for arg_name, arg_type in args:
      # Triton follows a tensor map NAME by NAME.shape0, ..., NAME.stride3,
      # which the kernel does not read.
      in_map = arg_name.split(".")[0] in self.tensor_maps
      arg_name = arg_name.replace(".", "_")
      if not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", arg_name):
        raise ValueError(f"{name}: argument name {arg_name!r}")
      if arg_type == "tensormap":
        c_type, size, align = (
            "TensorMap", _TENSOR_MAP_BYTES, _TENSOR_MAP_ALIGNMENT)
        value = f"maps[{len(self.tensor_maps)}]"
        self.tensor_maps.append(arg_name)
      elif arg_type in _TYPES:
        c_type, size = _TYPES[arg_type]
        align = size
        if arg_type == "hidden":
          value = "nullptr"
        elif in_map:
          value = "0"
        elif arg_type == "*":
          value = f"p.{arg_name}_ptr"
        else:
          value = f"p.{arg_name}"
      else:
        raise ValueError(
            f"{name}: argument {arg_name} has type {arg_type!r}; accepted are"
            f" {', '.join([*_TYPES, 'tensormap'])}")
      offset = -(-offset // align) * align
      # The suffix keeps clear of C++ keywords: an argument is called `do`.
      self.members.append((f"{c_type} {arg_name}_;", value, offset,
                           f"{arg_name}_"))
      offset += size

  def source(self):
    """The struct, its layout spelled out, and the function that fills it."""
    lines = [f"struct {self.name} {{"]
    lines += [f"  {declaration}" for declaration, _, _, _ in self.members]
    lines += ["};"]
    for _, _, offset, member in self.members:
      lines.append(
          f"static_assert(offsetof({self.name}, {member}) == {offset});")
    offsets = ", ".join(str(offset) for _, _, offset, _ in self.members)
    lines += [
        f"static_assert(sizeof({self.name}) <= kMaxArgsBytes);",
        f"static_assert({len(self.members)} <= kMaxArgs);",
        f"static_assert({len(self.tensor_maps)} <= kMaxTensorMaps);",
        "",
        f"inline constexpr uint16_t kOffsetsOf{self.name}[] = {{{offsets}}};",
        "",
        f"inline void Pack{self.name}(const void* params,",
        "    [[maybe_unused]] const TensorMap* maps, void* buffer) {",
        f"  const auto& p = *static_cast<const {self.params}*>(params);",
        f"  new (buffer) {self.name}{{",
    ]
    lines += [f"      {value}," for _, value, _, _ in self.members]
    lines += ["  };", "}", ""]
    return "\n".join(lines)


def _tensor_map_row(family, spec):
  box = spec["box"]
  return (f"{{{tensor_constant(family, spec['tensor'])}, {len(box)},"
          f" {spec['swizzle']}, {{{', '.join(map(str, box))}}}}}")


def _read(path):
  kernel = json.loads(path.read_text(encoding="utf-8"))
  kernel["object"] = path.with_suffix(".co").read_bytes()
  return kernel


def _expand(inputs):
  for item in inputs:
    path = pathlib.Path(item)
    if path.is_dir():
      yield from path.glob("*.json")
    else:
      yield path


def _tuned_rows(path, kernels):
  """Rows of configs/<family>_tuned.csv, one for each kernel that they mean.

  A row means the kernels of its op, arch, dtype and tile: one for operands
  that are aligned and one for others, say.

  Raises:
    ValueError: the columns are not what the family declares, or a row's
      architecture has kernels, but none of its tile.
  """
  path = pathlib.Path(path)
  family = family_lib.family(path.name.removesuffix("_tuned.csv"))
  columns = ["op", "arch", "dtype", *family.tuned_by, "tile",
             *family.tuned_choices, "us"]
  archs = {k["arch"] for k in kernels}
  kernels_of = {}
  for i, k in enumerate(kernels):
    tile = f"{k['tile_m']}x{k['tile_n']}x{k['tile_k']}"
    name = (k["op"], k["arch"], k["dtype"], tile)
    kernels_of.setdefault(name, []).append(i)
  rows = []
  lines = [line for line in path.read_text(encoding="utf-8").splitlines()
           if line and not line.startswith("#")]
  reader = csv.DictReader(lines)
  if reader.fieldnames != columns:
    raise ValueError(f"{path}: columns are {','.join(reader.fieldnames or ())},"
                     f" but must be {','.join(columns)}")
  for row in reader:
    name = (row["op"], row["arch"], row["dtype"], row["tile"])
    if row["arch"] not in archs:
      continue
    if name not in kernels_of:
      raise ValueError(f"{path}: no kernel {' '.join(name)}")
    sizes = _sizes(str(path), [row[c] for c in family.tuned_by])
    choices = _sizes(str(path), [row[c] for c in family.tuned_choices])
    rows += [f"    {{{i}, {sizes}, {choices}}},\n" for i in kernels_of[name]]
  return rows


def _compress(objects):
  """Compresses code objects in groups.

  Returns:
    The blob, and of each object the numbers that KernelInfo has of it: its
    group's offset and bytes in the blob, the object's offset and bytes in that
    when decompressed, and its CRC-32.
  """
  groups = [[]]
  size = 0
  for data in objects:
    padded = data + bytes(-len(data) % _ALIGNMENT)
    if groups[-1] and size + len(padded) > _GROUP_BYTES:
      groups.append([])
      size = 0
    groups[-1].append(padded)
    size += len(padded)
  blob = bytearray()
  places = []
  for group in groups:
    joined = b"".join(group)
    compressed = lzma.compress(
        joined, check=lzma.CHECK_CRC32, filters=_FILTERS)
    offsets = itertools.accumulate(map(len, group[:-1]), initial=0)
    places += [(len(blob), len(compressed), offset, len(padded),
                zlib.crc32(padded))
               for offset, padded in zip(offsets, group, strict=True)]
    blob += compressed + bytes(-len(compressed) % _ALIGNMENT)
  return blob, places


def _kernel_row(k, args: _ArgList, place, maps: str) -> str:
  """A kernel's row of the table.

  Args:
    k: its JSON dict.
    args: its arguments.
    place: where its code object lies, of `_compress`.
    maps: the name of its tensor maps, or nullptr.
  """
  excludes = set(k["excludes"])
  if k["grade"] != "general":
    excludes |= set(family_lib.family(k["family"]).general_only)
  excludes -= {*k["features"], *k["may"]}
  any_type = k["dtype"] == "any"
  return "    {" + ", ".join([
      f'"{k["symbol"]}"', f'"{k["op"]}"', f'"{k["grade"]}"', f'"{k["arch"]}"',
      "DataType::" + _constant("bf16" if any_type else k["dtype"]),
      "true" if any_type else "false",
      str(len(k["dims"])), _sizes(k["symbol"], k["dims"]),
      _feature_bits(k["family"], excludes),
      _feature_bits(k["family"], k["features"]),
      str(k["tile_m"]), str(k["tile_n"]), str(k["tile_k"]),
      str(k["rate"]), str(k["threads"]), str(k["shared"]),
      str(int(k["resources"]["occupancy"])),
      f"&{grid_constant(k['op'], k['grid_if'])}",
      *map(str, place),
      f"&kernels::Pack{args.name}",
      f"kernels::kOffsetsOf{args.name}", str(len(args.members)), maps,
      str(len(args.tensor_maps)),
  ]) + "},\n"


def _assembly(blob) -> str:
  """The source of the object that has the blob in it.

  The digest is for builds: an assembler does not report what .incbin reads, so
  a build that trusts such reports would keep the object of an older blob.
  """
  return "\n".join([
      "/* Written by third_party/aiter/aot/embed.py. */",
      f"/* kernels.bin: sha256 {hashlib.sha256(blob).hexdigest()} */",
      "  .section .rodata",
      f"  .balign {_ALIGNMENT}",
      "  .globl aiter_kernels_blob",
      "  .hidden aiter_kernels_blob",
      "  .type aiter_kernels_blob, %object",
      "aiter_kernels_blob:",
      '  .incbin "aiter/kernels.bin"',
      "  .size aiter_kernels_blob, . - aiter_kernels_blob",
      '  .section .note.GNU-stack, "", %progbits',
      "",
  ])


def embed(kernels, tuned):
  """Returns the (blob, assembly, header, table).

  Args:
    kernels: JSON dicts with objects.
    tuned: files configs/<family>_tuned.csv.
  """
  kernels = sorted(kernels, key=lambda k: k["symbol"])
  if not kernels:
    raise ValueError("no kernels given")
  symbols = [k["symbol"] for k in kernels]
  if len(set(symbols)) != len(symbols):
    raise ValueError("two kernels have the same symbol")
  platforms = {ARCHS[k["arch"]].platform for k in kernels}
  if len(platforms) > 1:
    raise ValueError("kernels for AMD and for NVIDIA need a library each")
  platform = {"rocm": "kHip", "cuda": "kCuda"}[platforms.pop()]

  blob, places = _compress([k["object"] for k in kernels])
  arg_lists = {}  # (op, args as text) -> _ArgList
  counts = {}
  rows = []
  map_tables = {}  # initializer -> name
  for k, place in zip(kernels, places, strict=True):
    key = (k["op"], json.dumps(k["args"]))
    if key not in arg_lists:
      counts[k["op"]] = counts.get(k["op"], 0) + 1
      arg_lists[key] = _ArgList(
          k["op"], k["family"], counts[k["op"]], k["args"])
    args = arg_lists[key]
    maps = "nullptr"
    if args.tensor_maps:
      specs = [_tensor_map_row(k["family"], k["maps"][name])
               for name in args.tensor_maps]
      specs = "{\n    " + ",\n    ".join(specs) + "}"
      maps = map_tables.setdefault(specs, f"kTensorMaps{len(map_tables) + 1}")
    rows.append(_kernel_row(k, args, place, maps))

  tuned_rows = [row for path in tuned for row in _tuned_rows(path, kernels)]
  families = sorted({a.family for a in arg_lists.values()})
  header = "".join([
      _HEADER,
      "#ifndef AITER_KERNELS_H_\n#define AITER_KERNELS_H_\n\n",
      "#include <cstddef>\n#include <cstdint>\n#include <new>\n\n",
      '#include "third_party/aiter/src/core/features.h"\n',
      '#include "third_party/aiter/src/core/grids.h"\n',
      '#include "third_party/aiter/src/core/kernel_table.h"\n',
      *(f'#include "third_party/aiter/src/{f}_params.h"\n'
        for f in families),
      '\nextern "C" __attribute__((visibility("hidden")))\n',
      "const uint8_t aiter_kernels_blob[];\n",
      "\nnamespace aiter::kernels {\n\n",
      "\n".join(a.source() for a in arg_lists.values()),
      "\n}  // namespace aiter::kernels\n\n#endif  // AITER_KERNELS_H_\n",
  ])
  table = "".join([
      _HEADER,
      f"constexpr Platform kEmbeddedPlatform = Platform::{platform};\n\n",
      *(f"constexpr TensorMapSpec {name}[] = {specs};\n\n"
        for specs, name in map_tables.items()),
      "constexpr KernelInfo kEmbeddedKernels[] = {\n",
      *rows,
      "};\n\n",
      # An array of no elements would not be one: the last row is no row.
      "constexpr TunedChoice kTunedChoices[] = {\n",
      *tuned_rows,
      "    {},\n};\n",
      f"constexpr int kNumTunedChoices = {len(tuned_rows)};\n",
  ])
  return bytes(blob), _assembly(blob), header, table


def main():
  parser = argparse.ArgumentParser(
      description=__doc__, fromfile_prefix_chars="@",
      formatter_class=argparse.RawDescriptionHelpFormatter)
  parser.add_argument("--out-blob", required=True)
  parser.add_argument("--out-asm", required=True)
  parser.add_argument("--out-header", required=True)
  parser.add_argument("--out-inc", required=True)
  parser.add_argument("--tuned", action="append", default=[], metavar="CSV")
  parser.add_argument("inputs", nargs="+", metavar="JSON_OR_DIR")
  args = parser.parse_args()
  blob, asm, header, table = embed(
      map(_read, _expand(args.inputs)), args.tuned)
  pathlib.Path(args.out_blob).write_bytes(blob)
  for path, text in (
      (args.out_asm, asm), (args.out_header, header), (args.out_inc, table)):
    pathlib.Path(path).write_text(text, encoding="utf-8")


if __name__ == "__main__":
  main()
