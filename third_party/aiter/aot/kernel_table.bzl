# SPDX-License-Identifier: Apache-2.0
"""Reads configs/*.csv while Bazel loads, so that each row is an action.

table.py does it; here is what Bazel has to know of that.
"""

def _watched(repository_ctx, file):
    """The path of a file of the tree; the repository is made anew if it changes.

    Args:
      repository_ctx: the rule's context.
      file: from the root of the tree.
    """
    for package in [
        "third_party/aiter/aot",
        "third_party/aiter/configs",
        "third_party/aiter/kernels",
    ]:
        if file.startswith(package + "/"):
            return repository_ctx.path(Label("//%s:%s" % (package, file[len(package) + 1:])))
    fail("%s is of no package that the kernels are made from" % file)

def _impl(repository_ctx):
    program = _watched(repository_ctx, "third_party/aiter/aot/table.py")
    for file in ["archs.py", "family.py"]:
        _watched(repository_ctx, "third_party/aiter/aot/" + file)
    for family in repository_ctx.attr.families:
        _watched(repository_ctx, "third_party/aiter/configs/%s.csv" % family)
        _watched(repository_ctx, "third_party/aiter/kernels/%s/family.py" % family)

    # The label makes Bazel configure the interpreter first.
    python = repository_ctx.read(Label("@local_python//:path.txt")).strip()
    command = [python, "-B", program, "--out-bzl", "table.bzl", "--out-inputs", "inputs.txt"]
    result = repository_ctx.execute(
        command + repository_ctx.attr.families,
        environment = {"PYTHONPATH": str(program.dirname.dirname.dirname.dirname)},
    )
    if result.return_code:
        fail("The kernels' tables:\n" + result.stderr)
    for file in repository_ctx.read("inputs.txt").split("\n"):
        if file:
            _watched(repository_ctx, file)
    repository_ctx.file("BUILD.bazel", "")

kernel_table = repository_rule(
    implementation = _impl,
    attrs = {
        "families": attr.string_list(
            doc = "Folders of third_party/aiter/kernels, each with its configs/<family>.csv.",
            mandatory = True,
        ),
    },
)
