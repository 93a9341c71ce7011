// Atomic 2D addition: several processes and threads may add to the same region at once, element by element.
#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>

#include <atomic>
#include <string>

#include "copy.hpp"
#include "half.hpp"

namespace nb = nanobind;

namespace weft {
namespace {

template <typename Number, typename Word>
struct Plain {
    using Bits = Word;
    using Value = Number;
    static Number from(Bits bits) {
        Number value;
        std::memcpy(&value, &bits, sizeof bits);
        return value;
    }
    static Bits to(Number value) {
        Bits bits;
        std::memcpy(&bits, &value, sizeof bits);
        return bits;
    }
};
using Single = Plain<float, uint32_t>;
using Double = Plain<double, uint64_t>;

struct Half {
    using Bits = uint16_t;
    using Value = float;
    static float from(Bits bits) { return from_half(bits); }
    static Bits to(float value) { return to_half(value); }
};

struct Brain {
    using Bits = uint16_t;
    using Value = float;
    static float from(Bits bits) { return Single::from(uint32_t(bits) << 16); }
    static Bits to(float value) {  // to nearest, ties to even; NaN stays NaN
        const uint32_t bits = Single::to(value);
        if ((bits & 0x7fffffffu) > 0x7f800000u) return Bits(bits >> 16 | 0x40);
        return Bits((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
    }
};

template <typename T> void add_row(char *dst, const char *src, int64_t cols) {
    using Bits = typename T::Bits;
    static_assert(std::atomic_ref<Bits>::is_always_lock_free, "processes share it");
    auto *to = reinterpret_cast<Bits *>(dst);
    auto *from = reinterpret_cast<const Bits *>(src);
    for (int64_t i = 0; i < cols; ++i) {
        const typename T::Value more = T::from(from[i]);
        std::atomic_ref<Bits> there(to[i]);
        Bits before = there.load(std::memory_order_relaxed);
        while (!there.compare_exchange_weak(before, T::to(T::from(before) + more), std::memory_order_relaxed)) {
        }
    }
}

void add_2d(uintptr_t dst, int64_t dst_pitch, uintptr_t src, int64_t src_pitch, int64_t cols, int64_t rows,
            const std::string &dtype) {
    const bool is_double = dtype == "fp64", is_single = dtype == "fp32", is_brain = dtype == "bf16";
    if (!is_double && !is_single && !is_brain && dtype != "fp16")
        throw nb::value_error(("dtype=" + dtype + " cannot be added: use fp32, bf16, fp16 or fp64").c_str());
    const auto add = is_double ? add_row<Double> : is_single ? add_row<Single> : is_brain ? add_row<Brain> : add_row<Half>;
    const int64_t item = is_double ? 8 : is_single ? 4 : 2;
    int64_t width;
    if (__builtin_mul_overflow(cols, item, &width))
        throw nb::value_error(("cols=" + std::to_string(cols) + " elements of " + std::to_string(item) +
                               " bytes must be less than 2^63 bytes").c_str());
    require_copy(dst_pitch, src_pitch, width, rows);
    if (cols == 0 || rows == 0) return;
    if (dst % uintptr_t(item) || (rows > 1 && dst_pitch % item))
        throw nb::value_error(("dst=" + std::to_string(dst) + ", dst_pitch=" + std::to_string(dst_pitch) +
                               " must be multiples of the element size, " + std::to_string(item)).c_str());
    nb::gil_scoped_release unlocked;
    for (int64_t row = 0; row < rows; ++row)
        add(reinterpret_cast<char *>(dst) + row * dst_pitch, reinterpret_cast<const char *>(src) + row * src_pitch, cols);
    // A thread that sees a signal that this thread stores later, even relaxed, also sees the sums.
    std::atomic_thread_fence(std::memory_order_release);
}

}  // namespace
}  // namespace weft

void register_accumulate(nb::module_ &m) {
    m.def("add_2d", &weft::add_2d, nb::arg("dst"), nb::arg("dst_pitch"), nb::arg("src"), nb::arg("src_pitch"), nb::arg("cols"),
          nb::arg("rows"), nb::arg("dtype"), "Add `rows` rows of `cols` elements, each in one piece, then fence with release order.");
}
