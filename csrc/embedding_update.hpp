// The optimizers' update of rows, in the backward of embedding_all_to_all. One source (embedding_update_isa.cpp) is
// compiled for each instruction set, and `Isa` in pooling.hpp points to the result. Updates are bitwise the same on
// every instruction set: sums have a fixed order, without fused multiply-add.
#pragma once
#include <cstdint>

namespace weft {

enum class Rule : int { gradient = 0, sgd = 1, rowwise_adagrad = 2, adagrad = 3, adam = 4, partial_rowwise_adam = 5,
                        squares = 6 };

// One table's memory in an update. first, second: optimizer states, fp32; null if the rule has none. out: for rule
// `gradient`, the gradients; for rule `squares`, the sum of squares of each run's gradient, fp32. number: the table's
// number, which seeds stochastic rounding.
struct RowMemory {
    char *weight;
    float *first, *second;
    char *out;
    uint64_t number;
};

struct UpdateRule {
    Rule rule;
    float learning_rate, factor, eps, weight_decay, beta1, beta2;
    float rest1, rest2;              // 1 - beta, computed in fp64, then rounded
    float correction1, correction2;  // Adam: 1 / (1 - beta ** iteration)
    float clip;                      // gradient elements are clamped to [-clip, clip]
    bool is_stochastic;              // stochastic rounding of 16-bit rows, from `seed`, table, row and column
    bool skip_nonfinite;             // do not update rows whose gradient is infinite or NaN
    uint64_t seed;
};

// An update of distinct rows of one table.
struct UpdateJob {
    const UpdateRule *rule;
    const RowMemory *memory;
    const int64_t *rows;      // [count]
    const int64_t *out_rows;  // [count]: rows of `memory->out`
    int64_t count, dim;
    float *g;  // [count, dim]: the reduced gradients; overwritten
};
// Applies the rule. Returns the number of skipped rows.
using UpdateRows = int64_t (*)(const UpdateJob &);
constexpr int64_t most_rows = 16;  // the most rows of an UpdateJob

// An update of distinct rows of one table, whose gradients have not been reduced.
struct RunsJob {
    const UpdateRule *rule;
    const RowMemory *memory;
    const char *const *gradients;  // fp32 [dim] each: of the first row, then of the second, and so on. `ahead` more
                                   // follow, which are only prefetched
    const float *scales;           // one per gradient, or null
    const int64_t *lengths;        // [count]: the number of gradients of each row
    const int64_t *rows;           // [count]. `rows_ahead` more follow, which are only prefetched
    int64_t count, ahead, rows_ahead;
};
// Sums the gradients of each row, and applies the rule. The result has the same bits as after `Pool` and `UpdateRows`.
using UpdateRuns = void (*)(const RunsJob &);

}  // namespace weft
