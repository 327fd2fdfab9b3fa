// The host target: threads are fibers, 64 of them a wave, and an instruction of a wave is a meeting of its lanes. The
// matrix instruction and its lane map are gfx938's. csrc_hip/host/block.cpp runs the fibers.
#pragma once

#include <cmath>
#include <cstddef>

#include <dg_hip/layout.h>
#include <dg_hip/types.h>

#define DG_DEVICE inline

namespace dg_hip {

constexpr ResultMap kResultMap = ResultMap::mmac;
constexpr u64 kTicksPerSecond = 1000000000;

namespace host {

// What a fiber knows of its place.
struct Place {
    u32 thread, block, blocks;
};
extern __thread const Place* here;  // not thread_local: that asks at every use whether it is initialised

// A kernel of this library, as DG_KERNEL registers it.
struct Kernel {
    const char* name;
    const char* fields;
    u32 threads, bytes, lds;
    void (*run)(const void* args, u8* lds);
};
struct Registration {
    explicit Registration(const Kernel& kernel);
};

// All lanes of the wave come here, each with something of its own; the last one calls `all` with everybody's, in
// order of lanes, and then all go on.
using All = void (*)(void* const* lanes);
void meet(void* own, All all);
void meet_block();
// Lets the other fibers go on, and other blocks where all of this one's wait.
void give_way();
u64 nanoseconds();
// What memory held before may have changed.
inline void forget() {
    __atomic_signal_fence(__ATOMIC_SEQ_CST);
}

struct Shuffle {
    u32 value, from, result;
};
struct Ballot {
    bool flag;
    u64 result;
};
struct Multiply {
    u64 p, q;
    f32 acc[4];
};
void shuffle_all(void* const* lanes);
void ballot_all(void* const* lanes);
void multiply_fp8_all(void* const* lanes);
void multiply_bf16_all(void* const* lanes);
void nothing(void* const* lanes);
u32 fp8_bits(f32 x);

}  // namespace host

inline u32 thread() {
    return host::here->thread;
}
inline u32 block() {
    return host::here->block;
}
inline u32 blocks() {
    return host::here->blocks;
}

inline void sync() {
    host::meet_block();
}
inline void sync_wave() {
    host::meet(nullptr, host::nothing);
}

inline u32 shuffle(u32 value, u32 from) {
    host::Shuffle own{value, from % kWave, 0};
    host::meet(&own, host::shuffle_all);
    return own.result;
}

inline u64 ballot(bool flag) {
    host::Ballot own{flag, 0};
    host::meet(&own, host::ballot_all);
    return own.result;
}

template <class Element>
inline void multiply(F32x4& acc, u64 p, u64 q) {
    host::Multiply own{p, q, {acc.v[0], acc.v[1], acc.v[2], acc.v[3]}};
    host::meet(&own, Element::kBytes == 1 ? host::multiply_fp8_all : host::multiply_bf16_all);
    acc = F32x4{{own.acc[0], own.acc[1], own.acc[2], own.acc[3]}};
}

constexpr int q_row(int row) {
    return row;
}

inline u32 fp8x4(f32 a, f32 b, f32 c, f32 d) {
    return host::fp8_bits(a) | host::fp8_bits(b) << 8 | host::fp8_bits(c) << 16 | host::fp8_bits(d) << 24;
}

inline f32 exponential(f32 x) {
    return std::exp(x);
}

// Memory holds bytes: what was stored as one type may be loaded as another.
template <class T>
inline T load(const void* p) {
    T x;
    __builtin_memcpy(&x, __builtin_assume_aligned(p, sizeof(T)), sizeof(T));
    return x;
}
template <class T>
inline void store(void* p, T x) {
    __builtin_memcpy(__builtin_assume_aligned(p, sizeof(T)), &x, sizeof(T));
}
template <class T>
inline T load_peer(const void* p) {
    host::forget();
    return load<T>(p);
}
template <class T>
inline void store_peer(void* p, T x) {
    store(p, x);
}

template <Scope, class T>
inline T load_acquire(const T* p) {
    return __atomic_load_n(p, __ATOMIC_ACQUIRE);
}
template <Scope, class T>
inline void store_release(T* p, T x) {
    __atomic_store_n(p, x, __ATOMIC_RELEASE);
}
template <Scope, class T>
inline T add(T* p, T x) {
    return __atomic_fetch_add(p, x, __ATOMIC_ACQ_REL);
}
template <Scope, class T>
inline T swap_if(T* p, T from, T to) {
    __atomic_compare_exchange_n(p, &from, to, false, __ATOMIC_ACQ_REL, __ATOMIC_ACQUIRE);
    return from;
}
template <Scope>
inline void acquire() {
    host::forget();
    __atomic_thread_fence(__ATOMIC_ACQUIRE);
}
inline void publish() {
    __atomic_thread_fence(__ATOMIC_SEQ_CST);
}

template <class Args>
inline const Args& again(const Args& args) {
    return args;
}

inline void pause() {
    host::give_way();
}
inline u64 ticks() {
    return host::nanoseconds();
}

}  // namespace dg_hip
