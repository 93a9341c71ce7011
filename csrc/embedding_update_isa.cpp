// The rules of embedding_update.hpp for one instruction set. This file is compiled once per instruction set, and
// WEFT_ISA is set to the name of the instruction set. All code here has internal linkage and uses no library templates,
// for the reason in lanes.hpp.
//
// Each step of a rule is a loop over the rows of a job. The gradients of these rows stay in the L1 cache, and the CPU
// overlaps the dependency chains (squares, root, quotient) of different rows.
#include "isa.hpp"
#include "lanes.hpp"

namespace weft {
namespace {

constexpr int sums_of_squares = 8;  // partial sums of a row's squares, the same for any width of vectors
constexpr uint64_t golden = 0x9e3779b97f4a7c15u;

template <int W> struct Width {
    static constexpr int lanes = W;
};

// Calls visit(Width<W>, d) for all columns [d, end), with the widest vectors that fit.
template <int W = widest, class Visit> [[gnu::always_inline]] inline void each(int64_t end, Visit visit, int64_t d = 0) {
    for (; d + W <= end; d += W) visit(Width<W>{}, d);
    if constexpr (W > 1) each<W / 2>(end, visit, d);
}

template <int W> [[gnu::always_inline]] inline Floats<W> root(Floats<W> x) {
#ifdef __AVX512F__
    if constexpr (W == 16) return (Floats<W>)_mm512_sqrt_ps((__m512)x);
#endif
#ifdef __AVX2__
    if constexpr (W == 8) return (Floats<W>)_mm256_sqrt_ps((__m256)x);
#endif
#ifdef __SSE2__
    if constexpr (W == 4) return (Floats<W>)_mm_sqrt_ps((__m128)x);
#endif
    if constexpr (W <= 4)
        for (int i = 0; i < W; ++i) x[i] = __builtin_sqrtf(x[i]);
    return x;
}

bool is_finite(const float *g, int64_t dim) {
    uint32_t bad = 0;
    for (int64_t d = 0; d < dim; ++d) {
        uint32_t bits;
        memcpy(&bits, g + d, 4);
        bad |= (bits & 0x7f800000u) == 0x7f800000u;
    }
    return bad == 0;
}

float mean_of_squares(const float *g, int64_t dim) {
    typedef float F __attribute__((vector_size(4 * sums_of_squares)));
    F sums = {};
    int64_t d = 0;
    for (; d + sums_of_squares <= dim; d += sums_of_squares) {
        F x;
        memcpy(&x, g + d, sizeof x);
        sums += x * x;
    }
    for (int i = 0; i < sums_of_squares && d < dim; ++d, ++i) sums[i] += g[d] * g[d];
    const float even = (sums[0] + sums[4]) + (sums[2] + sums[6]), odd = (sums[1] + sums[5]) + (sums[3] + sums[7]);
    return (even + odd) / float(dim);
}

// Rounds stochastically: up with probability (value - lower neighbour) / (upper - lower neighbour). The 24 lowest bits of
// `random` decide. weft/kernels/embedding_backward.py does the same.
void narrow_at_random(float value, uint64_t, float *to) { *to = value; }
void narrow_at_random(float value, uint64_t random, Brain *to) {
    uint32_t bits;
    memcpy(&bits, &value, 4);
    if ((bits & 0x7f800000u) == 0x7f800000u) return store<1>(to, Floats<1>{value});
    to->bits = uint16_t((bits + uint32_t(random & 0xffff)) >> 16);
}
void narrow_at_random(float value, uint64_t random, Half *to) {
    constexpr float smallest_normal = 6.103515625e-05f, units = 16777216.0f;  // 2**-14, 2**24
    const float size = __builtin_fabsf(value);
    if (size < smallest_normal) {  // the spacing of subnormals is 2**-24
        const float scaled = size * units, below = __builtin_floorf(scaled);
        const float up = float(random & 0xffffff) < (scaled - below) * units ? 1.0f : 0.0f;
        to->bits = to_half(__builtin_copysignf((below + up) / units, value));
        return;
    }
    uint32_t bits;
    memcpy(&bits, &value, 4);
    if ((bits & 0x7f800000u) != 0x7f800000u) {
        bits = (bits + uint32_t(random & 0x1fff)) & ~uint32_t(0x1fff);
        memcpy(&value, &bits, 4);
    }
    to->bits = to_half(value);
}

// Calls visit(k) for the rows k of the job that are not skipped.
template <class Visit> [[gnu::always_inline]] inline void each_row(const UpdateJob &job, uint32_t skipped, Visit visit) {
    for (int64_t k = 0; k < job.count; ++k)
        if (!(skipped >> k & 1)) visit(k);
}

// Computes w = w - rate * step(width, d). With a learning rate of 0 the row keeps its bits, including the signs of
// zeros.
template <class T, class Step>
[[gnu::always_inline]] inline void subtract(const UpdateRule &u, float rate, uint64_t number, T *w, int64_t row, int64_t dim,
                                            Step step) {
    if (u.learning_rate == 0) {
        each(dim, [&](auto width, int64_t d) { step(width, d); });  // `step` updates the optimizer's states
    } else if (!u.is_stochastic || sizeof(T) == 4) {
        each(dim, [&](auto width, int64_t d) {
            constexpr int W = decltype(width)::lanes;
            store<W>(w + d, load<W>(w + d) - rate * step(width, d));
        });
    } else {
        const uint64_t base = hash_id(u.seed + number * golden);
        each(dim, [&](auto width, int64_t d) {
            constexpr int W = decltype(width)::lanes;
            const Floats<W> value = load<W>(w + d) - rate * step(width, d);
            for (int i = 0; i < W; ++i)
                narrow_at_random(value[i], hash_id(base + uint64_t(row * dim + d + i) * golden), w + d + i);
        });
    }
}

template <class T> int64_t update_rows(const UpdateJob &job) {
    const UpdateRule u = *job.rule;
    const RowMemory memory = *job.memory;
    const int64_t dim = job.dim;
    float *const first = memory.first, *const second = memory.second;
    uint32_t skipped = 0;
    float numbers[most_rows];  // one per row
    // Transforms the gradients for the rule: multiply by the factor, clip, add weight decay.
    if (u.factor != 1)
        each(job.count * dim, [&](auto width, int64_t d) {
            constexpr int W = decltype(width)::lanes;
            store<W>(job.g + d, load<W>(job.g + d) * u.factor);
        });
    if (u.skip_nonfinite)
        for (int64_t k = 0; k < job.count; ++k) skipped |= uint32_t(!is_finite(job.g + k * dim, dim)) << k;
    if (u.clip < __builtin_inff())
        for (int64_t d = 0; d < job.count * dim; ++d) {
            float &g = job.g[d];
            g = g > u.clip ? u.clip : g < -u.clip ? -u.clip : g;
        }
    const auto gradient = [&](int64_t k) { return job.g + k * dim; };
    const auto weight = [&](int64_t k) { return reinterpret_cast<T *>(memory.weight) + job.rows[k] * dim; };
    if (u.weight_decay != 0 && u.rule != Rule::gradient && u.rule != Rule::squares)
        each_row(job, skipped, [&](int64_t k) {
            float *g = gradient(k);
            const T *w = weight(k);
            each(dim, [&](auto width, int64_t d) {
                constexpr int W = decltype(width)::lanes;
                store<W>(g + d, load<W>(g + d) + u.weight_decay * load<W>(w + d));
            });
        });
    switch (u.rule) {
        case Rule::squares:
            each_row(job, skipped, [&](int64_t k) {
                reinterpret_cast<float *>(memory.out)[job.out_rows[k]] = mean_of_squares(gradient(k), dim) * float(dim);
            });
            break;
        case Rule::gradient:
            each_row(job, skipped, [&](int64_t k) {
                const float *g = gradient(k);
                T *out = reinterpret_cast<T *>(memory.out) + job.out_rows[k] * dim;
                each(dim, [&](auto width, int64_t d) {
                    constexpr int W = decltype(width)::lanes;
                    store<W>(out + d, load<W>(g + d));
                });
            });
            break;
        case Rule::sgd:
            each_row(job, skipped, [&](int64_t k) {
                const float *g = gradient(k);
                subtract(u, u.learning_rate, memory.number, weight(k), job.rows[k], dim,
                         [&](auto width, int64_t d) { return load<decltype(width)::lanes>(g + d); });
            });
            break;
        case Rule::rowwise_adagrad:
            each_row(job, skipped, [&](int64_t k) { numbers[k] = mean_of_squares(gradient(k), dim); });
            each_row(job, skipped, [&](int64_t k) {
                float &sum = first[job.rows[k]];
                sum += numbers[k];
                numbers[k] = u.learning_rate / (__builtin_sqrtf(sum) + u.eps);  // one division per row
            });
            each_row(job, skipped, [&](int64_t k) {
                const float *g = gradient(k);
                subtract(u, numbers[k], memory.number, weight(k), job.rows[k], dim,
                         [&](auto width, int64_t d) { return load<decltype(width)::lanes>(g + d); });
            });
            break;
        case Rule::adagrad:
            each_row(job, skipped, [&](int64_t k) {
                const float *g = gradient(k);
                float *sums = first + job.rows[k] * dim;
                subtract(u, u.learning_rate, memory.number, weight(k), job.rows[k], dim, [&](auto width, int64_t d) {
                    constexpr int W = decltype(width)::lanes;
                    const Floats<W> x = load<W>(g + d), sum = load<W>(sums + d) + x * x;
                    store<W>(sums + d, sum);
                    return x / (root<W>(sum) + u.eps);
                });
            });
            break;
        case Rule::adam:
            each_row(job, skipped, [&](int64_t k) {
                const float *g = gradient(k);
                float *m = first + job.rows[k] * dim, *v = second + job.rows[k] * dim;
                subtract(u, u.learning_rate, memory.number, weight(k), job.rows[k], dim, [&](auto width, int64_t d) {
                    constexpr int W = decltype(width)::lanes;
                    const Floats<W> x = load<W>(g + d), mean = u.beta1 * load<W>(m + d) + u.rest1 * x;
                    const Floats<W> square = u.beta2 * load<W>(v + d) + u.rest2 * (x * x);
                    store<W>(m + d, mean);
                    store<W>(v + d, square);
                    return mean * u.correction1 / (root<W>(square * u.correction2) + u.eps);
                });
            });
            break;
        case Rule::partial_rowwise_adam:
            each_row(job, skipped, [&](int64_t k) { numbers[k] = mean_of_squares(gradient(k), dim); });
            each_row(job, skipped, [&](int64_t k) {
                float &square = second[job.rows[k]];
                square = u.beta2 * square + u.rest2 * numbers[k];
                numbers[k] = __builtin_sqrtf(square * u.correction2) + u.eps;
            });
            each_row(job, skipped, [&](int64_t k) {
                const float *g = gradient(k), divisor = numbers[k];
                float *m = first + job.rows[k] * dim;
                subtract(u, u.learning_rate, memory.number, weight(k), job.rows[k], dim, [&](auto width, int64_t d) {
                    constexpr int W = decltype(width)::lanes;
                    const Floats<W> mean = u.beta1 * load<W>(m + d) + u.rest1 * load<W>(g + d);
                    store<W>(m + d, mean);
                    return mean * u.correction1 / divisor;
                });
            });
            break;
    }
    return __builtin_popcount(skipped);
}

// Rows of N vectors, for SGD and rowwise Adagrad without options. The sum stays in registers, and only rows of the table
// are read from memory. So the CPU works on many rows at once, and memory is busy all the time: in separate loops, sums
// would leave memory idle, and updates would wait for it.
template <class T, int N, bool by_row, bool scaled> void update_runs(const RunsJob &job) {
    constexpr int W = widest;
    constexpr int64_t dim = N * W, row_bytes = dim * sizeof(T);
    const UpdateRule u = *job.rule;
    T *const weights = reinterpret_cast<T *>(job.memory->weight);
    float *const states = job.memory->first;
    const char *const *gradients = job.gradients;
    const float *scales = job.scales;
    const int64_t *const rows = job.rows, *const lengths = job.lengths;
    const int64_t count = job.count, ahead = job.ahead, rows_ahead = job.rows_ahead;
    for (int64_t run = 0; run < count; ++run) {
        const int64_t coming = rows[run + rows_ahead];
        for (int64_t i = 0; i < row_bytes; i += 64)
            __builtin_prefetch(reinterpret_cast<const char *>(weights + coming * dim) + i, 0, 2);
        if constexpr (by_row) __builtin_prefetch(states + coming, 0, 2);
        Floats<W> g[N] = {};
        for (int64_t length = lengths[run]; length > 0; --length, ++gradients) {
            const float *const x = reinterpret_cast<const float *>(*gradients);
#pragma GCC unroll 16
            for (int j = 0; j < N; ++j) {
                if (j * W * 4 % 64 == 0) __builtin_prefetch(gradients[ahead] + j * W * 4, 0, 2);
                if constexpr (scaled) g[j] += load<W>(x + j * W) * *scales;
                else g[j] += load<W>(x + j * W);
            }
            if constexpr (scaled) ++scales;
        }
        if (u.factor != 1)
#pragma GCC unroll 16
            for (int j = 0; j < N; ++j) g[j] *= u.factor;
        float rate = u.learning_rate;
        if constexpr (by_row) {
            float stored[dim];
#pragma GCC unroll 16
            for (int j = 0; j < N; ++j) store<W>(stored + j * W, g[j]);
            float &sum = states[rows[run]];
            sum += mean_of_squares(stored, dim);
            rate /= __builtin_sqrtf(sum) + u.eps;
        }
        T *const w = weights + rows[run] * dim;
#pragma GCC unroll 16
        for (int j = 0; j < N; ++j) store<W>(w + j * W, load<W>(w + j * W) - rate * g[j]);
    }
}

template <class T, bool by_row, bool scaled, int N = 16> UpdateRuns update_runs_of(int64_t vectors) {
    if (vectors == N) return update_runs<T, N, by_row, scaled>;
    if constexpr (N > 1) return update_runs_of<T, by_row, scaled, N / 2>(vectors);
    return nullptr;
}

template <class T> UpdateRuns choose_update_runs(Rule rule, int64_t vectors, bool scaled) {
    if (rule == Rule::sgd)
        return scaled ? update_runs_of<T, false, true>(vectors) : update_runs_of<T, false, false>(vectors);
    if (rule == Rule::rowwise_adagrad)
        return scaled ? update_runs_of<T, true, true>(vectors) : update_runs_of<T, true, false>(vectors);
    return nullptr;
}

}  // namespace

UpdateRuns WEFT_ISA_NAME(update_runs_)(const UpdateRule &u, Dtype dtype, int64_t dim, bool scaled) {
    const bool has_options = u.clip < __builtin_inff() || u.weight_decay != 0 || u.skip_nonfinite ||
                             (u.is_stochastic && dtype != Dtype::fp32);
    if (has_options || u.learning_rate == 0 || dim % widest != 0) return nullptr;
    const int64_t vectors = dim / widest;
    return dtype == Dtype::fp16   ? choose_update_runs<Half>(u.rule, vectors, scaled)
           : dtype == Dtype::bf16 ? choose_update_runs<Brain>(u.rule, vectors, scaled)
                                  : choose_update_runs<float>(u.rule, vectors, scaled);
}

UpdateRows WEFT_ISA_NAME(update_rows_)(Dtype dtype) {
    return dtype == Dtype::fp16 ? update_rows<Half> : dtype == Dtype::bf16 ? update_rows<Brain> : update_rows<float>;
}

}  // namespace weft
