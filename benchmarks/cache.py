# SPDX-License-Identifier: Apache-2.0
"""Times writes into paged KV caches: ours and XLA's scatter, both donated.

  python cache.py                   the whole list below
  python cache.py --random 20       and so many sizes drawn by --seed
  python cache.py --only flash      one kind of write
  python cache.py --smoke           tiny sizes, on any platform

Prints a table and writes cache.csv to --out. The exit code is 1 if a cache of
ours is not what XLA's is, in every bit.

A write does little but move memory, so its figure is a share of the rate at
which the device copies as many bytes, measured beside it: rows once read, and
once written in the cache's type. Several sets of rows take turns, into random
slots of a pool that no device's cache holds. A figure is a program of several
writes, one after another, divided by their number, so that it has no part of
the host's. Few tokens are a matter of launches: beside them stands a program of
CHAIN writes that skip their only token ("empty").
"""

import functools
import itertools
import sys
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
import report

import jax
from jax.experimental import aiter

OURS = "aiter"
IMPLEMENTATIONS = (OURS, "xla")
KINDS = ("flash", "HND", "asm", "fp8", "token", "block", "mla", "indexer")
PAGE = 16
# Elsewhere a program of many writes takes long to compile.
CHAIN = 64 if jax.default_backend() == "gpu" else 2
FEW = 512  # Tokens up to which launches count.
SETS = 4


class Write(NamedTuple):
  """A write of `tokens`; of "mla" d counts the latent's columns, not rope's."""

  kind: str
  tokens: int
  heads: int = 8
  d: int = 128

  @property
  def bytes(self) -> int:
    """What must pass through memory."""
    numbers = self.tokens * self.heads * self.d
    if self.kind == "mla":
      return 2 * 2 * self.tokens * (self.d + 64)
    if self.kind == "indexer":
      return self.tokens * (2 * self.d + self.d + 4)
    wide = self.kind in ("flash", "HND")
    scales = 4 * self.tokens * self.heads if self.kind == "token" else 0
    return 2 * (numbers * (2 + (2 if wide else 1)) + scales)


TOKENS = (1, 64, 512, 8192, 65536)
WRITES = [
  *(Write(kind, tokens) for kind in ("flash", "fp8") for tokens in TOKENS),
  *(
    Write(kind, tokens)
    for kind in ("HND", "asm", "token", "block")
    for tokens in (64, 8192)
  ),
  *(Write("mla", tokens, 1, 512) for tokens in (64, 8192, 65536)),
  *(Write("indexer", tokens, 1, 128) for tokens in (64, 8192, 65536)),
]
SMOKE = [Write(kind, 5, 1 if kind in ("mla", "indexer") else 2, 128)
         for kind in KINDS]


def drawn(count: int, seed: int) -> list[Write]:
  """Sizes at random, the same in every run with a seed."""
  rng = np.random.default_rng(seed)
  return [
    Write(
      ("flash", "HND", "fp8", "token")[rng.integers(4)],
      int(np.exp2(rng.uniform(0, 16))),
      int(rng.integers(1, 17)),
      int(rng.choice([64, 80, 96, 128, 192, 256])),
    )
    for _ in range(count)
  ]


def pools(write: Write, pages: int) -> list[jax.Array]:
  """The caches, zeros."""
  h, d = write.heads, write.d
  if write.kind == "mla":
    return [jnp.zeros((pages, PAGE, d + 64), jnp.bfloat16)]
  if write.kind == "indexer":
    return [jnp.zeros((pages, PAGE, d + 4), jnp.uint8)]
  shape = {"flash": (pages, PAGE, h, d), "fp8": (pages, PAGE, h, d),
           "HND": (pages, h, PAGE, d)}.get(write.kind)
  if shape:
    dtype = jnp.float8_e4m3fn if write.kind == "fp8" else jnp.bfloat16
    return [jnp.zeros(shape, dtype) for _ in range(2)]
  out = [jnp.zeros((pages, h, d // 16, PAGE, 16), jnp.int8),
         jnp.zeros((pages, h, PAGE // 16, d, 16), jnp.int8)]
  if write.kind == "token":
    out += [jnp.zeros((pages, h, PAGE)) for _ in range(2)]
  if write.kind == "block":
    out += [jnp.zeros((pages, h)) for _ in range(2)]
  return out


def rows(write: Write, tokens: int, pages: int, seed: int):
  """(keys, values, slots); nothing of a token has a slot of another."""
  rng = np.random.default_rng(seed)
  normal = functools.partial(rng.standard_normal, dtype=np.float32)
  few = min(tokens, 256)
  wide = lambda *shape: jnp.asarray(
    np.resize(normal((few, *shape)), (tokens, *shape)), jnp.bfloat16
  )
  # Whole pages of a sequence, as prefill writes them, in any order.
  slots = rng.permutation(pages)[:, None] * PAGE + np.arange(PAGE)
  slots = jnp.asarray(slots.reshape(-1)[:tokens], jnp.int32)
  if write.kind in ("mla", "indexer"):
    return wide(write.d), wide(64), slots
  return wide(write.heads, write.d), wide(write.heads, write.d), slots


SCALES = (0.02, 0.03)


def ours(kind: str, pool, key, value, slots):
  """The caches after one write."""
  scales = {"k_scale": SCALES[0], "v_scale": SCALES[1]}
  if kind == "mla":
    return [aiter.concat_and_cache_mla(key, value, *pool, slots)]
  if kind == "indexer":
    return [aiter.indexer_k_quant_and_cache(key, *pool, slots)]
  if kind == "token":
    return list(aiter.reshape_and_cache_with_pertoken_quant(
      key, value, *pool, slots, asm_layout=True))
  if kind == "block":
    return list(aiter.reshape_and_cache_with_block_quant(
      key, value, *pool, slots, asm_layout=True))
  layout = {"HND": "HND", "asm": "asm"}.get(kind, "NHD")
  return list(aiter.write_kv_cache(
    key, value, *pool, slots, layout=layout,
    **({} if layout == "HND" or kind == "flash" else scales)))


def scatter(kind: str, pool, key, value, slots):
  """The same as one writes it with jax.numpy; None if nobody would."""
  page, offset = slots // PAGE, slots % PAGE
  page = jnp.where(slots < 0, pool[0].shape[0], page)
  put = lambda t, at, x: t.at[at].set(x, mode="drop")
  if kind == "mla":
    return [put(pool[0], (page, offset), jnp.concatenate([key, value], -1))]
  if kind == "flash":
    return [put(t, (page, offset), x) for t, x in zip(pool, (key, value))]
  if kind == "HND":
    return [put(t, (page, slice(None), offset), x)
            for t, x in zip(pool, (key, value))]
  if kind == "fp8":
    cast = lambda x, s: jnp.clip(
      x.astype(jnp.float32) / jax.lax.optimization_barrier(jnp.float32(s)),
      -448, 448).astype(jnp.float8_e4m3fn)
    return [put(t, (page, offset), cast(x, s))
            for t, x, s in zip(pool, (key, value), SCALES)]
  raise report.Unsupported("no scatter")


def time_of(step, write: Write, pages: int, seconds: float) -> float:
  """Seconds of one write."""
  sets = [rows(write, write.tokens, pages, seed) for seed in range(SETS)]
  state = pools(write, pages)
  times = CHAIN if write.tokens <= FEW else 2 * SETS

  def program(pool, sets):
    for i in range(times):
      pool = step(pool, *sets[i % SETS])
    return pool

  program = jax.jit(program, donate_argnums=0)

  def call():
    nonlocal state
    state = program(state, sets)
    return state

  return report.median_time(call, jax.block_until_ready, seconds) / times


def empty_time(pages: int, seconds: float) -> float:
  """Seconds of a launch that writes nothing."""
  write = Write("flash", 1, 1, 128)
  key, value, _ = rows(write, 1, pages, 0)
  slots = jnp.full(1, -1, jnp.int32)
  state = pools(write, pages)

  def program(pool, key, value, slots):
    for _ in range(CHAIN):
      pool = ours("flash", pool, key, value, slots)
    return pool

  program = jax.jit(program, donate_argnums=0)

  def call():
    nonlocal state
    state = program(state, key, value, slots)
    return state

  return report.median_time(call, jax.block_until_ready, seconds) / CHAIN


def copy_time(size: int, seconds: float) -> float:
  """Seconds in which so many bytes are read and written, half and half."""
  xs = [jnp.full(max(size // 2, 1), i, jnp.int8) for i in range(SETS)]
  turns = itertools.cycle(xs)
  copy = jax.jit(jnp.copy)
  times = [
    report.median_time(
      lambda: copy(next(turns)), jax.block_until_ready, seconds
    )
  ]
  if report.HAS_TORCH and jax.devices()[0].platform == "gpu":
    import torch  # noqa: PLC0415

    sources = itertools.cycle([
      torch.zeros(xs[0].nbytes, dtype=torch.int8, device="cuda")
      for _ in range(SETS)
    ])
    target = torch.empty(xs[0].nbytes, dtype=torch.int8, device="cuda")
    times.append(
      report.median_time(
        lambda: target.copy_(next(sources)),
        lambda _: torch.cuda.synchronize(),
        seconds,
      )
    )
  return min(times)


def is_same(write: Write, pages: int) -> bool:
  """Whether XLA's caches are ours, where it has such a write."""
  args = rows(write, write.tokens, pages, 0)
  got = jax.jit(functools.partial(ours, write.kind))(pools(write, pages), *args)
  try:
    want = jax.jit(functools.partial(scatter, write.kind))(
      pools(write, pages), *args
    )
  except report.Unsupported:
    return True
  bits = lambda t: jax.lax.bitcast_convert_type(
    t, jnp.uint8 if t.dtype.itemsize == 1 else jnp.uint16
  ).astype(jnp.int32)
  # XLA's CPUs round float32 to float8 by way of float16, so twice.
  apart = 1 if write.kind == "fp8" else 0
  return all(bool(jnp.all(abs(bits(a) - bits(b)) <= apart))
             for a, b in zip(got, want))


def measure(write: Write, names, pages: int, empty: float, seconds: float):
  """Rows of the CSV file."""
  copy = copy_time(write.bytes, seconds)
  out = []
  for name in names:
    function = ours if name == OURS else scatter
    try:
      seconds_of = time_of(
        functools.partial(function, write.kind), write, pages, seconds
      )
    except Exception as e:  # out of memory has any type
      if name == OURS:
        raise
      print(f"{write.kind} {write.tokens}: no {name}: "
            f"{(str(e).splitlines() or [''])[0][:90]}")
      continue
    row = {
      **write._asdict(),
      "implementation": name,
      "us": seconds_of * 1e6,
      "gb_per_s": write.bytes / seconds_of / 1e9,
      "share_of_copy": copy / seconds_of,
      "times_empty": seconds_of / empty,
      "copy_gb_per_s": write.bytes / copy / 1e9,
    }
    out.append(row)
    print(
      f"{write.kind:<9}{write.tokens:>6} x {write.heads:>2} x {write.d:<4}"
      f"{name:<6}{row['us']:>10.2f} us{row['gb_per_s']:>8.0f} GB/s"
      f"{row['share_of_copy']:>7.3f} of copy{row['times_empty']:>9.2f} of"
      " empty",
      flush=True,
    )
  return out


def table(found: list[dict]) -> list[list[str]]:
  """The header and a line a write."""
  lines = [["write", "tokens x heads x d", "copy GB/s", "GB/s", "of copy",
            "us", "of empty", "xla us"]]
  keys = dict.fromkeys(tuple(r[f] for f in Write._fields) for r in found)
  for key in keys:
    mine = {r["implementation"]: r for r in found
            if tuple(r[f] for f in Write._fields) == key}
    first = mine.get(OURS) or next(iter(mine.values()))
    lines.append([
      key[0], " x ".join(map(str, key[1:])), f"{first['copy_gb_per_s']:.0f}",
      f"{first['gb_per_s']:.0f}", f"{first['share_of_copy']:.2f}",
      f"{first['us']:.1f}", f"{first['times_empty']:.2f}",
      f"{mine['xla']['us']:.1f}" if "xla" in mine else "-",
    ])
  return lines


def main() -> int:
  parser = report.parser(
    __doc__, "cache", IMPLEMENTATIONS, ("bfloat16",), draws=True
  )
  parser.add_argument("--only", action="append", choices=KINDS)
  parser.add_argument(
    "--pages", type=int, default=16384, help="pages of a pool"
  )
  args = report.told(parser)
  writes = [*(SMOKE if args.smoke else WRITES), *drawn(args.random, args.seed)]
  writes = [w for w in writes if not args.only or w.kind in args.only]
  print(report.title(args.dtype))

  pages = 64 if args.smoke else args.pages
  empty = empty_time(16, args.seconds)
  print(f"empty launch: {empty * 1e6:.2f} us")
  found, wrong = [], []
  for write in writes:
    # A pool of at most 2 GiB, and of no fewer tokens than are written.
    own = min(pages, max(2**30 // (PAGE * write.heads * write.d * 4), 64))
    own = max(own, -(-write.tokens // PAGE))
    if len(args.implementations) > 1 and not is_same(write, own):
      wrong.append(f"{write}: {OURS} and xla differ")
    found += measure(write, args.implementations, own, empty, args.seconds)

  return report.finish(
    args,
    "cache",
    found,
    table(found),
    "GB/s: bytes read and written, divided by the time",
    wrong,
  )


if __name__ == "__main__":
  sys.exit(main())
