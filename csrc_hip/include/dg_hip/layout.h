// Where a matrix instruction keeps its elements, and the weight layout that feeds it with 16-byte loads.
//
// Pure C++17 arithmetic, no instruction and no HIP header: the host's compiler proves the maps in
// csrc_hip/checks/layout.cpp, and kernels use them as compile-time constants.  FP8 operands are one byte an
// element, so byte and element offsets agree.
#pragma once

namespace dg_hip {

// 64 bits: 128 experts of 4096 x 4096 weights already fill 2^31 bytes.
using index_t = long long;

constexpr int kWave = 64;  // lanes of a wave on every target
constexpr int kMmaM = 16;  // the FP8 instruction is 16 x 16 x 32 on gfx938 (MMAC) and gfx950 (MFMA) alike
constexpr int kMmaN = 16;
constexpr int kMmaK = 32;
constexpr int kTile = 16;  // a weight tile is 16 rows of N by 16 bytes of K
constexpr int kLaneBytes = 16;
constexpr int kMmaLaneBytes = kMmaM * kMmaK / kWave;  // 8: a 16-byte load feeds two instructions

struct Coord {
    int row;  // along M, or along N for a weight operand
    int col;  // along N
};

// Operands, both targets: a lane holds 8 consecutive k of one row.
constexpr int operand_row(int lane) {
    return lane % kMmaM;
}
constexpr int operand_k(int lane) {
    return lane / kMmaM * kMmaLaneBytes;
}

// Results: each lane holds four float32 values, `slot` 0..3.  The two instructions differ in this map alone.
enum class ResultMap { mmac, mfma };

constexpr Coord result(ResultMap map, int lane, int slot) {
    const int low = lane % 16, high = lane / 16;
    return map == ResultMap::mmac ? Coord{low, high + 4 * slot}   // gfx938: columns 4 apart
                                  : Coord{4 * high + slot, low};  // gfx950: consecutive rows
}

// nt_kpack2: weights [N, K], K contiguous, N and K multiples of 16, reordered to
// [N/16, K/16, 16 of n, 16 of k].  A strip of 16 rows stays contiguous, and 64 k of it are exactly one
// 16-byte load of each lane of a wave.
constexpr index_t kpack2_offset(index_t n, index_t k, index_t size_k) {
    return (n / kTile * size_k + k / kTile * kTile) * kTile + n % kTile * kTile + k % kTile;
}

struct WeightCoord {
    index_t n;
    index_t k;
};

// Its inverse: which weight stands at a byte offset.
constexpr WeightCoord kpack2_coord(index_t offset, index_t size_k) {
    const index_t strip = offset / (kTile * size_k), inside = offset % (kTile * size_k);
    const index_t tile = inside / (kTile * kTile), byte = inside % (kTile * kTile);
    return {strip * kTile + byte / kTile, tile * kTile + byte % kTile};
}

// The lane that loads element (n, k) when a wave reads 64 k of a strip, 16 bytes a lane.
constexpr int kpack2_lane(index_t n, index_t k) {
    return static_cast<int>(k / kTile % 4 * kTile + n % kTile);
}

}  // namespace dg_hip
