# SPDX-License-Identifier: Apache-2.0
"""Attention of float8 tensors as an operator: formula, kernel, transforms.

The formula is attention of the dequantised tensors in bfloat16, by whatever
serves that: it runs too where matrix units know no float8, or another one.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np

import jax
from jax import lax
from jax._src.aiter.attention import op as mha_op
from jax._src.aiter.attention import types
from jax._src.aiter.core.dims import (
    is_known,
    last_start,
    longer,
    round_up,
    take,
)
from jax._src.aiter.core.dispatch import absent, like
from jax._src.aiter.core.operator import Key, operator, with_axis
from jax._src.aiter.core.partition import axes_of_arguments

DTYPES = {"float8_e4m3fn": "e4m3fn", "float8_e4m3fnuz": "e4m3fnuz"}
# Keys that may have a scale of their own; the kernels have it too.
BLOCK = 128
_MAX_HEAD_DIM = 128  # Wider ones are the formula's.
_RUN = 16  # Elements of a load.


class Config(NamedTuple):
  """Static facts of a call; hashable.

  Attributes:
    softmax_scale: of the scores.
    window: keys to the left and right of a query's own that it sees; -1 for no
      bound. Bottom right aligned.
    soft_cap: of the scores; 0 for none. With one it is the formula's.
    min_seqlen_q: packed sequences of at most so many queries are left out, if
      it is not 0. They are the formula's.
  """
  softmax_scale: float
  window: tuple[int, int] = (-1, -1)
  soft_cap: float = 0.0
  min_seqlen_q: int = 0


class Operands(NamedTuple):
  """Arrays of a call; an absent one is None.

  Attributes:
    q: [b, sq, hq, d], packed [total_q, hq, d]; a type of DTYPES.
    k: [b, sk, hk, d], packed [total_k, hk, d]; as q.
    v: [b, sk, hk, dv], packed [total_k, hk, dv]; as q.
    k_scale: float32 [b, hk, 1 or blocks of keys]: of the scores, q's too.
    v_scale: likewise, of v.
    sink: float32 [b, hq].
    cu_seqlens_q: int32 [b + 1], of a packed call.
    cu_seqlens_k: likewise.
  """
  q: jax.Array
  k: jax.Array
  v: jax.Array
  k_scale: jax.Array
  v_scale: jax.Array
  sink: jax.Array | None = None
  cu_seqlens_q: jax.Array | None = None
  cu_seqlens_k: jax.Array | None = None

  @property
  def packed(self) -> bool:
    return self.q.ndim == 3


# -----------------------------------------------------------------------------
# The formula


def _dequantised(x: Operands, t, scale):
  """Keys or values in bfloat16, times what scales them."""
  rows = jnp.arange(t.shape[-3], dtype=jnp.int32)
  last = scale.shape[2] - 1
  if x.packed:
    cu = x.cu_seqlens_k
    index = jnp.maximum(last_start(cu[:-1], rows), 0)
    block = jnp.clip((rows - cu[index]) // BLOCK, 0, last)
    factor = take(scale, (index, slice(None), block), 1)
  else:
    factor = jnp.swapaxes(scale[:, :, jnp.minimum(rows // BLOCK, last)], 1, 2)
  return (t.astype(jnp.float32) * factor[..., None]).astype(jnp.bfloat16)


def reference(cfg: Config, x: Operands):
  """(out, lse)."""
  out, lse, _ = mha_op.mha_fwd.run(
      types.Config(
          cfg.softmax_scale, logits_soft_cap=cfg.soft_cap,
          window_left=cfg.window[0], window_right=cfg.window[1],
          min_seqlen_q=cfg.min_seqlen_q, inference=True),
      types.Operands(
          x.q.astype(jnp.bfloat16), _dequantised(x, x.k, x.k_scale),
          _dequantised(x, x.v, x.v_scale), x.cu_seqlens_q, x.cu_seqlens_k,
          sink=x.sink))
  return out, lse


# -----------------------------------------------------------------------------
# The kernel


def _padded(t):
  """t with its last axis padded to a multiple that the kernels load."""
  return longer(t, -1, round_up(t.shape[-1], _RUN) - t.shape[-1])


def _kernel(cfg: Config, call, x: Operands):
  q, k, v = _padded(x.q), _padded(x.k), _padded(x.v)
  rows, (keys, hk, dv) = x.q.shape[:-2], v.shape[-3:]
  lse_shape = ((x.q.shape[1], rows[0]) if x.packed else
               (rows[0], x.q.shape[2], rows[1]))
  # Scratch: values transposed. Packed sequences begin at multiples of a block.
  columns = round_up(keys, BLOCK)
  if x.packed:
    columns += (x.cu_seqlens_k.shape[0] - 1) * BLOCK
  out, lse, _ = call(
      (like(q, (*x.q.shape[:-1], dv), jnp.bfloat16),
       like(q, lse_shape, jnp.float32),
       like(v, (1 if x.packed else rows[0], hk, dv, columns), v.dtype)),
      q, k, v, x.k_scale * np.float32(cfg.softmax_scale / math.log(2)),
      x.v_scale, absent(x.sink, jnp.float32),
      absent(x.cu_seqlens_q, jnp.int32), absent(x.cu_seqlens_k, jnp.int32),
      window_left=np.int64(cfg.window[0]), window_right=np.int64(cfg.window[1]))
  return out[..., :x.v.shape[-1]], lse


def _serves(cfg: Config, x: Operands) -> Key | None:
  dim = max(x.q.shape[-1], x.v.shape[-1])
  if (any(t.size == 0 for t in (x.q, x.k, x.v, x.k_scale))
      or dim > _MAX_HEAD_DIM or cfg.soft_cap or cfg.min_seqlen_q
      or cfg.softmax_scale <= 0):
    return None
  blocks = x.k_scale.shape[2]
  on = {"packed": x.packed, "sink": x.sink is not None,
        "blocks": not (is_known(blocks) and blocks == 1)}
  return Key("mha_fp8_fwd", x.q.dtype.name, (round_up(dim, _RUN),),
             tuple(name for name, holds in on.items() if holds))


# -----------------------------------------------------------------------------
# The operator. Batch and KV heads partition; a packed call by heads alone.

_SPLIT = ("b", "h", "g")


def _specs(cfg: Config, x: Operands):
  q_head = "h" if x.q.shape[-2] == x.k.shape[-2] else "g"
  b = () if x.packed else ("b",)
  row = "_" if x.packed else "b"
  specs = Operands(
      (*b, "_", q_head, "_"), (*b, "_", "h", "_"), (*b, "_", "h", "_"),
      (row, "h", "_"), (row, "h", "_"), (row, q_head), ("_",), ("_",))
  specs = Operands(*(None if t is None else s for t, s in zip(x, specs)))
  return (specs,), ((*b, "_", q_head, "_"), (*b, q_head, "_"))


def _plan(cfg: Config, run, mesh, args):
  """Heads are divided as k's are, or else as q's, if k's can be."""
  x, = args
  (specs,), _ = _specs(cfg, x)
  found = axes_of_arguments(mesh, (specs.k, specs.q), _SPLIT, (x.k, x.q))
  heads = found.get("h") or found.get("g") or ()
  if x.k.shape[-2] % int(np.prod([mesh.shape[a] for a in heads])):
    heads = ()
  batch = tuple(a for a in found.get("b", ()) if a not in heads)
  return {"h": heads, "g": heads, "b": batch}, run


def _batch(cfg: Config, op, size, mapped, x: Operands):
  """A mapped axis is more sequences; packed calls are made in turn."""
  x = with_axis(size, *mapped, x)
  if x.q.ndim == 4:
    return lax.map(op, x)
  out = op(jax.tree.map(lambda t: t.reshape(-1, *t.shape[2:]), x))
  return jax.tree.map(lambda t: t.reshape(size, -1, *t.shape[1:]), out)


# (Config, Operands) -> (out bfloat16, lse [b, hq, sq] or [hq, total_q])
attend = operator(
    target="mha_fp8_fwd", kernel=_kernel, reference=reference, specs=_specs,
    split=_SPLIT, serves=_serves, dtypes=DTYPES, plan=_plan, batch=_batch)
