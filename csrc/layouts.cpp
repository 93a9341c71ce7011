// The Python class of `LayoutReader` (layouts.hpp).
#include "layouts.hpp"

namespace nb = nanobind;
using weft::LayoutReader;

void register_layouts(nb::module_ &m) {
    nb::class_<LayoutReader>(m, "LayoutReader", "Reads where tensors lie, and how, by DLPack's C exchange API.")
        .def(nb::init<nb::object, nb::object>(), nb::arg("tensor"), nb::arg("parameter"))
        .def("read", &LayoutReader::read, nb::arg("tensors"), nb::arg("gradients"))
        .def("signature", &LayoutReader::signature, nb::arg("arguments"), nb::arg("gradients"));
}
