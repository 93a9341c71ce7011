// A tensor over memory that another object owns. The tensor (and every view of it) keeps `owner` alive, and releases
// it with the last view. So the output pool learns that a user has dropped a buffer. Python gets it as a DLPack
// capsule: for an object, torch would first request the stream, which takes half a dozen calls.
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
