# SPDX-License-Identifier: Apache-2.0
"""Every attention kernel for AMD GPUs runs on a simulated one, and runs right.

Calls come to a kernel by their sizes, dtype and features.
"""

import contextlib
from unittest import mock

import jax.numpy as jnp
from absl.testing import absltest, parameterized
from attention import calls
from attention import numbers_test as mha_test
from harness import simulator

import jax
from jax._src.aiter.attention import op, types
from jax._src.aiter.core import dispatch
from jaxlib import gpu_aiter

ARCH, = dispatch.architectures("rocm")
# Tiles of queries are up to 128 rows and tiles of keys up to 128: of two tiles
# of each the second is cut, and the window cuts the first.
SIZES = (dict(sq=150, sk=152, causal=True, window=(140, -1)),
         dict(sq=70, sk=152, hq=2, hk=1))


# Scores' gradients are kept in tiles of 32 rows and 128 keys, of which a block
# reads 256 rows: here a tile is cut, there a window cuts one, and rows see
# tiles that others of their block do not.
DSCORES_SIZES = (dict(sq=150, sk=152, hq=4, hk=2, b=2),
                 dict(sq=290, sk=140, hq=2, hk=1, causal=True),
                 dict(sq=300, sk=420, window=(100, 20), scale=0.3))


# What changes scores or weighs them, and the features that choose its kernels.
ONE_ROW = ("bias", "bias_f32", "mask", "one_row")
DSCORES_CALLS = (
    (dict(mask="b11k", sq=150, sk=152, hq=4, hk=2, b=2), ONE_ROW),
    (dict(bias="1h1k", mask="b11k", constant=("bias",), sq=300, sk=424, hq=2,
          hk=1, window=(100, 20)), ONE_ROW),
    (dict(dropout=0.3, sq=290, sk=140, hq=2, hk=1, b=2, causal=True),
     ("dropout",)),
    (dict(bias="b11k", constant=("bias",), dropout=0.3, sq=150, sk=264, hq=2,
          hk=1, b=2), (*ONE_ROW, "dropout")),
    (dict(alibi="bh", constant=("alibi_slopes",), sq=150, sk=420, hq=4, hk=2,
          b=2, causal=True), ("alibi",)),
    (dict(cap=3.0, sq=300, sk=261, scale=-0.3, window=(100, 20)),
     ("soft_cap",)),
    (dict(mask="1hqk", sq=150, sk=264, hq=4, hk=2, b=2, causal=True),
     ("mask",)),
    (dict(bias="b1qk", constant=("bias",), sq=300, sk=152, hq=2, hk=1, b=2,
          window=(100, 20)), ("bias",)))


def dscores_kernels(dtype, dims, features):
  """Kernels that keep gradients of scores with these features, if any do."""
  try:
    symbols = gpu_aiter.load("rocm").kernels(
        "mha_dscores", ARCH, dtype, dims, list(features))
  except ValueError:
    return []  # Most are of bfloat16 alone.
  return [s for s in symbols if s.startswith("mha_dscores")]


class MhaKernelsTest(mha_test.MhaTestCase):

  @parameterized.parameters(*calls.cover("rocm", ARCH))
  def test_kernels(self, call, dims, dtype, symbols):
    dqk, dv = dims
    options, _ = calls.CALLS[call]
    with simulator.launched(self, symbols):
      for sizes in SIZES:
        self.check(mha_test.Case(
            **dict(b=1, dtype=dtype, dqk=dqk, dv=dv) | sizes | options))

  # Tiles of whole rows, of which the last one ends with the tensor.
  @parameterized.parameters(
      dict(bias="1hqk"), dict(mask="b1qk"), dict(mask="b11k"))
  def test_planes_are_read_to_their_end_alone(self, **planes):
    self.check(mha_test.Case(
        b=1, dtype="bf16", dqk=64, dv=64, sq=64, sk=152, **planes))

  # All heads at once, and one that others share keys with at a time; or all,
  # and each with sums of its own.
  @parameterized.parameters((1 << 30, 1), (1, 1), (1 << 30, 1 << 40))
  def test_kept_gradients_of_scores(self, scratch, keys):
    for dtype, dims, _ in simulator.groups("mha_dscores", "dtype", "dims"):
      with (mock.patch.multiple(
          op, _DSCORES_LENGTH_AMD=1, _DSCORES_KEYS_AMD=keys,
          _DSCORES_WINDOW_AMD=1, _DSCORES_BYTES=scratch),
            simulator.launched(self, dscores_kernels(dtype, dims, ()))):
        for sizes in DSCORES_SIZES:
          self.check(mha_test.Case(**dict(
              b=1, dtype=dtype, dqk=dims[0], dv=dims[1]) | sizes))

  @parameterized.parameters(*DSCORES_CALLS)
  def test_kept_gradients_with_features(self, options, features):
    for dtype, dims, _ in simulator.groups("mha_dscores", "dtype", "dims"):
      symbols = dscores_kernels(dtype, dims, features)
      if not symbols:
        continue
      with (mock.patch.multiple(op, _DSCORES_LENGTH_AMD=1, _DSCORES_KEYS_AMD=1),
            simulator.launched(self, symbols)):
        self.check(mha_test.Case(**dict(
            b=1, dtype=dtype, dqk=dims[0], dv=dims[1]) | options))

  @parameterized.product(dim=[64, 128], hk=[1, 4])
  def test_kept_gradients_of_hidden_keys(self, dim, hk):
    symbols = dscores_kernels("bf16", (dim, dim), ONE_ROW)  # None of gfx90a.
    with (mock.patch.multiple(op, _DSCORES_LENGTH_AMD=1, _DSCORES_KEYS_AMD=1),
          simulator.launched(self, symbols) if symbols else
          contextlib.nullcontext()):
      self.check_hidden_keys(dim, hk)

  def test_no_row_of_kept_gradients_is_left_out(self):
    rows = set()
    for dtype, dims, symbols in simulator.groups("mha_dscores", "dtype",
                                                 "dims"):
      rows |= set(symbols)
      for _, features in ((), ()), *DSCORES_CALLS:
        rows -= set(dscores_kernels(dtype, dims, features))
    self.assertEmpty(rows)

  # All keys: 1 GiB of scratch, or what has 32768 keys, twice as many of narrow
  # heads. Under a window: all of the call or, without dropout, none. No more
  # than 4 GiB.
  @parameterized.parameters(
      (4, 4096, 128, -1, 32), (4, 4096, 64, -1, 64), (1, 8192, 128, -1, 16),
      (2, 1024, 128, -1, 64), (4, 128, 128, -1, 0), (1, 65536, 128, -1, 0),
      (4, 4096, 128, 0, 128), (8, 4096, 128, 0, 0), (4, 4096, 64, 0, 0),
      (4, 4096, 64, 0, 128, True), (8, 4096, 128, 0, 32, True))
  def test_heads_of_kept_gradients(self, b, s, d, window_right, heads,
                                   dropout=False):
    q, k = (jax.ShapeDtypeStruct((b, s, h, d), jnp.bfloat16) for h in (32, 8))
    x = types.Operands(q, k, k, *[None] * (len(types.Operands._fields) - 3))
    if dropout:
      x = x._replace(
          dropout_state=jax.ShapeDtypeStruct((b, 32, 6), jnp.uint32))
    bwd = op.BwdConfig(types.Config(1.0, window_right=window_right), None)
    self.assertEqual(op._dscores_heads("rocm", bwd, x), heads)

  def test_no_row_is_left_out(self):
    rows = calls.rows("rocm", ARCH, ("fast", "padded", "general"))
    self.assertNotEmpty(rows)
    for *_, symbols in calls.cover("rocm", ARCH):
      rows -= set(symbols)
    self.assertEmpty(rows)


if __name__ == "__main__":
  absltest.main()
