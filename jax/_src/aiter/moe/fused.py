# SPDX-License-Identifier: Apache-2.0
"""A whole layer of experts: permute, multiply, activate, multiply, combine."""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import jax.numpy as jnp

import jax
from jax._src.aiter.activation import api as activation_api
from jax._src.aiter.core import arguments
from jax._src.aiter.core.partition import vary_together
from jax._src.aiter.gmm import op as gmm_op
from jax._src.aiter.moe import api
from jax._src.aiter.moe.move import combine, rows_of, spread
from jax._src.aiter.quant import api as quant_api

_FLOATS = ("bfloat16", "float16", "float32", "float64")
# Name -> the gated activation, the same quantised, and what of a gate alone.
_ACTIVATIONS = {
    "silu": (activation_api.silu_and_mul, activation_api.silu_and_mul_quant,
             jax.nn.silu),
    "gelu": (activation_api.gelu_and_mul, activation_api.gelu_and_mul_quant,
             functools.partial(jax.nn.gelu, approximate=False)),
    "gelu_tanh": (activation_api.gelu_tanh_and_mul,
                  activation_api.gelu_tanh_and_mul_quant,
                  functools.partial(jax.nn.gelu, approximate=True)),
    "swiglu": (activation_api.swiglu_and_mul,
               activation_api.swiglu_and_mul_quant, None),
}
# Weights' dtypes that have scales.
_BYTES = ("int8", "float8_e4m3fn", "float8_e4m3fnuz")
# What the gated activations of these names take a limit as.
_LIMITED = ("silu", "swiglu")


class Config(NamedTuple):
  """Static facts of a layer; hashable.

  Attributes:
    layout: of the products: "nt" of weights [e, n, k], "nn" of [e, k, n].
    activation: of _ACTIVATIONS.
    gated: whether w1 has a gate and an up for each column.
    interleaved: whether these are neighbours, not halves.
    early: whether tokens' weights multiply what is activated, not the result.
    limit: of the activation, or None.
    dtype: name of the result's dtype.
    scaling: of weights: "none", "row" or "block", as gmm's Config has it. Rows
      are quantised alike.
  """
  layout: str
  activation: str
  gated: bool
  interleaved: bool
  early: bool
  limit: float | None
  dtype: str
  scaling: str = "none"


class Layer(NamedTuple):
  """Arrays of a layer; an absent one is None. See fused_moe."""
  hidden: jax.Array
  w1: jax.Array
  w2: jax.Array
  weights: jax.Array
  ids: jax.Array
  bias1: jax.Array | None
  bias2: jax.Array | None
  w1_scale: jax.Array | None = None
  w2_scale: jax.Array | None = None


def _of_expert(bias, ids, like):
  """Each row's bias, 0 of a row of no expert."""
  return bias.astype(like).at[ids].get(
      mode="fill", fill_value=0, wrap_negative_indices=False)


def _quantised(cfg: Config, x, dtype):
  """x as weights of a dtype want it: (numbers, scales)."""
  if cfg.scaling == "block":
    return quant_api.per_group_quant(x, quant_dtype=dtype)
  return quant_api.per_token_quant(x, quant_dtype=dtype)


def _activate(cfg: Config, h, row_ids, bias1, w2):
  """What w2 multiplies, and its scales if there are any."""
  gated, quantised, alone = _ACTIVATIONS[cfg.activation]
  options = {}
  if cfg.limit is not None:
    options["limit"] = cfg.limit
  if not cfg.gated:
    wide = jnp.promote_types(h.dtype, jnp.float32)
    h = h.astype(wide)
    if bias1 is not None:
      h += _of_expert(bias1, row_ids, wide)
    y = alone(h)
    if cfg.scaling != "none":
      return _quantised(cfg, y, w2.dtype)
    return y.astype(w2.dtype), None
  if cfg.interleaved:
    pairs = h.reshape(h.shape[0], -1, 2)
    if bias1 is not None:
      both = bias1.reshape(bias1.shape[0], -1, 2)
      bias1 = jnp.concatenate([both[..., 0], both[..., 1]], -1)
    h, options["up"] = pairs[..., 0], pairs[..., 1]
  if bias1 is not None:
    options |= dict(expert_ids=row_ids, bias=bias1)
  if cfg.scaling != "none":
    return quantised(h, **options, quant_dtype=w2.dtype,
                     group_size=128 if cfg.scaling == "block" else None)
  return gated(h, **options).astype(w2.dtype), None


@functools.partial(jax.jit, static_argnums=0, inline=True)
def _layer(cfg: Config, x: Layer) -> jax.Array:
  """The layer of checked arguments and local ids."""
  x = vary_together(x)
  experts = x.w1.shape[0]
  counts, places = api.places_of(x.ids, experts)

  def times(rows, scales, w, w_scale):
    if cfg.scaling == "none":
      return gmm_op.product(gmm_op.Config(w.dtype.name, cfg.layout),
                            gmm_op.Operands(rows, w, counts))
    if cfg.scaling == "row":
      scales = scales.reshape(-1)
    return gmm_op.scaled(
        gmm_op.Config(x.hidden.dtype.name, "nt", scaling=cfg.scaling),
        gmm_op.Operands(rows, w, counts, scales, w_scale))

  if cfg.scaling == "none":
    rows, scales = spread(None, x.hidden, places), None
  else:
    # Once a token, not once for each of its experts.
    rows, scales = (rows_of(t, places)
                    for t in _quantised(cfg, x.hidden, x.w1.dtype))
  by_row = lambda t: t.reshape(-1).at[places.entry].get(
      mode="fill", fill_value=0, wrap_negative_indices=False)
  row_ids = None
  if x.bias1 is not None or x.bias2 is not None:
    row_ids = jnp.where(places.entry < 0, -1, by_row(x.ids))
  h = times(rows, scales, x.w1, x.w1_scale)
  bias1 = x.bias1
  if cfg.early:
    wide = jnp.promote_types(h.dtype, jnp.float32)
    h = h.astype(wide)
    if bias1 is not None:
      h, bias1 = h + _of_expert(bias1, row_ids, wide), None
    h = (h * by_row(x.weights.astype(wide))[:, None]).astype(x.hidden.dtype)
  h, scales = _activate(cfg, h, row_ids, bias1, x.w2)
  y = times(h, scales, x.w2, x.w2_scale)
  if x.bias2 is not None:
    y = (y + _of_expert(x.bias2, row_ids, jnp.float32)).astype(y.dtype)
  return combine(None, y, None if cfg.early else x.weights, places).astype(
      cfg.dtype)


def _scales(function: str, w1, w2, w1_scale, w2_scale):
  """(kind of scaling, checked scales)."""
  kinds, found = [], []
  along = lambda size: (size + gmm_op.BLOCK - 1) // gmm_op.BLOCK
  for name, w, scale in (("w1_scale", w1, w1_scale),
                         ("w2_scale", w2, w2_scale)):
    arguments.check_dtype(function, name, scale, ("float32",))
    experts, n, k = w.shape
    rows, blocks = (experts, n), (experts, along(n), along(k))
    if scale.shape in (rows, (*rows, 1)):
      kinds.append("row")
      scale = scale.reshape(rows)
    elif scale.shape == blocks and w.dtype != jnp.int8:
      kinds.append("block")
    else:
      words = f"shape {list(rows)}"
      if w.dtype != jnp.int8:
        words += f" or {list(blocks)}"
      raise arguments.bad(function, name, arguments.describe(scale), words)
    found.append(scale)
  if kinds[0] != kinds[1]:
    raise arguments.bad(function, "w2_scale", f"of {kinds[1]}s",
                        f"of {kinds[0]}s, as w1_scale is")
  return kinds[0], *found


def fused_moe(
    hidden_states: jax.Array,
    w1: jax.Array,
    w2: jax.Array,
    topk_weight: jax.Array,
    topk_ids: jax.Array,
    expert_mask: jax.Array | None = None,
    activation: str = "silu",
    doweight_stage1: bool = False,
    *,
    num_local_tokens: jax.Array | None = None,
    w1_scale: jax.Array | None = None,
    w2_scale: jax.Array | None = None,
    dtype: Any = None,
    bias1: jax.Array | None = None,
    bias2: jax.Array | None = None,
    swiglu_limit: float | None = None,
    gate_mode: str = "separated",
    weight_layout: str = "enk",
) -> jax.Array:
  """A layer of experts: the sum over a token's experts of weight times
  `w2 @ activation(w1 @ x)`.

  Rows are sorted by expert, multiplied by grouped products, and each token's
  results are added in the order of its choices, in float32: the result is the
  same in every run, and so are the gradients of hidden_states, w1, w2,
  topk_weight and the biases. Nothing waits for the host. Shared experts are
  experts that every token's ids have.

  Args:
    hidden_states: [tokens, d], bfloat16 or float16; float32 and float64 by the
      formulas.
    w1: [e, 2 i, d], a gate and an up for each of i columns, or [e, i, d]
      without gates; hidden_states' dtype, or, with scales, int8, float8_e4m3fn
      or float8_e4m3fnuz.
    w2: [e, d, i], w1's dtype.
    topk_weight: [tokens, topk], any floating dtype.
    topk_ids: integers [tokens, topk]. One that is no expert's adds nothing.
    expert_mask: integers [experts] of all experts, of which those that are not
      0 are here, as w1 and w2 have them; e of them. By default all are.
    activation: "silu", "gelu" (exact), "gelu_tanh", or "swiglu" (gpt-oss: `g *
      sigmoid(1.702 g) * (u + 1)`, of clipped g and u), which has gates.
    doweight_stage1: topk_weight multiplies `w1 @ x + bias1` (Llama 4), and not
      the result.
    num_local_tokens: integer [1]: later tokens have the result 0.
    w1_scale: float32, of weights of bytes: one a row, [e, n] or [e, n, 1] of a
      w1 [e, n, d]; or, of float8, one every 128 x 128, [e, ceil(n / 128),
      ceil(d / 128)]. Hidden states, and what is activated, are then quantised
      to the weights' dtype, by row or by 128 columns, as per_token_quant and
      per_group_quant do, and there is no gradient.
    w2_scale: of w2 alike.
    dtype: of the result; hidden_states' by default.
    bias1: [e, 2 i] or [e, i], any floating dtype.
    bias2: [e, d], any floating dtype.
    swiglu_limit: gates are clipped to at most the limit, ups to at most it on
      both sides, of "silu" and "swiglu"; by default "swiglu" clips at 7 and
      "silu" does not.
    gate_mode: "separated", w1's first i rows are the gates; or "interleaved",
      gates and ups take turns.
    weight_layout: "enk" as above, or "ekn": w1 [e, d, 2 i], w2 [e, i, d].

  Returns:
    [tokens, d].

  Raises:
    TypeError: an argument of the wrong type or dtype.
    ValueError: a shape or value that cannot be; the message names it.
  """
  function = "fused_moe"
  bad = functools.partial(arguments.bad, function)
  hidden_states, w1, w2 = arguments.agreeing(hidden_states, w1, w2)
  scaled = w1_scale is not None or w2_scale is not None
  ids = api.check_ids(function, topk_ids)
  api.check_rows(function, "hidden_states", hidden_states, ids.shape[0])
  d = hidden_states.shape[1]
  layout = {"enk": "nt", "ekn": "nn"}[arguments.choice(
      function, "weight_layout", weight_layout, ("enk", "ekn"))]
  inner = 1 if layout == "nt" else 2  # the axis of w1 that is not d
  for name, w in (("w1", w1), ("w2", w2)):
    arguments.check_dtype(
        function, name, w, (hidden_states.dtype.name,) if not scaled
        else _BYTES if name == "w1" else (w1.dtype.name,))
    if w.ndim != 3:
      raise bad(name, arguments.describe(w), "an array of rank 3")
  experts, n = w1.shape[0], w1.shape[inner]
  columns = w2.shape[3 - inner]
  of = lambda a, b: (experts, *((a, b) if layout == "nt" else (b, a)))
  if w1.shape != of(n, d):
    raise bad("w1", arguments.describe(w1), f"shape {list(of('n', d))}")
  if w2.shape != of(d, columns) or n not in (columns, 2 * columns):
    raise bad("w2", arguments.describe(w2),
              f"shape {list(of(d, f'{n} / 2'))} with gates or"
              f" {list(of(d, n))} without, for w1 {arguments.describe(w1)}")
  gated = n == 2 * columns
  activation = arguments.choice(
      function, "activation", activation, tuple(_ACTIVATIONS))
  if not gated and _ACTIVATIONS[activation][2] is None:
    raise bad("activation", repr(activation), "one without gates, as w1 is")
  limit = swiglu_limit
  if limit is not None:
    if not gated or activation not in _LIMITED:
      raise bad("swiglu_limit", repr(limit),
                "None but of silu and swiglu with gates")
    limit = arguments.number(function, "swiglu_limit", limit,
                             "a finite number above 0",
                             lambda t: 0 < t < float("inf"))
  arguments.check_dtype(function, "topk_weight", topk_weight, _FLOATS)
  if topk_weight.shape != ids.shape:
    raise bad("topk_weight", arguments.describe(topk_weight),
              f"shape {list(ids.shape)}")
  for name, bias, width in (("bias1", bias1, n), ("bias2", bias2, d)):
    if bias is not None:
      arguments.check_dtype(function, name, bias, _FLOATS)
      if bias.shape != (experts, width):
        raise bad(name, arguments.describe(bias), f"shape [{experts}, {width}]")
  scaling = "none"
  if scaled:
    if layout != "nt":
      raise bad("weight_layout", repr(weight_layout), "'enk' with w1_scale")
    scaling, w1_scale, w2_scale = _scales(
        function, w1, w2, w1_scale, w2_scale)
  everywhere = experts
  if expert_mask is not None:
    arguments.check_is_array(function, "expert_mask", expert_mask, False)
    if expert_mask.ndim != 1 or expert_mask.shape[0] < experts:
      raise bad("expert_mask", arguments.describe(expert_mask),
                f"shape [n] of at least {experts}")
    everywhere = expert_mask.shape[0]
  ids = api.local_ids(function, ids, everywhere, expert_mask, num_local_tokens)
  cfg = Config(
      layout, activation, gated,
      arguments.choice(function, "gate_mode", gate_mode,
                       ("separated", "interleaved")) == "interleaved",
      arguments.flag(function, "doweight_stage1", doweight_stage1), limit,
      hidden_states.dtype.name if dtype is None else arguments.dtype_name(
          function, "dtype", dtype, _FLOATS), scaling)
  x = Layer(hidden_states, w1, w2, topk_weight, ids, bias1, bias2, w1_scale,
            w2_scale)
  if not scaled:
    return _layer(cfg, x)
  return arguments.no_gradient(
      function, "of quantised weights; apply jax.lax.stop_gradient where"
      " nothing is to be learned through it")(functools.partial(_layer, cfg))(
          jax.tree.map(jnp.asarray, x))
