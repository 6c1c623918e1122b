# SPDX-License-Identifier: Apache-2.0
"""Matrix products: the public functions and their arguments.

A weight is [n, k], as a Linear layer keeps it, and a product a @ b.T; `gemm`
takes one as [k, n] as well, as Flax keeps it. Every function takes leading
axes: a [..., m, k] with one b for all, or with a b [..., n, k] for each.
"""

from __future__ import annotations

import functools
import numbers
from typing import Any

import jax.numpy as jnp

import jax
from jax import lax
from jax._src.aiter.core import arguments, layouts
from jax._src.aiter.core.partition import vary_together
from jax._src.aiter.gemm import op as gemm_op
from jax._src.aiter.gemm.op import BLOCK, MX_BLOCK, Config, Operands

_FLOATS = ("bfloat16", "float16", "float32", "float64")
_FLOAT8 = ("float8_e4m3fn", "float8_e4m3fnuz")
_RESULTS = ("bfloat16", "float16", "float32")


def _check_matrices(function: str, a, b, names=("a", "b"),
                    transpose_b: bool = True) -> None:
  """a [..., m, k] against b [n, k] or [..., n, k]; else [k, n]."""
  bad = functools.partial(arguments.bad, function)
  name_a, name_b = names
  if a.ndim < 2:
    raise bad(name_a, arguments.describe(a), "an array of rank 2 or more")
  k = a.shape[-1]
  core = f"n, {k}" if transpose_b else f"{k}, n"
  shapes = [f"[{core}]"]
  if a.ndim > 2:
    shapes.append(f"[{', '.join(map(str, a.shape[:-2]))}, {core}]")
  if (b.ndim < 2 or b.shape[-1 if transpose_b else -2] != k
      or b.shape[:-2] not in ((), a.shape[:-2])):
    raise bad(name_b, arguments.describe(b),
              f"{' or '.join(shapes)} for {name_a} {arguments.describe(a)}")


def _result_dtype(function: str, value: Any, accepted=_RESULTS) -> str:
  return arguments.dtype_name(
      function, "preferred_element_type", value, accepted)


def _bias(function: str, bias, n: int):
  """The bias as [n], or None."""
  if bias is None:
    return None
  arguments.check_dtype(function, "bias", bias, _FLOATS)
  if bias.shape not in ((n,), (1, n)):
    raise arguments.bad(function, "bias", arguments.describe(bias),
                        f"shape [{n}] or [1, {n}]")
  return bias.reshape(n)


def _activation(function: str, value: Any) -> str | None:
  return arguments.choice(
      function, "activation", value, tuple(gemm_op.ACTIVATIONS))


def _unshuffled(function: str, shuffled: Any, b):
  if not arguments.flag(function, "b_shuffled", shuffled):
    return b
  return layouts.unshuffle_weight(b)


@functools.partial(jax.jit, static_argnums=(0, 1), inline=True)
def _apply(function: str, cfg: Config, x: Operands) -> jax.Array:
  """The product of checked arguments."""
  x = vary_together(x)
  if cfg.scaling == "none":
    return gemm_op.gemm(cfg, x)
  run = arguments.no_gradient(
      function, "where nothing is to be learned through it, apply"
      " jax.lax.stop_gradient to its floating-point arguments")
  return run(functools.partial(gemm_op.product, cfg))(x)


def gemm(
    a: jax.Array,
    b: jax.Array,
    bias: jax.Array | None = None,
    *,
    activation: str | None = None,
    preferred_element_type: Any = None,
    b_shuffled: bool = False,
    transpose_b: bool = True,
) -> jax.Array:
  """`activation(a @ b.T + bias)`, or of `a @ b`, with sums in float32.

  Bias and activation act on the unrounded sums, in the same kernel. The
  gradients of a and b are kernels too, and the same bits in each run; they take
  the result's gradient in a's dtype.

  Args:
    a: [..., m, k], bfloat16 or float16; [k] counts as m = 1. Or float32 or
      float64, multiplied by XLA at its highest precision.
    b: [n, k], or [..., n, k] with the leading axes of a; a's dtype.
    bias: [n] or [1, n], any floating dtype.
    activation: None, "relu", "gelu" (x * Phi(x), Hendrycks and Gimpel,
      arXiv:1606.08415), "gelu_tanh" (its approximation there) or "silu"
      (x * sigmoid(x)).
    preferred_element_type: dtype of the result, bfloat16, float16 or float32
      (float64 for float64); a's by default.
    b_shuffled: b is as `shuffle_weight` made it. It is unshuffled first, by one
      more pass over it.
    transpose_b: False for a b [k, n], or [..., k, n], as Flax's layers keep
      their kernels: `gemm(x, kernel.T)` would write the kernel anew.

  Returns:
    [..., m, n]; [n] for a [k].

  Raises:
    TypeError: an argument of the wrong type or dtype.
    ValueError: a shape or value that cannot be; the message names it.
  """
  function = "gemm"
  a, b = arguments.agreeing(a, b)
  arguments.check_dtype(function, "a", a, _FLOATS)
  arguments.check_dtype(function, "b", b, (a.dtype.name,))
  if a.ndim == 1:
    return gemm(a[None], b, bias, activation=activation,
                preferred_element_type=preferred_element_type,
                b_shuffled=b_shuffled, transpose_b=transpose_b)[0]
  transposed = arguments.flag(function, "transpose_b", transpose_b)
  if arguments.flag(function, "b_shuffled", b_shuffled) and not transposed:
    raise arguments.bad(function, "b_shuffled", b_shuffled,
                        "False where transpose_b is")
  _check_matrices(function, a, b, transpose_b=transposed)
  wide = a.dtype == jnp.float64
  cfg = Config(
      a.dtype.name if preferred_element_type is None else _result_dtype(
          function, preferred_element_type, _RESULTS + ("float64",) * wide),
      "nt" if transposed else "nn",
      activation=_activation(function, activation))
  return _apply(function, cfg, Operands(
      a, _unshuffled(function, b_shuffled, b),
      bias=_bias(function, bias, b.shape[-2 if transposed else -1])))


def _kinds(function: str, name: str, scale, shapes: dict[str, Any]):
  """A scale as a float32 array, and the kinds of scaling that its shape fits.

  Args:
    function: for errors.
    name: of the scale.
    scale: an array or a number, which fits "row".
    shapes: kind of scaling -> shapes.
  """
  if getattr(scale, "weak_type", False) or (
      isinstance(scale, numbers.Real) and not isinstance(scale, bool)):
    scale = jnp.asarray(scale, jnp.float32)
  arguments.check_dtype(function, name, scale, ("float32",))
  kinds = {kind for kind, accepted in shapes.items() if scale.shape in accepted}
  if scale.size == 1:
    kinds.add("row")
  if not kinds:
    raise arguments.bad(
        function, name, arguments.describe(scale), " or ".join(
            ["one number", *dict.fromkeys(
                str(list(s)) for accepted in shapes.values()
                for s in accepted)]))
  return scale, kinds


def _scaled(function: str, a, b, a_scale, b_scale, bias, activation,
            preferred_element_type, b_shuffled, blocks: bool) -> jax.Array:
  """gemm_i8, and gemm_fp8 with `blocks`, of checked dtypes."""
  _check_matrices(function, a, b)
  *lead_a, m, k = a.shape
  *lead_b, n, _ = b.shape
  shapes_a = dict(row=((*lead_a, m, 1), (*lead_a, m)))
  shapes_b = dict(row=((*lead_b, 1, n), (*lead_b, n, 1), (*lead_b, n)))
  if blocks:
    groups = -(-k // BLOCK)
    shapes_a["block"] = (*lead_a, m, groups),
    shapes_b["block"] = (*lead_b, -(-n // BLOCK), groups),
  a_scale, kinds_a = _kinds(function, "a_scale", a_scale, shapes_a)
  b_scale, kinds_b = _kinds(function, "b_scale", b_scale, shapes_b)
  if not kinds_a & kinds_b:
    raise arguments.bad(
        function, "b_scale", arguments.describe(b_scale),
        f"scales a {' or '.join(kinds_a)}, as a_scale's"
        f" {arguments.describe(a_scale)}")
  scaling = "row" if "row" in kinds_a & kinds_b else "block"
  if scaling == "row":
    flat = lambda scale, rows: scale.reshape(
        (1,) if scale.size == 1 else rows)
    a_scale = flat(a_scale, (*lead_a, m))
    b_scale = flat(b_scale, (*lead_b, n))
  cfg = Config(_result_dtype(function, preferred_element_type),
               scaling=scaling, activation=_activation(function, activation))
  return _apply(function, cfg, Operands(
      a, _unshuffled(function, b_shuffled, b), a_scale, b_scale,
      _bias(function, bias, n)))


def gemm_i8(
    a: jax.Array,
    b: jax.Array,
    a_scale: jax.Array | float,
    b_scale: jax.Array | float,
    bias: jax.Array | None = None,
    *,
    activation: str | None = None,
    preferred_element_type: Any = jnp.bfloat16,
    b_shuffled: bool = False,
) -> jax.Array:
  """`activation((a @ b.T) * a_scale * b_scale.T + bias)` of int8 matrices.

  Sums are exact in int32 (up to k = 131,071 for any values), and are scaled in
  float32: LLM.int8()'s vector-wise product (Dettmers et al., arXiv:2208.07339).
  There is no gradient.

  Args:
    a: int8 [..., m, k].
    b: int8 [n, k], or [..., n, k] with the leading axes of a.
    a_scale: float32 [..., m, 1] or [..., m], one a row; or one number.
    b_scale: float32 [..., 1, n], [..., n, 1] or [..., n], one a row of b; or
      one number.
    bias: as in gemm.
    activation: as in gemm.
    preferred_element_type: dtype of the result: bfloat16, float16 or float32.
    b_shuffled: as in gemm.

  Returns:
    [..., m, n].

  Raises:
    TypeError: an argument of the wrong type or dtype, or a gradient.
    ValueError: a shape or value that cannot be; the message names it.
  """
  for name, t in (("a", a), ("b", b)):
    arguments.check_dtype("gemm_i8", name, t, ("int8",))
  return _scaled("gemm_i8", a, b, a_scale, b_scale, bias, activation,
                 preferred_element_type, b_shuffled, blocks=False)


def gemm_fp8(
    a: jax.Array,
    b: jax.Array,
    a_scale: jax.Array | float,
    b_scale: jax.Array | float,
    bias: jax.Array | None = None,
    *,
    activation: str | None = None,
    preferred_element_type: Any = jnp.bfloat16,
    b_shuffled: bool = False,
) -> jax.Array:
  """`activation((a * a_scale) @ (b * b_scale).T + bias)` of float8 matrices.

  Sums are float32. There is no gradient. Either float8 type is exact on every
  device; `float8_dtype()` is that which a device multiplies natively.

  Args:
    a: float8_e4m3fn or float8_e4m3fnuz [..., m, k].
    b: either of them [n, k], or [..., n, k] with the leading axes of a.
    a_scale: float32. One number; or one a row, [..., m, 1] or [..., m]; or one
      every 128 columns, [..., m, ceil(k / 128)] (the layout of DeepSeek-V3,
      arXiv:2412.19437).
    b_scale: float32, of the same kind. One number; or one a row, [..., 1, n],
      [..., n, 1] or [..., n]; or one every 128 x 128, [..., ceil(n / 128),
      ceil(k / 128)]. One number goes with one a row.
    bias: as in gemm.
    activation: as in gemm.
    preferred_element_type: dtype of the result: bfloat16, float16 or float32.
    b_shuffled: as in gemm.

  Returns:
    [..., m, n].

  Raises:
    TypeError: an argument of the wrong type or dtype, or a gradient.
    ValueError: a shape or value that cannot be; the message names it.
  """
  for name, t in (("a", a), ("b", b)):
    arguments.check_dtype("gemm_fp8", name, t, _FLOAT8)
  return _scaled("gemm_fp8", a, b, a_scale, b_scale, bias, activation,
                 preferred_element_type, b_shuffled, blocks=True)


def _block_transposed(function: str, xq, wq, x_scale, w_scale, b_shuffled,
                      out_dtype: str) -> jax.Array:
  """A product whose block scales are stored transposed."""
  for name, t in (("xq", xq), ("wq", wq)):
    arguments.check_dtype(function, name, t, _FLOAT8)
    if t.ndim != 2:
      raise arguments.bad(function, name, arguments.describe(t),
                          "an array of rank 2")
  _check_matrices(function, xq, wq, ("xq", "wq"))
  groups = -(-xq.shape[1] // BLOCK)
  for name, scale, columns in (
      ("x_scale", x_scale, xq.shape[0]),
      ("w_scale", w_scale, -(-wq.shape[0] // BLOCK))):
    arguments.check_dtype(function, name, scale, ("float32",))
    if scale.shape != (groups, columns):
      raise arguments.bad(function, name, arguments.describe(scale),
                          f"shape [{groups}, {columns}]")
  return _apply(
      function, Config(out_dtype, scaling="block_t"),
      Operands(xq, _unshuffled(function, b_shuffled, wq), x_scale, w_scale))


def gemm_fp8_mi350(
    xq: jax.Array,
    wq: jax.Array,
    x_scale: jax.Array,
    w_scale: jax.Array,
) -> jax.Array:
  """Block scaled `gemm_fp8` by jax-aiter's name, with its layout of scales.

  Args:
    xq: float8_e4m3fn or float8_e4m3fnuz [m, k].
    wq: either of them [n, k].
    x_scale: float32 [ceil(k / 128), m].
    w_scale: float32 [ceil(k / 128), ceil(n / 128)].

  Returns:
    bfloat16 [m, n].

  Raises:
    TypeError: as gemm_fp8.
    ValueError: as gemm_fp8.
  """
  return _block_transposed("gemm_fp8_mi350", xq, wq, x_scale, w_scale, False,
                           "bfloat16")


def flatmm_fp8(
    xq: jax.Array,
    wq: jax.Array,
    x_scale: jax.Array,
    w_scale: jax.Array,
    *,
    b_shuffled: bool = False,
) -> jax.Array:
  """`gemm_fp8_mi350` with a float16 result.

  Args:
    xq: as in gemm_fp8_mi350.
    wq: as in gemm_fp8_mi350.
    x_scale: as in gemm_fp8_mi350.
    w_scale: as in gemm_fp8_mi350.
    b_shuffled: wq is as `shuffle_weight` made it. It is unshuffled first, by
      one more pass over it.

  Returns:
    float16 [m, n].

  Raises:
    TypeError: as gemm_fp8.
    ValueError: as gemm_fp8.
  """
  return _block_transposed("flatmm_fp8", xq, wq, x_scale, w_scale, b_shuffled,
                           "float16")


def gemm_fp4(
    a: jax.Array,
    b: jax.Array,
    a_scale: jax.Array,
    b_scale: jax.Array,
    bias: jax.Array | None = None,
    *,
    activation: str | None = None,
    preferred_element_type: Any = jnp.bfloat16,
    b_shuffled: bool = False,
    scales_shuffled: bool = False,
) -> jax.Array:
  """`activation((a * a_scale) @ (b * b_scale).T + bias)` of MXFP4 matrices.

  The format is that of the OCP Microscaling specification (v1.0): e2m1 numbers,
  every 32 of which share a power of two. Sums are float32. There is no
  gradient.

  Args:
    a: uint8 [..., m, k / 2], two e2m1 a byte, the first in the low four bits;
      or float4_e2m1fn [..., m, k].
    b: the same [n, k / 2], or [..., n, k / 2] with the leading axes of a.
    a_scale: uint8 or float8_e8m0fnu [..., m, ceil(k / 32)]: a byte s stands for
      2 ** (s - 127), and 255 for NaN.
    b_scale: the same [..., n, ceil(k / 32)], with the leading axes of b.
    bias: as in gemm.
    activation: as in gemm.
    preferred_element_type: dtype of the result: bfloat16, float16 or float32.
    b_shuffled: b is as `shuffle_weight` made it. It is unshuffled first, by one
      more pass over it.
    scales_shuffled: both scales are as `shuffle_scale` made them; they are
      unshuffled first.

  Returns:
    [..., m, n].

  Raises:
    TypeError: an argument of the wrong type or dtype, or a gradient.
    ValueError: a shape or value that cannot be; the message names it.
  """
  function = "gemm_fp4"
  a, b = (arguments.packed(function, name, t, "float4_e2m1fn")
          for name, t in (("a", a), ("b", b)))
  _check_matrices(function, a, b)
  shuffled = arguments.flag(function, "scales_shuffled", scales_shuffled)
  scales = []
  for name, scale, t in (("a_scale", a_scale, a), ("b_scale", b_scale, b)):
    arguments.check_dtype(function, name, scale, ("uint8", "float8_e8m0fnu"))
    if scale.dtype != jnp.uint8:
      scale = lax.bitcast_convert_type(scale, jnp.uint8)
    shape = (*t.shape[:-1], -(-t.shape[-1] * 2 // MX_BLOCK))
    if shuffled:
      with arguments.called(function, scale=name):
        scale = layouts.unshuffle_scale(scale, shape[-2:])
    if scale.shape != shape:
      raise arguments.bad(function, name, arguments.describe(scale),
                          f"shape {list(shape)}")
    scales.append(scale)
  cfg = Config(_result_dtype(function, preferred_element_type), scaling="mx",
               activation=_activation(function, activation))
  return _apply(function, cfg, Operands(
      a, _unshuffled(function, b_shuffled, b), *scales,
      _bias(function, bias, b.shape[-2])))
