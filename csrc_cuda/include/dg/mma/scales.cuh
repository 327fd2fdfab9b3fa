// Scales in the main loop, and the promotion of one K block's sums to the totals.
#pragma once

#include <dg/scheduler/rows.cuh>

namespace dg::sm90 {

// A thread of a warpgroup holds, of each eight columns of its part of a tile, two columns of two rows.
template <class C>
struct Promotion {
    using L = Layout<C>;
    static constexpr u32 kGroups = C::kBlockQ / 8;  // of eight columns
    static constexpr u32 kSums = kGroups * 4;
    // Boundaries of 128 rows fall into a tile of Q at multiples of this many groups.
    static constexpr u32 kStep = gcd(C::kBlockQ, 128u) / 8;
    static constexpr bool kCrosses = C::kScaleQ == kScaleBlock && 128 % C::kBlockQ != 0;

    // Scales of one K block: of the thread's two rows of P, and of Q's columns before and after a boundary.
    struct Factor {
        float high, low, q, q_next;
    };
    // Their products, before and after the boundary.
    struct Product {
        float high, low, high_after, low_after;
    };
    struct Columns {
        float2 pair[C::kScaleQ == kScaleRow ? kGroups : 1];
    };

    // Scales of 128 rows at once, a chunk of 32 K blocks at a time, one a lane. The next chunk, or the first one
    // of the next tile, is on its way while one is in use: fetched when they are needed, they would come from
    // memory every 32 blocks, and at the beginning of every tile, a microsecond late.
    struct Blocks {
        static constexpr u32 kChunk = 32;
        static constexpr bool kP = C::kScaleP == kScaleBlock, kQ = C::kScaleQ == kScaleBlock;

        struct Chunk {
            float p, q, q_next;
        };

        const Params& params;
        u32 first_row, lane;  // of the warpgroup in a tile; in the warp
        Chunk now, ahead;
        u32 before = kGroups;  // groups of the tile before the boundary

        __device__ __forceinline__ Blocks(const Params& all, u32 row)
            : params(all), first_row(row), lane(threadIdx.x % 32) {}

        // Blocks of 128 rows are B's, which each group has.
        __device__ __forceinline__ static i64 offset(const Scale& s, Tile tile, u32 index, u32 k) {
            const i64 group = L::kGrouped ? tile.group * s.group_stride : 0;
            return group + index * s.row_stride + k * s.k_stride;
        }

        __device__ __forceinline__ Chunk fetch(Tile tile, u32 block) const {
            Chunk chunk{1.0f, 1.0f, 1.0f};
            const u32 k = tile.first_k + block + lane;
            const bool inside = k < tile.last_k;
            if constexpr (kP) {
                const u32 index = min(tile.row_p + first_row, params.rows_p - 1) / 128;
                const Scale& s = params.p_scale;
                chunk.p = inside ? __ldg(s.values + offset(s, tile, index, k)) : 0.0f;
            }
            if constexpr (kQ) {
                const u32 index = tile.row_q / 128, last = (params.rows_q - 1) / 128;
                const Scale& s = params.q_scale;
                const float* at = s.values + offset(s, tile, index, k);
                chunk.q = inside ? __ldg(at) : 0.0f;
                if constexpr (kCrosses)
                    chunk.q_next = inside ? __ldg(at + (index < last ? s.row_stride : 0)) : 0.0f;
            }
            return chunk;
        }

        __device__ __forceinline__ void begin(Tile tile, bool first_tile) {
            if constexpr (kP || kQ) {
                now = first_tile ? fetch(tile, 0) : ahead;
                if constexpr (kCrosses)
                    before = (128 - tile.row_q % 128) / 8;
            }
        }
        __device__ __forceinline__ void look_ahead(Tile tile, Tile next) {
            if constexpr (kP || kQ)
                ahead = tile.last_k - tile.first_k > kChunk ? fetch(tile, kChunk) : fetch(next, 0);
        }

        // The same for a tile that this warpgroup has nothing of.
        __device__ __forceinline__ void skip(Tile next) {
            if constexpr (kP || kQ)
                ahead = fetch(next, 0);
        }

        // The scales of K block `block` of the tile; past the last one whatever there is.
        __device__ __forceinline__ Factor at(u32 block, Tile tile, Tile next) {
            Factor f{1.0f, 1.0f, 1.0f, 1.0f};
            if constexpr (kP || kQ) {
                const u32 count = tile.last_k - tile.first_k;
                if (block % kChunk == 0 && block > 0 && block < count) {
                    now = ahead;
                    ahead = block + kChunk < count ? fetch(tile, block + kChunk) : fetch(next, 0);
                }
                if constexpr (kP)
                    f.high = f.low = __shfl_sync(0xffffffff, now.p, block % kChunk);
                if constexpr (kQ)
                    f.q = __shfl_sync(0xffffffff, now.q, block % kChunk);
                if constexpr (kCrosses)
                    f.q_next = __shfl_sync(0xffffffff, now.q_next, block % kChunk);
            }
            return f;
        }
    };

    // The products are in registers from here on: made among those of the sums, they would wait for the scales.
    __device__ __forceinline__ static Product product(Factor f) {
        Product both{__fmul_rn(f.high, f.q), __fmul_rn(f.low, f.q), 0.0f, 0.0f};
        asm volatile("" : "+f"(both.high), "+f"(both.low));
        if constexpr (kCrosses) {
            both.high_after = __fmul_rn(f.high, f.q_next), both.low_after = __fmul_rn(f.low, f.q_next);
            asm volatile("" : "+f"(both.high_after), "+f"(both.low_after));
        }
        return both;
    }

    __device__ __forceinline__ static void add(float& total, float factor, float sum) {
        total = __fmaf_rn(factor, sum, total);
    }

    // Groups before the boundary take one factor, those after it the other. The choice is made once for the
    // kStep groups that lie on one side always.
    __device__ __forceinline__ static void promote_blocks(float (&total)[kSums], const float (&sum)[kSums],
                                                          Product f, u32 before) {
        // One of the thread's rows after the other: so a factor is more often left over from the instruction before.
#pragma unroll
        for (u32 half = 0; half < 2; ++half)
#pragma unroll
            for (u32 first = 0; first < kGroups; first += kStep) {
                // The boundary is in [kStep, 128 / 8]: the first groups are before it, those past 128 rows after it.
                const bool after = kCrosses && first > 0 && (first >= 16 || first >= before);
                const float factor =
                    half == 0 ? (after ? f.high_after : f.high) : (after ? f.low_after : f.low);
#pragma unroll
                for (u32 i = first; i < first + kStep; ++i) {
                    add(total[i * 4 + half * 2], factor, sum[i * 4 + half * 2]);
                    add(total[i * 4 + half * 2 + 1], factor, sum[i * 4 + half * 2 + 1]);
                }
            }
    }

    __device__ __forceinline__ static void promote(float (&total)[kSums], const float (&sum)[kSums],
                                                   Product f, const Columns& q, u32 before) {
        if constexpr (C::kScaleQ == kScaleRow) {
#pragma unroll
            for (u32 i = 0; i < kGroups; ++i) {
                add(total[i * 4 + 0], __fmul_rn(f.high, q.pair[i].x), sum[i * 4 + 0]);
                add(total[i * 4 + 1], __fmul_rn(f.high, q.pair[i].y), sum[i * 4 + 1]);
                add(total[i * 4 + 2], __fmul_rn(f.low, q.pair[i].x), sum[i * 4 + 2]);
                add(total[i * 4 + 3], __fmul_rn(f.low, q.pair[i].y), sum[i * 4 + 3]);
            }
        } else if constexpr (C::kScaleP == kScaleNone && C::kScaleQ == kScaleNone) {
#pragma unroll
            for (u32 i = 0; i < kSums; ++i)
                total[i] = __fadd_rn(total[i], sum[i]);
        } else {
            promote_blocks(total, sum, f, before);
        }
    }
};

}  // namespace dg::sm90
