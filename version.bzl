# SPDX-License-Identifier: Apache-2.0
"""The versions that wheels carry, in this one place."""

# Ours.
VERSION = "0.1.0"

# The plugin release that jax_rocm7_plugin is repackaged from.
JAX_VERSION = "0.12.0"

# The oldest jax and jaxlib that the wheels work with.
MIN_JAX_VERSION = "0.11.2"

# The oldest CPython that the wheels work with, and the limited API of
# `_aiter.so`, which makes one binary serve it and every later one.
PYTHON_TAG = "cp312"
PYTHON_REQUIRES = ">=3.12"

# Debian 12's g++ links symbols of glibc 2.34; the wheel tests check this.
PLATFORM_TAG = "manylinux_2_34_x86_64"
