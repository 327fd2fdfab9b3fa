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
    // In two parts, of which a tile asks for the first one once: its division is slow.
    DG_DEVICE i32 group(i32 row) const { return row < q_rows ? (q_first + row) / q_gran : -1; }
    DG_DEVICE f32 of_group(i32 group, i64 number) const {
        return group < 0 ? 0.0f : load<f32>(q + group * q_row + number * q_k);
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

// Eight of a lane's 16 bytes.
DG_DEVICE u64 half(const U32x4& x, int which) {
    return x.v[2 * which] | static_cast<u64>(x.v[2 * which + 1]) << 32;
}

// One operand's slabs as a wave brings them from memory to LDS: every kWaves-th one of `kStrips`. `kInOrder`: the first
// instruction of a slab takes its first 32 bytes of K, and the second one the rest, as scales of 32 bytes ask for.
template <class Operand, int kStrips, bool kIsQ, bool kInOrder>
struct Slabs {
    static constexpr int kOwn = (kStrips + kWaves - 1) / kWaves;
    const Operand& from;
    const u8* lines[kOwn];
    U32x4 held[kOwn];

    static DG_DEVICE int strip(int i) { return static_cast<int>(wave()) + i * kWaves; }
    static DG_DEVICE bool exists(int i) { return (i + 1) * kWaves <= kStrips || strip(i) < kStrips; }
    static DG_DEVICE i32 row(int i) {
        const int within = static_cast<int>(lane() % kTile);
        return strip(i) * kTile + (kIsQ ? q_row(within) : within);
    }
    static DG_DEVICE i64 first_k() { return static_cast<i64>(lane() / kTile * kLaneBytes); }
    // Whether `fetch_pieces` may be called for steps that K fills.
    DG_DEVICE bool begin() {
        DG_UNROLL
        for (int i = 0; i < kOwn; ++i)
            held[i] = kZeros16;
        DG_UNROLL
        for (int i = 0; i < kOwn; ++i)
            lines[i] = exists(i) ? from.line(row(i)) : nullptr;
        return from.direct();
    }
    // Rows of zeros have been laid down as such by `begin`.
    DG_DEVICE void fetch_pieces(i64 k) {
        DG_UNROLL
        for (int i = 0; i < kOwn; ++i)
            if (lines[i] != nullptr)
                held[i] = from.piece(lines[i], k + first_k());
    }
    DG_DEVICE void fetch(i64 k) {
        DG_UNROLL
        for (int i = 0; i < kOwn; ++i)
            if (lines[i] != nullptr)
                held[i] = from.part(lines[i], k + first_k());
    }
    DG_DEVICE void lay_down(u8* stage) const {
        DG_UNROLL
        for (int i = 0; i < kOwn; ++i) {
            if (!exists(i))
                continue;
            u8* const own = stage + strip(i) * kSlabBytes;
            if constexpr (kInOrder) {
                const u32 piece = lane() / kTile, row = lane() % kTile;  // 16 bytes: two lanes' shares
                for (u32 part = 0; part < 2; ++part)
                    store(own + ((piece % 2 * 2 + part) * kTile + row) * kLaneBytes + piece / 2 * 8,
                          half(held[i], static_cast<int>(part)));
            } else {
                store(own + lane() * kLaneBytes, held[i]);
            }
        }
    }
};

template <class S>
DG_DEVICE void clear(Accumulators<S>& acc) {
    DG_UNROLL
    for (int i = 0; i < S::kStripsP; ++i) {
        DG_UNROLL
        for (int j = 0; j < S::kStripsQ; ++j)
            acc.v[i][j] = F32x4{{0, 0, 0, 0}};
    }
}

// The scales of a wave's rows and columns for one partial sum: a lane has those of the row and column of its number.
template <class S, class Scales>
struct WaveScales {
    static constexpr int kRows = S::kStripsP * kTile;
    static_assert(kRows <= kWave && S::kColumns <= kWave && (kRows + S::kColumns) * 4 <= kSlabBytes);
    const Scales& from;
    i32 group;
    f32 p, q;

    DG_DEVICE explicit WaveScales(const Scales& scales) : from(scales), group(-1), p(0), q(0) {
        if (lane() < S::kColumns)
            group = scales.group(first_q<S>() + static_cast<i32>(lane()));
    }
    DG_DEVICE void fetch(i32 part) {
        p = from.of_p(first_p<S>() + static_cast<i32>(lane() % kRows), part);  // all lanes: it may shuffle
        q = from.of_group(group, part / from.q_k_steps);
    }
    // Adds partial sums, scaled, and clears them. `own` is LDS that no other wave uses, through which each lane gets the
    // scales of its results; it is free again when this returns.
    DG_DEVICE void promote(Accumulators<S>& acc, Accumulators<S>& part, f32* own) const {
        store(own + lane() % kRows, p);
        if (lane() < S::kColumns)
            store(own + kRows + lane(), q);
        sync_wave();
        const Coord first = result(ResultMap::mmac, static_cast<int>(lane()), 0);
        f32 of_p[S::kStripsP];
        DG_UNROLL
        for (int i = 0; i < S::kStripsP; ++i)
            of_p[i] = load<f32>(own + i * kTile + first.row);
        DG_UNROLL
        for (int j = 0; j < S::kStripsQ; ++j) {
            DG_IN_ORDER;  // else all 64 products of scales are in registers before the first one is used
            DG_UNROLL
            for (int slot = 0; slot < 4; ++slot) {
                const f32 of_q = load<f32>(own + kRows + j * kTile + first.col + 4 * slot);
                DG_UNROLL
                for (int i = 0; i < S::kStripsP; ++i)
                    acc.v[i][j].v[slot] =
                        __builtin_fmaf(part.v[i][j].v[slot], of_p[i] * of_q, acc.v[i][j].v[slot]);
            }
        }
        DG_IN_ORDER;
        clear(part);
        sync_wave();
    }
};
template <class S>
struct WaveScales<S, Unscaled> {
    DG_DEVICE explicit WaveScales(const Unscaled&) {}
};

// What a lane has of a slab for so many instructions.
template <int kInstructions>
struct Pieces {
    using Type = U32x4;
};
template <>
struct Pieces<1> {
    using Type = u64;
};
DG_DEVICE u64 operand_of(const U32x4& piece, int which) {
    return half(piece, which);
}
DG_DEVICE u64 operand_of(u64 piece, int) {
    return piece;
}

// Adds the products of a wave's slabs, from where its lane's pieces begin, to the sums of `strips` strips of P. All of
// P's pieces are loaded `kAhead` of the first instruction, where registers allow for that.
template <class Element, class S, class Piece, bool kAhead>
DG_DEVICE void add_products(Accumulators<S>& sums, const u8* p, const u8* q, int strips) {
    Piece a[S::kStripsP], b[S::kStripsQ];
    DG_UNROLL
    for (int j = 0; j < S::kStripsQ; ++j)
        b[j] = load<Piece>(q + j * kSlabBytes);
    if constexpr (kAhead) {
        DG_UNROLL
        for (int i = 0; i < S::kStripsP; ++i)
            a[i] = load<Piece>(p + i * kSlabBytes);
    }
    DG_UNROLL
    for (int i = 0; i < S::kStripsP; ++i) {
        if (i >= strips)
            continue;
        if constexpr (!kAhead)
            a[i] = load<Piece>(p + i * kSlabBytes);
        DG_UNROLL
        for (int which = 0; which < static_cast<int>(sizeof(Piece)) / 8; ++which) {
            DG_UNROLL
            for (int j = 0; j < S::kStripsQ; ++j)
                multiply<Element>(sums.v[i][j], operand_of(a[i], which), operand_of(b[j], which));
        }
    }
}

// A slab that this wave alone writes, of the stage of `step`: nobody reads it from the sync of the step before until the
// wave lays down that step.
template <class S>
DG_DEVICE f32* own_slab(u8* lds, i32 step) {
    static_assert(S::kQ / kTile >= kWaves);
    return reinterpret_cast<f32*>(lds + (step & 1) * S::kStage + (S::kP / kTile + wave()) * kSlabBytes);
}

// acc += P x Q^T of this block's tile, K `bytes` long. Strips of P from row `rows` on are left out: their accumulators
// stay as they are. All threads of the block take part; LDS may be written by others when it returns.
template <class Element, class S, class Scales, class P, class Q>
DG_DEVICE void accumulate_tile(Accumulators<S>& acc, const P& p, const Q& q, i64 bytes, i32 rows,
                               const Scales& scales, u8* lds) {
    constexpr bool kParts = Scales::kSteps > 0, kInOrder = Scales::kSteps == 1;
    static_assert(kInOrder || Scales::kSteps % 2 == 0, "a partial sum ends with a slab");
    Slabs<P, S::kP / kTile, false, kInOrder> slabs_p{p, {}, {}};
    Slabs<Q, S::kQ / kTile, true, kInOrder> slabs_q{q, {}, {}};
    Accumulators<S> part;
    WaveScales<S, Scales> factors(scales);
    if constexpr (kParts)
        clear(part);
    Accumulators<S>& sums = kParts ? part : acc;
    constexpr int kTogether = kInOrder ? 1 : 2;  // instructions before sums may be promoted
    using Piece = typename Pieces<kTogether>::Type;
    const bool direct_p = slabs_p.begin(), direct_q = slabs_q.begin(), direct = direct_p && direct_q;
    const int strips = static_cast<int>(least(ceil_div(rows - first_p<S>(), kTile), i64{S::kStripsP}));
    const i32 steps = static_cast<i32>(ceil_div(bytes, kSlabK));
    // Pieces that can be loaded as such come into registers while the step before is multiplied; others when they are
    // laid down, so that no wait of theirs stands between loads and products.
    const auto fetch_ahead = [&](i64 k) {
        if (direct && k + kSlabK <= bytes) {
            slabs_p.fetch_pieces(k);
            slabs_q.fetch_pieces(k);
        }
    };
    fetch_ahead(0);
    DG_NO_UNROLL
    for (i32 step = 0; step < steps; ++step) {
        u8* const stage = lds + (step & 1) * S::kStage;
        const i64 next = static_cast<i64>(step + 1) * kSlabK;
        if (!direct || next > bytes) {
            slabs_p.fetch(next - kSlabK);
            slabs_q.fetch(next - kSlabK);
        }
        slabs_p.lay_down(stage);
        slabs_q.lay_down(stage + S::kP / kTile * kSlabBytes);
        sync();
        fetch_ahead(next);
        const u8* const own_p = stage + first_p<S>() / kTile * kSlabBytes + lane() * kLaneBytes;
        const u8* const own_q = stage + (S::kP + first_q<S>()) / kTile * kSlabBytes + lane() * kLaneBytes;
        DG_NO_UNROLL
        for (int first = 0; first < 2; first += kTogether) {
            const i32 done = 2 * step + first + kTogether;  // instructions along K, after these
            if (kInOrder && static_cast<i64>(done - 1) * kMmaK >= bytes)
                break;  // there are neither bytes nor scales
            if constexpr (kParts)
                if (done % Scales::kSteps == 0)
                    factors.fetch(done / Scales::kSteps - 1);
            add_products<Element, S, Piece, !kParts>(sums, own_p + first * 8, own_q + first * 8, strips);
            if constexpr (kParts)
                if (done % Scales::kSteps == 0)
                    factors.promote(acc, part, own_slab<S>(lds, step + 1));
        }
    }
    if constexpr (kParts)
        if (2 * steps % Scales::kSteps != 0) {
            factors.fetch(2 * steps / Scales::kSteps);
            factors.promote(acc, part, own_slab<S>(lds, steps));
        }
    sync();
}

// The same from 0 on.
template <class Element, class S, class Scales, class P, class Q>
DG_DEVICE void multiply_tile(Accumulators<S>& acc, const P& p, const Q& q, i64 bytes, i32 rows,
                             const Scales& scales, u8* lds) {
    clear(acc);
    accumulate_tile<Element>(acc, p, q, bytes, rows, scales, lds);
}

// Hands the tile on, 16 columns of one row at a time: out(row, column, values) with the row and first column within
// the tile, for rows below `rows`. LDS is free again when it returns.
template <class S, class Out>
DG_DEVICE void put_tile(const Accumulators<S>& acc, i32 rows, u8* lds, const Out& out) {
    f32* const own = reinterpret_cast<f32*>(lds) + wave() * kTile * S::kPitch;
    const int own_lane = static_cast<int>(lane());
    // One copy of what hands values on; registers have no index, so each strip has its own code before that.
    DG_NO_UNROLL
    for (int i = 0; i < S::kStripsP; ++i) {
        const i32 first = first_p<S>() + i * kTile;
        if (first >= rows)
            break;
        DG_UNROLL
        for (int strip = 0; strip < S::kStripsP; ++strip) {
            if (strip != i)
                continue;
            DG_UNROLL
            for (int j = 0; j < S::kStripsQ; ++j)
                for (int slot = 0; slot < 4; ++slot) {
                    const Coord at = result(ResultMap::mmac, own_lane, slot);
                    own[at.row * S::kPitch + j * kTile + at.col] = acc.v[strip][j].v[slot];
                }
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
