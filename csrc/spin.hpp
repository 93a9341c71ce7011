// A short busy wait, before a thread sleeps in the kernel.
//
// The thread does not yield its core. Linux 6.18 counts a yield as if the thread had used up its time slice. So on a
// loaded machine, a rank that yields in each wait gets less time than other processes. The busy wait is short, because the rank
// that it waits for may need this core.
#pragma once
#include <time.h>

namespace weft {

inline double now_s() {
    timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return double(t.tv_sec) + 1e-9 * double(t.tv_nsec);
}

// Tells the processor that this thread waits, so that it saves power and leaves a shared core to its other hardware thread.
inline void relax_core() {
#if defined(__x86_64__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    asm volatile("yield");
#endif
}

// Calls `reached` until it returns true, or for a few microseconds. Returns the last result.
template <class Reached> bool spin_until(const Reached &reached) {
    if (reached()) return true;
    constexpr double longest_s = 10e-6;
    const double until = now_s() + longest_s;
    do {
        relax_core();
        if (reached()) return true;
    } while (now_s() < until);
    return false;
}

}  // namespace weft
