# SPDX-License-Identifier: Apache-2.0
"""The matrix products' self-check."""

from __future__ import annotations

import functools

import jax.numpy as jnp

from jax._src.aiter.core import rounding
from jax._src.aiter.core.check import Check, integers, normal, with_gradients
from jax._src.aiter.gemm import api


def _gemm(rows: int) -> Check:
  n, k = 1024, 512
  # float32 has no kernel: its call is the reference.
  call = with_gradients(functools.partial(api.gemm, activation="gelu"))
  return Check(f"gemm, {rows} rows", call, call,
               normal((rows, n), (rows, k), (n, k), (n,)))


def _in_bytes(function: str, dtype) -> Check:
  dtype = jnp.dtype(dtype)

  def call(a, b):
    half = jnp.full(a.shape[0], 0.5), jnp.full(b.shape[0], 0.5)
    return getattr(api, function)(a.astype(dtype), b.astype(dtype), *half)

  return Check(f"{function}, {dtype.name.removeprefix('float8_')}", call,
               lambda a, b: 0.25 * (a @ b.T), integers((64, 512), (1024, 512)))


def _in_e2m1() -> Check:
  def packed(t):
    codes = rounding.pack(rounding.round_to(t, rounding.E2M1))
    one = jnp.full((t.shape[0], t.shape[1] // 32), 127, jnp.uint8)
    return codes, one

  def call(a, b):
    (a, a_scale), (b, b_scale) = packed(a), packed(b)
    return api.gemm_fp4(a, b, a_scale, b_scale)

  return Check("gemm_fp4", call, lambda a, b: a @ b.T,
               integers((64, 512), (1024, 512)))


def checks() -> list[Check]:
  return [
      _gemm(512),
      _gemm(4),
      _in_bytes("gemm_i8", jnp.int8),
      _in_bytes("gemm_fp8", jnp.float8_e4m3fn),
      _in_bytes("gemm_fp8", jnp.float8_e4m3fnuz),
      _in_e2m1(),
  ]
