// A table of levels in shared memory with a copy per lane, each in banks of its own: 128 bytes a level.
#pragma once

#include "rows.cuh"

template <int BITS>
struct Levels {
    static constexpr int kBytes = 128 << BITS;
    u32 table;  // shared address
    u32 lane_byte;

    // The codebook rounded to DTYPE, as float32. All threads of the block; synchronizes.
    template <int DTYPE>
    static DEVICE Levels build(u8* table, const float* codebook) {
        Levels levels;
        levels.table = shared_address(table);
        for (int i = threadIdx.x; i < 8 << BITS; i += blockDim.x) {
            const u32 level = __float_as_uint(Dense<DTYPE>::round(__ldg(codebook + i / 8)));
            store_shared4(levels.table + i * 16, make_uint4(level, level, level, level));
        }
        __syncthreads();
        levels.lane_byte = opaque(threadIdx.x % 32 * 4);
        return levels;
    }
    // The level of the code at bits first.. of `word`; `first` is known when compiling.
    DEVICE float at(u32 word, int first) const {
        constexpr u32 kMask = (kBytes - 1) & ~127u;
        const u32 shifted = first < 7 ? word << (7 - first) : word >> (first - 7);
        return __uint_as_float(load_shared(table + ((shifted & kMask) | lane_byte)));
    }
};
