// Python bindings of the CPU kernel. Its functions take arrays and addresses, and return counts.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <optional>
#include <stdexcept>
#include <string>
#include <tuple>

#include "embedding_all_to_all.hpp"

namespace nb = nanobind;

namespace {
using namespace weft;

using Numbers = nb::ndarray<const int64_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using Table = nb::ndarray<const int64_t, nb::ndim<2>, nb::c_contig, nb::device::cpu>;
using Records = nb::ndarray<int64_t, nb::ndim<2>, nb::c_contig, nb::device::cpu>;

void require(bool good, const std::string &what) {
    if (!good) throw nb::value_error(what.c_str());
}

std::vector<Slot> slots_from(const Table &table) {
    require(table.shape(1) == 6, "slots has " + std::to_string(table.shape(1)) +
                                     " columns: pass 6, with address, rows, dim, key, column and mean");
    std::vector<Slot> slots;
    for (size_t i = 0; i < table.shape(0); ++i) {
        const int64_t *s = table.data() + 6 * i;
        require(s[1] > 0 && s[2] > 0 && s[3] >= 0 && s[4] >= 0,
                "slot " + std::to_string(i) + ": rows=" + std::to_string(s[1]) + " and dim=" + std::to_string(s[2]) +
                    " must be positive, key=" + std::to_string(s[3]) + " and column=" + std::to_string(s[4]) +
                    " not negative");
        slots.push_back({reinterpret_cast<const char *>(s[0]), s[1], s[2], s[3], s[4], s[5] != 0});
    }
    return slots;
}

void require_slice_size(int64_t slice_size) {
    require(slice_size >= 1, "slice_size=" + std::to_string(slice_size) + " must be at least 1 vector");
}

using Counts = std::tuple<int64_t, int64_t, int64_t, int64_t, int64_t, int64_t, int64_t, int64_t>;

Counts run(const Table &slots, uintptr_t values, int values_bits, int64_t n_values, uintptr_t offsets, int offsets_bits,
           uintptr_t per_sample_weights, const Numbers &batch_starts, int rank, const Numbers &outputs,
           int64_t output_stride, int dtype, int transport, bool remote_first, int64_t slice_size, bool hash,
           int bounds, int n_threads, const Numbers &flags, int64_t epoch, const std::optional<Records> &timeline,
           const std::string &isa) {
    const size_t world = outputs.shape(0);
    require((values_bits == 32 || values_bits == 64) && (offsets_bits == 32 || offsets_bits == 64),
            "values_bits=" + std::to_string(values_bits) + ", offsets_bits=" + std::to_string(offsets_bits) +
                ": pass 32 or 64 for each");
    require(dtype >= 0 && dtype <= 2, "dtype=" + std::to_string(dtype) + ": pass 0 (fp32), 1 (fp16) or 2 (bf16)");
    require(transport == 0 || transport == 1, "transport=" + std::to_string(transport) + ": pass 0 (direct) or 1 (put)");
    require(bounds >= 0 && bounds <= 2,
            "bounds=" + std::to_string(bounds) + ": pass 0 (none), 1 (warning) or 2 (fatal)");
    require(n_threads >= 1, "n_threads=" + std::to_string(n_threads) + " must be at least 1");
    require_slice_size(slice_size);
    require(batch_starts.shape(0) == world + 1 && rank >= 0 && size_t(rank) < world,
            "batch_starts has " + std::to_string(batch_starts.shape(0)) + " numbers, and rank=" + std::to_string(rank) +
                ": for " + std::to_string(world) + " outputs, pass " + std::to_string(world + 1) +
                " numbers, and a rank of at least 0 and below " + std::to_string(world));
    for (size_t i = 0; i < world; ++i)
        require(batch_starts.data()[i] <= batch_starts.data()[i + 1] && batch_starts.data()[0] == 0,
                "batch_starts must start at 0 and ascend");
    require(transport == 0 || flags.shape(0) == world, "flags has " + std::to_string(flags.shape(0)) +
                                                           " addresses: the transport put needs one for each of " +
                                                           std::to_string(world) + " ranks");
    require(!timeline || timeline->shape(1) == 5,
            "timeline must have 5 columns: kind, thread, start_ns, end_ns, bytes");

    EmbeddingCall call{};
    call.slots = slots_from(slots);
    call.values = reinterpret_cast<const void *>(values);
    call.values_bits = values_bits;
    call.n_values = n_values;
    call.offsets = reinterpret_cast<const void *>(offsets);
    call.offsets_bits = offsets_bits;
    call.per_sample_weights = reinterpret_cast<const float *>(per_sample_weights);
    call.batch_starts.assign(batch_starts.data(), batch_starts.data() + world + 1);
    call.rank = rank;
    for (size_t i = 0; i < world; ++i) call.outputs.push_back(reinterpret_cast<char *>(outputs.data()[i]));
    call.output_stride = output_stride;
    call.dtype = Dtype(dtype);
    call.transport = Transport(transport);
    call.remote_first = remote_first;
    call.slice_size = slice_size;
    call.hash = hash;
    call.bounds = Bounds(bounds);
    call.threads = n_threads;
    for (size_t i = 0; i < flags.shape(0); ++i)
        call.flags.push_back(reinterpret_cast<std::atomic<int64_t> *>(flags.data()[i]));
    call.epoch = epoch;
    static_assert(sizeof(Event) == 5 * sizeof(int64_t));
    call.events = timeline ? reinterpret_cast<Event *>(timeline->data()) : nullptr;
    call.event_capacity = timeline ? int64_t(timeline->shape(0)) : 0;
    call.isa = &isa_named(isa);
    Outcome outcome;
    {
        nb::gil_scoped_release unlocked;
        outcome = embedding_all_to_all(call);
    }
    const BadIndex &bad = outcome.first_bad;
    return {outcome.bad, bad.slot, bad.sample, bad.position, bad.value, outcome.copies, outcome.flags, outcome.events};
}

}  // namespace

void register_embedding_all_to_all(nb::module_ &m) {
    using namespace nb::literals;
    m.def("embedding_all_to_all", run, nb::kw_only(), "slots"_a, "values"_a, "values_bits"_a, "n_values"_a,
          "offsets"_a, "offsets_bits"_a, "per_sample_weights"_a, "batch_starts"_a, "rank"_a, "outputs"_a,
          "output_stride"_a, "dtype"_a, "transport"_a, "remote_first"_a, "slice_size"_a, "hash"_a, "bounds"_a,
          "n_threads"_a, "flags"_a, "epoch"_a, "timeline"_a.none(), "isa"_a = "",
          "Pool this rank's slots for the global batch, and store each vector in its sample owner's memory (see "
          "weft/_core.pyi).");
    m.def("slice_runs",
          [](const Table &slots, int64_t slice_size) {
              require_slice_size(slice_size);
              std::vector<std::tuple<int64_t, int64_t, int64_t, int64_t>> runs;
              for (const Slice &s : slices_of(slots_from(slots), slice_size))
                  runs.emplace_back(s.first_slot, s.slots, s.column, s.width);
              return runs;
          },
          "slots"_a, "slice_size"_a,
          "Return the slices of every sample, in the order of their flags: (first slot, slots, first column, columns).");
    m.def("wait_flags",
          [](uintptr_t address, int64_t count, int64_t epoch, double deadline_s, uintptr_t failed_address) {
              int64_t index = 0, found = 0;
              Wait how;
              {
                  nb::gil_scoped_release unlocked;
                  how = wait_flags(reinterpret_cast<const std::atomic<int64_t> *>(address), count, epoch, deadline_s,
                                   reinterpret_cast<const std::atomic<int64_t> *>(failed_address), &index, &found);
              }
              return std::make_tuple(int(how), index, found);
          },
          "address"_a, "count"_a, "epoch"_a, "deadline_s"_a, "failed_address"_a,
          "Wait until all flags have reached `epoch`. Return (0 reached, 1 deadline passed or 2 the failed word was set; "
          "the index of the first flag that has not reached it; its value).");
    m.def("isas",
          [] {
              std::vector<std::string> names;
              for (const Isa &isa : isas()) names.emplace_back(isa.name);
              return names;
          },
          "Return the instruction sets that the CPU kernel can use on this machine, best first.");
    m.def("isa", [] { return std::string(isas().front().name); },
          "Return the instruction set that the CPU kernel uses by default.");
}
