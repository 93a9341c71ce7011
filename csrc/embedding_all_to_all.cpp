#include "embedding_all_to_all.hpp"

#include <time.h>

#include <algorithm>
#include <cstring>
#include <exception>
#include <memory>
#include <stdexcept>
#include <string>
#include <thread>
#include <tuple>

namespace weft {
namespace {

constexpr int64_t line = 64;
constexpr int64_t rows_at_once = 4096;   // addresses found before their rows are summed: they stay in the L2 cache
constexpr int64_t block_samples = 64;    // samples worked on slot by slot
constexpr int64_t staging_bytes = 256 << 10;
constexpr int64_t bytes_ahead = 8 << 10;  // prefetch distance
constexpr int64_t stream_from_bytes = 8 << 20;  // outputs at least this large bypass the caches

int64_t now_ns() {
    timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return int64_t(t.tv_sec) * 1'000'000'000 + t.tv_nsec;
}

// Orders cache-bypassing stores before whatever follows, and ordinary ones by the release.
void release_fence() {
#ifdef __SSE2__
    __builtin_ia32_sfence();
#endif
    std::atomic_thread_fence(std::memory_order_release);
}

int64_t at(const void *array, int bits, int64_t i) {
    return bits == 32 ? static_cast<const int32_t *>(array)[i] : static_cast<const int64_t *>(array)[i];
}

void prefetch_bytes(const void *from, int64_t bytes) {
    for (int64_t i = 0; i < bytes; i += line) __builtin_prefetch(static_cast<const char *>(from) + i);
}

struct AlignedFree {
    void operator()(void *p) const { ::operator delete[](p, std::align_val_t(line)); }
};
using Buffer = std::unique_ptr<char[], AlignedFree>;
Buffer aligned_buffer(int64_t bytes) {
    return Buffer(static_cast<char *>(::operator new[](size_t(std::max<int64_t>(bytes, 1)), std::align_val_t(line))));
}

struct Block {
    int64_t destination, first, count;
};

// What is fixed for the whole call, shared by its threads.
struct Plan {
    const EmbeddingCall &call;
    int64_t size;  // bytes of an element
    int64_t batch, stride_bytes;
    std::vector<Slice> slices;
    std::vector<Block> blocks;  // in working order
    std::vector<Pool> pools;    // per slot
    FindRows find_rows;
    bool checked;
    int64_t widest_row = 0, widest_slice = 0, most_ahead = 0;
    std::vector<bool> streams;  // per destination: rows are line-aligned there and the output is large
    std::atomic<int64_t> next_block{0}, next_event{0};

    explicit Plan(const EmbeddingCall &c)
        : call(c), size(bytes_of(c.dtype)), batch(c.batch_starts.back()), stride_bytes(c.output_stride * size),
          slices(slices_of(c.slots, c.slice_size)), checked(c.bounds == Bounds::warning && !c.hash) {
        find_rows = c.isa->find_rows(c.values_bits, c.hash, checked);
        for (const Slot &slot : c.slots) {
            pools.push_back(c.isa->pool(c.dtype, slot.dim, c.per_sample_weights != nullptr));
            widest_row = std::max(widest_row, slot.dim * size);
            most_ahead = std::max(most_ahead, ahead(slot));
        }
        for (const Slice &slice : slices) widest_slice = std::max(widest_slice, slice.width * size);
        const int64_t world = int64_t(c.outputs.size());
        for (int64_t d = 0; d < world; ++d) {
            const int64_t rows = c.batch_starts[d + 1] - c.batch_starts[d];
            streams.push_back(stride_bytes % line == 0 && reinterpret_cast<uintptr_t>(c.outputs[d]) % line == 0 &&
                              rows * stride_bytes >= stream_from_bytes);
        }
        int64_t samples = std::min(block_samples, batch / (4 * c.threads));
        if (c.transport == Transport::put && widest_slice > 0) samples = std::min(samples, staging_bytes / widest_slice);
        samples = std::max<int64_t>(samples, 1);
        for (int64_t i = 0; i < world; ++i) {
            const int64_t d = c.remote_first ? (c.rank + 1 + i) % world : i;
            for (int64_t first = c.batch_starts[d]; first < c.batch_starts[d + 1]; first += samples)
                blocks.push_back({d, first, std::min(samples, c.batch_starts[d + 1] - first)});
        }
    }

    int64_t ahead(const Slot &slot) const { return std::clamp<int64_t>(bytes_ahead / (slot.dim * size), 2, 64); }
};

// One thread's work: takes blocks in order until none is left.
class Worker {
  public:
    Worker(Plan &plan, int thread)
        : plan_(plan), call_(plan.call), thread_(thread), zero_row_(aligned_buffer(plan.widest_row)) {
        std::memset(zero_row_.get(), 0, size_t(plan.widest_row));
        if (call_.transport == Transport::put) staging_ = aligned_buffer(staged_samples() * staged_stride());
        addresses_.resize(size_t(rows_at_once + plan.most_ahead));
    }

    void work() {
        const int64_t blocks = int64_t(plan_.blocks.size());
        for (int64_t b; (b = plan_.next_block.fetch_add(1, std::memory_order_relaxed)) < blocks;) work_on(plan_.blocks[b]);
        flush();
        release_fence();
    }

    Outcome outcome;

  private:
    // Bags of one slot whose row addresses are found and whose rows are not summed yet.
    struct Run {
        int64_t slot, first_address, first_bag, bags;
        const float *weights;
        char *out;
        int64_t out_stride;
        bool stream;
    };

    int64_t staged_stride() const { return (plan_.widest_slice + line - 1) / line * line; }
    int64_t staged_samples() const { return plan_.blocks.empty() ? 0 : std::max_element(plan_.blocks.begin(), plan_.blocks.end(),
            [](const Block &a, const Block &b) { return a.count < b.count; })->count; }

    void work_on(const Block &block) {
        const bool remote = block.destination != call_.rank, put = call_.transport == Transport::put;
        char *rows = call_.outputs[block.destination] +
                     (block.first - call_.batch_starts[block.destination]) * plan_.stride_bytes;
        for (int64_t j = 0; j < int64_t(plan_.slices.size()); ++j) {
            const Slice &slice = plan_.slices[j];
            const int64_t start = call_.events ? now_ns() : 0, bytes = slice.width * plan_.size;
            char *target = rows + slice.column * plan_.size;
            const bool staged = put && remote;
            for (int64_t s = slice.first_slot; s < slice.first_slot + slice.slots; ++s) {
                const int64_t column = (call_.slots[s].column - slice.column) * plan_.size;
                find(s, block, (staged ? staging_.get() : target) + column, staged ? staged_stride() : plan_.stride_bytes,
                     !staged && plan_.streams[block.destination]);
            }
            if (put || call_.events) flush();
            const int64_t summed = call_.events ? now_ns() : 0;
            if (call_.events) record(remote && !put, start, summed, bytes * block.count);
            if (!put) continue;
            if (staged) copy_out(target, bytes, block.count, plan_.streams[block.destination]);
            raise_flags(block, j);
            if (call_.events && staged) record(true, summed, now_ns(), bytes * block.count);
        }
    }

    void find(int64_t s, const Block &block, char *out, int64_t out_stride, bool stream) {
        const Slot &slot = call_.slots[s];
        const int64_t offset = slot.key * plan_.batch + block.first, row_bytes = slot.dim * plan_.size;
        stream = stream && row_bytes % line == 0 && reinterpret_cast<uintptr_t>(out) % line == 0;
        // Offsets are taken as ascending and inside the values, whatever they hold: nothing else can be read.
        int64_t begin = std::clamp<int64_t>(at(call_.offsets, call_.offsets_bits, offset), 0, call_.n_values);
        for (int64_t done = 0; done < block.count;) {
            const int64_t first_bag = int64_t(lengths_.size()), room = std::max<int64_t>(rows_at_once - pending_, 1);
            int64_t end = begin, bags = 0;
            while (done + bags < block.count && end - begin < room) {
                const int64_t to = at(call_.offsets, call_.offsets_bits, offset + done + ++bags);
                const int64_t next = std::clamp(to, end, call_.n_values);
                lengths_.push_back(next - end);
                end = next;
            }
            const int64_t count = end - begin;
            if (int64_t(addresses_.size()) < pending_ + count + plan_.most_ahead)
                addresses_.resize(size_t(pending_ + count + plan_.most_ahead));
            const RowsJob job{static_cast<const char *>(call_.values) + begin * (call_.values_bits / 8), count, slot.weight,
                              slot.rows, row_bytes, zero_row_.get(), addresses_.data() + pending_};
            if (const int64_t bad = plan_.find_rows(job)) note_bad(bad, s, block.first + done, begin, first_bag, bags);
            runs_.push_back({s, pending_, first_bag, bags, call_.per_sample_weights ? call_.per_sample_weights + begin : nullptr,
                             out + done * out_stride, out_stride, stream});
            pending_ += count;
            done += bags;
            begin = end;
            if (pending_ >= rows_at_once || int64_t(lengths_.size()) >= rows_at_once) flush();
        }
    }

    // Sums what has been found.
    void flush() {
        if (runs_.empty()) return;
        std::fill_n(addresses_.begin() + pending_, plan_.most_ahead, zero_row_.get());
        const Slot &first = call_.slots[runs_[0].slot];
        for (int64_t i = 0; i < std::min(pending_, plan_.ahead(first)); ++i) prefetch_bytes(addresses_[i], first.dim * plan_.size);
        for (const Run &run : runs_) {
            const Slot &slot = call_.slots[run.slot];
            plan_.pools[run.slot]({addresses_.data() + run.first_address, run.weights, lengths_.data() + run.first_bag, run.bags,
                                   slot.dim, plan_.ahead(slot), run.out, run.out_stride, slot.mean, run.stream});
        }
        runs_.clear();
        lengths_.clear();
        pending_ = 0;
    }

    void copy_out(char *target, int64_t bytes, int64_t samples, bool stream) {
        stream = stream && bytes % line == 0 && reinterpret_cast<uintptr_t>(target) % line == 0;
        for (int64_t i = 0; i < samples; ++i) {
            const char *from = staging_.get() + i * staged_stride();
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

    void note_bad(int64_t bad, int64_t s, int64_t sample, int64_t begin, int64_t first_bag, int64_t bags) {
        outcome.bad += bad;
        for (int64_t b = 0; b < bags; ++b)
            for (int64_t i = 0; i < lengths_[first_bag + b]; ++i, ++begin) {
                const int64_t value = at(call_.values, call_.values_bits, begin);
                if (uint64_t(value) < uint64_t(call_.slots[s].rows)) continue;
                const BadIndex here{s, sample + b, i, value};
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
    int64_t pending_ = 0;  // addresses in use
};

// Counts the bad indices of the whole call before anything is written, and finds the first.
Outcome refuse_bad(const EmbeddingCall &call) {
    Outcome outcome;
    const int64_t batch = call.batch_starts.back();
    for (int64_t s = 0; s < int64_t(call.slots.size()); ++s) {
        const Slot &slot = call.slots[s];
        auto offset = [&](int64_t b) {
            return std::clamp<int64_t>(at(call.offsets, call.offsets_bits, slot.key * batch + b), 0, call.n_values);
        };
        const int64_t begin = offset(0), end = std::max(begin, offset(batch));
        const int64_t bad = call.isa->count_bad(static_cast<const char *>(call.values) + begin * (call.values_bits / 8),
                                                call.values_bits, end - begin, slot.rows);
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
        if (!slices.empty() && slices.back().slots < slice_size && slices.back().column + slices.back().width == slot.column) {
            slices.back().slots += 1;
            slices.back().width += slot.dim;
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
    const int64_t until = now_ns() + int64_t(1e9 * deadline_s);
    *index = 0;
    *found = epoch;
    for (int64_t idle = 0;;) {
        for (; *index < count; ++*index, idle = 0) {
            *found = flags[*index].load(std::memory_order_acquire);
            if (*found - epoch < 0) break;
        }
        if (*index >= count) return Wait::reached;
        if (failed && failed->load(std::memory_order_acquire) != 0) return Wait::failed;
        if (now_ns() > until) return Wait::deadline;
        // Nobody wakes us: flags are plain stores. Yield while it may be a matter of microseconds, then sleep a little
        // longer each time, so that a rank that waits leaves its core to the rank that works.
        if (++idle <= 64) {
            std::this_thread::yield();
        } else {
            const timespec sleep{0, std::min<int64_t>(200'000, 10'000 * (idle - 64))};
            nanosleep(&sleep, nullptr);
        }
    }
}

}  // namespace weft
