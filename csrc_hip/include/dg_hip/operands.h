// Where a product's operands lie, and how 16 bytes of one row of them are read. Bytes count along K as the matrix
// instruction sees them: packed FP4 counts as the FP8 that it becomes.
#pragma once

#include <dg_hip/convert.h>

namespace dg_hip {

constexpr U32x4 kZeros16 = {{0, 0, 0, 0}};

// Bytes `k` .. `k + 15` of a row that ends at `end`, zeros behind its end. Slower byte by byte where an address is no
// multiple of 16; never a byte outside the row.
DG_DEVICE U32x4 load_row(const u8* row, i64 k, i64 end, bool aligned) {
    if (aligned && k + 16 <= end)
        return load<U32x4>(row + k);
    U32x4 result = kZeros16;
    for (int i = 0; i < 16; ++i)
        if (k + i < end)
            result.v[i / 4] |= static_cast<u32>(load<u8>(row + k + i)) << i % 4 * 8;
    return result;
}

// Rows of FP8 or bf16, K contiguous, `stride` bytes apart; zeros from row `rows` on.
struct Rows {
    const u8* base;
    i64 stride, bytes;
    i32 rows;
    bool aligned;  // base and stride are multiples of 16

    DG_DEVICE U32x4 at(i32 row, i64 k) const {
        return row < rows ? load_row(base + row * stride, k, bytes, aligned) : kZeros16;
    }
};

// The same of packed FP4, two values a byte, the first in the low half.
struct Fp4Rows {
    const u8* base;
    i64 stride, bytes;
    i32 rows;

    DG_DEVICE U32x4 at(i32 row, i64 k) const {
        if (row >= rows)
            return kZeros16;
        U32x4 result = kZeros16;
        for (int i = 0; i < 8; ++i)
            if (k + 2 * i < bytes) {
                const u32 pair = load<u8>(base + row * stride + k / 2 + i);
                result.v[i / 2] |= fp8_of_fp4((pair & 15) | (pair >> 4) << 8) << i % 2 * 16;
            }
        return result;
    }
};

// Weights in tiles of 16 x 16 bytes (dg_hip/layout.h): `base` is the first strip's, 64 k of a strip are one kilobyte.
struct KPack2 {
    const u8* base;
    i64 bytes;  // K
    i32 rows;

    DG_DEVICE U32x4 at(i32 row, i64 k) const {
        return row < rows && k < bytes ? load<U32x4>(base + kpack2_offset(row, k, bytes)) : kZeros16;
    }
};

}  // namespace dg_hip
