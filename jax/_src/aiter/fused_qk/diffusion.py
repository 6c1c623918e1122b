# SPDX-License-Identifier: Apache-2.0
"""AITER's norm and rotation before attention in diffusion transformers.

Each token of a prompt or an image stands at its own row of the tables, and
there is no cache. Two streams, as of a prompt and an image, have weights of
their own and attend together, the second behind the first. AITER's arguments
but for what it writes its results into.
"""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp

import jax
from jax._src.aiter.core import arguments, dims
from jax._src.aiter.core.arguments import bad, describe
from jax._src.aiter.fused_qk import api
from jax._src.aiter.quant import api as quant

_FLOATS = ("float16", "bfloat16", "float32", "float64")


def _check_sizes(function, name, t, sizes):
  """An error unless t is an array of these sizes, name -> number."""
  arguments.check_is_array(function, name, t, optional=False)
  for argument, size in sizes.items():
    arguments.static(function, argument, size, "an integer")
    if dims.is_known(size):
      arguments.number(function, argument, size, "an integer >= 0",
                       lambda n: n >= 0, int)
  shape = tuple(sizes.values())
  if t.shape != shape:
    raise bad(function, name, describe(t),
              f"shape {list(shape)}, which is [{', '.join(sizes)}]")


def _stream(function, arrays, sizes, is_interleaved, eps, number=""):
  """(q, k) of one stream, whose arguments' names end in a number.

  Args:
    function: the public function's name.
    arrays: q, k, w_q, w_k, cos_sin.
    sizes: batch_size, num_tokens, num_heads_q, num_heads_k, head_size.
    is_interleaved: as AITER's.
    eps: of the norms.
    number: of the stream.
  """
  q, k, w_q, w_k, cos_sin = arrays
  b, t, heads_q, heads_k, d = sizes
  for name, x, of, heads in (("q", q, "num_heads_q", heads_q),
                             ("k", k, "num_heads_k", heads_k)):
    _check_sizes(function, name + number, x, {
        "batch_size": b, f"num_tokens{number}": t, of: heads, "head_size": d})
  _check_sizes(function, f"cos_sin{number}", cos_sin, {
      f"num_tokens{number}": t, "head_size": d})
  for name, weight in (("w_q", w_q), ("w_k", w_k)):
    arguments.check_is_array(function, name + number, weight, optional=False)
  interleaved = arguments.flag(function, "is_interleaved", is_interleaved)
  if dims.is_known(t) and t == 0:
    return q, k
  rows = lambda x: x.reshape(b * t, *x.shape[2:])
  place = jnp.broadcast_to(
      jnp.arange(t, dtype=jnp.int32), (b, t)).reshape(b * t)
  with arguments.called(
      function, q=f"q{number}", k=f"k{number}", cos=f"cos_sin{number}",
      q_weight=f"w_q{number}", k_weight=f"w_k{number}"):
    out = api.fused_qk_norm_rope(
        rows(q), rows(k), place, cos_sin, q_weight=w_q, k_weight=w_k, eps=eps,
        is_neox=not interleaved)
  return tuple(x.reshape(like.shape) for x, like in zip(out, (q, k)))


def _two_streams(function, first, second, sizes, is_interleaved, eps):
  b, t0, t1, *rest = sizes
  for name, a, c in zip("qk", first, second):
    for t in (a, c):
      arguments.check_is_array(function, f"{name}0 or {name}1", t,
                               optional=False)
    if a.dtype != c.dtype:
      raise bad(function, f"{name}1's dtype", c.dtype, f"{a.dtype}, as {name}0",
                TypeError)
  streams = [
      _stream(function, arrays, (b, t, *rest), is_interleaved, eps, number)
      for number, t, arrays in (("0", t0, first), ("1", t1, second))]
  return tuple(jnp.concatenate(pair, 1) for pair in zip(*streams))


def _in_float8(function, q, k, quant_dtype):
  (q8, q_scale), (k8, k_scale) = (
      quant.per_head(function, t, quant_dtype) for t in (q, k))
  return q8, k8, q_scale, k_scale, q, k


def fused_qk_norm_rope_1way(
    q, k, w_q, w_k, cos_sin, batch_size, num_tokens, num_heads_q, num_heads_k,
    head_size, is_interleaved, eps):
  """AITER's fused_qk_norm_rope_1way: `fused_qk_norm_rope` of one stream.

  q and k are [batch_size, num_tokens, heads, head_size], float16, bfloat16 or
  float32; w_q and w_k [head_size]; cos_sin [num_tokens, head_size], a row a
  token, cosines and then sines. is_interleaved: pairs are neighbours, not
  halves. It has gradients.

  Returns:
    (q, k), like them.
  """
  return _stream(
      "fused_qk_norm_rope_1way", (q, k, w_q, w_k, cos_sin),
      (batch_size, num_tokens, num_heads_q, num_heads_k, head_size),
      is_interleaved, eps)


def fused_qk_norm_rope_2way(
    q0, k0, q1, k1, w_q0, w_k0, w_q1, w_k1, cos_sin0, cos_sin1, batch_size,
    num_tokens0, num_tokens1, num_heads_q, num_heads_k, head_size,
    is_interleaved, eps):
  """AITER's fused_qk_norm_rope_2way: that of two streams, one behind the other.

  Returns:
    (q, k), [batch_size, num_tokens0 + num_tokens1, heads, head_size].
  """
  return _two_streams(
      "fused_qk_norm_rope_2way", (q0, k0, w_q0, w_k0, cos_sin0),
      (q1, k1, w_q1, w_k1, cos_sin1),
      (batch_size, num_tokens0, num_tokens1, num_heads_q, num_heads_k,
       head_size), is_interleaved, eps)


def fused_qk_norm_rope_1way_fp8_perhead_quant(
    q, k, w_q, w_k, cos_sin, batch_size, num_tokens, num_heads_q, num_heads_k,
    head_size, is_interleaved, eps, *, quant_dtype: Any = None):
  """AITER's fused_qk_norm_rope_1way_fp8_perhead_quant.

  As fused_qk_norm_rope_1way, and its results in float8 with a scale for each
  head of a batch, as `flash_attn_fp8_pertensor_func` takes them. quant_dtype is
  float8_e4m3fn or float8_e4m3fnuz, by default `float8_dtype()`. No gradients.

  Returns:
    (q, k in float8, float32 [batch_size, heads] scales of q and of k, q, k).
  """
  function = "fused_qk_norm_rope_1way_fp8_perhead_quant"
  return _in_float8(function, *_stream(
      function, (q, k, w_q, w_k, cos_sin),
      (batch_size, num_tokens, num_heads_q, num_heads_k, head_size),
      is_interleaved, eps), quant_dtype)


def fused_qk_norm_rope_2way_fp8_perhead_quant(
    q0, k0, q1, k1, w_q0, w_k0, w_q1, w_k1, cos_sin0, cos_sin1, batch_size,
    num_tokens0, num_tokens1, num_heads_q, num_heads_k, head_size,
    is_interleaved, eps, *, quant_dtype: Any = None):
  """AITER's fused_qk_norm_rope_2way_fp8_perhead_quant.

  As fused_qk_norm_rope_1way_fp8_perhead_quant, of fused_qk_norm_rope_2way.

  Returns:
    As there.
  """
  function = "fused_qk_norm_rope_2way_fp8_perhead_quant"
  return _in_float8(function, *_two_streams(
      function, (q0, k0, w_q0, w_k0, cos_sin0),
      (q1, k1, w_q1, w_k1, cos_sin1),
      (batch_size, num_tokens0, num_tokens1, num_heads_q, num_heads_k,
       head_size), is_interleaved, eps), quant_dtype)


def v_1way_per_head_fp8_quant(
    v: jax.Array, *, quant_dtype: Any = None) -> tuple[jax.Array, jax.Array]:
  """AITER's v_1way_per_head_fp8_quant: values [b, tokens, heads, d] likewise.

  Returns:
    (v in float8, float32 [b, heads]).
  """
  function = "v_1way_per_head_fp8_quant"
  arguments.check_dtype(function, "v", v, _FLOATS)
  if v.ndim != 4:
    raise bad(function, "v", describe(v), "shape [b, tokens, heads, d]")
  return quant.per_head(function, v, quant_dtype)


def v_2way_per_head_fp8_quant(
    v0: jax.Array, v1: jax.Array, *,
    quant_dtype: Any = None) -> tuple[jax.Array, jax.Array]:
  """AITER's v_2way_per_head_fp8_quant: of two streams, one behind the other.

  Returns:
    (v in float8 [b, tokens of both, heads, d], float32 [b, heads]).
  """
  function = "v_2way_per_head_fp8_quant"
  for name, v in (("v0", v0), ("v1", v1)):
    arguments.check_dtype(function, name, v, _FLOATS)
  if v0.ndim != 4 or v1.dtype != v0.dtype or (
      v1.shape != (*v0.shape[:1], *v1.shape[1:2], *v0.shape[2:])):
    raise bad(function, "v1", describe(v1), f"[b, tokens, heads, d], but for"
              f" tokens as v0 {describe(v0)}")
  return quant.per_head(function, jnp.concatenate([v0, v1], 1), quant_dtype)
