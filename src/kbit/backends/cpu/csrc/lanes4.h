// Vectors of four floats, by the vector types of GCC and Clang: for NEON, and for CPUs of which nothing is
// known.
#pragma once

#include "scales.h"

namespace kbit {
namespace {

typedef float Vec __attribute__((vector_size(16)));
constexpr int kLanes = 4;
constexpr int kTileRows = 4;
constexpr int kChunkRows = 64;  // gemm.h: 256 KB of decoded weights in a second-level cache of 512 KB or more

inline Vec load(const float* p) {
    Vec v;
    memcpy(&v, p, sizeof v);
    return v;
}
inline void store(float* p, Vec v) {
    memcpy(p, &v, sizeof v);
}
inline Vec splat(float v) {
    return Vec{v, v, v, v};
}

// out[i] += sum of the lanes of v[i], i < 4.
inline void add_sums(const Vec v[4], float* out) {
    for (int i = 0; i < 4; ++i) {
        out[i] += (v[i][0] + v[i][2]) + (v[i][1] + v[i][3]);
    }
}

}  // namespace
}  // namespace kbit
