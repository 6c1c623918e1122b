# SPDX-License-Identifier: Apache-2.0
"""Multi-head attention: the public functions and their arguments.

Python values are checked at once; arrays are checked, and brought to the
operator's form, inside one jit, so that later eager calls cost little.
"""

from __future__ import annotations

import functools
import math
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np

import jax
from jax import lax
from jax._src.aiter.attention import op as mha_op
from jax._src.aiter.attention import rows
from jax._src.aiter.attention.types import Config, Operands
from jax._src.aiter.core import arguments, dims, philox
from jax._src.aiter.core.arguments import bad, check_is_array, describe, flag
from jax._src.aiter.core.partition import vary_together

_MAX_HEAD_DIM = 256
_DTYPES = ("float16", "bfloat16", "float32", "float64")

# -----------------------------------------------------------------------------
# Arguments


class Call(NamedTuple):
  """What a public function was called with, apart from arrays; hashable.

  `names` are the caller's names of q, k, v, the two lengths and the key of
  dropout; `least_rank` is the least of a bias; `one_dropout_mask` is one for
  all batches and heads.
  """
  function: str
  softmax_scale: float | None
  dropout_p: float
  causal: bool
  window: tuple[int, int, int]
  logits_soft_cap: float
  deterministic: bool
  top_left: bool = False
  min_seqlen_q: int = 0
  max_seqlen_k: int = 0
  return_lse: bool = False
  return_attn_probs: bool = False
  least_rank: int = 2
  one_dropout_mask: bool = False
  precision: Any = None
  names: tuple[str, ...] = (
      "q", "k", "v", "cu_seqlens_q", "cu_seqlens_k", "dropout_key")


def static_arguments(function, dropout_p, softmax_scale, causal, window_size,
                     logits_soft_cap, deterministic, **others) -> Call:
  """Checks everything that is not an array."""
  number = functools.partial(arguments.number, function)
  accepted = ("(left, right) or (left, right, sink_tokens), integers, each side"
              " >= 0 or -1 for unbounded, sink_tokens >= 0")
  left, right, *rest = arguments.integers(
      function, "window_size", window_size, accepted, lambda w: w >= -1, (2, 3))
  left, right = map(arguments.window_side, (left, right))
  sink_tokens = number("window_size", rest[0], accepted, lambda w: w >= 0,
                       int) if rest else 0
  if arguments.window_side(sink_tokens) < 0:
    left, sink_tokens = -1, 0  # All keys are leading ones.
  # float32, as the kernels get it: the mask's threshold is the same everywhere.
  dropout_p = number("dropout_p", dropout_p, "0 <= dropout_p < 1",
                     lambda p: 0 <= p and np.float32(p) < 1)
  if softmax_scale is not None:
    softmax_scale = number("softmax_scale", softmax_scale,
                           "None or a finite number", math.isfinite)
  return Call(
      function, softmax_scale, float(np.float32(dropout_p)),
      flag(function, "causal", causal), (left, right, sink_tokens),
      number("logits_soft_cap", logits_soft_cap, "0 for none or a number > 0",
             lambda c: 0 <= c < math.inf),
      flag(function, "deterministic", deterministic), **others)


def _check_qkv(call: Call, q, k, v, packed: bool):
  """Types and shapes of q, k and v."""
  nq, nk, nv = call.names[:3]
  layout = "[total, heads, head_dim]" if packed else "[b, s, heads, head_dim]"
  for name, t in zip(call.names, (q, k, v)):
    if t.dtype.name not in _DTYPES:
      raise bad(call.function, f"{name}'s dtype", t.dtype,
                " or ".join(_DTYPES), TypeError)
    if t.ndim != (3 if packed else 4):
      raise bad(call.function, name, describe(t), f"rank {3 if packed else 4}"
                f" {layout}")
  if not q.dtype == k.dtype == v.dtype:
    raise bad(call.function, f"the dtype of {nq}, {nk}, {nv}",
              f"{q.dtype}, {k.dtype}, {v.dtype}", "one dtype for all three",
              TypeError)
  if k.shape[:-1] != v.shape[:-1]:
    raise bad(call.function, nv, describe(v),
              f"{list(k.shape[:-1])} + [head_dim], as {nk}")
  if q.shape[-1] != k.shape[-1]:
    raise bad(call.function, f"{nk}'s head_dim", k.shape[-1],
              f"{q.shape[-1]}, as {nq}")
  if not packed and q.shape[0] != k.shape[0]:
    raise bad(call.function, f"{nk}'s batch", k.shape[0],
              f"{q.shape[0]}, as {nq}")
  for name, t in ((nq, q), (nv, v)):
    if not 1 <= t.shape[-1] <= _MAX_HEAD_DIM:
      raise bad(call.function, f"{name}'s head_dim", t.shape[-1],
                f"1 to {_MAX_HEAD_DIM}")
  hq, hk = q.shape[-2], k.shape[-2]
  if hq < 1 or hk < 1 or hq % hk:
    raise bad(call.function, f"heads of {nq} and {nk}", f"{hq} and {hk}",
              f"a number of {nq} heads that is a multiple of {nk}'s")


def _check_lengths(call: Call, name: str, cu, size: int | None):
  if cu is None:
    return None
  if not jnp.issubdtype(cu.dtype, jnp.integer):
    raise bad(call.function, f"{name}'s dtype", cu.dtype, "an integer dtype",
              TypeError)
  if cu.ndim != 1 or cu.shape[0] < 1 or size not in (None, cu.shape[0]):
    raise bad(call.function, name, describe(cu),
              f"shape [{'b + 1' if size is None else size}]")
  return cu.astype(jnp.int32)


def _check_per_head(call: Call, name: str, t, b: int, hq: int):
  """float32 [b, hq] from [hq] or [b, hq]."""
  if t is None:
    return None
  if not jnp.issubdtype(t.dtype, jnp.floating):
    raise bad(call.function, f"{name}'s dtype", t.dtype, "a floating dtype",
              TypeError)
  if t.shape not in ((hq,), (b, hq)):
    raise bad(call.function, name, describe(t),
              f"shape [{hq}] or [{b}, {hq}]")
  return jnp.broadcast_to(t.astype(jnp.float32), (b, hq))


def check_planes(call: Call, name: str, t, q, k):
  """Bias or mask as [1 | b, 1 | hq, 1 | sq, 1 | sk]; of q and k the shapes."""
  if name == "mask" and t.dtype != bool:
    raise bad(call.function, "mask's dtype", t.dtype, "bool", TypeError)
  full = (q.shape[0], q.shape[2], q.shape[1], k.shape[1])
  shape = (1,) * (4 - t.ndim) + tuple(t.shape)
  if not call.least_rank <= t.ndim <= 4 or any(
      n not in (1, m) for n, m in zip(shape, full)):
    raise bad(call.function, name, describe(t),
              f"[sq, sk], [hq, sq, sk] or [b, hq, sq, sk] that broadcasts to"
              f" {list(full)}")
  return t.reshape(shape)


def check_bias(call: Call, bias, q, k):
  """Bias as [1 | b, 1 | hq, 1 | sq, 1 | sk] in q's dtype or float32."""
  if bias is None:
    return None
  if not jnp.issubdtype(bias.dtype, jnp.floating):
    raise bad(call.function, "bias's dtype", bias.dtype, "a floating dtype",
              TypeError)
  bias = check_planes(call, "bias", bias, q, k)
  if bias.dtype not in (q.dtype, jnp.float32):
    bias = bias.astype(jnp.promote_types(q.dtype, jnp.float32))
  return bias


def _check_mask(call: Call, mask, bias, q, k):
  """Mask as bool [1 | b, 1 | hq, 1 | sq, 1 | sk], with the keys bias hides."""
  if mask is not None:
    mask = check_planes(call, "mask", mask, q, k)
  one_row = lambda t: dims.at_most(t.shape[2], 1)
  if bias is not None and one_row(bias) and (mask is None or one_row(mask)):
    # What a bias hides from all rows is hidden as by a mask: keys and values
    # are not even multiplied with.
    shown = bias != -jnp.inf
    mask = shown if mask is None else mask & shown
  return mask


def _dropout_state(call: Call, key, b: int, hq: int):
  """uint32 [b, hq, 6] from a PRNG key, or None without dropout."""
  name = call.names[5]
  if key is not None:
    typed = jnp.issubdtype(key.dtype, jax.dtypes.prng_key)
    if not typed and key.dtype != jnp.uint32:
      raise bad(call.function, f"{name}'s dtype", key.dtype,
                "a PRNG key, as jax.random.key makes it", TypeError)
    if key.ndim != (0 if typed else 1):
      raise bad(call.function, name, describe(key), "a single key")
  if call.dropout_p == 0.0:
    return None
  if key is None:
    raise bad(call.function, name, None,
              f"a PRNG key whenever dropout_p > 0 (it is {call.dropout_p:g})")
  words = jnp.broadcast_to(jax.random.bits(key, (2,), jnp.uint32), (b, hq, 2))
  zeros = jnp.zeros_like(words)
  counters = [zeros] if call.one_dropout_mask else [
      lax.broadcasted_iota(jnp.uint32, (b, hq, 1), axis) for axis in range(2)]
  return jnp.concatenate([words, *counters, zeros], axis=-1)


def _config(call: Call, x: Operands) -> Config:
  """The static configuration, with windows that hide nothing removed."""
  left, right, sink_tokens = call.window
  if call.causal:
    right = 0
  sq, sk = ((t.shape[0 if x.packed else 1]) for t in (x.q, x.k))
  plain = not x.packed and x.cu_seqlens_q is None and x.cu_seqlens_k is None
  top_left = call.top_left and not (plain and sq == sk)
  # A bound that is less than the mean is none.
  bounded = (x.packed and dims.is_known(sk) and dims.is_known(x.batch)
             and call.max_seqlen_k * x.batch >= sk)
  hides_nothing = lambda side: (
      dims.at_most(sq, side) and dims.at_most(sk, side))
  if hides_nothing(left):
    left = -1
  if hides_nothing(right) or (
      plain and not top_left and dims.at_most(sq, right + 1)):
    right = -1
  return Config(
      softmax_scale=(1 / math.sqrt(x.q.shape[-1])
                     if call.softmax_scale is None else call.softmax_scale),
      logits_soft_cap=call.logits_soft_cap, dropout_p=call.dropout_p,
      window_left=left, window_right=right,
      sink_tokens=sink_tokens if left >= 0 else 0,
      top_left=top_left and (
          left >= 0 or right >= 0 or x.alibi_slopes is not None),
      min_seqlen_q=call.min_seqlen_q,
      max_seqlen_k=call.max_seqlen_k if bounded else 0,
      deterministic=call.deterministic,
      precision=(jax.config.jax_default_matmul_precision
                 if call.precision is None else call.precision))


def operands(call: Call, packed_cu, dropout_key, q, k, v, cu_seqlens_q,
             cu_seqlens_k, bias, mask, alibi_slopes, sink,
             dropout_state=None) -> tuple[Config, Operands]:
  """The operator's form of a call; arguments as the user gave them.

  Args:
    call: what is not an array.
    packed_cu: None for a dense call, else the pair of padded cu_seqlens.
    dropout_key: a PRNG key or None.
    q: queries; k, v, and so on likewise.
    dropout_state: what the key stands for, where it is known; as Operands has
      it, of a part of a whole.
  """
  packed = packed_cu is not None
  q, k, v = arguments.agreeing(q, k, v)
  _check_qkv(call, q, k, v, packed)
  hq = q.shape[-2]
  name_q, name_k = call.names[3:5]
  if packed:
    cu_seqlens_q = _check_lengths(call, name_q, cu_seqlens_q, None)
    size = cu_seqlens_q.shape[0]
    b = size - 1
    cu_seqlens_k = _check_lengths(call, name_k, cu_seqlens_k, size)
    padded_q, padded_k = (
        _check_lengths(call, f"{name}_padded", cu, size)
        for name, cu in zip((name_q, name_k), packed_cu))
  else:
    b, padded_q, padded_k = q.shape[0], None, None
    cu_seqlens_q = _check_lengths(call, name_q, cu_seqlens_q, b + 1)
    cu_seqlens_k = _check_lengths(call, name_k, cu_seqlens_k, b + 1)
  bias = check_bias(call, bias, q, k)
  x = Operands(
      q, k, v, cu_seqlens_q, cu_seqlens_k, padded_q, padded_k, bias,
      _check_mask(call, mask, bias, q, k),
      _check_per_head(call, "alibi_slopes", alibi_slopes, b, hq),
      _check_per_head(call, "sink", sink, b, hq),
      _dropout_state(call, dropout_key, b, hq) if dropout_state is None
      else dropout_state)
  return _config(call, x), x


@functools.partial(jax.jit, static_argnums=0, inline=True)
def _attend(call: Call, *arrays):
  """Everything that happens while tracing, of the arguments of `operands`.

  Returns:
    out, or the tuple that the caller asked for.
  """
  cfg, x = operands(call, *arrays)
  out, lse = mha_op.mha(cfg, vary_together(x))
  results = (out,)
  if call.return_lse:
    results += (lse,)
  if call.return_attn_probs:
    results += (_keep_mask(call, x),)
  return results if len(results) > 1 else out


def _keep_mask(call: Call, x: Operands):
  """uint8 [b, hq, sq, sk]: 1 where dropout keeps a probability."""
  b, sq, hq, _ = x.q.shape
  sk = x.k.shape[1]
  if x.dropout_state is None:
    return jnp.ones((b, hq, sq, sk), jnp.uint8)
  keep = philox.keep_mask(
      x.dropout_state[:, :, None, None],
      jnp.arange(sq, dtype=jnp.int32)[:, None],
      jnp.arange(dims.round_up(sk, philox.COLUMNS), dtype=jnp.int32),
      call.dropout_p, cols_are_a_run=True)
  return keep[..., :sk].astype(jnp.uint8)


def check_arrays(function, required, optional):
  for name, t in required.items():
    check_is_array(function, name, t, optional=False)
  for name, t in optional.items():
    check_is_array(function, name, t)


# -----------------------------------------------------------------------------
# Public functions


def flash_attn_func(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, ...] = (-1, -1),
    bias: jax.Array | None = None,
    alibi_slopes: jax.Array | None = None,
    deterministic: bool = True,
    return_lse: bool = False,
    return_attn_probs: bool = False,
    cu_seqlens_q: jax.Array | None = None,
    cu_seqlens_kv: jax.Array | None = None,
    *,
    dropout_key: jax.Array | None = None,
    logits_soft_cap: float = 0.0,
    sink: jax.Array | None = None,
    mask: jax.Array | None = None,
):
  """Fused multi-head attention: softmax(scale * q k^T + ...) v.

  Query head h attends with key head h // (hq / hk), so grouped and multi-query
  attention need no copies. A query that sees no key gives out 0, lse -inf and
  gradients 0. The gradients of q, k, v, bias, alibi_slopes and sink, through
  out and lse, are kernels too; other derivatives are those of the formula.

  Args:
    q: [b, sq, hq, dqk], float16 or bfloat16 for the fused kernels, float32 by
      the reference. dqk up to 256.
    k: [b, sk, hk, dqk], q's dtype; hk divides hq.
    v: [b, sk, hk, dv], dv up to 256.
    dropout_p: probability of dropping an attention probability, 0 <= p < 1.
    softmax_scale: factor on q.k; None is 1 / sqrt(dqk).
    causal: query i sees keys up to i + sk - sq (bottom right alignment).
    window_size: (left, right): query i sees keys i + sk - sq - left to
      i + sk - sq + right, -1 for unbounded. A third number lets that many
      leading keys stay visible whatever left is (streaming attention).
    bias: added to the scaled scores: [sq, sk], [hq, sq, sk] or
      [b, hq, sq, sk], where 1 broadcasts, not in memory. -inf hides a key.
    alibi_slopes: [hq] or [b, hq]: -slope * |i + sk - sq - j| is added.
    deterministic: gradients have the same bits every time. Without it their
      sums need not be made in a fixed order, where that is faster.
    return_lse: return the log-sum-exp of every row too.
    return_attn_probs: return dropout's mask too.
    cu_seqlens_q: int [b + 1], cumulative lengths of sequences that are padded
      to sq; rows past a sequence's length give 0. sq above is then its length.
    cu_seqlens_kv: the same of keys.
    dropout_key: a JAX PRNG key, required if dropout_p > 0. The mask depends on
      the key and on (batch, head, row, column) alone.
    logits_soft_cap: if > 0, scaled scores become cap * tanh(score / cap),
      before bias and slopes.
    sink: [hq] or [b, hq], a logit in every row's softmax that has no value.
    mask: bool, of bias's shapes, a byte an element: False hides a key. The key
      may hold anything; its value must be finite, but in a mask of one row for
      all queries ([b, 1, 1, sk]), which hides what that holds too.

  Returns:
    out [b, sq, hq, dv]; or a tuple of it and, as asked for, lse
    float32 [b, hq, sq] in natural logarithm and the mask uint8
    [b, hq, sq, sk], 1 where a probability is kept.

  Raises:
    TypeError: an argument is not an array, number or dtype of the right kind.
    ValueError: a shape or value is not accepted.
  """
  name = "flash_attn_func"
  check_arrays(name, dict(q=q, k=k, v=v), dict(
      bias=bias, alibi_slopes=alibi_slopes, cu_seqlens_q=cu_seqlens_q,
      cu_seqlens_kv=cu_seqlens_kv, dropout_key=dropout_key, sink=sink,
      mask=mask))
  call = static_arguments(
      name, dropout_p, softmax_scale, causal, window_size, logits_soft_cap,
      deterministic, return_lse=flag(name, "return_lse", return_lse),
      return_attn_probs=flag(name, "return_attn_probs", return_attn_probs),
      names=("q", "k", "v", "cu_seqlens_q", "cu_seqlens_kv", "dropout_key"))
  for arg, cu, t in (("cu_seqlens_q", cu_seqlens_q, q),
                     ("cu_seqlens_kv", cu_seqlens_kv, k)):
    if cu is not None and t.ndim == 4:
      arguments.check_cumulative(name, arg, cu, None, longest=t.shape[1])
  return _attend(call, None, dropout_key, q, k, v, cu_seqlens_q, cu_seqlens_kv,
                 bias, mask, alibi_slopes, sink)


def _bound(longest: int, cu_seqlens_k) -> int:
  """A power of two that no sequence has more keys than; 0 if that is wrong."""
  lengths = arguments.at_hand(cu_seqlens_k)
  if longest == 0 or (lengths is not None and lengths.ndim == 1
                      and (np.diff(lengths) > longest).any()):
    return 0
  return 1 << (longest - 1).bit_length()


def flash_attn_varlen(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    cu_seqlens_q: jax.Array,
    cu_seqlens_k: jax.Array,
    max_seqlen_q: int = 0,
    max_seqlen_k: int = 0,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, ...] = (-1, -1),
    deterministic: bool = False,
    return_lse: bool = False,
    *,
    alibi_slopes: jax.Array | None = None,
    dropout_key: jax.Array | None = None,
    logits_soft_cap: float = 0.0,
    sink: jax.Array | None = None,
    cu_seqlens_q_padded: jax.Array | None = None,
    cu_seqlens_k_padded: jax.Array | None = None,
    min_seqlen_q: int = 0,
    zero_tensors: bool = False,
):
  """`flash_attn_func` for sequences of different lengths, packed in one axis.

  Sequence i has the query rows cu_seqlens_q[i] to cu_seqlens_q[i + 1] and
  attends to the keys cu_seqlens_k[i] to cu_seqlens_k[i + 1]. The lengths are
  ordinary arrays: they may be traced, and new ones compile nothing. Rows of no
  sequence give out 0, lse -inf and gradients 0.

  Args:
    q: [total_q, hq, dqk].
    k: [total_k, hk, dqk].
    v: [total_k, hk, dv].
    cu_seqlens_q: int [b + 1], cumulative query lengths, from 0.
    cu_seqlens_k: int [b + 1], cumulative key lengths, from 0.
    max_seqlen_q: accepted; no bound is needed.
    max_seqlen_k: keys of the longest sequence, or more; 0 is unknown, and so is
      less than the mean. A bound makes gradients of wide heads faster. Where
      the lengths are traced, on a GPU, dq may be NaN of a sequence that has
      more. Each power of two is a program of its own.
    dropout_p: see flash_attn_func; masks count rows and columns inside their
      sequence.
    softmax_scale: see flash_attn_func.
    causal: see flash_attn_func, with each sequence's own lengths.
    window_size: see flash_attn_func.
    deterministic: gradients have the same bits every time. Without it their
      sums need not be made in a fixed order, where that is faster.
    return_lse: return the log-sum-exp of every row too.
    alibi_slopes: [hq] or [b, hq].
    dropout_key: see flash_attn_func.
    logits_soft_cap: see flash_attn_func.
    sink: [hq] or [b, hq].
    cu_seqlens_q_padded: int [b + 1], the first row of each sequence where there
      is padding between them; cu_seqlens_q then still has the lengths.
    cu_seqlens_k_padded: the same of keys.
    min_seqlen_q: if > 0, sequences of at most this many queries are skipped:
      out 0, lse -inf, gradients 0.
    zero_tensors: accepted; rows of no sequence are always zero.

  Returns:
    out [total_q, hq, dv], or with return_lse (out, lse float32 [hq, total_q]).

  Raises:
    TypeError: an argument is not an array, number or dtype of the right kind.
    ValueError: a shape or value is not accepted.
  """
  name = "flash_attn_varlen"
  check_arrays(
      name, dict(q=q, k=k, v=v, cu_seqlens_q=cu_seqlens_q,
                 cu_seqlens_k=cu_seqlens_k),
      dict(alibi_slopes=alibi_slopes, dropout_key=dropout_key, sink=sink,
           cu_seqlens_q_padded=cu_seqlens_q_padded,
           cu_seqlens_k_padded=cu_seqlens_k_padded))
  _, longest = (
      arguments.number(name, arg, value, "an integer >= 0", lambda n: n >= 0,
                       int) if dims.is_known(value) else 0
      for arg, value in (("max_seqlen_q", max_seqlen_q),
                         ("max_seqlen_k", max_seqlen_k)))
  for arg, cu, t, padded in (
      ("cu_seqlens_q", cu_seqlens_q, q, cu_seqlens_q_padded),
      ("cu_seqlens_k", cu_seqlens_k, k, cu_seqlens_k_padded)):
    if t.ndim == 3:
      arguments.check_cumulative(name, arg, cu, t.shape[0], padded)
      arguments.check_cumulative(
          name, f"{arg}_padded", padded, None, first_rows=True)
  flag(name, "zero_tensors", zero_tensors)
  call = static_arguments(
      name, dropout_p, softmax_scale, causal, window_size, logits_soft_cap,
      deterministic, return_lse=flag(name, "return_lse", return_lse),
      max_seqlen_k=_bound(longest, cu_seqlens_k),
      min_seqlen_q=arguments.number(
          name, "min_seqlen_q", min_seqlen_q, "an integer from 0 to 2^31 - 1",
          lambda n: 0 <= n < 2**31, int))
  return _attend(call, (cu_seqlens_q_padded, cu_seqlens_k_padded), dropout_key,
                 q, k, v, cu_seqlens_q, cu_seqlens_k, None, None, alibi_slopes,
                 sink)


@functools.partial(jax.jit, static_argnums=0, inline=True)
def attend_as_jax_nn(call: Call, dropout_key, query, key, value, bias, mask,
                     query_seq_lengths=None, key_value_seq_lengths=None):
  """dot_product_attention, while tracing: any batch axes become one."""
  ranks = {t.ndim for t in (query, key, value)}
  if len(ranks) != 1 or min(ranks) < 3:
    raise bad(call.function, "the rank of query, key, value",
              f"{query.ndim}, {key.ndim}, {value.ndim}",
              "one for all, 3 or more")
  lead = query.shape[:-3]
  for name, t in (("key", key), ("value", value)):
    if len(lead) > 1 and t.shape[:-3] != lead:
      raise bad(call.function, f"{name}'s batch", list(t.shape[:-3]),
                f"{list(lead)}, as query's")
  axes = lead or (1,)
  full = (*axes, query.shape[-2], query.shape[-3], key.shape[-3])
  b = math.prod(axes)

  def planes(name, t):
    if t is None:
      return None
    shape = (1,) * (len(full) - t.ndim) + tuple(t.shape)
    if t.ndim > len(full) or any(
        n not in (1, m) for n, m in zip(shape, full)):
      raise bad(call.function, name, describe(t),
                f"a shape that broadcasts to {list(full)}")
    own, inner = shape[:-3], shape[-3:]
    if all(n == 1 for n in own):
      return t.reshape(1, *inner)
    return jnp.broadcast_to(t.reshape(shape), (*axes, *inner)).reshape(
        b, *inner)

  def ends(name, lengths, most):
    if lengths is None:
      return None
    if not jnp.issubdtype(lengths.dtype, jnp.integer):
      raise bad(call.function, f"{name}'s dtype", lengths.dtype,
                "an integer dtype", TypeError)
    if lengths.shape != axes:
      raise bad(call.function, name, describe(lengths),
                f"shape {list(axes)}")
    # As jax.nn, which compares places with them: more are all there are.
    return rows.cumulative(jnp.clip(
        arguments.int32(lengths).reshape(b), 0, dims.as_int32(most)))

  result = _attend(
      call, None, dropout_key,
      *(t if len(lead) == 1 else t.reshape(b, *t.shape[-3:])
        for t in (query, key, value)),
      ends("query_seq_lengths", query_seq_lengths, query.shape[-3]),
      ends("key_value_seq_lengths", key_value_seq_lengths, key.shape[-3]),
      planes("bias", bias), planes("mask", mask), None, None)
  out, lse = result if call.return_lse else (result, None)
  out = out.reshape(*lead, *out.shape[1:])
  if lse is None:
    return out
  residual = jnp.moveaxis(lse, 1, 2).reshape(out.shape[:-1])
  return out, lax.stop_gradient(residual.astype(key.dtype))


def dot_product_attention(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    bias: jax.Array | None = None,
    mask: jax.Array | None = None,
    *,
    scale: float | None = None,
    is_causal: bool = False,
    query_seq_lengths: jax.Array | None = None,
    key_value_seq_lengths: jax.Array | None = None,
    local_window_size: int | tuple[int, int] | None = None,
    implementation: str | None = None,
    return_residual: bool = False,
):
  """`jax.nn.dot_product_attention` by the fused kernels.

  Arguments, layouts and masks are jax.nn's: causal and window masks start at
  the top left corner. What differs: there may be any number of batch axes,
  value's head_dim may differ from key's, and a query that sees no key gives 0
  (residual -inf), not the mean of values.

  Bias and mask are never broadcast in memory, along no axis of [n, t, s]; a
  mask costs a byte an element. A hidden key may hold anything. Its value is
  multiplied with 0, so it must be finite; where the mask has one row for all
  queries, as a mask of padding has, it too may hold anything.

  Args:
    query: [..., t, n, h].
    key: [..., s, k, h]; k divides n.
    value: as key.
    bias: added to the scaled scores; broadcasts to [..., n, t, s]. -inf hides a
      key as a mask does.
    mask: bool, broadcasts to [..., n, t, s]; False hides a key.
    scale: factor on query.key; None is 1 / sqrt(h).
    is_causal: query i sees keys 0 to i.
    query_seq_lengths: int [...], of the batch axes; later rows give 0.
    key_value_seq_lengths: int [...]; later keys are hidden.
    local_window_size: (left, right) or one number for both: query i sees keys
      i - left to i + right.
    implementation: None or "aiter", which is the same; for jax.nn's others call
      jax.nn's function.
    return_residual: return the log-sum-exp too.

  Returns:
    The output, of query's shape but for value's head_dim; with
    return_residual a tuple of it and the log-sum-exp, [..., t, n], in key's
    dtype and without gradient, as jax.nn has it.

  Raises:
    TypeError: an argument is not an array, number or dtype of the right kind.
    ValueError: a shape or value is not accepted.
  """
  name = "dot_product_attention"
  query, key, value = (
      t if t is None or isinstance(t, (list, tuple)) else jnp.asarray(
          arguments.operand(name, arg, t))
      for arg, t in (("query", query), ("key", key), ("value", value)))
  check_arrays(
      name, dict(query=query, key=key, value=value),
      dict(bias=bias, mask=mask, query_seq_lengths=query_seq_lengths,
           key_value_seq_lengths=key_value_seq_lengths))
  arguments.choice(name, "implementation", implementation, (None, "aiter"))
  if local_window_size is None:
    window = (-1, -1)
  else:
    sides = (local_window_size if isinstance(local_window_size, (tuple, list))
             else (local_window_size,) * 2)
    window = arguments.integers(
        name, "local_window_size", sides,
        "None, an integer >= 0 or a pair of them", lambda w: w >= 0)
  if scale is not None:
    scale = arguments.number(name, "scale", scale, "None or a finite number",
                             math.isfinite)
  for arg, lengths in (("query_seq_lengths", query_seq_lengths),
                       ("key_value_seq_lengths", key_value_seq_lengths)):
    values = arguments.at_hand(lengths)
    if values is not None and values.dtype.kind == "i" and (values < 0).any():
      raise bad(name, arg, values, "lengths >= 0")
  call = static_arguments(
      name, 0.0, scale, flag(name, "is_causal", is_causal), window, 0.0, True,
      top_left=True, least_rank=0,
      return_lse=flag(name, "return_residual", return_residual),
      names=("query", "key", "value", "query_seq_lengths",
             "key_value_seq_lengths", "dropout_key"))
  return attend_as_jax_nn(
      call, None, query, key, value, bias, mask, query_seq_lengths,
      key_value_seq_lengths)
