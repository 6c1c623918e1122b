# SPDX-License-Identifier: Apache-2.0
"""The model of time on small programs, whose clocks can be counted by hand."""

import ctypes
import json
import os
import subprocess
import sys
import xml.etree.ElementTree

import numpy as np
from absl.testing import absltest

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
os.environ["AMDGPU_SIM_CLOCK"] = os.environ.get("AMDGPU_SIM_CLOCK", os.devnull)
import asm  # pylint: disable=g-import-not-at-top,g-bad-import-order

# What tests count with, whatever a device's are.
PARAMETERS = {
    "lds_latency": 100, "l1_latency": 200, "address_clocks": 4,
    "l2_bytes": 1 << 20, "l2_latency": 600, "l2_idle": 600, "l2_rate": 16,
    "mall_bytes": 1 << 24, "mall_latency": 800, "mall_idle": 800,
    "mall_gigabytes": 2000,
    "hbm_latency": 1000, "hbm_idle": 1000, "hbm_gigabytes": 1000,
    "hbm_efficiency": 0.5, "atomic_rate": 2, "loaded_share": 0.75,
    "taken_branch": 20, "barrier": 10,
    "launch_microseconds": 3, "sustained": 0.875, "throttle": 0.25,
    "scalar_latency": 300,
}
UNITS = {"gfx90a": 110, "gfx942": 304, "gfx950": 256}[asm.ARCH]
PEAK = {"gfx90a": 1.7, "gfx942": 2.1, "gfx950": 2.4}[asm.ARCH]
DIES = 1 if asm.ARCH == "gfx90a" else 8
LINE = 64 if asm.ARCH == "gfx90a" else 128
SLOT = 4  # Clocks between two instructions of a wave.
MFMA = {"gfx90a": "v_mfma_f32_32x32x8f16",
        "gfx942": "v_mfma_f32_32x32x8_f16",
        "gfx950": "v_mfma_f32_32x32x8_f16"}[asm.ARCH]
PASSES = {"gfx90a": 16, "gfx942": 8, "gfx950": 8}[asm.ARCH]
MATRIX = 4 * PASSES
TRANSCENDENTAL = 8 if asm.ARCH == "gfx950" else 16


def call(name, *arguments):
  function = getattr(asm.library(), name)
  function.restype = ctypes.c_char_p
  return function(*arguments)


def set_parameter(name, value):
  return asm.library().amdgpu_sim_clock_set(name.encode(),
                                            ctypes.c_double(value))


def setUpModule():  # pylint: disable=invalid-name
  for name, value in PARAMETERS.items():
    assert set_parameter(name, value) == 1, name


def report(body, *arguments, **attributes):
  asm.launch(body, *arguments, **attributes)
  return json.loads(call("amdgpu_sim_clock"))


def clocks(body, *arguments, repeat=8, before="", after="", **attributes):
  """The clocks of one more of `body`, after some that fill what there is."""
  times = [
      report(before + body * count + after, *arguments, **attributes)["clocks"]
      for count in (repeat, 2 * repeat)
  ]
  return (times[1] - times[0]) / repeat


def behind(die, all_, units=UNITS, latencies=(600, 800, 1000)):
  """Latency, and clocks of a byte for so many units, of what these shares miss:
  of all asks those of which no other of the die asks for the same, and of
  all."""
  clock = PEAK * PARAMETERS["sustained"]
  rate = lambda gigabytes: max(1 / 16, units * clock / gigabytes)
  shares = np.array([1 - die, die - all_, all_])
  return shares @ latencies, shares @ [1 / 16, rate(2000), rate(500)]


def chase(count, rounds=1, step=256, **attributes):
  """The report of a wave that goes through a chain of so many pointers."""
  places = np.zeros(step * count // 4, np.uint32)
  places[:: step // 4] = (np.arange(1, count + 1) % count) * step
  with asm.Buffer(places) as buffer:
    return report(f"""
      s_load_dwordx2 s[8:9], s[0:1], 0x0
      v_mov_b32 v1, 0
      s_mov_b32 s20, {rounds * count}
      s_waitcnt lgkmcnt(0)
      again:
      global_load_dword v1, v1, s[8:9]
      s_waitcnt vmcnt(0)
      s_sub_u32 s20, s20, 1
      s_cmp_lg_u32 s20, 0
      s_cbranch_scc1 again""", buffer, **attributes)


def lines(*texts):
  return "\n".join(texts) + "\n"


class UnitTest(absltest.TestCase):
  """What keeps a SIMD busy."""

  def test_vector(self):
    self.assertEqual(clocks("v_mov_b32 v4, v5\n"), 4)
    # Two waves a SIMD take turns; four SIMDs do not.
    self.assertEqual(clocks("v_mov_b32 v4, v5\n", block=256), 4)
    self.assertEqual(clocks("v_mov_b32 v4, v5\n", block=512, vgprs=64), 8)

  def test_workgroups_of_one_wave(self):
    # As many as a unit has SIMDs have one each; with twice as many two take
    # turns on each, as two workgroups of four waves do.
    body = "v_mov_b32 v4, v5\n"
    times = lambda groups, block: clocks(
        body, grid=groups * UNITS, block=block, vgprs=64)
    self.assertEqual(times(4, 64), 4)
    self.assertEqual(times(8, 64), 8)
    self.assertEqual(times(2, 256), 8)
    # Two waves have two SIMDs.
    self.assertEqual(times(2, 128), 4)

  def test_transcendental(self):
    body = "v_exp_f32 v4, v5\n"
    self.assertEqual(clocks(body), TRANSCENDENTAL)
    self.assertEqual(clocks(body, block=512, vgprs=64), 2 * TRANSCENDENTAL)
    # It is the vector unit that it keeps busy.
    self.assertEqual(clocks(body + "v_mov_b32 v6, v7\n"), TRANSCENDENTAL + 4)

  def test_matrix(self):
    fill = lines(*(f"v_mov_b32 v{i}, 0" for i in range(8, 128)))
    one = lambda d, a=8, c=None: (
        f"{MFMA} v[{d}:{d + 15}], v[{a}:{a + 1}], v[10:11], "
        f"v[{c or d}:{(c or d) + 15}]\n")
    # To registers of its own, and to the same ones: the unit is the bound.
    self.assertEqual(clocks(one(32) + one(48), before=fill), 2 * MATRIX)
    self.assertEqual(clocks(one(32), before=fill), MATRIX)
    # What another reads takes as long as the passes and four slots more.
    self.assertEqual(clocks(one(32) + one(48, a=32) + one(32, a=48),
                            before=fill + one(48)), 2 * (MATRIX + 16) + MATRIX)

  def test_matrix_beside_vector(self):
    fill = lines(*(f"v_mov_b32 v{i}, 0" for i in range(8, 64)))
    one = (f"{MFMA} v[32:47], v[8:9], v[10:11], v[32:47]\n")
    some = MATRIX // 4 - 1
    self.assertEqual(clocks(one + "v_mov_b32 v4, v5\n" * some, before=fill),
                     MATRIX)
    self.assertEqual(
        clocks(one + "v_mov_b32 v4, v5\n" * (some + 5), before=fill),
        MATRIX + 20)
    # It takes a slot of the other vector instructions, other waves' too.
    self.assertEqual(
        clocks(one + "v_mov_b32 v4, v5\n" * (some + 5), before=fill,
               block=512, vgprs=64), 2 * (MATRIX + 20))
    # A vector instruction that needs the result.
    self.assertEqual(clocks(one + "v_mov_b32 v4, v32\n", before=fill),
                     MATRIX + 16 + SLOT)

  def test_scalar_and_waits(self):
    self.assertEqual(clocks("s_add_u32 s20, s21, s22\n"), SLOT)
    self.assertEqual(clocks("s_nop 4\n"), 5 * SLOT)
    self.assertEqual(clocks("s_waitcnt vmcnt(0)\n"), SLOT)
    # A scalar load that is waited for.
    self.assertEqual(
        clocks("s_load_dword s20, s[0:1], 0x0\ns_waitcnt lgkmcnt(0)\n"),
        PARAMETERS["scalar_latency"] + SLOT)

  def test_taken_branch(self):
    loop = lambda count: report(f"""
      s_movk_i32 s20, {count}
      again:
      s_sub_u32 s20, s20, 1
      s_cmp_lg_u32 s20, 0
      s_cbranch_scc1 again""")["clocks"]
    self.assertEqual(loop(20) - loop(10),
                     10 * (3 * SLOT + PARAMETERS["taken_branch"]))


class LdsTest(absltest.TestCase):

  def read(self, stride, **attributes):
    """Of four reads and a wait for them."""
    fill = lines(f"v_mul_u32_u24 v1, {stride}, v0", "v_mov_b32 v2, 0",
                 "ds_write_b32 v1, v2", "s_waitcnt lgkmcnt(0)")
    body = lines(*(f"ds_read_b32 v{i}, v1" for i in range(4, 8)),
                 "s_waitcnt lgkmcnt(0)")
    return clocks(body, before=fill, lds=8192, **attributes)

  def test_bank_conflicts(self):
    banks = 64 if asm.ARCH == "gfx950" else 32
    free = 64 // banks
    # The last of the reads comes after three slots.
    self.assertEqual(self.read(4), 3 * SLOT + free + 100 + SLOT)
    # All lanes of one bank: a clock each.
    self.assertEqual(self.read(4 * banks if banks == 32 else 128),
                     4 * 64 + 100 + SLOT if banks == 32
                     else 4 * 32 + 100 + SLOT)
    last = json.loads(call("amdgpu_sim_clock"))
    self.assertGreater(last["lds_conflicts"], 16 * 4 * 30)

  def test_waves_share_it(self):
    # Four waves' reads of 16 bytes: 8 or 4 clocks each, one after another.
    clocks_each = 4 if asm.ARCH == "gfx950" else 8
    fill = lines("v_lshlrev_b32 v1, 4, v0", "v_mov_b32 v4, 0",
                 "v_mov_b32 v5, 0", "v_mov_b32 v6, 0", "v_mov_b32 v7, 0",
                 "ds_write_b128 v1, v[4:7]", "s_waitcnt lgkmcnt(0)")
    body = "ds_read_b128 v[8:11], v1\n" * 8 + "s_waitcnt lgkmcnt(0)\n"
    times = [clocks(body, before=fill, lds=4096, block=64 * waves)
             for waves in (1, 4)]
    self.assertEqual(times[0], max(8 * clocks_each, 7 * SLOT + clocks_each)
                     + 100 + SLOT)
    # Some waves' reads are under way while others wait.
    self.assertEqual(times[1], max(times[0], 4 * 8 * clocks_each))


class MemoryTest(absltest.TestCase):

  def load(self, step, **attributes):
    """Of a load of one line that moves on, and a wait for it."""
    before = lines("s_load_dwordx2 s[8:9], s[0:1], 0x0", "v_mov_b32 v1, 0",
                   "s_waitcnt lgkmcnt(0)")
    body = lines("global_load_dword v2, v1, s[8:9]",
                 f"v_add_u32 v1, {step}, v1", "s_waitcnt vmcnt(0)")
    with asm.Buffer(np.zeros(1 << 14, np.uint8)) as buffer:
      return clocks(body, buffer, before=before, **attributes)

  def test_latencies(self):
    # The L1's: its clocks and latency, then the wait's slot.
    self.assertEqual(self.load(0), SLOT + 200 + SLOT)
    # A line at 16 bytes a clock.
    self.assertEqual(self.load(256), SLOT + LINE / 16 + 1000 + SLOT)

  def test_pointers(self):
    """A chain of pointers through 64 lines, which the L1 holds."""
    count = 64
    chain = lambda rounds, **attributes: (
        chase(count, rounds, **attributes)["clocks"])
    loop = 4 * SLOT + PARAMETERS["taken_branch"]  # After the load's slot.
    once = chain(1)
    # The second time around, the L1's latency: a slot is the load's own.
    self.assertEqual(chain(2) - once,
                     count * (PARAMETERS["l1_latency"] + SLOT + loop))
    # All units read the chain: it comes to each die once, and from HBM once.
    latency, byte = behind(DIES / UNITS, 1 / UNITS)
    self.assertAlmostEqual(
        once - chain(1, grid=UNITS),
        count * (PARAMETERS["hbm_latency"] - latency + LINE / 16 - LINE * byte))

  def test_what_a_workgroup_asks_for_again(self):
    """A cache has it that has room for what was asked for since."""
    count = 2 * 64 * 16384 // LINE  # Of lines: twice what an L1 holds.
    loop = 5 * SLOT + PARAMETERS["taken_branch"] + LINE / 16
    try:
      for l2, mall, latency in ((1, 0, 600), (1, 1, 600), (0, 1, 800),
                                (0, 0, 1000)):
        # For all, or for all but one.
        set_parameter("l2_bytes", LINE * (count - 1 + l2))
        set_parameter("mall_bytes", LINE * (count - 1 + mall))
        once, twice = (chase(count, rounds, LINE)["clocks"]
                       for rounds in (1, 2))
        self.assertEqual(twice - once, count * (latency + loop))
    finally:
      for name in ("l2_bytes", "mall_bytes"):
        set_parameter(name, PARAMETERS[name])

  def test_latency_grows_with_busy_units(self):
    """From that of an idle device, with the others that are busy."""
    idle, loaded = np.array([200, 300, 400]), np.array([600, 800, 1000])
    names = ("l2_idle", "mall_idle", "hbm_idle")
    loop = 5 * SLOT + PARAMETERS["taken_branch"]
    try:
      for name, value in zip(names, idle, strict=True):
        set_parameter(name, value)
      for units in (1, UNITS // 2, UNITS):
        # All read the chain: it comes to each die once, and from HBM once.
        latency, byte = behind(
            min(DIES, units) / units, 1 / units, units,
            idle + (loaded - idle) * min(1, (units - 1) / (0.75 * (UNITS - 1))))
        some, more = (chase(count, grid=units)["clocks"] for count in (32, 64))
        self.assertAlmostEqual(more - some,
                               32 * (latency + LINE * byte + loop))
    finally:
      for name in names:
        set_parameter(name, PARAMETERS[name])

  def test_another_wave_hides_latency(self):
    # The other waves' loads are on their way at the same time.
    self.assertEqual(self.load(256, block=512, vgprs=64), self.load(256))

  def test_rate(self):
    before = lines("s_load_dwordx2 s[8:9], s[0:1], 0x0",
                   "v_lshlrev_b32 v1, 4, v0", "s_waitcnt lgkmcnt(0)")
    body = lines("global_load_dwordx4 v[4:7], v1, s[8:9]",
                 "v_add_u32 v1, 0x400, v1")
    with asm.Buffer(np.zeros(1 << 15, np.uint8)) as buffer:
      self.assertEqual(clocks(body, buffer, before=before), 1024 / 16)
      last = json.loads(call("amdgpu_sim_clock"))
    self.assertEqual(last["memory_bytes"], 16 * 1024)
    self.assertEqual(last["l1_bytes"], 16 * 1024)

  def test_atomics(self):
    before = lines("s_load_dwordx2 s[8:9], s[0:1], 0x0",
                   "v_lshlrev_b32 v1, 2, v0", "v_mov_b32 v2, 1",
                   "s_waitcnt lgkmcnt(0)")
    body = "global_atomic_add v1, v2, s[8:9]\n"
    load = "global_load_dword v3, v1, s[8:9] offset:1024\n"
    with asm.Buffer(np.zeros(1 << 12, np.uint8)) as buffer:
      # 64 lanes of 4 bytes, at 2 a clock, of a die of which this unit is the
      # only one.
      self.assertEqual(clocks(body, buffer, before=before), 256 / 2)
      self.assertAlmostEqual(
          clocks(body, buffer, before=before, grid=UNITS),
          256 / 2 * UNITS / DIES)
      # A load beside them goes its own way, and hits the L1.
      self.assertEqual(clocks(body + load, buffer, before=before), 256 / 2)

  def test_addresses(self):
    """Of loads that hit the L1."""
    before = lines("s_load_dwordx2 s[8:9], s[0:1], 0x0",
                   "v_lshlrev_b32 v1, 4, v0", "s_waitcnt lgkmcnt(0)",
                   "global_load_dwordx4 v[4:7], v1, s[8:9]",
                   "s_waitcnt vmcnt(0)")
    one, four = ("global_load_dword v2, v3, s[8:9]\n",
                 "global_load_dwordx4 v[4:7], v1, s[8:9]\n")
    before += "v_mov_b32 v3, 0\n"
    with asm.Buffer(np.zeros(1024, np.uint8)) as buffer:
      self.assertEqual(clocks(one, buffer, before=before), SLOT)
      try:
        set_parameter("address_clocks", 12)
        self.assertEqual(clocks(one, buffer, before=before), 12)
        # 1 KiB, at 64 bytes a clock.
        self.assertEqual(clocks(four, buffer, before=before), 16)
      finally:
        set_parameter("address_clocks", PARAMETERS["address_clocks"])

  def clocks_of_a_byte(self, place, size, rounds=1):
    """Of workgroups, one a unit, that each read 4 KiB of `size` bytes.

    Args:
      place: instructions that make s20 of s2, the workgroup's number: which 4
        KiB.
      size: of the buffer.
      rounds: of workgroups.
    """
    body = lines("global_load_dwordx4 v[4:7], v1, s[8:9]",
                 "v_add_u32 v1, 0x400, v1") * 4
    before = lines("s_load_dwordx2 s[8:9], s[0:1], 0x0", *place,
                   "s_lshl_b32 s20, s20, 12", "v_and_b32 v1, 63, v0",
                   "v_lshlrev_b32 v1, 4, v1", "v_add_u32 v1, s20, v1",
                   "s_waitcnt lgkmcnt(0)")
    with asm.Buffer(np.zeros(size, np.uint8)) as buffer:
      # 512 registers: a workgroup of four waves fills a unit.
      told = report(before + body, buffer, grid=rounds * UNITS, block=256,
                    vgprs=512)
    self.assertEqual((told["occupancy"], told["rounds"]), (1, rounds))
    # The other waves find it in the L1.
    self.assertEqual(told["memory_bytes"], 4096)
    return told["busy"]["memory"] * told["unit_clocks"] / 4096

  def test_hbm_is_shared(self):
    # Everyone has its own.
    self.assertAlmostEqual(
        self.clocks_of_a_byte(["s_mov_b32 s20, s2"], 4096 * UNITS),
        UNITS * PEAK * PARAMETERS["sustained"] / 500)

  def test_what_others_read_too(self):
    # It comes to each die once, and from HBM once.
    self.assertAlmostEqual(
        self.clocks_of_a_byte(["s_mov_b32 s20, 0"], 4096),
        behind(DIES / UNITS, 1 / UNITS)[1])

  def test_copy(self):
    """What each unit copies of its own comes and goes at HBM's rate."""
    body = lines("global_load_dwordx4 v[4:7], v1, s[8:9]",
                 "s_waitcnt vmcnt(0)",
                 "global_store_dwordx4 v1, v[4:7], s[10:11]",
                 "v_add_u32 v1, 0x1000, v1")
    def told(count):
      before = lines(
          "s_load_dwordx4 s[8:11], s[0:1], 0x0", "s_lshl_b32 s20, s2, 17",
          "v_lshlrev_b32 v1, 4, v0", "v_add_u32 v1, s20, v1",
          "s_waitcnt lgkmcnt(0)")
      zeros = np.zeros(UNITS << 17, np.uint8)
      with asm.Buffer(zeros) as source, asm.Buffer(zeros) as to:
        # Four waves: while one waits for its load, memory serves others.
        return report(before + body * count, source, to, grid=UNITS,
                      block=256, vgprs=512)
    some, more = told(16), told(32)
    # 4 KiB in and 4 KiB out, of each unit.
    moved = 16 * 2 * 4096 * UNITS
    self.assertEqual((more["memory_bytes"] - some["memory_bytes"]) * UNITS,
                     moved)
    self.assertAlmostEqual(
        more["hbm_gigabytes"] * more["microseconds"] * 1e3, 2 * moved, delta=1)
    microseconds = moved / 500e3  # hbm_gigabytes * hbm_efficiency
    self.assertAlmostEqual(more["microseconds"] - some["microseconds"],
                           microseconds, delta=0.01 * microseconds)
    self.assertEqual(more["bound"], "memory")

  def test_dies(self):
    """Workgroups of a die that read the same need it once."""
    # The die's number: each has its own. That of every so many workgroups: all
    # dies have all of these.
    same = self.clocks_of_a_byte([f"s_and_b32 s20, s2, {DIES - 1}"],
                                 4096 * DIES)
    self.assertAlmostEqual(same, behind(DIES / UNITS, DIES / UNITS)[1])
    count = UNITS // 8 if UNITS % 8 == 0 else UNITS // 10
    step = -(-65536 // count)  # s2 * step >> 16: s2 / count.
    others = self.clocks_of_a_byte(
        [f"s_mul_i32 s20, s2, {step}", "s_lshr_b32 s20, s20, 16"],
        4096 * (UNITS // count))
    parts = UNITS // count
    self.assertAlmostEqual(
        others, behind(parts * DIES / UNITS, parts / UNITS)[1])
    if DIES > 1:
      self.assertGreater(others, same)

  def test_room_in_caches(self):
    """The second round finds what they kept of the first."""
    place = ["s_cmp_ge_u32 s2, " + str(UNITS),
             f"s_cselect_b32 s21, {UNITS}, 0", "s_sub_u32 s20, s2, s21"]
    size = 4096 * UNITS
    # In the last-level cache all, half of it or nothing.
    for room in (1, 0.5, 0):
      with self.subTest(room=room):
        try:
          set_parameter("l2_bytes", 0)
          set_parameter("mall_bytes", room * size)
          self.assertAlmostEqual(
              self.clocks_of_a_byte(place, size, rounds=2),
              behind(1, 1 - room / 2)[1])
        finally:
          for name in ("l2_bytes", "mall_bytes"):
            set_parameter(name, PARAMETERS[name])
    # What all read: an L2 has room for it, or for half of it.
    for room in (1, 0.5):
      with self.subTest(l2=room):
        try:
          set_parameter("l2_bytes", room * 4096)
          self.assertAlmostEqual(
              self.clocks_of_a_byte(["s_mov_b32 s20, 0"], 4096, rounds=2),
              behind(DIES / UNITS * (1 - room / 2), 0.5 / UNITS)[1])
        finally:
          set_parameter("l2_bytes", PARAMETERS["l2_bytes"])

  def test_stalls_by_instruction(self):
    self.load(256)
    last = json.loads(call("amdgpu_sim_clock"))
    place = last["places"][0]
    self.assertEqual(place["text"], "s_waitcnt vmcnt(0)")
    # After the load's slot and the addition's.
    self.assertEqual(place["stalls"]["vmcnt"] / place["count"],
                     SLOT + LINE / 16 + 1000 - 2 * SLOT)
    self.assertEqual(last["bound"], "latency: vmcnt")


class LaunchTest(absltest.TestCase):

  def test_barrier(self):
    # Wave 1 comes 25 slots later; both go on ten clocks after it.
    text = lambda count: lines(
        "v_readfirstlane_b32 s20, v0", "s_cmp_lg_u32 s20, 0",
        "s_cbranch_scc0 first", "s_nop 9\n" * 10, "first:",
        "s_barrier\n" * count)
    some, more = (report(text(n), block=128) for n in (1, 9))
    self.assertEqual(more["clocks"] - some["clocks"],
                     8 * (SLOT + PARAMETERS["barrier"]))
    # The first wave has branched instead of 100 slots.
    self.assertEqual(
        some["stalls"]["barrier"],
        100 * SLOT - PARAMETERS["taken_branch"]
        + 2 * PARAMETERS["barrier"])

  def test_rounds(self):
    units = UNITS
    # Of 4 waves, which with 128 registers fit four to a SIMD.
    body = "v_mov_b32 v4, v5\n" * 100
    one, all_, more = (
        report(body, grid=grid, block=256, vgprs=128)
        for grid in (1, 4 * units, 4 * units + 1))
    self.assertEqual([r["occupancy"] for r in (one, all_, more)], [4, 4, 4])
    self.assertEqual([r["rounds"] for r in (one, all_, more)], [1, 1, 2])
    self.assertEqual(all_["clocks"] - one["clocks"], 3 * 4 * 100)
    self.assertEqual(more["clocks"], all_["clocks"] + one["clocks"])

  def test_uneven(self):
    """Workgroups take the place of others that have ended."""
    def told(longs):
      return report(f"""
        s_cmp_{longs}
        s_cselect_b32 s20, 640, 64
        again:
        s_sub_u32 s20, s20, 1
        s_cmp_lg_u32 s20, 0
        s_cbranch_scc1 again""", grid=4 * UNITS, block=256)
    short = told("lt_u32 s2, 0")
    self.assertEqual(short["rounds"], 4)
    # Half of the units have a long one each from the start, which lasts ten
    # times as long, and the others all that is short meanwhile: seven each.
    early = told(f"lt_u32 s2, {UNITS // 2}")
    self.assertEqual(early["rounds"], 1)
    self.assertAlmostEqual(early["clocks"], 10 * short["unit_clocks"],
                           delta=0.01 * early["clocks"])
    # Behind three or four short ones.
    late = told(f"gt_u32 s2, {4 * UNITS - UNITS // 2}")
    self.assertBetween(late["clocks"], 12.8 * short["unit_clocks"],
                       14.1 * short["unit_clocks"])

  def test_most_have_nothing_to_do(self):
    """Which workgroups end at once is known exactly, and none is traced."""
    def told(low, high):
      return report(f"""
        s_and_b32 s20, s2, 3
        s_cmp_ge_u32 s20, {low}
        s_cselect_b32 s21, 1, 0
        s_cmp_lt_u32 s20, {high}
        s_cselect_b32 s20, s21, 0
        s_mul_i32 s20, s20, 4000
        again:
        s_sub_u32 s20, s20, 1
        s_cmp_gt_i32 s20, 0
        s_cbranch_scc1 again""", grid=4 * UNITS, block=512, vgprs=128)
    alone, some = told(0, 4), told(0, 1)
    # A round of two for each unit, and one in which a fourth is left of two.
    self.assertEqual(alone["rounds"], 2)
    self.assertEqual(alone["occupancy"], 2)
    self.assertAlmostEqual(some["rounds"], 1, delta=0.01)
    self.assertEqual(some["unit_clocks"], alone["unit_clocks"])
    # The first of those that a unit would hold has nothing to do.
    self.assertEqual(told(1, 2)["unit_clocks"], alone["unit_clocks"])

  def test_those_with_nothing_to_do_ask_for_nothing(self):
    """Memory is shared by the units that have something to do."""
    def told(grid):
      body = lines(
          f"s_cmp_ge_u32 s2, {UNITS // 2}", "s_cbranch_scc1 nothing",
          "s_load_dwordx2 s[8:9], s[0:1], 0x0", "s_lshl_b32 s20, s2, 18",
          "v_lshlrev_b32 v1, 4, v0", "v_add_u32 v1, s20, v1",
          "s_waitcnt lgkmcnt(0)") + lines(
              "global_load_dwordx4 v[4:7], v1, s[8:9]",
              "v_add_u32 v1, 0x1000, v1") * 64 + "nothing:\n"
      with asm.Buffer(np.zeros(UNITS // 2 << 18, np.uint8)) as buffer:
        return report(body, buffer, grid=grid, block=256, vgprs=512)
    alone, some = told(UNITS // 2), told(2 * UNITS)
    self.assertEqual((alone["rounds"], alone["occupancy"]), (1, 1))
    self.assertAlmostEqual(some["rounds"], 1, delta=0.2)
    self.assertAlmostEqual(some["unit_clocks"], alone["unit_clocks"],
                           delta=0.1 * alone["unit_clocks"])

  def test_occupancy(self):
    for attributes, expected in (
        ({"vgprs": 512}, 1), ({"vgprs": 168}, 3), ({"vgprs": 64}, 8),
        ({"vgprs": 64, "lds": 20000}, 8 if asm.ARCH == "gfx950" else 3)):
      told = report("s_nop 0", block=256, **attributes)
      self.assertEqual(told["occupancy"], expected, attributes)

  def test_microseconds(self):
    peak = PEAK
    idle = report("v_mov_b32 v4, v5\n" * 100)
    self.assertAlmostEqual(idle["gigahertz"], peak * 0.875)
    self.assertAlmostEqual(idle["microseconds"],
                           3 + idle["clocks"] / (875 * peak))
    one = f"{MFMA} v[32:47], v[8:9], v[10:11], v[32:47]\n"
    fill = lines(*(f"v_mov_b32 v{i}, 0" for i in range(8, 64)))
    for grid in (UNITS, UNITS // 2):  # Half of the device leaves it cooler.
      busy = report(fill + one * 100, block=256, grid=grid)
      share = 100 * MATRIX / busy["clocks"]
      self.assertAlmostEqual(busy["busy"]["matrix"], share)
      self.assertAlmostEqual(busy["matrix_share"], share * grid / UNITS)
      self.assertAlmostEqual(
          busy["gigahertz"],
          peak * (0.875 - 0.25 * (share * grid / UNITS)**2))
      self.assertEqual(busy["bound"], "matrix")
      # 32 x 32 numbers of 8 products and sums each, of four waves.
      self.assertAlmostEqual(
          busy["teraflops"] * busy["microseconds"] * 1e6,
          grid * 4 * 100 * 2 * 32 * 32 * 8, delta=1)

  def test_again(self):
    with asm.Module(asm.assemble(asm.kernel_file(
        [asm.Kernel("s_load_dword s20, s[0:1], 0x0\n"
                    "s_waitcnt lgkmcnt(0)")]))) as module:
      module.launch("kernel", 0)
      before = json.loads(call("amdgpu_sim_clock"))
      try:
        set_parameter("scalar_latency", 500)
        again = json.loads(call("amdgpu_sim_clock_again"))
      finally:
        set_parameter("scalar_latency", PARAMETERS["scalar_latency"])
    self.assertEqual(again["clocks"] - before["clocks"], 200)

  def test_unknown_parameter(self):
    self.assertEqual(set_parameter("speed", 1), 0)


class PublishedTest(absltest.TestCase):
  """Chases of pointers by the devices' own numbers, in a process of its own."""

  # Clocks from the L1 and the L2, nanoseconds from the last-level cache and
  # HBM: clock/device.cc has the sources.
  CLOCKS, NANOSECONDS = {
      "gfx90a": ((124, 292), (None, 684 / 1.7)),
      "gfx942": ((116, 288), (218, 876 / 2.1)),
      "gfx950": ((112, 256), (444 / 2.2, 740 / 2.2))}[asm.ARCH]
  L1, L2 = (16 << 10, 8 << 20) if asm.ARCH == "gfx90a" else (32 << 10, 4 << 20)
  # That at which an idle device runs.
  GIGAHERTZ = PEAK * (0.85 if asm.ARCH == "gfx950" else 1)
  LOOP = 3 * SLOT + 16  # What a pointer takes beside its load and the wait.

  def told(self, *chases):
    """What the second of two chases takes more than the first: clocks of a
    pointer, and nanoseconds, without the loop.

    Args:
      chases: each the bytes that it goes through and how often.
    """
    counts = [size // LINE for size, _ in chases]
    program = "import clock_test as t, json" + "".join(
        f"\nprint(json.dumps(t.chase({count}, {rounds}, t.LINE)))"
        for count, (_, rounds) in zip(counts, chases, strict=True))
    environment = {name: value for name, value in os.environ.items()
                   if name != "AMDGPU_SIM_CLOCK_DEVICE"}
    done = subprocess.run(
        [sys.executable, "-c", program],
        env=environment | {"PYTHONPATH": os.pathsep.join(
            [os.path.dirname(os.path.abspath(__file__)), *sys.path])},
        capture_output=True, text=True, check=True)
    first, second = map(json.loads, done.stdout.splitlines())
    pointers = (counts[1] * chases[1][1] - counts[0] * chases[0][1])
    self.assertAlmostEqual(second["gigahertz"], self.GIGAHERTZ)
    clocks_each = (second["clocks"] - first["clocks"]) / pointers - self.LOOP
    microseconds = second["microseconds"] - first["microseconds"]
    return clocks_each, (
        1000 * microseconds / pointers - self.LOOP / self.GIGAHERTZ)

  def test_caches(self):
    for size, clocks_each in zip((self.L1, self.L2), self.CLOCKS, strict=True):
      found = self.told((size, 1), (size, 2))
      self.assertAlmostEqual(found[0], clocks_each, places=6)
      self.assertAlmostEqual(found[1], clocks_each / self.GIGAHERTZ, places=4)

  def test_last_level_and_hbm(self):
    # What is more than an L2 holds; and what no cache has had.
    more = self.L2 + (64 << 10)
    for chases, nanoseconds in (
        ([(more, 1), (more, 2)], self.NANOSECONDS[0] or self.NANOSECONDS[1]),
        ([(more // 2, 1), (more, 1)], self.NANOSECONDS[1])):
      found = self.told(*chases)
      self.assertAlmostEqual(found[0], nanoseconds * PEAK, places=6)
      if asm.ARCH != "gfx950":  # Whose model never runs at its peak.
        self.assertAlmostEqual(found[1], nanoseconds, places=4)


class EnvironmentTest(absltest.TestCase):
  """In processes of their own: the environment is read once."""

  PROGRAM = """
import asm, numpy as np
with asm.Buffer(np.zeros(4, np.uint32)) as out:
  asm.launch('''
    s_load_dwordx2 s[8:9], s[0:1], 0x0
    v_mov_b32 v1, 0
    v_mov_b32 v2, 1
    s_waitcnt lgkmcnt(0)MORE
    global_atomic_add v1, v2, s[8:9]''', out, grid=GRID)
  print(int(out.read()[0]))
"""

  def run_program(self, grid=600, more="", **environment):
    program = self.PROGRAM.replace("GRID", str(grid)).replace("MORE", more)
    done = subprocess.run(
        [sys.executable, "-c", program],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(
            [os.path.dirname(os.path.abspath(__file__)), *sys.path]),
             "AMDGPU_SIM_CLOCK": "", **environment},
        capture_output=True, text=True, check=False)
    return done

  def test_off(self):
    done = self.run_program()
    self.assertEqual((done.stdout.strip(), done.stderr), (str(64 * 600), ""))

  def test_text(self):
    done = self.run_program(AMDGPU_SIM_CLOCK="-")
    self.assertEqual(done.stdout.strip(), str(64 * 600))
    self.assertRegex(done.stderr, r"kernel on MI\w+: [\d.]+ us predicted, "
                     "bound by ")
    self.assertRegex(done.stderr, r"0 TFLOP/s of matrix instructions, "
                     r"[\d.e-]+ GB/s of HBM")
    self.assertRegex(done.stderr, "busy: matrix 0.0%.*bank conflicts 0")
    self.assertRegex(done.stderr, "s_waitcnt lgkmcnt.* x[0-9]+: lgkmcnt")

  def test_file(self):
    path = self.create_tempfile().full_path
    self.run_program(AMDGPU_SIM_CLOCK=path)
    with open(path) as stream:
      (line,) = stream.read().splitlines()
    self.assertEqual(json.loads(line)["workgroups"], 600)

  def test_svg(self):
    path = self.create_tempfile().full_path
    self.run_program(grid=1, AMDGPU_SIM_CLOCK=os.devnull,
                     AMDGPU_SIM_CLOCK_SVG=path)
    root = xml.etree.ElementTree.parse(path).getroot()
    name = lambda tag: "{http://www.w3.org/2000/svg}" + tag
    texts = [text.text for text in root.iter(name("text"))]
    self.assertRegex(texts[0], "kernel on MI.*one compute unit, predicted")
    self.assertIn("0.0, SIMD 0", texts)
    shown = {}
    for rect in root.iter(name("rect")):
      shown[rect.find(name("title")).text] = float(rect.get("width"))
    # Of the load, whose slot passes until the wait, and two more slots.
    (wait,) = [title for title in shown if title.startswith("lgkmcnt, before")]
    self.assertEqual(wait, "lgkmcnt, before s_waitcnt lgkmcnt(0)")
    self.assertEqual(shown[wait], 200 - 3 * SLOT)
    self.assertEqual(shown["v_mov_b32_e32 v2, 1"], SLOT)

  def test_only_some_workgroups(self):
    # Others of the first round begin, for 8192 instructions. Those of one unit
    # go on, and four probes; more if these differ.
    for nops, groups in ((5000, 305), (9000, -(-305 // UNITS) + 4 - 1)):
      done = self.run_program(AMDGPU_SIM_CLOCK=os.devnull,
                              AMDGPU_SIM_TURN="1", AMDGPU_SIM_CLOCK_ONLY="1",
                              grid=305, more="\n s_nop 0" * nops)
      self.assertEqual(int(done.stdout), 64 * groups)

  def test_no_such_device(self):
    done = self.run_program(AMDGPU_SIM_CLOCK="-",
                            AMDGPU_SIM_CLOCK_DEVICE="MI1")
    self.assertIn("AMDGPU_SIM_CLOCK_DEVICE is no device of", done.stderr)


if __name__ == "__main__":
  absltest.main()
