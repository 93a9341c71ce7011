// Signals: 64-bit counters in memory that several processes map. They only grow.
//
// Order: `set` and `add` release, `wait` acquires. Writes of a process before it raises a signal are visible to a
// process that has waited for the raised value. A waiter spins for a moment (spin.hpp), then sleeps in the kernel on the low half
// of the counter (a futex), so that a waiting rank leaves its core to a working rank.
#pragma once
#include <atomic>
#include <cstdint>

namespace weft {

// The outcome of a wait.
enum class Wait : int { reached = 0, deadline = 1, failed = 2 };

// One counter and the number of waiters that sleep on it. The struct has 16 bytes, so no two counters share a word.
struct alignas(16) Counter {
    std::atomic<int64_t> value;
    std::atomic<int64_t> sleepers;
};
static_assert(sizeof(Counter) == 16 && std::atomic<int64_t>::is_always_lock_free);

void signal_set(Counter *counter, int64_t value);
void signal_add(Counter *counter, int64_t amount);

// Waits until `counter >= wanted`, the deadline passes, or `*failed` becomes non-zero. failed: a word that only this
// process sees and its watchdog writes; may be null. found: the last value read.
Wait signal_wait(Counter *counter, int64_t wanted, double deadline_s, const std::atomic<int64_t> *failed, int64_t *found);

}  // namespace weft
