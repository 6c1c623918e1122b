# SPDX-License-Identifier: Apache-2.0
"""A bad argument is named, with what was given and what is accepted."""

import functools

import jax


def check(test, fn, good: dict, error: type, replaced: dict, words,
          traced: bool = True):
  """Fails unless the call raises the error, whose message has every word.

  It must begin with the function's name. Under jit, with arrays as its
  arguments, the same happens while tracing.

  Args:
    test: the TestCase.
    fn: the function.
    good: arguments that it takes.
    error: the exception's type.
    replaced: arguments instead of good ones.
    words: what the message must have.
    traced: whether to try it under jit, too.
  """
  args = {**good, **replaced}
  with test.assertRaises(error) as caught:
    fn(**args)
  message = str(caught.exception)
  test.assertStartsWith(message, f"{fn.__name__}: ")
  for word in words:
    test.assertIn(word, message)
  if not traced:
    return
  arrays = {n: t for n, t in args.items() if isinstance(t, jax.Array)}
  fixed = {n: t for n, t in args.items() if n not in arrays}
  with test.assertRaises(error):
    jax.jit(functools.partial(fn, **fixed)).trace(**arrays)
