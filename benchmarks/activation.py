# SPDX-License-Identifier: Apache-2.0
"""Times gated activations: ours and XLA's fusion of the formula.

  python activation.py                    the whole list of shapes.py
  python activation.py --random 20        so many drawn by --seed, behind it
  python activation.py --smoke            tiny shapes, on any platform

Prints a table and writes activation.csv to --out. The exit code is 1 if a
result of ours is far from XLA's.

An activation does little but move memory, so a figure is a share of the rate at
which the device copies a tensor of the same size, measured beside it: the bytes
that a call must move (shapes.py), by its time, by the copy's bytes by its time.
"token" and "group" are results in float8 with a scale a row, and one for 128
columns. How a call is timed: report.time_in_turn.
"""

import functools
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
FUNCTIONS = {
    "silu": jax.nn.silu,
    "gelu": functools.partial(jax.nn.gelu, approximate=False),
    "gelu_tanh": jax.nn.gelu,
}
PASSES = ("forward", "backward", "token", "group")
GROUP = 128
# XLA makes a graph of five calls or more; of fewer, the host launches each.
SETS = 8


def formula(name, x):
  """The activation as one writes it with jax.numpy, in float32."""
  gate, up = jnp.split(x.astype(jnp.float32), 2, -1)
  return (FUNCTIONS[name](gate) * up).astype(x.dtype)


def quantised(name, group, x):
  """The same in float8, with a scale a row or for `group` columns."""
  gate, up = jnp.split(x.astype(jnp.float32), 2, -1)
  y = FUNCTIONS[name](gate) * up
  whole = y.shape
  if group:
    y = y.reshape(*whole[:-1], -1, group)
  amax = jnp.max(jnp.abs(y), -1, keepdims=True)
  scale = jnp.maximum(amax, 1e-10) / 448
  q = (y / scale).astype(jnp.float8_e4m3fn)
  return q.reshape(whole), scale.reshape(*whole[:-1], -1)


def functions(implementation, name):
  """{pass: function of x, or of (x, dy)}."""
  if implementation == OURS:
    forward = getattr(aiter, f"{name}_and_mul")
    of = functools.partial(getattr(aiter, f"{name}_and_mul_quant"),
                           quant_dtype=jnp.float8_e4m3fn)
    token, group = of, functools.partial(of, group_size=GROUP)
  else:
    forward = functools.partial(formula, name)
    token, group = (functools.partial(quantised, name, g) for g in (0, GROUP))
  return {
      "forward": forward,
      "backward": lambda x, dy: jax.vjp(forward, x)[1](dy)[0],
      "token": token, "group": group}


def run(implementation, shape: shapes.Activation, dtype: str, seconds: float):
  """Returns {pass: time of a call}, and some results as float32."""
  normal = lambda i, cols: jax.random.normal(
      jax.random.key(i), (shape.rows, cols), dtype)
  sets = [(normal(2 * i, 2 * shape.cols), normal(2 * i + 1, shape.cols))
          for i in range(SETS)]
  times, results = {}, []
  for which, function in functions(implementation, shape.function).items():
    if which == "group" and shape.cols % GROUP:
      continue
    args = sets if which == "backward" else [(x,) for x, _ in sets]
    times[which], out = report.time_in_turn(function, args, seconds)
    if which in ("token", "group"):
      q, scale = (np.asarray(t[:64], np.float32) for t in out)
      out = q.reshape(q.shape[0], scale.shape[-1], -1) * scale[..., None]
    results.append(np.asarray(out[:64], np.float32))
  return times, results


def measure(shape: shapes.Activation, dtype: str, seconds: float):
  """Returns (rows of the CSV file, what went wrong) of one problem."""
  found = {n: run(n, shape, dtype, seconds) for n in IMPLEMENTATIONS}
  off = report.error(found[OURS][1], found["xla"][1])
  rows = []
  for which in found[OURS][0]:
    size = shape.bytes(which, jnp.dtype(dtype).itemsize)
    rate = report.copy_rate(size, seconds, sets=SETS)
    for name, (times, _) in found.items():
      rows.append({
          "function": shape.function, "rows": shape.rows, "cols": shape.cols,
          "pass": which, "implementation": name,
          **report.speeds(size, times[which], rate),
          "error": off if name == OURS else 0.0})
    print(f"{shape}: {which} {rows[-2]['ms']:.4f} ms, xla {rows[-1]['ms']:.4f}",
          flush=True)
  return rows, [] if off < 0.07 else [f"{shape}: {OURS} is off by {off:.3g}"]


def table(rows: list[dict]) -> list[list[str]]:
  """Returns the header and a line a problem: shares of the copy's rate."""
  lines = [["activation", "rows x cols", "pass", "copy GB/s", *IMPLEMENTATIONS,
            "aiter / xla"]]
  for ours, xla in zip(rows[::2], rows[1::2]):
    lines.append([
        ours["function"], f"{ours['rows']} x {ours['cols']}", ours["pass"],
        f"{ours['copy_gb_per_s']:.0f}",
        *(f"{r['share_of_copy']:.2f}" for r in (ours, xla)),
        f"{xla['ms'] / ours['ms']:.2f}"])
  return lines


def drawn(count: int, seed: int) -> list[shapes.Activation]:
  """Returns problems whose sizes are drawn at random."""
  rng = random.Random(seed)
  found = []
  while len(found) < count:
    shape = shapes.Activation(
        rng.choice(tuple(FUNCTIONS)), rng.randrange(1, 1 << 15),
        128 * rng.randrange(1, 160) + rng.choice((0, 0, 0, 8, 40)))
    if 1 << 23 <= shape.rows * shape.cols <= 1 << 28:
      found.append(shape)
  return found


def main() -> int:
  args = report.told(report.parser(__doc__, "activation", draws=True))
  problems = shapes.ACTIVATION_SMOKE if args.smoke else shapes.ACTIVATION
  problems = problems + drawn(args.random, args.seed)
  print(report.title(args.dtype))
  rows, wrong = [], []
  for shape in problems:
    more, bad = measure(shape, args.dtype, args.seconds)
    rows += more
    wrong += bad
  return report.finish(args, "activation", rows, table(rows),
                       "shares of the rate of a copy", wrong)


if __name__ == "__main__":
  sys.exit(main())
