# SPDX-License-Identifier: Apache-2.0
"""Writes into paged KV caches by their definition: loops over tokens, in NumPy.

Functions change their arrays in place, token by token. Rounding to 8 bits is
the quantisers' oracle.
"""

import ml_dtypes
import numpy as np
from quant import oracle

E5M2 = oracle.Format(2, 15, 0x7C, 0x7F, 0x80)
LARGEST = {**oracle.LARGEST, "float8_e5m2": 57344.0}


def round_to(x, kind):
  """float32 -> a kind, saturating."""
  if kind == "float8_e5m2":
    return E5M2.round(x).view(ml_dtypes.float8_e5m2)
  return oracle.round_to(x, kind)


def number(codes, kind):
  """A kind -> float32."""
  if kind == "float8_e5m2":
    return E5M2.value(codes.view(np.uint8)).astype(np.float32)
  return oracle.value(codes, kind).astype(np.float32)


def quotient(x, scale):
  """x / scale, rounded to float32 once."""
  with np.errstate(all="ignore"):
    return np.asarray(x, np.float32) / np.asarray(scale, np.float32)


def scale_of(x, kind, floor=1e-10, power=False):
  """The scale of some numbers."""
  amax = oracle.amax(np.ravel(x), 0)[0]
  amax = np.float32(floor) if amax < np.float32(floor) else amax
  scale = amax / np.float32(LARGEST[kind])
  if power and np.isfinite(scale):
    fraction, exponent = np.frexp(scale)
    scale = np.ldexp(np.float32(1), exponent - (fraction == 0.5))
  return np.float32(scale)


def encoded(x, cache, scale=None):
  """Numbers as a cache holds them."""
  kind = cache.dtype.name
  if kind not in LARGEST or x.dtype == cache.dtype:
    return x.astype(cache.dtype)
  x = x.astype(np.float32)
  return round_to(x if scale is None else quotient(x, scale), kind)


def k_view(layout, k_cache, page, offset):
  """A token's keys [heads, d] in a cache, as a view."""
  if layout == "NHD":
    return k_cache[page, offset]
  if layout == "HND":
    return k_cache[page, :, offset]
  if layout == "interleaved":
    return k_cache[page, offset, :, 0]
  return k_cache[page, :, :, offset]  # x, asm: [heads, d / x, x]


def v_view(layout, k_cache, v_cache, page, offset):
  """A token's values [heads, d] in a cache, as a view."""
  if layout == "NHD":
    return v_cache[page, offset]
  if layout == "HND":
    return v_cache[page, :, offset]
  if layout == "interleaved":
    return k_cache[page, offset, :, 1]
  if layout == "x":
    return v_cache[page, :, :, offset]
  x = v_cache.shape[-1]
  return v_cache[page, :, offset // x, :, offset % x]


def shapes(layout, pages, size, heads, d, dv, dtype):
  """Shapes of both caches; None for one that is not."""
  x = 16 // np.dtype(dtype).itemsize
  k_x = (pages, heads, d // x, size, x)
  return {
      "NHD": ((pages, size, heads, d), (pages, size, heads, dv)),
      "HND": ((pages, heads, size, d), (pages, heads, size, dv)),
      "x": (k_x, (pages, heads, dv, size)),
      "asm": (k_x, (pages, heads, size // x, dv, x)),
      "interleaved": ((pages, size, heads, 2, d), None),
  }[layout]


def places(slots, pages, size):
  """(token, page, offset) of each token that is stored, in order."""
  for token, slot in enumerate(slots):
    if 0 <= slot < pages * size:
      yield token, int(slot) // size, int(slot) % size


def write(layout, key, value, k_cache, v_cache, slots, size, k_scale=None,
          v_scale=None):
  """Keys and values with given scales, one or one a head, or none."""
  by_head = lambda s: None if s is None else np.reshape(s, (-1, 1))
  for token, page, offset in places(slots, len(k_cache), size):
    at = k_view(layout, k_cache, page, offset)
    at[...] = encoded(key[token], k_cache, by_head(k_scale)).reshape(at.shape)
    at = v_view(layout, k_cache, v_cache, page, offset)
    at[...] = encoded(value[token], k_cache, by_head(v_scale))


def write_by_token(layout, key, value, k_cache, v_cache, k_scales, v_scales,
                   slots, size):
  """Keys and values with a scale for each token and head."""
  kind = k_cache.dtype.name
  for token, page, offset in places(slots, len(k_cache), size):
    for rows, at, scales in (
        (key, k_view(layout, k_cache, page, offset), k_scales),
        (value, v_view(layout, k_cache, v_cache, page, offset), v_scales)):
      for head, x in enumerate(rows[token].astype(np.float32)):
        scale = scale_of(x, kind)
        at[head] = round_to(quotient(x, scale), kind).reshape(at[head].shape)
        if layout == "asm":
          scales[page, head, offset] = scale
        else:
          scales[head, page * size + offset] = scale


def write_by_block(layout, key, value, k_cache, v_cache, k_scales, v_scales,
                   slots, size, block):
  """Keys and values with a scale for each block of slots and head."""
  kind = k_cache.dtype.name
  last = {}  # slot -> the last token that it is given
  for token, page, offset in places(slots, len(k_cache), size):
    last[page * size + offset] = token
  for number_of in sorted({slot // block for slot in last}):
    own = range(number_of * block, (number_of + 1) * block)
    new = [slot for slot in own if slot in last]
    for rows, view, scales in (
        (key, lambda *p: k_view(layout, k_cache, *p), k_scales),
        (value, lambda *p: v_view(layout, k_cache, v_cache, *p), v_scales)):
      for head in range(rows.shape[1]):
        at = (number_of, head) if layout == "asm" else (head, number_of)
        x = {s: rows[last[s], head].astype(np.float32) for s in new}
        old, scale = scales[at], scale_of(list(x.values()), kind)
        if own[0] not in last:
          scale = old if old > scale else scale
          if old != scale:
            for slot in own:
              held = view(slot // size, slot % size)[head]
              with np.errstate(all="ignore"):
                moved = quotient(number(held, kind) * old, scale)
              held[...] = round_to(moved, kind)
        scales[at] = scale
        for slot in new:
          held = view(slot // size, slot % size)[head]
          held[...] = round_to(quotient(x[slot], scale), kind).reshape(
              held.shape)


def write_latent(kv_c, k_pe, cache, slots, size, first, scale=None):
  """Latent vectors and, at column `first`, rotated keys."""
  for token, page, offset in places(slots, len(cache), size):
    for x, at in ((kv_c, 0), (k_pe, first)):
      cache[page, offset, at:at + x.shape[1]] = encoded(x[token], cache, scale)


def write_segments(kv_c, k_pe, cache, slots, size, scale=None):
  """Pages of latent vectors, then rotated keys."""
  lora, rope = kv_c.shape[1], k_pe.shape[1]
  for token, page, offset in places(slots, len(cache), size):
    at = offset * lora
    cache[page, at:at + lora] = encoded(kv_c[token], cache, scale)
    at = size * lora + offset * rope
    cache[page, at:at + rope] = encoded(k_pe[token], cache, scale)


def write_indexer(k, cache, slots, group, kind, power=False, tiles=False):
  """Float8 bytes of a page's tokens, then their float32 scales."""
  pages, size, _ = cache.shape
  d = k.shape[1]
  flat = cache.reshape(pages, -1)
  for token, page, offset in places(slots, pages, size):
    for g in range(d // group):
      x = k[token, g * group:(g + 1) * group].astype(np.float32)
      scale = scale_of(x, kind, 1e-4, power)
      codes = round_to(quotient(x, scale), kind).view(np.uint8)
      for i, code in enumerate(codes):
        c = g * group + i
        at = offset * d + c
        if tiles:
          at = (offset // 16 * (d // 16) + c // 16) * 256 + (
              offset % 16 * 16 + c % 16)
        flat[page, at] = code
      at = size * d + 4 * (offset * (d // group) + g)
      flat[page, at:at + 4] = np.array([scale]).view(np.uint8)
