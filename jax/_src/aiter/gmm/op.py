# SPDX-License-Identifier: Apache-2.0
"""Grouped products as an operator: formula, kernels' operands, how they split.

Rows of a are runs, one a group, and each group has a matrix of its own in b.
Sizes of groups are an ordinary array: no kernel waits for the host to know
them. The gradients of a product are such products too.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import jax.numpy as jnp

import jax
from jax import lax
from jax._src.aiter.core import dims, rounding
from jax._src.aiter.core.derivative import differentiable, formula_jvp
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
    gated: of "nt", whose result then has a's dtype: b's rows are gates and then
      as many ups, and the result is silu(gate) * up, in float32, of products
      that are rounded to a's dtype.
  """
  out_dtype: str
  layout: str = "nn"
  lead: bool = False
  scaling: str = "none"
  gated: bool = False


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
  """
  a: jax.Array
  b: jax.Array
  sizes: jax.Array
  a_scale: jax.Array | None = None
  b_scale: jax.Array | None = None


def _groups(cfg: Config, x: Operands):
  return x.sizes.shape[0] - cfg.lead


def _sizes(cfg: Config, x: Operands):
  """(m, n, k)."""
  m, k = x.a.shape
  n = x.b.shape[1 if cfg.layout in ("nt", "tn") else 2]
  n = n // 2 if cfg.gated else n
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


def reference(cfg: Config, x: Operands) -> jax.Array:
  """The products in turn, with sums in float32 or wider.

  What rows of another group hold, be it no number, changes nothing.
  """
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
  if cfg.gated:
    gate, up = jnp.split(out.astype(x.a.dtype).astype(wide), 2, -1)
    out = jax.nn.silu(gate) * up
  return out.astype(cfg.out_dtype)


# -----------------------------------------------------------------------------
# Kernels


def _serves(cfg: Config, x: Operands) -> Key | None:
  known = x.a.dtype == x.b.dtype or x.b.dtype == jnp.uint8
  if (x.a.dtype.name not in _DTYPES or not known
      or 0 in (x.a.size, x.b.size, _groups(cfg, x))):
    return None
  return Key("gmm", x.a.dtype.name, (*_sizes(cfg, x), _groups(cfg, x)),
             tuple(t for t in (cfg.layout, cfg.scaling)
                   if t not in ("nn", "none")))


def _kernel(cfg: Config, call, x: Operands) -> jax.Array:
  groups = _groups(cfg, x)
  m, n, k = _sizes(cfg, x)
  shape = (groups, k, n) if cfg.layout == "tn" else (m, n)
  whole = x.a.dtype if cfg.scaling == "none" else jnp.dtype(jnp.bfloat16)
  own = cfg.out_dtype == whole.name
  entries = (m + _LEAST_ROWS - 1) // _LEAST_ROWS + groups + 2
  return call(
      (like(x.a, shape, whole if own else jnp.float32),
       like(x.a, (entries, 4), jnp.int32)),
      *x[:3], *(absent(t, jnp.float32) for t in x[3:]), layout=cfg.layout,
      lead=cfg.lead, scaling=cfg.scaling, gated=cfg.gated)[0].astype(
          cfg.out_dtype)


def _specs(cfg: Config, x: Operands):
  """Names of dimensions; what a product is summed over is gathered."""
  sizes = ("_",) if cfg.lead else ("g",)
  if cfg.layout == "tn":
    return (Operands(("m", "k"), ("m", "n"), sizes),), ("g", "k", "n")
  b = ("g", "c", "n") if cfg.layout == "nn" else ("g", "n", "c")
  n = "n"
  scales = (None, None)
  if cfg.gated:
    b, n = ("g", "u", "c"), "_"
  if cfg.scaling == "row":
    scales = ("m",), ("g", "n")
  elif cfg.scaling == "block":
    # Blocks are cut by a mesh where columns are; those of c are gathered.
    b, n = ("g", "w", "c"), "w"
    scales = ("m", "_"), ("g", "_", "_")
  elif cfg.scaling in ("mx", "i4"):
    b = ("g", "n", "d")
    scales = None if x.a_scale is None else ("m", "_"), ("g", "n", "_")
  return (Operands(("m", "c"), b, sizes, *scales),), ("m", n)


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


def backward(cfg: Config, wanted, saved, dout):
  wanted, = wanted
  given = {"a": saved.a, "b": saved.b, "o": dout.astype(saved.a.dtype)}
  of = lambda layout, names: _product(
      cfg._replace(layout=layout, out_dtype=saved.a.dtype.name),
      Operands(*(given[name] for name in names), saved.sizes))
  grads = (of(*g) if want else None
           for want, g in zip(wanted[:2], _GRADIENTS[cfg.layout]))
  return (Operands(*grads, None),)


def _tangent(cfg: Config, saved, tangents):
  return formula_jvp(functools.partial(reference, cfg), (saved,), tangents)


# (Config, Operands) -> [m, n], of scaled operands; there is no gradient.
scaled = _product

# (Config, Operands) -> [m, n], or [g, k, n] of layout "tn".
product = differentiable(
    _product, backward, save=lambda cfg, x: (_product(cfg, x), x),
    tangent=_tangent)
