// Fixed-width names and the one qualifier macro that the device headers share.
//
// NVRTC has no <cstdint> unless a toolkit's headers are on its path, and kernels are compiled where there is
// no toolkit, so the integer types are spelled out here.
#pragma once

#if defined(__CUDACC__)
#define DG_HOST_DEVICE __host__ __device__
#else
#define DG_HOST_DEVICE  // a plain C++ compiler: tests evaluate these functions on the CPU
#endif

namespace dg {

using u8 = unsigned char;
using u32 = unsigned int;
using i32 = int;
using i64 = long long;
using u64 = unsigned long long;

static_assert(sizeof(u32) == 4 && sizeof(i64) == 8, "kernels and host agree on these widths");

}  // namespace dg
