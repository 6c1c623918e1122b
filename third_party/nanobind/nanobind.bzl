# SPDX-License-Identifier: Apache-2.0
"""Python extension modules written with nanobind."""

load("@rules_cc//cc:cc_binary.bzl", "cc_binary")

def nanobind_extension(name, srcs, deps = [], copts = [], linkopts = [], local_defines = [], visibility = None):
    """Builds `<name>.so` for CPython's stable ABI.

    It exports PyInit_<name> and nothing else, so that it cannot clash with
    another module's nanobind or C++ library.

    Args:
      name: the module's name, perhaps in a folder.
      srcs: C++ sources.
      deps: cc_library targets beside nanobind itself.
      copts: further compiler options.
      linkopts: further linker options.
      local_defines: preprocessor definitions.
      visibility: as everywhere.
    """
    version_script = name + ".lds"
    native.genrule(
        name = name + "_lds",
        outs = [version_script],
        cmd = "echo '{ global: PyInit_%s; local: *; };' > $@" % name.split("/")[-1],
    )
    cc_binary(
        name = name + ".so",
        srcs = srcs,
        additional_linker_inputs = [version_script],
        copts = copts + [
            "-fexceptions",
            "-fno-strict-aliasing",
            "-fvisibility=hidden",
        ],
        linkopts = linkopts + [
            "-Wl,--version-script,$(location :%s)" % version_script,
        ],
        linkshared = True,
        linkstatic = True,
        local_defines = local_defines,
        visibility = visibility,
        deps = deps + ["@nanobind"],
    )
