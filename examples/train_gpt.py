# SPDX-License-Identifier: Apache-2.0
"""Trains a byte-level GPT twice from one seed, and compares the two runs.

The text is Python's own standard library, which every machine has. The first
run's attention and norms are those of `jax.experimental.aiter`, the second
one's `jax.nn.dot_product_attention` and a formula in `jax.numpy`. Everything
else is the same, so the two loss curves must lie on each other; the exit code
is 1 if they part.

  python train_gpt.py                   a small model, made for two CPU cores
  python train_gpt.py --preset gpu      a larger one in bfloat16, for a GPU
  python train_gpt.py --mesh data=2,context=2

The last divides the first run over four devices: sequences of a batch by the
axis data, and the tokens of each by the axis context, over which attention is a
ring. The second run has one device still. Host CPUs count as many as are asked
for.

Written to --out: loss.csv, loss.png, sample.txt and weights.npz, which
serve_gpt.py serves. Each run has a process of its own, so that its peak memory
is its own too.
"""

import argparse
import csv
import dataclasses
import functools
import json
import math
import pathlib
import resource
import subprocess
import sys
import sysconfig
import time
from collections.abc import Callable
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import jax
from jax.experimental import aiter


@dataclasses.dataclass(frozen=True)
class Config:
  """One preset: the model, and how long it is trained."""

  layers: int
  width: int
  q_heads: int
  kv_heads: int
  seq: int
  batch: int
  steps: int
  learning_rate: float
  dtype: str
  limit: float  # largest difference of the two losses, in nats

  @property
  def head_dim(self) -> int:
    return self.width // self.q_heads


PRESETS = {
  "small": Config(4, 128, 4, 2, 256, 8, 250, 3e-3, "float32", 0.02),
  "gpu": Config(12, 1024, 8, 2, 2048, 8, 300, 6e-4, "bfloat16", 0.1),
}
RUNS = {"aiter": "jax.experimental.aiter", "jax": "jax.nn, jax.numpy"}
SAMPLE_BYTES = 384
PROMPT = b"def main("


class Operators(NamedTuple):
  """What the two runs do differently."""

  attention: Callable  # causal, of q [b,s,hq,d] and k, v [b,s,hk,d]
  rms_norm: Callable  # of x [b,s,w] and its gain [w]
  rms_norm_with_add: Callable  # of x, residual, gain: (norm of sum, sum)


def plain_rms_norm(x: jax.Array, gain: jax.Array) -> jax.Array:
  y = x.astype(jnp.float32)
  y *= jax.lax.rsqrt(jnp.mean(y * y, -1, keepdims=True) + 1e-6)
  return (y * gain).astype(x.dtype)


def plain_rms_norm_with_add(
  x: jax.Array, residual: jax.Array, gain: jax.Array
) -> tuple[jax.Array, jax.Array]:
  x += residual
  return plain_rms_norm(x, gain), x


def operators(name: str) -> Operators:
  """Returns a run's operators."""
  if name == "aiter":
    return Operators(
      functools.partial(aiter.flash_attn_func, causal=True),
      aiter.rms_norm,
      aiter.rms_norm_with_add,
    )
  return Operators(
    functools.partial(jax.nn.dot_product_attention, is_causal=True),
    plain_rms_norm,
    plain_rms_norm_with_add,
  )


def init(cfg: Config, key: jax.Array) -> dict:
  """Returns the weights; those of all layers are stacked on the first axis."""
  n, w, d = cfg.layers, cfg.width, cfg.head_dim
  shapes = {
    "embed": (256, w),
    "q": (n, w, cfg.q_heads, d),
    "k": (n, w, cfg.kv_heads, d),
    "v": (n, w, cfg.kv_heads, d),
    "o": (n, cfg.q_heads, d, w),
    "up": (n, w, 4 * w),
    "down": (n, 4 * w, w),
  }
  keys = dict(zip(shapes, jax.random.split(key, len(shapes)), strict=True))
  params = {
    name: jax.random.normal(keys[name], shape) * 0.02
    for name, shape in shapes.items()
  }
  for name in ("o", "down"):  # so that the sum over layers keeps its size
    params[name] /= math.sqrt(2 * n)
  return params | {
    "norm1": jnp.ones((n, w)),
    "norm2": jnp.ones((n, w)),
    "norm": jnp.ones(w),
  }


def rotary(x: jax.Array, positions: jax.Array | None = None) -> jax.Array:
  """Rotates pairs of features by their position [s], x being [b,s,h,d]."""
  half = x.shape[-1] // 2
  if positions is None:
    positions = jnp.arange(x.shape[1])
  angle = positions[:, None] * 1e4 ** -(jnp.arange(half) / half)
  cos, sin = (f(angle)[:, None, :].astype(x.dtype) for f in (jnp.cos, jnp.sin))
  a, b = x[..., :half], x[..., half:]
  return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], -1)


def logits(
  params: dict,
  tokens: jax.Array,
  ops: Operators,
  cfg: Config,
  positions: jax.Array | None = None,
) -> jax.Array:
  """Returns the next byte's logits [b,s,256] for tokens [b,s]."""
  layers = {k: v for k, v in params.items() if k not in ("embed", "norm")}
  layers = jax.tree.map(lambda x: x.astype(cfg.dtype), layers)

  def layer(x, p):
    y = ops.rms_norm(x, p["norm1"])
    q, k, v = (jnp.einsum("bsw,whd->bshd", y, p[n]) for n in "qkv")
    y = ops.attention(rotary(q, positions), rotary(k, positions), v)
    y = jnp.einsum("bshd,hdw->bsw", y, p["o"])
    y, x = ops.rms_norm_with_add(y, x, p["norm2"])
    return x + jnp.square(jax.nn.relu(y @ p["up"])) @ p["down"], None

  x, _ = jax.lax.scan(layer, params["embed"][tokens].astype(cfg.dtype), layers)
  x = ops.rms_norm(x, params["norm"])
  return (x @ params["embed"].T.astype(cfg.dtype)).astype(jnp.float32)


def loss_fn(
  params: dict, tokens: jax.Array, ops: Operators, cfg: Config
) -> jax.Array:
  """Returns the mean cross entropy in nats a byte, tokens being [b,s+1]."""
  return cross_entropy(params, tokens[:, :-1], tokens[:, 1:], ops, cfg)


def cross_entropy(
  params: dict,
  tokens: jax.Array,
  following: jax.Array,
  ops: Operators,
  cfg: Config,
  positions: jax.Array | None = None,
) -> jax.Array:
  """Returns loss_fn's mean over tokens [b,s] and those that follow them."""
  logp = jax.nn.log_softmax(logits(params, tokens, ops, cfg, positions))
  return -jnp.mean(jnp.take_along_axis(logp, following[..., None], -1))


def parallel_loss(mesh: Mesh, cfg: Config) -> Callable:
  """Returns loss_fn(params, tokens) over a mesh of axes data and context."""
  ring = functools.partial(
    aiter.context_parallel_attention,
    causal=True,
    axis_name="context",
    load_balance="zigzag",
  )
  ops = operators("aiter")._replace(attention=ring)

  def local(params, tokens, following, positions):
    loss = cross_entropy(params, tokens, following, ops, cfg, positions)
    return jax.lax.pmean(loss, ("data", "context"))

  own = P("data", "context")
  loss = jax.shard_map(
    local,
    mesh=mesh,
    in_specs=(P(), own, own, P("context")),
    out_specs=P(),
  )
  in_order = functools.partial(
    aiter.reorder_causal_load_balancing,
    strategy="zigzag",
    size=mesh.shape["context"],
  )
  return lambda params, tokens: loss(
    params,
    in_order(tokens[:, :-1]),
    in_order(tokens[:, 1:]),
    in_order(jnp.arange(tokens.shape[1] - 1), axis=0),
  )


def adamw(params: dict, grads: dict, state: tuple, cfg: Config) -> tuple:
  """One step of AdamW; state is (step, first moments, second moments)."""
  step, m, v = state
  step += 1
  warm = jnp.minimum(1.0, step / 20)
  rate = (
    cfg.learning_rate
    * warm
    * (0.55 + 0.45 * jnp.cos(jnp.pi * jnp.minimum(1.0, step / cfg.steps)))
  )
  norm = jnp.sqrt(sum(jnp.vdot(g, g) for g in jax.tree.leaves(grads)))
  grads = jax.tree.map(lambda g: g / jnp.maximum(1.0, norm), grads)
  m = jax.tree.map(lambda m, g: 0.9 * m + 0.1 * g, m, grads)
  v = jax.tree.map(lambda v, g: 0.95 * v + 0.05 * g * g, v, grads)

  def update(p, m, v):
    m, v = m / (1 - 0.9**step), v / (1 - 0.95**step)
    decay = 0.1 * p if p.ndim > 2 else 0.0
    return p - rate * (m / (jnp.sqrt(v) + 1e-8) + decay)

  return jax.tree.map(update, params, m, v), (step, m, v)


def corpus() -> tuple[np.ndarray, np.ndarray]:
  """Returns the standard library's source as bytes: to train on, to test on."""
  folder = pathlib.Path(sysconfig.get_path("stdlib"))
  files = sorted(folder.glob("*.py"))
  text = np.frombuffer(b"\n".join(f.read_bytes() for f in files), np.uint8)
  cut = len(text) * 19 // 20
  return text[:cut], text[cut:]


def batches(text: np.ndarray, cfg: Config, count: int, seed: int):
  """Yields `count` random batches [batch, seq + 1], the same for a seed."""
  rng = np.random.default_rng(seed)
  for _ in range(count):
    start = rng.integers(0, len(text) - cfg.seq - 1, cfg.batch)
    yield text[start[:, None] + np.arange(cfg.seq + 1)].astype(np.int32)


def progress(label: str, done: int, total: int, text: str) -> None:
  """Draws a progress bar; in a log, prints one line for each tenth."""
  tty = sys.stdout.isatty()
  if not tty and done % max(1, total // 10) and done != total:
    return
  bar = "#" * (24 * done // total)
  line = f"{label:>6} [{bar:<24}] {done:>{len(str(total))}}/{total} {text}"
  end = "\n" if done == total or not tty else "\r"
  print(line.ljust(79), end=end, flush=True)


def generate(
  params: dict, ops: Operators, cfg: Config, key: jax.Array
) -> bytes:
  """Continues PROMPT by SAMPLE_BYTES bytes, at temperature 0.8."""

  @jax.jit
  def next_byte(params, window, last, key):
    row = logits(params, window[None], ops, cfg)[0, last]
    return jax.random.categorical(key, row / 0.8)

  text = list(PROMPT)
  for k in jax.random.split(key, SAMPLE_BYTES):
    window = np.zeros(cfg.seq, np.int32)
    tail = text[-cfg.seq :]
    window[: len(tail)] = tail
    text.append(int(next_byte(params, window, len(tail) - 1, k)))
  return bytes(text)


def peak_memory(step) -> tuple[int, str]:
  """Returns the peak in bytes, and what was measured."""
  stats = jax.local_devices()[0].memory_stats()
  if stats and "peak_bytes_in_use" in stats:
    return stats["peak_bytes_in_use"], "device peak"
  size = step.memory_analysis()
  if size is not None:
    total = (
      size.argument_size_in_bytes
      + size.output_size_in_bytes
      + size.temp_size_in_bytes
      - size.alias_size_in_bytes
    )
    return total, "buffers of a step"
  return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024, "process"


def train(
  name: str,
  cfg: Config,
  seed: int,
  out: pathlib.Path,
  mesh: dict[str, int] | None,
) -> None:
  """Trains once; writes what `main` compares to <out>/<name>.json."""
  ops = operators(name)
  loss_of = functools.partial(loss_fn, ops=ops, cfg=cfg)
  text, held_out = corpus()
  key = jax.random.key(seed)
  params = jax.jit(functools.partial(init, cfg))(key)
  if mesh:
    devices = np.array(jax.devices()[: math.prod(mesh.values())])
    on = Mesh(devices.reshape(*mesh.values()), tuple(mesh))
    loss_of = parallel_loss(on, cfg)
    params = jax.device_put(params, NamedSharding(on, P()))
  zeros = jax.tree.map(jnp.zeros_like, params)
  state = (jnp.zeros((), jnp.int32), zeros, jax.tree.map(jnp.copy, zeros))

  @functools.partial(jax.jit, donate_argnums=(0, 1))
  def step(params, state, tokens):
    loss, grads = jax.value_and_grad(loss_of)(params, tokens)
    return *adamw(params, grads, state, cfg), loss

  data = list(batches(text, cfg, cfg.steps, seed))
  start = time.perf_counter()
  step = step.lower(params, state, data[0]).compile()
  compile_s = time.perf_counter() - start

  losses, per_step = [], cfg.batch * cfg.seq
  start = time.perf_counter()
  for i, tokens in enumerate(data, 1):
    params, state, loss = step(params, state, tokens)
    losses.append(loss)
    if i % 10 == 0 or i == cfg.steps:  # the device runs ahead in between
      last = float(loss)
      rate = i * per_step / (time.perf_counter() - start)
      progress(name, i, cfg.steps, f"loss {last:.3f}  {rate:,.0f} tokens/s")
  seconds = time.perf_counter() - start
  memory, kind = peak_memory(step)

  test = jax.jit(loss_of)
  tests = [test(params, t) for t in batches(held_out, cfg, 8, seed)]
  result = {
    "loss": [float(x) for x in losses],
    "test_loss": float(np.mean(tests)),
    "compile_s": compile_s,
    "seconds": seconds,
    "tokens_per_s": cfg.steps * per_step / seconds,
    "memory": memory,
    "memory_kind": kind,
    "device": (f"{math.prod(mesh.values())} x " if mesh else "")
    + jax.devices()[0].device_kind,
    "parameters": sum(x.size for x in jax.tree.leaves(params)),
  }
  (out / f"{name}.json").write_text(json.dumps(result))
  if name == "aiter":
    params = jax.device_put(params, jax.devices()[0])
    np.savez(out / "weights.npz", **params)
    sample = generate(params, ops, cfg, jax.random.fold_in(key, 1))
    (out / "sample.txt").write_text(sample.decode("utf-8", "replace"))


def plot(results: dict, path: pathlib.Path) -> bool:
  """Draws both loss curves and their difference; False without matplotlib."""
  try:
    from matplotlib.figure import Figure  # noqa: PLC0415
  except ImportError:
    return False

  fig = Figure(figsize=(7, 5), layout="constrained")
  top, bottom = fig.subplots(2, sharex=True, height_ratios=(3, 1))
  steps = range(1, len(results["aiter"]["loss"]) + 1)
  top.plot(
    steps, results["aiter"]["loss"], lw=4, alpha=0.4, label=RUNS["aiter"]
  )
  top.plot(
    steps, results["jax"]["loss"], lw=1, color="black", label=RUNS["jax"]
  )
  top.set(ylabel="loss, nats per byte", title="One model, trained twice")
  top.legend()
  a, b = (np.array(r["loss"]) for r in results.values())
  bottom.semilogy(steps, np.maximum(abs(a - b), 1e-9), lw=1)
  bottom.set(ylabel="difference", xlabel="step")
  fig.savefig(path, dpi=120)
  return True


def at_least(low: int) -> Callable[[str], int]:
  """The type of a flag that is an integer, and not less."""

  def integer(value: str) -> int:
    if int(value) < low:
      raise argparse.ArgumentTypeError(f"{value} is not at least {low}")
    return int(value)

  return integer


def mesh_axes(text: str) -> dict[str, int]:
  """Returns the sizes of the axes data and context of "data=2,context=2"."""
  sizes = {"data": 1, "context": 1}
  for part in text.split(","):
    name, _, size = part.partition("=")
    if name not in sizes or not size.isdecimal() or int(size) < 1:
      raise argparse.ArgumentTypeError(
        f"{part!r} is not data=N or context=N of N devices"
      )
    sizes[name] = int(size)
  return sizes


def run_each(args: argparse.Namespace, cfg: Config) -> dict[str, dict] | None:
  """Trains in a process for each run; what they found, None if one failed."""
  results = {}
  for name, function in RUNS.items():  # in turn: each has the machine alone
    command = [
      sys.executable,
      __file__,
      "--run",
      name,
      "--preset",
      args.preset,
      "--steps",
      str(cfg.steps),
      "--out",
      args.out,
      "--seed",
      str(args.seed),
    ]
    if args.mesh:
      axes = ",".join(f"{axis}={n}" for axis, n in args.mesh.items())
      command += ["--mesh", axes]
    if subprocess.run(command).returncode:
      print(f"the run with {function} failed", file=sys.stderr)
      return None
    path = args.out / f"{name}.json"
    results[name] = json.loads(path.read_text())
    path.unlink()
  return results


def report(results: dict[str, dict], cfg: Config, out: pathlib.Path) -> bool:
  """Prints and writes what the runs found; returns whether losses agree."""
  ours, theirs = results.values()
  print(
    f"\n{ours['parameters']:,} parameters, {cfg.steps} steps of "
    f"{cfg.batch} x {cfg.seq} bytes, {cfg.dtype}, {ours['device']}"
  )
  print(
    f"{'':<30}{'tokens/s':>10}{'memory':>10}{'compile':>9}"
    f"{'train':>8}{'test':>8}"
  )
  for name, r in results.items():
    print(
      f"{RUNS[name]:<30}{r['tokens_per_s']:>10,.0f}"
      f"{r['memory'] / 2**20:>7,.0f} MB{r['compile_s']:>7.1f} s"
      f"{r['loss'][-1]:>8.4f}{r['test_loss']:>8.4f}"
    )
  print(f"memory: {ours['memory_kind']}; train, test: loss in nats per byte")

  with open(out / "loss.csv", "w", newline="") as f:
    rows = csv.writer(f)
    rows.writerow(["step", *results])
    rows.writerows(
      zip(
        range(1, cfg.steps + 1),
        *(r["loss"] for r in results.values()),
        strict=True,
      )
    )
  print(f"\nWhat the model writes after {PROMPT.decode()!r}:\n")
  print((out / "sample.txt").read_text())
  if plot(results, out / "loss.png"):
    print(f"\nloss curves: {out / 'loss.png'}")
  else:
    print("\nno loss.png: matplotlib is not installed")

  worst = float(np.max(np.abs(np.subtract(ours["loss"], theirs["loss"]))))
  same = worst <= cfg.limit  # False for NaN too
  print(
    f"largest difference of the two losses: {worst:.2g} "
    f"(limit {cfg.limit:g}): {'the same' if same else 'THEY PART'}"
  )
  return same


def main() -> int:
  parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
  parser.add_argument("--preset", choices=PRESETS, default="small")
  parser.add_argument(
    "--steps", type=at_least(1), help="training steps of each run"
  )
  parser.add_argument("--out", type=pathlib.Path, default="train_gpt_out")
  parser.add_argument("--seed", type=at_least(0), default=0)
  parser.add_argument(
    "--mesh", type=mesh_axes, help="devices of each axis: data=2,context=2"
  )
  parser.add_argument("--run", choices=RUNS, help=argparse.SUPPRESS)
  args = parser.parse_args()
  cfg = PRESETS[args.preset]
  if args.mesh:
    data, context = args.mesh.values()
    if cfg.batch % data or cfg.seq % (2 * context):
      parser.error(
        f"--mesh: {cfg.batch} sequences of {cfg.seq} bytes cannot be divided"
        f" into {data} x {2 * context} parts"
      )
  if args.steps:
    cfg = dataclasses.replace(cfg, steps=args.steps)
  args.out.mkdir(parents=True, exist_ok=True)
  if args.run:
    mesh = args.mesh if args.run == "aiter" else None
    if mesh:
      jax.config.update("jax_num_cpu_devices", math.prod(mesh.values()))
      if math.prod(mesh.values()) > len(jax.devices()):
        parser.error(f"--mesh: there are {len(jax.devices())} devices")
    train(args.run, cfg, args.seed, args.out, mesh)
    return 0

  results = run_each(args, cfg)
  return 0 if results and report(results, cfg, args.out) else 1


if __name__ == "__main__":
  sys.exit(main())
