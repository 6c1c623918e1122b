# SPDX-License-Identifier: Apache-2.0
"""What the compiler says about one kernel: registers, spills, LDS, loops.

On AMD the innermost loops with matrix instructions are also counted by class,
in clocks of one wave on one SIMD at documented rates: the first such loop of
an attention kernel is the unmasked one, the second the masked one.
"""

import pathlib
import re
import subprocess
import tempfile

from third_party.aiter.aot.archs import ARCHS

# Passes (of 4 clocks) of v_mfma on inputs of 16 and 8 bits, from the ISA
# documents: on every target a shape has one number, whatever the type.
_MFMA_PASSES = {
    "gfx90a": {"32x32x8": 16, "16x16x16": 8, "32x32x4": 16, "16x16x8": 8,
               "4x4x4": 2},
    "gfx942": {"32x32x8": 8, "16x16x16": 4, "4x4x4": 2,
               "32x32x16": 8, "16x16x32": 4},
    "gfx950": {"32x32x8": 8, "16x16x16": 4, "32x32x16": 8, "16x16x32": 4,
               "4x4x4": 2, "32x32x32": 8, "16x16x64": 4,
               "32x32x64": 16, "16x16x128": 8},
}
# Half as many where both inputs have 4 bits.
_BOTH_FP4 = re.compile(r"cbsz:4\b.*blgp:4\b")
# Clocks of a 16x16x16 v_wmma of a wave32, and of one on 8 bits.
_WMMA_CLOCKS = {"gfx1100": (32, 32), "gfx1201": (16, 8)}
# Quarter rate: transcendental, and 32-bit integer multiplication.
_QUARTER = re.compile(
    r"v_(exp|log|rcp|rsq|sqrt|sin|cos)_|v_mul_(lo|hi)_|v_mad_[iu]64_")
_LDS_BYTES = {"b8": 1, "u8": 1, "i8": 1, "u16": 2, "b16": 2, "b32": 4,
              "b64": 8, "b96": 12, "b128": 16}


def _blocks(asm):
  """(innermost loop's header or None, instructions) of each basic block."""
  loop, label, comment, lines = None, None, True, []
  for line in asm.splitlines():
    head = re.match(r"\.L(BB\d+_\d+):|; %bb\.\d+:", line)
    if head:
      yield loop, lines
      label, loop, comment, lines = head.group(1), None, True, []
    elif not line.strip().startswith(";"):
      comment = False
    if comment:
      if re.search(r"=>\s*This (Inner )?Loop Header", line):
        loop = label
      else:
        parent = re.search(r"in Loop: Header=(BB\d+_\d+)", line)
        loop = parent.group(1) if parent else loop
    elif re.match(r"\t[a-z]", line):
      lines.append(line.split(";")[0].strip())
    if line.startswith(".Lfunc_end"):
      break
  yield loop, lines


def _count(arch, instructions):
  """Clocks by class, and instructions of scratch memory, of one iteration."""
  wave = ARCHS[arch].wave
  valu = 4 if wave == 64 else 1
  total = dict(mfma=0, valu=0, trans=0, lds=0, scratch=0, global_loads=0)
  for text in instructions:
    name = text.split()[0]
    shape = re.match(r"v_s?mfmac?_(?:scale_)?[fi]32_(\d+x\d+x\d+)", name)
    if shape:
      clocks = 4 * _MFMA_PASSES[arch][shape.group(1)]
      total["mfma"] += clocks // 2 if _BOTH_FP4.search(text) else clocks
    elif name.startswith("v_wmma_"):
      total["mfma"] += _WMMA_CLOCKS[arch][bool(re.search("iu8|fp8", name))]
    elif _QUARTER.match(name):
      total["trans"] += 4 * valu
    elif name.startswith("v_") and name != "v_nop":
      total["valu"] += valu
    elif name.startswith("ds_"):
      width = re.search(r"_(b8|u8|i8|u16|b16|b32|b64|b96|b128)", name)
      two = 2 if re.search(r"(read|write|load|store)2", name) else 1
      size = _LDS_BYTES[width.group(1)] if width else 4
      total["lds"] += max(1, size * two * wave // 128)
    elif name.startswith("scratch_"):
      total["scratch"] += 1
    elif name.startswith(("global_load", "buffer_load")):
      total["global_loads"] += 1
  return total


def loops(arch, asm):
  """The innermost loops with matrix instructions, in program order."""
  bodies = {}
  for header, instructions in _blocks(asm):
    if header:
      bodies.setdefault(header, []).extend(instructions)
  return [
      _count(arch, body) for body in bodies.values()
      if any(i.startswith(("v_mfma", "v_smfmac", "v_wmma")) for i in body)]


def _amd(arch, asm, threads, shared):
  """Figures from the assembly text's metadata."""
  def number(key):
    return int(re.search(rf"\.{key}:\s+(\d+)", asm).group(1))
  waves = int(re.search(r"; Occupancy: (\d+)", asm).group(1))
  if shared:
    # LLVM does not see dynamic LDS. Four SIMDs share it (two on RDNA).
    groups = ARCHS[arch].lds_bytes // shared
    waves = min(waves, max(1, groups * (threads // ARCHS[arch].wave) // 4))
  agpr = number("agpr_count") if ".agpr_count" in asm else 0
  return {
      "vgpr": number("vgpr_count"), "agpr": agpr,
      "sgpr": number("sgpr_count"), "spills": number("vgpr_spill_count"),
      "sgpr_spills": number("sgpr_spill_count"),
      "scratch": number("private_segment_fixed_size"), "lds": shared,
      "occupancy": waves, "loops": loops(arch, asm),
  }


def _nvidia(arch, cubin, threads, shared):
  """Figures from the object itself, through Triton's copy of cuobjdump."""
  from triton.backends import nvidia
  tool = pathlib.Path(list(nvidia.__path__)[0]) / "bin" / "cuobjdump"
  with tempfile.NamedTemporaryFile(suffix=".cubin") as f:
    f.write(cubin)
    f.flush()
    text = subprocess.run(
        [str(tool), "-res-usage", f.name], check=True, capture_output=True,
        text=True).stdout
  found = {k: int(v) for k, v in re.findall(r"\b([A-Z]+):(\d+)", text)}
  regs = found["REG"]
  per_warp = -(-regs * 32 // 256) * 256
  warps = min(64, 65536 // per_warp)
  # A multiprocessor has 1024 bytes more than a workgroup may have, and takes as
  # many of each.
  groups = min(warps // (threads // 32),
               (ARCHS[arch].lds_bytes + 1024) // (shared + 1024))
  return {
      "regs": regs, "spills": (found["STACK"] + found.get("LOCAL", 0)) // 4,
      "scratch": found["STACK"] + found.get("LOCAL", 0), "lds": shared,
      "occupancy": groups * (threads // 32) / 4,
  }


def of(arch, asm, code, threads, shared):
  """Resources of a kernel; `asm` is the compiler's dict of texts.

  Returns:
    A dict. occupancy counts waves (warps) a SIMD (a scheduler).
  """
  if ARCHS[arch].platform == "rocm":
    return _amd(arch, asm["amdgcn"], threads, shared)
  return _nvidia(arch, code, threads, shared)
