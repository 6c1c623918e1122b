# SPDX-License-Identifier: Apache-2.0
"""Attention as Flax's layers call it. Flax itself is not needed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
import numpy as np

import jax
from jax._src.aiter.attention import api
from jax._src.aiter.core import arguments
from jax._src.aiter.core.arguments import (
    bad,
    check_is_array,
    dtype_name,
    flag,
    number,
)


def flax_attention_fn(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    bias: jax.Array | None = None,
    mask: jax.Array | None = None,
    broadcast_dropout: bool = True,
    dropout_rng: jax.Array | None = None,
    dropout_rate: float = 0.0,
    deterministic: bool = False,
    dtype: Any = None,
    precision: Any = None,
    module: Any = None,
    force_fp32_for_softmax: bool = False,
    einsum_dot_general: Callable[..., Any] | None = None,
    qk_attn_weights_einsum: Callable[..., Any] | None = None,
    attn_weights_value_einsum: Callable[..., Any] | None = None,
    *,
    promote_dtype: Callable[..., Any] | None = None,
    is_causal: bool = False,
) -> jax.Array:
  """The `attention_fn` of Flax's attention layers, by the fused kernels.

  For flax.linen.MultiHeadDotProductAttention and SelfAttention and for
  nnx.MultiHeadAttention, with dropout, masks and the cache of decoding. The
  arguments are those of Flax's dot_product_attention. What differs: a query
  that sees no key gives 0, not the mean of the values, and which probabilities
  are dropped is decided by other random numbers.

  Args:
    query: [..., t, n, h].
    key: [..., s, k, h]; k divides n.
    value: [..., s, k, hv].
    bias: added to the scaled scores; broadcasts to [..., n, t, s].
    mask: of any dtype, broadcasts to [..., n, t, s]; 0 and False hide a key.
    broadcast_dropout: drop the same probabilities in all batches and heads.
    dropout_rng: a JAX PRNG key, required where something is dropped.
    dropout_rate: probability of dropping an attention probability,
      0 <= rate < 1.
    deterministic: drop nothing.
    dtype: of the computation and the result; None is what query, key and value
      promote to.
    precision: of products of float32, as jax.numpy takes it; those of float16
      and bfloat16 are exact, and summed in float32.
    module: must be None: fused attention has no weights that it could sow.
    force_fp32_for_softmax: accepted; the softmax is in float32 either way.
    einsum_dot_general: must be None, and so must the next two: nothing else can
      multiply inside a kernel.
    qk_attn_weights_einsum: see einsum_dot_general.
    attn_weights_value_einsum: see einsum_dot_general.
    promote_dtype: what brings (query, key, value) to dtype, as in nnx.
    is_causal: query i sees keys 0 to i.

  Returns:
    [..., t, n, hv].

  Raises:
    TypeError: an argument is not an array, number or dtype of the right kind.
    ValueError: a shape or value is not accepted, or something was asked for
      that fused attention has not.
  """
  name = "flax_attention_fn"
  for arg, t in (("query", query), ("key", key), ("value", value)):
    check_is_array(name, arg, t, optional=False)
  for arg, t in (("bias", bias), ("mask", mask), ("dropout_rng", dropout_rng)):
    check_is_array(name, arg, t)
  for arg, given, accepted in (
      ("module", module, "None: there are no weights to sow"),
      ("einsum_dot_general", einsum_dot_general, "None"),
      ("qk_attn_weights_einsum", qk_attn_weights_einsum, "None"),
      ("attn_weights_value_einsum", attn_weights_value_einsum, "None")):
    if given is not None:
      raise bad(name, arg, f"a {type(given).__name__}", accepted)
  flag(name, "force_fp32_for_softmax", force_fp32_for_softmax)
  dropout_rate = number(
      name, "dropout_rate", dropout_rate, "0 <= dropout_rate < 1",
      lambda p: 0 <= p and np.float32(p) < 1)
  if flag(name, "deterministic", deterministic):
    dropout_rate = 0.0
  call = api.static_arguments(
      name, dropout_rate, None, flag(name, "is_causal", is_causal), (-1, -1),
      0.0, True, top_left=True, least_rank=0,
      precision=arguments.precision(name, precision),
      one_dropout_mask=flag(name, "broadcast_dropout", broadcast_dropout),
      names=("query", "key", "value", "", "", "dropout_rng"))
  if dtype is not None:
    dtype = dtype_name(name, "dtype", dtype)
  if promote_dtype is not None:
    accepted = "None or a function of (query, key, value) and dtype="
    if not callable(promote_dtype):
      raise bad(name, "promote_dtype", repr(promote_dtype), accepted, TypeError)
    try:
      query, key, value = promote_dtype((query, key, value), dtype=dtype)
    except TypeError as error:
      raise bad(name, "promote_dtype", repr(promote_dtype), accepted,
                TypeError) from error
  else:
    try:
      dtype = jnp.result_type(query, key, value) if dtype is None else dtype
    except (TypeError, ValueError):
      raise bad(name, "dtypes of query, key and value",
                f"{query.dtype}, {key.dtype}, {value.dtype}",
                "types that promote to one", TypeError) from None
    query, key, value = (jnp.asarray(t, dtype) for t in (query, key, value))
  return api.attend_as_jax_nn(
      call, dropout_rng if dropout_rate else None, query, key, value, bias,
      None if mask is None else jnp.asarray(mask) != 0)
