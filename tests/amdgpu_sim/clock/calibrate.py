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
import multiprocessing
import os
import pathlib
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import assembly
import numpy as np

DEVICES = {("gfx942", 304): "MI300X", ("gfx942", 80): "MI308X",
           ("gfx950", 256): "MI355X"}
PEAK = {"MI300X": 2.1, "MI308X": 2.1, "MI355X": 2.4}  # clock/device.cc
# What changes the model's clocks: all combinations are tried.
GRID = {"l2_latency": (500, 700, 900), "l2_rate": (48, 64),
        "hbm_latency": (900, 1400), "hbm_efficiency": (0.5, 0.7),
        "lds_latency": (64, 128)}
# What changes only what they become: the best of these.
LAUNCH = np.arange(1, 7, 0.5)
SUSTAINED = np.arange(0.6, 1.01, 0.05)
THROTTLE = np.arange(0, 0.61, 0.05)


def evenly(rows: Sequence[Any], most: int) -> list[Any]:
  """Up to so many, evenly by their time."""
  rows = sorted(rows, key=lambda row: row["microseconds"])
  at = np.linspace(0, len(rows) - 1, min(most, len(rows)))
  return [rows[i] for i in sorted(set(at.round().astype(int)))]


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
  return [row for group in groups.values() for row in evenly(group, most)]


def predict(checkout: pathlib.Path, row: Mapping[str, Any],
            grid: Mapping[str, Sequence[float]] | None):
  """(clocks, share of matrix clocks) of each combination of `grid`, if that is
  no None, and before them what the device's own numbers make of the row in
  microseconds.

  Returns:
    None of a launch that does not end by itself: parts of k that wait for
    others, which the model does not look at.
  """
  import asm  # After the environment says what to simulate.

  library = asm.library()
  folder = checkout / "hsa" / row["arch"]
  m, n, k, split = (row[name] for name in ("m", "n", "k", "split_k"))
  launches = assembly.gemm(folder, row["kernel"], m, n, k, max(split, 1))
  combinations = [] if grid is None else itertools.product(*grid.values())
  try:
    with assembly.launched(folder, launches) as (told,):
      found = [(told["microseconds"], told["matrix_share"])]
      for values in combinations:
        for name, value in zip(grid, values, strict=True):
          library.amdgpu_sim_clock_set(name.encode(), ctypes.c_double(value))
        told = assembly.report("amdgpu_sim_clock_again")
        found.append((told["clocks"], told["matrix_share"]))
  except asm.HipError:
    return None
  return found


def predict_attention(checkout: pathlib.Path, row: Mapping[str, Any]) -> float:
  """Microseconds of attention with the device's own numbers."""
  folder = checkout / "hsa" / row["arch"]
  sizes = [row[name] for name in (
      "batch", "q_heads", "kv_heads", "seq_q", "seq_k", "causal")]
  if row["pass"] == "forward":
    launches = assembly.forward(folder, row["arch"], *sizes)
  else:
    launches = assembly.backward(folder, row["arch"], *sizes,
                                 row["pass"] == "backward, 16 bits")
  with assembly.launched(folder, launches) as told:
    return sum(each["microseconds"] for each in told)


def attention(checkout: pathlib.Path, path: pathlib.Path, most: int,
              jobs: int):
  """Errors of attention, which no fit of the products has seen."""
  columns = {"forward": "fwd", "backward, 16 bits": "bwd_a16",
             "backward, 32 bits": "bwd_a32"}
  groups = collections.defaultdict(list)
  with path.open() as stream:
    for row in csv.DictReader(stream):
      sizes = {name: int(row[name]) for name in (
          "batch", "q_heads", "kv_heads", "seq_q", "seq_k", "head_dim",
          "causal")}
      work = (4 * sizes["batch"] * sizes["q_heads"] * sizes["seq_q"]
              * sizes["seq_k"] * sizes["head_dim"] / (1 + sizes["causal"]))
      for (arch, _), device in DEVICES.items():
        for name, column in columns.items():
          rate = row.get(f"{column}_{device.lower()}")
          if rate:
            groups[device, name, sizes["causal"]].append(sizes | {
                "arch": arch, "device": device, "pass": name,
                "microseconds": work * (1 if name == "forward" else 2.5)
                                / float(rate) / 1e6})
  rows = [row for group in groups.values() for row in evenly(group, most)]
  predicted = run_all(predict_attention, checkout, rows, [], jobs)
  ratio = np.array([p / row["microseconds"]
                    for p, row in zip(predicted, rows, strict=True)])
  for device, name, causal in sorted(groups):
    mine = ratio[[(row["device"], row["pass"], row["causal"])
                  == (device, name, causal) for row in rows]]
    print(f"{device}, {name}, {'causal' if causal else 'all keys'}: "
          f"{told(np.abs(mine - 1))}, predicted / measured "
          f"{np.median(mine):.2f}")


def run_all(function, checkout: pathlib.Path, rows: Sequence[Any],
            more: Sequence[Any], jobs: int):
  """Of all rows, a pool of processes for each device."""
  results = {}
  for device in sorted({row["device"] for row in rows}):
    mine = [i for i, row in enumerate(rows) if row["device"] == device]
    assembly.prepare(device)
    os.environ |= {"AMDGPU_SIM_ARCH": rows[mine[0]]["arch"],
                   "AMDGPU_SIM_LIMIT": "8000000"}
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
    clock = self.peak[at] * np.maximum(sustained - throttle * share**2, 0.1)
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
  parser.add_argument("--families", nargs="+", default=list(assembly.GEMMS),
                      choices=list(assembly.GEMMS))
  parser.add_argument("--rows", type=int, default=12,
                      help="of a kernel or pass and device, at most")
  parser.add_argument("--no-fit", action="store_true",
                      help="tell the errors of the devices' own numbers")
  parser.add_argument("--keep", action="store_true",
                      help="latencies and rates: fit the launch and the clock")
  parser.add_argument("--jobs", type=int, default=os.cpu_count())
  parser.add_argument("--out", type=pathlib.Path,
                      help="CSV for measured and predicted microseconds")
  parser.add_argument("--attention", action="store_true",
                      help="MEASURED.csv has TFLOP/s of attention")
  arguments = parser.parse_args()
  if arguments.attention:
    attention(arguments.checkout, arguments.measured, arguments.rows,
              arguments.jobs)
    return
  rows = measured(arguments.measured, arguments.families, arguments.rows)
  grid = None if arguments.no_fit else {} if arguments.keep else GRID
  predictions = run_all(predict, arguments.checkout, rows,
                        [grid], arguments.jobs)
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

  combinations = list(itertools.product(*grid.values()))
  def describe(choice):
    values = dict(zip(grid, combinations[choice[0]], strict=True))
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
