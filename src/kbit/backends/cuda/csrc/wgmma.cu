// y[m, n] = sum_k x[m, k] * W[n, k] (+ bias[n]) on Hopper's asynchronous tensor cores, for any M.
//
// Gated: W holds 2 * I rows, gates first; y[m, i] = silu(gate[m, i]) * up[m, i], shape [M, I], I % 16 == 0.
//
// Taken from 17 tokens on; stream.cu takes fewer, dequantize + cuBLAS takes all on other GPUs.
//
// Grouped: one W for every expert, and rows of x sorted by expert, as many as there are (groups.cuh).
//
//   weight_map  tensor map of the tiles (layout.py), 32-bit [experts * ceil(N/16), ceil(K/64) * words]: boxes
//               of one tile by 8 tiles, or by 4 if gated
//   codebook    float32 [2^bits]; scale float32 [experts]: the matrices' factors
//   x_map       tensor map of x 16-bit [M, K]: boxes of 64 columns x Config::tokens rows, 128-byte swizzle
//   bias        16-bit [N] or null; y 16-bit [M, N], or [M, N/2] if gated, any alignment of its type
//   offsets     grouped: int32 [experts + 1]
//
// A block computes tiles of 128 rows of W (gated: 64 gates and their 64 ups) by Config::tokens tokens in
// steps of 64 columns. A producer warpgroup keeps kStages steps of packed weights and activations in flight;
// each of eight consumer warps decodes one 16 x 64 weight tile a step into registers, scales it (so that the
// operand is the 16-bit weight that dequantize gives), and two warpgroups multiply: wgmma with A in registers
// and B, the activations, in shared memory. The next step is decoded while the tensor cores work on this one.
//
// Few tiles: a cluster of blocks splits K, leaves float32 sums in shared memory, and every block adds up its
// share of the tokens over the blocks in their order. Otherwise blocks stay and take tile after tile. Either
// way the order of sums depends on shapes alone.
//
// Shared memory: table, ring of kStages * (tokens * 128 bytes + 8 tiles), staging for y (64 tokens),
// barriers. Technique: decode into registers as the A operand (operands swapped) from FLUTE and Machete.
#include "config.h"
#include "decode.cuh"
#include "groups.cuh"
#include "hopper.cuh"
#include "wgmma_instruction.h"

using D = Decoder<Config::bits, Config::bf16, false>;
using H = Half<Config::bf16>;

static_assert(D::kTableBytes == Config::table_bytes);

constexpr int kTokens = Config::tokens;
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
constexpr int kConsumers = 256;  // threads
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
        const Group g = list[find_group(list, groups, piece)];
        return {g.expert, i % row_blocks, g.first + (piece - g.before) * kTokens, g.first + g.count};
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

// Warp 0 of the producers copies weights, warp 1 activations; one lane of each. A step beyond K is all zeros.
// (Eight copies of a tile instead of a box took 800 clocks a step.)
DEVICE void produce(const Problem& p, Ring ring, const TensorMap* map, int tile, int stride, bool weights) {
    constexpr int kWords = D::kTileBytes / 4;
    if (!weights) {
        wait_for_previous();
    }
    for (; tile < p.tiles(); tile += stride) {
        const Tile at = p.tile(tile);
        const int row_tile = at.expert * p.row_tiles + at.block * (p.gated ? kRowTiles / 2 : kRowTiles);
        for (int i = 0; i < p.steps(); ++i) {
            const int step = p.first_step + i < p.end_step ? p.first_step + i : p.k_tiles;
            barrier_wait(ring.empty(), ring.phase ^ 1);
            barrier_expect(ring.full(), weights ? kWeightBytes : kActivationBytes);
            if (!weights) {
                copy_box(ring.activations(), map, step * kStepColumns, at.token, ring.full());
            } else if (!p.gated) {
                copy_box(ring.weights(), map, step * kWords, row_tile, ring.full());
            } else {
                copy_box(ring.weights(), map, step * kWords, row_tile, ring.full());
                copy_box(ring.weights() + kWeightBytes / 2, map, step * kWords, row_tile + p.row_tiles / 2,
                         ring.full());
            }
            ring.next();
        }
    }
}

// A consumer warp's tile of the step in `ring`, as the A operands of its four k16 steps.
DEVICE void decode_step(u32 (&a)[4][4], const D& decode, const Ring& ring, int slot, int lane) {
    barrier_wait(ring.full(), ring.phase);
    const u32 tile = ring.weights() + slot * D::kTileBytes;
    u32 w[Config::bits];
    D::load(w, tile, lane);
    const u32 scales = load_shared(tile + 128 * Config::bits + lane / 4 * 4);
    const u32 pairs[4] = {scale_pair<Config::bf16, 0>(scales), scale_pair<Config::bf16, 2>(scales),
                          scale_pair<Config::bf16, 1>(scales), scale_pair<Config::bf16, 3>(scales)};
    static_for<4>([&](auto j) {
        decode.template step<j.value>(w, a[j.value]);
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            a[j.value][i] = H::multiply(a[j.value][i], pairs[j.value / 2 * 2 + i % 2]);
        }
    });
}

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

// acc: [token / 2 ...] of this thread. Blocks of a cluster each finish their share of the tokens.
DEVICE void finish(const Problem& p, float (&acc)[kTokens / 2], const Output& out, const Tile& tile, u32 base,
                   int thread) {
    const int warp = thread / 32, lane = thread % 32, g = lane / 4, group = thread / 128;
    const u32 blocks = cluster_size(), rank = cluster_rank();
    const int row_tile = p.row_tile(tile.block, warp);
    const float unit = __ldg(out.scale + tile.expert);
    float bias[2] = {};
    if (out.bias) {
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            const int row = row_tile * 16 + g + 8 * i;
            bias[i] = row < p.n ? H::widen(out.bias[row]) : 0.0f;
        }
    }
    const u32 sums = base + kActivationsAt + thread * 16;  // of a cluster's block: [tokens / 8][256] float4
    if (blocks > 1) {
        consumers_sync();  // the other warpgroup has read its last activations
#pragma unroll
        for (int i = 0; i < kTokens / 8; ++i) {
            store_shared4(sums + i * kConsumers * 16,
                          {__float_as_uint(acc[4 * i]), __float_as_uint(acc[4 * i + 1]),
                           __float_as_uint(acc[4 * i + 2]), __float_as_uint(acc[4 * i + 3])});
        }
        cluster_sync();
    }
#pragma unroll
    for (int i = 0; i < kTokens / 16; ++i) {
        constexpr int kGroups = kStagingTokens / 16;
        if (i % kGroups == 0) {
            warpgroup_sync(group);  // the staging buffer is free
        }
        const bool mine = (i & (blocks - 1)) == rank;
        if (mine) {
            if (blocks > 1) {
                add_over_cluster(&acc[8 * i], sums + 2 * i * kConsumers * 16, blocks);
                add_over_cluster(&acc[8 * i + 4], sums + (2 * i + 1) * kConsumers * 16, blocks);
            }
            u32 v[4];
#pragma unroll
            for (int e = 0; e < 4; ++e) {
                v[e] = H::pack(acc[8 * i + 2 * e] * unit + bias[e % 2],
                               acc[8 * i + 2 * e + 1] * unit + bias[e % 2]);
            }
            const int token = i % kGroups * 16 + lane % 8 + lane / 16 * 8;
            const int chunk = warp % 4 * 2 + lane / 8 % 2;
            store_matrices_transposed(shared_address(out.staging) + out.staged(token, chunk), v);
        }
        if (i % kGroups == kGroups - 1 || i == kTokens / 16 - 1) {
            warpgroup_sync(group);
            const int first = i / kGroups * kStagingTokens, tokens = (i + 1) * 16 - first;
            out.store(p, tile, first, tokens, blocks, rank, group, thread % 128);
        }
    }
}

DEVICE void consume(const Problem& p, Ring ring, const D& decode, const Output& out, int tile, int stride,
                    int thread) {
    const int slot = p.slot(uniform(thread / 32)), lane = thread % 32;
    const u32 base = ring.base;
    bool waited = false;
    for (; tile < p.tiles(); tile += stride) {
        float acc[kTokens / 2];
#pragma unroll
        for (int i = 0; i < kTokens / 2; ++i) {
            acc[i] = 0.0f;
        }
        u32 a[2][4][4];
        Ring ahead = ring;
        const int steps = p.steps();
        u32 used = 0;  // empty barrier of the step before
        decode_step(a[0], decode, ahead, slot, lane);
        ahead.next();
        const auto step = [&](u32(&now)[4][4], u32(&then)[4][4], int i) {
            wgmma_fence();
            const u64 b = descriptor(ring.activations());
#pragma unroll
            for (int j = 0; j < 4; ++j) {
                multiply_add(acc, now[j], b + 2 * j);
            }
            wgmma_commit();
            wgmma_wait<1>();  // the step before is done: its registers and its slot are free
            if (i != 0) {
                warp_arrive(used, lane);
            }
            used = ring.empty();
            ring.next();
            if (i + 1 < steps) {
                decode_step(then, decode, ahead, slot, lane);
                ahead.next();
            }
        };
        for (int i = 0; i < steps; i += 2) {
            step(a[0], a[1], i);
            step(a[1], a[0], i + 1);
        }
        wgmma_wait<0>();
#pragma unroll
        for (int i = 0; i < kTokens / 2; ++i) {
            asm volatile("" : "+f"(acc[i])::"memory");  // not read before the wait
        }
        warp_arrive(used, lane);
        if (!waited) {
            wait_for_previous();
            waited = true;
        }
        finish(p, acc, out, p.tile(tile), base, thread);
    }
}

extern "C" __global__ void __launch_bounds__(384, 1)
    wgmma(const float* __restrict__ codebook, const float* __restrict__ scale, const u16* bias, u16* y,
          const int* offsets, const __grid_constant__ TensorMap weight_map,
          const __grid_constant__ TensorMap x_map, int n, int k, int m, int experts, int gated) {
    extern __shared__ __align__(1024) u8 memory[];
    launch_dependents();
    const int thread = threadIdx.x, warp = uniform(thread / 32), lane = thread % 32;
    const u32 blocks = cluster_size(), rank = cluster_rank();
    Problem p;
    p.n = n;
    p.k = k;
    p.m = m;
    p.gated = gated != 0;
    p.k_tiles = (k + kStepColumns - 1) / kStepColumns;
    p.row_tiles = (n + 15) / 16;
    const int rows = gated ? p.row_tiles / 2 : p.row_tiles;
    const int per_block = gated ? kRowTiles / 2 : kRowTiles;
    p.row_blocks = (rows + per_block - 1) / per_block;
    p.token_blocks = (m + kTokens - 1) / kTokens;
    p.first_step = p.k_tiles * rank / blocks;
    p.end_step = p.k_tiles * (rank + 1) / blocks;
    const int tile = blockIdx.x / blocks, stride = gridDim.x / blocks;
    Ring ring{shared_address(memory)};
    if (thread == 0) {
        Ring each = ring;
        for (int s = 0; s < kStages; ++s, each.next()) {
            barrier_init(each.full(), 2);
            barrier_init(each.empty(), kConsumers / 32 * kWarpArrivals);
        }
        barriers_visible();
    }
    const float level = D::level(codebook, lane);
    __syncthreads();
    if constexpr (kGrouped) {
        wait_for_previous();
        Group* const list = reinterpret_cast<Group*>(memory + kListAt);
        int* const scratch = reinterpret_cast<int*>(memory + kScratchAt);
        const Listed all = list_groups(list, scratch, offsets, experts, m, kTokens);
        clear_other_rows(y, offsets, experts, m, p.width());
        p.list = list;
        p.groups = all.groups;
        p.token_blocks = all.pieces;
    }
    if (warp < 4) {
        fewer_registers<40>();
        if (warp < 2 && lane == 0) {
            produce(p, ring, warp == 0 ? &weight_map : &x_map, tile, stride, warp == 0);
        }
        __syncwarp();
        if (blocks > 1) {
            cluster_sync();
        }
    } else {
        more_registers<232>();
        D::fill(memory, level, thread - 128, kConsumers);
        consumers_sync();
        const D decode(memory, lane);
        u8* staging = memory + kStagingAt + (warp / 4 - 1) * kStagingBytes;
        consume(p, ring, decode, {scale, bias, y, staging}, tile, stride, thread - 128);
    }
    if (blocks > 1) {
        cluster_sync();  // no block leaves while others read its sums
    }
}
