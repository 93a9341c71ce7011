// Python bindings of the CPU backward of embedding_all_to_all.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <memory>
#include <string>

#include "embedding_backward.hpp"

namespace nb = nanobind;

namespace {
using namespace weft;

using Table = nb::ndarray<const int64_t, nb::ndim<2>, nb::c_contig, nb::device::cpu>;

void require(bool good, const std::string &what) {
    if (!good) throw nb::value_error(what.c_str());
}

const int64_t *line(const Table &table, size_t i) { return table.data() + i * table.shape(1); }

std::vector<BackwardTable> tables_from(const Table &given) {
    require(given.shape(1) == 2, "tables has " + std::to_string(given.shape(1)) + " columns: pass 2, rows and dim");
    std::vector<BackwardTable> tables;
    for (size_t i = 0; i < given.shape(0); ++i) {
        const int64_t *t = line(given, i);
        require(t[0] > 0 && t[1] > 0, "table " + std::to_string(i) + ": rows=" + std::to_string(t[0]) + " and dim=" +
                                          std::to_string(t[1]) + " must be at least 1");
        tables.push_back({t[0], t[1]});
    }
    return tables;
}

std::vector<BackwardSlot> slots_from(const Table &given, size_t tables) {
    require(given.shape(1) == 4,
            "slots has " + std::to_string(given.shape(1)) + " columns: pass 4, with table, key, column and mean");
    std::vector<BackwardSlot> slots;
    for (size_t i = 0; i < given.shape(0); ++i) {
        const int64_t *s = line(given, i);
        require(s[0] >= 0 && size_t(s[0]) < tables && s[1] >= 0 && s[2] >= 0,
                "slot " + std::to_string(i) + ": table=" + std::to_string(s[0]) + " must be at least 0 and below " +
                    std::to_string(tables) + ", and key=" + std::to_string(s[1]) + " and column=" + std::to_string(s[2]) +
                    " must not be negative");
        slots.push_back({s[0], s[1], s[2], s[3] != 0});
    }
    return slots;
}

SparseInput input_from(uintptr_t values, int values_bits, int64_t n_values, uintptr_t offsets, int offsets_bits,
                       uintptr_t per_sample_weights, int64_t batch, bool hash, int n_threads) {
    require((values_bits == 32 || values_bits == 64) && (offsets_bits == 32 || offsets_bits == 64),
            "values_bits=" + std::to_string(values_bits) + ", offsets_bits=" + std::to_string(offsets_bits) +
                ": pass 32 or 64 for each");
    require(n_threads >= 1, "n_threads=" + std::to_string(n_threads) + " must be at least 1");
    require(batch >= 0 && n_values >= 0, "batch=" + std::to_string(batch) + " and n_values=" + std::to_string(n_values) +
                                             " must not be negative");
    return {reinterpret_cast<const void *>(values), values_bits, n_values, reinterpret_cast<const void *>(offsets),
            offsets_bits, reinterpret_cast<const float *>(per_sample_weights), batch, hash};
}

Dtype dtype_from(int dtype) {
    require(dtype >= 0 && dtype <= 2, "dtype=" + std::to_string(dtype) + ": pass 0 (fp32), 1 (fp16) or 2 (bf16)");
    return Dtype(dtype);
}

int64_t update(const SortedRows &sorted, const Table &memory, uintptr_t gradients, int64_t stride, int gradients_dtype,
               int dtype, int rule, bool sparse, const std::vector<double> &numbers, bool is_stochastic, int64_t seed,
               bool skip_nonfinite, int n_threads, const std::string &isa) {
    require(memory.shape(1) == 5 && int64_t(memory.shape(0)) == sorted.tables(),
            "memory has " + std::to_string(memory.shape(0)) + " rows and " + std::to_string(memory.shape(1)) +
                " columns: pass a row for each of " + std::to_string(sorted.tables()) +
                " tables, with 4 addresses and the table's number");
    require(rule >= 0 && rule <= 6, "rule=" + std::to_string(rule) + ": pass a number from 0 to 6");
    require(numbers.size() == 11, "numbers has " + std::to_string(numbers.size()) +
                                      " entries: pass 11, learning rate, factor, eps, weight decay, beta1, beta2, "
                                      "1 - beta1, 1 - beta2, two corrections, and the bound of gradient elements");
    require(n_threads >= 1, "n_threads=" + std::to_string(n_threads) + " must be at least 1");
    Update u{};
    for (size_t i = 0; i < memory.shape(0); ++i) {
        const int64_t *m = line(memory, i);
        u.tables.push_back({reinterpret_cast<char *>(m[0]), reinterpret_cast<float *>(m[1]),
                            reinterpret_cast<float *>(m[2]), reinterpret_cast<char *>(m[3]), uint64_t(m[4])});
    }
    u.gradients = reinterpret_cast<const char *>(gradients);
    u.stride = stride;
    u.gradients_dtype = dtype_from(gradients_dtype);
    u.dtype = dtype_from(dtype);
    UpdateRule &r = u.rule;
    r.rule = Rule(rule);
    u.sparse = sparse;
    float *const fields[] = {&r.learning_rate, &r.factor, &r.eps, &r.weight_decay, &r.beta1, &r.beta2, &r.rest1,
                             &r.rest2, &r.correction1, &r.correction2, &r.clip};
    for (size_t i = 0; i < numbers.size(); ++i) *fields[i] = float(numbers[i]);
    r.is_stochastic = is_stochastic;
    r.seed = uint64_t(seed);
    r.skip_nonfinite = skip_nonfinite;
    u.isa = &isa_named(isa);
    u.threads = n_threads;
    nb::gil_scoped_release unlocked;
    return sorted.update(u);
}

}  // namespace

void register_embedding_backward(nb::module_ &m) {
    using namespace nb::literals;
    nb::class_<SortedRows>(m, "SortedRows", "The ids of a batch, sorted by table and row (see weft/_core.pyi).")
        .def("__init__",
             [](SortedRows *self, const Table &slots, const Table &tables, uintptr_t values, int values_bits,
                int64_t n_values, uintptr_t offsets, int offsets_bits, uintptr_t per_sample_weights, int64_t batch,
                bool hash, int n_threads) {
                 const SparseInput input = input_from(values, values_bits, n_values, offsets, offsets_bits,
                                                      per_sample_weights, batch, hash, n_threads);
                 auto of_tables = tables_from(tables);
                 auto of_slots = slots_from(slots, of_tables.size());
                 nb::gil_scoped_release unlocked;
                 new (self) SortedRows(std::move(of_slots), std::move(of_tables), input, n_threads);
             },
             nb::kw_only(), "slots"_a, "tables"_a, "values"_a, "values_bits"_a, "n_values"_a, "offsets"_a,
             "offsets_bits"_a, "per_sample_weights"_a, "batch"_a, "hash"_a, "n_threads"_a)
        .def("counts",
             [](const SortedRows &self) {
                 std::vector<int64_t> counts;
                 for (int64_t t = 0; t < self.tables(); ++t) counts.push_back(self.runs(t));
                 return counts;
             })
        .def("rows",
             [](const SortedRows &self, int64_t table, uintptr_t out) {
                 require(table >= 0 && table < self.tables(), "table=" + std::to_string(table) + " does not exist");
                 self.rows(table, reinterpret_cast<int64_t *>(out));
             },
             "table"_a, "out"_a)
        .def("update", update, nb::kw_only(), "memory"_a, "gradients"_a, "stride"_a, "gradients_dtype"_a, "dtype"_a,
             "rule"_a, "sparse"_a, "numbers"_a, "is_stochastic"_a, "seed"_a, "skip_nonfinite"_a, "n_threads"_a, "isa"_a = "");
    m.def("gradients_of_weights",
          [](const Table &slots, const Table &tables, const std::vector<uintptr_t> &weights, uintptr_t values,
             int values_bits, int64_t n_values, uintptr_t offsets, int offsets_bits, int64_t batch, bool hash,
             uintptr_t gradients, int64_t stride, int dtype, uintptr_t out, int n_threads) {
              const SparseInput input =
                  input_from(values, values_bits, n_values, offsets, offsets_bits, 0, batch, hash, n_threads);
              const auto of_tables = tables_from(tables);
              const auto of_slots = slots_from(slots, of_tables.size());
              require(weights.size() == of_tables.size(),
                      "weights has " + std::to_string(weights.size()) + " addresses: pass one for each of " +
                          std::to_string(of_tables.size()) + " tables");
              std::vector<const char *> addresses;
              for (const uintptr_t weight : weights) addresses.push_back(reinterpret_cast<const char *>(weight));
              const Dtype of_dtype = dtype_from(dtype);
              nb::gil_scoped_release unlocked;
              gradients_of_weights(of_slots, of_tables, input, addresses, reinterpret_cast<const char *>(gradients),
                                   stride, of_dtype, reinterpret_cast<float *>(out), n_threads);
          },
          nb::kw_only(), "slots"_a, "tables"_a, "weights"_a, "values"_a, "values_bits"_a, "n_values"_a, "offsets"_a,
          "offsets_bits"_a, "batch"_a, "hash"_a, "gradients"_a, "stride"_a, "dtype"_a, "out"_a, "n_threads"_a,
          "The gradients of per-sample weights (see weft/_core.pyi).");
}
