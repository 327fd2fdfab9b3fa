// All of Mega MoE in one launch: the stages' own functions, with meetings of all blocks in between, so all of them have
// to be resident. Its bits are those of the stages.
#include <dg_hip/mega/combine.h>
#include <dg_hip/mega/products.h>
#include <dg_hip/mega/rows.h>

using namespace dg_hip;
using namespace dg_hip::mega;

DG_KERNEL(mega_persistent, Args, kThreads, kMegaLds) {
    if (block() == 0 && thread() == 0)
        open_call(args);
    meet_blocks(args);
    if (stopped(args, lds))
        return;
    gather_routes(again(args), block(), blocks());
    meet_blocks(again(args));
    emit_routes(again(args), block(), blocks(), lds);
    meet_blocks(again(args));
    dispatch_and_l1(args, lds);
    meet_blocks(again(args));
    swiglu_quantise(again(args));
    meet_blocks(again(args));
    l2_and_signal(args, blocks(), lds);
    if (all_done(again(args), lds))
        reduce_slots(again(args), block(), blocks(), kThreads);
}
