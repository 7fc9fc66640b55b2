// From the words of a tile to the A operands of mma.m16n8k16, by look-ups in shared memory.
//
// A tile (see layout.py) is 16 rows x 64 columns; lane l owns 16 pairs of neighbouring codes in BITS words.
// Pair i = 4 * j + h is register h of the A operand of the j-th of its four k16 steps. The table holds, for
// every value of a byte of codes, the 16-bit levels as the operand wants them, once per lane: a copy lies in
// the banks of its lane alone, so no look-up conflicts with another. Rows have 256 bytes, so that one PRMT
// makes a look-up's address of the byte and the lane.
//
//   bits  a byte   look-ups a tile
//   2     4 codes  8 of 8 bytes
//   3     2 codes  16 of 4 bytes; the byte's top bits do not matter
//   4     2 codes  16 of 4 bytes
//   5     2 codes without bit 4, 16 of 4 bytes; the signs come behind
//
// 5 bits: the table has pairs of negative levels, and an XOR turns those of positive codes, since codebooks
// are mostly symmetric around 0. For others (Config::any_codebook) a row has the levels of all four signs of
// a pair, which are a part of the address; of each there are eight copies, and lanes that share one often
// meet.
//
// At 3 to 5 bits half of every row is free: see kHoles.
//
// Method: the pair table is FLUTE's (Guo et al. 2024); a copy per bank with 256-byte rows, so that one PRMT
// makes the address, decodes 45 weights a clock and SM on an H200 against 18 for a single copy.
#pragma once

#include "common.cuh"
#include "config.h"

// Config::ue4m3, where a configuration names it: NVFP4. Every 16 columns of a row have a ue4m3 scale, where
// otherwise every 32 have one in E4M4.
template <class CONFIG, class = void>
struct Naming {
    static constexpr bool ue4m3 = false;
};
template <class CONFIG>
struct Naming<CONFIG, decltype(void(CONFIG::ue4m3))> : CONFIG {};
constexpr bool kUe4m3 = Naming<Config>::ue4m3;

// Config::any_codebook, likewise: 5 bits, and levels that need not be symmetric around 0.
template <class CONFIG, class = void>
constexpr bool kNamesAnyCodebook = false;
template <class CONFIG>
constexpr bool kNamesAnyCodebook<CONFIG, decltype(void(CONFIG::any_codebook))> = true;
constexpr bool kAnyCodebook = kNamesAnyCodebook<Config>;

template <bool UE4M3, bool BF16>
struct Scales;

template <int BITS, bool BF16>
struct Decoder {
    static constexpr int kScalesAt = 128 * BITS;  // in a tile
    static constexpr int kTileBytes = kScalesAt + (kUe4m3 ? 64 : 32);
    static constexpr bool kSigned = BITS == 5;
    static constexpr int kCodeBits = kSigned ? 4 : BITS;  // of a code in a byte
    static constexpr int kRows = 256, kRowBytes = 256, kTableBytes = kRows * kRowBytes;
    static constexpr int kCopyBytes = BITS == 2 ? 8 : 4;  // of one lane
    static constexpr bool kHoles = BITS > 2;              // the last kHole bytes of every row are free
    static constexpr int kHole = 128;
    static_assert(kSigned || !kAnyCodebook);

    const u8* table;
    u32 lane_byte;
    u32 low = 0, high = 0;  // 2 bits, if `filled` made this: the bytes of the four levels

    DEVICE Decoder(const u8* table_, int lane)
        : table(table_), lane_byte(opaque(kAnyCodebook ? lane % 8 * 0x0404 : lane * kCopyBytes)) {}

    // Where byte `at` of the holes, taken together, is from the table's start.
    static DEVICE u32 hole(u32 at) { return 2 * at - at % kHole + kHole; }

    // The level that a lane contributes to `fill`; loaded early, since it takes longer than the filling.
    // SCALED: Scales::scale will take it, and wants its unit.
    template <bool SCALED = true>
    static DEVICE float level(const float* codebook, int lane) {
        using H = Half<BF16>;
        const float value = __ldg(codebook + lane % (1 << BITS));
        return SCALED ? H::widen(H::narrow(value)) * Scales<kUe4m3, BF16>::kLevelUnit : value;
    }

    // Thread `thread` of `threads`, whole warps, fills its part; a barrier must follow.
    static DEVICE void fill(u8* table, float level, u32 thread, u32 threads) {
        using H = Half<BF16>;
        constexpr int kParts = 4;  // threads of a row, each with the levels of two signs
        constexpr int kStores = 32 * kCopyBytes / 16 / kParts;
        constexpr u32 kMask = (1 << kCodeBits) - 1;
#pragma unroll 2
        for (u32 i = thread; i < u32(kRows * kParts); i += threads) {
            const u32 row = i % kRows, part = i / kRows;
            const auto of = [&](int code, bool positive = false) {
                const u32 magnitude = row >> (kCodeBits * code) & kMask;
                return __shfl_sync(~0u, level, positive ? magnitude ^ 31 : magnitude);
            };
            uint4 v;
            if constexpr (BITS == 2) {  // the first codes of two pairs, then their second ones
                v.x = H::pack(of(0), of(2));
                v.y = H::pack(of(1), of(3));
            } else if constexpr (kSigned) {
                v.x = v.y = H::pack(of(0, kAnyCodebook && part / 2), of(1, kAnyCodebook && part % 2));
            } else {
                v.x = v.y = H::pack(of(0), of(1));
            }
            v.z = v.x;
            v.w = v.y;
#pragma unroll
            for (int j = 0; j < kStores; ++j) {  // rotated: lanes of a warp write to different banks
                const u32 turned = (part * kStores + j + i) % (kParts * kStores);
                const u32 chunk = kAnyCodebook ? part * kStores + (j + i) % kStores : turned;
                *reinterpret_cast<uint4*>(table + row * kRowBytes + chunk * 16) = v;
            }
        }
    }

    // This lane's words of the tile at a shared address.
    static DEVICE void load(u32 (&w)[BITS], u32 tile, int lane) {
        if constexpr (BITS <= 3) {
            const uint2 v = load_shared2(tile + lane * 8);
            w[0] = v.x;
            w[1] = v.y;
        } else {
            const uint4 v = load_shared4(tile + lane * 16);
            w[0] = v.x;
            w[1] = v.y;
            w[2] = v.z;
            w[3] = v.w;
        }
        if constexpr (BITS % 2) {
            w[BITS - 1] = load_shared(tile + 128 * (BITS - 1) + lane * 4);
        }
    }

    // A word of each of `load`'s loads; see after_loads.
    static DEVICE u32 loaded(const u32 (&w)[BITS]) { return BITS % 2 ? w[0] | w[BITS - 1] : w[0]; }

    DEVICE u32 look_up(u32 offset) const { return *reinterpret_cast<const u32*>(table + offset); }

    // 5 bits, any codebook: the low bytes of the addresses of pairs SHIFT + 8 and, above it, SHIFT.
    template <int SHIFT>
    DEVICE u32 low_bytes(u32 signs) const {
        const u32 first = SHIFT ? signs << (SHIFT - 1) : signs >> 1, second = signs >> (18 - SHIFT);
        return (first & 0x4040u) | (second & 0x2020u) | lane_byte;
    }

    // 3 bits: the pairs of step 3, a byte each, from the top two bits of the others' bytes.
    static DEVICE u32 last_four(const u32 (&w)[BITS]) {
        constexpr u32 kTop = 0xc0c0c0c0u;
        const u32 two = (w[1] & kTop) | (w[0] >> 2 & ~kTop),
                  three = (w[2 % BITS] & kTop) | (two >> 2 & ~kTop);
        return three >> 2;
    }

    // After the barrier that follows `fill`; with what step<J, true> wants.
    static DEVICE Decoder filled(const u8* table, int lane) {
        Decoder decode(table, lane);
        if constexpr (BITS == 2) {
#pragma unroll
            for (int code = 0; code < 4; ++code) {
                const u32 level = decode.look_up(code * kRowBytes + decode.lane_byte);  // in the low half
                decode.low |= (level & 255u) << (8 * code);
                decode.high |= (level >> 8 & 255u) << (8 * code);
            }
        }
        return decode;
    }

    // The A operand of k16 step J. REGISTERS, 2 bits, J = 0 or 2: not from shared memory but by PRMT, whose
    // selectors are codes in nibbles.
    template <int J, bool REGISTERS = false>
    DEVICE void step(const u32 (&w)[BITS], u32 (&a)[4]) const {
        if constexpr (REGISTERS) {
            static_assert(BITS == 2 && J % 2 == 0);
#pragma unroll
            for (int h = 0; h < 2; ++h) {  // pairs h and h + 2: the first and the third nibble pair
                const u32 codes = w[J / 2] >> (2 * h) & 0x33333333u;
                const u32 lows = permute(low, high, codes), highs = permute(high, low, codes);
                a[h] = permute(lows, highs, 0x5140);
                a[h + 2] = permute(lows, highs, 0x7362);
            }
            return;
        }
        if constexpr (kSigned) {
            const u32 signs = w[BITS - 1];
            static_for<4>([&](auto h) {
                constexpr int kPair = 4 * J + h.value, kPick = h.value << 4;
                if constexpr (kAnyCodebook) {
                    const u32 low_byte = low_bytes<kPair % 8>(signs);
                    a[h.value] = look_up(permute(w[J], low_byte, (kPair < 8 ? 0x7705 : 0x7704) | kPick));
                } else {
                    const u32 negative = look_up(permute(w[J], lane_byte, 0x7704 | kPick));
                    a[h.value] = negative ^ (signs << kPair & 0x80008000u);
                }
            });
        } else if constexpr (BITS == 3 || BITS == 4) {
            const u32 word = BITS == 4 || J < 3 ? w[J % BITS] : last_four(w);
#pragma unroll
            for (int h = 0; h < 4; ++h) {
                a[h] = look_up(permute(word, lane_byte, 0x7704 | (h << 4)));
            }
        } else if constexpr (BITS == 2) {
#pragma unroll
            for (int h = 0; h < 2; ++h) {
                const u32 offset = permute(w[J / 2], lane_byte, 0x7704 | ((J % 2 * 2 + h) << 4));
                const uint2 v = *reinterpret_cast<const uint2*>(table + offset);
                a[2 * h] = v.x;
                a[2 * h + 1] = v.y;
            }
        }
    }
};

// The scales of rows g and g + 8 of a tile, as lane 4g + t reads them from scales_at + kBytes * g.
//
// `scale` multiplies the A operand of k16 step STEP by them. A byte shifted into place is a 16-bit number, of
// its value in a unit that is a power of 2. Levels, at most 1, are exact in the inverse unit, kLevelUnit:
// products are rounded as those of levels and values are.

// E4M4: bytes (row g, block 0), (row g, block 1), (row g + 8, block 0), (row g + 8, block 1). A byte shifted
// left by 6 is a float16 of 1/16 of its value, subnormals included.
template <bool BF16>
struct Scales<false, BF16> {
    static constexpr int kBytes = 4;
    static constexpr int kSteps = 2;  // k16 steps of a block
    static constexpr float kUnit = 16.0f, kLevelUnit = BF16 ? 0x1p116f : 16.0f;
    typedef u32 Words;

    static DEVICE Words load(u32 address) { return load_shared(address); }
    static DEVICE u32 loaded(Words words) { return words; }

    // Low half: row g, high half: row g + 8, of one block, as float16 in units of 16.
    template <int BLOCK>
    static DEVICE u32 halves(u32 word) {
        return (BLOCK == 0 ? word << 6 : word >> 2) & 0x3fc03fc0u;
    }
    template <int BLOCK, int LOWER>
    static DEVICE float value(Words words) {
        return LOWER ? high_half(halves<BLOCK>(words)) : low_half(halves<BLOCK>(words));
    }
    template <int STEP>
    static DEVICE void scale(u32 (&a)[4], Words words) {
        const u32 rows = BF16 ? (STEP < 2 ? words << 3 : words >> 5) & 0x07f807f8u : halves<STEP / 2>(words);
#pragma unroll
        for (int h = 0; h < 4; h += 2) {
            a[h] = Half<BF16>::template multiply_by_half<0>(a[h], rows);
            a[h + 1] = Half<BF16>::template multiply_by_half<1>(a[h + 1], rows);
        }
    }
};

// ue4m3: the bytes of row g's four blocks, a k16 step each, then those of row g + 8. A byte without its top
// bit, shifted left by 7, is a float16 of 2^-8 times its value, by 4 a bfloat16 of 2^-120 times it,
// subnormals included. A product of level and scale has 6 significant bits in 2^-10 .. 2688 and is exact in
// both.
template <bool BF16>
struct Scales<true, BF16> {
    static constexpr int kBytes = 8;
    static constexpr int kSteps = 1;
    static constexpr float kUnit = 256.0f;  // of value()
    static constexpr float kLevelUnit = BF16 ? 0x1p120f : 256.0f;
    typedef uint2 Words;

    static DEVICE Words load(u32 address) { return load_shared2(address); }
    static DEVICE u32 loaded(Words words) { return words.x; }
    // Steps STEP % 2 and STEP % 2 + 2, low and high half.
    template <int STEP, int LOWER, bool WIDE>
    static DEVICE u32 two(Words words) {
        const u32 word = LOWER ? words.y : words.x;
        if constexpr (WIDE) {
            return (STEP % 2 ? word >> 4 : word << 4) & 0x07f007f0u;
        } else {
            return (STEP % 2 ? word >> 1 : word << 7) & 0x3f803f80u;
        }
    }
    template <int STEP>
    static DEVICE void scale(u32 (&a)[4], Words words) {
        const u32 upper = two<STEP, 0, BF16>(words), lower = two<STEP, 1, BF16>(words);
#pragma unroll
        for (int h = 0; h < 4; ++h) {
            a[h] = Half<BF16>::template multiply_by_half<STEP / 2>(a[h], h % 2 ? lower : upper);
        }
    }
    template <int BLOCK, int LOWER>
    static DEVICE float value(Words words) {
        const u32 both = two<BLOCK, LOWER, false>(words);
        return BLOCK < 2 ? low_half(both) : high_half(both);
    }
};
