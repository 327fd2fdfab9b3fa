// The C interface of the host library: what the Python package calls through ctypes.
#pragma once

#include <dg_hip/types.h>

namespace dg_hip::host {

struct Kernel;

struct Launch {
    const Kernel* kernel;
    const void* args;
    u32 blocks;
    u32 resident;  // blocks that are started and not at their end, at most
    u64 seed;      // of the order in which threads run; 0 is their own
};

// Runs all blocks; nullptr, or what went wrong in words that stay valid until this thread's next launch.
const char* run(const Launch& launch);

}  // namespace dg_hip::host

extern "C" {

struct dg_hip_kernel {
    const char* name;
    const char* fields;
    dg_hip::u32 threads, bytes, lds;
};

// Kernels in order of their names; null behind the last one.
const dg_hip_kernel* dg_hip_kernel_at(dg_hip::u32 index);
// Null on success, else why not.
const char* dg_hip_launch(dg_hip::u32 index, dg_hip::u32 blocks, const void* args, dg_hip::u32 resident,
                          dg_hip::u64 seed);
// Workers that run blocks; 0 asks for one a core.
void dg_hip_set_workers(dg_hip::u32 count);
}
