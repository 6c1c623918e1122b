# SPDX-License-Identifier: Apache-2.0
"""The served model in plain JAX: one padded batch and a dense cache."""

import functools

import jax.numpy as jnp
import numpy as np
import train_gpt
from serving.model import Config

import jax


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
