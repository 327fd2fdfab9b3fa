// Casts of matrices to FP8 with a scale for every 32 or 128 columns of a row, in one pass.
//
// The rules are those of the plain definition, bit for bit: the largest magnitude, at least 1e-4, times 1 / 448 is
// the scale, rounded up to a power of two where UE8M0 is asked for; values times the reciprocal of their scale are
// rounded to nearest even.  A block with a NaN has a NaN scale, and one with an infinity an infinite one, or NaN in
// UE8M0.
//
// A lane has 8 neighbouring values, and a warp four chunks of 256 on their way before it looks at the first: 96 KB
// for an SM with six blocks of 256 threads.  What is done once for a group of columns is shared out among its lanes,
// so that each of them reduces and scales for one of the four chunks only.  A block's rows are neighbours, and its
// scales meet in shared memory, so that those of one column leave together where the rows of the scales are
// contiguous.
//
// All but the kernel's frame and its shuffles are plain functions of a thread's number, which a check on the CPU
// calls one thread after another.
#pragma once

#include <dg/common/fp8.cuh>
#include <dg/common/math.cuh>
#include <dg/common/ue8m0.cuh>

namespace dg::cast {

constexpr u32 kThreads = 256;
constexpr u32 kWarps = kThreads / 32;
constexpr u32 kLoads = 4;             // chunks that a warp has on their way
constexpr u32 kValues = 8;            // of a lane in a chunk
constexpr u32 kChunk = 32 * kValues;  // columns of a chunk
constexpr u32 kWordGroups = 4;        // exponents of a packed word

constexpr float kFloor = 1e-4f;                                 // of the largest magnitude
constexpr float kInverseMax = static_cast<float>(1.0 / 448.0);  // a product, as in the definition
constexpr u32 kInfinity = 0x7f800000u, kQuietNan = 0x7fc00000u;

enum class Type : u32 { bf16, f16, f32 };
// Scales: any float32; float32 powers of two; words of four exponents, the one of the lowest column lowest.
enum class Form : u32 { f32, ue8m0, packed };

struct Params {
    const void* x;  // [rows, columns], in these strides (elements)
    u8* values;     // e4m3 [rows][columns]
    u32* scales;    // float32 bits or words, in these strides
    i64 row_stride, column_stride;
    i64 rows, columns;
    i64 scale_row_stride, scale_column_stride;
    u32 tiles_across;
    u32 mn_major;  // the rows of the scales are contiguous
};

// What one kernel is for.  A tile is `kChunks` chunks across, which divides kLoads.  `kVector`: lanes load and store
// all of their values at once, so columns are contiguous and a multiple of 8, and rows of x 16-byte aligned.
template <Type kType, u32 kGran, u32 kChunks, bool kVector, Form kForm>
struct Shape {
    static constexpr Type type = kType;
    static constexpr Form form = kForm;
    static constexpr bool vector = kVector;
    static constexpr u32 gran = kGran;
    static constexpr u32 chunks = kChunks;
    static constexpr u32 warp_rows = kLoads / kChunks;
    static constexpr u32 rows = kWarps * warp_rows;
    static constexpr u32 columns = kChunks * kChunk;
    static constexpr u32 groups = columns / kGran;
    static constexpr u32 group_lanes = kGran / kValues;       // that share a scale
    static constexpr u32 owner_lanes = group_lanes / kLoads;  // of them, those that work for the same load
    static constexpr u32 value_bytes = kType == Type::f32 ? 4 : 2;
    static constexpr u32 words = kValues * value_bytes / 4;  // registers of a lane's values
    static_assert(kLoads % kChunks == 0 && owner_lanes > 0 && kChunk % kGran == 0);
};

// Where a tile begins, and how many of its rows and columns the matrix has.
struct Corner {
    i64 row, column;
    u32 rows, columns;
};

template <typename S>
DG_HOST_DEVICE inline Corner corner(const Params& params, u32 tile) {
    const u32 down = tile / params.tiles_across, across = tile % params.tiles_across;
    const i64 row = static_cast<i64>(down) * S::rows, column = static_cast<i64>(across) * S::columns;
    const i64 rows = params.rows - row, columns = params.columns - column;
    return {row, column, rows < S::rows ? static_cast<u32>(rows) : S::rows,
            columns < S::columns ? static_cast<u32>(columns) : S::columns};
}

// Where a lane's values of a load are inside a tile.
struct Place {
    u32 row, column;
};

template <typename S>
DG_HOST_DEVICE inline Place place(u32 thread, u32 load) {
    const u32 lane = thread % 32, warp = thread / 32;
    return {warp * S::warp_rows + load / S::chunks, load % S::chunks * kChunk + lane * kValues};
}

DG_HOST_DEVICE inline u32 larger(u32 a, u32 b) {
    return a > b ? a : b;
}

DG_HOST_DEVICE inline u32 smaller(u32 a, u32 b) {
    return a < b ? a : b;
}

// Loading --------------------------------------------------------------------------------------------------------

// A lane's values of a load, as they are in memory.
template <typename S>
struct Piece {
    u32 words[S::words];
};

// x is read once, so it need not stay in L1.
DG_HOST_DEVICE inline void load_16_bytes(const void* from, u32* words) {
#if defined(__CUDA_ARCH__)
    asm("ld.global.nc.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];"
        : "=r"(words[0]), "=r"(words[1]), "=r"(words[2]), "=r"(words[3])
        : "l"(from));
#else
    for (u32 i = 0; i < 4; ++i)
        words[i] = static_cast<const u32*>(from)[i];
#endif
}

// A lane beyond the matrix repeats the last values of its row or column: they are in its own group, whose largest
// magnitude is none the larger, or in a group that nobody has.  Value by value it has zeros there.
template <typename S>
DG_HOST_DEVICE inline Piece<S> load(const Params& params, const Corner& at, Place place) {
    Piece<S> piece = {};
    const i64 row = at.row + smaller(place.row, at.rows - 1);
    const u8* from = static_cast<const u8*>(params.x) + row * params.row_stride * S::value_bytes;
    if constexpr (S::vector) {
        from += (at.column + smaller(place.column, at.columns - kValues)) * S::value_bytes;
        for (u32 i = 0; i < S::words; i += 4)
            load_16_bytes(from + i * 4, piece.words + i);
    } else {
        for (u32 i = 0; i < kValues; ++i) {
            if (place.column + i >= at.columns)
                continue;
            const u8* value = from + (at.column + place.column + i) * params.column_stride * S::value_bytes;
            if constexpr (S::type == Type::f32)
                piece.words[i] = *reinterpret_cast<const u32*>(value);
            else
                piece.words[i / 2] |= u32{*reinterpret_cast<const unsigned short*>(value)} << 16 * (i % 2);
        }
    }
    return piece;
}

// Scales ---------------------------------------------------------------------------------------------------------

// The larger one in both halves of a word.
DG_HOST_DEVICE inline u32 larger_halves(u32 a, u32 b) {
#if defined(__CUDA_ARCH__)
    u32 both;
    asm("max.u16x2 %0, %1, %2;" : "=r"(both) : "r"(a), "r"(b));
    return both;
#else
    return larger(a >> 16, b >> 16) << 16 | larger(a & 0xffff, b & 0xffff);
#endif
}

// Float32 bits of the bits of a half.
DG_HOST_DEVICE inline u32 widen_f16(u32 half) {
#if defined(__CUDA_ARCH__)
    float wide;
    asm("cvt.f32.f16 %0, %1;" : "=f"(wide) : "h"(static_cast<unsigned short>(half)));
    return __builtin_bit_cast(u32, wide);
#else
    const u32 exponent = half >> 10 & 0x1f, mantissa = half & 0x3ff;
    const float units = static_cast<float>(exponent ? 1024 + mantissa : mantissa) / 16777216.0f;  // of 2^-24
    const float finite = units * static_cast<float>(u64{1} << (exponent ? exponent - 1 : 0));
    const u32 magnitude = exponent == 0x1f ? kInfinity | mantissa << 13 : __builtin_bit_cast(u32, finite);
    return (half & 0x8000) << 16 | magnitude;
#endif
}

// The largest magnitude of a lane's values.  Without their sign, float bits are in the order of their values, with
// infinity and then NaN on top, and so they are compared as integers: float32 bits, or those of 16-bit values in the
// low half.
template <typename S>
DG_HOST_DEVICE inline u32 largest(const Piece<S>& piece) {
    u32 found = 0;
    for (u32 i = 0; i < S::words; ++i) {
        if constexpr (S::type == Type::f32)
            found = larger(found, piece.words[i] & 0x7fffffff);
        else
            found = larger_halves(found, piece.words[i] & 0x7fff7fff);
    }
    return S::type == Type::f32 ? found : larger(found & 0xffff, found >> 16);
}

// The reciprocal of a scale, rounded to nearest.
DG_HOST_DEVICE inline float reciprocal(float scale) {
#if defined(__CUDA_ARCH__)
    // What `rcp.rn` does where neither the operand nor the result is near the end of the range of float32; here both
    // are in [2^-121, 2^121], or the scale is infinite or NaN.
    float guess;
    asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(guess) : "f"(scale));
    const float refined = __fmaf_rn(guess, -__fmaf_rn(scale, guess, -1.0f), guess);
    return __builtin_bit_cast(u32, scale) == kInfinity ? 0.0f : refined;
#else
    return 1.0f / scale;
#endif
}

struct Scale {
    u32 bits;       // of the float32 scale
    float inverse;  // its reciprocal
};

// The scale of a group by its largest magnitude.
template <typename S>
DG_HOST_DEVICE inline Scale scale_of(u32 magnitude) {
    const u32 wide = S::type == Type::bf16  ? magnitude << 16
                     : S::type == Type::f16 ? widen_f16(magnitude)
                                            : magnitude;
    const u32 floored = larger(wide, __builtin_bit_cast(u32, kFloor));
    const float scale = __builtin_bit_cast(float, floored) * kInverseMax;
    const u32 bits = __builtin_bit_cast(u32, scale);
    if constexpr (S::form == Form::f32)
        return {bits, reciprocal(scale)};
    // Finite scales are in [2^-23, 2^120], so neither they nor their reciprocals leave the normal numbers.
    const u32 mantissa = bits & ue8m0::kFloatMantissaMask;
    const u32 power = bits - mantissa + (mantissa ? 1u << ue8m0::kFloatMantissaBits : 0u);
    const u32 inverse = (2u * ue8m0::kBias << ue8m0::kFloatMantissaBits) - power;
    const u32 nan = bits == kInfinity ? kQuietNan : bits;
    const bool finite = bits < kInfinity;
    return {finite ? power : nan, __builtin_bit_cast(float, finite ? inverse : nan)};
}

// Values ---------------------------------------------------------------------------------------------------------

#if !defined(__CUDA_ARCH__)
// What `cvt.rn.satfinite.e4m3x2.f32` does: to nearest even, to 448 at most, NaN to 0x7f.
DG_HOST_DEVICE inline u8 encode(float value) {
    const u32 bits = __builtin_bit_cast(u32, value), sign = bits >> 31 << 7;
    const float magnitude = __builtin_bit_cast(float, bits & 0x7fffffff);
    if (magnitude != magnitude)
        return e4m3::kNan;
    u8 below = 0;
    while (below < e4m3::kNan - 1 && e4m3::decode(static_cast<u8>(below + 1)) <= magnitude)
        ++below;
    if (below == e4m3::kNan - 1)
        return static_cast<u8>(sign | below);
    const double left = static_cast<double>(magnitude) - e4m3::decode(below);
    const double right = static_cast<double>(e4m3::decode(static_cast<u8>(below + 1))) - magnitude;
    return static_cast<u8>(sign | static_cast<u32>(below + (left > right || (left == right && below % 2))));
}
#endif

// Four values as e4m3, the first in the lowest byte.
DG_HOST_DEVICE inline u32 encode_four(float v0, float v1, float v2, float v3) {
#if defined(__CUDA_ARCH__)
    u32 bytes;
    asm("{\n\t.reg .b16 low, high;\n\t"
        "cvt.rn.satfinite.e4m3x2.f32 low, %2, %1;\n\t"
        "cvt.rn.satfinite.e4m3x2.f32 high, %4, %3;\n\t"
        "mov.b32 %0, {low, high};\n\t}"
        : "=r"(bytes)
        : "f"(v0), "f"(v1), "f"(v2), "f"(v3));
    return bytes;
#else
    return ue8m0::pack(encode(v0), encode(v1), encode(v2), encode(v3));
#endif
}

template <typename S>
DG_HOST_DEVICE inline float value(const Piece<S>& piece, u32 index) {
    if constexpr (S::type == Type::f32)
        return __builtin_bit_cast(float, piece.words[index]);
    const u32 word = piece.words[index / 2];
    if constexpr (S::type == Type::bf16)
        return __builtin_bit_cast(float, index % 2 ? word & 0xffff0000u : word << 16);
    return __builtin_bit_cast(float, widen_f16(index % 2 ? word >> 16 : word & 0xffff));
}

// Cast a lane's values and store those inside the matrix.
template <typename S>
DG_HOST_DEVICE inline void store(const Params& params, const Corner& at, Place place, const Piece<S>& piece,
                                 float inverse) {
    u32 bytes[kValues / 4];
    for (u32 i = 0; i < kValues / 4; ++i)
        bytes[i] = encode_four(value(piece, 4 * i) * inverse, value(piece, 4 * i + 1) * inverse,
                               value(piece, 4 * i + 2) * inverse, value(piece, 4 * i + 3) * inverse);
    if (place.row >= at.rows)
        return;
    u8* to = params.values + (at.row + place.row) * params.columns + at.column + place.column;
    if constexpr (S::vector) {
        if (place.column < at.columns)
            *reinterpret_cast<u64*>(to) = bytes[0] | u64{bytes[1]} << 32;
    } else {
        for (u32 i = 0; i < kValues; ++i) {
            if (place.column + i < at.columns)
                to[i] = static_cast<u8>(bytes[i / 4] >> 8 * (i % 4));
        }
    }
}

// Scales of a tile -----------------------------------------------------------------------------------------------

// The load for which a lane has the scale of its group, and the first lane that has it for a load.
template <typename S>
DG_HOST_DEVICE inline u32 owned_load(u32 lane) {
    return lane / S::owner_lanes % kLoads;
}

template <typename S>
DG_HOST_DEVICE inline u32 owner(u32 lane, u32 load) {
    return lane / S::group_lanes * S::group_lanes + load * S::owner_lanes;
}

// Of a lane's values for two loads, the one that it goes on with, and the one that it gives to the lane `apart` from
// it: lanes without that bit in their number go on with `a`.
struct Split {
    u32 kept, given;
};

DG_HOST_DEVICE inline Split split(u32 lane, u32 apart, u32 a, u32 b) {
    return lane & apart ? Split{b, a} : Split{a, b};
}

// One more than it holds, so that reading down meets different banks.
template <typename S>
using Scales = u32[S::rows][S::groups + 1];

// Owners keep their scale for all of the block.
template <typename S>
DG_HOST_DEVICE inline void keep(Scales<S>& kept, u32 thread, u32 bits) {
    const Place first = place<S>(thread, owned_load<S>(thread % 32));
    if (thread % S::owner_lanes == 0)
        kept[first.row][first.column / S::gran] = bits;
}

// Write the scales of a tile, neighbouring threads along the contiguous axis.
template <typename S>
DG_HOST_DEVICE inline void write_scales(const Params& params, const Corner& at, u32 thread,
                                        const Scales<S>& kept) {
    // A tile of less than four groups is packed only where it is the whole row.
    constexpr u32 kPer = S::form == Form::packed ? kWordGroups : 1, kWidth = cdiv(S::groups, kPer);
    const u32 groups = cdiv(at.columns, S::gran);
    for (u32 index = thread; index < S::rows * kWidth; index += kThreads) {
        const u32 row = params.mn_major ? index % S::rows : index / kWidth;
        const u32 entry = params.mn_major ? index / S::rows : index % kWidth;
        if (row >= at.rows || entry * kPer >= groups)
            continue;
        u32 bits = 0;
        if constexpr (S::form == Form::packed) {
            for (u32 i = 0; i < kWordGroups; ++i) {
                const u32 group = entry * kPer + i;
                if (group < groups)
                    bits |= (kept[row][group] >> ue8m0::kFloatMantissaBits & 0xff) << 8 * i;
            }
        } else {
            bits = kept[row][entry];
        }
        const i64 column = at.column / (S::gran * kPer) + entry;
        params.scales[(at.row + row) * params.scale_row_stride + column * params.scale_column_stride] = bits;
    }
}

// The kernel -----------------------------------------------------------------------------------------------------

#if defined(__CUDACC__)
// The larger one of what a lane kept and what the lane `apart` from it gave.
__device__ __forceinline__ u32 exchange(Split split, u32 apart) {
    return larger(split.kept, __shfl_xor_sync(~0u, split.given, apart));
}

// The largest magnitude of a lane's group in the load that the lane owns.  The halves of a group exchange what the
// other half is to own, then the quarters do, and only then does one value go around: 5 shuffles for 128 columns and
// 3 for 32, where each load by itself takes 4 and 2.
template <typename S>
__device__ __forceinline__ u32 largest_of_group(const u32 (&mine)[kLoads]) {
    static_assert(kLoads == 4);
    constexpr u32 kHalf = S::group_lanes / 2, kQuarter = S::owner_lanes;
    const u32 first = exchange(split(threadIdx.x, kHalf, mine[0], mine[2]), kHalf);
    const u32 second = exchange(split(threadIdx.x, kHalf, mine[1], mine[3]), kHalf);
    u32 found = exchange(split(threadIdx.x, kQuarter, first, second), kQuarter);
    for (u32 apart = kQuarter / 2; apart > 0; apart /= 2)
        found = exchange({found, found}, apart);
    return found;
}

template <typename S>
__device__ __forceinline__ void per_token(const Params& params) {
    __shared__ Scales<S> kept;
    const u32 thread = threadIdx.x;
    const Corner at = corner<S>(params, blockIdx.x);
    Piece<S> pieces[kLoads];
    u32 magnitudes[kLoads];
    for (u32 i = 0; i < kLoads; ++i)
        pieces[i] = load<S>(params, at, place<S>(thread, i));
    for (u32 i = 0; i < kLoads; ++i)
        magnitudes[i] = largest(pieces[i]);
    const Scale scale = scale_of<S>(largest_of_group<S>(magnitudes));
    keep<S>(kept, thread, scale.bits);
    for (u32 i = 0; i < kLoads; ++i) {
        const float inverse = __shfl_sync(~0u, scale.inverse, owner<S>(thread % 32, i));
        store(params, at, place<S>(thread, i), pieces[i], inverse);
    }
    __syncthreads();
    write_scales<S>(params, at, thread, kept);
}
#endif

}  // namespace dg::cast
