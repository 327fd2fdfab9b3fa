// Warpgroup matrix products (wgmma, sm_90a): D[64, N] += P[64, 32 bytes] * Q[N, 32 bytes]^T from shared
// memory.
#pragma once

#include <dg/ptx/barrier.cuh>

namespace dg::ptx {

// Descriptors of tiles in shared memory in the 128-byte swizzle, with rows of 128 bytes in groups of 8 that are
// 1024 bytes apart. Their high words are all alike; the low word holds the address and grows with it, in units
// of 16 bytes.
constexpr u32 kDescriptorHigh = 1u << 30 | 1024 >> 4;

// A K-major tile: a row holds 128 bytes of K.
__device__ __forceinline__ u32 descriptor_k128(Shared tile) {
    return 1u << 16 | (tile & 0x3ffff) >> 4;
}

// An MN-major tile of 16-bit values: chunks of 64 rows, `chunk_bytes` apart, each with 128 bytes of rows for
// every value of K.
__device__ __forceinline__ u32 descriptor_mn128(Shared tile, u32 chunk_bytes) {
    return chunk_bytes >> 4 << 16 | (tile & 0x3ffff) >> 4;
}

__device__ __forceinline__ u64 descriptor(u32 low) {
    return static_cast<u64>(kDescriptorHigh) << 32 | low;
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

// The value is in a register here: it is not computed anew where it is used, which may be the worst place.
__device__ __forceinline__ void keep(u32& value) {
    asm volatile("" : "+r"(value));
}

}  // namespace dg::ptx
