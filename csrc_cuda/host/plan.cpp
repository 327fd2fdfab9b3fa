#include "plan.h"

#include <algorithm>
#include <cstring>
#include <stdexcept>
#include <utility>

#include "format.h"

namespace dg::host {
namespace {

constexpr std::uint64_t kNeverEncoded = 1;  // not aligned, so no call brings it

}  // namespace

Plan::Plan(PlanSpec spec, const Driver& driver)
    : driver_(driver),
      name_(std::move(spec.name)),
      function_(spec.function),
      context_(spec.context),
      size_(spec.parameters.size()),
      pointers_(std::move(spec.pointers)) {
    if (size_ == 0 || size_ > kMaxParameterBytes)
        throw std::invalid_argument(
            format("{}: {} bytes of parameters; 1 to {} are possible", name_, size_, kMaxParameterBytes));
    for (MapSpec& map : spec.maps) {
        check(map.offset, sizeof(TensorMap), alignof(TensorMap), map.slot);
        if (map.rank < kMinRank || map.rank > kMaxRank)
            throw std::invalid_argument(format("{}: the tensor map of {} has rank {}; {} to {} are possible",
                                               name_, map.what, map.rank, kMinRank, kMaxRank));
        maps_.push_back({std::move(map), kNeverEncoded});
    }
    for (const PointerSpec& pointer : pointers_)
        check(pointer.offset, sizeof(std::uint64_t), alignof(std::uint64_t), pointer.slot);
    std::memcpy(parameters_.data(), spec.parameters.data(), size_);

    std::copy(spec.grid.begin(), spec.grid.end(), config_.grid);
    std::copy(spec.block.begin(), spec.block.end(), config_.block);
    config_.shared_bytes = spec.shared_bytes;
    config_.attributes = attributes_.data();
    const auto [x, y, z] = spec.cluster;
    if (x != 1 || y != 1 || z != 1) {
        Attribute& attribute = attributes_[config_.attribute_count++];
        attribute.id = AttributeId::kClusterDimension;
        attribute.value.cluster = {x, y, z};
    }
    if (spec.pdl) {
        Attribute& attribute = attributes_[config_.attribute_count++];
        attribute.id = AttributeId::kProgrammaticStreamSerialization;
        attribute.value.programmatic = 1;
    }
}

void Plan::check(std::size_t offset, std::size_t bytes, std::size_t alignment, std::size_t slot) {
    if (offset % alignment != 0 || offset > size_ || bytes > size_ - offset)
        throw std::invalid_argument(
            format("{}: {} bytes at offset {} of {} bytes of parameters; aligned to {}", name_, bytes, offset,
                   size_, alignment));
    if (slot >= kMaxSlots)
        throw std::invalid_argument(format("{}: slot {}; it must be less than {}", name_, slot, kMaxSlots));
    slots_ = std::max(slots_, slot + 1);
}

Answer Plan::enter(bool& pushed) const {
    pushed = false;
    Handle current = nullptr;
    if (const int code = driver_.context_current(&current))
        return {code, "cuCtxGetCurrent"};
    if (current == context_)
        return {};
    if (const int code = driver_.context_push(context_))
        return {code, "cuCtxPushCurrent_v2"};
    pushed = true;
    return {};
}

Answer Plan::leave(bool pushed) const {
    Handle popped = nullptr;
    if (const int code = pushed ? driver_.context_pop(&popped) : 0)
        return {code, "cuCtxPopCurrent_v2"};
    return {};
}

Answer Plan::bind(const std::uint64_t* addresses) {
    static constexpr std::uint32_t kSteps[kMaxRank] = {1, 1, 1};
    for (Map& map : maps_) {
        const MapSpec& spec = map.spec;
        const std::uint64_t address = addresses[spec.slot];
        if (address == map.encoded)
            continue;
        auto* at = reinterpret_cast<TensorMap*>(parameters_.data() + spec.offset);
        map.encoded = kNeverEncoded;  // what a failed call leaves behind is not to be relied upon
        const int code = driver_.encode_tiled(at, spec.type, spec.rank, reinterpret_cast<Handle>(address),
                                              spec.sizes.data(), spec.strides.data(), spec.box.data(), kSteps,
                                              0, spec.swizzle, spec.l2_promotion, 0);
        if (code)
            return {code, format("tensor map of {}: cuTensorMapEncodeTiled", spec.what)};
        map.encoded = address;
    }
    for (const PointerSpec& pointer : pointers_)
        std::memcpy(parameters_.data() + pointer.offset, addresses + pointer.slot, sizeof(std::uint64_t));
    return {};
}

void Plan::copy_to(Frame& frame, Handle stream) const {
    frame.config = config_;
    frame.config.stream = stream;
    std::memcpy(frame.parameters, parameters_.data(), size_);
}

Answer Plan::launch(Frame& frame) const {
    void* parameters[1] = {frame.parameters};
    if (const int code = driver_.launch(&frame.config, function_, parameters, nullptr))
        return {code, format("{}: cuLaunchKernelEx", name_)};
    return {};
}

std::string Plan::describe() const {
    const auto& [x, y, z] = config_.grid;
    return format("<plan of {}: grid {} x {} x {}, {} bytes of parameters, {} maps, {} pointers>", name_, x,
                  y, z, size_, maps_.size(), pointers_.size());
}

}  // namespace dg::host
