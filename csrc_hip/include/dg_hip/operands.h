// Where a product's operands lie, and how 16 bytes of one row of them are read. Bytes count along K as the matrix
// instruction sees them: packed FP4 counts as the FP8 that it becomes.
//
// An operand has
//   line(row)       where a row of the tile begins, null if it is one of zeros: asked for once a tile
//   part(line, k)   bytes k .. k + 15 of it, k a multiple of 16; zeros behind its end
//   direct()        whether its pieces of 16 bytes can be loaded as such, the same for all threads of a block
//   piece(line, k)  what part(line, k) gives, then: the main loop looks neither for ends nor for alignment in steps
//                   that have neither
#pragma once

#include <dg_hip/convert.h>

namespace dg_hip {

constexpr U32x4 kZeros16 = {{0, 0, 0, 0}};

// Bytes `k` .. `k + 15` of a row that ends at `end`, zeros behind its end. Slower byte by byte where an address is no
// multiple of 16; never a byte outside the row.
DG_DEVICE U32x4 load_row(const u8* row, i64 k, i64 end, bool aligned) {
    if (aligned && k + 16 <= end)
        return load<U32x4>(row + k);
    u64 low = 0, high = 0;
    // From the last byte on, so that each one pushes those behind it up: code for one byte instead of sixteen.
    DG_NO_UNROLL
    for (i32 i = static_cast<i32>(least<i64>(end - k, 16)) - 1; i >= 0; --i) {
        high = high << 8 | low >> 56;
        low = low << 8 | load<u8>(row + k + i);
    }
    return U32x4{{static_cast<u32>(low), static_cast<u32>(low >> 32), static_cast<u32>(high),
                  static_cast<u32>(high >> 32)}};
}

// Rows of FP8 or bf16, K contiguous, `stride` bytes apart; zeros from row `rows` on.
struct Rows {
    const u8* base;
    i64 stride, bytes;
    i32 rows;
    bool aligned;  // base and stride are multiples of 16

    DG_DEVICE U32x4 part(const u8* line, i64 k) const { return load_row(line, k, bytes, aligned); }
    DG_DEVICE bool direct() const { return aligned; }
    DG_DEVICE const u8* line(i32 row) const { return row < rows ? base + row * stride : nullptr; }
    static DG_DEVICE U32x4 piece(const u8* line, i64 k) { return load<U32x4>(line + k); }
};

// The same of packed FP4, two values a byte, the first in the low half.
struct Fp4Rows {
    const u8* base;
    i64 stride, bytes;
    i32 rows;

    DG_DEVICE U32x4 part(const u8* line, i64 k) const {
        u64 packed = 0;
        DG_NO_UNROLL
        for (i32 i = static_cast<i32>(least<i64>(ceil_div(bytes - k, 2), 8)) - 1; i >= 0; --i)
            packed = packed << 8 | load<u8>(line + k / 2 + i);
        return unpacked(packed);
    }
    DG_DEVICE bool direct() const {
        return (reinterpret_cast<u64>(base) | static_cast<u64>(stride)) % 8 == 0;
    }
    DG_DEVICE const u8* line(i32 row) const { return row < rows ? base + row * stride : nullptr; }
    static DG_DEVICE U32x4 piece(const u8* line, i64 k) { return unpacked(load<u64>(line + k / 2)); }
    static DG_DEVICE U32x4 unpacked(u64 packed) {
        U32x4 result;
        for (int i = 0; i < 4; ++i) {
            const u32 four = static_cast<u32>(packed >> 16 * i) & 0xffff;
            result.v[i] =
                fp8_of_fp4((four & 0xf) | (four & 0xf0) << 4 | (four & 0xf00) << 8 | (four & 0xf000) << 12);
        }
        return result;
    }
};

// Weights in tiles of 16 x 16 bytes (dg_hip/layout.h): `base`, a multiple of 16, is the first strip's, 64 k of a strip
// are one kilobyte.
struct KPack2 {
    const u8* base;
    i64 bytes;  // K, a multiple of 16
    i32 rows;

    DG_DEVICE U32x4 part(const u8* line, i64 k) const { return k < bytes ? piece(line, k) : kZeros16; }
    DG_DEVICE bool direct() const { return true; }
    DG_DEVICE const u8* line(i32 row) const {
        return row < rows ? base + kpack2_offset(row, 0, bytes) : nullptr;
    }
    static DG_DEVICE U32x4 piece(const u8* line, i64 k) { return load<U32x4>(line + k * kTile); }
};

}  // namespace dg_hip
