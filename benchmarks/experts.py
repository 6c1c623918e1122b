# SPDX-License-Identifier: Apache-2.0
"""Times a layer of experts that are divided over this host's devices.

  python experts.py              layers of models
  python experts.py --smoke      tiny sizes, on any platform

Prints a table and writes experts.csv to --out. The exit code is 1 if a result
has not the bits of one device. "Of one" is what the same work takes on one
device, divided by devices and time: 1 would be no cost at all. Rows of experts
have room for all that could come, or in "max_rows" for a quarter more than the
mean. "partial_sums" is that with the option of this name. "gathered" is what
needs no operator of ours but the layer: all tokens are gathered, and what each
device's experts make of them is rounded and added up by psum_scatter. "shared"
has a dense expert for all tokens besides, which waits for no other device.
"""

import concurrent.futures
import functools
import sys
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
import report
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import jax
from jax import lax
from jax.experimental import aiter


class Shape(NamedTuple):
  """A problem: tokens a device, columns, those of an expert, and experts."""
  name: str
  tokens: int
  d: int
  inner: int
  experts: int
  topk: int
  gradients: bool = True


SHAPES = (
  Shape("mixtral", 8192, 4096, 14336, 8, 2, False),
  Shape("qwen3_30b", 8192, 2048, 768, 128, 8),
  Shape("deepseek", 4096, 7168, 2048, 64, 8),
)
SMOKE = (Shape("smoke", 32, 32, 16, 8, 2),)
ONE = "one device"
WAYS = ("expert_parallel", "max_rows", "partial_sums", "shared", "gathered")


def gathered(x, w1, w2, weight, ids):
  """The layer without an exchange of rows; its sums are rounded twice."""
  gather = lambda t: lax.all_gather(t, "x", tiled=True)
  experts = w1.shape[0]
  first = lax.axis_index("x").astype(jnp.int32) * experts
  own = gather(ids) - first
  own = jnp.where((own >= 0) & (own < experts), own, -1)
  y = aiter.fused_moe(gather(x), w1, w2, gather(weight), own)
  return lax.psum_scatter(y, "x", tiled=True)


def functions(shape: Shape, n: int):
  """Way -> (function on n devices, that of one) of a device's arrays."""
  layer = functools.partial(aiter.expert_parallel_moe, axis_name="x")
  rows = shape.tokens * shape.topk * 5 // 4

  def dense(x, w1, w2):
    gate, up = jnp.split(x @ w1[0].T, 2, -1)
    return (jax.nn.silu(gate) * up) @ w2[0].T

  def shared(routed):
    # One device's first expert, as it is at hand: as large as a shared one.
    return lambda x, w1, w2, *rest: routed(x, w1, w2, *rest) + dense(x, w1, w2)

  return {
    "expert_parallel": (layer, aiter.fused_moe),
    "max_rows": (functools.partial(layer, max_rows=rows), aiter.fused_moe),
    "partial_sums": (functools.partial(
      layer, max_rows=rows, partial_sums=True), aiter.fused_moe),
    "shared": (shared(layer), shared(aiter.fused_moe)),
    "gathered": (gathered, aiter.fused_moe),
  }


def trained(layer):
  def run(x, w1, w2, weight, ids):
    out, pull = jax.vjp(lambda *t: layer(*t, ids), x, w1, w2, weight)
    return out, pull(x)

  return run


def measure(shape: Shape, ways, dtype, seconds: float):
  """(rows of the table, what went wrong) of a problem."""
  devices = jax.devices()
  n = len(devices)
  mesh = Mesh(np.array(devices), ("x",))
  m, d, e = n * shape.tokens, shape.d, shape.experts
  keys = jax.random.split(jax.random.key(0), 4)
  draw = lambda i, *s: jax.random.normal(keys[i], s, dtype)
  weight, ids = aiter.topk_softmax(
    jax.random.normal(keys[3], (m, e), jnp.float32), shape.topk
  )
  args = (
    draw(0, m, d),
    draw(1, e, 2 * shape.inner, d) * d**-0.5,
    draw(2, e, d, shape.inner) * shape.inner**-0.5,
    weight,
    ids,
  )
  own = jax.device_put(args, NamedSharding(mesh, P("x")))
  time = lambda f, args: report.median_time(
    lambda: f(*args), jax.block_until_ready, seconds
  )
  programs = {}
  for passes, wrap in (("forward", lambda f: f), ("both", trained)):
    if passes == "both" and not shape.gradients:
      continue
    for way in ways:
      local, one = functions(shape, n)[way]
      whole = "shared" if way == "shared" else ONE
      programs[passes, whole, 1] = wrap(one), args
      programs[passes, way, n] = wrap(jax.shard_map(
        local, mesh=mesh, in_specs=(P("x"),) * 5, out_specs=P("x")
      )), own
  with concurrent.futures.ThreadPoolExecutor() as pool:
    compiled = list(pool.map(
      lambda f_args: jax.jit(f_args[0]).lower(*f_args[1]).compile(),
      programs.values(),
    ))
  rows, wrong, alone = [], [], {}
  for ((passes, way, count), (_, on)), run in zip(programs.items(), compiled):
    ms = 1e3 * time(run, on)
    if count == 1:
      alone[passes, way] = ms
    if way == ONE and passes == "forward":
      want = run(*on)
    elif way in ("expert_parallel", "max_rows") and passes == "forward":
      if not bool(jnp.all(jax.device_put(run(*on), devices[0]) == want)):
        wrong.append(f"{shape.name} {way}: other bits than one device")
    whole = alone[passes, "shared" if way == "shared" else ONE]
    rows.append({
      "shape": shape.name, "way": way, "pass": passes, "devices": count,
      "ms": ms, "of_one": whole / ms / count,
    })
    print("{shape:12} {way:16} {pass:8} {devices} {ms:9.3f} ms, {of_one:.2f} of"
          " one".format(**rows[-1]), flush=True)
  return rows, wrong


def main() -> int:
  flags = report.parser(__doc__, "experts", WAYS)
  args = report.told(flags)
  rows, wrong = report.each_shape(
    measure, SMOKE if args.smoke else SHAPES, args
  )
  lines = [["shape", "way", "pass", "devices", "ms", "of one"]]
  lines += [
    [r["shape"], r["way"], r["pass"], str(r["devices"]), f"{r['ms']:.3f}",
     f"{r['of_one']:.2f}"]
    for r in rows
  ]
  legend = "Tokens choose experts at random, all alike."
  return report.finish(args, "experts", rows, lines, legend, wrong)


if __name__ == "__main__":
  sys.exit(main())
