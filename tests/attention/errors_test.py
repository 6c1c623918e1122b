# SPDX-License-Identifier: Apache-2.0
"""Every bad argument is named, with what was given and what is accepted."""

import functools

import jax.numpy as jnp
import numpy as np
from absl.testing import absltest, parameterized
from harness import errors

import jax
from jax.experimental import aiter


def array(*shape, dtype=jnp.bfloat16):
  return jnp.zeros(shape, dtype)


DENSE = dict(q=array(2, 8, 4, 16), k=array(2, 12, 2, 16), v=array(2, 12, 2, 16))
PACKED = dict(
    q=array(8, 4, 16), k=array(12, 2, 16), v=array(12, 2, 16),
    cu_seqlens_q=jnp.array([0, 3, 8]), cu_seqlens_k=jnp.array([0, 6, 12]))
JAX_NN = dict(query=DENSE["q"], key=DENSE["k"], value=DENSE["v"])

# Name, error, replaced arguments, what the message must have.
COMMON = [
    ("dropout_p_type", TypeError, dict(dropout_p="0.1"),
     ["dropout_p", "'0.1'"]),
    ("dropout_p_low", ValueError, dict(dropout_p=-0.1), ["dropout_p", "-0.1"]),
    ("dropout_p_one", ValueError, dict(dropout_p=1.0), ["dropout_p", "1.0"]),
    ("dropout_p_nearly_one", ValueError, dict(dropout_p=1 - 1e-12),
     ["dropout_p", "0.99999"]),
    ("dropout_p_nan", ValueError, dict(dropout_p=float("nan")), ["dropout_p"]),
    ("no_key", ValueError, dict(dropout_p=0.1), ["dropout_key", "None", "0.1"]),
    ("key_type", TypeError, dict(dropout_key=3), ["dropout_key", "int"]),
    ("key_dtype", TypeError, dict(dropout_key=jnp.zeros(2)),
     ["dropout_key", "float32"]),
    ("many_keys", ValueError,
     dict(dropout_key=jax.random.split(jax.random.key(0))), ["dropout_key"]),
    ("scale_type", TypeError, dict(softmax_scale="1"), ["softmax_scale"]),
    ("scale_infinite", ValueError, dict(softmax_scale=float("inf")),
     ["softmax_scale", "inf"]),
    ("causal", TypeError, dict(causal=1), ["causal", "1", "bool"]),
    ("deterministic", TypeError, dict(deterministic=None), ["deterministic"]),
    ("return_lse", TypeError, dict(return_lse="yes"), ["return_lse"]),
    ("window_scalar", TypeError, dict(window_size=3), ["window_size", "3"]),
    ("window_short", ValueError, dict(window_size=(3,)), ["window_size"]),
    ("window_long", ValueError, dict(window_size=(3, 3, 3, 3)),
     ["window_size"]),
    ("window_low", ValueError, dict(window_size=(-2, 0)),
     ["window_size", "-2"]),
    ("window_float", TypeError, dict(window_size=(1.5, 0)),
     ["window_size", "1.5"]),
    ("sink_tokens_low", ValueError, dict(window_size=(1, 0, -1)),
     ["window_size", "-1"]),
    ("soft_cap_low", ValueError, dict(logits_soft_cap=-1.0),
     ["logits_soft_cap", "-1.0"]),
    ("soft_cap_nan", ValueError, dict(logits_soft_cap=float("nan")),
     ["logits_soft_cap"]),
    ("slopes_shape", ValueError, dict(alibi_slopes=jnp.zeros(3)),
     ["alibi_slopes", "float32[3]", "[4] or [2, 4]"]),
    ("slopes_dtype", TypeError, dict(alibi_slopes=jnp.zeros(4, jnp.int32)),
     ["alibi_slopes", "int32"]),
    ("sink_shape", ValueError, dict(sink=jnp.zeros((3, 4))),
     ["sink", "float32[3, 4]", "[4] or [2, 4]"]),
    ("sink_type", TypeError, dict(sink=[0.0] * 4), ["sink", "list"]),
    ("sink_text", TypeError, dict(sink=np.array(["0"] * 4)),
     ["sink", "ndarray of <U1", "an array"]),
    ("scale_array", TypeError, dict(softmax_scale=np.ones((3, 5))),
     ["softmax_scale is float64[3, 5]"]),
    ("window_array", ValueError, dict(window_size=np.zeros((4, 2), int)),
     ["window_size is int64[4, 2]"]),
]
FUNC = COMMON + [
    ("q_list", TypeError, dict(q=[[1.0]]), ["q", "list", "an array"]),
    ("q_none", TypeError, dict(q=None), ["q", "NoneType"]),
    ("q_rank", ValueError, dict(q=array(8, 4, 16)),
     ["q", "bfloat16[8, 4, 16]", "rank 4"]),
    ("k_rank", ValueError, dict(k=array(2, 12, 2)), ["k", "rank 4"]),
    ("int_q", TypeError, dict(q=array(2, 8, 4, 16, dtype=jnp.int8)),
     ["q", "int8", "bfloat16"]),
    ("fp8_q", TypeError, dict(q=array(2, 8, 4, 16, dtype=jnp.float8_e4m3fn)),
     ["q", "float8_e4m3fn"]),
    ("mixed", TypeError, dict(k=array(2, 12, 2, 16, dtype=jnp.float16)),
     ["bfloat16, float16, bfloat16", "one dtype"]),
    ("batches", ValueError, dict(q=array(3, 8, 4, 16)),
     ["k's batch", "2", "3"]),
    ("head_dims", ValueError, dict(q=array(2, 8, 4, 24)),
     ["k's head_dim", "16", "24"]),
    ("kv_length", ValueError, dict(v=array(2, 11, 2, 16)),
     ["v", "[2, 11, 2, 16]", "[2, 12, 2]"]),
    ("kv_heads", ValueError, dict(v=array(2, 12, 1, 16)), ["v"]),
    ("head_ratio", ValueError, dict(q=array(2, 8, 3, 16)),
     ["heads of q and k", "3 and 2", "multiple"]),
    ("fewer_q_heads", ValueError, dict(q=array(2, 8, 1, 16)), ["1 and 2"]),
    ("no_heads", ValueError,
     dict(k=array(2, 12, 0, 16), v=array(2, 12, 0, 16)), ["4 and 0"]),
    ("large_head_dim", ValueError, dict(
        q=array(2, 8, 4, 264), k=array(2, 12, 2, 264)),
     ["q's head_dim", "264", "1 to 256"]),
    ("large_v_dim", ValueError, dict(v=array(2, 12, 2, 257)),
     ["v's head_dim", "257"]),
    ("no_head_dim", ValueError, dict(v=array(2, 12, 2, 0)), ["v's head_dim"]),
    ("bias_rank", ValueError, dict(bias=jnp.zeros(12)),
     ["bias", "float32[12]"]),
    ("bias_shape", ValueError, dict(bias=jnp.zeros((12, 8))),
     ["bias", "[12, 8]", "[2, 4, 8, 12]"]),
    ("bias_dtype", TypeError, dict(bias=jnp.zeros((8, 12), jnp.int32)),
     ["bias", "int32"]),
    ("lengths_dtype", TypeError, dict(cu_seqlens_q=jnp.zeros(3)),
     ["cu_seqlens_q", "float32", "integer"]),
    ("lengths_shape", ValueError, dict(cu_seqlens_kv=jnp.array([0, 3])),
     ["cu_seqlens_kv", "[2]", "[3]"]),
    ("lengths_rank", ValueError, dict(cu_seqlens_kv=jnp.zeros((3, 1), int)),
     ["cu_seqlens_kv"]),
    ("return_attn_probs", TypeError, dict(return_attn_probs=1),
     ["return_attn_probs"]),
]
VARLEN = COMMON + [
    ("q_rank", ValueError, dict(q=DENSE["q"]), ["q", "rank 3"]),
    ("cu_missing", TypeError, dict(cu_seqlens_k=None),
     ["cu_seqlens_k", "NoneType"]),
    ("cu_dtype", TypeError, dict(cu_seqlens_q=jnp.array([0.0, 3.0, 8.0])),
     ["cu_seqlens_q", "float32", "integer"]),
    ("cu_list", TypeError, dict(cu_seqlens_q=[0, 3, 8]),
     ["cu_seqlens_q", "list"]),
    ("cu_rank", ValueError, dict(cu_seqlens_q=jnp.zeros((1, 3), int)),
     ["cu_seqlens_q", "[1, 3]"]),
    ("cu_empty", ValueError, dict(cu_seqlens_q=jnp.zeros(0, int)),
     ["cu_seqlens_q"]),
    ("cu_unequal", ValueError, dict(cu_seqlens_k=jnp.array([0, 12])),
     ["cu_seqlens_k", "[2]", "[3]"]),
    ("padded_unequal", ValueError, dict(cu_seqlens_q_padded=jnp.array([0, 12])),
     ["cu_seqlens_q_padded", "[2]", "[3]"]),
    ("padded_dtype", TypeError, dict(cu_seqlens_k_padded=jnp.zeros(3)),
     ["cu_seqlens_k_padded", "float32"]),
    ("max_seqlen", ValueError, dict(max_seqlen_q=-1), ["max_seqlen_q", "-1"]),
    ("max_seqlen_type", TypeError, dict(max_seqlen_k=1.5),
     ["max_seqlen_k", "1.5"]),
    ("min_seqlen", ValueError, dict(min_seqlen_q=-1), ["min_seqlen_q", "-1"]),
    ("zero_tensors", TypeError, dict(zero_tensors=0), ["zero_tensors"]),
    ("head_ratio", ValueError, dict(q=array(8, 3, 16)), ["3 and 2"]),
]
NN = [
    ("rank", ValueError, dict(query=array(8, 4, 16)), ["rank", "3, 4, 4"]),
    ("rank_2", ValueError, dict.fromkeys(JAX_NN, array(8, 16)), ["2, 2, 2"]),
    ("dtype", TypeError, dict(query=array(2, 8, 4, 16, dtype=jnp.float32)),
     ["query, key, value", "float32, bfloat16, bfloat16"]),
    ("heads", ValueError, dict(query=array(2, 8, 3, 16)),
     ["query and key", "3 and 2"]),
    ("list", TypeError, dict(key=[1.0]), ["key", "list"]),
    ("mask_dtype", TypeError, dict(mask=jnp.zeros((8, 12))),
     ["mask", "float32"]),
    ("mask_shape", ValueError, dict(mask=jnp.zeros((2, 4, 8, 13), bool)),
     ["mask", "[2, 4, 8, 12]"]),
    ("bias_shape", ValueError, dict(bias=jnp.zeros((3, 1, 8, 12))),
     ["bias", "[2, 4, 8, 12]"]),
    ("lengths_dtype", TypeError, dict(query_seq_lengths=jnp.zeros(2)),
     ["query_seq_lengths", "float32"]),
    ("lengths_shape", ValueError,
     dict(key_value_seq_lengths=jnp.zeros(3, jnp.int32)),
     ["key_value_seq_lengths", "[3]", "[2]"]),
    ("window", ValueError, dict(local_window_size=(1, 2, 3)),
     ["local_window_size"]),
    ("window_low", ValueError, dict(local_window_size=-1),
     ["local_window_size", "-1"]),
    ("window_type", TypeError, dict(local_window_size="4"),
     ["local_window_size", "'4'"]),
    ("is_causal", TypeError, dict(is_causal="yes"), ["causal"]),
    ("scale", TypeError, dict(scale="1"), ["scale"]),
    ("residual", TypeError, dict(return_residual=1), ["return_residual"]),
]
# Name, function, the argument that is named, replaced ones, what is said.
LENGTHS = [
    ("decreasing", aiter.flash_attn_varlen, "cu_seqlens_q",
     dict(cu_seqlens_q=[0, 6, 4]), ["[0 6 4]", "add up"]),
    ("negative", aiter.flash_attn_varlen, "cu_seqlens_k",
     dict(cu_seqlens_k=[-1, 6, 12]), ["[-1  6 12]", "from 0"]),
    ("starts_late", aiter.flash_attn_varlen, "cu_seqlens_k",
     dict(cu_seqlens_k=[1, 6, 12]), ["[ 1  6 12]", "from 0"]),
    ("oversized", aiter.flash_attn_varlen, "cu_seqlens_q",
     dict(cu_seqlens_q=[0, 3, 9]), ["[0 3 9]", "at most 8 rows"]),
    ("past_the_end", aiter.flash_attn_varlen, "cu_seqlens_k",
     dict(cu_seqlens_k=[0, 6, 10], cu_seqlens_k_padded=[0, 9, 12]),
     ["[ 0  6 10]", "end by row 12", "[ 0  9 12]"]),
    ("padded_decreasing", aiter.flash_attn_varlen, "cu_seqlens_q_padded",
     dict(cu_seqlens_q=[0, 3, 6], cu_seqlens_q_padded=[0, 5, 4]), ["[0 5 4]"]),
    ("many", aiter.flash_attn_varlen, "cu_seqlens_q", dict(
        cu_seqlens_q=[*range(1, 9), 5], cu_seqlens_k=[*range(9)]), ["..."]),
    ("dense_decreasing", aiter.flash_attn_func, "cu_seqlens_kv",
     dict(cu_seqlens_kv=[0, 12, 11]), ["[ 0 12 11]"]),
    ("dense_oversized", aiter.flash_attn_func, "cu_seqlens_q",
     dict(cu_seqlens_q=[0, 9, 12]), ["[ 0  9 12]", "at most 8 rows"]),
    ("nn_negative", aiter.dot_product_attention, "query_seq_lengths",
     dict(query_seq_lengths=[-1, 3]), ["[-1  3]"]),
]


class ErrorsTest(parameterized.TestCase):

  @parameterized.named_parameters(*FUNC)
  def test_func(self, error, replaced, words):
    errors.check(self, aiter.flash_attn_func, DENSE, error, replaced, words)

  @parameterized.named_parameters(*VARLEN)
  def test_varlen(self, error, replaced, words):
    errors.check(self, aiter.flash_attn_varlen, PACKED, error, replaced, words)

  @parameterized.named_parameters(*NN)
  def test_dot_product_attention(self, error, replaced, words):
    errors.check(
        self, aiter.dot_product_attention, JAX_NN, error, replaced, words)

  @parameterized.named_parameters(*LENGTHS)
  def test_lengths(self, fn, name, replaced, words):
    """Values of lengths that cannot be, where they are at hand."""
    good = {aiter.flash_attn_func: DENSE, aiter.flash_attn_varlen: PACKED,
            aiter.dot_product_attention: JAX_NN}[fn]
    cpu = jax.local_devices(backend="cpu")[0]
    for to in (np.array, functools.partial(jax.device_put, device=cpu)):
      given = {n: to(np.array(t)) for n, t in replaced.items()}
      with self.assertRaises(ValueError) as caught:
        fn(**{**good, **given})
      for word in (fn.__name__, name, *words):
        self.assertIn(word, str(caught.exception))
    # Traced values are not known.
    jax.eval_shape(functools.partial(fn, **good), **given)

  @parameterized.parameters("dropout_p", "softmax_scale", "logits_soft_cap")
  def test_traced_number(self, name):
    """A number that decides which program is built cannot be traced."""
    with self.assertRaisesRegex(TypeError, f"{name} is a traced value"):
      jax.jit(lambda x: aiter.flash_attn_func(**DENSE, **{name: x}))(0.5)

  def test_good_arguments(self):
    """What the tables above start from is accepted, in NumPy's types too."""
    key = jax.random.key(0)
    out = aiter.flash_attn_func(
        **{n: np.asarray(t) for n, t in DENSE.items()},
        dropout_p=np.float32(0.1), softmax_scale=np.float64(0.3),
        causal=np.bool_(True), window_size=[np.int64(3), 1], dropout_key=key,
        logits_soft_cap=jnp.float32(2), cu_seqlens_q=np.array([0, 4, 12]))
    self.assertEqual(out.shape, (2, 8, 4, 16))
    self.assertEqual(aiter.flash_attn_varlen(**PACKED).shape, (8, 4, 16))
    self.assertEqual(aiter.dot_product_attention(**JAX_NN).shape, (2, 8, 4, 16))

  def test_results_are_tuples_only_when_asked(self):
    """Unlike upstream, whose docstring and code disagree."""
    self.assertIsInstance(aiter.flash_attn_func(**DENSE), jax.Array)
    self.assertIsInstance(aiter.flash_attn_varlen(**PACKED), jax.Array)
    for options, n in ((dict(return_lse=True), 2),
                       (dict(return_attn_probs=True), 2),
                       (dict(return_lse=True, return_attn_probs=True), 3)):
      out = aiter.flash_attn_func(**DENSE, **options)
      self.assertIsInstance(out, tuple)
      self.assertLen(out, n)


if __name__ == "__main__":
  absltest.main()
