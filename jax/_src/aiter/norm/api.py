# SPDX-License-Identifier: Apache-2.0
"""RMSNorm and LayerNorm: the public functions and their arguments."""

from __future__ import annotations

import functools
import math
from typing import Any

import jax.numpy as jnp

import jax
from jax._src.aiter.core import arguments, rounding
from jax._src.aiter.core.partition import vary_together
from jax._src.aiter.norm import op as norm_op
from jax._src.aiter.norm.op import MX_BLOCK, Config, Rows

_DTYPES = ("float16", "bfloat16", "float32", "float64")


def _check_arrays(function: str, arrays, optional) -> None:
  """Types and shapes of the arrays; those named in `optional` may be None."""
  bad = functools.partial(arguments.bad, function)
  for name, t in arrays.items():
    arguments.check_is_array(function, name, t, name in optional)
    if t is not None and t.dtype.name not in _DTYPES:
      raise bad(f"{name}'s dtype", t.dtype, " or ".join(_DTYPES), TypeError)
  x = arrays["x"]
  if x.ndim < 1:
    raise bad("x", arguments.describe(x), "an array of rank 1 or more")
  for name, t in arrays.items():
    if name == "residual":
      if (t.shape, t.dtype) != (x.shape, x.dtype):
        raise bad(name, arguments.describe(t),
                  f"{arguments.describe(x)}, as x")
    elif name != "x" and t is not None and t.shape != x.shape[-1:]:
      raise bad(name, arguments.describe(t),
                f"shape {list(x.shape[-1:])}, x's last dimension")


@functools.partial(jax.jit, static_argnums=(0, 1), inline=True)
def _apply(function: str, cfg: Config, x, gamma, residual=None, beta=None,
           x_scale=None):
  """The norm of checked arguments: norm_op's results."""
  # Weights of x's type or in float32; one type for both.
  weights = [t for t in (gamma, beta) if t is not None]
  dtype = x.dtype
  if any(t.dtype != dtype for t in weights):
    dtype = jnp.promote_types(dtype, jnp.float32)
  if gamma is None:
    gamma = jnp.ones(x.shape[-1:], dtype)
  to = lambda t, dtype: None if t is None else t.astype(dtype)
  rows = Rows(x, residual, to(gamma, dtype), to(beta, dtype),
              to(x_scale, jnp.float32))
  rows = norm_op.whole_columns(vary_together(rows))
  if not cfg.quant:
    return norm_op.norm(cfg, rows)
  run = arguments.no_gradient(
      function, "differentiate the norm without _quant, or stop the gradient")(
          functools.partial(norm_op.norm_quant, cfg))
  return run(rows)


def _norm(function: str, layer: bool, arrays, epsilon: Any,
          gemma: bool = False, t5: bool = False, **quant: Any):
  """norm_op's results, after all checks; quantised with a quant_dtype."""
  optional = ("gamma", "beta", "x_scale") if layer else ("x_scale",)
  if "residual" in arrays:
    x, residual = arguments.agreeing(arrays["x"], arrays["residual"])
    arrays |= dict(x=x, residual=residual)
  _check_arrays(function, arrays, optional)
  epsilon = arguments.number(
      function, "epsilon", epsilon, "a finite number >= 0",
      lambda e: 0 <= e < math.inf)
  flag = functools.partial(arguments.flag, function)
  cfg = Config(layer, epsilon, flag("gemma", gemma), flag("t5", t5))
  for name, dtype in quant.items():
    cfg = cfg._replace(
        quant=arguments.dtype_name(function, name, dtype, rounding.KINDS))
    if cfg.quant == "mxfp4" and arrays["x"].shape[-1] % MX_BLOCK:
      raise arguments.bad(
          function, "x", arguments.describe(arrays["x"]),
          f"a last dimension that is a multiple of {MX_BLOCK}, for mxfp4")
  return _apply(function, cfg, **arrays)


def rms_norm(
    x: jax.Array,
    gamma: jax.Array,
    epsilon: float = 1e-6,
    *,
    gemma: bool = False,
    t5: bool = False,
) -> jax.Array:
  """Root mean square layer normalization over the last axis.

  Computes `x / sqrt(mean(x**2) + epsilon) * gamma` in float32 (Zhang and
  Sennrich, arXiv:1910.07467), with one pass over memory on a GPU. Its gradients
  are kernels too, and the same bits in each run.

  Args:
    x: [..., n], float16, bfloat16, float32 or (by the reference) float64.
    gamma: [n], the weight; its own dtype may be wider than x's.
    epsilon: added to the mean of squares, at least 0.
    gemma: multiply by 1 + gamma, as Gemma's checkpoints want it.
    t5: round the normalised rows to x's dtype before the weight, as T5 does.

  Returns:
    [..., n], x's dtype.

  Raises:
    TypeError: an argument of the wrong type or dtype.
    ValueError: a shape or value that cannot be; the message names it.
  """
  return _norm("rms_norm", False, dict(x=x, gamma=gamma), epsilon, gemma,
               t5)[0]


def rms_norm_with_add(
    x: jax.Array,
    residual: jax.Array,
    gamma: jax.Array,
    epsilon: float = 1e-6,
    *,
    gemma: bool = False,
    t5: bool = False,
) -> tuple[jax.Array, jax.Array]:
  """`rms_norm` of `x + residual`, and the sum.

  The sum is formed in float32. The norm is that of the unrounded sum, or with
  `t5` of the rounded one.

  Args:
    x: as in rms_norm.
    residual: shape and dtype of x.
    gamma: as in rms_norm.
    epsilon: as in rms_norm.
    gemma: as in rms_norm.
    t5: as in rms_norm.

  Returns:
    (y, residual_out): the norm, and x + residual rounded to x's dtype.

  Raises:
    TypeError: as rms_norm.
    ValueError: as rms_norm.
  """
  return _norm("rms_norm_with_add", False,
               dict(x=x, residual=residual, gamma=gamma), epsilon, gemma, t5)


def layer_norm(
    x: jax.Array,
    gamma: jax.Array | None,
    beta: jax.Array | None,
    epsilon: float = 1e-5,
) -> jax.Array:
  """Layer normalization over the last axis.

  Computes `(x - mean(x)) / sqrt(var(x) + epsilon) * gamma + beta` in float32
  (Ba, Kiros and Hinton, arXiv:1607.06450), with one pass over memory on a GPU.
  Its gradients are kernels too, and the same bits in each run.

  Args:
    x: [..., n], float16, bfloat16, float32 or (by the reference) float64.
    gamma: [n], the weight, or None for 1; may be wider than x.
    beta: [n], the bias, or None for 0.
    epsilon: added to the variance, at least 0.

  Returns:
    [..., n], x's dtype.

  Raises:
    TypeError: an argument of the wrong type or dtype.
    ValueError: a shape or value that cannot be; the message names it.
  """
  return _norm("layer_norm", True, dict(x=x, gamma=gamma, beta=beta),
               epsilon)[0]


def layer_norm_with_add(
    x: jax.Array,
    residual: jax.Array,
    gamma: jax.Array | None,
    beta: jax.Array | None,
    epsilon: float = 1e-5,
) -> tuple[jax.Array, jax.Array]:
  """`layer_norm` of `x + residual`, and the sum.

  The sum is formed in float32, and the norm is that of the unrounded sum.

  Args:
    x: as in layer_norm.
    residual: shape and dtype of x.
    gamma: as in layer_norm.
    beta: as in layer_norm.
    epsilon: as in layer_norm.

  Returns:
    (y, residual_out): the norm, and x + residual rounded to x's dtype.

  Raises:
    TypeError: as layer_norm.
    ValueError: as layer_norm.
  """
  return _norm("layer_norm_with_add", True,
               dict(x=x, residual=residual, gamma=gamma, beta=beta), epsilon)


def rms_norm_quant(
    x: jax.Array,
    gamma: jax.Array,
    epsilon: float = 1e-6,
    *,
    quant_dtype: Any = jnp.int8,
    x_scale: jax.Array | None = None,
    gemma: bool = False,
    t5: bool = False,
) -> tuple[jax.Array, jax.Array]:
  """`rms_norm`, quantised in the same pass over memory.

  With y the norm in float32, not rounded to x's dtype, times `x_scale`:
  int8 and the float8 types have a scale a row, max(max |y|, 1e-10) divided by
  the largest number of the type (127, 448 or 240). "mxfp4" (OCP Microscaling
  Formats, v1.0) has one for 32 columns, the least power of two with which none
  of them overflows. y divided by its scale is rounded to nearest, ties to even.

  Args:
    x: [..., n] as in rms_norm; n a multiple of 32 for "mxfp4".
    gamma: as in rms_norm.
    epsilon: as in rms_norm.
    quant_dtype: int8, float8_e4m3fn, float8_e4m3fnuz or "mxfp4".
    x_scale: [n], a factor of each column that is not undone by the scale: that
      of SmoothQuant (Xiao et al., arXiv:2211.10438). None is 1.
    gemma: as in rms_norm.
    t5: as in rms_norm.

  Returns:
    (q, scale): quant_dtype [..., n] and float32 [..., 1], or, for "mxfp4",
    uint8 [..., n / 2], the even columns in the low nibbles, and uint8
    [..., n / 32], e8m0. q * scale is y. There is no gradient.

  Raises:
    TypeError: an argument of the wrong type or dtype, or differentiation.
    ValueError: a shape or value that cannot be; the message names it.
  """
  return _norm("rms_norm_quant", False,
               dict(x=x, gamma=gamma, x_scale=x_scale), epsilon, gemma, t5,
               quant_dtype=quant_dtype)[:2]


def rms_norm_with_add_quant(
    x: jax.Array,
    residual: jax.Array,
    gamma: jax.Array,
    epsilon: float = 1e-6,
    *,
    quant_dtype: Any = jnp.int8,
    x_scale: jax.Array | None = None,
    gemma: bool = False,
    t5: bool = False,
) -> tuple[jax.Array, jax.Array, jax.Array]:
  """`rms_norm_with_add`, quantised as by `rms_norm_quant`.

  Args:
    x: as in rms_norm_quant.
    residual: shape and dtype of x.
    gamma: as in rms_norm.
    epsilon: as in rms_norm.
    quant_dtype: as in rms_norm_quant.
    x_scale: as in rms_norm_quant.
    gemma: as in rms_norm.
    t5: as in rms_norm.

  Returns:
    (q, scale, residual_out): as of rms_norm_quant, and x + residual rounded to
    x's dtype. There is no gradient.

  Raises:
    TypeError: as rms_norm_quant.
    ValueError: as rms_norm_quant.
  """
  return tuple(_norm(
      "rms_norm_with_add_quant", False,
      dict(x=x, residual=residual, gamma=gamma, x_scale=x_scale), epsilon,
      gemma, t5, quant_dtype=quant_dtype))


def layer_norm_quant(
    x: jax.Array,
    gamma: jax.Array | None,
    beta: jax.Array | None,
    epsilon: float = 1e-5,
    *,
    quant_dtype: Any = jnp.int8,
    x_scale: jax.Array | None = None,
) -> tuple[jax.Array, jax.Array]:
  """`layer_norm`, quantised as by `rms_norm_quant`.

  Args:
    x: as in rms_norm_quant.
    gamma: as in layer_norm.
    beta: as in layer_norm.
    epsilon: as in layer_norm.
    quant_dtype: as in rms_norm_quant.
    x_scale: as in rms_norm_quant.

  Returns:
    (q, scale), as of rms_norm_quant. There is no gradient.

  Raises:
    TypeError: as rms_norm_quant.
    ValueError: as rms_norm_quant.
  """
  return _norm("layer_norm_quant", True,
               dict(x=x, gamma=gamma, beta=beta, x_scale=x_scale), epsilon,
               quant_dtype=quant_dtype)[:2]


def layer_norm_with_add_quant(
    x: jax.Array,
    residual: jax.Array,
    gamma: jax.Array | None,
    beta: jax.Array | None,
    epsilon: float = 1e-5,
    *,
    quant_dtype: Any = jnp.int8,
    x_scale: jax.Array | None = None,
) -> tuple[jax.Array, jax.Array, jax.Array]:
  """`layer_norm_with_add`, quantised as by `rms_norm_quant`.

  Args:
    x: as in rms_norm_quant.
    residual: shape and dtype of x.
    gamma: as in layer_norm.
    beta: as in layer_norm.
    epsilon: as in layer_norm.
    quant_dtype: as in rms_norm_quant.
    x_scale: as in rms_norm_quant.

  Returns:
    (q, scale, residual_out), as of rms_norm_with_add_quant. There is no
    gradient.

  Raises:
    TypeError: as rms_norm_quant.
    ValueError: as rms_norm_quant.
  """
  return tuple(_norm(
      "layer_norm_with_add_quant", True,
      dict(x=x, residual=residual, gamma=gamma, beta=beta, x_scale=x_scale),
      epsilon, quant_dtype=quant_dtype))
