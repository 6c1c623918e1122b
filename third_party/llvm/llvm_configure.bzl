# SPDX-License-Identifier: Apache-2.0
"""The system's LLVM 22: its disassembler, for the simulator of AMD GPUs.

Nothing else needs it; where it is absent, only the simulator does not build.
"""

_ROOT = "/usr/lib/llvm-22"
_LIBRARY = "libLLVM.so.22.1"

def _impl(repository_ctx):
    include = repository_ctx.path(_ROOT + "/include/llvm-c")
    if not include.exists or not repository_ctx.path(_ROOT + "/lib/" + _LIBRARY).exists:
        fail("LLVM 22 not found: install the package llvm-22-dev; the simulator of AMD GPUs needs it")
    repository_ctx.symlink(include, "include/llvm-c")
    repository_ctx.symlink(_ROOT + "/include/llvm/Config", "include/llvm/Config")
    repository_ctx.file("BUILD.bazel", """
load("@rules_cc//cc:cc_library.bzl", "cc_library")

cc_library(
    name = "llvm",
    hdrs = glob([
        "include/llvm-c/**",
        "include/llvm/Config/**",
    ]),
    includes = ["include"],
    linkopts = [
        "-L{root}/lib",
        "-l:{library}",
    ],
    visibility = ["//visibility:public"],
)
""".format(library = _LIBRARY, root = _ROOT))

llvm_configure = repository_rule(implementation = _impl, configure = True)
