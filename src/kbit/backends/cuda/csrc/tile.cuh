// A lane's words of a tile (layout.py): where they are, and where its 16 pairs are in them.
#pragma once

#include "rows.cuh"

constexpr int kTileRows = 16;
constexpr int kTileColumns = 64;
template <int BITS>
constexpr int kTileWords = 32 * BITS + 8;

template <int BITS>
struct Pairs {
    static constexpr int kPerWord = BITS == 2 ? 8 : BITS == 5 ? 3 : 4;
    static constexpr int kVector = BITS >= 4 ? 4 : 2;
    static constexpr u32 kCode = (1u << BITS) - 1;

    // The last pair of 5 bits and four of 3 bits have no field: bits 2w and 2w + 1 are at spare_bit of word
    // w.
    static constexpr __device__ bool in_words(int pair) { return pair < kPerWord * BITS; }
    static constexpr __device__ int word(int pair) { return pair / kPerWord; }
    static constexpr __device__ int bit(int pair) {
        return BITS == 2 ? pair % 8 / 2 * 8 + pair % 2 * 2 : pair % kPerWord * (BITS == 5 ? 10 : 8);
    }
    // From the first code of a pair in a word to its second.
    static constexpr int kSecond = BITS == 2 ? 4 : BITS;
    static constexpr __device__ int spare_bit(int pair) { return BITS == 3 ? (pair - 12) * 8 + 6 : 30; }

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
    // w |= pair, on zeros.
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
