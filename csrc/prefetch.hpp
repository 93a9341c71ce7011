// Prefetches of several cache lines.
#pragma once
#include <cstdint>

namespace weft {

// Prefetches `bytes` bytes starting at `from` into the cache of `level`, 1 or 2. This function must be inlined: GCC
// treats a function that only prefetches as having no effect, and removes its calls.
template <int level> [[gnu::always_inline]] inline void prefetch(const void *from, int64_t bytes) {
    for (int64_t i = 0; i < bytes; i += 64) __builtin_prefetch(static_cast<const char *>(from) + i, 0, 4 - level);
}

}  // namespace weft
