# SPDX-License-Identifier: Apache-2.0
"""Routing and sorting: the public functions and their arguments.

Where AITER writes into tensors that it is given, these return arrays.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import jax.numpy as jnp

import jax
from jax import lax
from jax._src.aiter.core import arguments, dims
from jax._src.aiter.core.partition import vary_together
from jax._src.aiter.moe import op
from jax._src.aiter.moe.move import Places, combine, spread

_FLOATS = ("bfloat16", "float16", "float32", "float64")
_TOKEN_BITS = 24  # of an entry of moe_sorting; its choice has those above


# -----------------------------------------------------------------------------
# Routing


def _softplus_root(x):
  return jnp.sqrt(jax.nn.softplus(x))


_SCORES = {"softmax": functools.partial(jax.nn.softmax, axis=-1),
           "sigmoid": jax.nn.sigmoid, "sqrtsoftplus": _softplus_root}


def _along(combine, t):
  """The reduction of a short last axis, kept.

  Step by step: so XLA makes one kernel of it and what is before and behind.
  """
  return functools.reduce(combine, jnp.split(t, t.shape[-1], -1))


def _positive(function: str, name: str, value, most: int = 2**31 - 1):
  return arguments.number(
      function, name, value, f"an integer of at least 1 and at most {most}",
      lambda n: 1 <= n <= most, int)


def _gating(function: str, x):
  arguments.check_dtype(function, "gating_output", x, _FLOATS)
  if x.ndim < 1:
    raise arguments.bad(function, "gating_output", arguments.describe(x),
                        "shape [..., experts]")
  return x.astype(jnp.promote_types(x.dtype, jnp.float32))


def _route(function: str, x, score: str, topk, *, bias=None, groups=1,
           topk_groups=1, by_sum=False, renormalise=False, factor=1.0):
  """(weights, ids) of wide logits [..., experts]."""
  experts = x.shape[-1]
  groups = _positive(function, "num_expert_group", groups)
  if experts % groups:
    raise arguments.bad(function, "num_expert_group", groups,
                        f"a divisor of {experts}, the number of experts")
  topk_groups = _positive(function, "topk_group", topk_groups, groups)
  topk = _positive(function, "topk", topk,
                   topk_groups * (experts // groups))
  factor = arguments.number(
      function, "routed_scaling_factor", factor, "a finite number",
      lambda f: abs(f) < float("inf"))
  renormalise = arguments.flag(function, "need_renorm", renormalise)
  if bias is not None:
    arguments.check_dtype(function, "correction_bias", bias, _FLOATS)
    if bias.shape != (experts,):
      raise arguments.bad(function, "correction_bias",
                          arguments.describe(bias), f"shape [{experts}]")
  # Scores are in the logits' order, but may be equal where those are not.
  number = lambda t: jnp.where(jnp.isnan(t), -jnp.inf, t)
  compared = x
  if bias is not None:
    compared = jnp.where(
        jnp.isnan(x), x, _SCORES[score](number(x)) + bias.astype(x.dtype))
  ids = op.choose(
      op.TopK(topk, groups, topk_groups, by_sum),
      op.Scores(lax.stop_gradient(compared).astype(jnp.float32)))
  # The scores of those that are taken, of few numbers.
  taken = number(jnp.take_along_axis(x, ids, -1))
  if score != "softmax":
    weights = _SCORES[score](taken)
  elif renormalise:
    # What all others add to the sum would be divided out again.
    largest = lax.stop_gradient(_along(jnp.maximum, taken))
    weights = jnp.exp(taken - largest)
    weights /= _along(jnp.add, weights)
  else:
    weights = jnp.exp(taken - jax.nn.logsumexp(number(x), -1, keepdims=True))
  if renormalise and score != "softmax":
    weights /= jnp.maximum(_along(jnp.add, weights), 1e-20)
  return (weights * factor).astype(x.dtype), ids


@functools.partial(jax.jit, inline=True, static_argnums=(0, 1, 2),
                   static_argnames=("num_shared_experts", "renormalise"))
def _with_shared(function, score, topk, x, *, num_shared_experts, renormalise):
  own = x.shape[-1] - num_shared_experts
  weights, ids = _route(function, x[..., :own], score, topk,
                        renormalise=renormalise)
  shared = jax.nn.sigmoid(x[..., own:])
  return jnp.concatenate([weights, shared], -1), ids


def topk_softmax(
    gating_output: jax.Array,
    topk: int,
    need_renorm: bool = False,
    num_shared_experts: int = 0,
) -> tuple[jax.Array, jax.Array]:
  """The experts of each token, with the softmax of their logits as weights
  (arXiv:2101.03961; with need_renorm arXiv:1701.06538).

  Logits are compared as they are, so ids are exact: of equal ones the lower
  expert is taken, and NaN is taken as -inf. Weights have gradients by the
  logits.

  Args:
    gating_output: [..., experts], any floating dtype; with shared experts their
      logits come last, and are no part of the softmax.
    topk: experts of a token.
    need_renorm: weights are divided by their sum.
    num_shared_experts: how many of the logits are those of shared experts,
      which every token goes to, with the logit's sigmoid as a weight.

  Returns:
    (topk_weights, topk_ids): float32, of float64 logits float64, [..., topk +
    num_shared_experts], that of the largest logit first and the shared ones
    last, and int32 [..., topk].

  Raises:
    TypeError: an argument of the wrong type or dtype.
    ValueError: a shape or value that cannot be; the message names it.
  """
  function = "topk_softmax"
  x = _gating(function, gating_output)
  shared = arguments.number(
      function, "num_shared_experts", num_shared_experts,
      f"an integer from 0 to {x.shape[-1] - 1}",
      lambda n: 0 <= n < x.shape[-1], int)
  topk = _positive(function, "topk", topk, x.shape[-1] - shared)
  return _with_shared(
      function, "softmax", topk, x, num_shared_experts=shared,
      renormalise=arguments.flag(function, "need_renorm", need_renorm))


def topk_sigmoid(
    gating_output: jax.Array, topk: int,
) -> tuple[jax.Array, jax.Array]:
  """topk_softmax with the sigmoid of a logit as its weight (Llama 4).

  Args:
    gating_output: [..., experts], any floating dtype.
    topk: experts of a token.

  Returns:
    (topk_weights, topk_ids): float32 (float64) and int32 [..., topk], the
    largest first.

  Raises:
    TypeError: as topk_softmax.
    ValueError: as topk_softmax.
  """
  return _route("topk_sigmoid", _gating("topk_sigmoid", gating_output),
                "sigmoid", topk)


def topk_gating(
    gating_output: jax.Array,
    topk: int,
    correction_bias: jax.Array | None = None,
    need_renorm: bool = True,
    routed_scaling_factor: float = 1.0,
    score_func: str = "sqrtsoftplus",
) -> tuple[jax.Array, jax.Array]:
  """The experts with the largest score + bias, weighted by their scores.

  Args:
    gating_output: [..., experts], any floating dtype.
    topk: experts of a token.
    correction_bias: [experts], by which scores are increased when they are
      compared, and not as weights; it has no gradient.
    need_renorm: weights are divided by their sum (of at least 1e-20).
    routed_scaling_factor: by which weights are multiplied then.
    score_func: "sqrtsoftplus" (the root of log(1 + e^x)), "sigmoid" or
      "softmax".

  Returns:
    (topk_weights, topk_ids): float32 (float64) and int32 [..., topk], the
    largest score + bias first.

  Raises:
    TypeError: as topk_softmax.
    ValueError: as topk_softmax.
  """
  function = "topk_gating"
  score = arguments.choice(function, "score_func", score_func, tuple(_SCORES))
  return _route(function, _gating(function, gating_output), score, topk,
                bias=correction_bias, renormalise=need_renorm,
                factor=routed_scaling_factor)


def grouped_topk(
    gating_output: jax.Array,
    topk: int,
    num_expert_group: int,
    topk_group: int,
    need_renorm: bool,
    is_softmax: bool = True,
    routed_scaling_factor: float = 1.0,
) -> tuple[jax.Array, jax.Array]:
  """The experts of the groups whose best experts are best (DeepSeek-V2,
  arXiv:2405.04434).

  Args:
    gating_output: [..., experts], any floating dtype.
    topk: experts of a token.
    num_expert_group: equal groups of experts.
    topk_group: groups that a token's experts come from.
    need_renorm: weights are divided by their sum (of at least 1e-20).
    is_softmax: scores are the logits' softmax, else their sigmoid.
    routed_scaling_factor: by which weights are multiplied then.

  Returns:
    (topk_weights, topk_ids): float32 (float64) and int32 [..., topk], the
    largest first.

  Raises:
    TypeError: as topk_softmax.
    ValueError: as topk_softmax.
  """
  function = "grouped_topk"
  softmax = arguments.flag(function, "is_softmax", is_softmax)
  return _route(function, _gating(function, gating_output),
                "softmax" if softmax else "sigmoid", topk,
                groups=num_expert_group, topk_groups=topk_group,
                renormalise=need_renorm, factor=routed_scaling_factor)


def biased_grouped_topk(
    gating_output: jax.Array,
    correction_bias: jax.Array,
    topk: int,
    num_expert_group: int,
    topk_group: int,
    need_renorm: bool,
    routed_scaling_factor: float = 1.0,
) -> tuple[jax.Array, jax.Array]:
  """DeepSeek-V3's routing (arXiv:2412.19437): sigmoids, and a bias to choose.

  A group counts by the sum of its two largest score + bias. Experts of other
  groups are never taken (AITER's reference takes them as 0, which is above a
  negative sum).

  Args:
    gating_output: [..., experts], any floating dtype.
    correction_bias: [experts]: see topk_gating.
    topk: experts of a token.
    num_expert_group: equal groups of experts.
    topk_group: groups that a token's experts come from.
    need_renorm: weights are divided by their sum (of at least 1e-20).
    routed_scaling_factor: by which weights are multiplied then.

  Returns:
    (topk_weights, topk_ids): float32 (float64) and int32 [..., topk], the
    largest score + bias first.

  Raises:
    TypeError: as topk_softmax.
    ValueError: as topk_softmax.
  """
  function = "biased_grouped_topk"
  x = _gating(function, gating_output)
  arguments.check_is_array(function, "correction_bias", correction_bias, False)
  return _route(function, x, "sigmoid", topk, bias=correction_bias,
                groups=num_expert_group, topk_groups=topk_group, by_sum=True,
                renormalise=need_renorm, factor=routed_scaling_factor)


# -----------------------------------------------------------------------------
# Sorting


def check_ids(function: str, topk_ids):
  """The experts of tokens, int32 [m, k]."""
  arguments.check_integers(function, "topk_ids", topk_ids)
  if topk_ids.ndim != 2:
    raise arguments.bad(function, "topk_ids", arguments.describe(topk_ids),
                        "shape [tokens, topk]")
  return arguments.int32(topk_ids)


def local_ids(function: str, ids, experts: int, expert_mask,
              num_local_tokens=None):
  """ids among the experts that there are here; -1 of all others."""
  ids = jnp.where((ids >= 0) & (ids < experts), ids, -1)
  if expert_mask is not None:
    arguments.check_is_array(function, "expert_mask", expert_mask, False)
    if expert_mask.shape != (experts,):
      raise arguments.bad(function, "expert_mask",
                          arguments.describe(expert_mask),
                          f"shape [{experts}]")
    here = expert_mask != 0
    local = jnp.where(here, jnp.cumsum(here, dtype=jnp.int32) - 1, -1)
    ids = jnp.where(ids < 0, -1, local[jnp.maximum(ids, 0)])
  if num_local_tokens is not None:
    arguments.check_integers(function, "num_local_tokens", num_local_tokens)
    if num_local_tokens.size != 1:
      raise arguments.bad(function, "num_local_tokens",
                          arguments.describe(num_local_tokens), "one integer")
    token = jnp.arange(ids.shape[0], dtype=jnp.int32)[:, None]
    ids = jnp.where(token < num_local_tokens.reshape(()), ids, -1)
  return ids


def sort_by_expert(ids, experts: int, block: int = 1) -> op.Sorted:
  """The sort of checked ids [m, k]."""
  return op.sort(op.Sort(experts, block), op.Entries(ids.reshape(-1)))


def _block_experts(counts, block: int, blocks):
  """The expert of each block, -1 behind the last, and entries with padding."""
  padded = (counts + block - 1) // block
  ends = jnp.cumsum(padded)
  at = jnp.arange(blocks, dtype=jnp.int32)[:, None]
  expert = jnp.sum(at >= ends, 1, dtype=jnp.int32)
  used = ends[-1]
  return jnp.where(at[:, 0] < used, expert, -1), used * block


def moe_align_block_size(
    topk_ids: jax.Array,
    num_experts: int,
    block_size: int,
) -> tuple[jax.Array, jax.Array, jax.Array]:
  """vLLM's and AITER's moe_align_block_size: entries by expert, in blocks.

  An entry token * topk + choice comes to its expert, after those before it;
  each expert's entries are filled up to whole blocks with tokens * topk, the
  number of entries.

  Args:
    topk_ids: integers [tokens, topk]; one that is no expert's is left out.
    num_experts: how many there are.
    block_size: entries of a block.

  Returns:
    (sorted_token_ids, expert_ids, num_tokens_post_pad): int32 [tokens * topk +
    num_experts * (block_size - 1)]; int32, the expert of each block of them, -1
    behind the last; int32 [1], how many entries there are with those that fill
    up.

  Raises:
    TypeError: an argument of the wrong type or dtype.
    ValueError: a shape or value that cannot be; the message names it.
  """
  function = "moe_align_block_size"
  ids = check_ids(function, topk_ids)
  experts = _positive(function, "num_experts", num_experts)
  block = _positive(function, "block_size", block_size)
  found = sort_by_expert(ids, experts, block)
  entries = found.order - 1
  blocks = (entries.shape[0] + block - 1) // block
  expert, used = _block_experts(found.counts, block, blocks)
  none = ids.shape[0] * ids.shape[1]
  return jnp.where(entries < 0, none, entries), expert, used.reshape(1)


def moe_sorting(
    topk_ids: jax.Array,
    topk_weights: jax.Array,
    num_experts: int,
    model_dim: int,
    moebuf_dtype: Any,
    block_size: int = 32,
    expert_mask: jax.Array | None = None,
    num_local_tokens: jax.Array | None = None,
) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array, jax.Array]:
  """AITER's moe_sorting: tokens by expert, in blocks, with their weights.

  An entry is choice << 24 | token. Each expert's entries, in the order of
  tokens, are filled up to whole blocks with topk << 24 | tokens.

  Args:
    topk_ids: integers [tokens, topk]; one that is no expert's is left out.
    topk_weights: [tokens, topk], any floating dtype.
    num_experts: how many there are, with those elsewhere.
    model_dim: columns of moe_buf.
    moebuf_dtype: its dtype.
    block_size: entries of a block.
    expert_mask: integers [num_experts], 0 of experts that are elsewhere; the
      others are counted from 0 in expert ids.
    num_local_tokens: integer [1]: later tokens are left out.

  Returns:
    (sorted_ids, sorted_weights, sorted_expert_ids, num_valid_ids, moe_buf):
    int32 [n] of n = tokens * topk + num_experts * block_size - topk; float32
    [n], 0 of what fills up; int32 [ceil(n / block_size)], -1 behind the last
    block; int32 [2], the entries with those that fill up, and the tokens; zeros
    [tokens, model_dim].

  Raises:
    TypeError: an argument of the wrong type or dtype.
    ValueError: a shape or value that cannot be; the message names it.
  """
  function = "moe_sorting"
  ids = check_ids(function, topk_ids)
  tokens, k = ids.shape
  if any(dims.is_known(n) and n >= 1 << bits
         for n, bits in ((tokens, _TOKEN_BITS), (k, 31 - _TOKEN_BITS))):
    raise arguments.bad(function, "topk_ids", arguments.describe(topk_ids),
                        f"fewer than {1 << _TOKEN_BITS} tokens and"
                        f" {1 << 31 - _TOKEN_BITS} choices, which an entry has"
                        " bits for")
  arguments.check_dtype(function, "topk_weights", topk_weights, _FLOATS)
  if topk_weights.shape != ids.shape:
    raise arguments.bad(function, "topk_weights",
                        arguments.describe(topk_weights),
                        f"shape [{tokens}, {k}]")
  experts = _positive(function, "num_experts", num_experts)
  columns = _positive(function, "model_dim", model_dim)
  block = _positive(function, "block_size", block_size)
  dtype = arguments.dtype_name(function, "moebuf_dtype", moebuf_dtype)
  ids = local_ids(function, ids, experts, expert_mask, num_local_tokens)
  found = sort_by_expert(ids, experts, block)
  n = tokens * k + experts * block - k
  # The sort has room for n entries or more: topk is at most what n lacks.
  entries = jnp.pad(found.order - 1, (0, max(n - found.order.shape[0], 0)),
                    constant_values=-1)[:n]
  there = entries >= 0
  packed = jnp.where(there, (entries % k) << _TOKEN_BITS | (entries // k),
                     k << _TOKEN_BITS | dims.as_int32(tokens))
  weights = jnp.where(there, dims.take(
      jnp.asarray(topk_weights, jnp.float32).reshape(-1),
      jnp.maximum(entries, 0), 0), 0)
  expert, used = _block_experts(found.counts, block, -(-n // block))
  count = dims.as_int32(tokens)
  if num_local_tokens is not None:
    count = jnp.clip(arguments.int32(num_local_tokens).reshape(()), 0, count)
  return (packed, weights, expert, jnp.stack([used, count]),
          jnp.zeros((tokens, columns), dtype))


class Permuted(NamedTuple):
  """Rows of tokens by expert.

  Attributes:
    rows: [tokens * topk, d], those of expert 0 first; rows behind the last
      expert's are 0.
    group_sizes: int32 [experts], how many rows each has.
    places: where each entry lies, for moe_unpermute.
  """
  rows: jax.Array
  group_sizes: jax.Array
  places: Places


for _kind in (Permuted, Places):
  jax.export.register_namedtuple_serialization(
      _kind, serialized_name=f"jax.experimental.aiter.{_kind.__name__}")


def places_of(ids, experts: int) -> tuple[jax.Array, Places]:
  """How many rows an expert has, and where, of checked local ids [m, k]."""
  found = sort_by_expert(ids, experts)
  return found.counts, Places(found.order - 1, found.place.reshape(ids.shape))


def check_rows(function: str, name: str, t, m=None):
  arguments.check_dtype(function, name, t, _FLOATS)
  if t.ndim != 2 or m not in (None, t.shape[0]):
    raise arguments.bad(function, name, arguments.describe(t),
                        f"shape [{'rows' if m is None else m}, d]")


def moe_permute(
    hidden_states: jax.Array,
    topk_ids: jax.Array,
    num_experts: int,
    expert_mask: jax.Array | None = None,
) -> Permuted:
  """Each token's row at each of its experts, as ragged_dot takes them.

  Gradients of the rows are summed over a token's experts in a fixed order.

  Args:
    hidden_states: [tokens, d], any floating dtype.
    topk_ids: integers [tokens, topk]; one that is no expert's is left out.
    num_experts: how many there are, with those elsewhere.
    expert_mask: integers [num_experts], 0 of experts that are elsewhere, which
      have no rows; group_sizes then begins with those that are here, and ends
      with zeros.

  Returns:
    Permuted: rows, group_sizes, places.

  Raises:
    TypeError: an argument of the wrong type or dtype.
    ValueError: a shape or value that cannot be; the message names it.
  """
  function = "moe_permute"
  ids = check_ids(function, topk_ids)
  check_rows(function, "hidden_states", hidden_states, ids.shape[0])
  experts = _positive(function, "num_experts", num_experts)
  ids = local_ids(function, ids, experts, expert_mask)
  hidden_states, ids = vary_together((jnp.asarray(hidden_states), ids))
  counts, places = places_of(ids, experts)
  return Permuted(spread(None, hidden_states, places), counts, places)


def moe_unpermute(
    rows: jax.Array,
    places: Places,
    topk_weights: jax.Array | None = None,
) -> jax.Array:
  """The sum of each token's rows, times their weights: moe_permute's way back.

  Sums are in float32, over a token's experts in the order of its choices.

  Args:
    rows: [tokens * topk, d], any floating dtype.
    places: of moe_permute.
    topk_weights: [tokens, topk], any floating dtype; 1 by default. Rows and
      weights have gradients.

  Returns:
    [tokens, d], in rows' dtype. A choice that was left out adds nothing.

  Raises:
    TypeError: an argument of the wrong type or dtype.
    ValueError: a shape or value that cannot be; the message names it.
  """
  function = "moe_unpermute"
  if not isinstance(places, Places):
    raise arguments.bad(function, "places", f"a {type(places).__name__}",
                        "the places of moe_permute", TypeError)
  check_rows(function, "rows", rows, places.entry.shape[0])
  if topk_weights is not None:
    arguments.check_dtype(function, "topk_weights", topk_weights, _FLOATS)
    if topk_weights.shape != places.row.shape:
      raise arguments.bad(function, "topk_weights",
                          arguments.describe(topk_weights),
                          f"shape {list(places.row.shape)}")
  rows, topk_weights, places = vary_together(
      jax.tree.map(jnp.asarray, (rows, topk_weights, places)))
  return combine(None, rows, topk_weights, places)


def moe_sum(x: jax.Array) -> jax.Array:
  """The sum over experts of [tokens, topk, d], in order and in float32.

  Args:
    x: any floating dtype.

  Returns:
    [tokens, d], x's dtype.

  Raises:
    TypeError: an argument of the wrong type or dtype.
    ValueError: a shape that cannot be.
  """
  arguments.check_dtype("moe_sum", "x", x, _FLOATS)
  if x.ndim != 3:
    raise arguments.bad("moe_sum", "x", arguments.describe(x),
                        "shape [tokens, topk, d]")
  wide = jnp.promote_types(x.dtype, jnp.float32)
  total = jnp.zeros((x.shape[0], x.shape[2]), wide)
  for j in range(x.shape[1]):
    total += x[:, j].astype(wide)
  return total.astype(x.dtype)
