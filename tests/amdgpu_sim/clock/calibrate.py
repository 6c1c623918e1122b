# SPDX-License-Identifier: Apache-2.0
"""Fits the model of time to the microseconds that AITER publishes.

The measured rows name AITER's own kernels, which the simulator executes from a
checkout of the user's. Latencies and the share of HBM's rate are fitted for all
devices together, what a launch takes and the clock with and without matrix load
for each. Errors are told for rows that the fit has seen, with each kernel left
out in turn, and with each device left out in turn: it has the launch and the
clock that fit the others. With --pairs, how often of two kernels for one
problem, each left out of its fit, the faster one is known.

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
GRID = {"l2_latency": (600, 800), "hbm_latency": (800, 1000),
        "hbm_efficiency": (0.7, 0.8)}
# What changes only what they become, of each device: the best of these.
LAUNCH = np.arange(1, 5.1, 0.5)
SUSTAINED = np.arange(0.75, 1.01, 0.05)
THROTTLE = np.arange(0, 1.01, 0.1)
CLOCKS = np.array(list(itertools.product(LAUNCH, SUSTAINED, THROTTLE)))
# What a row of another device weighs in that, where a device has few.
OTHERS = 0.05
# A pair of kernels is ranked if one took so many times as long as the other.
RANKED = 1.1


def evenly(rows: Sequence[Any], most: int | None) -> list[Any]:
  """Up to so many, evenly by their time, or all."""
  most = most or len(rows)
  rows = sorted(rows, key=lambda row: row["microseconds"])
  at = np.linspace(0, len(rows) - 1, min(most, len(rows)))
  return [rows[i] for i in sorted(set(at.round().astype(int)))]


def measured(path: pathlib.Path, families: Sequence[str], most: int | None):
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
      row["family"] = f"{row['device']} {family}"
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
    self.device = np.array([row["device"] for row in rows])
    self.peak = np.array([PEAK[row["device"]] for row in rows])
    self.measured = np.array([row["microseconds"] for row in rows])

  def microseconds(self, combination, clock, at):
    """Of rows, for each of some (launch, sustained, throttle)."""
    launch, sustained, throttle = np.moveaxis(clock, -1, 0)[..., None]
    share = self.share[at, combination]
    rate = self.peak[at] * np.maximum(sustained - throttle * share**2, 0.1)
    return launch + self.clocks[at, combination] / (1000 * rate)

  def best(self, combination, at):
    """Each device's clock with the least |log| of the ratio, and that, added;
    None's is that of them all."""
    losses = np.abs(np.log(self.microseconds(combination, CLOCKS, at)
                           / self.measured[at]))
    clocks, total = {None: CLOCKS[losses.sum(axis=1).argmin()]}, 0
    for device in sorted(set(self.device[at])):
      own = self.device[at] == device
      best = (losses @ np.where(own, 1, OTHERS)).argmin()
      clocks[device] = CLOCKS[best]
      total += losses[best, own].sum()
    return clocks, total

  def fit(self, at) -> tuple[int, dict[str | None, np.ndarray]]:
    """A combination, and the clocks that go with it."""
    combination = min(range(self.clocks.shape[1]),
                      key=lambda c: self.best(c, at)[1])
    return combination, self.best(combination, at)[0]

  def predicted(self, fit, at) -> np.ndarray:
    combination, clocks = fit
    return np.array([
        self.microseconds(combination, clocks.get(device, clocks[None]), [row])
        for row, device in zip(at, self.device[at], strict=True)]).ravel()


def told(errors: np.ndarray) -> str:
  if not len(errors):
    return "none"
  return (f"median {np.median(errors):.1%}, 90th percentile "
          f"{np.quantile(errors, 0.9):.1%} of {len(errors)}")


def left_out(table: Table, groups: Iterable[np.ndarray], fitted):
  """Microseconds of each group by a fit of the others."""
  predicted = np.zeros(len(table.rows))
  for group in groups:
    rest = np.setdiff1d(fitted, group)
    predicted[group] = table.predicted(table.fit(rest), group)
  return predicted


def report_ranking(rows, predicted):
  """Of pairs of kernels for one problem those whose order is predicted."""
  problems = collections.defaultdict(list)
  for row, time in zip(rows, predicted, strict=True):
    problems[row["device"], row["kernel"].split("_")[0],
             row["m"], row["n"], row["k"]].append((row["microseconds"], time))
  right = collections.defaultdict(list)
  for (device, family, *_), times in problems.items():
    for (a, mine), (b, other) in itertools.combinations(sorted(times), 2):
      if b >= RANKED * a:
        right[device, family].append(mine < other)
        right["all", ""].append(mine < other)
  print(f"\nPairs that differ by {RANKED - 1:.0%}, ranked right:")
  for (device, family), found in sorted(right.items()):
    print(f"  {device} {family}: {sum(found)} of {len(found)}")


def report_kernels(rows, groups, ratio):
  print("\nBy kernel:")
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
  parser.add_argument("--pairs", type=pathlib.Path,
                      help="a CSV as MEASURED.csv, of problems for which "
                      "several kernels were measured: they are ranked, and not "
                      "fitted")
  parser.add_argument("--attention", action="store_true",
                      help="MEASURED.csv has TFLOP/s of attention")
  arguments = parser.parse_args()
  if arguments.attention:
    attention(arguments.checkout, arguments.measured, arguments.rows,
              arguments.jobs)
    return
  rows = measured(arguments.measured, arguments.families, arguments.rows)
  fitted = len(rows)
  if arguments.pairs:
    rows += measured(arguments.pairs, arguments.families, None)
  grid = None if arguments.no_fit else {} if arguments.keep else GRID
  predictions = run_all(predict, arguments.checkout, rows,
                        [grid], arguments.jobs)
  ended = [p is not None for p in predictions]
  print(f"{len(rows)} rows, of which {ended.count(False)} do not end without "
        "workgroups that are not executed")
  fitted = sum(ended[:fitted])
  rows = [row for row, good in zip(rows, ended, strict=True) if good]
  predictions = [p for p in predictions if p is not None]
  table = Table(rows, predictions)
  everything = np.arange(fitted)
  by = lambda name, at: [
      np.array([i for i in at if rows[i][name] == key])
      for key in sorted({rows[i][name] for i in at})]

  def report(name, times):
    """For all of the fitted rows, by device, and by family of each."""
    errors = np.abs(times / table.measured - 1)
    long = table.measured > 20
    print(f"\n{name}: {told(errors[:fitted])}; above 20 us "
          f"{told(errors[:fitted][long[:fitted]])}")
    for key in ("device", "family"):
      for group in by(key, everything):
        print(f"  {rows[group[0]][key]}: {told(errors[group])}; above 20 us "
              f"{told(errors[group[long[group]]])}")

  if arguments.no_fit:
    final = np.array([p[0][0] for p in predictions])
    report("With the devices' own numbers", final)
    report_ranking(rows[fitted:], final[fitted:])
  else:
    fit = table.fit(everything)
    values = list(itertools.product(*grid.values()))[fit[0]]
    print("Fitted:", ", ".join(
        f"{k} {v:g}" for k, v in zip(grid, values, strict=True)))
    for device, clock in fit[1].items():
      print(f"  {device or 'one for all'}: launch_microseconds {clock[0]:g}, "
            f"sustained {clock[1]:.2g}, throttle {clock[2]:.2g}")
    final = table.predicted(fit, np.arange(len(rows)))
    report("Seen by the fit", final)
    kernels = left_out(table, by("kernel", range(len(rows))), everything)
    report("Each kernel left out", kernels)
    report("Each device left out",
           left_out(table, by("device", range(len(rows))), everything))
    report_ranking(rows[fitted:], kernels[fitted:])
  groups = [group for same in by("device", everything)
            for group in by("kernel", same)]
  report_kernels(rows, groups, final / table.measured)
  write(arguments.out, rows, final)


if __name__ == "__main__":
  main()
