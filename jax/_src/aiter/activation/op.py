# SPDX-License-Identifier: Apache-2.0
"""Gated activations as operators: formulas and kernels' operands.

`activation` is differentiable, `activation_quant` is not. Rows shard over a
mesh, and so do the columns of a gate and an up that are arrays of their own; a
mapped axis is one more axis of rows.
"""

from __future__ import annotations

import functools
import math
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np

import jax
from jax import lax
from jax._src.aiter.core import layouts, rounding
from jax._src.aiter.core.derivative import (
    differentiable,
    formula_jvp,
    sums_by,
)
from jax._src.aiter.core.dispatch import absent, like
from jax._src.aiter.core.operator import Key, operator, rows_lead

_DTYPES = {"float16": "fp16", "bfloat16": "bf16", "float32": "fp32"}

MX_GROUP = 32
ACTIVATIONS = ("gelu", "gelu_tanh", "silu", "swiglu")


class Config(NamedTuple):
  """Static facts of a call; hashable.

  Attributes:
    activation: of ACTIVATIONS; "swiglu" multiplies by up + 1.
    limit: the gate is at most this, and up at most so far from 0; 0 for none.
    alpha: of "swiglu", which is x / (1 + exp(-alpha * x)).
    out: the result's dtype.
    packed: gate holds the gate, and up in the last axis' second half.
    gated: there is an up.
    quant: of a quantised result, what it is rounded to: of rounding.KINDS.
    group: columns that share a scale; 0 is a row.
    mode: rounding of e8m0 scales, of rounding.ROUND_MODES; None for float32.
    shuffled: scales are as quant's shuffle_scale leaves them.
  """
  activation: str
  limit: float = 0.0
  alpha: float = 1.0
  out: str = ""
  packed: bool = True
  gated: bool = True
  quant: str = ""
  group: int = 0
  mode: str | None = None
  shuffled: bool = False

  def limits(self, dtype) -> tuple[float, float]:
    """The largest gate, a number of its dtype, and the largest up."""
    if not self.limit:
      return math.inf, math.inf
    return float(np.asarray(self.limit, dtype)), self.limit


class Rows(NamedTuple):
  """Arrays of a forward call; an absent one is None.

  Attributes:
    gate: [..., d], or [..., 2 d] if packed.
    up: like gate, if it is an array of its own.
    expert_ids: int32 [...], of each row.
    bias: [experts, 2 d], gate's dtype or float32: added to gate and up. A row
      of an expert that is not there has the result 0.
    scale: float32 [], if it is given.
  """
  gate: jax.Array
  up: jax.Array | None = None
  expert_ids: jax.Array | None = None
  bias: jax.Array | None = None
  scale: jax.Array | None = None


class Quantised(NamedTuple):
  """Results of a quantised call.

  Attributes:
    q: [..., d] of the kind's dtype; "mxfp4" packs two columns in a uint8.
    scale: float32, or uint8 if it is e8m0: [..., 1] of rows, or [..., groups].
      None if it was given.
  """
  q: jax.Array
  scale: jax.Array | None


class Grads(NamedTuple):
  """Gradients; each like what it is of.

  Attributes:
    gate: of gate, and of up if packed.
    up: of up, or None.
  """
  gate: jax.Array
  up: jax.Array | None


# -----------------------------------------------------------------------------
# The formulas in jax.numpy


def _wide(t):
  return t.astype(jnp.promote_types(t.dtype, jnp.float32))


def _pair(cfg: Config, rows: Rows):
  """(gate, up or None, which rows have their expert or None), float32.

  Of a row that has none, gate and up are 0.
  """
  gate, up = rows.gate, rows.up
  if cfg.packed:
    gate, up = jnp.split(gate, 2, -1)
  gate, up = (None if t is None else _wide(t) for t in (gate, up))
  if rows.bias is None:
    return gate, up, None
  experts = rows.bias.shape[0]
  known = ((rows.expert_ids >= 0) & (rows.expert_ids < experts))[..., None]
  if experts:
    bias = _wide(rows.bias).at[rows.expert_ids].get(
        mode="fill", fill_value=0, wrap_negative_indices=False)
    of_gate, of_up = jnp.split(bias, 2, -1)
    gate, up = gate + of_gate, up + of_up
  return jnp.where(known, gate, 0), jnp.where(known, up, 0), known


def _normal_cdf(x):
  return 0.5 * lax.erfc(x * -math.sqrt(0.5))


def _activated(cfg: Config, gate):
  if cfg.activation == "gelu":
    return gate * _normal_cdf(gate)
  if cfg.activation == "gelu_tanh":
    # (1 + tanh(w)) / 2 is the logistic function of 2 w.
    w = gate * (math.sqrt(2 / math.pi) * (1 + 0.044715 * (gate * gate)))
    return gate * jax.nn.sigmoid(2 * w)
  return gate * jax.nn.sigmoid(cfg.alpha * gate)


def _formula(cfg: Config, rows: Rows):
  """The result in float32 or wider."""
  gate, up, _ = _pair(cfg, rows)
  most, widest = cfg.limits(rows.gate.dtype)
  if cfg.limit:
    gate = jnp.where(gate > most, jnp.asarray(most, gate.dtype), gate)
  y = _activated(cfg, gate)
  if up is not None:
    if cfg.limit:
      up = jnp.where(up > widest, jnp.asarray(widest, up.dtype), up)
      up = jnp.where(up < -widest, jnp.asarray(-widest, up.dtype), up)
    y = y * (up + 1 if cfg.activation == "swiglu" else up)
  return y


def reference_fwd(cfg: Config, rows: Rows):
  """The activation in jax.numpy, in float32 or wider."""
  return _formula(cfg, rows).astype(cfg.out)


def reference_quant(cfg: Config, rows: Rows) -> Quantised:
  """The quantised activation in jax.numpy; rounded once, from float32."""
  y = _formula(cfg, rows).astype(jnp.float32)
  kind = rounding.KINDS[cfg.quant]
  if rows.scale is not None:
    scale = jnp.broadcast_to(rows.scale, y.shape)
    return Quantised(rounding.round_to(rounding.divide(y, scale), kind), None)
  *lead, n = y.shape
  groups = -(-n // cfg.group) if cfg.group else 1
  cols = cfg.group or n
  tiles = jnp.pad(y, [(0, 0)] * len(lead) + [(0, groups * cols - n)])
  tiles = tiles.reshape(*lead, groups, cols)
  amax = rounding.amax(tiles, -1)
  if cfg.mode is None:
    scale = rounding.f32_scale(amax, kind)
    q = rounding.round_to(rounding.divide(tiles, scale[..., None]), kind)
  else:
    scale = rounding.e8m0_scale(amax, rounding.ROUND_MODES[cfg.mode], kind)
    q = rounding.round_to(tiles, kind, scale[..., None])
  q = q.reshape(*lead, groups * cols)[..., :n]
  if kind is rounding.E2M1:
    q = rounding.pack(q)
  return Quantised(q, layouts.shuffle_scale(scale) if cfg.shuffled else scale)


def _slope(cfg: Config, gate):
  """The activation of gate, and its derivative."""
  if cfg.activation == "gelu":
    s = _normal_cdf(gate)
    density = jnp.exp(gate * gate * -0.5) * (1 / math.sqrt(2 * math.pi))
    return gate * s, s + gate * density
  if cfg.activation == "gelu_tanh":
    # Far out the slope is 0 or 1; gate^2 must not be infinite there.
    square = jnp.minimum(gate * gate, 1e4)
    root = 2 * math.sqrt(2 / math.pi)
    s = jax.nn.sigmoid(root * gate * (1 + 0.044715 * square))
    return gate * s, s + gate * s * (1 - s) * (
        root * (1 + 3 * 0.044715 * square))
  s = jax.nn.sigmoid(cfg.alpha * gate)
  return gate * s, s * (1 + cfg.alpha * gate * (1 - s))


def reference_bwd(cfg: Config, rows: Rows, dy) -> Grads:
  """Gradients of gate and up in jax.numpy, in float32 or wider."""
  gate, up, known = _pair(cfg, rows)
  dy = _wide(dy).astype(gate.dtype)
  if known is not None:
    dy = jnp.where(known, dy, 0)
  most, widest = cfg.limits(rows.gate.dtype)
  a, s = _slope(cfg, jnp.where(gate > most, jnp.asarray(most, gate.dtype),
                               gate))
  dgate = jnp.where(gate > most, 0, dy * s)
  dtype = rows.gate.dtype
  if up is None:
    return Grads(dgate.astype(dtype), None)
  dup = jnp.where(jnp.abs(up) > widest, 0, dy * a).astype(dtype)
  up = jnp.clip(up, -widest, widest)
  dgate = (dgate * (up + 1 if cfg.activation == "swiglu" else up)).astype(dtype)
  if cfg.packed:
    return Grads(jnp.concatenate([dgate, dup], -1), None)
  return Grads(dgate, dup)


# -----------------------------------------------------------------------------
# Kernels


def _flat(t, dtype):
  """[..., cols] -> [rows, cols]; nothing if there is no array."""
  return absent(None, dtype) if t is None else t.reshape(-1, t.shape[-1])


def _operands(rows: Rows):
  gate, up, ids, bias, _ = rows
  return (_flat(gate, gate.dtype), _flat(up, gate.dtype),
          absent(None, jnp.int32) if ids is None else ids.reshape(-1),
          absent(bias, gate.dtype))


def _attributes(cfg: Config, rows: Rows):
  gate_limit, limit = cfg.limits(rows.gate.dtype)
  return dict(
      activation=cfg.activation,
      alpha=np.float32(cfg.alpha), gate_limit=np.float32(gate_limit),
      limit=np.float32(limit), packed=cfg.packed)


def _cols(cfg: Config, rows: Rows):
  """Columns of a result."""
  return rows.gate.shape[-1] // (2 if cfg.packed else 1)


def _fwd_kernel(cfg: Config, call, rows: Rows):
  operands = _operands(rows)
  cols = _cols(cfg, rows)
  out, = call((like(rows.gate, (operands[0].shape[0], cols), cfg.out),),
              *operands, **_attributes(cfg, rows))
  return out.reshape(*rows.gate.shape[:-1], cols)


def _bwd_kernel(cfg: Config, call, rows: Rows, dy) -> Grads:
  gate, up, *rest = _operands(rows)
  dgate, dup = call((jax.typeof(gate), jax.typeof(up)), gate, up, *rest,
                    _flat(dy, dy.dtype), **_attributes(cfg, rows))
  return Grads(dgate.reshape(rows.gate.shape),
               None if rows.up is None else dup.reshape(rows.up.shape))


def _quant_kernel(cfg: Config, call, rows: Rows) -> Quantised:
  results = jax.eval_shape(functools.partial(reference_quant, cfg), rows)
  operands = _operands(rows)
  gate = operands[0]
  q = like(gate, (gate.shape[0], results.q.shape[-1]), results.q.dtype)
  if not cfg.group and rows.scale is None:
    q, scale = call((q, like(gate, gate.shape[:1], jnp.float32)), *operands,
                    **_attributes(cfg, rows))
    return Quantised(q.reshape(results.q.shape),
                     scale.reshape(results.scale.shape))
  scale = like(gate, (0,), jnp.float32)
  if rows.scale is None:
    # [batch, rows, groups]: padding makes matrices of shuffled scales.
    shape = 1, gate.shape[0], results.scale.shape[-1]
    if cfg.shuffled:
      shape = math.prod(rows.gate.shape[:-2]), *results.scale.shape[-2:]
    scale = like(gate, shape, results.scale.dtype)
  q, scale = call(
      (q, scale), *operands,
      absent(None if rows.scale is None else rows.scale.reshape(1),
             jnp.float32),
      group=np.int32(cfg.group), rounding=cfg.mode or "up",
      shuffled=cfg.shuffled, **_attributes(cfg, rows))
  return Quantised(
      q.reshape(results.q.shape),
      None if rows.scale is not None else scale.reshape(results.scale.shape))


# -----------------------------------------------------------------------------
# Operators


def _specs(cfg: Config, rows: Rows):
  """Names of the dimensions of the operands, and of a result.

  "r0", "r1", ... are rows, "c" columns that may be divided: a bias has those of
  gate and of up side by side.
  """
  lead = tuple(f"r{i}" for i in range(rows.gate.ndim - 1))
  if cfg.shuffled:  # The rows of a matrix belong together.
    lead = (*lead[:-1], "m")
  divisible = not (cfg.packed or cfg.quant or rows.bias is not None)
  gate = (*lead, "c" if divisible else "pair" if cfg.packed else "cols")
  own = Rows(gate, None if rows.up is None else gate,
             None if rows.expert_ids is None else lead,
             None if rows.bias is None else ("_", "_"),
             None if rows.scale is None else ())
  return own, lead, (*lead, "c" if divisible else "cols")


def _fwd_specs(cfg: Config, rows: Rows):
  own, _, result = _specs(cfg, rows)
  return (own,), result


def _bwd_specs(cfg: Config, rows: Rows, dy):
  own, _, result = _specs(cfg, rows)
  return (own, result), Grads(own.gate, own.up)


def _quant_specs(cfg: Config, rows: Rows):
  own, lead, _ = _specs(cfg, rows)
  scale = (*lead, "scale")
  if cfg.shuffled:
    scale = (*lead[:-1], "_", "_")
  return (own,), Quantised(
      (*lead, "q"), None if rows.scale is not None else scale)


def _serves(op: str):
  def serves(cfg, rows, *_):
    if rows.gate.size == 0 or rows.bias is not None and rows.bias.size == 0:
      return None
    return Key(op, rows.gate.dtype.name, (_cols(cfg, rows),))

  return serves


_op = functools.partial(
    operator, split=("r", "c"), dtypes=_DTYPES,
    batch=rows_lead(columns=("bias", "scale")))
activation_fwd = _op(
    target="activation_fwd", kernel=_fwd_kernel, reference=reference_fwd,
    specs=_fwd_specs, serves=_serves("activation_fwd"))
activation_bwd = _op(
    target="activation_bwd", kernel=_bwd_kernel, reference=reference_bwd,
    specs=_bwd_specs, serves=_serves("activation_bwd"))
# Rows -> Quantised: a scale a row, and a scale a group or one that is given.
activation_quant_row, activation_quant_group = (
    _op(target=name, kernel=_quant_kernel, reference=reference_quant,
        specs=_quant_specs, serves=_serves(name))
    for name in ("activation_quant_row", "activation_quant_group"))


def activation_quant(cfg: Config, rows: Rows) -> Quantised:
  """The quantised activation; it has no gradient."""
  by_row = not cfg.group and rows.scale is None
  return (activation_quant_row if by_row else activation_quant_group)(cfg, rows)


def _save(cfg: Config, rows: Rows):
  return activation_fwd(cfg, rows), rows


def _backward(cfg: Config, wanted, rows: Rows, dy):
  if dy is None:
    return (Rows(*(None if t is None else jnp.zeros_like(t) for t in rows)),)
  grads = activation_bwd(cfg, rows, dy)
  dbias = None
  if wanted[0].bias:
    dbias = sums_by(rows.expert_ids, rows.bias.shape[0],
                    *(t for t in grads if t is not None))
  return (Rows(*grads, None, dbias),)


def _tangent(cfg: Config, rows: Rows, tangents):
  return formula_jvp(
      functools.partial(reference_fwd, cfg), (rows,), tangents)


# (Config, Rows) -> the result.
activation = differentiable(activation_fwd, _backward, save=_save,
                            tangent=_tangent)
