// What stands between the products, a wave a row: SwiGLU, router weight, one scale for the row, cast to FP8.
#pragma once

#include <dg_hip/mega/control.h>

namespace dg_hip::mega {

constexpr f32 kAmaxFloor = 1e-4f, kFp8Max = 448.0f;
constexpr int kPerLane = 8;  // columns: 16 bytes of gate, 16 of up

// min and max of a NaN are a NaN here, whichever side it is on.
DG_DEVICE f32 larger(f32 a, f32 b) {
    return b > a || b != b ? b : a;
}

// e^x within 2 ulp, by arithmetic that every target has: 2^n times a polynomial on [-ln 2 / 2, ln 2 / 2].
DG_DEVICE f32 careful_exponential(f32 x) {
    if (!(x > -104.0f))
        return x != x ? x : 0.0f;
    if (x > 89.0f)
        return bits<f32>(0x7f800000u);
    constexpr f32 kShift = 0x1.8p23f;  // adding it leaves an integer in the low bits
    const f32 shifted = __builtin_fmaf(x, 1.44269504088896341f, kShift), n = shifted - kShift;
    // ln 2 in two parts; n times the first one is exact.
    f32 r = __builtin_fmaf(n, -0.693359375f, x);
    r = __builtin_fmaf(n, 2.12194440e-4f, r);
    f32 p = 1.0f / 5040;
    p = __builtin_fmaf(p, r, 1.0f / 720);
    p = __builtin_fmaf(p, r, 1.0f / 120);
    p = __builtin_fmaf(p, r, 1.0f / 24);
    p = __builtin_fmaf(p, r, 1.0f / 6);
    p = __builtin_fmaf(p, r, 0.5f);
    p = __builtin_fmaf(p, r, 1.0f);
    p = __builtin_fmaf(p, r, 1.0f);
    // In two steps, since 2^n alone may be no float.
    const i32 power = static_cast<i32>(n), half = power / 2;
    return p * bits<f32>((half + 127) << 23) * bits<f32>((power - half + 127) << 23);
}

// silu(gate) * up * weight of eight columns; `clamp` is infinite where there is none.
DG_DEVICE void swiglu(const Args& args, i64 row, i64 column, f32 weight, f32 (&h)[kPerLane]) {
    const u8* const gate_at = args.l1_out + (row * 2 * args.intermediate + column) * 2;
    const U32x4 gates = load<U32x4>(gate_at),
                ups = load<U32x4>(gate_at + static_cast<i64>(args.intermediate) * 2);
    for (int i = 0; i < kPerLane; ++i) {
        const int shift = i % 2 * 16;
        f32 gate = from_bf16(static_cast<u16>(gates.v[i / 2] >> shift));
        f32 up = from_bf16(static_cast<u16>(ups.v[i / 2] >> shift));
        gate = gate > args.clamp ? args.clamp : gate;
        up = up > args.clamp ? args.clamp : up < -args.clamp ? -args.clamp : up;
        const f32 e = args.fast_math != 0 ? exponential(-gate) : careful_exponential(-gate);
        h[i] = gate / (1.0f + e) * up * weight;
    }
}

// h is computed twice, once for the largest and once to be cast: that is cheaper than keeping a row of any length.
DG_DEVICE void swiglu_quantise_row(const Args& args, i64 row) {
    const f32 weight = load<f32>(args.row_weight + row * 4);
    const i64 first = static_cast<i64>(lane()) * kPerLane, step = kWave * kPerLane;
    f32 h[kPerLane], amax = 0;
    for (i64 column = first; column < args.intermediate; column += step) {
        swiglu(args, row, column, weight, h);
        for (const f32 x : h)
            amax = larger(amax, __builtin_fabsf(x));
    }
    for (u32 mask = kWave / 2; mask > 0; mask /= 2)
        amax = larger(amax, shuffle_f32(amax, lane() ^ mask));
    // As dg_core.quant casts: products with reciprocals, which are the same on every processor.
    const f32 sf = (amax < kAmaxFloor ? kAmaxFloor : amax) * (1.0f / kFp8Max), inverse = 1.0f / sf;
    if (lane() == 0)
        store<f32>(args.l2_acts_sf + row * 4, sf);
    for (i64 column = first; column < args.intermediate; column += step) {
        swiglu(args, row, column, weight, h);
        u8* const there = args.l2_acts + row * args.intermediate + column;
        const u32 low = fp8x4(h[0] * inverse, h[1] * inverse, h[2] * inverse, h[3] * inverse);
        const u32 high = fp8x4(h[4] * inverse, h[5] * inverse, h[6] * inverse, h[7] * inverse);
        store<u64>(there, low | static_cast<u64>(high) << 32);
    }
}

// Rows in use, and no others.
DG_DEVICE void swiglu_quantise(const Args& args) {
    const i64 rows = rows_in_use(args);
    for (i64 row = static_cast<i64>(block()) * kWaves + wave(); row < rows;
         row += static_cast<i64>(blocks()) * kWaves)
        swiglu_quantise_row(args, row);
}

}  // namespace dg_hip::mega
