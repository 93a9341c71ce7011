#!/usr/bin/env bash
# Faults on GPUs: bash benchmarks/gpu_chaos.sh OUT [options of python -m tests.chaos]. Takes less than 590 s: what is left then the same
# command goes on with, if OUT/chaos.jsonl is still there. On two GPUs, or with two ranks on one.
#
# Needs what gpu_check.sh needs, without pytest. Writes OUT/chaos.jsonl (the record), OUT/wrong-*/ (traces of what went wrong) and
# OUT/chaos.txt (what is printed: tables, last). Exits with 1 if anything is wrong.
set -uo pipefail
cd "$(dirname "$0")/.." || exit 2
out=${1:?usage: gpu_chaos.sh OUT [options of python -m tests.chaos]}
shift
python=${PYTHON:-python3}
mkdir -p "$out"
out=$(cd "$out" && pwd)
. benchmarks/gpu_build.sh
build
timeout -k 10 585 "$python" -m tests.chaos --device cuda --record "$out/chaos.jsonl" --within $((480 - SECONDS)) "$@" 2>&1 |
  tee "$out/chaos.txt"
exit "${PIPESTATUS[0]}"
