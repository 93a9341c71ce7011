// The counters of a group that every call updates. weft/symm/calls.py defines their meaning.
//
// One thread at a time makes calls. The watchdog thread reads the digests, and records refusals and the time of its
// last check. Both threads hold the GIL. No function here releases the GIL or calls Python between its first and last
// access to shared data, so each function is atomic for the other thread. (`Health::is_well` calls Python, on a copy of
// its list.)
#pragma once
#include <nanobind/nanobind.h>

#include <array>
#include <atomic>
#include <chrono>
#include <cstdint>
#include <stdexcept>
#include <utility>
#include <vector>

#include "python.hpp"

namespace weft {

namespace nb = nanobind;

// A reentrant try-lock: one thread holds it, and no thread waits for it.
class CallLock {
  public:
    bool acquire() {
        const unsigned long self = PyThread_get_thread_ident();
        if (depth_ > 0 && owner_ != self) return false;
        owner_ = self;
        ++depth_;
        return true;
    }
    // Releases the lock. Returns false if the calling thread does not hold the lock.
    bool release() {
        if (depth_ == 0 || owner_ != PyThread_get_thread_ident()) return false;
        --depth_;
        return true;
    }

  private:
    unsigned long owner_ = 0;
    int64_t depth_ = 0;
};

struct CallCounts {
    nb::object running = nb::cast(new CallLock(), nb::rv_policy::take_ownership);
    int64_t begun = 0, ended = 0, unanswered = 0;
    int64_t compile_from = 0;                   // the number of the first call that may compile a size that recurs
    bool has_layers = false;                    // options of layers wait for the next call
    nb::object refused_by_peers = nb::dict();  // {number of a call: reason}

    // Calls `function` with `arguments` if the current call raises an error.
    void undo_if_refused(nb::object function, nb::tuple arguments) {
        if (!undos_.empty() && undos_.back().call != begun) undos_.clear();
        undos_.push_back({begun, std::move(function), std::move(arguments)});
    }
    // Calls the functions of the current call, the last first.
    void undo() {
        const auto undos = std::exchange(undos_, {});
        for (auto one = undos.rbegin(); one != undos.rend(); ++one)
            if (one->call == begun) checked(PyObject_CallObject(one->function.ptr(), one->arguments.ptr()));
    }
    // Forgets these functions, because the current call has ended. They may refer to this object, and Python's garbage collector
    // does not see them.
    void keep() { undos_.clear(); }

    // Returns true if a peer has refused the call with this number.
    bool is_refused(int64_t call) const {
        if (PyDict_Size(refused_by_peers.ptr()) == 0) return false;
        const nb::object key = nb::steal(PyLong_FromLongLong(call));
        const int found = key.is_valid() ? PyDict_Contains(refused_by_peers.ptr(), key.ptr()) : -1;
        if (found < 0) throw nb::python_error();
        return found;
    }

  private:
    struct Undo {
        int64_t call;
        nb::object function;
        nb::tuple arguments;
    };
    std::vector<Undo> undos_;
};

// The sizes (numbers of rows) of one problem family that a group has called (weft/operator/cache.py: Family).
struct FamilySizes {
    // passing: the least `once` at which new sizes run unfused. most: the largest number of entries of `served`.
    FamilySizes(int64_t passing, int64_t most) : passing_(passing), most_(most) {}

    // Returns true if a call of this size is to run unfused without compilation: the size is new and other sizes have not recurred,
    // or the size recurs, but it is too early to compile it (weft/symm/compilations.py), or compiled it would run unfused too.
    bool waits(int64_t rows, const CallCounts &counts) const {
        if (unfused_from <= rows && rows <= unfused_to) return true;
        return contains(served, number(rows)) ? counts.begun < counts.compile_from : once >= passing_;
    }
    // Records that a call of this size runs unfused. Returns false if that is recorded already. Drops the older half of the sizes
    // if there are too many.
    bool add(int64_t rows) {
        if (contains(served, number(rows))) return false;
        if (int64_t(nb::len(served)) >= most_) {
            const nb::list all = nb::steal<nb::list>(PyDict_Keys(served.ptr()));
            for (size_t i = 0; i < size_t(most_ / 2); ++i) served.attr("pop")(all[i]);
        }
        if (PyDict_SetItem(served.ptr(), number(rows).ptr(), Py_None)) throw nb::python_error();
        return true;
    }

    nb::dict served;  // the sizes that were called, but not compiled, as keys in the order of their first calls
    int64_t once = 0;  // the number of sizes that have been compiled, but called only once
    int64_t unfused_from = 1, unfused_to = 0;  // the smallest and the largest size that would run unfused; 1 and 0: unknown

  private:
    int64_t passing_, most_;
};

class CallDigest {
  public:
    explicit CallDigest(size_t kept) : ends_(kept) {
        if (kept == 0) throw std::invalid_argument("kept=0: keep at least one digest");
    }
    void note(uint64_t fingerprint, nb::object what) {
        digest = digest * 0x9E3779B97F4A7C15 + fingerprint;
        what_ = std::move(what);
    }
    void end(int64_t number) {
        at(number) = {digest, words.first, words.second};
        last = number;
    }
    std::array<uint64_t, 3> &at(int64_t number) { return ends_[uint64_t(number) % ends_.size()]; }
    nb::object what() const { return what_; }

    uint64_t digest = 0;
    std::pair<uint64_t, uint64_t> words{};  // the digest words of layers, up to the last call
    int64_t last = 0;

  private:
    std::vector<std::array<uint64_t, 3>> ends_;  // [call number % size]: the digest and the words of layers
    nb::object what_ = nb::steal(PyUnicode_FromString(""));
};

// The state of a group, as its watchdog knows it.
struct Health {
    explicit Health(double stale_s) : stale_s(stale_s) {}
    static double now() {
        return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
    }
    bool is_stale() const { return now() - looked_at > stale_s; }
    // Calls the methods in `looks`. Returns true if then the group has not failed, and its watchdog has checked recently.
    bool is_well() const {
        if (nb::len(looks))
            for (nb::handle look : nb::borrow<nb::tuple>(checked(PySequence_Tuple(looks.ptr()))))  // a method may change the list
                if (const nb::object method = call(look); !method.is_none()) call(method);
        return !failed.load(std::memory_order_acquire) && !is_stale();
    }

    std::atomic<int64_t> failed{0};  // native waits read it, and Python writes it by its address
    double looked_at = now(), stale_s;
    // Weak references to methods that make the group fail if they know of a failure that the watchdog has not seen yet.
    nb::list looks;
};

}  // namespace weft
