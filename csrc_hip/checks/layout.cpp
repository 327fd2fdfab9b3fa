// Proves the maps of dg_hip/layout.h while it compiles, with whichever compiler is asked: the host's, clang
// for an AMD target, hipcc, nvcc.  As a host program it also prints the offsets of a weight matrix, for
// tests/test_sources.py.
#include <dg_hip/layout.h>

namespace {

using namespace dg_hip;

constexpr index_t kN = 48, kK = 128;

// Every element has its own place, and the inverse finds it.
constexpr bool kpack2_is_a_bijection() {
    bool seen[kN * kK] = {};
    for (index_t n = 0; n < kN; ++n)
        for (index_t k = 0; k < kK; ++k) {
            const index_t offset = kpack2_offset(n, k, kK);
            if (offset < 0 || offset >= kN * kK || seen[offset])
                return false;
            seen[offset] = true;
            const WeightCoord back = kpack2_coord(offset, kK);
            if (back.n != n || back.k != k)
                return false;
        }
    return true;
}

// 64 k of a strip: lane l reads bytes 16 l .. 16 l + 15 of one kilobyte.
constexpr bool a_wave_reads_one_kilobyte() {
    for (index_t n = 0; n < kN; ++n)
        for (index_t k = 0; k < kK; ++k) {
            const index_t start = kpack2_offset(n / kTile * kTile, k / 64 * 64, kK);
            if (kpack2_offset(n, k, kK) != start + kpack2_lane(n, k) * kLaneBytes + k % kTile)
                return false;
        }
    return true;
}

// An instruction's 64 lanes hold each operand byte once.
constexpr bool operands_cover_the_tile() {
    bool seen[kMmaM * kMmaK] = {};
    for (int lane = 0; lane < kWave; ++lane)
        for (int byte = 0; byte < kMmaLaneBytes; ++byte) {
            bool& here = seen[operand_row(lane) * kMmaK + operand_k(lane) + byte];
            if (here)
                return false;
            here = true;
        }
    return true;
}

constexpr bool results_cover_the_tile(ResultMap map) {
    bool seen[kMmaM * kMmaN] = {};
    for (int lane = 0; lane < kWave; ++lane)
        for (int slot = 0; slot < 4; ++slot) {
            const Coord at = result(map, lane, slot);
            if (at.row < 0 || at.row >= kMmaM || at.col < 0 || at.col >= kMmaN ||
                seen[at.row * kMmaN + at.col])
                return false;
            seen[at.row * kMmaN + at.col] = true;
        }
    return true;
}

static_assert(kpack2_is_a_bijection());
static_assert(a_wave_reads_one_kilobyte());
static_assert(operands_cover_the_tile());
static_assert(results_cover_the_tile(ResultMap::mmac) && results_cover_the_tile(ResultMap::mfma));
// One lane by hand: lane 17 is the second of lane group 1.
static_assert(result(ResultMap::mmac, 17, 2).row == 1 && result(ResultMap::mmac, 17, 2).col == 9);
static_assert(result(ResultMap::mfma, 17, 2).row == 6 && result(ResultMap::mfma, 17, 2).col == 1);
// The first row of the second strip of a large matrix: past 2^31 bytes an int would have wrapped.
static_assert(kpack2_offset(1 << 17, 0, 1 << 15) == 1LL << 32);

}  // namespace

#if !defined(__HIP__) && !defined(__CUDACC__)
#include <cstdio>

int main() {
    for (index_t n = 0; n < kN; ++n)
        for (index_t k = 0; k < kK; ++k)
            std::printf("%lld\n", kpack2_offset(n, k, kK));
    return 0;
}
#endif
