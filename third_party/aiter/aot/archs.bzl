"""The build setting //third_party/aiter:archs: what kernels are built for."""

ArchsInfo = provider(
    doc = "The selected GPU architectures.",
    fields = {"archs": "List of names such as gfx942 and sm_90."},
)

def _impl(ctx):
    for arch in ctx.build_setting_value:
        if arch not in ctx.attr.known:
            fail("%s: no kernels for %s; there are %s" %
                 (ctx.label, arch, ", ".join(ctx.attr.known)))
    return [ArchsInfo(archs = ctx.build_setting_value)]

archs = rule(
    implementation = _impl,
    attrs = {"known": attr.string_list(mandatory = True)},
    build_setting = config.string_list(flag = True),
)
