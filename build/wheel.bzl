"""A rule for wheels whose bytes depend on their content alone."""

load("//:version.bzl", "PYTHON_REQUIRES")

def _wheel_impl(ctx):
    out = ctx.actions.declare_file("%s-%s-%s.whl" % (
        ctx.attr.distribution,
        ctx.attr.version,
        ctx.attr.tag,
    ))
    args = ctx.actions.args()
    args.use_param_file("@%s")
    args.set_param_file_format("multiline")
    options = [
        ("--out", out.path),
        ("--name", ctx.attr.distribution),
        ("--version", ctx.attr.version),
        ("--tag", ctx.attr.tag),
        ("--summary", ctx.attr.summary),
        ("--requires-python", PYTHON_REQUIRES),
        ("--license", ctx.file._license.path),
        ("--description", ctx.file._description.path),
    ]
    inputs = [ctx.file._license, ctx.file._description]
    if ctx.file.base:
        options.append(("--base", ctx.file.base.path))
        inputs.append(ctx.file.base)
    options += [("--requires", requirement) for requirement in ctx.attr.requires]
    options += [
        ("--extra", "%s=%s" % (name, requirement))
        for name, requirement in ctx.attr.extras.items()
    ]
    options += [
        ("--file", "%s=%s" % (source.short_path, source.path))
        for source in ctx.files.srcs
    ]
    for target, folder in ctx.attr.placed.items():
        for source in target.files.to_list():
            options.append(("--file", "%s/%s=%s" % (folder, source.basename, source.path)))
            inputs.append(source)
    for name, value in options:
        args.add("%s=%s" % (name, value))
    ctx.actions.run(
        executable = ctx.executable._write_wheel,
        arguments = [args],
        inputs = inputs + ctx.files.srcs,
        mnemonic = "WriteWheel",
        outputs = [out],
        progress_message = "Writing wheel " + out.basename,
    )
    return [DefaultInfo(
        files = depset([out]),
        runfiles = ctx.runfiles(files = [out]),
    )]

wheel = rule(
    implementation = _wheel_impl,
    attrs = {
        "base": attr.label(
            allow_single_file = [".whl"],
            doc = "A published wheel to repackage; ours has its content too.",
        ),
        "distribution": attr.string(mandatory = True),
        "extras": attr.string_dict(doc = "Extra -> requirement."),
        "placed": attr.label_keyed_string_dict(
            allow_files = True,
            doc = "Files -> the folder of the wheel they go to.",
        ),
        "requires": attr.string_list(),
        "srcs": attr.label_list(
            allow_files = True,
            doc = "Files that have the same path here and in the wheel.",
        ),
        "summary": attr.string(),
        "tag": attr.string(mandatory = True),
        "version": attr.string(mandatory = True),
        "_description": attr.label(
            allow_single_file = True,
            default = "//:README.md",
        ),
        "_license": attr.label(allow_single_file = True, default = "//:LICENSE"),
        "_write_wheel": attr.label(
            cfg = "exec",
            default = "//build:write_wheel",
            executable = True,
        ),
    },
)
