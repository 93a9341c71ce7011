#include "combine_steps.hpp"

#include <algorithm>
#include <functional>
#include <numeric>

#include "expert_steps.hpp"

namespace nb = nanobind;

namespace weft {

namespace {

constexpr int32_t CPU = 1;                     // DLPack's device type
constexpr int64_t most_rows = int64_t(1) << 40;  // sums of larger numbers may overflow

int64_t *numbers_of(const TensorView &tensor) {
    return reinterpret_cast<int64_t *>(static_cast<char *>(tensor.data) + tensor.byte_offset);
}
char *bytes_of(const TensorView &tensor) { return static_cast<char *>(tensor.data) + tensor.byte_offset; }

int64_t size_of(const TensorView &tensor) {
    return std::accumulate(tensor.shape, tensor.shape + tensor.ndim, int64_t(1), std::multiplies<>());
}

bool is_contiguous(const TensorView &tensor) {
    int64_t stride = 1;
    for (int32_t i = tensor.ndim - 1; i >= 0; stride *= tensor.shape[i--])
        if (tensor.shape[i] > 1 && tensor.strides && tensor.strides[i] != stride) return false;
    return true;
}

bool is_table(const TensorView &tensor) { return tensor.device_type == CPU && tensor.dtype_code == 0 && tensor.dtype_bits == 64; }

// Returns the numbers of a table with one or two dimensions and any strides.
std::vector<int64_t> read(const TensorView &table) {
    const int64_t cols = table.shape[table.ndim - 1], stride = table.strides[table.ndim - 1];
    const int64_t rows = table.ndim > 1 ? table.shape[0] : 1, row_stride = table.ndim > 1 ? table.strides[0] : 0;
    std::vector<int64_t> found;
    found.reserve(size_t(rows * cols));
    for (int64_t row = 0; row < rows; ++row)
        for (int64_t col = 0; col < cols; ++col) found.push_back(numbers_of(table)[row * row_stride + col * stride]);
    return found;
}

// Returns the sum of the numbers; nothing if a number is negative, or so large that the sum may overflow.
std::optional<int64_t> total_of(const std::vector<int64_t> &numbers) {
    int64_t total = 0;
    for (const int64_t one : numbers) {
        if (one < 0 || one > most_rows || total > most_rows) return {};
        total += one;
    }
    return total;
}

uint64_t weighted_sum(const std::vector<int64_t> &numbers, const TensorView &weights) {
    return std::transform_reduce(numbers.begin(), numbers.end(), numbers_of(weights), uint64_t(0), std::plus<>(),
                                 [](int64_t one, int64_t weight) { return uint64_t(one) * uint64_t(weight); });
}

}  // namespace

CombineSteps::CombineSteps(nb::object torch, int64_t rank, int64_t world, int64_t rows, nb::object of_received, nb::object of_splits)
    : torch_(torch), calls_(*nb::cast<const TorchCalls *>(torch)), rank_(rank), world_(world), rows_(rows), of_received_(of_received),
      of_splits_(of_splits) {}

std::optional<CombineSteps::Call> CombineSteps::look(const std::vector<nb::object> &tensors) const {
    const LayoutReader &reader = *calls_.reader;
    Call call{reader.view(tensors.at(0)), reader.view(tensors.at(1)), {}, {}, 0, 0};
    const TensorView of_ranks = reader.view(tensors.at(2)), leaving = reader.view(tensors.at(3));
    if (call.h.ndim != 2 || call.w.ndim != 3 || of_ranks.ndim != 2 || leaving.ndim != 1) return {};
    const int64_t experts = call.w.shape[0], count = world_ * experts;
    if (!is_table(of_ranks) || !is_table(leaving) || call.h.device_type != CPU || !is_contiguous(call.h)) return {};
    if (of_ranks.shape[0] != world_ || of_ranks.shape[1] != experts || leaving.shape[0] != count) return {};
    if (call.h.shape[1] != call.w.shape[1]) return {};
    for (const nb::object &weights : {of_received_, of_splits_})
        if (const TensorView found = reader.view(weights); size_of(found) != count || !is_table(found) || !is_contiguous(found)) return {};
    if (!of_ranks.strides || !leaving.strides) return {};
    call.received = read(of_ranks);
    call.splits = read(leaving);
    const std::optional<int64_t> came = total_of(call.received), rows = total_of(call.splits);
    if (!came || !rows || *came > call.h.shape[0] || (rows_ >= 0 && *rows != rows_)) return {};
    const auto mine = call.received.begin() + rank_ * experts;
    if (!std::equal(mine, mine + experts, call.splits.begin() + rank_ * experts)) return {};
    call.came = *came;
    call.rows = *rows;
    return call;
}

nb::object CombineSteps::multiplied(const Call &call, const std::vector<nb::object> &tensors) const {
    const size_t experts = size_t(call.w.shape[0]);
    std::vector<int64_t> counts(experts);
    for (size_t i = 0; i < call.received.size(); ++i) counts[i % experts] += call.received[i];
    return multiply_each(calls_, tensors[0], tensors[1], counts, call.came);
}

nb::object CombineSteps::run(const Call &call, const std::vector<nb::object> &tensors, const CpuCall &on_cpu) const {
    const nb::object made = multiplied(call, tensors);
    nb::object y = call_method(tensors[0], new_empty_, number(call.rows), number(call.w.shape[2]));
    const size_t row_bytes = size_t(call.w.shape[2]) * call.h.dtype_bits / 8;
    SharedCollective collective = SharedCollective::exchange_rows(
        on_cpu.turns.exchange(), bytes_of(calls_.reader->view(made)), call.received, row_bytes, true, false);
    collective.place(bytes_of(calls_.reader->view(y)), size_t(call.rows) * row_bytes);
    const uint64_t excess = weighted_sum(call.received, calls_.reader->view(of_received_)) -
                            weighted_sum(call.splits, calls_.reader->view(of_splits_));
    on_cpu.turns.run_if_balanced(std::move(collective), excess, on_cpu.given);
    return y;
}

}  // namespace weft

void register_combine_steps(nb::module_ &m) {
    using namespace weft;
    nb::class_<CombineSteps>(m, "CombineSteps", "The unfused combine of experts on CPU ranks of one host.")
        .def(nb::init<nb::object, int64_t, int64_t, int64_t, nb::object, nb::object>(), nb::kw_only(), nb::arg("torch"), nb::arg("rank"),
             nb::arg("world"), nb::arg("rows"), nb::arg("of_received"), nb::arg("of_splits"));
}
