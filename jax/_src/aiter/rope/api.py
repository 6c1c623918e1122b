# SPDX-License-Identifier: Apache-2.0
"""Rotary position embedding: the public functions and their arguments."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence

import jax.numpy as jnp

import jax
from jax._src.aiter.core import arguments, dims
from jax._src.aiter.core.partition import vary_together
from jax._src.aiter.rope import op as rope_op
from jax._src.aiter.rope.op import Config, Tokens

_DTYPES = ("float16", "bfloat16", "float32", "float64")
_STYLES = ("neox", "gptj")
# Layout -> its rank and the axes of [outer, seq, inner]; None is one of 1.
_LAYOUTS = {"bshd": (4, (0, 1, None)), "sbhd": (4, (None, 0, 1)),
            "thd": (3, (None, 0, None))}


def _check_float(function: str, name: str, t) -> None:
  arguments.check_dtype(function, name, t, _DTYPES)


def _shared_shape(t):
  """[rows, w] of a table with axes of 1 between, or None."""
  long = [n for n in t.shape[:-1] if not (dims.is_known(n) and n == 1)]
  if t.ndim < 2 or len(long) > 1:
    return None
  return (*(long or [1]), t.shape[-1])


def _check_table(function: str, name: str, t, tokens, placed: bool) -> bool:
  """Whether a table has a row for each token; an error if it is none."""
  _check_float(function, name, t)
  if len(tokens) > 1 and t.shape[:-1] == tokens and not placed:
    return True
  if _shared_shape(t) is None:
    raise arguments.bad(
        function, name, arguments.describe(t),
        "shape [positions, n], perhaps with axes of 1"
        + ("" if placed else f", or {[*tokens, 'n']}"))
  return False


def _check_indices(function: str, name: str, t, shape, accepted) -> None:
  """Integers that broadcast to the tokens."""
  arguments.check_integers(function, name, t)
  padded = (1,) * (len(shape) - t.ndim) + t.shape
  if len(padded) != len(shape) or any(
      n != m and not (dims.is_known(n) and n == 1)
      for n, m in zip(padded, shape)):
    raise arguments.bad(function, name, arguments.describe(t), accepted)


def _sections(function: str, value, pairs: int) -> tuple[int, ...]:
  """Three numbers of pairs."""
  if (not all(isinstance(n, int) and n >= 0 for n in value)
      or len(value) != 3 or sum(value) != pairs):
    raise arguments.bad(
        function, "sections", repr(value),
        f"three numbers of pairs whose sum is {pairs}, all that cos has")
  return tuple(value)


def _check_vectors(function: str, layout: str, x, y, names):
  """x, and y if it is there, as `layout` wants them."""
  rank = _LAYOUTS[
      arguments.choice(function, "layout", layout, tuple(_LAYOUTS))][0]
  for name, t in zip(names, (x, y) if y is not None else (x,)):
    _check_float(function, name, t)
    if t.ndim != rank:
      raise arguments.bad(function, name, arguments.describe(t),
                          f"{rank} axes, for layout {layout}")
  if y is not None and (*y.shape[:-2], y.shape[-1], y.dtype) != (
      *x.shape[:-2], x.shape[-1], x.dtype):
    raise arguments.bad(
        function, names[1], arguments.describe(y),
        f"{arguments.describe(x)}, as {names[0]} but for the heads")


def turned(
    function: str, x, y, cos, sin, *, layout="bshd", rotate_style="neox",
    positions=None, offsets=None, cu_seqlens=None, reuse_freqs_front_part=True,
    nope_first=False, sections=(), grid=(), splits=(), transposed=False,
    names=("x", "y")):
  """(x, y) turned, after all checks.

  Args:
    function: the public function's name.
    x: as in rope.
    y: likewise, or None.
    cos: as in rope.
    sin: as in rope.
    layout: as in rope.
    rotate_style: as in rope.
    positions: as in rope; with sections and no grid three of them.
    offsets: as in rope.
    cu_seqlens: as in rope.
    reuse_freqs_front_part: as in rope.
    nope_first: as in rope.
    sections: numbers of pairs that have rows of their own.
    grid: (height, width) of the planes that positions count through.
    splits: of neox, numbers of pairs whose halves lie side by side.
    transposed: whether to turn back.
    names: of x and y, for messages.
  """
  bad = functools.partial(arguments.bad, function)
  _check_vectors(function, layout, x, y, names)
  gptj = arguments.choice(
      function, "rotate_style", rotate_style, _STYLES) == "gptj"
  flag = functools.partial(arguments.flag, function)
  full = not flag("reuse_freqs_front_part", reuse_freqs_front_part)
  nope_first = flag("nope_first", nope_first)
  tokens, d = x.shape[:-2], x.shape[-1]

  placed = any(t is not None for t in (positions, offsets, cu_seqlens))
  own, also = (_check_table(function, name, t, tokens, placed or bool(grid))
               for name, t in (("cos", cos), ("sin", sin)))
  shape = lambda t, own: t.shape if own else _shared_shape(t)
  if shape(cos, own) != shape(sin, also):
    raise bad("sin", arguments.describe(sin),
              f"shape {list(cos.shape)}, as cos")
  width = cos.shape[-1] * (1 if full else 2)
  if width > d or width % 2 or width == 0:
    raise bad("cos", arguments.describe(cos),
              f"at most {d} channels, x's last dimension, in pairs; it says to"
              f" turn {width}")
  sections, splits = (t and _sections(function, t, width // 2)
                      for t in (sections, splits))

  seq = tokens[1 if layout == "bshd" else 0]
  rows = shape(cos, own)[0]
  if not own and all(map(dims.is_known, (rows, *tokens))) and 0 not in tokens:
    if rows == 0 or (not placed and not grid and seq > rows):
      raise bad("cos", arguments.describe(cos), f"at least {max(seq, 1)} rows")
  words = f"integers that broadcast to {list(tokens)}, x's tokens"
  if positions is not None and sections and not grid:
    arguments.check_is_array(function, "positions", positions, False)
    of_three = f"shape {[3, *tokens]}"
    if positions.ndim != len(tokens) + 1 or positions.shape[0] != 3:
      raise bad("positions", arguments.describe(positions), of_three)
    _check_indices(function, "positions", positions, (3, *tokens), of_three)
  elif positions is not None:
    _check_indices(function, "positions", positions, tokens, words)
  if offsets is not None:
    _check_indices(function, "offsets", offsets, tokens, words)
  if cu_seqlens is not None:
    arguments.check_integers(function, "cu_seqlens", cu_seqlens)
    if cu_seqlens.ndim != 1 or (dims.is_known(cu_seqlens.shape[0])
                                and cu_seqlens.shape[0] < 2):
      raise bad("cu_seqlens", arguments.describe(cu_seqlens),
                "shape [n + 1] for n sequences, n at least 1")
    if positions is not None:
      raise bad("cu_seqlens", "given", "None with positions")
    arguments.check_cumulative(function, "cu_seqlens", cu_seqlens, seq)

  cfg = Config(gptj, full, nope_first, transposed, sections, tuple(grid),
               () if gptj else splits)
  places = (None if t is None else arguments.int32(t)
            for t in (positions, offsets, cu_seqlens))
  return _turn(cfg, layout, own, Tokens(x, y, cos, sin, *places))


def _lead(t, layout: str, axes: int):
  """t with [outer, seq, inner] in the place of its `axes` axes of tokens."""
  lead = (1 if i is None else t.shape[i] for i in _LAYOUTS[layout][1])
  return t.reshape(*lead, *t.shape[axes:])


@functools.partial(jax.jit, static_argnums=(0, 1, 2), inline=True)
def _turn(cfg: Config, layout: str, own: bool, given: Tokens):
  """(x, y) turned, of checked arguments; `own`: each token has a row."""
  x, y, cos, sin, positions, offsets, cu_seqlens = given
  tokens = x.shape[:-2]
  lead = lambda t: None if t is None else _lead(t, layout, len(tokens))
  if positions is not None:
    count = 3 if cfg.sections and not cfg.grid else 1
    positions = jnp.broadcast_to(positions, (count, *tokens))
    positions = jnp.stack([lead(positions[i]) for i in range(count)])
  if offsets is not None:
    offsets = lead(jnp.broadcast_to(offsets, tokens))
  # Tables in x's type or in float32, or, of a float64 x, in that; one for both.
  dtype = x.dtype
  if cos.dtype != dtype or sin.dtype != dtype:
    dtype = jnp.promote_types(dtype, jnp.float32)
  cos, sin = ((lead(t) if own else t.reshape(_shared_shape(t))).astype(dtype)
              for t in (cos, sin))
  out = rope_op.rotate(cfg, vary_together(Tokens(
      lead(x), lead(y), cos, sin, positions, offsets, cu_seqlens)))
  return tuple(None if t is None else t.reshape(like.shape)
               for t, like in zip(out, (x, y)))


def tables_of(function: str, cos, sin, freqs):
  """(cos, sin): as given, or those of angles, in float32."""
  if freqs is None:
    for name, t in (("cos", cos), ("sin", sin)):
      if t is None:
        raise arguments.bad(function, name, "None", "an array, or freqs")
    return cos, sin
  if cos is not None or sin is not None:
    raise arguments.bad(function, "freqs", "given", "None with cos or sin")
  _check_float(function, "freqs", freqs)
  angles = jnp.asarray(freqs).astype(
      jnp.promote_types(freqs.dtype, jnp.float32))
  return jnp.cos(angles), jnp.sin(angles)


def rope(
    x: jax.Array,
    cos: jax.Array | None = None,
    sin: jax.Array | None = None,
    *,
    freqs: jax.Array | None = None,
    layout: str = "bshd",
    rotate_style: str = "neox",
    positions: jax.Array | None = None,
    offsets: jax.Array | None = None,
    cu_seqlens: jax.Array | None = None,
    reuse_freqs_front_part: bool = True,
    nope_first: bool = False,
) -> jax.Array:
  """Rotary position embedding.

  Turns pairs of channels by angles that depend on a token's position (Su et
  al., arXiv:2104.09864), in float32, in one pass over memory on a GPU:

    out1 = x1 * cos - x2 * sin        out2 = x2 * cos + x1 * sin

  The gradient of x is the same kernel, turned back: the exact transpose, also
  where the two of a pair have cosines and sines of their own. Tables have
  gradients too, by jax.numpy.

  Args:
    x: [b, s, h, d], [s, b, h, d] or [t, h, d], as the layout says; float16,
      bfloat16, float32 or (by the reference) float64.
    cos: cosines, a row a position: [positions, n], where axes of 1 may stand
      between, as in AITER's [s, 1, 1, n]. Or a row for each token: [b, s, n],
      [s, b, n]. A float type of its own. n is half of d_rot, the number of
      channels that are turned, or d_rot itself without
      reuse_freqs_front_part; d_rot is at most d.
    sin: sines, like cos.
    freqs: angles, like cos, in the place of both; cos and sin of them are
      float32.
    layout: "bshd", "sbhd" or "thd" (packed).
    rotate_style: "neox": pair j is channels j and j + d_rot / 2; "gptj":
      channels 2 j and 2 j + 1.
    positions: integers that broadcast to the tokens ([b, s], [s, b] or [t]):
      each one's row of the tables. By default its place in the sequence. A row
      out of range is the nearest one.
    offsets: integers likewise, which are added to the positions.
    cu_seqlens: [n + 1], where the packed sequences begin, and where the last
      one ends: positions begin at 0 in each. Not with positions.
    reuse_freqs_front_part: a cosine and a sine for both of a pair. Else each
      has its own, and the tables have x's columns.
    nope_first: turn the last d_rot channels, not the first. The others are
      copied.

  Returns:
    Like x.

  Raises:
    TypeError: an argument of the wrong type or dtype.
    ValueError: a shape or value that cannot be; the message names it.
  """
  cos, sin = tables_of("rope", cos, sin, freqs)
  return turned("rope", x, None, cos, sin, layout=layout,
               rotate_style=rotate_style, positions=positions, offsets=offsets,
               cu_seqlens=cu_seqlens,
               reuse_freqs_front_part=reuse_freqs_front_part,
               nope_first=nope_first)[0]


def rope_2c(
    q: jax.Array,
    k: jax.Array,
    cos: jax.Array | None = None,
    sin: jax.Array | None = None,
    *,
    freqs: jax.Array | None = None,
    layout: str = "bshd",
    rotate_style: str = "neox",
    positions: jax.Array | None = None,
    offsets: jax.Array | None = None,
    cu_seqlens: jax.Array | None = None,
    reuse_freqs_front_part: bool = True,
    nope_first: bool = False,
) -> tuple[jax.Array, jax.Array]:
  """`rope` of queries and keys, by one kernel.

  Args:
    q: as x of rope.
    k: like q but for the number of heads.
    cos: as in rope.
    sin: as in rope.
    freqs: as in rope.
    layout: as in rope.
    rotate_style: as in rope.
    positions: as in rope.
    offsets: as in rope.
    cu_seqlens: as in rope.
    reuse_freqs_front_part: as in rope.
    nope_first: as in rope.

  Returns:
    (q, k), turned.

  Raises:
    TypeError: as rope.
    ValueError: as rope.
  """
  cos, sin = tables_of("rope_2c", cos, sin, freqs)
  return turned("rope_2c", q, k, cos, sin, layout=layout,
               rotate_style=rotate_style, positions=positions, offsets=offsets,
               cu_seqlens=cu_seqlens,
               reuse_freqs_front_part=reuse_freqs_front_part,
               nope_first=nope_first, names=("q", "k"))


def _joined(tables):
  """One table of the columns of all; its rows are those of each."""
  rows = max(t.shape[0] for t in tables)
  # A row past a table's end is never looked at.
  return jnp.concatenate([
      jnp.pad(t, ((0, rows - t.shape[0]), (0, 0))) for t in tables], -1)


def _by_place(sizes, tables):
  """Likewise, with a row for each place of the volume."""
  return jnp.concatenate([
      jnp.broadcast_to(
          jnp.expand_dims(t[:n], [a for a in range(len(sizes)) if a != axis]),
          (*sizes, t.shape[-1]))
      for axis, (n, t) in enumerate(zip(sizes, tables))], -1).reshape(
          math.prod(sizes), -1)


def turned_in_volume(function: str, x, tables, sizes, axes, **options):
  """x turned by its places in a volume, each coordinate by its own table."""
  number = functools.partial(
      arguments.number, function, accepted="an integer of at least 1",
      allowed=lambda n: n >= 1, kind=int)
  sizes = [number(name, value=n) for name, n in sizes]
  full = not arguments.flag(function, "reuse_freqs_front_part",
                            options["reuse_freqs_front_part"])
  cos, sin = [], []
  for name, pair, n in zip(axes, tables, sizes):
    for kind, t, flat in zip(("cos", "sin"), pair, (cos, sin)):
      _check_float(function, f"{kind}_{name}", t)
      shape = _shared_shape(t)
      if (shape is None or shape[0] < n or shape[-1] % (1 + full)
          or shape[-1] != pair[0].shape[-1]):
        raise arguments.bad(
            function, f"{kind}_{name}", arguments.describe(t),
            f"shape [{n}, n]" + ", n even" * full + f", as cos_{name}")
      flat.append(t.reshape(shape))
  seq = x.shape[1] if getattr(x, "ndim", 0) == 4 else None
  places = math.prod(sizes)
  if seq is not None and dims.is_known(seq) and seq != places:
    raise arguments.bad(function, "x", arguments.describe(x),
                        f"a sequence of {places}, the places of the volume")
  sections = [t.shape[-1] // (1 + full) for t in cos]
  sections = [0] * (3 - len(sections)) + sections
  if any(n % 4 for n in sections):
    # A kernel that takes each section's own rows would load by single numbers.
    join, own = functools.partial(_by_place, sizes), {}
  else:
    join, own = _joined, dict(grid=sizes[-2:], sections=sections)
  return turned(function, x, None, join(cos), join(sin), splits=sections,
                **own, **options)[0]


def rope_2d(
    x: jax.Array,
    cos_h: jax.Array,
    sin_h: jax.Array,
    cos_w: jax.Array,
    sin_w: jax.Array,
    *,
    height: int,
    width: int,
    rotate_style: str = "neox",
    reuse_freqs_front_part: bool = True,
    nope_first: bool = False,
) -> jax.Array:
  """Rotary embedding of an image's patches.

  The first channels are turned by a patch's row, as `rope` would turn them
  alone, and those behind them by its column.

  Args:
    x: [b, height * width, h, d]: rows of patches one after the other.
    cos_h: [height or more, n]: half the number of channels that rows turn, or
      all of them without reuse_freqs_front_part. Axes of 1 may stand between.
    sin_h: like cos_h.
    cos_w: [width or more, n], of columns.
    sin_w: like cos_w.
    height: patches in a column.
    width: patches in a row.
    rotate_style: as in rope.
    reuse_freqs_front_part: as in rope.
    nope_first: as in rope.

  Returns:
    Like x.

  Raises:
    TypeError: as rope.
    ValueError: as rope.
  """
  return turned_in_volume(
      "rope_2d", x, ((cos_h, sin_h), (cos_w, sin_w)),
      (("height", height), ("width", width)), ("h", "w"),
      rotate_style=rotate_style, nope_first=nope_first,
      reuse_freqs_front_part=reuse_freqs_front_part)


def rope_3d(
    x: jax.Array,
    cos_t: jax.Array,
    sin_t: jax.Array,
    cos_h: jax.Array,
    sin_h: jax.Array,
    cos_w: jax.Array,
    sin_w: jax.Array,
    *,
    frames: int,
    height: int,
    width: int,
    rotate_style: str = "gptj",
    reuse_freqs_front_part: bool = True,
    nope_first: bool = False,
) -> jax.Array:
  """Rotary embedding of a video's patches: `rope_2d` with frames in front.

  Args:
    x: [b, frames * height * width, h, d]: one frame after the other.
    cos_t: as cos_h of rope_2d, of frames.
    sin_t: like cos_t.
    cos_h: as in rope_2d.
    sin_h: like cos_h.
    cos_w: as in rope_2d.
    sin_w: like cos_w.
    frames: number of frames.
    height: as in rope_2d.
    width: as in rope_2d.
    rotate_style: as in rope; by default as Wan's and CogVideoX's weights have
      it.
    reuse_freqs_front_part: as in rope.
    nope_first: as in rope.

  Returns:
    Like x.

  Raises:
    TypeError: as rope.
    ValueError: as rope.
  """
  return turned_in_volume(
      "rope_3d", x, ((cos_t, sin_t), (cos_h, sin_h), (cos_w, sin_w)),
      (("frames", frames), ("height", height), ("width", width)),
      ("t", "h", "w"), rotate_style=rotate_style, nope_first=nope_first,
      reuse_freqs_front_part=reuse_freqs_front_part)


def rope_mrope(
    q: jax.Array,
    k: jax.Array,
    cos: jax.Array,
    sin: jax.Array,
    positions: jax.Array,
    sections: Sequence[int],
    *,
    layout: str = "bshd",
    rotate_style: str = "neox",
    nope_first: bool = False,
) -> tuple[jax.Array, jax.Array]:
  """Multimodal rotary embedding of queries and keys (Qwen2-VL).

  A token has three positions, of time, height and width, and each turns a
  section of the pairs (Wang et al., arXiv:2409.12191). Text has three equal
  ones, and is turned as by `rope_2c`.

  Args:
    q: as in rope_2c.
    k: as in rope_2c.
    cos: [positions, d_rot / 2], as in rope.
    sin: like cos.
    positions: integers [3, b, s], or with the tokens' axes of the layout.
    sections: three numbers of pairs whose sum is d_rot / 2.
    layout: as in rope.
    rotate_style: as in rope.
    nope_first: as in rope.

  Returns:
    (q, k), turned.

  Raises:
    TypeError: as rope.
    ValueError: as rope.
  """
  arguments.check_is_array("rope_mrope", "positions", positions, False)
  arguments.static("rope_mrope", "sections", sections, "three numbers of pairs")
  if not isinstance(sections, Sequence) or not sections:
    raise arguments.bad("rope_mrope", "sections", repr(sections),
                        "three numbers of pairs")
  return turned("rope_mrope", q, k, cos, sin, layout=layout,
               rotate_style=rotate_style, positions=positions,
               sections=list(sections), nope_first=nope_first,
               names=("q", "k"))
