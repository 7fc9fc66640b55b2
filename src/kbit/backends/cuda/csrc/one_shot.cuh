// What kernels share that sum over ranks in one crossing of the link: every GPU writes its part into the
// memory of all others, waits for theirs in its own, and adds them up itself.
//
//   inbox_r  of rank r of Config::ranks, mapped here: [2][ranks][capacity] pieces of 16 bytes, at first zeros
//   state    u32 [2]: the number of the next sum, at first 1, and blocks of this one that are done
//   rank     this GPU's
//   seconds  after which a rank that does not come is given up: the kernel traps
//
// A piece is a line, 8 bytes of data, with the sum's number behind each half, so that data and the news of
// them are one write (as in NCCL's protocol LL). Sums take turns with the two halves of an inbox. That a rank
// writes to a half again, two sums later, means that it has had every other rank's part of the sum between,
// which that one sent after it was done with the first: streams run kernels in order. So all ranks must
// compute the same sums, of equal sizes, in the same order. All add in the order of ranks, in float32, and
// round once: the same bits everywhere.
#pragma once

#include "common.cuh"

constexpr int kRanks = Config::ranks;
constexpr u32 kPollsOfAClock = 4096;

// One write, and one read, that are not cached above L2; of each half, data and number come together.
DEVICE void send(uint4* to, uint4 piece) {
    asm volatile("st.volatile.global.v4.u32 [%0], {%1,%2,%3,%4};" ::"l"(to), "r"(piece.x), "r"(piece.y),
                 "r"(piece.z), "r"(piece.w)
                 : "memory");
}
DEVICE uint4 look(const uint4* at) {
    uint4 piece;
    asm volatile("ld.volatile.global.v4.u32 {%0,%1,%2,%3}, [%4];"
                 : "=r"(piece.x), "=r"(piece.y), "=r"(piece.z), "=r"(piece.w)
                 : "l"(at)
                 : "memory");
    return piece;
}
DEVICE u64 nanoseconds() {
    u64 now;
    asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(now));
    return now;
}

// Behind the last number comes the first one of its half again, not 0, which is in lines that were never
// sent.
DEVICE u32 number_after(u32 number) {
    return number == ~0u ? 2 : number + 1;
}

struct Inboxes {
    u64 addresses[8];
    u32 number, rank, capacity, seconds;

    // Of a line of rank r's part, in any inbox.
    DEVICE u64 place_of(int r, u32 line) const { return u64((number & 1) * kRanks + r) * capacity + line; }
    // This rank's line, to all: its own inbox is not read earlier than the others' lines are there, anyway.
    DEVICE void send_line(uint2 line, u32 at) const {
#pragma unroll
        for (int r = 0; r < kRanks; ++r) {
            send((uint4*)addresses[r] + place_of(int(rank), at), make_uint4(line.x, number, line.y, number));
        }
    }
    // The lines of every rank, at so many places: all reads are on their way together.
    template <int N>
    DEVICE void receive(uint2 (&lines)[N][kRanks], const u32 (&places)[N]) const {
        u64 own = 0, begin = 0;
#pragma unroll
        for (int r = 0; r < kRanks; ++r) {
            own = r == int(rank) ? addresses[r] : own;
        }
        for (u32 polls = 1;; ++polls) {
            uint4 pieces[N][kRanks];
            u32 missing = 0;
#pragma unroll
            for (int i = 0; i < N * kRanks; ++i) {
                pieces[i / kRanks][i % kRanks] =
                    look((const uint4*)own + place_of(i % kRanks, places[i / kRanks]));
            }
#pragma unroll
            for (int i = 0; i < N * kRanks; ++i) {
                const uint4 piece = pieces[i / kRanks][i % kRanks];
                lines[i / kRanks][i % kRanks] = {piece.x, piece.z};
                missing |= (piece.y ^ number) | (piece.w ^ number);
            }
            if (!missing) {
                return;
            }
            if (polls % kPollsOfAClock == 0) {
                const u64 now = nanoseconds();
                begin = begin ? begin : now;
                if (now - begin > u64(seconds) * 1000000000u) {
                    __trap();
                }
            }
        }
    }
};

DEVICE uint2 sum_of_lines(const uint2 (&lines)[kRanks]) {
    using H = Half<Config::bf16>;
    float sum[4] = {};
#pragma unroll
    for (int r = 0; r < kRanks; ++r) {
        const u32 words[2] = {lines[r].x, lines[r].y};
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            sum[i] += H::widen(u16(words[i / 2] >> i % 2 * 16));
        }
    }
    return {H::pack(sum[0], sum[1]), H::pack(sum[2], sum[3])};
}

// At the end of a block, whose threads have all read the number.
DEVICE void end_of_block(u32* state, u32 number) {
    __syncthreads();
    if (threadIdx.x == 0 && atomicAdd(state + 1, 1) == gridDim.x - 1) {
        state[1] = 0;
        *state = number_after(number);
    }
}
