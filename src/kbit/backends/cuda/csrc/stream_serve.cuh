// The server of a block of stream.cu: adds up the workers' sums, and those of the cluster's blocks, and
// stores y. Everybody waits for it.
#pragma once

#include "hopper.cuh"
#include "stream_sums.cuh"

// float32 [M] or null, where there is any.
template <bool EXISTS>
struct RowScale {
    DEVICE RowScale(const float*) {}
    DEVICE float of(int) const { return 1.0f; }
};
template <>
struct RowScale<true> {
    const float* factors;
    DEVICE float of(int token) const { return factors ? factors[token] : 1.0f; }
};

struct Output {
    const u16* bias;
    u16* y;
    float unit;  // of the sums
    RowScale<kUe4m3> row_scale;

    DEVICE bool there(const Problem& p, int token, int row, int width) const {
        return (kExperts != kDense || token < p.m) && row < width;
    }
    DEVICE float with_bias(float value, int row) const {
        return value * unit + (bias ? H::widen(bias[row]) : 0.0f);
    }
    DEVICE void store(const Problem& p, int token, int row, float value) const {
        if (!there(p, token, row, p.n)) {
            return;
        }
        if constexpr (kUe4m3) {  // rounded after each factor, as NVFP4's contracts say
            value = __fmul_rn(__fmul_rn(value, unit), row_scale.of(token));
            value += bias ? H::widen(bias[row]) : 0.0f;
        } else {
            value = with_bias(value, row);
        }
        y[u64(token) * p.n + row] = H::narrow(value);
    }
    // Row `row` of each half.
    DEVICE void store_gated(const Problem& p, int token, int row, float gate, float up) const {
        const int width = p.n / 2;
        if (there(p, token, row, width)) {
            gate = with_bias(gate, row);
            up = with_bias(up, row + width);
            y[u64(token) * width + row] = H::narrow(silu_and_mul<Config::bf16>(gate, up));
        }
    }
};

// How the blocks of a cluster, 2 or 4 of them, add up their sums. Block i % size finishes row tile i; all of
// them, itself too, send it theirs: [row tile / size][block][gates, ups] of kBytes.
struct Exchange {
    static constexpr int kBytes = kSums * 128;
    u32 base, barrier;  // of this block
    int rank, size;
    bool gated;

    DEVICE u32 part(int row, int block, bool ups) const {
        return base + (((row & -size) + block) * (gated ? 2 : 1) + ups) * kBytes;
    }
    // One thread, before anything can arrive.
    DEVICE void init(int rows) const {
        const int mine = (rows - rank + size - 1) / size;
        barrier_init(barrier, 1);
        barriers_visible();
        barrier_expect(barrier, mine * size * (gated ? 2 : 1) * kBytes);
    }
    DEVICE void send(int row, bool ups, const float (&sums)[kSums], int lane) const {
        const u32 to = cluster_address(part(row, rank, ups) + place_of_sums<128>(lane), row & (size - 1)),
                  there = cluster_address(barrier, row & (size - 1));
#pragma unroll
        for (int i = 0; i < kSums; i += kAtOnce) {
            if constexpr (kAtOnce == 2) {
                store_cluster(to, uint2{__float_as_uint(sums[i]), __float_as_uint(sums[i + 1])}, there);
            } else {
                store_cluster(to + i * 128, words_of(&sums[i]), there);
            }
        }
    }
    // The blocks' sums in their order.
    DEVICE void add_up(float (&sums)[kSums], int row, bool ups, int lane) const {
        for (int block = 0; block < size; ++block) {
            add_stored<128>(sums, part(row, block, ups) + place_of_sums<128>(lane));
        }
    }
};

// What a lane writes of a row tile: its sums, or, with k-blocks beside each other, its share of the sums over
// the lanes that have the same tokens.
struct Results {
    static constexpr int kCount = kOne ? 1 : kSums * kWide / 8;
    float v[kCount];

    DEVICE Results(const float (&sums)[kSums], int t) {
        const bool odd = t & 1, upper = t & 2;
        if constexpr (kOne) {
            const float row = pair(sums[0], sums[1], odd, 1);
            v[0] = row + __shfl_xor_sync(~0u, row, 2);
        } else if constexpr (kWide == 2) {
            v[0] = pair(pair(sums[0], sums[1], odd, 1), pair(sums[2], sums[3], odd, 1), upper, 2);
        } else if constexpr (kWide == 4) {
            v[0] = pair(sums[0], sums[2], upper, 2);
            v[1] = pair(sums[1], sums[3], upper, 2);
        } else {
#pragma unroll
            for (int i = 0; i < kCount; ++i) {
                v[i] = sums[i];
            }
        }
    }
    // The second, or in other lanes the first, of this lane and the one at a distance.
    static DEVICE float pair(float first, float second, bool is_second, int distance) {
        return (is_second ? second : first) + __shfl_xor_sync(~0u, is_second ? first : second, distance);
    }
    static DEVICE int row(int i, int g, int t) {
        return g + 8 * (kOne ? t & 1 : kWide < 8 ? t >> 1 : i >> 1 & 1);
    }
    static DEVICE int token(int i, int t) {
        return kWide == 2 ? t & 1 : kWide == 4 ? 2 * (t & 1) + i : i / 4 * 8 + 2 * t + i % 2;
    }
};

// Adds up the workers' sums. Those that are not complete, and gates, are kept at `totals`, [gates, ups][row].
DEVICE void serve(const Problem& p, const Parts& parts, u32 parts_full, Output out, const Choice& choice,
                  u32 totals, const Exchange& exchange, int lane) {
    const int g = lane >> 2, t = lane & 3;
    const u32 parts_empty = parts_full + 8 * kBuffers;
    const auto kept_at = [&](int row, bool ups) {
        return totals + (ups ? p.rows + row : row) * kSums * 128 + place_of_sums<128>(lane);
    };
    // `sums`: of the ups, if gated.
    const auto store = [&](int row, const float (&sums)[kSums], const float (&gates)[kSums]) {
        int slot = 0, row_tile = p.first + row;
        if constexpr (kExperts == kExpertRows) {
            slot = row_tile / p.per_slot;
            row_tile -= slot * p.per_slot;
            out.unit = choice.factor_of(slot);
        }
        const Results results(sums, t);
        const auto for_mine = [&](auto f) {
#pragma unroll
            for (int i = 0; i < Results::kCount; ++i) {
                if (!kOne || t < 2) {
                    f(i, kOne ? slot : Results::token(i, t), row_tile * 16 + Results::row(i, g, t));
                }
            }
        };
        if (p.gated) {
            const Results of_gates(gates, t);
            for_mine(
                [&](int i, int token, int n) { out.store_gated(p, token, n, of_gates.v[i], results.v[i]); });
        } else {
            for_mine([&](int i, int token, int n) { out.store(p, token, n, results.v[i]); });
        }
    };
    Cursor<kBuffers> in;
    for (int segment = 0; segment < p.segments; ++segment) {
        if (!p.hands_over(segment)) {
            continue;
        }
        const bool adds = p.pass(segment) > 0 && (p.rows > 1 || p.gated), ups = p.ups(segment);
        const bool complete = p.last(segment), writes = complete && (ups || !p.gated);
        for (int row = 0; row < p.rows; ++row) {
            const u32 slot = in.slot();
            barrier_wait(parts_full + 8 * slot, in.phase());
            float sums[kSums] = {}, gates[kSums] = {};
            add_workers(sums, parts, slot);
            warp_arrive(parts_empty + 8 * slot, lane);
            in.next();
            if (adds) {
                add_stored<128>(sums, kept_at(row, ups));
            }
            if (kSplit ? !complete : !writes) {
                store_sums<128>(kept_at(row, ups), sums);
            } else if constexpr (kSplit) {
                exchange.send(row, ups, sums, lane);
            } else {
                if (p.gated) {
                    load_sums<128>(gates, kept_at(row, false));
                }
                store(row, sums, gates);
            }
        }
    }
    if constexpr (kSplit) {
        barrier_wait(exchange.barrier, 0);
        for (int row = exchange.rank; row < p.rows; row += exchange.size) {
            float sums[kSums] = {}, gates[kSums] = {};
            exchange.add_up(sums, row, p.gated, lane);
            if (p.gated) {
                exchange.add_up(gates, row, false, lane);
            }
            store(row, sums, gates);
        }
    }
}
