# SPDX-License-Identifier: Apache-2.0
"""Attention over paged caches as other libraries call it, against the oracle.

tpu-inference's reference is written anew from what it means: for each sequence
the new tokens are put into its pages, then all its keys are gathered, scores
scaled, capped and masked, and a softmax taken.
"""

import functools

import jax.numpy as jnp
import ml_dtypes
import numpy as np
from absl.testing import absltest, parameterized
from harness import machine
from harness.cases import DTYPES, check_error
from paged import cases, oracle
from paged.cases import Case

import jax
from jax.experimental import aiter
from jax.experimental.aiter import pallas, sglang

PAGE, WIDTH, PAGES = 4, 6, 16
# Queries and keys of decoding, prefilling and mixed sequences, then of none.
LENGTHS = ((1, 9), (1, 1), (7, 7), (3, 14), (2, 5))
COUNT = 4


def packed_cache(k, v, cache_dtype, hd64):
  """[..., heads, d] of keys and values as tpu-inference lays them out."""
  p = max(4 // np.dtype(cache_dtype).itemsize, 1)
  *lead, hk, d = k.shape
  if hd64:
    out = np.zeros((*lead, -(-hk // p) * p, 128), cache_dtype)
    out[..., :hk, :d], out[..., :hk, 64:64 + d] = k, v
    return out.reshape(*lead, -1, p, 128)
  out = np.zeros((*lead, -(-2 * hk // p) * p, -(-d // 128) * 128), cache_dtype)
  out[..., 0:2 * hk:2, :d], out[..., 1:2 * hk:2, :d] = k, v
  return out.reshape(*lead, -1, p, out.shape[-1])


def tpu_reference(q, k, v, pool_k, pool_v, lens, pages, cu, count, sm_scale=1.0,
                  window=None, soft_cap=None, sink=None, k_scale=1.0,
                  v_scale=1.0, dtype=np.float64):
  """(out, pool_k, pool_v) of pools [pages, page, hk, d]."""
  out = np.zeros(q.shape)
  pool_k, pool_v = pool_k.copy(), pool_v.copy()
  for i in range(count):
    begin, end = cu[i], cu[i + 1]
    for t in range(begin, end):
      at = lens[i] - (end - t)
      page = pages[i * WIDTH + at // PAGE]
      pool_k[page, at % PAGE], pool_v[page, at % PAGE] = k[t], v[t]
    rows = [pages[i * WIDTH + j // PAGE] * PAGE + j % PAGE
            for j in range(lens[i])]
    gathered = lambda pool: oracle.numbers(pool.reshape(-1, *pool.shape[2:])[
        rows])
    left = -1 if window is None else window - 1
    out[begin:end], _ = oracle.attend(
        oracle.numbers(q[begin:end]), gathered(pool_k) * k_scale,
        gathered(pool_v) * v_scale, np.ones(lens[i], bool), sm_scale,
        (left, 0), soft_cap or 0.0, sink, dtype=dtype)
  return out, pool_k, pool_v


class AliasesTest(parameterized.TestCase):

  def mixed(self, dtype, cache_dtype, hq, hk, d):
    """What all of them take."""
    rng = np.random.default_rng(1)
    cu = np.cumsum([0, *(n for n, _ in LENGTHS)]).astype(np.int32)
    lens = np.array([n for _, n in LENGTHS], np.int32)
    numbers = lambda kind, *shape: rng.standard_normal(
        shape, np.float32).astype(kind)
    q = numbers(dtype, cu[-1] + 2, hq, d)
    k, v = (numbers(cache_dtype, len(q), hk, d) for _ in range(2))
    pools = [numbers(cache_dtype, PAGES, PAGE, hk, d) for _ in range(2)]
    pages = np.full((len(LENGTHS), WIDTH), -1, np.int32)
    free = iter(rng.permutation(PAGES))
    for row, n in zip(pages, lens):
      for j in range(-(-n // PAGE)):
        row[j] = next(free)
    return q, k, v, pools, lens, pages, cu

  @parameterized.parameters(*machine.sample([
      dict(), dict(dtype="fp16"), *[dict(dtype="fp32")] * (not machine.GPU),
      dict(cache=ml_dtypes.float8_e4m3fn, k_scale=0.5, v_scale=2.0),
      dict(cache=ml_dtypes.float8_e5m2, hk=1), dict(hq=6, hk=3),
      dict(cache=ml_dtypes.float8_e4m3fn, hk=3, hq=6),
      dict(window=5, soft_cap=2.0, sink=True), dict(d=80), dict(d=128),
      dict(d=64, hd64=True), dict(d=40, hd64=True, sink=True, hk=1),
      dict(d=64, hd64=True, cache=ml_dtypes.float8_e5m2, window=3),
      dict(packed=True, sink=True), dict(packed=True, hk=1),
  ], 6))
  def test_ragged(self, dtype="bf16", cache=None, hq=4, hk=2, d=32, window=None,
                  soft_cap=None, sink=False, hd64=False, packed=False,
                  k_scale=None, v_scale=None):
    own = DTYPES[dtype]
    cache = own if cache is None else cache
    q, k, v, pools, lens, pages, cu = self.mixed(own, cache, hq, hk, d)
    sinks = np.linspace(-1, 1, hq, dtype=np.float32) if sink else None
    scores = dict(sm_scale=0.2, soft_cap=soft_cap)
    want = functools.partial(
        tpu_reference, q, k, v, *pools, lens, pages.reshape(-1), cu, COUNT,
        window=window, sink=sinks, k_scale=k_scale or 1.0,
        v_scale=v_scale or 1.0, **scores)
    exact, new_k, new_v = want()
    out_dtype = "fp32" if dtype == "fp32" else "bf16"
    plain, _, _ = want(dtype=DTYPES[out_dtype])
    pool = packed_cache(*pools, cache, hd64)
    shape = (aiter.get_kv_cache_shape_hd64 if hd64
             else aiter.get_kv_cache_shape)(PAGES, PAGE, hk, d, cache)
    self.assertEqual(pool.shape, shape)
    options = dict(scores, sliding_window=window, k_scale=k_scale,
                   v_scale=v_scale, vmem_limit_bytes=1 << 20, mask_value=-1e9)
    distribution = np.int32([2, 3, COUNT])
    if packed:
      counts = -(-lens // PAGE)
      arrays = [q, k, v, pool, lens,
                np.concatenate([row[:n] for row, n in zip(pages, counts)]), cu,
                np.cumsum([0, *counts * PAGE]).astype(np.int32), distribution,
                None, sinks]
      fn = sglang.ragged_paged_attention
    else:
      arrays = [q, k, v, pool, lens, pages.reshape(-1), cu, distribution, sinks]
      fn = (aiter.ragged_paged_attention_hd64 if hd64
            else aiter.ragged_paged_attention)
    out, got = jax.jit(lambda *args: fn(*args, **options))(
        *(None if t is None else jnp.asarray(t) for t in arrays))
    self.assertEqual(out.dtype, DTYPES[out_dtype])
    check_error(self, out, exact, plain, out_dtype)
    self.assertTrue((np.asarray(out, np.float32)[cu[COUNT]:] == 0).all())
    np.testing.assert_array_equal(
        np.asarray(got).view(np.uint8),
        packed_cache(new_k, new_v, cache, hd64).view(np.uint8))

  def test_quantised_queries(self):
    q, k, v, pools, lens, pages, cu = self.mixed(
        ml_dtypes.bfloat16, ml_dtypes.float8_e4m3fn, 4, 2, 32)
    pool = packed_cache(*pools, ml_dtypes.float8_e4m3fn, False)
    scale = 0.3
    out, _ = aiter.ragged_paged_attention(
        *map(jnp.asarray, (q, k, v, pool, lens, pages.reshape(-1), cu)),
        jnp.int32([2, 3, COUNT]), q_scale=scale, k_scale=0.7)
    rounded = (q.astype(np.float32) / np.float32(scale)).astype(
        ml_dtypes.float8_e4m3fn)
    exact, plain = (tpu_reference(
        rounded, k, v, *pools, lens, pages.reshape(-1), cu, COUNT, 0.3,
        k_scale=0.7, dtype=t)[0] for t in (np.float64, ml_dtypes.bfloat16))
    check_error(self, out, exact, plain, "bf16")

  def test_without_the_write(self):
    """Pallas' for TPUs: the cache has the new tokens, and is not changed."""
    q, k, v, pools, lens, pages, cu = self.mixed(
        ml_dtypes.bfloat16, ml_dtypes.bfloat16, 4, 2, 32)
    run = lambda t: tpu_reference(
        q, k, v, *pools, lens, pages.reshape(-1), cu, COUNT, 0.2, window=6,
        dtype=t)
    exact, new_k, new_v = run(np.float64)
    kv = np.stack([new_k, new_v], 3).reshape(PAGES, PAGE, 4, 32)
    out = pallas.ragged_paged_attention(
        *map(jnp.asarray, (q, kv, lens, pages, cu)), jnp.int32([COUNT]),
        sm_scale=0.2, sliding_window=6, num_kv_pages_per_block=2)
    check_error(self, out, exact, run(ml_dtypes.bfloat16)[0], "bf16")
    same = packed_cache(new_k, new_v, ml_dtypes.bfloat16, False)
    out, cache = aiter.ragged_paged_attention(
        *map(jnp.asarray, (q, k, v, same, lens, pages.reshape(-1), cu)),
        jnp.int32([2, 3, COUNT]), sm_scale=0.2, sliding_window=6,
        update_kv_cache=False)
    check_error(self, out, exact, run(ml_dtypes.bfloat16)[0], "bf16")
    np.testing.assert_array_equal(np.asarray(cache).view(np.uint8),
                                  same.view(np.uint8))

  def problem(self, **options):
    problem = cases.Problem(Case(**options))
    return problem, problem.exact()[0], problem.exact(
        DTYPES[problem.case.dtype])[0]

  def csr(self, p):
    """(indptr, indices, last_page_lens) of a problem."""
    counts = -(-np.maximum(p.lengths, 0) // p.case.page)
    return (np.cumsum([0, *counts]).astype(np.int32),
            np.concatenate([r[:n] for r, n in zip(p.table, counts)]),
            np.where(counts > 0, p.lengths - (counts - 1) * p.case.page,
                     0).astype(np.int32))

  @parameterized.parameters("", "e4m3fn")
  def test_jax_aiter(self, cache):
    p, exact, plain = self.problem(cache=cache, scale="head" if cache
                                   else "none", soft_cap=2.0)
    scales = dict(k_scale=p.k_scale, v_scale=p.v_scale) if cache else {}
    out = aiter.paged_attention(
        *map(jnp.asarray, (p.q, p.k, p.v, *self.csr(p))), max_seq_len=64,
        logits_soft_cap=2.0, **scales)
    check_error(self, out, exact, plain, "bf16")

  def test_jax_aiter_prefill(self):
    p, exact, plain = self.problem(
        lengths=cases.RAGGED, decode=False, window=(9, -1))
    out = aiter.paged_prefill(
        *map(jnp.asarray, (p.q, p.k, p.v, p.cu, *self.csr(p))),
        max_seqlen_q=64, max_seqlen_k=64, window_size=(9, -1))
    check_error(self, out, exact, plain, "bf16")

  def aiter_form(self, name, p):
    """(positional arguments of one of AITER's, and their scales' names)."""
    head = (p.q, p.k, p.v)
    if name == "pa_fwd_asm":
      return (*head, p.table, p.lengths), ("K_QScale", "V_QScale")
    scale = p.case.softmax_scale or p.case.d**-0.5
    rest = ((p.table, None, p.lengths) if name == "paged_attention_v1"
            else self.csr(p))
    return (*head, scale, *rest), ("k_scale", "v_scale")

  @parameterized.parameters(
      ("paged_attention_v1", dict(soft_cap=2.0), {}),
      ("paged_attention_v1", dict(window=(4, -1), slopes=True),
       dict(sliding_window=5)),
      ("paged_attention_v1", dict(layout="HND", cache="e4m3fn", scale="head"),
       dict(kv_cache_layout="HND", kv_cache_dtype="fp8")),
      ("paged_attention_ragged", dict(soft_cap=2.0, slopes=True),
       dict(block_size=16)),
      ("paged_attention_ragged", dict(layout="HND", cache="int8",
                                      scale="token"),
       dict(kv_cache_layout="HND")),
      ("pa_fwd_asm", dict(layout="asm", cache="int8", scale="token"), {}),
      ("pa_fwd_asm", dict(layout="asm"), {}))
  def test_aiter(self, name, case, options):
    p, exact, plain = self.problem(**case)
    args, scales = self.aiter_form(name, p)
    if p.k_scale is not None:
      options = options | dict(zip(scales, (p.k_scale, p.v_scale)))
    if "soft_cap" in case:
      options = options | dict(logits_soft_cap=case["soft_cap"])
    if "slopes" in case:
      options = options | dict(alibi_slopes=p.slopes)
    out = getattr(aiter, name)(*args, **options)
    check_error(self, out, exact, plain, p.case.dtype)

  @parameterized.parameters("paged_attention_v1", "paged_attention_ragged",
                            "pa_fwd_asm")
  def test_aiter_several(self, name):
    """Speculative steps: as many of each sequence, or lengths of their own."""
    layout = "asm" if name == "pa_fwd_asm" else "NHD"
    p, exact, plain = self.problem(
        layout=layout, lengths=((3, 40), (3, 3), (3, 1)), decode=False)
    args, _ = self.aiter_form(name, p)
    args = (jnp.asarray(p.q[:9]), *args[1:])
    each = "max_qlen" if name == "pa_fwd_asm" else "mtp"
    out = getattr(aiter, name)(*args, **{each: 3})
    check_error(self, out, exact[:9], plain[:9], "bf16")
    if name == "paged_attention_ragged":
      return
    if name == "pa_fwd_asm":
      given = getattr(aiter, name)(*args, qo_indptr=p.cu)
    else:
      given = getattr(aiter, name)(*args[:5], p.cu, *args[6:])
    np.testing.assert_array_equal(given, out)
    with self.assertRaisesRegex(ValueError, f"{name}: .*{each} is 2"):
      getattr(aiter, name)(*args, **{each: 2})

  def test_fp8_out(self):
    """The result of the same call, divided and rounded."""
    p, _, _ = self.problem()
    args, _ = self.aiter_form("paged_attention_v1", p)
    out = aiter.paged_attention_v1(*args, fp8_out_scale=0.01)
    self.assertEqual(out.dtype, aiter.float8_dtype())
    largest = np.float32(jnp.finfo(out.dtype).max)
    wide = np.asarray(aiter.paged_attention_v1(*args), np.float32)
    want = np.clip(wide / np.float32(0.01), -largest, largest)
    np.testing.assert_array_equal(
        np.asarray(out).view(np.uint8), want.astype(out.dtype).view(np.uint8))

  @parameterized.parameters(
      dict(), dict(table=True), dict(layout="asm"), dict(page=1),
      dict(layout="asm", table=True, cache="e4m3fn", scale="page"))
  def test_batch_prefill(self, table=False, **options):
    p, exact, plain = self.problem(
        lengths=cases.RAGGED, decode=False, causal=False, slopes=True,
        sinks=True, **options)
    indptr, indices, last = self.csr(p)
    options = dict(alibi_slopes=p.slopes, sink_ptr=p.sinks)
    if table:
      indptr = indices = None
      options |= dict(block_table=p.table, seqlen_k=p.lengths)
    elif p.case.page > 1:
      options |= dict(kv_last_page_lens=last)
    if p.k_scale is not None:
      options |= dict(kv_block_descale=np.stack([p.k_scale, p.v_scale], -1))
    k, v = (t[:, 0] if p.case.page == 1 else t for t in (p.k, p.v))
    as_arrays = lambda tree: jax.tree.map(jnp.asarray, tree)
    out, _ = aiter.mha_batch_prefill_func(
        *as_arrays((p.q, k, v, p.cu, indptr, indices)), 64, 64,
        return_lse=True, **as_arrays(options))
    check_error(self, out, exact, plain, "bf16")

  @parameterized.parameters(False, True)
  def test_varlen(self, causal):
    """AITER's name of packed attention, and what it is of pages."""
    p, exact, plain = self.problem(
        lengths=cases.RAGGED, decode=False, causal=causal, slopes=True,
        sinks=True, soft_cap=5.0)
    ends = np.cumsum((0, *p.lengths), dtype=np.int32)
    options = dict(alibi_slopes=p.slopes, sink_ptr=p.sinks, causal=causal,
                   logits_soft_cap=5.0)
    args = tuple(map(jnp.asarray, (p.q, p.k, p.v, p.cu, ends)))
    out, lse = aiter.flash_attn_varlen_func(
        *args, 64, 64, block_table=p.table, return_lse=True, **options)
    check_error(self, out, exact, plain, "bf16")
    self.assertEqual(lse.shape, out.shape[1::-1])
    slots = p.table[:, :, None] * p.case.page + np.arange(p.case.page)
    rows = np.concatenate([
        row.reshape(-1)[:n] for row, n in zip(slots, p.lengths)])
    k, v = (jnp.asarray(t.reshape(-1, *t.shape[2:])[rows]) for t in (p.k, p.v))
    out = aiter.flash_attn_varlen_func(
        args[0], k, v, *args[3:], **options)
    check_error(self, out, exact, plain, "bf16")
    for wrong in (dict(min_seqlen_q=1), dict(dropout_p=0.5),
                  dict(cu_seqlens_q_padded=p.cu)):
      with self.assertRaisesRegex(
          ValueError, f"flash_attn_varlen_func: {next(iter(wrong))} is"):
        aiter.flash_attn_varlen_func(*args, block_table=p.table, **wrong)

  @parameterized.parameters("", "int8")
  def test_pallas(self, cache):
    p, exact, plain = self.problem(
        cache=cache, scale="token" if cache else "none", softmax_scale=1.0,
        layout="heads_first", d=32, soft_cap=20.0)
    scales = (p.k_scale, p.v_scale) if cache else ()
    out = pallas.paged_attention(
        *map(jnp.asarray, (p.q, p.k, p.v, p.table, p.lengths, *scales)),
        k_splits=4, attn_logits_soft_cap=20.0)
    check_error(self, out, exact, plain, "bf16")

  def test_pallas_full_pages(self):
    p, _, _ = self.problem(layout="heads_first", lengths=((1, 32), (1, 32)),
                           page=8, holes=False)
    table = p.table[:, :4]
    full = pallas.paged_attention(
        *map(jnp.asarray, (p.q, p.k, p.v, table)), None)
    given = pallas.paged_attention(
        *map(jnp.asarray, (p.q, p.k, p.v, table, p.lengths)))
    np.testing.assert_array_equal(full, given)

  @parameterized.parameters("bf16", "fp16", *["fp32"] * (not machine.GPU))
  def test_merge(self, dtype):
    """Attention to half of the pages and to the others, then joined."""
    p, exact, plain = self.problem(
        dtype=dtype, lengths=((1, 64), (1, 0), (1, 30)))
    call = lambda table, lengths: aiter.paged_attention_decode(
        *map(jnp.asarray, (p.q, p.k, p.v, table, lengths)), return_lse=True)
    first = np.minimum(p.lengths, 32)
    a, b = call(p.table, first), call(p.table[:, 2:], p.lengths - first)
    joined = lambda *args: aiter.merge_attn_states(*args, return_lse=True)
    out, lse = jax.jit(joined)(a[0], a[1].T, b[0], b[1].T)
    check_error(self, out, exact, plain, dtype, floor=2.0**-7 * (
        dtype == "bf16"))
    whole = call(p.table, p.lengths)[1].T
    np.testing.assert_array_equal(lse == -np.inf, whole == -np.inf)
    np.testing.assert_allclose(np.where(lse == -np.inf, 0, lse),
                               np.where(whole == -np.inf, 0, whole), atol=1e-2)
    grads = jax.grad(lambda *args: joined(*args)[0].astype(
        jnp.float32).sum(), (0, 1, 2, 3))(a[0], a[1].T, b[0], b[1].T)
    for t in grads:
      self.assertTrue(np.isfinite(np.asarray(t, np.float32)).all())


if __name__ == "__main__":
  absltest.main()
