# SPDX-License-Identifier: Apache-2.0
"""Rotary position embedding as an operator: formula and kernel's operands.

Su et al., "RoFormer: Enhanced Transformer with Rotary Position Embedding"
(arXiv:2104.09864). The operator is linear in x and y, and its transpose is the
same operator with `Config.transposed` the other way round: gradients of any
order are that kernel. Gradients of the tables are the formula's.

Tokens, heads and sequences shard over a mesh; a mapped axis is one more axis of
tokens.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np

import jax
from jax import lax
from jax._src.aiter.core.derivative import differentiable, formula_jvp
from jax._src.aiter.core.dims import filled
from jax._src.aiter.core.dispatch import absent, like
from jax._src.aiter.core.operator import Key, operator, with_axis
from jax._src.aiter.core.partition import axes_of_arguments

_DTYPES = {"float16": "fp16", "bfloat16": "bf16", "float32": "fp32"}
_SPLIT = ("outer", "seq", "inner", "heads_x", "heads_y")


class Config(NamedTuple):
  """Static facts of a call; hashable.

  Attributes:
    gptj: pairs are neighbours, (0, 1), (2, 3), ...; else halves, of what is
      turned or of each of the `splits`.
    full: tables are as wide as what is turned, and have its columns.
    nope_first: the last channels are turned, not the first ones.
    transposed: by the transposed matrix.
    sections: three numbers of pairs, each with a row of the tables for itself;
      or none.
    grid: (height, width) of the planes of a volume; a position is a place in
      it, and its coordinates are the rows of the three sections.
    splits: three numbers of pairs whose halves lie side by side; or none, for
      all of them.
  """
  gptj: bool = False
  full: bool = False
  nope_first: bool = False
  transposed: bool = False
  sections: tuple[int, ...] = ()
  grid: tuple[int, ...] = ()
  splits: tuple[int, ...] = ()


class Tokens(NamedTuple):
  """Arrays of a call; an absent one is None.

  Attributes:
    x: [outer, seq, inner, heads, d]; seq counts positions.
    y: likewise, with heads of its own; or None.
    cos: [rows, w], or each token's own: [outer, seq, inner, w]. w is the number
      of pairs, or of what is turned if they are full. x's dtype or float32.
    sin: like cos.
    positions: int32 [1 or 3, outer, seq, inner]: rows of the tables; of each
      section if there are three.
    offsets: int32 [outer, seq, inner]: is added to positions.
    cu_seqlens: int32 [n + 1]: where packed sequences begin in seq; positions
      count from there.
  """
  x: jax.Array
  y: jax.Array | None
  cos: jax.Array
  sin: jax.Array
  positions: jax.Array | None = None
  offsets: jax.Array | None = None
  cu_seqlens: jax.Array | None = None


# -----------------------------------------------------------------------------
# The formula in jax.numpy


def _ends(lengths):
  return [sum(lengths[:i + 1]) for i in range(len(lengths))]


def _pairs(cfg: Config, t):
  """The firsts and the seconds of the pairs in [..., 2 n]: [..., n] each."""
  if cfg.gptj:
    t = t.reshape(*t.shape[:-1], t.shape[-1] // 2, 2)
    return t[..., 0], t[..., 1]
  parts = [t]
  if cfg.splits:
    parts = jnp.split(t, _ends([2 * n for n in cfg.splits[:-1]]), -1)
  halves = [jnp.split(part, 2, -1) for part in parts]
  return tuple(jnp.concatenate(side, -1) for side in zip(*halves))


def _unpaired(cfg: Config, first, second):
  """What _pairs took apart."""
  if cfg.gptj:
    both = jnp.stack([first, second], -1)
    return both.reshape(*both.shape[:-2], 2 * both.shape[-2])
  parts = [(first,), (second,)]
  if cfg.splits:
    ends = _ends(cfg.splits[:-1])
    parts = [jnp.split(side, ends, -1) for side in (first, second)]
  return jnp.concatenate(
      [half for part in zip(*parts) for half in part], -1)


def _places(cfg: Config, tokens: Tokens):
  """Rows of the tables, one [outer, seq, inner] a section."""
  if tokens.positions is None:
    place = lax.broadcasted_iota(jnp.int32, tokens.x.shape[:3], 1)
    if tokens.cu_seqlens is not None:
      starts = tokens.cu_seqlens[:-1]
      place -= jnp.max(jnp.where(
          starts <= place[..., None], starts, starts[0]), -1)
    places = [place]
  else:
    places = list(tokens.positions)
  if tokens.offsets is not None:
    places = [place + tokens.offsets for place in places]
  if cfg.grid:
    # Signs are those of a kernel's division.
    height, width = (jnp.full_like(places[0], n) for n in cfg.grid)
    row = lax.div(places[0], width)
    places = [lax.div(row, height), lax.rem(row, height),
              lax.rem(places[0], width)]
  return places


def _own(cfg: Config, tokens: Tokens, table):
  """Each token's own numbers: of the pairs' firsts and of their seconds."""
  sides = _pairs(cfg, table) if cfg.full else (table,)
  if table.ndim == 2:
    places = _places(cfg, tokens)
    begins = [0, *_ends(cfg.sections or sides[0].shape[-1:])]
    take = functools.partial(jnp.take, axis=0, mode="clip")
    sides = [
        jnp.concatenate([take(side[:, b:e], place) for b, e, place in zip(
            begins, begins[1:], places)], -1)
        for side in (filled(t, 0) for t in sides)]
  sides = [_wide(side)[..., None, :] for side in sides]
  return sides[0], sides[-1]


def _wide(t):
  return t.astype(jnp.promote_types(t.dtype, jnp.float32))


def reference(cfg: Config, tokens: Tokens):
  """(x, y) with their pairs turned, in jax.numpy, in float32 or wider."""
  cos1, cos2 = _own(cfg, tokens, tokens.cos)
  sin1, sin2 = _own(cfg, tokens, tokens.sin)
  if cfg.transposed:
    sin1, sin2 = -sin2, -sin1

  def turned(x):
    width = 2 * cos1.shape[-1]
    rest = x.shape[-1] - width
    begin = rest if cfg.nope_first else 0
    x1, x2 = _pairs(cfg, _wide(x[..., begin:begin + width]))
    out = _unpaired(cfg, x1 * cos1 - x2 * sin1, x2 * cos2 + x1 * sin2)
    parts = [out.astype(x.dtype)]
    if cfg.nope_first:
      parts.insert(0, x[..., :rest])
    else:
      parts.append(x[..., width:])
    return jnp.concatenate(parts, -1)

  return turned(tokens.x), None if tokens.y is None else turned(tokens.y)


# -----------------------------------------------------------------------------
# The operator


def _numbers(cfg: Config, pairs: int):
  """Ends of the first two sections and splits."""
  whole = (pairs, 0, 0)
  ends = {}
  for name, lengths in (("section", cfg.sections), ("split", cfg.splits)):
    for i, end in enumerate(_ends(lengths or whole)[:2]):
      ends[f"{name}_{i}"] = end
  return ends


def _kernel(cfg: Config, call, tokens: Tokens):
  x, y, cos, sin, positions, offsets, cu_seqlens = tokens
  pairs = cos.shape[-1] // (1 + cfg.full)
  height, width = cfg.grid or (0, 0)
  none = like(x, (0,), x.dtype)
  x_out, y_out = call(
      (like(x, x.shape, x.dtype),
       none if y is None else like(y, y.shape, y.dtype)),
      x, absent(y, x.dtype), cos, sin, absent(positions, jnp.int32),
      absent(offsets, jnp.int32), absent(cu_seqlens, jnp.int32),
      gptj=cfg.gptj, full=cfg.full, nope_first=cfg.nope_first,
      transposed=cfg.transposed, has_sections=bool(cfg.sections),
      **{name: np.int32(n) for name, n in dict(
          grid_h=height, grid_w=width, **_numbers(cfg, pairs)).items()})
  return x_out, None if y is None else y_out


def _features(cfg: Config, tokens: Tokens):
  pairs = tokens.cos.shape[-1] // (1 + cfg.full)
  sizes = (pairs, tokens.x.shape[-1], *_numbers(cfg, pairs).values())
  present = dict(
      unaligned=any(n % 4 for n in sizes), by_four=any(n % 8 for n in sizes),
      gptj=cfg.gptj, full=cfg.full, sections=bool(cfg.sections),
      grid=bool(cfg.grid))
  return tuple(name for name, here in present.items() if here)


def _serves(cfg: Config, tokens: Tokens):
  x, y, cos = tokens[:3]
  if x.size == 0 or cos.size == 0 or (y is not None and y.size == 0):
    return None
  return Key("rope_rotate", x.dtype.name,
             (cos.shape[-1] // (1 + cfg.full),), _features(cfg, tokens))


def _specs(cfg: Config, tokens: Tokens):
  """Names of the dimensions."""
  lead = ("outer", "seq", "inner")
  x = (*lead, "heads_x", "dim")
  y = None if tokens.y is None else (*lead, "heads_y", "dim")
  table = ("rows", "width") if tokens.cos.ndim == 2 else (*lead, "width")
  named = lambda t, spec: None if t is None else spec
  own = Tokens(
      x, y, table, table, named(tokens.positions, ("sections", *lead)),
      named(tokens.offsets, lead), named(tokens.cu_seqlens, ("sequences",)))
  return (own,), (x, y)


def _plan(cfg: Config, run, mesh, args):
  """A shard of a sequence, or of packed ones, counts from where it begins."""
  specs, result_specs = _specs(cfg, *args)
  axes = axes_of_arguments(mesh, specs, _SPLIT, args, result_specs)

  def lower(tokens: Tokens):
    if ("seq" in axes and tokens.positions is None and tokens.cos.ndim == 2):
      shape = tokens.x.shape[:3]
      start = lax.axis_index(axes["seq"]).astype(jnp.int32) * shape[1]
      if tokens.cu_seqlens is not None:
        return run(tokens._replace(cu_seqlens=tokens.cu_seqlens - start))
      offsets = jnp.full(shape, start, jnp.int32)
      if tokens.offsets is not None:
        offsets += tokens.offsets
      tokens = tokens._replace(offsets=offsets)
    return run(tokens)

  return axes, lower


def _batch(cfg: Config, op, size, mapped, tokens: Tokens):
  """Tokens of all elements in one call, if they share their tables."""
  mapped, = mapped
  own_tables = tokens.cos.ndim - mapped.cos == 4
  shared = ("cu_seqlens",) if own_tables else ("cu_seqlens", "cos", "sin")
  if any(getattr(mapped, name) for name in shared):
    return lax.map(op, with_axis(size, mapped, tokens))
  kept = {name: getattr(tokens, name) for name in shared}
  without = dict.fromkeys(shared)
  every = with_axis(
      size, mapped._replace(**without), tokens._replace(**without))
  positions = every.positions
  if positions is not None:
    positions = jnp.moveaxis(positions, 0, 1)
    positions = positions.reshape(len(positions), -1, *positions.shape[3:])
    every = every._replace(positions=None)
  fold = lambda t: t.reshape(size * t.shape[1], *t.shape[2:])
  every = jax.tree.map(fold, every)._replace(positions=positions, **kept)
  return jax.tree.map(lambda t: t.reshape(size, -1, *t.shape[1:]), op(every))


_rotate = operator(
    target="rope_rotate", kernel=_kernel, reference=reference, specs=_specs,
    split=_SPLIT, serves=_serves, dtypes=_DTYPES, batch=_batch, plan=_plan)


# -----------------------------------------------------------------------------
# Derivatives


def _keep(cfg: Config, wanted, tokens: Tokens):
  """Only derivatives by the tables are made of x and y."""
  wanted, = wanted
  if wanted.cos or wanted.sin:
    return tokens
  return tokens._replace(x=None, y=None)


def _of_vectors(cfg: Config, tokens: Tokens, vectors):
  """`rotate` of the vectors of (x, y) that are there; the others are 0."""
  given = [i for i in range(2) if vectors[i] is not None]
  if not given:
    return [None, None]
  some = [vectors[i] for i in given] + [None]
  found = rotate(cfg, tokens._replace(x=some[0], y=some[1]))
  return [found[given.index(i)] if i in given else None for i in range(2)]


def _of_tables(cfg: Config, tokens: Tokens):
  """The formula as a function of the tables."""
  return lambda cos, sin: reference(cfg, tokens._replace(cos=cos, sin=sin))


def _backward(cfg: Config, wanted, tokens: Tokens, cotangents):
  """dx and dy by the kernel, the tables' gradients by the formula."""
  wanted, = wanted
  back = cfg._replace(transposed=not cfg.transposed)
  dx, dy = _of_vectors(
      back, tokens,
      [t if wanted[i] else None for i, t in enumerate(cotangents)])
  dcos = dsin = None
  if wanted.cos or wanted.sin:
    out, vjp = jax.vjp(_of_tables(cfg, tokens), tokens.cos, tokens.sin)
    dcos, dsin = vjp(tuple(
        jnp.zeros_like(t) if d is None and t is not None else d
        for t, d in zip(out, cotangents)))
  return (Tokens(dx, dy, dcos, dsin),)


def _tangent(cfg: Config, tokens: Tokens, tangents):
  tangents, = tangents
  out = _of_vectors(cfg, tokens, tangents[:2])
  tables = tangents.cos, tangents.sin
  if any(t is not None for t in tables):
    more = formula_jvp(
        _of_tables(cfg, tokens), (tokens.cos, tokens.sin), tables)
    out = [a if b is None else b if a is None else a + b
           for a, b in zip(out, more)]
  return tuple(out)


# (Config, Tokens) -> (x, y) with their pairs turned; y may be None.
rotate = differentiable(
    _rotate, _backward, save=lambda cfg, tokens: (_rotate(cfg, tokens), tokens),
    tangent=_tangent, keep=_keep)
