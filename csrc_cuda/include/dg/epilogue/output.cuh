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

template <class C>
struct Output {
    const Params& params;
    u32 rows, columns;  // M and N

    __device__ __forceinline__ explicit Output(const Params& all)
        : params(all),
          rows(C::kSwap ? all.rows_q : all.rows_p),
          columns(C::kSwap ? all.rows_p : all.rows_q) {}

    // Where column n of the product is in a row of D: after the holes of the heads before it.
    __device__ __forceinline__ u32 place(u32 n) const {
        if (params.head_width == 0)
            return n;
        const u32 head = n / params.head_width, within = n % params.head_width;
        return n + (head + (within >= params.head_left)) * params.head_hole;
    }

    __device__ __forceinline__ float addend(u32 m, u32 n) const {
        const i64 at = m * params.c_stride + n;
        if constexpr (C::kDBytes == 4)
            return static_cast<const float*>(params.c)[at];
        else
            return unpack_bf16(static_cast<const unsigned short*>(params.c)[at]);
    }

    __device__ __forceinline__ void put(u32 m, u32 n, float v) const {
        const i64 at = m * params.d_stride + place(n);
        if constexpr (C::kDBytes == 4)
            static_cast<float*>(params.d)[at] = v;
        else
            static_cast<unsigned short*>(params.d)[at] = static_cast<unsigned short>(pack_bf16(v, 0.0f));
    }

    // Two neighbours, n even.
    __device__ __forceinline__ void put2(u32 m, u32 n, float x, float y) const {
        if (m >= rows || n >= columns)
            return;
        const bool both = n + 1 < columns;
        if (params.c) {
            x += addend(m, n);
            y += both ? addend(m, n + 1) : 0.0f;
        }
        if (params.even && both) {
            const i64 at = m * params.d_stride + place(n);
            if constexpr (C::kDBytes == 4)
                *reinterpret_cast<float2*>(static_cast<float*>(params.d) + at) = float2{x, y};
            else
                *reinterpret_cast<u32*>(static_cast<unsigned short*>(params.d) + at) = pack_bf16(x, y);
            return;
        }
        put(m, n, x);
        if (both)
            put(m, n + 1, y);
    }

    // Eight neighbours, n a multiple of 8.
    __device__ __forceinline__ void put8(u32 m, u32 n, float (&v)[8]) const {
        if (m >= rows || n >= columns)
            return;
        if (params.wide && !params.c && n + 8 <= columns) {
            const i64 at = m * params.d_stride + n;
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
            put2(m, n + i, v[i], v[i + 1]);
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
        const u32 row = tile.p * Layout<C>::kBlockP + me.part + me.warp * 16 + me.lane / 4;
        const u32 column = tile.q * C::kBlockQ + me.lane % 4 * 2;
        auto scale = [](const Scale& of, u32 at, u32 rows) {
            return __ldg(of.values + min(at, rows - 1) * of.row_stride);
        };
#pragma unroll
        for (u32 sub = 0; sub < C::kSubs; ++sub) {
            const float high = scale(params.p_scale, row + sub * 64, params.rows_p),
                        low = scale(params.p_scale, row + sub * 64 + 8, params.rows_p);
#pragma unroll
            for (u32 g = 0; g < Promotion<C>::kGroups; ++g) {
                const float x = scale(params.q_scale, column + g * 8, params.rows_q),
                            y = scale(params.q_scale, column + g * 8 + 1, params.rows_q);
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
