# SPDX-License-Identifier: Apache-2.0
"""Runs AITER's assembly kernels on the simulated GPU and checks their results.

A test of the simulator by code that nobody here wrote: the code objects of a
checkout of AITER, which is the user's own, are launched with small problems
and compared with float64. One row an object, then a count for each family.

  python3 build/build.py sim -- python tests/amdgpu_sim/run_aiter.py CHECKOUT
"""

import argparse
import collections
import concurrent.futures
import contextlib
import csv
import dataclasses
import math
import multiprocessing
import os
import pathlib
import re
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import ml_dtypes
import numpy as np

BF16 = np.dtype(ml_dtypes.bfloat16)
F16 = np.dtype(np.float16)
F32 = np.dtype(np.float32)
LOG2E = 1.4426950408889634


class Output:
  """Device memory that a kernel writes: of one value, or unwritten."""

  def __init__(self, shape: Any, dtype: Any, full: float | None = None):
    self.value = np.full(shape, full, dtype) if full else np.zeros(shape, dtype)
    self.full = full


@dataclasses.dataclass
class Launch:
  """One kernel. An argument takes 16 bytes, whatever it is: an array or an
  Output its address, None a null pointer, a Python float 4 bytes, an integer 4
  too. `packed` ones follow each other as a C struct has them."""

  path: str  # Of the code object, from the architecture's folder.
  kernel: str
  arguments: Sequence[Any]
  grid: Sequence[int]
  block: int = 256


@dataclasses.dataclass
class Case:
  """Launches that share device memory, one after another.

  Attributes:
    errors: what they wrote less what is right, by the largest right value, each
      with the most that rounding explains.
  """

  family: str
  name: str
  launches: Sequence[Launch]
  errors: Callable[[], Sequence[tuple[float, float]]]


def error(actual: np.ndarray, expected: np.ndarray) -> float:
  difference = np.abs(actual.astype(np.float64) - expected)
  worst = float(np.max(difference)) / float(np.max(np.abs(expected)))
  return float("inf") if np.isnan(worst) else worst


# Of a result that is rounded once to that type, with some for sums in float32
# and, of attention, for probabilities in the type of the values.
TOLERANCE = {BF16: 2**-7, F16: 2**-10, F32: 1e-5}


def ceil_div(a: int, b: int) -> int:
  return -(-a // b)


def rows(folder: pathlib.Path) -> Iterator[tuple[str, dict[str, Any]]]:
  """The rows of a folder's tables, integers as such, each with its table."""
  for table in sorted(folder.glob("*.csv")):
    with table.open() as stream:
      for row in csv.DictReader(stream):
        yield table.stem, {
            key: int(value) if re.fullmatch(r"-?\d+", value) else value
            for key, value in row.items()
        }


def shuffle(weights: np.ndarray) -> np.ndarray:
  """Rows in blocks of 16, in each of them 16 bytes of every row together, two
  or four such groups (32 or 64 bytes) a block."""
  n, k = weights.shape
  group = 16 // weights.itemsize
  block = 2 * 16
  split = weights.reshape(n // 16, 16, k // block, block // group, group)
  return np.ascontiguousarray(split.transpose(0, 2, 3, 1, 4))


def fp8(arch: str) -> np.dtype:
  return np.dtype(ml_dtypes.float8_e4m3fn if arch == "gfx950"
                  else ml_dtypes.float8_e4m3fnuz)


# Arguments by kernel. `calibrate.py` launches with them, too.


def bf16_arguments(d, a, b, bias, semaphore, sizes, split, out):
  m, n, k = sizes
  width = n * out.itemsize
  return [d, None, a, b, 1.0, 0.0, width, 0, width, 0, 2 * k, 0, 2 * k, 0, m, n,
          k, split, int(out == BF16), bias, int(bias is not None), semaphore]


def i8_arguments(c, a, b, sa, sb, bias, sizes, split):
  m, n, k = sizes
  return [c, a, b, sa, sb, bias, m, n, k, k, k, 2 * n, split]


def fp8_arguments(c, a, b, sa, sb, bias, sizes, split):
  m, n, k = sizes
  return [*i8_arguments(c, a, b, sa, sb, bias, sizes, split), m, n // 128,
          k // 128]


def forward_arguments(o, q, k, v, lse, scale, lengths, heads, sizes, tile,
                      strides, opt, lse_head, starts=(None, None),
                      descale=(None,) * 3, descale_strides=(0,) * 6):
  """`strides`: bytes of a row, a head and a sequence of q, k, v and o."""
  q_strides, k_strides, v_strides, o_strides = strides
  q_row, q_head, q_batch = q_strides
  return [o, q, k, v, lse, scale, lengths[0], q_row, tile * q_row, q_head,
          q_batch, heads[0] // heads[1], *k_strides, opt, 1, lengths[1], *sizes,
          heads[0], *v_strides, *o_strides, *starts, lse_head, *starts,
          *descale, *descale_strides]


# Families: a folder of the checkout, and the cases of a row of its table.


def gemm_bf16(arch, _, row, random, __) -> Iterator[Case]:
  """D[m, n] = A[m, k] B[n, k]^T + bias."""
  del arch
  m, n = row["tileM"] + 7, 2 * row["tileN"]
  k, split = 256, 2 if row["splitK"] else 1
  for out in [BF16] if row["tileN"] == 256 else [BF16, F32]:
    a = random.standard_normal((m, k)).astype(BF16)
    b = random.standard_normal((n, k)).astype(BF16)
    bias = random.standard_normal(n).astype(BF16) if row["bias"] else None
    d = Output((m, n), out)
    semaphore = Output(1024, np.uint32, 0) if split > 1 else None
    arguments = bf16_arguments(
        d, a, shuffle(b) if row["bPreshuffle"] else b, bias, semaphore,
        (m, n, k), split, out)
    def errors(a=a, b=b, bias=bias, d=d, out=out):
      expected = a.astype(np.float64) @ b.astype(np.float64).T
      if bias is not None:
        expected += bias.astype(np.float64)
      return [(error(d.value, expected), TOLERANCE[out])]
    yield Case("bf16 gemm", out.name, [Launch(
        f"bf16gemm/{row['co_name']}", row["knl_name"], arguments,
        (n // row["tileN"], ceil_div(m, row["tileM"]), split),
    )], errors)


def gemm_i8(arch, _, row, random, __) -> Iterator[Case]:
  """C[m, n] = sa[m] sb[n] A[m, k] B[n, k]^T + bias[n]."""
  del arch
  m, n, k = row["tile_m"] + 7, 2 * row["tile_n"], 512
  for split in [1, 2] if row["splitK"] else [1]:
    a = random.integers(-127, 128, (m, k)).astype(np.int8)
    b = random.integers(-127, 128, (n, k)).astype(np.int8)
    sa = (random.random(m) / 127).astype(F32)
    sb = (random.random(n) / 127).astype(F32)
    bias = random.standard_normal(n).astype(F32)
    c = Output((m, n), BF16, 0 if split > 1 else None)
    arguments = i8_arguments(c, a, shuffle(b), sa, sb, bias, (m, n, k), split)
    def errors(a=a, b=b, sa=sa, sb=sb, bias=bias, c=c):
      product = a.astype(np.float64) @ b.astype(np.float64).T
      expected = product * sa[:, None] * sb + bias
      return [(error(c.value, expected), TOLERANCE[BF16])]
    yield Case("int8 gemm", f"split {split}", [Launch(
        f"i8gemm/{row['co_name']}", row["knl_name"], arguments,
        (n // row["tile_n"] * split, ceil_div(m, row["tile_m"])),
    )], errors)


def gemm_fp8(arch, _, row, random, __) -> Iterator[Case]:
  """A scale for each 128 of a row of A, for each 128 by 128 of B."""
  m, n, k = row["tile_m"] + 7, 2 * row["tile_n"], 512
  for split in [1, 2] if row["splitK"] else [1]:
    a = random.standard_normal((m, k)).astype(fp8(arch))
    b = random.standard_normal((n, k)).astype(fp8(arch))
    sa = random.random((m, k // 128)).astype(F32)
    sb = random.random((n // 128, k // 128)).astype(F32)
    bias = random.standard_normal(n).astype(F32)
    c = Output((m, n), BF16, 0 if split > 1 else None)
    arguments = fp8_arguments(c, a, shuffle(b), np.ascontiguousarray(sa.T), sb,
                              bias, (m, n, k), split)
    def errors(a=a, b=b, sa=sa, sb=sb, bias=bias, c=c):
      left = a.astype(np.float64) * np.repeat(sa, 128, 1)
      right = b.astype(np.float64) * np.repeat(np.repeat(sb, 128, 0), 128, 1)
      return [(error(c.value, left @ right.T + bias), TOLERANCE[BF16])]
    yield Case("fp8 block-scale gemm", f"split {split}", [Launch(
        f"fp8gemm_blockscale/{row['co_name']}", row["knl_name"], arguments,
        (n // row["tile_n"] * split, ceil_div(m, row["tile_m"])),
    )], errors)


@dataclasses.dataclass
class Attention:
  """A problem: sequences of queries and keys, and what is right.

  Packed ones of `group` mode differ in length; others are of one length, and
  their arrays have the same bytes as if they were packed.
  """

  sq: Sequence[int]
  sk: Sequence[int]
  hq: int
  hk: int
  dq: int
  dv: int
  group: bool
  # Keys from i - left to i + right, counted from the first of both or, if
  # `bottom`, from the last of both. -1: no such limit.
  left: int = -1
  right: int = -1
  bottom: bool = True

  def __post_init__(self):
    self.scale = 1 / np.sqrt(self.dq)
    self.start_q = np.cumsum([0, *self.sq]).astype(np.int32)
    self.start_k = np.cumsum([0, *self.sk]).astype(np.int32)

  def draw(self, random, dtype):
    """q, k, v and a gradient of the output, [tokens, heads, dimension]."""
    def one(starts, heads, size):
      return random.standard_normal((starts[-1], heads, size)).astype(dtype)
    return (one(self.start_q, self.hq, self.dq),
            one(self.start_k, self.hk, self.dq),
            one(self.start_k, self.hk, self.dv),
            one(self.start_q, self.hq, self.dv))

  def hidden(self, sq: int, sk: int) -> np.ndarray:
    at = np.arange(sk)[None] - np.arange(sq)[:, None]
    if self.bottom:
      at = at - (sk - sq)
    return ((at > self.right if self.right >= 0 else False)
            | (-at > self.left if self.left >= 0 else np.zeros_like(at, bool)))

  def solve(self, q, k, v, do):
    """In float64: o, lse [heads, tokens], delta likewise, dq, dk, dv."""
    q, k, v, do = (x.astype(np.float64) for x in (q, k, v, do))
    o, dq = np.zeros_like(do), np.zeros_like(q)
    dk, dv = np.zeros_like(k), np.zeros_like(v)
    lse = np.zeros((self.hq, len(q)))
    delta = np.zeros((self.hq, len(q)))
    for i in range(len(self.sq)):
      rows_q = slice(*self.start_q[i : i + 2])
      rows_k = slice(*self.start_k[i : i + 2])
      hidden = self.hidden(self.sq[i], self.sk[i])
      for h in range(self.hq):
        g = h // (self.hq // self.hk)
        s = q[rows_q, h] @ k[rows_k, g].T * self.scale
        s[hidden] = -np.inf
        top = s.max(1)
        lse[h, rows_q] = top + np.log(np.exp(s - top[:, None]).sum(1))
        p = np.exp(s - lse[h, rows_q, None])
        o[rows_q, h] = p @ v[rows_k, g]
        delta[h, rows_q] = (o[rows_q, h] * do[rows_q, h]).sum(1)
        ds = p * (do[rows_q, h] @ v[rows_k, g].T - delta[h, rows_q, None])
        dq[rows_q, h] = ds @ k[rows_k, g] * self.scale
        dk[rows_k, g] += ds.T @ q[rows_q, h] * self.scale
        dv[rows_k, g] += p.T @ do[rows_q, h]
    return o, lse, delta, dq, dk, dv

  def by_batch(self, heads_first: np.ndarray) -> np.ndarray:
    """[heads, tokens] as kernels want it: by sequence but in group mode."""
    if self.group:
      return heads_first
    split = heads_first.reshape(len(heads_first), len(self.sq), -1)
    return np.ascontiguousarray(split.swapaxes(0, 1))

  def strides(self, array: np.ndarray, length: int) -> tuple[int, int, int]:
    """Bytes of a row, a head, a sequence of [tokens, heads, dimension]."""
    head = array.shape[2] * array.itemsize
    row = array.shape[1] * head
    return row, head, 0 if self.group else length * row


def attention_forward(arch, _, row, random, __) -> Iterator[Case]:
  """Attention, and the logarithms of its denominators."""
  dtype = BF16 if row["dtype"] == "bf16" else fp8(arch)
  group, causal = bool(row["mode"]), bool(row["mask"])
  a = Attention([200, 300] if group else [300, 300],
                [390, 420] if group else [300 if causal else 420] * 2,
                2, 1, row["hdim_q"], row["hdim_v"], group,
                right=0 if causal else -1)
  q, k, v, do = a.draw(random, dtype)
  o = Output(do.shape, BF16)
  lse = Output(a.by_batch(np.zeros((a.hq, len(q)))).shape, F32)
  descale = [None] * 3
  if dtype != BF16:
    # Of each sequence, or of all: gfx950's have one.
    count = 1 if arch == "gfx950" else 2
    descale = [np.broadcast_to(random.random((count, 1)) + 0.5, (2, a.hq))
               .astype(F32) for _ in range(3)]
  longest = max(a.sq)
  tile = row["ts_qo"]
  wide = (a.dq, a.dv) == (192, 128)
  old_wide = wide and arch == "gfx942"
  tiles = ceil_div(longest, tile)
  if causal and not old_wide:
    tiles = ceil_div(tiles, 2)  # A workgroup takes an early and a late one.
  grid = (tiles, a.hq, 2)
  if group:
    grid = (a.hq, 2, tiles)
  elif old_wide:
    grid = (a.hq, tiles, 2)
  starts = [a.start_q, a.start_k] if group else [None, None]
  descale_strides = [0] * 6 if dtype == BF16 else [4 * a.hq, 4] * 3
  strides = [a.strides(q, longest), a.strides(k, max(a.sk)),
             a.strides(v, max(a.sk)), a.strides(o.value, longest)]
  arguments = forward_arguments(
      o, q, k, v, lse, a.scale, (longest, max(a.sk)), (a.hq, a.hk),
      (a.dq, a.dv), tile, strides, 0 if old_wide else 3 if causal else 5,
      4 * lse.value.shape[-1], starts, descale, descale_strides)
  # gfx942 has objects of their own for a device of fewer compute units.
  devices = ["MI300/", "MI308/"] if arch == "gfx942" else [""]
  def errors():
    scaled = [q, k, v]
    if dtype != BF16:
      scaled = []
      for x, scale in zip((q, k, v), descale, strict=True):
        tokens = np.repeat(scale[:, :1], a.sq if x is q else a.sk, 0)
        scaled.append(x.astype(np.float64) * tokens[..., None])
    right, right_lse, *_ = a.solve(*scaled, do)
    # Probabilities, and in some kernels the output, may be rounded to zero.
    limit = 2 * TOLERANCE[BF16] if dtype == BF16 else 2**-4
    return [(error(o.value, right), limit),
            (error(lse.value, a.by_batch(right_lse)), limit)]
  for device in devices:
    yield Case("attention forward", device.strip("/"), [Launch(
        f"fmha_v3_fwd/{device}{row['co_name']}", row["knl_name"], arguments,
        grid, 256 if wide else 512)], errors)


def backward_launches(arch, row, tables, a, q, k, v, o, do, lse):
  """A kernel before, the main one, and mostly one after it.

  Returns:
    Launches; then what they write: delta, dq, and of every query's head dk and
    dv.
  """
  dtype, group, tile = q.dtype, bool(row["mode"]), row["ts"]
  half = not row["atomic32"]
  after = not half or (arch == "gfx950" and row["hdim_q"] != 64)
  size_q, size_v = a.dq, a.dv
  d = Output(lse.shape, F32)
  longest = max(a.sq)
  dq = Output(q.shape, dtype, None if after else 0)
  dk = Output((len(k), a.hq, size_q), dtype)
  dv = Output((len(v), a.hq, size_v), dtype)
  total = dq
  if after and half:
    rows_q, width = ceil_div(longest, 16) * 16, max(128, row["hdim_q"])
    total = Output((len(a.sq), a.hq, rows_q, width), dtype, 0)
  elif after:
    total = Output((a.hq, len(q), size_q) if group
                   else (len(a.sq), a.hq, longest, size_q), F32, 0)
  def bytes_of(array, length):
    line, head, batch = a.strides(array, length)
    return head, batch, line
  q_bytes, do_bytes = bytes_of(q, longest), bytes_of(do, longest)
  k_bytes, v_bytes = bytes_of(k, max(a.sk)), bytes_of(v, max(a.sk))
  dk_bytes = bytes_of(dk.value, max(a.sk))
  dv_bytes = bytes_of(dv.value, max(a.sk))
  starts = [a.start_q, a.start_k] if group else [None, None]
  tokens_q, tokens_k = (len(q), len(k)) if group else (longest, max(a.sk))
  lse_head = 4 * lse.shape[-1]

  def find(name, test):
    for other in tables[name]:
      if other["mode"] == row["mode"] and test(other):
        return other
    raise LookupError(f"no row of {name} for {row['co_name']}")
  def launch(other, arguments, blocks):
    return Launch(f"fmha_v3_bwd/{other['co_name']}", other["knl_name"],
                  arguments, (blocks, a.hq, len(a.sq)))

  pre = find("fmha_bwd_odo", lambda r: r["dtype"] == row["dtype"]
             and r["hdim_v"] == row["hdim_v"])
  launches = [launch(pre, [
      o, do, d, *bytes_of(o, longest), *do_bytes, lse_head,
      0 if group else a.hq * lse_head, 4, tokens_q, size_v, starts[0],
      starts[0],
  ], ceil_div(longest, pre["ts"]))]
  blocks = ceil_div(max(a.sk), tile)
  if row["mask"] in (1, 2):
    blocks = ceil_div(blocks, 2)
  launches.append(launch(row, [
      total, dk, dv, q, k, v, do, lse, d, a.scale, LOG2E, tokens_q,
      tile * k_bytes[2], *q_bytes, a.hq // a.hk, *k_bytes, dk_bytes[2],
      tokens_k, size_q, size_v, a.hq, *v_bytes, *do_bytes, dk_bytes[0],
      dk_bytes[1], *dv_bytes, lse_head, *starts, *starts,
      ceil_div(longest, 16) * 16 if half else longest,
      a.right + 1, a.left + 1,
  ], blocks))
  if after:
    name = "fmha_bwd_dq_shuffle" if half else "fmha_bwd_dq_convert"
    post = find(name, lambda r: r["hdim_q"] == row["hdim_q"]
                and r["bf16_cvt"] in (3, row["bf16_cvt"])
                and (half or r["dtype"] == row["dtype"]))
    width = total.value.shape[-1] * total.value.itemsize
    launches.append(launch(post, [
        total, dq, total.value.shape[-2] * width,
        0 if group and not half else a.hq * total.value.shape[-2] * width,
        width, *q_bytes, tokens_q, size_q, starts[0], starts[0],
    ], ceil_div(longest, post["ts"])))
  return launches, d, dq, dk, dv


def attention_backward(arch, table, row, random, tables) -> Iterator[Case]:
  """Gradients: a kernel before, the main one, and mostly one after it."""
  if table != "fmha_bwd_dqdkdv":
    return  # Those run with the rows of the main one.
  dtype = BF16 if row["dtype"] == "bf16" else F16
  group = bool(row["mode"])
  tile = row["ts"]
  size_q, size_v = row["hdim_q"], row["hdim_v"]
  if row["pddv"] and size_q == size_v:
    size_q, size_v = size_q - 24, size_v - 24
  if group:
    sq, sk = [100, 170], [210, 230]
  else:
    sq = sk = [2 * tile, 2 * tile]
    if row["pssk"]:
      # A window's kernel reads lse of whole tiles of queries.
      sq, sk = [256 if row["mask"] == 3 else 150] * 2, [230, 230]
  window = {0: {}, 1: {"right": 0, "bottom": False}, 2: {"right": 0},
            3: {"left": 40, "right": 20, "bottom": False}}[row["mask"]]
  a = Attention(sq, sk, 2, 1, size_q, size_v, group, **window)
  q, k, v, do = a.draw(random, dtype)
  right_o, lse, delta, *gradients = a.solve(q, k, v, do)
  launches, d, *outputs = backward_launches(
      arch, row, tables, a, q, k, v, right_o.astype(dtype), do,
      a.by_batch(lse.astype(F32)))

  def errors():
    limit = 4 * TOLERANCE[dtype]
    found = [(error(d.value, a.by_batch(delta)), TOLERANCE[dtype])]
    for actual, right in zip(outputs, gradients, strict=True):
      value = actual.value
      if actual is not outputs[0]:
        value = value.astype(np.float64).reshape(
            len(right), a.hk, -1, right.shape[-1]).sum(2)
      found.append((error(value, right), limit))
    return found
  yield Case("attention backward", "", launches, errors)



def mla_launch(row, a, q, cache, pages, out, lse, parts,
               scales=(None, None)) -> Launch:
  """`out` and `lse` have a result for each of so many parts of the keys."""
  heads, prefill, length = a.hq, row["prefill"], a.sq[0]
  rows_of_group = 128
  if not prefill:
    rows_of_group = {
        ("bf16", 16, 1): 16, ("bf16", 8, 1): 8, ("fp8", 8, 1): 8,
        ("bf16", 8, 2): 16,
        ("fp8", 16, 4): 64, ("bf16", 32, 0): 64, ("bf16", 64, 0): 64,
        ("bf16", 64, 1): 64, ("fp8", 32, 1): 32,
    }.get((row["qType"], heads, row["qSeqLen"]), 128)
  queries = 1 if prefill else length
  batch = len(a.sq)
  ends = None if prefill else np.arange(batch + 1, dtype=np.int32) * parts
  arguments = [
      out, lse, q, cache, a.start_k, pages, np.ones(batch, np.int32), a.scale,
      heads if (heads, length) == (8, 2) else heads * queries, parts,
      heads * 576 * q.itemsize * queries, 576 * cache.itemsize, 0, a.start_q,
      ends, None, *scales, 0, None, None, 1, 0,
  ]
  return Launch(f"mla/{row['co_name']}", row["knl_name"], arguments,
                (ceil_div(length * heads, rows_of_group), batch, parts))


def mla(arch, _, row, random, __) -> Iterator[Case]:
  """Attention of heads that share one key of 576, whose first 512 are the
  value, in pages of one token: parts of the keys, which are merged here."""
  if row["ps"]:
    return  # Their work is laid out by a scheduler of AITER's.
  dtypes = {"bf16": BF16, "fp8": fp8(arch)}
  q_type, kv_type = dtypes[row["qType"]], dtypes[row["kvType"]]
  heads, prefill = row["Gqa"], row["prefill"]
  length = 40 if prefill else row["qSeqLen"] or 1
  parts = 1 if prefill else 2
  a = Attention([length] * 2, [200, 330], heads, 1, 576, 512, True,
                right=0 if row["causal"] or prefill else -1)
  q, kv, _, _ = a.draw(random, np.float64)
  q, kv = q.astype(q_type), kv.astype(kv_type)
  scales = [(random.random(1) + 0.5).astype(F32) if dtype == fp8(arch) else None
            for dtype in (q_type, kv_type)]
  pages = random.permutation(len(kv) + 60)[: len(kv)].astype(np.int32)
  # Some kernels read on behind the last query and the last page.
  cache = np.zeros((len(kv) + 160, 576), kv_type)
  cache[pages] = kv[:, 0]
  behind = np.concatenate([q, np.zeros_like(q[:4])])
  out = Output((len(q), parts, heads, 512), BF16 if prefill else F32, 0)
  lse = Output((len(q), parts, heads), F32, -np.inf)
  launch = mla_launch(row, a, behind, cache, pages, out, lse, parts, scales)

  def errors():
    queries, keys = (
        x.astype(np.float64) * (1 if scale is None else scale)
        for x, scale in zip((q, kv), scales, strict=True))
    right, right_lse, *_ = a.solve(queries, keys, keys[..., :512],
                                   np.zeros((len(q), heads, 512)))
    limit = 2 * TOLERANCE[BF16] if kv_type == BF16 else 2**-4
    logs = lse.value.astype(np.float64)
    if prefill:
      return [(error(out.value[:, 0], right), limit)]
    top = logs.max(1, keepdims=True)
    weights = np.exp(logs - top)
    merged = (out.value * weights[..., None]).sum(1)
    merged /= weights.sum(1)[..., None]
    total = (np.log(weights.sum(1)) + top[:, 0]).T
    return [(error(merged, right), limit), (error(total, right_lse), limit)]
  yield Case("MLA", "", [launch], errors)


def paged_launch(row, a, q, keys, values, tables, out,
                 scales=(None, None)) -> Launch:
  """`keys` [pages, heads, 128 / 16 bytes, page, 16 bytes], `values` [pages,
  heads, page / 16 bytes, 128, 16 bytes], `tables` [batch, pages of each]."""
  head = row["blkSz"] * 128 * keys.itemsize
  arguments = [
      out, q, keys, values, tables, np.array(a.sk, np.int32), *scales,
      LOG2E * a.scale, tables.shape[1], a.hk,
      q.shape[1] * 128 * q.itemsize, a.hk * head, head, a.sq[0] - 1,
      a.hq // a.hk, a.start_q if row["Mtp"] else None,
  ]
  return Launch(f"pa/{row['co_name']}", row["knl_name"], arguments,
                (a.hk, len(a.sq)))


def paged_attention(arch, _, row, random, __) -> Iterator[Case]:
  """Decoding from pages; keys and values may have a scale each token."""
  if row["ps"]:
    return  # As above.
  types = {"bf16": BF16, "fp16": F16, "fp8": fp8(arch),
           "int8": np.dtype(np.int8)}
  dtype, kv_type = types[row["qType"]], types[row["kvType"]]
  group, page = row["Gqa"], row["blkSz"]
  length = row["Mtp"] - 10 if row["Mtp"] > 10 else 1
  if row["Mtp"] == 1:
    length = 16 // group
  a = Attention([length] * 2, [200, 330], 2 * group, 2, 128, 128, True,
                right=0 if row["Msk"] else -1)
  q, k, v, do = a.draw(random, np.float64)
  quantised = kv_type not in (BF16, F16)
  if kv_type == np.int8:
    k, v = np.rint(k * 30), np.rint(v * 30)
  q, k, v = q.astype(dtype), k.astype(kv_type), v.astype(kv_type)
  width = page * ceil_div(2000, page) // page
  tables = random.permutation(2 * width).astype(np.int32).reshape(2, width)
  caches, scales, used = [], [], []
  for x in (k, v):
    cache = np.zeros((2 * width, page, 2, 128), kv_type)
    scale = np.ones((2 * width, 2, page), F32)
    scaled = x.astype(np.float64)
    for i in range(2):
      tokens = np.arange(a.sk[i])
      where = tables[i, tokens // page], tokens % page
      cache[where] = x[a.start_k[i] : a.start_k[i + 1]]
      drawn = (random.random((a.sk[i], 2)) + 0.5).astype(F32) / 30
      if quantised:
        scale[where[0], :, where[1]] = drawn
        scaled[a.start_k[i] : a.start_k[i + 1]] *= drawn[..., None]
    caches.append(cache)
    scales.append(scale if quantised else None)
    used.append(scaled)
  part = 16 // kv_type.itemsize
  keys = np.ascontiguousarray(caches[0].reshape(
      -1, page, 2, 128 // part, part).transpose(0, 2, 3, 1, 4))
  values = np.ascontiguousarray(caches[1].reshape(
      -1, page // part, part, 2, 128).transpose(0, 3, 1, 4, 2))
  out = Output(q.shape, dtype)
  launch = paged_launch(row, a, q, keys, values, tables, out, scales)

  def errors():
    right, *_ = a.solve(q, *used, do)
    # For int8 keys queries and probabilities become int8, too.
    limit = {1: 2**-3 if kv_type == np.int8 else 2**-4}.get(
        kv_type.itemsize, 2 * TOLERANCE[BF16])
    return [(error(out.value, right), limit)]
  yield Case("paged attention", "", [launch], errors)


class Experts:
  """A problem: tokens, each of two of three experts, and what is right.

  Attributes:
    x: [1 or slots, tokens, dim], up_gate: [experts, (1 or 2) inter, dim], down:
      [experts, dim, inter], and `_scale` of each, as kernels want them.
    smooth_x: factors [experts, dim] or None, smooth: [experts, inter].
  """

  def __init__(self, random, tokens, dim, inter, gated, x_type, weight_type,
               quantised, smooth):
    """`quantised` as the tables call it. `smooth`: 1 if the kernel multiplies x
    by an expert's factors and rounds it, 2 if each slot has such an x."""
    slots, self.count = 2, 3
    self.inter = inter
    self.chosen = np.stack([random.permutation(self.count)[:slots]
                            for _ in range(tokens)]).astype(np.int32)
    self.weights = (random.random((tokens, slots)) + 0.5).astype(F32)

    def factors(*shape):
      return (random.random(shape) + 0.5).astype(F32)

    def draw(dtype, shape, block, size=1):
      """Values of that deviation, a scale for each block of them, and both
      multiplied. No block, no scales."""
      unit = 1 if block is None else (32 if dtype == np.int8 else 1) / size
      values = random.standard_normal(shape) * size * unit
      values = (np.rint(values) if dtype == np.int8 else values).astype(dtype)
      exact = values.astype(np.float64)
      if block is None:
        return values, None, exact
      scale = factors(*map(ceil_div, shape, block)) / unit
      exact *= np.kron(scale, np.ones(block))
      return values, scale, exact

    blocks = {"noquant": lambda _: (None, None),
              "pertoken": lambda width: ((1, 1, width), (1, 1, width)),
              "blockscale": lambda _: ((1, 1, 128), (1, 128, 128))}[quantised]
    # Sums of the first product have a deviation near 1, where activations bend.
    self.x, scale, x = draw(
        x_type, (slots if smooth == 2 else 1, tokens, dim),
        blocks(dim)[0] if x_type.itemsize == 1 else None, dim**-0.5)
    self.x_scale = None if scale is None else np.ascontiguousarray(
        scale.transpose(0, 2, 1))
    self.up_gate, self.up_gate_scale, up_gate = draw(
        weight_type, (self.count, inter * (1 + gated), dim), blocks(dim)[1])
    self.down, self.down_scale, down = draw(
        weight_type, (self.count, dim, inter), blocks(inter)[1])
    self.smooth_x = factors(self.count, dim) if smooth == 1 else None
    self.smooth = factors(self.count, inter) if smooth else None
    self.exact = x, up_gate, down

  def hidden(self, activation: str, weigh: bool) -> np.ndarray:
    """[tokens, slots, inter], weighed before the activation if `weigh`."""
    x, up_gate, _ = self.exact
    smooth = np.ones(self.count) if self.smooth_x is None else self.smooth_x
    h = np.stack([[up_gate[e] @ (x[s % len(x), t] * smooth[e])
                   for s, e in enumerate(own)]
                  for t, own in enumerate(self.chosen)])
    if weigh:
      h *= self.weights[..., None]
    gate = h[..., :self.inter]
    if activation == "silu":
      gate = gate / (1 + np.exp(-gate))
    else:
      gate = gate * (1 + np.vectorize(math.erf)(gate / np.sqrt(2))) / 2
    return gate if h.shape == gate.shape else gate * h[..., self.inter:]

  def solve(self, activation: str, weigh_first: bool) -> np.ndarray:
    """[tokens, dim]."""
    hidden = self.hidden(activation, weigh_first)
    if not weigh_first:
      hidden *= self.weights[..., None]
    if self.smooth is not None:
      hidden *= self.smooth[self.chosen]
    down = self.exact[2]
    return np.stack([sum(down[e] @ h for e, h in zip(*token, strict=True))
                     for token in zip(self.chosen, hidden, strict=True)])

  def sort(self, block: int) -> tuple[np.ndarray, ...]:
    """Places by expert, each expert's filled up to whole blocks, and one block
    more than is used, as AITER sorts them.

    Returns:
      Of each place token | slot << 24 and the weight; the expert of each block;
      how many places are used, and the number of tokens.
    """
    tokens, slots = self.chosen.shape
    places, weights, experts = [], [], []
    for expert in [*range(self.count), -1]:
      token, slot = np.nonzero(self.chosen == expert)
      blocks = 1 if expert < 0 else ceil_div(len(token), block)
      fill = blocks * block - len(token)
      places += [*(token | slot << 24), *[tokens | slots << 24] * fill]
      weights += [*self.weights[token, slot], *[0] * fill]
      experts += [expert] * blocks
    return (np.array(places, np.int32), np.array(weights, F32),
            np.array(experts, np.int32),
            np.array([len(places) - block, tokens], np.int32))


def expert_bytes(array: np.ndarray | None) -> int:
  return 0 if array is None else array[0].nbytes


def shuffle_experts(weights: np.ndarray) -> np.ndarray:
  return shuffle(weights.reshape(-1, weights.shape[-1]))


def fused_moe(arch, table, row, random, _) -> Iterator[Case]:
  """All of a layer of experts, which kernels add to a zeroed output."""
  out_type, quantised, stored, gated, activation, weigh_first = re.fullmatch(
      r"fmoe_(bf16|fp16)_(noquant|pertoken|blockscale)(Int8|Fp8|Bf16|MXfp4|)"
      r"_g1u(\d)_(gelu|silu)(_tkw1|)", table).groups()
  if stored == "MXfp4":
    return
  out_type = {"bf16": BF16, "fp16": F16}[out_type]
  # Whatever the output, 16 bits are bf16, and what weighs first has fp8.
  weight_type = fp8(arch)
  if quantised == "noquant":
    weight_type = BF16
  elif stored == "Int8" and not weigh_first:
    weight_type = np.dtype(np.int8)
  smooth = row["smf"]
  if weight_type == np.int8 and gated == "0":
    smooth = smooth or 2
  rounds_x = smooth == 1 or stored == "Bf16" or "_a16_" in row["co_name"]
  tile, block, flat = row["subGU_n"], row["subGU_m"], row.get("flat") or 0
  tokens, inter = max(50, 2 * block), 2 * tile
  dim = 1024 if row["atm"] == 1 else 512  # As wide as those write at a time.
  a = Experts(random, tokens, dim, inter, int(gated),
              BF16 if rounds_x else weight_type, weight_type, quantised, smooth)
  # Workgroups of those that are not sorted for agree behind the output.
  out = Output((tokens + bool(flat), dim), out_type, 0)
  places, weights, experts, used = a.sort(block)
  grid = (2, len(experts))  # By two tiles of the inner dimension.
  if flat:
    places, weights, experts = a.chosen, a.weights, a.chosen
    grid = (2, a.chosen.shape[1], tokens)
  if smooth == 1:
    grid = grid[::-1]
  persistent = 8 if row["ps"] else 0  # Some count on eight dies.
  size = weight_type.itemsize
  arguments = [
      out, a.x, shuffle_experts(a.up_gate), used, shuffle_experts(a.down),
      a.smooth_x if smooth == 1 else a.x_scale, a.up_gate_scale, a.down_scale,
      a.smooth, places, weights, experts, dim, inter, tokens, a.count,
      dim * a.x.itemsize, dim * size, inter * size, dim * out_type.itemsize,
      expert_bytes(a.up_gate), expert_bytes(a.down),
      expert_bytes(a.up_gate_scale), expert_bytes(a.down_scale), 4 * inter,
      a.chosen.shape[1], persistent, 2]
  if gated == "0" or quantised == "blockscale":  # Some read on behind arrays.
    arguments = [np.concatenate([x, x], None) if isinstance(x, np.ndarray)
                 else x for x in arguments]

  def errors():
    limit = 2**-3 if rounds_x else 2**-4  # Hidden values are rounded, too.
    if quantised == "noquant":
      limit = 4 * TOLERANCE[out_type]
    right = a.solve(activation, bool(weigh_first))
    return [(error(out.value[:tokens], right), limit)]
  yield Case("fused MoE", "", [Launch(
      f"fmoe/{activation}/{row['co_name']}", row["knl_name"], arguments,
      (persistent, 1) if persistent else grid)], errors)


def moe_first_stage(arch, table, row, random, _) -> Iterator[Case]:
  """A layer of experts up to the activation, of each token and slot."""
  block, tile = row["tile_m"], row["tile_n"]
  scaled, weigh = "blockscale" in table, "doweight" in table
  dtype = np.dtype(np.int8) if "Int8" in table else fp8(arch)
  tokens, dim, inter = max(50, 2 * block), 512, 2 * tile
  for code, activation in enumerate(["silu", "gelu"]):
    a = Experts(random, tokens, dim, inter, 1, dtype, dtype,
                "blockscale" if scaled else "pertoken", 0)
    slots = a.chosen.shape[1]
    places, weights, experts, used = a.sort(block)
    # Of block scales the output has some, too: float32 behind all values.
    count = tokens * slots * inter
    out = Output(count + count // 32 if scaled else count,
                 dtype if scaled else BF16, 0)
    arguments = [
        out, a.x, shuffle_experts(a.up_gate), used, a.x_scale, a.up_gate_scale,
        None, places, experts, dim, inter, tokens, a.count, dim, dim,
        slots * inter * out.value.itemsize, expert_bytes(a.up_gate),
        expert_bytes(a.up_gate_scale), 4 * inter, slots, 0, code,
        weights if weigh else None]
    def errors(a=a, out=out, activation=activation, count=count):
      values = out.value[:count].astype(np.float64)
      if scaled:
        values *= out.value[count:].view(F32).repeat(128)
      right = a.hidden(activation, weigh)
      return [(error(values.reshape(right.shape), right),
               2**-4 if scaled else 2 * TOLERANCE[BF16])]
    yield Case("MoE's first stage", activation, [Launch(
        f"fmoe_2stages/{row['co_name']}", row["knl_name"], arguments,
        (2, len(experts)))], errors)


FAMILIES = {
    "bf16gemm": gemm_bf16,
    "i8gemm": gemm_i8,
    "fp8gemm_blockscale": gemm_fp8,
    "fmha_v3_fwd": attention_forward,
    "fmha_v3_bwd": attention_backward,
    "mla": mla,
    "pa": paged_attention,
    "fmoe/gelu": fused_moe,
    "fmoe/silu": fused_moe,
    "fmoe_2stages": moe_first_stage,
}


# Some kernels count on time: that waves which began together stay so, or that
# LDS answers before an instruction some way on. Those run once more without the
# checks that forbid it, the waves of a workgroup going in step.
TIMED = ("lds_race", "waitcnt")
IN_STEP = {
    "AMDGPU_SIM_CHECKS":
        "-lds_race,-waitcnt,-lds_wait,-lds_uninitialized",
    "AMDGPU_SIM_TURN": "1",
}


def segment(arguments: Sequence[Any], buffers: dict[int, Any]) -> np.ndarray:
  """The bytes of a launch's arguments."""
  words = np.zeros((len(arguments), 4), np.uint32)
  for word, argument in zip(words, arguments, strict=True):
    if isinstance(argument, (np.ndarray, Output)):
      word[:2].view(np.uint64)[:] = buffers[id(argument)].address
    elif isinstance(argument, float):
      word[:1].view(np.float32)[:] = argument
    elif argument is not None:
      word[:1].view(np.int32)[:] = argument
  return words.reshape(-1)


@contextlib.contextmanager
def memory(launches: Sequence[Launch]):
  """Device memory of launches' arguments, by id: filled as those say."""
  import asm  # After the environment says which architecture to simulate.

  buffers = {}
  for argument in [a for each in launches for a in each.arguments]:
    if id(argument) in buffers:
      continue
    if isinstance(argument, np.ndarray):
      buffers[id(argument)] = asm.Buffer(argument)
    elif isinstance(argument, Output):
      contents = argument.value
      buffers[id(argument)] = asm.Buffer(
          contents.nbytes if argument.full is None else contents)
  try:
    yield buffers
  finally:
    for buffer in buffers.values():
      buffer.free()


def run_launch(folder: pathlib.Path, launch: Launch, buffers: dict[int, Any]):
  """Raises asm.HipError."""
  import asm

  with asm.Module((folder / launch.path).read_bytes()) as module:
    module.launch_segment(launch.kernel, segment(launch.arguments, buffers),
                          tuple(launch.grid), launch.block)


def execute(folder: pathlib.Path, case: Case):
  """Runs a case's launches. Raises asm.HipError."""
  with memory(case.launches) as buffers:
    for each in case.launches:
      run_launch(folder, each, buffers)
    for argument in [a for each in case.launches for a in each.arguments]:
      if isinstance(argument, Output):
        read = buffers[id(argument)].read(np.uint8)
        argument.value = read.view(argument.value.dtype).reshape(
            argument.value.shape)


@dataclasses.dataclass
class Row:
  """A line of the report. `status` ends in right, in wrong or in a fault."""

  family: str
  name: str
  objects: Sequence[str]
  status: str
  error: float
  seconds: float

  def text(self) -> str:
    return (f"{self.family:22} {self.seconds:7.1f} {self.error:9.2g}  "
            f"{self.name}: {self.status}")


def run_row(checkout: pathlib.Path, arch: str, folder: str, table: str,
            row: dict[str, Any], tables: Any) -> list[Row]:
  """Runs the cases of one row of a table."""
  import asm

  random = np.random.default_rng(0)
  report = []
  for case in FAMILIES[folder](arch, table, row, random, tables):
    begin = time.monotonic()
    worst = float("nan")
    try:
      execute(checkout / "hsa" / arch, case)
      errors = case.errors()
      worst = max(e for e, _ in errors)
      right = all(e <= limit for e, limit in errors)
      status = "right" if right else "wrong"
    except asm.HipError as failure:
      asm.clear_fault()
      told = failure.report.split("\n")[0] or str(failure)
      status = told.removeprefix("amdgpu_sim: ")
    report.append(Row(
        case.family, f"{row['co_name']} {case.name}".rstrip(),
        [launch.path for launch in case.launches], status, worst,
        time.monotonic() - begin))
  return report


def run_all(checkout: pathlib.Path, arch: str, tasks: Sequence[Any],
            jobs: int) -> list[list[Row]]:
  """The rows' reports. Processes begin with the environment of the call."""
  context = multiprocessing.get_context("spawn")
  with concurrent.futures.ProcessPoolExecutor(jobs, context) as pool:
    runs = [pool.submit(run_row, checkout, arch, *task) for task in tasks]
    return [run.result() for run in runs]


def main() -> int:
  parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
  parser.add_argument("checkout", type=pathlib.Path, help="of AITER")
  parser.add_argument("--arch", choices=["gfx942", "gfx950"],
                      default=os.environ.get("AMDGPU_SIM_ARCH", "gfx942"))
  parser.add_argument("--select", default="", metavar="REGEX",
                      help="of the objects' paths")
  parser.add_argument("--jobs", type=int, default=os.cpu_count())
  arguments = parser.parse_args()
  root = arguments.checkout / "hsa" / arguments.arch
  if not root.is_dir():
    print(f"{arguments.checkout} is no checkout of AITER: it has no "
          f"hsa/{arguments.arch}. Nothing was run.")
    return 2
  os.environ["AMDGPU_SIM_ARCH"] = arguments.arch
  # What is only printed would hide the table.
  os.environ.setdefault("AMDGPU_SIM_CHECKS", "-lds_wait,-lds_uninitialized")
  tasks = []
  for folder in FAMILIES:
    tables = collections.defaultdict(list)
    for table, row in rows(root / folder):
      tables[table].append(row)
    tasks += [(folder, table, row, tables)
              for table, all_rows in tables.items() for row in all_rows
              if re.search(arguments.select, f"{folder}/{row['co_name']}")]
  run = lambda some: run_all(arguments.checkout, arguments.arch, some,
                             arguments.jobs)
  results = run(tasks)
  late = [i for i, result in enumerate(results)
          if any(row.status.startswith(TIMED) for row in result)]
  os.environ |= IN_STEP
  for i, again in zip(late, run([tasks[i] for i in late]), strict=True):
    for row, new in zip(results[i], again, strict=True):
      if row.status.startswith(TIMED):
        row.status += f"; in step {new.status}"
        row.error, row.seconds = new.error, row.seconds + new.seconds

  counts = collections.defaultdict(collections.Counter)
  launched = collections.defaultdict(set)
  print(f"{'family':22} {'seconds':>7} {'error':>9}  object: result")
  for (folder, *_), result in zip(tasks, results, strict=True):
    for row in result:
      print(row.text())
      launched[folder].update(row.objects)
      counts[row.family]["all"] += 1
      counts[row.family]["right"] += row.status == "right"
      counts[row.family]["in step"] += row.status.endswith("in step right")
  print()
  for family, count in counts.items():
    print(f"{family}: {count['all']} cases, {count['right']} right, "
          f"{count['in step']} more in step")
  for folder, objects in launched.items():
    there = len(list((root / folder).rglob("*.co")))
    print(f"{folder}: {len(objects)} of {there} objects launched")
  return int(any(c["right"] + c["in step"] < c["all"]
                 for c in counts.values()))


if __name__ == "__main__":
  sys.exit(main())
