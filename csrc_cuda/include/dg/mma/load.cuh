// The producer: one thread fills the ring with K blocks of P and Q and with their row scales.
#pragma once

#include <dg/scheduler/tiles.cuh>

namespace dg::sm90 {

template <class C>
struct Loader {
    using L = Layout<C>;
    const Params& params;
    Room<C> room;

    // `kRows` rows of one K block.
    template <bool kMnMajor, u32 kRows>
    __device__ __forceinline__ static void load(const TensorMap* map, Shared ready, Shared to, u32 k, u32 row,
                                                u64 policy) {
        if constexpr (kMnMajor) {
            for (u32 chunk = 0; chunk < kRows / kChunkRows; ++chunk)
                tma_load(map, ready, to + chunk * kChunkBytes, row + chunk * kChunkRows, k * L::kElements,
                         policy);
        } else {
            tma_load(map, ready, to, k * L::kElements, row, policy);
        }
    }

    __device__ __forceinline__ void load_scales(const TensorMap* map, Shared ready, Shared to, u32 k,
                                                u32 row) const {
        const u32 x = C::kScaleKMajor ? k / 4 * 4 : row, y = C::kScaleKMajor ? row : k * C::kScaleSteps;
        tma_load(map, ready, to, x, y, kEvictNormal);
    }

    __device__ __forceinline__ void run(const Tiles<C>& tiles) const {
        // An operand that every block reads once streams through the L2, and leaves it to the other one.
        const bool once_p = params.tiles_q == 1, once_q = params.tiles_p == 1;
        const u64 policy_p = once_p   ? kEvictFirst
                             : once_q ? kEvictLast
                                      : kEvictNormal,
                  policy_q = once_q   ? kEvictFirst
                             : once_p ? kEvictLast
                                      : kEvictNormal;
        Ring<C::kStages> ring;
        tiles.for_each([&](Tile tile, Tile) {
            const u32 row_p = tile.p * L::kBlockP, row_q = tile.q * C::kBlockQ;
            for (u32 k = tile.first_k; k < tile.last_k; ++k, ring.advance()) {
                const u32 s = ring.stage;
                const Shared ready = room.full + s * 8;
                mbarrier_wait(room.empty + s * 8, ring.parity ^ 1);
                mbarrier_expect_bytes(ready, L::kLoadBytes);
                load<C::kPMnMajor, L::kBlockP>(&params.p_map, ready, room.stage_p(s), k, row_p, policy_p);
                load<C::kQMnMajor, L::kRowsQ>(&params.q_map, ready, room.stage_q(s), k, row_q, policy_q);
                if constexpr (C::kScaleP == kScaleRow)
                    load_scales(&params.p_scale_map, ready, room.scales_p(s), k, row_p);
                if constexpr (C::kScaleQ == kScaleRow)
                    load_scales(&params.q_scale_map, ready, room.scales_q(s), k, row_q);
            }
        });
        let_next_kernel_start();
    }
};

}  // namespace dg::sm90
