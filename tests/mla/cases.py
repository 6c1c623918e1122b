# SPDX-License-Identifier: Apache-2.0
"""Calls of latent attention, and their arrays.

Pages lie in any order; some are absent, and what nobody owns holds NaN: what is
read beyond a sequence's own spoils the result.
"""

import dataclasses

import jax.numpy as jnp
import ml_dtypes
import numpy as np
from harness.cases import DTYPES
from mla import oracle
from paged import cases as paged

from jax.experimental import aiter

DECODE = ((1, 37), (1, 1), (1, 64), (1, 0))
# Queries of speculative steps, a prompt, a chunk of one; none at all.
MIXED = ((4, 21), (1, 40), (2, 2), (17, 17), (9, 33), (0, 12), (3, 0), (3, 1))


@dataclasses.dataclass(frozen=True)
class Case:
  """A call. lengths: (queries, keys) of each sequence.

  topk: indices a query, of sparse_mla_fwd; 0 for mla_decode_fwd. tokens, pages:
  sizes of the arrays, if they are to have room.
  """
  dtype: str = "bf16"
  lengths: tuple[tuple[int, int], ...] = DECODE
  heads: int = 16
  lora: int = 512
  rope: int = 64
  width: int = 0
  page: int = 16
  cache: str = ""
  scales: bool = False
  sm_scale: float | None = 0.05
  logit_cap: float = 0.0
  causal: bool = True
  sink: bool = False
  lse: bool = True
  holes: bool = False
  topk: int = 0
  tokens: int = 0
  pages: int = 0


class Problem:
  """The arrays of a case."""

  def __init__(self, case: Case, seed: int = 0):
    rng = np.random.default_rng(seed)
    c, own = case, DTYPES[case.dtype]
    dtype = paged.BYTES.get(c.cache, own)
    sq, sk = (np.array(t) for t in zip(*c.lengths))
    cols = c.lora + c.rope
    self.case = case
    self.cu = np.concatenate([[0], np.cumsum(sq)]).astype(np.int32)
    tokens = c.tokens or int(self.cu[-1]) + 2  # Rows of no sequence.
    self.q = rng.standard_normal((tokens, c.heads, cols), np.float32).astype(
        own)
    counts = -(-sk // c.page)
    pages = c.pages or int(counts.sum()) + 3
    self.indptr = np.concatenate([[0], np.cumsum(counts)]).astype(np.int32)
    used = c.pages or self.indptr[-1]
    self.indices = rng.permutation(pages)[:used].astype(np.int32)
    self.last = np.where(counts > 0, sk - (counts - 1) * c.page, 0).astype(
        np.int32)
    if c.holes:
      for i in self.indptr[:-1][counts > 1]:
        self.indices[i] = (-1, pages, 2**31 - 1, -2**31)[i % 4]
    self.cache = paged.cache_of(
        (pages, c.page, c.width or cols), dtype, rng)
    self.sequences = [
        oracle.slots_of(self.indices[a:b], last, c.page)
        for a, b, last in zip(self.indptr, self.indptr[1:], self.last)]
    self.topk = np.full((tokens, max(c.topk, 1)), -1, np.int32)
    if c.topk:
      # Each sequence's queries choose some of its tokens, some of them twice.
      for a, b, slots in zip(self.cu, self.cu[1:], self.sequences):
        for row in self.topk[a:b]:
          some = rng.choice(np.clip(slots, -1, 2**31 - 1), min(
              c.topk - 3, len(slots))) if slots else []
          row[rng.permutation(c.topk)[:len(some)]] = some
    self.spoil()
    self.q_scale, self.kv_scale = (
        np.float32(rng.uniform(0.5, 2.0)) if c.scales else None
        for _ in range(2))
    self.sink = (rng.standard_normal(c.heads).astype(np.float32)
                 if c.sink else None)

  def spoil(self):
    """NaN where no sequence has a token."""
    if self.cache.dtype == np.int8:
      return
    pages, size, _ = self.cache.shape
    own = np.zeros(pages * size, bool)
    for slots in self.sequences:
      own[[slot for slot in slots if 0 <= slot < len(own)]] = True
    rows = self.cache.reshape(pages * size, -1)
    nan = {np.dtype(ml_dtypes.float8_e4m3fnuz): 0x80}.get(rows.dtype, 0x7F)
    if rows.dtype.itemsize == 1:
      rows.view(np.uint8)[~own] = nan
    else:
      rows[~own] = np.nan

  def exact(self, dtype=np.float64):
    """(out, lse) of the oracle, or of its steps rounded to a dtype."""
    c = self.case
    kv_scale = float(self.kv_scale or 1)
    scores = dict(
        softmax_scale=(c.lora + c.rope)**-0.5 if c.sm_scale is None
        else c.sm_scale, soft_cap=c.logit_cap, dtype=dtype,
        k_scale=kv_scale * float(self.q_scale or 1), v_scale=kv_scale,
        sinks=self.sink)
    if c.topk:
      return oracle.paged(self.q, self.cache, np.arange(len(self.q) + 1),
                          self.topk, c.lora, **scores)
    return oracle.paged(self.q, self.cache, self.cu, self.sequences, c.lora,
                        window=(-1, 0 if c.causal else -1), **scores)


def call(p: Problem):
  """(function, keywords, arrays) of a problem's call."""
  c = p.case
  options = dict(sm_scale=c.sm_scale, logit_cap=c.logit_cap, return_lse=c.lse,
                 kv_lora_rank=c.lora)
  arrays = dict(q=p.q, kv_buffer=p.cache[:, :, None])
  if c.topk:
    fn = aiter.sparse_mla_fwd
    arrays["topk_indices"] = p.topk
  else:
    fn = aiter.mla_decode_fwd
    options["causal"] = c.causal
    arrays |= dict(cu_seqlens_q=p.cu, kv_indptr=p.indptr, kv_indices=p.indices,
                   kv_last_page_lens=p.last)
  given = dict(q_scale=p.q_scale, kv_scale=p.kv_scale, sink=p.sink)
  arrays |= {n: t for n, t in given.items() if t is not None}
  return fn, options, {n: jnp.asarray(t) for n, t in arrays.items()}


# Values of each option, the first its default.
OPTIONS = dict(
    dtype=("bf16", "fp16", "fp32"),
    lengths=(DECODE, MIXED, ((1, 300), (2, 5)), ((1, 17),)),
    heads=(16, 12, 20, 1, 4, 40, 128),
    lora_rope=((512, 64), (128, 32), (96, 16), (256, 64), (64, 0)),
    width=(0, 640),
    page=(16, 1, 7, 64, 256),
    cache=("", *paged.BYTES),
    scales=(False, True),
    sm_scale=(0.05, None),
    logit_cap=(0.0, 3.0),
    causal=(True, False),
    sink=(False, True),
    lse=(True, False),
    holes=(False, True),
    topk=(0, 40),
)


def pairs():
  """Each value of each option, and each pair of values at least once."""
  for values in paged.covering(OPTIONS):
    lora, rope = values.pop("lora_rope")
    yield Case(lora=lora, rope=rope, **values)


def batches(seed: int, count: int, tokens: int, keys: int):
  """Calls of mixed batches that differ in nothing but lengths, and arrays.

  Args:
    seed: of all that is drawn.
    count: of batches.
    tokens: at most, of a step.
    keys: at most, of a sequence.
  """
  rng = np.random.default_rng(seed)
  values = paged.drawn_options(rng, OPTIONS)
  lora, rope = values.pop("lora_rope")
  values |= dict(dtype=("bf16", "fp16")[seed % 2], lse=True, lora=lora,
                 rope=rope)
  for drawn in paged.batches(seed, count, tokens, keys):
    own = ("lengths", "tokens", "pages", "page")
    yield Case(**(values | {name: getattr(drawn, name) for name in own}))
