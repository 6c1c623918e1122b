# SPDX-License-Identifier: Apache-2.0
"""What the benchmarks share: timing, comparison of results, tables."""

import csv
import importlib.metadata
import importlib.util
import pathlib
import statistics
import time

import numpy as np

import jax

HAS_TORCH = importlib.util.find_spec("torch") is not None


class Unsupported(Exception):
  """This implementation has no such problem, or no room for it."""


def title(dtype: str) -> str:
  """Returns where and with what it was measured."""
  text = f"{jax.devices()[0].device_kind}, {dtype}, jax {jax.__version__}"
  if HAS_TORCH:
    text += f", torch {importlib.metadata.version('torch')}"
  return text


def median_time(call, wait, seconds: float, blocks: int = 5) -> float:
  """Returns the device's seconds for one call.

  The median of `blocks` blocks; a block is as many calls as fill that part of
  `seconds`, queued one behind the other, with one wait at its end.
  """
  wait(call())
  start = time.perf_counter()
  count = 0
  while time.perf_counter() - start < seconds / blocks:  # clocks rise here
    wait(call())
    count += 1
  times = []
  for _ in range(blocks):
    start = time.perf_counter()
    for _ in range(count):
      result = call()
    wait(result)
    times.append((time.perf_counter() - start) / count)
  return statistics.median(times)


def error(results, expected) -> float:
  """Returns the largest difference, relative to the largest value."""
  return max(
    float(np.max(np.abs(a - b)) / np.max(np.abs(b)))
    for a, b in zip(results, expected, strict=True)
  )


def as_text(lines: list[list[str]]) -> str:
  widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
  return "\n".join(
    "  ".join(
      c.ljust(w) if i < 2 else c.rjust(w)
      for i, (c, w) in enumerate(zip(line, widths, strict=True))
    )
    for line in lines
  )


def as_markdown(lines: list[list[str]], title: str) -> str:
  """Returns a title and a table, whose first two columns are text."""
  rule = ["---", "---", *("---:" for _ in lines[0][2:])]
  text = title + "\n\n"
  if len(lines) > 1:
    text += "\n".join(
      f"| {' | '.join(x)} |" for x in (lines[0], rule, *lines[1:])
    )
  return text + "\n"


def write_markdown(text: str, path: str, name: str) -> None:
  """Writes to a file; if it has the two markers of the name, between them."""
  if path == "-":
    print(text)
    return
  file = pathlib.Path(path)
  begin, end = (f"<!-- {name}: {side} -->" for side in ("begin", "end"))
  old = file.read_text() if file.exists() else ""
  if begin in old and end in old:
    text = f"{old.split(begin)[0]}{begin}\n{text}{end}{old.split(end)[1]}"
  file.write_text(text)


def write_csv(rows: list[dict], path: pathlib.Path) -> None:
  with open(path, "w", newline="") as f:
    writer = csv.DictWriter(f, rows[0])
    writer.writeheader()
    writer.writerows(rows)
