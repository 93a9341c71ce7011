// A tensor in memory that another object owns. The tensor and all its views keep `owner` alive. When the last of them
// is freed, `owner` is released, and the output pool learns that the buffer is free.
//
// Python receives the tensor as a DLPack capsule. If it received an object with __dlpack__, torch would make half a
// dozen calls to find the stream.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/vector.h>

#include <vector>

namespace nb = nanobind;

void register_lease(nb::module_ &m) {
    m.def("lease", [](uintptr_t address, const std::vector<size_t> &shape, int dtype_code, int dtype_bits, int device_type,
                      int device_id, nb::object owner) {
              const nb::dlpack::dtype dtype{uint8_t(dtype_code), uint8_t(dtype_bits), 1};
              return nb::ndarray<>(reinterpret_cast<void *>(address), shape.size(), shape.data(), owner, nullptr,
                                              dtype, device_type, device_id);
          }, nb::arg("address"), nb::arg("shape"), nb::arg("dtype_code"), nb::arg("dtype_bits"), nb::arg("device_type"),
          nb::arg("device_id"), nb::arg("owner"),
          "A DLPack capsule of a tensor over `address` (row-major; DLPack dtype and device codes) that keeps `owner` alive.");
}
