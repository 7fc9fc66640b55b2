// The server of a block of stream.cu: adds up the workers' sums, and those of the cluster's blocks, and
// stores y.
#pragma once

#include "hopper.cuh"
#include "stream.cuh"

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

    // Row `row` of the first half if gated, with the sum of its up row.
    DEVICE void store(const Problem& p, int token, int row, float value, float up) const {
        const int width = p.gated ? p.n / 2 : p.n;
        if ((kExperts == kDense && token >= p.m) || row >= width) {
            return;
        }
        if constexpr (kUe4m3) {  // rounded after each factor, as NVFP4's contracts say
            value = __fmul_rn(__fmul_rn(value, unit), row_scale.of(token));
            y[u64(token) * width + row] = H::narrow(value + (bias ? H::widen(bias[row]) : 0.0f));
            return;
        }
        value = value * unit + (bias ? H::widen(bias[row]) : 0.0f);
        if (p.gated) {
            up = up * unit + (bias ? H::widen(bias[row + width]) : 0.0f);
            value = silu_and_mul<Config::bf16>(value, up);
        }
        y[u64(token) * width + row] = H::narrow(value);
    }
};

// How the blocks of a cluster add up their sums. Block i % size finishes row tile i; all of them, itself too,
// send it theirs: [row tile / size][block][gates, ups] of kBytes.
struct Exchange {
    static constexpr int kAtOnce = kSums < 4 ? 2 : 4, kBytes = kSums * 128;
    u32 base, barrier;  // of this block
    int rank, size;
    bool gated;

    DEVICE u32 part(int row, int block, bool ups) const {
        return base + (((row / size) * size + block) * (gated ? 2 : 1) + ups) * kBytes;
    }
    // One thread, before anything can arrive.
    DEVICE void init(int rows) const {
        const int mine = (rows - rank + size - 1) / size;
        barrier_init(barrier, 1);
        barriers_visible();
        barrier_expect(barrier, mine * size * (gated ? 2 : 1) * kBytes);
    }
    DEVICE void send(int row, bool ups, const float (&sums)[kSums], int lane) const {
        const u32 to = cluster_address(part(row, rank, ups) + lane * kAtOnce * 4, row % size),
                  there = cluster_address(barrier, row % size);
#pragma unroll
        for (int i = 0; i < kSums; i += kAtOnce) {
            const u32 first = __float_as_uint(sums[i]), second = __float_as_uint(sums[i + 1]);
            if constexpr (kAtOnce == 2) {
                store_cluster(to, uint2{first, second}, there);
            } else {
                store_cluster(
                    to + i * 128,
                    uint4{first, second, __float_as_uint(sums[i + 2]), __float_as_uint(sums[i + 3])}, there);
            }
        }
    }
    // The blocks' sums in their order.
    DEVICE void add_up(float (&sums)[kSums], int row, bool ups, int lane) const {
        for (int block = 0; block < size; ++block) {
            const u32 from = part(row, block, ups) + lane * kAtOnce * 4;
#pragma unroll
            for (int i = 0; i < kSums; ++i) {
                sums[i] += __uint_as_float(load_shared(from + i / kAtOnce * kAtOnce * 128 + i % kAtOnce * 4));
            }
        }
    }
};

// Adds up the workers' sums. Those that are not complete, and gates, are kept in `totals` [rows][kSums][32].
DEVICE void serve(const Problem& p, const Parts& parts, u32 parts_full, Output out, const Choice& choice,
                  float* totals, const Exchange& exchange, int lane) {
    const int g = lane >> 2, t = lane & 3;
    const u32 parts_empty = parts_full + 8 * kBuffers;
    float* const up_totals = totals + p.rows * kSums * 32;
    const auto store = [&](int row, int i, float sum, float gate) {
        int slot = 0, row_tile = p.first + row;
        if constexpr (kExperts == kExpertRows) {
            slot = row_tile / p.per_slot;
            row_tile -= slot * p.per_slot;
            out.unit = choice.factor_of(slot);
        }
        if constexpr (kOne) {
            sum = add_four_lanes(sum);
            gate = add_four_lanes(gate);
        }
        if (!kOne || t == 0) {
            const int token = kOne ? slot : i / 4 * 8 + 2 * t + i % 2;
            const int n = row_tile * 16 + g + (kOne ? i : i / 2 % 2) * 8;
            out.store(p, token, n, p.gated ? gate : sum, sum);
        }
    };
    Cursor<kBuffers> in;
    for (int segment = 0; segment < p.segments; ++segment) {
        if (!p.hands_over(segment)) {
            continue;
        }
        for (int row = 0; row < p.rows; ++row) {
            barrier_wait(parts_full + 8 * in.slot, in.phase);
            float sums[kSums] = {};
#pragma unroll 4
            for (int w = 0; w < p.workers; ++w) {
#pragma unroll
                for (int i = 0; i < kSums; ++i) {
                    sums[i] += __uint_as_float(load_shared(parts.row(in.slot, w) + i * kPartStep));
                }
            }
            warp_arrive(parts_empty + 8 * in.slot, lane);
            in.next();
            const bool adds = p.pass(segment) > 0 && (p.rows > 1 || p.gated);
            const bool complete = p.last(segment), writes = complete && (p.ups(segment) || !p.gated);
#pragma unroll
            for (int i = 0; i < kSums; ++i) {
                const int at = (row * kSums + i) * 32 + lane;
                float* kept = (p.ups(segment) ? up_totals : totals) + at;
                if (adds) {
                    sums[i] += *kept;
                }
                if (kSplit ? !complete : !writes) {
                    *kept = sums[i];
                } else if (!kSplit) {
                    store(row, i, sums[i], p.gated ? totals[at] : 0.0f);
                }
            }
            if constexpr (kSplit) {
                if (complete) {
                    exchange.send(row, p.ups(segment), sums, lane);
                }
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
#pragma unroll
            for (int i = 0; i < kSums; ++i) {
                store(row, i, sums[i], gates[i]);
            }
        }
    }
}
