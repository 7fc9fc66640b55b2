// Sum over ranks of a few values, in one crossing of the link: every GPU writes its part into the memory of
// all, waits for the parts of all in its own, and adds them up itself. With Config::gathers it puts them
// beside each other instead.
//
//   x        float16, or bfloat16 with Config::bf16: lines * 4 elements, 8-byte aligned
//   y        like x, and may be x; gathered, of every row_lines lines of x the ranks' in their order
//   inbox_r  of rank r of Config::ranks, mapped here: [2][ranks][capacity] pieces of 16 bytes, at first zeros
//   state    u32 [3]: the number of the next sum, at first 1; blocks of this one that are done; 1 if some
//            rank was given up
//   rank     this GPU's
//   seconds  after which a rank that does not come is given up: then the kernel traps, or if they are
//            negative goes on with what is there
//
// A piece is a line, 8 bytes of data, with the sum's number behind each half, so that data and the news of
// them are one write (as in NCCL's protocol LL). Sums take turns with the two halves of an inbox. That a rank
// writes to a half again, two sums later, means that it has had every other rank's part of the sum between,
// which that one sent after it was done with the first: streams run kernels in order. So all ranks must
// compute the same sums, of equal sizes, in the same order. All add in the order of ranks, in float32, and
// round once: the same bits everywhere.
//
// grid: ceil(lines / threads)
#include "common.cuh"
#include "config.h"

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

// A line of each rank, the first one's at `from` and so on, `apart` pieces from one to the next. All reads
// are on their way together. False: a rank was given up.
DEVICE bool receive(uint2 (&lines)[kRanks], const uint4* from, u64 apart, u32 number, int seconds) {
    const u64 most = u64(u32(seconds < 0 ? -seconds : seconds)) * 1000000000u;
    u64 begin = 0;
    for (u32 polls = 1;; ++polls) {
        uint4 pieces[kRanks];
        u32 missing = 0;
#pragma unroll
        for (int r = 0; r < kRanks; ++r) {
            pieces[r] = look(from + r * apart);
        }
#pragma unroll
        for (int r = 0; r < kRanks; ++r) {
            lines[r] = {pieces[r].x, pieces[r].z};
            missing |= (pieces[r].y ^ number) | (pieces[r].w ^ number);
        }
        if (!missing) {
            return true;
        }
        if (polls % kPollsOfAClock == 0) {
            const u64 now = nanoseconds();
            begin = begin ? begin : now;
            if (now - begin > most) {
                if (seconds < 0) {
                    return false;
                }
                __trap();
            }
        }
    }
}

DEVICE uint2 sum_of(const uint2 (&lines)[kRanks]) {
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

// Where rank r's line `at` comes to be in y.
DEVICE u32 gathered_place(u32 at, u32 r, u32 row_lines) {
    return at + (at / row_lines * (kRanks - 1) + r) * row_lines;
}

// Behind the last number comes the first one of its half again, not 0, which is in lines that were never
// sent. A line that was sent just 2^32 sums ago, and never since, would pass for one of this sum.
DEVICE u32 number_after(u32 number) {
    return number == ~0u ? 2 : number + 1;
}

extern "C" __global__ void __launch_bounds__(128, 1)
    one_shot(const uint2* x, uint2* y, u64 inbox_0, u64 inbox_1, u64 inbox_2, u64 inbox_3, u64 inbox_4,
             u64 inbox_5, u64 inbox_6, u64 inbox_7, u32* state, int rank, int capacity, int seconds,
             int lines, int row_lines) {
    const u64 inboxes[8] = {inbox_0, inbox_1, inbox_2, inbox_3, inbox_4, inbox_5, inbox_6, inbox_7};
    follow_previous(x, state);
    const u32 number = *state, at = blockIdx.x * blockDim.x + threadIdx.x;
    if (at < u32(lines)) {
        // In any inbox: of the first rank's lines of this sum, this one.
        const u64 place = u64(number & 1) * kRanks * u32(capacity) + at;
        const uint2 mine = x[at];
        u64 own_inbox = 0;
#pragma unroll
        for (int r = 0; r < kRanks; ++r) {
            send((uint4*)inboxes[r] + place + u64(u32(rank)) * u32(capacity),
                 make_uint4(mine.x, number, mine.y, number));
            own_inbox = r == rank ? inboxes[r] : own_inbox;
        }
        uint2 all[kRanks];
        if (!receive(all, (const uint4*)own_inbox + place, u32(capacity), number, seconds)) {
            state[2] = 1;
        }
        if constexpr (Config::gathers) {
#pragma unroll
            for (int r = 0; r < kRanks; ++r) {
                y[gathered_place(at, u32(r), u32(row_lines))] = all[r];
            }
        } else {
            y[at] = sum_of(all);
        }
    }
    __syncthreads();
    if (threadIdx.x == 0 && atomicAdd(state + 1, 1) == gridDim.x - 1) {  // all blocks have read the number
        state[1] = 0;
        *state = number_after(number);
    }
}
