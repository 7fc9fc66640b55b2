// A warp's own ring of copies from memory, of stream.cu, grouped.cu and nvfp4_exact.cu.
#pragma once

#include "common.cuh"

// Initializes the barriers of its stages, 8 bytes each.
template <int STAGES>
DEVICE void ring_init(u32 barriers, int lane) {
    if (lane == 0) {
        for (int s = 0; s < STAGES; ++s) {
            barrier_init(barriers + 8 * s, kCopyArrivals);
        }
        barriers_visible();
    }
    __syncwarp();
}
