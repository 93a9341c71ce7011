// Embedding pooling fused with the all-to-all, on the CPU: each rank pools its tables' rows for the global batch and
// stores every pooled vector in the memory of the rank that owns the sample.
//
// After "GPU-initiated Fine-grained Overlap of Collective Communication with Computation", sections 3.2 and 3.3, and
// "Accelerating Multi-GPU Embedding Retrieval with PGAS-Style Communication for Deep Learning Recommendation
// Systems".
//
// Terms. A *slot* is one block of output columns (a feature pooled from a table of this rank). A *slice* is a run of
// up to `slice_size` slots of one sample that are adjacent in the output: contiguous bytes in a row of the
// destination. Every sample has the same slices. A *block* is a run of samples of one destination. Blocks are
// processed in groups of at most a few thousand samples, slot by slot, so a group visits each table once. Then the
// indices of a slot are read sequentially. A small table, and a large table's page table entries, stay in cache.
//
// Transports. `direct`: vectors are stored at their destination as they are summed. All stores, including
// cache-bypassing stores, are fenced before the call returns. After the call, the caller signals the readers. `put`:
// vectors for another rank are summed into a staging buffer of the thread. For each slice, the thread makes one
// contiguous copy, a release fence, and one store of `epoch` to the slice's flag. A rank's own slices are summed in
// place, and their flags are set too.
//
//     Writer: slice bytes, then (release) flags[(sample - batch_starts[dest]) * slices_per_sample + slice].
//     Reader: `wait_flags` acquires every flag, then the rows are plain memory.
//     Reuse: flags only grow (an epoch per call); the rows may be written again once their reader has released them.
#pragma once
#include <atomic>
#include <cstdint>
#include <vector>

#include "pooling.hpp"
#include "signal.hpp"

namespace weft {

enum class Transport : int { direct = 0, put = 1 };
enum class Bounds : int { none = 0, warning = 1, fatal = 2 };

struct Slot {
    const char *weight;
    int64_t rows, dim, key, column;  // key: the block of `batch` offsets; column: first output column, in elements
    bool mean;
};

struct Slice {
    int64_t first_slot, slots, column, width;  // column and width in elements
};

// A record of one thread's work. kind 0: computation, no bytes leave the rank. kind 1: `bytes` were stored or copied to
// another rank. Times are nanoseconds of CLOCK_MONOTONIC.
struct Event {
    int64_t kind, thread, start_ns, end_ns, bytes;
};

struct EmbeddingCall {
    std::vector<Slot> slots;  // this rank's slots, in column order
    const void *values;
    int values_bits;
    int64_t n_values;
    const void *offsets;
    int offsets_bits;
    const float *per_sample_weights;  // null: all 1
    std::vector<int64_t> batch_starts;  // W + 1
    int rank;
    std::vector<char *> outputs;  // W; null: do not pool this rank's samples
    int64_t output_stride;        // elements
    Dtype dtype;
    Transport transport;
    bool remote_first;
    int64_t slice_size;
    bool hash;
    Bounds bounds;
    int threads;
    std::vector<std::atomic<int64_t> *> flags;  // put: [W], this rank's block of flags at each rank
    int64_t epoch;
    Event *events;  // may be null
    int64_t event_capacity;
    const Isa *isa;
};

// The position of the first bad index, in the order (slot, sample, position in the bag).
struct BadIndex {
    int64_t slot = -1, sample = -1, position = -1, value = 0;
    bool before(const BadIndex &other) const;
};

struct Outcome {
    int64_t bad = 0;
    BadIndex first_bad;
    int64_t copies = 0, flags = 0;  // put only
    int64_t events = 0;             // may exceed the capacity; events beyond it are not recorded
};

std::vector<Slice> slices_of(const std::vector<Slot> &slots, int64_t slice_size);
Outcome embedding_all_to_all(const EmbeddingCall &call);

// Waits until all `count` flags have reached `epoch` (compared as a signed difference). After a timeout, `index` and
// `found` are the position and the value of the first late flag.
Wait wait_flags(const std::atomic<int64_t> *flags, int64_t count, int64_t epoch, double deadline_s,
                const std::atomic<int64_t> *failed, int64_t *index, int64_t *found);

}  // namespace weft
