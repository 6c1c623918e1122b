# SPDX-License-Identifier: Apache-2.0
"""Rules that compile kernels ahead of time and make them C++ sources."""

load("@aiter_kernel_table//:table.bzl", "ARCHS", "ROWS", "SOURCES")
load(":settings.bzl", "AllowSpillsInfo", "ArchsInfo")

KernelsInfo = provider(
    doc = "Compiled kernels.",
    fields = {
        "descriptions": "JSON files, each beside its code object.",
        "objects": "Code objects.",
    },
)

_HEADERS = ["archs", "features", "grids"]

# What the declarations and the kernels are imported with: from the execution
# root, where they lie.
_ENV = {
    "PATH": "/usr/bin:/bin",
    "PYTHONPATH": ".",
}

def _family_headers_impl(ctx):
    headers = {
        name: ctx.actions.declare_file("%s/%s.h" % (ctx.attr.folder, name))
        for name in _HEADERS
    }
    args = ctx.actions.args()
    for name, header in headers.items():
        args.add("--out-" + name, header)
    args.add_all(ctx.files.families)
    ctx.actions.run(
        executable = ctx.executable._families,
        arguments = [args],
        env = _ENV,
        inputs = ctx.files.families,
        mnemonic = "FamilyHeaders",
        outputs = headers.values(),
        progress_message = "Writing the families' headers %s" % ctx.label,
    )
    return [DefaultInfo(files = depset(headers.values()))]

family_headers = rule(
    implementation = _family_headers_impl,
    doc = "What families.py writes: archs.h, features.h and grids.h in a folder.",
    attrs = {
        "families": attr.label_list(allow_files = [".py"], mandatory = True),
        "folder": attr.string(mandatory = True),
        "_families": attr.label(
            cfg = "exec",
            default = "//third_party/aiter/aot:families",
            executable = True,
        ),
    },
)

def _operator(row):
    return row.line.split(",")[row.header.split(",").index("op")]

def _triton_kernels_impl(ctx):
    archs = [
        arch.name
        for arch in ARCHS
        if arch.name in ctx.attr._archs[ArchsInfo].archs and ctx.attr.platform in ("", arch.platform)
    ]
    sources = {
        module: [source for source in ctx.files.srcs if source.short_path in files]
        for module, files in SOURCES.items()
    }
    sampled = ctx.attr._sampled[ArchsInfo].archs
    samples = {}
    bf16_alone = ctx.attr._bf16_alone[ArchsInfo].archs
    symbols = {row.symbol: True for row in ROWS}
    objects = []
    descriptions = []
    for row in ROWS:
        if row.arch not in archs:
            continue
        if ctx.attr.symbols and row.symbol not in ctx.attr.symbols:
            continue
        kind = (row.arch, row.module, _operator(row))
        if row.arch in sampled and samples.setdefault(kind, row) != row:
            continue
        twin = row.symbol.replace("_fp16_", "_bf16_")
        if row.arch in bf16_alone and twin != row.symbol and twin in symbols:
            continue
        stem = "%s/%s" % (ctx.label.name, row.symbol)
        code = ctx.actions.declare_file(stem + ".co")
        description = ctx.actions.declare_file(stem + ".json")
        args = ctx.actions.args()

        # A worker takes its requests from such files.
        args.use_param_file("@%s", use_always = True)
        args.set_param_file_format("multiline")
        args.add("--header", row.header)
        args.add("--row", row.line)
        args.add("--out-object", code)
        args.add("--out-json", description)
        ctx.actions.run(
            executable = ctx.executable._compiler,
            arguments = [args],
            env = _ENV,
            execution_requirements = {"supports-workers": "1"},
            inputs = sources[row.module],
            mnemonic = "TritonAot",
            outputs = [code, description],
            progress_message = "Compiling kernel " + row.symbol,
        )
        objects.append(code)
        descriptions.append(description)
    return [
        DefaultInfo(
            files = depset(objects + descriptions),
            runfiles = ctx.runfiles(files = objects + descriptions),
        ),
        KernelsInfo(objects = objects, descriptions = descriptions),
    ]

triton_kernels = rule(
    implementation = _triton_kernels_impl,
    doc = "Compiles each row of the kernel table that the build selects.",
    attrs = {
        "platform": attr.string(doc = "If given, only its architectures: rocm or cuda."),
        "srcs": attr.label_list(allow_files = [".py"], mandatory = True),
        "symbols": attr.string_list(doc = "If given, only these kernels."),
        "_archs": attr.label(default = "//third_party/aiter:archs"),
        "_bf16_alone": attr.label(default = "//third_party/aiter:bf16_alone"),
        "_compiler": attr.label(
            cfg = "exec",
            default = "//third_party/aiter/aot:compile",
            executable = True,
        ),
        "_sampled": attr.label(default = "//third_party/aiter:sampled"),
    },
)

def _descriptions(ctx):
    return [
        description
        for target in ctx.attr.kernels
        for description in target[KernelsInfo].descriptions
    ]

def _kernel_report_impl(ctx):
    table = ctx.actions.declare_file(ctx.label.name + ".csv")
    page = ctx.actions.declare_file(ctx.label.name + ".md")
    descriptions = _descriptions(ctx)
    args = ctx.actions.args()
    args.use_param_file("@%s")
    args.set_param_file_format("multiline")
    if not ctx.attr._allow_spills[AllowSpillsInfo].value:
        args.add("--check")
    args.add("--out-csv", table)
    args.add("--out-md", page)
    args.add_all(descriptions)
    ctx.actions.run(
        executable = ctx.executable._report,
        arguments = [args],
        inputs = descriptions,
        mnemonic = "KernelReport",
        outputs = [table, page],
        progress_message = "Writing the table of kernels %s" % ctx.label,
    )
    return [DefaultInfo(files = depset([table, page]))]

kernel_report = rule(
    implementation = _kernel_report_impl,
    doc = "The compiler's figures; fails if a kernel that must not spill does.",
    attrs = {
        "kernels": attr.label_list(mandatory = True, providers = [KernelsInfo]),
        "_allow_spills": attr.label(default = "//third_party/aiter:allow_spills"),
        "_report": attr.label(
            cfg = "exec",
            default = "//third_party/aiter/aot:report",
            executable = True,
        ),
    },
)

def _embedded_kernels_impl(ctx):
    args = ctx.actions.args()
    args.use_param_file("@%s")
    args.set_param_file_format("multiline")
    outputs = [
        ctx.outputs.asm,
        ctx.outputs.blob,
        ctx.outputs.header,
        ctx.outputs.inc,
    ]
    args.add("--out-asm", ctx.outputs.asm)
    args.add("--out-blob", ctx.outputs.blob)
    args.add("--out-header", ctx.outputs.header)
    args.add("--out-inc", ctx.outputs.inc)
    args.add_all(ctx.files.tuned, before_each = "--tuned")
    args.add_all(_descriptions(ctx))
    objects = [
        code
        for target in ctx.attr.kernels
        for code in target[KernelsInfo].objects
    ]
    ctx.actions.run(
        executable = ctx.executable._embed,
        arguments = [args],
        env = _ENV,
        # The report is an input so that a failing one stops the build.
        inputs = _descriptions(ctx) + objects + ctx.files.families + ctx.files.report + ctx.files.tuned,
        mnemonic = "EmbedKernels",
        outputs = outputs,
        progress_message = "Embedding kernels %s" % ctx.label,
    )
    return [DefaultInfo(files = depset(outputs))]

embedded_kernels = rule(
    implementation = _embedded_kernels_impl,
    doc = "Code objects and their argument structs as C++ and assembly.",
    attrs = {
        "asm": attr.output(mandatory = True),
        "blob": attr.output(mandatory = True),
        "families": attr.label_list(allow_files = [".py"], mandatory = True),
        "header": attr.output(mandatory = True),
        "inc": attr.output(mandatory = True),
        "kernels": attr.label_list(mandatory = True, providers = [KernelsInfo]),
        "report": attr.label(mandatory = True),
        "tuned": attr.label_list(
            allow_files = [".csv"],
            doc = "Choices of kernels by size, as measured: <family>_tuned.csv.",
            mandatory = True,
        ),
        "_embed": attr.label(
            cfg = "exec",
            default = "//third_party/aiter/aot:embed",
            executable = True,
        ),
    },
)
