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
    bool has_layers = false;                    // options of layers wait for the next call
    nb::object refused_by_peers = nb::dict();  // {number of a call: reason}

    // Returns true if a peer has refused the call with this number.
    bool is_refused(int64_t call) const {
        if (PyDict_Size(refused_by_peers.ptr()) == 0) return false;
        const nb::object key = nb::steal(PyLong_FromLongLong(call));
        const int found = key.is_valid() ? PyDict_Contains(refused_by_peers.ptr(), key.ptr()) : -1;
        if (found < 0) throw nb::python_error();
        return found;
    }
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
