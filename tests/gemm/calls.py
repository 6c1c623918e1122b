# SPDX-License-Identifier: Apache-2.0
"""Calls of one GEMM kernel by its name, for tests of all of a table."""

import functools

import jax.numpy as jnp
import ml_dtypes
import numpy as np
from absl.testing import parameterized
from gemm import numbers_test as gemm_test

import jax
from jax._src.aiter.gemm import op as gemm_op
from jax._src.aiter.gemm.op import Config, Operands


class KernelTestCase(parameterized.TestCase):
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

  def run_kernel(self, kernel, types, batch, m, n, k, splits=1,
                 out_type="float32"):
    layout, scaling = {
        "row": ("nt", "row"), "block": ("nt", "block"), "mx": ("nt", "mx"),
    }.get(kind := kernel["op"].removeprefix("gemm_"), (kind, "none"))
    x, product = self.operands(layout, scaling, types, batch, m, n, k)
    bias = np.arange(n, dtype=np.float32) - n // 2
    cfg = Config(out_type, layout, scaling, "relu", kernel=kernel["symbol"],
                 splits=splits)
    out = jax.jit(functools.partial(gemm_op.product.run, cfg))(
        jax.tree.map(jnp.asarray, x._replace(bias=bias)))
    want = np.maximum(product + bias, 0).astype(np.float32)
    np.testing.assert_array_equal(
        np.asarray(out, np.float32),
        want.astype(jnp.dtype(out_type)).astype(np.float32))

  def types_of(self, kernel):
    """Types of operands that a kernel serves: pairs."""
    if kernel["dtype"] != "any":
      return [(self.TYPES[kernel["dtype"]],) * 2]
    return [(self.E4M3FN,) * 2, (self.E4M3FN, self.E4M3FNUZ)]
