// Scales in the one form that the products load row by row: float32, K step after K step, the rows of a step
// contiguous.
//
// The source is float32, which keeps its bits, or words of four UE8M0 exponents, in any strides; a scale of it
// may cover 128 rows, the whole row, or four steps. Groups are matrices of one shape, which one launch takes
// together; all that counts them, and all that is an offset, has 64 bits.
//
// A block moves tiles of 32 x 32 through shared memory, so that a warp reads along the source's contiguous axis
// and writes along the rows. The two halves of a tile are plain functions of a thread's number, which a check
// on the CPU calls one thread after another.
#pragma once

#include <dg/common/ue8m0.cuh>
#include <dg/impls/matrix_tiles.cuh>

namespace dg::sf {

using matrix::Corner, matrix::kThreads;
using Tile = matrix::WordTile;  // steps are its columns
constexpr u32 kTile = matrix::kWordTile;

struct Params {
    const u32* source;         // float32 bits, or words with the exponent of the lowest K in the lowest byte
    u32* result;               // float32 bits [groups][steps][pitch]; what lies beyond `rows` is not written
    i64 row_stride, k_stride;  // of the source, in elements; k_stride is 0 where a scale covers the whole row
    i64 apart;                 // elements from one group of the source to the next
    i64 pitch;
    i64 result_apart;  // elements from one group of the result to the next
    i64 rows, steps, groups;
    u32 row_shift;   // a scale covers 2^row_shift rows
    u32 step_shift;  // and 2^step_shift steps
    u32 packed;      // the source holds words
    u32 along_k;     // a warp reads along K
};

// Float32 bits of an exponent byte: 0 stands for 0, 255 for NaN.
DG_HOST_DEVICE inline u32 decode_bits(u8 byte) {
    return static_cast<u32>(byte) << ue8m0::kFloatMantissaBits | (byte > ue8m0::kMax ? 0x400000u : 0u);
}

// The 32 bits that hold the scale of a row at a step.
DG_HOST_DEVICE inline u32 load(const Params& params, i64 group, i64 row, i64 step) {
    const i64 block = step >> params.step_shift;
    const i64 column = params.packed ? block >> 2 : block;
    const i64 line = row >> params.row_shift;
    return params.source[group * params.apart + line * params.row_stride + column * params.k_stride];
}

// Float32 bits of the scale at a step, which `held` holds.
DG_HOST_DEVICE inline u32 scale_bits(const Params& params, u32 held, i64 step) {
    const i32 byte = static_cast<i32>(step >> params.step_shift) & 3;
    return params.packed ? decode_bits(ue8m0::unpack(held, byte)) : held;
}

DG_HOST_DEVICE inline matrix::Grid<kTile> grid(const Params& params) {
    return {params.groups, params.rows, params.steps};
}

DG_HOST_DEVICE inline void read_tile(const Params& params, Corner at, u32 thread, Tile& tile) {
    matrix::read_words(
        at, params.rows, params.steps, params.along_k, thread, tile,
        [&](i64 row, i64 step) { return load(params, at.group, row, step); },
        [&](u32 held, i64 step) { return scale_bits(params, held, step); });
}

DG_HOST_DEVICE inline void write_tile(const Params& params, Corner at, u32 thread, const Tile& tile) {
    matrix::write_words(at, params.rows, params.steps, params.result + at.group * params.result_apart,
                        params.pitch, thread, tile);
}

#if defined(__CUDACC__)
__device__ __forceinline__ void expand(const Params& params) {
    matrix::rewrite<Tile>(params);
}
#endif

}  // namespace dg::sf
