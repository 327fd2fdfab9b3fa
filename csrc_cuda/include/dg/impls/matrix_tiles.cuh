// What the kernels share that write matrices in another storage order: square tiles over the matrices of all groups,
// and tiles of 32-bit words, which a warp reads along the source's contiguous axis and writes along the rows.
//
// All that counts tiles, and all that is an offset, has 64 bits. All but `walk` are plain functions of a thread's
// number, which a check on the CPU calls one thread after another.
#pragma once

#include <dg/common/math.cuh>

namespace dg::matrix {

// Where a tile begins.
struct Corner {
    i64 group, row, column;
};

// Tiles that follow each other share their group and, within it, their columns.
template <u32 kTile>
struct Grid {
    i64 groups, rows, columns;

    DG_HOST_DEVICE i64 count() const { return groups * cdiv<i64>(rows, kTile) * cdiv<i64>(columns, kTile); }
    DG_HOST_DEVICE Corner corner(i64 index) const {
        const i64 across = cdiv<i64>(rows, kTile), down = cdiv<i64>(columns, kTile);
        const i64 line = index / across;
        return {line / down, index % across * kTile, line % down * kTile};
    }
};

#if defined(__CUDACC__)
// Calls `body` with the tiles of a block. It has two halves, a barrier between them.
template <class Body>
__device__ __forceinline__ void walk(i64 tiles, Body body) {
    for (i64 index = blockIdx.x; index < tiles; index += gridDim.x) {
        body(index);
        __syncthreads();  // the next tile's readers wait for this one's writers
    }
}

// Takes the tiles of a block through shared memory, by the kernel's own `grid`, `read_tile` and `write_tile`.
template <class Tile, class Params>
__device__ __forceinline__ void rewrite(const Params& params) {
    __shared__ Tile tile;
    walk(grid(params).count(), [&](i64 index) {
        const Corner at = grid(params).corner(index);
        read_tile(params, at, threadIdx.x, tile);
        __syncthreads();
        write_tile(params, at, threadIdx.x, tile);
    });
}
#endif

// Words --------------------------------------------------------------------------------------------------------

constexpr u32 kWordTile = 32;  // rows and columns of a tile: a warp's width
constexpr u32 kThreads = 256;
constexpr u32 kWarps = kThreads / 32;

// Column after column, each with one word more than it holds, so that reading across it meets 32 different banks.
using WordTile = u32[kWordTile][kWordTile + 1];

// A tile of `rows` x `columns`: `load` gives the word at a row and a column, `value` what becomes of it, given the
// column. A thread's loads are all on their way before it looks at the first. Beyond the matrix stands 0.
template <class Load, class Value>
DG_HOST_DEVICE inline void read_words(Corner at, i64 rows, i64 columns, bool along_columns, u32 thread,
                                      WordTile& tile, Load load, Value value) {
    constexpr u32 kLines = kWordTile / kWarps;
    const u32 lane = thread % 32, warp = thread / 32;
    u32 held[kLines];
    for (u32 i = 0; i < kLines; ++i) {
        const u32 line = warp + i * kWarps;
        const i64 row = at.row + (along_columns ? line : lane);
        const i64 column = at.column + (along_columns ? lane : line);
        held[i] = row < rows && column < columns ? load(row, column) : 0;
    }
    for (u32 i = 0; i < kLines; ++i) {
        const u32 line = warp + i * kWarps;
        const u32 row = along_columns ? line : lane, column = along_columns ? lane : line;
        tile[column][row] = value(held[i], at.column + column);
    }
}

// The tile into a matrix whose columns are `pitch` words apart; what lies beyond its rows is not written.
DG_HOST_DEVICE inline void write_words(Corner at, i64 rows, i64 columns, u32* result, i64 pitch, u32 thread,
                                       const WordTile& tile) {
    const u32 row = thread % 32;
    for (u32 column = thread / 32; column < kWordTile; column += kWarps) {
        if (at.row + row < rows && at.column + column < columns)
            result[(at.column + column) * pitch + at.row + row] = tile[column][row];
    }
}

}  // namespace dg::matrix
