# SPDX-License-Identifier: Apache-2.0
"""Every fast GEMM kernel for sm_90, but MXFP4's, runs on a GPU.

Each is called by its name: for one tile and a little of the next ones, for more
tiles than are computed at once, for parts of k, and for matrices of a batch.
"""

import functools

from absl.testing import absltest, parameterized
from gemm import calls

from jaxlib import gpu_aiter

ARCH = "sm_90"


class HopperTest(calls.KernelTestCase):

  @parameterized.named_parameters(*(
      (k["symbol"], k) for k in gpu_aiter.load("cuda").table()
      if k["arch"] == ARCH and k["op"].startswith("gemm_")
      and k["grade"] == "fast" and k["op"] != "gemm_mx"))
  def test_kernel(self, kernel):
    tile_m, tile_n, tile_k = (kernel["tile_" + t] for t in "mnk")
    run = functools.partial(
        self.run_kernel, kernel, self.types_of(kernel)[0])
    # Rows of 16 bytes more than lines of the cache, and of whole lines.
    rest = 16
    run(1, tile_m + rest, tile_n + rest, 9 * tile_k + rest)
    run(1, 16 * tile_m + rest, 20 * tile_n + rest, tile_k + rest,
        out_type="bfloat16")
    run(1, max(tile_m - rest, rest), tile_n, 16 * tile_k, out_type="bfloat16")
    run(2, rest, rest, tile_k)
    # Scratch is there for parts of whole tiles, where k is 512 at least.
    run(1, 2 * tile_m, 2 * tile_n, 1024 + rest, splits=3, out_type="bfloat16")


if __name__ == "__main__":
  absltest.main()
