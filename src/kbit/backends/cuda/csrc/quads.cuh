// Four float32 at a time, to and from shared memory.
#pragma once

#include "common.cuh"

DEVICE uint4 words_of(const float* v) {
    return {__float_as_uint(v[0]), __float_as_uint(v[1]), __float_as_uint(v[2]), __float_as_uint(v[3])};
}

// v[0..3] += those at a shared address.
DEVICE void add_shared(float* v, u32 address) {
    const uint4 f = load_shared4(address);
    v[0] += __uint_as_float(f.x);
    v[1] += __uint_as_float(f.y);
    v[2] += __uint_as_float(f.z);
    v[3] += __uint_as_float(f.w);
}
