// The gated RMS norm behind the gated delta rule of a prompt: of every token and head of values,
// y = norm * x / sqrt(mean(x^2) + eps) * silu(gate), rounded as in gated_delta.cu.
//
//   x          16-bit [rows, 128], rows = tokens * k_heads * heads, 16-byte aligned as the others
//   projected  16-bit [tokens, k_heads * (2 + 2 * heads) * 128], rows `row_pieces` pieces of 16 bytes apart:
//              with Config::by_heads each head's last columns are its gates, otherwise the last of all are
//   norm       16-bit [128]; y 16-bit [rows, 128]
//
// 16 lanes have a row. Order of the sum of squares: a lane's 8 columns, then lanes by halves.
//
// grid: ceil(rows * 16 / blockDim.x)
#include "gated_delta.cuh"
#include "heads.cuh"

constexpr int kHeads = Config::heads, kLanes = 16, kRow = (2 + 2 * kHeads) * kLanes;

extern "C" __global__ void __launch_bounds__(256)
    gated_delta_output(const uint4* x, const uint4* projected, const uint4* norm, uint4* y, u64 rows,
                       u64 row_pieces, int k_heads, float eps) {
    follow_previous(x, projected, norm);
    const u64 row = (u64(blockIdx.x) * blockDim.x + threadIdx.x) / kLanes;
    const int lane = threadIdx.x % kLanes;
    const bool there = row < rows;
    const u64 of_keys = row / kHeads, token = of_keys / u32(k_heads);
    const u32 k_head = u32(of_keys % u32(k_heads)), head = u32(row % kHeads);
    const u64 first = Config::by_heads ? k_head * kRow + (2 + kHeads + head) * kLanes
                                       : ((2 + kHeads) * u32(k_heads) + k_head * kHeads + head) * kLanes;
    const u64 gate_at = token * row_pieces + first + lane;
    const uint4 mine = there ? x[row * kLanes + lane] : uint4{}, gate = there ? projected[gate_at] : uint4{};
    const uint4 weight = norm[lane];
    const float mean = sum_lanes(add_squares(0.0f, mine), kLanes) / float(8 * kLanes);
    float of_x[8], of_gate[8], of_norm[8];
    widen(of_x, mine);
    widen(of_gate, gate);
    widen(of_norm, weight);
#pragma unroll
    for (int i = 0; i < 8; ++i) {
        of_x[i] = opened(of_x[i], mean, eps, of_norm[i], of_gate[i]);
    }
    if (there) {
        y[row * kLanes + lane] = D::piece(of_x);
    }
}
