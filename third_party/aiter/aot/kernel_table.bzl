# SPDX-License-Identifier: Apache-2.0
"""Reads configs/*.csv while Bazel loads, so that each row is an action.

A changed row then recompiles one kernel, and a removed row leaves no trace.
"""

_KEY = ["op", "grade", "arch", "dtype", "dqk", "dv"]

def _symbol(row):
    """The row's unique name; compile.py has the same rule."""
    cells = [row[column] for column in ["op", "grade", "dtype", "dqk", "dv", "arch"]]
    for option in row.get("options", "").split(" "):
        if option.startswith("excludes="):
            cells.append("no_" + option[len("excludes="):].replace("+", "_"))
    return "_".join(cells)

def _impl(repository_ctx):
    path = repository_ctx.path(repository_ctx.attr.table)
    lines = [line.strip() for line in repository_ctx.read(path).split("\n")]
    lines = [line for line in lines if line and not line.startswith("#")]
    header = lines[0]
    columns = header.split(",")
    for column in _KEY:
        if column not in columns:
            fail("%s: no column %s" % (path, column))
    rows = []
    seen = {}
    for line in lines[1:]:
        cells = line.split(",")
        if len(cells) != len(columns):
            fail("%s: %d cells for %d columns: %s" % (path, len(cells), len(columns), line))
        row = dict(zip(columns, cells))
        symbol = _symbol(row)
        if symbol in seen:
            fail("%s: %s stands twice" % (path, symbol))
        seen[symbol] = True
        rows.append("    struct(arch = %r, op = %r, symbol = %r, line = %r)," %
                    (row["arch"], row["op"], symbol, line))
    repository_ctx.file("BUILD.bazel", "")
    repository_ctx.file("table.bzl", "\n".join(
        ["HEADER = %r" % header, "ROWS = ["] + rows + ["]", ""],
    ))

kernel_table = repository_rule(
    implementation = _impl,
    attrs = {"table": attr.label(mandatory = True, allow_single_file = True)},
)
