# SPDX-License-Identifier: Apache-2.0
"""Routing, sorting and layers of experts against their oracle, anywhere.

Integers are exact; layers of bfloat16 come as near to float64 as JAX's own
formula in the same type does.
"""

import functools

import jax.numpy as jnp
import ml_dtypes
import numpy as np
from absl import flags
from absl.testing import absltest, parameterized
from harness import errors, machine, sharding, transforms
from jax.sharding import PartitionSpec as P
from moe import oracle

import jax
from jax._src.aiter.gmm import op as gmm_op
from jax._src.aiter.moe import op as moe_op
from jax.experimental import aiter

BF16 = ml_dtypes.bfloat16
_DRAWS = flags.DEFINE_integer("draws", 0, "Calls of each random layer.")


def logits_of(m, experts, dtype=np.float32, seed=0, levels=None):
  """Random logits; of few levels there are many that are equal."""
  rng = np.random.default_rng(seed)
  x = rng.standard_normal((m, experts)) * 2
  return (x if levels is None else np.round(x * levels) / levels).astype(dtype)


def ids_of(m, k, experts, seed=0, least=0):
  """Different experts of each token, from `least` on, -1 being none."""
  rng = np.random.default_rng(seed)
  return np.stack([rng.permutation(experts - least)[:k] + least
                   for _ in range(m)]).astype(np.int32)


class RoutingTest(parameterized.TestCase):

  @parameterized.parameters(*machine.sample([
      (9, 8, 2), (5, 64, 6), (7, 60, 4), (33, 128, 8), (4, 256, 8), (3, 384, 8),
      (2, 896, 16), (3, 1, 1)], 4))
  def test_choice(self, m, experts, k):
    for dtype in (np.float32, BF16):
      x = logits_of(m, experts, dtype, levels=2)
      got = moe_op.choose(moe_op.TopK(k), moe_op.Scores(jnp.asarray(x)))
      np.testing.assert_array_equal(got, oracle.choose(x, k))

  @parameterized.parameters(*machine.sample([
      (256, 8, 4, 8), (160, 8, 3, 6), (64, 16, 1, 4), (12, 3, 2, 8),
      (4, 4, 2, 2)], 3))
  def test_groups(self, experts, groups, topk_groups, k):
    x = logits_of(5, experts, levels=4)
    for by_sum in (False, True):
      cfg = moe_op.TopK(k, groups, topk_groups, by_sum)
      got = moe_op.choose(cfg, moe_op.Scores(jnp.asarray(x)))
      np.testing.assert_array_equal(got, oracle.choose(x, *cfg))

  def test_no_numbers(self):
    """NaN comes with -inf, and no column twice; -0 is 0."""
    x = logits_of(5, 12)
    x[0, 3:], x[1] = np.nan, -np.inf
    x[2, ::2], x[3, [4, 7]] = np.inf, np.nan
    x[4, ::2], x[4, 1::2] = -0.0, 0.0
    for cfg in (moe_op.TopK(6), moe_op.TopK(6, 3, 2), moe_op.TopK(
        6, 3, 2, True)):
      got = moe_op.choose(cfg, moe_op.Scores(jnp.asarray(x)))
      np.testing.assert_array_equal(got, oracle.choose(x, *cfg))

  def test_weights(self):
    x = logits_of(6, 16)
    wide = x.astype(np.float64)
    bias = logits_of(1, 16, seed=1)[0] / 4
    softmax = np.exp(wide) / np.exp(wide).sum(-1, keepdims=True)
    sigmoid = 1 / (1 + np.exp(-wide))
    root = np.sqrt(np.log1p(np.exp(wide)))

    def same(got, scores, compared, *how, renorm=False, factor=1.0):
      ids = oracle.choose(compared, *how)
      want = np.take_along_axis(scores, ids, -1)
      if renorm:
        want /= want.sum(-1, keepdims=True)
      np.testing.assert_array_equal(got[1], ids)
      np.testing.assert_allclose(got[0], want * factor, rtol=1e-5)

    same(aiter.topk_softmax(x, 3), softmax, wide, 3)
    same(aiter.topk_softmax(x, 3, True), softmax, wide, 3, renorm=True)
    same(aiter.topk_sigmoid(x, 3), sigmoid, wide, 3)
    same(aiter.topk_gating(x, 3), root, wide, 3, renorm=True)
    same(aiter.topk_gating(x, 3, bias, False, 2.5, "sigmoid"), sigmoid,
         sigmoid + bias, 3, factor=2.5)
    same(aiter.grouped_topk(x, 3, 4, 2, True), softmax, wide, 3, 4, 2,
         renorm=True)
    same(aiter.grouped_topk(x, 3, 4, 2, False, False, 2.0), sigmoid, wide, 3,
         4, 2, factor=2.0)
    same(aiter.biased_grouped_topk(x, bias, 3, 4, 2, True, 2.5), sigmoid,
         sigmoid + bias, 3, 4, 2, True, renorm=True, factor=2.5)
    weights, ids = aiter.topk_softmax(x, 3, False, 2)
    own = np.exp(wide[:, :14])
    own /= own.sum(-1, keepdims=True)
    same((weights[:, :3], ids), own, wide[:, :14], 3)
    np.testing.assert_allclose(weights[:, 3:], sigmoid[:, 14:], rtol=1e-5)

  @parameterized.named_parameters(
      ("topk_softmax", lambda x: aiter.topk_softmax(x, 3)),
      ("shared", lambda x: aiter.topk_softmax(x, 3, False, 2)),
      ("sigmoid", lambda x: aiter.topk_sigmoid(x, 3)),
      ("biased", lambda x: aiter.topk_gating(
          x, 3, jnp.ones(16) / 4, False, 2.0, "softmax")),
      ("grouped", lambda x: aiter.grouped_topk(x, 3, 4, 2, False)))
  def test_nan_is_no_expert(self, route):
    """Others have the weights that they have beside -inf, and gradients."""
    x = logits_of(5, 16)
    x[:, 5] = -np.inf
    with_nan = np.where(np.isinf(x), np.nan, x)
    want, ids = route(x)
    got = route(with_nan)
    np.testing.assert_array_equal(got[1], ids)
    np.testing.assert_array_equal(got[0], want)
    self.assertTrue(np.isfinite(want).all())
    by = lambda x: jax.grad(lambda x: (route(x)[0] ** 2).sum())(x)
    np.testing.assert_array_equal(by(jnp.asarray(with_nan)),
                                  by(jnp.asarray(x)))

  def test_gradients(self):
    """Those of the formula, with the experts as they were chosen."""
    x = jnp.asarray(logits_of(5, 16))
    bias = jnp.linspace(-1, 1, 16)
    c = jnp.asarray(logits_of(5, 3, seed=2))
    for call, scores in (
        (lambda x: aiter.topk_softmax(x, 3, True), jax.nn.softmax),
        (lambda x: aiter.biased_grouped_topk(x, bias, 3, 4, 2, True),
         jax.nn.sigmoid)):
      ids = call(x)[1]

      def plain(x, ids=ids, scores=scores):
        w = jnp.take_along_axis(scores(x), ids, -1)
        return jnp.sum(c * w / w.sum(-1, keepdims=True))

      got = jax.jit(jax.grad(lambda x, call=call: jnp.sum(c * call(x)[0])))(x)
      transforms.assert_close(self, got, jax.grad(plain)(x))

  @machine.where(not machine.GPU)
  def test_rows_divide(self):
    """Over a mesh, without communication, and in a shard_map."""
    x = logits_of(8, 16)
    want = aiter.topk_softmax(x, 3, True)
    mesh = sharding.mesh((4,), ("x",))
    rows, = sharding.put(mesh, [x], [P("x")])
    call = functools.partial(aiter.topk_softmax, topk=3, need_renorm=True)
    compiled = jax.jit(call).lower(rows).compile()
    self.assertEmpty(sharding.collectives(compiled))
    shards = jax.jit(jax.shard_map(
        call, mesh=mesh, in_specs=P("x"), out_specs=P("x")))
    for got in (compiled(rows), shards(rows)):
      np.testing.assert_array_equal(got[1], want[1])
      np.testing.assert_allclose(got[0], want[0], rtol=1e-6)

  def test_vmap(self):
    x = jnp.asarray(logits_of(6, 16)).reshape(2, 3, 16)
    got = jax.vmap(lambda x: aiter.topk_softmax(x, 2))(x)
    want = aiter.topk_softmax(x.reshape(6, 16), 2)
    for a, b in zip(got, want):
      np.testing.assert_array_equal(a.reshape(6, 2), b)


class SortTest(parameterized.TestCase):

  @parameterized.parameters(*machine.sample([
      (1, 1, 1), (10, 2, 8), (300, 8, 64), (40, 3, 5), (129, 4, 300)], 3))
  def test_sort(self, m, k, experts):
    ids = np.random.default_rng(m).integers(
        -1, experts + 2, m * k).astype(np.int32)
    for block in (1, 16):
      got = jax.jit(functools.partial(moe_op.sort, moe_op.Sort(
          experts, block)))(moe_op.Entries(ids))
      for a, b in zip(got, oracle.sort(ids, experts, block)):
        np.testing.assert_array_equal(a, b)

  @machine.where(machine.GPU and not machine.SIMULATED)
  def test_large(self):
    for experts, spread in ((256, 256), (256, 3), (1000, 1000)):
      ids = np.random.default_rng(0).integers(0, spread, 65536, np.int32)
      counts, place, order = jax.jit(functools.partial(
          moe_op.sort, moe_op.Sort(experts)))(moe_op.Entries(ids))
      want = np.argsort(ids, kind="stable")
      np.testing.assert_array_equal(order - 1, want)
      np.testing.assert_array_equal(np.asarray(place)[want], np.arange(65536))
      np.testing.assert_array_equal(counts, np.bincount(
          ids, minlength=experts))

  def test_align_block_size(self):
    ids = ids_of(13, 3, 6)
    ids[2, 1] = 6
    got = aiter.moe_align_block_size(ids, 6, 4)
    counts, _, order = oracle.sort(ids.reshape(-1), 6, 4)
    blocks = -(-counts // 4)
    np.testing.assert_array_equal(got[0], np.where(order > 0, order - 1, 39))
    want = np.repeat(np.arange(6), blocks)
    np.testing.assert_array_equal(got[1][:len(want)], want)
    self.assertTrue((np.asarray(got[1])[len(want):] == -1).all())
    self.assertEqual(got[2].tolist(), [4 * blocks.sum()])

  @parameterized.parameters(False, True)
  def test_moe_sorting(self, elsewhere):
    m, k, experts, block = 11, 3, 8, 4
    ids = ids_of(m, k, experts)
    weights = logits_of(m, k)
    mask = np.array([1, 0, 1, 1, 0, 0, 1, 1]) if elsewhere else None
    tokens = np.array([9], np.int32) if elsewhere else None
    got = aiter.moe_sorting(ids, weights, experts, 16, jnp.bfloat16, block,
                            mask, tokens)
    sorted_ids, sorted_weights, sorted_experts, valid, buffer = map(
        np.asarray, got)
    n = m * k + experts * block - k
    self.assertEqual((len(sorted_ids), len(sorted_weights),
                      len(sorted_experts)), (n, n, -(-n // block)))
    want, of_block, of_weight = [], [], []
    local = 0
    for expert in range(experts):
      if elsewhere and not mask[expert]:
        continue
      mine = [(t, s) for t in range(9 if elsewhere else m) for s in range(k)
              if ids[t, s] == expert]
      fill = -len(mine) % block
      want += [s << 24 | t for t, s in mine] + [k << 24 | m] * fill
      of_weight += [weights[t, s] for t, s in mine] + [0] * fill
      of_block += [local] * ((len(mine) + fill) // block)
      local += 1
    np.testing.assert_array_equal(sorted_ids[:len(want)], want)
    self.assertTrue((sorted_ids[len(want):] == k << 24 | m).all())
    np.testing.assert_array_equal(sorted_weights[:len(want)], of_weight)
    np.testing.assert_array_equal(sorted_experts[:len(of_block)], of_block)
    self.assertEqual(valid.tolist(), [len(want), 9 if elsewhere else m])
    self.assertEqual((buffer.shape, buffer.dtype), ((m, 16), BF16))
    self.assertFalse(buffer.any())

  @parameterized.parameters((2**31 - 1, 11), (12, 11), (-5, 0))
  def test_moe_sorting_counts_tokens_that_are(self, given, count):
    ids, weights = ids_of(11, 3, 8), logits_of(11, 3)
    sort = jax.jit(lambda n: aiter.moe_sorting(
        ids, weights, 8, 16, jnp.bfloat16, 4, None, n)[3])
    self.assertEqual(sort(np.array([given]))[1], count)
    np.testing.assert_array_equal(
        sort(np.array([given])), sort(np.array([count])))

  def test_moe_sorting_of_no_token(self):
    ids, weights, experts, valid, buffer = aiter.moe_sorting(
        jnp.zeros((0, 2), jnp.int32), jnp.zeros((0, 2)), 3, 16, jnp.bfloat16, 4)
    np.testing.assert_array_equal(ids, np.full(3 * 4 - 2, 2 << 24))
    np.testing.assert_array_equal(weights, np.zeros(3 * 4 - 2))
    np.testing.assert_array_equal(experts, np.full(3, -1))
    self.assertEqual((valid.tolist(), buffer.shape), ([0, 0], (0, 16)))

  def test_permute(self):
    x = logits_of(9, 8)
    ids, weights = ids_of(9, 3, 5, least=-1), logits_of(9, 3, seed=1)
    found = aiter.moe_permute(x, ids, 5)
    counts, place, order = oracle.sort(ids.reshape(-1), 5)
    np.testing.assert_array_equal(found.group_sizes, counts)
    rows = np.where((order > 0)[:, None], x[(order - 1) // 3], 0)
    np.testing.assert_array_equal(found.rows, rows)
    got = aiter.moe_unpermute(found.rows, found.places, weights)
    here = np.where(ids < 0, 0, weights)
    np.testing.assert_allclose(got, here.sum(1)[:, None] * x, rtol=1e-5,
                               atol=1e-6)

    def loss(x, weights, move):
      return jnp.sum(jnp.sin(move(jnp.tanh(x), weights)))

    def ours(x, weights):
      found = aiter.moe_permute(x, ids, 5)
      return aiter.moe_unpermute(found.rows ** 2, found.places, weights)

    plain = lambda x, weights: (
        jnp.where(ids < 0, 0, weights)[..., None] * x[:, None] ** 2).sum(1)
    both = lambda move: jax.jit(jax.value_and_grad(
        functools.partial(loss, move=move), (0, 1)))(x, weights)
    transforms.assert_close(self, both(ours), both(plain))
    push = lambda move: jax.jvp(move, (x, weights), (x, weights))
    transforms.assert_close(self, push(ours), push(plain))
    np.testing.assert_allclose(
        aiter.moe_sum(jnp.asarray(x).reshape(3, 3, 8)),
        x.reshape(3, 3, 8).sum(1), rtol=1e-6)


def renamed(options):
  """The oracle's options of a layer, as fused_moe's."""
  return {
      {"early": "doweight_stage1", "limit": "swiglu_limit",
       "alpha": "swiglu_alpha"}.get(n, n): t
      for n, t in options.items() if n != "interleaved"} | dict(
          gate_mode="interleaved" if options.get("interleaved")
          else "separated")


def packed(kind, w):
  """(numbers, scales, values in float64) of MXFP4, MXFP8 or int4 weights."""
  if kind != "i4":
    q, scale = aiter.mx_quant(
        w, quant_dtype="mxfp4" if kind == "mx" else kind)
    return q, scale, np.asarray(aiter.mx_dequant(q, scale), np.float64)
  blocks = w.reshape(*w.shape[:2], -1, 32)
  scale = (np.abs(blocks).max(-1) / 7).astype(BF16)
  wide = scale.astype(np.float32)[..., None]
  q = np.clip(np.round(blocks / wide), -8, 7)
  return (jnp.asarray(q.reshape(w.shape), jnp.int4), scale,
          (q * wide).reshape(w.shape).astype(np.float64))


class FusedTest(parameterized.TestCase):

  def layer(self, m, d, i, experts, k, gated=True, dtype=BF16, seed=0):
    rng = np.random.default_rng(seed)
    draw = lambda *shape: rng.standard_normal(shape)
    x = draw(m, d).astype(dtype)
    w1 = (draw(experts, 2 * i if gated else i, d) / d**0.5).astype(dtype)
    w2 = (draw(experts, d, i) / i**0.5).astype(dtype)
    weights = np.asarray(jax.nn.softmax(draw(m, k)), np.float32)
    return x, w1, w2, weights, ids_of(m, k, experts, seed)

  def close(self, got, want):
    """Within the rounding of a layer's three results to bfloat16."""
    error = np.abs(np.asarray(got, np.float64) - want)
    self.assertLessEqual(error.max(), 3 * 2.0**-8 * np.abs(want).max())

  @parameterized.named_parameters(*machine.sample([
      ("plain", {}), ("gelu", dict(activation="gelu")),
      ("tanh", dict(activation="gelu_tanh")),
      ("swiglu", dict(activation="swiglu", interleaved=True, bias=True)),
      ("alpha", dict(activation="swiglu", alpha=1.1, limit=3.0)),
      ("limit", dict(limit=0.5)), ("alone", dict(gated=False, bias=True)),
      ("early", dict(early=True, k=1)),
      ("early_bias", dict(early=True, bias=True)),
      ("situ", dict(activation="situv2", bias=True)),
      ("betas", dict(activation="situv2", beta=0.7, linear_beta=1.5,
                     interleaved=True)),
      ("interleaved", dict(interleaved=True)), ("bias", dict(bias=True))], 2))
  def test_options(self, options):
    options = dict(options)
    k, gated = options.pop("k", 2), options.pop("gated", True)
    m, d, i = machine.size((200, 256, 128), (13, 24, 16), (13, 24, 16))
    x, w1, w2, weights, ids = self.layer(m, d, i, 6, k, gated)
    if options.pop("bias", False):
      options["bias1"] = logits_of(6, w1.shape[1], seed=5)
      options["bias2"] = logits_of(6, d, seed=6)
    want = oracle.fused_moe(x, w1, w2, weights, ids, **options)
    call = functools.partial(aiter.fused_moe, **renamed(options))
    self.close(jax.jit(call)(x, w1, w2, weights, ids), want)
    other = functools.partial(call, weight_layout="ekn")
    self.close(jax.jit(other)(x, w1.swapaxes(1, 2), w2.swapaxes(1, 2), weights,
                              ids), want)

  @parameterized.named_parameters(*machine.size(
      [("bf16", BF16, 500, 136), ("few", BF16, 90, 136),
       ("fewest", BF16, 20, 136), ("odd", BF16, 90, 133),
       ("fp16", np.float16, 500, 136)],
      [("bf16", BF16, 13, 16)],
      [("bf16", BF16, 13, 16), ("odd", BF16, 13, 15)]))
  def test_gated_product(self, dtype, m, i):
    """It has the bits of a product and its activation; gradients too."""
    d = machine.size(256, 24, 24)
    x, w1, _, _, _ = self.layer(m, d, i, 3, 1, dtype=dtype)
    sizes = np.array([m // 2, 0, m // 3], np.int32)
    cfg = gmm_op.Config(np.dtype(dtype).name, "nt")

    def one(x, w1):
      return gmm_op.product(
          cfg._replace(gates="halves", activation="silu"),
          gmm_op.Operands(x, w1, sizes))

    def two(x, w1):
      return aiter.silu_and_mul(
          gmm_op.product(cfg, gmm_op.Operands(x, w1, sizes)))

    def both(f):
      out, pull = jax.vjp(f, x, w1)
      return f(x, w1), out, pull(jnp.cos(out))

    got, want = jax.jit(lambda: (both(one), both(two)))()
    transforms.assert_close(self, got, want, 0)

  @machine.where(not machine.GPU)
  def test_experts_divide(self):
    """In a shard_map each device has some experts; psum adds up."""
    x, w1, w2, weights, ids = self.layer(8, 16, 8, 4, 2, dtype=np.float32)
    whole = oracle.fused_moe(x, w1, w2, weights, ids)
    mesh = sharding.mesh((4,), ("x",))

    def shard(x, w1, w2, weights, ids):
      here = jnp.arange(4) == jax.lax.axis_index("x")
      return jax.lax.psum(aiter.fused_moe(
          x, w1, w2, weights, ids, here.astype(jnp.int32)), "x")

    got = jax.jit(jax.shard_map(
        shard, mesh=mesh, in_specs=(P(), P("x"), P("x"), P(), P()),
        out_specs=P()))(x, w1, w2, weights, ids)
    np.testing.assert_allclose(got, whole, rtol=1e-4, atol=1e-5)

  def test_experts_elsewhere(self):
    """The shards' results add up to the whole, whose tokens may be fewer."""
    m, d, i = machine.size((200, 128, 128), (11, 16, 8))
    x, w1, w2, weights, ids = self.layer(m, d, i, 6, 3)
    whole = oracle.fused_moe(x, w1, w2, weights, ids)
    mask = np.array([1, 0, 0, 1, 1, 0])
    call = jax.jit(functools.partial(aiter.fused_moe, dtype=jnp.float32))
    total = sum(
        np.asarray(call(x, w1[here > 0], w2[here > 0], weights, ids, here))
        for here in (mask, 1 - mask))
    self.close(total, whole)
    few = call(x, w1, w2, weights, ids, num_local_tokens=np.array([5]))
    self.close(few[:5], whole[:5])
    self.assertFalse(np.asarray(few[5:]).any())

  @parameterized.parameters(*machine.sample([
      (dtype, blocks, gated) for dtype in ("int8", "float8_e4m3fn",
                                           "float8_e4m3fnuz")
      for blocks, gated in ((False, True), (True, True), (False, False))
      if dtype != "int8" or not blocks], 2))
  def test_bytes(self, dtype, blocks, gated):
    """Weights are exact; rows, and what is activated, rounded twice."""
    m, d, i = machine.size((200, 512, 256), (9, 160, 144), (9, 160, 144))
    x, w1, w2, weights, ids = self.layer(m, d, i, 4, 2, gated, np.float32)
    rounded = []
    for w in (w1, w2):
      quantise = aiter.per_token_quant
      if blocks:
        quantise = aiter.per_block_quant
      q, scale = jax.vmap(functools.partial(quantise, quant_dtype=dtype))(w)
      rounded.append((q, scale, np.asarray(
          q, np.float64) * (np.repeat(np.repeat(scale, 128, 1), 128, 2)[
              :, :w.shape[1], :w.shape[2]] if blocks else scale)))
    (q1, s1, e1), (q2, s2, e2) = rounded
    got = jax.jit(lambda x, w1, w2, s1, s2: aiter.fused_moe(
        x, w1, w2, weights, ids, w1_scale=s1, w2_scale=s2))(
            x.astype(BF16), q1, q2, s1, s2)
    want = oracle.fused_moe(x.astype(BF16), e1, e2, weights, ids)
    error = np.asarray(got, np.float64) - want
    # Of normal numbers' rows rounding to int8 is off by 0.7 % of all, of those
    # that are activated by more: their largest is larger. To float8 by 2.7 %;
    # of rows that is in both factors of what is activated: 4.6 % in all.
    bound = 0.03 if dtype == "int8" else 0.055
    self.assertLess(np.sqrt((error**2).sum() / (want**2).sum()), bound)

  @parameterized.parameters(machine.sample([
      ("mx", None), ("mx", "float8_e4m3fn"), ("mx", "mxfp4"), ("i4", None),
      ("float8_e4m3fn", None), ("float8_e4m3fn", "float8_e4m3fn")], 1))
  def test_small_groups(self, kind, quant):
    """Weights are exact; rows as test_bytes has them, or in bfloat16."""
    m, d, i = machine.size((200, 512, 256), (9, 64, 96), (9, 64, 96))
    x, w1, w2, weights, ids = self.layer(m, d, i, 4, 2, True, np.float32)
    (q1, s1, e1), (q2, s2, e2) = (packed(kind, w) for w in (w1, w2))
    bias1, bias2 = (logits_of(4, w.shape[1], seed=5) for w in (w1, w2))
    got = jax.jit(lambda x, q1, q2, s1, s2: aiter.fused_moe(
        x, q1, q2, weights, ids, activation="swiglu", w1_scale=s1,
        w2_scale=s2, quant_dtype=quant, bias1=bias1, bias2=bias2,
        quant_type="per_1x32"))(x.astype(BF16), q1, q2, s1, s2)
    want = oracle.fused_moe(x.astype(BF16), e1, e2, weights, ids, "swiglu",
                            bias1=bias1, bias2=bias2)
    error = np.asarray(got, np.float64) - want
    bound = {None: 0.008, "float8_e4m3fn": 0.055, "mxfp4": 0.3}[quant]
    self.assertLess(np.sqrt((error**2).sum() / (want**2).sum()), bound)

  @machine.where(not machine.SIMULATED)
  def test_one_scale(self):
    """A scale an expert, and one that all rows share: AITER's per_Tensor."""
    x, w1, w2, weights, ids = self.layer(9, 32, 16, 4, 2, dtype=np.float32)
    q, scales, exact = [], [], []
    for w in (w1, w2):
      s = (np.abs(w).max((1, 2)) / 448).astype(np.float32)
      q.append((w / s[:, None, None]).astype(jnp.float8_e4m3fn))
      scales.append(s)
      exact.append(q[-1].astype(np.float64) * s[:, None, None])
    want = oracle.fused_moe(x, *exact, weights, ids)
    for of_rows in ({}, dict(a1_scale=np.float32([0.01]),
                             a2_scale=np.float32(0.02))):
      got = aiter.fused_moe(x, *q, weights, ids, w1_scale=scales[0],
                            w2_scale=scales[1], **of_rows)
      error = np.asarray(got, np.float64) - want
      self.assertLess(np.sqrt((error**2).sum() / (want**2).sum()), 0.06)

  @machine.where(not machine.SIMULATED)
  def test_shared_experts(self):
    """They are the last experts, of every token, wherever the others are."""
    x, w1, w2, weights, ids = self.layer(9, 16, 8, 7, 2, dtype=np.float32)
    ids %= 5
    own = logits_of(9, 2, seed=3)
    last = np.tile(np.array([5, 6]), (9, 1))
    mask = np.array([1, 0, 0, 1, 1, 0, 1])
    for more, weight in ((np.ones((9, 2)), weights),
                         (own, np.concatenate([weights, own], 1))):
      whole = oracle.fused_moe(x, w1, w2, np.concatenate([weights, more], 1),
                               np.concatenate([ids, last], 1))
      call = functools.partial(aiter.fused_moe, num_shared_experts=2)
      np.testing.assert_allclose(call(x, w1, w2, weight, ids), whole,
                                 rtol=1e-4, atol=1e-5)
      total = sum(np.asarray(call(x, w1[here > 0], w2[here > 0], weight, ids,
                                  here)) for here in (mask, 1 - mask))
      np.testing.assert_allclose(total, whole, rtol=1e-4, atol=1e-5)

  @machine.where(not machine.SIMULATED)
  def test_gradients(self):
    """In float32 those of the formula; in bfloat16 as near as that allows."""
    m, d, i = machine.size((300, 128, 64), (12, 16, 8))
    x, w1, w2, weights, ids = self.layer(m, d, i, 5, 2, dtype=np.float32)
    b1, b2 = logits_of(5, 2 * i, seed=5), logits_of(5, d, seed=6)
    arrays = (x, w1, w2, weights, b1, b2)

    def ours(x, w1, w2, weights, b1, b2):
      return aiter.fused_moe(x, w1, w2, weights, ids, bias1=b1, bias2=b2)

    def plain(x, w1, w2, weights, b1, b2):
      h = jnp.einsum("md,mknd->mkn", x, w1[ids],
                     precision="highest") + b1[ids]
      gate, up = jnp.split(h, 2, -1)
      y = jnp.einsum("mkn,mkdn->mkd", jax.nn.silu(gate) * up, w2[ids],
                     precision="highest") + b2[ids]
      return (weights[..., None] * y).sum(1)

    grads = lambda f, arrays: jax.jit(jax.value_and_grad(
        lambda *a: jnp.mean(jnp.sin(f(*a).astype(jnp.float32))),
        tuple(range(6))))(*arrays)
    want = grads(plain, arrays)
    transforms.assert_close(self, grads(ours, arrays), want, 1e-4)
    low = [jnp.asarray(t, jnp.bfloat16) for t in arrays]
    low[3:] = arrays[3:]
    for got, exact in zip(grads(ours, low)[1], want[1]):
      scale = np.abs(exact).max()
      self.assertLess(np.abs(np.asarray(got, np.float32) - exact).max(),
                      0.04 * scale)

  @machine.where(not machine.SIMULATED)
  def test_gradients_of_biases(self):
    """They are sums in a fixed order: no GPU is told to scatter."""
    x, w1, w2, weights, ids = self.layer(5, 16, 8, 3, 2, gated=False)
    grads = jax.jit(jax.grad(lambda *bias: jnp.sum(aiter.fused_moe(
        x, w1, w2, weights, ids, bias1=bias[0], bias2=bias[1])), (0, 1)))
    traced = grads.trace(jnp.ones((3, 8)), jnp.ones((3, 16)))
    for platform in ("cuda", "rocm"):
      text = traced.lower(lowering_platforms=(platform,)).as_text()
      self.assertNotIn("stablehlo.scatter", text)

  @machine.where(not machine.SIMULATED)
  @parameterized.product(activation=["silu", "swiglu", "situv2"],
                         scaled=[False, True], tokens=[0, 3])
  def test_nothing(self, activation, scaled, tokens):
    """No tokens, and a device that has none of the experts."""
    dtype = jnp.float8_e4m3fn if scaled else jnp.float32
    for experts in (0, 2):
      names = ("w1_scale", "w2_scale") if scaled else ()
      out = aiter.fused_moe(
          jnp.ones((tokens, 16)), jnp.ones((experts, 16, 16), dtype),
          jnp.ones((experts, 16, 8), dtype), jnp.ones((tokens, 1)),
          jnp.zeros((tokens, 1), jnp.int32), jnp.arange(4) >= 4 - experts,
          activation, gate_mode="interleaved", bias1=jnp.ones((experts, 16)),
          bias2=jnp.ones((experts, 16)),
          **{name: jnp.ones(experts) for name in names})
      np.testing.assert_array_equal(out, np.zeros((tokens, 16)))

  @parameterized.parameters(range(machine.size(25, 3, 1)))
  def test_random(self, seed):
    """A layer drawn at random, compiled once and called with drawn tokens."""
    rng = np.random.default_rng(seed)
    draw = lambda low, high: int(rng.integers(low, high + 1))
    m = draw(1, machine.size(700, 20, 20))
    experts = draw(1, machine.size(64, 7, 5))
    k = draw(1, min(experts, 8))
    kind = rng.choice(["none", "none", "mx", "i4"])
    step = 8 if kind == "none" else 32
    d, i = (step * draw(1, machine.size(320, 64, 32) // step)
            for _ in range(2))
    gated = draw(0, 3) > 0
    activation = str(rng.choice(["silu", "gelu", "swiglu"][:2 + gated]))
    options = dict(early=draw(0, 3) == 0, interleaved=draw(0, 3) == 0 and gated)
    _, w1, w2, _, _ = self.layer(m, d, i, experts, k, gated)
    if draw(0, 1):
      options |= dict(bias1=logits_of(experts, w1.shape[1], seed=5),
                      bias2=logits_of(experts, d, seed=6))
    given, scales = [w1, w2], {}
    if kind != "none":
      found = [packed(kind, w.astype(np.float32)) for w in (w1, w2)]
      (q1, s1, w1), (q2, s2, w2) = found
      given, scales = [q1, q2], dict(w1_scale=s1, w2_scale=s2)
    call = jax.jit(lambda x, weights, ids, w, scales: aiter.fused_moe(
        x, *w, weights, ids, activation=activation,
        **renamed(options), **scales))
    for _ in range(_DRAWS.value or machine.size(20, 2, 1)):
      x = rng.standard_normal((m, d)).astype(BF16)
      weights = rng.random((m, k), np.float32)
      ids = np.argsort(rng.random((m, experts)) * rng.choice(
          [1, 9], experts), 1)[:, :k].astype(np.int32)
      ids = np.where(rng.random((m, k)) < draw(0, 1) / 4, -1, ids)
      self.close(call(x, weights, ids, given, scales), oracle.fused_moe(
          x, w1, w2, weights, ids, activation, **options))

  @machine.where(not machine.SIMULATED)
  def test_checkpoint_and_scan(self):
    x, w1, w2, weights, ids = self.layer(9, 16, 8, 4, 2, dtype=np.float32)

    @jax.checkpoint
    def layer(h, w):
      return h + aiter.fused_moe(h, *w, weights, ids), None

    def loss(w, unroll):
      return jnp.sum(jax.lax.scan(layer, x, w, unroll=unroll)[0] ** 2)

    w = tuple(jnp.stack([t] * 3) for t in (w1, w2))
    transforms.assert_close(self, jax.jit(jax.grad(loss), static_argnums=1)(
        w, 1), jax.grad(loss)(w, True), 1e-4)


class ErrorTest(parameterized.TestCase):

  @parameterized.named_parameters(
      ("gating", TypeError, dict(gating_output=jnp.ones((2, 8), jnp.int32)),
       ["gating_output's dtype", "int32"]),
      ("topk", ValueError, dict(topk=9), ["topk", "9", "at most 8"]),
      ("shared", ValueError, dict(num_shared_experts=8),
       ["num_shared_experts", "8", "from 0 to 7"]),
      ("renorm", TypeError, dict(need_renorm=1), ["need_renorm", "bool"]))
  def test_topk_softmax(self, error, replaced, words):
    errors.check(self, aiter.topk_softmax,
                 dict(gating_output=jnp.ones((2, 8)), topk=2), error, replaced,
                 words)

  @parameterized.named_parameters(
      ("groups", dict(num_expert_group=3), ["num_expert_group", "divisor of"]),
      ("topk_group", dict(topk_group=5), ["topk_group", "5", "at most 4"]),
      ("topk", dict(topk=5), ["topk", "5", "at most 4"]),
      ("bias", dict(correction_bias=jnp.ones(7)), ["correction_bias", "[8]"]),
      ("factor", dict(routed_scaling_factor=float("nan")),
       ["routed_scaling_factor", "nan"]))
  def test_grouped(self, replaced, words):
    good = dict(gating_output=jnp.ones((2, 8)), correction_bias=jnp.ones(8),
                topk=2, num_expert_group=4, topk_group=2, need_renorm=True)
    errors.check(self, aiter.biased_grouped_topk, good, ValueError, replaced,
                 words)

  @parameterized.named_parameters(
      ("tokens", (1 << 24, 1)), ("choices", (1, 128)))
  def test_moe_sorting(self, shape):
    """What an entry has no bits for."""
    with self.assertRaisesRegex(
        ValueError, r"moe_sorting: topk_ids is int32.* 16777216 .* 128 "):
      jax.eval_shape(lambda ids: aiter.moe_sorting(
          ids, ids.astype(jnp.float32), 200, 8, jnp.float32),
                     jax.ShapeDtypeStruct(shape, jnp.int32))

  @parameterized.named_parameters(
      ("w1", dict(w1=jnp.ones((3, 8, 5))), ["w1", "[3, 8, 5]", "[3, 'n', 6]"]),
      ("w2", dict(w2=jnp.ones((3, 6, 5))), ["w2", "[3, 6, 5]"]),
      ("weights", dict(topk_weight=jnp.ones((4, 3))), ["topk_weight", "[4, 2]"
                                                       ]),
      ("ids", dict(topk_ids=jnp.ones(4, jnp.int32)), ["topk_ids"]),
      ("activation", dict(activation="relu"), ["activation", "relu", "silu"]),
      ("gate_mode", dict(gate_mode="both"), ["gate_mode", "both"]),
      ("no_gates", dict(w1=jnp.ones((3, 4, 6)), gate_mode="interleaved"),
       ["gate_mode", "interleaved", "without gates"]),
      ("masked", dict(expert_mask=np.array([1, 1, 0, 0])),
       ["expert_mask is [1 1 0 0]", "3 are not 0"]),
      ("layout", dict(weight_layout="nk"), ["weight_layout", "nk"]),
      ("limit", dict(swiglu_limit=0.0), ["swiglu_limit", "0"]),
      ("quant", dict(quant_dtype="mxfp4"), ["quant_dtype", "MXFP4"]),
      ("a1_scale", dict(a1_scale=jnp.ones(1)), ["a1_scale"]),
      ("alpha", dict(swiglu_alpha=1.0), ["swiglu_alpha", "swiglu"]),
      ("beta", dict(beta=1.0), ["beta", "1.0", "situv2"]),
      ("linear_beta", dict(activation="situv2", linear_beta=0.0),
       ["linear_beta", "0.0", "above 0"]),
      ("quant_type", dict(quant_type="per_token"),
       ["quant_type", "per_token", "None or 'no'"]),
      ("quant_types", dict(
          w1=jnp.ones((3, 8, 6), jnp.int8), w2=jnp.ones((3, 6, 4), jnp.int8),
          w1_scale=jnp.ones(3), w2_scale=jnp.ones(3), quant_type="per_token"),
       ["quant_type", "per_token", "'per_tensor'"]),
      ("mxfp8", dict(w1=jnp.ones((3, 8, 32), jnp.float8_e4m3fn),
                     w2=jnp.ones((3, 32, 4), jnp.float8_e4m3fn),
                     hidden_states=jnp.ones((4, 32)),
                     w1_scale=jnp.ones((3, 8, 1), jnp.uint8),
                     w2_scale=jnp.ones((3, 32, 1), jnp.uint8)),
       ["w2_scale", "[3, 32, 1]", "4 / 32"]),
      ("shared", dict(num_shared_experts=4), ["num_shared_experts", "4"]),
      ("packed", dict(w1=jnp.ones((3, 8, 32), jnp.uint8),
                      w2=jnp.ones((3, 64, 2), jnp.uint8),
                      w1_scale=jnp.ones((3, 8, 2), jnp.uint8),
                      w2_scale=jnp.ones((3, 64, 1), jnp.uint8)),
       ["w2_scale", "[3, 64, 1]"]),
      ("mask", dict(expert_mask=jnp.ones(2, jnp.int32)), ["expert_mask",
                                                          "at least 3"]),
      ("scale", dict(w1=jnp.ones((3, 8, 6), jnp.int8),
                     w2=jnp.ones((3, 6, 4), jnp.int8),
                     w1_scale=jnp.ones((3, 8)), w2_scale=jnp.ones((3, 5))),
       ["w2_scale", "[3, 5]", "[3, 6]"]),
      ("bias", dict(bias1=jnp.ones((3, 4))), ["bias1", "[3, 8]"]))
  def test_fused_moe(self, replaced, words):
    good = dict(hidden_states=jnp.ones((4, 6)), w1=jnp.ones((3, 8, 6)),
                w2=jnp.ones((3, 6, 4)), topk_weight=jnp.ones((4, 2)),
                topk_ids=jnp.zeros((4, 2), jnp.int32))
    errors.check(self, aiter.fused_moe, good, ValueError, replaced, words)


if __name__ == "__main__":
  absltest.main()
