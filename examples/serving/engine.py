# SPDX-License-Identifier: Apache-2.0
"""Continuous batching: requests come and go, two programs run.

While there is a prompt to read, `step` takes of it as much as there is room
for, and the next token of every sequence that writes. Else `burst` writes a few
tokens of each. Both are of one shape, whatever comes and goes, and their caches
are written in place. A step begins with the tokens that the one before has left
on the device, so the host never waits for it: it plans ahead, and reads texts
some steps later.
"""

import collections
import dataclasses
import functools
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
from serving.model import (
  EMPTY,
  Config,
  Places,
  empty_caches,
  following,
  forward,
  prepared,
)

import jax

NEXT = -1  # the token that the sequence's last step has written
AHEAD = 2  # programs that are started before the first one's tokens are read


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
  sequence = jnp.searchsorted(cu_seqlens, i, "right", method="compare_all") - 1
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
      None,
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
    sizes = sequences, width, pages, page_size, burst_tokens
    if min(sizes) < 1:
      raise ValueError(
        "sequences, width, pages, page_size, burst_tokens are "
        f"{sizes}; accepted is at least 1 of each"
      )
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
    requests = list(requests)
    most = min(len(self.free), self.table.shape[1])
    vocabulary = len(self.params["embed"])
    for r in requests:
      if len(r.prompt) < 1 or r.new_tokens < 1:
        raise ValueError(
          f"{len(r.prompt)} tokens and {r.new_tokens} new ones; accepted is at "
          "least one of each"
        )
      if min(r.prompt) < 0 or max(r.prompt) >= vocabulary:
        raise ValueError(
          f"a prompt has tokens from {min(r.prompt)} to {max(r.prompt)}; "
          f"accepted is from 0 to {vocabulary - 1}"
        )
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
