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

#include <dg/common/math.cuh>
#include <dg/common/ue8m0.cuh>

namespace dg::sf {

constexpr u32 kTile = 32;  // rows and steps of a tile: a warp's width
constexpr u32 kThreads = 256;
constexpr u32 kWarps = kThreads / 32;

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

// One more column than it holds, so that reading across it meets 32 different banks.
using Tile = u32[kTile][kTile + 1];

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

DG_HOST_DEVICE inline i64 count_tiles(const Params& params) {
    return params.groups * cdiv<i64>(params.rows, kTile) * cdiv<i64>(params.steps, kTile);
}

// Where a tile begins; tiles that follow each other share their group and, within it, their steps.
struct Corner {
    i64 group, row, step;
};

DG_HOST_DEVICE inline Corner corner(const Params& params, i64 index) {
    const i64 across = cdiv<i64>(params.rows, kTile), down = cdiv<i64>(params.steps, kTile);
    const i64 line = index / across;
    return {line / down, index % across * kTile, line % down * kTile};
}

// A thread's loads are all on their way before it looks at the first.
DG_HOST_DEVICE inline void read_tile(const Params& params, Corner at, u32 thread, Tile& tile) {
    constexpr u32 kLines = kTile / kWarps;
    const u32 lane = thread % 32, warp = thread / 32;
    u32 held[kLines];
    for (u32 i = 0; i < kLines; ++i) {
        const u32 line = warp + i * kWarps;
        const i64 row = at.row + (params.along_k ? line : lane);
        const i64 step = at.step + (params.along_k ? lane : line);
        held[i] = row < params.rows && step < params.steps ? load(params, at.group, row, step) : 0;
    }
    for (u32 i = 0; i < kLines; ++i) {
        const u32 line = warp + i * kWarps;
        const u32 row = params.along_k ? line : lane, step = params.along_k ? lane : line;
        tile[step][row] = scale_bits(params, held[i], at.step + step);
    }
}

DG_HOST_DEVICE inline void write_tile(const Params& params, Corner at, u32 thread, const Tile& tile) {
    const u32 row = thread % 32;
    u32* result = params.result + at.group * params.result_apart;
    for (u32 step = thread / 32; step < kTile; step += kWarps) {
        if (at.row + row < params.rows && at.step + step < params.steps)
            result[(at.step + step) * params.pitch + at.row + row] = tile[step][row];
    }
}

#if defined(__CUDACC__)
__device__ __forceinline__ void expand(const Params& params) {
    __shared__ Tile tile;
    const i64 tiles = count_tiles(params);
    for (i64 index = blockIdx.x; index < tiles; index += gridDim.x) {
        const Corner at = corner(params, index);
        read_tile(params, at, threadIdx.x, tile);
        __syncthreads();
        write_tile(params, at, threadIdx.x, tile);
        __syncthreads();  // the next tile's readers wait for this one's writers
    }
}
#endif

}  // namespace dg::sf
