# SPDX-License-Identifier: Apache-2.0
"""Every matrix instruction against NumPy's float64.

Where an element lives is written here once more, from the general formulas of
AMD's "CDNA4" document, section 7.1.4, and its tables for f8f6f4 and sparse
operands. Random operands tell whether the instruction agrees with it, and
operands that are zero but for one element say where it does not.
"""

import dataclasses
import math
import os
import sys

import numpy as np
from absl.testing import absltest

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
# pylint: disable=g-import-not-at-top,g-bad-import-order
import asm
import reference

LANES = asm.LANES
GFX90A, GFX942, GFX950 = "gfx90a", "gfx942", "gfx950"
# Registers of the snippets: A, B, scales or indices; C and D from an AGPR.
A, B, EXTRA, C, D = 8, 24, 40, 256, 320


def _table(form: reference.Format) -> np.ndarray:
  return np.array(
      [float(reference.decode(i, form)) for i in range(2**form.size)]
  )


@dataclasses.dataclass(frozen=True)
class Kind:
  """A type of elements: how many bits, and what they mean."""

  name: str
  bits: int

  def values(self, codes: np.ndarray) -> np.ndarray:
    if self.name == "f64":
      return codes.view(np.float64)
    if self.name == "f32":
      return codes.astype(np.uint32).view(np.float32).astype(np.float64)
    if self.name == "xf32":
      codes = codes.astype(np.uint32)
      rounded = (codes + 0xFFF + (codes >> 13 & 1)) & ~np.uint32(0x1FFF)
      return rounded.view(np.float32).astype(np.float64)
    if self.name == "f16":
      return codes.astype(np.uint16).view(np.float16).astype(np.float64)
    if self.name == "bf16":
      codes = codes.astype(np.uint32) << 16
      return codes.view(np.float32).astype(np.float64)
    if self.name == "i8":
      return codes.astype(np.uint8).view(np.int8).astype(np.float64)
    fnuz = asm.ARCH == GFX942
    form = {
        "fp8": reference.FP8_FNUZ if fnuz else reference.FP8,
        "bf8": reference.BF8_FNUZ if fnuz else reference.BF8,
        "fp6": reference.FP6, "bf6": reference.BF6, "fp4": reference.FP4,
    }[self.name]
    return _table(form)[codes.astype(np.int64)]

  def random(self, rng, shape) -> np.ndarray:
    """Codes of finite values of moderate size."""
    if self.name == "f64":
      return rng.standard_normal(shape).view(np.uint64)
    if self.name in ("f32", "xf32"):
      return rng.standard_normal(shape).astype(np.float32).view(np.uint32)
    if self.name == "f16":
      values = rng.standard_normal(shape)
      # No denormals, which gfx90a flushes.
      values[np.abs(values) < 2**-10] = 1
      return values.astype(np.float16).view(np.uint16)
    if self.name == "bf16":
      codes = rng.standard_normal(shape).astype(np.float32).view(np.uint32)
      return codes >> 16
    codes = rng.integers(0, 2**self.bits, shape)
    finite = np.isfinite(self.values(np.arange(2**self.bits)))
    return np.where(finite[codes], codes, 0)

  def one(self) -> int:
    """The code of 1."""
    if self.name == "f64":
      return int(np.float64(1).view(np.uint64))
    if self.name in ("f32", "xf32"):
      return int(np.float32(1).view(np.uint32))
    if self.name == "f16":
      return 0x3C00
    if self.name == "bf16":
      return 0x3F80
    return int(np.argmax(self.values(np.arange(2**self.bits)) == 1))


KINDS = {
    name: Kind(name, bits)
    for name, bits in [
        ("f64", 64), ("f32", 32), ("xf32", 32), ("f16", 16), ("bf16", 16),
        ("i8", 8), ("fp8", 8), ("bf8", 8), ("fp6", 6), ("bf6", 6), ("fp4", 4),
    ]
}


@dataclasses.dataclass(frozen=True)
class Shape:
  """An instruction: D (m x m) = A (m x k) B (k x m) + C, so many blocks."""

  mnemonic: str
  m: int
  k: int
  blocks: int
  a: Kind
  b: Kind
  archs: tuple[str, ...] = (GFX942, GFX950)
  sparse: bool = False
  mixed: bool = False  # f8f6f4
  modifiers: str = ""

  @property
  def out(self):
    return {"i8": np.int32, "f64": np.float64}.get(self.a.name, np.float32)

  @property
  def lane_k(self):
    """k of a lane, of a dense operand."""
    return self.k * self.m * self.blocks // LANES

  def input_place(self, kind, block, i, k):
    """(item, lane) of an element of A or of column i of B."""
    group = k // self.lane_k
    item = k % self.lane_k
    runs = 1
    if self.mixed and kind.bits == 8:
      runs = 2
    if self.sparse and asm.ARCH == GFX950 and self.lane_k * kind.bits > 128:
      runs = 2
    if runs == 2:
      half, run = self.k // 2, self.lane_k // 2
      group = k % half // run
      item = k // half * run + k % run
    return item, i + self.m * (block + self.blocks * group)

  def output_place(self, block, i, j):
    """(item, lane) of an element of C or D."""
    if self.out is np.float64 and self.m == 4:
      return 0, 16 * i + 4 * block + j
    height = 1 if self.out is np.float64 else 4
    item_blocks = math.ceil(LANES / (self.m * self.m / height))
    item_rows = LANES // item_blocks // self.m
    groups = self.m // (height * item_rows)
    item = i % height + height * (
        i // (height * item_rows) + groups * (block // item_blocks)
    )
    lane = j + self.m * (
        i // height % item_rows + item_rows * (block % item_blocks)
    )
    return item, lane


def _shapes() -> list[Shape]:
  """All of them, by the names of each architecture."""
  shapes = []

  def add(old, name, m, k, blocks, kind, archs=(GFX942, GFX950), **more):
    kind = KINDS[kind]
    if old:
      shapes.append(Shape(old, m, k, blocks, kind, kind, (GFX90A,), **more))
    if name:
      shapes.append(Shape(name, m, k, blocks, kind, kind, archs, **more))

  for m, blocks, tag in [(32, 2, "2b"), (16, 4, "4b"), (4, 16, "16b")]:
    add(f"v_mfma_f32_{m}x{m}x1f32", f"v_mfma_f32_{m}x{m}x1_{tag}_f32",
        m, 1, blocks, "f32")
    add(f"v_mfma_f32_{m}x{m}x4f16", f"v_mfma_f32_{m}x{m}x4_{tag}_f16",
        m, 4, blocks, "f16")
    add(f"v_mfma_f32_{m}x{m}x4bf16_1k", f"v_mfma_f32_{m}x{m}x4_{tag}_bf16",
        m, 4, blocks, "bf16")
    add(f"v_mfma_f32_{m}x{m}x2bf16", None, m, 2, blocks, "bf16")
    add(f"v_mfma_i32_{m}x{m}x4i8", f"v_mfma_i32_{m}x{m}x4_{tag}_i8",
        m, 4, blocks, "i8")
  for m, k in [(32, 2), (16, 4)]:
    add(f"v_mfma_f32_{m}x{m}x{k}f32", f"v_mfma_f32_{m}x{m}x{k}_f32",
        m, k, 1, "f32")
    add(None, f"v_mfma_f32_{m}x{m}x{2 * k}_xf32", m, 2 * k, 1, "xf32",
        (GFX942,))
    k *= 4
    add(f"v_mfma_f32_{m}x{m}x{k}f16", f"v_mfma_f32_{m}x{m}x{k}_f16",
        m, k, 1, "f16")
    add(f"v_mfma_f32_{m}x{m}x{k}bf16_1k", f"v_mfma_f32_{m}x{m}x{k}_bf16",
        m, k, 1, "bf16")
    add(f"v_mfma_f32_{m}x{m}x{k // 2}bf16", None, m, k // 2, 1, "bf16")
    add(f"v_mfma_i32_{m}x{m}x{k}i8", None, m, k, 1, "i8")
    add(None, f"v_mfma_i32_{m}x{m}x{2 * k}_i8", m, 2 * k, 1, "i8")
    for kind in ("f16", "bf16"):
      add(None, f"v_mfma_f32_{m}x{m}x{2 * k}_{kind}", m, 2 * k, 1, kind,
          (GFX950,))
      add(None, f"v_smfmac_f32_{m}x{m}x{2 * k}_{kind}", m, 2 * k, 1, kind,
          sparse=True)
      add(None, f"v_smfmac_f32_{m}x{m}x{4 * k}_{kind}", m, 4 * k, 1, kind,
          (GFX950,), sparse=True)
    add(None, f"v_mfma_i32_{m}x{m}x{4 * k}_i8", m, 4 * k, 1, "i8", (GFX950,))
    add(None, f"v_smfmac_i32_{m}x{m}x{4 * k}_i8", m, 4 * k, 1, "i8",
        sparse=True)
    add(None, f"v_smfmac_i32_{m}x{m}x{8 * k}_i8", m, 8 * k, 1, "i8",
        (GFX950,), sparse=True)
    for a in ("fp8", "bf8"):
      for b in ("fp8", "bf8"):
        for name, size, archs, sparse in [
            ("v_mfma", 2 * k, (GFX942, GFX950), False),
            ("v_smfmac", 4 * k, (GFX942, GFX950), True),
            ("v_smfmac", 8 * k, (GFX950,), True),
        ]:
          shapes.append(Shape(f"{name}_f32_{m}x{m}x{size}_{a}_{b}", m, size,
                              1, KINDS[a], KINDS[b], archs, sparse))
    formats = ["fp8", "bf8", "fp6", "bf6", "fp4"]
    for i, a in enumerate(formats):
      for j, b in enumerate(formats):
        shapes.append(Shape(
            f"v_mfma_f32_{m}x{m}x{8 * k}_f8f6f4", m, 8 * k, 1, KINDS[a],
            KINDS[b], (GFX950,), mixed=True, modifiers=f"cbsz:{i} blgp:{j}"))
  add("v_mfma_f64_16x16x4f64", "v_mfma_f64_16x16x4_f64", 16, 4, 1, "f64")
  add("v_mfma_f64_4x4x4f64", "v_mfma_f64_4x4x4_4b_f64", 4, 4, 4, "f64")
  return [shape for shape in shapes if asm.ARCH in shape.archs]


SHAPES = _shapes()
MOVES = {"v_accvgpr_read_b32", "v_accvgpr_write_b32", "v_accvgpr_mov_b32"}
COVERED = MOVES | {shape.mnemonic for shape in SHAPES} | {
    shape.mnemonic.replace("v_mfma_", "v_mfma_scale_")
    for shape in SHAPES if shape.mixed
}


def pack(items: np.ndarray, bits: int) -> np.ndarray:
  """Codes of shape (lanes, items) as registers: (lanes, registers)."""
  shifts = np.arange(bits)
  stream = (items[..., None].astype(np.uint64) >> shifts.astype(np.uint64)) & 1
  stream = stream.reshape(LANES, -1, 32).astype(np.uint64)
  weights = np.uint64(1) << np.arange(32, dtype=np.uint64)
  return (stream * weights).sum(-1).astype(np.uint32)


def place_inputs(shape: Shape, kind: Kind, codes: np.ndarray) -> np.ndarray:
  """Codes [block, row of A or column of B, k] to registers."""
  items = np.zeros((LANES, shape.lane_k), np.uint64)
  for block, i, k in np.ndindex(codes.shape):
    item, lane = shape.input_place(kind, block, i, k)
    items[lane, item] = codes[block, i, k]
  return pack(items, kind.bits)


def place_sparse(shape: Shape, codes: np.ndarray, kept: np.ndarray):
  """A's registers and its index register, the index set being the first.

  Args:
    codes: [row, k]; kept: [row, k / 4, 2], which of each four k remain.
  """
  items = np.zeros((LANES, shape.lane_k // 2), np.uint64)
  indices = np.zeros(LANES, np.uint64)
  for row, four, which in np.ndindex(kept.shape):
    k = 4 * four + int(kept[row, four, which])
    item, lane = shape.input_place(shape.a, 0, row, 4 * four)
    item = item // 2 + which
    items[lane, item] = codes[row, k]
    indices[lane] |= np.uint64(int(kept[row, four, which]) << 2 * item)
  return pack(items, shape.a.bits), indices.astype(np.uint32)


def place_output(shape: Shape, values: np.ndarray) -> np.ndarray:
  """[block, i, j] to (lanes, items)."""
  count = shape.m * shape.m * shape.blocks // LANES
  items = np.zeros((LANES, count), shape.out)
  for block, i, j in np.ndindex(values.shape):
    item, lane = shape.output_place(block, i, j)
    items[lane, item] = values[block, i, j]
  return items


def take_output(shape: Shape, state: asm.State, first: int) -> np.ndarray:
  count = registers(shape)
  words = np.stack([state.v[first + i] for i in range(count)], 1)
  items = np.ascontiguousarray(words).view(shape.out)
  out = np.zeros((shape.blocks, shape.m, shape.m), shape.out)
  for block, i, j in np.ndindex(out.shape):
    item, lane = shape.output_place(block, i, j)
    out[block, i, j] = items[lane, item]
  return out


def registers(shape: Shape) -> int:
  """Of C and D."""
  size = np.dtype(shape.out).itemsize
  return shape.m * shape.m * shape.blocks * size // 4 // LANES


def span(first: int, count: int) -> str:
  name, number = ("v", first) if first < 256 else ("a", first - 256)
  if count == 1:
    return f"{name}{number}"
  return f"{name}[{number}:{number + count - 1}]"


def expected(a, b, c, blocks_of_a=None):
  """D in float64 and how far a sum of rounded terms may be from it."""
  if blocks_of_a is not None:
    a = a[blocks_of_a]
  with np.errstate(invalid="ignore"):
    exact = np.einsum("bik,bjk->bij", a, b) + c
    size = np.einsum("bik,bjk->bij", np.abs(a), np.abs(b)) + np.abs(c)
  return exact, size


@dataclasses.dataclass
class Case:
  """One execution: codes [block, row or column, k], C's values."""

  a: np.ndarray
  b: np.ndarray
  c: np.ndarray
  kept: np.ndarray | None = None


class Runner:
  """Makes snippets of cases and takes them to results."""

  def __init__(self, shape: Shape, modifiers: str = "", extra: str = "",
               c: str | None = None, d: int = D):
    self.shape = shape
    self.c = c
    self.d = d
    count = registers(shape)
    lanes_a = shape.lane_k // (2 if shape.sparse else 1)
    a = span(A, max(lanes_a * shape.a.bits // 32, 1))
    b = span(B, max(shape.lane_k * shape.b.bits // 32, 1))
    last = c or span(C, count)
    target = d
    if shape.sparse:
      last = span(EXTRA, 1)
      target = self.d = C
    self.body = (
        f"{shape.mnemonic} {span(target, count)}, {a}, {b}, {last}{extra} "
        f"{modifiers or shape.modifiers}"
    )
    # The kernel would fault on reading D's registers too early; it waits.
    self.body += "\ns_nop 15\ns_nop 3"

  def state(self, case: Case, extra=None) -> asm.State:
    shape = self.shape
    v = {B: place_inputs(shape, shape.b, case.b)}
    if shape.sparse:
      v[A], v[EXTRA] = place_sparse(shape, case.a[0], case.kept)
    else:
      v[A] = place_inputs(shape, shape.a, case.a)
    v[C] = place_output(shape, case.c).view(np.uint32)
    v.update(extra or {})
    return asm.State(v)

  def snippet(self, states) -> asm.Snippet:
    count = registers(self.shape)
    return asm.Snippet(self.body, states,
                       v=[self.d + i for i in range(count)])

  def results(self, states) -> list[np.ndarray]:
    (result,) = asm.run([self.snippet(states)])
    if isinstance(result, Exception):
      raise result
    return [take_output(self.shape, state, self.d) for state in result]


class MfmaTest(absltest.TestCase):

  def _random(self, shape, rng) -> Case:
    size = (shape.blocks, shape.m, shape.k)
    a, b = shape.a.random(rng, size), shape.b.random(rng, size)
    if shape.out is np.int32:
      c = rng.integers(-(2**31), 2**31, (shape.blocks, shape.m, shape.m))
    else:
      c = rng.standard_normal((shape.blocks, shape.m, shape.m))
    case = Case(a, b, c.astype(shape.out))
    if shape.sparse:
      pairs = np.array([(i, j) for i in range(4) for j in range(i + 1, 4)])
      case.kept = pairs[rng.integers(0, 6, (shape.m, shape.k // 4))]
      mask = np.zeros((shape.m, shape.k // 4, 4), bool)
      np.put_along_axis(mask, case.kept, True, 2)
      case.a = np.where(mask.reshape(1, shape.m, shape.k), case.a, 0)
    return case

  def _check(self, shape, got, a, b, c, message=""):
    exact, size = expected(a, b, c.astype(np.float64))
    if shape.out is np.int32:
      wrapped = exact.astype(np.int64).astype(np.uint32).view(np.int32)
      np.testing.assert_array_equal(got, wrapped, message)
      return
    eps = np.finfo(shape.out).eps / 2
    error = np.abs(got.astype(np.float64) - exact)
    bound = (shape.k + 2) * eps * size
    bad = ~(error <= bound)
    self.assertFalse(
        bad.any(),
        f"{shape.mnemonic} {shape.modifiers} {message}: {bad.sum()} of "
        f"{bad.size} wrong, first at {np.argwhere(bad)[:4].tolist()}",
    )

  def test_random(self):
    rng = np.random.default_rng(0)
    for shape in SHAPES:
      with self.subTest(shape.mnemonic + shape.modifiers):
        cases = [self._random(shape, rng) for _ in range(2)]
        runner = Runner(shape)
        got = runner.results([runner.state(case) for case in cases])
        for case, d in zip(cases, got, strict=True):
          self._check(shape, d, shape.a.values(case.a),
                      shape.b.values(case.b), case.c)

  def test_one_hot(self):
    """One element of A, or of B, is 1."""
    rng = np.random.default_rng(1)
    for shape in SHAPES:
      with self.subTest(shape.mnemonic + shape.modifiers):
        cases = []
        for number in range(16):
          case = self._random(shape, rng)
          case.c = np.zeros_like(case.c)
          hot = np.zeros_like(case.a)
          block, i = rng.integers(shape.blocks), rng.integers(shape.m)
          k = rng.integers(shape.k)
          if number % 2:
            hot[block, i, k] = shape.b.one()
            case.b = hot.astype(case.b.dtype)
          else:
            hot[block, i, k] = shape.a.one()
            case.a = hot
            if shape.sparse:
              four = case.kept[i, k // 4]
              if k % 4 not in four:
                case.kept[i, k // 4] = sorted([k % 4, (k + 1) % 4])
          cases.append(case)
        runner = Runner(shape)
        got = runner.results([runner.state(case) for case in cases])
        for case, d in zip(cases, got, strict=True):
          exact, _ = expected(shape.a.values(case.a),
                              shape.b.values(case.b), 0)
          np.testing.assert_array_equal(d, exact.astype(shape.out))

  def test_c_constant_and_d_over_c(self):
    rng = np.random.default_rng(2)
    for shape in SHAPES:
      if shape.sparse or shape.modifiers not in ("", "cbsz:0 blgp:0"):
        continue
      with self.subTest(shape.mnemonic):
        case = self._random(shape, rng)
        integer = shape.out is np.int32
        for text, value in [("0", 0), ("1" if integer else "1.0", 1),
                            ("-4" if integer else "-4.0", -4)]:
          runner = Runner(shape, c=text)
          (got,) = runner.results([runner.state(case)])
          self._check(shape, got, shape.a.values(case.a),
                      shape.b.values(case.b), np.full_like(case.c, value))
        runner = Runner(shape, d=C)
        (got,) = runner.results([runner.state(case)])
        self._check(shape, got, shape.a.values(case.a),
                    shape.b.values(case.b), case.c)

  def test_exec_does_not_matter(self):
    rng = np.random.default_rng(3)
    for shape in SHAPES:
      with self.subTest(shape.mnemonic + shape.modifiers):
        case = self._random(shape, rng)
        runner = Runner(shape)
        runner.body = "s_mov_b64 exec, 0\ns_nop 4\n" + runner.body
        runner.body += "\ns_mov_b64 exec, -1"
        (got,) = runner.results([runner.state(case)])
        self._check(shape, got, shape.a.values(case.a),
                    shape.b.values(case.b), case.c)

  def test_broadcast_of_a(self):
    rng = np.random.default_rng(4)
    for shape in SHAPES:
      if shape.blocks == 1 or shape.out is np.float64:
        continue
      sizes = range(1, int(math.log2(shape.blocks)) + 1)
      for cbsz in sizes:
        for abid in {0, 1, 2**cbsz - 1}:
          with self.subTest(f"{shape.mnemonic} {cbsz} {abid}"):
            case = self._random(shape, rng)
            runner = Runner(shape, f"cbsz:{cbsz} abid:{abid}")
            (got,) = runner.results([runner.state(case)])
            # Lane l reads lane l % S + S * abid, S being 64 >> cbsz.
            group = shape.blocks >> cbsz
            source = np.arange(shape.blocks) % group + group * abid
            self._check(shape, got, shape.a.values(case.a)[source],
                        shape.b.values(case.b), case.c)

  def test_lane_groups_of_b(self):
    rng = np.random.default_rng(5)
    lane = np.arange(LANES)
    sources = {
        1: lane % 32, 2: lane % 32 + 32, 3: (lane + 16) % 64, 4: lane % 16,
        5: lane % 16 + 16, 6: lane % 16 + 32, 7: lane % 16 + 48,
    }
    names = ("4x4x4_16b_f16", "32x32x1_2b_f32", "16x16x4_4b_i8", "4x4x4f16",
             "32x32x1f32", "16x16x4i8")
    for shape in SHAPES:
      if not shape.mnemonic.endswith(names):
        continue
      case = self._random(shape, rng)
      for blgp, source in sources.items():
        with self.subTest(f"{shape.mnemonic} {blgp}"):
          plain = Runner(shape)
          state = plain.state(case)
          state.v[B] = state.v[B][source]
          (want,) = plain.results([state])
          runner = Runner(shape, f"blgp:{blgp}")
          (got,) = runner.results([runner.state(case)])
          np.testing.assert_array_equal(got, want)

  def test_negation_of_f64(self):
    rng = np.random.default_rng(6)
    for shape in SHAPES:
      if shape.out is not np.float64:
        continue
      for bits in range(1, 8):
        signs = [-1 if bits >> i & 1 else 1 for i in range(3)]
        text = (f"blgp:{bits}" if asm.ARCH == GFX90A else
                f"neg:[{bits & 1},{bits >> 1 & 1},{bits >> 2}]")
        case = self._random(shape, rng)
        runner = Runner(shape, text)
        (got,) = runner.results([runner.state(case)])
        self._check(shape, got, signs[0] * shape.a.values(case.a),
                    signs[1] * shape.b.values(case.b), signs[2] * case.c,
                    text)

  def test_scales(self):
    rng = np.random.default_rng(7)
    for shape in SHAPES:
      if not shape.mixed:
        continue
      scaled = dataclasses.replace(
          shape, mnemonic=shape.mnemonic.replace("v_mfma_", "v_mfma_scale_"))
      for byte_a, byte_b in [(0, 0), (1, 2), (3, 1), (2, 3)]:
        with self.subTest(f"{scaled.mnemonic} {byte_a} {byte_b}"):
          case = self._random(shape, rng)
          words = rng.integers(0, 256, (2, LANES, 4)).astype(np.uint8)
          powers = rng.integers(120, 135, (2, LANES)).astype(np.uint8)
          words[0, :, byte_a], words[1, :, byte_b] = powers
          select = (
              f" op_sel:[{byte_a & 1},{byte_b & 1},0]"
              f" op_sel_hi:[{byte_a >> 1},{byte_b >> 1},0]"
          )
          runner = Runner(
              scaled,
              extra=f", v{EXTRA}, v{EXTRA + 1}{select}")
          state = runner.state(case, {
              EXTRA: words[0].view(np.uint32)[:, 0],
              EXTRA + 1: words[1].view(np.uint32)[:, 0],
          })
          (got,) = runner.results([state])
          # Lane l has the scale of row l % m, k from 32 (l / m) on.
          factors = 2.0 ** (powers.astype(np.float64) - 127)
          factors = [
              np.repeat(f[: shape.m * shape.k // 32].reshape(-1, shape.m).T,
                        32, axis=1)[None] for f in factors
          ]
          self._check(shape, got, shape.a.values(case.a) * factors[0],
                      shape.b.values(case.b) * factors[1], case.c)

  def test_extreme_scales(self):
    """Scales that no float could hold cancel; 255 is NaN."""
    shapes = [s for s in SHAPES if s.modifiers == "cbsz:0 blgp:0"]
    rng = np.random.default_rng(8)
    for shape in shapes:
      scaled = dataclasses.replace(
          shape, mnemonic=shape.mnemonic.replace("v_mfma_", "v_mfma_scale_"))
      runner = Runner(scaled, extra=f", v{EXTRA}, v{EXTRA + 1}")
      runner.body = runner.body.replace(
          f"v{EXTRA + 1} ", f"v{EXTRA + 1} op_sel_hi:[0,0,0] ")
      case = self._random(shape, rng)
      states = [
          runner.state(case, {EXTRA: np.full(LANES, x, np.uint32),
                              EXTRA + 1: np.full(LANES, y, np.uint32)})
          for x, y in [(254, 0), (0, 254), (255, 127)]
      ]
      got = runner.results(states)
      for d in got[:2]:
        self._check(shape, d, shape.a.values(case.a),
                    shape.b.values(case.b), case.c)
      self.assertTrue(np.isnan(got[2]).all())

  def test_sets_of_indices(self):
    """ABID chooses among the sets of the index register, CBSZ the first."""
    rng = np.random.default_rng(9)
    for shape in SHAPES:
      if not shape.sparse:
        continue
      bits = shape.lane_k  # Two for each of half of the elements.
      for chosen in range(32 // bits):
        for cbsz in (0, 1):
          if cbsz and chosen:
            continue
          case = self._random(shape, rng)
          modifiers = f"cbsz:{cbsz} abid:{chosen}" if chosen or cbsz else ""
          if cbsz:
            modifiers = "cbsz:1 abid:1"
          runner = Runner(shape, modifiers)
          state = runner.state(case)
          garbage = rng.integers(0, 2**32, LANES).astype(np.uint64)
          mask = np.uint64((2**bits - 1) << bits * chosen)
          index = state.v[EXTRA].astype(np.uint64) << np.uint64(bits * chosen)
          state.v[EXTRA] = (garbage & ~mask | index & mask).astype(np.uint32)
          (got,) = runner.results([state])
          self._check(shape, got, shape.a.values(case.a),
                      shape.b.values(case.b), case.c, modifiers)

  def test_sparse_infinity_is_not_selected(self):
    for shape in SHAPES:
      if not shape.sparse or shape.a.name not in ("f16", "bf16"):
        continue
      infinity = 0x7C00 if shape.a.name == "f16" else 0x7F80
      case = self._random(shape, np.random.default_rng(10))
      case.kept = np.zeros_like(case.kept)
      case.kept[..., 1] = 2
      case.a[:] = 0
      case.a[..., ::2] = shape.a.one()
      case.b[..., 1::2] = infinity
      runner = Runner(shape)
      (got,) = runner.results([runner.state(case)])
      self.assertTrue(np.isfinite(got).all(), shape.mnemonic)

  def test_special_values(self):
    """Infinity, NaN and their sums go through every dense float shape."""
    codes = {"f32": 0x7F800000, "xf32": 0x7F800000, "f16": 0x7C00,
             "bf16": 0x7F80, "f64": 0x7FF0 << 48}
    for shape in SHAPES:
      if shape.sparse or shape.a.name not in codes:
        continue
      with self.subTest(shape.mnemonic):
        case = self._random(shape, np.random.default_rng(11))
        case.a[:] = shape.a.one()
        case.b[:] = shape.b.one()
        infinity = codes[shape.a.name]
        case.a[0, 0, 0] = infinity
        case.a[0, 1, 0] = infinity + 1  # NaN; signaling where that is.
        case.b[0, 2, 0] = 0
        case.c[:] = 0
        case.c[0, 0, 1] = -np.inf
        runner = Runner(shape)
        (got,) = runner.results([runner.state(case)])
        self.assertEqual(got[0, 0, 0], np.inf)
        self.assertTrue(np.isnan(got[0, 0, 1]))  # inf - inf
        self.assertTrue(np.isnan(got[0, 0, 2]))  # inf * 0
        self.assertTrue(np.isnan(got[0, 1]).all())
        self.assertTrue(np.isfinite(got[0, 2:]).all())

  def test_denormals(self):
    """gfx90a flushes f16 and bf16; f32 obeys MODE; others keep them."""
    tiny = {"f16": (0x0001, 2.0**-24), "bf16": (0x0001, 2.0**-133),
            "f32": (0x00000001, 2.0**-149)}
    for shape in SHAPES:
      if shape.sparse or shape.a.name not in tiny:
        continue
      code, value = tiny[shape.a.name]
      for mode in (asm.NO_FLUSH, asm.FLUSH32):
        with self.subTest(f"{shape.mnemonic} {mode:x}"):
          case = self._random(shape, np.random.default_rng(12))
          case.a[:], case.b[:], case.c[:] = 0, 0, 0
          case.a[:, :, 0] = code
          big = {"f16": 0x4000, "bf16": 0x4000, "f32": 0x40000000}
          case.b[:, :, 0] = big[shape.a.name]  # 2
          runner = Runner(shape)
          state = runner.state(case)
          state.mode = mode
          (got,) = runner.results([state])
          flushes = (mode == asm.FLUSH32 if shape.a.name == "f32"
                     else asm.ARCH == GFX90A)
          np.testing.assert_array_equal(got, 0 if flushes else 2 * value)

  def test_overflow(self):
    """MODE's FP16_OVFL makes sums that overflow the largest numbers."""
    largest = float(np.finfo(np.float32).max)
    for shape in SHAPES:
      if shape.out is not np.float32 or shape.modifiers not in (
          "", "cbsz:0 blgp:0"):
        continue
      with self.subTest(shape.mnemonic):
        case = self._random(shape, np.random.default_rng(14))
        # Finite products large enough to leave their mark on C.
        code = {"f32": 0x7E800000, "xf32": 0x7E800000, "bf16": 0x7E80}.get(
            shape.a.name)
        if code is None:
          continue
        case.a[:], case.b[:] = code, code
        case.b[:, 1::2] |= 0x80000000 if shape.b.bits == 32 else 0x8000
        case.c[:] = 0
        if case.kept is not None:
          case.a[:] = code
        runner = Runner(shape)
        states = [runner.state(case) for _ in range(3)]
        states[1].mode |= 1 << 23
        infinite = Case(case.a, case.b, case.c.copy(), case.kept)
        infinite.c[0, 0, 0] = np.inf
        states[2] = runner.state(infinite)
        states[2].mode |= 1 << 23
        got = runner.results(states)
        sign = np.where(np.arange(shape.m) % 2, -1, 1)
        np.testing.assert_array_equal(
            got[0], np.broadcast_to(sign * np.inf, got[0].shape))
        np.testing.assert_array_equal(
            got[1], np.broadcast_to(sign * largest, got[1].shape))
        self.assertEqual(got[2][0, 0, 0], np.inf)

  def test_rounding_of_xf32(self):
    for shape in SHAPES:
      if shape.a.name != "xf32":
        continue
      case = self._random(shape, np.random.default_rng(13))
      case.c[:] = 0
      case.a[:], case.b[:] = 0, 0
      case.b[..., 0] = 0x3F800000
      # A tie to even, above a tie, a carry into the exponent.
      for row, (code, want) in enumerate([
          (0x3F801000, 1.0), (0x3F801001, 1 + 2**-10), (0x3FFFFFFF, 2.0),
          (0x3F803000, 1 + 2**-9),
      ]):
        case.a[0, row, 0] = code
        del want
      runner = Runner(shape)
      (got,) = runner.results([runner.state(case)])
      np.testing.assert_array_equal(
          got[0, :4, 0], [1.0, 1 + 2**-10, 2.0, 1 + 2**-9])

  def test_moves_obey_exec(self):
    lanes = np.arange(LANES, dtype=np.uint32)
    before = asm.State({8: lanes + 100, 9: lanes + 200, 256: lanes + 300,
                        257: lanes + 400}, exec=0x0F0F0F0F0F0F0F0F)
    body = (
        "v_accvgpr_write_b32 a0, v8\nv_accvgpr_mov_b32 a1, a0\n"
        "v_accvgpr_read_b32 v9, a1"
    )
    after = asm.run_one(body, before, v=[9, 256, 257])
    active = (lanes & 4) == 0
    np.testing.assert_array_equal(
        after.v[256], np.where(active, lanes + 100, lanes + 300))
    np.testing.assert_array_equal(
        after.v[257], np.where(active, lanes + 100, lanes + 400))
    np.testing.assert_array_equal(
        after.v[9], np.where(active, lanes + 100, lanes + 200))
    after = asm.run_one("v_accvgpr_write_b32 a0, 1.0",
                        asm.State({256: lanes}), v=[256])
    np.testing.assert_array_equal(after.v[256], 0x3F800000)


if __name__ == "__main__":
  absltest.main()
