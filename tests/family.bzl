# SPDX-License-Identifier: Apache-2.0
"""A family's tests, declared by the files in its folder."""

load("@rules_python//python:py_library.bzl", "py_library")
load("//build:sanitizers.bzl", "SANITIZER_ENV")
load("//build:site.bzl", "jax_py_test", "sim_py_test")
load("//tests/amdgpu_sim:sim.bzl", "ARCHS")

# Where every test runs each day, with one in so many of the cases that differ by
# parameters alone (on a CPU harness/machine.py says how many); on other
# architectures one test of numbers in so many; each kernel everywhere.
# `build.py test --all` runs all.
HOME_ARCH = "gfx942"
_ONE_CASE_IN = "4"
_ONE_IN = "6"

# Tests that `build.py test --all` alone runs, or builds anything for.
ALL = ["all"]

# Architectures that it alone runs families' tests on: .bazelrc's config `ci`
# has no kernels for them.
_ALL_ARCHS = ["gfx90a"]

_SIM_ENV = {
    "AMDGPU_SIM_CHECKS": "+all",
    "JAX_PLATFORMS": "rocm,cpu",
}

# For what needs the host's GPU: left out of //... where tests have none.
ON_A_GPU = select({
    "//tests:on_cuda": [],
    "//tests:on_rocm": [],
    "//conditions:default": ["//tests:a_gpu"],
})

_ON_A_GPU = ["handler_test.py", "hopper_test.py"]

def _target(family, file):
    stem = file[:-len(".py")]
    return "aiter_%s_%s" % (family, "test" if stem == "numbers_test" else stem)

def sim_asan_test(name, module, srcs = [], **kwargs):
    """A test of simulated GPUs with AddressSanitizer and UBSan in our C++.

    `build.py test --all` runs it.

    Args:
      name: the test.
      module: the source whose cases it runs.
      srcs: what it imports.
      **kwargs: as for sim_py_test.
    """
    sim_py_test(
        name = name,
        size = "large",
        srcs = ["simulated/asan.py", module] + srcs,
        arch = HOME_ARCH,
        env = dict(
            SANITIZER_ENV["_asan"],
            JAX_PLATFORMS = "rocm,cpu",
            MODULE = module.replace("/", ".")[:-len(".py")],
        ),
        site = "//tests:sim_site_asan",
        tags = ALL,
        **kwargs
    )

def _family(name, kernels = None, simulated = ARCHS, uses = [], cpu_only = [], shards = {}, sanitized = {}):
    """Declares the tests of a family; see families."""
    kernels = kernels or name
    tests = native.glob([name + "/*_test.py"])
    py_library(
        name = name,
        srcs = native.glob(
            [name + "/*.py"],
            exclude = [name + "/*_test.py"],
        ),
        imports = ["."],
        deps = [":harness"] + uses,
    )
    for test in tests:
        file = test.split("/")[1]
        base = _target(kernels, file)
        common = dict(
            srcs = [test],
            data = ["//benchmarks"] if file == "handler_test.py" else [],
            deps = [":" + name],
        )
        if file in ("every_kernel_test.py", "hopper_test.py"):
            # Cases of the numbers' tests, at sizes of the kernels' own.
            common["srcs"] = [test] + native.glob([name + "/numbers_test.py"])
            archs = simulated if file == "every_kernel_test.py" else []
        elif file in ("numbers_test.py", "handler_test.py"):
            archs = simulated
        elif file == "kernel_test.py" or file in cpu_only:
            archs = []
        else:
            archs = [HOME_ARCH]

        if file == "kernel_test.py":
            jax_py_test(
                name = base,
                size = "large",
                srcs = [test],
                data = ["//third_party/aiter/kernels"],
                shard_count = shards.get(base),
                deps = [
                    ":" + name,
                    "//third_party/aiter/aot:family",
                    "@triton",
                ],
            )
        elif file != "every_kernel_test.py":
            jax_py_test(
                name = base,
                size = "large",
                shard_count = shards.get(base),
                target_compatible_with = ON_A_GPU if file in _ON_A_GPU else [],
                **common
            )
        for arch in archs:
            target = "%s_%s" % (base, arch)
            if file == "every_kernel_test.py":
                sample = {}
            elif arch == HOME_ARCH:
                sample = {"AITER_ONE_CASE_IN": _ONE_CASE_IN}
            elif file == "numbers_test.py":
                sample = {"AITER_ONE_IN": _ONE_IN}
            else:
                sample = {}
            sim_py_test(
                name = target,
                size = "large",
                arch = arch,
                env = dict(_SIM_ENV, **sample),
                shard_count = shards.get(target),
                tags = ALL if arch in _ALL_ARCHS else [],
                **common
            )

    # Each in a process of its own: what fails once must not have been loaded.
    every = [test.split("/")[1] for test in native.glob([name + "/every_kernel_test.py"])]
    for file, count in dict({file: 1 for file in every}, **sanitized).items():
        sim_asan_test(
            name = _target("asan_" + kernels, file),
            srcs = native.glob([name + "/numbers_test.py"]) if file == "every_kernel_test.py" else [],
            data = ["//benchmarks"] if file == "handler_test.py" else [],
            module = "%s/%s" % (name, file),
            shard_count = count,
            deps = [":" + name],
        )

def families(families):
    """Declares the tests of each family, whose files lie in a folder.

    A file decides by its name where it runs:

    * numbers_test.py is aiter_<family>_test, on the host's CPU (or its GPU),
      and aiter_<family>_test_<arch> on simulated GPUs: all tests on gfx942, one
      in six on gfx950 and, by `build.py test --all` alone, on gfx90a;
    * kernel_test.py, in Triton's interpreter, is aiter_<family>_kernel_test;
    * every_kernel_test.py is aiter_<family>_every_kernel_test_<arch>, on every
      simulated architecture alone;
    * handler_test.py, the same and on a host's GPU, is
      aiter_<family>_handler_test;
    * hopper_test.py, for kernels of sm_90 alone, on a host's GPU;
    * any other x_test.py is aiter_<family>_x_test on the CPU, and
      aiter_<family>_x_test_gfx942 on a simulated GPU;
    * what is no test, such as oracle.py, is the library `name`, which families
      that import it name.

    An edit runs again what it can change: a test's own targets, or for the
    library all tests of the family and of those that use it.

    Args:
      families: name of the folder -> dict of what a family says, if anything:
        kernels: the family's name in those of tests and kernels, if another;
        simulated: architectures that it has kernels for, if not all;
        uses: other families' libraries that its files import;
        cpu_only: other tests' files that do not run on a simulated GPU;
        shards: target -> how many, where it is not 1;
        sanitized: file -> shards, for what runs with sanitizers as well, as
          every_kernel_test.py does.
    """
    for name, options in families.items():
        _family(name, **options)
    jax_py_test(
        name = "aiter_families_test",
        size = "small",
        srcs = ["simulated/families_test.py"],
        env = {"KERNEL_FAMILIES": " ".join([
            options.get("kernels", name)
            for name, options in families.items()
            if native.glob([name + "/every_kernel_test.py"])
        ])},
        site = "//tests:sim_site",
    )
