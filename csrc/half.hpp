#pragma once
#include <cstdint>
#include <cstring>

namespace weft {

// fp16 without hardware support: exact conversion to fp32, and rounding from fp32 to nearest, ties to even.
[[maybe_unused]] static inline float from_half(uint16_t half) {
    const uint32_t sign = uint32_t(half & 0x8000) << 16, exponent = half >> 10 & 31, mantissa = half & 1023;
    uint32_t bits;
    float value;
    if (exponent == 0) {  // zero or subnormal: mantissa * 2^-24
        value = float(mantissa) * 0x1p-24f;
        std::memcpy(&bits, &value, 4);
        bits |= sign;
    } else if (exponent == 31) {
        bits = sign | 0x7f800000u | mantissa << 13 | (mantissa ? 0x400000u : 0);
    } else {
        bits = sign | (exponent + 112) << 23 | mantissa << 13;
    }
    std::memcpy(&value, &bits, 4);
    return value;
}

[[maybe_unused]] static inline uint16_t to_half(float value) {
    uint32_t bits;
    std::memcpy(&bits, &value, 4);
    const uint16_t sign = uint16_t(bits >> 16 & 0x8000);
    bits &= 0x7fffffffu;
    if (bits > 0x7f800000u) return uint16_t(sign | 0x7e00 | (bits >> 13 & 0x3ff));  // NaN stays NaN
    if (bits >= 0x477ff000u) return uint16_t(sign | 0x7c00);                        // 65520 and above round to infinity
    if (bits < 0x38800000u) {  // subnormal: adding 0.5 leaves the result, rounded, in the low bits
        float magnitude;
        std::memcpy(&magnitude, &bits, 4);
        magnitude += 0.5f;
        std::memcpy(&bits, &magnitude, 4);
        return uint16_t(sign | (bits - 0x3f000000u));
    }
    return uint16_t(sign | ((bits + 0xfff + (bits >> 13 & 1) - 0x38000000u) >> 13));
}

}  // namespace weft
