# SPDX-License-Identifier: Apache-2.0
"""Table of the kernels' resources from compile.py's JSON files.

  report.py --out-csv T.csv --out-md T.md [--check] JSON...

--check fails where a kernel for usual sizes spills on an architecture whose
kernels may not (configs/archs.csv).

Loop columns, on AMD: clocks of one iteration of one wave, as matrix + VALU +
transcendental; LDS clocks and scratch instructions stand beside them. VALU
counts 4 clocks a wave64 instruction, transcendental 16. LDS serves a block's
waves one after the other, 128 bytes a clock: loop_lds is the block's. Loads are
instructions of a wave's iteration, which are all that can be in flight without
a pipeline of more stages.
"""

import argparse
import csv
import json
import pathlib
import sys

# Innermost loops in program order: tiles without a mask, tiles that one edge of
# the window cuts, and in the fast forward those that need every check.
_LOOPS = ("", "masked_", "checked_")
_COLUMNS = (
    "arch", "op", "grade", "dtype", "dims", "symbol", "tile_m", "tile_n",
    "num_warps", "vgpr", "agpr", "sgpr", "regs", "spills", "sgpr_spills",
    "scratch", "lds", "occupancy",
    *(prefix + name for prefix in _LOOPS
      for name in ("mfma", "valu", "trans", "loop_lds", "loop_loads",
                   "loop_scratch")))


def _row(description):
  row = {c: description.get(c, "") for c in _COLUMNS}
  row["dims"] = "x".join(str(d) for d in description["dims"])
  found = description["resources"]
  row.update({k: v for k, v in found.items() if k in row})
  for prefix, loop in zip(_LOOPS, found.get("loops", ())):
    for key in ("mfma", "valu", "trans"):
      row[prefix + key] = loop[key]
    row[prefix + "loop_lds"] = loop["lds"] * int(row["num_warps"])
    row[prefix + "loop_loads"] = loop["global_loads"]
    row[prefix + "loop_scratch"] = loop["scratch"]
  return row


def _markdown(rows):
  lines = ["# Resources of the compiled kernels", "",
           "Loops: matrix + VALU + transcendental clocks of a wave's iteration,"
           " then LDS clocks of a block's four or more waves, which share it,"
           " and loads from memory. Occupancy: waves a SIMD.", "",
           "| kernel | tile | registers | spills of VGPRs, SGPRs | LDS "
           "| occupancy | unmasked loop | masked loop | checked loop |",
           "|" + "---|" * 9]
  for r in rows:
    registers = r["regs"] or f'{r["vgpr"]} ({r["agpr"]} AGPR), {r["sgpr"]} S'
    def loop(prefix, r=r):
      if r[prefix + "mfma"] == "":
        return ""
      clocks = " + ".join(
          str(r[prefix + k]) for k in ("mfma", "valu", "trans"))
      return (f'{clocks}; LDS {r[prefix + "loop_lds"]}; '
              f'{r[prefix + "loop_loads"]} loads')
    spills = f'{r["spills"]}, {r["sgpr_spills"]}' if r["vgpr"] else r["spills"]
    lines.append(
        f'| {r["symbol"]} | {r["tile_m"]}x{r["tile_n"]} | {registers} '
        f'| {spills} | {r["lds"]} | {r["occupancy"]} '
        + "".join(f"| {loop(prefix)} " for prefix in _LOOPS) + "|")
  return "\n".join(lines) + "\n"


# Where a producer warpgroup lends its registers to the consumers, it keeps what
# it needs once a tile in memory: no consumer waits for that. Three consumers
# have fewer registers, and each keeps there what it needs at a tile's end.
_SPILLS_ALLOWED = {"sm_90": 16}
# AMD's, of which no loop reads or writes one: what is needed after them all.
_SPILLS_OUTSIDE_LOOPS = 8
_WARPS_OF_THREE_CONSUMERS = 16


def _spills(description):
  """Returns whether a kernel keeps more in memory than it may."""
  allowed = _SPILLS_ALLOWED.get(description["arch"], 0)
  if description["num_warps"] == _WARPS_OF_THREE_CONSUMERS:
    allowed *= 3
  loops = description["resources"].get("loops")
  if loops and not any(loop["scratch"] for loop in loops):
    allowed = _SPILLS_OUTSIDE_LOOPS
  return (description["resources"]["spills"] > allowed and
          max(description["dims"], default=0) <= description["no_spills_up_to"])


def main():
  parser = argparse.ArgumentParser(fromfile_prefix_chars="@")
  parser.add_argument("--out-csv")
  parser.add_argument("--out-md")
  parser.add_argument("--check", action="store_true")
  parser.add_argument("json", nargs="+")
  args = parser.parse_args()
  descriptions = [json.loads(pathlib.Path(p).read_text()) for p in args.json]
  rows = [_row(d) for d in descriptions]
  rows.sort(key=lambda r: tuple(str(r[c]) for c in _COLUMNS[:5]))
  if args.out_csv:
    with open(args.out_csv, "w", newline="", encoding="utf-8") as f:
      writer = csv.DictWriter(f, _COLUMNS, lineterminator="\n")
      writer.writeheader()
      writer.writerows(rows)
  if args.out_md:
    pathlib.Path(args.out_md).write_text(_markdown(rows), encoding="utf-8")
  if args.check:
    spills = [_row(d) for d in descriptions if _spills(d)]
    for r in spills:
      print(f'{r["symbol"]}: spills {r["spills"]} registers', file=sys.stderr)
    if spills:
      sys.exit(1)


if __name__ == "__main__":
  main()
