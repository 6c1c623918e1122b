# SPDX-License-Identifier: Apache-2.0
"""Kernels of KV-cache writes without a GPU, in Triton's interpreter.

Every bit is what oracle.py defines, with small tiles, so that there are full,
cut and absent ones.
"""

import ml_dtypes
import numpy as np
from absl.testing import absltest, parameterized
from cache import oracle
from harness.triton_interpreter import Tensor

# isort: split
from third_party.aiter.kernels.cache import walk, write
from third_party.aiter.kernels.cache.family import FEATURES

KINDS = {"int8": 0, "float8_e4m3fn": 1, "float8_e4m3fnuz": 2, "float8_e5m2": 4}
PAGES, SIZE, HEADS, TOKENS = 3, 16, 2, 7
SLOTS = np.int32([5, -1, 47, 48, 16, 2**31 - 1, 0])
# Whole pages; of the first one another token has a slot in the end.
WHOLE = np.int32([*range(16, 48), 1, 2, 20])


def _numbers(*shape, dtype=ml_dtypes.bfloat16, seed=0):
  rng = np.random.default_rng(seed)
  x = rng.standard_normal(shape, np.float32)
  x *= np.exp2(rng.integers(-9, 10, (*shape[:-1], 1))).astype(np.float32)
  x.flat[3], x.flat[9], x.flat[12] = np.nan, np.inf, -0.0
  return x.astype(dtype)


def _pool(shape, dtype, seed=1):
  dtype = np.dtype(dtype)
  return np.random.default_rng(seed).integers(
      0, 256, (*shape[:-1], shape[-1] * dtype.itemsize), np.uint8).view(dtype)


def _side(layout, shape, run, values=False):
  """(start, page, run_offset, offset, split, head, run, col) in elements."""
  stride = dict(zip(range(len(shape)), (
      np.cumprod((1, *shape[:0:-1]))[::-1].tolist())))
  page = stride[0]
  if layout == "NHD":
    return 0, page, stride[1], 0, 1, stride[2], run, 1
  if layout == "HND":
    return 0, page, stride[2], 0, 1, stride[1], run, 1
  if not values:  # x, asm
    return 0, page, stride[3], 0, 1, stride[1], stride[2], 1
  if layout == "x":
    return 0, page, 1, 0, 1, stride[1], run * stride[2], stride[2]
  return 0, page, stride[2], 1, shape[4], stride[1], run * stride[3], stride[3]


def _arguments(side, runs, run):
  """A side as kernels take it."""
  if not runs:
    return side
  start, page, run_offset, offset, split, head, step, col = side
  return (start // run, page // run, run_offset // run, offset // run, split,
          head // run, step // run, col)


def _bits(t):
  return np.ascontiguousarray(t).view(np.uint8)


def _is_runs(side, run, cols):
  return side[7] == 1 and not any(
      n % run for n in (*side[:4], *side[5:7], cols))


def _are_beside(side):
  return side[7] != 1 and 1 == (side[3] if side[4] > 1 else side[2])


def _flags(k_side, v_side, run, d, dv, more=()):
  on = [(FEATURES["aligned"], d % run == 0),
        (FEATURES["v_aligned"], dv % run == 0),
        (FEATURES["beside"], _are_beside(k_side)),
        (FEATURES["v_beside"], _are_beside(v_side)),
        (FEATURES["runs"], _is_runs(k_side, run, d)),
        (FEATURES["v_runs"], _is_runs(v_side, run, dv))]
  return sum(bit for bit, holds in on if holds) + sum(
      FEATURES[name] for name in more)


class KernelTest(parameterized.TestCase):

  def problem(self, layout, dtype, d, dv, given=ml_dtypes.bfloat16,
              tokens=TOKENS):
    run = 16 // np.dtype(dtype).itemsize
    shapes = oracle.shapes(layout, PAGES, SIZE, HEADS, d, dv, dtype)
    caches = [_pool(s, dtype, i) for i, s in enumerate(shapes)]
    rows = [_numbers(tokens, HEADS, n, dtype=given, seed=n + i)
            for i, n in enumerate((d, dv))]
    sides = [_side(layout, s, run, i == 1) for i, s in enumerate(shapes)]
    return run, caches, rows, sides

  def assert_same(self, got, want):
    for a, b in zip(got, want, strict=True):
      np.testing.assert_array_equal(_bits(a.array), _bits(b))

  @parameterized.product(
      layout=["NHD", "HND", "x", "asm"],
      dtype=[ml_dtypes.bfloat16, np.float32, np.int8])
  def test_copy(self, layout, dtype):
    d, dv = (32, 20) if layout in ("x", "asm") else (48, 16)
    run, caches, rows, sides = self.problem(layout, dtype, d, dv, dtype)
    want = [c.copy() for c in caches]
    oracle.write(layout, *rows, *want, SLOTS, SIZE)
    integer = f"int{8 * np.dtype(dtype).itemsize}"
    as_bits = lambda t: Tensor(t.view(integer))
    got = [as_bits(c) for c in caches]
    # Keys and values each by the kernel for their places.
    for of_runs in (True, False):
      cols = [n if _is_runs(s, run, n) == of_runs else 0
              for s, n in zip(sides, (d, dv))]
      tiles = sum(-(-TOKENS // 4) * HEADS * -(-n // 16) for n in cols)
      if tiles == 0:
        continue
      write.cache_copy[(tiles,)](
          *map(as_bits, rows), *got, Tensor(SLOTS),
          *_arguments(sides[0], of_runs, run),
          *_arguments(sides[1], of_runs, run), TOKENS, HEADS, *cols,
          PAGES * SIZE, SIZE, _flags(*sides, run, d, dv),
          FLAGS=(FEATURES["aligned"] | FEATURES["runs"]) if of_runs else 0,
          TILE_M=4, TILE_N=16, RUN=run)
    self.assert_same(got, want)

  @parameterized.product(
      kind=list(KINDS), given=["bfloat16", "float16", "float32"])
  def test_cast(self, kind, given):
    given = np.dtype(getattr(ml_dtypes, given, None) or given)
    dtype = np.dtype(getattr(ml_dtypes, kind, None) or kind)
    run, caches, rows, sides = self.problem("NHD", dtype, 16, 32, given)
    k_scale, v_scale = np.float32([0.3, 2e-31]), np.float32([7.5])
    want = [c.copy() for c in caches]
    oracle.write("NHD", *rows, *want, SLOTS, SIZE, k_scale,
                 v_scale if given != np.float16 else None)
    got = [Tensor(c.view(np.uint8)) for c in caches]
    flags = FEATURES["scaled"]
    if given != np.float16:
      flags |= FEATURES["v_scaled"]
    if given.name in ("float16", "float32"):
      flags |= FEATURES["fp16" if given == np.float16 else "fp32"]
    of_runs = kind != "int8"
    write.cache_cast[(2 * HEADS * 3,)](
        *(Tensor(t.view(np.int8)) for t in rows), *got, Tensor(k_scale),
        Tensor(v_scale), Tensor(SLOTS), *_arguments(sides[0], of_runs, run),
        *_arguments(sides[1], of_runs, run), 1, 0, TOKENS, HEADS, 16, 32,
        PAGES * SIZE, SIZE, KINDS[kind], flags,
        FLAGS=(FEATURES["aligned"] | FEATURES["runs"]) if of_runs else 0,
        TILE_M=4, TILE_N=16, RUN=run, NATIVE=False)
    self.assert_same(got, [w.view(np.uint8) for w in want])

  @parameterized.product(kind=list(KINDS), layout=["x", "asm"])
  def test_token(self, kind, layout):
    dtype = np.dtype(getattr(ml_dtypes, kind, None) or kind)
    d, dv = 32, 20
    run, caches, rows, sides = self.problem(layout, dtype, d, dv)
    shape = ((PAGES, HEADS, SIZE) if layout == "asm"
             else (HEADS, PAGES * SIZE))
    where = ((0, HEADS * SIZE, 1, SIZE) if layout == "asm"
             else (0, SIZE, 1, PAGES * SIZE))
    scales = [np.full(shape, 77, np.float32) for _ in range(2)]
    want = [c.copy() for c in (*caches, *scales)]
    oracle.write_by_token(layout, *rows, *want, SLOTS, SIZE)
    flags = _flags(*sides, run, d, dv)
    got = [Tensor(c.view(np.uint8)) for c in caches] + [
        Tensor(s) for s in scales]
    write.cache_token[(2 * 2 * HEADS,)](
        *(Tensor(t.view(np.int8)) for t in rows), *got, Tensor(SLOTS),
        *_arguments(sides[0], flags & FEATURES["runs"], run),
        *_arguments(sides[1], flags & FEATURES["v_runs"], run), *where, *where,
        TOKENS, HEADS, d, dv, PAGES * SIZE, SIZE, 1e-10, KINDS[kind],
        flags, TILE_M=4, COLS=32, RUN=run, NATIVE=False)
    self.assert_same(got, [_bits(w) if w.dtype == dtype else w for w in want])

  @parameterized.product(power=[False, True], tiles=[False, True])
  def test_indexer(self, power, tiles):
    d, group = 32, 16
    k = _numbers(TOKENS, d, dtype=np.float32)
    k[4] *= 0
    cache = _pool((PAGES, SIZE, d + 8), np.uint8)
    want = cache.copy()
    oracle.write_indexer(k, want, SLOTS, group, "float8_e4m3fn", power, tiles)
    page = SIZE * (d + 8)
    side = (0, page, 16 * d, 16, 16, 256, 256, 1) if tiles else (
        0, page, d, 0, 1, group, 16, 1)
    flags = FEATURES["aligned"] | FEATURES["runs"] | FEATURES["fp32"]
    flags |= FEATURES["power"] if power else 0
    got = Tensor(cache)
    scales = Tensor(got.array.reshape(-1)[SIZE * d:].view(np.float32))
    absent = [Tensor(np.zeros(4, t)) for t in (np.int8, np.uint8, np.float32)]
    where = (0, page // 4, 2, 1)
    write.cache_token[(4,)](
        Tensor(k.view(np.int8)), absent[0], got, absent[1], scales, absent[2],
        Tensor(SLOTS), *_arguments(side, True, 16),
        *_arguments(side, True, 16), *where, *where, TOKENS, 2, group, 0,
        PAGES * SIZE, SIZE, 1e-4, 1, flags, TILE_M=4, COLS=16, RUN=16,
        NATIVE=False)
    np.testing.assert_array_equal(got.array, want)

  @parameterized.product(kind=list(KINDS), layout=["x", "asm"])
  def test_block(self, kind, layout):
    dtype = np.dtype(getattr(ml_dtypes, kind, None) or kind)
    d, dv, block = 32, 20, 2 * SIZE if layout == "asm" else SIZE
    pages = 4
    run = 16
    shapes = oracle.shapes(layout, pages, SIZE, HEADS, d, dv, dtype)
    arrays = [_pool(s, dtype, i) for i, s in enumerate(shapes)]
    sides = [_side(layout, s, run, i == 1) for i, s in enumerate(shapes)]
    blocks = pages * SIZE // block
    shape = (blocks, HEADS) if layout == "asm" else (HEADS, blocks)
    where = (0, HEADS, 1) if layout == "asm" else (0, 1, blocks)
    arrays += [np.full(shape, 0.01 + i, np.float32) for i in range(2)]
    flags = _flags(*sides, run, d, dv)
    got = [Tensor(t.view(np.uint8)) for t in arrays[:2]] + [
        Tensor(t.copy()) for t in arrays[2:]]
    for i, slots in enumerate(([3, 0, -1, 40, 41, 64, 40],
                               [4, 33, 20, 17, 1, 4, 62])):
      slots = np.int32(slots)
      rows = [_numbers(TOKENS, HEADS, n, seed=i + n) for n in (d, dv)]
      winners = np.full(pages * SIZE, -1, np.int32)
      for token, slot in enumerate(slots):
        if 0 <= slot < pages * SIZE:
          winners[slot] = token
      # A copy that the oracle may change: tensors share the arrays' memory.
      want = [t.array.copy().view(dtype) for t in got[:2]] + [
          t.array.copy() for t in got[2:]]
      oracle.write_by_block(layout, *rows, *want, slots, SIZE, block)
      step = i + 2
      write.cache_block[(2 * -(-TOKENS // step) * HEADS,)](
          *(Tensor(t.view(np.int8)) for t in rows), *got, Tensor(slots),
          Tensor(winners), *_arguments(sides[0], flags & FEATURES["runs"], run),
          *_arguments(sides[1], flags & FEATURES["v_runs"], run), *where,
          *where, TOKENS, HEADS, d, dv, pages * SIZE, SIZE, block,
          step, 1e-10, KINDS[kind], flags, TILE_M=8, COLS=32, RUN=run,
          NATIVE=False)
      self.assert_same(got, [_bits(w) if w.dtype == dtype else w for w in want])

  @parameterized.product(
      op=["cast", "token", "block"], kind=["int8", "float8_e4m3fnuz"],
      layout=["x", "asm"], given=["bfloat16", "float16"],
      written=[SLOTS, WHOLE], d=[32, 16])
  def test_walk(self, op, kind, layout, given, written, d):
    if written is WHOLE and op != "block":  # Any of two may be the last.
      written = written[:-1]
    given = np.dtype(getattr(ml_dtypes, given, None) or given)
    dtype = np.dtype(getattr(ml_dtypes, kind, None) or kind)
    run = 16
    _, caches, rows, sides = self.problem(layout, dtype, d, d, given,
                                          len(written))
    flags = _flags(*sides, run, d, d, ["scaled"])
    flags |= FEATURES["fp16"] if given == np.float16 else 0
    slots = PAGES * SIZE
    shape, where = {
        ("cast", "x"): ((HEADS,), (1,)),
        ("cast", "asm"): ((HEADS,), (1,)),
        ("token", "x"): ((HEADS, slots), (0, SIZE, 1, slots)),
        ("token", "asm"): ((PAGES, HEADS, SIZE), (0, HEADS * SIZE, 1, SIZE)),
        ("block", "x"): ((HEADS, PAGES), (0, 1, PAGES)),
        ("block", "asm"): ((PAGES, HEADS), (0, HEADS, 1))}[op, layout]
    scales = [np.full(shape, 0.01 + i, np.float32) for i in range(2)]
    scales[0][..., -1] = 2e-31  # A cast's reciprocal is too large.
    want = [t.copy() for t in (*caches, *scales)]
    winners = np.full(slots, -1, np.int32)
    for token, slot in enumerate(written):
      if 0 <= slot < slots:
        winners[slot] = token
    if op == "cast":
      oracle.write(layout, *rows, *want[:2], written, SIZE, scales[0], None)
    elif op == "token":
      oracle.write_by_token(layout, *rows, *want, written, SIZE)
    else:
      oracle.write_by_block(layout, *rows, *want, written, SIZE, SIZE)
    got = [Tensor(t.view(np.uint8)) for t in caches] + [
        Tensor(t) for t in scales]
    sized = (d, d) if op == "cast" else (d,)
    floor = () if op == "cast" else (1e-10,)
    # More programs than tiles, and fewer.
    getattr(walk, f"cache_{op}")[(3 if layout == "asm" else 9, 2)](
        *(Tensor(t.view(np.int8)) for t in rows), *got, Tensor(written),
        *([Tensor(winners)] if op == "block" else []),
        *_arguments(sides[0], flags & FEATURES["runs"], run),
        *_arguments(sides[1], flags & FEATURES["v_runs"], run),
        *where, *where, len(written), HEADS, *sized, slots, SIZE, *floor,
        KINDS[kind], flags, TILE_M=16 if op == "block" else 4, COLS=32,
        CAST="", HALF=given == np.float16, EXACT=d == 32, OPAQUE=False)
    self.assert_same(got, [_bits(w) if w.dtype == dtype else w for w in want])


if __name__ == "__main__":
  absltest.main()
