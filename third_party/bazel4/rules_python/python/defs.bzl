# SPDX-License-Identifier: Apache-2.0
"""What Bazel 4's own files load from rules_python."""

load(":py_runtime_pair.bzl", _py_runtime_pair = "py_runtime_pair")

# buildifier: disable=native-py
py_binary = native.py_binary

# buildifier: disable=native-py
py_library = native.py_library

# buildifier: disable=native-py
py_runtime = native.py_runtime
py_runtime_pair = _py_runtime_pair

# buildifier: disable=native-py
py_test = native.py_test
