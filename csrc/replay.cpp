// Calls that repeat an earlier call: found by their arguments, checked, counted, run and ended in one native call.
//
// weft/operator/replay.py records calls, and defines which calls repeat. An unfused call enters no frame of the
// interpreter: torch's functions are called through Python's C API. Overlapped calls on GPUs enter it only to check the
// executor's memory, and to order the run after earlier runs. Other overlapped calls, calls with gradients, waits of CPU ranks
// that take long, and errors enter Python.
//
// The GIL is held, except inside torch functions, which may release it. Then another thread may make calls, and may
// remove recorded calls. Therefore a call owns or references all that it needs, and the lock `running` keeps a second
// thread out of the calls of the group.
#include <nanobind/nanobind.h>

#include <algorithm>
#include <cstdint>
#include <exception>
#include <new>
#include <optional>
#include <utility>
#include <vector>

#include "combine_steps.hpp"
#include "group_calls.hpp"
#include "known_run.hpp"
#include "layouts.hpp"
#include "plain_steps.hpp"
#include "python.hpp"
#include "recipe.hpp"

namespace nb = nanobind;

namespace weft {

namespace {

// The names that native code looks up in Python objects.
struct Names {
    nb::object acquire = interned("acquire"), called = interned("called"), called_at = interned("called_at"),
               calls = interned("calls"), check = interned("check"), chosen = interned("chosen"), end = interned("end"), failed = interned("failed"),
               is_ready = interned("is_ready"), note = interned("note"), in_python = interned("in_python"),
               refused = interned("refused"), release = interned("release"), run = interned("run"), takes = interned("takes");
};

nb::object attribute(nb::handle object, nb::handle name) { return checked(PyObject_GetAttr(object.ptr(), name.ptr())); }

void set_attribute(nb::handle object, nb::handle name, nb::handle value) {
    if (PyObject_SetAttr(object.ptr(), name.ptr(), value.ptr())) throw nb::python_error();
}

// State that all calls of a process share.
struct Surroundings {
    nb::object groups;      // all groups that are alive, as a dict
    nb::object coalescing;  // the groups whose collectives torch collects into one, as a dict
    nb::object is_any_autocast_enabled;  // faster than `is_autocast_enabled`, which must parse the name of a device type
    nb::object is_autocast_enabled, is_capturing;
    nb::object looks_at_frames;  // true if Dynamo would compile the Python functions that a call enters
    Names names{};
};

}  // namespace

// A recorded call, to be repeated with other tensors.
class KnownCall {
  public:
    // of: the Python part, a `Replay` or `Passing`. inputs: the inputs, in the order of the steps' first buffers.
    //     results: the names of the buffers to return. steps: None if Python runs the call.
    KnownCall(nb::object of, nb::object surroundings, nb::object inputs, nb::object steps, nb::list results, nb::object returned,
              bool usual, bool captured)
        : of_(of), surroundings_object_(surroundings), surroundings_(*nb::cast<const Surroundings *>(surroundings)),
          group_(of.attr("group_ref")), kind_(of.attr("kind")), prepared_(of.attr("prepared")), chosen_(of.attr("chosen")),
          here_(of.attr("here")), counts_object_(of.attr("counts")), digest_object_(of.attr("digest")),
          health_object_(of.attr("health")), what_(of.attr("what")), steps_object_(steps),
          counts_(nb::cast<CallCounts *>(counts_object_)), digest_(nb::cast<CallDigest *>(digest_object_)),
          health_(nb::cast<const Health *>(health_object_)), steps_(nb::isinstance<PlainSteps>(steps) ? nb::cast<const PlainSteps *>(steps) : nullptr),
          combine_(nb::isinstance<CombineSteps>(steps) ? nb::cast<const CombineSteps *>(steps) : nullptr),
          run_(nb::isinstance<KnownRun>(steps) ? nb::cast<const KnownRun *>(steps) : nullptr),
          fingerprint_(nb::cast<uint64_t>(of.attr("fingerprint"))), any_rows_(nb::cast<bool>(of.attr("any_rows"))),
          differentiated_(nb::cast<bool>(of.attr("differentiated"))),
          ignores_autocast_(nb::cast<bool>(of.attr("ignores_autocast"))), notes_(nb::cast<bool>(of.attr("notes"))),
          on_gpu_(nb::cast<std::string>(kind_) == "cuda"), lock_(counts_->running), native_{usual && (steps_ || combine_ || run_), captured && steps_}, returned_(returned) {
        if (!on_gpu_ && native_[0]) turns_.emplace(of, *counts_, *health_);
        if (native_[0] && nb::cast<bool>(of.attr("passes"))) any_size_.emplace(of);
        if (!inputs.is_none()) inputs_.emplace(inputs);
        if ((native_[0] || native_[1]) && !inputs_) throw std::invalid_argument("inputs=None: pass the inputs, which the steps read");
        if (steps_)
            for (nb::handle name : results) results_.push_back(steps_->place(name));
    }

    bool is_native() const { return native_[0]; }
    // Makes the call, and returns its result; nothing if the call must take the slow path. rows: the number of rows, for calls
    // that allow any number of rows.
    nb::object repeat(const Given &given, int64_t rows) {
        const Names &names = surroundings_.names;
        const nb::object group = nb::borrow(PyWeakref_GetObject(group_.ptr()));
        if (group.is_none() || !contains(surroundings_.groups, group)) return {};
        if (!any_size_ && !attribute(prepared_, names.chosen).is(chosen_)) return {};
        if (!health_->is_well()) return {};
        if (!ignores_autocast_ && is_true(call(surroundings_.is_any_autocast_enabled)) && is_true(call(surroundings_.is_autocast_enabled, kind_))) return {};
        // Calls that run in the same way under capture do not ask, because CUDA takes microseconds to answer.
        const bool capturing = on_gpu_ && !any_size_ && !(native_[0] && native_[1]) && is_true(call(surroundings_.is_capturing));
        if (any_rows_ && capturing) return {};
        if (!on_gpu_ && !turns_) {
            const nb::object result = call_method(of_, names.in_python, given.positional, given.named, group);
            return result.is(Py_NotImplemented) ? nb::object() : result;
        }
        const bool native = native_[capturing];
        const bool enters_python = !native || run_ || turns_ || counts_->has_layers || (steps_ && steps_->calls_functions());
        if (enters_python && is_true(call(surroundings_.looks_at_frames))) return {};
        const nb::handle captured = capturing ? Py_True : Py_False;
        if (native && !run_) {
            if (PyDict_Size(surroundings_.coalescing.ptr()) > 0 && contains(surroundings_.coalescing, group)) return {};
        } else if (!is_true(call_method(of_, names.is_ready, captured))) {
            return {};
        }
        std::vector<nb::object> inputs;
        std::optional<CombineSteps::Call> combined;
        if (combine_) {
            inputs_->make_each(given, inputs);
            combined = combine_->look(inputs);
            if (!combined || !turns_->is_usual()) return {};
        }
        if (counts_->unanswered || counts_->is_refused(counts_->begun + 1)) return {};
        const Running running = counts_->running.is(lock_.object) ? lock_ : Running(counts_->running);
        if (!running.acquire(names)) return {};
        nb::object results;
        {
            const Release release{running, names};
            const nb::object published = turns_ ? turns_->published() : nb::none();
            try {
                uint64_t fingerprint = fingerprint_;
                // If ranks refuse the call, what is stored here is undone, by the number of the call.
                ++counts_->begun;
                if (!any_size_) {
                    count();
                } else if (any_size_->takes(rows, *counts_, surroundings_)) {
                    fingerprint = any_size_->number * uint64_t(2 * rows + 1);  // weft/operator/across.py: of_size
                } else {
                    --counts_->begun;
                    return {};
                }
                if (!differentiated_ && on_gpu_) digest_->note(fingerprint, what_);
                if (combined) {
                    nb::list made;
                    made.append(combine_->run(*combined, inputs, {*turns_, fingerprint, given}));
                    results = made;
                } else if (native && run_) {
                    inputs_->make_each(given, inputs);
                    results = run_->run(inputs);
                    // After a failure, enqueued work gives no valid result.
                    if (health_->failed.load(std::memory_order_acquire)) call_method(of_, names.check);
                } else if (native) {
                    results = run(given, group, fingerprint);
                } else {
                    results = call_method(of_, names.run, given.positional, given.named, captured);
                }
                if (any_size_) any_size_->sizes->add(rows);  // not before: ranks may have refused the call
                if (notes_) call_method(of_, names.note, given.positional, given.named);
                end();
                came_back_ = true;
            } catch (nb::python_error &error) {
                fail(error.value(), group, published);
            } catch (const std::bad_alloc &) {
                fail(nb::steal(PyObject_CallNoArgs(PyExc_MemoryError)), group, published);
            } catch (const std::exception &error) {
                fail(call(PyExc_RuntimeError, nb::str(error.what())), group, published);
            }
        }
        return returned_.make({results, given.named});
    }

  private:
    // The lock of the group's calls. Tests may replace the lock.
    struct Running {
        explicit Running(nb::object lock) : object(std::move(lock)), native(nullptr) { nb::try_cast(object, native); }
        bool acquire(const Names &names) const {
            if (native) return native->acquire();
            static const nb::handle keywords = nb::make_tuple("blocking").release();
            PyObject *const given[] = {object.ptr(), Py_False};
            return is_true(checked(PyObject_VectorcallMethod(names.acquire.ptr(), given, 1, keywords.ptr())));
        }
        nb::object object;
        CallLock *native;
    };
    struct Release {
        const Running &running;
        const Names &names;
        ~Release() {
            if (running.native) {
                running.native->release();
                return;
            }
            PyObject *const given[] = {running.object.ptr()};
            PyObject *const done = PyObject_VectorcallMethod(names.release.ptr(), given, 1, nullptr);
            if (!done) PyErr_WriteUnraisable(running.object.ptr());
            Py_XDECREF(done);
        }
    };

    // The state of calls that allow any number of rows (`Passing`).
    struct AnySize {
        explicit AnySize(nb::handle of)
            : sizes_object(of.attr("sizes")), sizes(nb::cast<FamilySizes *>(sizes_object)),
              number(nb::cast<uint64_t>(of.attr("number"))), multiple(nb::cast<int64_t>(of.attr("multiple"))) {}
        bool takes(int64_t rows, const CallCounts &counts, const Surroundings &around) const {
            if (rows % multiple != 0) return false;
            if (sizes->waits(rows, counts)) return true;
            return !is_true(call(around.looks_at_frames)) && is_true(call_method(sizes_object, around.names.takes, weft::number(rows)));
        }
        nb::object sizes_object;
        FamilySizes *sizes;
        uint64_t number;
        int64_t multiple;
    };

    // Marks the prepared state as used.
    void count() {
        const Names &names = surroundings_.names;
        if (!came_back_) {
            call_method(here_, names.called, prepared_);
            return;
        }
        const nb::object one = number(1), now = checked(PyNumber_Add(attribute(here_, names.calls).ptr(), one.ptr()));
        set_attribute(here_, names.calls, now);
        set_attribute(prepared_, names.called_at, now);
    }
    nb::object run(const Given &given, nb::handle group, uint64_t fingerprint) const {
        std::vector<nb::object> buffers;
        buffers.reserve(steps_->size());
        inputs_->make_each(given, buffers);
        buffers.resize(steps_->size());
        if (turns_) {
            const CpuCall on_cpu{*turns_, fingerprint, given};
            steps_->run(buffers, group, &on_cpu);
        } else {
            steps_->run(buffers, group);
        }
        nb::list results;
        for (size_t place : results_) results.append(buffers[place]);
        return results;
    }
    void end() {
        const Names &names = surroundings_.names;
        if (counts_->has_layers) {
            const nb::object refused = call_method(counts_object_, names.end);
            if (is_true(refused)) call_method(of_, names.refused, refused);
            return;
        }
        counts_->ended = counts_->begun;
        counts_->keep();
        digest_->end(counts_->begun);
        if (counts_->is_refused(counts_->begun)) call_method(of_, names.refused, call_method(counts_object_, names.refused));
    }
    [[noreturn]] void fail(nb::handle error, nb::handle group, nb::handle published) const {
        call_method(of_, surroundings_.names.failed, error, group, published);
        throw std::logic_error("`failed` returned");
    }

    nb::object of_, surroundings_object_;
    const Surroundings &surroundings_;
    nb::object group_, kind_, prepared_, chosen_, here_, counts_object_, digest_object_, health_object_, what_, steps_object_;
    CallCounts *counts_;
    CallDigest *digest_;
    const Health *health_;
    const PlainSteps *steps_;
    const CombineSteps *combine_;
    const KnownRun *run_;
    uint64_t fingerprint_;
    bool any_rows_, differentiated_, ignores_autocast_, notes_, on_gpu_, came_back_ = false;
    Running lock_;    // of `counts_`, unless a test has replaced it
    bool native_[2];  // for calls outside of captures, and inside
    std::optional<AnySize> any_size_;
    std::optional<CpuTurns> turns_;  // set if native code makes the call on CPU
    std::optional<Recipe> inputs_;
    Recipe returned_;
    std::vector<size_t> results_;
};

// A call that has not been recorded. key: shared by equal calls; None if such calls are never recorded. family: shared
// by calls that differ only in their number of rows.
struct UnknownCall {
    nb::object key, family;
};

// The recorded calls of a function.
class KnownCalls {
  public:
    // calls, families: by key, a `KnownCall`, or None for calls that take the slow path.
    // forward_ad: the globals of torch.autograd.forward_ad. of_size: the name of an argument that `families` ignore, or None.
    KnownCalls(nb::object reader, nb::dict calls, nb::dict families, nb::tuple identified, nb::tuple unusual, nb::object is_grad_enabled,
               nb::dict forward_ad, nb::object of_size)
        : reader_object_(reader), reader_(*nb::cast<const LayoutReader *>(reader)), calls_(calls), families_(families),
          identified_(identified), is_grad_enabled_(is_grad_enabled), forward_ad_(forward_ad), of_size_(of_size) {
        for (nb::handle one : unusual) unusual_.push_back(nb::borrow(one));
    }

    nb::object repeat(nb::tuple positional, nb::dict named) {
        if (nb::cast<int64_t>(nb::object(forward_ad_[level_])) >= 0) return unknown(nb::none(), nb::none());
        for (const nb::object &one : unusual_)
            if (is_true(call(one))) return unknown(nb::none(), nb::none());
        const bool gradients = is_true(call(is_grad_enabled_));
        LayoutReader::Words words;
        if (!reader_.read_call(words, positional, named, gradients, identified_)) return unknown(nb::none(), nb::none());
        const nb::object key = words.bytes();
        const Given given{positional, named};
        const nb::object known = found(calls_, key);
        if (known.is_valid()) {
            if (known.is_none()) return unknown(known, known);
            nb::object result = nb::inst_ptr<KnownCall>(known)->repeat(given, -1);
            return result.is_valid() ? result : unknown(key, nb::none());
        }
        const int64_t rows = words.rows_of_first();
        if (rows < 0) return unknown(key, nb::none());
        if (!of_size_.is_none()) reader_.read_call(words, positional, named, gradients, identified_, of_size_);
        const LayoutReader::Words::Places places = words.alike();
        const nb::object family = words.of_any_rows(places);
        nb::object passing = found(families_, family), result;
        if (!passing.is_valid() && places.size() > 1) passing = found_of_fewer(words, places);
        if (passing.is_valid()) result = nb::inst_ptr<KnownCall>(passing)->repeat(given, rows);
        if (result.is_valid()) return result;
        if (std::find(varying_.begin(), varying_.end(), places) == varying_.end() && varying_.size() < MOST_VARYING) varying_.push_back(places);
        return unknown(key, family);
    }

  private:
    static constexpr size_t MOST_VARYING = 64;

    // Returns the record of a family in which fewer numbers of rows vary: a weight may happen to have as many rows as the first
    // argument.
    nb::object found_of_fewer(LayoutReader::Words &words, const LayoutReader::Words::Places &places) const {
        for (const auto &one : varying_)
            if (one.size() < places.size() && std::includes(places.begin(), places.end(), one.begin(), one.end()))
                if (nb::object passing = found(families_, words.of_any_rows(one)); passing.is_valid()) return passing;
        return {};
    }
    static nb::object unknown(nb::object key, nb::object family) {
        return nb::cast(UnknownCall{std::move(key), std::move(family)});
    }
    static nb::object found(nb::handle dict, nb::handle key) {
        PyObject *const value = PyDict_GetItemWithError(dict.ptr(), key.ptr());
        if (!value && PyErr_Occurred()) throw nb::python_error();
        return nb::borrow(value);  // a new reference, because another thread may remove the record during the call
    }

    nb::object reader_object_;
    const LayoutReader &reader_;
    nb::dict calls_, families_;
    nb::tuple identified_;
    std::vector<nb::object> unusual_;
    nb::object is_grad_enabled_;
    nb::dict forward_ad_;
    nb::object of_size_;
    nb::object level_ = interned("_current_level");  // negative unless forward-mode gradients are computed
    std::vector<LayoutReader::Words::Places> varying_;  // the places of the numbers of rows that vary in a family
};

namespace {

// The slot `tp_call` of `KnownCalls`. A method `__call__` of nanobind would look up the method and convert the arguments, which takes
// microseconds if the processor's caches do not hold this code.
PyObject *repeat_call(PyObject *self, PyObject *positional, PyObject *named) noexcept {
    try {
        const nb::dict by_name = named ? nb::borrow<nb::dict>(named) : nb::dict();
        return nb::inst_ptr<KnownCalls>(self)->repeat(nb::borrow<nb::tuple>(positional), by_name).release().ptr();
    } catch (nb::python_error &error) {
        error.restore();
    } catch (const std::bad_alloc &) {
        PyErr_NoMemory();
    } catch (const std::exception &error) {
        PyErr_SetString(PyExc_RuntimeError, error.what());
    }
    return nullptr;
}
PyType_Slot repeat_slots[] = {{Py_tp_call, reinterpret_cast<void *>(repeat_call)}, {0, nullptr}};

}  // namespace

}  // namespace weft

using namespace weft;

void register_replay(nb::module_ &m) {
    nb::class_<Recipe>(m, "Recipe", "A recipe that makes a value from the tensors of a call.")
        .def(nb::init<nb::handle>(), nb::arg("written"))
        .def(
            "__call__", [](const Recipe &self, nb::object positional, nb::dict named) { return self.make({positional, named}); },
            nb::arg("positional"), nb::arg("named"));
    nb::class_<Surroundings>(m, "Surroundings", "State that all known calls of a process read.")
        .def(nb::init<nb::object, nb::object, nb::object, nb::object, nb::object, nb::object>(), nb::kw_only(), nb::arg("groups"),
             nb::arg("coalescing"), nb::arg("is_any_autocast_enabled"), nb::arg("is_autocast_enabled"), nb::arg("is_capturing"),
             nb::arg("looks_at_frames"));
    nb::class_<KnownCall>(m, "KnownCall", "A recorded call, to be repeated with other tensors.")
        .def(nb::init<nb::object, nb::object, nb::object, nb::object, nb::list, nb::object, bool, bool>(), nb::arg("of"),
             nb::arg("surroundings"), nb::arg("inputs").none(), nb::arg("steps").none(), nb::arg("results"), nb::arg("returned"),
             nb::kw_only(), nb::arg("usual"), nb::arg("captured"))
        .def(
            "repeat",
            [](KnownCall &self, nb::object positional, nb::dict named) {
                nb::object result = self.repeat({positional, named}, -1);
                return result.is_valid() ? result : nb::none();
            },
            nb::arg("positional"), nb::arg("named"))
        .def_prop_ro("is_native", &KnownCall::is_native);
    nb::class_<UnknownCall>(m, "UnknownCall", "A call that has not been recorded.")
        .def_ro("key", &UnknownCall::key)
        .def_ro("family", &UnknownCall::family);
    nb::class_<KnownCalls>(m, "KnownCalls", "The recorded calls of a function.", nb::type_slots(repeat_slots))
        .def(nb::init<nb::object, nb::dict, nb::dict, nb::tuple, nb::tuple, nb::object, nb::dict, nb::object>(), nb::arg("reader"),
             nb::arg("calls"), nb::arg("families"), nb::arg("identified"), nb::arg("unusual"), nb::arg("is_grad_enabled"),
             nb::arg("forward_ad"), nb::arg("of_size").none());
}
