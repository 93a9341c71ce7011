// The checks that all copies of `rows` rows of `width_bytes` bytes, one pitch apart, share.
#pragma once
#include <cstdint>

namespace weft {

// Throws ValueError with the numbers unless all sizes are >= 0, the pitches are at least the width, and the bytes
// from the first row's start to the last row's end fit into 63 bits.
void require_copy(int64_t dst_pitch, int64_t src_pitch, int64_t width_bytes, int64_t rows);

// True if the rows are contiguous on both sides, so that one plain copy moves all of them.
inline bool is_contiguous(int64_t dst_pitch, int64_t src_pitch, int64_t width_bytes, int64_t rows) {
    return rows <= 1 || (dst_pitch == width_bytes && src_pitch == width_bytes);
}

}  // namespace weft
