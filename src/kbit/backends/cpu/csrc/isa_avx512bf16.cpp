// The AVX-512 kernels plus AVX512_BF16 dot products for bfloat16 activations (Cooper Lake's successors, Zen
// 4).
//
// y[t, n] = sum_k x[t, k] * W[n, k]: up to kGemvTokens tokens, 32 weights at a time as 16-bit levels (vpermw,
// which reads only the low 5 bits of an index) times 32 activations by vdpbf16ps into zeroed lanes, then one
// fused multiply-add by the block's scale. k = 4: 10 instructions decode 128 weights. More tokens: gemm.h
// with weights rounded to bfloat16 after scaling. vdpbf16ps treats subnormal operands as zero.
#include "decode_avx512.h"
#include "dequantize.h"
#include "linear_f32.h"
#include "quantize.h"

namespace kbit {
namespace {

inline __m512bh load_bf16(const uint16_t* p) {
    return (__m512bh)_mm512_loadu_si512(p);
}

// Word e holds the codes of element e of all blocks of a group, those of block b at bit L::word_shift(b).
template <int BITS>
inline __m512i word_codes(const uint8_t* p) {
    return _mm512_permutexvar_epi8(_mm512_load_si512(kControl<BITS>.words), transpose_planes<BITS>(p));
}

struct BFloatOps {
    using Element = uint16_t;
    using Operand = __m512bh;
    static constexpr int kStep = 32;
    static Operand operand(const uint16_t* p) { return load_bf16(p); }
    static Vec multiply(Operand a, Operand b, Vec acc) { return _mm512_dpbf16_ps(acc, a, b); }

    // A block has at most 32 different weights: scale and round the levels, then look the codes up, 32 at a
    // time. Five instructions a block instead of nine for scaling and rounding the weights themselves.
    template <class D>
    static void decode_span(const Weight& w, const D& levels, int64_t row, int64_t first, int64_t count,
                            float* scales, int64_t ahead, uint16_t* dst) {
        using L = typename D::L;
        decode_scales(w, row, first, count, round_up(count, D::kBlocks), scales);
        const Vec factor = splat(w.tensor_scale);
        for_each_group<D>(
            w, row, first, count, ahead, [&](int64_t g, const uint8_t* p) __attribute__((always_inline)) {
                const __m512i codes = word_codes<D::kBits>(p);
#pragma GCC unroll 8
                for (int b = 0; b < D::kBlocks; ++b) {
                    const Vec scale = splat(scales[g * D::kBlocks + b]);
                    Vec low = levels.low * scale, high = D::kBits == 5 ? levels.high * scale : low;
                    if (w.tensor_scale != 1.0f) {  // left to right, as the reference multiplies
                        low = low * factor;
                        high = high * factor;
                    }
                    const __m512i table = (__m512i)_mm512_cvtne2ps_pbh(high, low);
                    const __m512i index = _mm512_srli_epi16(codes, unsigned(L::word_shift(b)));
                    _mm512_storeu_si512(dst + (g * D::kBlocks + b) * kBlock,
                                        _mm512_permutexvar_epi16(index, table));
                }
            });
    }
};

// kBlocks blocks as 32 bfloat16 levels each, in element order.
template <int BITS>
struct WordDecoder : Layout<BITS> {
    using L = Layout<BITS>;

    explicit WordDecoder(const float* levels) {
        alignas(64) uint16_t words[32];
        for (int i = 0; i < 32; ++i) {
            words[i] = uint16_t(bits_of(levels[i]) >> 16);
        }
        table = _mm512_load_si512(words);
    }

    inline __attribute__((always_inline)) void operator()(const uint8_t* p, __m512i* w) const {
        const __m512i codes = word_codes<BITS>(p);
#pragma GCC unroll 8
        for (int b = 0; b < L::kBlocks; ++b) {
            w[b] = _mm512_permutexvar_epi16(_mm512_srli_epi16(codes, unsigned(L::word_shift(b))), table);
        }
    }

    __m512i table;
};

template <int BITS, int TOKENS>
inline void bf16_gemv(const LinearJob& job, int64_t row_begin, int64_t row_end, float* scales) {
    using D = WordDecoder<BITS>;
    const Weight& w = job.weight;
    const uint16_t* x = static_cast<const uint16_t*>(job.x);
    const D decode(w.table);
    gemv_quads<TOKENS, D::kBlocks>(
        job, row_begin, row_end, scales,
        [&](int64_t row, const float* its_scales, Vec* sums) __attribute__((always_inline)) {
            Vec even[TOKENS], odd[TOKENS];
            for (int t = 0; t < TOKENS; ++t) {
                even[t] = odd[t] = splat(0.0f);
            }
            for_each_group<D>(
                w, row, 0, w.blocks, kGemvAhead,
                [&](int64_t g, const uint8_t* p) __attribute__((always_inline)) {
                    __m512i v[D::kBlocks];
                    decode(p, v);
#pragma GCC unroll 8
                    for (int b = 0; b < D::kBlocks; ++b) {
                        const Vec scale = splat(its_scales[g * D::kBlocks + b]);
#pragma GCC unroll 4
                        for (int t = 0; t < TOKENS; ++t) {
                            const uint16_t* xt = x + t * job.x_stride + (g * D::kBlocks + b) * kBlock;
                            const Vec dot = _mm512_dpbf16_ps(splat(0.0f), (__m512bh)v[b], load_bf16(xt));
                            Vec& acc = b % 2 == 0 ? even[t] : odd[t];
                            acc = fma(dot, scale, acc);
                        }
                    }
                });
            for (int t = 0; t < TOKENS; ++t) {
                sums[kGemvRows * t] = even[t] + odd[t];
            }
        });
}

template <int TOKENS>
inline void bf16_gemv_rows(const LinearJob& job, int64_t row_begin, int64_t row_end, float* scales) {
    switch (job.weight.bits) {
        case 2:
            return bf16_gemv<2, TOKENS>(job, row_begin, row_end, scales);
        case 3:
            return bf16_gemv<3, TOKENS>(job, row_begin, row_end, scales);
        case 4:
            return bf16_gemv<4, TOKENS>(job, row_begin, row_end, scales);
        default:
            return bf16_gemv<5, TOKENS>(job, row_begin, row_end, scales);
    }
}

inline void prepare_bf16(const void* x, DType, int64_t k, int bits, void* dst) {
    memcpy(dst, x, size_t(k) * 2);
    memset(static_cast<uint16_t*>(dst) + k, 0, size_t(padded_k(bits, k) - k) * 2);
}

inline void bf16_rows(const LinearJob& job, int64_t row_begin, int64_t row_end, void* workspace) {
    float* scales = static_cast<float*>(workspace);
    switch (job.tokens) {
        case 1:
            return bf16_gemv_rows<1>(job, row_begin, row_end, scales);
        case 2:
            return bf16_gemv_rows<2>(job, row_begin, row_end, scales);
        case 3:
            return bf16_gemv_rows<3>(job, row_begin, row_end, scales);
        case 4:
            return bf16_gemv_rows<4>(job, row_begin, row_end, scales);
        default:
            return gemm_rows<BFloatOps>(job, row_begin, row_end, workspace);
    }
}

constexpr LinearKernels kBFloatLinear = {2, padded_k, prepare_bf16, linear_workspace, bf16_rows};

}  // namespace

const Kernels* avx512bf16_kernels() {
    static constexpr Kernels kernels = {"avx512",       decode_row,  kFloatLinear,
                                        &kBFloatLinear, measure_row, quantize_row};
    return &kernels;
}

}  // namespace kbit
