// CUDA as far as the kernels of products need it, but wgmma's, on a CPU: threads of a block, and blocks of a
// cluster, take turns, each until it waits for others; clusters run one after the other.
//
// Stands in for common.cuh, stage16.cuh, hopper.cuh and the PTX of rows.cuh. Exchanges among a warp, matrix
// products included, go through memory between two barriers; misaligned accesses abort, as they fault on a
// GPU, and so do those behind a launch's shared memory. fp-contract must be off. What a GPU might do
// otherwise, and this cannot show: races, and how tensor cores add up (here exactly, rounded once).
#pragma once

#include <algorithm>
#include <bitset>
#include <cmath>
#include <cstdlib>
#include <cstring>

#include "cuda_threads_on_cpu.h"

typedef unsigned char u8;
typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;
typedef long long i64;

#define DEVICE inline
#define __device__
#define __global__
#define __launch_bounds__(...)
#define __restrict__
using std::max;
using std::min;

struct uint2 {
    u32 x, y;
};
struct float4 {
    float x, y, z, w;
};
struct uint4 {
    u32 x, y, z, w;
};
inline uint2 make_uint2(u32 x, u32 y) {
    return {x, y};
}
inline uint4 make_uint4(u32 x, u32 y, u32 z, u32 w) {
    return {x, y, z, w};
}

inline Index3 blockDim, gridDim;
// Shared memory of a cluster: a shared address says whose, too.
constexpr int kMostBlocks = 16, kMostThreads = 1024, kWindowBytes = 1 << 20;
alignas(1024) inline u8 cluster_memory[kMostBlocks * kWindowBytes];
inline int cluster_blocks;
inline int launch_bytes;  // of shared memory, of each block

// Shared memory that a launch has not asked for belongs to another block, or to none.
inline void require_inside(u32 address, u64 bytes) {
    if (address / kWindowBytes >= u32(cluster_blocks) || address % kWindowBytes + bytes > u64(launch_bytes)) {
        std::abort();
    }
}

constexpr u32 kAll = ~0u;
constexpr int kBlock = 32;

// ---- a warp and a block

struct Warp {
    turns::Meeting barrier;
    u64 values[32];
    u32 a[32][4], b[32][2];
};
inline Warp warps[kMostBlocks][32];
inline turns::Meeting block_barriers[kMostBlocks], cluster_barrier;

inline Warp& warp() {
    return warps[block_rank][threadIdx.x / 32];
}
inline int lane_id() {
    return int(threadIdx.x % 32);
}
inline void __syncwarp() {
    warp().barrier.wait();
}
inline void __syncthreads() {
    block_barriers[block_rank].wait();
}

// Some threads of a block wait for each other, by a number; always the same ones by the same number. Others,
// too few to wait for themselves, would be taken for these, and sometimes wait for good: that aborts.
struct Named {
    turns::Meeting meeting;
    std::bitset<kMostThreads> members;
};
inline Named named[kMostBlocks][16];
inline void sync_some(int number, int threads) {
    Named& one = named[block_rank][number];
    if (one.meeting.threads != threads) {
        one.meeting.init(threads);
        one.members.reset();
    }
    one.members.set(threadIdx.x);
    if (int(one.members.count()) > threads) {
        std::abort();
    }
    one.meeting.wait();
}

template <class T>
T exchange(T value, int source) {
    std::memcpy(&warp().values[lane_id()], &value, sizeof(T));
    __syncwarp();
    std::memcpy(&value, &warp().values[source], sizeof(T));
    __syncwarp();
    return value;
}
template <class T>
T __shfl_sync(u32, T value, int source) {
    return exchange(value, source);
}
template <class T>
T __shfl_xor_sync(u32, T value, int mask) {
    return exchange(value, lane_id() ^ mask);
}
template <class T>
T __shfl_up_sync(u32, T value, int step) {
    return exchange(value, lane_id() < step ? lane_id() : lane_id() - step);
}
template <class T>
T __shfl_down_sync(u32, T value, int step) {
    return exchange(value, lane_id() + step > 31 ? lane_id() : lane_id() + step);
}
template <class T>
T __reduce_add_sync(u32, T value) {
    T sum = 0;
    for (int i = 0; i < 32; ++i) {
        sum += exchange(value, i);
    }
    return sum;
}
template <class T, class F>
T reduced(T value, F larger) {
    for (int step = 16; step > 0; step /= 2) {
        const T other = exchange(value, lane_id() ^ step);
        value = larger(value, other) ? value : other;
    }
    return value;
}
inline u32 __reduce_max_sync(u32, u32 value) {
    return reduced(value, [](u32 a, u32 b) { return a > b; });
}
inline u32 __ballot_sync(u32, bool predicate) {
    warp().values[lane_id()] = predicate;
    __syncwarp();
    u32 mask = 0;
    for (int i = 0; i < 32; ++i) {
        mask |= u32(warp().values[i] & 1) << i;
    }
    __syncwarp();
    return mask;
}
inline int uniform(int value) {
    return value;
}
inline u32 opaque(u32 value) {
    return value;
}
inline int __popc(u32 value) {
    return __builtin_popcount(value);
}
inline int __ffs(u32 value) {
    return __builtin_ffs(int(value));
}
inline u64 atomicAdd(u64* to, u64 value) {
    return __atomic_fetch_add(to, value, __ATOMIC_SEQ_CST);
}

// ---- arithmetic, each operation rounded once

template <class TO, class FROM>
TO bits_as(FROM from) {
    TO to;
    static_assert(sizeof(TO) == sizeof(FROM));
    std::memcpy(&to, &from, sizeof(TO));
    return to;
}
inline float __uint_as_float(u32 bits) {
    return bits_as<float>(bits);
}
inline u32 __float_as_uint(float value) {
    return bits_as<u32>(value);
}
inline float __fmul_rn(float a, float b) {
    return a * b;
}
inline float __fadd_rn(float a, float b) {
    return a + b;
}
inline float __fsub_rn(float a, float b) {
    return a - b;
}
inline float __fdiv_rn(float a, float b) {
    return a / b;
}
inline float __frcp_rn(float a) {
    return 1.0f / a;
}
inline float __fsqrt_rn(float a) {
    return sqrtf(a);
}
// One unit in the last place off, as a GPU may be.
inline float __fdividef(float a, float b) {
    return nextafterf(a / b, 0.0f);
}
inline float __expf(float value) {
    return nextafterf(expf(value), 0.0f);
}
inline float __fmaf_rn(float a, float b, float c) {
    return fmaf(a, b, c);
}
inline float __fmul_ru(float a, float b) {
    const double exact = double(a) * double(b);
    const float nearest = float(exact);
    return double(nearest) < exact ? nextafterf(nearest, INFINITY) : nearest;
}
inline float __fmul_rz(float a, float b) {
    const double exact = double(a) * double(b);
    const float nearest = float(exact);
    return fabs(double(nearest)) > fabs(exact) ? nextafterf(nearest, 0.0f) : nearest;
}
inline float __ll2float_rn(i64 value) {
    return float(value);
}
inline float max_or_nan(float a, float b) {
    return a != a || b != b ? NAN : max(a, b);
}

inline u32 permute(u32 a, u32 b, u32 selector) {
    const u64 bytes = u64(b) << 32 | a;
    u32 picked = 0;
    for (int i = 0; i < 4; ++i) {
        const u32 nibble = selector >> (4 * i) & 15, byte = u32(bytes >> (8 * (nibble & 7))) & 255;
        picked |= (nibble < 8 ? byte : byte & 128 ? 255 : 0) << (8 * i);
    }
    return picked;
}

template <bool BF16>
struct Half {
    static u16 narrow(float value) {
        if constexpr (BF16) {
            const u32 u = __float_as_uint(value);
            return value != value ? 0x7fff : u16((u + 0x7fff + (u >> 16 & 1)) >> 16);
        } else {
            return bits_as<u16>(_Float16(value));
        }
    }
    static float widen(u16 bits) {
        return BF16 ? __uint_as_float(u32(bits) << 16) : float(bits_as<_Float16>(bits));
    }
    static u32 pack(float low, float high) { return narrow(low) | u32(narrow(high)) << 16; }
    static u32 multiply(u32 a, u32 b) {
        return pack(widen(u16(a)) * widen(u16(b)), widen(u16(a >> 16)) * widen(u16(b >> 16)));
    }
    template <bool HIGH>
    static u32 multiply_by_half(u32 a, u32 factors) {
        const u32 half = HIGH ? factors >> 16 : factors & 0xffffu;
        return multiply(a, half | half << 16);
    }
    static void mma(float (&d)[4], const u32 (&a)[4], u32 b0, u32 b1) {
        Warp& w = warp();
        std::copy(a, a + 4, w.a[lane_id()]);
        w.b[lane_id()][0] = b0;
        w.b[lane_id()][1] = b1;
        __syncwarp();
        for (int i = 0; i < 4; ++i) {
            const int row = lane_id() / 4 + i / 2 * 8, column = lane_id() % 4 * 2 + i % 2;
            double sum = 0;
            for (int k = 0; k < 16; ++k) {
                const u32 left = w.a[row % 8 * 4 + k % 8 / 2][row / 8 + k / 8 * 2];
                const u32 right = w.b[column * 4 + k % 8 / 2][k / 8];
                sum += double(widen(u16(left >> (k % 2 * 16)))) * widen(u16(right >> (k % 2 * 16)));
            }
            d[i] = float(d[i] + sum);
        }
        __syncwarp();
    }
};

inline void multiply_bytes(int (&d)[4], u32 a0, u32 a1, u32 b) {
    Warp& w = warp();
    w.a[lane_id()][0] = a0;
    w.a[lane_id()][1] = a1;
    w.b[lane_id()][0] = b;
    __syncwarp();
    for (int i = 0; i < 4; ++i) {
        const int row = lane_id() / 4, column = lane_id() % 4 * 2 + i % 2;
        for (int k = 0; k < 16; ++k) {
            const u32 left = w.a[row * 4 + k / 4][i / 2], right = w.b[column * 4 + k / 4][0];
            d[i] += int(char(left >> (k % 4 * 8))) * int(char(right >> (k % 4 * 8)));
        }
    }
    __syncwarp();
}

// ---- memory

inline void require_aligned(u64 address, u64 bytes) {
    if (address % bytes != 0) {
        std::abort();
    }
}
inline u8* block_memory() {
    return cluster_memory + block_rank * kWindowBytes;
}
inline u32 shared_address(const void* pointer) {
    return u32(static_cast<const u8*>(pointer) - cluster_memory);
}
template <class T>
T from_shared(u32 address) {
    require_aligned(address, sizeof(T));
    require_inside(address, sizeof(T));
    T value;
    std::memcpy(&value, cluster_memory + address, sizeof(T));
    return value;
}
template <class T>
void into_shared(u32 address, T value) {
    require_aligned(address, sizeof(T));
    require_inside(address, sizeof(T));
    std::memcpy(cluster_memory + address, &value, sizeof(T));
}
inline u32 load_shared(u32 address) {
    return from_shared<u32>(address);
}
// ldmatrix: lane 8m + i says where row i of matrix m lies; lane l gets elements 2 (l % 4), + 1 of row l / 4.
template <int COUNT>
void load_matrices(u32 (&v)[COUNT], u32 row) {
    for (int matrix = 0; matrix < COUNT; ++matrix) {
        const u32 from = exchange(row, 8 * matrix + lane_id() / 4);
        require_aligned(from, 16);
        v[matrix] = load_shared(from + lane_id() % 4 * 4);
    }
    __syncwarp();
}
// movmatrix: lane l had elements 2 (l % 4), + 1 of row l / 4, and gets those of column l / 4.
inline u32 transposed(u32 v) {
    u32 turned = 0;
    for (int i = 0; i < 2; ++i) {
        const u32 row = exchange(v, (lane_id() % 4 * 2 + i) * 4 + lane_id() / 8);
        turned |= (row >> (lane_id() / 4 % 2 * 16) & 0xffff) << (16 * i);
    }
    return turned;
}
inline uint2 load_shared2(u32 address) {
    return from_shared<uint2>(address);
}
inline uint4 load_shared4(u32 address) {
    return from_shared<uint4>(address);
}
template <int BYTES>
u32 load_shared_element(u32 address) {
    return from_shared<u16>(address);
}
inline void put_shared(u32 address, u32 value) {
    into_shared(address, value);
}
inline void store_shared2(u32 address, uint2 value) {
    into_shared(address, value);
}
inline void store_shared4(u32 address, uint4 value) {
    into_shared(address, value);
}

template <class T>
void stage(u32 to, const void* from) {
    require_aligned(u64(from), sizeof(T));
    T value;
    std::memcpy(&value, from, sizeof(T));
    into_shared(to, value);
}
inline void stage4(u32 to, const void* from) {
    stage<u32>(to, from);
}
inline void stage16(u32 to, const void* from) {
    stage<uint4>(to, from);
}
inline void stage16_if(u32 to, const void* from, bool valid) {
    stage<uint4>(to, from);
    if (!valid) {
        into_shared(to, uint4{0, 0, 0, 0});
    }
}
inline void end_stage() {}
template <int LATER = 1>
inline void wait_for_stage() {}
inline void launch_dependents() {}
inline void launch_early() {}
inline void launch_late() {}
inline void wait_for_previous() {}
inline void wait_and_launch() {}
template <class... T>
inline void forget(T&...) {}
template <class... T>
inline void follow_previous(T&...) {}

template <class T>
T __ldg(const T* from) {
    require_aligned(u64(from), sizeof(T));
    return *from;
}
template <int BYTES>
u32 load_global(const u8* from) {
    u32 value = 0;
    std::memcpy(&value, from, BYTES);
    return value;
}
inline void store16(void* to, uint4 value) {
    require_aligned(u64(to), 16);
    std::memcpy(to, &value, 16);
}

// ---- barriers in shared memory, and copies that arrive at them

struct Barrier {
    int count, pending, bytes;  // those to come
    u32 phase;

    void update(int arrivals, int more_bytes) {
        pending -= arrivals;
        bytes += more_bytes;
        if (pending == 0 && bytes == 0) {
            pending = count;
            phase ^= 1;
        }
    }
};
// By address / 8: what a barrier holds would not fit in its eight bytes.
inline Barrier barriers[sizeof(cluster_memory) / 8];

inline Barrier& barrier_at(u32 address) {
    require_aligned(address, 8);
    require_inside(address, 8);
    return barriers[address / 8];
}
inline void barrier_init(u32 address, int arrivals) {
    Barrier& b = barrier_at(address);
    b.count = b.pending = arrivals;
    b.bytes = 0;
    b.phase = 0;
}
inline void barriers_visible() {}
inline void barrier_arrive(u32 address) {
    barrier_at(address).update(1, 0);
}
inline void barrier_expect(u32 address, u32 bytes) {
    barrier_at(address).update(1, int(bytes));
}
inline void barrier_wait(u32 address, u32 parity) {
    Barrier& b = barrier_at(address);
    turns::wait_until([&] { return b.phase != parity; });
}
constexpr int kWarpArrivals = 1, kCopyArrivals = 1;
inline void warp_arrive(u32 address, int lane) {
    __syncwarp();
    if (lane == 0) {
        barrier_arrive(address);
    }
}
template <int PLACES>
void copy(const u32 (&to)[PLACES], const u8* const (&from)[PLACES], u32 bytes, u32 address, int lane) {
    for (int i = 0; lane == 0 && i < PLACES; ++i) {
        require_aligned(to[i] | u64(from[i]) | bytes, 16);
        require_inside(to[i], bytes);
        std::memcpy(cluster_memory + to[i], from[i], bytes);
    }
    if (lane == 0) {
        barrier_arrive(address);
    }
    __syncwarp();
}
inline u32 after_loads(u32, u32) {
    __syncwarp();
    return 0;
}

// ---- clusters

inline u32 cluster_size() {
    return cluster_blocks;
}
inline u32 cluster_rank() {
    return block_rank;
}
inline void cluster_sync() {
    cluster_barrier.wait();
}
inline void cluster_arrive() {}
inline void cluster_wait() {
    cluster_barrier.wait();
}
inline u32 cluster_address(u32 address, u32 rank) {
    return address % kWindowBytes + rank * kWindowBytes;
}
inline uint2 load_cluster2(u32 from) {
    return load_shared2(from);
}
template <class T>
void store_cluster(u32 to, T value) {
    into_shared(to, value);
}
template <class T>
void store_cluster(u32 to, T value, u32 barrier) {
    into_shared(to, value);
    barrier_at(barrier).update(0, -int(sizeof(T)));
}

// ---- what common.cuh makes of these

inline float low_half(u32 both) {
    return Half<false>::widen(u16(both));
}
inline float high_half(u32 both) {
    return Half<false>::widen(u16(both >> 16));
}
template <int I>
struct Index {
    static constexpr int value = I;
};
template <int N, int I = 0, class F>
void static_for(F f) {
    if constexpr (I < N) {
        f(Index<I>());
        static_for<N, I + 1>(f);
    }
}
inline void transpose_four_lanes(u32 (&v)[4], int t) {
    u32 all[4][4];
    for (int i = 0; i < 4; ++i) {
        for (int lane = 0; lane < 4; ++lane) {
            all[lane][i] = exchange(v[i], lane_id() / 4 * 4 + lane);
        }
    }
    for (int i = 0; i < 4; ++i) {
        v[i] = all[i][t];
    }
}
inline float add_four_lanes(float value) {
    value += __shfl_xor_sync(kAll, value, 1);
    return value + __shfl_xor_sync(kAll, value, 2);
}
template <bool BF16>
float silu_and_mul(float gate, float up) {
    using H = Half<BF16>;
    gate = H::widen(H::narrow(gate));
    return H::widen(H::narrow(gate / (1.0f + expf(-gate)))) * H::widen(H::narrow(up));
}

// ---- launches

// Threads that wait for each other run at once, others in turn.
template <class KERNEL>
void launch(const int (&grid)[3], int threads, int shared_bytes, int cluster, bool together, KERNEL kernel) {
    const int x = grid[0], y = grid[1], z = grid[2];
    if (shared_bytes > kWindowBytes || cluster > kMostBlocks || x % cluster != 0 || threads > kMostThreads ||
        std::min({x, y, z}) < 1 || std::max(y, z) > 65535) {
        std::abort();
    }
    launch_bytes = shared_bytes;
    blockDim = {u32(threads), 1, 1};
    gridDim = {u32(x), u32(y), u32(z)};
    cluster_blocks = cluster;
    cluster_barrier.init(cluster * threads);
    for (int rank = 0; rank < cluster; ++rank) {
        for (Named& one : named[rank]) {
            one = {};  // all libraries of the process share it, and the kernel before may have been another
        }
        block_barriers[rank].init(threads);
        for (int w = 0; w < threads / 32; ++w) {
            warps[rank][w].barrier.init(32);
        }
    }
    constexpr u8 kBehind = 0x5a;
    const int behind = std::min(4096, kWindowBytes - shared_bytes);
    for (int first = 0; first < x * y * z; first += cluster) {
        for (int rank = 0; rank < cluster; ++rank) {
            u8* const memory = cluster_memory + rank * kWindowBytes;
            std::memset(memory, 0xa5, shared_bytes);
            std::memset(memory + shared_bytes, kBehind, behind);
        }
        const auto place = [=](int i, turns::Place& one) {
            const int block = first + i / threads;
            one.rank = i / threads;
            one.thread = {u32(i % threads), 0, 0};
            one.block = {u32(block % x), u32(block / x % y), u32(block / x / y)};
        };
        if (together) {
            turns::run_together(cluster * threads, place, kernel);
            for (int rank = 0; rank < cluster; ++rank) {  // what was written through pointers
                const u8* const end = cluster_memory + rank * kWindowBytes + shared_bytes;
                if (std::any_of(end, end + behind, [](u8 byte) { return byte != kBehind; })) {
                    std::abort();
                }
            }
            continue;
        }
        for (int i = 0; i < cluster * threads; ++i) {
            turns::run_alone(i, place, kernel);
        }
    }
}
