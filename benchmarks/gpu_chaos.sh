#!/usr/bin/env bash
# Inject faults on GPUs: bash benchmarks/gpu_chaos.sh OUT [options of python -m tests.chaos]. A call takes less than 590 s. If cases
# remain, run the same command again; it continues from OUT/chaos.jsonl. It uses two GPUs, or two ranks on one GPU.
#
# It has the requirements of gpu_check.sh, without pytest. It writes OUT/chaos.jsonl (the record), OUT/wrong-*/ (traces of wrong
# cases) and OUT/chaos.txt (the printed text, with the tables last). It exits with 1 if any case is wrong.
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
