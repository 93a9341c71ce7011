#include "embedding_backward.hpp"

#include <algorithm>
#include <atomic>
#include <cstring>
#include <mutex>
#include <numeric>
#include <stdexcept>
#include <string>
#include <utility>

#include "half.hpp"
#include "prefetch.hpp"
#include "threads.hpp"

namespace weft {
namespace {

constexpr int64_t unit_occurrences = 2048;  // a thread takes short runs with about this many occurrences at once
constexpr int64_t bytes_at_once = 1 << 10;  // reduced gradients of the rows that are updated together
constexpr int64_t bytes_ahead = 4 << 10;    // prefetch distance in bytes of gradients, also for rows
constexpr int digit_bits_of_few = 11;  // with few ids a larger table of counts would take longer than another pass
constexpr int most_digit_bits = 14;    // the counts of a digit, 64 KiB, then fit into the L2 cache
constexpr size_t most_kept_words = size_t(1) << 27;
constexpr int64_t sort_by_comparison = 64;
constexpr int lanes = 8;  // partial sums of a product, so that it is summed in one order for any compiler

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

int64_t at(const void *array, int bits, int64_t i) {
    return bits == 32 ? static_cast<const int32_t *>(array)[i] : static_cast<const int64_t *>(array)[i];
}

// Visits the bags of a block of offsets. Offsets are clamped, so that nothing outside of the values is read.
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

// Returns the row of an id; -1 if the id is out of range.
template <class Index> int64_t row_of(const SparseInput &in, int64_t position, int64_t rows) {
    const int64_t id = static_cast<const Index *>(in.values)[position];
    if (in.hash) return int64_t(hash_id(uint64_t(id)) % uint64_t(rows));
    return uint64_t(id) < uint64_t(rows) ? id : -1;
}

int bits_of(uint64_t most) {
    int bits = 0;
    for (; most > 0; most >>= 1) ++bits;
    return bits;
}

// Memory of earlier sorts, which the next sort reuses. It is never destroyed, because Python objects that use it may be
// destroyed after C++'s static objects.
struct KeptWords {
    std::mutex mutex;
    std::unique_ptr<uint64_t[]> words;
    size_t size = 0;
};
KeptWords &kept_words() {
    static KeptWords &kept = *new KeptWords;
    return kept;
}

}  // namespace

ReusedWords::ReusedWords(size_t size) : size_(size) {
    KeptWords &kept = kept_words();
    {
        const std::lock_guard<std::mutex> lock(kept.mutex);
        if (kept.size >= size) {
            words_ = std::move(kept.words);
            size_ = std::exchange(kept.size, 0);
        }
    }
    if (!words_) words_.reset(new uint64_t[size]);
}

ReusedWords::~ReusedWords() {
    KeptWords &kept = kept_words();
    const std::lock_guard<std::mutex> lock(kept.mutex);
    if (size_ <= kept.size || size_ > most_kept_words) return;
    std::swap(words_, kept.words);
    kept.size = size_;
}

SortedRows::SortedRows(std::vector<BackwardSlot> slots, std::vector<BackwardTable> tables, const SparseInput &input,
                       int threads)
    : slots_(std::move(slots)), tables_(std::move(tables)), of_table_(tables_.size()), batch_(input.batch) {
    for (size_t s = 0; s < slots_.size(); ++s) of_table_[slots_[s].table].slots.push_back(int64_t(s));
    for (const BackwardSlot &slot : slots_)
        each_bag(input, slot.key, 0, batch_, [&](int64_t, int64_t begin, int64_t end) {
            of_table_[slot.table].given += end - begin;
        });
    size_t words = 0;
    for (const OfTable &of : of_table_) words += 2 * size_t(of.given + 1);
    words_ = ReusedWords(words);
    uint64_t *next = words_.data();
    for (OfTable &of : of_table_) {
        of.keys = next;
        of.runs = next + of.given + 1;
        next += 2 * (of.given + 1);
    }
    on_threads(threads, this->tables(), [&](int64_t table) { sort(table, input); });
}

void SortedRows::sort(int64_t table, const SparseInput &in) {
    return in.values_bits == 32 ? sort_as<int32_t>(table, in) : sort_as<int64_t>(table, in);
}

// A radix sort by row. It is stable, so the occurrences of a row stay in the order of payloads. The first pass also
// computes the keys.
template <class Index> void SortedRows::sort_as(int64_t table, const SparseInput &in) {
    OfTable &of = of_table_[table];
    const int64_t rows = tables_[table].rows;
    const uint64_t bags = uint64_t(of.slots.size()) * uint64_t(batch_);
    if (bags >= uint64_t(1) << 32)
        throw std::invalid_argument(std::to_string(of.slots.size()) + " features of " + std::to_string(batch_) +
                                    " samples read one table, which may have at most 2**32 - 1 bags in a batch: use a smaller batch");
    const bool weighted = in.per_sample_weights != nullptr;
    const int64_t given = of.given;
    bool mean = false;
    for (const int64_t s : of.slots) mean = mean || slots_[s].mean;
    of.payload_bits = bits_of(weighted ? uint64_t(given) : bags);
    const int row_bits = bits_of(uint64_t(rows - 1));
    if (of.payload_bits + row_bits > 64 || given >= int64_t(1) << 32)
        throw std::invalid_argument(std::to_string(given) + " ids of a table of " + std::to_string(rows) +
                                    " rows are too many for one batch: use a smaller batch");
    const int widest_digit = std::clamp(bits_of(uint64_t(given)) + 1, digit_bits_of_few, most_digit_bits);
    const int digits = given <= sort_by_comparison ? 0 : std::max(1, (row_bits + widest_digit - 1) / widest_digit);
    const int digit_bits = digits > 0 ? (row_bits + digits - 1) / digits : 0;
    const int64_t places = int64_t(1) << digit_bits, mask = places - 1;
    static thread_local std::vector<uint32_t> of_thread;
    of_thread.assign(size_t(digits * places), 0);
    uint32_t *const place = of_thread.data();  // for each value of each digit: the number of keys, then the next key's place
    if (weighted) {
        of.bags.reserve(size_t(given));
        of.scales.reserve(size_t(given));
    } else if (mean) {
        of.scales.assign(size_t(bags), 1.0f);
    }
    int64_t count = 0;
    for (size_t number = 0; number < of.slots.size(); ++number) {
        const BackwardSlot &slot = slots_[of.slots[number]];
        each_bag(in, slot.key, 0, batch_, [&](int64_t sample, int64_t begin, int64_t end) {
            const float length = slot.mean ? float(end - begin) : 1.0f;
            const uint32_t bag = uint32_t(uint64_t(number) * uint64_t(batch_) + uint64_t(sample));
            if (!weighted && mean) of.scales[bag] = 1.0f / length;
            if (!weighted && digits == 1) {  // the usual case, in a small loop
                for (int64_t i = begin; i < end; ++i) {
                    const int64_t row = row_of<Index>(in, i, rows);
                    if (row < 0) continue;
                    ++count;
                    ++place[row];
                }
                return;
            }
            for (int64_t i = begin; i < end; ++i) {
                const int64_t row = row_of<Index>(in, i, rows);
                if (row < 0) continue;
                ++count;
                for (int digit = 0; digit < digits; ++digit) ++place[digit * places + (row >> digit * digit_bits & mask)];
                if (!weighted) continue;
                of.bags.push_back(bag);
                of.scales.push_back(in.per_sample_weights[i] / length);
            }
        });
    }
    for (int digit = 0; digit < digits; ++digit) {
        uint32_t sum = 0;
        for (int64_t d = 0; d < places; ++d) sum += std::exchange(place[digit * places + d], sum);
    }
    of.count = count;
    const int payload_bits = of.payload_bits;
    uint64_t *const unsorted = of.keys;
    uint64_t occurrence = 0;
    for (size_t number = 0; number < of.slots.size(); ++number)
        each_bag(in, slots_[of.slots[number]].key, 0, batch_, [&](int64_t sample, int64_t begin, int64_t end) {
            const uint64_t bag = uint64_t(number) * uint64_t(batch_) + uint64_t(sample);
            for (int64_t i = begin; i < end; ++i) {
                const int64_t row = row_of<Index>(in, i, rows);
                if (row < 0) continue;
                const int64_t to = digits > 0 ? place[row & mask]++ : int64_t(occurrence);
                unsorted[to] = uint64_t(row) << payload_bits | (weighted ? occurrence : bag);
                ++occurrence;
            }
        });
    if (digits == 0) {
        std::sort(of.keys, of.keys + of.count);
    } else if (digits > 1) {
        for (int digit = 1; digit < digits; ++digit) {
            uint32_t *const next = place + digit * places;
            const int shift = payload_bits + digit * digit_bits;
            uint64_t *const keys = of.keys, *const other = of.runs;
            for (int64_t i = 0; i < count; ++i) other[next[keys[i] >> shift & uint64_t(mask)]++] = keys[i];
            std::swap(of.keys, of.runs);
        }
    }
    const uint64_t *const keys = of.keys;
    uint64_t *const runs = of.runs;
    int64_t run = 0, last = -1;
    // No branches: the entry after the last run is overwritten until an id begins that run.
    for (int64_t i = 0; i < count; ++i) {
        const int64_t row = int64_t(keys[i] >> payload_bits);
        runs[run] = uint64_t(i);
        run += row != last;
        last = row;
    }
    runs[run] = uint64_t(count);
    of.run_count = run;
}

void SortedRows::rows(int64_t table, int64_t *out) const {
    const OfTable &of = of_table_[table];
    for (int64_t run = 0; run < runs(table); ++run) out[run] = of.row(of.runs[run]);
}

// One update: sums the gradients of runs and segments, and applies the optimizer's rule.
class RowUpdater {
  public:
    RowUpdater(const SortedRows &sorted, const Update &update)
        : sorted_(sorted), update_(update), update_rows_(update.isa->update_rows(update.dtype)) {
        widen();
        plan();
    }

    int64_t run() {
        on_threads(update_.threads, int64_t(units_.size()), [&](int64_t unit) { work_on(units_[unit]); });
        on_threads(update_.threads, int64_t(long_runs_.size()), [&](int64_t i) { finish(long_runs_[i]); });
        return skipped_;
    }

  private:
    // A unit of a thread's work: the short runs [begin, end) of a table or, with `partial`, the occurrences [begin,
    // end) of a segment.
    struct Unit {
        int64_t table, begin, end;
        float *partial;
    };
    struct LongRun {
        int64_t table, run;
        float *partials;
        int64_t count;
    };

    // Converts 16-bit gradients to fp32, once for all threads.
    void widen() {
        gradients_ = reinterpret_cast<const float *>(update_.gradients);
        if (update_.gradients_dtype == Dtype::fp32) return;
        const int64_t stride = update_.stride;
        widened_.reset(new float[size_t(sorted_.batch_ * stride)]);
        const auto as = [&](auto *from) {
            on_threads(update_.threads, sorted_.batch_, [&](int64_t sample) {
                for (int64_t i = sample * stride; i < (sample + 1) * stride; ++i) widened_[i] = widened(from[i]);
            });
        };
        if (update_.gradients_dtype == Dtype::fp16) as(reinterpret_cast<const Half *>(update_.gradients));
        else as(reinterpret_cast<const Brain *>(update_.gradients));
        gradients_ = widened_.get();
    }

    void plan() {
        for (int64_t table = 0; table < sorted_.tables(); ++table) {
            const auto *const runs = reinterpret_cast<const int64_t *>(sorted_.of_table_[table].runs);
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

    // The buffers of one thread.
    struct Scratch {
        std::vector<const char *> gradients;  // the address of each occurrence's gradient, and some more
        std::vector<float> scales, sums;
        std::vector<int64_t> lengths, rows;   // the length and the row of each run
    };

    void work_on(const Unit &unit) {
        static thread_local Scratch scratch;
        const auto &of = sorted_.of_table_[unit.table];
        const int64_t dim = sorted_.tables_[unit.table].dim, *const runs = reinterpret_cast<const int64_t *>(of.runs);
        const int64_t first = unit.partial ? unit.begin : runs[unit.begin], end = unit.partial ? unit.end : runs[unit.end];
        const int64_t ahead = std::clamp<int64_t>(bytes_ahead / (4 * dim), 2, 64);
        find(of, first, end, ahead, scratch);
        const bool scaled = !of.scales.empty();
        const Pool pool = update_.isa->pool(Dtype::fp32, dim, scaled);
        const auto sum = [&](int64_t at, const int64_t *lengths, int64_t count, float *out) {
            pool({scratch.gradients.data() + at, scaled ? scratch.scales.data() + at : nullptr, lengths, count, dim, ahead,
                  reinterpret_cast<char *>(out), 4 * dim, false, false});
        };
        if (unit.partial) {
            const int64_t length = end - first;
            return sum(0, &length, 1, unit.partial);
        }
        const int64_t count = unit.end - unit.begin;
        const int64_t at_once = std::clamp<int64_t>(bytes_at_once / (4 * dim), 1, most_rows);
        scratch.lengths.resize(size_t(count));
        scratch.rows.resize(size_t(count + ahead));
        for (int64_t i = 0; i < count; ++i) {
            scratch.lengths[i] = runs[unit.begin + i + 1] - runs[unit.begin + i];
            scratch.rows[i] = of.row(runs[unit.begin + i]);
        }
        std::fill_n(scratch.rows.begin() + count, ahead, scratch.rows[count - 1]);
        for (int64_t i = 0; i < std::min(ahead, count); ++i) prefetch_row(unit.table, scratch.rows[i]);
        if (const UpdateRuns update_runs = update_.isa->update_runs(update_.rule, update_.dtype, dim, scaled))
            return update_runs({&update_.rule, &update_.tables[unit.table], scratch.gradients.data(),
                                scaled ? scratch.scales.data() : nullptr, scratch.lengths.data(), scratch.rows.data(),
                                count, ahead, ahead});
        scratch.sums.resize(size_t(at_once * dim));
        for (int64_t i = 0, at = 0; i < count; i += at_once) {
            const int64_t now = std::min(at_once, count - i);
            for (int64_t coming = i + ahead; coming < std::min(i + at_once + ahead, count); ++coming)
                prefetch_row(unit.table, scratch.rows[coming]);
            sum(at, scratch.lengths.data() + i, now, scratch.sums.data());
            apply(unit.table, unit.begin + i, scratch.rows.data() + i, now, scratch.sums.data());
            at = runs[unit.begin + i + now] - first;
        }
    }

    // Sums the segments of a run by a binary tree of adjacent segments.
    void finish(const LongRun &of) {
        const int64_t dim = sorted_.tables_[of.table].dim;
        for (int64_t step = 1; step < of.count; step *= 2)
            for (int64_t i = 0; i + step < of.count; i += 2 * step)
                for (int64_t d = 0; d < dim; ++d) of.partials[i * dim + d] += of.partials[(i + step) * dim + d];
        const auto &of_table = sorted_.of_table_[of.table];
        const int64_t row = of_table.row(of_table.runs[of.run]);
        apply(of.table, of.run, &row, 1, of.partials);
    }

    // Finds the addresses of the gradients of occurrences [first, end), and of `ahead` more gradients that are only
    // prefetched.
    void find(const SortedRows::OfTable &of, int64_t first, int64_t end, int64_t ahead, Scratch &scratch) const {
        scratch.gradients.resize(size_t(end - first + ahead));
        const uint32_t batch = uint32_t(sorted_.batch_);
        const float *const of_first_slot = gradients_ + sorted_.slots_[of.slots[0]].column;
        for (int64_t i = first; i < end; ++i) {
            const uint64_t payload = of.payload(i);
            const uint32_t bag = of.bags.empty() ? uint32_t(payload) : of.bags[payload];
            const float *const gradient =
                bag < batch ? of_first_slot + bag * update_.stride  // no division: most tables have one slot
                            : gradients_ + bag % batch * update_.stride + sorted_.slots_[of.slots[bag / batch]].column;
            scratch.gradients[i - first] = reinterpret_cast<const char *>(gradient);
        }
        std::fill_n(scratch.gradients.begin() + (end - first), ahead, reinterpret_cast<const char *>(gradients_));
        if (of.scales.empty()) return;
        scratch.scales.resize(size_t(end - first));
        for (int64_t i = first; i < end; ++i) scratch.scales[i - first] = of.scales[of.payload(i)];
    }

    // Prefetches into the L2 cache, which can have more outstanding lines than L1. Inlined for the reason in prefetch.hpp.
    [[gnu::always_inline]] inline void prefetch_row(int64_t table, int64_t row) const {
        const RowMemory &memory = update_.tables[table];
        const int64_t dim = sorted_.tables_[table].dim, bytes = dim * bytes_of(update_.dtype);
        const Rule rule = update_.rule.rule;
        if (rule == Rule::gradient || rule == Rule::squares) return;
        prefetch<2>(memory.weight + row * bytes, bytes);
        const bool by_row = rule == Rule::rowwise_adagrad;
        if (memory.first) prefetch<2>(memory.first + row * (by_row ? 1 : dim), by_row ? 4 : 4 * dim);
        if (memory.second && rule == Rule::adam) prefetch<2>(memory.second + row * dim, 4 * dim);
    }

    // Applies the rule to `count` rows. They belong to consecutive runs, of which `run` is the first.
    void apply(int64_t table, int64_t run, const int64_t *rows, int64_t count, float *g) {
        int64_t runs[most_rows];
        std::iota(runs, runs + count, run);
        const bool by_run = update_.sparse || update_.rule.rule == Rule::squares;
        const int64_t dim = sorted_.tables_[table].dim;
        const int64_t skipped =
            update_rows_({&update_.rule, &update_.tables[table], rows, by_run ? runs : rows, count, dim, g});
        if (skipped > 0) skipped_.fetch_add(skipped, std::memory_order_relaxed);
    }

    const SortedRows &sorted_;
    const Update &update_;
    const UpdateRows update_rows_;
    const float *gradients_ = nullptr;
    std::unique_ptr<float[]> widened_;
    std::vector<Unit> units_;
    std::vector<LongRun> long_runs_;
    std::vector<std::unique_ptr<float[]>> partials_;
    std::atomic<int64_t> skipped_{0};
};

int64_t SortedRows::update(const Update &update) const { return RowUpdater(*this, update).run(); }

namespace {

template <class T>
void gradients_of_weights_as(const std::vector<BackwardSlot> &slots, const std::vector<BackwardTable> &tables,
                             const SparseInput &in, const std::vector<const char *> &weights, const T *gradients,
                             int64_t stride, float *out, int threads) {
    // Slots of one key write the same elements. So one thread processes all slots of a key, in order.
    std::vector<int64_t> keys;
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
                    const int64_t row =
                        in.values_bits == 32 ? row_of<int32_t>(in, i, rows) : row_of<int64_t>(in, i, rows);
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
