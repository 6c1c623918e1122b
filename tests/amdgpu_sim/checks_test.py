# SPDX-License-Identifier: Apache-2.0
"""The simulator's checks: faults are planted and must be found.

Each fault has its program, the same program without it, and what the report
must say. FaultTest runs the first with the check on, and all of them in a
process that has the checks off.
"""

import dataclasses
import importlib.util
import os
import re
import subprocess
import sys
import tempfile

import numpy as np
from absl.testing import absltest, parameterized

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
# Two checks only print otherwise.
os.environ.setdefault("AMDGPU_SIM_CHECKS", "+all")
# pylint: disable=g-import-not-at-top,g-bad-import-order
import asm

# A workgroup that executes so many instructions never ends.
os.environ["AMDGPU_SIM_LIMIT"] = "1000000"
ILLEGAL_ADDRESS, LAUNCH_FAILURE = 700, 719
# s[8:9] and s[10:11] are two buffers of 64 words for each of two workgroups, v1
# four times the work-item.
_PROLOGUE = """
s_load_dwordx4 s[8:11], s[0:1], 0x0
v_lshlrev_b32 v1, 2, v0
s_waitcnt lgkmcnt(0)
"""
# s[12:15]: a raw buffer of all there may be beyond s[8:9], s[16:19] one of the
# 512 bytes that there are.
_BUFFER = """
s_mov_b32 s12, s8
s_mov_b32 s13, s9
s_mov_b32 s14, 0x1000
s_mov_b32 s15, 0x27000
s_mov_b64 s[16:17], s[12:13]
s_movk_i32 s18, 0x200
s_mov_b32 s19, 0x27000
"""


@dataclasses.dataclass(frozen=True)
class Fault:
  """A planted fault.

  Attributes:
    check: its name in AMDGPU_SIM_CHECKS.
    wrong: instructions after the prologue; `right`: without the fault.
    instruction: a regular expression of what the report calls it.
    lane: that the report names, or None.
    offset: of the address that the report names, from the first buffer's
      begin; None if there is none.
  """

  name: str
  check: str
  wrong: str
  right: str
  instruction: str
  lane: int | None = None
  offset: int | None = None
  block: int = 64
  grid: int = 1
  written: bool = True  # The first buffer was.
  freed: bool = False  # The first buffer was, in the wrong run.
  lds: int = 1024
  vgprs: int = 512


_WAIT = "s_waitcnt vmcnt(0) lgkmcnt(0)\n"
_LOAD = "global_load_dword v2, v1, s[8:9]{}\n" + _WAIT
_STORE = "global_store_dword v1, v0, s[8:9]{}\n"
_ATOMIC = "global_atomic_add v1, v0, s[8:9]{}\n"
# Wave 1 of two goes to the label, wave 0 falls through.
_SECOND_WAVE = """
v_readfirstlane_b32 s20, v0
s_cmp_lg_u32 s20, 0
s_cbranch_scc1 second
"""


FAULTS = [
    Fault("load_beyond", "out_of_bounds", _LOAD.format(" offset:260"),
          _LOAD.format(" offset:256"), "global_load_dword", 63, 512),
    Fault("load_before", "out_of_bounds", _LOAD.format(" offset:-4"),
          _LOAD.format(""), "global_load_dword", 0, -4),
    Fault("wide_load_beyond", "out_of_bounds",
          "global_load_dwordx4 v[4:7], v1, s[8:9] offset:256\n" + _WAIT,
          "global_load_dwordx4 v[4:7], v1, s[8:9] offset:244\n" + _WAIT,
          "global_load_dwordx4", 61, 500),
    Fault("store_beyond", "out_of_bounds", _STORE.format(" offset:264"),
          _STORE.format(""), "global_store_dword", 62, 512),
    Fault("store_byte_beyond", "out_of_bounds",
          "global_store_byte v0, v0, s[8:9] offset:449",
          "global_store_byte v0, v0, s[8:9] offset:448",
          "global_store_byte", 63, 512),
    Fault("atomic_beyond", "out_of_bounds", _ATOMIC.format(" offset:512"),
          _ATOMIC.format(""), "global_atomic_add", 0, 512),
    Fault("flat_load_of_null", "out_of_bounds",
          "v_mov_b32 v2, 0\nv_mov_b32 v3, 0\nflat_load_dword v4, v[2:3]\n"
          + _WAIT, "v_mov_b32 v2, s8\nv_mov_b32 v3, s9\n"
          "flat_load_dword v4, v[2:3]\n" + _WAIT, "flat_load_dword", 0),
    Fault("scalar_load_beyond", "out_of_bounds",
          "s_load_dword s20, s[8:9], 0x200\n" + _WAIT,
          "s_load_dword s20, s[8:9], 0x1fc\n" + _WAIT, "s_load_dword",
          None, 512),
    Fault("buffer_beyond", "out_of_bounds", _BUFFER
          + "buffer_load_dword v2, v1, s[12:15], 0 offen offset:260\n" + _WAIT,
          # The same address beyond num_records reads as zero.
          _BUFFER
          + "buffer_load_dword v2, v1, s[16:19], 0 offen offset:260\n" + _WAIT,
          "buffer_load_dword", 63, 512),
    Fault("buffer_store_beyond", "out_of_bounds", _BUFFER
          + "buffer_store_dword v0, v1, s[12:15], 0 offen offset:512\n",
          _BUFFER
          + "buffer_store_dword v0, v1, s[16:19], 0 offen offset:512\n",
          "buffer_store_dword", 0, 512),
    Fault("lds_beyond", "out_of_bounds",
          "ds_write_b32 v1, v0 offset:772\n" + _WAIT,
          "ds_write_b32 v1, v0 offset:768\n" + _WAIT, "ds_write_b32", 63),
    Fault("use_after_free", "use_after_free", _LOAD.format(""),
          _LOAD.format(""), "global_load_dword", 0, 0, freed=True),
    Fault("store_after_free", "use_after_free", _STORE.format(""),
          _STORE.format(""), "global_store_dword", 0, 0, freed=True),
    Fault("misaligned_atomic", "misaligned", _ATOMIC.format(" offset:2"),
          _ATOMIC.format(" offset:4"), "global_atomic_add", 0, 2),
    Fault("misaligned_lds_atomic", "misaligned",
          "ds_write_b32 v1, v0\nds_write_b32 v1, v0 offset:4\n" + _WAIT
          + "ds_add_u32 v1, v0 offset:2\n" + _WAIT,
          "ds_write_b32 v1, v0\n" + _WAIT + "ds_add_u32 v1, v0\n" + _WAIT,
          "ds_add_u32", 0),
    Fault("uninitialized_global", "uninitialized", _LOAD.format(""),
          _STORE.format("") + _LOAD.format(""), "global_load_dword", 0, 0,
          written=False),
    Fault("uninitialized_scalar", "uninitialized",
          "s_load_dwordx2 s[20:21], s[8:9], 0x8\n" + _WAIT,
          "s_load_dwordx2 s[20:21], s[10:11], 0x8\n" + _WAIT,
          "s_load_dwordx2", None, 8, written=False),
    Fault("uninitialized_part", "uninitialized",
          "global_store_short v1, v0, s[8:9]\n" + _WAIT + _LOAD.format(""),
          "global_store_short v1, v0, s[8:9]\n" + _WAIT
          + "global_load_ushort v2, v1, s[8:9]\n" + _WAIT,
          "global_load_dword", 0, 0, written=False),
    Fault("uninitialized_lds", "lds_uninitialized",
          "ds_write_b32 v1, v0\n" + _WAIT + "ds_read_b32 v2, v1 offset:4\n"
          + _WAIT, "ds_write_b32 v1, v0\n" + _WAIT + "ds_read_b32 v2, v1\n"
          + _WAIT, "ds_read_b32", 63),
    Fault("use_before_vmcnt", "waitcnt",
          "global_load_dword v2, v1, s[8:9]\nv_add_u32 v3, v2, v1\n" + _WAIT,
          "global_load_dword v2, v1, s[8:9]\n" + _WAIT
          + "v_add_u32 v3, v2, v1\n", "v_add_u32"),
    Fault("use_before_second_vmcnt", "waitcnt",
          "global_load_dword v2, v1, s[8:9]\n"
          "global_load_dword v3, v1, s[8:9]\ns_waitcnt vmcnt(1)\n"
          "v_mov_b32 v4, v3\n" + _WAIT,
          "global_load_dword v2, v1, s[8:9]\n"
          "global_load_dword v3, v1, s[8:9]\ns_waitcnt vmcnt(1)\n"
          "v_mov_b32 v4, v2\n" + _WAIT, "v_mov_b32"),
    Fault("stores_count_too", "waitcnt",
          "global_load_dword v2, v1, s[8:9]\n"
          "global_store_dword v1, v0, s[10:11]\ns_waitcnt vmcnt(2)\n"
          "v_mov_b32 v4, v2\n" + _WAIT,
          "global_load_dword v2, v1, s[8:9]\n"
          "global_store_dword v1, v0, s[10:11]\ns_waitcnt vmcnt(1)\n"
          "v_mov_b32 v4, v2\n" + _WAIT, "v_mov_b32"),
    Fault("use_before_lgkmcnt", "waitcnt",
          "ds_write_b32 v1, v0\n" + _WAIT
          + "ds_read_b32 v2, v1\ns_waitcnt vmcnt(0)\nv_mov_b32 v3, v2\n"
          + _WAIT, "ds_write_b32 v1, v0\n" + _WAIT
          + "ds_read_b32 v2, v1\ns_waitcnt lgkmcnt(0)\nv_mov_b32 v3, v2\n",
          "v_mov_b32"),
    Fault("scalar_before_lgkmcnt", "waitcnt",
          "s_load_dword s20, s[10:11], 0x0\ns_add_u32 s21, s20, 1\n" + _WAIT,
          "s_load_dword s20, s[10:11], 0x0\n" + _WAIT
          + "s_add_u32 s21, s20, 1\n", "s_add_u32"),
    # Scalar loads return in any order.
    Fault("scalar_at_lgkmcnt_1", "waitcnt",
          "s_load_dword s20, s[10:11], 0x0\ns_load_dword s22, s[10:11], 0x4\n"
          "s_waitcnt lgkmcnt(1)\ns_mov_b32 s21, s20\n" + _WAIT,
          "s_load_dword s20, s[10:11], 0x0\ns_load_dword s22, s[10:11], 0x4\n"
          "s_waitcnt lgkmcnt(0)\ns_mov_b32 s21, s20\n", "s_mov_b32"),
    Fault("overwritten_before_vmcnt", "waitcnt",
          "global_load_dword v2, v1, s[8:9]\nv_mov_b32 v2, 0\n" + _WAIT,
          "global_load_dword v2, v1, s[8:9]\n" + _WAIT + "v_mov_b32 v2, 0\n",
          "v_mov_b32"),
    Fault("overwritten_before_lgkmcnt", "waitcnt",
          "s_load_dword s20, s[10:11], 0x0\ns_mov_b32 s20, 0\n" + _WAIT,
          "s_load_dword s20, s[10:11], 0x0\n" + _WAIT + "s_mov_b32 s20, 0\n",
          "s_mov_b32"),
    Fault("lds_write_write", "lds_race",
          "v_and_b32 v2, 63, v0\nv_lshlrev_b32 v2, 2, v2\n"
          "ds_write_b32 v2, v0\n" + _WAIT + "s_barrier\n",
          "ds_write_b32 v1, v0\n" + _WAIT + "s_barrier\n", "ds_write_b32",
          0, block=128),
    Fault("lds_read_write", "lds_race",
          "ds_write_b32 v1, v0\nv_xor_b32 v2, 0x100, v1\n" + _WAIT
          + "s_barrier\nds_write_b32 v1, v1\nds_read_b32 v3, v2\n" + _WAIT,
          "ds_write_b32 v1, v0\nv_xor_b32 v2, 0x100, v1\n" + _WAIT
          + "s_barrier\nds_write_b32 v1, v1\n" + _WAIT
          + "s_barrier\nds_read_b32 v3, v2\n" + _WAIT,
          "ds_(read|write)_b32", None, block=128),
    Fault("lds_read_over_barrier", "lds_wait",
          "ds_write_b32 v1, v0\nv_xor_b32 v2, 0x100, v1\n" + _WAIT
          + "s_barrier\nds_read_b32 v3, v1\ns_barrier\nds_write_b32 v2, v0\n"
          + _WAIT, "ds_write_b32 v1, v0\nv_xor_b32 v2, 0x100, v1\n" + _WAIT
          + "s_barrier\nds_read_b32 v3, v1\n" + _WAIT
          + "s_barrier\nds_write_b32 v2, v0\n" + _WAIT, "ds_write_b32",
          None, block=128),
    # Equal bytes are no race, on either side of the difference.
    Fault("lds_unequal_writes", "lds_race",
          "v_mov_b32 v2, 0\nv_lshrrev_b32 v3, 6, v0\n"
          "ds_write_b32 v2, v3\n" + _WAIT,
          "v_mov_b32 v2, 0\nv_mov_b32 v3, 7\nds_write_b32 v2, v3\n" + _WAIT,
          "ds_write_b32", None, block=128),
    # Halves of a workgroup may take turns, if their barriers are as many.
    Fault("divergent_barrier", "barrier",
          _SECOND_WAVE + "s_barrier\nsecond:\ns_nop 0\ns_barrier\n",
          _SECOND_WAVE + "s_barrier\nsecond:\ns_barrier\n"
          + _SECOND_WAVE.replace("second", "end")
          + "s_branch done\nend:\ns_barrier\ndone:\n",
          "s_barrier", block=128),
    Fault("workgroups_write", "global_race",
          "v_mov_b32 v2, s2\nglobal_store_dword v1, v2, s[8:9]\n",
          "v_mov_b32 v2, s2\nglobal_atomic_add v1, v2, s[8:9]\n",
          "global_store_dword", 0, 0, grid=2),
    Fault("workgroup_reads_what_another_writes", "global_race",
          "v_mov_b32 v2, s2\nv_lshlrev_b32 v3, 8, v2\n"
          "v_add_u32 v3, v3, v1\nglobal_store_dword v3, v2, s[8:9]\n"
          "global_load_dword v4, v1, s[8:9]\n" + _WAIT,
          "v_mov_b32 v2, s2\nv_lshlrev_b32 v3, 8, v2\n"
          "v_add_u32 v3, v3, v1\nglobal_store_dword v3, v2, s[8:9]\n"
          "global_load_dword v4, v3, s[8:9]\n" + _WAIT,
          "global_load_dword", 0, 0, grid=2),
    Fault("register_beyond", "register", "v_mov_b32 v100, 0\n",
          "v_mov_b32 v7, 0\n", "v_mov_b32", vgprs=8),
    Fault("endless", "endless", "again:\ns_branch again\n",
          "s_branch again\nagain:\n", "s_branch"),
    Fault("no_instruction", "unsupported", ".long 0xbfff0000\n", "s_nop 0\n",
          "(?i)bfff0000|decod"),
    # There is one, which the simulator does not know how to execute.
    Fault("unknown_instruction", "unsupported", "s_trap 2\n", "s_nop 0\n",
          "s_trap"),
]
# For instruction_test's coverage.
COVERED = {"s_trap"}
ALWAYS_ON = ("unsupported", "out_of_bounds", "use_after_free", "endless")


def run(fault, wrong):
  """Runs the program. Returns its first buffer's address and HipError."""
  body = _PROLOGUE + (fault.wrong if wrong else fault.right)
  words = np.arange(128, dtype=np.uint32)
  with (asm.Buffer(words if fault.written else 512) as first,
        asm.Buffer(words) as second):
    kernel = asm.Kernel(body, "planted", lds=fault.lds, vgprs=fault.vgprs)
    with asm.Module(asm.assemble(asm.kernel_file([kernel]))) as module:
      if fault.freed and wrong:
        first.free()
      try:
        module.launch("planted", first, second, grid=fault.grid,
                      block=fault.block)
        return first.address, None
      except asm.HipError as error:
        return first.address, error


class FaultTest(parameterized.TestCase):

  @parameterized.named_parameters((f.name, f) for f in FAULTS)
  def test_found(self, fault):
    address, error = run(fault, wrong=True)
    self.assertIsNotNone(error, "not found")
    report = error.report
    self.assertIn(fault.check, report)
    self.assertIn("planted", report)
    self.assertRegex(report, fault.instruction)
    if fault.lane is not None:
      self.assertRegex(report, rf"lane {fault.lane}\b")
    if fault.offset is not None:
      self.assertIn(f"{address + fault.offset:x}", report)
    illegal = fault.check in ("out_of_bounds", "use_after_free", "misaligned")
    if "lds" in fault.name:
      self.assertIn(error.status, (ILLEGAL_ADDRESS, LAUNCH_FAILURE))
    else:
      self.assertEqual(error.status,
                       ILLEGAL_ADDRESS if illegal else LAUNCH_FAILURE)

  @parameterized.named_parameters((f.name, f) for f in FAULTS)
  def test_passes_without_it(self, fault):
    _, error = run(fault, wrong=False)
    self.assertIsNone(error)

  def test_checks_turned_off(self):
    environment = dict(os.environ)
    names = {f.check for f in FAULTS} - set(ALWAYS_ON)
    environment["AMDGPU_SIM_CHECKS"] = ",".join("-" + n for n in sorted(names))
    command = [sys.executable, os.path.abspath(__file__), "--planted"]
    done = subprocess.run(command, env=environment, capture_output=True,
                          text=True, check=False)
    self.assertEqual(done.returncode, 0, done.stdout + done.stderr)
    failed = set(done.stdout.split())
    self.assertEqual(
        failed, {f.name for f in FAULTS if f.check in ALWAYS_ON},
        done.stderr)

  def test_one_check_turned_off_leaves_the_others(self):
    environment = dict(os.environ, AMDGPU_SIM_CHECKS="+all,-waitcnt")
    command = [sys.executable, os.path.abspath(__file__), "--planted"]
    done = subprocess.run(command, env=environment, capture_output=True,
                          text=True, check=True)
    self.assertEqual(set(done.stdout.split()),
                     {f.name for f in FAULTS if f.check != "waitcnt"})

  def test_turns(self):
    # What wave 0 reads just after wave 1 wrote, without a barrier: it goes
    # first and reads the old value, but in step it reads the new one.
    environment = dict(os.environ, AMDGPU_SIM_CHECKS="-lds_race")
    for turn, expected in (("", "1"), ("1", "2")):
      environment["AMDGPU_SIM_TURN"] = turn
      command = [sys.executable, os.path.abspath(__file__), "--turns"]
      done = subprocess.run(command, env=environment, capture_output=True,
                            text=True, check=True)
      self.assertEqual(done.stdout.strip(), expected)

  def test_works_after_a_fault(self):
    run(FAULTS[0], wrong=True)
    after = asm.run_one("v_add_u32 v0, v1, v1", asm.State(
        v={0: np.zeros(64, np.uint32), 1: np.arange(64, dtype=np.uint32)}),
        v=[0])
    self.assertEqual(after.v[0].tolist(), list(range(0, 128, 2)))

  def test_a_fault_is_sticky(self):
    # The device answers with the error until the process clears it.
    fault = FAULTS[0]
    body = _PROLOGUE + fault.wrong
    module = asm.Module(asm.assemble(asm.kernel_file(
        [asm.Kernel(body, "planted")])))
    buffer = asm.Buffer(np.zeros(128, np.uint32))
    clear, asm.clear_fault = asm.clear_fault, lambda: None
    try:
      with self.assertRaises(asm.HipError):
        module.launch("planted", buffer, buffer)
      with self.assertRaises(asm.HipError) as raised:
        asm.call("hipDeviceSynchronize")
      self.assertEqual(raised.exception.status, ILLEGAL_ADDRESS)
    finally:
      asm.clear_fault = clear
      asm.clear_fault()
    asm.call("hipDeviceSynchronize")
    buffer.free()
    module.unload()


MATMUL = """
import triton
import triton.language as tl

@triton.jit
def matmul(a_ptr, b_ptr, c_ptr, M: tl.constexpr, N: tl.constexpr,
           K: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
           BK: tl.constexpr):
  m = tl.program_id(0) * BM + tl.arange(0, BM)
  n = tl.program_id(1) * BN + tl.arange(0, BN)
  k = tl.arange(0, BK)
  a = a_ptr + m[:, None] * K + k[None, :]
  b = b_ptr + k[:, None] * N + n[None, :]
  total = tl.zeros((BM, BN), tl.float32)
  for _ in range(0, K, BK):
    total = tl.dot(tl.load(a), tl.load(b), total)
    a += BK
    b += BK * N
  tl.store(c_ptr + m[:, None] * N + n[None, :], total)
"""
M, N, K = 64, 64, 128


def compile_matmul():
  """Triton's assembly of a matmul, with its number of waves and LDS."""
  from triton.backends.compiler import GPUTarget
  from triton.compiler import ASTSource
  from triton.compiler import compile as compile_kernel

  with tempfile.TemporaryDirectory() as folder:
    path = os.path.join(folder, "matmul.py")
    with open(path, "w") as stream:
      stream.write(MATMUL)
    spec = importlib.util.spec_from_file_location("matmul", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    os.environ["TRITON_CACHE_DIR"] = os.path.join(folder, "cache")
    constants = {"M": M, "N": N, "K": K, "BM": 32, "BN": 32, "BK": 32}
    signature = {"a_ptr": "*fp16", "b_ptr": "*fp16", "c_ptr": "*fp32"}
    signature |= {name: "constexpr" for name in constants}
    attributes = {(i,): [["tt.divisibility", 16]] for i in range(3)}
    source = ASTSource(module.matmul, signature, constants, attributes)
    compiled = compile_kernel(
        source, target=GPUTarget("hip", asm.ARCH, 64),
        options={"num_warps": 4, "num_stages": 2})
  return compiled.asm["amdgcn"], compiled.metadata


class MutationTest(absltest.TestCase):
  """A real kernel, with each wait and barrier taken out in turn."""

  @classmethod
  def setUpClass(cls):
    super().setUpClass()
    cls.text, cls.metadata = compile_matmul()
    generator = np.random.default_rng(0)
    cls.a = generator.normal(size=(M, K)).astype(np.float16)
    cls.b = generator.normal(size=(K, N)).astype(np.float16)

  def launch(self, text):
    with (asm.Module(asm.assemble(text)) as module, asm.Buffer(self.a) as a,
          asm.Buffer(self.b) as b, asm.Buffer(4 * M * N) as c):
      module.launch("matmul", a, b, c, 0, 0, grid=(M // 32, N // 32),
                    block=64 * 4, lds=self.metadata.shared)
      return c.read(np.float32).reshape(M, N)

  def test_is_right(self):
    expected = self.a.astype(np.float64) @ self.b.astype(np.float64)
    np.testing.assert_allclose(self.launch(self.text), expected, atol=1e-2)

  def test_mutants(self):
    expected = self.launch(self.text)
    lines = self.text.split("\n")
    told, survived, mutants = [], [], 0
    for number, line in enumerate(lines):
      instruction = line.split(";")[0].strip()
      if not re.match(r"s_waitcnt|s_barrier", instruction):
        continue
      mutants += 1
      mutant = [*lines[:number], "\ts_nop 0", *lines[number + 1 :]]
      try:
        actual = self.launch("\n".join(mutant))
        if (actual == expected).all():
          survived.append(f"line {number}: {instruction}")
        else:
          survived.append(f"line {number}: {instruction}: WRONG RESULT")
      except asm.HipError as error:
        told.append(f"line {number}: {instruction}: {error.report[:150]}")
    caught = len(told)
    print(f"{asm.ARCH}: {caught} of {mutants} mutants caught; not caught:",
          *survived, sep="\n")
    self.assertGreaterEqual(mutants, 5)
    # The rest wait for what a later or an earlier wait covers.
    self.assertGreaterEqual(caught, 0.6 * mutants, "\n".join(survived))
    self.assertFalse([s for s in survived if "WRONG" in s],
                     "\n".join(survived))


def main():
  """Prints the names of faults that are found."""
  for fault in FAULTS:
    if run(fault, wrong=True)[1]:
      print(fault.name)


def turns():
  """Prints what wave 0 reads of LDS that wave 1 writes a little before."""
  with asm.Buffer(4) as out:
    asm.launch("""
      s_load_dwordx2 s[8:9], s[0:1], 0x0
      v_readfirstlane_b32 s20, v0
      v_mov_b32 v1, 0
      v_mov_b32 v2, 1
      v_mov_b32 v3, 2
      s_cmp_lg_u32 s20, 0
      s_cbranch_scc1 second
      ds_write_b32 v1, v2
      s_waitcnt lgkmcnt(0)
      s_barrier
      s_nop 0
      s_nop 0
      s_nop 0
      s_nop 0
      ds_read_b32 v4, v1
      s_waitcnt lgkmcnt(0)
      global_store_dword v1, v4, s[8:9]
      s_endpgm
      second:
      s_barrier
      ds_write_b32 v1, v3
      s_waitcnt lgkmcnt(0)""", out, block=128, lds=4)
    print(out.read()[0])


if __name__ == "__main__":
  if "--planted" in sys.argv:
    main()
  elif "--turns" in sys.argv:
    turns()
  else:
    absltest.main()
