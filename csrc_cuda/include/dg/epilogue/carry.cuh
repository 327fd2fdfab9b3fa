// The carrier: a warp that has nothing else to do takes the boxes that consumers have filled to D.
//
// A consumer that does it itself waits until the copy unit has taken its orders, 280 clocks a tile (192 x 128, one
// H200), while the tensor core has nothing to do. Copying rows of boxes that are not whole holds it up as well: one
// such box a group cost 2 % (128 x 192, 4 groups of about 8192 rows).
#pragma once

#include <dg/epilogue/store.cuh>

namespace dg::sm90 {

template <class C>
struct Carrier {
    using L = Layout<C>;
    static constexpr u32 kPanels = L::kPanels;

    const Params& params;
    const Room<C>& room;

    // The whole warp.
    template <class Work>
    __device__ __forceinline__ void run(const Work& work) const {
        const bool leader = elect_one();  // the same lane at all times, as in a consumer
        u32 parity = 0;
        work.template for_each<true>([&](Tile tile, typename Work::Next next) {
            next();
#pragma unroll 1
            for (u32 w = 0; w < C::kConsumers; ++w) {
                mbarrier_wait(room.filled(w), parity);
                take(w, tile, leader);
            }
            if (leader) {
                tma_store_commit();
                tma_store_wait_read<0>();  // shared memory ends with the block, too
            }
            __syncwarp();
            if (leader) {
#pragma unroll 1
                for (u32 w = 0; w < C::kConsumers; ++w)
                    mbarrier_arrive(room.free(w));
            }
            parity ^= 1;
        });
    }

    // The boxes of a warpgroup.
    __device__ __forceinline__ void take(u32 w, const Tile& tile, bool leader) const {
        const Rows of = L::kGrouped ? Rows::of(tile) : Rows{};
#pragma unroll 1
        for (u32 i = 0; i < C::kSubs * 4; ++i) {
            const u32 sub = i / 4, warp = i % 4;
            const u32 row = tile.row_p + (w * C::kSubs + sub) * 64 + warp * 16;
            const Shared boxes = room.boxes(w, warp, sub * kPanels);
            if (Output<C>::whole(row, of)) {
                if (leader) {
#pragma unroll
                    for (u32 panel = 0; panel < kPanels; ++panel)
                        send_box<C>(params, boxes + panel * kBoxBytes, tile.row_q + panel * kBoxColumns, row,
                                    tile.group);
                }
            } else if (Output<C>::any(row, of)) {
#pragma unroll 1
                for (u32 panel = 0; panel < kPanels; ++panel)
                    copy_box(Output<C>(params), boxes + panel * kBoxBytes, tile.row_q + panel * kBoxColumns,
                             row, threadIdx.x % 32, tile, of);
            }
        }
    }
};

}  // namespace dg::sm90
