// The Hopper matrix product: D[M, N] = C[M, N] + A[M, K] * B[N, K]^T on FP8 operands with scales, on FP4, or on
// bfloat16; D in bfloat16 or float32. One of them, or many in groups.
//
// One thread fills a ring of K blocks, 128 bytes of every row, with the row scales that belong to them
// (load.cuh), FP4 by way of warps that unpack it (unpack.cuh); consumer warpgroups multiply them (multiply.cuh)
// and store the tile (store.cuh), or another warp does (carry.cuh). The blocks walk the tiles in waves, which each
// thread computes (tiles.cuh) or, of groups, one warp finds out (groups.cuh). What Config's constants mean, and
// which go together, says sm90_layout.cuh.
//
// Tiles of some configurations (kBehind) leave while the tensor core has the first products of the next one, and
// their slots are held until that one is done with.
#pragma once

#include <dg/epilogue/carry.cuh>
#include <dg/epilogue/parts.cuh>
#include <dg/mma/load.cuh>
#include <dg/mma/unpack.cuh>
#include <dg/scheduler/groups.cuh>

namespace dg::sm90 {

// Barriers, and what a split tile waits for.
template <class C>
__device__ __forceinline__ void make_barriers(const Params& params, const Room<C>& room) {
    using L = Layout<C>;
    prefetch_map(&params.p_map);
    prefetch_map(&params.q_map);
    for (u32 s = 0; s < C::kStages; ++s) {
        mbarrier_init(room.full + s * 8, 1 + (L::kUnpacks ? kUnpackers : 0));
        mbarrier_init(room.empty + s * 8, C::kConsumers * 4);
        if constexpr (L::kUnpacks)
            mbarrier_init(room.packed() + s * 8, 1);
    }
    if constexpr (L::kGrouped)
        for (u32 s = 0; s < kSlots; ++s) {
            mbarrier_init(room.given() + s * 8, 1);
            mbarrier_init(room.taken() + s * 8,
                          1 + (L::kUnpacks ? kUnpackers : 0) + L::kCarries + C::kConsumers * 4);
        }
    if constexpr (L::kCarries)
        for (u32 w = 0; w < C::kConsumers; ++w) {
            mbarrier_init(room.filled(w), 4);
            mbarrier_init(room.free(w), 1);
        }
    if constexpr (C::kSplit > 1) {
        const u32 units = (L::kUnits + C::kSplit - 1 - room.rank) / C::kSplit;  // that this block owns
        mbarrier_init(room.parts, 1);
        mbarrier_expect_bytes(room.parts, C::kSplit * units * 8 * C::kBlockQ * 4);
    }
    fence_barrier_init();
}

// The tiles of a block, as those who work on them see them.
template <class C>
__device__ __forceinline__ auto tiles_of(const Params& params, const Room<C>& room) {
    if constexpr (Layout<C>::kGrouped)
        return Queue<C>{room};
    else
        return Tiles<C>(params, room.rank);
}

template <class C, class Instruction, class Work>
__device__ __forceinline__ void consume(const Params& params, const Room<C>& room, const Work& tiles, u32 w) {
    Multiplier<C, Instruction> me(params, room, w);
    Store<C, Instruction> store(params, room);
    if (w + 1 == C::kConsumers)
        me.pass_turn();  // the first turn belongs to warpgroup 0
    using Me = Multiplier<C, Instruction>;
    if constexpr (Layout<C>::kBehind) {
        typename Me::Totals total;
        Tile last{};
        auto leave = [&] {
            if (!me.first_tile)
                store.run(total, me, last);
        };
        tiles.template for_each<true, true>([&](Tile tile, typename Work::Next next) {
            me.run(total, tile, [&] {
                leave();
                return next();
            });
            last = tile;
        });
        leave();
    } else {
        tiles.template for_each<true, false>([&](Tile tile, typename Work::Next next) {
            typename Me::Totals total;
            me.run(total, tile, next);
            if constexpr (C::kStream) {
                const Parts<C, Instruction> parts{params, tiles};
                if (tile.last_k < params.k_blocks)
                    return parts.give(total, me);
                if (tile.first_k > 0)
                    parts.take(total, me);
            }
            store.run(total, me, tile);
        });
    }
    store.finish();
    if (w == 0)
        me.take_turn();  // takes the turn that is left over, so that the barrier ends as it began
}

// What a warp of the producer's warpgroup does. Each has a way out of its own: what another one needs takes none of
// its registers.
template <class C, class Work>
__device__ __forceinline__ void produce(const Params& params, const Room<C>& room, const Work& tiles,
                                        u32 role) {
    using L = Layout<C>;
    if (role == 0) {
        if (elect_one())
            Loader<C>{params, room}.run(tiles);
        return;
    }
    if constexpr (L::kGrouped)
        if (role == 1)
            return Scheduler<C>(params, room).run();
    if constexpr (L::kCarries)
        if (role == 2)
            return Carrier<C>{params, room}.run(tiles);
    if constexpr (L::kUnpacks)
        if (role >= 4 - kUnpackers)
            Unpacker<C>{room}.run(tiles);
}

template <class C, class Instruction>
__device__ __forceinline__ void gemm(const Params& params) {
    using L = Layout<C>;
    extern __shared__ unsigned char raw[];
    Shared base = shared_address(raw);
    base += (1024 - base % 1024) % 1024;
    // One register for the whole kernel: the compiler would compute it anew at each use.
    asm volatile("" : "+r"(base));
    const Shared full = base + L::kBarrierOffset, empty = full + C::kStages * 8;
    const Room<C> room{base, full, empty, empty + C::kStages * 8, C::kSplit > 1 ? cluster_rank() : 0};
    if (threadIdx.x == 0)
        make_barriers(params, room);
    if constexpr (C::kSplit > 1)
        cluster_meet();
    else
        __syncthreads();
    wait_for_previous_kernel();
    const auto tiles = tiles_of<C>(params, room);
    const u32 warp = __shfl_sync(0xffffffff, threadIdx.x / 32, 0);
    if (warp < 4) {
        registers_down<C::kProducerRegisters>();
        // Known to be the same number, the roles would be reached through a table of addresses.
        u32 role = warp;
        keep(role);
        produce<C>(params, room, tiles, role);
    } else {
        registers_up<C::kConsumerRegisters>();
        consume<C, Instruction>(params, room, tiles, warp / 4 - 1);
    }
}

}  // namespace dg::sm90
