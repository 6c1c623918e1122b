# SPDX-License-Identifier: Apache-2.0
"""What Bazel 4's own files load from rules_cc."""

# buildifier: disable=native-cc
cc_binary = native.cc_binary

# buildifier: disable=native-cc
cc_import = native.cc_import

# buildifier: disable=native-cc
cc_library = native.cc_library

# buildifier: disable=native-cc
cc_test = native.cc_test

# buildifier: disable=native-cc
cc_toolchain = native.cc_toolchain

# buildifier: disable=native-cc
cc_toolchain_suite = native.cc_toolchain_suite
