// float16 and bfloat16: conversions, products, and what kernels compute in them. Part of common.cuh, which
// has the types.
#pragma once

// float16 or bfloat16, as bits.
template <bool BF16>
struct Half {
    // The two values rounded to nearest even, `low` in the low half.
    static DEVICE u32 pack(float low, float high) {
        u32 both;
        if constexpr (BF16) {
            asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(both) : "f"(high), "f"(low));
        } else {
            asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(both) : "f"(high), "f"(low));
        }
        return both;
    }
    static DEVICE u16 narrow(float value) { return u16(pack(value, 0.0f)); }
    static DEVICE float widen(u16 bits) {
        if constexpr (BF16) {
            return __uint_as_float(u32(bits) << 16);
        } else {
            float value;
            asm("cvt.f32.f16 %0, %1;" : "=f"(value) : "h"(bits));
            return value;
        }
    }
    // Products of the two pairs, each rounded once.
    static DEVICE u32 multiply(u32 a, u32 b) {
        u32 product;
        if constexpr (BF16) {  // mul.bf16x2 needs sm_90; -0 as addend keeps the sign of a zero
            asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(product) : "r"(a), "r"(b), "r"(0x80008000u));
        } else {
            asm("mul.rn.f16x2 %0, %1, %2;" : "=r"(product) : "r"(a), "r"(b));
        }
        return product;
    }
    // Products of a pair and the low half of `factors`, or their high half; takes no instruction more.
    template <bool HIGH>
    static DEVICE u32 multiply_by_half(u32 a, u32 factors) {
        u32 both;
        if constexpr (HIGH) {
            asm("{ .reg .b16 l, h; mov.b32 {l, h}, %1; mov.b32 %0, {h, h}; }" : "=r"(both) : "r"(factors));
        } else {
            asm("{ .reg .b16 l, h; mov.b32 {l, h}, %1; mov.b32 %0, {l, l}; }" : "=r"(both) : "r"(factors));
        }
        return multiply(a, both);
    }
    // d += a * b: a is 16 x 16 (rows n, columns k), b is 16 x 8 (k, tokens), d is float32.
    static DEVICE void mma(float (&d)[4], const u32 (&a)[4], u32 b0, u32 b1) {
        if constexpr (BF16) {
            asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, "
                "{%0,%1,%2,%3};"
                : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
                : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
        } else {
            asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, "
                "{%0,%1,%2,%3};"
                : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
                : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
        }
    }
};

// silu(gate) * up, each first rounded to 16 bits, as the layers apart do: silu is rounded, too; the product
// is left to the caller. The division is approximate, as the exponential is, off by far less than 16 bits
// show: an exact one branches, and its latencies were a fifth of a tile of experts. Below gates of -87 it
// gives 0.
template <bool BF16>
DEVICE float silu_and_mul(float gate, float up) {
    using H = Half<BF16>;
    gate = H::widen(H::narrow(gate));
    const float silu = __fdividef(gate, 1.0f + __expf(-gate));
    return H::widen(H::narrow(silu)) * H::widen(H::narrow(up));
}
// The same of eight pairs of 16-bit values, rounded.
template <bool BF16>
DEVICE uint4 silu_and_mul(uint4 gates, uint4 ups) {
    using H = Half<BF16>;
    const u32 g[4] = {gates.x, gates.y, gates.z, gates.w}, u[4] = {ups.x, ups.y, ups.z, ups.w};
    const auto one = [](u32 gate, u32 up) {
        return silu_and_mul<BF16>(H::widen(u16(gate)), H::widen(u16(up)));
    };
    u32 v[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        v[i] = H::pack(one(g[i], u[i]), one(g[i] >> 16, u[i] >> 16));
    }
    return {v[0], v[1], v[2], v[3]};
}

DEVICE float low_half(u32 both) {
    return Half<false>::widen(u16(both));
}
DEVICE float high_half(u32 both) {
    return Half<false>::widen(u16(both >> 16));
}
