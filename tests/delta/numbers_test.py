# SPDX-License-Identifier: Apache-2.0
"""Linear attention against float64: the delta rule, its convolution, servers'.

Chunks of any size are what one token after the other is.
"""

import functools

import jax.numpy as jnp
import numpy as np
from absl.testing import absltest, parameterized
from delta import oracle
from harness import errors, machine, sharding, transforms
from jax.sharding import PartitionSpec as P

import jax
from jax.experimental import aiter

# Of the largest value; products of float32 are three of TF32 at the least.
_ERROR = {"float32": 2e-5, "bfloat16": 2e-2, "float16": 2e-3}


class _Problem:
  """Arrays of a call, and what it must return."""

  def __init__(self, dtype="float32", b=2, t=70, h=2, hv=4, dk=16, dv=24,
               cu=None, state=True, norm=True, channels=False, seed=0):
    rng = np.random.default_rng(seed)
    normal = lambda *shape: rng.standard_normal(shape)
    to = lambda x: jnp.asarray(x, jnp.dtype(dtype))
    n = b if cu is None else len(cu) - 1
    self.q, self.k, self.v = (to(normal(b, t, *s)) for s in (
        (h, dk), (h, dk), (hv, dv)))
    if not norm:
      self.q, self.k = self.q / 4, self.k / 4
    gate = (b, t, hv, dk) if channels else (b, t, hv)
    self.g = jnp.asarray(-np.abs(normal(*gate)) / 4, jnp.float32)
    self.beta = to(rng.random((b, t, hv)))
    self.state = jnp.asarray(
        normal(n, hv, dk, dv) if state else np.zeros((n, hv, dk, dv)),
        jnp.float32)
    self.cu = None if cu is None else jnp.asarray(cu, jnp.int32)
    self.norm, self.channels, self.scale = norm, channels, dk ** -0.5
    self.ends = [(i, 0, t) for i in range(b)] if cu is None else [
        (0, *ends) for ends in zip(cu, cu[1:])]

  def options(self):
    return dict(initial_state=self.state, output_final_state=True,
                use_qk_l2norm_in_kernel=self.norm, cu_seqlens=self.cu)

  def exact(self):
    q, k, v, g, beta = (np.asarray(t, np.float64) for t in (
        self.q, self.k, self.v, self.g, self.beta))
    if self.norm:
      q, k = oracle.unit(q), oracle.unit(k)
    if not self.channels:
      g = g[..., None]
    out, states = np.zeros(v.shape), []
    for (row, begin, end), state in zip(self.ends, np.asarray(self.state)):
      rows = lambda t: t[row, begin:end]
      out[row, begin:end], last = oracle.rule(
          *map(rows, (q, k, v, g, beta)), self.scale, state)
      states.append(last)
    return out, np.stack(states)


class DeltaTest(parameterized.TestCase):

  def check(self, dtype="float32", chunk=None, **options):
    p = _Problem(dtype, **options)
    if chunk:
      call = functools.partial(aiter.chunk_gated_delta_rule, chunk_size=chunk)
    else:
      call = lambda q, k, v, g, beta, **rest: (
          aiter.fused_recurrent_gated_delta_rule(
              q, k, v, **{"gk" if p.channels else "g": g}, beta=beta, **rest))
    out, state = jax.jit(call, static_argnames=(
        "output_final_state", "use_qk_l2norm_in_kernel"))(
            p.q, p.k, p.v, p.g, p.beta, **p.options())
    self.assertEqual((out.dtype, state.dtype), (p.q.dtype, np.float32))
    want = p.exact()
    for a, b in zip((out, state), want):
      np.testing.assert_allclose(
          np.asarray(a, np.float64), b, rtol=0,
          atol=_ERROR[dtype] * max(np.abs(b).max(), 1))
    # Closer than that as a whole, as AITER's tests have it.
    size = lambda x: np.sqrt(np.mean(np.square(x)))
    self.assertLess(size(np.asarray(out, np.float64) - want[0]), 0.005 * max(
        size(want[0]), 1e-3))

  @parameterized.parameters(*machine.sample([
      dict(), dict(t=64, dtype="float16"), dict(t=5, chunk=4), dict(chunk=7),
      dict(t=130, b=1, h=1, dk=8, dv=40), dict(norm=False, state=False, hv=2),
      dict(dtype="bfloat16"), dict(t=200, chunk=4),
      dict(t=150, chunk=4, b=1, dtype="bfloat16")], 2))
  def test_chunks(self, **options):
    """One, a few, and so many that groups are made of them."""
    self.check(**{"chunk": 64, **options})

  @parameterized.parameters(*machine.sample([
      dict(t=1, b=5), dict(channels=True),
      dict(t=1, channels=True, dtype="bfloat16")], 1))
  def test_tokens(self, **options):
    self.check(**{"t": 9, **options})

  @parameterized.parameters(*machine.sample([
      dict(), dict(chunk=16, dtype="bfloat16"), dict(cu=(0, 70)),
      dict(cu=(0, 0, 0)), dict(cu=(0, 1, 1, 2), chunk=None),
      dict(cu=(0, 7, 9), t=9, chunk=None, channels=True),
      dict(cu=(0, 3, 3, 90, 91, 190), t=200, chunk=4)], 2))
  def test_packed(self, **options):
    """Whole chunks, less and more; nothing; one token each; rows of nobody.

    Of 32 chunks and more groups are made.
    """
    self.check(**{"chunk": 64, "b": 1, "cu": (0, 0, 64, 65, 65, 68),
                  **options})

  @machine.where(not machine.SIMULATED)
  def test_keys_that_are_alike(self):
    """What sums of powers of a chunk's matrix would lose all digits of."""
    p = _Problem(b=1, t=64)
    one = jnp.ones_like(p.beta)
    k = jnp.broadcast_to(p.k[:, :1], p.k.shape)
    out, _ = aiter.chunk_gated_delta_rule(
        p.q, k, p.v, 0 * p.g, one, use_qk_l2norm_in_kernel=True)
    wide = lambda t: np.asarray(t[0], np.float64)
    want, _ = oracle.rule(
        oracle.unit(wide(p.q)), oracle.unit(wide(k)), wide(p.v),
        np.zeros((64, 4, 1)), np.ones((64, 4)), p.scale, np.zeros((4, 16, 24)))
    np.testing.assert_allclose(out[0], want, atol=2e-5)

  @machine.where(not machine.SIMULATED)
  @parameterized.parameters(dict(), dict(b=1, cu=(0, 3, 40, 66)))
  def test_gradients(self, **options):
    """Of all arrays, as of one token after the other."""
    p = _Problem(**options)
    arrays = p.q, p.k, p.v, p.g, p.beta, p.state

    def run(fn, q, k, v, g, beta, state):
      return fn(q, k, v, g, beta=beta, initial_state=state,
                output_final_state=True, use_qk_l2norm_in_kernel=True,
                cu_seqlens=p.cu)

    got, want = (
        jax.jit(transforms.results_of(functools.partial(run, fn), range(6)))(
            *arrays) for fn in (aiter.chunk_gated_delta_rule,
                                aiter.fused_recurrent_gated_delta_rule))
    transforms.assert_close(self, got, want, 2e-4)

  @sharding.on_hosts
  @parameterized.product(spec=(P("x"), P(None, None, "x")))
  def test_sharded(self, spec):
    """By batch and heads nothing is sent."""
    p = _Problem(b=4, h=4, hv=4)
    call = lambda *arrays: aiter.chunk_gated_delta_rule(*arrays)[0]
    arrays = p.q, p.k, p.v, p.g, p.beta
    args = sharding.put(sharding.mesh(), arrays, (spec,) * 5)
    compiled = jax.jit(call).lower(*args).compile()
    self.assertNotIn("all-gather", sharding.collectives(compiled))
    transforms.assert_close(self, compiled(*args), jax.jit(call)(*arrays), 1e-4)

  @parameterized.named_parameters(
      ("heads", ValueError, dict(v=jnp.zeros((1, 4, 3, 8))),
       ["v", "[1, 4, 3, 8]", "multiple", "2"]),
      ("keys", ValueError, dict(k=jnp.zeros((1, 4, 2, 9))), ["k", "as q"]),
      ("dtype", TypeError, dict(k=jnp.zeros((1, 4, 2, 8), jnp.bfloat16)),
       ["k", "bfloat16", "float32"]),
      ("gate", ValueError, dict(g=jnp.zeros((1, 4, 2))), ["g", "[1, 4, 4]"]),
      ("no_gate", TypeError, dict(beta=None), ["beta", "None"]),
      ("state", ValueError, dict(initial_state=jnp.zeros((1, 4, 8, 9))),
       ["initial_state", "[1, 4, 8, 8]"]),
      ("lengths", ValueError, dict(cu_seqlens=np.array([0, 5])),
       ["cu_seqlens", "4"]),
      ("scale", ValueError, dict(scale=float("nan")), ["scale", "nan"]),
      ("chunk", ValueError, dict(chunk_size=0), ["chunk_size", "0"]))
  def test_bad_arguments(self, error, replaced, words):
    zeros = jnp.zeros
    errors.check(
        self, aiter.chunk_gated_delta_rule,
        dict(q=zeros((1, 4, 2, 8)), k=zeros((1, 4, 2, 8)),
             v=zeros((1, 4, 4, 8)), g=zeros((1, 4, 4)), beta=zeros((1, 4, 4))),
        error, replaced, words)


class ConvTest(parameterized.TestCase):

  def problem(self, dtype, *shape, w=4, states=3):
    rng = np.random.default_rng(1)
    normal = lambda *s: jnp.asarray(rng.standard_normal(s), jnp.dtype(dtype))
    dim = shape[-2]
    return (normal(*shape), normal(dim, w), normal(dim),
            normal(states, dim, w - 1))

  def check(self, got, want, dtype):
    np.testing.assert_allclose(
        np.asarray(got, np.float64), want, rtol=0,
        atol=_ERROR[dtype] * max(np.abs(want).max(initial=0), 1))

  def exact(self, x, weight, bias, state, silu=True):
    out, state = oracle.conv(
        *(np.asarray(t, np.float64) for t in (x, weight, bias, state)), silu)
    return out, state

  @parameterized.parameters(*machine.sample([
      (4, 9, "float32"), (4, 1, "float32"), (4, 2, "bfloat16"),
      (1, 5, "float32"), (2, 70, "float16"), (7, 3, "float32")], 2))
  def test_dense(self, w, t, dtype):
    x, weight, bias, states = self.problem(dtype, 3, 6, t, w=w)
    out, last = jax.jit(lambda *a: aiter.causal_conv1d(*a, True, "silu"))(
        x, weight, bias, states)
    for i in range(3):
      want = self.exact(x[i], weight, bias, states[i])
      self.check(out[i], want[0], dtype)
      np.testing.assert_array_equal(np.asarray(last[i], np.float64), want[1])

  def test_packed(self):
    cu = jnp.array([0, 0, 3, 9])
    x, weight, bias, states = self.problem("float32", 6, 12)
    out, last = jax.jit(lambda *a: aiter.causal_conv1d(
        *a[:4], True, cu_seqlens=a[4]))(x, weight, bias, states, cu)
    for i, (begin, end) in enumerate(zip(cu, cu[1:])):
      want = self.exact(x[:, begin:end], weight, bias, states[i], False)
      self.check(out[:, begin:end], want[0], "float32")
      np.testing.assert_array_equal(last[i], want[1])
    np.testing.assert_array_equal(out[:, 9:], 0)

  @parameterized.parameters(*machine.sample([(1, 3), (1, 5), (3, 4)], 1))
  def test_update(self, t, kept):
    """Slots, one of which is none; others stay. Rings are the same, turned."""
    # XLA's scatter of 64 numbers a wave reads indices past the end, if any.
    x, weight, bias, _ = self.problem("float32", 4, 16, t)
    pool = jnp.asarray(np.random.default_rng(2).standard_normal((5, 16, kept)),
                       jnp.float32)
    slots = np.array([4, -1, 2, 0])
    out, states = aiter.causal_conv1d_update(
        x, pool, weight, bias, "silu", conv_state_indices=slots)
    want = np.array(pool)
    for i, slot in enumerate(slots):
      if slot < 0:
        np.testing.assert_array_equal(out[i], 0)
        continue
      exact, _ = self.exact(x[i], weight, bias, pool[slot, :, kept - 3:])
      self.check(out[i], exact, "float32")
      want[slot] = np.concatenate([pool[slot], x[i]], 1)[:, t:]
    np.testing.assert_array_equal(states, want)
    before = np.array([0, 7, 1, 2])
    place = lambda n: (n[:, None] + np.arange(kept)) % kept
    ring = np.empty((4, 16, kept), np.float32)
    np.put_along_axis(ring, place(before)[:, None], np.asarray(pool[:4]), 2)
    one, moved = aiter.causal_conv1d_update(x, pool[:4], weight, bias)
    two, turned = aiter.causal_conv1d_update(
        x, ring, weight, bias, cache_seqlens=before)
    np.testing.assert_array_equal(one, two)
    np.testing.assert_array_equal(moved, np.take_along_axis(
        np.asarray(turned), place(before + t)[:, None], 2))

  @machine.where(not machine.SIMULATED)
  def test_gradients(self):
    """Of a convolution that is a product with a matrix: its transpose."""
    x, weight, bias, states = self.problem("float32", 3, 6, 9)
    line = lambda x, states: jnp.concatenate([states, x], 2)
    plain = lambda x, weight, bias, states: bias[:, None] + sum(
        weight[:, j:j + 1] * line(x, states)[:, :, j:j + 9] for j in range(4))
    transforms.assert_close(
        self, *(jax.jit(transforms.results_of(fn, range(4)))(
            x, weight, bias, states) for fn in (aiter.causal_conv1d, plain)))

  @parameterized.named_parameters(
      ("rank", ValueError, dict(x=jnp.zeros(4)), ["x", "[b, dim, t]"]),
      ("weight", ValueError, dict(weight=jnp.zeros((3, 4))),
       ["weight", "[3, 4]", "6"]),
      ("bias", ValueError, dict(bias=jnp.zeros(5)), ["bias", "[6]"]),
      ("states", ValueError, dict(initial_states=jnp.zeros((2, 6, 4))),
       ["initial_states", "[2, 6, 3]"]),
      ("activation", ValueError, dict(activation="gelu"),
       ["activation", "gelu", "silu"]))
  def test_bad_arguments(self, error, replaced, words):
    errors.check(self, aiter.causal_conv1d,
                 dict(x=jnp.zeros((2, 6, 4)), weight=jnp.zeros((6, 4))),
                 error, replaced, words)


class RaggedTest(parameterized.TestCase):
  """tpu-inference's call, of the functions that it stands on."""

  @parameterized.parameters(*machine.sample([
      ((0, 1, 2, 9, 9, 9), 3), ((0, 1, 2, 3, 9, 9), 3), ((0, 4, 4, 9), 3)], 1))
  def test_batches(self, cu, count):
    t, h, hv, dk, dv, n = 12, 2, 4, 8, 16, len(cu) - 1
    rng = np.random.default_rng(3)
    normal = lambda *shape: jnp.asarray(rng.standard_normal(shape), jnp.float32)
    rows, b, a = normal(t, 2 * h * dk + hv * dv), normal(t, hv), normal(t, hv)
    pool, a_log, bias = normal(7, hv, dk, dv), normal(hv), normal(hv)
    # Behind the count nothing is looked at.
    slots = np.array([3, 1, 6, 0, 0])[:n]
    has = np.array([1, 1, 0, 1, 1], bool)[:n]
    got_pool, out = jax.jit(functools.partial(
        aiter.ragged_gated_delta_rule, n_kq=h, n_v=hv, d_k=dk, d_v=dv))(
            rows, b, a, pool, a_log, bias, np.array(cu), slots,
            np.array([0, 0, count]), has)
    wide = lambda x: np.asarray(x, np.float64)
    x = wide(rows) / (1 + np.exp(-wide(rows)))
    q, k, v = np.split(x, (h * dk, 2 * h * dk), 1)
    g = -np.exp(wide(a_log)) * np.log1p(np.exp(wide(a) + wide(bias)))
    beta = 1 / (1 + np.exp(-wide(b)))
    want, want_pool = np.zeros((t, hv * dv)), wide(pool).copy()
    for i in range(count):
      part = lambda x, n: x[cu[i]:cu[i + 1]].reshape(
          cu[i + 1] - cu[i], n, x.shape[1] // n)
      found, state = oracle.rule(
          oracle.unit(part(q, h)), oracle.unit(part(k, h)), part(v, hv),
          part(g, hv), part(beta, hv)[..., 0], dk ** -0.5,
          want_pool[slots[i]] * has[i])
      if len(found):
        want[cu[i]:cu[i + 1]] = found.reshape(-1, hv * dv)
        want_pool[slots[i]] = state
    np.testing.assert_allclose(out, want, atol=2e-5)
    np.testing.assert_allclose(got_pool, want_pool, atol=2e-5)


if __name__ == "__main__":
  absltest.main()
