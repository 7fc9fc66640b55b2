// y[r, n] = sum_k x[r, k] * W[e, n, k] for rows r of experts e that have few of them each: decoding.
//
// Gated: W holds 2 * I rows, gates first; y[r, i] = silu(gate[r, i]) * up[r, i], shape [R, I], I % 16 == 0.
//
// Rows are sorted by expert (groups.cuh). An expert's are taken 1 << most_log at a time, at most
// Config::tokens (8 or 16), and its weight is read again for every such piece. wgmma.cu takes over where
// experts have more rows.
//
//   tiled     [experts, ceil(N/16), ceil(K/64)] tiles (layout.py), 16-byte aligned
//   codebook  float32 [2^bits]; scale float32 [experts]: the matrices' factors
//   x         16-bit [x_rows, x_stride], rows aligned to 16 bytes, zeros behind K up to a multiple of 8
//   offsets   int32 [experts + 1]
//   source    int32 [R], the row of x that a sorted row is; or null: the same
//   y         16-bit [R, N], or [R, N/2] if gated
//
// Memory-bound, as stream.cu, whose ring and look-ups it shares. There many warps split K, so that one matrix
// keeps the machine busy, and a warp adds up. Here are matrices enough: a warp takes two row tiles over all
// of K, and nothing is added up between warps. (stream.cu with teams of warps and lists of jobs took 50 us
// for 128 experts of 2048 x 512 on an H200, this took 24; and its dense case became slower by 15%.) Where
// matrices are few, a team of `span` warps splits K.
//
// Weights are on their way as soon as a block knows its share. Of 44 rows of 512 experts on an H100 that was
// 2.6 us after the previous kernel, 1.3 of them for the list, and the first were there at 4.5. If `settled`,
// the previous kernel is this one, and offsets were written before it: then all of that begins while it still
// runs, for the next kernel may start only when this one's offsets can be read.
//
// Order of float32 sums: k16 steps, a 32-block's times its scale, blocks ascending, then warps of a team.
//
// Shared memory: table, barriers of the rings, scratch, rings (warps * stages * 4 tiles), list of jobs, sums
// of teams, x of some jobs (in_holes: in what a table of 3 to 5 bits leaves free).
#include "grouped.cuh"

// A warp's columns of a unit. x: a lane's place in the first column tile, x_tile: the job's first, x_bytes:
// of a tile.
DEVICE void multiply_unit(float (&sums)[2][kColumns][4], const Problem& p, const D& decode, Ring& ring, u32 x,
                          u32 x_tile, u32 x_bytes, u32 zero, int lane) {
    for (int tile = ring.first_tile; tile < ring.end_tile; tile += kTiles) {
        const u32 stage = ring.wait();
        u32 w[kTiles][2][Config::bits], loaded = 0;
        S::Words scales[kTiles][2];
#pragma unroll
        for (int i = 0; i < kTiles; ++i) {
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                const u32 at = stage + half * kHalfBytes + i * D::kTileBytes;
                scales[i][half] = S::load(at + D::kScalesAt + lane / 4 * S::kBytes);
                D::load(w[i][half], at, lane);
                loaded |= S::loaded(scales[i][half]) | D::loaded(w[i][half]);
            }
        }
#pragma unroll
        for (int i = 0; i < kTiles; ++i) {
            // The tile that the last stage may lack holds old codes and scales, all of them finite.
            const bool there = i == 0 || tile + i < ring.end_tile;
            u32 b[kColumns][8];
            Staged::load(b, x + (x_tile + (there ? tile + i : tile)) * x_bytes);
            if (i == kTiles - 1) {
                ring.refill(p, loaded, zero);
            }
            if (i > 0 && !there) {
                break;
            }
            multiply_tile(sums, decode, w[i], scales[i], b);
        }
    }
}

struct Output {
    u16* y;

    DEVICE void store(const Problem& p, const Job& job, int unit, float factor,
                      const float (&sums)[2][kColumns][4], int lane) const {
        const int t = lane & 3, width = p.width(), row = p.upper(unit) * 16 + (lane >> 2);
#pragma unroll
        for (int n = 0; n < kColumns; ++n) {
#pragma unroll
            for (int i = 0; i < 2; ++i) {
                if (n * 8 + i >= job.tokens) {  // of no lane, as the odd ones of a single token
                    continue;
                }
                const int token = n * 8 + 2 * t + i;
                if (token >= job.tokens) {
                    continue;
                }
                u16* const to = y + u64(job.row + token) * width + row;
                const float v[4] = {sums[0][n][i] * factor, sums[0][n][i + 2] * factor,
                                    sums[1][n][i] * factor, sums[1][n][i + 2] * factor};
                if (p.gated) {
                    to[0] = H::narrow(silu_and_mul<Config::bf16>(v[0], v[2]));
                    to[8] = H::narrow(silu_and_mul<Config::bf16>(v[1], v[3]));
                    continue;
                }
#pragma unroll
                for (int j = 0; j < 4; ++j) {
                    if (row + 8 * j < width) {
                        to[8 * j] = H::narrow(v[j]);
                    }
                }
            }
        }
    }
};

// The sums of a team's warps, in their order, to its first. `parts`: of the team, [warp][sum / 4][lane][4].
DEVICE void add_up(const Problem& p, float (&sums)[2][kColumns][4], u32 parts, int team, int place,
                   int lane) {
    constexpr int kQuarters = kSums / 4;
    const auto at = [&](int other, int i) { return parts + ((other * kQuarters + i) * 32 + lane) * 16; };
    if (place > 0) {
#pragma unroll
        for (int i = 0; i < kQuarters; ++i) {
            store_shared4(at(place - 1, i), words_of(sums[i / kColumns][i % kColumns]));
        }
    }
    team_sync(team, p.span * 32);
    if (place == 0) {
#pragma unroll 4
        for (int other = 0; other < p.span - 1; ++other) {
#pragma unroll
            for (int i = 0; i < kQuarters; ++i) {
                add_shared(sums[i / kColumns][i % kColumns], at(other, i));
            }
        }
    }
    team_sync(team, p.span * 32);
}

// The block's jobs, `room` at most (only offsets that decrease could ask for more), and an end; returns their
// units. All threads; ends with a block barrier.
DEVICE int list_jobs(Job* jobs, int room, int& count, u32 scratch, const int* offsets, int experts, int rows,
                     const Problem& p, int most_log, const Divider& by_grid, const Divider& by_units) {
    BlockGroups groups;
    groups.find(scratch, offsets, experts, rows, PowerPieces{most_log});
    const int all = groups.all_pieces * p.units, each = by_grid(all), rest = all - each * by_grid.divisor;
    const int block = blockIdx.x, first = each * block + min(block, rest);
    int units = each + (block < rest);
    const int first_piece = by_units(first);
    count = units > 0 ? by_units(first + units - 1) - first_piece + 1 : 0;
    if (count > room) {
        count = room;
        units = (first_piece + room) * p.units - first;
    }
#pragma unroll
    for (int i = 0; i < groups.kShare; ++i) {
        const int pieces = PowerPieces{most_log}(groups.row[i], groups.end[i]), piece = groups.before[i];
        for (int j = max(0, first_piece - piece); j < min(pieces, first_piece + count - piece); ++j) {
            const int row = groups.row[i] + (j << most_log), begin = max(first, (piece + j) * p.units);
            jobs[piece + j - first_piece] = {groups.expert(i), row, min(1 << most_log, groups.end[i] - row),
                                             begin - (piece + j) * p.units, begin - first};
        }
    }
    if (threadIdx.x == 0) {
        jobs[count] = {0, 0, 0, 0, units};
    }
    __syncthreads();
    return units;
}

// Columns of B that a block's jobs need, 1, 2, 4 or 8, as a logarithm; of 16 tokens all. All lanes.
DEVICE int tokens_log(const Job* jobs, int count, int lane) {
    if (kTokens == 16) {
        return 4;
    }
    int most = 1;
    for (int i = lane; i < count; i += 32) {
        most = max(most, jobs[i].tokens);
    }
    most = __reduce_max_sync(~0u, u32(most));
    return most > 4 ? 3 : most > 2 ? 2 : most - 1;
}

extern "C" __global__ void __launch_bounds__(Config::warps * 32, Config::blocks)
    grouped(const u8* __restrict__ tiled, const float* __restrict__ codebook, const float* __restrict__ scale,
            const u16* x, u16* y, const int* offsets, const int* source, int n, int k, int rows, int x_stride,
            int x_rows, int experts, int gated, int most_log, int span, int x_at, int x_slots, int ring_at,
            int jobs_at, int parts_at, int settled) {
    extern __shared__ __align__(1024) u8 memory[];
    const int lane = threadIdx.x & 31, warp = uniform(threadIdx.x >> 5);
    const float level = D::level<kScaleWeights>(codebook, lane);
    const int team = warp / span, place = warp % span;
    const Problem p(n, k, gated != 0, span, kWarps / span);

    const u32 base = shared_address(memory);
    Job* const jobs = reinterpret_cast<Job*>(memory + jobs_at);
    Ring ring{tiled,
              base + ring_at + warp * kStages * kStageBytes,
              base + D::kTableBytes + warp * kStages * 8,
              lane,
              p.k_tiles * place / span,
              p.k_tiles * (place + 1) / span,
              {jobs, team}};
    ring.init();
    D::fill(memory, level, threadIdx.x, blockDim.x);
    __syncthreads();
    const Divider by_grid(gridDim.x), by_units(p.units);
    if (!settled) {
        wait_and_launch();
    }

    const u32 scratch = base + D::kTableBytes + kWarps * kStages * 8;
    int count;
    const int room = (parts_at - jobs_at) / int(sizeof(Job)) - 1;
    ring.count =
        list_jobs(jobs, room, count, scratch, offsets, experts, rows, p, most_log, by_grid, by_units);

    const D decode = D::filled(memory, lane);
    const Staged staged{{x, source, x_stride, x_rows}, tokens_log(jobs, count, lane)};
    const u32 x_bytes = staged.tile_bytes(), region = base + x_at;
    const u32 x_lane = region + staged.lane_place(lane);
    const int slots = x_slots >> staged.tokens_log;
    const Output out{y};
    const u32 zero = opaque(u32(n) >> 31);
    const u32 parts = base + parts_at + team * (span - 1) * kSums * 128;
    Place at{jobs, team};
    if (settled) {
        ring.start(p);
        wait_and_launch();
    }
    staged.ask(region, p, jobs, min(slots, count), warp, lane);
    if (!settled) {
        ring.start(p);  // behind the weights of the whole machine activations came 1.5 us later
    }
    for (int first = 0;;) {
        const int last = min(first + slots, count);
        wait_for_stage<0>();
        __syncthreads();
        for (; at.unit < jobs[last].begin; at.unit += p.teams) {
            at.settle();
            const int slot = int(at.job - jobs) - first;
            const float factor = factor_of(scale, at.job->expert);  // long before it is needed
            float sums[2][kColumns][4] = {};
            multiply_unit(sums, p, decode, ring, x_lane, slot * p.k_tiles, x_bytes, zero, lane);
            if (span > 1) {
                add_up(p, sums, parts, team, place, lane);
            }
            if (place == 0) {
                out.store(p, *at.job, at.weight_unit(), factor, sums, lane);
            }
        }
        if (last == count) {
            break;
        }
        __syncthreads();  // all have read what will be overwritten
        first = last;
        staged.ask(region, p, jobs + first, min(slots, count - first), warp, lane);
    }
    BlockGroups::owned(scratch).clear_others(y, rows, p.width(), threadIdx.x, blockDim.x);
}
