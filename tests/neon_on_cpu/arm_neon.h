// What decode_neon.h needs of <arm_neon.h>, for other CPUs: tests run the NEON kernels where there is no ARM.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>

typedef uint8_t uint8x16_t __attribute__((vector_size(16)));
typedef uint16_t uint16x8_t __attribute__((vector_size(16)));
typedef uint16_t uint16x4_t __attribute__((vector_size(8)));
typedef uint32_t uint32x4_t __attribute__((vector_size(16)));
typedef float float32x4_t __attribute__((vector_size(16)));

struct uint8x16x2_t {
    uint8x16_t val[2];
};

template <class To, class From>
inline To same_bits(From v) {
    static_assert(sizeof(To) == sizeof(From));
    To to;
    memcpy(&to, &v, sizeof to);
    return to;
}

template <class V, class F>
inline V by_lanes(F lane) {
    V v = {};
    for (unsigned i = 0; i < sizeof(V) / sizeof(v[0]); ++i) {
        v[i] = lane(i);
    }
    return v;
}

inline uint8x16_t vld1q_u8(const uint8_t* p) {
    return by_lanes<uint8x16_t>([&](unsigned i) { return p[i]; });
}
inline uint8x16_t vdupq_n_u8(uint8_t v) {
    return by_lanes<uint8x16_t>([&](unsigned) { return v; });
}
inline uint32x4_t vdupq_n_u32(uint32_t v) {
    return by_lanes<uint32x4_t>([&](unsigned) { return v; });
}

inline uint8x16_t vandq_u8(uint8x16_t a, uint8x16_t b) {
    return a & b;
}
inline uint8x16_t vorrq_u8(uint8x16_t a, uint8x16_t b) {
    return a | b;
}
inline uint32x4_t vandq_u32(uint32x4_t a, uint32x4_t b) {
    return a & b;
}
inline uint32x4_t veorq_u32(uint32x4_t a, uint32x4_t b) {
    return a ^ b;
}
inline uint8x16_t vtstq_u8(uint8x16_t a, uint8x16_t b) {
    return by_lanes<uint8x16_t>([&](unsigned i) { return uint8_t((a[i] & b[i]) != 0 ? 255 : 0); });
}

inline uint8x16_t vshrq_n_u8(uint8x16_t v, int n) {
    return by_lanes<uint8x16_t>([&](unsigned i) { return uint8_t(v[i] >> n); });
}
inline uint32x4_t vshrq_n_u32(uint32x4_t v, int n) {
    return v >> uint32_t(n);
}
inline uint32x4_t vshlq_n_u32(uint32x4_t v, int n) {
    return v << uint32_t(n);
}
inline uint32x4_t vshll_n_u16(uint16x4_t v, int n) {
    return by_lanes<uint32x4_t>([&](unsigned i) { return uint32_t(v[i]) << n; });
}

// A byte of the table; 0 for one beyond its end.
inline uint8x16_t vqtbl1q_u8(uint8x16_t table, uint8x16_t at) {
    return by_lanes<uint8x16_t>([&](unsigned i) { return uint8_t(at[i] < 16 ? table[at[i]] : 0); });
}
inline uint8x16_t vqtbl2q_u8(uint8x16x2_t table, uint8x16_t at) {
    return by_lanes<uint8x16_t>(
        [&](unsigned i) { return uint8_t(at[i] < 32 ? table.val[at[i] / 16][at[i] % 16] : 0); });
}

// Lanes of a and b in turn, of their first half or of their second.
template <class V>
inline V zipped(V a, V b, unsigned first) {
    return by_lanes<V>([&](unsigned i) { return i % 2 ? b[first + i / 2] : a[first + i / 2]; });
}
inline uint8x16_t vzip1q_u8(uint8x16_t a, uint8x16_t b) {
    return zipped(a, b, 0);
}
inline uint8x16_t vzip2q_u8(uint8x16_t a, uint8x16_t b) {
    return zipped(a, b, 8);
}
inline uint16x8_t vzip1q_u16(uint16x8_t a, uint16x8_t b) {
    return zipped(a, b, 0);
}
inline uint16x8_t vzip2q_u16(uint16x8_t a, uint16x8_t b) {
    return zipped(a, b, 4);
}

inline uint16x4_t vget_low_u16(uint16x8_t v) {
    return by_lanes<uint16x4_t>([&](unsigned i) { return v[i]; });
}
inline uint16x4_t vget_high_u16(uint16x8_t v) {
    return by_lanes<uint16x4_t>([&](unsigned i) { return v[4 + i]; });
}

inline uint8x16_t vreinterpretq_u8_u32(uint32x4_t v) {
    return same_bits<uint8x16_t>(v);
}
inline uint32x4_t vreinterpretq_u32_u8(uint8x16_t v) {
    return same_bits<uint32x4_t>(v);
}
inline uint16x8_t vreinterpretq_u16_u8(uint8x16_t v) {
    return same_bits<uint16x8_t>(v);
}
inline uint32x4_t vreinterpretq_u32_u16(uint16x8_t v) {
    return same_bits<uint32x4_t>(v);
}
inline float32x4_t vreinterpretq_f32_u32(uint32x4_t v) {
    return same_bits<float32x4_t>(v);
}

// a + b * c, rounded once.
inline float32x4_t vfmaq_f32(float32x4_t a, float32x4_t b, float32x4_t c) {
    return by_lanes<float32x4_t>([&](unsigned i) { return std::fmaf(b[i], c[i], a[i]); });
}
