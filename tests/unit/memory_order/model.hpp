// A model of a machine with weaker memory ordering than x86. csrc/ is compiled with this header in front (g++ -include), which
// replaces its atomics, fences, copies, sleeps and threads by those of the model.
//
// What is modelled:
//   - Vector clocks say which operation happens before which. A release is a store, or a fence and a later store. An acquire
//     that reads the stored value happens after everything that the releasing thread did before the release. A `read` of
//     bytes whose write does not happen before it is a race, on whatever machine the test runs.
//   - Cache-bypassing stores ("streamed") happen before an acquire only if an sfence precedes the release.
//   - Stores are late: they stay in their thread's buffer, and other threads see them at any later time. A sequentially
//     consistent fence or a read-modify-write empties the buffer.
//   - Threads take turns at each of these operations. `explore` runs a scene in every order with at most a given number of
//     preemptions. A preemption interrupts a thread that could continue.
//   - A futex sleeps until it is woken. Its time limit ends the sleep only if the scene says so.
#pragma once
#include <linux/futex.h>
#include <sys/syscall.h>
#include <time.h>
#include <ucontext.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <climits>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <thread>
#include <unordered_map>
#include <vector>

namespace model {

constexpr int most_threads = 6, stack_bytes = 64 << 10;
using Clock = std::array<int, most_threads>;

struct Late {  // a store that others do not see yet
    int64_t *at;
    int64_t value;
    Clock handed;  // the clock that an acquire of this value takes over
};
struct Thread {
    Clock clock{}, fenced{};    // fenced: the clock at the last release fence
    std::deque<Late> late;
    std::vector<uintptr_t> streamed;  // granules of 4 bytes streamed since the last sfence
    const uint32_t *asleep = nullptr;
    bool woken = false, ended = false;
    ucontext_t context{};
    std::unique_ptr<char[]> stack;
    std::function<void()> body;
};
struct Written {
    int thread, when;
    bool streamed;  // true until the next sfence
};

struct World {
    std::vector<std::unique_ptr<Thread>> threads;
    int now = 0;  // the thread whose turn it is
    std::map<const void *, Clock> released;  // {atomic: the clock that an acquire takes over}
    std::unordered_map<uintptr_t, Written> written;  // {granule of 4 bytes: its last write}
    long streams = 0;
    ucontext_t scheduler{};
    bool exploring = false;
    double time_s = 0;
    double look_s = 5e-7;  // the time that passes when a thread reads the clock, long if other threads get its core
    bool sleeps_end = false;  // a futex times out when nothing else can happen
    std::string wrong;
};
inline World world;

inline Thread &me() { return *world.threads[world.now]; }
inline void join_clock(Clock &into, const Clock &from) {
    for (int i = 0; i < most_threads; ++i) into[i] = std::max(into[i], from[i]);
}
inline void fault(const std::string &text) {
    if (world.wrong.empty()) world.wrong = text;
}

// Starts a world with one thread and without turns, for code that is tested in one order only.
inline void begin() {
    world = World{};
    world.threads.push_back(std::make_unique<Thread>());
    me().clock[0] = 1;
}

inline void turn() {
    if (world.exploring) swapcontext(&me().context, &world.scheduler);
}

// -- memory

inline void show(Thread &thread) {  // makes the oldest late store of `thread` visible
    const Late late = thread.late.front();
    thread.late.pop_front();
    std::memcpy(late.at, &late.value, sizeof late.value);
    world.released[late.at] = late.handed;
}
inline void show_all(Thread &thread) {
    while (!thread.late.empty()) show(thread);
}

inline void write(const void *to, int64_t bytes, bool streamed = false) {
    Thread &t = me();
    ++t.clock[world.now];
    world.streams += streamed;
    const auto begin = reinterpret_cast<uintptr_t>(to) / 4, end = (reinterpret_cast<uintptr_t>(to) + bytes + 3) / 4;
    for (auto granule = begin; granule < end; ++granule) {
        world.written[granule] = {world.now, t.clock[world.now], streamed};
        if (streamed) t.streamed.push_back(granule);
    }
}
inline void read(const void *from, int64_t bytes, const std::string &what) {
    const auto begin = reinterpret_cast<uintptr_t>(from) / 4, end = (reinterpret_cast<uintptr_t>(from) + bytes + 3) / 4;
    for (auto granule = begin; granule < end; ++granule) {
        const auto found = world.written.find(granule);
        if (found == world.written.end()) return fault(what + ": nobody has written it");
        if (found->second.streamed) return fault(what + ": it bypassed the caches, and no sfence came after");
        if (me().clock[found->second.thread] < found->second.when) return fault(what + ": nothing orders its writer before its reader");
    }
}

inline bool releases(std::memory_order o) {
    return o == std::memory_order_release || o == std::memory_order_acq_rel || o == std::memory_order_seq_cst;
}
inline bool acquires(std::memory_order o) {
    return o == std::memory_order_acquire || o == std::memory_order_acq_rel || o == std::memory_order_seq_cst;
}

inline void take_over(const void *at, std::memory_order order) {
    const auto found = world.released.find(at);
    if (acquires(order) && found != world.released.end()) join_clock(me().clock, found->second);
}
inline Clock hands_on(std::memory_order order) {
    ++me().clock[world.now];
    return releases(order) ? me().clock : me().fenced;
}
inline void store(int64_t *at, int64_t value, std::memory_order order) {
    turn();
    me().late.push_back({at, value, hands_on(order)});
    if (!world.exploring || order == std::memory_order_seq_cst) show_all(me());
}
inline int64_t load(const int64_t *at, std::memory_order order) {
    turn();
    for (auto late = me().late.rbegin(); late != me().late.rend(); ++late)
        if (late->at == at) return late->value;
    take_over(at, order);
    return *at;
}
inline int64_t fetch_add(int64_t *at, int64_t amount, std::memory_order order) {
    turn();
    show_all(me());
    const int64_t before = *at;
    take_over(at, order);
    Clock handed = hands_on(order);
    if (const auto found = world.released.find(at); found != world.released.end()) join_clock(handed, found->second);
    *at += amount;
    world.released[at] = handed;
    return before;
}
inline void fence(std::memory_order order) {
    turn();
    if (releases(order)) me().fenced = me().clock;
    if (order == std::memory_order_seq_cst) show_all(me());
}
inline void sfence() {  // counts the streamed bytes as written now, by ordinary stores
    ++me().clock[world.now];
    for (const uintptr_t granule : me().streamed) world.written[granule] = {world.now, me().clock[world.now], false};
    me().streamed.clear();
}
inline void *copy(void *to, const void *from, size_t bytes) {
    write(to, int64_t(bytes));
    return std::memcpy(to, from, bytes);
}

// -- time, sleep, threads

inline int clock_gettime(int, timespec *t) {
    world.time_s += world.look_s;
    *t = {time_t(world.time_s), long(1e9 * (world.time_s - double(time_t(world.time_s))))};
    return 0;
}
inline long futex(long, const uint32_t *word, int what, uint32_t value, const timespec *limit, const void *, int) {
    turn();
    if (what == FUTEX_WAKE) {
        int left = int(value);
        for (auto &thread : world.threads)
            if (thread->asleep == word && left-- > 0) thread->asleep = nullptr, thread->woken = true;
        return 0;
    }
    show_all(me());  // because a system call empties the buffer
    if (*word != value) return -1;
    me().asleep = word;
    turn();
    if (!me().woken) world.time_s += double(limit->tv_sec) + 1e-9 * double(limit->tv_nsec);
    me().asleep = nullptr;
    me().woken = false;
    return 0;
}

// Runs its function at once, in a new thread of the model. What the starter did happens before the function, and the function
// happens before the join.
struct jthread {
    template <class F, class... Args> explicit jthread(F &&f, Args &&...args) {
        const int starter = world.now;
        world.threads.push_back(std::make_unique<Thread>());
        number = int(world.threads.size()) - 1;
        if (number >= most_threads) std::abort();
        world.threads[number]->clock = world.threads[starter]->clock;
        world.now = number;
        ++me().clock[number];
        f(args...);
        world.now = starter;
    }
    jthread(jthread &&other) : number(other.number) { other.number = -1; }
    ~jthread() {
        if (number >= 0) join_clock(me().clock, world.threads[number]->clock);
    }
    int number;
};

// -- orders

struct Scene {
    std::vector<std::function<void()>> threads;
    std::function<void()> at_the_end = [] {};
    bool sleeps_end = false;
};

inline void start(unsigned thread) {
    world.threads[thread]->body();
    world.threads[thread]->ended = true;
    swapcontext(&world.threads[thread]->context, &world.scheduler);
}

// Runs the scene that `scene` makes in every order with at most `preemptions`. Returns the number of orders. It stops at the
// first order in which something is wrong; `world.wrong` then says what.
inline long explore(const std::function<Scene()> &scene, int preemptions) {
    std::vector<std::pair<int, int>> choices;  // (the choice taken, the number of choices)
    long orders = 0;
    for (;;) {
        world = World{};
        const Scene now = scene();
        world.sleeps_end = now.sleeps_end;
        for (const auto &body : now.threads) {
            auto thread = std::make_unique<Thread>();
            thread->body = body;
            thread->stack.reset(new char[stack_bytes]);
            thread->clock[world.threads.size()] = 1;
            getcontext(&thread->context);
            thread->context.uc_stack.ss_sp = thread->stack.get();
            thread->context.uc_stack.ss_size = stack_bytes;
            makecontext(&thread->context, reinterpret_cast<void (*)()>(start), 1, unsigned(world.threads.size()));
            world.threads.push_back(std::move(thread));
        }
        world.exploring = true;
        world.now = 0;
        int left = preemptions;
        size_t step = 0;
        const int count = int(world.threads.size());
        for (;;) {
            // What may come next: this thread, another thread, or a late store that becomes visible (count + its thread).
            std::vector<int> may;
            const auto runs = [](const Thread &t) { return !t.ended && !t.asleep; };
            const bool goes_on = runs(me());
            if (goes_on) may.push_back(world.now);
            for (int i = 0; i < count; ++i)
                if (i != world.now && runs(*world.threads[i]) && (!goes_on || left > 0)) may.push_back(i);
            for (int i = 0; i < count; ++i)
                if (!world.threads[i]->late.empty() && (may.empty() || left > 0)) may.push_back(count + i);
            if (may.empty()) {
                int sleeper = -1;
                for (int i = 0; i < count; ++i) sleeper = world.threads[i]->asleep ? i : sleeper;
                if (sleeper < 0) break;
                if (!world.sleeps_end) {
                    fault("a thread sleeps, and nobody will wake it");
                    break;
                }
                may.push_back(sleeper);
            }
            if (step == choices.size()) choices.emplace_back(0, int(may.size()));
            const int next = may[choices[step++].first];
            if (next >= count) {
                left -= goes_on;
                show(*world.threads[next - count]);
                continue;
            }
            left -= goes_on && next != world.now;
            world.now = next;
            swapcontext(&world.scheduler, &me().context);
        }
        ++orders;
        world.exploring = false;
        if (world.wrong.empty()) now.at_the_end();
        if (!world.wrong.empty()) return orders;
        choices.resize(step);
        while (!choices.empty() && choices.back().first + 1 == choices.back().second) choices.pop_back();
        if (choices.empty()) return orders;
        ++choices.back().first;
    }
}

}  // namespace model

namespace std {
template <class T> struct model_atomic {
    static_assert(sizeof(T) == 8);
    static constexpr bool is_always_lock_free = true;
    model_atomic(T value = 0) : value_(value) {}
    void store(T value, memory_order order = memory_order_seq_cst) { model::store(&value_, value, order); }
    T load(memory_order order = memory_order_seq_cst) const { return model::load(&value_, order); }
    T fetch_add(T amount, memory_order order = memory_order_seq_cst) { return model::fetch_add(&value_, amount, order); }
    T fetch_sub(T amount, memory_order order = memory_order_seq_cst) { return model::fetch_add(&value_, -amount, order); }
    T value_;
};
inline void model_fence(memory_order order) { model::fence(order); }
inline void *model_memcpy(void *to, const void *from, size_t bytes) { return model::copy(to, from, bytes); }
using model_jthread = model::jthread;
}  // namespace std

#define atomic model_atomic
#define atomic_thread_fence model_fence
#define memcpy model_memcpy
#define jthread model_jthread
#define syscall model::futex
#define clock_gettime model::clock_gettime
#define __builtin_ia32_sfence model::sfence
