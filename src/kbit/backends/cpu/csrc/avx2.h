// What the AVX2 decoders share: vectors of eight floats, the shape of the tiles, byte tables of the levels.
#pragma once

#include <immintrin.h>

#include "byte_tables.h"
#include "scales.h"

namespace kbit {
namespace {

using Vec = __m256;
constexpr int kLanes = 8;
constexpr int kTileTokens = 3;  // 3 * 4 accumulators + 3 activations + 1 weight: all 16 registers
constexpr int kTileRows = 4;
constexpr int kChunkRows = 64;  // gemm.h: 256 KB of decoded weights in a second-level cache of 512 KB or more

inline Vec load(const float* p) {
    return _mm256_loadu_ps(p);
}
inline void store(float* p, Vec v) {
    _mm256_storeu_ps(p, v);
}
inline Vec splat(float v) {
    return _mm256_set1_ps(v);
}
inline Vec fma(Vec a, Vec b, Vec c) {
    return _mm256_fmadd_ps(a, b, c);
}

// out[i] += sum of the lanes of v[i], i < 4.
inline void add_sums(const Vec v[4], float* out) {
    const __m256 quads = _mm256_hadd_ps(_mm256_hadd_ps(v[0], v[1]), _mm256_hadd_ps(v[2], v[3]));
    const __m128 sums = _mm_add_ps(_mm256_castps256_ps128(quads), _mm256_extractf128_ps(quads, 1));
    _mm_storeu_ps(out, _mm_add_ps(_mm_loadu_ps(out), sums));
}

inline __m256i join(__m128i low, __m128i high) {
    return _mm256_inserti128_si256(_mm256_castsi128_si256(low), high, 1);
}

inline __m128i load16(const uint8_t* p) {
    return _mm_loadu_si128(reinterpret_cast<const __m128i*>(p));
}

// See byte_tables.h; the same 16 levels in each 128-bit lane.
template <int BITS, int TABLES>
inline void fill_lanes(const float* levels, int first, __m256i (&tables)[TABLES][4]) {
    fill_tables<BITS>(levels, first, tables,
                      [](const uint8_t* column) { return _mm256_broadcastsi128_si256(load16(column)); });
}

}  // namespace
}  // namespace kbit
