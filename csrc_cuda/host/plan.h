// A launch that is prepared once and run many times, with other addresses and on other streams each time.
// Plain C++: what it has to do with Python stands in callable.cpp.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "driver.h"

namespace dg::host {

// What a kernel's parameters may take on every card of CUDA 12; larger ones need a newer compiler and driver.
constexpr std::size_t kMaxParameterBytes = 4096;
constexpr std::size_t kMaxSlots = 64;  // addresses of one call
constexpr std::uint64_t kMappedAlignment = 16;
constexpr unsigned kMinRank = 2, kMaxRank = 3;  // of a tensor map: columns, rows and perhaps groups

// A tensor map in the parameters: where it lies, whose address it takes, and the driver's numbers for the rest.
// The driver reads as many axes as the rank says; the strides are those of all axes but the first.
struct MapSpec {
    std::size_t offset, slot;
    int type;
    unsigned rank;
    std::array<std::uint64_t, kMaxRank> sizes;
    std::array<std::uint64_t, kMaxRank - 1> strides;  // bytes
    std::array<std::uint32_t, kMaxRank> box;
    int swizzle, l2_promotion;
    std::string what;
};

struct PointerSpec {
    std::size_t offset, slot;
};

struct PlanSpec {
    std::string name;
    Handle function, context;
    std::array<unsigned, 3> grid, block, cluster;
    unsigned shared_bytes;
    bool pdl;
    std::string parameters;  // bytes, every constant filled in
    std::vector<MapSpec> maps;
    std::vector<PointerSpec> pointers;
};

// What the driver answered: code 0, or the call that failed, in words, and its CUresult.
struct Answer {
    int code = 0;
    std::string call = {};
};

// What one launch hands to the driver: a copy, so that another thread may prepare its own in the meantime.
struct Frame {
    LaunchConfig config;
    alignas(64) std::byte parameters[kMaxParameterBytes];
};

class Plan {
  public:
    // Throws std::invalid_argument where something lies outside of the parameters, or where a map has a rank
    // that MapSpec has no room for.
    Plan(PlanSpec spec, const Driver& driver);
    Plan(const Plan&) = delete;  // the configuration points into the object
    Plan& operator=(const Plan&) = delete;

    // The addresses that a call must have at least.
    std::size_t slots() const { return slots_; }
    // Whether every address that goes into a map is aligned.
    bool accepts(const std::uint64_t* addresses) const {
        std::uint64_t bits = 0;
        for (const Map& map : maps_)
            bits |= addresses[map.spec.slot];
        return bits % kMappedAlignment == 0;
    }
    // Makes the context of the kernel the current one, where it is not; `leave` undoes what `enter` did.
    Answer enter(bool& pushed) const;
    Answer leave(bool pushed) const;
    // Brings maps and pointers to these addresses; a map is encoded only when its address has changed. One thread
    // at a time (the GIL's holder).
    Answer bind(const std::uint64_t* addresses);
    void copy_to(Frame& frame, Handle stream) const;
    // Safe to run from several threads at once.
    Answer launch(Frame& frame) const;

    std::string describe() const;

  private:
    struct Map {
        MapSpec spec;
        std::uint64_t encoded;  // the address of the last encoding
    };

    void check(std::size_t offset, std::size_t bytes, std::size_t alignment, std::size_t slot);

    alignas(128) std::array<std::byte, kMaxParameterBytes> parameters_{};
    const Driver& driver_;
    std::string name_;
    Handle function_, context_;
    std::size_t size_, slots_ = 0;
    LaunchConfig config_{};
    std::array<Attribute, 2> attributes_{};
    std::vector<Map> maps_;
    std::vector<PointerSpec> pointers_;
};

}  // namespace dg::host
