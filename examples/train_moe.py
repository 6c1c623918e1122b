# SPDX-License-Identifier: Apache-2.0
"""Trains a small mixture-of-experts GPT twice from one seed, and compares.

train_gpt.py's model with a layer of experts in the place of each MLP. The first
run routes, sorts and multiplies by `topk_softmax` and `fused_moe` of
`jax.experimental.aiter`, the second by formulas in `jax.numpy` that compute
every expert for every token; attention and norms are JAX's own in both. So the
two loss curves must lie on each other; the exit code is 1 if they part.

  python train_moe.py [--steps 200] [--preset gpu]
"""

import argparse
import dataclasses
import functools
import sys
import time

import jax.numpy as jnp
import train_gpt

import jax
from jax.experimental import aiter


@dataclasses.dataclass(frozen=True)
class Config(train_gpt.Config):
  """train_gpt's, with `experts` of width `inner`, `topk` of them a token."""

  experts: int = 8
  topk: int = 2
  inner: int = 128


PRESETS = {
  "small": Config(2, 64, 4, 2, 128, 4, 60, 3e-3, "float32", 0.02),
  "gpu": Config(
    8, 1024, 8, 2, 1024, 8, 200, 6e-4, "bfloat16", 0.1, 32, 4, 768
  ),
}
BALANCE = 0.01  # of the loss that keeps experts' loads even


def ours(cfg, x, router, w1, w2):
  weights, ids = aiter.topk_softmax(router, cfg.topk, need_renorm=True)
  return aiter.fused_moe(x, w1, w2, weights, ids)


def plain(cfg, x, router, w1, w2):
  weights, ids = jax.lax.top_k(jax.nn.softmax(router), cfg.topk)
  weights /= weights.sum(-1, keepdims=True)
  share = jnp.einsum(
    "mk,mke->me", weights, jax.nn.one_hot(ids, cfg.experts)
  )
  gate, up = jnp.split(jnp.einsum("md,end->men", x, w1), 2, -1)
  y = jnp.einsum("men,edn->med", jax.nn.silu(gate) * up, w2)
  return jnp.einsum("me,med->md", share, y.astype(jnp.float32)).astype(x.dtype)


RUNS = {"aiter": ours, "jax": plain}


def init(cfg: Config, key: jax.Array) -> dict:
  """train_gpt's weights, with experts for the MLP's."""
  params = train_gpt.init(cfg, key)
  del params["up"], params["down"]
  n, e, w, i = cfg.layers, cfg.experts, cfg.width, cfg.inner
  shapes = {"router": (n, w, e), "w1": (n, e, 2 * i, w), "w2": (n, e, w, i)}
  keys = jax.random.split(jax.random.fold_in(key, 1), len(shapes))
  return params | {
    name: jax.random.normal(k, shape) * 0.05
    for k, (name, shape) in zip(keys, shapes.items(), strict=True)
  }


def loss_fn(params: dict, tokens: jax.Array, experts, cfg: Config):
  """Returns cross entropy in nats a byte, and that with the balance's part."""
  layers = {k: v for k, v in params.items() if k not in ("embed", "norm")}
  layers = jax.tree.map(lambda x: x.astype(cfg.dtype), layers)
  norm = train_gpt.plain_rms_norm

  @jax.checkpoint
  def layer(x, p):
    y = norm(x, p["norm1"])
    q, k, v = (jnp.einsum("bsw,whd->bshd", y, p[n]) for n in "qkv")
    y = jax.nn.dot_product_attention(
      train_gpt.rotary(q), train_gpt.rotary(k), v, is_causal=True
    )
    x += jnp.einsum("bshd,hdw->bsw", y, p["o"])
    y = norm(x, p["norm2"]).reshape(-1, cfg.width)
    router = (y @ p["router"]).astype(jnp.float32)
    even = cfg.experts * jnp.sum(jnp.mean(jax.nn.softmax(router), 0) ** 2)
    y = experts(cfg, y, router, p["w1"], p["w2"])
    return x + y.reshape(x.shape), even

  x = params["embed"][tokens[:, :-1]].astype(cfg.dtype)
  x, even = jax.lax.scan(layer, x, layers)
  x = norm(x, params["norm"])
  out = (x @ params["embed"].T.astype(cfg.dtype)).astype(jnp.float32)
  logp = jax.nn.log_softmax(out)
  loss = -jnp.mean(jnp.take_along_axis(logp, tokens[:, 1:, None], -1))
  return loss + BALANCE * jnp.mean(even), loss


def train(name: str, cfg: Config, seed: int) -> list[float]:
  """Returns the losses of a run's steps."""
  text, _ = train_gpt.corpus()
  params = jax.jit(functools.partial(init, cfg))(jax.random.key(seed))
  zeros = jax.tree.map(jnp.zeros_like, params)
  state = (jnp.zeros((), jnp.int32), zeros, jax.tree.map(jnp.copy, zeros))

  @functools.partial(jax.jit, donate_argnums=(0, 1))
  def step(params, state, tokens):
    grads, loss = jax.grad(loss_fn, has_aux=True)(
      params, tokens, RUNS[name], cfg
    )
    return *train_gpt.adamw(params, grads, state, cfg), loss

  losses = []
  start = time.perf_counter()
  for i, tokens in enumerate(
    train_gpt.batches(text, cfg, cfg.steps, seed), 1
  ):
    params, state, loss = step(params, state, tokens)
    losses.append(loss)
    if i % 10 == 0 or i == cfg.steps:
      seconds = time.perf_counter() - start
      train_gpt.progress(
        name, i, cfg.steps, f"loss {float(loss):.3f}  {seconds:.1f} s"
      )
  return [float(loss) for loss in losses]


def main() -> int:
  parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
  parser.add_argument("--preset", choices=tuple(PRESETS), default="small")
  parser.add_argument("--steps", type=train_gpt.at_least(1))
  parser.add_argument("--seed", type=train_gpt.at_least(0), default=0)
  args = parser.parse_args()
  cfg = PRESETS[args.preset]
  if args.steps:
    cfg = dataclasses.replace(cfg, steps=args.steps)
  losses = {name: train(name, cfg, args.seed) for name in RUNS}
  difference = max(abs(a - b) for a, b in zip(*losses.values(), strict=True))
  print(
    f"largest difference of the two losses: {difference:.2g} nats"
    f" (accepted: {cfg.limit:g})"
  )
  return 0 if difference <= cfg.limit else 1


if __name__ == "__main__":
  sys.exit(main())
