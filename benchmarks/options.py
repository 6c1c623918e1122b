# SPDX-License-Identifier: Apache-2.0
"""Times every operator's options, each beside the plain call of the operator.

  python options.py                     all of them
  python options.py --only paged        those whose name has the text
  python options.py --smoke             tiny sizes, on any platform

Other benchmarks vary sizes; this one varies everything else: head dimensions,
types, layouts, features, one at a time. Prints what a call does in a second,
bytes or operations, and its share of what the operator's first line does; what
is far below it has no kernel of its own. Writes options.csv to --out.
"""

import functools
import sys
from collections.abc import Callable, Iterator
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
import report

import jax
from jax.experimental import aiter

LOW = 0.75  # The share below which a line is marked.
BF16 = jnp.bfloat16


class Option(NamedTuple):
  """A call of an operator.

  Attributes:
    name: of what differs from the plain call.
    call: arguments -> results.
    make: key -> arguments.
    work: bytes that pass through memory, or operations.
  """
  name: str
  call: Callable
  make: Callable
  work: float


def normal(key, *shape, dtype=BF16):
  if jnp.issubdtype(dtype, jnp.integer):
    return jax.random.randint(key, shape, -16, 17, dtype)
  return jax.random.normal(key, shape, BF16).astype(dtype)


# -----------------------------------------------------------------------------
# Attention: operations


def attention(small: bool, backward: bool = False) -> Iterator[Option]:
  """Of 4096 queries, forward or with its gradients."""
  batch, s = (1, 64) if small else (2, 4096)

  def option(name, d=128, dv=None, heads=16, kv=None, sq=s, sk=s, share=0.5,
             dtype=BF16, extra=lambda key: (), names=(), learned=False,
             n=batch, **keys):
    dv, kv = dv or d, kv or heads

    def forward(q, k, v, *more):
      return aiter.flash_attn_func(q, k, v, **dict(zip(names, more)), **keys)

    def both(do, *args):
      last = 3 + (len(names) if learned else 0)
      out, back = jax.vjp(lambda *own: forward(*own, *args[last:]),
                          *args[:last])
      return out, back(do)

    def make(key):
      a, b, c, d_, e = jax.random.split(key, 5)
      args = (normal(a, n, sq, heads, d, dtype=dtype),
              normal(b, n, sk, kv, d, dtype=dtype),
              normal(c, n, sk, kv, dv, dtype=dtype), *extra(d_))
      if backward:
        return (normal(e, n, sq, heads, dv, dtype=dtype), *args)
      return args

    flops = 2 * n * heads * sq * sk * share * (
      4 * d + 3 * dv if backward else d + dv)
    return Option(name, both if backward else forward, make, flops)

  causal = functools.partial(option, causal=True)
  yield causal("plain")
  yield option("no mask", share=1)
  for d in (16, 20, 24, 32, 40, 48, 56, 64, 72, 80, 88, 96, 100, 104, 112, 120,
            136, 144, 160, 176, 192, 200, 208, 224, 240, 256):
    yield causal(f"{d} columns", d=d, heads=max(1, 2048 // d))
  for d, dv in ((64, 128), (128, 64), (192, 128), (96, 64), (256, 128)):
    yield causal(f"{d} and {dv} columns", d=d, dv=dv)
  for dtype in (jnp.float16, jnp.float32):
    yield causal(jnp.dtype(dtype).name, dtype=dtype)
  yield causal("2 kv heads", kv=2)
  yield causal("1 kv head", kv=1)
  yield causal("1 head", heads=1, n=batch * 16)
  w = s // 8
  for d in (128, 64, 96, 256):
    own = functools.partial(option, d=d, heads=2048 // d)
    one = functools.partial(own, causal=True)
    of = f", {d} columns"
    heads = 2048 // d
    yield one("soft cap" + of, logits_soft_cap=30.0)
    yield one("window" + of, window_size=(w, 0), share=1 / 8)
    yield own("two-sided window" + of, window_size=(w, w), share=1 / 4)
    yield one("window, leading keys" + of, window_size=(w, 0, 4), share=1 / 8)
    yield one("window, soft cap" + of, window_size=(w, 0), share=1 / 8,
              logits_soft_cap=30.0)
    sink = lambda key, heads=heads: (jax.random.normal(key, (heads,)),)
    yield one("sinks" + of, extra=sink, names=("sink",))
    yield one("sinks, learned" + of, extra=sink, names=("sink",), learned=True)
    yield one("sinks, window" + of, extra=sink, names=("sink",),
              window_size=(w, 0), share=1 / 8)
    slopes = lambda key, heads=heads: (
      jax.random.uniform(key, (heads,), jnp.float32, 0.01, 0.1),)
    yield one("ALiBi" + of, extra=slopes, names=("alibi_slopes",))
    dropped = lambda key: (jax.random.key(0),)
    yield one("dropout" + of, extra=dropped, names=("dropout_key",),
              dropout_p=0.1)
    for shape in ((1, heads, s, s), (1, 1, s, s), (batch, 1, 1, s)):
      bias = lambda key, shape=shape: (normal(key, *shape),)
      yield one(f"bias {list(shape)}" + of, extra=bias, names=("bias",))
      yield one(f"bias {list(shape)}, learned" + of, extra=bias,
                names=("bias",), learned=True)
      both = lambda key, shape=shape: (normal(key, *shape), jax.random.key(0))
      yield one(f"bias {list(shape)}, dropout" + of, extra=both,
                names=("bias", "dropout_key"), dropout_p=0.1)
      # Of padding, if one row is for all.
      mask = lambda key, shape=shape: (
        normal(key, *shape) > -2 if shape[2] > 1
        else jnp.broadcast_to(jnp.arange(s) < s * 7 // 8, shape),)
      yield own(f"mask {list(shape)}" + of, extra=mask, names=("mask",),
                share=1)
    if backward:
      yield one("in any order" + of, deterministic=False)
    else:
      yield one("lse" + of, return_lse=True)
    yield one("512 queries" + of, sq=s // 8, share=15 / 16, n=batch * 4)
    yield one("64 queries" + of, sq=s // 64, share=127 / 128, n=batch * 16)


def fp8(small: bool) -> Iterator[Option]:
  """Attention of float8."""
  batch, s, e4m3 = 2, 64 if small else 4096, aiter.float8_dtype()

  def option(name, d=128, heads=16, kv=None, share=0.5, dtype=e4m3, **keys):
    kv = kv or heads

    def make(key):
      a, b, c = jax.random.split(key, 3)
      return (normal(a, batch, s, heads, d, dtype=dtype),
              normal(b, batch, s, kv, d, dtype=dtype),
              normal(c, batch, s, kv, d, dtype=dtype), jnp.ones(1))

    call = lambda q, k, v, one: aiter.flash_attn_fp8_pertensor_func(
      q, k, v, one, one, one, causal=share != 1, **keys)
    return Option(name, call, make, 4 * batch * heads * s * s * share * d)

  yield option("plain")
  yield option("no mask", share=1)
  for d in (32, 64, 72, 80, 96, 112, 160, 192, 256):
    yield option(f"{d} columns", d=d, heads=2048 // d)
  yield option("2 kv heads", kv=2)
  yield option("window", window_size=(s // 8, 0, 0), share=1 / 8)
  yield option("lse", return_lse=True)


def paged(small: bool, prefill: bool = False) -> Iterator[Option]:
  """Decoding, and a few queries a sequence: bytes of the caches.

  prefill: chunks of prompts instead, and operations.
  """
  batch, context = (3, 40) if small else (8 if prefill else 64, 4096)
  usual = context // 8 if prefill else 1

  def option(name, d=128, heads=32, kv=8, page=16, layout="NHD", dtype=BF16,
             q_dtype=BF16, queries=usual, extra=lambda key: (), names=(),
             share=1.0, scales=None, **keys):
    # As much work whatever the head.
    wide = jnp.dtype(dtype).itemsize
    width = heads * d / 4096 if prefill else kv * d / 1024
    n = batch if small else max(1, round(batch / width))
    pages = n * -(-context // page)

    def make(key):
      a, b, c, e = jax.random.split(key, 4)
      x = 16 // wide
      k_shape, v_shape = {
        "NHD": [(pages, page, kv, d)] * 2, "HND": [(pages, kv, page, d)] * 2,
        "x": [(pages, kv, d // x, page, x), (pages, kv, d, page)],
        "asm": [(pages, kv, d // x, page, x),
                (pages, kv, page // x, d, x)],
      }[layout]
      order = np.random.default_rng(0).permutation(pages).reshape(n, -1)
      q = normal(a, n * queries, heads, d, dtype=q_dtype)
      lens = jnp.full(n, context, jnp.int32)
      own = [q, normal(b, *k_shape, dtype=dtype),
             normal(c, *v_shape, dtype=dtype), jnp.asarray(order, jnp.int32),
             lens]
      if queries > 1:
        own.append(jnp.arange(n + 1, dtype=jnp.int32) * queries)
      if scales:
        shape = {"tensor": (1,), "head": (kv,), "token": (pages, kv, page)}
        own += [jnp.full(shape[scales], 0.02, jnp.float32)] * 2
      return (*own, *extra(e))

    def call(q, k, v, table, lens, *more):
      own = dict(keys)
      if queries > 1:
        cu, *more = more
      if scales:
        ks, vs, *more = more
        suffix = "_descale" if queries > 1 else "_scale"
        own |= {f"k{suffix}": ks, f"v{suffix}": vs}
      own |= dict(zip(names, more))
      if queries > 1:
        other = {"logits_soft_cap": "softcap", "sink": "sinks"}
        own = {other.get(name, name): value for name, value in own.items()}
        return aiter.unified_attention(q, k, v, cu, lens, table, layout=layout,
                                       **own)
      return aiter.paged_attention_decode(q, k, v, table, lens, layout=layout,
                                          **own)

    work = 2 * n * context * kv * d * wide
    if prefill:
      work = 4 * n * heads * queries * (context - queries / 2) * d
    return Option(name, call, make, work * share)

  yield option("plain")
  for d in (16, 32, 40, 48, 56, 64, 72, 80, 88, 96, 104, 112, 120, 136, 144,
            160, 176, 192, 208, 224, 240, 256):
    yield option(f"{d} columns", d=d)
  for page in (1, 2, 4, 8, 24, 32, 48, 64, 96, 128, 256):
    yield option(f"pages of {page}", page=page)
  for layout in ("HND", "x", "asm"):
    yield option(layout, layout=layout)
    yield option(f"{layout}, 64 columns", layout=layout, d=64)
  yield option("float16", dtype=jnp.float16, q_dtype=jnp.float16)
  yield option("float32", dtype=jnp.float32, q_dtype=jnp.float32)
  for dtype in (jnp.float8_e4m3fn, jnp.float8_e5m2, jnp.float8_e4m3fnuz,
                jnp.int8):
    name = jnp.dtype(dtype).name
    for scales in ("tensor", "head", "token"):
      yield option(f"{name}, scales a {scales}", dtype=dtype, scales=scales)
    for d in (64, 80, 96, 192, 256):
      yield option(f"{name}, {d} columns", dtype=dtype, scales="tensor", d=d)
    for layout in ("HND", "x", "asm"):
      yield option(f"{name}, {layout}", dtype=dtype, scales="tensor",
                   layout=layout)
      yield option(f"{name}, {layout}, scales a token", dtype=dtype,
                   scales="token", layout=layout)
    yield option(f"{name}, pages of 1", dtype=dtype, scales="tensor", page=1)
    yield option(f"{name}, pages of 64", dtype=dtype, scales="tensor", page=64)
    if not prefill:
      yield option(f"{name}, 4 queries", dtype=dtype, scales="tensor",
                   queries=4)
    yield option(f"{name}, multi-head", dtype=dtype, scales="tensor", heads=8)
  for heads, kv in ((8, 8), (16, 8), (24, 8), (40, 8), (48, 8), (64, 8),
                    (96, 8), (128, 8), (8, 1), (16, 1), (64, 1), (32, 32),
                    (14, 2)):
    yield option(f"{heads} ({kv}) heads", heads=heads, kv=kv)
  for queries in (64, 128, 1024) if prefill else (2, 3, 4, 8, 16, 64):
    yield option(f"{queries} queries", queries=queries)
  for d in (128, 64, 256):
    of = f", {d} columns"
    own = functools.partial(option, d=d)
    yield own("window" + of, window_size=(context // 4, -1), share=1 / 4)
    yield own("soft cap" + of, logits_soft_cap=30.0)
    yield own("sinks" + of, names=("sink",),
              extra=lambda key: (jax.random.normal(key, (32,)),))
    yield own("ALiBi" + of, names=("alibi_slopes",), extra=lambda key: (
      jax.random.uniform(key, (32,), jnp.float32, 0.01, 0.1),))
    yield own("lse" + of, return_lse=True)


def mla(small: bool) -> Iterator[Option]:
  """Latent decoding: bytes of the cache."""
  batch, context = (3, 40) if small else (64, 8192)

  def option(name, heads=16, page=64, dtype=BF16, q_dtype=BF16, queries=1,
             lora=512, rope=64, extra=lambda key: (), names=(), **keys):
    pages = batch * -(-context // page)

    def make(key):
      a, b, c = jax.random.split(key, 3)
      order = np.random.default_rng(0).permutation(pages)
      per = pages // batch
      args = (normal(a, batch * queries, heads, lora + rope, dtype=q_dtype),
              normal(b, pages, page, 1, lora + rope, dtype=dtype),
              jnp.arange(batch + 1, dtype=jnp.int32) * queries,
              jnp.arange(batch + 1, dtype=jnp.int32) * per,
              jnp.asarray(order, jnp.int32),
              jnp.full(batch, context - (per - 1) * page, jnp.int32))
      if jnp.dtype(dtype).itemsize == 1:
        args += (jnp.ones(1),)
      return (*args, *extra(c))

    def call(*args):
      own = dict(keys, kv_lora_rank=lora)
      more = args[6:]
      if jnp.dtype(dtype).itemsize == 1:
        own["kv_scale"], *more = more
      if jnp.dtype(q_dtype).itemsize == 1:
        own["q_scale"] = own["kv_scale"]
      return aiter.mla_decode_fwd(*args[:6], **own, **dict(zip(names, more)))

    return Option(name, call, make, batch * context * (lora + rope) *
                  jnp.dtype(dtype).itemsize)

  yield option("plain")
  for heads in (1, 4, 8, 12, 20, 24, 32, 48, 64, 96, 128):
    yield option(f"{heads} heads", heads=heads)
  for page in (1, 2, 8, 16, 32, 128):
    yield option(f"pages of {page}", page=page)
  for queries in (2, 3, 4, 8):
    yield option(f"{queries} queries", queries=queries)
  yield option("float16", dtype=jnp.float16, q_dtype=jnp.float16)
  for heads in (16, 32, 128):
    yield option(f"float8, {heads} heads", dtype=jnp.float8_e4m3fn,
                 heads=heads)
    yield option(f"float8, queries too, {heads} heads", heads=heads,
                 dtype=jnp.float8_e4m3fn, q_dtype=jnp.float8_e4m3fn)
  yield option("256 and 64 columns", lora=256)
  yield option("384 and 64 columns", lora=384)
  yield option("512 and 32 columns", rope=32)
  yield option("soft cap", logit_cap=30.0)
  yield option("sinks", names=("sink",),
               extra=lambda key: (jax.random.normal(key, (16,)),))
  yield option("lse", return_lse=True)


# -----------------------------------------------------------------------------
# Products: operations


def gemm(small: bool) -> Iterator[Option]:
  """Products with 4096 rows, and with 32."""
  size = 64 if small else 4096
  e4m3 = aiter.float8_dtype()

  def option(name, m=size, n=size, k=size, dtype=BF16, call=aiter.gemm,
             more=lambda key, m, n, k: ()):
    def make(key):
      a, b, c = jax.random.split(key, 3)
      return (normal(a, m, k, dtype=dtype), normal(b, n, k, dtype=dtype),
              *more(c, m, n, k))
    return Option(name, call, make, 2 * m * n * k)

  rows = lambda key, m, n, k: (jnp.ones((m, 1)), jnp.ones((n, 1)))
  one = lambda key, m, n, k: (jnp.ones(1), jnp.ones(1))
  blocks = lambda key, m, n, k: (
    jnp.ones((m, -(-k // 128))), jnp.ones((-(-n // 128), -(-k // 128))))
  bias = lambda key, m, n, k: (normal(key, n),)
  fours = lambda key, m, n, k: (
    jnp.full((m, k // 32), 127, jnp.uint8), jnp.full((n, k // 32), 127,
                                                    jnp.uint8))

  def fp4(a, b, a_scale, b_scale):
    return aiter.gemm_fp4(a, b, a_scale, b_scale)

  for m in (size, 8 if small else 32):
    own = functools.partial(option, m=m)
    of = f", {m} rows"
    yield own("plain" + of)
    yield own("float16" + of, dtype=jnp.float16)
    yield own("float32" + of, dtype=jnp.float32)
    yield own("bias" + of, more=bias)
    for activation in ("gelu", "gelu_tanh", "relu", "silu"):
      yield own(f"bias, {activation}" + of, more=bias,
                call=functools.partial(aiter.gemm, activation=activation))
    yield own("float32 result" + of, call=functools.partial(
      aiter.gemm, preferred_element_type=jnp.float32))
    yield own("transposed result's" + of, call=lambda a, b: jax.vjp(
      aiter.gemm, a, b)[1](jnp.dot(a, b.T)))
    for dtype, call in ((jnp.int8, aiter.gemm_i8), (e4m3, aiter.gemm_fp8)):
      kind = jnp.dtype(dtype).name
      yield own(f"{kind} by rows" + of, dtype=dtype, call=call, more=rows)
      yield own(f"{kind} by tensors" + of, dtype=dtype, call=call, more=one)
    yield own("float8 by blocks" + of, dtype=e4m3,
              call=aiter.gemm_a8w8_blockscale, more=blocks)

    def make(key, m=m):
      draw = lambda rows: jax.random.randint(
        key, (rows, size // 2), 0, 256, jnp.int32).astype(jnp.uint8)
      return draw(m), draw(size), *fours(key, m, size, size)

    yield Option("mxfp4" + of, fp4, make, 2 * m * size * size)
    for n, k in ((size + 8, size), (size, size + 8), (size + 1, size),
                 (size, size + 1)):
      yield own(f"{n} columns, {k} summed" + of, n=n, k=k)


def gmm(small: bool) -> Iterator[Option]:
  """Grouped products of 8 groups."""
  m, n, k, g = (64, 64, 64, 4) if small else (16384, 4096, 4096, 8)
  sizes = lambda: jnp.full(g, m // g, jnp.int32)
  e4m3 = aiter.float8_dtype()

  def option(name, call, dtype=BF16, n=n, k=k, more=lambda: (), shape=None,
             weight=None):
    def make(key):
      a, b = jax.random.split(key)
      return (normal(a, m, k, dtype=dtype),
              normal(b, *(shape or (g, k, n)), dtype=weight or dtype), sizes(),
              *more())
    return Option(name, call, make, 2 * m * n * k)

  yield option("plain", aiter.ragged_dot)
  yield option("transposed", functools.partial(aiter.ragged_dot,
               transpose_rhs=True), shape=(g, n, k))
  yield option("float16", aiter.ragged_dot, jnp.float16)
  yield option("float32", aiter.ragged_dot, jnp.float32)
  yield option("float32 result", functools.partial(
    aiter.ragged_dot, preferred_element_type=jnp.float32))
  yield option("bias, SiLU", lambda a, b, s, bias: aiter.ragged_dot(
    a, b, s, bias=bias, activation=jax.nn.silu), more=lambda: (
      jnp.ones((g, n), BF16),))
  yield option("tgmm", lambda a, b, s, c: aiter.tgmm(a.T, c, s, BF16),
               more=lambda: (jnp.ones((m, n), BF16),))
  for dn, dk in ((n - 8, k), (n, k - 8), (n - 40, k - 24)):
    yield option(f"{dn} columns, {dk} summed", aiter.ragged_dot, n=dn, k=dk,
                 shape=(g, dk, dn))
  for dtype, call in ((jnp.int8, aiter.grouped_gemm_i8),
                      (e4m3, aiter.grouped_gemm_fp8)):
    yield option(
      f"{jnp.dtype(dtype).name} by rows",
      lambda a, b, s, x, y, call=call: call(a, b, x, y, s), dtype,
      shape=(g, n, k), more=lambda: (jnp.ones((m, 1)), jnp.ones((g, n))))
  yield option(
    "float8 by blocks",
    lambda a, b, s, x, y: aiter.grouped_gemm_fp8(a, b, x, y, s), e4m3,
    shape=(g, n, k), more=lambda: (
      jnp.ones((m, -(-k // 128))), jnp.ones((g, -(-n // 128), -(-k // 128)))))


# -----------------------------------------------------------------------------
# What memory bounds: bytes


def norm(small: bool) -> Iterator[Option]:
  """Norms of 128 Mi elements."""
  total = 2**12 if small else 2**27

  def option(name, call, cols=4096, dtype=BF16, moved=2.0, more=0,
             weights=1):
    cols = min(cols, 256) if small else cols
    rows = max(1, total // cols)

    def make(key):
      xs = [normal(k, rows, cols, dtype=dtype)
            for k in jax.random.split(key, 1 + more)]
      return (*xs, *[jnp.ones(cols, dtype)] * weights)

    return Option(name, call, make,
                  rows * cols * jnp.dtype(dtype).itemsize * moved)

  def back(f):
    return lambda x, *w: jax.vjp(f, x, *w)[1](x)

  yield option("plain", aiter.rms_norm)
  for cols in (64, 100, 128, 256, 384, 768, 1000, 1536, 2000, 3072, 4097, 5120,
               6144, 7168, 8192, 10240, 12288, 14336, 16384, 18432, 24576,
               32768, 50000, 65536, 131072):
    yield option(f"{cols} columns", aiter.rms_norm, cols)
    yield option(f"gradient, {cols} columns", back(aiter.rms_norm), cols,
                 moved=3)
    yield option(f"layer_norm, {cols} columns", aiter.layer_norm, cols,
                 weights=2)
    yield option(f"layer_norm, gradient, {cols} columns",
                 back(aiter.layer_norm), cols, moved=3, weights=2)
  for dtype in (jnp.float16, jnp.float32):
    name = jnp.dtype(dtype).name
    yield option(name, aiter.rms_norm, dtype=dtype)
    yield option(f"{name}, gradient", back(aiter.rms_norm), dtype=dtype,
                 moved=3)
    yield option(f"{name}, layer_norm", aiter.layer_norm, dtype=dtype,
                 weights=2)
  yield option("gemma", functools.partial(aiter.rms_norm, gemma=True))
  yield option("t5", functools.partial(aiter.rms_norm, t5=True))
  for cols in (1000, 4096, 7168, 18432):
    of = f", {cols} columns"
    yield option("add" + of, aiter.rms_norm_with_add, cols, moved=4, more=1)
    yield option("layer_norm, add" + of, aiter.layer_norm_with_add, cols,
                 moved=4, more=1, weights=2)
    for dtype in (jnp.int8, aiter.float8_dtype()):
      kind = jnp.dtype(dtype).name
      q = lambda f, dtype=dtype: functools.partial(f, quant_dtype=dtype)
      yield option(f"quant to {kind}" + of, q(aiter.rms_norm_quant), cols,
                   moved=1.5)
      yield option(f"add, quant to {kind}" + of,
                   q(aiter.rms_norm_with_add_quant), cols, moved=3.5, more=1)
      yield option(f"layer_norm, quant to {kind}" + of,
                   q(aiter.layer_norm_quant), cols, moved=1.5, weights=2)


def quant(small: bool) -> Iterator[Option]:
  """Quantisers of 64 Mi elements."""
  total = 2**12 if small else 2**26

  def option(name, call, cols=8192, dtype=BF16, moved=1.5):
    cols = min(cols, 256) if small else cols
    rows = max(1, total // cols)
    return Option(name, call, lambda key: (normal(key, rows, cols,
                                                  dtype=dtype),),
                  rows * cols * jnp.dtype(dtype).itemsize * moved)

  fp8 = aiter.float8_dtype()
  kinds = {
    "token": aiter.per_token_quant, "tensor": aiter.per_tensor_quant,
    "group": aiter.per_group_quant, "block": aiter.per_block_quant,
  }
  yield option("plain", functools.partial(aiter.per_token_quant,
                                          quant_dtype=fp8))
  for kind, f in kinds.items():
    for out in (fp8, jnp.int8):
      for cols in (128, 640, 1024, 2880, 4096, 5120, 7168, 8192, 14336, 18432,
                   32768):
        if out != fp8 and cols != 7168:
          continue
        yield option(f"{kind} to {jnp.dtype(out).name}, {cols} columns",
                     functools.partial(f, quant_dtype=out), cols)
  for size in (32, 64):
    yield option(f"groups of {size}", functools.partial(
      aiter.per_group_quant, group_size=size, quant_dtype=fp8))
  yield option("group, transposed scales", functools.partial(
    aiter.per_group_quant, quant_dtype=fp8, transpose_scale=True))
  for kind, moved in (("mxfp4", 1.25), (fp8, 1.5)):
    of = kind if kind == "mxfp4" else "mxfp8"
    for cols in (1024, 2880, 7168, 8192, 18432):
      yield option(f"{of}, {cols} columns", functools.partial(
        aiter.mx_quant, quant_dtype=kind), cols, moved=moved)
    yield option(f"{of}, shuffled scales", functools.partial(
      aiter.mx_quant, quant_dtype=kind, shuffle_scale=True), moved=moved)
  for dtype in (jnp.float16, jnp.float32):
    item = jnp.dtype(dtype).itemsize
    for kind, f in kinds.items():
      yield option(f"{kind}, of {jnp.dtype(dtype).name}", functools.partial(
        f, quant_dtype=fp8), dtype=dtype, moved=1 + 1 / item)


def rope(small: bool) -> Iterator[Option]:
  """Rotations of 64 Mi elements."""
  s, total = (16, 2**13) if small else (4096, 2**26)

  def option(name, d=128, d_rot=None, layout="bshd", dtype=BF16, two=False,
             back=False, extra=lambda b, s: {}, wide=False, **keys):
    heads = 16
    b = max(1, total // (s * heads * d))
    d_rot = d_rot or d
    first = (b, s) if layout != "sbhd" else (s, b)
    if layout == "thd":
      first = (b * s,)

    def make(key):
      x = normal(key, *first, heads, d, dtype=dtype)
      angles = jax.random.normal(key, (s, d_rot if wide else d_rot // 2))
      return x, jnp.cos(angles), jnp.sin(angles), extra(b, s)

    def call(x, cos, sin, more):
      if two:
        return aiter.rope_2c(x, x, cos, sin, layout=layout, **keys, **more)
      f = lambda x: aiter.rope(x, cos, sin, layout=layout, **keys, **more)
      return jax.vjp(f, x)[1](x)[0] if back else f(x)

    return Option(name, call, make, 2 * b * s * heads * d * (1 + two) *
                  jnp.dtype(dtype).itemsize)

  yield option("plain")
  for style in ("neox", "gptj"):
    own = functools.partial(option, rotate_style=style)
    of = f", {style}"
    for d in (32, 40, 64, 72, 80, 96, 112, 128, 160, 192, 256):
      yield own(f"{d} columns" + of, d)
    for d, d_rot in ((128, 64), (128, 32), (80, 32), (192, 64), (256, 64)):
      yield own(f"{d_rot} of {d} columns" + of, d, d_rot)
      yield own(f"{d_rot} of {d} columns, the last" + of, d, d_rot,
                nope_first=True)
    yield own("gradient" + of, back=True)
    yield own("float16" + of, dtype=jnp.float16)
    yield own("float32" + of, dtype=jnp.float32)
    yield own("sbhd" + of, layout="sbhd")
    yield own("positions" + of, extra=lambda b, s: {
      "positions": jnp.tile(jnp.arange(s, dtype=jnp.int32), (b, 1))})
    yield own("thd" + of, layout="thd", extra=lambda b, s: {
      "cu_seqlens": jnp.arange(b + 1, dtype=jnp.int32) * s})
    yield own("two tensors" + of, two=True)
    yield own("tables d wide" + of, wide=True, reuse_freqs_front_part=False)


def activation(small: bool) -> Iterator[Option]:
  """Gated activations of 64 Mi results."""
  total = 2**12 if small else 2**26

  def option(name, f, cols=8192, dtype=BF16, moved=3.0, pair=False, back=False):
    cols = min(cols, 256) if small else cols
    rows = max(1, total // cols)

    def make(key):
      if pair:
        return tuple(normal(k, rows, cols, dtype=dtype)
                     for k in jax.random.split(key))
      return (normal(key, rows, 2 * cols, dtype=dtype),)

    def call(*xs):
      if not back:
        return f(*xs)
      out, pull = jax.vjp(f, *xs)
      return pull(out)

    return Option(name, call, make,
                  rows * cols * jnp.dtype(dtype).itemsize * moved)

  fp8 = aiter.float8_dtype()
  functions = ("silu", "gelu", "gelu_tanh", "swiglu")
  yield option("plain", aiter.silu_and_mul)
  for name in functions:
    f = getattr(aiter, f"{name}_and_mul")
    for cols in (100, 333, 768, 1536, 2880, 4096, 11008, 14336, 28672):
      yield option(f"{name}, {cols} columns", f, cols)
    yield option(f"{name}, gradient", f, back=True, moved=7)
    for cols in (100, 333):
      yield option(f"{name}, gradient, {cols} columns", f, cols, back=True,
                   moved=7)
    yield option(f"{name}, two arrays", f, pair=True)
    yield option(f"{name}, two arrays, gradient", f, pair=True, back=True,
                 moved=7)
    for dtype in (jnp.float16, jnp.float32):
      yield option(f"{name}, {jnp.dtype(dtype).name}", f, dtype=dtype)
    q = getattr(aiter, f"{name}_and_mul_quant")
    for cols in (768, 2880, 7168, 14336, 28672):
      yield option(f"{name}, quant by token, {cols} columns",
                   functools.partial(q, quant_dtype=fp8), cols, moved=2.5)
    yield option(f"{name}, quant to int8", functools.partial(
      q, quant_dtype=jnp.int8), moved=2.5)
    yield option(f"{name}, quant by group", functools.partial(
      q, quant_dtype=fp8, group_size=128), moved=2.5)
    yield option(f"{name}, mxfp4", functools.partial(
      q, quant_dtype="mxfp4"), moved=2.25)
  yield option("silu, limit", functools.partial(aiter.silu_and_mul, limit=7.0))
  yield option("gelu_fast", aiter.gelu_fast, moved=4)


def cache(small: bool) -> Iterator[Option]:
  """Writes of 65536 tokens."""
  tokens, page = (32, 16) if small else (65536, 16)
  pages = tokens // page

  def option(name, d=128, heads=8, layout="NHD", dtype=BF16, moved=None,
             source=BF16, **keys):
    wide = jnp.dtype(dtype).itemsize

    def make(key):
      a, b = jax.random.split(key)
      x = 16 // wide
      shapes = {
        "NHD": [(pages, page, heads, d)] * 2,
        "HND": [(pages, heads, page, d)] * 2,
        "x": [(pages, heads, d // x, page, x), (pages, heads, d, page)],
        "asm": [(pages, heads, d // x, page, x),
                (pages, heads, page // x, d, x)],
      }[layout]
      slots = np.random.default_rng(0).permutation(pages)[:, None] * page
      slots = (slots + np.arange(page)).reshape(-1)
      return (normal(a, tokens, heads, d, dtype=source),
              normal(b, tokens, heads, d, dtype=source),
              *(jnp.zeros(s, dtype) for s in shapes),
              jnp.asarray(slots, jnp.int32))

    call = functools.partial(aiter.write_kv_cache, layout=layout, **keys)
    item = jnp.dtype(source).itemsize
    return Option(name, call, make, 2 * tokens * heads * d * (item + wide))

  yield option("plain")
  eight = dict(k_scale=0.02, v_scale=0.03)
  for layout in ("NHD", "HND", "x", "asm"):
    for d in (64, 80, 96, 128, 192, 256):
      yield option(f"{layout}, {d} columns", d, layout=layout)
      yield option(f"{layout}, {d} columns, float8", d, layout=layout,
                   dtype=jnp.float8_e4m3fn, **eight)
    yield option(f"{layout}, 1 head", heads=1, layout=layout)
    yield option(f"{layout}, 32 heads", heads=32, layout=layout)
  yield option("float32", dtype=jnp.float32, source=jnp.float32)


def sampling(small: bool) -> Iterator[Option]:
  """Tokens of 128 rows of logits."""
  cols = 1000 if small else 131072

  def option(name, call, rows=128, cols=cols, dtype=jnp.float32, more=()):
    make = lambda key: (normal(key, rows, cols, dtype=dtype), *more)
    return Option(name, call, make, rows * cols * jnp.dtype(dtype).itemsize)

  key = jax.random.key(0)
  draw = lambda **keys: lambda x: aiter.sample(x, key, **keys)
  yield option("plain", aiter.greedy_sample)
  for rows in (8, 128):
    for dtype in (jnp.float32, BF16):
      own = functools.partial(option, rows=rows, dtype=dtype)
      of = f", {rows} rows of {jnp.dtype(dtype).name}"
      yield own("greedy" + of, aiter.greedy_sample)
      yield own("temperature" + of, draw(temperature=0.7))
      for k in (1, 20, 50, 256, 1000):
        yield own(f"top_k {k}" + of, draw(top_k=k))
        yield own(f"lax's top_k {k}" + of, lambda x, k=k: aiter.top_k(x, k))
      yield own("top_p 0.9" + of, draw(top_p=0.9))
      yield own("top_p 0.5" + of, draw(top_p=0.5))
      yield own("min_p 0.1" + of, draw(min_p=0.1))
      yield own("top_k 50, top_p 0.9" + of, draw(top_k=50, top_p=0.9))
      yield own("top_k 50, top_p 0.9, in order" + of,
                draw(top_k=50, top_p=0.9, order="top_k_first"))
      yield own("all" + of, draw(top_k=50, top_p=0.9, min_p=0.05))
  for width in (999 if small else 32000, 500 if small else 50257,
                700 if small else 262144):
    yield option(f"{width} columns, greedy", aiter.greedy_sample, cols=width)
    yield option(f"{width} columns, top_k 50, top_p 0.9",
                 draw(top_k=50, top_p=0.9), cols=width)
    yield option(f"{width} columns, top_p 0.9", draw(top_p=0.9), cols=width)


def routing(small: bool) -> Iterator[Option]:
  """Choice and order of experts of 8192 tokens: bytes of the logits."""
  tokens = 20 if small else 8192

  def option(name, call, experts=256, dtype=jnp.float32):
    make = lambda key: (normal(key, tokens, experts, dtype=dtype),)
    return Option(name, call, make,
                  tokens * experts * jnp.dtype(dtype).itemsize)

  yield option("plain", lambda x: aiter.topk_softmax(x, 8))
  for experts in (8, 32, 64, 72, 128, 160, 384, 512):
    for k in (1, 2, 4, 6, 8):
      yield option(f"{experts} experts, {k}",
                   lambda x, k=k: aiter.topk_softmax(x, k), experts)
  yield option("bfloat16", lambda x: aiter.topk_softmax(x, 8), dtype=BF16)
  yield option("sigmoid", lambda x: aiter.topk_sigmoid(x, 8))
  yield option("gating", lambda x: aiter.topk_gating(x, 8))
  yield option("grouped", lambda x: aiter.grouped_topk(x, 8, 8, 4, True))
  yield option("biased grouped", lambda x: aiter.biased_grouped_topk(
    x, jnp.ones(256), 8, 8, 4, True))
  ids = lambda x: jax.lax.top_k(x, 8)[1].astype(jnp.int32)

  def sorted_(name, call, experts=256):
    make = lambda key: (ids(normal(key, tokens, experts)),)
    return Option(name, call, make, tokens * 8 * 4)

  for experts in (64, 256):
    yield sorted_(f"sorting, {experts} experts", lambda x, n=experts:
                  aiter.moe_sorting(x, jnp.ones(x.shape, jnp.float32), n, 128,
                                    BF16), experts)
    yield sorted_(f"aligning, {experts} experts", lambda x, n=experts:
                  aiter.moe_align_block_size(x, n, 64), experts)


OPERATORS = {
  "attention": attention,
  "attention, both": functools.partial(attention, backward=True),
  "fp8": fp8, "paged": paged,
  "prefill": functools.partial(paged, prefill=True), "mla": mla,
  "gemm": gemm, "gmm": gmm,
  "norm": norm, "quant": quant, "rope": rope, "activation": activation,
  "cache": cache, "sampling": sampling, "routing": routing,
}
COUNTS = ("attention", "attention, both", "fp8", "prefill", "gemm", "gmm")


def measure(option: Option, seconds: float) -> float:
  """Seconds of a call."""
  sets = [option.make(jax.random.key(seed)) for seed in range(2)]
  took, result = report.time_in_turn(
    lambda *args: option.call(*args), sets, seconds)
  jax.block_until_ready(result)
  return took


def chosen(operator: str, only: list[str], small: bool) -> list[Option]:
  """An operator's plain call and the options that were asked for, if any."""
  first, *rest = OPERATORS[operator](small)
  if small:
    rest = rest[:: max(1, len(rest) // 2)]
  wanted = [o for o in (first, *rest) if not only or any(
    text in f"{operator}: {o.name}" for text in only)]
  return wanted if wanted[:1] in ([], [first]) else [first, *wanted]


def main() -> int:
  flags = report.parser(__doc__, "options", dtypes=("bfloat16",))
  flags.add_argument("--only", action="append", default=[],
                     help="operators and options whose name has the text")
  args = report.told(flags)
  print(report.title(args.dtype))
  found, wrong = [], []
  lines = [["operator", "option", "us", "a second", "of plain"]]
  for operator in OPERATORS:
    unit, one = ("TFLOP/s", 1e12) if operator in COUNTS else ("GB/s", 1e9)
    plain = None
    for option in chosen(operator, args.only, args.smoke):
      name = f"{operator}: {option.name}"
      try:
        took = measure(option, args.seconds)
      except Exception as e:  # noqa: BLE001, of any type, from any operator
        wrong.append(f"{name}: {(str(e).splitlines() or [''])[0][:150]}")
        continue
      rate = option.work / took
      plain = plain or rate
      share = rate / plain
      found.append({
        "operator": operator, "option": option.name, "us": took * 1e6,
        "rate": rate / one, "unit": unit, "share": share})
      lines.append([operator, option.name, f"{took * 1e6:.1f}",
                    f"{rate / one:.3g} {unit}",
                    f"{share:.2f}{' <' if share < LOW else ''}"])
      print(f"{name:<62}{'  '.join(lines[-1][2:])}", flush=True)
  return report.finish(
    args, "options", found, lines,
    f"<: below {LOW} of the operator's plain call.", wrong)


if __name__ == "__main__":
  sys.exit(main())
