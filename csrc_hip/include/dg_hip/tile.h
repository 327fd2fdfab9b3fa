// The product of one tile, P x Q^T: the one main loop of this backend.
//
// A block of four waves multiplies a tile. 64 bytes of K of a strip of 16 rows are one kilobyte of LDS in the order
// of lanes, a *slab*: each lane loads 16 bytes of one row, so that it reads 8 bytes of k for one instruction and 8
// more for the next. That takes K in another order than it has, the same one for P and Q, so sums are those of K.
// Slabs are double-buffered: while one step is multiplied, the next one's bytes come into registers.
#pragma once

#include <dg_hip/operands.h>

namespace dg_hip {

constexpr int kWaves = 4, kThreads = kWaves * kWave;
constexpr int kSlabK = 64, kSlabBytes = kTile * kSlabK;

// How four waves share a tile, and the strips of 16 rows that each has of P and of Q.
template <int kWavesP_, int kStripsP_, int kStripsQ_>
struct Shape {
    static constexpr int kWavesP = kWavesP_, kWavesQ = kWaves / kWavesP_;
    static constexpr int kStripsP = kStripsP_, kStripsQ = kStripsQ_;
    static constexpr int kP = kWavesP * kStripsP * kTile, kQ = kWavesQ * kStripsQ * kTile;
    static constexpr int kSlabs = (kP + kQ) / kTile;
    static constexpr int kStage = kSlabs * kSlabBytes;
    // The way out: each wave lays 16 rows of float32 down, apart by 4 words more so that banks differ.
    static constexpr int kColumns = kStripsQ * kTile, kPitch = kColumns + 4;
    static constexpr int kOut = kWaves * kTile * kPitch * 4;
    static constexpr int kLds = most(2 * kStage, kOut);
};

using Large = Shape<2, 4, 4>;  // 128 x 128
using Small = Shape<1, 2, 2>;  // 32 x 128: few rows

template <class S>
struct Accumulators {
    F32x4 v[S::kStripsP][S::kStripsQ];
};

// No scales inside the loop.
struct Unscaled {
    static constexpr int kSteps = 0;
};

// Scales of blocks along K. A partial sum covers `kSteps` instructions (32 bytes of K each), and is then added, times
// the scales of its row and column.
template <int kSteps_>
struct BlockScales {
    static constexpr int kSteps = kSteps_;
    const f32 *p, *q;            // of the tile's first row and column
    i64 p_row, p_k, q_row, q_k;  // elements from one scale to the next
    i32 p_rows, q_rows;          // rows that have scales
    i32 q_first, q_gran;         // the tile's first row of Q, and the rows of Q that share a scale
    i32 p_k_steps, q_k_steps;    // partial sums that a scale covers along K

    DG_DEVICE f32 of_p(i32 row, i64 part) const {
        return row < p_rows ? load<f32>(p + row * p_row + part / p_k_steps * p_k) : 0.0f;
    }
    DG_DEVICE f32 of_q(i32 row, i64 part) const {
        return row < q_rows ? load<f32>(q + (q_first + row) / q_gran * q_row + part / q_k_steps * q_k) : 0.0f;
    }
};

// The rows of a wave's first strips within the tile.
template <class S>
DG_DEVICE i32 first_p() {
    return static_cast<i32>(wave()) / S::kWavesQ * S::kStripsP * kTile;
}
template <class S>
DG_DEVICE i32 first_q() {
    return static_cast<i32>(wave()) % S::kWavesQ * S::kStripsQ * kTile;
}

template <class S, class P, class Q>
struct Loader {
    static constexpr int kOwn = (S::kSlabs + kWaves - 1) / kWaves;  // slabs of a wave
    const P& p;
    const Q& q;
    U32x4 held[kOwn];

    DG_DEVICE void fetch(i64 k) {
        const i64 at = k + static_cast<i64>(lane() / kTile * kLaneBytes);
        for (int i = 0; i < kOwn; ++i) {
            const int slab = static_cast<int>(wave()) + i * kWaves;
            const int row = static_cast<int>(lane() % kTile);
            if (slab * kTile < S::kP)
                held[i] = p.at(slab * kTile + row, at);
            else if (slab < S::kSlabs)
                held[i] = q.at(slab * kTile - S::kP + q_row(row), at);
        }
    }
    DG_DEVICE void lay_down(u8* stage) const {
        for (int i = 0; i < kOwn; ++i) {
            const int slab = static_cast<int>(wave()) + i * kWaves;
            if (slab < S::kSlabs)
                store(stage + slab * kSlabBytes + lane() * kLaneBytes, held[i]);
        }
    }
};

// Eight of a lane's 16 bytes.
DG_DEVICE u64 half(const U32x4& x, int which) {
    return x.v[2 * which] | static_cast<u64>(x.v[2 * which + 1]) << 32;
}

template <class S>
DG_DEVICE void clear(Accumulators<S>& acc) {
    for (auto& row : acc.v)
        for (F32x4& x : row)
            x = F32x4{{0, 0, 0, 0}};
}

// Adds the partial sums of one part of K, scaled.
template <class S, class Scales>
DG_DEVICE void promote(Accumulators<S>& acc, Accumulators<S>& part, const Scales& scales, i64 number) {
    const int row = result(ResultMap::mmac, static_cast<int>(lane()), 0).row;
    f32 of_p[S::kStripsP];
    for (int i = 0; i < S::kStripsP; ++i)
        of_p[i] = scales.of_p(first_p<S>() + i * kTile + row, number);
    for (int j = 0; j < S::kStripsQ; ++j)
        for (int slot = 0; slot < 4; ++slot) {
            const int col = result(ResultMap::mmac, static_cast<int>(lane()), slot).col;
            const f32 of_q = scales.of_q(first_q<S>() + j * kTile + col, number);
            for (int i = 0; i < S::kStripsP; ++i)
                acc.v[i][j].v[slot] =
                    __builtin_fmaf(part.v[i][j].v[slot], of_p[i] * of_q, acc.v[i][j].v[slot]);
        }
    clear(part);
}

// acc = P x Q^T of this block's tile, K `bytes` long. Strips of P from row `rows` on are left out: their accumulators
// stay 0. All threads of the block take part; LDS may be written by others when it returns.
template <class Element, class S, class Scales, class P, class Q>
DG_DEVICE void multiply_tile(Accumulators<S>& acc, const P& p, const Q& q, i64 bytes, i32 rows,
                             const Scales& scales, u8* lds) {
    constexpr bool kParts = Scales::kSteps > 0;
    Loader<S, P, Q> loader{p, q, {}};
    Accumulators<S> part;
    clear(acc);
    if constexpr (kParts)
        clear(part);
    const i64 steps = ceil_div(bytes, kSlabK);
    i64 done = 0;  // instructions along K
    if (steps > 0)
        loader.fetch(0);
    for (i64 step = 0; step < steps; ++step) {
        u8* const stage = lds + step % 2 * S::kStage;
        loader.lay_down(stage);
        sync();
        if (step + 1 < steps)
            loader.fetch((step + 1) * kSlabK);
        const u8* const own_p = stage + first_p<S>() / kTile * kSlabBytes + lane() * kLaneBytes;
        const u8* const own_q = stage + (S::kP + first_q<S>()) / kTile * kSlabBytes + lane() * kLaneBytes;
        U32x4 b[S::kStripsQ];
        for (int j = 0; j < S::kStripsQ; ++j)
            b[j] = load<U32x4>(own_q + j * kSlabBytes);
        for (int which = 0; which < 2; ++which) {
            for (int i = 0; i < S::kStripsP; ++i) {
                if (first_p<S>() + i * kTile >= rows)
                    continue;
                const u64 a = half(load<U32x4>(own_p + i * kSlabBytes), which);
                for (int j = 0; j < S::kStripsQ; ++j)
                    if constexpr (kParts)
                        multiply<Element>(part.v[i][j], a, half(b[j], which));
                    else
                        multiply<Element>(acc.v[i][j], a, half(b[j], which));
            }
            ++done;
            if constexpr (kParts)
                if (done % Scales::kSteps == 0)
                    promote<S>(acc, part, scales, done / Scales::kSteps - 1);
        }
    }
    if constexpr (kParts)
        if (done % Scales::kSteps != 0)
            promote<S>(acc, part, scales, done / Scales::kSteps);
    sync();
}

// Hands the tile on, 16 columns of one row at a time: out(row, column, values) with the row and first column within
// the tile, for rows below `rows`. LDS is free again when it returns.
template <class S, class Out>
DG_DEVICE void put_tile(const Accumulators<S>& acc, i32 rows, u8* lds, const Out& out) {
    f32* const own = reinterpret_cast<f32*>(lds) + wave() * kTile * S::kPitch;
    const int own_lane = static_cast<int>(lane());
    for (int i = 0; i < S::kStripsP; ++i) {
        const i32 first = first_p<S>() + i * kTile;
        if (first >= rows)
            break;
        for (int j = 0; j < S::kStripsQ; ++j)
            for (int slot = 0; slot < 4; ++slot) {
                const Coord at = result(ResultMap::mmac, own_lane, slot);
                own[at.row * S::kPitch + j * kTile + at.col] = acc.v[i][j].v[slot];
            }
        sync_wave();
        constexpr int kPieces = S::kStripsQ;  // of 16 columns
        for (int piece = own_lane; piece < kTile * kPieces; piece += kWave) {
            const int row = piece / kPieces, column = piece % kPieces * kTile;
            f32 values[kTile];
            for (int c = 0; c < kTile; ++c)
                values[c] = own[row * S::kPitch + column + c];
            if (first + row < rows)
                out(first + row, first_q<S>() + column, values);
        }
        sync_wave();
    }
    sync();
}

}  // namespace dg_hip
