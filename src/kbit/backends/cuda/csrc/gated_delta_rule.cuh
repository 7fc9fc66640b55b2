// Chunks of the gated delta rule: sizes, and where tensor cores' operands lie in shared memory.
//
// Of a head, with S the state before a chunk of tokens i, G the sum of logarithms of decays from its first
// token, k of length 1, and A = beta_i exp(G_i - G_j) k_i k_j for j < i:
//
//   change = (1 + A)^-1 diag(beta) (v - exp(G) k S)
//   o = (exp(G) q S + tril(exp(G_i - G_j) q_i k_j) change) / sqrt(dim)
//   S = exp(G_last) S + k^T diag(exp(G_last - G)) change
//
// gated_delta_chunks.cu computes what is known of a chunk without its state, all chunks at once;
// gated_delta_rule.cu goes through the chunks of a head in turn.
#pragma once

#include "config.h"
#include "fragments.cuh"
#include "matrices.cuh"
#include "rows.cuh"
#include "stage16.cuh"

using H = Half<Config::bf16>;

constexpr int kDim = Config::dim, kChunk = Config::chunk, kTiles = kChunk / 16;
// Bytes between rows of 16-bit matrices: an odd number of pieces, for ldmatrix.
constexpr u32 kRowPitch = kDim * 2 + 16, kSquarePitch = kChunk * 2 + 16;
constexpr u32 kRowsBytes = kChunk * kRowPitch, kSquareBytes = kChunk * kSquarePitch;

// 64 rows of PIECES of 16 bytes, `step` elements apart, by THREADS of a block; zeros behind the first
// `there`.
template <int PIECES, int THREADS>
DEVICE void stage_rows(u32 to, u32 pitch, const u16* from, i64 step, int there, int thread) {
    constexpr int kAtOnce = THREADS / PIECES;
    const int row = thread / PIECES, piece = thread % PIECES;
    const u16* at = from + row * step + piece * 8;
    to += row * pitch + piece * 16;
    if (there == kChunk) {
#pragma unroll
        for (int i = 0; i < kChunk / kAtOnce; ++i) {
            stage16(to + i * kAtOnce * pitch, at + i * kAtOnce * step);
        }
        return;
    }
    for (int i = 0; i < kChunk / kAtOnce; ++i) {
        const bool is_there = row + i * kAtOnce < there;
        stage16_if(to + i * kAtOnce * pitch, is_there ? at + i * kAtOnce * step : from, is_there);
    }
}
