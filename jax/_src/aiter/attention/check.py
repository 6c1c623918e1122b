# SPDX-License-Identifier: Apache-2.0
"""Attention's self-check."""

from __future__ import annotations

import jax.numpy as jnp

import jax
from jax._src.aiter.attention import api
from jax._src.aiter.core.check import Check, normal, with_gradients


def _check(name: str, dqk: int, dv: int, **options) -> Check:
  packed = options.pop("packed", False)
  b, sq, sk, hq, hk = 2, 200, 250, 4, 2
  lead_q, lead_k = ((b * sq,), (b * sk,)) if packed else ((b, sq), (b, sk))
  lengths = ()
  fn = api.flash_attn_func
  if packed:
    fn = api.flash_attn_varlen
    lengths = jnp.array([0, 150, b * sq]), jnp.array([0, 100, b * sk])
  if options.get("dropout_p"):
    options["dropout_key"] = jax.random.key(1)
  call = lambda **more: with_gradients(
      lambda *t: fn(*t, *lengths, **options, **more))
  # With slopes, which change nothing if they are 0, float32 has no kernel: that
  # call is the reference.
  return Check(name, call(), call(alibi_slopes=jnp.zeros(hq)), normal(
      (*lead_q, hq, dv), (*lead_q, hq, dqk), (*lead_k, hk, dqk),
      (*lead_k, hk, dv)))


def checks() -> list[Check]:
  return [
      _check("causal, D 64", 64, 64, causal=True),
      _check("causal, D 128", 128, 128, causal=True),
      _check("causal, D 256", 256, 256, causal=True),
      _check("causal, D 192/128", 192, 128, causal=True),
      _check("window 64", 128, 128, window_size=(64, 0)),
      _check("packed", 128, 128, causal=True, packed=True),
      _check("soft cap, dropout", 128, 128, logits_soft_cap=20.0,
             dropout_p=0.1),
  ]
