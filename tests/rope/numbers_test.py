# SPDX-License-Identifier: Apache-2.0
"""Rotary embedding: numbers against float64, transformations, errors.

Results and gradients are compared with a float64 oracle. The error may be twice
that of the plain formula, with every step in the input dtype, plus a floor of
one unit in the last place of the largest value. What is not turned is copied,
bit for bit.
"""

import dataclasses
import functools
import importlib
import itertools
import math

import hypothesis
import jax.numpy as jnp
import numpy as np
from absl.testing import absltest, parameterized
from harness import cases, machine, sharding, transforms
from harness.machine import CPUS, PLATFORM
from hypothesis import strategies as st
from jax.sharding import PartitionSpec as P
from rope import oracle

import jax
from jax._src.aiter.rope import op as rope_op
from jax.experimental import aiter
from jaxlib import gpu_aiter

DTYPES = cases.DTYPES
FLOOR = {"bf16": 2.0**-8, "fp16": 2.0**-11, "fp32": 2.0**-22}
ROWS = 13  # of the tables, unless a sequence is longer
PLACES = ("", "positions", "offsets", "both", "cu_seqlens")


@dataclasses.dataclass(frozen=True)
class Case:
  """One call of rope_2c, or of rope if hk is 0.

  `table` is the tables' dtype, x's if empty; `form` how they come: "rows"
  ([rows, n]), "aiter" ([rows, 1, 1, n]), "own" (a row a token).
  """
  dtype: str = "bf16"
  layout: str = "bshd"
  style: str = "neox"
  b: int = 2
  s: int = 5
  h: int = 3
  hk: int = 2
  d: int = 16
  d_rot: int = 16
  full: bool = False
  nope_first: bool = False
  table: str = ""
  form: str = "rows"
  places: str = ""

  @property
  def tokens(self):
    return {"bshd": (self.b, self.s), "sbhd": (self.s, self.b),
            "thd": (self.s,)}[self.layout]

  @property
  def rows(self):
    return max(ROWS, self.s)

  def arrays(self, seed=0):
    """Operands by name: float64 numbers that the dtypes have, and integers."""
    rng = np.random.default_rng(seed)
    own = self.form == "own"
    lead = self.tokens if own else (self.rows,)
    table = self.table or self.dtype
    shapes = {"x": ((*self.tokens, self.h, self.d), self.dtype),
              "y": ((*self.tokens, self.hk, self.d), self.dtype),
              "cos": ((*lead, self.d_rot // (2 - self.full)), table),
              "sin": ((*lead, self.d_rot // (2 - self.full)), table)}
    arrays = {
        name: rng.standard_normal(shape).astype(DTYPES[dtype]).astype(
            np.float64) for name, (shape, dtype) in shapes.items()}
    if self.places in ("positions", "both"):
      arrays["positions"] = rng.integers(-3, self.rows + 3, self.tokens)
    if self.places in ("offsets", "both"):
      arrays["offsets"] = rng.integers(-4, 5, self.tokens)
    if self.places == "cu_seqlens":
      cuts = np.sort(rng.integers(0, self.s + 1, 3))
      arrays["cu_seqlens"] = np.array([0, *cuts, self.s])
    return arrays

  def row_of(self, arrays):
    """Each token's row of the tables, as they lie in memory."""
    tokens = math.prod(self.tokens)
    if self.form == "own":
      return np.arange(tokens)
    place = np.arange(self.s)
    if "cu_seqlens" in arrays:
      place = oracle.positions_of(arrays["cu_seqlens"], self.s)
    if self.layout == "sbhd":
      place = place[:, None]
    place = np.broadcast_to(arrays.get("positions", place), self.tokens)
    place = place + arrays.get("offsets", 0)
    return oracle.rows_of(place.reshape(-1), self.rows)

  @property
  def options(self):
    """Of the oracle."""
    return dict(full=self.full, style=self.style, nope_first=self.nope_first)

  def expected(self, arrays, cotangents):
    """float64 results and gradients by name."""
    rows = self.row_of(arrays)
    flat = lambda t: t.reshape(len(rows), *t.shape[-2:])
    cos, sin = (arrays[n].reshape(-1, arrays[n].shape[-1]) for n in (
        "cos", "sin"))
    out, dcos, dsin = {}, np.zeros_like(cos), np.zeros_like(sin)
    for name in ("x", "y"):
      x, g = flat(arrays[name]), flat(cotangents[name])
      turn = functools.partial(oracle.rotate, cos=cos[rows], sin=sin[rows],
                               d_rot=self.d_rot, **self.options)
      shape = arrays[name].shape
      out[name] = turn(x).reshape(shape)
      out["d" + name] = turn(g, transposed=True).reshape(shape)
      for table, own in zip((dcos, dsin), oracle.table_gradients(
          x, g, self.d_rot, **self.options)):
        np.add.at(table, rows, own)
    shape = arrays["cos"].shape
    return out | {"dcos": dcos.reshape(shape), "dsin": dsin.reshape(shape)}

  def cast(self, arrays, device=None):
    """Operands as a call takes them."""
    table = DTYPES[self.table or self.dtype]
    dtypes = {"x": DTYPES[self.dtype], "y": DTYPES[self.dtype], "cos": table,
              "sin": table}
    return {n: jax.device_put(t.astype(dtypes.get(n, np.int32)), device)
            for n, t in arrays.items()}

  def call(self, x, y, cos, sin, **places):
    """(x, y) of the public functions."""
    if self.form == "aiter":
      cos, sin = (t[:, None, None] for t in (cos, sin))
    options = dict(
        layout=self.layout, rotate_style=self.style, nope_first=self.nope_first,
        reuse_freqs_front_part=not self.full, **places)
    if self.hk == 0:
      return aiter.rope(x, cos, sin, **options), y
    return aiter.rope_2c(x, y, cos, sin, **options)

  def plain(self, x, y, cos, sin, rows):
    """The formula as one writes it, in the operands' own dtype."""
    begin = self.d - self.d_rot if self.nope_first else 0
    table = lambda t: t.reshape(-1, t.shape[-1])[rows].reshape(
        *self.tokens, 1, t.shape[-1]).astype(x.dtype)
    cos, sin = table(cos), table(sin)
    if self.style == "neox":
      if not self.full:
        cos, sin = (jnp.concatenate([t, t], -1) for t in (cos, sin))
      other = lambda t: jnp.concatenate(
          [-t[..., self.d_rot // 2:], t[..., :self.d_rot // 2]], -1)
    else:
      if not self.full:
        cos, sin = (jnp.repeat(t, 2, -1) for t in (cos, sin))
      other = lambda t: jnp.stack(
          [-t[..., 1::2], t[..., ::2]], -1).reshape(t.shape)

    def turned(x):
      part = x[..., begin:begin + self.d_rot]
      return jnp.concatenate(
          [x[..., :begin], part * cos + other(part) * sin,
           x[..., begin + self.d_rot:]], -1)

    return turned(x), turned(y)


def results(function, operands, cotangents, tables=True):
  """Results and gradients by name, in float64."""
  names = ["x", "y", *(["cos", "sin"] if tables else [])]
  rest = {n: t for n, t in operands.items() if n not in names}

  @jax.jit
  def run(differentiated, rest, cotangents):
    out, vjp = jax.vjp(
        lambda d: function(**d, **rest), differentiated)
    grads, = vjp((cotangents["x"].astype(out[0].dtype),
                  cotangents["y"].astype(out[1].dtype)))
    return {"x": out[0], "y": out[1], **{"d" + n: t for n, t in grads.items()}}

  out = run({n: operands[n] for n in names}, rest, cotangents)
  return {n: np.asarray(t, np.float64) for n, t in jax.device_get(out).items()}


class RopeTestCase(parameterized.TestCase):

  def check(self, case: Case, seed=0, tables=False):
    arrays, other = case.arrays(seed), case.arrays(seed + 1)
    cotangents = {n: other[n] for n in ("x", "y")}
    want = case.expected(arrays, cotangents)
    operands, given = case.cast(arrays), case.cast(cotangents)
    got = results(case.call, operands, given, tables)
    rows = case.row_of(arrays)
    plain = results(
        functools.partial(case.plain, rows=rows),
        {n: operands[n] for n in ("x", "y", "cos", "sin")}
        if not machine.GPU else case.cast(
            {n: arrays[n] for n in ("x", "y", "cos", "sin")}, CPUS[0]),
        jax.device_put(given, CPUS[0]), tables)
    for name, t in got.items():
      expected = want[name]
      self.assertEqual(t.shape, expected.shape)
      if not expected.size:
        continue
      error = np.max(np.abs(t - expected))
      allowed = 2 * np.max(np.abs(plain[name] - expected))
      dtype = case.table or case.dtype if name in ("dcos", "dsin") else (
          case.dtype)
      self.assertLessEqual(
          error, allowed + FLOOR[dtype] * np.max(np.abs(expected)),
          f"{name} of {case}")
    rest = np.s_[..., :case.d - case.d_rot] if case.nope_first else (
        np.s_[..., case.d_rot:])
    np.testing.assert_array_equal(got["x"][rest], arrays["x"][rest])
    np.testing.assert_array_equal(got["dx"][rest], cotangents["x"][rest])


class NumbersTest(RopeTestCase):

  @parameterized.parameters(*machine.sample(itertools.product(
      ["bf16", "fp16", "fp32"], ["neox", "gptj"], [False, True]), 6))
  def test_pairs(self, dtype, style, full):
    self.check(Case(dtype, style=style, full=full))

  @parameterized.product(
      dtype=["bf16", "fp16"], d=[24, 40, 56, 72, 88, 104, 120],
      places=machine.sample(["", "positions"], 1))
  def test_halves_of_no_sixteen_bytes(self, dtype, d, places):
    self.check(Case(dtype, d=d, d_rot=d, places=places))

  @parameterized.parameters(*machine.sample(itertools.product(
      [64, 80, 96, 128, 192, 256], [{}, {"places": "positions"},
                                    {"form": "own"}], ["", "fp32"]), 3))
  def test_full_tables_of_whole_heads(self, d, rows, table):
    self.check(Case(d=d, d_rot=d, full=True, table=table, **rows))

  @parameterized.parameters(*machine.sample(itertools.product(
      ["bshd", "sbhd", "thd"], PLACES), 8))
  def test_layouts_and_places(self, layout, places):
    self.check(Case(layout=layout, places=places))

  @parameterized.parameters(*machine.sample(itertools.product(
      ["neox", "gptj"], [False, True], [False, True], [4, 14]), 6))
  def test_partial(self, style, full, nope_first, d_rot):
    self.check(Case(style=style, full=full, nope_first=nope_first, d_rot=d_rot,
                    hk=0))

  @parameterized.parameters(*machine.sample(itertools.product(
      ["rows", "aiter", "own"], [("bf16", "fp32"), ("fp16", "bf16"),
                                 ("fp32", "fp16")]), 6))
  def test_tables(self, form, types):
    dtype, table = types
    self.check(Case(dtype, form=form, table=table))

  @parameterized.parameters(*machine.sample(itertools.product(
      ["neox", "gptj"], [False, True], ["rows", "own"]), 3))
  def test_gradients_of_tables(self, style, full, form):
    self.check(Case(
        "bf16" if style == "gptj" else "fp32", style=style, full=full,
        form=form, table="fp32", places="" if form == "own" else "both",
        nope_first=full, d_rot=8), tables=True)

  @parameterized.parameters(*machine.size([
      (64, 64), (128, 128), (256, 256), (96, 96), (80, 32), (192, 64), (72, 72),
      (2, 2), (18, 6), (300, 200)], [(128, 128), (2, 2), (18, 6), (300, 200)]))
  def test_widths(self, d, d_rot):
    """Every kernel."""
    for style in ("neox", "gptj"):
      self.check(Case(d=d, d_rot=d_rot, style=style, h=5, hk=1, b=1, s=19))
    self.check(Case("fp32", d=d, d_rot=d_rot, nope_first=True, s=9))

  def test_without_tokens(self):
    for b, s, h, hk in ((0, 5, 3, 2), (2, 0, 3, 2), (2, 5, 0, 0)):
      self.check(Case(b=b, s=s, h=h, hk=hk), tables=True)

  @cases.examples(40, 12, 8)
  @hypothesis.given(st.data())
  def test_any(self, data):
    draw = data.draw
    d = draw(st.integers(2, machine.size(300, 80, 80)))
    form = draw(st.sampled_from(["rows", "aiter", "own"]))
    layout = draw(st.sampled_from(["bshd", "sbhd", "thd"]))
    if layout == "thd" and form == "own":
      form = "rows"
    self.check(Case(
        draw(st.sampled_from(list(DTYPES))), layout,
        draw(st.sampled_from(["neox", "gptj"])), draw(st.integers(1, 4)),
        draw(st.integers(1, 40)), draw(st.integers(1, 6)),
        draw(st.integers(0, 6)), d, 2 * draw(st.integers(1, d // 2)),
        draw(st.booleans()), draw(st.booleans()),
        draw(st.sampled_from(["", "fp32"])), form,
        draw(st.sampled_from(PLACES)) if form != "own" else ""),
               draw(st.integers(0, 99)))


class SectionsTest(RopeTestCase):
  """Positions of several axes."""

  def check_function(self, function, x, want, *rest):
    """function(x), its gradient, and that of its square."""
    got, vjp = jax.vjp(jax.jit(function), jnp.asarray(x, jnp.float32))
    np.testing.assert_allclose(got, want(x), atol=2e-6)
    g = np.random.default_rng(5).standard_normal(x.shape).astype(np.float32)
    np.testing.assert_allclose(
        vjp(jnp.asarray(g))[0], want(g.astype(np.float64), True), atol=2e-6)

  @parameterized.parameters(*itertools.product(
      ["neox", "gptj"], [False, True], [False, True], [(3, 5), (4, 8)]))
  def test_2d(self, style, full, nope_first, pairs):
    rng = np.random.default_rng(0)
    height, width = 3, 4
    d = 2 * sum(pairs) + 2
    x = rng.standard_normal((2, height * width, 3, d))
    tables = [rng.standard_normal((n + 1, p * (1 + full))).astype(np.float32)
              for n, p in zip((height, height, width, width),
                              np.repeat(pairs, 2))]
    place = np.tile(np.arange(height * width), 2)
    own = [np.concatenate([tables[i][place // width], tables[i + 2][
        place % width]], -1) for i in (0, 1)]

    def want(x, transposed=False):
      return oracle.rotate(
          x.reshape(-1, 3, d), *own, d - 2, full=full, style=style,
          nope_first=nope_first, transposed=transposed,
          sections=pairs).reshape(x.shape)

    shaped = [jnp.asarray(t)[None, :, None] for t in tables]
    self.check_function(lambda x: aiter.rope_2d(
        x, *shaped, height=height, width=width, rotate_style=style,
        reuse_freqs_front_part=not full, nope_first=nope_first), x, want)
    self.check_function(lambda x: aiter.rope_2d_fwd(
        x, *shaped, height, width, int(style == "gptj"), not full, nope_first),
                        x, want)
    np.testing.assert_allclose(
        aiter.rope_2d_bwd(jnp.asarray(x, jnp.float32), *shaped, height, width,
                          int(style == "gptj"), not full, nope_first),
        want(x, True), atol=2e-6)

  # Sections that kernels load by themselves, and others.
  @parameterized.product(
      style=["neox", "gptj"], pairs=[(4, 1, 3), (4, 4, 8)])
  def test_3d(self, style, pairs):
    rng = np.random.default_rng(0)
    sizes, d = (2, 3, 2), 2 * sum(pairs)
    x = rng.standard_normal((2, 12, 2, d))
    tables = [rng.standard_normal((n, p)).astype(np.float32)
              for n, p in zip(sizes, pairs) for _ in range(2)]
    places = np.unravel_index(np.tile(np.arange(12), 2), sizes)
    own = [np.concatenate([tables[2 * a + i][places[a]] for a in range(3)], -1)
           for i in (0, 1)]
    want = lambda x, transposed=False: oracle.rotate(
        x.reshape(-1, 2, d), *own, d, style=style, transposed=transposed,
        sections=pairs).reshape(x.shape)
    turn = functools.partial(
        aiter.rope_3d, frames=2, height=3, width=2, rotate_style=style)
    tables = [jnp.asarray(t) for t in tables]
    self.check_function(lambda x: turn(x, *tables), x, want)
    # All channels are turned, so the result is linear in the tables.
    x = jnp.asarray(x, jnp.float32)
    out, vjp = jax.vjp(lambda tables: turn(x, *tables), tables)
    np.testing.assert_allclose(
        sum(jnp.vdot(t, d) for t, d in zip(tables, *vjp(x))),
        jnp.vdot(x, out), rtol=1e-5)

  @parameterized.parameters(*itertools.product(
      ["bshd", "thd"], ["neox", "gptj"], [(2, 3, 3), (8, 0, 0), (0, 0, 8)]))
  def test_mrope(self, layout, style, sections):
    rng = np.random.default_rng(0)
    tokens = (2, 5) if layout == "bshd" else (10,)
    q, k = (rng.standard_normal((*tokens, h, 20)) for h in (3, 1))
    cos, sin = (rng.standard_normal((ROWS, 8)).astype(np.float32)
                for _ in range(2))
    positions = rng.integers(-2, ROWS + 2, (3, *tokens))
    rows = oracle.rows_of(positions.reshape(3, -1), ROWS)
    section = np.repeat(np.arange(3), sections)
    own = [t[rows[section], np.arange(8)[:, None]].T for t in (cos, sin)]
    want = lambda x, transposed=False: oracle.rotate(
        x.reshape(10, -1, 20), *own, 16, style=style,
        transposed=transposed).reshape(x.shape)
    call = lambda q, k: aiter.rope_mrope(
        q, k, jnp.asarray(cos), jnp.asarray(sin), jnp.asarray(positions),
        sections, layout=layout, rotate_style=style)
    other = lambda t: jnp.asarray(t, jnp.float32)
    self.check_function(lambda q: call(q, other(k))[0], q, want)
    self.check_function(lambda k: call(other(q), k)[1], k, want)

  def test_equal_positions_are_text(self):
    rng = np.random.default_rng(0)
    q, k = (jnp.asarray(rng.standard_normal((2, 6, h, 16)), jnp.bfloat16)
            for h in (4, 2))
    cos, sin = aiter.rotary_embedding(16, 32)
    positions = jnp.asarray(rng.integers(0, 32, (2, 6)))
    for a, b in zip(
        aiter.rope_mrope(q, k, cos, sin, jnp.stack([positions] * 3), (2, 3, 3)),
        aiter.rope_2c(q, k, cos, sin, positions=positions)):
      np.testing.assert_array_equal(a, b)


class NamesTest(RopeTestCase):
  """AITER's, jax-aiter's and tpu-inference's functions are ours."""

  def setUp(self):
    super().setUp()
    rng = np.random.default_rng(0)
    normal = lambda *shape: jnp.asarray(
        rng.standard_normal(shape), jnp.float32)
    self.x, self.y = normal(5, 2, 3, 12), normal(5, 2, 1, 12)
    self.freqs = normal(9, 1, 1, 4)
    self.cos, self.sin = jnp.cos(self.freqs), jnp.sin(self.freqs)
    self.positions = jnp.asarray(rng.integers(0, 7, (5, 2)))
    self.offsets = jnp.asarray(rng.integers(0, 2, (5, 2)))

  def assert_same(self, got, want):
    jax.tree.map(np.testing.assert_array_equal, got, want)

  @parameterized.parameters(*itertools.product([0, 1], [False, True]))
  def test_sbhd(self, style, nope_first):
    x, y, cos, sin = self.x, self.y, self.cos, self.sin
    rest = style, True, nope_first
    options = dict(layout="sbhd", rotate_style=("neox", "gptj")[style],
                   nope_first=nope_first)
    places = {"": {}, "_positions": dict(positions=self.positions),
              "_positions_offsets": dict(positions=self.positions,
                                         offsets=self.offsets)}
    for name, place in places.items():
      one = getattr(aiter, f"rope_cached{name}_fwd")
      two = getattr(aiter, f"rope_cached{name}_2c_fwd")
      self.assert_same(one(x, cos, sin, *place.values(), *rest),
                       aiter.rope(x, cos, sin, **place, **options))
      self.assert_same(two(x, y, cos, sin, *place.values(), *rest),
                       aiter.rope_2c(x, y, cos, sin, **place, **options))
    self.assert_same(aiter.rope_fwd(x, self.freqs, *rest),
                     aiter.rope(x, freqs=self.freqs, **options))
    self.assert_same(
        aiter.rope_fwd(x, self.freqs, *rest, transpose_output=True),
        aiter.rope(x, cos, sin, **options))
    self.assert_same(aiter.rope_2c_fwd(x, y, self.freqs, *rest),
                     aiter.rope_2c(x, y, cos, sin, **options))
    of = lambda *vectors: aiter.rope_2c(*vectors, cos, sin, **options)
    grads = jax.vjp(of, x, y)[1]((x, y))
    self.assert_same(aiter.rope_cached_2c_bwd(x, y, cos, sin, *rest), grads)
    self.assert_same(aiter.rope_2c_bwd(x, y, self.freqs, *rest), grads)
    self.assert_same(aiter.rope_cached_bwd(x, cos, sin, *rest), grads[0])
    self.assert_same(aiter.rope_bwd(x, self.freqs, *rest), grads[0])

  def test_thd(self):
    x = self.x[:, 0]
    ends = jnp.array([0, 2, 5])
    options = dict(layout="thd", cu_seqlens=ends, freqs=self.freqs)
    self.assert_same(aiter.rope_thd_fwd(x, ends, self.freqs, 0, True, False),
                     aiter.rope(x, **options))
    self.assert_same(
        aiter.rope_thd_bwd(x, ends, self.freqs, 0, True, False),
        jax.vjp(lambda x: aiter.rope(x, **options), x)[1](x)[0])

  def test_rotary_embedding_fwd(self):
    x, y = self.x[:, 0], self.y[:, 0]
    positions, offsets = self.positions[:, 0], self.offsets[:, 0]
    want = aiter.rope_2c(x, y, self.cos, self.sin, layout="thd",
                         positions=positions, nope_first=True)
    flat = lambda t: t.reshape(5, -1)
    got = aiter.rotary_embedding_fwd(
        positions, flat(x), flat(y), 12, self.cos, self.sin, True, True)
    self.assert_same(got, tuple(map(flat, want)))
    self.assert_same(aiter.rotary_embedding_fwd(
        positions, x, y, 12, self.cos, self.sin, True, True), want)
    self.assert_same(
        aiter.batched_rotary_embedding(
            positions, x, y, 12, self.cos, self.sin, False, False, 6, offsets),
        aiter.rope_2c(x, y, self.cos[..., :3], self.sin[..., :3], layout="thd",
                      positions=positions, offsets=offsets,
                      rotate_style="gptj"))

  def test_jax_aiter(self):
    module = importlib.import_module("jax_aiter.rope")
    x = jnp.swapaxes(self.x, 0, 1)
    cos, sin = (jnp.stack([jnp.concatenate([t[:5, 0, 0]] * 3, -1)] * 2)
                for t in (self.cos, self.sin))
    self.assert_same(module.rope(x, cos, sin), aiter.rope(
        x, cos, sin, reuse_freqs_front_part=False))

  @parameterized.parameters("split", "interleaved")
  def test_apply_rope(self, order):
    x = self.x[:, 0]
    positions = jnp.array([3, 0, 7, 1, 2])
    cos, sin = aiter.rotary_embedding(8, 9, 500.0)
    style = "neox" if order == "split" else "gptj"
    want = aiter.rope(x, cos, sin, layout="thd", positions=positions,
                      rotate_style=style)
    got = aiter.apply_rope(x, positions, 8, 500.0, None, order)
    np.testing.assert_allclose(got, want, atol=1e-5)
    half = aiter.apply_rope(x, positions, 8, 500.0, None, order,
                            rope_proportion=0.5)
    kept = [2, 3, 6, 7] if order == "split" else [4, 5, 6, 7]
    np.testing.assert_array_equal(half[..., kept], x[..., kept])
    turned = [i for i in range(8) if i not in kept]
    np.testing.assert_allclose(
        half[..., turned], want[..., turned], atol=1e-5)
    of_three = aiter.apply_rope(
        x, jnp.stack([positions] * 3), 8, 500.0, dict(mrope_section=[1, 1, 2]),
        order)
    np.testing.assert_array_equal(of_three, got)

  @parameterized.parameters(
      (dict(original_max_position_embeddings=64), 8),
      (dict(scale_factor=4.0, original_max_position_embeddings=64), 4))
  def test_apply_rope_of_unnamed_scaling(self, scaling, factor):
    """tpu-inference's are all Llama 3's, with names and defaults of its own."""
    x, positions = self.x[:, 0], jnp.array([3, 0, 70, 1, 200])
    named = dict(rope_type="llama3", factor=factor, low_freq_factor=1.0,
                 high_freq_factor=4.0, original_max_position_embeddings=64)
    got, want = (aiter.apply_rope(x, positions, 8, 1e4, t)
                 for t in (scaling, named))
    np.testing.assert_array_equal(got, want)
    self.assertGreater(
        np.abs(got - aiter.apply_rope(x, positions, 8, 1e4)).max(), 0.1)


class TablesTest(parameterized.TestCase):
  """Angles, against the papers' formulas a number at a time."""

  TRAINED = "original_max_position_embeddings"

  def angles(self, **scaling):
    """(angles a position, amplitude) that the tables have."""
    rows = scaling.pop("rows", 64)
    cos, sin = aiter.rotary_embedding(16, rows, 1e4, rope_scaling=scaling)
    self.assertEqual(cos.shape, (rows, 8))
    cos, sin = np.asarray(cos, np.float64), np.asarray(sin, np.float64)
    size = np.hypot(cos, sin)
    np.testing.assert_allclose(size, size[0, 0], rtol=1e-6)
    angles = np.arctan2(sin[1], cos[1])
    np.testing.assert_allclose(
        size * np.cos(np.arange(rows)[:, None] * angles), cos, atol=1e-4)
    return angles, size[0, 0]

  def plain(self, base=1e4):
    return np.array([base ** (-2 * j / 16) for j in range(8)])

  def test_default(self):
    angles, size = self.angles(rope_type="default")
    np.testing.assert_allclose(angles, self.plain(), rtol=1e-5)
    self.assertAlmostEqual(size, 1, places=5)
    for dtype in (jnp.bfloat16, jnp.float32):
      cos, sin = aiter.rotary_embedding(16, 5, 1e4, dtype=dtype)
      exact = np.arange(5)[:, None] * self.plain()
      np.testing.assert_array_equal(cos, jnp.asarray(np.cos(exact), dtype))
      np.testing.assert_array_equal(sin, jnp.asarray(np.sin(exact), dtype))

  def test_linear(self):
    angles, _ = self.angles(type="linear", factor=4.0)
    np.testing.assert_allclose(angles, self.plain() / 4, rtol=1e-5)

  def test_dynamic(self):
    angles, _ = self.angles(
        rope_type="dynamic", factor=2.0, **{self.TRAINED: 64})
    np.testing.assert_allclose(angles, self.plain(), rtol=1e-5)
    angles, _ = self.angles(
        rope_type="dynamic", factor=2.0, **{self.TRAINED: 16})
    base = 1e4 * (2.0 * 64 / 16 - 1) ** (16 / 14)
    np.testing.assert_allclose(angles, self.plain(base), rtol=1e-5)

  @parameterized.parameters("yarn", "deepseek_yarn")
  def test_yarn(self, kind):
    scaling = {"rope_type": kind, "factor": 8.0, self.TRAINED: 4096}
    angles, size = self.angles(**scaling)
    # 32 turns and 1 turn over 4096 positions, in pairs.
    pair = lambda turns: 16 * math.log(4096 / (turns * 2 * math.pi)) / (
        2 * math.log(1e4))
    low, high = math.floor(pair(32)), math.ceil(pair(1))
    for j, angle in enumerate(angles):
      share = min(max((j - low) / (high - low), 0), 1)
      plain = 1e4 ** (-2 * j / 16)
      self.assertAlmostEqual(
          angle, plain * (1 - share) + plain / 8 * share, places=5)
    self.assertAlmostEqual(size, 0.1 * math.log(8) + 1, places=5)
    _, size = self.angles(**scaling, mscale=0.7, mscale_all_dim=1.0)
    self.assertAlmostEqual(size, (0.07 * math.log(8) + 1) / (
        0.1 * math.log(8) + 1), places=5)
    _, size = self.angles(**scaling, attention_factor=1.5)
    self.assertAlmostEqual(size, 1.5, places=5)
    _, size = self.angles(**scaling, attn_factor=0.5)
    self.assertAlmostEqual(size, 0.05 * math.log(8) + 0.5, places=5)
    angles, _ = self.angles(**scaling, extrapolation_factor=0)
    np.testing.assert_allclose(angles, self.plain() / 8, rtol=1e-5)

  def test_llama3(self):
    angles, size = self.angles(
        rope_type="llama3", factor=8.0, low_freq_factor=1.0,
        high_freq_factor=4.0, **{self.TRAINED: 512})
    self.assertAlmostEqual(size, 1, places=5)
    kinds = set()
    for j, angle in enumerate(angles):
      plain = 1e4 ** (-2 * j / 16)
      length = 2 * math.pi / plain
      if length < 512 / 4:
        kinds.add("kept")
      elif length > 512:
        kinds.add("divided")
        plain /= 8
      else:
        kinds.add("between")
        smooth = (512 / length - 1) / 3
        plain = (1 - smooth) * plain / 8 + smooth * plain
      self.assertAlmostEqual(angle, plain, places=5)
    self.assertLen(kinds, 3)

  @parameterized.parameters("longrope", "su")
  def test_longrope(self, kind):
    short, long = np.linspace(1, 2, 8), np.linspace(3, 40, 8)
    scaling = dict(rope_type=kind, short_factor=list(short),
                   long_factor=list(long))
    angles, size = self.angles(**scaling, **{self.TRAINED: 64})
    np.testing.assert_allclose(angles, self.plain() / short, rtol=1e-5)
    self.assertAlmostEqual(size, 1, places=5)
    angles, size = self.angles(**scaling, **{self.TRAINED: 16})
    np.testing.assert_allclose(angles, self.plain() / long, rtol=1e-5)
    self.assertAlmostEqual(
        size, math.sqrt(1 + math.log(4) / math.log(16)), places=5)
    _, size = self.angles(**scaling, long_mscale=1.25, **{self.TRAINED: 16})
    self.assertAlmostEqual(size, 1.25, places=5)

  def test_get_rope(self):
    for got, want in zip(
        aiter.get_rope(32, 32, 7, 1e4, partial_rotary_factor=0.5),
        aiter.rotary_embedding(16, 7)):
      np.testing.assert_array_equal(got, want)

  @parameterized.parameters(
      ("linear", 3.0, 21), ("dynamic", 3.0, 21), ("yarn", 2.5, 17),
      ("deepseek_yarn", 3.0, 21), ("llama3", 3.0, 7))
  def test_get_rope_of_models_without_a_length(self, kind, factor, rows):
    """The length of training is max_position, as AITER and vLLM have it."""
    scaling = dict(rope_type=kind, factor=factor, low_freq_factor=1.0,
                   high_freq_factor=4.0)
    for got, want in zip(
        aiter.get_rope(16, 16, 7, 1e4, rope_scaling=scaling),
        aiter.rotary_embedding(
            16, rows, rope_scaling=scaling | {self.TRAINED: 7})):
      self.assertLen(got, rows)
      np.testing.assert_array_equal(got, want)
    for factor, error in ((0.0, ValueError), ("two", TypeError)):
      with self.assertRaisesRegex(error, "get_rope: .*factor is"):
        aiter.get_rope(16, 16, 7, 1e4, rope_scaling=dict(
            type=kind, factor=factor, low_freq_factor=1, high_freq_factor=4))

  @parameterized.parameters(
      ("yarn", 7, 17), ("deepseek_yarn", 7, 17), ("yarn", 20, 20),
      ("linear", 7, 7), ("dynamic", 7, 7))
  def test_get_rope_of_yarn_reaches_its_length(self, kind, given, rows):
    """As AITER's: a position beyond the length of training has its own row."""
    scaling = {"rope_type": kind, "factor": 2.5, self.TRAINED: 7}
    for got, want in zip(
        aiter.get_rope(16, 16, given, 1e4, rope_scaling=scaling),
        aiter.rotary_embedding(16, rows, rope_scaling=scaling)):
      self.assertLen(got, rows)
      np.testing.assert_array_equal(got, want)

  @parameterized.named_parameters(
      ("dim", dict(rotary_dim=7), ["rotary_dim", "7", "even"]),
      ("rows", dict(max_position=0), ["max_position", "0"]),
      ("base", dict(base=1.0), ["base", "1.0"]),
      ("no kind", dict(rope_scaling=dict(factor=2.0)),
       ["rope_type", "None", "yarn"]),
      ("kind", dict(rope_scaling=dict(rope_type="ntk")),
       ["rope_type", "ntk", "yarn"]),
      ("missing", dict(rope_scaling=dict(type="yarn", factor=2.0)),
       ["original_max_position_embeddings", "missing"]),
      ("factors", dict(rope_scaling=dict(
          type="su", short_factor=[1.0], long_factor=[1.0],
          original_max_position_embeddings=64)), ["short_factor", "8"]))
  def test_errors(self, replaced, words):
    with self.assertRaises(ValueError) as caught:
      aiter.rotary_embedding(**(dict(rotary_dim=16, max_position=8) | replaced))
    for word in ["rotary_embedding", *words]:
      self.assertIn(word, str(caught.exception))


@machine.where(PLATFORM is not None)
class KernelTest(absltest.TestCase):

  def test_kernels_serve(self):
    """No call here quietly ran the reference."""
    serves = rope_op._rotate.unserved
    for dtype in machine.types(rope_op._DTYPES):
      for pairs, features in ((1, ("unaligned", "by_four")), (32, ()),
                              (64, ("gptj",)), (500, ("full", "sections")),
                              (20, ("by_four", "grid", "sections"))):
        self.assertIsNone(serves(PLATFORM, rope_op.Key(
            "rope_rotate", dtype, (pairs,), features)))
    x, table = jnp.ones((2, 4, 2, 16)), jnp.ones((4, 8))
    text = jax.jit(jax.grad(lambda x: jnp.sum(
        aiter.rope(x, table, table) ** 2))).lower(x).as_text()
    target = gpu_aiter.target(PLATFORM, "rope_rotate")
    self.assertEqual(text.count(f"@{target}"), 2)


class TransformTestCase(parameterized.TestCase):

  CASE = Case("fp32", b=4, s=8, h=4, hk=2, d=10, d_rot=8)

  def setUp(self):
    super().setUp()
    self.operands = self.CASE.cast(self.CASE.arrays())
    self.args = [self.operands[n] for n in ("x", "y", "cos", "sin")]
    self.positions = jnp.asarray(np.random.default_rng(0).integers(
        0, ROWS, (4, 8)))
    self.loss = lambda *args, **places: sum(
        jnp.sum(jnp.sin(t)) for t in self.CASE.call(*args, **places))

  def plain(self, x, y, cos, sin):
    rows = self.CASE.row_of({})
    return self.CASE.plain(x, y, cos, sin, rows)

  def assert_close(self, got, want):
    transforms.assert_close(self, got, want)


class TransformTest(TransformTestCase):

  def test_derivatives(self):
    """Backwards and forwards, once and twice, by each argument."""
    call = lambda *args: self.CASE.call(*args)
    plain_loss = lambda *args: sum(
        jnp.sum(jnp.sin(t)) for t in self.plain(*args))
    every = (0, 1, 2, 3)
    for which in (every, (0,), (1, 3)):
      self.assert_close(jax.jit(jax.grad(self.loss, which))(*self.args),
                        jax.jit(jax.grad(plain_loss, which))(*self.args))
    self.assert_close(
        jax.jit(lambda *args: jax.jvp(call, args, args))(*self.args),
        jax.jvp(self.plain, tuple(self.args), tuple(self.args)))
    for twice in (
        lambda f: jax.grad(lambda *args: sum(
            jnp.sum(jnp.cos(t)) for t in jax.grad(f, every)(*args)), every),
        lambda f: lambda *args: jax.jvp(
            jax.grad(f, every), args, tuple(map(jnp.sin, args))),
        lambda f: jax.grad(lambda *args: jax.jvp(
            f, args, tuple(map(jnp.cos, args)))[1], every)):
      self.assert_close(jax.jit(twice(self.loss))(*self.args),
                        jax.jit(twice(plain_loss))(*self.args))

  def test_nothing_is_kept_but_the_tables(self):
    """A gradient of x needs no x."""
    x, y, cos, sin = self.args
    _, vjp = jax.vjp(lambda x, y: self.CASE.call(x, y, cos, sin), x, y)
    for t in jax.tree.leaves(vjp):
      self.assertIn(t.shape, (cos.shape, ()))

  @parameterized.parameters(
      ((0, 0, None, None),), ((1, 2, None, None),), ((0, None, None, None),),
      ((0, 0, 0, 0),), ((None, None, 0, None),))
  def test_vmap(self, axes):
    many = lambda t, axis: t if axis is None else jnp.stack(
        [t * (1 + i) for i in range(3)], axis)
    args = [many(t, a) for t, a in zip(self.args, axes)]
    at = lambda t, a, i: t if a is None else jnp.take(t, i, a)
    gradients = jax.grad(self.loss, (0, 1, 2, 3))
    for fn in map(jax.jit, (self.CASE.call, gradients)):
      want = [fn(*(at(t, a, i) for t, a in zip(args, axes))) for i in range(3)]
      want = jax.tree.map(lambda *ts: jnp.stack(ts), *want)
      mapped = jax.jit(jax.vmap(fn, axes))
      self.assert_close(mapped(*args), want)

  def test_vmap_of_places(self):
    """A function of one sequence, mapped: one call, not a loop of them."""
    x, y, cos, sin = self.args
    one = lambda x, y, p: tuple(t[0] for t in aiter.rope_2c(
        x[None], y[None], cos, sin, positions=p[None]))
    mapped = jax.jit(jax.vmap(one))
    self.assert_close(
        mapped(x, y, self.positions),
        aiter.rope_2c(x, y, cos, sin, positions=self.positions))
    self.assertNotIn("while", mapped.lower(x, y, self.positions).as_text())
    both = jax.jit(jax.vmap(lambda p: self.CASE.call(
        *self.args, positions=p, offsets=p)))
    positions = jnp.stack([self.positions, self.positions // 2])
    want = [self.CASE.call(*self.args, positions=p, offsets=p)
            for p in positions]
    self.assert_close(both(positions), jax.tree.map(
        lambda *ts: jnp.stack(ts), *want))

  def test_vmap_of_own_rows_and_packed(self):
    case = dataclasses.replace(self.CASE, form="own")
    operands = case.cast(case.arrays())
    args = [operands[n] for n in ("x", "y", "cos", "sin")]
    twice = [jnp.stack([t, 2 * t]) for t in args]
    want = [case.call(*(t[i] for t in twice)) for i in range(2)]
    self.assert_close(jax.vmap(case.call)(*twice), jax.tree.map(
        lambda *ts: jnp.stack(ts), *want))
    ends = jnp.array([[0, 3, 8], [0, 5, 8]])
    packed = lambda cu: self.CASE.call(*self.args, cu_seqlens=cu)
    self.assert_close(jax.vmap(packed)(ends), jax.tree.map(
        lambda *ts: jnp.stack(ts), packed(ends[0]), packed(ends[1])))

  def test_checkpoint_and_scan(self):
    x, y, cos, sin = self.args
    transforms.check_scan(
        self, lambda h: h + self.CASE.call(h, y, cos, sin)[0], x)


@sharding.on_hosts
class ShardingTest(TransformTestCase):
  """The same numbers on several devices of the host."""

  def setUp(self):
    super().setUp()
    self.args = jax.device_put(self.args, CPUS[0])
    self.positions = jax.device_put(self.positions, CPUS[0])
    self.functions = {
        "gradients": jax.grad(self.loss, (0, 1)),
        "places": lambda *args: self.CASE.call(
            *args, positions=self.positions),
        "result": self.CASE.call}
    self.want = {name: jax.jit(fn)(*self.args)
                 for name, fn in self.functions.items()}

  def put(self, mesh, spec):
    return sharding.put(mesh, self.args, [
        spec if t.ndim > 2 else P() for t in self.args])

  @parameterized.parameters(
      (P("a", "b"),), (P("a"),), (P(None, ("a", "b")),), (P(None, "b", "a"),),
      (P("a", None, None, "b"),))
  def test_automatic(self, spec):
    """Batch, sequence and heads divide; channels are gathered."""
    args = self.put(sharding.mesh((2, 2), ("a", "b")), spec)
    for name, fn in self.functions.items():
      compiled = jax.jit(fn).lower(*args).compile()
      self.assert_close(compiled(*args), self.want[name])
      if len(spec) < 4:
        self.assertEmpty(sharding.collectives(compiled))

  @parameterized.parameters(False, True)
  def test_packed(self, explicit):
    """Borders of shards are anywhere in a sequence."""
    rng = np.random.default_rng(0)
    x = jnp.asarray(rng.standard_normal((24, 4, 16)), jnp.float32)
    cos, sin = aiter.rotary_embedding(16, 24)
    turn = jax.jit(lambda x, ends: aiter.rope(
        x, cos, sin, layout="thd", cu_seqlens=ends))
    ends = jnp.array([0, 5, 5, 14, 19, 24])
    mesh = sharding.mesh((4,), ("a",), explicit=explicit)
    args = sharding.put(mesh, (x, ends), (P("a"), P()))
    self.assertEmpty(sharding.collectives(turn.lower(*args).compile()))
    self.assert_close(turn(*args), turn(x, ends))

  @parameterized.parameters(False, True)
  def test_explicit_axes(self, set_mesh):
    with sharding.explicit_mesh(set_mesh) as mesh:
      args = self.put(mesh, P("a", "b"))
      for name in ("gradients", "result"):
        got = jax.jit(self.functions[name])(*args)
        self.assertEqual(jax.typeof(got[0]).sharding.spec,
                         P("a", "b", None, None))
        self.assert_close(got, self.want[name])

  @parameterized.parameters(False, True)
  def test_shard_map(self, check_vma):
    mesh = sharding.mesh((4,), ("a",))
    args = self.put(mesh, P())
    shards = functools.partial(
        jax.shard_map, mesh=mesh, in_specs=(P("a"), P("a"), P(), P()),
        check_vma=check_vma)
    self.assert_close(
        jax.jit(shards(self.CASE.call, out_specs=P("a")))(*args),
        self.want["result"])
    loss = shards(lambda *args: jax.lax.psum(self.loss(*args), "a"),
                  out_specs=P())
    self.assert_close(jax.jit(jax.grad(loss, (0, 1)))(*args),
                      self.want["gradients"])

  def test_shard_map_over_some_axes(self):
    mesh = sharding.mesh((2, 2), ("a", "b"))
    args = self.put(mesh, P("a", "b"))
    shards = jax.shard_map(
        self.CASE.call, mesh=mesh, axis_names={"a"},
        in_specs=(P("a"), P("a"), P(), P()), out_specs=P("a"))
    self.assert_close(jax.jit(shards)(*args), self.want["result"])


class ErrorTest(parameterized.TestCase):

  @parameterized.named_parameters(
      ("q_type", TypeError, dict(q=[1.0]), ["q", "list"]),
      ("q_dtype", TypeError, dict(q=jnp.ones((2, 4, 2, 8), jnp.int32)),
       ["q's dtype", "int32"]),
      ("q_rank", ValueError, dict(q=jnp.ones((4, 2, 8))),
       ["q", "[4, 2, 8]", "4 axes", "bshd"]),
      ("k_batch", ValueError, dict(k=jnp.ones((1, 4, 1, 8))),
       ["k", "float32[1, 4, 1, 8]", "float32[2, 4, 2, 8]"]),
      ("k_dtype", ValueError, dict(k=jnp.ones((2, 4, 1, 8), jnp.float16)),
       ["k", "float16"]),
      ("layout", ValueError, dict(layout="bhsd"), ["layout", "bhsd", "sbhd"]),
      ("style", ValueError, dict(rotate_style=0), ["rotate_style", "0",
                                                   "neox"]),
      ("cos_missing", ValueError, dict(cos=None), ["cos", "None", "freqs"]),
      ("cos_dtype", TypeError, dict(cos=jnp.ones((9, 4), jnp.int8)),
       ["cos's dtype", "int8"]),
      ("cos_shape", ValueError, dict(cos=jnp.ones((3, 9, 4))),
       ["cos", "[3, 9, 4]", "[2, 4, 'n']"]),
      ("cos_wide", ValueError, dict(cos=jnp.ones((9, 5)),
                                    sin=jnp.ones((9, 5))),
       ["cos", "[9, 5]", "at most 8", "10"]),
      ("cos_odd", ValueError, dict(cos=jnp.ones((9, 5)), sin=jnp.ones((9, 5)),
                                   reuse_freqs_front_part=False),
       ["cos", "in pairs", "5"]),
      ("cos_short", ValueError, dict(cos=jnp.ones((3, 4)),
                                     sin=jnp.ones((3, 4))),
       ["cos", "[3, 4]", "at least 4 rows"]),
      ("sin", ValueError, dict(sin=jnp.ones((9, 3))), ["sin", "[9, 3]",
                                                       "as cos"]),
      ("freqs", ValueError, dict(freqs=jnp.ones((9, 4))), ["freqs", "None"]),
      ("positions_type", TypeError, dict(positions=jnp.ones((2, 4))),
       ["positions's dtype", "float32", "integer"]),
      ("positions_shape", ValueError,
       dict(positions=jnp.ones((3, 4), jnp.int32)), ["positions", "[2, 4]"]),
      ("offsets", ValueError, dict(offsets=jnp.ones((2, 3), jnp.int32)),
       ["offsets", "[2, 4]"]),
      ("cu_seqlens", ValueError, dict(cu_seqlens=jnp.zeros(1, jnp.int32)),
       ["cu_seqlens", "[n + 1]"]),
      ("both", ValueError, dict(cu_seqlens=jnp.zeros(2, jnp.int32),
                                positions=jnp.zeros((2, 4), jnp.int32)),
       ["cu_seqlens", "positions"]),
      ("reuse", TypeError, dict(reuse_freqs_front_part=1),
       ["reuse_freqs_front_part", "1", "bool"]),
      ("nope", TypeError, dict(nope_first=None), ["nope_first", "bool"]))
  def test_rope_2c(self, error, replaced, words):
    args = dict(q=jnp.ones((2, 4, 2, 8)), k=jnp.ones((2, 4, 1, 8)),
                cos=jnp.ones((9, 4)), sin=jnp.ones((9, 4))) | replaced
    with self.assertRaises(error) as caught:
      aiter.rope_2c(**args)
    for word in ["rope_2c", *words]:
      self.assertIn(word, str(caught.exception))

  @parameterized.named_parameters(
      ("height", dict(height=1), ["x", "a sequence of 2"]),
      ("width", dict(width=0), ["width", "0"]),
      ("cos_h", dict(cos_h=jnp.ones((1, 2))), ["cos_h", "[1, 2]", "[2, n]"]),
      ("sin_w", dict(sin_w=jnp.ones((2, 1))), ["sin_w", "[2, 1]", "cos_w"]))
  def test_rope_2d(self, replaced, words):
    args = dict(x=jnp.ones((1, 4, 1, 8)), height=2, width=2, **{
        name: jnp.ones((2, 2)) for name in (
            "cos_h", "sin_h", "cos_w", "sin_w")}) | replaced
    with self.assertRaises(ValueError) as caught:
      aiter.rope_2d(**args)
    for word in ["rope_2d", *words]:
      self.assertIn(word, str(caught.exception))

  @parameterized.named_parameters(
      ("positions", dict(positions=jnp.ones((2, 1, 4), jnp.int32)),
       ["positions", "[3, 1, 4]"]),
      ("none", dict(positions=None), ["positions", "NoneType"]),
      ("sections", dict(sections=(1, 2)), ["sections", "[1, 2]", "is 4"]),
      ("sum", dict(sections=(1, 2, 3)), ["sections", "is 4"]))
  def test_rope_mrope(self, replaced, words):
    args = dict(q=jnp.ones((1, 4, 1, 8)), k=jnp.ones((1, 4, 1, 8)),
                cos=jnp.ones((5, 4)), sin=jnp.ones((5, 4)),
                positions=jnp.zeros((3, 1, 4), jnp.int32),
                sections=(1, 1, 2)) | replaced
    with self.assertRaises((TypeError, ValueError)) as caught:
      aiter.rope_mrope(**args)
    for word in ["rope_mrope", *words]:
      self.assertIn(word, str(caught.exception))


if __name__ == "__main__":
  absltest.main()
