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
# sortedcontainers). They go into the environment of python3, unless
# SKIP_INSTALL is set. OUT receives logs, tables and plots. Without a list of
# steps, all run.
set -u
wheels=$1
out=$(realpath "$2")
shift 2
[ $# -gt 0 ] || set -- tests sanitize bench
root=$(realpath "$(dirname "$0")/..")
export XLA_PYTHON_CLIENT_PREALLOCATE=false PYTHONUNBUFFERED=1
# The oracles' products are NumPy's, with as many threads as there are cores;
# there are as many processes already.
export OMP_NUM_THREADS=1 OPENBLAS_NUM_THREADS=1

# One command, its log and its line of the report.
step() {
  name=$1
  shift
  begin=$(date +%s)
  "$@" > "$out/$name.log" 2>&1
  status=$?
  echo "$name: status $status, $(($(date +%s) - begin)) s," \
    "$(grep -E '^Ran |^OK|^FAILED|^ERROR SUMMARY|RACECHECK SUMMARY|^right' \
      "$out/$name.log" | tr '\n' ' ')"
  [ $status -eq 0 ] || touch "$out/failed"
}

# A file of tests/ in as many processes at once as given: most of the time is
# XLA's compilation, on the host.
shards() {
  name=$(echo "$1" | tr / _)
  i=0
  while [ $i -lt "$2" ]; do
    step "$name.$i" env TEST_TOTAL_SHARDS="$2" TEST_SHARD_INDEX=$i \
      python3 "$1.py" &
    i=$((i + 1))
  done
}

# What runs on a GPU, from tests/: of each family what does on its kernels, and
# what all functions do alike.
tests="*/numbers_test */hopper_test */handler_test */transform_test
*/alias*_test attention/errors_test harness/*_test simulated/gpu_test"

# In how many processes a file's tests run.
processes() {
  case $1 in
    attention/numbers_test | attention/hopper_test) echo 8 ;;
    gemm/numbers_test | norm/numbers_test) echo 4 ;;
    */numbers_test | attention/transform_test) echo 3 ;;
    harness/derivatives_test | harness/export_test) echo 2 ;;
    *) echo 1 ;;
  esac
}

# Tool, kernels whose names contain what, exit status for findings, file, tests
# of it if not all, processes. Of attention: every feature alone and the shapes
# of training, forward and backward. Of racecheck's reports on sm_90's own
# kernels see docs/performance.md.
features=FeatureTest.test_alone,test_training_shape
sanitized="
memcheck mha_ 1 attention/numbers_test $features 4
memcheck padded 1 attention/hopper_test all 8
racecheck general 1 attention/numbers_test $features 4
racecheck fast 0 attention/numbers_test $features 4
memcheck rope_ 1 rope/numbers_test all 2
memcheck activation_ 1 activation/numbers_test all 2
memcheck cache_ 1 cache/numbers_test all 2
memcheck fused_qk_ 1 fused_qk/numbers_test all 2
memcheck indexer_ 1 indexer/numbers_test all 1
memcheck mla_ 1 mla/numbers_test all 2
memcheck paged_ 1 paged/numbers_test all 2
"

# A command under compute-sanitizer: tool, kernels whose names contain what,
# exit status for findings. The tool's own process dies of a segmentation fault
# now and then, with or without the program's end: then once more.
sanitized() {
  tool=$1 kernels=$2 findings=$3
  shift 3
  for attempt in 1 2 3; do
    compute-sanitizer --tool "$tool" --kernel-name "kns=$kernels" \
      --error-exitcode "$findings" "$@"
    status=$?
    [ $status -eq 139 ] || return $status
  done
  return $status
}

# The tree's own jax/ must not stand before the installed one.
cd "$root/tests" || exit 1
export PYTHONPATH="$root/tests"
[ -n "${SKIP_INSTALL-}" ] ||
  step install python3 -m pip install --no-index --no-deps --force-reinstall \
    "$root/$wheels"/*.whl
for what; do
  case $what in
    tests)
      for pattern in $tests; do
        for file in $pattern.py; do
          shards "${file%.py}" "$(processes "${file%.py}")"
        done
      done
      ;;
    sanitize)
      while read -r tool kernels findings file only processes; do
        [ -n "$tool" ] || continue
        filter=
        [ "$only" = all ] ||
          filter=TESTBRIDGE_TEST_ONLY=$(echo "$only" | tr , ' ')
        i=0
        while [ $i -lt "$processes" ]; do
          step "$tool.$kernels.$i" sanitized "$tool" "$kernels" "$findings" \
            env TEST_TOTAL_SHARDS="$processes" TEST_SHARD_INDEX=$i \
            ${filter:+"$filter"} python3 "$file.py" &
          i=$((i + 1))
        done
      done << END
$sanitized
END
      ;;
    bench)
      wait
      for family in ../jax/_src/aiter/*/; do
        op=$(basename "$family")
        [ -e "../benchmarks/$op.py" ] || continue
        step "bench_$op" python3 "../benchmarks/$op.py" --out "$out/$op" \
          --markdown "$out/$op.md"
      done
      ;;
  esac
done
wait
[ ! -e "$out/failed" ]
