# SPDX-License-Identifier: Apache-2.0
"""Quantisers as an operator: formulas, kernels, JAX's transforms.

A call passes these layers, each unaware of the ones above it:
  quantise   explicit mesh axes
  _op        custom_vmap: a mapped axis is one more leading axis
  _sharded   custom_partitioning: rows shard, and whole groups of columns
  _quantise  kernel or reference
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
from jax.custom_batching import custom_vmap
from jax.sharding import PartitionSpec

import jax
from jax import lax
from jax._src.aiter.core import dispatch, rounding
from jax._src.aiter.core.dispatch import absent, like
from jax._src.aiter.core.partition import in_auto_mode, partitioned
from jaxlib import gpu_aiter

BLOCK = 128  # Rows and columns that share a scale.
# Columns of which a kernel returns the largest magnitude; quant.h has it too.
_AMAX_COLS = 4096
# Rows and columns of a shuffled array of scales are multiples of these.
SCALE_TILE = (256, 8)
_PER = ("row", "group", "block", "amax")
dispatch.declare("quant")
_DTYPES = {"float16": "fp16", "bfloat16": "bf16", "float32": "fp32"}


class Config(NamedTuple):
  """Static facts of a call; hashable.

  Attributes:
    per: what a scale is for: a "row", a "group" of columns of a row, a "block"
      of BLOCK rows and columns. "amax" rounds nothing.
    kind: what numbers are rounded to; of rounding.KINDS.
    group: columns of a group.
    mode: rounding of e8m0 scales, of rounding.ROUND_MODES; None for float32.
    transposed: scales of groups are [..., n / group, m].
    shuffled: scales of groups are as shuffle_scale leaves them.
  """
  per: str
  kind: str = "int8"
  group: int = 0
  mode: str | None = None
  transposed: bool = False
  shuffled: bool = False

  @property
  def is_of_matrices(self) -> bool:
    """Whether the last two dimensions count, or the last one alone."""
    return self.per == "block" or self.transposed or self.shuffled

  @property
  def tile(self) -> tuple[int, int]:
    """Rows and columns that share a scale; 0 is all columns."""
    return {"row": (1, 0), "group": (1, self.group), "block": (BLOCK, BLOCK),
            "amax": (1, _AMAX_COLS)}[self.per]


class Operands(NamedTuple):
  """Arrays of a call; an absent one is None.

  Attributes:
    x: [..., m, n], or [..., n] if the config is not of matrices.
    smooth: float32 [n]: x is multiplied by it.
    scale: float32 [...], the scales of rows, if they are given.
  """
  x: jax.Array
  smooth: jax.Array | None = None
  scale: jax.Array | None = None


class Quantised(NamedTuple):
  """Results of a call.

  Attributes:
    q: like x, of the kind's dtype; "mxfp4" packs two columns in a uint8. None
      of an "amax".
    scale: float32, or uint8 if it is e8m0: of rows [...], of groups and of
      "amax" [..., n / group], of blocks [..., m / BLOCK, n / BLOCK], all
      rounded up. None if scales are given.
  """
  q: jax.Array | None
  scale: jax.Array | None


# -----------------------------------------------------------------------------
# The formulas in jax.numpy


def shuffle(scale):
  """[..., m, g] -> the same padded and in the order of scaled MFMA."""
  *lead, m, g = scale.shape
  pad = [(0, -size % tile) for size, tile in zip((m, g), SCALE_TILE)]
  m, g = m + pad[0][1], g + pad[1][1]
  scale = jnp.pad(scale, [(0, 0)] * len(lead) + pad)
  tiles = scale.reshape(-1, m // 32, 2, 16, g // 8, 2, 4)
  return tiles.transpose(0, 1, 4, 6, 3, 5, 2).reshape(*lead, m, g)


def reference(cfg: Config, operands: Operands) -> Quantised:
  """The quantiser in jax.numpy."""
  x, smooth, scale = operands
  kind = rounding.KINDS[cfg.kind]
  x = x.astype(jnp.float32)
  if smooth is not None:
    x = x * smooth
  if scale is not None:
    q = rounding.round_to(rounding.divide(x, scale[..., None]), kind)
    return Quantised(q, None)
  *lead, n = x.shape
  rows, cols = cfg.tile
  cols = max(min(cols or n, n), 1)
  whole = jnp.pad(x, [(0, 0)] * len(lead) + [(0, -n % cols)])
  if rows > 1:
    whole = jnp.pad(whole, [(0, 0)] * (x.ndim - 2)
                    + [(0, -lead[-1] % rows), (0, 0)])
    lead = [*lead[:-1], whole.shape[-2] // rows]
  # [..., rows' tiles, rows, columns' tiles, columns]
  tiles = whole.reshape(*lead, rows, -(-n // cols), cols)
  amax = rounding.amax(tiles, (-3, -1))
  if cfg.per == "amax":
    return Quantised(None, amax)
  spread = lambda t: t[..., None, :, None]
  if cfg.mode is None:
    scale = rounding.f32_scale(amax, kind)
    q = rounding.round_to(rounding.divide(tiles, spread(scale)), kind)
  else:
    scale = rounding.e8m0_scale(amax, rounding.ROUND_MODES[cfg.mode], kind)
    q = rounding.round_to(tiles, kind, spread(scale))
  q = q.reshape(whole.shape)[..., :n]
  if rows > 1:
    q = q[..., :x.shape[-2], :]
  if kind is rounding.E2M1:
    q = rounding.pack(q)
  if cfg.per == "row":
    scale = scale[..., 0] if n else rounding.f32_scale(jnp.zeros(lead), kind)
  if cfg.transposed:
    scale = scale.swapaxes(-1, -2)
  return Quantised(q, shuffle(scale) if cfg.shuffled else scale)


# -----------------------------------------------------------------------------
# Kernels


@functools.cache
def _unserved(platform: str, per: str, dtype: str, cols: int) -> str | None:
  return dispatch.unserved(
      platform, dtype, _DTYPES, lambda module, arch, name: module.quant_kernels(
          _PER.index(per), arch, name, cols))


def _quantise(cfg: Config, operands: Operands) -> Quantised:
  """The quantiser, by a kernel where there is one."""
  x = operands.x
  fallback = functools.partial(reference, cfg)
  if x.size == 0:
    return fallback(operands)
  results = jax.eval_shape(fallback, operands)

  def kernel(platform, operands):
    x, smooth, scale_in = operands
    n = x.shape[-1]
    x = x.reshape((-1, *x.shape[-2:]) if cfg.is_of_matrices else (1, -1, n))
    q, scale = results
    if scale is not None:
      # [batch, rows, columns] of scales.
      shape = (scale.shape[-2:] if cfg.is_of_matrices
               else (x.shape[1], scale.size // x.shape[1]))
    q_out, scale_out = jax.ffi.ffi_call(
        gpu_aiter.target(platform, "quant"),
        (like(x, (0,), jnp.uint8) if q is None
         else like(x, (*x.shape[:2], q.shape[-1]), q.dtype),
         like(x, (0,), jnp.float32) if scale is None
         else like(x, (x.shape[0], *shape), scale.dtype)),
    )(x, absent(smooth, jnp.float32),
      absent(None, jnp.float32) if scale_in is None
      else scale_in.reshape(x.shape[:2]),
      per=np.int32(_PER.index(cfg.per)), group=np.int32(cfg.group),
      rounding=np.int32(rounding.ROUND_MODES[cfg.mode or "up"]),
      transposed=cfg.transposed, shuffled=cfg.shuffled)
    return Quantised(None if q is None else q_out.reshape(q.shape),
                     None if scale is None else scale_out.reshape(scale.shape))

  return dispatch.dispatch(
      lambda platform: _unserved(platform, cfg.per, x.dtype.name, x.shape[-1]),
      kernel, fallback, operands)


# -----------------------------------------------------------------------------
# Sharding


def _sharded(cfg: Config, operands: Operands) -> Quantised:
  """The quantiser, partitioned along rows and along whole groups."""
  x, smooth, scale = operands
  lead = tuple(f"r{i}" for i in range(x.ndim - 1 - cfg.is_of_matrices))
  rows, cols = cfg.tile
  # Groups are a dimension of their own if all are whole.
  tiled = cols > 0 and not cfg.shuffled and x.shape[-1] % cols == 0 and (
      rows == 1 or x.shape[-2] % rows == 0)
  spec_cols = ("_",)
  if scale is not None:
    spec_cols = ("n",)
  elif tiled:
    spec_cols = ("g", "_")
  spec_rows = ()
  if cfg.per == "block":
    spec_rows = ("t", "_") if tiled else ("_",)
  elif cfg.is_of_matrices:
    spec_rows = ("_",) if cfg.shuffled else ("m",)
  group = "g" if tiled else "_"
  spec_scale = {
      "row": lead, "block": (*lead, "t" if tiled else "_", group),
  }.get(cfg.per, (*lead, *spec_rows, group))
  if cfg.transposed:
    spec_scale = (*lead, group, "m")
  elif cfg.shuffled:
    spec_scale = (*lead, "_", "_")
  spec = (*lead, *spec_rows, *spec_cols)

  def fold(t, cols):
    """[..., m, n] with tiles as dimensions."""
    if t is None or not tiled:
      return t
    *before, n = t.shape
    if rows > 1 and t.ndim > 1:
      before = [*before[:-1], before[-1] // rows, rows]
    return t.reshape(*before, n // cols, cols)

  def unfold(t):
    if t is None or not tiled:
      return t
    *before, groups, cols = t.shape
    if rows > 1 and t.ndim > 2:
      before = [*before[:-2], before[-2] * rows]
    return t.reshape(*before, groups * cols)

  def run(operands):
    out = _quantise(cfg, operands._replace(
        x=unfold(operands.x), smooth=unfold(operands.smooth)))
    return out._replace(q=fold(out.q, packed))

  packed = cols // 2 if cfg.kind == "mxfp4" else cols
  specs = Operands(spec, None if smooth is None else spec_cols,
                   None if scale is None else lead)
  results = Quantised(None if cfg.per == "amax" else spec,
                      None if scale is not None else spec_scale)
  out = partitioned(run, (specs,), results,
                    split={*lead, "m", "n", "t", "g"})(
      Operands(fold(x, cols), fold(smooth, cols), scale))
  return out._replace(q=unfold(out.q))


# -----------------------------------------------------------------------------
# vmap


@functools.cache
def _op(cfg: Config):
  """Operands -> Quantised."""

  @custom_vmap
  def quant(operands):
    return _sharded(cfg, operands)

  @quant.def_vmap
  def _(size, mapped, operands):
    x, smooth, scale = operands
    x_mapped, smooth_mapped, scale_mapped = mapped[0]
    whole = lambda t, m: (
        t if m or t is None else jnp.broadcast_to(t, (size, *t.shape)))
    operands = Operands(whole(x, x_mapped), smooth, whole(scale, scale_mapped))
    if smooth is not None and smooth_mapped:
      out = lax.map(quant, operands)
    else:
      out = quant(operands)
    return out, jax.tree.map(lambda _: True, out)

  return quant


def quantise(cfg: Config, operands: Operands) -> Quantised:
  """The quantiser; on a mesh with explicit axes, its rows as x's."""
  x = jax.typeof(operands.x).sharding
  *lead, n = x.spec
  rows = lead.pop() if cfg.is_of_matrices else None
  if operands.scale is not None:
    results = Quantised(PartitionSpec(*lead, n), None)
  elif cfg.transposed:
    results = Quantised(PartitionSpec(*lead, rows, None),
                        PartitionSpec(*lead, None, rows))
  else:
    after = {"row": 0, "group": 1, "amax": 1}.get(cfg.per, 2)
    after = 2 if cfg.shuffled else after
    whole = PartitionSpec(*lead, *[None] * (len(x.spec) - len(lead)))
    results = Quantised(None if cfg.per == "amax" else whole,
                        PartitionSpec(*lead, *[None] * after))
  return in_auto_mode(_op(cfg), x.mesh, results, operands)
