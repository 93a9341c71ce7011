// A tensor over memory that somebody else owns. The tensor (and every view of it) keeps `owner` alive; when the last
// one goes, `owner` is released, which is how the output pool learns that a user has let go of a buffer.
// It goes to Python as a DLPack capsule: of an object torch would first ask which stream it is on, with half a dozen calls.
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
