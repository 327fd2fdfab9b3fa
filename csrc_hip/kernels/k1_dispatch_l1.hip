// The first stage of Mega MoE: wait for all ranks, find this rank's rows, take them, multiply by L1.
//
// Routes are found by three launches before the product (compact), or inside the product's launch, whose blocks then
// meet twice and have to be resident all.
#include <dg_hip/mega/products.h>

using namespace dg_hip;
using namespace dg_hip::mega;

DG_KERNEL(mega_open, Args, kThreads, 16) {
    if (thread() == 0)
        open_call(args);
}

DG_KERNEL(mega_gather_routes, Args, kThreads, kFewLds) {
    if (!stopped(args, lds))
        gather_routes(args, block(), blocks());
}

DG_KERNEL(mega_emit_routes, Args, kThreads, kMegaLds) {
    if (!stopped(args, lds))
        emit_routes(args, block(), blocks(), lds);
}

DG_KERNEL(mega_k1_dispatch_l1, Args, kThreads, kMegaLds) {
    if (stopped(args, lds))
        return;
    if (args.route_inside != 0) {
        gather_routes(args, block(), blocks());
        if (!meet_blocks(args, lds))
            return;
        emit_routes(args, block(), blocks(), lds);
        if (!meet_blocks(args, lds))
            return;
    }
    dispatch_and_l1(args, lds);
}
