// FP4 on its way to the tensor core: two warps read packed rows of a stage (64 bytes hold the 128 values of a K
// block) and write them as FP8 where the products look for them.
#pragma once

#include <dg/common/fp4.cuh>
#include <dg/scheduler/tiles.cuh>

namespace dg::sm90 {

template <class C>
struct Unpacker {
    using L = Layout<C>;
    static constexpr u32 kThreads = kUnpackers * 32;
    static constexpr u32 kPieces = 8;  // of 16 values in a row

    const Room<C>& room;

    // All rows of one operand of a stage. The 128-byte swizzle has piece c of row r at c ^ (r % 8).
    template <u32 kRows>
    __device__ __forceinline__ static void unpack(Shared packed, Shared values, u32 thread) {
        static_assert(kRows * kPieces % kThreads == 0 && kThreads / kPieces % 8 == 0);
        // Pieces of a thread, and rows between two of them.
        constexpr u32 kEach = kRows * kPieces / kThreads, kFar = kThreads / kPieces;
        constexpr u32 kBatch = kEach % 4 == 0 ? 4 : kEach % 3 == 0 ? 3 : kEach % 2 == 0 ? 2 : 1;
        const u32 row = thread / kPieces, piece = thread % kPieces;
        const Shared from = packed + thread * 8,
                     to = values + row * kBlockK + ((piece ^ row % 8) * 16);  // also of the rows that follow
        // Many at once: one warp alone on its scheduler would wait for each.
#pragma unroll 1
        for (u32 first = 0; first < kEach; first += kBatch) {
            uint2 codes[kBatch];
#pragma unroll
            for (u32 i = 0; i < kBatch; ++i)
                codes[i] = load_shared_words2(from + (first + i) * kThreads * 8);
#pragma unroll
            for (u32 i = 0; i < kBatch; ++i)
                store_shared4(to + (first + i) * kFar * kBlockK,
                              uint4{e2m1::to_e4m3(codes[i].x), e2m1::to_e4m3(codes[i].x >> 16),
                                    e2m1::to_e4m3(codes[i].y), e2m1::to_e4m3(codes[i].y >> 16)});
        }
    }

    template <class Work>
    __device__ __forceinline__ void run(const Work& work) const {
        const u32 thread = threadIdx.x % kThreads;
        Ring<C::kStages> ring;
        work.template for_each<true>([&](Tile tile, typename Work::Next next) {
            for (u32 k = tile.first_k; k < tile.last_k; ++k, ring.advance()) {
                const u32 s = ring.stage;
                mbarrier_wait(room.packed() + s * 8, ring.parity);
                if constexpr (C::kPFp4)
                    unpack<L::kBlockP>(room.packed_p(s), room.stage_p(s), thread);
                if constexpr (C::kQFp4)
                    unpack<C::kBlockQ>(room.packed_q(s), room.stage_q(s), thread);
                fence_async_shared();
                __syncwarp();
                if (threadIdx.x % 32 == 0)
                    mbarrier_arrive(room.full + s * 8);
            }
            next();
        });
    }
};

}  // namespace dg::sm90
