// The way out of a product: scales of whole rows and columns, C, one rounding, and where a column of the product lies
// in D.
#pragma once

#include <dg_hip/tile.h>

namespace dg_hip {

// A matrix of bf16 or float32, rows contiguous.
struct Matrix {
    u8* base;
    i64 row;    // elements
    bool wide;  // float32

    DG_DEVICE u8* at(i64 at_row, i64 column) const { return base + (at_row * row + column) * (wide ? 4 : 2); }
    DG_DEVICE f32 get(const u8* p) const { return wide ? load<f32>(p) : from_bf16(load<u16>(p)); }
    DG_DEVICE void put(u8* p, f32 x) const {
        if (wide)
            store(p, x);
        else
            store(p, to_bf16(x));
    }
    // The same of 16 columns at an aligned address.
    DG_DEVICE void add_16(const u8* p, f32 (&x)[kTile]) const {
        if (wide) {
            for (int i = 0; i < kTile; i += 4) {
                const F32x4 four = load<F32x4>(p + i * 4);
                for (int k = 0; k < 4; ++k)
                    x[i + k] += four.v[k];
            }
            return;
        }
        for (int i = 0; i < kTile; i += 8) {
            const U32x4 eight = load<U32x4>(p + i * 2);
            for (int k = 0; k < 4; ++k) {
                x[i + 2 * k] += from_bf16(static_cast<u16>(eight.v[k]));
                x[i + 2 * k + 1] += from_bf16(static_cast<u16>(eight.v[k] >> 16));
            }
        }
    }
    DG_DEVICE void put_16(u8* p, const f32 (&x)[kTile]) const {
        if (wide) {
            for (int i = 0; i < kTile; i += 4)
                store(p + i * 4, F32x4{{x[i], x[i + 1], x[i + 2], x[i + 3]}});
            return;
        }
        for (int i = 0; i < kTile; i += 8)
            store(p + i * 2, U32x4{{bf16_pair(x[i], x[i + 1]), bf16_pair(x[i + 2], x[i + 3]),
                                    bf16_pair(x[i + 4], x[i + 5]), bf16_pair(x[i + 6], x[i + 7])}});
    }
};

// Heads of `width` columns, of which `left` come before a hole in D; none where `width` is 0.
struct Heads {
    u32 left, hole, width;
};

// Where a column of the product, and then each next one, lies in D.
struct Column {
    i64 place;
    u32 within;  // its head

    DG_DEVICE Column(const Heads& heads, u32 column) : place(column), within(0) {
        if (heads.width == 0)
            return;
        const u32 head = column / heads.width;
        within = column - head * heads.width;
        place += static_cast<i64>(head + (within >= heads.left)) * heads.hole;
    }
    DG_DEVICE void next(const Heads& heads) {
        ++place, ++within;
        if (heads.width == 0)
            return;
        if (within == heads.left)
            place += heads.hole;
        if (within == heads.width) {
            within = 0;
            place += heads.left == 0 ? heads.hole : 0;
        }
    }
    // Whether the next `count` columns follow without a hole.
    DG_DEVICE bool straight(const Heads& heads, u32 count) const {
        return heads.width == 0 || within + count <= (within < heads.left ? heads.left : heads.width);
    }
};

// What hands a tile on to D; `out(row, column, values)` is what put_tile calls.
struct WayOut {
    Matrix d, c;  // of the group; no C where its base is null
    i32 first_row, first_column, columns;
    const i32* list;  // in LDS, where the rows are not those behind `first`
    i32 first;
    Heads heads;
    const u8 *row_scales, *column_scales;  // null for none
    i64 row_step, column_step;             // elements

    DG_DEVICE void operator()(i32 row, i32 column, f32 (&x)[kTile]) const {
        const i64 at_row =
            static_cast<i64>(first_row) + (list != nullptr ? load<i32>(list + row) : first + row);
        const i32 from = first_column + column, count = columns - from;
        if (count <= 0)
            return;
        if (row_scales != nullptr) {
            const f32 scale = load<f32>(row_scales + at_row * row_step * 4);
            for (int i = 0; i < kTile; ++i)
                x[i] *= scale;
        }
        if (column_scales != nullptr)
            for (int i = 0; i < kTile; ++i) {
                const i64 known = static_cast<i64>(from) + least(i, count - 1);  // no branch for each column
                x[i] *= load<f32>(column_scales + known * column_step * 4);
            }
        Column at(heads, static_cast<u32>(from));
        u8* const to = d.at(at_row, at.place);
        const u8* const add = c.base != nullptr ? c.at(at_row, at.place) : nullptr;
        if (count >= kTile && at.straight(heads, kTile) &&
            (reinterpret_cast<u64>(to) | reinterpret_cast<u64>(add)) % 16 == 0) {
            if (add != nullptr)
                c.add_16(add, x);
            d.put_16(to, x);
            return;
        }
        for (int i = 0; i < kTile; ++i, at.next(heads))
            if (i < count)
                d.put(d.at(at_row, at.place), add == nullptr ? x[i] : x[i] + c.get(c.at(at_row, at.place)));
    }
};

}  // namespace dg_hip
