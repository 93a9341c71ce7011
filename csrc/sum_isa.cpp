// The sums of sum.hpp for one instruction set. This file is compiled once per instruction set, and WEFT_ISA is set to the name of
// the instruction set. All code here has internal linkage and uses no library templates, for the reason in lanes.hpp.
#include "isa.hpp"
#include "lanes.hpp"

namespace weft {
namespace {

template <class T, int W> [[gnu::always_inline]] inline void sum_lanes(const char *const *from, size_t count, char *to, size_t i) {
    Floats<W> total = load<W>((const T *)from[0] + i);
    for (size_t rank = 1; rank < count; ++rank) total += load<W>((const T *)from[rank] + i);
    store<W>((T *)to + i, total);
}

template <class T> void sum_of(const char *const *from, size_t count, char *to, size_t nbytes) {
    const size_t size = nbytes / sizeof(T);
    size_t i = 0;
    for (; i + widest <= size; i += widest) sum_lanes<T, widest>(from, count, to, i);
    for (; i < size; ++i) sum_lanes<T, 1>(from, count, to, i);
}

void sum_doubles(const char *const *from, size_t count, char *to, size_t nbytes) {
    for (size_t i = 0; i < nbytes; i += sizeof(double)) {
        double total, more;
        memcpy(&total, from[0] + i, sizeof total);
        for (size_t rank = 1; rank < count; ++rank) {
            memcpy(&more, from[rank] + i, sizeof more);
            total += more;
        }
        memcpy(to + i, &total, sizeof total);
    }
}

}  // namespace

void WEFT_ISA_NAME(sum_)(SumDtype dtype, const char *const *from, size_t count, char *to, size_t nbytes) {
    const auto sum = dtype == SumDtype::fp64   ? sum_doubles
                     : dtype == SumDtype::fp32 ? sum_of<float>
                     : dtype == SumDtype::fp16 ? sum_of<Half>
                                               : sum_of<Brain>;
    sum(from, count, to, nbytes);
}

}  // namespace weft
