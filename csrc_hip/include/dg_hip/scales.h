// Scales of one operand of any format: one for so many rows and so much of K, float32 or packed exponents, at any
// strides. They are loaded where they are used.
#pragma once

#include <dg_hip/convert.h>

namespace dg_hip {

// The scales of one operand. Parts of K are those of the main loop; what counts rows and parts is a power of two.
struct SideScales {
    const u8* base;  // of the operand's first row
    i64 row, k;      // elements from one scale, or word of four, to the next
    i64 parts;       // scales along K; what lies behind K has none
    i32 row_shift;   // rows that share a scale
    i32 part_shift;  // parts that share one
    bool packed;     // int32 words of four UE8M0 exponents, lowest byte first

    // Which scales those of a row are, along the rows.
    DG_DEVICE i64 line(i64 at_row) const { return at_row >> row_shift; }
    DG_DEVICE f32 at(i64 line, i64 part) const {
        const i64 which = part >> part_shift;
        if (which >= parts)
            return 0.0f;  // of zeros alone
        const u8* const own = base + line * row * 4;
        if (packed)
            return from_ue8m0(load<u32>(own + (which >> 2) * k * 4) >> (which & 3) * 8 & 255);
        return load<f32>(own + which * k * 4);
    }
};

}  // namespace dg_hip
