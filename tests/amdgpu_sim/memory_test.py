# SPDX-License-Identifier: Apache-2.0
"""Every memory and LDS instruction against NumPy on bytes.

A load, a store and an atomic are each one definition on one lane's bytes; the
test runs it in every address space that has it, with lanes switched off, at
odd addresses, and with lanes that hit one address.
"""

import dataclasses
import itertools
import os
import sys
from collections.abc import Callable

import numpy as np
from absl.testing import absltest

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
# pylint: disable=g-import-not-at-top,g-bad-import-order
import asm

LANES = asm.LANES
GFX90A = asm.ARCH == "gfx90a"
GFX950 = asm.ARCH == "gfx950"
SC0 = "glc" if GFX90A else "sc0"
SOME = 0xF00FF00F0FF0A5C3  # EXEC
# Registers: address, data, second data, result.
ADDRESS, DATA, DATA2, RESULT = 8, 16, 24, 32
U8, U16, U32, U64 = np.uint8, np.uint16, np.uint32, np.uint64
I32, I64, F32, F64 = np.int32, np.int64, np.float32, np.float64


def active(mask: int) -> np.ndarray:
  return np.array([mask >> lane & 1 for lane in range(LANES)], bool)


def wait() -> str:
  return "s_waitcnt vmcnt(0) lgkmcnt(0)"


@dataclasses.dataclass(frozen=True)
class Load:
  """What a load makes of a lane's bytes and of its register."""

  size: int
  fill: Callable[[bytes, int], list[int]]  # bytes, register before: words

  @property
  def registers(self):
    return max(self.size // 4, 1)


def _words(data, _):
  return [int(x) for x in np.frombuffer(data, U32)]


def _unsigned(data, _):
  return [int.from_bytes(data, "little")]


def _signed(data, _):
  return [int.from_bytes(data, "little", signed=True) % 2**32]


def _low(fill):
  return lambda d, old: [old & 0xFFFF0000 | fill(d, 0)[0] & 0xFFFF]


def _high(fill):
  return lambda d, old: [old & 0xFFFF | fill(d, 0)[0] << 16 & 0xFFFF0000]


LOADS = {
    "load_dword": Load(4, _words), "load_dwordx2": Load(8, _words),
    "load_dwordx3": Load(12, _words), "load_dwordx4": Load(16, _words),
    "load_ubyte": Load(1, _unsigned), "load_sbyte": Load(1, _signed),
    "load_ushort": Load(2, _unsigned), "load_sshort": Load(2, _signed),
    "load_ubyte_d16": Load(1, _low(_unsigned)),
    "load_ubyte_d16_hi": Load(1, _high(_unsigned)),
    "load_sbyte_d16": Load(1, _low(_signed)),
    "load_sbyte_d16_hi": Load(1, _high(_signed)),
    "load_short_d16": Load(2, _low(_unsigned)),
    "load_short_d16_hi": Load(2, _high(_unsigned)),
}
DS_READS = {
    "ds_read_b32": Load(4, _words), "ds_read_b64": Load(8, _words),
    "ds_read_b96": Load(12, _words), "ds_read_b128": Load(16, _words),
    "ds_read_u8": Load(1, _unsigned), "ds_read_i8": Load(1, _signed),
    "ds_read_u16": Load(2, _unsigned), "ds_read_i16": Load(2, _signed),
    "ds_read_u8_d16": Load(1, _low(_unsigned)),
    "ds_read_u8_d16_hi": Load(1, _high(_unsigned)),
    "ds_read_i8_d16": Load(1, _low(_signed)),
    "ds_read_i8_d16_hi": Load(1, _high(_signed)),
    "ds_read_u16_d16": Load(2, _low(_unsigned)),
    "ds_read_u16_d16_hi": Load(2, _high(_unsigned)),
}
# Bytes and the first one of the data's.
STORES = {
    "store_dword": (4, 0), "store_dwordx2": (8, 0), "store_dwordx3": (12, 0),
    "store_dwordx4": (16, 0), "store_byte": (1, 0), "store_short": (2, 0),
    "store_byte_d16_hi": (1, 2), "store_short_d16_hi": (2, 2),
}
DS_WRITES = {
    "ds_write_b32": (4, 0), "ds_write_b64": (8, 0), "ds_write_b96": (12, 0),
    "ds_write_b128": (16, 0), "ds_write_b8": (1, 0), "ds_write_b16": (2, 0),
    "ds_write_b8_d16_hi": (1, 2), "ds_write_b16_d16_hi": (2, 2),
}


def _pairs(function):
  """On the halves of packed f16."""
  def packed(old, data):
    a = np.array([old], U32).view(np.float16)
    b = np.array([data], U32).view(np.float16)
    return function(a, b).astype(np.float16).view(U32)[0]
  return packed


def _bf16_pairs(old, data):
  result = 0
  for shift in (0, 16):
    a, b = (np.array([(int(x) >> shift & 0xFFFF) << 16], U32).view(F32)
            for x in (old, data))
    bits = int((a + b).view(U32)[0])
    rounded = (bits + 0x7FFF + (bits >> 16 & 1)) >> 16
    result |= rounded << shift
  return U32(result)


def _inc(old, data):
  return old * 0 if old >= data else old + old.dtype.type(1)


def _dec(old, data):
  return data if old == 0 or old > data else old - old.dtype.type(1)


# Type and the new value, of the old one and the data.
ATOMICS = {
    "swap": (U32, lambda o, d: d), "add": (U32, lambda o, d: o + d),
    "sub": (U32, lambda o, d: o - d), "smin": (I32, min), "umin": (U32, min),
    "smax": (I32, max), "umax": (U32, max), "and": (U32, lambda o, d: o & d),
    "or": (U32, lambda o, d: o | d), "xor": (U32, lambda o, d: o ^ d),
    "inc": (U32, _inc), "dec": (U32, _dec),
    "swap_x2": (U64, lambda o, d: d), "add_x2": (U64, lambda o, d: o + d),
    "sub_x2": (U64, lambda o, d: o - d), "smin_x2": (I64, min),
    "umin_x2": (U64, min), "smax_x2": (I64, max), "umax_x2": (U64, max),
    "and_x2": (U64, lambda o, d: o & d), "or_x2": (U64, lambda o, d: o | d),
    "xor_x2": (U64, lambda o, d: o ^ d), "inc_x2": (U64, _inc),
    "dec_x2": (U64, _dec), "add_f32": (F32, lambda o, d: o + d),
    "add_f64": (F64, lambda o, d: o + d), "min_f64": (F64, min),
    "max_f64": (F64, max),
    "pk_add_f16": (U32, _pairs(lambda a, b: a + b)),
}
if not GFX90A:
  ATOMICS["pk_add_bf16"] = (U32, _bf16_pairs)
DS_ATOMICS = {
    "add_u32": ATOMICS["add"], "sub_u32": ATOMICS["sub"],
    "rsub_u32": (U32, lambda o, d: d - o), "inc_u32": (U32, _inc),
    "dec_u32": (U32, _dec), "min_i32": (I32, min), "max_i32": (I32, max),
    "min_u32": (U32, min), "max_u32": (U32, max), "and_b32": ATOMICS["and"],
    "or_b32": ATOMICS["or"], "xor_b32": ATOMICS["xor"],
    "wrxchg_b32": ATOMICS["swap"], "add_f32": ATOMICS["add_f32"],
    "min_f32": (F32, min), "max_f32": (F32, max),
    "add_u64": ATOMICS["add_x2"], "sub_u64": ATOMICS["sub_x2"],
    "rsub_u64": (U64, lambda o, d: d - o), "inc_u64": (U64, _inc),
    "dec_u64": (U64, _dec), "min_i64": (I64, min), "max_i64": (I64, max),
    "min_u64": (U64, min), "max_u64": (U64, max),
    "and_b64": ATOMICS["and_x2"], "or_b64": ATOMICS["or_x2"],
    "xor_b64": ATOMICS["xor_x2"], "wrxchg_b64": ATOMICS["swap_x2"],
    "add_f64": ATOMICS["add_f64"], "min_f64": (F64, min), "max_f64": (F64, max),
}
if not GFX90A:
  DS_ATOMICS["pk_add_f16"] = ATOMICS["pk_add_f16"]
  DS_ATOMICS["pk_add_bf16"] = ATOMICS["pk_add_bf16"]
# With two data operands.
DS_ATOMICS2 = {
    "cmpst_b32": (U32, lambda o, c, d: d if o == c else o),
    "cmpst_b64": (U64, lambda o, c, d: d if o == c else o),
    "cmpst_f32": (F32, lambda o, c, d: d if o == c else o),
    "cmpst_f64": (F64, lambda o, c, d: d if o == c else o),
    "mskor_b32": (U32, lambda o, m, d: o & ~m | d),
    "mskor_b64": (U64, lambda o, m, d: o & ~m | d),
    "wrap_b32": (U32, lambda o, a, b: o - a if o >= a else o + b),
}
SPACES = ("global", "flat", "buffer", "scratch")
CACHES = (["buffer_wbl2", "buffer_invl2", "buffer_wbinvl1",
           "buffer_wbinvl1_vol"] if GFX90A else
          ["buffer_wbl2 sc1", "buffer_inv sc1", "buffer_inv sc0 sc1"])


def _returning(name):
  """ds_add_u32 to ds_add_rtn_u32."""
  head, _, tail = name.rpartition("_")
  return f"ds_{head}_rtn_{tail}"


def _covered():
  names = set()
  for space in SPACES:
    if space == "scratch" and GFX90A:
      continue
    names |= {f"{space}_{name}" for name in (*LOADS, *STORES)}
    if space != "scratch":
      names |= {f"{space}_atomic_{name}" for name in ATOMICS}
      names |= {f"{space}_atomic_cmpswap", f"{space}_atomic_cmpswap_x2"}
  if not GFX950:
    names.discard("buffer_atomic_pk_add_bf16")
  if GFX90A:
    names -= {"flat_atomic_add_f32", "flat_atomic_pk_add_f16"}
  names |= {*DS_READS, *DS_WRITES, "ds_permute_b32", "ds_bpermute_b32",
            "ds_swizzle_b32", "ds_nop", "ds_read_addtid_b32",
            "ds_write_addtid_b32"}
  for name in (*DS_ATOMICS, *DS_ATOMICS2):
    names.add(_returning(name))
    if not name.startswith(("wrxchg", "wrap")):
      names.add(f"ds_{name}")
  for kind, width in itertools.product(("2", "2st64"), ("b32", "b64")):
    names |= {f"ds_read{kind}_{width}", f"ds_write{kind}_{width}",
              f"ds_wrxchg{kind}_rtn_{width}"}
  names |= {cache.split()[0] for cache in CACHES}
  if not GFX90A:
    names |= {"global_load_lds_dword", "scratch_load_lds_dword"}
  if GFX950:
    names |= {"global_load_lds_dwordx3", "global_load_lds_dwordx4",
              "ds_read_b64_tr_b16", "ds_read_b64_tr_b8", "ds_read_b64_tr_b4",
              "ds_read_b96_tr_b6"}
  return names


COVERED = _covered()


def descriptor(address: int, records: int, stride: int = 0,
               word3: int = 0x00027000, swizzle: bool = False) -> np.ndarray:
  """A buffer resource."""
  return np.array([
      address & 0xFFFFFFFF,
      address >> 32 & 0xFFFF | stride << 16 | int(swizzle) << 31,
      records, word3], U32)


def random_values(rng, dtype, shape) -> np.ndarray:
  """Some of them equal, floats that add exactly or not."""
  dtype = np.dtype(dtype)
  if dtype.kind == "f":
    return (rng.integers(-40, 40, shape) / 8).astype(dtype)
  values = rng.integers(0, 2**8, shape).astype(dtype)
  big = rng.integers(0, 2**63, shape).astype(np.uint64).view(np.int64)
  return np.where(rng.random(shape) < 0.5, values, big.astype(dtype))


class Memory:
  """A buffer with random bytes, and registers that reach it."""

  def __init__(self, rng, size=8192):
    self.bytes = rng.integers(0, 256, size).astype(U8)
    self.buffer = asm.Buffer(self.bytes)

  def addresses(self, offsets) -> np.ndarray:
    return (self.buffer.address + offsets.astype(np.int64)).astype(U64)

  def read(self) -> np.ndarray:
    return self.buffer.read(U8)


def forms(space: str, memory: Memory, offsets: np.ndarray):
  """Ways to address: (text of the address, of the scalar one, modifiers,
  registers of the state)."""
  base = memory.buffer.address
  if space == "global":
    yield (f"v[{ADDRESS}:{ADDRESS + 1}]", ", off", "offset:-24",
           {"v": {ADDRESS: memory.addresses(offsets + 24)}, "s": {}})
    yield (f"v{ADDRESS}", ", s[20:21]", "offset:40",
           {"v": {ADDRESS: offsets.astype(U32)},
            "s": {20: np.array([base - 40], U64)}})
  elif space == "flat":
    yield (f"v[{ADDRESS}:{ADDRESS + 1}]", "", "offset:24",
           {"v": {ADDRESS: memory.addresses(offsets - 24)}, "s": {}})
  elif space == "buffer":
    yield (f"v{ADDRESS}", ", s[20:23], s24", "offen offset:16",
           {"v": {ADDRESS: (offsets - 16 - 32).astype(U32)},
            "s": {20: descriptor(base, memory.bytes.size), 24: 32}})
    # Index and offset: four bytes a record.
    yield (f"v[{ADDRESS}:{ADDRESS + 1}]", ", s[20:23], 0", "idxen offen",
           {"v": {ADDRESS: offsets.astype(U32) // 4,
                  ADDRESS + 1: offsets.astype(U32) % 4},
            "s": {20: descriptor(base, memory.bytes.size, stride=4)}})


class MemoryTest(absltest.TestCase):

  def setUp(self):
    super().setUp()
    self.rng = np.random.default_rng(0)
    self.memory = Memory(self.rng)

  def tearDown(self):
    self.memory.buffer.free()
    super().tearDown()

  def _run(self, snippets):
    results = asm.run(snippets)
    for snippet, result in zip(snippets, results, strict=True):
      if isinstance(result, Exception):
        raise AssertionError(f"{snippet.body}\n{result}")
    return [result[0] for result in results]

  def _offsets(self):
    # From 64 on, so that no register of `forms` is negative.
    return self.rng.integers(64, 4096, LANES)

  def test_loads(self):
    """Of all spaces but scratch, at any alignment, lanes switched off."""
    snippets, checks = [], []
    for space in ("global", "flat", "buffer"):
      for name, load in LOADS.items():
        offsets = self._offsets()
        for address, scalar, modifiers, regs in forms(
            space, self.memory, offsets):
          before = {RESULT + i: self.rng.integers(0, 2**32, LANES).astype(U32)
                    for i in range(load.registers)}
          last = RESULT + load.registers - 1
          dst = f"v[{RESULT}:{last}]" if last > RESULT else f"v{RESULT}"
          text = f"{space}_{name} {dst}, {address}{scalar} {modifiers}"
          state = asm.State({**regs["v"], **before}, regs["s"], exec=SOME)
          snippets.append(asm.Snippet(f"{text}\n{wait()}", [state],
                                      v=list(before)))
          checks.append((text, load, offsets, before))
    for state, (text, load, offsets, before) in zip(
        self._run(snippets), checks, strict=True):
      self._check_load(text, state, load, offsets, before, self.memory.bytes)

  def _check_load(self, text, state, load, offsets, before, contents,
                  mask=SOME):
    for lane in range(LANES):
      old = [int(words[lane]) for words in before.values()]
      want = old
      if mask >> lane & 1:
        data = contents[offsets[lane] : offsets[lane] + load.size].tobytes()
        want = load.fill(data, old[0])
      got = [int(state.v[reg][lane]) for reg in before]
      self.assertEqual(got, want, f"{text} lane {lane}")

  def test_stores(self):
    for space in ("global", "flat", "buffer"):
      for name, (size, first) in STORES.items():
        # Lanes do not overlap.
        offsets = 64 + self.rng.permutation(LANES) * 19
        for address, scalar, modifiers, regs in forms(
            space, self.memory, offsets):
          data = self.rng.integers(0, 256, (LANES, 16)).astype(U8)
          words = data.view(U32)[:, : max(size // 4, 1)]
          last = DATA + words.shape[1] - 1
          source = f"v[{DATA}:{last}]" if last > DATA else f"v{DATA}"
          both = (f"{source}, {address}" if space == "buffer"
                  else f"{address}, {source}")
          text = f"{space}_{name} {both}{scalar} {modifiers}"
          state = asm.State(
              {**regs["v"], DATA: np.ascontiguousarray(words)}, regs["s"],
              exec=SOME)
          want = self.memory.read()
          for lane in np.flatnonzero(active(SOME)):
            at = offsets[lane]
            want[at : at + size] = data[lane, first : first + size]
          self._run([asm.Snippet(f"{text}\n{wait()}", [state])])
          np.testing.assert_array_equal(self.memory.read(), want, text)

  def _atomic(self, space, name, dtype, function, operands=1, returns=True):
    """Runs an atomic with colliding lanes and checks memory and results."""
    dtype = np.dtype(dtype)
    size = dtype.itemsize
    offsets = 64 + size * self.rng.integers(0, 24, LANES)
    data = random_values(self.rng, dtype, (LANES, operands))
    contents = self.memory.bytes.copy()
    contents[64 : 64 + 24 * size] = random_values(
        self.rng, dtype, 24).view(U8)
    if operands == 2:  # Let half of them compare equal.
      for lane in range(0, LANES, 2):
        at = offsets[lane]
        data[lane, 1] = contents[at : at + size].view(dtype)[0]
    for address, scalar, modifiers, regs in forms(space, self.memory, offsets):
      self.memory.buffer.write(contents)
      words = operands * size // 4
      source = f"v[{DATA}:{DATA + words - 1}]" if words > 1 else f"v{DATA}"
      result = RESULT
      both = f"{address}, {source}"
      if space == "buffer":
        both, result = f"{source}, {address}", DATA
      elif returns:
        end = RESULT + size // 4 - 1
        both = (f"v[{RESULT}:{end}], " if size > 4 else f"v{RESULT}, ") + both
      text = f"{space}_atomic_{name} {both}{scalar} {modifiers}"
      if returns:
        text += f" {SC0}"
      before = self.rng.integers(0, 2**32, (LANES, size // 4)).astype(U32)
      vectors = {**regs["v"], DATA: data.view(U32)}
      if space != "buffer":
        vectors[RESULT] = before
      else:
        before = data.view(U32)[:, : size // 4]
      state = asm.State(vectors, regs["s"], exec=SOME)
      (after,) = self._run([asm.Snippet(
          f"{text}\n{wait()}", [state],
          v=[result + i for i in range(size // 4)])])
      want, results = contents.copy(), before.copy()
      for lane in np.flatnonzero(active(SOME)):
        place = want[offsets[lane] : offsets[lane] + size].view(dtype)
        old = place[0]
        if returns:
          results[lane] = np.array([old]).view(U32)
        with np.errstate(over="ignore"):
          place[0] = function(old, *data[lane])
      np.testing.assert_array_equal(self.memory.read(), want, text)
      got = np.stack([after.v[result + i] for i in range(size // 4)], 1)
      np.testing.assert_array_equal(got, results, text)

  def test_atomics(self):
    for space in ("global", "flat", "buffer"):
      for name, (dtype, function) in ATOMICS.items():
        for returns in (False, True):
          if f"{space}_atomic_{name}" not in COVERED:
            continue
          with self.subTest(f"{space} {name} {returns}"):
            self._atomic(space, name, dtype, function, returns=returns)

  def test_compare_and_swap(self):
    swap = lambda old, data, compare: data if old == compare else old
    for space in ("global", "flat", "buffer"):
      for name, dtype in [("cmpswap", U32), ("cmpswap_x2", U64)]:
        for returns in (False, True):
          with self.subTest(f"{space} {name} {returns}"):
            self._atomic(space, name, dtype, swap, 2, returns)

  def test_atomic_denormals(self):
    """Float adds in memory flush on gfx90a whatever MODE says."""
    tiny = np.full(LANES, 2.0**-140, F32)
    for mode in (asm.NO_FLUSH, asm.FLUSH32):
      self.memory.buffer.write(np.full(LANES, 2.0**-140, F32).view(U8))
      lanes = np.arange(LANES, dtype=U32) * 4
      state = asm.State(
          {ADDRESS: lanes, DATA: tiny},
          {20: np.array([self.memory.buffer.address], U64)}, mode=mode)
      self._run([asm.Snippet(
          f"global_atomic_add_f32 v{ADDRESS}, v{DATA}, s[20:21]\n{wait()}",
          [state])])
      want = 0 if GFX90A else 2.0**-139
      np.testing.assert_array_equal(
          self.memory.read().view(F32)[:LANES], F32(want))

  def test_misaligned_atomic_is_a_fault(self):
    for name, size in [("add", 2), ("add_x2", 4)]:
      data = f"v[{DATA}:{DATA + 1}]" if "x2" in name else f"v{DATA}"
      offsets = np.full(LANES, 64) + np.where(np.arange(LANES) == 7, size, 0)
      (result,) = asm.run([asm.Snippet(
          f"global_atomic_{name} v[{ADDRESS}:{ADDRESS + 1}], {data}, off\n"
          + wait(), [asm.State({ADDRESS: self.memory.addresses(offsets),
                                DATA: np.zeros((LANES, 2), U32)})])])
      self.assertIsInstance(result, asm.HipError)
      self.assertIn("misaligned", result.report)

  def test_inactive_lanes_have_no_address(self):
    """Garbage in the addresses of lanes that are off."""
    offsets = self._offsets()
    addresses = self.memory.addresses(offsets)
    addresses[~active(SOME)] = 0xDEADBEEFDEADBEEF
    state = asm.State({ADDRESS: addresses, RESULT: np.zeros(LANES, U32)},
                      exec=SOME)
    (after,) = self._run([asm.Snippet(
        f"global_load_dword v{RESULT}, v[{ADDRESS}:{ADDRESS + 1}], off\n"
        + wait(), [state], v=[RESULT])])
    self._check_load("global_load_dword", after, LOADS["load_dword"], offsets,
                     {RESULT: np.zeros(LANES, U32)}, self.memory.bytes)

  def test_buffer_bounds(self):
    """Dwords out of range load 0, their stores and atomics are dropped."""
    base = self.memory.buffer.address
    records = 100
    offsets = np.arange(LANES, dtype=U32) * 4
    for soffset in (0, 8, 200):
      for name, count in [("dword", 1), ("dwordx2", 2), ("dwordx3", 3),
                          ("dwordx4", 4)]:
        self.memory.buffer.write(self.memory.bytes)
        last = DATA + count - 1
        data = f"v[{DATA}:{last}]" if count > 1 else f"v{DATA}"
        result = (f"v[{RESULT}:{RESULT + count - 1}]" if count > 1
                  else f"v{RESULT}")
        stride = 4 * count
        at = np.arange(LANES, dtype=U32) * stride
        values = self.rng.integers(0, 2**32, (LANES, count)).astype(U32)
        state = asm.State(
            {ADDRESS: at, DATA: values, RESULT: values},
            {20: descriptor(base, records), 24: soffset})
        where = f"v{ADDRESS}, s[20:23], s24 offen"
        (after,) = self._run([asm.Snippet(
            f"buffer_load_{name} {result}, {where}\n{wait()}\n"
            f"buffer_store_{name} {data}, {where}\n{wait()}", [state],
            v=[RESULT + i for i in range(count)])])
        want = self.memory.bytes.copy()
        for lane, i in itertools.product(range(LANES), range(count)):
          offset = int(at[lane]) + 4 * i
          inside = offset + soffset < records
          place = offset + soffset
          loaded = 0
          if inside:
            loaded = int(self.memory.bytes[place : place + 4].view(U32)[0])
            want[place : place + 4] = values[lane, i : i + 1].view(U8)
          self.assertEqual(int(after.v[RESULT + i][lane]), loaded,
                           f"{name} lane {lane} dword {i}")
        np.testing.assert_array_equal(self.memory.read(), want)
    # d16 keeps the other half; an atomic returns 0.
    self.memory.buffer.write(self.memory.bytes)
    ones = np.full(LANES, 0xFFFFFFFF, U32)
    state = asm.State(
        {ADDRESS: offsets + U32(1000), RESULT: ones, RESULT + 1: ones,
         RESULT + 2: ones, RESULT + 3: ones},
        {20: descriptor(base, records)})
    where = f"v{ADDRESS}, s[20:23], 0 offen"
    (after,) = self._run([asm.Snippet(
        f"buffer_load_short_d16_hi v{RESULT}, {where}\n"
        f"buffer_load_sbyte v{RESULT + 1}, {where}\n"
        f"buffer_atomic_add v{RESULT + 2}, {where} {SC0}\n"
        f"buffer_atomic_add v{RESULT + 3}, {where}\n{wait()}", [state],
        v=[RESULT + i for i in range(4)])])
    for i, want in enumerate([0xFFFF, 0, 0, 0xFFFFFFFF]):
      np.testing.assert_array_equal(after.v[RESULT + i], want)
    np.testing.assert_array_equal(self.memory.read(), self.memory.bytes)

  def test_buffer_offset_does_not_wrap(self):
    """A large offset is out of range, as compilers' masks expect."""
    state = asm.State(
        {ADDRESS: np.full(LANES, 0x80000000, U32),
         RESULT: np.ones(LANES, U32)},
        {20: descriptor(self.memory.buffer.address, 0x7FFFFFFE)})
    (after,) = self._run([asm.Snippet(
        f"buffer_load_dword v{RESULT}, v{ADDRESS}, s[20:23], 0 offen "
        f"offset:4\n{wait()}", [state], v=[RESULT])])
    np.testing.assert_array_equal(after.v[RESULT], 0)

  def test_records_by_index(self):
    """An index is held against the records, an offset against the bytes."""
    base = self.memory.buffer.address
    words = self.memory.bytes[: 4 * LANES].view(U32)
    lanes = np.arange(LANES)
    for modifiers, address, count in (
        ("idxen", lanes, 40), ("offen", 4 * lanes, 10)):
      state = asm.State({ADDRESS: address.astype(U32),
                         RESULT: np.ones(LANES, U32)},
                        {20: descriptor(base, 40, stride=4)})
      (after,) = self._run([asm.Snippet(
          f"buffer_load_dword v{RESULT}, v{ADDRESS}, s[20:23], 0 {modifiers}\n"
          f"{wait()}", [state], v=[RESULT])])
      np.testing.assert_array_equal(after.v[RESULT],
                                    np.where(lanes < count, words, 0))

  def test_swizzled_buffer(self):
    """Records of 8 bytes, interleaved by four-byte elements in blocks of 16."""
    word3 = 0x00027000 | 1 << 21  # index_stride 16
    state = asm.State(
        {ADDRESS: np.arange(LANES, dtype=U32) % 40,
         ADDRESS + 1: np.where(np.arange(LANES) % 2, 4, 2).astype(U32),
         RESULT: np.ones(LANES, U32), RESULT + 1: np.ones(LANES, U32)},
        {20: descriptor(self.memory.buffer.address, 36, 8, word3, True)})
    (after,) = self._run([asm.Snippet(
        f"buffer_load_ushort v{RESULT}, v[{ADDRESS}:{ADDRESS + 1}], s[20:23],"
        f" 0 idxen offen\n{wait()}", [state], v=[RESULT])])
    for lane in range(LANES):
      index, offset = lane % 40, 4 if lane % 2 else 2
      at = (index // 16 * 8 + offset // 4 * 4) * 16 + index % 16 * 4
      at += offset % 4
      want = int(self.memory.bytes[at : at + 2].view(U16)[0])
      self.assertEqual(int(after.v[RESULT][lane]), want if index < 36 else 0)

  def test_buffer_without_vector_address(self):
    state = asm.State({RESULT: np.ones(LANES, U32)},
                      {20: descriptor(self.memory.buffer.address, 64), 24: 8})
    (after,) = self._run([asm.Snippet(
        f"buffer_load_dword v{RESULT}, off, s[20:23], s24 offset:4\n{wait()}",
        [state], v=[RESULT])])
    np.testing.assert_array_equal(
        after.v[RESULT], self.memory.bytes[12:16].view(U32)[0])

  def test_accumulation_registers(self):
    """AGPRs as data and results."""
    lanes = np.arange(LANES, dtype=U32)
    state = asm.State({ADDRESS: lanes * 16, 256: lanes, 257: lanes + 1,
                       258: lanes + 2, 259: lanes + 3},
                      {20: np.array([self.memory.buffer.address], U64)})
    (after,) = self._run([asm.Snippet(
        f"global_store_dwordx4 v{ADDRESS}, a[0:3], s[20:21]\n{wait()}\n"
        f"global_load_dwordx2 a[4:5], v{ADDRESS}, s[20:21] offset:8\n{wait()}",
        [state], v=[260, 261])])
    np.testing.assert_array_equal(after.v[260], lanes + 2)
    np.testing.assert_array_equal(after.v[261], lanes + 3)

  def test_cache_instructions(self):
    self._run([asm.Snippet("\n".join(CACHES) + "\n" + wait(), [asm.State()])])

  @asm.where(not GFX90A)
  def test_scratch(self):
    """Stores, then loads, by every way to address, each lane its own."""
    lanes = np.arange(LANES, dtype=U32)
    offsets = (lanes * 7 % 64).astype(U32)
    data = self.rng.integers(0, 256, (LANES, 128)).astype(U8)
    # All of the segment is written first.
    fill = "\n".join(
        f"scratch_store_dwordx4 off, v[{64 + 4 * i}:{67 + 4 * i}], off "
        f"offset:{16 * i}" for i in range(8))
    fill += f"\n{wait()}\n"
    vectors = {64: data.view(U32)}
    for name, load in LOADS.items():
      for address, scalar, constant in [
          (f"v{ADDRESS}", "off", 5), (f"v{ADDRESS}", "s20", 3),
          ("off", "s20", 9), ("off", "off", 17)]:
        before = {RESULT + i: lanes + 1 for i in range(load.registers)}
        last = RESULT + load.registers - 1
        dst = f"v[{RESULT}:{last}]" if last > RESULT else f"v{RESULT}"
        text = f"scratch_{name} {dst}, {address}, {scalar} offset:{constant}"
        state = asm.State({**vectors, ADDRESS: offsets, **before}, {20: 11})
        body = (f"{fill}s_mov_b32 exec_lo, {SOME & 0xFFFFFFFF:#x}\n"
                f"s_mov_b32 exec_hi, {SOME >> 32:#x}\n{text}\n{wait()}\n"
                "s_mov_b64 exec, -1")
        (after,) = self._run([asm.Snippet(body, [state], v=list(before),
                                          scratch=256)])
        at = constant + (11 if scalar == "s20" else 0)
        at = at + offsets * (address != "off")
        for lane in range(LANES):
          old = [int(words[lane]) for words in before.values()]
          want = old
          if SOME >> lane & 1:
            want = load.fill(
                data[lane, at[lane] : at[lane] + load.size].tobytes(), old[0])
          got = [int(after.v[reg][lane]) for reg in before]
          self.assertEqual(got, want, f"{text} lane {lane}")
    for name, (size, first) in STORES.items():
      count = max(size // 4, 1)
      source = f"v[{DATA}:{DATA + count - 1}]" if count > 1 else f"v{DATA}"
      new = self.rng.integers(0, 256, (LANES, 16)).astype(U8)
      state = asm.State({**vectors, ADDRESS: offsets, DATA: new.view(U32)},
                        {20: 8})
      dump = "\n".join(
          f"scratch_load_dwordx4 v[{64 + 4 * i}:{67 + 4 * i}], off, off "
          f"offset:{16 * i}" for i in range(8))
      (after,) = self._run([asm.Snippet(
          f"{fill}scratch_{name} v{ADDRESS}, {source}, s20 offset:3\n{wait()}"
          f"\n{dump}\n{wait()}", [state], v=list(range(64, 96)), scratch=256)])
      want = data.copy()
      for lane in range(LANES):
        at = offsets[lane] + 11
        want[lane, at : at + size] = new[lane, first : first + size]
      got = np.stack([after.v[64 + i] for i in range(32)], 1)
      np.testing.assert_array_equal(got.view(U8), want, name)

  @asm.where(GFX90A)
  def test_scratch_of_gfx90a(self):
    """Its private segment is a buffer in s[0:3]."""
    lanes = np.arange(LANES, dtype=U32)
    kernel = asm.Kernel(f"""
      s_add_u32 s0, s0, s9
      s_addc_u32 s1, s1, 0
      s_load_dwordx2 s[20:21], s[4:5], 0x0
      v_lshlrev_b32 v1, 2, v0
      v_add_u32 v2, 100, v0
      v_mov_b32 v10, 7
      v_mov_b32 v11, 8
      v_mov_b32 v4, 0
      s_movk_i32 s32, {64 * 16}
      buffer_store_dword v2, off, s[0:3], s32 offset:4
      buffer_store_dwordx2 v[10:11], v4, s[0:3], 0 offen offset:32
      {wait()}
      v_mov_b32 v5, 20
      buffer_load_dword v6, v5, s[0:3], 0 offen
      buffer_load_dword v7, off, s[0:3], s32 offset:16
      buffer_load_ushort v8, off, s[0:3], s32 offset:20
      {wait()}
      v_add_u32 v6, v6, v7
      v_add_u32 v6, v6, v8
      global_store_dword v1, v6, s[20:21]""")
    text = asm.kernel_file([kernel]).replace(
        ".amdhsa_user_sgpr_count 2",
        ".amdhsa_user_sgpr_count 6\n"
        ".amdhsa_user_sgpr_private_segment_buffer 1\n"
        ".amdhsa_system_sgpr_private_segment_wavefront_offset 1"
    ).replace("private_segment_fixed_size 0", "private_segment_fixed_size 64"
             ).replace("private_segment_fixed_size: 0",
                       "private_segment_fixed_size: 64")
    with asm.Module(asm.assemble(text)) as module, asm.Buffer(256) as out:
      module.launch("kernel", out)
      np.testing.assert_array_equal(out.read(), lanes + 100 + 7 + 8)

  @asm.where(not GFX90A)
  def test_flat_reaches_lds_and_scratch(self):
    lanes = np.arange(LANES, dtype=U32)
    body = f"""
      s_mov_b64 s[20:21], src_shared_base
      v_mov_b32 v{ADDRESS + 1}, s21
      flat_store_dword v[{ADDRESS}:{ADDRESS + 1}], v{DATA}
      {wait()}
      ds_read_b32 v{RESULT}, v{ADDRESS}
      s_mov_b64 s[20:21], src_private_base
      v_mov_b32 v{ADDRESS + 1}, s21
      flat_store_dword v[{ADDRESS}:{ADDRESS + 1}], v{DATA}
      {wait()}
      scratch_load_dword v{RESULT + 1}, v{ADDRESS}, off
      {wait()}"""
    (after,) = self._run([asm.Snippet(
        body, [asm.State({ADDRESS: lanes * 4, DATA: lanes + 5})],
        v=[RESULT, RESULT + 1], lds=1024, scratch=256)])
    for i in range(2):
      np.testing.assert_array_equal(after.v[RESULT + i], lanes + 5)

  @asm.where(not GFX90A)
  def test_loads_to_lds(self):
    """Lane after lane from M0 on: 4 bytes a lane, or 16."""
    base = self.memory.buffer.address
    offsets = self._offsets() // 4 * 4
    widths = [("dword", 1)]
    if GFX950:
      widths += [("dwordx3", 3), ("dwordx4", 4)]
    for name, count in widths:
      for text, extra in [
          (f"global_load_lds_{name} v{ADDRESS}, s[20:21] offset:16", 16),
          (f"buffer_load_{name} v{ADDRESS}, s[20:23], 0 offen offset:16 lds",
           16)]:
        scalars = (descriptor(base, 8192) if text.startswith("buffer")
                   else np.array([base], U64))
        state = asm.State(
            {ADDRESS: (offsets - extra).astype(U32)}, {20: scalars},
            exec=SOME, m0=64)
        contents = self.rng.integers(0, 256, 4096).astype(U8)
        after, got = run_lds(self, f"{text}\n{wait()}", contents, state)
        del after
        want = contents.copy()
        for lane in np.flatnonzero(active(SOME)):
          to = 64 + extra + (4 if count == 1 else 16) * lane
          want[to : to + 4 * count] = self.memory.bytes[
              offsets[lane] : offsets[lane] + 4 * count]
        np.testing.assert_array_equal(got, want, text)

  @asm.where(not GFX90A)
  def test_scratch_load_to_lds(self):
    lanes = np.arange(LANES, dtype=U32)
    contents = np.zeros(4096, U8)
    body = (f"scratch_store_dword off, v{DATA}, off offset:4\n{wait()}\n"
            f"scratch_load_lds_dword off, off offset:4\n{wait()}")
    _, got = run_lds(self, body, contents, asm.State({DATA: lanes + 9}),
                     scratch=64)
    np.testing.assert_array_equal(got.view(U32)[1:65], lanes + 9)


def run_lds(test, body, contents, state, outputs=(), **attributes):
  """Runs text with 4096 bytes of LDS before it; returns state and bytes."""
  assert contents.size == 4096
  blocks = contents.view(U32).reshape(4, LANES, 4)
  v = {**state.v, 64: np.arange(LANES, dtype=U32) * 16}
  for i in range(4):
    v[68 + 4 * i] = np.ascontiguousarray(blocks[i])
  write = "\n".join(f"ds_write_b128 v64, v[{68 + 4 * i}:{71 + 4 * i}] "
                    f"offset:{1024 * i}" for i in range(4))
  read = "\n".join(f"ds_read_b128 v[{88 + 4 * i}:{91 + 4 * i}], v64 "
                   f"offset:{1024 * i}" for i in range(4))
  full = f"""
    s_mov_b64 s[60:61], exec
    s_mov_b64 exec, -1
    {write}
    {wait()}
    s_mov_b64 exec, s[60:61]
    {body}
    {wait()}
    s_mov_b64 exec, -1
    {read}
    {wait()}
    s_mov_b64 exec, s[60:61]"""
  state = dataclasses.replace(state, v=v)
  (after,) = test._run([asm.Snippet(
      full, [state], v=[*outputs, *range(88, 104)], lds=4096, **attributes)])
  got = np.concatenate([
      np.stack([after.v[88 + 4 * i + j] for j in range(4)], 1).reshape(-1)
      for i in range(4)])
  return after, got.view(U8)


class LdsTest(absltest.TestCase):
  _run = MemoryTest._run
  _check_load = MemoryTest._check_load

  def setUp(self):
    super().setUp()
    self.rng = np.random.default_rng(1)
    self.contents = self.rng.integers(0, 256, 4096).astype(U8)

  def test_reads(self):
    for name, load in DS_READS.items():
      offsets = self.rng.integers(100, 4000, LANES)
      before = {RESULT + i: self.rng.integers(0, 2**32, LANES).astype(U32)
                for i in range(load.registers)}
      last = RESULT + load.registers - 1
      dst = f"v[{RESULT}:{last}]" if last > RESULT else f"v{RESULT}"
      # The base wraps around zero where offset is greater.
      state = asm.State({ADDRESS: (offsets - 2000).astype(U32), **before},
                        exec=SOME)
      text = f"{name} {dst}, v{ADDRESS} offset:2000"
      after, got = run_lds(self, text, self.contents, state, list(before))
      self._check_load(text, after, load, offsets, before, self.contents)
      np.testing.assert_array_equal(got, self.contents)

  def test_writes(self):
    for name, (size, first) in DS_WRITES.items():
      offsets = 100 + self.rng.permutation(LANES) * 19
      count = max(size // 4, 1)
      data = self.rng.integers(0, 256, (LANES, 16)).astype(U8)
      source = f"v[{DATA}:{DATA + count - 1}]" if count > 1 else f"v{DATA}"
      state = asm.State({ADDRESS: (offsets - 40).astype(U32),
                         DATA: data.view(U32)}, exec=SOME)
      _, got = run_lds(self, f"{name} v{ADDRESS}, {source} offset:40",
                       self.contents, state)
      want = self.contents.copy()
      for lane in np.flatnonzero(active(SOME)):
        want[offsets[lane] : offsets[lane] + size] = data[
            lane, first : first + size]
      np.testing.assert_array_equal(got, want, name)

  def test_pairs(self):
    """read2, write2 and wrxchg2, with and without st64."""
    for wide, st64 in itertools.product((1, 2), (False, True)):
      unit = 4 * wide * (64 if st64 else 1)
      suffix = ("2st64" if st64 else "2") + ("_b64" if wide == 2 else "_b32")
      first, second = (1, 3) if st64 else (5, 9)
      at = self.rng.permutation(LANES) * 16 % 1024
      if st64:
        at = np.arange(LANES) * 4 * wide % 256
      offsets = f"offset0:{first} offset1:{second}"
      span = lambda reg: f"v[{reg}:{reg + wide - 1}]" if wide > 1 else f"v{reg}"
      result = f"v[{RESULT}:{RESULT + 2 * wide - 1}]"
      data = self.rng.integers(0, 2**32, (2, LANES, wide)).astype(U32)
      state = asm.State({
          ADDRESS: at.astype(U32), DATA: data[0], DATA2: data[1],
          RESULT: np.zeros((LANES, 2 * wide), U32)}, exec=SOME & 0xFFFFFFFF)
      outputs = list(range(RESULT, RESULT + 2 * wide))
      mask = active(SOME & 0xFFFFFFFF)
      size = 4 * wide
      for name, text, writes in [
          ("read", f"ds_read{suffix} {result}, v{ADDRESS} {offsets}", False),
          ("write", f"ds_write{suffix} v{ADDRESS}, {span(DATA)}, "
           f"{span(DATA2)} {offsets}", True),
          ("exchange", "ds_wrxchg" + suffix.replace("_", "_rtn_") +
           f" {result}, v{ADDRESS}, {span(DATA)}, {span(DATA2)} {offsets}",
           True)]:
        after, got = run_lds(self, text, self.contents, state, outputs)
        want = self.contents.copy()
        results = np.zeros((LANES, 2, wide), U32)
        if name == "exchange":
          # Lane by lane, both at once.
          for lane in np.flatnonzero(mask):
            places = [want[at[lane] + unit * o :][:size].view(U32)
                      for o in (first, second)]
            for i, place in enumerate(places):
              results[lane, i] = place
            for i, place in enumerate(places):
              place[:] = data[i, lane]
        else:
          for i, o in enumerate((first, second)):
            for lane in np.flatnonzero(mask):
              place = want[at[lane] + unit * o :][:size].view(U32)
              results[lane, i] = place
              if writes:
                place[:] = data[i, lane]
        np.testing.assert_array_equal(got, want, text)
        if name != "write":
          words = np.stack([after.v[reg] for reg in outputs], 1)
          np.testing.assert_array_equal(words, results.reshape(LANES, -1),
                                        text)

  def _atomic(self, name, dtype, function, operands, returns):
    dtype = np.dtype(dtype)
    size = dtype.itemsize
    contents = self.contents.copy()
    contents[: 32 * size] = random_values(self.rng, dtype, 32).view(U8)
    offsets = size * self.rng.integers(8, 32, LANES)
    data = random_values(self.rng, dtype, (operands, LANES))
    if operands == 2:  # Some compare equal.
      for lane in range(0, LANES, 2):
        data[0, lane] = contents[offsets[lane] :][:size].view(dtype)[0]
    words = size // 4
    span = lambda reg: f"v[{reg}:{reg + 1}]" if words > 1 else f"v{reg}"
    text = f"v{ADDRESS}, {span(DATA)}"
    if operands == 2:
      text += f", {span(DATA2)}"
    text = (f"{_returning(name)} {span(RESULT)}, {text}" if returns
            else f"ds_{name} {text}") + " offset:32"
    before = self.rng.integers(0, 2**32, (LANES, words)).astype(U32)
    vectors = {ADDRESS: (offsets - 32).astype(U32),
               DATA: data[0].view(U32).reshape(LANES, -1), RESULT: before}
    if operands == 2:
      vectors[DATA2] = data[1].view(U32).reshape(LANES, -1)
    state = asm.State(vectors, exec=SOME)
    outputs = list(range(RESULT, RESULT + words))
    after, got = run_lds(self, text, contents, state, outputs)
    want, results = contents.copy(), before.copy()
    for lane in np.flatnonzero(active(SOME)):
      place = want[offsets[lane] :][:size].view(dtype)
      old = place[0]
      if returns:
        results[lane] = np.array([old]).view(U32)
      with np.errstate(over="ignore"):
        place[0] = function(old, *data[:, lane])
    np.testing.assert_array_equal(got, want, text)
    np.testing.assert_array_equal(
        np.stack([after.v[reg] for reg in outputs], 1), results, text)

  def test_atomics(self):
    for operands, table in [(1, DS_ATOMICS), (2, DS_ATOMICS2)]:
      for name, (dtype, function) in table.items():
        for returns in (False, True):
          if not returns and name.startswith(("wrxchg", "wrap")):
            continue
          with self.subTest(f"{name} {returns}"):
            self._atomic(name, dtype, function, operands, returns)

  def test_misaligned_atomic_is_a_fault(self):
    (result,) = asm.run([asm.Snippet(
        f"ds_add_u32 v{ADDRESS}, v{DATA}\n{wait()}",
        [asm.State({ADDRESS: np.full(LANES, 6, U32),
                    DATA: np.zeros(LANES, U32)})], lds=64)])
    self.assertIsInstance(result, asm.HipError)
    self.assertIn("misaligned", result.report)

  def test_addresses_from_m0(self):
    lanes = np.arange(LANES, dtype=U32)
    state = asm.State({DATA: lanes + 7, RESULT: lanes}, exec=SOME, m0=128)
    after, got = run_lds(
        self, f"ds_read_addtid_b32 v{RESULT} offset:8\n{wait()}\n"
        f"ds_write_addtid_b32 v{DATA} offset:264", self.contents, state,
        [RESULT])
    mask = active(SOME)
    old = self.contents.view(U32)
    np.testing.assert_array_equal(
        after.v[RESULT], np.where(mask, old[34:98], lanes))
    want = old.copy()
    want[98:162] = np.where(mask, lanes + 7, want[98:162])
    np.testing.assert_array_equal(got.view(U32), want)

  def _move(self, text, vectors, mask=asm.ALL):
    lanes = np.arange(LANES, dtype=U32)
    state = asm.State({RESULT: lanes + 1000, **vectors}, exec=mask)
    (after,) = self._run([asm.Snippet(f"{text}\n{wait()}", [state],
                                      v=[RESULT])])
    return after.v[RESULT]

  def test_permutes(self):
    lanes = np.arange(LANES, dtype=U32)
    data = self.rng.integers(0, 2**32, LANES).astype(U32)
    # Any address bits beyond the lane are ignored; some lanes collide.
    address = self.rng.integers(0, 2**32, LANES).astype(U32)
    for mask, offset in [(asm.ALL, 0), (SOME, 0), (SOME, 8)]:
      on = active(mask)
      vectors = {ADDRESS: address, DATA: data}
      target = (address + U32(offset)) // 4 % 64
      got = self._move(
          f"ds_bpermute_b32 v{RESULT}, v{ADDRESS}, v{DATA} offset:{offset}",
          vectors, mask)
      want = np.where(on, np.where(on[target], data[target], 0), lanes + 1000)
      np.testing.assert_array_equal(got, want)
      got = self._move(
          f"ds_permute_b32 v{RESULT}, v{ADDRESS}, v{DATA} offset:{offset}",
          vectors, mask)
      pushed = np.zeros(LANES, U32)
      for lane in np.flatnonzero(on):
        pushed[target[lane]] = data[lane]
      np.testing.assert_array_equal(got, np.where(on, pushed, lanes + 1000))

  def test_swizzles(self):
    lanes = np.arange(LANES)
    data = self.rng.integers(0, 2**32, LANES).astype(U32)
    reverse = lambda x: int(f"{x:05b}"[::-1], 2)
    half = lanes & 32
    cases = {
        # Bit mask: and, or, xor of five bits.
        "0x041f": half | ((lanes & 31) ^ 1),
        "0x001f": lanes,
        "0x0200": half | 16,
        "0x7c10": half | (lanes & 16) ^ 31,
        # Quads.
        "0x801b": lanes // 4 * 4 + 3 - lanes % 4,
        "0x8055": lanes // 4 * 4 + 1,
        # Rotations by 3, by -3, and by 4 within groups of eight.
        "0xc060": half | ((lanes & 31) + 3) % 32,
        "0xc460": half | ((lanes & 31) - 3) % 32,
        "0xc098": half | (lanes & 0x18) | ((lanes & 31) + 4) & 7,
        # FFT: none, all, and one bit.
        "0xe01f": lanes,
        "0xe000": half | np.array([reverse(x & 31) for x in lanes]),
        "0xe010": half | np.array([reverse(x & 31) >> 1 for x in lanes])
                  | (lanes & 16),
    }
    for offset, source in cases.items():
      for mask in (asm.ALL, SOME):
        on = active(mask)
        got = self._move(f"ds_swizzle_b32 v{RESULT}, v{DATA} offset:{offset}",
                         {DATA: data}, mask)
        want = np.where(on, np.where(on[source], data[source], 0),
                        lanes + 1000)
        np.testing.assert_array_equal(got, want, offset)

  def test_nop(self):
    self._run([asm.Snippet(f"ds_nop\n{wait()}", [asm.State()])])

  @asm.where(GFX950)
  def test_transposing_reads(self):
    """Sixteen lanes hold rows of a matrix and get its columns."""
    for bits, registers in [(16, 2), (8, 2), (4, 2), (6, 3)]:
      rows = 32 * registers // bits
      parts = 16 // rows  # Lanes of a row.
      size = 4 * registers
      at = (self.rng.permutation(LANES) * 16).astype(U32)
      name = f"ds_read_b{32 * registers}_tr_b{bits}"
      before = np.zeros((LANES, registers), U32)
      after, _ = run_lds(
          self, f"{name} v[{RESULT}:{RESULT + registers - 1}], v{ADDRESS} "
          "offset:16", self.contents,
          asm.State({ADDRESS: at, RESULT: before}),
          list(range(RESULT, RESULT + registers)))
      got = np.stack([after.v[RESULT + i] for i in range(registers)], 1)
      for group in range(4):
        matrix = np.zeros((rows, 16), int)
        for row, part in np.ndindex(rows, parts):
          lane = 16 * group + row * parts + part
          data = self.contents[at[lane] + 16 :][:size].tobytes()
          stream = int.from_bytes(data, "little")
          for i in range(rows):
            matrix[row, part * rows + i] = stream >> bits * i & 2**bits - 1
        for column in range(16):
          lane = 16 * group + column
          stream = int.from_bytes(
              np.ascontiguousarray(got[lane]).tobytes(), "little")
          column_got = [stream >> bits * i & 2**bits - 1 for i in range(rows)]
          self.assertEqual(column_got, matrix[:, column].tolist(),
                           f"{name} lane {lane}")

  @asm.where(GFX950)
  def test_transposing_read_needs_all_lanes(self):
    (result,) = asm.run([asm.Snippet(
        f"ds_read_b64_tr_b16 v[{RESULT}:{RESULT + 1}], v{ADDRESS}\n{wait()}",
        [asm.State({ADDRESS: np.zeros(LANES, U32)}, exec=SOME)], lds=64)])
    self.assertIsInstance(result, asm.HipError)


if __name__ == "__main__":
  absltest.main()
