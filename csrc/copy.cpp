// 2D copies for CPU processes, like cudaMemcpy2D: a chunk of columns is copied in one call, without packing it first.
#include "copy.hpp"

#include <nanobind/nanobind.h>

#include <algorithm>
#include <atomic>
#include <cstring>
#include <string>

namespace nb = nanobind;

namespace weft {

void require_copy(int64_t dst_pitch, int64_t src_pitch, int64_t width_bytes, int64_t rows) {
    int64_t extent;
    if (width_bytes < 0 || rows < 0 || std::min(dst_pitch, src_pitch) < width_bytes ||
        __builtin_mul_overflow(std::max(dst_pitch, src_pitch), rows, &extent))
        throw nb::value_error(
            ("rows=" + std::to_string(rows) + ", width_bytes=" + std::to_string(width_bytes) +
             ", dst_pitch=" + std::to_string(dst_pitch) + ", src_pitch=" + std::to_string(src_pitch) +
             ": rows and width_bytes must not be negative, pitches at least the width, rows x pitch < 2^63").c_str());
}

}  // namespace weft

namespace {

void copy_2d(uintptr_t dst, int64_t dst_pitch, uintptr_t src, int64_t src_pitch, int64_t width_bytes, int64_t rows) {
    weft::require_copy(dst_pitch, src_pitch, width_bytes, rows);
    if (width_bytes == 0 || rows == 0) return;
    nb::gil_scoped_release unlocked;
    auto *to = reinterpret_cast<char *>(dst);
    auto *from = reinterpret_cast<const char *>(src);
    if (weft::is_contiguous(dst_pitch, src_pitch, width_bytes, rows)) {
        std::memcpy(to, from, size_t(width_bytes) * size_t(rows));
    } else {
        for (int64_t row = 0; row < rows; ++row)
            std::memcpy(to + row * dst_pitch, from + row * src_pitch, size_t(width_bytes));
    }
    // A thread that sees a signal that this thread stores later, even relaxed, also sees the bytes.
    std::atomic_thread_fence(std::memory_order_release);
}

}  // namespace

void register_copy(nb::module_ &m) {
    m.def("copy_2d", &copy_2d, nb::arg("dst"), nb::arg("dst_pitch"), nb::arg("src"), nb::arg("src_pitch"),
          nb::arg("width_bytes"), nb::arg("rows"),
          "Copy `rows` rows of `width_bytes`, a pitch apart on each side, then fence with release order.");
}
