// Rows `rows` of codes and scales, copied in the widest words that their rows allow.
//
//   codes, scales          uint8 [any, code_bytes], [any, scale_bytes]
//   rows                   int32 [count]
//   codes_out, scales_out  uint8 [count, ...]
//   code_shift             log2 of the bytes of a word of codes, 3 or 4; scale_shift 0 .. 4 for scales.
//                          Pointers are multiples of a word.
//   count * words of a row < 2^32
//
// Neighbouring threads write neighbouring words: a thread per row would spread a warp's stores over 32 rows.
#include "nvfp4.cuh"

template <class WORD>
DEVICE void copy_rows(const u8* from, u8* to, const int* rows, u32 count, u32 words) {
    for (u32 i = blockIdx.x * blockDim.x + threadIdx.x; i < count * words; i += gridDim.x * blockDim.x) {
        const u32 row = i / words, word = i - row * words;
        reinterpret_cast<WORD*>(to)[i] = reinterpret_cast<const WORD*>(from)[i64(rows[row]) * words + word];
    }
}

DEVICE void copy_rows(const u8* from, u8* to, const int* rows, u32 count, u32 bytes, int shift) {
    const u32 words = bytes >> shift;
    if (shift == 4) {
        copy_rows<uint4>(from, to, rows, count, words);
    } else if (shift == 3) {
        copy_rows<uint2>(from, to, rows, count, words);
    } else if (shift == 2) {
        copy_rows<u32>(from, to, rows, count, words);
    } else if (shift == 1) {
        copy_rows<u16>(from, to, rows, count, words);
    } else {
        copy_rows<u8>(from, to, rows, count, words);
    }
}

extern "C" __global__ void __launch_bounds__(256)
    nvfp4_gather(const u8* codes, const u8* scales, const int* rows, u8* codes_out, u8* scales_out, u32 count,
                 u32 code_bytes, u32 scale_bytes, int code_shift, int scale_shift) {
    follow_previous(codes, scales, rows);
    copy_rows(codes, codes_out, rows, count, code_bytes, code_shift);
    copy_rows(scales, scales_out, rows, count, scale_bytes, scale_shift);
}
