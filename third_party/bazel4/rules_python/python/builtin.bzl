# SPDX-License-Identifier: Apache-2.0
"""Bazel 4's provider under another name, as a file cannot reuse a built-in's."""

# buildifier: disable=native-py
BuiltinPyInfo = PyInfo
