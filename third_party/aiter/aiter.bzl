"""The operator library for one GPU platform."""

load("@rules_cc//cc:cc_library.bzl", "cc_library")
load("@rules_cc//cc:cc_test.bzl", "cc_test")
load("//third_party/aiter/aot:kernels.bzl", "embedded_kernels", "kernel_report", "triton_kernels")

def aiter_library(platform, arch_prefix, local_defines):
    """Declares `aiter_<platform>` and its parts.

    `kernels_<platform>` are the code objects, `report_<platform>` the table of
    the compiler's figures, `mha_<platform>_test` the library's own test.

    Args:
      platform: rocm or cuda.
      arch_prefix: what the names of its architectures begin with.
      local_defines: what jaxlib/gpu/vendor.h selects the platform by.
    """
    kernels = "kernels_" + platform
    report = "report_" + platform
    library = "aiter_" + platform
    triton_kernels(
        name = kernels,
        srcs = ["//third_party/aiter/kernels"],
        arch_prefix = arch_prefix,
    )
    kernel_report(
        name = report,
        kernels = [kernels],
    )
    embedded_kernels(
        name = "embedded_" + platform,
        asm = platform + "/aiter/kernels.S",
        blob = platform + "/aiter/kernels.bin",
        header = platform + "/aiter/kernels.h",
        inc = platform + "/aiter/kernels.inc",
        kernels = [kernels],
        report = report,
    )
    cc_library(
        name = library,
        srcs = native.glob(
            [
                "src/*.cc",
                "src/*.h",
            ],
            exclude = ["src/*_test.cc"],
        ) + [platform + "/aiter/kernels.S"],
        hdrs = native.glob(["include/aiter/*.h"]) + [
            platform + "/aiter/kernels.h",
        ],
        # The assembler looks for kernels.bin along -I, not along -isystem.
        copts = ["-I$(GENDIR)/third_party/aiter/" + platform],
        includes = [
            "include",
            platform,
        ],
        linkopts = [
            "-ldl",
            "-lpthread",
        ],
        local_defines = local_defines,
        textual_hdrs = [
            platform + "/aiter/kernels.bin",
            platform + "/aiter/kernels.inc",
        ],
        deps = ["@zlib"],
    )
    cc_test(
        name = "mha_%s_test" % platform,
        size = "small",
        srcs = ["src/mha_test.cc"] + native.glob(["src/*.h"]),
        local_defines = local_defines,
        deps = [library],
    )
