# SPDX-License-Identifier: Apache-2.0
"""Every GEMM kernel for AMD GPUs runs on a simulated one, and runs right.

Each is called by its name.
"""

from absl.testing import absltest, parameterized
from gemm import calls
from harness import simulator


class GemmKernelsTest(calls.KernelTestCase):

  @parameterized.named_parameters(*(
      (k["symbol"], k) for k in simulator.kernels()
      if k["op"].startswith("gemm_") and k["op"] != "gemm_sum"))
  def test_kernels(self, kernel):
    tile_m, tile_n, tile_k = (kernel["tile_" + t] for t in "mnk")
    # More than a tile of each by as little as the kernel takes, and of k enough
    # that a pipeline comes back to each of its buffers. Scales by blocks may be
    # loaded for eight tiles at once.
    rest = (
        32 if kernel["op"] == "gemm_mx" else 16 if kernel["aligned"] else 1)
    tiles = 9 if kernel["op"] == "gemm_block" else 5
    types = self.types_of(kernel)
    with simulator.launched(self, [kernel["symbol"]]):
      for t in types:
        self.run_kernel(kernel, t, 1, tile_m + rest, tile_n + rest,
                        tiles * tile_k + rest)
      odd = "_unaligned" in kernel["symbol"] and not kernel["aligned"]
      self.run_kernel(kernel, types[0], 2, rest, rest, tile_k + odd)

  @parameterized.parameters(*simulator.groups("gemm_sum", "op"))
  def test_sums(self, _, symbols):
    """Products in parts, of integers, of floats and of scaled ones."""
    with simulator.launched(self, symbols):
      for op, dtype in ("gemm_nt", "bf16"), ("gemm_row", "i8"), (
          "gemm_mx", "e2m1"):
        kernel = next(k for k in simulator.kernels()
                      if (k["op"], k["dtype"]) == (op, dtype))
        self.run_kernel(kernel, (self.TYPES[dtype],) * 2, 2, 17, 48, 1056,
                        splits=3)


if __name__ == "__main__":
  absltest.main()
