# SPDX-License-Identifier: Apache-2.0
"""Sampling: the public functions and their arguments."""

from __future__ import annotations

import functools

import jax.numpy as jnp
import numpy as np

import jax
from jax import lax
from jax._src.aiter.core import arguments, dims
from jax._src.aiter.core.partition import vary_together
from jax._src.aiter.core.rounding import divide
from jax._src.aiter.sampling import exact
from jax._src.aiter.sampling import op as sampling_op
from jax._src.aiter.sampling.op import Config, Rows

_DTYPES = ("float16", "bfloat16", "float32", "float64")
_ORDERS = ("joint", "top_k_first")


def _check_rows(function: str, name: str, t):
  """[b, v] of floats, in a type that the operator takes."""
  arguments.check_dtype(function, name, t, _DTYPES)
  if t.ndim != 2 or (dims.is_known(t.shape[1])
                     and t.shape[1] > sampling_op.MAX_COLS):
    raise arguments.bad(
        function, name, arguments.describe(t),
        f"shape [b, v], with v at most {sampling_op.MAX_COLS}")
  return t if t.dtype == jnp.bfloat16 else jnp.asarray(t, jnp.float32)


def _per_row(function: str, name: str, value, b, dtype, accepted, allowed):
  """An array of a number for each row, of a number or of an array."""
  kind = int if dtype == jnp.int32 else float
  if not hasattr(value, "dtype") or isinstance(value, np.generic):
    value = arguments.number(function, name, value, accepted, allowed, kind)
    if kind is int:
      value = min(value, np.iinfo(np.int32).max)
    return jnp.full((b,), value, dtype)
  if kind is int:
    arguments.check_integers(function, name, value)
    value = arguments.int32(value)
  else:
    arguments.check_dtype(function, name, value, (*_DTYPES, "int32", "int64"))
  if value.ndim > 1 or (value.ndim == 1 and value.shape[0] != b):
    raise arguments.bad(function, name, arguments.describe(value),
                        f"{accepted}, or an array of shape [] or [{b}]")
  at_hand = arguments.at_hand(value)
  if at_hand is not None and not np.all(allowed(at_hand)):
    raise arguments.bad(function, name, np.array2string(at_hand, threshold=8),
                        f"{accepted}, each")
  return jnp.broadcast_to(jnp.asarray(value, dtype), (b,))


def keys_of(function: str, key, b):
  """uint32 [b, 4] from a PRNG key, or one a row; see words_of."""
  if key is None:
    raise arguments.bad(function, "key", None,
                        "a PRNG key, as jax.random.key makes it")
  arguments.check_is_array(function, "key", key)
  typed = jnp.issubdtype(key.dtype, jax.dtypes.prng_key)
  if not typed and key.dtype != jnp.uint32:
    raise arguments.bad(function, "key's dtype", key.dtype,
                        "a PRNG key, as jax.random.key makes it", TypeError)
  lead = key.shape if typed else key.shape[:-1]
  if (not typed and key.ndim == 0) or len(lead) > 1 or (
      len(lead) == 1 and lead[0] != b):
    raise arguments.bad(function, "key", arguments.describe(key),
                        f"a single key, or {b} of them, one a row")
  bits = functools.partial(jax.random.bits, shape=(2,), dtype=jnp.uint32)
  if lead:
    words, counter = jax.vmap(bits)(key), jnp.zeros((b, 1), jnp.uint32)
  else:
    words = jnp.broadcast_to(bits(key), (b, 2))
    counter = lax.broadcasted_iota(jnp.uint32, (b, 1), 0)
  return jnp.concatenate([words, counter, jnp.zeros_like(counter)], -1)


def _mask(function: str, mask, b, v):
  """int32 [b, ceil(v / 32)] of a bit mask, or None."""
  if mask is None:
    return None
  arguments.check_dtype(function, "mask", mask, ("int32", "uint32"))
  words = (v + 31) // 32
  if mask.shape != (b, words):
    raise arguments.bad(function, "mask", arguments.describe(mask),
                        f"shape {[b, words]}: a bit for each column")
  return lax.bitcast_convert_type(mask, jnp.int32)


_temperature = functools.partial(
    _per_row, name="temperature", dtype=jnp.float32,
    accepted="a number that is not negative", allowed=lambda t: t >= 0)
_top_k = functools.partial(
    _per_row, name="top_k", dtype=jnp.int32,
    accepted="an integer that is not negative", allowed=lambda k: k >= 0)
_share = functools.partial(
    _per_row, dtype=jnp.float32, accepted="a number from 0 to 1",
    allowed=lambda p: (p >= 0) & (p <= 1))


def _is(value, number) -> bool:
  """Whether an argument is a Python number, and this one."""
  return type(value) in (int, float) and value == number


def _limits(function: str, b, top_k, top_p, min_p=0) -> dict[str, jax.Array]:
  """Fields of Rows, without those that limit nothing."""
  found = {}
  if top_k is not None and not _is(top_k, 0):
    found["top_k"] = _top_k(function, value=top_k, b=b)
  if not _is(top_p, 1):
    found["top_p"] = _share(function, "top_p", top_p, b)
  if not _is(min_p, 0):
    found["min_p"] = _share(function, "min_p", min_p, b)
  return found


@functools.partial(jax.jit, static_argnums=0, inline=True)
def _draw(cfg: Config, rows: Rows):
  return sampling_op.draw(cfg, vary_together(rows))


def _drawn(function: str, logits, key, temperature, top_k, top_p, min_p, order,
           mask, exponentials=None) -> jax.Array:
  """Tokens of logits, after all checks."""
  logits = _check_rows(function, "logits", logits)
  b, v = logits.shape
  limits = _limits(function, b, top_k, top_p, min_p)
  first = arguments.choice(function, "order", order, _ORDERS) == _ORDERS[1]
  keys = None
  if exponentials is None:
    keys = keys_of(function, key, b)
  cfg = Config("draw", k_first=first and {"top_k", "top_p"} <= set(limits))
  return _draw(cfg, Rows(
      logits, keys, _temperature(function, value=temperature, b=b), **limits,
      mask=_mask(function, mask, b, v), exponentials=exponentials)).tokens


def sample(
    logits: jax.Array,
    key: jax.Array,
    temperature: jax.Array | float = 1.0,
    top_k: jax.Array | int | None = 0,
    top_p: jax.Array | float = 1.0,
    min_p: jax.Array | float = 0.0,
    *,
    order: str = "joint",
    mask: jax.Array | None = None,
) -> jax.Array:
  """Draws a token for each row of logits.

  A row's columns have the probabilities softmax(logits / temperature), of which
  some are kept, and one of those is drawn:

  * top_k: those that are not below the k-th largest; equal ones are kept, all;
  * top_p: the largest ones that have a share of at least top_p of all, and what
    equals the last of them. With order="joint" of all; with "top_k_first" of
    what top_k has left (Holtzman et al., arXiv:1904.09751);
  * min_p: those of at least min_p of the largest one (Nguyen et al.,
    arXiv:2407.01082).

  The token is the same on every platform, whatever the other rows are, sharded
  or not: it is the largest of weight / e, the first of equal ones, where e are
  `exponential(key, logits.shape)`, and all that decides is computed in integers
  or rounded as IEEE 754 says. Weights below 2^-32 of the largest do not count
  for top_p, and min_p and the draw take those below e^-64 as that.

  Limits and temperature may be arrays, and traced: one program serves all.

  Args:
    logits: [b, v] float16, bfloat16, float32 or float64, which is rounded to
      float32; v up to 2^21. NaN and -inf are never drawn; of infinities one is,
      whatever the others are.
    key: a JAX PRNG key, or [b] of them. Row i of a single key draws with
      counter i; a row with a key of its own draws as a batch of that row alone.
    temperature: [] or [b]. Of a row of 0, or below 2^-126, the largest logit is
      taken, the first of equal ones.
    top_k: integers, [] or [b]; 0 or None limits nothing.
    top_p: [] or [b], from 0, the largest alone, to 1, all.
    min_p: [] or [b], from 0 to 1.
    order: "joint" or "top_k_first".
    mask: int32 or uint32 [b, ceil(v / 32)], such as a grammar's: a column c may
      be drawn if bit c % 32 of word c // 32 is set.

  Returns:
    int32 [b]; -1 of a row from which nothing may be drawn. It has no gradient.

  Raises:
    TypeError: an argument has a wrong type.
    ValueError: an argument has a wrong shape or value.
  """
  return _drawn("sample", logits, key, temperature, top_k, top_p, min_p, order,
                mask)


def greedy_sample(
    logits: jax.Array, *, mask: jax.Array | None = None
) -> jax.Array:
  """The largest logit of each row, the first of equal ones; AITER's.

  Args:
    logits: as of `sample`; NaN and -inf are never taken.
    mask: likewise.

  Returns:
    int32 [b]; -1 of a row from which nothing may be taken.

  Raises:
    TypeError: an argument has a wrong type.
    ValueError: an argument has a wrong shape.
  """
  logits = _check_rows("greedy_sample", "logits", logits)
  return _draw(Config("largest"), Rows(logits, mask=_mask(
      "greedy_sample", mask, *logits.shape))).tokens


def mixed_sample(
    logits: jax.Array,
    temperatures: jax.Array | float,
    *,
    key: jax.Array,
) -> jax.Array:
  """`sample` of rows without limits, by AITER's name.

  Args:
    logits: as of `sample`.
    temperatures: likewise; 0 takes the largest logit.
    key: likewise.

  Returns:
    int32 [b].

  Raises:
    TypeError: an argument has a wrong type.
    ValueError: an argument has a wrong shape or value.
  """
  return _drawn("mixed_sample", logits, key, temperatures, None, 1, 0, "joint",
                None)


def mixed_sample_outer_exponential(
    logits: jax.Array,
    exponentials: jax.Array,
    temperatures: jax.Array | float,
    *,
    eps: float = 1e-10,
) -> jax.Array:
  """The largest of softmax(logits / temperatures) / (exponentials + eps).

  With `exponential(key, logits.shape)` and an eps of 0 it is `sample` with that
  key. Of equal ones the first is taken; a quotient that is negative or NaN
  counts as 0.

  Args:
    logits: as of `sample`.
    exponentials: float32 [b, v].
    temperatures: as of `sample`; 0 takes the largest logit.
    eps: not negative.

  Returns:
    int32 [b].

  Raises:
    TypeError: an argument has a wrong type.
    ValueError: an argument has a wrong shape or value.
  """
  function = "mixed_sample_outer_exponential"
  arguments.check_dtype(function, "exponentials", exponentials, ("float32",))
  arguments.check_is_array(function, "logits", logits, False)
  if exponentials.shape != logits.shape:
    raise arguments.bad(
        function, "exponentials", arguments.describe(exponentials),
        f"shape {list(logits.shape)}, as logits")
  eps = arguments.number(function, "eps", eps, "a number that is not negative",
                         lambda t: t >= 0)
  return _drawn(function, logits, None, temperatures, None, 1, 0, "joint", None,
                exponentials + np.float32(eps))


# AITER's have no rows of temperature 0; its functions are otherwise the same.
random_sample = mixed_sample
random_sample_outer_exponential = mixed_sample_outer_exponential


def exponential(
    key: jax.Array, shape: tuple[int, int], lambd: float = 1.0
) -> jax.Array:
  """Exponentially distributed numbers, those of `sample`; AITER's.

  Number c of row r is made of word c % 4 of Philox4x32-10 (Salmon et al.,
  "Parallel Random Numbers: As Easy as 1, 2, 3", 2011) with the key
  jax.random.bits(key, (2,)) and the counter (c // 4, r, 0, 0).

  Args:
    key: as of `sample`.
    shape: (b, v).
    lambd: the rate, above 0.

  Returns:
    float32 of that shape, at least 2^-32 / lambd. Those of a lambd of 1 are the
    same on every platform; the others are their quotients, which on a GPU may
    be off by a unit in the last place.

  Raises:
    TypeError: an argument has a wrong type.
    ValueError: an argument has a wrong value.
  """
  lambd = arguments.number("exponential", "lambd", lambd, "a number above 0",
                           lambda t: t > 0)
  b, v = arguments.two_sizes("exponential", "shape", shape)
  e = exact.exponential(
      sampling_op.words_of(keys_of("exponential", key, b), v))
  return e if lambd == 1 else divide(e, lambd)


def _from_probs(function: str, probs, key, top_k, top_p) -> jax.Array:
  probs = _check_rows(function, "probs", probs)
  b = probs.shape[0]
  return _draw(Config("draw", probs=True), Rows(
      probs, keys_of(function, key, b), **_limits(function, b, top_k, top_p))
      ).tokens


def top_p_sampling_from_probs(
    probs: jax.Array, top_p: jax.Array | float, *, key: jax.Array
) -> jax.Array:
  """Draws from probabilities, of the largest that have a share of top_p.

  Args:
    probs: [b, v] as the logits of `sample`, but probabilities, or any weights.
      What is not positive is never drawn.
    top_p: as of `sample`.
    key: likewise.

  Returns:
    int32 [b]; -1 of a row without a positive number.

  Raises:
    TypeError: an argument has a wrong type.
    ValueError: an argument has a wrong shape or value.
  """
  return _from_probs("top_p_sampling_from_probs", probs, key, None, top_p)


def top_k_top_p_sampling_from_probs(
    probs: jax.Array,
    top_k: jax.Array | int,
    top_p: jax.Array | float,
    *,
    key: jax.Array,
) -> jax.Array:
  """Draws from the k largest probabilities that have a share of top_p of all.

  Args:
    probs: as of `top_p_sampling_from_probs`.
    top_k: as of `sample`, with its order "joint".
    top_p: likewise.
    key: likewise.

  Returns:
    int32 [b]; -1 of a row without a positive number.

  Raises:
    TypeError: an argument has a wrong type.
    ValueError: an argument has a wrong shape or value.
  """
  return _from_probs("top_k_top_p_sampling_from_probs", probs, key, top_k,
                     top_p)


def top_k_renorm_probs(
    probs: jax.Array, top_k: jax.Array | int
) -> jax.Array:
  """Probabilities that are not below the k-th largest, with a sum of 1.

  Args:
    probs: as of `top_p_sampling_from_probs`.
    top_k: as of `sample`; 0 keeps all. Equal ones are kept, all.

  Returns:
    Like probs: kept ones divided by their sum in float32, else 0; NaN of a row
    without a positive number.

  Raises:
    TypeError: an argument has a wrong type.
    ValueError: an argument has a wrong shape or value.
  """
  function = "top_k_renorm_probs"
  rows = _check_rows(function, "probs", probs)
  kept = rows > 0
  limits = _limits(function, rows.shape[0], top_k, 1)
  if limits:
    limit = _draw(Config("limit", probs=True), lax.stop_gradient(
        Rows(rows, **limits))).limit
    kept &= exact.order_key(lax.stop_gradient(rows).astype(jnp.float32)) >= (
        limit[:, None])
  rows = jnp.where(kept, rows.astype(jnp.float32), 0)
  return (rows / jnp.sum(rows, -1, keepdims=True)).astype(probs.dtype)


def _of_float16(x):
  """In float32, which holds them in the same order."""
  # The sign of NaN, which that order knows, does not outlive a GPU's cast.
  sign = lax.bitcast_convert_type(x, jnp.uint16).astype(jnp.uint32) >> 15
  nan = lax.bitcast_convert_type((sign << 31) | np.uint32(0x7FC00000),
                                 jnp.float32)
  return jnp.where(jnp.isnan(x), nan, x.astype(jnp.float32))


@functools.partial(jax.jit, static_argnums=0, inline=True)
def _ranked(k: int, logits):
  return sampling_op.rank(k, Rows(logits))


def top_k(
    operand: jax.Array, k: int, *, axis: int = -1, is_stable: bool = True
) -> tuple[jax.Array, jax.Array]:
  """The k largest of an axis and where they are, as jax.lax.top_k has them.

  Kernels serve bfloat16, float16 and float32, and a k of up to 1024; what else
  there is XLA sorts, and on NVIDIA's GPUs also rows of up to 1000 columns.

  Args:
    operand: [..., n] of any type that lax.top_k takes.
    k: from 0 to n.
    axis: the one to take them of.
    is_stable: whether equal ones stand in the order of their places; they do in
      either case.

  Returns:
    Values, which have a gradient, from the largest down (NaN is the largest),
    and their places, int32.

  Raises:
    TypeError: an argument has a wrong type.
    ValueError: an argument has a wrong value.
  """
  arguments.check_is_array("top_k", "operand", operand, False)
  if not jnp.isrealobj(operand) or jnp.issubdtype(operand.dtype,
                                                  jax.dtypes.prng_key):
    raise arguments.bad("top_k", "operand's dtype", operand.dtype,
                        "a real type", TypeError)
  if operand.ndim == 0:
    raise arguments.bad("top_k", "operand", arguments.describe(operand),
                        "an axis at least")
  arguments.flag("top_k", "is_stable", is_stable)
  axis = arguments.number(
      "top_k", "axis", axis, f"an axis of {operand.ndim}",
      lambda i: -operand.ndim <= i < operand.ndim, int) % operand.ndim
  n = operand.shape[axis]
  k = arguments.number(
      "top_k", "k", k, f"from 0 to {n}",
      lambda k: k >= 0 and (not dims.is_known(n) or k <= n), int)
  if operand.dtype.name not in _DTYPES[:3]:
    return tuple(lax.top_k(operand, k, axis=axis))
  rows = jnp.moveaxis(operand, axis, -1)
  if operand.dtype == jnp.float16:
    rows = _of_float16(rows)
  lead = rows.shape[:-1]
  values, places = (
      jnp.moveaxis(t.reshape(*lead, k), -1, axis)
      for t in _ranked(k, rows.reshape(-1, n)))
  return values.astype(operand.dtype), places


@functools.partial(jax.jit, static_argnums=(0, 1), inline=True)
def _selected(k: int, return_values: bool, logits, rows, starts, ends):
  places = sampling_op.select(k, Rows(
      lax.stop_gradient(rows), mask=jnp.stack([starts, ends], -1)))
  if not return_values:
    return places
  values = jnp.take_along_axis(logits, jnp.maximum(places, 0), -1)
  return places, jnp.where(places < 0, -jnp.inf, values)


def _select(function, logits, k, stable, return_values, of_rows):
  """Checks what both functions have; of_rows: b -> starts and ends."""
  arguments.check_is_array(function, "logits", logits, False)
  rows = _check_rows(function, "logits", logits)
  arguments.flag(function, "stable", stable)
  k = arguments.number(function, "k", k, "an integer > 0", lambda k: k > 0, int)
  return _selected(
      k, arguments.flag(function, "return_values", return_values), logits, rows,
      *of_rows(rows.shape[0]))


def _row_integers(function, name, t, shape):
  arguments.check_is_array(function, name, t, False)
  arguments.check_integers(function, name, t)
  if t.shape != shape:
    raise arguments.bad(function, name, arguments.describe(t),
                        f"shape {list(shape)}")
  return jnp.asarray(arguments.int32(t))


def top_k_per_row_prefill(
    logits: jax.Array,
    row_starts: jax.Array,
    row_ends: jax.Array,
    k: int = 2048,
    stable: bool = True,
    *,
    return_values: bool = False,
) -> jax.Array | tuple[jax.Array, jax.Array]:
  """Of each row the k largest of its own columns, as sparse attention takes.

  Columns are listed in their order, from the lowest up; of equal numbers the
  lower columns are taken. So the list is the same on every platform and device.
  -0 and 0 are equal, and NaN is the largest number.

  Args:
    logits: [rows, columns], bfloat16, float16 or float32.
    row_starts: integers [rows], each row's first column.
    row_ends: integers [rows], the column behind its last.
    k: how many.
    stable: accepted; lists are in order either way.
    return_values: whether to return the numbers too.

  Returns:
    int32 [rows, k]: columns of logits; -1 behind them, where a row has fewer.
    With return_values also the numbers there, -inf where there is none, which
    have a gradient.

  Raises:
    TypeError: an argument has a wrong type.
    ValueError: an argument has a wrong shape or value.
  """
  name = "top_k_per_row_prefill"
  return _select(name, logits, k, stable, return_values, lambda b: (
      _row_integers(name, "row_starts", row_starts, (b,)),
      _row_integers(name, "row_ends", row_ends, (b,))))


def top_k_per_row_decode(
    logits: jax.Array,
    next_n: int,
    seq_lens: jax.Array,
    k: int = 2048,
    stable: bool = True,
    *,
    return_values: bool = False,
) -> jax.Array | tuple[jax.Array, jax.Array]:
  """`top_k_per_row_prefill` of the last next_n tokens of each sequence.

  Args:
    logits: [sequences * next_n, columns], as there.
    next_n: tokens of a sequence. Token i sees seq_lens - next_n + i + 1
      columns, from the first on.
    seq_lens: integers [sequences].
    k: as there.
    stable: as there.
    return_values: as there.

  Returns:
    As there.

  Raises:
    TypeError: an argument has a wrong type.
    ValueError: an argument has a wrong shape or value.
  """
  name = "top_k_per_row_decode"
  next_n = arguments.number(name, "next_n", next_n, "an integer > 0",
                            lambda n: n > 0, int)

  def of_rows(b):
    if b % next_n:
      raise arguments.bad(name, "logits", arguments.describe(logits),
                          f"a multiple of next_n, {next_n}, rows")
    lengths = _row_integers(name, "seq_lens", seq_lens, (b // next_n,))
    token = jnp.arange(next_n, dtype=jnp.int32)
    ends = (lengths[:, None] - next_n + 1 + token).reshape(b)
    return jnp.zeros_like(ends), ends

  return _select(name, logits, k, stable, return_values, of_rows)


def topk_plain(
    x: jax.Array,
    topk: int,
    largest: bool = True,
    row_starts: jax.Array | None = None,
    row_ends: jax.Array | None = None,
) -> tuple[jax.Array, jax.Array]:
  """Of each row the largest or smallest of its own columns; AITER's.

  Args:
    x: [rows, columns], bfloat16, float16 or float32; float64 is compared as
      float32.
    topk: how many, up to all columns.
    largest: False for the smallest. NaN is the largest number, and infinity
      is not smaller.
    row_starts: integers [rows], each row's first column; 0 by default.
    row_ends: integers [rows], the column behind its last; all by default.

  Returns:
    (topk_out, topk_ids): x's dtype, which has a gradient, and int32, [rows,
    topk], in order, of equal ones the lower column first. Behind what a row has
    the column is -1 and the number an infinity, the last in order.

  Raises:
    TypeError: an argument has a wrong type.
    ValueError: an argument has a wrong shape or value.
  """
  function = "topk_plain"
  rows = _check_rows(function, "x", x)
  b, n = rows.shape
  k = arguments.number(
      function, "topk", topk, f"an integer from 1 to {n}",
      lambda k: k >= 1 and (not dims.is_known(n) or k <= n), int)
  largest = arguments.flag(function, "largest", largest)
  nan, ordered = (jnp.nan, rows) if largest else (-jnp.inf, -rows)
  ordered = jnp.where(jnp.isnan(rows), nan, ordered)
  # No zero is less than another one.
  ordered = lax.stop_gradient(jnp.where(ordered == 0, 0, ordered))
  if row_starts is None and row_ends is None:
    ids = _ranked(k, ordered)[1]
  else:
    ends = [None if t is None else _row_integers(function, name, t, (b,))
            for name, t in (("row_starts", row_starts), ("row_ends", row_ends))]
    ends = [jnp.full(b, default, jnp.int32) if t is None else t
            for t, default in zip(ends, (0, n))]
    found, numbers = _selected(k, True, ordered, ordered, *ends)
    ids = jnp.take_along_axis(found, _ranked(k, numbers)[1], -1)
  values = jnp.take_along_axis(jnp.asarray(x), jnp.maximum(ids, 0), -1)
  return jnp.where(ids < 0, -jnp.inf if largest else jnp.inf, values), ids
