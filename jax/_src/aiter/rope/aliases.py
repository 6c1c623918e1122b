# SPDX-License-Identifier: Apache-2.0
"""AITER's, jax-aiter's and tpu-inference's names for rotary embedding.

They take those projects' arguments and return new arrays, in the place of
writing into one. AITER's tensors are [s, b, h, d]; rotate_style is 0 (NeoX,
halves) or 1 (GPT-J, neighbours); freqs, cos and sin are [s, 1, 1, n]. What
`transpose_output` says is the order in memory, which is XLA's to choose: it
changes nothing. `..._bwd` turn gradients back: the transpose of `..._fwd`.
"""

from __future__ import annotations

import math
import numbers
from collections.abc import Mapping
from typing import Any

import jax.numpy as jnp
import numpy as np

import jax
from jax._src.aiter.core import arguments
from jax._src.aiter.rope import api, tables

_STYLES = {0: "neox", 1: "gptj"}
# What tpu-inference makes of a rope_scaling that names no kind.
_UNNAMED_SCALING = dict(
    rope_type="llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0,
    original_max_position_embeddings=8192)


def _style(function: str, rotate_style) -> str:
  return _STYLES[arguments.number(
      function, "rotate_style", rotate_style, "0 (NeoX) or 1 (GPT-J)",
      lambda n: n in _STYLES, int)]


def _truth(function: str, name: str, value) -> bool:
  """AITER takes numbers for flags."""
  if isinstance(arguments.static(function, name, value, "a bool"),
                (numbers.Number, np.bool_)):
    return bool(value)
  raise arguments.bad(function, name, repr(value), "a bool", TypeError)


def _call(function, x, y, cos, sin, rotate_style, reuse_freqs_front_part,
          nope_first, freqs=None, layout="sbhd", transposed=False, **places):
  """(x, y) of AITER's arguments."""
  cos, sin = api.tables_of(function, cos, sin, freqs)
  return api.turned(
      function, x, y, cos, sin, layout=layout, transposed=transposed,
      rotate_style=_style(function, rotate_style),
      reuse_freqs_front_part=_truth(
          function, "reuse_freqs_front_part", reuse_freqs_front_part),
      nope_first=_truth(function, "nope_first", nope_first),
      names=("input",) if y is None else ("input_x", "input_y"), **places)


def _checked(function, transpose_output):
  arguments.flag(function, "transpose_output", transpose_output)


def rope_fwd(input, freqs, rotate_style, reuse_freqs_front_part, nope_first,
             transpose_output=False):
  """AITER's rope_fwd: `rope` by angles, of [s, b, h, d]."""
  _checked("rope_fwd", transpose_output)
  return _call("rope_fwd", input, None, None, None, rotate_style,
               reuse_freqs_front_part, nope_first, freqs)[0]


def rope_bwd(output_grads, freqs, rotate_style, reuse_freqs_front_part,
             nope_first, transpose_output=False):
  """AITER's rope_bwd: the gradient of rope_fwd's input."""
  _checked("rope_bwd", transpose_output)
  return _call("rope_bwd", output_grads, None, None, None, rotate_style,
               reuse_freqs_front_part, nope_first, freqs, transposed=True)[0]


def rope_2c_fwd(input_x, input_y, freqs, rotate_style, reuse_freqs_front_part,
                nope_first, transpose_output=False):
  """AITER's rope_2c_fwd: rope_fwd of two tensors, by one kernel."""
  _checked("rope_2c_fwd", transpose_output)
  return _call("rope_2c_fwd", input_x, input_y, None, None, rotate_style,
               reuse_freqs_front_part, nope_first, freqs)


def rope_2c_bwd(output_grads_x, output_grads_y, freqs, rotate_style,
                reuse_freqs_front_part, nope_first, transpose_output=False):
  """AITER's rope_2c_bwd: the gradients of rope_2c_fwd's inputs."""
  _checked("rope_2c_bwd", transpose_output)
  return _call("rope_2c_bwd", output_grads_x, output_grads_y, None, None,
               rotate_style, reuse_freqs_front_part, nope_first, freqs,
               transposed=True)


def rope_cached_fwd(input, cos, sin, rotate_style, reuse_freqs_front_part,
                    nope_first, transpose_output=False):
  """AITER's rope_cached_fwd: `rope` of [s, b, h, d]."""
  _checked("rope_cached_fwd", transpose_output)
  return _call("rope_cached_fwd", input, None, cos, sin, rotate_style,
               reuse_freqs_front_part, nope_first)[0]


def rope_cached_bwd(output_grads, cos, sin, rotate_style,
                    reuse_freqs_front_part, nope_first,
                    transpose_output=False):
  """AITER's rope_cached_bwd: the gradient of rope_cached_fwd's input."""
  _checked("rope_cached_bwd", transpose_output)
  return _call("rope_cached_bwd", output_grads, None, cos, sin, rotate_style,
               reuse_freqs_front_part, nope_first, transposed=True)[0]


def rope_cached_2c_fwd(input_x, input_y, cos, sin, rotate_style,
                       reuse_freqs_front_part, nope_first,
                       transpose_output=False):
  """AITER's rope_cached_2c_fwd: rope_cached_fwd of two tensors."""
  _checked("rope_cached_2c_fwd", transpose_output)
  return _call("rope_cached_2c_fwd", input_x, input_y, cos, sin, rotate_style,
               reuse_freqs_front_part, nope_first)


def rope_cached_2c_bwd(output_grads_x, output_grads_y, cos, sin, rotate_style,
                       reuse_freqs_front_part, nope_first,
                       transpose_output=False):
  """AITER's rope_cached_2c_bwd: gradients of rope_cached_2c_fwd's inputs."""
  _checked("rope_cached_2c_bwd", transpose_output)
  return _call("rope_cached_2c_bwd", output_grads_x, output_grads_y, cos, sin,
               rotate_style, reuse_freqs_front_part, nope_first,
               transposed=True)


def rope_cached_positions_fwd(input, cos, sin, positions, rotate_style,
                              reuse_freqs_front_part, nope_first,
                              transpose_output=False):
  """AITER's rope_cached_positions_fwd; positions: [s, b]."""
  _checked("rope_cached_positions_fwd", transpose_output)
  return _call("rope_cached_positions_fwd", input, None, cos, sin, rotate_style,
               reuse_freqs_front_part, nope_first, positions=positions)[0]


def rope_cached_positions_2c_fwd(input_x, input_y, cos, sin, positions,
                                 rotate_style, reuse_freqs_front_part,
                                 nope_first, transpose_output=False):
  """AITER's rope_cached_positions_2c_fwd: of two tensors."""
  _checked("rope_cached_positions_2c_fwd", transpose_output)
  return _call("rope_cached_positions_2c_fwd", input_x, input_y, cos, sin,
               rotate_style, reuse_freqs_front_part, nope_first,
               positions=positions)


def rope_cached_positions_offsets_fwd(input, cos, sin, positions, offsets,
                                      rotate_style, reuse_freqs_front_part,
                                      nope_first, transpose_output=False):
  """AITER's rope_cached_positions_offsets_fwd: rows positions + offsets."""
  _checked("rope_cached_positions_offsets_fwd", transpose_output)
  return _call("rope_cached_positions_offsets_fwd", input, None, cos, sin,
               rotate_style, reuse_freqs_front_part, nope_first,
               positions=positions, offsets=offsets)[0]


def rope_cached_positions_offsets_2c_fwd(
    input_x, input_y, cos, sin, positions, offsets, rotate_style,
    reuse_freqs_front_part, nope_first, transpose_output=False):
  """AITER's rope_cached_positions_offsets_2c_fwd: of two tensors."""
  _checked("rope_cached_positions_offsets_2c_fwd", transpose_output)
  return _call("rope_cached_positions_offsets_2c_fwd", input_x, input_y, cos,
               sin, rotate_style, reuse_freqs_front_part, nope_first,
               positions=positions, offsets=offsets)


def rope_thd_fwd(input, cu_seqlens, freqs, rotate_style,
                 reuse_freqs_front_part, nope_first):
  """AITER's rope_thd_fwd: of packed sequences [t, h, d]."""
  return _call("rope_thd_fwd", input, None, None, None, rotate_style,
               reuse_freqs_front_part, nope_first, freqs, layout="thd",
               cu_seqlens=cu_seqlens)[0]


def rope_thd_bwd(output_grads, cu_seqlens, freqs, rotate_style,
                 reuse_freqs_front_part, nope_first):
  """AITER's rope_thd_bwd: the gradient of rope_thd_fwd's input."""
  return _call("rope_thd_bwd", output_grads, None, None, None, rotate_style,
               reuse_freqs_front_part, nope_first, freqs, layout="thd",
               cu_seqlens=cu_seqlens, transposed=True)[0]


def _rope_2d(function, x, cos_h, sin_h, cos_w, sin_w, img_height, img_width,
             rotate_style, reuse_freqs_front_part, nope_first, transposed):
  return api.turned_in_volume(
      function, x, ((cos_h, sin_h), (cos_w, sin_w)),
      (("img_height", img_height), ("img_width", img_width)), ("h", "w"),
      rotate_style=_style(function, rotate_style), transposed=transposed,
      reuse_freqs_front_part=_truth(
          function, "reuse_freqs_front_part", reuse_freqs_front_part),
      nope_first=_truth(function, "nope_first", nope_first), names=("input",))


def rope_2d_fwd(input, cos_h, sin_h, cos_w, sin_w, img_height, img_width,
                rotate_style, reuse_freqs_front_part, nope_first):
  """AITER's rope_2d_fwd: `rope_2d` of [b, img_height * img_width, h, d]."""
  return _rope_2d("rope_2d_fwd", input, cos_h, sin_h, cos_w, sin_w, img_height,
                  img_width, rotate_style, reuse_freqs_front_part, nope_first,
                  False)


def rope_2d_bwd(output_grads, cos_h, sin_h, cos_w, sin_w, img_height, img_width,
                rotate_style, reuse_freqs_front_part, nope_first):
  """AITER's rope_2d_bwd: the gradient of rope_2d_fwd's input."""
  return _rope_2d("rope_2d_bwd", output_grads, cos_h, sin_h, cos_w, sin_w,
                  img_height, img_width, rotate_style, reuse_freqs_front_part,
                  nope_first, True)


def _heads(function, name, t, head_size):
  """[tokens, h, head_size] of [tokens, h * head_size] or the same."""
  arguments.check_is_array(function, name, t, False)
  if t.ndim < 2 or (t.ndim == 2 and t.shape[-1] % head_size) or (
      t.ndim > 2 and t.shape[-1] != head_size):
    raise arguments.bad(
        function, name, arguments.describe(t),
        f"shape [tokens, h * {head_size}] or [tokens, h, {head_size}]")
  if t.ndim > 2:
    return t.reshape(-1, t.shape[-2], head_size)
  return t.reshape(t.shape[0], t.shape[-1] // head_size, head_size)


def _rotary(function, positions, query, key, head_size, cos_cache, sin_cache,
            is_neox, is_nope_first, rot_dim=None, offsets=None):
  head_size = arguments.number(function, "head_size", head_size,
                               "an integer of at least 1", lambda n: n > 0, int)
  q = _heads(function, "query", query, head_size)
  k = _heads(function, "key", key, head_size)
  arguments.check_is_array(function, "positions", positions, False)
  arguments.check_is_array(function, "cos_sin_cache_offsets", offsets)
  for name, t in (("cos_cache", cos_cache), ("sin_cache", sin_cache)):
    arguments.check_is_array(function, name, t, False)
    if t.ndim < 2:
      raise arguments.bad(function, name, arguments.describe(t),
                          "shape [positions, n], perhaps with axes of 1")
  flat = lambda t: None if t is None else t.reshape(-1)
  if rot_dim is not None:
    rot_dim = arguments.number(
        function, "rot_dim", rot_dim, f"an even integer from 2 to {head_size}",
        lambda n: 2 <= n <= head_size and n % 2 == 0, int)
    cos_cache, sin_cache = (
        t[..., :rot_dim // 2] for t in (cos_cache, sin_cache))
  out = _call(function, q, k, cos_cache, sin_cache,
              0 if _truth(function, "is_neox", is_neox) else 1, True,
              is_nope_first, layout="thd", positions=flat(positions),
              offsets=flat(offsets))
  return tuple(t.reshape(like.shape) for t, like in zip(out, (query, key)))


def rotary_embedding_fwd(positions, query, key, head_size, cos_cache, sin_cache,
                         is_neox, is_nope_first):
  """AITER's rotary_embedding_fwd: (query, key), turned.

  Args:
    positions: integers [tokens], or of any shape with as many.
    query: [tokens, h * head_size] or [tokens, h, head_size].
    key: likewise, with heads of its own.
    head_size: channels of a head.
    cos_cache: [positions, n] or [positions, 1, 1, n], half a rotated width.
    sin_cache: like cos_cache.
    is_neox: halves are pairs, else neighbours.
    is_nope_first: the last channels are turned.
  """
  return _rotary("rotary_embedding_fwd", positions, query, key, head_size,
                 cos_cache, sin_cache, is_neox, is_nope_first)


def batched_rotary_embedding(positions, query, key, head_size, cos_cache,
                             sin_cache, is_neox, is_nope_first, rot_dim,
                             cos_sin_cache_offsets):
  """AITER's batched_rotary_embedding: rotary_embedding_fwd with offsets.

  Args:
    positions: as in rotary_embedding_fwd.
    query: as in rotary_embedding_fwd.
    key: as in rotary_embedding_fwd.
    head_size: as in rotary_embedding_fwd.
    cos_cache: as in rotary_embedding_fwd.
    sin_cache: as in rotary_embedding_fwd.
    is_neox: as in rotary_embedding_fwd.
    is_nope_first: as in rotary_embedding_fwd.
    rot_dim: channels that are turned.
    cos_sin_cache_offsets: integers, one a token: are added to positions.
  """
  return _rotary("batched_rotary_embedding", positions, query, key, head_size,
                 cos_cache, sin_cache, is_neox, is_nope_first, rot_dim,
                 cos_sin_cache_offsets)


def apply_rope(
    inputs: jax.Array,
    positions: jax.Array,
    head_dim: int,
    rope_theta: float = 10000.0,
    rope_scaling: Mapping[str, Any] | None = None,
    rope_input_ordering: str = "split",
    *,
    rope_proportion: float = 1.0,
) -> jax.Array:
  """tpu-inference's apply_rope: `rope` by angles of the positions themselves.

  Args:
    inputs: [T, N, H].
    positions: integers [T], or [3, T] for rope_scaling's mrope_section.
    head_dim: channels of a head that are turned; H may be more.
    rope_theta: base of the angles.
    rope_scaling: as in rotary_embedding, of a kind that does not ask for the
      sequence's length. Without rope_type and mrope_section it is "llama3",
      whose factor is called scale_factor, by default 8, and the others are 1, 4
      and 8192.
    rope_input_ordering: "split" (halves) or "interleaved" (neighbours).
    rope_proportion: share of the pairs that are turned; the others stay.

  Returns:
    Like inputs.

  Raises:
    TypeError: as rope.
    ValueError: as rope.
  """
  orders = {"split": 0, "interleaved": 1}
  arguments.choice("apply_rope", "rope_input_ordering", rope_input_ordering,
                   tuple(orders))
  arguments.number("apply_rope", "head_dim", head_dim,
                   "an even integer of at least 2",
                   lambda n: n >= 2 and n % 2 == 0, int)
  arguments.number("apply_rope", "rope_theta", rope_theta,
                   "a finite number > 1", lambda n: 1 < n < math.inf)
  proportion = arguments.number(
      "apply_rope", "rope_proportion", rope_proportion,
      "a number of at least 0 and at most 1", lambda p: 0 <= p <= 1)
  if (isinstance(rope_scaling, Mapping) and rope_scaling
      and not {"rope_type", "type", "mrope_section"} & rope_scaling.keys()):
    rope_scaling = {**_UNNAMED_SCALING, **rope_scaling}
    rope_scaling["factor"] = rope_scaling.pop(
        "scale_factor", rope_scaling["factor"])
  by, amplitude = tables.frequencies("apply_rope", head_dim, 0, rope_theta,
                                     rope_scaling)
  by[int(proportion * len(by)):] = 0
  arguments.check_integers("apply_rope", "positions", positions)
  angles = positions.astype(jnp.float32)[..., None] * by.astype("float32")
  if positions.ndim == 2:
    sections = (rope_scaling or {}).get("mrope_section")
    if positions.shape[0] != 3 or not sections or sum(sections) != len(by):
      raise arguments.bad(
          "apply_rope", "positions", arguments.describe(positions),
          "shape [T], or [3, T] with rope_scaling's mrope_section, three"
          f" numbers whose sum is {len(by)}")
    ends = [sum(sections[:i]) for i in range(4)]
    angles = jnp.concatenate(
        [t[:, b:e] for t, b, e in zip(angles, ends, ends[1:])], -1)
  return _call("apply_rope", inputs, None, amplitude * jnp.cos(angles),
               amplitude * jnp.sin(angles), orders[rope_input_ordering], True,
               False, layout="thd")[0]
