# SPDX-License-Identifier: Apache-2.0
"""Ahead-of-time compiler: one row of configs/*.csv -> a code object and JSON.

  compile.py --header op,grade,... --row mha_fwd,fast,... --out-object F.co
      --out-json F.json [--out-asm F.s]
  compile.py --csv FILE --arch ARCH [--select REGEX] --out-dir DIR
  compile.py --persistent_worker

The code object depends on the row, the kernels and the Triton release, and on
nothing else: no path, no date, no cache of another process goes into it, and no
address where the system lets a program fix them. The JSON describes it for
embed.py (symbol, arguments, launch shape) and report.py (the compiler's
figures; on AMD the counted loops).

Columns of a row: op, grade, arch, dtype and the sizes before tile_m (head dims
of attention, columns of a norm) name the kernel and are its symbol; tile_m,
tile_n, perhaps tile_k, num_warps, num_stages and options say how to build it.
In a table without sizes the tile names the kernel. rate, if there is such a
column, is for whoever chooses a kernel.
options: key=value pairs separated by blanks; capital keys are constants of the
kernel, the others are options of Triton's backend, but for
  module=NAME      the file of the kernel, if not the op's usual one;
  function=NAME    its function, if not the op;
  excludes=A+B     features (family.py) that this row leaves to another;
  features=A+B     features that it is made for, and serves no call without;
  may=A+B          features of the general grade alone that it serves too;
  cluster=N        N blocks, a program each, that a multiprocessor's neighbours
                   run, and that copy for each other (CUDA).
"""

import argparse
import contextlib
import copy
import ctypes
import importlib
import json
import os
import pathlib
import re
import shutil
import sys
import tempfile

os.environ.update({
    "TRITON_DISABLE_LINE_INFO": "1",
    "TRITON_DEFAULT_FP_FUSION": "1",
    "TRITON_ALWAYS_COMPILE": "1",
})

# pylint: disable=g-import-not-at-top
_ROOT = pathlib.Path(__file__).absolute().parents[3]
if str(_ROOT) not in sys.path:
  sys.path.insert(0, str(_ROOT))

from third_party.aiter.aot import resources, table, worker
from third_party.aiter.aot.archs import ARCHS
from third_party.aiter.aot.family import family_name, family_of, kernel_module


def _attributes(names, signature, aligned, alignment):
  """What is promised of the arguments' divisibility."""
  attrs = {}
  for i, name in enumerate(names):
    if name not in signature:
      continue
    if signature[name].startswith("*"):
      attrs[(i,)] = [["tt.divisibility", 16]]
    elif re.match(aligned, name):
      attrs[(i,)] = [["tt.divisibility", alignment]]
  return attrs


def _tensor_maps(module, function, values, tensors):
  """TMA maps of a kernel: argument -> family.TensorMap, or None."""
  maps = getattr(module, "tensor_maps", None)
  maps = maps(function, values) if maps else {}
  unknown = {m.tensor for m in maps.values() if m} - set(tensors)
  if unknown:
    raise ValueError(f"{function}: tensor maps of {sorted(unknown)}, but"
                     f" tensors are {', '.join(tensors)}")
  return maps


def _map_element(tensor_map, element):
  """Triton's type of an element of a map's tensor, and its bits."""
  if tensor_map.element != "dtype":
    element = tensor_map.element
  return element, 8 if element in ("i8", "u8") or "8" in element else 16


def _map_types(maps, row_element):
  """Triton types of TMA maps."""
  if not maps:
    return {}
  from triton.experimental.gluon import language as gl
  types = {}
  for name, m in maps.items():
    element, bits = _map_element(m, row_element)
    layout = gl.NVMMASharedLayout(m.swizzle, bits, rank=len(m.block))
    block = ",".join(map(str, m.block))
    types[name] = f"tensordesc<{element}[{block}],{layout!r}>"
  return types


def _map_description(m, row_element):
  """What kernel_table.h's TensorMapSpec says of a map."""
  _, bits = _map_element(m, row_element)
  *outer, inner = m.box or m.block
  return {"tensor": m.tensor, "swizzle": m.swizzle,
          "box": [min(inner, m.swizzle * 8 // bits), *reversed(outer)]}


def _parameter_sizes(asm):
  """Bytes of each parameter in the object, from its own description."""
  if "ptx" in asm:
    entry = re.search(r"\.entry\s+\w+\s*\((.*?)\)", asm["ptx"], re.S).group(1)
    found = re.findall(
        r"\.param\s.*?\.[bsuf](\d+)\b[^\[,]*(?:\[(\d+)\])?", entry)
    return [int(length) if length else int(bits) // 8 for bits, length in found]
  return [int(size) for size, kind in re.findall(
      r"\.size:\s+(\d+)\s+\.value_kind:\s+(\w+)", asm["amdgcn"])
      if not kind.startswith("hidden_")]


def _arguments(run_time, signature, maps, asm):
  """The parameters in order as [name, type], Triton's own at the end."""
  args = []
  for n in run_time:
    if n in maps:
      # Triton adds the map's shape and strides, which no kernel reads.
      args.append([n, "tensormap"])
      rank = len(maps[n].block)
      args += [[f"{n}.shape{i}", "i32"] for i in range(rank)]
      args += [[f"{n}.stride{i}", "i64"] for i in range(rank)]
    else:
      args.append([n, "*" if signature[n].startswith("*") else
                   {"fp32": "f32"}.get(signature[n], signature[n])])
  sizes = _parameter_sizes(asm)
  hidden = ["scratch", "profile"][:len(sizes) - len(args)]
  args += [[n, "hidden"] for n in hidden]
  expected = [
      {"tensormap": 128, "i32": 4, "f32": 4}.get(t, 8) for _, t in args]
  if sizes != expected:
    raise RuntimeError(
        f"the object's parameters are not the kernel's: {sizes}, {expected}")
  return args


def compile_row(row):
  """Builds one kernel.

  Returns:
    (code object, JSON dict, assembly text or None).
  """
  os.environ["TRITON_CACHE_DIR"] = tempfile.mkdtemp(prefix="aiter_aot_")
  try:
    return _compile_row(row)
  finally:
    shutil.rmtree(os.environ["TRITON_CACHE_DIR"], ignore_errors=True)


def _compile_row(row):
  """compile_row, with Triton's cache in place."""
  import triton
  from triton.backends.compiler import GPUTarget
  from triton.compiler import ASTSource

  op, arch = row["op"], ARCHS[row["arch"]]
  symbol = table.symbol(row)
  build, constants = table.options(row)
  family = family_of(op)
  excludes = table.features(row, "excludes")
  function = build.pop("function", op)
  backend = {k: v for k, v in build.items()
             if k not in ("cluster", "excludes", "features", "may", "module")}
  module = kernel_module(table.module(row))
  kernel = getattr(module, function)
  names = list(kernel.arg_names)
  element = family.element(row)
  values = family.constants(row) | constants
  grid_if = next((c for c in family.ops[op].grid_if if values.get(c)), "")
  values = {n: v for n, v in values.items() if n in names}
  maps = _tensor_maps(module, function, values, family.tensors)
  # A map that this row has no use for is a constant, None.
  values |= {n: None for n, m in maps.items() if m is None}
  maps = {n: m for n, m in maps.items() if m is not None}
  run_time = [n for n in names if not n.isupper() and n not in values]
  signature = {n: family.type_of(n, element) for n in run_time}
  signature |= _map_types(maps, element)
  full = {n: signature.get(n, "constexpr") for n in names}

  # The function's name is the object's symbol and reaches the device.
  kernel = _renamed(kernel, symbol)
  if kernel.is_gluon():
    from triton.experimental.gluon._runtime import GluonASTSource as ASTSource
  sure = not family.aligned_if or family.aligned_if in excludes
  source = ASTSource(
      kernel, full, constexprs=values,
      attrs=_attributes(names, signature, family.aligned if sure else "$^",
                        family.alignment(row)))
  if arch.platform == "rocm":
    target = GPUTarget("hip", arch.name, arch.wave)
  else:
    target = GPUTarget("cuda", arch.capabilities[0], arch.wave)
  backend |= {"num_warps": int(row["num_warps"]),
              "num_stages": int(row["num_stages"])}
  with _completed_ptx(build.get("cluster", 1), symbol):
    compiled = triton.compile(source, target=target, options=backend)
  meta = compiled.metadata
  if meta.name != symbol:
    raise RuntimeError(f"{symbol}: the object's symbol is {meta.name}")
  if meta.shared > arch.lds_bytes:
    raise RuntimeError(f"{symbol}: {meta.shared} bytes of LDS, {arch.name} has"
                       f" {arch.lds_bytes}")
  if getattr(meta, "global_scratch_size", 0) or meta.profile_scratch_size:
    raise RuntimeError(f"{symbol}: the kernel wants global scratch memory")

  args = _arguments(run_time, signature, maps, compiled.asm)
  obj = compiled.asm["hsaco" if arch.platform == "rocm" else "cubin"]
  threads = meta.num_warps * arch.wave
  if maps and family.no_maps_if:
    excludes.append(family.no_maps_if)
  tile_m, tile_n, tile_k = table.tile(row)
  description = {
      "op": op, "family": family_name(op), "grade": row["grade"],
      "arch": arch.name, "dtype": row["dtype"], "dims": table.dims(row),
      "tile_m": tile_m, "tile_n": tile_n, "tile_k": tile_k,
      "rate": int(row.get("rate") or 0), "num_warps": meta.num_warps,
      "threads": threads, "shared": meta.shared,
      "symbol": symbol, "grid_if": grid_if, "args": args,
      "excludes": excludes, "features": table.features(row, "features"),
      "may": table.features(row, "may"),
      # A row that may do everything has to put it somewhere.
      "no_spills_up_to": (
          family.no_spills_up_to if arch.no_spills and "may" not in build
          else -1),
      "maps": {n: _map_description(m, element) for n, m in maps.items()},
      "resources": resources.of(
          arch.name, compiled.asm, obj, threads, meta.shared),
  }
  return obj, description, compiled.asm.get("amdgcn", compiled.asm.get("ptx"))


@contextlib.contextmanager
def _completed_ptx(blocks, symbol):
  """Compiles a kernel whose PTX says what Triton's cannot.

  Inline assembly finds a kernel's maps by its parameters' names, which it calls
  those of KERNEL. Clusters are of so many blocks that know of each other;
  Triton's own are one program each.
  """
  from triton import knobs

  def hook(backend=None, stages=None, *_):
    del backend
    if stages is None:
      return symbol, symbol
    make_ptx = stages.get("ptx")

    def complete(source, metadata):
      text = make_ptx(source, metadata).replace("KERNEL_param_",
                                                f"{symbol}_param_")
      if blocks == 1:
        return text
      head, brace, body = text.partition("\n{")
      return (f"{head}\n.explicitcluster\n.reqnctapercluster {blocks}{brace}"
              f"{body}")

    if make_ptx:
      stages["ptx"] = complete
    return None

  knobs.runtime.add_stages_inspection_hook = hook
  try:
    yield
  finally:
    knobs.runtime.add_stages_inspection_hook = None


def _renamed(kernel, symbol):
  """The same kernel under another name.

  Triton names the object's symbol after the Python function, without the
  argument types when it compiles ahead of time.
  """
  kernel = copy.copy(kernel)
  kernel.__name__ = symbol
  kernel._fn_name = symbol  # pylint: disable=protected-access
  return kernel


def _write(out_object, out_json, out_asm, row):
  obj, description, asm = compile_row(row)
  pathlib.Path(out_object).write_bytes(obj)
  pathlib.Path(out_json).write_text(
      json.dumps(description, indent=1) + "\n", encoding="utf-8")
  if out_asm:
    pathlib.Path(out_asm).write_text(asm, encoding="utf-8")


def _parser():
  parser = argparse.ArgumentParser(fromfile_prefix_chars="@")
  parser.add_argument("--header")
  parser.add_argument("--row")
  parser.add_argument("--out-object")
  parser.add_argument("--out-json")
  parser.add_argument("--out-asm")
  parser.add_argument("--csv")
  parser.add_argument("--arch")
  parser.add_argument("--select", default="")
  parser.add_argument("--out-dir")
  return parser


def _run(arguments):
  """Does what a command line asks for."""
  args = _parser().parse_args(arguments)
  if args.row:
    row = dict(zip(args.header.split(","), args.row.split(",")))
    _write(args.out_object, args.out_json, args.out_asm, row)
    return
  out = pathlib.Path(args.out_dir)
  out.mkdir(parents=True, exist_ok=True)
  for symbol, (_, _, row) in table.read(args.csv).items():
    if row["arch"] != args.arch or not re.search(args.select, symbol):
      continue
    _write(out / f"{symbol}.co", out / f"{symbol}.json", out / f"{symbol}.s",
           row)
    print(symbol, flush=True)


def _fix_addresses():
  """Starts this program again with addresses that are not randomised.

  Some of the compiler's passes take things in the order of their addresses: of
  366 kernels 2 were seen to come out in more ways than one. Where the system
  forbids it, the program goes on as it is. What a process allocated before
  counts too: a row after others (--csv) need not come out as in a process of
  its own, which --row and a worker give it.
  """
  no_randomisation, query = 0x0040000, 0xFFFFFFFF
  libc = ctypes.CDLL(None)
  persona = libc.personality(ctypes.c_ulong(query))
  if persona == -1 or persona & no_randomisation:
    return
  if libc.personality(ctypes.c_ulong(persona | no_randomisation)) != -1:
    os.execv(sys.executable, [sys.executable, *sys.orig_argv[1:]])


def _serve():
  """Compiles as a worker of Bazel, each row in a process of its own."""
  # What a process would spend most of its time on before it compiles.
  importlib.import_module("triton.experimental.gluon.language")
  from triton.backends.amd import compiler as amd
  from triton.runtime.cache import triton_key
  triton_key()
  amd.get_amd_codegen_revision()  # Loads what generates the code.
  worker.serve(_run)


def main():
  _fix_addresses()
  if "--persistent_worker" in sys.argv:
    _serve()
  else:
    _run(sys.argv[1:])


if __name__ == "__main__":
  main()
  # Triton's bindings would print their leaks at a normal exit.
  sys.stdout.flush()
  os._exit(0)
