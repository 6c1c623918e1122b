# SPDX-License-Identifier: Apache-2.0
"""Latent attention against the oracle, on any machine."""

import os

import jax.numpy as jnp
import numpy as np
from absl.testing import absltest, parameterized
from harness import machine
from harness.cases import check_error, examples
from hypothesis import given
from hypothesis import strategies as st
from mla import cases
from mla.cases import Case
from paged import cases as paged

import jax
from jax.experimental import aiter
from jax.experimental.aiter import sglang

_INTS = jnp.int32
# Random batches, and how many go through one program. More of them:
#   AITER_BATCHES=1000 python3 mla/numbers_test.py BatchesTest
BATCHES = int(os.environ.get("AITER_BATCHES", machine.size(20, 4, 1)))
_EACH = machine.size(10, 2, 1)


class MlaTestCase(parameterized.TestCase):

  def check(self, case: Case, seed: int = 0):
    problem = cases.Problem(case, seed)
    paged.check(self, problem, cases.call(problem))


class MlaTest(MlaTestCase):

  # Float32 is the formula's everywhere.
  @parameterized.parameters(*enumerate(machine.sample(
      (c for c in cases.pairs() if not machine.GPU or c.dtype != "fp32"), 8)))
  def test_pairs(self, seed, case):
    self.check(case, seed)

  @parameterized.parameters(
      # No sequence's queries, no keys, no page at all; a split of the keys, in
      # parts of unequal and of no keys; tiles of 16, 32 and 64 rows, and more.
      dict(lengths=((0, 5), (1, 0))), dict(lengths=((1, 0),), sink=True),
      dict(lengths=((1, 700), (1, 3))),
      dict(heads=20, lengths=((1, 700),)), dict(heads=128, lengths=((1, 90),)),
      dict(heads=12, lengths=((4, 300), (4, 70)), page=64),
      dict(heads=16, lengths=((4, 90),) * 3, cache="e4m3fn", scales=True),
      dict(heads=64, lengths=((1, 90),) * 3, cache="e4m3fnuz", page=1),
      # A long one among many that are short.
      dict(heads=16, lengths=((1, 1500), *((1, 20),) * machine.size(
          140, 140, 20))),
      # Shares that end inside of sequences, tiles of 64 rows.
      dict(heads=128, lengths=((1, 600), (1, 40), (2, 700), (1, 0), (1, 300))),
      dict(heads=20, lengths=(*((0, 9), (2, 20)) * 3, (1, 900), (0, 7)),
           tokens=12),
      dict(heads=5, topk=64, lengths=((1, 200), (3, 50), (20, 20))))
  def test_shapes(self, **options):
    self.check(Case(**options))

  @parameterized.product(cache=("e4m3fn", "e4m3fnuz"), heads=(16, 40))
  def test_every_byte(self, cache, heads):
    """Zeros of both signs and subnormals too; NaN is its sequence's alone."""
    p = cases.Problem(Case(cache=cache, heads=heads, sm_scale=1e-3,
                           lengths=((1, 64), (1, 40))))
    codes = p.cache.view(np.uint8)
    every = np.arange(codes.size, dtype=np.uint8).reshape(codes.shape)
    finite = np.isfinite(every.view(p.cache.dtype).astype(np.float32))
    own = np.isfinite(p.cache.astype(np.float32))
    codes[own] = np.where(finite, every, 0)[own]
    paged.check(self, p, cases.call(p))
    nan = every[~finite].max()
    codes.reshape(-1, codes.shape[-1])[p.sequences[1][0]] = nan
    fn, options, arrays = cases.call(p)
    out = np.asarray(fn(**arrays, **options)[0], np.float32)
    self.assertTrue(np.isfinite(out[0]).all())
    self.assertTrue(np.isnan(out[1]).all())

  @machine.where(not machine.SIMULATED)
  @given(data=st.data())
  @examples(gpu=20, cpu=8)
  def test_random(self, data):
    draw = data.draw
    lora, rope = draw(st.sampled_from(((512, 64), (512, 64), (64, 16))))
    self.check(Case(
        lengths=tuple(draw(st.lists(
            st.tuples(st.integers(0, 9), st.integers(0, 400)), min_size=1,
            max_size=5))),
        heads=draw(st.sampled_from((3, 12, 16, 20, 32, 64, 128))), lora=lora,
        rope=rope, page=draw(st.sampled_from((1, 3, 16, 64))),
        cache=draw(st.sampled_from(("", "", *cases.paged.BYTES))),
        topk=draw(st.sampled_from((0, 0, 30))), holes=draw(st.booleans()),
        sink=draw(st.booleans())), seed=draw(st.integers(0, 99)))

  def test_deterministic(self):
    """Keys that are divided are joined in one order."""
    case = Case(lengths=((1, machine.size(9000, 600, 600)), (1, 70)))
    fn, options, arrays = cases.call(cases.Problem(case))
    call = jax.jit(lambda arrays: fn(**arrays, **options))
    for one, other in zip(call(arrays), call(arrays)):
      np.testing.assert_array_equal(one, other)

  @machine.where(not machine.GPU)  # Whose float32 products are not as exact.
  def test_as_plain(self):
    """Absorbed, it is attention of every head to keys of its own."""
    rng = np.random.default_rng(0)
    heads, lora, rope, nope, dv, n = 4, 64, 16, 32, 24, 40
    normal = lambda *shape: jnp.asarray(
        rng.standard_normal(shape) / shape[-1]**0.25, jnp.float32)
    latent, k_pe = normal(n, lora), normal(n, rope)
    q_nope, q_pe = normal(n, heads, nope), normal(n, heads, rope)
    w_k, w_v = normal(heads, nope, lora), normal(heads, lora, dv)
    k = jnp.concatenate([
        jnp.einsum("nl,hdl->nhd", latent, w_k),
        jnp.broadcast_to(k_pe[:, None], (n, heads, rope))], -1)
    v = jnp.einsum("nl,hld->nhd", latent, w_v)
    q = jnp.concatenate([q_nope, q_pe], -1)
    want = aiter.flash_attn_func(q[None], k[None], v[None], causal=True)[0]
    absorbed = jnp.concatenate(
        [jnp.einsum("nhd,hdl->nhl", q_nope, w_k), q_pe], -1)
    pool = jnp.concatenate([latent, k_pe], -1).reshape(5, 8, 1, -1)
    out = aiter.mla_decode_fwd(
        absorbed, pool, jnp.array([0, n]), jnp.array([0, 5]), jnp.arange(5),
        jnp.array([8]), sm_scale=(nope + rope)**-0.5, kv_lora_rank=lora)
    got = jnp.einsum("nhl,hld->nhd", out, w_v)
    np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-5)

  @parameterized.parameters((True, 16), (False, 5))
  def test_parts_of_a_context(self, causal, heads):
    """Three devices' parts of the keys, joined."""
    case = Case(lengths=((4, 64), (1, 30), (9, 31), (3, 2), (1, 1)), page=1,
                causal=causal, heads=heads)
    ranks = 3
    p = cases.Problem(case)
    fn, options, arrays = cases.call(p)

    @jax.jit
    def part(arrays, rank):
      return fn(**arrays, **options, g_kv_indptr=jnp.asarray(p.indptr),
                cp_world_size=ranks, cp_rank=rank)

    out, lse = None, None
    for rank in range(ranks):
      own = [np.arange(a + rank, b, ranks)
             for a, b in zip(p.indptr, p.indptr[1:])]
      one = part(arrays | dict(
          kv_indptr=jnp.asarray(np.cumsum([0, *map(len, own)]), _INTS),
          kv_indices=arrays["kv_indices"][np.concatenate(own)]), rank)
      out, lse = one if out is None else aiter.merge_attn_states(
          out, lse, *one, return_lse=True)
    exact, exact_lse = p.exact()
    np.testing.assert_allclose(np.float32(out), exact, rtol=3e-2, atol=3e-2)
    empty = exact_lse == -np.inf
    np.testing.assert_array_equal(np.asarray(lse) == -np.inf, empty)
    np.testing.assert_allclose(np.where(empty, 0, lse),
                               np.where(empty, 0, exact_lse), atol=1e-2)


def _ragged(case: Case, sglang_order=False, dtype=None):
  """(call of cache, arrays, want) of mla_ragged_paged_attention.

  The oracle's cache has every token; the call's has none of the new ones.
  """
  p = cases.Problem(case)
  # What it is rounded to: where it is, XLA may leave the rounding out.
  p.q = p.q.astype(p.cache.dtype).astype(p.q.dtype)
  tokens = p.q.shape[0]
  width = -(-case.lora // 128) * 128
  pages, size, _ = p.cache.shape
  rng = np.random.default_rng(1)
  shape = aiter.get_mla_kv_cache_shape(pages, size, case.lora, case.rope,
                                       p.cache.dtype)
  kv = cases.paged.cache_of((pages * size, shape[-1]), p.cache.dtype, rng)
  flat = p.cache.reshape(pages * size, -1)
  kv[:, :case.lora], kv[:, case.lora:width] = flat[:, :case.lora], 0
  kv[:, width:width + case.rope] = flat[:, case.lora:]
  want_cache, new = kv.copy(), np.zeros((tokens, case.lora + case.rope),
                                        p.cache.dtype)
  for a, b, slots in zip(p.cu, p.cu[1:], p.sequences):
    for row, slot in zip(range(b - 1, a - 1, -1), slots[::-1]):
      new[row], kv[slot, :width + case.rope] = flat[slot], 0
  arrays = dict(
      ql_nope=p.q[..., :case.lora], q_pe=p.q[..., case.lora:],
      new_kv_c=new[:, :case.lora], new_k_pe=new[:, case.lora:],
      cache_kv=kv.reshape(shape), kv_lens=np.array(
          [k for _, k in case.lengths], np.int32), page_indices=p.indices,
      cu_q_lens=p.cu, distribution=np.array([0, 0, len(case.lengths)]))
  if sglang_order:
    arrays["cu_kv_lens"] = p.indptr * size
  else:
    counts = np.diff(p.indptr)
    table = np.full((len(counts), counts.max(initial=1)), -1, np.int32)
    for row, a, b in zip(table, p.indptr, p.indptr[1:]):
      row[:b - a] = p.indices[a:b]
    arrays["page_indices"] = table.reshape(-1)
  arrays = {n: jnp.asarray(t, dtype if n in ("ql_nope", "q_pe") else None)
            for n, t in arrays.items()}
  return p, arrays, want_cache.reshape(shape)


class RaggedTest(parameterized.TestCase):

  @parameterized.parameters(
      dict(), dict(layout="htd"), dict(sglang_order=True),
      dict(lora=96, rope=16),
      dict(cache="e4m3fn", q_scale=0.0625, k_scale=0.5, v_scale=0.25),
      dict(soft_cap=3.0, sliding_window=5))
  def test_ragged(self, layout="thd", sglang_order=False, lora=512, rope=64,
                  cache="", soft_cap=None, sliding_window=None, **scales):
    case = Case(lengths=((4, 21), (1, 40), (17, 17), (0, 12), (1, 1)),
                lora=lora, rope=rope, cache=cache, heads=4)
    p, arrays, want_cache = _ragged(case, sglang_order)
    fn = aiter.mla_ragged_paged_attention
    options = dict(sm_scale=0.05, soft_cap=soft_cap,
                   sliding_window=sliding_window, **scales)
    if sglang_order:
      fn = sglang.mla_ragged_paged_attention
    else:
      options["layout"] = layout
    if layout == "htd":
      arrays["ql_nope"] = arrays["ql_nope"].swapaxes(0, 1)
    out, kv = jax.jit(lambda arrays: fn(**arrays, **options))(arrays)
    self.assertEqual(out.shape, arrays["ql_nope"].shape)
    if layout == "htd":
      out = out.swapaxes(0, 1)
    used = lambda t: np.asarray(t).view(np.uint8)
    np.testing.assert_array_equal(used(kv), used(want_cache))
    kinds = []
    for dtype in (np.float64, p.q.dtype):
      want, _ = cases.oracle.paged(
          p.q, p.cache, p.cu, p.sequences, lora, softmax_scale=0.05,
          soft_cap=soft_cap or 0.0, dtype=dtype,
          window=(-1 if sliding_window is None else sliding_window - 1, 0),
          k_scale=scales.get("k_scale", 1),
          v_scale=scales.get("v_scale", 1))
      kinds.append(want)
    check_error(self, out, *kinds, "bf16", str(case))

  @parameterized.product(most=(4, 64), given=(False, True))
  def test_sparse_pages(self, most, given):
    """Chosen places stand for their pages; a token's own is always there."""
    size, heads = 16, 4
    case = Case(lengths=((1, 150), (1, 3), (0, 20), (2, 81), (1, 1), (1, 64)),
                heads=heads, page=size, tokens=7)
    p, arrays, want_cache = _ragged(case, sglang_order=True)
    places = np.full((7, 5), -1, np.int32)
    places[0] = 0, 17, 140, 31, 99
    places[1] = 0
    places[2], places[3, :2] = 35, (80, 70)  # Of one sequence.
    pages_per_seq = 10
    options = dict(page_size=size, pages_per_seq=pages_per_seq)
    arrays["topk_pages" if given else "none"] = sglang.compute_topk_pages(
        jnp.asarray(places), k_pages_max=pages_per_seq, **options)
    arrays.pop("none", None)
    out, kv = jax.jit(lambda arrays: sglang.sparse_mla_page_level(
        **arrays, topk_indices=jnp.asarray(places), sm_scale=0.05,
        kv_lora_rank=case.lora, k_pages_max=most, **options))(arrays)
    bits = lambda t: np.asarray(t).view(np.uint8)
    np.testing.assert_array_equal(bits(kv), bits(want_cache))
    rows, slots = [], []
    for a, b, own in zip(p.cu, p.cu[1:], p.sequences):
      for row in range(a, b):
        place = len(own) - b + row
        pages = sorted({x // size for x in places[row]
                        if 0 <= x // size < place // size})[:most - 1]
        rows.append(row)
        slots.append([own[i] for page in (*pages, place // size)
                      for i in range(page * size, (page + 1) * size)
                      if i <= place])
    kinds = [cases.oracle.paged(
        p.q, p.cache, np.arange(8), [
            slots[rows.index(row)] if row in rows else [] for row in range(7)],
        case.lora, softmax_scale=0.05, dtype=dtype)[0]
             for dtype in (np.float64, p.q.dtype)]
    check_error(self, out, *kinds, "bf16", str(case))

  def test_in_place(self):
    """A donated cache is written where it is."""
    case = Case(lengths=((1, 21), (1, 40)), heads=4)
    _, arrays, _ = _ragged(case)
    cache = arrays.pop("cache_kv")
    step = jax.jit(lambda cache, arrays: aiter.mla_ragged_paged_attention(
        cache_kv=cache, **arrays)[::-1], donate_argnums=0)
    compiled = step.lower(cache, arrays).compile()
    self.assertGreaterEqual(
        compiled.memory_analysis().alias_size_in_bytes, cache.nbytes)


DECODE = dict(
    q=jnp.ones((5, 4, 48), jnp.bfloat16),
    kv_buffer=jnp.ones((6, 16, 1, 48), jnp.bfloat16),
    cu_seqlens_q=jnp.array([0, 2, 5], _INTS),
    kv_indptr=jnp.array([0, 1, 3], _INTS), kv_indices=jnp.zeros(3, _INTS),
    kv_last_page_lens=jnp.ones(2, _INTS))
SPARSE = {**{n: DECODE[n] for n in ("q", "kv_buffer")},
          "topk_indices": jnp.zeros((5, 8), _INTS)}
RAGGED = dict(
    ql_nope=jnp.ones((5, 4, 32), jnp.bfloat16),
    q_pe=jnp.ones((5, 4, 16), jnp.bfloat16),
    new_kv_c=jnp.ones((5, 32), jnp.bfloat16),
    new_k_pe=jnp.ones((5, 16), jnp.bfloat16),
    cache_kv=jnp.ones((6, 8, 2, 256), jnp.bfloat16),
    kv_lens=jnp.ones(2, _INTS), page_indices=jnp.zeros(6, _INTS),
    cu_q_lens=jnp.array([0, 2, 5], _INTS),
    distribution=jnp.array([1, 2, 2], _INTS))
SPARSE_PAGES = dict(
    **RAGGED, cu_kv_lens=jnp.array([0, 32, 48], _INTS), sm_scale=1.0,
    topk_indices=jnp.zeros((5, 8), _INTS), page_size=16, pages_per_seq=2)


@machine.where(not machine.GPU)
class ErrorsTest(parameterized.TestCase):

  @parameterized.parameters(
      ("mla_decode_fwd", TypeError, dict(q=7), "q is a int"),
      ("mla_decode_fwd", TypeError, dict(q=jnp.ones((5, 4, 48), _INTS)),
       "q's dtype is int32"),
      ("mla_decode_fwd", ValueError, dict(kv_lora_rank=0), "kv_lora_rank is 0"),
      ("mla_decode_fwd", ValueError, dict(cp_world_size=0), "cp_world_size"),
      ("mla_decode_fwd", ValueError, dict(cp_rank=1), "cp_rank is 1"),
      ("mla_decode_fwd", ValueError, dict(cp_rank=jnp.array(-1)),
       "cp_rank is -1"),
      ("mla_decode_fwd", TypeError, dict(cp_world_size=2), "g_kv_indptr"),
      ("mla_decode_fwd", ValueError, dict(
          cp_world_size=2, g_kv_indptr=jnp.zeros(9, _INTS)), "g_kv_indptr"),
      ("mla_decode_fwd", ValueError, dict(kv_lora_rank=64),
       "kv_lora_rank is 64"),
      ("mla_decode_fwd", ValueError, dict(
          kv_buffer=jnp.ones((6, 16, 2, 48), jnp.bfloat16)), "kv_buffer"),
      ("mla_decode_fwd", ValueError, dict(
          kv_buffer=jnp.ones((6, 16, 1, 40), jnp.bfloat16)), "at least 48"),
      ("mla_decode_fwd", TypeError, dict(
          kv_buffer=jnp.ones((6, 16, 1, 48), jnp.float16)), "kv_buffer's"),
      ("mla_decode_fwd", TypeError, dict(kv_indices=jnp.zeros(3)),
       "kv_indices's dtype"),
      ("mla_decode_fwd", TypeError, dict(kv_last_page_lens=None),
       "kv_last_page_lens"),
      ("mla_decode_fwd", ValueError, dict(
          cu_seqlens_q=jnp.array([0, 5], _INTS)), "cu_seqlens_q"),
      ("mla_decode_fwd", ValueError, dict(
          cu_seqlens_q=jnp.array([0, 2, 9], _INTS)), "at most 5 rows"),
      ("mla_decode_fwd", ValueError, dict(
          kv_last_page_lens=jnp.ones(3, _INTS)), "kv_indptr"),
      ("mla_decode_fwd", ValueError, dict(sm_scale=float("nan")),
       "sm_scale is nan"),
      ("mla_decode_fwd", ValueError, dict(logit_cap=-1.0), "logit_cap is -1"),
      ("mla_decode_fwd", ValueError, dict(kv_scale=jnp.ones(3)), "kv_scale"),
      ("mla_decode_fwd", ValueError, dict(sink=jnp.ones(3)), "sink"),
      ("sparse_mla_fwd", ValueError, dict(
          topk_indices=jnp.zeros((4, 8), _INTS)), "topk_indices"),
      ("sparse_mla_fwd", TypeError, dict(topk_indices=None), "topk_indices"),
      ("mla_ragged_paged_attention", ValueError, dict(layout="hdt"), "layout"),
      ("mla_ragged_paged_attention", ValueError, dict(
          cache_kv=jnp.ones((6, 8, 2, 128), jnp.bfloat16)), "at least 144"),
      ("mla_ragged_paged_attention", ValueError, dict(
          q_pe=jnp.ones((5, 3, 16), jnp.bfloat16)), "q_pe"),
      ("mla_ragged_paged_attention", TypeError, dict(
          new_kv_c=jnp.ones((5, 32), jnp.float16)), "new_kv_c's dtype"),
      ("mla_ragged_paged_attention", ValueError, dict(
          page_indices=jnp.zeros(7, _INTS)), "page_indices"),
      ("mla_ragged_paged_attention", TypeError, dict(blocks=3), "blocks"),
      ("sparse_mla_page_level", ValueError, dict(page_size=8),
       "page_size is 8"),
      ("sparse_mla_page_level", ValueError, dict(k_pages_max=0), "k_pages_max"),
      ("sparse_mla_page_level", ValueError, dict(kv_lora_rank=33),
       "kv_lora_rank is 33"),
      ("sparse_mla_page_level", ValueError, dict(
          topk_indices=jnp.zeros((4, 8), _INTS)), "topk_indices"),
      ("sparse_mla_page_level", TypeError, dict(
          topk_pages=jnp.zeros((5, 8))), "topk_pages's dtype"),
      ("sparse_mla_page_level", TypeError, dict(
          new_kv_c=jnp.ones((5, 32), jnp.float16)), "new_kv_c's dtype"),
      ("sparse_mla_page_level", TypeError, dict(blocks=3), "blocks"))
  def test_errors(self, name, kind, wrong, message):
    arrays = {"mla_decode_fwd": DECODE, "sparse_mla_fwd": SPARSE,
              "mla_ragged_paged_attention": RAGGED,
              "sparse_mla_page_level": SPARSE_PAGES}[name]
    own = {} if name.endswith("attention") else dict(kv_lora_rank=32)
    module = sglang if name.endswith("level") else aiter
    with self.assertRaisesRegex(kind, f"{name}: .*{message}"):
      getattr(module, name)(**{**arrays, **own, **wrong})

  def test_no_gradient(self):
    with self.assertRaisesRegex(TypeError, "no gradient"):
      jax.grad(lambda q: aiter.mla_decode_fwd(
          **{**DECODE, "q": q}, kv_lora_rank=32).astype(jnp.float32).sum())(
              DECODE["q"])


class BatchesTest(MlaTestCase):

  @parameterized.parameters(*((i,) for i in range(-(-BATCHES // _EACH))))
  def test_mixed(self, seed):
    """Prompts, chunks and decoding together, by programs made once."""
    for i, case in enumerate(cases.batches(
        seed, _EACH, *machine.size((24, 500), (16, 100), (8, 60)))):
      self.check(case, 1000 * seed + i)


if __name__ == "__main__":
  absltest.main()
