# SPDX-License-Identifier: Apache-2.0
"""RMSNorm and LayerNorm as operators: formulas and kernels' operands.

`norm` is differentiable, `norm_quant` is not. Rows shard over a mesh, columns
are gathered; a mapped axis is one more axis of rows.
"""

from __future__ import annotations

from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec

import jax
from jax import lax
from jax._src.aiter.core import rounding
from jax._src.aiter.core.derivative import differentiable, formula_jvp
from jax._src.aiter.core.dispatch import absent, like
from jax._src.aiter.core.operator import Key, operator, rows_lead, with_axis
from jax._src.aiter.core.partition import axes_of_arguments, resharded

_DTYPES = {"float16": "fp16", "bfloat16": "bf16", "float32": "fp32"}
# Runs of rows whose shares of dgamma are summed apart: enough to occupy the
# largest device of a platform (MI300X has 304 compute units, H100 132).
_PARTS = {"rocm": 608, "cuda": 396}
MX_BLOCK = 32  # columns that share a scale
_SPLIT = ("r",)  # a mesh divides rows alone


class Config(NamedTuple):
  """Static facts of a call; hashable.

  Attributes:
    layer: LayerNorm, else RMSNorm.
    epsilon: added to the variance.
    gemma: the weight is 1 + gamma.
    t5: normalised rows are rounded to x's dtype before the weight, and so is
      the sum with a residual before the norm.
    quant: of a quantised norm, what y is rounded to: a name in rounding.KINDS.
  """
  layer: bool
  epsilon: float
  gemma: bool = False
  t5: bool = False
  quant: str = ""


class BwdConfig(NamedTuple):
  """Static facts of a backward call.

  Attributes:
    norm: the norm's.
    with_beta: dbeta is wanted.
    rounded: dgamma and dbeta have gamma's dtype; else float32, so that they may
      still be added to those of other devices.
  """
  norm: Config
  with_beta: bool
  rounded: bool = True


class Rows(NamedTuple):
  """Arrays of a forward call; an absent one is None.

  Attributes:
    x: [..., cols].
    residual: like x: is added to it.
    gamma: [cols], x's dtype or float32.
    beta: [cols], gamma's dtype.
    x_scale: float32 [cols], what y is multiplied by before it is quantised.
  """
  x: jax.Array
  residual: jax.Array | None
  gamma: jax.Array
  beta: jax.Array | None
  x_scale: jax.Array | None = None


class Normed(NamedTuple):
  """Results of a forward call.

  Attributes:
    y: like x.
    residual_out: x + residual, like x; None without a residual.
    mean: float32 [...]; 0 of an RMSNorm. With a residual, that of the sum as
      it is saved for the backward pass, rounded to x's dtype: a gradient needs
      the mean and deviation of the rows that it reads.
    rstd: float32 [...], 1 / sqrt(variance + epsilon), likewise.
  """
  y: jax.Array
  residual_out: jax.Array | None
  mean: jax.Array
  rstd: jax.Array


class Quantised(NamedTuple):
  """Results of a quantised call.

  Attributes:
    q: [..., cols]; "mxfp4" uint8 [..., cols / 2], even columns in low nibbles.
    scale: float32 [..., 1]; "mxfp4" uint8 [..., cols / MX_BLOCK], e8m0.
    residual_out: as in Normed.
  """
  q: jax.Array
  scale: jax.Array
  residual_out: jax.Array | None


class Saved(NamedTuple):
  """Arrays of a backward call.

  Attributes:
    dy: gradient of y.
    dresidual_out: gradient of residual_out, or None.
    s: what was normalised, in x's dtype.
    gamma: as in Rows.
    mean: as in Normed.
    rstd: as in Normed.
  """
  dy: jax.Array
  dresidual_out: jax.Array | None
  s: jax.Array
  gamma: jax.Array
  mean: jax.Array
  rstd: jax.Array


class Grads(NamedTuple):
  """Gradients.

  Attributes:
    dx: of x, and of the residual as well.
    dgamma: [cols], gamma's dtype or float32.
    dbeta: likewise, or None.
  """
  dx: jax.Array
  dgamma: jax.Array
  dbeta: jax.Array | None


# -----------------------------------------------------------------------------
# The formulas in jax.numpy


def _wide(t):
  return t.astype(jnp.promote_types(t.dtype, jnp.float32))


def _weight(cfg: Config, gamma):
  return 1 + _wide(gamma) if cfg.gemma else _wide(gamma)


def _rounded(cfg: Config, t, dtype):
  return t.astype(dtype).astype(t.dtype) if cfg.t5 else t


def _statistics(cfg: Config, s):
  """The mean of rows s and 1 / sqrt(variance + epsilon): [..., 1]."""
  mean = jnp.sum(s[..., :0], -1, keepdims=True)  # 0, of no columns as well
  if cfg.layer:
    mean = jnp.mean(s, -1, keepdims=True)
  variance = jnp.mean((s - mean) ** 2, -1, keepdims=True)
  return mean, lax.rsqrt(variance + np.asarray(cfg.epsilon, s.dtype))


def _formula(cfg: Config, rows: Rows):
  """(y, residual_out), y in float32 or wider."""
  s = _wide(rows.x)
  residual_out = None
  if rows.residual is not None:
    s = s + _wide(rows.residual)
    residual_out = s.astype(rows.x.dtype)
    s = _rounded(cfg, s, rows.x.dtype)
  mean, rstd = _statistics(cfg, s)
  y = _rounded(cfg, (s - mean) * rstd, rows.x.dtype) * _weight(cfg, rows.gamma)
  if rows.beta is not None:
    y = y + _wide(rows.beta)
  return y, residual_out


def reference_fwd(cfg: Config, rows: Rows) -> Normed:
  """The norm in jax.numpy, in float32 or wider."""
  y, residual_out = _formula(cfg, rows)
  saved = rows.x if residual_out is None else residual_out
  mean, rstd = _statistics(cfg, _wide(saved))
  return Normed(y.astype(rows.x.dtype), residual_out, mean[..., 0],
                rstd[..., 0])


def reference_quant(cfg: Config, rows: Rows) -> Quantised:
  """The quantised norm in jax.numpy; y is rounded once, from float32."""
  y, residual_out = _formula(cfg, rows)
  y = y.astype(jnp.float32)
  if rows.x_scale is not None:
    y = y * rows.x_scale
  kind = rounding.KINDS[cfg.quant]
  if kind is not rounding.E2M1:
    scale = rounding.f32_scale(rounding.amax(y, -1, keepdims=True), kind)
    q = rounding.round_to(rounding.divide(y, scale), kind)
    return Quantised(q, scale, residual_out)
  blocks = y.reshape(*y.shape[:-1], y.shape[-1] // MX_BLOCK, MX_BLOCK)
  scale = rounding.e8m0_scale(
      rounding.amax(blocks, -1), rounding.ROUND_MODES["up"], kind)
  codes = rounding.round_to(blocks, kind, scale[..., None])
  return Quantised(rounding.pack(codes.reshape(y.shape)), scale, residual_out)


def _normalised(saved: Saved):
  return (_wide(saved.s) - saved.mean[..., None]) * saved.rstd[..., None]


def _sum_type(bwd: BwdConfig, gamma):
  """The dtype of dgamma and dbeta."""
  return gamma.dtype if bwd.rounded else _wide(gamma).dtype


def _weight_grads(bwd: BwdConfig, saved: Saved, dtype, mapped: int = 0):
  """dgamma and dbeta: sums over all axes of rows behind the mapped ones."""
  dy, n = _wide(saved.dy), _rounded(bwd.norm, _normalised(saved), saved.s.dtype)
  rows = tuple(range(mapped, dy.ndim - 1))
  total = lambda t: jnp.sum(t, rows).astype(dtype)
  return total(dy * n), total(dy) if bwd.with_beta else None


def reference_bwd(bwd: BwdConfig, saved: Saved) -> Grads:
  """The norm's gradients in jax.numpy, in float32 or wider."""
  cfg = bwd.norm
  n = _normalised(saved)
  g = _wide(saved.dy) * _weight(cfg, saved.gamma)
  dx = g - n * jnp.mean(n * g, -1, keepdims=True)
  if cfg.layer:
    dx = dx - jnp.mean(g, -1, keepdims=True)
  dx = dx * saved.rstd[..., None]
  if saved.dresidual_out is not None:
    dx = dx + _wide(saved.dresidual_out)
  return Grads(dx.astype(saved.s.dtype),
               *_weight_grads(bwd, saved, _sum_type(bwd, saved.gamma)))


# -----------------------------------------------------------------------------
# Kernels


def _flat(t, dtype):
  """[..., cols] -> [rows, cols]; nothing if there is no array."""
  return absent(None, dtype) if t is None else t.reshape(-1, t.shape[-1])


def _attributes(cfg: Config):
  return dict(epsilon=np.float32(cfg.epsilon), layer=cfg.layer,
              gemma=cfg.gemma, t5=cfg.t5)


def _fwd_kernel(cfg: Config, call, rows: Rows) -> Normed:
  x, residual, gamma, beta, _ = rows
  flat = _flat(x, x.dtype)
  result = like(x, flat.shape, x.dtype)
  none = like(x, (0,), x.dtype)
  each = like(x, flat.shape[:1], jnp.float32)
  y, residual_out, mean, rstd = call(
      (result, none if residual is None else result, each, each),
      flat, _flat(residual, x.dtype), gamma, absent(beta, gamma.dtype),
      **_attributes(cfg))
  return Normed(
      y.reshape(x.shape),
      None if residual is None else residual_out.reshape(x.shape),
      mean.reshape(x.shape[:-1]), rstd.reshape(x.shape[:-1]))


def _quant_kernel(cfg: Config, call, rows: Rows) -> Quantised:
  x, residual, gamma, beta, x_scale = rows
  flat = _flat(x, x.dtype)
  n, cols = flat.shape
  q, scales = like(x, flat.shape, rounding.KINDS[cfg.quant].dtype), 1
  scale = like(x, (n,), jnp.float32)
  if cfg.quant == "mxfp4":
    q, scales = like(x, (n, cols // 2), jnp.uint8), cols // MX_BLOCK
    scale = like(x, (n, scales), jnp.uint8)
  q, scale, residual_out = call(
      (q, scale, like(x, (0,) if residual is None else flat.shape, x.dtype)),
      flat, _flat(residual, x.dtype), gamma, absent(beta, gamma.dtype),
      absent(x_scale, jnp.float32), **_attributes(cfg))
  lead = x.shape[:-1]
  return Quantised(
      q.reshape(*lead, q.shape[-1]), scale.reshape(*lead, scales),
      None if residual is None else residual_out.reshape(x.shape))


def _bwd_kernel(bwd: BwdConfig, call, saved: Saved) -> Grads:
  s = saved.s
  flat = _flat(s, s.dtype)
  rows, cols = flat.shape
  # Eight or more, for rows that do not begin at multiples of 16 bytes.
  parts = jax.core.min_dim(rows + 8, _PARTS[call.platform])
  parts = like(s, (parts, cols), jnp.float32)
  summed = like(s, (cols,), _sum_type(bwd, saved.gamma))
  if_beta = lambda t: t if bwd.with_beta else like(s, (0,), t.dtype)
  dx, dgamma, dbeta, _, _ = call(
      (like(s, flat.shape, s.dtype), summed, if_beta(summed), parts,
       if_beta(parts)),
      _flat(saved.dy, s.dtype), _flat(saved.dresidual_out, s.dtype), flat,
      saved.gamma, saved.mean.reshape(-1), saved.rstd.reshape(-1),
      **_attributes(bwd.norm))
  return Grads(dx.reshape(s.shape), dgamma, dbeta if bwd.with_beta else None)


# -----------------------------------------------------------------------------
# Operators


def _specs(tree):
  """Names of the dimensions of every array of a tree of this module.

  The last dimension of x and its like, and of gamma, is "cols", of q "q" and of
  scale "scale"; others are "r0", "r1", ..., those of the rows.
  """
  per_row = ("mean", "rstd")
  one_row = ("gamma", "beta", "x_scale", "dgamma", "dbeta")

  def names(field, t):
    if t is None:
      return None
    if field in one_row:
      return ("cols",)
    lead = tuple(f"r{i}" for i in range(t.ndim - (field not in per_row)))
    if field in per_row:
      return lead
    return (*lead, field if field in ("q", "scale") else "cols")

  return type(tree)(*(names(f, t) for f, t in zip(tree._fields, tree)))


def _fwd_specs(cfg: Config, rows: Rows):
  own = _specs(rows)
  lead = own.x[:-1]
  results = (
      Quantised((*lead, "q"), (*lead, "scale"), own.residual) if cfg.quant
      else Normed(own.x, own.residual, lead, lead))
  return (own,), results


def _bwd_specs(bwd: BwdConfig, saved: Saved):
  own = _specs(saved)
  return (own,), Grads(own.s, own.gamma, own.gamma if bwd.with_beta else None)


def _serves(op: str):
  def serves(_, arrays):
    x = arrays[0]  # or dy
    if x.size == 0:
      return None
    return Key(op, x.dtype.name, x.shape[-1:])

  return serves


def _bwd_batch(bwd: BwdConfig, op, size, mapped, saved: Saved):
  """One call for all, because an element may be a single row.

  Each has its own dgamma, which is the formula's: mostly they are summed at
  once.
  """
  if mapped[0].gamma:
    return lax.map(op, with_axis(size, mapped[0], saved))
  whole = with_axis(size, mapped[0]._replace(gamma=None),
                    saved._replace(gamma=None))
  dx = op(whole._replace(gamma=saved.gamma)).dx
  return Grads(dx, *_weight_grads(
      bwd, whole, _sum_type(bwd, saved.gamma), mapped=1))


def _bwd_plan(bwd: BwdConfig, run, mesh, args):
  """A shard's sums are float32 until those of all are added."""
  specs, result_specs = _bwd_specs(bwd, *args)
  axes = axes_of_arguments(mesh, specs, _SPLIT, args, result_specs)
  over = tuple(a for names in axes.values() for a in names)

  def lower(saved: Saved):
    if not over:
      return run(saved)
    dx, *sums = norm_bwd.run(bwd._replace(rounded=False), saved)
    return Grads(dx, *(
        None if t is None
        else lax.psum(t, over).astype(_sum_type(bwd, saved.gamma))
        for t in sums))

  return axes, lower


norm_fwd = operator(
    target="norm_fwd", kernel=_fwd_kernel, reference=reference_fwd,
    specs=_fwd_specs, split=_SPLIT, serves=_serves("norm_fwd"), dtypes=_DTYPES,
    batch=rows_lead(columns=("gamma", "beta")))
norm_bwd = operator(
    target="norm_bwd", kernel=_bwd_kernel, reference=reference_bwd,
    specs=_bwd_specs, split=_SPLIT, serves=_serves("norm_bwd"), dtypes=_DTYPES,
    batch=_bwd_batch, plan=_bwd_plan)
# Rows -> Quantised; has no gradient.
norm_quant = operator(
    target="norm_quant", kernel=_quant_kernel, reference=reference_quant,
    specs=_fwd_specs, split=_SPLIT, serves=_serves("norm_quant"),
    dtypes=_DTYPES, batch=rows_lead(columns=("gamma", "beta", "x_scale")))


def whole_columns(rows: Rows) -> Rows:
  """On a mesh with explicit axes, x and the residual in one sharding by rows.

  The sum that the backward pass is given then has the type of both.
  """
  spec = PartitionSpec(*jax.typeof(rows.x).sharding.spec[:-1], None)
  return rows._replace(
      x=resharded(rows.x, spec), residual=None if rows.residual is None
      else resharded(rows.residual, spec))


class _Kept(NamedTuple):
  """What a gradient needs: what was normalised, as x or as the sum."""
  x: jax.Array | None
  residual_out: jax.Array | None
  gamma: jax.Array
  mean: jax.Array
  rstd: jax.Array


def _save(cfg: Config, rows: Rows):
  out = norm_fwd(cfg, rows)
  return (out.y, out.residual_out), _Kept(
      rows.x if rows.residual is None else None, out.residual_out, rows.gamma,
      out.mean, out.rstd)


def _backward(cfg: Config, wanted, kept: _Kept, cotangents):
  dy, dresidual_out = cotangents
  s = kept.x if kept.residual_out is None else kept.residual_out
  if dy is None:
    dy = jnp.zeros_like(s)
  wanted, = wanted
  dx, dgamma, dbeta = norm_bwd(
      BwdConfig(cfg, bool(wanted.beta)),
      Saved(dy, dresidual_out, s, *kept[2:]))
  return (Rows(dx, dx if kept.x is None else None, dgamma, dbeta),)


def _tangent(cfg: Config, kept: _Kept, tangents):
  """The formula's, of the norm of what was saved; beta is not in it."""
  tangents, = tangents
  moving = [t for t in tangents[:2] if t is not None]
  ds = sum(moving[1:], moving[0]) if moving else None
  s = kept.x if kept.residual_out is None else kept.residual_out
  beta = None if tangents.beta is None else jnp.zeros_like(tangents.beta)
  dy = formula_jvp(
      lambda rows: reference_fwd(cfg, rows).y,
      (Rows(s, None, kept.gamma, beta),),
      (Rows(ds, None, tangents.gamma, tangents.beta),))
  return dy, None if kept.x is not None else ds


# (Config, Rows) -> (y, residual_out); residual_out may be None.
norm = differentiable(lambda cfg, rows: _save(cfg, rows)[0], _backward,
                      save=_save, tangent=_tangent)
