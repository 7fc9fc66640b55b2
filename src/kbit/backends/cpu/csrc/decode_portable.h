// Decoding in plain C++ (vector types of GCC and Clang, four lanes: SSE2, NEON or scalar code as the target
// has). Eight codes are assembled at a time as bytes of a 64-bit word: a table spreads the bits of one
// plane's byte.
#pragma once

#include "scales.h"

namespace kbit {
namespace {

typedef float Vec __attribute__((vector_size(16)));
constexpr int kLanes = 4;
constexpr int kTileTokens = 3;
constexpr int kTileRows = 4;
constexpr int kChunkRows = 64;  // gemm.h: 256 KB of decoded weights in a second-level cache of 512 KB or more

inline Vec load(const float* p) {
    Vec v;
    memcpy(&v, p, sizeof v);
    return v;
}
inline void store(float* p, Vec v) {
    memcpy(p, &v, sizeof v);
}
inline Vec splat(float v) {
    return Vec{v, v, v, v};
}
inline Vec fma(Vec a, Vec b, Vec c) {
    return a * b + c;
}

// out[i] += sum of the lanes of v[i], i < 4.
inline void add_sums(const Vec v[4], float* out) {
    for (int i = 0; i < 4; ++i) {
        out[i] += (v[i][0] + v[i][2]) + (v[i][1] + v[i][3]);
    }
}

struct SpreadTable {
    uint64_t entry[256] = {};
    constexpr SpreadTable() {
        for (int byte = 0; byte < 256; ++byte) {
            for (int i = 0; i < 8; ++i) {
                entry[byte] |= uint64_t(byte >> i & 1) << (8 * i);
            }
        }
    }
};
constexpr SpreadTable kSpread;

template <int BITS>
struct Decoder {
    static constexpr int kBlocks = 1;
    static constexpr int kBytes = BITS * 4;
    static constexpr int kUnitVecs = kBlock / kLanes;
    static constexpr int kUnits = 1;
    static constexpr bool kNatural = true;
    static constexpr bool kStaged = false;

    explicit Decoder(const float* levels) : table(levels) {}

    void operator()(const uint8_t* p, Vec* w) const {
        for (int j = 0; j < 4; ++j) {
            uint64_t codes = 0;
            for (int plane = 0; plane < BITS; ++plane) {
                codes |= kSpread.entry[p[4 * plane + j]] << plane;
            }
            float levels[8];
            for (int i = 0; i < 8; ++i) {
                levels[i] = table[codes >> (8 * i) & 31];
            }
            w[2 * j] = load(levels);
            w[2 * j + 1] = load(levels + 4);
        }
    }

    static Vec unit_scale(const float* scales, int) { return splat(scales[0]); }
    static int position(int, int e) { return e; }
    static void store_natural(float* dst, const Vec* w) {
        for (int i = 0; i < kUnitVecs; ++i) {
            store(dst + i * kLanes, w[i]);
        }
    }

    const float* table;
};

template <int BITS, bool WIDE>
using DecoderFor = Decoder<BITS>;
constexpr bool kHasNarrowTables = false;

}  // namespace
}  // namespace kbit
