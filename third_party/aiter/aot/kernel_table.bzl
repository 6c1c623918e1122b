# SPDX-License-Identifier: Apache-2.0
"""Reads configs/*.csv while Bazel loads, so that each row is an action.

A changed row then recompiles one kernel, and a removed row leaves no trace.
"""

_KEY = ["op", "grade", "arch", "dtype"]

_TILE = ["tile_m", "tile_n", "tile_k"]

def _symbol(columns, row):
    """The row's unique name; compile.py has the same rule."""
    sizes = [row[column] for column in columns[len(_KEY):columns.index("tile_m")]]
    if not sizes:
        sizes = ["x".join([row[column] for column in _TILE])]
    cells = [row[column] for column in ["op", "grade", "dtype"]] + sizes + [row["arch"]]
    for option in row.get("options", "").split(" "):
        if option.startswith("excludes="):
            cells.append("no_" + option[len("excludes="):].replace("+", "_"))
    return "_".join(cells)

def _rows(repository_ctx, table):
    """The rows of one file, as Starlark text by symbol."""
    path = repository_ctx.path(table)
    lines = [line.strip() for line in repository_ctx.read(path).split("\n")]
    lines = [line for line in lines if line and not line.startswith("#")]
    header = lines[0]
    columns = header.split(",")
    if columns[:len(_KEY)] != _KEY or "tile_m" not in columns:
        fail("%s: columns must begin with %s and have tile_m" % (path, ",".join(_KEY)))
    rows = {}
    for line in lines[1:]:
        cells = line.split(",")
        if len(cells) != len(columns):
            fail("%s: %d cells for %d columns: %s" % (path, len(cells), len(columns), line))
        row = dict(zip(columns, cells))
        symbol = _symbol(columns, row)
        if symbol in rows:
            fail("%s: %s stands twice" % (path, symbol))
        module = ""
        for option in row.get("options", "").split(" "):
            if option.startswith("module="):
                module = option[len("module="):]
        rows[symbol] = "    struct(arch = %r, op = %r, module = %r, symbol = %r, header = %r, line = %r)," % (
            row["arch"],
            row["op"],
            module,
            symbol,
            header,
            line,
        )
    return rows

def _impl(repository_ctx):
    rows = {}
    for table in repository_ctx.attr.tables:
        rows.update(_rows(repository_ctx, table))
    repository_ctx.file("BUILD.bazel", "")
    repository_ctx.file("table.bzl", "\n".join(["ROWS = ["] + rows.values() + ["]", ""]))

kernel_table = repository_rule(
    implementation = _impl,
    doc = "Columns left of tile_m say what a kernel is for; the others how to build it.",
    attrs = {"tables": attr.label_list(mandatory = True, allow_files = [".csv"])},
)
