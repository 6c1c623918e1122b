# SPDX-License-Identifier: Apache-2.0
"""Times attention forward and backward: ours and everyone's who can run it.

  python attention.py                       the whole list of shapes.py
  python attention.py --only dim --only host
  python attention.py --random 24 --only random
  python attention.py --smoke               tiny shapes, on any platform

Prints a table, and the geometric mean and the worst of our ratios to the best
peer of each problem; writes attention.csv and attention.png to --out. The exit
code is 1 if our output or a gradient is far from the other implementations'.

How it is timed. Every program is compiled before the first one runs, so no
autotuner disturbs a measurement. A figure is the median of five blocks; a
block is as many calls as fill a fifth of --seconds, queued one behind the
other, with one wait at its end. The queue hides the host, so the figure is the
device's time for one call. What the host may take longer for, up to SHORT
seconds, is timed as models have it: TURNS calls in one program, one after the
other, or in one of PyTorch's CUDA graphs. Backward is the gradient alone, from
residuals that a forward pass has left; "both" is the sum of the two. FLOP count
the visible pairs only: four times the head dimension each forward, ten times
backward.

The peers. cudnn and cudnn_packed are what jax.nn calls, the second with its
layout of sequences packed in one row, which jax.nn does not offer; xla is
jax.nn's formula, or ours where it lacks an argument; tokamax is its Mosaic
kernel, tokamax_triton the other one, both as they install, untuned. What a
peer has no argument for, it gets as a mask or bias where these can say it,
made before the clock starts.
"""

import argparse
import concurrent.futures
import functools
import importlib.util
import logging
import math
import os
import pathlib
import statistics
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
PEERS = ("cudnn", "cudnn_packed", "xla", "torch", "tokamax", "tokamax_triton")
IMPLEMENTATIONS = (OURS, *PEERS)
PASSES = ("forward", "backward", "both")
# XLA keeps the scores. Beyond this it takes long, and wins nothing.
SCORE_BYTES = 4 << 30
# Up to so many seconds a call's time may be the host's, and so many calls are
# timed in one program.
SHORT, TURNS = 1e-4, 16


# ------------------------------------------------------------------ inputs


def row_places(shape: shapes.Attention) -> np.ndarray:
  """Returns where the sequences' rows lie among those of [n * longest]."""
  longest = max(shape.lengths)
  return np.concatenate(
    [i * longest + np.arange(n) for i, n in enumerate(shape.lengths)]
  )


def pad(shape: shapes.Attention, x: jax.Array) -> jax.Array:
  """Turns packed [total,h,d] into padded [n,longest,h,d]."""
  n, longest = len(shape.lengths), max(shape.lengths)
  rows = jnp.zeros((n * longest, *x.shape[1:]), x.dtype)
  rows = rows.at[row_places(shape)].set(x)
  return rows.reshape(n, longest, *x.shape[1:])


def unpad(shape: shapes.Attention, x: jax.Array) -> jax.Array:
  return x.reshape(-1, *x.shape[2:])[row_places(shape)]


def unpadded(shape: shapes.Attention, results: dict) -> dict:
  return {n: unpad(shape, results[n]) for n in ("out", *"qkv") if n in results}


def operands(shape: shapes.Attention, dtype: str, padded: bool):
  """Returns (what is differentiated, by name; the output's gradient).

  Sequences are packed unless `padded`; rows of no sequence have no gradient.
  """
  sizes = {
    "q": (shape.seq, shape.q_heads, shape.head_dim),
    "k": (shape.keys, shape.kv_heads, shape.head_dim),
    "v": (shape.keys, shape.kv_heads, shape.values),
    "dout": (shape.seq, shape.q_heads, shape.values),
  }
  if not shape.packed:
    sizes = {name: (shape.batch, *size) for name, size in sizes.items()}
  if shape.bias:
    sizes["bias"] = (1, shape.q_heads, shape.seq, shape.keys)
  key = jax.random.key(0)
  drawn = {
    name: jax.random.normal(jax.random.fold_in(key, i), size, dtype)
    for i, (name, size) in enumerate(sizes.items())
  }
  if shape.packed and padded:
    drawn |= {name: pad(shape, drawn[name]) for name in ("q", "k", "v", "dout")}
  if shape.padded:
    drawn["dout"] = pad(shape, unpad(shape, drawn["dout"]))
  if shape.sink:
    drawn["sink"] = jnp.linspace(-1, 1, shape.q_heads, dtype=jnp.float32)
  return drawn, drawn.pop("dout")


def slopes(shape: shapes.Attention) -> jax.Array:
  heads = np.arange(1, shape.q_heads + 1)
  return jnp.asarray(2.0 ** (-8 * heads / shape.q_heads), jnp.float32)


def tables(
  shape: shapes.Attention, dtype, masked: bool, lengths: bool = False
) -> dict[str, jax.Array]:
  """Returns, of the size of the scores, what a peer has no argument for.

  Args:
    shape: the problem.
    dtype: of the bias.
    masked: whether windows and the causal mask are part of it.
    lengths: whether the sequences' lengths are.
  """
  n = max(shape.lengths) if shape.packed else shape.seq
  row = jnp.arange(n)[:, None]
  column = jnp.arange(n if shape.packed else shape.keys)
  found = {}
  if shape.alibi:
    far = jnp.abs(row - column).astype(jnp.float32)
    bias = -slopes(shape)[:, None, None] * far
    found["bias"] = bias[None].astype(dtype)
  left, right = shape.sides
  mask = None
  if masked:
    mask = jnp.ones((1, 1, n, column.size), bool)
    if left >= 0:
      mask &= (column >= row - left) | (column < shape.leading)
    if right >= 0:
      mask &= column <= row + right
  if lengths:
    ends = jnp.asarray(shape.lengths)[:, None, None, None]
    mask = column < ends if mask is None else mask & (column < ends)
  if mask is not None:
    found["mask"] = mask
  return found


def whole_bias(t: dict, table: dict):
  """Returns the sum of the learned bias and the table's, None of neither."""
  parts = [x["bias"] for x in (t, table) if "bias" in x]
  return sum(parts[1:], parts[0]) if parts else None


# ------------------------------------------------------ the implementations
#
# Each is a function of the problem, of what is differentiated and of a table.


def run_ours(shape: shapes.Attention, t: dict, table: dict) -> jax.Array:
  del table
  options = dict(
    causal=shape.causal,
    window_size=(*shape.sides, shape.leading),
    logits_soft_cap=shape.soft_cap,
    dropout_p=shape.dropout,
    dropout_key=jax.random.key(0) if shape.dropout else None,
    alibi_slopes=slopes(shape) if shape.alibi else None,
    sink=t.get("sink"),
  )
  q, k, v = (t[name] for name in "qkv")
  cu = None
  if shape.lengths:
    cu = jnp.asarray(np.cumsum((0, *shape.lengths)), jnp.int32)
  if shape.packed:
    longest = max(shape.lengths)
    return aiter.flash_attn_varlen(q, k, v, cu, cu, longest, longest, **options)
  return aiter.flash_attn_func(
    q, k, v, bias=t.get("bias"), cu_seqlens_q=cu, cu_seqlens_kv=cu, **options
  )


def lengths_of(shape: shapes.Attention):
  return jnp.asarray(shape.lengths, jnp.int32) if shape.lengths else None


def run_cudnn(
  shape: shapes.Attention, t: dict, table: dict, packed: bool
) -> jax.Array:
  # What jax.nn calls: it passes on no dropout, no packed sequences and no
  # values of another head dimension.
  from jax._src.cudnn import fused_attention_stablehlo as fused  # noqa: PLC0415

  q, k, v = (t[name] for name in "qkv")
  lengths = lengths_of(shape)
  options = dict(q_seqlen=lengths, kv_seqlen=lengths)
  if packed:
    q, k, v = q[None], k[None], v[None]
    ends = jnp.asarray(np.cumsum((0, *shape.lengths))[None], jnp.int32)
    options = dict(
      q_seqlen=lengths[None],
      kv_seqlen=lengths[None],
      q_offsets=ends,
      kv_offsets=ends,
    )
  kinds = fused.MaskType
  kind = {
    (False, False): kinds.NO_MASK,
    (False, True): kinds.CAUSAL,
    (True, False): kinds.PADDING,
    (True, True): kinds.PADDING_CAUSAL,
  }[bool(shape.lengths), shape.causal]
  window = shape.window if shape.causal and "mask" not in table else None
  out = fused.dot_product_attention(
    q,
    k,
    v,
    whole_bias(t, table),
    table.get("mask"),
    scale=shape.head_dim**-0.5,
    mask_type=kind,
    sliding_window_length=window or None,
    dropout_rate=shape.dropout,
    **options,
  )
  return out[0] if packed else out


def formula(shape: shapes.Attention, t: dict, table: dict) -> jax.Array:
  """Attention as one writes it with jax.numpy, scores in float32."""
  q, k, v = (t[name] for name in "qkv")
  b, rows, heads, d = q.shape
  q = q.reshape(b, rows, k.shape[2], -1, d)
  s = jnp.einsum("bqhgd,bkhd->bhgqk", q, k, preferred_element_type=jnp.float32)
  s = s.reshape(b, heads, rows, -1) * d**-0.5
  if shape.soft_cap:
    s = shape.soft_cap * jnp.tanh(s / shape.soft_cap)
  bias = whole_bias(t, table)
  if bias is not None:
    s += bias
  if "mask" in table:
    s = jnp.where(table["mask"], s, jnp.finfo(jnp.float32).min)
  top = jnp.max(s, -1, keepdims=True)
  if shape.sink:
    sink = t["sink"][:, None, None]
    top = jnp.maximum(top, sink)
  p = jnp.exp(s - jax.lax.stop_gradient(top))
  total = jnp.sum(p, -1, keepdims=True)
  if shape.sink:
    total += jnp.exp(sink - jax.lax.stop_gradient(top))
  p /= total
  if shape.dropout:
    keep = jax.random.bernoulli(jax.random.key(0), 1 - shape.dropout, p.shape)
    p = jnp.where(keep, p / (1 - shape.dropout), 0)
  p = p.astype(v.dtype).reshape(b, k.shape[2], -1, rows, k.shape[1])
  out = jnp.einsum("bhgqk,bkhd->bqhgd", p, v)
  return out.reshape(b, rows, heads, -1)


def run_xla(shape: shapes.Attention, t: dict, table: dict) -> jax.Array:
  # Tables are made here, where XLA fuses them with what reads them.
  del table
  make = functools.partial(tables, shape, jnp.float32)
  if shape.soft_cap or shape.sink or shape.dropout or shape.v_dim:
    masked = shape.causal or shape.window
    return formula(shape, t, make(masked, bool(shape.lengths)))
  table = make(bool(shape.leading))
  lengths = lengths_of(shape)
  return jax.nn.dot_product_attention(
    *(t[name] for name in "qkv"),
    whole_bias(t, table),
    table.get("mask"),
    is_causal=shape.causal,
    query_seq_lengths=lengths,
    key_value_seq_lengths=lengths,
    local_window_size=window_of(shape, table),
    implementation="xla",
  )


def window_of(shape: shapes.Attention, table: dict):
  return shape.sides if shape.window and "mask" not in table else None


def run_tokamax(
  shape: shapes.Attention, t: dict, table: dict, implementation: str
) -> jax.Array:
  import tokamax  # noqa: PLC0415

  lengths = lengths_of(shape)
  return tokamax.dot_product_attention(
    *(t[name] for name in "qkv"),
    whole_bias(t, table),
    table.get("mask"),
    is_causal=shape.causal,
    query_seq_lengths=lengths,
    key_value_seq_lengths=lengths,
    local_window_size=window_of(shape, table),
    logits_soft_cap=shape.soft_cap or None,
    implementation=implementation,
  )


def check(name: str, shape: shapes.Attention, score_bytes: float) -> None:
  """Raises report.Unsupported if the implementation has no such problem."""

  def refuse(reason: str, *conditions) -> None:
    if any(conditions):
      raise report.Unsupported(reason)

  if name == OURS:
    return
  if name == "xla":
    batch = len(shape.lengths) or shape.batch
    rows = max(shape.lengths) if shape.packed else shape.seq
    scores = 4 * batch * shape.q_heads * rows * (shape.kv_seq or rows)
    refuse("no room for the scores", scores > score_bytes)
    return
  refuse("no GPU", jax.devices()[0].platform != "gpu")
  tabled = shape.bias or shape.alibi or shape.leading
  refuse("no sinks", shape.sink)
  if name.startswith("tokamax"):
    refuse("not installed", not importlib.util.find_spec("tokamax"))
    refuse("no dropout", shape.dropout)
    refuse(
      "caps the sum with the bias",
      shape.soft_cap and (shape.bias or shape.alibi),
    )
  else:
    refuse("no soft cap", shape.soft_cap)
  if name == "cudnn_packed":
    two_sided = shape.window and not shape.causal
    refuse("not packed", not shape.packed)
    refuse("packed sequences have no such mask", tabled, two_sided)
  if name == "torch":
    refuse("not installed", not report.HAS_TORCH)
    refuse(
      "packed sequences have no such argument",
      shape.packed and (tabled or shape.dropout),
    )


def specs(tree):
  return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), tree)


def first_line(e: Exception) -> str:
  return (str(e) or type(e).__name__).splitlines()[0][:90]


class JaxProgram:
  """One problem of one JAX implementation, compiled but not yet run."""

  def __init__(self, name: str, shape: shapes.Attention, dtype: str):
    two_sided = bool(shape.window) and not shape.causal
    # Padded sequences, for those whose calls have no packed ones.
    self.padded = bool(shape.lengths) and name not in (OURS, "cudnn_packed")
    fn, masked = {
      OURS: (run_ours, False),
      "cudnn": (
        functools.partial(run_cudnn, packed=False),
        shape.leading or two_sided,
      ),
      "cudnn_packed": (functools.partial(run_cudnn, packed=True), False),
      "xla": (run_xla, False),
      "tokamax": (
        functools.partial(run_tokamax, implementation="mosaic"),
        shape.leading,
      ),
      "tokamax_triton": (
        functools.partial(run_tokamax, implementation="triton"),
        shape.leading,
      ),
    }[name]
    fn = functools.partial(fn, shape)
    # XLA aborts where it records cuDNN's dropout for a CUDA graph (jax 0.11.2,
    # "Check failed: local_device_ordinal.has_value()").
    graphs = not (name == "cudnn" and shape.dropout)
    options = None if graphs else {"xla_gpu_enable_command_buffer": ""}
    self.options = dict(compiler_options=options)

    def inputs():
      table = {}
      if name not in (OURS, "xla"):
        table = tables(shape, dtype, bool(masked))
      return *operands(shape, dtype, self.padded), table

    self.shape = shape
    lowered = jax.jit(inputs).lower()
    t, dout, table = specs(lowered.out_info)
    self.inputs = lowered.compile()
    self.fn = fn
    self.forward = jax.jit(fn, **self.options).lower(t, table).compile()
    self.gradients = None
    try:
      self.gradients = self._gradients(t, dout, table)
    except Exception as e:  # some have fewer problems backward than forward
      if name == OURS:
        raise
      print(f"{shape.name}: {name} forward only ({first_line(e)})")

  def _gradients(self, t, dout, table):
    """Returns programs: to residuals, and from them to gradients.

    The second one's function comes with it.
    """
    tree = None

    def residuals(t, table):
      nonlocal tree
      out, vjp = jax.vjp(lambda t: self.fn(t, table), t)
      leaves, tree = jax.tree.flatten(vjp)
      return out, leaves

    def backward(leaves, dout):
      return jax.tree.unflatten(tree, leaves)(dout)[0]

    lowered = jax.jit(residuals, **self.options).lower(t, table)
    _, leaves = specs(lowered.out_info)
    program = jax.jit(backward, **self.options).lower(leaves, dout).compile()
    return lowered.compile(), program, backward

  def _time(self, program, function, args, seconds: float) -> float:
    """Returns the time of a call of `function`, which `program` is."""
    wait = jax.block_until_ready
    call = functools.partial(program, *args)
    found = report.median_time(call, wait, seconds)
    if found > SHORT:
      return found
    turns = report.InTurn(function, [args], [0] * TURNS, **self.options)
    return turns.time([args], seconds)

  def run(self, seconds: float):
    """Returns {pass: time of a call} and {what: result}, sequences packed."""
    t, dout, table = jax.block_until_ready(self.inputs())
    args = t, table
    times = {"forward": self._time(self.forward, self.fn, args, seconds)}
    results = {"out": self.forward(*args)}
    if self.gradients:
      residuals, program, backward = self.gradients
      args = jax.block_until_ready(residuals(*args))[1], dout
      times["backward"] = self._time(program, backward, args, seconds)
      results |= program(*args)
    if self.padded or self.shape.padded:
      results |= unpadded(self.shape, results)
    return times, results


class TorchProgram:
  """PyTorch's scaled_dot_product_attention, or varlen_attn, on the same GPU."""

  def __init__(self, shape: shapes.Attention, dtype: str):
    self.shape = shape
    # A causal mask is an argument, unless there is a mask or bias beside it.
    masked = bool(shape.window or shape.leading) or (
      shape.causal and bool(shape.padded or shape.bias or shape.alibi)
    )

    def inputs():
      table = {}
      if not shape.packed:
        table = tables(shape, dtype, masked, shape.padded)
      return *operands(shape, dtype, False), table

    self.inputs = jax.jit(inputs).lower().compile()

  def run(self, seconds: float):
    # Late, so that JAX has loaded its own version of cuDNN first.
    import torch  # noqa: PLC0415

    torch.cuda.empty_cache()
    shape = self.shape
    t, dout, table = jax.tree.map(
      torch.from_dlpack, jax.block_until_ready(self.inputs())
    )
    grouped = dict(enable_gqa=True) if shape.q_heads != shape.kv_heads else {}

    if shape.packed:
      from torch.nn.attention.varlen import varlen_attn  # noqa: PLC0415

      cu = np.cumsum((0, *shape.lengths))
      cu = torch.tensor(cu, device="cuda", dtype=torch.int32)
      longest = max(shape.lengths)

      def forward():
        return varlen_attn(
          t["q"],
          t["k"],
          t["v"],
          cu,
          cu,
          longest,
          longest,
          window_size=shape.sides,
          **grouped,
        )
    else:

      def forward():
        mask, bias = table.get("mask"), whole_bias(t, table)
        if bias is not None and mask is not None:
          mask = bias.masked_fill(~mask, -math.inf)
        # PyTorch wants [b,h,s,d].
        out = torch.nn.functional.scaled_dot_product_attention(
          *(t[name].transpose(1, 2) for name in "qkv"),
          attn_mask=bias if mask is None else mask,
          dropout_p=shape.dropout,
          is_causal=shape.causal and "mask" not in table,
          **grouped,
        )
        return out.transpose(1, 2)

    def wait(_):
      torch.cuda.synchronize()

    def time_of(call):
      found = report.median_time(call, wait, seconds)
      if found > SHORT:
        return found
      graph = torch.cuda.CUDAGraph()
      with torch.cuda.graph(graph, stream=torch.cuda.current_stream()):
        for _ in range(TURNS):
          call()
      return report.median_time(graph.replay, wait, seconds) / TURNS

    # Only what is on one stream of its own may be recorded, backward too.
    with torch.cuda.stream(torch.cuda.Stream()):
      times = {"forward": time_of(forward)}
      for x in t.values():
        x.requires_grad_()
      out = forward()
      backward = functools.partial(
        torch.autograd.grad, out, tuple(t.values()), dout, retain_graph=True
      )
      times["backward"] = time_of(backward)
      results = {"out": out, **dict(zip(t, backward(), strict=True))}
      wait(results)
    results = {
      name: jnp.from_dlpack(x.detach().contiguous())
      for name, x in results.items()
    }
    if shape.padded:
      results |= unpadded(shape, results)
    return times, results


@jax.jit
def error(results: dict, expected: dict) -> jax.Array:
  """Returns the largest difference, relative to the largest value of each."""
  parts = []
  for name in results.keys() & expected.keys():
    a, b = (x[name].astype(jnp.float32) for x in (results, expected))
    parts.append(jnp.max(jnp.abs(a - b)) / jnp.max(jnp.abs(b)))
  return jnp.max(jnp.stack(parts))


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


def summary(rows: list[dict]) -> list[str]:
  """Returns, a line a pass, our ratios to each problem's fastest peer."""
  lines = []
  for which in PASSES:
    times = {}
    for r in rows:
      if r["pass"] == which:
        times.setdefault(r["shape"], {})[r["implementation"]] = r["ms"]
    ratios = []
    for shape, ms in times.items():
      ours = ms.pop(OURS, None)
      if ours and ms:
        best = min(ms, key=ms.get)
        ratios.append((ms[best] / ours, f"{shape} against {best}"))
    if ratios:
      mean = statistics.geometric_mean(ratio for ratio, _ in ratios)
      worst, where = min(ratios)
      lines.append(
        f"{which} against the best peer: {mean:.2f} in the geometric mean of "
        f"{len(ratios)}, {worst:.2f} the worst: {where}"
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
  fig = Figure(figsize=(12, 1 + 0.5 * len(names)), layout="constrained")
  all_axes = fig.subplots(1, len(PASSES), sharey=True)
  for axes, which in zip(all_axes, PASSES, strict=True):
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


def tokamax_version() -> str:
  """Imports tokamax, before threads do; returns its part of the title."""
  try:
    import tokamax  # noqa: PLC0415
  except Exception as e:  # what it is built on may lack anything
    print(f"no tokamax: {first_line(e)}")
    return ""
  # It warns of each problem that nobody has tuned it for.
  logging.getLogger("absl").setLevel(logging.ERROR)
  return f", tokamax {tokamax.__version__}"


def prepare(problems, names, dtype, jobs, score_bytes):
  """Compiles everything, several at a time; returns {(problem, name): it}."""
  programs = {}

  def build(shape, name):
    try:
      check(name, shape, score_bytes)
      return (
        TorchProgram(shape, dtype)
        if name == "torch"
        else JaxProgram(name, shape, dtype)
      )
    except Exception as e:  # an implementation's refusal has any type
      if name == OURS:
        raise
      return report.Unsupported(first_line(e))

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
    found, refused = {}, []
    for name in names:
      program = programs.pop((shape.name, name))
      try:
        if isinstance(program, report.Unsupported):
          raise program
        found[name] = program.run(seconds)
      except Exception as e:  # out of memory has any type
        if name == OURS:
          raise
        refused.append(f"{name} ({first_line(e)})")
      del program
    if refused:
      print(f"{shape.name}: without {', '.join(refused)}")
    # XLA's formula, if it ran, else the first who has gradients too. A mask of
    # dropout is everyone's own.
    others = [n for n in ("xla", *names) if n in found and n != OURS]
    off = 0.0
    if others and not shape.dropout:
      theirs = max(others, key=lambda n: len(found[n][1]))
      off = float(error(found[OURS][1], found[theirs][1]))
      if not off < 0.05:
        wrong.append(f"{shape.name}: {OURS} is {off:.3g} off {theirs}")
    for name, (times, _) in found.items():
      if "backward" in times:
        times["both"] = times["forward"] + times["backward"]
      for which in times:
        tflops = shape.flops(which) / times[which] / 1e12
        rows.append(
          {
            "shape": shape.name,
            "pass": which,
            "implementation": name,
            "ms": times[which] * 1e3,
            "tflops": tflops,
            "error": off if name == OURS else 0.0,
          }
        )
        print(
          f"{shape.name:<26}{which:<9}{name:<15}{times[which] * 1e3:>10.3f}"
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
    "--random",
    type=int,
    default=0,
    metavar="N",
    help="so many drawn problems behind the list, random0 and so on",
  )
  parser.add_argument("--seed", type=int, default=0)
  parser.add_argument(
    "--peers",
    nargs="*",
    choices=PEERS,
    help="whom to run beside ours; named, XLA runs large problems too",
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
  parser.add_argument(
    "--marker",
    default="attention",
    help="the name of the two markers in FILE that the table goes between",
  )
  args = parser.parse_args()
  only = args.only or [""]
  if args.smoke:
    problems = shapes.SMOKE + shapes.random_attention(
      args.random, args.seed, tokens=64
    )
  else:
    problems = shapes.ATTENTION + shapes.random_attention(
      args.random, args.seed
    )
  problems = [s for s in problems if any(text in s.name for text in only)]
  with_host = any(text in "host" for text in only)
  if not problems and not with_host:
    parser.error("no problem has that name; see shapes.py")
  seconds = 0.02 if args.smoke else args.seconds
  names = (OURS, *(PEERS if args.peers is None else args.peers))
  title = report.title(args.dtype)
  if any(name.startswith("tokamax") for name in names):
    title += tokamax_version()
  print(title)
  room = (jax.devices()[0].memory_stats() or {}).get("bytes_limit", math.inf)
  score_bytes = room / 4
  if args.peers is None:
    score_bytes = min(score_bytes, SCORE_BYTES)
  host = host_report(seconds) if with_host else []
  programs = prepare(problems, names, args.dtype, args.jobs, score_bytes)
  rows, wrong = measure(problems, names, programs, seconds)

  lines = table(rows)
  ratios = summary(rows)
  print()
  if rows:
    print(
      f"{report.as_text(lines)}\n\nms: ours; {', '.join(names)}: "
      "TFLOP/s; last columns: ratios of them"
    )
  print("\n".join(ratios))
  for what, figure, unit in host:
    print(f"{what:<38}{figure:>10.3g} {unit}")

  args.out.mkdir(parents=True, exist_ok=True)
  if rows:
    report.write_csv(rows, args.out / "attention.csv")
    if not plot(rows, title, args.out / "attention.png"):
      print("no plot: matplotlib is not installed")
  if args.markdown:
    text = report.as_markdown(lines, title)
    text += "".join(f"\n{line[0].upper()}{line[1:]}.\n" for line in ratios)
    if host:
      text += "\n| cost on the host | |\n|---|---:|\n" + "".join(
        f"| {what} | {figure:.3g} {unit} |\n" for what, figure, unit in host
      )
    report.write_markdown(text, args.markdown, args.marker)
  for text in wrong:
    print(f"WRONG: {text}", file=sys.stderr)
  return 1 if wrong else 0


if __name__ == "__main__":
  sys.exit(main())
