# SPDX-License-Identifier: Apache-2.0
"""rules_python's module of this name, over Bazel 4's own provider."""

load(":builtin.bzl", "BuiltinPyInfo")

PyInfo = BuiltinPyInfo
