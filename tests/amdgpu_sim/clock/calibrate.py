# SPDX-License-Identifier: Apache-2.0
"""Fits the model of time to the microseconds that AITER publishes.

The measured rows name AITER's own kernels, which the simulator executes from a
checkout of the user's. Fitted are what a launch takes, the clock with and
without matrix load, latencies and rates of L2 and HBM, the latency of LDS.
Errors are told for rows that the fit has seen, with each kernel left out in
turn, and with each device left out in turn.

  python3 build/build.py sim -- python tests/amdgpu_sim/clock/calibrate.py \\
      CHECKOUT MEASURED.csv

MEASURED.csv has the columns arch, compute_units, m, n, k, kernel, split_k,
microseconds.
"""

import argparse
import collections
import concurrent.futures
import csv
import ctypes
import itertools
import json
import multiprocessing
import os
import pathlib
import sys
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

sys.path.insert(0, str(pathlib.Path(__file__).parents[1]))
import run_aiter

DEVICES = {("gfx942", 304): "MI300X", ("gfx942", 80): "MI308X",
           ("gfx950", 256): "MI355X"}
PEAK = {"MI300X": 2.1, "MI308X": 2.1, "MI355X": 2.4}  # clock/device.cc
# Prefix of a kernel's name: its folder, bytes of an element, alignment of
# what follows it.
FAMILIES = {"bf16gemm": "bf16gemm", "I8gemm": "i8gemm",
            "fp8gemm": "fp8gemm_blockscale"}
# What changes the model's clocks: all combinations are tried.
GRID = {"l2_latency": (500, 700, 900), "l2_rate": (48, 64),
        "hbm_latency": (900, 1400), "hbm_efficiency": (0.5, 0.7),
        "lds_latency": (64, 128)}
# What changes only what they become: the best of these.
LAUNCH = np.arange(1, 7, 0.5)
SUSTAINED = np.arange(0.6, 1.01, 0.1)
THROTTLE = np.arange(0, 0.51, 0.1)


def measured(path: pathlib.Path, families: Sequence[str], most: int):
  """Rows, up to so many of a kernel and device, evenly by their time."""
  groups = collections.defaultdict(list)
  with path.open() as stream:
    for row in csv.DictReader(stream):
      family = row["kernel"].split("_")[0]
      if family not in families:
        continue
      for name in ("compute_units", "m", "n", "k", "split_k"):
        row[name] = int(row[name])
      row["microseconds"] = float(row["microseconds"])
      row["device"] = DEVICES[row["arch"], row["compute_units"]]
      groups[row["device"], row["kernel"]].append(row)
  rows = []
  for group in groups.values():
    group.sort(key=lambda row: row["microseconds"])
    at = np.linspace(0, len(group) - 1, min(most, len(group)))
    rows += [group[i] for i in sorted(set(at.round().astype(int)))]
  return rows


def predict(checkout: pathlib.Path, row: Mapping[str, Any], fit: bool):
  """(clocks, share of matrix clocks) of each combination of GRID if `fit`, and
  before them what the device's own numbers make of the row in microseconds:
  without `fit`, which changes them.

  Returns:
    None of a launch that does not end by itself: parts of k that wait for
    others, which the model does not look at.
  """
  import asm  # After the environment says what to simulate.

  library = asm.library()
  library.amdgpu_sim_clock.restype = ctypes.c_char_p
  library.amdgpu_sim_clock_again.restype = ctypes.c_char_p
  family = row["kernel"].split("_")[0]
  root = checkout / "hsa" / row["arch"]
  kernel = next(entry for _, entry in run_aiter.rows(root / FAMILIES[family])
                if entry["co_name"] == row["kernel"] + ".co")
  m, n, k, split = (row[name] for name in ("m", "n", "k", "split_k"))
  split = max(split, 1)
  width = 2 if family == "bf16gemm" else 1
  # Nobody writes what they hold: it does not matter for the time.
  sizes = {"c": 4 * m * n, "a": width * m * k, "b": width * n * k,
           "sa": 4 * m * max(1, k // 128), "sb": 4 * n * max(1, k // 128),
           "bias": 4 * n}
  buffers = {name: asm.Buffer(size) for name, size in sizes.items()}
  buffers["semaphore"] = asm.Buffer(np.zeros(1024, np.uint32))
  given = {name: run_aiter.Output(0, np.uint8) for name in buffers}
  c, a, b, sa, sb, bias, semaphore = (given[name] for name in buffers)
  if family == "bf16gemm":
    arguments = run_aiter.bf16_arguments(
        c, a, b, None, semaphore if split > 1 else None, (m, n, k), split,
        run_aiter.BF16)
    grid = (n // kernel["tileN"], -(-m // kernel["tileM"]), split)
  else:
    pack = (run_aiter.i8_arguments if family == "I8gemm"
            else run_aiter.fp8_arguments)
    arguments = pack(c, a, b, sa, sb, bias, (m, n, k), split)
    grid = (n // kernel["tile_n"] * split, -(-m // kernel["tile_m"]), 1)
  words = run_aiter.segment(
      arguments, {id(given[name]): buffers[name] for name in buffers})
  found = []
  combinations = itertools.product(*GRID.values()) if fit else []
  try:
    with asm.Module((root / FAMILIES[family] / kernel["co_name"])
                    .read_bytes()) as module:
      module.launch_segment(kernel["knl_name"], words, grid, 256)
      told = json.loads(library.amdgpu_sim_clock())
      found.append((told["microseconds"], told["matrix_share"]))
      for values in combinations:
        for name, value in zip(GRID, values, strict=True):
          library.amdgpu_sim_clock_set(name.encode(), ctypes.c_double(value))
        told = json.loads(library.amdgpu_sim_clock_again())
        found.append((told["clocks"], told["matrix_share"]))
  except asm.HipError:
    asm.clear_fault()
    return None
  finally:
    for buffer in buffers.values():
      buffer.free()
  return found


def predict_attention(checkout: pathlib.Path, row: Mapping[str, Any]) -> float:
  """Microseconds of forward attention with the device's own numbers."""
  import asm

  library = asm.library()
  library.amdgpu_sim_clock.restype = ctypes.c_char_p
  root = checkout / "hsa" / row["arch"]
  old = row["arch"] == "gfx942"
  name = ("fwd_hd128_bf16" + "_causal" * row["causal"] + "_rtne" * old + ".co")
  kernel = next(entry for _, entry in run_aiter.rows(root / "fmha_v3_fwd")
                if entry["co_name"] == name)
  b, hq, hk, sq, sk, d = (row[n] for n in (
      "batch", "q_heads", "kv_heads", "seq_q", "seq_k", "head_dim"))
  buffers = [asm.Buffer(2 * b * heads * length * d)
             for heads, length in ((hq, sq), (hq, sq), (hk, sk), (hk, sk))]
  buffers.append(asm.Buffer(4 * b * hq * sq))
  given = [run_aiter.Output(0, np.uint8) for _ in buffers]
  strides = [(heads * d * 2, d * 2, length * heads * d * 2)
             for heads, length in ((hq, sq), (hk, sk), (hk, sk), (hq, sq))]
  tile = kernel["ts_qo"]
  arguments = run_aiter.forward_arguments(
      *given, d**-0.5, (sq, sk), (hq, hk), (d, d), tile, strides, 5, 4 * sq)
  words = run_aiter.segment(arguments, {
      id(name): buffer for name, buffer in zip(given, buffers, strict=True)})
  tiles = -(-sq // tile)
  if row["causal"]:
    tiles = -(-tiles // 2)
  path = root / "fmha_v3_fwd" / ("MI300/" if old else "") / name
  with asm.Module(path.read_bytes()) as module:
    module.launch_segment(kernel["knl_name"], words, (tiles, hq, b), 512)
    told = json.loads(library.amdgpu_sim_clock())
  for buffer in buffers:
    buffer.free()
  return told["microseconds"]


def attention(checkout: pathlib.Path, path: pathlib.Path, jobs: int):
  """Errors of forward attention, which no fit has seen."""
  columns = {"MI300X": "fwd_mi300x", "MI355X": "fwd_mi355x"}
  rows = []
  with path.open() as stream:
    for row in csv.DictReader(stream):
      sizes = {name: int(row[name]) for name in (
          "batch", "q_heads", "kv_heads", "seq_q", "seq_k", "head_dim",
          "causal")}
      work = (4 * sizes["batch"] * sizes["q_heads"] * sizes["seq_q"]
              * sizes["seq_k"] * sizes["head_dim"] / (1 + sizes["causal"]))
      for (arch, _), device in DEVICES.items():
        if row.get(columns.get(device, "")):
          rows.append(sizes | {
              "arch": arch, "device": device,
              "microseconds": work / float(row[columns[device]]) / 1e6})
  predicted = run_all(predict_attention, checkout, rows, [], jobs)
  ratio = np.array([p / row["microseconds"]
                    for p, row in zip(predicted, rows, strict=True)])
  for device, causal in sorted({(r["device"], r["causal"]) for r in rows}):
    mine = ratio[[row["device"] == device and row["causal"] == causal
                  for row in rows]]
    print(f"{device}, {'causal' if causal else 'all keys'}: "
          f"{told(np.abs(mine - 1))}, predicted / measured "
          f"{np.median(mine):.2f}")


def run_all(function, checkout: pathlib.Path, rows: Sequence[Any],
            more: Sequence[Any], jobs: int):
  """Of all rows, a pool of processes for each device."""
  results = {}
  for device in sorted({row["device"] for row in rows}):
    mine = [i for i, row in enumerate(rows) if row["device"] == device]
    os.environ |= {
        "AMDGPU_SIM_ARCH": rows[mine[0]]["arch"],
        "AMDGPU_SIM_CLOCK": os.devnull, "AMDGPU_SIM_CLOCK_ONLY": "1",
        "AMDGPU_SIM_CLOCK_DEVICE": device, "AMDGPU_SIM_LIMIT": "8000000",
        "AMDGPU_SIM_TURN": "1", "AMDGPU_SIM_CHECKS":
        "-uninitialized,-lds_race,-waitcnt,-lds_wait,-lds_uninitialized",
    }
    context = multiprocessing.get_context("spawn")
    with concurrent.futures.ProcessPoolExecutor(jobs, context) as pool:
      runs = [pool.submit(function, checkout, rows[i], *more) for i in mine]
      results |= {i: run.result() for i, run in zip(mine, runs, strict=True)}
  return [results[i] for i in range(len(rows))]


class Table:
  """Rows and what the model says of them for each combination."""

  def __init__(self, rows, predictions):
    self.rows = rows
    clocks, share = np.moveaxis(np.array(predictions), -1, 0)
    self.clocks, self.share = clocks[:, 1:], share[:, 1:]
    self.peak = np.array([PEAK[row["device"]] for row in rows])
    self.measured = np.array([row["microseconds"] for row in rows])

  def microseconds(self, combination, launch, sustained, throttle, at):
    share = self.share[at, combination]
    clock = self.peak[at] * np.maximum(sustained - throttle * share, 0.1)
    return launch + self.clocks[at, combination] / (1000 * clock)

  def fit(self, at) -> tuple[int, float, float, float]:
    """The parameters with the least mean |log| of the ratio."""
    choices = itertools.product(range(self.clocks.shape[1]), LAUNCH, SUSTAINED,
                                THROTTLE)
    loss = lambda choice: np.abs(np.log(
        self.microseconds(*choice, at) / self.measured[at])).mean()
    return min(choices, key=loss)

  def errors(self, choice, at) -> np.ndarray:
    return np.abs(self.microseconds(*choice, at) / self.measured[at] - 1)


def told(errors: np.ndarray) -> str:
  if not len(errors):
    return "none"
  return (f"median {np.median(errors):.1%}, 90th percentile "
          f"{np.quantile(errors, 0.9):.1%} of {len(errors)}")


def left_out(table: Table, groups: Iterable[np.ndarray], everything):
  """Errors of each group by a fit of the others."""
  errors = np.zeros(len(table.rows))
  for group in groups:
    rest = np.setdiff1d(everything, group)
    if len(rest):
      errors[group] = table.errors(table.fit(rest), group)
  return errors


def report_kernels(rows, groups, ratio):
  print("\nBy kernel, of its device's:")
  for group in groups:
    row = rows[group[0]]
    print(f"  {row['device']} {row['kernel']}: {told(np.abs(ratio[group] - 1))}"
          f", predicted / measured {np.median(ratio[group]):.2f}")


def write(path: pathlib.Path | None, rows, predicted):
  if path is None:
    return
  names = ("device", "kernel", "m", "n", "k", "split_k", "microseconds")
  with path.open("w", newline="") as stream:
    writer = csv.writer(stream)
    writer.writerow([*names, "predicted"])
    for row, value in zip(rows, predicted, strict=True):
      writer.writerow([*(row[name] for name in names), f"{value:.2f}"])


def main():
  parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
  parser.add_argument("checkout", type=pathlib.Path, help="of AITER")
  parser.add_argument("measured", type=pathlib.Path)
  parser.add_argument("--families", nargs="+", default=list(FAMILIES),
                      choices=list(FAMILIES))
  parser.add_argument("--rows", type=int, default=12,
                      help="of a kernel and device, at most")
  parser.add_argument("--no-fit", action="store_true",
                      help="tell the errors of the devices' own numbers")
  parser.add_argument("--jobs", type=int, default=os.cpu_count())
  parser.add_argument("--out", type=pathlib.Path,
                      help="CSV for measured and predicted microseconds")
  parser.add_argument("--attention", action="store_true",
                      help="MEASURED.csv has TFLOP/s of forward attention")
  arguments = parser.parse_args()
  if arguments.attention:
    attention(arguments.checkout, arguments.measured, arguments.jobs)
    return
  rows = measured(arguments.measured, arguments.families, arguments.rows)
  predictions = run_all(predict, arguments.checkout, rows,
                        [not arguments.no_fit], arguments.jobs)
  ended = [p is not None for p in predictions]
  print(f"{len(rows)} rows, of which {ended.count(False)} do not end without "
        "workgroups that are not executed")
  rows = [row for row, good in zip(rows, ended, strict=True) if good]
  predictions = [p for p in predictions if p is not None]
  table = Table(rows, predictions)
  everything = np.arange(len(rows))
  by = lambda *names: [
      np.array([i for i in everything
                if tuple(rows[i][name] for name in names) == key])
      for key in sorted({tuple(row[name] for name in names) for row in rows})
  ]

  long = table.measured > 20
  if arguments.no_fit:
    print("\nWith the devices' own numbers:")
    own = np.array([p[0][0] for p in predictions])
    for group in by("device"):
      errors = np.abs(own[group] / table.measured[group] - 1)
      print(f"{rows[group[0]]['device']}: {told(errors)}; above 20 us "
            f"{told(errors[long[group]])}")
    report_kernels(rows, by("device", "kernel"), own / table.measured)
    write(arguments.out, rows, own)
    return

  combinations = list(itertools.product(*GRID.values()))
  def describe(choice):
    values = dict(zip(GRID, combinations[choice[0]], strict=True))
    return (", ".join(f"{k} {v:g}" for k, v in values.items())
            + f", launch_microseconds {choice[1]:g}, sustained {choice[2]:.2g}"
            + f", throttle {choice[3]:.2g}")

  common = table.fit(everything)
  print(f"\nOne fit of all: {describe(common)}")
  cases = {
      "seen by the fit": table.errors(common, everything),
      "each kernel left out": left_out(table, by("kernel"), everything),
      "each device left out": left_out(table, by("device"), everything),
  }
  for name, errors in cases.items():
    print(f"{name}: {told(errors)}; above 20 us {told(errors[long])}")
  print("\nA fit of each device:")
  final = np.zeros(len(rows))
  for group in by("device"):
    choice = table.fit(group)
    final[group] = table.microseconds(*choice, group)
    kernels = [np.intersect1d(g, group) for g in by("kernel")]
    out = left_out(table, [g for g in kernels if len(g)], group)[group]
    print(f"{rows[group[0]]['device']}: {describe(choice)}\n"
          f"  seen: {told(table.errors(choice, group))}\n"
          f"  each kernel left out: {told(out)}; above 20 us "
          f"{told(out[long[group]])}")
  report_kernels(rows, by("device", "kernel"), final / table.measured)
  write(arguments.out, rows, final)


if __name__ == "__main__":
  main()
