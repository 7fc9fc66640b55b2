// How activations and weights reach the warps of nvfp4_exact.cu; its header tells the plan.
#pragma once

#include "config.h"
#include "nvfp4_decode.cuh"
#include "ring.cuh"

constexpr int kTokens = Config::tokens, kStages = Config::stages;
constexpr int kTiles = kTokens < 8 ? 1 : kTokens / 8;   // of columns of B
constexpr int kBeside = kTokens < 8 ? 8 / kTokens : 1;  // sub-blocks in a tile
constexpr int kSlots = Config::slots;
constexpr bool kExperts = Config::experts;
static_assert(!kExperts || kTokens == 1);
constexpr int kStepTiles = 4, kStepColumns = 64 * kStepTiles, kSubBlocks = 4 * kStepTiles;
constexpr int kScalesAt = 512, kTileBytes = 576, kStageBytes = kStepTiles * kTileBytes;
// A step of activations: operands [sub-block][token][4 lanes], integers of scales [sub-block][token].
constexpr int kOperandBytes = kSubBlocks * kTokens * 16;
constexpr int kSlotBytes = kOperandBytes + kSubBlocks * kTokens * 4;
constexpr int kPieces = kTokens * 8;  // of 32 columns of a token, in a step
constexpr int kRowBytes = 256, kTableBytes = 128 * kRowBytes, kBarrierBytes = 1024;
constexpr int kMostWarps = 16;
static_assert(8 * kMostWarps * kStages <= kBarrierBytes && 8 * kMostWarps * 2 * kSlots <= kBarrierBytes);
constexpr int kSums = 4 * kTiles;  // of a lane
static_assert(kSums * 256 <= kStages * kStageBytes);

// 512 times every scale, once for each lane, 256 bytes apart: a byte and a lane make an address in one PRMT.
// And the values of codes.
struct Table {
    const u8* memory;
    u32 lane_byte;
    CodeBytes bytes;

    DEVICE Table(const u8* memory_, int lane) : memory(memory_), lane_byte(opaque(u32(lane * 4))) {}
    static DEVICE void fill(u32 base, int thread, int threads) {
        for (int i = thread; i < 128 * 8; i += threads) {
            const u32 byte = u32(i) / 8, exponent = byte >> 3, mantissa = byte & 7u;
            const u32 value = byte == 0x7fu ? 0 : exponent ? (mantissa | 8u) << (exponent - 1) : mantissa;
            store_shared4(base + byte * kRowBytes + i % 8 * 16, make_uint4(value, value, value, value));
        }
    }
    // Of byte `byte`, whose top bit is 0.
    DEVICE int at(u32 bytes, int byte) const {
        return *reinterpret_cast<const int*>(memory + permute(bytes, lane_byte, u32(0x7704 | byte << 4)));
    }
};

struct Problem {
    const u8 *a_codes, *a_scales;
    int columns, first, end;  // rows first .. end - 1 of A
};

// 32 columns of a token of A, raw. Piece `at` of a step is of token at % kTokens.
struct Piece {
    uint4 codes;
    u32 scales;

    DEVICE void load(const Problem& p, int step, int at) {
        const int row = p.first + at % kTokens, column = step * kStepColumns + at / kTokens * 32;
        codes = make_uint4(0, 0, 0, 0);
        scales = 0;
        if (row < p.end && column < p.columns) {
            const i64 from = i64(row) * p.columns + column;
            codes = __ldg(reinterpret_cast<const uint4*>(p.a_codes + from / 2));
            scales = __ldg(reinterpret_cast<const u16*>(p.a_scales + from / 16));
        }
    }
    // The codes of a sub-block, as lanes t = 0 .. 3 of a token need them: two bytes each, 4 apart.
    static DEVICE uint4 operands(const CodeBytes& bytes, u32 low, u32 high) {
        return make_uint4(bytes.of(permute(low, high, 0x40)), bytes.of(permute(low, high, 0x51)),
                          bytes.of(permute(low, high, 0x62)), bytes.of(permute(low, high, 0x73)));
    }
    DEVICE void decode(const Table& table, u32 slot, int at) const {
        const int token = at % kTokens, sub = at / kTokens * 2;
        const u32 to = slot + (sub * kTokens + token) * 16, clean = scales & 0x7f7fu;
        store_shared4(to, operands(table.bytes, codes.x, codes.y));
        store_shared4(to + kTokens * 16, operands(table.bytes, codes.z, codes.w));
        const u32 factor = slot + kOperandBytes + (sub * kTokens + token) * 4;
        put_shared(factor, u32(table.at(clean, 0)));
        put_shared(factor + kTokens * 4, u32(table.at(clean, 1)));
    }
};

// What a team's warps share: its steps of K, its slots of activations.
struct Team {
    u32 slots, full, empty;  // slots, and kSlots barriers each
    int begin, end;          // steps

    DEVICE u32 slot(int i) const { return slots + i % kSlots * kSlotBytes; }
    DEVICE u32 full_at(int i) const { return full + i % kSlots * 8; }
    DEVICE u32 empty_at(int i) const { return empty + i % kSlots * 8; }
    // Of the i-th step: the first ones are filled without barriers.
    DEVICE static u32 phase(int i) { return u32(i / kSlots - 1) & 1u; }

    // Pieces `first`, first + by, ..., COUNT of them, of all steps' up to `limit`: loaded together.
    template <int COUNT, class F>
    DEVICE void decode(const Problem& p, const Table& table, int first, int by, int limit, F wait) const {
        Piece pieces[COUNT];
#pragma unroll
        for (int c = 0; c < COUNT; ++c) {
            const int i = min(first + c * by, limit - 1);
            pieces[c].load(p, begin + i / kPieces, i % kPieces);
        }
        wait();
#pragma unroll
        for (int c = 0; c < COUNT; ++c) {
            const int i = first + c * by;
            if (i < limit) {
                pieces[c].decode(table, slot(i / kPieces), i % kPieces);
            }
        }
    }
    // The first steps, by all threads of the team.
    DEVICE void begin_with(const Problem& p, const Table& table, int thread, int threads) const {
        const int limit = min(kSlots, end - begin) * kPieces;
        for (int first = thread; first < limit; first += 4 * threads) {
            decode<4>(p, table, first, threads, limit, [] {});
        }
    }
    // The others, by a warp.
    DEVICE void produce(const Problem& p, const Table& table, int lane) const {
        constexpr int kAtOnce = kPieces < 64 ? 1 : kPieces / 32 < 4 ? kPieces / 32 : 4;
        for (int i = kSlots; i < end - begin; ++i) {
#pragma unroll 1
            for (int first = 0; first < kPieces; first += 32 * kAtOnce) {
                decode<kAtOnce>(p, table, i * kPieces + first + lane, 32, (i + 1) * kPieces, [&] {
                    if (first == 0) {
                        barrier_wait(empty_at(i), phase(i));
                    }
                });
            }
            warp_arrive(full_at(i), lane);
        }
    }
};

// A step's weights of a warp, in registers.
struct Packed {
    uint4 codes[kStepTiles];
    uint2 scales[kStepTiles];

    DEVICE Packed(u32 stage, int lane) {
#pragma unroll
        for (int i = 0; i < kStepTiles; ++i) {
            codes[i] = load_shared4(stage + i * kTileBytes + lane * 16);
            scales[i] = load_shared2(stage + i * kTileBytes + kScalesAt + lane / 4 * 8);
        }
    }
    // See after_loads.
    DEVICE u32 loaded() const {
        u32 all = 0;
#pragma unroll
        for (int i = 0; i < kStepTiles; ++i) {
            all |= codes[i].x | scales[i].x;
        }
        return all;
    }
    // Of a sub-block: two codes of row g, two of row g + 8, two of row g, two of row g + 8.
    DEVICE u32 word(int sub) const {
        const uint4& v = codes[sub / 4];
        return sub % 4 == 0 ? v.x : sub % 4 == 1 ? v.y : sub % 4 == 2 ? v.z : v.w;
    }
    // Of a tile, or the one behind it: the bytes of row g and of row g + 8, without the bit no scale has.
    DEVICE uint2 scales_of(int tile, bool behind = false) const {
        const uint2 v = behind ? scales[(tile + 1) % kStepTiles] : scales[tile];
        return {v.x & 0x7f7f7f7fu, v.y & 0x7f7f7f7fu};
    }
};

// A warp's weights of a row tile, kStages steps in flight.
struct Ring {
    const u8* from;  // of step 0
    u32 base, barriers;
    int k_tiles, lane;

    DEVICE void init() const { ring_init<kStages>(barriers, lane); }
    // Into the place of the i-th step of the team's. Tiles that K lacks stay what they were and meet zeros.
    DEVICE void fetch(const Team& team, int i, u32 shift) const {
        const int step = team.begin + i, tiles = min(kStepTiles, k_tiles - step * kStepTiles);
        const int s = i % kStages;
        if (step < team.end) {
            copy<1>({base + s * kStageBytes + shift}, {from + i64(step) * kStageBytes}, tiles * kTileBytes,
                    barriers + 8 * s, lane);
        }
    }
    DEVICE u32 wait(int i) const {
        barrier_wait(barriers + 8 * (i % kStages), i / kStages & 1);
        return base + i % kStages * kStageBytes;
    }
};
