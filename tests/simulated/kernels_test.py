# SPDX-License-Identifier: Apache-2.0
"""Every AMD kernel of the wheel runs on a simulated GPU, and runs right.

The tests come from the table of kernels in the installed module, and each names
the kernels that it is for: one that it does not launch fails it. Attention and
norms come to them by sizes, quantisers by what is asked for, and matrix
products by name.
"""

import contextlib
import functools
import re
import time

import jax.numpy as jnp
import ml_dtypes
import numpy as np
from absl.testing import absltest, parameterized
from attention import numbers_test as mha_test
from gemm import numbers_test as gemm_test
from harness import simulator
from norm import numbers_test as norm_test
from quant import oracle as quant_oracle

import jax
from jax._src.aiter.core import dispatch
from jax._src.aiter.gemm import op as gemm_op
from jax._src.aiter.gemm.op import Config, Operands
from jax.experimental import aiter
from jaxlib import gpu_aiter

ARCH, = dispatch.architectures("rocm")
KERNELS = [
    kernel | {"aligned": "_no_unaligned" in kernel["symbol"]}
    for kernel in gpu_aiter.load("rocm").kernels() if kernel["arch"] == ARCH]


def groups(ops, *columns):
  """Values of columns of the table, and the symbols of kernels that have them.

  Args:
    ops: matches the beginnings of the operators' names.
    *columns: of the table.
  """
  found = {}
  for kernel in KERNELS:
    if re.match(ops, kernel["op"]):
      key = tuple(kernel[column] for column in columns)
      found.setdefault(key, []).append(kernel["symbol"])
  return [(*key, symbols) for key, symbols in found.items()]


@contextlib.contextmanager
def launched(test, symbols):
  """Fails the test if one of the kernels does not run meanwhile."""
  executed = lambda: sum(map(simulator.instructions, symbols))
  before = [simulator.launches(symbol) for symbol in symbols]
  start, instructions = time.monotonic(), executed()
  yield
  seconds, instructions = time.monotonic() - start, executed() - instructions
  print(f"{len(symbols)} kernels, {instructions} instructions, {seconds:.2f} s")
  test.assertGreater(instructions, 0)
  for symbol, count in zip(symbols, before):
    test.assertGreater(simulator.launches(symbol), count, symbol)


class TableTest(absltest.TestCase):

  def test_every_kernel_has_a_test(self):
    """There are kernels of each family, and of no other."""
    families = {kernel["op"].split("_")[0] for kernel in KERNELS}
    self.assertEqual(families, {"mha", "norm", "gemm", "quant"})


class MhaKernelsTest(mha_test.MhaTestCase):

  # Tiles of queries are up to 128 rows and tiles of keys up to 128: of two
  # tiles of each the second is cut, and the window cuts the first.
  FAST = [
      dict(sq=150, sk=150, causal=True, window=(140, -1)),
      dict(sq=70, sk=150, hq=2, hk=1),
  ]
  GENERAL = [
      dict(sq=71, sk=99, causal=True, bias="bhqk", alibi="h", sink="h"),
      dict(sq=40, sk=71, cap=3.0, dropout=0.3, window=(9, 9, 2), use_lse=True,
           hq=2, hk=1),
  ]

  @parameterized.parameters(*groups("mha_", "grade", "dtype", "dims"))
  def test_kernels(self, grade, dtype, dims, symbols):
    dqk, dv = dims
    if not dqk:  # A kernel for all head dims and dtypes.
      dtype, dqk, dv = "bf16", 32, 32
    with launched(self, symbols):
      for options in self.FAST if grade == "fast" else self.GENERAL:
        self.check(mha_test.Case(
            b=1, dtype=dtype, dqk=dqk, dv=dv, **options))


class NormKernelsTest(norm_test.NormTestCase):

  # What holds a row is given a shorter one; what takes any, a longer one than
  # all that hold one, or an odd one.
  LONGEST = max(k["dims"][0] for k in KERNELS if k["op"].startswith("norm_"))

  def cols(self, dims, aligned, multiple):
    if not aligned:
      return 8201
    return dims[0] - multiple if dims[0] else self.LONGEST + multiple

  @parameterized.parameters(
      *groups("norm_fwd|norm_bwd", "dtype", "dims", "aligned"))
  def test_kernels(self, dtype, dims, aligned, symbols):
    case = norm_test.Case(
        dtype="bf16" if dtype == "any" else dtype, lead=(3,),
        cols=self.cols(dims, aligned, 8), layer=True, residual=True)
    with launched(self, symbols):
      self.check(case)

  @parameterized.parameters(*groups("norm_quant", "dtype", "dims", "aligned"))
  def test_quantised(self, dtype, dims, aligned, symbols):
    case = norm_test.Case(
        dtype=dtype, lead=(3,), cols=self.cols(dims, aligned, 32))
    check = functools.partial(norm_test.QuantTest.check_quantised, self)
    with launched(self, symbols):
      check(case, "int8", smooth=True)
      check(case, "float8_e4m3fnuz")
      if aligned:
        check(case, "mxfp4")


class QuantKernelsTest(parameterized.TestCase):

  def check(self, got, want):
    for a, b in zip(got, want, strict=True):
      np.testing.assert_array_equal(a, b.reshape(a.shape), strict=True)

  @parameterized.parameters(*groups("quant_", "op", "dtype", "dims"))
  def test_kernels(self, op, dtype, dims, symbols):
    rng = np.random.default_rng(0)
    rows, cols = (9, dims[0] - 3) if dims[0] else (131, 8201)
    if op != "quant_row":
      cols = 352
    x = rng.standard_normal((rows, cols)) * np.exp(
        2 * rng.standard_normal((rows, cols)))
    x = x.astype(norm_test.DTYPES[dtype])
    with launched(self, symbols):
      getattr(self, op)(x)

  def quant_row(self, x):
    smooth = np.linspace(0.5, 2, x.shape[1], dtype=np.float32)
    for kind in ("int8", "float8_e4m3fn", "float8_e4m3fnuz"):
      self.check(aiter.smooth_quant(x[:5], smooth, quant_dtype=kind),
                 quant_oracle.token(x[:5], kind, smooth))

  def quant_group(self, x):
    for group in (32, 64, 128):
      self.check(
          aiter.per_group_quant(x, group_size=group, quant_dtype="int8"),
          quant_oracle.tiles(x, "int8", 1, group))
    for mode in ("up", "down", "even", "ceil"):
      self.check(
          aiter.mx_quant(x, quant_dtype="float8_e4m3fn", round_mode=mode),
          quant_oracle.tiles(x, "float8_e4m3fn", 1, 32, mode))
      q, scale = quant_oracle.tiles(x, "mxfp4", 1, 32, mode)
      self.check(aiter.mx_quant(x, round_mode=mode),
                 (quant_oracle.pack(q), scale))

  def quant_block(self, x):
    for kind in ("int8", "float8_e4m3fn", "float8_e4m3fnuz"):
      self.check(aiter.per_block_quant(x, quant_dtype=kind),
                 quant_oracle.tiles(x, kind, 128, 128))

  def quant_amax(self, x):
    q, scale = aiter.per_tensor_quant(x, quant_dtype="int8")
    want = quant_oracle.f32_scale(quant_oracle.amax(x, None), "int8")
    self.check((q, scale), (quant_oracle.static(x, "int8", want), want))


class GemmKernelsTest(parameterized.TestCase):
  """Small integers: every sum is exact, in any order and any type."""

  E4M3FN, E4M3FNUZ = ml_dtypes.float8_e4m3fn, ml_dtypes.float8_e4m3fnuz
  TYPES = {"bf16": ml_dtypes.bfloat16, "fp16": np.float16, "i8": np.int8,
           "e4m3fn": E4M3FN, "e4m3fnuz": E4M3FNUZ, "e2m1": np.uint8}

  def operands(self, layout, scaling, types, batch, m, n, k):
    """Operands and the float64 product of them."""
    rng = np.random.default_rng(0)
    if scaling == "mx":
      a, b = (rng.integers(0, 256, (batch, t, k // 2), np.uint8)
              for t in (m, n))
      scales = [rng.integers(125, 129, (batch, t, k // 32), np.uint8)
                for t in (m, n)]
      wide = [gemm_test.from_fp4(t, s) for t, s in zip((a, b), scales)]
      return Operands(a, b, *scales), wide[0] @ wide[1].mT
    shapes = {"nt": ((m, k), (n, k)), "nn": ((m, k), (k, n)),
              "tn": ((k, m), (k, n))}[layout]
    a, b = (rng.integers(-3, 4, (batch, *shape)).astype(np.float32).astype(t)
            for shape, t in zip(shapes, types))
    wide = [t.astype(np.float64) for t in (a, b)]
    if layout == "tn":
      wide[0] = wide[0].mT
    if layout == "nt":
      wide[1] = wide[1].mT
    power = functools.partial(gemm_test.powers_of_two, rng)
    if scaling == "row":
      scales = power(batch, m), power(batch, n)
      wide[0] = wide[0] * scales[0][..., :, None]
      wide[1] = wide[1] * scales[1][..., None, :]
    elif scaling == "block":
      scales = (power(batch, m, -(-k // 128)),
                power(batch, -(-n // 128), -(-k // 128)))
      wide[0] = wide[0] * gemm_test.from_blocks(scales[0], 1, 128, k)
      wide[1] = wide[1] * gemm_test.from_blocks(
          scales[1], 128, 128, k)[:, :n].mT
    else:
      scales = ()
    return Operands(a, b, *scales), wide[0] @ wide[1]

  def run_kernel(self, kernel, types, batch, m, n, k, splits=1):
    layout, scaling = {
        "row": ("nt", "row"), "block": ("nt", "block"), "mx": ("nt", "mx"),
    }.get(kind := kernel["op"].removeprefix("gemm_"), (kind, "none"))
    x, product = self.operands(layout, scaling, types, batch, m, n, k)
    bias = np.arange(n, dtype=np.float32) - n // 2
    cfg = Config("float32", layout, scaling, "relu", kernel=kernel["symbol"],
                 splits=splits)
    out = jax.jit(functools.partial(gemm_op._gemm, cfg))(
        jax.tree.map(jnp.asarray, x._replace(bias=bias)))
    np.testing.assert_array_equal(out, np.maximum(product + bias, 0))

  @parameterized.named_parameters(*(
      (k["symbol"], k) for k in KERNELS
      if k["op"].startswith("gemm_") and k["op"] != "gemm_sum"))
  def test_kernels(self, kernel):
    tile_m, tile_n, tile_k = (kernel["tile_" + t] for t in "mnk")
    # More than a tile of each by as little as the kernel takes.
    rest = (
        32 if kernel["op"] == "gemm_mx" else 16 if kernel["aligned"] else 1)
    types = [(self.TYPES[kernel["dtype"]],) * 2] if kernel[
        "dtype"] != "any" else [
            (self.E4M3FN,) * 2, (self.E4M3FN, self.E4M3FNUZ)]
    with launched(self, [kernel["symbol"]]):
      for t in types:
        self.run_kernel(kernel, t, 1, tile_m + rest, tile_n + rest,
                        2 * tile_k + rest)
      self.run_kernel(kernel, types[0], 2, rest, rest, tile_k)

  @parameterized.parameters(*groups("gemm_sum", "op"))
  def test_sums(self, _, symbols):
    """Products in parts, of integers, of floats and of scaled ones."""
    with launched(self, symbols):
      for op, dtype in ("gemm_nt", "bf16"), ("gemm_row", "i8"), (
          "gemm_mx", "e2m1"):
        kernel = next(k for k in KERNELS
                      if (k["op"], k["dtype"]) == (op, dtype))
        self.run_kernel(kernel, (self.TYPES[dtype],) * 2, 2, 17, 48, 1056,
                        splits=3)


if __name__ == "__main__":
  absltest.main()
