# SPDX-License-Identifier: Apache-2.0
"""gemm.gemm_sum_tiles for Hopper (sm_90): begins before its parts are done."""

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from third_party.aiter.kernels.gemm import gemm


@triton.jit
def gemm_sum_tiles(
    workspace, a_scale, b_scale, bias, bias_f32, out_bf16, out_f32,
    splits, m, n, batch_stride_out,
    batch_stride_a_scale, batch_stride_b_scale, a_scale_step, b_scale_step,
    sum_tile_m, sum_tile_n, whole_tiles, divided_tiles, activation, flags,
    TILE_M: tl.constexpr, TILE_N: tl.constexpr, GROUP_M: tl.constexpr,
):
  """Waits for the kernel that makes the parts, while its blocks end."""
  gdc_wait()
  gdc_launch_dependents()
  gemm.gemm_sum_tiles(
      workspace, a_scale, b_scale, bias, bias_f32, out_bf16, out_f32,
      splits, m, n, batch_stride_out,
      batch_stride_a_scale, batch_stride_b_scale, a_scale_step, b_scale_step,
      sum_tile_m, sum_tile_n, whole_tiles, divided_tiles, activation, flags,
      TILE_M, TILE_N, GROUP_M)
