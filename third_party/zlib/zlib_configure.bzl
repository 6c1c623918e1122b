# SPDX-License-Identifier: Apache-2.0
"""The system's zlib; every manylinux platform has libz.so.1."""

def _impl(repository_ctx):
    if not repository_ctx.path("/usr/include/zlib.h").exists:
        fail("zlib.h not found: install the package zlib1g-dev")
    repository_ctx.file("BUILD.bazel", """
load("@rules_cc//cc:cc_library.bzl", "cc_library")

cc_library(
    name = "zlib",
    linkopts = ["-lz"],
    visibility = ["//visibility:public"],
)
""")

zlib_configure = repository_rule(implementation = _impl, configure = True)
