// What the gated delta rule takes of a prompt, from its tokens' projections: queries, keys and values,
// convolved over the last tokens of their channels and activated; beta and the logarithm of each head's
// decay. Layout of projections and gates, channels and rounding as in gated_delta.cu.
//
//   projected  16-bit [batch, tokens, k_heads * (2 + 2 * heads) * 128], tokens `row` pieces of 16 bytes apart
//   gates      16-bit [batch, tokens, k_heads * 2 * heads], tokens `gates_row` elements apart
//   window     null, or 16-bit [batch, channels, taps]: projections of the tokens before, the newest last
//   taps       16-bit [channels, taps]; log_decay, bias [v_heads], float32 if wide, else 16-bit
//   query, key  16-bit [batch, tokens, k_heads, 128], divided by their lengths; value [.., v_heads, 128]
//   beta       16-bit [batch, tokens, v_heads]; decay float32, likewise
//   last       16-bit [batch, channels, min(tokens, taps)]: the last tokens' projections
//   count      null, or [batch]: how many tokens of a sequence are there, from its first. Those behind have a
//              beta and a decay of 0, and `last` ends in front of them
//
// A thread has 8 neighbouring channels of kTokens tokens, and reads each once but for the first of the next
// thread; kAtOnce of them are in flight. 16 lanes have a head's query or key. Blocks behind these have the
// gates, a thread one head of a token. Order of squares: a thread's channels, then lanes by halves.
//
// grid: ceil(batch * ceil(tokens / kTokens) * pieces / threads), pieces = k_heads * (2 + heads) * 16, and
// ceil(batch * tokens * v_heads / threads); threads = blockDim.x
// Method: Yang et al. 2024 (arXiv:2412.06464).
#include "gated_delta.cuh"
#include "heads.cuh"

constexpr bool kByHeads = Config::by_heads;
constexpr int kHeads = Config::heads, kTaps = Config::taps, kTokens = Config::tokens, kDim = 128;
constexpr int kAtOnce = 4, kPieces = (2 + kHeads) * kDim / 8, kRow = (2 + 2 * kHeads) * kDim / 8;
static_assert(kTaps == 4 && kTokens % kAtOnce == 0);

DEVICE float channel_of(uint4 piece, int i) {
    const u32 words[4] = {piece.x, piece.y, piece.z, piece.w};
    return D::get(words, i);
}

// 8 channels of a token: their convolutions over the tokens before it, oldest first, and itself; the sum of
// their squares.
DEVICE uint4 convolved(const uint4 (&before)[kTaps - 1], uint4 now, const float (&taps)[8][kTaps],
                       float& squares) {
    float y[8];
    squares = 0.0f;
#pragma unroll
    for (int i = 0; i < 8; ++i) {
        float sum = 0.0f;
#pragma unroll
        for (int tap = 0; tap < kTaps - 1; ++tap) {
            sum = __fmaf_rn(channel_of(before[tap], i), taps[i][tap], sum);
        }
        y[i] = activated(__fmaf_rn(channel_of(now, i), taps[i][kTaps - 1], sum));
        squares = __fmaf_rn(y[i], y[i], squares);
    }
    return D::piece(y);
}

// Of queries or keys, 16 lanes of which have one: divided by its length.
DEVICE uint4 divided(uint4 piece, float squares) {
    const float factor = rsqrtf(squares + 1e-6f);
    float y[8];
    widen(y, piece);
#pragma unroll
    for (int i = 0; i < 8; ++i) {
        y[i] *= factor;
    }
    return D::piece(y);
}

// The same channels of one of the tokens before the first: `place` of a window.
DEVICE uint4 from_window(const u16* window, int place) {
    u16 v[8];
#pragma unroll
    for (int i = 0; i < 8; ++i) {
        v[i] = window[i * kTaps + place];
    }
    return {v[0] | u32(v[1]) << 16, v[2] | u32(v[3]) << 16, v[4] | u32(v[5]) << 16, v[6] | u32(v[7]) << 16};
}

// 8 channels of one of the last tokens, of which `kept` are kept.
DEVICE void store_last(u16* to, uint4 piece, int kept) {
    const u32 words[4] = {piece.x, piece.y, piece.z, piece.w};
#pragma unroll
    for (int i = 0; i < 8; ++i) {
        to[i * kept] = u16(words[i / 2] >> (i % 2 * 16));
    }
}

// How many of a sequence's tokens are there.
DEVICE int there_of(const i64* count, int sequence, int tokens) {
    return count ? int(min(max(count[sequence], i64(0)), i64(tokens))) : tokens;
}

DEVICE void compute_gates(const u16* gates, const void* log_decay, const void* bias, u16* beta, float* decay,
                          i64 at, int tokens, const i64* count, u64 gates_row, int k_heads, int wide) {
    const int v_heads = k_heads * kHeads, head = int(at % v_heads), kind = wide ? 0 : Config::bf16 ? 2 : 1;
    const int first = kByHeads ? head / kHeads * 2 * kHeads + head % kHeads : head;
    const i64 token = at / v_heads;
    const bool is_there = int(token % tokens) < there_of(count, int(token / tokens), tokens);
    const u16* const gate = gates + u64(token) * gates_row + first;
    beta[at] = H::narrow(is_there ? sigmoid(H::widen(gate[0])) : 0.0f);
    decay[at] = is_there
                    ? log_of_decay(H::widen(gate[kByHeads ? kHeads : v_heads]), log_decay, bias, head, kind)
                    : 0.0f;
}

extern "C" __global__ void __launch_bounds__(256)
    gated_delta_inputs(const uint4* projected, const u16* gates, const u16* window, const uint2* taps,
                       const void* log_decay, const void* bias, const i64* count, uint4* query, uint4* key,
                       uint4* value, u16* beta, float* decay, u16* last, u64 row, u64 gates_row, int batch,
                       int tokens, int k_heads, int wide, int blocks) {
    follow_previous(projected, gates, window);
    const int of_keys = k_heads * kDim, channels = (2 + kHeads) * of_keys, kept = min(tokens, kTaps);
    if (int(blockIdx.x) >= blocks) {
        const i64 at = i64(int(blockIdx.x) - blocks) * blockDim.x + threadIdx.x;
        if (at < i64(batch) * tokens * k_heads * kHeads) {
            compute_gates(gates, log_decay, bias, beta, decay, at, tokens, count, gates_row, k_heads, wide);
        }
        return;
    }
    const i64 at = i64(blockIdx.x) * blockDim.x + threadIdx.x;
    const int pieces = k_heads * kPieces, chunks = (tokens + kTokens - 1) / kTokens;
    const int piece = int(at % pieces), chunk = int(at / pieces % chunks);
    const bool is_there = at / pieces / chunks < batch;  // others go along: lanes exchange sums
    const int of_batch = is_there ? int(at / pieces / chunks) : 0;
    const int there = there_of(count, of_batch, tokens);
    const int k_head = piece / kPieces, column = piece % kPieces * 8;  // of a head of keys
    const bool is_value = column >= 2 * kDim;
    const int within = is_value ? column - 2 * kDim : column % kDim;
    const int channel = is_value ? 2 * of_keys + k_head * kHeads * kDim + within
                                 : column / kDim * of_keys + k_head * kDim + within;
    float weights[8][kTaps];
#pragma unroll
    for (int i = 0; i < 8; ++i) {
        const uint2 four = taps[channel + i];
        const u32 words[2] = {four.x, four.y};
#pragma unroll
        for (int tap = 0; tap < kTaps; ++tap) {
            weights[i][tap] = D::get(words, tap);
        }
    }
    const u64 in_row = kByHeads ? u64(k_head) * kRow + column / 8 : u64(channel / 8);
    const uint4* const of_token = projected + u64(of_batch) * tokens * row + in_row;
    const int first = chunk * kTokens, end = is_there ? min(first + kTokens, tokens) : first;
    const u16* const own_window = window + (u64(of_batch) * channels + channel) * kTaps;
    u16* const own_last = last + (u64(of_batch) * channels + channel) * kept;
    uint4 before[kTaps - 1];
#pragma unroll
    for (int i = 0; i < kTaps - 1; ++i) {
        const int token = first - (kTaps - 1) + i;
        before[i] = token >= 0 ? of_token[token * row]
                    : window   ? from_window(own_window, kTaps + token)
                               : uint4{};
    }
    for (int place = 0; is_there && first == 0 && place < kept - there; ++place) {
        store_last(own_last + place, window ? from_window(own_window, kTaps + there - kept + place) : uint4{},
                   kept);
    }
    uint4* const to = is_value ? value : column < kDim ? query : key;
    const int heads = is_value ? kHeads : 1, stop = first + min(kTokens, tokens);
#pragma unroll 1
    for (int token = first; token < stop; token += kAtOnce) {
        uint4 raw[kAtOnce], y[kAtOnce];
        float squares[kAtOnce];
#pragma unroll
        for (int i = 0; i < kAtOnce; ++i) {
            raw[i] = token + i < end ? of_token[(token + i) * row] : uint4{};
        }
#pragma unroll
        for (int i = 0; i < kAtOnce; ++i) {
            y[i] = convolved(before, raw[i], weights, squares[i]);
#pragma unroll
            for (int tap = 0; tap < kTaps - 2; ++tap) {
                before[tap] = before[tap + 1];
            }
            before[kTaps - 2] = raw[i];
        }
#pragma unroll
        for (int i = 0; i < 4 * kAtOnce; ++i) {
            squares[i % kAtOnce] += __shfl_xor_sync(kAll, squares[i % kAtOnce], 8 >> i / kAtOnce);
        }
#pragma unroll
        for (int i = 0; i < kAtOnce; ++i) {
            const int place = token + i - (there - kept);
            if (token + i < end) {
                const u64 row_of = (u64(of_batch) * tokens + token + i) * k_heads + k_head;
                to[(row_of * heads * kDim + within) / 8] = is_value ? y[i] : divided(y[i], squares[i]);
            }
            if (token + i < end && place >= 0 && place < kept) {
                store_last(own_last + place, raw[i], kept);
            }
        }
    }
}
