# SPDX-License-Identifier: Apache-2.0
"""Triton's interpreter on NumPy arrays: kernels without a GPU.

Import it before Triton: it turns the interpreter on.
"""

import contextlib
import functools
import os
from unittest import mock

os.environ["TRITON_INTERPRET"] = "1"

# pylint: disable=g-import-not-at-top
import ml_dtypes
import numpy as np
import triton.language as tl
from triton.runtime import interpreter


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
  """The interpreter's dot; on bfloat16 Triton 3.9's multiplies bit patterns."""
  def widen(x):
    if x.dtype.scalar != tl.bfloat16:
      return x
    return interpreter.TensorHandle(
        (x.data.astype(np.uint32) << 16).view(np.float32), tl.float32)
  return create_dot(self, widen(a), widen(b), d, *rest)


def _cast_impl(self, source, to, cast_impl):
  """The interpreter's cast; Triton 3.9's cuts float32 to bfloat16."""
  if (source.dtype.scalar, to.scalar) != (tl.float32, tl.bfloat16):
    return cast_impl(self, source, to)
  rounded = source.data.astype(ml_dtypes.bfloat16).view(np.uint16)
  return interpreter.TensorHandle(rounded, tl.bfloat16)


@contextlib.contextmanager
def gpu_arithmetic():
  """While it lasts, bfloat16 is multiplied and rounded to as on a GPU."""
  builder = interpreter.InterpreterBuilder
  create_dot, cast_impl = builder.create_dot, builder.cast_impl
  with (
      mock.patch.object(
          builder, "create_dot",
          lambda *args: _create_dot(*args, create_dot=create_dot)),
      mock.patch.object(
          builder, "cast_impl",
          lambda *args: _cast_impl(*args, cast_impl=cast_impl)),
  ):
    yield
