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

    // The speed, from 0 to 1, of each of counts[i] steps with the load number keys[i]; of keys that differ.
    std::vector<double> speeds(const std::vector<int> &keys, const std::vector<int> &counts) const;

  private:
    int resources_ = 0;
    std::vector<Uses> loads_;
};

}  // namespace weft
