// Python bindings of the small all-gather through shared memory (exchange.hpp), and of the collectives whose data travel with it
// (shared_collective.hpp).
#include <nanobind/nanobind.h>
#include <nanobind/stl/vector.h>

#include "shared_collective.hpp"

#include <new>

namespace nb = nanobind;
using namespace weft;

namespace {

char *memory_at(uintptr_t address) { return reinterpret_cast<char *>(address); }
const std::atomic<int64_t> *word_at(uintptr_t address) { return reinterpret_cast<const std::atomic<int64_t> *>(address); }

}  // namespace

void register_exchange(nb::module_ &m) {
    nb::class_<PayloadExchange>(m, "PayloadExchange", "A small all-gather through shared memory.")
        .def(
            "__init__",
            [](PayloadExchange *self, nb::list memory, size_t rank, size_t nbytes, size_t data_bytes) {
                std::vector<char *> addresses;
                for (nb::handle one : memory) addresses.push_back(memory_at(nb::cast<uintptr_t>(one.attr("address"))));
                new (self) PayloadExchange(std::move(addresses), rank, nbytes, data_bytes);
            },
            nb::arg("memory"), nb::arg("rank"), nb::arg("nbytes"), nb::arg("data_bytes") = 0, nb::keep_alive<1, 2>())
        .def_static("bytes_for", &PayloadExchange::bytes_for, nb::arg("nbytes"), nb::arg("data_bytes") = 0)
        .def(
            "begin",
            [](PayloadExchange &self, nb::bytes payload, double patience_s, uintptr_t failed_address) {
                self.publish({payload.c_str(), payload.size()});
                nb::gil_scoped_release unlocked;
                return self.wait(patience_s, word_at(failed_address));
            },
            nb::arg("payload"), nb::arg("patience_s"), nb::arg("failed_address"))
        .def("is_equal", [](const PayloadExchange &self) { return self.is_equal(); })
        .def("payloads",
             [](const PayloadExchange &self) {
                 nb::list found;
                 for (size_t rank = 0; rank < self.ranks(); ++rank) {
                     const std::string_view one = self.payload(rank);
                     found.append(nb::bytes(one.data(), one.size()));
                 }
                 return found;
             })
        .def_prop_ro("ranks", &PayloadExchange::ranks)
        .def_prop_ro("epoch", &PayloadExchange::epoch);

    using Collective = SharedCollective;
    nb::class_<Collective>(m, "SharedCollective", "A collective within a host, whose data travel with the rendezvous.")
        .def_static("least_bytes", &Collective::least_bytes, nb::arg("ranks"))
        .def_static(
            "all_gather",
            [](PayloadExchange &exchange, uintptr_t part, uintptr_t whole, size_t part_bytes) {
                return Collective::all_gather(exchange, memory_at(part), memory_at(whole), part_bytes);
            },
            nb::arg("exchange"), nb::arg("part"), nb::arg("whole"), nb::arg("part_bytes"), nb::keep_alive<0, 1>())
        .def_static(
            "reduce_scatter",
            [](PayloadExchange &exchange, uintptr_t whole, uintptr_t part, size_t part_bytes, int dtype) {
                return Collective::reduce_scatter(exchange, memory_at(whole), memory_at(part), part_bytes, SumDtype(dtype));
            },
            nb::arg("exchange"), nb::arg("whole"), nb::arg("part"), nb::arg("part_bytes"), nb::arg("dtype"), nb::keep_alive<0, 1>())
        .def_static(
            "all_reduce",
            [](PayloadExchange &exchange, uintptr_t whole, size_t nbytes, int dtype) {
                return Collective::all_reduce(exchange, memory_at(whole), nbytes, SumDtype(dtype));
            },
            nb::arg("exchange"), nb::arg("whole"), nb::arg("nbytes"), nb::arg("dtype"), nb::keep_alive<0, 1>())
        .def_static(
            "all_to_all",
            [](PayloadExchange &exchange, uintptr_t from, uintptr_t to, std::vector<int64_t> sent, std::vector<int64_t> received) {
                return Collective::all_to_all(exchange, memory_at(from), memory_at(to), std::move(sent), std::move(received));
            },
            nb::arg("exchange"), nb::arg("from_"), nb::arg("to"), nb::arg("sent"), nb::arg("received"), nb::keep_alive<0, 1>())
        .def_static(
            "exchange_rows",
            [](PayloadExchange &exchange, uintptr_t from, std::vector<int64_t> counts, size_t row_bytes, bool from_by_expert,
               bool to_by_expert) {
                return Collective::exchange_rows(exchange, memory_at(from), std::move(counts), row_bytes, from_by_expert, to_by_expert);
            },
            nb::arg("exchange"), nb::arg("from_"), nb::arg("counts"), nb::arg("row_bytes"), nb::arg("from_by_expert"),
            nb::arg("to_by_expert"), nb::keep_alive<0, 1>())
        .def_static("has_room", &Collective::has_room, nb::arg("exchange"), nb::arg("numbers"))
        .def("counts", &Collective::counts)
        .def(
            "place", [](Collective &self, uintptr_t to, size_t nbytes) { self.place(memory_at(to), nbytes); }, nb::arg("to"),
            nb::arg("nbytes"))
        .def("load", &Collective::load, nb::call_guard<nb::gil_scoped_release>())
        .def(
            "run",
            [](Collective &self, double patience_s, uintptr_t failed_address, bool is_met) {
                return int(self.run(patience_s, word_at(failed_address), is_met));
            },
            nb::arg("patience_s"), nb::arg("failed_address"), nb::arg("is_met"), nb::call_guard<nb::gil_scoped_release>());
}
