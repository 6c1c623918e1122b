# SPDX-License-Identifier: Apache-2.0
"""Reads configs/*.csv while Bazel loads, so that each row is an action.

table.py does it; here is what Bazel has to know of that.
"""

def _watched(repository_ctx, package, file):
    """The path of a file of the library; the repository is made anew if it changes."""
    return repository_ctx.path(Label("//third_party/aiter/%s:%s" % (package, file)))

def _impl(repository_ctx):
    program = _watched(repository_ctx, "aot", "table.py")
    for file in ["archs.py", "family.py"]:
        _watched(repository_ctx, "aot", file)
    for table in ["archs"] + repository_ctx.attr.families:
        _watched(repository_ctx, "configs", table + ".csv")
    kernels = _watched(repository_ctx, "kernels", "BUILD.bazel").dirname
    for folder in kernels.readdir():
        for file in folder.readdir() if "." not in folder.basename else []:
            if file.basename.endswith(".py"):
                _watched(repository_ctx, "kernels", "%s/%s" % (folder.basename, file.basename))

    # The label makes Bazel configure the interpreter first. It runs last: at
    # each file that Bazel has not seen it begins this function again.
    python = repository_ctx.read(Label("@local_python//:path.txt")).strip()
    result = repository_ctx.execute(
        [python, "-B", program, "--out-bzl", "table.bzl"] + repository_ctx.attr.families,
        environment = {"PYTHONPATH": str(program.dirname.dirname.dirname.dirname)},
    )
    if result.return_code:
        fail("The kernels' tables:\n" + result.stderr)
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
