# SPDX-License-Identifier: Apache-2.0
"""Multi-head attention: the public functions and how JAX transforms them.

A call passes these layers, each unaware of the ones above it:
  flash_attn_func, flash_attn_varlen, dot_product_attention
                      Python values checked, everything else inside one jit
  _attend             arrays checked and brought to the operator's form
  _mha                custom_vjp
  _fwd_op, _bwd_op    custom_vmap: a mapped axis is folded into the batch
  _partitioned        custom_partitioning: batch and heads shard
  ffi.mha_fwd/bwd     kernel or reference
"""

from __future__ import annotations

import functools
import math
import numbers
from typing import Any, NamedTuple

import jax
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jax.custom_batching import custom_vmap
from jax.custom_derivatives import SymbolicZero
from jax.experimental.custom_partitioning import custom_partitioning
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec
import numpy as np

from jax._src.aiter import ffi
from jax._src.aiter import philox
from jax._src.aiter import reference
from jax._src.aiter.types import Config, Grads, Operands, Saved, Wanted

_MAX_HEAD_DIM = 256
_DTYPES = ("float16", "bfloat16", "float32", "float64")

# -----------------------------------------------------------------------------
# custom_vjp


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _mha(cfg: Config, x: Operands):
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
  return _in_auto_mode(_fwd_op(cfg), specs, x)


def _backward(cfg: Config, wanted: Wanted, x: Operands, saved: Saved):
  """Gradients, with those of the slopes summed, each sharded as its operand."""
  def run(x, saved):
    grads = _bwd_op(cfg, wanted)(x, saved)
    if wanted.dslopes:
      grads = grads._replace(dslopes=reference.sum_rows(x, grads.dslopes))
    return grads

  spec = lambda t: jax.typeof(t).sharding.spec
  return _in_auto_mode(run, Grads(
      spec(x.q), spec(x.k), spec(x.v), spec(x.bias) if wanted.dbias else None,
      spec(x.sink) if wanted.dsink else None,
      spec(x.alibi_slopes) if wanted.dslopes else None), x, saved)


def _in_auto_mode(fun, specs, *args):
  """fun(*args), with a mesh's explicit axes automatic inside.

  Shardings are then left to the partitioner below rather than to types.

  Args:
    fun: a function.
    specs: PartitionSpecs of its results.
    *args: its arguments, of which the first are Operands.

  Returns:
    The results.
  """
  mesh = jax.typeof(args[0].q).sharding.mesh
  if jax.sharding.AxisType.Explicit not in mesh.axis_types:
    return fun(*args)
  shardings = jax.tree.map(lambda s: NamedSharding(mesh, s), specs,
                           is_leaf=lambda s: isinstance(s, PartitionSpec))
  return jax.sharding.auto_axes(fun, out_sharding=shardings)(*args)


def _mha_fwd_rule(cfg: Config, x: Operands):
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


def _mha_bwd_rule(cfg: Config, residuals, cotangents):
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


_mha.defvjp(_mha_fwd_rule, _mha_bwd_rule, symbolic_zeros=True)

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
  """First rows [n?, b + 1] -> [n * b + 1] where element i has rows of its own."""
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


@functools.lru_cache(maxsize=None)
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


@functools.lru_cache(maxsize=None)
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


def _head_names(x: Operands) -> tuple[str, str]:
  """Names of the query and key head dimensions in the sharding rule.

  Grouped heads are two names: one compound dimension (h g) would be right too,
  but lets a mesh axis that does not divide h be split between h and g.
  """
  return ("h", "h") if x.q.shape[-2] == x.k.shape[-2] else ("h", "n")


def _specs(x: Operands, heads: tuple[str, str], batch: str):
  """Names of the dimensions of every operand; '_' is a lonely one."""
  hq, hk = heads
  b = () if x.packed else (batch,)
  sq, sk = ("tq", "tk") if x.packed else ("sq", "sk")
  rows = ("_",) if x.packed else (batch,)
  spec = Operands(
      q=(*b, sq, hq, "d"), k=(*b, sk, hk, "d"), v=(*b, sk, hk, "e"),
      cu_seqlens_q=("_",), cu_seqlens_k=("_",), cu_seqlens_q_padded=("_",),
      cu_seqlens_k_padded=("_",), alibi_slopes=(*rows, hq), sink=(*rows, hq),
      dropout_state=(*rows, hq, "_"))
  if x.bias is not None:
    spec = spec._replace(bias=(
        "_" if x.bias.shape[0] == 1 else batch,
        "_" if x.bias.shape[1] == 1 else hq, "sq", "sk"))
  return Operands(*(None if t is None else s for t, s in zip(x, spec)))


def _lse_spec(x: Operands, hq: str, batch: str):
  return (hq, "tq") if x.packed else (batch, hq, "sq")


def _result_specs(x: Operands, wanted: Wanted | None, heads, batch):
  """As _specs, for (out, lse), or for Grads if `wanted` is given."""
  spec = _specs(x, heads, batch)
  lse = _lse_spec(x, heads[0], batch)
  if wanted is None:
    return (*spec.q[:-1], "e"), lse
  return Grads(
      spec.q, spec.k, spec.v, spec.bias if wanted.dbias else None,
      spec.sink if wanted.dsink else None, lse if wanted.dslopes else None)


def _saved_specs(x: Operands, saved: Saved, heads, batch):
  spec = _specs(x, heads, batch)
  lse = _lse_spec(x, heads[0], batch)
  out = (*spec.q[:-1], "e")
  return Saved(out, out, lse, None if saved.dlse is None else lse)


def _is_spec(t) -> bool:
  return type(t) is tuple and all(isinstance(n, str) for n in t)


def _einsum_rule(args, results) -> tuple[str, tuple[str, ...]]:
  """The sharding rule in JAX's notation, and the names to replicate."""
  lonely = 0
  fixed = []

  def words(spec):
    nonlocal lonely
    out = []
    for name in spec:
      if name == "_":
        name = f"u{lonely}"
        lonely += 1
      if name not in ("b", "h", "n") and name not in fixed:
        fixed.append(name)
      out.append(name)
    return " ".join(out)

  sides = [", ".join(words(s) for s in jax.tree.leaves(side, is_leaf=_is_spec))
           for side in (args, results)]
  return " -> ".join(sides), tuple(fixed)


class _Split(NamedTuple):
  """How a call is divided: mesh axes of the batch and of the heads.

  `shared_kv` says that every shard holds all key heads and reads one of them.
  """
  batch: tuple[str, ...]
  heads: tuple[str, ...]
  shared_kv: bool


def _axes(entry) -> tuple[str, ...]:
  """Mesh axes of an entry of a PartitionSpec."""
  if entry is None:
    return ()
  return tuple(entry) if isinstance(entry, tuple) else (entry,)


def _choose_split(mesh, x: Operands) -> _Split:
  """The division that q's, or else k's, sharding suggests and heads allow."""
  size = lambda axes: math.prod(mesh.shape[a] for a in axes)

  def axes_of(dim):
    return _axes(x.q.sharding.spec[dim]) or _axes(x.k.sharding.spec[dim])

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


def _to_shardings(mesh, split: _Split, specs):
  """Shardings for specs whose head names are 'hq' and 'hk'."""
  names = {"b": split.batch or None, "hq": split.heads or None,
           "hk": None if split.shared_kv else split.heads or None}
  return jax.tree.map(
      lambda s: NamedSharding(mesh, PartitionSpec(*(names.get(n) for n in s))),
      specs, is_leaf=_is_spec)


def _shard_index(mesh, axes):
  """Linear index of this shard along a dimension sharded over axes."""
  index = jnp.int32(0)
  for a in axes:
    index = index * np.int32(mesh.shape[a]) + lax.axis_index(a).astype(jnp.int32)
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


@functools.lru_cache(maxsize=None)
def _partitioned_fwd(cfg: Config):
  def mha_fwd(x):
    return ffi.mha_fwd(cfg, x)

  def partition(mesh, args, results):
    del results
    x, = args
    split = _choose_split(mesh, x)
    hq, hk = x.q.shape[-2], x.k.shape[-2]
    names = ("hq", "hk")

    def lower(x):
      x, _ = _localise(mesh, split, x, hq, hk)
      return ffi.mha_fwd(cfg, x)

    return (mesh, _in_plain_types(lower),
            _to_shardings(mesh, split, _result_specs(x, None, names, "b")),
            (_to_shardings(mesh, split, _specs(x, names, "b")),))

  return _with_rule(mha_fwd, partition, None)


@functools.lru_cache(maxsize=None)
def _partitioned_bwd(cfg: Config, wanted: Wanted):
  def mha_bwd(x, saved):
    return ffi.mha_bwd(cfg, wanted, x, saved)

  def partition(mesh, args, results):
    del results
    x, saved = args
    split = _choose_split(mesh, x)
    hq, hk = x.q.shape[-2], x.k.shape[-2]
    names = ("hq", "hk")
    # A bias that broadcasts over a sharded dimension collects its gradient.
    bias_axes = ()
    if wanted.dbias:
      bias_axes = ((split.batch if x.bias.shape[0] == 1 else ()) +
                   (split.heads if x.bias.shape[1] == 1 else ()))

    def lower(x, saved):
      whole_kv = x.k.shape, x.v.shape
      x, kv_head = _localise(mesh, split, x, hq, hk)
      grads = ffi.mha_bwd(cfg, wanted, x, saved)
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

    return (mesh, _in_plain_types(lower),
            _to_shardings(mesh, split, _result_specs(x, wanted, names, "b")),
            (_to_shardings(mesh, split, _specs(x, names, "b")),
             _to_shardings(mesh, split, _saved_specs(x, saved, names, "b"))))

  return _with_rule(mha_bwd, partition, wanted)


def _in_plain_types(lower):
  """`lower`, for JAX to trace under a context mesh of explicit axes.

  A partitioned function sees one shard's arrays, so types that speak of meshes
  have no place in it; the partitioner rejects what they lower to.
  """
  def wrapped(*args):
    mesh = jax.sharding.get_abstract_mesh()
    if jax.sharding.AxisType.Explicit not in mesh.axis_types:
      return lower(*args)
    auto = jax.sharding.AbstractMesh(
        mesh.axis_sizes, mesh.axis_names,
        (jax.sharding.AxisType.Auto,) * len(mesh.axis_names))
    with jax.sharding.use_abstract_mesh(auto):
      args = jax.tree.map(
          lambda t: jax.sharding.reshard(t, PartitionSpec()), args)
      return lower(*args)

  return wrapped


def _with_rule(fun, partition, wanted: Wanted | None):
  """`fun`, partitioned by a sharding rule made for its arguments' shapes."""
  def call(*args):
    x = args[0]
    names = _head_names(x)
    specs = [_specs(x, names, "b")]
    if wanted is not None:
      specs.append(_saved_specs(x, args[1], names, "b"))
    rule, fixed = _einsum_rule(specs, _result_specs(x, wanted, names, "b"))
    op = custom_partitioning(fun)
    op.def_partition(partition, sharding_rule=rule,
                     need_replication_factors=fixed)
    return op(*args)

  return call


# -----------------------------------------------------------------------------
# Arguments


class _Call(NamedTuple):
  """What a public function was called with, apart from arrays; hashable.

  `names` are the caller's names of q, k, v and the two lengths.
  """
  function: str
  softmax_scale: float | None
  dropout_p: float
  causal: bool
  window: tuple[int, int, int]
  logits_soft_cap: float
  deterministic: bool
  top_left: bool = False
  min_seqlen_q: int = 0
  return_lse: bool = False
  return_attn_probs: bool = False
  names: tuple[str, ...] = ("q", "k", "v", "cu_seqlens_q", "cu_seqlens_k")


def _bad(function: str, name: str, given: Any, accepted: str,
         error: type[Exception] = ValueError) -> Exception:
  return error(f"{function}: {name} is {given}; accepted is {accepted}")


def _number(function, name, value, accepted, allowed, kind=float):
  """A Python number from a static argument, or an error."""
  if isinstance(value, jax.core.Tracer):
    raise _bad(function, name, "a traced value",
               f"{accepted}, known while tracing", TypeError)
  wanted = numbers.Integral if kind is int else numbers.Real
  if hasattr(value, "item") and getattr(value, "shape", None) == ():
    value = value.item()
  if not isinstance(value, wanted) or isinstance(value, bool):
    raise _bad(function, name, repr(value), accepted, TypeError)
  value = kind(value)
  if not allowed(value):
    raise _bad(function, name, repr(value), accepted)
  return value


def _flag(function, name, value) -> bool:
  if isinstance(value, (bool, np.bool_)):
    return bool(value)
  raise _bad(function, name, repr(value), "a bool", TypeError)


def _static_arguments(function, dropout_p, softmax_scale, causal, window_size,
                      logits_soft_cap, deterministic, **others) -> _Call:
  """Checks everything that is not an array."""
  number = functools.partial(_number, function)
  accepted = ("(left, right) or (left, right, sink_tokens), integers, each side"
              " >= 0 or -1 for unbounded, sink_tokens >= 0")
  try:
    window = tuple(window_size)
  except TypeError:
    raise _bad(function, "window_size", repr(window_size), accepted,
               TypeError) from None
  if len(window) not in (2, 3):
    raise _bad(function, "window_size", repr(window_size), accepted)
  left, right = (number("window_size", w, accepted, lambda w: w >= -1, int)
                 for w in window[:2])
  sink_tokens = number("window_size", window[2], accepted, lambda w: w >= 0,
                       int) if len(window) == 3 else 0
  # float32, as the kernels get it: the mask's threshold is the same everywhere.
  dropout_p = number("dropout_p", dropout_p, "0 <= dropout_p < 1",
                     lambda p: 0 <= p and np.float32(p) < 1)
  if softmax_scale is not None:
    softmax_scale = number("softmax_scale", softmax_scale,
                           "None or a finite number", math.isfinite)
  return _Call(
      function, softmax_scale, float(np.float32(dropout_p)),
      _flag(function, "causal", causal), (left, right, sink_tokens),
      number("logits_soft_cap", logits_soft_cap, "0 for none or a number > 0",
             lambda c: 0 <= c < math.inf),
      _flag(function, "deterministic", deterministic), **others)


def _check_is_array(function, name, value, optional=True):
  if value is None and optional:
    return
  if not (hasattr(value, "shape") and hasattr(value, "dtype")):
    raise _bad(function, name, f"a {type(value).__name__}", "an array",
               TypeError)


def _describe(t) -> str:
  return f"{t.dtype}{list(t.shape)}"


def _check_qkv(call: _Call, q, k, v, packed: bool):
  """Types and shapes of q, k and v."""
  nq, nk, nv = call.names[:3]
  layout = "[total, heads, head_dim]" if packed else "[b, s, heads, head_dim]"
  for name, t in zip(call.names, (q, k, v)):
    if t.dtype.name not in _DTYPES:
      raise _bad(call.function, f"{name}'s dtype", t.dtype,
                 " or ".join(_DTYPES), TypeError)
    if t.ndim != (3 if packed else 4):
      raise _bad(call.function, name, _describe(t), f"rank {3 if packed else 4}"
                 f" {layout}")
  if not q.dtype == k.dtype == v.dtype:
    raise _bad(call.function, f"the dtype of {nq}, {nk}, {nv}",
               f"{q.dtype}, {k.dtype}, {v.dtype}", "one dtype for all three",
               TypeError)
  if k.shape[:-1] != v.shape[:-1]:
    raise _bad(call.function, nv, _describe(v),
               f"{list(k.shape[:-1])} + [head_dim], as {nk}")
  if q.shape[-1] != k.shape[-1]:
    raise _bad(call.function, f"{nk}'s head_dim", k.shape[-1],
               f"{q.shape[-1]}, as {nq}")
  if not packed and q.shape[0] != k.shape[0]:
    raise _bad(call.function, f"{nk}'s batch", k.shape[0],
               f"{q.shape[0]}, as {nq}")
  for name, t in ((nq, q), (nv, v)):
    if not 1 <= t.shape[-1] <= _MAX_HEAD_DIM:
      raise _bad(call.function, f"{name}'s head_dim", t.shape[-1],
                 f"1 to {_MAX_HEAD_DIM}")
  hq, hk = q.shape[-2], k.shape[-2]
  if hq < 1 or hk < 1 or hq % hk:
    raise _bad(call.function, f"heads of {nq} and {nk}", f"{hq} and {hk}",
               f"a number of {nq} heads that is a multiple of {nk}'s")


def _check_lengths(call: _Call, name: str, cu, size: int | None):
  if cu is None:
    return None
  if not jnp.issubdtype(cu.dtype, jnp.integer):
    raise _bad(call.function, f"{name}'s dtype", cu.dtype, "an integer dtype",
               TypeError)
  if cu.ndim != 1 or cu.shape[0] < 1 or size not in (None, cu.shape[0]):
    raise _bad(call.function, name, _describe(cu),
               f"shape [{'b + 1' if size is None else size}]")
  return cu.astype(jnp.int32)


def _check_per_head(call: _Call, name: str, t, b: int, hq: int):
  """float32 [b, hq] from [hq] or [b, hq]."""
  if t is None:
    return None
  if not jnp.issubdtype(t.dtype, jnp.floating):
    raise _bad(call.function, f"{name}'s dtype", t.dtype, "a floating dtype",
               TypeError)
  if t.shape not in ((hq,), (b, hq)):
    raise _bad(call.function, name, _describe(t),
               f"shape [{hq}] or [{b}, {hq}]")
  return jnp.broadcast_to(t.astype(jnp.float32), (b, hq))


def _check_bias(call: _Call, bias, q, k):
  """Bias as [1 | b, 1 | hq, sq, sk] in q's dtype or float32."""
  if bias is None:
    return None
  full = (q.shape[0], q.shape[2], q.shape[1], k.shape[1])
  if not jnp.issubdtype(bias.dtype, jnp.floating):
    raise _bad(call.function, "bias's dtype", bias.dtype, "a floating dtype",
               TypeError)
  shape = (1,) * (4 - bias.ndim) + tuple(bias.shape)
  if not 2 <= bias.ndim <= 4 or any(
      n not in (1, m) for n, m in zip(shape, full)):
    raise _bad(call.function, "bias", _describe(bias),
               f"[sq, sk], [hq, sq, sk] or [b, hq, sq, sk] that broadcasts to"
               f" {list(full)}")
  bias = bias.reshape(shape)
  if bias.dtype not in (q.dtype, jnp.float32):
    bias = bias.astype(jnp.promote_types(q.dtype, jnp.float32))
  return jnp.broadcast_to(bias, (*shape[:2], *full[2:]))


def _dropout_state(call: _Call, key, b: int, hq: int):
  """uint32 [b, hq, 4] from a PRNG key, or None without dropout."""
  if key is not None:
    typed = jnp.issubdtype(key.dtype, jax.dtypes.prng_key)
    if not typed and key.dtype != jnp.uint32:
      raise _bad(call.function, "dropout_key's dtype", key.dtype,
                 "a PRNG key, as jax.random.key makes it", TypeError)
    if key.ndim != (0 if typed else 1):
      raise _bad(call.function, "dropout_key", _describe(key), "a single key")
  if call.dropout_p == 0.0:
    return None
  if key is None:
    raise _bad(call.function, "dropout_key", None,
               f"a PRNG key whenever dropout_p > 0 (it is {call.dropout_p:g})")
  words = jnp.broadcast_to(jax.random.bits(key, (2,), jnp.uint32), (b, hq, 2))
  counter = functools.partial(lax.broadcasted_iota, jnp.uint32, (b, hq, 1))
  return jnp.concatenate([words, counter(0), counter(1)], axis=-1)


def _config(call: _Call, x: Operands) -> Config:
  """The static configuration, with windows that hide nothing removed."""
  left, right, sink_tokens = call.window
  if call.causal:
    right = 0
  sq, sk = ((t.shape[0 if x.packed else 1]) for t in (x.q, x.k))
  plain = not x.packed and x.cu_seqlens_q is None and x.cu_seqlens_k is None
  top_left = call.top_left and not (plain and sq == sk)
  if left >= max(sq, sk):
    left = -1
  if right >= max(sq, sk) or (plain and not top_left and right >= sq - 1):
    right = -1
  return Config(
      softmax_scale=(1 / math.sqrt(x.q.shape[-1])
                     if call.softmax_scale is None else call.softmax_scale),
      logits_soft_cap=call.logits_soft_cap, dropout_p=call.dropout_p,
      window_left=left, window_right=right,
      sink_tokens=sink_tokens if left >= 0 else 0,
      top_left=top_left and (
          left >= 0 or right >= 0 or x.alibi_slopes is not None),
      min_seqlen_q=call.min_seqlen_q, deterministic=call.deterministic)


def _vary_together(x: Operands) -> Operands:
  """Inside shard_map, lets all operands vary over the axes that one does.

  The cast's transpose sums the gradient of what all shards share.
  """
  return Operands(*(
      None if t is None else functools.reduce(
          lambda t, like: t if like is None else reference.vary_like(t, like),
          x, t) for t in x))


@functools.partial(jax.jit, static_argnums=0, inline=True)
def _attend(call: _Call, packed_cu, dropout_key, q, k, v, cu_seqlens_q,
            cu_seqlens_k, bias, alibi_slopes, sink):
  """Everything that happens while tracing; arguments as the user gave them.

  Args:
    call: what is not an array.
    packed_cu: None for a dense call, else the pair of padded cu_seqlens.
    dropout_key: a PRNG key or None.
    q: queries; k, v, and so on likewise.

  Returns:
    out, or the tuple that the caller asked for.
  """
  packed = packed_cu is not None
  _check_qkv(call, q, k, v, packed)
  hq = q.shape[-2]
  name_q, name_k = call.names[3:]
  if packed:
    cu_seqlens_q = _check_lengths(call, name_q, cu_seqlens_q, None)
    size = cu_seqlens_q.shape[0]
    b = size - 1
    cu_seqlens_k = _check_lengths(call, name_k, cu_seqlens_k, size)
    padded_q, padded_k = (
        _check_lengths(call, f"{name}_padded", cu, size)
        for name, cu in zip((name_q, name_k), packed_cu))
  else:
    b, padded_q, padded_k = q.shape[0], None, None
    cu_seqlens_q = _check_lengths(call, name_q, cu_seqlens_q, b + 1)
    cu_seqlens_k = _check_lengths(call, name_k, cu_seqlens_k, b + 1)
  x = Operands(
      q, k, v, cu_seqlens_q, cu_seqlens_k, padded_q, padded_k,
      _check_bias(call, bias, q, k),
      _check_per_head(call, "alibi_slopes", alibi_slopes, b, hq),
      _check_per_head(call, "sink", sink, b, hq),
      _dropout_state(call, dropout_key, b, hq))
  out, lse = _mha(_config(call, x), _vary_together(x))
  results = (out,)
  if call.return_lse:
    results += (lse,)
  if call.return_attn_probs:
    results += (_keep_mask(call, x),)
  return results if len(results) > 1 else out


def _keep_mask(call: _Call, x: Operands):
  """uint8 [b, hq, sq, sk]: 1 where dropout keeps a probability."""
  b, sq, hq, _ = x.q.shape
  sk = x.k.shape[1]
  if x.dropout_state is None:
    return jnp.ones((b, hq, sq, sk), jnp.uint8)
  keep = philox.keep_mask(
      x.dropout_state[:, :, None, None], jnp.arange(sq, dtype=jnp.int32)[:, None],
      jnp.arange(sk + -sk % 4, dtype=jnp.int32), call.dropout_p,
      cols_are_a_run=True)
  return keep[..., :sk].astype(jnp.uint8)


def _check_arrays(function, required, optional):
  for name, t in required.items():
    _check_is_array(function, name, t, optional=False)
  for name, t in optional.items():
    _check_is_array(function, name, t)


# -----------------------------------------------------------------------------
# Public functions


def flash_attn_func(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, ...] = (-1, -1),
    bias: jax.Array | None = None,
    alibi_slopes: jax.Array | None = None,
    deterministic: bool = True,
    return_lse: bool = False,
    return_attn_probs: bool = False,
    cu_seqlens_q: jax.Array | None = None,
    cu_seqlens_kv: jax.Array | None = None,
    *,
    dropout_key: jax.Array | None = None,
    logits_soft_cap: float = 0.0,
    sink: jax.Array | None = None,
):
  """Fused multi-head attention: softmax(scale * q k^T + ...) v.

  Query head h attends with key head h // (hq / hk), so grouped and multi-query
  attention need no copies. A query that sees no key gives out 0, lse -inf and
  gradients 0. Differentiable in q, k, v, bias, alibi_slopes and sink, and
  through lse.

  Args:
    q: [b, sq, hq, dqk], float16 or bfloat16 for the fused kernels, float32 by
      the reference. dqk up to 256.
    k: [b, sk, hk, dqk], q's dtype; hk divides hq.
    v: [b, sk, hk, dv], dv up to 256.
    dropout_p: probability of dropping an attention probability, 0 <= p < 1.
    softmax_scale: factor on q.k; None is 1 / sqrt(dqk).
    causal: query i sees keys up to i + sk - sq (bottom right alignment).
    window_size: (left, right): query i sees keys i + sk - sq - left to
      i + sk - sq + right, -1 for unbounded. A third number lets that many
      leading keys stay visible whatever left is (streaming attention).
    bias: added to the scaled scores: [sq, sk], [hq, sq, sk] or
      [b, hq, sq, sk], where 1 broadcasts. -inf hides a key.
    alibi_slopes: [hq] or [b, hq]: -slope * |i + sk - sq - j| is added.
    deterministic: accepted; results are deterministic either way.
    return_lse: return the log-sum-exp of every row too.
    return_attn_probs: return dropout's mask too.
    cu_seqlens_q: int [b + 1], cumulative lengths of sequences that are padded
      to sq; rows past a sequence's length give 0. sq above is then its length.
    cu_seqlens_kv: the same of keys.
    dropout_key: a JAX PRNG key, required if dropout_p > 0. The mask depends on
      the key and on (batch, head, row, column) alone.
    logits_soft_cap: if > 0, scaled scores become cap * tanh(score / cap), before
      bias and slopes.
    sink: [hq] or [b, hq], a logit in every row's softmax that has no value.

  Returns:
    out [b, sq, hq, dv]; or a tuple of it and, as asked for, lse
    float32 [b, hq, sq] in natural logarithm and the mask uint8
    [b, hq, sq, sk], 1 where a probability is kept.

  Raises:
    TypeError: an argument is not an array, number or dtype of the right kind.
    ValueError: a shape or value is not accepted.
  """
  name = "flash_attn_func"
  _check_arrays(name, dict(q=q, k=k, v=v), dict(
      bias=bias, alibi_slopes=alibi_slopes, cu_seqlens_q=cu_seqlens_q,
      cu_seqlens_kv=cu_seqlens_kv, dropout_key=dropout_key, sink=sink))
  call = _static_arguments(
      name, dropout_p, softmax_scale, causal, window_size, logits_soft_cap,
      deterministic, return_lse=_flag(name, "return_lse", return_lse),
      return_attn_probs=_flag(name, "return_attn_probs", return_attn_probs),
      names=("q", "k", "v", "cu_seqlens_q", "cu_seqlens_kv"))
  return _attend(call, None, dropout_key, q, k, v, cu_seqlens_q, cu_seqlens_kv,
                 bias, alibi_slopes, sink)


def flash_attn_varlen(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    cu_seqlens_q: jax.Array,
    cu_seqlens_k: jax.Array,
    max_seqlen_q: int = 0,
    max_seqlen_k: int = 0,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, ...] = (-1, -1),
    deterministic: bool = False,
    return_lse: bool = False,
    *,
    alibi_slopes: jax.Array | None = None,
    dropout_key: jax.Array | None = None,
    logits_soft_cap: float = 0.0,
    sink: jax.Array | None = None,
    cu_seqlens_q_padded: jax.Array | None = None,
    cu_seqlens_k_padded: jax.Array | None = None,
    min_seqlen_q: int = 0,
    zero_tensors: bool = False,
):
  """`flash_attn_func` for sequences of different lengths, packed in one axis.

  Sequence i has the query rows cu_seqlens_q[i] to cu_seqlens_q[i + 1] and
  attends to the keys cu_seqlens_k[i] to cu_seqlens_k[i + 1]. The lengths are
  ordinary arrays: they may be traced, and new ones compile nothing. Rows of no
  sequence give out 0, lse -inf and gradients 0.

  Args:
    q: [total_q, hq, dqk].
    k: [total_k, hk, dqk].
    v: [total_k, hk, dv].
    cu_seqlens_q: int [b + 1], cumulative query lengths, from 0.
    cu_seqlens_k: int [b + 1], cumulative key lengths, from 0.
    max_seqlen_q: accepted; no bound is needed.
    max_seqlen_k: accepted; no bound is needed.
    dropout_p: see flash_attn_func; masks count rows and columns inside their
      sequence.
    softmax_scale: see flash_attn_func.
    causal: see flash_attn_func, with each sequence's own lengths.
    window_size: see flash_attn_func.
    deterministic: accepted; results are deterministic either way.
    return_lse: return the log-sum-exp of every row too.
    alibi_slopes: [hq] or [b, hq].
    dropout_key: see flash_attn_func.
    logits_soft_cap: see flash_attn_func.
    sink: [hq] or [b, hq].
    cu_seqlens_q_padded: int [b + 1], the first row of each sequence where there
      is padding between them; cu_seqlens_q then still has the lengths.
    cu_seqlens_k_padded: the same of keys.
    min_seqlen_q: if > 0, sequences of at most this many queries are skipped:
      out 0, lse -inf, gradients 0.
    zero_tensors: accepted; rows of no sequence are always zero.

  Returns:
    out [total_q, hq, dv], or with return_lse (out, lse float32 [hq, total_q]).

  Raises:
    TypeError: an argument is not an array, number or dtype of the right kind.
    ValueError: a shape or value is not accepted.
  """
  name = "flash_attn_varlen"
  _check_arrays(
      name, dict(q=q, k=k, v=v, cu_seqlens_q=cu_seqlens_q,
                 cu_seqlens_k=cu_seqlens_k),
      dict(alibi_slopes=alibi_slopes, dropout_key=dropout_key, sink=sink,
           cu_seqlens_q_padded=cu_seqlens_q_padded,
           cu_seqlens_k_padded=cu_seqlens_k_padded))
  for arg, value in (("max_seqlen_q", max_seqlen_q),
                     ("max_seqlen_k", max_seqlen_k)):
    _number(name, arg, value, "an integer >= 0", lambda n: n >= 0, int)
  _flag(name, "zero_tensors", zero_tensors)
  call = _static_arguments(
      name, dropout_p, softmax_scale, causal, window_size, logits_soft_cap,
      deterministic, return_lse=_flag(name, "return_lse", return_lse),
      min_seqlen_q=_number(name, "min_seqlen_q", min_seqlen_q,
                           "an integer >= 0", lambda n: n >= 0, int))
  return _attend(call, (cu_seqlens_q_padded, cu_seqlens_k_padded), dropout_key,
                 q, k, v, cu_seqlens_q, cu_seqlens_k, None, alibi_slopes, sink)


def dot_product_attention(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    bias: jax.Array | None = None,
    mask: jax.Array | None = None,
    *,
    scale: float | None = None,
    is_causal: bool = False,
    query_seq_lengths: jax.Array | None = None,
    key_value_seq_lengths: jax.Array | None = None,
    local_window_size: int | tuple[int, int] | None = None,
    return_residual: bool = False,
):
  """`jax.nn.dot_product_attention` by the fused kernels.

  Arguments, layouts and masks are jax.nn's: causal and window masks start at
  the top left corner. Two differences: value's head_dim may differ from key's,
  and a query that sees no key gives 0 (residual -inf), not the mean of values.

  Args:
    query: [b, t, n, h] or [t, n, h].
    key: [b, s, k, h] or [s, k, h]; k divides n.
    value: as key.
    bias: added to the scaled scores; of key's rank or less, broadcasts to
      [b, n, t, s].
    mask: bool, broadcasts to [b, n, t, s]; False hides a key.
    scale: factor on query.key; None is 1 / sqrt(h).
    is_causal: query i sees keys 0 to i.
    query_seq_lengths: int [b]; later rows give 0.
    key_value_seq_lengths: int [b]; later keys are hidden.
    local_window_size: (left, right) or one number for both: query i sees keys
      i - left to i + right.
    return_residual: return the log-sum-exp too.

  Returns:
    The output, of query's shape but for value's head_dim; with
    return_residual a tuple of it and the log-sum-exp, [b, t, n] or [t, n], in
    key's dtype and without gradient, as jax.nn has it.

  Raises:
    TypeError: an argument is not an array, number or dtype of the right kind.
    ValueError: a shape or value is not accepted.
  """
  name = "dot_product_attention"
  query, key, value = (
      t if t is None or isinstance(t, (list, tuple)) else jnp.asarray(t)
      for t in (query, key, value))
  _check_arrays(
      name, dict(query=query, key=key, value=value),
      dict(bias=bias, mask=mask, query_seq_lengths=query_seq_lengths,
           key_value_seq_lengths=key_value_seq_lengths))
  if local_window_size is None:
    window = (-1, -1)
  else:
    accepted = "None, an integer >= 0 or a pair of them"
    sides = (local_window_size if isinstance(local_window_size, (tuple, list))
             else (local_window_size,) * 2)
    if len(sides) != 2:
      raise _bad(name, "local_window_size", repr(local_window_size), accepted)
    window = tuple(_number(name, "local_window_size", w, accepted,
                           lambda w: w >= 0, int) for w in sides)
  call = _static_arguments(
      name, 0.0, scale, is_causal, window, 0.0, True, top_left=True,
      return_lse=_flag(name, "return_residual", return_residual),
      names=("query", "key", "value", "query_seq_lengths",
             "key_value_seq_lengths"))
  ranks = {t.ndim for t in (query, key, value)}
  if ranks not in ({3}, {4}):
    raise _bad(name, "the rank of query, key, value",
               f"{query.ndim}, {key.ndim}, {value.ndim}", "3 or 4 for all")
  unbatched = ranks == {3}
  if unbatched:
    query, key, value = query[None], key[None], value[None]

  def cumulative(arg, lengths):
    if lengths is None:
      return None
    if not jnp.issubdtype(lengths.dtype, jnp.integer):
      raise _bad(name, f"{arg}'s dtype", lengths.dtype, "an integer dtype",
                 TypeError)
    if lengths.shape != query.shape[:1]:
      raise _bad(name, arg, _describe(lengths), f"shape [{query.shape[0]}]")
    lengths = jnp.asarray(lengths, jnp.int32)
    return jnp.concatenate([jnp.zeros((1,), jnp.int32),
                            jnp.cumsum(lengths, dtype=jnp.int32)])

  if mask is not None:
    if mask.dtype != bool:
      raise _bad(name, "mask's dtype", mask.dtype, "bool", TypeError)
    full = (query.shape[0], query.shape[2], query.shape[1], key.shape[1])
    shape = (1,) * (4 - mask.ndim) + tuple(mask.shape)
    if mask.ndim > 4 or any(n not in (1, m) for n, m in zip(shape, full)):
      raise _bad(name, "mask", _describe(mask),
                 f"a shape that broadcasts to {list(full)}")
    if bias is None:
      bias = jnp.zeros((1, 1), query.dtype)
    bias = jnp.where(jnp.reshape(mask, shape), bias, -jnp.inf).astype(bias.dtype)
  if bias is not None and bias.ndim < 2:
    bias = jnp.reshape(bias, (1,) * (2 - bias.ndim) + tuple(bias.shape))
  result = _attend(
      call, None, None, query, key, value,
      cumulative("query_seq_lengths", query_seq_lengths),
      cumulative("key_value_seq_lengths", key_value_seq_lengths), bias, None,
      None)
  out, lse = result if return_residual else (result, None)
  if unbatched:
    out = out[0]
  if not return_residual:
    return out
  residual = lax.stop_gradient(jnp.moveaxis(lse, 1, 2).astype(key.dtype))
  return out, residual[0] if unbatched else residual
