// Matrices of bytes from one storage order into the other: rows contiguous before, columns contiguous after.
//
// Lines may be any number of bytes apart on both sides, and start at any address; groups are matrices of one shape,
// which one launch takes together. All that counts them, and all that is an offset, has 64 bits. Where address, lines
// and groups are whole units of 16 bytes, a thread moves 16 at once, up to the last unit of a line; elsewhere it moves
// byte after byte. Nothing outside the matrices is read or written.
//
// A block moves tiles of 128 x 128 through shared memory, so that eight lanes read 128 bytes of a column and write 128
// bytes of a row. A thread has four neighbouring columns on their way before it looks at the first, and turns their
// 4 x 4 blocks in registers, so that shared memory takes words of one row. The two halves of a tile are plain functions
// of a thread's number, which a check on the CPU calls one thread after another.
#pragma once

#include <dg/common/fp4.cuh>
#include <dg/impls/matrix_tiles.cuh>

namespace dg::transpose {

using matrix::Corner;

constexpr u32 kTile = 128;  // rows and columns of a tile
constexpr u32 kThreads = 256;
constexpr u32 kUnit = 16;                     // bytes of the widest access
constexpr u32 kUnits = kTile / kUnit;         // across a tile, and lanes that share a line
constexpr u32 kLines = 4;                     // that a thread reads, and that it writes
constexpr u32 kLineStep = kThreads / kUnits;  // rows between those that it writes
static_assert(kLines * kLineStep == kTile && kThreads / 32 == kUnits && kLines * (32 / kUnits) == kUnit);

struct Params {
    const u8* source;
    u8* result;
    i64 line;   // bytes from one column of the source to the next
    i64 apart;  // from one group of the source to the next
    i64 pitch;  // from one row of the result to the next
    i64 result_apart;
    i64 rows, columns, groups;
};

struct alignas(kUnit) Unit {
    u32 words[kUnit / 4];
};

// Row after row. The units of a row are permuted by `unit_of`: the words that a warp writes at once are of eight rows,
// 16 apart, and would meet in four banks.
using Tile = Unit[kTile][kUnits];

DG_HOST_DEVICE inline u32 unit_of(u32 row, u32 unit) {
    return unit ^ row / kUnit;
}

// True where units of these lines may be moved at once.
DG_HOST_DEVICE inline bool wide(const u8* address, i64 line, i64 apart) {
    return (reinterpret_cast<u64>(address) | static_cast<u64>(line) | static_cast<u64>(apart)) % kUnit == 0;
}

DG_HOST_DEVICE inline matrix::Grid<kTile> grid(const Params& params) {
    return {params.groups, params.rows, params.columns};
}

// Bytes of a unit at `place` that lie inside `size`.
DG_HOST_DEVICE inline u32 inside(i64 place, i64 size) {
    const i64 left = size - place;
    return left >= kUnit ? kUnit : left > 0 ? static_cast<u32>(left) : 0;
}

DG_HOST_DEVICE inline Unit load_bytes(const u8* from, u32 count) {
    Unit unit = {};
    for (u32 i = 0; i < kUnit; ++i)
        unit.words[i / 4] |= (i < count ? static_cast<u32>(from[i]) : 0u) << i % 4 * 8;
    return unit;
}

DG_HOST_DEVICE inline void store_bytes(u8* to, const Unit& unit, u32 count) {
    for (u32 i = 0; i < kUnit; ++i) {
        if (i < count)
            to[i] = static_cast<u8>(unit.words[i / 4] >> i % 4 * 8);
    }
}

// Words of four rows each, one word a column -> words of four columns each, one word a row, in eight permutations.
DG_HOST_DEVICE inline void turn(const u32 (&columns)[4], u32 (&rows)[4]) {
    using e2m1::permute;
    // In pairs of columns: rows 0 and 1, rows 2 and 3.
    const u32 left_top = permute(columns[0], columns[1], 0x5140),
              left_end = permute(columns[0], columns[1], 0x7362);
    const u32 right_top = permute(columns[2], columns[3], 0x5140),
              right_end = permute(columns[2], columns[3], 0x7362);
    rows[0] = permute(left_top, right_top, 0x5410);
    rows[1] = permute(left_top, right_top, 0x7632);
    rows[2] = permute(left_end, right_end, 0x5410);
    rows[3] = permute(left_end, right_end, 0x7632);
}

// A warp reads 128 rows of 16 columns, lane by lane 16 rows of 4 columns.
DG_HOST_DEVICE inline void read_tile(const Params& params, Corner at, u32 thread, Tile& tile) {
    const u32 lane = thread % 32, warp = thread / 32, part = lane / kUnits;
    const u32 row = lane % kUnits * kUnit;
    const i64 column = at.column + warp * kUnit + part * kLines;
    const u8* from = params.source + at.group * params.apart + column * params.line + at.row + row;
    const u32 count = inside(at.row + row, params.rows);
    Unit held[kLines] = {};
    if (count == kUnit && wide(params.source, params.line, params.apart)) {
        for (u32 i = 0; i < kLines; ++i) {
            if (column + i < params.columns)
                held[i] = *reinterpret_cast<const Unit*>(from + i * params.line);
        }
    } else {
        for (u32 i = 0; i < kLines; ++i)
            held[i] = load_bytes(from + i * params.line, column + i < params.columns ? count : 0);
    }
    for (u32 word = 0; word < kUnit / 4; ++word) {
        const u32 columns[4] = {held[0].words[word], held[1].words[word], held[2].words[word],
                                held[3].words[word]};
        u32 rows[4];
        turn(columns, rows);
        for (u32 i = 0; i < 4; ++i)
            tile[row + word * 4 + i][unit_of(row, warp)].words[part] = rows[i];
    }
}

// A warp writes four rows of 128 columns at once.
DG_HOST_DEVICE inline void write_tile(const Params& params, Corner at, u32 thread, const Tile& tile) {
    const u32 unit = thread % kUnits;
    const i64 column = at.column + unit * kUnit;
    const u32 count = inside(column, params.columns);
    const bool whole = count == kUnit && wide(params.result, params.pitch, params.result_apart);
    u8* to = params.result + at.group * params.result_apart + at.row * params.pitch + column;
    Unit held[kLines];
    for (u32 i = 0; i < kLines; ++i) {
        const u32 row = thread / kUnits + i * kLineStep;
        held[i] = tile[row][unit_of(row, unit)];
    }
    for (u32 i = 0; i < kLines; ++i) {
        const u32 row = thread / kUnits + i * kLineStep;
        if (at.row + row < params.rows) {
            if (whole)
                *reinterpret_cast<Unit*>(to + row * params.pitch) = held[i];
            else
                store_bytes(to + row * params.pitch, held[i], count);
        }
    }
}

#if defined(__CUDACC__)
__device__ __forceinline__ void run(const Params& params) {
    matrix::rewrite<Tile>(params);
}
#endif

}  // namespace dg::transpose
