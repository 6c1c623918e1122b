# SPDX-License-Identifier: Apache-2.0
"""How the simulator is built, once as it is and once for each sanitizer."""

load("@rules_cc//cc:cc_binary.bzl", "cc_binary")
load("@rules_cc//cc:cc_library.bzl", "cc_library")
load("@rules_cc//cc:cc_test.bzl", "cc_test")
load("//build:sanitizers.bzl", "SANITIZER_COPTS", "SANITIZER_ENV", "SANITIZER_LINKOPTS")

ARCHS = [
    "gfx90a",
    "gfx942",
    "gfx950",
]

# Optimised in every compilation mode: it is an interpreter. Products and sums
# are fused where an instruction says so and nowhere else. hip/cpu.cc refuses
# CPUs without these instructions.
_COPTS = [
    "-O3",
    "-march=x86-64-v3",
    "-ffp-contract=off",
    "-fno-math-errno",
    "-fno-trapping-math",
    "-fno-stack-protector",
    "-fomit-frame-pointer",
    "-fvisibility=hidden",
]

# ROCm's libraries that JAX's wheels name, and those of them that they need
# in turn: some modules import functions of hip without naming its library.
_LIBRARIES = {
    "libMIOpen.so.1": [],
    "libamd_smi.so.26": [],
    "libamdhip64.so.7": [],
    "libhipblas.so.3": [],
    "libhipblaslt.so.1": [],
    "libhipfft.so.0": [],
    "libhipsolver.so.1": [],
    "libhipsparse.so.4": [],
    "libhsa-runtime64.so.1": [],
    "librccl.so.1": [],
    "librocblas.so.5": [],
    "librocm_sysdeps_drm.so.2": [],
    "librocm_sysdeps_drm_amdgpu.so.1": [],
    "librocm_sysdeps_numa.so.1": [],
    "librocprofiler-sdk.so.1": [],
    "librocsolver.so.0": ["librocblas.so.5"],
}

_HIP = "libamdhip64.so.7"

def _base(soname):
    return soname.split(".so")[0]

def rocm_stubs(name, wheels):
    """The sources of all libraries' functions that the simulator has not.

    Args:
      name: the target.
      wheels: the published wheels whose modules import them.
    """
    native.genrule(
        name = name,
        srcs = wheels,
        outs = [
            "stubs/" + _base(soname) + suffix
            for soname in _LIBRARIES
            for suffix in [".cc", ".lds"]
        ],
        cmd = "$(execpath :write_stubs) --out $(RULEDIR)/stubs $(SRCS)",
        exec_tools = [":write_stubs"],
        message = "Writing stubs of ROCm's libraries",
    )

def _library(soname, variant, sanitizer, deps):
    script = ":stubs/%s.lds" % _base(soname)
    needed = _LIBRARIES[soname] + ([] if soname == _HIP else [_HIP])
    needed = [":%s/%s" % (variant, other) for other in needed]
    cc_binary(
        name = "%s/%s" % (variant, soname),
        srcs = [":stubs/%s.cc" % _base(soname)],
        additional_linker_inputs = needed + [script],
        linkopts = SANITIZER_LINKOPTS[sanitizer] + [
            "-Wl,--no-as-needed",
            "-Wl,-rpath,$$ORIGIN",
            "-Wl,-soname," + soname,
            "-Wl,--version-script,$(location %s)" % script,
        ] + ["$(location %s)" % other for other in needed],
        linkshared = True,
        linkstatic = True,
        deps = deps,
    )

def simulator(name, sanitizer):
    """The simulator and the shared libraries in ROCm's place.

    `runtime<sanitizer>` is it as a cc_library, with hip's functions;
    `libraries<sanitizer>` are the files.

    Args:
      name: the simulator without hip's functions, as a cc_library.
      sanitizer: a suffix that //build:sanitizers.bzl has.
    """
    copts = _COPTS + SANITIZER_COPTS[sanitizer]
    cc_library(
        name = name,
        srcs = native.glob(
            [
                "clock/*.cc",
                "gpu/*.cc",
                "isa/*.cc",
            ],
            exclude = ["**/*_test.cc"],
        ),
        hdrs = native.glob([
            "clock/*.h",
            "gpu/*.h",
            "isa/*.h",
        ]),
        copts = copts,
        linkopts = ["-lpthread"],
        linkstatic = True,
        deps = ["@llvm"],
        # Tests and programs look for amdgpu_sim_* by name.
        alwayslink = True,
    )
    cc_library(
        name = "runtime" + sanitizer,
        srcs = native.glob(
            ["hip/*.cc"],
            exclude = [
                "**/*_test.cc",
                "hip/cpu.cc",
                "hip/hipblaslt.cc",
                "hip/rccl.cc",
                "hip/rocblas.cc",
            ],
        ),
        hdrs = native.glob(["hip/*.h"]),
        copts = copts,
        linkopts = ["-lpthread"],
        linkstatic = True,
        deps = [
            ":cpu",
            ":" + name,
        ],
        alwayslink = True,
    )
    for library in ["hipblaslt", "rccl", "rocblas"]:
        cc_library(
            name = library + sanitizer,
            srcs = ["hip/%s.cc" % library],
            copts = copts,
            linkstatic = True,
            deps = [":runtime_headers"],
            alwayslink = True,
        )
    implemented = {
        "libamdhip64.so.7": [":runtime" + sanitizer],
        "libhipblaslt.so.1": [":hipblaslt" + sanitizer],
        "librccl.so.1": [":rccl" + sanitizer],
        "librocblas.so.5": [":rocblas" + sanitizer],
    }
    variant = "lib" + sanitizer
    for soname in _LIBRARIES:
        _library(soname, variant, sanitizer, implemented.get(soname, []))
    native.filegroup(
        name = "libraries" + sanitizer,
        srcs = [":%s/%s" % (variant, soname) for soname in _LIBRARIES],
    )

def _variant(label, sanitizer):
    if ":" not in label:
        label += ":" + label.split("/")[-1]
    return label + sanitizer

def sim_cc_test(name, srcs, deps = [], sanitizers = SANITIZER_COPTS.keys(), **kwargs):
    """A cc_test of the simulator, as it is and under each sanitizer.

    Those with a sanitizer run in `build.py test --all`.

    Args:
      name: the test.
      srcs: its sources.
      deps: libraries, each of which has a variant for every sanitizer.
      sanitizers: suffixes of //build:sanitizers.bzl.
      **kwargs: as for cc_test.
    """
    for sanitizer in sanitizers:
        env = dict(SANITIZER_ENV[sanitizer])

        # A C++ test frees what it takes.
        env.pop("ASAN_OPTIONS", None)
        cc_test(
            name = name + sanitizer,
            srcs = srcs,
            copts = _COPTS + SANITIZER_COPTS[sanitizer],
            env = env,
            # The operator library looks for hip's functions by name.
            linkopts = SANITIZER_LINKOPTS[sanitizer] + ["-rdynamic"],
            linkstatic = True,
            tags = ["all"] if sanitizer else [],
            deps = [_variant(dep, sanitizer) for dep in deps],
            **kwargs
        )
