// Python bindings of the small all-gather through shared memory (exchange.hpp).
#include "exchange.hpp"

#include <nanobind/nanobind.h>

#include <new>

namespace nb = nanobind;
using namespace weft;

void register_exchange(nb::module_ &m) {
    nb::class_<PayloadExchange>(m, "PayloadExchange", "A small all-gather through shared memory.")
        .def(
            "__init__",
            [](PayloadExchange *self, nb::list memory, size_t rank, size_t nbytes) {
                std::vector<char *> addresses;
                for (nb::handle one : memory) addresses.push_back(reinterpret_cast<char *>(nb::cast<uintptr_t>(one.attr("address"))));
                new (self) PayloadExchange(std::move(addresses), rank, nbytes);
            },
            nb::arg("memory"), nb::arg("rank"), nb::arg("nbytes"), nb::keep_alive<1, 2>())
        .def_static("bytes_for", &PayloadExchange::bytes_for, nb::arg("nbytes"))
        .def(
            "begin",
            [](PayloadExchange &self, nb::bytes payload, double patience_s, uintptr_t failed_address) {
                self.publish({payload.c_str(), payload.size()});
                nb::gil_scoped_release unlocked;
                return self.wait(patience_s, reinterpret_cast<const std::atomic<int64_t> *>(failed_address));
            },
            nb::arg("payload"), nb::arg("patience_s"), nb::arg("failed_address"))
        .def("is_equal", &PayloadExchange::is_equal)
        .def("payloads",
             [](const PayloadExchange &self) {
                 nb::list found;
                 for (size_t rank = 0; rank < self.ranks(); ++rank) {
                     const std::string_view one = self.payload(rank);
                     found.append(nb::bytes(one.data(), one.size()));
                 }
                 return found;
             })
        .def_prop_ro("epoch", &PayloadExchange::epoch);
}
