# SPDX-License-Identifier: Apache-2.0
"""Serves the GPT of train_gpt.py: continuous batching over a paged KV cache.

Requests come with prompts of different lengths and leave when they are done;
the pages of a finished one go to the next. The model is in serving/model.py,
all with `jax.experimental.aiter`, and what runs it in serving/engine.py.

  python train_gpt.py --out OUT && python serve_gpt.py --weights OUT/weights.npz
  python serve_gpt.py                   without weights: random ones
  python serve_gpt.py --preset gpu      a larger model in bfloat16, for a GPU
  python serve_gpt.py --mla             with DeepSeek's latent attention

The same requests are then answered by plain JAX (serving/plain.py): all prompts
in one batch, padded, and all tokens in one scan, with a dense cache. The exit
code is 1 if the two write different text. In bfloat16 they may, for one token
chosen of two that are as likely changes all that follow: there plain JAX reads
what was served, and every token must be the likeliest by its logits, but for
rounding.
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
from serving.engine import Engine, Request, burst, step
from serving.model import Config, init
from serving.plain import dense_texts, shortfall

import jax

LIMIT = 0.5  # how far below the likeliest a token's logit may be, in bfloat16
# Of each preset: sequences at once, tokens of a step, tokens of a page.
SERVING = {"small": (8, 64, 16), "gpu": (64, 2048, 64)}


def model(args: argparse.Namespace) -> tuple[dict, Config, str]:
  """A model of train_gpt.py, and which: as trained, or random."""
  key = jax.random.key(args.seed)
  as_config = lambda preset, mla=False: Config(
    **dataclasses.asdict(train_gpt.PRESETS[preset]), mla=mla
  )
  if args.weights is None:
    preset = args.preset or "small"
    cfg = as_config(preset, args.mla)
    return jax.jit(init, static_argnums=0)(cfg, key), cfg, preset
  params = {name: jnp.asarray(x) for name, x in np.load(args.weights).items()}
  given = np.shape(params.get("q"))
  for preset in train_gpt.PRESETS:
    cfg = as_config(preset)
    if given == (cfg.layers, cfg.width, cfg.q_heads, cfg.head_dim):
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
    "--preset", choices=SERVING, help="of random weights (small)"
  )
  parser.add_argument(
    "--mla", action="store_true", help="latent attention, of random weights"
  )
  count = train_gpt.at_least(1)
  parser.add_argument("--requests", type=count, default=16)
  parser.add_argument("--sequences", type=count, help="at once")
  parser.add_argument("--width", type=count, help="tokens a step")
  parser.add_argument("--seed", type=train_gpt.at_least(0), default=0)
  args = parser.parse_args()
  if args.weights is not None:
    if args.mla or args.preset:
      parser.error("--mla and --preset are of random weights, not of --weights")
    if not args.weights.is_file():
      parser.error(f"--weights: there is no file {args.weights}")
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
