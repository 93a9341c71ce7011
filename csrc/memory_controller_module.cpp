// Python bindings of the simulator of T3's memory controller.
#include <nanobind/nanobind.h>
#include <nanobind/stl/map.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include "memory_controller.hpp"

namespace nb = nanobind;

void register_memory_controller(nb::module_ &m) {
    using weft::ControllerSetup;
    nb::class_<ControllerSetup> setup(m, "ControllerSetup", "The numbers of a run of the memory controller.");
    setup.def(nb::init<>());
#define FIELD(name) setup.def_rw(#name, &ControllerSetup::name)
    FIELD(read_ns); FIELD(store_ns); FIELD(update_ns); FIELD(burst); FIELD(latency_ns); FIELD(llc); FIELD(queue); FIELD(stores);
    FIELD(high); FIELD(low); FIELD(arbitration); FIELD(own_writes); FIELD(intensities); FIELD(thresholds); FIELD(starved_ns);
    FIELD(link_ns); FIELD(link_latency_ns); FIELD(link_queue); FIELD(dma_window); FIELD(units); FIELD(slots); FIELD(ahead);
    FIELD(slabs); FIELD(slab_ns); FIELD(a_slab); FIELD(b_slab); FIELD(a); FIELD(b); FIELD(bytes); FIELD(chunk); FIELD(output);
    FIELD(copied); FIELD(expected); FIELD(lands); FIELD(peer); FIELD(link); FIELD(block); FIELD(made); FIELD(copies); FIELD(arrival);
    FIELD(sets); FIELD(ways); FIELD(wavefronts); FIELD(bin_ns);
#undef FIELD
    m.def("run_controllers", &weft::run_controllers, nb::arg("setups"), nb::call_guard<nb::gil_scoped_release>());
}
