// Vectors of fp32 lanes, and their conversion from and to fp16 and bf16. Include this file only in files that are
// compiled once per instruction set: all code here has internal linkage and uses no library templates. Otherwise the linker
// could merge copies of an inline function, and keep a copy with wide instructions, which older machines cannot run.
#pragma once
#include <stdint.h>
#include <string.h>
#ifdef __AVX2__
#include <immintrin.h>
#elif defined(__SSE2__)
#include <emmintrin.h>
#endif

#include "half.hpp"

namespace weft {
namespace {

#if defined(__AVX512F__)
constexpr int widest = 16;  // lanes of the widest vector
#elif defined(__AVX2__)
constexpr int widest = 8;
#else
constexpr int widest = 4;
#endif

struct Half {
    uint16_t bits;
};
struct Brain {
    uint16_t bits;
};

template <int W> struct Lanes {
    typedef float F __attribute__((vector_size(4 * W)));
    typedef uint32_t U __attribute__((vector_size(4 * W)));
    typedef uint16_t S __attribute__((vector_size(2 * W)));
};
template <int W> using Floats = typename Lanes<W>::F;

template <int W> inline Floats<W> load(const float *from) {
    Floats<W> v;
    memcpy(&v, from, sizeof v);
    return v;
}

template <int W> inline Floats<W> load(const Brain *from) {
    typename Lanes<W>::S narrow;
    memcpy(&narrow, from, sizeof narrow);
    return (Floats<W>)(__builtin_convertvector(narrow, typename Lanes<W>::U) << 16);
}

// Without F16C, an fp16 conversion takes about a dozen instructions per element. It is then a function call per vector,
// because inline copies in every loop below would dominate the compile time.
#ifdef __F16C__
#define WEFT_HALF inline
#else
#define WEFT_HALF [[gnu::noinline]]
#endif

template <int W> WEFT_HALF Floats<W> load(const Half *from) {
#ifdef __AVX512F__
    if constexpr (W == 16) return (Floats<W>)_mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *)from));
#endif
#ifdef __F16C__
    if constexpr (W == 8) return (Floats<W>)_mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)from));
    if constexpr (W == 4) return (Floats<W>)_mm_cvtph_ps(_mm_loadu_si64(from));
#endif
    if constexpr (W <= 4) {
        Floats<W> v;
        for (int i = 0; i < W; ++i) {
#ifdef __F16C__
            v[i] = _cvtsh_ss(from[i].bits);
#else
            v[i] = from_half(from[i].bits);
#endif
        }
        return v;
    }
}

template <int W> inline void store(float *to, Floats<W> v) { memcpy(to, &v, sizeof v); }

template <int W> inline void store(Brain *to, Floats<W> v) {
    const auto bits = (typename Lanes<W>::U)v;
    const auto rounded = (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
    const auto is_nan = (typename Lanes<W>::U)(v != v);
    const auto narrow = __builtin_convertvector((is_nan & 0x7fc0) | (~is_nan & rounded), typename Lanes<W>::S);
    memcpy(to, &narrow, sizeof narrow);
}

template <int W> WEFT_HALF void store(Half *to, Floats<W> v) {
#ifdef __AVX512F__
    if constexpr (W == 16)
        return _mm256_storeu_si256((__m256i *)to, _mm512_cvtps_ph((__m512)v, _MM_FROUND_TO_NEAREST_INT));
#endif
#ifdef __F16C__
    if constexpr (W == 8) return _mm_storeu_si128((__m128i *)to, _mm256_cvtps_ph((__m256)v, _MM_FROUND_TO_NEAREST_INT));
    if constexpr (W == 4) return _mm_storeu_si64(to, _mm_cvtps_ph((__m128)v, _MM_FROUND_TO_NEAREST_INT));
#endif
    if constexpr (W <= 4) {
        for (int i = 0; i < W; ++i) {
#ifdef __F16C__
            to[i].bits = uint16_t(_cvtss_sh(v[i], _MM_FROUND_TO_NEAREST_INT));
#else
            to[i].bits = to_half(v[i]);
#endif
        }
    }
}

}  // namespace
}  // namespace weft
