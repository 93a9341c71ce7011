// Sums of the arrays of several ranks, compiled once per instruction set (sum_isa.cpp). The bits are the same for each of them.
#pragma once
#include <cstddef>

namespace weft {

enum class SumDtype : int { fp32 = 0, fp16 = 1, bf16 = 2, fp64 = 3 };

// Adds up `count` arrays of `nbytes` bytes in their order. `to` may be one of the arrays.
using Sum = void (*)(SumDtype dtype, const char *const *from, size_t count, char *to, size_t nbytes);

}  // namespace weft
