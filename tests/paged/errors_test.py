# SPDX-License-Identifier: Apache-2.0
"""Bad arguments of paged attention are named, with what is accepted."""

import functools

import jax.numpy as jnp
import numpy as np
from absl.testing import absltest, parameterized
from harness import errors

import jax
from jax.experimental import aiter
from jax.experimental.aiter import pallas

_INTS = jnp.int32
_POOL = jnp.ones((6, 16, 2, 32), jnp.bfloat16)
DECODE = dict(
    q=jnp.ones((2, 4, 32), jnp.bfloat16), k_cache=_POOL, v_cache=_POOL,
    block_tables=jnp.zeros((2, 3), _INTS), context_lens=jnp.ones(2, _INTS))
UNIFIED = dict(
    q=jnp.ones((5, 4, 32), jnp.bfloat16), k_cache=_POOL, v_cache=_POOL,
    cu_seqlens_q=jnp.array([0, 2, 5], _INTS), seqused_k=jnp.ones(2, _INTS),
    block_table=jnp.zeros((2, 3), _INTS))
CSR = dict(
    query=DECODE["q"], k_pool=_POOL, v_pool=_POOL,
    kv_indptr=jnp.array([0, 1, 3], _INTS),
    kv_page_indices=jnp.zeros(3, _INTS),
    kv_last_page_lens=jnp.ones(2, _INTS))
PREFILL = dict(
    q=UNIFIED["q"], k=_POOL, v=_POOL, cu_seqlens_q=UNIFIED["cu_seqlens_q"],
    kv_indptr=CSR["kv_indptr"], kv_page_indices=CSR["kv_page_indices"],
    kv_last_page_lens=CSR["kv_last_page_lens"])
RAGGED = dict(
    queries=UNIFIED["q"], keys=jnp.ones((5, 2, 32), jnp.bfloat16),
    values=jnp.ones((5, 2, 32), jnp.bfloat16),
    kv_cache=jnp.ones((6, 16, 2, 2, 128), jnp.bfloat16),
    kv_lens=jnp.ones(2, _INTS), page_indices=jnp.zeros(6, _INTS),
    cu_q_lens=UNIFIED["cu_seqlens_q"], distribution=jnp.array([1, 2, 2], _INTS))


V1 = dict(query=DECODE["q"], key_cache=_POOL, value_cache=_POOL, scale=0.2,
          block_tables=DECODE["block_tables"], cu_query_lens=None,
          context_lens=DECODE["context_lens"])


class ErrorsTest(parameterized.TestCase):

  @parameterized.parameters(
      (ValueError, dict(query=jnp.ones((2, 3, 32), jnp.bfloat16)),
       "heads of query and key_cache"),
      (TypeError, dict(scale="1"), "scale is '1'"),
      (ValueError, dict(kv_cache_layout="x"), "kv_cache_layout is 'x'"),
      (ValueError, dict(kv_cache_dtype="fp8"), "kv_cache_dtype", "'bfloat16'"),
      (ValueError, dict(mtp=2), "query is bfloat16[2", "4 rows", "mtp is 2"),
      (ValueError, dict(sliding_window=-1), "sliding_window is -1"),
      (ValueError, dict(partition_size=0), "partition_size is 0"),
      (ValueError, dict(max_context_len=-1), "max_context_len is -1"),
      (ValueError, dict(fp8_out_scale=jnp.ones(2)), "fp8_out_scale", "[2]"),
      (ValueError, dict(cu_query_lens=jnp.array([0, 2], _INTS)),
       "cu_query_lens", "shape [3]"))
  def test_v1(self, error, replaced, *words):
    errors.check(self, aiter.paged_attention_v1, V1, error, replaced, words)

  @parameterized.parameters(
      (ValueError, dict(total_num_pages=-1), "total_num_pages is -1"),
      (TypeError, dict(total_num_pages=1.5), "total_num_pages is 1.5"),
      (TypeError, dict(kv_dtype="foo"), "kv_dtype is 'foo'"))
  def test_shapes_of_caches(self, error, replaced, *words):
    sizes = dict(total_num_pages=2, page_size=4, kv_dtype=jnp.bfloat16)
    heads = dict(actual_num_kv_heads=2, actual_head_dim=64)
    for fn, more in ((aiter.get_kv_cache_shape, heads),
                     (aiter.get_kv_cache_shape_hd64, heads),
                     (aiter.get_mla_kv_cache_shape, dict(
                         kv_lora_rank=512, qk_rope_head_dim=64))):
      errors.check(self, fn, sizes | more, error, replaced, words)

  @parameterized.parameters(
      (dict(block_size=8), "block_size is 8", "16"),
      (dict(max_num_partitions=-1), "max_num_partitions is -1"),
      (dict(mtp=3), "mtp is 3", "6 rows"))
  def test_ragged_tables(self, replaced, *words):
    good = dict(query=DECODE["q"], key_cache=_POOL, value_cache=_POOL,
                scale=0.2, **{name: CSR[name] for name in (
                    "kv_indptr", "kv_page_indices", "kv_last_page_lens")})
    errors.check(self, aiter.paged_attention_ragged, good, ValueError, replaced,
                 words)

  @parameterized.parameters(
      (dict(K=_POOL), "K is bfloat16[6, 16, 2, 32]"),
      (dict(high_precision=3), "high_precision is 3"),
      (dict(block_tables_stride0=-1), "block_tables_stride0 is -1"),
      (dict(max_qlen=0), "max_qlen is 0"))
  def test_asm(self, replaced, *words):
    pool = jnp.ones((6, 2, 4, 16, 8), jnp.bfloat16)
    good = dict(Q=DECODE["q"], K=pool, V=jnp.ones((6, 2, 2, 32, 8),
                                                  jnp.bfloat16),
                block_tables=DECODE["block_tables"],
                context_lens=DECODE["context_lens"])
    errors.check(self, aiter.pa_fwd_asm, good, ValueError, replaced, words)

  @parameterized.parameters(
      (TypeError, dict(q=7), "q is a int"),
      (ValueError, dict(q=jnp.ones((2, 32), jnp.bfloat16)), "rank 3"),
      (TypeError, dict(q=jnp.ones((2, 4, 32), _INTS)), "q's dtype is int32"),
      (ValueError, dict(q=jnp.ones((2, 4, 16), jnp.bfloat16)),
       "k_cache's head dimension is 32"),
      (ValueError, dict(q=jnp.ones((2, 3, 32), jnp.bfloat16)), "3 and 2"),
      (ValueError, dict(q=jnp.ones((2, 4, 0), jnp.bfloat16)), "1 to 256"),
      (TypeError, dict(k_cache=_POOL.astype(jnp.float16)), "k_cache's dtype"),
      (TypeError, dict(v_cache=_POOL.astype(jnp.int8)), "v_cache's dtype"),
      (ValueError, dict(v_cache=_POOL[:5]), "v_cache is bfloat16[5"),
      (ValueError, dict(v_cache=_POOL[:, :4]), "v_cache"),
      (ValueError, dict(block_tables=jnp.zeros(3, _INTS)), "rank 2"),
      (ValueError, dict(block_tables=jnp.zeros((3, 3), _INTS)), "[2, n]"),
      (TypeError, dict(block_tables=jnp.zeros((2, 3))), "block_tables's dtype"),
      (ValueError, dict(context_lens=jnp.ones(3, _INTS)), "block_tables"),
      (ValueError, dict(layout="NDH"), "layout is 'NDH'"),
      (ValueError, dict(layout="x"), "k_cache"),
      (ValueError, dict(softmax_scale=float("nan")), "softmax_scale is nan"),
      (ValueError, dict(window_size=(-2, 0)), "window_size"),
      (ValueError, dict(logits_soft_cap=-1.0), "logits_soft_cap is -1.0"),
      (ValueError, dict(sink=jnp.ones(3)), "sink is float32[3]", "[4]"),
      (TypeError, dict(sink=jnp.ones(4, _INTS)), "sink's dtype"),
      (ValueError, dict(alibi_slopes=jnp.ones((2, 4))), "alibi_slopes"),
      (ValueError, dict(k_scale=jnp.ones(3)), "k_scale is float32[3]", "[2]",
       "[6, 2, 16]"),
      (TypeError, dict(v_scale=jnp.ones(2, _INTS)), "v_scale's dtype"),
      (TypeError, dict(return_lse=1), "return_lse is 1"))
  def test_decode(self, error, replaced, *words):
    errors.check(self, aiter.paged_attention_decode, DECODE, error, replaced,
                 words)

  @parameterized.parameters(
      (ValueError, dict(cu_seqlens_q=jnp.array([0, 5], _INTS)), "shape [3]"),
      (TypeError, dict(causal="yes"), "causal is 'yes'"),
      (ValueError, dict(q_descale=jnp.ones(2)), "q_descale"),
      (ValueError, dict(softcap=float("inf")), "softcap is inf"))
  def test_unified(self, error, replaced, *words):
    errors.check(self, aiter.unified_attention, UNIFIED, error, replaced, words)

  @parameterized.parameters(
      ([0, 3, 2], "add up"), ([-1, 2, 5], "counted from 0"),
      ([1, 2, 5], "counted from 0"),
      ([0, 2, 6], "at most 5 rows"))
  def test_cumulative(self, cu, word):
    errors.check(
        self, aiter.unified_attention, UNIFIED, ValueError,
        dict(cu_seqlens_q=np.array(cu, np.int32)), ("cu_seqlens_q", word),
        traced=False)

  @parameterized.parameters(
      (ValueError, dict(kv_indptr=jnp.zeros(2, _INTS)), "kv_indptr"),
      (ValueError, dict(kv_page_indices=jnp.zeros((1, 3), _INTS)), "rank 1"),
      (ValueError, dict(kv_cache_dtype="float16"), "kv_cache_dtype"),
      (ValueError, dict(max_seq_len=-1), "max_seq_len is -1"),
      (ValueError, dict(k_pool=_POOL[0]), "k_pool", "rank 4"))
  def test_jax_aiter(self, error, replaced, *words):
    errors.check(self, aiter.paged_attention, CSR, error, replaced, words)

  @parameterized.parameters(
      (dict(kv_indptr=np.array([0, 3, 1])), "kv_indptr is [0 3 1]", "add up"),
      (dict(kv_indptr=np.array([0, 1, 4])), "kv_indptr is [0 1 4]", "at most"),
      (dict(kv_indptr=np.array([1, 2, 3])), "kv_indptr is [1 2 3]", "from 0"),
      (dict(kv_last_page_lens=np.array([1, 17])),
       "kv_last_page_lens is [ 1 17]", "from 0 to 16"),
      (dict(kv_last_page_lens=np.array([-1, 1])),
       "kv_last_page_lens is [-1  1]", "from 0 to 16"))
  def test_packed_tables(self, replaced, *words):
    """What is at hand is looked at, as cumulative lengths are."""
    ragged = functools.partial(aiter.paged_attention_ragged, scale=0.2)
    ragged.__name__ = "paged_attention_ragged"
    tables = {name: CSR[name] for name in CSR if name.startswith("kv_")}
    pages = dict(q=jnp.ones((2, 4, 48), jnp.bfloat16), kv_lora_rank=32,
                 kv_buffer=jnp.ones((6, 16, 1, 48), jnp.bfloat16),
                 cu_seqlens_q=jnp.array([0, 1, 2], _INTS))
    latent = {"kv_indices" if name == "kv_page_indices" else name: t
              for name, t in tables.items()}
    for fn, good in (
        (aiter.paged_attention, CSR), (aiter.mha_batch_prefill_func, PREFILL),
        (ragged, dict(query=DECODE["q"], key_cache=_POOL, value_cache=_POOL,
                      **tables)), (aiter.mla_decode_fwd, pages | latent)):
      errors.check(self, fn, good, ValueError, replaced, words, traced=False)

  @parameterized.parameters(
      (ValueError, dict(dropout_p=0.1), "dropout_p is 0.1"),
      (ValueError, dict(kv_indptr=None), "kv_indptr is None"),
      (ValueError, dict(kv_last_page_lens=None), "kv_last_page_lens is None"),
      (ValueError, dict(block_table=UNIFIED["block_table"]), "kv_indptr"),
      (ValueError, dict(seqlen_k=jnp.ones(2, _INTS)), "seqlen_k"),
      (ValueError, dict(kv_block_descale=jnp.ones((6, 2))), "[6, 2, 2]"))
  def test_batch_prefill(self, error, replaced, *words):
    errors.check(self, aiter.mha_batch_prefill_func, PREFILL, error, replaced,
                 words)

  @parameterized.parameters(
      (TypeError, dict(keys=jnp.ones((5, 2, 32))), "keys's dtype"),
      (ValueError, dict(values=jnp.ones((5, 1, 32), jnp.bfloat16)), "values"),
      (ValueError, dict(kv_cache=_POOL), "kv_cache", "rank 5"),
      (ValueError, dict(kv_cache=jnp.ones((6, 16, 4, 1, 128), jnp.bfloat16)),
       "[6, 16, 2, 2, 128]"),
      (ValueError, dict(kv_cache=jnp.ones((6, 16, 1, 2, 128), jnp.bfloat16)),
       "[6, 16, 2, 2, 128]"),
      (ValueError, dict(page_indices=jnp.zeros(5, _INTS)), "page_indices"),
      (ValueError, dict(distribution=jnp.zeros(2, _INTS)), "distribution"),
      (ValueError, dict(sliding_window=0), "sliding_window is 0"),
      (ValueError, dict(soft_cap=0.0), "soft_cap is 0.0"),
      (TypeError, dict(block_size=4), "block_size is no argument"))
  def test_ragged(self, error, replaced, *words):
    errors.check(self, aiter.ragged_paged_attention, RAGGED, error, replaced,
                 words)

  def test_hd64(self):
    with self.assertRaisesRegex(ValueError, "actual_head_dim is 65"):
      aiter.get_kv_cache_shape_hd64(1, 1, 1, 65, jnp.bfloat16)
    wide = dict(RAGGED, queries=jnp.ones((5, 4, 80), jnp.bfloat16),
                keys=jnp.ones((5, 2, 80), jnp.bfloat16),
                values=jnp.ones((5, 2, 80), jnp.bfloat16))
    errors.check(self, aiter.ragged_paged_attention_hd64, wide, ValueError, {},
                 ("at most 64",))

  def test_pallas(self):
    pool = jnp.ones((2, 6, 16, 32), jnp.bfloat16)
    with self.assertRaisesRegex(ValueError, "v_pages"):
      pallas.paged_attention(
          DECODE["q"], pool, pool[:1], DECODE["block_tables"],
          DECODE["context_lens"])

  @parameterized.parameters("prefix_lse", "suffix_output")
  def test_merge(self, name):
    good = dict(prefix_output=jnp.ones((5, 4, 8)), prefix_lse=jnp.ones((4, 5)),
                suffix_output=jnp.ones((5, 4, 8)), suffix_lse=jnp.ones((4, 5)))
    errors.check(self, aiter.merge_attn_states, good, ValueError,
                 {name: good[name][:3]}, (name,))

  @parameterized.parameters("q", "k_cache", "sink")
  def test_no_gradient(self, name):
    arrays = dict(DECODE, sink=jnp.ones(4))
    def loss(t):
      return aiter.paged_attention_decode(**{**arrays, name: t}).astype(
          jnp.float32).sum()
    with self.assertRaisesRegex(TypeError, "paged_attention_decode: has no"
                                " gradient; use jax.lax.stop_gradient"):
      jax.grad(loss)(arrays[name])


if __name__ == "__main__":
  absltest.main()
