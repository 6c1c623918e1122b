# SPDX-License-Identifier: Apache-2.0
"""Triton's interpreter on NumPy arrays: kernels without a GPU.

Import it before Triton: it turns the interpreter on.
"""

import contextlib
import dataclasses
import functools
import os
from unittest import mock

os.environ["TRITON_INTERPRET"] = "1"

# pylint: disable=g-import-not-at-top
import ml_dtypes
import numpy as np
import triton.language as tl
from triton.runtime import interpreter


def _patch_lang(fn, patch=interpreter._patch_lang):
  """The interpreter's, which a launch and each call of a device function make.

  It looks at every name of the language, a quarter of a test's time; where a
  launch has patched it already there is nothing to do.
  """
  langs = [t for t in fn.__globals__.values() if t is tl or t is tl.core]
  if langs and all(lang.static_print is print for lang in langs):
    return None  # Calls of device functions undo nothing.
  return patch(fn)


interpreter._patch_lang = _patch_lang
# Of integers each operation is repeated in 64 bits, for an assertion that only
# `debug` makes: a third of a test's time.
interpreter.interpreter_builder.options = dataclasses.replace(
    interpreter.interpreter_builder.options, sanitize_overflow=False)


@functools.cache  # Triton remembers dtypes by their address.
class _DType:
  """A dtype under the name by which Triton knows it."""

  def __init__(self, name):
    self.name = name

  def __str__(self):
    return "stand_in." + self.name


class Tensor:
  """As much of a torch.Tensor as the interpreter asks of an argument."""

  def __init__(self, array):
    self.array = np.ascontiguousarray(array)
    self.dtype = _DType(self.array.dtype.name)
    self.shape = self.array.shape

  def data_ptr(self):
    return self.array.ctypes.data

  def untyped_storage(self):
    return self

  def cpu(self):
    return self

  def copy_(self, other):
    assert other.array is self.array

  def new_empty(self, *_, **__):
    return Tensor(np.zeros(0, self.array.dtype))

  def set_(self, storage, *_):
    self.array = storage.array

  def storage_offset(self):
    return 0

  def size(self):
    return self.shape

  def stride(self):
    return tuple(s // self.array.itemsize for s in self.array.strides)


def _create_dot(self, a, b, d, *rest, create_dot):
  """The interpreter's dot; on bfloat16 Triton 3.9's multiplies bit patterns.

  Sums of float32 are rounded once: in what order NumPy adds them, and with what
  error, depends on the processor.
  """
  if a.dtype.scalar == b.dtype.scalar == tl.float32:
    total = d.data + np.matmul(a.data, b.data, dtype=np.float64)
    return interpreter.TensorHandle(total.astype(d.data.dtype), d.dtype.scalar)

  def widen(x):
    if x.dtype.scalar != tl.bfloat16:
      return x
    return interpreter.TensorHandle(
        (x.data.astype(np.uint32) << 16).view(np.float32), tl.float32)
  return create_dot(self, widen(a), widen(b), d, *rest)


# What float32 is rounded to, and how wide its bits are.
_NARROW = {tl.bfloat16: (ml_dtypes.bfloat16, np.uint16),
           tl.float8e4nv: (ml_dtypes.float8_e4m3fn, np.uint8),
           tl.float8e4b8: (ml_dtypes.float8_e4m3fnuz, np.uint8)}


def _cast(self, source, to, *rest, cast):
  """The interpreter's cast; Triton 3.9's cuts float32 to fewer bits."""
  if source.dtype.scalar != tl.float32 or to.scalar not in _NARROW:
    return cast(self, source, to, *rest)
  dtype, bits = _NARROW[to.scalar]
  rounded = source.data.astype(dtype).view(bits)
  return interpreter.TensorHandle(rounded, to.scalar)


def _create_splat(self, ret_ty, arg):
  """A scalar comparison spread as what it is, not as what it compares."""
  del self
  data = np.full(ret_ty.shape, arg.data.reshape(-1)[0], arg.data.dtype)
  return interpreter.TensorHandle(data, arg.dtype.scalar)


@contextlib.contextmanager
def gpu_arithmetic():
  """While it lasts, narrow floats are multiplied and rounded to as on a GPU."""
  builder = interpreter.InterpreterBuilder
  create_dot = builder.create_dot
  casts = {name: functools.partialmethod(_cast, cast=getattr(builder, name))
           for name in ("cast_impl", "create_fp_to_fp")}
  with (
      mock.patch.object(builder, "create_splat", _create_splat),
      mock.patch.object(
          builder, "create_dot",
          lambda *args: _create_dot(*args, create_dot=create_dot)),
      mock.patch.multiple(builder, **casts),
  ):
    yield
