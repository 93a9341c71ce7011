// Issues a schedule's copies, signals and events on GPU streams in one call of native code.
//
// A Python loop takes microseconds for each operation, but a small call may take only 70 us in all. So the operations
// are recorded once, with buffers, streams and events as numbers. `run` issues a range of operations with the addresses
// of the current tensors. Its loop allocates nothing, uses no Python object and does not hold the GIL. Operations may
// also be small kernels that Triton has already loaded. Calls of torch and NCCL come between two ranges.
//
// Order: operations of one stream are ordered, and so are the waits and writes of one `signal`. Writes keep the
//     driver's default memory barrier (a system-wide fence over the earlier work of the stream). So after a wait on
//     another rank's stream has seen the value, the following work sees the copies that precede the write. Events order
//     streams of this rank. Values written and awaited are the same in every run, so a captured graph can repeat them.
//
// The driver is loaded when a program is made, so that neither building nor importing needs CUDA. Declarations follow
// the CUDA Driver API reference ("Memory Management", "Stream Memory Operations", "Event Management", "Execution
// Control"), with 64-bit addresses. Only NVIDIA's driver is loaded; HIP has other names for these functions.
#include <dlfcn.h>
#include <nanobind/nanobind.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <cstddef>
#include <cstdint>
#include <initializer_list>
#include <memory>
#include <sstream>
#include <stdexcept>
#include <string>
#include <tuple>
#include <type_traits>
#include <utility>
#include <vector>

#include "copy.hpp"

namespace nb = nanobind;

namespace {

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
constexpr size_t most_parameters = 64;          // per kernel
constexpr uint64_t most_programs = 0x7fffffff;  // in one dimension of a grid

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
std::string text(const Part &...parts) {
    std::ostringstream out;
    (out << ... << parts);
    return out.str();
}

template <typename... Part>
void require(bool good, const Part &...parts) {
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

// A loaded kernel and its arguments. An argument is a number, or an address relative to a base.
class KernelCall {
  public:
    enum class Source { number, base };
    struct Parameter {
        Source source;
        int64_t base = 0, number = 0;  // `number` is added to the base's address
    };

    KernelCall(uint64_t function, int64_t programs, int64_t threads, int64_t shared_bytes)
        : function(reinterpret_cast<Handle>(function)), programs(programs), threads(threads), shared_bytes(shared_bytes) {
        require(function != 0, "function=0 is not a kernel");
        require(programs > 0 && threads > 0 && shared_bytes >= 0, "programs=", programs, " and threads=", threads,
                " must be positive, and shared_bytes=", shared_bytes, " not negative");
    }
    KernelCall &number(int64_t value) { return append({Source::number, 0, value}); }
    KernelCall &base(int64_t base, int64_t offset) { return append({Source::base, base, offset}); }
    KernelCall &grid(int64_t x, int64_t y) {
        require(x >= 0 && y >= 0, "x=", x, " and y=", y, " are numbers of bases: they must not be negative");
        grid_x = x, grid_y = y;
        return *this;
    }

    Handle function;
    int64_t programs, threads, shared_bytes;
    int64_t grid_x = -1, grid_y = -1;  // the bases that hold the grid of a run; -1: the grid is `programs`
    std::vector<Parameter> parameters;
    // The driver reads as many bytes of each value as the kernel declares. On little-endian machines these are the low
    // bytes.
    std::vector<uint64_t> values;

  private:
    KernelCall &append(const Parameter &parameter) {
        parameters.push_back(parameter);
        values.push_back(0);
        return *this;
    }
};

// the deleter ignores the error if the context was destroyed first
using Event = std::unique_ptr<void, Result (*)(Handle)>;

// One struct for all kinds: programs are short, and the loop reads them in order.
struct Operation {
    enum class Kind { copy, signal, record, wait_event, launch } kind;
    int64_t stream;
    int64_t number = 0;  // the number of the event, the launch, or the memory operations
    int64_t dst_base = 0, dst_offset = 0, dst_pitch = 0;
    int64_t src_base = 0, src_offset = 0, src_pitch = 0;
    int64_t width_bytes = 0, rows = 0;

    std::string describe() const {
        switch (kind) {
        case Kind::copy:
            return text("copy of ", rows, " rows of ", width_bytes, " bytes from base ", src_base, " + ", src_offset,
                        " (pitch ", src_pitch, ") to base ", dst_base, " + ", dst_offset, " (pitch ", dst_pitch, ")");
        case Kind::signal: return text("signal ", number);
        case Kind::record: return text("record of event ", number);
        case Kind::launch: return text("launch ", number);
        default: return text("wait for event ", number);
        }
    }
};
using Kind = Operation::Kind;

class StreamProgram {
  public:
    StreamProgram(int64_t n_bases, int64_t n_streams, int64_t n_events, const std::string &library) : driver_(library) {
        require(n_bases >= 0 && n_streams >= 0 && n_events >= 0, "n_bases=", n_bases, ", n_streams=", n_streams,
                ", n_events=", n_events, " must not be negative");
        bases_.resize(size_t(n_bases));
        streams_.resize(size_t(n_streams));
        while (events_.size() < size_t(n_events)) {
            Handle event = nullptr;
            if (const Result result = driver_.event_create(&event, event_disable_timing); result != 0)
                throw std::runtime_error(text("creation of event ", events_.size(), ": ", driver_.explain(result)));
            events_.emplace_back(event, driver_.event_destroy);
        }
    }
    StreamProgram(const StreamProgram &) = delete;
    StreamProgram &operator=(const StreamProgram &) = delete;

    size_t copy(int64_t stream, int64_t dst_base, int64_t dst_offset, int64_t dst_pitch, int64_t src_base,
                int64_t src_offset, int64_t src_pitch, int64_t width_bytes, int64_t rows) {
        require_below("dst_base", dst_base, "n_bases", bases_.size());
        require_below("src_base", src_base, "n_bases", bases_.size());
        require(dst_offset >= 0 && src_offset >= 0, "dst_offset=", dst_offset, " and src_offset=", src_offset,
                " bytes must not be negative");
        weft::require_copy(dst_pitch, src_pitch, width_bytes, rows);
        return append({.kind = Kind::copy, .stream = stream, .dst_base = dst_base, .dst_offset = dst_offset,
                       .dst_pitch = dst_pitch, .src_base = src_base, .src_offset = src_offset, .src_pitch = src_pitch,
                       .width_bytes = width_bytes, .rows = rows});
    }
    // Each item is (true for a wait, base, byte offset, number). A wait ends when the 64-bit word at this address and
    // `number` have a common bit. A write stores the low 32 bits of `number`.
    using Signal = std::tuple<bool, int64_t, int64_t, uint64_t>;
    size_t signal(int64_t stream, const std::vector<Signal> &parts) {
        require(!parts.empty(), "a signal needs at least one wait or write");
        require_idle();
        std::vector<std::pair<int64_t, MemoryOperation>> operations;
        for (const auto &[waits, base, offset, number] : parts) {
            require_below("base", base, "n_bases", bases_.size());
            const int64_t bytes = waits ? 8 : 4;
            require(offset >= 0 && offset % bytes == 0, "offset=", offset, " bytes must be 0 or a multiple of ", bytes);
            operations.emplace_back(base, MemoryOperation{.operation = waits ? wait_value_64 : write_value_32,
                                                          .address = uint64_t(offset), .value = number,
                                                          .flags = waits ? wait_value_and : write_value_default,
                                                          .alias = 0, .unused = 0});
        }
        signals_.push_back(std::move(operations));
        return append({.kind = Kind::signal, .stream = stream, .number = int64_t(signals_.size() - 1)});
    }
    template <Kind kind>
    size_t event(int64_t stream, int64_t event) {
        require_below("event", event, "n_events", events_.size());
        return append({.kind = kind, .stream = stream, .number = event});
    }

    // Records a launch of the first of `calls` (alignment, kernel) whose addresses are all multiples of its alignment.
    size_t launch(int64_t stream, std::vector<std::pair<int64_t, KernelCall>> calls) {
        require(!calls.empty(), "a launch needs at least one kernel");
        for (const auto &[alignment, call] : calls) {
            require(alignment > 0, "alignment=", alignment, " must be positive");
            for (const auto &parameter : call.parameters)
                if (parameter.source == KernelCall::Source::base)
                    require_below("base", parameter.base, "n_bases", bases_.size());
            if (call.grid_x >= 0) {
                require_below("x", call.grid_x, "n_bases", bases_.size());
                require_below("y", call.grid_y, "n_bases", bases_.size());
            }
            require_parameters(call);
        }
        require_idle();
        launches_.push_back(std::move(calls));
        return append({.kind = Kind::launch, .stream = stream, .number = int64_t(launches_.size() - 1)});
    }
    // Returns the size of each parameter in bytes; empty if the driver cannot tell.
    std::vector<size_t> parameters_of(uint64_t function) const {
        std::vector<size_t> sizes;
        size_t offset = 0, bytes = 0;
        while (driver_.parameter_info &&
               driver_.parameter_info(reinterpret_cast<Handle>(function), sizes.size(), &offset, &bytes) == 0)
            sizes.push_back(bytes);
        return sizes;
    }

    size_t size() const { return operations_.size(); }

    void run(int64_t first, int64_t last, nb::handle bases, nb::handle streams) {
        require_idle();
        require(0 <= first && first <= last && size_t(last) <= size(), "first=", first, ", last=", last,
                ": 0 <= first <= last <= ", size(), " operations must hold");
        read("bases", bases, bases_);
        read("streams", streams, streams_);
        Result result = 0;
        auto at = size_t(first);
        running_ = true;
        {
            nb::gil_scoped_release unlocked;
            while (at < size_t(last) && (result = issue(operations_[at])) == 0) ++at;
        }
        running_ = false;
        if (result != 0)
            throw std::runtime_error(text("operation ", at, ", ", operations_[at].describe(), ", on stream ",
                                          operations_[at].stream, ": ", driver_.explain(result)));
    }

  private:
    Result issue(const Operation &op) {
        const Handle stream = streams_[size_t(op.stream)];
        switch (op.kind) {
        case Kind::copy: return issue_copy(op, stream);
        case Kind::signal: return issue_signal(signals_[size_t(op.number)], stream);
        case Kind::record: return driver_.event_record(events_[size_t(op.number)].get(), stream);
        case Kind::launch: return issue_launch(launches_[size_t(op.number)], stream);
        default: return driver_.stream_wait_event(stream, events_[size_t(op.number)].get(), 0);
        }
    }
    Result issue_signal(const std::vector<std::pair<int64_t, MemoryOperation>> &operations, Handle stream) {
        placed_.clear();
        for (const auto &[base, operation] : operations) {
            placed_.push_back(operation);
            placed_.back().address += bases_[size_t(base)];
        }
        return driver_.batch_memory_operations(stream, unsigned(placed_.size()), placed_.data(), 0);
    }
    Result issue_copy(const Operation &op, Handle stream) const {
        if (op.width_bytes == 0 || op.rows == 0) return 0;
        const Address src = bases_[size_t(op.src_base)] + uint64_t(op.src_offset);
        if (weft::is_contiguous(op.dst_pitch, op.src_pitch, op.width_bytes, op.rows))
            return driver_.memcpy_async(dst(op), src, size_t(op.width_bytes) * size_t(op.rows), stream);
        CudaMemcpy2D copy{};
        copy.src_memory_type = copy.dst_memory_type = memory_type_unified;
        copy.src_device = src, copy.src_pitch = size_t(op.src_pitch);
        copy.dst_device = dst(op), copy.dst_pitch = size_t(op.dst_pitch);
        copy.width_bytes = size_t(op.width_bytes), copy.height = size_t(op.rows);
        return driver_.memcpy_2d_async(&copy, stream);
    }
    Result issue_launch(std::vector<std::pair<int64_t, KernelCall>> &calls, Handle stream) {
        for (auto &[alignment, call] : calls) {
            void *places[most_parameters];
            bool aligned = true;
            for (size_t i = 0; i < call.parameters.size(); ++i) {
                const auto &[source, base, number] = call.parameters[i];
                uint64_t value = uint64_t(number);
                if (source == KernelCall::Source::base) {
                    value += bases_[size_t(base)];
                    aligned = aligned && value % uint64_t(alignment) == 0;
                }
                call.values[i] = value;
                places[i] = &call.values[i];
            }
            if (!aligned) continue;
            const bool given = call.grid_x >= 0;
            const auto x = given ? bases_[size_t(call.grid_x)] : uint64_t(call.programs);
            const auto y = given ? bases_[size_t(call.grid_y)] : 1;
            if (x > most_programs || y > most_programs) return error_invalid_value;
            return driver_.launch_kernel(call.function, unsigned(x), unsigned(y), 1, unsigned(call.threads), 1, 1,
                                         unsigned(call.shared_bytes), stream, places, nullptr);
        }
        return error_invalid_value;
    }
    void require_parameters(const KernelCall &call) const {
        const auto sizes = parameters_of(reinterpret_cast<uint64_t>(call.function));
        require(!driver_.parameter_info || sizes.size() == call.parameters.size(), "the kernel takes ", sizes.size(),
                " parameters, and ", call.parameters.size(), " are given");
        require(call.parameters.size() <= most_parameters, "a kernel of ", call.parameters.size(),
                " parameters: at most ", most_parameters);
        for (size_t i = 0; i < sizes.size(); ++i)
            require(sizes[i] <= sizeof(uint64_t), "parameter ", i, " of the kernel has ", sizes[i],
                    " bytes: numbers have at most 8");
    }
    Address dst(const Operation &op) const { return bases_[size_t(op.dst_base)] + uint64_t(op.dst_offset); }

    size_t append(const Operation &operation) {
        require_idle();
        require_below("stream", operation.stream, "n_streams", streams_.size());
        operations_.push_back(operation);
        return size() - 1;
    }
    // The GIL is released while operations are issued. So no other thread may change the data that the loop reads.
    void require_idle() const {
        if (running_) throw std::runtime_error("another thread runs this program: make one program per thread");
    }
    static void require_below(const char *name, int64_t number, const char *limit, size_t n) {
        require(0 <= number && size_t(number) < n, name, "=", number, " must be at least 0 and below ", limit, "=", n);
    }
    // Accepts lists and tuples only: their items are read in place, without running Python code.
    template <typename Word>
    static void read(const char *name, nb::handle numbers, std::vector<Word> &into) {
        PyObject *const from = numbers.ptr();
        const bool listed = PyList_Check(from);
        if (!listed && !PyTuple_Check(from))
            throw nb::type_error(text(name, " must be a list or a tuple of int").c_str());
        // nanobind's macros read items in place, or by a function if the stable ABI hides their place.
        const auto n = size_t(listed ? NB_LIST_GET_SIZE(from) : NB_TUPLE_GET_SIZE(from));
        require(n == into.size(), name, " has ", n, " numbers, but the program was made for ", into.size());
        for (size_t i = 0; i < n; ++i) {
            const auto place = Py_ssize_t(i);
            PyObject *const item = listed ? NB_LIST_GET_ITEM(from, place) : NB_TUPLE_GET_ITEM(from, place);
            const uint64_t number = PyLong_AsUnsignedLongLong(item);
            if (number == uint64_t(-1) && PyErr_Occurred()) {
                PyErr_Clear();
                require(false, name, "[", i, "] must be an int from 0 to 2^64 - 1");
            }
            into[i] = (Word)number;
        }
    }

    Driver driver_;
    std::vector<Address> bases_;  // addresses and streams of the last run
    std::vector<Handle> streams_;
    std::vector<Event> events_;
    std::vector<Operation> operations_;
    std::vector<std::vector<std::pair<int64_t, KernelCall>>> launches_;
    std::vector<std::vector<std::pair<int64_t, MemoryOperation>>> signals_;  // each with its base
    std::vector<MemoryOperation> placed_;  // at their final addresses, for the driver
    bool running_ = false;
};

}  // namespace

void register_stream_program(nb::module_ &m) {
    using P = StreamProgram;
    using K = KernelCall;
    nb::class_<K>(m, "KernelCall", "A loaded kernel and its arguments.")
        .def(nb::init<uint64_t, int64_t, int64_t, int64_t>(), nb::arg("function"), nb::arg("programs"),
             nb::arg("threads"), nb::arg("shared_bytes"))
        .def("number", &K::number, nb::arg("value"), nb::rv_policy::reference)
        .def("base", &K::base, nb::arg("base"), nb::arg("offset"), nb::rv_policy::reference)
        .def("grid", &K::grid, nb::arg("x"), nb::arg("y"), nb::rv_policy::reference);
    nb::class_<P>(m, "StreamProgram", "Operations on CUDA streams, recorded once and issued many times.")
        .def(nb::init<int64_t, int64_t, int64_t, const std::string &>(), nb::arg("n_bases"), nb::arg("n_streams"),
             nb::arg("n_events"), nb::arg("library") = "libcuda.so.1")
        .def("copy", &P::copy, nb::arg("stream"), nb::arg("dst_base"), nb::arg("dst_offset"), nb::arg("dst_pitch"),
             nb::arg("src_base"), nb::arg("src_offset"), nb::arg("src_pitch"), nb::arg("width_bytes"), nb::arg("rows"))
        .def("signal", &P::signal, nb::arg("stream"), nb::arg("parts"))
        .def("record", &P::event<Kind::record>, nb::arg("stream"), nb::arg("event"))
        .def("wait_event", &P::event<Kind::wait_event>, nb::arg("stream"), nb::arg("event"))
        .def("launch", &P::launch, nb::arg("stream"), nb::arg("calls"))
        .def("parameters_of", &P::parameters_of, nb::arg("function"))
        .def("__len__", &P::size)
        .def("run", &P::run, nb::arg("first"), nb::arg("last"), nb::arg("bases"), nb::arg("streams"));
}
