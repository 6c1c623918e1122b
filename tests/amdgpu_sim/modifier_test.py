# SPDX-License-Identifier: Apache-2.0
"""What instructions have in common: operand kinds and modifiers, DPP and SDWA,
the MODE register, EXEC, and control flow."""

import math
import os
import sys

import numpy as np
from absl.testing import absltest, parameterized

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
# pylint: disable=g-import-not-at-top,g-bad-import-order
import asm
import reference

U16, U32, U64 = np.uint16, np.uint32, np.uint64
F16, F32, F64 = np.float16, np.float32, np.float64
LANE = np.arange(64, dtype=U32)
ODD = 0xAAAAAAAAAAAAAAAA
# A pattern that shows in a register that nothing wrote.
OLD = LANE * U32(0x01010101) ^ U32(0xC0FFEE00)
INSTRUCTIONS_BY_MODE = ("v_add_f32", "v_mul_f32", "v_fma_f32", "v_add_f64",
                        "v_mul_f64", "v_fma_f64", "v_add_f16", "v_mul_f16",
                        "v_fma_f16")


# Mnemonics that Batch ran.
RAN = set()


def check_covered(covered):
  """Fails unless a file's tests ran what it says that they do."""
  if len(sys.argv) > 1 or "TEST_TOTAL_SHARDS" in os.environ:
    return  # Not all of its tests ran.
  missing = (covered & set(asm.mnemonics())) - RAN
  assert not missing, f"COVERED, but not run: {sorted(missing)}"


def floats(*values, dtype=F32):
  return np.resize(np.array(values, dtype), 64)


class Batch(parameterized.TestCase):
  """Collects snippets and checks, and runs them together."""

  def setUp(self):
    super().setUp()
    self._cases = []

  def expect(self, body, expected, v=None, s=None, out=0, dtype=U32, scalar=(),
             **state):
    """Says that after the body v<out> (or s<out>) holds these lanes.

    `v`, `s` and the state's fields are what registers hold before.
    """
    registers = {} if scalar else {
        out + i: None for i in range(max(1, np.dtype(dtype).itemsize // 4))
    }
    before = asm.State(v=dict(v or {}), s=dict(s or {}), **state)
    for reg in registers:
      if not any(r <= reg < r + max(1, a.dtype.itemsize // 4)
                 for r, a in before.v.items()):
        before.v[reg] = OLD
    snippet = asm.Snippet(body, [before], list(registers), list(scalar))
    self._cases.append((snippet, expected, out, dtype, scalar))

  def tearDown(self):
    super().tearDown()
    if not self._cases:
      return
    for snippet, *_ in self._cases:
      RAN.update(asm.mnemonics_of(snippet.body))
    results = asm.run([case[0] for case in self._cases])
    failures = []
    for (snippet, expected, out, dtype, scalar), result in zip(
        self._cases, results, strict=True):
      if isinstance(result, Exception):
        failures.append(f"{snippet.body}: {result}")
        continue
      (after,) = result
      if callable(expected):
        if not expected(after):
          failures.append(f"{snippet.body}: {after.s} vcc {after.vcc:#x} "
                          f"exec {after.exec:#x} scc {after.scc}")
        continue
      if scalar:
        actual = [after.s[r] for r in scalar]
        if actual != list(expected):
          failures.append(f"{snippet.body}: {actual}, not {expected}")
        continue
      expected = np.broadcast_to(np.asarray(expected, dtype), 64)
      actual = after.vector(out, dtype)
      if np.dtype(dtype).kind == "f":
        bits = f"u{np.dtype(dtype).itemsize}"
        good = actual.view(bits) == np.ascontiguousarray(expected).view(bits)
        good |= np.isnan(actual) & np.isnan(expected)
      else:
        good = actual == expected
      if not good.all():
        lane = int(np.argmin(good))
        failures.append(
            f"{snippet.body}: lane {lane} of {int((~good).sum())}: "
            f"{actual[lane]} ({int(after.v[out][lane]):#x}), "
            f"not {expected[lane]}")
    self.assertEmpty(failures, "\n".join(failures))


class OperandTest(Batch):

  def test_inline_constants(self):
    for value in (0, 1, 64, -1, -16):
      self.expect(f"v_mov_b32 v0, {value}", value & 0xFFFFFFFF)
      self.expect(f"s_mov_b64 s[10:11], {value}", [
          value & 0xFFFFFFFF, 0xFFFFFFFF if value < 0 else 0],
          scalar=(10, 11))
    for value in (0.5, -0.5, 1.0, -1.0, 2.0, -2.0, 4.0, -4.0):
      self.expect(f"v_mov_b32 v0, {value}", value, dtype=F32)
      self.expect(f"v_add_f32 v0, {value}, v1", value + 1, dtype=F32,
                  v={1: floats(1)})
      self.expect(f"v_add_f16 v0, {value}, v1", value + 1, dtype=F16,
                  v={1: floats(1, dtype=F16)})
      self.expect(f"v_add_f64 v[0:1], {value}, v[2:3]", value + 1, dtype=F64,
                  v={2: floats(1, dtype=F64)})
    self.expect("v_mov_b32 v0, 0.15915494", 0x3E22F983)
    self.expect("v_mul_f16 v0, 0.15915494, v1", 0x3118,
                v={1: floats(1, dtype=F16)})
    self.expect("v_max_f64 v[0:1], 0.15915494309189532, v[2:3]",
                0x3FC45F306DC9C882, dtype=U64, v={2: floats(0, dtype=F64)})
    # An integer is bits to a float instruction: 1 is the least denormal.
    self.expect("v_add_f32 v0, 1, v1", 2.0**-149, dtype=F32,
                v={1: floats(0)})

  def test_literals(self):
    self.expect("v_mov_b32 v0, 0x12345678", 0x12345678)
    self.expect("v_add_f32 v0, 0x40490fdb, v1", 0x40490FDB,
                v={1: floats(-0.0)})
    self.expect("v_add_f16 v0, 0x4248, v1", 0x4248,
                v={1: floats(0, dtype=F16)})
    # The high half of a double; sign extension of a 64-bit integer.
    self.expect("v_fract_f64 v[0:1], 0x40090000", 0.125, dtype=F64)
    self.expect("s_and_b64 s[10:11], s[12:13], 0x12345678",
                [0x12345678, 0], s={12: np.array([2**64 - 1], U64)},
                scalar=(10, 11))
    self.expect("s_mov_b64 s[10:11], 0x80000001", [0x80000001, 0],
                scalar=(10, 11))

  def test_scalars_as_sources(self):
    self.expect("v_add_u32 v0, s10, v1", LANE + 7, v={1: LANE}, s={10: 7})
    self.expect("v_add_u32 v0, vcc_lo, v1", LANE + 9, v={1: LANE}, vcc=9)
    self.expect("v_add_u32 v0, vcc_hi, v1", LANE + 1, v={1: LANE},
                vcc=1 << 32)
    self.expect("v_mov_b32 v0, m0", 0x77, m0=0x77)
    self.expect("v_mov_b32 v0, exec_hi", 0xFFFFFFFF)
    self.expect("v_fma_f32 v0, v1, s10, s10", 3.75, dtype=F32,
                v={1: floats(1.5)}, s={10: floats(1.5)[:1]})
    self.expect("v_add_f64 v[0:1], s[10:11], v[2:3]", 3.5, dtype=F64,
                v={2: floats(1, dtype=F64)}, s={10: np.array([2.5], F64)})
    for scc in (0, 1):
      self.expect("s_mov_b32 s10, src_scc", [scc], scc=scc, scalar=(10,))
    self.expect("s_mov_b32 s10, src_vccz\ns_mov_b32 s11, src_execz", [1, 0],
                vcc=0, scalar=(10, 11))

  def test_overlap_of_source_and_destination(self):
    self.expect("v_add_co_u32 v1, vcc, v1, v1", LANE * 2, out=1, v={1: LANE})
    self.expect("v_lshlrev_b64 v[2:3], v2, v[2:3]",
                (LANE.astype(U64) << LANE.astype(U64)), out=2, dtype=U64,
                v={2: LANE.astype(U64)})
    self.expect("s_lshl_b64 s[10:11], s[10:11], s10", [4 << 4, 1 << 4],
                s={10: np.array([4, 1], U32)}, scalar=(10, 11))

  def test_scalar_results_of_vector_instructions(self):
    evens = sum(1 << i for i in range(0, 64, 2))
    self.expect("v_cmp_eq_u32 s[10:11], v1, 0", [0x55555555] * 2,
                v={1: LANE & 1}, scalar=(10, 11))
    # Inactive lanes compare as false.
    self.expect("v_cmp_le_u32 vcc, 0, v1", lambda after: after.vcc == evens,
                v={1: LANE}, exec=evens, vcc=2**64 - 1)
    self.expect("v_cmpx_lt_u32 vcc, 31, v1", lambda after: (
        after.exec == after.vcc == 0xFFFFFFFF << 32), v={1: LANE})
    self.expect("v_add_co_u32 v0, s[10:11], v1, v2",
                [0xFFFF0000, 0xFFFFFFFF], scalar=(10, 11),
                v={0: OLD, 1: LANE, 2: np.full(64, 2**32 - 16, U32)})
    self.expect("v_addc_co_u32 v0, s[10:11], v1, v2, s[12:13]",
                LANE + (LANE & 1), v={1: LANE, 2: np.zeros(64, U32)},
                s={12: np.array([ODD], U64)})
    self.expect("v_cndmask_b32 v0, v1, v2, s[12:13]",
                np.where(LANE & 1, 5, LANE), v={1: LANE, 2: LANE * 0 + 5},
                s={12: np.array([ODD], U64)})


class FloatModifierTest(Batch):

  A = floats(1.5, -2.25, 0.0, -0.0, math.inf, -math.inf, 1e-3, -100)
  B = floats(0.25, 3, -0.0, 7, 1, 2, -1)

  def test_neg_and_abs(self):
    a, b = self.A, self.B
    for kind, dtype in (("f32", F32), ("f16", F16), ("f64", F64)):
      x, y = a.astype(dtype), b.astype(dtype)
      w = 2 if kind == "f64" else 1
      regs = [f"v[{i}:{i + w - 1}]" if w > 1 else f"v{i}" for i in (0, 2, 4)]
      for first, p in (("{}", x), ("-{}", -x), ("|{}|", abs(x)),
                       ("-|{}|", -abs(x))):
        for second, q in (("{}", y), ("-{}", -y)):
          with np.errstate(all="ignore"):
            self.expect(
                f"v_add_{kind} {regs[0]}, {first.format(regs[1])}, "
                f"{second.format(regs[2])}", p + q, dtype=dtype,
                v={2: x, 4: y})
    # Bits, NaN's sign among them, pass through a select.
    self.expect("v_cndmask_b32 v0, -v1, |v2|, vcc", np.where(
        LANE & 1, 0x7FC00001, 0x3F800000), vcc=ODD,
        v={1: floats(-1), 2: np.full(64, 0xFFC00001, U32)})
    self.expect("v_cmp_eq_f32 vcc, -v1, |v2|", lambda after: (
        after.vcc == 2**64 - 1), v={1: floats(-2), 2: floats(-2)})
    self.expect("v_cmp_class_f32 vcc, -|v1|, v2", lambda after: (
        after.vcc == 2**64 - 1), v={1: floats(2), 2: LANE * 0 + 8})
    self.expect("v_mul_f32 v0, -1.0, |s10|", -3, dtype=F32,
                s={10: floats(-3)[:1]})

  def test_clamp(self):
    x = floats(-1, -0.0, 0.25, 1, 1.5, math.inf, -math.inf, math.nan)
    clamped = floats(0, 0, 0.25, 1, 1, 1, 0, 0)
    self.expect("v_max_f32 v0, v1, v1 clamp", clamped, dtype=F32, v={1: x})
    self.expect("v_mul_f32 v0, 1.0, v1 clamp", clamped, dtype=F32, v={1: x})
    self.expect("v_max_f64 v[0:1], v[2:3], v[2:3] clamp", clamped, dtype=F64,
                v={2: x.astype(F64)})
    self.expect("v_max_f16 v0, v1, v1 clamp", clamped, dtype=F16,
                v={1: x.astype(F16)})
    # Without DX10_CLAMP a NaN stays one.
    nan = floats(0, 0, 0.25, 1, 1, 1, 0, math.nan)
    self.expect("v_mul_f32 v0, 1.0, v1 clamp", nan, dtype=F32, v={1: x},
                mode=asm.MODE & ~0x100)

  def test_clamp_of_integers_saturates(self):
    x = np.resize(np.array([0, 1, 0x7FFFFFFF, 0x80000000, 2**32 - 1], U32), 64)
    y = np.resize(np.array([1, 0x7FFFFFFF, 0x80000000, 2**32 - 1], U32), 64)
    a, b = x.astype(np.int64), y.astype(np.int64)
    i, j = x.view(np.int32).astype(np.int64), y.view(np.int32).astype(np.int64)
    u = lambda z: np.clip(z, 0, 2**32 - 1).astype(U32)
    s = lambda z: np.clip(z, -2**31, 2**31 - 1).astype(np.int32).view(U32)
    self.expect("v_add_u32 v0, v1, v2 clamp", u(a + b), v={1: x, 2: y})
    self.expect("v_sub_u32 v0, v1, v2 clamp", u(a - b), v={1: x, 2: y})
    self.expect("v_subrev_u32 v0, v1, v2 clamp", u(b - a), v={1: x, 2: y})
    self.expect("v_add_i32 v0, v1, v2 clamp", s(i + j), v={1: x, 2: y})
    self.expect("v_sub_i32 v0, v1, v2 clamp", s(i - j), v={1: x, 2: y})
    self.expect("v_add_u16 v0, v1, v2 clamp", 0xFFFF, dtype=U32,
                v={1: LANE * 0 + 0xFFFE, 2: LANE * 0 + 5})
    self.expect("v_sub_u16 v0, v1, v2 clamp", 0, dtype=U32,
                v={1: LANE * 0 + 4, 2: LANE * 0 + 5})
    self.expect("v_add_i16 v0, v1, v2 clamp", 0x7FFF, dtype=U16,
                v={1: LANE * 0 + 0x7FFE, 2: LANE * 0 + 5})

  def test_output_modifiers(self):
    # Only where denormals are flushed and IEEE is off.
    mode = asm.MODE & ~0x2F0
    x = floats(1.5, -2.25, 0.125, 3.0e38)
    for text, factor in (("mul:2", 2), ("mul:4", 4), ("div:2", 0.5)):
      with np.errstate(all="ignore"):
        self.expect(f"v_mul_f32 v0, 1.0, v1 {text}", x * F32(factor),
                    dtype=F32, v={1: x}, mode=mode)
    self.expect("v_add_f32 v0, v1, v1 clamp mul:2", floats(1, 0, 0.5, 1),
                dtype=F32, v={1: x}, mode=mode)

  def test_op_sel(self):
    x = LANE | U32(0x00050000)
    y = (LANE * 3) << 16 | U32(7)
    low, high = x & 0xFFFF, x >> 16
    self.expect("v_mad_u16 v0, v1, v2, v3", OLD & 0xFFFF0000 | (
        low * 7 + 1) & 0xFFFF, v={1: x, 2: y, 3: LANE * 0 + 1})
    self.expect("v_mad_u16 v0, v1, v2, v3 op_sel:[1,1,0,0]", (
        OLD & 0xFFFF0000 | (high * (LANE * 3) + 1) & 0xFFFF),
        v={1: x, 2: y, 3: LANE * 0 + 1})
    self.expect("v_mad_u16 v0, v1, v2, v3 op_sel:[0,0,1,1]", (
        OLD & 0xFFFF | ((low * 7 + 9) & 0xFFFF) << 16),
        v={1: x, 2: y, 3: LANE * 0 + 0x90000})
    h = lambda *v: floats(*v, dtype=F16).view(U16).astype(U32)
    self.expect("v_fma_f16 v0, v1, v2, v3 op_sel:[1,0,0,1]",
                OLD & 0xFFFF | h(7) << 16,
                v={1: h(2) << 16, 2: h(3), 3: h(1)})
    self.expect("v_pack_b32_f16 v0, v1, v2 op_sel:[1,1,0]",
                x >> 16 | y & U32(0xFFFF0000), v={1: x, 2: y})

  def test_packed(self):
    h = lambda low, high: (floats(low, dtype=F16).view(U16).astype(U32)
                           | floats(high, dtype=F16).view(U16).astype(U32)
                           << U32(16))
    regs = {1: h(1, 2), 2: h(10, 20)}
    for text, low, high in (
        ("", 11, 22), ("op_sel:[1,0]", 12, 22), ("op_sel_hi:[0,1]", 11, 21),
        ("op_sel:[0,1] op_sel_hi:[1,0]", 21, 12),
        ("op_sel_hi:[0,0]", 11, 11), ("neg_lo:[1,0]", 9, 22),
        ("neg_hi:[0,1]", 11, -18),
        ("op_sel:[1,1] op_sel_hi:[0,0] neg_lo:[0,1] neg_hi:[1,0]", -18, 9),
    ):
      self.expect(f"v_pk_add_f16 v0, v1, v2 {text}", h(low, high), v=regs)
    self.expect("v_pk_add_f16 v0, v1, v2 clamp", h(0, 1),
                v={1: h(-1, 0.5), 2: h(0.5, 1.5)})
    two = {2: np.stack([floats(1), floats(2)], 1).reshape(-1).view(U64),
           4: np.stack([floats(10), floats(20)], 1).reshape(-1).view(U64)}
    pair = lambda low, high: np.stack(
        [floats(low), floats(high)], 1).reshape(-1).view(U64)
    for text, low, high in (
        ("", 11, 22), ("op_sel:[1,0]", 12, 22), ("op_sel_hi:[1,0]", 11, 12),
        ("op_sel:[1,1] op_sel_hi:[0,0]", 22, 11),
        ("neg_lo:[0,1] neg_hi:[1,0]", -9, 18),
    ):
      self.expect(f"v_pk_add_f32 v[0:1], v[2:3], v[4:5] {text}",
                  pair(low, high), dtype=U64, v=two)
    self.expect("v_pk_fma_f32 v[0:1], v[2:3], s[10:11], v[4:5] "
                "op_sel_hi:[1,0,1]", pair(13, 26), dtype=U64, v=two,
                s={10: floats(3)[:1]})
    for text, low, high in (("op_sel:[0,0] op_sel_hi:[0,1]", 1, 10),
                            ("op_sel:[1,0]", 2, 10), ("op_sel:[0,1]", 1, 20),
                            ("op_sel:[1,1]", 2, 20)):
      self.expect(f"v_pk_mov_b32 v[0:1], v[2:3], v[4:5] {text}",
                  pair(low, high), dtype=U64, v=two)


class ModeTest(Batch):

  @parameterized.parameters(*INSTRUCTIONS_BY_MODE)
  def test_rounding(self, mnemonic):
    kind = mnemonic[-3:]
    dtype = {"f32": F32, "f16": F16, "f64": F64}[kind]
    count = 3 if "fma" in mnemonic else 2
    function = {"add": lambda a, b: a + b, "mul": lambda a, b: a * b,
                "fma": lambda a, b, c: a * b + c}[mnemonic[2:5]]
    generator = np.random.default_rng(3)
    x = [generator.normal(0, 1, 64).astype(dtype) for _ in range(count)]
    x[0][:4] = [np.finfo(dtype).max, -np.finfo(dtype).max, 1, -1]
    x[1][:4] = [np.finfo(dtype).max, 2, np.finfo(dtype).eps / 4,
                np.finfo(dtype).eps / 4]
    if mnemonic[2:5] == "mul":
      x[1][4:8] = np.finfo(dtype).tiny * np.array([0.3, 0.7, 1, 1.9], dtype)
    w = np.dtype(dtype).itemsize // 4 or 1
    regs = [f"v[{i}:{i + 1}]" if w == 2 else f"v{i}" for i in (0, 2, 4, 6)]
    for rounding in range(4):
      exact = reference.ieee(function)
      exact.rounding = rounding
      shift = 0 if kind == "f32" else 2
      self.expect(f"{mnemonic} {', '.join(regs[: count + 1])}", exact(*x),
                  dtype=dtype, v=dict(zip((2, 4, 6), x)),
                  mode=asm.MODE | rounding << shift)
      # The other types' field does not matter.
      nearest = reference.ieee(function)
      self.expect(f"{mnemonic} {', '.join(regs[: count + 1])}", nearest(*x),
                  dtype=dtype, v=dict(zip((2, 4, 6), x)),
                  mode=asm.MODE | rounding << (2 - shift))

  def test_rounding_of_conversions(self):
    x = floats(1 + 2**-12, -1 - 2**-12, 65519.9, 1 + 3 * 2**-11, 0.1)
    for rounding in range(4):
      exact = reference.ieee(lambda a: a, "f16")
      exact.rounding = rounding
      self.expect("v_cvt_f16_f32 v0, v1", exact(x), dtype=F16, v={1: x},
                  mode=asm.MODE | rounding << 2)
      wide = np.resize(np.array([1 + 2.0**-25, -1 - 2.0**-25, 0.1], F64), 64)
      exact = reference.ieee(lambda a: a, "f32")
      exact.rounding = rounding
      self.expect("v_cvt_f32_f64 v0, v[2:3]", exact(wide), dtype=F32,
                  v={2: wide}, mode=asm.MODE | rounding)
      big = np.resize(np.array([2**24 + 1, 2**31 - 1, 2**25 + 3], U32), 64)
      exact = reference.ieee(lambda a: a, "f32")
      exact.rounding = rounding
      self.expect("v_cvt_f32_u32 v0, v1", exact(big.astype(F64)), dtype=F32,
                  v={1: big}, mode=asm.MODE | rounding)

  def test_denormals(self):
    tiny = F32(2.0**-127)
    least = F32(2.0**-126)
    for allow in range(4):  # 1: inputs kept, 2: outputs kept
      mode = asm.MODE & ~0x30 | allow << 4
      source = tiny if allow & 1 else F32(0)
      # 2**-127 * 2 is normal: only the input matters.
      self.expect("v_mul_f32 v0, 2.0, v1", source * 2, dtype=F32,
                  v={1: floats(tiny)}, mode=mode)
      self.expect("v_mul_f32 v0, -2.0, v1", -source * 2, dtype=F32,
                  v={1: floats(tiny)}, mode=mode)
      # Half the least normal number: only the output matters.
      self.expect("v_mul_f32 v0, 0.5, v1", tiny if allow & 2 else 0.0,
                  dtype=F32, v={1: floats(least)}, mode=mode)
      self.expect("v_fma_f32 v0, v1, 0.5, 0", tiny if allow & 2 else 0.0,
                  dtype=F32, v={1: floats(least)}, mode=mode)
      # A move is no arithmetic.
      self.expect("v_mov_b32 v0, v1", tiny, dtype=F32, v={1: floats(tiny)},
                  mode=mode)
      half = floats(2.0**-15, dtype=F16)
      mode = asm.MODE & ~0xC0 | allow << 6
      self.expect("v_mul_f16 v0, 2.0, v1", 2.0**-14 if allow & 1 else 0.0,
                  dtype=F16, v={1: half}, mode=mode)
      double = floats(2.0**-1023, dtype=F64)
      self.expect("v_mul_f64 v[0:1], 2.0, v[2:3]",
                  2.0**-1022 if allow & 1 else 0.0, dtype=F64, v={2: double},
                  mode=mode)
      # Fields are of their own types only.
      self.expect("v_mul_f32 v0, 2.0, v1", tiny * 2, dtype=F32,
                  v={1: floats(tiny)}, mode=mode)

  def test_set_mode(self):
    tiny = floats(2.0**-127)
    self.expect("s_setreg_imm32_b32 hwreg(HW_REG_MODE, 4, 2), 0\n"
                "v_mul_f32 v0, 2.0, v1\n"
                "s_setreg_imm32_b32 hwreg(HW_REG_MODE, 4, 2), 3",
                0.0, dtype=F32, v={1: tiny})
    self.expect("s_setreg_imm32_b32 hwreg(HW_REG_MODE, 4, 2), 0\n"
                "s_setreg_imm32_b32 hwreg(HW_REG_MODE, 4, 2), 3\n"
                "v_mul_f32 v0, 2.0, v1", 2.0**-126, dtype=F32, v={1: tiny})
    self.expect("s_mov_b32 s10, 3\ns_setreg_b32 hwreg(HW_REG_MODE, 0, 2), s10"
                "\nv_add_f32 v0, 1.0, v1\n"
                "s_setreg_imm32_b32 hwreg(HW_REG_MODE, 0, 2), 0",
                1.0, dtype=F32, v={1: floats(0.9 * 2.0**-23)})
    self.expect("s_getreg_b32 s10, hwreg(HW_REG_MODE, 0, 10)\n"
                "s_getreg_b32 s11, hwreg(HW_REG_MODE, 4, 4)",
                [asm.MODE & 0x3FF, 0xF], scalar=(10, 11))
    self.expect("s_setreg_imm32_b32 hwreg(HW_REG_MODE, 0, 4), 5\n"
                "s_getreg_b32 s10, hwreg(HW_REG_MODE, 0, 4)\n"
                "s_setreg_imm32_b32 hwreg(HW_REG_MODE, 0, 4), 0",
                [5], scalar=(10,))


def dpp_source(control, lane):
  """The lane that a DPP control reads, or None."""
  name, _, value = control.partition(":")
  row, i = lane & ~15, lane & 15
  if name == "quad_perm":
    return lane & ~3 | [int(x) for x in value.strip("[]").split(",")][lane & 3]
  n = int(value or 0)
  if name == "row_shl":
    return row + i + n if i + n < 16 else None
  if name == "row_shr":
    return row + i - n if i >= n else None
  if name == "row_ror":
    return row + (i - n) % 16
  if name == "wave_shl":
    return lane + 1 if lane < 63 else None
  if name == "wave_rol":
    return (lane + 1) % 64
  if name == "wave_shr":
    return lane - 1 if lane else None
  if name == "wave_ror":
    return (lane - 1) % 64
  if name == "row_mirror":
    return row + 15 - i
  if name == "row_half_mirror":
    return lane & ~7 | 7 - (lane & 7)
  if name == "row_bcast":
    if n == 15:
      return row - 1 if lane >= 16 else None
    return 31 if lane >= 32 else None
  if name == "row_newbcast":
    return row + n
  raise ValueError(control)


class DppTest(Batch):

  CONTROLS = ("quad_perm:[1,0,3,2]", "quad_perm:[3,3,0,1]", "row_shl:1",
              "row_shl:15", "row_shr:1", "row_shr:4", "row_shr:15",
              "row_ror:1", "row_ror:12", "wave_shl:1", "wave_rol:1",
              "wave_shr:1", "wave_ror:1", "row_mirror", "row_half_mirror",
              "row_bcast:15", "row_bcast:31", "row_newbcast:5")

  def moved(self, control, rows=15, banks=15, bound=False, mask=2**64 - 1):
    """What v_mov_b32_dpp v0, v1 leaves in v0."""
    out = OLD.copy()
    for lane in range(64):
      if not mask >> lane & 1:
        continue
      if not rows >> lane // 16 & 1 or not banks >> lane // 4 % 4 & 1:
        continue
      source = dpp_source(control, lane)
      if source is not None and mask >> source & 1:
        out[lane] = source + 100
      elif bound:
        out[lane] = 0
    return out

  def test_controls(self):
    for control in self.CONTROLS:
      for rows, banks, bound in ((15, 15, False), (15, 15, True),
                                 (0b1010, 15, True), (15, 0b0110, False)):
        text = f"row_mask:{rows:#x} bank_mask:{banks:#x}"
        if bound:
          text += " bound_ctrl:0"
        for mask in (2**64 - 1, 0xFFFF00FF0FF0F3C5):
          self.expect(f"v_mov_b32_dpp v0, v1 {control} {text}",
                      self.moved(control, rows, banks, bound, mask),
                      v={1: LANE + 100}, exec=mask)

  def test_arithmetic(self):
    # The idiom of a scan: v0 is source and destination.
    shifted = np.where(LANE % 16 >= 1, LANE + (LANE - 1), LANE * 2)
    self.expect("v_add_u32_dpp v0, v0, v0 row_shr:1 row_mask:0xf "
                "bank_mask:0xf", np.where(LANE % 16 >= 1, shifted, LANE),
                v={0: LANE})
    self.expect("v_add_u32_dpp v0, v0, v0 row_shr:1 row_mask:0xf "
                "bank_mask:0xf bound_ctrl:0",
                np.where(LANE % 16 >= 1, shifted, LANE), v={0: LANE})
    self.expect("v_add_f32_dpp v0, -v1, |v2| quad_perm:[1,0,3,2] "
                "row_mask:0xf bank_mask:0xf",
                2.0 - (LANE ^ 1).astype(F32), dtype=F32,
                v={1: LANE.astype(F32), 2: floats(-2)})
    self.expect("v_max_f32_dpp v0, v1, v2 row_half_mirror row_mask:0xf "
                "bank_mask:0xf", np.maximum(LANE ^ 7, 20).astype(F32),
                dtype=F32, v={1: LANE.astype(F32), 2: floats(20)})
    self.expect("v_cndmask_b32_dpp v0, v1, v2, vcc row_mirror row_mask:0xf "
                "bank_mask:0xf", np.where(LANE & 1, 7, LANE ^ 15),
                v={1: LANE, 2: LANE * 0 + 7}, vcc=ODD)
    self.expect("v_add_co_u32_dpp v0, vcc, v1, v2 row_mirror row_mask:0xf "
                "bank_mask:0xf", (LANE ^ 15) + 1,
                v={1: LANE, 2: LANE * 0 + 1})


class SdwaTest(Batch):

  X = LANE * U32(0x00010203) + U32(0x8070F0A5)
  Y = LANE * U32(0x03020100) + U32(0x11C80937)
  SELECTS = {
      "BYTE_0": (0, 8), "BYTE_1": (8, 8), "BYTE_2": (16, 8),
      "BYTE_3": (24, 8), "WORD_0": (0, 16), "WORD_1": (16, 16),
      "DWORD": (0, 32),
  }

  def select(self, x, name, sext=False):
    shift, size = self.SELECTS[name]
    field = (x >> U32(shift)).astype(U64) & U64((1 << size) - 1)
    if sext:
      field = (field.astype(np.int64) ^ (1 << size - 1)) - (1 << size - 1)
    return field.astype(np.int64).astype(U64).astype(U32)

  def test_sources(self):
    for name in self.SELECTS:
      for sext in (False, True):
        source = "sext(v1)" if sext else "v1"
        self.expect(
            f"v_add_u32_sdwa v0, {source}, v2 dst_sel:DWORD "
            f"dst_unused:UNUSED_PAD src0_sel:{name} src1_sel:BYTE_1",
            self.select(self.X, name, sext) + self.select(self.Y, "BYTE_1"),
            v={1: self.X, 2: self.Y})
    self.expect("v_lshlrev_b32_sdwa v0, v1, v2 dst_sel:DWORD "
                "dst_unused:UNUSED_PAD src0_sel:DWORD src1_sel:WORD_1",
                self.select(self.Y, "WORD_1") << (LANE & 31),
                v={1: LANE, 2: self.Y})
    self.expect("v_add_u32_sdwa v0, s10, v2 dst_sel:DWORD "
                "dst_unused:UNUSED_PAD src0_sel:BYTE_2 src1_sel:DWORD",
                self.Y + 0x33, v={2: self.Y}, s={10: 0x11332244})

  def test_destinations(self):
    total = self.X + self.Y
    for name, (shift, size) in self.SELECTS.items():
      field = (total.astype(U64) & U64((1 << size) - 1)) << U64(shift)
      hole = U64((1 << size) - 1) << U64(shift)
      old = OLD.astype(U64)
      top = (field >> U64(shift + size - 1) & U64(1)).astype(bool)
      ones = U64(2**32 - 1) & ~(U64((1 << (shift + size)) - 1))
      for unused, expected in (
          ("UNUSED_PAD", field), ("UNUSED_PRESERVE", old & ~hole | field),
          ("UNUSED_SEXT", np.where(top, field | ones, field))):
        self.expect(
            f"v_add_u32_sdwa v0, v1, v2 dst_sel:{name} dst_unused:{unused} "
            "src0_sel:DWORD src1_sel:DWORD",
            (expected & U64(2**32 - 1)).astype(U32),
            v={1: self.X, 2: self.Y})

  def test_floats_and_compares(self):
    h = lambda x: floats(x, dtype=F16).view(U16).astype(U32)
    self.expect("v_add_f16_sdwa v0, -v1, |v2| dst_sel:WORD_1 "
                "dst_unused:UNUSED_PRESERVE src0_sel:WORD_1 src1_sel:WORD_0",
                OLD & 0xFFFF | h(-1) << 16,
                v={1: h(3) << 16, 2: h(-2)})
    self.expect("v_cmp_eq_u32_sdwa vcc, v1, v2 src0_sel:BYTE_3 "
                "src1_sel:BYTE_0", lambda after: after.vcc == 1 << 9,
                v={1: LANE << 24, 2: LANE * 0 + 0x1109})
    self.expect("v_cvt_f32_f16_sdwa v0, v1 dst_sel:DWORD "
                "dst_unused:UNUSED_PAD src0_sel:WORD_1", 1.5, dtype=F32,
                v={1: h(1.5) << 16})
    self.expect("v_mov_b32_sdwa v0, v1 dst_sel:BYTE_3 "
                "dst_unused:UNUSED_PRESERVE src0_sel:BYTE_0",
                OLD & 0xFFFFFF | LANE << 24, v={1: LANE})


class ExecTest(Batch):

  def test_inactive_lanes_keep_their_registers(self):
    on = lambda new: np.where(LANE & 1, new, OLD)
    self.expect("v_mov_b32 v0, 5", on(5), exec=ODD)
    self.expect("v_add_f32 v0, v1, v1", on(floats(3).view(U32)), exec=ODD,
                v={1: floats(1.5)})
    self.expect("v_mov_b32 v0, 5", OLD, exec=0)
    self.expect("v_writelane_b32 v0, 9, 4", np.where(LANE == 4, 9, OLD),
                exec=0)

  def test_lanes_that_ignore_exec(self):
    self.expect("v_readlane_b32 s10, v1, 7", [7], v={1: LANE}, exec=0,
                scalar=(10,))
    self.expect("v_readlane_b32 s10, v1, s11", [9], v={1: LANE}, exec=0,
                s={11: 64 + 9}, scalar=(10,))
    self.expect("v_readlane_b32 s10, v1, m0", [3], v={1: LANE}, m0=3,
                scalar=(10,))
    self.expect("v_readfirstlane_b32 s10, v1", [40], v={1: LANE},
                exec=1 << 40 | 1 << 50, scalar=(10,))
    self.expect("v_readfirstlane_b32 s10, v1", [0], v={1: LANE}, exec=0,
                scalar=(10,))
    self.expect("v_writelane_b32 v0, s11, 5", np.where(LANE == 5, 77, OLD),
                s={11: 77})
    self.expect("v_writelane_b32 v0, 7, s10", np.where(LANE == 6, 7, OLD),
                s={10: 64 + 6})

  def test_swaps(self):
    self.expect("v_swap_b32 v0, v1", LANE, v={0: OLD, 1: LANE})
    self.expect("v_swap_b32 v1, v0", LANE, v={0: OLD, 1: LANE})
    if asm.ARCH == "gfx950":
      a, b = LANE, LANE + 100
      # v0's odd rows change places with v1's even ones.
      rows = LANE // 16
      self.expect("v_permlane16_swap_b32 v0, v1",
                  np.where(rows % 2, b[(LANE + 48) % 64], a), v={0: a, 1: b})
      self.expect("v_permlane16_swap_b32 v1, v0",
                  np.where(rows % 2, b, a[(LANE + 16) % 64]), v={0: b, 1: a})
      self.expect("v_permlane32_swap_b32 v0, v1",
                  np.where(LANE < 32, a, b[(LANE + 32) % 64]), v={0: a, 1: b})
      self.expect("v_permlane32_swap_b32 v1, v0",
                  np.where(LANE < 32, a[(LANE + 32) % 64], b),
                  v={0: b, 1: a})


class ControlTest(Batch):

  def branch(self, instruction, taken, **state):
    self.expect(f"s_mov_b32 s10, 1\n{instruction} over%=\ns_mov_b32 s10, 2\n"
                "over%=:".replace("%=", str(len(self._cases))),
                [1 if taken else 2], scalar=(10,), **state)

  def test_branches(self):
    self.branch("s_branch", True)
    for scc in (0, 1):
      self.branch("s_cbranch_scc0", not scc, scc=scc)
      self.branch("s_cbranch_scc1", bool(scc), scc=scc)
    for mask in (0, 1 << 63):
      self.branch("s_cbranch_vccz", not mask, vcc=mask)
      self.branch("s_cbranch_vccnz", bool(mask), vcc=mask)
      self.branch("s_cbranch_execz", not mask, exec=mask)
      self.branch("s_cbranch_execnz", bool(mask), exec=mask)

  def test_backwards(self):
    self.expect("s_mov_b32 s10, 0\ns_movk_i32 s11, 0\nagain:\n"
                "s_add_u32 s11, s11, s10\ns_add_u32 s10, s10, 1\n"
                "s_cmp_lt_u32 s10, 11\ns_cbranch_scc1 again", [11, 55],
                scalar=(10, 11))

  def test_program_counter(self):
    # s_getpc's result is the next instruction's address.
    self.expect("s_getpc_b64 s[10:11]\nhere:\ns_add_u32 s10, s10, there-here\n"
                "s_addc_u32 s11, s11, 0\ns_mov_b32 s12, 1\n"
                "s_setpc_b64 s[10:11]\ns_mov_b32 s12, 2\nthere:", [1],
                scalar=(12,))
    self.expect("s_mov_b32 s12, 0\ns_call_b64 s[10:11], function\n"
                "s_add_u32 s12, s12, 1\ns_branch done\nfunction:\n"
                "s_add_u32 s12, s12, 16\ns_setpc_b64 s[10:11]\ndone:", [17],
                scalar=(12,))
    self.expect("s_getpc_b64 s[10:11]\nhere2:\n"
                "s_add_u32 s10, s10, function2-here2\n"
                "s_addc_u32 s11, s11, 0\ns_mov_b32 s12, 0\n"
                "s_swappc_b64 s[14:15], s[10:11]\ns_add_u32 s12, s12, 1\n"
                "s_branch done2\nfunction2:\ns_add_u32 s12, s12, 16\n"
                "s_setpc_b64 s[14:15]\ndone2:", [17], scalar=(12,))

  def test_no_operations(self):
    for text in ("s_nop 0", "s_nop 7", "s_sleep 1", "s_setprio 3",
                 "s_waitcnt 0", "s_waitcnt vmcnt(0) lgkmcnt(0) expcnt(0)",
                 "s_icache_inv",
                 "s_dcache_inv", "s_dcache_wb", "s_barrier", "v_nop",
                 "s_incperflevel 1", "s_decperflevel 1", "s_wakeup",
                 "s_dcache_inv_vol", "s_dcache_wb_vol", "v_clrexcp"):
      name = text.split()[0]
      if name in asm.mnemonics():
        self.expect(f"{text}\ns_mov_b32 s10, 4", [4], scalar=(10,))

  def test_relative_registers(self):
    state = {"s": {10: np.array([100, 101, 102, 103, 104], U32)}}
    for text, expected in (
        ("s_movrels_b32 s20, s10", 103), ("s_movrels_b64 s[20:21], s[10:11]",
                                          102)):
      if text.split()[0] in asm.mnemonics():
        self.expect(text, [expected], scalar=(20,), m0=expected - 100,
                    **state)
    if "s_movreld_b32" in asm.mnemonics():
      self.expect("s_movreld_b32 s20, s11", [101], scalar=(23,), m0=3,
                  **state)
    if "s_movreld_b64" in asm.mnemonics():
      self.expect("s_movreld_b64 s[20:21], s[10:11]", [100, 101],
                  scalar=(22, 23), m0=2, **state)

  def test_time(self):
    for name in ("s_memtime", "s_memrealtime"):
      if name in asm.mnemonics():
        self.expect(f"{name} s[10:11]\ns_waitcnt lgkmcnt(0)\n"
                    f"{name} s[12:13]\ns_waitcnt lgkmcnt(0)", lambda after: (
                        after.scalar(12, U64) >= after.scalar(10, U64)),
                    scalar=(10, 11, 12, 13))


class ScalarMemoryTest(Batch):
  """Loads from what `run` read v5 from: the last 256 bytes before s[76:77]."""

  HERE = "s_sub_u32 s10, s76, 256\ns_subb_u32 s11, s77, 0\n"
  DESCRIPTOR = ("s_mov_b64 s[12:13], s[10:11]\ns_movk_i32 s14, 0x40\n"
                "s_mov_b32 s15, 0x27000\n")
  WAIT = "s_waitcnt lgkmcnt(0)\n"
  WORDS = [int(x) for x in LANE * 7 + 1000]

  def loaded(self, text, first, size, words=None):
    expected = words or self.WORDS[first : first + size]
    self.expect(self.HERE + self.DESCRIPTOR + f"s_mov_b32 s8, 12\n{text}\n"
                + self.WAIT, expected, scalar=range(20, 20 + size),
                v={5: LANE * 7 + 1000})

  def test_loads(self):
    for size in (1, 2, 4, 8, 16):
      suffix = f"x{size}" if size > 1 else ""
      dst = f"s[20:{19 + size}]" if size > 1 else "s20"
      self.loaded(f"s_load_dword{suffix} {dst}, s[10:11], 0x0", 0, size)
      self.loaded(f"s_load_dword{suffix} {dst}, s[10:11], 0x14", 5, size)
      self.loaded(f"s_load_dword{suffix} {dst}, s[10:11], s8", 3, size)
      self.loaded(f"s_load_dword{suffix} {dst}, s[76:77], -0xc0", 16, size)
      self.loaded(f"s_buffer_load_dword{suffix} {dst}, s[12:15], 0x0", 0,
                  size)
      self.loaded(f"s_buffer_load_dword{suffix} {dst}, s[12:15], s8", 3,
                  min(size, 8))
    # Beyond num_records is zero.
    self.loaded("s_buffer_load_dwordx2 s[20:21], s[12:15], 0x3c", 15, 2,
                [self.WORDS[15], 0])

  def test_stores(self):
    for size in (1, 2, 4):
      suffix = f"x{size}" if size > 1 else ""
      src = f"s[20:{19 + size}]" if size > 1 else "s20"
      if f"s_store_dword{suffix}" not in asm.mnemonics():
        continue
      self.expect(
          self.HERE + f"s_store_dword{suffix} {src}, s[10:11], 0x10\n"
          + self.WAIT + "s_dcache_wb\ns_load_dwordx8 s[24:31], s[10:11], 0x0"
          "\n" + self.WAIT, [
              *self.WORDS[:4], *(77 + i for i in range(size)),
              *self.WORDS[4 + size : 8]], scalar=range(24, 32),
          s={20: np.array([77, 78, 79, 80], U32)}, v={5: LANE * 7 + 1000})


  def test_atomics(self):
    old, data = self.WORDS[4], 77
    results = {
        "swap": data, "add": old + data, "sub": old - data,
        "smin": data, "umin": data, "smax": old, "umax": old,
        "and": old & data, "or": old | data, "xor": old ^ data,
        # Both wrap around the data.
        "inc": 0, "dec": data,
    }
    for name, new in results.items():
      if f"s_atomic_{name}" not in asm.mnemonics():
        continue
      for returned, expected in (("", data), (" glc", old)):
        self.expect(
            self.HERE + f"s_atomic_{name} s20, s[10:11], 0x10{returned}\n"
            + self.WAIT + "s_load_dwordx2 s[22:23], s[10:11], 0x10\n"
            + self.WAIT, [expected, new, self.WORDS[5]],
            scalar=(20, 22, 23), s={20: data}, v={5: LANE * 7 + 1000})
    if "s_atomic_smin" in asm.mnemonics():
      self.expect(self.HERE + "s_atomic_smin s20, s[10:11], 0x10\n" + self.WAIT
                  + "s_load_dword s22, s[10:11], 0x10\n" + self.WAIT,
                  [0xFFFFFFF0], scalar=(22,), s={20: 0xFFFFFFF0},
                  v={5: LANE * 7 + 1000})


class SkipTest(Batch):
  """s_setvskip: vector instructions do nothing, scalar ones go on."""

  def test_skips(self):
    body = ("s_setvskip s10, 2\nv_mov_b32 v0, v1\ns_add_u32 s11, s10, 7\n"
            "v_mov_b32 v0, v0\ns_setvskip 0, 0\nv_mov_b32 v2, s11\n"
            "v_add_u32 v0, v0, v2")
    v = {1: LANE + 100, 2: LANE}
    self.expect(body, OLD + U32(11), v=v, s={10: 4})
    self.expect(body, LANE + 110, v=v, s={10: 3})

  def test_loads(self):
    # One from nowhere, and no wait for it.
    self.expect("v_mov_b32 v4, 0\nv_mov_b32 v5, 0\ns_setvskip 1, 0\n"
                "flat_load_dword v0, v[4:5]\ns_setvskip 0, 0\n"
                "v_add_u32 v0, 1, v1", LANE + 1, v={1: LANE})


class RegisterIndexTest(Batch):

  @asm.where("s_set_gpr_idx_on" in asm.mnemonics())
  def test_index(self):
    v = {1: LANE + 100, 2: LANE + 200, 3: LANE + 300, 4: LANE + 400}
    off = "\ns_set_gpr_idx_off"
    self.expect("s_set_gpr_idx_on s10, gpr_idx(SRC0)\nv_mov_b32 v0, v1" + off,
                LANE + 300, v=v, s={10: 2})
    self.expect("s_set_gpr_idx_on s10, gpr_idx(DST)\nv_mov_b32 v0, v1" + off,
                LANE + 100, v=v | {6: OLD}, s={10: 6}, out=6)
    self.expect("s_set_gpr_idx_on s10, gpr_idx(SRC0)\ns_set_gpr_idx_idx s11\n"
                "v_mov_b32 v0, v1" + off, LANE + 400, v=v, s={10: 2, 11: 3})
    # Off again.
    self.expect("s_set_gpr_idx_on s10, gpr_idx(SRC0)" + off
                + "\nv_mov_b32 v0, v1", LANE + 100, v=v, s={10: 2})


# What this file runs, for instruction_test's coverage.
COVERED = {
    "v_swap_b32", "v_writelane_b32", "v_permlane16_swap_b32",
    "v_permlane32_swap_b32", "s_branch", "s_cbranch_scc0", "s_cbranch_scc1",
    "s_cbranch_vccz", "s_cbranch_vccnz", "s_cbranch_execz",
    "s_cbranch_execnz", "s_getpc_b64", "s_setpc_b64", "s_swappc_b64",
    "s_call_b64", "s_nop", "s_sleep", "s_setprio", "s_waitcnt",
    "s_icache_inv", "s_dcache_inv", "s_dcache_wb", "s_barrier", "v_nop",
    "s_wakeup", "s_dcache_inv_vol", "s_dcache_wb_vol", "v_clrexcp",
    "s_incperflevel", "s_decperflevel", "s_movrels_b32",
    "s_movrels_b64", "s_movreld_b32", "s_movreld_b64", "s_memtime",
    "s_memrealtime", "s_getreg_b32", "s_setreg_b32", "s_setreg_imm32_b32",
    *(f"s_atomic_{name}" for name in (
        "swap", "add", "sub", "smin", "umin", "smax", "umax", "and", "or",
        "xor", "inc", "dec")),
    "s_setvskip", "s_set_gpr_idx_on", "s_set_gpr_idx_off", "s_set_gpr_idx_idx",
    *(f"s_{kind}_dword{size}" for kind in ("load", "buffer_load", "store")
      for size in ("", "x2", "x4", "x8", "x16")),
    # Every kernel ends with it; `run`'s own instructions.
    "s_endpgm", "global_load_dword", "global_store_dword",
}


def tearDownModule():  # pylint: disable=invalid-name
  RAN.update({"s_endpgm", "s_load_dword", "s_load_dwordx4", "s_load_dwordx8",
              "global_load_dword", "global_store_dword"})
  check_covered(COVERED)


if __name__ == "__main__":
  absltest.main()
