// How wgmma.cu's sums become rows of y: scaled, biased, gated, rounded, and transposed by way of shared
// memory.
#pragma once

#include "quads.cuh"
#include "wgmma.cuh"

struct Output {
    const float* scale;  // of every expert's matrix
    const u16* bias;
    const float* row_scale;  // NVFP4: of every row of x, or null
    u16* y;
    int width;
    bool wide;  // 16-byte stores are aligned

    DEVICE u16* at(int row, int column) const { return y + u64(row) * width + column; }
    // The eight columns at `to`, from `column` on, those that exist; the first does.
    template <bool WIDE>
    DEVICE void store(u16* to, int column, uint4 v) const {
        if constexpr (WIDE) {
            store16(to, v);
            return;
        }
#pragma unroll 1
        for (int e = 0; e < 8 && column + e < width; ++e) {
            to[e] = u16(v.x);
            v = {v.x >> 16 | v.y << 16, v.y >> 16 | v.z << 16, v.z >> 16 | v.w << 16, v.w >> 16};
        }
    }
};

// What a thread adds to its sums of a tile, loaded before the sums are there: it takes 600 clocks. Biases not
// by __ldg, which the compiler may move up beyond wait_for_previous. The factor's address looks as if it
// depended on the thread: else it would be kept in a uniform register, and brought there, waited for, between
// the first products. Blocks of two teams with few tokens have no other register to spare.
struct Addends {
    static constexpr bool kVaries = !(kFour && kTurns == 2 && kTokens <= 32);
    Tile tile;
    float factor, bias[2];  // of the rows g and g + 8 of the warp's row tile

    DEVICE Addends(const Problem& p, const Output& out, const Tile& tile_, int warp, int g) : tile(tile_) {
        factor = __ldg(out.scale + tile.expert + (kVaries ? opaque(threadIdx.x) >> 10 : 0));
        bias[0] = bias[1] = 0.0f;
        if (out.bias) {
#pragma unroll
            for (int i = 0; i < 2; ++i) {
                const int row = p.row_tile(tile.block, warp) * 16 + g + 8 * i;
                bias[i] = row < p.n ? H::widen(out.bias[row]) : 0.0f;
            }
        }
    }
    // Sums of 16 rows of W by 16 tokens from `token` on, as the tensor cores leave them, to 16-bit values.
    DEVICE void round(u32 (&v)[4], const float* sums, int token, const float* row_scale) const {
#pragma unroll
        for (int e = 0; e < 4; ++e) {
            float x = sums[2 * e] * factor, y = sums[2 * e + 1] * factor;
            if constexpr (kUe4m3) {
                if (row_scale) {
                    const int at = token + e / 2 * 8 + threadIdx.x % 4 * 2;
                    x *= row_scale[min(at, tile.end - 1)];
                    y *= row_scale[min(at + 1, tile.end - 1)];
                }
            }
            v[e] = H::pack(x + bias[e % 2], y + bias[e % 2]);
        }
    }
};

// Of a block that has all of K, a warpgroup's sums on their way to y. It stages 64 rows of W by kRound tokens
// in one of two buffers, and stores them by whole lines of y, from all threads: the copy engine was slower,
// 128 experts of 512 x 2048 by 512 tokens each took 284 us on an H200 instead of 254. It reads a buffer late,
// and there are but two. A round is staged between the loads and the stores of the one before.
//
// What is the same for all rounds is asked once, before: with branches and addresses of every store's own,
// 128 experts of 2048 x 512 by 512 tokens each took 242 us, and take 228.
template <bool WIDE>
DEVICE void finish(const float (&acc)[kKept / 2], const Output& out, const Addends& with, bool gated,
                   u32 staging, int team, int thread) {
    constexpr int kRounds = (kKept + kRound - 1) / kRound;
    const Tile& tile = with.tile;
    const int warp = thread / 32 % 4, lane = thread % 32, group = thread / 128, inside = thread % 128;
    const int begin = tile.token + (kTurns > 1 ? team * kKept : 0);
    // A thread stores 16 bytes of two tokens, 16 apart; gated, of one, from as much of its gates and its ups.
    const int token = gated ? inside / 4 : inside / 8, chunk = gated ? inside % 4 : inside % 8;
    const int column = (tile.block * kGroups + group) * (gated ? 32 : 64) + chunk * 8;
    const bool stores = column < out.width && token < (gated ? kRound : 16);
    const int left = stores ? min(tile.end - begin, kKept) - token : 0;  // tokens from its first on
    u16* to = out.at(begin + token, column);
    const i64 next = i64(16) * out.width;
    // The chunks of a token are turned by it, so that neither way meets a bank twice.
    const auto staged = [&](int token, int chunk) {
        return staging + token * 128 + ((chunk ^ (token & 7)) * 16);
    };
    const u32 mine = staged(lane % 8 + lane / 16 * 8, warp * 2 + lane / 8 % 2);
    const u32 from = staged(token % kRound, chunk), second = gated ? from ^ 64 : from + 16 * 128;
    const auto stage = [&](int first) {
#pragma unroll
        for (int i = first; i < first + kRound && i < kKept; i += 16) {
            u32 v[4];
            with.round(v, &acc[i / 2], begin + i, out.row_scale);
            store_matrices_transposed(mine + i % (2 * kRound) * 128, v);
        }
    };
    stage(0);
#pragma unroll
    for (int first = 0; first < kKept; first += kRound) {
        const bool two = kRound > 16 && first + 16 < kKept;
        const u32 buffer = first % (2 * kRound) * 128;
        warpgroup_sync(kGroups * team + group);  // staged, and the other buffer has been read
        uint4 v = load_shared4(from + buffer), w = {};
        if (gated || two) {
            w = load_shared4(second + buffer);
        }
        stage(first + kRound);
        if (gated) {
            v = silu_and_mul<Config::bf16>(v, w);
        }
        if (first < left) {
            out.store<WIDE>(to, column, v);
        }
        if (!gated && two && first + 16 < left) {
            out.store<WIDE>(to + next, column, w);
        }
        to += kRound / 16 * next;
    }
    if (kRounds % 2 && kTurns == 1) {  // two teams wait for each other before they stage anything
        warpgroup_sync(kGroups * team + group);
    }
}

DEVICE void finish(const float (&acc)[kKept / 2], const Output& out, const Addends& with, bool gated,
                   u32 staging, int team, int thread) {
    if (!out.wide) {
        finish<false>(acc, out, with, gated, staging, team, thread);
    } else if (gated) {
        finish<true>(acc, out, with, true, staging, team, thread);
    } else {
        finish<true>(acc, out, with, false, staging, team, thread);
    }
}

// The sums of both teams for the tokens that TEAM keeps, half of all; of 16 tokens or fewer team 0 keeps all.
// Those that the other team keeps go by its staging, `staging` for this warpgroup.
template <int TEAM>
DEVICE void add_up_teams(float (&kept)[kKept / 2], const float (&acc)[kSumTokens / 2], u32 staging, int group,
                         int inside) {
    constexpr bool kBoth = kKept < kSumTokens, kHands = kBoth || TEAM == 1, kKeeps = kBoth || TEAM == 0;
    constexpr int kMine = kBoth ? TEAM * kKept / 2 : 0, kOthers = kBoth ? kKept / 2 - kMine : 0;
    constexpr int kAtOnce = kRound < kKept ? kRound : kKept;
    const u32 mine = staging + inside * 16, other = mine + (TEAM ? -kGroups : kGroups) * kStagingBytes;
#pragma unroll
    for (int first = 0; first < kKept; first += kAtOnce) {
        teams_sync(group);  // staging is free
#pragma unroll
        for (int i = first; kHands && i < first + kAtOnce && i < kKept; i += 8) {
            store_shared4(mine + (i - first) * 256, words_of(&acc[kOthers + i / 2]));
        }
        teams_sync(group);
#pragma unroll
        for (int i = first; kKeeps && i < first + kAtOnce && i < kKept; i += 8) {
#pragma unroll
            for (int e = 0; e < 4; ++e) {
                kept[i / 2 + e] = acc[kMine + i / 2 + e];
            }
            add_shared(&kept[i / 2], other + (i - first) * 256);
        }
    }
    teams_sync(group);
}

// Few sums are waited for by their bytes, more by a barrier of the cluster. In us on an H200, counted and by
// a barrier: 5120 x 2048 by 64 tokens in clusters of 6, 7.8 and 8.1; by 256 tokens, 64 a block, in clusters
// of 2, 14.3 and 14.0; by 512 tokens, 128 a block, 22.4 and 21.4.
DEVICE bool counts_bytes(int blocks) {
    return kTokens <= 32 || (kTokens <= 64 && blocks > 3);
}

// The barriers of the cluster in finish_in_cluster, for the warps that have no sums.
DEVICE void syncs_of_finish(const Work& work) {
    if (!kOwnSums) {
        cluster_sync();  // activations have been read,
    }
    if (!counts_bytes(cluster_size())) {
        cluster_sync();  // sums have been sent,
    }
    if (!work.last()) {
        cluster_sync();  // and read
    }
}

// Where a thread of one of two warps finds its two float4 of a unit of sums.
struct SumsPlace {
    static constexpr int kBytes = 2 * 32 * 32, kInHoles = kOwnSums ? kHoleBytes / kBytes : 0;
    u32 holes, rest;

    DEVICE SumsPlace(u32 base, int half, int lane) {
        const u32 mine = half * (kBytes / 2) + lane * 16;
        rest = base + (kOwnSums ? kSumsAt : kActivationsAt) + mine;
        holes = base + D::hole(kListBytes + mine);
    }
    static DEVICE bool in_holes(int unit) {
        constexpr bool kAll = kInHoles > 0 && Config::sums <= kHoleBytes;  // known without asking
        return kAll || (kInHoles > 0 && unit < kInHoles);
    }
    DEVICE u32 first(int unit) const {
        return in_holes(unit) ? holes + unit * 2 * kBytes : rest + (unit - kInHoles) * kBytes;
    }
    // From there to the second.
    DEVICE u32 next(int unit) const { return in_holes(unit) ? 1024 : 512; }
};

// Of a cluster whose blocks have parts of K. The sums of two warps (gates and their ups) for 16 tokens are
// a unit. A block finishes its share of units: all send it theirs, and it adds them up in the blocks' order.
DEVICE void finish_in_cluster(const Problem& p, const float (&acc)[kKept / 2], const Output& out,
                              const Addends& with, const Work& work, u32 base, u32 staging, u32 phase,
                              int team, int thread) {
    const Tile& tile = with.tile;
    constexpr int kFinishers = kSumTokens / kKept;  // teams
    constexpr int kPairs = 2 * kGroups;             // of a team's warps
    constexpr int kUnits = kSumTokens / 16 * kPairs;
    const int warp = uniform(thread / 32), lane = thread % 32, pair = warp / 4 * 2 + warp % 2;
    const int blocks = cluster_size(), rank = cluster_rank(), each = (kUnits + blocks - 1) / blocks;
    const int begin = rank * each, end = min(begin + each, kUnits);
    const SumsPlace place(base, warp / 2 % 2, lane);
    const Divider by_each(each);
    const u32 arrived = base + kSumsBarrierAt;
    const bool counted = counts_bytes(blocks);
    if (!kOwnSums) {
        cluster_sync();
    }
    if (counted && team == 0 && thread == 0) {
        barrier_expect(arrived, max(0, end - begin) * blocks * SumsPlace::kBytes);
    }
#pragma unroll
    for (int i = 0; i < kKept / 16; ++i) {
        const int unit = kPairs * (team * (kKept / 16) + i) + pair, owner = by_each(unit);
        const int at = begin + unit - owner * each;
        const uint4 v[2] = {words_of(&acc[8 * i]), words_of(&acc[8 * i + 4])};
        const u32 to = place.first(at), next = place.next(at), there = cluster_address(to, owner);
        if (counted) {
            const u32 barrier = cluster_address(arrived, owner);
            store_cluster(there, v[0], barrier);
            store_cluster(there + next, v[1], barrier);
        } else if (owner == rank) {
            store_shared4(to, v[0]);
            store_shared4(to + next, v[1]);
        } else {
            store_cluster(there, v[0]);
            store_cluster(there + next, v[1]);
        }
    }
    counted ? barrier_wait(arrived, phase) : cluster_sync();
    const int row_tile = p.row_tile(tile.block, warp);
    constexpr int kTokenBytes = 32;
    const u32 to = staging + warp % 4 * 16 * kTokenBytes;
    const auto sync = [&] { p.gated ? pair_sync(kPairs * team + pair) : __syncwarp(); };
#pragma unroll 1
    for (int unit = (begin + kPairs - 1 - pair) / kPairs * kPairs + pair + kPairs * team; unit < end;
         unit += kPairs * kFinishers) {
        float sum[8] = {};
#pragma unroll 4
        for (int block = 0; block < blocks; ++block) {
            const int from = unit - begin + block * each;
            add_shared(sum, place.first(from));
            add_shared(sum + 4, place.first(from) + place.next(from));
        }
        u32 v[4];
        with.round(v, sum, tile.token + unit / kPairs * 16, out.row_scale);
        store_matrices_transposed(to + (lane % 8 + lane / 16 * 8) * kTokenBytes + lane / 8 % 2 * 16, v);
        sync();
        const int row = tile.token + unit / kPairs * 16 + lane / 2;
        const int column = row_tile * 16 + lane % 2 * 8;
        if (row < tile.end && column < out.width && !(p.gated && warp & 2)) {
            const u32 from = to + lane / 2 * kTokenBytes + lane % 2 * 16;
            uint4 y = load_shared4(from);
            if (p.gated) {
                y = silu_and_mul<Config::bf16>(y, load_shared4(from + 2 * 16 * kTokenBytes));
            }
            u16* const at = out.at(row, column);
            out.wide ? out.store<true>(at, column, y) : out.store<false>(at, column, y);
        }
        sync();  // before the next one's
    }
    if (!work.last()) {
        if (!kOwnSums) {
            visible_to_copies();  // which may come where sums were
        }
        cluster_sync();
    }
}
