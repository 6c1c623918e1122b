# SPDX-License-Identifier: Apache-2.0
"""Build settings of the kernels: //third_party/aiter:archs, :sampled, :bf16_alone, :allow_spills."""

ArchsInfo = provider(
    doc = "The selected GPU architectures.",
    fields = {"archs": "List of names such as gfx942 and sm_90."},
)

AllowSpillsInfo = provider(
    doc = "Whether to build kernels that spill registers and should not.",
    fields = {"value": "True or False."},
)

def _archs_impl(ctx):
    if ctx.build_setting_value == ["all"]:
        return [ArchsInfo(archs = ctx.attr.known)]
    for arch in ctx.build_setting_value:
        if arch not in ctx.attr.known:
            fail("%s: no kernels for %s; there are %s" %
                 (ctx.label, arch, ", ".join(ctx.attr.known)))
    return [ArchsInfo(archs = ctx.build_setting_value)]

archs = rule(
    doc = "Architectures to build kernels for; `all` is every one.",
    implementation = _archs_impl,
    attrs = {"known": attr.string_list(mandatory = True)},
    build_setting = config.string_list(flag = True),
)

def _allow_spills_impl(ctx):
    return [AllowSpillsInfo(value = ctx.build_setting_value)]

allow_spills = rule(
    implementation = _allow_spills_impl,
    build_setting = config.bool(flag = True),
)
