// How fast steps go that run at once. weft/sim/max_min.py says by which method, and where it is from.
#pragma once
#include <cstdint>
#include <tuple>
#include <utility>
#include <vector>

namespace weft {

// Of a resource whose units are all held: kernels that came first keep running on some.
constexpr double max_min_least = 1e-3;

// What a step takes at full speed, of which resources, in each of the ways of `Load` in weft/sim/max_min.py: share, hold, disturb.
using Amounts = std::vector<std::pair<int64_t, double>>;
using Load = std::tuple<Amounts, Amounts, Amounts>;

struct Use {
    int resource;
    double amount;
};

struct Uses {
    std::vector<Use> share, hold, disturb;
};

class MaxMinShares {
  public:
    explicit MaxMinShares(const std::vector<Load> &loads);

    const Uses &uses(int key) const { return loads_.at(key); }
    int resources() const { return resources_; }

    // The speed, from 0 to 1, of each of counts[i] steps with the load number keys[i]; of keys that differ.
    std::vector<double> speeds(const std::vector<int> &keys, const std::vector<int> &counts) const;

  private:
    int resources_ = 0;
    std::vector<Uses> loads_;
};

// The speeds of many steps, kept while steps begin and end: a change visits only what it concerns. Limits adapt from their last
// values, and settle at the same shares as from the start.
class SharesInFlow {
  public:
    explicit SharesInFlow(const MaxMinShares &shares);

    // Add a step with this load; return its number, which may have been that of a removed step.
    int add(int key);
    void remove(int step);
    // Adapt the limits; false if they do not settle.
    bool settle();
    // The speed of each of these steps.
    std::vector<double> speeds(const std::vector<int> &steps) const;

  private:
    struct Part {  // a step at one resource: see Part in max_min.cpp
        int place;
        double most, times;
    };
    struct Step {
        int key = 0;
        std::vector<Part> uses;
        double speed = 1.0, otherwise = 1.0;
        int resource = -1;
    };

    void see(int step, int because);
    double limit_of(int resource);
    void touch(int resource);
    void use(int step, Use use);
    // What holders leave of a resource.
    double room(int resource) const;

    const MaxMinShares &shares_;
    std::vector<Step> steps_;
    std::vector<int> free_;                // numbers of removed steps
    // Of each resource r at r, and of the units of r that are held at resources + r.
    std::vector<std::vector<Part>> users_;
    std::vector<double> limits_;
    std::vector<std::vector<std::pair<int, double>>> held_;  // by resource, (step, its units), in the order of their beginning
    int disturbing_ = 0;                   // steps that disturb
    std::vector<int> touched_;             // resources whose limit may change, in order
    std::vector<bool> is_touched_;
    std::vector<std::pair<double, double>> caps_;  // (the most that a user may take, how often), of the resource at hand
};

}  // namespace weft
