# SPDX-License-Identifier: Apache-2.0
"""Measures every kernel that serves a matrix product, and notes the best.

  python tune_gemm.py --shapes shapes.csv --out gemm_tuned.csv

The file of shapes has the columns op (gemm_nt, gemm_nn, gemm_tn, gemm_row,
gemm_block, gemm_mx), dtype (bf16, fp16, i8, e4m3fn, e4m3fnuz, e2m1), m, n, k.
For each line it prints the choices of kernel and number of parts of k, fastest
first, with the library's own marked, and writes the fastest whose result is
right to --out, in the place of an earlier row for the same kernels and sizes.

Calls go round several b, together larger than any cache (of small ones
--copies), so that weights come from memory as in a model. How they are timed:
report.time_in_turn.
"""

import argparse
import csv
import pathlib
import sys

import jax.numpy as jnp
import numpy as np
import report

import jax
from jax._src.aiter.core import dispatch
from jax._src.aiter.gemm import op as gemm_op
from jaxlib import gpu_aiter

# Op -> layout, scaling.
OPS = {
  "gemm_nt": ("nt", "none"),
  "gemm_nn": ("nn", "none"),
  "gemm_tn": ("tn", "none"),
  "gemm_row": ("nt", "row"),
  "gemm_block": ("nt", "block"),
  "gemm_mx": ("nt", "mx"),
}
DTYPES = {
  "bf16": "bfloat16",
  "fp16": "float16",
  "i8": "int8",
  "e4m3fn": "float8_e4m3fn",
  "e4m3fnuz": "float8_e4m3fnuz",
  "e2m1": "uint8",
}
KEY = ("op", "arch", "dtype", "m", "n", "k")
COLUMNS = (*KEY, "tile", "splits", "us")
# More than the last level of cache of any GPU.
COLD_BYTES = 512 << 20
CHECKED_ROWS = 16


def random(rng, dtype: str, shape: tuple[int, ...]) -> jax.Array:
  """An operand: normal numbers, or any bytes or integers of few bits."""
  if dtype in ("i8", "e2m1"):
    low, high = (-8, 8) if dtype == "i8" else (0, 256)
    return jnp.asarray(rng.integers(low, high, shape), DTYPES[dtype])
  return jnp.asarray(rng.standard_normal(shape, np.float32), DTYPES[dtype])


def operands(op: str, dtype: str, m: int, n: int, k: int, most: int):
  """(Operands, values of b, `most` at most) of one product."""
  rng = np.random.default_rng(0)
  layout, scaling = OPS[op]
  row = k // 2 if scaling == "mx" else k
  a_shape = (k, m) if layout == "tn" else (m, row)
  b_shape = (n, row) if layout == "nt" else (k, n)
  blocks = -(-k // gemm_op.BLOCK)
  scales = {
    "none": (None, None),
    "row": (jnp.full(m, 0.5), jnp.full(n, 0.5)),
    "block": (
      jnp.full((m, blocks), 0.5),
      jnp.full((-(-n // gemm_op.BLOCK), blocks), 0.5),
    ),
    "mx": tuple(
      jnp.full((rows, -(-k // gemm_op.MX_BLOCK)), 126, jnp.uint8)
      for rows in (m, n)
    ),
  }[scaling]
  a = random(rng, dtype, a_shape)
  b = random(rng, dtype, b_shape)
  copies = min(max(COLD_BYTES // b.nbytes, 1), most)
  # The same rows elsewhere: as good as other numbers.
  bs = [b, *(jnp.roll(b, i, 0) for i in range(1, copies))]
  return gemm_op.Operands(a, b, *scales), bs


def first_rows(cfg: gemm_op.Config, x: gemm_op.Operands) -> np.ndarray:
  """The formula's first rows of a product."""
  rows = slice(0, CHECKED_ROWS)
  a = x.a[:, rows] if cfg.layout == "tn" else x.a[rows]
  a_scale = None if x.a_scale is None else x.a_scale[rows]
  few = x._replace(a=a, a_scale=a_scale)
  out = jax.jit(gemm_op.reference, static_argnums=0)(cfg, few)
  return np.asarray(out, np.float32)


def measure(cfg: gemm_op.Config, x: gemm_op.Operands, bs, want: np.ndarray,
            seconds: float):
  """(seconds of a call, whether its result begins with the rows `want`)."""
  took, out = report.time_in_turn(
    lambda x, b: gemm_op.product(cfg, x._replace(b=b)),
    [(x._replace(b=None), b) for b in bs], seconds)
  got = np.asarray(out[: len(want)], np.float32)
  right = bool(np.max(np.abs(got - want)) <= 0.02 * np.max(np.abs(want)))
  return took, right


def tuned(module, arch: str, line: dict, args: argparse.Namespace):
  """Measures one line of the file of shapes; its row of the table, or None."""
  op, dtype = line["op"], line["dtype"]
  m, n, k = (int(line[c]) for c in "mnk")
  layout, scaling = OPS[op]
  choices = module.gemm_choices(
    arch, dtype, [m, n, k, 1, 4 * gemm_op.workspace(1, m, n, k)],
    gemm_op.features(layout, scaling, dtype, dtype))
  kernels = {kernel["symbol"]: kernel for kernel in module.table()}
  x, bs = operands(op, dtype, m, n, k, args.copies)
  print(f"\n{op} {dtype} {m} x {n} x {k} on {arch}: {len(choices)} choices")
  cfg = gemm_op.Config(
    "float16" if x.a.dtype == jnp.float16 else "bfloat16", layout, scaling)
  want = first_rows(cfg, x)
  results = []
  for symbol, splits in choices[:args.most]:
    took, right = measure(
      cfg._replace(kernel=symbol, splits=splits), x, bs, want, args.seconds)
    results.append((not right, took, symbol, splits))
  for wrong, took, symbol, splits in sorted(results):
    own = "  <- the library's" if (symbol, splits) == choices[0] else ""
    print(f"{took * 1e6:10.1f} us {2e-12 * m * n * k / took:8.1f} TFLOP/s"
          f"  {symbol} in {splits}{own}{'  WRONG' if wrong else ''}")
  wrong, took, symbol, splits = min(results)
  if wrong:
    return None
  kernel = kernels[symbol]
  return {
    "op": op, "arch": kernel["arch"], "dtype": kernel["dtype"],
    "m": m, "n": n, "k": k,
    "tile": "x".join(str(kernel[f"tile_{c}"]) for c in "mnk"),
    "splits": splits, "us": f"{took * 1e6:.1f}"}


def merge(path: pathlib.Path, rows) -> None:
  """Puts rows in a table, each in the place of one with the same key."""
  text = path.read_text() if path.exists() else ""
  comments = [line for line in text.splitlines() if line.startswith("#")]
  lines = [line for line in text.splitlines() if not line.startswith("#")]
  sizes = ("m", "n", "k")
  key = lambda row: tuple(
    int(row[c]) if c in sizes else row[c] for c in KEY)
  table = {key(row): row for row in csv.DictReader(lines)}
  table.update((key(row), row) for row in rows)
  with path.open("w", newline="") as file:
    file.writelines(line + "\n" for line in comments)
    writer = csv.DictWriter(file, COLUMNS, lineterminator="\n")
    writer.writeheader()
    writer.writerows(table[k] for k in sorted(table))


def main() -> int:
  parser = argparse.ArgumentParser(
    description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
  parser.add_argument("--shapes", required=True, type=pathlib.Path)
  parser.add_argument("--out", required=True, type=pathlib.Path)
  parser.add_argument(
    "--seconds", type=float, default=0.25, help="for each choice")
  parser.add_argument(
    "--most", type=int, default=40,
    help="choices at a size, those that the library thinks best; default 40")
  parser.add_argument(
    "--copies", type=int, default=32, help="of b, at most; default 32")
  args = parser.parse_args()
  platform = next(
    (p for p in dispatch.PLATFORMS if dispatch.architectures(p)), None)
  module = platform and gpu_aiter.load(platform)
  if module is None:
    sys.exit("no GPU here, or its plugin has no module _aiter")
  arch = dispatch.architectures(platform)[0]
  print(f"{jax.devices()[0].device_kind}, jax {jax.__version__}")
  with args.shapes.open() as file:
    lines = list(csv.DictReader(line for line in file if line[0] != "#"))
  rows = [tuned(module, arch, line, args) for line in lines]
  found = [row for row in rows if row is not None]
  merge(args.out, found)
  print(f"\n{len(found)} rows in {args.out}")
  return 0 if len(found) == len(rows) else 1


if __name__ == "__main__":
  sys.exit(main())
