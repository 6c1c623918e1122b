# SPDX-License-Identifier: Apache-2.0
"""Runs AMD assembly text on the simulated GPU.

`Snippet` is a few instructions and the wave state that they start from;
`run` wraps each in a kernel of its own that loads that state, executes them
and stores the state after them, and returns the states. `Module` and `Buffer`
are the plain way: kernels by name, and device memory.

A process simulates one architecture: the environment's AMDGPU_SIM_ARCH.
"""

import ctypes
import dataclasses
import functools
import importlib.util
import os
import pathlib
import re
import tempfile
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

ARCH = os.environ.setdefault("AMDGPU_SIM_ARCH", "gfx942")
LANES = 64
ALL = 2**64 - 1
# The MODE register as a kernel finds it: round to nearest even, all denormals
# kept, DX10_CLAMP and IEEE.
MODE = 0x3F0
_FLUSH32 = 0x30
NO_FLUSH = MODE
FLUSH32 = MODE & ~_FLUSH32


class AssemblyError(ValueError):
  """Text that is no assembly: `lines` maps line numbers to messages."""

  def __init__(self, message: str, lines: Mapping[int, str]):
    super().__init__(message)
    self.lines = dict(lines)


class HipError(RuntimeError):
  """A hip call's status that is not hipSuccess."""

  def __init__(self, call: str, status: int, report: str):
    super().__init__(f"{call}: hip error {status}: {report}")
    self.status = status
    self.report = report


def where(condition: bool):
  """Decorates a test, or a class of tests, that exists if so."""
  def decorate(test):
    if condition:
      return test
    if not isinstance(test, type):
      return None
    for name in [n for n in vars(test) if n.startswith("test")]:
      delattr(test, name)
    return test
  return decorate


def assemble(text: str) -> bytes:
  """The code object of assembly text, which is the whole file's.

  Raises:
    AssemblyError: if the text is not valid on ARCH.
  """
  # Only this needs Triton: launching what is assembled does not.
  from triton._C.libtriton import amd
  from triton.backends.amd import compiler

  with tempfile.TemporaryDirectory() as folder:
    # The assembler's messages go to the file descriptor of stderr.
    messages = pathlib.Path(folder, "messages")
    saved = os.dup(2)
    with messages.open("wb") as stream:
      os.dup2(stream.fileno(), 2)
      try:
        relocatable = compiler.assemble_amdgcn(text, ARCH, "")
      except RuntimeError as error:
        relocatable, reason = None, str(error)
      finally:
        os.dup2(saved, 2)
        os.close(saved)
    if relocatable is None:
      told = messages.read_text()
      found = re.findall(r"assembler:(\d+):\d+: error: (.*)", told)
      raise AssemblyError(
          f"{reason}\n{told}", {int(line): what for line, what in found}
      )
    source = pathlib.Path(folder, "kernel.o")
    target = pathlib.Path(folder, "kernel.hsaco")
    source.write_bytes(relocatable)
    amd.link_hsaco(str(source), str(target))
    return target.read_bytes()


@dataclasses.dataclass
class Kernel:
  """A kernel's assembly: s[0:1] is the kernarg segment, s2 to s4 the
  workgroup's id, v0 the work-item's."""

  body: str
  name: str = "kernel"
  kernarg_size: int = 64
  lds: int = 0
  scratch: int = 0  # Not on gfx90a, where code must find it itself.
  mode: int = MODE
  dimensions: int = 1  # of the work-item's id: x, y << 10, z << 20
  vgprs: int = 512
  accum_offset: int = 256  # Which of them is a0.

  def code(self) -> str:
    """Instructions and descriptor."""
    return f"""
.text
.globl {self.name}
.p2align 8
.type {self.name},@function
{self.name}:
{self.body}
s_endpgm
.rodata
.p2align 6
.amdhsa_kernel {self.name}
.amdhsa_group_segment_fixed_size {self.lds}
.amdhsa_private_segment_fixed_size {self.scratch}
{".amdhsa_enable_private_segment 1" if self.scratch else ""}
.amdhsa_kernarg_size {self.kernarg_size}
.amdhsa_user_sgpr_count 2
.amdhsa_user_sgpr_kernarg_segment_ptr 1
.amdhsa_system_sgpr_workgroup_id_x 1
.amdhsa_system_sgpr_workgroup_id_y 1
.amdhsa_system_sgpr_workgroup_id_z 1
.amdhsa_system_vgpr_workitem_id {self.dimensions - 1}
.amdhsa_next_free_vgpr {self.vgprs}
.amdhsa_next_free_sgpr 96
.amdhsa_accum_offset {min(self.accum_offset, self.vgprs)}
.amdhsa_float_round_mode_32 {self.mode & 3}
.amdhsa_float_round_mode_16_64 {self.mode >> 2 & 3}
.amdhsa_float_denorm_mode_32 {self.mode >> 4 & 3}
.amdhsa_float_denorm_mode_16_64 {self.mode >> 6 & 3}
.amdhsa_dx10_clamp {self.mode >> 8 & 1}
.amdhsa_ieee_mode {self.mode >> 9 & 1}
.end_amdhsa_kernel
"""

  def metadata(self) -> str:
    arguments = "".join(
        f"\n      - {{.offset: {i}, .size: 8, .value_kind: by_value}}"
        for i in range(0, self.kernarg_size, 8)
    )
    return f"""\
  - .name: {self.name}
    .symbol: {self.name}.kd
    .kernarg_segment_size: {self.kernarg_size}
    .kernarg_segment_align: 8
    .group_segment_fixed_size: {self.lds}
    .private_segment_fixed_size: {self.scratch}
    .wavefront_size: 64
    .sgpr_count: 96
    .vgpr_count: {self.vgprs}
    .max_flat_workgroup_size: 1024
    .args:{arguments}
"""


def kernel_file(kernels: Sequence[Kernel]) -> str:
  """The text of a code object of kernels."""
  return "".join([
      *(kernel.code() for kernel in kernels),
      ".amdgpu_metadata\n---\namdhsa.version: [1, 2]\namdhsa.kernels:\n",
      *(kernel.metadata() for kernel in kernels),
      "...\n.end_amdgpu_metadata\n",
  ])


@functools.cache
def library() -> ctypes.CDLL:
  """The simulated libamdhip64: AMDGPU_SIM_LIBRARY, or the installed one."""
  path = os.environ.get("AMDGPU_SIM_LIBRARY")
  if not path:
    spec = importlib.util.find_spec("_rocm_sdk_core")
    assert spec, "no _rocm_sdk_core: install the amdgpu_sim wheel"
    (folder,) = spec.submodule_search_locations
    path = os.path.join(folder, "lib", "libamdhip64.so.7")
  found = ctypes.CDLL(path)
  found.amdgpu_sim_last_report.restype = ctypes.c_char_p
  found.amdgpu_sim_mnemonics.restype = ctypes.c_char_p
  return found


def mnemonics(arch: str = ARCH) -> list[str]:
  """What the simulator can execute."""
  return library().amdgpu_sim_mnemonics(arch.encode()).decode().split()


def mnemonics_of(body: str) -> set[str]:
  """The mnemonics in assembly text, without suffixes of encodings."""
  words = re.findall(
      r"^\s*((?:s|v|ds|global|flat|buffer|scratch)_\w+)", body, re.M)
  return {re.sub(r"_(e32|e64|sdwa|dpp)$", "", word) for word in words}


def last_report() -> str:
  return (library().amdgpu_sim_last_report() or b"").decode()


def call(name: str, *arguments):
  """Calls a hip function. Raises HipError."""
  status = getattr(library(), name)(*arguments)
  if status:
    raise HipError(name, status, last_report())


def clear_fault():
  library().amdgpu_sim_clear_fault()


class Buffer:
  """Device memory."""

  def __init__(self, contents: np.ndarray | int):
    """Of an array's bytes, or of so many bytes that nobody wrote."""
    self.size = contents if isinstance(contents, int) else contents.nbytes
    pointer = ctypes.c_void_p()
    call("hipMalloc", ctypes.byref(pointer), ctypes.c_size_t(self.size))
    self.address = pointer.value or 0
    if not isinstance(contents, int):
      self.write(contents)

  def write(self, array: np.ndarray):
    array = np.ascontiguousarray(array)
    assert array.nbytes <= self.size
    call("hipMemcpy", ctypes.c_void_p(self.address),
         ctypes.c_void_p(array.ctypes.data), ctypes.c_size_t(array.nbytes), 1)

  def read(self, dtype: Any = np.uint32, count: int | None = None):
    dtype = np.dtype(dtype)
    if count is None:
      count = self.size // dtype.itemsize
    array = np.empty(count, dtype)
    call("hipMemcpy", ctypes.c_void_p(array.ctypes.data),
         ctypes.c_void_p(self.address), ctypes.c_size_t(array.nbytes), 2)
    return array

  def free(self):
    """Frees the memory; the address stays, for who wants to use it."""
    if self.size >= 0:
      call("hipFree", ctypes.c_void_p(self.address))
      self.size = -1

  def __enter__(self):
    return self

  def __exit__(self, *_):
    self.free()


class Module:
  """A loaded code object."""

  def __init__(self, code_object: bytes):
    self._image = code_object
    self._handle = ctypes.c_void_p()
    self._functions = {}
    call("hipModuleLoadData", ctypes.byref(self._handle), code_object)

  def launch(self, name: str, *arguments: Buffer | int, grid: Any = 1,
             block: Any = LANES, lds: int = 0):
    """Runs a kernel to its end: `arguments` are 8 bytes each.

    Raises:
      HipError: of a launch that failed; the fault is cleared.
    """
    values = [a.address if isinstance(a, Buffer) else a for a in arguments]
    self.launch_segment(name, np.array(values or [0], np.uint64), grid, block,
                        lds)

  def launch_segment(self, name: str, segment: np.ndarray, grid: Any = 1,
                     block: Any = LANES, lds: int = 0):
    """The same with the bytes of all arguments.

    Raises:
      HipError: of a launch that failed; the fault is cleared.
    """
    if name not in self._functions:
      function = ctypes.c_void_p()
      call("hipModuleGetFunction", ctypes.byref(function), self._handle,
           name.encode())
      self._functions[name] = function
    size = ctypes.c_size_t(segment.nbytes)
    # HIP_LAUNCH_PARAM_BUFFER_POINTER, _SIZE, _END.
    extra = (ctypes.c_void_p * 5)(
        1, segment.ctypes.data, 2, ctypes.addressof(size), 3
    )
    three = lambda n: (*n, 1, 1)[:3] if isinstance(n, tuple) else (n, 1, 1)
    try:
      call("hipModuleLaunchKernel", self._functions[name], *three(grid),
           *three(block), lds, None, None, extra)
      call("hipDeviceSynchronize")
    except HipError:
      clear_fault()
      raise

  def unload(self):
    call("hipModuleUnload", self._handle)

  def __enter__(self):
    return self

  def __exit__(self, *_):
    self.unload()


def launch(body: str, *arguments: Buffer | int, grid: Any = 1,
           block: Any = LANES, dynamic_lds: int = 0, **attributes):
  """Assembles one `Kernel` with these attributes and runs it once."""
  image = assemble(kernel_file([Kernel(body, **attributes)]))
  with Module(image) as module:
    module.launch("kernel", *arguments, grid=grid, block=block,
                  lds=dynamic_lds)


@dataclasses.dataclass
class State:
  """A wave's registers, as far as a test names them.

  Attributes:
    v: by number of the first register, an array of 64 lanes of 4 bytes, or of
      8 or more, which fill the registers from there on. AGPRs from 256.
    s: likewise, a Python integer that is not negative of up to 4 bytes, or an
      array of 4-byte elements that fill the registers from there on.
  """

  v: dict[int, np.ndarray] = dataclasses.field(default_factory=dict)
  s: dict[int, Any] = dataclasses.field(default_factory=dict)
  exec: int = ALL
  vcc: int = 0
  scc: int = 0
  m0: int = 0
  mode: int = MODE

  def vector(self, reg: int, dtype: Any = np.uint32) -> np.ndarray:
    """The 64 lanes from a register on, as elements of a type."""
    dtype = np.dtype(dtype)
    count = max(dtype.itemsize, 4) // 4
    words = np.stack([self.v[reg + i] for i in range(count)], 1)
    if dtype.itemsize < 4:  # the low part
      return np.ascontiguousarray(words).view(dtype)[:, 0]
    return np.ascontiguousarray(words).view(dtype)[:, 0]

  def scalar(self, reg: int, dtype: Any = np.uint32):
    dtype = np.dtype(dtype)
    count = max(dtype.itemsize, 4) // 4
    words = np.array([self.s[reg + i] for i in range(count)], np.uint32)
    return words.view(dtype)[0]


@dataclasses.dataclass
class Snippet:
  """Instructions to run, once for each state of `before`.

  The first state says which registers are loaded; the others name the same.
  """

  body: str
  before: Sequence[State]
  v: Sequence[int] = ()  # Vector registers to store.
  s: Sequence[int] = ()  # Scalar registers to store.
  lds: int = 0
  scratch: int = 0


def _vector_words(state):
  """{register: 64 words}"""
  words = {}
  for reg, lanes in state.v.items():
    lanes = np.ascontiguousarray(lanes)
    assert len(lanes) == LANES, lanes.shape
    if lanes.dtype.itemsize * lanes[0].size < 4:
      lanes = lanes.view(f"u{lanes.dtype.itemsize}").astype(np.uint32)
    lanes = lanes.reshape(LANES, -1).view(np.uint32)
    for i in range(lanes.shape[1]):
      words[reg + i] = np.ascontiguousarray(lanes[:, i])
  return words


def _scalar_words(state):
  words = {}
  for reg, value in state.s.items():
    if isinstance(value, int):
      words[reg] = value
    else:
      flat = np.atleast_1d(value).view(np.uint32)
      words.update({reg + i: int(word) for i, word in enumerate(flat)})
  return words


# vcc, exec, scc, m0, mode: the words of a record before the scalar registers.
_FIXED = 8


def _record(state) -> np.ndarray:
  fixed = np.array([state.vcc, state.exec], np.uint64).view(np.uint32)
  rest = [state.scc, state.m0, state.mode, 0]
  scalars = list(_scalar_words(state).values())
  padding = [0] * (-len(scalars) % 8)
  words = [*fixed, *rest, *scalars, *padding]
  vectors = _vector_words(state).values()
  return np.concatenate([np.array(words, np.uint32), *vectors])


def _register(number):
  return f"v{number}" if number < 256 else f"a{number - 256}"


def _kernel(name: str, snippet: Snippet) -> Kernel:
  """A kernel that runs the body on records of an array, one after another.

  s[76:77] reads records, s[78:79] writes them, s80 counts them.
  """
  first = snippet.before[0]
  vectors = list(_vector_words(first))
  scalars = list(_scalar_words(first))
  advance = lambda reg, by: (
      f"s_add_u32 s{reg}, s{reg}, {by}\ns_addc_u32 s{reg + 1}, s{reg + 1}, 0"
  )
  lines = [
      "s_load_dwordx4 s[76:79], s[0:1], 0x0",
      "s_load_dword s80, s[0:1], 0x10",
      "v_lshlrev_b32 v255, 2, v0",
      "s_waitcnt lgkmcnt(0)",
      f"{name}_loop:",
      "s_load_dwordx8 s[84:91], s[76:77], 0x0",
  ]
  offset = 4 * _FIXED
  for i, reg in enumerate(scalars):
    lines.append(f"s_load_dword s{reg}, s[76:77], {offset + 4 * i:#x}")
  lines.append("s_waitcnt lgkmcnt(0)")
  size = offset + 4 * (len(scalars) + -len(scalars) % 8)
  lines.append(advance(76, size))
  for reg in vectors:
    target = _register(reg) if reg < 256 else "v254"
    lines.append(f"global_load_dword {target}, v255, s[76:77]")
    if reg >= 256:
      lines.append("s_waitcnt vmcnt(0)")
      lines.append(f"v_accvgpr_write_b32 {_register(reg)}, v254")
    lines.append(advance(76, 4 * LANES))
  lines += ["s_waitcnt vmcnt(0)", "s_mov_b32 m0, s89"]
  if any(state.mode != MODE for state in snippet.before):
    lines.append("s_setreg_b32 hwreg(HW_REG_MODE, 0, 24), s90")
  lines += [
      "s_mov_b64 vcc, s[84:85]",
      "s_mov_b64 exec, s[86:87]",
      "s_cmp_lg_u32 s88, 0",
      snippet.body,
      "s_cselect_b32 s88, 1, 0",
      "s_mov_b64 s[86:87], exec",
      "s_mov_b64 exec, -1",
  ]
  if any(state.mode != MODE for state in snippet.before):
    lines += [
        f"s_mov_b32 s92, {MODE:#x}",
        "s_getreg_b32 s90, hwreg(HW_REG_MODE, 0, 24)",
        "s_setreg_b32 hwreg(HW_REG_MODE, 0, 24), s92",
    ]
  for reg in snippet.v:
    source = _register(reg)
    if reg >= 256:
      lines.append(f"v_accvgpr_read_b32 v254, {source}")
      source = "v254"
    lines.append(f"global_store_dword v255, {source}, s[78:79]")
    if reg >= 256:
      lines.append("s_waitcnt vmcnt(0)")
    lines.append(advance(78, 4 * LANES))
  lines.append("s_mov_b64 s[84:85], vcc")
  lines.append("s_mov_b32 s89, m0")
  lines.append("s_mov_b64 exec, 1")
  lines.append("v_mov_b32 v253, 0")
  stored = [84, 85, 86, 87, 88, 89, 90, *snippet.s]
  for i, reg in enumerate(stored):
    lines.append(f"v_mov_b32 v254, s{reg}")
    lines.append(f"global_store_dword v253, v254, s[78:79] offset:{4 * i}")
    lines.append("s_waitcnt vmcnt(0)")
  lines += [
      "s_mov_b64 exec, -1",
      advance(78, 4 * len(stored)),
      "s_sub_u32 s80, s80, 1",
      "s_cmp_lg_u32 s80, 0",
      f"s_cbranch_scc1 {name}_loop",
  ]
  return Kernel("\n".join(lines), name, kernarg_size=24,
                lds=snippet.lds, scratch=snippet.scratch)


def _after(snippet, words):
  states = []
  for row in words.reshape(len(snippet.before), -1):
    count = len(snippet.v) * LANES
    lanes = row[:count].reshape(-1, LANES)
    fixed = row[count : count + 7]
    vcc, exec_ = (int(x) for x in fixed[:4].copy().view(np.uint64))
    states.append(State(
        dict(zip(snippet.v, lanes, strict=True)),
        dict(zip(snippet.s, map(int, row[count + 7 :]), strict=True)),
        exec_, vcc, int(fixed[4]), int(fixed[5]), int(fixed[6]),
    ))
  return states


def assemble_all(snippets: Sequence[Snippet]):
  """One code object of all snippets that assemble.

  Returns:
    The code object, and for each snippet None or its AssemblyError.
  """
  errors: list[AssemblyError | None] = [None] * len(snippets)
  while True:
    kernels, owner = [], []
    for i, snippet in enumerate(snippets):
      if not errors[i]:
        kernels.append(_kernel(f"snippet{i}", snippet))
        owner += [i] * kernels[-1].code().count("\n")
    if not kernels:
      return b"", errors
    text = kernel_file(kernels)
    try:
      return assemble(text), errors
    except AssemblyError as error:
      if not error.lines:
        raise
      lines = text.split("\n")
      for line, message in error.lines.items():
        errors[owner[line - 1]] = AssemblyError(
            f"{lines[line - 1]}: {message}", {line: message}
        )


def run(snippets: Sequence[Snippet]) -> list[Any]:
  """Runs snippets, each as a kernel of one wave.

  Returns:
    For each snippet the states after it, one for each before it, or the
    exception (AssemblyError, HipError) that it ended with.
  """
  code_object, errors = assemble_all(snippets)
  results: list[Any] = list(errors)
  if not code_object:
    return results
  with Module(code_object) as module:
    for i, snippet in enumerate(snippets):
      if results[i]:
        continue
      rows = len(snippet.before)
      row = len(snippet.v) * LANES + 7 + len(snippet.s)
      records = np.concatenate([_record(state) for state in snippet.before])
      with Buffer(records) as source, Buffer(4 * rows * row) as target:
        try:
          module.launch(f"snippet{i}", source, target, rows)
          results[i] = _after(snippet, target.read())
        except HipError as error:
          results[i] = error
  return results


def run_one(body: str, before: State | None = None, **outputs) -> State:
  """Runs one snippet from one state. Raises what it ended with."""
  snippet = Snippet(body, [before or State()], **outputs)
  (result,) = run([snippet])
  if isinstance(result, Exception):
    raise result
  return result[0]
