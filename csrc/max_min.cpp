// Max-min fair shares by progressive filling. Sums go over steps in the order in which they are given.
#include "max_min.hpp"

#include <algorithm>
#include <limits>
#include <numeric>
#include <unordered_map>

namespace weft {

namespace {

constexpr int most_rounds = 8;
constexpr double nothing = 1e-12;

using Takers = std::vector<std::pair<double, int>>;  // (amount, number of steps with this amount)

// The amount that each step gets of `left`, or less if it asks for less, if no other resource stops it. Steps ask for
// more than there is.
double level_of(Takers &takers, double left) {
    int waiting = 0;
    for (const auto &[amount, n] : takers) waiting += n;
    std::sort(takers.begin(), takers.end());
    for (const auto &[amount, n] : takers) {
        if (amount * waiting > left || n == waiting) break;
        left -= amount * n;
        waiting -= n;
    }
    return left / waiting;
}

// Steps that run at once: what each takes, and how many are alike.
struct Running {
    std::vector<std::vector<Use>> uses;
    const std::vector<int> &counts;
};

// Speeds, and for steps that a resource stopped, what they take of it; 0 for other steps.
struct Filled {
    std::vector<double> speeds, stopped;
};

// Assumes that steps grow in inverse proportion to their weights.
Filled fill(const Running &steps, const std::vector<double> &room, const std::vector<double> &weights) {
    const size_t n = weights.size();
    Filled filled{std::vector<double>(n, 0.0), std::vector<double>(n, 0.0)};
    std::vector<double> left = room;
    std::vector<size_t> growing(n), ended, still;
    std::iota(growing.begin(), growing.end(), 0);
    while (!growing.empty()) {
        double level = std::numeric_limits<double>::infinity();  // at which the next step reaches full speed
        for (size_t i : growing) level = std::min(level, weights[i]);
        std::vector<double> slopes(room.size(), 0.0), full_at(room.size(), std::numeric_limits<double>::infinity());
        for (size_t i : growing)
            for (const Use &use : steps.uses[i]) slopes[use.resource] += steps.counts[i] * use.amount / weights[i];
        for (size_t r = 0; r < room.size(); ++r)
            if (slopes[r] > 0) full_at[r] = left[r] / slopes[r];
        const double first = *std::min_element(full_at.begin(), full_at.end());
        const bool full = first < level;
        level = std::min(level, first);
        const double up_to = level * (1 + 1e-9);
        ended.clear();
        still.clear();
        for (size_t i : growing) {
            if (full) {
                double most = 0.0;
                for (const Use &use : steps.uses[i]) {
                    if (full_at[use.resource] > up_to || most == weights[i]) continue;
                    most = use.amount == weights[i] ? use.amount : std::max(most, use.amount);
                }
                filled.stopped[i] = most;
            }
            const bool ends = full ? filled.stopped[i] > 0 : weights[i] <= level;
            (ends ? ended : still).push_back(i);
        }
        growing.swap(still);
        for (size_t i : ended) {
            const double speed = filled.speeds[i] = std::min(1.0, level / weights[i]);
            for (const Use &use : steps.uses[i])
                left[use.resource] = std::max(0.0, left[use.resource] - steps.counts[i] * use.amount * speed);
        }
    }
    return filled;
}

std::vector<double> max_min(Running steps, const std::vector<double> &capacity) {
    const size_t n = steps.uses.size();
    std::vector<double> wanted(capacity.size(), 0.0);
    for (size_t i = 0; i < n; ++i)
        for (const Use &use : steps.uses[i]) wanted[use.resource] += use.amount * steps.counts[i];

    // Only an oversubscribed resource can stop a step; these resources are renumbered.
    std::vector<int> number(capacity.size(), -1);
    std::vector<double> room;
    for (size_t r = 0; r < capacity.size(); ++r) {
        if (wanted[r] > capacity[r]) {
            number[r] = int(room.size());
            room.push_back(capacity[r]);
        }
    }
    if (room.empty()) return std::vector<double>(n, 1.0);
    std::vector<Takers> takers(room.size());
    for (size_t i = 0; i < n; ++i) {
        std::erase_if(steps.uses[i], [&](const Use &use) { return number[use.resource] < 0; });
        for (Use &use : steps.uses[i]) {
            use.resource = number[use.resource];
            takers[use.resource].emplace_back(use.amount, steps.counts[i]);
        }
    }
    std::vector<double> level(room.size());
    for (size_t r = 0; r < room.size(); ++r) level[r] = level_of(takers[r], room[r]);

    std::vector<double> weights(n, 1.0);  // of a step: what it takes of the resource that is expected to stop it
    for (size_t i = 0; i < n; ++i) {
        std::pair<double, double> first{std::numeric_limits<double>::infinity(), 1.0};
        for (const Use &use : steps.uses[i]) first = std::min(first, {level[use.resource] / use.amount, use.amount});
        weights[i] = first.second;
    }
    Filled filled;
    for (int round = 0; round < most_rounds; ++round) {
        filled = fill(steps, room, weights);
        bool expected = true;
        for (size_t i = 0; i < n; ++i) {
            if (filled.stopped[i] > 0 && filled.stopped[i] != weights[i]) {
                expected = false;
                weights[i] = filled.stopped[i];
            }
        }
        if (expected) break;
    }
    return filled.speeds;
}

// Slow down the sharers of a disturbed resource until it suffices for them.
void disturb(const std::vector<const Uses *> &loads, const std::vector<int> &counts, const std::vector<double> &capacity,
             std::vector<double> &speeds) {
    struct Disturbed {
        int resource;
        double lost;
        std::vector<std::pair<size_t, double>> sharers;  // (step, what it takes)
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
    for (const auto &[share, hold, disturb] : loads) loads_.push_back({numbered(share), numbered(hold), numbered(disturb)});
    resources_ = int(numbers.size());
}

std::vector<double> MaxMinShares::speeds(const std::vector<int> &keys, const std::vector<int> &counts) const {
    std::vector<const Uses *> loads;
    for (int key : keys) loads.push_back(&loads_.at(key));
    std::vector<double> held(resources_, 0.0);
    for (size_t i = 0; i < loads.size(); ++i)
        for (const Use &use : loads[i]->hold) held[use.resource] += counts[i] * use.amount;

    // Of each resource r at r, and of the units of r that are held at resources_ + r.
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

}  // namespace weft
