// What quantize, dequantize and repack share: E4M4, bit-planes <-> fields of codes, staging of a warp's rows.
//
// A warp works on 32 blocks of 32 weights, one block a lane: planes, scale and codes of a block then stay in
// one lane, and only the 16-byte pieces of the dense side pass through shared memory to become contiguous.
#pragma once

#include "common.cuh"
#include "stage16.cuh"

constexpr int kBlock = 32;
constexpr u32 kAll = ~0u;

// What may be written yet is not read by it: loads find it in L2, as it is then.
DEVICE void prefetch(const void* from) {
    asm volatile("prefetch.global.L2 [%0];" ::"l"(from));
}

// ---- dense elements: 0 float32, 1 float16, 2 bfloat16 (the order of DTYPES in dtype_codes.py)

template <int DTYPE>
struct Dense {
    static constexpr int kBytes = DTYPE == 0 ? 4 : 2;
    static constexpr int kPieces = kBlock * kBytes / 16;  // 16-byte pieces of a block
    static constexpr int kPerPiece = 16 / kBytes;
    static constexpr int kPerWord = 4 / kBytes;
    static constexpr int kWarpBytes = 32 * kBlock * kBytes;
    using Bits = Half<DTYPE == 2>;

    // Element `i` of 32-bit words.
    static DEVICE float get(const u32* words, int i) {
        if constexpr (DTYPE == 0) {
            return __uint_as_float(words[i]);
        } else if constexpr (DTYPE == 2) {
            return __uint_as_float(i % 2 ? words[i / 2] & 0xffff0000u : words[i / 2] << 16);
        } else {
            return Bits::widen(u16(words[i / 2] >> (16 * (i % 2))));
        }
    }
    static DEVICE float round(float value) {
        if constexpr (DTYPE == 0) {
            return value;
        } else {
            return Bits::widen(Bits::narrow(value));
        }
    }
    // 16 bytes of elements, each rounded once.
    static DEVICE uint4 piece(const float (&v)[kPerPiece]) {
        u32 w[4];
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            if constexpr (DTYPE == 0) {
                w[i] = __float_as_uint(v[i]);
            } else {
                w[i] = Bits::pack(v[2 * i], v[2 * i + 1]);
            }
        }
        return make_uint4(w[0], w[1], w[2], w[3]);
    }
    // Byte offset of piece `piece` of lane `lane`'s block in the warp's staging area: 8 neighbouring lanes at
    // one piece, and 8 neighbouring pieces of the area, lie in different banks.
    static DEVICE u32 at(int lane, int piece) {
        const int turn = kPieces == 8 ? lane : lane >> 1;
        return u32(lane * (kPieces * 16) + ((piece ^ (turn & (kPieces - 1))) * 16));
    }
    // Byte offset of element `element` of block `block` there.
    static DEVICE u32 at_element(int block, int element) {
        return at(block, element / kPerPiece) + u32(element % kPerPiece * kBytes);
    }
};

// One element of a dtype that is known at run time, by the numbers of Dense.
template <class INDEX>
DEVICE float load_widened(const void* from, INDEX at, int dtype) {
    if (dtype == 0) {
        return static_cast<const float*>(from)[at];
    }
    const u16 bits = static_cast<const u16*>(from)[at];
    return dtype == 1 ? Half<false>::widen(bits) : Half<true>::widen(bits);
}
DEVICE void store_rounded(void* to, i64 at, float value, int dtype) {
    if (dtype == 0) {
        static_cast<float*>(to)[at] = value;
    } else {
        static_cast<u16*>(to)[at] = dtype == 1 ? Half<false>::narrow(value) : Half<true>::narrow(value);
    }
}

// ---- E4M4

// 2^116: a byte shifted to a float32's fraction and low exponent bits is the value times 2^-116.
DEVICE float decode_e4m4(u32 byte) {
    return __fmul_rn(__uint_as_float(byte << 19), __uint_as_float(0x79800000u));
}

// Round to nearest even over all 256 values, saturating at 31. t >= 0; NaN and Inf give 255.
DEVICE u32 encode_e4m4(float t) {
    const u32 u = __float_as_uint(t);
    if (t < 9.765625e-4f) {  // 2^-10: multiples of 2^-14, rounded by the adder at 2^23; 16 carries into e = 1
        return __float_as_uint(__fadd_rn(__fmul_rn(t, 16384.0f), 8388608.0f)) - 0x4b000000u;
    }
    const u32 byte = ((u + 0x3ffffu + (u >> 19 & 1u)) >> 19) - (116u << 4);
    return byte > 255u ? 255u : byte;
}

// The sum of a warp's values, by halves; in every lane.
DEVICE float warp_sum(float value) {
#pragma unroll
    for (int step = 16; step > 0; step /= 2) {
        value += __shfl_xor_sync(kAll, value, step);
    }
    return value;
}

// to += a * factor
DEVICE void add_scaled(float4& to, float4 a, float factor) {
    to = {__fmaf_rn(a.x, factor, to.x), __fmaf_rn(a.y, factor, to.y), __fmaf_rn(a.z, factor, to.z),
          __fmaf_rn(a.w, factor, to.w)};
}

// ---- bit-planes <-> fields
//
// Fields are kField bits wide (2, 4, 4, 8 at 2, 3, 4, 5 bits): word q of them holds in field n the code of
// element kField * n + q. That is a transposition of each kField x kField square of bits: log2(kField) steps
// of exchanging half words, instead of a shift and a mask for every bit of every code.

template <int BITS>
struct Fields {
    static constexpr int kField = BITS == 2 ? 2 : BITS <= 4 ? 4 : 8;
    static constexpr int kPerWord = 32 / kField;

    // Both ways: the transposition is its own inverse.
    static DEVICE void transpose(u32 (&w)[kField]) {
#pragma unroll
        for (int step = kField / 2; step > 0; step /= 2) {
            const u32 mask = step == 4 ? 0x0f0f0f0fu : step == 2 ? 0x33333333u : 0x55555555u;
#pragma unroll
            for (int i = 0; i < kField; ++i) {
                if ((i & step) == 0) {
                    const u32 change = ((w[i] >> step) ^ w[i + step]) & mask;
                    w[i + step] ^= change;
                    w[i] ^= change << step;
                }
            }
        }
    }
};

// ---- 16-byte global accesses

// The first COUNT words of `w`; `from` is aligned to 16 bytes for 4 words, to 8 for 2.
template <int COUNT, int SIZE>
DEVICE void load_words(u32 (&w)[SIZE], const u32* from) {
    if constexpr (COUNT == 4) {
        const uint4 v = __ldg(reinterpret_cast<const uint4*>(from));
        w[0] = v.x;
        w[1] = v.y;
        w[2] = v.z;
        w[3] = v.w;
    } else if constexpr (COUNT == 2) {
        const uint2 v = __ldg(reinterpret_cast<const uint2*>(from));
        w[0] = v.x;
        w[1] = v.y;
    } else {
#pragma unroll
        for (int i = 0; i < COUNT; ++i) {
            w[i] = __ldg(from + i);
        }
    }
}
template <int COUNT, int SIZE>
DEVICE void store_words(u32* to, const u32 (&w)[SIZE]) {
    if constexpr (COUNT == 4) {
        store16(to, make_uint4(w[0], w[1], w[2], w[3]));
    } else if constexpr (COUNT == 2) {
        *reinterpret_cast<uint2*>(to) = make_uint2(w[0], w[1]);
    } else {
#pragma unroll
        for (int i = 0; i < COUNT; ++i) {
            to[i] = w[i];
        }
    }
}

template <int BYTES>
DEVICE u32 load_global(const u8* from) {
    if constexpr (BYTES == 4) {
        return __ldg(reinterpret_cast<const u32*>(from));
    } else {
        return __ldg(reinterpret_cast<const u16*>(from));
    }
}
template <int BYTES>
DEVICE void store_global(u8* to, u32 v) {
    if constexpr (BYTES == 4) {
        *reinterpret_cast<u32*>(to) = v;
    } else {
        *reinterpret_cast<u16*>(to) = u16(v);
    }
}
template <int BYTES>
DEVICE u32 load_shared_element(u32 address) {
    if constexpr (BYTES == 4) {
        return load_shared(address);
    } else {
        u16 v;
        asm volatile("ld.shared.u16 %0, [%1];" : "=h"(v) : "r"(address));
        return v;
    }
}
template <int BYTES>
DEVICE void put_shared_element(u32 address, u32 v) {
    if constexpr (BYTES == 4) {
        put_shared(address, v);
    } else {
        asm volatile("st.shared.u16 [%0], %1;" ::"r"(address), "h"(u16(v)) : "memory");
    }
}
