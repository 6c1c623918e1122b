# SPDX-License-Identifier: Apache-2.0
"""Trains and serves a tiny GPT on a device and on the CPU: they must agree.

A few steps of train_gpt.py's training, then serve_gpt.py's engine, on JAX's
default device (a GPU, or a simulated one) and on the host's
CPU: on the first by the kernels of `jax.experimental.aiter`, on the second by
its formulas. The exit code is 1 if the losses part or the texts differ.

  python tiny_gpt.py                                     on the default device
  python build/build.py sim -- env JAX_PLATFORMS=rocm,cpu python tiny_gpt.py
"""

import argparse
import dataclasses
import sys
import time

import jax.numpy as jnp
import numpy as np
import train_gpt
from serving.engine import Engine, Request
from serving.model import Config, init

import jax

CONFIG = Config(1, 64, 4, 2, 64, 2, 8, 0.1, "bfloat16", 0.02)
PROMPTS = (3, 20, 9)  # in bytes
NEW_TOKENS = 5


def train(cfg: Config) -> list[float]:
  """Returns each step's loss."""
  ops = train_gpt.operators("aiter")
  text, _ = train_gpt.corpus()
  params = train_gpt.init(cfg, jax.random.key(0))
  zeros = jax.tree.map(jnp.zeros_like, params)
  state = (jnp.zeros((), jnp.int32), zeros, zeros)

  @jax.jit
  def step(params, state, tokens):
    loss, grads = jax.value_and_grad(train_gpt.loss_fn)(
      params, tokens, ops, cfg
    )
    return *train_gpt.adamw(params, grads, state, cfg), loss

  losses = []
  for tokens in train_gpt.batches(text, cfg, cfg.steps, 0):
    params, state, loss = step(params, state, tokens)
    losses.append(float(loss))
  return losses


def serve(cfg: Config) -> list[bytes]:
  """Returns what follows each prompt, by a model of random weights.

  One that has learned for a few steps writes nothing but spaces.
  """
  params = init(cfg, jax.random.key(0))
  _, text = train_gpt.corpus()
  requests = [
    Request(text[1000 * n : 1000 * n + n].astype(np.int32),
                      NEW_TOKENS)
    for n in PROMPTS
  ]
  pages = sum(r.pages_needed(16) for r in requests[:2])
  engine = Engine(params, cfg, 2, 16, pages, burst_tokens=4)
  engine.run(requests)
  return [bytes(r.text) for r in requests]


def main() -> int:
  parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
  parser.add_argument("--steps", type=int, default=CONFIG.steps)
  args = parser.parse_args()
  if args.steps < 1:
    parser.error("--steps must be at least 1")
  cfg = dataclasses.replace(CONFIG, steps=args.steps)
  found = []
  for device in (jax.devices()[0], jax.devices("cpu")[0]):
    start = time.perf_counter()
    with jax.default_device(device):
      found.append((train(cfg), serve(cfg)))
    print(f"{device.device_kind}, {time.perf_counter() - start:.0f} s:")
    print("  losses " + " ".join(f"{x:.4f}" for x in found[-1][0]))
    print("  texts ", *found[-1][1], flush=True)
  (losses, texts), (expected, expected_texts) = found
  apart = max(abs(a - b) for a, b in zip(losses, expected, strict=True))
  same = texts == expected_texts
  print(f"losses are {apart:.1e} apart at most, and the texts "
        + ("are the same" if same else "DIFFER"))
  return 0 if apart <= cfg.limit and same else 1


if __name__ == "__main__":
  sys.exit(main())
