# SPDX-License-Identifier: Apache-2.0
"""The family's kernel in Triton's interpreter, without a GPU."""

import numpy as np
from absl.testing import absltest, parameterized
from harness.triton_interpreter import Tensor, gpu_arithmetic
from indexer import cases
from indexer.cases import Case

# isort: split
from third_party.aiter.kernels.indexer import family, logits


class IndexerKernelTest(parameterized.TestCase):

  @parameterized.parameters(
      dict(), dict(rows=3, keys=20), dict(heads=3, dim=16),
      dict(page=16, lengths=(50, 13), tiles=True),
      dict(page=8, lengths=(41,), next_n=3, heads=4))
  def test_numbers(self, **options):
    c = Case(**{**dict(heads=8, dim=32, keys=50), **options})
    p = cases.Problem(c)
    # The interpreter has no float8: its numbers in float32.
    q = Tensor(p.q.astype(np.float32))
    sequences, next_n = (len(c.lengths), c.next_n) if c.page else (1, c.rows)
    out = Tensor(np.zeros((len(p.q), c.keys), np.float32))
    none, page, scale = Tensor(np.zeros(1, np.int32)), (0, 0), 0
    flags = 0
    if c.page:
      # Of four bytes a number, a page has no scales behind its keys.
      k = p.page_k.astype(np.float32)
      if c.tiles:
        k = k.reshape(len(k), c.page // 16, 16, c.dim // 16, 16).swapaxes(2, 3)
        flags = family.FLAGS["tiles"]
      k, s, table, starts, ends = (
          k, p.page_scale, p.table, np.zeros(1, np.int32), np.int32(c.lengths))
      page = (c.page * c.dim, c.page)
    else:
      k, s, table, starts, ends = (
          p.k.astype(np.float32), p.k_scale, none.array, p.starts, p.ends)
    with gpu_arithmetic(), np.errstate(all="ignore"):
      logits.indexer_logits[(-(-c.keys // 32), sequences * -(-next_n // 2))](
          q, Tensor(np.ascontiguousarray(k)), Tensor(s), Tensor(p.weights),
          Tensor(table), Tensor(starts), Tensor(ends), out, sequences, next_n,
          c.heads, c.dim, c.keys, 32, len(k), max(c.page, 1), table.shape[-1],
          *page, scale, flags, TILE_M=2, TILE_N=16, HEADS=8, DIM=32,
          PAGED=bool(c.page))
    want, size = p.exact()
    np.testing.assert_array_equal(out.array == -np.inf, want == -np.inf)
    seen = want > -np.inf
    self.assertTrue((np.abs(out.array[seen] - want[seen])
                     <= 2e-6 * size[seen]).all())


if __name__ == "__main__":
  absltest.main()
