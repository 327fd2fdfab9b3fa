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
    if (!meet_blocks(args, lds) || stopped(args, lds))
        return;
    gather_routes(again(args), block(), blocks());
    if (!meet_blocks(again(args), lds))
        return;
    emit_routes(again(args), block(), blocks(), lds);
    if (!meet_blocks(again(args), lds))
        return;
    dispatch_and_l1(args, lds);
    if (!meet_blocks(again(args), lds))
        return;
    swiglu_quantise(again(args));
    if (!meet_blocks(again(args), lds))
        return;
    l2_and_signal(args, blocks(), lds);
    if (all_done(again(args), lds))
        reduce_slots(again(args), block(), blocks(), kThreads);
}
