// One thread of the processor, several stacks.
#pragma once

#include <dg_hip/types.h>

#if !defined(__x86_64__)
#include <ucontext.h>
#endif

namespace dg_hip::host {

#if defined(__x86_64__)

// Saves what a called function must keep and the stack pointer, and goes on where `to` was left.
extern "C" void dg_hip_switch(void** from, void* to);

inline void switch_to(void** from, void* to) {
    dg_hip_switch(from, to);
}

// A stack on which the first switch enters `function`, which must not return.
inline void* prepare(u8* stack, unsigned long size, void (*function)()) {
    void** top = reinterpret_cast<void**>(stack + size);
    *--top = nullptr;  // where a return address would be: the stack is aligned as in a call
    *--top = reinterpret_cast<void*>(function);  // what the switch returns to
    return top - 6;                              // six registers, whatever they hold
}

#else

// The stack pointer is a context that lives at the far end of its stack.
inline void switch_to(void** from, void* to) {
    ucontext_t own;
    *from = &own;
    swapcontext(&own, static_cast<ucontext_t*>(to));
}

inline void* prepare(u8* stack, unsigned long size, void (*function)()) {
    auto* context = reinterpret_cast<ucontext_t*>(stack + 64);
    getcontext(context);
    context->uc_stack.ss_sp = stack + 4096;
    context->uc_stack.ss_size = size - 4096;
    context->uc_link = nullptr;
    makecontext(context, function, 0);
    return context;
}

#endif

}  // namespace dg_hip::host
