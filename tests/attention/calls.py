# SPDX-License-Identifier: Apache-2.0
"""Calls that between them come to every kernel of attention.

A kernel is chosen by sizes, dtype and features; a row of the table that none of
these calls comes to fails a test.
"""

from collections.abc import Iterable, Iterator

from harness import machine

from jaxlib import gpu_aiter

DTYPES = tuple(filter(machine.has, ("bf16", "fp16")))
DIMS = ((32, 32), (64, 64), (80, 72), (96, 96), (120, 112), (128, 128),
        (136, 144), (160, 160), (192, 128), (184, 192), (256, 256), (48, 40))
# Heads of an odd multiple of 8 columns.
ODD_DIMS = ((24, 24), (40, 48), (56, 56), (72, 64), (88, 88))
# Options of a call, and the features that choose its kernels.
CALLS = {
    "short": (dict(), ("short", "uneven")),
    "even": (dict(b=33), ("short",)),
    "short_causal": (dict(causal=True), ("short", "window", "uneven")),
    "long": (dict(sq=1100), ()),
    "long_causal": (dict(sq=1600, causal=True), ("window", "uneven")),
    "even_causal": (dict(sq=1600, sk=1700, causal=True), ("window",)),
    "odd": (dict(sq=600), ("odd",)),
    "odd_causal": (dict(sq=900, causal=True), ("odd", "window", "uneven")),
    "sink": (dict(sink="h"), ("sink", "dsink", "short")),
    "sink_causal": (dict(sink="h", causal=True),
                    ("sink", "dsink", "short", "window")),
    "long_sink": (dict(sq=1100, sink="h"), ("sink", "dsink")),
    "long_sink_causal": (dict(sq=1600, sink="h", causal=True),
                         ("sink", "dsink", "window")),
    "odd_sink": (dict(sq=600, sink="h"), ("odd", "sink", "dsink")),
    "odd_sink_causal": (dict(sq=900, sink="h", causal=True),
                        ("odd", "sink", "dsink", "window")),
    "soft_cap": (dict(cap=3.0), ("soft_cap", "short")),
    "long_soft_cap": (dict(sq=1100, cap=3.0), ("soft_cap",)),
    "even_soft_cap_causal": (dict(sq=1600, sk=1700, cap=3.0, causal=True),
                             ("soft_cap", "window")),
    "long_soft_cap_sink": (dict(sq=1600, cap=3.0, causal=True, sink="h"),
                           ("soft_cap", "sink", "dsink", "window")),
    "whole_soft_cap_sink": (dict(sq=1100, cap=3.0, sink="h"),
                            ("soft_cap", "sink", "dsink")),
    "alibi": (dict(alibi="h"), ("alibi", "short")),
    "alibi_causal": (dict(alibi="h", causal=True),
                     ("alibi", "short", "window")),
    "long_alibi": (dict(sq=1100, alibi="h"), ("alibi",)),
    "bias": (dict(bias="1hqk"), ("bias", "dbias", "short")),
    "bias_causal": (dict(bias="1hqk", causal=True),
                    ("bias", "dbias", "short", "window")),
    "long_bias": (dict(sq=1100, bias="1hqk"), ("bias", "dbias")),
    "long_bias_causal": (dict(sq=1600, causal=True, bias="1hqk"),
                         ("bias", "dbias", "window")),
    "bias_f32": (dict(bias="b1qk", bias_fp32=True),
                 ("bias", "bias_f32", "dbias")),
    "mask": (dict(mask="b1qk"), ("mask",)),
    "padding": (dict(mask="b11k", causal=True), ("mask", "window")),
    "padding_dropout": (dict(mask="b11k", dropout=0.3), ("mask", "dropout")),
    "dropout": (dict(dropout=0.3), ("dropout",)),
    "bias_dropout": (dict(dropout=0.3, bias="1hqk"),
                     ("bias", "dbias", "dropout", "short")),
    "long_bias_dropout": (dict(sq=1100, dropout=0.3, bias="1hqk"),
                          ("bias", "dbias", "dropout")),
    "mask_dropout": (dict(dropout=0.3, mask="b1qk"), ("mask", "dropout")),
    "bias_mask": (dict(bias="1hqk", mask="b11k"), ("bias", "dbias", "mask")),
    "bias_mask_dropout": (dict(bias="1hqk", mask="b11k", dropout=0.3),
                          ("bias", "dbias", "mask", "dropout")),
    "alibi_mask": (dict(alibi="h", mask="b1qk"), ("alibi", "mask")),
    "soft_cap_mask": (dict(cap=3.0, mask="b1qk"), ("soft_cap", "mask")),
    "two": (dict(cap=3.0, alibi="h"), ("soft_cap", "alibi")),
    "two_dropout": (dict(dropout=0.3, alibi="h"), ("alibi", "dropout")),
    "leading": (dict(window=(20, 0, 5)), ("sink_tokens", "window", "short")),
    "long_leading": (dict(sq=1600, sk=1600, window=(1100, 0, 5)),
                     ("sink_tokens", "window")),
    "any": (dict(cap=3.0, bias="b1q1", mask="1hqk", alibi="h", scale=-0.1,
                 sink="h"),
            ("soft_cap", "bias", "dbias", "mask", "alibi", "unaligned",
             "non_positive_scale", "sink", "dsink")),
    "any_dropout": (dict(dropout=0.3, bias="1hqk", window=(30, 3, 5)),
                    ("dropout", "bias", "dbias", "sink_tokens", "window")),
    "packed": (dict(packed=True, lengths=((150, 152), (0, 9), (37, 40)),
                    gaps=(3, 2)),
               ("packed", "cu_seqlens_q_padded", "cu_seqlens_k_padded",
                "short", "uneven")),
    "float32": (dict(precision="default"), ()),
    "float32_exact": (dict(causal=True), ("window", "exact")),
}


# Planes of one row for all, which have kernels of their own for CUDA, without
# dropout and of 64 and 128 columns for AMD's GPUs, too.
ONE_ROW = ("padding", "padding_dropout")


def sizes(call: str) -> Iterator[tuple[tuple[int, int], str]]:
  """The head dims and dtypes of a call."""
  f32 = call.startswith("float32")
  for dims in ODD_DIMS if call.startswith("odd") else DIMS:
    if not f32 or max(dims) <= 128:
      for dtype in ("fp32",) if f32 else DTYPES:
        yield dims, dtype


def kernels(
    platform: str, arch: str, dtype: str, dims: tuple[int, int], call: str
) -> set[str]:
  """The kernels of a call's forward and backward pass.

  Some architectures have none of float32.
  """
  module = gpu_aiter.load(platform)
  if dtype == "fp32" and not any(
      "_fp32_" in symbol for symbol in rows(platform, arch, ("padded",))):
    return set()
  _, features = CALLS[call]
  backward_only = ("dbias", "dsink")
  shared = [f for f in features if f not in backward_only]
  of_amd = call == "padding" and dims in ((64, 64), (128, 128))
  if of_amd or (platform == "cuda" and call in ONE_ROW):
    shared += ["bias", "bias_f32", "one_row"]
  return {
      *module.kernels("mha_fwd", arch, dtype, dims, shared),
      *module.kernels("mha_bwd", arch, dtype, dims, list(features))}


def rows(platform: str, arch: str, grades: Iterable[str]) -> set[str]:
  """Attention's kernels for an architecture."""
  return {
      kernel["symbol"] for kernel in gpu_aiter.load(platform).table()
      if kernel["op"].startswith(
          ("mha_fwd", "mha_bwd", "mha_gaps", "mha_f32"))
      and kernel["arch"] == arch and kernel["grade"] in grades}


def cover(
    platform: str, arch: str
) -> Iterator[tuple[str, tuple[int, int], str, list[str]]]:
  """A few calls that come to every kernel which any of these calls comes to.

  Yields:
    (call, head dims, dtype, kernels that no call before came to).
  """
  seen = set()
  for call in CALLS:
    for dims, dtype in sizes(call):
      new = kernels(platform, arch, dtype, dims, call) - seen
      if new:
        seen |= new
        yield call, dims, dtype, sorted(new)
