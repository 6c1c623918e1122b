# SPDX-License-Identifier: Apache-2.0
"""The cache writes' self-check: what a cache holds, read back as rows."""

from __future__ import annotations

import jax.numpy as jnp

import jax
from jax._src.aiter.cache import api
from jax._src.aiter.core.check import Check, normal

_TOKENS, _HEADS, _D = 24, 4, 128
_PAGES, _SIZE = 4, 16
_COUNT = _PAGES * _SIZE
_SCALE = 1 / 25


def _slots():
  """Slots in any order, of which each third skips its token."""
  token = jnp.arange(_TOKENS)
  return jnp.where(token % 3 == 1, -1, token * 7 % _COUNT)


def _formula(key, value):
  """The rows of all slots."""
  slots = _slots()
  at = jnp.where(slots < 0, _COUNT, slots)
  return [jnp.zeros((_COUNT, *t.shape[1:])).at[at].set(t, mode="drop")
          for t in (key, value)]


def _rows(layout, caches, scales=(1, 1)):
  """The same, of caches and scales that broadcast to [slots, heads]."""
  rows = api.gather_kv_cache(
      *caches, jnp.arange(_PAGES)[None], jnp.array([0, _COUNT]),
      total_tokens=_COUNT, layout=layout)
  return [t.astype(jnp.float32) * jnp.asarray(scale)[..., None]
          for t, scale in zip(rows, scales)]


def _given(dtype: str) -> Check:
  quantised = dtype == "int8"

  def call(key, value):
    caches = [jnp.zeros((_PAGES, _SIZE, _HEADS, _D), dtype)] * 2
    scale = _SCALE if quantised else None
    caches = api.write_kv_cache(key, value, *caches, _slots(), k_scale=scale,
                                v_scale=scale)
    return _rows("NHD", caches, [_SCALE if quantised else 1] * 2)

  return Check(f"write_kv_cache, {dtype}", call, _formula, _tokens())


def _found(by: str, slots: int) -> Check:
  """A write that finds a scale for so many neighbouring slots."""
  function = getattr(api, f"reshape_and_cache_with_{by}_quant")

  def call(key, value):
    run = 16  # Of one byte each.
    caches = [jnp.zeros((_PAGES, _HEADS, _D // run, _SIZE, run), jnp.int8),
              jnp.zeros((_PAGES, _HEADS, _D, _SIZE), jnp.int8)]
    scales = [jnp.zeros((_HEADS, _COUNT // slots))] * 2
    *caches, k_scale, v_scale = function(key, value, *caches, *scales, _slots())
    return _rows("x", caches, [jnp.repeat(t.T, slots, 0)
                               for t in (k_scale, v_scale)])

  return Check(f"cache with {by}_quant", call, _formula, _tokens())


def _tokens() -> list[jax.Array]:
  return normal(*[(_TOKENS, _HEADS, _D)] * 2)


def checks() -> list[Check]:
  return [*map(_given, ("bfloat16", "int8")), _found("pertoken", 1),
          _found("block", _SIZE)]
