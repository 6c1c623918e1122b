# SPDX-License-Identifier: Apache-2.0
"""The rule sets that Bazel 4 would otherwise download, as local repositories.

Each has the files that this tree and Bazel's own BUILD files load, so the same
`load` finds Bazel 4's built-in rules here and the real module under Bazel 7.
"""

_REPOSITORIES = [
    "remote_coverage_tools",
    "rules_cc",
    "rules_java",
    "rules_python",
]

# buildifier: disable=unnamed-macro
def bazel4_repositories():
    """Declares them, under the names that Bazel 4 wants."""
    for name in _REPOSITORIES:
        native.local_repository(
            name = name,
            path = "third_party/bazel4/" + name,
        )
