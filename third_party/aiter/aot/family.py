# SPDX-License-Identifier: Apache-2.0
"""What the ahead-of-time compiler has to know of a family of operators.

Each family has a module in kernels/ that declares it as FAMILY.
"""

from __future__ import annotations

import dataclasses
import importlib
import re
from collections.abc import Callable, Mapping

_KERNELS = "third_party.aiter.kernels."


@dataclasses.dataclass(frozen=True)
class TensorMap:
  """A TMA map that a kernel takes.

  Attributes:
    tensor: the tensor it describes, named as in kernel_table.h's TensorId.
    block: what one copy brings, outermost dimension first.
    element: Triton's type of an element, or "dtype" for the row's.
    swizzle: bytes of the shared memory's swizzle: 32, 64 or 128.
  """
  tensor: str
  block: tuple[int, ...]
  element: str = "dtype"
  swizzle: int = 128


@dataclasses.dataclass(frozen=True)
class Family:
  """A family: the operators whose names begin with its name.

  Attributes:
    ops: op -> (module, grid axes of kernel_table.h, fastest first).
    pointers: argument -> type of what it points to; "dtype" is the row's.
    constants: row -> values of the compile-time parameters.
    element: row -> Triton's type behind "dtype".
    floats: arguments that are float32. All others are 32-bit integers.
    int64: matches the arguments that are 64-bit integers.
    aligned: matches the integers that are multiples of 8 elements: rows of the
      tensors are then aligned to 16 bytes, and a load may be that wide.
    alignment: row -> another number in the place of those 8.
    aligned_if: a feature that `aligned` holds without: only in rows that
      exclude it. Empty: in all rows.
    features: what rows may exclude; names of an enum of kernel_table.h.
    no_maps_if: a feature under which there are no TMA maps: kernels with maps
      exclude it.
    heads_first: ops whose first two grid axes the constant HEADS_FIRST swaps.
    no_spills_up_to: sizes up to which kernels for the architectures that
      report.py lists must not spill.
  """
  ops: Mapping[str, tuple[str, tuple[str, ...]]]
  pointers: Mapping[str, str]
  constants: Callable[[Mapping[str, str]], dict[str, int | bool | str]]
  element: Callable[[Mapping[str, str]], str] = lambda row: row["dtype"]
  floats: frozenset[str] = frozenset()
  int64: str = "$^"
  aligned: str = "$^"
  alignment: Callable[[Mapping[str, str]], int] = lambda row: 8
  aligned_if: str = ""
  features: frozenset[str] = frozenset()
  no_maps_if: str = ""
  heads_first: frozenset[str] = frozenset()
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


def kernel_module(name: str):
  return importlib.import_module(_KERNELS + name)


def family_of(op: str) -> Family:
  return kernel_module(op.split("_")[0] + ".family").FAMILY
