// UE8M0 scale factors: a biased float32 exponent in one byte (value 2^(byte - 127)), four of them in an int32
// with the lowest k in the lowest byte.
#pragma once

#include <dg/common/types.cuh>

namespace dg::ue8m0 {

constexpr i32 kBias = 127;
constexpr u32 kFloatMantissaMask = 0x007fffffu;
constexpr i32 kFloatMantissaBits = 23;
// 0 would decode to 2^-127, which is subnormal in float32 and flushed by fast paths; 255 is NaN.
constexpr u32 kMin = 1;
constexpr u32 kMax = 254;

// True for the floats that UE8M0 holds exactly: positive, normal, finite, mantissa zero.  A scale that fails
// this is refused by whoever packs it, never truncated.
DG_HOST_DEVICE constexpr bool is_exact(float scale) {
    const u32 bits = __builtin_bit_cast(u32, scale);
    const u32 exponent = bits >> kFloatMantissaBits;  // a set sign bit makes this larger than kMax
    return (bits & kFloatMantissaMask) == 0 && exponent >= kMin && exponent <= kMax;
}

// The exponent byte of the smallest power of two that is at least `scale`, which is positive and finite;
// 2^127 above that.  Rounding up keeps `amax / scale` inside the range of the quantised type.
DG_HOST_DEVICE constexpr u8 encode_ceil(float scale) {
    const u32 bits = __builtin_bit_cast(u32, scale);
    const u32 exponent = (bits >> kFloatMantissaBits) + ((bits & kFloatMantissaMask) != 0);
    return static_cast<u8>(exponent < kMin ? kMin : exponent > kMax ? kMax : exponent);
}

// 2^(byte - 127) for a byte in [kMin, kMax].
DG_HOST_DEVICE constexpr float decode(u8 byte) {
    return __builtin_bit_cast(float, static_cast<u32>(byte) << kFloatMantissaBits);
}

DG_HOST_DEVICE constexpr u32 pack(u8 k0, u8 k1, u8 k2, u8 k3) {
    return static_cast<u32>(k0) | static_cast<u32>(k1) << 8 | static_cast<u32>(k2) << 16 |
           static_cast<u32>(k3) << 24;
}

// Exponent byte `index` (0..3, counted along k) of a packed word.
DG_HOST_DEVICE constexpr u8 unpack(u32 word, i32 index) {
    return static_cast<u8>(word >> (8 * index));
}

static_assert(encode_ceil(1.0f) == kBias && encode_ceil(1.5f) == kBias + 1 && decode(kBias + 3) == 8.0f);
static_assert(unpack(pack(1, 2, 3, 4), 0) == 1 && unpack(pack(1, 2, 3, 4), 3) == 4);
static_assert(is_exact(0.25f) && !is_exact(0.75f) && !is_exact(-1.0f) && !is_exact(0.0f));

}  // namespace dg::ue8m0
