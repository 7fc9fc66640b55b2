// AVX2 decoding with GFNI (Alder Lake and its successors; Zen 4 and later when AVX2 is forced): a block is
// the 32 bytes of a vector.
//
//   vpshufb   makes every 64-bit lane q an 8x8 bit matrix: row i is byte q of plane i. The block is loaded
//             into both 128-bit lanes, which costs no instruction
//   affine    (vgf2p8affineqb) transposes all 4 matrices: byte 8q + e then holds the code of element 8q + e.
//             k = 2: the planes of the next block are rows 2 and 3. k = 5: the fifth plane is row 7
//   vpshufb   looks the bytes of the float32 level up: four tables, or two for bfloat16 levels, whose low
//             halves are zero. k = 2 has tables for either half of the nibble. k = 5: bit 7 makes vpshufb
//             give zero, so both tables are asked, the second with bit 7 flipped, and or-ed
//   unpacks   put the bytes together
//
// k = 4, bfloat16: 10 instructions decode 32 weights and 5 multiply and scale them, in 5.5 clocks of Zen 5; 4
// a clock would be 3.75. 256 x 4096 from cache, M = 1, one core: 0.045 ms; decode_avx2.h 0.067, AVX-512
// 0.026. Spreading the shuffles and multiply-adds evenly by hand changed less than 2%.
//
// One block a group at k = 4 and 5: with two, GCC 12 runs out of registers and spills codes, 0.051 ms instead
// of 0.045 (M = 4: 0.109 instead of 0.088).
#pragma once

#include "avx2.h"

namespace kbit {
namespace {

template <int BITS, bool WIDE>
struct ByteDecoder {
    static constexpr int kBlocks = BITS < 4 ? 2 : 1;
    static constexpr int kBytes = kBlocks * BITS * 4;
    static constexpr int kUnitVecs = 4;
    static constexpr int kUnits = kBlocks;
    static constexpr bool kNatural = false;
    static constexpr bool kStaged = BITS != 3;  // two blocks' codes ahead: spills, 4% slower
    static constexpr int kTables = BITS == 2 || BITS == 5 ? 2 : 1;
    static constexpr int kFirstByte = WIDE ? 0 : 2;

    explicit ByteDecoder(const float* levels) { fill_lanes<BITS>(levels, kFirstByte, tables); }

    // Lane q: row i of a matrix is its byte 7 - i. SKIP: where the block's planes begin.
    template <int SKIP>
    static inline __attribute__((always_inline)) __m256i rows(const uint8_t* p) {
        constexpr char s = SKIP, x = -1, d = 12;
        constexpr bool three = BITS == 3;
        const __m256i order = _mm256_setr_epi8(  //
            x, x, x, x, three ? x : d, s + 8, s + 4, s, x, x, x, x, three ? x : d + 1, s + 9, s + 5, s + 1, x,
            x, x, x, three ? x : d + 2, s + 10, s + 6, s + 2, x, x, x, x, three ? x : d + 3, s + 11, s + 7,
            s + 3);
        return _mm256_shuffle_epi8(_mm256_broadcastsi128_si256(load16(p)), order);
    }

    // The fifth plane as row 7: bit 7 of the codes.
    static inline __attribute__((always_inline)) __m256i fifth_row(const uint8_t* p) {
        int32_t plane;
        memcpy(&plane, p, 4);
        return _mm256_cvtepu8_epi64(_mm_cvtsi32_si128(plane));
    }

    static inline __attribute__((always_inline)) __m256i transpose(__m256i rows) {
        return _mm256_gf2p8affine_epi64_epi8(_mm256_set1_epi64x(int64_t(0x8040201008040201)), rows, 0);
    }

    // One byte per element. `second` is the second block's, if there is one; k = 2: one byte has both.
    struct Codes {
        __m256i first, second;
    };

    static inline __attribute__((always_inline)) Codes codes(const uint8_t* p) {
        if constexpr (BITS == 3) {  // the second load starts early so that it ends with the pair
            return {transpose(rows<0>(p)), transpose(rows<4>(p + 8))};
        }
        const __m256i first =
            transpose(BITS == 5 ? _mm256_or_si256(rows<0>(p), fifth_row(p + 16)) : rows<0>(p));
        return {first, first};
    }

    inline __attribute__((always_inline)) __m256i lookup(int byte, int unit, __m256i codes) const {
        const __m256i low = _mm256_shuffle_epi8(tables[BITS == 2 ? unit : 0][byte], codes);
        if constexpr (BITS == 5) {
            const __m256i other = _mm256_xor_si256(codes, _mm256_set1_epi8(-128));
            return _mm256_or_si256(low, _mm256_shuffle_epi8(tables[1][byte], other));
        }
        return low;
    }

    inline __attribute__((always_inline)) void operator()(const uint8_t* p, Vec* w) const {
        look_up(codes(p), w);
    }

    inline __attribute__((always_inline)) void look_up(const Codes& c, Vec* w) const {
        const __m256i zero = _mm256_setzero_si256();
#pragma GCC unroll 2
        for (int u = 0; u < kUnits; ++u) {
            const __m256i codes = u == 0 ? c.first : c.second;
            const __m256i b2 = lookup(2, u, codes), b3 = lookup(3, u, codes);
            const __m256i high0 = _mm256_unpacklo_epi8(b2, b3), high1 = _mm256_unpackhi_epi8(b2, b3);
            __m256i low0 = zero, low1 = zero;
            if constexpr (WIDE) {
                const __m256i b0 = lookup(0, u, codes), b1 = lookup(1, u, codes);
                low0 = _mm256_unpacklo_epi8(b0, b1);
                low1 = _mm256_unpackhi_epi8(b0, b1);
            }
            Vec* out = w + u * kUnitVecs;
            out[0] = _mm256_castsi256_ps(_mm256_unpacklo_epi16(low0, high0));
            out[1] = _mm256_castsi256_ps(_mm256_unpackhi_epi16(low0, high0));
            out[2] = _mm256_castsi256_ps(_mm256_unpacklo_epi16(low1, high1));
            out[3] = _mm256_castsi256_ps(_mm256_unpackhi_epi16(low1, high1));
        }
    }

    static Vec unit_scale(const float* scales, int unit) { return splat(scales[unit]); }
    // Vector i of a block holds elements 4i + (0 1 2 3) and 16 + 4i + (0 1 2 3).
    static int position(int block, int e) { return block * kBlock + e % 16 / 4 * 8 + e / 16 * 4 + e % 4; }
    static void store_natural(float* dst, const Vec* w) {
        for (int i = 0; i < kUnits * kUnitVecs; ++i) {
            float* at = dst + i / kUnitVecs * kBlock + i % kUnitVecs * 4;
            _mm_storeu_ps(at, _mm256_castps256_ps128(w[i]));
            _mm_storeu_ps(at + 16, _mm256_extractf128_ps(w[i], 1));
        }
    }

    __m256i tables[kTables][4];
};

template <int BITS, bool WIDE>
using DecoderFor = ByteDecoder<BITS, WIDE>;
constexpr bool kHasNarrowTables = true;

}  // namespace
}  // namespace kbit
