# SPDX-License-Identifier: Apache-2.0
"""What stands between projections and attention: against float64."""

import itertools

import jax.numpy as jnp
import numpy as np
from absl.testing import absltest, parameterized
from cache import oracle as cache_oracle
from fused_qk import cases
from fused_qk.cases import Case, HeadCase, RowCase
from harness import machine, sharding, transforms
from jax.sharding import PartitionSpec as P

import jax
from jax.experimental import aiter

_KINDS = ("", *cases.KINDS)


class FusedTestCase(parameterized.TestCase):

  def check(self, case: Case, seed: int = 0):
    p = cases.Problem(case, seed)
    fn, options, arrays = cases.call(p)
    q, kv = jax.jit(lambda arrays: fn(**arrays, **options))(arrays)
    exact, latent, rotated = p.exact()
    self.assertEqual(q.dtype, case.q_out or p.q_nope.dtype)
    cases.check_rounded(self, q, exact, case.q_out, p.q_scale, str(case))
    rows = np.asarray(kv).reshape(-1, kv.shape[-1])
    before = p.cache.reshape(rows.shape).copy()
    first, stored = p.first(), (p.slots >= 0) & (p.slots < len(rows))
    at = p.slots[stored]
    for part, begin in ((latent, 0), (rotated, first)):
      cols = slice(begin, begin + part.shape[1])
      cases.check_rounded(self, rows[at, cols], part[stored], case.cache,
                          p.k_scale, str(case))
      before[at, cols] = rows[at, cols]
    np.testing.assert_array_equal(rows.view(np.uint8), before.view(np.uint8))


class FusedTest(FusedTestCase):

  @sharding.on_hosts
  @parameterized.parameters(False, True)
  def test_mesh(self, explicit):
    """Heads partition; each device stores what one does, and not a part."""
    fn, options, arrays = cases.call(cases.Problem(Case(norm=True, heads=4)))
    want = jax.jit(lambda a: fn(**a, **options))(
        jax.device_put(arrays, machine.CPUS[0]))
    heads = dict.fromkeys(("q_nope", "q_pe"), P(None, "h"))
    mesh = sharding.mesh((2,), ("h",), explicit=explicit)
    placed = dict(zip(arrays, sharding.put(
        mesh, list(arrays.values()), [heads.get(n, P()) for n in arrays])))
    run = jax.jit(lambda a: fn(**a, **options)).lower(placed).compile()
    got = run(placed)
    self.assertEqual(sharding.collectives(run), set())
    transforms.assert_same(self, got, want)
    self.assertEqual(got[0].sharding.spec[1], "h")

  @parameterized.parameters(*machine.sample(itertools.product(
      _KINDS, (True, False), (True, False)), 10))
  def test_kinds(self, cache, neox, norm):
    self.check(Case(cache=cache, neox=neox, norm=norm, scaled=bool(cache)))

  @parameterized.parameters(*_KINDS[1:])
  def test_queries(self, q_out):
    self.check(Case(q_out=q_out, scaled=True))
    self.check(Case(q_out=q_out, cache="float8_e4m3fn"))

  @parameterized.parameters(
      dict(dtype="fp16"), dict(width=640), dict(lora=96, rope=16, width=256),
      dict(lora=20, rope=6), dict(lora=1, rope=2, heads=1), dict(heads=16),
      dict(tokens=1), dict(tokens=40, page=16, heads=3),
      dict(dtype="fp16", cache="int8", scaled=True, neox=False, norm=True))
  def test_shapes(self, **options):
    self.check(Case(**options))

  @machine.where(not machine.GPU)
  def test_float32(self):
    self.check(Case(dtype="fp32", norm=True))

  def test_then_attend(self):
    """What it makes is what mla_decode_fwd takes."""
    p = cases.Problem(Case(tokens=4, page=4))
    fn, options, arrays = cases.call(p)
    arrays |= dict(slot_mapping=jnp.arange(4), kv_cache=jnp.zeros(
        (1, 4, 1, 576), p.q_nope.dtype))
    q, kv = fn(**arrays, **options)
    out = aiter.mla_decode_fwd(
        q, kv, jnp.array([0, 4]), jnp.array([0, 1]), jnp.array([0]),
        jnp.array([4]), sm_scale=0.05)
    self.assertEqual(out.shape, (4, 5, 512))
    np.testing.assert_allclose(
        np.float32(out[0]), np.broadcast_to(np.float32(p.kv_c[0]), (5, 512)),
        rtol=1e-2, atol=1e-2)

  def test_in_place(self):
    """A donated cache is written where it is."""
    fn, options, arrays = cases.call(cases.Problem(Case(tokens=64)))
    kv = arrays.pop("kv_cache")
    step = jax.jit(lambda kv, arrays: fn(
        kv_cache=kv, **arrays, **options)[::-1], donate_argnums=0)
    memory = step.lower(kv, arrays).compile().memory_analysis()
    self.assertGreaterEqual(memory.alias_size_in_bytes, kv.nbytes)

  @machine.where(not machine.SIMULATED)
  def test_vmap(self):
    fn, options, arrays = cases.call(cases.Problem(Case(lora=64, rope=16)))
    two = lambda t: jnp.stack([t, t[::-1]])
    mapped = ("q_nope", "kv_c", "kv_cache")
    call = lambda q, c, kv: fn(**(arrays | dict(zip(mapped, (q, c, kv)))),
                               **options)
    args = [two(arrays[n]) for n in mapped]
    got = jax.jit(jax.vmap(call))(*args)
    for i in range(2):
      want = call(*(t[i] for t in args))
      for one, other in zip(got, want):
        np.testing.assert_array_equal(np.float32(one[i]), np.float32(other))


class HeadsTestCase(parameterized.TestCase):

  def check(self, case: HeadCase, seed: int = 0):
    p = cases.Heads(case, seed)
    fn, options, arrays = cases.heads_call(p)
    out = jax.jit(lambda arrays: fn(**arrays, **options))(arrays)
    exact_q, exact_k = p.exact()
    self.assertEqual(out[0].dtype, case.q_out or p.q.dtype)
    cases.check_rounded(self, out[0], exact_q, case.q_out, p.q_scale, str(case))
    if case.return_kv or not case.layout:
      k, *v = out[-2:] if case.layout or case.packed else out[1:]
      cases.check_rounded(self, k, exact_k, "", None, str(case))
      for t in v:
        np.testing.assert_array_equal(np.asarray(t), p.v)
    if case.layout:
      self.check_caches(p, exact_k, [np.asarray(t) for t in out[1:]])

  def check_caches(self, p, exact_k, out):
    """Of what is written the numbers; of all else every bit."""
    c, (k_cache, v_cache, *rest) = p.case, out
    found = rest[:2] if c.token else []
    want = [t.copy() for t in (p.k_cache, p.v_cache, p.k_found, p.v_found)]
    kind = c.cache if c.cache in cases.KINDS else ""
    for token, page, offset in cache_oracle.places(p.slots, p.pages, c.page):
      k = cache_oracle.k_view(c.layout, k_cache, page, offset)
      k_want = cache_oracle.k_view(c.layout, want[0], page, offset)
      v_want = cache_oracle.v_view(c.layout, *want[:2], page, offset)
      scales = [np.ones(c.hk, np.float32) if s is None else
                np.broadcast_to(s, c.hk) for s in (p.k_scale, p.v_scale)]
      if c.token:
        scales = [t[page, :, offset] for t in found]
        amax = np.abs(exact_k[token]).max(-1)
        np.testing.assert_allclose(
            scales[0], amax / cache_oracle.LARGEST[kind], rtol=1e-5)
        np.testing.assert_array_equal(
            scales[1], [cache_oracle.scale_of(x, kind) for x in p.v[token]])
        for t, scale in zip(want[2:], scales):
          t[page, :, offset] = scale
      for head in range(c.hk):
        cases.check_rounded(self, k[head].reshape(-1), exact_k[token, head],
                            kind, scales[0][head] if kind else None, str(c))
        v_want[head] = cache_oracle.encoded(
            p.v[token, head], v_cache,
            scales[1][head] if kind else None)
      k_want[...] = k
    for got, t in zip((k_cache, v_cache, *found), want):
      np.testing.assert_array_equal(
          got.view(np.uint8), t.view(np.uint8), str(c))


_LAYOUTS = ("NHD", "HND", "x", "asm")
# Options of which each is tried alone and with each other.
_OPTIONS = (
    dict(neox=False), dict(norm=False), dict(gemma=True), dict(joint=True),
    dict(packed=True), dict(turned=64), dict(sections=(8, 12, 12), turned=64),
    dict(nope_first=True, turned=32), dict(tables="one"), dict(tables="own"),
    dict(layout="NHD"), dict(layout="asm", cache="float8_e4m3fn"),
    dict(layout="x", cache="int8", scaled=True),
    dict(layout="HND", cache="float8_e4m3fnuz", token=True, return_kv=True),
    dict(q_out="float8_e4m3fn", scaled=True, layout="NHD"))


def _agree(one, other):
  """Whether a call may have both options."""
  both = one | other
  return not set(one) & set(other) and not (
      both.get("norm") is False and (both.get("gemma") or both.get("joint")))


def _together():
  """Calls of many options each, in which every two are that may be."""
  left = [p for p in itertools.combinations(_OPTIONS, 2) if _agree(*p)]
  while left:
    some = list(left[0])
    for option in _OPTIONS:
      if all(_agree(option, other) for other in some):
        some.append(option)
    left = [p for p in left if not all(option in some for option in p)]
    yield {name: value for option in some for name, value in option.items()}


class HeadsTest(HeadsTestCase):

  @parameterized.parameters(*machine.sample(_OPTIONS, 15))
  def test_options(self, **options):
    self.check(HeadCase(**options))

  @parameterized.parameters(*machine.sample(_together(), 12))
  def test_pairs(self, **options):
    self.check(HeadCase(tokens=4, hq=2, **options))

  @parameterized.parameters(*machine.sample(itertools.product(
      enumerate(_LAYOUTS), ("as they are", "given", "found")), 8))
  def test_caches(self, layout, scales):
    i, layout = layout
    cache = "" if scales == "as they are" else cases.KINDS[
        (i + (scales == "found")) % 4]
    self.check(HeadCase(layout=layout, cache=cache, token=scales == "found",
                        hk=1, hq=1, tokens=4))

  @parameterized.parameters(
      dict(dtype="fp16"), dict(dim=64), dict(dim=80, turned=20),
      dict(dim=6, turned=2), dict(dim=256, turned=64, neox=False),
      dict(hq=17, hk=9), dict(tokens=1, hq=1, hk=1), dict(tokens=33, hk=8),
      dict(sections=(24, 20, 20), interleaved=True),
      dict(sections=(0, 64, 0), neox=False), dict(dim=20, layout="NHD", page=3),
      dict(dim=72, turned=24, nope_first=True, layout="HND", cache="int8"),
      dict(dtype="fp16", layout="asm", cache="float8_e5m2", token=True))
  def test_shapes(self, **options):
    self.check(HeadCase(**options))

  @machine.where(not machine.GPU)
  def test_float32(self):
    self.check(HeadCase(dtype="fp32", layout="NHD", gemma=True))

  def test_in_place(self):
    """Donated caches are written where they are."""
    fn, options, arrays = cases.heads_call(cases.Heads(HeadCase(
        layout="NHD", cache="float8_e4m3fn", token=True, tokens=64, page=64)))
    pools = ("k_cache", "v_cache", "k_token_scales", "v_token_scales")
    held = [arrays.pop(n) for n in pools]
    step = jax.jit(lambda held, arrays: fn(
        **dict(zip(pools, held)), **arrays, **options)[1:], donate_argnums=0)
    memory = step.lower(held, arrays).compile().memory_analysis()
    self.assertGreaterEqual(memory.alias_size_in_bytes,
                            sum(t.nbytes for t in held))

  @machine.where(not machine.SIMULATED)
  @parameterized.parameters(dict(packed=True, neox=False),
                            dict(joint=True, turned=32, gemma=True))
  def test_gradients(self, **options):
    """The same both ways, and as a difference of float64 results."""
    p = cases.Heads(HeadCase(dtype="fp32", dim=64, **options))
    fn, options, arrays = cases.heads_call(p)
    given = {n: arrays[n] for n in ("q", "k", "q_weight", "k_weight")
             if arrays[n] is not None}
    rng = np.random.default_rng(1)
    random = lambda t: rng.standard_normal(t.shape).astype(np.float32)
    g = [random(p.q), random(p.k)]
    call = lambda given: fn(**{**arrays, **given}, **options)[:2]
    dots = {n: jnp.asarray(random(t)) for n, t in given.items()}
    out, tangents = jax.jit(lambda x, d: jax.jvp(call, (x,), (d,)))(given, dots)
    grads = jax.jit(lambda x: jax.vjp(call, x)[1](tuple(
        jnp.asarray(t, o.dtype) for t, o in zip(g, out))))(given)[0]
    forward = sum(np.vdot(np.float64(t), np.float64(o))
                  for t, o in zip(g, tangents))
    backward = sum(np.vdot(np.float64(grads[n]), np.float64(dots[n]))
                   for n in given)
    step, total = 1e-3, []
    for sign in (1, -1):
      moved = cases.Heads(p.case)
      for n, dot in dots.items():
        t = np.float64(getattr(p, n))
        if n == "q" and p.case.packed:
          parts = np.split(np.asarray(dot).reshape(p.case.tokens, -1,
                                                   p.case.dim), (
              p.case.hq, p.case.hq + p.case.hk), 1)
          moved.q = np.float64(p.q) + sign * step * parts[0]
          moved.k = np.float64(p.k) + sign * step * parts[1]
        else:
          setattr(moved, n, t + sign * step * np.float64(dot))
      total.append(sum(np.vdot(np.float64(t), o)
                       for t, o in zip(g, moved.exact())))
    want = (total[0] - total[1]) / (2 * step)
    np.testing.assert_allclose(forward, want, rtol=1e-3)
    np.testing.assert_allclose(backward, want, rtol=1e-3)

  @machine.where(not machine.SIMULATED)
  @parameterized.parameters(dict(), dict(sections=(8, 12, 12), turned=64),
                            dict(layout="NHD", cache="int8", token=True))
  def test_vmap(self, **options):
    fn, options, arrays = cases.heads_call(cases.Heads(HeadCase(**options)))
    two = lambda t: jnp.stack([t, t[::-1]])
    names = [n for n in ("q", "positions", "k_cache") if n in arrays]
    call = lambda *given: fn(**(arrays | dict(zip(names, given))), **options)
    args = [two(arrays[n]) for n in names]
    got = jax.jit(jax.vmap(call))(*args)
    for i in range(2):
      for one, other in zip(got, call(*(t[i] for t in args))):
        np.testing.assert_array_equal(np.float32(one[i]), np.float32(other))


class HeadsOnAMeshTest(parameterized.TestCase):
  """Heads partition with those of the caches; without caches tokens too."""

  @sharding.on_hosts
  @parameterized.parameters(
      (False, ""), (True, ""), (True, "asm"), (False, "asm", True),
      (True, "asm", True))
  def test_mesh(self, explicit, layout, packed=False):
    """A packed q is whole: each device takes its own keys out of it."""
    p = cases.Heads(HeadCase(
        layout=layout, cache="int8" if layout else "", token=bool(layout),
        packed=packed, tokens=8, hq=8, hk=4, dim=32, page=16))
    fn, options, arrays = cases.heads_call(p)
    by_head = P() if packed else P(None if layout else "t", "h")
    where = dict(q=by_head, k=by_head, v=by_head)
    where |= dict.fromkeys(("k_cache", "v_cache", "k_token_scales",
                            "v_token_scales"), P(None, "h"))
    if not layout:
      where["positions"] = P("t")
    want = jax.jit(lambda a: fn(**a, **options))(
        jax.device_put(arrays, machine.CPUS[0]))
    mesh = sharding.mesh((2, 2), ("t", "h"), explicit=explicit)
    with jax.set_mesh(mesh):
      placed = dict(zip(arrays, sharding.put(
          mesh, list(arrays.values()), [where.get(n, P()) for n in arrays])))
      run = jax.jit(lambda a: fn(**a, **options)).lower(placed).compile()
      got = run(placed)
    self.assertEqual(sharding.collectives(run), set())
    for i, (one, other) in enumerate(zip(got, want)):
      if i or not packed:
        self.assertIn("h", str(one.sharding.spec))
      np.testing.assert_array_equal(np.float32(one), np.float32(other))


class RowsTestCase(parameterized.TestCase):

  def check(self, case: RowCase, seed: int = 0):
    p = cases.Rows(case, seed)
    fn, args, options = cases.rows_call(p)
    arrays = {n: t for n, t in options.items() if isinstance(t, np.ndarray)}
    rest = {n: t for n, t in options.items() if n not in arrays}
    traced = [t for t in args if isinstance(t, np.ndarray)]
    out = jax.jit(lambda traced, arrays: fn(
        *traced, *args[len(traced):], **arrays, **rest))(traced, arrays)
    exact, total, k = p.exact()
    c, plain = case, lambda t, want: cases.check_rounded(
        self, t, want, "", None, str(case))
    if c.kind:
      cases.check_codes(self, np.asarray(out[0]).reshape(c.tokens, -1),
                        np.asarray(out[1]).reshape(
                            (-1, c.tokens) if c.transposed else
                            (c.tokens, -1)), exact, c)
    if c.op != "qk":
      if not c.kind:
        plain(out, exact)
      return
    if not c.kind:
      out = (None, None, *out)
      self.assertLen(out, 3 + bool(c.k_cols) + c.residual)
      plain(out[2], exact)
    elif c.kept:
      plain(out.q_unquantized, exact)
    if c.k_cols:
      plain(out[3], k)
    if c.residual:
      plain(out[-1], total)


class RowsTest(RowsTestCase):

  @parameterized.parameters(*machine.sample([
      dict(k_cols=64, residual=True), dict(gemma=True, cols=1536, k_cols=512),
      dict(kind="float8_e4m3fn", group=128, cols=1536, k_cols=512,
           residual=True, kept=True),
      dict(kind="float8_e4m3fnuz", group=64, transposed=True, residual=True),
      dict(kind="int8", group=32, dtype="fp16", gemma=True, k_cols=96),
      dict(kind="mxfp4", group=32, mode="up", kept=True, tokens=2),
      dict(kind="float8_e4m3fn", k_cols=32, residual=True, kept=True),
      dict(kind="int8", cols=2064, tokens=2), dict(cols=7168, tokens=2,
                                                   residual=True),
      dict(cols=100, kind="int8", group=32), dict(cols=9000, tokens=2)], 11))
  def test_qk(self, **options):
    self.check(RowCase(**options))

  @parameterized.parameters(*machine.sample([
      dict(cols=128), dict(cols=128, dtype="fp16", kind="float8_e4m3fn",
                           group=128),
      dict(cols=128, heads=32, kind="float8_e4m3fnuz", group=128,
           transposed=True), dict(cols=32, heads=8, kind="int8", group=64),
      dict(cols=128, heads=32, kind="float8_e4m3fn"), dict(cols=256, heads=2),
      dict(cols=24, kind="int8"), dict(cols=64, heads=1, tokens=40)], 8))
  def test_gated(self, **options):
    self.check(RowCase(op="gated", **options))

  @parameterized.parameters(*machine.sample([
      dict(mode="up"), dict(mode="up", parts=3, neox=True, transposed=True),
      dict(cols=512, heads=16, pairs=32, mode="up", parts=4, tokens=3),
      dict(cols=64, heads=4, group=64, dtype="fp16", kind="float8_e4m3fnuz"),
      dict(cols=96, heads=4, group=32, kind="int8", pairs=48)], 5))
  def test_inverse(self, **options):
    self.check(RowCase(**(dict(op="inverse", cols=128, kind="float8_e4m3fn",
                               group=128) | options)))

  @machine.where(not machine.SIMULATED)
  def test_flatten(self):
    p = cases.Rows(RowCase(op="gated", cols=128, kind="int8", group=64))
    self.assertEqual(aiter.fused_flatten_fp8_group_quant(
        p.q, 128, "int8", True)[1].shape, (3, 5))
    for one, other in zip(
        aiter.fused_flatten_fp8_group_quant(p.q, 64, "int8"),
        aiter.per_group_quant(jnp.asarray(p.q.reshape(5, -1)), group_size=64,
                              quant_dtype="int8")):
      np.testing.assert_array_equal(one, other)

  @machine.where(not machine.SIMULATED)
  def test_triton_name(self):
    """AITER's Triton function: the same results in another order."""
    c = RowCase(kind="float8_e4m3fn", group=32, k_cols=32, residual=True)
    p = cases.Rows(c)
    want = aiter.fused_qk_rmsnorm_group_quant(
        p.q, p.weight, 1e-6, p.k, p.k_weight, 1e-6, p.residual, 32, True,
        quant_dtype=c.kind, output_unquantized=True)
    got = aiter.fused_rms_fp8_group_quant(
        p.q, p.weight, 1e-6, p.k, p.k_weight, 1e-6, 32, c.kind, p.residual,
        True, True)
    for one, other in zip(jax.tree.leaves(got), want):
      np.testing.assert_array_equal(np.float32(one), np.float32(other))

  @parameterized.parameters(*machine.sample([
      dict(kind="float8_e4m3fn", kept=True, k_cols=32, residual=True),
      dict(kind="int8", cols=2064, tokens=2)], 2))
  def test_given_scale(self, **options):
    c = RowCase(**options)
    p = cases.Rows(c)
    call = lambda narrow, *args: aiter.fused_rms_fp8_per_tensor_static_quant(
        *args, c.kind, p.residual if c.residual else None, c.kept, narrow)
    args = (p.q, p.weight, 1e-6, p.scale, *((
        p.k, p.k_weight, 1e-6) if c.k_cols else (None,) * 3))
    codes, q, k, total = jax.jit(call, static_argnums=(0, 3, 7))(False, *args)
    exact = p.exact()
    cases.check_rounded(self, codes, exact[0], c.kind, p.scale[0], str(c))
    for got, want in zip((q, total, k), exact):
      if got is not None:
        cases.check_rounded(self, got, want, "", None, str(c))
    if c.kept:
      codes, q = call(True, *args)[:2]
      cases.check_rounded(self, codes, np.float64(q), c.kind, p.scale[0],
                          str(c))

  @parameterized.parameters(*machine.sample([
      dict(cols=128, tokens=12, group=128), dict(cols=128, tokens=3, bias=True),
      dict(cols=64, tokens=32, gated_first=True, least=100.0),
      dict(cols=256, tokens=8, sigmoid=True), dict(cols=96, group=32,
                                                   mode="up")], 3))
  def test_rms_gated(self, **options):
    c = RowCase(**dict(dict(op="gated", kind="float8_e4m3fn", heads=1,
                            least=448 / 1e5), **options))
    p = cases.Rows(c)
    flat = lambda t: t.reshape(c.tokens, c.cols)
    codes, scale = jax.jit(lambda x, z: aiter.fused_rms_gated_fp8_group_quant(
        x, p.weight, p.bias if c.bias else None, z, 1e-6,
        norm_before_gate=not c.gated_first, use_ue8m0=bool(c.mode),
        activation="sigmoid" if c.sigmoid else "silu", out_dtype=c.kind,
        fp8_min_scaling_factor=c.least / 448, group_size=c.group or None))(
            flat(p.q), flat(p.gate))
    self.assertEqual(scale.shape, (c.tokens, c.cols // c.group) if c.group
                     else (c.tokens,))
    if c.mode:
      scale = np.uint8(np.log2(scale) + 127)
    cases.check_codes(self, codes, scale, p.exact()[0], c)

  @parameterized.parameters(*machine.sample([
      dict(k_cols=32, residual=True), dict(cols=1536, tokens=2)], 1))
  def test_rms_mxfp4(self, **options):
    c = RowCase(kind="mxfp4", group=32, mode="even", **options)
    p = cases.Rows(c)
    call = lambda *orders: aiter.fused_rms_mxfp4_quant(
        p.q, p.weight, 1e-6, *((p.k, p.k_weight, 1e-6) if c.k_cols
                               else (None, None, 0.0)),
        p.residual if c.residual else None, *orders, True)
    (codes, scale), q, k, total = call(False, False)
    exact = p.exact()
    cases.check_codes(self, codes, scale, exact[0], c)
    for got, want in zip((q, total, k), exact):
      if got is not None:
        cases.check_rounded(self, got, want, "", None, str(c))
    same, padded = call(False, True)[0]
    np.testing.assert_array_equal(codes, same)
    np.testing.assert_array_equal(
        np.asarray(padded)[:c.tokens, :scale.shape[1]], scale)
    self.assertEqual(padded.shape, (256, -(-scale.shape[1] // 8) * 8))
    np.testing.assert_array_equal(
        call(True, False)[0][1], aiter.shuffle_scale(scale))

  @machine.where(not machine.SIMULATED)
  def test_flatten_mxfp4(self):
    x = cases.Rows(RowCase(op="gated", cols=64)).q
    for one, other in zip(aiter.fused_flatten_mxfp4_quant(x), aiter.mx_quant(
        jnp.asarray(x.reshape(len(x), -1)), round_mode="even")):
      np.testing.assert_array_equal(one, other)

  @machine.where(not machine.SIMULATED)
  @parameterized.parameters("qk", "gated")
  def test_gradients(self, op):
    """The same both ways, and as a difference of float64 results."""
    p = cases.Rows(RowCase(op=op, dtype="fp32", k_cols=32, residual=True,
                           cols=64))
    names = ("q", "weight", *(("k", "k_weight", "residual") if op == "qk"
                              else ("gate",)))
    p.case = p.case if op == "qk" else RowCase(op=op, dtype="fp32", cols=64)
    def call(t):
      if op == "gated":
        return (aiter.gated_rmsnorm(t["q"], t["gate"], t["weight"]),)
      return aiter.fused_qk_rmsnorm(
          t["q"], t["weight"], 1e-6, t["k"], t["k_weight"], None, t["residual"])
    def exact(at):
      moved = cases.Rows(p.case)
      for n, t in at.items():
        setattr(moved, n, t)
      q, total, k = moved.exact()
      return (q,) if op == "gated" else (q, k, total)
    rng = np.random.default_rng(1)
    given = {n: jnp.asarray(getattr(p, n)) for n in names}
    dots = {n: rng.standard_normal(t.shape) for n, t in given.items()}
    g = [rng.standard_normal(t.shape) for t in exact({})]
    narrow = lambda t: jax.tree.map(jnp.float32, t)
    out, tangents = jax.jit(lambda x, d: jax.jvp(call, (x,), (d,)))(
        given, narrow(dots))
    grads = jax.jit(lambda x: jax.vjp(call, x)[1](tuple(narrow(g))))(given)[0]
    self.assertLen(out, len(g))
    forward = sum(np.vdot(t, np.float64(o)) for t, o in zip(g, tangents))
    backward = sum(np.vdot(np.float64(grads[n]), dots[n]) for n in names)
    ends = [exact({n: np.float64(getattr(p, n)) + step * dots[n]
                   for n in names}) for step in (1e-3, -1e-3)]
    want = sum(np.vdot(t, one - two) for t, one, two in zip(g, *ends)) / 2e-3
    np.testing.assert_allclose(forward, want, rtol=1e-3)
    np.testing.assert_allclose(backward, want, rtol=1e-3)

  @machine.where(not machine.SIMULATED)
  @parameterized.parameters(False, True)
  def test_vmap(self, transposed):
    p = cases.Rows(RowCase(kind="int8", group=32, residual=True))
    two = lambda t: jnp.stack([t, t[::-1]])
    call = lambda q, r: aiter.fused_qk_rmsnorm_group_quant(
        q, p.weight, q_residual=r, group_size=32, transpose_scale=transposed,
        quant_dtype="int8")
    args = two(p.q), two(p.residual)
    got = jax.jit(jax.vmap(call))(*args)
    for i in range(2):
      for one, other in zip(jax.tree.leaves(got), jax.tree.leaves(
          call(*(t[i] for t in args)))):
        np.testing.assert_array_equal(np.float32(one[i]), np.float32(other))

  @sharding.on_hosts
  @parameterized.parameters(False, True)
  def test_mesh(self, explicit):
    """Tokens are divided."""
    p = cases.Rows(RowCase(tokens=8, kind="int8", group=32, k_cols=32))
    call = lambda q, k: aiter.fused_qk_rmsnorm_group_quant(
        q, p.weight, k=k, k_weight=p.k_weight, group_size=32,
        transpose_scale=True, quant_dtype="int8")
    want = jax.jit(call)(*jax.device_put((p.q, p.k), machine.CPUS[0]))
    mesh = sharding.mesh((4,), ("t",), explicit=explicit)
    with jax.set_mesh(mesh):
      placed = sharding.put(mesh, [p.q, p.k], [P("t"), P("t")])
      run = jax.jit(call).lower(*placed).compile()
      got = run(*placed)
    self.assertEqual(sharding.collectives(run), set())
    for one, other in zip(jax.tree.leaves(got), jax.tree.leaves(want)):
      self.assertIn("t", str(one.sharding.spec))
      np.testing.assert_array_equal(np.float32(one), np.float32(other))

  @machine.where(not machine.GPU)
  @parameterized.parameters(
      ("qk", TypeError, dict(q=3), "q is a int"),
      ("qk", ValueError, dict(q_weight=jnp.ones(5)), "q_weight"),
      ("qk", ValueError, dict(q_epsilon=-1), "q_epsilon is -1"),
      ("qk", ValueError, dict(q_residual=jnp.ones((5, 8))), "q_residual"),
      ("qk", ValueError, dict(k=jnp.ones((4, 8))), "k"),
      ("qk", TypeError, dict(k=jnp.ones((5, 8)), k_weight=jnp.ones(8)),
       "k's dtype"),
      ("qk", ValueError, dict(k_weight=jnp.ones(8)), "None without k"),
      ("qk", ValueError, dict(group_size=48), "group_size is 48"),
      ("qk", TypeError, dict(quant_dtype="float32"), "quant_dtype"),
      ("gated", ValueError, dict(z=jnp.ones((5, 3, 8))), "z is"),
      ("gated", ValueError, dict(weight=jnp.ones(8)), "weight"),
      ("inverse", ValueError, dict(num_groups=5), "num_groups is 5"),
      ("inverse", ValueError, dict(cos_cache=jnp.ones((2, 70))), "cos_cache"),
      ("inverse", ValueError, dict(positions=jnp.ones(4, jnp.int32)),
       "positions"),
      ("inverse", TypeError, dict(quant_dtype="int8", scale_dtype="uint8"),
       "scale_dtype"),
      ("inverse", ValueError, dict(scale_layout="n32k4"), "scale_layout"))
  def test_errors(self, op, kind, wrong, message):
    p = cases.Rows(RowCase(op=op, cols=128, kind="int8", group=32))
    fn, args, options = cases.rows_call(p)
    names = {"qk": ("q", "q_weight"), "gated": ("x", "z", "weight"),
             "inverse": ("o", "positions", "cos_cache", "sin_cache",
                         "num_groups")}[op]
    with self.assertRaisesRegex(kind, message):
      fn(**{**dict(zip(names, args)), **options, **wrong})

  @machine.where(not machine.GPU)
  def test_no_gradient(self):
    p = cases.Rows(RowCase(op="gated", cols=32))
    with self.assertRaisesRegex(TypeError, "has no gradient"):
      jax.grad(lambda x: aiter.gated_rmsnorm_fp8_per_token_quant(
          x, p.gate, p.weight)[1].sum())(jnp.asarray(p.q))


@machine.where(not machine.GPU)
class AliasesTest(parameterized.TestCase):
  """AITER's names and orders of arguments."""

  def same(self, got, want):
    self.assertEqual(len(got), len(want))
    for one, other in zip(got, want):
      np.testing.assert_array_equal(np.float32(one), np.float32(other))

  @parameterized.parameters(("x", ""), ("asm", "float8_e4m3fn"))
  def test_by_token(self, layout, cache):
    c = HeadCase(layout=layout, cache=cache, token=bool(cache), packed=True,
                 tables="one", return_kv=True)
    fn, options, a = cases.heads_call(cases.Heads(c))
    q, *pools, k, _ = fn(**a, **options)
    scales = [a[n] for n in ("k_token_scales", "v_token_scales") if n in a]
    got = aiter.fused_qk_norm_rope_cache_quant_shuffle(
        a["q"], c.hq, c.hk, c.hk, c.dim, 1e-6, a["q_weight"], a["k_weight"],
        a["cos"], True, a["positions"], a["k_cache"], a["v_cache"],
        a["slot_mapping"], "fp8" if cache else "auto", *scales)
    self.same(got, (q, k, *pools))

  @parameterized.parameters("x", "asm")
  def test_by_block(self, layout):
    c = HeadCase(layout=layout, cache="float8_e4m3fn", packed=True,
                 tables="one", tokens=8)
    p = cases.Heads(c)
    _, _, a = cases.heads_call(p)
    scales = [np.full((p.pages, c.hk), 0.01, np.float32) for _ in range(2)]
    out = aiter.fused_qk_norm_rope_cache_block_quant_shuffle(
        a["q"], c.hq, c.hk, c.hk, c.dim, 1e-6, a["q_weight"], a["k_weight"],
        a["cos"], True, a["positions"], a["k_cache"], a["v_cache"],
        a["slot_mapping"], None, "fp8", *map(jnp.asarray, scales))
    cases.check_rounded(self, out[1], p.exact()[1], "", None, str(c))
    asm = layout == "asm"
    turn = lambda t: t if asm else t.T
    want = aiter.reshape_and_cache_with_block_quant(
        out[1], p.v, a["k_cache"], a["v_cache"], *map(turn, scales),
        a["slot_mapping"], asm_layout=asm)
    self.same(out[2:], (*want[:2], *map(turn, want[2:])))

  @parameterized.parameters(("NHD", False), ("asm", True))
  def test_by_tensor(self, layout, sections):
    c = HeadCase(layout=layout, cache="int8", scaled=True, packed=True, hk=1,
                 tables="one", sections=(24, 20, 20) if sections else (),
                 interleaved=sections)
    fn, options, a = cases.heads_call(cases.Heads(c))
    first = (a["q"], a["q_weight"], a["k_weight"], a["cos"], a["positions"],
             c.tokens, c.hq, c.hk, c.hk, c.dim, True)
    rest = (1e-6, a["k_cache"], a["v_cache"], a["slot_mapping"], a["k_scale"],
            a["v_scale"], False, layout == "asm", c.page, 16, c.dim)
    if sections:
      got = aiter.fused_qk_norm_mrope_3d_cache_pts_quant_shuffle(
          *first, c.sections, True, *rest)
    else:
      got = aiter.fused_qk_norm_rope_cache_pts_quant_shuffle(*first, *rest)
    self.same(got, fn(**a, **options))

  def test_errors(self):
    p = cases.Heads(HeadCase(layout="x", packed=True, tables="one"))
    a = cases.heads_call(p)[2]
    call = lambda hv=2, dim=128, kind="auto": (
        aiter.fused_qk_norm_rope_cache_quant_shuffle(
            a["q"], 3, 2, hv, dim, 1e-6, a["q_weight"], a["k_weight"], a["cos"],
            True, a["positions"], a["k_cache"], a["v_cache"], a["slot_mapping"],
            kind))
    for wrong, message in ((dict(hv=1), "num_heads_v is 1"),
                           (dict(dim=64), "qkv is"),
                           (dict(kind="fp8"), "kv_cache_dtype")):
      with self.assertRaisesRegex(ValueError, message):
        call(**wrong)


@machine.where(not machine.GPU)
class StreamsTest(parameterized.TestCase):
  """Diffusion's norm and rotation, of one stream and of two."""

  def arrays(self, dtype="float32", b=2, tokens=(5, 7), heads=(4, 2), d=16):
    rng = np.random.default_rng(0)
    normal = lambda dtype, *shape: jnp.asarray(
        rng.standard_normal(shape), jnp.dtype(dtype))
    streams = [(*(normal(dtype, b, t, h, d) for h in heads),
                *(normal(dtype, d) for _ in heads), normal("float32", t, d))
               for t in tokens]
    return streams, (b, *tokens, *heads, d)

  def exact(self, x, weight, cos_sin, interleaved):
    x, weight, table = (np.asarray(t, np.float64) for t in (x, weight, cos_sin))
    x = x / np.sqrt(np.mean(x * x, -1, keepdims=True) + 1e-6) * weight
    cos, sin = np.split(table[:, None], 2, -1)
    pairs = x.reshape(*x.shape[:-1], *((-1, 2) if interleaved else (2, -1)))
    one, two = np.moveaxis(pairs, -1 if interleaved else -2, 0)
    turned = one * cos - two * sin, two * cos + one * sin
    return np.stack(turned, -1 if interleaved else -2).reshape(x.shape)

  @parameterized.product(interleaved=(False, True),
                         dtype=("float32", "bfloat16"))
  def test_streams(self, interleaved, dtype):
    """Results, and the same in float8 by a scale of a batch's head."""
    (first, second), sizes = self.arrays(dtype)
    b, t0, t1, *rest = sizes
    given = *first[:2], *second[:2], *first[2:4], *second[2:4], first[4], (
        second[4])
    both = aiter.fused_qk_norm_rope_2way(*given, *sizes, interleaved, 1e-6)
    one = aiter.fused_qk_norm_rope_1way(
        *first, b, t0, *rest, interleaved, 1e-6)
    q8, k8, *scales, q, k = aiter.fused_qk_norm_rope_2way_fp8_perhead_quant(
        *given, *sizes, interleaved, 1e-6, quant_dtype=jnp.float8_e4m3fn)
    same = aiter.fused_qk_norm_rope_1way_fp8_perhead_quant(
        *first, b, t0, *rest, interleaved, 1e-6)
    transforms.assert_same(self, (q, k), both)
    transforms.assert_same(self, same[4:], one)
    self.assertEqual(same[0].dtype, aiter.float8_dtype())
    error = 2e-6 if dtype == "float32" else 2.0**-8
    for i, (got, alone, in8, scale) in enumerate(zip(
        both, one, (q8, k8), scales)):
      want = np.concatenate([
          self.exact(stream[i], stream[2 + i], stream[4], interleaved)
          for stream in (first, second)], 1)
      wide = np.asarray(got, np.float64)
      np.testing.assert_allclose(wide, want, rtol=error, atol=4 * error)
      np.testing.assert_array_equal(alone, got[:, :t0])
      # Rounded is the result, by one quotient of each head.
      largest = np.abs(np.asarray(got, np.float32)).max((1, 3))
      np.testing.assert_array_equal(scale, largest / np.float32(448))
      by = np.asarray(scale, np.float64)[:, None, :, None]
      np.testing.assert_allclose(
          np.asarray(in8, np.float64) * by, wide, rtol=2.0**-4,
          atol=by.max() * 2.0**-9)

  def test_values(self):
    (first, second), _ = self.arrays()
    v0, v1 = first[1], second[1]
    both, scale = aiter.v_2way_per_head_fp8_quant(v0, v1)
    transforms.assert_same(self, (both, scale), aiter.v_1way_per_head_fp8_quant(
        jnp.concatenate([v0, v1], 1)))
    self.assertEqual((both.shape, scale.shape), ((2, 12, 2, 16), (2, 2)))

  @parameterized.parameters(
      (ValueError, dict(num_tokens=6), "q is float32.* num_tokens"),
      (ValueError, dict(num_heads_k=4), "k is float32.* num_heads_k"),
      (TypeError, dict(head_size=1.5), "head_size is 1.5"),
      (ValueError, dict(cos_sin=jnp.zeros((4, 16))), "cos_sin is"),
      (TypeError, dict(w_k=None), "w_k is a NoneType"),
      (ValueError, dict(w_q=jnp.zeros(8)), "w_q is"),
      (TypeError, dict(is_interleaved=2), "is_interleaved is 2"))
  def test_errors(self, kind, wrong, message):
    (first, _), (b, t, _, *rest) = self.arrays()
    given = dict(zip(
        ("q", "k", "w_q", "w_k", "cos_sin", "batch_size", "num_tokens",
         "num_heads_q", "num_heads_k", "head_size", "is_interleaved", "eps"),
        (*first, b, t, *rest, True, 1e-6)))
    with self.assertRaisesRegex(kind, f"^fused_qk_norm_rope_1way: {message}"):
      aiter.fused_qk_norm_rope_1way(**{**given, **wrong})


class HeadsErrorsTest(parameterized.TestCase):

  @parameterized.parameters(
      (TypeError, dict(q=3), "q is a int"),
      (TypeError, dict(k=None), "k is a NoneType"),
      (TypeError, dict(v=jnp.ones((5, 2, 128))), "v's dtype"),
      (ValueError, dict(k=jnp.ones((5, 2, 64), jnp.bfloat16)), "k is"),
      (ValueError, dict(cos=jnp.ones((20, 65))), "at most 128"),
      (ValueError, dict(sin=jnp.ones((19, 64))), "sin"),
      (ValueError, dict(q_weight=None), "one of q_weight"),
      (ValueError, dict(k_weight=jnp.ones(64)), "k_weight"),
      (ValueError, dict(joint_norm=True), "q_weight"),
      (ValueError, dict(mrope_section=(1, 2, 3)), "sum is 64"),
      (ValueError, dict(mrope_interleaved=True), "without mrope_section"),
      (ValueError, dict(positions=jnp.ones(6, jnp.int32)), "positions"),
      (TypeError, dict(slot_mapping=jnp.ones(5)), "slot_mapping's dtype"),
      (ValueError, dict(layout="mla"), "layout"),
      (ValueError, dict(v_cache=jnp.ones((2, 16, 3, 128), jnp.bfloat16)),
       "v_cache"),
      (ValueError, dict(k_scale=2.0), "k_scale"),
      (ValueError, dict(k_token_scales=jnp.ones((2, 2, 16))), "one of k_token"),
      (TypeError, dict(q_out_dtype="float32"), "q_out_dtype"),
      (ValueError, dict(num_heads=(3, 2)), "q is"),
      (ValueError, dict(eps=-1.0), "eps is -1"))
  def test_errors(self, kind, wrong, message):
    fn, options, arrays = cases.heads_call(cases.Heads(HeadCase(layout="NHD")))
    with self.assertRaisesRegex(kind, message):
      fn(**{**arrays, **options, **wrong})

  def test_no_gradient(self):
    fn, options, arrays = cases.heads_call(cases.Heads(HeadCase(layout="NHD")))
    with self.assertRaisesRegex(TypeError, "has no gradient"):
      jax.grad(lambda q: fn(**{**arrays, "q": q}, **options)[0].astype(
          jnp.float32).sum())(arrays["q"])


@machine.where(not machine.GPU)
class ErrorsTest(parameterized.TestCase):

  @parameterized.parameters(
      (TypeError, dict(q_nope=3), "q_nope is a int"),
      (ValueError, dict(q_pe=jnp.ones((7, 4, 64), jnp.bfloat16)), "q_pe"),
      (ValueError, dict(q_pe=jnp.ones((7, 5, 63), jnp.bfloat16)), "even"),
      (TypeError, dict(kv_c=jnp.ones((7, 512), jnp.float16)), "kv_c's dtype"),
      (ValueError, dict(k_pe=jnp.ones((6, 64), jnp.bfloat16)), "k_pe"),
      (ValueError, dict(cos=jnp.ones((20, 64))), "cos"),
      (ValueError, dict(sin=jnp.ones((19, 32))), "sin"),
      (ValueError, dict(kv_cache=jnp.ones((3, 4, 570), jnp.bfloat16)), "576"),
      (TypeError, dict(kv_cache=jnp.ones((3, 4, 576), jnp.float16)),
       "kv_cache's dtype"),
      (ValueError, dict(positions=jnp.ones(6, jnp.int32)), "positions"),
      (TypeError, dict(slot_mapping=jnp.ones(7)), "slot_mapping's dtype"),
      (ValueError, dict(kv_norm_weight=jnp.ones(64)), "kv_norm_weight"),
      (TypeError, dict(q_out_dtype="float32"), "q_out_dtype"),
      (ValueError, dict(eps=-1.0), "eps is -1"),
      (TypeError, dict(is_neox=2), "is_neox"))
  def test_errors(self, kind, wrong, message):
    fn, options, arrays = cases.call(cases.Problem(Case()))
    with self.assertRaisesRegex(kind, message):
      fn(**{**arrays, **options, **wrong})


if __name__ == "__main__":
  absltest.main()
