// The Hopper matrix product: D[M, N] = A[M, K] * B[N, K]^T on FP8 operands with scales, D in bfloat16.
//
// The tensor core multiplies P (64 rows a warpgroup) by Q (up to 256 rows): P is A and Q is B, or, swapped, P
// is B and Q is A, which is how few rows of A keep whole tiles busy. One thread fills a ring of K blocks, 128
// bytes of every row, with the row scales that belong to them; consumer warpgroups multiply and add each
// block's FP8 sums, scaled, to float32 totals. With kOrdered they take turns at the tensor core, one adding
// while the other multiplies.
//
// Config is a struct that the generated source defines:
//   kBlockQ       rows of Q in a tile
//   kStages       K blocks in the ring
//   kConsumers    warpgroups that multiply; kSubs: 64-row parts that each has
//   kSwap         P is B
//   kSplit        blocks of a cluster that share a tile, each with its part of K (swapped tiles)
//   kMulticast    blocks of a cluster whose tiles share Q
//   kScaleP, kScaleQ    kScaleBlock: one for 128 rows, kScaleRow: one for each row (at most one side)
//   kScaleKMajor  row scales are stored with K as their contiguous axis
//   kPairs        two K blocks in flight a warpgroup (kSubs 1, row scales on P)
//
// Not yet: a float32 D, C, scales of whole rows, rows of D that are no multiple of 16 bytes.
#pragma once

#include <dg/common/math.cuh>
#include <dg/ptx/copy.cuh>
#include <dg/ptx/wgmma.cuh>

namespace dg::sm90 {

using namespace dg::ptx;

constexpr u32 kBlockK = 128;  // bytes of K in one stage: a row of a tile fills the 128-byte swizzle
constexpr u32 kWarpgroup = 128;
constexpr u32 kScaleNone = 0, kScaleBlock = 1, kScaleRow = 2;

struct Scale {
    const float* values;
    i64 row_stride, k_stride;  // in elements; row_stride counts rows, or blocks of 128 rows
};

struct Params {
    TensorMap p_map, q_map, scale_map;  // scale_map: scales of single rows, of P or of Q
    Scale p_scale, q_scale;             // scales of 128 rows
    void* d;
    i64 d_stride;
    u32 rows_p, rows_q, k_blocks;
    u32 tiles_p, tiles_q;
};

template <class C>
struct Layout {
    static constexpr u32 kBlockP = 64 * C::kSubs * C::kConsumers;
    static constexpr u32 kBytesP = kBlockP * kBlockK, kBytesQ = C::kBlockQ * kBlockK;
    // Row scales of one stage: where K is their major axis, 16 bytes a row, the K blocks of which this
    // stage's is one.
    static constexpr u32 kScaleRows = C::kScaleP == kScaleRow   ? kBlockP
                                      : C::kScaleQ == kScaleRow ? C::kBlockQ
                                                                : 0;
    static constexpr u32 kScaleStep = C::kScaleKMajor ? 16 : 4;  // bytes from row to row
    static constexpr u32 kScaleBytes = kScaleRows * kScaleStep;
    static constexpr u32 kStageBytes = kBytesP + kBytesQ;
    static constexpr u32 kScaleStage = (kScaleBytes + 127) / 128 * 128;
    static constexpr u32 kScaleOffset = C::kStages * kStageBytes;
    static constexpr u32 kStoreOffset = kScaleOffset + C::kStages * kScaleStage;
    // Rows of 64 outputs and 16 bytes more, so that eight rows lie in different banks.
    static constexpr u32 kStoreRow = 64 * 2 + 16;
    static constexpr u32 kStoreRows = C::kSwap ? C::kBlockQ * C::kConsumers : 16 * 4 * C::kConsumers;
    static constexpr u32 kStoreBytes = C::kSplit > 1 ? 0 : kStoreRows * kStoreRow;
    // Parts of a split tile: from each block of the cluster the units of 8 rows that this one owns.
    static constexpr u32 kOwnedUnits = (kBlockP / 8 + C::kSplit - 1) / C::kSplit;
    static constexpr u32 kPartRow =
        C::kBlockQ * 4 + 32;  // 32 bytes more, so that four rows lie in different banks
    static constexpr u32 kPartOffset = (kStoreOffset + kStoreBytes + 15) / 16 * 16;
    static constexpr u32 kPartBytes = C::kSplit > 1 ? C::kSplit * kOwnedUnits * 8 * kPartRow : 0;
    static constexpr u32 kBarrierOffset = kPartOffset + kPartBytes;
    static constexpr u32 kBytes =
        kBarrierOffset + (2 * C::kStages + 1) * 8 + 1024;  // 1024 to align the start
    static constexpr u32 kThreads = kWarpgroup * (C::kConsumers + 1);
};

struct Tile {
    u32 p, q;
};

// Tiles in an order that keeps what neighbours share in the L2: bands of kBand tiles along P, walked along Q.
template <class C>
__device__ __forceinline__ Tile tile_at(const Params& params, u32 index) {
    constexpr u32 kBand = C::kSwap ? 1 : 16;
    const u32 tiles_p = C::kMulticast > 1 ? align(params.tiles_p, C::kMulticast) : params.tiles_p;
    const u32 in_band = kBand * params.tiles_q;
    const u32 band = index / in_band, rest = index % in_band;
    const u32 height = min(kBand, tiles_p - band * kBand);
    return {band * kBand + rest % height, rest / height};
}

// Where a thread is in the ring of stages.
template <u32 kStages>
struct Ring {
    u32 stage = 0, parity = 0;

    __device__ __forceinline__ void advance() {
        if (++stage == kStages)
            stage = 0, parity ^= 1;
    }
};

template <class C>
struct Kernel {
    using L = Layout<C>;
    using Turn = Ring<C::kStages>;
    static constexpr u32 kAccumulators = C::kBlockQ / 2;  // a thread's share of 64 x kBlockQ
    static constexpr u32 kGroups = C::kBlockQ / 8;        // of eight columns, of which a thread has two

    const Params& params;
    Shared smem, full, empty, parts;
    u32 rank;  // in the cluster
    u32 first_k, last_k;

    __device__ __forceinline__ Shared stage_p(u32 s) const { return smem + s * L::kStageBytes; }
    __device__ __forceinline__ Shared stage_q(u32 s) const { return smem + s * L::kStageBytes + L::kBytesP; }
    __device__ __forceinline__ Shared row_scales(u32 s) const {
        return smem + L::kScaleOffset + s * L::kScaleStage;
    }

    template <class Body>
    __device__ __forceinline__ void for_each_tile(Body body) const {
        const u32 tiles_p = C::kMulticast > 1 ? align(params.tiles_p, C::kMulticast) : params.tiles_p;
        const u32 tiles = tiles_p * params.tiles_q;
        const u32 blocks = gridDim.x / C::kSplit;
        for (u32 t = blockIdx.x / C::kSplit; t < tiles; t += blocks)
            body(tile_at<C>(params, t));
    }

    __device__ __forceinline__ void load_tiles() const {
        Turn ring;
        constexpr u64 policy_p = C::kSwap ? kEvictFirst : kEvictNormal,
                      policy_q = C::kSwap ? kEvictLast : kEvictNormal;
        for_each_tile([&](Tile tile) {
            for (u32 k = first_k; k < last_k; ++k, ring.advance()) {
                const Shared ready = full + ring.stage * 8;
                mbarrier_wait(empty + ring.stage * 8, ring.parity ^ 1);
                mbarrier_expect_bytes(ready, L::kStageBytes + L::kScaleBytes);
                constexpr u32 kElements = kBlockK / C::kElementBytes;
                tma_load(&params.p_map, ready, stage_p(ring.stage), k * kElements, tile.p * L::kBlockP,
                         policy_p);
                if constexpr (C::kMulticast == 1) {
                    tma_load(&params.q_map, ready, stage_q(ring.stage), k * kElements, tile.q * C::kBlockQ,
                             policy_q);
                } else {
                    constexpr u32 kPart = C::kBlockQ / C::kMulticast;
                    tma_load_multicast(&params.q_map, ready, stage_q(ring.stage) + rank * kPart * kBlockK,
                                       k * kElements, tile.q * C::kBlockQ + rank * kPart,
                                       (1u << C::kMulticast) - 1, policy_q);
                }
                if constexpr (L::kScaleRows > 0) {
                    const u32 row = C::kScaleP == kScaleRow ? tile.p * L::kBlockP : tile.q * C::kBlockQ;
                    const u32 x = C::kScaleKMajor ? k / 4 * 4 : row, y = C::kScaleKMajor ? row : k;
                    tma_load(&params.scale_map, ready, row_scales(ring.stage), x, y, kEvictNormal);
                }
            }
        });
    }

    // Consumers take turns at the tensor core: one issues its products while the other promotes.
    __device__ __forceinline__ void take_turn(u32 w) const {
        if constexpr (C::kConsumers == 2 && C::kOrdered)
            named_sync<2 * kWarpgroup>(1 + w);
    }
    __device__ __forceinline__ void pass_turn(u32 w) const {
        if constexpr (C::kConsumers == 2 && C::kOrdered)
            named_arrive<2 * kWarpgroup>(2 - w);
    }

    // What a block's sums are multiplied with: the thread's two rows of P, and Q's columns before and after a
    // boundary.
    struct Factor {
        float high, low, q, q_next;
    };

    // Scales of 128 rows at once: one value for P, and one or two for Q, whose tile may cross a boundary of
    // 128 rows.
    struct BlockScales {
        const float *p, *q, *q_next;
        i64 p_stride, q_stride;
        u32 before;  // 8-column groups of the tile before the boundary

        __device__ __forceinline__ BlockScales(const Params& params, Tile tile, u32 first_row, u32 k) {
            if constexpr (C::kScaleP == kScaleBlock) {
                const u32 index = min(tile.p * L::kBlockP + first_row, params.rows_p - 1) / 128;
                p_stride = params.p_scale.k_stride;
                p = params.p_scale.values + index * params.p_scale.row_stride + k * p_stride;
            }
            if constexpr (C::kScaleQ == kScaleBlock) {
                const u32 first = tile.q * C::kBlockQ, index = first / 128, last = (params.rows_q - 1) / 128;
                before = (128 - first % 128) / 8;
                q_stride = params.q_scale.k_stride;
                q = params.q_scale.values + index * params.q_scale.row_stride + k * q_stride;
                q_next = q + (index < last ? params.q_scale.row_stride : 0);
            }
        }

        // The scales of the next K block; `valid` is false past the last one.
        __device__ __forceinline__ Factor next(bool valid) {
            Factor f{1.0f, 1.0f, 1.0f, 1.0f};
            if constexpr (C::kScaleP == kScaleBlock) {
                f.high = f.low = valid ? __ldg(p) : 0.0f;
                p += p_stride;
            }
            if constexpr (C::kScaleQ == kScaleBlock) {
                f.q = valid ? __ldg(q) : 0.0f;
                q += q_stride;
                if constexpr (128 % C::kBlockQ != 0) {
                    f.q_next = valid ? __ldg(q_next) : 0.0f;
                    q_next += q_stride;
                }
            }
            return f;
        }
    };

    __device__ __forceinline__ static void promote(float (&total)[kAccumulators],
                                                   const float (&sum)[kAccumulators], Factor f,
                                                   const float2 (&q_row)[kGroups], u32 before) {
        if constexpr (C::kScaleQ == kScaleRow) {
#pragma unroll
            for (u32 i = 0; i < kGroups; ++i) {
                total[i * 4 + 0] += f.high * q_row[i].x * sum[i * 4 + 0];
                total[i * 4 + 1] += f.high * q_row[i].y * sum[i * 4 + 1];
                total[i * 4 + 2] += f.low * q_row[i].x * sum[i * 4 + 2];
                total[i * 4 + 3] += f.low * q_row[i].y * sum[i * 4 + 3];
            }
        } else {
            const float high0 = f.high * f.q, low0 = f.low * f.q, high1 = f.high * f.q_next,
                        low1 = f.low * f.q_next;
#pragma unroll
            for (u32 i = 0; i < kGroups; ++i) {
                const bool first = 128 % C::kBlockQ == 0 || i < before;
                const float h = first ? high0 : high1, l = first ? low0 : low1;
                total[i * 4 + 0] += h * sum[i * 4 + 0];
                total[i * 4 + 1] += h * sum[i * 4 + 1];
                total[i * 4 + 2] += l * sum[i * 4 + 2];
                total[i * 4 + 3] += l * sum[i * 4 + 3];
            }
        }
    }

    struct Lane {
        u32 w, warp, lane, part;  // warpgroup, warp in it, lane; first row of the tile that the warpgroup has
        u64 p, q;                 // descriptors at stage 0
        Shared scale;             // this lane's place among the row scales of stage 0
    };

    __device__ __forceinline__ static void multiply(const Lane& me, float (&sum)[kAccumulators], u32 stage,
                                                    u32 sub) {
        const u64 p = me.p + stage * (L::kStageBytes / 16) + sub * (64 * kBlockK / 16),
                  q = me.q + stage * (L::kStageBytes / 16);
        wgmma_fence();
#pragma unroll
        for (u32 i = 0; i < kBlockK / 32; ++i)
            Wgmma<C::kBlockQ, true>::multiply(sum, p + i * 2, q + i * 2, i != 0);
        wgmma_commit();
    }

    // This lane's row scales of a stage; `k` matters where the stage holds four K blocks of them.
    __device__ __forceinline__ void load_rows(const Lane& me, Factor& f, float2 (&q_row)[kGroups], u32 stage,
                                              u32 sub, u32 k) const {
        if constexpr (L::kScaleRows > 0) {
            const Shared from = me.scale + stage * L::kScaleStage + (C::kScaleKMajor ? k % 4 * 4 : 0);
            if constexpr (C::kScaleP == kScaleRow) {
                f.high = load_shared(from + sub * 64 * L::kScaleStep);
                f.low = load_shared(from + (sub * 64 + 8) * L::kScaleStep);
            } else {
#pragma unroll
                for (u32 g = 0; g < kGroups; ++g) {
                    if constexpr (C::kScaleKMajor)
                        q_row[g] = {load_shared(from + g * 8 * 16), load_shared(from + (g * 8 + 1) * 16)};
                    else
                        q_row[g] = load_shared2(from + g * 32);
                }
            }
        }
    }

    __device__ __forceinline__ void consume(u32 w) const {
        Lane me{w, threadIdx.x % kWarpgroup / 32, threadIdx.x % 32, w * C::kSubs * 64, 0, 0, 0};
        me.p = descriptor_k128(smem + me.part * kBlockK), me.q = descriptor_k128(smem + L::kBytesP);
        me.scale = smem + L::kScaleOffset +
                   (C::kScaleP == kScaleRow ? me.part + me.warp * 16 + me.lane / 4 : me.lane % 4 * 2) *
                       L::kScaleStep;
        Turn ring;
        bool ready = false;
        for_each_tile([&](Tile tile) {
            float total[C::kSubs][kAccumulators];
#pragma unroll
            for (u32 sub = 0; sub < C::kSubs; ++sub)
#pragma unroll
                for (u32 i = 0; i < kAccumulators; ++i)
                    total[sub][i] = 0.0f;
            BlockScales blocks(params, tile, me.part, first_k);
            Factor f = blocks.next(first_k < last_k);
            u32 k = first_k;
            if constexpr (C::kPairs) {
                float sum[kAccumulators], other[kAccumulators];
                for (; k + 1 < last_k; k += 2) {
                    const u32 first = ring.stage;
                    if (!ready)
                        mbarrier_wait(full + first * 8, ring.parity);
                    ring.advance();
                    const u32 second = ring.stage;
                    const bool second_ready = mbarrier_done(full + second * 8, ring.parity);
                    Factor f1 = blocks.next(true);
                    take_turn(w);
                    multiply(me, sum, first, 0);
                    if (!second_ready)
                        mbarrier_wait(full + second * 8, ring.parity);
                    multiply(me, other, second, 0);
                    pass_turn(w);
                    ring.advance();
                    const Factor f2 = blocks.next(k + 2 < last_k);
                    float2 q_row[kGroups];
                    load_rows(me, f, q_row, first, 0, k);
                    load_rows(me, f1, q_row, second, 0, k + 1);
                    wgmma_wait<1>();
                    pin(sum);
                    release(empty + first * 8, me.lane);
                    promote(total[0], sum, f, q_row, blocks.before);
                    ready = mbarrier_done(full + ring.stage * 8, ring.parity);
                    wgmma_wait<0>();
                    pin(other);
                    release(empty + second * 8, me.lane);
                    promote(total[0], other, f1, q_row, blocks.before);
                    f = f2;
                }
            }
            for (; k < last_k; ++k) {
                const u32 stage = ring.stage;
                if (!ready)
                    mbarrier_wait(full + stage * 8, ring.parity);
                ring.advance();
                const Factor f_next = blocks.next(k + 1 < last_k);
                float2 q_row[kGroups];
#pragma unroll
                for (u32 sub = 0; sub < C::kSubs; ++sub) {
                    float sum[kAccumulators];
                    take_turn(w);
                    multiply(me, sum, stage, sub);
                    pass_turn(w);
                    load_rows(me, f, q_row, stage, sub, k);
                    if (sub + 1 == C::kSubs)
                        ready = mbarrier_done(full + ring.stage * 8, ring.parity);
                    wgmma_wait<0>();
                    pin(sum);
                    if (sub + 1 == C::kSubs)
                        release(empty + stage * 8, me.lane);
                    promote(total[sub], sum, f, q_row, blocks.before);
                }
                f = f_next;
            }
            if constexpr (C::kSplit > 1)
                send_parts(total, w, me.warp, me.lane), store_parts(tile);
            else if constexpr (C::kSwap)
                store_swapped(total, tile, w, me.warp, me.lane);
            else
                store(total, tile, w, me.warp, me.lane);
        });
    }

    __device__ __forceinline__ void release(Shared barrier, u32 lane) const {
        if constexpr (C::kMulticast > 1) {
            if (lane < C::kMulticast)
                mbarrier_arrive_remote(barrier, lane);
        } else if (lane == 0) {
            mbarrier_arrive(barrier);
        }
    }

    __device__ __forceinline__ static u32 pack(float x, float y) {
        u32 packed;
        asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(packed) : "f"(y), "f"(x));
        return packed;
    }

    // bfloat16 outputs of a warp's 16 rows, 64 columns at a time through shared memory so that rows leave in
    // 16-byte pieces.
    __device__ __forceinline__ void store(const float (&total)[C::kSubs][kAccumulators], Tile tile, u32 w,
                                          u32 warp, u32 lane) const {
        const Shared area = smem + L::kStoreOffset + (w * 4 + warp) * 16 * L::kStoreRow;
        const Shared write = area + (lane % 16) * L::kStoreRow + lane / 16 * 16;
        const Shared read = area + lane / 8 * L::kStoreRow + lane % 8 * 16;
        auto* out = static_cast<unsigned short*>(params.d);
        constexpr u32 kPanels = cdiv(C::kBlockQ, 64u);
#pragma unroll
        for (u32 sub = 0; sub < C::kSubs; ++sub) {
            const u32 row0 = tile.p * L::kBlockP + (w * C::kSubs + sub) * 64 + warp * 16 + lane / 8;
#pragma unroll
            for (u32 panel = 0; panel < kPanels; ++panel) {
                __syncwarp();
#pragma unroll
                for (u32 g = 0; g < 8; g += 2) {
                    constexpr u32 kLast = kAccumulators - 1;
                    const u32 i = (panel * 8 + g) * 4;
                    if (i < kAccumulators) {
                        const u32 j = i + 4 < kAccumulators ? i + 4 : 0;
                        asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(
                                         write + g * 16),
                                     "r"(pack(total[sub][min(i, kLast)], total[sub][min(i + 1, kLast)])),
                                     "r"(pack(total[sub][min(i + 2, kLast)], total[sub][min(i + 3, kLast)])),
                                     "r"(pack(total[sub][j], total[sub][j + 1])),
                                     "r"(pack(total[sub][j + 2], total[sub][j + 3]))
                                     : "memory");
                    }
                }
                __syncwarp();
                const u32 column = tile.q * C::kBlockQ + panel * 64 + lane % 8 * 8;
                const bool inside = panel * 64 + lane % 8 * 8 < C::kBlockQ && column < params.rows_q;
#pragma unroll
                for (u32 r = 0; r < 16; r += 4)
                    if (inside && row0 + r < params.rows_p)
                        *reinterpret_cast<uint4*>(out + (row0 + r) * params.d_stride + column) =
                            load_shared4(read + r * L::kStoreRow);
            }
        }
    }

    __device__ __forceinline__ void store_swapped(const float (&total)[C::kSubs][kAccumulators], Tile tile,
                                                  u32 w, u32 warp, u32 lane) const {
        auto* out = static_cast<unsigned short*>(params.d);
        const Shared area = smem + L::kStoreOffset + w * C::kBlockQ * L::kStoreRow;
#pragma unroll
        for (u32 sub = 0; sub < C::kSubs; ++sub) {
            named_sync<kWarpgroup>(4 + w);
#pragma unroll
            for (u32 i = 0; i < kGroups; ++i) {
                const u32 m0 = pack(total[sub][i * 4], total[sub][i * 4 + 1]),
                          m1 = pack(total[sub][i * 4 + 2], total[sub][i * 4 + 3]);
                // Matrices of 8 n x 8 m, stored transposed: row m of the area holds 64 values of n.
                const Shared at =
                    area + (i * 8 + lane % 8) * L::kStoreRow + (warp * 16 + lane / 8 % 2 * 8) * 2;
                asm volatile("stmatrix.sync.aligned.m8n8.x2.trans.shared.b16 [%0], {%1, %2};" ::"r"(at),
                             "r"(m0), "r"(m1)
                             : "memory");
            }
            named_sync<kWarpgroup>(4 + w);
            const u32 n = tile.p * L::kBlockP + (w * C::kSubs + sub) * 64 + threadIdx.x % 8 * 8;
#pragma unroll
            for (u32 r = 0; r < C::kBlockQ; r += 16) {
                const u32 local = r + threadIdx.x % kWarpgroup / 8, m = tile.q * C::kBlockQ + local;
                if (local < C::kBlockQ && m < params.rows_q && n < params.rows_p)
                    *reinterpret_cast<uint4*>(out + m * params.d_stride + n) =
                        load_shared4(area + local * L::kStoreRow + threadIdx.x % 8 * 16);
            }
        }
    }

    // Partial sums of the blocks of a cluster: rows of P go in units of 8 to their owner, unit u to block u %
    // kSplit, which adds the parts in the order of K and writes its units of D.
    __device__ __forceinline__ void send_parts(const float (&total)[C::kSubs][kAccumulators], u32 w, u32 warp,
                                               u32 lane) const {
#pragma unroll
        for (u32 sub = 0; sub < C::kSubs; ++sub) {
#pragma unroll
            for (u32 half = 0; half < 2; ++half) {
                const u32 unit = ((w * C::kSubs + sub) * 4 + warp) * 2 + half, owner = unit % C::kSplit;
                const u32 offset =
                    ((rank * L::kOwnedUnits + unit / C::kSplit) * 8 + lane / 4) * L::kPartRow + lane % 4 * 8;
                const u32 to = remote_address(smem + L::kPartOffset + offset, owner),
                          barrier = remote_address(parts, owner);
#pragma unroll
                for (u32 i = 0; i < kGroups; ++i)
                    send(to + i * 32, barrier, total[sub][i * 4 + half * 2],
                         total[sub][i * 4 + half * 2 + 1]);
            }
        }
    }

    __device__ __forceinline__ void store_parts(Tile tile) const {
        constexpr u32 kThreads = kWarpgroup * C::kConsumers;
        mbarrier_wait(parts, 0);
        auto* out = static_cast<unsigned short*>(params.d);
        for (u32 t = threadIdx.x - kWarpgroup; t < L::kOwnedUnits * C::kBlockQ; t += kThreads) {
            const u32 m = t % C::kBlockQ, unit = t / C::kBlockQ * C::kSplit + rank;
            const u32 column = tile.p * L::kBlockP + unit * 8, row = tile.q * C::kBlockQ + m;
            if (unit >= L::kBlockP / 8 || column >= params.rows_p || row >= params.rows_q)
                continue;
            float sum[8] = {};
#pragma unroll
            for (u32 part = 0; part < C::kSplit; ++part) {
                const Shared from = smem + L::kPartOffset +
                                    (part * L::kOwnedUnits + t / C::kBlockQ) * 8 * L::kPartRow + m * 4;
#pragma unroll
                for (u32 n = 0; n < 8; ++n)
                    sum[n] += load_shared(from + n * L::kPartRow);
            }
            *reinterpret_cast<uint4*>(out + row * params.d_stride + column) =
                uint4{pack(sum[0], sum[1]), pack(sum[2], sum[3]), pack(sum[4], sum[5]), pack(sum[6], sum[7])};
        }
    }

    __device__ __forceinline__ void run() const {
        const u32 warp = __shfl_sync(0xffffffff, threadIdx.x / 32, 0);
        if (warp < 4) {
            registers_down<C::kProducerRegisters>();
            if (warp == 0) {
                if (elect_one())
                    load_tiles();
                __syncwarp();
            }
        } else {
            registers_up<C::kConsumerRegisters>();
            const u32 w = warp / 4 - 1;
            if (w == 1)
                pass_turn(w);  // the first turn belongs to warpgroup 0
            consume(w);
            if (w == 0)
                take_turn(w);  // takes the turn that is left over, so that the barrier ends as it began
        }
        if constexpr (C::kMulticast > 1)
            cluster_meet();  // a block may not end while another still arrives at its barriers
    }
};

template <class C>
__device__ __forceinline__ void gemm(const Params& params) {
    using L = Layout<C>;
    extern __shared__ unsigned char raw[];
    Shared smem = shared_address(raw);
    smem += (1024 - smem % 1024) % 1024;
    asm volatile(
        ""
        : "+r"(smem));  // one register for the whole kernel: the compiler would compute it anew at each use
    const Shared full = smem + L::kBarrierOffset, empty = full + C::kStages * 8,
                 parts = empty + C::kStages * 8;
    if (threadIdx.x == 0) {
        prefetch_map(&params.p_map);
        prefetch_map(&params.q_map);
        for (u32 s = 0; s < C::kStages; ++s) {
            mbarrier_init(full + s * 8, 1);
            mbarrier_init(empty + s * 8, C::kConsumers * 4 * C::kMulticast);
        }
        if constexpr (C::kSplit > 1) {
            const u32 rank = cluster_rank();
            const u32 units = (L::kBlockP / 8 + C::kSplit - 1 - rank) / C::kSplit;  // that this block owns
            mbarrier_init(parts, 1);
            mbarrier_expect_bytes(parts, C::kSplit * units * 8 * C::kBlockQ * 4);
        }
        fence_barrier_init();
    }
    if constexpr (C::kMulticast > 1 || C::kSplit > 1)
        cluster_meet();
    else
        __syncthreads();
    wait_for_previous_kernel();
    const u32 rank = C::kMulticast > 1 || C::kSplit > 1 ? cluster_rank() : 0;
    const u32 part = C::kSplit > 1 ? rank : 0;
    Kernel<C>{params,
              smem,
              full,
              empty,
              parts,
              rank,
              params.k_blocks * part / C::kSplit,
              params.k_blocks * (part + 1) / C::kSplit}
        .run();
}

}  // namespace dg::sm90
