# SPDX-License-Identifier: Apache-2.0
"""Times RMSNorm and LayerNorm, forward and backward: ours, XLA, torch.compile.

  python norm.py                    the whole list of shapes.py
  python norm.py --only 8192        rows of 8192 columns
  python norm.py --random 20        so many drawn by --seed, behind the list
  python norm.py --smoke            tiny shapes, on any platform

Prints a table and writes norm.csv to --out. The exit code is 1 if a result of
ours is far from the other implementations'.

A norm does little but move memory, so a figure is a share of the rate at which
the device copies a tensor of the same size, measured beside it: the bytes that
a call must move (shapes.py), by its time, by the copy's bytes by its time. How
a program of SETS calls is timed: report.time_in_turn; PyTorch's calls are
queued one by one. Backward is the gradient of x and of the weights alone, from
residuals that a forward pass has left; that of a residual is the same array as
that of x.
"""

import functools
import os
import random
import sys

# Leave room for PyTorch beside XLA's own pool.
os.environ.setdefault("XLA_PYTHON_CLIENT_MEM_FRACTION", "0.6")

import jax.numpy as jnp
import numpy as np
import report
import shapes

import jax
from jax.experimental import aiter

OURS = "aiter"
IMPLEMENTATIONS = (OURS, "xla", "torch")
KINDS = ("rms", "rms_add", "layer", "layer_add")
PASSES = ("forward", "backward")
EPSILON = 1e-6
DISTINCT = 256
# XLA makes a graph of five calls or more; of fewer, the host launches each.
SETS = 8


def inputs(shape: shapes.Norm, kind: str) -> dict[str, np.ndarray]:
  """Returns float32 arrays: what is differentiated, residual, gradients.

  Of the rows only the first DISTINCT; they repeat.
  """
  rng = np.random.default_rng(0)
  normal = functools.partial(rng.standard_normal, dtype=np.float32)
  names = ["x", "dy"]
  if kind.endswith("_add"):
    names += ["residual", "dresidual_out"]
  rows = min(shape.rows, DISTINCT)
  arrays = {n: normal((rows, shape.cols)) for n in names}
  arrays["gamma"] = normal(shape.cols)
  if kind.startswith("layer"):
    arrays["beta"] = normal(shape.cols)
  return arrays


def formula(kind: str, x, residual, gamma, beta):
  """The norm as one writes it with jax.numpy, in float32."""
  s = x.astype(jnp.float32)
  if residual is not None:
    s = s + residual.astype(jnp.float32)
  added = s.astype(x.dtype)
  if kind.startswith("layer"):
    s = s - jnp.mean(s, -1, keepdims=True)
  y = s * jax.lax.rsqrt(jnp.mean(s * s, -1, keepdims=True) + EPSILON)
  y = y * gamma.astype(jnp.float32)
  if beta is not None:
    y = y + beta.astype(jnp.float32)
  y = y.astype(x.dtype)
  return y if residual is None else (y, added)


def our_norm(kind: str, x, residual, gamma, beta):
  name = "layer_norm" if kind.startswith("layer") else "rms_norm"
  rows = (x,) if residual is None else (x, residual)
  weights = (gamma,) if beta is None else (gamma, beta)
  function = getattr(aiter, name + ("" if residual is None else "_with_add"))
  return function(*rows, *weights, epsilon=EPSILON)


class JaxProgram:
  """One problem of one JAX implementation."""

  def __init__(self, name: str, shape: shapes.Norm, kind: str, dtype: str):
    self.function = functools.partial(
      our_norm if name == OURS else formula, kind
    )
    times = -(-shape.rows // DISTINCT)
    self.arrays = {
      n: jnp.asarray(t, dtype)
      if t.ndim == 1
      else jnp.tile(jnp.asarray(t, dtype), (times, 1))[: shape.rows]
      for n, t in inputs(shape, kind).items()
    }

  def run(self, seconds: float):
    """Returns {pass: time of a call}, and [y, dx, dgamma] as float32.

    Of y and dx the first DISTINCT rows.
    """
    a = self.arrays
    wait = jax.block_until_ready
    get = lambda name: a.get(name)
    args = (a["x"], get("residual"), a["gamma"], get("beta"))
    tree = None

    def time_of(function, *args):
      # No cache holds what one call leaves to the next.
      return report.time_in_turn(function, [args] * SETS, seconds)[0]

    @jax.jit
    def residuals(x, residual, gamma, beta):
      nonlocal tree
      function = lambda x, *weights: self.function(x, residual, *weights)
      out, vjp = jax.vjp(function, x, gamma, beta)
      leaves, tree = jax.tree.flatten(vjp)
      return out, leaves

    out, leaves = wait(residuals(*args))
    backward = lambda leaves, d: jax.tree.unflatten(tree, leaves)(d)
    d = a["dy"]
    if "residual" in a:
      out, d = out[0], (a["dy"], a["dresidual_out"])
    times = {
      "forward": time_of(self.function, *args),
      "backward": time_of(backward, leaves, d),
    }
    results = [out, *jax.jit(backward)(leaves, d)[:2]]
    return times, [
      np.asarray(t[:DISTINCT] if t.ndim == 2 else t, np.float32)
      for t in results
    ]


class TorchProgram:
  """PyTorch's norm, compiled, on the same GPU."""

  def __init__(self, shape: shapes.Norm, kind: str, dtype: str):
    if not report.HAS_TORCH or jax.devices()[0].platform != "gpu":
      raise report.Unsupported("no PyTorch or no GPU")
    import torch  # noqa: PLC0415

    torch._dynamo.reset()  # It stops compiling after a few shapes.
    self.kind, self.cols = kind, shape.cols
    times = -(-shape.rows // DISTINCT)
    self.arrays = {}
    for name, t in inputs(shape, kind).items():
      t = torch.tensor(t, device="cuda", dtype=getattr(torch, dtype))
      if t.ndim == 2:
        t = t.repeat(times, 1)[: shape.rows].contiguous()
      self.arrays[name] = t

  def run(self, seconds: float):
    import torch  # noqa: PLC0415

    a, size = self.arrays, (self.cols,)
    functional = torch.nn.functional

    @torch.compile(dynamic=False)
    def norm(x, residual, gamma, beta):
      s = x if residual is None else x + residual
      if self.kind.startswith("layer"):
        y = functional.layer_norm(s, size, gamma, beta, EPSILON)
      else:
        y = functional.rms_norm(s, size, gamma, EPSILON)
      return y if residual is None else (y, s)

    def forward():
      return norm(a["x"], a.get("residual"), a["gamma"], a.get("beta"))

    def wait(_):
      torch.cuda.synchronize()

    times = {"forward": report.median_time(forward, wait, seconds)}
    wanted = [a[n].requires_grad_() for n in ("x", "gamma", "beta") if n in a]
    out = forward()
    outs, d = [out], [a["dy"]]
    if "residual" in a:
      outs, d = list(out), [a["dy"], a["dresidual_out"]]
    backward = functools.partial(
      torch.autograd.grad, outs, wanted, d, retain_graph=True
    )
    times["backward"] = report.median_time(backward, wait, seconds)
    results = [outs[0], *backward()[:2]]
    return times, [
      (t[:DISTINCT] if t.ndim == 2 else t).detach().float().cpu().numpy()
      for t in results
    ]


def measure(shape, kind, names, dtype, rate, seconds):
  """Returns (rows of the CSV file, what went wrong) of one problem."""
  rows, found = [], {}
  for name in names:
    try:
      program = (
        TorchProgram(shape, kind, dtype)
        if name == "torch"
        else JaxProgram(name, shape, kind, dtype)
      )
      found[name] = program.run(seconds)
    except Exception as e:  # out of memory has any type
      if name == OURS:
        raise
      print(f"{shape.cols} {kind}: no {name}: {str(e).splitlines()[0][:90]}")
  theirs = next((found[n][1] for n in names if n != OURS and n in found), None)
  off = 0.0
  if theirs and OURS in found:
    off = report.error(found[OURS][1], theirs)
  for name, (times, _) in found.items():
    for which in PASSES:
      size = shape.bytes(kind, which == "backward", jnp.dtype(dtype).itemsize)
      row = {
        "cols": shape.cols,
        "rows": shape.rows,
        "kind": kind,
        "pass": which,
        "implementation": name,
        **report.speeds(size, times[which], rate),
        "error": off if name == OURS else 0.0,
      }
      rows.append(row)
      print(
        f"{shape.rows:>7} x {shape.cols:<7}{kind:<10}{which:<9}{name:<6}"
        f"{row['ms']:>9.3f} ms"
        f"{row['gb_per_s']:>8.0f} GB/s{row['share_of_copy']:>7.3f}",
        flush=True,
      )
  wrong = f"{shape.cols} {kind}: {OURS} is off by {off:.3g}"
  return rows, [] if off < 0.05 else [wrong]


def table(rows: list[dict]) -> list[list[str]]:
  """Returns the header and a line a problem: shares of the copy's rate."""
  present = [
    n for n in IMPLEMENTATIONS if any(r["implementation"] == n for r in rows)
  ]
  cells = {
    (r["rows"], r["cols"], r["kind"], r["pass"], r["implementation"]): r
    for r in rows
  }
  lines = [["rows x columns", "norm", "pass", "copy GB/s", *present]]
  for key in dict.fromkeys(
    (r["rows"], r["cols"], r["kind"], r["pass"]) for r in rows
  ):
    mine = [cells.get((*key, n)) for n in present]
    rate = next(r["copy_gb_per_s"] for r in mine if r)
    lines.append(
      [
        f"{key[0]} x {key[1]}",
        *key[2:],
        f"{rate:.0f}",
        *(f"{r['share_of_copy']:.2f}" if r else "-" for r in mine),
      ]
    )
  return lines


def drawn(count: int, seed: int) -> list[shapes.Norm]:
  """Returns problems whose sizes are drawn at random.

  Evenly in the logarithm: columns, of which one in three is no multiple of 64
  and one in six not even of 8, and numbers in all.
  """
  rng = random.Random(seed)
  found = []
  for _ in range(count):
    step = rng.choice((64, 64, 64, 64, 8, 1))
    cols = max(round(2 ** rng.uniform(6, 15.5) / step), 1) * step
    rows = max(int(2 ** rng.uniform(16, 27)) // cols, 1)
    found.append(shapes.Norm(rows, cols))
  return found


def main() -> int:
  parser = report.parser(__doc__, "norm", IMPLEMENTATIONS, draws=True)
  parser.add_argument(
    "--only", action="append", type=int, metavar="COLS", help="these columns"
  )
  parser.add_argument("--kinds", nargs="+", choices=KINDS, default=KINDS)
  args = report.told(parser)
  problems = [
    s
    for s in (shapes.NORM_SMOKE if args.smoke else shapes.NORM)
    if not args.only or s.cols in args.only
  ] + drawn(args.random, args.seed)
  if not problems:
    parser.error("no problem has so many columns; see shapes.py")
  print(report.title(args.dtype))

  rows, wrong = [], []
  for shape in problems:
    size = 2 * shape.rows * shape.cols * jnp.dtype(args.dtype).itemsize
    rate = report.copy_rate(size, args.seconds, torch_too=True, sets=SETS)
    for kind in args.kinds:
      more, bad = measure(
        shape, kind, args.implementations, args.dtype, rate, args.seconds
      )
      rows += more
      wrong += bad

  return report.finish(
    args, "norm", rows, table(rows), "shares of the rate of a copy", wrong
  )


if __name__ == "__main__":
  sys.exit(main())
