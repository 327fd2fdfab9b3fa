// NVIDIA cards: the same kernels under true concurrency, compiled by nvcc and not run on a card yet. Correct, not fast.
//
// A wave is two warps. They meet at a named barrier, of which a block has 15 for its waves, and what an instruction of
// a wave exchanges goes through shared memory; the matrix instruction is m16n8k32 (bf16: m16n8k16) for each warp, 8
// of the 16 columns, with gfx938's lane map on both sides.
#pragma once

#include <dg_hip/layout.h>
#include <dg_hip/types.h>

#define DG_DEVICE __device__ __forceinline__
#define DG_GLOBAL(threads) __global__ __launch_bounds__(threads)
// Given at the launch: more than 48 KiB cannot be declared.
#define DG_LDS(T, name, count) extern __shared__ T name[]
#define DG_TOLD __device__
#define DG_UNROLL _Pragma("unroll")
#define DG_NO_UNROLL _Pragma("unroll 1")
// A function of this name is in nvcc's own headers.
#define ballot wave_ballot
// The one builtin of the other compilers that nvcc has under another name.
#define __builtin_ctzll(x) (::__ffsll(static_cast<long long>(x)) - 1)

namespace dg_hip {

constexpr ResultMap kResultMap = ResultMap::mmac;
constexpr u64 kTicksPerSecond = 1000000000;

namespace cuda {

constexpr u32 kMostWaves = 15;

// What the lanes of a wave lay down for each other.
union Exchange {
    u32 words[kWave];
    struct {
        u64 p[kMmaM][kMmaK / 8], q[kMmaN][kMmaK / 8];
    } operands;
    f32 sums[kMmaM][kMmaN];
};

DG_DEVICE Exchange& exchange() {
    __shared__ Exchange all[kMostWaves];
    return all[threadIdx.x / kWave];
}

// Both warps come here; what they wrote to shared memory is seen. Threads of a warp may have taken different branches
// before, which the matrix instruction does not allow.
DG_DEVICE void meet() {
    asm volatile("barrier.sync %0, 64;" ::"r"(threadIdx.x / kWave + 1) : "memory");
    __syncwarp();
}

DG_DEVICE void mma(f32 (&sum)[4], const u32 (&a)[4], const u32 (&b)[2], Fp8) {
    asm volatile(
        "mma.sync.aligned.m16n8k32.row.col.f32.e4m3.e4m3.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
        "{%0, %1, %2, %3};"
        : "+f"(sum[0]), "+f"(sum[1]), "+f"(sum[2]), "+f"(sum[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}
DG_DEVICE void mma(f32 (&sum)[4], const u32 (&a)[4], const u32 (&b)[2], Bf16) {
    asm volatile(
        "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
        "{%0, %1, %2, %3};"
        : "+f"(sum[0]), "+f"(sum[1]), "+f"(sum[2]), "+f"(sum[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}

}  // namespace cuda

template <class Args>
DG_DEVICE const Args& again(const Args& args) {
    return args;
}

DG_DEVICE u32 thread() {
    return threadIdx.x;
}
DG_DEVICE u32 block() {
    return blockIdx.x;
}
DG_DEVICE u32 blocks() {
    return gridDim.x;
}

DG_DEVICE void sync() {
    __syncthreads();
}
DG_DEVICE void sync_wave() {
    cuda::meet();
}

DG_DEVICE u32 shuffle(u32 value, u32 from) {
    u32(&words)[kWave] = cuda::exchange().words;
    words[threadIdx.x % kWave] = value;
    cuda::meet();
    const u32 result = words[from % kWave];
    cuda::meet();
    return result;
}

DG_DEVICE u64 ballot(bool flag) {
    u32(&words)[kWave] = cuda::exchange().words;
    const u32 own = __ballot_sync(0xffffffffu, flag);
    words[threadIdx.x % kWave] = own;
    cuda::meet();
    const u64 result = words[0] | static_cast<u64>(words[kWave / 2]) << 32;
    cuda::meet();
    return result;
}

// The operands cross shared memory in rows of 32 bytes. A thread of a warp takes rows `group` and `group + 8` of P and
// row `group` of the warp's half of Q, 4 bytes of k at `quad` * 4 and 4 more 16 bytes on.
template <class Element>
DG_DEVICE void multiply(F32x4& acc, u64 p, u64 q) {
    cuda::Exchange& own = cuda::exchange();
    const int lane = static_cast<int>(threadIdx.x % kWave), half = lane / 32 * 8;
    const int group = lane % 32 / 4, quad = lane % 4;
    own.operands.p[operand_row(lane)][operand_k(lane) / 8] = p;
    own.operands.q[operand_row(lane)][operand_k(lane) / 8] = q;
    cuda::meet();
    const auto word = [&](const u64(&row)[kMmaK / 8], int k) {
        return static_cast<u32>(row[k / 8] >> k % 8 * 8);
    };
    const u32 a[4] = {word(own.operands.p[group], quad * 4), word(own.operands.p[group + 8], quad * 4),
                      word(own.operands.p[group], quad * 4 + 16),
                      word(own.operands.p[group + 8], quad * 4 + 16)};
    const u32 b[2] = {word(own.operands.q[half + group], quad * 4),
                      word(own.operands.q[half + group], quad * 4 + 16)};
    f32 sum[4] = {0, 0, 0, 0};
    cuda::mma(sum, a, b, Element());
    cuda::meet();
    for (int i = 0; i < 4; ++i)
        own.sums[group + i / 2 * 8][half + quad * 2 + i % 2] = sum[i];
    cuda::meet();
    for (int slot = 0; slot < 4; ++slot) {
        const Coord at = result(kResultMap, lane, slot);
        acc.v[slot] += own.sums[at.row][at.col];
    }
    cuda::meet();
}

constexpr int q_row(int row) {
    return row;
}

DG_DEVICE u32 fp8x4(f32 a, f32 b, f32 c, f32 d) {
    u16 low, high;
    asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(low) : "f"(b), "f"(a));
    asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(high) : "f"(d), "f"(c));
    return low | static_cast<u32>(high) << 16;
}

DG_DEVICE f32 exponential(f32 x) {
    return ::expf(x);
}

// Plain accesses: nvcc 13 makes single bytes of a memcpy of 16.
template <class T>
DG_DEVICE T load(const void* p) {
    return *static_cast<const T*>(p);
}
template <class T>
DG_DEVICE void store(void* p, T x) {
    *static_cast<T*>(p) = x;
}

namespace cuda {

template <class Word>
DG_DEVICE Word load_word(const void* p) {
    return __nv_atomic_load_n(static_cast<Word*>(const_cast<void*>(p)), __NV_ATOMIC_RELAXED,
                              __NV_THREAD_SCOPE_SYSTEM);
}

}  // namespace cuda

// Past the first-level cache, which does not see what other cards write.
template <class T>
DG_DEVICE T load_peer(const void* p) {
    if constexpr (sizeof(T) == 16) {
        const u64* words = static_cast<const u64*>(p);
        struct Pair {
            u64 low, high;
        } pair = {cuda::load_word<u64>(words), cuda::load_word<u64>(words + 1)};
        return bits<T>(pair);
    } else if constexpr (sizeof(T) == 8) {
        return bits<T>(cuda::load_word<u64>(p));
    } else if constexpr (sizeof(T) == 4) {
        return bits<T>(cuda::load_word<u32>(p));
    } else {
        return *static_cast<const volatile T*>(p);
    }
}
template <class T>
DG_DEVICE void store_peer(void* p, T x) {
    *static_cast<T*>(p) = x;
}

template <Scope kScope, class T>
DG_DEVICE T load_acquire(const T* p) {
    if constexpr (kScope == Scope::agent)
        return __nv_atomic_load_n(const_cast<T*>(p), __NV_ATOMIC_ACQUIRE, __NV_THREAD_SCOPE_DEVICE);
    else
        return __nv_atomic_load_n(const_cast<T*>(p), __NV_ATOMIC_ACQUIRE, __NV_THREAD_SCOPE_SYSTEM);
}
template <Scope kScope, class T>
DG_DEVICE void store_release(T* p, T x) {
    if constexpr (kScope == Scope::agent)
        __nv_atomic_store_n(p, x, __NV_ATOMIC_RELEASE, __NV_THREAD_SCOPE_DEVICE);
    else
        __nv_atomic_store_n(p, x, __NV_ATOMIC_RELEASE, __NV_THREAD_SCOPE_SYSTEM);
}
template <Scope kScope, class T>
DG_DEVICE T add(T* p, T x) {
    if constexpr (kScope == Scope::agent)
        return __nv_atomic_fetch_add(p, x, __NV_ATOMIC_ACQ_REL, __NV_THREAD_SCOPE_DEVICE);
    else
        return __nv_atomic_fetch_add(p, x, __NV_ATOMIC_ACQ_REL, __NV_THREAD_SCOPE_SYSTEM);
}
template <Scope kScope, class T>
DG_DEVICE T swap_if(T* p, T from, T to) {
    if constexpr (kScope == Scope::agent)
        __nv_atomic_compare_exchange_n(p, &from, to, false, __NV_ATOMIC_ACQ_REL, __NV_ATOMIC_ACQUIRE,
                                       __NV_THREAD_SCOPE_DEVICE);
    else
        __nv_atomic_compare_exchange_n(p, &from, to, false, __NV_ATOMIC_ACQ_REL, __NV_ATOMIC_ACQUIRE,
                                       __NV_THREAD_SCOPE_SYSTEM);
    return from;
}
template <Scope kScope>
DG_DEVICE void acquire() {
    kScope == Scope::agent ? __threadfence() : __threadfence_system();
}
DG_DEVICE void publish() {
    __threadfence_system();
}

DG_DEVICE void pause() {
    __nanosleep(64);
}
DG_DEVICE u64 ticks() {
    u64 now;
    asm volatile("mov.u64 %0, %globaltimer;" : "=l"(now));
    return now;
}

}  // namespace dg_hip
