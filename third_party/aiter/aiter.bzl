# SPDX-License-Identifier: Apache-2.0
"""The kernels of one GPU platform, as the operator library wants them."""

load("@rules_cc//cc:cc_library.bzl", "cc_library")
load("//build:sanitizers.bzl", "SANITIZER_COPTS")
load("//third_party/aiter/aot:kernels.bzl", "embedded_kernels", "kernel_report", "triton_kernels")

def kernel_library(name, platform):
    """A cc_library of a platform's code objects.

    There is one for each sanitizer too, with its suffix.
    `code_objects_<platform>` are they themselves, and `report_<platform>` is
    the table of the compiler's figures for them.

    Args:
      name: the library.
      platform: rocm or cuda.
    """
    code_objects = "code_objects_" + platform
    report = "report_" + platform
    triton_kernels(
        name = code_objects,
        srcs = ["//third_party/aiter/kernels"],
        platform = platform,
    )
    kernel_report(
        name = report,
        kernels = [code_objects],
    )
    generated = platform + "/aiter/kernels"
    embedded_kernels(
        name = "embedded_" + platform,
        asm = generated + ".S",
        blob = generated + ".bin",
        families = ["//third_party/aiter/kernels:families"],
        header = generated + ".h",
        inc = generated + ".inc",
        kernels = [code_objects],
        report = report,
        tuned = ["//third_party/aiter/configs:tuned"],
    )
    for sanitizer, copts in SANITIZER_COPTS.items():
        cc_library(
            name = name + sanitizer,
            srcs = [
                "src/core/kernel_table.cc",
                generated + ".S",
                generated + ".h",
            ],
            # The assembler looks for kernels.bin along -I, not along -isystem.
            copts = copts + ["-I$(GENDIR)/third_party/aiter/" + platform],
            linkstatic = True,
            textual_hdrs = [
                generated + ".bin",
                generated + ".inc",
            ],
            deps = [":aiter" + sanitizer],
            # The library asks for the table; nothing here asks for the library.
            alwayslink = True,
        )
