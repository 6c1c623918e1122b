# SPDX-License-Identifier: Apache-2.0
"""Calls of fused_qk_rope_concat_and_cache_mla, and their float64 oracle."""

import dataclasses

import jax.numpy as jnp
import numpy as np
from cache import oracle as cache_oracle
from harness.cases import DTYPES

from jax.experimental import aiter

KINDS = ("int8", "float8_e4m3fn", "float8_e4m3fnuz", "float8_e5m2")


@dataclasses.dataclass(frozen=True)
class Case:
  dtype: str = "bf16"
  tokens: int = 7
  heads: int = 5
  lora: int = 512
  rope: int = 64
  width: int = 0
  page: int = 4
  cache: str = ""
  q_out: str = ""
  neox: bool = True
  norm: bool = False
  scaled: bool = False


def _numpy_dtype(name: str, own):
  return jnp.dtype(name) if name else np.dtype(own)


class Problem:
  """The arrays of a case."""

  def __init__(self, case: Case, seed: int = 0):
    rng = np.random.default_rng(seed)
    c, own = case, DTYPES[case.dtype]
    normal = lambda *shape: rng.standard_normal(shape, np.float32).astype(own)
    self.case = case
    self.q_nope, self.q_pe = (
        normal(c.tokens, c.heads, n) for n in (c.lora, c.rope))
    self.kv_c, self.k_pe = normal(c.tokens, c.lora), normal(c.tokens, c.rope)
    self.weight = normal(c.lora) if c.norm else None
    pages, width = c.tokens // c.page + 2, c.width or c.lora + c.rope
    self.cache = rng.integers(0, 100, (pages, c.page, width)).astype(
        _numpy_dtype(c.cache, own))
    self.slots = rng.permutation(pages * c.page)[:c.tokens].astype(np.int32)
    if c.tokens > 3:
      self.slots[0], self.slots[c.tokens // 2] = pages * c.page, -1
    self.positions = rng.integers(-2, 23, c.tokens).astype(np.int32)
    angles = rng.uniform(0, 7, (20, c.rope // 2))
    self.cos, self.sin = (np.float32(f(angles)) for f in (np.cos, np.sin))
    self.q_scale, self.k_scale = (
        np.float32(rng.uniform(0.02, 0.05)) if c.scaled else None
        for _ in range(2))

  def first(self):
    """The cache's column where rotated keys begin."""
    c = self.case
    return c.lora if not c.width else -(-c.lora // 128) * 128

  def exact(self):
    """Float64 (q_out, rows of tokens), before they are rounded."""
    c = self.case
    wide = lambda t: np.asarray(t).astype(np.float64)
    row = np.clip(self.positions, 0, len(self.cos) - 1)
    cos, sin = wide(self.cos[row]), wide(self.sin[row])

    def rotated(x, cos, sin):
      x, half = wide(x), c.rope // 2
      out = np.empty_like(x)
      for i in range(half):
        a, b = (i, i + half) if c.neox else (2 * i, 2 * i + 1)
        out[..., a] = x[..., a] * cos[..., i] - x[..., b] * sin[..., i]
        out[..., b] = x[..., b] * cos[..., i] + x[..., a] * sin[..., i]
      return out

    latent = wide(self.kv_c)
    if c.norm:
      latent = latent / np.sqrt(
          (latent**2).mean(-1, keepdims=True) + 1e-6) * wide(self.weight)
    q = np.concatenate([wide(self.q_nope), rotated(
        self.q_pe, cos[:, None], sin[:, None])], -1)
    return q, latent, rotated(self.k_pe, cos, sin)


def call(p: Problem):
  """(function, keywords, arrays) of a problem's call."""
  c = p.case
  options = dict(is_neox=c.neox, q_out_dtype=c.q_out or None)
  arrays = dict(q_nope=p.q_nope, q_pe=p.q_pe, kv_c=p.kv_c, k_pe=p.k_pe,
                kv_cache=p.cache, slot_mapping=p.slots, positions=p.positions,
                cos=p.cos, sin=p.sin)
  given = dict(kv_norm_weight=p.weight, q_scale=p.q_scale, k_scale=p.k_scale)
  arrays |= {n: t for n, t in given.items() if t is not None}
  return (aiter.fused_qk_rope_concat_and_cache_mla, options,
          {n: jnp.asarray(t) for n, t in arrays.items()})


def check_rounded(test, got, exact, kind, scale, message):
  """Fails unless numbers are the exact ones, rounded once; ties either way.

  Float32 arithmetic may come out on the other side of a tie: the next number.
  """
  got = np.asarray(got)
  exact = np.asarray(exact, np.float64)
  if kind in KINDS:
    x = np.float32(exact / (1.0 if scale is None else float(scale)))
    want = cache_oracle.round_to(x, kind)
    wide = lambda t: cache_oracle.number(t, kind).astype(np.float64)
    near = np.float64(x)
  else:
    want, wide, near = exact.astype(got.dtype), np.float64, exact
  same = wide(got) == wide(want)
  # No further from the exact number than what is nearest, but for float32.
  slack = 4e-6 * np.maximum(np.abs(near), np.abs(near).max() / 64) + 1e-7
  close = np.abs(wide(got) - near) <= np.abs(wide(want) - near) + slack
  test.assertTrue((same | close).all(), message)
  if got.dtype.itemsize < 4:
    test.assertGreater(same.mean(), 0.98, message)
