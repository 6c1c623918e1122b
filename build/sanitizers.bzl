# SPDX-License-Identifier: Apache-2.0
"""Sanitizers, each as a suffix of targets that are built with it.

A variant is a target of its own and no configuration: what is not C++, such as
the kernels, is built once for all of them.
"""

_COMMON = [
    "-O1",
    "-fno-omit-frame-pointer",
    "-g1",
]

# Suffix -> compiler options.
SANITIZER_COPTS = {
    "": [],
    "_asan": _COMMON + [
        "-fsanitize=address,undefined",
        "-fno-sanitize-recover=undefined",
    ],
    "_tsan": _COMMON + ["-fsanitize=thread"],
}

# Suffix -> linker options.
SANITIZER_LINKOPTS = {
    "": [],
    "_asan": ["-fsanitize=address,undefined"],
    "_tsan": ["-fsanitize=thread"],
}

# What tests of a variant run with. Leaks are looked for by tests of C++ alone:
# the interpreter and JAX end with memory in use. JAX's threads have signal
# stacks of their own, which the sanitizer would try to free.
SANITIZER_ENV = {
    "": {},
    "_asan": {
        "ASAN_OPTIONS": "detect_leaks=0:use_sigaltstack=0",
        "UBSAN_OPTIONS": "print_stacktrace=1",
    },
    "_tsan": {"TSAN_OPTIONS": "halt_on_error=1:second_deadlock_stack=1"},
}
