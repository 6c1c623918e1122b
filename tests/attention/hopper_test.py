# SPDX-License-Identifier: Apache-2.0
"""Every attention kernel for sm_90 that a row is made for runs on a GPU.

Calls come to a kernel by their sizes, dtype and features; a row that no case
here comes to fails.
"""

import itertools

from absl.testing import absltest, parameterized
from attention import numbers_test as mha_test

from jax._src.aiter.core import dispatch
from jaxlib import gpu_aiter

ARCH = "sm_90"
DIMS = ((32, 32), (64, 64), (80, 72), (96, 96), (128, 128), (160, 160),
        (192, 128), (184, 192), (256, 256))
# What a call has, and the features that choose its kernels.
CALLS = {
    "short": (dict(), ("short",)),
    "short_causal": (dict(causal=True), ("short", "window")),
    "long": (dict(sq=600), ()),
    "long_causal": (dict(sq=1600, causal=True), ("window",)),
    "soft_cap": (dict(cap=3.0), ("soft_cap",)),
    "alibi": (dict(alibi="h"), ("alibi",)),
    "bias": (dict(bias="1hqk"), ("bias", "dbias")),
    "bias_f32": (dict(bias="b1qk", bias_fp32=True),
                 ("bias", "bias_f32", "dbias")),
    "mask": (dict(mask="b1qk"), ("mask",)),
    "padding": (dict(mask="b11k", causal=True), ("mask", "window")),
    "dropout": (dict(dropout=0.3), ("dropout",)),
    "leading": (dict(window=(20, 0, 5)), ("sink_tokens", "window")),
    "any": (dict(cap=3.0, bias="b1q1", mask="1hqk", alibi="h", scale=-0.1),
            ("soft_cap", "bias", "dbias", "mask", "alibi", "unaligned",
             "non_positive_scale")),
    "any_dropout": (dict(dropout=0.3, bias="1hqk", window=(30, 3, 5)),
                    ("dropout", "bias", "dbias", "sink_tokens", "window")),
}


def _kernels(dtype, dims, features):
  module = gpu_aiter.load("cuda")
  shared = [f for f in features if f != "dbias"]
  return {
      *module.kernels("mha_fwd", ARCH, dtype, dims, shared),
      *module.kernels("mha_bwd", ARCH, dtype, dims, list(features))}


class HopperTest(mha_test.MhaTestCase):

  @parameterized.product(dims=DIMS, call=tuple(CALLS), dtype=("bf16", "fp16"))
  def test_call(self, dims, call, dtype):
    dqk, dv = dims
    self.check(mha_test.Case(
        **dict(dtype=dtype, b=2, sq=150, sk=264, hq=2, hk=1, dqk=dqk, dv=dv)
        | CALLS[call][0]))

  def test_no_row_is_left_out(self):
    launched = set()
    for dims, dtype, (_, features) in itertools.product(
        DIMS, ("bf16", "fp16"), CALLS.values()):
      launched |= _kernels(dtype, dims, features)
    rows = {
        kernel["symbol"] for kernel in gpu_aiter.load("cuda").table()
        if kernel["arch"] == ARCH and kernel["grade"] == "padded"}
    self.assertNotEmpty(rows)
    self.assertEmpty(rows - launched)


if __name__ == "__main__":
  if ARCH in dispatch.architectures("cuda"):
    absltest.main()
