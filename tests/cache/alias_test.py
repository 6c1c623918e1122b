# SPDX-License-Identifier: Apache-2.0
"""Caches are written in place if donated, and right if not, in every transform.

The contract: a donated cache is aliased in the lowered and in the compiled
program, which has no copy of its size; memory does not grow over steps.
"""

import re
import warnings

import jax.numpy as jnp
import numpy as np
from absl.testing import absltest, parameterized
from cache import cases, oracle
from harness import machine, sharding, simulator, transforms
from jax.sharding import PartitionSpec as P

import jax
from jax import lax
from jax.experimental import aiter

PAGES, SIZE = cases.PAGES, cases.SIZE
HEADS, D = 4, 32
LARGE = 128  # Pages, so that a pool is larger than all else.


def _flash(layout="NHD", dtype="bfloat16", pages=PAGES):
  shapes = oracle.shapes(layout, pages, SIZE, HEADS, D, D,
                         cases.dtype_of(dtype))
  pools = [cases.pool(*s, dtype=dtype, seed=i) for i, s in enumerate(shapes)
           if s is not None]
  rows = [cases.numbers(6, HEADS, D, seed=i) for i in range(2)]
  return pools, rows, cases.some_slots(6, pages * SIZE)


def _write(layout):
  def write(pools, key, value, slots):
    k, v = (*pools, None)[:2]
    return list(aiter.write_kv_cache(key, value, k, v, slots, layout=layout))
  return write


def _by_token(pools, key, value, slots):
  return list(aiter.reshape_and_cache_with_pertoken_quant(
      key, value, *pools, slots, asm_layout=True))


def _by_block(pools, key, value, slots):
  return list(aiter.reshape_and_cache_with_block_quant(
      key, value, *pools, slots, asm_layout=True))


def _latent(pools, key, value, slots):
  return [aiter.concat_and_cache_mla(key[:, 0], value[:, 0], pools[0], slots)]


def _indexer(pools, key, value, slots):
  del value
  return [aiter.indexer_k_quant_and_cache(
      key.reshape(len(slots), -1), pools[0], slots)]


def _copied(pools, key, value, slots):
  del key, value
  return list(aiter.copy_blocks(*pools, slots.reshape(-1, 2)))


def _calls():
  """Name -> (write, pools), of each kind of kernel and of place."""
  scales = lambda *shape: np.ones(shape, np.float32)
  of = lambda layout, dtype: _flash(layout, dtype, LARGE)[0]
  return {
      "NHD": (_write("NHD"), of("NHD", "bfloat16")),
      "HND": (_write("HND"), of("HND", "float16")),
      "x": (_write("x"), of("x", "int8")),
      "asm": (_write("asm"), of("asm", "float8_e4m3fn")),
      "interleaved": (_write("interleaved"), of("interleaved", "bfloat16")),
      "cast": (_write("NHD"), of("NHD", "float8_e4m3fnuz")),
      "token": (_by_token, [*of("asm", "int8"), scales(LARGE, HEADS, SIZE),
                            scales(LARGE, HEADS, SIZE)]),
      "token_fp8": (_by_token, [
          *of("asm", "float8_e4m3fn"), scales(LARGE, HEADS, SIZE),
          scales(LARGE, HEADS, SIZE)]),
      "block": (_by_block, [*of("asm", "float8_e4m3fn"), scales(LARGE, HEADS),
                            scales(LARGE, HEADS)]),
      "latent": (_latent, [cases.pool(LARGE, SIZE, 2 * D, dtype="bfloat16")]),
      "indexer": (_indexer, [cases.pool(LARGE, SIZE, HEADS * D + 4,
                                        dtype="uint8")]),
      "copy": (_copied, of("NHD", "bfloat16")),
  }


CALLS = _calls()


class ContractTest(parameterized.TestCase):

  @parameterized.parameters(*machine.sample(CALLS, 6))
  def test_in_place(self, name):
    write, pools = CALLS[name]
    _, rows, slots = _flash(pages=LARGE)
    args = [jnp.asarray(t) for t in pools], *rows, slots
    sizes = [t.nbytes for t in pools]
    with warnings.catch_warnings():
      warnings.simplefilter("error")  # As when a donated array is of no use.
      lowered = jax.jit(write, donate_argnums=0).lower(*args)
      compiled = lowered.compile()
      want = jax.device_get(jax.jit(write)(*args))
      got = compiled(*args)
    self.assertTrue(all(t.is_deleted() for t in args[0]))
    cases.assert_same(self, got, want)
    entry = re.search(r"func.func public @main\((.*)", lowered.as_text())[1]
    self.assertEqual(entry.count("tf.aliasing_output"), len(pools))
    text = compiled.as_text()
    aliases = re.search(r"input_output_alias=\{(.*?)\}, entry", text)[1]
    self.assertEqual(aliases.count("-alias)"), len(pools), aliases)
    if machine.PLATFORM:  # Of our call too.
      self.assertIn("output_to_operand_aliasing", text)
    memory = compiled.memory_analysis()
    self.assertGreaterEqual(memory.alias_size_in_bytes, sum(sizes))
    if name == "block" and not machine.GPU:
      return  # What a block holds is looked up, which XLA does beside it.
    self.assertLess(memory.temp_size_in_bytes, max(sizes))
    entry = text[text.index("\nENTRY"):]
    for pool in pools[:2]:
      shape = ",".join(map(str, pool.shape))
      self.assertEmpty(re.findall(
          rf"\[{shape}\]\S* (?:copy|dynamic-update-slice|copy-start)\(.*",
          entry))

  @parameterized.parameters("NHD", "cast", "token")
  def test_steps(self, name):
    """512 steps leave as many live bytes as one."""
    write, pools = CALLS[name]
    _, rows, slots = _flash(pages=LARGE)
    steps = machine.size(512, 512, 16)
    step = jax.jit(write, donate_argnums=0)
    pools = [jnp.asarray(t) for t in pools]
    rows = [jnp.asarray(t) for t in rows]
    def live():
      if machine.SIMULATED:
        jax.block_until_ready(pools)
        return simulator.live_allocations()
      return sum(t.nbytes for t in jax.live_arrays())
    slots = jnp.asarray(slots)
    pools = step(pools, *rows, slots)
    before = live()
    where = {t.unsafe_buffer_pointer() for t in pools}
    for _ in range(steps):
      pools = step(pools, *rows, slots)
    self.assertEqual(live(), before)
    self.assertEqual({t.unsafe_buffer_pointer() for t in pools}, where)

  @parameterized.parameters("NHD", "cast", "token",
                            *(["block"] if machine.GPU else []))
  def test_loops(self, name):
    """A loop that carries caches writes them in place."""
    write, pools = CALLS[name]
    _, rows, slots = _flash(pages=LARGE)
    def scan(pools, key, value, slots):
      def step(pools, i):
        return write(pools, jnp.roll(key, i, 0), value, slots + i), None
      return lax.scan(step, pools, jnp.arange(3))[0]
    def loop(pools, key, value, slots):
      def step(carry):
        i, pools = carry
        return i + 1, write(pools, jnp.roll(key, i, 0), value, slots + i)
      return lax.while_loop(lambda carry: carry[0] < 3, step,
                            (jnp.int32(0), pools))[1]
    want = [jnp.asarray(t) for t in pools]
    for i in range(3):
      want = write(want, np.roll(rows[0], i, 0), rows[1],
                   jnp.asarray(slots) + i)
    for fn in (scan, loop):
      args = [jnp.asarray(t) for t in pools], *rows, slots
      compiled = jax.jit(fn, donate_argnums=0).lower(*args).compile()
      memory = compiled.memory_analysis()
      self.assertLess(memory.temp_size_in_bytes, max(t.nbytes for t in pools))
      cases.assert_same(self, compiled(*args), jax.device_get(want))

  def test_layers(self):
    """A scan over stacked caches, as of a model's layers."""
    pools, rows, slots = _flash()
    want = [t.copy() for t in pools]
    oracle.write("NHD", *rows, *want, slots, SIZE)
    stack = lambda arrays: [np.stack([t] * 3) for t in arrays]
    def layers(pools, key, value, slots):
      step = lambda _, pools: (None, _write("NHD")(pools, key, value, slots))
      return lax.scan(step, None, pools)[1]
    got = jax.jit(layers, donate_argnums=0)(
        [jnp.asarray(t) for t in stack(pools)], *rows, slots)
    cases.assert_same(self, got, stack(want))

  def test_undonated(self):
    """The caches of before stay as they were."""
    pools, rows, slots = _flash()
    before = [jnp.asarray(t) for t in pools]
    after = jax.jit(_write("NHD"))(before, *rows, slots)
    cases.assert_same(self, before, pools)
    want = [t.copy() for t in pools]
    oracle.write("NHD", *rows, *want, slots, SIZE)
    cases.assert_same(self, after, want)
    # Twice of one cache, in one program.
    both = jax.jit(lambda *a: (_write("NHD")(*a), _write("NHD")(*a)))(
        before, *rows, slots)
    cases.assert_same(self, both, (want, want))


class TransformTest(parameterized.TestCase):

  @parameterized.parameters("NHD", "asm", "cast", "token", "block", "latent",
                            "copy")
  def test_vmap(self, name):
    write, pools = CALLS[name]
    pools = [t[:PAGES] for t in pools]
    _, rows, slots = _flash()
    stack = lambda t, n=3: np.stack([np.roll(t, i, 0) for i in range(n)])
    many = [stack(t) for t in pools]
    wide = [stack(t) for t in rows]
    # Caches of one element are beside, not in, those of another.
    own = np.stack([slots, slots + 3, slots - 2])
    for pools_axis, rows_axis, slots_axis in machine.sample(
        [(0, 0, 0), (None, 0, 0), (0, None, None)], 1):
      axes = (pools_axis, rows_axis, rows_axis, slots_axis)
      args = (many if pools_axis == 0 else pools,
              *(wide if rows_axis == 0 else rows),
              own if slots_axis == 0 else slots)
      got = jax.jit(jax.vmap(write, axes))(*args)
      pick = lambda i, t, axis: t if axis is None else t[i]
      want = [write([jnp.asarray(pick(i, t, pools_axis)) for t in args[0]],
                    *(jnp.asarray(pick(i, t, axis))
                      for t, axis in zip(args[1:], axes[1:])))
              for i in range(3)]
      want = jax.tree.map(lambda *t: np.stack(t), *jax.device_get(want))
      cases.assert_same(self, got, want)

  def test_vmap_over_scales(self):
    pools, rows, slots = _flash(dtype="int8")
    scales = np.float32([0.5, 2.0, 3.0])
    write = lambda s: aiter.write_kv_cache(*rows, *pools, slots, k_scale=s)
    got = jax.vmap(write)(scales)
    want = [jax.device_get(write(s)) for s in scales]
    cases.assert_same(self, got,
                           jax.tree.map(lambda *t: np.stack(t), *want))
    by_head = lambda *scales: aiter.reshape_and_cache_with_pertoken_quant(
        *rows, *_flash("x", "int8")[0], *scales, slots)
    scales = [np.ones((2, HEADS, PAGES * SIZE), np.float32)] * 2
    got = jax.vmap(by_head)(*scales)
    want = jax.device_get(by_head(*(s[0] for s in scales)))
    cases.assert_same(self, got, jax.tree.map(lambda t: np.stack([t, t]),
                                                   want))

  @sharding.on_hosts
  @parameterized.product(
      name=["NHD", "asm", "cast", "token", "block", "copy"],
      explicit=[False, True])
  def test_heads_over_devices(self, name, explicit):
    """Each device writes its heads, in place, and speaks to no other."""
    write, pools = CALLS[name]
    _, rows, slots = _flash(pages=LARGE)
    want = jax.device_get(write([jnp.asarray(t) for t in pools],
                                *map(jnp.asarray, rows), jnp.asarray(slots)))
    mesh = sharding.mesh((4,), ("x",), explicit=explicit)
    heads = lambda t: P(*("x" if n == HEADS and i else None
                          for i, n in enumerate(t.shape)))
    specs = [heads(t) for t in pools]
    with jax.set_mesh(mesh):
      args = [sharding.put(mesh, pools, specs),
              *sharding.put(mesh, (*rows, slots),
                            (P(None, "x"), P(None, "x"), P()))]
      compiled = jax.jit(write, donate_argnums=0).lower(*args).compile()
      self.assertEmpty(sharding.collectives(compiled))
      memory = compiled.memory_analysis()
      self.assertGreaterEqual(memory.alias_size_in_bytes,
                              sum(t.nbytes for t in pools) // 4)
      got = compiled(*args)
    for t, spec in zip(got, specs):
      self.assertTrue(t.sharding.is_equivalent_to(
          sharding.put(mesh, [t], [spec])[0].sharding, t.ndim))
    cases.assert_same(self, got, want)

  @sharding.on_hosts
  def test_replicated_rows(self):
    """Rows that every device has are no reason to gather the caches."""
    pools, rows, slots = _flash()
    mesh = sharding.mesh((4,), ("x",))
    args = [sharding.put(mesh, pools, [P(None, None, "x")] * 2),
            *sharding.put(mesh, (*rows, slots), [P()] * 3)]
    compiled = jax.jit(_write("NHD")).lower(*args).compile()
    self.assertEmpty(sharding.collectives(compiled))
    cases.assert_same(self, compiled(*args),
                           jax.device_get(_write("NHD")(
                               [jnp.asarray(t) for t in pools], *rows, slots)))

  @sharding.on_hosts
  def test_pages_in_a_shard_map(self):
    """Each device has its own pages and tokens."""
    pools, rows, slots = _flash(pages=8)
    mesh = sharding.mesh((4,), ("x",))
    own = np.stack([cases.some_slots(6, 2 * SIZE, seed=i) for i in range(4)])
    many = [np.stack([np.roll(t, i, 0) for i in range(4)]).reshape(
        24, *t.shape[1:]) for t in rows]
    fn = jax.jit(jax.shard_map(_write("NHD"), mesh=mesh, in_specs=P("x"),
                               out_specs=P("x")), donate_argnums=0)
    got = fn([jnp.asarray(t) for t in pools], *many, own.reshape(-1))
    want = [t.copy() for t in pools]
    for i in range(4):
      part = lambda t, n: t[i * n:(i + 1) * n]
      oracle.write("NHD", *(part(t, 6) for t in many),
                   *(part(t, 2) for t in want), own[i], SIZE)
    cases.assert_same(self, got, want)

  @parameterized.parameters(*transforms.EXPORTED)
  def test_export(self, platform):
    for name, op in machine.sample((
        ("NHD", "cache_copy"), ("cast", "cache_cast"), ("token", "cache_token"),
        ("block", "cache_block")), 2):
      write, pools = CALLS[name]
      _, rows, slots = _flash(pages=LARGE)
      transforms.check_export(
          self, write, ([jnp.asarray(t) for t in pools], *rows, slots), (op,),
          platform)

  def test_export_of_aliases(self):
    """A program for another machine writes in place there."""
    pools, rows, slots = _flash()
    traced = jax.jit(_write("NHD"), donate_argnums=0).trace(
        pools, *rows, slots)
    for platform in ("cuda", "rocm"):
      text = traced.lower(lowering_platforms=(platform,)).as_text()
      self.assertEqual(text.count("#stablehlo.output_operand_alias<"), 2)
      self.assertEqual(text.count("tf.aliasing_output"), 2)


if __name__ == "__main__":
  absltest.main()
