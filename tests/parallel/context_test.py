# SPDX-License-Identifier: Apache-2.0
"""Attention to a divided sequence is that to the whole; eight host devices."""

import functools
import re

import jax.export
import jax.numpy as jnp
import numpy as np
from absl.testing import absltest, parameterized
from harness import sharding
from harness.transforms import weighted
from jax.sharding import PartitionSpec as P

import jax
from jax.experimental import aiter

B, S, HQ, HK, D, DV = 2, 48, 8, 4, 16, 8
# A sequence's axis is the second of q, k, v and out, and the third of lse.
ROWS, LSE = P(None, "x"), P(None, None, "x")


def normal(seed, *shape):
  return jnp.asarray(np.random.default_rng(seed).standard_normal(shape),
                     jnp.float32)


def qkv(hq=HQ, hk=HK):
  return (normal(1, B, S, hq, D), normal(2, B, S, hk, D),
          normal(3, B, S, hk, DV))


def divided(n, arrays, spec, **options):
  """The function on n devices, of whole arrays in the order of the tokens.

  Args:
    n: devices, or a pair of numbers of the two axes.
    arrays: name -> an array of whole sequences.
    spec: name -> its PartitionSpec.
    **options: of context_parallel_attention.
  """
  balance = options.get("load_balance")
  shape = n if isinstance(n, tuple) else (n,)
  mesh = sharding.mesh(shape, ("x", "y")[:len(shape)])
  rows, lse = (
      P(*(tuple(reversed(mesh.axis_names)) if e == "x" else e for e in p))
      if len(shape) == 2 else p for p in (ROWS, LSE))
  order, back = (
      functools.partial(f, strategy=balance, size=shape[-1]) if balance
      else lambda t, axis: t
      for f in (aiter.reorder_causal_load_balancing,
                aiter.inverse_reorder_causal_load_balancing))
  names = list(arrays)
  specs = tuple(rows if name in "qkv" else spec[name] for name in names)

  @functools.partial(jax.shard_map, mesh=mesh, in_specs=specs,
                     out_specs=(rows, lse))
  def local(*own):
    return aiter.context_parallel_attention(
        **dict(zip(names, own)), axis_name=(
            mesh.axis_names if len(shape) == 2 else "x"),
        return_lse=True, **options)

  def run(*own):
    own = [order(t, axis=1) if name in "qkv" else t
           for name, t in zip(names, own)]
    if "bias" in arrays and balance:
      at = names.index("bias")
      for axis in (2, 3):
        # All-gather's keys are in the order of the tokens.
        if own[at].shape[axis] > 1 and (
            axis == 2 or options.get("strategy") != "all_gather"):
          own[at] = order(own[at], axis=axis)
    out, lse = local(*own)
    return back(out, axis=1), back(lse, axis=2)

  return run


class ContextTest(parameterized.TestCase):
  # What each problem is on one device, for all ways to divide it.
  of_one_device = {}

  def check(self, n, arrays=None, spec=None, fixed=(), tolerance=2e-5,
            dropout_key=None, strategy="ring", load_balance=None, **options):
    """Results and gradients are those of one device."""
    arrays = dict(zip("qkv", qkv())) | (arrays or {})
    names = list(arrays)
    whole = lambda *t: aiter.flash_attn_func(
        **dict(zip(names, t)), return_lse=True, dropout_key=dropout_key,
        **options)
    parts = divided(n, arrays, spec or {}, strategy=strategy,
                    load_balance=load_balance, dropout_key=dropout_key,
                    **options)
    by = tuple(i for i, name in enumerate(names) if name not in fixed)
    def loss(f, *t):
      out, lse = f(*t)
      seen = jnp.where(jnp.isfinite(lse), lse, 0)
      return weighted(out) + weighted(seen), (out, lse)

    run = lambda f: jax.jit(jax.value_and_grad(
        functools.partial(loss, f), by, has_aux=True))(*arrays.values())
    (_, got), got_grads = run(parts)
    key = repr((options, fixed, [(n, t.shape) for n, t in arrays.items()]))
    if key not in self.of_one_device:
      self.of_one_device[key] = run(whole)
    (_, want), want_grads = self.of_one_device[key]
    for name, a, b in (("out", got[0], want[0]), ("lse", got[1], want[1]), *(
        (names[i], a, b) for i, a, b in zip(by, got_grads, want_grads))):
      np.testing.assert_array_equal(np.isfinite(a), np.isfinite(b), name)
      fine = np.isfinite(b)
      np.testing.assert_allclose(
          np.where(fine, a, 0), np.where(fine, b, 0), rtol=tolerance,
          atol=tolerance * np.abs(b[fine]).max(), err_msg=name)

  @parameterized.product(
      n=(1, 2, 3, 8), balance=(None, "zigzag", "striped"))
  def test_ring(self, n, balance):
    self.check(n, causal=True, load_balance=balance)

  @parameterized.product(
      n=(2, 4), how=(("all_gather", None), ("all_gather", "zigzag"),
                     ("ulysses", None), ("ulysses", "zigzag"),
                     ("ulysses", "striped")))
  def test_gathered(self, n, how):
    strategy, balance = how
    self.check(n, strategy=strategy, load_balance=balance, causal=True)

  @parameterized.parameters(
      ("ring", None), ("ring", "zigzag"), ("ring", "striped"),
      ("all_gather", None), ("ulysses", None))
  def test_not_causal(self, strategy, balance):
    self.check(3 if strategy == "ring" else 4, strategy=strategy,
               load_balance=balance)

  @parameterized.product(
      left=(0, 3, 12, 13, 30), balance=(None, "striped"))
  def test_window(self, left, balance):
    self.check(4, causal=True, window_size=(left, 0), load_balance=balance)

  @parameterized.parameters(
      ((5, 4),), ((-1, 15),), ((15, -1),), ((0, 0),), ((30, 20),))
  def test_window_of_two_sides(self, window):
    self.check(4, window_size=window)

  @parameterized.parameters("ring", "all_gather", "ulysses")
  def test_window_all(self, strategy):
    self.check(4, causal=True, window_size=(9, -1), strategy=strategy)

  @parameterized.product(
      strategy=("ring", "all_gather", "ulysses"), balance=("zigzag",))
  def test_soft_cap_and_sink(self, strategy, balance):
    self.check(4, dict(sink=normal(4, HQ)), dict(sink=P()), causal=True,
               logits_soft_cap=2.0, strategy=strategy, load_balance=balance)

  @parameterized.parameters(
      ("ring", "striped", ("alibi_slopes",)), ("all_gather", None, ()),
      ("all_gather", "zigzag", ()), ("ulysses", None, ()),
      ("ulysses", "striped", ()))
  def test_alibi(self, strategy, balance, fixed):
    slopes = jnp.abs(normal(5, HQ)) / 4
    self.check(4, dict(alibi_slopes=slopes), dict(alibi_slopes=P()), fixed,
               causal=True, strategy=strategy, load_balance=balance)

  @parameterized.product(
      how=(("ring", None), ("ring", "zigzag"), ("ring", "striped"),
           ("all_gather", "zigzag"), ("ulysses", "striped")),
      shape=((1, 1, 1, S), (B, HQ, S, S)))
  def test_bias(self, how, shape):
    strategy, balance = how
    rows = P(None, None, "x") if shape[2] > 1 else P()
    self.check(2, dict(bias=normal(6, *shape)), dict(bias=rows), causal=True,
               strategy=strategy, load_balance=balance)

  @parameterized.product(strategy=("ring", "ulysses"),
                         shape=((1, 1, S, S), (1, HQ, 1, S)))
  def test_bias_that_broadcasts(self, strategy, shape):
    rows = P(None, None, "x") if shape[2] > 1 else P()
    self.check(4, dict(bias=normal(6, *shape)), dict(bias=rows),
               strategy=strategy)

  def check_packed(self, n, sequences, sinks=False, strategy="ring",
                   load_balance=None, **options):
    """As check, of sequences of these lengths, and rows of none at the end."""
    q, k, v = (t.reshape(B * S, *t.shape[2:]) for t in qkv())
    cu = jnp.cumsum(jnp.array((0, *sequences), jnp.int32))
    b = len(sequences)
    arrays = dict(q=q, k=k, v=v) | (
        dict(sink=normal(4, b, HQ)) if sinks else {})
    names = list(arrays)
    mesh = sharding.mesh(n if isinstance(n, tuple) else (n,),
                         ("x", "y")[:1 + isinstance(n, tuple)])
    axes = mesh.axis_names
    rows = P(tuple(reversed(axes)))
    size = mesh.shape[axes[-1]]
    order, back = (
        functools.partial(f, strategy=load_balance, size=size)
        if load_balance else lambda t, axis: t
        for f in (aiter.reorder_causal_load_balancing,
                  aiter.inverse_reorder_causal_load_balancing))

    @functools.partial(
        jax.shard_map, mesh=mesh, out_specs=(rows, P(None, *rows)),
        in_specs=(P(), *(rows if name in "qkv" else P() for name in names)))
    def local(cu, *own):
      return aiter.context_parallel_attention(
          **dict(zip(names, own)), cu_seqlens=cu, return_lse=True,
          axis_name=axes if len(axes) > 1 else axes[0], strategy=strategy,
          load_balance=load_balance, **options)

    def parts(cu, *own):
      out, lse = local(cu, *(order(t, axis=0) if name in "qkv" else t
                             for name, t in zip(names, own)))
      return back(out, axis=0), back(lse, axis=1)

    def whole(cu, *own):
      return aiter.flash_attn_varlen(
          **dict(zip(names, own)), cu_seqlens_q=cu, cu_seqlens_k=cu,
          return_lse=True, **options)

    def loss(f, cu, *own):
      out, lse = f(cu, *own)
      seen = jnp.where(jnp.isfinite(lse), lse, 0)
      return weighted(out) + weighted(seen), (out, lse)

    run = lambda f: jax.tree.leaves(jax.jit(jax.value_and_grad(
        functools.partial(loss, f), tuple(range(1, 1 + len(names))),
        has_aux=True))(cu, *arrays.values()))[1:]
    key = repr((sequences, sinks, options))
    if key not in self.of_one_device:
      self.of_one_device[key] = run(whole)
    for name, got, want in zip(
        ("out", "lse", *names), run(parts), self.of_one_device[key]):
      np.testing.assert_array_equal(np.isfinite(got), np.isfinite(want), name)
      fine = np.isfinite(want)
      np.testing.assert_allclose(
          np.where(fine, got, 0), np.where(fine, want, 0), rtol=2e-5,
          atol=2e-5 * np.abs(want[fine]).max(), err_msg=name)

  @parameterized.parameters(
      ("ring", None, True), ("ring", "zigzag", True),
      ("ring", "striped", True), ("ring", "zigzag", False),
      ("all_gather", None, False), ("all_gather", "zigzag", True),
      ("ulysses", None, True))
  def test_packed(self, strategy, balance, causal):
    """Sequences that lie across borders, that are short, empty and missing."""
    self.check_packed(4, (5, 0, 30, 1, 2, 39, 0, 8), strategy=strategy,
                      load_balance=balance, causal=causal)

  @parameterized.parameters(
      ("ring", "zigzag", dict(sinks=True)),
      ("ring", "striped", dict(window_size=(9, 0), sinks=True)),
      ("all_gather", "zigzag", dict(window_size=(9, 0), sinks=True)),
      ("ulysses", "zigzag", dict(window_size=(9, 0), sinks=True)))
  def test_packed_features(self, strategy, balance, options):
    self.check_packed(2, (5, 30, 1, 2, 39, 0, 12), strategy=strategy,
                      load_balance=balance, causal=True, logits_soft_cap=2.0,
                      **options)

  def test_packed_of_two_axes(self):
    self.check_packed((2, 4), (5, 30, 1, 2, 39, 0, 19), causal=True,
                      strategy=("ulysses", "ring"), load_balance="zigzag")

  @parameterized.parameters(
      (1, "ring", "zigzag"), (2, "ring", None), (3, "ring", "zigzag"),
      (4, "ring", None), (2, "all_gather", "zigzag"), (8, "all_gather", None),
      (2, "ulysses", "zigzag"), ((2, 2), ("ulysses", "ring"), "zigzag"))
  def test_dropout(self, n, strategy, balance):
    """The mask is that of the whole, by tokens' places and heads'."""
    self.check(n, causal=True, dropout_p=0.3, dropout_key=jax.random.key(7),
               strategy=strategy, load_balance=balance)

  @parameterized.parameters(
      ("ring", None, dict(window_size=(13, 0), causal=True)),
      ("ring", "zigzag", dict(logits_soft_cap=2.0)),
      ("all_gather", "zigzag", {}))
  def test_dropout_of_options(self, strategy, balance, options):
    self.check(3 if balance else 4, dropout_p=0.3, strategy=strategy,
               dropout_key=jax.random.key(7), load_balance=balance, **options)

  @parameterized.parameters(
      ("ring", None), ("ring", "zigzag"), ("all_gather", "zigzag"))
  def test_packed_dropout(self, strategy, balance):
    """Only sequences across borders begin at a multiple of four."""
    self.check_packed(
        4, (5, 0, 3, 28, 9, 1, 2, 40), causal=True, dropout_p=0.3,
        dropout_key=jax.random.key(7), strategy=strategy, load_balance=balance)

  def test_packed_dropout_of_torn_sequences(self):
    """One that begins elsewhere and crosses a border is NaN, and it alone."""
    q, k, v = (t.reshape(B * S, *t.shape[2:]) for t in qkv())
    cu = jnp.array([0, 5, 30, 40, 90], jnp.int32)
    attend = jax.jit(jax.shard_map(
        lambda *t: aiter.context_parallel_attention(
            *t, cu_seqlens=cu, axis_name="x", dropout_p=0.3,
            dropout_key=jax.random.key(7), return_lse=True),
        mesh=sharding.mesh((4,), ("x",)), in_specs=P("x"),
        out_specs=(P("x"), P(None, "x"))))
    out, lse = attend(q, k, v)
    torn = (np.arange(B * S) >= 5) & (np.arange(B * S) < 30)
    for nan in (np.isnan(out).all((1, 2)), np.isnan(out).any((1, 2)),
                np.isnan(lse).all(0), np.isnan(lse).any(0)):
      np.testing.assert_array_equal(nan, torn)

  @parameterized.parameters((8, 2, 4), (8, 1, 8), (4, 2, 4), (16, 4, 8))
  def test_fewer_key_heads_than_devices(self, hq, hk, n):
    arrays = dict(zip("qkv", qkv(hq, hk)))
    for strategy in ("ulysses", "ring"):
      self.check(n, arrays, causal=True, strategy=strategy)

  @parameterized.product(
      inner=("ring", "all_gather"), balance=(None, "zigzag"))
  def test_two_axes(self, inner, balance):
    self.check((2, 4), dict(sink=normal(4, HQ)), dict(sink=P()), causal=True,
               strategy=("ulysses", inner), load_balance=balance)

  @parameterized.parameters(
      ("ring", None, 3), ("ring", "striped", 3), ("all_gather", None, 3),
      ("ulysses", "striped", 4))
  def test_odd_lengths(self, strategy, balance, n):
    """Seven tokens a device."""
    q, k, v = (t[:, :7 * n] for t in qkv())
    self.check(n, dict(q=q, k=k, v=v), causal=True, strategy=strategy,
               load_balance=balance)

  def test_exported(self):
    """From an explicit mesh."""
    mesh = sharding.mesh((4,), ("x",), explicit=True)
    with jax.set_mesh(mesh):
      call = jax.jit(jax.shard_map(
          functools.partial(aiter.context_parallel_attention, causal=True,
                            axis_name="x", load_balance="zigzag"),
          in_specs=ROWS, out_specs=ROWS))
      args = sharding.put(mesh, qkv(), (ROWS,) * 3)
      got = jax.export.export(call)(*args).call(*args)
      np.testing.assert_array_equal(got, call(*args))

  def test_windows_skip_steps(self):
    """What no query sees is not sent either."""
    sends = lambda **options: len(re.findall(r"ppermute\[", str(
        jax.make_jaxpr(divided(4, dict(zip("qkv", qkv())), {}, causal=True,
                               **options))(*qkv()))))
    self.assertEqual(sends(), 3)
    self.assertEqual(sends(window_size=(11, 0)), 1)
    self.assertEqual(sends(window_size=(2, 0), load_balance="striped"), 2)

  @parameterized.parameters(
      (dict(strategy="rings"), "strategy is 'rings'"),
      (dict(strategy=("ring", "ulysses")), "strategy is"),
      (dict(load_balance="zig"), "is 'zig'; accepted"),
      (dict(window_size=(4, 0), load_balance="zigzag"), "window_size"),
      (dict(window_size=(4, 4), causal=False, load_balance="striped"),
       "window_size's right side"),
      (dict(window_size=(4, 4), causal=False, strategy="all_gather"),
       "window_size or alibi_slopes"),
      (dict(window_size=(4, -1), causal=False, strategy="all_gather"),
       "window_size or alibi_slopes"),
      (dict(window_size=(4, 0, 2)), "third number"),
      (dict(load_balance="striped", strategy="all_gather"), "load_balance"),
      (dict(dropout_p=0.1, dropout_key=jax.random.key(0),
            load_balance="striped"), "dropout_p"),
      (dict(dropout_p=0.1, dropout_key=jax.random.key(0),
            load_balance="zigzag"), "local length is 12; .* multiple of 8"),
      (dict(logits_soft_cap=-1.0), "logits_soft_cap is -1"))
  def test_refused(self, options, message):
    options = dict(causal=True) | options
    with self.assertRaisesRegex(ValueError, message):
      divided(4, dict(zip("qkv", qkv())), {}, **options)(*qkv())

  def test_refused_arrays(self):
    """What the arrays do not allow is said, too."""
    with self.assertRaisesRegex(ValueError, "heads of q and k is 8 and 4"):
      divided(3, dict(zip("qkv", qkv())), {}, strategy="ulysses")(*qkv())
    slopes = dict(alibi_slopes=jnp.ones(HQ))
    arrays = dict(zip("qkv", qkv())) | slopes
    with self.assertRaisesRegex(ValueError, "alibi_slopes"):
      divided(4, arrays, dict(alibi_slopes=P()), causal=True)(*arrays.values())
    with self.assertRaisesRegex(TypeError, "alibi_slopes have no gradient"):
      self.check(4, slopes, dict(alibi_slopes=P()), causal=True,
                 load_balance="striped")
    with self.assertRaisesRegex(ValueError, "x's axis 1 is 6"):
      aiter.reorder_causal_load_balancing(jnp.ones((1, 6)), "zigzag", 2)


if __name__ == "__main__":
  absltest.main()
