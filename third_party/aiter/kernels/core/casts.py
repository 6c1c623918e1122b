# SPDX-License-Identifier: Apache-2.0
"""Float32 to 8 bits as rounding.py has it, by what CDNA has for one type."""

import triton
import triton.language as tl

from third_party.aiter.kernels.core import rounding

E4M3FN = rounding.E4M3FN
E4M3FNUZ = rounding.E4M3FNUZ


@triton.jit
def _cast(x, TYPE: tl.constexpr, LARGEST: tl.constexpr):
  """The instruction makes NaN of what is too large, and keeps a NaN's sign."""
  x = tl.where(x == x, tl.clamp(x, -LARGEST, LARGEST), float("nan"))
  return x.to(TYPE).to(tl.uint8, bitcast=True)


@triton.jit
def to_bits(x, kind, NATIVE: tl.constexpr, CAST: tl.constexpr):
  """rounding.to_bits, sooner where `kind` is CAST.

  CAST: the float8 type that one instruction of CDNA makes of float32, as
  archs.csv calls it; "": there is none.
  """
  if CAST == "e4m3fn":
    if kind == E4M3FN:
      code = _cast(x, tl.float8e4nv, 448.0)
    else:
      code = rounding.to_bits(x, kind, NATIVE)
  elif CAST == "e4m3fnuz":
    if kind == E4M3FNUZ:
      code = _cast(x, tl.float8e4b8, 240.0)
    else:
      code = rounding.to_bits(x, kind, NATIVE)
  else:
    code = rounding.to_bits(x, kind, NATIVE)
  return code
