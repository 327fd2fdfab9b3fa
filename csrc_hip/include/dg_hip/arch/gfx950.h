// gfx950 (CDNA 4): compiled by upstream clang and never run here. Its FP8 is OCP e4m3fn, as gfx938's.
//
// MFMA gives a lane four consecutive rows of its first operand. With Q as the first one, and rows of a strip of Q taken
// in the order of a transposed 4 x 4, lane l holds p = l & 15 and q = (l >> 4) + 4 * slot: gfx938's map.
#pragma once

#include <dg_hip/arch/amdgcn.h>

namespace dg_hip {

constexpr int q_row(int row) {
    return row % 4 * 4 + row / 4;
}

template <class Element>
DG_DEVICE void multiply(F32x4& acc, u64 p, u64 q) {
    const NativeF32x4 c = bits<NativeF32x4>(acc);
    if constexpr (Element::kBytes == 1) {
        acc = bits<F32x4>(__builtin_amdgcn_mfma_f32_16x16x32_fp8_fp8(static_cast<long>(q),
                                                                     static_cast<long>(p), c, 0, 0, 0));
    } else {
        typedef short Bf16x4 __attribute__((ext_vector_type(4)));
        acc = bits<F32x4>(
            __builtin_amdgcn_mfma_f32_16x16x16bf16_1k(bits<Bf16x4>(q), bits<Bf16x4>(p), c, 0, 0, 0));
    }
}

DG_DEVICE u32 fp8x4(f32 a, f32 b, f32 c, f32 d) {
    const i32 low = __builtin_amdgcn_cvt_pk_fp8_f32(clipped(a), clipped(b), 0, false);
    return static_cast<u32>(__builtin_amdgcn_cvt_pk_fp8_f32(clipped(c), clipped(d), low, true));
}

// sc0 sc1: past this device's caches.
template <class T>
DG_DEVICE T load_peer(const void* p) {
    if constexpr (sizeof(T) <= 8) {
        return __hip_atomic_load(static_cast<const T*>(p), __ATOMIC_RELAXED, __HIP_MEMORY_SCOPE_SYSTEM);
    } else {
        const u64* words = static_cast<const u64*>(p);
        struct Pair {
            u64 low, high;
        } pair = {load_peer<u64>(words), load_peer<u64>(words + 1)};
        return bits<T>(pair);
    }
}

}  // namespace dg_hip
