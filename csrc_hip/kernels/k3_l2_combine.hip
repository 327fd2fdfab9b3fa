// The third stage of Mega MoE: multiply by L2, hand rows back to their ranks, and add up the slots of own tokens.
//
// Blocks that multiply come first and wait for nobody. Behind them stand blocks that wait for all ranks and then add
// (the tail); without those the waiting and the sum are launches of their own.
#include <dg_hip/mega/combine.h>
#include <dg_hip/mega/products.h>

using namespace dg_hip;
using namespace dg_hip::mega;

DG_KERNEL(mega_k3_l2_combine, Args, kThreads, kMegaLds) {
    if (stopped(args, lds))
        return;
    const u32 products = static_cast<u32>(args.product_blocks);
    if (block() < products)
        l2_and_signal(args, products, lds);
    else if (all_done(args, lds))
        reduce_slots(args, block() - products, blocks() - products, static_cast<u32>(args.reduce_threads));
}

DG_KERNEL(mega_close, Args, kThreads, kFewLds) {
    if (!stopped(args, lds))
        all_done(args, lds);
}

DG_KERNEL(mega_reduce, Args, kThreads, kFewLds) {
    if (!stopped(args, lds))
        reduce_slots(args, block(), blocks(), static_cast<u32>(args.reduce_threads));
}
