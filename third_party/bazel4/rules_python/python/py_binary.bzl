# SPDX-License-Identifier: Apache-2.0
"""rules_python's module of this name, over Bazel 4's own rule."""

# buildifier: disable=native-py
py_binary = native.py_binary
