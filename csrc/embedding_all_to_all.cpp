#include "embedding_all_to_all.hpp"

#include <time.h>

#include <algorithm>
#include <cstring>
#include <exception>
#include <memory>
#include <span>
#include <stdexcept>
#include <string>
#include <thread>
#include <tuple>

#include "prefetch.hpp"
#include "spin.hpp"

namespace weft {
namespace {

constexpr int64_t line = 64;
// The number of row addresses to collect before their rows are summed. So many addresses fit into the L2 cache. A smaller
// number would be slower, because no rows are prefetched at the end of each such batch of addresses.
constexpr int64_t rows_at_once = 4096;
// The smallest number of samples to pool slot by slot. Large blocks keep a small table's rows, and the page table
// entries of a large table, in the caches. Small blocks are sent earlier.
constexpr int64_t least_block_samples = 32;
constexpr int64_t most_block_samples = 4096;
constexpr int64_t staging_bytes = 4 << 20;  // the maximum per thread
// The prefetch distance, which is shorter for a table that may fit into the L2 cache.
constexpr int64_t bytes_ahead = 16 << 10;
constexpr int64_t near_bytes_ahead = 4 << 10;
constexpr int64_t near_table_bytes = 1 << 20;
constexpr int64_t stream_from_bytes = 8 << 20;  // a call that writes this much bypasses the caches

int64_t now_ns() {
    timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return int64_t(t.tv_sec) * 1'000'000'000 + t.tv_nsec;
}

// Orders non-temporal stores before later stores. Release semantics order ordinary stores only.
void release_fence() {
#ifdef __SSE2__
    __builtin_ia32_sfence();
#endif
    std::atomic_thread_fence(std::memory_order_release);
}

int64_t at(const void *array, int bits, int64_t i) {
    return bits == 32 ? static_cast<const int32_t *>(array)[i] : static_cast<const int64_t *>(array)[i];
}

const void *element(const void *array, int bits, int64_t i) {
    return static_cast<const char *>(array) + i * (bits / 8);
}

bool aligned(const char *p) { return reinterpret_cast<uintptr_t>(p) % line == 0; }

struct AlignedFree {
    void operator()(void *p) const { ::operator delete[](p, std::align_val_t(line)); }
};
using Buffer = std::unique_ptr<char[], AlignedFree>;
Buffer aligned_buffer(int64_t bytes) {
    return Buffer(static_cast<char *>(::operator new[](size_t(std::max<int64_t>(bytes, 1)), std::align_val_t(line))));
}

struct Block {
    int64_t destination, first, count;
    int64_t in_group;  // the number of samples of its group that precede it
};

// The parameters of the whole call, shared by its threads.
struct Plan {
    const EmbeddingCall &call;
    int64_t size;  // bytes of an element
    int64_t batch, stride_bytes;
    std::vector<Slice> slices;
    std::vector<Block> blocks;  // in the order of work
    std::vector<int64_t> group_ends;  // the end of each group of blocks that are pooled together
    std::vector<Pool> pools;    // per slot
    FindRows find_rows;
    bool checked;
    int64_t block_samples;  // the largest number of samples in a block
    int64_t written = 0, widest_row = 0, widest_slice = 0, most_ahead = 0;
    std::vector<bool> streams;  // for each destination: its rows are line-aligned and the call writes much
    std::atomic<int64_t> next_group{0}, next_event{0};

    explicit Plan(const EmbeddingCall &c)
        : call(c), size(bytes_of(c.dtype)), batch(c.batch_starts.back()), stride_bytes(c.output_stride * size),
          slices(slices_of(c.slots, c.slice_size)), checked(c.bounds == Bounds::warning && !c.hash) {
        find_rows = c.isa->find_rows(c.values_bits, c.hash, checked);
        for (const Slot &slot : c.slots) {
            pools.push_back(c.isa->pool(c.dtype, slot.dim, c.per_sample_weights != nullptr));
            widest_row = std::max(widest_row, slot.dim * size);
            written += batch * slot.dim * size;
            most_ahead = std::max(most_ahead, ahead(slot));
        }
        for (const Slice &slice : slices) widest_slice = std::max(widest_slice, slice.width * size);
        const int64_t world = int64_t(c.outputs.size());
        for (char *output : c.outputs)
            streams.push_back(written >= stream_from_bytes && stride_bytes % line == 0 && aligned(output));
        // With a single thread, larger blocks are faster, because the thread works longer on one table and walks the
        // page table less often (measured on 48 tables of 64 MB: blocks of 4096 samples are 2.3x as fast as blocks of
        // 256).
        const int64_t share = c.threads == 1 ? batch : batch / (4 * c.threads);
        block_samples = std::clamp(share, least_block_samples, most_block_samples);
        if (c.transport == Transport::put && widest_slice > 0)
            block_samples = std::min(block_samples, staging_bytes / widest_slice);
        block_samples = std::max<int64_t>(block_samples, 1);
        int64_t room = block_samples;
        for (int64_t i = 0; i < world; ++i) {
            const int64_t d = c.remote_first ? (c.rank + 1 + i) % world : i;
            if (!c.outputs[d]) continue;  // another call pools these samples
            for (int64_t first = c.batch_starts[d]; first < c.batch_starts[d + 1];) {
                const int64_t count = std::min(room, c.batch_starts[d + 1] - first);
                blocks.push_back({d, first, count, block_samples - room});
                first += count;
                if ((room -= count) > 0) continue;
                group_ends.push_back(int64_t(blocks.size()));
                room = block_samples;
            }
        }
        if (room < block_samples) group_ends.push_back(int64_t(blocks.size()));
    }

    int64_t ahead(const Slot &slot) const {
        const int64_t row_bytes = slot.dim * size;
        const bool near = slot.rows * row_bytes <= near_table_bytes;
        return std::clamp<int64_t>((near ? near_bytes_ahead : bytes_ahead) / row_bytes, 2, 64);
    }
};

// One thread's work: the thread takes blocks in order until none is left.
class Worker {
  public:
    Worker(Plan &plan, int thread)
        : plan_(plan), call_(plan.call), thread_(thread), zero_row_(aligned_buffer(plan.widest_row)) {
        std::memset(zero_row_.get(), 0, size_t(plan.widest_row));
        if (call_.transport == Transport::put) staging_ = aligned_buffer(plan.block_samples * staged_stride());
        addresses_.resize(size_t(rows_at_once + plan.most_ahead));
        lengths_.resize(size_t(rows_at_once + plan.block_samples));
    }

    void work() {
        const int64_t groups = int64_t(plan_.group_ends.size());
        for (int64_t g; (g = plan_.next_group.fetch_add(1, std::memory_order_relaxed)) < groups;)
            work_on({plan_.blocks.data() + (g > 0 ? plan_.group_ends[g - 1] : 0),
                     plan_.blocks.data() + plan_.group_ends[g]});
        flush();
        release_fence();
    }

    Outcome outcome;

  private:
    // Bags of one slot whose row addresses have been collected, but whose rows have not been summed.
    struct Run {
        int64_t slot;
        const int64_t *lengths;
        int64_t bags, first_address, begin, values, sample;  // begin: first value; sample: of the first bag
        char *out;
        int64_t out_stride;
        bool one_each, stream;
    };

    int64_t staged_stride() const { return (plan_.widest_slice + line - 1) / line * line; }

    // The blocks of a group are pooled together slot by slot, so that each table is visited once.
    void work_on(std::span<const Block> group) {
        const bool put = call_.transport == Transport::put;
        int64_t leaving = 0;  // the number of samples for other ranks
        for (const Block &block : group) leaving += block.destination != call_.rank ? block.count : 0;
        for (int64_t j = 0; j < int64_t(plan_.slices.size()); ++j) {
            const Slice &slice = plan_.slices[j];
            const int64_t start = call_.events ? now_ns() : 0, bytes = slice.width * plan_.size;
            for (int64_t s = slice.first_slot; s < slice.first_slot + slice.slots; ++s) {
                const int64_t column = (call_.slots[s].column - slice.column) * plan_.size;
                for (const Block &block : group) {
                    if (put && block.destination != call_.rank)
                        find(s, block, staged(block) + column, staged_stride(), false);
                    else
                        find(s, block, target(block, slice) + column, plan_.stride_bytes, plan_.streams[block.destination]);
                }
            }
            if (put || call_.events) flush();
            if (call_.events) record(leaving > 0 && !put, start, now_ns(), bytes * leaving);
            if (!put) continue;
            for (const Block &block : group) {
                const bool remote = block.destination != call_.rank;
                const int64_t summed = call_.events ? now_ns() : 0;
                if (remote)
                    copy_out(target(block, slice), staged(block), bytes, block.count, plan_.streams[block.destination]);
                raise_flags(block, j);
                if (call_.events && remote) record(true, summed, now_ns(), bytes * block.count);
            }
        }
    }

    // Returns the address, in the destination's output, of the slice of the block's first sample.
    char *target(const Block &block, const Slice &slice) const {
        return call_.outputs[block.destination] +
               (block.first - call_.batch_starts[block.destination]) * plan_.stride_bytes + slice.column * plan_.size;
    }
    // Returns the address of this slice in the thread's staging memory, where `put` sums slices for other ranks.
    char *staged(const Block &block) const { return staging_.get() + block.in_group * staged_stride(); }

    void find(int64_t s, const Block &block, char *out, int64_t out_stride, bool stream) {
        const Slot &slot = call_.slots[s];
        stream = stream && slot.dim * plan_.size % line == 0 && aligned(out);
        if (bags_ >= rows_at_once) flush();
        const int64_t *lengths = lengths_.data() + bags_;
        const Bags bags =
            call_.isa->read_bags(element(call_.offsets, call_.offsets_bits, slot.key * plan_.batch + block.first),
                                 call_.offsets_bits, block.count, call_.n_values, lengths_.data() + bags_);
        const int64_t bags_after = bags_ + block.count;
        if (pending_ + bags.values > rows_at_once) flush();
        for (int64_t done = 0, begin = bags.begin; done < block.count;) {
            int64_t count = block.count - done, values = bags.begin + bags.values - begin;
            if (values > rows_at_once)  // as many bags as fit, at least one
                for (count = 0, values = 0; count == 0 || values + lengths[done + count] <= rows_at_once; ++count)
                    values += lengths[done + count];
            add({s, lengths + done, count, pending_, begin, values, block.first + done, out + done * out_stride,
                 out_stride, bags.one_each, stream});
            done += count;
            begin += values;
            if (done < block.count) flush();
        }
        bags_ = bags_after;  // `flush` above does not overwrite these lengths
    }

    void add(const Run &run) {
        const Slot &slot = call_.slots[run.slot];
        if (int64_t(addresses_.size()) < pending_ + run.values + plan_.most_ahead)
            addresses_.resize(size_t(pending_ + run.values + plan_.most_ahead));
        const int64_t bad = plan_.find_rows({element(call_.values, call_.values_bits, run.begin), run.values,
                                             slot.weight, slot.rows, slot.dim * plan_.size, zero_row_.get(),
                                             addresses_.data() + pending_});
        if (bad > 0) note_bad(bad, run);
        runs_.push_back(run);
        pending_ += run.values;
    }

    // Sums the rows whose addresses have been collected.
    void flush() {
        if (runs_.empty()) return;
        std::fill_n(addresses_.begin() + pending_, plan_.most_ahead, zero_row_.get());
        const Slot &first = call_.slots[runs_[0].slot];
        for (int64_t i = 0; i < std::min(pending_, plan_.ahead(first)); ++i)
            prefetch<1>(addresses_[i], first.dim * plan_.size);
        for (const Run &run : runs_) {
            const Slot &slot = call_.slots[run.slot];
            plan_.pools[run.slot]({addresses_.data() + run.first_address,
                                   call_.per_sample_weights ? call_.per_sample_weights + run.begin : nullptr,
                                   run.one_each ? nullptr : run.lengths, run.bags, slot.dim, plan_.ahead(slot), run.out,
                                   run.out_stride, slot.mean, run.stream});
        }
        runs_.clear();
        pending_ = bags_ = 0;
    }

    void copy_out(char *target, const char *staged, int64_t bytes, int64_t samples, bool stream) {
        stream = stream && bytes % line == 0 && aligned(target);
        for (int64_t i = 0; i < samples; ++i) {
            const char *from = staged + i * staged_stride();
            if (stream) call_.isa->stream_copy(target + i * plan_.stride_bytes, from, bytes);
            else std::memcpy(target + i * plan_.stride_bytes, from, size_t(bytes));
        }
        outcome.copies += samples;
    }

    void raise_flags(const Block &block, int64_t slice) {
        release_fence();
        const int64_t per_sample = int64_t(plan_.slices.size());
        std::atomic<int64_t> *flags =
            call_.flags[block.destination] + (block.first - call_.batch_starts[block.destination]) * per_sample + slice;
        for (int64_t i = 0; i < block.count; ++i) flags[i * per_sample].store(call_.epoch, std::memory_order_release);
        outcome.flags += block.count;
    }

    void record(bool left, int64_t start, int64_t end, int64_t bytes) {
        const int64_t i = plan_.next_event.fetch_add(1, std::memory_order_relaxed);
        if (i < call_.event_capacity) call_.events[i] = {left, thread_, start, end, left ? bytes : 0};
    }

    void note_bad(int64_t bad, const Run &run) {
        outcome.bad += bad;
        int64_t value_at = run.begin;
        for (int64_t b = 0; b < run.bags; ++b)
            for (int64_t i = 0; i < run.lengths[b]; ++i, ++value_at) {
                const int64_t value = at(call_.values, call_.values_bits, value_at);
                if (uint64_t(value) < uint64_t(call_.slots[run.slot].rows)) continue;
                const BadIndex here{run.slot, run.sample + b, i, value};
                if (here.before(outcome.first_bad)) outcome.first_bad = here;
                return;
            }
    }

    Plan &plan_;
    const EmbeddingCall &call_;
    const int64_t thread_;
    Buffer zero_row_, staging_;
    std::vector<const char *> addresses_;
    std::vector<int64_t> lengths_;
    std::vector<Run> runs_;
    int64_t pending_ = 0, bags_ = 0;  // the numbers of addresses and of lengths in use
};

// Counts the out-of-range indices of the whole call, and finds the first of them, before any output is written.
Outcome refuse_bad(const EmbeddingCall &call) {
    Outcome outcome;
    const int64_t batch = call.batch_starts.back();
    for (int64_t s = 0; s < int64_t(call.slots.size()); ++s) {
        const Slot &slot = call.slots[s];
        auto offset = [&](int64_t b) {
            return std::clamp<int64_t>(at(call.offsets, call.offsets_bits, slot.key * batch + b), 0, call.n_values);
        };
        const int64_t begin = offset(0), end = std::max(begin, offset(batch));
        const int64_t bad = call.isa->count_bad(element(call.values, call.values_bits, begin), call.values_bits,
                                                end - begin, slot.rows);
        outcome.bad += bad;
        if (bad == 0 || outcome.first_bad.slot >= 0) continue;
        int64_t i = begin, sample = 0;
        while (uint64_t(at(call.values, call.values_bits, i)) < uint64_t(slot.rows)) ++i;
        while (sample + 1 < batch && offset(sample + 1) <= i) ++sample;
        outcome.first_bad = {s, sample, i - offset(sample), at(call.values, call.values_bits, i)};
    }
    return outcome;
}

}  // namespace

bool BadIndex::before(const BadIndex &other) const {
    return other.slot < 0 || std::tie(slot, sample, position) < std::tie(other.slot, other.sample, other.position);
}

std::vector<Slice> slices_of(const std::vector<Slot> &slots, int64_t slice_size) {
    std::vector<Slice> slices;
    for (int64_t s = 0; s < int64_t(slots.size()); ++s) {
        const Slot &slot = slots[s];
        Slice *last = slices.empty() ? nullptr : &slices.back();
        if (last && last->slots < slice_size && last->column + last->width == slot.column) {
            last->slots += 1;
            last->width += slot.dim;
        } else {
            slices.push_back({s, 1, slot.column, slot.dim});
        }
    }
    return slices;
}

Outcome embedding_all_to_all(const EmbeddingCall &call) {
    if (call.bounds == Bounds::fatal && !call.hash) {
        const Outcome refused = refuse_bad(call);
        if (refused.bad > 0) return refused;
    }
    Plan plan(call);
    std::vector<std::unique_ptr<Worker>> workers;
    for (int t = 0; t < call.threads; ++t) workers.push_back(std::make_unique<Worker>(plan, t));
    std::vector<std::exception_ptr> errors(size_t(call.threads));
    auto work = [&](int t) {
        try {
            workers[t]->work();
        } catch (...) {
            errors[t] = std::current_exception();
        }
    };
    {
        std::vector<std::jthread> others;
        for (int t = 1; t < call.threads; ++t) others.emplace_back(work, t);
        work(0);
    }
    Outcome total;
    for (int t = 0; t < call.threads; ++t) {
        if (errors[t]) std::rethrow_exception(errors[t]);
        const Outcome &part = workers[t]->outcome;
        total.bad += part.bad;
        if (part.first_bad.slot >= 0 && part.first_bad.before(total.first_bad)) total.first_bad = part.first_bad;
        total.copies += part.copies;
        total.flags += part.flags;
    }
    total.events = plan.next_event.load();
    return total;
}

Wait wait_flags(const std::atomic<int64_t> *flags, int64_t count, int64_t epoch, double deadline_s,
                const std::atomic<int64_t> *failed, int64_t *index, int64_t *found) {
    const double until = now_s() + deadline_s;
    const auto reached = [&] { return (*found = flags[*index].load(std::memory_order_acquire)) - epoch >= 0; };
    *found = epoch;
    for (*index = 0; *index < count; ++*index) {
        if (spin_until(reached)) continue;
        // Flags are plain stores, so nothing wakes this thread. It sleeps for growing times, so that a waiting rank leaves its core
        // to a working rank.
        for (int64_t sleep_ns = 10'000; !reached(); sleep_ns = std::min<int64_t>(200'000, sleep_ns + 10'000)) {
            if (failed && failed->load(std::memory_order_acquire) != 0) return Wait::failed;
            if (now_s() > until) return Wait::deadline;
            const timespec sleep{0, sleep_ns};
            nanosleep(&sleep, nullptr);
        }
    }
    return Wait::reached;
}

}  // namespace weft
