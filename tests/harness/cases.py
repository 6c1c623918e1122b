# SPDX-License-Identifier: Apache-2.0
"""What the cases of every family have in common.

Dtypes by the names of kernels, how near a result must come to the oracle's, and
hypothesis' settings: the same cases in every run, twenty times as many where
all are asked for.
"""

import hypothesis
import ml_dtypes
import numpy as np
from harness import machine

DTYPES = {"bf16": ml_dtypes.bfloat16, "fp16": np.float16, "fp32": np.float32}
# Of a result's largest value: half a unit of rounding the result, and as much
# again for an order of summation unlike the plain formula's.
FLOOR = {"bf16": 2.0**-8, "fp16": 2.0**-11, "fp32": 2.0**-20}

hypothesis.settings.register_profile(
    "aiter", deadline=None, derandomize=True, database=None,
    suppress_health_check=list(hypothesis.HealthCheck))
hypothesis.settings.load_profile("aiter")


def examples(gpu: int, cpu: int, simulated: int | None = None):
  """Settings of a test of so many random cases on this machine."""
  count = machine.size(gpu, cpu, simulated)
  return hypothesis.settings(max_examples=count * (20 if machine.ALL else 1))


def check_error(test, got, exact, plain, dtype: str, message: str = "",
                size: float | None = None, floor: float = 0.0):
  """Fails unless `got` is as near to the exact result as a plain formula is.

  Its largest error may be twice that of the plain formula, whose steps all
  round to the dtype, plus FLOOR of the largest exact value, plus `floor`. Where
  the plain formula overflows, the floors alone count.

  Args:
    test: the TestCase.
    got: the result.
    exact: the oracle's, float64, finite.
    plain: the plain formula's, finite or not.
    dtype: of the result, a key of FLOOR.
    message: says which result of which case it is.
    size: of what FLOOR is taken, if not of the largest exact value.
    floor: what else may be missing.
  """
  got, exact, plain = (np.asarray(t).astype(np.float64)
                       for t in (got, exact, plain))
  test.assertEqual(got.shape, exact.shape, message)
  if not exact.size:
    return
  test.assertTrue(np.isfinite(got).all(), message)
  with np.errstate(invalid="ignore", over="ignore"):
    allowed = np.nan_to_num(
        2 * np.abs(plain - exact).max(), nan=0, posinf=0)
  size = np.abs(exact).max() if size is None else size
  test.assertLessEqual(
      np.abs(got - exact).max(), allowed + FLOOR[dtype] * size + floor, message)
