# SPDX-License-Identifier: Apache-2.0
"""The indexer's logits against float64, and what is made of them."""

import jax.numpy as jnp
import numpy as np
from absl.testing import absltest, parameterized
from harness import machine, sharding
from indexer import cases
from indexer.cases import Case
from jax.sharding import PartitionSpec as P

import jax
from jax.experimental import aiter

# Of the magnitudes that are added: float32, or the 14 bits of NVIDIA's units.
_ERROR = 2.0**-11 if machine.PLATFORM == "cuda" else 2e-6
# What the device multiplies; others are the formula's.
_KIND = jnp.dtype(aiter.float8_dtype()).name if machine.GPU else "float8_e4m3fn"


class IndexerTestCase(parameterized.TestCase):

  def check(self, case: Case, seed: int = 0):
    p = cases.Problem(case, seed)
    fn, arrays, options = cases.call(p)
    got = np.asarray(jax.jit(lambda arrays: fn(**arrays, **options))(arrays))
    want, size = p.exact()
    self.assertEqual(got.dtype, np.float32)
    np.testing.assert_array_equal(got == -np.inf, want == -np.inf)
    seen = want > -np.inf
    error = np.abs(got[seen] - want[seen]) / np.maximum(size[seen], 1e-30)
    self.assertLessEqual(error.max(initial=0), _ERROR, str(case))


class IndexerTest(IndexerTestCase):

  @parameterized.parameters(*machine.sample([
      dict(), dict(rows=1), dict(rows=130, keys=40), dict(heads=32),
      dict(heads=20, dim=64), dict(heads=1, dim=16, keys=1),
      dict(keys=300, rows=3), dict(heads=65), dict(dim=24, heads=3),
      dict(kind="float8_e4m3fnuz")], 7))
  def test_dense(self, **options):
    self.check(Case(**{"kind": _KIND, **options}))

  @parameterized.parameters(*machine.sample([
      dict(), dict(tiles=True), dict(next_n=3, heads=32),
      dict(page=16, tiles=True, dim=64), dict(page=4, lengths=(9,), keys=70),
      dict(page=1, keys=20, lengths=(20, 3)), dict(keys=64, lengths=(64, 999)),
      dict(kind="float8_e4m3fnuz")], 6))
  def test_pages(self, **options):
    self.check(Case(**{"kind": _KIND, "page": 64, "keys": 150,
                       "lengths": (150, 0, 77), **options}))

  def test_empty(self):
    self.check(Case(rows=0))
    self.check(Case(keys=0))

  @parameterized.product(
      power=[False, True], neox=[False, True], tiles=[False, True])
  def test_projections(self, power, neox, tiles):
    """Queries, weights and the cache of what is normalised and rotated."""
    rng = np.random.default_rng(2)
    tokens, heads, dim, n, size = 9, 3, 64, 16, 16
    draw = lambda *shape: rng.standard_normal(shape, np.float32)
    q, weights, k = draw(tokens, heads, dim), draw(tokens, heads), draw(
        tokens, dim)
    gain, bias = 1 + draw(dim) / 4, draw(dim)
    angle = rng.uniform(0, 6, (20, n))
    positions = rng.integers(0, 20, tokens)
    slots = rng.permutation(3 * size)[:tokens]
    scale_fmt = "ue8m0" if power else None
    got, of_heads, pages = jax.jit(
        lambda *t: aiter.indexer_qk_rope_quant_and_cache(
            *t, eps=1e-5, scale_fmt=scale_fmt, weights_scale=0.3, is_neox=neox,
            nope_first=tiles, preshuffle=tiles))(
                q, weights, k, np.zeros((3, size, dim + 4), np.uint8), slots,
                gain, bias, positions, np.cos(angle).astype(np.float32),
                np.sin(angle).astype(np.float32))
    wide = k.astype(np.float64)
    wide -= wide.mean(1, keepdims=True)
    wide = wide / np.sqrt((wide**2).mean(1, keepdims=True) + 1e-5) * gain + bias
    turn = lambda t: self.turned(t, angle[positions], neox, tiles)
    want_q, want_k = turn(q.astype(np.float64)), turn(wide[:, None])[:, 0]
    # Half a unit of four bits: of the scales, that is what queries are off by.
    dequantised = np.asarray(got, np.float64) * (
        np.asarray(of_heads, np.float64) / weights / 0.3)[..., None]
    largest = np.abs(want_q).max(-1, keepdims=True)
    self.assertLess((np.abs(dequantised - want_q) / (
        np.abs(want_q) * 2.0**-4 + largest * 2.0**-9)).max(), 1.01)
    of_keys, scale = aiter.cp_gather_indexer_k_quant_cache(
        pages, np.array([[0, 1, 2]]), np.array([0, 3 * size]),
        total_tokens=3 * size, head_dim=dim, quant_block_size=dim,
        preshuffle=tiles)
    keys = np.asarray(of_keys, np.float64)[slots] * np.asarray(scale)[slots]
    largest = np.abs(want_k).max(-1, keepdims=True)
    self.assertLess((np.abs(keys - want_k) / (
        np.abs(want_k) * 2.0**-4 + largest * 2.0**-9)).max(), 1.01)
    if power:
      exponents = np.log2(np.asarray(scale)[slots])
      np.testing.assert_array_equal(exponents, np.round(exponents))

  def turned(self, x, angle, neox, last):
    """The first or last columns of [tokens, heads, d], rotated."""
    n = 2 * angle.shape[1]
    at = slice(x.shape[2] - n, None) if last else slice(n)
    a, b = np.split(x[..., at], 2, -1) if neox else (
        x[..., at][..., ::2], x[..., at][..., 1::2])
    cos, sin = np.cos(angle)[:, None], np.sin(angle)[:, None]
    pair = [a * cos - b * sin, b * cos + a * sin]
    out = x.copy()
    out[..., at] = np.concatenate(pair, -1) if neox else np.stack(
        pair, -1).reshape(*x.shape[:2], n)
    return out

  @parameterized.parameters(
      (dict(q=jnp.ones((4, 3, 48))), "q's head dimension is 48"),
      (dict(k=jnp.ones((4, 32))), r"k is float32\[4, 32\]"),
      (dict(weights=jnp.ones((4, 2))), r"weights is .*\[4, 3\]"),
      (dict(positions=jnp.zeros(3, jnp.int32)), "positions is int32"),
      (dict(scale_fmt="e8"), "scale_fmt is 'e8'"),
      (dict(eps=-1.0), "eps is -1.0"),
      (dict(cos=jnp.ones((9, 40))), "sin is float32"),
      (dict(kv_cache=jnp.zeros((2, 16, 64), jnp.uint8)), "kv_cache is uint8"),
      (dict(slot_mapping=jnp.zeros(5, jnp.int32)), "slot_mapping is int32"))
  def test_projections_refused(self, replaced, words):
    given = dict(
        q=jnp.ones((4, 3, 64)), weights=jnp.ones((4, 3)), k=jnp.ones((4, 64)),
        kv_cache=jnp.zeros((2, 16, 68), jnp.uint8),
        slot_mapping=jnp.zeros(4, jnp.int32), norm_weight=jnp.ones(64),
        norm_bias=jnp.ones(64), positions=jnp.zeros(4, jnp.int32),
        cos=jnp.ones((9, 16)), sin=jnp.ones((9, 16)))
    with self.assertRaisesRegex(
        ValueError, f"indexer_qk_rope_quant_and_cache: {words}"):
      aiter.indexer_qk_rope_quant_and_cache(**(given | replaced))

  def test_with_top_k_and_sparse_attention(self):
    """Keys to pages, logits, the best keys, attention to these alone."""
    rng = np.random.default_rng(0)
    size, pages, top, heads = 64, 4, 32, 16
    lengths, next_n = np.int32([130, 40]), 2
    normal = lambda *shape: jnp.asarray(rng.standard_normal(shape, np.float32))
    table = np.int32([[3, 0, 2], [1, -1, -1]])
    slots = np.concatenate([
        table[s, np.arange(n) // size] * size + np.arange(n) % size
        for s, n in enumerate(lengths)])
    keys = normal(len(slots), 128)
    cache = aiter.indexer_k_quant_and_cache(
        keys, jnp.zeros((pages, size, 132), jnp.uint8), jnp.asarray(slots),
        quant_dtype=_KIND)
    q, weights = normal(2, next_n, 16, 128).astype(_KIND), normal(4, 16)
    logits = aiter.fp8_paged_mqa_logits(
        q, cache, weights, jnp.asarray(lengths), jnp.asarray(table), 3 * size)
    best = aiter.top_k_per_row_decode(logits, next_n, jnp.asarray(lengths), top)
    dense, scale = aiter.cp_gather_indexer_k_quant_cache(
        cache, jnp.asarray(table), jnp.asarray([0, 130, 170]),
        total_tokens=170, head_dim=128, quant_dtype=_KIND)
    row = np.arange(4) // next_n
    ends = lengths[row] - next_n + np.arange(4) % next_n + 1
    begins = np.int32([0, 130])[row]
    again = aiter.fp8_mqa_logits(
        q.reshape(4, 16, 128), dense, scale, weights, jnp.asarray(begins),
        jnp.asarray(begins + ends))
    for i in range(4):
      np.testing.assert_allclose(
          logits[i, :ends[i]], again[i, begins[i]:][:ends[i]], rtol=1e-5,
          atol=1e-5)
      want = np.argsort(-np.asarray(logits[i, :ends[i]]), kind="stable")
      np.testing.assert_array_equal(best[i], np.sort(want[:top]))
    # From places in a sequence to slots of the cache.
    table = table[row]
    best = np.asarray(best)
    chosen = np.take_along_axis(table, best // size, 1) * size + best % size
    kv = normal(pages, size, 1, 576).astype(jnp.bfloat16)
    query = normal(4, heads, 576).astype(jnp.bfloat16)
    out = aiter.sparse_mla_fwd(query, kv, jnp.asarray(chosen), sm_scale=0.05)
    rows = np.float64(np.asarray(kv, np.float32)).reshape(-1, 576)[chosen]
    score = np.einsum("thc,tkc->thk", np.float64(np.asarray(
        query, np.float32)), rows) * 0.05
    weight = np.exp(score - score.max(-1, keepdims=True))
    weight /= weight.sum(-1, keepdims=True)
    np.testing.assert_allclose(
        np.float32(out), np.einsum("thk,tkc->thc", weight, rows[..., :512]),
        rtol=0.02, atol=0.02)

  @sharding.on_hosts
  @parameterized.product(explicit=[False, True], paged=[False, True])
  def test_mesh(self, explicit, paged):
    """Queries partition, or sequences."""
    p = cases.Problem(Case(rows=4, keys=40, heads=4, dim=16, **(
        dict(page=16, lengths=(40, 9, 0, 17)) if paged else {})))
    fn, arrays, options = cases.call(p)
    where = dict.fromkeys(("q", "weights", "cu_starts", "cu_ends",
                           "context_lens", "block_tables"), P("x"))
    want = jax.jit(lambda a: fn(**a, **options))(
        jax.device_put(arrays, machine.CPUS[0]))
    mesh = sharding.mesh((4,), ("x",), explicit=explicit)
    with jax.set_mesh(mesh):
      placed = dict(zip(arrays, sharding.put(
          mesh, list(arrays.values()), [where.get(n, P()) for n in arrays])))
      run = jax.jit(lambda a: fn(**a, **options)).lower(placed).compile()
      got = run(placed)
    self.assertEqual(sharding.collectives(run), set())
    self.assertEqual(got.sharding.spec[0], "x")
    np.testing.assert_allclose(got, want, rtol=1e-6)

  @machine.where(not machine.SIMULATED)
  def test_vmap(self):
    fn, arrays, options = cases.call(cases.Problem(Case(kind=_KIND, keys=40)))
    two = jnp.stack([arrays["q"], arrays["q"][::-1]])
    call = lambda q: fn(**{**arrays, "q": q}, **options)
    got = jax.jit(jax.vmap(call))(two)
    for i in range(2):
      np.testing.assert_array_equal(got[i], call(two[i]))


@machine.where(not machine.GPU)
class ErrorsTest(parameterized.TestCase):

  @parameterized.parameters(
      (TypeError, dict(q=3), "q is a int"),
      (TypeError, dict(q=jnp.ones((5, 64, 128))), "q's dtype"),
      (TypeError, dict(kv=jnp.ones((9, 128), jnp.float8_e4m3fnuz)),
       "kv's dtype"),
      (ValueError, dict(kv_scales=jnp.ones(8)), "kv_scales"),
      (ValueError, dict(weights=jnp.ones((5, 63))), "weights"),
      (TypeError, dict(cu_starts=jnp.ones(5)), "cu_starts's dtype"),
      (ValueError, dict(cu_ends=jnp.ones(4, jnp.int32)), "cu_ends"),
      (TypeError, dict(clean_logits=2), "clean_logits"))
  def test_dense(self, kind, wrong, message):
    fn, arrays, options = cases.call(cases.Problem(Case(keys=9)))
    with self.assertRaisesRegex(kind, message):
      fn(**{**arrays, **options, **wrong})

  @parameterized.parameters(
      (TypeError, dict(kv_cache=jnp.ones((3, 16, 132))), "kv_cache's dtype"),
      (ValueError, dict(kv_cache=jnp.ones((3, 16, 136), jnp.uint8)), "132"),
      (ValueError, dict(kv_cache=jnp.ones((3, 8, 132), jnp.uint8),
                        preshuffle=True), "16 tokens"),
      (ValueError, dict(context_lens=jnp.ones(3, jnp.int32)), "context_lens"),
      (ValueError, dict(block_tables=jnp.ones((3, 4), jnp.int32)),
       "block_tables"),
      (ValueError, dict(max_model_len=0), "max_model_len is 0"))
  def test_pages(self, kind, wrong, message):
    fn, arrays, options = cases.call(cases.Problem(
        Case(page=16, keys=40, lengths=(40, 2))))
    with self.assertRaisesRegex(kind, message):
      fn(**{**arrays, **options, **wrong})

  def test_no_gradient(self):
    fn, arrays, options = cases.call(cases.Problem(Case(keys=9)))
    with self.assertRaisesRegex(TypeError, "has no gradient"):
      jax.grad(lambda w: fn(**{**arrays, "weights": w}, **options).sum())(
          arrays["weights"])


if __name__ == "__main__":
  absltest.main()
