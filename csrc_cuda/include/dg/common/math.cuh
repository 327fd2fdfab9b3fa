// Integer arithmetic of tiles: how many, and how far apart.
#pragma once

#include <dg/common/types.cuh>

namespace dg {

// Tiles of `b` elements that cover `a` elements; `a >= 0`, `b > 0`.  Written without `a + b - 1`, which
// overflows for the largest `a`.
template <typename T>
DG_HOST_DEVICE constexpr T cdiv(T a, T b) {
    return a / b + (a % b != 0);
}

// The smallest multiple of `b` that is at least `a`.
template <typename T>
DG_HOST_DEVICE constexpr T align(T a, T b) {
    return cdiv(a, b) * b;
}

// The greatest common divisor; both positive.
template <typename T>
DG_HOST_DEVICE constexpr T gcd(T a, T b) {
    return b == 0 ? a : gcd(b, a % b);
}

}  // namespace dg
