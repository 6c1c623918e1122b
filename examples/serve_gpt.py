# SPDX-License-Identifier: Apache-2.0
"""Serves the GPT of train_gpt.py: continuous batching over a paged KV cache.

Requests come with prompts of different lengths and leave when they are done;
the pages of a finished one go to the next. While there is a prompt to read, a
step takes of it as much as there is room for, and the next token of every
sequence that writes. Else all write a few tokens in one program. Both are of
one shape each, whatever comes and goes, and their caches are written in place,
all with `jax.experimental.aiter`. A step begins with the tokens that the one
before has left on the device, so the host never waits for it: it plans ahead,
and reads texts some steps later.

  python train_gpt.py --out OUT && python serve_gpt.py --weights OUT/weights.npz
  python serve_gpt.py                   without weights: random ones
  python serve_gpt.py --preset gpu      a larger model in bfloat16, for a GPU
  python serve_gpt.py --mla             with DeepSeek's latent attention

The same requests are then answered by plain JAX: all prompts in one batch,
padded, and all tokens in one scan, with a dense cache. The exit code is 1 if
the two write different text. In bfloat16 they may, for one token chosen of two
that are as likely changes all that follow: there plain JAX reads what was
served, and every token must be the likeliest by its logits, but for rounding.
"""

import argparse
import collections
import dataclasses
import functools
import math
import pathlib
import sys
import time
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
import train_gpt

import jax
from jax.experimental import aiter

EMPTY = -1  # the slot of a token, or the page of a sequence, that is not there
NEXT = -1  # the token that the sequence's last step has written
LIMIT = 0.5  # how far below the likeliest a token's logit may be, in bfloat16
AHEAD = 2  # programs that are started before the first one's tokens are read
# Of each preset: sequences at once, tokens of a step, tokens of a page.
SERVING = {"small": (8, 64, 16), "gpu": (64, 2048, 64)}


@dataclasses.dataclass(frozen=True)
class Config(train_gpt.Config):
  """train_gpt.py's model, perhaps with latent attention in its place."""

  mla: bool = False

  @property
  def latent(self) -> int:
    """Columns of a token's latent vector."""
    return self.width // 2

  @property
  def rope(self) -> int:
    """Columns of a query and a key that are rotated, if it is latent."""
    return self.head_dim // 2


@dataclasses.dataclass
class Request:
  """A prompt, and what has been written after it."""

  prompt: np.ndarray
  new_tokens: int  # to be written
  text: list[int] = dataclasses.field(default_factory=list)
  pages: list[int] = dataclasses.field(default_factory=list)
  stored: int = 0  # tokens in the cache, when what is planned is done
  planned: int = 0  # tokens of the text, likewise

  @property
  def unread(self) -> int:
    """Tokens of the prompt that are not in the cache."""
    return max(len(self.prompt) - self.stored, 0)

  def pages_needed(self, page_size: int) -> int:
    return -(-(len(self.prompt) + self.new_tokens) // page_size)


# -----------------------------------------------------------------------------
# The model


def init(cfg: Config, key: jax.Array) -> dict:
  """Random weights, so strong that they do not write one byte for ever."""
  params = train_gpt.init(cfg, key)
  if cfg.mla:
    n, w, h, d = cfg.layers, cfg.width, cfg.q_heads, cfg.head_dim
    shapes = {
      "q": (n, w, h, d + cfg.rope),
      "kv": (n, w, cfg.latent + cfg.rope),
      "k_up": (n, cfg.latent, h, d),
      "v_up": (n, cfg.latent, h, d),
    }
    keys = jax.random.split(key, len(shapes))
    for k, (name, shape) in zip(keys, shapes.items(), strict=True):
      params[name] = jax.random.normal(k, shape) * 0.02
    params["kv_norm"] = jnp.ones((n, cfg.latent))
    params = {name: params[name] for name in params if name not in ("k", "v")}
  strong = 3 if cfg.width > 256 else 6
  return {
    name: x if "norm" in name else x * (2 if name == "embed" else strong)
    for name, x in params.items()
  }


@functools.partial(jax.jit, static_argnames="cfg")
def prepared(params: dict, cfg: Config) -> dict:
  """Weights as they are used: in cfg.dtype, by layer, q, k and v in one."""
  params = {name: x.astype(cfg.dtype) for name, x in params.items()}
  if not cfg.mla:
    params["qkv"] = jnp.concatenate([params.pop(n) for n in "qkv"], 2)
  ends = {name: params.pop(name) for name in ("embed", "norm")}
  return ends | {
    "layers": [
      {name: x[i] for name, x in params.items()} for i in range(cfg.layers)
    ]
  }


class Places(NamedTuple):
  """Where packed tokens [t] of sequences go, and what they attend to.

  Attributes:
    positions: [t], in their sequences.
    slots: [t], in the cache: page * page_size + offset, or EMPTY.
    cu_seqlens: [s + 1], where each sequence's tokens begin.
    lengths: [s], how long each is with them; 0 of one that is not there.
    table: [s, n], the pages of each.
    page_size: tokens of a page.
  """

  positions: jax.Array
  slots: jax.Array
  cu_seqlens: jax.Array
  lengths: jax.Array
  table: jax.Array
  page_size: int

  @property
  def rotary(self) -> dict:
    return dict(layout="thd", positions=self.positions)

  def tables(self, dim: int) -> tuple[jax.Array, jax.Array]:
    return aiter.rotary_embedding(dim, self.page_size * self.table.shape[1])


def grouped(p: dict, x: jax.Array, cache: tuple, at: Places, cfg: Config):
  """Attention of tokens [t, width] by pages of keys and values."""
  q, k, v = jnp.split(
    jnp.einsum("tw,whd->thd", x, p["qkv"]),
    (cfg.q_heads, cfg.q_heads + cfg.kv_heads),
    1,
  )
  q, k = aiter.rope_2c(q, k, *at.tables(cfg.head_dim), **at.rotary)
  cache = aiter.reshape_and_cache_flash(k, v, *cache, at.slots)
  if len(x) == len(at.lengths):  # one token of each
    y = aiter.paged_attention_decode(q, *cache, at.table, at.lengths)
  else:
    y = aiter.unified_attention(
      q, *cache, at.cu_seqlens, at.lengths, at.table
    )
  return jnp.einsum("thd,hdw->tw", y, p["o"]), cache


def latent(p: dict, x: jax.Array, cache: tuple, at: Places, cfg: Config):
  """The same by pages of latent vectors: queries and outputs are absorbed."""
  q = jnp.einsum("tw,whd->thd", x, p["q"])
  q_nope, q_pe = jnp.split(q, (cfg.head_dim,), 2)
  c, k_pe = jnp.split(x @ p["kv"], (cfg.latent,), 1)
  c = aiter.rms_norm(c, p["kv_norm"])
  q_pe, k_pe = aiter.rope_2c(
    q_pe, k_pe[:, None], *at.tables(cfg.rope), **at.rotary
  )
  y, pages = aiter.mla_ragged_paged_attention(
    jnp.einsum("thd,chd->thc", q_nope, p["k_up"]),
    q_pe,
    c,
    k_pe[:, 0],
    cache[0],
    at.lengths,
    at.table.reshape(-1),
    at.cu_seqlens,
    jnp.full(3, len(at.lengths), jnp.int32),
    sm_scale=1 / math.sqrt(cfg.head_dim + cfg.rope),
  )
  y = jnp.einsum("thc,chd->thd", y, p["v_up"])
  return jnp.einsum("thd,hdw->tw", y, p["o"]), (pages,)


def empty_caches(cfg: Config, pages: int, page_size: int) -> list[tuple]:
  """Of each layer, what `grouped` or `latent` takes."""
  if cfg.mla:
    shapes = [
      aiter.get_mla_kv_cache_shape(
        pages, page_size, cfg.latent, cfg.rope, jnp.dtype(cfg.dtype)
      )
    ]
  else:
    shapes = [(pages, page_size, cfg.kv_heads, cfg.head_dim)] * 2
  return [
    tuple(jnp.zeros(shape, cfg.dtype) for shape in shapes)
    for _ in range(cfg.layers)
  ]


def forward(params: dict, caches: list, tokens, at: Places, cfg: Config):
  """Takes tokens into the cache; returns them after all layers, and it."""
  attend = latent if cfg.mla else grouped
  x = params["embed"][tokens]
  written = []
  for p, cache in zip(params["layers"], caches, strict=True):
    y, cache = attend(p, aiter.rms_norm(x, p["norm1"]), cache, at, cfg)
    y, x = aiter.rms_norm_with_add(y, x, p["norm2"])
    x += jnp.square(jax.nn.relu(y @ p["up"])) @ p["down"]
    written.append(cache)
  return x, written


def following(params: dict, x: jax.Array) -> jax.Array:
  """The next token [s] of each sequence, whose last one is x [s, width]."""
  logits = aiter.rms_norm(x, params["norm"]) @ params["embed"].T
  return aiter.greedy_sample(logits.astype(jnp.float32))


# -----------------------------------------------------------------------------
# The engine


class State(NamedTuple):
  """What stays on the device."""

  caches: list[tuple]
  last: jax.Array  # [s], the token that each sequence has written last


def unpacked(sheet: jax.Array, sequences: int, *lengths: int) -> list:
  """The parts of a plan, and the table of pages behind them."""
  *parts, table = jnp.split(sheet, np.cumsum(lengths))
  return [*parts, table.reshape(sequences, -1)]


@functools.partial(
  jax.jit, static_argnames=("cfg", "page_size"), donate_argnames="state"
)
def step(params, state, sheet, cfg: Config, page_size: int):
  """Takes packed tokens into the cache and continues each sequence.

  Args:
    params: of `prepared`.
    state: donated.
    sheet: the plan, one array of integers: tokens or NEXT [t]; how many of each
      sequence, and its length with them [s]; its pages [s, n].
    cfg: the model.
    page_size: tokens of a page.

  Returns:
    (the next token of each sequence [s], state).
  """
  s = len(state.last)
  room = -(-cfg.seq // page_size)
  width = len(sheet) - s * (room + 2)
  tokens, count, lengths, table = unpacked(sheet, s, width, s, s)
  cu_seqlens = jnp.concatenate([jnp.zeros(1, jnp.int32), jnp.cumsum(count)])
  i = jnp.arange(width)
  sequence = jnp.searchsorted(cu_seqlens, i, "right") - 1
  there, sequence = sequence < s, jnp.minimum(sequence, s - 1)
  at = jnp.where(there, lengths[sequence] - cu_seqlens[sequence + 1] + i, 0)
  slots = table[sequence, at // page_size] * page_size + at % page_size
  x, caches = forward(
    params,
    state.caches,
    jnp.where(tokens == NEXT, state.last[sequence], tokens),
    Places(at, jnp.where(there, slots, EMPTY), cu_seqlens, lengths, table,
           page_size),
    cfg,
  )
  found = following(params, x[jnp.maximum(cu_seqlens[1:] - 1, 0)])
  return found, State(caches, jnp.where(count > 0, found, state.last))


@functools.partial(
  jax.jit,
  static_argnames=("cfg", "page_size", "count"),
  donate_argnames="state",
)
def burst(params, state, sheet, cfg: Config, page_size: int, count: int):
  """`count` tokens of each sequence that has so many left to write.

  Args:
    params: as of `step`.
    state: donated.
    sheet: the plan: how many tokens each sequence writes, and how many it has
      in the cache [s]; its pages [s, n].
    cfg: as of `step`.
    page_size: as of `step`.
    count: of tokens.

  Returns:
    (tokens [count, s], state).
  """
  s = len(state.last)
  left, stored, table = unpacked(sheet, s, s, s)

  def body(state, j):
    live = j < left
    at = jnp.where(live, stored + j, 0)
    slots = table[jnp.arange(s), at // page_size] * page_size + at % page_size
    places = Places(
      at,
      jnp.where(live, slots, EMPTY),
      jnp.arange(s + 1),
      jnp.where(live, at + 1, 0),
      table,
      page_size,
    )
    x, caches = forward(params, state.caches, state.last, places, cfg)
    last = jnp.where(live, following(params, x), state.last)
    return State(caches, last), last

  state, tokens = jax.lax.scan(body, state, jnp.arange(count))
  return tokens, state


class Engine:
  """Runs requests, up to `sequences` at once, `width` tokens a step."""

  def __init__(
    self,
    params: dict,
    cfg: Config,
    sequences: int,
    width: int,
    pages: int,
    page_size: int = 16,
    burst_tokens: int = 8,
  ):
    self.params = prepared(params, cfg)
    self.cfg, self.width, self.page_size = cfg, width, page_size
    self.burst_tokens = burst_tokens
    self.programs = {
      step: functools.partial(step, cfg=cfg, page_size=page_size),
      burst: functools.partial(
        burst, cfg=cfg, page_size=page_size, count=burst_tokens
      ),
    }
    self.state = State(
      empty_caches(cfg, pages, page_size), jnp.zeros(sequences, jnp.int32)
    )
    self.free = list(range(pages))
    self.running: list[Request | None] = [None] * sequences
    self.waiting: collections.deque[Request] = collections.deque()
    self.unread: collections.deque[tuple[jax.Array, list]] = collections.deque()
    self.table = np.full(
      (sequences, -(-cfg.seq // page_size)), EMPTY, np.int32
    )
    self.steps = {step: 0, burst: 0}

  def _admit(self) -> None:
    """Gives waiting requests a place and all the pages that they will need."""
    for i, request in enumerate(self.running):
      if request is None and self.waiting:
        needed = self.waiting[0].pages_needed(self.page_size)
        if needed > len(self.free):
          return
        request = self.running[i] = self.waiting.popleft()
        request.pages = [self.free.pop() for _ in range(needed)]
        self.table[i, :needed] = request.pages

  def _plan_step(self) -> tuple[list, list]:
    """Parts of a sheet, and who gets a token; those that write come first."""
    s = len(self.running)
    count, lengths = np.zeros((2, s), np.int32)
    tokens, found = [[] for _ in range(s)], []
    room = self.width
    ready = [(r.unread, i, r) for i, r in enumerate(self.running) if r]
    for unread, i, r in sorted(ready, key=lambda t: t[:2]):
      count[i] = min(unread or 1, room)
      if not count[i]:
        break
      room -= count[i]
      tokens[i] = r.prompt[r.stored : r.stored + count[i]] if unread else [NEXT]
      r.stored += int(count[i])
      lengths[i] = r.stored
      if not r.unread:
        found.append((r, (i,)))
        r.planned += 1
    packed = np.zeros(self.width, np.int32)
    packed[: self.width - room] = np.concatenate(tokens)
    return [packed, count, lengths], found

  def _plan_burst(self) -> tuple[list, list]:
    left, stored = np.zeros((2, len(self.running)), np.int32)
    found = []
    for i, r in enumerate(self.running):
      if r:
        left[i] = min(r.new_tokens - r.planned, self.burst_tokens)
        stored[i] = r.stored
        found.append((r, (slice(left[i]), i)))
        r.planned += int(left[i])
        r.stored += int(left[i])
    return [left, stored], found

  def _read(self) -> None:
    tokens, found = self.unread.popleft()
    tokens = np.asarray(tokens)
    for request, place in found:
      request.text += np.atleast_1d(tokens[place]).tolist()

  def run(self, requests) -> None:
    """Answers all requests."""
    most = min(len(self.free), self.table.shape[1])
    for r in requests:
      if (needed := r.pages_needed(self.page_size)) > most:
        raise ValueError(
          f"{len(r.prompt)} tokens and {r.new_tokens} new ones need {needed} "
          f"pages of {self.page_size}; there are {most}"
        )
    self.waiting.extend(requests)
    while self.waiting or any(self.running):
      self._admit()
      prompts = any(r and r.unread for r in self.running)
      program = step if prompts else burst
      parts, found = self._plan_step() if prompts else self._plan_burst()
      sheet = np.concatenate([*parts, self.table.reshape(-1)])
      tokens, self.state = self.programs[program](
        self.params, self.state, sheet
      )
      tokens.copy_to_host_async()
      self.steps[program] += 1
      self.unread.append((tokens, found))
      # Programs run one after the other: pages are free for the next one.
      for i, r in enumerate(self.running):
        if r and r.planned == r.new_tokens:
          self.free += r.pages
          self.table[i] = EMPTY
          self.running[i] = None
      if len(self.unread) > AHEAD:
        self._read()
    while self.unread:
      self._read()


# -----------------------------------------------------------------------------
# Plain JAX


def rotated(x: jax.Array, positions: jax.Array) -> jax.Array:
  """Pairs of x [b, t, h, d] turned by their positions [b, t]."""
  half = x.shape[-1] // 2
  angle = positions[..., None] * 1e4 ** -(jnp.arange(half) / half)
  cos, sin = (f(angle)[:, :, None].astype(x.dtype) for f in (jnp.cos, jnp.sin))
  a, b = x[..., :half], x[..., half:]
  return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], -1)


def dense_attention(p: dict, x, cache: tuple, positions, cfg: Config):
  """Attention of x [b, t, width] by caches [b, seq, ...], which it writes."""
  if cfg.mla:
    q = jnp.einsum("btw,whd->bthd", x, p["q"])
    q_nope, q_pe = jnp.split(q, (cfg.head_dim,), 3)
    q = jnp.concatenate([q_nope, rotated(q_pe, positions)], 3)
    c, k_pe = jnp.split(x @ p["kv"], (cfg.latent,), 2)
    c = train_gpt.plain_rms_norm(c, p["kv_norm"])
    new = c, rotated(k_pe[:, :, None], positions)[:, :, 0]
  else:
    q, *new = jnp.split(
      jnp.einsum("btw,whd->bthd", x, p["qkv"]),
      (cfg.q_heads, cfg.q_heads + cfg.kv_heads),
      2,
    )
    q, new[0] = rotated(q, positions), rotated(new[0], positions)
  rows = jnp.arange(len(x))[:, None]
  cache = tuple(
    t.at[rows, positions].set(n) for t, n in zip(cache, new, strict=True)
  )
  # Prompts see themselves, and whoever writes what it has written too.
  k, v = cache if x.shape[1] == 1 else new
  if cfg.mla:
    c, k_pe = k, v
    k = jnp.einsum("bsc,chd->bshd", c, p["k_up"])
    v = jnp.einsum("bsc,chd->bshd", c, p["v_up"])
    k_pe = jnp.broadcast_to(k_pe[:, :, None], (*k.shape[:3], cfg.rope))
    k = jnp.concatenate([k, k_pe], 3)
    v = jnp.pad(v, ((0, 0), (0, 0), (0, 0), (0, cfg.rope)))
  seen = jnp.arange(k.shape[1]) <= positions[:, :, None]
  y = jax.nn.dot_product_attention(q, k, v, mask=seen[:, None])
  y = y[..., : cfg.head_dim]
  return jnp.einsum("bthd,hdw->btw", y, p["o"]), cache


def dense_forward(params: dict, caches: list, tokens, positions, cfg: Config):
  """`forward` of tokens [b, t]."""
  norm = train_gpt.plain_rms_norm
  x = params["embed"][tokens]
  written = []
  for p, cache in zip(params["layers"], caches, strict=True):
    y, cache = dense_attention(
      p, norm(x, p["norm1"]), cache, positions, cfg
    )
    y, x = train_gpt.plain_rms_norm_with_add(y, x, p["norm2"])
    x += jnp.square(jax.nn.relu(y @ p["up"])) @ p["down"]
    written.append(cache)
  return x, written


def dense_caches(cfg: Config, *shape: int) -> list[tuple]:
  columns = (cfg.latent,), (cfg.rope,)
  if not cfg.mla:
    columns = [(cfg.kv_heads, cfg.head_dim)] * 2
  return [
    tuple(jnp.zeros((*shape, *c), cfg.dtype) for c in columns)
    for _ in range(cfg.layers)
  ]


def dense_logits(params: dict, x: jax.Array) -> jax.Array:
  x = train_gpt.plain_rms_norm(x, params["norm"])
  return (x @ params["embed"].T).astype(jnp.float32)


@functools.partial(jax.jit, static_argnames=("cfg", "count"))
def dense(params, prompts, lengths, cfg: Config, count: int):
  """What follows prompts [b, t] of such lengths [b]: tokens [b, count]."""
  b, t = prompts.shape
  caches = dense_caches(cfg, b, t + count)

  def next_token(x):
    return jnp.argmax(dense_logits(params, x), -1).astype(jnp.int32)

  def write(carry, _):
    caches, last, at = carry
    x, caches = dense_forward(
      params, caches, last[:, None], at[:, None], cfg
    )
    return (caches, next_token(x[:, 0]), at + 1), last

  positions = jnp.broadcast_to(jnp.arange(t), (b, t))
  x, caches = dense_forward(params, caches, prompts, positions, cfg)
  first = next_token(x[jnp.arange(b), lengths - 1])
  _, tokens = jax.lax.scan(write, (caches, first, lengths), length=count)
  return tokens.T


def padded(rows: list) -> tuple[np.ndarray, np.ndarray]:
  """One array of rows of different lengths, and the lengths."""
  lengths = np.array([len(row) for row in rows], np.int32)
  tokens = np.zeros((len(rows), max(lengths)), np.int32)
  for to, row in zip(tokens, rows, strict=True):
    to[: len(row)] = row
  return tokens, lengths


def dense_texts(params: dict, requests: list, cfg: Config) -> list[list[int]]:
  """Answers all requests in one batch."""
  tokens = dense(
    params,
    *padded([r.prompt for r in requests]),
    cfg,
    max(r.new_tokens for r in requests),
  )
  return [
    t[: r.new_tokens].tolist()
    for t, r in zip(np.asarray(tokens), requests, strict=True)
  ]


@functools.partial(jax.jit, static_argnames="cfg")
def shortfalls(params, tokens, cfg: Config):
  """How far each of tokens [b, t] but the first is below the likeliest."""
  b, t = tokens.shape
  positions = jnp.broadcast_to(jnp.arange(t), (b, t))
  x, _ = dense_forward(
    params, dense_caches(cfg, b, t), tokens, positions, cfg
  )
  logits = dense_logits(params, x)[:, :-1]
  own = jnp.take_along_axis(logits, tokens[:, 1:, None], -1)[..., 0]
  return jnp.max(logits, -1) - own


def shortfall(params: dict, requests: list, cfg: Config) -> float:
  """The largest of what was written, as plain JAX reads it."""
  tokens, _ = padded([[*r.prompt, *r.text] for r in requests])
  worst = 0.0
  # A few at a time: their scores are of [rows, heads, t, t].
  for i in range(0, len(tokens), 8):
    found = np.asarray(shortfalls(params, tokens[i : i + 8], cfg))
    for r, row in zip(requests[i : i + 8], found, strict=True):
      written = row[len(r.prompt) - 1 : len(r.prompt) + len(r.text) - 1]
      worst = max(worst, float(written.max()))
  return worst


# -----------------------------------------------------------------------------


def model(args: argparse.Namespace) -> tuple[dict, Config, str]:
  """A model of train_gpt.py, and which: as trained, or random."""
  key = jax.random.key(args.seed)
  as_config = lambda preset, mla=False: Config(
    **dataclasses.asdict(train_gpt.PRESETS[preset]), mla=mla
  )
  if args.weights is None:
    cfg = as_config(args.preset, args.mla)
    return jax.jit(init, static_argnums=0)(cfg, key), cfg, args.preset
  params = {name: jnp.asarray(x) for name, x in np.load(args.weights).items()}
  for preset in train_gpt.PRESETS:
    cfg = as_config(preset)
    if params["q"].shape == (cfg.layers, cfg.width, cfg.q_heads, cfg.head_dim):
      return params, cfg, preset
  raise SystemExit(f"{args.weights} is of none of train_gpt.py's presets")


def draw_requests(count: int, cfg: Config, seed: int) -> list[Request]:
  """Prompts from text that the model was not trained on."""
  _, text = train_gpt.corpus()
  rng = np.random.default_rng(seed)
  requests = []
  for _ in range(count):
    prompt = int(rng.integers(max(cfg.seq // 128, 4), cfg.seq // 2 + 1))
    start = rng.integers(0, len(text) - prompt)
    requests.append(
      Request(
        text[start : start + prompt].astype(np.int32),
        int(rng.integers(max(cfg.seq // 64, 8), cfg.seq // 8 + 1)),
      )
    )
  return requests


def main() -> int:
  parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
  parser.add_argument(
    "--weights", type=pathlib.Path, help="weights.npz that train_gpt.py wrote"
  )
  parser.add_argument(
    "--preset", choices=SERVING, default="small", help="of random weights"
  )
  parser.add_argument(
    "--mla", action="store_true", help="latent attention, of random weights"
  )
  parser.add_argument("--requests", type=int, default=16)
  parser.add_argument("--sequences", type=int, help="at once")
  parser.add_argument("--width", type=int, help="tokens a step")
  parser.add_argument("--seed", type=int, default=0)
  args = parser.parse_args()
  for name in ("requests", "sequences", "width"):
    if getattr(args, name) is not None and getattr(args, name) < 1:
      parser.error(f"--{name} must be at least 1")
  if args.mla and args.weights is not None:
    parser.error("--mla is of random weights, not of --weights")
  params, cfg, preset = model(args)
  sequences, width, page_size = SERVING[preset]
  sequences, width = args.sequences or sequences, args.width or width
  if width < sequences:
    parser.error(f"--width must be at least {sequences}, as --sequences")

  # Room for half of what could run at once: pages are needed again.
  pages = max(sequences // 2, 1) * cfg.seq // page_size
  engine = Engine(params, cfg, sequences, width, pages, page_size)
  engine.run(draw_requests(1, cfg, args.seed + 1))  # compiles both programs
  requests = draw_requests(args.requests, cfg, args.seed)
  engine.steps = {step: 0, burst: 0}
  start = time.perf_counter()
  engine.run(requests)
  seconds = time.perf_counter() - start
  written = sum(r.new_tokens for r in requests)
  shown = requests[0]
  print(
    f"{args.requests} requests, prompts of "
    f"{min(len(r.prompt) for r in requests)} to "
    f"{max(len(r.prompt) for r in requests)} bytes, {written} written, "
    f"{cfg.layers} layers of {cfg.width} channels, {cfg.dtype}, "
    f"{jax.devices()[0].device_kind}"
  )
  print(
    f"  paged, {sequences} at once: {engine.steps[step]} steps of {width} "
    f"tokens and {engine.steps[burst]} of {engine.burst_tokens} a sequence, "
    f"{written / seconds:,.0f} tokens/s, "
    f"{step._cache_size() + burst._cache_size()} programs"
  )

  answer: Any = functools.partial(dense_texts, engine.params, requests, cfg)
  answer()
  start = time.perf_counter()
  expected = answer()
  seconds = time.perf_counter() - start
  print(
    f"  plain JAX, dense cache, all at once: {written / seconds:,.0f} tokens/s"
  )
  print("\nThe first prompt, and | what follows:\n")
  print(
    bytes(shown.prompt.tolist()).decode("utf-8", "replace")
    + "|"
    + bytes(shown.text).decode("utf-8", "replace")
  )
  if len(engine.free) != pages:
    print(
      f"{pages - len(engine.free)} pages were not given back", file=sys.stderr
    )
    return 1
  different = sum(r.text != e for r, e in zip(requests, expected, strict=True))
  print(f"\ntexts that differ between the two: {different} of {args.requests}")
  if cfg.dtype == "float32":
    return 1 if different else 0
  worst = shortfall(engine.params, requests, cfg)
  print(
    f"a token's logit is at most {worst:.3f} below the likeliest "
    f"(limit {LIMIT:g})"
  )
  return 0 if worst <= LIMIT else 1


if __name__ == "__main__":
  sys.exit(main())
