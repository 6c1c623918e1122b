# SPDX-License-Identifier: Apache-2.0
"""Times rotary embedding, forward and backward: ours and XLA's fusion.

  python rope.py                    the whole list of shapes.py
  python rope.py --only llama       problems with that in their name
  python rope.py --random 20        so many drawn by --seed, behind the list
  python rope.py --smoke            tiny shapes, on any platform

Prints a table and writes rope.csv to --out. The exit code is 1 if a result of
ours is far from XLA's.

Rotary embedding does little but move memory, so a figure is a share of the rate
at which the device copies a tensor of the same size, measured beside it: the
bytes that a call must move (shapes.py), by its time, by the copy's bytes by its
time. "2c" is queries and keys together, "1c" queries alone. How a program of
SETS calls is timed: report.time_in_turn. Backward is the
gradient of the vectors alone.
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
KINDS = ("1c", "2c")
PASSES = ("forward", "backward")
# XLA makes a graph of five calls or more; of fewer, the host launches each.
SETS = 8


def formula(shape: shapes.Rope, positions, cos, sin, *vectors):
  """Rotary embedding as one writes it with jax.numpy, in float32."""
  own = lambda t: (t[:shape.seq] if positions is None else t[positions])[
    ..., None, :
  ].astype(jnp.float32)
  cos, sin = own(cos), own(sin)
  out = []
  for x in vectors:
    part = x[..., : shape.d_rot].astype(jnp.float32)
    if shape.style == "neox":
      x1, x2 = jnp.split(part, 2, -1)
      turned = jnp.concatenate([x1 * cos - x2 * sin, x2 * cos + x1 * sin], -1)
    else:
      x1, x2 = part[..., ::2], part[..., 1::2]
      turned = jnp.stack([x1 * cos - x2 * sin, x2 * cos + x1 * sin], -1)
      turned = turned.reshape(part.shape)
    out.append(
      jnp.concatenate([turned.astype(x.dtype), x[..., shape.d_rot :]], -1)
      if shape.d_rot < shape.head_dim
      else turned.astype(x.dtype)
    )
  return tuple(out)


def our_rope(shape: shapes.Rope, positions, cos, sin, *vectors):
  options = dict(rotate_style=shape.style, positions=positions)
  if len(vectors) == 1:
    return (aiter.rope(*vectors, cos, sin, **options),)
  return aiter.rope_2c(*vectors, cos, sin, **options)


class Program:
  """One problem of one implementation."""

  def __init__(self, name: str, shape: shapes.Rope, kind: str, dtype: str):
    self.function = functools.partial(
      our_rope if name == OURS else formula, shape
    )
    key = jax.random.key(0)
    heads = (shape.q_heads, shape.kv_heads)[: 1 if kind == "1c" else 2]
    normal = lambda i, h: jax.random.normal(
      jax.random.fold_in(key, i),
      (shape.batch, shape.seq, h, shape.head_dim),
      dtype,
    )
    self.vectors = [
      tuple(normal(2 * n + i, h) for i, h in enumerate(heads))
      for n in range(SETS)
    ]
    rows = max(shape.seq, 4096) if shape.positions else shape.seq
    self.tables = aiter.rotary_embedding(shape.d_rot, rows, dtype=shape.table)
    self.positions = None
    if shape.positions:
      self.positions = jax.random.randint(
        key, (shape.batch, shape.seq), 0, rows, jnp.int32
      )

  def run(self, seconds: float):
    """Returns {pass: time of a call}, and some results as float32."""

    def backward(positions, cos, sin, *cotangents):
      # The map is linear: where it is differentiated does not matter.
      turn = functools.partial(self.function, positions, cos, sin)
      return jax.vjp(turn, *cotangents)[1](cotangents)

    args = [(self.positions, *self.tables, *t) for t in self.vectors]
    times, results = {}, []
    for name, call in zip(PASSES, (self.function, backward)):
      times[name], first = report.time_in_turn(call, args, seconds)
      results += first
    return times, [np.asarray(t[:1, :64], np.float32) for t in results]


def measure(shape: shapes.Rope, kind: str, names, dtype: str, seconds: float):
  """Returns (rows of the CSV file, what went wrong) of one problem."""
  size = shape.bytes(kind, jnp.dtype(dtype).itemsize)
  rate = report.copy_rate(size, seconds, sets=SETS)
  found = {n: Program(n, shape, kind, dtype).run(seconds) for n in names}
  off = 0.0
  if len(found) > 1:
    off = report.error(found[OURS][1], found["xla"][1])
  rows = []
  for which in PASSES:
    for name, (times, _) in found.items():
      row = {
        "name": shape.name,
        "kind": kind,
        "pass": which,
        "implementation": name,
        **report.speeds(size, times[which], rate),
        "error": off if name == OURS else 0.0,
      }
      rows.append(row)
      print(
        f"{shape.name:<30}{kind:<4}{which:<9}{name:<6}{row['ms']:>9.4f} ms"
        f"{row['gb_per_s']:>8.0f} GB/s{row['share_of_copy']:>7.3f}",
        flush=True,
      )
  wrong = f"{shape.name} {kind}: {OURS} is off by {off:.3g}"
  return rows, [] if off < 0.02 else [wrong]


def table(rows: list[dict]) -> list[list[str]]:
  """Returns the header and a line a problem: shares of the copy's rate."""
  present = [
    n for n in IMPLEMENTATIONS if any(r["implementation"] == n for r in rows)
  ]
  cells = {
    (r["name"], r["kind"], r["pass"], r["implementation"]): r for r in rows
  }
  lines = [["rope", "tensors", "pass", "copy GB/s", *present, "aiter / xla"]]
  for key in dict.fromkeys((r["name"], r["kind"], r["pass"]) for r in rows):
    mine = [cells.get((*key, n)) for n in present]
    ratio = mine[-1]["ms"] / mine[0]["ms"] if len(mine) > 1 else float("nan")
    lines.append(
      [
        *key,
        f"{mine[0]['copy_gb_per_s']:.0f}",
        *(f"{r['share_of_copy']:.2f}" for r in mine),
        f"{ratio:.2f}",
      ]
    )
  return lines


def drawn(count: int, seed: int) -> list[shapes.Rope]:
  """Returns problems whose sizes are drawn at random."""
  rng = random.Random(seed)
  found = []
  while len(found) < count:
    head_dim = rng.choice((64, 80, 96, 112, 128, 160, 192, 256))
    q_heads = rng.choice((4, 7, 8, 12, 16, 24, 28, 32, 40, 64))
    tokens = rng.randrange(1 << 11, 1 << 16)
    batch = rng.choice((1, 2, 3, 8))
    shape = shapes.Rope(
      f"random_{seed}_{len(found)}",
      batch,
      tokens // batch,
      q_heads,
      rng.choice([n for n in (1, 2, 4, 7, 8, 32) if q_heads % n == 0]),
      head_dim,
      head_dim if rng.random() < 0.7 else head_dim // 2,
      rng.choice(("neox", "neox", "gptj")),
      rng.random() < 0.5,
      rng.choice(("bfloat16", "float32")),
    )
    # Large enough to be bound by memory, small enough to lie in it often.
    if 1 << 25 <= shape.bytes("2c", 2) <= 1 << 31:
      found.append(shape)
  return found


def main() -> int:
  parser = report.parser(__doc__, "rope", IMPLEMENTATIONS, draws=True)
  parser.add_argument("--only", metavar="PART", help="names that have it")
  parser.add_argument("--kinds", nargs="+", choices=KINDS, default=KINDS)
  args = report.told(parser)
  problems = [
    s
    for s in (shapes.ROPE_SMOKE if args.smoke else shapes.ROPE)
    + drawn(args.random, args.seed)
    if not args.only or args.only in s.name
  ]
  if not problems:
    parser.error("no problem has such a name; see shapes.py")
  print(report.title(args.dtype))

  rows, wrong = [], []
  for shape in problems:
    for kind in args.kinds:
      more, bad = measure(
        shape, kind, args.implementations, args.dtype, args.seconds
      )
      rows += more
      wrong += bad

  return report.finish(
    args, "rope", rows, table(rows), "shares of the rate of a copy", wrong
  )


if __name__ == "__main__":
  sys.exit(main())
