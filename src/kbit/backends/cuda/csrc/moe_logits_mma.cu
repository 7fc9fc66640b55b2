// A router's logits for more tokens than those of moe_logits.cu, by tensor cores: its arguments, and
// `tokens`. Weights are of x's dtype.
//
// A block has 16 experts, the rows of A, and 8 tokens, the columns of B. Its warps take turns at chunks of 32
// columns, of which a lane loads 16 bytes of a row of each: the four lanes of a row have the columns in the
// same order in A and in B, so that nothing is swapped. All of 2048 columns are in flight at once, to shared
// memory, where a lane finds its own again: loads to registers ptxas put in front of their MMAs. The weight
// is fetched to L2 before the kernel in front is done, as there. Order of sums: MMAs of a warp by k, then
// warps ascending.
//
// grid: x experts / 16, y tokens / 8; shared memory: kAtOnce * 3 pieces of each thread
#include "moe_logits.cuh"

using H = Half<Config::bf16>;
constexpr int kThreads = Config::warps * 32, kExperts = 16, kTokens = 8;
constexpr int kChunk = 4;                 // pieces of 16 bytes
constexpr int kAtOnce = Config::at_once;  // chunks of a warp
constexpr int kSums = kExperts * kTokens;
static_assert(kSums <= kThreads);

extern "C" __global__ void __launch_bounds__(kThreads)
    moe_logits_mma(const uint4* x, const uint4* weight, const uint4* last, u8* logits, int experts,
                   int pieces, int tokens) {
    extern __shared__ __align__(16) u8 memory[];
    launch_early();
    const int at = int(threadIdx.x), lane = at & 31, warp = at >> 5, g = lane >> 2, t = lane & 3;
    const int first_expert = int(blockIdx.x) * kExperts, first_token = int(blockIdx.y) * kTokens;
    const RouterRows rows{weight, last, experts, pieces};
    for (int line = at; line < (pieces + kLine - 1) / kLine * kExperts; line += kThreads) {
        prefetch(rows.of(first_expert + line % kExperts) + line / kExperts * kLine);
    }
    const uint4 *upper = rows.of(first_expert + g), *lower = rows.of(first_expert + g + 8);
    wait_for_previous();
    launch_late();
    forget(x, upper, lower);
    const uint4* const mine = x + u64(min(first_token + g, tokens - 1)) * pieces;
    const u32 staged = shared_address(memory) + at * 16;
    const auto stage = [&](int i, const uint4* row, int piece) {
        stage16_if(staged + i * kThreads * 16, row + (piece < pieces ? piece : 0), piece < pieces);
    };
    float sums[4] = {};
    for (int first = warp * kChunk + t; first - t < pieces; first += kAtOnce * Config::warps * kChunk) {
#pragma unroll
        for (int i = 0; i < kAtOnce; ++i) {
            const int piece = first + i * Config::warps * kChunk;
            stage(3 * i, upper, piece);
            stage(3 * i + 1, lower, piece);
            stage(3 * i + 2, mine, piece);
        }
        asm volatile("cp.async.wait_all;" ::: "memory");
#pragma unroll
        for (int i = 0; i < kAtOnce; ++i) {
            const uint4 a = load_shared4(staged + 3 * i * kThreads * 16);
            const uint4 b = load_shared4(staged + (3 * i + 1) * kThreads * 16);
            const uint4 c = load_shared4(staged + (3 * i + 2) * kThreads * 16);
            const u32 even[4] = {a.x, b.x, a.y, b.y}, odd[4] = {a.z, b.z, a.w, b.w};
            H::mma(sums, even, c.x, c.y);
            H::mma(sums, odd, c.z, c.w);
        }
    }
    float* const parts = reinterpret_cast<float*>(memory);
    __syncthreads();  // all have read what they staged
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        parts[warp * kSums + i * 32 + lane] = sums[i];
    }
    __syncthreads();
    if (at >= kSums) {
        return;
    }
    float sum = 0.0f;
#pragma unroll
    for (int i = 0; i < Config::warps; ++i) {
        sum += parts[i * kSums + at];
    }
    const int expert = first_expert + g + at / 64 * 8, token = first_token + 2 * t + at / 32 % 2;
    if (expert < experts && token < tokens) {
        store_logit(logits, u64(token) * experts + expert, sum);
    }
}
