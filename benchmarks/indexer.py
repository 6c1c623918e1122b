# SPDX-License-Identifier: Apache-2.0
"""Times the lightning indexer's logits.

  python indexer.py                        shapes.INDEXER
  python indexer.py --random 20 --seed 3   so many drawn ones instead
  python indexer.py --smoke                tiny sizes, on any platform

Prints a table and writes indexer.csv to --out. The exit code is 1 if our
numbers are not those of jax.numpy. Of pages the second figure is the rate at
which keys are read and logits written.

  aiter    fp8_mqa_logits, or of sequences fp8_paged_mqa_logits
  xla      the formula in jax.numpy, of the same numbers in bfloat16, head by
           head; of pages with all keys gathered before
"""

import functools
import sys

import jax.numpy as jnp
import numpy as np
import report
import shapes
from shapes import Indexer

import jax
from jax import lax
from jax.experimental import aiter

OURS = "aiter"
IMPLEMENTATIONS = (OURS, "xla")
_PAGE = 64


def arrays(shape: Indexer):
  """(q, weights, keys, scales) and of pages (cache, lengths, table)."""
  kind = aiter.float8_dtype() if jax.default_backend() == "gpu" else (
    jnp.float8_e4m3fn)
  one, two, three, four = jax.random.split(jax.random.key(0), 4)
  q = jax.random.normal(one, (shape.rows, shape.heads, shape.dim)).astype(kind)
  weights = jax.random.normal(two, (shape.rows, shape.heads))
  total = shape.keys * max(shape.sequences, 1)
  keys = jax.random.normal(three, (total, shape.dim))
  if not shape.sequences:
    scales = jax.random.uniform(four, (total,), minval=0.5)
    return q, weights, keys.astype(kind), scales
  width = -(-shape.keys // _PAGE)
  table = np.random.default_rng(0).permutation(
    shape.sequences * width).reshape(shape.sequences, width)
  place = np.arange(shape.keys)
  slots = table[:, place // _PAGE] * _PAGE + place % _PAGE
  cache = aiter.indexer_k_quant_and_cache(
    keys, jnp.zeros((table.size, _PAGE, shape.dim + 4), jnp.uint8),
    jnp.asarray(slots.reshape(-1)), quant_dtype=kind)
  lengths = jnp.full(shape.sequences, shape.keys, jnp.int32)
  return q, weights, cache, lengths, jnp.asarray(table, jnp.int32)


def _range(shape: Indexer):
  """First and last key of each query: causal, with all keys of the last."""
  ends = jnp.arange(shape.rows, dtype=jnp.int32) + (
    shape.keys - shape.rows + 1)
  return jnp.zeros_like(ends), jnp.maximum(ends, 1)


def ours(shape: Indexer, q, weights, *keys):
  if not shape.sequences:
    return aiter.fp8_mqa_logits(q, *keys, weights, *_range(shape))
  cache, lengths, table = keys
  q = q.reshape(shape.sequences, -1, *q.shape[1:])
  return aiter.fp8_paged_mqa_logits(
    q, cache, weights, lengths, table, shape.keys)


def plain(shape: Indexer, q, weights, *keys):
  n = jnp.arange(shape.keys)
  sequences = max(shape.sequences, 1)
  if shape.sequences:
    cache, lengths, table = keys
    keys, scales = aiter.cp_gather_indexer_k_quant_cache(
      cache, table, jnp.arange(sequences + 1) * shape.keys,
      total_tokens=sequences * shape.keys, head_dim=shape.dim,
      quant_dtype=q.dtype)
    each = shape.rows // sequences
    end = shape.keys - each + 1 + jnp.arange(shape.rows) % each
  else:
    keys, scales = keys
    _, end = _range(shape)
  keys = keys.astype(jnp.bfloat16).reshape(sequences, shape.keys, -1)
  scales = scales.reshape(sequences, 1, shape.keys)
  split = lambda t: t.reshape(sequences, -1, *t.shape[1:])

  def add(total, head):
    dots = jnp.einsum("bmd,bnd->bmn", split(head[0]), keys,
                      preferred_element_type=jnp.float32)
    return total + jnp.maximum(dots, 0) * split(head[1])[..., None], None

  total, _ = lax.scan(
    add, jnp.zeros((sequences, shape.rows // sequences, shape.keys)),
    (jnp.moveaxis(q.astype(jnp.bfloat16), 1, 0), weights.T))
  return jnp.where(n < end[:, None], (total * scales).reshape(shape.rows, -1),
                   -jnp.inf)


def measure(shape: Indexer, names, seconds: float):
  """Rows of the CSV file, and what is wrong in words."""
  functions = {OURS: ours, "xla": plain}
  args = arrays(shape)
  rows, results = [], {}
  for name in names:
    call = jax.jit(functools.partial(functions[name], shape))
    results[name] = np.asarray(call(*args)[:64])
    time = report.median_time(
      functools.partial(call, *args), jax.block_until_ready, seconds)
    moved = max(shape.sequences, 1) * shape.keys * (shape.dim + 4) + (
      4 * shape.rows * shape.keys)
    rows.append({**shape._asdict(), "implementation": name, "us": time * 1e6,
                 "tflop_per_s": shape.flops() / time / 1e12,
                 "gb_per_s": moved / time / 1e9})
    print(f"{shape.rows:>6} x {shape.keys:<8}{shape.sequences:<6}{name:<7}"
          f"{time * 1e6:>10.1f} us{rows[-1]['tflop_per_s']:>8.0f} TFLOP/s"
          f"{rows[-1]['gb_per_s']:>8.0f} GB/s", flush=True)
  wrong = []
  if len(results) == 2:
    one, other = (np.where(t > -np.inf, t, 0) for t in results.values())
    error = np.abs(one - other).max() / np.abs(other).max()
    if not error < 0.01:
      wrong.append(f"{shape}: by {error:.1e} of the largest number")
  return rows, wrong


def table(found: list[dict]) -> list[list[str]]:
  """The header and a line a shape: microseconds, and our rates."""
  lines = [["queries x keys", "sequences", *(f"{n} us" for n in
            IMPLEMENTATIONS), "TFLOP/s", "GB/s"]]
  fields = ("rows", "keys", "sequences")
  for key in dict.fromkeys(tuple(r[f] for f in fields) for r in found):
    mine = {r["implementation"]: r for r in found
            if tuple(r[f] for f in fields) == key}
    lines.append([
      f"{key[0]} x {key[1]}", str(key[2] or "-"),
      *(f"{mine[n]['us']:.1f}" if n in mine else "-" for n in IMPLEMENTATIONS),
      *(f"{mine[OURS][f]:.0f}" if OURS in mine else "-"
        for f in ("tflop_per_s", "gb_per_s"))])
  return lines


def main() -> int:
  args = report.told(report.parser(
    __doc__, "indexer", IMPLEMENTATIONS, ("float8_e4m3fn",), draws=True))
  print(report.title(args.dtype))
  found, wrong = [], []
  for shape in (shapes.random_indexer(args.random, args.seed) or
                (shapes.INDEXER_SMOKE if args.smoke else shapes.INDEXER)):
    rows, errors = measure(shape, args.implementations, args.seconds)
    found += rows
    wrong += errors
  return report.finish(
    args, "indexer", found, table(found),
    "GB/s: bytes of keys and logits, divided by the time.", wrong)


if __name__ == "__main__":
  sys.exit(main())
