// A copy of several pieces of a matrix, for example of the columns that each rank needs.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>

#include <algorithm>
#include <atomic>
#include <cstring>
#include <string>

#include "copy.hpp"
#include "threads.hpp"

namespace nb = nanobind;

namespace {

// A piece of `copy_columns`: the first bytes of its columns on both sides, the bytes from one row to the next, and the
// bytes of a row of the piece.
struct Columns {
    int64_t dst, dst_pitch, src, src_pitch, width_bytes;
};
constexpr int64_t block_bytes = 256 << 10;  // bytes that a thread copies at a time
constexpr int64_t bytes_for_threads = 1 << 20;  // for fewer bytes, the start of threads takes longer than the copy

using Pieces = nb::ndarray<const int64_t, nb::ndim<2>, nb::c_contig, nb::device::cpu>;

// Copies row by row, so that the source is read sequentially if the pieces are adjacent columns of one matrix.
void copy_columns(const Pieces &given, int64_t rows, int n_threads) {
    if (given.shape(1) != 5 || n_threads < 1)
        throw nb::value_error(("pieces has " + std::to_string(given.shape(1)) + " columns, n_threads=" +
                               std::to_string(n_threads) +
                               ": pass 5 columns (dst, dst_pitch, src, src_pitch, width_bytes) and at least 1 thread").c_str());
    const auto *const pieces = reinterpret_cast<const Columns *>(given.data());
    const auto *const end = pieces + given.shape(0);
    int64_t row_bytes = 0;
    for (const Columns *piece = pieces; piece != end; ++piece) {
        weft::require_copy(piece->dst_pitch, piece->src_pitch, piece->width_bytes, rows);
        row_bytes += piece->width_bytes;
    }
    if (row_bytes == 0 || rows == 0) return;
    nb::gil_scoped_release unlocked;
    const int threads = row_bytes * rows < bytes_for_threads ? 1 : n_threads;
    const int64_t block = threads == 1 ? rows : std::max<int64_t>(1, block_bytes / row_bytes);
    weft::on_threads(threads, (rows + block - 1) / block, [&](int64_t unit) {
        for (int64_t row = unit * block; row < std::min(rows, (unit + 1) * block); ++row)
            for (const Columns *piece = pieces; piece != end; ++piece)
                std::memcpy(reinterpret_cast<char *>(piece->dst) + row * piece->dst_pitch,
                            reinterpret_cast<const char *>(piece->src) + row * piece->src_pitch,
                            size_t(piece->width_bytes));
        std::atomic_thread_fence(std::memory_order_release);
    });
}

}  // namespace

void register_copy_columns(nb::module_ &m) {
    m.def("copy_columns", &copy_columns, nb::arg("pieces"), nb::kw_only(), nb::arg("rows"), nb::arg("n_threads"),
          "Copy several pieces of `rows` rows each, then fence with release order (see weft/_core.pyi).");
}
