# SPDX-License-Identifier: Apache-2.0
"""Arrays that the tests of KV-cache writes share, and how they compare."""

import ml_dtypes
import numpy as np
from cache import oracle

import jax

WIDE = ("bfloat16", "float16", "float32")
BYTES = ("int8", "float8_e4m3fn", "float8_e4m3fnuz", "float8_e5m2")
LAYOUTS = ("NHD", "HND", "x", "asm", "interleaved")
PAGES, SIZE = 5, 16
OUTSIDE = (-1, -7, PAGES * SIZE, 2**31 - 1, -2**31)


def dtype_of(name):
  return np.dtype(getattr(ml_dtypes, name, None) or name)


def numbers(*shape, dtype="bfloat16", seed=0):
  """Rows of unequal sizes, some of them special."""
  rng = np.random.default_rng(seed)
  x = rng.standard_normal(shape, np.float32)
  x *= np.exp2(rng.integers(-9, 10, (*shape[:-1], 1))).astype(np.float32)
  if x.size > 40:
    x.flat[5], x.flat[11], x.flat[x.size // 2] = -0.0, np.inf, np.nan
    x[0, ..., -1] = 0
    x[-1] = 0
  return x.astype(dtype_of(dtype))


def pool(*shape, dtype, seed=1):
  """Any bits."""
  dtype = dtype_of(dtype)
  rng = np.random.default_rng(seed)
  t = rng.integers(0, 256, (*shape[:-1], shape[-1] * dtype.itemsize),
                   np.uint8).view(dtype)
  if dtype == ml_dtypes.float8_e5m2:  # Moved on a CPU, a NaN is this NaN.
    t = np.where(np.isnan(t), np.uint8(0x7F).view(dtype), t)
  return t


def some_slots(tokens, count=PAGES * SIZE, seed=2, outside=OUTSIDE):
  """Slots in no order, none twice; some skip."""
  slots = np.random.default_rng(seed).permutation(count)[:tokens].astype(
      np.int32)
  slots[1:2 * len(outside):2] = outside[:len(slots[1:2 * len(outside):2])]
  return slots


def bits(t):
  t = np.asarray(t)
  return t.view(np.uint8) if t.size else t


def assert_same(test, got, want, message=""):
  """Equal bits, of NaNs too."""
  for a, b in zip(jax.tree.leaves(jax.device_get(got)),
                  jax.tree.leaves(jax.device_get(want)), strict=True):
    test.assertEqual((a.dtype, a.shape), (b.dtype, b.shape), message)
    np.testing.assert_array_equal(bits(a), bits(b), err_msg=str(message))


def caches(layout, heads, d, dv, dtype):
  return [None if s is None else pool(*s, dtype=dtype, seed=i)
          for i, s in enumerate(oracle.shapes(layout, PAGES, SIZE, heads, d, dv,
                                              dtype_of(dtype)))]


def copies(arrays):
  return [None if t is None else t.copy() for t in arrays]


def present(arrays):
  return tuple(t for t in arrays if t is not None)
