// The fluid model of the simulator's engine: the remaining work and the speed of each running step, and the time of the
// next completion. weft/sim/engine.py decides which steps exist and when they begin.
//
// Lanes that can slow each other down form a part (weft/sim/scarce.py). When work in a part begins or ends, only the speeds
// in this part change. Speeds are cached by the set of running steps, because the same sets recur. A pulse is an event that
// reports that a step has done a given fraction of its work.
#include <nanobind/nanobind.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <bit>
#include <cstdint>
#include <functional>
#include <limits>
#include <memory>
#include <numeric>
#include <queue>
#include <unordered_map>

#include "max_min.hpp"

namespace nb = nanobind;

namespace {

// Less remaining work than this counts as zero, because floating-point times have rounding errors.
constexpr double done_us = 1e-7;

// With this many concurrent steps or more, the same sets rarely recur, and updating the speeds is cheaper than caching
// them.
constexpr size_t many = 256;

struct Working {
    int lane, load;
    double work_us, rest, speed;
    double mark;     // the remaining work at the next pulse
    uint32_t after;  // the remaining pulses: bit i stands for the end of the (i + 1)-th of the equal parts of the work
    int step = -1;   // the step's index in the part's `in_flow`
};

struct Part {
    std::vector<Working> working;
    double at_us = 0.0;  // the time at which `rest` of the work is valid
    int64_t ends = 0;    // the number of the valid planned end; queue entries with older numbers are ignored
    bool changed = false;
    std::unique_ptr<weft::SharesInFlow> in_flow;  // used if many steps run at once
};

struct End {
    double at_us;
    int64_t order;  // the order of ends at the same time: the first planned comes first
    size_t part;
    int64_t number;  // the number of this end, counted per part
    bool operator>(const End &other) const { return std::tie(at_us, order) > std::tie(other.at_us, other.order); }
};

struct Hash {
    size_t operator()(const std::vector<int> &loads) const {
        size_t hash = loads.size();
        for (int load : loads) hash = (hash ^ size_t(load)) * 0x9e3779b97f4a7c15u + (hash >> 29);
        return hash;
    }
};

using Due = std::vector<std::pair<int, bool>>;  // (lane, true if it is done)

class Fluid {
  public:
    Fluid(const std::vector<weft::Load> &loads, std::vector<size_t> part_of, int pulses, size_t most_known)
        : shares_(loads), part_of_(std::move(part_of)), pulses_(pulses), most_known_(most_known), speed_of_(loads.size()) {
        for (size_t part : part_of_) parts_.resize(std::max(parts_.size(), part + 1));
    }

    Fluid(const Fluid &) = delete;

    // Begins a step. pulses: bit i asks for a pulse when i + 1 of the equal parts of the work are done.
    Due begin(double now, int lane, int load, double work_us, uint32_t pulses) {
        if (work_us <= done_us) return {{lane, true}};
        Due due;
        const size_t number = part_of_.at(lane);
        Part &part = parts_[number];
        if (part.at_us < now) flow(part, now, due);
        part.working.push_back({lane, load, work_us, work_us, 0.0, mark(work_us, pulses), pulses});
        if (part.in_flow) part.working.back().step = part.in_flow->add(load);
        change(number);
        return due;
    }

    double next_us() {
        for (size_t number : changed_) {
            Part &part = parts_[number];
            part.changed = false;
            ++part.ends;
            if (part.working.empty()) continue;
            if (!flowing(part)) set_speeds(part.working);
            double left = std::numeric_limits<double>::infinity();
            for (const Working &one : part.working) left = std::min(left, (one.rest - one.mark) / one.speed);
            ends_.push({part.at_us + std::max(0.0, left), ++planned_, number, part.ends});
        }
        changed_.clear();
        // Skip ends that were planned before speeds changed.
        while (!ends_.empty() && ends_.top().number != parts_[ends_.top().part].ends) ends_.pop();
        return ends_.empty() ? std::numeric_limits<double>::infinity() : ends_.top().at_us;
    }

    Due to(double now) {
        Due due;
        while (!ends_.empty() && ends_.top().at_us <= now) {
            const End end = ends_.top();
            ends_.pop();
            if (end.number != parts_[end.part].ends) continue;
            change(end.part);
            flow(parts_[end.part], now, due);
        }
        return due;
    }

    size_t known() const { return n_known_; }

  private:
    // Returns the remaining work at the first of these pulses. The end of the last part is the end of the work, not a
    // pulse.
    double mark(double work_us, uint32_t pulses) const {
        const int parts = std::countr_zero(pulses) + 1;
        return parts < pulses_ ? work_us * (1 - double(parts) / pulses_) : 0.0;
    }

    void change(size_t part) {
        if (!parts_[part].changed) changed_.push_back(part);
        parts_[part].changed = true;
    }

    // Advances a part to time `now`. Adds to `due` the lanes with pulses, then the lanes that are done.
    void flow(Part &part, double now, Due &due) {
        const double passed = now - part.at_us;
        const double nearly = std::max(done_us, 1e-12 * now);  // a large time has a coarser floating-point resolution
        part.at_us = now;
        for (Working &one : part.working) {
            one.rest -= passed * one.speed;
            if (one.mark == 0.0 || one.rest - one.mark > nearly) continue;
            one.after &= one.after - 1;
            one.mark = mark(one.work_us, one.after);
            due.emplace_back(one.lane, false);
        }
        std::erase_if(part.working, [&](const Working &one) {
            if (one.rest > nearly) return false;
            due.emplace_back(one.lane, true);
            if (part.in_flow) part.in_flow->remove(one.step);
            return true;
        });
    }

    // Updates the speeds of many steps from the speeds before the change. Returns false if there are few steps, or if
    // the limits do not converge.
    bool flowing(Part &part) {
        if (!part.in_flow) {
            if (part.working.size() < many) return false;
            part.in_flow = std::make_unique<weft::SharesInFlow>(shares_);
            for (Working &one : part.working) one.step = part.in_flow->add(one.load);
        }
        if (!part.in_flow->settle()) {
            part.in_flow.reset();
            return false;
        }
        std::vector<int> steps;
        for (const Working &one : part.working) steps.push_back(one.step);
        const std::vector<double> speeds = part.in_flow->speeds(steps);
        for (size_t i = 0; i < steps.size(); ++i) part.working[i].speed = speeds[i];
        return true;
    }

    void set_speeds(std::vector<Working> &working) {
        std::vector<int> loads;
        for (const Working &one : working) loads.push_back(one.load);
        std::sort(loads.begin(), loads.end());
        std::vector<int> keys, counts;
        for (int load : loads) {
            if (keys.empty() || keys.back() != load) {
                keys.push_back(load);
                counts.push_back(0);
            }
            ++counts.back();
        }
        auto found = known_.find(loads);
        if (found == known_.end()) {
            if (n_known_ + keys.size() > most_known_) {
                known_.clear();
                n_known_ = 0;
            }
            found = known_.emplace(loads, shares_.speeds(keys, counts)).first;
            n_known_ += keys.size();
        }
        for (size_t i = 0; i < keys.size(); ++i) speed_of_[keys[i]] = found->second[i];
        for (Working &one : working) one.speed = speed_of_[one.load];
    }

    weft::MaxMinShares shares_;
    std::vector<size_t> part_of_;  // the part of each lane
    const int pulses_;
    const size_t most_known_;
    std::vector<double> speed_of_;  // the speed of each load, in the part under consideration
    std::unordered_map<std::vector<int>, std::vector<double>, Hash> known_;
    size_t n_known_ = 0;
    std::vector<Part> parts_;
    std::vector<size_t> changed_;  // since the engine's last step
    std::priority_queue<End, std::vector<End>, std::greater<End>> ends_;
    int64_t planned_ = 0;
};

std::vector<double> max_min_speeds(const std::vector<weft::Load> &loads, const std::vector<int> &counts) {
    if (loads.size() != counts.size())
        throw nb::value_error((std::to_string(counts.size()) + " counts for " + std::to_string(loads.size()) +
                               " loads: pass a count for each load").c_str());
    std::vector<int> keys(loads.size());
    std::iota(keys.begin(), keys.end(), 0);
    return weft::MaxMinShares(loads).speeds(keys, counts);
}

}  // namespace

void register_fluid(nb::module_ &m) {
    m.attr("MAX_MIN_LEAST") = weft::max_min_least;
    m.def("max_min_speeds", &max_min_speeds, nb::arg("loads"), nb::arg("counts"));
    nb::class_<Fluid>(m, "Fluid", "The work of lanes on shared resources (see weft/_core.pyi).")
        .def(nb::init<const std::vector<weft::Load> &, std::vector<size_t>, int, size_t>(), nb::arg("loads"), nb::arg("parts"),
             nb::arg("pulses"), nb::arg("most_known"))
        .def("begin", &Fluid::begin, nb::arg("now"), nb::arg("lane"), nb::arg("load"), nb::arg("work_us"), nb::arg("pulses"))
        .def("next_us", &Fluid::next_us)
        .def("to", &Fluid::to, nb::arg("now"))
        .def_prop_ro("known", &Fluid::known);
}
