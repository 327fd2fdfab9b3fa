// The projection before a hyper-connection's normalisation: d = a x b^T in TF32, and the squared norms of a's rows.
//
// There is no TF32 instruction. A TF32 number is the sum of two of bf16, and the product of each with one of a, which
// is bf16, is exact; so two instructions of bf16 that sum in float32 compute what one of TF32 would.
#include <dg_hip/kernel.h>
#include <dg_hip/operands.h>

namespace dg_hip::hc {

// Distances are in bytes.
#define FIELDS(X)                                      \
    X(ptr, a)                                          \
    X(ptr, b)                                          \
    X(ptr, d)                                          \
    X(ptr, norms)                                      \
    X(i64, m)                                          \
    X(i64, n)                                          \
    X(i64, k)                                          \
    X(i64, parts) /* of K, each with a d of its own */ \
    X(i64, a_row)                                      \
    X(i64, b_row)                                      \
    X(i64, d_part)                                     \
    X(i64, d_row)                                      \
    X(i64, d_column)                                   \
    X(i64, norms_part)                                 \
    X(i64, norms_row)                                  \
    X(i32, a_aligned)                                  \
    X(i32, b_aligned)

DG_ARGS(Args, FIELDS)

constexpr int kThreads = 256, kWaves = kThreads / kWave;
constexpr int kTilesN = 2, kColumns = kTilesN * kTile;  // of a block: hyper-connections ask for 24
constexpr int kStep = 32, kBlockK = 64;  // k of a wave at a time, and what parts of K are whole blocks of

// To ten bits of mantissa, to nearest even. What is not finite stays as it is.
DG_DEVICE u32 round_to_tf32(u32 x) {
    return (x & 0x7f800000) == 0x7f800000 ? x : (x + 0xfff + (x >> 13 & 1)) & ~0x1fffu;
}

struct Halves {
    u32 high, low;  // bits of float32 whose lower 16 are 0
};

// Neither is 0 unless `x` is, so that its product with infinity is infinite and no NaN.
DG_DEVICE Halves split(u32 x) {
    const u32 magnitude = x & 0x7fffffff;
    if (magnitude >= 0x7f800000) {
        const u32 kept = (x & 0xffff0000) | (magnitude > 0x7f800000 ? 0x400000 : 0);
        return {kept, kept};
    }
    const u32 high = (x & 0xffff) != 0 || magnitude == 0 ? x & 0xffff0000 : x - 0x10000;
    return {high, bits<u32>(bits<f32>(x) - bits<f32>(high))};
}

// Four of float32 as what a lane gives to two instructions.
struct Operands {
    u64 high, low;

    DG_DEVICE explicit Operands(const U32x4& x) {
        Halves halves[4];
        for (int i = 0; i < 4; ++i)
            halves[i] = split(round_to_tf32(x.v[i]));
        high = pair(halves[0].high, halves[1].high) | pair(halves[2].high, halves[3].high) << 32;
        low = pair(halves[0].low, halves[1].low) | pair(halves[2].low, halves[3].low) << 32;
    }
    static DG_DEVICE u64 pair(u32 first, u32 second) { return first >> 16 | (second & 0xffff0000); }
};

// 32 k of a block's rows of a, in strips of 16, and of its columns' rows of b.
template <int kStrips>
struct Step {
    U32x4 a[kStrips], b[kTilesN][2];

    DG_DEVICE void fetch(const Rows& a_rows, const Rows& b_rows, const u8* const* a_lines,
                         const u8* const* b_lines, i64 k) {
        const i64 own = k + lane() / kTile * 8;
        for (int i = 0; i < kStrips; ++i)
            a[i] = a_lines[i] != nullptr ? a_rows.part(a_lines[i], own * 2) : kZeros16;
        for (int j = 0; j < kTilesN; ++j)
            for (int half = 0; half < 2; ++half)
                b[j][half] = b_lines[j] != nullptr ? b_rows.part(b_lines[j], own * 4 + half * 16) : kZeros16;
    }
};

template <int kStrips>
struct Sums {
    F32x4 products[kStrips][kTilesN];
    f32 norms[kStrips];

    DG_DEVICE void add(const Step<kStrips>& step) {
        for (int half = 0; half < 2; ++half)
            for (int j = 0; j < kTilesN; ++j) {
                const Operands b(step.b[j][half]);
                for (int i = 0; i < kStrips; ++i) {
                    const U32x4& x = step.a[i];
                    const u64 a = x.v[2 * half] | static_cast<u64>(x.v[2 * half + 1]) << 32;
                    multiply<Bf16>(products[i][j], a, b.low);
                    multiply<Bf16>(products[i][j], a, b.high);
                }
            }
        for (int i = 0; i < kStrips; ++i)
            for (const u32 two : step.a[i].v) {
                const f32 low = bits<f32>(two << 16), high = bits<f32>(two & 0xffff0000);
                norms[i] = __builtin_fmaf(high, high, __builtin_fmaf(low, low, norms[i]));
            }
    }
};

// What waves, each with a share of K, leave for the sum over all of them.
template <int kStrips>
struct Local {
    static constexpr int kRows = kStrips * kTile;
    f32 products[kWaves][kRows][kColumns + 1];  // one more, so that rows are in other banks
    f32 norms[kWaves][kRows];

    DG_DEVICE void write(const Sums<kStrips>& sums) {
        const int own = static_cast<int>(lane());
        for (int i = 0; i < kStrips; ++i) {
            for (int j = 0; j < kTilesN; ++j)
                for (int slot = 0; slot < 4; ++slot) {
                    const Coord at = result(ResultMap::mmac, own, slot);
                    products[wave()][i * kTile + at.row][j * kTile + at.col] = sums.products[i][j].v[slot];
                }
            f32 norm = sums.norms[i];
            norm += shuffle_f32(norm, lane() ^ 16);
            norm += shuffle_f32(norm, lane() ^ 32);
            norms[wave()][i * kTile + own % kTile] = norm;
        }
        sync();
    }
};

template <int kStrips>
DG_DEVICE void project(const Args& args, u8* lds) {
    constexpr i64 kRows = kStrips * kTile;
    const i64 across = most<i64>(ceil_div(args.n, kColumns), 1), down = ceil_div(args.m, kRows);
    const i64 part = block() / (across * down), row = block() / across % down * kRows;
    const i64 column = block() % across * kColumns;
    // Whole blocks of K, dealt out evenly; the first parts have one more.
    const i64 blocks = ceil_div(args.k, kBlockK), share = blocks / args.parts, longer = blocks % args.parts;
    const i64 first = (part * share + least(part, longer)) * kBlockK;
    const i64 last = least(args.k, first + (share + (part < longer)) * kBlockK);

    const Rows a_rows{args.a + row * args.a_row, args.a_row, last * 2,
                      static_cast<i32>(least(kRows, args.m - row)), args.a_aligned != 0};
    const Rows b_rows{args.b + column * args.b_row, args.b_row, last * 4,
                      static_cast<i32>(least<i64>(kColumns, args.n - column)), args.b_aligned != 0};
    const u8 *a_lines[kStrips], *b_lines[kTilesN];
    const int own = static_cast<int>(lane() % kTile);
    for (int i = 0; i < kStrips; ++i)
        a_lines[i] = a_rows.line(i * kTile + own);
    for (int j = 0; j < kTilesN; ++j)
        b_lines[j] = b_rows.line(j * kTile + q_row(own));

    Sums<kStrips> sums = {};
    Step<kStrips> step;
    step.fetch(a_rows, b_rows, a_lines, b_lines, first + wave() * kStep);
    for (i64 k = first + wave() * kStep; k < last; k += kWaves * kStep) {
        Step<kStrips> next;  // zeros behind the end
        next.fetch(a_rows, b_rows, a_lines, b_lines, k + kWaves * kStep);
        sums.add(step);
        step = next;
    }

    Local<kStrips>& local = *reinterpret_cast<Local<kStrips>*>(lds);
    local.write(sums);
    for (int i = static_cast<int>(thread()); i < kRows * kColumns; i += kThreads) {
        const int r = i / kColumns, c = i % kColumns;
        f32 total = local.products[0][r][c];
        for (int w = 1; w < kWaves; ++w)
            total += local.products[w][r][c];
        if (r < a_rows.rows && c < b_rows.rows)
            store(args.d + part * args.d_part + (row + r) * args.d_row + (column + c) * args.d_column, total);
    }
    const int r = static_cast<int>(thread());
    if (column == 0 && r < a_rows.rows) {
        f32 total = local.norms[0][r];
        for (int w = 1; w < kWaves; ++w)
            total += local.norms[w][r];
        store(args.norms + part * args.norms_part + (row + r) * args.norms_row, total);
    }
}

DG_KERNEL(hc_prenorm_16, Args, kThreads, sizeof(Local<1>)) {
    project<1>(args, lds);
}
DG_KERNEL(hc_prenorm_64, Args, kThreads, sizeof(Local<4>)) {
    project<4>(args, lds);
}

}  // namespace dg_hip::hc
