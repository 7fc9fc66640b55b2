// e2m1 codes and ue4m3 scales -> operands of tensor cores, for nvfp4_gemm.cu.
//
// Lane t = lane % 4 of a group of four owns 16 bits (four codes) of a sub-block of 16 columns, for weights
// and activations alike. An MMA sums over all 16 columns, so which of its k positions a code takes is free as
// long as both operands agree. 16-bit operands: codes 0 and 2 at k = 2t, 2t + 1, codes 1 and 3 at 2t + 8,
// 2t + 9. 8-bit operands: codes 0 .. 3 at k = 4t .. 4t + 3.
//
// Integers (`exact`). A code is a multiple of 1/2 up to 6, a scale one of 2^-9 up to 448 = 229376 * 2^-9. The
// dot product P of 16 pairs of doubled codes is an integer, |P| <= 16 * 12^2 = 2304. |P * 229376| < 2^29
// fits 32 bits, times another 229376 < 2^46.8, and 2^16 of those (K = 2^20) < 2^63: a 64-bit integer of unit
// 2^-20 (1/4 of codes, 2^-18 of scales) holds the whole sum. Nothing is ever rounded but by the conversion to
// float32 at the end, so the order of sums, tiles and splits cannot be seen.
//
// Halves (`seq16`, `tc`). As float16, sign and magnitude bits at 15 and 9 .. 11 are 2^-14 times the code,
// subnormals included; times 2^7 * scale <= 57344 it is 2^-7 times their product, which has 6 significant
// bits and is a multiple of 2^-17: exact. The product of two is a multiple of 2^-34 in units of 2^-14; 16 of
// one sub-block are multiples of the product of the scales' last bits and their sum has at most 19 bits, so
// that an MMA into zeros is exact.
#pragma once

#include "rows.cuh"
#include "ue4m3.cuh"

constexpr float kExactUnit = 9.5367431640625e-7f;  // 2^-20
constexpr float kHalfUnit = 16384.0f;              // 2^14: of sums of products of scaled halves

// Byte BYTE of each of two words of scales, as float16 of 2^-8 times their values: a's low, b's high.
template <int BYTE>
DEVICE u32 two_scales(u32 a, u32 b) {
    return permute(a, b, u32(BYTE | (4 + BYTE) << 8)) << 7;
}
// 512 times a scale, from a float16 of 2^-8 times it. The adder at 2^23 converts. Subtracting, not masking,
// hides from the compiler that it is positive: it would then multiply by 64 bits in four instructions instead
// of one.
DEVICE int scale_integer(u16 half) {
    const float value = Half<false>::widen(half);
    return int(__float_as_uint(__fmaf_rn(value, 131072.0f, 8388608.0f))) - 0x4b000000;
}

// Twice the values of codes, as bytes. PRMT with a selector of 8 or more repeats the sign bit of a byte of
// the table, which is 0: so `positive` has zeros where codes are negative, and `negative` where they are not.
struct CodeBytes {
    // Half of the table, in a register. PRMT takes one constant, and for each use the compiler would move the
    // other into a register: 8% of the instructions of nvfp4_exact.cu with 8 tokens, 35 registers. So it must
    // not know that this is a constant, nor that it is the same in all threads.
    u32 small;

    DEVICE CodeBytes() : small(0x03020100u | opaque(threadIdx.x) >> 16) {}
    // Of the four in the low 16 bits.
    DEVICE u32 of(u32 codes) const {
        const u32 positive = permute(small, 0x0c080604u, codes);
        const u32 negative = permute(small, 0x0c080604u, codes ^ 0x8888u);
        return positive | ((0x80808080u - negative) ^ 0x80808080u);
    }
};

// y[at] = round((sum * w_scale) * row_scale), of an exact sum in units of kExactUnit.
DEVICE void store_exact(void* y, i64 at, i64 sum, float w_scale, float row_scale, int dtype) {
    const float value = __fmul_rn(__fmul_rn(__ll2float_rn(sum), kExactUnit), w_scale);
    store_rounded(y, at, __fmul_rn(value, row_scale), dtype);
}

// Codes 0, 2 and 1, 3 of `codes` (byte 0 in its low half, byte 1 in its high half) times a pair of scales.
DEVICE void code_halves(u32 codes, u32 scales, u32& even, u32& odd) {
    using H = Half<false>;
    even = H::multiply((codes << 12 & 0x80008000u) | (codes << 9 & 0x0e000e00u), scales);
    odd = H::multiply((codes << 8 & 0x80008000u) | (codes << 5 & 0x0e000e00u), scales);
}

// 2^7 times the scales, from float16 of 2^-8 times them.
DEVICE u32 scale_operands(u32 halves) {
    return Half<false>::multiply(halves, 0x78007800u);  // 2^15
}

// d += a * b of signed bytes: a is 16 x 16 (rows n, columns k), b is 16 x 8 (k, tokens).
DEVICE void multiply_bytes(int (&d)[4], u32 a0, u32 a1, u32 b) {
    asm("mma.sync.aligned.m16n8k16.row.col.s32.s8.s8.s32 {%0,%1,%2,%3}, {%4,%5}, {%6}, {%0,%1,%2,%3};"
        : "+r"(d[0]), "+r"(d[1]), "+r"(d[2]), "+r"(d[3])
        : "r"(a0), "r"(a1), "r"(b));
}
