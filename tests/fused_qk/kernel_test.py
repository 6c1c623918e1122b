# SPDX-License-Identifier: Apache-2.0
"""The family's kernels in Triton's interpreter, without a GPU."""

import dataclasses

import numpy as np
from absl.testing import absltest, parameterized
from fused_qk import cases
from fused_qk.cases import Case, HeadCase, RowCase
from harness.triton_interpreter import Tensor, gpu_arithmetic

# isort: split
from third_party.aiter.kernels.fused_qk import (
  family,
  heads,
  latent,
  rows,
  turned,
)

_NUMBERS = {"": 0, "int8": 0, "float8_e4m3fn": 1, "float8_e4m3fnuz": 2,
            "float8_e5m2": 4}
_SMALL = Case(lora=24, rope=8, heads=5)


class FusedKernelTest(parameterized.TestCase):

  def run_kernel(self, case: Case):
    p = cases.Problem(case)
    c, width = case, p.cache.shape[-1]
    rows = p.cache.reshape(-1, width).copy()
    kind = np.dtype(case.q_out) if case.q_out else p.q_nope.dtype
    out = np.full((c.tokens, c.heads, c.lora + c.rope), 7).astype(kind)
    raw = lambda t, of: Tensor(t.view(np.uint8) if of else t)
    cache, queries = raw(rows, c.cache), raw(out, c.q_out)
    one = np.ones(1, np.float32)
    scale = lambda t: Tensor(one if t is None else np.reshape(t, 1))
    on = dict(gptj=not c.neox, norm=c.norm, cache_bytes=bool(c.cache),
              q_bytes=bool(c.q_out), k_scaled=c.scaled and bool(c.cache),
              q_scaled=c.scaled and bool(c.q_out))
    flags = sum(family.FLAGS[n] for n, holds in on.items() if holds)
    weight = np.ones(c.lora, p.kv_c.dtype) if p.weight is None else p.weight
    with gpu_arithmetic(), np.errstate(all="ignore"):
      latent.fused_qk_latent[(c.tokens * (-(-c.heads // 4) + 1),)](
          Tensor(p.q_nope), Tensor(p.q_pe), Tensor(p.kv_c), Tensor(p.k_pe),
          Tensor(weight), Tensor(p.cos), Tensor(p.sin), Tensor(p.positions),
          Tensor(p.slots), scale(p.q_scale), scale(p.k_scale), queries, queries,
          cache, cache, c.heads, c.lora, c.rope, len(p.cos), len(rows), width,
          p.first(), _NUMBERS[c.cache], _NUMBERS[c.q_out], 1e-6, flags,
          TILE_M=4, HEAD=32, HALF=8, NATIVE=False)
    exact, stored, rotated = p.exact()
    got = queries.array.view(kind).reshape(out.shape)
    cases.check_rounded(self, got, exact, c.q_out, p.q_scale, str(c))
    there = (p.slots >= 0) & (p.slots < len(rows))
    got = cache.array.view(p.cache.dtype).reshape(rows.shape)
    for part, first in ((stored, 0), (rotated, p.first())):
      cases.check_rounded(
          self, got[p.slots[there], first:first + part.shape[1]], part[there],
          c.cache, p.k_scale, str(c))

  @parameterized.product(neox=[True, False], norm=[True, False],
                         cache=["", "int8"])
  def test_plain(self, neox, norm, cache):
    self.run_kernel(dataclasses.replace(
        _SMALL, neox=neox, norm=norm, cache=cache, scaled=bool(cache)))

  @parameterized.parameters(*cases.KINDS)
  def test_kinds(self, kind):
    self.run_kernel(dataclasses.replace(_SMALL, cache=kind, q_out=kind))

  @parameterized.parameters(
      dict(width=160), dict(lora=17, rope=6), dict(heads=1), dict(dtype="fp16"))
  def test_shapes(self, **options):
    self.run_kernel(dataclasses.replace(_SMALL, **options))


class HeadsKernelTest(parameterized.TestCase):
  """Without a cache, and with one of layout "NHD"."""

  def run_kernel(self, case: HeadCase):
    c, p = case, cases.Heads(case)
    half, rest, tile = 8, 16, 2
    pairs = p.cos.shape[1]
    # All are pairs of neighbours: a kernel of their own.
    near = not c.neox and c.dim == 2 * pairs
    like = lambda t: Tensor(np.full(t.shape, 7, t.dtype))
    q_out, k_out, v_out = map(like, (p.q, p.k, p.v))
    none = Tensor(np.ones(1, np.float32))
    kind = c.cache or p.q.dtype.name
    pools, sides = [like(p.q)] * 2, (0,) * 8
    slots = Tensor(np.zeros(1, np.int32))
    if c.layout:
      pools = [Tensor(t.copy().view(np.uint8) if c.cache else t.copy())
               for t in (p.k_cache, p.v_cache)]
      slots = Tensor(p.slots)
      sides = (0, c.page * c.hk * c.dim, c.hk * c.dim, 0, 1, c.dim,
               16 if c.cache else 8, 1)
    found = [Tensor(t.copy()) if c.layout else none for t in (
        getattr(p, "k_found", none), getattr(p, "v_found", none))]
    on = dict(gptj=not c.neox, norm=c.norm, gemma=c.gemma, joint=c.joint,
              sections=bool(c.sections), interleaved=c.interleaved,
              f32_tables=True, kv_out=True, cache_bytes=bool(c.cache),
              token=c.token)
    ends = [3 * m for m in c.sections[1:]] if c.interleaved else [
        sum(c.sections[:1]), sum(c.sections[:2])]
    tiles = sum(
        c.tokens * -(-h // tile) if c.joint else -(-c.tokens * h // tile)
        for h in (c.hq, c.hk, c.hk))
    weight = lambda t: none if t is None else Tensor(t)
    with gpu_arithmetic(), np.errstate(all="ignore"):
      heads.fused_qk_heads[(tiles,)](
          Tensor(p.q), Tensor(p.k), Tensor(p.v), weight(p.q_weight),
          weight(p.k_weight), Tensor(p.cos), Tensor(p.sin), none, none,
          Tensor(p.positions), slots, none, *found, q_out, q_out, k_out, v_out,
          *(pools[i // 2] for i in range(4)), *sides, *sides,
          *(0, c.hk * c.page, 1, c.page) * 2, c.tokens, c.hq, c.hk, c.hk,
          c.hq * c.dim, c.hk * c.dim, c.hk * c.dim, c.dim, pairs,
          c.dim - 2 * pairs if c.nope_first else 0, len(p.cos), pairs, *ends,
          p.pages * c.page if c.layout else 0, c.page, _NUMBERS[c.cache], 0,
          1e-6, sum(family.FLAGS[n] for n, holds in on.items() if holds),
          TILE_M=tile, HALF=half, REST=0 if near else rest, ALIGN=1,
          FLAGS=(1 << 16) - 1, SURE=family.FLAGS["gptj"] * near, NATIVE=False)
    q, k = p.exact()
    cases.check_rounded(self, q_out.array, q, "", None, str(c))
    cases.check_rounded(self, k_out.array, k, "", None, str(c))
    np.testing.assert_array_equal(v_out.array, p.v)
    if not c.layout:
      return
    there = (p.slots >= 0) & (p.slots < p.pages * c.page)
    k_cache, v_cache = (
        t.array.view(kind).reshape(-1, c.hk, c.dim)[p.slots[there]]
        for t in pools)
    for head in range(c.hk):
      scales = np.ones((2, len(k)), np.float32)
      if c.token:
        page, offset = p.slots // c.page, p.slots % c.page
        scales[:, there] = [t.array[page[there], head, offset[there]]
                            for t in found]
      for i, token in enumerate(np.flatnonzero(there)):
        for got, exact, scale in ((k_cache, k, scales[0]),
                                  (v_cache, p.v, scales[1])):
          cases.check_rounded(self, got[i, head], exact[token, head], c.cache,
                              scale[token], str(c))

  @parameterized.parameters(
      dict(), dict(neox=False), dict(norm=False), dict(gemma=True, joint=True),
      dict(neox=False, layout="NHD", cache="int8", token=True),
      dict(turned=6), dict(turned=10, nope_first=True, neox=False),
      dict(sections=(2, 3, 1), turned=12),
      dict(sections=(3, 3, 2), interleaved=True), dict(layout="NHD"),
      dict(layout="NHD", cache="int8", turned=8),
      dict(layout="NHD", cache="float8_e4m3fn", token=True, turned=8))
  def test_options(self, **options):
    self.run_kernel(HeadCase(dim=16, page=4, **options))


class RowsKernelTest(parameterized.TestCase):

  @parameterized.parameters(
      dict(k_cols=64, residual=True, gemma=True),
      dict(k_cols=64, cols=384, kind="float8_e4m3fn", group=128, whole=True),
      dict(op="gated", cols=128, heads=2, kind="int8", group=128, whole=True),
      dict(op="inverse", cols=256, heads=3, group=128, pairs=16,
           kind="float8_e4m3fn", whole=True),
      dict(op="gated", cols=64, heads=1, bias=True, gated_first=True,
           kind="int8", least=50.0),
      dict(op="gated", cols=32, heads=2, sigmoid=True),
      dict(kind="int8", given=True), dict(kind="int8", kept=True),
      dict(kind="mxfp4", group=32, mode="up"),
      dict(kind="float8_e4m3fn", group=64, cols=160, transposed=True),
      dict(op="gated", cols=32, heads=4, kind="float8_e4m3fnuz", group=128),
      dict(op="gated", cols=64, kind="int8"), dict(op="gated", cols=128),
      dict(op="gated", cols=256, heads=2),
      dict(op="inverse", cols=64, heads=4, parts=2, group=32, mode="up",
           kind="float8_e4m3fn"),
      dict(op="inverse", cols=32, heads=2, group=64, kind="int8", neox=True,
           transposed=True))
  def test_options(self, whole=False, **options):
    """whole: of a kernel for what this call has, and for runs of 128."""
    c = RowCase(tokens=3, **options)
    p = cases.Rows(c)
    flat = lambda t: Tensor(t.reshape(c.tokens, -1).copy())
    exact, total, k = p.exact()
    width, parts = exact.shape[1], c.parts
    groups = -(-width // c.group) if c.group else 1
    strides = (1, c.tokens) if c.transposed else (groups, 1)
    scale = Tensor(np.full(c.tokens * groups, 7,
                           np.uint8 if c.mode else np.float32))
    packed = 2 if c.kind == "mxfp4" else 1
    codes = Tensor(np.full((c.tokens, width // packed), 7, np.uint8))
    q_out, residual_out = (
        Tensor(np.full((c.tokens, width), 7, p.q.dtype)) for _ in range(2))
    k_out = Tensor(np.full(p.k.shape, 7, p.k.dtype))
    kinds = ("int8", "float8_e4m3fn", "float8_e4m3fnuz", "mxfp4")
    on = dict(gptj=not c.neox, norm=c.op != "inverse", gemma=c.gemma,
              joint=c.op == "qk", q_bytes=bool(c.kind), residual=c.residual,
              token=bool(c.kind) and not c.group and not c.given,
              q_scaled=c.given, gate=c.op == "gated", turned=c.op == "inverse",
              e8m0=bool(c.mode), q_out=c.kept or not c.kind, keys=c.k_cols > 0,
              rare=c.bias or c.sigmoid or c.gated_first)
    bits = lambda names: sum(family.FEATURES[name] for name in names)
    flags = bits(name for name, holds in on.items() if holds)
    last = dict(RUN=128 if whole else 32, NATIVE=False,
                MAY=flags if whole else bits(family.FEATURES),
                SURE=flags if whole else 0)
    kind = kinds.index(c.kind) if c.kind else 0
    with gpu_arithmetic(), np.errstate(all="ignore"):
      if c.op == "inverse":
        # Two heads a tile, or a row.
        runs = c.cols // 128
        tiles = runs * -(-c.heads // 2) if whole else parts
        turned.fused_qk_turned[(c.tokens, tiles)](
            flat(p.q), Tensor(p.cos), Tensor(p.sin), Tensor(p.positions),
            q_out, codes, scale, scale, c.tokens, parts, width // parts, c.cols,
            c.pairs, c.cols - 2 * c.pairs, len(p.cos), c.group, *strides, kind,
            flags, TILE_M=2 if whole else 16, **last)
      else:
        rows.fused_qk_rows[(c.tokens, parts)](
            flat(p.q), flat(p.residual), flat(p.gate), Tensor(p.weight),
            Tensor(p.bias), Tensor(p.k), Tensor(p.k_weight), Tensor(p.scale),
            q_out, codes, residual_out, scale, scale, k_out, parts,
            width // parts, c.k_cols, c.cols, c.group, *strides, kind, 1,
            int(c.bias), int(c.sigmoid), int(c.gated_first), 0, 1e-6, 1e-6,
            c.least, flags, HEAD=512, KEYS=64, **last)
    if c.kept or not c.kind:
      cases.check_rounded(self, q_out.array, exact, "", None, str(c))
    if c.residual:
      cases.check_rounded(self, residual_out.array, total, "", None, str(c))
    if c.k_cols:
      cases.check_rounded(self, k_out.array, k, "", None, str(c))
    if c.given:
      cases.check_rounded(self, codes.array.view(np.dtype(c.kind)), exact,
                          c.kind, p.scale[0], str(c))
    elif c.kind:
      found = scale.array.reshape((groups, -1) if c.transposed else
                                  (c.tokens, -1))
      own = codes.array if packed == 2 else codes.array.view(
          np.dtype(c.kind))
      cases.check_codes(self, own, found, exact, c)


if __name__ == "__main__":
  absltest.main()
