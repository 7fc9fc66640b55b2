// A lane's words of a tile (layout.py): where they are, and where its 16 pairs are in them.
#pragma once

#include "rows.cuh"

constexpr int kTileRows = 16;
constexpr int kTileColumns = 64;
template <int BITS>
constexpr int kTileWords = 32 * BITS + 8;

template <int BITS>
struct Pairs {
    static constexpr int kPerWord = BITS == 2 ? 8 : 4;
    static constexpr int kVector = BITS >= 4 ? 4 : 2;
    static constexpr u32 kCode = (1u << BITS) - 1;

    // 5 bits: low four bits of the codes as at 4 bits, inverted where bit 4 is set; that is in the last word.
    static constexpr bool kSigned = BITS == 5;
    static constexpr __device__ int sign_bit(int pair, int code) { return (code ? 31 : 15) - pair; }

    // Whether both codes of a pair lie in a word as they are. The last four of 3 bits do not: bits 2w and
    // 2w + 1 are at spare_bit of word w.
    static constexpr __device__ bool in_words(int pair) { return !kSigned && pair < kPerWord * BITS; }
    static constexpr __device__ int word(int pair) { return pair / kPerWord; }
    static constexpr __device__ int bit(int pair) {
        return BITS == 2 ? pair % 8 / 2 * 8 + pair % 2 * 2 : pair % kPerWord * 8;
    }
    // From the first code of a pair in a word to its second.
    static constexpr int kSecond = BITS == 2 ? 4 : BITS;
    static constexpr __device__ int spare_bit(int pair) { return (pair - 12) * 8 + 6; }

    static DEVICE void load(u32 (&w)[BITS], const u32* tile, int lane) {
        load_words<kVector>(w, tile + lane * kVector);
        if constexpr (BITS % 2) {
            w[BITS - 1] = __ldg(tile + 32 * kVector + lane);
        }
    }
    static DEVICE void store(u32* tile, const u32 (&w)[BITS], int lane) {
        store_words<kVector>(tile + lane * kVector, w);
        if constexpr (BITS % 2) {
            tile[32 * kVector + lane] = w[BITS - 1];
        }
    }
    static DEVICE u32 get(const u32 (&w)[BITS], int pair) {
        if constexpr (kSigned) {
            const u32 low = w[word(pair)] >> bit(pair);
            const auto code = [&](int i) {
                return (low >> (4 * i) & 15u) ^ (w[BITS - 1] >> sign_bit(pair, i) & 1) * kCode;
            };
            return code(0) | code(1) << BITS;
        }
        if (in_words(pair)) {
            const u32 field = w[word(pair)] >> bit(pair);
            return (field & kCode) | (field >> (kSecond - BITS) & kCode << BITS);
        }
        u32 value = 0;
#pragma unroll
        for (int i = 0; i < BITS; ++i) {
            value |= (w[i] >> spare_bit(pair) & 3) << (2 * i);
        }
        return value;
    }
    // w |= pair, on zeros. Not for 5 bits.
    static DEVICE void put(u32 (&w)[BITS], int pair, u32 value) {
        if (in_words(pair)) {
            w[word(pair)] |= ((value & kCode) | (value >> BITS) << kSecond) << bit(pair);
            return;
        }
#pragma unroll
        for (int i = 0; i < BITS; ++i) {
            w[i] |= (value >> (2 * i) & 3) << spare_bit(pair);
        }
    }
};
