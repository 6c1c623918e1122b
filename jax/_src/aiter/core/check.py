# SPDX-License-Identifier: Apache-2.0
"""What a family says of itself for `python -m jax.experimental.aiter`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax.numpy as jnp

import jax


class Check(NamedTuple):
  """One line of the report: a call, and what it must be near to.

  Attributes:
    name: of the line.
    call: what is checked, of `arrays`.
    formula: the same of arrays in float32.
    arrays: a tree.
  """
  name: str
  call: Callable[..., Any]
  formula: Callable[..., Any]
  arrays: Any


def normal(*shapes):
  """Normally distributed arrays, bfloat16."""
  keys = jax.random.split(jax.random.key(0), len(shapes))
  return [jax.random.normal(key, shape, jnp.bfloat16)
          for key, shape in zip(keys, shapes)]


def integers(*shapes):
  """Arrays of small integers, which every format has, bfloat16."""
  return [jnp.clip(jnp.round(t), -3, 3) for t in normal(*shapes)]


def with_gradients(fn):
  """(cotangent, *args) -> fn's results and gradients."""
  def run(cotangent, *args):
    out, vjp = jax.vjp(fn, *args)
    return out, vjp(cotangent)
  return run
