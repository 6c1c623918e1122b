# SPDX-License-Identifier: Apache-2.0
"""Tables of cosines and sines: the angles that models turn their pairs by.

Angles are computed in float64 on the host, and rounded once. Make tables
outside of jax.jit and pass them as arguments: inside, they are constants of the
program.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import jax.numpy as jnp
import numpy as np

import jax
from jax._src.aiter.core import arguments


def _default(_, frequencies, base, rows):
  return frequencies, 1.0


def _linear(scaling, frequencies, base, rows):
  """Position interpolation (Chen et al., arXiv:2306.15595)."""
  return frequencies / scaling["factor"], 1.0


def _dynamic(scaling, frequencies, base, rows):
  """The base that "NTK-aware" scaling has for this many rows.

  bloc97, "Dynamically Scaled RoPE" (2023); formula as in transformers'
  modeling_rope_utils.py.
  """
  trained = scaling["original_max_position_embeddings"]
  factor = scaling["factor"]
  pairs = len(frequencies)
  if rows <= trained or pairs == 1:
    return frequencies, 1.0
  grown = base * (factor * rows / trained - (factor - 1)) ** (
      pairs / (pairs - 1))
  return _plain(pairs, grown), 1.0


def _yarn(scaling, frequencies, base, rows):
  """YaRN (Peng et al., arXiv:2309.00071); DeepSeek's with two mscales."""
  trained = scaling["original_max_position_embeddings"]
  factor = scaling["factor"]
  pairs = len(frequencies)
  # The pair that turns so often over the length of training.
  pair_of = lambda turns: pairs * math.log(
      trained / (turns * 2 * math.pi)) / math.log(base)
  low = pair_of(scaling.get("beta_fast", 32))
  high = pair_of(scaling.get("beta_slow", 1))
  if scaling.get("truncate", True):
    low, high = math.floor(low), math.ceil(high)
  low, high = max(low, 0), min(high, 2 * pairs - 1)
  width = high - low or 0.001
  interpolated = np.clip((np.arange(pairs) - low) / width, 0, 1)
  grown = lambda by: 0.1 * by * math.log(factor) + 1 if factor > 1 else 1.0
  amplitude = scaling.get("attention_factor")
  if amplitude is None:
    amplitude = (grown(scaling.get("mscale", 1))
                 / grown(scaling.get("mscale_all_dim", 0))
                 * scaling.get("attn_factor", 1))
  kept = (1 - interpolated) * scaling.get("extrapolation_factor", 1)
  return frequencies * kept + frequencies / factor * (1 - kept), amplitude


def _llama3(scaling, frequencies, base, rows):
  """Llama 3.1's (Grattafiori et al., arXiv:2407.21783; meta-llama's code)."""
  low, high = scaling["low_freq_factor"], scaling["high_freq_factor"]
  turns = (scaling["original_max_position_embeddings"] * frequencies
           / (2 * math.pi))
  kept = np.clip((turns - low) / (high - low), 0, 1)
  return frequencies * (kept + (1 - kept) / scaling["factor"]), 1.0


def _longrope(scaling, frequencies, base, rows):
  """LongRoPE (Ding et al., arXiv:2402.13753), as Phi-3 has it."""
  trained = scaling["original_max_position_embeddings"]
  long = rows > trained
  by = np.asarray(scaling["long_factor" if long else "short_factor"],
                  np.float64)
  if by.shape != frequencies.shape:
    raise arguments.bad(
        "rotary_embedding",
        f"rope_scaling's {'long' if long else 'short'}_factor",
        f"{by.size} numbers", f"{len(frequencies)}, one a pair")
  factor = scaling.get("factor", rows / trained)
  amplitude = scaling.get("attention_factor")
  if amplitude is None:
    amplitude = scaling.get("long_mscale" if long else "short_mscale")
  if amplitude is None:
    amplitude = 1.0 if factor <= 1 else math.sqrt(
        1 + math.log(factor) / math.log(trained))
  return frequencies / by, amplitude


# Kind -> (what it must be given, function).
_TRAINED = "original_max_position_embeddings"
_SCALINGS = {
    "default": ((), _default),
    "linear": (("factor",), _linear),
    "dynamic": (("factor", _TRAINED), _dynamic),
    "yarn": (("factor", _TRAINED), _yarn),
    "deepseek_yarn": (("factor", _TRAINED), _yarn),
    "llama3": (("factor", "low_freq_factor", "high_freq_factor", _TRAINED),
               _llama3),
    "longrope": (("short_factor", "long_factor", _TRAINED), _longrope),
    "su": (("short_factor", "long_factor", _TRAINED), _longrope),
    # Qwen2-VL's sections change no angle: see rope_mrope.
    "mrope": ((), _default),
}


# What nobody gives for a kind that has no use for it.
_TELLING = {name for needed, _ in _SCALINGS.values() for name in needed} - {
    _TRAINED}

# Whose factor says by how much sequences are longer than those of training.
_YARNS = ("yarn", "deepseek_yarn")
_LENGTHENED = ("linear", "dynamic", *_YARNS)


def _kind(scaling: Mapping[str, Any]):
  return scaling.get("rope_type", scaling.get("type", "default"))


def _positive(function: str, scaling: Mapping[str, Any], name: str) -> float:
  return arguments.number(
      function, f"rope_scaling's {name}", scaling.get(name, 1),
      "a finite number > 0", lambda n: 0 < n < math.inf)


def _rows(function: str, max_position) -> int:
  return arguments.number(
      function, "max_position", max_position, "an integer of at least 1",
      lambda n: 1 <= n < 2**31, int)


def _plain(pairs: int, base: float) -> np.ndarray:
  return base ** -(np.arange(pairs, dtype=np.float64) / pairs)


def frequencies(
    function: str, rotary_dim: int, max_position: int, base: float,
    rope_scaling: Mapping[str, Any] | None,
) -> tuple[np.ndarray, float]:
  """(angles a position, amplitude): float64 [rotary_dim / 2], and a number.

  Args:
    function: the public function's name.
    rotary_dim: as in rotary_embedding.
    max_position: as in rotary_embedding.
    base: as in rotary_embedding.
    rope_scaling: as in rotary_embedding.
  """
  rotary_dim = arguments.number(
      function, "rotary_dim", rotary_dim, "an even integer of at least 2",
      lambda n: n >= 2 and n % 2 == 0, int)
  base = arguments.number(function, "base", base, "a finite number > 1",
                          lambda b: 1 < b < math.inf)
  scaling = {} if rope_scaling is None else arguments.static(
      function, "rope_scaling", rope_scaling, "None or a dict")
  if not isinstance(scaling, Mapping):
    raise arguments.bad(function, "rope_scaling", repr(scaling),
                        "None or a dict, as in a model's config", TypeError)
  kind = _kind(scaling)
  if not {"rope_type", "type"} & scaling.keys() and _TELLING & scaling.keys():
    kind = None  # Silence would be angles that nothing has scaled.
  if kind not in _SCALINGS:
    raise arguments.bad(function, "rope_scaling's rope_type", repr(kind),
                        " or ".join(_SCALINGS))
  needed, scaled = _SCALINGS[kind]
  for name in needed:
    if name not in scaling:
      raise arguments.bad(
          function, f"rope_scaling's {name}", "missing",
          f"{' and '.join(needed)}, for {kind}")
    if name not in ("short_factor", "long_factor"):
      _positive(function, scaling, name)
  return scaled(scaling, _plain(rotary_dim // 2, base), base, max_position)


def rotary_embedding(
    rotary_dim: int,
    max_position: int,
    base: float = 10000.0,
    *,
    rope_scaling: Mapping[str, Any] | None = None,
    dtype: Any = jnp.float32,
) -> tuple[jax.Array, jax.Array]:
  """Tables of cosines and sines for `rope`.

  Row p has the angles p * base^(-2 j / rotary_dim), for pairs j, changed as
  rope_scaling says; cosines and sines are multiplied by its amplitude.

  Args:
    rotary_dim: channels of a head that are turned.
    max_position: rows.
    base: rope_theta of a model's config.
    rope_scaling: the dict of that name in a model's config. Its rope_type (or
      type, of older ones) is "default"; "linear" (Chen et al.,
      arXiv:2306.15595); "dynamic" (NTK, for the length max_position); "yarn"
      (Peng et al., arXiv:2309.00071) or "deepseek_yarn", the same with mscale
      and mscale_all_dim; "llama3";
      "longrope" or "su" (Phi-3; Ding et al., arXiv:2402.13753), with the long
      factors if max_position is beyond the length of training; or "mrope", the
      default's angles. All but "default", "linear" and "mrope" want
      original_max_position_embeddings, the length of training.
    dtype: of the tables.

  Returns:
    (cos, sin): [max_position, rotary_dim / 2] each.

  Raises:
    TypeError: an argument of the wrong type.
    ValueError: a value that cannot be, or a number that rope_scaling lacks; the
      message names it.
  """
  rows = _rows("rotary_embedding", max_position)
  by, amplitude = frequencies("rotary_embedding", rotary_dim, rows, base,
                              rope_scaling)
  dtype = arguments.dtype_name("rotary_embedding", "dtype", dtype)
  angles = np.arange(rows, dtype=np.float64)[:, None] * by
  return tuple(jnp.asarray(amplitude * f(angles), dtype)
               for f in (np.cos, np.sin))


def get_rope(
    head_size: int,
    rotary_dim: int,
    max_position: int,
    base: float,
    is_neox_style: bool = True,
    rope_scaling: Mapping[str, Any] | None = None,
    dtype: Any = jnp.float32,
    partial_rotary_factor: float = 1.0,
) -> tuple[jax.Array, jax.Array]:
  """`rotary_embedding` with the arguments of AITER's and vLLM's get_rope.

  Args:
    head_size: channels of a head.
    rotary_dim: how many of them are turned, at most.
    max_position: as in rotary_embedding.
    base: as in rotary_embedding.
    is_neox_style: which channels are pairs; tables are the same for both.
    rope_scaling: as in rotary_embedding. Where it lacks
      original_max_position_embeddings that is max_position, and tables of
      "linear", "dynamic" and both yarns are `factor` times as long. Those of
      both yarns are at least `factor` times as long as it in any case.
    dtype: as in rotary_embedding.
    partial_rotary_factor: a share of rotary_dim that is turned.

  Returns:
    (cos, sin), for `rotary_embedding_fwd` or rope_2c.

  Raises:
    TypeError: as rotary_embedding.
    ValueError: as rotary_embedding.
  """
  arguments.flag("get_rope", "is_neox_style", is_neox_style)
  share = arguments.number(
      "get_rope", "partial_rotary_factor", partial_rotary_factor,
      "a number > 0 and at most 1", lambda n: 0 < n <= 1)
  head_size = arguments.number("get_rope", "head_size", head_size,
                               "an integer of at least 2", lambda n: n >= 2,
                               int)
  rotary_dim = arguments.number(
      "get_rope", "rotary_dim", rotary_dim,
      f"an integer of at most head_size, {head_size}",
      lambda n: n <= head_size, int)
  if isinstance(rope_scaling, Mapping):
    max_position = _rows("get_rope", max_position)
    lengthened = _LENGTHENED if _TRAINED not in rope_scaling else _YARNS
    rope_scaling = {_TRAINED: max_position, **rope_scaling}
    if _kind(rope_scaling) in lengthened:
      max_position = max(max_position, int(
          _positive("get_rope", rope_scaling, _TRAINED)
          * _positive("get_rope", rope_scaling, "factor")))
  with arguments.called("get_rope"):
    return rotary_embedding(int(rotary_dim * share), max_position, base,
                            rope_scaling=rope_scaling, dtype=dtype)
