// What the warps of wgmma.cu share: the problem and its tiles, the ring of packed weights and activations,
// and the way of results to memory.
#pragma once

#include "config.h"
#include "decode.cuh"
#include "groups.cuh"
#include "hopper.cuh"

using D = Decoder<Config::bits, Config::bf16, false>;
using H = Half<Config::bf16>;

static_assert(D::kTableBytes == Config::table_bytes);

constexpr int kTokens = Config::tokens;
constexpr int kTokensLog = kTokens < 32 ? 4 : kTokens < 64 ? 5 : kTokens < 128 ? 6 : kTokens < 256 ? 7 : 8;
static_assert(Config::experts == 0 || 1 << kTokensLog == kTokens);
constexpr int kStages = Config::stages;
constexpr int kRowTiles = 8;
constexpr int kStepColumns = 64;
constexpr int kActivationBytes = kTokens * kStepColumns * 2;
constexpr int kWeightBytes = kRowTiles * D::kTileBytes;
constexpr int kActivationsAt = D::kTableBytes;
constexpr int kWeightsAt = kActivationsAt + kStages * kActivationBytes;
constexpr int kStagingAt = kWeightsAt + kStages * kWeightBytes;
constexpr int kStagingTokens = kTokens < 64 ? kTokens : 64;
constexpr int kStagingBytes = kStagingTokens * 128;  // of a warpgroup: 64 rows of W
constexpr int kBarriersAt = kStagingAt + 2 * kStagingBytes;
constexpr int kConsumers = 256;                 // threads
constexpr bool kGrouped = Config::experts > 0;  // of which the list has room for so many
constexpr int kScratchAt = kBarriersAt + 16 * kStages;
constexpr int kListAt = kScratchAt + 256;

// Of y: a block of rows of an expert's W, and rows of x from `token` on, of which the expert has those up to
// `end`.
struct Tile {
    int expert, block, token, end;
};

struct Problem {
    int n, k, m;
    bool gated;
    int k_tiles, row_tiles, row_blocks, token_blocks, first_step, end_step;

    const Group* list;  // grouped: token_blocks are those of all experts
    int groups;

    DEVICE int tiles() const { return row_blocks * token_blocks; }
    DEVICE Tile tile(int i) const {
        if constexpr (!kGrouped) {
            return {0, i / token_blocks, i % token_blocks * kTokens, m};
        }
        const int piece = i / row_blocks;
        const Group g = find_group(list, groups, piece);
        return {g.expert, i % row_blocks, g.first + (piece - g.before) * kTokens, g.end};
    }
    DEVICE int width() const { return gated ? n / 2 : n; }
    // Even, since registers of steps alternate; a step too many multiplies old weights by zeros.
    DEVICE int steps() const { return (end_step - first_step + 1) / 2 * 2; }
    // Where the row tile of consumer warp `i` is among the eight of a step. Gates come first, and each
    // warpgroup has two of them and their ups.
    DEVICE int slot(int i) const { return gated ? i / 4 * 2 + i % 2 + i / 2 % 2 * 4 : i; }
    // Which row tile of W that is, in a block of rows; it may be beyond the last.
    DEVICE int row_tile(int block, int i) const {
        const int at = slot(i), half = kRowTiles / 2;
        return gated ? block * half + at % half + at / half * (row_tiles / 2) : block * kRowTiles + at;
    }
};

struct Ring {
    u32 base;
    int slot = 0;
    u32 phase = 0;
    DEVICE u32 full() const { return base + kBarriersAt + 16 * slot; }
    DEVICE u32 empty() const { return full() + 8; }
    DEVICE u32 activations() const { return base + kActivationsAt + slot * kActivationBytes; }
    DEVICE u32 weights() const { return base + kWeightsAt + slot * kWeightBytes; }
    DEVICE void next() {
        if (++slot == kStages) {
            slot = 0;
            phase ^= 1;
        }
    }
};

struct Output {
    const float* scale;  // of every expert's matrix
    const u16* bias;
    u16* y;
    u8* staging;  // of the warpgroup

    // A warpgroup stores the tokens in its staging buffer, 64 rows of W (or 32 pairs) each. Of a cluster,
    // every block has some of the groups of 16 tokens.
    // first: the buffer's in the tile.
    DEVICE void store(const Problem& p, const Tile& tile, int first, int tokens, u32 blocks, u32 rank,
                      int group, int thread) const {
        const int shift = p.gated ? 2 : 3, chunk = thread & ((1 << shift) - 1), at_once = 128 >> shift;
        const int width = p.width(), row = ((tile.block * 2 + group) << (shift + 3)) + chunk * 8;
        const bool wide = width % 8 == 0 && reinterpret_cast<u64>(y) % 16 == 0;
        const int token0 = tile.token + first;
        u16* to = y + u64(token0) * width + row;
#pragma unroll 4
        for (int token = thread >> shift; token < tokens; token += at_once) {
            const bool mine = (u32(first + token) / 16 & (blocks - 1)) == rank;
            if (!mine || token0 + token >= tile.end || row >= width) {
                continue;
            }
            uint4 v = *reinterpret_cast<const uint4*>(staging + staged(token, chunk));
            if (p.gated) {
                const uint4 up = *reinterpret_cast<const uint4*>(staging + staged(token, chunk + 4));
                v = silu_and_mul<Config::bf16>(v, up);
            }
            if (wide) {
                *reinterpret_cast<uint4*>(to + u64(token) * width) = v;
            } else {
                store_some(to + u64(token) * width, v, width - row);
            }
        }
    }
    // 16-byte chunks of a token, turned by it so that tokens start in different banks.
    static DEVICE int staged(int token, int chunk) { return token * 128 + ((chunk ^ (token & 7)) * 16); }
    static DEVICE void store_some(u16* to, uint4 v, int count) {
        const u32 words[4] = {v.x, v.y, v.z, v.w};
#pragma unroll
        for (int e = 0; e < 8; ++e) {
            if (e < count) {
                to[e] = u16(words[e / 2] >> (16 * (e % 2)));
            }
        }
    }
};
