# SPDX-License-Identifier: Apache-2.0
"""Exact arithmetic to hold instructions to: floating point from its meaning.

A value is a Python float or a Fraction, a result is rounded once, by `encode`.
"""

import dataclasses
import fractions
import math
from collections.abc import Callable

import numpy as np

EVEN, UP, DOWN, ZERO = range(4)  # As in MODE's round fields.


@dataclasses.dataclass(frozen=True)
class Format:
  """A binary floating point format.

  Attributes:
    finite: no infinities, and which NaN there is: None if the format has
      infinities and NaNs as IEEE 754 says; "ocp" if all ones is NaN; "fnuz" if
      it is minus zero; "none" if there are none.
  """

  exponent: int
  mantissa: int
  finite: str | None = None
  bias: int = 0

  @property
  def size(self):
    return 1 + self.exponent + self.mantissa

  @property
  def zero_exponent(self):
    """The exponent of the least normal number."""
    bias = self.bias or 2 ** (self.exponent - 1) - 1
    return 1 - bias

  @property
  def greatest(self) -> int:
    """Bits of the greatest finite number."""
    top = 2 ** (self.exponent + self.mantissa) - 1
    if self.finite is None:
      return top - 2**self.mantissa
    return top - (self.finite == "ocp")

  @property
  def nan(self) -> int:
    if self.finite == "fnuz":
      return 1 << (self.size - 1)
    if self.finite == "ocp":
      return 2 ** (self.size - 1) - 1
    assert self.finite is None
    return (2**self.exponent - 1 << self.mantissa) | 1 << (self.mantissa - 1)


F64 = Format(11, 52)
F32 = Format(8, 23)
F16 = Format(5, 10)
BF16 = Format(8, 7)
FP8 = Format(4, 3, "ocp")
BF8 = Format(5, 2)
FP8_FNUZ = Format(4, 3, "fnuz", 8)
BF8_FNUZ = Format(5, 2, "fnuz", 16)
FP6 = Format(2, 3, "none")
BF6 = Format(3, 2, "none")
FP4 = Format(2, 1, "none")


def decode(bits: int, form: Format) -> float | fractions.Fraction:
  """The value: a Fraction, or a float that is inf, nan or minus zero."""
  bits = int(bits)
  sign = -1 if bits >> (form.size - 1) else 1
  magnitude = bits & (2 ** (form.size - 1) - 1)
  exponent = magnitude >> form.mantissa
  mantissa = magnitude & (2**form.mantissa - 1)
  if form.finite is None and exponent == 2**form.exponent - 1:
    return math.nan if mantissa else sign * math.inf
  if form.finite == "ocp" and magnitude == 2 ** (form.size - 1) - 1:
    return math.nan
  if form.finite == "fnuz" and bits == form.nan:
    return math.nan
  if magnitude == 0:
    return -0.0 if sign < 0 else fractions.Fraction(0)
  if exponent:
    mantissa += 2**form.mantissa
  power = form.zero_exponent + max(exponent, 1) - 1 - form.mantissa
  return fractions.Fraction(sign * mantissa) * fractions.Fraction(2) ** power


def _negative(value) -> bool:
  return math.copysign(1, value) < 0 if isinstance(value, float) else value < 0


def encode(value, form: Format, rounding: int = EVEN,
           saturate: bool = False, flush: bool = False) -> int:
  """Bits of a value (Fraction, or float for inf, nan and zeros), rounded.

  Args:
    saturate: overflow, and infinity, give the greatest finite number.
    flush: a denormal result is a zero of its sign.
  """
  if isinstance(value, float) and math.isnan(value):
    return form.nan
  negative = _negative(value)
  sign = int(negative) << (form.size - 1)
  if value == 0:
    return 0 if form.finite == "fnuz" else sign
  overflow = form.greatest if saturate or form.finite == "none" else (
      form.nan if form.finite else form.greatest + 1
  )
  fnuz_nan = form.finite == "fnuz" and not saturate
  sign_of_overflow = 0 if fnuz_nan else sign
  if isinstance(value, float) and math.isinf(value):
    return sign_of_overflow | overflow
  value = abs(fractions.Fraction(value))
  # 2**exponent <= value < 2**(exponent + 1)
  exponent = value.numerator.bit_length() - value.denominator.bit_length()
  if fractions.Fraction(2) ** exponent > value:
    exponent -= 1
  normal = max(exponent, form.zero_exponent)
  scaled = value / fractions.Fraction(2) ** (normal - form.mantissa)
  whole, rest = divmod(scaled, 1)
  whole = int(whole)
  away = {EVEN: rest > 0.5 or (rest == 0.5 and whole & 1),
          UP: rest > 0 and not negative,
          DOWN: rest > 0 and negative, ZERO: False}[rounding]
  whole += int(away)
  # A carry into the exponent is right by itself.
  bits = whole + ((normal - form.zero_exponent) << form.mantissa)
  if bits > form.greatest:
    toward_zero = rounding == ZERO or rounding == (UP if negative else DOWN)
    if not toward_zero:
      return sign_of_overflow | overflow
    bits = form.greatest
  elif flush and bits < 2**form.mantissa:
    bits = 0
  if bits == 0 and form.finite == "fnuz":
    return 0
  return sign | bits


FORMATS = {"f16": F16, "f32": F32, "f64": F64}
_BITS = {"f16": np.uint16, "f32": np.uint32, "f64": np.uint64}


def ieee(function: Callable, to: str = "") -> Callable:
  """Makes a function of exact values one of NumPy arrays, rounded once.

  The function sees Fractions, or floats if one of them is not finite or a
  zero, where its float64 result decides infinity, NaN and the sign of zero.
  It has `rounding` as an attribute of its own, which tests of modes set.
  """

  def lanes(*arrays):
    kind = to or f"f{8 * arrays[0].dtype.itemsize}"
    form = FORMATS[kind]
    out = np.empty(arrays[0].shape, _BITS[kind])
    inputs = [a if a.dtype.kind == "f" else a.astype(np.float64)
              for a in np.broadcast_arrays(*arrays)]
    for index in np.ndindex(out.shape):
      values = [x[index] for x in inputs]
      floats = [float(v) for v in values]
      finite = all(map(math.isfinite, floats))
      # Beside an infinity or NaN it does not matter how great a number is.
      tame = floats if finite else [
          math.copysign(1, f) if f and math.isfinite(f) else f for f in floats
      ]
      with np.errstate(all="ignore"):
        plain = function(*map(np.float64, tame))
      result = float(plain)
      if finite:
        exact = function(*map(fractions.Fraction, floats))
        if exact != 0:
          result = exact
        elif result != 0:
          result = 0.0
      out[index] = encode(result, form, lanes.rounding)
    return out.view({"f16": np.float16, "f32": np.float32,
                     "f64": np.float64}[kind])

  lanes.rounding = EVEN
  lanes.exact = function
  return lanes
