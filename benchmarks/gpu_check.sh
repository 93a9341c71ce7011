#!/usr/bin/env bash
# Build, test and measure weft on a machine with GPUs: bash benchmarks/gpu_check.sh OUT [--op NAME] [--tests-only|--bench-only]
#
# --op selects the benchmark: embedding_all_to_all (the default), all_gather_matmul or all_to_all_matmul. Tests cover all operators.
# Ranks share GPUs if there are fewer GPUs than ranks. A call takes less than 590 s.
#
# It needs python3 (or PYTHON=...) with torch, Triton and pytest. The build needs a C++ compiler, cmake, ninja and nanobind. It needs
# neither network nor .venv. It writes OUT/doctor.txt, OUT/tests.txt, OUT/gpu-tests.json (results of the tests: append the file to
# benchmarks/results/h200-tests.json), OUT/bench-NAME.txt and OUT/*.jsonl. It continues after a failure, and then exits with 1. In a
# copy without .git, records take the commit from benchmarks/.commit (make commit-note, before the copy).
# WEFT_FBGEMM=folder with so.tar.xz and py.zip, or an installed fbgemm_gpu, adds that baseline.
# WEFT_TEST_PROCESSES (default: one for each three CPU cores, at most 12): the number of files of tests that run at the same time.
# WEFT_BENCH_S (default 110; operators with a GEMM: 165): the time limit in seconds for a part of the benchmark. Finished records are
# kept.
set -uo pipefail
cd "$(dirname "$0")/.." || exit 2
usage="usage: gpu_check.sh OUT [--op embedding_all_to_all|all_gather_matmul|all_to_all_matmul] [--tests-only|--bench-only]"
out=${1:?$usage}
shift
op=embedding_all_to_all
what=""
while [ $# -gt 0 ]; do
  case $1 in
    --op) op=${2:?$usage}; shift ;;
    --tests-only | --bench-only) what=$1 ;;
    *) echo "unknown option $1; $usage" >&2; exit 2 ;;
  esac
  shift
done
case $op in
  embedding_all_to_all) piece_s=110 ;;
  all_gather_matmul | all_to_all_matmul) piece_s=165 ;;
  *) echo "no operator $op; $usage" >&2; exit 2 ;;
esac
piece_s=${WEFT_BENCH_S:-$piece_s}
python=${PYTHON:-python3}
failed=0
mkdir -p "$out"
out=$(cd "$out" && pwd)
. benchmarks/gpu_build.sh
scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT

fail() {
  echo "FAILED: $*" >&2
  failed=1
}

# Print the time limit of a step in seconds: $1, or the time left for the whole call if less.
at_most() {
  local left=$((575 - SECONDS))
  echo $((left < 1 ? 1 : left < $1 ? left : $1))
}

# Run one file of tests, or one test of a file.
run_file() {
  local name status
  name=$(basename "$1") && name=${name/.py/}
  WEFT_CACHE_DIR=$scratch/weft-$name "$python" -m pytest -p no:cacheprovider -q --tb=short -rf --junitxml="$scratch/$name.xml" "$1" \
    >"$scratch/$name.txt" 2>&1
  status=$?
  tail -n 1 "$scratch/$name.txt" | sed "s/^/$name: /"
  return $status
}

# Run the tests of all operators. Processes share a queue of files, because ranks wait more for each other and for compilers than for
# GPUs. Tests of test_gpu_operators.py, the largest file, are queued one by one. Tests that measure the machine run first, alone.
tests() {
  local operators=tests/multigpu/test_gpu_operators.py measures=tests/multigpu/test_gpu_self_calibration.py junits=() file
  local files=(tests/multigpu/test_gpu_{four,norms,tensor_parallel}.py)  # the slowest files
  for file in $(sed -n "s/^def \(test_[a-z_]*\).*/\1/p" $operators); do files+=("$operators::$file"); done
  for file in tests/gpu/test_*.py tests/multigpu/test_*.py; do
    [[ $file == "$operators" || $file == "$measures" || " ${files[*]} " == *" $file "* ]] || files+=("$file")
  done
  local cores processes
  cores=$(env -u OMP_NUM_THREADS nproc)  # nproc prints OMP_NUM_THREADS if it is smaller
  processes=${WEFT_TEST_PROCESSES:-$((cores / 3 < 1 ? 1 : cores / 3 < 12 ? cores / 3 : 12))}
  export python scratch
  export -f run_file
  run_file $measures || fail "$measures"
  printf '%s\n' "${files[@]}" | timeout -k 10 "$(at_most 545)" xargs -P "$processes" -I{} bash -c 'run_file {}' || fail "tests"
  files+=($measures)
  for file in "${files[@]}"; do file=$(basename "$file") && junits+=("$scratch/${file/.py/}.xml"); done
  cat "$scratch"/test_*.txt >"$out/tests.txt"
  grep -a "^FAILED\|^ERROR" "$out/tests.txt"
  "$python" -m weft.bench.gpu_tests "$out/gpu-tests.json" "${junits[@]}" || fail "the record of the tests"
}

unpack_fbgemm() {
  local packed=${WEFT_FBGEMM:-}
  [ -n "$packed" ] && [ -f "$packed/so.tar.xz" ] && [ -f "$packed/py.zip" ] || return 0
  "$python" -c "import sys, zipfile; zipfile.ZipFile(sys.argv[1]).extractall(sys.argv[2])" "$packed/py.zip" "$scratch/site" &&
    xz -dc --memlimit=4GiB "$packed/so.tar.xz" | tar xf - -C "$scratch/site" || fail "unpacking $packed"
}

bench() { # bench NAME.jsonl arguments ...
  local file=$1 status
  shift
  timeout -k 10 "$(at_most "$piece_s")" "$python" -m weft.bench "$op" --device cuda --json "$out/$file" "$@" 2>&1 |
    tee -a "$out/bench-$op.txt"
  status=${PIPESTATUS[0]}
  [ "$status" -eq 0 ] && return
  fail "bench $file: $* (exit code $status; 124 is the time limit)"
  # A failure of FBGEMM must not cost the other variants.
  if [ "$status" -ne 124 ] && [[ "$*" == *,fbgemm* ]]; then bench "$file" "${@//,fbgemm/}"; fi
}

bench_embedding_all_to_all() {
  unpack_fbgemm
  [ -d "$scratch/site" ] && export PYTHONPATH="$PYTHONPATH:$scratch/site"
  local fbgemm=""
  if "$python" -c "import fbgemm_gpu" >"$out/fbgemm.txt" 2>&1; then fbgemm=,fbgemm; else echo "without FBGEMM: $out/fbgemm.txt"; fi
  local dense=pgas-weak,pgas-strong,grid-64x200k-d256-b4096-l32,grid-128x100k-d128-b1024-l20
  local every=embedding_bag,batched$fbgemm,direct,direct-natural,put,per-table
  local few=embedding_bag,batched$fbgemm,direct
  bench gpu-fp32.jsonl --ranks "$ranks" --preset $dense --mode single --mode queued --variants $every
  bench gpu-fp16.jsonl --ranks "$ranks" --preset $dense --mode queued --dtype fp16 --variants $few
  bench gpu-fp32.jsonl --ranks "$ranks" --preset dcnv2,criteo-kaggle --mode queued --variants $few,put
}

# The largest shapes run last, each in its own call, because such a shape takes as long as ten others.
bench_all_gather_matmul() {
  bench matmul-bf16.jsonl --ranks "$ranks" --preset measured,llama-3-8b,mixtral-8x7b --seconds 0.15
  bench matmul-bf16.jsonl --ranks "$ranks" --preset llama-3-70b,llama-3-405b --seconds 0.1
}

bench_all_to_all_matmul() {
  bench dispatch-bf16.jsonl --ranks "$ranks" --preset mixtral-8x7b --seconds 0.1
  bench dispatch-bf16.jsonl --ranks "$ranks" --preset deepseek-v3,qwen3-30b-a3b --seconds 0.1
}

build
ranks=$("$python" -c "import torch; print(torch.cuda.device_count())")
"$python" -m weft.cli doctor 2>&1 | tee "$out/doctor.txt"
[ "$what" = --bench-only ] || tests
[ "$what" = --tests-only ] || [ "$ranks" -gt 1 ] || { echo "with one GPU there is nothing to measure" >&2; exit $failed; }
[ "$what" = --tests-only ] || "bench_$op"
exit $failed
