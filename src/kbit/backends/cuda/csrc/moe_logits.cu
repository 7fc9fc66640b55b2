// A router's logits for few tokens: logits[t, e] = sum over k of x[t, k] * weight[e, k], in float32, rounded
// once at the end.
//
//   x, weight  float16, or bfloat16 with Config::bf16: [tokens, columns] and [experts, columns], rows of
//              whole 16-byte pieces; the weight float32 with Config::wide_weight
//   last       null, or one more expert's row: the gate of a shared one. It counts in `experts`
//   logits     [tokens, experts], of their dtype, or float32 with Config::wide
//
// A warp has an expert and a token, a lane every 32nd piece of their rows, kAtOnce of which it has copied to
// shared memory at once: of loads to registers the compiler had two in flight. The weight is fetched to L2
// before the kernel in front is done, and no further: a router's weight may be what that kernel writes. Order
// of sums: a lane's by k, then lanes by halves.
//
// grid: x experts / Config::warps, y tokens
#include "moe_logits.cuh"

constexpr int kThreads = Config::warps * 32;
constexpr int kAtOnce = 8;  // pieces in flight, of x and of the weight: 2048 columns

extern "C" __global__ void __launch_bounds__(kThreads)
    moe_logits(const uint4* x, const uint4* weight, const uint4* last, u8* logits, int experts, int pieces) {
    constexpr int kEach = 1 + kOfWeight, kStride = kThreads * 16;  // pieces staged for one of x
    __shared__ uint4 staged[kEach * kAtOnce * kThreads];
    launch_early();
    const int lane = threadIdx.x & 31, expert = blockIdx.x * Config::warps + (threadIdx.x >> 5);
    const int token = blockIdx.y;
    const u32 mine = shared_address(staged) + threadIdx.x * 16;
    const uint4* row = RouterRows{weight, last, experts, pieces}.of(expert);
    for (int line = lane; line < (pieces * kOfWeight + kLine - 1) / kLine; line += 32) {
        prefetch(row + line * kLine);
    }
    wait_for_previous();
    launch_late();
    forget(x, row);
    x += u64(token) * pieces;
    float sum = 0.0f;
    for (int first = lane; first < pieces; first += kAtOnce * 32) {
#pragma unroll
        for (int i = 0; i < kAtOnce; ++i) {
            const int piece = first + i * 32;
            const bool there = piece < pieces;
            const u32 at = mine + i * kEach * kStride;
            stage16_if(at, x + (there ? piece : 0), there);
            stage_weight(at + kStride, kStride, row, piece, there);
        }
        asm volatile("cp.async.wait_all;" ::: "memory");
#pragma unroll
        for (int i = 0; i < kAtOnce; ++i) {
            const u32 at = mine + i * kEach * kStride;
            sum = add_products(sum, load_shared4(at), at + kStride, kStride);
        }
    }
    sum = warp_sum(sum);
    if (lane == 0 && expert < experts) {
        store_logit(logits, u64(token) * experts + expert, sum);
    }
}
