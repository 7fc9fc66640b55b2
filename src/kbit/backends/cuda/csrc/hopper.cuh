// Hopper's instructions, for wgmma.cu: asynchronous matrix products, tensor maps, registers on demand,
// clusters.
#pragma once

#include "common.cuh"

struct alignas(64) TensorMap {
    u64 opaque[16];
};

// ---- wgmma: products of a warpgroup (128 threads), in the order of commit

DEVICE void wgmma_fence() {
    asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
}
DEVICE void wgmma_commit() {
    asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
}
template <int PENDING>
DEVICE void wgmma_wait() {
    asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(PENDING) : "memory");
}
// B operand, K-major with rows of 128 bytes in 128-byte swizzle, at a multiple of 1024; + 2 for 16 columns
// on.
DEVICE u64 descriptor(u32 address) {
    return (1ull << 62) | (64ull << 32) | (1ull << 16) | (address >> 4);
}

template <int COUNT>
DEVICE void fewer_registers() {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(COUNT));
}
template <int COUNT>
DEVICE void more_registers() {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(COUNT));
}

// One thread copies a box of a tensor map, completing on `barrier`; elements outside the tensor are zero.
DEVICE void copy_box(u32 to, const TensorMap* map, int column, int row, u32 barrier) {
    asm volatile(
        "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%2, %3}], "
        "[%4];" ::"r"(to),
        "l"(map), "r"(column), "r"(row), "r"(barrier)
        : "memory");
}

// The 256 threads of the two consumer warpgroups, or one of them.
DEVICE void consumers_sync() {
    asm volatile("bar.sync 1, 256;" ::: "memory");
}
DEVICE void warpgroup_sync(int group) {
    asm volatile("bar.sync %0, 128;" ::"r"(2 + group) : "memory");
}

// Four 8 x 8 matrices of 16-bit values, transposed; lane l gives the address of column l % 8 of matrix l / 8.
DEVICE void store_matrices_transposed(u32 address, const u32 (&v)[4]) {
    asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1,%2,%3,%4};" ::"r"(address),
                 "r"(v[0]), "r"(v[1]), "r"(v[2]), "r"(v[3])
                 : "memory");
}

// v[0..3]: the float4 at the same shared address of every block of the cluster, added in their order.
DEVICE void add_over_cluster(float* v, u32 address, u32 blocks) {
    v[0] = v[1] = v[2] = v[3] = 0.0f;
    for (u32 rank = 0; rank < blocks; ++rank) {
        float f[4];
        asm volatile(
            "{ .reg .b32 remote; mapa.shared::cluster.u32 remote, %4, %5; "
            "ld.shared::cluster.v4.f32 {%0,%1,%2,%3}, [remote]; }"
            : "=f"(f[0]), "=f"(f[1]), "=f"(f[2]), "=f"(f[3])
            : "r"(address), "r"(rank)
            : "memory");
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            v[i] += f[i];
        }
    }
}
