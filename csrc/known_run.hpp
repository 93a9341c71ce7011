// A run of a compiled schedule on a GPU, for a call that repeats an earlier call (weft/runtime/cuda/issue.py). Native code allocates
// the results, and issues the schedule's items.
#pragma once
#include <nanobind/nanobind.h>

#include <cstdint>
#include <utility>
#include <vector>

#include "python.hpp"

namespace weft {

namespace nb = nanobind;

class KnownRun {
  public:
    // of: the items of the schedule, and what they need, by name (`weft.runtime.cuda.issue.StreamItems.known_run`).
    explicit KnownRun(nb::dict of);
    // Runs the schedule on the current stream. inputs: the input buffers; results are appended. Returns the operator's results.
    nb::list run(std::vector<nb::object> &tensors) const;
    // Drops all references to the executor's memory. There is no run afterwards.
    void let_go();

  private:
    // A buffer of the call, a part of it, or a fixed tensor.
    struct View {
        explicit View(nb::handle written);
        nb::object of(const std::vector<nb::object> &tensors) const;
        nb::object fixed, key;
        size_t tensor = 0;
    };
    // A range of native operations, a call of a function of torch, or a launch of a kernel by a function of weft.
    struct Item {
        explicit Item(nb::handle written);
        nb::object first, last;  // of the range; unset for the others
        nb::object launch;       // the function; unset for the others
        size_t stream = 0;       // of the launch
        nb::object function, constants, keywords;
        std::vector<View> positional, out;  // `out` has at most one view
    };

    void issue(const std::vector<nb::object> &tensors) const;
    void call_torch(const Item &item, const std::vector<nb::object> &tensors) const;

    nb::object run_program_, enter_, broke_, stream_of_, device_number_, empty_, empty_keywords_, device_;
    nb::list bases_, streams_;
    size_t inputs_;
    std::vector<std::pair<nb::object, nb::object>> outputs_;  // shapes and dtypes
    std::vector<size_t> addressed_, results_;
    std::vector<Item> items_;
    nb::object data_ptr_ = interned("data_ptr");
};

}  // namespace weft
