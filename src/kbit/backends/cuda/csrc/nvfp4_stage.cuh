// How activations and weights reach the warps of nvfp4_gemm.cu; its header tells the plan.
#pragma once

#include "config.h"
#include "nvfp4_decode.cuh"

constexpr bool kExact = Config::accum == 0, kChained = Config::accum == 2;
constexpr int kTokens = Config::tokens, kTiles = kTokens / 8, kStages = Config::stages;
constexpr int kTeams = Config::teams;
constexpr int kStepColumns = 256, kSubBlocks = 16;
constexpr int kRowBytes = 144, kStageBytes = 16 * kRowBytes;
constexpr int kLaneBytes = kExact ? 4 : 8;  // of the B operand of a sub-block
constexpr int kOperandBytes = kSubBlocks * kTiles * 32 * kLaneBytes;
constexpr int kFactorBytes = kExact ? kSubBlocks * kTokens * 4 : 0;
constexpr int kStepBytes = kOperandBytes + kFactorBytes;
constexpr int kMinThreads = kTokens == 8 ? 64 : 128;  // of a team
// 32 columns of a token are a piece of work; so many has a thread at most.
constexpr int kPieces = kTokens * 8 <= kMinThreads ? 1 : kTokens * 8 / kMinThreads;

struct Problem {
    const u8 *a_codes, *a_scales;
    int columns;
    // Of this block: rows first .. end - 1 of y. Of this team: steps begin .. end_step - 1.
    int expert, first, end, begin, end_step;
    int thread, threads;  // of this team
};

// ---- activations: raw codes in registers for a step, then operands in shared memory

struct Activations {
    int row[kPieces];  // of A; -1 for none
    uint4 codes[kPieces];
    u32 scales[kPieces];

    DEVICE static int token(int piece) { return piece % kTokens; }
    DEVICE static int part(int piece) { return piece / kTokens; }
    DEVICE static int piece(const Problem& p, int i) { return p.thread + i * p.threads; }

    DEVICE void locate(const Problem& p, const int* rows) {
#pragma unroll
        for (int i = 0; i < kPieces; ++i) {
            const int at = piece(p, i), r = p.first + token(at);
            row[i] = at < kTokens * 8 && r < p.end ? (rows != nullptr ? rows[r] : r) : -1;
        }
    }
    DEVICE void load(const Problem& p, int step) {
#pragma unroll
        for (int i = 0; i < kPieces; ++i) {
            const int column = step * kStepColumns + part(piece(p, i)) * 32;
            codes[i] = make_uint4(0, 0, 0, 0);
            scales[i] = 0;
            if (row[i] >= 0 && column < p.columns) {
                const i64 at = i64(row[i]) * p.columns + column;
                codes[i] = __ldg(reinterpret_cast<const uint4*>(p.a_codes + at / 2));
                scales[i] = __ldg(reinterpret_cast<const u16*>(p.a_scales + at / 16));
            }
        }
    }
    // The 16 bits of every lane t of a sub-block, one after another.
    DEVICE static void store(const CodeBytes& bytes, u32 to, u32 low, u32 high, u32 scale) {
        if constexpr (kExact) {
            store_shared4(
                to, make_uint4(bytes.of(low), bytes.of(low >> 16), bytes.of(high), bytes.of(high >> 16)));
        } else {
            u32 v[8];
            code_halves(permute(low, 0, 0x7170), scale, v[0], v[1]);
            code_halves(permute(low, 0, 0x7372), scale, v[2], v[3]);
            code_halves(permute(high, 0, 0x7170), scale, v[4], v[5]);
            code_halves(permute(high, 0, 0x7372), scale, v[6], v[7]);
            store_shared4(to, make_uint4(v[0], v[1], v[2], v[3]));
            store_shared4(to + 16, make_uint4(v[4], v[5], v[6], v[7]));
        }
    }
    DEVICE void decode(const Problem& p, const CodeBytes& bytes, u32 step_at) const {
#pragma unroll
        for (int i = 0; i < kPieces; ++i) {
            const int at = piece(p, i);
            if (at >= kTokens * 8) {
                continue;
            }
            const int token = this->token(at), sub = part(at) * 2;
            const u32 clean = clean_scales(scales[i]), both = permute(clean, 0, 0x7170) << 7 & 0x3f803f80u;
            const u32 to = step_at + ((sub * kTiles + token / 8) * 32 + token % 8 * 4) * kLaneBytes;
            constexpr u32 kNext = kTiles * 32 * kLaneBytes;
            const u32 operands = kExact ? 0 : scale_operands(both);
            store(bytes, to, codes[i].x, codes[i].y, permute(operands, 0, 0x1010));
            store(bytes, to + kNext, codes[i].z, codes[i].w, permute(operands, 0, 0x3232));
            if constexpr (kExact) {
                const u32 factor = step_at + kOperandBytes + (sub * kTokens + token) * 4;
                put_shared(factor, u32(scale_integer(u16(both))));
                put_shared(factor + kTokens * 4, u32(scale_integer(u16(both >> 16))));
            }
        }
    }
};

// ---- weights: 16 rows of a warp, kStages steps in flight

struct Weights {
    const u8 *codes, *scales;  // of the expert
    u32 base;
    int row, n, columns;  // first row of the warp

    DEVICE void fetch(int step, int slot, int lane) const {
        const u32 to = base + slot * kStageBytes;
        const int bytes = columns / 2, from = step * (kStepColumns / 2) + lane % 8 * 16;
        if (from < bytes) {
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                const int r = i * 4 + lane / 8;
                // Rows beyond the last repeat it; their sums are not stored.
                stage16(to + r * kRowBytes + lane % 8 * 16, codes + i64(min(row + r, n - 1)) * bytes + from);
            }
        }
        const int groups = columns / 16, first = step * kSubBlocks, r = lane % 16;
        const u8* line = scales + i64(min(row + r, n - 1)) * groups + first;
        const u32 at = to + r * kRowBytes + 128;
        if (groups % 16 == 0) {
            if (lane < 16) {
                stage16(at, line);
            }
        } else {
#pragma unroll
            for (int i = 0; i < 2; ++i) {
                const int word = (lane / 16 * 2 + i) * 4;
                if (first + word < groups) {
                    asm volatile("cp.async.ca.shared.global [%0], [%1], 4;" ::"r"(at + word), "l"(line + word)
                                 : "memory");
                }
            }
        }
    }
};
