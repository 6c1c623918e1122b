# SPDX-License-Identifier: Apache-2.0
"""Grouped products as an operator: formula, kernels' operands, how they split.

Rows of a are runs, one a group, and each group has a matrix of its own in b.
Sizes of groups are an ordinary array: no kernel waits for the host to know
them. The gradients of a product are such products too.

Matrix units multiply no float32. Kernels have its numbers as sums of bfloat16
parts instead, and one product, longer by some times, sums the parts' products.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np

import jax
from jax import lax
from jax._src.aiter.activation import op as activation_op
from jax._src.aiter.core import dims, rounding
from jax._src.aiter.core.derivative import (
    differentiable,
    formula_jvp,
    rows_by,
    sums_by,
)
from jax._src.aiter.core.dispatch import absent, like
from jax._src.aiter.core.operator import Key, operator, with_axis
from jax._src.aiter.core.partition import axes_of_arguments, vary_like

_DTYPES = {
    "bfloat16": "bf16", "float16": "fp16", "int8": "i8",
    "float8_e4m3fn": "e4m3fn", "float8_e4m3fnuz": "e4m3fnuz", "uint8": "e2m1"}
BLOCK = 128  # columns of a, and rows and columns of b, that share a scale
PACKED_BLOCK = 32  # elements of k that share a scale of a b of four bits
# Of a row of a that share a scale, where not a whole row does.
SCALED_COLUMNS = {"block": BLOCK, "mx": PACKED_BLOCK}
_LEAST_ROWS = 16  # kGmmLeastRows: of a kernel's tile
# What kernels know of each of a product's numbers.
ACTIVATIONS = {"none": lambda t: t, "relu": jax.nn.relu,
               "gelu": functools.partial(jax.nn.gelu, approximate=False),
               "gelu_tanh": jax.nn.gelu, "silu": jax.nn.silu}


class Config(NamedTuple):
  """Static facts of a call; hashable.

  Attributes:
    out_dtype: name of the result's dtype.
    layout: what is contracted: "nn" a[m,k] b[g,k,n], "nt" a[m,k] b[g,n,k], "tn"
      a[m,k] b[m,n], whose result is [g,k,n].
    lead: whether the first of the sizes counts rows that no group has.
    scaling: "none"; of "nt", "row", a number a row of a and of b, or "block",
      one every BLOCK columns of a and BLOCK x BLOCK of b; "mx", b is e2m1 with
      e8m0 every PACKED_BLOCK elements, and so may a be; "i4", b is int4 with
      bfloat16 every PACKED_BLOCK elements. These two pack two numbers a byte.
    gates: "none", or how b's columns are gates and as many ups, of whose
      products, rounded to a's dtype, the gated activation is the result, in a's
      dtype: of "nt" in "halves", gates first, and of "nn" too in "pairs".
    activation: with gates of activation's ACTIVATIONS, else of those here.
    limit: of gates and ups, as activation's Config has it.
    alpha: likewise.
    precision: of products of float32, as jax.numpy takes it; None is JAX's own
      where `product` is traced.
  """
  out_dtype: str
  layout: str = "nn"
  lead: bool = False
  scaling: str = "none"
  gates: str = "none"
  activation: str = "none"
  limit: float = 0.0
  alpha: float = 1.0
  precision: Any = None


class Operands(NamedTuple):
  """Arrays of a call; scales are None without scaling.

  Attributes:
    a: [m, k]; of e2m1 uint8 [m, k / 2].
    b: see Config.layout; a's dtype, or uint8 [g, n, k / 2].
    sizes: int32 [g], or [1 + g] with a lead. A negative one counts as 0, and
      rows beyond m as not there.
    a_scale: float32 [m], or [m, k / BLOCK]; of "mx" uint8 [m, k /
      PACKED_BLOCK], or None of an a that is not scaled.
    b_scale: float32 [g, n], or [g, n / BLOCK, k / BLOCK]; uint8 or bfloat16 [g,
      n, k / PACKED_BLOCK].
    bias: [g, columns of b], any floating dtype: added to products before the
      activation. Only without scaling, and not of "tn".
  """
  a: jax.Array
  b: jax.Array
  sizes: jax.Array
  a_scale: jax.Array | None = None
  b_scale: jax.Array | None = None
  bias: jax.Array | None = None


def _groups(cfg: Config, x: Operands):
  return x.sizes.shape[0] - cfg.lead


def _sizes(cfg: Config, x: Operands):
  """(m, n, k)."""
  m, k = x.a.shape
  n = x.b.shape[1 if cfg.layout in ("nt", "tn") else 2]
  n = n if cfg.gates == "none" else n // 2
  return m, n, 2 * k if x.a.dtype == jnp.uint8 else k


# -----------------------------------------------------------------------------
# The formula in jax.numpy


def runs(cfg: Config, sizes, m):
  """First row of each group and the one behind its last, of m: int32 [g]."""
  m = dims.as_int32(m)

  def add(at, size):
    # No size makes it overflow.
    size = jnp.clip(size, 0, m)
    end = jnp.minimum(at, m - size) + size
    return end, (at, end)

  zero = vary_like(jnp.zeros((), jnp.int32), sizes)
  _, (starts, ends) = lax.scan(add, zero, sizes)
  return starts[cfg.lead:], ends[cfg.lead:]


def rows_of_groups(sizes, lead: bool, m):
  """The group that each of m rows is of, int32 [m]; -1 of none."""
  starts, ends = runs(Config("", lead=lead), sizes, m)
  row = jnp.arange(m, dtype=jnp.int32)
  if starts.shape[0] == 0:
    return row * 0 - 1
  group = dims.last_start(starts, row)
  return jnp.where(row < ends[jnp.maximum(group, 0)], group, -1)


def _spread(scale, axis: int, size: int, block: int = BLOCK):
  """Each scale for the `block` elements that share it, `size` in all."""
  return lax.slice_in_dim(jnp.repeat(scale, block, axis), 0, size, axis=axis)


def _unpacked(cfg: Config, t, scale):
  """Numbers of four bits, or MXFP8, times their scales, in float32."""
  if t.dtype == jnp.uint8:
    t = rounding.unpack(t)
    t = rounding.from_e2m1(t) if cfg.scaling == "mx" else (
        lax.bitcast_convert_type(t << 4, jnp.int8) >> 4)
  if cfg.scaling == "mx":
    scale = rounding.from_e8m0(scale)
  wide = t.astype(jnp.float32) * _spread(
      scale.astype(jnp.float32), -1, t.shape[-1], PACKED_BLOCK)
  if cfg.scaling == "mx":
    return wide
  return lax.reduce_precision(wide, exponent_bits=8, mantissa_bits=7)


def _ends(cfg: Config, x: Operands) -> bool:
  """Whether anything is to be done with the products."""
  return x.bias is not None or (cfg.gates, cfg.activation) != ("none", "none")


def _alone(cfg: Config, x: Operands) -> tuple[Config, Operands]:
  """The call of products alone, as wide as what is done with them needs."""
  wide = x.a.dtype
  if cfg.gates == "none":
    wide = jnp.promote_types(wide, jnp.float32)
  return (Config(wide.name, cfg.layout, cfg.lead, cfg.scaling,
                 precision=cfg.precision), x._replace(bias=None))


def _behind(cfg: Config, x: Operands, h, gated) -> jax.Array:
  """The result of products h; 0 of a row of no group.

  gated: activation_op's gated activation, or its formula.
  """
  bias, ids = x.bias, None
  if bias is not None:
    ids = rows_of_groups(x.sizes, cfg.lead, h.shape[0])
  if cfg.gates == "none":
    if bias is not None:
      h = h + rows_by(h.dtype.name, bias, ids)
    return ACTIVATIONS[cfg.activation](h).astype(cfg.out_dtype)
  up = None
  if cfg.gates == "pairs":
    if bias is not None:
      bias = jnp.concatenate([bias[:, ::2], bias[:, 1::2]], -1)
    in_pairs = h.reshape(h.shape[0], h.shape[1] // 2, 2)
    h, up = in_pairs[..., 0], in_pairs[..., 1]
  return gated(_gate_of(cfg), activation_op.Rows(h, up, ids, bias))


def _gate_of(cfg: Config) -> activation_op.Config:
  return activation_op.Config(cfg.activation, cfg.limit, cfg.alpha,
                              cfg.out_dtype, cfg.gates == "halves")


def reference(cfg: Config, x: Operands) -> jax.Array:
  """The products in turn, with sums in float32 or wider.

  What rows of another group hold, be it no number, changes nothing.
  """
  if _ends(cfg, x):
    return _behind(cfg, x, reference(*_alone(cfg, x)),
                   activation_op.reference_fwd)
  m = x.a.shape[0]
  starts, ends = runs(cfg, x.sizes, m)
  wide = jnp.float32 if cfg.scaling != "none" else jnp.promote_types(
      x.a.dtype, jnp.float32)
  exact = x.a.dtype == jnp.int8  # Sums of int8 are, in int32.
  packed = cfg.scaling in ("mx", "i4")
  a = x.a
  if x.a_scale is not None and packed:
    a = _unpacked(cfg, a, x.a_scale)
  # XLA's own products of int8 are not exact on every GPU.
  a = a.astype(jnp.int32 if exact else wide)
  if cfg.scaling == "block":
    a *= _spread(x.a_scale, 1, x.a.shape[1])
  row = jnp.arange(m, dtype=jnp.int32)[:, None]
  mine = lambda run: (row >= run[0]) & (row < run[1])
  dot = functools.partial(jnp.matmul, precision=lax.Precision.HIGHEST)
  if cfg.layout == "tn":
    b = x.b.astype(wide)
    only = lambda run, t: jnp.where(mine(run), t, 0)
    out = lax.map(lambda run: dot(only(run, a).T, only(run, b)),
                  (starts, ends))
  else:
    def add(out, group):
      run, b, scale = group
      if packed:
        b = _unpacked(cfg, b, scale)
      b = b.astype(a.dtype)
      if cfg.scaling == "block":
        b *= _spread(_spread(scale, 0, b.shape[0]), 1, b.shape[1])
      product = dot(a, b if cfg.layout == "nn" else b.T)
      if cfg.scaling == "row":
        product = product.astype(wide) * x.a_scale[:, None] * scale
      return jnp.where(mine(run), product, out), None

    n = x.b.shape[2 if cfg.layout == "nn" else 1]
    out = vary_like(jnp.zeros((m, n), wide), a)
    out, _ = lax.scan(add, out, ((starts, ends), x.b, x.b_scale))
  return out.astype(cfg.out_dtype)


# -----------------------------------------------------------------------------
# Kernels


def _in_parts(cfg: Config, x: Operands) -> Operands:
  """A product of bfloat16 that is x's of float32.

  What is summed over is that much longer: parts take turns with all of it or,
  of rows, with each. The smallest products are the first of the sum.
  """
  count = 3 if rounding.exact_products(cfg.precision) else 2
  pairs = [(i, order - i) for order in reversed(range(count))
           for i in range(order + 1)]
  tn = cfg.layout == "tn"

  def beside(t, axis, which):
    first, *rest = rounding.bfloat16_parts(t, count)
    # An infinity is in one product: another part's number would be its undoing.
    among = [jnp.where(jnp.isfinite(first), first, 0), *rest]
    turns = [among[i] for i in which[:-1]] + [first]
    at = axis - tn
    return jnp.stack(turns, axis).reshape(
        *t.shape[:at], len(turns) * t.shape[at], *t.shape[at + 1:])

  of_a, of_b = zip(*pairs)
  sizes = x.sizes
  if tn:
    sizes = len(pairs) * jnp.clip(sizes, 0, dims.as_int32(x.a.shape[0]))
  return x._replace(
      a=beside(x.a, 1, of_a), sizes=sizes,
      b=beside(x.b, 2 if cfg.layout == "nt" else 1, of_b))


def _wide_gates(cfg: Config, x: Operands) -> bool:
  """Whether gates and ups are float32, which kernels would round: products
  alone are a kernel's then."""
  return x.a.dtype == jnp.float32 and cfg.gates != "none"


def _serves(cfg: Config, x: Operands) -> Key | None:
  if _wide_gates(cfg, x):
    cfg, x = _alone(cfg, x)
  if x.a.dtype == jnp.float32 and cfg.scaling == "none":
    x = jax.eval_shape(functools.partial(_in_parts, cfg), x)
  known = x.a.dtype == x.b.dtype or x.b.dtype == jnp.uint8
  if (x.a.dtype.name not in _DTYPES or not known
      or 0 in (x.a.size, x.b.size, _groups(cfg, x))):
    return None
  # What a product's own kernel does with it.
  simple = x.bias is None and not cfg.limit and (cfg.gates, cfg.activation) in (
      ("none", "none"), ("halves", "silu"))
  return Key("gmm", x.a.dtype.name, (*_sizes(cfg, x), _groups(cfg, x)),
             tuple(t for t in (cfg.layout, cfg.scaling,
                               "none" if simple else "epilogue")
                   if t not in ("nn", "none")))


def _kernel(cfg: Config, call, x: Operands) -> jax.Array:
  if _wide_gates(cfg, x):
    alone, products = _alone(cfg, x)
    return _behind(cfg, x, _kernel(alone, call, products),
                   activation_op.reference_fwd)
  if x.a.dtype == jnp.float32:
    x = _in_parts(cfg, x)
  groups = _groups(cfg, x)
  m, n, k = _sizes(cfg, x)
  shape = (groups, k, n) if cfg.layout == "tn" else (m, n)
  whole = x.a.dtype if cfg.scaling == "none" else jnp.dtype(jnp.bfloat16)
  own = cfg.out_dtype == whole.name
  entries = (m + _LEAST_ROWS - 1) // _LEAST_ROWS + groups + 2
  if x.bias is not None:
    x = x._replace(bias=x.bias.astype(jnp.float32))
  gate_limit, up_limit = _gate_of(cfg).limits(x.a.dtype)
  return call(
      (like(x.a, shape, whole if own else jnp.float32),
       like(x.a, (entries, 4), jnp.int32)),
      *x[:3], *(absent(t, jnp.float32) for t in x[3:]), layout=cfg.layout,
      lead=cfg.lead, scaling=cfg.scaling, gates=cfg.gates,
      activation=cfg.activation, alpha=np.float32(cfg.alpha),
      gate_limit=np.float32(gate_limit), up_limit=np.float32(up_limit))[
          0].astype(cfg.out_dtype)


def _specs(cfg: Config, x: Operands):
  """Names of dimensions; what a product is summed over is gathered."""
  sizes = ("_",) if cfg.lead else ("g",)
  if cfg.layout == "tn":
    return (Operands(("m", "k"), ("m", "n"), sizes),), ("g", "k", "n")
  b = ("g", "c", "n") if cfg.layout == "nn" else ("g", "n", "c")
  n = "n"
  scales = (None, None)
  if cfg.gates != "none":
    b, n = ("g", "c", "u") if cfg.layout == "nn" else ("g", "u", "c"), "_"
  bias = None if x.bias is None else ("g", b[1 if cfg.layout == "nt" else 2])
  if cfg.scaling == "row":
    scales = ("m",), ("g", "n")
  elif cfg.scaling == "block":
    # Blocks are cut by a mesh where columns are; those of c are gathered.
    b, n = ("g", "w", "c"), "w"
    scales = ("m", "_"), ("g", "_", "_")
  elif cfg.scaling in ("mx", "i4"):
    b = ("g", "n", "d")
    scales = None if x.a_scale is None else ("m", "_"), ("g", "n", "_")
  return (Operands(("m", "c"), b, sizes, *scales, bias),), ("m", n)


def _plan(cfg: Config, run, mesh, args):
  """A shard of rows has those of each group that are its own."""
  specs, result_specs = _specs(cfg, *args)
  axes = axes_of_arguments(mesh, specs, _SPLIT, args, result_specs)
  if "m" not in axes:
    return axes, run
  m = args[0].a.shape[0]

  def lower(x: Operands):
    own = x.a.shape[0]
    first = lax.axis_index(axes["m"]).astype(jnp.int32) * own
    starts, ends = (
        jnp.clip(t - first, 0, own) for t in runs(cfg, x.sizes, m))
    sizes = ends - starts
    if cfg.lead:
      sizes = jnp.concatenate([starts[:1], sizes])
    x = x._replace(sizes=sizes)
    if cfg.layout != "tn":
      return run(x)
    wide = jnp.promote_types(cfg.out_dtype, jnp.float32)
    part = _product.run(cfg._replace(out_dtype=wide.name), x)
    return lax.psum(part, axes["m"]).astype(cfg.out_dtype)

  return axes, lower


def _batch(_, op, size, mapped, x: Operands):
  return lax.map(op, with_axis(size, mapped[0], x))


# -----------------------------------------------------------------------------
# Operators


_SPLIT = ("m", "n", "k")

_product = operator(
    target="gmm", kernel=_kernel, reference=reference, specs=_specs,
    split=_SPLIT, serves=_serves, dtypes=_DTYPES, batch=_batch, plan=_plan)

# Of a product: the product that is the gradient of a, and that of b; each is
# told by its layout and its operands, "o" being the result's gradient.
_GRADIENTS = {"nn": (("nt", "ob"), ("tn", "ao")),
              "nt": (("nn", "ob"), ("tn", "oa")),
              "tn": (("nt", "bo"), ("nn", "ao"))}


def _save(cfg: Config, x: Operands):
  if cfg.activation == "none":
    return _product(cfg, x), (x, None)
  h = _product(*_alone(cfg, x))
  return _behind(cfg, x, h, activation_op.activation), (x, h)


def _backward(cfg: Config, wanted, saved, dout):
  wanted, = wanted
  x, h = saved
  dbias = None
  if h is None and wanted.bias:
    ids = rows_of_groups(x.sizes, cfg.lead, dout.shape[0])
    dbias = sums_by(ids, x.bias.shape[0], dout)
  elif h is not None:
    _, pull = jax.vjp(
        lambda h, bias: _behind(cfg, x._replace(bias=bias), h,
                                activation_op.activation), h, x.bias)
    dout, dbias = pull(dout)
  cfg, _ = _alone(cfg, x)
  given = {"a": x.a, "b": x.b, "o": dout.astype(x.a.dtype)}
  of = lambda layout, names: _product(
      cfg._replace(layout=layout, out_dtype=x.a.dtype.name),
      Operands(*(given[name] for name in names), x.sizes))
  grads = (of(*g) if want else None
           for want, g in zip(wanted[:2], _GRADIENTS[cfg.layout]))
  return (Operands(*grads, None, bias=dbias),)


def _tangent(cfg: Config, saved, tangents):
  return formula_jvp(functools.partial(reference, cfg), saved[:1], tangents)


# (Config, Operands) -> [m, n], of scaled operands; there is no gradient.
scaled = _product

# (Config, Operands) -> [m, n], or [g, k, n] of layout "tn". What is done with
# products is done by the kernel that makes them, or, if the call is
# differentiated, behind it: with gates there are the same bits.
_differentiable = differentiable(
    _product, _backward, save=_save, tangent=_tangent)


def product(cfg: Config, x: Operands) -> jax.Array:
  if cfg.precision is None:
    cfg = cfg._replace(precision=jax.config.jax_default_matmul_precision)
  return _differentiable(cfg, x)
