# SPDX-License-Identifier: Apache-2.0
"""Every GEMM kernel for AMD GPUs runs on a simulated one, and runs right.

Each is called by its name.
"""

import functools

import jax.numpy as jnp
import ml_dtypes
import numpy as np
from absl.testing import absltest, parameterized
from gemm import numbers_test as gemm_test
from harness import simulator

import jax
from jax._src.aiter.gemm import op as gemm_op
from jax._src.aiter.gemm.op import Config, Operands


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
    out = jax.jit(functools.partial(gemm_op.product.run, cfg))(
        jax.tree.map(jnp.asarray, x._replace(bias=bias)))
    np.testing.assert_array_equal(out, np.maximum(product + bias, 0))

  @parameterized.named_parameters(*(
      (k["symbol"], k) for k in simulator.kernels()
      if k["op"].startswith("gemm_") and k["op"] != "gemm_sum"))
  def test_kernels(self, kernel):
    tile_m, tile_n, tile_k = (kernel["tile_" + t] for t in "mnk")
    # More than a tile of each by as little as the kernel takes, and of k enough
    # that a pipeline comes back to each of its buffers. Scales by blocks may be
    # loaded for eight tiles at once.
    rest = (
        32 if kernel["op"] == "gemm_mx" else 16 if kernel["aligned"] else 1)
    tiles = 9 if kernel["op"] == "gemm_block" else 5
    types = [(self.TYPES[kernel["dtype"]],) * 2] if kernel[
        "dtype"] != "any" else [
            (self.E4M3FN,) * 2, (self.E4M3FN, self.E4M3FNUZ)]
    with simulator.launched(self, [kernel["symbol"]]):
      for t in types:
        self.run_kernel(kernel, t, 1, tile_m + rest, tile_n + rest,
                        tiles * tile_k + rest)
      self.run_kernel(kernel, types[0], 2, rest, rest, tile_k)

  @parameterized.parameters(*simulator.groups("gemm_sum", "op"))
  def test_sums(self, _, symbols):
    """Products in parts, of integers, of floats and of scaled ones."""
    with simulator.launched(self, symbols):
      for op, dtype in ("gemm_nt", "bf16"), ("gemm_row", "i8"), (
          "gemm_mx", "e2m1"):
        kernel = next(k for k in simulator.kernels()
                      if (k["op"], k["dtype"]) == (op, dtype))
        self.run_kernel(kernel, (self.TYPES[dtype],) * 2, 2, 17, 48, 1056,
                        splits=3)


if __name__ == "__main__":
  absltest.main()
