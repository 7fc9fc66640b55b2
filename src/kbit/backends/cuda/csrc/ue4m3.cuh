// Scales of NVFP4, as bytes.
#pragma once

#include "common.cuh"

// Four ue4m3 bytes with 0x7F, which means 0, replaced by 0.
DEVICE u32 clean_scales(u32 bytes) {
    const u32 bad = ((bytes & 0x7f7f7f7fu) + 0x01010101u) & 0x80808080u;
    return bytes & 0x7f7f7f7fu & ~(bad - (bad >> 7));
}
