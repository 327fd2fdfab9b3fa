// Warpgroup matrix products (wgmma, sm_90a): D[64, N] += P[64, 32 bytes] * Q[N, 32 bytes]^T from shared
// memory.
#pragma once

#include <dg/ptx/barrier.cuh>

namespace dg::ptx {

// A K-major tile in shared memory, rows of 128 bytes in the 128-byte swizzle: groups of 8 rows are 1024 bytes
// apart.
__device__ __forceinline__ u64 descriptor_k128(Shared tile) {
    constexpr u64 kSwizzle128 = 1ull << 62;
    constexpr u64 kGroupBytes = static_cast<u64>(1024 >> 4) << 32;
    return kSwizzle128 | kGroupBytes | (1ull << 16) | ((tile & 0x3ffff) >> 4);
}

__device__ __forceinline__ void wgmma_fence() {
    asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
}

__device__ __forceinline__ void wgmma_commit() {
    asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
}

template <u32 kPending>
__device__ __forceinline__ void wgmma_wait() {
    asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(kPending) : "memory");
}

// Keeps the compiler from moving uses of accumulators over a wait.
template <u32 kCount>
__device__ __forceinline__ void pin(float (&values)[kCount]) {
#pragma unroll
    for (u32 i = 0; i < kCount; ++i)
        asm volatile("" : "+f"(values[i])::"memory");
}

// One instruction; specialised for the N that a kernel uses by the generated source it is compiled with.
template <u32 kN, bool kFp8>
struct Wgmma;

}  // namespace dg::ptx
