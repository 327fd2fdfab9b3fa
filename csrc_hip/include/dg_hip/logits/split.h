// The work split of the paged logits: units of 256 keys, request after request, dealt out evenly and in order.
#pragma once

#include <dg_hip/arch.h>

namespace dg_hip::logits {

constexpr i64 kUnit = 256;
constexpr int kSplitThreads = 256;

// How many units each processor has: `share` and, the first `rest` of them, one more.
struct Dealt {
    i64 share, rest;

    DG_DEVICE i64 first_unit(i64 processor) const { return processor * share + least(processor, rest); }
    // The first processor that starts at `unit` or behind it, where `unit` is one that exists.
    DG_DEVICE i64 processor_from(i64 unit) const {
        const i64 longer = rest * (share + 1);
        return unit <= longer ? ceil_div(unit, share + 1) : rest + ceil_div(unit - longer, share);
    }
};

// One block writes where every processor starts, and after them the end: put(processor, request, unit within it). It
// reads units(request) of each request twice. `sums` has room for one number a thread.
template <class Units, class Put>
DG_DEVICE void split(i64 batch, i64 processors, const Units& units, const Put& put, i64* sums) {
    const i64 own = thread(), each = ceil_div(batch, kSplitThreads);
    const i64 first = least(own * each, batch), last = least(first + each, batch);
    i64 sum = 0;
    for (i64 request = first; request < last; ++request)
        sum += units(request);
    sums[own] = sum;
    sync();
    for (int reach = 1; reach < kSplitThreads; reach *= 2) {  // sums[i] becomes the sum of all up to i
        const i64 before = own >= reach ? sums[own - reach] : 0;
        sync();
        sums[own] += before;
        sync();
    }
    const i64 total = sums[kSplitThreads - 1];
    const Dealt dealt{total / processors, total % processors};
    i64 before = sums[own] - sum;
    for (i64 request = first; request < last; ++request) {
        const i64 end = before + units(request);
        if (end > before)
            for (i64 i = dealt.processor_from(before); i < processors && dealt.first_unit(i) < end; ++i)
                put(i, request, dealt.first_unit(i) - before);
        before = end;
    }
    for (i64 i = own; i <= processors; i += kSplitThreads)
        if (dealt.first_unit(i) >= total)
            put(i, batch, 0);
}

}  // namespace dg_hip::logits
