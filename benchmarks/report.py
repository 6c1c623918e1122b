# SPDX-License-Identifier: Apache-2.0
"""What the benchmarks share: flags, timing, comparison of results, tables."""

import argparse
import csv
import importlib.metadata
import importlib.util
import pathlib
import statistics
import sys
import time

import jax.numpy as jnp
import numpy as np

import jax
from jax import lax

HAS_TORCH = importlib.util.find_spec("torch") is not None
# Seconds of a program below which the host may take longer than the device, and
# numbers of calls for which the device takes longer: of most, and of the rest.
SHORT_PROGRAM, MANY = 2.5e-4, (64, 256)


class Unsupported(Exception):
  """This implementation has no such problem, or no room for it."""


def parser(
  description: str,
  name: str,
  implementations: tuple[str, ...] = (),
  dtypes: tuple[str, ...] = ("bfloat16", "float16", "float32"),
  draws: bool = False,
) -> argparse.ArgumentParser:
  """Returns a parser of what every benchmark can be told, for `told`.

  Args:
    description: the program's docstring.
    name: of the benchmark.
    implementations: of which any may be left out; else all are compared.
    dtypes: of the inputs, the usual one first.
    draws: whether it can draw problems at random.
  """
  flags = argparse.ArgumentParser(description=description.split("\n")[0])
  flags.add_argument("--smoke", action="store_true", help="tiny shapes")
  if implementations:
    flags.add_argument(
      "--implementations",
      nargs="+",
      choices=implementations,
      default=implementations,
    )
  if draws:
    flags.add_argument(
      "--random", type=int, default=0, metavar="N", help="problems to draw"
    )
    flags.add_argument("--seed", type=int, default=0)
  flags.add_argument("--dtype", choices=dtypes, default=dtypes[0])
  flags.add_argument(
    "--seconds", type=float, default=0.1, help="device time spent on one figure"
  )
  flags.add_argument("--out", type=pathlib.Path, default=f"{name}_out")
  flags.add_argument(
    "--markdown", metavar="FILE", help="write the table there too; - prints it"
  )
  return flags


def told(flags: argparse.ArgumentParser) -> argparse.Namespace:
  """Returns what the command line says; tiny shapes take little time."""
  args = flags.parse_args()
  if args.smoke:
    args.seconds = 0.02
  return args


def each_shape(measure, shapes, args) -> tuple[list, list]:
  """(rows, wrong) of all shapes by `measure(shape, ways, dtype, seconds)`."""
  rows, wrong = [], []
  for shape in shapes:
    found, errors = measure(
      shape, args.implementations, jnp.dtype(args.dtype), args.seconds
    )
    rows += found
    wrong += errors
  return rows, wrong


def finish(args, name: str, rows, lines, legend: str, wrong) -> int:
  """Prints and writes what was found; returns the exit code.

  Args:
    args: what was told.
    name: of the benchmark.
    rows: of the CSV file.
    lines: of the table.
    legend: what stands below the table.
    wrong: results that are, in words.
  """
  print(f"\n{as_text(lines)}\n\n{legend}")
  args.out.mkdir(parents=True, exist_ok=True)
  write_csv(rows, args.out / f"{name}.csv")
  if args.markdown:
    write_markdown(as_markdown(lines, title(args.dtype)), args.markdown, name)
  for text in wrong:
    print(f"WRONG: {text}", file=sys.stderr)
  return 1 if wrong else 0


def speeds(size: int, seconds: float, rate: float) -> dict:
  """Cells of a row: of a call that moves `size` bytes beside a copy's rate."""
  return {
    "ms": seconds * 1e3,
    "gb_per_s": size / seconds / 1e9,
    "share_of_copy": size / seconds / rate,
    "copy_gb_per_s": rate / 1e9,
  }


def title(dtype: str) -> str:
  """Returns where and with what it was measured."""
  text = f"{jax.devices()[0].device_kind}, {dtype}, jax {jax.__version__}"
  if HAS_TORCH:
    text += f", torch {importlib.metadata.version('torch')}"
  return text


def median_time(call, wait, seconds: float, blocks: int = 5) -> float:
  """Returns the device's seconds for one call.

  The median of `blocks` blocks; a block is as many calls as fill that part of
  `seconds`, and one more, queued one behind the other, with one wait at its
  end, less the time of one call and a wait: a third of a millisecond to begin
  and to wait is no call's.
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
    wait(call())
    one = time.perf_counter() - start
    start = time.perf_counter()
    for _ in range(count + 1):
      result = call()
    wait(result)
    every = time.perf_counter() - start
    # On a busy host one call may take as long as all: what they took together
    # is then too much for each, where what is left would be nothing.
    times.append((every - one) / count if every > one else every / (count + 1))
  return statistics.median(times)


def _in_turn(call, sets):
  """Results of `call` of each of `sets`, one by one."""
  results = []
  for args in sets:
    if results:
      args, results[-1] = lax.optimization_barrier((args, results[-1]))
    results.append(call(*args))
  return results


class InTurn:
  """A compiled program: `call` of one set of arguments after another.

  What the host has to do for a program is divided among its calls. None of them
  begins before the one before it has ended, and none is merged with another.
  The program returns the first call's result and a number that has taken one
  of every other's: an array that a program returns costs the host more than a
  small call takes the device, and a model keeps few of its results.

  A run's results lie where the run before had put its own, so those are gone
  by then: XLA runs a program as a graph that names its buffers, and the host
  has to write it anew if one of them has moved. Nor are arguments passed more
  than once, however many calls have them.
  """

  def __init__(self, call, sets: list, turns: list[int] | None = None,
               **options):
    """Compiles it.

    Args:
      call: a function of arrays.
      sets: tuples of its arguments, or of their shapes.
      turns: which set each call has; by default each set once.
      **options: of jax.jit.
    """
    turns = range(len(sets)) if turns is None else turns

    def program(sets, last):
      del last  # Its memory is what is wanted.
      results = lax.optimization_barrier(
        _in_turn(call, [sets[i] for i in turns])
      )
      one = lambda x: x[(0,) * x.ndim].astype(jnp.float32)
      return results[0], sum(map(one, jax.tree.leaves(results[1:])), 0.0)

    shape = jax.eval_shape(lambda sets: program(sets, None), sets)
    self._program = (
      jax.jit(program, donate_argnums=1, keep_unused=True, **options)
      .lower(sets, shape)
      .compile()
    )
    self._shape, self._last = shape, None
    self.calls = len(turns)

  def __call__(self, sets: list):
    """Runs it with arrays for `sets`; returns (result, number)."""
    if self._last is None:
      self._last = jax.tree.map(lambda t: jnp.zeros(t.shape, t.dtype),
                                self._shape)
    self._last = self._program(sets, self._last)
    return self._last

  def time(self, sets: list, seconds: float) -> float:
    """Returns the device's seconds for one call."""
    run = lambda: self(sets)
    return median_time(run, jax.block_until_ready, seconds) / self.calls


def time_in_turn(call, sets: list, seconds: float):
  """Returns (the device's seconds for one call, the first call's result).

  Programs that a host could not keep up with have the calls again and again.
  """
  program = InTurn(call, sets)
  took = program.time(sets, seconds)
  for many in MANY if jax.default_backend() != "cpu" else ():
    if took * program.calls < SHORT_PROGRAM and many > program.calls:
      program = InTurn(call, sets, [i % len(sets) for i in range(many)])
      took = program.time(sets, seconds)
  return took, program(sets)[0]


def copy_rate(
  size: int, seconds: float, torch_too: bool = False, sets: int = 1
) -> float:
  """Returns bytes that a copy reads and writes a second, of `size` in all.

  The copy is the driver's own, which XLA calls, `sets` times one by one, or
  PyTorch's if that is told and is the faster one. Copies are all returned: XLA
  makes none that is not.
  """
  x = jnp.zeros(size // 4, jnp.uint16)
  xs = [(x + i,) for i in range(sets)]
  copy = jax.jit(lambda xs: _in_turn(jnp.copy, xs))
  took = median_time(lambda: copy(xs), jax.block_until_ready, seconds)
  times = [took / sets]
  if torch_too and HAS_TORCH and jax.devices()[0].platform == "gpu":
    import torch  # noqa: PLC0415

    source = torch.zeros(x.nbytes, dtype=torch.int8, device="cuda")
    target = torch.empty_like(source)
    times.append(
      median_time(
        lambda: target.copy_(source),
        lambda _: torch.cuda.synchronize(),
        seconds,
      )
    )
  return 2 * x.nbytes / min(times)


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
  """Writes between a file's two markers of the name, or both behind it."""
  if path == "-":
    print(text)
    return
  file = pathlib.Path(path)
  begin, end = (f"<!-- {name}: {side} -->" for side in ("begin", "end"))
  old = file.read_text() if file.exists() else ""
  before, after = old, "\n"
  if begin in old and end in old:
    before, after = old.split(begin)[0], old.split(end)[1]
  file.write_text(f"{before}{begin}\n{text}{end}{after}")


def write_csv(rows: list[dict], path: pathlib.Path) -> None:
  with open(path, "w", newline="") as f:
    writer = csv.DictWriter(f, rows[0])
    writer.writeheader()
    writer.writerows(rows)
