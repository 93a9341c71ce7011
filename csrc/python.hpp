// Calls Python objects from native code, without argument tuples or interpreter frames.
#pragma once
#include <nanobind/nanobind.h>

#include <cstdint>

namespace weft {

namespace nb = nanobind;

inline nb::object checked(PyObject *result) {
    if (!result) throw nb::python_error();
    return nb::steal(result);
}

// Calls `function` with these arguments.
template <typename... Arguments> nb::object call(nb::handle function, const Arguments &...arguments) {
    PyObject *given[] = {nullptr, arguments.ptr()...};  // the callee may overwrite the entry before the first argument
    return checked(PyObject_Vectorcall(function.ptr(), given + 1, sizeof...(arguments) | PY_VECTORCALL_ARGUMENTS_OFFSET, nullptr));
}

// Calls the method `name` of `self`.
template <typename... Arguments> nb::object call_method(nb::handle self, nb::handle name, const Arguments &...arguments) {
    PyObject *given[] = {nullptr, self.ptr(), arguments.ptr()...};
    const size_t count = (1 + sizeof...(arguments)) | PY_VECTORCALL_ARGUMENTS_OFFSET;
    return checked(PyObject_VectorcallMethod(name.ptr(), given + 1, count, nullptr));
}

inline bool is_true(nb::handle object) {
    const int truth = PyObject_IsTrue(object.ptr());
    if (truth < 0) throw nb::python_error();
    return truth;
}

inline bool contains(nb::handle dict, nb::handle key) {
    const int found = PyDict_Contains(dict.ptr(), key.ptr());
    if (found < 0) throw nb::python_error();
    return found;
}

inline nb::object number(int64_t value) { return checked(PyLong_FromLongLong(value)); }

inline nb::object interned(const char *name) { return checked(PyUnicode_InternFromString(name)); }

}  // namespace weft
