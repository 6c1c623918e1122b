# SPDX-License-Identifier: Apache-2.0
"""Norms around attention with what follows them: public functions.

They have AITER's names and orders of arguments, but for arrays that it writes
into: results are returned.
"""

from __future__ import annotations

import functools
import math
from typing import Any, NamedTuple

import jax.numpy as jnp

import jax
from jax._src.aiter.core import arguments, dispatch
from jax._src.aiter.core.arguments import bad, describe
from jax._src.aiter.core.partition import vary_together
from jax._src.aiter.fused_qk import rows
from jax._src.aiter.fused_qk.rows import Config, Operands
from jax._src.aiter.paged import api as paged
from jax._src.aiter.paged.api import Names

DTYPES = ("float16", "bfloat16", "float32", "float64")
GROUPS = (32, 64, 128)
_BYTES = ("int8", "float8_e4m3fn", "float8_e4m3fnuz")
_NO_GRADIENT = "differentiate the function without _quant, or stop the gradient"


class NormedQk(NamedTuple):
  """What fused_qk_rmsnorm_group_quant returns."""
  q: jax.Array
  q_scale: jax.Array
  q_unquantized: jax.Array | None
  k: jax.Array | None
  q_residual_out: jax.Array | None


jax.export.register_namedtuple_serialization(
    NormedQk, serialized_name="jax.experimental.aiter.NormedQk")


def eps_of(function: str, name: str, value) -> float:
  return arguments.number(function, name, value, "a finite number >= 0",
                          lambda e: 0 <= e < math.inf)


def kind_of(function: str, name: str, dtype, accepted=_BYTES) -> str:
  return arguments.dtype_name(
      function, name, dispatch.float8_dtype() if dtype is None else dtype,
      accepted)


def check_like(n: Names, name: str, t, other: str, x) -> None:
  if (t.shape, t.dtype) != (x.shape, x.dtype):
    raise bad(n.function, name, describe(t), f"{describe(x)}, as {other}")


def weight_of(n: Names, name: str, t, cols: int, dtype):
  """A weight of so many columns, in the dtype of what it multiplies."""
  arguments.check_is_array(n.function, name, t, optional=False)
  paged.check_array(n, name, t, 1, DTYPES)
  paged.check_shape(n, name, t, (cols,), "a number a column")
  return t.astype(dtype)


@functools.partial(jax.jit, static_argnums=(0, 1), inline=True)
def run(n: Names, cfg: Config, x: Operands) -> rows.Results:
  call = lambda x: rows.rows(cfg, vary_together(x))
  if cfg.kind:
    call = arguments.no_gradient(n.function, _NO_GRADIENT)(call)
  return call(x)


# -----------------------------------------------------------------------------
# Queries and keys of different widths


def normed_qk(function: str, q, q_weight, q_epsilon, k, k_weight, k_epsilon,
              residual, names=("q", "k", "q_residual"), scale=None,
              **options) -> rows.Results:
  """The operator's results, after all checks; options are of its Config.

  Args:
    function: the public one.
    q: these are as in fused_qk_rmsnorm.
    q_weight: as there.
    q_epsilon: as there.
    k: as there.
    k_weight: as there.
    k_epsilon: as there.
    residual: as there.
    names: what q, k and the residual are called there.
    scale: what q is divided by, called {q}_scale; None if it is found.
    **options: fields of Config.
  """
  q_name, k_name, residual_name = names
  n = Names(function)
  arguments.check_is_array(function, q_name, q, optional=False)
  paged.check_array(n, q_name, q, 2, DTYPES)
  eps = eps_of(function, f"{q_name}_epsilon", q_epsilon)
  k_eps = eps if k_epsilon is None else eps_of(
      function, f"{k_name}_epsilon", k_epsilon)
  options = dict(options, eps=eps)
  x = Operands(q, q_weight=weight_of(
      n, f"{q_name}_weight", q_weight, q.shape[1], q.dtype))
  if scale is not None:
    x = x._replace(q_scale=paged.number_scale(n, f"{q_name}_scale", scale))
  if residual is not None:
    arguments.check_is_array(function, residual_name, residual)
    check_like(n, residual_name, residual, q_name, q)
    x = x._replace(residual=residual)
  if k is not None:
    arguments.check_is_array(function, k_name, k)
    paged.check_array(n, k_name, k, 2, DTYPES)
    paged.check_shape(n, k_name, k, (q.shape[0], k.shape[1]),
                      f"a row for each of {q_name}")
    if k.dtype != q.dtype:
      raise bad(function, f"{k_name}'s dtype", k.dtype,
                f"{q.dtype}, as {q_name}", TypeError)
    x = x._replace(k=k, k_weight=weight_of(
        n, f"{k_name}_weight", k_weight, k.shape[1], k.dtype))
    options["k_eps"] = k_eps
  elif k_weight is not None:
    raise bad(function, f"{k_name}_weight", "given", f"None without {k_name}")
  return run(n, Config(**options), x)


def group_of(function: str, name: str, size, kind: str) -> int:
  if kind == "mxfp4":
    return arguments.choice(function, name, size, (32,))
  return arguments.choice(function, name, size, GROUPS)


def fused_qk_rmsnorm(
    q: jax.Array,
    q_weight: jax.Array,
    q_epsilon: float = 1e-6,
    k: jax.Array | None = None,
    k_weight: jax.Array | None = None,
    k_epsilon: float | None = None,
    q_residual: jax.Array | None = None,
    *,
    gemma_norm: bool = False,
) -> tuple[jax.Array, ...]:
  """RMSNorms of queries and of keys of another width, in one launch.

  Each as `rms_norm` (Zhang and Sennrich, arXiv:1910.07467), in float32 and
  rounded once: the two norms that follow the down-projections of latent
  attention (DeepSeek-AI, arXiv:2405.04434). It has gradients both ways: those
  of the formula.

  Args:
    q: [m, n1], float16, bfloat16 or float32.
    q_weight: [n1]; computed with in q's dtype.
    q_epsilon: added to the mean of squares of q.
    k: [m, n2], q's dtype; None for none.
    k_weight: [n2].
    k_epsilon: as q_epsilon, which it is by default.
    q_residual: like q, and added to it in float32 before.
    gemma_norm: weights are 1 + weight.

  Returns:
    (q, k, q_residual_out), of which the last two are there as k and q_residual
    are; q_residual_out is the sum, rounded to q's dtype.

  Raises:
    TypeError: an argument of the wrong type or dtype.
    ValueError: a shape or value that cannot be; the message names it.
  """
  function = "fused_qk_rmsnorm"
  out = normed_qk(function, q, q_weight, q_epsilon, k, k_weight, k_epsilon,
            q_residual,
            gemma=arguments.flag(function, "gemma_norm", gemma_norm))
  return tuple(t for t in (out.q, out.k, out.residual) if t is not None)


def fused_qk_rmsnorm_group_quant(
    q: jax.Array,
    q_weight: jax.Array,
    q_epsilon: float = 1e-6,
    k: jax.Array | None = None,
    k_weight: jax.Array | None = None,
    k_epsilon: float | None = None,
    q_residual: jax.Array | None = None,
    group_size: int = 128,
    transpose_scale: bool = False,
    gemma_norm: bool = False,
    *,
    quant_dtype: Any = None,
    output_unquantized: bool = False,
) -> NormedQk:
  """`fused_qk_rmsnorm` with queries quantised by groups of columns.

  The norm in float32, not rounded before, is quantised as by `per_group_quant`
  or, of "mxfp4", by `mx_quant`. Keys are not.

  Args:
    q: as in fused_qk_rmsnorm.
    q_weight: as there.
    q_epsilon: as there.
    k: as there.
    k_weight: as there.
    k_epsilon: as there.
    q_residual: as there.
    group_size: 32, 64 or 128; of "mxfp4" 32.
    transpose_scale: scales are returned as [groups, m].
    gemma_norm: as there.
    quant_dtype: int8, float8_e4m3fn, float8_e4m3fnuz or "mxfp4"; by default
      float8_dtype().
    output_unquantized: whether to return the norm in q's dtype too.

  Returns:
    A NamedTuple (q, q_scale, q_unquantized, k, q_residual_out), where None is
    what was not asked for: quant_dtype [m, n1] (of "mxfp4" uint8 [m, n1 / 2]),
    float32 [m, groups] or [groups, m] (of "mxfp4" uint8), q's dtype [m, n1],
    [m, n2] and [m, n1].

  Raises:
    TypeError: as fused_qk_rmsnorm; or differentiation.
    ValueError: as fused_qk_rmsnorm.
  """
  function = "fused_qk_rmsnorm_group_quant"
  kind = kind_of(function, "quant_dtype", quant_dtype, (*_BYTES, "mxfp4"))
  out = normed_qk(
      function, q, q_weight, q_epsilon, k, k_weight, k_epsilon, q_residual,
      kind=kind, mode="up" if kind == "mxfp4" else "",
      gemma=arguments.flag(function, "gemma_norm", gemma_norm),
      group=group_of(function, "group_size", group_size, kind),
      transposed=arguments.flag(function, "transpose_scale", transpose_scale),
      kept=arguments.flag(function, "output_unquantized", output_unquantized))
  return NormedQk(out.codes, out.scale, out.q, out.k, out.residual)


def fused_qk_rmsnorm_per_token_quant(
    q: jax.Array,
    q_weight: jax.Array,
    q_epsilon: float = 1e-6,
    k: jax.Array | None = None,
    k_weight: jax.Array | None = None,
    k_epsilon: float | None = None,
    q_residual: jax.Array | None = None,
    gemma_norm: bool = False,
    *,
    quant_dtype: Any = None,
    output_unquantized: bool = False,
) -> NormedQk:
  """`fused_qk_rmsnorm` with queries quantised by rows, as per_token_quant.

  Args:
    q: as in fused_qk_rmsnorm_group_quant.
    q_weight: as there.
    q_epsilon: as there.
    k: as there.
    k_weight: as there.
    k_epsilon: as there.
    q_residual: as there.
    gemma_norm: as there.
    quant_dtype: as there, but not "mxfp4".
    output_unquantized: as there.

  Returns:
    As fused_qk_rmsnorm_group_quant, with q_scale float32 [m, 1].

  Raises:
    TypeError: as fused_qk_rmsnorm_group_quant.
    ValueError: as fused_qk_rmsnorm_group_quant.
  """
  function = "fused_qk_rmsnorm_per_token_quant"
  out = normed_qk(
      function, q, q_weight, q_epsilon, k, k_weight, k_epsilon, q_residual,
      kind=kind_of(function, "quant_dtype", quant_dtype),
      gemma=arguments.flag(function, "gemma_norm", gemma_norm),
      kept=arguments.flag(function, "output_unquantized", output_unquantized))
  return NormedQk(out.codes, out.scale, out.q, out.k, out.residual)


# -----------------------------------------------------------------------------
# Heads side by side


def check_heads(n: Names, name: str, x) -> None:
  arguments.check_is_array(n.function, name, x, optional=False)
  paged.check_array(n, name, x, 3, DTYPES)
  if x.shape[1] < 1 or x.shape[2] < 1:
    raise bad(n.function, name, describe(x),
              "[tokens, heads, columns] of at least one head and column")


def _gated(function: str, x, z, weight, epsilon, **options) -> rows.Results:
  n = Names(function)
  check_heads(n, "x", x)
  arguments.check_is_array(function, "z", z, optional=False)
  check_like(n, "z", z, "x", x)
  dim = x.shape[2]
  flat = lambda t: t.reshape(t.shape[0], t.shape[1] * dim)
  return run(
      n, Config(dim, eps_of(function, "epsilon", epsilon), **options),
      Operands(flat(x), gate=flat(z),
               q_weight=weight_of(n, "weight", weight, dim, x.dtype)))


def gated_rmsnorm(
    x: jax.Array, z: jax.Array, weight: jax.Array, epsilon: float = 1e-6,
) -> jax.Array:
  """RMSNorm of each head, times the SiLU of a gate.

  `x / sqrt(mean(x^2) + epsilon) * weight * z / (1 + exp(-z))` in float32,
  rounded once: what follows Qwen3-Next's linear attention, AITER's
  gated_rmsnorm_bf16. It has gradients both ways: those of the formula.

  Args:
    x: [tokens, heads, d], float16, bfloat16 or float32. On a GPU kernels are
      for a d of 32, 64, 128 or 256.
    z: like x, the gate.
    weight: [d]; computed with in x's dtype.
    epsilon: of the norm.

  Returns:
    [tokens, heads * d], x's dtype.

  Raises:
    TypeError: an argument of the wrong type or dtype.
    ValueError: a shape or value that cannot be; the message names it.
  """
  return _gated("gated_rmsnorm", x, z, weight, epsilon).q


def gated_rmsnorm_fp8_group_quant(
    x: jax.Array,
    z: jax.Array,
    weight: jax.Array,
    epsilon: float = 1e-6,
    group_size: int = 128,
    transpose_scale: bool = False,
    *,
    quant_dtype: Any = None,
) -> tuple[jax.Array, jax.Array]:
  """`gated_rmsnorm`, quantised by groups of columns as by per_group_quant.

  Args:
    x: as there.
    z: as there.
    weight: as there.
    epsilon: as there.
    group_size: 32, 64 or 128.
    transpose_scale: scales are returned as [groups, tokens].
    quant_dtype: int8, float8_e4m3fn or float8_e4m3fnuz; by default
      float8_dtype().

  Returns:
    (q [tokens, heads * d], scale float32 [tokens, groups] or transposed).

  Raises:
    TypeError: as there; or differentiation.
    ValueError: as there.
  """
  function = "gated_rmsnorm_fp8_group_quant"
  out = _gated(
      function, x, z, weight, epsilon,
      kind=kind_of(function, "quant_dtype", quant_dtype),
      group=group_of(function, "group_size", group_size, ""),
      transposed=arguments.flag(function, "transpose_scale", transpose_scale),
      kept=False)
  return out.codes, out.scale


def gated_rmsnorm_fp8_per_token_quant(
    x: jax.Array,
    z: jax.Array,
    weight: jax.Array,
    epsilon: float = 1e-6,
    *,
    quant_dtype: Any = None,
) -> tuple[jax.Array, jax.Array]:
  """`gated_rmsnorm`, quantised by rows as by per_token_quant.

  Args:
    x: as there.
    z: as there.
    weight: as there.
    epsilon: as there.
    quant_dtype: as in gated_rmsnorm_fp8_group_quant.

  Returns:
    (q [tokens, heads * d], scale float32 [tokens, 1]).

  Raises:
    TypeError: as there; or differentiation.
    ValueError: as there.
  """
  function = "gated_rmsnorm_fp8_per_token_quant"
  out = _gated(function, x, z, weight, epsilon, kept=False,
               kind=kind_of(function, "quant_dtype", quant_dtype))
  return out.codes, out.scale


def inverse_rope_group_quant(
    o: jax.Array,
    positions: jax.Array,
    cos_cache: jax.Array,
    sin_cache: jax.Array,
    num_groups: int,
    quant_group_size: int = 128,
    scale_layout: str = "row",
    *,
    quant_dtype: Any = None,
    scale_dtype: Any = jnp.uint8,
    is_neox: bool = False,
) -> tuple[jax.Array, jax.Array]:
  """Attention's output, rotated back and quantised by groups of columns.

  The last 2 p columns of each head are rotated by minus their token's position,
  which undoes what values that were rotated as keys bring with them; then as by
  `per_group_quant`, from float32. For a grouped product, heads are in
  num_groups groups.

  Args:
    o: [tokens, heads, d], float16, bfloat16 or float32.
    positions: integers [tokens], rows of the tables; those out of range are the
      nearest.
    cos_cache: float [rows, p]; computed with as float32.
    sin_cache: likewise.
    num_groups: a divisor of heads * d.
    quant_group_size: 32, 64 or 128, a divisor of heads * d / num_groups.
    scale_layout: "row", or "col" for scales of a column side by side.
    quant_dtype: float8_e4m3fn or float8_e4m3fnuz, by default float8_dtype(); or
      int8, whose scale is float32.
    scale_dtype: uint8 for powers of two, e8m0; or float32.
    is_neox: pairs are the halves of those columns; else neighbours.

  Returns:
    (q [tokens, num_groups, n], scale), with n = heads * d / num_groups; scale
    is [tokens, num_groups, n / quant_group_size], of "col" [num_groups,
    n / quant_group_size, tokens].

  Raises:
    TypeError: an argument of the wrong type or dtype; or differentiation.
    ValueError: a shape or value that cannot be; the message names it.
  """
  function = "inverse_rope_group_quant"
  n = Names(function)
  check_heads(n, "o", o)
  tokens, heads, dim = o.shape
  for name, t in (("positions", positions), ("cos_cache", cos_cache),
                  ("sin_cache", sin_cache)):
    arguments.check_is_array(function, name, t, optional=False)
  positions = paged.integers(n, "positions", positions, 1)
  paged.check_shape(n, "positions", positions, (tokens,), "one for each token")
  for name, t in (("cos_cache", cos_cache), ("sin_cache", sin_cache)):
    paged.check_array(n, name, t, 2, DTYPES)
  pairs = cos_cache.shape[1]
  if cos_cache.shape[0] < 1 or not 1 <= pairs <= dim // 2:
    raise bad(function, "cos_cache", describe(cos_cache),
              f"[rows, pairs] of at most {dim} columns of a head")
  paged.check_shape(n, "sin_cache", sin_cache, cos_cache.shape, "as cos_cache")
  parts = arguments.number(
      function, "num_groups", num_groups, f"a divisor of {heads * dim}",
      lambda g: g >= 1 and heads * dim % g == 0, int)
  width = heads * dim // parts
  size = group_of(function, "quant_group_size", quant_group_size, "")
  if width % size:
    raise bad(function, "quant_group_size", size,
              f"a divisor of {width}, heads * d / num_groups")
  kind = kind_of(function, "quant_dtype", quant_dtype)
  scales = arguments.dtype_name(
      function, "scale_dtype", scale_dtype,
      ("float32",) if kind == "int8" else ("uint8", "float32"))
  layout = arguments.choice(function, "scale_layout", scale_layout,
                            ("row", "col"))
  out = run(n, Config(
      dim, first=dim - 2 * pairs, kind=kind, group=size,
      gptj=not arguments.flag(function, "is_neox", is_neox),
      mode="up" if scales == "uint8" else "", transposed=layout == "col",
      kept=False), Operands(
          o.reshape(tokens, math.prod(o.shape[1:])),
          cos=cos_cache.astype(jnp.float32),
          sin=sin_cache.astype(jnp.float32), positions=positions))
  found = (parts, width // size)
  return (out.codes.reshape(tokens, parts, width), out.scale.reshape(
      (*found, tokens) if layout == "col" else (tokens, *found)))
