// The kernels of the host library by name, and launches from outside.
#include "library.h"

#include <algorithm>
#include <cstring>
#include <string>
#include <vector>

#include <dg_hip/arch/host.h>

namespace dg_hip::host {

namespace {

std::vector<Kernel>& kernels() {
    static std::vector<Kernel> all;
    return all;
}

const std::vector<Kernel>& sorted() {
    static const bool once = [] {
        std::sort(kernels().begin(), kernels().end(),
                  [](const Kernel& a, const Kernel& b) { return std::strcmp(a.name, b.name) < 0; });
        return true;
    }();
    static_cast<void>(once);
    return kernels();
}

}  // namespace

Registration::Registration(const Kernel& kernel) {
    kernels().push_back(kernel);
}

}  // namespace dg_hip::host

using namespace dg_hip;

extern "C" {

const dg_hip_kernel* dg_hip_kernel_at(u32 index) {
    static const std::vector<dg_hip_kernel> told = [] {
        std::vector<dg_hip_kernel> all;
        for (const host::Kernel& k : host::sorted())
            all.push_back({k.name, k.fields, k.threads, k.bytes, k.lds});
        return all;
    }();
    return index < told.size() ? &told[index] : nullptr;
}

const char* dg_hip_launch(u32 index, u32 blocks, const void* args, u32 resident, u64 seed) {
    const auto& all = host::sorted();
    if (index >= all.size())
        return "no kernel has this number";
    if (blocks == 0)
        return nullptr;
    static thread_local std::string failure;
    failure = host::run({&all[index], args, blocks, resident, seed});
    return failure.empty() ? nullptr : failure.c_str();
}

void dg_hip_set_workers(u32 count) {
    host::set_workers(count);
}

void dg_hip_set_patience(u32 milliseconds) {
    host::set_patience(milliseconds);
}
}
