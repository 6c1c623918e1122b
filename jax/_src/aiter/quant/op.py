# SPDX-License-Identifier: Apache-2.0
"""Quantisers as an operator: formulas and the kernel's operands.

Rows shard over a mesh, and so do whole groups of columns: where all are whole,
the operator's arrays have them as a dimension of their own, which `quantise`
folds. A mapped axis is one more leading axis.
"""

from __future__ import annotations

from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec

import jax
from jax._src.aiter.core import dims, layouts, rounding
from jax._src.aiter.core.dispatch import absent, like
from jax._src.aiter.core.operator import Key, operator, rows_lead
from jax._src.aiter.core.partition import in_auto_mode

BLOCK = 128  # Rows and columns that share a scale.
# Columns of which a kernel returns the largest magnitude; quant.h has it too.
_AMAX_COLS = 4096
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
    tiled: whether x's last dimension, and of blocks the one before, are two:
      tiles and what is in one. Set by `quantise`.
  """
  per: str
  kind: str = "int8"
  group: int = 0
  mode: str | None = None
  transposed: bool = False
  shuffled: bool = False
  tiled: bool = False

  @property
  def is_of_matrices(self) -> bool:
    """Whether the last two dimensions count, or the last one alone."""
    return self.per == "block" or self.transposed or self.shuffled

  @property
  def tile(self) -> tuple[int, int]:
    """Rows and columns that share a scale; 0 is all columns."""
    return {"row": (1, 0), "group": (1, self.group), "block": (BLOCK, BLOCK),
            "amax": (1, _AMAX_COLS)}[self.per]

  @property
  def packed(self) -> int:
    """How many columns of x are one of q."""
    return 2 if self.kind == "mxfp4" else 1


class Operands(NamedTuple):
  """Arrays of a call; an absent one is None.

  Attributes:
    x: [..., m, n], or [..., n] if the config is not of matrices.
    smooth_scale: float32 [n]: x is multiplied by it.
    scale: float32 [...], the scales of rows, if they are given.
  """
  x: jax.Array
  smooth_scale: jax.Array | None = None
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


def _fold(cfg: Config, t, cols: int):
  """[..., m, n] with tiles as dimensions, of a tiled call."""
  if t is None or not cfg.tiled:
    return t
  rows = cfg.tile[0]
  *before, n = t.shape
  if rows > 1 and t.ndim > 1:
    before = [*before[:-1], before[-1] // rows, rows]
  return t.reshape(*before, n // cols, cols)


def _unfold(cfg: Config, t):
  if t is None or not cfg.tiled:
    return t
  rows = cfg.tile[0]
  *before, tiles, cols = t.shape
  if rows > 1 and t.ndim > 2:
    before = [*before[:-2], before[-2] * rows]
  return t.reshape(*before, tiles * cols)


def reference(cfg: Config, operands: Operands) -> Quantised:
  """The quantiser in jax.numpy."""
  if cfg.tiled:
    flat = reference(cfg._replace(tiled=False), operands._replace(
        x=_unfold(cfg, operands.x),
        smooth_scale=_unfold(cfg, operands.smooth_scale)))
    return flat._replace(
        q=_fold(cfg, flat.q, cfg.tile[1] // cfg.packed))
  x, smooth_scale, scale = operands
  kind = rounding.KINDS[cfg.kind]
  x = x.astype(jnp.float32)
  if smooth_scale is not None:
    x = x * smooth_scale
  if scale is not None:
    q = rounding.round_to(rounding.divide(x, scale[..., None]), kind)
    return Quantised(q, None)
  *lead, n = x.shape
  rows, cols = cfg.tile
  cols = max(min(cols or n, n), 1)
  whole = dims.longer(x, -1, -n % cols)
  if rows > 1:
    whole = dims.longer(whole, -2, dims.round_up(lead[-1], rows) - lead[-1])
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
  return Quantised(q, layouts.shuffle_scale(scale) if cfg.shuffled
                   else scale)


# -----------------------------------------------------------------------------
# The operator


def _kernel(cfg: Config, call, operands: Operands) -> Quantised:
  results = jax.eval_shape(lambda x: reference(cfg, x), operands)
  x, smooth_scale = (_unfold(cfg, t) for t in operands[:2])
  n = x.shape[-1]
  x = x.reshape((-1, *x.shape[-2:]) if cfg.is_of_matrices else (1, -1, n))
  q, scale = results
  if scale is not None:
    # [batch, rows, columns] of scales.
    shape = scale.shape[-2:]
    if not cfg.is_of_matrices:
      shape = x.shape[1], 1 if cfg.per == "row" else scale.shape[-1]
  q_out, scale_out = call(
      (like(x, (0,), jnp.uint8) if q is None
       else like(x, (*x.shape[:2], n // cfg.packed), q.dtype),
       like(x, (0,), jnp.float32) if scale is None
       else like(x, (x.shape[0], *shape), scale.dtype)),
      x, absent(smooth_scale, jnp.float32),
      absent(None, jnp.float32) if operands.scale is None
      else operands.scale.reshape(x.shape[:2]),
      per=cfg.per, group=np.int32(cfg.group), rounding=cfg.mode or "up",
      transposed=cfg.transposed, shuffled=cfg.shuffled)
  return Quantised(None if q is None else q_out.reshape(q.shape),
                   None if scale is None else scale_out.reshape(scale.shape))


def _serves(cfg: Config, operands: Operands) -> Key | None:
  x = operands.x
  if x.size == 0:
    return None
  return Key("quant", x.dtype.name,
             (x.shape[-1] * (x.shape[-2] if cfg.tiled else 1),),
             () if cfg.per == "row" else (cfg.per,))


def _specs(cfg: Config, operands: Operands):
  """Names of the dimensions of every operand, and of the results.

  "r0", "r1", ... are leading ones, "m" and "n" rows and columns, "t" and "g"
  tiles of rows and of columns.
  """
  x, smooth_scale, scale = operands
  axes = 1 + cfg.is_of_matrices + cfg.tiled + (cfg.tiled and cfg.tile[0] > 1)
  lead = tuple(f"r{i}" for i in range(x.ndim - axes))
  cols, rows = ("_",), ()
  if scale is not None:
    cols = ("n",)
  elif cfg.tiled:
    cols = ("g", "_")
  if cfg.per == "block":
    rows = ("t", "_") if cfg.tiled else ("_",)
  elif cfg.is_of_matrices:
    rows = ("_",) if cfg.shuffled else ("m",)
  group = "g" if cfg.tiled else "_"
  of_scale = {
      "row": lead, "block": (*lead, "t" if cfg.tiled else "_", group),
  }.get(cfg.per, (*lead, *rows, group))
  if cfg.transposed:
    of_scale = (*lead, group, "m")
  elif cfg.shuffled:
    of_scale = (*lead, "_", "_")
  of_x = (*lead, *rows, *cols)
  return (Operands(of_x, None if smooth_scale is None else cols,
                   None if scale is None else lead),), Quantised(
      None if cfg.per == "amax" else of_x,
      None if scale is not None else of_scale)


quant = operator(
    target="quant", kernel=_kernel, reference=reference, specs=_specs,
    split=("r", "m", "n", "t", "g"), serves=_serves, dtypes=_DTYPES,
    batch=rows_lead(columns=("smooth_scale",)))


def quantise(cfg: Config, operands: Operands) -> Quantised:
  """The quantiser; on a mesh with explicit axes, its rows as x's."""
  x = jax.typeof(operands.x)
  *lead, n = x.sharding.spec
  last = lead.pop() if cfg.is_of_matrices else None
  if operands.scale is not None:
    results = Quantised(PartitionSpec(*lead, n), None)
  elif cfg.transposed:
    results = Quantised(PartitionSpec(*lead, last, None),
                        PartitionSpec(*lead, None, last))
  else:
    after = {"row": 0, "group": 1, "amax": 1}.get(cfg.per, 2)
    after = 2 if cfg.shuffled else after
    whole = PartitionSpec(*lead, *[None] * (x.ndim - len(lead)))
    results = Quantised(None if cfg.per == "amax" else whole,
                        PartitionSpec(*lead, *[None] * after))
  rows, cols = cfg.tile
  cfg = cfg._replace(tiled=(
      cols > 0 and not cfg.shuffled and x.shape[-1] % cols == 0 and (
          rows == 1 or x.shape[-2] % rows == 0)))

  def run(operands):
    out = quant(cfg, operands._replace(
        x=_fold(cfg, operands.x, cols),
        smooth_scale=_fold(cfg, operands.smooth_scale, cols)))
    return out._replace(q=_unfold(cfg, out.q))

  return in_auto_mode(run, x.sharding.mesh, results, operands)
