// A token's step of gated delta linear attention, between the projections: convolution over the last tokens,
// gates, the recurrence of every head's state, and the gated RMS norm. dim = 128 columns of keys and values;
// a head of keys has Config::heads heads of values (1 or 2). Of a token's projections, 16-bit:
//
//   projected  [batch, k_heads, dim query, dim key, heads * dim value, heads * dim gate], rows `row` apart
//   gates      [batch, k_heads, heads beta, heads alpha], rows `gates_row` apart
//
// In place, of channels [all queries, all keys, all values]:
//
//   window     16-bit [batch, channels, taps]: the last tokens' projections, the newest last
//   state      float32 [batch, v_heads, dim, dim], keys' columns first
//
// Weights: taps 16-bit [channels, taps]; log_decay, bias [v_heads] (float32 if wide, else 16-bit); norm
// 16-bit [dim]. y 16-bit [batch, v_heads, dim]. v_heads = k_heads * heads.
//
//   q, k, v = silu(sum over taps of window * weight), q and k divided by their lengths, q by sqrt(dim)
//   beta = sigmoid(beta), decay = exp(-exp(log_decay) * softplus(alpha + bias))
//   S = S * decay; S += k (x) ((v - k S) * beta); o = q S; y = norm * o / sqrt(mean(o^2) + eps) * silu(gate)
//
// rounded to 16 bits where transformers' modules round. A block has a head of keys and its heads of values,
// 16 warps each; a warp keeps 8 rows of a state in registers, a lane 4 columns. Order of sums: a thread's
// rows ascending, then warps ascending; lengths and means by columns of a lane, then lanes by halves, then
// warps.
//
// grid: batch * k_heads blocks of heads * 512 threads
// Method: Yang et al. 2024 (arXiv:2412.06464).
#include "config.h"
#include "rows.cuh"

constexpr int kHeads = Config::heads, kTaps = Config::taps, kDim = 128;
constexpr int kWarps = 16, kRows = kDim / kWarps;  // of a head of values; of its state in a warp
constexpr int kProjected = (2 + 2 * kHeads) * kDim, kChannels = (2 + kHeads) * kDim;
using H = Half<Config::bf16>;

DEVICE float rounded(float value) {
    return H::widen(H::narrow(value));
}
DEVICE float silu(float value) {
    return __fdiv_rn(value, 1.0f + expf(-value));
}
DEVICE float softplus(float value) {
    return value > 20.0f ? value : log1pf(expf(value));
}

// silu of the convolution at the block's channel `at`, whose window takes the token in.
DEVICE float convolved(const u16* projected, const u16* taps, u16* window, int k_heads, int k_head, int at) {
    const int part = at / kDim < 2 ? at / kDim : 2, within = at - part * kDim;
    const int channel = part * k_heads * kDim + k_head * (part < 2 ? kDim : kHeads * kDim) + within;
    u16* const mine = window + i64(channel) * kTaps;
    const u16* const weight = taps + i64(channel) * kTaps;
    const u16 token = projected[at];
    float sum = 0.0f;
#pragma unroll
    for (int i = 0; i < kTaps; ++i) {
        const u16 next = i + 1 < kTaps ? mine[i + 1] : token;
        sum = __fmaf_rn(H::widen(next), H::widen(weight[i]), sum);
        mine[i] = next;
    }
    return rounded(silu(rounded(sum)));
}

// Column `column` of a head's sums, of which each of its warps has a part.
DEVICE float add_parts(const float* parts, int head, int column) {
    float sum = 0.0f;
#pragma unroll
    for (int i = 0; i < kWarps; ++i) {
        sum += parts[(head * kWarps + i) * kDim + column];
    }
    return sum;
}

extern "C" __global__ void __launch_bounds__(kHeads * kWarps * 32)
    gated_delta(const u16* projected, const u16* gates, u16* window, float* state, const u16* taps,
                const void* log_decay, const void* bias, const u16* norm, u16* y, u64 row, u64 gates_row,
                int k_heads, int wide, float eps) {
    __shared__ float channels[kChannels];
    __shared__ float lengths[2];
    __shared__ alignas(16) float parts[kHeads * kWarps * kDim];
    __shared__ alignas(16) float changes[kHeads * kDim];
    __shared__ float squares[kHeads * 4];
    follow_previous(projected, gates, window, state, taps, log_decay, bias, norm);
    const int batch = int(blockIdx.x) / k_heads, k_head = int(blockIdx.x) % k_heads, at = int(threadIdx.x);
    const int lane = at & 31, warp = at >> 5, head = warp / kWarps, first = warp % kWarps * kRows;
    const int v_heads = k_heads * kHeads, v_head = k_head * kHeads + head;
    float4* const rows = reinterpret_cast<float4*>(state) +
                         ((i64(batch) * v_heads + v_head) * kDim + first) * (kDim / 4) + lane;
    float4 s[kRows];
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
        s[i] = rows[i * (kDim / 4)];
    }
    const u16* const mine = projected + i64(batch) * i64(row) + i64(k_head) * kProjected;
    if (at < kChannels) {
        u16* const windows = window + i64(batch) * (2 + kHeads) * k_heads * kDim * kTaps;
        channels[at] = convolved(mine, taps, windows, k_heads, k_head, at);
    }
    const u16* const gate = gates + i64(batch) * i64(gates_row) + k_head * 2 * kHeads + head;
    const int kind = wide ? 0 : Config::bf16 ? 2 : 1;
    const float beta = rounded(__fdiv_rn(1.0f, 1.0f + expf(-H::widen(gate[0]))));
    const float alpha = H::widen(gate[kHeads]) + load_widened(bias, v_head, kind);
    const float decay = expf(-expf(load_widened(log_decay, v_head, kind)) * softplus(alpha));
    __syncthreads();
    if (warp < 2) {
        float sum = 0.0f;
#pragma unroll
        for (int i = 0; i < kDim / 32; ++i) {
            const float value = channels[warp * kDim + i * 32 + lane];
            sum = __fmaf_rn(value, value, sum);
        }
        const float inverse = __fdiv_rn(1.0f, __fsqrt_rn(warp_sum(sum) + 1e-6f));
        if (lane == 0) {
            lengths[warp] = warp ? inverse : __fdiv_rn(inverse, __fsqrt_rn(float(kDim)));
        }
    }
    __syncthreads();

    float4* const part = reinterpret_cast<float4*>(parts) + warp * (kDim / 4) + lane;
    float4 sum = {0.0f, 0.0f, 0.0f, 0.0f};
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
        const float key = channels[kDim + first + i] * lengths[1];
        s[i] = {s[i].x * decay, s[i].y * decay, s[i].z * decay, s[i].w * decay};
        sum = {sum.x + s[i].x * key, sum.y + s[i].y * key, sum.z + s[i].z * key, sum.w + s[i].w * key};
    }
    *part = sum;
    __syncthreads();
    const bool adds = at < kHeads * kDim;  // a column of a head; `beta` is that of the thread's own head
    const int of_head = adds ? at / kDim : 0, column = at % kDim;
    if (adds) {
        changes[at] = channels[2 * kDim + at] - add_parts(parts, of_head, column);
    }
    __syncthreads();
    float4 change = reinterpret_cast<const float4*>(changes)[head * (kDim / 4) + lane];
    change = {change.x * beta, change.y * beta, change.z * beta, change.w * beta};
    sum = {0.0f, 0.0f, 0.0f, 0.0f};
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
        const float key = channels[kDim + first + i] * lengths[1], query = channels[first + i] * lengths[0];
        s[i] = {s[i].x + key * change.x, s[i].y + key * change.y, s[i].z + key * change.z,
                s[i].w + key * change.w};
        rows[i * (kDim / 4)] = s[i];
        sum = {sum.x + s[i].x * query, sum.y + s[i].y * query, sum.z + s[i].z * query,
               sum.w + s[i].w * query};
    }
    *part = sum;
    __syncthreads();
    float out = 0.0f;
    if (adds) {
        out = rounded(add_parts(parts, of_head, column));
        const float square = warp_sum(out * out);
        if (lane == 0) {
            squares[warp] = square;
        }
    }
    __syncthreads();
    if (adds) {
        const float* const of = squares + of_head * 4;
        const float mean = __fdiv_rn(((of[0] + of[1]) + of[2]) + of[3], float(kDim));
        const float factor = __fdiv_rn(1.0f, __fsqrt_rn(mean + eps));
        const float normed = rounded(H::widen(norm[column]) * rounded(out * factor));
        y[(i64(batch) * v_heads + k_head * kHeads) * kDim + at] =
            H::narrow(normed * silu(H::widen(mine[kChannels + at])));
    }
}
