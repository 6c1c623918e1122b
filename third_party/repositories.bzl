# SPDX-License-Identifier: Apache-2.0
"""Every external repository, for WORKSPACE and for MODULE.bazel alike."""

load("//third_party/aiter/aot:kernel_table.bzl", "kernel_table")
load("//third_party/llvm:llvm_configure.bzl", "llvm_configure")
load("//third_party/py:python_configure.bzl", "python_configure")
load("//third_party/pypi:pypi.bzl", "pypi", "wheel_archive")
load("//third_party/xz:xz_configure.bzl", "xz_configure")

def repositories():
    """Declares the repositories; MODULE.bazel lists the same names."""
    python_configure(name = "local_python")

    pypi(
        name = "pypi",
        lock = "//third_party/pypi:requirements_lock.txt",
    )
    pypi(
        name = "pypi_build",
        lock = "//third_party/pypi:build_requirements_lock.txt",
    )
    pypi(
        name = "pypi_cuda",
        lock = "//third_party/pypi:cuda_requirements_lock.txt",
    )
    pypi(
        name = "pypi_lint",
        lock = "//third_party/pypi:lint_requirements_lock.txt",
    )
    pypi(
        name = "pypi_oldest",
        lock = "//third_party/pypi:oldest_requirements_lock.txt",
    )
    pypi(
        name = "pypi_rocm",
        lock = "//third_party/pypi:rocm_requirements_lock.txt",
        python_versions = ["3.12", "3.13", "3.14"],
    )
    pypi(
        name = "pypi_sim",
        lock = "//third_party/pypi:sim_requirements_lock.txt",
    )

    wheel_archive(
        name = "nanobind",
        build_file = "//third_party/nanobind:nanobind.BUILD.bazel",
        wheel = "@pypi_build//:nanobind.whl",
    )
    wheel_archive(
        name = "triton",
        build_file = "//third_party/triton:triton.BUILD.bazel",
        compile_python = True,
        # A gigabyte, of which the compiler needs two thirds.
        exclude = [
            "triton/_C/libproton.so",
            "triton/backends/nvidia/lib/cupti",
            "triton/backends/nvidia/lib/cupti-blackwell",
            "triton/instrumentation",
        ],
        wheel = "@pypi_build//:triton.whl",
    )
    wheel_archive(
        name = "xla_ffi",
        build_file = "//third_party/xla:xla_ffi.BUILD.bazel",
        # Headers alone are wanted of jaxlib.
        include = ["jaxlib/include/"],
        wheel = "@pypi_build//:jaxlib.whl",
    )
    llvm_configure(name = "llvm")
    xz_configure(name = "xz")

    kernel_table(
        name = "aiter_kernel_table",
        families = [
            "activation",
            "cache",
            "fused_qk",
            "gemm",
            "gmm",
            "indexer",
            "mha",
            "mha_dscores",
            "mha_f32",
            "mha_fp8",
            "mha_one_pass",
            "moe",
            "mla",
            "norm",
            "paged",
            "quant",
            "rope",
            "sampling",
        ],
    )
