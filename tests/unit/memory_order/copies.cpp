// Tests that the stores of csrc/embedding_all_to_all.cpp and csrc/copy.cpp happen before the reads of other ranks, whether or
// not the stores bypass the caches.
#include "../../../csrc/copy.cpp"
#include "../../../csrc/embedding_all_to_all.cpp"

using namespace weft;
using model::world;

namespace {

constexpr int64_t dim = 16, slots_of_rank = 3, rows = 8, row_bytes = dim * 4;

// Stands for the loops of pooling. Each vector is one store.
void pool(const PoolJob &job) {
    for (int64_t bag = 0; bag < job.bags; ++bag) model::write(job.out + bag * job.out_stride_bytes, job.dim * 4, job.stream);
}
int64_t find_rows(const RowsJob &job) {
    std::fill_n(job.addresses, job.count, job.table);
    return 0;
}
Bags read_bags(const void *offsets, int, int64_t bags, int64_t, int64_t *lengths) {
    const auto *first = static_cast<const int64_t *>(offsets);
    for (int64_t b = 0; b < bags; ++b) lengths[b] = first[b + 1] - first[b];
    return {first[0], first[bags] - first[0], false};
}
void stream_copy(void *to, const void *, int64_t bytes) { model::write(to, bytes, true); }

const Isa isa = {"model", [](Dtype, int64_t, bool) -> Pool { return pool; }, [](int, bool, bool) -> FindRows { return find_rows; },
                 read_bags, [](const void *, int, int64_t, int64_t) -> int64_t { return 0; }, stream_copy};

struct Case {
    const char *name;
    Transport transport;
    bool streamed;
    int64_t batch;    // samples of each rank
    int64_t padding;  // elements between rows of the result
    int threads;
};

// Rank 0 pools three features for two ranks. Then a reader for each rank waits as the rank would, and reads the rank's result.
void call(const Case &c) {
    model::begin();
    const int64_t world_size = 2, batch = 2 * c.batch, columns = slots_of_rank * dim, stride = (columns + 15) / 16 * 16 + c.padding;
    std::vector<char> table(rows * row_bytes);
    std::vector<int64_t> offsets(size_t(slots_of_rank * batch + 1)), values(offsets.size());
    for (size_t i = 0; i < offsets.size(); ++i) offsets[i] = int64_t(i);
    std::vector<Buffer> results;
    EmbeddingCall call{};
    for (int64_t s = 0; s < slots_of_rank; ++s) call.slots.push_back({table.data(), rows, dim, s, s * dim, false});
    call.values = values.data(), call.values_bits = 64, call.n_values = int64_t(values.size());
    call.offsets = offsets.data(), call.offsets_bits = 64;
    call.batch_starts = {0, c.batch, batch};
    for (int64_t r = 0; r < world_size; ++r) {
        results.push_back(aligned_buffer(c.batch * stride * 4));
        call.outputs.push_back(results.back().get());
    }
    call.output_stride = stride, call.dtype = Dtype::fp32, call.transport = c.transport, call.remote_first = true;
    call.slice_size = 2, call.bounds = Bounds::none, call.threads = c.threads, call.epoch = 1, call.isa = &isa;
    const int64_t flags_of_rank = c.batch * int64_t(slices_of(call.slots, call.slice_size).size());
    std::vector<std::vector<std::atomic<int64_t>>> flags(world_size);
    for (auto &of_rank : flags) {
        of_rank = std::vector<std::atomic<int64_t>>(size_t(flags_of_rank));
        call.flags.push_back(of_rank.data());
    }
    embedding_all_to_all(call);
    std::atomic<int64_t> done{0};  // the signal of `direct`, set after the call
    done.store(1, std::memory_order_release);
    for (int64_t reader = 0; reader < world_size; ++reader) {
        std::jthread([&] {
            std::fill(model::me().clock.begin(), model::me().clock.end(), 0);  // another process: so far nothing happens before it
            int64_t index = 0, found = 0;
            if (c.transport == Transport::direct) done.load(std::memory_order_acquire);
            else if (wait_flags(flags[reader].data(), flags_of_rank, 1, 1.0, nullptr, &index, &found) != Wait::reached)
                return model::fault("flag " + std::to_string(index) + " is not raised");
            for (int64_t sample = 0; sample < c.batch; ++sample)
                model::read(results[reader].get() + sample * stride * 4, columns * 4,
                            "rank " + std::to_string(reader) + "'s sample " + std::to_string(sample));
        });
    }
}

// "Whoever has seen a signal that this thread stores from here on, relaxed or not, sees the bytes."
void two_dimensional_copy(int64_t pitch) {
    model::begin();
    std::vector<char> from(4 * 64), to(4 * 64);
    std::atomic<int64_t> signal{0};
    copy_2d(uintptr_t(to.data()), pitch, uintptr_t(from.data()), 64, 32, 4);
    signal.store(1, std::memory_order_relaxed);
    std::jthread([&] {
        std::fill(model::me().clock.begin(), model::me().clock.end(), 0);
        signal.load(std::memory_order_acquire);
        for (int row = 0; row < 4; ++row) model::read(to.data() + row * pitch, 32, "row " + std::to_string(row) + " of a copy");
    });
}

void say(const char *name, bool streamed) {
    if (streamed != (world.streams > 0)) model::fault(streamed ? "nothing bypasses the caches" : "something bypasses the caches");
    std::printf("%s%s%s\n", name, world.wrong.empty() ? "" : ": ", world.wrong.c_str());
    if (!world.wrong.empty()) std::exit(1);
}

}  // namespace

int main() {
    // Large calls bypass the caches if rows are aligned.
    constexpr int64_t few = 5, many = stream_from_bytes / (slots_of_rank * row_bytes) / 2 + 1;
    for (const Case &c : std::initializer_list<Case>{
             {"direct", Transport::direct, false, few, 0, 2},
             {"direct, streamed", Transport::direct, true, many, 0, 2},
             {"put", Transport::put, false, few, 0, 2},
             {"put, rows not aligned", Transport::put, false, many, 4, 1},
             {"put, streamed", Transport::put, true, many, 0, 2},
         }) {
        call(c);
        say(c.name, c.streamed);
    }
    two_dimensional_copy(64);
    say("copies of rows", false);
}
