# SPDX-License-Identifier: Apache-2.0
"""AITER's names for matrix products.

They take AITER's arguments but for what chooses a kernel or a memory to write
into: rows A or XQ [m, k], a weight B or WQ [n, k], scales of dequantisation.
`dtype` and `otype` are the result's. Of a weight that is preshuffled
(`shuffle_weight`) one more pass is made.
"""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp

import jax
from jax._src.aiter.core import arguments
from jax._src.aiter.core.arguments import bad, describe
from jax._src.aiter.gemm import api

_DTYPE = dict(preferred_element_type="dtype")
_A, _XQ = (dict(a=a, b=b, a_scale=sa, b_scale=sb) for a, b, sa, sb in (
    ("A", "B", "A_scale", "B_scale"), ("XQ", "WQ", "x_scale", "w_scale")))


def _a8w8(function, xq, wq, x_scale, w_scale, bias, dtype, b_shuffled=False):
  arguments.check_is_array(function, "XQ", xq, optional=False)
  run = api.gemm_i8 if xq.dtype == jnp.int8 else api.gemm_fp8
  with arguments.called(function, **_XQ, **_DTYPE):
    return run(xq, wq, x_scale, w_scale, bias, preferred_element_type=dtype,
               b_shuffled=b_shuffled)


def gemm_a16w16(
    A: jax.Array,
    B: jax.Array,
    bias: jax.Array | None = None,
    otype: Any = None,
    scale_a: jax.Array | float | None = None,
    scale_b: jax.Array | float | None = None,
) -> jax.Array:
  """AITER's gemm_a16w16 and tgemm.mm: `gemm`, or `gemm_fp8` of float8.

  A may have leading axes. Of float8 scale_a and scale_b are one number each, 1
  by default, and otype is bfloat16 by default.
  """
  function = "gemm_a16w16"
  arguments.check_is_array(function, "A", A, optional=False)
  names = dict(a="A", b="B", a_scale="scale_a", b_scale="scale_b",
               preferred_element_type="otype")
  if not A.dtype.name.startswith("float8"):
    for name, scale in (("scale_a", scale_a), ("scale_b", scale_b)):
      if scale is not None:
        raise bad(function, name, "given", f"None with A {describe(A)}")
    with arguments.called(function, **names):
      return api.gemm(A, B, bias, preferred_element_type=otype)
  one = lambda scale: 1.0 if scale is None else scale
  with arguments.called(function, **names):
    return api.gemm_fp8(
        A, B, one(scale_a), one(scale_b), bias,
        preferred_element_type=jnp.bfloat16 if otype is None else otype)


def gemm_a8w8(
    XQ: jax.Array,
    WQ: jax.Array,
    x_scale: jax.Array,
    w_scale: jax.Array,
    bias: jax.Array | None = None,
    dtype: Any = jnp.bfloat16,
) -> jax.Array:
  """AITER's gemm_a8w8: `gemm_i8` or `gemm_fp8`, scaled by rows of XQ and WQ."""
  return _a8w8("gemm_a8w8", XQ, WQ, x_scale, w_scale, bias, dtype)


def gemm_a8w8_bpreshuffle(
    XQ: jax.Array,
    WQ: jax.Array,
    x_scale: jax.Array,
    w_scale: jax.Array,
    bias: jax.Array | None = None,
    dtype: Any = jnp.bfloat16,
) -> jax.Array:
  """AITER's gemm_a8w8_bpreshuffle: that of a weight which is preshuffled."""
  return _a8w8("gemm_a8w8_bpreshuffle", XQ, WQ, x_scale, w_scale, bias, dtype,
               True)


def gemm_a8w8_blockscale(
    XQ: jax.Array,
    WQ: jax.Array,
    x_scale: jax.Array,
    w_scale: jax.Array,
    dtype: Any = jnp.bfloat16,
    isBpreshuffled: bool = False,
) -> jax.Array:
  """AITER's gemm_a8w8_blockscale: `gemm_fp8` of 1 x 128 by 128 x 128.

  x_scale is [m, k / 128] and w_scale [n / 128, k / 128], rounded up.
  """
  function = "gemm_a8w8_blockscale"
  shuffled = arguments.flag(function, "isBpreshuffled", isBpreshuffled)
  with arguments.called(function, **_XQ, **_DTYPE):
    return api.gemm_fp8(XQ, WQ, x_scale, w_scale, preferred_element_type=dtype,
                        b_shuffled=shuffled)


def gemm_a8w8_blockscale_bpreshuffle(
    XQ: jax.Array,
    WQ: jax.Array,
    x_scale: jax.Array,
    w_scale: jax.Array,
    dtype: Any = jnp.bfloat16,
) -> jax.Array:
  """AITER's gemm_a8w8_blockscale_bpreshuffle, of a weight that is preshuffled.

  x_scale is [m, k / 128]: an array has no strides in JAX.
  """
  with arguments.called("gemm_a8w8_blockscale_bpreshuffle"):
    return gemm_a8w8_blockscale(XQ, WQ, x_scale, w_scale, dtype, True)


def gemm_a4w4(
    A: jax.Array,
    B: jax.Array,
    A_scale: jax.Array,
    B_scale: jax.Array,
    bias: jax.Array | None = None,
    dtype: Any = jnp.bfloat16,
    *,
    bpreshuffle: bool = True,
) -> jax.Array:
  """AITER's gemm_a4w4: `gemm_fp4` of scales as `shuffle_scale` leaves them.

  A and B are uint8, two numbers of MXFP4 a byte; B is preshuffled unless told
  otherwise.
  """
  function = "gemm_a4w4"
  shuffled = arguments.flag(function, "bpreshuffle", bpreshuffle)
  with arguments.called(function, **_A, **_DTYPE):
    return api.gemm_fp4(
        A, B, A_scale, B_scale, bias, preferred_element_type=dtype,
        b_shuffled=shuffled, scales_shuffled=True)


def _batched(function, run, arrays, bias):
  """run(*arrays, bias) of each in a batch; bias [b, 1, n], [b, n] or None."""
  XQ = arrays[0]
  arguments.check_is_array(function, "XQ", XQ, optional=False)
  if XQ.ndim != 3:
    raise bad(function, "XQ", describe(XQ), "shape [b, m, k]")
  if bias is None:
    return run(*arrays, None)
  arguments.check_is_array(function, "bias", bias)
  if bias.ndim not in (2, 3) or any(
      t.ndim < 1 or t.shape[0] != XQ.shape[0] for t in (*arrays, bias)):
    raise bad(function, "bias", describe(bias),
              f"shape [{XQ.shape[0]}, 1, n], and as many of the other arrays")
  return jax.vmap(run)(*arrays, bias)


def batched_gemm_bf16(
    XQ: jax.Array,
    WQ: jax.Array,
    bias: jax.Array | None = None,
    dtype: Any = None,
) -> jax.Array:
  """AITER's batched_gemm_bf16: `gemm` of [b, m, k] and [b, n, k].

  bias is [b, 1, n]. dtype is XQ's by default.
  """
  function = "batched_gemm_bf16"
  arguments.check_is_array(function, "WQ", WQ, optional=False)
  with arguments.called(function, **_XQ, **_DTYPE):
    return _batched(
        function, lambda a, b, bias: api.gemm(
            a, b, bias, preferred_element_type=dtype), (XQ, WQ), bias)


def batched_gemm_a8w8(
    XQ: jax.Array,
    WQ: jax.Array,
    x_scale: jax.Array,
    w_scale: jax.Array,
    bias: jax.Array | None = None,
    dtype: Any = jnp.bfloat16,
) -> jax.Array:
  """AITER's batched_gemm_a8w8: gemm_a8w8 of [b, m, k] and [b, n, k].

  x_scale is [b, m, 1], w_scale [b, 1, n] and bias [b, 1, n].
  """
  function = "batched_gemm_a8w8"
  for name, t in (("WQ", WQ), ("x_scale", x_scale), ("w_scale", w_scale)):
    arguments.check_is_array(function, name, t, optional=False)
  return _batched(
      function, lambda a, b, x, w, bias: _a8w8(
          function, a, b, x, w, bias, dtype),
      (XQ, WQ, x_scale, w_scale), bias)
