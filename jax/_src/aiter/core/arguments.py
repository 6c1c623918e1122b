# SPDX-License-Identifier: Apache-2.0
"""Checks of arguments that the public functions share."""

from __future__ import annotations

import numbers
from typing import Any

import numpy as np

import jax


def bad(function: str, name: str, given: Any, accepted: str,
        error: type[Exception] = ValueError) -> Exception:
  """The error of a bad argument."""
  return error(f"{function}: {name} is {given}; accepted is {accepted}")


def number(function, name, value, accepted, allowed, kind=float):
  """A Python number from a static argument, or an error.

  Args:
    function: the public function's name.
    name: the argument's.
    value: its value.
    accepted: in words, what is accepted.
    allowed: whether a number is.
    kind: float, or int to accept integers alone.
  """
  if isinstance(value, jax.core.Tracer):
    raise bad(function, name, "a traced value",
              f"{accepted}, known while tracing", TypeError)
  wanted = numbers.Integral if kind is int else numbers.Real
  if hasattr(value, "item") and getattr(value, "shape", None) == ():
    value = value.item()
  if not isinstance(value, wanted) or isinstance(value, bool):
    raise bad(function, name, repr(value), accepted, TypeError)
  value = kind(value)
  if not allowed(value):
    raise bad(function, name, repr(value), accepted)
  return value


def flag(function, name, value) -> bool:
  """A Python bool from an argument, or an error."""
  if isinstance(value, (bool, np.bool_)):
    return bool(value)
  raise bad(function, name, repr(value), "a bool", TypeError)


def dtype_name(function, name, value, accepted) -> str:
  """The one of the accepted names that a dtype, or a name, is; or an error."""
  try:
    found = value if isinstance(value, str) else np.dtype(value).name
  except TypeError:
    found = None
  if found not in accepted:
    raise bad(function, name, repr(value), " or ".join(accepted), TypeError)
  return found


def check_is_array(function, name, value, optional=True):
  """An error if it is no array, nor None where that is allowed."""
  if value is None and optional:
    return
  if not (hasattr(value, "shape") and hasattr(value, "dtype")):
    raise bad(function, name, f"a {type(value).__name__}", "an array",
              TypeError)


def describe(t) -> str:
  """An array in an error message: bfloat16[2, 8]."""
  return f"{t.dtype}{list(t.shape)}"


def no_gradient(function: str, instead: str):
  """Makes differentiating the decorated function an error that says so.

  Args:
    function: the public function's name.
    instead: what to do instead; ends the message.
  """
  def decorate(run):
    wrapped = jax.custom_jvp(run)

    @wrapped.defjvp
    def _(primals, tangents):
      raise TypeError(f"{function}: has no gradient; {instead}")

    return wrapped

  return decorate
