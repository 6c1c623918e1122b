# SPDX-License-Identifier: Apache-2.0
"""What the ahead-of-time compiler has to know of a family of operators.

Each family has a module in kernels/ that declares it as FAMILY.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib
import pathlib
import re
from collections.abc import Callable, Iterable, Mapping

_KERNELS = "third_party.aiter.kernels"

# The first bit of features that no kernel is told of.
FIRST_SELECTING = 16


@dataclasses.dataclass(frozen=True)
class TensorMap:
  """A TMA map that a kernel takes.

  Attributes:
    tensor: the tensor it describes: one of its family's `tensors`.
    block: what one copy brings, outermost dimension first.
    element: Triton's type of an element, or "dtype" for the row's.
    swizzle: bytes of the shared memory's swizzle: 32, 64 or 128.
    box: what one copy brings where that is no block of Triton's, whose sizes
      are powers of two: for copies by inline assembly.
  """
  tensor: str
  block: tuple[int, ...]
  element: str = "dtype"
  swizzle: int = 128
  box: tuple[int, ...] | None = None


@dataclasses.dataclass(frozen=True)
class Op:
  """An operator: where its kernel is, and how many blocks of it there are.

  An axis of a grid is "EXPRESSION" or "NAME = EXPRESSION"; messages call it by
  the name. An expression has integers, the fields of the family's Params (of
  src/<family>_params.h), tile_m, tile_n and tile_k of the row, a feature's bits
  in capitals, + - * // &, min(a, b), max(a, b), ceil(a / b) and
  (a if b else c): "rows = ceil(rows / tile_m)", "1 if flags & PACKED else
  batch". A grid with an empty axis launches nothing.

  Attributes:
    module: the file of kernels/ that has the kernel, as "norm.fwd".
    grid: up to three axes, fastest first.
    grid_if: other grids, of kernels whose constant of that name is true.
  """
  module: str
  grid: tuple[str, ...]
  grid_if: Mapping[str, tuple[str, ...]] = dataclasses.field(
      default_factory=dict)


@dataclasses.dataclass(frozen=True)
class Family:
  """A family: the operators whose names begin with its name.

  Attributes:
    ops: the operators.
    pointers: argument -> type of what it points to; "dtype" is the row's.
    constants: row -> values of the compile-time parameters. Those that a kernel
      does not have may still choose its grid.
    element: row -> Triton's type behind "dtype".
    floats: arguments that are float32. All others are 32-bit integers.
    int64: matches the arguments that are 64-bit integers.
    aligned: matches the integers that are multiples of 8 elements: rows of the
      tensors are then aligned to 16 bytes, and a load may be that wide.
    alignment: row -> another number in the place of those 8.
    aligned_if: a feature that `aligned` holds without: only in rows that
      exclude it. Empty: in all rows.
    features: what a call may ask of a kernel: name -> bits. Those below
      FIRST_SELECTING are the bits of the kernels' argument `flags`, which take
      them from here; the others only select. families.py makes C++ constants
      of all, aiter::k<Family><Feature>.
    general_only: features that every kernel of the grades "fast" and "padded"
      excludes but those that its row names (`features=`, `may=`).
    messages: what a message calls a feature, if not by its name.
    no_maps_if: a feature under which there are no TMA maps: kernels with maps
      exclude it.
    tensors: what tensor maps may describe.
    tuned_by: the sizes that a row of configs/<family>_tuned.csv is for:
      TunedChoice::sizes of kernel_table.h.
    tuned_choices: what it chooses beside a kernel: TunedChoice::choices.
    no_spills_up_to: sizes up to which kernels for architectures with no_spills
      must not spill.
  """
  ops: Mapping[str, Op]
  pointers: Mapping[str, str]
  constants: Callable[[Mapping[str, str]], dict[str, int | bool | str]]
  element: Callable[[Mapping[str, str]], str] = lambda row: row["dtype"]
  floats: frozenset[str] = frozenset()
  int64: str = "$^"
  aligned: str = "$^"
  alignment: Callable[[Mapping[str, str]], int] = lambda row: 8
  aligned_if: str = ""
  features: Mapping[str, int] = dataclasses.field(default_factory=dict)
  general_only: tuple[str, ...] = ()
  messages: Mapping[str, str] = dataclasses.field(default_factory=dict)
  no_maps_if: str = ""
  tensors: tuple[str, ...] = ()
  tuned_by: tuple[str, ...] = ()
  tuned_choices: tuple[str, ...] = ()
  no_spills_up_to: int = 1 << 30

  def type_of(self, name: str, element: str) -> str:
    """Triton's type of a run-time argument."""
    if name in self.pointers:
      pointee = self.pointers[name]
      return "*" + (element if pointee == "dtype" else pointee)
    if name in self.floats:
      return "fp32"
    return "i64" if re.match(self.int64, name) else "i32"


def points_to(pointee: str, names: str) -> dict[str, str]:
  """Entries of `Family.pointers` for names between blanks."""
  return {name: pointee for name in names.split()}


def _bits(names: str, first: int, end: int) -> dict[str, int]:
  """A bit for each name between blanks, from bit `first` on."""
  listed = names.split()
  if len(listed) != len(set(listed)) or first + len(listed) > end:
    raise ValueError(f"features {names} are not at most {end - first} different"
                     " names")
  return {name: 1 << i for i, name in enumerate(listed, first)}


def flags(names: str) -> dict[str, int]:
  """Entries of `Family.features`: bits that kernels are told of, in order."""
  return _bits(names, 0, FIRST_SELECTING)


def selecting(names: str) -> dict[str, int]:
  """Entries of `Family.features`: bits that only select."""
  return _bits(names, FIRST_SELECTING, 32)


def named(row: Mapping[str, str], option: str) -> frozenset[str]:
  """The features that an option of a row names.

  Args:
    row: a row of a table.
    option: "excludes", those that it leaves to another, "features", those
      that it is made for and serves no call without, or "may", those of the
      general grade alone that it serves too.
  """
  return frozenset(
      feature for item in row.get("options", "").split()
      if item.startswith(option + "=")
      for feature in item.removeprefix(option + "=").split("+"))


def kernel_module(name: str):
  return importlib.import_module(f"{_KERNELS}.{name}")


@functools.cache
def family_names() -> tuple[str, ...]:
  """The folders of kernels/ that declare a family, in order."""
  kernels = importlib.import_module(_KERNELS)
  return tuple(sorted({
      declaration.parent.name for folder in kernels.__path__
      for declaration in pathlib.Path(folder).glob("*/family.py")}))


def family_name(op: str, families: Iterable[str] | None = None) -> str:
  """The family of an operator: the longest name that its own begins with.

  Raises:
    ValueError: no family's name does.
  """
  families = family_names() if families is None else tuple(families)
  found = [f for f in families if op.startswith(f + "_")]
  if not found:
    raise ValueError(
        f"op is {op}, but must begin with a family's name and _; families are"
        f" {', '.join(families)}")
  return max(found, key=len)


def family(name: str) -> Family:
  """What kernels/<name>/family.py declares.

  Raises:
    ValueError: it does not hold together.
  """
  declared = kernel_module(f"{name}.family").FAMILY
  for field in ("general_only", "messages"):
    unknown = set(getattr(declared, field)) - set(declared.features)
    if unknown:
      raise ValueError(f"{name}: {field} has {sorted(unknown)}, but features"
                       f" are {', '.join(declared.features)}")
  return declared


def family_of(op: str) -> Family:
  return family(family_name(op))
