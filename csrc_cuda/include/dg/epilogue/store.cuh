// How a tile of totals leaves: straight from registers, through shared memory by bulk copies, or gathered in
// shared memory, where the parts of a split tile are added.
#pragma once

#include <dg/epilogue/output.cuh>

namespace dg::sm90 {

// A box goes to its place in D.
template <class C>
__device__ __forceinline__ void send_box(const Params& params, Shared box, u32 column, u32 row, u32 group) {
    if constexpr (Layout<C>::kGroupedA)
        tma_store(&params.d_map, box, column, row, group);
    else
        tma_store(&params.d_map, box, column, row);
}

// Those rows of a box that are written, four at a time: eight lanes have a row, 16 bytes each.
template <class C>
__device__ __forceinline__ void copy_box(const Output<C>& out, Shared box, u32 column, u32 row0, u32 lane,
                                         const Tile& tile, const Rows& of) {
    const u32 piece = lane % 8;
#pragma unroll 1
    for (u32 row = lane / 8; row < 16; row += 4)
        out.put8_packed(out.line(row0 + row, tile, of), column + piece * 8,
                        load_shared4(box + row * 128 + ((piece ^ row % 8) * 16)));
}

template <class C, class Instruction>
struct Store {
    using L = Layout<C>;
    using Me = Multiplier<C, Instruction>;
    using Totals = typename Me::Totals;
    static constexpr u32 kGroups = Promotion<C>::kGroups;
    static constexpr u32 kThreads = kWarpgroup * C::kConsumers;
    static constexpr u32 kPanels = L::kPanels;
    static constexpr u32 kAllBarrier = 4;  // a named barrier, of all consumers

    const Params& params;
    Room<C> room;
    Output<C> out;
    u32 free = 1;  // with kCarries, the parity of the barrier that tells that the boxes are

    __device__ __forceinline__ Store(const Params& all, const Room<C>& block)
        : params(all), room(block), out(all) {}

    __device__ __forceinline__ void run(Totals& total, Me& me, Tile tile) {
        scale_rows<C, Instruction>(total, me, tile);
        // Rows matter to the carrier alone where all of a tile lies in boxes.
        constexpr bool kAsks = L::kGrouped && !(L::kCarries && C::kBlockQ % kBoxColumns == 0);
        const Rows of = kAsks ? Rows::of(tile) : Rows{};
        if constexpr (L::kGather) {
            gather(total, me);
            add_parts(tile, of);
        } else if constexpr (C::kTmaStore) {
            bulk(total, me, tile, of);
        } else {
#pragma unroll
            for (u32 sub = 0; sub < C::kSubs; ++sub)
                for_groups<0, kGroups>(total[sub], me, tile, of, sub);
        }
    }

    // Groups of eight columns from kFirst on, two columns a thread.
    template <u32 kFirst, u32 kEnd>
    __device__ __forceinline__ void for_groups(const float (&total)[Me::kSums], const Me& me,
                                               const Tile& tile, const Rows& of, u32 sub) const {
        const u32 row = tile.row_p + me.part + sub * 64 + me.warp * 16 + me.lane / 4;
        const u32 column = tile.row_q + me.lane % 4 * 2;
        const Line high = out.line(row, tile, of), low = out.line(row + 8, tile, of);
        // What most tiles need stands by itself: all that a pair of columns may need is so much code that a walk
        // over it takes longer than the stores.
        if (out.simple(tile.row_q + kFirst * 8, (kEnd - kFirst) * 8)) {
            const i64 high_at = high.d + column, low_at = low.d + column;
#pragma unroll
            for (u32 g = kFirst; g < kEnd; ++g) {
                const float* four = &total[g * 4];
                out.put2_simple(high, high_at + g * 8, four[0], four[1]);
                out.put2_simple(low, low_at + g * 8, four[2], four[3]);
            }
            return;
        }
#pragma unroll
        for (u32 g = kFirst; g < kEnd; ++g) {
            const float* four = &total[g * 4];
            out.put2(high, column + g * 8, four[0], four[1]);
            out.put2(low, column + g * 8, four[2], four[3]);
        }
    }

    // Boxes of 16 rows by 64 columns: a warp writes as many as it has room for to shared memory and goes on while
    // bulk copies take them away, its own or the carrier's (carry.cuh). Where some of the rows are not the tile's,
    // the warp, or the carrier, copies the others.
    __device__ __forceinline__ void bulk(const Totals& total, const Me& me, const Tile& tile,
                                         const Rows& of) {
        const u32 warp = __shfl_sync(0xffffffff, me.warp, 0);  // known to be the same in all lanes
        const Shared boxes = room.boxes(me.w, warp);
        const u32 row0 = tile.row_p + me.part + warp * 16, column = tile.row_q;
        // The same lane at all times: bulk copies are waited for by who made them.
        const bool leader = elect_one();
        const u32 row = me.lane % 16;
        // Row r of a box has its 16-byte pieces in the order that the 128-byte swizzle gives: piece c at c ^ (r % 8).
        const u32 piece = (me.lane / 16 ^ row % 8) * 16;
#pragma unroll
        for (u32 first = 0; first < L::kTileBoxes; first += C::kBoxes) {
            constexpr u32 kAll = L::kTileBoxes;
            const u32 end = first + C::kBoxes < kAll ? first + C::kBoxes : kAll;
            wait_free(me, leader);
#pragma unroll
            for (u32 box = first; box < end; ++box) {
                const Shared at = boxes + (box - first) * kBoxBytes + row * 128;
#pragma unroll
                for (u32 g = 0; g < 8; g += 2) {
                    const float* v = &total[box / kPanels][(box % kPanels * 8 + g) * 4];
                    store_matrices4(at + (g * 16 ^ piece), pack_bf16(v[0], v[1]), pack_bf16(v[2], v[3]),
                                    pack_bf16(v[4], v[5]), pack_bf16(v[6], v[7]));
                }
            }
            fence_async_shared();
            __syncwarp();
            if constexpr (L::kCarries) {
                if (leader)
                    mbarrier_arrive(room.filled(me.w));
            } else {
                leave(boxes, first, end, row0, column, leader, me.lane, tile, of);
            }
        }
        if constexpr (C::kBlockQ % kBoxColumns != 0) {
#pragma unroll
            for (u32 sub = 0; sub < C::kSubs; ++sub)
                for_groups<kPanels * 8, kGroups>(total[sub], me, tile, of, sub);
        }
    }

    // The warp's boxes from number `first` to `end` - 1 leave.
    __device__ __forceinline__ void leave(Shared boxes, u32 first, u32 end, u32 row0, u32 column, bool leader,
                                          u32 lane, const Tile& tile, const Rows& of) const {
#pragma unroll
        for (u32 sub = 0; sub < C::kSubs; ++sub) {
            const u32 from = max(first, sub * kPanels), to = min(end, (sub + 1) * kPanels);
            const u32 row = row0 + sub * 64;
            if (from >= to)
                continue;
            if (out.whole(row, of)) {
                if (leader) {
#pragma unroll
                    for (u32 box = from; box < to; ++box)
                        send_box<C>(params, boxes + (box - first) * kBoxBytes,
                                    column + box % kPanels * kBoxColumns, row, tile.group);
                    tma_store_commit();
                }
            } else if (C::kElementBytes == 2 || out.any(row, of)) {  // no register is left in bfloat16 tiles
#pragma unroll 1
                for (u32 box = from; box < to; ++box)
                    copy_box(out, boxes + (box - first) * kBoxBytes, column + box % kPanels * kBoxColumns,
                             row, lane, tile, of);
            }
        }
    }

    // Until what was in the boxes before has left.
    __device__ __forceinline__ void wait_free(const Me& me, bool leader) {
        if constexpr (L::kCarries) {
            mbarrier_wait(room.free(me.w), free);
            free ^= 1;
        } else {
            if (leader)
                tma_store_wait_read<0>();
            __syncwarp();
        }
    }

    // Shared memory ends with the block: what leaves from it must have been read.
    __device__ __forceinline__ void finish() const {
        if constexpr (C::kTmaStore && !L::kCarries)
            if (elect_one())
                tma_store_wait_read<0>();
    }

    // Rows of P go in units of 8 to the block of the cluster that owns them, unit u to block u % kSplit.
    __device__ __forceinline__ void gather(const Totals& total, const Me& me) const {
        if constexpr (C::kSplit == 1)
            named_sync<kThreads>(kAllBarrier);  // the last tile's sums have been read
#pragma unroll
        for (u32 sub = 0; sub < C::kSubs; ++sub) {
#pragma unroll
            for (u32 half = 0; half < 2; ++half) {
                const u32 unit = ((me.w * C::kSubs + sub) * 4 + me.warp) * 2 + half, owner = unit % C::kSplit;
                const u32 offset =
                    ((room.rank * L::kOwnedUnits + unit / C::kSplit) * 8 + me.lane / 4) * L::kPartRow +
                    me.lane % 4 * 8;
                const Shared local = room.base + L::kPartOffset + offset;
                const float* v = &total[sub][half * 2];
                if constexpr (C::kSplit == 1) {
#pragma unroll
                    for (u32 i = 0; i < kGroups; ++i)
                        store_shared2(local + i * 32, v[i * 4], v[i * 4 + 1]);
                } else {
                    const u32 to = remote_address(local, owner), barrier = remote_address(room.parts, owner);
#pragma unroll
                    for (u32 i = 0; i < kGroups; ++i)
                        send(to + i * 32, barrier, v[i * 4], v[i * 4 + 1]);
                }
            }
        }
    }

    // Adds the parts of this block's units in the order of K, eight outputs of one row of D at a time.
    __device__ __forceinline__ void add_parts(const Tile& tile, const Rows& of) const {
        if constexpr (C::kSplit == 1)
            named_sync<kThreads>(kAllBarrier);
        else
            mbarrier_wait(room.parts, 0);
        const u32 first = C::kSplit > 1 ? room.rank : 0;
        for (u32 t = threadIdx.x - kWarpgroup; t < L::kOwnedUnits * C::kBlockQ; t += kThreads) {
            const u32 slot = t / C::kBlockQ, unit = slot * C::kSplit + first, item = t % C::kBlockQ;
            if (unit >= L::kUnits)
                continue;
            const Shared from = room.base + L::kPartOffset + slot * 8 * L::kPartRow;
            float sum[8] = {};
            if constexpr (C::kSwap) {  // row `item` of Q, eight rows of P
#pragma unroll
                for (u32 part = 0; part < C::kSplit; ++part)
#pragma unroll
                    for (u32 n = 0; n < 8; ++n)
                        sum[n] +=
                            load_shared(from + (part * L::kOwnedUnits * 8 + n) * L::kPartRow + item * 4);
                out.put8(out.line(tile.row_q + item, tile, of), tile.row_p + unit * 8, sum);
            } else {  // a row of P, eight rows of Q
                constexpr u32 kPieces = C::kBlockQ / 8;
                const u32 row = item / kPieces, piece = item % kPieces;
#pragma unroll
                for (u32 part = 0; part < C::kSplit; ++part) {
                    const Shared at = from + (part * L::kOwnedUnits * 8 + row) * L::kPartRow + piece * 32;
#pragma unroll
                    for (u32 n = 0; n < 8; n += 4) {
                        const uint4 four = load_shared4(at + n * 4);
                        sum[n] += __uint_as_float(four.x), sum[n + 1] += __uint_as_float(four.y);
                        sum[n + 2] += __uint_as_float(four.z), sum[n + 3] += __uint_as_float(four.w);
                    }
                }
                out.put8(out.line(tile.row_p + unit * 8 + row, tile, of), tile.row_q + piece * 8, sum);
            }
        }
    }
};

}  // namespace dg::sm90
