# SPDX-License-Identifier: Apache-2.0
"""The GPT of train_gpt.py over a paged cache, perhaps with latent attention."""

import dataclasses
import functools
import math
from typing import NamedTuple

import jax.numpy as jnp
import train_gpt

import jax
from jax.experimental import aiter

EMPTY = -1  # the slot of a token, or the page of a sequence, that is not there


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
    cu_seqlens: [s + 1], where each sequence's tokens begin; None if each has
      one.
    lengths: [s], how long each is with them; 0 of one that is not there.
    table: [s, n], the pages of each.
    page_size: tokens of a page.
  """

  positions: jax.Array
  slots: jax.Array
  cu_seqlens: jax.Array | None
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
  q, *cache = aiter.fused_qk_norm_rope_cache(
    x @ p["qkv"].reshape(cfg.width, -1),
    None,
    None,
    *cache,
    at.slots,
    at.positions,
    *at.tables(cfg.head_dim),
    num_heads=(cfg.q_heads, cfg.kv_heads),
  )
  if at.cu_seqlens is None:
    y = aiter.paged_attention_decode(q, *cache, at.table, at.lengths)
  else:
    y = aiter.unified_attention(
      q, *cache, at.cu_seqlens, at.lengths, at.table
    )
  return jnp.einsum("thd,hdw->tw", y, p["o"]), tuple(cache)


def latent(p: dict, x: jax.Array, cache: tuple, at: Places, cfg: Config):
  """The same by pages of latent vectors: queries and outputs are absorbed."""
  q = jnp.einsum("tw,whd->thd", x, p["q"])
  q_nope, q_pe = jnp.split(q, (cfg.head_dim,), 2)
  c, k_pe = jnp.split(x @ p["kv"], (cfg.latent,), 1)
  c = aiter.rms_norm(c, p["kv_norm"])
  q_pe, k_pe = aiter.rope_2c(
    q_pe, k_pe[:, None], *at.tables(cfg.rope), **at.rotary
  )
  cu_seqlens = at.cu_seqlens
  if cu_seqlens is None:
    cu_seqlens = jnp.arange(len(at.lengths) + 1)
  y, pages = aiter.mla_ragged_paged_attention(
    jnp.einsum("thd,chd->thc", q_nope, p["k_up"]),
    q_pe,
    c,
    k_pe[:, 0],
    cache[0],
    at.lengths,
    at.table.reshape(-1),
    cu_seqlens,
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
