# SPDX-License-Identifier: Apache-2.0
"""What aot/embed.py writes of the table of tuned sizes."""

import pathlib
import sys

from absl.testing import absltest

ROOT = pathlib.Path(__file__).absolute().parents[2]
sys.path.append(str(ROOT))

# pylint: disable=g-import-not-at-top,wrong-import-position
from third_party.aiter.aot import embed

HEADER = "# of a machine\nop,arch,dtype,m,n,k,tile,splits,us\n"


def kernel(symbol, arch, dtype="bf16", tile_m=16):
  return {
      "symbol": symbol, "op": "gemm_nt", "family": "gemm", "grade": "fast",
      "arch": arch, "dtype": dtype, "dims": [], "tile_m": tile_m, "tile_n": 64,
      "tile_k": 128, "rate": 100, "threads": 128, "shared": 0,
      "grid_if": "", "args": [["a", "*"], ["k", "i32"]], "excludes": [],
      "maps": {}, "object": symbol.encode()}


class EmbedTest(absltest.TestCase):

  def embed(self, *lines):
    table = self.create_tempfile(
        "gemm_tuned.csv", HEADER + "\n".join(lines))
    kernels = [kernel("d", "sm_90"), kernel("c", "sm_90", tile_m=32),
               kernel("b", "sm_90", "any"), kernel("a", "sm_90")]
    inc = embed.embed(kernels, [table.full_path])[3]
    rows = inc[inc.index("kTunedChoices[] = {"):].splitlines()
    return [row.strip() for row in rows[1:rows.index("};")]], rows[-1]

  def test_a_row_means_every_kernel_of_its_tile(self):
    rows, count = self.embed("gemm_nt,sm_90,bf16,16,4096,512,16x64x128,3,9.5",
                             "gemm_nt,sm_90,any,1,2,4,16x64x128,1,0.1",
                             "gemm_nt,sm_90,bf16,7,8,9,32x64x128,2,0.1")
    # Kernels stand in the order of their symbols; the last row is no row.
    self.assertEqual(rows, [
        "{0, {16, 4096, 512}, {3}},", "{3, {16, 4096, 512}, {3}},",
        "{1, {1, 2, 4}, {1}},", "{2, {7, 8, 9}, {2}},", "{},"])
    self.assertEqual(count, "constexpr int kNumTunedChoices = 4;")

  def test_rows_of_other_architectures_are_left_out(self):
    rows, count = self.embed("gemm_nt,gfx942,bf16,16,4096,512,1x1x1,3,9.5")
    self.assertEqual(rows, ["{},"])
    self.assertEqual(count, "constexpr int kNumTunedChoices = 0;")

  def test_a_row_without_a_kernel_stops_the_build(self):
    with self.assertRaisesRegex(ValueError, "no kernel gemm_nt sm_90 bf16 64x"):
      self.embed("gemm_nt,sm_90,bf16,16,4096,512,64x64x128,3,9.5")
    with self.assertRaisesRegex(ValueError, "no kernel gemm_tn sm_90"):
      self.embed("gemm_tn,sm_90,bf16,16,4096,512,16x64x128,3,9.5")


if __name__ == "__main__":
  absltest.main()
