// The rule of an optimizer for some rows, in the backward of embedding_all_to_all. Compiled once per instruction set from one
// source (embedding_update_isa.cpp); `Isa` of pooling.hpp has it. Results are bitwise the same on every instruction set: no
// fused multiply-add, and one order of sums.
#pragma once
#include <cstdint>

namespace weft {

enum class Rule : int { gradient = 0, sgd = 1, rowwise_adagrad = 2, adagrad = 3, adam = 4, partial_rowwise_adam = 5,
                        squares = 6 };

// One table's memory in an update. states: null where the rule has none. out: of rules `gradient` and `squares`; of the latter
// float32, with the sum of squares of each run's gradient. number: of the table, for random bits of its rows.
struct RowMemory {
    char *weight;
    float *first, *second;
    char *out;
    uint64_t number;
};

struct UpdateRule {
    Rule rule;
    float learning_rate, factor, eps, weight_decay, beta1, beta2;
    float rest1, rest2;              // 1 - beta, which float32 would round too early
    float correction1, correction2;  // Adam: 1 / (1 - beta ** iteration)
    float clip;                      // elements of a gradient stay between -clip and clip
    bool is_stochastic;              // rows of 16 bits are rounded up or down at random, by `seed`, table, row and column
    bool skip_nonfinite;             // leave rows with a gradient that is infinite or NaN as they are
    uint64_t seed;
};

// Rows of one table, all different.
struct UpdateJob {
    const UpdateRule *rule;
    const RowMemory *memory;
    const int64_t *rows;      // [count]
    const int64_t *out_rows;  // [count], of `memory->out`
    int64_t count, dim;
    float *g;  // [count, dim]: the reduced gradients, which are overwritten
};
// Applies the rule. Returns how many rows were skipped.
using UpdateRows = int64_t (*)(const UpdateJob &);
constexpr int64_t most_rows = 16;  // of an UpdateJob

}  // namespace weft
