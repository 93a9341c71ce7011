// Loops on several threads that live for one call.
#pragma once
#include <algorithm>
#include <atomic>
#include <cstdint>
#include <exception>
#include <system_error>
#include <thread>
#include <vector>

namespace weft {

// Runs work(unit) for all units on `threads` threads. The calling thread is one of them. Rethrows the first error.
template <class Work> void on_threads(int threads, int64_t units, Work work) {
    std::atomic<int64_t> next{0};
    std::exception_ptr failed;
    std::atomic<bool> has_failed{false};
    auto run = [&] {
        try {
            for (int64_t unit; !has_failed && (unit = next.fetch_add(1, std::memory_order_relaxed)) < units;) work(unit);
        } catch (...) {
            if (!has_failed.exchange(true)) failed = std::current_exception();
        }
    };
    std::vector<std::thread> others;
    for (int64_t i = 1; i < std::min<int64_t>(threads, units); ++i) {
        try {
            others.emplace_back(run);
        } catch (const std::system_error &) {  // no more threads can be started: the others do the work
            break;
        }
    }
    run();
    for (std::thread &other : others) other.join();
    if (failed) std::rethrow_exception(failed);
}

}  // namespace weft
