// Python bindings of the per-group counters that every call updates (group_calls.hpp).
#include "group_calls.hpp"

#include <nanobind/stl/pair.h>

namespace nb = nanobind;
using namespace weft;

void register_group_calls(nb::module_ &m) {
    nb::class_<CallLock>(m, "CallLock", "A reentrant try-lock: one thread holds it, and no thread waits for it.")
        .def(nb::init<>())
        .def(
            "acquire",
            [](CallLock &self, bool blocking) {
                if (blocking) throw std::invalid_argument("blocking=True is not supported: use blocking=False");
                return self.acquire();
            },
            nb::kw_only(), nb::arg("blocking"))
        .def("release", [](CallLock &self) {
            if (!self.release()) throw std::runtime_error("this thread does not hold the lock, because it is in no call of the group");
        });
    nb::class_<CallCounts>(m, "CallCounts", "Counts of the calls of a group that this rank has begun and ended, and refusals.")
        .def(nb::init<>())
        .def_rw("running", &CallCounts::running)
        .def_rw("begun", &CallCounts::begun)
        .def_rw("ended", &CallCounts::ended)
        .def_rw("unanswered", &CallCounts::unanswered)
        .def_rw("compile_from", &CallCounts::compile_from)
        .def_rw("has_layers", &CallCounts::has_layers)
        .def_ro("refused_by_peers", &CallCounts::refused_by_peers)
        .def(
            "undo_if_refused",
            [](CallCounts &self, nb::object function, nb::args arguments) { self.undo_if_refused(function, arguments); },
            nb::arg("function"), nb::arg("arguments"))
        .def("undo", &CallCounts::undo)
        .def("keep", &CallCounts::keep);
    nb::class_<FamilySizes>(m, "FamilySizes", "The sizes of one problem family that a group has called.")
        .def(nb::init<int64_t, int64_t>(), nb::arg("passing"), nb::arg("most"))
        .def("waits", &FamilySizes::waits, nb::arg("rows"), nb::arg("counts"))
        .def("add", &FamilySizes::add, nb::arg("rows"))
        .def_ro("served", &FamilySizes::served)
        .def_rw("once", &FamilySizes::once)
        .def_rw("unfused_from", &FamilySizes::unfused_from)
        .def_rw("unfused_to", &FamilySizes::unfused_to);
    nb::class_<CallDigest>(m, "CallDigest", "A running digest of all calls, kept for the most recent calls.")
        .def(nb::init<size_t>(), nb::arg("kept"))
        .def("note", &CallDigest::note, nb::arg("fingerprint"), nb::arg("what"))
        .def("end", &CallDigest::end, nb::arg("number"))
        .def("digest_at", [](CallDigest &self, int64_t number) { return self.at(number)[0]; }, nb::arg("number"))
        .def(
            "words_at",
            [](CallDigest &self, int64_t number) { return std::pair(self.at(number)[1], self.at(number)[2]); },
            nb::arg("number"))
        .def_ro("digest", &CallDigest::digest)
        .def_ro("last", &CallDigest::last)
        .def_rw("words", &CallDigest::words)
        .def_prop_ro("what", &CallDigest::what);
    nb::class_<Health>(m, "Health", "The state of a group: whether it has failed, and the time of its watchdog's last check.")
        .def(nb::init<double>(), nb::arg("stale_s"))
        .def("is_well", &Health::is_well)
        .def("is_stale", &Health::is_stale)
        .def_rw("looked_at", &Health::looked_at)
        .def_ro("looks", &Health::looks)
        .def_prop_ro("failed_address", [](const Health &self) { return reinterpret_cast<uintptr_t>(&self.failed); });
}
