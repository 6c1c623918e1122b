# SPDX-License-Identifier: Apache-2.0
"""Checks of arguments that the public functions share."""

from __future__ import annotations

import contextlib
import numbers
import operator
import re
from typing import Any

import jax.numpy as jnp
import numpy as np

import jax
from jax import lax
from jax._src.aiter.core import dims


def bad(function: str, name: str, given: Any, accepted: str,
        error: type[Exception] = ValueError) -> Exception:
  """The error of a bad argument."""
  return error(f"{function}: {name} is {given}; accepted is {accepted}")


def shown(value) -> str:
  """A value in an error message; of an array what it is, not what it holds."""
  shape = getattr(value, "shape", ())
  # A NumPy type has a descriptor there.
  return describe(value) if isinstance(shape, tuple) and shape else repr(value)


@contextlib.contextmanager
def called(function, **names):
  """Lets errors of the functions called here name what a user called.

  Args:
    function: the public function's name.
    **names: what the other calls an argument -> its own name for it.
  """
  try:
    yield
  except (TypeError, ValueError) as error:
    found = re.match(r"(\w+): (\w+)('s|)(.*)", str(error), re.DOTALL)
    if type(error) not in (TypeError, ValueError) or not found:
      raise
    _, name, *rest = found.groups()
    own = names.get(name, name)
    # The name stands once more where an error says how to make it static.
    rest = "".join(rest).replace(f"={name!r}", f"={own!r}")
    raise type(error)(f"{function}: {own}{rest}") from None


def static(function, name, value, accepted,
           error: type[Exception] = TypeError):
  """value, or an error if it is traced or holds what is."""
  for item in value if isinstance(value, (tuple, list)) else (value,):
    if isinstance(item, jax.core.Tracer):
      raise bad(
          function, name, "a traced value",
          f"{accepted}, known while tracing: bind it with functools.partial, or"
          f" name it in jax.jit(..., static_argnames={name!r})", error)
  return value


def precision(function, value):
  """What JAX's products take as `precision`, hashable, or an error."""
  static(function, "precision", value, "a precision of jax.lax")
  if value is None:
    return None
  try:
    jax.eval_shape(lambda t: jnp.dot(t, t, precision=value),
                   jax.ShapeDtypeStruct((1,), np.float32))
  except (TypeError, ValueError):
    raise bad(function, "precision", repr(value), "as jax.numpy.dot takes it",
              TypeError) from None
  return tuple(value) if isinstance(value, list) else value


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
  if type(value) is not kind:
    static(function, name, value, accepted)
    if getattr(value, "shape", None) == () and jnp.issubdtype(
        value.dtype, np.number):
      value = value.item()
    wanted = numbers.Integral if kind is int else numbers.Real
    if not isinstance(value, wanted) or isinstance(value, bool):
      raise bad(function, name, shown(value), accepted, TypeError)
    value = kind(value)
  # What no size or attribute of a kernel holds is no number either.
  if kind is int and abs(value) >= 2**63 or not allowed(value):
    raise bad(function, name, shown(value), accepted)
  return value


def integers(function, name, value, accepted, allowed,
             lengths=(2,)) -> tuple[int, ...]:
  """Python integers, of some lengths, from a static argument, or an error."""
  static(function, name, value, accepted)
  try:
    items = tuple(value)
  except TypeError:
    raise bad(function, name, shown(value), accepted, TypeError) from None
  if len(items) not in lengths:
    raise bad(function, name, shown(value), accepted)
  return tuple(number(function, name, item, accepted, allowed, int)
               for item in items)


def window_side(keys: int) -> int:
  """A window's side: -1, no bound, of what no sequence is as long as.

  So its sums with places are numbers that int32 has.
  """
  return keys if keys < 2**30 else -1


def two_sizes(function, name, value):
  """A pair of sizes, numbers or symbols, from a static argument."""
  static(function, name, value, "two sizes")
  try:
    found = tuple(operator.index(n) if dims.is_known(n) else n for n in value)
  except TypeError:
    raise bad(function, name, shown(value), "two sizes", TypeError) from None
  if len(found) != 2 or any(dims.is_known(n) and n < 0 for n in found):
    raise bad(function, name, shown(value), "two sizes")
  return found


def flag(function, name, value) -> bool:
  """A Python bool from a static argument, or an error."""
  if isinstance(value, (bool, np.bool_)):
    return bool(value)
  static(function, name, value, "a bool")
  raise bad(function, name, shown(value), "a bool", TypeError)


def choice(function, name, value, accepted):
  """The one of the accepted values that a static argument is, or an error."""
  if type(value) in (str, int, type(None)) and value in accepted:
    return value
  words = " or ".join(map(repr, accepted))
  static(function, name, value, words, ValueError)
  if (isinstance(value, (str, numbers.Number, type(None)))
      and value in accepted):
    return accepted[accepted.index(value)]
  raise bad(function, name, shown(value), words)


def dtype_name(function, name, value, accepted=None) -> str:
  """The one of the accepted names that a dtype, or a name, is; or an error.

  Args:
    function: the public function's name.
    name: the argument's.
    value: a dtype, what NumPy makes one of, or one of the accepted names.
    accepted: names; None is any dtype.
  """
  try:
    found = (None if isinstance(value, jax.core.Tracer)
             else value if isinstance(value, str) and accepted is not None
             else np.dtype(value).name)
  except (TypeError, ValueError):
    found = None
  if found and found.startswith("void"):  # NumPy's of fields, and of what not.
    found = None
  if found is None or accepted is not None and found not in accepted:
    words = "a dtype" if accepted is None else " or ".join(accepted)
    static(function, name, value, words)
    raise bad(function, name, shown(value), words, TypeError)
  return found


def _is_array(value) -> bool:
  """Whether JAX takes it for one; NumPy has them of objects, text and dates."""
  return (hasattr(value, "shape") and hasattr(value, "dtype")
          and getattr(value.dtype, "kind", "") not in tuple("OSUMm"))


def check_is_array(function, name, value, optional=True):
  """An error if it is no array, nor None where that is allowed."""
  if value is None and optional:
    return
  if not _is_array(value):
    raise bad(function, name, f"a {type(value).__name__}" + (
        f" of {value.dtype}" if hasattr(value, "dtype") else ""), "an array",
              TypeError)


def operand(function, name, value):
  """value, None or what JAX makes an array of, such as a number; or an error.

  For a function under jit, which says neither the name nor what is accepted.
  """
  if value is not None and not isinstance(value, float) and not _is_array(
      value):
    try:
      jnp.asarray(value)
    except (TypeError, ValueError, OverflowError):
      raise bad(function, name, shown(value), "a number or an array",
                TypeError) from None
  return value


def check_dtype(function, name, value, accepted):
  """An error if it is no array, or of none of the dtypes with these names."""
  check_is_array(function, name, value, optional=False)
  if value.dtype.name not in accepted:
    raise bad(function, f"{name}'s dtype", value.dtype, " or ".join(accepted),
              TypeError)


def check_cache_kind(function, name, cache, kv_cache_dtype):
  """An error unless kv_cache_dtype is "auto" or a name of what a cache is."""
  check_is_array(function, name, cache, optional=False)
  own = cache.dtype.name
  choice(function, "kv_cache_dtype", kv_cache_dtype, (
      "auto", own, *(("fp8", "fp8_e4m3") if own.startswith("float8_e4m3")
                     else ())))


def check_integers(function, name, value):
  """An error if it is no array of integers."""
  check_is_array(function, name, value, optional=False)
  if not jnp.issubdtype(value.dtype, jnp.integer):
    raise bad(function, f"{name}'s dtype", value.dtype, "an integer type",
              TypeError)


def packed(function, name, t, four_bits):
  """Numbers of four bits, of that dtype, two a byte; or such bytes."""
  check_dtype(function, name, t, ("uint8", four_bits))
  if t.dtype == jnp.uint8:
    return t
  if t.ndim < 1 or t.shape[-1] % 2:
    raise bad(function, name, describe(t), "an even last dimension")
  return lax.bitcast_convert_type(
      t.reshape(*t.shape[:-1], t.shape[-1] // 2, 2), jnp.uint8)


def int32(t):
  """Integers of any type in int32, those out of its range at its ends.

  NumPy's stay on the host: JAX would cut off their high bits without a word.
  """
  if t.dtype == np.int32:
    return t
  ends, own = np.iinfo(np.int32), jnp.iinfo(t.dtype)
  clip = np.clip if isinstance(t, (np.ndarray, np.generic)) else jnp.clip
  return clip(t, max(ends.min, own.min), min(ends.max, own.max)).astype(
      np.int32)


def agreeing(*arrays):
  """The arrays, those weakly typed in the dtype that JAX promotes all to.

  Arrays that have dtypes of their own keep them, whether they agree or not.
  An array may be None.
  """
  weak = [getattr(t, "weak_type", False) for t in arrays]
  if True not in weak:
    return arrays
  dtype = jnp.result_type(*(t for t in arrays if t is not None))
  return tuple(jnp.asarray(t, dtype) if is_weak else t
               for t, is_weak in zip(arrays, weak))


def at_hand(t) -> np.ndarray | None:
  """An array's values, unless it is traced, or in a device's own memory.

  Nor has NumPy those of a type like a random key's: None too.
  """
  if isinstance(t, np.ndarray):
    return t
  if (not isinstance(t, jax.Array) or isinstance(t, jax.core.Tracer)
      or jnp.issubdtype(t.dtype, jax.dtypes.extended)):
    return None
  for device in t.devices():
    if device.platform != "cpu":
      return None
  return np.asarray(t) if t.is_fully_addressable else None


def check_cumulative(function, name, cu, total, starts=None,
                     longest=None, first_rows=False) -> None:
  """An error of cumulative lengths that cannot be, where they are at hand.

  Those that are traced, or in a device's memory, are not looked at. Nor are
  those of a wrong type or rank, which are found while tracing.

  Args:
    function: the public function's name.
    name: the argument's.
    cu: [b + 1], or None.
    total: rows there are, which the last length must not exceed; None if
      sequences are padded, each in rows of its own.
    starts: [b + 1], the first row of each sequence where that is not cu.
    longest: rows there are for each sequence; None if there is no such limit.
    first_rows: cu says where sequences start, and the first may anywhere.
  """
  values = at_hand(cu)
  if (values is None or values.ndim != 1 or not values.size
      or values.dtype.kind not in "iu"):
    return

  def wrong(accepted):
    return bad(function, name, np.array2string(values, threshold=8), accepted)

  if values[0] < 0 or (values[0] > 0 and not first_rows):
    raise wrong("rows counted from 0" if first_rows else
                "lengths counted from 0, which is the first number")
  if (values[1:] < values[:-1]).any():
    raise wrong("lengths that add up: no number is less than the one before")
  lengths = values[1:] - values[:-1]
  if longest is not None and dims.is_known(longest) and (
      lengths > longest).any():
    raise wrong(f"sequences of at most {longest} rows, which is what there are")
  if total is None or not dims.is_known(total):
    return
  if starts is None and values[-1] > total:
    raise wrong(f"at most {total} rows in all, which is what there are")
  first = at_hand(starts)
  if first is not None and first.shape == values.shape and (
      first[:-1].astype(np.int64) + lengths > total).any():
    raise wrong(f"sequences that end by row {total}, from where they start,"
                f" {np.array2string(first, threshold=8)}")


def axis_size(function, name, axis_name) -> int:
  """Devices of a mesh axis of the shard_map around the call, or an error."""
  accepted = "a mesh axis of the shard_map around the call"
  if not isinstance(axis_name, str):
    raise bad(function, name, shown(axis_name), accepted, TypeError)
  try:
    return lax.axis_size(axis_name)
  except NameError:
    raise bad(function, name, repr(axis_name), accepted) from None


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
