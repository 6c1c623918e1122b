# SPDX-License-Identifier: Apache-2.0
"""Rows of queries and keys, as one operator.

A sum with a residual, RMSNorms, a gate, a rotation back and rounding are one
launch. What is not rounded has the formula's derivatives.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np

import jax
from jax import lax
from jax._src.aiter.core.dims import at_most, is_known
from jax._src.aiter.core.dispatch import absent, like
from jax._src.aiter.core.operator import Key, operator, with_axis
from jax._src.aiter.fused_qk import op as latent
from jax._src.aiter.quant import op as quant

# What divides the columns of calls for the kernels.
_ALIGNED = 16
# Columns of the runs that kernels take where heads and groups are whole ones.
_RUN = 128
# Columns of heads with a norm each that kernels have.
HEADS = (32, 64, 128, 256)
# A token's columns are divided into rows of at most so many, where they can be.
_PART = 2048


class Config(NamedTuple):
  """Static facts of a call; hashable.

  Attributes:
    dim: columns of a head, each of which has a norm or a rotation; 0 for one
      norm of a row.
    eps: of the norm of q.
    k_eps: of that of k.
    gemma: weights are 1 + weight.
    first: the first of a head's columns that is turned.
    gptj: pairs are neighbours; else halves.
    kind: what q is rounded to, of rounding.KINDS; else empty.
    group: columns with one scale; 0 for all of a row.
    mode: how scales that are powers of two, in a byte, are rounded: "up" or
      "even"; empty for float32.
    least: scales are those of magnitudes of at least this.
    transposed: scales are [groups, tokens].
    kept: numbers of q's dtype are a result, though there are codes.
    sigmoid: q is multiplied by the gate's logistic function; else its SiLU.
    gated_first: it is before the norm.
    narrow: it is rounded to its dtype before it is to codes.
  """
  dim: int = 0
  eps: float = 0.0
  k_eps: float = 0.0
  gemma: bool = False
  first: int = 0
  gptj: bool = False
  kind: str = ""
  group: int = 0
  mode: str = ""
  least: float = 0.0
  transposed: bool = False
  kept: bool = True
  sigmoid: bool = False
  gated_first: bool = False
  narrow: bool = False


class Operands(NamedTuple):
  """Arrays of a call; an absent one is None.

  Attributes:
    q: [tokens, cols].
    residual: like q, or None.
    gate: likewise.
    q_weight: [cols] or, of heads, [dim]; None for no norm.
    bias: likewise, added to the norm; or None.
    k: [tokens, k_cols], or None.
    k_weight: [k_cols], or None.
    cos: float32 [rows, pairs]; None for no rotation.
    sin: likewise.
    positions: int32 [tokens], or None.
    q_scale: float32 [1], what q is divided by; None if it is found.
  """
  q: jax.Array
  residual: jax.Array | None = None
  gate: jax.Array | None = None
  q_weight: jax.Array | None = None
  bias: jax.Array | None = None
  k: jax.Array | None = None
  k_weight: jax.Array | None = None
  cos: jax.Array | None = None
  sin: jax.Array | None = None
  positions: jax.Array | None = None
  q_scale: jax.Array | None = None


class Results(NamedTuple):
  """Results of a call; an absent one is None.

  Attributes:
    q: [tokens, cols].
    residual: the sum with the residual, likewise.
    codes: [tokens, cols], of "mxfp4" uint8 of half as many.
    scale: float32 or uint8 [tokens, groups], or [groups, tokens]; None if
      q_scale was given.
    k: [tokens, k_cols].
  """
  q: jax.Array | None
  residual: jax.Array | None
  codes: jax.Array | None
  scale: jax.Array | None
  k: jax.Array | None


def _wide(t):
  return t.astype(jnp.promote_types(t.dtype, jnp.float32))


def _normalised(cfg: Config, t, weight, eps: float):
  mean = jnp.mean(t * t, -1, keepdims=True)
  w = _wide(weight)
  return t * (1 / jnp.sqrt(mean + np.asarray(eps, t.dtype))) * (
      1 + w if cfg.gemma else w)


def _quantised(cfg: Config, s):
  """(codes, scales) of rows in float32."""
  if not cfg.least:
    return quant.reference(quant.Config(
        "group" if cfg.group else "row", cfg.kind, cfg.group,
        cfg.mode or None), quant.Operands(s))
  # One more column for each scale has the least magnitude.
  group = cfg.group or s.shape[1]
  each = s.reshape(s.shape[0], s.shape[1] // group, group)
  each = jnp.pad(each, ((0, 0), (0, 0), (0, 1)), constant_values=cfg.least)
  codes, scale = quant.reference(
      quant.Config("row", cfg.kind, 0, cfg.mode or None), quant.Operands(each))
  return codes[..., :-1].reshape(s.shape), scale


def reference(cfg: Config, x: Operands) -> Results:
  """The formula in jax.numpy."""
  dtype, s, total = x.q.dtype, _wide(x.q), None
  if x.residual is not None:
    s = s + _wide(x.residual)
    total = s.astype(dtype)
  shape = s.shape
  if cfg.dim:
    s = s.reshape(shape[0], shape[1] // cfg.dim, cfg.dim)
  opened = lambda s: s
  if x.gate is not None:
    opened = lambda s: s * (jax.nn.sigmoid if cfg.sigmoid else jax.nn.silu)(
        _wide(x.gate)).reshape(s.shape)
  if cfg.gated_first:
    s = opened(s)
  if x.q_weight is not None:
    s = _normalised(cfg, s, x.q_weight, cfg.eps)
  if x.bias is not None:
    s = s + _wide(x.bias)
  if not cfg.gated_first:
    s = opened(s)
  if x.positions is not None:
    row = jnp.clip(x.positions, 0, x.cos.shape[0] - 1)
    end = cfg.first + 2 * x.cos.shape[1]
    turned = latent.rotated(cfg.gptj, s[..., cfg.first:end],
                            x.cos[row][:, None], -x.sin[row][:, None])
    s = jnp.concatenate([s[..., :cfg.first], turned, s[..., end:]], -1)
  s = s.reshape(shape)
  out = s.astype(dtype) if cfg.kept else None
  if cfg.narrow:
    s = s.astype(dtype)
  codes = scale = None
  if x.q_scale is not None:
    codes = quant.reference(quant.Config("row", cfg.kind), quant.Operands(
        s, scale=jnp.broadcast_to(x.q_scale, shape[:1])))[0]
  elif cfg.kind:
    codes, scale = _quantised(cfg, s)
    scale = scale.reshape(shape[0], math.prod(scale.shape[1:]))
    scale = scale.T if cfg.transposed else scale
  k = x.k
  if k is not None:
    k = _normalised(cfg, _wide(k), x.k_weight, cfg.k_eps).astype(k.dtype)
  return Results(out, total, codes, scale, k)


def _parts(cfg: Config, x: Operands) -> int:
  """Rows that a token's queries are divided into."""
  width = x.q.shape[1]
  whole = (x.q_weight is not None and not cfg.dim) or (
      bool(cfg.kind) and not cfg.group and x.q_scale is None)
  if whole or not is_known(width) or width <= _PART:
    return 1
  unit = math.lcm(cfg.dim or 1, cfg.group or 1, _ALIGNED)
  sizes = [n for n in range(unit, _PART + 1, unit) if width % n == 0]
  return width // sizes[-1] if sizes else 1


def _kernel(cfg: Config, call, x: Operands) -> Results:
  types = jax.eval_shape(lambda x: reference(cfg, x), x)
  defaults = dict(cos=jnp.float32, sin=jnp.float32, positions=jnp.int32,
                  q_scale=jnp.float32)
  results = call(
      [like(x.q, (0,), x.q.dtype) if t is None else like(x.q, t.shape, t.dtype)
       for t in types],
      *(absent(t, defaults.get(name, x.q.dtype))
        for name, t in x._asdict().items()),
      parts=np.int64(_parts(cfg, x)), dim=np.int64(cfg.dim),
      first=np.int64(cfg.first), group=np.int64(cfg.group),
      transposed=cfg.transposed, gptj=cfg.gptj, gemma=cfg.gemma,
      eps=np.float32(cfg.eps), k_eps=np.float32(cfg.k_eps),
      mode=cfg.mode or "up", least=np.float32(cfg.least), sigmoid=cfg.sigmoid,
      gated_first=cfg.gated_first, narrow=cfg.narrow)
  return Results(*(None if t is None else new
                   for t, new in zip(types, results)))


def _serves(cfg: Config, x: Operands) -> Key | None:
  norm = x.q_weight is not None
  if any(at_most(n, 0) for t in x if t is not None for n in t.shape) or (
      norm and cfg.dim and cfg.dim not in HEADS):
    return None
  cols = x.q.shape[1] // _parts(cfg, x)
  k_cols = 0 if x.k is None else x.k.shape[1]
  turned, given = x.positions is not None, x.q_scale is not None
  # Heads with a norm are runs; heads that are turned, a power of two of them.
  whole = (not norm or cfg.dim in (0, _RUN)) and cfg.group in (0, _RUN) and (
      not turned or (cfg.dim % _RUN == 0 and cfg.dim & (cfg.dim - 1) == 0 and
                     x.cos.shape[1] % _ALIGNED == 0 and
                     cfg.first % _ALIGNED == 0))
  rare = x.bias is not None or cfg.sigmoid or cfg.gated_first or cfg.narrow or (
      cfg.mode not in ("", "up"))
  on = {"gptj": cfg.gptj, "norm": norm, "gemma": cfg.gemma,
        "joint": norm and not cfg.dim, "residual": x.residual is not None,
        "gate": x.gate is not None, "turned": turned, "q_out": cfg.kept,
        "keys": x.k is not None, "q_bytes": bool(cfg.kind), "q_scaled": given,
        "token": bool(cfg.kind) and not cfg.group and not given,
        "e8m0": bool(cfg.mode), "short": not whole, "rare": rare,
        "unaligned": cols % _ALIGNED != 0 or k_cols % _ALIGNED != 0}
  return Key("fused_qk_rows", x.q.dtype.name, (cols, k_cols),
             tuple(name for name, holds in on.items() if holds))


def _specs(cfg: Config, x: Operands):
  """Tokens are divided; columns are not."""
  rows = ("t", "_")
  given = Operands(rows, rows, rows, ("_",), ("_",), rows, ("_",), ("_", "_"),
                   ("_", "_"), ("t",), ("_",))
  given = Operands(*(None if t is None else s for t, s in zip(x, given)))
  codes = rows if cfg.kind else None
  return (given,), Results(
      rows if cfg.kept else None, given.residual, codes,
      None if x.q_scale is not None else
      rows[::-1] if cfg.kind and cfg.transposed else codes, given.k)


def _batch(cfg: Config, op, size: int, mapped, x: Operands) -> Results:
  """A mapped axis is one more of tokens."""
  m, = mapped
  if cfg.transposed or any((m.q_weight, m.bias, m.k_weight, m.cos, m.sin,
                            m.q_scale)):
    return lax.map(op, with_axis(size, m, x))
  own = {n: with_axis(size, getattr(m, n), getattr(x, n))
         for n in ("q", "residual", "gate", "k", "positions")
         if getattr(x, n) is not None}
  flat = {n: t.reshape(-1, *t.shape[2:]) for n, t in own.items()}
  return jax.tree.map(lambda t: t.reshape(size, -1, *t.shape[1:]),
                      op(x._replace(**flat)))


# (Config, Operands) -> Results
rows = operator(
    target="fused_qk_rows", kernel=_kernel, reference=reference, specs=_specs,
    split=("t",), serves=_serves, dtypes=latent.DTYPES, batch=_batch)
