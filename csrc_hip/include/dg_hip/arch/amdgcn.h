// What gfx938 and gfx950 have in common: builtins of clang, no HIP header. Both targets' headers include it.
#pragma once

#include <dg_hip/layout.h>
#include <dg_hip/types.h>

#define DG_DEVICE __attribute__((device)) inline __attribute__((always_inline))
#define DG_GLOBAL(threads) \
    __attribute__((global)) __attribute__((amdgpu_flat_work_group_size(threads, threads)))
#define DG_LDS(T, name, count) __attribute__((shared)) T name[count]
#define DG_UNIFORM(x) static_cast<dg_hip::u32>(__builtin_amdgcn_readfirstlane(static_cast<dg_hip::i32>(x)))
#define DG_UNROLL _Pragma("unroll")
#define DG_NO_UNROLL _Pragma("nounroll")
#define DG_IN_ORDER __builtin_amdgcn_sched_barrier(0)
#define DG_TOLD __attribute__((device, used))

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

// What a conversion to FP8 takes: it does not saturate by itself. fmin and fmax would make a number of a NaN.
DG_DEVICE f32 clipped(f32 x) {
    return x > 448.0f ? 448.0f : x < -448.0f ? -448.0f : x;
}

// Memory holds bytes: what was stored as one type may be loaded as another. Sixteen of them are one vector, since a
// struct of four words is taken apart.
typedef u32 Words4 __attribute__((ext_vector_type(4), may_alias));

template <class T>
DG_DEVICE T load(const void* p) {
    if constexpr (sizeof(T) == 16)
        return bits<T>(*static_cast<const Words4*>(p));
    T x;
    __builtin_memcpy(&x, __builtin_assume_aligned(p, sizeof(T)), sizeof(T));
    return x;
}
template <class T>
DG_DEVICE void store(void* p, T x) {
    if constexpr (sizeof(T) == 16)
        *static_cast<Words4*>(p) = bits<Words4>(x);
    else
        __builtin_memcpy(__builtin_assume_aligned(p, sizeof(T)), &x, sizeof(T));
}

// Memory that ranks share is not cached where it is written from, so this is a store as any other.
template <class T>
DG_DEVICE void store_peer(void* p, T x) {
    store(p, x);
}

constexpr int memory_scope(Scope scope) {
    return scope == Scope::agent ? __HIP_MEMORY_SCOPE_AGENT : __HIP_MEMORY_SCOPE_SYSTEM;
}

// All that this wave has in flight has arrived. The compiler's own wait behind the write-back of a release is left out
// where it sees nothing else in flight (clang 22: `buffer_wbl2` is not counted), so releases wait by this.
DG_DEVICE void arrived() {
    asm volatile("s_waitcnt vmcnt(0) lgkmcnt(0)" ::: "memory");
}
template <Scope kScope>
DG_DEVICE void release() {
    if constexpr (kScope == Scope::agent)
        __builtin_amdgcn_fence(__ATOMIC_RELEASE, "agent");
    else
        __builtin_amdgcn_fence(__ATOMIC_RELEASE, "");
    arrived();
}
template <Scope kScope>
DG_DEVICE void acquire() {
    if constexpr (kScope == Scope::agent)
        __builtin_amdgcn_fence(__ATOMIC_ACQUIRE, "agent");
    else
        __builtin_amdgcn_fence(__ATOMIC_ACQUIRE, "");
}

template <Scope kScope, class T>
DG_DEVICE T load_acquire(const T* p) {
    return __hip_atomic_load(p, __ATOMIC_ACQUIRE, memory_scope(kScope));
}
template <Scope kScope, class T>
DG_DEVICE void store_release(T* p, T x) {
    release<kScope>();
    __hip_atomic_store(p, x, __ATOMIC_RELAXED, memory_scope(kScope));
}
template <Scope kScope, class T>
DG_DEVICE T add(T* p, T x) {
    release<kScope>();
    const T old = __hip_atomic_fetch_add(p, x, __ATOMIC_RELAXED, memory_scope(kScope));
    acquire<kScope>();
    return old;
}
template <Scope kScope, class T>
DG_DEVICE T swap_if(T* p, T from, T to) {
    release<kScope>();
    __hip_atomic_compare_exchange_strong(p, &from, to, __ATOMIC_RELAXED, __ATOMIC_RELAXED,
                                         memory_scope(kScope));
    acquire<kScope>();
    return from;
}
// Every storing thread does this itself: a fence of the thread that stores the flag alone let NaN through on gfx938.
DG_DEVICE void publish() {
    arrived();
    __builtin_amdgcn_fence(__ATOMIC_SEQ_CST, "");
    arrived();
}

// Kernels take one struct, so it stands at the start of their arguments. The compiler must not see that the address is
// the same each time, or it keeps in scalar registers, and spills, all that a loop reads of it.
template <class Args>
DG_DEVICE const Args& again(const Args&) {
    typedef const __attribute__((address_space(4))) Args* Constant;
    Constant args = (Constant)__builtin_amdgcn_kernarg_segment_ptr();
    asm volatile("" : "+s"(args));
    return *(const Args*)args;
}

DG_DEVICE void pause() {
    __builtin_amdgcn_s_sleep(1);
}
DG_DEVICE u64 ticks() {
    return __builtin_amdgcn_s_memrealtime();
}

}  // namespace dg_hip
