# SPDX-License-Identifier: Apache-2.0
"""Every KV-cache kernel for AMD GPUs runs on a simulated one and is right."""

import itertools

import numpy as np
from absl.testing import absltest, parameterized
from cache import cases, oracle
from harness import simulator

from jax._src.aiter.core import dispatch
from jax.experimental import aiter

SIZE = cases.SIZE
FLOAT8 = dispatch.float8_dtype().name
TYPES = {"bf16": "bfloat16", "fp32": "float32", "i8": "int8"}


class CacheKernelsTest(parameterized.TestCase):

  @parameterized.parameters(
      *simulator.groups("cache_", "op", "dtype", "dims", "grade"))
  def test_kernels(self, op, dtype, dims, grade, symbols):
    with simulator.launched(self, symbols):
      if grade != "general":
        self.walks(op, TYPES.get(dtype, "float16"),
                   dims[0] if grade == "fast" else dims[0] - 16)
      else:
        getattr(self, op)(TYPES.get(dtype), max(dims[0] - 16, 32))

  def walks(self, op, given, d):
    """Heads of d columns, and the types that the device converts."""
    # No run of slots, of numbers some of which are special, a page, and others.
    paged = np.int32([3, -1, *range(65, 79), *range(32, 48), 4, 5, 6])
    for kind, layout, slots in itertools.product(
        ("int8", FLOAT8), ("NHD", "x", "asm") if op == "cache_cast" else
        ("x", "asm"), (cases.some_slots(21), paged)):
      arrays = cases.caches(layout, 2, d, d, kind)
      rows = [cases.numbers(len(slots), 2, d, dtype=given, seed=i)
              for i in range(2)]
      if op == "cache_cast":
        scales = {"k_scale": np.float32([0.3, 1e-3]), "v_scale": None}
        want = cases.copies(arrays)
        oracle.write(layout, *rows, *want, slots, SIZE, *scales.values())
        got = aiter.write_kv_cache(*rows, *arrays, slots, layout=layout,
                                   **scales)
      else:
        asm = layout == "asm"
        if op == "cache_token":
          shape = (cases.PAGES, 2, SIZE) if asm else (2, cases.PAGES * SIZE)
          function = aiter.reshape_and_cache_with_pertoken_quant
          write = oracle.write_by_token
        else:
          shape = (cases.PAGES, 2) if asm else (2, cases.PAGES)
          function = aiter.reshape_and_cache_with_block_quant
          write = lambda *args: oracle.write_by_block(*args, SIZE)
        arrays += [np.full(shape, 0.01, np.float32) for _ in range(2)]
        want = cases.copies(arrays)
        write(layout, *rows, *want, slots, SIZE)
        got = function(*rows, *arrays, slots, asm_layout=asm)
      cases.assert_same(self, got, tuple(want), (kind, layout, slots))

  def write(self, dtype, given, **scales):
    # All of "NHD" lies in runs of 16 bytes; of "x", V does not.
    for layout in ("NHD", "x"):
      arrays = cases.caches(layout, 3, 32, 48, dtype)
      rows = [cases.numbers(9, 3, n, dtype=given) for n in (32, 48)]
      slots, want = cases.some_slots(9), cases.copies(arrays)
      oracle.write(layout, *rows, *want, slots, SIZE, *scales.values())
      got = aiter.write_kv_cache(*rows, *arrays, slots, layout=layout, **scales)
      cases.assert_same(self, got, tuple(want), layout)

  def cache_copy(self, dtype, _):
    self.write(dtype, dtype)

  def cache_cast(self, *_):
    for kind, given in zip(cases.BYTES, (*cases.WIDE, "bfloat16")):
      self.write(kind, given, k_scale=np.float32([0.3, 5.0, 1e-3]),
                 v_scale=0.7)

  def found(self, function, write, scale_shape, d):
    for kind, given in zip(cases.BYTES, (*cases.WIDE, "bfloat16")):
      arrays = cases.caches("asm", 2, d, d - 3, kind) + [
          np.full(scale_shape, 0.01, np.float32) for _ in range(2)]
      rows = [cases.numbers(9, 2, n, dtype=given) for n in (d, d - 3)]
      slots, want = cases.some_slots(9), cases.copies(arrays)
      write("asm", *rows, *want, slots, SIZE)
      got = function(*rows, *arrays, slots, asm_layout=True)
      cases.assert_same(self, got, tuple(want), kind)

  def cache_token(self, _, d):
    self.found(aiter.reshape_and_cache_with_pertoken_quant,
               oracle.write_by_token, (cases.PAGES, 2, SIZE), d)

  def cache_block(self, _, d):
    self.found(aiter.reshape_and_cache_with_block_quant,
               lambda *args: oracle.write_by_block(*args, SIZE),
               (cases.PAGES, 2), d)


if __name__ == "__main__":
  absltest.main()
