# SPDX-License-Identifier: Apache-2.0
"""Linear attention by the gated delta rule: public functions."""

from __future__ import annotations

import functools
import math

import jax.numpy as jnp

import jax
from jax import lax
from jax._src.aiter.core import arguments
from jax._src.aiter.core.arguments import bad, describe
from jax._src.aiter.delta import rule

_FLOATS = ("float16", "bfloat16", "float32", "float64")


def _check(function, name, t, shape, words, dtypes=_FLOATS):
  """An error unless it is such an array; shape has None for any size."""
  arguments.check_dtype(function, name, t, dtypes)
  if t.ndim != len(shape) or any(
      n is not None and m != n for m, n in zip(t.shape, shape)):
    raise bad(function, name, describe(t), words)


@functools.partial(jax.jit, static_argnums=(0, 1), inline=True)
def _run(function, cfg: rule.Config, q, k, v, g, gk, beta, state, cu):
  """(out, states) of checked static arguments."""
  n = functools.partial(_check, function)
  n("q", q, (None,) * 4, "shape [b, t, h, dk]")
  b, t, h, dk = q.shape
  n("k", k, q.shape, f"shape {list(q.shape)}, as q")
  n("v", v, (b, t, None, None), f"shape [{b}, {t}, hv, dv], as q")
  hv, dv = v.shape[2:]
  if not (h and hv and dk and dv) or hv % h:
    raise bad(function, "v", describe(v), f"a multiple of q's {h} heads, and"
              " at least a head and a channel")
  for name, other in (("k", k), ("v", v)):
    if other.dtype != q.dtype:
      raise bad(function, f"{name}'s dtype", other.dtype, f"{q.dtype}, as q",
                TypeError)
  wide = jnp.promote_types(q.dtype, jnp.float32)
  gates = jnp.zeros((b, t, hv, 1), wide)
  for name, gate, shape in (("g", g, (b, t, hv)), ("gk", gk, (b, t, hv, dk))):
    if gate is not None:
      n(name, gate, shape, f"shape {list(shape)}")
      gate = gate.astype(wide)
      gates += gate if gate.ndim == 4 else gate[..., None]
  if beta is None:
    beta = jnp.ones((b, t, hv), wide)
  n("beta", beta, (b, t, hv), f"shape {[b, t, hv]}")
  if cu is None:
    count = b
  else:
    arguments.check_integers(function, "cu_seqlens", cu)
    if cu.ndim != 1 or cu.shape[0] < 1:
      raise bad(function, "cu_seqlens", describe(cu), "shape [n + 1]")
    if b != 1:
      raise bad(function, "q", describe(q), "a batch of 1 with cu_seqlens")
    count = cu.shape[0] - 1
  shape = (count, hv, dk, dv)
  if state is None:
    state = jnp.zeros(shape, wide)
  n("initial_state", state, shape, f"shape {list(shape)}")
  if 0 in (b, t, count):
    return jnp.zeros((b, t, hv, dv), q.dtype), state
  rows, states = rule.Rows(
      q, k, v, gates, beta.astype(wide)), state.astype(wide)
  # What is kept for gradients are these.
  if cu is None:
    out, states = jax.checkpoint(functools.partial(rule.dense, cfg))(
        rows, states)
  else:
    # Of lengths that only the device sees all are held inside the rows.
    cu = lax.cummax(jnp.clip(arguments.int32(cu), 0, t))
    out, states = jax.checkpoint(functools.partial(rule.packed, cfg))(
        rule.Rows(*(a[0] for a in rows)), states, cu)
    out = out[None]
  return out.astype(q.dtype), states.astype(state.dtype)


def _call(function, q, k, v, g, gk, beta, scale, initial_state,
          output_final_state, use_qk_l2norm_in_kernel, cu_seqlens, chunk):
  for name, t in (("q", q), ("k", k), ("v", v)):
    arguments.check_is_array(function, name, t, optional=False)
  for name, t in (("g", g), ("gk", gk), ("beta", beta), ("initial_state",
                  initial_state), ("cu_seqlens", cu_seqlens)):
    arguments.check_is_array(function, name, t)
  if scale is not None:
    scale = arguments.number(function, "scale", scale, "a finite number",
                             math.isfinite)
  elif q.ndim:
    scale = max(q.shape[-1], 1) ** -0.5
  final = arguments.flag(function, "output_final_state", output_final_state)
  norm = arguments.flag(
      function, "use_qk_l2norm_in_kernel", use_qk_l2norm_in_kernel)
  if q.ndim == 4:
    arguments.check_cumulative(function, "cu_seqlens", cu_seqlens, q.shape[1])
  out, states = _run(function, rule.Config(scale, norm, chunk), q, k, v, g, gk,
                     beta, initial_state, cu_seqlens)
  return out, states if final else None


def chunk_gated_delta_rule(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    g: jax.Array,
    beta: jax.Array,
    scale: float | None = None,
    initial_state: jax.Array | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    cu_seqlens: jax.Array | None = None,
    *,
    chunk_size: int = 64,
) -> tuple[jax.Array, jax.Array | None]:
  """Linear attention of Gated DeltaNet, as in Qwen3-Next and Qwen3.5.

  Each head has a state S, a matrix [dk, dv]. Token after token, in float32,

    S = exp(g) * S
    S = S + beta * outer(k, v - k @ S)
    out = scale * q @ S

  of which a chunk's tokens are computed together. Differentiable; what is kept
  for gradients are the arguments.

  Args:
    q: [b, t, h, dk], float16, bfloat16, float32 or float64.
    k: like q.
    v: [b, t, hv, dv], q's dtype; hv is a multiple of h, and head i has the keys
      of head i // (hv // h).
    g: [b, t, hv], the logarithm of what is kept of the state, at most 0.
    beta: [b, t, hv], the share that is written.
    scale: factor on q; None is 1 / sqrt(dk).
    initial_state: [b, hv, dk, dv], any float dtype; [n, ...] with cu_seqlens.
      None is 0.
    output_final_state: whether to return the state behind the last token.
    use_qk_l2norm_in_kernel: whether rows of q and k are divided by their
      lengths, the root of the sum of squares and 1e-6.
    cu_seqlens: integers [n + 1], cumulative lengths of sequences packed in
      t; b is 1 then. Tokens behind the last one give 0.
    chunk_size: tokens that are computed together.

  Returns:
    (out [b, t, hv, dv] in q's dtype, state like initial_state, float32 without
    one; None unless output_final_state).

  Raises:
    TypeError: an argument of the wrong type or dtype.
    ValueError: a shape or value that cannot be; the message names it.
  """
  function = "chunk_gated_delta_rule"
  for name, t in (("g", g), ("beta", beta)):
    arguments.check_is_array(function, name, t, optional=False)
  chunk = arguments.number(function, "chunk_size", chunk_size,
                           "an integer from 1 to 1024",
                           lambda c: 1 <= c <= 1024, int)
  return _call(function, q, k, v, g, None, beta, scale, initial_state,
               output_final_state, use_qk_l2norm_in_kernel, cu_seqlens, chunk)


def fused_recurrent_gated_delta_rule(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    g: jax.Array | None = None,
    gk: jax.Array | None = None,
    *,
    beta: jax.Array | None = None,
    scale: float | None = None,
    initial_state: jax.Array | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    cu_seqlens: jax.Array | None = None,
) -> tuple[jax.Array, jax.Array | None]:
  """`chunk_gated_delta_rule` token after token, for few tokens a sequence.

  Sequences of one token each, a step of decoding, are computed side by side,
  packed or as a batch.

  Args:
    q: as there.
    k: as there.
    v: as there.
    g: as there; None is 0.
    gk: [b, t, hv, dk], the same for each channel of keys (Kimi Delta
      Attention), or None. Beside g both count.
    beta: as there; None is 1.
    scale: as there.
    initial_state: as there.
    output_final_state: as there.
    use_qk_l2norm_in_kernel: as there.
    cu_seqlens: as there.

  Returns:
    As chunk_gated_delta_rule.

  Raises:
    TypeError: as chunk_gated_delta_rule.
    ValueError: as chunk_gated_delta_rule.
  """
  return _call("fused_recurrent_gated_delta_rule", q, k, v, g, gk, beta, scale,
               initial_state, output_final_state, use_qk_l2norm_in_kernel,
               cu_seqlens, 1)


def fused_gdn_gating(
    A_log: jax.Array,  # pylint: disable=invalid-name
    a: jax.Array,
    b: jax.Array,
    dt_bias: jax.Array,
) -> tuple[jax.Array, jax.Array]:
  """The gates of Gated DeltaNet from what a layer projects.

  Args:
    A_log: [hv].
    a: [..., hv].
    b: [..., hv].
    dt_bias: [hv].

  Returns:
    (g, beta), float32 [..., hv]: -exp(A_log) * softplus(a + dt_bias), and
    sigmoid(b).

  Raises:
    TypeError: an argument of the wrong type or dtype.
    ValueError: a shape that cannot be; the message names it.
  """
  function = "fused_gdn_gating"
  arguments.check_dtype(function, "a", a, _FLOATS)
  if a.ndim < 1:
    raise bad(function, "a", describe(a), "shape [..., hv]")
  for name, t, shape in (("A_log", A_log, a.shape[-1:]), ("b", b, a.shape),
                         ("dt_bias", dt_bias, a.shape[-1:])):
    _check(function, name, t, shape, f"shape {list(shape)}, as a")
  # Each in its own dtype: a's may not hold what the others do.
  wide = jnp.promote_types(a.dtype, jnp.float32)
  a_log, a, b, dt_bias = (jnp.asarray(t, wide) for t in (A_log, a, b, dt_bias))
  return -jnp.exp(a_log) * jax.nn.softplus(a + dt_bias), jax.nn.sigmoid(b)


@functools.partial(jax.jit, static_argnums=(0, 1), inline=True)
def _ragged(function, sizes, mixed_qkv, b, a, recurrent_state, a_log, dt_bias,
            query_start_loc, state_indices, distribution, has_initial_state):
  h, hv, dk, dv = sizes
  columns = 2 * h * dk + hv * dv
  _check(function, "mixed_qkv", mixed_qkv, (None, columns),
         f"shape [t, {columns}]: n_kq is {h}, n_v {hv}, d_k {dk}, d_v {dv}")
  t = mixed_qkv.shape[0]
  for name, gate in (("a", a), ("b", b)):
    _check(function, name, gate, (t, hv), f"shape {[t, hv]}")
  _check(function, "recurrent_state", recurrent_state, (None, hv, dk, dv),
         f"shape [slots, {hv}, {dk}, {dv}]")
  for name, n in (("query_start_loc", query_start_loc),
                  ("state_indices", state_indices),
                  ("distribution", distribution)):
    arguments.check_integers(function, name, n)
    if n.ndim != 1:
      raise bad(function, name, describe(n), "one dimension")
  n, slots = state_indices.shape[0], recurrent_state.shape[0]
  if query_start_loc.shape[0] != n + 1:
    raise bad(function, "query_start_loc", describe(query_start_loc),
              f"shape [{n + 1}], for {n} of state_indices")
  if distribution.shape != (3,):
    raise bad(function, "distribution", describe(distribution), "shape [3]")
  if has_initial_state is None:
    has_initial_state = jnp.ones(n, bool)
  _check(function, "has_initial_state", has_initial_state, (n,),
         f"shape [{n}]", ("bool", "int32"))
  if 0 in (t, n, slots):
    return recurrent_state, jnp.zeros((t, hv * dv), mixed_qkv.dtype)
  count = jnp.clip(arguments.int32(distribution)[2], 0, n)
  cu = arguments.int32(query_start_loc)
  cu = jnp.where(jnp.arange(n + 1) <= count, cu, cu[count])
  at = arguments.int32(state_indices)
  there = (at >= 0) & (at < slots) & (jnp.diff(cu) > 0)
  old = (there & (has_initial_state != 0))[:, None, None, None]
  state = jnp.where(old, recurrent_state[jnp.clip(at, 0, slots - 1)], 0)
  q, k, v = jnp.split(
      jax.nn.silu(mixed_qkv)[None], (h * dk, 2 * h * dk), axis=2)
  with arguments.called(function):
    g, beta = fused_gdn_gating(a_log, a, b, dt_bias)
  heads = lambda x, n: x.reshape(1, t, n, -1)
  out, state = _run(
      function, rule.Config(dk ** -0.5, True, 64), heads(q, h), heads(k, h),
      heads(v, hv), g[None], None, beta[None], state, cu)
  at = jnp.where(there, at, slots)
  return (recurrent_state.at[at].set(state, mode="drop"),
          out.reshape(t, hv * dv))


def ragged_gated_delta_rule(
    mixed_qkv: jax.Array,
    b: jax.Array,
    a: jax.Array,
    recurrent_state: jax.Array,
    A_log: jax.Array,  # pylint: disable=invalid-name
    dt_bias: jax.Array,
    query_start_loc: jax.Array,
    state_indices: jax.Array,
    distribution: jax.Array,
    has_initial_state: jax.Array | None = None,
    *,
    n_kq: int,
    n_v: int,
    d_k: int,
    d_v: int,
) -> tuple[jax.Array, jax.Array]:
  """`chunk_gated_delta_rule` as tpu-inference's servers call it.

  Of a mixed batch of decoding and prefilling sequences, whose states are kept
  in a pool. Gates are `fused_gdn_gating`'s, queries, keys and values go through
  SiLU, and queries and keys are divided by their lengths.

  Args:
    mixed_qkv: [t, 2 * n_kq * d_k + n_v * d_v], queries, keys and values behind
      the convolution.
    b: [t, n_v], of which the sigmoid is beta.
    a: [t, n_v], of the decay.
    recurrent_state: [slots, n_v, d_k, d_v]. Donate it: it is written in place.
    A_log: [n_v].
    dt_bias: [n_v].
    query_start_loc: integers [sequences + 1], where their tokens begin.
    state_indices: integers [sequences], the slot of each; no two alike.
    distribution: integers [3]; the last is how many sequences there are.
    has_initial_state: bool [sequences]: a sequence without begins with 0. None
      is all True.
    n_kq: heads of queries and keys.
    n_v: heads of values, a multiple of n_kq.
    d_k: channels of a query.
    d_v: channels of a value.

  Returns:
    (recurrent_state, out [t, n_v * d_v] in mixed_qkv's dtype, 0 behind the last
    sequence).

  Raises:
    TypeError: an argument of the wrong type or dtype.
    ValueError: a shape or value that cannot be; the message names it.
  """
  function = "ragged_gated_delta_rule"
  for name, t in (("mixed_qkv", mixed_qkv), ("b", b), ("a", a),
                  ("recurrent_state", recurrent_state), ("A_log", A_log),
                  ("dt_bias", dt_bias), ("query_start_loc", query_start_loc),
                  ("state_indices", state_indices),
                  ("distribution", distribution)):
    arguments.check_is_array(function, name, t, optional=False)
  arguments.check_is_array(function, "has_initial_state", has_initial_state)
  sizes = tuple(
      arguments.number(function, name, size, "an integer from 1 to 65536",
                       lambda n: 1 <= n <= 65536, int)
      for name, size in (("n_kq", n_kq), ("n_v", n_v), ("d_k", d_k),
                         ("d_v", d_v)))
  if sizes[1] % sizes[0]:
    raise bad(function, "n_v", n_v, f"a multiple of n_kq, {n_kq}")
  return _ragged(function, sizes, mixed_qkv, b, a, recurrent_state, A_log,
                 dt_bias, query_start_loc, state_indices, distribution,
                 has_initial_state)
