// Tiles of products in groups: which rows belong to which group is known on the device alone.
//
// One warp of a block, the scheduler, reads labels, counts or end rows and hands tiles on through a few slots of
// shared memory: to the thread that loads, to the warps that unpack and carry, and to those that multiply. So whoever
// works on a tile waits for none of these reads, and all of them agree.
//
// What the device holds is not trusted: a label outside of [0, groups) is padding; of counts and ends says rows.cuh.
#pragma once

#include <dg/scheduler/rows.cuh>

namespace dg::sm90 {

// The side of the scheduler: a whole warp runs it.
template <class C>
struct Scheduler {
    using L = Layout<C>;
    // Of A's rows and of B's.
    static constexpr u32 kRowsA = C::kSwap ? C::kBlockQ : L::kBlockP;
    static constexpr u32 kRowsB = C::kSwap ? L::kBlockP : C::kBlockQ;
    static constexpr u32 kEnd = ~0u;

    const Params& params;
    const Room<C>& room;
    u32 lane, rows, tiles_b;
    u32 turn = blockIdx.x;  // the block's place in this wave of tiles
    Ring<kSlots> ring;

    __device__ __forceinline__ Scheduler(const Params& all, const Room<C>& block)
        : params(all),
          room(block),
          lane(threadIdx.x % 32),
          rows(C::kSwap ? all.rows_q : all.rows_p),
          tiles_b(C::kSwap ? all.tiles_p : all.tiles_q) {}

    __device__ __forceinline__ void run() {
        if constexpr (C::kGrouping == kContiguous)
            by_labels();
        else
            by_ends();
        give(Tile{kEnd}, Rows{});
    }

    __device__ __forceinline__ void give(const Tile& tile, Rows rows) {
        if (lane == 0) {
            const Shared to = room.slot(ring.stage);
            mbarrier_wait(room.taken() + ring.stage * 8, ring.parity ^ 1);
            store_shared4(to, uint4{tile.row_p, tile.row_q, tile.last_k, tile.group});
            store_shared4(to + 16, uint4{rows.end, rows.zeros, rows.mixed, rows.begin});
            mbarrier_arrive(room.given() + ring.stage * 8);
        }
        __syncwarp();
        ring.advance();
    }

    // To the block's tile of the next wave, one place further on. The last tiles of groups are short, those of padding
    // have no rows, and both lie at regular places: without that, with two tiles a group and an even grid, half of the
    // blocks would get all of them and the others none. Large tiles of labels are hardly ever padding alone, and rather
    // read the same rows again.
    template <class Place>
    __device__ __forceinline__ void next_wave(Place& t) {
        constexpr bool kPlain = C::kGrouping == kContiguous && kRowsA >= 128;
        const bool last = !kPlain && turn + 1 == gridDim.x;
        t += last ? 1 : gridDim.x + !kPlain;
        turn = last ? 0 : turn + 1;
    }

    // A tile of a group, by its places along A and B and the row of A from which the first one counts.
    __device__ __forceinline__ Tile tile(u32 a, u32 b, u32 first_row, u32 group) const {
        const u32 row_a = first_row + a * kRowsA, row_b = b * kRowsB;
        return {C::kSwap ? row_b : row_a, C::kSwap ? row_a : row_b, 0, params.k_blocks, group};
    }
    __device__ __forceinline__ static u32 row_a(const Tile& tile) {
        return C::kSwap ? tile.row_q : tile.row_p;
    }

    // Bits of this lane's rows of a tile that lie before `row`.
    __device__ __forceinline__ u32 up_to(u32 row) const {
        return (1u << (row > lane ? cdiv(row - lane, 32u) : 0)) - 1;
    }

    // Sums over the lanes up to this one.
    __device__ __forceinline__ u32 scan(u32 sum) const {
#pragma unroll
        for (u32 step = 1; step < 32; step *= 2) {
            const u32 other = __shfl_up_sync(0xffffffff, sum, step);
            sum += lane >= step ? other : 0;
        }
        return sum;
    }

    // Labels: each tile of rows once for every group that it has rows of. Tiles whose first and last row are of two
    // groups are dealt out in two shares, since the blocks that got both would have a tile more than the others.
    __device__ __forceinline__ void by_labels() {
        // Tiles of rows in a band, of which a lane knows one.
        constexpr u32 kHigh = C::kSwap ? 32 : Band<C>::kMostTiles;
        static_assert(kHigh <= 32);
        const u32 tiles_a = C::kSwap ? params.tiles_q : params.tiles_p;
        u32 t = turn, before = 0;  // 2^32 shares of a D would fill more memory than there is
#pragma unroll 1
        for (u32 low = 0; low < tiles_a; low += kHigh) {
            const u32 own = lane < min(kHigh, tiles_a - low) ? shares(low + lane) : 0;
            const u32 sum = scan(own), column = __shfl_sync(0xffffffff, sum, 31);
#pragma unroll 1
            for (; t < before + column * tiles_b; next_wave(t)) {
                const u32 b = (t - before) / column, rest = (t - before) % column;
                // Lanes whose shares end before.
                const u32 a = __popc(__ballot_sync(0xffffffff, sum <= rest));
                const u32 count = __shfl_sync(0xffffffff, own, a);
                const bool last = __shfl_sync(0xffffffff, sum, a) == rest + 1;
                give_groups(low + a, b, last ? count - 1 : 0, last ? kEnd : 1);
            }
            before += column * tiles_b;
        }
    }

    __device__ __forceinline__ u32 shares(u32 a) const {
        const i32* from = params.layout + a * kRowsA;
        const u32 first = __ldg(from), last = __ldg(from + min(kRowsA, rows - a * kRowsA) - 1);
        return max(first, last) < params.groups && first != last ? 2 : 1;
    }

    // A tile by its places along A and B, once for each group that it has rows of, from the lowest on: those of
    // number `from` to `to` - 1.
    __device__ __forceinline__ void give_groups(u32 a, u32 b, u32 from, u32 to) {
        constexpr u32 kEach = cdiv(kRowsA, 32u);
        const u32 first = a * kRowsA, size = min(kRowsA, rows - first);
        u32 label[kEach];
#pragma unroll
        for (u32 i = 0; i < kEach; ++i) {
            const u32 row = lane + i * 32;
            label[i] = row < size ? static_cast<u32>(__ldg(params.layout + first + row)) : kEnd;
        }
#pragma unroll 1
        for (u32 floor = 0, n = 0; n < to; ++n) {
            u32 lowest = kEnd;
#pragma unroll
            for (u32 i = 0; i < kEach; ++i)
                lowest = label[i] >= floor ? min(lowest, label[i]) : lowest;
            lowest = __reduce_min_sync(0xffffffff, lowest);
            if (lowest >= params.groups)
                return;
            floor = lowest + 1;
            if (n < from)
                continue;
            u32 mine = 0;  // bits of this lane's rows that are the group's
#pragma unroll
            for (u32 i = 0; i < kEach; ++i)
                mine |= (label[i] == lowest) << i;
            // Rows of the tile from the group's first to its last one, and the bits of those that this lane has.
            const u32 begin = __reduce_min_sync(0xffffffff, mine ? lane + (__ffs(mine) - 1) * 32 : kEnd);
            const u32 end = __reduce_max_sync(0xffffffff, mine ? lane + (31 - __clz(mine)) * 32 + 1 : 0);
            const bool mixed = __any_sync(0xffffffff, mine != (up_to(end) & ~up_to(begin)));
            give(tile(a, b, 0, lowest), Rows{first + end, 0, mixed, first + begin});
        }
    }

    // A bulk copy may begin at multiples of 16 bytes of a line alone: at any other place it is an illegal instruction
    // (one H200, driver 580). Lines of row scales begin at the tile's first row, and so do those of an A whose rows
    // are contiguous, which is bfloat16.
    static constexpr u32 kFirstRows = 16 / ((C::kSwap ? C::kQMnMajor : C::kPMnMajor) ? 2 : sizeof(float));

    // Whether groups whose one tile has few rows come last, of each 32. Tiles of two and of four parts of 64 rows take
    // up to twice as long as those of one: by chance, some blocks would get all of the long ones.
    static constexpr bool kShortLast = C::kGrouping == kMasked && !C::kSwap && kRowsA > 128;

    // Where a lane's tiles begin among those of 32 groups, and how many there are.
    struct Places {
        u32 begin, all;
    };
    __device__ __forceinline__ Places in_order(u32 own, u32 most_rows) const {
        Places found{0, 0};
        const u32 mine = kShortLast ? cdiv(most_rows, 64u) : 1;
#pragma unroll 1
        for (u32 parts = kShortLast ? kRowsA / 64 : 1; parts > 0; --parts) {
            const u32 sum = scan(mine == parts ? own : 0);
            if (mine == parts)
                found.begin = found.all + sum - own;
            found.all += __shfl_sync(0xffffffff, sum, 31);
        }
        return found;
    }

    // Counts or ends: the groups' tiles one after the other. A lane knows the tiles of one group, 32 groups at a
    // time; a scan over them tells where each begins.
    __device__ __forceinline__ void by_ends() {
        const Ownership<C> owners(params);
        bool disordered = false;
        if constexpr (C::kGrouping == kPsum)
            for (u32 base = 0; base < params.groups; base += 32)
                disordered |= __any_sync(0xffffffff, owners.stretch(base + lane).disordered) != 0;
        u64 t = turn, before = 0;
        for (u32 base = 0; base < params.groups; base += 32) {
            const Stretch mine = owners.stretch(base + lane);
            const u32 first = mine.first / kFirstRows * kFirstRows, last = max(mine.end, mine.zeros);
            const u32 tiles_a = last > mine.first ? cdiv(last - first, kRowsA) : 0;
            const u32 own = tiles_a * tiles_b;
            const Places places = in_order(own, tiles_a > 1 ? kRowsA : last - first);
            for (; t < before + places.all; next_wave(t)) {
                const u32 within = static_cast<u32>(t - before);
                // The lane whose tile it is.
                const u32 index = __ffs(__ballot_sync(0xffffffff, within - places.begin < own)) - 1;
                const u32 own_a = __shfl_sync(0xffffffff, tiles_a, index),
                          own_first = __shfl_sync(0xffffffff, first, index);
                const u32 begin = __shfl_sync(0xffffffff, places.begin, index);
                const Band<C> at = C::kSwap ? Band<C>(within - begin, tiles_b, own_a)
                                            : Band<C>(within - begin, own_a, tiles_b);
                Tile found = tile(C::kSwap ? at.q : at.p, C::kSwap ? at.p : at.q, own_first, base + index);
                const Rows own{__shfl_sync(0xffffffff, mine.end, index),
                               __shfl_sync(0xffffffff, mine.zeros, index), disordered,
                               __shfl_sync(0xffffffff, mine.first, index)};
                if (row_a(found) >= own.end)
                    found.last_k = 1;  // only rows that become zero
                give(found, own);
            }
            before += places.all;
        }
    }
};

// The side of those who work on the tiles: like Tiles, but each tile comes out of a slot.
template <class C>
struct Queue {
    const Room<C>& room;

    // The tile that comes as number n.
    __device__ __forceinline__ Tile wait(u32 n) const {
        const u32 slot = n % kSlots;
        mbarrier_wait(room.given() + slot * 8, n / kSlots % 2);
        const uint4 words = load_shared4(room.slot(slot));
        return {words.x, words.y, 0, words.z, words.w, room.slot(slot) + 16};
    }

    // Tells, when called, which tile comes next.
    struct Next {
        const Queue& queue;
        u32 n;
        const Tile& now;
        Tile& tile;

        // The same one at the end.
        __device__ __forceinline__ Tile operator()() const {
            tile = queue.wait(n);
            return tile.row_p == Scheduler<C>::kEnd ? now : tile;
        }
    };

    // A slot goes back once its tile is done with: what of it is needed at the end of the tile alone stays there
    // until then and takes no register. kHeld: that is when the next one is done with.
    template <bool kWarp, bool kHeld = false, class Body>
    __device__ __forceinline__ void for_each(Body body) const {
        u32 n = 0;
        for (Tile tile = wait(n); tile.row_p != Scheduler<C>::kEnd; ++n) {
            Tile next;
            body(tile, Next{*this, n + 1, tile, next});
            if constexpr (kWarp)
                __syncwarp();
            if ((!kWarp || threadIdx.x % 32 == 0) && n >= kHeld)
                mbarrier_arrive(room.taken() + (n - kHeld) % kSlots * 8);
            tile = next;
        }
    }
};

}  // namespace dg::sm90
