# SPDX-License-Identifier: Apache-2.0
"""The Python module of jaxlib/gpu, for one GPU platform."""

load("//build:sanitizers.bzl", "SANITIZER_COPTS", "SANITIZER_LINKOPTS")
load("//third_party/nanobind:nanobind.bzl", "nanobind_extension")

def aiter_extension(name, platform, local_defines, sanitizer = ""):
    """Builds `<name>.so`.

    Args:
      name: the module's name, perhaps in a folder.
      platform: rocm or cuda.
      local_defines: what vendor.h selects the platform by.
      sanitizer: a suffix that //build:sanitizers.bzl has.
    """
    nanobind_extension(
        name = name,
        srcs = ["//jaxlib/gpu:aiter"],
        copts = SANITIZER_COPTS[sanitizer],
        linkopts = SANITIZER_LINKOPTS[sanitizer],
        local_defines = local_defines,
        visibility = ["//visibility:public"],
        deps = [
            "//third_party/aiter" + (":aiter" + sanitizer if sanitizer else ""),
            "//third_party/aiter:kernels_" + platform + sanitizer,
            "@xla_ffi",
        ],
    )
