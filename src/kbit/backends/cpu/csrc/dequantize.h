// Decoding whole rows: dst[c] = round_T(table[code] * absmax * tensor_scale), c < k, exactly k elements
// written. Rounding to float16 and then storing float32 is what a float32 matmul that stands in for a float16
// one needs.
#pragma once

#include "rows.h"

namespace kbit {
namespace {

constexpr int64_t kDecodeAhead = 2048;  // bytes
constexpr int64_t kDecodeBlocks = 64;   // blocks per step: 8 KB of float32 stay in the first-level cache

template <class T>
inline void narrow_span(const float* __restrict src, int64_t count, T* __restrict dst) {
    for (int64_t i = 0; i < count; ++i) {
        narrow(src[i], dst[i]);
    }
}

inline void store_span(const DecodeJob& job, float* src, int64_t column, int64_t count, void* dst) {
    if (job.weight.arithmetic == DType::kFloat16 && job.store == DType::kFloat32) {
        Half rounded[kDecodeBlocks * kBlock];
        narrow_span(src, count, rounded);
        float* out = static_cast<float*>(dst) + column;
        for (int64_t i = 0; i < count; ++i) {
            out[i] = widen(rounded[i]);
        }
        return;
    }
    with_dtype(job.store, [&](auto sample) {
        using T = decltype(sample);
        narrow_span(static_cast<const float*>(src), count, static_cast<T*>(dst) + column);
    });
}

inline void decode_row(const DecodeJob& job, int64_t row, void* dst) {
    const Weight& w = job.weight;
    with_decoder(w, [&](auto decode) {
        using D = decltype(decode);
        float scales[kDecodeBlocks];
        alignas(64) float values[kDecodeBlocks * kBlock];
        for (int64_t first = 0; first < w.blocks; first += kDecodeBlocks) {
            const int64_t count = w.blocks - first < kDecodeBlocks ? w.blocks - first : kDecodeBlocks;
            scaled_groups(w, decode, row, first, count, scales, kDecodeAhead, [&](int64_t g, const Vec* v) {
                D::store_natural(values + g * D::kBlocks * kBlock, v);
            });
            const int64_t column = first * kBlock, left = w.k - column;
            store_span(job, values, column, left < count * kBlock ? left : count * kBlock, dst);
        }
    });
}

}  // namespace
}  // namespace kbit
