// Sums over the lanes of a warp.
#pragma once

#include "common.cuh"

// The sum of the values of the lanes up to this one, and its own. All lanes.
template <class T>
DEVICE T sum_up_to(T value, int lane) {
#pragma unroll
    for (int step = 1; step < 32; step *= 2) {
        const T below = __shfl_up_sync(~0u, value, step);
        value += lane >= step ? below : 0;
    }
    return value;
}
