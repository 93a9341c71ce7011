// Storages of tensors, and the Python class of `LayoutReader` (layouts.hpp).
#include "layouts.hpp"

namespace weft {

namespace {

constexpr int32_t CPU = 1;            // DLPack's device type
constexpr int64_t LOW = int64_t(1) << 40;  // bytes

}  // namespace

// Returns true unless the storage was freed. FSDP frees parameters by `untyped_storage().resize_(0)`; the address of
// such a tensor is its offset, which is far below all valid addresses. Querying a storage takes 0.2 us, which matters
// for calls on GPUs. So for GPU tensors, only storages at low addresses are queried.
bool LayoutReader::has_memory(nb::handle object, const TensorView &tensor) const {
    const int64_t begin = address(tensor);
    if (tensor.device_type != CPU && (begin < 0 || begin >= LOW)) return true;
    int64_t last = 0;
    for (int32_t d = 0; d < tensor.ndim; ++d) {
        if (tensor.shape[d] == 0) return true;
        last += (tensor.shape[d] - 1) * tensor.strides[d];
    }
    const int64_t offset = nb::cast<int64_t>(call_method(object, storage_offset_));
    const int64_t held = nb::cast<int64_t>(call_method(call_method(object, untyped_storage_), nbytes_));
    return held >= (offset + last + 1) * ((tensor.dtype_bits * tensor.dtype_lanes + 7) / 8);
}

}  // namespace weft

namespace nb = nanobind;
using weft::LayoutReader;

void register_layouts(nb::module_ &m) {
    nb::class_<LayoutReader>(m, "LayoutReader", "Reads the addresses and layouts of tensors by DLPack's C exchange API.")
        .def(nb::init<nb::object, nb::object>(), nb::arg("tensor"), nb::arg("parameter"))
        .def("read", &LayoutReader::read, nb::arg("tensors"), nb::arg("gradients"))
        .def("signature", &LayoutReader::signature, nb::arg("arguments"), nb::arg("gradients"));
}
