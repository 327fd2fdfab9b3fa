// The stacks of a wave's fibers.
#pragma once

#include <pthread.h>
#include <sys/mman.h>

#include <mutex>
#include <new>
#include <vector>

#include <dg_hip/layout.h>
#include <dg_hip/types.h>

#include "switch.h"

namespace dg_hip::host {

constexpr size_t kStack =
    (1 << 16) + kContext;                 // tiles keep 64 accumulators a thread, and frames are not small
constexpr size_t kSlab = kWave * kStack;  // of one wave
constexpr size_t kSpare = 4096;           // bytes at the far end of a stack that no thread may come to
constexpr size_t kKept = 256;             // slabs: of pages that were touched, about 12 KB a stack

// A word at the far end tells that a thread came there between two looks at its stack pointer.
constexpr u64 kCanary = 0x5afe57ac5afe57ac;

inline void mark(u8* stack) {
    *reinterpret_cast<u64*>(stack + kContext) = kCanary;
}
inline bool marked(const u8* stack) {
    return *reinterpret_cast<const u64*>(stack + kContext) == kCanary;
}

// Slabs are kept for later blocks; the system takes pages when they are first touched.
class Stacks {
  public:
    // Throws std::bad_alloc.
    u8* take() {
        {
            const std::lock_guard<std::mutex> hold(lock_);
            if (!free_.empty()) {
                u8* const slab = free_.back();
                free_.pop_back();
                return slab;
            }
        }
        void* made =
            mmap(nullptr, kSlab, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
        if (made == MAP_FAILED)
            throw std::bad_alloc();
        madvise(made, kSlab, MADV_NOHUGEPAGE);  // else the first touch of a stack takes 2 MB
        return static_cast<u8*>(made);
    }
    void give_back(u8* slab) {
        const std::lock_guard<std::mutex> hold(lock_);
        free_.push_back(slab);
    }
    // Gives the system back what a launch with many resident blocks took.
    void trim() {
        const std::lock_guard<std::mutex> hold(lock_);
        while (free_.size() > kKept) {
            munmap(free_.back(), kSlab);
            free_.pop_back();
        }
    }

    // Around a fork: its child has this thread alone, so no other one may hold the lock then.
    void hold() { lock_.lock(); }
    void let_go() { lock_.unlock(); }

  private:
    std::mutex lock_;
    std::vector<u8*> free_;
};

inline Stacks& stacks() {
    static Stacks* const all = [] {
        const auto let_go = [] { stacks().let_go(); };
        pthread_atfork([] { stacks().hold(); }, let_go, let_go);
        return new Stacks;  // outlives threads that end after static objects do
    }();
    return *all;
}

}  // namespace dg_hip::host
