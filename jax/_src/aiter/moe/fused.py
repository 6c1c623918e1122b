# SPDX-License-Identifier: Apache-2.0
"""A whole layer of experts: permute, multiply, activate, multiply, combine."""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np

import jax
from jax._src.aiter.activation import api as activation_api
from jax._src.aiter.activation.op import ACTIVATIONS
from jax._src.aiter.core import arguments
from jax._src.aiter.core.derivative import rows_by
from jax._src.aiter.core.partition import vary_together
from jax._src.aiter.gmm import api as gmm_api
from jax._src.aiter.gmm import op as gmm_op
from jax._src.aiter.moe import api
from jax._src.aiter.moe.move import (
    Places,
    combine,
    everyone,
    rows_of,
    spread,
)
from jax._src.aiter.quant import api as quant_api

_FLOATS = ("bfloat16", "float16", "float32", "float64")
# Name -> the gated activation, the same quantised, and what of a gate alone.
# What is None has no kernel, or no meaning without gates.
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
    "situv2": (None, None, None),
}
# AITER's names of scales -> what there is of it; of eight bits with the scales'
# rank.
_QUANT_TYPES = {
    "no": ("none",), "per_tensor": (("row", 1),),
    "per_token": (("row", 2), ("row", 3)), "per_1x32": ("mx", "i4"),
    "per_1x128": (("block", 3),), "per_128x128": (("block", 3),)}
# Weights' dtypes that have scales: of eight bits, and of four.
_BYTES = ("int8", "float8_e4m3fn", "float8_e4m3fnuz")
_PACKED = ("uint8", "float4_e2m1fn", "int4")
_POWERS = ("uint8", "float8_e8m0fnu")  # of MX formats' scales
# What the gated activations of these names take a limit as.
_LIMITED = ("silu", "swiglu")
_BETAS = (4.0, 25.0)  # of "situv2", for the gate and for the up
_SWIGLU = (7.0, 1.702)  # limit and alpha of "swiglu"


class Config(NamedTuple):
  """Static facts of a layer; hashable.

  Attributes:
    layout: of the products: "nt" of weights [e, n, k], "nn" of [e, k, n].
    activation: of _ACTIVATIONS.
    gated: whether w1 has a gate and an up for each column.
    interleaved: whether these are neighbours, not halves.
    early: whether tokens' weights multiply what is activated, not the result.
    limit: of the activation, or 0.
    alpha: of "swiglu".
    betas: of "situv2".
    dtype: name of the result's dtype.
    scaling: of weights, as gmm's Config has it.
    quant: what rows are quantised to, alike; or None.
  """
  layout: str
  activation: str
  gated: bool
  interleaved: bool
  early: bool
  limit: float
  alpha: float
  betas: tuple[float, float]
  dtype: str
  scaling: str = "none"
  quant: str | None = None


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
  a1_scale: jax.Array | None = None
  a2_scale: jax.Array | None = None


def _situ(betas, gate, up):
  """Gates and ups that are bounded smoothly (AITER's Situv2)."""
  bounded = lambda t, beta: beta * jnp.tanh(t / beta)
  return (bounded(gate, betas[0]) * jax.nn.sigmoid(gate)
          * bounded(up, betas[1]))


def quantised(cfg: Config, x, scale):
  """x as the weights want it: (numbers, scales or None). scale: of all rows."""
  if cfg.quant is None:
    return x, None
  if cfg.scaling == "mx":
    return quant_api.mx_quant(x, quant_dtype=cfg.quant)
  if cfg.scaling == "block":
    return quant_api.per_group_quant(x, quant_dtype=cfg.quant)
  if scale is not None:
    return quant_api.per_tensor_quant(x, scale, quant_dtype=cfg.quant)
  return quant_api.per_token_quant(x, quant_dtype=cfg.quant)


def _activate(cfg: Config, h, row_ids, bias1, scale, dtype):
  """What w2 multiplies, of a dtype or quantised, and its scales or None."""
  gated, by_quant, alone = _ACTIVATIONS[cfg.activation]
  options = {}
  if cfg.activation in _LIMITED:
    options["limit"] = cfg.limit
  if cfg.activation == "swiglu":
    options["alpha"] = cfg.alpha
  if not cfg.gated or gated is None:
    wide = jnp.promote_types(h.dtype, jnp.float32)
    h = h.astype(wide)
    if bias1 is not None:
      h += rows_by(wide.name, bias1, row_ids)
    if cfg.gated:
      y = _situ(cfg.betas, *((h[:, ::2], h[:, 1::2]) if cfg.interleaved
                             else jnp.split(h, 2, -1)))
    else:
      y = alone(h)
    return quantised(cfg, y if cfg.quant else y.astype(dtype), scale)
  if cfg.interleaved:
    in_pairs = lambda t: t.reshape(t.shape[0], t.shape[1] // 2, 2)
    pairs = in_pairs(h)
    if bias1 is not None:
      both = in_pairs(bias1)
      bias1 = jnp.concatenate([both[..., 0], both[..., 1]], -1)
    h, options["up"] = pairs[..., 0], pairs[..., 1]
  if bias1 is not None:
    options |= dict(expert_ids=row_ids, bias=bias1)
  if cfg.quant is None:
    return gated(h, **options).astype(dtype), None
  if cfg.scaling == "row":
    options["scale"] = scale
  else:
    options["group_size"] = gmm_op.SCALED_COLUMNS[cfg.scaling]
  if cfg.scaling == "mx":
    options["scale_dtype"] = jnp.uint8
  return by_quant(h, **options, quant_dtype=cfg.quant)


def by_row(t, places: Places):
  """What tokens have for each of their choices, [m, k], at its place."""
  return t.reshape(-1).at[places.entry].get(
      mode="fill", fill_value=0, wrap_negative_indices=False)


def _ends(cfg: Config) -> dict[str, Any] | None:
  """What gmm's Config has of the activation; None of one behind a product.

  Such is exact GELU: in a product's kernel nothing hides its polynomial, which
  takes longer than the pass over the product that it would save.
  """
  if cfg.activation == "gelu":
    return None
  if not cfg.gated:
    return dict(activation=cfg.activation)
  if (cfg.activation not in ACTIVATIONS
      or not cfg.interleaved and cfg.layout == "nn"):
    return None
  return dict(gates="pairs" if cfg.interleaved else "halves",
              activation=cfg.activation, limit=cfg.limit, alpha=cfg.alpha)


def multiplied(cfg: Config, x: Layer, counts, rows, scales, row_ids, weights):
  """What experts make of their rows, [n, d], before they are combined.

  Args:
    cfg: of the layer.
    x: its arrays, but for those of tokens.
    counts: int32 [e], rows of each expert.
    rows: [n, d], of tokens that are quantised as the weights want it.
    scales: their scales, that of all rows, or None.
    row_ids: [n], each row's expert or -1; None without biases.
    weights: [n], by which rows are multiplied between the products, or None.
  """

  def times(rows, scales, w, w_scale, bias=None, **ends):
    if cfg.scaling == "none":
      return gmm_op.product(
          gmm_op.Config(w.dtype.name, cfg.layout, **ends),
          gmm_op.Operands(rows, w, counts, bias=bias))
    if cfg.scaling == "row":
      scales = jnp.broadcast_to(scales.reshape(-1), rows.shape[:1])
    if cfg.scaling == "mx" and w.dtype != jnp.uint8:
      # No kernel has MXFP8 weights. In bfloat16 they are exact.
      exact = jnp.promote_types(x.hidden.dtype, jnp.bfloat16)
      rows = (rows.astype(exact) if scales is None else
              quant_api.mx_dequant(rows, scales, dtype=exact))
      return gmm_op.product(
          gmm_op.Config(x.hidden.dtype.name, "nt"), gmm_op.Operands(
              rows, quant_api.mx_dequant(w, w_scale, dtype=exact), counts))
    return gmm_op.scaled(
        gmm_op.Config(x.hidden.dtype.name, "nt", scaling=cfg.scaling),
        gmm_op.Operands(rows, w, counts, scales, w_scale))

  def added(y):
    """With the bias, of which XLA makes a part of what combines rows."""
    if x.bias2 is None:
      return y
    return (y + rows_by("float32", x.bias2, row_ids)).astype(y.dtype)

  ends = _ends(cfg)
  if cfg.scaling == "none" and weights is None and ends is not None:
    h = times(rows, None, x.w1, None, x.bias1, **ends)
    return added(times(h, None, x.w2, None))
  h = times(rows, scales, x.w1, x.w1_scale)
  bias1 = x.bias1
  if weights is not None:
    wide = jnp.promote_types(h.dtype, jnp.float32)
    h = h.astype(wide)
    if bias1 is not None:
      h, bias1 = h + rows_by(wide.name, bias1, row_ids), None
    h = (h * weights.astype(wide)[:, None]).astype(x.hidden.dtype)
  h, scales = _activate(cfg, h, row_ids, bias1, x.a2_scale, x.hidden.dtype)
  return added(times(h, scales, x.w2, x.w2_scale))


@functools.partial(jax.jit, static_argnums=(0, 2, 3), inline=True)
def layer(cfg: Config, x: Layer, room: int | None = None,
          axis: str | None = None) -> jax.Array:
  """The layer of checked arguments and local ids, [tokens, d].

  Args:
    cfg: of the layer.
    x: its arrays.
    room: rows that there is room for, by default all; a token with a row that
      has none is NaN.
    axis: the mesh axis that divides hidden states and results; weights and ids
      are those of all tokens, ids of this device's experts.
  """
  x = vary_together(x)
  counts, places = api.places_of(x.ids, x.w1.shape[0])
  weights = None if cfg.early else x.weights
  if room is not None:
    counts = jnp.clip(room - jnp.cumsum(counts) + counts, 0, counts)
    places = places._replace(entry=places.entry[:room])
    weights = jnp.where(places.row < room, 1 if weights is None else weights,
                        jnp.nan)
  if cfg.scaling == "none":
    rows, scales = spread(axis, x.hidden, places), None
  else:
    # Once a token, not once for each of its experts.
    rows, scales = quantised(cfg, everyone(axis, x.hidden), x.a1_scale)
    rows = rows_of(rows, places)
    if scales is not None and x.a1_scale is None:
      scales = rows_of(scales, places)
  row_ids = None
  if x.bias1 is not None or x.bias2 is not None:
    row_ids = jnp.where(places.entry < 0, -1, by_row(x.ids, places))
  y = multiplied(cfg, x, counts, rows, scales, row_ids,
                 by_row(x.weights, places) if cfg.early else None)
  return combine(axis, y, weights, places).astype(cfg.dtype)


def _packed(function: str, w1, w2, w1_scale, w2_scale):
  """(kind of scaling, weights as bytes, scales) of checked dtypes."""
  i4 = w1.dtype == jnp.int4 or getattr(w1_scale, "dtype", None) == jnp.bfloat16
  pairs = [gmm_api.check_packed(
      function, name, w, scale, "int4" if i4 else "float4_e2m1fn")
           for name, w, scale in (("w1", w1, w1_scale), ("w2", w2, w2_scale))]
  return "i4" if i4 else "mx", *zip(*pairs)


def _scales(function: str, w1, w2, w1_scale, w2_scale):
  """(kind of scaling, checked scales)."""
  kinds, found = [], []
  along = lambda size: (size + gmm_op.BLOCK - 1) // gmm_op.BLOCK
  for name, w, scale in (("w1_scale", w1, w1_scale),
                         ("w2_scale", w2, w2_scale)):
    mx = w.dtype == jnp.float8_e4m3fn
    arguments.check_dtype(function, name, scale,
                          ("float32", *_POWERS) if mx else ("float32",))
    experts, n, k = w.shape
    rows, blocks = (experts, n), (experts, along(n), along(k))
    if scale.dtype.name in _POWERS:
      if k % gmm_op.PACKED_BLOCK or scale.shape != (
          *rows, k // gmm_op.PACKED_BLOCK):
        raise arguments.bad(function, name, arguments.describe(scale),
                            f"shape {[*rows, f'{k} / {gmm_op.PACKED_BLOCK}']}")
      kinds.append("mx")
      found.append(jax.lax.bitcast_convert_type(scale, jnp.uint8))
      continue
    if scale.shape == (experts,):
      scale = jnp.broadcast_to(scale[:, None], rows)
    if scale.shape in (rows, (*rows, 1)):
      kinds.append("row")
      scale = scale.reshape(rows)
    elif scale.shape == blocks and w.dtype != jnp.int8:
      kinds.append("block")
    else:
      words = f"shape {[experts]} or {list(rows)}"
      if w.dtype != jnp.int8:
        words += f" or {list(blocks)}"
      raise arguments.bad(function, name, arguments.describe(scale), words)
    found.append(scale)
  if kinds[0] != kinds[1]:
    raise arguments.bad(function, "w2_scale", f"of {kinds[1]}s",
                        f"of {kinds[0]}s, as w1_scale is")
  return kinds[0], *found


def _check_products(function: str, d: int, w1, w2, layout: str,
                    in_pairs: bool) -> tuple[int, bool]:
  """(columns of the first product, whether half of them are gates).

  Args:
    function: the public function's name.
    d: columns of hidden states.
    w1: the first product's matrices, of a checked dtype.
    w2: the second one's.
    layout: of Config.
    in_pairs: whether a byte of theirs has two numbers.
  """
  bad = functools.partial(arguments.bad, function)
  inner = 1 if layout == "nt" else 2  # the axis of w1 that is not d
  shape1, shape2 = ((*w.shape[:2], w.shape[2] * (2 if in_pairs else 1))
                    for w in (w1, w2))
  experts, n = shape1[0], shape1[inner]
  columns = shape2[3 - inner]
  of = lambda a, b: (experts, *((a, b) if layout == "nt" else (b, a)))
  if shape1 != of(n, d):
    raise bad("w1", arguments.describe(w1), f"shape {list(of('n', d))}")
  if shape2 != of(d, columns) or n not in (columns, 2 * columns):
    raise bad("w2", arguments.describe(w2),
              f"shape {list(of(d, f'{n} / 2'))} with gates or"
              f" {list(of(d, n))} without, for w1 {arguments.describe(w1)}")
  return n, n == 2 * columns


def _check_activation(function: str, gated: bool, activation, swiglu_limit,
                      swiglu_alpha, beta, linear_beta):
  """Config's activation, limit, alpha and betas, by name."""
  bad = functools.partial(arguments.bad, function)
  activation = arguments.choice(
      function, "activation", activation, tuple(_ACTIVATIONS))
  if not gated and _ACTIVATIONS[activation][2] is None:
    raise bad("activation", repr(activation), "one without gates, as w1 is")
  limit, alpha = _SWIGLU if activation == "swiglu" else (0.0, 1.0)
  if swiglu_limit is not None:
    limit = swiglu_limit
    if not gated or activation not in _LIMITED:
      raise bad("swiglu_limit", repr(limit),
                "None but of silu and swiglu with gates")
    limit = arguments.number(function, "swiglu_limit", limit,
                             "a finite number above 0",
                             lambda t: 0 < t < float("inf"))
  if swiglu_alpha is not None:
    alpha = swiglu_alpha
    if activation != "swiglu":
      raise bad("swiglu_alpha", repr(alpha), "None but of swiglu")
    alpha = arguments.number(function, "swiglu_alpha", alpha, "a finite number",
                             lambda t: abs(t) < float("inf"))
  betas = []
  for name, value, default in zip(("beta", "linear_beta"), (beta, linear_beta),
                                  _BETAS):
    if value is not None and activation != "situv2":
      raise bad(name, repr(value), "None but of situv2")
    betas.append(arguments.number(
        function, name, default if value is None else value,
        "a finite number above 0", lambda t: 0 < t < float("inf")))
  return dict(activation=activation, limit=limit, alpha=alpha,
              betas=tuple(betas))


def _check_quant(function: str, dtype: str, scaling: str, quant_dtype,
                 a1_scale, a2_scale) -> str | None:
  """What rows are quantised to for weights of `dtype`."""
  quant = dtype if scaling in ("row", "block") else None
  if quant_dtype is not None:
    quant = arguments.dtype_name(
        function, "quant_dtype", quant_dtype, ("float8_e4m3fn", "mxfp4"))
    if scaling != "mx":
      raise arguments.bad(function, "quant_dtype", quant,
                          "None but with weights of MXFP4 or MXFP8")
  for name, scale in (("a1_scale", a1_scale), ("a2_scale", a2_scale)):
    if scale is not None:
      arguments.check_dtype(function, name, scale, ("float32",))
      if scaling != "row" or scale.shape not in ((), (1,)):
        raise arguments.bad(
            function, name, arguments.describe(scale), "None, or one number"
            " with weights that have a scale an expert or a row")
  return quant


def _check_routing(function: str, ids, topk_weight, experts: int,
                   everywhere: int, expert_mask, num_local_tokens,
                   num_shared_experts):
  """(weights, ids of experts that w1 has), those of shared experts too.

  Args:
    function: the public function's name.
    ids: int32 [tokens, topk].
    topk_weight: see fused_moe.
    experts: that w1 has.
    everywhere: experts of all devices, if expert_mask does not say.
    **: see fused_moe.
  """
  bad = functools.partial(arguments.bad, function)
  if expert_mask is not None:
    arguments.check_is_array(function, "expert_mask", expert_mask, False)
    if expert_mask.ndim != 1 or expert_mask.shape[0] < experts:
      raise bad("expert_mask", arguments.describe(expert_mask),
                f"shape [n] of at least {experts}")
    given = arguments.at_hand(expert_mask)
    if given is not None and np.count_nonzero(given) != experts:
      raise bad("expert_mask", np.array2string(given, threshold=8),
                f"one of which {experts} are not 0, the experts of w1")
    everywhere = expert_mask.shape[0]
  shared = arguments.number(
      function, "num_shared_experts", num_shared_experts,
      f"an integer from 0 to {everywhere}", lambda t: 0 <= t <= everywhere, int)
  arguments.check_dtype(function, "topk_weight", topk_weight, _FLOATS)
  tokens, topk = ids.shape
  if topk_weight.shape not in ((tokens, topk), (tokens, topk + shared)):
    raise bad("topk_weight", arguments.describe(topk_weight),
              f"shape {[tokens, topk]}" + (
                  f" or {[tokens, topk + shared]}" if shared else ""))
  if shared:
    last = jnp.arange(everywhere - shared, everywhere, dtype=jnp.int32)
    ids = jnp.concatenate([ids, jnp.broadcast_to(last, (tokens, shared))], 1)
    topk_weight = jnp.pad(
        topk_weight, ((0, 0), (0, topk + shared - topk_weight.shape[1])),
        constant_values=1)
  return topk_weight, api.local_ids(
      function, ids, everywhere, expert_mask, num_local_tokens)


def checked(
    function: str, devices: int, hidden_states, w1, w2, topk_weight, topk_ids,
    expert_mask, activation, quant_type, doweight_stage1, num_local_tokens,
    w1_scale, w2_scale, a1_scale, a2_scale, quant_dtype, dtype, bias1, bias2,
    swiglu_limit, swiglu_alpha, beta, linear_beta, gate_mode, weight_layout,
    num_shared_experts,
) -> tuple[Config, Layer]:
  """fused_moe's arguments, checked; ids are those of experts that w1 has.

  Args:
    function: the public function's name.
    devices: that have as many experts as this one; without expert_mask ids are
      those of all of them.
    **: see fused_moe.
  """
  bad = functools.partial(arguments.bad, function)
  hidden_states, w1, w2 = arguments.agreeing(hidden_states, w1, w2)
  scaled = w1_scale is not None or w2_scale is not None
  scaling = of_scales = "none"
  ids = api.check_ids(function, topk_ids)
  api.check_rows(function, "hidden_states", hidden_states, ids.shape[0])
  d = hidden_states.shape[1]
  layout = {"enk": "nt", "ekn": "nn"}[arguments.choice(
      function, "weight_layout", weight_layout, ("enk", "ekn"))]
  for name, w in (("w1", w1), ("w2", w2)):
    arguments.check_dtype(
        function, name, w, (hidden_states.dtype.name,) if not scaled
        else _BYTES + _PACKED if name == "w1" else (w1.dtype.name,))
    if w.ndim != 3:
      raise bad(name, arguments.describe(w), "an array of rank 3")
  if scaled and layout != "nt":
    raise bad("weight_layout", repr(weight_layout), "'enk' with w1_scale")
  four_bits = scaled and w1.dtype.name in _PACKED
  if four_bits:
    scaling, (w1, w2), (w1_scale, w2_scale) = _packed(
        function, w1, w2, w1_scale, w2_scale)
    of_scales = scaling
  experts = w1.shape[0]
  n, gated = _check_products(function, d, w1, w2, layout, four_bits)
  options = _check_activation(function, gated, activation, swiglu_limit,
                              swiglu_alpha, beta, linear_beta)
  for name, bias, width in (("bias1", bias1, n), ("bias2", bias2, d)):
    if bias is not None:
      arguments.check_dtype(function, name, bias, _FLOATS)
      if bias.shape != (experts, width):
        raise bad(name, arguments.describe(bias), f"shape [{experts}, {width}]")
  if scaled and not four_bits:
    rank = getattr(w1_scale, "ndim", None)
    scaling, w1_scale, w2_scale = _scales(
        function, w1, w2, w1_scale, w2_scale)
    of_scales = scaling if scaling == "mx" else (scaling, rank)
  if quant_type is not None:
    fits = [name for name, of in _QUANT_TYPES.items() if of_scales in of]
    arguments.choice(function, "quant_type", quant_type, (None, *fits))
  quant = _check_quant(function, w1.dtype.name, scaling, quant_dtype, a1_scale,
                       a2_scale)
  topk_weight, ids = _check_routing(
      function, ids, topk_weight, experts, devices * experts, expert_mask,
      num_local_tokens, num_shared_experts)
  dtype = hidden_states.dtype.name if dtype is None else arguments.dtype_name(
      function, "dtype", dtype, _FLOATS)
  interleaved = arguments.choice(
      function, "gate_mode", gate_mode,
      ("separated", "interleaved")) == "interleaved"
  if interleaved and not gated:
    raise bad("gate_mode", repr(gate_mode), "'separated' without gates")
  return Config(
      layout, gated=gated, interleaved=interleaved, dtype=dtype,
      early=arguments.flag(function, "doweight_stage1", doweight_stage1),
      scaling=scaling, quant=quant, **options), Layer(
          hidden_states, w1, w2, topk_weight, ids, bias1, bias2, w1_scale,
          w2_scale, a1_scale, a2_scale)


def run(function: str, layer, cfg: Config, x: Layer) -> jax.Array:
  """layer(cfg, x), without a gradient of quantised weights."""
  if cfg.scaling == "none":
    return layer(cfg, x)
  return arguments.no_gradient(
      function, "of quantised weights; apply jax.lax.stop_gradient where"
      " nothing is to be learned through it")(functools.partial(layer, cfg))(
          jax.tree.map(jnp.asarray, x))


def fused_moe(
    hidden_states: jax.Array,
    w1: jax.Array,
    w2: jax.Array,
    topk_weight: jax.Array,
    topk_ids: jax.Array,
    expert_mask: jax.Array | None = None,
    activation: str = "silu",
    quant_type: str | None = None,
    doweight_stage1: bool = False,
    *,
    num_local_tokens: jax.Array | None = None,
    w1_scale: jax.Array | None = None,
    w2_scale: jax.Array | None = None,
    a1_scale: jax.Array | None = None,
    a2_scale: jax.Array | None = None,
    quant_dtype: Any = None,
    dtype: Any = None,
    bias1: jax.Array | None = None,
    bias2: jax.Array | None = None,
    swiglu_limit: float | None = None,
    swiglu_alpha: float | None = None,
    beta: float | None = None,
    linear_beta: float | None = None,
    gate_mode: str = "separated",
    weight_layout: str = "enk",
    num_shared_experts: int = 0,
) -> jax.Array:
  """A layer of experts: the sum over a token's experts of weight times
  `w2 @ activation(w1 @ x)`.

  Rows are sorted by expert, multiplied by grouped products, and each token's
  results are added in the order of its choices, in float32: the result is the
  same in every run, and so are the gradients of hidden_states, w1, w2,
  topk_weight and the biases. Nothing waits for the host.

  Args:
    hidden_states: [tokens, d], bfloat16 or float16; float32 and float64 by the
      formulas.
    w1: [e, 2 i, d], a gate and an up for each of i columns, or [e, i, d]
      without gates; hidden_states' dtype, or, with scales, int8, float8_e4m3fn
      or float8_e4m3fnuz, float4_e2m1fn or int4. Of the last two also uint8 with
      half the columns: two numbers a byte, the first in the low four bits.
    w2: [e, d, i], w1's dtype.
    topk_weight: [tokens, topk], any floating dtype; with shared experts also
      [tokens, topk + num_shared_experts].
    topk_ids: integers [tokens, topk]. One that is no expert's adds nothing.
    expert_mask: integers [experts] of all experts, of which those that are not
      0 are here, as w1 and w2 have them; e of them. By default all are.
    activation: "silu", "gelu" (exact), "gelu_tanh", or "swiglu" (gpt-oss: `g *
      sigmoid(1.702 g) * (u + 1)`, of clipped g and u) or "situv2" (`b tanh(g /
      b) * sigmoid(g) * l tanh(u / l)`, by a formula), which have gates.
    quant_type: AITER's name of what w1_scale and w2_scale are, if they are to
      be checked by it: "no", "per_tensor" (one an expert), "per_token" (one a
      row), "per_128x128" or "per_1x128", "per_1x32" (MX formats, and int4).
      What is done their shapes say alone.
    doweight_stage1: topk_weight multiplies `w1 @ x + bias1` (Llama 4), and not
      the result.
    num_local_tokens: integer [1]: later tokens have the result 0.
    w1_scale: of weights that have scales; there is then no gradient. Of eight
      bits float32: one an expert, [e]; one a row, [e, n] or [e, n, 1] of a w1
      [e, n, d]; or, of float8, one every 128 x 128, [e, ceil(n / 128), ceil(d /
      128)]. Hidden states, and what is activated, are quantised to the weights'
      dtype, by row or by 128 columns, as per_token_quant and per_group_quant
      do. Of MXFP4 uint8 or float8_e8m0fnu [e, n, d / 32]; of int4 bfloat16 of
      every 32, 64 or 128 columns: see grouped_gemm_fp4 and grouped_gemm_i4. Of
      float8_e4m3fn the same is MXFP8, whose numbers are multiplied in bfloat16,
      which holds them.
    w2_scale: of w2 alike.
    a1_scale: float32 [] or [1], of weights of eight bits with a scale an expert
      or a row: that of all hidden states, in the place of their own.
    a2_scale: of what is activated alike.
    quant_dtype: of MXFP4 and MXFP8 weights: float8_e4m3fn or "mxfp4", to which
      hidden states, and what is activated, are quantised as mx_quant does; by
      default they are not.
    dtype: of the result; hidden_states' by default.
    bias1: [e, 2 i] or [e, i], any floating dtype.
    bias2: [e, d], any floating dtype.
    swiglu_limit: gates are clipped to at most the limit, ups to at most it on
      both sides, of "silu" and "swiglu"; by default "swiglu" clips at 7 and
      "silu" does not.
    swiglu_alpha: in the place of "swiglu"'s 1.702.
    beta: "situv2"'s b, 4 by default.
    linear_beta: "situv2"'s l, 25 by default.
    gate_mode: "separated", w1's first i rows are the gates; or "interleaved",
      gates and ups take turns.
    weight_layout: "enk" as above, or "ekn": w1 [e, d, 2 i], w2 [e, i, d].
    num_shared_experts: how many of the last experts (of expert_mask, if there
      is one) every token goes to beside those of its ids: with the last columns
      of topk_weight, as topk_softmax has them, or with 1 where it has none.

  Returns:
    [tokens, d].

  Raises:
    TypeError: an argument of the wrong type or dtype.
    ValueError: a shape or value that cannot be; the message names it.
  """
  return run("fused_moe", layer, *checked(
      "fused_moe", 1, hidden_states, w1, w2, topk_weight, topk_ids, expert_mask,
      activation, quant_type, doweight_stage1, num_local_tokens, w1_scale,
      w2_scale, a1_scale, a2_scale, quant_dtype, dtype, bias1, bias2,
      swiglu_limit, swiglu_alpha, beta, linear_beta, gate_mode, weight_layout,
      num_shared_experts))
