# SPDX-License-Identifier: Apache-2.0
"""Kernel or reference: the one place where a call meets its platform.

A call becomes an FFI call on ROCm and CUDA and the reference elsewhere. The
choice is staged with the computation, so a program can be exported for a
platform which the exporting machine does not have. A GPU that no kernel serves
(no plugin module, no code object for its architecture) and arguments that none
serves (float32) run the reference too, after one warning.
"""

from __future__ import annotations

import functools
import warnings

import jax.numpy as jnp
import numpy as np

import jax
from jax import lax
from jax._src.aiter import reference
from jax._src.aiter.types import Config, Grads, Operands, Saved, Wanted
from jaxlib import gpu_aiter

PLATFORMS = ("rocm", "cuda")
_DTYPES = {"float16": "fp16", "bfloat16": "bf16"}
_ALIGNMENT = 8  # of head dims, in elements; the kernels load 16 bytes


def platforms_enabled() -> tuple[str, ...]:
  """GPU platforms that JAX's settings do not rule out in this process."""
  allowed = jax.config.jax_platforms
  if not allowed:
    return PLATFORMS
  names = allowed.split(",")
  return tuple(p for p in PLATFORMS if p in names or "gpu" in names)


@functools.cache
def architectures(platform: str) -> tuple[str, ...]:
  """Architectures of this process's devices: ("gfx942",), ("sm_90",), ()."""
  if platform not in platforms_enabled():
    return ()
  try:
    devices = jax.local_devices(backend=platform)
  except RuntimeError:
    return ()
  found = []
  for device in devices:
    name = str(device.compute_capability).split(":")[0]
    if platform == "cuda":
      name = "sm_" + name.replace(".", "")
    if name not in found:
      found.append(name)
  return tuple(found)


@functools.cache
def _warn_once(reason: str) -> None:
  warnings.warn(
      f"jax.experimental.aiter: {reason}; the reference in jax.numpy runs"
      " instead, correct but slower", RuntimeWarning, stacklevel=3)


def features(cfg: Config, x: Operands, wanted: Wanted | None = None,
             dlse: bool = False) -> tuple[str, ...]:
  """What a call asks of a kernel, by the names that `_aiter` knows."""
  length_limits = x.cu_seqlens_q is not None or x.cu_seqlens_k is not None
  asked = dict(
      bias=x.bias is not None,
      bias_f32=x.bias is not None and x.bias.dtype != x.q.dtype,
      alibi=x.alibi_slopes is not None, sink=x.sink is not None,
      dropout=x.dropout_state is not None,
      cu_seqlens=length_limits and not x.packed,
      top_left=cfg.top_left, soft_cap=cfg.logits_soft_cap > 0,
      sink_tokens=cfg.sink_tokens > 0,
      window=cfg.window_left >= 0 or cfg.window_right >= 0,
      min_seqlen=cfg.min_seqlen_q > 0, dlse=dlse)
  if wanted is not None:
    asked.update(wanted._asdict())
  return tuple(name for name, on in asked.items() if on)


@functools.cache
def _unserved(platform: str, backward: bool, dtype: str, packed: bool,
              hdim_q: int, hdim_v: int, asked: tuple[str, ...]) -> str | None:
  """Why the devices of this process cannot run a kernel for a call, or None."""
  archs = architectures(platform)
  if dtype not in _DTYPES:
    return f"no {platform} kernel for dtype {dtype}, only for {list(_DTYPES)}"
  if not archs:
    return None  # Staged for another machine: its handler will tell.
  module = gpu_aiter.load(platform)
  if module is None:
    extra = {"rocm": "rocm7", "cuda": "cuda13"}[platform]
    return (f"the {platform} plugin has no module _aiter"
            f" (install jax_aiter[{extra}])")
  for arch in archs:
    try:
      module.mha_kernels(backward, arch, _DTYPES[dtype], packed, hdim_q, hdim_v,
                         list(asked))
    except ValueError as e:
      return f"no {platform} kernel for this call on {arch}: {e}"
  return None


def _round_up(n: int) -> int:
  return -(-n // _ALIGNMENT) * _ALIGNMENT


def _serves(platform: str, backward: bool, x: Operands, asked) -> bool:
  """Whether to stage a kernel for the platform; warns where one is missed."""
  reason = _unserved(
      platform, backward, x.q.dtype.name, x.packed, _round_up(x.q.shape[-1]),
      _round_up(x.v.shape[-1]), asked)
  if reason and architectures(platform):
    _warn_once(reason)
  return reason is None


def _dispatch(backward: bool, x: Operands, asked, kernel, fallback, *args):
  """Stages kernel(platform, *args) where one is, fallback(*args) elsewhere."""
  if any(t.size == 0 for t in (x.q, x.k, x.v)) or x.batch == 0:
    return fallback(*args)
  branches = {
      p: functools.partial(kernel, p) for p in platforms_enabled()
      if _serves(p, backward, x, asked)}
  if not branches:
    return fallback(*args)
  return lax.platform_dependent(*args, default=fallback, **branches)


def _absent(t, dtype):
  return jnp.zeros((0,), dtype) if t is None else t


def _aligned(t):
  """t with its last axis padded to a multiple that the kernels can load."""
  missing = _round_up(t.shape[-1]) - t.shape[-1]
  if not missing:
    return t
  return jnp.pad(t, [(0, 0)] * (t.ndim - 1) + [(0, missing)])


def _flat(x: Operands):
  """The FFI operands of a call, in order."""
  return (
      _aligned(x.q), _aligned(x.k), _aligned(x.v),
      *(_absent(t, jnp.int32) for t in x[3:7]),
      _absent(x.bias, x.q.dtype), _absent(x.alibi_slopes, jnp.float32),
      _absent(x.sink, jnp.float32), _absent(x.dropout_state, jnp.uint32))


def _attributes(cfg: Config):
  return dict(
      softmax_scale=np.float32(cfg.softmax_scale),
      logits_soft_cap=np.float32(cfg.logits_soft_cap),
      dropout_p=np.float32(cfg.dropout_p),
      window_left=np.int64(cfg.window_left),
      window_right=np.int64(cfg.window_right),
      sink_tokens=np.int64(cfg.sink_tokens), top_left=bool(cfg.top_left),
      min_seqlen_q=np.int64(cfg.min_seqlen_q),
      deterministic=bool(cfg.deterministic))


def _like(t, shape, dtype):
  """Result type of a shape and dtype that varies over t's manual mesh axes."""
  return jax.typeof(t).update(shape=tuple(shape), dtype=jnp.dtype(dtype),
                              weak_type=False)


def _lse_shape(x: Operands):
  if x.packed:
    return x.q.shape[1], x.q.shape[0]
  return x.q.shape[0], x.q.shape[2], x.q.shape[1]


def mha_fwd(cfg: Config, x: Operands) -> tuple[jax.Array, jax.Array]:
  """Attention output and log-sum-exp, as `reference.mha_fwd`."""
  def kernel(platform, x):
    flat = _flat(x)
    q, v = flat[0], flat[2]
    out, lse = jax.ffi.ffi_call(
        gpu_aiter.target(platform, "mha_fwd"),
        (_like(q, (*q.shape[:-1], v.shape[-1]), q.dtype),
         _like(q, _lse_shape(x), jnp.float32)),
    )(*flat, **_attributes(cfg))
    return out[..., :x.v.shape[-1]], lse

  return _dispatch(False, x, features(cfg, x), kernel,
                   functools.partial(reference.mha_fwd, cfg), x)


def mha_bwd(cfg: Config, wanted: Wanted, x: Operands, saved: Saved) -> Grads:
  """Gradients, as `reference.mha_bwd`."""
  def kernel(platform, x, saved):
    flat = _flat(x)
    q, k, v = flat[:3]
    none = _like(q, (0,), jnp.float32)
    dq, dk, dv, dbias, dsink, dslopes, _ = jax.ffi.ffi_call(
        gpu_aiter.target(platform, "mha_bwd"),
        (_like(q, q.shape, q.dtype), _like(k, k.shape, k.dtype),
         _like(v, v.shape, v.dtype),
         _like(q, x.bias.shape, jnp.float32) if wanted.dbias else none,
         _like(q, x.sink.shape, jnp.float32) if wanted.dsink else none,
         _like(q, saved.lse.shape, jnp.float32) if wanted.dslopes else none,
         _like(q, saved.lse.shape, jnp.float32)),
    )(_aligned(saved.dout), q, k, v, _aligned(saved.out), saved.lse,
      _absent(saved.dlse, jnp.float32), *flat[3:], **_attributes(cfg))
    return Grads(
        dq[..., :x.q.shape[-1]], dk[..., :x.k.shape[-1]],
        dv[..., :x.v.shape[-1]], dbias if wanted.dbias else None,
        dsink if wanted.dsink else None, dslopes if wanted.dslopes else None)

  return _dispatch(
      True, x, features(cfg, x, wanted, saved.dlse is not None), kernel,
      functools.partial(reference.mha_bwd, cfg, wanted), x, saved)


# A program that was exported elsewhere calls its targets without being traced
# here, so they are registered as soon as this module is imported.
for _platform in platforms_enabled():
  gpu_aiter.load(_platform)
