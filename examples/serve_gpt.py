# SPDX-License-Identifier: Apache-2.0
"""Serves the GPT of train_gpt.py: continuous batching over a paged KV cache.

Requests come with prompts of different lengths and leave when they are done.
engine.py decides what runs, in programs of one shape each, whatever comes and
goes; paged_gpt.py is the model, whose caches are written in place, all with
`jax.experimental.aiter`.

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
import dataclasses
import functools
import pathlib
import sys
import time
from typing import Any

import jax.numpy as jnp
import numpy as np
import train_gpt
from engine import Engine, Request, burst, step
from paged_gpt import Config, init

import jax

LIMIT = 0.5  # how far below the likeliest a token's logit may be, in bfloat16
# Of each preset: sequences at once, tokens of a step, tokens of a page.
SERVING = {"small": (8, 64, 16), "gpu": (64, 2048, 64)}


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
