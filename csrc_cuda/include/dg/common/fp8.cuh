// FP8 E4M3 as the OCP specification defines it (the "fn" variant: no infinities, one NaN per sign).
#pragma once

#include <dg/common/types.cuh>

namespace dg::e4m3 {

constexpr float kMax = 448.0f;  // 0x7e: 1.75 * 2^8
constexpr i32 kMantissaBits = 3;
constexpr u8 kNan = 0x7f;  // and 0xff

DG_HOST_DEVICE constexpr bool is_nan(u8 byte) {
    return (byte & 0x7f) == kNan;
}

// The value of a byte, exact.  Kernels convert with the hardware's instruction; this is the definition that
// their checks compare with, and the compile-time value of constants.
DG_HOST_DEVICE constexpr float decode(u8 byte) {
    if (is_nan(byte))
        return __builtin_bit_cast(float, 0x7fc00000u);
    const i32 exponent = (byte >> kMantissaBits) & 0xf;
    const i32 mantissa = byte & 0x7;
    // In units of 2^-9, the smallest subnormal: 0..7 for subnormal numbers, 8..15 times 2^(exponent - 1) above.
    const i32 units = exponent == 0 ? mantissa : (8 + mantissa) << (exponent - 1);
    const float magnitude = static_cast<float>(units) / 512.0f;
    return (byte & 0x80) ? -magnitude : magnitude;
}

static_assert(decode(0x7e) == kMax && decode(0x01) == 1.0f / 512 && decode(0x38) == 1.0f);

}  // namespace dg::e4m3
