#include "embedding_backward.hpp"

#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstring>
#include <exception>
#include <stdexcept>
#include <string>
#include <thread>

#include "half.hpp"

namespace weft {
namespace {

constexpr int64_t unit_occurrences = 2048;  // of short runs that a thread takes at once
constexpr int64_t ahead = 8;                // occurrences from a prefetch to its use
constexpr int digit_bits = 11;
constexpr size_t sort_by_comparison = 1024;
constexpr int lanes = 8;  // partial sums of a row's squares, so that they are summed in one order for any compiler

float widened(float x) { return x; }
struct Half {
    uint16_t bits;
};
struct Brain {
    uint16_t bits;
};
float widened(Half x) { return from_half(x.bits); }
float widened(Brain x) {
    const uint32_t bits = uint32_t(x.bits) << 16;
    float value;
    std::memcpy(&value, &bits, 4);
    return value;
}
void narrow(float value, float &to) { to = value; }
void narrow(float value, Half &to) { to.bits = to_half(value); }
void narrow(float value, Brain &to) {  // to nearest, ties to even; NaN stays NaN
    uint32_t bits;
    std::memcpy(&bits, &value, 4);
    to.bits = (bits & 0x7fffffffu) > 0x7f800000u ? uint16_t(bits >> 16 | 0x40)
                                                 : uint16_t((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

// Rounding at random: up with a probability that is the distance from the lower neighbour, over that of the neighbours. The
// 24 lowest bits of `random` decide. weft/kernels/embedding_backward.py does the same.
void narrow_at_random(float value, uint64_t, float &to) { to = value; }
void narrow_at_random(float value, uint64_t random, Brain &to) {
    uint32_t bits;
    std::memcpy(&bits, &value, 4);
    if ((bits & 0x7f800000u) == 0x7f800000u) return narrow(value, to);
    to.bits = uint16_t((bits + uint32_t(random & 0xffff)) >> 16);
}
void narrow_at_random(float value, uint64_t random, Half &to) {
    constexpr float smallest_normal = 6.103515625e-05f, units = 16777216.0f;  // 2**-14, 2**24
    const float size = std::fabs(value);
    if (size < smallest_normal) {  // subnormals are multiples of 2**-24
        const float scaled = size * units, below = std::floor(scaled);
        const float up = float(random & 0xffffff) < (scaled - below) * units ? 1.0f : 0.0f;
        return narrow(std::copysign((below + up) / units, value), to);
    }
    uint32_t bits;
    std::memcpy(&bits, &value, 4);
    if ((bits & 0x7f800000u) == 0x7f800000u) return narrow(value, to);
    bits = (bits + uint32_t(random & 0x1fff)) & ~uint32_t(0x1fff);
    std::memcpy(&value, &bits, 4);
    narrow(value, to);
}
constexpr uint64_t golden = 0x9e3779b97f4a7c15u;

int64_t at(const void *array, int bits, int64_t i) {
    return bits == 32 ? static_cast<const int32_t *>(array)[i] : static_cast<const int64_t *>(array)[i];
}

// Runs work(unit) for all units on `threads` threads, the caller's included. Rethrows the first error.
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
        } catch (const std::system_error &) {  // no more threads: the others do the work
            break;
        }
    }
    run();
    for (std::thread &other : others) other.join();
    if (failed) std::rethrow_exception(failed);
}

// The bags of a block of offsets, clamped so that nothing outside of the values is read.
template <class Visit> void each_bag(const SparseInput &in, int64_t key, int64_t first, int64_t end, Visit visit) {
    auto offset = [&](int64_t bag) {
        return std::clamp<int64_t>(at(in.offsets, in.offsets_bits, key * in.batch + bag), 0, in.n_values);
    };
    for (int64_t sample = first, begin = offset(first); sample < end; ++sample) {
        const int64_t bag_end = std::max(begin, offset(sample + 1));
        visit(sample, begin, bag_end);
        begin = bag_end;
    }
}

// The row of an id, or -1.
int64_t row_of(const SparseInput &in, int64_t position, int64_t rows) {
    const int64_t id = at(in.values, in.values_bits, position);
    if (in.hash) return int64_t(hash_id(uint64_t(id)) % uint64_t(rows));
    return uint64_t(id) < uint64_t(rows) ? id : -1;
}

int bits_of(uint64_t most) {
    int bits = 0;
    for (; most > 0; most >>= 1) ++bits;
    return bits;
}

// Sorts ascending by the bits from `low` up to `high`; keys are distinct, and ascend in the bits below `low`.
void radix_sort(std::vector<uint64_t> &keys, int low, int high) {
    if (keys.size() <= sort_by_comparison) return std::sort(keys.begin(), keys.end());
    std::vector<uint64_t> other(keys.size());
    std::vector<size_t> places(size_t(1) << digit_bits);
    constexpr uint64_t mask = (uint64_t(1) << digit_bits) - 1;
    for (int shift = low; shift < high; shift += digit_bits) {
        std::fill(places.begin(), places.end(), 0);
        for (const uint64_t key : keys) ++places[key >> shift & mask];
        size_t sum = 0;
        for (size_t &place : places) {
            const size_t count = place;
            place = sum;
            sum += count;
        }
        for (const uint64_t key : keys) other[places[key >> shift & mask]++] = key;
        keys.swap(other);
    }
}

}  // namespace

SortedRows::SortedRows(std::vector<BackwardSlot> slots, std::vector<BackwardTable> tables, const SparseInput &input,
                       int threads)
    : slots_(std::move(slots)), tables_(std::move(tables)), of_table_(tables_.size()), batch_(input.batch) {
    for (size_t s = 0; s < slots_.size(); ++s) of_table_[slots_[s].table].slots.push_back(int64_t(s));
    on_threads(threads, this->tables(), [&](int64_t table) { sort(table, input); });
}

void SortedRows::sort(int64_t table, const SparseInput &in) {
    OfTable &of = of_table_[table];
    const int64_t rows = tables_[table].rows;
    if (uint64_t(of.slots.size()) * uint64_t(batch_) >= uint64_t(1) << 32)
        throw std::invalid_argument(std::to_string(of.slots.size()) + " features of " + std::to_string(batch_) +
                                    " samples read one table: it may have less than 2**32 bags in a batch");
    bool scaled = in.per_sample_weights != nullptr;
    uint64_t count = 0;
    for (const int64_t s : of.slots) {
        scaled = scaled || slots_[s].mean;
        each_bag(in, slots_[s].key, 0, batch_, [&](int64_t, int64_t begin, int64_t end) { count += uint64_t(end - begin); });
    }
    of.index_bits = bits_of(count);
    const int row_bits = bits_of(uint64_t(rows));
    if (of.index_bits + row_bits > 64)
        throw std::invalid_argument(std::to_string(count) + " ids of a table of " + std::to_string(rows) +
                                    " rows: too many for one batch");
    of.keys.reserve(count);
    of.bags.reserve(count);
    if (scaled) of.scales.reserve(count);
    for (size_t number = 0; number < of.slots.size(); ++number) {
        const BackwardSlot &slot = slots_[of.slots[number]];
        each_bag(in, slot.key, 0, batch_, [&](int64_t sample, int64_t begin, int64_t end) {
            const float length = slot.mean ? float(end - begin) : 1.0f;
            for (int64_t i = begin; i < end; ++i) {
                const int64_t row = row_of(in, i, rows);
                if (row < 0) continue;
                of.keys.push_back(uint64_t(row) << of.index_bits | of.bags.size());
                of.bags.push_back(uint32_t(uint64_t(number) * uint64_t(batch_) + uint64_t(sample)));
                if (scaled) of.scales.push_back((in.per_sample_weights ? in.per_sample_weights[i] : 1.0f) / length);
            }
        });
    }
    radix_sort(of.keys, of.index_bits, of.index_bits + row_bits);
    of.runs.clear();
    for (size_t i = 0; i < of.keys.size(); ++i)
        if (i == 0 || of.keys[i] >> of.index_bits != of.keys[i - 1] >> of.index_bits) of.runs.push_back(int64_t(i));
    of.runs.push_back(int64_t(of.keys.size()));
}

void SortedRows::rows(int64_t table, int64_t *out) const {
    const OfTable &of = of_table_[table];
    for (int64_t run = 0; run < runs(table); ++run) out[run] = int64_t(of.keys[of.runs[run]] >> of.index_bits);
}

// The work of one update: sums of runs and segments, and the rule.
class RowUpdater {
  public:
    RowUpdater(const SortedRows &sorted, const Update &update) : sorted_(sorted), update_(update) {}

    // T: of tables, and of rule `gradient`'s output. G: of the gradients that come in.
    template <class T, class G> int64_t run() {
        plan();
        on_threads(update_.threads, int64_t(units_.size()), [&](int64_t unit) { work_on<T, G>(units_[unit]); });
        on_threads(update_.threads, int64_t(long_runs_.size()), [&](int64_t i) { finish<T>(long_runs_[i]); });
        return skipped_;
    }

  private:
    // Short runs [begin, end) of a table, or, with `partial`, the occurrences [begin, end) of a segment.
    struct Unit {
        int64_t table, begin, end;
        float *partial;
    };
    struct LongRun {
        int64_t table, run;
        float *partials;
        int64_t count;
    };

    void plan() {
        for (int64_t table = 0; table < sorted_.tables(); ++table) {
            const auto &runs = sorted_.of_table_[table].runs;
            const int64_t dim = sorted_.tables_[table].dim, count = sorted_.runs(table);
            int64_t first = 0;
            auto close = [&](int64_t end) {
                if (end > first) units_.push_back({table, first, end, nullptr});
            };
            for (int64_t run = 0; run < count; ++run) {
                const int64_t length = runs[run + 1] - runs[run];
                if (length > segment_occurrences) {
                    close(run);
                    first = run + 1;
                    const int64_t segments = (length + segment_occurrences - 1) / segment_occurrences;
                    partials_.emplace_back(new float[size_t(segments * dim)]);
                    float *partial = partials_.back().get();
                    long_runs_.push_back({table, run, partial, segments});
                    for (int64_t s = 0; s < segments; ++s)
                        units_.push_back({table, runs[run] + s * segment_occurrences,
                                          std::min(runs[run] + (s + 1) * segment_occurrences, runs[run + 1]),
                                          partial + s * dim});
                } else if (runs[run + 1] - runs[first] > unit_occurrences) {
                    close(run + 1);
                    first = run + 1;
                }
            }
            close(count);
        }
    }

    template <class T, class G> void work_on(const Unit &unit) {
        const int64_t dim = sorted_.tables_[unit.table].dim;
        if (unit.partial) return sum<G>(unit.table, unit.begin, unit.end, dim, unit.partial);
        std::vector<float> g(size_t(dim), 0.0f);
        const auto &runs = sorted_.of_table_[unit.table].runs;
        for (int64_t run = unit.begin; run < unit.end; ++run) {
            sum<G>(unit.table, runs[run], runs[run + 1], dim, g.data());
            apply<T>(unit.table, run, dim, g.data());
        }
    }

    // The segments' sums, by a binary tree of neighbours.
    template <class T> void finish(const LongRun &of) {
        const int64_t dim = sorted_.tables_[of.table].dim;
        for (int64_t step = 1; step < of.count; step *= 2)
            for (int64_t i = 0; i + step < of.count; i += 2 * step)
                for (int64_t d = 0; d < dim; ++d) of.partials[i * dim + d] += of.partials[(i + step) * dim + d];
        apply<T>(of.table, of.run, dim, of.partials);
    }

    template <class G> const G *gradient_of(const SortedRows::OfTable &of, int64_t i) const {
        const uint64_t bag = of.bags[of.keys[i] & ((uint64_t(1) << of.index_bits) - 1)];
        const auto &slot = sorted_.slots_[of.slots[bag / uint64_t(sorted_.batch_)]];
        const int64_t sample = int64_t(bag % uint64_t(sorted_.batch_));
        return reinterpret_cast<const G *>(update_.gradients) + sample * update_.stride + slot.column;
    }

    template <class G> void sum(int64_t table, int64_t begin, int64_t end, int64_t dim, float *__restrict out) const {
        const auto &of = sorted_.of_table_[table];
        std::fill_n(out, dim, 0.0f);
        for (int64_t i = begin; i < end; ++i) {
            if (i + ahead < int64_t(of.keys.size())) {
                const char *coming = reinterpret_cast<const char *>(gradient_of<G>(of, i + ahead));
                for (int64_t b = 0; b < dim * int64_t(sizeof(G)); b += 64) __builtin_prefetch(coming + b);
            }
            const G *g = gradient_of<G>(of, i);
            if (of.scales.empty()) {
                for (int64_t d = 0; d < dim; ++d) out[d] += widened(g[d]);
            } else {
                const float scale = of.scales[of.keys[i] & ((uint64_t(1) << of.index_bits) - 1)];
                for (int64_t d = 0; d < dim; ++d) out[d] += widened(g[d]) * scale;
            }
        }
    }

    static float mean_of_squares(const float *g, int64_t dim) {
        float sums[lanes] = {};
        for (int64_t d = 0; d < dim; ++d) sums[d % lanes] += g[d] * g[d];
        for (int step = lanes / 2; step > 0; step /= 2)
            for (int i = 0; i < step; ++i) sums[i] += sums[i + step];
        return sums[0] / float(dim);
    }

    // The rules. g: the row's reduced gradient, which becomes its product with the factor, plus weight decay.
    template <class T> void apply(int64_t table, int64_t run, int64_t dim, float *__restrict g) {
        const Update &u = update_;
        const RowMemory &memory = u.tables[table];
        const auto &of = sorted_.of_table_[table];
        const int64_t row = int64_t(of.keys[of.runs[run]] >> of.index_bits);
        for (int64_t d = 0; d < dim; ++d) g[d] *= u.factor;
        if (u.skip_nonfinite) {
            bool finite = true;
            for (int64_t d = 0; d < dim; ++d) finite = finite && std::isfinite(g[d]);
            if (!finite) {
                skipped_.fetch_add(1, std::memory_order_relaxed);
                return;
            }
        }
        if (std::isfinite(u.clip))
            for (int64_t d = 0; d < dim; ++d) g[d] = g[d] > u.clip ? u.clip : g[d] < -u.clip ? -u.clip : g[d];
        if (u.rule == Rule::squares) {
            reinterpret_cast<float *>(memory.out)[run] = mean_of_squares(g, dim) * float(dim);
            return;
        }
        if (u.rule == Rule::gradient) {
            T *out = reinterpret_cast<T *>(memory.out) + (u.sparse ? run : row) * dim;
            for (int64_t d = 0; d < dim; ++d) narrow(g[d], out[d]);
            return;
        }
        T *__restrict w = reinterpret_cast<T *>(memory.weight) + row * dim;
        if (u.weight_decay != 0)
            for (int64_t d = 0; d < dim; ++d) g[d] += u.weight_decay * widened(w[d]);
        float *first = memory.first, *second = memory.second;
        switch (u.rule) {
            case Rule::rowwise_adagrad: {
                first[row] += mean_of_squares(g, dim);
                const float divisor = std::sqrt(first[row]) + u.eps;
                for (int64_t d = 0; d < dim; ++d) g[d] /= divisor;
                break;
            }
            case Rule::adagrad: {
                float *__restrict sums = first + row * dim;
                for (int64_t d = 0; d < dim; ++d) {
                    sums[d] += g[d] * g[d];
                    g[d] /= std::sqrt(sums[d]) + u.eps;
                }
                break;
            }
            case Rule::adam: {
                float *__restrict m = first + row * dim, *__restrict v = second + row * dim;
                for (int64_t d = 0; d < dim; ++d) {
                    m[d] = u.beta1 * m[d] + u.rest1 * g[d];
                    v[d] = u.beta2 * v[d] + u.rest2 * (g[d] * g[d]);
                    g[d] = m[d] * u.correction1 / (std::sqrt(v[d] * u.correction2) + u.eps);
                }
                break;
            }
            case Rule::partial_rowwise_adam: {
                float *__restrict m = first + row * dim;
                second[row] = u.beta2 * second[row] + u.rest2 * mean_of_squares(g, dim);
                const float divisor = std::sqrt(second[row] * u.correction2) + u.eps;
                for (int64_t d = 0; d < dim; ++d) {
                    m[d] = u.beta1 * m[d] + u.rest1 * g[d];
                    g[d] = m[d] * u.correction1 / divisor;
                }
                break;
            }
            default: break;
        }
        if (u.learning_rate == 0) return;  // the row keeps its bits, the sign of a zero too
        if (!u.is_stochastic) {
            for (int64_t d = 0; d < dim; ++d) narrow(widened(w[d]) - u.learning_rate * g[d], w[d]);
            return;
        }
        const uint64_t base = hash_id(u.seed + memory.number * golden);
        for (int64_t d = 0; d < dim; ++d)
            narrow_at_random(widened(w[d]) - u.learning_rate * g[d], hash_id(base + uint64_t(row * dim + d) * golden), w[d]);
    }

    const SortedRows &sorted_;
    const Update &update_;
    std::vector<Unit> units_;
    std::vector<LongRun> long_runs_;
    std::vector<std::unique_ptr<float[]>> partials_;
    std::atomic<int64_t> skipped_{0};
};

int64_t SortedRows::update(const Update &update) const {
    RowUpdater updater(*this, update);
    auto with = [&](auto of_tables) -> int64_t {
        using T = decltype(of_tables);
        switch (update.gradients_dtype) {
            case Dtype::fp16: return updater.run<T, Half>();
            case Dtype::bf16: return updater.run<T, Brain>();
            default: return updater.run<T, float>();
        }
    };
    switch (update.dtype) {
        case Dtype::fp16: return with(Half{});
        case Dtype::bf16: return with(Brain{});
        default: return with(float{});
    }
}

namespace {

template <class T>
void gradients_of_weights_as(const std::vector<BackwardSlot> &slots, const std::vector<BackwardTable> &tables,
                             const SparseInput &in, const std::vector<const char *> &weights, const T *gradients,
                             int64_t stride, float *out, int threads) {
    std::vector<int64_t> keys;  // slots of one key write the same elements: one thread takes them, in order
    for (const BackwardSlot &slot : slots)
        if (std::find(keys.begin(), keys.end(), slot.key) == keys.end()) keys.push_back(slot.key);
    std::fill_n(out, in.n_values, 0.0f);
    constexpr int64_t samples = 256;
    const int64_t blocks = (in.batch + samples - 1) / samples;
    on_threads(threads, int64_t(keys.size()) * blocks, [&](int64_t unit) {
        const int64_t key = keys[size_t(unit / blocks)], first = unit % blocks * samples;
        for (const BackwardSlot &slot : slots) {
            if (slot.key != key) continue;
            const int64_t dim = tables[slot.table].dim, rows = tables[slot.table].rows;
            each_bag(in, key, first, std::min(first + samples, in.batch), [&](int64_t sample, int64_t begin, int64_t end) {
                const T *g = gradients + sample * stride + slot.column;
                for (int64_t i = begin; i < end; ++i) {
                    const int64_t row = row_of(in, i, rows);
                    if (row < 0) continue;
                    const T *w = reinterpret_cast<const T *>(weights[slot.table]) + row * dim;
                    float sums[lanes] = {};
                    for (int64_t d = 0; d < dim; ++d) sums[d % lanes] += widened(g[d]) * widened(w[d]);
                    for (int step = lanes / 2; step > 0; step /= 2)
                        for (int j = 0; j < step; ++j) sums[j] += sums[j + step];
                    out[i] += slot.mean ? sums[0] / float(end - begin) : sums[0];
                }
            });
        }
    });
}

}  // namespace

void gradients_of_weights(const std::vector<BackwardSlot> &slots, const std::vector<BackwardTable> &tables,
                          const SparseInput &in, const std::vector<const char *> &weights, const char *gradients,
                          int64_t stride, Dtype dtype, float *out, int threads) {
    auto as = [&](auto *typed) {
        gradients_of_weights_as(slots, tables, in, weights, typed, stride, out, threads);
    };
    switch (dtype) {
        case Dtype::fp16: return as(reinterpret_cast<const Half *>(gradients));
        case Dtype::bf16: return as(reinterpret_cast<const Brain *>(gradients));
        default: return as(reinterpret_cast<const float *>(gradients));
    }
}

}  // namespace weft
