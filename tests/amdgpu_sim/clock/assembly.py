# SPDX-License-Identifier: Apache-2.0
"""AITER's assembly kernels on problems of any size, for the model of time.

Each function returns the launches of one problem, as run_aiter.py has them.
What they multiply is not drawn: it does not matter for the time.
"""

import contextlib
import ctypes
import json
import os
import pathlib
import sys
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

sys.path.insert(0, str(pathlib.Path(__file__).parents[1]))
import run_aiter
from run_aiter import BF16, F32, Launch, Output

# For the model nothing but its workgroups is computed; kernels that count on
# time, all that read what nobody wrote, and parts of k that add up what others
# cleared, run without the checks.
ENVIRONMENT = {
    "AMDGPU_SIM_CLOCK_ONLY": "1", "AMDGPU_SIM_TURN": "1", "AMDGPU_SIM_CHECKS":
    "-uninitialized,-global_race,-lds_race,-waitcnt,-lds_wait,"
    "-lds_uninitialized",
}
# Prefix of a kernel's name: its folder.
GEMMS = {"bf16gemm": "bf16gemm", "I8gemm": "i8gemm",
         "fp8gemm": "fp8gemm_blockscale"}


def report(name: str = "amdgpu_sim_clock") -> dict[str, Any]:
  """What the model says of the latest launch."""
  import asm  # After the environment says what to simulate.

  function = getattr(asm.library(), name)
  function.restype = ctypes.c_char_p
  return json.loads(function())


@contextlib.contextmanager
def launched(folder: pathlib.Path, launches: Sequence[Launch]):
  """Their reports, while the last one's module is there to be asked again.

  Raises:
    asm.HipError: of a launch that does not end by itself: parts of k that wait
      for others, which the model does not look at.
  """
  import asm

  with run_aiter.memory(launches) as buffers, contextlib.ExitStack() as stack:
    reports = []
    for each in launches:
      module = stack.enter_context(
          asm.Module((folder / each.path).read_bytes()))
      try:
        module.launch_segment(
            each.kernel, run_aiter.segment(each.arguments, buffers),
            tuple(each.grid), each.block)
      except asm.HipError:
        asm.clear_fault()
        raise
      reports.append(report())
    yield reports


def row_of(folder: pathlib.Path, kernel: str) -> dict[str, Any]:
  return next(row for _, row in run_aiter.rows(folder)
              if row["co_name"] == kernel + ".co")


def gemm(folder: pathlib.Path, kernel: str, m: int, n: int, k: int,
         split: int) -> list[Launch]:
  """A product by the kernel of this name, k in so many parts."""
  family = kernel.split("_")[0]
  row = row_of(folder / GEMMS[family], kernel)
  width = 2 if family == "bf16gemm" else 1
  c, a, b, sa, sb, bias = (Output(size, np.uint8) for size in (
      4 * m * n, width * m * k, width * n * k, 4 * m * max(1, k // 128),
      4 * n * max(1, k // 128), 4 * n))
  if family == "bf16gemm":
    semaphore = np.zeros(1024, np.uint32) if split > 1 else None
    arguments = run_aiter.bf16_arguments(
        c, a, b, None, semaphore, (m, n, k), split, BF16)
    grid = (n // row["tileN"], -(-m // row["tileM"]), split)
  else:
    pack = (run_aiter.i8_arguments if family == "I8gemm"
            else run_aiter.fp8_arguments)
    arguments = pack(c, a, b, sa, sb, bias, (m, n, k), split)
    grid = (n // row["tile_n"] * split, -(-m // row["tile_m"]), 1)
  return [Launch(f"{GEMMS[family]}/{row['co_name']}", row["knl_name"],
                 arguments, grid)]


def gemms(folder: pathlib.Path, family: str, m: int, n: int
         ) -> Iterator[tuple[str, int]]:
  """Kernels of a family for m rows and n columns, and parts of k for each.

  They are the six whose tiles' rows are the nearest to m.
  """
  tile_m, tile_n = (("tileM", "tileN") if family == "bf16gemm"
                    else ("tile_m", "tile_n"))
  rows = [row for _, row in run_aiter.rows(folder / GEMMS[family])
          if n % row[tile_n] == 0]
  rows.sort(key=lambda row: abs(np.log(row[tile_m] / m)))
  for row in rows[:6]:
    for split in (1, 2, 4, 8) if row["splitK"] and m <= 256 else (1,):
      yield row["co_name"].removesuffix(".co"), split


def _problem(batch, heads, kv_heads, sq, sk, causal):
  problem = run_aiter.Attention(
      [sq] * batch, [sk] * batch, heads, kv_heads, 128, 128, False,
      right=0 if causal else -1)
  q, k, v = (np.zeros((batch * length, count, 128), BF16) for length, count in
             ((sq, heads), (sk, kv_heads), (sk, kv_heads)))
  return problem, q, k, v


def forward(folder: pathlib.Path, arch: str, batch: int, heads: int,
            kv_heads: int, sq: int, sk: int, causal: bool) -> list[Launch]:
  """Attention in bf16, head dimension 128."""
  a, q, k, v = _problem(batch, heads, kv_heads, sq, sk, causal)
  old = arch == "gfx942"
  name = "fwd_hd128_bf16" + "_causal" * causal + "_rtne" * old
  row = row_of(folder / "fmha_v3_fwd", name)
  o = Output(q.shape, BF16)
  tile = row["ts_qo"]
  strides = [a.strides(x, length)
             for x, length in ((q, sq), (k, sk), (v, sk), (q, sq))]
  arguments = run_aiter.forward_arguments(
      o, q, k, v, Output(batch * heads * sq, F32), a.scale, (sq, sk),
      (heads, kv_heads), (128, 128), tile, strides, 3 if causal else 5, 4 * sq)
  tiles = -(-sq // tile)
  if causal:
    tiles = -(-tiles // 2)  # A workgroup takes an early and a late one.
  return [Launch(f"fmha_v3_fwd/{'MI300/' * old}{row['co_name']}",
                 row["knl_name"], arguments, (tiles, heads, batch), 512)]


def backward(folder: pathlib.Path, arch: str, batch: int, heads: int,
             kv_heads: int, sq: int, sk: int, causal: bool, half: bool
            ) -> list[Launch]:
  """Its gradients, dq added up in 16 bits if `half`, else in 32.

  A sum of dk and dv over the heads that share one is not among the launches.
  """
  a, q, k, v = _problem(batch, heads, kv_heads, sq, sk, causal)
  tables = {}
  for table, row in run_aiter.rows(folder / "fmha_v3_bwd"):
    tables.setdefault(table, []).append(row)
  fits = {"dtype": "bf16", "hdim_q": 128, "hdim_v": 128, "mode": 0,
          "mask": int(causal), "atomic32": int(not half), "pddv": 0}
  rows = [row for row in tables["fmha_bwd_dqdkdv"]
          if all(row[name] == value for name, value in fits.items())
          and not row["pssk"]]
  if not rows:  # Some are only for any length.
    rows = [row for row in tables["fmha_bwd_dqdkdv"]
            if all(row[name] == value or name == "pddv"
                   for name, value in fits.items())]
  lse = np.zeros((batch, heads, sq), F32)
  launches, *_ = run_aiter.backward_launches(
      arch, rows[0], tables, a, q, k, v, q, q, lse)
  return launches


def latent(folder: pathlib.Path, batch: int, heads: int, length: int,
           parts: int) -> list[Launch]:
  """Decoding of one token with latent keys in bf16, pages of one token."""
  query = {8: 1, 16: 1}.get(heads, 0)
  row = next(row for _, row in run_aiter.rows(folder / "mla")
             if (row["qType"], row["kvType"], row["Gqa"], row["ps"],
                 row["qSeqLen"], row["prefill"]) == (
                     "bf16", "bf16", heads, 0, query, 0))
  a = run_aiter.Attention([1] * batch, [length] * batch, heads, 1, 576, 512,
                          True)
  pages = np.random.default_rng(0).permutation(batch * length)
  return [run_aiter.mla_launch(
      row, a, np.zeros((batch + 4, heads, 576), BF16),
      np.zeros((batch * length + 160, 576), BF16), pages.astype(np.int32),
      Output((batch, parts, heads, 512), F32),
      Output((batch, parts, heads), F32), parts)]


def paged(folder: pathlib.Path, batch: int, heads: int, kv_heads: int,
          length: int) -> list[Launch]:
  """Decoding of one token in bf16, head dimension 128, pages of 16."""
  row = next(row for _, row in run_aiter.rows(folder / "pa")
             if (row["qType"], row["kvType"], row["Gqa"], row["ps"],
                 row["Mtp"]) == ("bf16", "bf16", heads // kv_heads, 0, 0))
  a = run_aiter.Attention([1] * batch, [length] * batch, heads, kv_heads, 128,
                          128, True)
  page = row["blkSz"]
  table = np.random.default_rng(0).permutation(batch * length // page)
  pool = (batch * length // page, kv_heads, page * 128)
  return [run_aiter.paged_launch(
      row, a, np.zeros((batch, heads, 128), BF16), np.zeros(pool, BF16),
      np.zeros(pool, BF16), table.astype(np.int32).reshape(batch, -1),
      Output((batch, heads, 128), BF16))]


def prepare(device: str | None = None, clock: str = os.devnull):
  """Sets the environment of this process or of those that it starts."""
  os.environ |= ENVIRONMENT | {"AMDGPU_SIM_CLOCK": clock}
  if device:
    os.environ["AMDGPU_SIM_CLOCK_DEVICE"] = device
