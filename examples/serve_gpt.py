# SPDX-License-Identifier: Apache-2.0
"""Serves the GPT of train_gpt.py: continuous batching over a paged KV cache.

Requests come with prompts of different lengths and leave when they are done.
Each step takes the next token of every running sequence, and of new ones as
much of the prompt as there is room for: one program of one shape, which writes
the new keys and values into the cache's pages, attends over them and samples,
all with `jax.experimental.aiter`. The pages of a finished sequence go to the
next one.

  python train_gpt.py --out OUT && python serve_gpt.py --weights OUT/weights.npz
  python serve_gpt.py                   without weights: those that training
                                        begins with

The same requests are then answered by plain JAX, in one batch with a dense
cache; the exit code is 1 if the two write different text.
"""

import argparse
import collections
import dataclasses
import functools
import pathlib
import sys
import time

import jax.numpy as jnp
import numpy as np
import train_gpt
from train_gpt import Config

import jax
from jax.experimental import aiter

PAGE = 16  # tokens of a page
EMPTY = -1  # the slot of a token that is not there


@dataclasses.dataclass
class Request:
  """A prompt, and what has been written after it."""

  prompt: np.ndarray
  new_tokens: int  # to be written
  text: list[int] = dataclasses.field(default_factory=list)
  pages: list[int] = dataclasses.field(default_factory=list)
  stored: int = 0  # tokens in the cache

  @property
  def tokens(self) -> list[int]:
    return [*self.prompt, *self.text]

  @property
  def pages_needed(self) -> int:
    return -(-(len(self.prompt) + self.new_tokens) // PAGE)

  @property
  def done(self) -> bool:
    return len(self.text) == self.new_tokens


def layer(params: dict, i: int, cfg: Config) -> dict:
  """The weights of one layer."""
  names = params.keys() - {"embed", "norm"}
  return {name: params[name][i].astype(cfg.dtype) for name in names}


@functools.partial(jax.jit, static_argnames="cfg", donate_argnames="caches")
def step(params, caches, tokens, places, cu_seqlens, lengths, table, cfg):
  """Takes packed tokens into the cache and continues each sequence.

  Args:
    params: the model's.
    caches: of each layer, keys and values [pages, PAGE, kv_heads, head_dim].
    tokens: [t], of each sequence those that are not in the cache yet.
    places: [t], where they go: page * PAGE + offset, or EMPTY.
    cu_seqlens: [s + 1], where each sequence's tokens begin.
    lengths: [s], how long it then is; 0 of one that is not there.
    table: [s, n], its pages.
    cfg: the model.

  Returns:
    (the next token of each sequence [s], caches).
  """
  count = jnp.diff(cu_seqlens)
  sequence = jnp.searchsorted(cu_seqlens, jnp.arange(len(tokens)), "right") - 1
  sequence = jnp.minimum(sequence, len(lengths) - 1)
  positions = (lengths - count - cu_seqlens[:-1])[sequence]
  positions = jnp.maximum(positions + jnp.arange(len(tokens)), 0)
  cos, sin = aiter.rotary_embedding(cfg.head_dim, PAGE * table.shape[1])
  rope = lambda x: aiter.rope(x[None], cos, sin, positions=positions[None])[
    0
  ].astype(x.dtype)

  x = params["embed"][tokens].astype(cfg.dtype)
  written = []
  for i, (k_cache, v_cache) in enumerate(caches):
    p = layer(params, i, cfg)
    y = aiter.rms_norm(x, p["norm1"])
    q, k, v = (jnp.einsum("tw,whd->thd", y, p[n]) for n in "qkv")
    k_cache, v_cache = aiter.reshape_and_cache_flash(
      rope(k), v, k_cache, v_cache, places
    )
    y = aiter.unified_attention(
      rope(q), k_cache, v_cache, cu_seqlens, lengths, table
    )
    y = jnp.einsum("thd,hdw->tw", y, p["o"])
    y, x = aiter.rms_norm_with_add(y, x, p["norm2"])
    x += jnp.square(jax.nn.relu(y @ p["up"])) @ p["down"]
    written.append((k_cache, v_cache))
  last = x[jnp.maximum(cu_seqlens[1:] - 1, 0)]
  last = aiter.rms_norm(last, params["norm"].astype(cfg.dtype))
  logits = last @ params["embed"].T.astype(cfg.dtype)
  return aiter.greedy_sample(logits.astype(jnp.float32)), written


class Engine:
  """Runs requests, up to `sequences` at once, `width` tokens a step."""

  def __init__(
    self, params, cfg: Config, sequences: int, width: int, pages: int
  ):
    self.params, self.cfg, self.width = params, cfg, width
    shape = (pages, PAGE, cfg.kv_heads, cfg.head_dim)
    self.caches = [
      (jnp.zeros(shape, cfg.dtype), jnp.zeros(shape, cfg.dtype))
      for _ in range(cfg.layers)
    ]
    self.free = list(range(pages))
    self.running: list[Request | None] = [None] * sequences
    self.waiting: collections.deque[Request] = collections.deque()
    self.steps = 0

  def _admit(self) -> None:
    """Gives waiting requests a place and all the pages that they will need."""
    for i, request in enumerate(self.running):
      if request is None and self.waiting:
        needed = self.waiting[0].pages_needed
        if needed > len(self.free):
          return
        self.running[i] = self.waiting.popleft()
        self.running[i].pages = [self.free.pop() for _ in range(needed)]

  def _batch(self):
    """The arguments of `step`; sequences that decode come before prompts."""
    count = [0] * len(self.running)
    room = self.width
    ready = [i for i, r in enumerate(self.running) if r]
    left = {
      i: len(self.running[i].tokens) - self.running[i].stored for i in ready
    }
    for i in sorted(ready, key=lambda i: left[i] > 1):
      count[i] = min(left[i], room)
      room -= count[i]
    longest = self.cfg.seq // PAGE
    table = np.full((len(self.running), longest), EMPTY, np.int32)
    tokens = np.zeros(self.width, np.int32)
    places = np.full(self.width, EMPTY, np.int32)
    lengths = np.zeros(len(self.running), np.int32)
    starts = np.concatenate([[0], np.cumsum(count)]).astype(np.int32)
    for i in ready:
      r, new = self.running[i], slice(starts[i], starts[i + 1])
      at = np.arange(r.stored, r.stored + count[i])
      table[i, : len(r.pages)] = r.pages
      tokens[new] = r.tokens[r.stored : r.stored + count[i]]
      places[new] = np.take(r.pages, at // PAGE) * PAGE + at % PAGE
      r.stored += count[i]
      lengths[i] = r.stored if count[i] else 0
    return tokens, places, starts, lengths, table

  def run(self, requests) -> None:
    """Answers all requests."""
    self.waiting.extend(requests)
    while self.waiting or any(self.running):
      self._admit()
      arguments = self._batch()
      next_tokens, self.caches = step(
        self.params, self.caches, *arguments, cfg=self.cfg
      )
      self.steps += 1
      next_tokens = np.asarray(next_tokens)
      for i, r in enumerate(self.running):
        if r is None or r.stored < len(r.tokens):
          continue  # Of a prompt that is not all in the cache, nothing follows.
        r.text.append(int(next_tokens[i]))
        if r.done:
          self.free += r.pages
          self.running[i] = None


@functools.partial(jax.jit, static_argnames="cfg", donate_argnames="caches")
def dense_step(params, caches, tokens, positions, cfg):
  """Plain JAX: one token [b] of each sequence, at its position [b]."""
  b, width = len(tokens), caches[0][0].shape[1]
  norm, add = train_gpt.plain_rms_norm, train_gpt.plain_rms_norm_with_add
  half = cfg.head_dim // 2
  angle = positions[:, None] * 1e4 ** -(jnp.arange(half) / half)
  cos, sin = (f(angle)[:, None].astype(cfg.dtype) for f in (jnp.cos, jnp.sin))

  def rope(x):
    first, second = x[..., :half], x[..., half:]
    return jnp.concatenate(
      [first * cos - second * sin, second * cos + first * sin], -1
    )

  x = params["embed"][tokens].astype(cfg.dtype)
  written = []
  for i, (k_cache, v_cache) in enumerate(caches):
    p = layer(params, i, cfg)
    y = norm(x, p["norm1"])
    q, k, v = (jnp.einsum("bw,whd->bhd", y, p[n]) for n in "qkv")
    k_cache = k_cache.at[jnp.arange(b), positions].set(rope(k))
    v_cache = v_cache.at[jnp.arange(b), positions].set(v)
    seen = jnp.arange(width) <= positions[:, None]
    y = jax.nn.dot_product_attention(
      rope(q)[:, None], k_cache, v_cache, mask=seen[:, None, None]
    )[:, 0]
    y = jnp.einsum("bhd,hdw->bw", y, p["o"])
    y, x = add(y, x, p["norm2"])
    x += jnp.square(jax.nn.relu(y @ p["up"])) @ p["down"]
    written.append((k_cache, v_cache))
  x = norm(x, params["norm"].astype(cfg.dtype))
  return jnp.argmax(x @ params["embed"].T.astype(cfg.dtype), -1), written


def dense(params, requests, cfg: Config) -> list[list[int]]:
  """Answers all requests in one batch with a dense cache."""
  shape = (len(requests), cfg.seq, cfg.kv_heads, cfg.head_dim)
  caches = [
    (jnp.zeros(shape, cfg.dtype), jnp.zeros(shape, cfg.dtype))
    for _ in range(cfg.layers)
  ]
  texts = [list(r.prompt) for r in requests]
  ends = [len(r.prompt) + r.new_tokens for r in requests]
  for at in range(max(ends) - 1):
    tokens = np.array([t[min(at, len(t) - 1)] for t in texts], np.int32)
    positions = np.array([min(at, end - 1) for end in ends], np.int32)
    following, caches = dense_step(params, caches, tokens, positions, cfg)
    following = np.asarray(following)
    for i, text in enumerate(texts):
      if len(text) == at + 1 < ends[i]:
        text.append(int(following[i]))
  return [t[len(r.prompt) :] for t, r in zip(texts, requests, strict=True)]


def model(weights: pathlib.Path | None, seed: int) -> tuple[dict, Config]:
  """A model of train_gpt.py: as trained, or as the small one begins."""
  if weights is None:
    cfg = train_gpt.PRESETS["small"]
    return train_gpt.init(cfg, jax.random.key(seed)), cfg
  params = {name: jnp.asarray(x) for name, x in np.load(weights).items()}
  for cfg in train_gpt.PRESETS.values():
    if params["q"].shape == (cfg.layers, cfg.width, cfg.q_heads, cfg.head_dim):
      return params, cfg
  raise SystemExit(f"{weights} is of none of train_gpt.py's presets")


def draw_requests(count: int, cfg: Config, seed: int) -> list[Request]:
  """Prompts from text that the model was not trained on."""
  _, text = train_gpt.corpus()
  rng = np.random.default_rng(seed)
  requests = []
  for _ in range(count):
    prompt = int(rng.integers(4, cfg.seq // 2))
    start = rng.integers(0, len(text) - prompt)
    requests.append(
      Request(
        text[start : start + prompt].astype(np.int32),
        int(rng.integers(8, cfg.seq // 3)),
      )
    )
  return requests


def main() -> int:
  parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
  parser.add_argument(
    "--weights", type=pathlib.Path, help="weights.npz that train_gpt.py wrote"
  )
  parser.add_argument("--requests", type=int, default=16)
  parser.add_argument("--sequences", type=int, default=8, help="at once")
  parser.add_argument("--width", type=int, default=64, help="tokens a step")
  parser.add_argument("--seed", type=int, default=0)
  args = parser.parse_args()
  for name in ("requests", "sequences", "width"):
    if getattr(args, name) < 1:
      parser.error(f"--{name} must be at least 1")
  params, cfg = model(args.weights, args.seed)

  # Room for half of what could run at once: pages are needed again.
  pages = max(args.sequences // 2, 1) * cfg.seq // PAGE
  engine = Engine(params, cfg, args.sequences, args.width, pages)
  engine.run(draw_requests(1, cfg, args.seed + 1))  # compiles the step
  requests = draw_requests(args.requests, cfg, args.seed)
  engine.steps = 0
  start = time.perf_counter()
  engine.run(requests)
  seconds = time.perf_counter() - start
  written = sum(r.new_tokens for r in requests)
  print(
    f"{args.requests} requests, prompts of "
    f"{min(len(r.prompt) for r in requests)} to "
    f"{max(len(r.prompt) for r in requests)} bytes, {written} written, "
    f"{jax.devices()[0].device_kind}"
  )
  print(
    f"  paged, {args.sequences} at once: {engine.steps} steps, "
    f"{written / seconds:,.0f} tokens/s, {step._cache_size()} program"
  )

  dense(params, requests[:1] * args.requests, cfg)
  start = time.perf_counter()
  expected = dense(params, requests, cfg)
  seconds = time.perf_counter() - start
  print(
    f"  plain JAX, dense cache, all at once: {written / seconds:,.0f} tokens/s"
  )
  shown = requests[0]
  print("\nThe first prompt, and | what follows:\n")
  print(
    bytes(shown.prompt.tolist()).decode("utf-8", "replace")
    + "|"
    + bytes(shown.text).decode("utf-8", "replace")
  )
  different = sum(r.text != e for r, e in zip(requests, expected, strict=True))
  if len(engine.free) != pages:
    print(
      f"{pages - len(engine.free)} pages were not given back", file=sys.stderr
    )
    return 1
  print(f"\ntexts that differ between the two: {different} of {args.requests}")
  return 1 if different else 0


if __name__ == "__main__":
  sys.exit(main())
