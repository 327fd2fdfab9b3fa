// One thread of the processor, several stacks.
#pragma once

#include <dg_hip/types.h>

// DG_HIP_UCONTEXT takes the C library's switch where the one in assembly would do: for tests.
#if defined(__x86_64__) && !defined(DG_HIP_UCONTEXT)
#define DG_HIP_OWN_SWITCH 1
#else
#include <ucontext.h>
#endif

namespace dg_hip::host {

#if defined(DG_HIP_OWN_SWITCH)

// Bytes at the far end of a stack that hold what it starts with.
constexpr unsigned long kContext = 0;

// Saves what a called function must keep and the stack pointer, and goes on where `to` was left.
extern "C" void dg_hip_switch(void** from, void* to);

inline void switch_to(void** from, void* to) {
    dg_hip_switch(from, to);
}

// A stack on which the first switch enters `function`, which must not return.
inline void* prepare(u8* stack, unsigned long size, void (*function)()) {
    void** top = reinterpret_cast<void**>(stack + size);
    // Where a return address would be: a function begins 8 bytes below a multiple of 16.
    *--top = nullptr;
    *--top = reinterpret_cast<void*>(function);  // what the switch returns to
    return top - 6;                              // six registers, whatever they hold
}

#else

constexpr unsigned long kContext = 8192;  // of arm64: 4.5 KB

// The stack pointer is a context: the first one at the far end of its stack, later ones where it was left.
inline void switch_to(void** from, void* to) {
    ucontext_t own;
    *from = &own;
    swapcontext(&own, static_cast<ucontext_t*>(to));
}

inline void* prepare(u8* stack, unsigned long size, void (*function)()) {
    static_assert(sizeof(ucontext_t) <= kContext);
    auto* context = reinterpret_cast<ucontext_t*>(stack);
    getcontext(context);
    context->uc_stack.ss_sp = stack + kContext;
    context->uc_stack.ss_size = size - kContext;
    context->uc_link = nullptr;
    makecontext(context, function, 0);
    return context;
}

#endif

}  // namespace dg_hip::host
