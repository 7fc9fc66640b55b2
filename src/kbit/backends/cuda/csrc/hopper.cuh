// Hopper's instructions, for wgmma.cu and, of clusters, several more kernels: asynchronous matrix
// products, tensor maps, registers on demand, clusters.
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

DEVICE void prefetch_map(const TensorMap* map) {
    asm volatile("prefetch.tensormap [%0];" ::"l"(map) : "memory");
}

// One thread copies a box of a tensor map, completing on `barrier`; elements outside the tensor are zero.
DEVICE void copy_box(u32 to, const TensorMap* map, int column, int row, u32 barrier) {
    asm volatile(
        "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%2, %3}], "
        "[%4];" ::"r"(to),
        "l"(map), "r"(column), "r"(row), "r"(barrier)
        : "memory");
}

// Into both blocks of a cluster of two, at the same place, completing on the same barrier of each.
DEVICE void copy_box_to_both(u32 to, const TensorMap* map, int column, int row, u32 barrier) {
    asm volatile(
        "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster "
        "[%0], [%1, {%2, %3}], [%4], %5;" ::"r"(to),
        "l"(map), "r"(column), "r"(row), "r"(barrier), "h"(u16(3))
        : "memory");
}

// After a barrier, the copy engine may use shared memory that this thread has used.
DEVICE void visible_to_copies() {
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}

// The threads of all consumer warpgroups, or of one of up to four.
template <int THREADS>
DEVICE void consumers_sync() {
    asm volatile("bar.sync 1, %0;" ::"n"(THREADS) : "memory");
}
DEVICE void warpgroup_sync(int group) {
    asm volatile("bar.sync %0, 128;" ::"r"(2 + group) : "memory");
}

// A warp of 16 gates' rows and that of their ups, for `pair` from 0 to 7.
DEVICE void pair_sync(int pair) {
    asm volatile("bar.sync %0, 64;" ::"r"(6 + pair) : "memory");
}

// The warpgroups of both teams that have the same rows, for `group` 0 or 1.
DEVICE void teams_sync(int group) {
    asm volatile("bar.sync %0, 256;" ::"r"(14 + group) : "memory");
}

// Four 8 x 8 matrices of 16-bit values, transposed; lane l gives the address of column l % 8 of matrix l / 8.
DEVICE void store_matrices_transposed(u32 address, const u32 (&v)[4]) {
    asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1,%2,%3,%4};" ::"r"(address),
                 "r"(v[0]), "r"(v[1]), "r"(v[2]), "r"(v[3])
                 : "memory");
}

// The place in a block of the cluster that corresponds to a shared address of this one, and stores there. One
// with a barrier of that block completes on it.
DEVICE u32 cluster_address(u32 address, u32 rank) {
    u32 remote;
    asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(remote) : "r"(address), "r"(rank));
    return remote;
}
// Orders reads before a copy from elsewhere. Released to the cluster instead, each arrival would wait for all
// of a thread's memory: 1.8 times as long for a layer.
DEVICE void barrier_arrive_there(u32 barrier, u32 rank) {
    asm volatile("mbarrier.arrive.shared::cluster.b64 _, [%0];" ::"r"(cluster_address(barrier, rank))
                 : "memory");
}
DEVICE uint2 load_cluster2(u32 from) {
    uint2 v;
    asm volatile("ld.shared::cluster.v2.b32 {%0,%1}, [%2];" : "=r"(v.x), "=r"(v.y) : "r"(from) : "memory");
    return v;
}
DEVICE void store_cluster(u32 to, uint4 v) {
    asm volatile("st.shared::cluster.v4.b32 [%0], {%1,%2,%3,%4};" ::"r"(to), "r"(v.x), "r"(v.y), "r"(v.z),
                 "r"(v.w)
                 : "memory");
}
DEVICE void store_cluster(u32 to, uint4 v, u32 barrier) {
    asm volatile(
        "st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.v4.b32 [%0], {%1,%2,%3,%4}, [%5];" ::"r"(
            to),
        "r"(v.x), "r"(v.y), "r"(v.z), "r"(v.w), "r"(barrier)
        : "memory");
}
DEVICE void store_cluster(u32 to, uint2 v, u32 barrier) {
    asm volatile(
        "st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.v2.b32 [%0], {%1,%2}, [%3];" ::"r"(to),
        "r"(v.x), "r"(v.y), "r"(barrier)
        : "memory");
}

// Two halves of a barrier of the cluster, with work between them. Nothing is released but barriers that were
// made visible: for more, an arrival would wait for all of a thread's memory.
DEVICE void cluster_arrive() {
    asm volatile("barrier.cluster.arrive.relaxed.aligned;" ::: "memory");
}
DEVICE void cluster_wait() {
    asm volatile("barrier.cluster.wait.aligned;" ::: "memory");
}
