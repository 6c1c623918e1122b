# SPDX-License-Identifier: Apache-2.0
"""Attention to latent vectors in paged caches, as an operator.

It is paged/op.py's attention of one KV head, whose values are the first columns
of its keys: the same arguments, formula and results, with kernels of its own.
"""

from __future__ import annotations

from jax._src.aiter.core.operator import Key, operator
from jax._src.aiter.core.partition import axes_of_arguments
from jax._src.aiter.paged import op as paged
from jax._src.aiter.paged.op import Config, Operands

_DTYPES = {"float16": "fp16", "bfloat16": "bf16"}
# What a row of the kernels' table tells by its sizes.
_BY_SIZE = ("partial", "unshared", "many_rows", "small_pages")


def _serves(cfg: Config, x: Operands) -> Key | None:
  if paged.is_empty(x):
    return None
  asked = paged.features(cfg, x, paged.shape_of(cfg, x))
  # Rows of a sequence choose among kernels, but there is one for any.
  return Key("mla_attend", x.q.dtype.name, (cfg.dv, x.q.shape[-1] - cfg.dv, -1),
             tuple(name for name in asked if name not in _BY_SIZE))


def _specs(cfg: Config, x: Operands):
  """Heads and tokens are divided; all of them need the whole cache."""
  specs = paged.specs_of_tokens(x)._replace(
      q=("t", "h", "_"), sinks=None if x.sinks is None else ("h",))
  return (specs,), (("t", "h", "_"), ("h", "t") if cfg.return_lse else None)


def _plan(cfg: Config, run, mesh, args):
  x, = args
  (specs,), _ = _specs(cfg, x)
  heads = axes_of_arguments(mesh, (specs.q,), ("h",), (x.q,)).get("h", ())
  tokens, run = paged.divided_tokens(cfg, run, mesh, x, heads)
  return {"h": heads, **tokens}, run


# (Config, Operands) -> (out [tokens, hq, dv], lse [hq, tokens] or None)
attend = operator(
    target="mla_attend", kernel=paged.kernel, reference=paged.reference,
    specs=_specs, split=("h", "t", "b"), serves=_serves, dtypes=_DTYPES,
    plan=_plan, batch=paged.in_turn)
