// gfx938 (Hygon DCU): compiled by DTK's clang alone, and not run on hardware by this project yet.
//
// v_mmac_f32_16x16x32_fp8_fp8: operands as dg_hip/layout.h has them; lane l holds p = l & 15, q = (l >> 4) + 4 * slot.
#pragma once

#include <dg_hip/arch/amdgcn.h>

namespace dg_hip {

constexpr int q_row(int row) {
    return row;
}

template <class Element>
DG_DEVICE void multiply(F32x4& acc, u64 p, u64 q) {
    const NativeF32x4 c = bits<NativeF32x4>(acc);
    if constexpr (Element::kBytes == 1) {
        typedef i32 NativeI32x2 __attribute__((ext_vector_type(2)));
        acc = bits<F32x4>(__builtin_hcu_mmac_f32_16x16x32_fp8_fp8_lit_lts(
            bits<NativeI32x2>(p), bits<NativeI32x2>(q), c, false, false));
    } else {
        typedef short Bf16x4 __attribute__((ext_vector_type(4)));
        acc = bits<F32x4>(
            __builtin_hcu_mmac_f32_16x16x16_bf16_lit_lts(bits<Bf16x4>(p), bits<Bf16x4>(q), c, false, false));
    }
}

DG_DEVICE u32 fp8x4(f32 a, f32 b, f32 c, f32 d) {
    const i32 low = __builtin_hcu_cvt_pk_fp8_f32(clipped(a), clipped(b), 0, false);
    return static_cast<u32>(__builtin_hcu_cvt_pk_fp8_f32(clipped(c), clipped(d), low, true));
}

// Past this device's caches: glc slc for 16 bytes, for less what clang makes of a load of system scope. One instruction of 16 bytes; the wait is part of it, since the compiler does not
// count what inline assembly has in flight.
template <class T>
DG_DEVICE T load_peer(const void* p) {
    if constexpr (sizeof(T) == 16) {
        NativeF32x4 x;
        asm volatile("global_load_dwordx4 %0, %1, off glc slc\n s_waitcnt vmcnt(0)"
                     : "=&v"(x)
                     : "v"(p)
                     : "memory");
        return bits<T>(x);
    } else {
        return __hip_atomic_load(static_cast<const T*>(p), __ATOMIC_RELAXED, __HIP_MEMORY_SCOPE_SYSTEM);
    }
}

}  // namespace dg_hip
