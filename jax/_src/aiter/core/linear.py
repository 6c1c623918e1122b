# SPDX-License-Identifier: Apache-2.0
"""Linear maps with a transpose of their own.

`linear_map` is what jax.custom_derivatives.linear_call is: the derivative of a
function as a map of tangents, whose transpose is given and need not be derived
from it. Beyond that one it can be mapped by vmap, it can be differentiated
along what it is not linear in, and its transpose sees which cotangents are 0.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax.numpy as jnp
from jax.interpreters import ad, batching, mlir

import jax
from jax import lax
from jax._src import dispatch

# jax.extend.core has it by name; but to import that imports Pallas.
_Primitive = type(lax.add_p)

_linear_map_p = _Primitive("aiter_linear_map")
_linear_map_p.multiple_results = True


@dataclasses.dataclass(frozen=True, eq=False)
class _Map:
  """A map of some tangents, the operands at the positions `moving`.

  Attributes:
    forward: (saved, tangents) -> the results' tangents; None stands for 0.
    reverse: (saved, cotangents) -> those of the operands, likewise.
    types: of the results' tangents.
    operands: how many there are.
    moving: which of them the map is given.
    count: how many arrays are saved.
  """
  forward: Callable[[list, list], list]
  reverse: Callable[[list, list], list]
  types: tuple[Any, ...]
  operands: int
  moving: tuple[int, ...]
  count: int

  def apply(self, *args):
    saved, tangents = args[:self.count], args[self.count:]
    full = [None] * self.operands
    for i, t in zip(self.moving, tangents, strict=True):
      full[i] = t
    out = self.forward(list(saved), full)
    return [jnp.zeros(like.shape, like.dtype) if t is None else t
            for t, like in zip(out, self.types, strict=True)]


def linear_map(forward: Callable[[list, list], list],
               reverse: Callable[[list, list], list],
               types: Sequence[Any], saved: list, tangents: list) -> list:
  """forward(saved, tangents), which transposes to reverse(saved, cotangents).

  Args:
    forward: (saved, tangents) -> the results' tangents, which are linear in the
      tangents. It may be differentiated.
    reverse: (saved, cotangents) -> cotangents of the tangents, its transpose.
      Both take, and may give, None for 0.
    types: of the results' tangents.
    saved: arrays.
    tangents: arrays, None for those that are 0.
  """
  moving = tuple(i for i, t in enumerate(tangents) if t is not None)
  return _linear_map_p.bind(
      *saved, *(tangents[i] for i in moving),
      map=_Map(forward, reverse, tuple(types), len(tangents), moving,
               len(saved)))


def _apply(*args, map):
  return map.apply(*args)


def _jvp(primals, tangents, *, map):
  n = map.count
  out = _linear_map_p.bind(*primals, map=map)
  sums = [None] * len(out)

  def add(parts):
    for i, t in enumerate(parts):
      sums[i] = t if sums[i] is None else sums[i] + t

  at = [i for i, t in enumerate(tangents) if not isinstance(t, ad.Zero)]
  moving = [i for i in at if i >= n]
  if moving:
    part = dataclasses.replace(
        map, moving=tuple(map.moving[i - n] for i in moving))
    add(_linear_map_p.bind(
        *primals[:n], *(tangents[i] for i in moving), map=part))
  at = [i for i in at if i < n]
  if at:
    def of_saved(*some):
      args = list(primals)
      for i, t in zip(at, some):
        args[i] = t
      return map.apply(*args)
    add(jax.jvp(of_saved, [primals[i] for i in at],
                [tangents[i] for i in at])[1])
  return out, [ad.Zero(t) if s is None else s
               for s, t in zip(sums, map.types)]


def _transpose(cotangents, *args, map):
  saved, operands = args[:map.count], args[map.count:]
  grads = map.reverse(list(saved), [
      None if isinstance(t, ad.Zero) else t for t in cotangents])
  out = [None] * map.count
  for i, t in zip(map.moving, operands):
    asked = ad.is_undefined_primal(t)
    out.append(grads[i] if asked and grads[i] is not None
               else ad.Zero(t.aval) if asked else None)
  return out


def _batch(args, axes, *, map):
  from jax.extend import core  # Which takes long: see above.

  size, = {t.shape[a] for t, a in zip(args, axes) if a is not None}
  n = map.count
  front = [t if a is None else jnp.moveaxis(t, a, 0)
           for t, a in zip(args, axes)]
  # A tangent that all share is one for each, so that its cotangents are added.
  front[n:] = [jnp.broadcast_to(t, (size, *t.shape)) if a is None else t
               for t, a in zip(front[n:], axes[n:])]
  where = [None if a is None else 0 for a in axes[:n]]
  mapped = lambda fun: lambda saved, moving: jax.vmap(
      fun, in_axes=(where, 0))(saved, moving)
  types = tuple(core.unmapped_aval(size, 0, t) for t in map.types)
  out = _linear_map_p.bind(*front, map=dataclasses.replace(
      map, forward=mapped(map.forward), reverse=mapped(map.reverse),
      types=types))
  return out, [0] * len(out)


# An operator in a map partitions, for which its lowering asks for devices. JAX
# looks for such in programs that it sees, and a map's it does not.
dispatch.prim_requires_devices_during_lowering.add(_linear_map_p)
_linear_map_p.def_impl(_apply)
_linear_map_p.def_abstract_eval(lambda *_, map: list(map.types))
ad.primitive_jvps[_linear_map_p] = _jvp
ad.primitive_transposes[_linear_map_p] = _transpose
batching.primitive_batchers[_linear_map_p] = _batch
mlir.register_lowering(
    _linear_map_p, mlir.lower_fun(_apply, multiple_results=True))
