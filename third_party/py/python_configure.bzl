# SPDX-License-Identifier: Apache-2.0
"""A repository for the Python that builds and runs everything here.

PYTHON_BIN_PATH names it; otherwise it is the first of python3.12, 3.13 and
3.14 on PATH or under pyenv.
"""

_VERSIONS = ["3.12", "3.13", "3.14"]

_DESCRIBE = """
import sys, sysconfig
print(sys.executable)
print(sysconfig.get_path("include"))
print("cp%d%d" % sys.version_info[:2])
print(sys.version_info >= (3, 12))
"""

_BUILD = """
load("@rules_cc//cc:cc_library.bzl", "cc_library")
load("@rules_python//python:py_runtime.bzl", "py_runtime")
load("@rules_python//python:py_runtime_pair.bzl", "py_runtime_pair")

package(default_visibility = ["//visibility:public"])

cc_library(
    name = "headers",
    hdrs = glob(["include/**/*.h"]),
    includes = ["include"],
)

py_runtime(
    name = "py3_runtime",
    interpreter_path = "{python}",
    python_version = "PY3",
    # Strict action environments have no `python` on PATH.
    stub_shebang = "#!{python}",
)

py_runtime_pair(
    name = "py_runtime_pair",
    py2_runtime = None,
    py3_runtime = ":py3_runtime",
)

toolchain(
    name = "py_toolchain",
    toolchain = ":py_runtime_pair",
    toolchain_type = "@rules_python//python:toolchain_type",
)
"""

def _describe(repository_ctx, python):
    """Returns [executable, include directory, tag], or None if unsuitable."""
    result = repository_ctx.execute([python, "-I", "-c", _DESCRIBE])
    if result.return_code:
        return None
    lines = result.stdout.strip().split("\n")
    if lines[3] != "True" or not repository_ctx.path(lines[1] + "/Python.h").exists:
        return None
    return lines[:3]

def _candidates(repository_ctx):
    home = repository_ctx.os.environ.get("HOME", "")
    result = []
    for version in _VERSIONS:
        on_path = repository_ctx.which("python" + version)
        if on_path:
            result.append(on_path)
        versions = repository_ctx.path(home + "/.pyenv/versions")
        if home and versions.exists:
            result.extend([
                str(path) + "/bin/python3"
                for path in versions.readdir()
                if path.basename.startswith(version + ".")
            ])
    return result

def find_python(repository_ctx):
    """Finds the interpreter.

    Args:
      repository_ctx: a repository rule's context.

    Returns:
      [executable, include directory, tag such as "cp312"].
    """
    named = repository_ctx.os.environ.get("PYTHON_BIN_PATH", "")
    for python in [named] if named else _candidates(repository_ctx):
        found = _describe(repository_ctx, python)
        if found:
            return found
    fail("%s: not a Python >= 3.12 with its headers; name one with --repo_env=PYTHON_BIN_PATH=/path/to/python3" %
         (named or "python3.12, python3.13, python3.14"))

def _impl(repository_ctx):
    python, include, tag = find_python(repository_ctx)
    repository_ctx.symlink(include, "include")
    repository_ctx.file("BUILD.bazel", _BUILD.format(python = python))
    repository_ctx.file("python.bzl", "PYTHON_TAG = \"%s\"\n" % tag)
    repository_ctx.file("path.txt", python)

python_configure = repository_rule(
    implementation = _impl,
    configure = True,
    environ = ["HOME", "PATH", "PYTHON_BIN_PATH"],
)
