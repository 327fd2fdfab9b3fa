// Asynchronous copies: tensor maps (TMA) and cp.async.
#pragma once

#include <dg/ptx/barrier.cuh>

namespace dg::ptx {

struct alignas(64) TensorMap {
    u64 opaque[16];  // CUtensorMap
};

// L2 policies of createpolicy, as the fixed words that the hardware takes for a fraction of 1.
constexpr u64 kEvictNormal = 0x1000000000000000ull;
constexpr u64 kEvictFirst = 0x12f0000000000000ull;
constexpr u64 kEvictLast = 0x14f0000000000000ull;

__device__ __forceinline__ void prefetch_map(const TensorMap* map) {
    asm volatile("prefetch.tensormap [%0];" ::"l"(map) : "memory");
}

// A box at (x, y) into shared memory; its bytes count on `barrier`. Elements outside the tensor arrive as
// zeros.
__device__ __forceinline__ void tma_load(const TensorMap* map, Shared barrier, Shared destination, i32 x,
                                         i32 y, u64 policy) {
    asm volatile(
        "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint "
        "[%0], [%1, {%3, %4}], [%2], %5;" ::"r"(destination),
        "l"(map), "r"(barrier), "r"(x), "r"(y), "l"(policy)
        : "memory");
}

// The same of matrix z of a tensor of several.
__device__ __forceinline__ void tma_load(const TensorMap* map, Shared barrier, Shared destination, i32 x,
                                         i32 y, i32 z, u64 policy) {
    asm volatile(
        "cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint "
        "[%0], [%1, {%3, %4, %5}], [%2], %6;" ::"r"(destination),
        "l"(map), "r"(barrier), "r"(x), "r"(y), "r"(z), "l"(policy)
        : "memory");
}

__device__ __forceinline__ void tma_store(const TensorMap* map, Shared source, i32 x, i32 y) {
    asm volatile("cp.async.bulk.tensor.2d.global.shared::cta.bulk_group [%0, {%2, %3}], [%1];" ::"l"(map),
                 "r"(source), "r"(x), "r"(y)
                 : "memory");
}

__device__ __forceinline__ void tma_store(const TensorMap* map, Shared source, i32 x, i32 y, i32 z) {
    asm volatile("cp.async.bulk.tensor.3d.global.shared::cta.bulk_group [%0, {%2, %3, %4}], [%1];" ::"l"(map),
                 "r"(source), "r"(x), "r"(y), "r"(z)
                 : "memory");
}

__device__ __forceinline__ void tma_store_commit() {
    asm volatile("cp.async.bulk.commit_group;" ::: "memory");
}

// Waits until all but the last kPending groups have read their shared memory.
template <u32 kPending>
__device__ __forceinline__ void tma_store_wait_read() {
    asm volatile("cp.async.bulk.wait_group.read %0;" ::"n"(kPending) : "memory");
}

// Makes this thread's writes to shared memory visible to the copies that follow.
__device__ __forceinline__ void fence_async_shared() {
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}

// Programmatic dependent launch: waits until the kernels before this one are done with memory. No-ops without
// it.
__device__ __forceinline__ void wait_for_previous_kernel() {
    asm volatile("griddepcontrol.wait;" ::: "memory");
}

__device__ __forceinline__ void let_next_kernel_start() {
    asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
}

}  // namespace dg::ptx
