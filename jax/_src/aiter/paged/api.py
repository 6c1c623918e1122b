# SPDX-License-Identifier: Apache-2.0
"""Attention over paged KV caches: public functions.

Pages are shared by all sequences, and a table says which are a sequence's. A
key whose page is absent (an id that is negative or past the last page, or a
table too short for the context) is not attended to, and nothing is read for
it. A query without any key gives 0, and lse -inf (the sink's value, if it has
one). A row of `q` that is of no sequence gives 0 and -inf.
"""

from __future__ import annotations

import functools
import math
from typing import NamedTuple

import jax.numpy as jnp

import jax
from jax._src.aiter.core import arguments
from jax._src.aiter.core.arguments import bad, check_is_array, describe
from jax._src.aiter.core.partition import vary_together
from jax._src.aiter.paged import op
from jax._src.aiter.paged.op import Config, Operands

_FLOATS = ("float16", "bfloat16", "float32")
_BYTES = tuple(op.KINDS)
_FP8 = tuple(kind for kind in op.KINDS if kind != "int8")
_LAYOUTS = ("NHD", "HND", "x", "asm")
_MAX_HEAD_DIM = 256
NO_GRADIENT = "use jax.lax.stop_gradient"


class Names(NamedTuple):
  """What a public function calls itself and its arguments."""
  function: str
  q: str = "q"
  k: str = "k_cache"
  v: str = "v_cache"
  table: str = "block_tables"
  indptr: str = "kv_indptr"
  lengths: str = "context_lens"
  cu_seqlens: str = "cu_seqlens_q"
  softmax_scale: str = "softmax_scale"
  soft_cap: str = "logits_soft_cap"
  window: str = "window_size"
  sinks: str = "sink"
  slopes: str = "alibi_slopes"
  q_scale: str = "q_descale"
  k_scale: str = "k_scale"
  v_scale: str = "v_scale"


# -----------------------------------------------------------------------------
# Checks


def check_array(n: Names, name: str, t, rank: int, dtypes=()) -> None:
  """An error unless it is an array of a rank and, if said, of these dtypes."""
  check_is_array(n.function, name, t, optional=False)
  if dtypes:
    arguments.check_dtype(n.function, name, t, dtypes)
  if t.ndim != rank:
    raise bad(n.function, name, describe(t), f"an array of rank {rank}")


def check_shape(n: Names, name: str, t, shape, meaning: str) -> None:
  if t.shape != tuple(shape):
    raise bad(n.function, name, describe(t),
              f"shape {list(shape)}: {meaning}")


def check_q(n: Names, q) -> None:
  check_array(n, n.q, q, 3, (*_FLOATS, *_FP8))
  if not 1 <= q.shape[2] <= _MAX_HEAD_DIM:
    raise bad(n.function, f"{n.q}'s head dimension", q.shape[2],
              f"1 to {_MAX_HEAD_DIM}")


def _check_caches(n: Names, layout: str, q, k_cache, v_cache) -> None:
  """Caches of a layout with one for K and one for V."""
  names = op.LAYOUTS[layout]
  for name, cache, dims in zip((n.k, n.v), (k_cache, v_cache), names):
    check_array(n, name, cache, len(dims), (*_FLOATS, *_BYTES))
  check_cache_dtype(n, q, k_cache)
  if k_cache.dtype != v_cache.dtype:
    raise bad(n.function, f"{n.v}'s dtype", v_cache.dtype,
              f"{k_cache.dtype}, as {n.k}", TypeError)
  size = lambda i, t: dict(zip(names[i], t.shape))
  k, v = size(0, k_cache), size(1, v_cache)
  d, run = q.shape[2], 16 // k_cache.dtype.itemsize
  offsets = k["offset"]
  if layout in ("x", "asm"):
    check_shape(
        n, n.k, k_cache, (k["page"], k["head"], -(-d // run), offsets, run),
        f"layout {layout} of {d} columns")
    if d % run:
      raise bad(n.function, n.q, describe(q), f"a multiple of {run} columns"
                f" with layout {layout} in {k_cache.dtype}")
  elif k["col"] != d:
    raise bad(n.function, f"{n.k}'s head dimension", k["col"],
              f"{d}, as {n.q}")
  if layout == "asm":
    check_shape(
        n, n.v, v_cache,
        (k["page"], k["head"], -(-offsets // run), v["col"], run),
        f"layout asm, as {n.k}")
    if offsets % run:
      raise bad(n.function, n.k, describe(k_cache),
                f"pages of a multiple of {run} tokens with layout asm")
  else:
    same = [v[i] for i in ("page", "head", "offset")]
    if same != [k["page"], k["head"], offsets]:
      raise bad(n.function, n.v, describe(v_cache),
                f"pages, heads and tokens of a page as {n.k},"
                f" {describe(k_cache)}")
  if not 1 <= v["col"] <= _MAX_HEAD_DIM:
    raise bad(n.function, f"{n.v}'s head dimension", v["col"],
              f"1 to {_MAX_HEAD_DIM}")
  check_heads(n, q, k["head"], n.k)
  if offsets < 1:
    raise bad(n.function, n.k, describe(k_cache), "pages of at least one token")


def check_cache_dtype(n: Names, q, cache) -> None:
  """Numbers of 8 bits go with any queries, others with their own kind."""
  wanted = "bfloat16" if q.dtype.name in _FP8 else q.dtype.name
  if cache.dtype.name not in (*_BYTES, wanted):
    raise bad(n.function, f"{n.k}'s dtype", cache.dtype,
              f"{wanted}, as {n.q}, or " + " or ".join(_BYTES), TypeError)


def check_heads(n: Names, q, heads: int, k_name: str) -> None:
  hq = q.shape[1]
  if hq < 1 or heads < 1 or hq % heads:
    raise bad(n.function, f"heads of {n.q} and {k_name}", f"{hq} and {heads}",
              f"a number of {n.q}'s heads that is a multiple of {k_name}'s")


def integers(n: Names, name: str, t, rank: int):
  """The array in int32."""
  arguments.check_integers(n.function, name, t)
  check_array(n, name, t, rank)
  return jnp.asarray(arguments.int32(t))


def per_head(n: Names, name: str, t, hq: int):
  """float32 [hq], or None."""
  if t is None:
    return None
  check_array(n, name, t, 1, _FLOATS)
  check_shape(n, name, t, (hq,), f"one for each head of {n.q}")
  return t.astype(jnp.float32)


def _scale(n: Names, name: str, scale, layout: str, pages, size: int,
           heads: int):
  """(a scale of dequantisation in float32, the names of its dimensions)."""
  if scale is None:
    return jnp.ones(1, jnp.float32), ()
  scale = jnp.asarray(arguments.operand(n.function, name, scale))
  if scale.dtype.name not in (*_FLOATS, "float64"):
    raise bad(n.function, f"{name}'s dtype", scale.dtype,
              " or ".join(_FLOATS), TypeError)
  scale = scale.astype(jnp.float32)
  sizes = {"page": pages, "head": heads, "offset": size}
  of_tokens = (("head", "page", "offset") if layout == "heads_first"
               else ("page", "head", "offset"))
  accepted = [(), ("head",), ("page", "head"), of_tokens]
  if scale.shape == (1,):
    scale = scale.reshape(())
  for names in accepted:
    if scale.shape == tuple(sizes[name] for name in names):
      return scale.reshape(scale.shape or 1), names
  words = " or ".join(
      str([sizes[name] for name in names]).replace("'", "")
      for names in accepted)
  raise bad(n.function, name, describe(scale),
            f"a number, or shape {words}: one, or one for each head, each page"
            " and head, or each token and head")


def number_scale(n: Names, name: str, scale):
  """float32 [1]: one number; 1 if there is none."""
  scale, names = _scale(n, name, scale, "NHD", 0, 0, 0)
  if names:
    raise bad(n.function, name, describe(scale), "one number")
  return scale


class Static(NamedTuple):
  """What a public function was called with, apart from arrays; hashable."""
  names: Names
  layout: str
  softmax_scale: float | None
  window: tuple[int, int]
  soft_cap: float
  return_lse: bool


def static(n: Names, layout, softmax_scale, window_size, soft_cap, causal,
            return_lse=False) -> Static:
  """Checks everything that is not an array."""
  accepted = "(left, right), integers, each >= 0 or -1 for unbounded"
  left, right = arguments.integers(
      n.function, n.window, window_size, accepted, lambda w: w >= -1)
  left, right = map(arguments.window_side, (left, right))
  if arguments.flag(n.function, "causal", causal):
    right = 0
  if softmax_scale is not None:
    softmax_scale = arguments.number(
        n.function, n.softmax_scale, softmax_scale, "None or a finite number",
        math.isfinite)
  soft_cap = 0.0 if soft_cap is None else soft_cap
  return Static(
      n, layout, softmax_scale, (left, right),
      arguments.number(n.function, n.soft_cap, soft_cap,
                       "0 for none or a number > 0",
                       lambda c: 0 <= c < math.inf),
      arguments.flag(n.function, "return_lse", return_lse))


class Arrays(NamedTuple):
  """Arrays as the public functions have them; an absent one is None.

  With indptr lengths are those of the last pages.
  """
  q: jax.Array
  k_cache: jax.Array
  v_cache: jax.Array
  table: jax.Array
  lengths: jax.Array
  indptr: jax.Array | None = None
  cu_seqlens: jax.Array | None = None
  sinks: jax.Array | None = None
  slopes: jax.Array | None = None
  q_scale: jax.Array | None = None
  k_scale: jax.Array | None = None
  v_scale: jax.Array | None = None


def attend(s: Static, a: Arrays):
  """(out, lse or None) of arrays that are checked here."""
  n = s.names
  needed = (n.q, n.k, n.v, n.table, n.lengths)
  others = (n.indptr, n.cu_seqlens, n.sinks, n.slopes)
  for name, t in zip((*needed, *others), a):
    check_is_array(n.function, name, t, optional=name not in needed)
  for name, t in ((n.q_scale, a.q_scale), (n.k_scale, a.k_scale),
                  (n.v_scale, a.v_scale)):
    arguments.operand(n.function, name, t)
  return _attend(s, a)


@functools.partial(jax.jit, static_argnums=(0,), inline=True)
def _attend(s: Static, a: Arrays):
  return run(s.names.function, *operands(s, a))


def operands(s: Static, a: Arrays) -> tuple[Config, Operands]:
  """The operator's form of arrays, which are checked here."""
  n = s.names
  check_q(n, a.q)
  _check_caches(n, s.layout, a.q, a.k_cache, a.v_cache)
  of = dict(zip(op.LAYOUTS[s.layout][0], a.k_cache.shape))
  sizes = s.layout, of["page"], of["offset"], of["head"]
  hq = a.q.shape[1]
  lengths = integers(n, n.lengths, a.lengths, 1)
  b = lengths.shape[0]
  table = integers(n, n.table, a.table, 2 if a.indptr is None else 1)
  indptr = cu_seqlens = None
  if a.indptr is None:
    if table.shape[0] != b:
      raise bad(n.function, n.table, describe(table),
                f"shape [{b}, n]: a row for each of {n.lengths}")
  else:
    indptr = integers(n, n.indptr, a.indptr, 1)
    check_shape(n, n.indptr, indptr, (b + 1,),
                "where each sequence's pages begin")
  if a.cu_seqlens is None:
    if a.q.shape[0] != b:
      raise bad(n.function, n.lengths, describe(lengths),
                f"shape [{a.q.shape[0]}]: a length for each row of {n.q}")
  else:
    cu_seqlens = integers(n, n.cu_seqlens, a.cu_seqlens, 1)
    check_shape(n, n.cu_seqlens, cu_seqlens, (b + 1,),
           "where each sequence's queries begin")
  k_scale, k_names = _scale(n, n.k_scale, a.k_scale, *sizes)
  v_scale, v_names = _scale(n, n.v_scale, a.v_scale, *sizes)
  k_scale *= number_scale(n, n.q_scale, a.q_scale)
  q = a.q.astype(jnp.bfloat16) if a.q.dtype.name in _FP8 else a.q
  scale = s.softmax_scale
  scale = 1 / math.sqrt(q.shape[2]) if scale is None else scale
  cfg = Config(
      s.layout, of["offset"], scale, seqlen_q=int(cu_seqlens is None),
      window=s.window, soft_cap=s.soft_cap, k_scale=k_names, v_scale=v_names,
      return_lse=s.return_lse, last_pages=indptr is not None)
  return cfg, Operands(
      q, a.k_cache, a.v_cache, k_scale, v_scale, table, indptr, lengths,
      cu_seqlens, per_head(n, n.sinks, a.sinks, hq),
      per_head(n, n.slopes, a.slopes, hq))


def run(function: str, cfg: Config, operands: Operands, attend=op.attend):
  """An operator of op.attend's form, of checked operands."""
  call = arguments.no_gradient(function, NO_GRADIENT)(
      lambda operands: attend(cfg, vary_together(operands)))
  return call(operands)


def _result(s: Static, out, lse):
  return (out, lse) if s.return_lse else out


# -----------------------------------------------------------------------------
# Public functions


def paged_attention_decode(
    q: jax.Array,
    k_cache: jax.Array,
    v_cache: jax.Array,
    block_tables: jax.Array,
    context_lens: jax.Array,
    *,
    softmax_scale: float | None = None,
    layout: str = "NHD",
    window_size: tuple[int, int] = (-1, -1),
    logits_soft_cap: float = 0.0,
    sink: jax.Array | None = None,
    alibi_slopes: jax.Array | None = None,
    k_scale: jax.Array | float | None = None,
    v_scale: jax.Array | float | None = None,
    return_lse: bool = False,
) -> jax.Array | tuple[jax.Array, jax.Array]:
  """One query a sequence, its last token, against the sequence's pages.

  Scores are as in `flash_attn_func`: scaled, capped, then with slopes. Key j of
  sequence i is at `[block_tables[i, j // page_size], j % page_size]` of the
  caches; there are context_lens[i] of them, the query's own too. Layouts are
  those of `write_kv_cache`. A dense cache [b, s, hk, d] is one of b pages of s
  tokens, and its table `jnp.arange(b)[:, None]`.

  Pages of multiples of 64 tokens are read fastest.

  Args:
    q: [b, hq, d], float16, bfloat16, float32 or a float8 type, which is
      computed with as bfloat16. d <= 256.
    k_cache: by the layout, "NHD" [pages, page_size, hk, d]; q's dtype, int8,
      float8_e4m3fn, float8_e4m3fnuz or float8_e5m2. hk divides hq.
    v_cache: likewise, with a head dimension dv <= 256 of its own.
    block_tables: integers [b, n].
    context_lens: integers [b].
    softmax_scale: 1 / sqrt(d) by default.
    layout: "NHD", "HND", "x" or "asm".
    window_size: (left, right); -1 for no bound. A query sees `left` keys before
      its own.
    logits_soft_cap: cap of cap * tanh(score / cap); 0 for none.
    sink: [hq], the logit of a key without a value.
    alibi_slopes: [hq].
    k_scale: scale of dequantisation: a number or float [], [1], [hk],
      [pages, hk] or [pages, hk, page_size]; 1 by default.
    v_scale: likewise.
    return_lse: whether to return the logarithms of the sums too.

  Returns:
    [b, hq, dv] in q's dtype (bfloat16 of float8); with return_lse also float32
    [b, hq].

  Raises:
    TypeError: an argument of the wrong type or dtype.
    ValueError: a shape or value that cannot be; the message names it.
  """
  n = Names("paged_attention_decode")
  arguments.choice(n.function, "layout", layout, _LAYOUTS)
  s = static(n, layout, softmax_scale, window_size, logits_soft_cap, False,
              return_lse)
  # A query is the last of its sequence: there is nothing to its right.
  s = s._replace(window=(s.window[0], -1))
  out, lse = attend(s, Arrays(
      q, k_cache, v_cache, block_tables, context_lens, sinks=sink,
      slopes=alibi_slopes, k_scale=k_scale, v_scale=v_scale))
  return _result(s, out, None if lse is None else lse.T)


def unified_attention(
    q: jax.Array,
    k_cache: jax.Array,
    v_cache: jax.Array,
    cu_seqlens_q: jax.Array,
    seqused_k: jax.Array,
    block_table: jax.Array,
    *,
    softmax_scale: float | None = None,
    causal: bool = True,
    layout: str = "NHD",
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    sinks: jax.Array | None = None,
    alibi_slopes: jax.Array | None = None,
    q_descale: jax.Array | float | None = None,
    k_descale: jax.Array | float | None = None,
    v_descale: jax.Array | float | None = None,
    return_lse: bool = False,
) -> jax.Array | tuple[jax.Array, jax.Array]:
  """Packed queries of any lengths: prefill, its chunks and decode in one call.

  Sequence i has the queries cu_seqlens_q[i]:cu_seqlens_q[i + 1], the last of
  its seqused_k[i] tokens, whose keys and values are all in the caches already.

  Args:
    q: [tokens, hq, d], as in `paged_attention_decode`.
    k_cache: as there.
    v_cache: as there.
    cu_seqlens_q: integers [b + 1], 0 first and in order. Rows behind the last
      sequence give 0.
    seqused_k: integers [b], keys of each sequence.
    block_table: integers [b, n]. Kernels are chosen by how long n lets
      sequences be: short prompts are fastest without columns that none reaches.
    softmax_scale: as there.
    causal: whether a query sees no key behind its own.
    layout: as there.
    window_size: (left, right), keys around a query's own; -1 for no bound.
    softcap: logits_soft_cap there.
    sinks: [hq], sink there.
    alibi_slopes: [hq].
    q_descale: scale of dequantisation of q: a number, [] or [1].
    k_descale: k_scale there.
    v_descale: v_scale there.
    return_lse: whether to return the logarithms of the sums too.

  Returns:
    [tokens, hq, dv] in q's dtype (bfloat16 of float8); with return_lse also
    float32 [hq, tokens].

  Raises:
    TypeError: an argument of the wrong type or dtype.
    ValueError: a shape or value that cannot be; the message names it.
  """
  n = Names("unified_attention", table="block_table", lengths="seqused_k",
            soft_cap="softcap", sinks="sinks", k_scale="k_descale",
            v_scale="v_descale")
  arguments.choice(n.function, "layout", layout, _LAYOUTS)
  s = static(n, layout, softmax_scale, window_size, softcap, causal,
              return_lse)
  check_cumulative(n, cu_seqlens_q, q)
  out, lse = attend(s, Arrays(
      q, k_cache, v_cache, block_table, seqused_k, cu_seqlens=cu_seqlens_q,
      sinks=sinks, slopes=alibi_slopes, q_scale=q_descale, k_scale=k_descale,
      v_scale=v_descale))
  return _result(s, out, lse)


def check_cumulative(n: Names, cu_seqlens, q) -> None:
  total = q.shape[0] if getattr(q, "ndim", 0) else None
  arguments.check_cumulative(n.function, n.cu_seqlens, cu_seqlens, total)


def merge_attn_states(
    prefix_output: jax.Array,
    prefix_lse: jax.Array,
    suffix_output: jax.Array,
    suffix_lse: jax.Array,
    *,
    return_lse: bool = False,
) -> jax.Array | tuple[jax.Array, jax.Array]:
  """Attention to two sets of keys, of the attention to each.

  In jax.numpy, which XLA fuses into one pass over the outputs; it has
  gradients. What has an lse of -inf saw no key and does not count: its output
  may hold anything.

  Args:
    prefix_output: [tokens, hq, d], any floating dtype.
    prefix_lse: [hq, tokens], natural logarithms, as attention returns them.
    suffix_output: as prefix_output.
    suffix_lse: as prefix_lse.
    return_lse: whether to return the joint lse, [hq, tokens], too: float32,
      of float64 outputs float64.

  Returns:
    [tokens, hq, d] in prefix_output's dtype; 0 where neither saw a key.

  Raises:
    TypeError: an argument of the wrong type or dtype.
    ValueError: a shape that cannot be; the message names it.
  """
  n = Names("merge_attn_states")
  return_lse = arguments.flag(n.function, "return_lse", return_lse)
  floats = (*_FLOATS, "float64")
  check_array(n, "prefix_output", prefix_output, 3, floats)
  check_array(n, "suffix_output", suffix_output, 3, floats)
  tokens, hq, _ = prefix_output.shape
  check_shape(n, "suffix_output", suffix_output, prefix_output.shape,
         "as prefix_output")
  lses = (prefix_lse, suffix_lse)
  for name, lse in zip(("prefix_lse", "suffix_lse"), lses):
    check_array(n, name, lse, 2, floats)
    check_shape(n, name, lse, (hq, tokens), "[heads, tokens] of the outputs")
  # No gradient of a maximum, nor of what is -inf on both sides.
  dtype = jnp.promote_types(prefix_output.dtype, jnp.float32)
  a, b = (t.astype(dtype) for t in lses)
  there = (a > -jnp.inf) | (b > -jnp.inf)
  m = jax.lax.stop_gradient(jnp.where(there, jnp.maximum(a, b), 0))
  weights = [jnp.exp(t - m) for t in (a, b)]
  total = jnp.where(there, weights[0] + weights[1], 1)
  parts = [
      jnp.where((w > 0).T[..., None],
                t.astype(dtype) * (w / total).T[..., None], 0)
      for w, t in zip(weights, (prefix_output, suffix_output))]
  out = (parts[0] + parts[1]).astype(prefix_output.dtype)
  if not return_lse:
    return out
  return out, jnp.where(there, m + jnp.log(total), -jnp.inf)
