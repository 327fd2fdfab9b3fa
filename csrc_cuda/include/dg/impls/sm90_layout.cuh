// What the parts of the Hopper matrix product share: the kernel's parameters, and where a block's shared
// memory holds what.
//
// The tensor core multiplies P (64 rows a warpgroup) by Q (up to 256 rows): P is A and Q is B, or, swapped, P
// is B and Q is A, which is how few rows of A keep whole tiles busy.
//
// Config is a struct that the generated source defines:
//   kElementBytes   1: FP8, summed a K block at a time and promoted to float32 totals; 2: bfloat16
//   kBlockQ         rows of Q in a tile
//   kStages         K blocks in the ring
//   kConsumers      warpgroups that multiply; kSubs: 64-row parts that each has
//   kSwap           P is B
//   kGrouping       kDense: one product; else many, each with a B of its own (scheduler/groups.cuh)
//   kSplit          blocks of a cluster that share a tile, each with its part of K
//   kStream         the last tiles are cut along K into equal parts, one for each block of the grid
//   kPMnMajor, kQMnMajor    the operand's rows are its contiguous axis (bfloat16)
//   kPFp4, kQFp4    the operand is packed e2m1, two values a byte along K, and becomes FP8 in shared memory
//                   (mma/unpack.cuh)
//   kScaleP, kScaleQ        per K block: kScaleNone, kScaleBlock (one for 128 rows), kScaleRow (one for each)
//   kScaleKMajor    the row scales are stored with K as their contiguous axis (one side alone has them)
//   kScaleSteps     row scales of a K block: 1, or 4, one for 32 of K
//   kPairs          two K blocks in flight a warpgroup (kSubs 1)
//   kOrdered        two or three warpgroups take turns at the tensor core
//   kDBytes         2: D is bfloat16; 4: float32
//   kTmaStore       D leaves through shared memory by bulk copies
//   kBoxes          boxes of shared memory that each consumer warp has for that: with room for its whole part of
//                   a tile, D leaves at once; with less, in rounds
#pragma once

#include <dg/common/math.cuh>
#include <dg/ptx/copy.cuh>

namespace dg::sm90 {

using namespace dg::ptx;

constexpr u32 kBlockK = 128;  // bytes of K in one stage: a row of a tile fills the 128-byte swizzle
constexpr u32 kWarpgroup = 128;
// Tiles along P that are neighbours in the order of tiles.
constexpr u32 kBand = 16;
// Rows of P that they have of products in groups, whose A is longer than the L2: 32768 x 6144 x 7168 in 4 groups
// takes 2062 us in bands of 2048 rows and 2106 in bands of 4096 (256 x 128 tiles, one H200, one run of each).
constexpr u32 kBandRows = 2048;
// Blocks that a workspace has flags for, and flags of a block, one for each consumer warp.
constexpr u32 kMostBlocks = 256, kFlagsBlock = 16;
constexpr u32 kScaleNone = 0, kScaleBlock = 1, kScaleRow = 2;
// Where the rows of a group are: every group has a matrix A (batched: all of its rows, masked: as many as are
// counted), or the groups share one, by a label a row (contiguous) or by the end row of each group (psum).
constexpr u32 kDense = 0, kBatched = 1, kMasked = 2, kContiguous = 3, kPsum = 4;
// Tiles that the scheduler of grouped products may be ahead of those who work on them.
constexpr u32 kSlots = 8, kSlotBytes = 32;
// Warps that unpack FP4: the last two of the producer's warpgroup.
constexpr u32 kUnpackers = 2;
// A tile whose rows are contiguous lies in chunks of 64 rows by 64 of K.
constexpr u32 kChunkRows = 64, kChunkBytes = 64 * 128;
// What a warp stores at once: 16 rows of 64 bfloat16 values, which fill the 128-byte swizzle.
constexpr u32 kBoxColumns = 64, kBoxBytes = 16 * kBoxColumns * 2;

struct Scale {
    const float* values;       // null: no scale
    i64 row_stride, k_stride;  // in elements; row_stride counts rows, or blocks of 128 rows
    i64 group_stride;          // between the scales of two groups
};

struct Params {
    TensorMap p_map, q_map, p_scale_map, q_scale_map, d_map;
    Scale p_scale, q_scale;  // of 128 rows in the main loop; of whole rows in the epilogue
    void* d;
    const void* c;      // null: nothing is added
    void* workspace;    // of kStream: flags, which are clear, then room for the sums of one tile a block
    const i32* layout;  // of groups: labels, counts or end rows
    i64 d_stride, c_stride;
    i64 d_group_stride, c_group_stride;
    u32 rows_p, rows_q, k_blocks;  // rows of one matrix
    u32 tiles_p, tiles_q;
    u32 groups;
    u32 alignment;  // psum: a group starts at the next multiple of this
    u32 zero_gaps;  // psum: rows between a group's end and the next multiple become zero
    // Columns of D in each head before its hole, in the hole, and around it; a width of 0: no heads.
    u32 head_left, head_hole, head_width;
    u32 wide;  // every eight columns of a row of D that start at a multiple of 8 may leave as 16-byte pieces
    u32 even;  // and every two that start at an even one as one piece
};

template <class C>
struct Layout {
    static constexpr u32 kElements = kBlockK / C::kElementBytes;  // of K in one stage
    static constexpr u32 kBlockP = 64 * C::kSubs * C::kConsumers;
    static constexpr u32 kRowsQ = C::kQMnMajor ? align(C::kBlockQ, kChunkRows) : C::kBlockQ;
    static constexpr u32 kBytesP = kBlockP * kBlockK, kBytesQ = kRowsQ * kBlockK;
    static constexpr bool kGrouped = C::kGrouping != kDense;
    // Whether each group has a matrix A of its own; B it has always.
    static constexpr bool kGroupedA = C::kGrouping == kBatched || C::kGrouping == kMasked;
    static constexpr bool kGroupedP = C::kSwap ? kGrouped : kGroupedA,
                          kGroupedQ = C::kSwap ? kGroupedA : kGrouped;
    static constexpr bool kUnpacks = C::kPFp4 || C::kQFp4;
    static constexpr u32 kPackedBytes = kElements / 2;  // of K in one stage, of packed FP4
    static constexpr u32 kPackedP = C::kPFp4 ? kBlockP * kPackedBytes : 0,
                         kPackedQ = C::kQFp4 ? C::kBlockQ * kPackedBytes : 0;
    static constexpr u32 kStageBytes = align(kBytesP + kBytesQ, 1024u);  // a swizzle repeats every 1024 bytes
    // Row scales of one stage. Where K is their major axis, 16 bytes a row come along: four K blocks, of
    // which this stage's is one.
    static constexpr u32 kScaleStep = C::kScaleKMajor ? 16 : 4;  // bytes from row to row
    static constexpr u32 kScaleBytesP = C::kScaleP == kScaleRow ? kBlockP * kScaleStep * C::kScaleSteps : 0;
    static constexpr u32 kScaleBytesQ =
        C::kScaleQ == kScaleRow ? C::kBlockQ * kScaleStep * C::kScaleSteps : 0;
    static constexpr u32 kScaleAtQ = align(kScaleBytesP, 128u);
    static constexpr u32 kScaleStage = kScaleAtQ + align(kScaleBytesQ, 128u);
    // What arrives ready for the products, and what has to be unpacked.
    static constexpr u32 kLoadBytes =
        (C::kPFp4 ? 0 : kBytesP) + (C::kQFp4 ? 0 : kBytesQ) + kScaleBytesP + kScaleBytesQ;
    static constexpr u32 kPackedStage = align(kPackedP + kPackedQ, 128u);
    static constexpr u32 kPackedOffset = C::kStages * kStageBytes;
    static constexpr u32 kScaleOffset = kPackedOffset + C::kStages * kPackedStage;
    static constexpr u32 kPanels = C::kBlockQ / kBoxColumns;  // boxes beside each other
    static constexpr u32 kTileBoxes = C::kSubs * kPanels;     // of one warp
    static constexpr u32 kStoreOffset = align(kScaleOffset + C::kStages * kScaleStage, 1024u);
    static constexpr u32 kStoreBytes = C::kTmaStore ? C::kConsumers * 4 * C::kBoxes * kBoxBytes : 0;
    // Sums on their way to D's layout, or to the block of the cluster that adds the parts: from each block
    // the units of 8 rows of P that this one owns. 32 bytes more a row put four rows into different banks.
    static constexpr bool kGather = C::kSwap || C::kSplit > 1;
    // A tile's first K block stands by itself: under its products the next tile is looked up. Other scales than
    // those of blocks would make wide tiles spill.
    static constexpr bool kAlone = C::kScaleP == kScaleRow && C::kScaleQ == kScaleBlock && C::kTmaStore &&
                                   !C::kStream && C::kConsumers >= 2;
    // And the totals of the tile before leave under them, which have registers of their own. Three warpgroups would
    // take 2 % longer so.
    static constexpr bool kBehind = kAlone && C::kConsumers == 2;
    // A warp that has nothing else to do sends off what the consumers have put into boxes. In wide tiles of a single
    // consumer, and in some of 256 columns, there is no register left for it.
    static constexpr bool kCarries = C::kTmaStore && C::kBoxes == kTileBoxes && C::kConsumers > 1 &&
                                     C::kBlockQ < 256 && !C::kStream && !kUnpacks;
    // P is loaded 64 rows at a time, and those without a row of the group are not.
    static constexpr bool kPartLoads = kGrouped && !C::kSwap && !C::kPFp4;
    static constexpr u32 kUnits = kBlockP / 8, kOwnedUnits = cdiv(kUnits, C::kSplit);
    static constexpr u32 kPartRow = C::kBlockQ * 4 + 32;
    static constexpr u32 kPartOffset = kStoreOffset + kStoreBytes;
    static constexpr u32 kPartBytes = kGather ? C::kSplit * kOwnedUnits * 8 * kPartRow : 0;
    static constexpr u32 kBarrierOffset = kPartOffset + kPartBytes;
    // Barriers of stages (full, empty, packed), of the parts of a split tile, of slots (given, taken), and of each
    // consumer's boxes (filled, free).
    static constexpr u32 kBarriers = (kUnpacks ? 3 : 2) * C::kStages + 1 + (kGrouped ? 2 * kSlots : 0) +
                                     (kCarries ? 2 * C::kConsumers : 0);
    static constexpr u32 kSlotOffset = align(kBarrierOffset + kBarriers * 8, kGrouped ? 16u : 8u);
    static constexpr u32 kBytes =
        kSlotOffset + (kGrouped ? kSlots * kSlotBytes : 0) + 1024;  // 1024 to align the start
    static constexpr u32 kThreads = kWarpgroup * (C::kConsumers + 1);

    static_assert(!C::kTmaStore || (!kGather && C::kDBytes == 2), "a bulk store takes bfloat16 rows of D");
    static_assert(!C::kStream || !kGather, "tiles that are cut keep their sums in registers");
    static_assert(!kGrouped || (C::kSplit == 1 && !C::kStream), "tiles of groups are whole");
    static_assert(!kUnpacks || C::kElementBytes == 1, "FP4 becomes FP8");
    static_assert(!(C::kPMnMajor || C::kQMnMajor) || C::kElementBytes == 2, "FP8 is multiplied K-major");
    static_assert(!C::kTmaStore || (C::kBoxes > 0 && C::kBoxes <= kTileBoxes), "a box has 64 columns");
    static_assert(C::kScaleSteps == 1 || (C::kScaleP == kScaleRow && C::kScaleQ == kScaleRow && !C::kPairs),
                  "scales of 32 of K belong to single rows on both sides");
    static_assert(!C::kScaleKMajor || C::kScaleP != kScaleRow || C::kScaleQ != kScaleRow,
                  "row scales of both sides are stored row-major");
    // A tile of Q then lies in two blocks of 128 rows at most.
    static_assert(C::kScaleQ != kScaleBlock || C::kBlockQ <= 128 || C::kBlockQ - 128 <= gcd(C::kBlockQ, 128u),
                  "a tile would need the scales of three blocks of 128 rows");
};

// Where a thread is in the ring of stages.
template <u32 kStages>
struct Ring {
    u32 stage = 0, parity = 0;

    __device__ __forceinline__ void advance() {
        if (++stage == kStages)
            stage = 0, parity ^= 1;
    }
};

// A block's shared memory and its place in the cluster.
template <class C>
struct Room {
    using L = Layout<C>;

    Shared base, full, empty, parts;
    u32 rank;  // in the cluster

    __device__ __forceinline__ Shared packed() const { return parts + 8; }  // barriers of packed stages
    __device__ __forceinline__ Shared given() const { return packed() + (L::kUnpacks ? C::kStages * 8 : 0); }
    __device__ __forceinline__ Shared taken() const { return given() + kSlots * 8; }
    __device__ __forceinline__ Shared filled(u32 w) const {
        return given() + (L::kGrouped ? 2 * kSlots * 8 : 0) + w * 8;
    }
    __device__ __forceinline__ Shared free(u32 w) const { return filled(C::kConsumers + w); }
    __device__ __forceinline__ Shared slot(u32 i) const { return base + L::kSlotOffset + i * kSlotBytes; }
    __device__ __forceinline__ Shared packed_p(u32 s) const {
        return base + L::kPackedOffset + s * L::kPackedStage;
    }
    __device__ __forceinline__ Shared packed_q(u32 s) const { return packed_p(s) + L::kPackedP; }

    __device__ __forceinline__ Shared stage_p(u32 s) const { return base + s * L::kStageBytes; }
    __device__ __forceinline__ Shared stage_q(u32 s) const { return base + s * L::kStageBytes + L::kBytesP; }
    __device__ __forceinline__ Shared scales_p(u32 s) const {
        return base + L::kScaleOffset + s * L::kScaleStage;
    }
    __device__ __forceinline__ Shared scales_q(u32 s) const { return scales_p(s) + L::kScaleAtQ; }

    // The boxes of a consumer's warp, from number `first` on.
    __device__ __forceinline__ Shared boxes(u32 w, u32 warp, u32 first = 0) const {
        return base + L::kStoreOffset + ((w * 4 + warp) * C::kBoxes + first) * kBoxBytes;
    }

    // Hands a stage back to the producer, one arrival a warp.
    __device__ __forceinline__ void release(u32 stage, u32 lane) const {
        if (lane == 0)
            mbarrier_arrive(empty + stage * 8);
    }
};

}  // namespace dg::sm90
