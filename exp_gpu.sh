python=python3; out=$OUT; . benchmarks/gpu_build.sh; build; nvidia-smi -L | head -2
scratch=$(mktemp -d); export scratch python
run_file() { n=$(basename "$1" .py); WEFT_CACHE_DIR=$scratch/weft-$n timeout 280 python3 -m pytest -p no:cacheprovider -q --tb=short -rf "$1" > $scratch/$n.txt 2>&1; echo "$n: $(tail -n 1 $scratch/$n.txt)"; grep -a "^FAILED\|^ERROR" $scratch/$n.txt; }
export -f run_file
printf '%s\n' "$@" | xargs -P 10 -I{} bash -c 'run_file {}'
cat $scratch/*.txt > $out/tests.txt
