// Tests csrc/signal.cpp in every order of its operations. A waiting thread must be woken, it must see what was written before
// the signal, and its wait must return how it ended.
#include "../../../csrc/signal.cpp"

using namespace weft;
using model::Scene;
using model::world;

namespace {

struct Shared {
    Counter counter{};
    std::atomic<int64_t> failed{0};
    int data = 0;
    std::vector<Wait> ends;
};

// Made again for each order.
std::unique_ptr<Shared> shared;

std::function<void()> waiter(int64_t wanted, double deadline_s = 1e6) {
    return [=] {
        int64_t found = 0;
        const Wait end = signal_wait(&shared->counter, wanted, deadline_s, &shared->failed, &found);
        shared->ends.push_back(end);
        if (end != Wait::reached) return;
        if (found < wanted) model::fault("the wait has ended, and the counter is too low");
        model::read(&shared->data, sizeof shared->data, "what was written before the signal");
    };
}
std::function<void()> setter(const std::function<void()> &raise) {
    return [=] {
        model::write(&shared->data, sizeof shared->data);
        raise();
    };
}
const auto set_one = [] { signal_set(&shared->counter, 1); };
const auto add_one = [] { signal_add(&shared->counter, 1); };

std::function<void()> all(Wait wanted) {
    return [=] {
        for (const Wait end : shared->ends)
            if (end != wanted) model::fault("a wait ends as " + std::to_string(int(end)) + ", not as " + std::to_string(int(wanted)));
    };
}

struct Case {
    const char *name;
    std::function<Scene()> scene;
    int preemptions;
};

const std::vector<Case> cases = {
    {"one waits for one who sets", [] { return Scene{{waiter(1), setter(set_one)}, all(Wait::reached)}; }, 3},
    {"one waits for one who adds", [] { return Scene{{waiter(1), setter(add_one)}, all(Wait::reached)}; }, 3},
    {"two wait for one who sets", [] { return Scene{{waiter(1), waiter(1), setter(set_one)}, all(Wait::reached)}; }, 1},
    {"one waits for two who add", [] { return Scene{{waiter(2), setter(add_one), setter(add_one)}, all(Wait::reached)}; }, 2},
    {"the counter is reached, then the group fails", [] {
         return Scene{{waiter(1), setter([] { set_one(); shared->failed.store(1); })}, all(Wait::reached)};
     }, 3},
    {"the counter is reached, then the deadline passes", [] {
         return Scene{{waiter(1, 10), setter([] { set_one(); world.time_s += 100; })}, all(Wait::reached)};
     }, 3},
    {"the group fails, and nobody sets", [] {
         return Scene{{waiter(1), [] { shared->failed.store(1); }}, [] {
             all(Wait::failed)();
             if (world.time_s > 0.1) model::fault("the failure is noticed after " + std::to_string(world.time_s) + " s");
         }, true};
     }, 2},
    {"nobody sets", [] {
         return Scene{{waiter(1, 0.05)}, [] {
             all(Wait::deadline)();
             if (world.time_s < 0.05 || world.time_s > 0.0701) model::fault("a deadline of 0.05 s ends after " + std::to_string(world.time_s));
         }, true};
     }, 0},
    {"nobody sets, and others want the core", [] {
         return Scene{{[] { world.look_s = 0.01; waiter(1, 0.05)(); }}, [] {
             all(Wait::deadline)();
             if (world.time_s > 0.1) model::fault("a deadline of 0.05 s ends after " + std::to_string(world.time_s));
         }, true};
     }, 0},
};

}  // namespace

int main() {
    for (const Case &c : cases) {
        const auto fresh = [&] {
            shared = std::make_unique<Shared>();
            return c.scene();
        };
        const long orders = model::explore(fresh, c.preemptions);
        std::printf("%s: %ld orders%s%s\n", c.name, orders, world.wrong.empty() ? "" : ": ", world.wrong.c_str());
        if (!world.wrong.empty()) return 1;
    }
}
