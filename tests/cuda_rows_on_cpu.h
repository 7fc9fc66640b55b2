// Beyond cuda_on_cpu.h, what the kernels over rows use.
#pragma once

#include "cuda_on_cpu.h"

#define __CUDA_ARCH__ 900
#define __align__(n) alignas(n)
using std::fabs;

// ---- a warp and a block

inline u32 __reduce_min_sync(u32, u32 value) {
    return reduced(value, [](u32 a, u32 b) { return a < b; });
}
inline void atomicMax(u32* to, u32 value) {
    *to = max(*to, value);
}
inline void atomicMin(u32* to, u32 value) {
    *to = min(*to, value);
}
inline u32 atomicAdd(u32* to, u32 value) {
    const u32 before = *to;
    *to += value;
    return before;
}
inline u32 __match_any_sync(u32, u32 value) {
    u32 mask = 0;
    for (int lane = 0; lane < 32; ++lane) {
        mask |= u32(exchange(value, lane) == value) << lane;
    }
    return mask;
}
[[noreturn]] inline void __trap() {
    std::abort();
}

// ---- arithmetic

struct float2 {
    float x, y;
};
inline float2 make_float2(float x, float y) {
    return {x, y};
}
inline float4 make_float4(float x, float y, float z, float w) {
    return {x, y, z, w};
}

inline u32 __funnelshift_r(u32 low, u32 high, u32 shift) {
    return u32((u64(high) << 32 | low) >> (shift & 31));
}
inline i64 __double_as_longlong(double value) {
    return bits_as<i64>(value);
}
inline double __longlong_as_double(i64 bits) {
    return bits_as<double>(bits);
}
inline float __double2float_rn(double value) {
    return float(value);
}
inline float rsqrtf(float value) {
    return 1.0f / sqrtf(value);
}
inline float saturated_fma(float a, float b, float c) {
    const float value = fmaf(a, b, c);
    return value > 0.0f ? min(value, 1.0f) : 0.0f;  // 0 of NaN
}
// One unit in the last place off, as a GPU may be; subnormal results vanish.
inline float approximate_reciprocal(float value) {
    const float exact = 1.0f / value;
    return fabsf(exact) < 1.17549435e-38f ? 0.0f : nextafterf(exact, 0.0f);
}
template <bool BF16, bool LARGER>
u32 extreme(u32 a, u32 b) {
    u32 both = 0;
    for (int shift = 0; shift < 32; shift += 16) {
        const float x = Half<BF16>::widen(u16(a >> shift)), y = Half<BF16>::widen(u16(b >> shift));
        const u32 one = x != x || y != y ? 0x7fff : (LARGER ? x > y : x < y) ? a >> shift : b >> shift;
        both |= (one & 0xffff) << shift;
    }
    return both;
}
template <bool BF16>
u32 maximum_or_nan(u32 a, u32 b) {
    return extreme<BF16, true>(a, b);
}
template <bool BF16>
u32 minimum_or_nan(u32 a, u32 b) {
    return extreme<BF16, false>(a, b);
}

// ---- memory

template <int COUNT, int SIZE>
void load_words(u32 (&w)[SIZE], const u32* from) {
    require_aligned(u64(from), COUNT == 4 ? 16 : COUNT == 2 ? 8 : 4);
    std::copy(from, from + COUNT, w);
}
template <int COUNT, int SIZE>
void store_words(u32* to, const u32 (&w)[SIZE]) {
    require_aligned(u64(to), COUNT == 4 ? 16 : COUNT == 2 ? 8 : 4);
    std::copy(w, w + COUNT, to);
}
template <int BYTES>
void store_global(u8* to, u32 value) {
    require_aligned(u64(to), BYTES);
    std::memcpy(to, &value, BYTES);
}
template <int BYTES>
void put_shared_element(u32 address, u32 value) {
    require_aligned(address, BYTES);
    std::memcpy(cluster_memory + address, &value, BYTES);
}
template <int BYTES>
u32 shared_element(u32 address) {
    require_aligned(address, BYTES);
    u32 value = 0;
    std::memcpy(&value, cluster_memory + address, BYTES);
    return value;
}
// stmatrix.x4: lane 8h + i says where row i of square h goes; lane l has elements 2 (l % 4), + 1 of row l
// / 4.
inline void store_squares(u32 to, const u32 (&a)[4]) {
    for (int square = 0; square < 4; ++square) {
        const u32 row = exchange(to, 8 * square + lane_id() / 4);
        require_aligned(row, 16);
        into_shared(row + lane_id() % 4 * 4, a[square]);
    }
    __syncwarp();
}

// ---- matrices.cuh

// Beside those of cuda_on_cpu.h: lane l gets elements 2 (l % 4), + 1 of column l / 4.
inline void load_transposed(u32 (&v)[4], u32 row) {
    for (int matrix = 0; matrix < 4; ++matrix) {
        v[matrix] = 0;
        for (int i = 0; i < 2; ++i) {
            const u32 from = exchange(row, 8 * matrix + lane_id() % 4 * 2 + i);
            require_aligned(from, 16);
            v[matrix] |= shared_element<2>(from + lane_id() / 4 * 2) << (16 * i);
        }
    }
    __syncwarp();
}
