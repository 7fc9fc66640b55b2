// The linear kernels in float32 arithmetic, for any dtype of x: 16-bit activations are widened once per call.
#pragma once

#include "gemm.h"

namespace kbit {
namespace {

struct FloatOps {
    using Element = float;
    using Operand = Vec;
    static constexpr int kStep = kLanes;
    static Operand operand(const float* p) { return load(p); }
    static Vec multiply(Vec a, Vec b, Vec acc) { return fma(a, b, acc); }
    template <class D>
    static void decode_span(const Weight& w, const D& decode, int64_t row, int64_t first, int64_t count,
                            float* scales, int64_t ahead, float* dst) {
        constexpr int kVecs = D::kUnits * D::kUnitVecs;
        scaled_groups(w, decode, row, first, count, scales, ahead,
                      [&](int64_t g, const Vec* v) __attribute__((always_inline)) {
#pragma GCC unroll 16
                          for (int i = 0; i < kVecs; ++i) {
                              store(dst + (g * kVecs + i) * kLanes, v[i]);
                          }
                      });
    }
};

inline int64_t padded_k(int bits, int64_t k) {
    const int blocks = bits == 2   ? DecoderFor<2, true>::kBlocks
                       : bits == 3 ? DecoderFor<3, true>::kBlocks
                       : bits == 4 ? DecoderFor<4, true>::kBlocks
                                   : DecoderFor<5, true>::kBlocks;
    return round_up(k, blocks * kBlock);
}

template <class D, class T>
inline void prepare_row(const T* __restrict x, int64_t k, float* __restrict dst) {
    constexpr int kGroup = D::kBlocks * kBlock;
    const int64_t padded = round_up(k, kGroup);
    if (D::kNatural) {
        for (int64_t i = 0; i < k; ++i) {
            dst[i] = widen(x[i]);
        }
        memset(dst + k, 0, size_t(padded - k) * 4);
        return;
    }
    int positions[kGroup];
    for (int i = 0; i < kGroup; ++i) {
        positions[i] = D::position(i / kBlock, i % kBlock);
    }
    for (int64_t first = 0; first < padded; first += kGroup) {
        for (int i = 0; i < kGroup; ++i) {
            dst[first + positions[i]] = first + i < k ? widen(x[first + i]) : 0.0f;
        }
    }
}

template <class T>
inline void prepare_typed(const T* x, int64_t k, int bits, float* dst) {
    constexpr bool WIDE = !(kHasNarrowTables && IsBFloat16<T>::value);
    switch (bits) {
        case 2:
            return prepare_row<DecoderFor<2, WIDE>>(x, k, dst);
        case 3:
            return prepare_row<DecoderFor<3, WIDE>>(x, k, dst);
        case 4:
            return prepare_row<DecoderFor<4, WIDE>>(x, k, dst);
        default:
            return prepare_row<DecoderFor<5, WIDE>>(x, k, dst);
    }
}

inline void prepare_x(const void* x, DType dtype, int64_t k, int bits, void* dst) {
    with_dtype(dtype, [&](auto sample) {
        prepare_typed(static_cast<const decltype(sample)*>(x), k, bits, static_cast<float*>(dst));
    });
}

inline size_t linear_workspace(const LinearJob& job) {
    return job.tokens > kGemvTokens ? gemm_workspace(job.tokens) : size_t(gemv_scales(job.weight)) * 4;
}

inline void linear_rows(const LinearJob& job, int64_t row_begin, int64_t row_end, void* workspace) {
    float* scales = static_cast<float*>(workspace);
    switch (job.tokens) {
        case 1:
            return gemv_rows<1>(job, row_begin, row_end, scales);
        case 2:
            return gemv_rows<2>(job, row_begin, row_end, scales);
        case 3:
            return gemv_rows<3>(job, row_begin, row_end, scales);
        case 4:
            return gemv_rows<4>(job, row_begin, row_end, scales);
        default:
            return gemm_rows<FloatOps>(job, row_begin, row_end, workspace);
    }
}

constexpr LinearKernels kFloatLinear = {4, padded_k, prepare_x, linear_workspace, linear_rows};

}  // namespace
}  // namespace kbit
