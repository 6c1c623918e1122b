# SPDX-License-Identifier: Apache-2.0
"""Times attention to a sequence that is divided over this host's devices.

  python parallel.py              16384 and 65536 tokens a device
  python parallel.py --smoke      tiny sizes, on any platform

Prints a table and writes parallel.csv to --out. The exit code is 1 if the
numbers are not those of one device. Forward and backward, causal. "Of one" is
what the same work takes on one device, divided by devices and time: 1 would be
no cost at all. Beside the strategies of a shard_map, a call under jit that
knows of the division by its arrays' sharding alone ("jit").
"""

import functools
import sys
from typing import NamedTuple

import numpy as np
import report
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import jax
from jax.experimental import aiter


class Shape(NamedTuple):
  """A problem: tokens a device, heads, head dim, and tokens of a window."""
  name: str
  tokens: int
  hq: int
  hk: int
  dim: int
  window: int = -1


SHAPES = (
  Shape("16k", 16384, 16, 16, 128),
  Shape("16k_gqa", 16384, 32, 8, 128),
  Shape("64k_gqa", 65536, 8, 2, 128),
  Shape("64k_window", 65536, 8, 2, 128, window=4096),
)
SMOKE = (Shape("smoke", 64, 4, 2, 16), Shape("smoke_window", 64, 4, 2, 16, 24))
# Name -> strategy, order.
WAYS = {
  "ring": ("ring", None),
  "ring_zigzag": ("ring", "zigzag"),
  "ring_striped": ("ring", "striped"),
  "all_gather_zigzag": ("all_gather", "zigzag"),
  "ulysses": ("ulysses", None),
  "jit": (None, None),
}


def trained(attend):
  """(q, k, v, weights) -> attention's output and its gradients."""

  @jax.jit
  def run(q, k, v, weights):
    out, pull = jax.vjp(attend, q, k, v)
    return out, pull(weights)

  return run


def divided(shape: Shape, way: str, mesh: Mesh):
  """Attention to arrays that are divided along the sequence."""
  strategy, balance = WAYS[way]
  window = (shape.window, 0)
  if strategy is None:
    return functools.partial(
      aiter.flash_attn_func, causal=True, window_size=window
    )
  rows = P(None, "x")
  return jax.shard_map(
    functools.partial(
      aiter.context_parallel_attention,
      causal=True,
      window_size=window,
      axis_name="x",
      strategy=strategy,
      load_balance=balance,
    ),
    mesh=mesh,
    in_specs=(rows,) * 3,
    out_specs=rows,
  )


def measure(shape: Shape, ways, dtype, seconds: float):
  """One row for each way; time on one device, of the whole, in the first."""
  devices = jax.devices()
  n = len(devices)
  mesh = Mesh(np.array(devices), ("x",))
  draw = lambda seed, heads: jax.random.normal(
    jax.random.key(seed), (1, n * shape.tokens, heads, shape.dim), dtype
  )
  arrays = [draw(0, shape.hq), draw(1, shape.hk), draw(2, shape.hk),
            draw(3, shape.hq)]
  one = trained(functools.partial(
    aiter.flash_attn_func, causal=True, window_size=(shape.window, 0)
  ))
  wanted = jax.tree.leaves(one(*arrays))
  time = lambda f, args: report.median_time(
    lambda: f(*args), jax.block_until_ready, seconds
  )
  alone = time(one, arrays)
  pairs = sum(
    min(i + 1, shape.window + 1) if shape.window >= 0 else i + 1
    for i in range(n * shape.tokens)
  )
  flops = 3.5 * 4 * pairs * shape.hq * shape.dim
  rows = [dict(shape=shape.name, way="one device", devices=1,
               ms=1e3 * alone, tflops=flops / alone / 1e12, of_one=1.0)]
  wrong = []
  for way in ways:
    _, balance = WAYS[way]
    if shape.window >= 0 and balance == "zigzag" and way.startswith("ring"):
      continue
    order, back = (
      functools.partial(f, strategy=balance, size=n) if balance else lambda t: t
      for f in (aiter.reorder_causal_load_balancing,
                aiter.inverse_reorder_causal_load_balancing)
    )
    by_rows = NamedSharding(mesh, P(None, "x"))
    own = [jax.device_put(order(t), by_rows) for t in arrays]
    run = trained(divided(shape, way, mesh))
    for got, want in zip(jax.tree.leaves(run(*own)), wanted):
      got = jax.device_get(back(got)).astype(np.float32)
      want = jax.device_get(want).astype(np.float32)
      apart = np.abs(got - want).max() / np.abs(want).max()
      if not apart < 2e-2:
        wrong.append(f"{shape.name} {way}: {apart:.1e} apart")
    spent = time(run, own)
    rows.append(dict(
      shape=shape.name, way=way, devices=n, ms=1e3 * spent,
      tflops=flops / spent / n / 1e12, of_one=alone / spent / n,
    ))
    print("{shape:12} {way:18} {ms:9.3f} ms {tflops:7.1f} TFLOP/s a device,"
          " {of_one:.2f} of one".format(**rows[-1]), flush=True)
  return rows, wrong


def main() -> int:
  flags = report.parser(__doc__, "parallel", tuple(WAYS))
  args = report.told(flags)
  rows, wrong = report.each_shape(
    measure, SMOKE if args.smoke else SHAPES, args
  )
  lines = [["shape", "way", "devices", "ms", "TFLOP/s a device", "of one"]]
  lines += [
    [r["shape"], r["way"], str(r["devices"]), f"{r['ms']:.3f}",
     f"{r['tflops']:.0f}", f"{r['of_one']:.2f}"]
    for r in rows
  ]
  legend = "Forward and backward; seven products a pair of tokens and head."
  return report.finish(args, "parallel", rows, lines, legend, wrong)


if __name__ == "__main__":
  sys.exit(main())
