# SPDX-License-Identifier: Apache-2.0
"""Attention as an operator: its kernels' operands, how it folds and splits.

`mha` is differentiable. A mapped axis is folded into the batch; batch and heads
shard over a mesh.
"""

from __future__ import annotations

import functools
import math
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
from jax.ad_checkpoint import checkpoint_name

import jax
from jax import lax
from jax._src.aiter.attention import decode, reference, rows
from jax._src.aiter.attention.types import (
  Config,
  Grads,
  Operands,
  Saved,
  Wanted,
)
from jax._src.aiter.core import dispatch
from jax._src.aiter.core.derivative import differentiable, formula_jvp
from jax._src.aiter.core.dims import is_known, longer, round_up
from jax._src.aiter.core.dispatch import absent, like
from jax._src.aiter.core.operator import Key, operator
from jax._src.aiter.core.partition import mesh_axes, vary_like
from jax._src.aiter.core.rounding import exact_products

_DTYPES = {"float16": "fp16", "bfloat16": "bf16", "float32": "fp32"}
_ALIGNMENT = 8  # of head dims, in elements; the kernels load 16 bytes
# One pass over the scores, as include/aiter/mha.h has it: its kernels' columns,
# from how many queries and keys a sequence on it is worth its sums, what their
# rows are a multiple of, and how many blocks of so many keys keep a GPU busy.
_ONE_PASS = "mha_one_pass"
_ONE_PASS_DIMS, _ONE_PASS_LENGTH, _ONE_PASS_ROWS = (64, 128), 1024, 128
_ONE_PASS_BLOCKS = 512
# Kernels that keep the gradients of the scores, whose sums are the bias's; how
# many bytes of them may be kept however few the bias has, or at a time where it
# has no gradient; and beyond which head dim they are the faster ones for scores
# that are mere products, without dropout and with. Fewer blocks at a time leave
# a GPU idle, which have half as many keys beyond 128 columns; half of them do
# not where all of the call are at work at once and each has as much to do as
# any, or little: fewer keys than `_DSCORES_LENGTH`.
_DSCORES, _DSCORES_BYTES, _DSCORES_WIDE = "mha_dscores", 1 << 30, (80, 128)
_DSCORES_BLOCKS, _DSCORES_KEYS, _DSCORES_LENGTH = 256, 128, 1024
# Beyond this soft cap their tanh is not exact enough, as src/mha.cc has it.
_DSCORES_CAP = 1024
# On AMD they are the faster ones from so many rows and keys on, by prediction,
# where those at a time have so many keys, twice as many of narrow head dims;
# under a window, whose blocks differ, all of the call, in `_DSCORES_BYTES_MOST`
# if so many it takes, and of mere products nothing else, from that head dim on.
_DSCORES_LENGTH_AMD, _DSCORES_KEYS_AMD, _DSCORES_WINDOW_AMD = 256, 1 << 15, 128
# Sliding windows leave most of them zeros: of more bytes of a call that is
# computed in parts, other passes are the faster ones.
_DSCORES_BYTES_MOST = 1 << 32
# What scratch has whole tiles of, as include/aiter/mha.h has it.
_DSCORES_TILE = (32, 128)
# The least number of a bias that hides no key, of one added to scores times
# softmax_scale or, divided by that, before. In base 2 it is finite, and a row
# that sees nothing higher weighs its keys alike.
_LEAST_BIAS = -2e38


class BwdConfig(NamedTuple):
  """Static facts of a backward call; hashable."""
  mha: Config
  wanted: Wanted


# -----------------------------------------------------------------------------
# Kernels


def _planes(x: Operands) -> list[jax.Array]:
  """The bias and the mask, those that there are."""
  return [t for t in (x.bias, x.mask) if t is not None]


def _one_row(cfg: Config, x: Operands) -> Operands | None:
  """The call with planes of one row for all as some kernels want them.

  A float32 bias says what the mask hides, too, and a mask which keys nobody
  sees, of which nothing is read. None if no architecture has kernels for it.
  """
  planes = _planes(x)
  if (not planes or x.q.dtype.itemsize > 2
      or any(t.shape[2] != 1 or t.shape[3] == 1 for t in planes)
      or x.alibi_slopes is not None or cfg.logits_soft_cap > 0
      or cfg.sink_tokens > 0 or not cfg.softmax_scale > 0):
    return None
  shape = jnp.broadcast_shapes(*(t.shape for t in planes))
  bias = jnp.zeros((), jnp.float32)
  if x.bias is not None:
    bias = x.bias.astype(jnp.float32)
    least = _LEAST_BIAS * min(cfg.softmax_scale, 1.0)
    bias = jnp.where(bias == -jnp.inf, bias, jnp.maximum(bias, least))
  bias = jnp.broadcast_to(bias, shape)
  if x.mask is not None:
    bias = jnp.where(x.mask, bias, -jnp.inf)
  return x._replace(bias=bias, mask=bias != -jnp.inf)


def _wants_one_row(platform: str, x: Operands) -> bool:
  """Whether forward kernels are faster with planes as _one_row has them.

  AMD's are of aligned heads of 64 and 128 columns, without dropout.
  """
  if platform == "cuda":
    return True
  keys = x.k.shape[-3]
  return (x.dropout_state is None and not x.packed
          and x.q.shape[-1] == x.v.shape[-1] and x.q.shape[-1] in (64, 128)
          and is_known(keys) and keys % _ALIGNMENT == 0)


def features(cfg: Config, x: Operands, wanted: Wanted | None = None,
             dlse: bool = False) -> tuple[str, ...]:
  """What a call asks of a kernel, by its family's names."""
  length_limits = x.cu_seqlens_q is not None or x.cu_seqlens_k is not None
  asked = dict(
      packed=x.packed,
      bias=x.bias is not None,
      bias_f32=x.bias is not None and x.bias.dtype != x.q.dtype,
      mask=x.mask is not None, alibi=x.alibi_slopes is not None,
      sink=x.sink is not None, dropout=x.dropout_state is not None,
      cu_seqlens=length_limits and not x.packed,
      top_left=cfg.top_left, soft_cap=cfg.logits_soft_cap > 0,
      sink_tokens=cfg.sink_tokens > 0,
      window=cfg.window_left >= 0 or cfg.window_right >= 0,
      min_seqlen=cfg.min_seqlen_q > 0, dlse=dlse,
      exact=x.q.dtype == jnp.float32 and exact_products(cfg.precision))
  if wanted is not None:
    asked.update(dbias=wanted.dbias, dsink=wanted.dsink)
  return tuple(name for name, on in asked.items() if on)


def _serves(op: str, cfg: Config, x: Operands, *backward) -> Key | None:
  if (cfg.keep_p or x.batch == 0
      or any(t.size == 0 for t in (x.q, x.k, x.v))):
    return None
  dims = tuple(round_up(t.shape[-1], _ALIGNMENT) for t in (x.q, x.v))
  return Key(op, x.q.dtype.name, dims, features(cfg, x, *backward),
             everywhere=x.q.dtype != jnp.float32)


def _aligned(t):
  """t with its last axis padded to a multiple that the kernels can load."""
  return longer(t, -1, round_up(t.shape[-1], _ALIGNMENT) - t.shape[-1])


def _missing_keys(platform: str, cfg: Config, x: Operands) -> int:
  """How many keys rows of a bias or mask lack to end where kernels want it.

  Those that CUDA has for one copy eight of its elements at once; others take
  rows of any length, element by element. float32 has no such kernels. Where
  queries alone have lengths, more keys would move them, and where few queries
  are to have no result, there may be no more of them.
  """
  planes = _planes(x)
  if (platform != "cuda" or x.packed or not planes or x.q.dtype.itemsize > 2
      or any(t.shape[3] == 1 for t in planes) or not is_known(x.k.shape[1])
      or (x.cu_seqlens_q is not None and x.cu_seqlens_k is None)
      or cfg.min_seqlen_q > 0):
    return 0
  return -x.k.shape[1] % _ALIGNMENT


def _missing_rows(cfg: Config, x: Operands, keys: int) -> int:
  """How many rows keep a call's diagonal in place beside so many more keys."""
  placed = (cfg.window_left >= 0 or cfg.window_right >= 0
            or x.alibi_slopes is not None)
  moved = not cfg.top_left and x.cu_seqlens_k is None
  return keys if placed and moved else 0


def _whole_rows(cfg: Config, x: Operands, keys: int) -> Operands:
  """The call with more keys, hidden, and rows, which nobody asks for."""
  more = _missing_rows(cfg, x, keys)

  def plane(t, hidden):
    if t is not None and t.shape[2] > 1:
      t = longer(t, 2, more)
    return longer(t, 3, keys, hidden)

  return x._replace(
      q=longer(x.q, 1, more), k=longer(x.k, 1, keys),
      v=longer(x.v, 1, keys), bias=plane(x.bias, -jnp.inf),
      mask=plane(x.mask, False))


def _flat(x: Operands):
  """The FFI operands of a call, in order."""
  return (
      _aligned(x.q), _aligned(x.k), _aligned(x.v),
      *(absent(t, jnp.int32) for t in x[3:7]),
      absent(x.bias, x.q.dtype), absent(x.mask, jnp.bool_),
      absent(x.alibi_slopes, jnp.float32), absent(x.sink, jnp.float32),
      absent(x.dropout_state, jnp.uint32))


def _attributes(cfg: Config, one_row: bool = False):
  return dict(
      softmax_scale=np.float32(cfg.softmax_scale),
      logits_soft_cap=np.float32(cfg.logits_soft_cap),
      dropout_p=np.float32(cfg.dropout_p),
      window_left=np.int64(cfg.window_left),
      window_right=np.int64(cfg.window_right),
      sink_tokens=np.int64(cfg.sink_tokens), top_left=bool(cfg.top_left),
      min_seqlen_q=np.int64(cfg.min_seqlen_q),
      deterministic=bool(cfg.deterministic),
      exact=exact_products(cfg.precision), one_row=one_row)


def _lse_shape(x: Operands):
  if x.packed:
    return x.q.shape[1], x.q.shape[0]
  return x.q.shape[0], x.q.shape[2], x.q.shape[1]


def _fwd_serves(cfg: Config, x: Operands) -> Key | None:
  if decode.few_queries(cfg, x):
    return decode.serves(cfg, x)
  return _serves("mha_fwd", cfg, x)


def _fwd_kernel(cfg: Config, call, x: Operands):
  if cfg.keep_bits and call.platform != "cuda":
    out, lse, _ = _fwd_kernel(cfg._replace(keep_bits=False), call, x)
    return out, lse, reference.kept_bits(cfg, x)
  if decode.few_queries(cfg, x):
    return *decode.kernel(cfg, call, x), None
  if keys := _missing_keys(call.platform, cfg, x):
    sq = x.q.shape[1]
    out, lse, _ = _fwd_kernel(cfg, call, _whole_rows(cfg, x, keys))
    return out[:, :sq], lse[..., :sq], None
  one_row = _one_row(cfg, x) if _wants_one_row(call.platform, x) else None
  flat = _flat(x if one_row is None else one_row)
  q, v = flat[0], flat[2]
  out, lse, bits = call(
      (like(q, (*q.shape[:-1], v.shape[-1]), q.dtype),
       like(q, _lse_shape(x), jnp.float32),
       like(q, reference.kept_shape(x) if cfg.keep_bits else (0,), jnp.int32)),
      *flat, **_attributes(cfg, one_row is not None))
  return out[..., :x.v.shape[-1]], lse, bits if cfg.keep_bits else None


def _has_kernels(op: str, platform: str, bwd: BwdConfig, x: Operands,
                 dlse: bool, more: tuple[str, ...] = ()) -> bool:
  """Whether a backward call has kernels of another kind, `op`.

  `more`: features that _serves does not see.
  """
  key = _serves(op, bwd.mha, x, bwd.wanted, dlse)
  return key is not None and mha_bwd.unserved(platform, key._replace(
      features=key.features + more, everywhere=False)) is None


def _one_pass(platform: str, bwd: BwdConfig, x: Operands, saved: Saved) -> bool:
  """Whether kernels that compute dk, dv and dq in one pass serve a call.

  Of those that keep no gradients of scores they do for long sequences whose
  scores have no more than a wide window: few keys a row are not worth the sums.
  Of packed ones the mean is known. At half the head dim a product is worth half
  as much: there they do where dropout draws once, or heads share keys under a
  mask and either two passes have few blocks or sums no order. Fewer columns
  than the kernels' are worth it for dropout alone, whose bits nobody else
  reads.
  """
  if saved.bits is not None and platform == "cuda":
    return True
  if not all(map(is_known, (*x.q.shape, *x.k.shape))) or x.batch == 0:
    return False
  rows = [t.shape[-3] // (x.batch if x.packed else 1) for t in (x.q, x.k)]
  columns = x.q.shape[-1]
  if (columns != x.v.shape[-1] or columns > max(_ONE_PASS_DIMS)
      or min(rows) < _ONE_PASS_LENGTH
      or 0 <= bwd.mha.window_left < _ONE_PASS_LENGTH):
    return False
  if x.dropout_state is None and (columns not in _ONE_PASS_DIMS or (
      columns < 128 and (
          x.q.shape[-2] == x.k.shape[-2] or not _heads_together(x)
          or bwd.mha.window_right < 0
          or (bwd.mha.deterministic and _key_blocks(x) >= _ONE_PASS_BLOCKS)))):
    return False
  return _has_kernels(_ONE_PASS, platform, bwd, x, saved.dlse is not None)


def _sums_rows(x: Operands, t) -> int:
  """Rows of a head's sums of t, queries or keys."""
  rows = t.shape[-3]
  if x.packed:  # A sequence has rows of its own.
    rows += x.batch * _ONE_PASS_ROWS - rows % _ONE_PASS_ROWS
  return round_up(rows, _ONE_PASS_ROWS)


def _key_blocks(x: Operands) -> int:
  """How many blocks of keys all kv heads have."""
  batch = 1 if x.packed else x.batch
  return batch * x.k.shape[-2] * _sums_rows(x, x.k) // _ONE_PASS_ROWS


def _heads_together(x: Operands) -> bool:
  """Whether a block goes through all heads that share its keys.

  It does where enough blocks are left; those of a narrow head dim end sooner.
  """
  return _key_blocks(x) * 128 >= _ONE_PASS_BLOCKS * _one_pass_columns(x)


def _one_pass_columns(x: Operands) -> int:
  """Columns of the kernels, and of their sums, that serve a call's heads."""
  return min(n for n in _ONE_PASS_DIMS if n >= x.q.shape[-1])


def _one_pass_kernel(bwd: BwdConfig, call, x: Operands, saved: Saved) -> Grads:
  flat = _flat(x)
  q, k = flat[:2]
  hq, hk = q.shape[-2], k.shape[-2]
  f32, b = jnp.float32, 1 if x.packed else x.batch

  def sums(t):
    return b, t.shape[-2], _sums_rows(x, t), _one_pass_columns(x)

  of_q, of_k = sums(q), sums(k)
  turns = b * (hq * of_q[2] // 64 + hk * of_k[2] // 128)
  of_k = (0,) if hk == hq or _heads_together(x) else of_k
  dq, dk, dv, *_ = call._replace(target=_ONE_PASS)(
      (*(like(t, t.shape, t.dtype) for t in flat[:3]),
       like(q, saved.lse.shape, f32), like(q, of_q, f32), like(k, of_k, f32),
       like(k, of_k, f32),
       like(q, (turns if bwd.mha.deterministic else 0,), jnp.int32)),
      *flat, _aligned(saved.dout), _aligned(saved.out), saved.lse,
      absent(saved.dlse, f32), absent(saved.bits, jnp.int32),
      **_attributes(bwd.mha))
  return Grads(*(t[..., :x.q.shape[-1]] for t in (dq, dk, dv)),
               None, None, None)


def _mere_products(bwd: BwdConfig, x: Operands) -> bool:
  """Whether a call's scores are products, which nothing changes."""
  return (not _planes(x) and x.alibi_slopes is None
          and bwd.mha.logits_soft_cap == 0)


def _dscores_heads(platform: str, bwd: BwdConfig, x: Operands) -> int:
  """How many heads' gradients of the scores are kept at a time; 0: too few.

  Those of whole sequences, or of one sequence's kv heads; in equal parts.
  """
  b, sk = (1 if x.packed else x.batch), x.k.shape[-3]
  hq, hk = x.q.shape[-2], x.k.shape[-2] * _dscores_splits(platform, bwd, x)
  group = hq // hk
  of_kv_head = group * _dscores_bytes(bwd, x)
  if platform == "rocm":
    fit = _dscores_fit_amd(bwd, x, b * hk, of_kv_head)
  else:
    fit = min(_DSCORES_BYTES // of_kv_head, b * hk)
    if fit < b * hk and (
        fit * sk < _DSCORES_BLOCKS * _dscores_keys(x)
        or (bwd.mha.window_left >= 0 and x.q.shape[-1] <= 128
            and b * hk * of_kv_head > _DSCORES_BYTES_MOST)):
      return 0
  if fit == 0:
    return 0
  count, unit = (b, hq) if fit >= hk else (hk, group)
  times = -(-count // (fit * group // unit))
  return -(-count // times) * unit


def _dscores_splits(platform: str, bwd: BwdConfig, x: Operands) -> int:
  """In how many parts the heads that share keys are, each with sums of its own.

  In one if enough blocks are at work at a time, which under a causal mask those
  of few sequences' heads leave early: of long ones it takes more.
  """
  if x.packed:
    return 1
  (b, hq), (sk, hk) = x.q.shape[:3:2], x.k.shape[1:3]
  group = hq // hk
  even = (bwd.mha.window_left >= 0 or bwd.mha.window_right < 0
          or sk < _DSCORES_LENGTH)
  whole = _DSCORES_BLOCKS // 2 if even else _DSCORES_BLOCKS

  def enough(parts):
    every = b * hk * parts
    if platform == "rocm":
      return every * sk >= _dscores_keys_amd(x)
    fit = _DSCORES_BYTES // (group // parts * _dscores_bytes(bwd, x))
    blocks = min(fit, every) * sk // _dscores_keys(x)
    return blocks >= (whole if fit >= every else _DSCORES_BLOCKS)

  return next((n for n in range(1, group) if group % n == 0 and enough(n)),
              group)


def _dscores_bytes(bwd: BwdConfig, x: Operands) -> int:
  """Bytes of a head's scratch."""
  return math.prod(_dscores_tiles(bwd, x)) * x.q.dtype.itemsize


def _dscores_keys(x: Operands) -> int:
  """Keys of a block."""
  return _DSCORES_KEYS // (1 if x.q.shape[-1] <= 128 else 2)


def _dscores_keys_amd(x: Operands) -> int:
  """Keys of all heads at a time that keep an AMD GPU at work."""
  return _DSCORES_KEYS_AMD * (1 if x.q.shape[-1] >= 128 else 2)


def _dscores_fit_amd(bwd: BwdConfig, x: Operands, every: int,
                     of_kv_head: int) -> int:
  """Of how many of `every` kv heads gradients are kept at a time on AMD; or 0.
  """
  sk, dim = x.k.shape[1], x.k.shape[-1]
  windowed = bwd.mha.window_left >= 0 or bwd.mha.window_right >= 0
  mere = _mere_products(bwd, x) and x.dropout_state is None
  if (min(x.q.shape[1], sk) < _DSCORES_LENGTH_AMD
      or (windowed and mere and dim < _DSCORES_WINDOW_AMD)):
    return 0
  if windowed and (mere or every * of_kv_head <= _DSCORES_BYTES_MOST):
    fit = every
  else:
    fit = min(every, max(_DSCORES_BYTES // of_kv_head,
                         -(-_dscores_keys_amd(x) // sk)))
  return fit if fit * of_kv_head <= _DSCORES_BYTES_MOST else 0


def _dscores_tiles(bwd: BwdConfig, x: Operands) -> tuple[int, int]:
  """Rows and keys of a head's scratch.

  Packed sequences have rows of their own, as in _sums_rows, and each has room
  for the keys of the longest.
  """
  rows, keys = _DSCORES_TILE
  if x.packed:
    longest = min(bwd.mha.max_seqlen_k, x.k.shape[0])
    return _sums_rows(x, x.q), round_up(longest, keys)
  return round_up(x.q.shape[1], rows), round_up(x.k.shape[1], keys)


def _dscores_sequences(bwd: BwdConfig, x: Operands) -> int:
  """Of how many sequences those that are a bias's are kept at a time; or 0.

  As many as kernels that sum them write, in float32, are never too many.
  """
  (b, sq, hq), sk = x.q.shape[:3], x.k.shape[1]
  hk = x.k.shape[2] * _dscores_splits("cuda", bwd, x)
  summed = math.prod(x.bias.shape[:2]) * sq * sk * 4
  fit = max(summed, _DSCORES_BYTES) // (hq * sq * sk * x.q.dtype.itemsize)
  count = max((n for n in range(1, min(fit, b) + 1) if b % n == 0), default=0)
  if count < b and count * hk * sk < _DSCORES_BLOCKS * _dscores_keys(x):
    return 0
  return count


def _keeps_dscores(platform: str, bwd: BwdConfig, x: Operands, saved: Saved,
                   one_row: bool = False) -> bool:
  """Whether kernels that keep the gradients of the scores serve a call.

  Of packed ones that one pass does not: blocks of many sequences end late.
  """
  shapes = (*x.q.shape, *x.k.shape)
  if (not all(map(is_known, shapes)) or 0 in shapes or x.batch == 0
      or (x.packed and (bwd.mha.max_seqlen_k == 0
                        or _one_pass(platform, bwd, x, saved)))
      or bwd.mha.logits_soft_cap > _DSCORES_CAP or bwd.wanted.dslopes):
    return False
  sk = x.k.shape[-3]
  # What is more than a product takes longer to compute twice.
  narrow = (_DSCORES_WIDE[x.dropout_state is not None]
            if _mere_products(bwd, x) else 0)
  if bwd.wanted.dbias:
    if not _dscores_sequences(bwd, x):
      return False
  elif ((platform == "cuda" and max(x.q.shape[-1], x.v.shape[-1]) <= narrow)
        or not _dscores_heads(platform, bwd, x)):
    return False
  unaligned = any(
      sk % _ALIGNMENT != 0 or t.shape[3] == 1 for t in _planes(x))
  return _has_kernels(_DSCORES, platform, bwd, x, saved.dlse is not None,
                      ("unaligned",) * unaligned + ("one_row",) * one_row)


def _dscores_by_parts(bwd: BwdConfig, call, x: Operands, saved: Saved,
                      count: int) -> Grads:
  """_dscores_kernel of `count` sequences at a time, a divisor of all."""
  arrays, tree = jax.tree.flatten((x, saved))
  own = [t.shape[0] == x.batch for t in arrays]
  total = None  # The gradient of a bias that all sequences share.
  if x.bias.shape[0] != x.batch:
    total = vary_like(jnp.zeros(x.bias.shape, jnp.float32), x.q)

  def step(total, parts):
    parts = iter(parts)
    grads = _dscores_kernel(bwd, call, *jax.tree.unflatten(tree, [
        next(parts) if is_own else t
        for t, is_own in zip(arrays, own, strict=True)]))
    if total is None:
      return None, grads
    return total + grads.dbias, grads._replace(dbias=None)

  total, grads = lax.scan(step, total, [
      t.reshape(-1, count, *t.shape[1:])
      for t, is_own in zip(arrays, own, strict=True) if is_own])
  grads = jax.tree.map(lambda t: t.reshape(-1, *t.shape[2:]), grads)
  return grads if total is None else grads._replace(dbias=total)


def _dscores_kernel(bwd: BwdConfig, call, x: Operands, saved: Saved,
                    one_row: bool = False) -> Grads:
  parts = _dscores_splits(call.platform, bwd, x)
  flat = _flat(x._replace(k=jnp.repeat(x.k, parts, 2),
                          v=jnp.repeat(x.v, parts, 2)))
  q, k, v = flat[:3]
  f32 = jnp.float32
  shape = ((x.batch, x.q.shape[2], x.q.shape[1], x.k.shape[1])
           if bwd.wanted.dbias else
           (_dscores_heads(call.platform, bwd, x), *_dscores_tiles(bwd, x)))
  dq, dk, dv, dscores, _ = call._replace(target=_DSCORES)(
      (*(like(t, t.shape, t.dtype) for t in (q, k, v)),
       like(q, shape, q.dtype), like(q, saved.lse.shape, f32)),
      *flat, _aligned(saved.dout), _aligned(saved.out), saved.lse,
      absent(saved.dlse, f32), **_attributes(bwd.mha, one_row))

  def sums(t, dim):
    t = t[..., :dim]
    if parts == 1:
      return t
    t = t.reshape(*x.k.shape[:3], parts, dim)
    return jnp.sum(t, 3, dtype=f32).astype(t.dtype)

  return Grads(
      dq[..., :x.q.shape[-1]], sums(dk, x.k.shape[-1]),
      sums(dv, x.v.shape[-1]),
      reference.sum_to(dscores.astype(f32), x.bias.shape)
      if bwd.wanted.dbias else None, None, None)


def _bwd_whole_rows(bwd: BwdConfig, call, x: Operands, saved: Saved,
                    keys: int) -> Grads:
  """_bwd_kernel of _whole_rows."""
  more = _missing_rows(bwd.mha, x, keys)
  grads = _bwd_kernel(bwd, call, _whole_rows(bwd.mha, x, keys), saved._replace(
      dout=longer(saved.dout, 1, more), out=longer(saved.out, 1, more),
      lse=longer(saved.lse, 2, more, -jnp.inf),
      dlse=longer(saved.dlse, 2, more)))
  sq, sk = x.q.shape[1], x.k.shape[1]
  return grads._replace(
      dq=grads.dq[:, :sq], dk=grads.dk[:, :sk], dv=grads.dv[:, :sk],
      dbias=None if grads.dbias is None else grads.dbias[:, :, :sq, :sk])


def _bwd_kernel(bwd: BwdConfig, call, x: Operands, saved: Saved) -> Grads:
  if keys := _missing_keys(call.platform, bwd.mha, x):
    return _bwd_whole_rows(bwd, call, x, saved, keys)
  one_row = _one_row(bwd.mha, x)
  if (one_row is not None and not bwd.wanted.dbias
      and _keeps_dscores(call.platform, bwd, one_row, saved, True)):
    return _dscores_kernel(bwd, call, one_row, saved, True)
  if _keeps_dscores(call.platform, bwd, x, saved):
    if bwd.wanted.dbias and (count := _dscores_sequences(bwd, x)) < x.batch:
      return _dscores_by_parts(bwd, call, x, saved, count)
    return _dscores_kernel(bwd, call, x, saved)
  if _one_pass(call.platform, bwd, x, saved):
    return _one_pass_kernel(bwd, call, x, saved)
  cfg, wanted = bwd
  flat = _flat(x)
  q, k, v = flat[:3]
  none = like(q, (0,), jnp.float32)
  dbias_shape = wanted.dbias and (
      *x.bias.shape[:2], x.q.shape[1], x.k.shape[1])
  dq, dk, dv, dbias, dsink, dslopes, _ = call(
      (like(q, q.shape, q.dtype), like(k, k.shape, k.dtype),
       like(v, v.shape, v.dtype),
       like(q, dbias_shape, jnp.float32) if wanted.dbias else none,
       like(q, x.sink.shape, jnp.float32) if wanted.dsink else none,
       like(q, saved.lse.shape, jnp.float32) if wanted.dslopes else none,
       like(q, saved.lse.shape, jnp.float32)),
      *flat, _aligned(saved.dout), _aligned(saved.out), saved.lse,
      absent(saved.dlse, jnp.float32), **_attributes(cfg))
  return Grads(
      dq[..., :x.q.shape[-1]], dk[..., :x.k.shape[-1]],
      dv[..., :x.v.shape[-1]],
      reference.sum_to(dbias, x.bias.shape) if wanted.dbias else None,
      dsink if wanted.dsink else None,
      reference.sum_rows(x, dslopes) if wanted.dslopes else None)


# -----------------------------------------------------------------------------
# vmap: a mapped axis becomes part of the batch, or of the packed rows.


def _fold_rows(t, mapped: bool, n: int):
  """[n?, b, ..] -> [n * b, ..]"""
  if t is None:
    return None
  if not mapped:
    t = jnp.broadcast_to(t, (n, *t.shape))
  return t.reshape(n * t.shape[1], *t.shape[2:])


def _fold_lengths(cu, mapped, n: int):
  """Cumulative lengths [n?, b + 1] -> [n * b + 1]"""
  if cu is None:
    return None
  return rows.cumulative(
      _fold_rows(cu[..., 1:] - cu[..., :-1], mapped, n))


def _fold_starts(cu, padded, mapped, n: int, total: int):
  """First rows [n?, b + 1] -> [n * b + 1]; every element has its own rows."""
  starts, mapped = (cu, mapped[0]) if padded is None else (padded, mapped[1])
  if not mapped:
    starts = jnp.broadcast_to(starts, (n, *starts.shape))
  at = jnp.arange(n, dtype=jnp.int32)[:, None] * np.int32(total)
  starts = (starts[:, :-1] + at).reshape(-1)
  return jnp.concatenate([starts, jnp.full((1,), n * total, jnp.int32)])


def _fold_planes(t, mapped: bool, n: int, q, own: bool):
  """Bias or mask [n?, 1 | b, ..] -> [1 | n * b, ..]; 1 not if `own`."""
  if t is None:
    return None
  b = q.shape[-4]
  per_batch = t.shape[-4] == b
  if not (mapped or own or (per_batch and b > 1)):
    return t
  if not mapped:
    t = jnp.broadcast_to(t, (n, *t.shape))
  if not per_batch:
    t = jnp.broadcast_to(t, (n, b, *t.shape[2:]))
  return t.reshape(n * b, *t.shape[2:])


def _fold(x: Operands, mapped: Operands, n: int, own_bias: bool) -> Operands:
  """Operands of one call that does the work of n.

  Args:
    x: operands, those mapped with a leading axis of n.
    mapped: which have it.
    n: size of the mapped axis.
    own_bias: every element needs its own rows of the bias, for its gradient.
  """
  rows = lambda name: _fold_rows(getattr(x, name), getattr(mapped, name), n)
  packed = x.q.ndim - mapped.q == 3
  lengths = {
      s: _fold_lengths(getattr(x, s), getattr(mapped, s), n)
      for s in ("cu_seqlens_q", "cu_seqlens_k")}
  starts = {}
  if packed:
    for s, t in (("q", x.q), ("k", x.k)):
      name, padded = f"cu_seqlens_{s}", f"cu_seqlens_{s}_padded"
      starts[padded] = _fold_starts(
          getattr(x, name), getattr(x, padded),
          (getattr(mapped, name), getattr(mapped, padded)), n,
          t.shape[-3])
  planes = lambda name, own: _fold_planes(
      getattr(x, name), getattr(mapped, name), n, x.q, own)
  return Operands(
      rows("q"), rows("k"), rows("v"), **lengths, **starts,
      bias=planes("bias", own_bias), mask=planes("mask", False),
      alibi_slopes=rows("alibi_slopes"), sink=rows("sink"),
      dropout_state=rows("dropout_state"))


def _fold_lse(t, mapped: bool, n: int, packed: bool):
  if t is None or not packed:
    return _fold_rows(t, mapped, n)
  if not mapped:
    t = jnp.broadcast_to(t, (n, *t.shape))
  return jnp.moveaxis(t, 0, 1).reshape(t.shape[1], -1)


def _unfold_rows(t, n: int):
  return None if t is None else t.reshape(n, t.shape[0] // n, *t.shape[1:])


def _unfold_lse(t, n: int, packed: bool):
  if t is None or not packed:
    return _unfold_rows(t, n)
  return jnp.moveaxis(t.reshape(t.shape[0], n, -1), 1, 0)


def _fwd_batch(_, op, n, mapped, x: Operands):
  folded = _fold(x, *mapped, n, own_bias=False)
  out, lse, p = op(folded)
  return (_unfold_rows(out, n), _unfold_lse(lse, n, folded.packed),
          _unfold_rows(p, n))


def _bwd_batch(bwd: BwdConfig, op, n, mapped, x: Operands, saved: Saved):
  mapped, mapped_saved = mapped
  folded = _fold(x, mapped, n, own_bias=bwd.wanted.dbias)
  rows = lambda name: _fold_rows(
      getattr(saved, name), getattr(mapped_saved, name), n)
  lse = lambda name: _fold_lse(
      getattr(saved, name), getattr(mapped_saved, name), n, folded.packed)
  grads = op(folded, Saved(
      rows("dout"), rows("out"), lse("lse"), lse("dlse"), rows("p"),
      rows("bits")))
  grads = Grads(*(_unfold_rows(t, n) for t in grads))
  if grads.dbias is not None and x.bias.shape[-4] == 1:
    grads = grads._replace(dbias=jnp.sum(grads.dbias, axis=1, keepdims=True))
  return grads


# -----------------------------------------------------------------------------
# Sharding: batch and heads partition; rows of queries, "r", where rows.py has a
# way, and then gradients of keys, "c". Keys and head_dim are gathered. Query
# heads of one group follow their key head.

_SPLIT = ("b", "h", "n", "r", "c")


def _head_names(x: Operands) -> tuple[str, str]:
  """Names of the query and key head dimensions in the sharding rule.

  Grouped heads are two names: one compound dimension (h g) would be right too,
  but lets a mesh axis that does not divide h be split between h and g.
  """
  return ("h", "h") if x.q.shape[-2] == x.k.shape[-2] else ("h", "n")


def _rows_name(cfg: Config, x: Operands) -> str:
  if rows.may_divide(cfg, x):
    return "r"
  return "tq" if x.packed else "sq"


def _specs(cfg: Config, x: Operands):
  """Names of the dimensions of every operand; see partition.py."""
  hq, hk = _head_names(x)
  b = () if x.packed else ("b",)
  sq, sk = _rows_name(cfg, x), "tk" if x.packed else "sk"
  each = ("_",) if x.packed else ("b",)
  spec = Operands(
      q=(*b, sq, hq, "d"), k=(*b, sk, hk, "d"), v=(*b, sk, hk, "e"),
      cu_seqlens_q=("_",), cu_seqlens_k=("_",), cu_seqlens_q_padded=("_",),
      cu_seqlens_k_padded=("_",), alibi_slopes=(*each, hq), sink=(*each, hq),
      dropout_state=(*each, hq, "_"))
  planes = lambda t: t is not None and tuple(
      "_" if n == 1 else name for n, name in zip(t.shape, ("b", hq, sq, sk)))
  spec = spec._replace(bias=planes(x.bias), mask=planes(x.mask))
  return Operands(*(None if t is None else s for t, s in zip(x, spec)))


def _result_specs(cfg: Config, x: Operands, keep_p: bool):
  """As _specs, for (out, lse, p or bits)."""
  h, _ = _head_names(x)
  sq = _rows_name(cfg, x)
  kept = ("b", h, "_") if cfg.keep_bits else None
  return ((*_specs(cfg, x).q[:-1], "e"), (h, sq) if x.packed else ("b", h, sq),
          ("b", h, sq, "sk") if keep_p else kept)


def _saved_specs(cfg: Config, x: Operands, saved: Saved):
  out, lse, kept = _result_specs(cfg, x, saved.p is not None)
  p, bits = (None, kept) if cfg.keep_bits else (kept, None)
  return Saved(out, out, lse, None if saved.dlse is None else lse, p, bits)


def _grads_specs(bwd: BwdConfig, x: Operands):
  wanted, spec = bwd.wanted, _specs(bwd.mha, x)
  divided = rows.may_divide(bwd.mha, x)
  keys = lambda names: tuple(
      "c" if n in ("sk", "tk") and divided else n for n in names)
  return Grads(
      spec.q, keys(spec.k), keys(spec.v), spec.bias if wanted.dbias else None,
      spec.sink if wanted.dsink else None,
      spec.alibi_slopes if wanted.dslopes else None)


class _Split(NamedTuple):
  """How a call is divided: mesh axes of the batch, of the heads and of rows.

  `shared_kv` says that every shard holds all key heads and reads one of them.
  """
  batch: tuple[str, ...]
  heads: tuple[str, ...]
  shared_kv: bool
  rows: tuple[str, ...] = ()
  key_grads: tuple[str, ...] = ()

  @property
  def axes(self) -> dict[str, tuple[str, ...]]:
    """Mesh axes of the dimensions in _specs; "n" is there if hk < hq."""
    return {"b": self.batch, "h": self.heads,
            "n": () if self.shared_kv else self.heads, "r": self.rows,
            "c": self.key_grads}


def _choose_split(mesh, cfg: Config, x: Operands) -> _Split:
  """The division that q's, or else k's, sharding suggests and sizes allow."""
  size = lambda axes: math.prod(mesh.shape[a] for a in axes)

  def axes_of(dim):
    return mesh_axes(x.q.sharding.spec[dim]) or mesh_axes(
        x.k.sharding.spec[dim])

  batch = () if x.packed else axes_of(0)
  heads = tuple(a for a in axes_of(x.q.ndim - 2) if a not in batch)
  hq, hk = x.q.shape[-2], x.k.shape[-2]
  if not x.packed and x.q.shape[0] % size(batch):
    batch = ()
  n = size(heads)
  shared_kv = hk % n != 0
  if shared_kv and (hq % n or (hq // hk) % (hq // n)):
    heads, shared_kv = (), False
  along = ()
  if rows.may_divide(cfg, x):
    axis = rows.axis_of(x)
    along = mesh_axes(x.q.sharding.spec[axis])
    if x.q.shape[axis] % size(along) or {*along} & {*batch, *heads}:
      along = ()
  return _Split(batch, heads, shared_kv, along, along if along and
                rows.keys_divide(mesh, along, x) else ())


def _localise(mesh, split: _Split, x: Operands, hq: int, hk: int):
  """Cuts out what a shard needs of operands that every shard holds whole.

  Args:
    mesh: the mesh.
    split: the division.
    x: the shard's operands.
    hq: query heads of the whole call.
    hk: key heads of the whole call.

  Returns:
    The operands of the shard's own call, and its key head if `shared_kv`.
  """
  if not x.packed and split.batch:
    def local(cu):
      if cu is None:
        return None
      b = x.q.shape[0]
      return lax.dynamic_slice_in_dim(
          cu, rows.shard_index(mesh, split.batch) * np.int32(b), b + 1)
    x = x._replace(cu_seqlens_q=local(x.cu_seqlens_q),
                   cu_seqlens_k=local(x.cu_seqlens_k))
  kv_head = None
  if split.shared_kv:
    first = rows.shard_index(mesh, split.heads) * np.int32(x.q.shape[-2])
    kv_head = first // np.int32(hq // hk)
    axis = x.k.ndim - 2
    x = x._replace(k=lax.dynamic_slice_in_dim(x.k, kv_head, 1, axis),
                   v=lax.dynamic_slice_in_dim(x.v, kv_head, 1, axis))
  return x, kv_head


def _fwd_plan(cfg: Config, run, mesh, args):
  x, = args
  split = _choose_split(mesh, cfg, x)
  hq, hk = x.q.shape[-2], x.k.shape[-2]
  if split.rows:
    run = functools.partial(rows.forward, cfg, run, mesh, split.rows)
  return split.axes, lambda x: run(_localise(mesh, split, x, hq, hk)[0])


def _bwd_plan(bwd: BwdConfig, run, mesh, args):
  x, _ = args
  split = _choose_split(mesh, bwd.mha, x)
  hq, hk = x.q.shape[-2], x.k.shape[-2]
  if split.rows:
    run = functools.partial(rows.backward, bwd.mha, run, mesh, split.rows)
  # A bias that broadcasts over a sharded dimension collects its gradient.
  bias_axes = ()
  if bwd.wanted.dbias:
    bias_axes = ((split.batch if x.bias.shape[0] == 1 else ()) +
                 (split.heads if x.bias.shape[1] == 1 else ()))

  def lower(x, saved):
    x, kv_head = _localise(mesh, split, x, hq, hk)
    grads = run(x, saved)
    if bias_axes:
      grads = grads._replace(dbias=lax.psum(grads.dbias, bias_axes))
    if split.shared_kv:
      def collect(part):
        axis = part.ndim - 2
        shape = (*part.shape[:axis], hk, part.shape[-1])
        wide = jnp.promote_types(part.dtype, jnp.float32)
        whole = lax.dynamic_update_slice_in_dim(
            jnp.zeros(shape, wide), part.astype(wide), kv_head, axis)
        return lax.psum(whole, split.heads).astype(part.dtype)
      grads = grads._replace(dk=collect(grads.dk), dv=collect(grads.dv))
    return grads

  return split.axes, lower


# -----------------------------------------------------------------------------
# Operators

# (Config, Operands) -> (out, lse, probabilities or dropout's bits or None)
mha_fwd = operator(
    target="mha_fwd", kernel=_fwd_kernel, reference=reference.mha_fwd,
    formula=functools.partial(reference.mha_fwd, every_block=True),
    specs=lambda cfg, x: (
        (_specs(cfg, x),), _result_specs(cfg, x, cfg.keep_p)),
    split=_SPLIT,
    serves=_fwd_serves, dtypes=_DTYPES,
    batch=_fwd_batch, plan=_fwd_plan)

dispatch.declare(_ONE_PASS, _DSCORES)
# (BwdConfig, Operands, Saved) -> Grads
mha_bwd = operator(
    target="mha_bwd", kernel=_bwd_kernel,
    reference=lambda bwd, x, saved: reference.mha_bwd(*bwd, x, saved),
    formula=lambda bwd, x, saved: reference.mha_bwd(
        *bwd, x, saved, every_block=True),
    specs=lambda bwd, x, saved: (
        (_specs(bwd.mha, x), _saved_specs(bwd.mha, x, saved)),
        _grads_specs(bwd, x)),
    split=_SPLIT,
    serves=lambda bwd, x, saved: _serves(
        "mha_bwd", bwd.mha, x, bwd.wanted, saved.dlse is not None),
    dtypes=_DTYPES, batch=_bwd_batch, plan=_bwd_plan)


def _keeps_p(cfg: Config, x: Operands) -> bool:
  """Whether the forward pass keeps its probabilities for the backward pass.

  No kernel does. Where there is no GPU, a few short sequences of float32 are
  faster so: it is what differentiating the plain formula does.
  """
  gpu = any(map(dispatch.architectures, dispatch.PLATFORMS))
  return (x.q.dtype.itemsize > 2 and not gpu and cfg.logits_soft_cap == 0
          and not x.packed and reference.is_small(x))


def _keeps_bits(cfg: Config, x: Operands) -> bool:
  """Whether the forward pass keeps what dropout keeps for the backward pass.

  Reading a bit takes gradients a fraction of the time of drawing it again. It
  does where kernels read them, and the bits take no more memory than q, k and v
  do, so that it is linear in the length.
  """
  if (x.dropout_state is None or cfg.dropout_p == 0 or x.packed
      or cfg.softmax_scale <= 0 or x.q.dtype.itemsize > 2
      or not all(map(is_known, (*x.q.shape, *x.k.shape)))
      or x.q.shape[-1] > max(_ONE_PASS_DIMS) or x.q.shape[-1] != x.v.shape[-1]
      or not dispatch.architectures("cuda") or decode.few_queries(cfg, x)):
    return False
  return (4 * math.prod(reference.kept_shape(x))
          <= sum(t.size * t.dtype.itemsize for t in x[:3])
          and _has_kernels(_ONE_PASS, "cuda", BwdConfig(cfg, Wanted()), x,
                           False))


def _save(cfg: Config, x: Operands):
  cfg = cfg._replace(keep_p=_keeps_p(cfg, x), keep_bits=_keeps_bits(cfg, x))
  # MaxText's remat policies save what has this name.
  out, lse, kept = jax.tree.map(
      lambda t: checkpoint_name(t, "context"), mha_fwd(cfg, x))
  return (out, lse), (x, out, lse, kept)


def _backward(cfg: Config, wanted, saved, cotangents):
  # Only what is differentiated with respect to gets a gradient kernel.
  wanted, = wanted
  x, out, lse, kept = saved
  keep_bits = kept is not None and kept.dtype == jnp.int32
  p, bits = (None, kept) if keep_bits else (kept, None)
  dout, dlse = cotangents
  if dout is None:
    dout = jnp.zeros_like(out)
  if dlse is not None:
    # A row that sees nothing has no gradient, whatever its -inf turned into.
    dlse = jnp.where(lse == -jnp.inf, 0, dlse)
  grads = mha_bwd(
      BwdConfig(cfg._replace(keep_bits=keep_bits), Wanted(*map(bool, (
          wanted.bias, wanted.sink, wanted.alibi_slopes)))),
      x, Saved(dout, out, lse, dlse, p, bits))
  none = Operands(*[None] * len(x))
  return (none._replace(
      q=grads.dq, k=grads.dk, v=grads.dv, bias=grads.dbias,
      alibi_slopes=grads.dslopes, sink=grads.dsink),)


def _tangent(cfg: Config, saved, tangents):
  x, *_ = saved
  return formula_jvp(
      lambda x: reference.mha_fwd(cfg, x, every_block=True)[:2], (x,), tangents)


# (Config, Operands) -> (out, lse)
mha = differentiable(
    lambda cfg, x: mha_fwd(cfg._replace(inference=True), x)[:2], _backward,
    save=_save, tangent=_tangent)
