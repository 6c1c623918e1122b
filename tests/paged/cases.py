# SPDX-License-Identifier: Apache-2.0
"""Calls of attention over paged caches, and their arrays.

Pages lie in any order; some are shared, some absent, and what nobody owns
holds NaN: what is read beyond a sequence's own spoils the result.
"""

import dataclasses
import functools
import itertools

import jax.numpy as jnp
import ml_dtypes
import numpy as np
from cache import oracle as cache_oracle
from harness.cases import DTYPES, check_error
from paged import oracle

import jax
from jax.experimental import aiter

BYTES = {"int8": np.int8, "e4m3fn": ml_dtypes.float8_e4m3fn,
         "e4m3fnuz": ml_dtypes.float8_e4m3fnuz, "e5m2": ml_dtypes.float8_e5m2}


@dataclasses.dataclass(frozen=True)
class Case:
  """A call.

  lengths: (queries, keys) of each sequence. tokens, pages, width: sizes of the
  arrays, where other lengths are to have the same; else as they need.
  """
  dtype: str = "bf16"
  lengths: tuple[tuple[int, int], ...] = ((1, 37), (1, 1), (1, 64), (1, 0))
  hq: int = 4
  hk: int = 2
  d: int = 64
  dv: int = 0
  page: int = 16
  layout: str = "NHD"
  cache: str = ""
  scale: str = "none"
  window: tuple[int, int] = (-1, -1)
  soft_cap: float = 0.0
  sinks: bool = False
  slopes: bool = False
  lse: bool = True
  causal: bool = True
  decode: bool = True
  holes: bool = False
  softmax_scale: float | None = None
  tokens: int = 0
  pages: int = 0
  width: int = 0


def cache_of(shape, dtype, rng):
  """Numbers of a cache."""
  if dtype == np.int8:
    return (4 * rng.standard_normal(shape)).round().astype(np.int8)
  return rng.standard_normal(shape, np.float32).astype(dtype)


class Problem:
  """The arrays of a case."""

  def __init__(self, case: Case, seed: int = 0):
    rng = np.random.default_rng(seed)
    c, own = case, DTYPES[case.dtype]
    dtype = BYTES.get(c.cache, own)
    dv = c.dv or c.d
    sq, sk = (np.array(t) for t in zip(*c.lengths))
    self.lengths = sk.astype(np.int32)
    self.cu = np.concatenate([[0], np.cumsum(sq)]).astype(np.int32)
    # Some rows are of no sequence.
    tokens = c.tokens or int(self.cu[-1]) + (0 if c.decode else 3)
    self.q = rng.standard_normal(
        (tokens, c.hq, c.d), np.float32).astype(own)
    count = -(-np.maximum(sk, 0) // c.page)
    width = c.width or int(count.max()) + 1
    pages = c.pages or int(count.sum()) + 3
    order = rng.permutation(pages)
    self.table = rng.integers(-9, 2 * pages, (len(sq), width)).astype(np.int32)
    used = 0
    for i, n in enumerate(count):
      self.table[i, :n] = order[used:used + n]
      used += n
    if c.holes:
      for i, n in enumerate(count):
        if n > 1:
          self.table[i, 0] = (-1, pages, 2**31 - 1, -2**31)[i % 4]
          if n > 2:  # A page of another's.
            self.table[i, 2] = order[0]
    if c.layout == "heads_first":
      shapes = ((c.hk, pages, c.page, c.d), (c.hk, pages, c.page, dv))
    else:
      shapes = cache_oracle.shapes(
          c.layout, pages, c.page, c.hk, c.d, dv, dtype)
    self.k, self.v = (
        None if s is None else cache_of(s, dtype, rng) for s in shapes)
    shape = {"none": None, "tensor": (), "head": (c.hk,),
             "page": (pages, c.hk), "token": (pages, c.hk, c.page)}[c.scale]
    if c.layout == "heads_first" and c.scale == "token":
      shape = (c.hk, pages, c.page)
    self.k_scale, self.v_scale = (
        None if shape is None else
        np.float32(rng.uniform(0.5, 2.0, shape)) for _ in range(2))
    self.spoil(case, pages)
    self.sinks = rng.standard_normal(c.hq).astype(np.float32)
    self.slopes = rng.uniform(0, 0.3, c.hq).astype(np.float32)
    self.case = case

  def spoil(self, case, pages):
    """NaN where no sequence has a token."""
    own = np.zeros((pages, case.page), bool)
    for row, length in zip(self.table, self.lengths):
      for j in range(max(int(length), 0)):
        page = row[j // case.page] if j // case.page < len(row) else -1
        if 0 <= page < pages:
          own[page, j % case.page] = True
    if case.scale == "token":
      hidden = ~own[None] if case.layout == "heads_first" else ~own[:, None]
      for scale in (self.k_scale, self.v_scale):
        scale[np.broadcast_to(hidden, scale.shape)] = np.nan
    if self.k.dtype == np.int8:
      return
    nan = self.k.dtype.type(np.nan)
    # Where they are: as those of arrays of places.
    places = (None if t is None else np.arange(t.size).reshape(t.shape)
              for t in (self.k, self.v))
    at_k, at_v = oracle.views(case.layout)(*places, *np.nonzero(~own))
    self.k.reshape(-1)[at_k] = nan
    (self.k if self.v is None else self.v).reshape(-1)[at_v] = nan

  def scores(self):
    c = self.case
    window = c.window
    if not c.decode and c.causal:
      window = (window[0], 0)
    return dict(
        softmax_scale=c.softmax_scale, window=window, soft_cap=c.soft_cap,
        sinks=self.sinks if c.sinks else None,
        slopes=self.slopes if c.slopes else None,
        k_scale=1.0 if self.k_scale is None else self.k_scale,
        v_scale=1.0 if self.v_scale is None else self.v_scale)

  def exact(self, dtype=np.float64):
    c = self.case
    return oracle.paged(
        self.q, self.k, self.v, c.layout, self.table.tolist(), self.lengths,
        self.cu, c.hk, dtype=dtype, dv=c.dv or c.d, **self.scores())


def call(p: Problem):
  """(function, keywords, arrays) of a problem's call."""
  c = p.case
  options = dict(layout=c.layout, window_size=c.window,
                 softmax_scale=c.softmax_scale, return_lse=c.lse)
  arrays = dict(q=p.q, k_cache=p.k, v_cache=p.v)
  names = ("sink", "k_scale", "v_scale")
  if c.decode:
    options |= dict(logits_soft_cap=c.soft_cap)
    arrays |= dict(block_tables=p.table, context_lens=p.lengths)
    fn = aiter.paged_attention_decode
  else:
    options |= dict(softcap=c.soft_cap, causal=c.causal)
    arrays |= dict(cu_seqlens_q=p.cu, seqused_k=p.lengths,
                   block_table=p.table)
    names = ("sinks", "k_descale", "v_descale")
    fn = aiter.unified_attention
  given = (p.sinks if c.sinks else None, p.k_scale, p.v_scale)
  arrays |= {n: t for n, t in zip(names, given) if t is not None}
  if c.slopes:
    arrays["alibi_slopes"] = p.slopes
  return fn, options, {n: jnp.asarray(t) for n, t in arrays.items()}


# Values of each option, the first its default.
RAGGED = ((5, 21), (1, 40), (17, 17), (9, 4), (0, 12), (3, 0), (20, 50))
OPTIONS = dict(
    dtype=("bf16", "fp16", "fp32"),
    lengths=(Case().lengths, ((1, 300), (1, 5)), ((1, 17),)),
    hq_hk=((4, 2), (2, 2), (12, 1), (40, 2)),
    d=(64, 128, 80, 20, 256),
    dv=(0, 32),
    page=(16, 1, 7, 64, 256),
    layout=("NHD", "HND", "x", "asm"),
    cache=("", *BYTES),
    scale=("none", "tensor", "head", "page", "token"),
    window=((-1, -1), (9, -1), (0, 3)),
    soft_cap=(0.0, 3.0),
    sinks=(False, True),
    slopes=(False, True),
    lse=(True, False),
    holes=(False, True),
    softmax_scale=(None, -0.4),
    decode=(True, False),
)


def covering(options):
  """Dicts with each pair of values of a dict of options at least once."""
  names = list(options)
  rng = np.random.default_rng(0)
  left = {((a, x), (b, y))
          for a, b in itertools.combinations(names, 2)
          for x in range(len(options[a])) for y in range(len(options[b]))}
  found = [dict.fromkeys(names, 0)]
  while left:
    best, most = None, -1
    (a, x), (b, y) = sorted(left)[0]
    for _ in range(20):
      one = {n: int(rng.integers(len(options[n]))) for n in names}
      one |= {a: x, b: y}
      covers = sum(p in left for p in itertools.combinations(one.items(), 2))
      if covers > most:
        best, most = one, covers
    found.append(best)
    left -= set(itertools.combinations(best.items(), 2))
  return [{n: options[n][i] for n, i in one.items()} for one in found]


def _of_options(values):
  """A Case of values of OPTIONS, of some that go together."""
  hq, hk = values.pop("hq_hk")
  if values["cache"] == "" and values["scale"] != "none":
    values["cache"] = "e4m3fn"
  if values["layout"] in ("x", "asm") and values["d"] % 16:
    values["d"] = 64
  if values["layout"] == "asm" and values["page"] % 16:
    values["page"] = 16
  return Case(hq=hq, hk=hk, **values)


def pairs():
  """Each value of each option, and each pair of values at least once."""
  for values in covering(OPTIONS):
    if not values["decode"]:
      values["lengths"] = RAGGED
    yield _of_options(values)


def _sequence(rng, tokens: int, keys: int):
  """(queries, keys): any share of a step's tokens, any context."""
  few = min(tokens, int(rng.integers(2, 5)))
  many = int(rng.integers(0, tokens + 1))
  context = int(rng.integers(0, keys + 1))
  whole = min(many, keys)
  kinds = {
      "decode": (min(tokens, 1), context), "verify": (few, context),
      "prefill": (whole, whole), "chunk": (many, max(many, context)),
      "idle": (0, context), "empty": (many, 0),
      "more queries than keys": (many, int(rng.integers(0, whole + 1)))}
  queries, context = list(kinds.values())[rng.choice(
      len(kinds), p=(0.3, 0.1, 0.2, 0.2, 0.1, 0.05, 0.05))]
  return queries, min(context, keys)


def drawn_options(rng, options):
  """A value of each option: its first, half of the time."""
  return {
      name: values[0 if rng.random() < 0.5 else rng.integers(len(values))]
      for name, values in options.items()}


def batches(seed: int, count: int, tokens: int, keys: int):
  """Calls of mixed batches that differ in nothing but lengths, and arrays.

  Args:
    seed: of all that is drawn.
    count: of batches.
    tokens: at most, of a step.
    keys: at most, of a sequence.
  """
  rng = np.random.default_rng(seed)
  values = drawn_options(rng, OPTIONS)
  values |= dict(dtype=("bf16", "fp16")[seed % 2], decode=rng.random() < 0.25,
                 lse=True)
  case = _of_options(values)
  batch = int(rng.integers(1, 8))
  tokens = batch if case.decode else int(rng.integers(1, tokens + 1))
  keys = int(rng.integers(1, keys + 1))
  width = -(-keys // case.page)
  for _ in range(count):
    left, lengths = tokens, []
    for _ in range(batch):
      one = ((1, int(rng.integers(0, keys + 1))) if case.decode else
             _sequence(rng, left, keys))
      lengths.append(one)
      left -= one[0]
    order = rng.permutation(batch)
    yield dataclasses.replace(
        case, lengths=tuple(lengths[i] for i in order), tokens=tokens,
        pages=batch * width + 1, width=width)


@functools.cache
def _program(fn, options):
  return jax.jit(functools.partial(fn, **dict(options)))


def check(test, problem, call, of_tokens: bool = False):
  """Checks a call against its oracle, latent attention's as well.

  Args:
    test: the test case.
    problem: has a case and its exact results.
    call: a function, its options, its arrays.
    of_tokens: whether lse is [tokens, heads].
  """
  fn, options, arrays = call
  case = problem.case
  got = _program(fn, tuple(options.items()))(**arrays)
  out, lse = got if case.lse else (got, None)
  exact, exact_lse = problem.exact()
  plain, _ = problem.exact(DTYPES[case.dtype])
  test.assertEqual(out.dtype, DTYPES[case.dtype])
  # In float32 exponentials are not exact to the last bit.
  floor = 2.0**-16 * abs(exact).max() if case.dtype == "fp32" else 0
  check_error(test, out, exact, plain, case.dtype, str(case), floor=floor)
  empty = exact_lse == -np.inf
  test.assertTrue((np.asarray(out, np.float32)[empty.T] == 0).all(), str(case))
  if lse is None:
    return
  lse = np.asarray(lse).T if of_tokens else np.asarray(lse)
  np.testing.assert_array_equal(lse == -np.inf, empty, str(case))
  np.testing.assert_allclose(
      np.where(empty, 0, lse), np.where(empty, 0, exact_lse),
      rtol=1e-2 if case.cache or case.dtype != "fp32" else 1e-4, atol=1e-2,
      err_msg=str(case))
