// AVX-512 decoding: one load of bit-plane words becomes 2 * kPerByte blocks of float32 weights (or of 16-bit
// ones, see isa_avx512bf16.cpp). Needs F, BW, VL, DQ, VBMI and GFNI (Ice Lake, Zen 4 and later).
//
//   vpermb        gathers bytes so that every 64-bit lane is an 8x8 bit matrix: row i is a block's plane,
//                 column c one of 8 neighbouring elements; k = 2 stacks 4 blocks in a matrix, k = 3 and 4 two
//                 (k = 3 with rows 3 and 7 zero), k = 5 one
//   vgf2p8affineqb transposes all 8 matrices: the lane's byte c then holds the codes of element c
//   vpermb        orders bytes such that every table index below comes out in element order
//   shift + vpermps  vpermps reads only the low 4 bits of an index (vpermt2ps 5), so a shift isolates a code
//                 and nothing needs masking; tables shorter than that are repeated
//
// k = 4: 19 instructions for 128 weights.
//
// The other way, planes loaded as mask registers that add 1, 2, 4 and 8 to the index of a vpermw, was
// measured on one Zen 5 core (k = 4, M = 1, bfloat16 dot products): 20 weights/ns from cache and 27 from
// memory, this way 50 and 50.
#pragma once

#include <immintrin.h>

#include "scales.h"

namespace kbit {
namespace {

using Vec = __m512;
constexpr int kLanes = 16;
constexpr int kTileTokens = 6;  // 6 * 4 accumulators + 6 activations + 1 weight: 31 of 32 registers
constexpr int kTileRows = 4;
constexpr int kChunkRows = 128;  // gemm.h: 512 KB of decoded weights in a second-level cache of 1 MB or more

inline Vec load(const float* p) {
    return _mm512_loadu_ps(p);
}
inline void store(float* p, Vec v) {
    _mm512_storeu_ps(p, v);
}
inline Vec splat(float v) {
    return _mm512_set1_ps(v);
}
inline Vec fma(Vec a, Vec b, Vec c) {
    return _mm512_fmadd_ps(a, b, c);
}

// out[i] += sum of the lanes of v[i], i < 4.
inline void add_sums(const Vec v[4], float* out) {
    __m256 h[4];
    for (int i = 0; i < 4; ++i) {
        h[i] = _mm256_add_ps(_mm512_castps512_ps256(v[i]), _mm512_extractf32x8_ps(v[i], 1));
    }
    const __m256 quads = _mm256_hadd_ps(_mm256_hadd_ps(h[0], h[1]), _mm256_hadd_ps(h[2], h[3]));
    const __m128 sums = _mm_add_ps(_mm256_castps256_ps128(quads), _mm256_extractf128_ps(quads, 1));
    _mm_storeu_ps(out, _mm_add_ps(_mm_loadu_ps(out), sums));
}

template <int BITS>
struct Layout {
    static constexpr int kPerByte = BITS == 2 ? 4 : BITS == 5 ? 1 : 2;
    static constexpr int kSlot = 8 / kPerByte;
    static constexpr int kBlocks = 2 * kPerByte;
    static constexpr int kBytes = kBlocks * BITS * 4;
    static constexpr int word_shift(int block) { return block / kPerByte * 8 + block % kPerByte * kSlot; }
};

struct Control {
    uint64_t rows_mask = 0;
    alignas(64) uint8_t rows[64] = {};
    alignas(64) uint8_t dwords[64] = {};  // for 32-bit table entries
    alignas(64) uint8_t words[64] = {};   // for 16-bit table entries
};

template <int BITS>
constexpr Control make_control() {
    using L = Layout<BITS>;
    Control c{};
    for (int q = 0; q < 8; ++q) {
        for (int i = 0; i < 8; ++i) {
            const int block = q / 4 * L::kPerByte + i / L::kSlot, plane = i % L::kSlot;
            if (plane < BITS) {
                const int at = q * 8 + 7 - i;  // the instruction takes matrix row i from byte 7 - i
                c.rows[at] = uint8_t((block * BITS + plane) * 4 + q % 4);
                c.rows_mask |= uint64_t(1) << at;
            }
        }
    }
    for (int i = 0; i < 64; ++i) {
        c.dwords[i] = uint8_t(i % 4 * 16 + i / 4);
        c.words[i] = uint8_t(i % 2 * 32 + i / 2);
    }
    return c;
}

template <int BITS>
constexpr Control kControl = make_control<BITS>();

// 64 bytes: byte 32 * h + e holds the codes of element e of blocks h * kPerByte + slot, slot s at bit kSlot *
// s.
template <int BITS>
inline __m512i transpose_planes(const uint8_t* p) {
    using L = Layout<BITS>;
    const Control& c = kControl<BITS>;
    const __m512i raw = L::kBytes == 64 ? _mm512_loadu_si512(p)
                                        : _mm512_maskz_loadu_epi8((uint64_t(1) << (L::kBytes % 64)) - 1, p);
    const __m512i rows = _mm512_maskz_permutexvar_epi8(c.rows_mask, _mm512_load_si512(c.rows), raw);
    return _mm512_gf2p8affine_epi64_epi8(_mm512_set1_epi64(int64_t(0x8040201008040201)), rows, 0);
}

// Decodes kBlocks blocks from kBytes bytes. Vectors come in units that share one scale vector.
template <int BITS>
struct Decoder {
    using L = Layout<BITS>;
    static constexpr int kBits = BITS;
    static constexpr int kBlocks = L::kBlocks;
    static constexpr int kBytes = L::kBytes;
    static constexpr int kUnitVecs = 2;
    static constexpr int kUnits = kBlocks;
    static constexpr bool kNatural = true;
    static constexpr bool kStaged = false;

    explicit Decoder(const float* table) : low(load(table)), high(load(table + 16)) {}

    inline __attribute__((always_inline)) void operator()(const uint8_t* p, Vec* w) const {
        const __m512i codes =
            _mm512_permutexvar_epi8(_mm512_load_si512(kControl<BITS>.dwords), transpose_planes<BITS>(p));
#pragma GCC unroll 16
        for (int i = 0; i < 4 * L::kPerByte; ++i) {
            const int byte = i / L::kPerByte, slot = i % L::kPerByte;
            const __m512i index = _mm512_srli_epi32(codes, unsigned(8 * byte + L::kSlot * slot));
            const int at = 2 * (byte / 2 * L::kPerByte + slot) + byte % 2;
            w[at] = BITS == 5 ? _mm512_permutex2var_ps(low, index, high) : _mm512_permutexvar_ps(index, low);
        }
    }

    static Vec unit_scale(const float* scales, int unit) { return splat(scales[unit]); }
    // Where element e of block b stands in decoded order, relative to the group's first element.
    static int position(int block, int e) { return block * kBlock + e; }
    static void store_natural(float* dst, const Vec* w) {
        for (int i = 0; i < kUnits * kUnitVecs; ++i) {
            store(dst + i * kLanes, w[i]);
        }
    }

    Vec low, high;
};

template <int BITS, bool WIDE>
using DecoderFor = Decoder<BITS>;
constexpr bool kHasNarrowTables = false;

}  // namespace
}  // namespace kbit
