# SPDX-License-Identifier: Apache-2.0
"""Times attention over KV caches: ours, Pallas', cuDNN's and jax.numpy's.

  python paged.py                   shapes.PAGED
  python paged.py --random 20       and so many batches of random lengths, of
                                    decoding and of prefill each
  python paged.py --smoke           tiny sizes, on any platform

Prints a table and writes paged.csv to --out. The exit code is 1 if our numbers
are not those of jax.numpy. The figure is the rate at which a call reads the
keys and values of its contexts; of prefill it is also a rate of operations.

  aiter    paged_attention_decode, or unified_attention of several queries
  dense    flash_attn_func, of keys that lie together in memory; decoding alone,
           contexts of one length
  packed   flash_attn_varlen, of the same; prefill and its chunks alone
  pallas   JAX's paged attention for GPUs, whose cache has a head's pages
           together; decoding alone
  cudnn    jax.nn.dot_product_attention, of the same as dense
  xla      pages gathered, then jax.nn's formula; small batches alone
"""

import functools
import math
import statistics
import sys

import jax.numpy as jnp
import numpy as np
import report
from shapes import PAGED, PAGED_SMOKE, Paged

import jax
from jax.experimental import aiter

OURS = "aiter"
IMPLEMENTATIONS = (OURS, "dense", "packed", "pallas", "cudnn", "xla")
SETS, CALLS = 2, 8  # arguments, and calls of a program
_ROOM = 2**33  # Bytes that a plain formula may gather or score.


def drawn(count: int, seed: int) -> list[Paged]:
  """Decoding of random lengths."""
  rng = np.random.default_rng(seed)
  out = []
  for i in range(count):
    batch = int(np.exp2(rng.uniform(0, 7)))
    longest = int(np.exp2(rng.uniform(8, 16)))
    kv_heads = int(rng.choice([1, 4, 8]))
    out.append(Paged(
      f"random_{i}", batch, longest, kv_heads * int(rng.choice([1, 4, 8])),
      kv_heads, int(rng.choice([64, 128])), page=int(rng.choice([16, 64])),
      lengths=tuple(map(int, rng.integers(1, longest + 1, batch)))))
  return out


def drawn_prefill(count: int, seed: int) -> list[Paged]:
  """Prompts of random lengths, whole or in chunks, tables as wide or wider."""
  rng = np.random.default_rng(seed)
  out = []
  for i in range(count):
    longest = int(np.exp2(rng.uniform(6, 13.5)))
    batch = int(np.exp2(rng.uniform(0, min(6, 16 - np.log2(longest)))))
    kv_heads = int(rng.choice([2, 4, 8]))
    out.append(Paged(
      f"prefill_{i}", batch, longest, kv_heads * int(rng.choice([1, 4, 8])),
      kv_heads, int(rng.choice([64, 128])),
      queries=int(rng.choice([128, 512, 2048, longest, longest])),
      page=int(rng.choice([16, 64])),
      lengths=tuple(map(int, rng.integers(longest // 2, longest + 1, batch))),
      room=int(rng.choice([longest, 16384]))))
  return out


def arrays(shape: Paged, dtype, seed: int):
  """(q, k_cache, v_cache, table, lengths), pages in any order."""
  rng = np.random.default_rng(seed)
  counts = [-(-n // shape.page) for n in shape.contexts]
  pages = sum(counts)
  order, table = rng.permutation(pages).astype(np.int32), np.full(
    (shape.batch, max(*counts, -(-shape.room // shape.page))), -1, np.int32)
  for row, count, end in zip(table, counts, np.cumsum(counts)):
    row[:count] = order[end - count:end]
  keys = jax.random.split(jax.random.key(seed), 3)
  pool = (pages, shape.page, shape.kv_heads, shape.head_dim)
  if shape.cache == "int8":
    make = lambda key: jax.random.randint(key, pool, -16, 17, jnp.int8)
  else:
    own = dtype if shape.cache == "bfloat16" else shape.cache
    make = jax.jit(lambda key: jax.random.normal(
      key, pool, jnp.bfloat16).astype(own))
  q = jax.random.normal(
    keys[0], (sum(shape.new), shape.q_heads, shape.head_dim),
    jnp.dtype(dtype))
  return (q, make(keys[1]), make(keys[2]), jnp.asarray(table),
          jnp.asarray(shape.contexts, jnp.int32))


def starts(counts):
  """Where sequences of so many tokens begin, and the last one ends."""
  return jnp.asarray(np.cumsum([0, *counts]), jnp.int32)


def ours(shape: Paged, q, k, v, table, lengths):
  if shape.queries == 1:
    return aiter.paged_attention_decode(q, k, v, table, lengths)
  return aiter.unified_attention(q, k, v, starts(shape.new), lengths, table)


def pallas(shape: Paged, q, k, v, table, lengths):
  from jax.experimental.pallas.ops.gpu import paged_attention  # noqa: PLC0415

  q = q * shape.head_dim**-0.5
  return paged_attention.paged_attention(
    q, k, v, table, lengths, k_splits=math.gcd(16, table.shape[1]))


def dense(shape: Paged, implementation: str, q, k, v, lengths):
  """Ours, or jax.nn's attention of [batch, keys, heads, d]."""
  q = q.reshape(shape.batch, shape.queries, *q.shape[1:])
  k, v = (t.astype(q.dtype) for t in (k, v))
  if implementation == "dense":
    out = aiter.flash_attn_func(q, k, v, causal=True)
  elif implementation == "cudnn":
    out = jax.nn.dot_product_attention(
      q, k, v, key_value_seq_lengths=lengths,
      query_seq_lengths=jnp.full_like(lengths, shape.queries),
      implementation="cudnn")
  else:
    at = jnp.arange(k.shape[1])
    own = lengths[:, None] - shape.queries + jnp.arange(shape.queries)
    seen = at <= own[:, None, :, None]
    v = jnp.where((at < lengths[:, None])[..., None, None], v, 0)
    out = jax.nn.dot_product_attention(q, k, v, mask=seen)
  return out.reshape(-1, *out.shape[2:])


def packed(shape: Paged, q, k, v):
  """Ours of sequences whose keys follow each other."""
  return aiter.flash_attn_varlen(
    q, k, v, starts(shape.new), starts(shape.contexts), max(shape.new),
    max(shape.contexts), causal=True)


def gathered(shape: Paged, q, k, v, table, lengths):
  rows = lambda t: t[jnp.maximum(table, 0)].reshape(
    shape.batch, -1, *t.shape[2:])
  return dense(shape, "xla", q, rows(k), rows(v), lengths)


def implementation(name: str, shape: Paged):
  """(function, what makes its arguments of ours)."""
  same = lambda *args: args
  if name == OURS:
    return functools.partial(ours, shape), same
  if name == "pallas":
    if shape.queries > 1 or shape.cache != "bfloat16":
      raise report.Unsupported("decoding of a bfloat16 cache alone")
    by_head = lambda q, k, v, table, lengths: (
      q, *(jnp.moveaxis(t, 2, 0) for t in (k, v)), jnp.maximum(table, 0),
      lengths)
    return functools.partial(pallas, shape), by_head
  if name == "packed":
    if shape.queries == 1 or shape.cache != "bfloat16":
      raise report.Unsupported("prefill of a bfloat16 cache alone")
    def together(q, k, v, table, lengths):
      at = np.concatenate([
        row[np.arange(n) // shape.page] * shape.page + np.arange(n) % shape.page
        for row, n in zip(np.asarray(table), shape.contexts)])
      return q, *(t.reshape(-1, *t.shape[2:])[at] for t in (k, v))
    return functools.partial(packed, shape), together
  if name in ("dense", "cudnn"):
    if shape.queries > 1 or shape.lengths or shape.cache != "bfloat16":
      raise report.Unsupported("decoding of one length alone")
    together = lambda q, k, v, table, lengths: (
      q, *(t[table].reshape(shape.batch, -1, *t.shape[2:])[:, :shape.context]
           for t in (k, v)), lengths)
    return functools.partial(dense, shape, name), together
  if shape.queries > 1 and shape.lengths:
    raise report.Unsupported("prefill of one length alone")
  longest = max(shape.contexts)
  room = 8 * shape.batch * longest * max(
    shape.kv_heads * shape.head_dim, shape.q_heads * shape.queries)
  if room > _ROOM:
    raise report.Unsupported(f"it needs {room / 2**30:.0f} GiB")
  return functools.partial(gathered, shape), same


def time_of(call, sets, seconds: float):
  """(the result of the first arguments, seconds of a call)."""
  program = report.InTurn(call, sets, [*range(len(sets))] * (CALLS // SETS))
  result = np.asarray(program(sets)[0], np.float32)
  return result, program.time(sets, seconds)


def timed(shape, names, sets, implementation, seconds: float):
  """Yields (name, result, seconds of a call) of the implementations that run.

  Args:
    shape: what `implementation` makes a function of.
    names: of implementations, of which OURS must run.
    sets: arguments of ours.
    implementation: (name, shape) -> (function, what makes its arguments).
    seconds: as of report.median_time.
  """
  for name in names:
    try:
      function, prepare = implementation(name, shape)
      own = [jax.block_until_ready(prepare(*args)) for args in sets]
      result, time = time_of(function, own, seconds)
    except Exception as e:  # of memory, or of a launch, has any type
      if name == OURS:
        raise
      print(f"{shape.name}: no {name}: "
            f"{(str(e).splitlines() or [''])[0][:90]}")
      continue
    yield name, result, time


def apart(shape, results, names) -> list[str]:
  """Which results are not those of jax.numpy, or of packed keys, in words."""
  wrong = []
  want = results.get("xla", results.get("packed"))
  for name in names:
    if name in results and want is not None:
      error = np.abs(results[name] - want).max() / np.abs(want).max()
      if not error < 0.03:
        wrong.append(
          f"{shape}, {name}: error {error:.1e} of the largest number")
  return wrong


def measure(shape: Paged, names, dtype, seconds: float):
  """Rows of the CSV file, and what is wrong in words."""
  sets = [arrays(shape, dtype, seed) for seed in range(SETS)]
  size = shape.bytes(sets[0][1].dtype.itemsize)
  flops = 4 * shape.q_heads * shape.head_dim * sum(
    m * (n - (m - 1) / 2) for m, n in zip(shape.new, shape.contexts))
  rows, results = [], {}
  for name, result, time in timed(shape, names, sets, implementation, seconds):
    results[name] = result
    row = {
      **shape._replace(lengths=len(shape.lengths))._asdict(),
      "implementation": name, "us": time * 1e6, "gb_per_s": size / time / 1e9,
      "tflops": flops / time / 1e12,
    }
    rows.append(row)
    print(f"{shape.name:<18}{shape.batch:>4} x {shape.context:<7}{name:<7}"
          f"{row['us']:>11.1f} us{row['gb_per_s']:>8.0f} GB/s"
          f"{row['tflops']:>8.1f} TFLOP/s", flush=True)
  return rows, apart(shape, results, (OURS, "dense", "packed"))


def table(found: list[dict]) -> list[list[str]]:
  """The header and a line a shape: bytes of cache a second."""
  lines = [["shape", "batch x context", "queries", "cache", "page",
            *(f"{name} GB/s" for name in IMPLEMENTATIONS), "us"]]
  fields = ("name", "batch", "context", "queries", "cache", "page")
  for key in dict.fromkeys(tuple(r[f] for f in fields) for r in found):
    mine = {r["implementation"]: r for r in found
            if tuple(r[f] for f in fields) == key}
    lines.append([
      key[0], f"{key[1]} x {key[2]}", str(key[3]), key[4], str(key[5]),
      *(f"{mine[name]['gb_per_s']:.0f}" if name in mine else "-"
        for name in IMPLEMENTATIONS),
      f"{mine[OURS]['us']:.1f}" if OURS in mine else "-"])
  return lines


def main() -> int:
  args = report.told(report.parser(
    __doc__, "paged", IMPLEMENTATIONS, ("bfloat16", "float16"), draws=True))
  print(report.title(args.dtype))
  listed = PAGED_SMOKE if args.smoke else PAGED
  found, wrong = report.each_shape(
    measure, [*listed, *drawn(args.random, args.seed),
              *drawn_prefill(args.random, args.seed)], args)
  times = {(row["name"], row["batch"], row["context"], row["page"],
            row["implementation"]): row["us"] for row in found}
  ratios = [us / times[*key, OURS] for (*key, name), us in times.items()
            if name == "packed" and key[0].startswith("prefill_")]
  legend = "GB/s: bytes of the contexts' keys and values, divided by the time."
  if ratios:
    legend += (f"\nDrawn prefill, packed / {OURS}: "
               f"{statistics.geometric_mean(ratios):.2f} in the geometric mean "
               f"of {len(ratios)}, {min(ratios):.2f} the worst.")
  return report.finish(args, "paged", found, table(found), legend, wrong)


if __name__ == "__main__":
  sys.exit(main())
