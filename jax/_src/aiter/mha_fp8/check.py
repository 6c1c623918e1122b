# SPDX-License-Identifier: Apache-2.0
"""Self-check of attention of float8 tensors, dense and packed."""

from __future__ import annotations

import jax.numpy as jnp

from jax._src.aiter.attention import api as mha
from jax._src.aiter.core.check import Check, normal
from jax._src.aiter.core.dispatch import float8_dtype
from jax._src.aiter.mha_fp8 import api

_LENGTHS = (90, 190)


def _starts():
  return jnp.array([0, _LENGTHS[0], sum(_LENGTHS)])


def _rounded(*arrays):
  return [t.astype(float8_dtype()) for t in arrays]


def _dense(q, k, v):
  return api.flash_attn_fp8_pertensor_func(*_rounded(q, k, v), causal=True)


def _packed(q, k, v):
  return api.flash_attn_varlen_fp8_pertensor_func(
      *_rounded(q, k, v), None, None, None, _starts(), _starts())


def _formula(fn, *lengths, **options):
  return lambda q, k, v: fn(
      *(t.astype(jnp.float32) for t in _rounded(q, k, v)), *lengths, **options)


def checks() -> list[Check]:
  rows = sum(_LENGTHS)
  return [
      Check("flash_attn_fp8_pertensor_func", _dense,
            _formula(mha.flash_attn_func, causal=True),
            normal((2, 200, 4, 128), (2, 250, 2, 128), (2, 250, 2, 128))),
      Check("flash_attn_varlen_fp8", _packed,
            lambda q, k, v: _formula(
                mha.flash_attn_varlen, _starts(), _starts())(q, k, v),
            normal((rows, 4, 128), (rows, 2, 128), (rows, 2, 128))),
  ]
