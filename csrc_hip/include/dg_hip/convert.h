// Numbers of few bits, in integer arithmetic: the same result on every target.
#pragma once

#include <dg_hip/arch.h>

namespace dg_hip {

DG_DEVICE f32 from_bf16(u16 x) {
    return bits<f32>(static_cast<u32>(x) << 16);
}

// To nearest even; a NaN stays one.
DG_DEVICE u16 to_bf16(f32 x) {
    const u32 word = bits<u32>(x);
    if ((word & 0x7fffffff) > 0x7f800000)
        return static_cast<u16>(word >> 16 | 0x40);
    return static_cast<u16>((word + 0x7fff + (word >> 16 & 1)) >> 16);
}

DG_DEVICE u32 bf16_pair(f32 low, f32 high) {
    return to_bf16(low) | static_cast<u32>(to_bf16(high)) << 16;
}

DG_DEVICE f32 from_f16(u16 x) {
    const u32 sign = static_cast<u32>(x & 0x8000) << 16, exponent = x >> 10 & 31, mantissa = x & 0x3ff;
    if (exponent == 0)  // subnormal: multiples of 2^-24
        return bits<f32>(sign | bits<u32>(static_cast<f32>(mantissa) * 0x1p-24f));
    return bits<f32>(sign | (exponent == 31 ? 255 : exponent + 112) << 23 | mantissa << 13);
}

// e4m3fn: a sign, four bits of exponent with bias 7, three of mantissa; all ones is NaN.
DG_DEVICE f32 from_fp8(u8 x) {
    const u32 magnitude = x & 0x7f, sign = static_cast<u32>(x & 0x80) << 24;
    if (magnitude == 0x7f)
        return bits<f32>(sign | 0x7fc00000);
    if (magnitude < 8)  // subnormal: eighths of 2^-6
        return bits<f32>(sign | bits<u32>(static_cast<f32>(magnitude) * 0x1p-9f));
    return bits<f32>(sign | ((magnitude << 20) + (120u << 23)));
}

// A power of two with the biased exponent of UE8M0; 255 means NaN, and 0 means 0, as dg_core.layout has it.
DG_DEVICE f32 from_ue8m0(u32 exponent) {
    return bits<f32>(exponent == 255 ? 0x7fc00000u : exponent << 23);
}

// Four codes e2m1, one in each low half of a byte -> four bytes e4m3 of the same values, all four at once.
DG_DEVICE u32 fp8_of_fp4(u32 codes) {
    // 0, 0.5, 1, 1.5, 2, 3, 4, 6: from 1 on the exponent and the one bit of mantissa stand as in e4m3, and 0x30 is 0.5.
    const u32 magnitude = codes & 0x07070707;
    const u32 from_one = (magnitude >> 1 | magnitude >> 2) & 0x01010101,
              not_zero = from_one | (magnitude & 0x01010101);
    return not_zero * 0x30 + (magnitude << 2 & from_one * 0x1c) + (codes << 4 & 0x80808080);
}

}  // namespace dg_hip
