# SPDX-License-Identifier: Apache-2.0
"""Predicts our kernels' times on AMD Instinct, and AITER's beside them.

  python3 build/build.py sim --arch gfx942 -- python benchmarks/predict.py
  ... predict.py --aiter CHECKOUT         with AITER's assembly kernels
  ... predict.py --only gemm              problems whose name contains this
  ... predict.py --options --only paged   every option of options.py instead

Nothing is timed: programs run on the simulated GPU, whose model of time
(docs/simulator.md) says what each launch would take. A figure is the sum over
all launches of one call. Of AITER's product kernels the one that is predicted
to be the fastest is taken. The last column is what AMD publishes for that
kernel and problem on that device.

Prints a table and writes predict.csv to --out. `--markdown FILE` puts it
between the markers of the device's name.
"""

import argparse
import dataclasses
import datetime
import functools
import json
import os
import pathlib
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from typing import Any

ROOT = pathlib.Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "tests/amdgpu_sim/clock"))
import assembly

# What is read once, when the simulated runtime is loaded. AITER's launches that
# wait for others of which nothing is executed end at this many instructions.
_CLOCK = tempfile.NamedTemporaryFile("r")  # noqa: SIM115
assembly.prepare(clock=_CLOCK.name)
os.environ.setdefault("AMDGPU_SIM_LIMIT", "50000000")
os.environ["JAX_PLATFORMS"] = "rocm,cpu"  # Arguments are made on the host.

import asm
import cache as caches
import jax.numpy as jnp
import numpy as np
import options
import report

import jax
from jax.experimental import aiter

FP8 = (jnp.float8_e4m3fn if asm.ARCH == "gfx950" else jnp.float8_e4m3fnuz)


@dataclasses.dataclass
class Problem:
  """One line of the table.

  Attributes:
    name: of the problem.
    work: operations, if there are `tera` of them, else bytes.
    unit: TFLOP/s or TB/s.
    ours: makes a function and its arguments.
    theirs: AITER's launches from its folder, of each candidate.
    published: microseconds by device.
  """

  name: str
  work: float
  unit: str
  ours: Callable[[], tuple[Callable[..., Any], Sequence[Any]]]
  theirs: Callable[[pathlib.Path], Iterator[Sequence[Any]]] | None = None
  published: dict[str, float] = dataclasses.field(default_factory=dict)


def array(*shape: int, dtype: Any = jnp.bfloat16):
  """On the device without a kernel. What it holds does not matter."""
  return jnp.asarray(np.zeros(shape, dtype))


def gemm(kind: str, m: int, n: int, k: int, **published) -> Problem:
  """A linear layer's product. kind: bf16, int8 (a scale a row) or fp8 (a scale
  for each 128 of a row of a, for each 128 by 128 of b)."""
  def ours():
    if kind == "bf16":
      return aiter.gemm, (array(m, k), array(n, k))
    if kind == "int8":
      return aiter.gemm_i8, (
          array(m, k, dtype=jnp.int8), array(n, k, dtype=jnp.int8),
          array(m, 1, dtype=jnp.float32), array(1, n, dtype=jnp.float32))
    return aiter.gemm_fp8, (
        array(m, k, dtype=FP8), array(n, k, dtype=FP8),
        array(m, k // 128, dtype=jnp.float32),
        array(n // 128, k // 128, dtype=jnp.float32))
  prefix = {"bf16": "bf16gemm", "int8": "I8gemm", "fp8": "fp8gemm"}[kind]
  def theirs(folder):
    for kernel, split in assembly.gemms(folder, prefix, m, n):
      yield assembly.gemm(folder, kernel, m, n, k, split)
  return Problem(f"{kind} product {m} x {n} x {k}", 2 * m * n * k, "TFLOP/s",
                 ours, theirs, published)


def attention(backward: bool, causal: bool, batch: int, heads: int,
              kv_heads: int, length: int, **published) -> Problem:
  """bf16, head dimension 128; published: TFLOP/s."""
  shapes = [(batch, length, count, 128)
            for count in (heads, kv_heads, kv_heads, heads)]
  def ours():
    *qkv, do = (array(*shape) for shape in shapes)
    function = lambda *qkv: aiter.flash_attn_func(*qkv, causal=causal)
    if not backward:
      return function, qkv
    _, pull = jax.jit(lambda *qkv: jax.vjp(function, *qkv))(*qkv)
    return lambda pull, do: pull(do), (pull, do)
  def theirs(folder):
    make = assembly.backward if backward else assembly.forward
    yield make(folder, asm.ARCH, batch, heads, kv_heads, length, length, causal,
               *[False] * backward)
  work = 4 * batch * heads * length * (length + causal) * 128 / (1 + causal)
  work *= 2.5 if backward else 1
  name = "attention " + ("backward" if backward else "forward")
  return Problem(
      f"{name}{', causal' * causal}, {batch} x {heads} ({kv_heads}) x {length}",
      work, "TFLOP/s", ours, theirs,
      {device: work / rate / 1e6 for device, rate in published.items()})


def paged(batch: int, length: int, heads: int, kv_heads: int,
          page: int) -> Problem:
  """A decoding step over a bf16 cache of pages."""
  pages = batch * length // page
  def ours():
    k, v = (array(pages, page, kv_heads, 128) for _ in range(2))
    table = np.random.default_rng(0).permutation(pages).astype(np.int32)
    return aiter.paged_attention_decode, (
        array(batch, heads, 128), k, v,
        jnp.asarray(table.reshape(batch, -1)),
        jnp.asarray(np.full(batch, length, np.int32)))
  def theirs(folder):
    yield assembly.paged(folder, batch, heads, kv_heads, length)
  return Problem(
      f"paged decode {batch} x {length}, heads {heads} ({kv_heads}),"
      f" pages of {page}", 4 * batch * length * kv_heads * 128, "TB/s", ours,
      theirs if page == 16 else None)


def latent(batch: int, length: int, heads: int) -> Problem:
  """A decoding step over latent keys of 576, of which 512 are the value."""
  work, unit = 2 * batch * heads * length * (576 + 512), "TFLOP/s"
  if heads <= 16:
    work, unit = 2 * batch * length * 576, "TB/s"
  def ours():
    pages = np.random.default_rng(0).permutation(batch * length)
    starts = lambda step: jnp.asarray(np.arange(batch + 1) * step, jnp.int32)
    return (lambda *args: aiter.mla_decode_fwd(*args, sm_scale=192**-0.5)), (
        array(batch, heads, 576), array(batch * length, 1, 1, 576),
        starts(1), starts(length), jnp.asarray(pages, jnp.int32),
        jnp.asarray(np.ones(batch, np.int32)))
  def theirs(folder):
    # Without the sum of the parts.
    for parts in (1, 2, 4, 8):
      yield assembly.latent(folder, batch, heads, length, parts)
  return Problem(f"latent decode {batch} x {length}, {heads} heads", work, unit,
                 ours, theirs)


def grouped(m: int, n: int, k: int, experts: int) -> Problem:
  def ours():
    sizes = jnp.asarray(np.full(experts, m // experts, np.int32))
    return aiter.ragged_dot, (array(m, k), array(experts, k, n), sizes)
  return Problem(f"grouped product {m} x {n} x {k}, {experts} groups",
                 2 * m * n * k, "TFLOP/s", ours)


def rows_of(name: str, function, m: int, n: int, *more, bytes_each) -> Problem:
  """An operator that passes over [m, n] in bf16; bytes of an element."""
  return Problem(f"{name} {m} x {n}", m * n * bytes_each, "TB/s",
                 lambda: (function, (array(m, n), *(f() for f in more))))


def gradient_of(name: str, function, m: int, n: int, *more, columns: int = 0,
                bytes_each) -> Problem:
  """The gradient of such an operator; columns: of its result, if not n."""
  def ours():
    arrays = (array(m, n), *(f() for f in more))
    _, pull = jax.jit(lambda *arrays: jax.vjp(function, *arrays))(*arrays)
    return lambda pull, d: pull(d), (pull, array(m, columns or n))
  return Problem(f"{name}, gradient {m} x {n}", m * n * bytes_each, "TB/s",
                 ours)


def cache_write(name: str, kind: str, *sizes: int) -> Problem:
  """65536 tokens into a paged cache: cache.py's kind and sizes."""
  write = caches.Write(kind, 65536, *sizes)
  def ours():
    pages = 2 * write.tokens // caches.PAGE
    pool = [array(*t.shape, dtype=FP8 if kind == "fp8" else t.dtype)
            for t in jax.eval_shape(lambda: caches.pools(write, pages))]
    if kind == "indexer":
      function = lambda pool, k, _, slots: [aiter.indexer_k_quant_and_cache(
          k, *pool, slots, quant_dtype=FP8)]
    else:
      function = functools.partial(caches.ours, kind)
    keys, values, slots = caches.rows(write, write.tokens, pages, 0)
    return jax.jit(function, donate_argnums=0), (pool, keys, values, slots)
  return Problem(f"cache write, {name}", write.bytes, "TB/s", ours)


def problems() -> list[Problem]:
  llama = (4, 32, 8, 4096)
  weight = lambda: array(8192)
  residual = lambda: array(16384, 8192)
  return [
      attention(False, False, *llama, MI300X=577.16, MI355X=1343.02),
      attention(False, True, *llama),
      attention(True, False, *llama, MI300X=457.38, MI355X=801.75),
      attention(True, True, *llama),
      gemm("bf16", 8192, 8192, 8192, MI355X=688.65),
      gemm("bf16", 4096, 4096, 4096, MI355X=109.62),
      gemm("bf16", 64, 8192, 7168, MI355X=30.82),
      gemm("bf16", 16, 4096, 4096),
      gemm("fp8", 4096, 4096, 7168),
      gemm("fp8", 64, 8192, 7168),
      gemm("int8", 16384, 5120, 1280, MI300X=195.45),
      paged(64, 8192, 64, 8, 16),
      paged(64, 8192, 64, 8, 64),
      latent(64, 8192, 16),
      latent(64, 8192, 128),
      grouped(16384, 4096, 4096, 8),
      rows_of("rms_norm", aiter.rms_norm, 16384, 8192, weight, bytes_each=4),
      rows_of("rms_norm", aiter.rms_norm, 131072, 1024, lambda: array(1024),
              bytes_each=4),
      rows_of("rms_norm_with_add", aiter.rms_norm_with_add, 16384, 8192,
              residual, weight, bytes_each=8),
      rows_of("rms_norm_quant to float8",
              lambda x, gamma: aiter.rms_norm_quant(x, gamma, quant_dtype=FP8),
              16384, 8192, weight, bytes_each=3),
      gradient_of("rms_norm", aiter.rms_norm, 16384, 8192, weight,
                  bytes_each=6),
      rows_of("layer_norm", aiter.layer_norm, 16384, 8192, weight, weight,
              bytes_each=4),
      gradient_of("layer_norm", aiter.layer_norm, 16384, 8192, weight, weight,
                  bytes_each=6),
      rows_of("silu_and_mul", aiter.silu_and_mul, 16384, 8192, bytes_each=3),
      gradient_of("silu_and_mul", aiter.silu_and_mul, 16384, 8192,
                  columns=4096, bytes_each=5),
      rows_of("silu_and_mul_quant to float8",
              lambda x: aiter.silu_and_mul_quant(x, quant_dtype=FP8), 16384,
              8192, bytes_each=2.5),
      rows_of("per_token_quant to float8",
              lambda x: aiter.per_token_quant(x, quant_dtype=FP8), 16384, 8192,
              bytes_each=3),
      rows_of("per_group_quant to float8",
              lambda x: aiter.per_group_quant(x, quant_dtype=FP8), 16384, 8192,
              bytes_each=3),
      rows_of("per_block_quant to float8",
              lambda x: aiter.per_block_quant(x, quant_dtype=FP8), 16384, 8192,
              bytes_each=3),
      cache_write("float8", "fp8"),
      cache_write("int8 by 16 columns", "asm"),
      cache_write("int8, a scale a token", "token"),
      cache_write("int8, a scale a block", "block"),
      cache_write("the indexer's", "indexer", 1),
  ]


def every_option(only: list[str]) -> Iterator[Problem]:
  """options.py's calls, of zeros, each operator's plain one first."""
  host, device = jax.local_devices(backend="cpu")[0], jax.local_devices()[0]
  options.normal = lambda key, *shape, dtype=jnp.bfloat16: np.zeros(
      shape, dtype)
  def arguments(option):
    # Not where only some of a kernel's workgroups are executed.
    with jax.default_device(host):
      args = option.make(jax.random.key(0))
    return option.call, jax.device_put(args, device)
  for operator in options.OPERATORS:
    unit = "TFLOP/s" if operator in options.COUNTS else "TB/s"
    for option in options.chosen(operator, only, small=False):
      yield Problem(f"{operator}: {option.name}", option.work, unit,
                    functools.partial(arguments, option))


def predicted(function, args) -> list[dict[str, Any]]:
  """Reports of the launches of one call."""
  # A program may be one that takes its arguments' memory.
  program = function if hasattr(function, "lower") else jax.jit(function)
  _CLOCK.read()  # What making the arguments launched.
  jax.block_until_ready(program(*args))
  return [json.loads(line) for line in _CLOCK.read().splitlines()]


def fastest(folder: pathlib.Path, candidates) -> list[dict[str, Any]] | None:
  found = []
  for launches in candidates:
    try:
      with assembly.launched(folder, launches) as reports:
        found.append(reports)
    except asm.HipError:
      continue  # It waits for workgroups that are not executed.
  return min(found, key=total, default=None)


def total(reports) -> float:
  return sum(each["microseconds"] for each in reports)


def bound(reports) -> str:
  """Of the launch that takes the longest."""
  return max(reports, key=lambda each: each["microseconds"])["bound"]


def line(problem: Problem, aiter_folder: pathlib.Path | None) -> dict[str, Any]:
  mine = predicted(*problem.ours())
  device = mine[0]["device"]
  found = {"problem": problem.name, "device": device, "us": total(mine),
           "rate": problem.work / total(mine) / 1e6, "unit": problem.unit,
           "bound": bound(mine), "aiter_us": None, "aiter_bound": None,
           "aiter/us": None, "published_us": problem.published.get(device)}
  if aiter_folder and problem.theirs:
    theirs = fastest(aiter_folder, problem.theirs(aiter_folder))
    if theirs:
      found |= {"aiter_us": total(theirs), "aiter_bound": bound(theirs),
                "aiter/us": total(theirs) / total(mine)}
  return found


def table(rows: list[dict[str, Any]]) -> list[list[str]]:
  lines = [["problem", "ours: bound by", "us", "rate", "AITER's: us", "ratio",
            "AITER's as published: us"]]
  show = lambda value, text: "-" if value is None else format(value, text)
  for row in rows:
    lines.append([
        row["problem"], row["bound"], f"{row['us']:.0f}",
        f"{row['rate']:.4g} {row['unit']}", show(row["aiter_us"], ".0f"),
        show(row["aiter/us"], ".2f"), show(row["published_us"], ".0f")])
  return lines


def main():
  flags = argparse.ArgumentParser(description=__doc__.split("\n")[0])
  flags.add_argument("--aiter", type=pathlib.Path, help="a checkout of AITER")
  flags.add_argument("--only", action="append", default=[])
  flags.add_argument("--options", action="store_true",
                     help="every option of every operator")
  flags.add_argument("--out", type=pathlib.Path, default="predict_out")
  flags.add_argument("--markdown", metavar="FILE")
  args = flags.parse_args()
  folder = args.aiter and args.aiter / "hsa" / asm.ARCH
  rows = []
  listed = every_option(args.only) if args.options else [
      problem for problem in problems() if not args.only or any(
          text in problem.name for text in args.only)]
  for problem in listed:
    rows.append(line(problem, folder))
    print(f"{problem.name}: {rows[-1]['us']:.1f} us", flush=True)
  print(f"\n{report.as_text(table(rows))}\n\nPredicted, not measured.")
  args.out.mkdir(parents=True, exist_ok=True)
  report.write_csv(rows, args.out / "predict.csv")
  if args.markdown:
    device = rows[0]["device"]
    title = f"{datetime.date.today()}, {device}, predicted"
    report.write_markdown(report.as_markdown(table(rows), title),
                          args.markdown, f"amd {device}")


if __name__ == "__main__":
  main()
