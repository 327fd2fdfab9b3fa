// Blocks of fibers: how the host target runs a launch.
//
// Blocks start in the order of their numbers, as a device dispatches them, at most so many at a time as the launch
// says. A worker is a thread of the process; a block stays with the worker that started it. Within a block one fiber
// runs at a time, as far as the next meeting or pause, so a kernel that forgets a meeting computes something else
// in another order of threads: the seed of a launch gives one.
#include <sched.h>
#include <sys/mman.h>

#include <atomic>
#include <chrono>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include <dg_hip/arch/host.h>

#include "library.h"
#include "switch.h"

namespace dg_hip::host {

thread_local const Place* here;

namespace {

constexpr size_t kStack = 1 << 16;  // tiles keep 64 accumulators a thread, and frames are not small
constexpr u64 kCanary = 0x5afe57ac5afe57ac;

struct Block;

struct Wave {
    void* lanes[kWave] = {};
    All all = nullptr;
    u32 arrived = 0, round = 0;
};

struct Fiber {
    Place place;
    Block* block;
    Wave* wave;
    u8* stack;
    void* sp;
    u32 round = 0;  // of its wave or its block, that it waits for the end of
    enum { ready, wave_end, block_end, paused, finished } state = ready;
};

struct Block {
    const Launch* launch;
    std::vector<Fiber> fibers;
    std::vector<Wave> waves;
    std::vector<u32> order;
    std::vector<u8> memory;
    u8* lds = nullptr;
    u32 arrived = 0, round = 0, left = 0;
    const char* failure = nullptr;
};

thread_local Fiber* current;
thread_local void* scheduler;

// Stacks are kept for later blocks; the system takes pages when they are first touched.
class Stacks {
  public:
    u8* take() {
        const std::lock_guard<std::mutex> hold(lock_);
        if (free_.empty()) {
            void* made = mmap(nullptr, kStack, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
            return made == MAP_FAILED ? nullptr : static_cast<u8*>(made);
        }
        u8* stack = free_.back();
        free_.pop_back();
        return stack;
    }
    void give_back(u8* stack) {
        const std::lock_guard<std::mutex> hold(lock_);
        free_.push_back(stack);
    }

  private:
    std::mutex lock_;
    std::vector<u8*> free_;
};

Stacks& stacks() {
    static Stacks* const all = new Stacks;  // outlives threads that end after static objects do
    return *all;
}

void leave(Fiber& fiber) {
    switch_to(&fiber.sp, scheduler);
}

void enter() {
    Fiber& fiber = *current;
    const Launch& launch = *fiber.block->launch;
    launch.kernel->run(launch.args, fiber.block->lds);
    fiber.state = Fiber::finished;
    leave(fiber);
}

// A random order of numbers below n; 0 leaves them as they are.
std::vector<u32> order_of(u32 n, u64 seed) {
    std::vector<u32> order(n);
    for (u32 i = 0; i < n; ++i)
        order[i] = i;
    for (u32 i = n; seed != 0 && i > 1; --i) {
        seed = seed * 6364136223846793005ull + 1442695040888963407ull;
        std::swap(order[i - 1], order[(seed >> 33) % i]);
    }
    return order;
}

bool start(Block& block, const Launch& launch, u32 number) {
    const Kernel& kernel = *launch.kernel;
    block.launch = &launch;
    block.fibers.resize(kernel.threads);
    block.waves.assign(kernel.threads / kWave, Wave());
    block.order = order_of(kernel.threads, launch.seed == 0 ? 0 : launch.seed + number);
    block.memory.assign(kernel.lds + 128,
                        0xff);  // NaN in every format: nothing may be read before it is written
    block.lds = block.memory.data() + (128 - reinterpret_cast<size_t>(block.memory.data()) % 128);
    block.left = kernel.threads;
    for (u32 i = 0; i < kernel.threads; ++i) {
        Fiber& fiber = block.fibers[i];
        fiber = Fiber();
        fiber.place = {i, number, launch.blocks};
        fiber.block = &block, fiber.wave = &block.waves[i / kWave];
        fiber.stack = stacks().take();
        if (fiber.stack == nullptr)
            return false;
        *reinterpret_cast<u64*>(fiber.stack) = kCanary;
        fiber.sp = prepare(fiber.stack, kStack, enter);
    }
    return true;
}

void finish(Block& block) {
    for (Fiber& fiber : block.fibers)
        if (fiber.stack != nullptr)
            stacks().give_back(fiber.stack);
}

bool can_go_on(const Fiber& fiber) {
    switch (fiber.state) {
        case Fiber::wave_end:
            return fiber.wave->round != fiber.round;
        case Fiber::block_end:
            return fiber.block->round != fiber.round;
        case Fiber::finished:
            return false;
        default:
            return true;
    }
}

void resume(Fiber& fiber) {
    current = &fiber, here = &fiber.place;
    fiber.state = Fiber::ready;
    switch_to(&scheduler, fiber.sp);
    if (fiber.state == Fiber::finished)
        --fiber.block->left;
    if (*reinterpret_cast<u64*>(fiber.stack) != kCanary)
        fiber.block->failure = "a thread's stack was too small";
}

// Lets every fiber run once as far as it can; whether one of them did more than to pause.
bool turn(Block& block) {
    bool moved = false, waits = false;
    for (const u32 index : block.order) {
        Fiber& fiber = block.fibers[index];
        if (!can_go_on(fiber) || block.failure != nullptr)
            continue;
        resume(fiber);
        moved |= fiber.state != Fiber::paused;
        waits |= fiber.state == Fiber::paused;
    }
    if (!moved && !waits && block.left > 0 && block.failure == nullptr)
        block.failure = "threads wait for others of their wave or block that have ended or wait elsewhere";
    return moved;
}

struct Run {
    const Launch& launch;
    std::atomic<u32> next{0};
    std::atomic<const char*> failure{nullptr};
};

// One worker: starts blocks as long as it may have more of them, and gives each its turn.
void work(Run& run, u32 most) {
    std::vector<std::unique_ptr<Block>> live;
    u32 idle = 0;
    bool more = true;
    while ((more || !live.empty()) && run.failure == nullptr) {
        bool moved = false;
        if (more && live.size() < most) {
            const u32 number = run.next.fetch_add(1);
            more = number < run.launch.blocks;
            if (more) {
                live.push_back(std::make_unique<Block>());
                if (!start(*live.back(), run.launch, number))
                    run.failure = "no memory for the stacks of a block's threads";
                moved = true;
            }
        }
        for (size_t i = 0; i < live.size() && run.failure == nullptr; ++i) {
            moved |= turn(*live[i]);
            if (live[i]->failure != nullptr)
                run.failure = live[i]->failure;
            if (live[i]->left == 0) {
                finish(*live[i]);
                live.erase(live.begin() + static_cast<std::ptrdiff_t>(i--));
            }
        }
        // Everybody waits for another worker or another process: first the processor is given away, then for longer.
        idle = moved ? 0 : idle + 1;
        if (idle > 200)
            std::this_thread::sleep_for(std::chrono::microseconds(200));
        else if (idle > 0)
            sched_yield();
    }
    for (auto& block : live)
        finish(*block);
}

std::atomic<u32> wanted_workers{0};

u32 workers() {
    const u32 wanted = wanted_workers;
    return wanted > 0 ? wanted : most(1u, std::thread::hardware_concurrency());
}

}  // namespace

void meet(void* own, All all) {
    Fiber& fiber = *current;
    Wave& wave = *fiber.wave;
    if (wave.arrived == 0)
        wave.all = all;
    else if (wave.all != all)
        fiber.block->failure =
            "lanes of one wave are at different instructions that all of them take part in";
    wave.lanes[fiber.place.thread % kWave] = own;
    if (++wave.arrived == kWave && fiber.block->failure == nullptr) {
        all(wave.lanes);
        wave.arrived = 0, ++wave.round;
        return;
    }
    fiber.round = wave.round, fiber.state = Fiber::wave_end;
    leave(fiber);
}

void meet_block() {
    Fiber& fiber = *current;
    Block& block = *fiber.block;
    if (++block.arrived == block.fibers.size()) {
        block.arrived = 0, ++block.round;
        return;
    }
    fiber.round = block.round, fiber.state = Fiber::block_end;
    leave(fiber);
}

void give_way() {
    current->state = Fiber::paused;
    leave(*current);
}

u64 nanoseconds() {
    return static_cast<u64>(std::chrono::steady_clock::now().time_since_epoch().count());
}

const char* run(const Launch& launch) {
    const u32 resident = launch.resident == 0 ? launch.blocks : least(launch.resident, launch.blocks);
    const u32 count = least(workers(), most(1u, resident));
    Run state{launch};
    std::vector<std::thread> threads;
    for (u32 i = 1; i < count; ++i)
        threads.emplace_back(work, std::ref(state), resident / count + (i < resident % count));
    work(state, resident / count + (0 < resident % count));
    for (std::thread& thread : threads)
        thread.join();
    return state.failure;
}

void set_workers(u32 count) {
    wanted_workers = count;
}

}  // namespace dg_hip::host
