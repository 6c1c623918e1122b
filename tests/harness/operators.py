# SPDX-License-Identifier: Apache-2.0
"""Every public function with arrays it takes: for tests of what all share.

To add a family, add a line for each function, and for each way to call it that
takes other arrays or another kernel.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from harness import machine  # noqa: F401  sets XLA's flags

import jax
from jax.experimental import aiter

# Two values for each size that is left open.
SIZES = (dict(b=2, m=5, n=16, s=9, t=24, u=40),
         dict(b=3, m=70, n=32, s=600, t=31, u=17))


class Case(NamedTuple):
  """A function's line.

  Attributes:
    name: of the case.
    call: the function.
    arrays: what it takes, "<kind> <size>,<size>,...": a kind of KINDS, and
      sizes that are numbers or expressions of the names in SIZES.
    targets: what it calls on a GPU.
    gradients: how many of the arrays, counted from the first, have one.
  """
  name: str
  call: Callable[..., Any]
  arrays: tuple[str, ...]
  targets: tuple[str, ...]
  gradients: int = 0


def _normal(rng, shape, sizes):
  del sizes
  return rng.standard_normal(shape, np.float32)


def _of_range(low, high):
  return lambda rng, shape, sizes: rng.integers(low, high, shape)


def _ends(name):
  """Cumulative lengths, even ones, of a total."""
  return lambda rng, shape, sizes: np.arange(shape[0]) * sizes[name] // (
      shape[0] - 1)


def _slots(rng, shape, sizes):
  """Of a cache, each once; some skip."""
  del sizes
  return rng.permutation(shape[0]) - 2


# Kind -> dtype, and (rng, shape, sizes) -> values.
KINDS = {
    "bf16": (jnp.bfloat16, _normal),
    "f32": (jnp.float32, _normal),
    "i8": (jnp.int8, _of_range(-9, 9)),
    "e4m3fn": (jnp.float8_e4m3fn, _normal),
    "u8": (jnp.uint8, _of_range(0, 255)),
    "e8m0": (jnp.uint8, _of_range(120, 130)),
    "ends_t": (jnp.int32, _ends("t")),
    "ends_u": (jnp.int32, _ends("u")),
    "ends_12": (jnp.int32, lambda rng, shape, sizes: np.arange(
        shape[0]) * 12 // (shape[0] - 1)),
    "lengths": (jnp.int32, _of_range(1, 9)),
    "slots": (jnp.int32, _slots),
    "slices": (jnp.int32, lambda rng, shape, sizes: np.array(
        [[7, 40, 0][:shape[1]], [0, 3, 5][:shape[1]], [3, 2, 4][:shape[1]]])),
    "table": (jnp.int32, _of_range(0, 4)),
    "sizes_m": (jnp.int32, lambda rng, shape, sizes: np.full(
        shape, sizes["m"] // shape[0])),
    "share": (jnp.float32, lambda rng, shape, sizes: rng.random(shape)),
}

_ATTENTION = ("mha_fwd", "mha_bwd")
_NORM = ("norm_fwd", "norm_bwd")
_QKV = ("bf16 b,s,4,16", "bf16 b,u,2,16", "bf16 b,u,2,24")
_FP8 = ("mha_fp8_fwd",)
_PACKED = ("bf16 t,4,16", "bf16 u,2,16", "bf16 u,2,16", "ends_t b+1",
           "ends_u b+1")
_ROWS = "bf16 b,m,64"
_WIDE = "bf16 b,m,256"
_WEIGHT = "bf16 64"
_TOKENS = ("bf16 t,2,16", "bf16 t,2,16")
_ROPE = ("rope_rotate",)
_PAIR = "bf16 b,m,128"
_DRAW = ("sampling_draw",)
_ACTIVATION = ("activation_fwd", "activation_bwd")
_GMM = ("gmm",)
_SBHD, _KEYS = "bf16 s,b,4,16", "bf16 s,b,2,16"
_TABLES, _FREQS, _PLACES = ("f32 s,8",) * 2, "f32 s,1,1,8", "lengths s,b"
_AITER = dict(rotate_style=1, reuse_freqs_front_part=True, nope_first=False)
_POOLS = ("bf16 6,16,2,16",) * 2
_X_POOLS = ("bf16 6,2,2,16,8", "bf16 6,2,16,16")
_PROJECTED = ("bf16 t,128", "bf16 16", "bf16 s,16")
_HEADS = ("fused_qk_heads",)
_QK_ROWS = ("fused_qk_rows",)
_GATED = ("bf16 t,4,32", "bf16 t,4,32", "bf16 32")
_PAGED = ("paged_attend",)
_MLA = ("mla_attend",)
_PAGES = ("ends_12 b+1", "table 12", "lengths b")
_RAGGED = ("bf16 t,4,16", *_TOKENS, "bf16 6,16,2,2,128", "lengths b",
           "table b*3", "ends_t b+1")
_DELTA = ("bf16 b,s,2,16", "bf16 b,s,2,16", "bf16 b,s,4,8")
_DELTA_ROWS = tuple(f"bf16 1,t,{n}" for n in ("2,16", "2,16", "4,8"))
_QUANT = ("quant",)
_STREAM = ("bf16 b,s,4,16", "bf16 b,s,2,16", "bf16 16", "bf16 16", "f32 s,16")
_IMAGE = ("bf16 b,6,4,16", *["f32 2,4"] * 2, *["f32 3,4"] * 2)


def _case(name, *line, **options):
  call = functools.partial(getattr(aiter, name), **options)
  words = (f"{k}_{v}" for k, v in options.items())
  return Case("_".join((name, *words)), call, *line)


def _among(x, number):
  """x beside as many columns of a number as a kernel of top_k is for."""
  other = [(0, 0)] * (x.ndim - 1)
  return jnp.pad(x, (*other, (0, 1280)), constant_values=number)


CASES = (
    _case("flash_attn_func", _QKV, _ATTENTION, 3),
    _case("flash_attn_func", _QKV, _ATTENTION, 3, causal=True),
    _case("flash_attn_func", _QKV, _ATTENTION, 3, window_size=(5, 3)),
    Case("flash_attn_func_everything", lambda q, k, v, bias, *rest:
         aiter.flash_attn_func(
             q, k, v, bias=bias, alibi_slopes=rest[0], sink=rest[1],
             logits_soft_cap=3.0, dropout_p=0.3,
             dropout_key=jax.random.key(0)),
         (*_QKV, "f32 4,s,u", "f32 4", "f32 4"), _ATTENTION, 6),
    Case("flash_attn_func_mask_of_dropout", lambda q, k, v:
         aiter.flash_attn_func(
             q, k, v, dropout_p=0.3, dropout_key=jax.random.key(0),
             return_attn_probs=True), _QKV, ("mha_fwd",)),
    Case("flash_attn_func_cache", lambda q, k, v, ends: aiter.flash_attn_func(
        q, k, v, causal=True, cu_seqlens_kv=ends),
         ("bf16 b,1,4,16", "bf16 b,u,2,16", "bf16 b,u,2,16", "ends_u b+1"),
         ("mha_fwd",)),
    _case("flash_attn_fp8_pertensor_func",
          ("e4m3fn b,s,4,16", *("e4m3fn b,u,2,16",) * 2), _FP8, causal=True),
    Case("flash_attn_varlen_fp8_pertensor_func",
         lambda q, k, v, *ends: aiter.flash_attn_varlen_fp8_pertensor_func(
             q, k, v, None, None, None, *ends),
         ("e4m3fn t,4,16", *("e4m3fn u,2,16",) * 2, *_PACKED[3:]), _FP8),
    _case("flash_attn_varlen", _PACKED, _ATTENTION, 3),
    _case("flash_attn_varlen", _PACKED, _ATTENTION, 3, causal=True),
    _case("flash_attn_varlen_func", _PACKED, _ATTENTION, 3),
    Case("flash_attn_varlen_func_pages", lambda *args:
         aiter.flash_attn_varlen_func(*args[:5], block_table=args[5]),
         ("bf16 t,4,16", *_POOLS, "ends_t b+1", "ends_12 b+1", "table b,3"),
         _PAGED),
    Case("flash_attn_varlen_per_head", lambda q, k, v, ends_q, ends_k, slopes:
         aiter.flash_attn_varlen(q, k, v, ends_q, ends_k, alibi_slopes=slopes,
                                 sink=slopes, min_seqlen_q=2),
         (*_PACKED, "f32 b,4"), ("mha_fwd",)),
    _case("dot_product_attention", _QKV, _ATTENTION, 3, is_causal=True),
    Case("dot_product_attention_lengths", lambda q, k, v, lengths:
         aiter.dot_product_attention(q, k, v, key_value_seq_lengths=lengths),
         (*_QKV, "lengths b"), ("mha_fwd",)),
    Case("dot_product_attention_mask", lambda q, k, v, bias, mask:
         aiter.dot_product_attention(q, k, v, bias, mask > 0),
         (*_QKV, "f32 4,1,u", "f32 b,1,1,u"), _ATTENTION, 4),
    Case("flax_attention_fn", lambda q, k, v, mask: aiter.flax_attention_fn(
        q, k, v, mask=mask > 0, dropout_rate=0.3,
        dropout_rng=jax.random.key(0)), (*_QKV, "f32 b,1,s,u"), _ATTENTION, 3),
    _case("rms_norm", (_ROWS, _WEIGHT), _NORM, 2),
    _case("rms_norm_with_add", (_ROWS, _ROWS, _WEIGHT), _NORM, 3),
    _case("layer_norm", (_ROWS, _WEIGHT, _WEIGHT), _NORM, 3),
    _case("layer_norm_with_add", (_ROWS, _ROWS, _WEIGHT, _WEIGHT), _NORM, 4),
    _case("rms_norm_quant", (_ROWS, _WEIGHT), ("norm_quant",)),
    _case("layer_norm_quant", (_ROWS, _WEIGHT, _WEIGHT), ("norm_quant",)),
    _case("rms_norm_with_add_quant", (_ROWS, _ROWS, _WEIGHT), ("norm_quant",),
          quant_dtype="float8_e4m3fn"),
    _case("layer_norm_with_add_quant", (_ROWS, _ROWS, _WEIGHT, _WEIGHT),
          ("norm_quant",), quant_dtype="mxfp4"),
    _case("rope", ("bf16 b,s,4,16", *_TABLES), _ROPE, 3),
    Case("rope_packed", lambda x, cos, sin, ends: aiter.rope(
        x, cos, sin, layout="thd", cu_seqlens=ends),
         ("bf16 t,4,16", *["f32 t,8"] * 2, "ends_t b+1"), _ROPE, 1),
    Case("rope_tables", lambda x: aiter.rope(
        x, *aiter.rotary_embedding(16, 700)), ("bf16 b,s,4,16",), _ROPE, 1),
    Case("get_rope", lambda x: aiter.rope(
        x, *aiter.get_rope(16, 16, 700, 1e4)), ("bf16 b,s,4,16",), _ROPE),
    _case("rope_2c", ("bf16 b,s,4,16", "bf16 b,s,2,16", *_TABLES), _ROPE, 2),
    _case("rope_2d", _IMAGE, _ROPE, 1, height=2, width=3),
    _case("rope_3d", ("bf16 b,12,4,16", *["f32 2,2"] * 4, *["f32 3,4"] * 2),
          _ROPE, 1, frames=2, height=2, width=3),
    _case("rope_mrope", ("bf16 b,s,4,16", "bf16 b,s,2,16", *_TABLES,
                         "lengths 3,b,s"), _ROPE, 2, sections=(2, 3, 3)),
    _case("apply_rope", ("bf16 t,4,16", "lengths t"), _ROPE, 1, head_dim=16),
    *(_case(f"rope_{name}", (*vectors, *rest), _ROPE, **_AITER)
      for two, vectors in (("", (_SBHD,)), ("2c_", (_SBHD, _KEYS)))
      for name, rest in (
          (f"{two}fwd", (_FREQS,)), (f"{two}bwd", (_FREQS,)),
          (f"cached_{two}fwd", (_FREQS,) * 2),
          (f"cached_{two}bwd", (_FREQS,) * 2),
          (f"cached_positions_{two}fwd", (_FREQS, _FREQS, _PLACES)),
          (f"cached_positions_offsets_{two}fwd",
           (_FREQS, _FREQS, _PLACES, _PLACES)))),
    *(_case(f"rope_thd_{way}", ("bf16 t,4,16", "ends_t b+1", "f32 t,1,1,8"),
            _ROPE, **_AITER) for way in ("fwd", "bwd")),
    *(_case(f"rope_2d_{way}", _IMAGE, _ROPE, img_height=2, img_width=3,
            **_AITER) for way in ("fwd", "bwd")),
    Case("rotary_embedding_fwd", lambda positions, *rest:
         aiter.rotary_embedding_fwd(positions, *rest[:2], 16, *rest[2:], True,
                                    False),
         ("lengths t", "bf16 t,64", "bf16 t,32", *["f32 t,8"] * 2), _ROPE),
    Case("batched_rotary_embedding", lambda positions, offsets, *rest:
         aiter.batched_rotary_embedding(
             positions, *rest[:2], 16, *rest[2:], True, False, 16, offsets),
         ("lengths t", "lengths t", "bf16 t,64", "bf16 t,32",
          *["f32 t,8"] * 2), _ROPE),
    *(_case(f"{name}_and_mul", (_PAIR,), _ACTIVATION, 1)
      for name in ("silu", "gelu", "gelu_tanh", "swiglu")),
    Case("silu_and_mul_of_two", aiter.silu_and_mul, ("bf16 b,m,64",) * 2,
         _ACTIVATION, 2),
    Case("silu_and_mul_of_experts", lambda x, bias, ids: aiter.silu_and_mul(
        x, expert_ids=ids, bias=bias), (_PAIR, "bf16 3,128", "lengths b,m"),
         _ACTIVATION, 2),
    _case("gelu_fast", (_PAIR,), _ACTIVATION, 1),
    _case("scaled_silu_and_mul", (_PAIR, "f32 1"),
          ("activation_quant_group",)),
    *(_case(f"{name}_and_mul_quant", (_PAIR,), ("activation_quant_row",))
      for name in ("silu", "gelu", "gelu_tanh", "swiglu")),
    _case("silu_and_mul_quant", (_PAIR,), ("activation_quant_group",),
          group_size=64),
    _case("silu_and_mul_quant", (_PAIR,), ("activation_quant_group",),
          quant_dtype="mxfp4", shuffle_scale=True),
    _case("gemm", ("bf16 m,64", "bf16 32,64", "f32 32"), ("gemm",), 3,
          activation="gelu"),
    _case("gemm", ("bf16 b,m,64", "bf16 32,64"), ("gemm",), 2),
    _case("gemm", ("bf16 b,m,64", "bf16 64,32"), ("gemm",), 2,
          transpose_b=False),
    Case("gemm_batched", aiter.gemm, ("bf16 b,m,64", "bf16 b,32,64"),
         ("gemm",), 2),
    _case("gemm_i8", ("i8 b,m,64", "i8 32,64", "f32 b,m,1", "f32 32"),
          ("gemm",)),
    _case("gemm_fp8", ("e4m3fn m,64", "e4m3fn 32,64", "f32 m", "f32 32"),
          ("gemm",)),
    Case("gemm_fp8_blocks", aiter.gemm_fp8,
         ("e4m3fn m,256", "e4m3fn 128,256", "f32 m,2", "f32 1,2"), ("gemm",)),
    _case("gemm_fp8_mi350",
          ("e4m3fn m,256", "e4m3fn 128,256", "f32 2,m", "f32 2,1"), ("gemm",)),
    _case("flatmm_fp8",
          ("e4m3fn m,256", "e4m3fn 128,256", "f32 2,m", "f32 2,1"), ("gemm",)),
    _case("gemm_fp4", ("u8 m,128", "u8 64,128", "e8m0 m,8", "e8m0 64,8"),
          ("gemm",)),
    _case("gemm_a16w16", ("bf16 b,m,64", "bf16 32,64"), ("gemm",), 2),
    *(_case(name, ("e4m3fn m,64", "e4m3fn 32,64", "f32 m,1", "f32 32,1"),
            ("gemm",)) for name in ("gemm_a8w8", "gemm_a8w8_bpreshuffle")),
    *(_case(name, ("e4m3fn m,256", "e4m3fn 128,256", "f32 m,2", "f32 1,2"),
            ("gemm",)) for name in (
                "gemm_a8w8_blockscale", "gemm_a8w8_blockscale_bpreshuffle")),
    _case("gemm_a4w4", ("u8 16,128", "u8 64,128", "e8m0 256,8", "e8m0 256,8"),
          ("gemm",)),
    _case("batched_gemm_bf16", ("bf16 b,m,64", "bf16 b,32,64", "bf16 b,1,32"),
          ("gemm",), 3),
    _case("batched_gemm_a8w8", ("i8 b,m,64", "i8 b,32,64", "f32 b,m,1",
                                "f32 b,1,32", "f32 b,1,32"), ("gemm",)),
    _case("per_tensor_quant", (_WIDE,), ("quant",)),
    _case("per_token_quant", (_WIDE,), ("quant",)),
    _case("smooth_quant", (_ROWS, "f32 64"), ("quant",)),
    _case("per_group_quant", (_WIDE,), ("quant",)),
    _case("per_group_quant", (_WIDE,), ("quant",), transpose_scale=True),
    _case("per_block_quant", (_WIDE,), ("quant",)),
    _case("mx_quant", (_WIDE,), ("quant",)),
    _case("mx_quant", (_WIDE,), ("quant",), shuffle_scale=True),
    _case("dequant", ("i8 b,m,256", "f32 b,m,1"), ()),
    _case("mx_dequant", ("u8 b,m,128", "e8m0 b,m,8"), ()),
    _case("pack_e2m1", (_ROWS,), ()),
    _case("unpack_e2m1", ("u8 b,m,32",), ()),
    _case("shuffle_weight", ("bf16 16*n,64",), ()),
    _case("unshuffle_weight", ("bf16 16*n,64",), ()),
    _case("shuffle_scale", ("u8 m,8",), ()),
    _case("unshuffle_scale", ("u8 256*b,8",), ()),
    _case("write_kv_cache", (*_TOKENS, *["bf16 3,16,2,16"] * 2, "slots t"),
          ("cache_copy",)),
    _case("write_kv_cache", (*_TOKENS, *["e4m3fn 3,2,16,16"] * 2, "slots t"),
          ("cache_cast",), layout="HND"),
    _case("reshape_and_cache_flash", (
        *_TOKENS, *["i8 3,16,2,16"] * 2, "slots t"), ("cache_cast",)),
    _case("reshape_and_cache", (*_TOKENS, "bf16 3,2,2,16,8", "bf16 3,2,16,16",
                                "slots t"), ("cache_copy",)),
    _case("append_kv", (*_TOKENS, "slots t", *["bf16 3,16,2,16"] * 2),
          ("cache_copy",)),
    _case("reshape_and_cache_with_pertoken_quant", (
        *_TOKENS, "i8 3,2,1,16,16", "i8 3,2,16,16", *["f32 2,48"] * 2,
        "slots t"), ("cache_token",)),
    _case("reshape_and_cache_with_block_quant", (
        *_TOKENS, "i8 3,2,1,16,16", "i8 3,2,16,16", *["f32 2,3"] * 2,
        "slots t"), ("cache_block",)),
    _case("reshape_and_cache_with_block_quant_for_asm_pa", (
        *_TOKENS, "i8 8,2,1,16,16", "i8 8,2,1,16,16", *["f32 1,2"] * 2,
        "slots t"), ("cache_block",)),
    _case("concat_and_cache_mla", ("bf16 t,32", "bf16 t,16", "bf16 3,16,48",
                                   "slots t"), ("cache_copy",)),
    _case("concat_and_cache_mla_seg", (
        "bf16 t,32", "bf16 t,16", "i8 3,768", "slots t"), ("cache_cast",),
          page_size=16),
    _case("indexer_k_quant_and_cache", (
        "bf16 t,128", "u8 3,16,132", "slots t"), ("cache_token",)),
    _case("kv_cache_update", ("bf16 t,4,16", "slices 3,3", "bf16 48,4,16"),
          ("cache_copy",)),
    _case("swap_blocks", ("bf16 4,16,2", "bf16 5,16,2", "table b,2"),
          ("cache_copy",)),
    _case("copy_blocks", (*["bf16 4,16,2"] * 2, "table b,2"),
          ("cache_copy",)),
    _case("gather_kv_cache", (*["bf16 4,16,2,16"] * 2, "table b,3",
                              "ends_t b+1"), (), total_tokens=40),
    _case("paged_attention_decode", (
        "bf16 b,4,16", *_POOLS, "table b,3", "lengths b"), _PAGED,
          window_size=(5, -1), return_lse=True),
    Case("paged_attention_decode_of_bytes", lambda q, k, v, *rest:
         aiter.paged_attention_decode(
             q, k, v, *rest[:2], layout="HND", sink=rest[2],
             alibi_slopes=rest[2], k_scale=rest[3], v_scale=rest[3]),
         ("bf16 b,4,16", *["e4m3fn 6,2,16,16"] * 2, "table b,3", "lengths b",
          "f32 4", "f32 6,2,16"), _PAGED),
    _case("unified_attention", (
        "bf16 t,4,16", *_POOLS, "ends_t b+1", "lengths b", "table b,3"),
          _PAGED, softcap=3.0, return_lse=True),
    _case("merge_attn_states", ("bf16 t,4,16", "f32 4,t") * 2, (), 4),
    _case("paged_attention", ("bf16 b,4,16", *_POOLS, *_PAGES), _PAGED),
    Case("paged_attention_v1", lambda q, k, v, *rest: aiter.paged_attention_v1(
        q, k, v, 0.3, rest[0], None, *rest[1:], sliding_window=5,
        fp8_out_scale=0.5),
         ("bf16 b,4,16", *_POOLS, "table b,3", "lengths b"),
         (*_PAGED, "quant")),
    Case("paged_attention_ragged", lambda q, k, v, *rest:
         aiter.paged_attention_ragged(q, k, v, 0.3, *rest),
         ("bf16 b,4,16", *_POOLS, *_PAGES), _PAGED),
    Case("pa_fwd_asm", aiter.pa_fwd_asm,
         ("bf16 b,4,16", "bf16 6,2,2,16,8", "bf16 6,2,2,16,8", "table b,3",
          "lengths b"), _PAGED),
    _case("paged_prefill", ("bf16 t,4,16", *_POOLS, "ends_t b+1", *_PAGES),
          _PAGED),
    Case("mha_batch_prefill_func", lambda *args: aiter.mha_batch_prefill_func(
        *args[:-1], 99, 99, kv_last_page_lens=args[-1]),
         ("bf16 t,4,16", *_POOLS, "ends_t b+1", *_PAGES), _PAGED),
    Case("ragged_paged_attention", lambda *args: aiter.ragged_paged_attention(
        *args, jnp.array([0, 1, 2])), _RAGGED, (*_PAGED, "cache_copy")),
    Case("ragged_paged_attention_hd64", lambda *args:
         aiter.ragged_paged_attention_hd64(
             *args[:-1], jnp.array([0, 1, 2]), args[-1]),
         (*_RAGGED[:3], "bf16 6,16,1,2,128", *_RAGGED[4:], "f32 4"),
         (*_PAGED, "cache_copy")),
    _case("fused_qk_rope_concat_and_cache_mla", (
        "bf16 t,4,32", "bf16 t,4,16", "bf16 t,32", "bf16 t,16",
        "bf16 3,16,1,48", "slots t", "lengths t", "f32 s,8", "f32 s,8"),
          ("fused_qk_latent",)),
    _case("fused_qk_norm_rope", (
        "bf16 t,4,16", "bf16 t,2,16", "lengths t", "f32 s,8", "f32 s,8"),
          _HEADS, 2),
    Case("fused_qk_norm_rope_joint", lambda qkv, q, k, *rest:
         aiter.fused_qk_norm_rope(
             qkv, None, *rest, q_weight=q, k_weight=k, num_heads=(4, 2),
             joint_norm=True),
         ("bf16 t,128", "bf16 64", "bf16 32", "lengths t", "f32 s,8",
          "f32 s,8"), _HEADS, 3),
    *(Case(f"fused_qk_norm_rope_1way{kind}", lambda q, k, *rest, kind=kind:
           getattr(aiter, f"fused_qk_norm_rope_1way{kind}")(
               q, k, *rest, *q.shape[:2], 4, 2, 16, True, 1e-6),
           _STREAM, (*_HEADS, *targets), gradients)
      for kind, targets, gradients in (
          ("", (), 4), ("_fp8_perhead_quant", _QUANT, 0))),
    *(Case(f"fused_qk_norm_rope_2way{kind}", lambda q, k, *rest, kind=kind:
           getattr(aiter, f"fused_qk_norm_rope_2way{kind}")(
               q, k, q, k, *rest[:2], *rest, rest[2], *q.shape[:2],
               q.shape[1], 4, 2, 16, False, 1e-6),
           _STREAM, (*_HEADS, *targets), gradients)
      for kind, targets, gradients in (
          ("", (), 4), ("_fp8_perhead_quant", _QUANT, 0))),
    _case("v_1way_per_head_fp8_quant", ("bf16 b,s,2,16",), _QUANT),
    _case("v_2way_per_head_fp8_quant", ("bf16 b,s,2,16", "bf16 b,m,2,16"),
          _QUANT),
    _case("fused_qk_norm_rope_cache", (
        *_TOKENS, "bf16 t,2,16", *_POOLS, "slots t", "lengths t", "f32 s,8",
        "f32 s,8"), _HEADS),
    Case("fused_qk_norm_rope_cache_quant_shuffle", lambda qkv, w, *rest:
         aiter.fused_qk_norm_rope_cache_quant_shuffle(
             qkv, 4, 2, 2, 16, 1e-6, w, w, rest[0], True, *rest[1:]),
         (*_PROJECTED, "lengths t", *_X_POOLS, "slots t"), _HEADS),
    Case("fused_qk_norm_rope_cache_block_quant_shuffle", lambda qkv, w, *rest:
         aiter.fused_qk_norm_rope_cache_block_quant_shuffle(
             qkv, 4, 2, 2, 16, 1e-6, w, w, rest[0], True, *rest[1:5], None,
             "auto", *rest[5:]),
         (*_PROJECTED, "lengths t", "i8 6,2,1,16,16", "i8 6,2,16,16", "slots t",
          *["f32 6,2"] * 2), (*_HEADS, "cache_block")),
    Case("fused_qk_norm_rope_cache_pts_quant_shuffle", lambda qkv, w, *rest:
         aiter.fused_qk_norm_rope_cache_pts_quant_shuffle(
             qkv, w, w, *rest[:2], qkv.shape[0], 4, 2, 2, 16, True, 1e-6,
             *rest[2:]),
         (*_PROJECTED, "lengths t", *_POOLS, "slots t"), _HEADS),
    Case("fused_qk_norm_mrope_3d_cache_pts_quant_shuffle",
         lambda qkv, w, *rest:
         aiter.fused_qk_norm_mrope_3d_cache_pts_quant_shuffle(
             qkv, w, w, *rest[:2], qkv.shape[0], 4, 2, 2, 16, True, (2, 3, 3),
             True, 1e-6, *rest[2:], use_shuffle_layout=True),
         (*_PROJECTED, "lengths 3,t", *_X_POOLS, "slots t"), _HEADS),
    _case("fused_qk_rmsnorm", ("bf16 t,64", "bf16 64"), _QK_ROWS, 2),
    _case("fused_qk_rmsnorm_group_quant", ("bf16 t,64", "bf16 64"), _QK_ROWS,
          group_size=32),
    _case("fused_qk_rmsnorm_per_token_quant", ("bf16 t,64", "bf16 64"),
          _QK_ROWS),
    Case("fused_rms_fp8_group_quant", lambda q, w, k, v:
         aiter.fused_rms_fp8_group_quant(q, w, 1e-6, k, v, 1e-6),
         ("bf16 t,64", "bf16 64", "bf16 t,32", "bf16 32"), _QK_ROWS),
    Case("fused_rms_fp8_per_tensor_static_quant", lambda q, w, scale:
         aiter.fused_rms_fp8_per_tensor_static_quant(q, w, 1e-6, scale),
         ("bf16 t,64", "bf16 64", "f32 1"), _QK_ROWS),
    Case("fused_rms_mxfp4_quant", lambda q, w: aiter.fused_rms_mxfp4_quant(
        q, w, 1e-6, shuffle=True), ("bf16 t,64", "bf16 64"), _QK_ROWS),
    Case("fused_rms_gated_fp8_group_quant", lambda x, w, z:
         aiter.fused_rms_gated_fp8_group_quant(x, w, None, z, 1e-6),
         ("bf16 t,64", "bf16 64", "bf16 t,64"), _QK_ROWS),
    _case("fused_flatten_mxfp4_quant", ("bf16 t,4,32",), ("quant",)),
    _case("fused_flatten_fp8_group_quant", ("bf16 t,4,32",), ("quant",),
          group_size=32),
    _case("gated_rmsnorm", _GATED, _QK_ROWS, 3),
    _case("gated_rmsnorm_fp8_group_quant", _GATED, _QK_ROWS),
    _case("gated_rmsnorm_fp8_per_token_quant", _GATED, _QK_ROWS),
    _case("inverse_rope_group_quant", (
        "bf16 t,4,32", "lengths t", "f32 s,8", "f32 s,8"), _QK_ROWS,
          num_groups=2, quant_group_size=32),
    _case("indexer_qk_rope_quant_and_cache", (
        "bf16 t,4,128", "f32 t,4", "bf16 t,128", "u8 3,16,132", "slots t",
        "f32 128", "f32 128", "lengths t", "f32 s,32", "f32 s,32"),
          ("norm_fwd", *_ROPE, "cache_token", "quant")),
    _case("fp8_mqa_logits", ("e4m3fn m,4,16", "e4m3fn n,16", "share n",
                             "f32 m,4", "lengths m", "lengths m"),
          ("indexer_logits",)),
    _case("fp8_paged_mqa_logits", (
        "e4m3fn b,2,4,16", "u8 4,16,20", "f32 b,2,4", "lengths b", "table b,3"),
          ("indexer_logits",), max_model_len=40),
    _case("mla_decode_fwd", ("bf16 t,4,48", "bf16 6,16,1,48", "ends_t b+1",
                             *_PAGES), _MLA, kv_lora_rank=32),
    Case("mla_prefill_fwd", functools.partial(
        aiter.mla_prefill_fwd, kv_lora_rank=32),
         ("bf16 t,4,48", "bf16 6,16,1,48", "ends_t b+1", *_PAGES), _MLA),
    _case("sparse_mla_fwd", ("bf16 t,4,48", "bf16 6,16,48", "table t,7"), _MLA,
          kv_lora_rank=32, return_lse=True),
    Case("mla_ragged_paged_attention", lambda *args:
         aiter.mla_ragged_paged_attention(*args, jnp.array([0, 1, 2])),
         ("bf16 t,4,32", "bf16 t,4,16", "bf16 t,32", "bf16 t,16",
          "bf16 6,8,2,256", "lengths b", "table b*3", "ends_t b+1"),
         (*_MLA, "cache_copy")),
    _case("cp_gather_indexer_k_quant_cache", (
        "u8 4,16,132", "table b,3", "ends_t b+1"), (), total_tokens=40,
          head_dim=128),
    _case("ragged_dot", ("bf16 m,16", "bf16 b,16,n", "sizes_m b"), _GMM, 2),
    _case("ragged_dot", ("bf16 m,16", "bf16 b,n,16", "sizes_m b"), _GMM, 2,
          transpose_rhs=True),
    Case("ragged_dot_behind", lambda a, b, bias, sizes: aiter.ragged_dot(
        a, b, sizes, bias=bias, activation=jax.nn.silu),
         ("bf16 m,16", "bf16 b,16,n", "f32 b,n", "sizes_m b"), _GMM, 3),
    Case("ragged_dot_float32", functools.partial(
        aiter.ragged_dot, precision="highest"),
         ("f32 m,16", "f32 b,16,n", "sizes_m b"), _GMM, 2),
    _case("gmm", ("bf16 m,16", "bf16 b,16,n", "sizes_m b"), _GMM, 2),
    _case("tgmm", ("bf16 16,m", "bf16 m,n", "sizes_m b"), _GMM, 2),
    _case("grouped_gemm_i8", ("i8 m,32", "i8 b,n,32", "f32 m,1", "f32 b,n,1",
                              "sizes_m b"), _GMM),
    Case("grouped_gemm_fp4", lambda a, b, scale, sizes: aiter.grouped_gemm_fp4(
        a, b, None, scale, sizes),
         ("bf16 m,32", "u8 b,n,16", "e8m0 b,n,1", "sizes_m b"), _GMM),
    _case("quantize_mxfp4_dim0", (_ROWS.replace("b,", ""),), _QUANT),
    _case("quantize_mxfp4_dim1", ("bf16 32*m,64",), _QUANT),
    _case("grouped_mxfp4_fwd_da", (
        "u8 m,16", "u8 b,n,16", "e8m0 m,1", "e8m0 b,n,1", "sizes_m b"), _GMM),
    _case("grouped_mxfp4_dw", (
        "u8 n,16*m", "e8m0 n,m", "u8 32,16*m", "e8m0 32,m", "sizes_m b"),
          _GMM),
    _case("grouped_gemm_i4", ("bf16 m,32", "u8 b,n,16", "bf16 b,n,1",
                              "sizes_m b"), _GMM),
    _case("grouped_gemm_fp8", ("e4m3fn m,128", "e4m3fn b,128,128", "f32 m,1",
                               "f32 b,1,1", "sizes_m b"), _GMM),
    *(Case(name, lambda x, name=name: getattr(aiter, name)(x, 4),
           ("f32 b,m,40",), ("moe_topk",)) for name in (
               "topk_softmax", "topk_sigmoid", "topk_gating")),
    # Logits far enough apart for the choice to stay as it is.
    Case("topk_softmax_weights", lambda x: aiter.topk_softmax(
        x + 3 * jnp.arange(40, dtype=x.dtype), 4, True)[0], ("f32 b,m,40",),
         ("moe_topk",), 1),
    _case("grouped_topk", ("f32 m,40",), ("moe_topk",), topk=4,
          num_expert_group=5, topk_group=2, need_renorm=True),
    _case("biased_grouped_topk", ("f32 m,40", "f32 40"), ("moe_topk",), topk=4,
          num_expert_group=5, topk_group=2, need_renorm=True),
    _case("moe_align_block_size", ("table t,3",), ("moe_sort",), num_experts=4,
          block_size=16),
    _case("moe_sorting", ("table t,3", "share t,3"), ("moe_sort",),
          num_experts=4, model_dim=8, moebuf_dtype="bfloat16"),
    Case("moe_permute", lambda x, ids: aiter.moe_permute(x, ids, 4)[:2],
         ("bf16 t,8", "table t,3"), ("moe_sort",)),
    Case("moe_unpermute", lambda x, ids, w: (
        lambda found: aiter.moe_unpermute(found.rows, found.places, w))(
            aiter.moe_permute(x, ids, 4)), ("bf16 t,8", "table t,3",
                                            "share t,3"), ("moe_sort",)),
    _case("moe_sum", ("bf16 t,3,8",), (), 1),
    Case("fused_moe", lambda x, w1, w2, w, ids: aiter.fused_moe(
        x / 4, w1 / 4, w2 / 4, w, ids),
         ("bf16 t,16", "bf16 4,2*n,16", "bf16 4,16,n", "share t,3",
          "table t,3"),
         ("moe_sort", "gmm", "activation_fwd", "activation_bwd"), 4),
    Case("sample", lambda x: aiter.sample(x, jax.random.key(0)),
         ("bf16 b,300",), _DRAW),
    Case("sample_limits", lambda x, temperature, k, p, mask: aiter.sample(
        x, jax.random.key(0), temperature, k, p, 0.1, order="top_k_first",
        mask=mask), ("f32 m,32*n", "f32 m", "lengths m", "share m",
                     "lengths m,n"), _DRAW),
    _case("greedy_sample", ("bf16 b,300",), _DRAW),
    *(Case(f"{name}_sample", lambda x, t, name=name: getattr(
        aiter, f"{name}_sample")(x, t, key=jax.random.key(0)),
           ("bf16 b,300", "share b"), _DRAW) for name in ("mixed", "random")),
    _case("mixed_sample_outer_exponential", (
        "f32 b,300", "share b,300", "share b"), _DRAW),
    Case("random_sample_outer_exponential",
         aiter.random_sample_outer_exponential,
         ("f32 b,300", "share b,300", "share b"), _DRAW),
    Case("exponential", lambda x: aiter.exponential(
        jax.random.key(0), x.shape, 2.0), ("f32 b,n",), ()),
    Case("top_p_sampling_from_probs", lambda x, p:
         aiter.top_p_sampling_from_probs(x, p, key=jax.random.key(0)),
         ("share b,300", "share b"), _DRAW),
    Case("top_k_top_p_sampling_from_probs", lambda x, k, p:
         aiter.top_k_top_p_sampling_from_probs(
             x, k, p, key=jax.random.key(0)),
         ("share b,300", "lengths b", "share b"), _DRAW),
    Case("chunk_gated_delta_rule", lambda q, k, v, g, beta:
         aiter.chunk_gated_delta_rule(
             q, k, v, -g, beta, use_qk_l2norm_in_kernel=True),
         (*_DELTA, "share b,s,4", "share b,s,4"), (), 5),
    Case("chunk_gated_delta_rule_packed", lambda q, k, v, g, beta, state, cu:
         aiter.chunk_gated_delta_rule(
             q, k, v, -g, beta, initial_state=state, output_final_state=True,
             use_qk_l2norm_in_kernel=True, cu_seqlens=cu),
         (*_DELTA_ROWS, "share 1,t,4", "share 1,t,4", "f32 b,4,16,8",
          "ends_t b+1"), (), 6),
    Case("fused_recurrent_gated_delta_rule", lambda q, k, v, gk:
         aiter.fused_recurrent_gated_delta_rule(
             q, k, v, gk=-gk, use_qk_l2norm_in_kernel=True),
         (*_DELTA, "share b,s,4,16"), (), 4),
    _case("fused_gdn_gating", ("f32 4", "bf16 b,m,4", "bf16 b,m,4", "f32 4"),
          (), 4),
    _case("ragged_gated_delta_rule", (
        "bf16 t,96", "bf16 t,4", "bf16 t,4", "f32 6,4,16,8", "f32 4", "f32 4",
        "ends_t b+1", "slots b", "table 3"), (), n_kq=2, n_v=4, d_k=16, d_v=8),
    _case("causal_conv1d", ("bf16 b,16,s", "bf16 16,4", "bf16 16",
                            "bf16 b,16,3"), (), 4, activation="silu"),
    Case("causal_conv1d_packed", lambda x, weight, cu: aiter.causal_conv1d(
        x, weight, return_final_states=True, cu_seqlens=cu),
         ("bf16 16,t", "bf16 16,4", "ends_t b+1"), (), 2),
    Case("causal_conv1d_update", lambda x, state, weight, slots:
         aiter.causal_conv1d_update(x, state, weight, conv_state_indices=slots),
         ("bf16 b,16,m", "bf16 6,16,4", "bf16 16,4", "slots b"), ()),
    _case("cross_entropy", ("bf16 b,m,20", "lengths b,m"), (), 1),
    _case("top_k_renorm_probs", ("share b,300", "lengths b"), _DRAW),
    _case("top_k", ("bf16 b,m,1300",), ("sampling_top_k",), k=7),
    Case("top_k_per_row_prefill", lambda x, starts, ends:
         aiter.top_k_per_row_prefill(x, starts, ends, 5),
         ("f32 b,300", "lengths b", "lengths b"), ("sampling_select",)),
    Case("top_k_per_row_decode", lambda x, lengths:
         aiter.top_k_per_row_decode(x, 1, lengths, return_values=True)[1],
         ("bf16 b,300", "lengths b"), ("sampling_select",), 1),
    _case("topk_plain", ("bf16 m,1300",), ("sampling_top_k",), topk=7),
    Case("topk_plain_values", lambda x: aiter.topk_plain(
        _among(x, 99), 3, False)[0], ("f32 m,20",), ("sampling_top_k",), 1),
    Case("topk_plain_of_rows", lambda x, starts, ends: aiter.topk_plain(
        x, 5, True, starts, ends)[0],
         ("f32 m,300", "lengths m", "lengths m"),
         ("sampling_select",), 1),
    Case("top_k_values", lambda x: aiter.top_k(_among(x, -99), 3)[0],
         ("f32 b,m,20",), ("sampling_top_k",), 1),
)


def arrays_of(case: Case, sizes):
  """Arrays for a case; sizes are numbers, by name."""
  return list(_arrays(case, tuple(sizes.items())))


@functools.cache
def _arrays(case: Case, sizes):
  sizes = dict(sizes)
  rng = np.random.default_rng(0)
  arrays = []
  for line in case.arrays:
    kind, shape = line.split(" ")
    dtype, make = KINDS[kind]
    shape = tuple(eval(n, {}, dict(sizes)) for n in shape.split(","))
    # NumPy casts without a program to compile.
    arrays.append(jnp.asarray(make(rng, shape, sizes).astype(dtype)))
  return arrays


@functools.cache
def program(case: Case):
  """The function of a case's arrays, with its gradients, as one program."""
  def run(*arrays):
    wanted, others = arrays[:case.gradients], arrays[case.gradients:]
    if not wanted:
      return case.call(*arrays)
    out, vjp = jax.vjp(lambda *wanted: case.call(*wanted, *others), *wanted)
    return out, vjp(jax.tree.map(jnp.ones_like, out))
  return jax.jit(run)


def types_of(case: Case):
  """The types of a case's arrays, with sizes left open."""
  scope = jax.export.SymbolicScope()
  types = []
  for line in case.arrays:
    kind, shape = line.split(" ")
    types.append(jax.ShapeDtypeStruct(
        jax.export.symbolic_shape(shape, scope=scope), KINDS[kind][0]))
  return types
