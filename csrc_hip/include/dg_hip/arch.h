// What kernels may ask of a machine. Each target answers in its own header, and no other file names an instruction.
//
//   thread() block() blocks()             of the launch; lane() and wave() follow below
//   sync() sync_wave()                    all threads of the block, all lanes of the wave: LDS is seen afterwards
//   shuffle(value, lane) ballot(flag)     among the 64 lanes; all of them take part
//   multiply<Fp8 or Bf16>(acc, p, q)      acc += P x Q^T, 16 x 16; `result` of ResultMap::mmac says which four
//                                         elements a lane holds: p is its row, the four are q
//   q_row(row)                            the row of a 16-row strip that a lane gives of Q in place of `row`
//   fp8x4(a, b, c, d) exponential(x)      saturating, to nearest even; e^x, within 5e-6 of it
//   load<T>(p) store<T>(p, x)             plain, T up to 16 bytes and aligned to its size
//   load_peer<T>(p) store_peer<T>(p, x)   past the caches that other ranks do not see into
//   load_acquire<Scope>(p) store_release<Scope>(p, x) add<Scope>(p, x) swap_if<Scope>(p, from, to)
//                                         32- and 64-bit words; the latter two acquire, release and give the old
//   publish()                             this thread's stores are seen by all ranks before what it stores next
//   acquire<Scope>()                      what was published before a flag is seen, after a meeting with the thread that
//                                         read the flag
//   again(args)                           the kernel's arguments, read anew where a loop of much work uses them
//   pause()                               in every turn of a loop that waits for another block or rank
//   ticks() kTicksPerSecond               a clock that does not stop
//
// DG_DEVICE marks functions, DG_KERNEL defines kernels (dg_hip/kernel.h). A target may also define
//   DG_UNIFORM(x)                         x, which is the same in all lanes of a wave, where the compiler learns it
//   DG_UNROLL DG_NO_UNROLL                before a loop: all turns of it in the code, or one
//   DG_IN_ORDER                           the compiler moves no instruction past this: fewer registers at a time
#pragma once

#include <dg_hip/layout.h>
#include <dg_hip/types.h>

#if defined(DG_HIP_HOST)
#include <dg_hip/arch/host.h>
#elif defined(__gfx938__)
#include <dg_hip/arch/gfx938.h>
#elif defined(__gfx950__)
#include <dg_hip/arch/gfx950.h>
#elif defined(__CUDACC__)
#include <dg_hip/arch/cuda.h>
#else
#error "no header for this target: compile with -DDG_HIP_HOST, for gfx938 or gfx950, or with nvcc"
#endif

#if !defined(DG_UNIFORM)
#define DG_UNIFORM(x) (x)
#endif
#if !defined(DG_UNROLL)
#define DG_UNROLL
#define DG_NO_UNROLL
#endif
#if !defined(DG_IN_ORDER)
#define DG_IN_ORDER
#endif

namespace dg_hip {

DG_DEVICE u32 lane() {
    return thread() % kWave;
}
DG_DEVICE u32 wave() {
    return DG_UNIFORM(thread() / kWave);
}

DG_DEVICE f32 shuffle_f32(f32 value, u32 from) {
    return bits<f32>(shuffle(bits<u32>(value), from));
}

}  // namespace dg_hip
