// Layouts and addresses of many tensors (address, device, dtype, sizes and strides) as comparable bytes.
//
// Python needs a call for each of these properties. For the tables of a recommendation model, these calls take longer
// than a kernel launch. DLPack's C exchange API returns all properties of a tensor in one call. A framework's tensor type
// offers this API as a capsule. Declarations follow dlpack.h, version 1.3; later minor versions only add to them.
//
// The arguments of a whole call are read in the same way, so a cached call is found in a microsecond.
#pragma once
#include <nanobind/nanobind.h>

#include <bit>
#include <cstdint>
#include <cstring>
#include <stdexcept>
#include <vector>

#include "python.hpp"

namespace weft {

namespace nb = nanobind;

struct TensorView {  // DLTensor
    void *data;
    int32_t device_type, device_id;
    int32_t ndim;
    uint8_t dtype_code, dtype_bits;
    uint16_t dtype_lanes;
    int64_t *shape, *strides;
    uint64_t byte_offset;
};
static_assert(sizeof(TensorView) == 48);

inline bool is_on_gpu(const TensorView &tensor) {
    constexpr int32_t CUDA = 2, ROCM = 10;  // DLPack's device types
    return tensor.device_type == CUDA || tensor.device_type == ROCM;
}

struct ExchangeApi {  // DLPackExchangeAPI
    uint32_t major, minor;
    void *previous;
    void *allocate, *from_object, *to_object;
    int (*tensor_of)(void *object, TensorView *out);  // borrowed: valid while the object lives
    void *current_work_stream;
};

class LayoutReader {
  public:
    LayoutReader(nb::object tensor, nb::object parameter)
        : tensor_(tensor), parameter_(parameter), capsule_(nb::cast<nb::capsule>(tensor.attr("__dlpack_c_exchange_api__"))),
          api_(static_cast<ExchangeApi *>(capsule_.data())) {
        if (api_->major != 1 || !api_->tensor_of)
            throw std::runtime_error("these tensors offer no DLPack exchange API of version 1");
    }
    // Returns None if an object is not a plain tensor or parameter. Also returns None if gradients are enabled and a
    // tensor requires a gradient.
    nb::object read(nb::list tensors, bool gradients) const {
        Words words;
        words.reserve(8 * nb::len(tensors));
        for (nb::handle object : tensors) {
            if (!is_plain(object)) return nb::none();
            if (gradients && nb::cast<bool>(nb::getattr(object, requires_grad_))) return nb::none();
            const TensorView tensor = view(object);
            words.push_back(address(tensor));
            add(words, tensor);
        }
        return words.bytes();
    }
    // Returns the key of arguments: tensors without their addresses, numbers, flags, None, and lists of these. Returns
    // None for any other argument, for a tensor whose storage was freed, and for a negated view.
    nb::object signature(nb::tuple arguments, bool gradients) {
        Words words;
        words.reserve(64);
        for (nb::handle argument : arguments)
            if (!sign(words, argument, gradients)) return nb::none();
        return words.bytes();
    }

    // The words of a key. One object per call, because querying a tensor may run Python code, which may run another call.
    struct Words : std::vector<int64_t> {
        using Places = std::vector<size_t>;  // indices, in ascending order
        Places rows;                          // of the numbers of rows of matrices
        bool begins_with_matrix = false;      // true if the first argument is a matrix

        nb::bytes bytes() const { return nb::bytes(reinterpret_cast<const char *>(data()), size() * sizeof(int64_t)); }
        // Returns the number of rows of the first argument; -1 if it is not a matrix with rows.
        int64_t rows_of_first() const { return begins_with_matrix && at(rows[0]) > 0 ? at(rows[0]) : -1; }
        // Returns the places of the numbers of rows that equal the first argument's.
        Places alike() const {
            Places found;
            for (size_t place : rows)
                if (at(place) == at(rows[0])) found.push_back(place);
            return found;
        }
        // Returns the key with -1 in place of the numbers of rows in `places`, which are equal. Calls that differ only in this number
        // have the same key.
        nb::bytes of_any_rows(const Places &places) {
            const int64_t number = at(places[0]);
            for (size_t place : places) at(place) = -1;
            const nb::bytes key = bytes();
            for (size_t place : places) at(place) = number;
            return key;
        }
    };
    // Reads a call's arguments into `words`. Unlike `signature`, it also allows strings, tuples, and objects of the types in
    // `identified`, which are compared by identity. Returns false for any other argument. of_size: the name of an argument to leave
    // out; None: no argument.
    bool read_call(Words &words, nb::handle arguments, nb::handle named, bool gradients, nb::handle identified,
                   nb::handle of_size = nb::none()) const {
        words.clear();
        words.rows.clear();
        words.begins_with_matrix = false;
        words.reserve(96);
        bool is_first = true;
        for (nb::handle argument : nb::borrow<nb::tuple>(arguments)) {
            if (!sign_any(words, argument, gradients, identified)) return false;
            if (is_first) words.begins_with_matrix = is_plain(argument) && !words.rows.empty();
            is_first = false;
        }
        for (auto [name, argument] : nb::borrow<nb::dict>(named))
            if (!name.equal(of_size) && (!sign_text(words, name) || !sign_any(words, argument, gradients, identified))) return false;
        return true;
    }
    // Returns true for a plain tensor or parameter whose storage holds all of its elements, and that is no negated view. Without
    // `gradients`, also returns false if it requires a gradient.
    bool is_usable(nb::handle object, bool gradients) const {
        if (!is_plain(object) || (!gradients && nb::cast<bool>(nb::getattr(object, requires_grad_)))) return false;
        TensorView tensor{};
        if (api_->tensor_of(object.ptr(), &tensor)) {
            PyErr_Clear();
            return false;
        }
        return has_memory(object, tensor) && !is_true(call_method(object, is_neg_));
    }
    // Returns the sizes and the address of a tensor.
    TensorView view(nb::handle tensor) const {
        TensorView found{};
        if (api_->tensor_of(tensor.ptr(), &found)) throw nb::python_error();
        return found;
    }

  private:
    enum Tag : int64_t { none = 1, flag, number, real, list, text, tuple, identity };

    bool is_plain(nb::handle object) const { return object.type().is(tensor_) || object.type().is(parameter_); }
    static int64_t address(const TensorView &tensor) {
        return int64_t(reinterpret_cast<uintptr_t>(tensor.data) + tensor.byte_offset);
    }
    // Appends the low bytes of all fields, with as many strides as sizes, so that equal bytes are equal layouts.
    static void add(Words &words, const TensorView &tensor) {
        words.push_back(int64_t(tensor.device_type) << 32 | tensor.device_id);
        words.push_back(int64_t(tensor.ndim) << 32 | int64_t(tensor.dtype_code) << 24 | int64_t(tensor.dtype_bits) << 16 |
                         tensor.dtype_lanes);
        if (tensor.ndim == 2) words.rows.push_back(words.size());
        words.insert(words.end(), tensor.shape, tensor.shape + tensor.ndim);
        words.insert(words.end(), tensor.strides, tensor.strides + tensor.ndim);
    }
    // Returns true if the tensor's storage holds all of its elements.
    bool has_memory(nb::handle object, const TensorView &tensor) const;
    bool sign(Words &words, nb::handle argument, bool gradients) const {
        PyObject *const object = argument.ptr();
        if (argument.is_none()) {
            words.push_back(none);
        } else if (PyBool_Check(object)) {
            words.insert(words.end(), {flag, object == Py_True});
        } else if (PyLong_CheckExact(object)) {
            int64_t value = 0;
            if (!nb::try_cast(argument, value)) return false;  // beyond 64 bits, which the argument checks will report
            words.insert(words.end(), {number, value});
        } else if (PyFloat_CheckExact(object)) {
            words.insert(words.end(), {real, std::bit_cast<int64_t>(nb::cast<double>(argument))});
        } else if (PyList_Check(object)) {
            words.insert(words.end(), {list, int64_t(nb::len(argument))});
            for (nb::handle item : nb::borrow<nb::list>(argument))
                if (!sign(words, item, gradients)) return false;
        } else if (is_plain(argument)) {
            words.push_back(gradients && nb::cast<bool>(nb::getattr(argument, requires_grad_)));
            TensorView tensor{};
            if (api_->tensor_of(object, &tensor)) {
                PyErr_Clear();  // a tensor without memory, for example on the device meta
                return false;
            }
            if (!has_memory(argument, tensor)) return false;  // the argument checks will report freed memory
            // DLPack describes a negated view as if it had the values of its memory. Calls copy such a view.
            if (is_true(call_method(argument, is_neg_))) return false;
            add(words, tensor);
        } else {
            return false;
        }
        return true;
    }
    bool sign_any(Words &words, nb::handle argument, bool gradients, nb::handle identified) const {
        if (PyUnicode_Check(argument.ptr())) return sign_text(words, argument);
        if (PyTuple_CheckExact(argument.ptr())) {
            words.insert(words.end(), {tuple, int64_t(nb::len(argument))});
            for (nb::handle item : nb::borrow<nb::tuple>(argument))
                if (!sign_any(words, item, gradients, identified)) return false;
            return true;
        }
        for (nb::handle type : nb::borrow<nb::tuple>(identified))
            if (argument.type().is(type)) {
                words.insert(words.end(), {identity, int64_t(reinterpret_cast<uintptr_t>(argument.ptr()))});
                return true;
            }
        return sign(words, argument, gradients);
    }
    static bool sign_text(Words &words, nb::handle argument) {
        Py_ssize_t size = 0;
        const char *const begin = PyUnicode_AsUTF8AndSize(argument.ptr(), &size);
        if (!begin) {
            PyErr_Clear();
            return false;
        }
        words.insert(words.end(), {text, int64_t(size)});
        const size_t at = words.size();
        words.resize(at + (size_t(size) + sizeof(int64_t) - 1) / sizeof(int64_t));
        std::memcpy(words.data() + at, begin, size_t(size));
        return true;
    }
    nb::object tensor_, parameter_;
    // Interned once, because there are many tensors.
    nb::object requires_grad_ = interned("requires_grad"), storage_offset_ = interned("storage_offset"),
               untyped_storage_ = interned("untyped_storage"), nbytes_ = interned("nbytes"), is_neg_ = interned("is_neg");
    nb::capsule capsule_;
    ExchangeApi *api_;
};

}  // namespace weft
