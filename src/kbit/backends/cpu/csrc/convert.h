// Scalar conversions between float32, float16 and bfloat16: integer arithmetic and selects only, so that
// compilers vectorise loops over them, and independent of flush-to-zero modes where that is possible.
// Round to nearest even; NaN stays NaN.
#pragma once

#include <cstring>

#include "kernels.h"

namespace kbit {
namespace {

inline uint32_t bits_of(float f) {
    uint32_t u;
    memcpy(&u, &f, 4);
    return u;
}

inline float float_of(uint32_t u) {
    float f;
    memcpy(&f, &u, 4);
    return f;
}

struct Half {
    uint16_t raw;
};
struct BFloat16 {
    uint16_t raw;
};

template <class T>
struct IsBFloat16 {
    static constexpr bool value = false;
};
template <>
struct IsBFloat16<BFloat16> {
    static constexpr bool value = true;
};

inline float widen(float v) {
    return v;
}
inline float widen(BFloat16 v) {
    return float_of(uint32_t(v.raw) << 16);
}
inline float widen(Half v) {
    const uint32_t magnitude = v.raw & 0x7fffu;
    const float subnormal = float(int32_t(magnitude)) * 5.9604644775390625e-8f;  // 2^-24
    const uint32_t rebias = magnitude >= 0x7c00u ? 224u << 23 : 112u << 23;
    const uint32_t normal = (magnitude << 13) + rebias;
    const uint32_t result = magnitude < 0x400u ? bits_of(subnormal) : normal;
    return float_of(result | (uint32_t(v.raw & 0x8000u) << 16));
}

inline void narrow(float v, float& out) {
    out = v;
}
inline void narrow(float v, BFloat16& out) {
    const uint32_t u = bits_of(v);
    const uint32_t rounded = (u + 0x7fffu + ((u >> 16) & 1u)) >> 16;
    const uint32_t nan = (u >> 16) | 0x40u;
    out.raw = uint16_t((u & 0x7fffffffu) > 0x7f800000u ? nan : rounded);
}
inline void narrow(float v, Half& out) {
    const uint32_t u = bits_of(v);
    const uint32_t magnitude = u & 0x7fffffffu;
    // Below 2^-14 the float32 adder rounds at the right bit: 0.5 has an ulp of 2^-24, half's smallest
    // subnormal.
    const uint32_t subnormal = bits_of(float_of(magnitude) + 0.5f) - bits_of(0.5f);
    const uint32_t normal = (magnitude - (112u << 23) + 0xfffu + ((magnitude >> 13) & 1u)) >> 13;
    const uint32_t special = magnitude > 0x7f800000u ? 0x7e00u : 0x7c00u;
    const uint32_t finite = magnitude < (113u << 23) ? subnormal : normal;
    const uint32_t result =
        magnitude >= (143u << 23) ? special : finite;  // 65520 and above round to 2^16 = inf
    out.raw = uint16_t(result | ((u >> 16) & 0x8000u));
}

// Calls f with a value of the element type that `dtype` names.
template <class F>
inline void with_dtype(DType dtype, F f) {
    if (dtype == DType::kFloat32) {
        f(float());
    } else if (dtype == DType::kFloat16) {
        f(Half());
    } else {
        f(BFloat16());
    }
}

}  // namespace
}  // namespace kbit
