# SPDX-License-Identifier: Apache-2.0
"""What configs/archs.csv says of each GPU architecture."""

import csv
import dataclasses
import pathlib

FILE = pathlib.Path(__file__).absolute().parents[1] / "configs/archs.csv"


@dataclasses.dataclass(frozen=True)
class Arch:
  """An architecture; the file says what its columns mean.

  Attributes:
    capabilities: first and last of CUDA's compute capabilities that run its
      objects, times ten; (0, 0) of AMD's, which run on themselves alone.
    casts: of "bf16" and "e4m3fn".
  """
  name: str
  platform: str
  ci: bool
  capabilities: tuple[int, int]
  wave: int
  lds_bytes: int
  matrix: str
  fp8: str
  casts: frozenset[str]
  xcds: int
  no_spills: bool
  multiprocessors: int
  gb_per_s: int


def _flag(cell):
  return {"yes": True, "no": False}[cell]


def read(path: pathlib.Path = FILE) -> dict[str, Arch]:
  """The architectures by name, in the file's order."""
  lines = [line for line in path.read_text(encoding="utf-8").splitlines()
           if line and not line.startswith("#")]
  archs = {}
  for row in csv.DictReader(lines):
    first, _, last = row["capabilities"].replace(".", "").partition("-")
    archs[row["arch"]] = Arch(
        name=row["arch"], platform=row["platform"], ci=_flag(row["ci"]),
        capabilities=(int(first or 0), int(last or 0)), wave=int(row["wave"]),
        lds_bytes=int(row["lds_bytes"]), matrix=row["matrix"], fp8=row["fp8"],
        casts=frozenset(row["casts"].split()), xcds=int(row["xcds"]),
        no_spills=_flag(row["no_spills"]),
        multiprocessors=int(row["multiprocessors"]),
        gb_per_s=int(row["gb_per_s"]))
  return archs


ARCHS = read()
