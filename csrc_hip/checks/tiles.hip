// Kernels for tests of the main loop (dg_hip/tile.h): products of whole matrices with every shape of a tile, every way
// to store an operand, and scales of every length. Never shipped.
#include <dg_hip/kernel.h>
#include <dg_hip/tile.h>

using namespace dg_hip;

// d [m, n] float32 = p [m, k] x q [n, k]^T. `p_row` and `q_row` are bytes between rows, `k` counts bytes. Scales: sp
// [m, ..], sq [ceil(n / sq_gran), ..], each of so many partial sums. `d_is_sum`: to what d holds.
// clang-format off
#define TILE_FIELDS(X)                                                          \
    X(ptr, p) X(ptr, q) X(ptr, d) X(i64, p_row) X(i64, q_row)                   \
    X(i64, m) X(i64, n) X(i64, k) X(ptr, sp) X(ptr, sq)                         \
    X(i32, sq_gran) X(i32, sp_parts) X(i32, sq_parts) X(i32, d_is_sum)
// clang-format on
DG_ARGS(TileArgs, TILE_FIELDS)

namespace {

// How an operand is stored, and its tile from row `first` on.
struct Side {
    const u8* base;
    i64 row, k;
    i32 rows;

    DG_DEVICE bool is_aligned(u64 to) const {
        return (reinterpret_cast<u64>(base) | static_cast<u64>(row)) % to == 0;
    }
};
struct AsRows {
    static DG_DEVICE Rows of(const Side& side, i64 first) {
        return {side.base + first * side.row, side.row, side.k, side.rows, side.is_aligned(16)};
    }
};
struct AsFp4 {
    static DG_DEVICE Fp4Rows of(const Side& side, i64 first) {
        return {side.base + first * side.row, side.row, side.k, side.rows};
    }
};
struct AsKPack2 {
    static DG_DEVICE KPack2 of(const Side& side, i64 first) {
        return {side.base + first * side.k, side.k, side.rows};
    }
};

template <class Scales>
DG_DEVICE Scales scales_of(const TileArgs& args, i64 row, i64 column, i32 rows, i32 columns) {
    if constexpr (Scales::kSteps == 0) {
        return {};
    } else {
        const i64 parts = ceil_div(args.k, i64{Scales::kSteps * 32});
        const i64 along_p = ceil_div(parts, i64{args.sp_parts}),
                  along_q = ceil_div(parts, i64{args.sq_parts});
        return {reinterpret_cast<const f32*>(args.sp) + row * along_p,
                reinterpret_cast<const f32*>(args.sq),
                along_p,
                1,
                along_q,
                1,
                rows,
                columns,
                static_cast<i32>(column),
                args.sq_gran,
                args.sp_parts,
                args.sq_parts};
    }
}

// Writes what is inside the matrix, one element at a time.
struct Put {
    ptr d;
    i64 row, column, n;

    DG_DEVICE void operator()(i32 at_row, i32 at_column, const f32 (&values)[kTile]) const {
        for (int c = 0; c < kTile; ++c)
            if (column + at_column + c < n)
                store<f32>(d + ((row + at_row) * n + column + at_column + c) * 4, values[c]);
    }
};

template <class S>
DG_DEVICE void take(Accumulators<S>& acc, const TileArgs& args, i64 row, i64 column) {
    for (int i = 0; i < S::kStripsP; ++i)
        for (int j = 0; j < S::kStripsQ; ++j)
            for (int slot = 0; slot < 4; ++slot) {
                const Coord at = result(ResultMap::mmac, static_cast<int>(lane()), slot);
                const i64 d_row = row + first_p<S>() + i * kTile + at.row;
                const i64 d_column = column + first_q<S>() + j * kTile + at.col;
                if (d_row < args.m && d_column < args.n)
                    acc.v[i][j].v[slot] = load<f32>(args.d + (d_row * args.n + d_column) * 4);
            }
}

template <class Element, class S, class Scales, class FormP, class FormQ>
DG_DEVICE void product(const TileArgs& args, u8* lds) {
    const i64 across = ceil_div(args.n, i64{S::kQ});
    const i64 row = block() / across * S::kP, column = block() % across * S::kQ;
    const i32 rows = static_cast<i32>(least<i64>(args.m - row, S::kP));
    const i32 columns = static_cast<i32>(least<i64>(args.n - column, S::kQ));
    const auto p = FormP::of({args.p, args.p_row, args.k, rows}, row);
    const auto q = FormQ::of({args.q, args.q_row, args.k, columns}, column);
    const Scales scales = scales_of<Scales>(args, row, column, rows, columns);
    Accumulators<S> acc;
    if (args.d_is_sum) {
        clear(acc);
        take<S>(acc, args, row, column);
        accumulate_tile<Element>(acc, p, q, args.k, rows, scales, lds);
    } else {
        multiply_tile<Element>(acc, p, q, args.k, rows, scales, lds);
    }
    put_tile(acc, rows, lds, Put{args.d, row, column, args.n});
}

}  // namespace

#define DG_CHECK_TILE(name, Element, Scales, FormP, FormQ)        \
    DG_KERNEL(name##_large, TileArgs, kThreads, Large::kLds) {    \
        product<Element, Large, Scales, FormP, FormQ>(args, lds); \
    }                                                             \
    DG_KERNEL(name##_small, TileArgs, kThreads, Small::kLds) {    \
        product<Element, Small, Scales, FormP, FormQ>(args, lds); \
    }

DG_CHECK_TILE(fp8_rows_rows_0, Fp8, Unscaled, AsRows, AsRows)
DG_CHECK_TILE(fp8_rows_rows_1, Fp8, BlockScales<1>, AsRows, AsRows)
DG_CHECK_TILE(fp8_rows_rows_2, Fp8, BlockScales<2>, AsRows, AsRows)
DG_CHECK_TILE(fp8_rows_rows_4, Fp8, BlockScales<4>, AsRows, AsRows)
DG_CHECK_TILE(bf16_rows_rows_0, Bf16, Unscaled, AsRows, AsRows)
DG_CHECK_TILE(fp8_rows_fp4_0, Fp8, Unscaled, AsRows, AsFp4)
DG_CHECK_TILE(fp8_fp4_rows_1, Fp8, BlockScales<1>, AsFp4, AsRows)
DG_CHECK_TILE(fp8_rows_kpack2_0, Fp8, Unscaled, AsRows, AsKPack2)
DG_CHECK_TILE(fp8_rows_kpack2_4, Fp8, BlockScales<4>, AsRows, AsKPack2)
