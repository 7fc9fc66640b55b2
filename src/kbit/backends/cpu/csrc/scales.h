// Block scales of one row as float32.
//
// E4M4, bias 11: byte >= 16 is the float32 with bits (byte << 19) + (116 << 23); below that it is byte *
// 2^-14.
#pragma once

#include "convert.h"

namespace kbit {
namespace {

constexpr int64_t kScalesAhead = 4096;  // bytes

inline float decode_e4m4(uint32_t byte) {
    // Below 16, `normal` is 2^-11 (1 + byte / 16) and twice that less 2^-10 is right; from 16 on that is no
    // smaller than `normal`. Neither is negative, so they compare as integers. Taking the smaller one is two
    // instructions less than converting the byte and selecting: AVX-512, k = 4, M = 1, 4096 -> 14336, two
    // threads, 0.72 to 0.65 ms (medians of the minima of seven noisy runs).
    const float normal = float_of((byte << 19) + (116u << 23));
    const float doubled = normal + (normal - 9.765625e-4f);  // 2^-10
    const int32_t a = int32_t(bits_of(normal)), b = int32_t(bits_of(doubled));
    return float_of(uint32_t(a < b ? a : b));
}

// out[0, count): scales of blocks [first, first + count) of `row`; out[count, padded): zeros.
inline void decode_scales(const Weight& w, int64_t row, int64_t first, int64_t count, int64_t padded,
                          float* __restrict out) {
    const int64_t offset = row * w.blocks + first;
    // Rows are visited at a stride: the first touch of each would miss. Takes 16 tokens from 3.8 to 3.6 ms.
    __builtin_prefetch(w.absmax + offset + kScalesAhead);
    __builtin_prefetch(w.absmax + offset + kScalesAhead + 64);
    if (w.format == ScaleFormat::kE4M4) {
        const uint8_t* __restrict src = w.absmax + offset;
        for (int64_t i = 0; i < count; ++i) {
            out[i] = decode_e4m4(src[i]);
        }
    } else if (w.format == ScaleFormat::kFloat16) {
        const Half* __restrict src = reinterpret_cast<const Half*>(w.absmax) + offset;
        for (int64_t i = 0; i < count; ++i) {
            out[i] = widen(src[i]);
        }
    } else {
        memcpy(out, w.absmax + 4 * offset, size_t(count) * 4);
    }
    for (int64_t i = count; i < padded; ++i) {
        out[i] = 0.0f;
    }
}

}  // namespace
}  // namespace kbit
