// The unfused combine of experts (weft/runtime/unfused/experts_on_one_host.py) in native code: CPU ranks of one host multiply
// their rows, and the products travel with the rendezvous in which ranks compare their tables of counts.
#pragma once
#include <nanobind/nanobind.h>

#include <cstdint>
#include <optional>
#include <vector>

#include "plain_steps.hpp"

namespace weft {

namespace nb = nanobind;

class CombineSteps {
  public:
    // rows: the number of rows that the caller gives for the result; negative if the table `splits` tells it.
    // weights: two int64 tensors with the weights of the numbers in `received` and in `splits` (weft/operator/across.py).
    CombineSteps(nb::object torch, int64_t rank, int64_t world, int64_t rows, nb::object of_received, nb::object of_splits);

    struct Call {
        TensorView h, w;
        std::vector<int64_t> received, splits;  // copies, because another thread may write the tensors
        int64_t came, rows;                     // the rows to multiply, and the rows of the result
    };
    // Returns the call with these tensors: h, w, received and splits. Returns nothing if the call must take the slow path, which
    // refuses wrong arguments, or copies those with another layout.
    std::optional<Call> look(const std::vector<nb::object> &tensors) const;
    // Makes the call. Returns the result, a matrix with a row for each token of this rank.
    nb::object run(const Call &call, const std::vector<nb::object> &tensors, const CpuCall &on_cpu) const;

  private:
    nb::object multiplied(const Call &call, const std::vector<nb::object> &tensors) const;

    nb::object torch_;
    const TorchCalls &calls_;
    int64_t rank_, world_, rows_;
    nb::object of_received_, of_splits_;
    nb::object new_empty_ = interned("new_empty");
};

}  // namespace weft
