// y[t, n] = tensor_scale * sum_b absmax[n, b] * (sum_{i < 32} table[code[n, b, i]] * x[t, b, i]) + bias[n], t
// < 4.
//
// Packed words are read once and decoded in registers; nothing is written but y. Used for up to kGemvTokens
// tokens, where decoding costs more than multiplying; gemm.h takes over above.
// x: float32 in decoded order, zero-padded to whole groups. Sums are float32: per block, lane by lane in one
// chain (two chains and an addition: 7% slower on AVX2), the block scale applied by one fused multiply-add;
// the units of a group alternate between two accumulators, lanes are summed last. The order depends on
// neither threads nor row splits. Two or four rows at a time, sharing the loads of x, gained nothing; scales
// of four rows decoded at once do where rows are short, since a loop's rest of fewer blocks than a vector has
// takes as long as three vectors: 8 experts of 2048 x 768 by a token each, two threads of a Zen 5, 246 to 177
// us.
//
// AVX2 decodes by long chains of dependent instructions. Transposing planes one group ahead of the look-ups
// takes 256 x 4096 from cache on one Zen 5 core (bfloat16, M = 1) from 0.067 to 0.063 ms at k = 5 and from
// 0.043 to 0.041 at k = 2 with GFNI, from 0.081 to 0.070 at k = 4 without.
#pragma once

#include "rows.h"

namespace kbit {
namespace {

constexpr int kGemvTokens = 4;
constexpr int kGemvRows = 4;          // that share a lane reduction, add_sums
constexpr int kGemvMostBlocks = 8;    // of a group of any decoder
constexpr int64_t kGemvAhead = 4096;  // bytes prefetched before those being decoded

template <int TOKENS, class D>
inline __attribute__((always_inline)) void gemv_row(const LinearJob& job, const D& decode, int64_t row,
                                                    const float* scales, Vec* sums) {
    const Weight& w = job.weight;
    const float* x = static_cast<const float*>(job.x);
    Vec even[TOKENS], odd[TOKENS];
    for (int t = 0; t < TOKENS; ++t) {
        even[t] = odd[t] = splat(0.0f);
    }
    const auto multiply = [&](int64_t g, const Vec* v) __attribute__((always_inline)) {
#pragma GCC unroll 8
        for (int u = 0; u < D::kUnits; ++u) {
            const Vec scale = D::unit_scale(scales + g * D::kBlocks, u);
            const int64_t column = g * D::kBlocks * kBlock + u * D::kUnitVecs * kLanes;
#pragma GCC unroll 4
            for (int t = 0; t < TOKENS; ++t) {
                const float* xt = x + t * job.x_stride + column;
                Vec dot = v[u * D::kUnitVecs] * load(xt);
#pragma GCC unroll 8
                for (int i = 1; i < D::kUnitVecs; ++i) {
                    dot = fma(v[u * D::kUnitVecs + i], load(xt + i * kLanes), dot);
                }
                Vec& acc = u % 2 == 0 ? even[t] : odd[t];
                acc = fma(dot, scale, acc);
            }
        }
    };
    Vec v[D::kUnits * D::kUnitVecs];
    const auto group = [&](int64_t g, const uint8_t* p) __attribute__((always_inline)) {
        decode(p, v);
        multiply(g, v);
    };
    if constexpr (D::kStaged) {
        const int64_t whole = w.blocks / D::kBlocks;
        const uint8_t* p = w.packed + row * w.blocks * w.bits * 4;
        if (whole > 0) {
            auto codes = D::codes(p);
            for (int64_t g = 0; g + 1 < whole; ++g) {
                p += D::kBytes;
                __builtin_prefetch(p + kGemvAhead);
                const auto next = D::codes(p);
                decode.look_up(codes, v);
                multiply(g, v);
                codes = next;
            }
            decode.look_up(codes, v);
            multiply(whole - 1, v);
        }
        for_each_group<D>(w, row, whole * D::kBlocks, w.blocks % D::kBlocks, kGemvAhead,
                          [&](int64_t, const uint8_t* rest)
                              __attribute__((always_inline)) { group(whole, rest); });
    } else {
        for_each_group<D>(w, row, 0, w.blocks, kGemvAhead, group);
    }
    for (int t = 0; t < TOKENS; ++t) {
        sums[kGemvRows * t] = even[t] + odd[t];
    }
}

inline void write_output(const LinearJob& job, int64_t token, int64_t row, const float* sums, int64_t count) {
    with_dtype(job.dtype, [&](auto sample) {
        using T = decltype(sample);
        T* out = static_cast<T*>(job.out) + token * job.out_stride + row;
        const T* bias = static_cast<const T*>(job.bias);
        for (int64_t i = 0; i < count; ++i) {
            narrow(bias ? sums[i] + widen(bias[row + i]) : sums[i], out[i]);
        }
    });
}

// Floats of workspace.
inline int64_t gemv_scales(const Weight& w) {
    return kGemvRows * w.blocks + kGemvMostBlocks;
}

// ROW(row, scales, sums) leaves one vector of partial sums per token at sums[kGemvRows * t]; four rows share
// a lane reduction, and E4M4 scales that are decoded at once: a partial group meets those of the next row,
// which are finite whatever their bytes, and activations of zero.
template <int TOKENS, int BLOCKS, class Row>
inline void gemv_quads(const LinearJob& job, int64_t row_begin, int64_t row_end, float* scales,
                       Row row_sums) {
    const Weight& w = job.weight;
    static_assert(BLOCKS <= kGemvMostBlocks);
    const bool together = w.format == ScaleFormat::kE4M4;
    for (int64_t row = row_begin; row < row_end; row += kGemvRows) {
        const int64_t count = row_end - row < kGemvRows ? row_end - row : kGemvRows;
        Vec sums[kGemvRows * TOKENS];
        for (int i = 0; i < kGemvRows * TOKENS; ++i) {
            sums[i] = splat(0.0f);
        }
        if (together) {
            decode_scales(w, row, 0, count * w.blocks, count * w.blocks + BLOCKS, scales);
        }
        for (int64_t i = 0; i < count; ++i) {
            if (!together) {
                decode_scales(w, row + i, 0, w.blocks, round_up(w.blocks, BLOCKS), scales);
            }
            row_sums(row + i, together ? scales + i * w.blocks : scales, sums + i);
        }
        for (int t = 0; t < TOKENS; ++t) {
            float y[kGemvRows] = {};
            add_sums(sums + kGemvRows * t, y);
            for (float& value : y) {
                value *= job.weight.tensor_scale;
            }
            write_output(job, t, row, y, count);
        }
    }
}

template <int TOKENS>
inline void gemv_rows(const LinearJob& job, int64_t row_begin, int64_t row_end, float* scales) {
    with_decoder(job.weight, [&](auto decode) {
        gemv_quads<TOKENS, decltype(decode)::kBlocks>(
            job, row_begin, row_end, scales, [&](int64_t row, const float* its_scales, Vec* sums) {
                gemv_row<TOKENS>(job, decode, row, its_scales, sums);
            });
    });
}

}  // namespace
}  // namespace kbit
