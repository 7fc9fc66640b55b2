// Decoding in plain C++ (four lanes, of SSE2 or whatever the target has). Eight codes are assembled at a time
// as bytes of a 64-bit word: a table spreads the bits of one plane's byte.
#pragma once

#include "lanes4.h"

namespace kbit {
namespace {

constexpr int kTileTokens = 3;

inline Vec fma(Vec a, Vec b, Vec c) {
    return a * b + c;
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
