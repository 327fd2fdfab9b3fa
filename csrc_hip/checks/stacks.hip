// Kernels for tests of the host target alone: threads that need more stack than they have. Never shipped.
#include <dg_hip/kernel.h>

using namespace dg_hip;

#define STACK_FIELDS(X) X(ptr, out) X(i32, depth) X(i32, then_sync)
DG_ARGS(StackArgs, STACK_FIELDS)

namespace {

// Takes about a kilobyte of stack for each unit of depth; at the bottom a thread may meet the others.
__attribute__((noinline)) u32 dig(const StackArgs& args, i32 depth) {
    volatile u32 hole[256];
    for (u32 i = 0; i < 256; ++i)
        hole[i] = i + static_cast<u32>(depth);
    if (depth > 0)
        return dig(args, depth - 1) + hole[static_cast<u32>(depth) % 256];
    if (args.then_sync)
        sync();
    return hole[0];
}

}  // namespace

// Only the last thread digs, so that what lies below its stack is its neighbour's, which has ended by then or waits.
DG_KERNEL(wrong_stack, StackArgs, 64, 0) {
    u32 sum = 0;
    if (thread() == 32)
        sum = dig(args, args.depth);
    else if (args.then_sync)
        sync();
    store<u32>(args.out + static_cast<i64>(thread()) * 4, sum);
}
