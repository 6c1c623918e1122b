# SPDX-License-Identifier: Apache-2.0
"""AITER's names for the fused norm, rotation and write into the cache.

They take AITER's arguments but for what it writes its results into, and return
new arrays. qkv is one projection, [tokens, (heads of q, k and v) * head_dim];
cos_sin_cache has a row a position, cosines and then sines.
"""

from __future__ import annotations

from jax._src.aiter.cache import api as cache
from jax._src.aiter.core import arguments, dims
from jax._src.aiter.fused_qk import api

_SHUFFLED = {4: "x", 5: "asm"}


# What both AITER's functions and ours take, ours first.
_NAMES = dict(q="qkv", key="qkv", value="qkv", q_weight="qw", k_weight="kw",
              is_neox="is_neox_style")


def _heads(function, num_heads_q, num_heads_k, num_heads_v):
  accepted = "an integer >= 1"
  heads = tuple(
      arguments.number(function, name, n, accepted, lambda n: n >= 1, int)
      for name, n in (("num_heads_q", num_heads_q),
                      ("num_heads_k", num_heads_k),
                      ("num_heads_v", num_heads_v)))
  if heads[1] != heads[2]:
    raise arguments.bad(function, "num_heads_v", heads[2],
                        f"{heads[1]}, as num_heads_k")
  return heads[:2]


def _checked(function, qkv, heads, name, head_dim):
  """qkv [tokens, columns], whose heads have head_dim columns."""
  arguments.check_is_array(function, "qkv", qkv, optional=False)
  size = arguments.number(function, name, head_dim, "an integer >= 1",
                          lambda n: n >= 1, int)
  width = (heads[0] + 2 * heads[1]) * size
  if qkv.ndim != 2 or qkv.shape[1] != width:
    raise arguments.bad(function, "qkv", arguments.describe(qkv),
                        f"shape [tokens, {width}]")
  return qkv


def _layout(function, v_cache):
  arguments.check_is_array(function, "v_cache", v_cache, optional=False)
  if v_cache.ndim not in _SHUFFLED:
    raise arguments.bad(
        function, "v_cache", arguments.describe(v_cache),
        "[pages, heads, head_dim, page_size] or [pages, heads, page_size / x,"
        " head_dim, x]")
  return _SHUFFLED[v_cache.ndim]


def fused_qk_norm_rope_cache_quant_shuffle(
    qkv, num_heads_q, num_heads_k, num_heads_v, head_dim, eps, qw, kw,
    cos_sin_cache, is_neox_style, pos_ids, k_cache, v_cache, slot_mapping,
    kv_cache_dtype="auto", k_scale=None, v_scale=None):
  """AITER's fused_qk_norm_rope_cache_quant_shuffle.

  `fused_qk_norm_rope_cache` of layout "x" or, of a v_cache of rank 5, "asm".
  k_scale and v_scale are float32 [pages, heads, page_size], and each token and
  head has a scale of its own; or None, of a cache that keeps numbers as they
  are. kv_cache_dtype: "auto", or what k_cache is: "fp8", "int8" or its name.

  Returns:
    (q, k, k_cache, v_cache), and with scales then both of them; q and k are
    what AITER writes into qkv.
  """
  function = "fused_qk_norm_rope_cache_quant_shuffle"
  heads = _heads(function, num_heads_q, num_heads_k, num_heads_v)
  arguments.check_cache_kind(function, "k_cache", k_cache, kv_cache_dtype)
  qkv = _checked(function, qkv, heads, "head_dim", head_dim)
  layout = _layout(function, v_cache)
  with arguments.called(
      function, **_NAMES, cos="cos_sin_cache", positions="pos_ids",
      k_token_scales="k_scale", v_token_scales="v_scale"):
    q, *caches, k, _ = api.fused_qk_norm_rope_cache(
        qkv, None, None, k_cache, v_cache, slot_mapping, pos_ids, cos_sin_cache,
        q_weight=qw, k_weight=kw, eps=eps, is_neox=is_neox_style,
        num_heads=heads, layout=layout, k_token_scales=k_scale,
        v_token_scales=v_scale, return_kv=True)
  return q, k, *caches


def fused_qk_norm_rope_cache_block_quant_shuffle(
    qkv, num_heads_q, num_heads_k, num_heads_v, head_dim, eps, qw, kw,
    cos_sin_cache, is_neox_style, pos_ids, k_cache, v_cache, slot_mapping,
    cu_q_len, kv_cache_dtype, k_scale, v_scale, max_tokens_per_batch=0):
  """AITER's fused_qk_norm_rope_cache_block_quant_shuffle.

  As fused_qk_norm_rope_cache_quant_shuffle, with scales float32 [pages, heads]:
  each page and head has one, as `reshape_and_cache_with_block_quant` finds it.
  These are two launches, and keys are rounded to qkv's dtype between them. What
  is written does not depend on cu_q_len and max_tokens_per_batch.

  Returns:
    (q, k, k_cache, v_cache, k_scale, v_scale).
  """
  del cu_q_len, max_tokens_per_batch
  function = "fused_qk_norm_rope_cache_block_quant_shuffle"
  heads = _heads(function, num_heads_q, num_heads_k, num_heads_v)
  arguments.check_cache_kind(function, "k_cache", k_cache, kv_cache_dtype)
  if k_cache.ndim != 5:
    raise arguments.bad(function, "k_cache", arguments.describe(k_cache),
                        "an array of rank 5")
  for name, t in (("k_scale", k_scale), ("v_scale", v_scale)):
    arguments.check_is_array(function, name, t, optional=False)
    if t.shape != (k_cache.shape[0], heads[1]):
      raise arguments.bad(function, name, arguments.describe(t),
                          f"shape {[k_cache.shape[0], heads[1]]}")
  asm = _layout(function, v_cache) == "asm"
  qkv = _checked(function, qkv, heads, "head_dim", head_dim)
  turned = lambda t: t if asm else t.T
  with arguments.called(function, **_NAMES, cos="cos_sin_cache",
                        positions="pos_ids"):
    q, k, v = api.fused_qk_norm_rope(
        qkv, None, pos_ids, cos_sin_cache, q_weight=qw, k_weight=kw, eps=eps,
        is_neox=is_neox_style, num_heads=heads)
    k_cache, v_cache, *scales = cache.reshape_and_cache_with_block_quant(
        k, v, k_cache, v_cache, turned(k_scale), turned(v_scale), slot_mapping,
        asm_layout=asm)
  return q, k, k_cache, v_cache, *map(turned, scales)


def _by_tensor(function, qkv, qw, kw, cos_sin, positions, num_tokens,
               num_heads_q, num_heads_k, num_heads_v, head_size, is_neox_style,
               eps, k_cache, v_cache, slot_mapping, per_tensor_k_scale,
               per_tensor_v_scale, return_kv, use_shuffle_layout, block_size, x,
               rotary_dim, **sections):
  heads = _heads(function, num_heads_q, num_heads_k, num_heads_v)
  qkv = _checked(function, qkv, heads, "head_size", head_size)
  shuffled = arguments.flag(function, "use_shuffle_layout", use_shuffle_layout)
  arguments.check_is_array(function, "k_cache", k_cache, optional=False)
  arguments.check_is_array(function, "cos_sin", cos_sin, optional=False)
  layout = _layout(function, v_cache) if shuffled else "NHD"
  if k_cache.ndim != (5 if shuffled else 4):
    raise arguments.bad(function, "k_cache", arguments.describe(k_cache),
                        f"an array of rank {5 if shuffled else 4}")
  if cos_sin.ndim != 2:
    raise arguments.bad(function, "cos_sin", arguments.describe(cos_sin),
                        "an array of rank 2")
  # Said twice: here it must be what the arrays say.
  size, run = k_cache.shape[3 if shuffled else 1], 16 // k_cache.dtype.itemsize
  for name, given, own in (
      ("block_size", block_size, size), ("x", x, run),
      ("rotary_dim", rotary_dim, cos_sin.shape[1])):
    arguments.number(function, name, given, f"{own}, as of the arrays, or 0",
                     lambda n, own=own: n in (0, own), int)
  if dims.is_known(num_tokens) and dims.is_known(qkv.shape[0]):
    arguments.number(function, "num_tokens", num_tokens,
                     f"{qkv.shape[0]}, as of qkv",
                     lambda n: n == qkv.shape[0], int)
  scales = {}
  if k_cache.dtype != qkv.dtype:
    scales = dict(k_scale=per_tensor_k_scale, v_scale=per_tensor_v_scale)
  with arguments.called(
      function, **_NAMES, cos="cos_sin", k_scale="per_tensor_k_scale",
      v_scale="per_tensor_v_scale", mrope_interleaved="is_interleaved"):
    return api.fused_qk_norm_rope_cache(
        qkv, None, None, k_cache, v_cache, slot_mapping, positions, cos_sin,
        q_weight=qw, k_weight=kw, eps=eps, is_neox=is_neox_style,
        num_heads=heads, layout=layout, return_kv=return_kv, **scales,
        **sections)


def fused_qk_norm_rope_cache_pts_quant_shuffle(
    qkv, qw, kw, cos_sin, positions, num_tokens, num_heads_q, num_heads_k,
    num_heads_v, head_size, is_neox_style, eps, k_cache, v_cache, slot_mapping,
    per_tensor_k_scale=None, per_tensor_v_scale=None, return_kv=False,
    use_shuffle_layout=False, block_size=0, x=0, rotary_dim=0):
  """AITER's fused_qk_norm_rope_cache_pts_quant_shuffle.

  `fused_qk_norm_rope_cache` of layout "NHD" or, with use_shuffle_layout, "x" or
  "asm"; scales count for caches of 8 bits. block_size, x and rotary_dim are
  those of the arrays, or 0.

  Returns:
    (q, k_cache, v_cache), and with return_kv then k and v.
  """
  return _by_tensor(
      "fused_qk_norm_rope_cache_pts_quant_shuffle", qkv, qw, kw, cos_sin,
      positions, num_tokens, num_heads_q, num_heads_k, num_heads_v, head_size,
      is_neox_style, eps, k_cache, v_cache, slot_mapping, per_tensor_k_scale,
      per_tensor_v_scale, return_kv, use_shuffle_layout, block_size, x,
      rotary_dim)


def fused_qk_norm_mrope_3d_cache_pts_quant_shuffle(
    qkv, qw, kw, cos_sin, positions, num_tokens, num_heads_q, num_heads_k,
    num_heads_v, head_size, is_neox_style, mrope_section, is_interleaved, eps,
    k_cache, v_cache, slot_mapping, per_tensor_k_scale=None,
    per_tensor_v_scale=None, return_kv=False, use_shuffle_layout=False,
    block_size=0, x=0, rotary_dim=0):
  """AITER's fused_qk_norm_mrope_3d_cache_pts_quant_shuffle.

  As fused_qk_norm_rope_cache_pts_quant_shuffle, with positions [3, tokens] and
  numbers of pairs that turn by each.

  Returns:
    As there.
  """
  return _by_tensor(
      "fused_qk_norm_mrope_3d_cache_pts_quant_shuffle", qkv, qw, kw, cos_sin,
      positions, num_tokens, num_heads_q, num_heads_k, num_heads_v, head_size,
      is_neox_style, eps, k_cache, v_cache, slot_mapping, per_tensor_k_scale,
      per_tensor_v_scale, return_kv, use_shuffle_layout, block_size, x,
      rotary_dim, mrope_section=mrope_section, mrope_interleaved=is_interleaved)
