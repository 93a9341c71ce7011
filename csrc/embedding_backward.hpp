// The backward of embedding_all_to_all on CPU. For every row that a batch has read, the gradients are summed in a fixed
// order, and an optimizer updates the row.
//
//     g[row] = factor * sum over occurrences of row:  weight / (length of the bag, for a mean) * grad[sample, columns]
//
// Terms. An *occurrence* is one id of one bag. A *run* is all occurrences of one row of a table. A *segment* is a part of
// a long run.
//
// The order of sums does not depend on the number of threads or ranks. Occurrences of a row are summed in fp32, in the
// order (slot, sample, place in the bag). Samples are numbered in the global batch, so source ranks are in order. A run
// longer than `segment_occurrences` is split into segments of this length. The sums of segments are added in a binary
// tree, neighbours first. So many threads can share the work of a row that occurs a million times.
//
// Forward reads zeros for out-of-range ids, and backward ignores them.
//
// The loops over columns are compiled for each instruction set (embedding_update.hpp).
#pragma once
#include <cstdint>
#include <memory>
#include <utility>
#include <vector>

#include "embedding_update.hpp"
#include "pooling.hpp"

namespace weft {

constexpr int64_t segment_occurrences = 512;

struct BackwardSlot {
    int64_t table, key, column;  // key: the block of `batch` offsets; column: first column of the gradient, in elements
    bool mean;
};

struct BackwardTable {
    int64_t rows, dim;
};

// The sparse input of one call. `SortedRows` copies what it needs and keeps no pointer to this struct.
struct SparseInput {
    const void *values;
    int values_bits;
    int64_t n_values;
    const void *offsets;
    int offsets_bits;
    const float *per_sample_weights;  // null: all one
    int64_t batch;
    bool hash;
};

struct Update {
    std::vector<RowMemory> tables;
    const char *gradients;  // [batch, stride]
    int64_t stride;         // elements
    Dtype gradients_dtype;
    Dtype dtype;            // the dtype of the tables, and of the output of the rule `gradient`
    UpdateRule rule;
    bool sparse;            // for the rule `gradient`: out has one row per run, ascending; otherwise one per table row
    const Isa *isa;
    int threads;
};

// An array of words, in memory that an earlier array may have used. Each new page would cost a page fault; for the keys of a
// sort, these faults would take half of its time. The process keeps the largest freed array for reuse, up to 1 GiB.
class ReusedWords {
  public:
    ReusedWords() = default;
    explicit ReusedWords(size_t size);
    ReusedWords(ReusedWords &&other) noexcept { *this = std::move(other); }
    ReusedWords &operator=(ReusedWords &&other) noexcept {
        std::swap(words_, other.words_);
        std::swap(size_, other.size_);
        return *this;
    }
    ~ReusedWords();

    uint64_t *data() const { return words_.get(); }

  private:
    std::unique_ptr<uint64_t[]> words_;
    size_t size_ = 0;
};

// All occurrences of one call's ids, sorted by table, row, slot, sample and place in the bag.
class SortedRows {
  public:
    SortedRows(std::vector<BackwardSlot> slots, std::vector<BackwardTable> tables, const SparseInput &input, int threads);
    SortedRows(const SortedRows &) = delete;

    int64_t tables() const { return int64_t(tables_.size()); }
    int64_t runs(int64_t table) const { return of_table_[table].run_count; }
    // The distinct rows, ascending.
    void rows(int64_t table, int64_t *out) const;
    // Applies the update. Returns the number of skipped rows.
    int64_t update(const Update &update) const;

  private:
    struct OfTable {
        int payload_bits = 0;
        int64_t given = 0, count = 0;      // ids; occurrences: ids within range
        uint64_t *keys = nullptr;          // row << payload_bits | payload, ascending
        // The payload of a key. With per-sample weights, the number of the occurrence, whose bag is in `bags`.
        // Otherwise, the number of the bag.
        std::vector<uint32_t> bags;        // number of the slot within the table * batch + sample
        std::vector<float> scales;         // per payload; empty: all 1
        uint64_t *runs = nullptr;          // start of each run in `keys`, then the end
        int64_t run_count = 0;
        std::vector<int64_t> slots;        // numbers of this table's slots

        int64_t row(int64_t i) const { return int64_t(keys[i] >> payload_bits); }
        uint64_t payload(int64_t i) const { return keys[i] & ((uint64_t(1) << payload_bits) - 1); }
    };
    friend class RowUpdater;

    void sort(int64_t table, const SparseInput &input);
    template <class Index> void sort_as(int64_t table, const SparseInput &input);

    std::vector<BackwardSlot> slots_;
    std::vector<BackwardTable> tables_;
    std::vector<OfTable> of_table_;
    ReusedWords words_;  // keys and runs of all tables
    int64_t batch_;
};

// Computes the gradients of per-sample weights: out[i] = sum over slots that read value i of <grad[sample, columns],
// row>. For a mean, the result is divided by the bag's length. weights: the address of each table. Writes every element
// of out, [n_values].
void gradients_of_weights(const std::vector<BackwardSlot> &slots, const std::vector<BackwardTable> &tables,
                          const SparseInput &input, const std::vector<const char *> &weights, const char *gradients,
                          int64_t stride, Dtype dtype, float *out, int threads);

}  // namespace weft
