# SPDX-License-Identifier: Apache-2.0
"""Numbers of the attention functions, on whatever platform JAX has.

out, lse and every gradient are compared with a float64 oracle. The error may be
twice that of the plain formula with every step in the input dtype, plus a floor
of one unit in the last place of the largest value, or, where a result is a sum
over all rows that may cancel, of its terms'; plus what rounding out, which the
backward pass takes rounded, costs a gradient. lse is always held to 1e-4. In
float32 at JAX's default precision the unit is TF32's.
"""

import dataclasses
import functools
import itertools
import os
import random
import re
from unittest import mock

import jax.export
import jax.numpy as jnp
import ml_dtypes
import numpy as np
from absl.testing import absltest, parameterized
from attention import oracle
from harness import machine
from harness.cases import DTYPES, FLOOR

import jax
from jax._src.aiter.attention import op, reference, types
from jax.experimental import aiter

LSE_TOLERANCE = 1e-4
TF32_FLOOR = 2.0**-8


@dataclasses.dataclass(frozen=True)
class Case:
  """One attention problem.

  `bias` and `mask` are shapes made of 'b', 'h', 'q', 'k' and '1'. `lengths` are
  pairs of query and key lengths: of the sequences of a packed call, or of the
  padded ones of a dense call, whose queries' are not given if all are sq.
  `gaps` are unused rows after each packed one; of `bounded` ones the call says
  how many keys the longest has. `forward`: nothing is differentiated, and of
  `constant` inputs neither. `precision` is that of products of float32.
  """
  dtype: str = "bf16"
  b: int = 2
  sq: int = machine.size(203, 20, 71)
  sk: int = machine.size(333, 28, 99)
  hq: int = 2
  hk: int = 2
  dqk: int = machine.size(64, 16)
  dv: int = 0
  causal: bool = False
  window: tuple[int, ...] = (-1, -1)
  bias: str = ""
  bias_fp32: bool = False
  mask: str = ""
  alibi: str = ""
  sink: str = ""
  cap: float = 0.0
  dropout: float = 0.0
  scale: float | None = None
  packed: bool = False
  lengths: tuple[tuple[int, int], ...] = ()
  gaps: tuple[int, int] = (0, 0)
  bounded: bool = False
  min_seqlen_q: int = 0
  use_lse: bool = False
  forward: bool = False
  constant: tuple[str, ...] = ()
  precision: str = "highest"
  seed: int = 0

  @property
  def head_dim_v(self):
    return self.dv or self.dqk


def make_inputs(case: Case):
  """NumPy arrays of a case by name, and the oracle's list of sequences."""
  rng = np.random.default_rng(case.seed)
  dtype = DTYPES[case.dtype]

  def normal(*shape, dtype=dtype, scale=1.0):
    return (scale * rng.standard_normal(shape)).astype(dtype)

  x = {}
  b, sq, sk = case.b, case.sq, case.sk
  sequences = None
  if case.packed:
    b = len(case.lengths)
    sequences, starts = [], [[0], [0]]
    for nq, nk in case.lengths:
      sequences.append((starts[0][-1], nq, starts[1][-1], nk))
      starts[0].append(starts[0][-1] + nq + case.gaps[0])
      starts[1].append(starts[1][-1] + nk + case.gaps[1])
    lead_q, lead_k = (starts[0][-1],), (starts[1][-1],)
    for name, n, gap in (("q", 0, case.gaps[0]), ("k", 1, case.gaps[1])):
      lengths = [s[n] for s in case.lengths]
      x[f"cu_seqlens_{name}"] = np.cumsum([0, *lengths]).astype(np.int32)
      if gap:
        x[f"cu_seqlens_{name}_padded"] = np.array(starts[n], np.int32)
  else:
    lead_q, lead_k = (b, sq), (b, sk)
    if case.lengths:
      sequences = [(0, nq, 0, nk) for nq, nk in case.lengths]
      padded = [("kv", 1)]
      if any(nq != sq for nq, _ in case.lengths):
        padded.append(("q", 0))
      for name, n in padded:
        x[f"cu_seqlens_{name}"] = np.cumsum(
            [0, *(s[n] for s in case.lengths)]).astype(np.int32)
  x["q"] = normal(*lead_q, case.hq, case.dqk)
  x["k"] = normal(*lead_k, case.hk, case.dqk)
  x["v"] = normal(*lead_k, case.hk, case.head_dim_v)
  x["dout"] = normal(*lead_q, case.hq, case.head_dim_v)
  if case.use_lse:
    lse_shape = (case.hq, *lead_q) if case.packed else (b, case.hq, sq)
    x["dlse"] = normal(*lse_shape, dtype=np.float32)
  per_head = {"h": (case.hq,), "bh": (b, case.hq)}
  if case.alibi:
    # Of either sign: a slope below 0 rewards distance.
    x["alibi_slopes"] = (rng.choice((-1, 1, 1), per_head[case.alibi]) *
                         2.0**-rng.uniform(2, 6, per_head[case.alibi])).astype(
                             np.float32)
  if case.sink:
    x["sink"] = normal(*per_head[case.sink], dtype=np.float32)
  sizes = {"b": b, "h": case.hq, "q": sq, "k": sk, "1": 1}
  if case.mask:
    x["mask"] = rng.random(tuple(sizes[c] for c in case.mask)) < 0.7
  if case.bias:
    x["bias"] = normal(*(sizes[c] for c in case.bias),
                       dtype=np.float32 if case.bias_fp32 else dtype)
  return x, sequences


DIFFERENTIABLE = ("q", "k", "v", "bias", "alibi_slopes", "sink")


def dropout_key(case: Case):
  return jax.random.key(case.seed + 1) if case.dropout else None


def run(case: Case, x):
  """The function under test: results by the oracle's names."""
  wrt = {n: x[n] for n in DIFFERENTIABLE if n in x and n not in case.constant}
  rest = {n: t for n, t in x.items()
          if n.startswith("cu_seqlens") or n in ("mask", *case.constant)}
  options = dict(
      softmax_scale=case.scale, causal=case.causal, window_size=case.window,
      logits_soft_cap=case.cap, dropout_p=case.dropout)
  fn = aiter.flash_attn_func
  if case.packed:
    fn = aiter.flash_attn_varlen
    options["min_seqlen_q"] = case.min_seqlen_q
    if case.bounded:
      options["max_seqlen_k"] = max(nk for _, nk in case.lengths)

  def forward(wrt, rest, key):
    return fn(**wrt, **rest, **options, dropout_key=key, return_lse=True)

  if case.forward:
    out, lse = jax.device_get(jax.jit(forward)(wrt, rest, dropout_key(case)))
    return dict(out=out, lse=lse)

  @jax.jit
  def both(wrt, rest, dout, dlse, key):
    (out, lse), vjp = jax.vjp(lambda wrt: forward(wrt, rest, key), wrt)
    grads, = vjp((dout, jnp.zeros_like(lse) if dlse is None else dlse))
    return out, lse, grads

  with jax.default_matmul_precision(case.precision):
    out, lse, grads = jax.device_get(
        both(wrt, rest, x["dout"], x.get("dlse"), dropout_key(case)))
  return dict(out=out, lse=lse, **{"d" + n: g for n, g in grads.items()})


def expected(case: Case, x, sequences, dtype=None):
  """The oracle's results, summed over what broadcasts, and their sizes.

  The size of a result is that of what may be rounded on the way to it.
  """
  f64 = lambda t: np.asarray(t).astype(np.float64)
  b, hq = (len(sequences) if case.packed else case.b), case.hq
  full = lambda name: (np.broadcast_to(f64(x[name]), (b, hq))
                       if name in x else None)
  left, right, *sink_tokens = case.window
  # The oracle's bias hides what the mask does.
  bias = f64(x["bias"]) if "bias" in x else None
  if "mask" in x:
    bias = np.where(x["mask"], 0 if bias is None else bias, -np.inf)
  if bias is not None:
    # 1s of the batch and head dimensions stay; those of sq and sk broadcast.
    bias = bias.reshape((1,) * (4 - bias.ndim) + bias.shape)
    bias = np.broadcast_to(bias, (*bias.shape[:2], case.sq, case.sk))
  key = None
  if case.dropout:
    key = jax.device_get(jax.random.bits(dropout_key(case), (2,), jnp.uint32))
  y = oracle.attention(
      *(f64(x[n]) for n in ("q", "k", "v", "dout")), x.get("dlse"),
      sequences=sequences,
      scale=case.dqk**-0.5 if case.scale is None else case.scale,
      mask=oracle.Mask(left, 0 if case.causal else right, *sink_tokens),
      cap=case.cap, bias=bias, slopes=full("alibi_slopes"), sink=full("sink"),
      key=key, dropout_p=case.dropout, skip=case.min_seqlen_q, dtype=dtype)
  want = {n: y[n] for n in ("out", "lse", "dq", "dk", "dv")}
  sizes = {n: np.abs(t).max(initial=0) for n, t in want.items()}
  rounding = {n: y["rounding"][n] for n in ("dq", "dk")}
  for name, source in (("alibi_slopes", "dslopes"), ("sink", "dsink")):
    if name in x:
      want["d" + name] = y[source] if x[name].ndim == 2 else y[source].sum(0)
      sizes["d" + name] = y[source + "_terms"].max(initial=0)
      rounding["d" + name] = y["rounding"][source]
  if "bias" in x:
    d = y["dbias"]
    shape = (1,) * (4 - x["bias"].ndim) + x["bias"].shape
    axes = tuple(i for i in range(4) if shape[i] == 1 and d.shape[i] > 1)
    want["dbias"] = d.sum(axes, keepdims=True).reshape(x["bias"].shape)
    sizes["dbias"] = np.abs(want["dbias"]).max(initial=0)
    rounding["dbias"] = y["rounding"]["dbias"].sum(axes)
  for name, t in rounding.items():
    sizes[name] += np.abs(t).max(initial=0)
  return want, sizes


class MhaTestCase(parameterized.TestCase):

  def check_hidden_keys(self, dim: int, hk: int):
    """What a mask of one row for all hides may hold anything.

    Of the first sequence the first rows see no key.
    """
    keys = jax.random.split(jax.random.key(0), 4)
    q, k, v, g = (jax.random.normal(key, (2, s, h, dim), jnp.bfloat16)
                  for key, s, h in zip(keys, (150, 264, 264, 150),
                                       (4, hk, hk, 4), strict=False))
    shown = jax.random.bernoulli(keys[0], 0.6, (2, 264)).at[1, 70:].set(False)
    shown = shown.at[0, :130].set(False)

    @jax.jit
    def gradients(hidden):
      k_, v_ = (jnp.where(shown[..., None, None], t, hidden) for t in (k, v))
      call = functools.partial(
          aiter.flash_attn_func, mask=shown[:, None, None], causal=True)
      return jax.vjp(call, q, k_, v_)[1](g)

    want, got = gradients(0.0), gradients(jnp.nan)
    for a, b in zip(got, want, strict=True):
      np.testing.assert_array_equal(a, b)
    self.assertFalse(jnp.any(got[0][0, :16]))

  def check(self, case: Case):
    """Compares every result of a case with the oracle."""
    x, sequences = make_inputs(case)
    got = run(case, x)
    want, sizes = expected(case, x, sequences)
    plain, _ = expected(case, x, sequences, DTYPES[case.dtype])
    if case.forward:
      want = {name: want[name] for name in ("out", "lse")}
    for name in case.constant:
      del want["d" + name]
    self.assertEqual(set(got), set(want))
    tf32 = case.dtype == "fp32" and case.precision == "default"
    for name, value in got.items():
      value, ref = np.asarray(value).astype(np.float64), want[name]
      self.assertEqual(value.shape, ref.shape, name)
      if not ref.size:
        continue
      hidden = np.isneginf(ref)
      np.testing.assert_array_equal(np.isneginf(value), hidden, err_msg=name)
      self.assertTrue(np.isfinite(value[~hidden]).all(), name)
      value, ref, low = (np.where(hidden, 0, t)
                         for t in (value, ref, plain[name]))
      error = np.abs(value - ref).max()
      if name == "lse" and not tf32:
        self.assertLessEqual(error, LSE_TOLERANCE * max(1, np.abs(ref).max()))
        continue
      limit = (2 * np.abs(low - ref).max() +
               (TF32_FLOOR if tf32 else FLOOR[case.dtype]) * sizes[name])
      self.assertLessEqual(error, limit + 1e-6, f"{name} of {case}")


FEATURES = {
    "causal": dict(causal=True),
    "window": dict(window=(7, 3)),
    "streaming": dict(window=(5, 2, 3)),
    "bias": dict(bias="bhqk"),
    "bias_broadcast": dict(bias="1hqk", bias_fp32=True),
    "mask": dict(mask="b11k"),
    "alibi": dict(alibi="bh"),
    "sink": dict(sink="h"),
    "soft_cap": dict(cap=5.0),
    "dropout": dict(dropout=0.17),
    "padded": dict(lengths=machine.size(
        ((150, 333), (203, 97)), ((11, 28), (20, 9)), ((40, 99), (71, 33)))),
    "packed": dict(packed=True, lengths=machine.size(
        ((70, 100), (1, 130), (0, 5), (131, 67)),
        ((9, 12), (1, 7), (0, 5), (6, 4)),
        ((70, 40), (1, 70), (0, 5), (20, 67)))),
    "gqa": dict(hq=4, hk=2),
    "mqa": dict(hq=3, hk=1),
    "unequal_dims": dict(dqk=machine.size(192, 24), dv=machine.size(128, 16)),
    "use_lse": dict(use_lse=True),
    "scale": dict(scale=0.3),
}
EXCLUSIVE = [
    {"window", "streaming"}, {"bias", "bias_broadcast"}, {"padded", "packed"},
    {"bias", "packed"}, {"bias_broadcast", "packed"}, {"mask", "packed"},
    {"gqa", "mqa"}]
PAIRS = machine.sample((
    pair for pair in itertools.combinations(FEATURES, 2)
    if set(pair) not in EXCLUSIVE), simulated=12)


class FeatureTest(MhaTestCase):

  @parameterized.parameters("bf16", "fp16", "fp32")
  def test_plain(self, dtype):
    self.check(Case(dtype=dtype))

  @parameterized.parameters(
      dict(causal=True, hq=4, hk=2, dqk=40, dv=24, use_lse=True),
      dict(window=(30, 3), scale=-0.3, precision="default"),
      FEATURES["padded"], FEATURES["packed"] | dict(causal=True, gaps=(3, 2)))
  def test_float32(self, **options):
    self.check(Case(dtype="fp32", **options))

  @parameterized.parameters(*FEATURES)
  def test_alone(self, feature):
    for dtype in machine.size(("bf16", "fp16"), ("fp16",), (machine.HALF,)):
      self.check(Case(dtype=dtype, **FEATURES[feature]))

  @parameterized.parameters(*PAIRS)
  def test_pair(self, first, second):
    self.check(Case(**FEATURES[first], **FEATURES[second]))

  @parameterized.parameters(*machine.sample(
      ("qk", "hqk", "11qk", "b1qk", "1h1k", "b1q1", "bh11"), simulated=4))
  def test_bias_shape(self, shape):
    self.check(Case(bias=shape, hq=2, hk=1))

  @parameterized.parameters(*machine.sample((
      ("qk", ""), ("hqk", "11qk"), ("11q1", "b11k"), ("b1qk", "1h1k"),
      ("b11k", "1hqk"), ("bhqk", "b1q1"), ("bh11", "")), simulated=4))
  def test_mask_shape(self, mask, bias):
    """Beside a bias of another shape; it is the bias's gradient that is cut."""
    self.check(Case(mask=mask, bias=bias, hq=2, hk=1, causal=True))

  @parameterized.product(d=(64, 128), dtype=(jnp.float32, jnp.bfloat16))
  def test_least_bias(self, d, dtype):
    """The least number of a type hides keys as masks of other libraries do."""
    q, k, v = (jax.random.normal(key, (2, s, 2, d), jnp.bfloat16) for key, s in
               zip(jax.random.split(jax.random.key(0), 3), (96, 160, 160)))
    shown = (jnp.arange(160) % 3 != 1).at[70:].set(False)[None, None, None]
    bias = jnp.where(shown, 0, jnp.finfo(dtype).min).astype(dtype)
    bias = jnp.broadcast_to(bias, (2, 1, 1, 160))
    got = aiter.flash_attn_func(q, k, v, bias=bias)
    want = aiter.flash_attn_func(
        q, k, v, mask=jnp.broadcast_to(shown, bias.shape))
    np.testing.assert_allclose(np.float32(got), np.float32(want), rtol=0,
                               atol=2e-2)

  def test_bias_that_broadcasts_over_queries(self):
    """Its gradient's sum is not taken in 16 bits."""
    self.check(Case(dtype=machine.HALF, b=1, sq=59, sk=26, dqk=64,
                    bias="1h1k", seed=1))

  @parameterized.parameters("h", "bh")
  def test_per_head_shape(self, shape):
    self.check(Case(alibi=shape, sink=shape, causal=True, b=3))


# AITER_CASES=2000 in the environment asks for so many random calls.
CASES = int(os.environ.get(
    "AITER_CASES", machine.size(200, 25, 6) * (20 if machine.ALL else 1)))
CASES_A_TEST = 10


def drawn(seed: int) -> Case:
  """A call that nobody chose: sizes, form and features drawn.

  Sizes are multiples of 8, which kernels' copies like, as often as others. Of
  features there are few more often than many: kernels are made for one or two.
  """
  rng = random.Random(seed)
  pick = rng.choice

  def size(most):
    n = rng.randint(1, most)
    return pick((n, -(-n // 8) * 8))

  most = machine.size(300, 24, 80)
  sq, sk, b, hk = size(most), size(most), rng.randint(1, 3), rng.randint(1, 2)
  if machine.GPU and not machine.SIMULATED and rng.random() < 0.1:
    sq += 1024  # No longer `short` for the kernels.
  dqk = machine.size(size(256), pick((5, 8, 16)),
                     pick((17, 40, 64, 96, 128, 192)))
  options = dict(
      b=b, sq=sq, sk=sk, hk=hk, hq=hk * rng.randint(1, 4 - hk), dqk=dqk,
      dv=pick((0, 0, *machine.size((33, 64, 128), (7, 16)))),
      dtype=pick(("bf16", machine.HALF)), causal=pick((False, True)),
      use_lse=pick((False, True)), seed=seed)
  form = pick(("dense", "dense", "padded", "packed"))
  if form != "dense":
    options["lengths"] = tuple(
        (rng.randint(0, sq), rng.randint(0, sk)) for _ in range(b))
  if form == "packed":
    options |= dict(packed=True, gaps=(rng.randint(0, 3), rng.randint(0, 3)),
                    min_seqlen_q=pick((0, 0, 4)))
  features = [
      dict(cap=pick((0.5, 3.0, 50.0))), dict(alibi=pick(("h", "bh"))),
      dict(sink=pick(("h", "bh"))), dict(dropout=pick((0.1, 0.5))),
      dict(scale=pick((-0.1, 0.3))),
      dict(window=pick(((-1, 3), (40, -1), (0, 0), (6, 2), (3, 1, 2),
                        (20, 0, 5))))]
  if form != "packed":
    features += [
        dict(bias=pick(("bhqk", "1hqk", "qk", "b1qk", "1h1k", "b1q1")),
             bias_fp32=pick((False, True))),
        dict(mask=pick(("b1qk", "b11k", "1hq1")))]
  for feature in rng.sample(features, pick((0, 1, 1, 1, 2, 2, 3, 5))):
    options |= feature
  return Case(**options)


class RandomTest(MhaTestCase):

  @parameterized.product(first=tuple(range(0, CASES, CASES_A_TEST)))
  def test_calls(self, first):
    for seed in range(first, min(first + CASES_A_TEST, CASES)):
      case = drawn(seed)
      with self.subTest(case=case):
        self.check(case)


@machine.where(not machine.SIMULATED)  # No kernel of ours runs.
class BlockTest(MhaTestCase):
  """The reference by blocks, made small; float32, which few kernels take."""

  def setUp(self):
    super().setUp()
    for name in ("_ONE_BLOCK", "_BLOCK_Q", "_BLOCK_K"):
      self.enter_context(mock.patch.object(reference, name, 8))
    jax.clear_caches()
    self.addCleanup(jax.clear_caches)

  def check_blocks(self, **options):
    small = dict(dtype="fp32", sq=20, sk=28, dqk=8)
    self.check(Case(**{**small, **options}))

  @parameterized.parameters(*FEATURES)
  def test_alone(self, feature):
    options = dict(FEATURES[feature])
    if "lengths" in options:
      options["lengths"] = ((11, 28), (20, 9))
    if "dqk" in options:
      options.update(dqk=24, dv=16)
    self.check_blocks(**options)

  @parameterized.parameters("", "packed")
  def test_x64(self, packed):
    """Integers stay 32 bits wide where JAX's default is 64."""
    with jax.enable_x64(True):
      self.check_blocks(causal=True, dropout=0.2, sink="h", packed=bool(packed),
                        lengths=((9, 12), (17, 20)) if packed else ())

  @parameterized.parameters(
      dict(causal=True, hq=4, hk=2, bias="b1qk", alibi="h", dropout=0.3),
      dict(window=(3, 0), cap=4.0, sink="bh", use_lse=True, bias="qk"),
      dict(mask="b1qk", bias="1h1k"), dict(mask="b11k", bias="b1q1", hk=1),
      dict(mask="1hq1", bias="bh11"),
      dict(packed=True, lengths=((9, 12), (0, 3), (17, 20)), gaps=(3, 2),
           causal=True, alibi="bh", sink="h", dropout=0.2, min_seqlen_q=4),
      dict(lengths=((3, 28), (20, 0)), window=(4, 4, 2), use_lse=True),
      dict(sq=1, sk=40, causal=True), dict(sq=40, sk=9, causal=True, sink="h"))
  def test_together(self, **options):
    self.check_blocks(**options)


# On a CPU the reference is one code for all of these; on a simulated GPU some
# are left to real ones.
TRAINING_MASKS = {
    dtype: machine.size(("full", "causal", "window", "packed", "gqa"), cpu, sim)
    for dtype, cpu, sim in (
        ("fp16", ("full", "causal"), ("full", "packed")),
        ("bf16", ("window", "packed", "gqa"), ("window", "gqa")))}


# Calls with few queries, of which sequences end anywhere.
DECODE = dict(
    forward=True, b=2, sq=1, sk=576, hq=4, hk=2, dqk=64,
    lengths=((1, 576), (1, 77)))
DECODE_OPTIONS = (
    dict(), dict(causal=True), dict(window=(40, -1)), dict(cap=3.0),
    dict(sink="h"), dict(sink="bh"), dict(alibi="h"), dict(alibi="bh"),
    dict(dqk=128), dict(dqk=192, dv=128), dict(dqk=40), dict(dqk=256),
    dict(sk=513, lengths=((1, 513), (1, 0))), dict(lengths=()), dict(hq=2),
    dict(sq=5, lengths=((5, 530), (5, 3)), causal=True),
    dict(sq=5, lengths=(), window=(99, 2), sink="bh", alibi="bh", cap=5.0),
    dict(sq=33, sk=512, lengths=(), causal=True, hq=6), dict(scale=-0.2),
    dict(b=1, sk=2048, lengths=(), hq=8, hk=1, dqk=128))


class DecodeTest(MhaTestCase):

  @parameterized.parameters(*(
      (dtype, options) for i, options in enumerate(DECODE_OPTIONS)
      for dtype in machine.size(
          ("bf16", "fp16"), ("bf16",), (("bf16", "fp16")[i % 2],))))
  def test_few_queries(self, dtype, options):
    self.check(Case(**{**DECODE, "dtype": dtype, **options}))

  def test_garbage_behind_the_keys(self):
    """NaN where a cache is not written yet."""
    x, sequences = make_inputs(Case(**DECODE))
    case = Case(**DECODE)
    want = expected(case, x, sequences)[0]["out"]
    for (_, length), *rows in zip(case.lengths, x["k"], x["v"]):
      for t in rows:
        t[length:] = np.nan
    out = run(case, x)["out"].astype(np.float64)
    np.testing.assert_allclose(out, want, rtol=0.02, atol=0.02)

  def test_mapped(self):
    """A mapped axis is more sequences."""
    q, k, v = (jax.random.normal(jax.random.key(i), shape, jnp.bfloat16)
               for i, shape in enumerate(
                   ((3, 2, 1, 4, 64), *[(3, 2, 512, 2, 64)] * 2)))
    got = jax.vmap(aiter.flash_attn_func)(q, k, v)
    one = [aiter.flash_attn_func(*t) for t in zip(q, k, v)]
    np.testing.assert_array_equal(got, jnp.stack(one))

  @parameterized.parameters(
      ("paged_attend", dict()), ("paged_attend", dict(causal=True)),
      ("paged_attend", dict(sq=16, causal=True)),
      ("paged_attend", dict(sq=16, hq=2)),
      ("mha_fwd", dict(sq=16, hq=2, causal=True)),
      ("paged_attend", dict(b=16, sq=33)), ("mha_fwd", dict(b=32, sq=33)),
      ("mha_fwd", dict(sq=65)), ("mha_fwd", dict(sk=511)),
      ("mha_fwd", dict(mask=(1, 1, 1, 1))),
      ("mha_fwd", dict(window_size=(9, 0, 4))))
  def test_which_kernel(self, op, options):
    """By sizes and options; what is differentiated has the ordinary one."""
    sizes = dict(b=2, sq=1, sk=512, hq=4) | options
    mask = sizes.pop("mask", None)
    b, sq, sk, hq = (sizes.pop(n) for n in ("b", "sq", "sk", "hq"))
    q = jax.ShapeDtypeStruct((b, sq, hq, 64), jnp.bfloat16)
    k = jax.ShapeDtypeStruct((b, sk, 2, 64), jnp.bfloat16)
    mask = None if mask is None else jnp.ones(mask, bool)
    call = lambda q, k: aiter.flash_attn_func(q, k, k, mask=mask, **sizes)
    program = lambda fn: set(re.findall(
        "aiter_([a-z]+_[a-z]+)", str(jax.make_jaxpr(fn)(q, k))))
    self.assertEqual(program(call), {op})
    self.assertEqual(
        program(jax.grad(lambda q, k: call(q, k).sum().astype(float))),
        {"mha_fwd", "mha_bwd"})


class ShapeTest(MhaTestCase):

  @parameterized.parameters(*machine.sample((
      (1, 1), (8, 8), (32, 32), (40, 40), (59, 59), (64, 64), (80, 80),
      (96, 96), (111, 111), (128, 128), (160, 160), (192, 128), (224, 224),
      (256, 256), (128, 64), (36, 100)), simulated=8))
  def test_head_dim(self, dqk, dv):
    self.check(Case(dqk=dqk, dv=dv, causal=True, b=1, hq=2, hk=1))

  @parameterized.parameters(*machine.sample((
      (1, 1), (1, 257), (113, 203), (128, 217), (211, 113), (256, 512),
      (512, 256), (1023, 1024), (1024, 1023)), simulated=5))
  def test_lengths(self, sq, sk):
    if sq * sk > machine.size(2**30, 2**17, 2**15):
      sq, sk = sq // 8, sk // 8
    self.check(Case(dtype=machine.HALF, b=1, sq=sq, sk=sk, causal=True))

  @parameterized.parameters(
      (dims, dtype, mask)
      for dims in ((64, 64), (128, 128), (256, 256), (192, 128))
      for dtype, masks in TRAINING_MASKS.items() for mask in masks)
  def test_training_shape(self, dims, dtype, mask):
    """What training runs: the shapes that have tuned kernels."""
    options = {
        "full": {}, "causal": dict(causal=True),
        "window": dict(window=(machine.size(200, 9, 40), 0)),
        "packed": dict(packed=True, causal=True, lengths=machine.size(
            ((300, 300), (1, 1), (0, 0), (517, 517)),
            ((9, 9), (1, 1), (13, 13)),
            ((130, 130), (1, 1), (0, 0), (20, 20)))),
        "gqa": dict(hq=8, hk=2, causal=True)}[mask]
    s = machine.size(777, 33, 150)
    self.check(Case(dtype=dtype, b=1, sq=s, sk=s, dqk=dims[0], dv=dims[1],
                    **options))

  @parameterized.parameters(
      dict(b=2, sk=150, lengths=((150, 140), (7, 33)), hq=3, hk=1),
      dict(b=2, sq=99, sk=99, packed=True, lengths=((66, 31), (33, 68)),
           gaps=(5, 3), window=(20, 9), hq=4),
      dict(b=1, sk=70, causal=True, window=(30, 0), use_lse=True),
      dict(b=1, sk=260, causal=True, hq=6))
  def test_ends_of_tiles(self, **options):
    """Where tiles of 32 and 128 are cut: padding, gaps, rows without a key."""
    for dim in (64, 128):
      self.check(Case(**dict(sq=150, dqk=dim, dtype=machine.HALF) | options))

  @parameterized.parameters("sq", "sk", "both")
  def test_empty(self, which):
    sq = 0 if which != "sk" else 5
    sk = 0 if which != "sq" else 5
    self.check(Case(sq=sq, sk=sk, sink="h", use_lse=True))

  def test_no_batch(self):
    out = aiter.flash_attn_func(*(jnp.zeros((0, 3, 2, 8), jnp.bfloat16),) * 3)
    self.assertEqual(out.shape, (0, 3, 2, 8))
    cu = jnp.zeros((1,), jnp.int32)
    out = aiter.flash_attn_varlen(
        *(jnp.ones((3, 2, 8), jnp.bfloat16),) * 3, cu, cu)
    self.assertTrue((out == 0).all())

  def test_lengths_of_jax_nn(self):
    """Lengths beyond the rows that there are mean all of them, as in jax.nn."""
    rng = np.random.default_rng(0)
    q, k, v = (jnp.asarray(rng.standard_normal((2, n, 4, 16)), jnp.bfloat16)
               for n in (9, 5, 5))
    run = jax.jit(lambda lengths_q, lengths_k: aiter.dot_product_attention(
        q, k, v, query_seq_lengths=lengths_q, key_value_seq_lengths=lengths_k))
    np.testing.assert_array_equal(
        run(jnp.array([2**31 - 1, 4]), jnp.array([99, 3])),
        run(jnp.array([9, 4]), jnp.array([5, 3])))

  def test_rows_that_see_nothing(self):
    """Causal with sq > sk: the first rows see no key."""
    case = Case(sq=machine.size(300, 30, 150), sk=machine.size(100, 10, 50),
                causal=True, use_lse=True, dropout=0.1)
    self.check(case)
    x, _ = make_inputs(case)
    got = run(case, x)
    blind = case.sq - case.sk
    self.assertTrue((got["out"][:, :blind] == 0).all())
    self.assertTrue(np.isneginf(got["lse"][:, :, :blind]).all())
    self.assertTrue((got["dq"][:, :blind] == 0).all())

  def test_rows_that_see_nothing_but_the_sink(self):
    case = Case(sq=machine.size(300, 30, 150), sk=machine.size(100, 10, 50),
                causal=True, sink="h")
    self.check(case)

  def test_bias_of_minus_infinity_hides(self):
    """A key with bias -inf is hidden; so may be a whole row."""
    case = Case(bias="b1qk", sq=12, sk=16)
    x, sequences = make_inputs(case)
    x["bias"] = np.where(
        np.random.default_rng(3).random(x["bias"].shape) < 0.4, -np.inf,
        x["bias"]).astype(x["bias"].dtype)
    x["bias"][1, :, 3] = -np.inf
    got, (want, _) = run(case, x), expected(case, x, sequences)
    self.assertTrue((got["out"][1, 3] == 0).all())
    for name in ("out", "dq", "dk", "dv", "dbias"):
      np.testing.assert_allclose(
          np.asarray(got[name], np.float64), want[name], atol=0.05,
          err_msg=name)

  @parameterized.product(
      low=[-1e4, -1e9, -1e30, -3.3e38], wide=[False, True],
      shape=["b1qk", "b11k"],
      dim=machine.sample([64, 128, 256], 1) if machine.GPU else [16])
  def test_rows_of_low_biases(self, low, wide, shape, dim):
    """Padding on the left by a bias that is finite, as models have it.

    A row may see nothing else; nothing says what it gets, but it is a mean of
    values, and spoils no gradient of what others see.
    """
    case = Case(bias=shape, bias_fp32=wide, constant=("bias",), dqk=dim,
                causal=True)
    x, _ = make_inputs(case)
    pad = np.arange(case.sk) < np.array([[case.sk * 3 // 4], [0]])
    seen = ~pad[:, None, None] & np.ones(x["bias"].shape, bool)
    x["bias"] = np.where(seen, 0, low).astype(x["bias"].dtype)
    visible = np.tril(np.ones((case.sq, case.sk), bool), case.sk - case.sq)
    blind = ~(seen & visible).any((1, 3))
    x["dout"][blind] = 0
    got = run(case, x)
    most = np.abs(x["v"].astype(np.float64)).max()
    self.assertLess(np.abs(got["out"].astype(np.float64)).max(), 1.01 * most)
    del x["bias"]
    want = run(dataclasses.replace(case, bias="", mask=shape, constant=()),
               x | {"mask": seen})
    for name in ("out", "dq", "dk", "dv"):
      a, b = (t[name].astype(np.float64) for t in (got, want))
      if name == "out":
        a, b = a[~blind], b[~blind]
      np.testing.assert_allclose(a, b, atol=0.02, err_msg=name)

  @parameterized.parameters("mask", "bias")
  def test_hidden_keys_hold_anything(self, by):
    """NaN in keys and values that no row sees reaches no result."""
    case = Case(**{by: "b11k"}, causal=True, hq=2, hk=1)
    x, _ = make_inputs(case)
    hidden = np.arange(case.sk) >= np.array([[case.sk // 3], [case.sk - 2]])
    x[by] = (~hidden if by == "mask" else np.where(hidden, -np.inf, 0).astype(
        x[by].dtype))[:, None, None]
    clean = run(case, x)
    for name in "kv":
      x[name][hidden] = np.nan
    dirty = run(case, x)
    for name, value in clean.items():
      self.assertTrue(np.isfinite(value).all(), name)
      np.testing.assert_array_equal(value, dirty[name], err_msg=name)

  @parameterized.parameters("", "h")
  def test_what_is_behind_hidden_keys(self, sink):
    """A tile with hidden keys ends with the keys: the next batch is foreign."""
    case = Case(mask="b11k", sink=sink)
    x, _ = make_inputs(case)
    clean = run(case, x)
    for name in "kv":
      x[name][1] = np.nan
    dirty = run(case, x)
    for name in ("out", "dq", "dk", "dv"):
      np.testing.assert_array_equal(clean[name][0], dirty[name][0],
                                    err_msg=name)

  def test_padding_mask_with_nans(self):
    """A mask of queries by keys: hidden keys and rows hold NaN, values do not.

    As Tokamax tests its functions: what real rows get is as without them.
    """
    case = Case(mask="b1qk")
    x, _ = make_inputs(case)
    real = {n: np.arange(s) < np.array([[s // 2], [s - 3]])
            for n, s in (("q", case.sq), ("k", case.sk))}
    x["mask"] = real["q"][:, None, :, None] & real["k"][:, None, None]
    clean = run(case, x)["out"]
    x["q"][~real["q"]] = np.nan
    x["k"][~real["k"]] = np.nan
    x["v"][~real["k"]] = ml_dtypes.finfo(x["v"].dtype).max
    dirty = run(case, x)["out"]
    np.testing.assert_array_equal(clean[real["q"]], dirty[real["q"]])
    self.assertTrue((dirty[~real["q"]] == 0).all())

  def test_garbage_outside_sequences_is_ignored(self):
    """Padding may hold NaN: it reaches no result."""
    case = Case(**FEATURES["packed"], gaps=(3, 5), causal=True)
    x, sequences = make_inputs(case)
    clean = run(case, x)
    owned = {n: np.zeros(len(x[n]), bool) for n in ("q", "k")}
    for q0, nq, k0, nk in sequences:
      owned["q"][q0:q0 + nq] = True
      owned["k"][k0:k0 + nk] = True
    for name in ("q", "k", "v", "dout"):
      x[name][~owned["q" if name in ("q", "dout") else "k"]] = np.nan
    dirty = run(case, x)
    for name, value in clean.items():
      np.testing.assert_array_equal(value, dirty[name], err_msg=name)

  @parameterized.parameters("padded", "packed")
  def test_lengths_end_with_the_rows(self, which):
    """The last sequence's lengths, which only the device sees, are too large.
    """
    case = Case(**FEATURES[which], causal=True)
    fits, _ = make_inputs(case)
    beyond = dict(fits)
    for name in ("q", "k"):
      cu = fits.get(f"cu_seqlens_{name}")
      if cu is None:
        continue
      if not case.packed:
        cu[-1] = cu[-2] + fits[name].shape[1]
      beyond[f"cu_seqlens_{name}"] = np.append(cu[:-1], cu[-1:] + 9)
    got = run(case, beyond)
    for name, value in run(case, fits).items():
      np.testing.assert_array_equal(value, got[name], err_msg=name)


class ReviewTest(MhaTestCase):
  """Findings on the upstream attempt, each a test of what must hold here.

  Those of its C++ (host reads of device memory, allocation in handlers, abort,
  exceptions, static device facts) are third_party/aiter/src/mha_test.cc's and
  aiter_gpu_test.py's.
  """

  def test_gap_dropout_numbers(self):
    """Dropout is checked element by element, gradients included."""
    for p in (0.1, 0.5, 0.9):
      self.check(Case(dropout=p, causal=True))

  def test_gap_logits_soft_cap(self):
    for cap in (1.0, 30.0, 1e6):
      self.check(Case(cap=cap, scale=1.0))

  def test_gap_zero_tensors(self):
    """Both values of zero_tensors give zeros where no sequence is."""
    case = Case(packed=True, lengths=((5, 5), (3, 4)), gaps=(2, 1))
    x, _ = make_inputs(case)
    args = {n: t for n, t in x.items() if n != "dout"}
    outs = [aiter.flash_attn_varlen(**args, zero_tensors=z)
            for z in (False, True)]
    np.testing.assert_array_equal(*outs)
    self.assertTrue((outs[0][5:7] == 0).all())

  def test_gap_min_seqlen_q(self):
    self.check(Case(packed=True, lengths=((5, 9), (1, 4), (2, 2), (7, 3)),
                    min_seqlen_q=2, sink="h", use_lse=True))

  def test_gap_gqa_numbers(self):
    """Grouped and multi-query heads are compared by value, with gradients."""
    for hq, hk in ((8, 8), (8, 4), (8, 2), (8, 1)):
      self.check(Case(hq=hq, hk=hk, causal=True, b=1))

  def test_finding_2_2_key_may_be_traced(self):
    """No host reads the random state: the key is data under jit."""
    x, _ = make_inputs(Case())
    f = jax.jit(lambda key: aiter.flash_attn_func(
        x["q"], x["k"], x["v"], dropout_p=0.5, dropout_key=key))
    a, b, c = f(jax.random.key(1)), f(jax.random.key(2)), f(jax.random.key(1))
    np.testing.assert_array_equal(a, c)
    self.assertFalse((a == b).all())

  def test_finding_2_5_mask_comes_from_the_key_alone(self):
    """Same key, same mask, in every call; no clock is involved."""
    x, _ = make_inputs(Case())
    masks = [aiter.flash_attn_func(
        x["q"], x["k"], x["v"], dropout_p=0.3, dropout_key=jax.random.key(7),
        return_attn_probs=True)[1] for _ in range(3)]
    np.testing.assert_array_equal(masks[0], masks[1])
    np.testing.assert_array_equal(masks[0], masks[2])

  def test_finding_4_1_cross_attention_causal(self):
    """sq and sk are never mistaken for each other."""
    short, long = machine.size((100, 700), (8, 40), (20, 150))
    for sq, sk in (short, long), (long, short):
      self.check(Case(sq=sq, sk=sk, causal=True, dqk=machine.size(128, 16)))

  def test_finding_4_4_alibi_gradient_is_not_dropped(self):
    case = Case(alibi="h", causal=True)
    x, _ = make_inputs(case)
    self.assertGreater(np.abs(run(case, x)["dalibi_slopes"]).max(), 0)
    self.check(case)

  def test_finding_4_5_default_scale(self):
    """One default, 1 / sqrt(dqk), dense and packed, padded dims or not."""
    for packed in (False, True):
      self.check(Case(dqk=11, dv=5, packed=packed,
                      lengths=((6, 7), (4, 9)) if packed else ()))

  def test_varlen_lse_covers_every_row(self):
    """Log-sum-exp is [hq, total_q], not [hq, max_seqlen_q]."""
    case = Case(**FEATURES["packed"])
    x, _ = make_inputs(case)
    _, lse = aiter.flash_attn_varlen(
        x["q"], x["k"], x["v"], x["cu_seqlens_q"], x["cu_seqlens_k"],
        max_seqlen_q=1, max_seqlen_k=1, return_lse=True)
    self.assertEqual(lse.shape, (case.hq, len(x["q"])))

  def test_bound_beside_an_open_number_of_sequences(self):
    """What the mean is is not known then; no bound is believed."""
    b, = jax.export.symbolic_shape("b")
    jax.export.export(
        jax.jit(lambda t, cu: aiter.flash_attn_varlen(t, t, t, cu, cu, 64, 64)),
        platforms=["cpu"])(jax.ShapeDtypeStruct((70, 2, 16), jnp.float32),
                           jax.ShapeDtypeStruct((b + 1,), jnp.int32))

  def test_masks_agree_with_the_oracle(self):
    """return_attn_probs gives exactly the mask that the numbers come from."""
    case = Case(dropout=0.25, hq=3, hk=3, sk=machine.size(333, 27, 99))
    x, _ = make_inputs(case)
    key = jax.random.bits(dropout_key(case), (2,), jnp.uint32)
    _, mask = aiter.flash_attn_func(
        x["q"], x["k"], x["v"], dropout_p=case.dropout,
        dropout_key=dropout_key(case), return_attn_probs=True)
    for n in range(case.b):
      for h in range(case.hq):
        np.testing.assert_array_equal(
            mask[n, h], oracle.keep_mask(
                key, n, h, case.sq, case.sk, case.dropout))

  @parameterized.parameters(False, True)
  def test_mask_from_an_origin(self, packed):
    """Blocks of a whole drop what it drops there, in both passes.

    All probabilities are 1 / n and v, k and dout such that out, dq and dv show
    the mask: where it keeps, by its sign, and how often it keeps a key.
    """
    n, heads, p = 64, 2, 0.25
    origins = [[(3, 8), (70_001, 64)], [(n, 40_000), (0, 24)]]
    key = (123456789, 3987654321)
    state = np.array([[(*key, b, h, *origins[b][h]) for h in range(heads)]
                      for b in range(2)], np.uint32)
    one = np.broadcast_to(np.eye(n, dtype=ml_dtypes.bfloat16)[:, None],
                          (2, n, heads, n))
    cu = {}
    if packed:
      one = one.reshape(2 * n, heads, n)
      cu = dict.fromkeys(("cu_seqlens_q", "cu_seqlens_k"),
                         np.arange(3, dtype=np.int32) * n)

    @jax.jit
    def both(q, k, v, state, cu):
      out, vjp = jax.vjp(lambda *qkv: op.mha(
          types.Config(1.0, dropout_p=p),
          types.Operands(*qkv, **cu, dropout_state=state))[0], q, k, v)
      return out, *vjp(jnp.ones_like(out))

    results = jax.device_get(both(jnp.zeros_like(one), one, one, state, cu))
    out, dq, _, dv = (t.reshape(2, n, heads, n) for t in results)
    for b in range(2):
      for h in range(heads):
        keep = oracle.keep_mask(key, b, h, n, n, p, origins[b][h])
        np.testing.assert_array_equal(out[b, :, h] > 0, keep)
        np.testing.assert_array_equal(dq[b, :, h] > 0, keep)
        np.testing.assert_allclose(
            dv[b, :, h, 0], keep.sum(0) / (n * (1 - p)), rtol=2**-7)

  def test_repeatable(self):
    """Backward has the same bits every time, deterministic or not."""
    case = Case(hq=4, hk=1, bias="qk", sink="h", alibi="h")
    x, _ = make_inputs(case)
    a, b = run(case, x), run(case, x)
    for name, value in a.items():
      np.testing.assert_array_equal(value, b[name], err_msg=name)

  def test_plain_jnp_formula(self):
    """The measure itself: jnp's plain formula is no better than half of it."""
    # XLA's transposes of other sizes break a rule of the simulated GPU.
    sizes = machine.size({}, {}, dict(sq=64, sk=128))
    for dtype in ("bf16", "fp16"):
      case = Case(dtype=dtype, causal=True, **sizes)
      x, sequences = make_inputs(case)
      want, _ = expected(case, x, sequences)
      low, _ = expected(case, x, sequences, DTYPES[dtype])
      mask = oracle.Mask(right=0).visible(case.sq, case.sk)

      def formula(q, k, v):
        s = jnp.einsum("bqhd,bkhd->bhqk", q, k) * case.dqk**-0.5
        s = jnp.where(mask, s, -jnp.inf)
        return jnp.einsum("bhqk,bkhd->bqhd", jax.nn.softmax(s), v)

      out, vjp = jax.vjp(formula, *(jnp.asarray(x[n]) for n in "qkv"))
      got = dict(zip(("out", "dq", "dk", "dv"),
                     (out, *vjp(jnp.asarray(x["dout"])))))
      mine = run(case, x)
      for name, value in got.items():
        error = np.abs(np.asarray(value, np.float64) - want[name]).max()
        measure = np.abs(low[name] - want[name]).max()
        floor = FLOOR[dtype] * np.abs(want[name]).max()
        self.assertLessEqual(measure, 2 * error + floor, name)
        ours = np.abs(np.asarray(mine[name], np.float64) - want[name]).max()
        self.assertLessEqual(ours, 2 * error + floor, name)


if __name__ == "__main__":
  absltest.main()
