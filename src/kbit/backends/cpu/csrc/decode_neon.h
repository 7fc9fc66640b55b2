// Decoding with NEON, which every 64-bit ARM has: a block at a time, or two at k = 2 and 3.
//
//   tbl    puts byte j of four planes into 32-bit lane j: a 4 (planes) x 8 (elements) bit matrix
//   swaps  two delta swaps transpose its two 4x4 halves: byte i then holds the code of element 8j + i in the
//          low nibble and of element 8j + 4 + i in the high one (k = 2: the codes of two blocks in each)
//   tbl    looks the bytes of the float32 level up: four tables, or two for bfloat16 levels, whose low halves
//          are zero. k = 5: the fifth plane's bits are or-ed in first, and tables have 32 entries
//   zip    puts the bytes together, and shll #16 widens bfloat16 levels, as it needs no zeros
//
// k = 4, bfloat16: 29 instructions decode 32 weights and 9 multiply and scale them.
#pragma once

#include <arm_neon.h>

#include "byte_tables.h"
#include "lanes4.h"

namespace kbit {
namespace {

constexpr int kTileTokens = 4;  // 4 * 4 accumulators + 4 activations + 1 weight of 32 registers

inline Vec fma(Vec a, Vec b, Vec c) {
    return vfmaq_f32(c, a, b);
}

template <int DISTANCE>
inline uint32x4_t swap_bits(uint32x4_t x, uint32_t mask) {
    const uint32x4_t t = vandq_u32(veorq_u32(x, vshrq_n_u32(x, DISTANCE)), vdupq_n_u32(mask));
    return veorq_u32(x, veorq_u32(t, vshlq_n_u32(t, DISTANCE)));
}

// WIDE: levels need all four bytes of a float32; otherwise they are bfloat16 values.
template <int BITS, bool WIDE>
struct NeonDecoder {
    static constexpr int kBlocks = BITS < 4 ? 2 : 1;
    static constexpr int kBytes = kBlocks * BITS * 4;
    static constexpr int kUnitVecs = kBlock / kLanes;
    static constexpr int kUnits = kBlocks;
    static constexpr bool kNatural = true;
    static constexpr bool kStaged = false;
    static constexpr int kTables = BITS == 2 || BITS == 5 ? 2 : 1;
    static constexpr int kFirstByte = WIDE ? 0 : 2;

    explicit NeonDecoder(const float* levels) {
        fill_tables<BITS>(levels, kFirstByte, tables, [](const uint8_t* column) { return vld1q_u8(column); });
    }

    // Byte j of the planes in 32-bit lane j. SKIP: where they begin in the 16 bytes at p; those of a plane
    // that is none are 0, as tbl gives for 255.
    template <int SKIP>
    static inline __attribute__((always_inline)) uint32x4_t planes(const uint8_t* p) {
        constexpr uint8_t s = SKIP;
        constexpr auto fourth = [](int j) { return uint8_t(BITS == 3 ? 255 : 12 + j); };
        alignas(16) static constexpr uint8_t order[16] = {
            s,     s + 4, s + 8,  fourth(0), s + 1, s + 5, s + 9,  fourth(1),
            s + 2, s + 6, s + 10, fourth(2), s + 3, s + 7, s + 11, fourth(3)};
        return vreinterpretq_u32_u8(vqtbl1q_u8(vld1q_u8(p), vld1q_u8(order)));
    }

    // The fifth bit, as 16, of the elements 8j + 4h + i.
    static inline __attribute__((always_inline)) uint8x16_t fifth_bits(const uint8_t* p, int h) {
        alignas(16) static constexpr uint8_t order[16] = {0, 0, 0, 0, 1, 1, 1, 1, 2, 2, 2, 2, 3, 3, 3, 3};
        uint32_t plane;
        memcpy(&plane, p, 4);
        const uint8x16_t bytes = vqtbl1q_u8(vreinterpretq_u8_u32(vdupq_n_u32(plane)), vld1q_u8(order));
        const uint8x16_t select = vreinterpretq_u8_u32(vdupq_n_u32(h == 0 ? 0x08040201u : 0x80402010u));
        return vandq_u8(vtstq_u8(bytes, select), vdupq_n_u8(16));
    }

    inline __attribute__((always_inline)) uint8x16_t lookup(int byte, int unit, uint8x16_t codes) const {
        if constexpr (BITS == 5) {
            const uint8x16x2_t both = {{tables[0][byte], tables[1][byte]}};
            return vqtbl2q_u8(both, codes);
        }
        return vqtbl1q_u8(tables[BITS == 2 ? unit : 0][byte], codes);
    }

    static inline __attribute__((always_inline)) Vec as_floats(uint32x4_t v) {
        return vreinterpretq_f32_u32(v);
    }

    // Levels of the elements 8j + 4h + i of a block, to vector 2j + h.
    inline __attribute__((always_inline)) void look_up(uint8x16_t codes, int unit, int h, Vec* w) const {
        const uint8x16_t b2 = lookup(2, unit, codes), b3 = lookup(3, unit, codes);
        const uint16x8_t high0 = vreinterpretq_u16_u8(vzip1q_u8(b2, b3)),
                         high1 = vreinterpretq_u16_u8(vzip2q_u8(b2, b3));
        if constexpr (WIDE) {
            const uint8x16_t b0 = lookup(0, unit, codes), b1 = lookup(1, unit, codes);
            const uint16x8_t low0 = vreinterpretq_u16_u8(vzip1q_u8(b0, b1)),
                             low1 = vreinterpretq_u16_u8(vzip2q_u8(b0, b1));
            w[h] = as_floats(vreinterpretq_u32_u16(vzip1q_u16(low0, high0)));
            w[h + 2] = as_floats(vreinterpretq_u32_u16(vzip2q_u16(low0, high0)));
            w[h + 4] = as_floats(vreinterpretq_u32_u16(vzip1q_u16(low1, high1)));
            w[h + 6] = as_floats(vreinterpretq_u32_u16(vzip2q_u16(low1, high1)));
        } else {
            w[h] = as_floats(vshll_n_u16(vget_low_u16(high0), 16));
            w[h + 2] = as_floats(vshll_n_u16(vget_high_u16(high0), 16));
            w[h + 4] = as_floats(vshll_n_u16(vget_low_u16(high1), 16));
            w[h + 6] = as_floats(vshll_n_u16(vget_high_u16(high1), 16));
        }
    }

    inline __attribute__((always_inline)) void operator()(const uint8_t* p, Vec* w) const {
        const uint8x16_t nibble = vdupq_n_u8(15);
        uint8x16_t codes = {};
#pragma GCC unroll 2
        for (int u = 0; u < kUnits; ++u) {
            if (u == 0 || BITS == 3) {  // k = 3: the second load starts early so that it ends with the pair
                const uint32x4_t rows = u == 0 ? planes<0>(p) : planes<4>(p + 8);
                codes = vreinterpretq_u8_u32(swap_bits<14>(swap_bits<7>(rows, 0x00aa00aau), 0x0000ccccu));
            }
            uint8x16_t low = vandq_u8(codes, nibble), high = vshrq_n_u8(codes, 4);
            if constexpr (BITS == 5) {
                low = vorrq_u8(low, fifth_bits(p + 16, 0));
                high = vorrq_u8(high, fifth_bits(p + 16, 1));
            }
            look_up(low, u, 0, w + u * kUnitVecs);
            look_up(high, u, 1, w + u * kUnitVecs);
        }
    }

    static Vec unit_scale(const float* scales, int unit) { return splat(scales[unit]); }
    static int position(int block, int e) { return block * kBlock + e; }
    static void store_natural(float* dst, const Vec* w) {
        for (int i = 0; i < kUnits * kUnitVecs; ++i) {
            store(dst + i * kLanes, w[i]);
        }
    }

    uint8x16_t tables[kTables][4];
};

template <int BITS, bool WIDE>
using DecoderFor = NeonDecoder<BITS, WIDE>;
constexpr bool kHasNarrowTables = true;

}  // namespace
}  // namespace kbit
