// What every kernel uses: short type names, 16-bit arithmetic (half.cuh), and the PTX that CUDA C++ has no
// word for.
//
// No CUDA header is included: the run-time compiler then needs nothing but itself. Clocks and microseconds in
// the comments of all sources are those of an H200, compiled by CUDA 13.0.
#pragma once

typedef unsigned char u8;
typedef unsigned short u16;
typedef unsigned int u32;
typedef long long i64;
typedef unsigned long long u64;

#define DEVICE __device__ __forceinline__

#include "half.cuh"

// Bytes of {b, a} picked by the nibbles of `selector`.
DEVICE u32 permute(u32 a, u32 b, u32 selector) {
    u32 picked;
    asm("prmt.b32 %0, %1, %2, %3;" : "=r"(picked) : "r"(a), "r"(b), "r"(selector));
    return picked;
}

// The value, of which the compiler knows nothing: or it would compute it at each of its uses.
DEVICE u32 opaque(u32 value) {
    u32 same;
    asm volatile("mov.u32 %0, %1;" : "=r"(same) : "r"(value));
    return same;
}

// The same in every lane, known to the compiler as such.
DEVICE int uniform(int value) {
    return __shfl_sync(~0u, value, 0);
}

// Four lanes hold a 4 x 4 matrix of words by rows, and then by columns. t: lane % 4.
DEVICE void transpose_four_lanes(u32 (&v)[4], int t) {
    const bool odd = t & 1, upper = t & 2;
    const u32 a = __shfl_xor_sync(~0u, odd ? v[0] : v[1], 1), b = __shfl_xor_sync(~0u, odd ? v[2] : v[3], 1);
    const u32 p[4] = {odd ? a : v[0], odd ? v[1] : a, odd ? b : v[2], odd ? v[3] : b};
    const u32 c = __shfl_xor_sync(~0u, upper ? p[0] : p[2], 2),
              d = __shfl_xor_sync(~0u, upper ? p[1] : p[3], 2);
    v[0] = upper ? c : p[0];
    v[1] = upper ? d : p[1];
    v[2] = upper ? p[2] : c;
    v[3] = upper ? p[3] : d;
}

DEVICE u32 shared_address(const void* pointer) {
    return u32(__cvta_generic_to_shared(pointer));
}

// Volatile loads keep their place among the asynchronous copies that refill what they read.
DEVICE u32 load_shared(u32 address) {
    u32 v;
    asm volatile("ld.shared.u32 %0, [%1];" : "=r"(v) : "r"(address));
    return v;
}
DEVICE uint2 load_shared2(u32 address) {
    uint2 v;
    asm volatile("ld.shared.v2.u32 {%0,%1}, [%2];" : "=r"(v.x), "=r"(v.y) : "r"(address));
    return v;
}
DEVICE uint4 load_shared4(u32 address) {
    uint4 v;
    asm volatile("ld.shared.v4.u32 {%0,%1,%2,%3}, [%4];"
                 : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
                 : "r"(address));
    return v;
}

// f(Index<0>()), ..., f(Index<N - 1>())
template <int I>
struct Index {
    static constexpr int value = I;
};
template <int N, int I = 0, class F>
DEVICE void static_for(F f) {
    if constexpr (I < N) {
        f(Index<I>());
        static_for<N, I + 1>(f);
    }
}

DEVICE void put_shared(u32 address, u32 v) {
    asm volatile("st.shared.u32 [%0], %1;" ::"r"(address), "r"(v) : "memory");
}
DEVICE void store_shared2(u32 address, uint2 v) {
    asm volatile("st.shared.v2.u32 [%0], {%1,%2};" ::"r"(address), "r"(v.x), "r"(v.y) : "memory");
}
DEVICE void store_shared4(u32 address, uint4 v) {
    asm volatile("st.shared.v4.u32 [%0], {%1,%2,%3,%4};" ::"r"(address), "r"(v.x), "r"(v.y), "r"(v.z),
                 "r"(v.w)
                 : "memory");
}

// To an address aligned to 16 bytes. Of the same in C++ the compiler makes four stores at times.
DEVICE void store16(void* to, uint4 v) {
    asm volatile("st.global.v4.u32 [%0], {%1,%2,%3,%4};" ::"l"(to), "r"(v.x), "r"(v.y), "r"(v.z), "r"(v.w)
                 : "memory");
}

// ---- mbarriers (sm_80 on)

DEVICE void barrier_init(u32 barrier, int arrivals) {
    asm volatile("mbarrier.init.shared.b64 [%0], %1;" ::"r"(barrier), "r"(arrivals) : "memory");
}
DEVICE void barrier_arrive(u32 barrier) {
    asm volatile("{ .reg .b64 state; mbarrier.arrive.shared.b64 state, [%0]; }" ::"r"(barrier) : "memory");
}
// A warp's arrival: all its lanes' accesses come before it. One lane arrives for all, which __syncwarp
// allows; racecheck follows barriers thread by thread, so that it needs -DKBIT_ALL_LANES_ARRIVE (in
// KBIT_CUDA_FLAGS).
#ifdef KBIT_ALL_LANES_ARRIVE
constexpr int kWarpArrivals = 32;
#else
constexpr int kWarpArrivals = 1;
#endif
DEVICE void warp_arrive(u32 barrier, int lane) {
    __syncwarp();
    if (lane < kWarpArrivals) {
        barrier_arrive(barrier);
    }
}
DEVICE void barrier_wait(u32 barrier, u32 parity) {
    u32 done;
    do {
#if __CUDA_ARCH__ >= 900
        asm volatile(
            "{ .reg .pred p; mbarrier.try_wait.parity.shared.b64 p, [%1], %2; selp.u32 %0, 1, 0, p; }"
            : "=r"(done)
            : "r"(barrier), "r"(parity)
            : "memory");
#else
        asm volatile(
            "{ .reg .pred p; mbarrier.test_wait.parity.shared.b64 p, [%1], %2; selp.u32 %0, 1, 0, p; }"
            : "=r"(done)
            : "r"(barrier), "r"(parity)
            : "memory");
#endif
    } while (!done);
}
// A thread's arrival that also announces `bytes` to come by the copy engine.
DEVICE void barrier_expect(u32 barrier, u32 bytes) {
    asm volatile("{ .reg .b64 state; mbarrier.arrive.expect_tx.shared.b64 state, [%0], %1; }" ::"r"(barrier),
                 "r"(bytes)
                 : "memory");
}

// Initialized barriers become visible to other threads after a block barrier, to the copy engine after this.
DEVICE void barriers_visible() {
#if __CUDA_ARCH__ >= 900
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
#endif
}

// ---- asynchronous copies into shared memory

#if __CUDA_ARCH__ >= 900
constexpr int kCopyArrivals = 1;
#else
constexpr int kCopyArrivals = 32;
#endif

// A warp copies `bytes` (a multiple of 16) from each place: by the copy engine from sm_90 on, which one lane
// asks. It is elected because that tells the compiler that it is one: for `lane == 0` it writes a loop over
// lanes. `barrier`, initialized with kCopyArrivals, completes its phase when all are there.
template <int PLACES>
DEVICE void copy(const u32 (&to)[PLACES], const u8* const (&from)[PLACES], u32 bytes, u32 barrier, int lane) {
#if __CUDA_ARCH__ >= 900
    static_assert(PLACES == 1 || PLACES == 2);
    if constexpr (PLACES == 1) {
        asm volatile(
            "{ .reg .pred p; .reg .b64 state; elect.sync _|p, 0xffffffff;"
            "@p mbarrier.arrive.expect_tx.shared.b64 state, [%0], %1;"
            "@p cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%2], [%3], %1, [%0]; }" ::
                "r"(barrier),
            "r"(bytes), "r"(to[0]), "l"(from[0])
            : "memory");
    } else {
        asm volatile(
            "{ .reg .pred p; .reg .b64 state; elect.sync _|p, 0xffffffff;"
            "@p mbarrier.arrive.expect_tx.shared.b64 state, [%0], %6;"
            "@p cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%2], [%3], %1, [%0];"
            "@p cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%4], [%5], %1, [%0]; }" ::
                "r"(barrier),
            "r"(bytes), "r"(to[0]), "l"(from[0]), "r"(to[1]), "l"(from[1]), "r"(2 * bytes)
            : "memory");
    }
#else
#pragma unroll
    for (int i = 0; i < PLACES; ++i) {
#pragma unroll 4
        for (u32 at = lane * 16; at < bytes; at += 512) {
            asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(to[i] + at), "l"(from[i] + at)
                         : "memory");
        }
    }
    asm volatile("cp.async.mbarrier.arrive.noinc.shared.b64 [%0];" ::"r"(barrier) : "memory");
#endif
    __syncwarp();
}

// All lanes of the warp have read what a copy will overwrite; 0, for that copy's address. The copy engine is
// not ordered behind queued loads (a __syncwarp was a race), so the address depends on `loaded`, words of all
// loads but those that look-ups in front of the copy wait for. `zero`: one that the compiler does not know.
DEVICE u32 after_loads(u32 loaded, u32 zero) {
#if __CUDA_ARCH__ < 900 || defined(KBIT_ALL_LANES_ARRIVE)
    __syncwarp();
#endif
#if __CUDA_ARCH__ >= 900
    // Waits for all lanes (racecheck does not know); in a uniform register, which the copy engine takes.
    return __reduce_or_sync(~0u, loaded & zero);
#else
    return loaded & zero;
#endif
}

// ---- clusters (sm_90 on; elsewhere a block is alone)

DEVICE u32 cluster_size() {
    u32 size = 1;
#if __CUDA_ARCH__ >= 900
    asm("mov.u32 %0, %%cluster_nctarank;" : "=r"(size));
#endif
    return size;
}
DEVICE u32 cluster_rank() {
    u32 rank = 0;
#if __CUDA_ARCH__ >= 900
    asm("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
#endif
    return rank;
}
DEVICE void cluster_sync() {
#if __CUDA_ARCH__ >= 900
    asm volatile("barrier.cluster.arrive.release.aligned; barrier.cluster.wait.acquire.aligned;" ::
                     : "memory");
#endif
}

// ---- programmatic dependent launch: nothing happens below sm_90, or in a launch without the attribute

// Lets the next kernel of the stream start.
DEVICE void launch_dependents() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}
// The same before wait_for_previous, for a next kernel that waits before it reads anything. Those of
// torch.compile wait for this kernel's results alone and take all older ones for written: where they start
// early (TORCHINDUCTOR_ENABLE_PDL), -DKBIT_WAIT_FIRST has launch_late let them, after wait_for_previous.
DEVICE void launch_early() {
#ifndef KBIT_WAIT_FIRST
    launch_dependents();
#endif
}
DEVICE void launch_late() {
#ifdef KBIT_WAIT_FIRST
    launch_dependents();
#endif
}
// Returns when the previous kernel of the stream is done and what it wrote can be read.
DEVICE void wait_for_previous() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}
// Hides from the compiler until here what pointers point to: it may take that for constant and load it early.
template <class... T>
DEVICE void forget(T*&... pointers) {
    ((void)[&] { asm volatile("" : "+l"(pointers)); }(), ...);
}
// The next kernel may start when the previous one is done, and so read what that one wrote before it waits.
DEVICE void wait_and_launch() {
    wait_for_previous();
    launch_dependents();
}
// Lets the next kernel start and waits for the previous one, for a kernel that reads nothing before.
template <class... T>
DEVICE void follow_previous(T*&... pointers) {
    launch_early();
    wait_for_previous();
    launch_late();
    forget(pointers...);
}
