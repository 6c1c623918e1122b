#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
#
# Checks built CUDA wheels on a machine with an NVIDIA GPU and JAX, which needs
# neither Bazel nor a network:
#
#   sh build/check_gpu.sh WHEELS OUT [tests] [sanitize] [bench]
#
# WHEELS has jax_aiter and jax_aiter_cuda13 (build.py wheels --archs sm_90), and
# may have wheels of what the tests import (absl-py, hypothesis,
# sortedcontainers). They go into the environment of python3. OUT receives logs,
# table and plot. Without a list of steps, all run.
set -u
wheels=$1
out=$(realpath "$2")
shift 2
[ $# -gt 0 ] || set -- tests sanitize bench
root=$(realpath "$(dirname "$0")/..")
export XLA_PYTHON_CLIENT_PREALLOCATE=false PYTHONUNBUFFERED=1
failed=0

step() {
  name=$1
  shift
  begin=$(date +%s)
  if "$@" > "$out/$name.log" 2>&1; then state=ok; else state=FAILED failed=1; fi
  echo "$state $name, $(($(date +%s) - begin)) s: $(tail -n 1 "$out/$name.log")"
}

# The tree's own jax/ must not stand before the installed one.
cd "$root/tests" || exit 1
step install python3 -m pip install --no-index --no-deps --force-reinstall \
  "$root/$wheels"/*.whl
for what; do
  case $what in
    tests)
      for test in mha transform errors gpu; do
        step "$test" python3 -P "aiter_${test}_test.py"
      done
      ;;
    sanitize)
      for tool in memcheck racecheck; do
        step "$tool" compute-sanitizer --tool "$tool" --error-exitcode 1 \
          python3 -P -m jax.experimental.aiter
      done
      ;;
    bench)
      step bench python3 -P ../benchmarks/attention.py --out "$out/attention" \
        --markdown "$out/performance.md"
      ;;
  esac
done
exit $failed
