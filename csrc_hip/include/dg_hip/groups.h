// Which rows of a tile belong to which group. Labels and end rows are a caller's values on the device: whatever they
// are, no row outside the operands is named.
//
// A tile whose rows belong to several groups is multiplied once for each of them, with that group's rows moved
// together, so any order of labels is right and a tile of one group costs one product.
#pragma once

#include <dg_hip/arch.h>

namespace dg_hip {

enum class Grouping : i32 { dense, batched, batch_sum, contiguous, psum, masked, k_grouped };

constexpr i32 kNobody = -1;       // label of a row that no group owns
constexpr i32 kBecomesZero = -2;  // and of one that has to be 0 besides
constexpr i32 kNoLabel = 0x7fffffff;

// The rows of a tile that are multiplied, by their numbers among them: `first` and the ones behind it, or a list, of
// which each lane has every 64th entry.
struct Places {
    i32 low, high;  // of this lane
    bool listed;
    i32 first, count;

    // All lanes of a wave take part, with rows that are all below 64 or all not.
    DG_DEVICE i32 operator()(i32 row) const {
        if (!listed)
            return first + row;
        // Not `row < kWave ? low : high`: that picks one of two places in memory, which registers are not.
        const i32 mine = low ^ ((low ^ high) & -static_cast<i32>(row >= kWave));
        return static_cast<i32>(shuffle(static_cast<u32>(mine), static_cast<u32>(row)));
    }
    DG_DEVICE void lay_down(i32* list) const {
        const i32 own = static_cast<i32>(lane());
        if (own < count)
            store(list + own, low);
        if (own + kWave < count)
            store(list + own + kWave, high);
    }
};

// Rows of an operand by those numbers (dg_hip/operands.h says what an operand has).
template <class Operand>
struct Picked {
    Operand from;  // its rows from the tile's first one on
    Places places;

    DG_DEVICE bool direct() const { return from.direct(); }
    DG_DEVICE const u8* line(i32 row) const {
        const i32 place = places(row);
        return row < places.count ? from.line(place) : nullptr;
    }
    DG_DEVICE U32x4 part(const u8* line, i64 k) const { return from.part(line, k); }
    DG_DEVICE U32x4 piece(const u8* line, i64 k) const { return from.piece(line, k); }
};

// A tensor of int32 on the device, one value a row or a group.
struct Layout {
    const u8* base;
    i64 step;  // elements

    DG_DEVICE i32 at(i64 index) const { return load<i32>(base + index * step * 4); }
};

constexpr i64 round_up(i64 size, i64 part) {
    return ceil_div(size, part) * part;
}

// Start and end rows of the groups of a psum layout, each of a group's end row, clipped to `rows`.
struct Ends {
    Layout layout;
    i64 alignment, rows;

    DG_DEVICE i64 end(i64 group) const { return most<i64>(0, least<i64>(layout.at(group), rows)); }
    DG_DEVICE i64 start(i64 group) const {
        return group == 0 ? 0 : least(round_up(end(group - 1), alignment), rows);
    }
};

// The label of row `first + thread()`, in a tile of `rows` rows. All threads take part; 64 groups at a time are
// compared with the tile, so that hundreds of them cost a few loads.
DG_DEVICE i32 label_of_ends(const Ends& ends, i32 groups, bool zero_gaps, i64 first, i32 rows) {
    const i32 own = static_cast<i32>(thread());
    i32 label = kNobody;
    for (i64 some = 0; some < groups; some += kWave) {
        const i64 group = some + lane();
        i64 start = 0, end = 0, gap_end = 0;
        if (group < groups) {
            start = ends.start(group), end = ends.end(group);
            gap_end = zero_gaps ? least(round_up(end, ends.alignment), ends.rows) : end;
        }
        // Within the tile; a range that does not touch it becomes empty.
        const auto inside = [&](i64 row) {
            return static_cast<u32>(most<i64>(0, least<i64>(row - first, rows)));
        };
        const u32 from = inside(start), to = inside(end), gap_to = inside(gap_end);
        for (u64 left = ballot(from < to || to < gap_to); left != 0; left &= left - 1) {
            const u32 which = static_cast<u32>(__builtin_ctzll(left));
            const i32 low = static_cast<i32>(shuffle(from, which)),
                      high = static_cast<i32>(shuffle(to, which));
            const i32 gap_high = static_cast<i32>(shuffle(gap_to, which));
            if (own >= low && own < high)
                label = static_cast<i32>(some) + static_cast<i32>(which);  // the last group has the row
            else if (label == kNobody && own >= high && own < gap_high)
                label = kBecomesZero;
        }
    }
    return label;
}

// The least label above `last` among `rows` labels in LDS, kNoLabel if there is none. Every wave finds the same.
template <i32 kRows>
DG_DEVICE i32 next_label(const i32* labels, i32 last) {
    i32 best = kNoLabel;
    for (i32 row = static_cast<i32>(lane()); row < kRows; row += kWave) {
        const i32 label = load<i32>(labels + row);
        if (label > last && label < best)
            best = label;
    }
    for (u32 step = kWave / 2; step > 0; step /= 2)
        best = least(best, static_cast<i32>(shuffle(static_cast<u32>(best), lane() ^ step)));
    return static_cast<i32>(DG_UNIFORM(best));
}

// The rows with a label, in order; `list` is LDS for `kRows` of them, free again when it returns. All threads take part
// and find the same.
template <i32 kRows>
DG_DEVICE Places rows_of(const i32* labels, i32 label, i32* list) {
    Places found = {0, 0, false, -1, 0};
    i32 last = -1;
    for (i32 some = 0; some < kRows; some += kWave) {
        const i32 row = some + static_cast<i32>(lane());
        const bool mine = row < kRows && load<i32>(labels + row) == label;
        const u64 all = ballot(mine);
        if (all == 0)
            continue;
        if (found.first < 0)
            found.first = some + __builtin_ctzll(all);
        last = some + 63 - __builtin_clzll(all);
        if (mine && wave() == 0)
            store(list + found.count + __builtin_popcountll(all & ((1ull << lane()) - 1)), row);
        found.count += __builtin_popcountll(all);
    }
    found.listed = last - found.first + 1 != found.count;
    sync();
    const i32 own = static_cast<i32>(lane());
    if (found.listed && own < found.count)
        found.low = load<i32>(list + own);
    if (found.listed && own + kWave < found.count)
        found.high = load<i32>(list + own + kWave);
    sync();
    return found;
}

}  // namespace dg_hip
