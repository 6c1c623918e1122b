# SPDX-License-Identifier: Apache-2.0
"""Experts divided over devices give the bits of one device; eight host CPUs."""

import functools

import jax.numpy as jnp
import numpy as np
from absl.testing import absltest, parameterized
from harness import sharding
from harness.transforms import assert_close, weighted
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import jax
from jax.experimental import aiter

E, K, M, D, I = 24, 3, 48, 32, 16
# What every device has whole; all else is divided along its first axis.
WHOLE = ("a1_scale", "a2_scale")


def normal(seed, *shape):
  return jnp.asarray(np.random.default_rng(seed).standard_normal(shape),
                     jnp.float32)


def arrays_of(gated=True, m=M, d=D, i=I):
  """Of a layer whose experts differ in how many tokens they have."""
  logits = normal(4, m, E) + jnp.linspace(0, 3, E)
  weight, ids = aiter.topk_softmax(logits, K)
  return dict(
      hidden_states=normal(1, m, d), w1=normal(2, E, 2 * i if gated else i, d),
      w2=normal(3, E, d, i), topk_weight=weight, topk_ids=ids)


def divided(n, names, explicit=False, axes=("x",), **options):
  """The layer on n devices, of whole arrays with these names."""
  shape = n if isinstance(n, tuple) else (n,)
  mesh = sharding.mesh(shape, axes, explicit)
  # Tokens are divided by every axis, experts by the first.
  rows = lambda name: P() if name in WHOLE else (
      P(axes[0]) if name[0] in "wb" else P(axes))
  specs = tuple(map(rows, names))
  layer = jax.shard_map(
      lambda *own: aiter.expert_parallel_moe(
          **dict(zip(names, own)), axis_name="x", **options),
      mesh=mesh, in_specs=specs, out_specs=P(axes))
  return layer if not explicit else lambda *whole: layer(*(
      jax.reshard(t, NamedSharding(mesh, s)) for t, s in zip(whole, specs)))


class ExpertsTest(parameterized.TestCase):
  # What each problem is on one device, for all numbers of devices.
  of_one_device = {}

  def check(self, n, arrays=None, by=(), tolerance=0, max_rows=None, axes="x",
            explicit=False, **options):
    """Results, and gradients by what is named, have the bits of one device."""
    arrays = arrays_of() if arrays is None else arrays
    names = list(arrays)

    def run(f):
      def loss(*t):
        out = f(*t)
        return weighted(out), out
      at = tuple(names.index(name) for name in by)
      if not by:
        return jax.jit(f)(*arrays.values()), ()
      (_, out), grads = jax.jit(jax.value_and_grad(loss, at, has_aux=True))(
          *arrays.values())
      return out, grads

    key = repr((options, by, {k: (t.dtype, t.shape) for k, t in arrays.items()},
                arrays["topk_ids"][0]))
    if key not in self.of_one_device:
      self.of_one_device[key] = run(lambda *t: aiter.fused_moe(
          **dict(zip(names, t)), **options))
    want, want_grads = self.of_one_device[key]
    out, grads = run(divided(n, names, axes=tuple(axes), explicit=explicit,
                             max_rows=max_rows, **options))
    np.testing.assert_array_equal(out, want)
    for name, a, b in zip(by, grads, want_grads):
      np.testing.assert_allclose(
          a, b, rtol=tolerance, atol=tolerance * np.abs(b).max(), err_msg=name)

  @parameterized.parameters(1, 2, 3, 4, 8)
  def test_devices(self, n):
    self.check(n, by=("hidden_states", "w1", "w2", "topk_weight"))

  @parameterized.parameters(
      dict(bias=True, weight_layout="ekn", activation="swiglu",
           swiglu_limit=2.0, gate_mode="interleaved"),
      dict(bias=True, doweight_stage1=True),
      dict(gated=False, activation="gelu_tanh", dtype=jnp.bfloat16))
  def test_options(self, bias=False, gated=True, **options):
    arrays = arrays_of(gated)
    if options.get("weight_layout") == "ekn":
      for name in ("w1", "w2"):
        arrays[name] = jnp.swapaxes(arrays[name], 1, 2)
    by = ("hidden_states", "w1", "w2", "topk_weight")
    if bias:
      arrays |= dict(bias1=normal(5, E, 2 * I), bias2=normal(6, E, D))
      by += "bias1", "bias2"
    # A bias has its gradient by JAX, which adds rows in another order.
    self.check(4, arrays, by, 2e-6 if bias else 0, **options)

  def quantised(self, kind):
    arrays = arrays_of(d=256, i=128)
    arrays["hidden_states"] = arrays["hidden_states"].astype(jnp.bfloat16)
    function = {"row": aiter.per_token_quant, "block": aiter.per_block_quant,
                "mx": aiter.mx_quant}[kind]
    options = {} if kind == "mx" else dict(
        quant_dtype=jnp.int8 if kind == "row" else jnp.float8_e4m3fn)
    for name in ("w1", "w2"):
      arrays[name], arrays[f"{name}_scale"] = jax.vmap(
          functools.partial(function, **options))(arrays[name])
    return arrays

  @parameterized.parameters(
      ("row", None), ("block", None), ("mx", "float8_e4m3fn"))
  def test_quantised(self, kind, quant):
    # Of three choices: four devices send rows, fewer gather tokens.
    self.check(3 if kind == "mx" else 4, self.quantised(kind),
               quant_dtype=quant)

  def test_given_scales(self):
    given = dict(a1_scale=jnp.float32(0.02), a2_scale=jnp.full(1, 0.3))
    self.check(2, self.quantised("row") | given)

  @parameterized.parameters("one", "none", "few")
  def test_routing(self, where):
    """All to one device, none to any, and tokens that have no expert."""
    ids = np.array(arrays_of()["topk_ids"])
    if where == "one":
      ids = np.arange(M * K).reshape(M, K) % (E // 4)
    ids[::5 if where == "few" else M, 1] = E + 7
    if where == "none":
      ids[:] = -1
    arrays = arrays_of() | dict(topk_ids=jnp.asarray(ids))
    self.check(4, arrays, ("hidden_states", "w1", "topk_weight"))

  def test_local_tokens(self):
    n = 4
    names = [*arrays_of(), "num_local_tokens"]
    count = np.array([5, 0, 12, 99])
    out = jax.jit(divided(n, names))(*arrays_of().values(), jnp.asarray(count))
    want = np.array(aiter.fused_moe(**arrays_of()))
    want[np.arange(M) % (M // n) >= np.repeat(count, M // n)] = 0
    np.testing.assert_array_equal(out, want)

  def test_max_rows(self):
    """Enough of them change nothing; tokens without room are no number."""
    arrays = arrays_of()
    count = np.bincount(np.array(arrays["topk_ids"]).ravel() // (E // 4))
    self.check(4, max_rows=int(count.max()))
    room = int(count.max()) - 5
    out = np.array(jax.jit(divided(4, list(arrays), max_rows=room))(
        *arrays.values()))
    lost = np.isnan(out).any(1)
    self.assertBetween(lost.sum(), 1, 5)
    np.testing.assert_array_equal(
        np.where(lost[:, None], 0, out),
        np.where(lost[:, None], 0, aiter.fused_moe(**arrays)))

  @parameterized.parameters(
      (1, {}), (2, {}), (4, dict(doweight_stage1=True, bias=True)),
      ((2, 2), dict(axes=("x", "y"), explicit=True)))
  def test_partial_sums(self, n, options):
    """They are rounded as float32 is; of one device they have its bits."""
    options, arrays = dict(options), arrays_of()
    if options.pop("bias", False):
      arrays |= dict(bias1=normal(5, E, 2 * I), bias2=normal(6, E, D))
    names = list(arrays)
    by = [i for i, name in enumerate(names) if name != "topk_ids"]

    def run(f):
      return jax.jit(jax.value_and_grad(
          lambda *t: (weighted(f(*t)), f(*t)), by, has_aux=True))(
              *arrays.values())

    got = run(divided(n, names, partial_sums=True, **options))
    for name in ("axes", "explicit"):
      options.pop(name, None)
    want = run(lambda *t: aiter.fused_moe(**dict(zip(names, t)), **options))
    assert_close(self, got, want, 2e-6 if n != 1 else 0)

  @parameterized.parameters(2, 3)
  def test_partial_sums_forwards(self, n):
    """Tangents, of tokens and of their weights."""
    arrays = arrays_of()
    moving = ("hidden_states", "topk_weight")

    def along(f):
      primals = [arrays[name] for name in moving]
      tangents = [normal(7 + i, *t.shape) for i, t in enumerate(primals)]
      return jax.jit(lambda *t: jax.jvp(
          lambda *own: f(*(arrays | dict(zip(moving, own))).values()), t,
          tuple(tangents)))(*primals)

    got = along(divided(n, list(arrays), partial_sums=True))
    want = along(lambda *t: aiter.fused_moe(**dict(zip(arrays, t))))
    assert_close(self, got, want, 2e-6)

  def test_partial_sums_without_room(self):
    arrays = arrays_of()
    count = np.bincount(np.array(arrays["topk_ids"]).ravel() // (E // 4))
    early = dict(partial_sums=True, doweight_stage1=True)
    want = aiter.fused_moe(**arrays, doweight_stage1=True)
    for spare in (0, -5):
      out = np.array(jax.jit(divided(
          4, list(arrays), max_rows=int(count.max()) + spare, **early))(
              *arrays.values()))
      lost = np.isnan(out).any(1)
      self.assertBetween(lost.sum(), spare < 0, -spare)
      np.testing.assert_allclose(
          out[~lost], np.array(want)[~lost], rtol=2e-6, atol=1e-4)

  @parameterized.parameters(False, True)
  def test_two_axes(self, explicit):
    """Data by both axes; weights' gradients are summed over the second."""
    self.check((4, 2), by=("hidden_states", "w1", "w2"), tolerance=2e-6,
               axes="xy", explicit=explicit)

  @parameterized.parameters((2, 3), (4, 4))
  def test_platforms(self, n, count):
    """Rows alone on GPUs, blocks elsewhere; exported from here for all."""
    arrays = arrays_of()
    f = jax.jit(jax.value_and_grad(
        lambda *t: weighted(divided(n, list(arrays))(*t))))
    checks = (*aiter.EXPORT_CHECKS,
              jax.export.DisabledSafetyCheck.custom_call("ragged_all_to_all"))
    text = {p: jax.export.export(f, platforms=[p], disabled_checks=checks)(
        *arrays.values()).mlir_module() for p in ("cpu", "cuda", "rocm")}
    for platform in ("cuda", "rocm"):
      # There and back, forwards and backwards; few devices gather tokens.
      self.assertEqual(text[platform].count("@ragged_all_to_all("), count)
    self.assertNotIn("ragged_all_to_all", text["cpu"])

  @parameterized.parameters(
      (dict(max_rows=0), "max_rows is 0"),
      (dict(activation="relu"), "expert_parallel_moe: activation is 'relu'"),
      (dict(axis_name="y"), "axis_name is 'y'"),
      (dict(axis_name=2), "axis_name is 2"))
  def test_refused(self, options, message):
    arrays = arrays_of()
    options = dict(axis_name="x") | options
    with self.assertRaisesRegex((TypeError, ValueError), message):
      jax.shard_map(
          lambda *own: aiter.expert_parallel_moe(
              **dict(zip(arrays, own)), **options),
          mesh=sharding.mesh((2,), ("x",)), in_specs=P("x"), out_specs=P("x"))(
              *arrays.values())


if __name__ == "__main__":
  absltest.main()
