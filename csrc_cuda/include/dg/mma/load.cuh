// The producer: one thread fills the ring with K blocks of P and Q and with their row scales.
#pragma once

#include <dg/scheduler/rows.cuh>

namespace dg::sm90 {

template <class C>
struct Loader {
    using L = Layout<C>;
    const Params& params;
    const Room<C>& room;

    // A box at (x, y), of matrix `group` where the tensor has several.
    template <bool kGrouped>
    __device__ __forceinline__ static void box(const TensorMap* map, Shared ready, Shared to, u32 x, u32 y,
                                               u32 group, u64 policy) {
        if constexpr (kGrouped)
            tma_load(map, ready, to, x, y, group, policy);
        else
            tma_load(map, ready, to, x, y, policy);
    }

    // `kRows` rows of one K block.
    template <bool kMnMajor, bool kGrouped, u32 kRows>
    __device__ __forceinline__ static void load(const TensorMap* map, Shared ready, Shared to, u32 k, u32 row,
                                                u32 group, u64 policy) {
        if constexpr (kMnMajor) {
            // Beside the scheduler of groups there are few registers left.
#pragma unroll(kGrouped ? 1 : kRows / kChunkRows)
            for (u32 chunk = 0; chunk < kRows / kChunkRows; ++chunk)
                box<kGrouped>(map, ready, to + chunk * kChunkBytes, row + chunk * kChunkRows, k, group,
                              policy);
        } else {
            box<kGrouped>(map, ready, to, k, row, group, policy);
        }
    }

    template <bool kGrouped>
    __device__ __forceinline__ void load_scales(const TensorMap* map, Shared ready, Shared to, u32 k, u32 row,
                                                u32 group) const {
        const u32 x = C::kScaleKMajor ? k / 4 * 4 : row, y = C::kScaleKMajor ? row : k * C::kScaleSteps;
        box<kGrouped>(map, ready, to, x, y, group, kEvictNormal);
    }

    // How to keep P and Q in the L2: an operand that every block reads once streams through it, and leaves it to
    // the other one. Of products in groups that is B where few rows of A meet all of it.
    struct Policies {
        u64 p, q;
    };
    __device__ __forceinline__ Policies policies() const {
        if constexpr (L::kGrouped)
            return {C::kSwap ? kEvictFirst : kEvictNormal, C::kSwap ? kEvictLast : kEvictNormal};
        const bool once_p = params.tiles_q == 1, once_q = params.tiles_p == 1;
        return {once_p   ? kEvictFirst
                : once_q ? kEvictLast
                         : kEvictNormal,
                once_q   ? kEvictFirst
                : once_p ? kEvictLast
                         : kEvictNormal};
    }

    template <class Work>
    __device__ __forceinline__ void run(const Work& work) const {
        const Policies policy = policies();
        Ring<C::kStages> ring;
        work.template for_each<false>([&](Tile tile, typename Work::Next next) {
            next();  // at the end it would take registers that FP4 does not leave
            const Loaded<C> parts = Loaded<C>::of(tile);
            for (u32 k = tile.first_k; k < tile.last_k; ++k, ring.advance()) {
                const u32 s = ring.stage;
                const Shared ready = room.full + s * 8, packed = room.packed() + s * 8;
                mbarrier_wait(room.empty + s * 8, ring.parity ^ 1);
                if constexpr (L::kLoadBytes > 0)
                    mbarrier_expect_bytes(ready, L::kLoadBytes - parts.left_out());
                else
                    mbarrier_arrive(ready);  // all of the stage is unpacked, and there are no row scales
                if constexpr (L::kUnpacks)
                    mbarrier_expect_bytes(packed, L::kPackedP + L::kPackedQ);
                if constexpr (L::kPartLoads) {
#pragma unroll 1
                    for (u32 part = parts.from; part < parts.to; ++part)
                        load<C::kPMnMajor, L::kGroupedP, 64>(
                            &params.p_map, ready, room.stage_p(s) + part * 64 * kBlockK, k * L::kElements,
                            tile.row_p + part * 64, tile.group, policy.p);
                } else {
                    load<C::kPMnMajor, L::kGroupedP, L::kBlockP>(
                        &params.p_map, C::kPFp4 ? packed : ready,
                        C::kPFp4 ? room.packed_p(s) : room.stage_p(s),
                        k * (C::kPFp4 ? L::kPackedBytes : L::kElements), tile.row_p, tile.group, policy.p);
                }
                load<C::kQMnMajor, L::kGroupedQ, L::kRowsQ>(
                    &params.q_map, C::kQFp4 ? packed : ready, C::kQFp4 ? room.packed_q(s) : room.stage_q(s),
                    k * (C::kQFp4 ? L::kPackedBytes : L::kElements), tile.row_q, tile.group, policy.q);
                if constexpr (C::kScaleP == kScaleRow)
                    load_scales<L::kGroupedP>(&params.p_scale_map, ready, room.scales_p(s), k, tile.row_p,
                                              tile.group);
                if constexpr (C::kScaleQ == kScaleRow)
                    load_scales<L::kGroupedQ>(&params.q_scale_map, ready, room.scales_q(s), k, tile.row_q,
                                              tile.group);
            }
        });
        let_next_kernel_start();
    }
};

}  // namespace dg::sm90
