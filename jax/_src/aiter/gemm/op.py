# SPDX-License-Identifier: Apache-2.0
"""Matrix products as an operator: formulas, kernels' operands, how they split.

`gemm` is differentiable, of `product` those without scaling are what it is made
of. Rows, columns, batch and contraction shard over a mesh; a mapped axis is one
more leading axis.

Leading axes of the operands broadcast against each other as NumPy's do. Which
of them a kernel sees as its batch, and which as rows, _folded decides.
"""

from __future__ import annotations

import functools
import math
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np

import jax
from jax import lax
from jax._src.aiter.core import dims, rounding
from jax._src.aiter.core.derivative import differentiable, formula_jvp
from jax._src.aiter.core.dispatch import absent, like
from jax._src.aiter.core.operator import Key, operator
from jax._src.aiter.core.partition import axes_of_arguments

ACTIVATIONS = {
    None: lambda t: t,
    "relu": jax.nn.relu,
    "gelu": functools.partial(jax.nn.gelu, approximate=False),
    "gelu_tanh": functools.partial(jax.nn.gelu, approximate=True),
    "silu": jax.nn.silu,
}
BLOCK = 128  # columns of a, and rows and columns of b, that share a scale
MX_BLOCK = 32
_DTYPES = {
    "bfloat16": "bf16", "float16": "fp16", "int8": "i8",
    "float8_e4m3fn": "e4m3fn", "float8_e4m3fnuz": "e4m3fnuz", "uint8": "e2m1"}
# Parts of a sum: at most so many, none shorter, of so many float32 numbers.
_MAX_PARTS, _LEAST_PART, _MAX_WORKSPACE = 16, 256, 8 << 20
# Sizes of b from which copies cost less than reading rows that are not aligned.
# For few rows of a, those of one tile, they do where b has so many elements: of
# fewer a launch is dearer, and a copy of more leaves the caches before it is
# read.
_WORTH_A_COPY, _FEW_ROWS, _FOR_FEW_ROWS = 256, 64, (10**6, 2**27)
# Rows of a up to which a kernel of a platform takes rows of b that begin
# anywhere, in "nt" and 16 bits.
_ROWS_OF_ODD = {"rocm": 16, "cuda": 32}
# Rows of a result from which they cost less than storing columns one by one.
_ROWS_WORTH_COLUMNS = 128
# Rows of a from which MXFP4 is turned into bfloat16 first where no matrix unit
# multiplies it: kernels that do so themselves do so for each tile again.
_ROWS_WORTH_BFLOAT16 = 129


class Config(NamedTuple):
  """Static facts of a call; hashable.

  Attributes:
    out_dtype: name of the result's dtype.
    layout: what is contracted: "nt" a[m,k] b[n,k], "nn" a[m,k] b[k,n], "tn"
      a[k,m] b[k,n].
    scaling: "none"; "row", a number a row of a and a column of the result;
      "block" and "block_t" (scales transposed), a number every BLOCK columns of
      a and BLOCK x BLOCK of b; "mx", e8m0 every MX_BLOCK elements of e2m1.
    activation: of ACTIVATIONS, on the result.
    contracted: how many axes in front of the last one a "tn" contracts.
    kernel: a kernel's symbol, for tuning; "" lets the library choose.
    splits: parts that k is divided in, for tuning; 0 lets the library choose.
  """
  out_dtype: str
  layout: str = "nt"
  scaling: str = "none"
  activation: str | None = None
  contracted: int = 1
  kernel: str = ""
  splits: int = 0


class Operands(NamedTuple):
  """Arrays of a call; an absent one is None. Shapes are those of layout "nt".

  Attributes:
    a: [..., m, k].
    b: [..., n, k].
    a_scale: float32 [..., m] or [..., 1]; block [..., m, k / BLOCK], block_t
      that transposed; mx uint8 [..., m, k / MX_BLOCK].
    b_scale: float32 [..., n] or [..., 1]; block [..., n / BLOCK, k / BLOCK],
      block_t that transposed; mx uint8 [..., n, k / MX_BLOCK].
    bias: [..., n], of any floating dtype.
  """
  a: jax.Array
  b: jax.Array
  a_scale: jax.Array | None = None
  b_scale: jax.Array | None = None
  bias: jax.Array | None = None


def _ranks(cfg: Config) -> Operands:
  """How many axes of each operand are not leading ones."""
  matrix = 1 + cfg.contracted
  scale = 1 if cfg.scaling == "row" else 2
  return Operands(matrix, matrix, scale, scale, 1)


def _leads(cfg: Config, x: Operands) -> Operands:
  """Leading axes of each operand; None of an absent one."""
  return Operands(*(None if t is None else t.shape[:t.ndim - rank]
                    for t, rank in zip(x, _ranks(cfg))))


def _lead(leads) -> tuple[int, ...]:
  return jnp.broadcast_shapes(*(s for s in leads if s is not None))


def _sizes(cfg: Config, a, b) -> tuple[int, int, int]:
  """(m, n, k) of a product whose contracted axes are one."""
  m, k = a.shape[-2:] if cfg.layout != "tn" else a.shape[:-3:-1]
  n = b.shape[-2] if cfg.layout == "nt" else b.shape[-1]
  return m, n, k * 2 if cfg.scaling == "mx" else k


def _one_contraction(cfg: Config, x: Operands) -> Operands:
  """x with all that a "tn" contracts in one axis."""
  if cfg.contracted == 1:
    return x
  first = -1 - cfg.contracted
  fold = lambda t: t.reshape(
      *t.shape[:first], math.prod(t.shape[first:-1]), t.shape[-1])
  return x._replace(a=fold(x.a), b=fold(x.b))


# -----------------------------------------------------------------------------
# The formulas in jax.numpy


def _accumulator(dtype):
  return jnp.dtype(jnp.float64 if dtype == jnp.float64 else jnp.float32)


def _spread(scale, block: int, axis: int, size: int):
  """Each scale for the `block` elements that share it, `size` in all."""
  return lax.slice_in_dim(jnp.repeat(scale, block, axis), 0, size, axis=axis)


def _from_mx(t, scale):
  """Numbers of MXFP4, in float32; bfloat16 has each of them exactly."""
  t = rounding.from_e2m1(rounding.unpack(t))
  return t * _spread(rounding.from_e8m0(scale), MX_BLOCK, -1, t.shape[-1])


def _epilogue(cfg: Config, acc, bias):
  if bias is not None:
    acc = acc + bias[..., None, :].astype(acc.dtype)
  return ACTIVATIONS[cfg.activation](acc).astype(cfg.out_dtype)


def _whole_words(cfg: Config, a, b, k):
  """int8 operands with zeros behind a k that is no multiple of 4.

  XLA's sums of int8 are wrong for such a k on NVIDIA's GPUs.
  """
  if dims.is_known(k) and k % 4 == 0:
    return a, b
  axes = {"nt": (-1, -1), "nn": (-1, -2), "tn": (-2, -2)}[cfg.layout]

  more = dims.round_up(k, 4) - k
  return dims.longer(a, axes[0], more), dims.longer(b, axes[1], more)


def reference(cfg: Config, x: Operands) -> jax.Array:
  """The product in jax.numpy: sums in float32 or wider, of int8 in int32."""
  a, b, a_scale, b_scale, bias = _one_contraction(cfg, x)
  _, n, k = _sizes(cfg, a, b)
  acc = _accumulator(a.dtype)
  if cfg.scaling == "mx":
    a, b = _from_mx(a, a_scale), _from_mx(b, b_scale)
  elif a.dtype == jnp.int8:
    a, b = _whole_words(cfg, a, b, k)
  else:
    a, b = a.astype(acc), b.astype(acc)
  if cfg.scaling == "block_t":
    a_scale, b_scale = a_scale.mT, b_scale.mT
  if cfg.scaling in ("block", "block_t"):
    a = a * _spread(a_scale, BLOCK, -1, k)
    b = b * _spread(_spread(b_scale, BLOCK, -2, n), BLOCK, -1, k)
  spec = {"nt": "...mk,...nk", "nn": "...mk,...kn", "tn": "...km,...kn"}
  out = jnp.einsum(
      f"{spec[cfg.layout]}->...mn", a, b, precision=lax.Precision.HIGHEST,
      preferred_element_type=jnp.int32 if a.dtype == jnp.int8 else acc)
  out = out.astype(acc)
  if cfg.scaling == "row":
    out = out * a_scale[..., :, None] * b_scale[..., None, :]
  return _epilogue(cfg, out, bias)


# -----------------------------------------------------------------------------
# Kernels


def workspace(batch: int, m: int, n: int, k: int):
  """float32 numbers that a product is given for sums over parts of k.

  Where tiles do not fill a device's last turn, k of those left is divided and
  what comes of it is summed. The library makes as many parts as fit, in whole
  tiles of 16 rows or more.
  """
  if dims.is_known(k) and k < 2 * _LEAST_PART:
    return 0
  parts = min(_MAX_PARTS, k // _LEAST_PART) if dims.is_known(k) else _MAX_PARTS
  rows = batch * dims.round_up(m, 16)
  return jax.core.min_dim(parts * rows * dims.round_up(n, 64), _MAX_WORKSPACE)


def features(layout: str, scaling: str, a_dtype: str,
             b_dtype: str) -> tuple[str, ...]:
  """What a product asks of a kernel, by its family's names."""
  asked = {"block_t": "block"}.get(scaling, scaling), layout
  fnuz = [f"{name}_fnuz" for name, dtype in (("a", a_dtype), ("b", b_dtype))
          if dtype == "float8_e4m3fnuz" and a_dtype != b_dtype]
  return *(name for name in asked if name not in ("none", "nt")), *fnuz


def _serves(cfg: Config, x: Operands) -> Key | None:
  if x.a.dtype.name not in _DTYPES or 0 in (x.a.size, x.b.size):
    return None  # XLA's own product is what float32 wants.
  whole = _one_contraction(cfg, x)
  batch = math.prod(_lead(_leads(cfg, x._replace(bias=None))))
  return Key("gemm", x.a.dtype.name, (*_sizes(cfg, whole.a, whole.b), batch),
             features(cfg.layout, cfg.scaling, x.a.dtype.name, x.b.dtype.name))


def _with_scale(cfg: Config, t, lead, scale, scale_lead):
  """A matrix and its scales, with the same leading axes."""
  if scale is None:
    return t, None
  if cfg.scaling == "row":
    if scale.size == 1:
      return t, scale.reshape(1)
    core = t.shape[-2:-1]
  else:
    core = scale.shape[-2:]
  lead = jnp.broadcast_shapes(lead, scale_lead)
  return (jnp.broadcast_to(t, (*lead, *t.shape[-2:])),
          jnp.broadcast_to(scale, (*lead, *core)))


def _folded(cfg: Config, x: Operands) -> Operands:
  """x with at most one leading axis, that of a batch; bias is left alone.

  Rows of a that share a b are rows of one larger product. An operand that a
  whole batch shares has no leading axis.
  """
  x = _one_contraction(cfg, x)
  cfg = cfg._replace(contracted=1)
  leads = _leads(cfg, x)
  a, a_scale = _with_scale(cfg, x.a, leads.a, x.a_scale, leads.a_scale)
  b, b_scale = _with_scale(cfg, x.b, leads.b, x.b_scale, leads.b_scale)
  lead = jnp.broadcast_shapes(a.shape[:-2], b.shape[:-2])
  aligned = lambda own: (1,) * (len(lead) - len(own)) + own
  axes = len(lead)  # of the batch; those behind them are rows
  if cfg.layout != "tn" and cfg.scaling != "block_t":
    own_a, own_b = aligned(a.shape[:-2]), aligned(b.shape[:-2])
    while axes and own_b[axes - 1] == 1 and own_a[axes - 1] == lead[axes - 1]:
      axes -= 1

  def fold(t, rank):
    if t is None or t.shape == (1,):
      return t
    core = t.shape[t.ndim - rank:]
    own = aligned(t.shape[:t.ndim - rank])
    batch, rows = own[:axes], own[axes:]
    if math.prod(batch) == 1:
      batch = ()
    elif batch != lead[:axes]:
      batch = lead[:axes]
      t = jnp.broadcast_to(t.reshape(*own, *core), (*batch, *rows, *core))
    batch = (math.prod(batch),) if batch else ()
    return t.reshape(*batch, math.prod(rows) * core[0], *core[1:])

  return Operands(*map(fold, (a, b, a_scale, b_scale), _ranks(cfg)), x.bias)


def _whole_rows(cfg: Config, platform: str, x: Operands) -> Operands:
  """Folded operands with zeros behind rows that are no multiples of 16 bytes.

  The fast kernels copy and, if operands are scaled, store 16 bytes at a time.
  Where sizes are large the product is much more work than such copies.
  """
  m, n, k = _sizes(cfg, x.a, x.b)
  if (cfg.scaling == "mx" or not all(map(dims.is_known, (m, n, k)))
      or min(n, k) < _WORTH_A_COPY):
    return x
  if (cfg.layout == "nt" and x.a.dtype.itemsize == 2
      and m <= _ROWS_OF_ODD.get(platform, 0)):
    return x
  least, most = _FOR_FEW_ROWS
  if m <= _FEW_ROWS and not least <= n * k < most:
    return x
  unit = 16 // x.a.dtype.itemsize
  m = dims.round_up(m, unit) if cfg.layout == "tn" else m
  if cfg.layout != "nt":
    n = dims.round_up(n, unit)
  elif cfg.scaling != "none" and m >= _ROWS_WORTH_COLUMNS:
    n = dims.round_up(n, 8)
  if cfg.layout != "tn":  # There k counts rows.
    k = dims.round_up(k, unit)

  def pad(t, *core):
    if t is None or t.shape[t.ndim - len(core):] in (core, (1,)):
      return t
    lead = [(0, 0)] * (t.ndim - len(core))
    own = t.shape[t.ndim - len(core):]
    return jnp.pad(t, [*lead, *((0, to - of) for to, of in zip(core, own))])

  a, b = {"nt": ((m, k), (n, k)), "nn": ((m, k), (k, n)),
          "tn": ((k, m), (k, n))}[cfg.layout]
  x = x._replace(a=pad(x.a, *a), b=pad(x.b, *b), bias=pad(x.bias, n))
  if cfg.scaling == "row":
    x = x._replace(b_scale=pad(x.b_scale, n))
  return x


def _call(cfg: Config, call, x: Operands) -> jax.Array:
  """The kernel's result [m, n], or [batch, m, n], of folded operands."""
  m, n, k = _sizes(cfg, x.a, x.b)
  batch = tuple({t.shape[0] for t in (x.a, x.b) if t.ndim == 3})
  out = (*batch, m, n)
  return call(
      (like(x.a, out, cfg.out_dtype),
       like(x.a, (workspace(math.prod(batch), m, n, k),), jnp.float32)),
      x.a, x.b, *(absent(t, jnp.float32) for t in x[2:]),
      layout=cfg.layout, scaling=cfg.scaling,
      activation=cfg.activation or "none",
      kernel=cfg.kernel, splits=np.int32(cfg.splits))[0]


def _of_bfloat16(cfg: Config, x: Operands) -> tuple[Config, Operands]:
  """A product of MXFP4 as one of bfloat16."""
  a, b = (_from_mx(*t).astype(jnp.bfloat16)
          for t in ((x.a, x.a_scale), (x.b, x.b_scale)))
  return cfg._replace(scaling="none"), Operands(a, b, bias=x.bias)


def _kernel(cfg: Config, call, x: Operands) -> jax.Array:
  if cfg.scaling == "mx" and call.platform == "cuda" and not cfg.kernel:
    rows = math.prod(x.a.shape[:-1]) // math.prod(x.b.shape[:-2])
    if dims.is_known(rows) and rows >= _ROWS_WORTH_BFLOAT16:
      cfg, x = _of_bfloat16(cfg, x)
  whole = _one_contraction(cfg, x)
  m, n, _ = _sizes(cfg, whole.a, whole.b)
  flat = _folded(cfg, x)

  def product_of(cfg, x):
    rows, columns, _ = _sizes(cfg, x.a, x.b)
    out = _call(cfg, call, _whole_rows(cfg, call.platform, x))
    return out[..., :rows, :columns]

  if x.bias is not None and x.bias.size != n:
    # A kernel knows one bias for all of a batch.
    lead = _lead(_leads(cfg, x._replace(bias=None)))
    out = product_of(_plain(cfg, x.a.dtype), flat._replace(bias=None))
    return _epilogue(cfg, out.reshape(*lead, m, n), x.bias)
  if x.bias is not None:
    wide = x.bias.dtype.name != cfg.out_dtype
    flat = flat._replace(bias=x.bias.reshape(n).astype(
        jnp.float32 if wide else x.bias.dtype))
  return product_of(cfg, flat).reshape(*_lead(_leads(cfg, x)), m, n)


def _plain(cfg: Config, dtype) -> Config:
  """cfg without its epilogue: the sums of operands of a dtype as they are."""
  return cfg._replace(out_dtype=_accumulator(dtype).name, activation=None)


# -----------------------------------------------------------------------------
# Sharding: leading axes, rows and columns partition. So does what is contracted
# where nothing is scaled; the shards' sums are then added in float32. The
# scales of a contraction are few and int8's sums exact: those are gathered.


def _names(cfg: Config, x: Operands):
  """Names of the dimensions of every operand, and of the result.

  "m", "n", "c0", "c1", ... are rows, columns and what is contracted, "k0" of a
  scaled product, "l0", "l1", ... leading axes; "ka" and "nb" count blocks; "_"
  is a lonely one.
  """
  kind = "c" if cfg.scaling == "none" else "k"
  contracted = tuple(f"{kind}{i}" for i in range(cfg.contracted))
  c, = contracted[:1]
  cores = {"nt": (("m", c), ("n", c)), "nn": (("m", c), (c, "n")),
           "tn": ((*contracted, "m"), (*contracted, "n"))}[cfg.layout]
  cores += {
      "none": (None, None), "row": (("m",), ("n",)),
      "block": (("m", "ka"), ("nb", "ka")), "mx": (("m", "ka"), ("n", "ka")),
      "block_t": (("ka", "m"), ("ka", "nb"))}[cfg.scaling]
  leads = _leads(cfg, x)
  lead = _lead(leads)

  def named(own, core, t):
    if t is None:
      return None
    skipped = len(lead) - len(own)
    names = (*(f"l{i}" for i in range(skipped, len(lead))), *core)
    sizes = (*lead[skipped:], *t.shape[len(own):])
    if cfg.scaling == "row" and core in (("m",), ("n",)) and t.shape[-1] == 1:
      names = (*names[:-1], "_")
    return tuple("_" if size != whole else name for name, size, whole in zip(
        names, t.shape, sizes, strict=True))

  operands = Operands(*map(named, leads, (*cores, ("n",)), x))
  return (operands,), (*(f"l{i}" for i in range(len(lead))), "m", "n")


def _plan(cfg: Config, run, mesh, args):
  # An axis that divides a weight as well as the rows that meet it (FSDP)
  # divides the rows: a comes first, and the contraction last.
  names, _ = _names(cfg, *args)
  axes = axes_of_arguments(mesh, names, ("l", "m", "n"), args)
  if "block" in cfg.scaling and "n" in axes:
    parts = math.prod(mesh.shape[a] for a in axes["n"])
    if args[0].b.shape[-2] % (parts * BLOCK):
      del axes["n"]
    else:
      axes["nb"] = axes["n"]
  taken = {a for divided in axes.values() for a in divided}
  summed = {
      name: divided for name, divided in axes_of_arguments(
          mesh, names, ("c",), args).items() if not taken.intersection(divided)}

  def one_shard(x):
    if not summed:
      return run(x)
    part = product.run(_plain(cfg, x.a.dtype), x._replace(bias=None))
    over = tuple(a for divided in summed.values() for a in divided)
    return _epilogue(cfg, lax.psum(part, over), x.bias)

  return axes | summed, one_shard


def _batch(cfg: Config, op, size, mapped, x: Operands):
  mapped, = mapped
  ranks = _ranks(cfg)
  axes = max(t.ndim - rank - m for t, m, rank in zip(x, mapped, ranks)
             if t is not None)

  def with_lead(t, mapped, rank):
    if t is None or not mapped:
      return t
    ones = (1,) * (axes + rank + 1 - t.ndim)
    return t.reshape(size, *ones, *t.shape[1:])

  return op(Operands(*map(with_lead, x, mapped, ranks)))


# -----------------------------------------------------------------------------
# Operators


# (Config, Operands) -> [..., m, n]
product = operator(
    target="gemm", kernel=_kernel, reference=reference, specs=_names,
    split=("l", "m", "n", "c"), serves=_serves, dtypes=_DTYPES, batch=_batch,
    plan=_plan)


def _save(cfg: Config, x: Operands):
  if cfg.activation is None:
    return product(cfg, x), (x, None)
  # What goes into the activation is not rounded before it is activated, just
  # as without a gradient.
  z = product(_plain(cfg, x.a.dtype), x)
  return _epilogue(cfg, z, None), (x, z.astype(cfg.out_dtype))


def _backward(cfg: Config, wanted, saved, dout):
  wanted, = wanted
  x, z = saved
  a, b = x.a, x.b
  acc = _accumulator(a.dtype)
  dz = dout.astype(acc)
  if z is not None:
    dz, = jax.vjp(ACTIVATIONS[cfg.activation], z.astype(acc))[1](dz)
  grads = Operands(None, None)
  if wanted.bias:
    grads = grads._replace(bias=jnp.sum(dz, range(dz.ndim - 1)))
  dz = dz.astype(a.dtype)
  transposed = cfg.layout == "nt"
  if wanted.a:
    grads = grads._replace(a=product(
        Config(a.dtype.name, "nn" if transposed else "nt"), Operands(dz, b)))
  if wanted.b:
    rows = a.ndim - b.ndim + 1
    grads = grads._replace(b=product(
        Config(b.dtype.name, "tn", contracted=rows),
        Operands(dz, a) if transposed else Operands(a, dz)))
  return (grads,)


def _tangent(cfg: Config, saved, tangents):
  x, _ = saved
  return formula_jvp(functools.partial(reference, cfg), (x,), tangents)


# (Config, Operands) -> activation(a @ b.T + bias), [..., m, n]; of layout "nt",
# without scaling, a [..., m, k], b [n, k] or with a's leading axes, bias [n].
# Of layout "nn" activation(a @ b + bias), b [k, n].
gemm = differentiable(product, _backward, save=_save, tangent=_tangent)
