# SPDX-License-Identifier: Apache-2.0
"""python -m jax.experimental.aiter: what is here, and whether it is right."""

import sys

from jax._src.aiter import check

if __name__ == "__main__":
  sys.exit(check.main())
