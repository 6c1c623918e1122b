# SPDX-License-Identifier: Apache-2.0
"""Attention to a divided sequence is that to the whole; eight host devices."""

import functools
import os
import random
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
ROWS = P(None, "x")


def normal(seed, *shape):
  return jnp.asarray(np.random.default_rng(seed).standard_normal(shape),
                     jnp.float32)


def qkv(hq=HQ, hk=HK):
  return (normal(1, B, S, hq, D), normal(2, B, S, hk, D),
          normal(3, B, S, hk, DV))


def packed(sequences, **arrays):
  """As qkv with others by name, of sequences of these lengths in one axis."""
  arrays = dict(zip("qkv", qkv())) | arrays
  return {name: t.reshape(B * S, *t.shape[2:]) if name in "qkv" else t
          for name, t in arrays.items()} | dict(
              cu_seqlens=np.cumsum((0, *sequences), dtype=np.int32))


def divided(n, arrays, strategy="ring", load_balance=None, **options):
  """The function on n devices, of whole arrays in the order of the tokens.

  Args:
    n: devices, or a pair of numbers of the two axes.
    arrays: name -> an array of whole sequences; but q, k and v all have equal
      parts on each device, or of a bias its rows.
    strategy: as of context_parallel_attention.
    load_balance: likewise.
    **options: likewise.
  """
  shape = n if isinstance(n, tuple) else (n,)
  mesh = sharding.mesh(shape, ("x", "y")[:len(shape)])
  names, axes = mesh.axis_names, tuple(reversed(mesh.axis_names))
  along = 0 if "cu_seqlens" in arrays else 1  # The sequence's axis.
  order, back = (
      functools.partial(f, strategy=load_balance, size=shape[-1])
      if load_balance else lambda t, axis: t
      for f in (aiter.reorder_causal_load_balancing,
                aiter.inverse_reorder_causal_load_balancing))
  by = {axis: P(*[None] * axis, axes) for axis in (along, along + 1)}

  def spec(name, t):
    if name in "qkv":
      return by[along]
    planes = name in ("bias", "mask")
    return P(None, None, axes) if planes and t.shape[2] > 1 else P()

  @functools.partial(
      jax.shard_map, mesh=mesh, out_specs=(by[along], by[along + 1]),
      in_specs=tuple(spec(*item) for item in arrays.items()))
  def local(*own):
    return aiter.context_parallel_attention(
        **dict(zip(arrays, own)), strategy=strategy, load_balance=load_balance,
        axis_name=names if len(names) > 1 else names[0], return_lse=True,
        **options)

  def ordered(name, t):
    if name in "qkv":
      return order(t, axis=along)
    if name not in ("bias", "mask"):
      return t
    # All-gather's keys are in the order of the tokens.
    for axis in (2, 3)[:1 if "all_gather" in strategy else 2]:
      t = order(t, axis=axis) if t.shape[axis] > 1 else t
    return t

  def run(*own):
    out, lse = local(*map(ordered, arrays, own))
    return back(out, axis=along), back(lse, axis=along + 1)

  return run


# AITER_CASES=300 in the environment asks for so many random calls.
CASES = int(os.environ.get("AITER_CASES", 4))


def drawn(rng: random.Random):
  """A call that nobody chose, as ContextTest.check takes it.

  Most are of what some strategy does; the others have to say what they lack.
  """
  pick = rng.choice
  strategy = pick(("ring", "ring", "all_gather", "ulysses",
                   ("ulysses", "ring"), ("ulysses", "all_gather")))
  n = pick((2, 3, 4)) if isinstance(strategy, str) else (2, 2)
  balance = pick((None, "zigzag", "striped"))
  s = pick((rng.randint(1, 12), 8)) * (2 if balance == "zigzag" else 1)
  total = s * int(np.prod(n))
  b, hk = pick((1, 2)), pick((1, 2, 3, 4))
  hq = hk * pick((1, 2, n if isinstance(n, int) else 2))
  shapes = dict(q=(hq, 8), k=(hk, 8), v=(hk, pick((8, 4))))
  options = dict(strategy=strategy, load_balance=balance,
                 causal=pick((True, True, False)))
  arrays = {}
  for feature in rng.sample(
      ("window", "cap", "sink", "bias", "alibi", "dropout", "packed"),
      pick((0, 1, 1, 2, 3))):
    if feature == "window":
      left, right = (rng.randint(-1, 2 * s) for _ in range(2))
      options["window_size"] = left, pick((0, right))
    elif feature == "cap":
      options["logits_soft_cap"] = 2.0
    elif feature == "dropout":
      options |= dict(dropout_p=0.3, dropout_key=jax.random.key(7))
    elif feature == "sink":
      arrays["sink"] = normal(4, hq)
    elif feature == "alibi":
      arrays["alibi_slopes"] = jnp.abs(normal(5, hq)) / 4
    elif feature == "bias" and "cu_seqlens" not in arrays:
      arrays["bias"] = normal(
          6, *(pick((1, size)) for size in (b, hq, total)), total)
    elif feature == "packed":
      b = 1
      arrays.pop("bias", None)  # One device has none either.
      ends = sorted(rng.randint(0, total) for _ in range(pick((1, 3, 6))))
      arrays["cu_seqlens"] = np.array((0, *ends), np.int32)
  rows = (total,) if "cu_seqlens" in arrays else (b, total)
  arrays = {name: normal(seed, *rows, *shape) for seed, (name, shape)
            in enumerate(shapes.items())} | arrays
  return dict(n=n, arrays=arrays, tolerance=1e-4, **options)


class ContextTest(parameterized.TestCase):
  # What each problem is on one device, for all ways to divide it.
  of_one_device = {}

  def check(self, n, arrays=None, fixed=("cu_seqlens",), tolerance=2e-5,
            strategy="ring", load_balance=None, **options):
    """Results and gradients are those of one device."""
    arrays = dict(zip("qkv", qkv())) | (arrays or {})
    parts = divided(n, arrays, strategy, load_balance, **options)

    def whole(*t):
      own, attend = dict(zip(arrays, t)), aiter.flash_attn_func
      if "cu_seqlens" in own:
        cu = own.pop("cu_seqlens")
        attend = functools.partial(
            aiter.flash_attn_varlen, cu_seqlens_q=cu, cu_seqlens_k=cu)
      return attend(**own, return_lse=True, **options)

    by = tuple(i for i, name in enumerate(arrays) if name not in fixed)

    def run(f):
      def loss(*t):
        out, lse = f(*t)
        seen = jnp.where(jnp.isfinite(lse), lse, 0)
        return weighted(out) + weighted(seen), (out, lse)
      (_, results), grads = jax.jit(jax.value_and_grad(
          loss, by, has_aux=True))(*arrays.values())
      # To NumPy: each of JAX's own operations would be compiled.
      return jax.device_get((*results, *grads))

    lengths = tuple(arrays.get("cu_seqlens", ()))
    key = repr((options, fixed, lengths, [
        (name, t.shape) for name, t in arrays.items()]))
    if key not in self.of_one_device:
      self.of_one_device[key] = run(whole)
    for name, got, want in zip(
        ("out", "lse", *(list(arrays)[i] for i in by)), run(parts),
        self.of_one_device[key], strict=True):
      fine = np.isfinite(want)
      np.testing.assert_array_equal(np.isfinite(got), fine, name)
      np.testing.assert_allclose(
          np.where(fine, got, 0), np.where(fine, want, 0), rtol=tolerance,
          atol=tolerance * np.abs(want[fine]).max(initial=0), err_msg=name)

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
    self.check(4, dict(sink=normal(4, HQ)), causal=True,
               logits_soft_cap=2.0, strategy=strategy, load_balance=balance)

  @parameterized.parameters(
      ("ring", None), ("ring", "zigzag"), ("ring", "striped"),
      ("all_gather", None), ("all_gather", "zigzag"),
      ("all_gather", "striped"), ("ulysses", None), ("ulysses", "striped"))
  def test_alibi(self, strategy, balance):
    slopes = jnp.abs(normal(5, HQ)) / 4
    self.check(4, dict(alibi_slopes=slopes), causal=True,
               strategy=strategy, load_balance=balance)

  @parameterized.parameters((1, 1, 1, S), (B, HQ, S, S))
  def test_alibi_and_bias(self, *shape):
    """Of slopes that go round a bias's gradient is a part of theirs."""
    self.check(2, dict(alibi_slopes=jnp.abs(normal(5, B, HQ)) / 4,
                       bias=normal(6, *shape)),
               causal=True, load_balance="striped")

  # What no block of a ring can say: all keys are gathered.
  @parameterized.parameters(
      ("zigzag", dict(window_size=(9, 0), causal=True)),
      ("zigzag", dict(window_size=(9, 5))),
      ("striped", dict(window_size=(9, 5))),
      ("striped", dict(window_size=(9, -1))),
      ("striped", dict(window_size=(-1, 3))),
      (None, dict(window_size=(9, 0, 2), causal=True)),
      ("striped", dict(window_size=(9, 0, 2), causal=True)),
      ("zigzag", dict(window_size=(9, 2, 2), dropout_p=0.3)),
      ("zigzag", dict(dropout_p=0.3, causal=True)),
      ("striped", dict(dropout_p=0.3, causal=True)))
  def test_ring_that_gathers(self, balance, options):
    if "dropout_p" in options:
      options = options | dict(dropout_key=jax.random.key(7))
    self.check(4, dict(sink=normal(4, HQ), bias=normal(6, 1, HQ, S, S)),
               tolerance=4e-5, load_balance=balance, **options)

  @parameterized.product(
      how=((None, "ring"), ("zigzag", "ring"), ("striped", "all_gather")),
      bias=(None, (B, 1, S, S)))
  def test_alibi_both_ways(self, how, bias):
    balance, strategy = how
    arrays = dict(alibi_slopes=jnp.abs(normal(5, B, HQ)) / 4)
    if bias:
      arrays["bias"] = normal(6, *bias)
    self.check(2, arrays, strategy=strategy, load_balance=balance,
               window_size=(20, 15, 1))

  @parameterized.parameters(
      (None, dict(window_size=(9, 0))),
      ("zigzag", dict(window_size=(9, 0, 2))),
      ("striped", dict(dropout_p=0.3, dropout_key=jax.random.key(7))))
  def test_packed_ring_that_gathers(self, balance, options):
    arrays = packed((5, 30, 1, 2, 39, 0, 12), alibi_slopes=jnp.abs(
        normal(5, 7, HQ)) / 4)
    self.check(4, arrays, load_balance=balance, causal=True, **options)

  @parameterized.parameters(
      ("ring", None, dict(window_size=(9, 5))),
      ("ring", "striped", dict(window_size=(-1, 40, 2))),
      ("ring", "zigzag", dict(
          window_size=(9, -1), dropout_p=0.3, dropout_key=jax.random.key(7))),
      ("all_gather", None, {}),
      (("ulysses", "all_gather"), "zigzag", dict(window_size=(0, 4))))
  def test_packed_both_ways(self, strategy, balance, options):
    """Where rows look ahead, over the end of what a device has."""
    arrays = packed((5, 30, 1, 2, 39, 0, 12), alibi_slopes=jnp.abs(
        normal(5, 7, HQ)) / 4, sink=normal(4, HQ))
    self.check((2, 2) if isinstance(strategy, tuple) else 4, arrays,
               strategy=strategy, load_balance=balance, **options)

  @parameterized.product(
      how=(("ring", None), ("ring", "zigzag"), ("ring", "striped"),
           ("all_gather", "zigzag"), ("ulysses", "striped")),
      shape=((1, 1, 1, S), (B, HQ, S, S)))
  def test_bias(self, how, shape):
    strategy, balance = how
    self.check(2, dict(bias=normal(6, *shape)), causal=True, strategy=strategy,
               load_balance=balance)

  @parameterized.product(strategy=("ring", "ulysses"),
                         shape=((1, 1, S, S), (1, HQ, 1, S), (B, 1, S, 1)))
  def test_bias_that_broadcasts(self, strategy, shape):
    self.check(4, dict(bias=normal(6, *shape)), strategy=strategy)

  @parameterized.parameters(
      ("ring", None, (B, 1, 1, S), None),
      ("ring", "zigzag", (1, 1, S, S), (1, HQ, 1, S)),
      ("all_gather", "zigzag", (B, 1, S, 1), None),
      ("ulysses", "striped", (1, HQ, S, S), (S, S)))
  def test_mask(self, strategy, balance, shape, bias):
    arrays = dict(mask=normal(8, *shape) > -0.5)
    if bias:
      arrays["bias"] = normal(6, *(1,) * (4 - len(bias)), *bias)
    self.check(4, arrays, ("mask",), strategy=strategy, load_balance=balance)

  @parameterized.parameters(
      ("ring", None, True), ("ring", "zigzag", True),
      ("ring", "striped", True), ("ring", "zigzag", False),
      ("all_gather", None, False), ("all_gather", "zigzag", True),
      ("ulysses", None, True))
  def test_packed(self, strategy, balance, causal):
    """Sequences that lie across borders, that are short, empty and missing."""
    self.check(4, packed((5, 0, 30, 1, 2, 39, 0, 8)), strategy=strategy,
               load_balance=balance, causal=causal)

  @parameterized.parameters(
      ("ring", "zigzag", {}),
      ("ring", "striped", dict(window_size=(9, 0))),
      ("all_gather", "zigzag", dict(window_size=(9, 0))),
      ("ulysses", "zigzag", dict(window_size=(9, 0))))
  def test_packed_features(self, strategy, balance, options):
    sequences = 5, 30, 1, 2, 39, 0, 12
    self.check(2, packed(sequences, sink=normal(4, len(sequences), HQ)),
               strategy=strategy, load_balance=balance, causal=True,
               logits_soft_cap=2.0, **options)

  def test_packed_of_two_axes(self):
    self.check((2, 4), packed((5, 30, 1, 2, 39, 0, 19)), causal=True,
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
    """Sequences begin and are divided anywhere."""
    self.check(
        4, packed((5, 25, 10, 1, 9, 0, 40)), causal=True, dropout_p=0.3,
        dropout_key=jax.random.key(7), strategy=strategy, load_balance=balance)

  @parameterized.parameters((8, 2, 4), (8, 1, 8), (4, 2, 4), (16, 4, 8))
  def test_fewer_key_heads_than_devices(self, hq, hk, n):
    arrays = dict(zip("qkv", qkv(hq, hk)))
    for strategy in ("ulysses", "ring"):
      self.check(n, arrays, causal=True, strategy=strategy)

  @parameterized.product(
      inner=("ring", "all_gather"), balance=(None, "zigzag"))
  def test_two_axes(self, inner, balance):
    self.check((2, 4), dict(sink=normal(4, HQ)), causal=True,
               strategy=("ulysses", inner), load_balance=balance)

  @parameterized.parameters(
      ("ring", None, 3), ("ring", "striped", 3), ("all_gather", None, 3),
      ("all_gather", "striped", 7), ("ulysses", "striped", 4))
  def test_odd_lengths(self, strategy, balance, n):
    """Seven tokens a device."""
    q, k, v = (normal(seed, 1, 7 * n, heads, D)
               for seed, heads in ((1, HQ), (2, HK), (3, HK)))
    self.check(n, dict(q=q, k=k, v=v), causal=True, strategy=strategy,
               load_balance=balance)
    if strategy == "ring" and balance is None:
      self.check(n, dict(q=q, k=k, v=v), causal=True, dropout_p=0.3,
                 dropout_key=jax.random.key(7))

  @parameterized.parameters(*range(CASES))
  def test_drawn(self, seed):
    """Any call is right, or is refused by the name of an argument."""
    rng = random.Random(seed)
    while True:
      case = drawn(rng)
      with self.subTest(**{name: t for name, t in case.items()
                           if name != "arrays"}, arrays={
                               name: t.shape
                               for name, t in case["arrays"].items()}):
        try:
          self.check(**case)
          return
        except (TypeError, ValueError) as error:
          self.assertRegex(str(error), (
              r"^\w+: (heads of q and k|causal|q's (and k's )?local length)"))

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
        jax.make_jaxpr(divided(4, dict(zip("qkv", qkv())), causal=True,
                               **options))(*qkv()))))
    self.assertEqual(sends(), 3)
    self.assertEqual(sends(window_size=(11, 0)), 1)
    self.assertEqual(sends(window_size=(2, 0), load_balance="striped"), 2)

  @parameterized.parameters(
      (dict(strategy="rings"), "strategy is 'rings'"),
      (dict(strategy=("ring", "ulysses")), "strategy is"),
      (dict(load_balance="zig"), "is 'zig'; accepted"),
      (dict(mask=np.ones((S, 7), bool)), r"mask is bool\[48, 7\]"),
      (dict(bias=np.ones((2, 2, 1, 7))), r"bias is float\d\d\[2, 2, 1, 7\]"),
      (dict(logits_soft_cap=-1.0), "logits_soft_cap is -1"))
  def test_refused(self, options, message):
    options = dict(causal=True) | options
    with self.assertRaisesRegex(ValueError, message):
      divided(4, dict(zip("qkv", qkv())), **options)(*qkv())

  def test_refused_arrays(self):
    """What the arrays do not allow is said, too."""
    with self.assertRaisesRegex(ValueError, "heads of q and k is 8 and 4"):
      divided(3, dict(zip("qkv", qkv())), strategy="ulysses")(*qkv())
    few = [t[:, :6] for t in qkv()]
    with self.assertRaisesRegex(ValueError, "lengths is 3 and 3; .* of 2"):
      divided(2, dict(zip("qkv", few)), strategy="all_gather",
              load_balance="striped")(*few)
    for options, arrays, message in (
        (dict(axis_name="z"), qkv(), "axis_name is 'z'"),
        (dict(axis_name=3), qkv(), "axis_name is 3"),
        (dict(axis_name="x", load_balance="zigzag"), few,
         "local length is 3; .* even")):
      with self.assertRaisesRegex(ValueError, message):
        jax.shard_map(
            functools.partial(aiter.context_parallel_attention, **options),
            mesh=sharding.mesh((2,), ("x",)), in_specs=ROWS,
            out_specs=ROWS)(*arrays)
    with self.assertRaisesRegex(ValueError, "x's axis 1 is 6"):
      aiter.reorder_causal_load_balancing(jnp.ones((1, 6)), "zigzag", 2)

  @parameterized.product(strategy=("zigzag", "striped"),
                         shape=((0, 8, 3), (2, 8, 0), (2, 0, 3)))
  def test_order_of_nothing(self, strategy, shape):
    for reorder in (aiter.reorder_causal_load_balancing,
                    aiter.inverse_reorder_causal_load_balancing):
      self.assertEqual(reorder(jnp.ones(shape), strategy, 2).shape, shape)


if __name__ == "__main__":
  absltest.main()
