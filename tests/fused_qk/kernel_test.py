# SPDX-License-Identifier: Apache-2.0
"""The family's kernel in Triton's interpreter, without a GPU."""

import dataclasses

import numpy as np
from absl.testing import absltest, parameterized
from fused_qk import cases
from fused_qk.cases import Case
from harness.triton_interpreter import Tensor, gpu_arithmetic

# isort: split
from third_party.aiter.kernels.fused_qk import family, latent

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


if __name__ == "__main__":
  absltest.main()
