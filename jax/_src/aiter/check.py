# SPDX-License-Identifier: Apache-2.0
"""Says what is installed and which kernels run, and checks their numbers."""

from __future__ import annotations

import functools
import importlib.metadata
import time
import warnings
from collections.abc import Callable
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np

import jax
from jax._src.aiter.attention import api as mha
from jax._src.aiter.attention import op as mha_op
from jax._src.aiter.attention.types import Config, Operands, Wanted
from jax._src.aiter.core import dispatch
from jax._src.aiter.gemm import api as gemm
from jax._src.aiter.gemm import op as gemm_op
from jax._src.aiter.norm import api as norm
from jax._src.aiter.norm import op as norm_op
from jax._src.aiter.quant import api as quant
from jaxlib import gpu_aiter

_PACKAGES = ("jax", "jaxlib", "jax_aiter", "jax-rocm7-plugin",
             "jax-cuda13-plugin", "jax_aiter_rocm7", "jax_aiter_cuda13")


class _Check(NamedTuple):
  """One line of the report.

  Attributes:
    name: of the line.
    kernels: (_aiter, architecture, whether backward) -> names of the kernels;
      None if there is no such direction, ValueError if none serves.
    call: what is checked, of `arrays`.
    formula: the same of arrays in float32.
    arrays: a tree.
  """
  name: str
  kernels: Callable[..., list[str] | None]
  call: Callable[..., Any]
  formula: Callable[..., Any]
  arrays: Any


def _normal(*shapes):
  keys = jax.random.split(jax.random.key(0), len(shapes))
  return [jax.random.normal(key, shape, jnp.bfloat16)
          for key, shape in zip(keys, shapes)]


def _with_gradients(fn):
  """(cotangent, *args) -> fn's results and gradients."""
  def run(cotangent, *args):
    out, vjp = jax.vjp(fn, *args)
    return out, vjp(cotangent)
  return run


def _attention(name: str, dqk: int, dv: int, **options) -> _Check:
  packed = options.pop("packed", False)
  b, sq, sk, hq, hk = 2, 200, 250, 4, 2
  lead_q, lead_k = ((b * sq,), (b * sk,)) if packed else ((b, sq), (b, sk))
  x = Operands(*(np.zeros((0,) * (3 if packed else 4), jnp.bfloat16),) * 3)
  lengths = ()
  fn = mha.flash_attn_func
  if packed:
    fn = mha.flash_attn_varlen
    lengths = jnp.array([0, 150, b * sq]), jnp.array([0, 100, b * sk])
  if options.get("dropout_p"):
    options["dropout_key"] = jax.random.key(1)
    x = x._replace(dropout_state=np.zeros(0, np.uint32))
  cfg = Config(
      1.0, logits_soft_cap=options.get("logits_soft_cap", 0.0),
      window_right=0 if options.get("causal") else -1,
      window_left=options.get("window_size", (-1,))[0])

  def kernels(module, arch, backward):
    asked = mha_op.features(cfg, x, Wanted() if backward else None)
    return module.kernels("mha_bwd" if backward else "mha_fwd", arch, "bf16",
                          [dqk, dv], asked)

  # float32 has no kernel: its call is the reference.
  call = _with_gradients(lambda *t: fn(*t, *lengths, **options))
  return _Check(name, kernels, call, call, _normal(
      (*lead_q, hq, dv), (*lead_q, hq, dqk), (*lead_k, hk, dqk),
      (*lead_k, hk, dv)))


def _norm(function: str, cols: int = 4096) -> _Check:
  layer, add = function.startswith("layer"), "add" in function
  rows = _normal((64, cols), (64, cols), (64, cols), (64, cols))
  weights = _normal((cols,), (cols,))

  def formula(x, *rest):
    residual, rest = (rest[0], rest[1:]) if add else (None, rest)
    gamma, beta = (*rest, None)[:2]
    out = norm_op.reference_fwd(
        norm_op.Config(layer, 1e-5), norm_op.Rows(x, residual, gamma, beta))
    return (out.y, out.residual_out) if add else out.y

  return _Check(
      function,
      lambda module, arch, backward: module.kernels(
          "norm_bwd" if backward else "norm_fwd", arch, "bf16", [cols]),
      _with_gradients(functools.partial(getattr(norm, function), epsilon=1e-5)),
      _with_gradients(formula),
      [tuple(rows[2:]) if add else rows[2], *rows[:1 + add],
       *weights[:1 + layer]])


def _norm_quant(cols: int = 4096) -> _Check:
  cfg = norm_op.Config(False, 1e-6)

  def call(x, gamma):
    q, scale = norm.rms_norm_quant(x, gamma)
    return q.astype(jnp.float32) * scale

  return _Check(
      "rms_norm_quant, int8",
      lambda module, arch, backward: None if backward
      else module.kernels("norm_quant", arch, "bf16", [cols]),
      call,
      lambda x, gamma: norm_op.reference_fwd(
          cfg, norm_op.Rows(x, None, gamma, None)).y,
      _normal((64, cols), (cols,)))


def _gemm(rows: int) -> _Check:
  n, k = 1024, 512

  def kernels(module, arch, backward):
    products = ((["nn"], rows, k, n), (["tn"], n, k, rows)) if backward else (
        ([], rows, n, k),)
    return [name for layout, *sizes in products for name in module.kernels(
        "gemm", arch, "bf16", [*sizes, 1, gemm_op.split_bound(1, *sizes)],
        layout)]

  # float32 has no kernel: its call is the reference.
  call = _with_gradients(functools.partial(gemm.gemm, activation="gelu"))
  return _Check(f"gemm, {rows} rows", kernels, call, call,
                _normal((rows, n), (rows, k), (n, k), (n,)))


def _gemm_quant(function: str, dtype: str) -> _Check:
  """Of small integers, which every type has."""
  m, n, k = 64, 1024, 512

  def quantised(t):
    if dtype == "e2m1":
      return quant.mx_quant(t)
    name = {"i8": jnp.int8, "e4m3fn": jnp.float8_e4m3fn,
            "e4m3fnuz": jnp.float8_e4m3fnuz}[dtype]
    return t.astype(name), jnp.full(t.shape[:1], 0.5, jnp.float32)

  def call(a, b):
    (a, a_scale), (b, b_scale) = quantised(a), quantised(b)
    return getattr(gemm, function)(a, b, a_scale, b_scale)

  return _Check(
      f"{function}, {dtype}",
      lambda module, arch, backward: None if backward else module.kernels(
          "gemm", arch, dtype, [m, n, k, 1, gemm_op.split_bound(1, m, n, k)],
          ["mx" if dtype == "e2m1" else "row"]),
      call,
      lambda a, b: a @ b.T * (1 if dtype == "e2m1" else 0.25),
      [jnp.clip(jnp.round(t), -3, 3) for t in _normal((m, k), (n, k))])


def _quantiser(function: str, per: str, block_shape=None, **options) -> _Check:
  """Of small integers, of which the formats hold all but a rounding."""
  rows, cols = 256, 4096

  def call(x):
    q, scale = getattr(quant, function)(x, **options)
    return quant.dequant(q, scale, block_shape=block_shape)

  return _Check(
      function,
      lambda module, arch, backward: None if backward
      else module.kernels("quant", arch, "bf16", [cols],
                          [] if per == "row" else [per]),
      call, lambda x: x,
      [jnp.clip(jnp.round(t), -3, 3) for t in _normal((rows, cols))])


def _checks() -> list[_Check]:
  return [
      _attention("causal, D 64", 64, 64, causal=True),
      _attention("causal, D 128", 128, 128, causal=True),
      _attention("causal, D 256", 256, 256, causal=True),
      _attention("causal, D 192/128", 192, 128, causal=True),
      _attention("window 64", 128, 128, window_size=(64, 0)),
      _attention("packed", 128, 128, causal=True, packed=True),
      _attention("soft cap, dropout", 128, 128, logits_soft_cap=20.0,
                 dropout_p=0.1),
      _norm("rms_norm"),
      _norm("rms_norm_with_add"),
      _norm("layer_norm"),
      _norm("layer_norm_with_add"),
      _norm_quant(),
      _gemm(512),
      _gemm(4),
      _gemm_quant("gemm_i8", "i8"),
      _gemm_quant("gemm_fp8", "e4m3fn"),
      _gemm_quant("gemm_fp8", "e4m3fnuz"),
      _gemm_quant("gemm_fp4", "e2m1"),
      _quantiser("per_token_quant", "row"),
      _quantiser("per_group_quant", "group", (1, 128), quant_dtype="int8"),
      _quantiser("mx_quant", "group", (1, 32)),
      _quantiser("per_block_quant", "block", (128, 128), quant_dtype="int8"),
      _quantiser("per_tensor_quant", "amax"),
  ]


def _describe_packages() -> None:
  for name in _PACKAGES:
    try:
      print(f"  {name:20} {importlib.metadata.version(name)}")
    except importlib.metadata.PackageNotFoundError:
      pass


def _describe_kernels(checks: list[_Check], platform: str, arch: str) -> None:
  module = gpu_aiter.load(platform)
  if module is None:
    print("  kernels: none, the plugin has no module _aiter")
    return
  print("  kernels for:", ", ".join(module.architectures()))
  for check in checks:
    for backward in (False, True):
      try:
        kernels = check.kernels(module, arch, backward)
      except ValueError as e:
        kernels = [f"the reference ({e})"]
      if kernels is not None:
        print(f"    {check.name:20} {'backward' if backward else 'forward':9}",
              ", ".join(kernels))


def _right(check: _Check) -> bool:
  """Compares a call on the default device with its formula in float32."""
  begin = time.perf_counter()
  got = jax.block_until_ready(jax.jit(check.call)(*check.arrays))
  seconds = time.perf_counter() - begin
  with (jax.default_matmul_precision("highest"),
        warnings.catch_warnings(action="ignore")):
    want = jax.jit(check.formula)(*jax.tree.map(
        lambda t: t.astype(jnp.float32), check.arrays))
  worst = 0.0
  for a, b in zip(*(jax.tree.leaves(jax.device_get(t)) for t in (got, want)),
                  strict=True):
    a, b = np.asarray(a, np.float32), np.asarray(b)
    # Relative to the largest value; NaN is worst of all.
    error = np.max(np.abs(a - b)) / np.max(np.abs(b))
    worst = max(worst, np.inf if np.isnan(error) else error)
  good = worst < 0.02
  print(f"    {check.name:20} largest error {worst:.1e}, first call "
        f"{seconds:.2f} s", "" if good else "  WRONG")
  return good


def main() -> int:
  """Prints the report; 0 if all numbers are right, else 1."""
  print("packages")
  _describe_packages()
  device = jax.devices()[0]
  print(f"device\n  {device.platform}: {device.device_kind}, "
        f"{jax.device_count()} of them")
  checks = _checks()
  for platform in dispatch.PLATFORMS:
    for arch in dispatch.architectures(platform):
      print(f"  {platform} {arch}")
      _describe_kernels(checks, platform, arch)
  if not any(dispatch.architectures(p) for p in dispatch.PLATFORMS):
    print("  kernels: none, the reference in jax.numpy runs here")
  print("self-check against the formulas in float32, forward and backward")
  good = list(map(_right, checks))
  print("right" if all(good) else "WRONG", f"({sum(good)} of {len(good)})")
  return 0 if all(good) else 1
