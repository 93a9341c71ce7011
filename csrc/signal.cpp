#include "signal.hpp"

#include <linux/futex.h>
#include <nanobind/nanobind.h>
#include <nanobind/stl/tuple.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include <algorithm>
#include <climits>
#include <tuple>

#include "spin.hpp"

namespace nb = nanobind;

namespace weft {
namespace {

// The kernel compares 32 bits; on the little-endian machines that weft supports these are the low half of the counter.
uint32_t *low_half(Counter *counter) { return reinterpret_cast<uint32_t *>(&counter->value); }

void wake(Counter *counter) {
    // This fence, and the waiter's registration in `sleepers`, are sequentially consistent. So either the waiter's next check
    // reads the new value, or this thread sees that the waiter sleeps.
    std::atomic_thread_fence(std::memory_order_seq_cst);
    if (counter->sleepers.load(std::memory_order_relaxed) > 0)
        syscall(SYS_futex, low_half(counter), FUTEX_WAKE, INT_MAX, nullptr, nullptr, 0);
}

}  // namespace

void signal_set(Counter *counter, int64_t value) {
    counter->value.store(value, std::memory_order_release);
    wake(counter);
}

void signal_add(Counter *counter, int64_t amount) {
    counter->value.fetch_add(amount, std::memory_order_acq_rel);
    wake(counter);
}

Wait signal_wait(Counter *counter, int64_t wanted, double deadline_s, const std::atomic<int64_t> *failed, int64_t *found) {
    auto reached = [&] { return (*found = counter->value.load(std::memory_order_acquire)) >= wanted; };
    if (reached()) return Wait::reached;
    const double until = now_s() + deadline_s;
    if (spin_until(reached)) return Wait::reached;
    // A sleep lasts at most 20 ms, because a sleeper must check again: nothing wakes it if the waking process died, or
    // if the watchdog reports a failure.
    constexpr double longest_sleep_s = 0.02;
    for (;;) {
        if (failed && failed->load(std::memory_order_acquire) != 0) return reached() ? Wait::reached : Wait::failed;
        const double left = until - now_s();
        if (left <= 0) return reached() ? Wait::reached : Wait::deadline;
        const long nanoseconds = long(1e9 * std::min(left, longest_sleep_s));
        const timespec sleep{0, nanoseconds};
        counter->sleepers.fetch_add(1, std::memory_order_seq_cst);
        const bool done = reached();
        if (!done) syscall(SYS_futex, low_half(counter), FUTEX_WAIT, uint32_t(*found), &sleep, nullptr, 0);
        counter->sleepers.fetch_sub(1, std::memory_order_seq_cst);
        if (done || reached()) return Wait::reached;
    }
}

}  // namespace weft

void register_signal(nb::module_ &m) {
    using namespace weft;
    m.attr("COUNTER_BYTES") = sizeof(Counter);
    m.def("signal_set", [](uintptr_t address, int64_t value) { signal_set(reinterpret_cast<Counter *>(address), value); },
          nb::arg("address"), nb::arg("value"), "Store `value` with release order and wake all waiters.");
    m.def("signal_add", [](uintptr_t address, int64_t amount) { signal_add(reinterpret_cast<Counter *>(address), amount); },
          nb::arg("address"), nb::arg("amount"), "Add with release order and wake all waiters.");
    m.def("signal_read", [](uintptr_t address) {
              return reinterpret_cast<Counter *>(address)->value.load(std::memory_order_acquire);
          }, nb::arg("address"), "Return the current value, with acquire order.");
    m.def("signal_wait", [](uintptr_t address, int64_t wanted, double deadline_s, uintptr_t failed_address) {
              int64_t found = 0;
              Wait how;
              {
                  nb::gil_scoped_release unlocked;
                  how = signal_wait(reinterpret_cast<Counter *>(address), wanted, deadline_s,
                                    reinterpret_cast<const std::atomic<int64_t> *>(failed_address), &found);
              }
              return std::make_tuple(int(how), found);
          }, nb::arg("address"), nb::arg("wanted"), nb::arg("deadline_s"), nb::arg("failed_address"),
          "Wait until the counter is at least `wanted`. Return (0 reached, 1 deadline passed or 2 the failed word was set; the "
          "last value read).");
}
