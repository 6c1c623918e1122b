# SPDX-License-Identifier: Apache-2.0
"""Attention's FFI calls, or the reference where no kernel serves one."""

from __future__ import annotations

import functools

import jax.numpy as jnp
import numpy as np

import jax
from jax._src.aiter.attention import reference
from jax._src.aiter.attention.types import (
  Config,
  Grads,
  Operands,
  Saved,
  Wanted,
)
from jax._src.aiter.core import dispatch
from jax._src.aiter.core.dispatch import absent, like
from jaxlib import gpu_aiter

_DTYPES = {"float16": "fp16", "bfloat16": "bf16"}
dispatch.declare("mha_fwd", "mha_bwd")
_ALIGNMENT = 8  # of head dims, in elements; the kernels load 16 bytes


def features(cfg: Config, x: Operands, wanted: Wanted | None = None,
             dlse: bool = False) -> tuple[str, ...]:
  """What a call asks of a kernel, by its family's names."""
  length_limits = x.cu_seqlens_q is not None or x.cu_seqlens_k is not None
  asked = dict(
      varlen=x.packed, bias=x.bias is not None,
      bias_f32=x.bias is not None and x.bias.dtype != x.q.dtype,
      alibi=x.alibi_slopes is not None, sink=x.sink is not None,
      dropout=x.dropout_state is not None,
      cu_seqlens=length_limits and not x.packed,
      top_left=cfg.top_left, soft_cap=cfg.logits_soft_cap > 0,
      sink_tokens=cfg.sink_tokens > 0,
      window=cfg.window_left >= 0 or cfg.window_right >= 0,
      min_seqlen=cfg.min_seqlen_q > 0, dlse=dlse)
  if wanted is not None:
    asked.update(dbias=wanted.dbias, dsink=wanted.dsink)
  return tuple(name for name, on in asked.items() if on)


@functools.cache
def _unserved(platform: str, backward: bool, dtype: str,
              hdim_q: int, hdim_v: int, asked: tuple[str, ...]) -> str | None:
  """Why the devices of this process cannot run a kernel for a call, or None."""
  return dispatch.unserved(
      platform, dtype, _DTYPES, lambda module, arch, name: module.kernels(
          "mha_bwd" if backward else "mha_fwd", arch, name, [hdim_q, hdim_v],
          asked))


def _round_up(n: int) -> int:
  return -(-n // _ALIGNMENT) * _ALIGNMENT


def _dispatch(backward: bool, x: Operands, asked, kernel, fallback, *args):
  """Stages kernel(platform, *args) where one is, fallback(*args) elsewhere."""
  if any(t.size == 0 for t in (x.q, x.k, x.v)) or x.batch == 0:
    return fallback(*args)
  return dispatch.dispatch(
      lambda platform: _unserved(
          platform, backward, x.q.dtype.name,
          _round_up(x.q.shape[-1]), _round_up(x.v.shape[-1]), asked),
      kernel, fallback, *args)


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
      *(absent(t, jnp.int32) for t in x[3:7]),
      absent(x.bias, x.q.dtype), absent(x.alibi_slopes, jnp.float32),
      absent(x.sink, jnp.float32), absent(x.dropout_state, jnp.uint32))


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
        (like(q, (*q.shape[:-1], v.shape[-1]), q.dtype),
         like(q, _lse_shape(x), jnp.float32)),
    )(*flat, **_attributes(cfg))
    return out[..., :x.v.shape[-1]], lse

  return _dispatch(False, x, features(cfg, x), kernel,
                   functools.partial(reference.mha_fwd, cfg), x)


def mha_bwd(cfg: Config, wanted: Wanted, x: Operands, saved: Saved) -> Grads:
  """Gradients, as `reference.mha_bwd`."""
  def kernel(platform, x, saved):
    flat = _flat(x)
    q, k, v = flat[:3]
    none = like(q, (0,), jnp.float32)
    dq, dk, dv, dbias, dsink, dslopes, _ = jax.ffi.ffi_call(
        gpu_aiter.target(platform, "mha_bwd"),
        (like(q, q.shape, q.dtype), like(k, k.shape, k.dtype),
         like(v, v.shape, v.dtype),
         like(q, x.bias.shape, jnp.float32) if wanted.dbias else none,
         like(q, x.sink.shape, jnp.float32) if wanted.dsink else none,
         like(q, saved.lse.shape, jnp.float32) if wanted.dslopes else none,
         like(q, saved.lse.shape, jnp.float32)),
    )(_aligned(saved.dout), q, k, v, _aligned(saved.out), saved.lse,
      absent(saved.dlse, jnp.float32), *flat[3:], **_attributes(cfg))
    return Grads(
        dq[..., :x.q.shape[-1]], dk[..., :x.k.shape[-1]],
        dv[..., :x.v.shape[-1]], dbias if wanted.dbias else None,
        dsink if wanted.dsink else None, dslopes if wanted.dslopes else None)

  return _dispatch(
      True, x, features(cfg, x, wanted, saved.dlse is not None), kernel,
      functools.partial(reference.mha_bwd, cfg, wanted), x, saved)
