// The switch between stacks, where it is not the C library's.
#include "switch.h"

#if defined(DG_HIP_OWN_SWITCH)
asm(R"(
    .text
    .globl dg_hip_switch
    .hidden dg_hip_switch
    .type dg_hip_switch, @function
dg_hip_switch:
    pushq %rbp
    pushq %rbx
    pushq %r12
    pushq %r13
    pushq %r14
    pushq %r15
    movq %rsp, (%rdi)
    movq %rsi, %rsp
    popq %r15
    popq %r14
    popq %r13
    popq %r12
    popq %rbx
    popq %rbp
    ret
    .size dg_hip_switch, .-dg_hip_switch
)");
#endif
