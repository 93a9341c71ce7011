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
#include <nanobind/nanobind.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <cstddef>
#include <cstdint>
#include <memory>
#include <stdexcept>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "copy.hpp"
#include "cuda_driver.hpp"
#include "kernel_call.hpp"

namespace nb = nanobind;
using namespace weft;

namespace {

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
            call.require_valid(parameters_of(reinterpret_cast<uint64_t>(call.function)), bases_.size());
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
        for (auto &[alignment, call] : calls)
            if (call.is_aligned(bases_, alignment)) return call.launch(driver_, bases_, stream);
        return error_invalid_value;
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
        .def("count", &K::count, nb::arg("base"), nb::rv_policy::reference)
        .def(
            "map",
            [](K &self, int64_t base, int64_t offset, int data_type, int swizzle, int item_bytes, std::vector<uint64_t> sizes,
               std::vector<uint64_t> strides, std::vector<unsigned> box, int64_t rows, int64_t instead, bool is_sized) -> K & {
                return self.map({base, offset, data_type, swizzle, item_bytes, std::move(sizes), std::move(strides), std::move(box), rows, instead, is_sized});
            },
            nb::kw_only(), nb::arg("base"), nb::arg("offset"), nb::arg("data_type"), nb::arg("swizzle"), nb::arg("item_bytes"),
            nb::arg("sizes"), nb::arg("strides"), nb::arg("box"), nb::arg("rows"), nb::arg("instead"),
            nb::arg("is_sized"), nb::rv_policy::reference)
        .def("grid", &K::grid, nb::arg("x"), nb::arg("y"), nb::rv_policy::reference)
        .def("row_tiles", &K::row_tiles, nb::arg("rows"), nb::arg("tile"), nb::arg("more"), nb::arg("times"), nb::rv_policy::reference)
        .def("only_if", &K::only_if, nb::arg("base"), nb::rv_policy::reference);
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
