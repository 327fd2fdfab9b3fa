// Tiles of products in groups: which rows belong to which group is known on the device alone.
//
// One warp of a block, the scheduler, reads labels, counts or end rows and hands tiles on through a few slots of
// shared memory: to the thread that loads, to the warps that unpack, and to those that multiply. So whoever works
// on a tile waits for none of these reads, and all of them agree.
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

    // To the block's tile of the next wave, one place further on. The last tiles of groups are short and lie at
    // regular places: without that, with two tiles a group and an even grid, half of the blocks would get all of them
    // and the others none. Tiles of labels are all alike but for a few, and rather read the same rows again.
    __device__ __forceinline__ void next_wave(u64& t) {
        const bool last = turn + 1 == gridDim.x;
        t += last ? 1 : gridDim.x + 1;
        turn = last ? 0 : turn + 1;
    }

    // A tile of a group, by the tile's place and the group's first row of A.
    __device__ __forceinline__ Tile tile(Band<C> place, u32 first_row, u32 group) const {
        Tile made{place.p * L::kBlockP, place.q * C::kBlockQ, 0, params.k_blocks, group};
        (C::kSwap ? made.row_q : made.row_p) += first_row;
        return made;
    }
    __device__ __forceinline__ static Band<C> place(u32 t, u32 tiles_a, u32 tiles_b) {
        return C::kSwap ? Band<C>(t, tiles_b, tiles_a) : Band<C>(t, tiles_a, tiles_b);
    }
    __device__ __forceinline__ static u32 row_a(const Tile& tile) {
        return C::kSwap ? tile.row_q : tile.row_p;
    }

    // Bits of this lane's rows of a tile that lie before `row`.
    __device__ __forceinline__ u32 up_to(u32 row) const {
        return (1u << (row > lane ? cdiv(row - lane, 32u) : 0)) - 1;
    }

    // Labels: each tile of rows once for every group that it has rows of, the lowest group first. Rows in runs
    // that begin at multiples of the tile have one label each.
    __device__ __forceinline__ void by_labels() {
        constexpr u32 kEach = cdiv(kRowsA, 32u);
        const u32 tiles_a = C::kSwap ? params.tiles_q : params.tiles_p;
        const u32 all = tiles_a * tiles_b;  // a D of 2^32 tiles would fill more memory than there is
#pragma unroll 1
        for (u32 t = blockIdx.x; t < all; t += gridDim.x) {
            const Band<C> at = place(t, tiles_a, tiles_b);
            const u32 first = (C::kSwap ? at.q : at.p) * kRowsA, size = min(kRowsA, rows - first);
            const i32* from = params.layout + first + lane;
            u32 label[kEach];
#pragma unroll
            for (u32 i = 0; i < kEach; ++i)
                label[i] = lane + i * 32 < size ? static_cast<u32>(__ldg(from + i * 32)) : kEnd;
#pragma unroll 1
            for (u32 floor = 0;;) {
                u32 lowest = kEnd;
#pragma unroll
                for (u32 i = 0; i < kEach; ++i)
                    lowest = label[i] >= floor ? min(lowest, label[i]) : lowest;
                lowest = __reduce_min_sync(0xffffffff, lowest);
                if (lowest >= params.groups)
                    break;
                u32 mine = 0;  // bits of this lane's rows that are the group's
#pragma unroll
                for (u32 i = 0; i < kEach; ++i)
                    mine |= (label[i] == lowest) << i;
                // Rows of the tile from the group's first to its last one, and the bits of those that this lane has.
                const u32 begin = __reduce_min_sync(0xffffffff, mine ? lane + (__ffs(mine) - 1) * 32 : kEnd);
                const u32 end = __reduce_max_sync(0xffffffff, mine ? lane + (31 - __clz(mine)) * 32 + 1 : 0);
                const bool mixed = __any_sync(0xffffffff, mine != (up_to(end) & ~up_to(begin)));
                give(tile(at, 0, lowest), Rows{first + end, 0, mixed, first + begin});
                floor = lowest + 1;
            }
        }
    }

    // A bulk copy may begin at multiples of 16 bytes of a line alone: at any other place it is an illegal instruction
    // (one H200, driver 580). Lines of row scales begin at the tile's first row, and so do those of an A whose rows
    // are contiguous, which is bfloat16.
    static constexpr u32 kFirstRows = 16 / ((C::kSwap ? C::kQMnMajor : C::kPMnMajor) ? 2 : sizeof(float));

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
            u32 sum = tiles_a * tiles_b;
#pragma unroll
            for (u32 step = 1; step < 32; step *= 2) {
                const u32 other = __shfl_up_sync(0xffffffff, sum, step);
                sum += lane >= step ? other : 0;
            }
            const u32 all = __shfl_sync(0xffffffff, sum, 31);
            for (; t < before + all; next_wave(t)) {
                const u32 within = static_cast<u32>(t - before);
                const u32 index =
                    __popc(__ballot_sync(0xffffffff, sum <= within));  // lanes whose tiles end before
                const u32 own_a = __shfl_sync(0xffffffff, tiles_a, index),
                          own_first = __shfl_sync(0xffffffff, first, index);
                const u32 begin = __shfl_sync(0xffffffff, sum, index) - own_a * tiles_b;
                Tile found = tile(place(within - begin, own_a, tiles_b), own_first, base + index);
                const Rows own{__shfl_sync(0xffffffff, mine.end, index),
                               __shfl_sync(0xffffffff, mine.zeros, index), disordered,
                               __shfl_sync(0xffffffff, mine.first, index)};
                if (row_a(found) >= own.end)
                    found.last_k = 1;  // only rows that become zero
                give(found, own);
            }
            before += all;
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
    // until then and takes no register.
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
