// Max-min fair shares. The limits of resources are adjusted to each other until none changes (weft/sim/max_min.py).
// Sums are computed in the order of the given steps, so results are reproducible.
#include "max_min.hpp"

#include <algorithm>
#include <cmath>
#include <functional>
#include <limits>
#include <unordered_map>

namespace weft {

namespace {

constexpr int most_rounds = 200, undamped_rounds = 40;
constexpr double nothing = 1e-12;

// Concurrent steps: the load of each kind of step, and the number of steps of each kind.
struct Running {
    std::vector<std::vector<Use>> uses;
    const std::vector<int> &counts;
};

// A step's use of one resource. A resource that represents several may occur several times in a step's load. `most` is
// the largest of the amounts at full speed, and `times` is their sum divided by `most`. For a transfer with split routes,
// `most` is the amount of the whole transfer, so it gets the same rate as transfers on one route.
struct Part {
    int place;  // the step, or the resource
    double most, times;
};

// Returns the limit of a resource: the largest amount of `room` that each step may take, if no step takes more than its cap.
// The limit is infinite if `room` is enough for all caps. caps: (cap, number of steps with this cap).
double limit_of(std::vector<std::pair<double, double>> &caps, double room) {
    std::sort(caps.begin(), caps.end());
    double waiting = 0.0;
    for (const auto &[cap, times] : caps) waiting += times;
    for (const auto &[cap, times] : caps) {
        if (cap * waiting > room) return std::max(0.0, room / waiting);
        room -= cap * times;
        waiting -= times;
    }
    return std::numeric_limits<double>::infinity();
}

// The limits of all resources. They are adjusted one by one, each to the others, until none changes. For flows over
// links this takes as many rounds as there are different limits (Charny, Clark and Jain, "Congestion control with
// explicit rate indication", 1995). For steps that use resources in different proportions, the limits may oscillate;
// then changes are damped.
class Limits {
  public:
    Limits(const Running &steps, const std::vector<double> &room)
        : room_(room), uses_(steps.uses.size()), users_(room.size()), limits_(room.size(), std::numeric_limits<double>::infinity()),
          slowest_(steps.uses.size()) {
        for (size_t i = 0; i < uses_.size(); ++i) {
            for (const Use &use : steps.uses[i]) {
                auto part = std::find_if(uses_[i].begin(), uses_[i].end(), [&](const Part &p) { return p.place == use.resource; });
                if (part == uses_[i].end()) part = uses_[i].insert(part, {use.resource, 0.0, 0.0});
                part->most = std::max({part->most, use.amount, use.whole});
                part->times += use.amount;
            }
            for (Part &part : uses_[i]) {
                part.times *= steps.counts[i] / part.most;
                users_[part.place].push_back({int(i), part.most, part.times});
            }
        }
    }

    // Adjusts the limits. Returns true if they have converged.
    bool settle() {
        for (int round = 0; round < most_rounds; ++round)
            if (!adapt(round < undamped_rounds)) return true;
        return false;
    }

    std::vector<double> speeds() const {
        std::vector<double> result;
        for (const Slowest &one : slowest_) result.push_back(one.speed);
        return result;
    }

  private:
    struct Slowest {  // a step's speed, the resource that determines it, and the speed without this resource
        double speed = 1.0, otherwise = 1.0;
        int resource = -1;
    };

    bool adapt(bool fully) {
        bool changed = false;
        for (size_t r = 0; r < room_.size(); ++r) {
            caps_.clear();
            double most = 0.0;
            for (const Part &user : users_[r]) {
                const Slowest &step = slowest_[user.place];
                caps_.emplace_back(user.most * (step.resource == int(r) ? step.otherwise : step.speed), user.times);
                most = std::max(most, user.most);
            }
            double limit = limit_of(caps_, room_[r]);
            if (!fully) limit = std::sqrt(std::min(limit, most) * std::min(limits_[r], most));
            if (limit == limits_[r] || std::abs(limit - limits_[r]) <= 1e-13 * std::min(limit, limits_[r])) continue;
            changed = true;
            limits_[r] = limit;
            for (const Part &user : users_[r]) see(user.place);
        }
        return changed;
    }

    void see(int i) {
        Slowest found;
        for (const Part &use : uses_[i]) {
            const double speed = limits_[use.place] / use.most;
            if (speed < found.speed) {
                found.otherwise = found.speed;
                found.speed = speed;
                found.resource = use.place;
            } else {
                found.otherwise = std::min(found.otherwise, speed);
            }
        }
        slowest_[i] = found;
    }

    const std::vector<double> &room_;
    std::vector<std::vector<Part>> uses_, users_;  // by step, the resources that it uses; by resource, its users
    std::vector<double> limits_;
    std::vector<Slowest> slowest_;
    std::vector<std::pair<double, double>> caps_;
};

// Corrects speeds that have nearly converged. Afterwards no resource is oversubscribed, and every step below full speed
// uses a resource that is fully used.
void fit(const Running &steps, const std::vector<double> &room, std::vector<double> &speeds) {
    const auto used = [&](const std::vector<double> &of_steps) {
        std::vector<double> total(room.size(), 0.0);
        for (size_t i = 0; i < of_steps.size(); ++i)
            for (const Use &use : steps.uses[i]) total[use.resource] += steps.counts[i] * use.amount * of_steps[i];
        return total;
    };
    std::vector<double> total = used(speeds);
    std::vector<double> grown = speeds;
    for (size_t i = 0; i < speeds.size(); ++i)
        for (const Use &use : steps.uses[i])
            grown[i] = std::min(grown[i], speeds[i] * std::min(1.0, room[use.resource] / total[use.resource]));
    speeds = grown;
    std::vector<bool> ended(speeds.size(), false);
    // In each round all free steps speed up by the same factor, until the first resource is used up.
    for (size_t round = 0; round < speeds.size(); ++round) {
        total = used(speeds);
        for (size_t i = 0; i < speeds.size(); ++i) grown[i] = ended[i] ? 0.0 : speeds[i];
        const std::vector<double> slopes = used(grown);
        double factor = std::numeric_limits<double>::infinity();
        for (size_t i = 0; i < speeds.size(); ++i)
            if (!ended[i]) factor = std::min(factor, 1.0 / speeds[i] - 1.0);
        for (size_t r = 0; r < room.size(); ++r)
            if (slopes[r] > nothing) factor = std::min(factor, std::max(0.0, room[r] - total[r]) / slopes[r]);
        if (std::isinf(factor)) return;
        for (size_t i = 0; i < speeds.size(); ++i) {
            if (ended[i]) continue;
            speeds[i] *= 1.0 + factor;
            ended[i] = speeds[i] >= 1.0 - 1e-12;
            for (const Use &use : steps.uses[i]) {
                const int r = use.resource;
                ended[i] = ended[i] || total[r] + factor * slopes[r] >= room[r] * (1.0 - 1e-12);
            }
        }
    }
}

std::vector<double> max_min(Running steps, const std::vector<double> &capacity) {
    const size_t n = steps.uses.size();
    std::vector<double> wanted(capacity.size(), 0.0);
    for (size_t i = 0; i < n; ++i)
        for (const Use &use : steps.uses[i]) wanted[use.resource] += use.amount * steps.counts[i];

    // Only an oversubscribed resource can limit a step, so give these resources new, consecutive numbers.
    std::vector<int> number(capacity.size(), -1);
    std::vector<double> room;
    for (size_t r = 0; r < capacity.size(); ++r) {
        if (wanted[r] > capacity[r]) {
            number[r] = int(room.size());
            room.push_back(capacity[r]);
        }
    }
    if (room.empty()) return std::vector<double>(n, 1.0);
    for (size_t i = 0; i < n; ++i) {
        std::erase_if(steps.uses[i], [&](const Use &use) { return number[use.resource] < 0; });
        for (Use &use : steps.uses[i]) use.resource = number[use.resource];
    }
    Limits limits(steps, room);
    const bool settled = limits.settle();
    std::vector<double> speeds = limits.speeds();
    if (!settled) fit(steps, room, speeds);
    return speeds;
}

// Slows down the steps that share a disturbed resource until their uses fit.
void disturb(const std::vector<const Uses *> &loads, const std::vector<int> &counts, const std::vector<double> &capacity,
             std::vector<double> &speeds) {
    struct Disturbed {
        int resource;
        double lost;
        std::vector<std::pair<size_t, double>> sharers;  // (step, amount that it uses)
    };
    std::vector<Disturbed> disturbed;  // in the order of the disturbing steps
    std::vector<int> number(capacity.size(), -1);
    for (size_t i = 0; i < loads.size(); ++i) {
        for (const Use &use : loads[i]->disturb) {
            if (number[use.resource] < 0) {
                number[use.resource] = int(disturbed.size());
                disturbed.push_back({use.resource, 0.0, {}});
            }
            disturbed[number[use.resource]].lost += counts[i] * use.amount * speeds[i];
        }
    }
    if (disturbed.empty()) return;
    for (size_t i = 0; i < loads.size(); ++i) {
        for (const Use &use : loads[i]->share) {
            if (number[use.resource] < 0) continue;
            auto &sharers = disturbed[number[use.resource]].sharers;
            if (sharers.empty() || sharers.back().first != i) sharers.emplace_back(i, 0.0);
            sharers.back().second += use.amount;
        }
    }
    for (const auto &[resource, lost, sharers] : disturbed) {
        double used = 0.0;
        for (const auto &[i, amount] : sharers) used += counts[i] * amount * speeds[i];
        const double left = std::max(max_min_least, capacity[resource] - lost);
        if (used > left)
            for (const auto &[i, amount] : sharers) speeds[i] *= left / used;
    }
}

}  // namespace

MaxMinShares::MaxMinShares(const std::vector<Load> &loads) {
    std::unordered_map<int64_t, int> numbers;
    const auto numbered = [&](const Amounts &amounts) {
        std::vector<Use> uses;
        for (const auto &[resource, amount] : amounts)
            uses.push_back({numbers.try_emplace(resource, int(numbers.size())).first->second, amount});
        return uses;
    };
    for (const auto &[share, hold, disturb, whole] : loads) {
        loads_.push_back({numbered(share), numbered(hold), numbered(disturb)});
        for (const auto &[resource, amount] : whole)
            for (Use &use : loads_.back().share)
                if (use.resource == numbers.at(resource)) use.whole = amount;
    }
    resources_ = int(numbers.size());
}

std::vector<double> MaxMinShares::speeds(const std::vector<int> &keys, const std::vector<int> &counts) const {
    std::vector<const Uses *> loads;
    for (int key : keys) loads.push_back(&loads_.at(key));
    std::vector<double> held(resources_, 0.0);
    for (size_t i = 0; i < loads.size(); ++i)
        for (const Use &use : loads[i]->hold) held[use.resource] += counts[i] * use.amount;

    // Entry r is the capacity of resource r. Entry resources_ + r is the capacity of its held units.
    std::vector<double> capacity(2 * resources_, 1.0);
    for (int r = 0; r < resources_; ++r)
        if (held[r] > 0) capacity[r] = std::max(max_min_least, 1.0 - held[r]);
    Running steps{std::vector<std::vector<Use>>(loads.size()), counts};
    for (size_t i = 0; i < loads.size(); ++i) {
        for (const Use &use : loads[i]->share)
            if (use.amount > nothing) steps.uses[i].push_back(use);
        for (const Use &use : loads[i]->hold)
            if (held[use.resource] > 1 && use.amount > nothing) steps.uses[i].push_back({resources_ + use.resource, use.amount});
    }
    std::vector<double> result = max_min(std::move(steps), capacity);
    disturb(loads, counts, capacity, result);
    return result;
}

SharesInFlow::SharesInFlow(const MaxMinShares &shares)
    : shares_(shares), users_(2 * shares.resources()), limits_(users_.size(), std::numeric_limits<double>::infinity()),
      held_(shares.resources()), is_touched_(users_.size(), false) {}

int SharesInFlow::add(int key) {
    int number = int(steps_.size());
    if (free_.empty()) {
        steps_.emplace_back();
    } else {
        number = free_.back();
        free_.pop_back();
    }
    Step &step = steps_[number];
    step = {};
    step.key = key;
    const Uses &uses = shares_.uses(key);
    for (const Use &one : uses.share) use(number, one);
    for (const Use &one : uses.hold) {
        // The holders share the units only if together they hold more units than exist.
        use(number, {shares_.resources() + one.resource, one.amount});
        held_[one.resource].emplace_back(number, one.amount);
        touch(one.resource);
    }
    disturbing_ += !uses.disturb.empty();
    for (Part &part : step.uses) {
        part.times /= part.most;
        users_[part.place].push_back({number, part.most, part.times});
        touch(part.place);
    }
    see(number, -1);
    return number;
}

void SharesInFlow::use(int number, Use use) {
    if (use.amount <= nothing) return;
    std::vector<Part> &uses = steps_[number].uses;
    auto part = std::find_if(uses.begin(), uses.end(), [&](const Part &p) { return p.place == use.resource; });
    if (part == uses.end()) part = uses.insert(part, {use.resource, 0.0, 0.0});
    part->most = std::max({part->most, use.amount, use.whole});
    part->times += use.amount;
}

void SharesInFlow::remove(int number) {
    const Uses &uses = shares_.uses(steps_[number].key);
    for (const Part &part : steps_[number].uses) {
        std::erase_if(users_[part.place], [&](const Part &user) { return user.place == number; });
        touch(part.place);
    }
    for (const Use &one : uses.hold) {
        std::erase_if(held_[one.resource], [&](const auto &holder) { return holder.first == number; });
        touch(one.resource);
    }
    disturbing_ -= !uses.disturb.empty();
    free_.push_back(number);
}

double SharesInFlow::room(int resource) const {
    if (resource >= shares_.resources() || held_[resource].empty()) return 1.0;
    double held = 0.0;
    for (const auto &[step, units] : held_[resource]) held += units;
    return std::max(max_min_least, 1.0 - held);
}

std::vector<double> SharesInFlow::speeds(const std::vector<int> &steps) const {
    std::vector<double> found;
    for (int step : steps) found.push_back(steps_[step].speed);
    if (!disturbing_) return found;
    std::vector<const Uses *> loads;
    for (int step : steps) loads.push_back(&shares_.uses(steps_[step].key));
    std::vector<double> capacity(shares_.resources());
    for (int r = 0; r < shares_.resources(); ++r) capacity[r] = room(r);
    disturb(loads, std::vector<int>(steps.size(), 1), capacity, found);
    return found;
}

// The limits are adjusted in sweeps, from the lowest to the highest: the limit of a link depends on lower limits only, if steps
// use all their resources in the same proportion, as flows do. Then one or two sweeps suffice.
bool SharesInFlow::settle() {
    size_t left = size_t(most_rounds) * users_.size();
    std::vector<int> sweep;
    while (!touched_.empty() && left) {
        sweep.swap(touched_);
        for (int resource : sweep) push(resource, limits_[resource]);
        sweep.clear();
        for (; left && !queue_.empty(); --left) {
            const auto [expected, resource] = queue_.front();
            std::pop_heap(queue_.begin(), queue_.end(), std::greater<>());
            queue_.pop_back();
            const double limit = limit_of(resource), before = limits_[resource];
            if (limit > expected && !queue_.empty() && limit > queue_.front().first) {
                push(resource, limit);
                continue;
            }
            is_touched_[resource] = false;
            if (limit == before || std::abs(limit - before) <= 1e-13 * std::min(limit, before)) continue;
            limits_[resource] = limit;
            const size_t known = touched_.size();
            for (const Part &user : users_[resource]) see(user.place, resource);
            const auto higher = std::partition(touched_.begin() + known, touched_.end(), [&](int r) { return limits_[r] < limit; });
            for (auto other = higher; other != touched_.end(); ++other) push(*other, limits_[*other]);
            touched_.erase(higher, touched_.end());
        }
    }
    const bool settled = touched_.empty() && queue_.empty();
    for (const auto &[limit, resource] : queue_) touched_.push_back(resource);
    queue_.clear();
    for (int resource : touched_) is_touched_[resource] = false;
    touched_.clear();
    return settled;
}

void SharesInFlow::push(int resource, double limit) {
    queue_.emplace_back(limit, resource);
    std::push_heap(queue_.begin(), queue_.end(), std::greater<>());
}

void SharesInFlow::touch(int resource) {
    if (!is_touched_[resource]) touched_.push_back(resource);
    is_touched_[resource] = true;
}

// Updates the speed of a step after one limit has changed. Marks the resources at which the step's cap changes.
void SharesInFlow::see(int number, int because) {
    Step &step = steps_[number];
    const double speed = step.speed, otherwise = step.otherwise;
    const int resource = step.resource;
    step.speed = step.otherwise = 1.0;
    step.resource = -1;
    for (const Part &use : step.uses) {
        const double here = limits_[use.place] / use.most;
        if (here < step.speed) {
            step.otherwise = step.speed;
            step.speed = here;
            step.resource = use.place;
        } else {
            step.otherwise = std::min(step.otherwise, here);
        }
    }
    for (const Part &use : step.uses) {
        const double before = resource == use.place ? otherwise : speed;
        const double now = step.resource == use.place ? step.otherwise : step.speed;
        if (use.place != because && before != now) touch(use.place);
    }
}

// Like the function `limit_of`, but uses Newton's method from the previous limit, without sorting. Steps whose caps are
// lower take their caps, and the limit divides the rest among the other steps. After the first iteration the limit only
// rises.
double SharesInFlow::limit_of(int resource) {
    const double room = this->room(resource);
    double wanted = 0.0, times = 0.0;
    caps_.clear();
    for (const Part &user : users_[resource]) {
        const Step &step = steps_[user.place];
        caps_.emplace_back(user.most * (step.resource == resource ? step.otherwise : step.speed), user.times);
        wanted += caps_.back().first * user.times;
        times += user.times;
    }
    if (wanted <= room) return std::numeric_limits<double>::infinity();
    const double lowest = room / times;
    double limit = std::isinf(limits_[resource]) ? lowest : std::max(lowest, limits_[resource]);
    for (bool first = true;; first = false) {
        double left = room, waiting = 0.0;
        for (const auto &[cap, of_user] : caps_) {
            left -= cap <= limit ? cap * of_user : 0.0;
            waiting += cap <= limit ? 0.0 : of_user;
        }
        const double next = waiting > 0.0 ? std::max(lowest, left / waiting) : first ? lowest : 0.0;
        if (next == limit || (next < limit && !first)) return limit;
        limit = next;
    }
}

}  // namespace weft
