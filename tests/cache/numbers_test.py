# SPDX-License-Identifier: Apache-2.0
"""KV-cache writes: every bit as oracle.py defines it, and errors."""

import jax.numpy as jnp
import numpy as np
from absl.testing import absltest, parameterized
from cache import cases, oracle
from harness import machine

import jax
from jax.experimental import aiter

LAYOUTS = cases.LAYOUTS
WIDE, BYTES = cases.WIDE, cases.BYTES
PAGES, SIZE, OUTSIDE = cases.PAGES, cases.SIZE, cases.OUTSIDE
bits, caches, copies, dtype_of, numbers, pool, present, some_slots = (
    cases.bits, cases.caches, cases.copies, cases.dtype_of, cases.numbers,
    cases.pool, cases.present, cases.some_slots)


class CacheTestCase(parameterized.TestCase):

  assert_same = cases.assert_same


class WriteTest(CacheTestCase):

  def check(self, layout, dtype, given, heads=3, d=32, dv=32, tokens=13,
            k_scale=None, v_scale=None, slots=None):
    key = numbers(tokens, heads, d, dtype=given)
    value = numbers(tokens, heads, dv, dtype=given, seed=3)
    slots = some_slots(tokens) if slots is None else slots
    arrays = caches(layout, heads, d, dv, dtype)
    want = copies(arrays)
    oracle.write(layout, key, value, *want, slots, SIZE, k_scale, v_scale)
    got = aiter.write_kv_cache(key, value, *arrays, slots, layout=layout,
                               k_scale=k_scale, v_scale=v_scale)
    self.assert_same(got, present(want), (layout, dtype, given, d, dv))

  @parameterized.product(layout=LAYOUTS, dtype=WIDE + BYTES)
  def test_layouts(self, layout, dtype):
    # Widths of K and V differ; rows do not end at multiples of 16 bytes.
    odd = {"x": dict(d=16, dv=21), "asm": dict(d=16, dv=21),
           "interleaved": dict(d=21, dv=21)}
    if LAYOUTS.index(layout) % 2 == (WIDE + BYTES).index(dtype) % 2:
      self.check(layout, dtype, "bfloat16")
    else:
      self.check(layout, dtype, "bfloat16", heads=2,
                 **odd.get(layout, dict(d=40, dv=21)))

  @parameterized.product(given=WIDE[1:], dtype=WIDE + BYTES)
  def test_dtypes(self, given, dtype):
    layout = LAYOUTS[(WIDE + BYTES).index(dtype) % len(LAYOUTS)]
    self.check(layout, dtype, given, heads=1)

  @parameterized.parameters(
      (None, 2.5), (0.3, np.float32([0.02, 7.0, 1.5])),
      (np.float32([0.02, 7.0, 1.5]), None), (1e-3, np.float32([2.5])))
  def test_given_scales(self, k_scale, v_scale):
    for i, dtype in enumerate(BYTES):
      layout = LAYOUTS[i + (v_scale is None)]
      self.check(layout, dtype, ("float16", "bfloat16")[i % 2],
                 k_scale=k_scale, v_scale=v_scale)

  @parameterized.parameters(*BYTES)
  def test_extreme_scales(self, dtype):
    scales = np.float32([1e-30, 3e35, np.inf, np.nan, 0.0, -0.5])
    self.check("NHD", dtype, "float32", tokens=4, heads=6, k_scale=scales,
               v_scale=scales[:2].sum())

  @parameterized.parameters(*enumerate(BYTES))
  def test_own_dtype(self, i, dtype):
    """8-bit numbers for a cache of them stay as they are."""
    self.check(LAYOUTS[i], dtype, dtype)

  @parameterized.parameters(
      (1, 1, 1), (2, 1, 8), (40, 1, 24), (33, 4, 8), (5, 7, 136), (3, 2, 512),
      (64, 8, 64), (3, 1, 272))
  def test_every_size(self, tokens, heads, d):
    if d % 16:
      self.check("NHD", "bfloat16", "bfloat16", tokens=tokens, heads=heads,
                 d=d, dv=d)
    else:
      self.check("HND", "float8_e4m3fn", "bfloat16", tokens=tokens,
                 heads=heads, d=d, dv=max(d // 2, 1))

  def test_all_skipped(self):
    for layout, dtype in (("HND", "bfloat16"), ("asm", "float8_e4m3fn")):
      self.check(layout, dtype, "bfloat16",
                 slots=np.resize(np.int32(OUTSIDE), 13))

  def test_slots_of_64_bits(self):
    with jax.enable_x64(True):
      slots = some_slots(13).astype(np.int64)
      slots[1:9:2] = 2**32, 2**40 + 5, -2**33 + 1, 2**31 + 3
      self.check("NHD", "bfloat16", "bfloat16", slots=slots)

  def test_empty(self):
    for tokens, pages in ((0, PAGES), (3, 0)):
      for dtype in ("bfloat16", "float8_e4m3fn"):
        arrays = [jnp.zeros((pages, SIZE, 2, 8), dtype)] * 2
        rows = jnp.ones((tokens, 2, 8), jnp.bfloat16)
        got = aiter.write_kv_cache(rows, rows, *arrays,
                                   jnp.zeros(tokens, jnp.int32))
        self.assert_same(got, jax.device_get(tuple(arrays)))

  def test_twice_the_same_slot(self):
    """Every number is one of the tokens'."""
    key = numbers(6, 2, 16)
    slots = np.int32([3, 3, 5, 3, 5, 9])
    arrays = caches("NHD", 2, 16, 16, "bfloat16")
    got, _ = aiter.write_kv_cache(key, key, *arrays, slots)
    got, key = bits(got[0]), bits(key)
    for slot in (3, 5, 9):
      self.assertTrue((got[slot] == key[slots == slot]).any(0).all())

  def test_names(self):
    """Other names of the same."""
    key, value = numbers(7, 2, 16), numbers(7, 2, 16, seed=5)
    slots = some_slots(7)
    for layout, function in (
        ("NHD", aiter.reshape_and_cache_flash),
        ("NHD", lambda k, v, kc, vc, s, **scales: aiter.append_kv(
            k, v, s, kc, vc, **scales)),
        ("x", aiter.reshape_and_cache),
        ("asm", lambda *args, **scales: aiter.reshape_and_cache(
            *args, asm_layout=True, **scales))):
      arrays = caches(layout, 2, 16, 16, "int8")
      scales = dict(k_scale=0.5, v_scale=jnp.float32([2.0, 3.0]))
      want = aiter.write_kv_cache(key, value, *arrays, slots, layout=layout,
                                  **scales)
      self.assert_same(function(key, value, *arrays, slots, **scales),
                       jax.device_get(want), layout)
    arrays = caches("NHD", 2, 16, 16, "bfloat16")
    self.assert_same(
        aiter.append_kv(key, value, slots, *arrays, kv_cache_dtype="bfloat16"),
        jax.device_get(aiter.append_kv(key, value, slots, *arrays)))

  @parameterized.parameters("bfloat16", "float8_e4m3fn", "int8")
  def test_slices(self, dtype):
    new = numbers(20, 4, 16).astype(dtype_of(dtype))
    slices = np.int32([[3, 40, 70, 90, 0], [2, 8, 15, 0, 19], [5, 6, 0, 2, 1]])
    for shape in ((PAGES * SIZE, 4, 16), (PAGES, SIZE, 4, 16)):
      for count in (None, 3, np.int32([4])):
        cache = pool(*shape, dtype=dtype)
        want = cache.copy()
        flat = want.reshape(-1, 4, 16)
        for dst, src, n in slices.T[:5 if count is None else int(
            np.reshape(count, ()))]:
          for i in range(n):
            if dst + i < len(flat):
              flat[dst + i] = new[src + i]
        got = jax.jit(lambda *args, count=count: aiter.kv_cache_update(
            *args, count, page_size=SIZE))(new, slices, cache)
        self.assert_same(got, want, (shape, count))


class FoundScalesTest(CacheTestCase):
  """Scales by token and by block."""

  def arrays(self, asm, dtype, heads, d, dv, block=None):
    layout = "asm" if asm else "x"
    rng = np.random.default_rng(5)
    if block:
      shape = (PAGES * SIZE // block, heads)
      shape = shape if asm else shape[::-1]
    else:
      shape = (PAGES, heads, SIZE) if asm else (heads, PAGES * SIZE)
    return layout, [*caches(layout, heads, d, dv, dtype),
                    *(rng.random(shape, np.float32) for _ in range(2))]

  @parameterized.product(dtype=BYTES, asm=[False, True])
  def test_by_token(self, dtype, asm):
    number = 2 * BYTES.index(dtype) + asm
    for i, (heads, d, dv, tokens) in enumerate(machine.sample(
        [(2, 32, 32, 13), (3, 16, 21, 7), (1, 144, 128, 33)], 2)):
      layout, arrays = self.arrays(asm, dtype, heads, d, dv)
      given = WIDE[(number + i) % 3]
      key = numbers(tokens, heads, d, dtype=given)
      value = numbers(tokens, heads, dv, dtype=given, seed=3)
      slots, want = some_slots(tokens), copies(arrays)
      oracle.write_by_token(layout, key, value, *want, slots, SIZE)
      got = aiter.reshape_and_cache_with_pertoken_quant(
          key, value, *arrays, slots, asm_layout=asm)
      self.assert_same(got, tuple(want), (dtype, given, asm, d))

  @parameterized.product(dtype=BYTES, asm=[False, True])
  def test_by_block(self, dtype, asm):
    number = 2 * BYTES.index(dtype) + asm
    given = WIDE[number % 3]
    heads, d, dv = ((2, 32, 21), (1, 16, 16))[number % 2]
    layout, arrays = self.arrays(asm, dtype, heads, d, dv, SIZE)
    run = jax.jit(lambda *args: aiter.reshape_and_cache_with_block_quant(
        *args, asm_layout=asm))
    got = copies(arrays)
    # A page anew, tokens behind it that do not enlarge its scale and that do,
    # all in one call in any order; a page in the middle; one slot twice.
    for i, slots in enumerate([
        [2, 0, 1, -1, 37, 40, 18], [3, 200, 4, 41, 16, 63, 62], [5, 7, 6],
        [12, 9, 12, 50, 9, 12, 8], [-1, 80, -9]]):
      slots = np.int32((slots + [-1] * 7)[:7])
      size = 4.0**(i % 3 * 2 - 2)
      rows = [(numbers(7, heads, n, dtype="float32", seed=9 * i + n)
               * np.float32(size)).astype(dtype_of(given)) for n in (d, dv)]
      if i % 2:
        rows = [np.where(np.isfinite(t.astype(np.float32)), t, t.dtype.type(1))
                for t in rows]
      oracle.write_by_block(layout, *rows, *arrays, slots, SIZE, SIZE)
      got = run(*rows, *got, slots)
      self.assert_same(got, tuple(arrays), (dtype, given, asm, i))

  @parameterized.parameters((128, True), (256, False))
  def test_by_large_block(self, block, asm):
    pages, heads, d = 32, 2, 16
    dtype = dtype_of(BYTES[1])
    shapes = oracle.shapes("asm" if asm else "x", pages, SIZE, heads, d, d,
                           dtype)
    blocks = pages * SIZE // block
    arrays = [pool(*s, dtype=BYTES[1], seed=i) for i, s in enumerate(shapes)]
    arrays += [np.ones((blocks, heads) if asm else (heads, blocks), np.float32)
               for _ in range(2)]
    got = copies(arrays)
    run = jax.jit(
        lambda *args: aiter.reshape_and_cache_with_block_quant_for_asm_pa(
            *args, asm_layout=asm, ori_block_size=block))
    for i in range(2):
      slots = some_slots(50, pages * SIZE, seed=i)
      slots[4] = block * i
      rows = [numbers(50, heads, d, seed=i + j) for j in range(2)]
      oracle.write_by_block("asm" if asm else "x", *rows, *arrays, slots, SIZE,
                            block)
      got = run(*rows, *got, slots)
      self.assert_same(got, tuple(arrays), (block, asm, i))

  def test_order(self):
    """A block's result is of its tokens, not of their order."""
    layout, arrays = self.arrays(True, "int8", 2, 32, 32, SIZE)
    rows = [numbers(12, 2, 32, seed=i) for i in range(2)]
    slots = np.random.default_rng(0).permutation(30)[:12].astype(np.int32)
    run = lambda order: jax.device_get(
        aiter.reshape_and_cache_with_block_quant(
            *(t[order] for t in rows), *arrays, slots[order],
            asm_layout=True))
    self.assert_same(run(np.arange(12)), run(np.arange(12)[::-1]), layout)


class LatentTest(CacheTestCase):

  @parameterized.parameters(*enumerate(WIDE + BYTES))
  def test_latent(self, i, dtype):
    given = "float16" if dtype == "float8_e5m2" else "bfloat16"
    scale = 0.7 if dtype in BYTES else None
    sizes = ((512, 64, 640), (32, 16, 48), (512, 64, 576), (96, 24, 152))
    for lora, rope, width in (sizes[i % 4], sizes[i // 2]):
      kv_c, k_pe = numbers(9, lora, dtype=given), numbers(9, rope, dtype=given)
      cache = pool(PAGES, SIZE, width, dtype=dtype)
      slots, want = some_slots(9), cache.copy()
      first = lora if width == lora + rope else -(-lora // 128) * 128
      oracle.write_latent(kv_c, k_pe, want, slots, SIZE, first, scale)
      got = aiter.concat_and_cache_mla(kv_c, k_pe, cache, slots, scale=scale)
      self.assert_same(got, want, (dtype, lora, width))

  @parameterized.parameters(*enumerate(WIDE + BYTES))
  def test_segments(self, i, dtype):
    scale = np.float32([0.7]) if dtype in BYTES[1:] else None
    lora, rope = ((32, 16), (20, 7))[i % 2]
    kv_c, k_pe = numbers(9, lora), numbers(9, rope)
    cache = pool(PAGES, SIZE * (lora + rope), dtype=dtype)
    slots, want = some_slots(9), cache.copy()
    oracle.write_segments(kv_c, k_pe, want, slots, SIZE, scale)
    got = aiter.concat_and_cache_mla_seg(kv_c, k_pe, cache, slots,
                                         page_size=SIZE, scale=scale)
    self.assert_same(got, want, (dtype, lora))

  @parameterized.parameters(
      ((128, 128), None, False, BYTES[1]),
      ((128, 128), "ue8m0", True, BYTES[2]),
      ((128, 64), "ue8m0", False, BYTES[1]),
      ((48, 16), None, True, BYTES[1]),
      ((256, 256), "ue8m0", False, BYTES[2]),
      ((48, 16), None, False, BYTES[2]))
  def test_indexer(self, shape, scale_fmt, preshuffle, kind):
    d, group = shape
    k = numbers(9, d, dtype="float32" if kind == BYTES[1] else "bfloat16")
    k[2] *= 0  # Below the floor.
    k[3] = 448 * 2.0**np.arange(-9, 0, 9 / d)[:d]  # A scale of a power of two.
    cache = pool(PAGES, SIZE, d + 4 * d // group, dtype="uint8")
    slots, want = some_slots(9), cache.copy()
    oracle.write_indexer(k, want, slots, group, kind, scale_fmt is not None,
                         preshuffle)
    options = dict(quant_block_size=group, preshuffle=preshuffle,
                   quant_dtype=kind)
    got = aiter.indexer_k_quant_and_cache(k, cache, slots, scale_fmt=scale_fmt,
                                          **options)
    self.assert_same(got, want, (shape, scale_fmt, preshuffle))
    # What comes back is what was written.
    table = np.int32([[1, 4], [3, -1], [2, 0]])
    cu = np.int32([0, 19, 19, 40])
    codes, scale = aiter.cp_gather_indexer_k_quant_cache(
        want, table, cu, total_tokens=43, head_dim=d, **options)
    flat, codes, scale = want.reshape(PAGES, -1), bits(codes), bits(scale)
    for token in range(43):
      sequence = int(np.searchsorted(cu, token, side="right")) - 1
      if token >= 40:
        self.assertFalse(codes[token].any() or scale[token].any())
        continue
      at = token - cu[sequence]
      page, offset = table[sequence, at // SIZE], at % SIZE
      line = flat[page, SIZE * d:].view(np.float32).reshape(SIZE, -1)[offset]
      np.testing.assert_array_equal(scale[token], bits(line))
      c = np.arange(d)
      place = offset * d + c if not preshuffle else (
          (offset // 16 * (d // 16) + c // 16) * 256 + offset % 16 * 16
          + c % 16)
      np.testing.assert_array_equal(codes[token], flat[page, place])
    # Of a pool without a page nothing comes.
    codes, scale = aiter.cp_gather_indexer_k_quant_cache(
        want[:0], table, cu, total_tokens=43, head_dim=d, **options)
    self.assertFalse(bits(codes).any() or bits(scale).any())


class PagesTest(CacheTestCase):

  @parameterized.parameters(*zip(LAYOUTS, ("bfloat16", *BYTES)))
  def test_gather(self, layout, dtype):
    arrays = caches(layout, 2, 32, 32, dtype)
    table = np.int64([[1, 4], [3, PAGES], [2, 0], [-1, 1]]).astype(np.int32)
    cu = np.int32([0, 19, 19 + SIZE + 3, 60, 62])
    k, v = jax.jit(lambda *args: aiter.gather_kv_cache(
        *args, total_tokens=65, layout=layout))(*arrays, table, cu)
    k, v = np.asarray(k), np.asarray(v)
    for token in range(65):
      sequence = int(np.searchsorted(cu, token, side="right")) - 1
      page = -1
      if token < cu[-1]:
        at = token - cu[sequence]
        page, offset = int(table[sequence, at // SIZE]), at % SIZE
      if not 0 <= page < PAGES:
        self.assertFalse(bits(k[token]).any() or bits(v[token]).any(), token)
        continue
      want_k = oracle.k_view(layout, arrays[0], page, offset).reshape(2, 32)
      want_v = oracle.v_view(layout, *arrays, page, offset)
      np.testing.assert_array_equal(bits(k[token]), bits(want_k))
      np.testing.assert_array_equal(bits(v[token]),
                                    bits(np.ascontiguousarray(want_v)))

  @parameterized.parameters("bfloat16", "float8_e5m2", "uint8")
  def test_swap_and_copy(self, dtype):
    src, dst = (pool(PAGES + i, 3, 2, 8, dtype=dtype, seed=i) for i in (0, 1))
    pairs = np.int32([[0, 5], [4, 1], [-1, 2], [PAGES, 3], [2, -1], [3, 6]])
    want = dst.copy()
    want[5], want[1] = src[0], src[4]
    self.assert_same(aiter.swap_blocks(src, dst, pairs), want)
    self.assert_same(aiter.swap_blocks(src, dst, pairs[:0]), dst)
    # A page may be read and written in one call.
    pairs = np.int32([[0, 1], [1, 2], [2, 0], [3, PAGES]])
    want = src.copy()
    want[[1, 2, 0]] = src[[0, 1, 2]]
    k, v = aiter.copy_blocks(src, src[:, :1] if dtype == "uint8" else src,
                             pairs)
    self.assert_same(k, want)
    self.assert_same(v, want[:, :1] if dtype == "uint8" else want)
    many = aiter.copy_blocks([src, dst[:PAGES]], [dst[:PAGES], src], pairs)
    self.assertEqual([len(t) for t in many], [2, 2])
    self.assert_same(many[0][0], want)
    self.assert_same(many[1][1], want)


def array(*shape, dtype="bfloat16"):
  return jnp.zeros(shape, dtype)


GOOD = dict(key=array(4, 2, 16), value=array(4, 2, 16),
            k_cache=array(3, 8, 2, 16), v_cache=array(3, 8, 2, 16),
            slot_mapping=jnp.zeros(4, jnp.int32))
X = {**GOOD, "k_cache": array(3, 2, 2, 8, 8), "v_cache": array(3, 2, 16, 8)}
QUANTISED = {**GOOD, "k_cache": array(3, 2, 1, 16, 16, dtype="int8"),
             "v_cache": array(3, 2, 16, 16, dtype="int8"),
             "k_dequant_scales": jnp.zeros((2, 48)),
             "v_dequant_scales": jnp.zeros((2, 48))}
MLA = dict(kv_c=array(4, 32), k_pe=array(4, 16), kv_cache=array(3, 8, 48),
           slot_mapping=GOOD["slot_mapping"])
INDEXER = dict(k=array(4, 128), kv_cache=array(3, 16, 132, dtype="uint8"),
               slot_mapping=GOOD["slot_mapping"])
GATHER = dict(k_cache=GOOD["k_cache"], v_cache=GOOD["v_cache"],
              block_table=jnp.zeros((2, 3), jnp.int32),
              cu_seq_lens=jnp.zeros(3, jnp.int32), total_tokens=9)
# Function, what it takes, what replaces it, error, words of the message.
ERRORS = [
    ("write_kv_cache", GOOD, dict(layout="NDH"), ValueError, ["layout", "NDH"]),
    ("write_kv_cache", GOOD, dict(key=[1.0]), TypeError, ["key", "list"]),
    ("write_kv_cache", GOOD, dict(key=array(4, 32)), ValueError,
     ["key", "rank 3"]),
    ("write_kv_cache", GOOD, dict(key=array(4, 2, 16, dtype="int32")),
     TypeError, ["key", "int32"]),
    ("write_kv_cache", GOOD, dict(value=array(4, 2, 16, dtype="float32")),
     TypeError, ["key and value", "float32"]),
    ("write_kv_cache", GOOD, dict(value=array(5, 2, 16)), ValueError,
     ["value", "[5, 2, 16]"]),
    ("write_kv_cache", GOOD, dict(k_cache=array(3, 8, 2, 17)), ValueError,
     ["k_cache", "[3, 8, 2, 17]", "[3, 8, 2, 16]"]),
    ("write_kv_cache", GOOD, dict(v_cache=array(4, 8, 2, 16)), ValueError,
     ["v_cache", "[3, 8, 2, 16]"]),
    ("write_kv_cache", GOOD, dict(v_cache=array(3, 8, 2, 16, dtype="float16")),
     TypeError, ["v_cache", "float16"]),
    ("write_kv_cache", GOOD, dict(k_cache=array(3, 8, 32)), ValueError,
     ["k_cache", "rank 4"]),
    ("write_kv_cache", GOOD, dict(v_cache=None), TypeError,
     ["v_cache", "NoneType"]),
    ("write_kv_cache", GOOD, dict(
        key=array(4, 2, 16, dtype="int8"), value=array(4, 2, 16, dtype="int8")),
     TypeError, ["cache", "bfloat16", "int8"]),
    ("write_kv_cache", GOOD, dict(layout="interleaved",
                                  k_cache=array(3, 8, 2, 2, 16)),
     ValueError, ["v_cache", "None"]),
    ("write_kv_cache", GOOD, dict(slot_mapping=jnp.zeros(4)), TypeError,
     ["slot_mapping", "float32"]),
    ("write_kv_cache", GOOD, dict(slot_mapping=jnp.zeros(5, jnp.int32)),
     ValueError, ["slot_mapping", "[5]", "[4]"]),
    ("write_kv_cache", GOOD, dict(k_scale=0.5), ValueError,
     ["k_scale", "None", "bfloat16"]),
    ("reshape_and_cache_flash",
     {**GOOD, "k_cache": array(3, 8, 2, 16, dtype="int8"),
      "v_cache": array(3, 8, 2, 16, dtype="int8")},
     dict(v_scale=jnp.ones(3)), ValueError, ["v_scale", "float32[3]", "[2]"]),
    ("reshape_and_cache_flash",
     {**GOOD, "k_cache": array(3, 8, 2, 16, dtype="int8"),
      "v_cache": array(3, 8, 2, 16, dtype="int8")},
     dict(v_scale=jnp.ones(2, jnp.int32)), TypeError, ["v_scale", "int32"]),
    ("reshape_and_cache", X, dict(asm_layout=1), TypeError, ["asm_layout"]),
    ("reshape_and_cache", X, dict(key=array(4, 2, 12), value=array(4, 2, 12)),
     ValueError, ["key", "multiple of 8"]),
    ("reshape_and_cache", X, dict(asm_layout=True), ValueError,
     ["v_cache", "rank 5"]),
    ("reshape_and_cache_with_pertoken_quant", QUANTISED,
     dict(k_dequant_scales=jnp.zeros((48, 2))), ValueError,
     ["k_dequant_scales", "[2, 48]"]),
    ("reshape_and_cache_with_pertoken_quant", QUANTISED,
     dict(k_dequant_scales=jnp.zeros((2, 48), jnp.bfloat16)), TypeError,
     ["k_dequant_scales", "bfloat16"]),
    ("reshape_and_cache_with_pertoken_quant", QUANTISED,
     dict(k_cache=array(3, 2, 2, 16, 8), v_cache=array(3, 2, 16, 16)),
     TypeError, ["k_cache", "bfloat16", "int8"]),
    ("reshape_and_cache_with_block_quant", QUANTISED, {}, ValueError,
     ["k_dequant_scales", "[2, 3]"]),
    ("reshape_and_cache_with_block_quant_for_asm_pa", QUANTISED, {},
     ValueError, ["k_cache", "blocks of 128"]),
    ("reshape_and_cache_with_block_quant_for_asm_pa", QUANTISED,
     dict(ori_block_size=64), ValueError, ["ori_block_size", "64"]),
    ("concat_and_cache_mla", MLA, dict(k_pe=array(5, 16)), ValueError,
     ["k_pe", "[5, 16]"]),
    ("concat_and_cache_mla", MLA, dict(kv_cache=array(3, 8, 50)), ValueError,
     ["kv_cache", "48 columns", "144"]),
    ("concat_and_cache_mla", MLA, dict(scale=jnp.ones(2)), ValueError,
     ["scale", "[2]"]),
    ("concat_and_cache_mla_seg", {**MLA, "kv_cache": array(3, 8 * 48)},
     dict(page_size=9), ValueError, ["kv_cache", "432"]),
    ("concat_and_cache_mla_seg", {**MLA, "kv_cache": array(3, 8 * 48)},
     dict(page_size=0), ValueError, ["page_size", "0"]),
    ("indexer_k_quant_and_cache", INDEXER, dict(quant_block_size=48),
     ValueError, ["quant_block_size", "48"]),
    ("indexer_k_quant_and_cache", INDEXER, dict(scale_fmt="e8m0"), ValueError,
     ["scale_fmt", "e8m0"]),
    ("indexer_k_quant_and_cache", INDEXER, dict(quant_dtype="int8"), TypeError,
     ["quant_dtype", "int8"]),
    ("indexer_k_quant_and_cache", INDEXER, dict(
        kv_cache=array(3, 16, 130, dtype="uint8")), ValueError,
     ["kv_cache", "132"]),
    ("indexer_k_quant_and_cache", INDEXER, dict(
        kv_cache=array(3, 8, 132, dtype="uint8"), preshuffle=True), ValueError,
     ["kv_cache", "multiple of 16"]),
    ("kv_cache_update", dict(new_kv=array(4, 2, 16),
                             slices=jnp.zeros((3, 1), jnp.int32),
                             kv_cache=array(9, 2, 16)),
     dict(slices=jnp.zeros((2, 3), jnp.int32)), ValueError,
     ["slices", "[3, n]"]),
    ("kv_cache_update", dict(new_kv=array(4, 2, 16),
                             slices=jnp.zeros((3, 1), jnp.int32),
                             kv_cache=array(9, 2, 16)),
     dict(kv_cache=array(9, 2, 16, dtype="int8")), TypeError,
     ["kv_cache", "int8"]),
    ("append_kv", dict(k_new=GOOD["key"], v_new=GOOD["value"],
                       slot_mapping=GOOD["slot_mapping"],
                       k_pool=GOOD["k_cache"], v_pool=GOOD["v_cache"]),
     dict(kv_cache_dtype="fp8"), ValueError, ["kv_cache_dtype", "fp8"]),
    ("gather_kv_cache", GATHER, dict(total_tokens=-1), ValueError,
     ["total_tokens", "-1"]),
    ("gather_kv_cache", GATHER, dict(cu_seq_lens=jnp.zeros(4, jnp.int32)),
     ValueError, ["cu_seq_lens", "[4]", "[3]"]),
    ("swap_blocks", dict(src=array(3, 8), dst=array(4, 8),
                         block_mapping=jnp.zeros((1, 2), jnp.int32)),
     dict(dst=array(4, 9)), ValueError, ["dst", "[4, 9]"]),
    ("swap_blocks", dict(src=array(3, 8), dst=array(4, 8),
                         block_mapping=jnp.zeros((1, 2), jnp.int32)),
     dict(block_mapping=jnp.zeros((2, 3), jnp.int32)), ValueError,
     ["block_mapping", "[n, 2]"]),
    ("copy_blocks", dict(k_caches=array(3, 8), v_caches=array(3, 8),
                         block_mapping=jnp.zeros((1, 2), jnp.int32)),
     dict(v_caches=[array(3, 8)]), TypeError, ["v_caches", "list"]),
]


class ErrorsTest(parameterized.TestCase):

  def test_errors(self):
    for name, good, replaced, error, words in ERRORS:
      args = {**good, **replaced}
      with self.subTest(name=name, replaced=list(replaced)):
        with self.assertRaises(error) as caught:
          getattr(aiter, name)(**args)
        for word in (name, *words):
          self.assertIn(word, str(caught.exception))

  def test_gradient(self):
    def loss(key):
      return jnp.sum(aiter.write_kv_cache(**{**GOOD, "key": key})[0])
    with self.assertRaisesRegex(TypeError, "write_kv_cache: has no gradient"):
      jax.grad(loss)(GOOD["key"])


if __name__ == "__main__":
  absltest.main()
