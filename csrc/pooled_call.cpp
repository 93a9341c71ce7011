// The launch of a steady call of embedding_all_to_all on a GPU: a call that differs from an earlier call only in its ids.
//
// weft/runtime/cuda/embedding.py makes these objects (`EmbeddingAllToAllCuda.steady`). Python checks the earlier call, and passes
// what stays the same: layouts, addresses of tables, numbers of the kernel. Here a call is compared with these in a few
// microseconds. If anything else differs, or if the device has recorded an error, the call takes the slow path.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <array>
#include <bit>
#include <cmath>
#include <cstdint>
#include <optional>
#include <utility>
#include <vector>

#include "layouts.hpp"
#include "python.hpp"

namespace nb = nanobind;

namespace weft {

namespace {

// The grid and the units of work. weft/runtime/cuda/embedding_kernel.py (`_programs`) and embedding_tables.py
// (`_slots_per_unit`) explain the formulas.
struct Shape {
    bool staged, by_slot;
    int64_t features, multiprocessors, resident, batch;
    double mean_bytes, program_bags, program_bytes;
    int64_t programs_per_sm, most_unit_slots, by_slot_ids;
    double unit_bytes;

    int64_t slots_per_unit(int64_t ids) const {
        if (staged) return 0;
        const int64_t n = std::max<int64_t>(1, features), bags = std::max<int64_t>(1, batch * n);
        const double bag_bytes = double(ids) / double(bags) * mean_bytes;
        const int64_t most = std::min({most_unit_slots, n, bags / (4 * 32 * multiprocessors),
                                       bag_bytes > 1 ? int64_t(unit_bytes / bag_bytes) : n});
        return most > 0 ? int64_t(std::bit_floor(uint64_t(most))) : 1;
    }
    int64_t programs(int64_t units, int64_t ids) const {
        if (staged) return std::max<int64_t>(1, std::min(resident, units));
        const double work = std::max(double(batch * features) / program_bags, double(ids) * mean_bytes / program_bytes);
        const double wanted = std::min(double(units), std::max(double(programs_per_sm * multiprocessors), work));
        const int64_t per_sm = std::max<int64_t>(1, int64_t(std::ceil(wanted / double(multiprocessors))));
        return std::min(resident, multiprocessors * (per_sm <= 8 ? int64_t(std::bit_ceil(uint64_t(per_sm))) : (per_sm + 3) / 4 * 4));
    }
    bool pools_by_slot(int64_t ids, int64_t bags) const { return by_slot && ids >= by_slot_ids * bags; }
};

struct Units {
    uint64_t units, starts;  // addresses
    int64_t per_sample;
};

// Appends the number of a lent buffer to the list of free buffers when torch frees the tensor over the buffer.
struct SlotLease {
    SlotLease(nb::object memory, nb::list free, int64_t slot) : memory(memory), free(free), slot(slot) {}
    ~SlotLease() {
        if (!free.is_valid()) return;
        const nb::object number = nb::steal(PyLong_FromLongLong(slot));
        if (!number.is_valid() || PyList_Append(free.ptr(), number.ptr())) PyErr_WriteUnraisable(free.ptr());
    }
    SlotLease(const SlotLease &) = delete;
    nb::object memory;  // keeps the memory mapped
    nb::list free;
    int64_t slot;
};

}  // namespace

class PooledCall {
  public:
    // of: the recorded call, by name (`EmbeddingAllToAllCuda.steady`).
    explicit PooledCall(nb::dict of)
        : of_(of), reader_object_(of["reader"]), reader_(*nb::cast<const LayoutReader *>(reader_object_)), executor_(of["executor"]),
          memory_(of["memory"]), free_(nb::cast<nb::list>(of["free"])), shared_(of["shared"]), owner_(of["owner"]), keyed_(of["keyed"]),
          jagged_(of["jagged"]), make_jagged_(of["make_jagged"]), keys_(of["keys"]), checked_(of["checked"]), tables_(of["tables"]),
          run_(nb::object(of["program"]).attr("run")), stream_(of["stream"]), as_tensor_(of["as_tensor"]), ids_(code(of["values"])),
          offsets_(code(of["offsets"])), outputs_(int_of("outputs")), bags_(int_of("bags")), most_(int_of("most")),
          is_single_(int_of("single") != 0), record_(word_of("record")), base_(word_of("base")),
          slot_bytes_(word_of("slot_bytes")), watched_(words_of("watched")), before_(words_of("before")),
          addresses_(words_of("addresses")), numbers_(words_of("numbers")), after_(words_of("after")), rows_(word_of("rows")),
          columns_(word_of("columns")) {
        if (const nb::object weights = of["weights"]; !weights.is_none()) of_ids_ = code(weights);
        out_ = code(of["out"]);
        device_ = number(ids_.device_id);
        shape_ = {.staged = int_of("staged") != 0, .by_slot = int_of("by_slot") != 0, .features = int_of("features"),
                  .multiprocessors = int_of("multiprocessors"), .resident = int_of("resident"), .batch = int_of("batch"),
                  .mean_bytes = nb::cast<double>(of["mean_bytes"]), .program_bags = nb::cast<double>(of["program_bags"]),
                  .program_bytes = nb::cast<double>(of["program_bytes"]), .programs_per_sm = int_of("programs_per_sm"),
                  .most_unit_slots = int_of("most_unit_slots"), .by_slot_ids = int_of("by_slot_ids"),
                  .unit_bytes = nb::cast<double>(of["unit_bytes"])};
        for (nb::handle one : nb::cast<nb::list>(of["works"])) {
            const auto words = nb::cast<std::vector<uint64_t>>(one);
            works_.emplace_back(int64_t(words.at(0)), Units{words.at(1), words.at(2), int64_t(words.at(3))});
        }
        kept_ = of["kept"];
        of_ = nb::dict();  // it has the input and the result of the recorded call, whose memory must become free
    }

    // Returns the input of a call as a `JaggedInput` if the call is like the recorded call. Otherwise returns None. tables: the modules
    // of the tables, by name. gradients: true if gradients are enabled; then no tensor may require a gradient.
    nb::object read(nb::handle features, nb::dict tables, bool gradients) const {
        const bool is_keyed = features.type().is(keyed_);
        if (!is_keyed && !features.type().is(jagged_)) return nb::none();
        nb::object values, offsets, of_values;
        if (is_keyed) {
            const nb::object keys = get(features, keys_name_), lengths = get(features, given_lengths_);
            if (!get(features, given_offsets_).is_none() && !lengths.is_none()) return nb::none();
            if (!is_equal_list(keys)) return nb::none();
            if (!lengths.is_none() && !is_integers(lengths)) return nb::none();
            values = get(features, values_name_), offsets = get(features, offsets_name_);
            if (offsets.is_none()) offsets = call_method(features, offsets_method_);
            of_values = of_ids_ ? get(features, weights_name_) : nb::none();
        } else {
            const nb::tuple fields = nb::borrow<nb::tuple>(features);
            if (!(fields[0].is(keys_) || fields[0].equal(keys_))) return nb::none();
            values = fields[1], offsets = fields[2], of_values = fields[3];
        }
        if (of_values.is_none() == of_ids_.has_value()) return nb::none();
        if (!reader_.is_usable(values, false) || !reader_.is_usable(offsets, false)) return nb::none();
        const TensorView ids = reader_.view(values), bags = reader_.view(offsets);
        if (!is_row(ids, ids_) || !is_row(bags, offsets_) || bags.shape[0] - 1 != bags_) return nb::none();
        if (ids.shape[0] >= most_ || bags.shape[0] >= most_) return nb::none();
        if (of_ids_) {
            if (!reader_.is_usable(of_values, !gradients)) return nb::none();
            const TensorView view = reader_.view(of_values);
            if (!is_row(view, *of_ids_) || view.shape[0] != ids.shape[0]) return nb::none();
        }
        if (!find(shape_.slots_per_unit(ids.shape[0]))) return nb::none();
        if (is_single_ && int64_t(ids.shape[0]) != bags_) return nb::none();  // the kernel would be slow
        if (!are_known(tables, gradients)) return nb::none();
        if (!is_ready()) return nb::none();
        if (!is_keyed) return nb::borrow(features);
        const nb::object from_lengths = nb::borrow(get(features, given_offsets_).is_none() ? Py_True : Py_False);
        return call(make_jagged_, nb::make_tuple(keys_, values, offsets, of_values, get(features, stride_name_), from_lengths));
    }

    // Launches the kernel for an input that `read` has returned, and returns the result.
    nb::object launch(nb::handle jagged) const {
        const nb::tuple fields = nb::borrow<nb::tuple>(jagged);
        const TensorView ids = reader_.view(fields[1]), offsets = reader_.view(fields[2]);
        const int64_t n = ids.shape[0];
        const Units *const work = find(shape_.slots_per_unit(n));
        if (!work || !is_ready()) throw std::runtime_error("the call differs from the recorded call");
        const int64_t units = work->per_sample * shape_.batch;
        const nb::object number = checked(PyObject_CallMethod(free_.ptr(), "pop", nullptr));
        const auto slot = nb::cast<int64_t>(number);
        // If the launch fails, the lease frees the buffer again.
        const nb::object lease = nb::cast(new SlotLease(owner_, free_, slot), nb::rv_policy::take_ownership);
        std::vector<uint64_t> words{uint64_t(shape_.programs(units, n)), 1};
        words.insert(words.end(), before_.begin(), before_.end());
        words.insert(words.end(), {address(ids), address(offsets), of_ids_ ? address(reader_.view(fields[3])) : 0, 0, work->units, work->starts});
        words.insert(words.end(), addresses_.begin(), addresses_.end());
        words.insert(words.end(), {uint64_t(shape_.batch), uint64_t(units), uint64_t(n), uint64_t(slot)});
        words.insert(words.end(), numbers_.begin(), numbers_.end());
        words.push_back(uint64_t(std::max<int64_t>(1, work->per_sample)));
        words.insert(words.end(), after_.begin(), after_.end());
        words.push_back(shape_.pools_by_slot(n, bags_));
        const nb::object given = checked(PyList_New(Py_ssize_t(words.size())));
        for (size_t i = 0; i < words.size(); ++i)
            if (PyList_SetItem(given.ptr(), Py_ssize_t(i), checked(PyLong_FromUnsignedLongLong(words[i])).release().ptr()))
                throw nb::python_error();
        call(run_, zero_, one_, given, nb::make_tuple(call(stream_, device_)));
        const nb::object last = nb::make_tuple(nb::borrow(jagged), checked_);
        if (PyObject_SetAttr(executor_.ptr(), last_input_.ptr(), last.ptr())) throw nb::python_error();
        const size_t sizes[2] = {rows_, columns_};
        nb::ndarray<> result(reinterpret_cast<void *>(base_ + uint64_t(slot) * slot_bytes_), 2, sizes, lease, nullptr,
                             nb::dlpack::dtype{out_.code, out_.bits, 1}, out_.device_type, out_.device_id);
        return call(as_tensor_, nb::cast(result));
    }

  private:
    struct Code {
        uint8_t code, bits;
        int32_t device_type, device_id;
    };
    int64_t int_of(const char *name) const { return nb::cast<int64_t>(of_[name]); }
    uint64_t word_of(const char *name) const { return nb::cast<uint64_t>(of_[name]); }
    std::vector<uint64_t> words_of(const char *name) const { return nb::cast<std::vector<uint64_t>>(of_[name]); }
    Code code(nb::handle tensor) const {
        const TensorView view = reader_.view(tensor);
        return {view.dtype_code, view.dtype_bits, view.device_type, view.device_id};
    }
    static nb::object get(nb::handle object, nb::handle name) { return checked(PyObject_GetAttr(object.ptr(), name.ptr())); }
    static uint64_t address(const TensorView &view) { return uint64_t(reinterpret_cast<uintptr_t>(view.data)) + view.byte_offset; }
    static bool is_row(const TensorView &view, const Code &like) {
        return view.ndim == 1 && view.dtype_code == like.code && view.dtype_bits == like.bits && view.dtype_lanes == 1 &&
               view.device_type == like.device_type && view.device_id == like.device_id && (view.shape[0] < 2 || view.strides[0] == 1);
    }
    bool is_integers(nb::handle lengths) const {
        if (!reader_.is_usable(lengths, false)) return false;
        const TensorView view = reader_.view(lengths);
        int64_t count = 1;
        for (int32_t i = 0; i < view.ndim; ++i) count *= view.shape[i];
        return view.dtype_code == 0 && (view.dtype_bits == 32 || view.dtype_bits == 64) && count == bags_;
    }
    bool is_equal_list(nb::handle keys) const {
        if (!PyList_CheckExact(keys.ptr()) || nb::len(keys) != nb::len(keys_)) return false;
        const nb::list given = nb::borrow<nb::list>(keys);
        const nb::tuple known = nb::borrow<nb::tuple>(keys_);
        for (size_t i = 0; i < nb::len(given); ++i)
            if (!given[i].is(known[i]) && !given[i].equal(known[i])) return false;
        return true;
    }
    const Units *find(int64_t slots) const {
        for (const auto &[size, units] : works_)
            if (size == slots) return &units;
        return nullptr;
    }
    // Returns true if the tables (the modules of an `nn.ModuleDict`) have the layouts and addresses of the recorded call.
    bool are_known(nb::dict tables, bool gradients) const {
        nb::list weights;
        for (auto [name, module] : tables) {
            const nb::object parameters = get(module, parameters_name_);
            PyObject *const weight = PyDict_GetItemWithError(parameters.ptr(), weight_name_.ptr());
            if (!weight) {
                if (PyErr_Occurred()) throw nb::python_error();
                return false;  // the parameter was replaced
            }
            weights.append(nb::handle(weight));
        }
        return reader_.read(weights, gradients).equal(tables_);
    }
    // Returns false if the device has recorded an error, if memory has moved, or if a result must be copied.
    bool is_ready() const {
        for (const uint64_t word : watched_)
            if (reinterpret_cast<const volatile int64_t *>(record_)[word]) return false;
        if (!get(executor_, memory_name_).is(memory_) || PySet_Size(shared_.ptr()) != 0) return false;
        return nb::len(free_) > 1 || (outputs_ == 1 && nb::len(free_) == 1);
    }

    nb::dict of_;
    nb::object kept_;  // tensors and programs that the launches use
    nb::object reader_object_;
    const LayoutReader &reader_;
    nb::object executor_, memory_;
    nb::list free_;
    nb::object shared_, owner_, keyed_, jagged_, make_jagged_, keys_, checked_, tables_, run_, stream_, as_tensor_;
    Code ids_, offsets_;
    int64_t outputs_, bags_, most_;
    bool is_single_;
    uint64_t record_, base_, slot_bytes_;
    std::vector<uint64_t> watched_, before_, addresses_, numbers_, after_;
    size_t rows_, columns_;
    Code out_{};
    nb::object device_;
    std::optional<Code> of_ids_;
    Shape shape_{};
    std::vector<std::pair<int64_t, Units>> works_;
    nb::object keys_name_ = interned("_keys"), values_name_ = interned("_values"), offsets_name_ = interned("_offsets"),
               weights_name_ = interned("_weights"), stride_name_ = interned("_stride"), given_lengths_ = interned("_given_lengths"),
               given_offsets_ = interned("_given_offsets"), offsets_method_ = interned("offsets"), memory_name_ = interned("_memory"),
               parameters_name_ = interned("_parameters"), weight_name_ = interned("weight"),
               last_input_ = interned("_last_input"), zero_ = number(0), one_ = number(1);
};

}  // namespace weft

using namespace weft;

void register_pooled_call(nb::module_ &m) {
    nb::class_<SlotLease>(m, "SlotLease", "The owner of a lent buffer: it appends `slot` to the list `free` when it is deleted.")
        .def(nb::init<nb::object, nb::list, int64_t>(), nb::arg("memory"), nb::arg("free"), nb::arg("slot"));
    nb::class_<PooledCall>(m, "PooledCall", "The launch of a call of embedding_all_to_all that differs from an earlier call only in its ids.")
        .def(nb::init<nb::dict>(), nb::arg("of"))
        .def("read", &PooledCall::read, nb::arg("features"), nb::arg("tables"), nb::arg("gradients"))
        .def("launch", &PooledCall::launch, nb::arg("jagged"));
}
