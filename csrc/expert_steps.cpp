#include "expert_steps.hpp"

#include <numeric>

namespace nb = nanobind;

namespace weft {

namespace {

constexpr uint64_t alignment = 16;  // bytes: alignment of addresses and strides that torch's grouped GEMM needs
constexpr int64_t most_gemms = 8;
constexpr double long_flop = 1e10, long_bytes = 32 << 20;  // such a GEMM takes more than about 12 us on an H100
enum NumbersOnCpu { sent, came, of_experts };               // the entries of `OnCpu` in weft/runtime/unfused/sizes.py

std::vector<int64_t> numbers_of(nb::handle host, NumbersOnCpu which) {
    std::vector<int64_t> found;
    for (nb::handle one : nb::cast<nb::list>(host[size_t(which)])) found.push_back(nb::cast<int64_t>(one));
    return found;
}

bool is_bf16(const TensorView &tensor) { return tensor.dtype_code == 4 && tensor.dtype_bits == 16; }

bool has_aligned_rows(const TensorView &tensor) {
    const auto vector = [&](const int64_t *of) { return std::vector<int64_t>(of, of + tensor.ndim); };
    return is_aligned(vector(tensor.shape), vector(tensor.strides), uint64_t(reinterpret_cast<uintptr_t>(tensor.data)) + tensor.byte_offset,
                      tensor.dtype_bits / 8);
}

}  // namespace

bool one_gemm_each(int64_t experts, double rows, int64_t k, int64_t n, int64_t item_bytes) {
    if (experts == 1) return true;
    const double of_weights = double(k) * double(n);
    return experts <= most_gemms && (2 * rows * of_weights >= double(experts) * long_flop || of_weights * double(item_bytes) >= long_bytes);
}

bool is_aligned(const std::vector<int64_t> &shape, const std::vector<int64_t> &strides, uint64_t address, int64_t item_bytes) {
    const size_t last = shape.size() - 1;
    const int64_t rows = shape[last - 1], cols = shape[last], row = strides[last - 1], col = strides[last];
    if (!((col == 1 && row >= cols) || (row == 1 && col >= rows))) return false;
    uint64_t begins = address | uint64_t((row == 1 ? col : row) * item_bytes);
    for (size_t i = 0; i + 2 < shape.size(); ++i) begins |= uint64_t(strides[i] * item_bytes);
    return begins % alignment == 0;
}

nb::object multiply_each(const TorchCalls &calls, nb::handle rows, nb::handle w, const std::vector<int64_t> &counts, int64_t came) {
    static const nb::handle new_empty = interned("new_empty").release(), narrow = interned("narrow").release(),
                            unbind = interned("unbind").release(), zero = number(0).release(),
                            with_out = nb::make_tuple("out").release();  // never freed
    const nb::object weights = call_method(w, unbind);
    const int64_t cols = calls.reader->view(w).shape[2];
    if (counts.size() == 1 && came == calls.reader->view(rows).shape[0] && came > 0)
        return call(calls.mm, rows, checked(PySequence_GetItem(weights.ptr(), 0)));
    nb::object made = call_method(rows, new_empty, number(came), number(cols));
    int64_t first = 0;
    for (size_t expert = 0; expert < counts.size(); ++expert) {
        if (counts[expert] == 0) continue;
        const nb::object begin = number(first), size = number(counts[expert]);
        const nb::object part = call_method(rows, narrow, zero, begin, size), out = call_method(made, narrow, zero, begin, size);
        const nb::object weight = checked(PySequence_GetItem(weights.ptr(), Py_ssize_t(expert)));
        PyObject *given[] = {nullptr, part.ptr(), weight.ptr(), out.ptr()};
        checked(PyObject_Vectorcall(calls.mm.ptr(), given + 1, 2 | PY_VECTORCALL_ARGUMENTS_OFFSET, with_out.ptr()));
        first += counts[expert];
    }
    return made;
}

bool KnownNumbers::is_as_known(nb::handle entry, nb::handle tensor) const {
    return PyWeakref_GetObject(nb::object(entry[0]).ptr()) == tensor.ptr() && nb::object(entry[1]).equal(checked(PyObject_GetAttr(tensor.ptr(), version_.ptr())));
}

nb::object KnownNumbers::of(nb::handle received, nb::handle splits) const {
    const nb::object id = checked(PyLong_FromVoidPtr(received.ptr()));
    PyObject *const found = PyDict_GetItemWithError(known_.ptr(), id.ptr());
    if (!found && PyErr_Occurred()) throw nb::python_error();
    if (found) {
        const nb::object entry = nb::borrow(found);
        if (is_as_known(entry, received)) {
            const nb::object of_both = entry[2];
            const nb::object numbers = of_both[2];
            if (is_as_known(of_both, splits) && !checked(PyObject_GetAttr(numbers.ptr(), host_.ptr())).is_none()) return numbers;
        }
    }
    return call(read_, received, splits);
}

nb::object ExpertOrders::of(nb::handle received, nb::handle splits, nb::handle numbers) const {
    const TensorView table = calls_.reader->view(received);
    if (!is_on_gpu(table)) return nb::none();
    const nb::object device = number(table.device_id);
    const nb::tuple key = nb::make_tuple(name_, call(stream_, device));  // as in `Sizes.once`
    const nb::object made = checked(PyObject_GetAttr(numbers.ptr(), made_.ptr()));
    if (PyObject *const found = PyDict_GetItemWithError(made.ptr(), key.ptr())) return nb::borrow(found);
    if (PyErr_Occurred()) throw nb::python_error();
    return call(orders_, received, splits, numbers);
}

nb::object OrderedRows::of(nb::handle rows, nb::handle received, nb::handle splits, nb::handle numbers) const {
    if (!is_on_gpu(orders_.reader().view(rows))) return call(elsewhere_, rows, received, splits, numbers);
    const nb::object orders = orders_.of(received, splits, numbers);
    return call(select_, rows, checked(PyObject_GetAttr(orders.ptr(), name_.ptr())));
}

nb::object ExpertGemms::of(nb::handle h, nb::handle w, nb::handle received, nb::handle splits, nb::handle numbers) const {
    const nb::object host = checked(PyObject_GetAttr(numbers.ptr(), host_.ptr()));
    const std::vector<int64_t> counts = numbers_of(host, of_experts);
    const int64_t rows = std::accumulate(counts.begin(), counts.end(), int64_t(0));
    const TensorView given = calls_.reader->view(h), weights = calls_.reader->view(w);
    int64_t experts = 0;
    for (const int64_t count : counts) experts += count != 0;
    const bool can_group = is_on_gpu(given) && is_bf16(given) && rows > 0;
    if (!can_group || one_gemm_each(experts, double(rows), weights.shape[1], weights.shape[2], weights.dtype_bits / 8) ||
        !has_aligned_rows(given) || !has_aligned_rows(weights))
        return multiply_each(calls_, h, w, counts, rows);
    nb::object used = nb::borrow(h);
    if (rows != given.shape[0]) used = call_method(h, narrow_, zero_, zero_, number(rows));
    const nb::object orders = orders_.of(received, splits, numbers), ends = checked(PyObject_GetAttr(orders.ptr(), ends_.ptr()));
    PyObject *arguments[] = {nullptr, used.ptr(), w.ptr(), ends.ptr()};
    return checked(PyObject_Vectorcall(grouped_.ptr(), arguments + 1, 2 | PY_VECTORCALL_ARGUMENTS_OFFSET, with_ends_.ptr()));
}

}  // namespace weft

void register_expert_steps(nb::module_ &m) {
    using namespace weft;
    m.def("one_gemm_each", &one_gemm_each, nb::arg("experts"), nb::arg("rows"), nb::arg("k"), nb::arg("n"), nb::arg("item_bytes"));
    m.def("is_aligned", &is_aligned,
          nb::arg("shape"), nb::arg("strides"), nb::arg("address"), nb::arg("item_bytes"));
    nb::class_<KnownNumbers>(m, "KnownNumbers", "Finds the numbers of rows of an exchange that the CPU knows.")
        .def(nb::init<nb::dict, nb::object>(), nb::arg("known"), nb::arg("read"))
        .def("__call__", &KnownNumbers::of, nb::arg("received"), nb::arg("splits"));
    nb::class_<ExpertOrders>(m, "ExpertOrders", "Finds the permutations of the rows of an exchange on a GPU.")
        .def(nb::init<nb::object, nb::object, nb::object>(), nb::arg("torch"), nb::arg("stream").none(), nb::arg("orders"))
        .def("__call__", &ExpertOrders::of, nb::arg("received"), nb::arg("splits"), nb::arg("numbers"));
    nb::class_<OrderedRows>(m, "OrderedRows", "Sorts rows by expert, or back.")
        .def(nb::init<nb::object, const char *, nb::object, nb::object>(), nb::arg("orders"), nb::arg("name"), nb::arg("select"), nb::arg("elsewhere"))
        .def("__call__", &OrderedRows::of, nb::arg("rows"), nb::arg("received"), nb::arg("splits"), nb::arg("numbers"));
    nb::class_<ExpertGemms>(m, "ExpertGemms", "The GEMMs of all experts of this rank.")
        .def(nb::init<nb::object, nb::object, nb::object>(), nb::arg("torch"), nb::arg("orders"), nb::arg("grouped"))
        .def("__call__", &ExpertGemms::of, nb::arg("h"), nb::arg("w"), nb::arg("received"), nb::arg("splits"), nb::arg("numbers"));
}
