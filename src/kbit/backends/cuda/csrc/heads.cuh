// What rms_norm.cu, rotary.cu, append_heads.cu and others compute with pieces of 16 bytes of rows of 16 bits:
// sums, the norm's factor and products, and turned pairs of columns. "config.h" must be included before.
#pragma once

#include "rows.cuh"

using D = Dense<Config::bf16 ? 2 : 1>;

// Of heads, in pieces.
struct Strides {
    u64 batch, head, token;
};

DEVICE void widen(float (&v)[D::kPerPiece], uint4 piece) {
    const u32 words[4] = {piece.x, piece.y, piece.z, piece.w};
#pragma unroll
    for (int i = 0; i < D::kPerPiece; ++i) {
        v[i] = D::get(words, i);
    }
}

// The sum of two pieces, rounded.
DEVICE uint4 sum_of(uint4 a, uint4 b) {
    float v[D::kPerPiece], w[D::kPerPiece];
    widen(v, a);
    widen(w, b);
#pragma unroll
    for (int i = 0; i < D::kPerPiece; ++i) {
        v[i] = __fadd_rn(v[i], w[i]);
    }
    return D::piece(v);
}

// sum + the squares of a piece, by column.
DEVICE float add_squares(float sum, uint4 piece) {
    float v[D::kPerPiece];
    widen(v, piece);
#pragma unroll
    for (int i = 0; i < D::kPerPiece; ++i) {
        sum = __fmaf_rn(v[i], v[i], sum);
    }
    return sum;
}

// The sum over 16 or 32 neighbouring lanes, by halves; in each of them.
DEVICE float sum_lanes(float value, int lanes) {
    const float other = __shfl_xor_sync(kAll, value, 16);
    value += lanes == 32 ? other : 0.0f;
#pragma unroll
    for (int step = 8; step > 0; step /= 2) {
        value += __shfl_xor_sync(kAll, value, step);
    }
    return value;
}

// 1 / sqrt(mean + eps) of a row whose squares sum up to `sum`.
DEVICE float norm_factor(float sum, int pieces, float eps) {
    const float mean = __fadd_rn(__fdiv_rn(sum, float(pieces * D::kPerPiece)), eps);
    return __fdiv_rn(1.0f, __fsqrt_rn(mean));
}

// x * factor * (weight + more); round_first: the first product is rounded, too.
DEVICE uint4 normed(uint4 x, uint4 weight, float factor, float more, int round_first) {
    float v[D::kPerPiece], w[D::kPerPiece];
    widen(v, x);
    widen(w, weight);
#pragma unroll
    for (int i = 0; i < D::kPerPiece; ++i) {
        const float quotient = __fmul_rn(v[i], factor);
        v[i] = __fmul_rn(round_first ? D::round(quotient) : quotient, w[i] + more);
    }
    return D::piece(v);
}

// The even elements of two pieces, or the odd ones.
DEVICE uint4 every_other(uint4 a, uint4 b, bool odd) {
    const u32 selector = odd ? 0x7632 : 0x5410;
    return {permute(a.x, a.y, selector), permute(a.z, a.w, selector), permute(b.x, b.y, selector),
            permute(b.z, b.w, selector)};
}

// x * cos + sign * other * sin, each product and the sum rounded
DEVICE uint4 rotated(uint4 x, uint4 cos, uint4 other, uint4 sin, float sign) {
    float v[D::kPerPiece], c[D::kPerPiece], w[D::kPerPiece], s[D::kPerPiece];
    widen(v, x);
    widen(c, cos);
    widen(w, other);
    widen(s, sin);
#pragma unroll
    for (int i = 0; i < D::kPerPiece; ++i) {
        const float product = D::round(__fmul_rn(v[i], c[i]));
        v[i] = __fadd_rn(product, D::round(__fmul_rn(sign * w[i], s[i])));
    }
    return D::piece(v);
}
