// Levels as look-up tables of bytes, for instruction sets that look up 16 bytes at a time.
#pragma once

#include "convert.h"

namespace kbit {
namespace {

// One table of 16 levels for every byte of their float32 values from `first` on: two of them for 32 levels
// (5 bits), or for the low and the high two bits of a nibble (2 bits). `as_table` makes a vector of 16 bytes.
template <int BITS, int TABLES, class Table, class AsTable>
inline void fill_tables(const float* levels, int first, Table (&tables)[TABLES][4], AsTable as_table) {
    for (int t = 0; t < TABLES; ++t) {
        for (int byte = first; byte < 4; ++byte) {
            alignas(16) uint8_t column[16];
            for (int i = 0; i < 16; ++i) {
                const int level = BITS == 2 ? (t == 0 ? i & 3 : i >> 2) : 16 * t + i;
                column[i] = uint8_t(bits_of(levels[level]) >> (8 * byte));
            }
            tables[t][byte] = as_table(column);
        }
    }
}

}  // namespace
}  // namespace kbit
