// What a warp takes from memory and gives back in quantize.cu: 32 blocks at a time, one a lane.
#pragma once

#include "nearest.cuh"

struct Job {
    const u8* w;  // of this matrix, as packed and absmax
    u32* packed;
    u8* absmax;
    i64 columns;
    u32 blocks, row_blocks;
    bool contiguous;

    // Columns that a row has in a block; the rest is padding.
    DEVICE int columns_of(u32 block) const {
        return int(min(i64(kBlock), columns - i64(block % row_blocks) * kBlock));
    }
};

// Where a lane puts 16-byte pieces of a warp's tile, and where it gets its own block's, in the staging area.
struct Lane {
    int lane;
    u32 put, get;

    explicit DEVICE Lane(int lane_) : lane(lane_) {
        put = opaque(D::at(lane / D::kPieces, lane % D::kPieces));
        get = opaque(D::at(lane, 0));
    }
    // Piece 32 i + lane of the tile: blocks are staged like those before the last 4 or 8 (float32: turned).
    DEVICE u32 put_at(u32 area, int i) const {
        return area + ((put + i * 512) ^ (D::kPieces == 8 ? i % 2 * 64 : 0));
    }
    DEVICE u32 get_at(u32 area, int piece) const { return area + (get ^ (piece * 16)); }
};

// Blocks 32 * tile .. + 31 of the matrix into a staging area; what lies outside becomes 0.
DEVICE void fetch(const Job& job, u32 tile, u32 area, const Lane& own) {
    const u32 first = tile * 32;
    const int lane = own.lane;
    if (job.contiguous && first + 32 <= job.blocks) {
        const u8* from = job.w + i64(first) * (kBlock * D::kBytes) + lane * 16;
#pragma unroll
        for (int i = 0; i < D::kPieces; ++i) {
            stage16(own.put_at(area, i), from + i * 512);
        }
    } else if (job.contiguous) {
#pragma unroll
        for (int i = 0; i < D::kPieces; ++i) {
            const int piece = i * 32 + lane, block = piece / D::kPieces;
            const bool valid = first + block < job.blocks;
            const i64 offset = valid ? i64(first) * (kBlock * D::kBytes) + piece * 16 : 0;
            stage16_if(own.put_at(area, i), job.w + offset, valid);
        }
    } else {
        i64 row = first / job.row_blocks, column = i64(first % job.row_blocks) * kBlock;
#pragma unroll 4
        for (int block = 0; block < 32; ++block) {
            const bool valid = first + block < job.blocks && column + lane < job.columns;
            const u8* from = job.w + (row * job.columns + column + lane) * D::kBytes;
            const u32 value = valid ? load_global<D::kBytes>(from) : 0;
            put_shared_element<D::kBytes>(area + D::at_element(block, lane), value);
            column += kBlock;
            if (column >= job.columns) {
                column = 0;
                ++row;
            }
        }
    }
    end_stage();
}

// The planes of 32 blocks, one block a lane; `area` is free to use.
DEVICE void write_planes(const Job& job, u32 tile, const u32 (&planes)[F::kField], u32 area, int lane) {
    u32* to = job.packed + i64(tile) * (32 * kBits);
    const int count = int(min(job.blocks - tile * 32, 32u));
    if constexpr (kBits % 2 == 0) {
        if (lane < count) {
            store_words<kBits>(to + lane * kBits, planes);
        }
    } else {  // 3 and 5 words a block are odd strides: no bank conflicts
        __syncwarp();
#pragma unroll
        for (int i = 0; i < kBits; ++i) {
            put_shared(area + (lane * kBits + i) * 4, planes[i]);
        }
        __syncwarp();
#pragma unroll
        for (int i = 0; i < kBits; ++i) {
            const int word = i * 32 + lane;
            if (word < count * kBits) {
                to[word] = load_shared(area + word * 4);
            }
        }
    }
}
