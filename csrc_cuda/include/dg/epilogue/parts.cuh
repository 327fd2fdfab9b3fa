// Tiles that are cut along K (kStream): the sums of a part go to the block that has the end of the tile, through
// global memory.
//
// Each block has room for one tile's sums in the workspace, and each of its warps a flag. A warp sets the flag once
// its sums are there; the same warp of the other block waits for it, adds the sums and clears it again, so that a
// kernel finds all flags clear. Several launches share a workspace as long as they run one after the other.
#pragma once

#include <dg/mma/multiply.cuh>
#include <dg/ptx/flag.cuh>

namespace dg::sm90 {

template <class C, class Instruction>
struct Parts {
    using L = Layout<C>;
    using Me = Multiplier<C, Instruction>;
    using Totals = typename Me::Totals;
    static constexpr u32 kSums = Promotion<C>::kSums;

    const Params& params;
    const Tiles<C>& tiles;

    __device__ __forceinline__ u32* flag(const Me& me, u32 block) const {
        return static_cast<u32*>(params.workspace) + block * kFlagsBlock + me.w * 4 + me.warp;
    }
    // Four sums of this thread; those of a warpgroup's threads lie beside each other.
    __device__ __forceinline__ float4* room(const Me& me, u32 block) const {
        auto* sums =
            reinterpret_cast<float4*>(static_cast<u32*>(params.workspace) + kMostBlocks * kFlagsBlock);
        return sums + (static_cast<u64>(block) * C::kConsumers + me.w) * (C::kSubs * kSums / 4 * kWarpgroup) +
               threadIdx.x % kWarpgroup;
    }

    __device__ __forceinline__ void give(const Totals& total, const Me& me) const {
        float4* to = room(me, blockIdx.x);
#pragma unroll
        for (u32 sub = 0; sub < C::kSubs; ++sub)
#pragma unroll
            for (u32 i = 0; i < kSums; i += 4) {
                const float* v = &total[sub][i];
                to[(sub * kSums + i) / 4 * kWarpgroup] = float4{v[0], v[1], v[2], v[3]};
            }
        __syncwarp();
        if (me.lane == 0)
            flag_set(flag(me, blockIdx.x));
    }

    // Adds what the blocks of the teams before this one have of the tile, in the order of their distance.
    __device__ __forceinline__ void take(Totals& total, const Me& me) const {
        const u32 from = tiles.begin / params.k_blocks * params.k_blocks;
        for (u32 team = tiles.team, part = tiles.begin, block = blockIdx.x; part > from;) {
            const u32 before = tiles.cut(--team);
            block -= tiles.size;
            if (before == part)
                continue;  // a team without a part
            part = before;
            u32* ready = flag(me, block);
            if (me.lane == 0)
                flag_wait(ready);
            __syncwarp();
            const float4* sums = room(me, block);
#pragma unroll
            for (u32 sub = 0; sub < C::kSubs; ++sub)
#pragma unroll
                for (u32 i = 0; i < kSums; i += 4) {
                    const float4 four = __ldcg(&sums[(sub * kSums + i) / 4 * kWarpgroup]);
                    float* v = &total[sub][i];
                    v[0] += four.x, v[1] += four.y, v[2] += four.z, v[3] += four.w;
                }
            __syncwarp();
            if (me.lane == 0)
                flag_clear(ready);
        }
    }
};

}  // namespace dg::sm90
