// What gfx938 and gfx950 have in common: builtins of clang, no HIP header. Both targets' headers include it.
#pragma once

#include <dg_hip/layout.h>
#include <dg_hip/types.h>

#define DG_DEVICE __attribute__((device)) inline __attribute__((always_inline))
#define DG_GLOBAL(threads) \
    __attribute__((global)) __attribute__((amdgpu_flat_work_group_size(threads, threads)))
#define DG_LDS __attribute__((shared))

namespace dg_hip {

constexpr ResultMap kResultMap = ResultMap::mmac;
constexpr u64 kTicksPerSecond = 100000000;  // of the counter that s_memrealtime reads

typedef f32 NativeF32x4 __attribute__((ext_vector_type(4)));

DG_DEVICE u32 thread() {
    return __builtin_amdgcn_workitem_id_x();
}
DG_DEVICE u32 block() {
    return __builtin_amdgcn_workgroup_id_x();
}
DG_DEVICE u32 blocks() {
    return __builtin_amdgcn_grid_size_x() / __builtin_amdgcn_workgroup_size_x();
}

DG_DEVICE void sync() {
    __builtin_amdgcn_fence(__ATOMIC_RELEASE, "workgroup");
    __builtin_amdgcn_s_barrier();
    __builtin_amdgcn_fence(__ATOMIC_ACQUIRE, "workgroup");
}
// Lanes of a wave run together, so only the order of LDS accesses has to be kept.
DG_DEVICE void sync_wave() {
    __builtin_amdgcn_fence(__ATOMIC_RELEASE, "wavefront");
    __builtin_amdgcn_wave_barrier();
    __builtin_amdgcn_fence(__ATOMIC_ACQUIRE, "wavefront");
}

DG_DEVICE u32 shuffle(u32 value, u32 from) {
    return static_cast<u32>(
        __builtin_amdgcn_ds_bpermute(static_cast<i32>(from % kWave * 4), static_cast<i32>(value)));
}
DG_DEVICE u64 ballot(bool flag) {
    return __builtin_amdgcn_uicmp(static_cast<u32>(flag), 0u, 33);  // 33: not equal
}

DG_DEVICE f32 exponential(f32 x) {
    return __builtin_amdgcn_exp2f(x * 1.44269504088896341f);
}

template <class T>
DG_DEVICE T load(const void* p) {
    return *static_cast<const T*>(p);
}
template <class T>
DG_DEVICE void store(void* p, T x) {
    *static_cast<T*>(p) = x;
}

template <Scope kScope, class T>
DG_DEVICE T load_acquire(const T* p) {
    return __hip_atomic_load(p, __ATOMIC_ACQUIRE,
                             kScope == Scope::agent ? __HIP_MEMORY_SCOPE_AGENT : __HIP_MEMORY_SCOPE_SYSTEM);
}
template <Scope kScope, class T>
DG_DEVICE void store_release(T* p, T x) {
    __hip_atomic_store(p, x, __ATOMIC_RELEASE,
                       kScope == Scope::agent ? __HIP_MEMORY_SCOPE_AGENT : __HIP_MEMORY_SCOPE_SYSTEM);
}
template <Scope kScope, class T>
DG_DEVICE T add(T* p, T x) {
    return __hip_atomic_fetch_add(
        p, x, __ATOMIC_ACQ_REL,
        kScope == Scope::agent ? __HIP_MEMORY_SCOPE_AGENT : __HIP_MEMORY_SCOPE_SYSTEM);
}
template <Scope kScope, class T>
DG_DEVICE T swap_if(T* p, T from, T to) {
    __hip_atomic_compare_exchange_strong(
        p, &from, to, __ATOMIC_ACQ_REL, __ATOMIC_ACQUIRE,
        kScope == Scope::agent ? __HIP_MEMORY_SCOPE_AGENT : __HIP_MEMORY_SCOPE_SYSTEM);
    return from;
}
// Every storing thread does this itself: a fence of the thread that stores the flag alone let NaN through on gfx938.
DG_DEVICE void publish() {
    __builtin_amdgcn_s_waitcnt(0);
    __builtin_amdgcn_fence(__ATOMIC_SEQ_CST, "");
}

DG_DEVICE void pause() {
    __builtin_amdgcn_s_sleep(1);
}
DG_DEVICE u64 ticks() {
    return __builtin_amdgcn_s_memrealtime();
}

}  // namespace dg_hip
