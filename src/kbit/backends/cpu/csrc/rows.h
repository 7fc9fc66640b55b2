// Walking the packed rows of a matrix with the instruction set's decoder (decode_*.h comes first).
#pragma once

namespace kbit {
namespace {

inline int64_t round_up(int64_t value, int64_t multiple) {
    return (value + multiple - 1) / multiple * multiple;
}

template <bool VALUE>
struct Constant {
    static constexpr bool value = VALUE;
};

// Calls f with the decoder for this weight's width and arithmetic: bfloat16 levels may have a cheaper one.
template <class F>
inline void with_decoder(const Weight& w, F f) {
    const auto pick = [&](auto wide) {
        constexpr bool WIDE = decltype(wide)::value;
        switch (w.bits) {
            case 2:
                return f(DecoderFor<2, WIDE>(w.table));
            case 3:
                return f(DecoderFor<3, WIDE>(w.table));
            case 4:
                return f(DecoderFor<4, WIDE>(w.table));
            default:
                return f(DecoderFor<5, WIDE>(w.table));
        }
    };
    w.arithmetic == DType::kBFloat16 ? pick(Constant<!kHasNarrowTables>()) : pick(Constant<true>());
}

// Calls f(group, bytes) for blocks [first, first + count) of a row, D::kBlocks at a time; `first` is a
// multiple of that. A last, partial group runs into the next row, whose codes meet scales and activations of
// zero; at the end of the matrix it is read from a padded copy. (Copying always costs 25 ns a row: 0.6 ms for
// SmolLM2's lm_head.) Bytes `ahead` of those being read are fetched into cache.
template <class D, class F>
inline __attribute__((always_inline)) void for_each_group(const Weight& w, int64_t row, int64_t first,
                                                          int64_t count, int64_t ahead, F f) {
    const int64_t block_bytes = 4 * w.bits;
    const uint8_t* p = w.packed + (row * w.blocks + first) * block_bytes;
    const int64_t whole = count / D::kBlocks;
    for (int64_t g = 0; g < whole; ++g) {
        __builtin_prefetch(p + g * D::kBytes + ahead);
        f(g, p + g * D::kBytes);
    }
    const int64_t rest = count % D::kBlocks;
    if (rest == 0) {
        return;
    }
    const uint8_t* last = p + whole * D::kBytes;
    if (w.packed + w.n * w.blocks * block_bytes - last >= D::kBytes) {
        f(whole, last);
        return;
    }
    alignas(64) uint8_t copy[D::kBytes] = {};
    memcpy(copy, last, size_t(rest * block_bytes));
    f(whole, static_cast<const uint8_t*>(copy));
}

// Weights of blocks [first, first + count) of a row as float32(table[code] * scale * tensor_scale), handed to
// emit(group, vectors) in decoded order. `scales` has room for count rounded up to D::kBlocks.
template <class D, class F>
inline __attribute__((always_inline)) void scaled_groups(const Weight& w, const D& decode, int64_t row,
                                                         int64_t first, int64_t count, float* scales,
                                                         int64_t ahead, F emit) {
    constexpr int kVecs = D::kUnits * D::kUnitVecs;
    decode_scales(w, row, first, count, round_up(count, D::kBlocks), scales);
    for_each_group<D>(w, row, first, count, ahead,
                      [&](int64_t g, const uint8_t* p) __attribute__((always_inline)) {
                          Vec v[kVecs];
                          decode(p, v);
#pragma GCC unroll 8
                          for (int u = 0; u < D::kUnits; ++u) {
                              const Vec scale = D::unit_scale(scales + g * D::kBlocks, u);
#pragma GCC unroll 8
                              for (int i = 0; i < D::kUnitVecs; ++i) {
                                  v[u * D::kUnitVecs + i] = v[u * D::kUnitVecs + i] * scale;
                              }
                          }
                          // Kept apart from the block scale: the reference multiplies left to right, and
                          // products may be subnormal.
                          if (w.tensor_scale != 1.0f) {
                              for (int i = 0; i < kVecs; ++i) {
                                  v[i] = v[i] * splat(w.tensor_scale);
                              }
                          }
                          emit(g, static_cast<const Vec*>(v));
                      });
}

}  // namespace
}  // namespace kbit
