// In place of nanobind: csrc/ registers its functions for Python, which the model does not need.
#pragma once
#include <stdexcept>
#include <string>

namespace nanobind {
struct anything {
    template <class T> anything &operator=(T &&) { return *this; }
};
struct module_ {
    template <class... Args> void def(Args &&...) {}
    anything attr(const char *) { return {}; }
};
struct arg {
    explicit arg(const char *) {}
};
struct gil_scoped_release {};
struct value_error : std::runtime_error {
    using std::runtime_error::runtime_error;
};
}  // namespace nanobind
