// The C interface of the host library: what the Python package calls through ctypes.
#pragma once

#include <string>

#include <dg_hip/types.h>

namespace dg_hip::host {

struct Kernel;

struct Launch {
    const Kernel* kernel;
    const void* args;
    u32 blocks;
    u32 resident;  // blocks that are started and not at their end, at most
    u64 seed;      // of the order in which threads run: 0 is their own, odd ones take a wave at a time
};

// Runs all blocks; empty, or what went wrong in words.
std::string run(const Launch& launch);
void set_workers(u32 count);
void set_patience(u32 milliseconds);

}  // namespace dg_hip::host

// All else of the library is hidden: two builds in one process share nothing.
#pragma GCC visibility push(default)
extern "C" {

struct dg_hip_kernel {
    const char* name;
    const char* fields;
    dg_hip::u32 threads, bytes, lds;
};

// Kernels in order of their names; null behind the last one.
const dg_hip_kernel* dg_hip_kernel_at(dg_hip::u32 index);
// Null on success, else why not, in words that stay until this thread's next launch.
const char* dg_hip_launch(dg_hip::u32 index, dg_hip::u32 blocks, const void* args, dg_hip::u32 resident,
                          dg_hip::u64 seed);
// Workers that run blocks; 0, as at first, asks for one a core.
void dg_hip_set_workers(dg_hip::u32 count);
// A launch whose blocks have only paused for so long fails; ten minutes at first. Kernels that wait for other ranks
// have shorter deadlines of their own.
void dg_hip_set_patience(dg_hip::u32 milliseconds);
}
#pragma GCC visibility pop
