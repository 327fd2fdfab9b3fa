// Products of FP8, FP4 and bf16, dense and in groups. A name says what is multiplied, where its scales go, and the rows
// and columns of a block's tile:
//
//   gemm_bf16        no scales
//   gemm_fp8         of whole rows and columns, or none: applied on the way out
//   gemm_fp8_block   of 128 along K, or of whole rows beside such: applied to partial sums
//   gemm_fp8_block32 of 32 along K, or of 32 on one side
//   gemm_fp4..       the same with packed FP4 on one side or both
//   gemm_kpack2      as gemm_fp8, with weights in tiles of 16 x 16 bytes
#include <dg_hip/gemm.h>

using namespace dg_hip;

#define DG_GEMM(name, Element, steps, FormP, FormQ)              \
    DG_KERNEL(name##_128x128, GemmArgs, kThreads, Large::kLds) { \
        gemm<Element, Large, steps, FormP, FormQ>(args, lds);    \
    }                                                            \
    DG_KERNEL(name##_32x128, GemmArgs, kThreads, Small::kLds) {  \
        gemm<Element, Small, steps, FormP, FormQ>(args, lds);    \
    }

DG_GEMM(gemm_bf16, Bf16, 0, Plain, Plain)
DG_GEMM(gemm_fp8, Fp8, 0, Plain, Plain)
DG_GEMM(gemm_fp8_block, Fp8, 4, Plain, Plain)
DG_GEMM(gemm_fp8_block32, Fp8, 1, Plain, Plain)
DG_GEMM(gemm_fp4, Fp8, 0, Fp8OrFp4, Fp8OrFp4)
DG_GEMM(gemm_fp4_block, Fp8, 4, Fp8OrFp4, Fp8OrFp4)
DG_GEMM(gemm_fp4_block32, Fp8, 1, Fp8OrFp4, Fp8OrFp4)
DG_GEMM(gemm_kpack2, Fp8, 0, Plain, Preshuffled)
