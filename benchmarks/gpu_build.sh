# Set the environment for runs on a machine with GPUs. Source this file from the root of the tree, with $python and $out. `build`
# builds the native module if it is missing.
export PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}" PYTHONUNBUFFERED=1
# A fault in NVLink multicast on a shared host affects all its users, and weft does not need multicast.
export NCCL_NVLS_ENABLE=0 TORCH_SYMM_MEM_DISABLE_MULTICAST=1 NVSHMEM_DISABLE_NVLS=1

build() {
  "$python" -c "import weft._core" 2>/dev/null && return
  cmake -S . -B build/gpu -G Ninja -DCMAKE_BUILD_TYPE=Release -DPython_EXECUTABLE="$("$python" -c 'import sys; print(sys.executable)')" \
    >"$out/build.txt" 2>&1 &&
    cmake --build build/gpu --target _core >>"$out/build.txt" 2>&1 &&
    cp build/gpu/_core*.so weft/ && "$python" -c "import weft._core" && return
  cat "$out/build.txt"
  echo "the native module could not be built: nothing else can run" >&2
  exit 1
}
