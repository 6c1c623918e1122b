# SPDX-License-Identifier: Apache-2.0
"""The FFI handler of matrix products, called as Python never calls it.

Every choice of kernel and parts that it offers is right; operands that it
cannot take are refused in words; sizes of 0 are no special case. The tuner
measures those choices. It needs a GPU that has kernels.
"""

import csv
import os
import pathlib
import subprocess
import sys

import jax.numpy as jnp
import numpy as np
from absl.testing import absltest, parameterized
from harness import machine
from harness.machine import ARCH, PLATFORM

import jax
from jax._src.aiter.gemm import op as gemm_op
from jaxlib import gpu_aiter

ROOT = pathlib.Path(__file__).absolute().parents[2]
MODULE = gpu_aiter.load(PLATFORM)
NT, NN, TN = "nt", "nn", "tn"
NONE, ROW, BLOCK, MX, BLOCK_T = "none", "row", "block", "mx", "block_t"
NAMES = {"bfloat16": "bf16", "int8": "i8", "float8_e4m3fn": "e4m3fn",
         "float8_e4m3fnuz": "e4m3fnuz", "uint8": "e2m1"}
ABSENT = np.zeros(0, np.float32)


def call(a, b, a_scale=ABSENT, b_scale=ABSENT, bias=ABSENT, *, out=None,
         out_dtype=jnp.bfloat16, room=0, workspace_dtype=jnp.float32,
         layout=NT, scaling=NONE, activation="none", kernel="", splits=0):
  """The handler's result; `room` is the workspace's elements."""
  if out is None:
    out = (a.shape[-1] if layout == TN else a.shape[-2],
           b.shape[-2] if layout == NT else b.shape[-1])
  results = (jax.ShapeDtypeStruct(out, out_dtype),
             jax.ShapeDtypeStruct((room,), workspace_dtype))
  fn = jax.jit(lambda *args: jax.ffi.ffi_call(
      gpu_aiter.target(PLATFORM, "gemm"), results)(
          *args, layout=layout, scaling=scaling, activation=activation,
          kernel=kernel, splits=np.int32(splits))[0])
  return jax.device_get(fn(a, b, a_scale, b_scale, bias))


def problem(layout, scaling, dtype, m, n, k):
  """Operands and scales of small numbers, and their product in float64."""
  rng = np.random.default_rng(0)
  a = rng.integers(-3, 4, (m, k)).astype(np.float64)
  b = rng.integers(-3, 4, (n, k)).astype(np.float64)
  if scaling == NONE:
    want = a @ b.T
    return [(a.T if layout == TN else a).astype(dtype),
            (b if layout == NT else b.T).astype(dtype)], want
  rows, cols = {ROW: (1, k), MX: (1, 32)}.get(scaling, (128, 128))
  a_power = rng.integers(-2, 3, (m, -(-k // cols)))
  b_power = rng.integers(-2, 3, (-(-n // rows), -(-k // cols)))
  spread = lambda power, rows: 2.0 ** power.repeat(rows, 0).repeat(cols, 1)
  want = (a * spread(a_power, 1)[:, :k]) @ (
      b * spread(b_power, rows)[:n, :k]).T
  if scaling == MX:
    scales = (a_power + 127).astype(np.uint8), (b_power + 127).astype(np.uint8)
    return [packed(a), packed(b), *scales], want
  scales = [(2.0 ** power).astype(np.float32) for power in (a_power, b_power)]
  if scaling == ROW:
    scales = [scale[:, 0] for scale in scales]
  elif scaling == BLOCK_T:
    scales = [np.ascontiguousarray(scale.T) for scale in scales]
  return [a.astype(dtype), b.astype(dtype), *scales], want


def packed(numbers):
  """Integers from -3 to 3 as e2m1, two a byte, the first in the low bits."""
  nibbles = np.array([0, 2, 4, 5], np.uint8)[np.abs(numbers).astype(int)]
  nibbles += (8 * (numbers < 0)).astype(np.uint8)
  return nibbles[:, ::2] | nibbles[:, 1::2] << 4


class HandlerTest(parameterized.TestCase):

  @parameterized.named_parameters(
      ("nt", NT, NONE, jnp.bfloat16, 5, 72, 520),
      ("nt_odd", NT, NONE, jnp.bfloat16, 5, 67, 520),
      ("nt_unaligned", NT, NONE, jnp.bfloat16, 5, 67, 515),
      ("nn", NN, NONE, jnp.bfloat16, 33, 72, 136),
      ("tn", TN, NONE, jnp.bfloat16, 40, 72, 99),
      ("row_i8", NT, ROW, jnp.int8, 5, 64, 528),
      ("row_fn", NT, ROW, jnp.float8_e4m3fn, 5, 64, 528),
      ("row_fnuz", NT, ROW, jnp.float8_e4m3fnuz, 5, 64, 528),
      ("block", NT, BLOCK, jnp.float8_e4m3fn, 5, 64, 640),
      ("block_fnuz", NT, BLOCK_T, jnp.float8_e4m3fnuz, 5, 64, 600),
      ("mx", NT, MX, jnp.uint8, 5, 64, 576))
  def test_every_choice(self, layout, scaling, dtype, m, n, k):
    args, want = problem(layout, scaling, dtype, m, n, k)
    name = NAMES[np.dtype(dtype).name]
    features = [feature for feature in (layout, scaling.removesuffix("_t"))
                if feature not in (NT, NONE)]
    room = 3 * m * n
    choices = MODULE.gemm_choices(ARCH, name, [m, n, k, 1, 4 * room], features)
    self.assertNotEmpty(choices)
    for kernel, splits in choices:
      # Small numbers and powers of two: every sum is exact in float32.
      got = call(*args, room=room, out_dtype=jnp.float32, layout=layout,
                 scaling=scaling, kernel=kernel, splits=splits)
      np.testing.assert_array_equal(got, want, f"{kernel} in {splits}")

  # A simulated GPU would take minutes for so many tiles.
  @machine.where(PLATFORM == "cuda")
  @parameterized.parameters(
      (NT, NONE, jnp.bfloat16, 5208), (NN, NONE, jnp.float16, 5208),
      (TN, NONE, jnp.bfloat16, 5208), (NT, ROW, jnp.int8, 5208),
      (NT, ROW, jnp.float8_e4m3fn, 5208), (NT, BLOCK, jnp.float8_e4m3fn, 5208),
      (NT, NONE, jnp.bfloat16, 5203), (NT, NONE, jnp.bfloat16, 72))
  def test_turns_of_tiles(self, layout, scaling, dtype, n):
    """More tiles than multiprocessors, the last turn's whole and divided."""
    m, k = 712, 1040
    args, want = problem(layout, scaling, dtype, m, n, k)
    names = {**NAMES, "float16": "fp16"}
    features = [feature for feature in (layout, scaling)
                if feature not in (NT, NONE)]
    room = gemm_op.workspace(1, m, n, k)
    choices = MODULE.gemm_choices(
        ARCH, names[np.dtype(dtype).name], [m, n, k, 1, 4 * room], features)
    bias = np.arange(n, dtype=np.float32) % 7 - 3
    args = [*args, *[ABSENT] * (4 - len(args))]
    for kernel, splits in choices:
      if splits not in (1, 3):
        continue
      for out_dtype, tail, activation, result in (
          (jnp.float32, ABSENT, "none", want),
          (jnp.bfloat16, bias, "relu", np.maximum(want + bias, 0))):
        got = call(*args, tail, room=room, out_dtype=out_dtype,
                   layout=layout, scaling=scaling, activation=activation,
                   kernel=kernel, splits=splits)
        np.testing.assert_array_equal(
            got, result.astype(np.float32).astype(out_dtype),
            f"{kernel} in {splits}")

  def test_batches_share(self):
    rng = np.random.default_rng(0)
    a = rng.integers(-3, 4, (3, 5, 64)).astype(jnp.bfloat16)
    b = rng.integers(-3, 4, (3, 43, 64)).astype(jnp.bfloat16)
    for x, y in ((a, b), (a[0], b), (a, b[0]), (a, b[:, :40])):
      got = call(x, y, out=(3, 5, y.shape[-2]), out_dtype=jnp.float32)
      want = np.float64(x) @ np.swapaxes(np.float64(y), -1, -2)
      np.testing.assert_array_equal(got, want)

  def test_empty(self):
    a, b = np.zeros((4, 0), jnp.bfloat16), np.zeros((24, 0), jnp.bfloat16)
    bias = np.arange(24, dtype=np.float32) - 7
    got = call(a, b, bias=bias, activation="relu")
    np.testing.assert_array_equal(got, np.maximum([bias] * 4, 0))
    for m, n in ((0, 24), (4, 0), (0, 0)):
      a, b = np.zeros((m, 16), np.int8), np.zeros((n, 16), np.int8)
      scales = np.ones(m, np.float32), np.ones(n, np.float32)
      self.assertEqual(call(a, b, *scales, scaling=ROW).shape, (m, n))

  def test_refusals(self):
    bf16 = lambda *shape: np.zeros(shape, jnp.bfloat16)
    f32 = lambda *shape: np.zeros(shape, np.float32)
    i8 = lambda *shape: np.zeros(shape, np.int8)
    u8 = lambda *shape: np.zeros(shape, np.uint8)
    for says, args, options in (
        ("layout is tt, but must be nt or nn or tn", (bf16(4, 8), bf16(4, 8)),
         {"layout": "tt", "out": (4, 4)}),
        ("scaling is rows, but must be none or row or block or block_t or mx",
         (bf16(4, 8), bf16(4, 8)), {"scaling": "rows"}),
        ("activation is swish, but must be none or relu or gelu or gelu_tanh"
         " or silu", (bf16(4, 8), bf16(4, 8)), {"activation": "swish"}),
        ("a has dtype int32", (np.zeros((4, 8), np.int32), bf16(4, 8)), {}),
        ("a_type is fp32, but must be fp16 or bf16", (f32(4, 8), f32(4, 8)),
         {}),
        ("a has dtype uint8, but must have dtype float16, bfloat16 or float32",
         (u8(4, 8), u8(4, 8)), {}),
        ("b_type is fp32, but must be a_type's", (bf16(4, 8), f32(4, 8)), {}),
        ("b has dtype bfloat16, but must have dtype int8, float8_e4m3fn,"
         " float8_e4m3fnuz or uint8",
         (i8(4, 8), bf16(4, 8), f32(1), f32(1)), {"scaling": ROW}),
        ("a_type is i8, but must be e2m1 with e8m0 scales",
         (i8(4, 8), i8(4, 8), u8(4, 1), u8(4, 1)), {"scaling": MX}),
        ("out has dtype int8, but must have dtype float16",
         (bf16(4, 8), bf16(4, 8)), {"out_dtype": jnp.int8}),
        ("a has shape [2,2,4,8], but must have rank 2, or 3 with a batch",
         (bf16(2, 2, 4, 8), bf16(4, 8)), {}),
        ("b has shape [4,9], but must have as many elements to sum as a of"
         " shape [4,8]", (bf16(4, 8), bf16(4, 9)), {}),
        ("b has shape [3,4,8], but must have the batch of a of shape [2,4,8]",
         (bf16(2, 4, 8), bf16(3, 4, 8)), {}),
        ("out has shape [4,5], but must have shape [4,4]",
         (bf16(4, 8), bf16(4, 8)), {"out": (4, 5)}),
        ("out has shape [4,4], but must have shape [2,4,4]",
         (bf16(2, 4, 8), bf16(4, 8)), {"out": (4, 4)}),
        ("a_scale is given, but must be absent without scaling",
         (bf16(4, 8), bf16(4, 8), f32(4)), {}),
        ("a_scale has dtype int8, but must have dtype float32",
         (i8(4, 8), i8(4, 8), i8(4), f32(4)), {"scaling": ROW}),
        ("b_scale has shape [3], but must have shape [4]",
         (i8(4, 8), i8(4, 8), f32(1), f32(3)), {"scaling": ROW}),
        ("a_scale has shape [4,1], but must have shape [4,2]",
         (i8(4, 129), i8(4, 129), f32(4, 1), f32(1, 2)), {"scaling": BLOCK}),
        ("b_scale has shape [1,2], but must have shape [2,1]",
         (i8(4, 129), i8(4, 129), f32(2, 4), f32(1, 2)), {"scaling": BLOCK_T}),
        ("a_scale has dtype float32, but must have dtype uint8",
         (u8(4, 16), u8(4, 16), f32(4, 1), u8(4, 1)), {"scaling": MX}),
        ("b_scale has shape [4,2], but must have shape [4,1]",
         (u8(4, 16), u8(4, 16), u8(4, 1), u8(4, 2)), {"scaling": MX}),
        ("bias has shape [3], but must have shape [4]",
         (bf16(4, 8), bf16(4, 8), ABSENT, ABSENT, f32(3)), {}),
        ("bias has dtype int8, but must have dtype bfloat16",
         (bf16(4, 8), bf16(4, 8), ABSENT, ABSENT, i8(4)), {}),
        ("workspace has dtype int8, but must have dtype float32",
         (bf16(4, 8), bf16(4, 8)), {"workspace_dtype": jnp.int8}),
        ("layout is kNN, but must be kNT with scaling",
         (i8(4, 8), i8(8, 4), f32(1), f32(1)), {"scaling": ROW, "layout": NN}),
        ("kernel is nobody, but must be one of this build",
         (bf16(4, 8), bf16(4, 8)), {"kernel": "nobody"}),
        ("splits is 3, but must be so few", (bf16(4, 8), bf16(4, 8)),
         {"splits": 3, "room": 2 * 16}),
    ):
      with self.subTest(says):
        options = {"out": (4, 4)} | options
        with self.assertRaises(Exception) as raised:
          call(*args, **options)
        self.assertIn(says, str(raised.exception))
        self.assertIn("INVALID_ARGUMENT", str(raised.exception))

  def test_buffers_are_counted(self):
    """A target takes the buffers that its list has, no fewer and no more."""
    a = np.zeros((4, 8), jnp.bfloat16)
    none = jax.ShapeDtypeStruct((0,), jnp.float32)
    out = jax.ShapeDtypeStruct((4, 4), jnp.bfloat16)
    for says, operands, results in (
        ("gemm has 4 operands, but must have 5", 4, (out, none)),
        ("gemm has 6 operands, but must have 5", 6, (out, none)),
        ("gemm has 1 results, but must have 2", 5, (out,)),
    ):
      args = (a, a, *(ABSENT,) * (operands - 2))
      fn = jax.jit(lambda *args, results=results: jax.ffi.ffi_call(
          gpu_aiter.target(PLATFORM, "gemm"), results)(
              *args, layout=NT, scaling=NONE, activation="none", kernel="",
              splits=np.int32(0)))
      with self.assertRaisesRegex(Exception, says):
        jax.block_until_ready(fn(*args))

  def test_tuner(self):
    folder = pathlib.Path(self.create_tempdir().full_path)
    (folder / "shapes.csv").write_text(
        "op,dtype,m,n,k\ngemm_nt,bf16,4,64,512\ngemm_row,i8,4,64,256\n")
    key = f"gemm_nt,{ARCH},bf16,4,64,512"
    (folder / "out.csv").write_text(
        f"# kept\nop,arch,dtype,m,n,k,tile,splits,us\n{key},replaced,9,1.0\n"
        "gemm_nt,gfx000,bf16,4,64,512,stays,9,1.0\n")
    done = subprocess.run(
        [sys.executable, ROOT / "benchmarks/tune_gemm.py", "--shapes",
         folder / "shapes.csv", "--out", folder / "out.csv", "--most", "3",
         "--seconds", "0.01", "--copies", "2"],
        env=os.environ | {
            "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
        capture_output=True, text=True, check=False)
    self.assertEqual(done.returncode, 0, done.stdout + done.stderr)
    self.assertIn("<- the library's", done.stdout)
    self.assertNotIn("WRONG", done.stdout)
    text = (folder / "out.csv").read_text()
    self.assertStartsWith(text, "# kept\n")
    rows = list(csv.DictReader(text.splitlines()[1:]))
    self.assertEqual([(row["op"], row["arch"]) for row in rows], sorted([
        ("gemm_nt", ARCH), ("gemm_nt", "gfx000"), ("gemm_row", ARCH)]))
    tiles = {f"{k['tile_m']}x{k['tile_n']}x{k['tile_k']}"
             for k in MODULE.table()}
    for row in rows:
      self.assertIn(row["tile"], tiles | {"stays"})


if __name__ == "__main__":
  absltest.main()
