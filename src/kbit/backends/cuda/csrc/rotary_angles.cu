// Cosines and sines of rotary position embedding: of position * frequency in float32, times a factor, rounded
// once. Both halves of a row are alike, as models of 16 bits take them.
//
//   frequencies  float32 [half]
//   positions    int64 [places]
//   cos, sin     float16, or bfloat16 with Config::bf16: [places, 2 * half]
//
// A thread has a place and a frequency.
//
// grid: ceil(count / threads), count = places * half
// Method: Su et al. 2021 (arXiv:2104.09864).
#include "config.h"
#include "rows.cuh"

extern "C" __global__ void __launch_bounds__(128)
    rotary_angles(const float* frequencies, const i64* positions, u16* cos, u16* sin, u32 count, int half,
                  float factor) {
    using H = Half<Config::bf16>;
    follow_previous(frequencies, positions);
    const u32 at = blockIdx.x * blockDim.x + threadIdx.x;
    if (at >= count) {
        return;
    }
    const u32 place = at / u32(half), i = at % u32(half);
    const float angle = __fmul_rn(float(positions[place]), frequencies[i]);
    const u64 low = u64(place) * 2 * u32(half) + i, high = low + u32(half);
    cos[low] = cos[high] = H::narrow(__fmul_rn(cosf(angle), factor));
    sin[low] = sin[high] = H::narrow(__fmul_rn(sinf(angle), factor));
}
