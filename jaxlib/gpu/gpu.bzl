# SPDX-License-Identifier: Apache-2.0
"""The Python module of jaxlib/gpu, for one GPU platform."""

load("//third_party/nanobind:nanobind.bzl", "nanobind_extension")

def aiter_extension(name, platform, local_defines):
    """Builds `<name>.so`.

    Args:
      name: the module's name.
      platform: rocm or cuda.
      local_defines: what vendor.h selects the platform by.
    """
    nanobind_extension(
        name = name,
        srcs = ["//jaxlib/gpu:aiter"],
        local_defines = local_defines,
        visibility = ["//visibility:public"],
        deps = [
            "//third_party/aiter",
            "//third_party/aiter:kernels_" + platform,
            "@xla_ffi",
        ],
    )
