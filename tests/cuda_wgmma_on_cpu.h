// Beyond cuda_on_cpu.h, what wgmma.cu uses. Products are done when they are asked for, and copies, too.
#pragma once

#include "cuda_on_cpu.h"

#define __grid_constant__

// What cuda_wgmma_on_cpu.py makes instead of the driver's opaque bytes.
struct TensorMap {
    u64 address, rows, columns, stride;  // stride in bytes
    u64 element, box_rows, box_columns, swizzled;
    u64 rest[8];
};

template <bool BF16>
uint4 silu_and_mul(uint4 gates, uint4 ups) {
    using H = Half<BF16>;
    const u32 g[4] = {gates.x, gates.y, gates.z, gates.w}, u[4] = {ups.x, ups.y, ups.z, ups.w};
    u32 v[4];
    for (int i = 0; i < 4; ++i) {
        v[i] = H::pack(silu_and_mul<BF16>(H::widen(u16(g[i])), H::widen(u16(u[i]))),
                       silu_and_mul<BF16>(H::widen(u16(g[i] >> 16)), H::widen(u16(u[i] >> 16))));
    }
    return {v[0], v[1], v[2], v[3]};
}

// ---- copies of boxes

// Rows of 128 bytes in 128-byte swizzle: the 16-byte pieces of row r are at their number xor r % 8.
inline u32 swizzle(u32 row, u32 byte) {
    return row * 128 + ((byte / 16 ^ row % 8) * 16) + byte % 16;
}
inline void fill_box(u32 to, const TensorMap& map, int column, int row) {
    require_aligned(to, map.swizzled ? 1024 : 128);
    for (u64 r = 0; r < map.box_rows; ++r) {
        for (u64 c = 0; c < map.box_columns; ++c) {
            u32 value = 0;
            if (row + r < map.rows && column + c < map.columns) {
                const u64 from = map.address + (row + r) * map.stride + (column + c) * map.element;
                std::memcpy(&value, reinterpret_cast<const void*>(from), map.element);
            }
            const u32 byte = u32(c * map.element);
            const u32 place = u32(r * map.box_columns * map.element) + byte;
            const u32 at = to + (map.swizzled ? swizzle(u32(r), byte) : place);
            require_inside(at, map.element);
            std::memcpy(cluster_memory + at, &value, map.element);
        }
    }
}
inline int box_bytes(const TensorMap& map) {
    return int(map.box_rows * map.box_columns * map.element);
}
inline void prefetch_map(const TensorMap*) {}
inline void copy_box(u32 to, const TensorMap* map, int column, int row, u32 barrier) {
    fill_box(to, *map, column, row);
    barrier_at(barrier).update(0, -box_bytes(*map));
}
inline void copy_box_to_both(u32 to, const TensorMap* map, int column, int row, u32 barrier) {
    for (u32 rank = 0; rank < 2; ++rank) {
        copy_box(cluster_address(to, rank), map, column, row, cluster_address(barrier, rank));
    }
}

// ---- products

inline void wgmma_fence() {}
inline void wgmma_commit() {}
template <int PENDING>
void wgmma_wait() {}
inline u64 descriptor(u32 address) {
    require_aligned(address, 1024);
    return address >> 4;
}
// A warp's 16 rows of A, as mma has them, by all tokens in shared memory.
template <bool BF16, int TOKENS, int COUNT>
void multiply_onto(float (&d)[COUNT], const u32 (&a)[4], u64 b, bool adds) {
    Warp& w = warp();
    std::copy(a, a + 4, w.a[lane_id()]);
    __syncwarp();
    const u32 from = u32(b << 4), box = from & ~127u, first = from % 128;
    for (int i = 0; i < TOKENS / 2; ++i) {
        const u32 row = lane_id() / 4 + i / 2 % 2 * 8, token = i / 4 * 8 + lane_id() % 4 * 2 + i % 2;
        double sum = 0;
        for (u32 k = 0; k < 16; ++k) {
            const u32 left = w.a[row % 8 * 4 + k % 8 / 2][row / 8 + k / 8 * 2];
            u16 right;
            std::memcpy(&right, cluster_memory + box + swizzle(token, first + 2 * k), 2);
            using H = Half<BF16>;
            sum += double(H::widen(u16(left >> (k % 2 * 16)))) * H::widen(right);
        }
        d[i] = float((adds ? d[i] : 0.0f) + sum);
    }
    __syncwarp();
}
template <int COUNT>
void fewer_registers() {}
template <int COUNT>
void more_registers() {}
inline void visible_to_copies() {}

// ---- threads that wait for each other, and clusters

template <int THREADS>
void consumers_sync() {
    sync_some(1, THREADS);
}
inline void warpgroup_sync(int group) {
    sync_some(2 + group, 128);
}
inline void pair_sync(int pair) {
    sync_some(6 + pair, 64);
}
inline void teams_sync(int group) {
    sync_some(14 + group, 256);
}
// Lane l gives the address of column l % 8 of matrix l / 8, and has elements 2 (l % 4), + 1 of its row l / 4.
inline void store_matrices_transposed(u32 address, const u32 (&v)[4]) {
    for (int matrix = 0; matrix < 4; ++matrix) {
        for (int half = 0; half < 2; ++half) {
            const u32 column = exchange(address, 8 * matrix + lane_id() % 4 * 2 + half);
            into_shared(column + lane_id() / 4 * 2, u16(v[matrix] >> (16 * half)));
        }
    }
    __syncwarp();
}
inline void barrier_arrive_there(u32 barrier, u32 rank) {
    barrier_arrive(cluster_address(barrier, rank));
}
