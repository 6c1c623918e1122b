"""rules_python's module of this name, over Bazel 4's own provider."""

load(":builtin.bzl", "BuiltinPyInfo")

PyInfo = BuiltinPyInfo
