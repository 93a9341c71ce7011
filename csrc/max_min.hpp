// The speeds of concurrent steps: max-min fair shares of resources. weft/sim/max_min.py has the method and its sources.
#pragma once
#include <cstdint>
#include <tuple>
#include <utility>
#include <vector>

namespace weft {

// The share of a resource that remains for other steps if kernels that started earlier hold all its units.
constexpr double max_min_least = 1e-3;

// The resources that a step uses at full speed, as (resource, amount), in four lists: shared, held and disturbed resources,
// and, for each link that carries a part of a transfer, the amount of the whole transfer. See `Load` in
// weft/sim/max_min.py.
using Amounts = std::vector<std::pair<int64_t, double>>;
using Load = std::tuple<Amounts, Amounts, Amounts, Amounts>;

struct Use {
    int resource;
    double amount, whole = 0.0;
};

struct Uses {
    std::vector<Use> share, hold, disturb;
};

class MaxMinShares {
  public:
    explicit MaxMinShares(const std::vector<Load> &loads);

    const Uses &uses(int key) const { return loads_.at(key); }
    int resources() const { return resources_; }

    // Returns, for each i, the speed (0 to 1) of each of counts[i] steps with load keys[i]. Keys must be distinct.
    std::vector<double> speeds(const std::vector<int> &keys, const std::vector<int> &counts) const;

  private:
    int resources_ = 0;
    std::vector<Uses> loads_;
};

// The speeds of many steps, updated as steps begin and end. After a change, only the limits of affected resources are
// computed again, from their last values. The shares are the same as if all were computed anew.
class SharesInFlow {
  public:
    explicit SharesInFlow(const MaxMinShares &shares);

    // Adds a step with this load. Returns its number; numbers of removed steps are reused.
    int add(int key);
    void remove(int step);
    // Updates the limits. Returns false if they do not converge.
    bool settle();
    // Returns the speeds (0 to 1) of these steps.
    std::vector<double> speeds(const std::vector<int> &steps) const;

  private:
    struct Part {  // a step's use of one resource, like Part in max_min.cpp
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
    void push(int resource, double limit);
    void use(int step, Use use);
    // Returns the share of a resource that is not held.
    double room(int resource) const;

    const MaxMinShares &shares_;
    std::vector<Step> steps_;
    std::vector<int> free_;                // numbers of removed steps
    // [r]: the users of resource r. [resources + r]: the users of the held units of r.
    std::vector<std::vector<Part>> users_;
    std::vector<double> limits_;
    std::vector<std::vector<std::pair<int, double>>> held_;  // for each resource: (step, units), in order of start
    int disturbing_ = 0;                   // steps that disturb
    std::vector<int> touched_;             // resources whose limit may change, in order
    std::vector<bool> is_touched_;
    std::vector<std::pair<double, int>> queue_;  // (expected limit, resource), the lowest first
    std::vector<std::pair<double, double>> caps_;  // scratch for one resource: (cap of a user, count)
};

}  // namespace weft
