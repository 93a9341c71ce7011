// Pooling of embedding rows on one CPU thread: the inner loops, compiled once per instruction set from one source
// (pooling_isa.cpp) and selected at run time.
//
//     out[b] = sum over i in bag b, in bag order, of weight[i] * row[i]        (mean: divided by the bag's length)
//
// Results are bitwise the same on every instruction set. Rows are widened to fp32. The sum starts at +0 and adds the
// rows in the bag's order. The product with a per-sample weight is rounded before it is added: fused multiply-add is
// not used, because some machines lack it. For a mean, the sum is divided by the length. fp16 and bf16 results are
// rounded to nearest, ties to even. The result of an empty bag is zeros.
//
// Pooling is split into two functions, so that fewer variants must be compiled. `FindRows` turns indices into row addresses;
// it has variants for the width of an index, the hash and the bounds check. `Pool` gets only addresses, so it can also
// prefetch rows of later bags and tables.
#pragma once
#include <cstdint>
#include <string_view>
#include <vector>

#include "embedding_update.hpp"
#include "sum.hpp"

namespace weft {

enum class Dtype : int { fp32 = 0, fp16 = 1, bf16 = 2 };
constexpr int64_t bytes_of(Dtype dtype) { return dtype == Dtype::fp32 ? 4 : 2; }

struct RowsJob {
    const void *values;      // first index of the run: int32 or int64
    int64_t count;           // number of indices
    const char *table;       // row 0
    int64_t rows;            // rows of the table
    int64_t row_bytes;
    const char *zero_row;    // the row that a bad index reads
    const char **addresses;  // out: one per index
};
// Returns the number of bad indices (always 0 for the versions without bounds check and with a hash).
using FindRows = int64_t (*)(const RowsJob &);

// Consecutive bags of one block of offsets. Offsets are clamped: they ascend and stay within the values, so that no
// other memory is read.
struct Bags {
    int64_t begin;   // first value
    int64_t values;  // number of values
    bool one_each;
};

struct PoolJob {
    const char *const *rows;    // addresses of the rows of all bags; `ahead` more follow, which are only prefetched
    const float *weights;       // one per row, or null
    const int64_t *lengths;     // rows of each bag; null: one row each
    int64_t bags;
    int64_t dim;                // elements of a row
    int64_t ahead;              // the prefetch distance in rows
    char *out;                  // first bag's vector
    int64_t out_stride_bytes;   // from one bag's vector to the next
    bool mean;
    bool stream;                // bypass the caches: `out`, its stride and the vector are multiples of 64 bytes
};
using Pool = void (*)(const PoolJob &);

// The versions for one instruction set.
struct Isa {
    const char *name;
    Pool (*pool)(Dtype dtype, int64_t dim, bool weighted);
    FindRows (*find_rows)(int index_bits, bool hash, bool checked);
    Bags (*read_bags)(const void *offsets, int index_bits, int64_t bags, int64_t values, int64_t *lengths);
    int64_t (*count_bad)(const void *indices, int index_bits, int64_t count, int64_t rows);
    void (*stream_copy)(void *to, const void *from, int64_t bytes);  // bypasses caches; `to` and bytes: multiples of 64
    UpdateRows (*update_rows)(Dtype tables);
    // Null if there is no such loop for the rule and the dimension.
    UpdateRuns (*update_runs)(const UpdateRule &rule, Dtype tables, int64_t dim, bool scaled);
    Sum sum;
};

// The instruction sets of this machine, best first. Never empty: "portable" is always available.
const std::vector<Isa> &isas();
// Returns the instruction set called `name`; for "", the best. Throws std::invalid_argument with the known names.
const Isa &isa_named(std::string_view name);

// The id hash: the finalizer of splitmix64.
constexpr uint64_t hash_id(uint64_t z) {
    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9u;
    z = (z ^ (z >> 27)) * 0x94d049bb133111ebu;
    return z ^ (z >> 31);
}

}  // namespace weft
