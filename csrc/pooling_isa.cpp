// The pooling loops of pooling.hpp for one instruction set. This file is compiled once per instruction set, and
// WEFT_ISA is set to the name of the instruction set.
//
// All code here has internal linkage and uses no library templates, for the reason in lanes.hpp.
//
// Registers: the sum of a bag, a row of `dim` elements, is in registers, as N vectors of W lanes. The last vector ends exactly
//     at `dim` and may overlap the vector before. Both compute the same sums in the overlap, so no masks are needed. Rows
//     wider than `most` vectors are summed in blocks of columns. Rows narrower than a vector use the widest power of two
//     that fits.
#include "isa.hpp"
#include "lanes.hpp"

namespace weft {
namespace {

#if defined(__AVX512F__)
constexpr int most = 16;  // 16 of the 32 vector registers hold sums
#else
constexpr int most = 8;  // 8 of the 16 vector registers hold sums
#endif

// Stores one vector of `bytes` (16, 32 or 64), bypassing the caches.
template <int bytes> inline void stream(void *to, const void *from) {
#ifdef __AVX512F__
    if constexpr (bytes == 64) return _mm512_stream_si512((__m512i *)to, _mm512_loadu_si512(from));
#endif
#ifdef __AVX2__
    if constexpr (bytes == 32) return _mm256_stream_si256((__m256i *)to, _mm256_loadu_si256((const __m256i *)from));
#endif
#ifdef __SSE2__
    if constexpr (bytes == 16) return _mm_stream_si128((__m128i *)to, _mm_loadu_si128((const __m128i *)from));
#endif
    memcpy(to, from, bytes);
}

// Parameters that are the same for all bags. The loops copy them to local variables: otherwise the compiler must assume that
// the stores of sums change this structure.
struct Fixed {
    int64_t ahead;
    bool mean, stream, ragged;  // ragged: rows may end in one more cache line
};

// Sums columns [first, last + W) of one bag and stores the sums. They are N vectors, the last at column `last`.
template <class T, int W, int N, bool weighted>
[[gnu::always_inline]] inline void pool_columns(const Fixed fixed, const char *const *rows, const float *weights,
                                                int64_t length, T *out, int64_t first, int64_t last) {
    constexpr int64_t size = sizeof(T);
    Floats<W> sum[N] = {};
    for (int64_t i = 0; i < length; ++i) {
        const T *row = reinterpret_cast<const T *>(rows[i]);
        // Prefetch into the L2 cache, which has room for more outstanding lines (measured: 17 ns instead of 33 ns for a
        // row of 256 bytes).
        const char *coming = rows[i + fixed.ahead] + first * size;
#pragma GCC unroll 32
        for (int j = 0; j < N; ++j) {
            if (j * W * size % 64 == 0) __builtin_prefetch(coming + j * W * size, 0, 2);  // one per cache line
            const Floats<W> x = load<W>(row + (j == N - 1 ? last : first + j * W));
            if constexpr (weighted) sum[j] += x * weights[i];
            else sum[j] += x;
        }
        if (fixed.ragged) __builtin_prefetch(coming + (last - first + W) * size - 1, 0, 2);
    }
    if (fixed.mean && length > 1) {
        const float divisor = float(length);
#pragma GCC unroll 32
        for (int j = 0; j < N; ++j) sum[j] /= divisor;
    }
    if (W == widest && fixed.stream) {
#pragma GCC unroll 32
        for (int j = 0; j < N; ++j) {
            T ready[W];
            store<W>(ready, sum[j]);
            stream<W * sizeof(T)>(out + (j == N - 1 ? last : first + j * W), ready);
        }
    } else {
#pragma GCC unroll 32
        for (int j = 0; j < N; ++j) store<W>(out + (j == N - 1 ? last : first + j * W), sum[j]);
    }
}

template <class T, int W, int N, bool weighted> void pool(const PoolJob &job) {
    constexpr int64_t block = most * W;
    const Fixed fixed{job.ahead, job.mean, job.stream, job.dim * int64_t(sizeof(T)) % 64 != 0};
    const char *const *rows = job.rows;
    const float *weights = job.weights;
    const int64_t *lengths = job.lengths;
    const int64_t bags = job.bags, last = job.dim - W, stride = job.out_stride_bytes;
    char *out = job.out;
    auto bag = [&](int64_t length, int64_t blocks_end) __attribute__((always_inline)) {
        T *vector = reinterpret_cast<T *>(out);
        // Ordinary stores wait for their cache lines, which are on different pages here. Prefetch them some bags early.
        if (!fixed.stream)
#pragma GCC unroll 32
            for (int64_t c = 0; c < N * W * int64_t(sizeof(T)); c += 64) __builtin_prefetch(out + 8 * stride + c, 1);
        for (int64_t c = 0; c < blocks_end; c += block)
            pool_columns<T, W, most, weighted>(fixed, rows, weights, length, vector, c, c + block - W);
        pool_columns<T, W, N, weighted>(fixed, rows, weights, length, vector, blocks_end, last);
        rows += length;
        if constexpr (weighted) weights += length;
        out += stride;
    };
    if (job.dim > block) {
        const int64_t blocks_end = (job.dim - 1) / block * block;  // the last block is N vectors
        for (int64_t b = 0; b < bags; ++b) bag(lengths ? lengths[b] : 1, blocks_end);
    } else if (lengths == nullptr) {
        for (int64_t b = 0; b < bags; ++b) bag(1, 0);
    } else {
        for (int64_t b = 0; b < bags; ++b) bag(lengths[b], 0);
    }
}

template <class T, bool weighted, int N = most> Pool pool_wide(int64_t vectors) {
    if constexpr (N == 1) return pool<T, widest, 1, weighted>;
    else return vectors == N ? pool<T, widest, N, weighted> : pool_wide<T, weighted, N - 1>(vectors);
}

// Rows narrower than a vector: one or two (overlapping) vectors of the widest power of two that fits.
template <class T, bool weighted, int W = widest / 2> Pool pool_narrow(int64_t dim) {
    if constexpr (W == 1) return pool<T, 1, 1, weighted>;
    else {
        if (dim < W) return pool_narrow<T, weighted, W / 2>(dim);
        return dim == W ? pool<T, W, 1, weighted> : pool<T, W, 2, weighted>;
    }
}

template <class T, bool weighted> Pool pool_of(int64_t dim) {
    if (dim < widest) return pool_narrow<T, weighted>(dim);
    return pool_wide<T, weighted>(((dim + widest - 1) / widest - 1) % most + 1);
}

Pool choose_pool(Dtype dtype, int64_t dim, bool weighted) {
    switch (dtype) {
        case Dtype::fp16: return weighted ? pool_of<Half, true>(dim) : pool_of<Half, false>(dim);
        case Dtype::bf16: return weighted ? pool_of<Brain, true>(dim) : pool_of<Brain, false>(dim);
        default: return weighted ? pool_of<float, true>(dim) : pool_of<float, false>(dim);
    }
}

template <class Index, bool hash, bool checked> int64_t find_rows(const RowsJob &job) {
    const Index *__restrict values = static_cast<const Index *>(job.values);
    uint64_t *__restrict addresses = reinterpret_cast<uint64_t *>(job.addresses);
    const uint64_t rows = uint64_t(job.rows), row_bytes = uint64_t(job.row_bytes);
    const uint64_t table = reinterpret_cast<uint64_t>(job.table), zero_row = reinterpret_cast<uint64_t>(job.zero_row);
    const int64_t count = job.count;
    // Computes hash mod rows without a division. floor(2^64 / rows), or one less, gives a quotient that is at most one
    // too small.
    const uint64_t inverse = ~uint64_t(0) / rows;
    uint64_t bad = 0;
    for (int64_t i = 0; i < count; ++i) {
        uint64_t row = uint64_t(int64_t(values[i]));  // a negative index becomes huge, so it counts as bad
        if constexpr (hash) {
            row = hash_id(row);
            row -= uint64_t((unsigned __int128)row * inverse >> 64) * rows;
            row -= row >= rows ? rows : 0;
        }
        const uint64_t address = table + row * row_bytes, outside = checked && row >= rows;
        bad += outside;
        addresses[i] = outside ? zero_row : address;
    }
    return int64_t(bad);
}

FindRows choose_find_rows(int index_bits, bool hash, bool checked) {
    if (hash) return index_bits == 32 ? find_rows<int32_t, true, false> : find_rows<int64_t, true, false>;
    if (checked) return index_bits == 32 ? find_rows<int32_t, false, true> : find_rows<int64_t, false, true>;
    return index_bits == 32 ? find_rows<int32_t, false, false> : find_rows<int64_t, false, false>;
}

template <class Index> Bags read_bags_of(const Index *offsets, int64_t bags, int64_t values, int64_t *lengths) {
    int64_t not_one = 0, descending = 0;
    for (int64_t b = 0; b < bags; ++b) {
        lengths[b] = int64_t(offsets[b + 1]) - int64_t(offsets[b]);
        not_one |= lengths[b] ^ 1;
        descending |= lengths[b];
    }
    int64_t begin = offsets[0], end = offsets[bags];
    if (descending < 0 || begin < 0 || end > values) {
        not_one = 1;
        begin = end = begin < 0 ? 0 : begin > values ? values : begin;
        for (int64_t b = 0; b < bags; ++b) {
            const int64_t to = offsets[b + 1], next = to < end ? end : to > values ? values : to;
            lengths[b] = next - end;
            end = next;
        }
    }
    return {begin, end - begin, not_one == 0};
}

Bags read_bags(const void *offsets, int index_bits, int64_t bags, int64_t values, int64_t *lengths) {
    if (index_bits == 32) return read_bags_of(static_cast<const int32_t *>(offsets), bags, values, lengths);
    return read_bags_of(static_cast<const int64_t *>(offsets), bags, values, lengths);
}

template <class Index> int64_t count_bad_of(const Index *indices, int64_t count, uint64_t rows) {
    int64_t bad = 0;
    for (int64_t i = 0; i < count; ++i) bad += uint64_t(int64_t(indices[i])) >= rows;
    return bad;
}

int64_t count_bad(const void *indices, int index_bits, int64_t count, int64_t rows) {
    if (index_bits == 32) return count_bad_of(static_cast<const int32_t *>(indices), count, uint64_t(rows));
    return count_bad_of(static_cast<const int64_t *>(indices), count, uint64_t(rows));
}

void stream_copy(void *to, const void *from, int64_t bytes) {
    for (int64_t i = 0; i < bytes; i += 4 * widest)
        stream<4 * widest>(static_cast<char *>(to) + i, static_cast<const char *>(from) + i);
}

}  // namespace

Isa WEFT_ISA_NAME(isa_)() {
    return {WEFT_STRING(WEFT_ISA), choose_pool, choose_find_rows, read_bags, count_bad, stream_copy,
            WEFT_ISA_NAME(update_rows_), WEFT_ISA_NAME(update_runs_), WEFT_ISA_NAME(sum_)};
}

}  // namespace weft
