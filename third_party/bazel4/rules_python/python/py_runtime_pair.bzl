# SPDX-License-Identifier: Apache-2.0
"""rules_python's module of this name, over Bazel 4's own rule."""

load("@bazel_tools//tools/python:toolchain.bzl", _py_runtime_pair = "py_runtime_pair")

py_runtime_pair = _py_runtime_pair
