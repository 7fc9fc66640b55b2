// What mma.cu and mma_sums.cu share: how a block's sums are dealt to its threads, and what becomes of them.
//
// A warp has kTokens tokens and two row tiles: neighbours, or, gated, a tile of gates and that of their ups.
// Its lane 4g + t has, of each tile and every 8 tokens, those of rows g, g, g + 8, g + 8 and tokens 2t, 2t +
// 1 alternately.
#pragma once

#include "common.cuh"
#include "config.h"
#include "matrices.cuh"

using H = Half<Config::bf16>;
constexpr int kTokens = Config::tokens, kEights = kTokens / 8;
constexpr int kSlices = Config::slices, kRowWarps = Config::warps / kSlices;
constexpr int kThreads = Config::warps * 32, kFinishing = kRowWarps * 32;
constexpr int kQuads = 2 * kEights;  // a thread's sums, by four

typedef float Sums[2][kEights][4];

DEVICE float4 quad_of(const Sums& sums, int i) {
    const float (&four)[4] = sums[i % 2][i / 2];
    return {four[0], four[1], four[2], four[3]};
}
DEVICE void add_quad(Sums& sums, int i, float4 v) {
    float (&four)[4] = sums[i % 2][i / 2];
    four[0] += v.x;
    four[1] += v.y;
    four[2] += v.z;
    four[3] += v.w;
}

struct Result {
    const float* scale;
    const u16* bias;  // or null
    u16* y;
    int end, n, gated, vector;  // rows of y from `end` on stay; vector: its rows are whole 16 bytes

    // Tile `i` of row warp `warp`, counted over all blocks; beyond the last it is the last.
    DEVICE int tile(int warp, int i) const {
        const int tiles = (n + 15) / 16, gates = tiles / 2;
        return gated ? min(warp, gates - 1) + i * gates : min(2 * warp + i, tiles - 1);
    }
    DEVICE int width() const { return gated ? n / 2 : n; }

    // Columns `column` and the next one of row `token` of y.
    DEVICE void store_two(int token, int column, u32 two) const {
        u16* const to = y + u64(token) * width() + column;
        if (token < end && column < width()) {
            to[0] = u16(two);
        }
        if (token < end && column + 1 < width()) {
            to[1] = u16(two >> 16);
        }
    }
    // Four 8 x 8 matrices, WIDE of them beside each other in y, the others below; their rows are columns of
    // y.
    template <int WIDE>
    DEVICE void store(u32 (&v)[4], int token, int column, int lane) const {
        const int g = lane >> 2, t = lane & 3;
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            v[i] = transposed(v[i]);
        }
        if (!vector) {
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                store_two(token + i / WIDE * 8 + g, column + i % WIDE * 8 + 2 * t, v[i]);
            }
            return;
        }
        transpose_four_lanes(v, t);  // a row of matrix t
        token += t / WIDE * 8 + g;
        column += t % WIDE * 8;
        if (token < end && column < width()) {
            *reinterpret_cast<uint4*>(y + u64(token) * width() + column) = make_uint4(v[0], v[1], v[2], v[3]);
        }
    }

    // The sums of row warp `warp`, counted over all blocks, and tokens from `token` on.
    DEVICE void finish(const Sums& sums, int warp, int token, int lane) const {
        const float factor = __ldg(scale);
        float added[2][2];
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            const int row = tile(warp, i / 2) * 16 + i % 2 * 8 + (lane >> 2);
            added[i / 2][i % 2] = bias != nullptr && row < n ? H::widen(bias[row]) : 0.0f;
        }
        const auto value = [&](int tile, int eight, int i) {
            return sums[tile][eight][i] * factor + added[tile][i / 2];
        };
        const auto product = [&](int eight, int i) {
            return silu_and_mul<Config::bf16>(value(0, eight, i), value(1, eight, i));
        };
#pragma unroll
        for (int eight = 0; eight < kEights; eight += 2) {
            u32 v[4];
            if (gated) {
#pragma unroll
                for (int i = 0; i < 4; ++i) {
                    const int e = eight + i / 2, at = i % 2 * 2;
                    v[i] = H::pack(product(e, at), product(e, at + 1));
                }
                store<2>(v, token + eight * 8, warp * 16, lane);
                continue;
            }
#pragma unroll
            for (int e = eight; e < eight + 2; ++e) {
#pragma unroll
                for (int i = 0; i < 4; ++i) {
                    const int at = i % 2 * 2;
                    v[i] = H::pack(value(i / 2, e, at), value(i / 2, e, at + 1));
                }
                store<4>(v, token + e * 8, warp * 32, lane);
            }
        }
    }
};
