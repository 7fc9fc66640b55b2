// Quantizing rows to E4M4 scales and codes. Float32 throughout, no fused multiply-adds (-ffp-contract=off)
// and a fixed summation order, so that every instruction set writes the same bits as format/reference.py:
//
//   byte = E4M4(amax / tensor_scale); s = decode(byte) * tensor_scale; v = w / s (0 where s is 0)
//   code = number of midpoints below v
//   search: among neighbouring bytes the one with the least sum of (w - codebook[code] * s)^2, halved 16, 8,
//   4, 2, 1, where padding counts 0
//
// Written with the vector types of GCC and Clang at the width of the instruction set. Counting midpoints by
// compare-and-select beats a binary search through table permutes here: no step waits for the one before.
#pragma once

#include "scales.h"

namespace kbit {
namespace {

typedef int32_t Mask __attribute__((vector_size(sizeof(Vec))));
constexpr int kBlockVecs = kBlock / kLanes;

struct Block {
    alignas(64) float w[kBlock];
    int columns;  // that the row has; the rest is 0, and counts for no error
};

template <class T>
inline void load_block(const T* row, int64_t k, int64_t block, Block& out) {
    const int64_t first = block * kBlock, left = k - first;
    out.columns = int(left < kBlock ? left : kBlock);
    if (left >= kBlock) {
        for (int i = 0; i < kBlock; ++i) {
            out.w[i] = widen(row[first + i]);
        }
        return;
    }
    for (int i = 0; i < kBlock; ++i) {
        out.w[i] = i < left ? widen(row[first + i]) : 0.0f;
    }
}

// Magnitudes compare as integers; NaN and Inf are the largest.
inline uint32_t largest_magnitude(const Block& b) {
    uint32_t largest = 0;
    for (int i = 0; i < kBlock; ++i) {
        const uint32_t magnitude = bits_of(b.w[i]) & 0x7fffffffu;
        largest = magnitude > largest ? magnitude : largest;
    }
    return largest;
}

inline Measurement measure_row(const QuantizeJob& job, int64_t row) {
    uint32_t smallest = 0x7f800000u, largest = 0;
    int64_t nonfinite = 0;
    with_dtype(job.dtype, [&](auto sample) {
        const auto* src = static_cast<const decltype(sample)*>(job.w) + row * job.k;
        for (int64_t block = 0; block < job.blocks; ++block) {
            Block b;
            load_block(src, job.k, block, b);
            const uint32_t amax = largest_magnitude(b);
            largest = amax > largest ? amax : largest;
            smallest = amax != 0 && amax < smallest ? amax : smallest;
            if (amax >= 0x7f800000u) {
                for (float value : b.w) {
                    nonfinite += (bits_of(value) & 0x7fffffffu) >= 0x7f800000u;
                }
            }
        }
    });
    return {float_of(smallest), float_of(largest), nonfinite};
}

// Round to nearest even over all 256 values, saturating at 31. t >= 0.
inline int encode_e4m4(float t) {
    const uint32_t u = bits_of(t);
    if (t < 9.765625e-4f) {  // 2^-10: multiples of 2^-14, rounded by the adder at 2^23; 16 carries into e = 1
        return int(bits_of(t * 16384.0f + 8388608.0f) - bits_of(8388608.0f));
    }
    const uint32_t byte = ((u + 0x3ffffu + ((u >> 19) & 1u)) >> 19) - (116u << 4);
    return byte > 255u ? 255 : int(byte);
}

template <int BITS>
struct Quantizer {
    static constexpr int kLevels = 1 << BITS;

    explicit Quantizer(const QuantizeJob& job) {
        for (int i = 0; i < kLevels; ++i) {
            levels[i] = splat(job.codebook[i]);
            midpoints[i] = splat(i + 1 < kLevels ? job.midpoints[i] : 0.0f);
        }
    }

    static Vec normalized(const Block& b, int part, float s) {
        return s == 0.0f ? splat(0.0f) : load(b.w + part * kLanes) / splat(s);
    }

    float error(const Block& b, float s) const {
        Vec squares[kBlockVecs];
        for (int part = 0; part < kBlockVecs; ++part) {
            const Vec v = normalized(b, part, s);
            Vec level = levels[0];
#pragma GCC unroll 32
            for (int i = 0; i + 1 < kLevels; ++i) {
                level = v > midpoints[i] ? levels[i + 1] : level;
            }
            const Vec d = load(b.w + part * kLanes) - level * splat(s);
            squares[part] = d * d;
        }
        if (b.columns < kBlock) {
            alignas(64) float all[kBlock];
            memcpy(all, squares, sizeof all);
            for (int i = b.columns; i < kBlock; ++i) {
                all[i] = 0.0f;
            }
            memcpy(squares, all, sizeof all);
        }
        for (int half = kBlockVecs / 2; half > 0; half /= 2) {
            for (int part = 0; part < half; ++part) {
                squares[part] = squares[part] + squares[part + half];
            }
        }
        float t[kLanes];
        store(t, squares[0]);
        for (int half = kLanes / 2; half > 0; half /= 2) {
            for (int i = 0; i < half; ++i) {
                t[i] += t[i + half];
            }
        }
        return t[0];
    }

    void write_codes(const Block& b, float s, uint32_t* words) const {
        alignas(64) int32_t codes[kBlock];
        for (int part = 0; part < kBlockVecs; ++part) {
            const Vec v = normalized(b, part, s);
            Mask code = {};
#pragma GCC unroll 32
            for (int i = 0; i + 1 < kLevels; ++i) {
                code -= v > midpoints[i];
            }
            memcpy(codes + part * kLanes, &code, sizeof code);
        }
        uint8_t bytes[kBlock];
        for (int i = 0; i < kBlock; ++i) {
            bytes[i] = uint8_t(codes[i]);
        }
        for (int plane = 0; plane < BITS; ++plane) {
            uint32_t word = 0;
            for (int j = 0; j < 4; ++j) {  // the product moves bit 0 of byte i to bit 56 + i
                uint64_t eight;
                memcpy(&eight, bytes + 8 * j, 8);
                const uint64_t ones = eight >> plane & 0x0101010101010101u;
                word |= uint32_t(ones * 0x0102040810204080u >> 56) << (8 * j);
            }
            words[plane] = word;
        }
    }

    int search(const QuantizeJob& job, const Block& b, int plain) const {
        int best = plain;
        float least = error(b, decode_e4m4(uint32_t(plain)) * job.tensor_scale);
        for (int step = job.window_low; step <= job.window_high; ++step) {
            const int byte = plain + step;
            if (step == 0 || byte < 1 || byte > 255) {
                continue;
            }
            const float e = error(b, decode_e4m4(uint32_t(byte)) * job.tensor_scale);
            if (e < least) {
                least = e;
                best = byte;
            }
        }
        return best;
    }

    template <class T>
    void row(const QuantizeJob& job, const T* src, int64_t at) const {
        for (int64_t block = 0; block < job.blocks; ++block) {
            Block b;
            load_block(src, job.k, block, b);
            int byte = encode_e4m4(float_of(largest_magnitude(b)) / job.tensor_scale);
            if (job.search && byte != 0) {
                byte = search(job, b, byte);
            }
            job.absmax[at + block] = uint8_t(byte);
            write_codes(b, decode_e4m4(uint32_t(byte)) * job.tensor_scale, job.packed + (at + block) * BITS);
        }
    }

    Vec levels[kLevels], midpoints[kLevels];
};

template <int BITS>
void quantize_row_bits(const QuantizeJob& job, int64_t row) {
    const Quantizer<BITS> quantizer(job);
    with_dtype(job.dtype, [&](auto sample) {
        quantizer.row(job, static_cast<const decltype(sample)*>(job.w) + row * job.k, row * job.blocks);
    });
}

inline void quantize_row(const QuantizeJob& job, int64_t row) {
    switch (job.bits) {
        case 2:
            return quantize_row_bits<2>(job, row);
        case 3:
            return quantize_row_bits<3>(job, row);
        case 4:
            return quantize_row_bits<4>(job, row);
        default:
            return quantize_row_bits<5>(job, row);
    }
}

}  // namespace
}  // namespace kbit
