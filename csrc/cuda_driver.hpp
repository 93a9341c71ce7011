// The functions of CUDA's driver that native code calls, and their types.
//
// The driver is loaded when a `Driver` is made, so that neither building nor importing needs CUDA. Declarations follow
// the CUDA Driver API reference ("Memory Management", "Stream Memory Operations", "Event Management", "Execution
// Control", "Tensor Map Object Management"), with 64-bit addresses. Only NVIDIA's driver is loaded; HIP has other names for
// these functions.
#pragma once
#include <dlfcn.h>
#include <nanobind/nanobind.h>

#include <cstddef>
#include <cstdint>
#include <initializer_list>
#include <sstream>
#include <stdexcept>
#include <string>
#include <type_traits>

namespace weft {

namespace nb = nanobind;

using Result = int;        // CUresult; 0 is success
using Address = uint64_t;  // CUdeviceptr
using Handle = void *;     // CUstream, CUevent, CUarray

struct CudaMemcpy2D {  // CUDA_MEMCPY2D_v2
    size_t src_x_bytes, src_y;
    int src_memory_type;
    const void *src_host;
    Address src_device;
    Handle src_array;
    size_t src_pitch;
    size_t dst_x_bytes, dst_y;
    int dst_memory_type;
    void *dst_host;
    Address dst_device;
    Handle dst_array;
    size_t dst_pitch;
    size_t width_bytes, height;
};
static_assert(offsetof(CudaMemcpy2D, src_device) == 32 && offsetof(CudaMemcpy2D, dst_device) == 88 &&
              offsetof(CudaMemcpy2D, width_bytes) == 112 && sizeof(CudaMemcpy2D) == 128);

constexpr int memory_type_unified = 4;          // CU_MEMORYTYPE_UNIFIED
constexpr unsigned event_disable_timing = 2;    // CU_EVENT_DISABLE_TIMING
constexpr unsigned write_value_32 = 2;          // CU_STREAM_MEM_OP_WRITE_VALUE_32
constexpr unsigned wait_value_64 = 4;           // CU_STREAM_MEM_OP_WAIT_VALUE_64
constexpr unsigned write_value_default = 0;     // CU_STREAM_WRITE_VALUE_DEFAULT: with a memory barrier
constexpr unsigned wait_value_and = 2;          // CU_STREAM_WAIT_VALUE_AND: (*address & value) != 0
constexpr Result error_invalid_value = 1;       // CUDA_ERROR_INVALID_VALUE

struct MemoryOperation {  // CUstreamBatchMemOpParams: its waits and its writes
    unsigned operation;
    Address address;
    uint64_t value;
    unsigned flags;
    Address alias;
    uint64_t unused;
};
static_assert(offsetof(MemoryOperation, value) == 16 && offsetof(MemoryOperation, alias) == 32 &&
              sizeof(MemoryOperation) == 48);

template <typename... Part>
inline std::string text(const Part &...parts) {
    std::ostringstream out;
    (out << ... << parts);
    return out.str();
}

template <typename... Part>
inline void require(bool good, const Part &...parts) {
    if (!good) throw nb::value_error(text(parts...).c_str());
}

struct Driver {
    Result (*memcpy_async)(Address, Address, size_t, Handle);
    Result (*memcpy_2d_async)(const CudaMemcpy2D *, Handle);
    Result (*batch_memory_operations)(Handle, unsigned, MemoryOperation *, unsigned);
    Result (*event_create)(Handle *, unsigned);
    Result (*event_record)(Handle, Handle);
    Result (*event_destroy)(Handle);
    Result (*stream_wait_event)(Handle, Handle, unsigned);
    Result (*launch_kernel)(Handle, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, Handle, void **,
                            void **);
    Result (*parameter_info)(Handle, size_t, size_t *, size_t *) = nullptr;  // missing in drivers before CUDA 12.4
    Result (*encode_tiled)(void *, int, unsigned, Address, const uint64_t *, const uint64_t *, const unsigned *, const unsigned *, int,
                           int, int, int) = nullptr;  // cuTensorMapEncodeTiled; missing in drivers before CUDA 12.0
    int version = 0;
    Result (*error_name)(Result, const char **);
    Result (*error_string)(Result, const char **);

    explicit Driver(const std::string &library) {
        // Never closed: torch uses the same driver, and unloading it is not supported.
        void *loaded = dlopen(library.c_str(), RTLD_NOW | RTLD_LOCAL);
        if (!loaded)
            throw std::runtime_error(
                text("cannot load ", library, " (", dlerror(), "): CUDA streams need an NVIDIA driver"));
        auto find = [&](auto &function, std::initializer_list<const char *> names) {
            void *symbol = nullptr;
            for (const char *name : names)
                if (!symbol) symbol = dlsym(loaded, name);
            if (!symbol)
                throw std::runtime_error(text(library, " has no ", *names.begin(), ": it is not an NVIDIA driver"));
            function = reinterpret_cast<std::decay_t<decltype(function)>>(symbol);
        };
        find(memcpy_async, {"cuMemcpyAsync"});
        find(memcpy_2d_async, {"cuMemcpy2DAsync_v2"});
        find(batch_memory_operations, {"cuStreamBatchMemOp_v2", "cuStreamBatchMemOp"});
        find(event_create, {"cuEventCreate"});
        find(event_record, {"cuEventRecord"});
        find(event_destroy, {"cuEventDestroy_v2"});
        find(stream_wait_event, {"cuStreamWaitEvent"});
        find(launch_kernel, {"cuLaunchKernel"});
        if (void *symbol = dlsym(loaded, "cuFuncGetParamInfo"))
            parameter_info = reinterpret_cast<decltype(parameter_info)>(symbol);
        if (void *symbol = dlsym(loaded, "cuTensorMapEncodeTiled"))
            encode_tiled = reinterpret_cast<decltype(encode_tiled)>(symbol);
        if (void *symbol = dlsym(loaded, "cuDriverGetVersion"))
            if (reinterpret_cast<Result (*)(int *)>(symbol)(&version) != 0) version = 0;
        find(error_name, {"cuGetErrorName"});
        find(error_string, {"cuGetErrorString"});
    }

    std::string explain(Result result) const {
        const char *name = nullptr, *meaning = nullptr;
        if (error_name(result, &name) != 0 || !name) name = "an error that the driver cannot name";
        if (error_string(result, &meaning) != 0 || !meaning) meaning = "no description";
        return text(name, " (", result, "): ", meaning);
    }
};

}  // namespace weft
