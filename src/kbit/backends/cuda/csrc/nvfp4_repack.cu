// nv codes and scales -> interleaved bytes, layouts "ggml" and "mmq" of kbit/nvfp4/formats/layouts.py.
//
//   codes   uint8 [matrices, rows, 8 * groups], 8-byte aligned; scales uint8 [matrices, rows, groups]
//   out     Config::mmq: [matrices, blocks, rows, 144], else [matrices, rows, blocks, 36]; padding is 0
//   total   matrices * rows * blocks * sub-blocks of a block, below 2^32
//
// A thread moves a sub-block: byte j of it becomes elements j and j + 8.
#include "config.h"
#include "nvfp4.cuh"

constexpr u32 kSubBlocks = Config::mmq ? 16 : 4;
constexpr u32 kBlockBytes = 9 * kSubBlocks;

// Four nibbles in the low half -> the low nibbles of four bytes.
DEVICE u32 spread(u32 v) {
    v &= 0xffffu;
    v = (v | v << 8) & 0x00ff00ffu;
    return (v | v << 4) & 0x0f0f0f0fu;
}

extern "C" __global__ void __launch_bounds__(256)
    nvfp4_repack(const uint2* codes, const u8* scales, u8* out, u32 total, u32 rows, u32 groups, u32 blocks) {
    follow_previous(codes, scales);
    for (u32 i = blockIdx.x * blockDim.x + threadIdx.x; i < total; i += gridDim.x * blockDim.x) {
        const u32 sub = i % kSubBlocks, block = i / kSubBlocks % blocks, line = i / kSubBlocks / blocks;
        const u32 group = block * kSubBlocks + sub;
        const bool there = group < groups;
        const i64 from = i64(line) * groups + group;
        const uint2 code = there ? __ldg(codes + from) : make_uint2(0, 0);
        const u32 matrix = line / rows, row = line - matrix * rows;
        const i64 at = Config::mmq ? (i64(matrix) * blocks + block) * rows + row : i64(line) * blocks + block;
        u8* const to = out + at * kBlockBytes;
        to[sub] = there ? scales[from] : u8(0);
        u32* const packed = reinterpret_cast<u32*>(to + kSubBlocks + sub * 8);
        packed[0] = spread(code.x) | spread(code.y) << 4;
        packed[1] = spread(code.x >> 16) | spread(code.y >> 16) << 4;
    }
}
