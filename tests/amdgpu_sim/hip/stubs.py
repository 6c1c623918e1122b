# SPDX-License-Identifier: Apache-2.0
"""Writes what is missing of ROCm's libraries, so that JAX's wheels load.

The published wheels name their libraries and, for each function they import,
its version. From that, each library gets a C++ source, in which every function
says its name and returns an error, and a linker's version script. The functions
are weak: those that the simulator has take their place.
"""

import argparse
import collections
import pathlib
import re
import struct
import zipfile
from collections.abc import Iterator

# A library, its functions that the importing module gives no version, and the
# error that its missing functions return.
_LIBRARIES = [
  ("libamdhip64.so.7", r"(__)?hip[A-Z]", 801),  # hipErrorNotSupported
  ("libhipblaslt.so.1", r"_ZNK?13hipblaslt_ext|hipblasLt", 7),
  ("libhipblas.so.3", r"hipblas[A-Z]", 7),
  ("libhipfft.so.0", r"hipfft", 5),
  ("libhipsolver.so.1", r"hipsolver", 6),
  ("libhipsparse.so.4", r"hipsparse", 6),
  ("libMIOpen.so.1", r"miopen", 7),
  ("librocblas.so.5", r"rocblas_", 4),
  ("librocsolver.so.0", r"rocsolver_", 4),
  ("librccl.so.1", r"nccl", 3),
  ("librocprofiler-sdk.so.1", r"rocprofiler_", 1),
  ("libhsa-runtime64.so.1", r"hsa_", 0x1000),
  ("libamd_smi.so.26", r"amdsmi_", 2),
  ("librocm_sysdeps_drm_amdgpu.so.1", r"amdgpu_", -1),
  ("librocm_sysdeps_drm.so.2", r"drm", -1),
  ("librocm_sysdeps_numa.so.1", r"numa_|mbind", -1),
]

# What else a library exports, where the simulator has it.
_EXTRA = {
  "libamdhip64.so.7": ["hip[A-Z]*", "__hip[A-Z]*", "amdgpu_sim_*"],
  "librccl.so.1": ["nccl*"],
}

# Functions that return text.
_TEXT = re.compile(
  r"(?i)(get|_)(error|status)_?(name|string)$|status_code_to_string$"
  r"|ncclGetLastError$|get_marketing_name$"
)

# Called wherever a plugin is loaded; that they do nothing is no news.
_QUIET = re.compile(r"rocprofiler_|amdsmi_|numa_|hsa_init")

# Libraries of every Linux, from which modules import the rest.
_SYSTEM = re.compile(
  r"(lib(c|dl|m|pthread|rt|stdc\+\+|gcc_s)|ld-linux.*)\.so\."
)

_SHT_DYNAMIC, _SHT_DYNSYM = 6, 11
_SHT_GNU_VERNEED, _SHT_GNU_VERSYM = 0x6FFFFFFE, 0x6FFFFFFF
_DT_NEEDED = 1
_STB_WEAK = 2


class Module:
  """What a shared library (ELF, 64 bits, little-endian) imports."""

  def __init__(self, content: bytes):
    self._content = content
    (sections,) = struct.unpack_from("<Q", content, 40)
    size, count = struct.unpack_from("<HH", content, 58)
    self._sections = [
      struct.unpack_from("<IIQQQQIIQQ", content, sections + i * size)
      for i in range(count)
    ]
    self.needed: list[str] = self._read_needed()
    # Function -> its library and version, or None where it has no version.
    self.imports: dict[str, tuple[str, str] | None] = dict(self._read_imports())

  def _find(self, kind: int):
    return next((s for s in self._sections if s[1] == kind), None)

  def _text(self, section, offset: int) -> str:
    begin = self._sections[section[6]][4] + offset
    return self._content[begin : self._content.index(b"\0", begin)].decode()

  def _read_needed(self) -> list[str]:
    section = self._find(_SHT_DYNAMIC)
    result = []
    for i in range(section[4], section[4] + section[5], 16):
      tag, value = struct.unpack_from("<QQ", self._content, i)
      if tag == _DT_NEEDED:
        result.append(self._text(section, value))
    return result

  def _read_versions(self) -> dict[int, tuple[str, str]]:
    """Version index -> library and version."""
    section = self._find(_SHT_GNU_VERNEED)
    result = {}
    place = section[4] if section else 0
    for _ in range(section[7] if section else 0):
      _, count, file, aux, following = struct.unpack_from(
        "<HHIII", self._content, place
      )
      library = self._text(section, file)
      entry = place + aux
      for _ in range(count):
        _, _, index, name, next_entry = struct.unpack_from(
          "<IHHII", self._content, entry
        )
        result[index & 0x7FFF] = library, self._text(section, name)
        entry += next_entry
      place += following
    return result

  def _read_imports(self) -> Iterator[tuple[str, tuple[str, str] | None]]:
    versions = self._read_versions()
    section = self._find(_SHT_DYNSYM)
    version_section = self._find(_SHT_GNU_VERSYM)
    for i in range(1, section[5] // 24):
      name, info, _, index = struct.unpack_from(
        "<IBBH", self._content, section[4] + 24 * i
      )
      if index != 0 or info >> 4 == _STB_WEAK:
        continue
      (version,) = struct.unpack_from(
        "<H", self._content, version_section[4] + 2 * i
      )
      yield self._text(section, name), versions.get(version & 0x7FFF)


def modules(path: pathlib.Path) -> Iterator[Module]:
  """The shared libraries of a wheel, a folder or a file."""
  if path.is_dir():
    for file in sorted(path.rglob("*.so")):
      yield Module(file.read_bytes())
  elif path.suffix == ".whl":
    with zipfile.ZipFile(path) as wheel:
      for name in sorted(wheel.namelist()):
        if name.endswith(".so"):
          yield Module(wheel.read(name))
  else:
    yield Module(path.read_bytes())


def library_of(function: str) -> str | None:
  """The library of a function without a version."""
  for library, pattern, _ in _LIBRARIES:
    if re.match(pattern, function):
      return library
  return None


def collect(paths: list[pathlib.Path]) -> dict[str, dict[str, str]]:
  """Library -> function -> version, which may be empty."""
  result = {library: {} for library, _, _ in _LIBRARIES}
  for path in paths:
    for module in modules(path):
      for library in module.needed:
        if library not in result and not _SYSTEM.match(library):
          raise ValueError(f"{path.name} needs {library}, of which none knows")
      for function, origin in module.imports.items():
        library, version = origin or (library_of(function), "")
        if library in result:
          known = result[library].get(function)
          if known and version and known != version:
            raise ValueError(f"{function} has versions {known} and {version}")
          result[library][function] = known or version
  return result


def stub_source(library: str, functions: dict[str, str], error: int) -> str:
  """C++ for a library's functions."""
  lines = [
    f"// {library}: functions that the simulator has not. Written by stubs.py.",
    "#include <atomic>",
    "#include <cstdio>",
    "",
    "namespace {",
    "",
    "// Says once what a program asked for in vain.",
    "[[maybe_unused]] long Missing(std::atomic<bool>& said,",
    "                              const char* name) {",
    "  if (!said.exchange(true)) {",
    '    std::fprintf(stderr, "amdgpu_sim: %s is not simulated\\n", name);',
    "  }",
    f"  return {error};",
    "}",
    "",
    "}  // namespace",
    "",
  ]
  for i, function in enumerate(sorted(functions)):
    if _TEXT.search(function):
      result, body = "const char*", 'return "not simulated";'
    elif _QUIET.match(function):
      result, body = "long", f"return {error};"
    else:
      result, body = (
        "long",
        f'static std::atomic<bool> said; return Missing(said, "{function}");',
      )
    lines += [
      f'extern "C" __attribute__((weak, visibility("default"))) {result}'
      f' stub{i}() __asm__("{function}");',
      f"{result} stub{i}() {{ {body} }}",
    ]
  return "\n".join(lines) + "\n"


def version_script(library: str, functions: dict[str, str]) -> str:
  """A linker script that gives a library's functions their versions."""
  nodes = collections.defaultdict(list)
  for function, version in functions.items():
    nodes[version].append(f'"{function}"')
  # A named node takes the rest, since an anonymous one goes with no other.
  rest = nodes.pop("", []) + _EXTRA.get(library, [])
  lines = []
  for version in sorted(nodes):
    names = "; ".join(sorted(nodes[version]))
    lines.append(f"{version} {{ global: {names}; }};")
  names = "".join(f" {name};" for name in sorted(rest))
  exported = f" global:{names}" if names else ""
  lines.append(f"AMDGPU_SIM_1 {{{exported} local: *; }};")
  return "\n".join(lines) + "\n"


def main() -> None:
  parser = argparse.ArgumentParser(description=__doc__)
  parser.add_argument("--out", type=pathlib.Path, required=True)
  parser.add_argument(
    "modules", type=pathlib.Path, nargs="+", help="wheels, folders or .so files"
  )
  args = parser.parse_args()
  args.out.mkdir(parents=True, exist_ok=True)
  imports = collect(args.modules)
  for library, _, error in _LIBRARIES:
    functions = imports[library]
    base = library.split(".so")[0]
    source = stub_source(library, functions, error)
    (args.out / f"{base}.cc").write_text(source)
    script = version_script(library, functions)
    (args.out / f"{base}.lds").write_text(script)


if __name__ == "__main__":
  main()
