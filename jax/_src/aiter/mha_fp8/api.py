# SPDX-License-Identifier: Apache-2.0
"""Attention of float8 tensors: public functions.

AITER's, and their packed form. They have no gradient.
"""

from __future__ import annotations

import functools
import math
from typing import NamedTuple

import jax.numpy as jnp

import jax
from jax._src.aiter.core import arguments
from jax._src.aiter.core.arguments import bad, check_is_array, describe
from jax._src.aiter.core.partition import vary_together
from jax._src.aiter.mha_fp8 import op
from jax._src.aiter.mha_fp8.op import BLOCK, Config, Operands

_MAX_HEAD_DIM = 256
_FLOATS = ("float16", "bfloat16", "float32", "float64")
_NO_GRADIENT = "use flash_attn_func of the dequantised arrays"


class _Static(NamedTuple):
  """What a public function was called with, apart from arrays; hashable."""
  function: str
  softmax_scale: float | None
  window: tuple[int, int]
  soft_cap: float
  min_seqlen_q: int
  return_lse: bool


def _static(function, causal, window_size, softmax_scale, return_lse,
            soft_cap=0.0, min_seqlen_q=0) -> _Static:
  left, right, *sink_tokens = arguments.integers(
      function, "window_size", window_size,
      "(left, right) or (left, right, 0), integers, each side >= 0 or -1 for"
      " unbounded", lambda w: w >= -1, (2, 3))
  if sink_tokens not in ([], [0]):
    raise bad(function, "window_size", window_size, "no leading keys: a third"
              " number of 0")
  left, right = map(arguments.window_side, (left, right))
  if arguments.flag(function, "causal", causal):
    right = 0
  if softmax_scale is not None:
    softmax_scale = arguments.number(
        function, "softmax_scale", softmax_scale, "None or a finite number",
        math.isfinite)
  return _Static(
      function, softmax_scale, (left, right),
      arguments.number(function, "logits_soft_cap", soft_cap,
                       "0 for none or a number > 0",
                       lambda c: 0 <= c < math.inf),
      arguments.number(function, "min_seqlen_q", min_seqlen_q,
                       "an integer from 0 to 2^31 - 1",
                       lambda n: 0 <= n < 2**31, int),
      arguments.flag(function, "return_lse", return_lse))


def _check_qkv(function: str, q, k, v, rank: int) -> None:
  for name, t in (("q", q), ("k", k), ("v", v)):
    arguments.check_dtype(function, name, t, tuple(op.DTYPES))
    if t.ndim != rank:
      raise bad(function, name, describe(t), f"an array of rank {rank}")
    if t.dtype != q.dtype:
      raise bad(function, f"{name}'s dtype", t.dtype, f"{q.dtype}, as q",
                TypeError)
    if not 1 <= t.shape[-1] <= _MAX_HEAD_DIM:
      raise bad(function, f"{name}'s head_dim", t.shape[-1],
                f"1 to {_MAX_HEAD_DIM}")
  if k.shape[:-1] != v.shape[:-1]:
    raise bad(function, "v", describe(v),
              f"{list(k.shape[:-1])} + [head_dim], as k")
  if q.shape[-1] != k.shape[-1]:
    raise bad(function, "k's head_dim", k.shape[-1], f"{q.shape[-1]}, as q")
  if rank == 4 and q.shape[0] != k.shape[0]:
    raise bad(function, "k's batch", k.shape[0], f"{q.shape[0]}, as q")
  hq, hk = q.shape[-2], k.shape[-2]
  if hq < 1 or hk < 1 or hq % hk:
    raise bad(function, "heads of q and k", f"{hq} and {hk}",
              "a number of q heads that is a multiple of k's")


def _check_scales(function: str, *scales) -> None:
  for name, t in zip(("q_descale", "k_descale", "v_descale"), scales):
    arguments.operand(function, name, t)


def _scale(function: str, name: str, scale, b, hk, blocks):
  """float32 [b, hk, 1 or blocks]; `blocks` is None if there are none."""
  if scale is None:
    return jnp.ones((b, hk, 1), jnp.float32)
  scale = jnp.asarray(scale)
  if scale.dtype.name not in _FLOATS:
    raise bad(function, f"{name}'s dtype", scale.dtype, " or ".join(_FLOATS),
              TypeError)
  if scale.ndim < 2 and scale.size == 1:
    scale = scale.reshape(1, 1, 1)
  elif scale.shape == (b, hk):
    scale = scale[:, :, None]
  elif blocks is None or scale.shape != (b, hk, blocks):
    more = "" if blocks is None else f" or [{b}, {hk}, {blocks}]"
    raise bad(function, name, describe(scale),
              f"a number, [1] or [{b}, {hk}]{more}")
  return jnp.broadcast_to(
      scale.astype(jnp.float32), (b, hk, scale.shape[2]))


@functools.partial(jax.jit, static_argnums=0, inline=True)
def _attend(s: _Static, q, k, v, q_descale, k_descale, v_descale, sink,
            cu_seqlens_q=None, cu_seqlens_k=None):
  """Everything that happens while tracing."""
  packed = cu_seqlens_q is not None
  _check_qkv(s.function, q, k, v, 3 if packed else 4)
  if packed:
    cus = []
    for name, cu in (("cu_seqlens_q", cu_seqlens_q),
                     ("cu_seqlens_k", cu_seqlens_k)):
      arguments.check_integers(s.function, name, cu)
      if cu.ndim != 1 or cu.shape[0] < 1 or (
          cus and cu.shape != cus[0].shape):
        raise bad(s.function, name, describe(cu), "shape [b + 1]" if not cus
                  else f"{list(cus[0].shape)}, as cu_seqlens_q")
      cus.append(jnp.asarray(arguments.int32(cu)))
    cu_seqlens_q, cu_seqlens_k = cus
  b = cu_seqlens_q.shape[0] - 1 if packed else q.shape[0]
  hq, hk = q.shape[-2], k.shape[-2]
  blocks = (k.shape[-3] + BLOCK - 1) // BLOCK
  k_scale = _scale(s.function, "k_descale", k_descale, b, hk, blocks)
  k_scale *= _scale(s.function, "q_descale", q_descale, b, hk, None)
  v_scale = _scale(s.function, "v_descale", v_descale, b, hk, blocks)
  # Both or neither: kernels have one way to find them.
  many = jnp.broadcast_shapes(k_scale.shape, v_scale.shape)
  if sink is not None:
    arguments.check_dtype(s.function, "sink_ptr", sink, _FLOATS)
    if sink.shape not in ((hq,), (b, hq)):
      raise bad(s.function, "sink_ptr", describe(sink),
                f"shape [{hq}] or [{b}, {hq}]")
    sink = jnp.broadcast_to(sink.astype(jnp.float32), (b, hq))
  scale = s.softmax_scale
  cfg = Config(1 / math.sqrt(q.shape[-1]) if scale is None else scale,
               s.window, s.soft_cap, s.min_seqlen_q)
  x = Operands(q, k, v, jnp.broadcast_to(k_scale, many),
               jnp.broadcast_to(v_scale, many), sink, cu_seqlens_q,
               cu_seqlens_k)
  call = arguments.no_gradient(s.function, _NO_GRADIENT)(
      lambda x: op.attend(cfg, vary_together(x)))
  out, lse = call(x)
  return (out, lse) if s.return_lse else out


def flash_attn_fp8_pertensor_func(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    q_descale: jax.Array | float | None = None,
    k_descale: jax.Array | float | None = None,
    v_descale: jax.Array | float | None = None,
    causal: bool = False,
    window_size: tuple[int, ...] = (-1, -1, 0),
    softmax_scale: float | None = None,
    sink_ptr: jax.Array | None = None,
    *,
    return_lse: bool = False,
) -> jax.Array | tuple[jax.Array, jax.Array]:
  """Attention of float8 tensors: both products are of float8 numbers.

  softmax(softmax_scale * (q_descale q) (k_descale k)^T) (v_descale v). Weights
  of the values are rounded to float8 too. On a GPU whose matrix units multiply
  this float8 type (`float8_dtype`); elsewhere, and of head dims above 128, the
  tensors are dequantised to bfloat16.

  Args:
    q: [b, sq, hq, d], float8_e4m3fn or float8_e4m3fnuz. d <= 256.
    k: [b, sk, hk, d], as q; hk divides hq.
    v: [b, sk, hk, dv], as q.
    q_descale: scale of dequantisation, positive: a number, [1] or [b, hk],
      shared by the query heads of a KV head. None is 1.
    k_descale: likewise, or [b, hk, ceil(sk / 128)]: for each 128 keys.
    v_descale: as k_descale.
    causal: query i sees keys up to i + sk - sq (bottom right alignment).
    window_size: (left, right): query i sees keys from i + sk - sq - left to
      i + sk - sq + right; -1 for no bound. A third number must be 0.
    softmax_scale: factor on the scores; None is 1 / sqrt(d).
    sink_ptr: [hq] or [b, hq], a logit in every row's softmax that has no
      value.
    return_lse: return the log-sum-exp of every row too.

  Returns:
    bfloat16 [b, sq, hq, dv]; with return_lse also float32 [b, hq, sq].

  Raises:
    TypeError: an argument is not an array, number or dtype of the right kind.
    ValueError: a shape or value is not accepted.
  """
  name = "flash_attn_fp8_pertensor_func"
  for arg, t in (("q", q), ("k", k), ("v", v)):
    check_is_array(name, arg, t, optional=False)
  check_is_array(name, "sink_ptr", sink_ptr)
  s = _static(name, causal, window_size, softmax_scale, return_lse)
  _check_scales(name, q_descale, k_descale, v_descale)
  return _attend(s, q, k, v, q_descale, k_descale, v_descale, sink_ptr)


def flash_attn_varlen_fp8_pertensor_func(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    q_descale: jax.Array | float | None,
    k_descale: jax.Array | float | None,
    v_descale: jax.Array | float | None,
    cu_seqlens_q: jax.Array,
    cu_seqlens_k: jax.Array,
    max_seqlen_q: int = 0,
    max_seqlen_k: int = 0,
    min_seqlen_q: int = 0,
    logits_soft_cap: float = 0.0,
    causal: bool = False,
    window_size: tuple[int, ...] = (-1, -1, 0),
    softmax_scale: float | None = None,
    sink_ptr: jax.Array | None = None,
    *,
    return_lse: bool = False,
) -> jax.Array | tuple[jax.Array, jax.Array]:
  """`flash_attn_fp8_pertensor_func` of sequences packed in one axis.

  Args:
    q: [total_q, hq, d], as there.
    k: [total_k, hk, d], as there.
    v: [total_k, hk, dv], as there.
    q_descale: as there, of b sequences.
    k_descale: likewise; blocks of 128 keys count from each sequence's first:
      [b, hk, ceil(total_k / 128)].
    v_descale: as k_descale.
    cu_seqlens_q: integers [b + 1], where each sequence's queries begin; 0
      first and in order.
    cu_seqlens_k: likewise, of keys.
    max_seqlen_q: accepted; no bound is needed.
    max_seqlen_k: accepted; no bound is needed.
    min_seqlen_q: if > 0, sequences of at most this many queries are skipped:
      out 0, lse -inf. With it tensors are dequantised.
    logits_soft_cap: if > 0, scores become cap * tanh(score / cap). With it
      tensors are dequantised.
    causal: as there, with each sequence's own lengths.
    window_size: as there.
    softmax_scale: as there.
    sink_ptr: as there.
    return_lse: return the log-sum-exp of every row too.

  Returns:
    bfloat16 [total_q, hq, dv]; with return_lse also float32 [hq, total_q].

  Raises:
    TypeError: an argument is not an array, number or dtype of the right kind.
    ValueError: a shape or value is not accepted.
  """
  name = "flash_attn_varlen_fp8_pertensor_func"
  for arg, t in (("q", q), ("k", k), ("v", v), ("cu_seqlens_q", cu_seqlens_q),
                 ("cu_seqlens_k", cu_seqlens_k)):
    check_is_array(name, arg, t, optional=False)
  check_is_array(name, "sink_ptr", sink_ptr)
  for arg, value in (("max_seqlen_q", max_seqlen_q),
                     ("max_seqlen_k", max_seqlen_k)):
    arguments.number(name, arg, value, "an integer >= 0", lambda n: n >= 0,
                     int)
  for arg, cu, t in (("cu_seqlens_q", cu_seqlens_q, q),
                     ("cu_seqlens_k", cu_seqlens_k, k)):
    if t.ndim == 3:
      arguments.check_cumulative(name, arg, cu, t.shape[0])
  s = _static(name, causal, window_size, softmax_scale, return_lse,
              logits_soft_cap, min_seqlen_q)
  _check_scales(name, q_descale, k_descale, v_descale)
  return _attend(s, q, k, v, q_descale, k_descale, v_descale, sink_ptr,
                 cu_seqlens_q, cu_seqlens_k)
