// What a launch needs of the CUDA driver: its structures as cuda.h lays them out on 64-bit systems, and its
// functions, found in the library when it is first asked for. No header of CUDA is needed to compile this, and
// no driver to load it. backends/cuda/structs.py holds the same layouts, which a test compares with cuda.h.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>

namespace dg::host {

using Handle = void*;  // CUcontext, CUfunction, CUstream

struct alignas(64) TensorMap {  // CUtensorMap; cuTensorMapEncodeTiled asks for 64 bytes of alignment
    std::uint64_t opaque[16];
};
static_assert(sizeof(TensorMap) == 128);

enum class AttributeId : int { kClusterDimension = 4, kProgrammaticStreamSerialization = 6 };

union AttributeValue {
    char bytes[64];
    struct {
        unsigned x, y, z;
    } cluster;
    int programmatic;
};

struct Attribute {
    AttributeId id;
    char pad[4];
    AttributeValue value;
};
static_assert(sizeof(Attribute) == 72 && offsetof(Attribute, value) == 8);

struct LaunchConfig {
    unsigned grid[3];
    unsigned block[3];
    unsigned shared_bytes;
    Handle stream;
    const Attribute* attributes;
    unsigned attribute_count;
};
static_assert(sizeof(LaunchConfig) == 56 && offsetof(LaunchConfig, shared_bytes) == 24);
static_assert(offsetof(LaunchConfig, stream) == 32 && offsetof(LaunchConfig, attributes) == 40);
static_assert(offsetof(LaunchConfig, attribute_count) == 48);

// The functions in use; each returns a CUresult, 0 for success.
struct Driver {
    int (*context_current)(Handle*);
    int (*context_push)(Handle);
    int (*context_pop)(Handle*);
    int (*encode_tiled)(TensorMap*, int type, std::uint32_t rank, Handle address, const std::uint64_t* sizes,
                        const std::uint64_t* strides, const std::uint32_t* box, const std::uint32_t* steps,
                        int interleave, int swizzle, int l2_promotion, int fill);
    int (*launch)(const LaunchConfig*, Handle function, void** parameters, void** extra);
};

// The functions of a driver library by its file name or path; looked up once for each, and never unloaded.
// Throws std::runtime_error with the loader's words. The caller holds the GIL.
const Driver& open_driver(const std::string& library);

}  // namespace dg::host
