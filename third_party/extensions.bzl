# SPDX-License-Identifier: Apache-2.0
"""The repositories as a module extension.

Only MODULE.bazel loads this file: Bazel 4 has no `module_extension`.
"""

load("//third_party:repositories.bzl", _repositories = "repositories")

def _impl(_module_ctx):
    _repositories()

repositories = module_extension(implementation = _impl)
