// Numbers and small vectors, the same for every target.
#pragma once

namespace dg_hip {

using u8 = unsigned char;
using u16 = unsigned short;
using u32 = unsigned int;
using u64 = unsigned long long;
using i32 = int;
using i64 = long long;
using f32 = float;
using ptr = unsigned char*;  // of a kernel's argument: an address on the device

// Sixteen bytes that move as one, and the four float32 results that a lane holds of a matrix instruction.
struct alignas(16) U32x4 {
    u32 v[4];
};
struct alignas(16) F32x4 {
    f32 v[4];
};

// Bits of one type as another of the same size.
template <class To, class From>
constexpr To bits(From from) {
    static_assert(sizeof(To) == sizeof(From));
    return __builtin_bit_cast(To, from);
}

constexpr i64 ceil_div(i64 size, i64 part) {
    return (size + part - 1) / part;
}

template <class T>
constexpr T least(T a, T b) {
    return a < b ? a : b;
}

template <class T>
constexpr T most(T a, T b) {
    return a < b ? b : a;
}

// How far a store has to be seen: by this device, or by all that can map the memory.
enum class Scope { agent, system };

// What a matrix instruction multiplies. A lane gives 8 bytes of each operand: 8 values of FP8, 4 of bf16.
struct Fp8 {
    static constexpr int kBytes = 1;
};
struct Bf16 {
    static constexpr int kBytes = 2;
};

}  // namespace dg_hip
