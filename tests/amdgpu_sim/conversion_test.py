# SPDX-License-Identifier: Apache-2.0
"""Narrow formats, division and what else one function of lanes does not say."""

import fractions
import math
import os
import sys

import numpy as np
from absl.testing import absltest

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
# pylint: disable=g-import-not-at-top,g-bad-import-order
import asm
import reference
from modifier_test import LANE, OLD, Batch, check_covered, floats

U16, U32, U64 = np.uint16, np.uint32, np.uint64
F16, F32, F64 = np.float16, np.float32, np.float64
OCP = asm.ARCH == "gfx950"
FORMATS = {
    "fp8": reference.FP8 if OCP else reference.FP8_FNUZ,
    "bf8": reference.BF8 if OCP else reference.BF8_FNUZ,
    "fp6": reference.FP6, "bf6": reference.BF6, "fp4": reference.FP4,
    "f32": reference.F32, "f16": reference.F16, "bf16": reference.BF16,
}
HAS_FP8 = asm.ARCH != "gfx90a"
BYTE_SELECTS = {0: "[0,0,0,0]", 1: "[0,0,1,0]", 2: "[0,0,0,1]",
                3: "[0,0,1,1]"}


def bits32(values):
  return np.resize(np.asarray(values, F32), 64).view(U32)


def decoded(codes, source, target, scale=1):
  """Bits of a format's codes in another, times a scale."""
  out = []
  for code in codes:
    value = reference.decode(code, FORMATS[source])
    if math.isfinite(value) and value != 0:
      value *= fractions.Fraction(scale)
    out.append(reference.encode(value, FORMATS[target]))
  return np.array(out, U64).astype(U32)


def exact_bits(target, values):
  return np.array([reference.encode(
      float(v) if v == 0 or not math.isfinite(v)
      else fractions.Fraction(float(v)),
      FORMATS[target]) for v in values], U64).astype(U32)


def some_values(name, count=64):
  """Values in a format's range: exact ones, halfway ones and others."""
  form = FORMATS[name]
  codes = np.arange(form.greatest)
  generator = np.random.default_rng(5)
  out = []
  for i in range(count):
    code = int(codes[generator.integers(len(codes))])
    low = reference.decode(code, form)
    high = reference.decode(code + 1, form)
    t = (0, fractions.Fraction(1, 2), fractions.Fraction(1, 8),
         fractions.Fraction(7, 8))[i % 4]
    value = fractions.Fraction(low) + t * (
        fractions.Fraction(high) - fractions.Fraction(low))
    out.append(float(value) * (-1 if i % 3 == 0 else 1))
  return out


@asm.where(HAS_FP8)
class Fp8Test(Batch):

  def test_to_f32(self):
    for kind in ("fp8", "bf8"):
      for block in range(4):
        codes = block * 64 + LANE
        expected = decoded(codes, kind, "f32").view(F32)
        self.expect(f"v_cvt_f32_{kind} v0, v1", expected, dtype=F32,
                    v={1: codes | 0x5A5A5A00})
        for byte in range(4):
          self.expect(f"v_cvt_f32_{kind}_sdwa v0, v1 src0_sel:BYTE_{byte}",
                      expected, dtype=F32, v={1: codes << 8 * byte})
        both = expected.view(U32).astype(U64)
        other = decoded(codes ^ 1, kind, "f32").astype(U64)
        pairs = both | other << U64(32)
        finite = ~np.isnan(expected) & ~np.isnan(
            other.astype(U32).view(F32))
        pairs = np.where(finite, pairs, 0)
        mask = np.where(finite, codes | (codes ^ 1) << 8, 0)
        self.expect(f"v_cvt_pk_f32_{kind} v[0:1], v2", pairs, dtype=U64,
                    v={2: mask})
        self.expect(f"v_cvt_pk_f32_{kind}_sdwa v[0:1], v2 src0_sel:WORD_1",
                    pairs, dtype=U64, v={2: mask << 16})

  def test_from_f32(self):
    for kind in ("fp8", "bf8"):
      a, b = some_values(kind), some_values(kind)[::-1]
      low, high = exact_bits(kind, a), exact_bits(kind, b)
      word = low | high << 8
      v = {1: bits32(a), 2: bits32(b)}
      self.expect(f"v_cvt_pk_{kind}_f32 v0, v1, v2",
                  OLD & 0xFFFF0000 | word, v=v)
      self.expect(f"v_cvt_pk_{kind}_f32 v0, v1, v2 op_sel:[0,0,1]",
                  OLD & 0xFFFF | word << 16, v=v)
      nan = FORMATS[kind].nan
      self.expect(f"v_cvt_pk_{kind}_f32 v0, v1, v2\nv_cvt_f32_{kind} v0, v0",
                  math.nan, dtype=F32, v={1: floats(math.nan), 2: floats(0)})
      del nan
      # Both greatest numbers and the least.
      form = FORMATS[kind]
      for code in (form.greatest, 1, 2**form.mantissa):
        value = float(reference.decode(code, form))
        self.expect(f"v_cvt_pk_{kind}_f32 v0, v1, -v1",
                    OLD & 0xFFFF0000 | code | (code | 0x80) << 8,
                    v={1: floats(value)})

  def test_stochastic(self):
    for kind in ("fp8", "bf8"):
      form = FORMATS[kind]
      code = form.greatest // 2
      low = float(reference.decode(code, form))
      high = float(reference.decode(code + 1, form))
      for byte, select in BYTE_SELECTS.items():
        # A value in the representable set stays.
        self.expect(f"v_cvt_sr_{kind}_f32 v0, v1, v2 op_sel:{select}",
                    OLD & ~U32(0xFF << 8 * byte) | U32(code << 8 * byte),
                    v={1: floats(low), 2: LANE << 26})
      for part in (0.25, 0.5, 0.75):
        up = LANE >= 64 * (1 - part)
        self.expect(f"v_cvt_sr_{kind}_f32 v0, v1, v2",
                    OLD & 0xFFFFFF00 | np.where(up, code + 1, code),
                    v={1: floats(low + part * (high - low)), 2: LANE << 26})


@asm.where(asm.ARCH == "gfx950")
class Bf16Test(Batch):

  VALUES = floats(1.0, -2.5, 3.14159, 1 + 2**-8, 1 + 3 * 2**-8, 1e-40, 3e38,
                  -3.4e38, math.inf, -math.inf, 0.0, -0.0, 1e-3, 65504)

  def test_bf16(self):
    a = self.VALUES
    b = np.roll(a, 5)
    low, high = exact_bits("bf16", a), exact_bits("bf16", b)
    self.expect("v_cvt_pk_bf16_f32 v0, v1, v2", low | high << 16,
                v={1: a, 2: b})
    self.expect("v_cvt_f32_bf16 v0, v1", (LANE * 1021 & 0x7F7F) << 16,
                v={1: LANE * 1021 & 0x7F7F})
    self.expect("v_cvt_pk_bf16_f32 v0, v1, v2\nv_lshlrev_b32 v0, 16, v0",
                math.nan, dtype=F32, v={1: floats(math.nan), 2: a})

  def test_stochastic(self):
    for part in (0.25, 0.5, 0.75):
      up = LANE >= 64 * (1 - part)
      # 16 bits go into bfloat16's rounding, 13 into float16's.
      self.expect("v_cvt_sr_bf16_f32 v0, v1, v2",
                  OLD & 0xFFFF0000 | np.where(up, 0x3F81, 0x3F80),
                  v={1: floats(1 + part * 2**-7), 2: LANE * 0x04000400})
    self.expect("v_cvt_sr_bf16_f32 v0, v1, v2 op_sel:[0,0,1]",
                OLD & 0xFFFF | 0x3FC0 << 16, v={1: floats(1.5), 2: LANE})
    self.expect("v_cvt_sr_f16_f32 v0, v1, v2",
                OLD & 0xFFFF0000 | 0x3E00, v={1: floats(1.5), 2: LANE})
    self.expect("v_cvt_sr_f16_f32 v0, v1, v2 op_sel:[0,0,1]",
                OLD & 0xFFFF | 0x3E00 << 16, v={1: floats(1.5), 2: LANE})


@asm.where(asm.ARCH == "gfx950")
class ScaleTest(Batch):
  """v_cvt_scalef32_*: a scale of two to some power."""

  def codes(self, kind):
    """64 codes that are finite numbers."""
    form = FORMATS[kind]
    limit = form.greatest + 1
    return np.array([
        i * 7 % limit | (i & 1) << (form.size - 1) for i in range(64)], U32)

  def test_widening(self):
    for scale in (1.0, 8.0, 0.25):
      s = floats(scale)
      for target in ("f32", "f16", "bf16"):
        for kind in ("fp8", "bf8"):
          low, high = self.codes(kind), self.codes(kind)[::-1]
          a, b = (decoded(c, kind, target, scale) for c in (low, high))
          pair = low | high << 8
          self.widened(target, kind, a, b, pair, s, "op_sel:[1,0]", 16)
          if target == "bf16":
            continue
          name = f"v_cvt_scalef32_{target}_{kind}"
          if target == "f32":
            self.expect(f"{name} v0, v1, v2", a, v={1: low, 2: s})
          else:
            self.expect(f"{name} v0, v1, v2\nv_and_b32 v0, 0xffff, v0", a,
                        v={1: low, 2: s})
        low, high = self.codes("fp4"), self.codes("fp4")[::-1]
        a, b = (decoded(c, "fp4", target, scale) for c in (low, high))
        self.widened(target, "fp4", a, b, low | high << 4, s,
                     "op_sel:[1,0]", 8)
        self.widened(target, "fp4", a, b, low | high << 4, s,
                     "op_sel:[1,1]", 24)

  def widened(self, target, kind, a, b, pair, scale, select, shift):
    name = f"v_cvt_scalef32_pk_{target}_{kind}"
    if target == "f32":
      expected, dtype, dst = a.astype(U64) | b.astype(U64) << U64(32), U64, (
          "v[0:1]")
    else:
      expected, dtype, dst = a | b << 16, U32, "v0"
    self.expect(f"{name} {dst}, v2, v3", expected, dtype=dtype,
                v={2: pair, 3: scale})
    self.expect(f"{name} {dst}, v2, v3 {select}", expected, dtype=dtype,
                v={2: pair << shift, 3: scale})

  def test_narrowing(self):
    for scale in (1.0, 4.0, 0.5):
      s = floats(scale)
      for kind in ("fp8", "bf8", "fp4"):
        size = FORMATS[kind].size
        for source in ("f32", "f16", "bf16"):
          wide = FORMATS[source]
          keep = [v for v in some_values(kind, 256)
                  if self.fits(v * scale, wide)]
          a = np.resize(keep, 64)
          b = np.roll(a, 7)
          x, y = (np.array([reference.encode(
              fractions.Fraction(float(v)) * fractions.Fraction(scale)
              if v else 0.0, wide) for v in c], U64).astype(U32)
                  for c in (a, b))
          low, high = exact_bits(kind, a), exact_bits(kind, b)
          pair = low | high << size
          name = f"v_cvt_scalef32_pk_{kind}_{source}"
          if source == "f32":
            text, v = f"{name} v0, v1, v2, v3", {1: x, 2: y, 3: s}
          else:
            text, v = f"{name} v0, v1, v3", {1: x | y << 16, 3: s}
          mask = U32((1 << 2 * size) - 1)
          self.expect(text, OLD & ~mask | pair, v=v)
          ones = "[0,0,0,1]" if source == "f32" else "[0,0,1]"
          if kind == "fp4":
            ones = "[0,0,1,1]"
          shift = U32(24 if kind == "fp4" else 16)
          self.expect(f"{text} op_sel:{ones}",
                      OLD & ~(mask << shift) | pair << shift, v=v)
          # Stochastic: what can be represented stays.
          codes = self.codes(kind)
          codes = np.where([self.fits(float(
              reference.decode(int(c), FORMATS[kind])) * scale, wide)
                            for c in codes], codes, 0).astype(U32)
          x, y = (np.array([reference.encode(
              fractions.Fraction(value) * fractions.Fraction(scale)
              if (value := reference.decode(int(c), FORMATS[kind])) else
              value, wide) for c in each], U64).astype(U32)
                  for each in (codes, np.roll(codes, 3)))
          if kind == "fp4":
            name = f"v_cvt_scalef32_sr_pk_fp4_{source}"
            if source == "f32":
              v = {2: x.astype(U64) | y.astype(U64) << U64(32), 4: LANE, 5: s}
              self.expect(f"{name} v0, v[2:3], v4, v5", OLD & 0xFFFFFF00
                          | codes | np.roll(codes, 3) << 4, v=v)
            else:
              self.expect(f"{name} v0, v2, v4, v5", OLD & 0xFFFFFF00
                          | codes | np.roll(codes, 3) << 4,
                          v={2: x | y << 16, 4: LANE, 5: s})
          else:
            name = f"v_cvt_scalef32_sr_{kind}_{source}"
            for byte, select in BYTE_SELECTS.items():
              self.expect(f"{name} v0, v1, v2, v3 op_sel:{select}",
                          OLD & ~U32(255 << 8 * byte) | codes << 8 * byte,
                          v={1: x, 2: LANE, 3: s})

  def fits(self, value, form):
    bits = reference.encode(fractions.Fraction(value) if value else 0.0, form)
    return reference.decode(bits, form) == value

  def pack(self, codes, size):
    """Rows of codes as rows of words."""
    out = np.zeros((len(codes), codes.shape[1] * size // 32), U32)
    for lane, row in enumerate(codes):
      value = sum(int(c) << size * i for i, c in enumerate(row))
      out[lane] = [value >> 32 * i & 0xFFFFFFFF for i in range(out.shape[1])]
    return out

  def test_six_bits(self):
    generator = np.random.default_rng(8)
    for kind in ("fp6", "bf6"):
      codes = generator.integers(0, 64, (64, 32)).astype(U32)
      packed = self.pack(codes, 6)
      for scale in (1.0, 0.5):
        s = floats(scale)
        for wide, size in (("f32", 32), ("f16", 16), ("bf16", 16)):
          values = np.stack([decoded(row, kind, wide, scale)
                             for row in codes])
          words = self.pack(values, size)
          last = words.shape[1] - 1
          name = f"v_cvt_scalef32_pk32_{wide}_{kind}"
          for i in (0, 1, last):
            self.expect(f"{name} v[64:{64 + last}], v[2:7], v8", words[:, i],
                        out=64 + i, v={2: packed, 8: s, 64: words * 0})
          if wide == "f32":
            halves = [np.ascontiguousarray(words[:, i::2]) for i in (0, 1)]
            name = f"v_cvt_scalef32_2xpk16_{kind}_f32"
            for i in range(6):
              self.expect(f"{name} v[2:7], v[32:47], v[48:63], v8",
                          packed[:, i], out=2 + i,
                          v={2: packed * 0, 32: halves[0], 48: halves[1],
                             8: s})
          else:
            name = f"v_cvt_scalef32_pk32_{kind}_{wide}"
            for i in range(6):
              self.expect(f"{name} v[2:7], v[32:47], v8", packed[:, i],
                          out=2 + i, v={2: packed * 0, 32: words, 8: s})
          name = f"v_cvt_scalef32_sr_pk32_{kind}_{wide}"
          self.expect(f"{name} v[2:7], v[32:{32 + last}], v9, v8",
                      packed[:, 3], out=5,
                      v={2: packed * 0, 32: words, 8: s, 9: LANE})


class DivisionTest(Batch):
  """The sequences that LLVM emits divide with correct rounding."""

  EDGES32 = [0.0, -0.0, 1.0, -1.0, 3.0, 10.0, 7.0, 0.1, 1e-38, 1.1754944e-38,
             2.0**-149, -(2.0**-149), 1e-40, 3.4028235e38, -3.4e38, 1e38,
             1e30, 1e-30, math.inf, -math.inf, math.nan, 16777217.0, 0.33333,
             2.0**127, 2.0**-126, 2.0**-127, 1.9999999, 5e-39]

  def pairs(self, edges, dtype):
    x = np.array([(a, b) for a in edges for b in edges], dtype)
    generator = np.random.default_rng(4)
    width = np.dtype(dtype).itemsize
    noise = generator.integers(0, 256, (1024, 2, width), np.uint8)
    x = np.concatenate([x, noise.view(dtype)[..., 0]])
    return np.resize(x, (-(-len(x) // 64) * 64, 2)).reshape(-1, 64, 2)

  def test_f32(self):
    divide = reference.ieee(lambda a, b: a / b)
    # With denormals flushed outside, as XLA and Triton may.
    body = """
v_div_scale_f32 v3, s[10:11], v2, v2, v1
v_div_scale_f32 v4, vcc, v1, v2, v1
v_rcp_f32 v5, v3
v_fma_f32 v6, -v3, v5, 1.0
v_fma_f32 v5, v6, v5, v5
v_mul_f32 v6, v4, v5
v_fma_f32 v7, -v3, v6, v4
v_fma_f32 v6, v7, v5, v6
v_fma_f32 v7, -v3, v6, v4
v_div_fmas_f32 v6, v7, v5, v6
v_div_fixup_f32 v0, v6, v2, v1
"""
    for rows in self.pairs(self.EDGES32, F32):
      a, b = np.ascontiguousarray(rows[:, 0]), np.ascontiguousarray(rows[:, 1])
      self.expect(body, self.quotient(a, b, divide), dtype=F32,
                  v={1: a, 2: b})

  def quotient(self, a, b, divide):
    with np.errstate(all="ignore"):
      plain = a / b
    good = np.isfinite(a) & np.isfinite(b) & (b != 0) & (a != 0)
    safe = divide(np.where(good, a, 1), np.where(good, b, 1))
    return np.where(good, safe, plain).astype(a.dtype)

  def test_f64(self):
    divide = reference.ieee(lambda a, b: a / b)
    edges = [0.0, -0.0, 1, -1, 3, 0.1, 1e-308, 5e-324, 1.7976931348623157e308,
             1e300, -1e-300, 2.0**-1022, 1e-310, math.inf, -math.inf,
             math.nan, 2.0**53 + 1, 2.0**-1000]
    body = """
v_div_scale_f64 v[6:7], s[10:11], v[4:5], v[4:5], v[2:3]
v_rcp_f64 v[8:9], v[6:7]
v_fma_f64 v[10:11], -v[6:7], v[8:9], 1.0
v_fma_f64 v[8:9], v[8:9], v[10:11], v[8:9]
v_fma_f64 v[10:11], -v[6:7], v[8:9], 1.0
v_fma_f64 v[8:9], v[8:9], v[10:11], v[8:9]
v_div_scale_f64 v[12:13], vcc, v[2:3], v[4:5], v[2:3]
v_mul_f64 v[14:15], v[12:13], v[8:9]
v_fma_f64 v[10:11], -v[6:7], v[14:15], v[12:13]
v_div_fmas_f64 v[10:11], v[10:11], v[8:9], v[14:15]
v_div_fixup_f64 v[0:1], v[10:11], v[4:5], v[2:3]
"""
    for rows in self.pairs(edges, F64):
      a, b = np.ascontiguousarray(rows[:, 0]), np.ascontiguousarray(rows[:, 1])
      self.expect(body, self.quotient(a, b, divide), dtype=F64,
                  v={2: a, 4: b})

  def test_f16(self):
    edges = [0.0, -0.0, 1, -1, 3, 0.1, 65504, 6e-8, 6.1e-5, math.inf,
             -math.inf, math.nan, 1000, 1e-4]
    divide = reference.ieee(lambda a, b: a / b)
    body = """
v_cvt_f32_f16 v3, v1
v_cvt_f32_f16 v4, v2
v_rcp_f32 v5, v4
v_mul_f32 v5, v3, v5
v_cvt_f16_f32 v6, v5
v_div_fixup{} v0, v6, v2, v1
"""
    x = np.array([(a, b) for a in edges for b in edges], F16)
    for rows in np.resize(x, (256, 2)).reshape(-1, 64, 2):
      a, b = np.ascontiguousarray(rows[:, 0]), np.ascontiguousarray(rows[:, 1])
      for name in ("_f16", "_legacy_f16"):
        if "v_div_fixup" + name in asm.mnemonics():
          self.expect(body.format(name), self.quotient(a, b, divide),
                      dtype=F16, v={0: LANE * 0, 1: a, 2: b})

  def test_fixup(self):
    # Of the special operands, whatever the quotient is: numerator last.
    for kind, dtype, w in (("f32", F32, 1), ("f64", F64, 2)):
      r = lambda i, w=w: f"v[{i}:{i + 1}]" if w == 2 else f"v{i}"
      for over, under, expected in (
          (0, 0, math.nan), (math.inf, -math.inf, math.nan),
          (1, 0.0, math.inf), (-1, 0.0, -math.inf), (1, -0.0, -math.inf),
          (math.inf, 2, math.inf), (-math.inf, 2, -math.inf),
          (5, math.inf, 0.0), (-5, math.inf, -0.0), (0.0, -3, -0.0),
          (math.nan, 1, math.nan), (1, math.nan, math.nan),
          (6, 2, 42.0), (-6, 2, -42.0)):
        self.expect(f"v_div_fixup_{kind} {r(0)}, {r(2)}, {r(4)}, {r(6)}",
                    expected, dtype=dtype,
                    v={2: floats(-42, dtype=dtype),
                       4: floats(under, dtype=dtype),
                       6: floats(over, dtype=dtype)})


class ApproximationTest(Batch):

  def near(self, body, expected, v, ulp=None, absolute=None, dtype=F32):
    """Within so many units in the last place, or an absolute distance."""
    def check(after):
      actual = after.vector(0, dtype).astype(F64)
      with np.errstate(all="ignore"):
        bound = absolute if absolute is not None else (
            ulp * np.spacing(np.abs(expected.astype(dtype))).astype(F64))
        good = np.abs(actual - expected) <= bound
      good |= actual == expected
      good |= np.isnan(actual) & np.isnan(expected)
      if not good.all():
        lane = int(np.argmin(good))
        print(body, lane, actual[lane], expected[lane])
      return bool(good.all())

    words = np.dtype(dtype).itemsize // 4 or 1
    before = asm.State(v={0: np.zeros((64, words), U32)} | v)
    self._cases.append((asm.Snippet(body, [before], list(range(words))),
                        check, 0, dtype, ()))

  def test_f64(self):
    generator = np.random.default_rng(6)
    x = np.exp(generator.normal(0, 20, 64))
    x[:6] = [1, 2, 4, math.inf, 0, 0.25]
    with np.errstate(all="ignore"):
      for name, expected in (("rcp", 1 / x), ("rsq", 1 / np.sqrt(x)),
                             ("sqrt", np.sqrt(x))):
        # The document's accuracy.
        self.near(f"v_{name}_f64 v[0:1], v[2:3]", expected, {2: x},
                  ulp=2.0**29, dtype=F64)

  def test_f64_specials(self):
    special = floats(0.0, -0.0, math.inf, -math.inf, math.nan, dtype=F64)
    for name, expected in (
        ("rcp", (math.inf, -math.inf, 0.0, -0.0, math.nan)),
        ("rsq", (math.inf, -math.inf, 0.0, math.nan, math.nan)),
        ("sqrt", (0.0, -0.0, math.inf, math.nan, math.nan))):
      self.expect(f"v_{name}_f64 v[0:1], v[2:3]", floats(*expected, dtype=F64),
                  dtype=F64, v={2: special})

  def test_sine_and_cosine(self):
    x = np.concatenate([np.arange(32) / 8 - 2, np.linspace(-250, 250, 32)])
    for kind, dtype, bound in (("f32", F32, 2e-6), ("f16", F16, 2e-3)):
      y = x.astype(dtype)
      turns = np.fmod(y.astype(F64), 1) * 2 * np.pi
      for name, function in (("sin", np.sin), ("cos", np.cos)):
        self.near(f"v_{name}_{kind} v0, v1", function(turns), {1: y},
                  absolute=bound, dtype=dtype)
        self.expect(f"v_{name}_{kind} v0, v1", math.nan, dtype=dtype,
                    v={1: floats(math.inf, -math.inf, math.nan, dtype=dtype)})

  def test_bits_of_two_over_pi(self):
    # 2/pi = 0.A2F9836E4E441529FC27...
    expected = 0xA2F9836E4E441 * 2 * 2.0**-53
    self.expect("v_trig_preop_f64 v[0:1], v[2:3], 0", expected, dtype=F64,
                v={2: floats(1.0, dtype=F64)})


class MixedTest(Batch):

  def test_dot(self):
    h = lambda low, high: (floats(low, dtype=F16).view(U16).astype(U32)
                           | floats(high, dtype=F16).view(U16).astype(U32)
                           << U32(16))
    b = lambda low, high: (bits32(low) >> U32(16)
                           | bits32(high) & U32(0xFFFF0000))
    self.expect("v_dot2_f32_f16 v0, v1, v2, v3", 2 * 3 + 4 * 5 + 0.5,
                dtype=F32, v={1: h(2, 4), 2: h(3, 5), 3: floats(0.5)})
    self.expect("v_dot2c_f32_f16 v0, v1, v2", 2 * 3 + 4 * 5 + 0.5,
                dtype=F32, v={0: floats(0.5), 1: h(2, 4), 2: h(3, 5)})
    if asm.ARCH == "gfx950":
      self.expect("v_dot2_f32_bf16 v0, v1, v2, v3", 2 * 3 + 4 * 5 + 0.5,
                  dtype=F32, v={1: b(2, 4), 2: b(3, 5), 3: floats(0.5)})
      self.expect("v_dot2c_f32_bf16 v0, v1, v2", 2 * 3 + 4 * 5 + 0.5,
                  dtype=F32, v={0: floats(0.5), 1: b(2, 4), 2: b(3, 5)})

  def test_mixed_fma(self):
    name = "v_fma_mix" if asm.ARCH != "gfx90" else "v_mad_mix"
    x = floats(1.5, dtype=F16).view(U16).astype(U32) | U32(0x40000000)
    # x is 1.5 and 2.0 as halves; y and z are floats.
    v = {1: x, 2: floats(3), 3: floats(0.25)}
    self.expect(f"{name}_f32 v0, v1, v2, v3 op_sel_hi:[1,0,0]",
                1.5 * 3 + 0.25, dtype=F32, v=v)
    self.expect(f"{name}_f32 v0, v1, v2, v3 op_sel:[1,0,0] "
                "op_sel_hi:[1,0,0]", 2 * 3 + 0.25, dtype=F32, v=v)
    self.expect(f"{name}_f32 v0, -v1, |v2|, v3 op_sel_hi:[1,0,0]",
                -1.5 * 3 + 0.25, dtype=F32, v=v)
    self.expect(f"{name}_f32 v0, v2, v2, v3", 9.25, dtype=F32, v=v)
    half = lambda f: int(np.array([f], F16).view(U16)[0])
    self.expect(f"{name}lo_f16 v0, v1, v2, v3 op_sel_hi:[1,0,0]",
                OLD & 0xFFFF0000 | half(4.75), v=v)
    self.expect(f"{name}hi_f16 v0, v1, v2, v3 op_sel_hi:[1,0,0]",
                OLD & 0xFFFF | half(4.75) << 16, v=v)


NARROW = {
    f"v_cvt{p}_{a}" for p in ("_f32", "_pk_f32") for a in ("fp8", "bf8")
} | {
    f"v_cvt_{p}_{a}_f32" for p in ("pk", "sr") for a in ("fp8", "bf8")
} | {
    f"v_cvt_scalef32_{p}{w}_{n}" for p, ws, ns in (
        ("pk_", ("f32", "f16", "bf16"), ("fp8", "bf8", "fp4")),
        ("", ("f32", "f16"), ("fp8", "bf8")),
        ("pk32_", ("f32", "f16", "bf16"), ("fp6", "bf6")),
        ("pk_", ("fp8", "bf8", "fp4"), ("f32", "f16", "bf16")),
        ("sr_", ("fp8", "bf8"), ("f32", "f16", "bf16")),
        ("sr_pk_", ("fp4",), ("f32", "f16", "bf16")),
        ("pk32_", ("fp6", "bf6"), ("f16", "bf16")),
        ("2xpk16_", ("fp6", "bf6"), ("f32",)),
        ("sr_pk32_", ("fp6", "bf6"), ("f32", "f16", "bf16")),
    ) for w in ws for n in ns
}
COVERED = NARROW | {
    "v_cvt_pk_bf16_f32", "v_cvt_f32_bf16", "v_cvt_sr_bf16_f32",
    "v_cvt_sr_f16_f32", "v_div_scale_f32", "v_div_scale_f64",
    "v_div_fmas_f32", "v_div_fmas_f64", "v_div_fixup_f32", "v_div_fixup_f64",
    "v_div_fixup_f16", "v_div_fixup_legacy_f16", "v_rcp_f64", "v_rsq_f64",
    "v_sqrt_f64", "v_sin_f32", "v_sin_f16", "v_cos_f32", "v_cos_f16",
    "v_trig_preop_f64", "v_dot2_f32_f16", "v_dot2c_f32_f16", "v_dot2_f32_bf16",
    "v_dot2c_f32_bf16", "v_fma_mix_f32", "v_fma_mixlo_f16",
    "v_fma_mixhi_f16",
}


def tearDownModule():  # pylint: disable=invalid-name
  check_covered(COVERED)


if __name__ == "__main__":
  absltest.main()
