# SPDX-License-Identifier: Apache-2.0
"""The attention operator: how JAX differentiates, maps and shards it.

A call passes these layers, each unaware of the ones above it:
  mha              custom_vjp
  _fwd_op, _bwd_op custom_vmap: a mapped axis is folded into the batch
  _partitioned_*   custom_partitioning: batch and heads shard
  ffi.mha_*        kernel or reference
"""

from __future__ import annotations

import functools
import math
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
from jax.ad_checkpoint import checkpoint_name
from jax.custom_batching import custom_vmap
from jax.custom_derivatives import SymbolicZero
from jax.sharding import PartitionSpec

import jax
from jax import lax
from jax._src.aiter.attention import ffi, reference
from jax._src.aiter.attention.types import (
  Config,
  Grads,
  Operands,
  Saved,
  Wanted,
)
from jax._src.aiter.core.partition import in_auto_mode, mesh_axes, partitioned

# -----------------------------------------------------------------------------
# custom_vjp


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def mha(cfg: Config, x: Operands):
  """(out, lse) of the operands, differentiable."""
  return _forward(cfg, x)


def _forward(cfg: Config, x: Operands):
  """(out, lse), sharded as q is, where the mesh has explicit axes."""
  spec = jax.typeof(x.q).sharding.spec
  if x.packed:
    specs = PartitionSpec(spec[0], spec[1], None), PartitionSpec(*spec[1::-1])
  else:
    specs = (PartitionSpec(*spec[:3], None),
             PartitionSpec(spec[0], spec[2], spec[1]))
  return in_auto_mode(
      _fwd_op(cfg), jax.typeof(x.q).sharding.mesh, specs, x)


def _backward(cfg: Config, wanted: Wanted, x: Operands, saved: Saved):
  """Gradients, with those of the slopes summed, each sharded as its operand."""
  def run(x, saved):
    grads = _bwd_op(cfg, wanted)(x, saved)
    if wanted.dslopes:
      grads = grads._replace(dslopes=reference.sum_rows(x, grads.dslopes))
    return grads

  spec = lambda t: jax.typeof(t).sharding.spec
  return in_auto_mode(run, jax.typeof(x.q).sharding.mesh, Grads(
      spec(x.q), spec(x.k), spec(x.v), spec(x.bias) if wanted.dbias else None,
      spec(x.sink) if wanted.dsink else None,
      spec(x.alibi_slopes) if wanted.dslopes else None), x, saved)


def _fwd_rule(cfg: Config, x: Operands):
  # Only what is differentiated with respect to gets a gradient kernel. The
  # choice is static, so it travels as presence or absence of a residual.
  def perturbed(t):
    return () if t is not None and t.perturbed else None

  wanted = (perturbed(x.bias), perturbed(x.sink), perturbed(x.alibi_slopes))
  x = jax.tree.map(lambda t: t.value, x,
                   is_leaf=lambda t: hasattr(t, "perturbed"))
  out, lse = _forward(cfg, x)
  # MaxText's remat policies save what has this name.
  out, lse = checkpoint_name(out, "context"), checkpoint_name(lse, "context")
  return (out, lse), (x, out, lse, wanted)


def _bwd_rule(cfg: Config, residuals, cotangents):
  x, out, lse, wanted = residuals
  wanted = Wanted(*(w is not None for w in wanted))
  dout, dlse = (None if isinstance(t, SymbolicZero) else t for t in cotangents)
  if dout is None:
    dout = jnp.zeros_like(out)
  if dlse is not None:
    # A row that sees nothing has no gradient, whatever its -inf turned into.
    dlse = jnp.where(lse == -jnp.inf, 0, dlse)
  grads = _backward(cfg, wanted, x, Saved(dout, out, lse, dlse))
  dbias = grads.dbias
  return (x._replace(
      q=grads.dq, k=grads.dk, v=grads.dv, cu_seqlens_q=None,
      cu_seqlens_k=None, cu_seqlens_q_padded=None, cu_seqlens_k_padded=None,
      bias=None if dbias is None else dbias.astype(x.bias.dtype),
      alibi_slopes=grads.dslopes, sink=grads.dsink, dropout_state=None),)


mha.defvjp(_fwd_rule, _bwd_rule, symbolic_zeros=True)

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
  lengths = _fold_rows(cu[..., 1:] - cu[..., :-1], mapped, n)
  return jnp.concatenate([jnp.zeros_like(lengths[:1]),
                          jnp.cumsum(lengths, dtype=jnp.int32)])


def _fold_starts(cu, padded, mapped, n: int, total: int):
  """First rows [n?, b + 1] -> [n * b + 1]; every element has its own rows."""
  starts, mapped = (cu, mapped[0]) if padded is None else (padded, mapped[1])
  if not mapped:
    starts = jnp.broadcast_to(starts, (n, *starts.shape))
  at = jnp.arange(n, dtype=jnp.int32)[:, None] * np.int32(total)
  starts = (starts[:, :-1] + at).reshape(-1)
  return jnp.concatenate([starts, jnp.full((1,), n * total, jnp.int32)])


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
  bias = x.bias
  if bias is not None:
    b = x.q.shape[-4]
    per_batch = bias.shape[-4] == b
    if mapped.bias or own_bias or (per_batch and b > 1):
      if not mapped.bias:
        bias = jnp.broadcast_to(bias, (n, *bias.shape))
      if not per_batch:
        bias = jnp.broadcast_to(bias, (n, b, *bias.shape[2:]))
      bias = bias.reshape(n * b, *bias.shape[2:])
  return Operands(
      rows("q"), rows("k"), rows("v"), **lengths, **starts, bias=bias,
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


@functools.cache
def _fwd_op(cfg: Config):
  """The forward operator for a configuration: Operands -> (out, lse)."""
  partitioned = _partitioned_fwd(cfg)

  @custom_vmap
  def mha_fwd(x):
    return partitioned(x)

  @mha_fwd.def_vmap
  def _(n, mapped, x):
    mapped, = mapped
    folded = _fold(x, mapped, n, own_bias=False)
    out, lse = mha_fwd(folded)
    return ((_unfold_rows(out, n), _unfold_lse(lse, n, folded.packed)),
            (True, True))

  return mha_fwd


@functools.cache
def _bwd_op(cfg: Config, wanted: Wanted):
  """The backward operator: Operands, Saved -> Grads."""
  partitioned = _partitioned_bwd(cfg, wanted)

  @custom_vmap
  def mha_bwd(x, saved):
    return partitioned(x, saved)

  @mha_bwd.def_vmap
  def _(n, mapped, x, saved):
    mapped, mapped_saved = mapped
    folded = _fold(x, mapped, n, own_bias=wanted.dbias)
    packed = folded.packed
    grads = mha_bwd(folded, Saved(
        _fold_rows(saved.dout, mapped_saved.dout, n),
        _fold_rows(saved.out, mapped_saved.out, n),
        _fold_lse(saved.lse, mapped_saved.lse, n, packed),
        _fold_lse(saved.dlse, mapped_saved.dlse, n, packed)))
    dbias = _unfold_rows(grads.dbias, n)
    if dbias is not None and x.bias.shape[-4] == 1:
      dbias = jnp.sum(dbias, axis=1, keepdims=True)
    grads = Grads(
        _unfold_rows(grads.dq, n), _unfold_rows(grads.dk, n),
        _unfold_rows(grads.dv, n), dbias, _unfold_rows(grads.dsink, n),
        _unfold_lse(grads.dslopes, n, packed))
    return grads, jax.tree.map(lambda _: True, grads)

  return mha_bwd


# -----------------------------------------------------------------------------
# Sharding: batch and heads partition; a packed call by heads alone. Sequence
# and head_dim are gathered. Query heads of one group follow their key head.

_SPLIT = ("b", "h", "n")


def _head_names(x: Operands) -> tuple[str, str]:
  """Names of the query and key head dimensions in the sharding rule.

  Grouped heads are two names: one compound dimension (h g) would be right too,
  but lets a mesh axis that does not divide h be split between h and g.
  """
  return ("h", "h") if x.q.shape[-2] == x.k.shape[-2] else ("h", "n")


def _specs(x: Operands):
  """Names of the dimensions of every operand; see partition.py."""
  hq, hk = _head_names(x)
  b = () if x.packed else ("b",)
  sq, sk = ("tq", "tk") if x.packed else ("sq", "sk")
  rows = ("_",) if x.packed else ("b",)
  spec = Operands(
      q=(*b, sq, hq, "d"), k=(*b, sk, hk, "d"), v=(*b, sk, hk, "e"),
      cu_seqlens_q=("_",), cu_seqlens_k=("_",), cu_seqlens_q_padded=("_",),
      cu_seqlens_k_padded=("_",), alibi_slopes=(*rows, hq), sink=(*rows, hq),
      dropout_state=(*rows, hq, "_"))
  if x.bias is not None:
    spec = spec._replace(bias=(
        "_" if x.bias.shape[0] == 1 else "b",
        "_" if x.bias.shape[1] == 1 else hq, "sq", "sk"))
  return Operands(*(None if t is None else s for t, s in zip(x, spec)))


def _result_specs(x: Operands):
  """As _specs, for (out, lse)."""
  h, _ = _head_names(x)
  return (*_specs(x).q[:-1], "e"), ((h, "tq") if x.packed else ("b", h, "sq"))


def _saved_specs(x: Operands, saved: Saved):
  out, lse = _result_specs(x)
  return Saved(out, out, lse, None if saved.dlse is None else lse)


def _grads_specs(x: Operands, wanted: Wanted):
  spec = _specs(x)
  return Grads(
      spec.q, spec.k, spec.v, spec.bias if wanted.dbias else None,
      spec.sink if wanted.dsink else None,
      _result_specs(x)[1] if wanted.dslopes else None)


class _Split(NamedTuple):
  """How a call is divided: mesh axes of the batch and of the heads.

  `shared_kv` says that every shard holds all key heads and reads one of them.
  """
  batch: tuple[str, ...]
  heads: tuple[str, ...]
  shared_kv: bool

  @property
  def axes(self) -> dict[str, tuple[str, ...]]:
    """Mesh axes of the dimensions in _specs; "n" is there if hk < hq."""
    return {"b": self.batch, "h": self.heads,
            "n": () if self.shared_kv else self.heads}


def _choose_split(mesh, x: Operands) -> _Split:
  """The division that q's, or else k's, sharding suggests and heads allow."""
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
  if hk % n == 0:
    return _Split(batch, heads, False)
  if hq % n == 0 and (hq // hk) % (hq // n) == 0:
    return _Split(batch, heads, True)
  return _Split(batch, (), False)


def _shard_index(mesh, axes):
  """Linear index of this shard along a dimension sharded over axes."""
  index = jnp.int32(0)
  for a in axes:
    here = lax.axis_index(a).astype(jnp.int32)
    index = index * np.int32(mesh.shape[a]) + here
  return index


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
          cu, _shard_index(mesh, split.batch) * np.int32(b), b + 1)
    x = x._replace(cu_seqlens_q=local(x.cu_seqlens_q),
                   cu_seqlens_k=local(x.cu_seqlens_k))
  kv_head = None
  if split.shared_kv:
    first = _shard_index(mesh, split.heads) * np.int32(x.q.shape[-2])
    kv_head = first // np.int32(hq // hk)
    axis = x.k.ndim - 2
    x = x._replace(k=lax.dynamic_slice_in_dim(x.k, kv_head, 1, axis),
                   v=lax.dynamic_slice_in_dim(x.v, kv_head, 1, axis))
  return x, kv_head


@functools.cache
def _partitioned_fwd(cfg: Config):
  fun = functools.partial(ffi.mha_fwd, cfg)

  def plan(mesh, args):
    x, = args
    split = _choose_split(mesh, x)
    hq, hk = x.q.shape[-2], x.k.shape[-2]

    def lower(x):
      return fun(_localise(mesh, split, x, hq, hk)[0])

    return split.axes, lower

  return lambda x: partitioned(
      fun, (_specs(x),), _result_specs(x), _SPLIT, plan)(x)


@functools.cache
def _partitioned_bwd(cfg: Config, wanted: Wanted):
  fun = functools.partial(ffi.mha_bwd, cfg, wanted)

  def plan(mesh, args):
    x, _ = args
    split = _choose_split(mesh, x)
    hq, hk = x.q.shape[-2], x.k.shape[-2]
    # A bias that broadcasts over a sharded dimension collects its gradient.
    bias_axes = ()
    if wanted.dbias:
      bias_axes = ((split.batch if x.bias.shape[0] == 1 else ()) +
                   (split.heads if x.bias.shape[1] == 1 else ()))

    def lower(x, saved):
      whole_kv = x.k.shape, x.v.shape
      x, kv_head = _localise(mesh, split, x, hq, hk)
      grads = fun(x, saved)
      if bias_axes:
        grads = grads._replace(dbias=lax.psum(grads.dbias, bias_axes))
      if split.shared_kv:
        def collect(part, shape):
          axis = part.ndim - 2
          wide = jnp.promote_types(part.dtype, jnp.float32)
          whole = lax.dynamic_update_slice_in_dim(
              jnp.zeros(shape, wide), part.astype(wide), kv_head, axis)
          return lax.psum(whole, split.heads).astype(part.dtype)
        grads = grads._replace(dk=collect(grads.dk, whole_kv[0]),
                               dv=collect(grads.dv, whole_kv[1]))
      return grads

    return split.axes, lower

  return lambda x, saved: partitioned(
      fun, (_specs(x), _saved_specs(x, saved)), _grads_specs(x, wanted),
      _SPLIT, plan)(x, saved)
