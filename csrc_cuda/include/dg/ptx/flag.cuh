// Flags in global memory between blocks of one kernel.
#pragma once

#include <dg/common/types.cuh>

namespace dg::ptx {

// What this warp wrote before is visible to whoever sees the flag: __syncwarp comes before the call.
__device__ __forceinline__ void flag_set(u32* flag) {
    asm volatile("fence.acq_rel.gpu;\nst.release.gpu.global.u32 [%0], 1;" ::"l"(flag) : "memory");
}

__device__ __forceinline__ void flag_wait(const u32* flag) {
    u32 value;
    do {
        asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(value) : "l"(flag) : "memory");
    } while (value == 0);
}

__device__ __forceinline__ void flag_clear(u32* flag) {
    asm volatile("st.relaxed.gpu.global.u32 [%0], 0;" ::"l"(flag) : "memory");
}

}  // namespace dg::ptx
