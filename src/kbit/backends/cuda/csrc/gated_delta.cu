// A token's step of gated delta linear attention, between the projections: convolution over the last tokens,
// gates, the recurrence of every head's state, and the gated RMS norm. dim = 128 columns of keys and values;
// a head of keys has Config::heads heads of values (1 to 4). Of a token's projections, 16-bit:
//
//   projected  [batch, k_heads, dim query, dim key, heads * dim value, heads * dim gate], rows `row` apart
//   gates      [batch, k_heads, heads beta, heads alpha], rows `gates_row` apart
//
// with Config::by_heads, and otherwise
//
//   projected  [batch, channels, v_heads * dim gate]
//   gates      [batch, v_heads beta, v_heads alpha]
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
// rounded to 16 bits where transformers' modules round. As products of S are linear, k S and q S of the old
// state are summed together, and the rest follows from them and q k:
//
//   change = (v - decay k S) * beta; o = decay q S + q k * change; S = S * decay + k (x) change
//
// Columns of a state do not meet before the mean of o^2, so Config::blocks blocks, a cluster, take a head of
// keys: each has Config::columns columns of a head of values, computes queries and keys anew, and sends its
// part of the mean to the others. Or one block takes it all (below sm_90, where there are no clusters).
//
// A warp keeps some rows of a state in registers, a lane 4 columns. Order of sums: a thread's rows ascending,
// then lanes by halves, then warps ascending; lengths and means by lanes by halves, then groups of 32 columns
// ascending. What all this reads is fetched to L2 while the kernel before still runs, which may write it.
//
// grid: batch * k_heads * Config::blocks blocks
// Method: Yang et al. 2024 (arXiv:2412.06464).
#include "gated_delta.cuh"
#include "hopper.cuh"

constexpr bool kByHeads = Config::by_heads;
constexpr int kHeads = Config::heads, kTaps = Config::taps, kDim = 128;
constexpr int kColumns = Config::columns, kBlocks = Config::blocks;  // of a block; of a head of keys
constexpr bool kCluster = kBlocks > 1;
constexpr int kUnits = kCluster ? 1 : kHeads, kPeers = kDim / kColumns;  // heads of a block; blocks of a head
constexpr int kWarps = Config::warps, kThreads = kUnits * kWarps * 32;   // of each; of a block
constexpr int kLanes = kColumns / 4, kTogether = 32 / kLanes;  // of a row; rows that a warp takes at once
constexpr int kRows = kDim / kWarps / kTogether, kGroups = kDim / 32;      // of a thread; of columns
constexpr int kProjected = (2 + 2 * kHeads) * kDim, kShared = 2 * kDim;    // queries and keys
constexpr int kValues = kUnits * kColumns, kChannels = kShared + kValues;  // of a block
static_assert(kTaps == 4 && kDim + kValues <= kThreads && kBlocks == (kCluster ? kHeads * kPeers : 1));

DEVICE float add_four(const float* of) {
    return ((of[0] + of[1]) + of[2]) + of[3];
}
DEVICE float4 from_lane(float4 v, int distance) {
    return {__shfl_xor_sync(kAll, v.x, distance), __shfl_xor_sync(kAll, v.y, distance),
            __shfl_xor_sync(kAll, v.z, distance), __shfl_xor_sync(kAll, v.w, distance)};
}

// A channel's convolution over its last tokens.
struct Convolution {
    const u16* token_at;
    uint2* window_at;
    const uint2* taps_at;
    uint2 window, weights;
    u16 token;

    // projected: where it is among a head's projections; channel: in windows.
    DEVICE Convolution(const u16* of_head, uint2* windows, const uint2* taps, int projected, int channel)
        : token_at(of_head + projected), window_at(windows + channel), taps_at(taps + channel) {}
    DEVICE void load() {
        forget(token_at, window_at, taps_at);
        window = *window_at;
        weights = *taps_at;
        token = *token_at;
    }
    // The window with the token in it.
    DEVICE uint2 next() const { return {window.x >> 16 | window.y << 16, window.y >> 16 | u32(token) << 16}; }
    DEVICE float value() const {
        const uint2 now = next();
        float sum = 0.0f;
        sum = __fmaf_rn(H::widen(u16(now.x)), H::widen(u16(weights.x)), sum);
        sum = __fmaf_rn(H::widen(u16(now.x >> 16)), H::widen(u16(weights.x >> 16)), sum);
        sum = __fmaf_rn(H::widen(u16(now.y)), H::widen(u16(weights.y)), sum);
        sum = __fmaf_rn(H::widen(u16(now.y >> 16)), H::widen(u16(weights.y >> 16)), sum);
        return activated(sum);
    }
    DEVICE void shift() const { *window_at = next(); }
};

// A warp's sums over its rows go to parts [unit][key, query][warp][lane of a row].
DEVICE void store_parts(float4* parts, float4 of_key, float4 of_query, int unit, int warp, int lane) {
    float4* const to = parts + (unit * 2 * kWarps + warp % kWarps) * kLanes + lane % kLanes;
    if constexpr (kTogether == 1) {
        to[0] = of_key;
        to[kWarps * kLanes] = of_query;
        return;
    }
    const bool upper = lane & 16;  // these lanes go on with the query's
    float4 sum = upper ? of_query : of_key;
    add_scaled(sum, from_lane(upper ? of_key : of_query, 16), 1.0f);
#pragma unroll
    for (int step = 8; step >= kLanes; step /= 2) {
        add_scaled(sum, from_lane(sum, step), 1.0f);
    }
    if (lane % 16 < kLanes) {
        to[upper ? kWarps * kLanes : 0] = sum;
    }
}
// The sum of a column over a head's warps.
DEVICE float add_warps(const float* parts) {
    float sum = parts[0];
#pragma unroll
    for (int i = 1; i < kWarps; ++i) {
        sum += parts[i * kColumns];
    }
    return sum;
}
DEVICE float4 add_warps(const float4* parts) {
    float4 sum = parts[0];
#pragma unroll
    for (int i = 1; i < kWarps; ++i) {
        add_scaled(sum, parts[i * kLanes], 1.0f);
    }
    return sum;
}

extern "C" __global__ void __launch_bounds__(kThreads)
    gated_delta(const u16* projected, const u16* gates, uint2* window, float* state, const uint2* taps,
                const void* log_decay, const void* bias, const u16* norm, u16* y, u64 row, u64 gates_row,
                int k_heads, int wide, float eps) {
    __shared__ alignas(16) float channels[kChannels];  // queries, keys, values
    __shared__ float products[3 * kGroups];            // q q, k k, q k, of 32 columns each
    __shared__ float factors[2 * kUnits];              // decay and beta of heads
    __shared__ alignas(16) float parts[2 * kUnits * kWarps * kColumns];
    __shared__ alignas(8) float squares[2 * kHeads * kGroups];  // every other one
    __shared__ u64 arrived;
    launch_early();
    const int rank = kCluster ? int(cluster_rank()) : 0, head_of_keys = int(blockIdx.x) / kBlocks;
    const int batch = head_of_keys / k_heads, k_head = head_of_keys % k_heads;
    const int at = int(threadIdx.x), lane = at & 31, warp = at >> 5, unit = warp / kWarps;
    const int head = kCluster ? rank / kPeers : unit, first_column = kCluster ? rank % kPeers * kColumns : 0;
    const int first_row = warp % kWarps * kRows * kTogether + lane / kLanes;
    const int first_value = kCluster ? head * kDim + first_column : 0;  // of a block's
    float4* const rows =
        reinterpret_cast<float4*>(state + (i64(head_of_keys) * kHeads + head) * kDim * kDim + first_column) +
        first_row * (kDim / 4) + lane % kLanes;
    const u16* const mine = projected + i64(batch) * i64(row) + (kByHeads ? i64(k_head) * kProjected : 0);
    uint2* const windows = window + i64(batch) * (2 + kHeads) * k_heads * kDim;
    const int value = first_value + at - kDim;  // of the threads behind those of keys
    const bool has_key = at < kDim, has_value = !has_key && at < kDim + kValues;
    const int channel = (k_heads + k_head) * kDim + at;
    const int other_channel = has_key ? k_head * kDim + at : (2 * k_heads + k_head * kHeads) * kDim + value;
    Convolution key(mine, windows, taps, kByHeads ? kDim + at : channel, channel);
    Convolution other(mine, windows, taps,  // a query, or a value
                      !kByHeads ? other_channel
                      : has_key ? at
                                : kShared + value,
                      other_channel);
    if (kCluster && at == 0) {
        barrier_init(shared_address(&arrived), 1);
        barriers_visible();
    }
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
        if (lane % 8 == 0) {
            prefetch(rows + i * kTogether * (kDim / 4));
        }
    }
    if (lane % 16 == 0 && (has_key || has_value)) {
        prefetch(other.window_at);
        prefetch(other.taps_at);
    }
    if (lane % 16 == 0 && has_key) {
        prefetch(key.window_at);
        prefetch(key.taps_at);
    }
    wait_for_previous();
    launch_late();
    forget(gates, log_decay, bias, norm);

    if (has_key || has_value) {
        other.load();
    }
    if (has_key) {
        key.load();
    }
    float4 s[kRows];
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
        s[i] = rows[i * kTogether * (kDim / 4)];
    }
    const bool finishes = at < kValues;  // a column of a head
    const int finished = first_value + at;
    const int first_gate =
        kByHeads ? kShared + kHeads * kDim : (2 + kHeads) * k_heads * kDim + k_head * kHeads * kDim;
    const u16 gate = finishes ? mine[first_gate + finished] : u16(0);
    const u16 weight = finishes ? norm[finished % kDim] : u16(0);
    if (warp == kUnits * kWarps - 1 && lane < kUnits) {
        const int of = kCluster ? head : lane, kind = wide ? 0 : Config::bf16 ? 2 : 1;
        const int first = k_head * (kByHeads ? 2 : 1) * kHeads,
                  between = kByHeads ? kHeads : k_heads * kHeads;
        const u16* const of_head = gates + i64(batch) * i64(gates_row) + first + of;
        factors[2 * lane] =
            expf(log_of_decay(H::widen(of_head[between]), log_decay, bias, k_head * kHeads + of, kind));
        factors[2 * lane + 1] = rounded(sigmoid(H::widen(of_head[0])));
    }
    if (has_key) {
        const float q = other.value(), k = key.value();
        channels[at] = q;
        channels[kDim + at] = k;
        const float qq = warp_sum(q * q), kk = warp_sum(k * k), qk = warp_sum(q * k);
        if (lane == 0) {
            products[warp] = qq;
            products[kGroups + warp] = kk;
            products[2 * kGroups + warp] = qk;
        }
    } else if (has_value) {
        channels[kDim + at] = other.value();
        other.shift();
    }
    if constexpr (kCluster) {
        cluster_arrive();  // and has read what all blocks read
    }
    __syncthreads();
    if (kCluster && at == 0) {
        barrier_expect(shared_address(&arrived), kGroups * 8);
    }

    float4 of_key = {}, of_query = {};
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
        add_scaled(of_key, s[i], channels[kDim + first_row + i * kTogether]);
        add_scaled(of_query, s[i], channels[first_row + i * kTogether]);
    }
    store_parts(reinterpret_cast<float4*>(parts), of_key, of_query, unit, warp, lane);
    const float query_scale = rsqrtf(add_four(products) + 1e-6f) * rsqrtf(float(kDim));
    const float key_scale = rsqrtf(add_four(products + kGroups) + 1e-6f);
    __syncthreads();
    if constexpr (kCluster) {
        cluster_wait();
    }
    float out = 0.0f;
    if (finishes) {
        const int of = at / kColumns;
        const float* const sums = parts + of * 2 * kWarps * kColumns + at % kColumns;
        const float decay = factors[2 * of], beta = factors[2 * of + 1];
        const float change =
            (channels[kShared + at] - decay * key_scale * add_warps(sums)) * beta * key_scale;
        out = decay * add_warps(sums + kWarps * kColumns) + add_four(products + 2 * kGroups) * change;
        out = rounded(query_scale * out);
        const float square = warp_sum(out * out);
        const int group = finished / 32;
        if (kCluster && lane < kPeers) {
            const u32 peer = head * kPeers + lane;
            store_cluster(cluster_address(shared_address(squares + 2 * group), peer),
                          uint2{__float_as_uint(square), 0}, cluster_address(shared_address(&arrived), peer));
        } else if (!kCluster && lane == 0) {
            squares[2 * group] = square;
        }
    }
    const float decay = factors[2 * unit], beta = factors[2 * unit + 1];
    float4 change = reinterpret_cast<const float4*>(channels + kShared)[unit * kLanes + lane % kLanes];
    add_scaled(change,
               add_warps(reinterpret_cast<const float4*>(parts) + unit * 2 * kWarps * kLanes + lane % kLanes),
               -decay * key_scale);
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
        const float factor = channels[kDim + first_row + i * kTogether] * key_scale * beta;
        s[i] = {s[i].x * decay, s[i].y * decay, s[i].z * decay, s[i].w * decay};
        add_scaled(s[i], change, factor);
        rows[i * kTogether * (kDim / 4)] = s[i];
    }
    if (has_key && rank == 0) {  // all have read them
        key.shift();
        other.shift();
    }
    if constexpr (!kCluster) {
        __syncthreads();
    }
    if (finishes) {
        if (kCluster) {
            barrier_wait(shared_address(&arrived), 0);
        }
        const float* const of = squares + finished / kDim * 2 * kGroups;
        const float mean = ((of[0] + of[2]) + of[4] + of[6]) / float(kDim);
        y[i64(head_of_keys) * kHeads * kDim + finished] =
            H::narrow(opened(out, mean, eps, H::widen(weight), H::widen(gate)));
    }
}
