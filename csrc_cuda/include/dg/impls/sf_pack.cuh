// Changes of scale-factor layout.
//
// `move` and `pack` write scales of rows with the rows contiguous, as kernels load them: `move` any 32 bits as
// they are, `pack` float32 powers of two as words of four UE8M0 exponents, the one of the lowest K in the lowest
// byte.  A block moves tiles of 32 x 32 through shared memory, so that a warp reads along the source's
// contiguous axis and writes along the rows.
//
// `pack_k_grouped` packs scales of K-grouped operands, whose words never mix two groups.  A block writes a piece
// of one line of words and finds the group of that line by walking over the groups' sizes.
//
// All but the kernels' frames are plain functions of a thread's number, which a check on the CPU calls one thread
// after another.
#pragma once

#include <dg/common/ue8m0.cuh>
#include <dg/impls/matrix_tiles.cuh>

namespace dg::sf_pack {

using matrix::Corner, matrix::kThreads, matrix::kWarps;
using Tile = matrix::WordTile;
constexpr u32 kTile = matrix::kWordTile;
constexpr u32 kWordBlocks = 4;  // exponents of a word
constexpr u32 kNan = 0xff;      // the byte of NaN

// The exponent byte of float32 bits.  What UE8M0 cannot hold sets `wrong` and becomes NaN: a sign, a mantissa,
// infinity.  Zero is byte 0.
DG_HOST_DEVICE inline u32 exponent_byte(u32 bits, bool& wrong) {
    const u32 exponent = bits >> ue8m0::kFloatMantissaBits;  // a sign makes it larger than kMax
    const bool refused = (bits & ue8m0::kFloatMantissaMask) != 0 || exponent > ue8m0::kMax;
    wrong |= refused;
    return refused ? kNan : exponent;
}

DG_HOST_DEVICE inline i64 clamp(i64 x, i64 low, i64 high) {
    return x < low ? low : x > high ? high : x;
}

// Rows ---------------------------------------------------------------------------------------------------------

struct Params {
    const u32* source;  // [groups, rows, columns], in these strides (elements)
    u32* result;        // [groups, columns or words, pitch]; what lies beyond `rows` is not written
    const i32* ends;    // of a psum layout: the end row of each group
    u32* flag;          // set to 1 by a value that UE8M0 cannot hold; null: nobody looks
    i64 group_stride, row_stride, k_stride;
    i64 pitch;
    i64 groups, rows, columns;
    i64 num_ends, end_stride;
    i64 alignment;  // of the first row of each group of a psum layout
    u32 psum;       // only rows of groups count; the others become 0
    u32 along_k;    // a warp reads along K
};

DG_HOST_DEVICE inline matrix::Grid<kTile> grid(const Params& params) {
    return {params.groups, params.rows, params.columns};
}

DG_HOST_DEVICE inline void read_tile(const Params& params, Corner at, u32 thread, Tile& tile) {
    const u32* source = params.source + at.group * params.group_stride;
    matrix::read_words(
        at, params.rows, params.columns, params.along_k, thread, tile,
        [&](i64 row, i64 column) { return source[row * params.row_stride + column * params.k_stride]; },
        [](u32 held, i64) { return held; });
}

// The rows of a tile that lie in the groups which this thread looks at: bit i for row i.
DG_HOST_DEVICE inline u32 used_rows(const Params& params, Corner at, u32 thread) {
    u32 used = 0;
    for (i64 group = thread; group < params.num_ends; group += kThreads) {
        const i64 last = group ? params.ends[(group - 1) * params.end_stride] : 0;
        const i64 first = align<i64>(clamp(last, 0, params.rows), params.alignment);
        const i64 end = clamp(params.ends[group * params.end_stride], 0, params.rows);
        const i64 low = clamp(first - at.row, 0, kTile), high = clamp(end - at.row, 0, kTile);
        if (low < high)
            used |= static_cast<u32>((u64{1} << high) - (u64{1} << low));
    }
    return used;
}

DG_HOST_DEVICE inline void write_tile(const Params& params, Corner at, u32 thread, const Tile& tile) {
    matrix::write_words(at, params.rows, params.columns,
                        params.result + at.group * params.columns * params.pitch, params.pitch, thread, tile);
}

DG_HOST_DEVICE inline void write_packed(const Params& params, Corner at, u32 thread, const Tile& tile,
                                        u32 used) {
    static_assert(kTile / kWordBlocks == kWarps, "a word for each thread");
    const u32 row = thread % 32, warp = thread / 32;
    const i64 words = cdiv<i64>(params.columns, kWordBlocks), word = at.column / kWordBlocks + warp;
    if (at.row + row >= params.rows || word >= words)
        return;
    u32 packed = 0;
    bool wrong = false;
    for (u32 i = 0; i < kWordBlocks && (used >> row & 1); ++i)
        packed |= exponent_byte(tile[warp * kWordBlocks + i][row], wrong) << 8 * i;
    params.result[(at.group * words + word) * params.pitch + at.row + row] = packed;
    if (wrong && params.flag != nullptr)
        *params.flag = 1;
}

// Groups along K -----------------------------------------------------------------------------------------------

constexpr u32 kHeld = 256;                // sizes that the parameters have room for
constexpr u32 kPiece = 4;                 // words of a thread
constexpr u32 kLine = kThreads * kPiece;  // words of a block

struct GroupedParams {
    const u32* source;  // float32 bits [blocks, columns], in these strides (elements)
    u32* result;        // words [rows][columns]
    const i32* sizes;   // positions along K of each group, or its end; null: they stand in `held`
    u32* flag;          // set to 1 by a value that UE8M0 cannot hold; null: nobody looks
    i64 block_stride, column_stride, size_stride;
    i64 blocks, columns, rows;
    i64 groups;
    i64 alignment;   // psum: of the first position of each group
    u32 gran_shift;  // a block covers 2^gran_shift positions
    u32 psum;        // sizes are ends
    i64 held[kHeld];
};

// The source blocks of a line of words: the first one, and how many, at most four.
struct Blocks {
    i64 first, count;
};

DG_HOST_DEVICE inline Blocks find(const GroupedParams& params, i64 row) {
    const i64 sum_k = params.blocks << params.gran_shift, round_up = (i64{1} << params.gran_shift) - 1;
    i64 end = 0, first = 0, words = 0;
    for (i64 group = 0; group < params.groups; ++group) {
        const i64 told = params.sizes ? params.sizes[group * params.size_stride] : params.held[group];
        const i64 size = clamp(told, 0, sum_k);
        i64 start = end;
        if (params.psum) {
            start = clamp(align(end, params.alignment), 0, sum_k);
            first = start >> params.gran_shift;
            end = size;
        } else {
            end = clamp(end + size, 0, sum_k);
        }
        const i64 blocks = end > start ? (end - start + round_up) >> params.gran_shift : 0;
        const i64 behind = words + ((blocks + kWordBlocks - 1) >> 2);
        if (row < behind) {
            const i64 skipped = (row - words) * kWordBlocks;
            return {first + skipped, clamp(blocks - skipped, 0, kWordBlocks)};
        }
        words = behind;
        first += blocks;  // under a psum layout the next group sets its own
    }
    return {0, 0};
}

DG_HOST_DEVICE inline i64 count_pieces(const GroupedParams& params) {
    return params.rows * cdiv<i64>(params.columns, kLine);
}

DG_HOST_DEVICE inline void write_piece(const GroupedParams& params, i64 index, u32 thread) {
    const i64 across = cdiv<i64>(params.columns, kLine);
    const i64 row = index / across, corner = index % across * kLine + thread;
    const Blocks from = find(params, row);
    u32 held[kPiece][kWordBlocks];
    for (u32 piece = 0; piece < kPiece; ++piece) {
        const i64 column = corner + piece * kThreads;
        for (u32 i = 0; i < kWordBlocks; ++i) {
            // Sizes on the device are not trusted: a block past the last one is clipped.
            const i64 block = clamp(from.first + i, 0, params.blocks - 1);
            const bool there = column < params.columns && i < from.count;
            const i64 offset = block * params.block_stride + column * params.column_stride;
            held[piece][i] = there ? params.source[offset] : 0;
        }
    }
    bool wrong = false;
    for (u32 piece = 0; piece < kPiece; ++piece) {
        const i64 column = corner + piece * kThreads;
        u32 packed = 0;
        for (u32 i = 0; i < kWordBlocks; ++i)
            packed |= exponent_byte(held[piece][i], wrong) << 8 * i;
        if (column < params.columns)
            params.result[row * params.columns + column] = packed;
    }
    if (wrong && params.flag != nullptr)
        *params.flag = 1;
}

// Kernels ------------------------------------------------------------------------------------------------------

#if defined(__CUDACC__)
__device__ __forceinline__ void move(const Params& params) {
    matrix::rewrite<Tile>(params);
}

__device__ __forceinline__ void pack(const Params& params) {
    __shared__ Tile tile;
    __shared__ u32 used;
    matrix::walk(grid(params).count(), [&](i64 index) {
        const Corner at = grid(params).corner(index);
        if (threadIdx.x == 0)
            used = params.psum ? 0u : ~0u;
        read_tile(params, at, threadIdx.x, tile);
        __syncthreads();
        if (params.psum) {
            const u32 mine = used_rows(params, at, threadIdx.x);
            if (mine)
                atomicOr(&used, mine);
            __syncthreads();
        }
        write_packed(params, at, threadIdx.x, tile, used);
    });
}

__device__ __forceinline__ void pack_k_grouped(const GroupedParams& params) {
    const i64 pieces = count_pieces(params);
    for (i64 index = blockIdx.x; index < pieces; index += gridDim.x)
        write_piece(params, index, threadIdx.x);
}
#endif

}  // namespace dg::sf_pack
