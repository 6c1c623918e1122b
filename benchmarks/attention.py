# SPDX-License-Identifier: Apache-2.0
"""Times attention forward and backward: ours, cuDNN, XLA and PyTorch.

  python attention.py                       the whole list of shapes.py
  python attention.py --only d128 --only host
  python attention.py --smoke               tiny shapes, on any platform

Prints a table and writes attention.csv and attention.png to --out. The exit
code is 1 if our output or a gradient is far from the other implementations'.

How it is timed. Every program is compiled before the first one runs, so no
autotuner disturbs a measurement. A figure is the median of five blocks; a
block is as many calls as fill a fifth of --seconds, queued one behind the
other, with one wait at its end. The queue hides the host, so the figure is the
device's time for one call. Backward is the gradient alone, from residuals that
a forward pass has left. FLOP count the visible pairs only: four times the head
dimension each forward, ten times backward.
"""

import argparse
import concurrent.futures
import functools
import os
import pathlib
import sys
import time

# Leave room for PyTorch beside XLA's own pool.
os.environ.setdefault("XLA_PYTHON_CLIENT_MEM_FRACTION", "0.7")

import jax.numpy as jnp
import numpy as np
import report
import shapes

import jax
from jax.experimental import aiter

OURS = "aiter"
IMPLEMENTATIONS = (OURS, "cudnn", "xla", "torch")
PASSES = ("forward", "backward")


# ------------------------------------------------------------------ inputs


def inputs(shape: shapes.Attention) -> list[np.ndarray]:
  """Returns q, k, v and dout as float32: [b,s,h,d], packed [total,h,d]."""
  rng = np.random.default_rng(0)
  lead = (shape.seq,) if shape.lengths else (shape.batch, shape.seq)
  heads = (shape.q_heads, shape.kv_heads, shape.kv_heads, shape.q_heads)
  return [
    rng.standard_normal((*lead, h, shape.head_dim), np.float32) for h in heads
  ]


def pad(x: np.ndarray, lengths: tuple[int, ...]) -> np.ndarray:
  """Turns packed [total,h,d] into padded [n,max,h,d]."""
  out = np.zeros((len(lengths), max(lengths), *x.shape[1:]), x.dtype)
  ends = np.cumsum(lengths)
  for row, n, end in zip(out, lengths, ends, strict=True):
    row[:n] = x[end - n : end]
  return out


def unpad(x: np.ndarray, lengths: tuple[int, ...]) -> np.ndarray:
  return np.concatenate([row[:n] for row, n in zip(x, lengths, strict=True)])


# ------------------------------------------------------ the implementations


def jax_function(name: str, shape: shapes.Attention):
  """Returns (attention of q, k, v; whether it takes padded sequences)."""
  window = (shape.window - 1, 0) if shape.window else None
  if name == OURS:
    kwargs = {"causal": shape.causal, "window_size": window or (-1, -1)}
    if shape.lengths:
      cu = jnp.asarray(np.cumsum((0, *shape.lengths)), jnp.int32)
      longest = max(shape.lengths)
      return lambda q, k, v: aiter.flash_attn_varlen(
        q, k, v, cu, cu, longest, longest, **kwargs
      ), False
    return functools.partial(aiter.flash_attn_func, **kwargs), False

  kwargs = {"is_causal": shape.causal, "local_window_size": window}
  if shape.lengths:
    lengths = jnp.asarray(shape.lengths, jnp.int32)
    kwargs |= {"query_seq_lengths": lengths, "key_value_seq_lengths": lengths}
  fn = functools.partial(
    jax.nn.dot_product_attention, implementation=name, **kwargs
  )
  return fn, bool(shape.lengths)


class JaxProgram:
  """One problem of one JAX implementation, compiled but not yet run."""

  def __init__(self, name: str, shape: shapes.Attention, dtype: str):
    device = jax.devices()[0]
    if name == "cudnn" and device.platform != "gpu":
      raise report.Unsupported("no NVIDIA GPU")
    if name == "xla" and self._score_bytes(shape) > self._room(device) / 4:
      raise report.Unsupported("no room for the scores")
    fn, self.padded = jax_function(name, shape)
    self.shape, self.dtype = shape, dtype
    specs = [jax.ShapeDtypeStruct(x.shape, dtype) for x in self._arrays()]
    tree = None

    def residuals(q, k, v):
      nonlocal tree
      out, vjp = jax.vjp(fn, q, k, v)
      leaves, tree = jax.tree.flatten(vjp)
      return out, leaves

    self.forward = jax.jit(fn).lower(*specs[:3]).compile()
    lowered = jax.jit(residuals).lower(*specs[:3])
    _, leaves = jax.tree.map(
      lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), lowered.out_info
    )
    self.residuals = lowered.compile()
    self.backward = (
      jax.jit(lambda leaves, dout: jax.tree.unflatten(tree, leaves)(dout))
      .lower(leaves, specs[3])
      .compile()
    )

  @staticmethod
  def _score_bytes(shape: shapes.Attention) -> int:
    batch = len(shape.lengths) or shape.batch
    seq = max(shape.lengths, default=shape.seq)
    return 4 * batch * shape.q_heads * seq * seq

  @staticmethod
  def _room(device) -> float:
    return (device.memory_stats() or {}).get("bytes_limit", float("inf"))

  def _arrays(self) -> list[np.ndarray]:
    arrays = inputs(self.shape)
    if self.padded:
      arrays = [pad(x, self.shape.lengths) for x in arrays]
    return arrays

  def run(self, seconds: float):
    """Returns {pass: time of a call} and [out, dq, dk, dv] as float32."""
    q, k, v, dout = (jnp.asarray(x, self.dtype) for x in self._arrays())
    wait = jax.block_until_ready
    times = {
      "forward": report.median_time(
        lambda: self.forward(q, k, v), wait, seconds
      )
    }
    out, leaves = wait(self.residuals(q, k, v))
    times["backward"] = report.median_time(
      lambda: self.backward(leaves, dout), wait, seconds
    )
    results = [out, *self.backward(leaves, dout)]
    results = [np.asarray(x.astype(jnp.float32)) for x in results]
    if self.padded:
      results = [unpad(x, self.shape.lengths) for x in results]
    return times, results


class TorchProgram:
  """PyTorch's scaled_dot_product_attention on the same GPU."""

  def __init__(self, shape: shapes.Attention, dtype: str):
    if not report.HAS_TORCH or jax.devices()[0].platform != "gpu":
      raise report.Unsupported("no PyTorch or no GPU")
    if shape.lengths or shape.window:
      raise report.Unsupported("scaled_dot_product_attention has no such mask")
    self.shape, self.dtype = shape, dtype

  def run(self, seconds: float):
    # Late, so that JAX has loaded its own version of cuDNN first.
    import torch  # noqa: PLC0415

    torch.cuda.empty_cache()
    # PyTorch wants [b,h,s,d].
    q, k, v, dout = (
      torch.tensor(
        x.swapaxes(1, 2), device="cuda", dtype=getattr(torch, self.dtype)
      )
      for x in inputs(self.shape)
    )

    def forward():
      return torch.nn.functional.scaled_dot_product_attention(
        q,
        k,
        v,
        is_causal=self.shape.causal,
        enable_gqa=self.shape.q_heads != self.shape.kv_heads,
      )

    def wait(_):
      torch.cuda.synchronize()

    times = {"forward": report.median_time(forward, wait, seconds)}
    for x in (q, k, v):
      x.requires_grad_()
    out = forward()
    backward = functools.partial(
      torch.autograd.grad, out, (q, k, v), dout, retain_graph=True
    )
    times["backward"] = report.median_time(backward, wait, seconds)
    results = [
      x.detach().float().cpu().numpy().swapaxes(1, 2)
      for x in (out, *backward())
    ]
    return times, results


# ----------------------------------------------------------------- timing


def host_report(seconds: float) -> list[tuple[str, float, str]]:
  """Returns (what, figure, unit) of what a call of ours costs the host.

  A call of a compiled function with one tiny attention in it is compared with
  one that has one tiny kernel behind a bare ffi_call, JAX's random bits. Where
  that kernel is missing, one XLA addition takes its place.
  """
  wait = jax.block_until_ready
  q = jnp.ones((1, 16, 1, 64), jnp.bfloat16)
  bits = jnp.ones((1,), jnp.uint32)

  def ffi(x):
    spec = jax.ShapeDtypeStruct(x.shape, x.dtype)

    def branch(prefix):
      call = jax.ffi.ffi_call(f"{prefix}_threefry2x32_ffi", (spec, spec))
      return lambda x: call(x, x, x, x)[0]

    return jax.lax.platform_dependent(
      x, cuda=branch("cu"), rocm=branch("hip"), default=lambda x: x + x
    )

  def attend(x):
    return aiter.flash_attn_func(x, x, x)

  bare, ours = jax.jit(ffi), jax.jit(attend)
  wait(bare(bits))  # the process is warm now

  def compile_attention():
    lowered = jax.jit(attend).lower(q)
    start = time.perf_counter()
    compiled = lowered.compile()
    middle = time.perf_counter()
    wait(compiled(q))
    return middle - start, time.perf_counter() - middle

  compile_1, call_1 = compile_attention()
  jax.clear_caches()
  compile_2, call_2 = compile_attention()
  later = report.median_time(lambda: wait(ours(q)), wait, seconds)
  ours_host = report.median_time(lambda: ours(q), wait, seconds)
  bare_host = report.median_time(lambda: bare(bits), wait, seconds)
  other = (
    "a bare ffi_call"
    if jax.devices()[0].platform == "gpu"
    else "one XLA addition"
  )
  ms, us = 1e3, 1e6
  return [
    ("compile, first in the process", compile_1 * ms, "ms"),
    ("compile, again", compile_2 * ms, "ms"),
    ("first call", call_1 * ms, "ms"),
    ("first call of the second executable", call_2 * ms, "ms"),
    ("later call, waited for", later * ms, "ms"),
    ("host time of a queued call", ours_host * us, "us"),
    (f"the same, {other}", bare_host * us, "us"),
    (f"host time above {other}", (ours_host - bare_host) * us, "us"),
  ]


# ---------------------------------------------------------------- reports


def table(rows: list[dict]) -> list[list[str]]:
  """Returns the header and a line a problem and pass: TFLOP/s and ratios."""
  present = [
    n for n in IMPLEMENTATIONS if any(r["implementation"] == n for r in rows)
  ]
  others = [n for n in present if n != OURS]
  cells = {(r["shape"], r["pass"], r["implementation"]): r for r in rows}
  lines = [
    ["problem", "pass", "ms", *present, *(f"{OURS}/{n}" for n in others)]
  ]
  for name, which in dict.fromkeys((r["shape"], r["pass"]) for r in rows):
    speed = {
      n: cells[name, which, n]["tflops"]
      for n in present
      if (name, which, n) in cells
    }
    ours = cells.get((name, which, OURS))
    lines.append(
      [
        name,
        which,
        f"{ours['ms']:.3f}" if ours else "-",
        *(f"{speed[n]:.3g}" if n in speed else "-" for n in present),
        *(
          f"{speed[OURS] / speed[n]:.2f}" if ours and n in speed else "-"
          for n in others
        ),
      ]
    )
  return lines


def plot(rows: list[dict], title: str, path: pathlib.Path) -> bool:
  """Draws TFLOP/s as bars; False without matplotlib."""
  try:
    from matplotlib.figure import Figure  # noqa: PLC0415
  except ImportError:
    return False
  names = list(dict.fromkeys(r["shape"] for r in rows))
  present = list(dict.fromkeys(r["implementation"] for r in rows))
  fig = Figure(figsize=(9, 1 + 0.5 * len(names)), layout="constrained")
  for axes, which in zip(fig.subplots(1, 2, sharey=True), PASSES, strict=True):
    for i, name in enumerate(present):
      speed = {
        r["shape"]: r["tflops"]
        for r in rows
        if r["pass"] == which and r["implementation"] == name
      }
      axes.barh(
        [
          y + (i + 0.5) * 0.8 / len(present) - 0.4
          for y, n in enumerate(names)
          if n in speed
        ],
        [speed[n] for n in names if n in speed],
        0.8 / len(present),
        label=name,
      )
    axes.set(title=which, xlabel="TFLOP/s")
    axes.set_yticks(range(len(names)), names)
  fig.axes[0].invert_yaxis()
  fig.axes[0].legend()
  fig.suptitle(title, fontsize="small")
  fig.savefig(path, dpi=120)
  return True


# ------------------------------------------------------------------- main


def prepare(problems, names, dtype, jobs):
  """Compiles everything, several at a time; returns {(problem, name): it}."""
  programs = {}

  def build(shape, name):
    try:
      return (
        TorchProgram(shape, dtype)
        if name == "torch"
        else JaxProgram(name, shape, dtype)
      )
    except Exception as e:  # an implementation's refusal has any type
      if name == OURS:
        raise
      return report.Unsupported(str(e).split("\n")[0][:100])

  with concurrent.futures.ThreadPoolExecutor(jobs) as pool:
    futures = {
      (shape.name, name): pool.submit(build, shape, name)
      for shape in problems
      for name in names
    }
    for i, (key, future) in enumerate(futures.items(), 1):
      programs[key] = future.result()
      print(
        f"compiled {i}/{len(futures)} {' '.join(key)}".ljust(60),
        end="\r" if sys.stdout.isatty() and i < len(futures) else "\n",
      )
  return programs


def measure(problems, names, programs, seconds):
  """Returns (the rows of the CSV file, what went wrong)."""
  rows, wrong = [], []
  for shape in problems:
    found = {}
    for name in names:
      program = programs.pop((shape.name, name))
      try:
        if isinstance(program, report.Unsupported):
          raise program
        found[name] = program.run(seconds)
      except Exception as e:  # out of memory has any type
        if name == OURS:
          raise
        print(f"{shape.name}: no {name}: {str(e).splitlines()[0][:90]}")
      del program
    theirs = next(
      (found[n][1] for n in names if n != OURS and n in found), None
    )
    for name, (times, results) in found.items():
      off = report.error(results, theirs) if theirs and name == OURS else 0.0
      if not off < 0.05:
        wrong.append(f"{shape.name}: {OURS} is off by {off:.3g}")
      for which in PASSES:
        tflops = shape.flops(which == "backward") / times[which] / 1e12
        rows.append(
          {
            "shape": shape.name,
            "pass": which,
            "implementation": name,
            "ms": times[which] * 1e3,
            "tflops": tflops,
            "error": off,
          }
        )
        print(
          f"{shape.name:<18}{which:<9}{name:<6}{times[which] * 1e3:>10.3f}"
          f" ms{tflops:>9.3g} TFLOP/s",
          flush=True,
        )
  return rows, wrong


def main() -> int:
  parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
  parser.add_argument("--smoke", action="store_true", help="tiny shapes")
  parser.add_argument(
    "--only",
    action="append",
    metavar="TEXT",
    help='problems whose name contains TEXT; "host" for the cost of a call',
  )
  parser.add_argument(
    "--implementations",
    nargs="+",
    choices=IMPLEMENTATIONS,
    default=IMPLEMENTATIONS,
  )
  parser.add_argument(
    "--dtype", choices=("bfloat16", "float16", "float32"), default="bfloat16"
  )
  parser.add_argument(
    "--seconds", type=float, default=0.3, help="device time spent on one figure"
  )
  parser.add_argument(
    "--jobs",
    type=int,
    default=min(8, os.cpu_count()),
    help="programs compiled at a time",
  )
  parser.add_argument("--out", type=pathlib.Path, default="attention_out")
  parser.add_argument(
    "--markdown", metavar="FILE", help="write the table there too; - prints it"
  )
  args = parser.parse_args()
  only = args.only or [""]
  problems = [
    s
    for s in (shapes.SMOKE if args.smoke else shapes.ATTENTION)
    if any(text in s.name for text in only)
  ]
  with_host = any(text in "host" for text in only)
  if not problems and not with_host:
    parser.error("no problem has that name; see shapes.py")
  seconds = 0.02 if args.smoke else args.seconds
  title = report.title(args.dtype)
  print(title)

  host = host_report(seconds) if with_host else []
  programs = prepare(problems, args.implementations, args.dtype, args.jobs)
  rows, wrong = measure(problems, args.implementations, programs, seconds)

  lines = table(rows)
  print()
  if rows:
    print(
      f"{report.as_text(lines)}\n\nms: ours; {', '.join(IMPLEMENTATIONS)}: "
      "TFLOP/s; last columns: ratios of them"
    )
  for what, figure, unit in host:
    print(f"{what:<38}{figure:>10.3g} {unit}")

  args.out.mkdir(parents=True, exist_ok=True)
  if rows:
    report.write_csv(rows, args.out / "attention.csv")
    if not plot(rows, title, args.out / "attention.png"):
      print("no plot: matplotlib is not installed")
  if args.markdown:
    text = report.as_markdown(lines, title)
    if host:
      text += "\n| cost on the host | |\n|---|---:|\n" + "".join(
        f"| {what} | {figure:.3g} {unit} |\n" for what, figure, unit in host
      )
    report.write_markdown(text, args.markdown, "attention")
  for text in wrong:
    print(f"WRONG: {text}", file=sys.stderr)
  return 1 if wrong else 0


if __name__ == "__main__":
  sys.exit(main())
