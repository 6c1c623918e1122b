# SPDX-License-Identifier: Apache-2.0
"""Writes docs/functions.md: every public function, by family, in a line each.

  python docs/functions.py > docs/functions.md
"""

import inspect

from jax.experimental import aiter
from jax.experimental.aiter import pallas, sglang

_TEXT = """\
# Functions

What `jax.experimental.aiter` has, by the folder of `jax/_src/aiter` in which it
is written; `help(aiter.rope)` says the rest of one. Names of AITER, jax-aiter,
vLLM, tpu-inference, megablox and JAX have their arguments, in their order, and
so have those of Pallas and sglang-jax in the modules `pallas` and `sglang`.
Written by [functions.py](functions.py).

| family | function | what |
| --- | --- | --- |
"""


def lines() -> list[str]:
  found = []
  for prefix, module in ("", aiter), ("pallas.", pallas), ("sglang.", sglang):
    for name in module.__all__:
      function = getattr(module, name)
      if inspect.isfunction(function):
        family = function.__module__.split(".")[3]
        what = inspect.getdoc(function).split("\n\n")[0].replace("\n", " ")
        found.append((family, prefix + name, what.replace("|", "\\|")))
  return [f"| {family} | `{name}` | {what} |"
          for family, name, what in sorted(found)]


if __name__ == "__main__":
  print(_TEXT + "\n".join(lines()))
