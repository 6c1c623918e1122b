# SPDX-License-Identifier: Apache-2.0
"""Times latent attention: ours, our paged kernel's, cuDNN's and jax.numpy's.

  python mla.py                            shapes.MLA
  python mla.py --only tp8 sparse          those of these names
  python mla.py --random 20 --seed 3       and so many of random lengths
  python mla.py --smoke                    tiny sizes, on any platform

Prints a table and writes mla.csv to --out. The exit code is 1 if our numbers
are not those of jax.numpy. The figures are the rate at which a call reads the
rows of the cache that it needs, each once, and that of its operations.

  aiter    mla_decode_fwd, or sparse_mla_fwd
  paged    paged_attention_decode of one KV head of 128 columns, of a cache of
           as many bytes and as many query heads: what reading costs us where
           there is less to compute; decoding alone
  cudnn    jax.nn.dot_product_attention of keys that lie together in memory,
           with values as wide, where it can; decoding of one length alone
  xla      rows gathered, then the formula; small batches alone
"""

import functools
import sys

import jax.numpy as jnp
import numpy as np
import report
from paged import apart, timed
from shapes import MLA, MLA_SMOKE, Mla

import jax
from jax.experimental import aiter

OURS = "aiter"
IMPLEMENTATIONS = (OURS, "paged", "cudnn", "xla")
SCALE = 192**-0.5
SETS = 2
_ROOM = 2**33  # Bytes that a plain formula may gather or score.


def drawn(count: int, seed: int) -> list[Mla]:
  """Batches of random lengths, drawn by a seed."""
  rng = np.random.default_rng(seed)
  out = []
  for i in range(count):
    batch = int(np.exp2(rng.uniform(0, 7)))
    longest = int(np.exp2(rng.uniform(8, 15)))
    out.append(Mla(
      f"random_{i}", batch, longest, int(rng.choice([8, 12, 16, 20, 64, 128])),
      queries=int(rng.choice([1, 1, 2, 4])), page=int(rng.choice([1, 16, 64])),
      cache=str(rng.choice(["bfloat16", "bfloat16", "float8_e4m3fn"])),
      lengths=tuple(map(int, rng.integers(4, longest + 1, batch)))))
  return out


def arrays(shape: Mla, dtype, seed: int):
  """(q, kv, starts, indptr, indices, last, topk), pages in any order."""
  rng = np.random.default_rng(seed)
  counts = [-(-n // shape.page) for n in shape.contexts]
  ends = np.cumsum([0, *counts])
  order = rng.permutation(ends[-1]).astype(np.int32)
  last = [n - (c - 1) * shape.page for n, c in zip(shape.contexts, counts)]
  cols, tokens = shape.lora + shape.rope, shape.batch * shape.queries
  keys = jax.random.split(jax.random.key(seed), 2)
  own = dtype if shape.cache == "bfloat16" else shape.cache
  kv = jax.jit(lambda key: jax.random.normal(
    key, (ends[-1], shape.page, 1, cols), jnp.bfloat16).astype(own))(keys[1])
  q = jax.random.normal(keys[0], (tokens, shape.heads, cols), jnp.dtype(dtype))
  topk = np.zeros((tokens, 0), np.int32)
  if shape.topk:
    topk = np.stack([
      order[a + at // shape.page] * shape.page + at % shape.page
      for a, n in zip(ends, shape.contexts) for _ in range(shape.queries)
      for at in [rng.choice(n, shape.topk, replace=False)]]).astype(np.int32)
  numbers = lambda t: jnp.asarray(t, jnp.int32)
  return (q, kv, numbers(np.arange(shape.batch + 1) * shape.queries),
          numbers(ends), numbers(order), numbers(last), numbers(topk))


def ours(shape: Mla, q, kv, starts, indptr, indices, last, topk):
  if shape.topk:
    return aiter.sparse_mla_fwd(q, kv, topk, sm_scale=SCALE)
  return aiter.mla_decode_fwd(q, kv, starts, indptr, indices, last,
                              sm_scale=SCALE)


def rows_of(shape: Mla, kv, indptr, indices, topk):
  """A sequence's rows of the cache, [tokens or batch, keys, cols]."""
  flat = kv.reshape(-1, kv.shape[-1])
  if shape.topk:
    return flat[topk]
  at = jnp.arange(max(shape.contexts))
  page = indices[jnp.minimum(indptr[:-1, None] + at // shape.page,
                             len(indices) - 1)]
  return flat[page * shape.page + at % shape.page]


def plain(shape: Mla, q, kv, starts, indptr, indices, last, topk):
  del starts, last
  rows = rows_of(shape, kv, indptr, indices, topk).astype(q.dtype)
  q = q.reshape(rows.shape[0], -1, *q.shape[1:])
  s = jnp.einsum("bihd,bjd->bhij", q, rows,
                 preferred_element_type=jnp.float32) * SCALE
  if not shape.topk:
    length = jnp.asarray(shape.contexts)[:, None, None, None]
    own = length - shape.queries + jnp.arange(shape.queries)[:, None]
    s = jnp.where(jnp.arange(s.shape[-1]) <= own, s, -jnp.inf)
  p = jax.nn.softmax(s, -1).astype(q.dtype)
  out = jnp.einsum("bhij,bjd->bihd", p, rows[..., :shape.lora])
  return out.reshape(-1, *out.shape[2:])


def implementation(name: str, shape: Mla):
  """(function, what makes its arguments of ours)."""
  same = lambda *args: args
  plain_decode = shape.queries == 1 and not shape.topk
  if name == OURS:
    return functools.partial(ours, shape), same
  if name == "paged":
    if not plain_decode or shape.cache != "bfloat16":
      raise report.Unsupported("decoding of a bfloat16 cache alone")

    def halves(q, kv, starts, indptr, indices, last, topk):
      del starts, indptr, indices, topk
      # As many bytes are more keys: 576 columns are 2.25 times 128 and 128.
      width = kv.size // (shape.batch * shape.page * 256)
      count = shape.batch * width
      pools = kv.reshape(-1)[:count * shape.page * 256].reshape(
        2, count, shape.page, 1, 128)
      table = np.random.default_rng(0).permutation(count).reshape(
        shape.batch, width)
      return (q[..., :128], *pools, jnp.asarray(table, jnp.int32),
              jnp.full_like(last, width * shape.page))

    if shape.lengths:
      raise report.Unsupported("contexts of one length alone")
    return aiter.paged_attention_decode, halves
  if name == "cudnn":
    if not plain_decode or shape.lengths or shape.cache != "bfloat16":
      raise report.Unsupported("decoding of one length alone")

    def together(q, kv, starts, indptr, indices, last, topk):
      del starts, last
      rows = rows_of(shape, kv, indptr, indices, topk)[:, :, None]
      return q[:, None], rows, rows + 0

    return functools.partial(jax.nn.dot_product_attention, scale=SCALE,
                             implementation="cudnn"), together
  pairs = shape.batch * shape.queries * (shape.topk or max(shape.contexts))
  room = 8 * pairs * max(shape.lora + shape.rope, shape.heads)
  if room > _ROOM:
    raise report.Unsupported(f"it needs {room / 2**30:.0f} GiB")
  return functools.partial(plain, shape), same


def measure(shape: Mla, names, dtype, seconds: float):
  """Rows of the CSV file, and what is wrong in words."""
  sets = [arrays(shape, dtype, seed) for seed in range(SETS)]
  size = shape.bytes(sets[0][1].dtype.itemsize)
  rows, results = [], {}
  for name, result, time in timed(shape, names, sets, implementation, seconds):
    results[name] = result
    row = {
      **shape._replace(lengths=len(shape.lengths))._asdict(),
      "implementation": name, "us": time * 1e6, "gb_per_s": size / time / 1e9,
      "tflops": shape.flops / time / 1e12,
    }
    rows.append(row)
    print(f"{shape.name:<16}{shape.batch:>4} x {shape.context:<7}{name:<7}"
          f"{row['us']:>11.1f} us{row['gb_per_s']:>8.0f} GB/s"
          + (f"{row['tflops']:>8.1f} TFLOP/s" if name != "paged" else ""),
          flush=True)
  return rows, apart(shape, results, (OURS,))


def table(found: list[dict]) -> list[list[str]]:
  """The header and a line a shape: bytes of cache a second."""
  lines = [["shape", "batch x context", "heads", "queries", "page",
            *(f"{name} GB/s" for name in IMPLEMENTATIONS), "TFLOP/s", "us"]]
  fields = ("name", "batch", "context", "heads", "queries", "page")
  for key in dict.fromkeys(tuple(r[f] for f in fields) for r in found):
    mine = {r["implementation"]: r for r in found
            if tuple(r[f] for f in fields) == key}
    ours_alone = lambda field, mine=mine: (
      f"{mine[OURS][field]:.1f}" if OURS in mine else "-")
    lines.append([
      key[0], f"{key[1]} x {key[2]}", *map(str, key[3:]),
      *(f"{mine[name]['gb_per_s']:.0f}" if name in mine else "-"
        for name in IMPLEMENTATIONS),
      ours_alone("tflops"), ours_alone("us")])
  return lines


def main() -> int:
  parser = report.parser(__doc__, "mla", IMPLEMENTATIONS,
                         ("bfloat16", "float16"), draws=True)
  parser.add_argument("--only", nargs="*", metavar="NAME")
  args = report.told(parser)
  print(report.title(args.dtype))
  listed = MLA_SMOKE if args.smoke else MLA
  if args.only is not None:
    listed = [shape for shape in listed if shape.name in args.only]
  found, wrong = report.each_shape(
    measure, [*listed, *drawn(args.random, args.seed)], args)
  return report.finish(
    args, "mla", found, table(found),
    "GB/s: bytes of the rows of the cache that are attended to, each counted"
    " once, divided by the time.", wrong)


if __name__ == "__main__":
  sys.exit(main())
