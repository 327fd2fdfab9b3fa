// Which rows of A belong to a group, as the tensor on the device says: labels, counts, or end rows (psum). It is not
// trusted: counts and ends are clipped to the rows that there are.
#pragma once

#include <dg/scheduler/tiles.cuh>

namespace dg::sm90 {

// Of a tile's rows those that are the group's.
struct Rows {
    u32 end;    // rows of A from here on are not
    u32 zeros;  // but those before this one become zero
    u32 mixed;  // not 0: some of the rows between `begin` and `end` are not either, and Ownership tells which
    u32 begin;  // nor are rows before this one, of labels and of end rows

    // Those of a tile of groups, out of its slot.
    __device__ __forceinline__ static Rows of(const Tile& tile) {
        const uint4 words = load_shared4(tile.rows);
        return {words.x, words.y, words.z, words.w};
    }
};

// The 64-row parts of a tile of P that are loaded: of groups those from the first to the last one that has a row of
// the tile's group.
template <class C>
struct Loaded {
    using L = Layout<C>;
    static constexpr u32 kAll = L::kBlockP / 64;

    u32 from, to;

    __device__ __forceinline__ static Loaded of(const Tile& tile) {
        if constexpr (!L::kPartLoads)
            return {0, kAll};
        const Rows rows = Rows::of(tile);
        const u32 to = rows.end > tile.row_p ? min(cdiv(rows.end - tile.row_p, 64u), kAll) : 0;
        const u32 from = !L::kGroupedA && rows.begin > tile.row_p ? (rows.begin - tile.row_p) / 64 : 0;
        return {min(from, to), to};
    }

    // Bytes of a stage that do not come.
    __device__ __forceinline__ u32 left_out() const {
        return L::kPartLoads ? (kAll - (to - from)) * 64 * kBlockK : 0;
    }
};

// A group's rows, from `first` to `end`, and the end of the rows behind them that become zero.
struct Stretch {
    u32 first, end, zeros;
    bool disordered;  // it ends before the group before it
};

template <class C>
struct Ownership {
    const Params& params;
    u32 rows;  // of A, or of a group's A

    __device__ __forceinline__ explicit Ownership(const Params& all)
        : params(all), rows(C::kSwap ? all.rows_q : all.rows_p) {}

    __device__ __forceinline__ u32 up(u32 row) const {
        return min(cdiv(row, params.alignment) * params.alignment, rows);
    }
    __device__ __forceinline__ u32 clipped(u32 group) const {
        return min(static_cast<u32>(max(__ldg(params.layout + group), 0)), rows);
    }

    __device__ __forceinline__ Stretch stretch(u32 group) const {
        if (group >= params.groups)
            return {0, 0, 0, false};
        if constexpr (C::kGrouping == kBatched)
            return {0, rows, 0, false};
        const u32 end = clipped(group);
        if constexpr (C::kGrouping == kMasked)
            return {0, end, 0, false};
        const u32 before = group == 0 ? 0 : clipped(group - 1), first = up(before);
        return {first, max(end, first), params.zero_gaps ? up(end) : 0, end < before};
    }

    // Whether a row of a mixed tile is the group's.
    __device__ __forceinline__ bool owns(u32 group, u32 row) const {
        return C::kGrouping == kContiguous ? static_cast<u32>(__ldg(params.layout + row)) == group
                                           : owner(row) == group;
    }
    // Ends that do not ascend give a row to several groups: the last of them has it, as in a loop over groups. Not
    // a group: none has it.
    __device__ __forceinline__ u32 owner(u32 row) const {
        for (u32 group = params.groups; group-- > 0;) {
            const Stretch of = stretch(group);
            if (of.first <= row && row < of.end)
                return group;
        }
        return params.groups;
    }
};

}  // namespace dg::sm90
