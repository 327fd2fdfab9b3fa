// Products of all groupings: which tile a block takes, where its operands and scales lie, and the main loop of
// dg_hip/tile.h between them and the way out. backends/hip/gemm.py describes the arguments of a launch.
#pragma once

#include <dg_hip/epilogue.h>
#include <dg_hip/groups.h>
#include <dg_hip/kernel.h>
#include <dg_hip/scales.h>

namespace dg_hip {

// Strides of a, b and k count bytes as the operands are stored, but for `k`, the bytes of K that are multiplied, where
// packed FP4 counts as FP8; other strides count elements. A grouping in which all groups share a tensor has 0 for the
// stride from one group to the next.
//
//   sfa_parts      scales along K; of k_grouped those of all groups, in words where they are packed
//   sfa_row_shift  and sfa_part_shift: log2 of the rows, and of the main loop's parts of K, that share a scale
//   tiles_p        and tiles_q, along M and N; `tiles` of all groups that have their own; `grid`, blocks of the launch
//   zero_gaps      psum: rows from a group's end to the next multiple of `alignment` become 0
//   alignment      of k_grouped: 0 where the layout has sizes, else it has ends
//   k_flat         each group of k_grouped is a matrix of its own, one behind the other; otherwise they share rows
//   k_gran         K that a scale of k_grouped covers
// clang-format off
#define DG_GEMM_FIELDS(X)                                                            \
    X(ptr, a) X(ptr, sfa) X(ptr, b) X(ptr, sfb) X(ptr, d) X(ptr, c) X(ptr, layout)   \
    X(i64, m) X(i64, n) X(i64, k)                                                    \
    X(i64, a_row) X(i64, a_group) X(i64, b_row) X(i64, b_group)                      \
    X(i64, sfa_row) X(i64, sfa_k) X(i64, sfa_group) X(i64, sfa_parts)                \
    X(i64, sfb_row) X(i64, sfb_k) X(i64, sfb_group) X(i64, sfb_parts)                \
    X(i64, d_row) X(i64, d_group) X(i64, c_row) X(i64, c_group) X(i64, layout_step)  \
    X(i32, tiles_p) X(i32, tiles_q) X(i32, tiles) X(i32, grid)                       \
    X(i32, grouping) X(i32, groups) X(i32, alignment) X(i32, zero_gaps)              \
    X(i32, a_aligned) X(i32, a_fp4) X(i32, b_aligned) X(i32, b_fp4)                  \
    X(i32, sfa_row_shift) X(i32, sfa_part_shift) X(i32, sfa_packed)                  \
    X(i32, sfb_row_shift) X(i32, sfb_part_shift) X(i32, sfb_packed)                  \
    X(i32, d_f32) X(i32, c_f32) X(i32, head_left) X(i32, head_hole) X(i32, head_width) \
    X(i32, k_flat) X(i32, k_gran)
// clang-format on
DG_ARGS(GemmArgs, DG_GEMM_FIELDS)

DG_DEVICE bool is(const GemmArgs& args, Grouping grouping) {
    return args.grouping == static_cast<i32>(grouping);
}
// Whether a tile's rows may belong to several groups.
DG_DEVICE bool labelled(const GemmArgs& args) {
    return is(args, Grouping::contiguous) || is(args, Grouping::psum);
}

// The operand of one group.
struct Side {
    const u8* base;
    i64 row;
    bool aligned, fp4;
    const u8* sf;
    i64 sf_parts;
};
struct Pair {
    Side a, b;
    i64 k;
};

// How an operand is stored, and what of it a tile reads from row `first` on.
struct Plain {
    using Operand = Rows;
    DG_DEVICE static Operand of(const Side& side, i64 k, i64 first, i64 rows) {
        return {side.base + first * side.row, side.row, k, static_cast<i32>(least<i64>(rows, 1 << 20)),
                side.aligned};
    }
};
struct EitherRows {
    Rows fp8;
    bool fp4;

    DG_DEVICE Fp4Rows packed() const { return {fp8.base, fp8.stride, fp8.bytes, fp8.rows}; }
    DG_DEVICE bool direct() const { return fp4 ? packed().direct() : fp8.direct(); }
    DG_DEVICE const u8* line(i32 row) const { return fp8.line(row); }
    DG_DEVICE U32x4 part(const u8* line, i64 k) const {
        return fp4 ? packed().part(line, k) : fp8.part(line, k);
    }
    DG_DEVICE U32x4 piece(const u8* line, i64 k) const {
        return fp4 ? Fp4Rows::piece(line, k) : Rows::piece(line, k);
    }
};
struct Fp8OrFp4 {
    using Operand = EitherRows;
    DG_DEVICE static Operand of(const Side& side, i64 k, i64 first, i64 rows) {
        return {Plain::of(side, k, first, rows), side.fp4};
    }
};
struct Preshuffled {
    using Operand = KPack2;
    DG_DEVICE static Operand of(const Side& side, i64 k, i64 first, i64 rows) {
        return {side.base + first * k, k, static_cast<i32>(least<i64>(rows, 1 << 20))};
    }
};

// The stretch of K of one group, in elements, and its first scale (or word) along K.
struct Stretch {
    i64 start, size, entry;
};

DG_DEVICE Stretch stretch_of(const GemmArgs& args, i64 group, bool packed) {
    const Layout layout = {args.layout, args.layout_step};
    const i64 unit = static_cast<i64>(args.k_gran) * (packed ? 4 : 1);
    Stretch own = {0, 0, 0};
    i64 end = 0;
    for (i64 g = 0; g <= group; ++g) {
        own.entry += ceil_div(own.size, unit);
        const i64 value = most<i64>(0, least<i64>(layout.at(g), args.k));
        if (args.alignment > 0) {  // the values are ends
            own.start = least(round_up(end, args.alignment), args.k);
            end = value;
            own.size = most<i64>(0, end - own.start);
        } else {
            own.start = end;
            own.size = least(value, args.k - end);
            end += own.size;
        }
    }
    if (args.alignment > 0 && !packed)
        own.entry = own.start / args.k_gran;  // such scales come from a cast of the whole operand
    return own;
}

// Operands whose K is a group's stretch of the whole. `k` of the arguments counts elements then.
template <class Element>
DG_DEVICE Pair stretched(const GemmArgs& args, i64 group) {
    const Stretch own = stretch_of(args, group, args.sfa_packed != 0);
    const auto side = [&](ptr base, i64 row, i64 rows, bool aligned, ptr sf, i64 sf_k, i64 entries,
                          bool packed) {
        const i64 start = own.start * Element::kBytes * (args.k_flat ? rows : 1);
        const i64 entry = least(own.entry, entries);
        const i64 known = (entries - entry) * (packed ? 4 : 1);
        return Side{base + start,
                    args.k_flat ? own.size * Element::kBytes : row,
                    aligned && start % 16 == 0 && (!args.k_flat || own.size * Element::kBytes % 16 == 0),
                    false,
                    sf + entry * sf_k * 4,
                    least(ceil_div(own.size, static_cast<i64>(args.k_gran)), known)};
    };
    return {side(args.a, args.a_row, args.m, args.a_aligned != 0, args.sfa, args.sfa_k, args.sfa_parts,
                 args.sfa_packed != 0),
            side(args.b, args.b_row, args.n, args.b_aligned != 0, args.sfb, args.sfb_k, args.sfb_parts,
                 args.sfb_packed != 0),
            own.size * Element::kBytes};
}

template <class Element>
DG_DEVICE Pair pair_of(const GemmArgs& args, i64 group) {
    if (is(args, Grouping::k_grouped))
        return stretched<Element>(args, group);
    return {{args.a + group * args.a_group, args.a_row, args.a_aligned != 0, args.a_fp4 != 0,
             args.sfa + group * args.sfa_group * 4, args.sfa_parts},
            {args.b + group * args.b_group, args.b_row, args.b_aligned != 0, args.b_fp4 != 0,
             args.sfb + group * args.sfb_group * 4, args.sfb_parts},
            args.k};
}

// What a tile's main loop multiplies its partial sums by.
template <int kSteps_>
struct TileScales {
    static constexpr int kSteps = kSteps_, q_k_steps = 1;
    SideScales p, q;
    Places places;
    i64 first_p, first_q, columns;

    DG_DEVICE f32 of_p(i32 row, i32 part) const {
        const i32 place = places(row);
        return row < places.count ? p.at(p.line(first_p + place), part) : 0.0f;
    }
    DG_DEVICE i32 group(i32 row) const {
        return first_q + row < columns ? static_cast<i32>(q.line(first_q + row)) : -1;
    }
    DG_DEVICE f32 of_group(i32 group, i64 part) const { return group < 0 ? 0.0f : q.at(group, part); }
};

template <int kSteps>
DG_DEVICE auto scales_of(const GemmArgs& args, const Pair& pair, const Places& places, i64 first_p,
                         i64 first_q) {
    if constexpr (kSteps == 0)
        return Unscaled{};
    else
        return TileScales<kSteps>{{pair.a.sf, args.sfa_row, args.sfa_k, pair.a.sf_parts, args.sfa_row_shift,
                                   args.sfa_part_shift, args.sfa_packed != 0},
                                  {pair.b.sf, args.sfb_row, args.sfb_k, pair.b.sf_parts, args.sfb_row_shift,
                                   args.sfb_part_shift, args.sfb_packed != 0},
                                  places,
                                  first_p,
                                  first_q,
                                  args.n};
}

// The rows of a tile that the way out names by a list in LDS, behind what it takes itself.
template <class S>
DG_DEVICE i32* list_in(u8* lds) {
    static_assert(S::kOut + S::kP * 4 <= S::kLds && (kThreads + S::kP) * 4 <= S::kLds);
    return reinterpret_cast<i32*>(lds + S::kOut);
}

struct GemmTile {
    i32 row, column, group;
};

// Rows are innermost, so that blocks that run at a time share rows of B. 2^31 tiles are more than memory holds.
template <class S>
DG_DEVICE GemmTile tile_at(const GemmArgs& args, u32 index) {
    const u32 along_p = static_cast<u32>(args.tiles_p), along_q = static_cast<u32>(args.tiles_q);
    const u32 line = index / along_p, group = line / along_q;
    return {static_cast<i32>((index - line * along_p) * S::kP),
            static_cast<i32>((line - group * along_q) * S::kQ), static_cast<i32>(group)};
}

DG_DEVICE WayOut way_out(const GemmArgs& args, const GemmTile& tile) {
    return {{args.d, args.d_row, args.d_f32 != 0},
            {args.c, args.c_row, args.c_f32 != 0},
            tile.row,
            tile.column,
            static_cast<i32>(args.n),
            nullptr,
            0,
            {static_cast<u32>(args.head_left), static_cast<u32>(args.head_hole),
             static_cast<u32>(args.head_width)},
            nullptr,
            nullptr,
            args.sfa_row,
            args.sfb_row};
}

// One product: the rows `places` of a tile with the operands of `group`.
template <class Element, class S, int kSteps, class FormP, class FormQ>
DG_DEVICE void multiply_rows(const GemmArgs& all, const GemmTile& tile, i32 group, const Places& places,
                             u8* lds) {
    Accumulators<S> acc;
    clear(acc);
    i32 summand = group;  // of a sum over the batch `group` is the first one
    do {
        const GemmArgs& args = again(all);
        if (is(args, Grouping::batch_sum) && args.groups == 0)
            break;
        const Pair pair = pair_of<Element>(args, summand);
        const Picked<typename FormP::Operand> p = {FormP::of(pair.a, pair.k, tile.row, args.m - tile.row),
                                                   places};
        const typename FormQ::Operand q = FormQ::of(pair.b, pair.k, tile.column, args.n - tile.column);
        accumulate_tile<Element>(acc, p, q, pair.k, places.count,
                                 scales_of<kSteps>(args, pair, places, tile.row, tile.column), lds);
    } while (is(again(all), Grouping::batch_sum) && ++summand < again(all).groups);
    const GemmArgs& args = again(all);
    WayOut out = way_out(args, tile);
    if (places.listed) {
        if (wave() == 0)
            places.lay_down(list_in<S>(lds));
        sync();
        out.list = list_in<S>(lds);
    }
    out.first = places.first;
    out.d.base += static_cast<i64>(group) * args.d_group * (args.d_f32 ? 4 : 2);
    if (args.c != nullptr)
        out.c.base += static_cast<i64>(group) * args.c_group * (args.c_f32 ? 4 : 2);
    if (kSteps == 0 && args.sfa != nullptr)
        out.row_scales = args.sfa + static_cast<i64>(group) * args.sfa_group * 4;
    if (kSteps == 0 && args.sfb != nullptr)
        out.column_scales = args.sfb + static_cast<i64>(group) * args.sfb_group * 4;
    put_tile(acc, places.count, lds, out);
}

// Zeros for the rows of gaps.
template <class S>
DG_DEVICE void put_zeros(const GemmArgs& args, const GemmTile& tile, const i32* labels) {
    const Matrix d = {args.d, args.d_row, args.d_f32 != 0};
    DG_NO_UNROLL
    for (i32 i = static_cast<i32>(thread()); i < S::kP * S::kQ; i += kThreads) {
        const i64 row = i / S::kQ, column = static_cast<i64>(tile.column) + i % S::kQ;
        if (load<i32>(labels + row) == kBecomesZero && column < args.n)
            d.put(d.at(tile.row + row, column), 0.0f);
    }
}

template <class S>
DG_DEVICE i32 label_of(const GemmArgs& args, const GemmTile& tile) {
    const Layout layout = {args.layout, args.layout_step};
    if (is(args, Grouping::psum))
        return label_of_ends({layout, args.alignment, args.m}, args.groups, args.zero_gaps != 0, tile.row,
                             S::kP);
    const i64 row = static_cast<i64>(tile.row) + thread();
    const i32 label = row < least<i64>(args.m, tile.row + S::kP) ? layout.at(row) : kNobody;
    return label >= 0 && label < args.groups ? label : kNobody;
}

template <class S>
DG_DEVICE i32 rows_in(const GemmArgs& args, const GemmTile& tile) {
    i64 rows = args.m;
    if (is(args, Grouping::masked))
        rows = least<i64>(rows, Layout{args.layout, args.layout_step}.at(tile.group));
    return static_cast<i32>(most<i64>(0, least<i64>(rows - tile.row, S::kP)));
}

// Each thread's own label to LDS, of which a product takes all; threads that have no row have kNobody.
DG_DEVICE void lay_down_labels(i32 mine, u8* lds) {
    store(reinterpret_cast<i32*>(lds) + thread(), mine);
    sync();
}

// The kernel. Blocks go on to further tiles where there are more tiles than blocks.
//
// Arguments are read anew at each use: there are more of them than scalar registers.
template <class Element, class S, int kSteps, class FormP, class FormQ>
DG_DEVICE void gemm(const GemmArgs& args, u8* lds) {
    DG_NO_UNROLL
    for (u32 index = block(); index < static_cast<u32>(again(args).tiles);
         index += static_cast<u32>(again(args).grid)) {
        const GemmTile tile = tile_at<S>(again(args), index);
        const i32* const labels = reinterpret_cast<const i32*>(lds);
        Places places = {0, 0, false, 0, 0};
        i32 mine = kNobody, label = kNoLabel;
        if (labelled(again(args))) {
            mine = label_of<S>(again(args), tile);
            lay_down_labels(mine, lds);
            label = next_label<S::kP>(labels, kNobody);
        } else if ((places.count = rows_in<S>(again(args), tile)) > 0) {
            label = tile.group;
        }
        while (label != kNoLabel) {
            if (labelled(again(args)))
                places = rows_of<S::kP>(labels, label, reinterpret_cast<i32*>(lds) + kThreads);
            multiply_rows<Element, S, kSteps, FormP, FormQ>(args, tile, label, places, lds);
            if (!labelled(again(args)))
                break;
            lay_down_labels(mine, lds);
            label = next_label<S::kP>(labels, label);
        }
        if (labelled(again(args))) {
            if (again(args).zero_gaps != 0)
                put_zeros<S>(again(args), tile, labels);
            sync();
        }
    }
}

}  // namespace dg_hip
