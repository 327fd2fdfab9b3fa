// From float32 totals to D: row scales, C, the rounding, and where an element lies.
#pragma once

#include <dg/mma/multiply.cuh>

namespace dg::sm90 {

__device__ __forceinline__ u32 pack_bf16(float x, float y) {
    u32 packed;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(packed) : "f"(y), "f"(x));
    return packed;
}

__device__ __forceinline__ float unpack_bf16(unsigned short bits) {
    return __uint_as_float(static_cast<u32>(bits) << 16);
}

// A row of D as a tile sees it.
struct Line {
    i64 d, c;     // elements of D, and of C, before its first column
    bool wanted;  // it is the tile's to write
    bool zero;    // namely zeros
};

template <class C>
struct Output {
    using L = Layout<C>;

    const Params& params;
    u32 rows, columns;  // M and N

    __device__ __forceinline__ explicit Output(const Params& all)
        : params(all),
          rows(C::kSwap ? all.rows_q : all.rows_p),
          columns(C::kSwap ? all.rows_p : all.rows_q) {}

    __device__ __forceinline__ Line line(u32 m, const Tile& tile, const Rows& of) const {
        Line line{m * params.d_stride, m * params.c_stride, m < rows, false};
        if constexpr (L::kGrouped)
            line.wanted = m < of.end;
        if constexpr (L::kGroupedA)
            line.d += tile.group * params.d_group_stride, line.c += tile.group * params.c_group_stride;
        if constexpr (C::kGrouping == kContiguous)
            line.wanted &= m >= of.begin;
        if constexpr (C::kGrouping == kPsum) {
            line.zero = !line.wanted;
            line.wanted = m >= of.begin && (line.wanted || m < of.zeros);
        }
        if constexpr (C::kGrouping == kContiguous || C::kGrouping == kPsum)
            if (of.mixed && line.wanted)
                line.wanted = Ownership<C>(params).owns(line.zero ? params.groups : tile.group, m);
        return line;
    }

    // Whether sixteen rows from m on are all written, with the product's values.
    __device__ __forceinline__ static bool whole(u32 m, const Rows& of) {
        return !L::kGrouped || (m + 16 <= of.end && !of.mixed && (L::kGroupedA || m >= of.begin));
    }

    // Whether one of sixteen rows from m on may be written.
    __device__ __forceinline__ static bool any(u32 m, const Rows& of) {
        const u32 end = C::kGrouping == kPsum ? max(of.end, of.zeros) : of.end;
        return !L::kGrouped || (m < end && (L::kGroupedA || m + 16 > of.begin));
    }

    // Where column n of the product is in a row of D: after the holes of the heads before it.
    __device__ __forceinline__ u32 place(u32 n) const {
        if (L::kGrouped || params.head_width == 0)
            return n;
        const u32 head = n / params.head_width, within = n % params.head_width;
        return n + (head + (within >= params.head_left)) * params.head_hole;
    }

    __device__ __forceinline__ float addend(Line line, u32 n) const {
        const i64 at = line.c + n;
        if constexpr (C::kDBytes == 4)
            return static_cast<const float*>(params.c)[at];
        else
            return unpack_bf16(static_cast<const unsigned short*>(params.c)[at]);
    }

    __device__ __forceinline__ void put(Line line, u32 n, float v) const {
        const i64 at = line.d + place(n);
        if constexpr (C::kDBytes == 4)
            static_cast<float*>(params.d)[at] = v;
        else
            static_cast<unsigned short*>(params.d)[at] = static_cast<unsigned short>(pack_bf16(v, 0.0f));
    }

    // Whether `count` columns from an even one on may leave in pairs with nothing added and no hole between them.
    __device__ __forceinline__ bool simple(u32 n, u32 count) const {
        return params.even && params.c == nullptr && params.head_width == 0 && n + count <= columns;
    }

    // Two neighbours of a row where all is simple, the first one so many elements into D, which is even.
    __device__ __forceinline__ void put2_simple(Line line, i64 at, float x, float y) const {
        if (!line.wanted)
            return;
        if (C::kGrouping == kPsum && line.zero)
            x = y = 0.0f;
        if constexpr (C::kDBytes == 4)
            *reinterpret_cast<float2*>(static_cast<float*>(params.d) + at) = float2{x, y};
        else
            *reinterpret_cast<u32*>(static_cast<unsigned short*>(params.d) + at) = pack_bf16(x, y);
    }

    // Eight neighbours of bfloat16 that are rounded already, n a multiple of 8, in D that bulk copies may write.
    __device__ __forceinline__ void put8_packed(Line line, u32 n, uint4 v) const {
        if (!line.wanted || n >= columns)
            return;
        if (C::kGrouping == kPsum && line.zero)
            v = uint4{};
        *reinterpret_cast<uint4*>(static_cast<unsigned short*>(params.d) + line.d + n) = v;
    }

    // Two neighbours, n even.
    __device__ __forceinline__ void put2(Line line, u32 n, float x, float y) const {
        if (!line.wanted || n >= columns)
            return;
        const bool both = n + 1 < columns;
        if (params.c) {
            x += addend(line, n);
            y += both ? addend(line, n + 1) : 0.0f;
        }
        if (C::kGrouping == kPsum && line.zero)
            x = y = 0.0f;
        if (params.even && both) {
            const i64 at = line.d + place(n);
            if constexpr (C::kDBytes == 4)
                *reinterpret_cast<float2*>(static_cast<float*>(params.d) + at) = float2{x, y};
            else
                *reinterpret_cast<u32*>(static_cast<unsigned short*>(params.d) + at) = pack_bf16(x, y);
            return;
        }
        put(line, n, x);
        if (both)
            put(line, n + 1, y);
    }

    // Eight neighbours, n a multiple of 8.
    __device__ __forceinline__ void put8(Line line, u32 n, float (&v)[8]) const {
        if (!line.wanted || n >= columns)
            return;
        if (params.wide && !params.c && !line.zero && n + 8 <= columns) {
            const i64 at = line.d + n;
            if constexpr (C::kDBytes == 4) {
                auto* to = reinterpret_cast<float4*>(static_cast<float*>(params.d) + at);
                to[0] = float4{v[0], v[1], v[2], v[3]};
                to[1] = float4{v[4], v[5], v[6], v[7]};
            } else {
                *reinterpret_cast<uint4*>(static_cast<unsigned short*>(params.d) + at) =
                    uint4{pack_bf16(v[0], v[1]), pack_bf16(v[2], v[3]), pack_bf16(v[4], v[5]),
                          pack_bf16(v[6], v[7])};
            }
            return;
        }
#pragma unroll
        for (u32 i = 0; i < 8; i += 2)
            put2(line, n + i, v[i], v[i + 1]);
    }
};

// Scales of whole rows of A and of B, where the call has them.
template <class C, class Instruction>
__device__ __forceinline__ void scale_rows(typename Multiplier<C, Instruction>::Totals& total,
                                           const Multiplier<C, Instruction>& me, Tile tile) {
    if constexpr (C::kScaleP == kScaleNone && C::kScaleQ == kScaleNone) {
        const Params& params = me.params;
        if (params.p_scale.values == nullptr)
            return;
        using L = Layout<C>;
        const u32 row = tile.row_p + me.part + me.warp * 16 + me.lane / 4;
        const u32 column = tile.row_q + me.lane % 4 * 2;
        auto values = [&](const Scale& of, bool grouped) {
            return of.values + (grouped ? tile.group * of.group_stride : 0);
        };
        const float *of_p = values(params.p_scale, L::kGroupedP),
                    *of_q = values(params.q_scale, L::kGroupedQ);
        const i64 stride_p = params.p_scale.row_stride, stride_q = params.q_scale.row_stride;
        auto scale = [](const float* of, u32 at, u32 rows, i64 stride) {
            return __ldg(of + min(at, rows - 1) * stride);
        };
#pragma unroll
        for (u32 sub = 0; sub < C::kSubs; ++sub) {
            const float high = scale(of_p, row + sub * 64, params.rows_p, stride_p),
                        low = scale(of_p, row + sub * 64 + 8, params.rows_p, stride_p);
#pragma unroll
            for (u32 g = 0; g < Promotion<C>::kGroups; ++g) {
                const float x = scale(of_q, column + g * 8, params.rows_q, stride_q),
                            y = scale(of_q, column + g * 8 + 1, params.rows_q, stride_q);
                float* four = &total[sub][g * 4];
                four[0] = __fmul_rn(four[0], __fmul_rn(high, x));
                four[1] = __fmul_rn(four[1], __fmul_rn(high, y));
                four[2] = __fmul_rn(four[2], __fmul_rn(low, x));
                four[3] = __fmul_rn(four[3], __fmul_rn(low, y));
            }
        }
    }
}

}  // namespace dg::sm90
