# SPDX-License-Identifier: Apache-2.0
"""rules_cc's module of this name, over Bazel 4's own rule."""

# buildifier: disable=native-cc
cc_library = native.cc_library
