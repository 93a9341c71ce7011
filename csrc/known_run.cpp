#include "known_run.hpp"

#include <nanobind/stl/string.h>

#include <stdexcept>
#include <string>

namespace nb = nanobind;

namespace weft {

namespace {

std::vector<size_t> numbers(nb::handle listed) {
    std::vector<size_t> found;
    for (nb::handle one : nb::cast<nb::list>(listed)) found.push_back(nb::cast<size_t>(one));
    return found;
}

}  // namespace

KnownRun::View::View(nb::handle written) {
    const nb::tuple parts = nb::cast<nb::tuple>(written);
    const std::string kind = nb::cast<std::string>(parts[0]);
    if (kind == "fixed") {
        fixed = parts[1];
        return;
    }
    tensor = nb::cast<size_t>(parts[1]);
    if (kind == "part") key = parts[2];
    if (kind != "part" && kind != "whole") throw std::invalid_argument("not a view: " + std::string(nb::repr(written).c_str()));
}

nb::object KnownRun::View::of(const std::vector<nb::object> &tensors) const {
    if (fixed.is_valid()) return fixed;
    if (!key.is_valid()) return tensors[tensor];
    return checked(PyObject_GetItem(tensors[tensor].ptr(), key.ptr()));
}

KnownRun::Item::Item(nb::handle written) {
    const nb::tuple parts = nb::cast<nb::tuple>(written);
    const std::string kind = nb::cast<std::string>(parts[0]);
    if (kind == "program") {
        first = parts[1];
        last = parts[2];
        return;
    }
    if (kind == "launch") {
        launch = parts[1];
        stream = nb::cast<size_t>(parts[2]);
        return;
    }
    function = parts[1];
    for (nb::handle one : nb::cast<nb::list>(nb::object(parts[2]))) positional.emplace_back(one);
    nb::list names, values;
    for (auto [name, value] : nb::cast<nb::dict>(nb::object(parts[4]))) {
        names.append(name);
        values.append(value);
    }
    if (const nb::object view = parts[3]; !view.is_none()) {
        out.emplace_back(view);
        names.append(nb::str("out"));
    }
    constants = nb::tuple(values);
    keywords = nb::tuple(names);
}

KnownRun::KnownRun(nb::dict of)
    : run_program_(of["run_program"]), enter_(of["enter"]), broke_(of["broke"]), stream_of_(of["stream_of"]),
      device_number_(of["device_number"]), empty_(of["empty"]), empty_keywords_(nb::make_tuple("dtype", "device")), device_(of["device"]),
      bases_(of["bases"]), streams_(of["streams"]), inputs_(nb::cast<size_t>(of["inputs"])), addressed_(numbers(of["addressed"])),
      results_(numbers(of["results"])) {
    for (nb::handle one : nb::cast<nb::list>(of["outputs"])) outputs_.emplace_back(one[0], one[1]);
    for (nb::handle one : nb::cast<nb::list>(of["items"])) items_.emplace_back(one);
    const auto require_below = [](size_t number, size_t limit) {
        if (number >= limit) throw std::invalid_argument("a call has " + std::to_string(limit) + " entries, and not entry " + std::to_string(number));
    };
    const size_t tensors = inputs_ + outputs_.size();
    for (const size_t one : addressed_) require_below(one, tensors);
    for (const size_t one : results_) require_below(one, tensors);
    require_below(addressed_.size(), nb::len(bases_) + 1);
    require_below(0, nb::len(streams_));
    for (const Item &item : items_) require_below(item.stream, nb::len(streams_));
    for (const Item &item : items_)
        for (const std::vector<View> *views : {&item.positional, &item.out})
            for (const View &view : *views)
                if (!view.fixed.is_valid()) require_below(view.tensor, tensors);
}

nb::list KnownRun::run(std::vector<nb::object> &tensors) const {
    if (items_.empty()) throw std::runtime_error("the memory of this schedule is closed");
    if (tensors.size() != inputs_) throw std::invalid_argument("a call has " + std::to_string(inputs_) + " inputs");
    for (const auto &[shape, dtype] : outputs_) {
        PyObject *given[] = {nullptr, shape.ptr(), dtype.ptr(), device_.ptr()};
        tensors.push_back(checked(PyObject_Vectorcall(empty_.ptr(), given + 1, 1 | PY_VECTORCALL_ARGUMENTS_OFFSET, empty_keywords_.ptr())));
    }
    try {
        issue(tensors);
    } catch (nb::python_error &error) {
        call(broke_, error.value());
        throw std::logic_error("`broke` returned");
    }
    nb::list results;
    for (const size_t one : results_) results.append(tensors[one]);
    return results;
}

void KnownRun::let_go() { items_.clear(); }

void KnownRun::issue(const std::vector<nb::object> &tensors) const {
    call(enter_);
    for (size_t i = 0; i < addressed_.size(); ++i) bases_[i] = call_method(tensors[addressed_[i]], data_ptr_);
    streams_[0] = call(stream_of_, device_number_);
    for (const Item &item : items_) {
        if (item.first.is_valid())
            call(run_program_, item.first, item.last, bases_, streams_);
        else if (item.launch.is_valid())
            call(item.launch, bases_, nb::object(streams_[item.stream]));
        else
            call_torch(item, tensors);
    }
}

void KnownRun::call_torch(const Item &item, const std::vector<nb::object> &tensors) const {
    std::vector<nb::object> kept;
    std::vector<PyObject *> given(1);
    for (const std::vector<View> *views : {&item.positional, &item.out}) {
        if (views == &item.out)
            for (nb::handle one : nb::borrow<nb::tuple>(item.constants)) given.push_back(one.ptr());
        for (const View &view : *views) {
            kept.push_back(view.of(tensors));
            given.push_back(kept.back().ptr());
        }
    }
    const size_t count = item.positional.size() | PY_VECTORCALL_ARGUMENTS_OFFSET;
    checked(PyObject_Vectorcall(item.function.ptr(), given.data() + 1, count, item.keywords.ptr()));
}

}  // namespace weft

void register_known_run(nb::module_ &m) {
    using namespace weft;
    nb::class_<KnownRun>(m, "KnownRun", "A run of a compiled schedule on a GPU.", nb::is_weak_referenceable())
        .def(nb::init<nb::dict>(), nb::arg("of"))
        .def(
            "run",
            [](const KnownRun &self, nb::list inputs) {
                std::vector<nb::object> tensors;
                for (nb::handle one : inputs) tensors.push_back(nb::borrow(one));
                return self.run(tensors);
            },
            nb::arg("inputs"))
        .def("let_go", &KnownRun::let_go);
}
