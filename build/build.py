#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""The front to the build: one command a purpose.

  demo    build the wheels for this machine, install them in .venv, train a
          small GPT with our operators and with plain JAX, and serve it; without
          a GPU also a tiny one on a simulated MI300X
  test    run the tests, all or the named Bazel targets
  wheels  build the wheels of a release into a folder
  sim     run a program on simulated AMD GPUs
  bench   time an operator against other implementations on this machine
  tune    measure every kernel that serves given sizes, and note the best; or
          predict changed rows of a kernel on a simulated AMD GPU
  lint    check Python, C++ and Bazel files

On Debian as root, missing tools are installed. Elsewhere, or without the
right, the message says what to install. Needs Python 3.11 for itself; the
wheels want 3.12, which is looked for on PATH, under pyenv and in
PYTHON_BIN_PATH.
"""

import argparse
import collections
import csv
import hashlib
import itertools
import json
import math
import os
import pathlib
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
import urllib.parse
import xml.etree.ElementTree
from collections.abc import Iterable, Sequence

ROOT = pathlib.Path(__file__).absolute().parent.parent
LOCKS = ROOT / "third_party/pypi"
CACHE = (
  pathlib.Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser()
  / "aiter_jax"
)
VENV = ROOT / ".venv"
SIM_VENV = ROOT / ".venv_sim"

# Command -> the Debian package that has it.
BUILD_TOOLS = {
  "bazel": "bazel-bootstrap",
  "g++": "g++",
  "git": "git",
}
LINT_TOOLS = {"node": "nodejs", "npm": "npm"}
# File -> the Debian package that has it, and what else the simulator needs.
BUILD_FILES = {"/usr/include/lzma.h": "liblzma-dev"}
SIM_FILES = {"/usr/lib/llvm-22/include/llvm-c/Disassembler.h": "llvm-22-dev"}


def fail(message: str) -> None:
  sys.exit(f"build.py: {message}")


def say(message: str) -> None:
  print(f"\n== {message}", flush=True)


def run(command: Sequence, **kwargs) -> None:
  """Runs a command and leaves with its status if it fails."""
  command = [str(word) for word in command]
  print("$ " + shlex.join(command), flush=True)
  status = subprocess.run(command, check=False, **kwargs).returncode
  if status:
    fail(f"{command[0]} failed with status {status}")


def output(command: Sequence[str]) -> str | None:
  """What a command prints, or None if it is missing or fails."""
  try:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
  except OSError:
    return None
  return done.stdout if done.returncode == 0 else None


# What the machine needs.


def install_packages(tools: dict[str, str], files: dict[str, str]) -> None:
  """Makes sure that commands and files exist, by apt-get where it may."""
  missing = [p for tool, p in tools.items() if not shutil.which(tool)]
  missing += [p for file, p in files.items() if not os.path.exists(file)]
  if not missing:
    return
  if not shutil.which("apt-get") or os.geteuid() != 0:
    fail(
      "missing: "
      + " ".join(missing)
      + "\nOn Debian or Ubuntu: sudo apt-get install "
      + " ".join(missing)
    )
  say("Installing " + ", ".join(missing))
  environment = os.environ | {"DEBIAN_FRONTEND": "noninteractive"}
  run(["apt-get", "update", "-qq"], env=environment)
  run(
    ["apt-get", "install", "-y", "-qq", "--no-install-recommends", *missing],
    env=environment,
  )


def find_python() -> str:
  """Finds a Python >= 3.12 that can make a virtual environment."""
  named = os.environ.get("PYTHON_BIN_PATH")
  if named:
    candidates = [named]
  else:
    candidates = []
    for version in ("3.12", "3.13", "3.14"):
      candidates.append(shutil.which("python" + version))
      candidates += sorted(
        pathlib.Path.home().glob(f".pyenv/versions/{version}.*/bin/python3")
      )
    candidates.append(sys.executable)
  check = (
    "import sys, sysconfig, os, venv, ensurepip, lzma\n"
    "assert sys.version_info >= (3, 12)\n"
    "assert os.path.exists(sysconfig.get_path('include') + '/Python.h')\n"
    "print(sys.executable)"
  )
  for candidate in filter(None, candidates):
    found = output([str(candidate), "-I", "-c", check])
    if found:
      return found.strip()
  fail(
    (f"PYTHON_BIN_PATH={named} is not" if named else "found no")
    + " Python 3.12 or later with its headers, venv and lzma.\n"
    "On Ubuntu 24.04: sudo apt-get install python3.12-dev python3.12-venv\n"
    "Elsewhere: pyenv install 3.12, or build it from source.\n"
    "Then run this again, with PYTHON_BIN_PATH=/path/to/python3.12 if it is "
    "not on PATH."
  )


def prepare(simulator: bool = False) -> str:
  """Readies the machine for Bazel; returns the Python of the build."""
  tools = dict(BUILD_TOOLS)
  if shutil.which("bazelisk"):
    del tools["bazel"]
  install_packages(tools, BUILD_FILES | (SIM_FILES if simulator else {}))
  return find_python()


def locked_venv(folder: pathlib.Path, python: str, lines: str) -> pathlib.Path:
  """A virtual environment with exactly these requirements, all with hashes.

  Does nothing if an earlier run made the same one.

  Returns:
    Its interpreter.
  """
  interpreter = folder / "bin/python"
  stamp = folder / "requirements.sha256"
  digest = hashlib.sha256(f"{python}\n{lines}".encode()).hexdigest()
  if stamp.exists() and stamp.read_text() == digest:
    return interpreter
  run([python, "-m", "venv", "--clear", folder])
  with tempfile.NamedTemporaryFile("w", suffix=".txt") as requirements:
    requirements.write(lines)
    requirements.flush()
    run(
      [
        interpreter,
        "-m",
        "pip",
        "install",
        "--disable-pip-version-check",
        "--quiet",
        "--progress-bar=on",
        "--no-deps",
        "--only-binary=:all:",
        "--require-hashes",
        "-r",
        requirements.name,
      ]
    )
  stamp.write_text(digest)
  return interpreter


# Bazel.


def bazel(command: str, python: str, *arguments: str) -> list[str]:
  """A Bazel command line; `tools/bazel` picks the Bazel."""
  return [
    str(ROOT / "tools/bazel") if not shutil.which("bazelisk") else "bazelisk",
    command,
    f"--repo_env=PYTHON_BIN_PATH={python}",
    *arguments,
  ]


def run_bazel(command: str, python: str, *arguments: str) -> None:
  run(bazel(command, python, *arguments), cwd=ROOT)


def arch_flags(archs: str | None) -> list[str]:
  if not archs:
    return []
  if archs == "all":
    return ["--config=release"]
  return ["--//third_party/aiter:archs=" + archs]


def test_flags(archs: str | None) -> list[str]:
  """arch_flags for tests, which import the wheels of both platforms.

  Of a platform that no architecture is named of they have a sample of kernels.
  """
  named = platforms_of(archs)
  samples = [
    next(a.name for a in architectures().values() if a.platform == p and a.ci)
    for p in ("rocm", "cuda")
    if p not in named
  ]
  if not samples:
    return arch_flags(archs)
  return [
    *arch_flags(",".join([archs, *samples])),
    "--//third_party/aiter:sampled=" + ",".join(samples),
  ]


def built_files(
  python: str, target: str, flags: list[str]
) -> list[pathlib.Path]:
  """Builds a target and returns its files."""
  with tempfile.TemporaryDirectory() as folder:
    events = pathlib.Path(folder) / "events.json"
    run_bazel(
      "build", python, f"--build_event_json_file={events}", *flags, target
    )
    files = {}
    for line in events.read_text().splitlines():
      for file in json.loads(line).get("namedSetOfFiles", {}).get("files", []):
        path = urllib.parse.urlparse(file["uri"]).path
        files[urllib.parse.unquote(path)] = None
  return sorted(map(pathlib.Path, files))


# Wheels.


def platforms_of(archs: str | None) -> list[str]:
  """Platforms that have kernels among the selected architectures."""
  if not archs or archs == "all":
    return ["rocm", "cuda"]
  known = architectures()
  for arch in archs.split(","):
    if arch not in known:
      fail(f"no kernels for {arch}; there are {', '.join(known)}")
  selected = {known[arch].platform for arch in archs.split(",")}
  return [platform for platform in ("rocm", "cuda") if platform in selected]


def build_wheels(
  python: str,
  archs: str | None,
  out: pathlib.Path,
  more: Iterable[str] = (),
) -> list[pathlib.Path]:
  """Builds the wheels, and more targets', and copies them to a folder."""
  wheels = {}
  targets = ["//build:wheels_" + platform for platform in platforms_of(archs)]
  for target in [*targets, *more]:
    for wheel in built_files(python, target, arch_flags(archs)):
      wheels[wheel.name] = wheel
  out.mkdir(parents=True, exist_ok=True)
  result = []
  for name, wheel in sorted(wheels.items()):
    # Over a file of an earlier run, which is read-only as Bazel's files are.
    (out / name).unlink(missing_ok=True)
    result.append(pathlib.Path(shutil.copy(wheel, out / name)))
    result[-1].chmod(0o644)
    print(f"{(out / name).stat().st_size / 1e6:8.2f} MB  {out / name}")
  return result


def architectures() -> dict:
  """What third_party/aiter/configs/archs.csv says, by name."""
  sys.path.insert(0, str(ROOT))
  from third_party.aiter.aot import archs

  return archs.ARCHS


def find_gpu() -> tuple[str, str]:
  """(platform, archs) of this machine; platform "cpu" if it has no GPU."""
  capabilities = output(
    ["nvidia-smi", "--query-gpu=compute_cap", "--format=csv,noheader"]
  )
  if capabilities and capabilities.strip():
    found = sorted(set(capabilities.split()))
    archs = {
      arch.name
      for arch in architectures().values()
      for c in found
      if arch.capabilities[0] <= int(c.replace(".", "")) <= arch.capabilities[1]
    }
    if archs:
      return "cuda", ",".join(sorted(archs))
    print(f"No kernels for compute capability {', '.join(found)}.")
  archs = set()
  nodes = pathlib.Path("/sys/class/kfd/kfd/topology/nodes")
  for properties in nodes.glob("*/properties"):
    match = re.search(r"gfx_target_version (\d+)", properties.read_text())
    version = int(match[1]) if match else 0
    if version:
      major, minor, step = version // 10000, version // 100 % 100, version % 100
      archs.add(f"gfx{major}{minor:x}{step:x}")
  if archs and os.path.exists("/dev/kfd"):
    known = archs & set(architectures())
    if known:
      return "rocm", ",".join(sorted(known))
    print(f"No kernels for {', '.join(sorted(archs))}.")
  return "cpu", "gfx942"


def lock(name: str, without: Iterable[str] = ()) -> str:
  """A lock file's requirements."""
  text = (LOCKS / f"{name}_lock.txt").read_text()
  for project in without:
    text = re.sub(rf"(?m)^{project}==.*(\n[ #].*)*\n", "", text)
  return text


def locked_wheels(
  python: str, wheels: Iterable[pathlib.Path], names: Iterable[str]
) -> str:
  """Requirements for those of our wheels that fit the Python."""
  tag = output(
    [python, "-c", "import sys; print('cp%d%d' % sys.version_info[:2])"]
  ).strip()
  lines = ""
  for wheel in wheels:
    name, _, python_tag, abi, _ = wheel.name.split("-")
    if name in names and (abi in ("none", "abi3") or python_tag == tag):
      digest = hashlib.sha256(wheel.read_bytes()).hexdigest()
      uri = wheel.absolute().as_uri()
      lines += f"{name} @ {uri} --hash=sha256:{digest}\n"
  return lines


def install(python: str) -> tuple[pathlib.Path, str]:
  """Builds the wheels for this machine and installs them in .venv.

  Returns:
    .venv's interpreter and the platform.
  """
  platform, archs = find_gpu()
  say(
    f"Building wheels for {archs}"
    + (", to show them; no GPU here" if platform == "cpu" else "")
  )
  wheels = build_wheels(python, archs, ROOT / "dist")
  requirements = lock("requirements")
  names = ["jax_aiter", "jax_rocm7_plugin"]
  if platform == "cuda":
    requirements += lock("cuda_requirements")
    names = ["jax_aiter", "jax_aiter_cuda13"]
  elif platform == "rocm":
    # Without a GPU this would only complain that there is none.
    requirements += lock("rocm_requirements", without=["jax-rocm7-plugin"])
  requirements += locked_wheels(python, wheels, names)
  say("Installing them in .venv")
  return locked_venv(VENV, python, requirements), platform


def environment_for(platform: str) -> dict[str, str]:
  """Without a GPU, JAX need not look for one."""
  if platform == "cpu":
    return {"JAX_PLATFORMS": "cpu"} | os.environ
  return dict(os.environ)


def families_with(file: str) -> list[str]:
  """Families of operators that have a file, whose name has theirs."""
  folders = (ROOT / "jax/_src/aiter").iterdir()
  return sorted(
    family.name
    for family in folders
    if (ROOT / file.format(family.name)).exists()
  )


# Commands.


def demo(args: argparse.Namespace) -> None:
  interpreter, platform = install(prepare())
  out = ROOT / "dist/train_gpt"
  say("Training a small GPT twice, with our operators and with plain JAX")
  run(
    [interpreter, ROOT / "examples/train_gpt.py", "--out", out, *args.rest],
    env=environment_for(platform),
  )
  say(f"Both loss curves: {out / 'loss.png'}")
  say("Serving it: continuous batching over a paged cache, and plain JAX")
  weights = out / "weights.npz"
  run(
    [interpreter, ROOT / "examples/serve_gpt.py", "--weights", weights],
    env=environment_for(platform),
  )
  if platform == "cpu":
    interpreter, environment = simulated("gfx942", devices=1)
    say("Training and serving a tiny GPT on a simulated MI300X and on the CPU")
    run(
      [interpreter, ROOT / "examples/tiny_gpt.py"],
      env=environment | {"JAX_PLATFORMS": "rocm,cpu"},
    )


def bench(args: argparse.Namespace) -> None:
  interpreter, platform = install(prepare())
  program = ROOT / f"benchmarks/{args.op}.py"
  run(
    [interpreter, program, "--out", ROOT / "dist" / args.op, *args.rest],
    env=environment_for(platform),
  )


def tune(args: argparse.Namespace) -> None:
  if args.simulated:
    tune_simulated(args)
    return
  if not (args.op and args.shapes):
    fail("tune wants --op and --shapes, or --simulated")
  shapes = args.shapes.absolute()
  if find_gpu()[0] == "cpu":
    fail("tune measures on a GPU, and there is none here that has kernels")
  interpreter, platform = install(prepare())
  table = ROOT / f"third_party/aiter/configs/{args.op}_tuned.csv"
  say(f"Measuring every {args.op} kernel at the sizes of {shapes}")
  run(
    [
      interpreter,
      ROOT / f"benchmarks/tune_{args.op}.py",
      *("--shapes", shapes, "--out", table),
      *args.rest,
    ],
    env=environment_for(platform),
  )


def candidates(row: dict, changes: Sequence[str]) -> dict[str, dict]:
  """A table's row as it is, and with each combination of changes.

  Args:
    row: its cells.
    changes: such as "num_warps=4,8". What is no column is one of the row's
      options, which an empty value removes.

  Returns:
    What is changed -> the row.
  """
  found = {"as it is": row}
  names, values = zip(*(change.split("=", 1) for change in changes))
  for chosen in itertools.product(*(value.split(",") for value in values)):
    cells = dict(row)
    options = dict(option.split("=", 1) for option in row["options"].split())
    for name, value in zip(names, chosen):
      (cells if name in row else options)[name] = value
    cells["options"] = " ".join(f"{k}={v}" for k, v in options.items() if v)
    if cells != row:
      found[" ".join(map("=".join, zip(names, chosen)))] = cells
  return found


def table_of(kernel: str) -> tuple[pathlib.Path, dict]:
  """The table of configs that has a kernel's row, and its rows by name."""
  sys.path.insert(0, str(ROOT))
  from third_party.aiter.aot import table

  for file in sorted((ROOT / "third_party/aiter/configs").glob("*.csv")):
    try:
      rows = table.read(file)
    except ValueError:
      continue  # It is no table of kernels.
    if kernel in rows:
      return file, rows
  fail(f"no row of third_party/aiter/configs is of {kernel}")


def tune_simulated(args: argparse.Namespace) -> None:
  """Predicts changed rows of a kernel, each in a wheel of its own."""
  if not args.change or not all("=" in change for change in args.change):
    fail(f"--change is {args.change}, not such as num_warps=4,8")
  file, rows = table_of(args.simulated)
  header, _, row = rows[args.simulated]
  text = file.read_text()
  found = []
  try:
    for change, cells in candidates(row, args.change).items():
      lines = {name: line for name, (_, line, _) in rows.items()}
      lines[args.simulated] = ",".join(cells.values())
      file.write_text("\n".join([header, *lines.values()]) + "\n")
      say(f"{args.simulated}: {change}")
      with tempfile.TemporaryDirectory() as folder:
        try:
          interpreter, environment = simulated(row["arch"], devices=1)
          program = [interpreter, ROOT / "benchmarks/predict.py"]
          run([*program, "--out", folder, *args.rest], env=environment)
        except SystemExit as failure:
          print(failure)
          found.append((math.inf, change, ["does not build, or does not run"]))
          continue
        with (pathlib.Path(folder) / "predict.csv").open() as stream:
          told = list(csv.DictReader(stream))
      found.append((
        sum(float(line["us"]) for line in told),
        change,
        [
          f"{line['problem']}: {float(line['us']):.1f} us, {line['bound']}"
          for line in told
        ],
      ))
  finally:
    file.write_text(text)
  say(f"{args.simulated}, predicted; {file.name} is as before")
  for _, change, told in sorted(found):
    print("\n    ".join([change, *told]))


def simulated(arch: str, devices: int) -> tuple[pathlib.Path, dict[str, str]]:
  """Builds wheels and a simulator and installs them in .venv_sim.

  Returns:
    .venv_sim's interpreter, and the environment of what runs there.
  """
  python = prepare(simulator=True)
  say(f"Building wheels for {arch} and its simulator")
  wheels = build_wheels(
    python,
    arch,
    ROOT / "dist/sim",
    more=["//tests/amdgpu_sim:amdgpu_sim"],
  )
  requirements = (
    lock("requirements")
    + lock("rocm_requirements", without=["jax-rocm7-plugin"])
    + locked_wheels(
      python, wheels, ["jax_aiter", "jax_rocm7_plugin", "amdgpu_sim"]
    )
  )
  interpreter = locked_venv(SIM_VENV, python, requirements)
  return interpreter, os.environ | {
    "AMDGPU_SIM_ARCH": arch,
    "AMDGPU_SIM_DEVICES": str(devices),
    "JAX_PLATFORMS": "rocm",
    "PATH": f"{interpreter.parent}{os.pathsep}{os.environ['PATH']}",
    "VIRTUAL_ENV": str(SIM_VENV),
  }


def sim(args: argparse.Namespace) -> None:
  _, environment = simulated(args.arch, args.devices)
  if args.stats:
    environment["AMDGPU_SIM_STATS"] = str(args.stats.absolute())
  if args.checks:
    environment["AMDGPU_SIM_CHECKS"] = args.checks
  if args.clock:
    clock = args.clock if args.clock == "-" else os.path.abspath(args.clock)
    environment["AMDGPU_SIM_CLOCK"] = clock
  if args.svg:
    environment.setdefault("AMDGPU_SIM_CLOCK", os.devnull)
    environment["AMDGPU_SIM_CLOCK_SVG"] = str(args.svg.absolute())
  say(f"Running on {args.devices} simulated {args.arch}")
  sys.stdout.flush()
  os.execvpe(args.command[0], args.command, environment)


def wheels(args: argparse.Namespace) -> None:
  build_wheels(prepare(), args.archs, args.out)


def test_results(events: pathlib.Path) -> tuple[dict, int]:
  """What a Bazel run's events say of its tests.

  Returns:
    (label, shard, run) -> result, of the last attempt; and how many targets
    there is no result of, because they did not build.
  """
  results, failed = {}, 0
  for line in events.read_text().splitlines():
    event = json.loads(line)
    if "testResult" in event and "testResult" in event["id"]:
      key = event["id"]["testResult"]
      shard = key["label"], key.get("shard"), key.get("run")
      results[shard] = event["testResult"]
    elif "testSummary" in event and "testSummary" in event["id"]:
      label = event["id"]["testSummary"]["label"]
      status = event["testSummary"].get("overallStatus")
      if status == "NO_STATUS" and not any(k[0] == label for k in results):
        results[label, None, None] = {"status": "NO_STATUS"}
    elif "aborted" in event and "targetCompleted" in event["id"]:
      # What this machine is not made for, a test of a GPU, is SKIPPED.
      failed += event["aborted"].get("reason") != "SKIPPED"
    elif event.get("completed", {"success": True}).get("success") is not True:
      failed += "completed" in event
  return results, failed


def slowest(results: dict, count: int) -> list[tuple[float, str]]:
  """(seconds of all shards, label) of the slowest tests that ran."""
  seconds = collections.Counter()
  for (label, *_), result in results.items():
    if not result.get("cachedLocally"):
      duration = int(result.get("testAttemptDurationMillis", 0)) / 1000
      seconds[label] += duration
  return [(s, label) for label, s in seconds.most_common(count)]


def count_cases(results: Iterable[dict]) -> tuple[int, int, int]:
  """Counts test cases of results: passed, failed, skipped.

  A target that failed without saying in which case counts as one failure.
  """
  passed = failed = skipped = 0
  for result in results:
    bad = 0
    for file in result.get("testActionOutput", []):
      if file["name"] != "test.xml":
        continue
      path = urllib.parse.unquote(urllib.parse.urlparse(file["uri"]).path)
      try:
        cases = list(xml.etree.ElementTree.parse(path).iter("testcase"))
      except xml.etree.ElementTree.ParseError:
        cases = []  # The test was stopped before it wrote the file.
      for case in cases:
        if case.find("failure") is not None or case.find("error") is not None:
          bad += 1
        elif (
          case.find("skipped") is not None
          or case.get("status") == "notrun"
          or case.get("result") in ("skipped", "suppressed")
        ):
          skipped += 1
        else:
          passed += 1
    if result["status"] not in ("PASSED", "FLAKY"):
      bad = max(bad, 1)
    failed += bad
  return passed, failed, skipped


# Two architectures, one a platform: every kind of file of a release.
_OFFLINE_ARCHS = "gfx942,sm_90"


def offline_build(python: str) -> str | None:
  """Builds wheels twice, from a source archive and without a network.

  Of the kernels a sample: one of each source and operator.

  Each build has a folder, an output root and dependencies of its own, and no
  cache: the dependencies are fetched, then the build runs in a namespace that
  has no network.

  Returns:
    What went wrong, or None. Where this process may not make a namespace, that
    is said, and nothing is built.
  """
  say("Building the wheels twice from an archive, without a network")
  unshare = ["unshare", "--net"] + ["--map-root-user"] * (os.geteuid() != 0)
  if output([*unshare, "true"]) is None:
    print("Left out: this machine lets nobody make a network namespace.")
    return None
  tree = output(["git", "-C", str(ROOT), "stash", "create"]) or ""
  flags = arch_flags(_OFFLINE_ARCHS)
  flags.append("--//third_party/aiter:sampled=" + _OFFLINE_ARCHS)
  builds = []
  with tempfile.TemporaryDirectory() as folder:
    for name in ("once", "again"):
      source = pathlib.Path(folder) / name
      base = pathlib.Path(folder) / f"{name}_output"
      source.mkdir()
      archive = ["git", "-C", ROOT, "archive", tree.strip() or "HEAD"]
      with subprocess.Popen(archive, stdout=subprocess.PIPE) as git:
        run(["tar", "-x", "-C", source], stdin=git.stdout)
      command = [source / "tools/bazel", "--batch", f"--output_base={base}"]
      settings = [f"--repo_env=PYTHON_BIN_PATH={python}"]
      targets = ["//build:wheels_rocm", "//build:wheels_cuda"]
      for step in (
        [*command, "fetch", *settings, *targets],
        [
          *(*unshare, *command, "build", *settings),
          *("--disk_cache=", *flags, *targets),
        ],
      ):
        step = [str(word) for word in step]
        print("$ " + shlex.join(step), flush=True)
        if subprocess.run(step, cwd=source, check=False).returncode:
          return shlex.join(step)
      wheels = source.glob("bazel-bin/build/*/*.whl")
      builds.append({
        wheel.name: hashlib.sha256(wheel.read_bytes()).hexdigest()
        for wheel in wheels
      })
      # What Bazel writes is read-only.
      run(["chmod", "-R", "u+w", base])
  once, again = builds
  for name in sorted(once | again):
    print(f"{once.get(name)}  {name}")
  return None if once and once == again else "the two builds differ"


def test(args: argparse.Namespace) -> None:
  python = prepare(simulator=True)
  targets = args.targets or ["//..."]
  gpu, _ = find_gpu()
  results, unbuilt = {}, 0
  if args.all:
    archs = args.archs or "all"
    # Twenty times the drawn cases take longer than a target may elsewhere.
    which = ["--test_env=AITER_TESTS=all", "--test_timeout=7200"]
  else:
    archs = args.archs
    which = ["--config=ci"] if gpu == "cpu" and not archs else []
    if not args.targets:  # Named targets run in any case.
      which += ["--build_tests_only", "--test_tag_filters=-all"]
  with tempfile.TemporaryDirectory() as folder:
    events = pathlib.Path(folder) / "events.json"
    command = bazel(
      "test",
      python,
      "--keep_going",
      f"--build_event_json_file={events}",
      *([] if gpu == "cpu" else ["--//tests:gpu=" + gpu]),
      *test_flags(archs),
      *which,
      "--",
      *targets,
    )
    print("$ " + shlex.join(command), flush=True)
    status = subprocess.run(command, cwd=ROOT, check=False).returncode
    if events.exists():
      results, unbuilt = test_results(events)
    passed, failed, skipped = count_cases(results.values())
    failed += unbuilt
  if args.all and not args.targets:
    wrong = offline_build(python)
    if wrong:
      print(f"The build without a network failed: {wrong}")
    passed, failed = passed + (not wrong), failed + bool(wrong)
    status = status or int(bool(wrong))
  if status and not failed:
    failed = 1
  slow = slowest(results, 10)
  if slow:
    print("The slowest tests, in seconds of all their shards:")
    for seconds, label in slow:
      print(f"{seconds:8.1f}  {label}")
  if skipped:
    print(f"{skipped} skipped")
  print(f"{passed} passed, {failed} failed", flush=True)
  sys.exit(status)


def tracked(*suffixes: str) -> list[str]:
  """The tree's files with one of these suffixes."""
  listed = output(
    ["git", "-C", str(ROOT), "ls-files", "-co", "--exclude-standard"]
  )
  if listed is None:
    fail("lint wants a git checkout")
  return [
    name
    for name in listed.splitlines()
    if name.endswith(suffixes) and (ROOT / name).exists()
  ]


def lint(args: argparse.Namespace) -> None:
  python = prepare()
  install_packages(LINT_TOOLS, {})
  tools = locked_venv(CACHE / "lint", python, lock("lint_requirements")).parent
  npm = CACHE / "npm"
  buildifier = npm / "node_modules/.bin/buildifier"
  wanted = (ROOT / "third_party/npm/package-lock.json").read_bytes()
  present = npm / "package-lock.json"
  if not buildifier.exists() or present.read_bytes() != wanted:
    npm.mkdir(parents=True, exist_ok=True)
    for name in ("package.json", "package-lock.json"):
      shutil.copy(ROOT / "third_party/npm" / name, npm)
    run(["npm", "ci", "--silent", "--no-audit", "--no-fund"], cwd=npm)

  python_files = tracked(".py")
  cpp_files = tracked(".cc", ".h")
  bazel_files = tracked(".bazel", ".bzl", "WORKSPACE")
  # Python is set by hand, as in jax: a formatter would give every argument of
  # a kernel a line of its own.
  checks = [
    [tools / "ruff", "check", *(["--fix"] if args.fix else []), *python_files],
    [
      tools / "clang-format",
      *(["-i"] if args.fix else ["--dry-run", "--Werror"]),
      *cpp_files,
    ],
    [
      buildifier,
      "-lint=" + ("fix" if args.fix else "warn"),
      "-mode=" + ("fix" if args.fix else "check"),
      "-warnings=-module-docstring,-function-docstring",
      *bazel_files,
    ],
  ]
  failures = []
  for command in checks:
    name = pathlib.Path(command[0]).name
    say(f"{name} {command[1]}")
    if subprocess.run(command, cwd=ROOT, check=False).returncode:
      failures.append(name)
  if failures:
    fail("lint: " + ", ".join(failures) + "; `build.py lint --fix` mends most")
  print("lint: nothing to say")


def main() -> None:
  parser = argparse.ArgumentParser(
    description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
  )
  commands = parser.add_subparsers(required=True, metavar="command")
  archs_help = "comma-separated, such as gfx942,sm_90, or all; default: CI's"

  def command(function, text: str) -> argparse.ArgumentParser:
    added = commands.add_parser(function.__name__, help=text)
    added.set_defaults(function=function)
    return added

  command(demo, "build, install, and train a small GPT")
  added = command(bench, "time an operator; further flags go to the benchmark")
  added.add_argument(
    "--op", choices=families_with("benchmarks/{}.py"), default="attention"
  )
  added = command(tune, "choose kernels; further flags go to the program")
  added.add_argument("--op", choices=families_with("benchmarks/tune_{}.py"))
  added.add_argument(
    "--shapes",
    type=pathlib.Path,
    help="CSV with the columns op,dtype,m,n,k",
  )
  added.add_argument(
    "--simulated",
    metavar="KERNEL",
    help="measure nothing: predict changed rows of this kernel on a simulated "
    "GPU; further flags go to benchmarks/predict.py",
  )
  added.add_argument(
    "--change",
    action="append",
    help="values of a column or an option of the row: num_warps=4,8",
  )
  added = command(sim, "run a program on simulated AMD GPUs")
  added.add_argument(
    "--arch", default="gfx942", choices=["gfx90a", "gfx942", "gfx950"]
  )
  added.add_argument("--devices", type=int, default=1, choices=range(1, 9))
  added.add_argument(
    "--stats",
    type=pathlib.Path,
    nargs="?",
    const=pathlib.Path("sim_stats.csv"),
    help="print a table of kernels and write it to a CSV; default: %(const)s",
  )
  added.add_argument(
    "--clock",
    nargs="?",
    const="-",
    metavar="FILE",
    help="predict what each launch would take and print a report, or write one "
    "line of JSON each to a file",
  )
  added.add_argument(
    "--json",
    dest="clock",
    action="store_const",
    const="/dev/stdout",
    help="with --clock: lines of JSON on stdout instead of the report",
  )
  added.add_argument(
    "--svg",
    type=pathlib.Path,
    help="draw what the waves of a compute unit do in the longest launch, as "
    "predicted, to this file",
  )
  added.add_argument(
    "--checks", help="changes to the checks: --checks=-uninitialized,+lds_wait"
  )
  added.add_argument(
    "command", nargs="+", help="after --, such as: python program.py"
  )
  added = command(test, "run the tests")
  added.add_argument(
    "--all",
    action="store_true",
    help="run what is left out of each day's run, too: every architecture, all "
    "cases of each, long searches, every sanitizer, a build without a network",
  )
  added.add_argument("--archs", help=archs_help)
  added.add_argument("targets", nargs="*", help="Bazel targets; default: all")
  added = command(wheels, "build wheels")
  added.add_argument("--archs", help=archs_help)
  added.add_argument("--out", type=pathlib.Path, default=ROOT / "dist")
  added = command(lint, "check Python, C++ and Bazel files")
  added.add_argument("--fix", action="store_true", help="and mend them")

  args, rest = parser.parse_known_args()
  if rest and args.function not in (demo, bench, tune):
    parser.error("unknown arguments: " + " ".join(rest))
  args.rest = rest
  args.function(args)


if __name__ == "__main__":
  try:
    main()
  except KeyboardInterrupt:
    sys.exit(130)
