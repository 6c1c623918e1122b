# SPDX-License-Identifier: Apache-2.0
"""Times matrix products: ours, XLA's (cuBLAS) and PyTorch's (cuBLAS).

  python gemm.py                    the whole list of shapes.py
  python gemm.py --only fp8         kinds and sizes whose name contains this
  python gemm.py --smoke            tiny shapes, on any platform

Prints a table and writes gemm.csv to --out. The exit code is 1 if a result of
ours is far from the other implementations'.

How it is timed. A program is one product after the other, of so many pairs of
operands that no cache holds the weights (of small ones --copies): as in a
model, they come from memory. PyTorch's is recorded as a CUDA graph. A figure is
report.median_time of the program, by its number of products. Backward is that
of a and b together, two products each. Operands are normal numbers: a GPU's
clock depends on them.

PyTorch multiplies by torch.matmul; by torch._int_mm, which does not scale, so
int8's results are compared with XLA's only; and by torch._scaled_mm. XLA scales
what it multiplies in int8 or float8 and, of blocks, widens to bfloat16 first.
"""

import functools
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


def name_of(shape: shapes.Gemm) -> str:
  return f"{shape.kind} {shape.m}x{shape.n}x{shape.k}"


def copies(shape: shapes.Gemm, most: int) -> int:
  size = shape.n * shape.k * (2 if shape.kind == "bf16" else 1)
  return min(max(COLD_BYTES // size, 1), most)


def inputs(shape: shapes.Gemm, seed: int) -> list[np.ndarray]:
  """Returns float32 a, b and, where the kind has them, their scales.

  Rows repeat, so that the host does not make random numbers for minutes.
  """
  rng = np.random.default_rng(seed)
  m, n, k = shape.m, shape.n, shape.k
  a, b = (
    np.resize(rng.standard_normal((min(rows, 509), k), np.float32), (rows, k))
    for rows in (m, n)
  )
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
    kinds = [types.get(shape.kind, "float8_e4m3fn")] * 2 + ["float32"] * 2
    self.sets = [
      [jnp.asarray(x).astype(t) for x, t in zip(inputs(shape, i), kinds)]
      for i in range(copies(shape, most))
    ]
    self.backward = shape.kind == "bf16" and shape.m >= 1024

  def run(self, seconds: float):
    """Returns {pass: time of a product}, and results as float32."""
    wait, sets = jax.block_until_ready, self.sets

    def time(program, *args):
      program = jax.jit(program)
      call = functools.partial(program, *args)
      return report.median_time(call, wait, seconds) / len(sets), call

    forward, call = time(lambda sets: [self.function(*s) for s in sets], sets)
    times, results = {"forward": forward}, [call()[0]]
    if self.backward:
      gradients = [jnp.roll(results[0], i, 0) for i in range(len(sets))]

      def program(sets, gradients):
        return [
          jax.vjp(self.function, *s)[1](d) for s, d in zip(sets, gradients)
        ]

      times["backward"], call = time(program, sets, gradients)
      results += call()[0]
    return times, [np.asarray(x.astype(jnp.float32)) for x in results]


class TorchProgram:
  """PyTorch's product on the same GPU."""

  def __init__(self, shape: shapes.Gemm, dtype: str, most: int):
    if not report.HAS_TORCH or jax.devices()[0].platform != "gpu":
      raise report.Unsupported("no PyTorch or no GPU")
    import torch  # noqa: PLC0415

    types = {"bf16": getattr(torch, dtype), "int8": torch.int8}
    kinds = [types.get(shape.kind, torch.float8_e4m3fn)] * 2
    kinds += [torch.float32] * 2
    self.kind = shape.kind
    self.sets = [
      [torch.tensor(x, device="cuda").to(t)
       for x, t in zip(inputs(shape, i), kinds)]
      for i in range(copies(shape, most))
    ]  # fmt: skip
    if shape.kind == "fp8_block":
      for s in self.sets:  # as cuBLAS wants them
        s[2], s[3] = s[2].t().contiguous().t(), s[3].t()
    self.backward = shape.kind == "bf16" and shape.m >= 1024

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
      with torch.cuda.graph(graph):
        out = [function(*s) for s in sets]
      t = report.median_time(
        graph.replay, lambda _: torch.cuda.synchronize(), seconds
      )
      return t / len(sets), out[0]

    forward, out = time(self.function, self.sets)
    times, results = {"forward": forward}, [out]
    if self.backward:
      times["backward"], out = time(
        lambda a, b, d: (torch.matmul(d, b), torch.matmul(d.t(), a)),
        [(*s, results[0].roll(i, 0)) for i, s in enumerate(self.sets)],
      )
      results += out
    if self.kind == "int8":
      results = None  # They are not scaled.
    else:
      results = [x.float().cpu().numpy() for x in results]
    return times, results


def measure(shape, names, dtype, most, seconds):
  """Returns (rows of the CSV file, what went wrong) of one problem."""
  rows, found, name = [], {}, name_of(shape)
  for which in names:
    try:
      program = (
        TorchProgram(shape, dtype, most)
        if which == "torch"
        else JaxProgram(which, shape, dtype, most)
      )
      found[which] = program.run(seconds)
    except Exception as e:  # an implementation's refusal has any type
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


def main() -> int:
  parser = report.parser(
    __doc__, "gemm", IMPLEMENTATIONS, ("bfloat16", "float16")
  )
  parser.add_argument(
    "--only", action="append", metavar="TEXT", help="names with this in them"
  )
  parser.add_argument("--copies", type=int, default=8, help="of small weights")
  args = parser.parse_args()
  problems = [
    s
    for s in (shapes.GEMM_SMOKE if args.smoke else shapes.GEMM)
    if any(text in name_of(s) for text in args.only or [""])
  ]
  if not problems:
    parser.error("no problem has that name; see shapes.py")
  seconds = 0.02 if args.smoke else args.seconds
  print(report.title(args.dtype))

  rows, wrong = [], []
  for shape in problems:
    more, bad = measure(
      shape, args.implementations, args.dtype, args.copies, seconds
    )
    rows += more
    wrong += bad

  return report.finish(
    args,
    "gemm",
    rows,
    table(rows),
    f"us: ours; {', '.join(IMPLEMENTATIONS)}: TFLOP/s; last columns: ratios",
    wrong,
  )


if __name__ == "__main__":
  sys.exit(main())
