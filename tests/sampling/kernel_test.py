# SPDX-License-Identifier: Apache-2.0
"""Sampling's kernels without a GPU, in Triton's interpreter.

Rows are divided into parts, and parts into tiles, that are cut in some cases.
"""

import ml_dtypes
import numpy as np
from absl.testing import absltest, parameterized
from harness.triton_interpreter import Tensor, gpu_arithmetic
from sampling import oracle

# isort: split
from third_party.aiter.kernels.sampling import (
    family,
    sampling,
    select,
    threshold,
)

_BF16, _F32 = ml_dtypes.bfloat16, np.float32
_NAN, _INF = float("nan"), float("inf")


def _new(*shape, dtype):
  """What no kernel writes is seen."""
  return Tensor(np.full(shape, 77, dtype))


class Call:
  """The arrays of a call, and the kernels that they share."""

  def __init__(self, logits, features=(), parts=2, tile=128, **operands):
    b, v = logits.shape
    self.b, self.parts, self.tile = b, parts, tile
    self.per_part = -(-v // (parts * tile)) * tile
    self.flags = sum(family.FEATURES[f] for f in features)
    self.arrays = dict(
        logits=logits, best=np.full((b, 2, parts), 77, np.int64),
        maxima=np.full((b, parts, tile // 8), 77, np.int64),
        histogram=np.full((b, parts, 2048), 77, np.int64),
        sums=np.full((b, parts, 16), 77, np.int64),
        candidates=np.full((b, 16384), 1 << 30, np.int32),
        state=np.full((b, 16), 77, np.int64), tokens=np.full(b, 77, np.int32),
        **{n: np.zeros(1, t) for n, t in dict(
            mask=np.int32, exponentials=_F32, keys=np.uint32, temperature=_F32,
            top_k=np.int32, top_p=_F32, min_p=_F32).items()})
    self.arrays |= operands
    self.arrays = {n: Tensor(t) for n, t in self.arrays.items()}
    self.numbers = dict(rows=b, cols=v, parts=parts, per_part=self.per_part,
                        k=0, flags=self.flags, MAXIMA=tile // 8,
                        WIDTH=8, TILES=2,
                        BITS=16 if logits.dtype == _BF16 else 32)

  def __getitem__(self, name):
    return self.arrays[name].array

  def run(self, kernel, grid, **more):
    given = {**self.arrays, **self.numbers, **more}
    with gpu_arithmetic(), np.errstate(all="ignore"):
      kernel[grid](**{n: given[n] for n in kernel.arg_names if n in given})

  def gather(self, **k):
    """The kernels that list the columns from a bound on."""
    self.run(threshold.sampling_bound, (self.b,), STEP=2, **k)
    self.run(threshold.sampling_gather, (self.b, self.parts))

  def limits(self):
    """The kernels that find from which composite on columns are kept."""
    per_part = (self.b, self.parts)
    self.run(threshold.sampling_weigh, per_part, TILE=self.tile)
    self.run(threshold.sampling_histogram, per_part, TILE=self.tile,
             RETURNS=self.b % 2 == 0)
    for phase in range(1 + bool(self.flags & family.FEATURES["k_first"])):
      self.run(threshold.sampling_bracket, (self.b,), STEP=2, phase=phase)
      self.run(threshold.sampling_collect, per_part, TILE=self.tile)
      self.run(threshold.sampling_threshold, (self.b,), TILE=1024)

  def largest(self):
    self.run(sampling.sampling_largest, (self.b, self.parts))

  def pick(self, plane):
    self.run(sampling.sampling_pick, (self.b,), plane=plane)
    return self["tokens"]


def _keys(b):
  return np.random.default_rng(9).integers(0, 2**32, (b, 4), dtype=np.uint32)


def _bits(allow):
  """A mask of bool [b, v]."""
  padded = np.pad(allow, ((0, 0), (0, -allow.shape[1] % 32)))
  words = np.packbits(padded, axis=-1, bitorder="little")
  return np.ascontiguousarray(words).view(np.int32)


def _draw(logits, features=(), parts=2, tile=128, **options):
  """The kernels' tokens, and the oracle's."""
  b, v = logits.shape
  aligned = ["aligned"] if v % 8 == 0 else []
  names = {n: True for n in ("top_k", "top_p", "min_p") if n in options}
  full = {n: np.full(b, t, np.int32 if n == "top_k" else _F32)
          for n, t in options.items()
          if n in (*names, "temperature")}
  full.setdefault("temperature", np.ones(b, _F32))
  keys = _keys(b)
  exponentials = oracle.exponential_of(oracle.words_of(keys, v))
  allow = options.get("allow")
  operands = dict(full, keys=keys)
  if allow is not None:
    operands["mask"] = _bits(allow)
  if "given" in features:
    exponentials = np.random.default_rng(1).exponential(
        size=(b, v)).astype(_F32)
    operands["exponentials"] = exponentials
  call = Call(logits, [*aligned, *names, *features,
                       *(["mask"] if allow is not None else [])],
              parts, tile, **operands)
  call.largest()
  if "top_k" in options or "top_p" in options:
    call.gather()
    call.limits()
  call.run(sampling.sampling_race, (b, parts), TILE=tile)
  want, _ = oracle.sample(
      logits, exponentials, order="top_k_first" if "k_first" in features
      else "joint", probs="probs" in features, **full, allow=allow)
  return call.pick(1), want


def _normal(b, v, dtype=_F32, scale=2.0, seed=3):
  rng = np.random.default_rng(seed)
  return (rng.standard_normal((b, v)) * scale).astype(dtype)


class SamplingKernelTest(parameterized.TestCase):

  def check(self, logits, *args, **options):
    got, want = _draw(logits, *args, **options)
    np.testing.assert_array_equal(got, want, f"{args} {options}")

  @parameterized.parameters(
      (_BF16, 1, ()), (_F32, 111, ()), (_BF16, 600, ()),
      (_F32, 320, ("given",)))
  def test_draws(self, dtype, v, features):
    self.check(_normal(3, v, dtype), features)
    self.check(_normal(3, v, dtype), features, temperature=0.6, min_p=0.2)
    self.check(_normal(3, v, dtype), features, temperature=0)

  @parameterized.parameters(
      dict(top_k=9), dict(top_p=0.7), dict(top_k=20, top_p=0.8),
      dict(top_k=12, top_p=0.8, k_first=True), dict(top_p=0),
      dict(top_k=0, top_p=0.999), dict(top_k=1 << 30, top_p=1),
      dict(top_k=3, top_p=1, k_first=True),
      dict(top_k=16, top_p=0.99, temperature=5, min_p=0.1))
  def test_limits(self, **limits):
    features = ("k_first",) if limits.pop("k_first", False) else ()
    self.check(_normal(3, 520), features, **limits)
    self.check(_normal(2, 33, _BF16), features, **limits)

  @parameterized.parameters(dict(top_k=5), dict(top_p=0.6),
                            dict(top_k=9, top_p=0.9, k_first=True))
  def test_probs(self, **limits):
    features = ("k_first",) if limits.pop("k_first", False) else ()
    p = np.exp(_normal(3, 300))
    p[:, ::7] = 0
    p[1] *= 1e-6
    p[2] = 0
    self.check(p, ("probs", *features), **limits)

  def test_ties(self):
    """Equal columns are kept, all."""
    flat = np.zeros((3, 300), _F32)
    flat[1, ::3] = 1
    flat[2, 5] = 2
    self.check(flat, top_k=7, top_p=0.9)
    self.check(flat, top_p=0.3)

  def test_spread(self):
    """Bins from one to all; numbers that differ in their last bit."""
    for scale in (1e-30, 1e-3, 1e30):
      self.check(_normal(2, 500, scale=scale), top_k=33)
      self.check(_normal(2, 500, scale=scale), top_p=0.5,
                 temperature=scale)
    near = (np.float32(5).view(np.int32) + np.random.default_rng(0).permutation(
        500)).astype(np.int32).view(_F32)[None]
    self.check(near, top_k=77)

  def test_dead_columns(self):
    logits = _normal(7, 200)
    logits[0, ::2] = -_INF
    logits[1, 5:] = _NAN
    logits[2, [3, 9, 50]] = _INF
    logits[3] = -_INF
    logits[4, 1:] = -_INF
    logits[5, ::3] = -0.0
    logits[6, 4] = np.finfo(_F32).max
    logits[6, 5] = np.finfo(_F32).min
    allow = np.random.default_rng(2).random((7, 200)) < 0.3
    allow[5] = False
    for limits in (dict(top_k=3, top_p=0.9), dict(temperature=0)):
      self.check(logits, **limits)
      self.check(logits, allow=allow, **limits)

  @parameterized.parameters(_BF16, _F32)
  def test_largest(self, dtype):
    logits = _normal(4, 200, dtype)
    logits[1, [7, 150]] = 99
    logits[2] = -_INF
    logits[3, 0] = _NAN
    call = Call(logits, ["aligned"])
    call.largest()
    np.testing.assert_array_equal(
        call.pick(0), [np.argmax(logits[0]), 7, -1,
                       np.nanargmax(logits[3].astype(_F32))])

  @parameterized.parameters((_BF16, 16), (_F32, 60))
  def test_top_k(self, dtype, k):
    x = _normal(7, 300, dtype)
    x[1] = x[1].round()
    x[2, [4, 9]], x[2, [5, 6]] = _NAN, _INF
    x[3] = -_INF
    x[4] = _NAN
    x[5] = np.where(np.arange(300) % 2, 0.0, -0.0)
    x[6, 3:] = -_INF
    call = Call(
        x, ["ranked", "top_k"],
        values=np.full((7, k), 77, dtype), tokens=np.full((7, k), 77, np.int32))
    call.largest()
    call.gather(k=k)
    wide = x.astype(_F32)
    order = np.where(wide.view(np.int32) < 0,
                     wide.view(np.int32) ^ 0x7FFFFFFF, wide.view(np.int32))
    want = np.argsort(-order.astype(np.int64), 1, "stable")[:, :k]
    listed = call["state"][:, 7].copy()
    # Of more than the list holds the row itself is read.
    for found in (listed, 1 << 20)[:1 + (k == 16)]:
      call["state"][:, 7] = found
      call.run(sampling.sampling_rank, (7,), COLS=128, k=k)
      np.testing.assert_array_equal(call["tokens"], want)
      np.testing.assert_array_equal(
          call["values"].astype(_F32), np.take_along_axis(wide, want, 1))

  # A list of all, of some, of too many; a k too large for one.
  @parameterized.parameters((20, 300, _F32), (20, 9001, _BF16),
                            (600, 9001, _F32), (3000, 9001, _BF16))
  def test_select(self, k, cols, dtype):
    x = _normal(5, cols, dtype)
    x[1] = np.round(x[1].astype(_F32))
    x[2, [4, 9]], x[2, [5, 6]] = _NAN, _INF
    x[3] = -_INF
    spans = np.array([[0, cols], [9, cols - 99], [2, 250], [250, cols],
                      [9, 9]], np.int32)
    call = Call(x, spans=spans, tokens=np.full((5, k), 77, np.int32))
    call.run(select.sampling_select, (5,), TILE=4096, k=k)
    for got, v, (begin, end) in zip(call["tokens"], x.astype(_F32), spans):
      v = v[begin:end]
      order = np.lexsort((-np.nan_to_num(v, nan=0), ~np.isnan(v)))
      want = begin + np.sort(order[:k])
      np.testing.assert_array_equal(got[:want.size], want)
      self.assertTrue((got[want.size:] == -1).all())


if __name__ == "__main__":
  absltest.main()
