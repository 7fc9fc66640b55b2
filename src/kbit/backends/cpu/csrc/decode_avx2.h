// AVX2 + FMA decoding without GFNI (Haswell to Comet Lake, Zen 1 to 3): two blocks (four at k = 2) at a time,
// one in each 128-bit lane.
//
//   vpshufb   puts byte j of four planes into 32-bit lane j: a 4 (planes) x 8 (elements) bit matrix
//   swaps     two delta swaps transpose its two 4x4 halves: byte i then holds the code of element 8j + i in
//             the low nibble and of element 8j + 4 + i in the high one (k = 2: the codes of two blocks in
//             each)
//   vpshufb   looks the bytes of the float32 level up: four tables, or two for bfloat16 levels, whose low
//             halves are zero
//   unpacks   put the bytes together. Unpacking words with zeros widens faster than shifts and masks do: 4 a
//             clock on Zen 5, shifts 2
//   k = 5     the fifth plane selects between two tables
#pragma once

#include "avx2.h"

namespace kbit {
namespace {

inline __m256i swap_bits(__m256i x, int distance, int mask) {
    const __m256i t =
        _mm256_and_si256(_mm256_xor_si256(x, _mm256_srli_epi32(x, distance)), _mm256_set1_epi32(mask));
    return _mm256_xor_si256(_mm256_xor_si256(x, t), _mm256_slli_epi32(t, distance));
}

// WIDE: levels need all four bytes of a float32; otherwise they are bfloat16 values.
template <int BITS, bool WIDE>
struct PairDecoder {
    static constexpr int kBlocks = BITS == 2 ? 4 : 2;
    static constexpr int kBytes = kBlocks * BITS * 4;
    static constexpr int kUnitVecs = 8;
    static constexpr int kUnits = kBlocks / 2;
    static constexpr bool kNatural = false;
    static constexpr bool kStaged = true;  // codes() and look_up() apart: see gemv.h
    static constexpr int kTables = BITS == 2 || BITS == 5 ? 2 : 1;
    static constexpr int kFirstByte = WIDE ? 0 : 2;

    explicit PairDecoder(const float* levels) { fill_lanes<BITS>(levels, kFirstByte, tables); }

    static __m256i planes(const uint8_t* p) {
        if (BITS == 3) {  // the second load starts early so that it ends with the pair
            const __m256i order = _mm256_setr_epi8(0, 4, 8, -1, 1, 5, 9, -1, 2, 6, 10, -1, 3, 7, 11, -1,  //
                                                   4, 8, 12, -1, 5, 9, 13, -1, 6, 10, 14, -1, 7, 11, 15, -1);
            return _mm256_shuffle_epi8(join(load16(p), load16(p + 8)), order);
        }
        const __m256i order = _mm256_setr_epi8(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15,  //
                                               0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15);
        return _mm256_shuffle_epi8(
            BITS == 5 ? join(load16(p), load16(p + 20)) : join(load16(p), load16(p + 16)), order);
    }

    // Byte j of the fifth plane in all bytes of 32-bit lane j.
    static __m256i fifth_plane(const uint8_t* p) {
        int32_t a, b;
        memcpy(&a, p + 16, 4);
        memcpy(&b, p + 36, 4);
        const __m256i order = _mm256_setr_epi8(0, 0, 0, 0, 1, 1, 1, 1, 2, 2, 2, 2, 3, 3, 3, 3,  //
                                               0, 0, 0, 0, 1, 1, 1, 1, 2, 2, 2, 2, 3, 3, 3, 3);
        return _mm256_shuffle_epi8(join(_mm_cvtsi32_si128(a), _mm_cvtsi32_si128(b)), order);
    }

    // All ones in the bytes whose fifth bit is set, of elements 8j + 4h + i.
    static __m256i fifth_bit(__m256i plane, int h) {
        const __m256i select = _mm256_set1_epi32(h == 0 ? 0x08040201 : int(0x80402010));
        return _mm256_cmpeq_epi8(_mm256_and_si256(plane, select), select);
    }

    inline __attribute__((always_inline)) __m256i lookup(int byte, int unit, __m256i index,
                                                         __m256i fifth) const {
        if (BITS == 5) {
            return _mm256_blendv_epi8(_mm256_shuffle_epi8(tables[0][byte], index),
                                      _mm256_shuffle_epi8(tables[kTables - 1][byte], index), fifth);
        }
        return _mm256_shuffle_epi8(tables[unit][byte], index);
    }

    // What remains to be looked up: byte i of each 32-bit lane j as above, and the fifth plane.
    struct Codes {
        __m256i low, fifth;
    };

    static inline __attribute__((always_inline)) Codes codes(const uint8_t* p) {
        const __m256i low = swap_bits(swap_bits(planes(p), 7, 0x00aa00aa), 14, 0x0000cccc);
        return {low, BITS == 5 ? fifth_plane(p) : low};
    }

    inline __attribute__((always_inline)) void operator()(const uint8_t* p, Vec* w) const {
        look_up(codes(p), w);
    }

    inline __attribute__((always_inline)) void look_up(const Codes& c, Vec* w) const {
        const __m256i codes = c.low;
        const __m256i nibble = _mm256_set1_epi8(15), zero = _mm256_setzero_si256();
#pragma GCC unroll 2
        for (int h = 0; h < 2; ++h) {
            const __m256i index = _mm256_and_si256(h == 0 ? codes : _mm256_srli_epi32(codes, 4), nibble);
            const __m256i fifth = BITS == 5 ? fifth_bit(c.fifth, h) : zero;
#pragma GCC unroll 2
            for (int u = 0; u < kUnits; ++u) {
                const __m256i b2 = lookup(2, u, index, fifth), b3 = lookup(3, u, index, fifth);
                const __m256i high0 = _mm256_unpacklo_epi8(b2, b3), high1 = _mm256_unpackhi_epi8(b2, b3);
                __m256i low0 = zero, low1 = zero;
                if constexpr (WIDE) {
                    const __m256i b0 = lookup(0, u, index, fifth), b1 = lookup(1, u, index, fifth);
                    low0 = _mm256_unpacklo_epi8(b0, b1);
                    low1 = _mm256_unpackhi_epi8(b0, b1);
                }
                Vec* out = w + u * kUnitVecs + 4 * h;
                out[0] = _mm256_castsi256_ps(_mm256_unpacklo_epi16(low0, high0));
                out[1] = _mm256_castsi256_ps(_mm256_unpackhi_epi16(low0, high0));
                out[2] = _mm256_castsi256_ps(_mm256_unpacklo_epi16(low1, high1));
                out[3] = _mm256_castsi256_ps(_mm256_unpackhi_epi16(low1, high1));
            }
        }
    }

    // Unit u holds block u in its low 128-bit lanes and block u + kUnits in the high ones; its vector 4h + j
    // holds elements 8j + 4h + (0 1 2 3) of both.
    static Vec unit_scale(const float* scales, int unit) {
        return _mm256_insertf128_ps(_mm256_castps128_ps256(_mm_broadcast_ss(scales + unit)),
                                    _mm_broadcast_ss(scales + unit + kUnits), 1);
    }
    static int position(int block, int e) {
        const int vec = e / 4 % 2 * 4 + e / 8, lane = block / kUnits * 4 + e % 4;
        return (block % kUnits * kUnitVecs + vec) * kLanes + lane;
    }
    static void store_natural(float* dst, const Vec* w) {
        for (int u = 0; u < kUnits; ++u) {
            for (int i = 0; i < kUnitVecs; ++i) {
                store_lanes(dst + u * kBlock + i % 4 * 8 + i / 4 * 4, w[u * kUnitVecs + i]);
            }
        }
    }
    static void store_lanes(float* at, Vec v) {
        _mm_storeu_ps(at, _mm256_castps256_ps128(v));
        _mm_storeu_ps(at + kUnits * kBlock, _mm256_extractf128_ps(v, 1));
    }

    __m256i tables[kTables][4];
};

template <int BITS, bool WIDE>
using DecoderFor = PairDecoder<BITS, WIDE>;
constexpr bool kHasNarrowTables = true;

}  // namespace
}  // namespace kbit
