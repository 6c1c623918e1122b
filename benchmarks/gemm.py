# SPDX-License-Identifier: Apache-2.0
"""Times matrix products: ours, XLA's (cuBLAS) and PyTorch's (cuBLAS).

  python gemm.py                    the whole list of shapes.py
  python gemm.py --only fp8         kinds and sizes whose name contains this
  python gemm.py --random 24        sizes that nobody has tuned: of bf16, or of
                                    --kind, drawn by --seed
  python gemm.py --smoke            tiny shapes, on any platform

Prints a table and writes gemm.csv to --out. The exit code is 1 if a result of
ours is far from the other implementations'.

How it is timed. A program, report.InTurn, is one product after the other, so
many that they take the device longer than the host, --turns at most, of so many
pairs of operands that no cache holds the weights: as in a model, they come from
memory. All are compiled before the first one is timed, side by side. PyTorch's
is recorded as a CUDA graph. A figure is report.median_time of the program, by
its number of products. Backward is that of a and b together, two products each.
Operands are normal numbers: a GPU's clock depends on them.

PyTorch multiplies by torch.matmul; by torch._int_mm, which does not scale, so
int8's results are compared with XLA's only; and by torch._scaled_mm. XLA scales
what it multiplies in int8 or float8 and, of blocks, widens to bfloat16 first.
"""

import concurrent.futures
import functools
import math
import os
import sys

# Leave room for PyTorch beside XLA's own pool.
os.environ.setdefault("XLA_PYTHON_CLIENT_MEM_FRACTION", "0.5")

import jax.numpy as jnp
import numpy as np
import report
import shapes

import jax
from jax.experimental import aiter

OURS = "aiter"
IMPLEMENTATIONS = (OURS, "xla", "torch")
BLOCK = 128
# More than any cache holds.
COLD_BYTES = 192 << 20
# Of the device, for a program: longer than the host takes for one.
PROGRAM_SECONDS = 5e-4


def name_of(shape: shapes.Gemm) -> str:
  return f"{shape.kind} {shape.m}x{shape.n}x{shape.k}"


def turns(shape: shapes.Gemm, most: int) -> list[int]:
  """Which pair of operands each product of a program has."""
  roughly = 3e-6 + shape.flops(backward=False) / 6e14
  products = min(max(round(PROGRAM_SECONDS / roughly), 1), most)
  size = shape.n * shape.k * (2 if shape.kind == "bf16" else 1)
  pairs = min(max(COLD_BYTES // size, 1), products)
  return [i % pairs for i in range(products)]


def inputs(shape: shapes.Gemm) -> list[np.ndarray]:
  """Returns float32 a, b and, where the kind has them, their scales.

  a and b have their first rows alone, which the others repeat: the host does
  not make random numbers for minutes.
  """
  rng = np.random.default_rng(0)
  m, n, k = shape.m, shape.n, shape.k
  a, b = (rng.standard_normal((min(r, 509), k), np.float32) for r in (m, n))
  if shape.kind == "int8":
    a, b = (np.rint(x * 32).clip(-127, 127) for x in (a, b))
  if shape.kind == "bf16":
    return [a, b]
  sizes = ((m, 1), (1, n))
  if shape.kind == "fp8_block":
    sizes = ((m, -(-k // BLOCK)), (-(-n // BLOCK), -(-k // BLOCK)))
  return [a, b, *(rng.uniform(0.5, 1, s).astype(np.float32) for s in sizes)]


def spread(scale, shape):
  """Returns a scale for each element."""
  for axis, size in enumerate(shape):
    if scale.shape[axis] != size:
      scale = jnp.repeat(scale, BLOCK, axis)
  return scale[: shape[0], : shape[1]]


def formula(kind: str, a, b, a_scale=None, b_scale=None):
  """The product as one writes it with jax.numpy."""
  if kind == "bf16":
    return jnp.dot(a, b.T)
  if kind == "int8":
    x = jnp.dot(a, b.T, preferred_element_type=jnp.int32)
  elif kind == "fp8":
    x = jnp.dot(a, b.T, preferred_element_type=jnp.float32)
  else:
    a, b = (
      (x.astype(jnp.float32) * spread(scale, x.shape)).astype(jnp.bfloat16)
      for x, scale in ((a, a_scale), (b, b_scale))
    )
    return jnp.dot(a, b.T)
  return (x * a_scale * b_scale).astype(jnp.bfloat16)


def our_gemm(kind: str, *operands):
  name = {"bf16": "gemm", "int8": "gemm_i8"}.get(kind, "gemm_fp8")
  return getattr(aiter, name)(*operands)


class JaxProgram:
  """One problem of one JAX implementation."""

  def __init__(self, name: str, shape: shapes.Gemm, dtype: str, most: int):
    self.function = functools.partial(
      our_gemm if name == OURS else formula, shape.kind
    )
    types = {"bf16": dtype, "int8": "int8"}
    self.types = [types.get(shape.kind, "float8_e4m3fn")] * 2 + ["float32"] * 2
    self.shape, self.turns = shape, turns(shape, most)
    self.backward = shape.kind == "bf16" and shape.m >= 1024
    few = inputs(shape)
    sizes = (
      (shape.m, shape.k),
      (shape.n, shape.k),
      *(t.shape for t in few[2:]),
    )
    one = [
      jax.ShapeDtypeStruct(size, t)
      for size, t in zip(sizes, self.types[: len(few)], strict=True)
    ]
    pairs = max(self.turns) + 1
    self.forward = report.InTurn(self.function, [one] * pairs, self.turns)
    if self.backward:
      out = jax.eval_shape(self.function, *one)
      gradients = lambda d, *x: jax.vjp(self.function, *x)[1](d)
      self.gradients = report.InTurn(
        gradients, [(out, *one)] * pairs, self.turns
      )

  def run(self, seconds: float):
    """Returns {pass: time of a product}, and results as float32."""
    a, b, *scales = map(jnp.asarray, inputs(self.shape))
    a, b = (
      jnp.resize(x, (rows, self.shape.k)).astype(t)
      for x, rows, t in zip((a, b), self.shape[1:3], self.types)
    )
    pairs = [
      [jnp.roll(a, i, 0), jnp.roll(b, i, 0), *scales]
      for i in range(max(self.turns) + 1)
    ]

    times = {"forward": self.forward.time(pairs, seconds)}
    results = [out := self.forward(pairs)[0]]
    if self.backward:
      pairs = [(jnp.roll(out, i, 0), *x) for i, x in enumerate(pairs)]
      times["backward"] = self.gradients.time(pairs, seconds)
      results += self.gradients(pairs)[0]
    return times, [np.asarray(x.astype(jnp.float32)) for x in results]


class TorchProgram:
  """PyTorch's product on the same GPU."""

  def __init__(self, shape: shapes.Gemm, dtype: str, most: int):
    if not report.HAS_TORCH or jax.devices()[0].platform != "gpu":
      raise report.Unsupported("no PyTorch or no GPU")
    import torch  # noqa: PLC0415

    types = {"bf16": getattr(torch, dtype), "int8": torch.int8}
    self.type = types.get(shape.kind, torch.float8_e4m3fn)
    self.kind, self.shape = shape.kind, shape
    self.turns = turns(shape, most)
    self.backward = shape.kind == "bf16" and shape.m >= 1024

  def sets(self):
    """Operands of every product of a program."""
    import torch  # noqa: PLC0415

    a, b, *scales = (torch.tensor(x).cuda() for x in inputs(self.shape))
    a, b = (
      x[torch.arange(rows, device="cuda") % len(x)].to(self.type)
      for x, rows in zip((a, b), self.shape[1:3])
    )
    if self.kind == "fp8_block":  # as cuBLAS wants them
      scales = [scales[0].t().contiguous().t(), scales[1].t()]
    roll = lambda x, i: x.view(torch.uint8).roll(i, 0).view(x.dtype) if i else x
    pairs = range(max(self.turns) + 1)
    pairs = [[roll(a, i), roll(b, i), *scales] for i in pairs]
    return [pairs[i] for i in self.turns]

  def function(self, a, b, a_scale=None, b_scale=None):
    import torch  # noqa: PLC0415

    if self.kind == "bf16":
      return torch.matmul(a, b.t())
    if self.kind == "int8":
      return torch._int_mm(a, b.t())
    return torch._scaled_mm(
      a, b.t(), scale_a=a_scale, scale_b=b_scale, out_dtype=torch.bfloat16
    )

  def run(self, seconds: float):
    import torch  # noqa: PLC0415

    def time(function, sets):
      out = [function(*s) for s in sets]  # cuBLAS makes its workspace
      torch.cuda.synchronize()
      graph = torch.cuda.CUDAGraph()
      # JAX's threads may call CUDA meanwhile.
      with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        out = [function(*s) for s in sets]
      t = report.median_time(
        graph.replay, lambda _: torch.cuda.synchronize(), seconds
      )
      return t / len(sets), out[0]

    sets = self.sets()
    forward, out = time(self.function, sets)
    times, results = {"forward": forward}, [out]
    if self.backward:
      times["backward"], out = time(
        lambda a, b, d: (torch.matmul(d, b), torch.matmul(d.t(), a)),
        [(*s, results[0].roll(i, 0)) for i, s in enumerate(sets)],
      )
      results += out
    if self.kind == "int8":
      results = None  # They are not scaled.
    else:
      results = [x.float().cpu().numpy() for x in results]
    return times, results


def programs(problems, names, dtype, most):
  """Returns {(problem, implementation): its program or why there is none}."""

  def program(shape, which):
    try:
      if which == "torch":
        return TorchProgram(shape, dtype, most)
      return JaxProgram(which, shape, dtype, most)
    except Exception as e:  # an implementation's refusal has any type
      if which == OURS:
        raise
      return e

  pairs = [(shape, which) for shape in problems for which in names]
  with concurrent.futures.ThreadPoolExecutor(os.cpu_count()) as pool:
    return dict(zip(pairs, pool.map(lambda p: program(*p), pairs), strict=True))


def measure(shape, names, compiled, seconds):
  """Returns (rows of the CSV file, what went wrong) of one problem."""
  rows, found, name = [], {}, name_of(shape)
  for which in names:
    try:
      program = compiled.pop((shape, which))
      if isinstance(program, Exception):
        raise program
      found[which] = program.run(seconds)
    except Exception as e:  # likewise
      if which == OURS:
        raise
      print(f"{name}: no {which}: {str(e).splitlines()[0][:90]}")
  others = (found[n][1] for n in names if n != OURS and n in found)
  theirs = next((results for results in others if results), None)
  off = 0.0
  if theirs and OURS in found:
    off = report.error(found[OURS][1], theirs)
  for which, (times, _) in found.items():
    for passing, t in times.items():
      row = {
        "kind": shape.kind,
        "m": shape.m,
        "n": shape.n,
        "k": shape.k,
        "pass": passing,
        "implementation": which,
        "us": t * 1e6,
        "tflops": shape.flops(passing == "backward") / t / 1e12,
        "error": off if which == OURS else 0.0,
      }
      rows.append(row)
      print(
        f"{name:<28}{passing:<9}{which:<6}{row['us']:>10.1f} us"
        f"{row['tflops']:>8.4g} TFLOP/s",
        flush=True,
      )
  return rows, [] if off < 0.05 else [f"{name}: {OURS} is off by {off:.3g}"]


def table(rows: list[dict]) -> list[list[str]]:
  """Returns the header and a line a problem: time, TFLOP/s, ratios."""
  present = [
    n for n in IMPLEMENTATIONS if any(r["implementation"] == n for r in rows)
  ]
  others = [n for n in present if n != OURS]
  cells = {
    (name_of(shapes.Gemm(r["kind"], r["m"], r["n"], r["k"])), r["pass"],
     r["implementation"]): r
    for r in rows
  }  # fmt: skip
  lines = [
    ["m x n x k", "pass", "us", *present, *(f"{OURS}/{n}" for n in others)]
  ]
  for key in dict.fromkeys(key[:2] for key in cells):
    speed = {n: cells[*key, n]["tflops"] for n in present if (*key, n) in cells}
    ours = cells.get((*key, OURS))
    lines.append(
      [
        *key,
        f"{ours['us']:.1f}" if ours else "-",
        *(f"{speed[n]:.3g}" if n in speed else "-" for n in present),
        *(
          f"{speed[OURS] / speed[n]:.2f}" if ours and n in speed else "-"
          for n in others
        ),
      ]
    )
  return lines


def summary(rows: list[dict]) -> str:
  """How much faster ours is than the fastest other implementation."""
  speed = {}
  for r in rows:
    key = (r["kind"], r["m"], r["n"], r["k"], r["pass"])
    speed.setdefault(key, {})[r["implementation"]] = r["tflops"]
  ratios = [s.pop(OURS) / max(s.values()) for s in speed.values() if len(s) > 1]
  if not ratios:
    return ""
  mean = math.exp(sum(map(math.log, ratios)) / len(ratios))
  return (
    f"; {OURS} against the best other of {len(ratios)}: geometric mean"
    f" {mean:.3f}, worst {min(ratios):.3f}"
  )


def main() -> int:
  parser = report.parser(
    __doc__, "gemm", IMPLEMENTATIONS, ("bfloat16", "float16"), draws=True
  )
  parser.add_argument(
    "--only", action="append", metavar="TEXT", help="names with this in them"
  )
  parser.add_argument(
    "--turns", type=int, default=160, help="products of a program, at most"
  )
  parser.add_argument(
    "--kind",
    choices=("bf16", "int8", "fp8", "fp8_block"),
    default="bf16",
    help="of random sizes",
  )
  args = report.told(parser)
  if args.smoke:
    args.turns = 2
  listed = shapes.GEMM_SMOKE if args.smoke else shapes.GEMM
  if args.random:
    listed = shapes.random_gemms(args.kind, args.random, args.seed)
  problems = [
    s for s in listed if any(text in name_of(s) for text in args.only or [""])
  ]
  if not problems:
    parser.error("no problem has that name; see shapes.py")
  print(report.title(args.dtype))

  rows, wrong = [], []
  compiled = programs(problems, args.implementations, args.dtype, args.turns)
  for shape in problems:
    more, bad = measure(shape, args.implementations, compiled, args.seconds)
    rows += more
    wrong += bad

  return report.finish(
    args,
    "gemm",
    rows,
    table(rows),
    f"us: ours; {', '.join(IMPLEMENTATIONS)}: TFLOP/s; last columns: ratios"
    + summary(rows),
    wrong,
  )


if __name__ == "__main__":
  sys.exit(main())
