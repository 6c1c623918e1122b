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

# A test file in as many processes at once as given: most of the time is XLA's
# compilation, on the host.
shards() {
  i=0
  while [ $i -lt "$2" ]; do
    step "$1.$i" env TEST_TOTAL_SHARDS="$2" TEST_SHARD_INDEX=$i \
      python3 "aiter_$1_test.py" &
    i=$((i + 1))
  done
}

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
step install python3 -m pip install --no-index --no-deps --force-reinstall \
  "$root/$wheels"/*.whl
for what; do
  case $what in
    tests)
      shards mha 8
      shards transform 3
      shards norm 4
      shards gemm 4
      shards gemm_handler 1
      shards quant 3
      shards errors 1
      shards gpu 1
      ;;
    sanitize)
      # Every feature alone and the shapes of training, forward and backward.
      # Of racecheck's reports on sm_90's own kernels see docs/performance.md.
      for check in "memcheck mha_ 1" "racecheck general 1" "racecheck fast 0"; do
        set -- $check
        for i in 0 1 2 3; do
          step "$1.$2.$i" sanitized "$1" "$2" "$3" \
            env TEST_TOTAL_SHARDS=4 TEST_SHARD_INDEX=$i \
            TESTBRIDGE_TEST_ONLY="FeatureTest.test_alone test_training_shape" \
            python3 aiter_mha_test.py &
        done
      done
      ;;
    bench)
      wait
      step bench python3 ../benchmarks/attention.py --out "$out/attention" \
        --markdown "$out/performance.md"
      ;;
  esac
done
wait
[ ! -e "$out/failed" ]
