// Unfused calls: GEMMs and collectives over whole matrices with equal parts, one after another. They are the functions
// of torch and of the process group, on the caller's stream.
//
// Native code calls these functions through Python's C API, without interpreter frames. So a call costs no more than
// NCCL and cuBLAS called directly, and the module does not depend on torch's ABI.
#pragma once
#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>

#include <cstdint>
#include <memory>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "group_calls.hpp"
#include "layouts.hpp"
#include "python.hpp"
#include "recipe.hpp"
#include "shared_collective.hpp"

namespace weft {

namespace nb = nanobind;

// Computes out = (a * scale_a) @ (b * scale_b) + bias on a GPU with torch's `function`, and returns out. out: None
// allocates memory of `dtype`. See weft/runtime/scaled_matmul.py.
nb::object scaled_mm(nb::handle function, nb::handle a, nb::handle b, nb::handle scale_a, nb::handle scale_b, nb::handle bias,
                     nb::handle dtype, bool fast, nb::handle out);

// The functions that steps call.
struct TorchCalls {
    std::shared_ptr<LayoutReader> reader;
    nb::object mm, scaled_mm, scaled_elsewhere, byte;
    nb::object gather, gather_options, scatter, scatter_options, reduce, reduce_options, exchange, exchange_options, async_options;
};

// The collectives of a call of CPU ranks on one host. Their data travel with the rendezvous before each collective
// (weft/runtime/meeting.py). Native code handles a rendezvous of equal calls. Python handles the rest.
class CpuTurns {
  public:
    // of: a `Replay` or `Passing`, which has these attributes, and the methods `meet`, `settle` and `go_on`.
    CpuTurns(nb::object of, const CallCounts &counts, const Health &health);
    // Waits until all ranks have reached the collective with this number, and runs it. fingerprint: the call, if it may have any
    // size. given: the arguments of the call, for error texts.
    void run(size_t number, SharedCollective collective, uint64_t fingerprint, const Given &given) const;
    // Runs the only collective of a call if the numbers `excess` of all ranks add up to 0 (mod 2^64). They travel with the rendezvous
    // (weft/operator/across.py). Otherwise Python's method `refuse_tables` raises an error on every rank. Requires `is_usual`.
    void run_if_balanced(SharedCollective collective, uint64_t excess, const Given &given) const;
    // Returns true unless ranks compare more than this call, or the group may have failed.
    bool is_usual() const;
    PayloadExchange &exchange() const { return *exchange_; }
    nb::object published() const { return checked(PyObject_GetAttr(meeting_.ptr(), calls_.ptr())); }

  private:
    class Publishing;

    nb::handle of_;  // owns this object
    nb::object meeting_, lock_, exchange_object_;
    const CallCounts &counts_;
    const Health &health_;
    PayloadExchange *exchange_;
    std::vector<std::string> published_;  // for each collective, the bytes that this rank publishes before the fingerprint
    bool any_rows_;
    double patience_s_;
    nb::object calls_ = interned("calls"), forward_ = interned("forward"), acquire_ = interned("acquire"), release_ = interned("release"),
               meet_ = interned("meet"), settle_ = interned("settle"), go_on_ = interned("go_on"), refuse_tables_ = interned("refuse_tables");
};

// One call of CPU ranks.
struct CpuCall {
    const CpuTurns &turns;
    uint64_t fingerprint;
    const Given &given;
};

class PlainSteps {
  public:
    // buffers: the names of all buffers, inputs first. steps: (kind, the buffer that it writes, the buffers that it
    //     reads, dtype). For the kind "called", a function replaces the dtype; it is called with the buffers. Three kinds
    //     exchange rows of experts:
    //     "exchange_counts" exchanges the numbers of rows for each expert, [ranks * experts].
    //     "exchange_there" sends rows to the ranks of their experts. It reads the rows, and their numbers (`Numbers` in
    //     weft/runtime/unfused/sizes.py). A function in place of the dtype is called with the other buffers during the exchange.
    //     "exchange_back" sends rows back. It reads the rows, their numbers, and the number of rows of the result.
    PlainSteps(nb::object torch, nb::list buffers, nb::list steps, int64_t world);

    // Runs all steps. buffers: one per name. The caller sets the inputs; the steps set the other buffers. on_cpu: null
    // unless the collectives of CPU ranks travel with the rendezvous.
    void run(std::vector<nb::object> &buffers, nb::handle group, const CpuCall *on_cpu = nullptr) const;
    // Returns all buffers by their names.
    nb::dict run_by_name(nb::dict inputs, nb::object group) const;
    size_t place(nb::handle name) const;
    size_t size() const { return names_.size(); }
    // Returns true if a step may run Python code.
    bool calls_functions() const { return calls_functions_; }

  private:
    enum Kind { mm, gather, scatter, reduce, scaled, scaled_fast, called, exchange_counts, exchange_there, exchange_back };
    struct Step {
        Kind kind;
        size_t out;
        std::vector<size_t> in;
        nb::object dtype;  // or the function
    };

    nb::object new_matrix(nb::handle like, int64_t rows, int64_t cols) const;
    void run_on_cpu(const Step &step, size_t number, std::vector<nb::object> &buffers, const CpuCall &call) const;
    nb::object scaled_product(const Step &step, const std::vector<nb::object> &buffers) const;
    nb::object call_with_buffers(const Step &step, const std::vector<nb::object> &buffers, size_t first) const;
    nb::object exchanged(const Step &step, const std::vector<nb::object> &buffers, nb::handle group, nb::object &work) const;

    nb::object torch_;
    const TorchCalls &calls_;
    std::vector<nb::object> names_;
    std::vector<Step> steps_;
    int64_t world_;
    bool calls_functions_ = false;
    nb::object new_empty_ = interned("new_empty"), view_ = interned("view"), wait_ = interned("wait"), contiguous_ = interned("contiguous"),
               host_ = interned("host");
    nb::object dtype_keyword_ = nb::make_tuple("dtype"), elsewhere_keywords_ = nb::make_tuple("fast", "out");
};

}  // namespace weft
