# SPDX-License-Identifier: Apache-2.0
"""Calls of the fused functions, and their float64 oracles."""

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

    turned = lambda x, *tables: rotated(wide(x), *tables, c.neox)
    latent = wide(self.kv_c)
    if c.norm:
      latent = latent / np.sqrt(
          (latent**2).mean(-1, keepdims=True) + 1e-6) * wide(self.weight)
    q = np.concatenate([wide(self.q_nope), turned(
        self.q_pe, cos[:, None], sin[:, None])], -1)
    return q, latent, turned(self.k_pe, cos, sin)


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


def rotated(x, cos, sin, neox: bool):
  """Float64 of a rotated last axis, whose pairs cos and sin are of."""
  half, out = x.shape[-1] // 2, np.empty(x.shape)
  for i in range(half):
    a, b = (i, i + half) if neox else (2 * i, 2 * i + 1)
    out[..., a] = x[..., a] * cos[..., i] - x[..., b] * sin[..., i]
    out[..., b] = x[..., b] * cos[..., i] + x[..., a] * sin[..., i]
  return out


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


# -----------------------------------------------------------------------------
# Heads


@dataclasses.dataclass(frozen=True)
class HeadCase:
  """A call of fused_qk_norm_rope, or with a layout of ..._cache.

  `tables` are "float32", "own" (q's dtype) or "one", cosines and sines together
  in q's dtype; `cache` is empty for q's dtype.
  """
  dtype: str = "bf16"
  tokens: int = 5
  hq: int = 3
  hk: int = 2
  dim: int = 128
  turned: int = 0
  neox: bool = True
  norm: bool = True
  gemma: bool = False
  joint: bool = False
  packed: bool = False
  sections: tuple[int, ...] = ()
  interleaved: bool = False
  nope_first: bool = False
  tables: str = "float32"
  layout: str = ""
  page: int = 16
  cache: str = ""
  token: bool = False
  scaled: bool = False
  q_out: str = ""
  return_kv: bool = False


class Heads:
  """The arrays of a case."""

  def __init__(self, case: HeadCase, seed: int = 0):
    rng = np.random.default_rng(seed)
    c, own = case, np.dtype(DTYPES[case.dtype])
    self.case = c
    normal = lambda *shape: rng.standard_normal(shape, np.float32).astype(own)
    self.q, self.k, self.v = (
        normal(c.tokens, h, c.dim) for h in (c.hq, c.hk, c.hk))
    size = lambda h: h * c.dim if c.joint else c.dim
    self.q_weight, self.k_weight = (
        normal(size(h)) if c.norm else None for h in (c.hq, c.hk))
    turned = c.turned or c.dim
    angles = rng.uniform(0, 7, (20, turned // 2))
    self.cos, self.sin = (f(angles).astype(
        np.float32 if c.tables == "float32" else own)
        for f in (np.cos, np.sin))
    lead = (3,) if c.sections else ()
    self.positions = rng.integers(-2, 23, (*lead, c.tokens)).astype(np.int32)
    if c.layout:
      kind = _numpy_dtype(c.cache, own)
      pages = c.tokens // c.page + 2
      self.pages, count = pages, pages * c.page
      self.k_cache, self.v_cache = (
          rng.integers(0, 100, shape).astype(kind) for shape in
          cache_oracle.shapes(c.layout, pages, c.page, c.hk, c.dim, c.dim,
                              kind))
      self.slots = rng.permutation(count)[:c.tokens].astype(np.int32)
      if c.tokens > 3:
        self.slots[0], self.slots[c.tokens // 2] = count, -1
      self.k_scale, self.v_scale = (
          np.float32(rng.uniform(0.02, 0.05, n))
          if c.scaled and c.cache else None for n in (c.hk, 1))
      self.k_found, self.v_found = (
          rng.random((pages, c.hk, c.page), np.float32) for _ in range(2))
    self.q_scale = np.float32(0.03) if c.scaled and c.q_out else None

  def exact(self):
    """Float64 (q, k), before they are rounded."""
    c = self.case
    wide = lambda t: np.asarray(t).astype(np.float64)
    row = np.clip(self.positions, 0, len(self.cos) - 1)
    pairs = self.cos.shape[1]
    if c.sections:
      turn = [i % 3 if i < 3 * c.sections[i % 3] else 0
              for i in range(pairs)] if c.interleaved else [
                  0 if i < c.sections[0] else 1 if i < sum(c.sections[:2])
                  else 2 for i in range(pairs)]
      tables = [np.stack([wide(t)[row[turn[i]], i] for i in range(pairs)], -1)
                for t in (self.cos, self.sin)]
    else:
      tables = [wide(t[row]) for t in (self.cos, self.sin)]
    first = c.dim - 2 * pairs if c.nope_first else 0
    at = slice(first, first + 2 * pairs)

    def made(x, weight):
      x = wide(x)
      if c.norm:
        mean = (x**2).mean((1, 2) if c.joint else 2, keepdims=True)
        w = wide(weight).reshape((-1, c.dim) if c.joint else -1)
        x = x / np.sqrt(mean + 1e-6) * (w + c.gemma)
      x[..., at] = rotated(x[..., at], *(t[:, None] for t in tables), c.neox)
      return x

    return made(self.q, self.q_weight), made(self.k, self.k_weight)


def heads_call(p: Heads):
  """(function, options, arrays) of a problem's call."""
  c = p.case
  options = dict(
      is_neox=c.neox, gemma_norm=c.gemma, joint_norm=c.joint,
      nope_first=c.nope_first, mrope_interleaved=c.interleaved,
      mrope_section=c.sections or None)
  cos, sin = p.cos, p.sin
  if c.tables == "one":
    cos, sin = np.concatenate([cos, sin], -1), None
  arrays = dict(q=p.q, k=p.k, positions=p.positions, cos=cos, sin=sin,
                q_weight=p.q_weight, k_weight=p.k_weight)
  if c.layout:
    options |= dict(layout=c.layout, q_out_dtype=c.q_out or None,
                    return_kv=c.return_kv)
    arrays |= dict(v=p.v, k_cache=p.k_cache, v_cache=p.v_cache,
                   slot_mapping=p.slots, k_scale=p.k_scale, v_scale=p.v_scale,
                   q_scale=p.q_scale)
    if c.token:
      arrays |= dict(k_token_scales=p.k_found, v_token_scales=p.v_found)
  if c.packed:
    options["num_heads"] = (c.hq, c.hk)
    arrays["q"] = np.concatenate([p.q, p.k, p.v], 1).reshape(c.tokens, -1)
    arrays["k"] = None
    if c.layout:
      arrays["v"] = None
  needed = ("k", "v", "sin")
  return (aiter.fused_qk_norm_rope_cache if c.layout
          else aiter.fused_qk_norm_rope, options,
          {n: None if t is None else jnp.asarray(t) for n, t in arrays.items()
           if t is not None or n in needed})


# -----------------------------------------------------------------------------
# Rows


@dataclasses.dataclass(frozen=True)
class RowCase:
  """A call of a function of norms.py, or of its operator; `op` says which.

  "qk" has a norm of q, and of k if k_cols is not 0; "gated" a norm of each of
  `heads` heads; "inverse" turns pairs of each back. Without a kind nothing is
  rounded; a group of 0 is a row. `given`: the scale is.
  A norm may have a bias; a gate may be a sigmoid alone, or before the norm.
  Scales are those of magnitudes of at least `least`.
  """
  op: str = "qk"
  dtype: str = "bf16"
  tokens: int = 5
  cols: int = 96
  heads: int = 3
  k_cols: int = 0
  residual: bool = False
  gemma: bool = False
  kept: bool = False
  kind: str = ""
  group: int = 0
  mode: str = ""
  transposed: bool = False
  pairs: int = 8
  neox: bool = False
  parts: int = 1
  given: bool = False
  bias: bool = False
  sigmoid: bool = False
  gated_first: bool = False
  least: float = 0.0


class Rows:
  """The arrays of a case: of heads [tokens, heads, cols], else [.., cols]."""

  def __init__(self, case: RowCase, seed: int = 0):
    rng = np.random.default_rng(seed)
    c, own = case, np.dtype(DTYPES[case.dtype])
    self.case = c
    normal = lambda *shape: rng.standard_normal(shape, np.float32).astype(own)
    shape = (c.tokens, c.cols) if c.op == "qk" else (
        c.tokens, c.heads, c.cols)
    self.q, self.residual, self.gate = (normal(*shape) for _ in range(3))
    self.weight = normal(c.cols)
    self.k, self.k_weight = normal(c.tokens, c.k_cols), normal(c.k_cols)
    self.positions = rng.integers(-2, 23, c.tokens).astype(np.int32)
    angles = rng.uniform(0, 7, (20, c.pairs))
    self.cos, self.sin = (np.float32(f(angles)) for f in (np.cos, np.sin))
    self.scale = np.float32([0.03])
    self.bias = normal(c.cols)

  def exact(self):
    """Float64 (q [tokens, columns], its sum or None, k)."""
    c = self.case
    wide = lambda t: np.asarray(t).astype(np.float64)

    def norm(x, weight):
      return x / np.sqrt((x**2).mean(-1, keepdims=True) + 1e-6) * (
          wide(weight) + c.gemma)

    s, total = wide(self.q), None
    if c.residual:
      s = total = s + wide(self.residual)
    gate = 1.0
    if c.op == "gated":
      z = wide(self.gate)
      gate = (1 if c.sigmoid else z) / (1 + np.exp(-z))
    if c.op != "inverse":
      s = norm(s * gate if c.gated_first else s, self.weight)
    if c.bias:
      s = s + wide(self.bias)
    if not c.gated_first:
      s = s * gate
    if c.op == "inverse":
      row = np.clip(self.positions, 0, len(self.cos) - 1)
      first = c.cols - 2 * c.pairs
      s[..., first:] = rotated(s[..., first:], wide(self.cos[row])[:, None],
                               -wide(self.sin[row])[:, None], c.neox)
    k = norm(wide(self.k), self.k_weight) if c.k_cols else None
    return s.reshape(c.tokens, -1), total, k


def rows_call(p: Rows):
  """(function, arguments, options): of one array, or of several, in order."""
  c = p.case
  options = dict(group_size=c.group) if c.group else {}
  if c.kind:
    options["quant_dtype"] = c.kind
  if c.transposed:
    options["transpose_scale"] = True
  by = "_group_quant" if c.group else "_per_token_quant" if c.kind else ""
  if c.op == "inverse":
    options["quant_group_size"] = options.pop("group_size")
    options["scale_layout"] = ("row", "col")[options.pop(
        "transpose_scale", False)]
    options |= dict(scale_dtype="uint8" if c.mode else "float32",
                    is_neox=c.neox)
    return aiter.inverse_rope_group_quant, (
        p.q, p.positions, p.cos, p.sin, c.parts), options
  if c.op == "gated":
    return getattr(aiter, "gated_rmsnorm" + by.replace("_", "_fp8_", 1)), (
        p.q, p.gate, p.weight), options
  if c.kept:
    options["output_unquantized"] = True
  if c.k_cols:
    options |= dict(k=p.k, k_weight=p.k_weight)
  if c.residual:
    options["q_residual"] = p.residual
  return getattr(aiter, "fused_qk_rmsnorm" + by), (
      p.q, p.weight), dict(options, gemma_norm=c.gemma)


def check_codes(test, codes, scale, exact, case: RowCase):
  """Fails unless codes times scales are exact numbers, rounded once.

  A float32 scale may be off by float32 arithmetic; a code then by one step
  where a quotient is all but a tie. e8m0 is exact but where amax is all but a
  power of two times the largest number.
  """
  c = case
  codes, scale = np.asarray(codes), np.asarray(scale)
  scale = (scale.T if c.transposed else scale).reshape(c.tokens, -1)
  tokens, cols = exact.shape
  group = c.group or cols
  whole = np.pad(exact, [(0, 0), (0, -cols % group)]).reshape(
      tokens, -1, group)
  largest = 6.0 if c.kind == "mxfp4" else cache_oracle.LARGEST[c.kind]
  want = np.maximum(np.abs(whole).max(-1), max(c.least, 1e-10)) / largest
  if c.mode:
    test.assertEqual(scale.dtype, np.uint8)
    power = np.ceil(np.log2(want * (1 - 1e-6)))
    if c.mode == "even":  # Of e2m1: from 1.75 on amax counts as 2.
      power = np.floor(np.log2(want * largest / 1.75)) - 1
    np.testing.assert_array_equal(scale, power.astype(int) + 127, str(c))
    scale = np.exp2(scale.astype(np.float64) - 127)
  else:
    np.testing.assert_allclose(scale, want, rtol=1e-5, err_msg=str(c))
  if c.kind == "mxfp4":
    nibbles = np.stack([codes & 15, codes >> 4], -1).reshape(tokens, -1)
    steps = np.array([0, .5, 1, 1.5, 2, 3, 4, 6])
    got = steps[nibbles & 7] * np.where(nibbles & 8, -1, 1)
    x = exact / np.repeat(scale, group, -1)[:, :cols]
    nearest = np.abs(np.abs(x)[..., None] - steps).min(-1)
    test.assertTrue((np.abs(x - got) <= nearest + 1e-5).all(), str(c))
    return
  for g in range(scale.shape[1]):
    at = slice(g * group, min((g + 1) * group, cols))
    for token in range(tokens):
      check_rounded(test, codes.reshape(tokens, cols)[token, at],
                    exact[token, at], c.kind, scale[token, g], str(c))
