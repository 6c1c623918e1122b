# SPDX-License-Identifier: Apache-2.0
"""Random calls of every function: a result, or an error that says what is bad.

Of a call that is right one argument is replaced, by an array of another shape
or type or by a value that may have no business there; or its sizes are, by 0, 1
and odd ones; or its arrays, by NumPy's or by those of 64 bits. Calls are
traced, not run: what they return the families' own tests see. The same calls in
every run, forty times as many where all are asked for.
"""

import inspect
import random
import warnings
from unittest import mock

import jax.numpy as jnp
import numpy as np
from absl.testing import absltest, parameterized
from harness import machine
from harness.operators import CASES, SIZES, arrays_of, program

import jax
from jax.experimental import aiter

TIMES = 40 if machine.ALL else 1
MUTANTS, DRAWS = 6 * TIMES, TIMES
NAMED = tuple((case.name, case) for case in CASES)

VALUES = (
    None, 0, -1, 1, 3, 10**5, 2**31, 2**63, 1.5, -2.5, float("nan"),
    float("inf"), True, 1j, "x", "", "int8", "float8_e4m3fn", jnp.float32,
    np.int64(4), (), (1, 2), (-1, 3), (None, None), [1, 2, 3], {}, object(),
    np.zeros(3), np.zeros(()), jnp.ones((2, 4), jnp.int32), jax.random.key(0))
DTYPES = ("float64", "float32", "float16", "bfloat16", "float8_e4m3fn",
          "float8_e5m2", "int64", "int32", "int8", "int4", "uint8", "bool",
          "complex64")


class _CalledError(Exception):
  """Instead of a call; its arguments are the function and what it was given."""


def call_of(case):
  """(function, name -> argument) of the public function that a case calls."""
  arrays = arrays_of(case, SIZES[0])
  fn = getattr(case.call, "func", case.call)
  if fn.__name__ in aiter.__all__:
    options = getattr(case.call, "keywords", {})
    return fn, inspect.signature(fn).bind(*arrays, **options).arguments
  name = max((n for n in aiter.__all__ if case.name.startswith(n)), key=len)
  fn = getattr(aiter, name)

  def instead(*args, **kwargs):
    raise _CalledError(inspect.signature(fn).bind(*args, **kwargs).arguments)

  with mock.patch.object(aiter, name, instead):
    try:
      case.call(*arrays)
    except _CalledError as called:
      return fn, called.args[0]


def is_array(value) -> bool:
  return hasattr(value, "shape") and hasattr(value, "dtype")


def mutants(value):
  """What may stand for an argument."""
  if not is_array(value) or jnp.issubdtype(value.dtype, jax.dtypes.prng_key):
    return VALUES
  shape, dtype = value.shape, value.dtype
  shapes = [(), shape[1:], shape[:-1], (2, *shape), (*shape, 1)]
  for axis, n in enumerate(shape):
    shapes += [(*shape[:axis], other, *shape[axis + 1:])
               for other in {0, 1, n - 1, n + 1, 2 * n}]
  return (*(np.zeros(s, dtype) for s in shapes),
          *(np.zeros(shape, jnp.dtype(d)) for d in DTYPES if d != dtype.name),
          *VALUES)


class RandomTest(parameterized.TestCase):

  def setUp(self):
    super().setUp()
    # JAX's, of 64 bits that it has not.
    self.enter_context(warnings.catch_warnings())
    warnings.simplefilter("ignore")

  def check(self, names, call, *args):
    """Traces a call; an error must be one of arguments, of such a function.

    Returns:
      The results' types; None after an error.
    """
    try:
      return jax.tree.map(lambda t: (t.shape, t.dtype),
                          jax.tree.leaves(jax.eval_shape(call, *args)))
    except (TypeError, ValueError) as error:
      self.assertIn(type(error), (TypeError, ValueError))
      self.assertRegex(str(error), rf"^({'|'.join(names)}): ", error)
      return None

  @parameterized.named_parameters(*NAMED)
  def test_arguments(self, case):
    fn, given = call_of(case)
    parameters = inspect.signature(fn).parameters
    positional = [n for n in given
                  if parameters[n].kind == inspect.Parameter.POSITIONAL_ONLY]
    rng = random.Random(case.name)
    for _ in range(MUTANTS):
      name = rng.choice(list(parameters))
      value = rng.choice(mutants(given.get(name, parameters[name].default)))
      args = {**given, name: value}
      # Half of the calls see values where arrays are given.
      traced = {n: t for n, t in args.items()
                if rng.random() < 0.5 and is_array(t)}

      def call(traced, args=args):
        rest = {**args, **traced}
        return fn(*[rest.pop(n) for n in positional], **rest)

      with self.subTest(f"{name}={value!r}"):
        self.check([fn.__name__], call, traced)

  @parameterized.named_parameters(*NAMED)
  def test_sizes(self, case):
    names = [fn for fn in aiter.__all__ if fn in case.name]
    rng = random.Random(case.name)
    for _ in range(DRAWS):
      sizes = dict(SIZES[0])
      for name in rng.sample(list(sizes), rng.choice([1, 1, 2])):
        sizes[name] = rng.choice([0, 0, 1, 2, 3, 33])
      try:
        arrays = arrays_of(case, sizes)
      except (ValueError, ZeroDivisionError):
        continue  # Such arrays there are not.
      with self.subTest(str(sizes)):
        self.check(names, program(case), *arrays)

  @parameterized.named_parameters(*NAMED)
  def test_numpy(self, case):
    """NumPy's arrays are as JAX's of them, or of a type that is refused."""
    types = {jnp.bfloat16: np.float64, jnp.float32: np.float64,
             jnp.int32: np.int64}
    arrays = [np.asarray(t) for t in arrays_of(case, SIZES[0])]
    wide = [t.astype(types.get(t.dtype.type, t.dtype)) for t in arrays]
    names = [getattr(aiter, name).__name__ for name in aiter.__all__
             if name in case.name]
    for given in (arrays, wide):
      self.check(names, lambda given=given: case.call(*given))

  @parameterized.named_parameters(*NAMED)
  def test_64_bits(self, case):
    """Where JAX has them results are as where it has not, of wide integers."""
    arrays = arrays_of(case, SIZES[0])
    want = self.check([], case.call, *arrays)
    wide = [np.asarray(t, np.int64) if t.dtype == jnp.int32 else t
            for t in arrays]
    with jax.enable_x64(True):
      got = self.check(aiter.__all__, case.call, *wide)
    self.assertIn(got, (want, None))


class EmptyTest(absltest.TestCase):
  """What calls of nothing return."""

  def test_no_sequence(self):
    q, pool = jnp.ones((3, 4, 16)), jnp.ones((6, 16, 2, 16))
    none = jnp.zeros(0, jnp.int32)
    out, lse = aiter.unified_attention(
        q, pool, pool, jnp.zeros(1, jnp.int32), none, none.reshape(0, 3),
        return_lse=True)
    np.testing.assert_array_equal(out, np.zeros((3, 4, 16)))
    np.testing.assert_array_equal(lse, np.full((4, 3), -np.inf))

  def test_no_page(self):
    table = jnp.zeros((2, 0), jnp.int32)
    cache = jnp.ones((4, 16, 132), jnp.uint8)
    for got in aiter.cp_gather_indexer_k_quant_cache(
        cache, table, jnp.array([0, 3, 5]), total_tokens=5, head_dim=128):
      np.testing.assert_array_equal(got.astype(jnp.float32),
                                    np.zeros(got.shape))
    q = jnp.ones((2, 1, 4, 128), jnp.float8_e4m3fn)
    for b in (2, 0):
      logits = aiter.fp8_paged_mqa_logits(
          q[:b], cache, jnp.ones((b, 1, 4)), jnp.array([3, 5])[:b], table[:b],
          max_model_len=8)
      np.testing.assert_array_equal(logits, np.full((b, 8), -np.inf))

  def test_no_token(self):
    weights, ids = aiter.grouped_topk(
        jnp.ones((0, 40)), topk=4, num_expert_group=5, topk_group=2,
        need_renorm=True)
    self.assertEqual((weights.shape, ids.shape), ((0, 4), (0, 4)))
    q, scale = aiter.fused_flatten_fp8_group_quant(jnp.ones((0, 4, 32)), 32)
    self.assertEqual((q.shape, scale.shape), ((0, 128), (0, 4)))
    x = jnp.ones((0, 4, 16))
    self.assertEqual(aiter.rope(
        x, *[jnp.ones((0, 8))] * 2, layout="thd").shape, x.shape)

  def test_numpy(self):
    """Of 64 bits, and among traced arrays."""
    x = np.arange(8.0).reshape(1, 8)
    np.testing.assert_array_equal(aiter.silu_and_mul(x),
                                  aiter.silu_and_mul(jnp.asarray(x)))
    ids, weights = np.array([[1, 0], [2, 1]]), np.ones((2, 2), np.float32)
    sort = lambda ids: aiter.moe_sorting(ids, weights, 4, 8, "bfloat16")[:3]
    for got, want in zip(jax.jit(sort)(ids), sort(ids)):
      np.testing.assert_array_equal(got, want)


if __name__ == "__main__":
  absltest.main()
