# SPDX-License-Identifier: Apache-2.0
"""Times quantisers: ours, and XLA's fusion of the formula.

  python quant.py                    the whole list of shapes.py
  python quant.py --only mxfp4       one kind of scale
  python quant.py --random 20        so many sizes drawn by --seed, behind it
  python quant.py --smoke            tiny shapes, on any platform

Prints a table and writes quant.csv to --out. The exit code is 1 if a result of
ours, times its scale, is far from what was quantised.

A quantiser does little but move memory, so a figure is a share of the rate at
which the device copies a tensor of the same size, measured beside it: the bytes
that a call must move (shapes.py), by its time, by the copy's bytes by its time.
How a program of SETS calls is timed: report.time_in_turn.
"""

import random
import sys

import jax.numpy as jnp
import numpy as np
import report
import shapes

import jax
from jax.experimental import aiter

OURS = "aiter"
IMPLEMENTATIONS = (OURS, "xla")
E4M3 = jnp.float8_e4m3fn
# kind: our function, and rows and columns with one scale (0: all).
KINDS = {
  "token": (lambda x: aiter.per_token_quant(x, quant_dtype=E4M3), 1, 0),
  "token_int8": (lambda x: aiter.per_token_quant(x), 1, 0),
  "group": (lambda x: aiter.per_group_quant(x, quant_dtype=E4M3), 1, 128),
  "block": (lambda x: aiter.per_block_quant(x, quant_dtype=E4M3), 128, 128),
  "mxfp8": (lambda x: aiter.mx_quant(x, quant_dtype=E4M3), 1, 32),
  "mxfp4": (aiter.mx_quant, 1, 32),
}
# What a number may be off by, as a share of the largest of all.
BOUNDS = {"token_int8": 0.005, "mxfp4": 0.26}
# XLA makes a graph of five calls or more; of fewer, the host launches each.
SETS = 8


def formula(kind: str, x):
  """The quantiser as one writes it with jax.numpy, in float32."""
  if kind.startswith("mx"):
    raise report.Unsupported("no formula")
  _, m, n = KINDS[kind]
  rows, cols = x.shape
  n = n or cols
  if rows % m or cols % n:
    raise report.Unsupported("the last scale is of fewer")
  blocks = x.astype(jnp.float32).reshape(rows // m, m, cols // n, n)
  amax = jnp.max(jnp.abs(blocks), (1, 3), keepdims=True)
  if kind == "token_int8":
    scale = jnp.maximum(amax, 1e-10) / 127
    q = jnp.round(blocks / scale).astype(jnp.int8)
  else:
    scale = jnp.maximum(amax, 1e-10) / 448
    q = (blocks / scale).astype(E4M3)
  return q.reshape(rows, cols), scale[:, 0, :, 0]


def error(kind: str, x, q, scale) -> float:
  """How far q * scale is from x, as a share of the largest number."""
  _, m, n = KINDS[kind]
  if kind == "mxfp4":
    q = aiter.unpack_e2m1(q)
  if scale.dtype == jnp.uint8:
    scale = jnp.exp2(scale.astype(jnp.float32) - 127)
  scale = jnp.repeat(jnp.repeat(scale, m, 0), n or x.shape[1], 1)
  back = q.astype(jnp.float32) * scale[: x.shape[0], : x.shape[1]]
  x = x.astype(jnp.float32)
  return float(jnp.max(jnp.abs(back - x)) / jnp.max(jnp.abs(x)))


def measure(shape: shapes.Quant, names, dtype, seconds: float):
  """Returns (rows of the CSV file, what went wrong) of one problem."""
  size = shape.bytes(*KINDS[shape.kind][1:], dtype.itemsize)
  rate = report.copy_rate(size, seconds, sets=SETS)
  sets = [
    (jax.random.normal(jax.random.key(i), (shape.rows, shape.cols), dtype),)
    for i in range(SETS)
  ]
  rows, off = [], 0.0
  for name in names:
    function = KINDS[shape.kind][0]
    if name != OURS:
      function = lambda x: formula(shape.kind, x)
    try:
      time, first = report.time_in_turn(function, sets, seconds)
    except report.Unsupported:
      continue
    if name == OURS:
      off = error(shape.kind, *sets[0], *first)
    rows.append({
      **shape._asdict(),
      "implementation": name,
      **report.speeds(size, time, rate),
      "error": off if name == OURS else float(np.nan),
    })
    print(
      f"{shape.kind:<11}{shape.rows:>7} x {shape.cols:<7}{name:<6}"
      f"{time * 1e6:>9.2f} us{rows[-1]['share_of_copy']:>7.3f} of copy",
      flush=True,
    )
  wrong = off > BOUNDS.get(shape.kind, 0.07)
  return rows, [f"{shape}: {OURS} is off by {off:.3g}"] if wrong else []


def table(rows: list[dict]) -> list[list[str]]:
  """Returns the header and a line a problem: shares of the copy's rate."""
  lines = [["scale for", "rows x columns", "copy GB/s", *IMPLEMENTATIONS]]
  for shape in dict.fromkeys((r["kind"], r["rows"], r["cols"]) for r in rows):
    mine = {r["implementation"]: r for r in rows
            if (r["kind"], r["rows"], r["cols"]) == shape}
    lines.append([
      shape[0],
      f"{shape[1]} x {shape[2]}",
      f"{next(iter(mine.values()))['copy_gb_per_s']:.0f}",
      *(f"{mine[n]['share_of_copy']:.2f}" if n in mine else "-"
        for n in IMPLEMENTATIONS),
    ])
  return lines


def drawn(count: int, seed: int) -> list[shapes.Quant]:
  """Returns problems whose sizes are drawn at random, in the logarithm."""
  rng = random.Random(seed)
  found = []
  for _ in range(count):
    step = rng.choice((128, 128, 128, 32, 8, 2))
    cols = max(round(2 ** rng.uniform(6, 15) / step), 1) * step
    rows = max(int(2 ** rng.uniform(16, 27)) // cols, 1)
    found.append(shapes.Quant(rng.choice(tuple(KINDS)), rows, cols))
  return found


def main() -> int:
  parser = report.parser(__doc__, "quant", IMPLEMENTATIONS, draws=True)
  parser.add_argument("--only", choices=tuple(KINDS))
  args = report.told(parser)
  sizes = shapes.QUANT_SMOKE if args.smoke else shapes.QUANT
  problems = [shapes.Quant(k, *size) for size in sizes for k in KINDS]
  problems += drawn(args.random, args.seed)
  print(report.title(args.dtype))
  rows, wrong = report.each_shape(
    measure, [s for s in problems if args.only in (None, s.kind)], args
  )
  return report.finish(
    args, "quant", rows, table(rows), "shares of the rate of a copy", wrong
  )


if __name__ == "__main__":
  sys.exit(main())
