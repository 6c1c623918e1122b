# SPDX-License-Identifier: Apache-2.0
"""Times a training step of a model of Llama's shape, ours piece by piece.

  python llama_step.py            12 layers of 2048 channels, 4 x 4096 tokens
  python llama_step.py --smoke    a tiny one, on any platform

The first run is what one has without these operators: XLA, and on NVIDIA
cuDNN's attention. Each further run takes one more of ours: attention, RMSNorm
(with the addition before it), rotary embedding, SwiGLU, the loss. Prints a
table of milliseconds a step and writes llama_step.csv to --out. The exit code
is 1 if a run's loss after three steps of training parts from the first run's.

Weights are bfloat16, Adam's moments float32; nothing is rematerialised. Every
run starts from one seed. All are compiled before the first is timed; how:
report.median_time. FLOP are those of the matrix products, of attention only
the visible pairs'.

Before 0.12, XLA's dynamic slice fusion calls twice what a scan saves:
XLA_FLAGS=--xla_gpu_enable_dynamic_slice_fusion=false ends that.
"""

import argparse
import functools
import pathlib
import sys
from collections.abc import Callable
from typing import NamedTuple

import jax.numpy as jnp
import report
import shapes

import jax
from jax.experimental import aiter


class Model(NamedTuple):
  """The model's sizes, and a batch's."""

  layers: int = 12
  width: int = 2048
  q_heads: int = 16
  kv_heads: int = 8
  head_dim: int = 128
  hidden: int = 5632
  words: int = 32000
  batch: int = 4
  seq: int = 4096
  dtype: str = "bfloat16"

  def flops(self) -> float:
    """Of a step: three products forward and backward for each weight."""
    heads = self.q_heads + self.kv_heads
    layer = self.width * (2 * heads * self.head_dim + 3 * self.hidden)
    weights = self.layers * layer + self.width * self.words
    attention = shapes.Attention(
      "",
      self.batch,
      self.q_heads,
      self.kv_heads,
      self.seq,
      self.head_dim,
      causal=True,
    )
    products = 6.0 * weights * self.batch * self.seq
    return products + self.layers * attention.flops("both")


SMOKE = Model(2, 64, 4, 2, 16, 96, 128, 2, 32, "float32")


class Pieces(NamedTuple):
  """What the runs do differently."""

  attention: Callable  # causal, of q [b,s,hq,d] and k, v [b,s,hk,d]
  norm_with_add: (
    Callable  # of x, residual [b,s,w], gain [w]: (norm of sum, sum)
  )
  rope: Callable  # of q, k and two tables [s,d/2]
  swiglu: Callable  # of gate and up, beside each other [b,s,2*hidden]
  cross_entropy: Callable  # of logits [b,s,v] and tokens [b,s], nats a token


def plain_attention(q, k, v):
  cuda = "cuda" in jax.devices()[0].client.platform_version
  return jax.nn.dot_product_attention(
    q, k, v, is_causal=True, implementation="cudnn" if cuda else "xla"
  )


def plain_norm_with_add(x, residual, gain):
  x += residual
  y = x.astype(jnp.float32)
  y *= jax.lax.rsqrt(jnp.mean(y * y, -1, keepdims=True) + 1e-6)
  return (y * gain).astype(x.dtype), x


def plain_rope(q, k, cos, sin):
  def turn(x):
    a, b = jnp.split(x.astype(jnp.float32), 2, -1)
    c, s = cos[:, None], sin[:, None]
    return jnp.concatenate([a * c - b * s, b * c + a * s], -1).astype(x.dtype)

  return turn(q), turn(k)


def plain_swiglu(x):
  gate, up = jnp.split(x, 2, -1)
  return jax.nn.silu(gate) * up


def plain_cross_entropy(logits, tokens):
  logits = logits.astype(jnp.float32)
  right = jnp.take_along_axis(logits, tokens[..., None], -1)[..., 0]
  return jax.nn.logsumexp(logits, -1) - right


def runs() -> dict[str, Pieces]:
  """Returns the runs, each with one more piece of ours than the one before."""
  pieces = Pieces(
    plain_attention,
    plain_norm_with_add,
    plain_rope,
    plain_swiglu,
    plain_cross_entropy,
  )
  attention = functools.partial(aiter.flash_attn_func, causal=True)
  found = {"none": pieces}
  for name, ours in (
    ("attention", dict(attention=attention)),
    ("+ rms_norm", dict(norm_with_add=aiter.rms_norm_with_add)),
    ("+ rope", dict(rope=aiter.rope_2c)),
    ("+ silu_and_mul", dict(swiglu=aiter.silu_and_mul)),
    ("+ cross_entropy", dict(cross_entropy=aiter.cross_entropy)),
  ):
    pieces = pieces._replace(**ours)
    found[name] = pieces
  return found


def init(m: Model):
  """Returns (weights, Adam's two moments); layers are stacked on axis 0."""
  n, w, d = m.layers, m.width, m.head_dim
  sizes = {
    "embed": (m.words, w),
    "q": (n, w, m.q_heads, d),
    "k": (n, w, m.kv_heads, d),
    "v": (n, w, m.kv_heads, d),
    "o": (n, m.q_heads, d, w),
    "gate_up": (n, w, 2 * m.hidden),
    "down": (n, m.hidden, w),
    "head": (w, m.words),
  }
  keys = jax.random.split(jax.random.key(0), len(sizes))
  weights = {
    name: 0.02 * jax.random.normal(key, size, m.dtype)
    for key, (name, size) in zip(keys, sizes.items(), strict=True)
  }
  gains = {"norm1": (n, w), "norm2": (n, w), "norm": (w,)}
  weights |= {name: jnp.ones(size, m.dtype) for name, size in gains.items()}
  zeros = jax.tree.map(lambda x: jnp.zeros(x.shape, jnp.float32), weights)
  return weights, zeros, zeros


def loss(weights: dict, tokens: jax.Array, m: Model, ops: Pieces) -> jax.Array:
  """Returns the mean cross entropy in nats a token, tokens being [b,s+1]."""
  tables = aiter.rotary_embedding(m.head_dim, m.seq)
  once = {name: weights[name] for name in ("embed", "norm", "head")}
  layers = {name: x for name, x in weights.items() if name not in once}

  def layer(carry, p):
    y, x = ops.norm_with_add(*carry, p["norm1"])
    q, k, v = (jnp.einsum("bsw,whd->bshd", y, p[n]) for n in "qkv")
    y = ops.attention(*ops.rope(q, k, *tables), v)
    y = jnp.einsum("bshd,hdw->bsw", y, p["o"])
    y, x = ops.norm_with_add(y, x, p["norm2"])
    return (ops.swiglu(y @ p["gate_up"]) @ p["down"], x), None

  x = once["embed"][tokens[:, :-1]]
  # A layer's last addition is part of the next one's first norm.
  (y, x), _ = jax.lax.scan(layer, (jnp.zeros_like(x), x), layers)
  y, _ = ops.norm_with_add(y, x, once["norm"])
  return jnp.mean(ops.cross_entropy(y @ once["head"], tokens[:, 1:]))


def step(state, tokens: jax.Array, m: Model, ops: Pieces):
  """Returns (the state after one step of Adam, the loss before it)."""
  weights, first, second = state
  value, grads = jax.value_and_grad(loss)(weights, tokens, m, ops)
  grads = jax.tree.map(lambda g: g.astype(jnp.float32), grads)
  first = jax.tree.map(lambda a, g: 0.9 * a + 0.1 * g, first, grads)
  second = jax.tree.map(lambda a, g: 0.95 * a + 0.05 * g * g, second, grads)

  def update(x, a, b):
    return (x - 3e-4 * a / (jnp.sqrt(b) + 1e-8)).astype(x.dtype)

  weights = jax.tree.map(update, weights, first, second)
  return (weights, first, second), value


def measure(m: Model, compiled, tokens, seconds: float) -> tuple[float, float]:
  """Returns (seconds a step, the loss after three)."""
  state = jax.jit(init, static_argnums=0)(m)

  def call():
    nonlocal state
    state, value = compiled(state, tokens)
    return value

  for _ in range(4):
    value = call()
  return report.median_time(call, jax.block_until_ready, seconds), float(value)


def main() -> int:
  parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
  parser.add_argument("--smoke", action="store_true", help="a tiny model")
  parser.add_argument("--layers", type=int, help="instead of the model's")
  parser.add_argument(
    "--seconds", type=float, default=3.0, help="device time spent on one run"
  )
  parser.add_argument("--out", type=pathlib.Path, default="llama_step_out")
  parser.add_argument(
    "--markdown", metavar="FILE", help="write the table there too; - prints it"
  )
  args = parser.parse_args()
  m = SMOKE if args.smoke else Model()
  if args.layers:
    m = m._replace(layers=args.layers)
  seconds = 0.1 if args.smoke else args.seconds
  title = report.title(m.dtype)
  print(f"{title}\n{m}")

  tokens = jax.random.randint(
    jax.random.key(1), (m.batch, m.seq + 1), 0, m.words
  )
  compiled = {}
  for name, ops in runs().items():
    run = functools.partial(step, m=m, ops=ops)
    specs = jax.eval_shape(functools.partial(init, m)), tokens
    compiled[name] = jax.jit(run, donate_argnums=0).lower(*specs).compile()
    print(f"compiled: {name}", flush=True)

  rows = []
  for name in list(compiled):
    time, value = measure(m, compiled.pop(name), tokens, seconds)
    rows.append(
      {
        "ours": name,
        "ms": time * 1e3,
        "tokens_per_s": m.batch * m.seq / time,
        "tflops": m.flops() / time / 1e12,
        "loss": value,
      }
    )
    print(f"{name:<16}{time * 1e3:>10.3f} ms a step", flush=True)

  base = rows[0]
  lines = [["ours", "loss", "ms a step", "tokens/s", "TFLOP/s", "speedup"]]
  for row in rows:
    lines.append(
      [
        row["ours"],
        f"{row['loss']:.4f}",
        f"{row['ms']:.2f}",
        f"{row['tokens_per_s']:.0f}",
        f"{row['tflops']:.3g}",
        f"{base['ms'] / row['ms']:.3f}",
      ]
    )
  print(f"\n{report.as_text(lines)}")
  args.out.mkdir(parents=True, exist_ok=True)
  report.write_csv(rows, args.out / "llama_step.csv")
  if args.markdown:
    report.write_markdown(
      report.as_markdown(lines, title), args.markdown, "llama_step"
    )
  wrong = [r["ours"] for r in rows if not abs(r["loss"] - base["loss"]) < 0.05]
  for name in wrong:
    print(f"WRONG: the loss with {name} parts from the first", file=sys.stderr)
  return 1 if wrong else 0


if __name__ == "__main__":
  sys.exit(main())
