// The consumers' main loop: one tile's part of K multiplied from the ring.
//
// FP8 products are summed one K block at a time and added, scaled, to float32 totals: the tensor core keeps
// fewer bits than float32 while it adds FP8 products. bfloat16 products stay in its accumulators all along.
#pragma once

#include <dg/mma/scales.cuh>
#include <dg/ptx/wgmma.cuh>

namespace dg::sm90 {

// `Instruction` is the wgmma instruction that the generated source defines for the kernel's N and types.
template <class C, class Instruction>
struct Multiplier {
    using L = Layout<C>;
    using M = Promotion<C>;
    using Factor = typename M::Factor;
    using Columns = typename M::Columns;
    using Product = typename M::Product;
    static constexpr u32 kSums = M::kSums;
    // wgmma takes 32 bytes of K: as far on in a row of a K-major tile, 16 rows on in an MN-major one.
    static constexpr u32 kSteps = kBlockK / 32;
    static constexpr u32 kStepP = (C::kPMnMajor ? 16 * 128 : 32) / 16,
                         kStepQ = (C::kQMnMajor ? 16 * 128 : 32) / 16;

    // Large tiles have the ring's stages spelled out one after the other: addresses are then parts of the
    // instructions, and as little as can be is left between a promotion and the next products. (About 1024 rows in
    // each of 6 groups, N and K 4096, 192 x 128 tiles: from 1.06 to 1.00 of the public library's time, one H200.)
    // With two parts a warpgroup the promotion of one would move behind the products of the other, for which there
    // are no registers.
    static constexpr bool kSpelled = C::kElementBytes == 1 && !C::kSwap && !C::kPairs && C::kSubs == 1 &&
                                     C::kScaleSteps == 1 && C::kStages <= 6 && !L::kUnpacks;

    using Totals = float[C::kSubs][kSums];

    // A stage of the ring as the products need it. It is made while the products before it run: between taking
    // a turn and the first product every cycle is one in which the tensor core may be idle.
    struct Stage {
        u32 index, p, q;  // low words of the descriptors
    };

    const Params& params;
    Room<C> room;
    u32 w, warp, lane;        // warpgroup, warp in it, lane
    u32 part;                 // first row of the tile that the warpgroup has
    u32 p, q;                 // low words of the descriptors at stage 0
    Shared scale_p, scale_q;  // this lane's places among the row scales of stage 0
    Ring<C::kStages> ring;    // of the stage that comes next
    Stage next;               // with kSpelled the descriptors at stage 0, made anew in each round
    u32 ready = 0;            // not 0: it is known to be full
    bool first_tile = true;
    typename M::Blocks blocks;

    __device__ __forceinline__ Multiplier(const Params& all, const Room<C>& block, u32 warpgroup)
        : params(all),
          room(block),
          w(warpgroup),
          warp(threadIdx.x % kWarpgroup / 32),
          lane(threadIdx.x % 32),
          part(w * C::kSubs * 64),
          blocks(all, part) {
        const Shared rows_p = room.stage_p(0) + part * kBlockK, rows_q = room.stage_q(0);
        p = C::kPMnMajor ? descriptor_mn128(rows_p, kChunkBytes) : descriptor_k128(rows_p);
        q = C::kQMnMajor ? descriptor_mn128(rows_q, kChunkBytes) : descriptor_k128(rows_q);
        scale_p = room.scales_p(0) + (part + warp * 16 + lane / 4) * L::kScaleStep;
        scale_q = room.scales_q(0) + lane % 4 * 2 * L::kScaleStep;
        next = Stage{0, p, q};
    }

    // The ring's stage, by the descriptors at stage 0.
    __device__ __forceinline__ Stage stage(u32 p0, u32 q0) const {
        return {ring.stage, p0 + ring.stage * (L::kStageBytes / 16), q0 + ring.stage * (L::kStageBytes / 16)};
    }

    // The stage that comes next becomes the current one, and the one after it is made ready.
    __device__ __forceinline__ Stage wait_full() {
        if (!ready)
            mbarrier_wait(room.full + ring.stage * 8, ring.parity);
        ready = 0;
        return kSpelled ? stage(next.p, next.q) : next;
    }
    __device__ __forceinline__ void advance() {
        ring.advance();
        if constexpr (kSpelled)
            return;
        next = stage(p, q);
        keep(next.p), keep(next.q);
    }
    __device__ __forceinline__ void look_ahead() {
        ready = mbarrier_done(room.full + ring.stage * 8, ring.parity);
    }

    // Consumers take turns at the tensor core: one issues its products while the others promote.
    __device__ __forceinline__ void take_turn() const {
        if constexpr (C::kConsumers > 1 && C::kOrdered)
            named_sync<2 * kWarpgroup>(1 + w);
    }
    __device__ __forceinline__ void pass_turn() const {
        if constexpr (C::kConsumers > 1 && C::kOrdered)
            named_arrive<2 * kWarpgroup>(w + 1 == C::kConsumers ? 1 : 2 + w);
    }

    // Turns that this warpgroup has no use for.
    template <u32 kCount>
    __device__ __forceinline__ void pass_turns() const {
        if constexpr (kCount > 0) {
            take_turn();
            pass_turn();
            pass_turns<kCount - 1>();
        }
    }

    // `kCount` instructions of a stage from `first` on; the first one starts anew where `add` is false.
    template <u32 kCount = kSteps>
    __device__ __forceinline__ static void multiply(float (&sum)[kSums], const Stage& stage, u32 sub,
                                                    bool add, u32 first = 0) {
        const u32 from_p = stage.p + sub * (64 * kBlockK / 16) + first * kStepP,
                  from_q = stage.q + first * kStepQ;
#pragma unroll
        for (u32 i = 0; i < kCount; ++i)
            Instruction::multiply(sum, descriptor(from_p + i * kStepP), descriptor(from_q + i * kStepQ),
                                  add || i != 0);
    }

    // This lane's row scales of a stage. `k` matters where a stage holds four K blocks of them, `step` where
    // a K block has four.
    __device__ __forceinline__ void load_rows(Factor& f, Columns& columns, u32 stage, u32 sub, u32 k,
                                              u32 step = 0) const {
        const u32 at = stage * L::kScaleStage + (C::kScaleKMajor ? k % 4 * 4 : 0);
        if constexpr (C::kScaleP == kScaleRow) {
            const Shared from = scale_p + at + step * L::kBlockP * 4;
            f.high = load_shared(from + sub * 64 * L::kScaleStep);
            f.low = load_shared(from + (sub * 64 + 8) * L::kScaleStep);
        }
        if constexpr (C::kScaleQ == kScaleRow) {
            const Shared from = scale_q + at + step * C::kBlockQ * 4;
#pragma unroll
            for (u32 g = 0; g < M::kGroups; ++g) {
                if constexpr (C::kScaleKMajor)
                    columns.pair[g] = {load_shared(from + g * 8 * 16), load_shared(from + (g * 8 + 1) * 16)};
                else
                    columns.pair[g] = load_shared2(from + g * 32);
            }
        }
    }

    __device__ __forceinline__ static void clear(float (&total)[kSums]) {
#pragma unroll
        for (u32 i = 0; i < kSums; ++i)
            total[i] = 0.0f;
    }

    // Multiplies one tile. Where a group has fewer rows than the tile, 64-row parts without any are left out.
    // `behind` tells the tile that follows. With kAlone it is called once the first products are on their way, which
    // all parts have; until then `total` is the tile's before with kBehind, and nobody's without.
    template <class Behind>
    __device__ __forceinline__ void run(Totals& total, Tile tile, Behind behind) {
        Factor f{};
        blocks.begin(tile, first_tile);
        Tile following = tile;
        if constexpr (L::kAlone) {
            f = blocks.at(0, tile, tile);
            if constexpr (kSpelled)
                next.p = p, next.q = q;
            auto scales = [&](u32 block) { return blocks.at(block, tile, following); };
            promote_one<C::kSubs, true>(total, f, tile.first_k, 0, scales, [&] {
                following = behind();
                blocks.look_ahead(tile, following);
            });
        } else {
            following = behind();
            blocks.look_ahead(tile, following);
#pragma unroll
            for (u32 sub = 0; sub < C::kSubs; ++sub)
                clear(total[sub]);
        }
        // Parts that are multiplied are loaded: Loaded (rows.cuh) has the same rule.
        constexpr bool kLeavesOut = L::kGrouped && !C::kSwap;
        const Rows of = kLeavesOut ? Rows::of(tile) : Rows{~0u, 0, 0, 0};
        const u32 first = tile.row_p + part;
        if (of.end > first + (C::kSubs - 1) * 64 && (L::kGroupedA || of.begin < first + C::kSubs * 64))
            run_parts<C::kSubs>(total, f, tile, following);
        else if (C::kSubs > 1 && of.end > first && (L::kGroupedA || of.begin < first + 64))
            run_parts<1>(total, f, tile, following);
        else
            idle(tile, following);
        first_tile = false;
    }

    // The first kParts parts of 64 rows.
    template <u32 kParts>
    __device__ __forceinline__ void run_parts(Totals& total, Factor& f, Tile tile, Tile following) {
        if constexpr (C::kElementBytes == 2)
            accumulate<kParts>(total, tile);
        else
            promote<kParts>(total, f, tile, following);
    }

    // None: the stages and the turns of the tile go by.
    __device__ __forceinline__ void idle(Tile tile, Tile following) {
        for (u32 k = tile.first_k + L::kAlone; k < tile.last_k; ++k) {
            const Stage stage = wait_full();
            if (!C::kPairs || (k - tile.first_k - L::kAlone) % 2 == 0)
                pass_turns<C::kSubs * C::kScaleSteps>();
            __syncwarp();  // no lane waits for the stage any more: here is no product that holds them together
            room.release(stage.index, lane);
            advance();
            look_ahead();
        }
        blocks.skip(following);
    }

    template <u32 kParts>
    __device__ __forceinline__ void accumulate(Totals& total, Tile tile) {
        u32 before = 0;
        for (u32 k = tile.first_k; k < tile.last_k; ++k) {
            const Stage stage = wait_full();
            wgmma_fence();
#pragma unroll
            for (u32 sub = 0; sub < kParts; ++sub)
                multiply(total[sub], stage, sub, true);
            wgmma_commit();
            advance();
            look_ahead();
            wgmma_wait<1>();
            if (k > tile.first_k)
                room.release(before, lane);
            before = stage.index;
        }
        wgmma_wait<0>();
#pragma unroll
        for (u32 sub = 0; sub < kParts; ++sub)
            pin(total[sub]);
        if (tile.first_k < tile.last_k)
            room.release(before, lane);
    }

    template <u32 kParts>
    __device__ __forceinline__ void promote(Totals& total, Factor& f, Tile tile, Tile following) {
        const u32 count = tile.last_k - tile.first_k;
        auto scales = [&](u32 block) { return blocks.at(block, tile, following); };
        if constexpr (!L::kAlone)
            f = scales(0);
        u32 block = L::kAlone;
        if constexpr (C::kPairs)
            for (; block + 1 < count; block += 2)
                promote_two(total[0], f, tile.first_k + block, block, scales);
        if constexpr (kSpelled) {
            // What the compiler does not know to be the same in all lanes, it counts down in two instructions.
            u32 left = __shfl_sync(0xffffffff, count - block, 0);
            for (; left > 0 && ring.stage != kFirstStage; --left, ++block) {
                next.p = p, next.q = q;
                promote_one<kParts>(total, f, tile.first_k + block, block, scales);
            }
            while (left > 0) {
                next.p = p, next.q = q;
                keep(next.p), keep(next.q);
                promote_round<kParts, kFirstStage>(total, f, tile, block, left, scales);
            }
        } else {
            for (; block < count; ++block)
                promote_one<kParts>(total, f, tile.first_k + block, block, scales);
        }
    }

    // A tile's first K block stands by itself with kAlone. Most tiles begin at stage 0: K is a multiple of the ring.
    static constexpr u32 kFirstStage = L::kAlone ? 1 % C::kStages : 0;

    // The K blocks in the stages from kStage to the one before kFirstStage, as many as are left.
    template <u32 kParts, u32 kStage, class Scales>
    __device__ __forceinline__ void promote_round(Totals& total, Factor& f, const Tile& tile, u32& block,
                                                  u32& left, Scales scales) {
        ring.stage = kStage;
        promote_one<kParts>(total, f, tile.first_k + block, block, scales);
        ++block;
        constexpr u32 kNext = (kStage + 1) % C::kStages;
        if constexpr (kNext != kFirstStage) {
            if (--left > 0)
                promote_round<kParts, kNext>(total, f, tile, block, left, scales);
        } else {
            --left;
        }
    }

    // Two K blocks in flight: the tensor core has the second one while the first one is promoted.
    template <class Scales>
    __device__ __forceinline__ void promote_two(float (&total)[kSums], Factor& f, u32 k, u32 block,
                                                Scales scales) {
        float sum[kSums], other[kSums];
        const Stage first = wait_full();
        advance();
        look_ahead();
        Columns columns;
        load_rows(f, columns, first.index, 0, k);
        const Product f0 = M::product(f);
        take_turn();
        wgmma_fence();
        multiply(sum, first, 0, false);
        wgmma_commit();
        const Stage second = wait_full();
        wgmma_fence();
        multiply(other, second, 0, false);
        wgmma_commit();
        pass_turn();
        f = scales(block + 1);
        Product f1;
        auto load_second = [&] {
            load_rows(f, columns, second.index, 0, k + 1);
            f1 = M::product(f);
            f = scales(block + 2);
        };
        // Scales of Q's columns take the place of the first block's, which must have been used.
        if constexpr (C::kScaleQ != kScaleRow)
            load_second();
        advance();
        wgmma_wait<1>();
        pin(sum);
        room.release(first.index, lane);
        M::promote(total, sum, f0, columns, blocks.before);
        if constexpr (C::kScaleQ == kScaleRow)
            load_second();
        look_ahead();
        wgmma_wait<0>();
        pin(other);
        room.release(second.index, lane);
        M::promote(total, other, f1, columns, blocks.before);
    }

    struct Nothing {
        __device__ __forceinline__ void operator()() const {}
    };

    // kFirst: of a tile; `behind` is called under the first products, and the totals begin anew.
    template <u32 kParts, bool kFirst = false, class Scales, class Behind = Nothing>
    __device__ __forceinline__ void promote_one(Totals& total, Factor& f, u32 k, u32 block, Scales scales,
                                                Behind behind = Nothing{}) {
        // Row scales before the products of a stage: afterwards their way from shared memory would delay the
        // second product. Those of Q's columns or of four steps are too many to be kept for all parts.
        constexpr bool kEarly = C::kScaleQ != kScaleRow && C::kScaleSteps == 1;
        const Stage stage = wait_full();
        Columns columns;
        Product products[C::kSubs];
        if constexpr (kEarly) {
#pragma unroll
            for (u32 sub = 0; sub < kParts; ++sub) {
                load_rows(f, columns, stage.index, sub, k);
                products[sub] = M::product(f);
            }
        }
#pragma unroll
        for (u32 sub = 0; sub < kParts; ++sub) {
#pragma unroll
            for (u32 step = 0; step < C::kScaleSteps; ++step) {
                constexpr u32 kCount = kSteps / C::kScaleSteps;
                const bool ends = sub + 1 == kParts && step + 1 == C::kScaleSteps;
                float sum[kSums];
                take_turn();
                wgmma_fence();
                multiply<kCount>(sum, stage, sub, false, step * kCount);
                wgmma_commit();
                pass_turn();
                if constexpr (!kEarly) {
                    load_rows(f, columns, stage.index, sub, k, step);
                    products[sub] = M::product(f);
                }
                if (kFirst && sub == 0 && step == 0)
                    behind();
                if (ends)
                    f = scales(block + 1), advance(), look_ahead();
                wgmma_wait<0>();
                pin(sum);
                if (ends)
                    room.release(stage.index, lane);
                if (kFirst && step == 0)
                    clear(total[sub]);
                M::promote(total[sub], sum, products[sub], columns, blocks.before);
            }
        }
        pass_turns<(C::kSubs - kParts) * C::kScaleSteps>();
    }
};

}  // namespace dg::sm90
