# SPDX-License-Identifier: Apache-2.0
"""The system's liblzma, linked statically: no manylinux platform has it."""

def _impl(repository_ctx):
    if not repository_ctx.path("/usr/include/lzma.h").exists:
        fail("lzma.h not found: install the package liblzma-dev")
    repository_ctx.file("BUILD.bazel", """
load("@rules_cc//cc:cc_library.bzl", "cc_library")

cc_library(
    name = "xz",
    linkopts = ["-l:liblzma.a"],
    visibility = ["//visibility:public"],
)
""")

xz_configure = repository_rule(implementation = _impl, configure = True)
