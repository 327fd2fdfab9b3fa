// FP4 E2M1: a sign, two bits of exponent and one of mantissa, two values a byte. Each of them is one of E4M3.
#pragma once

#include <dg/common/types.cuh>

namespace dg::e2m1 {

// The bytes of `low` (0 to 3) and `high` (4 to 7) that the four nibbles of the selector name, less their highest
// bits.
DG_HOST_DEVICE inline u32 permute(u32 low, u32 high, u32 selector) {
#if defined(__CUDA_ARCH__)
    return __byte_perm(low, high, selector);
#else
    const u64 bytes = static_cast<u64>(high) << 32 | low;
    u32 picked = 0;
    for (u32 i = 0; i < 4; ++i)
        picked |= static_cast<u32>(bytes >> (selector >> 4 * i & 7) * 8 & 0xff) << 8 * i;
    return picked;
#endif
}

// E4M3 bytes of the four codes in the low half of `codes`, the first of them in the lowest nibble. Looking the
// magnitudes up takes 13 operations for eight values.
DG_HOST_DEVICE inline u32 to_e4m3(u32 codes) {
    constexpr u32 kLow = 0x3c383000, kHigh = 0x4c484440;  // 0, 0.5, 1, 1.5 and 2, 3, 4, 6
    const u32 magnitudes = permute(kLow, kHigh, codes & 0x7777),
              signs = permute(0x8000, 0, codes >> 3 & 0x1111);
    return magnitudes | signs;
}

}  // namespace dg::e2m1
