// The second stage of Mega MoE: SwiGLU, router weight, one scale for each row, cast to FP8.
#include <dg_hip/mega/rows.h>

using namespace dg_hip;
using namespace dg_hip::mega;

DG_KERNEL(mega_k2_swiglu_quant, Args, kThreads, kFewLds) {
    if (!stopped(args, lds))
        swiglu_quantise(args);
}
