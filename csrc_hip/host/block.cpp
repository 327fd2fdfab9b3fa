// Blocks of fibers: how the host target runs a launch.
//
// Blocks start in the order of their numbers, as a device dispatches them, at most so many at a time as the launch
// says. A worker is a thread of the process; a block stays with the worker that started it. It starts one more when
// those that it has do not get on, so a kernel whose blocks do not wait for each other needs the memory of one.
// Within a block one fiber runs at a time, as far as the next meeting or pause, so a kernel that forgets a meeting
// computes something else in another order of threads: the seed of a launch gives one. With an odd seed a wave runs
// until all of its lanes wait, as far ahead of the others as the meetings of the block let it.
#include <sched.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <exception>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include <dg_hip/arch/host.h>

#include "library.h"
#include "stacks.h"
#include "switch.h"

namespace dg_hip::host {

__thread const Place* here;

namespace {

constexpr size_t kFence = 256;   // bytes on both sides of a block's local memory that nobody writes
constexpr u8 kUnwritten = 0xff;  // NaN in every format: nothing may be read before it is written
// A loop that waits may meet its wave or block so often between two pauses, and still counts as waiting.
constexpr u32 kMeetings = 2;
constexpr u32 kTurns = 32;  // of a block before the next one has its turn, unless a seed asks for many orders
constexpr u32 kTogether = 8;  // blocks that a worker starts at once where a seed asks for many orders
constexpr u32 kVisits = 64;   // after which a worker starts one more block, whether the others get on or not

struct Block;

struct Wave {
    void* lanes[kWave] = {};
    All all = nullptr;
    u32 arrived = 0, round = 0;
};

struct Fiber {
    Place place = {};
    Block* block = nullptr;
    Wave* wave = nullptr;
    u8* stack = nullptr;
    void* sp = nullptr;
    u32 round = 0;                    // of its wave or its block, that it waits for the end of
    u32 since_pause = kMeetings + 1;  // meetings since it last paused
    enum { ready, wave_end, block_end, paused, finished } state = ready;
};

struct Block {
    const Launch* launch;
    u32 number;
    std::vector<Fiber> fibers;
    std::vector<Wave> waves;
    std::vector<u32> order;
    std::vector<u8> memory;
    std::vector<u8*> slabs;
    u8* lds = nullptr;
    u32 arrived = 0, round = 0, left = 0;
    const char* failure = nullptr;

    ~Block() {
        for (u8* slab : slabs)
            stacks().give_back(slab);
    }
};

__thread Fiber* current;
__thread void* scheduler;

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

bool waves_apart(const Launch& launch) {
    return launch.seed % 2 == 1;
}

// The order of a block's threads; where waves run apart, those of one wave follow each other.
std::vector<u32> threads_in_order(const Launch& launch, u32 number) {
    const u32 threads = launch.kernel->threads;
    const u64 seed = launch.seed == 0 ? 0 : launch.seed + number;
    std::vector<u32> order = order_of(threads, seed);
    if (waves_apart(launch)) {
        const std::vector<u32> place = order_of(threads / kWave, seed);
        std::stable_sort(order.begin(), order.end(),
                         [&](u32 a, u32 b) { return place[a / kWave] < place[b / kWave]; });
    }
    return order;
}

std::unique_ptr<Block> start(const Launch& launch, u32 number) {
    const Kernel& kernel = *launch.kernel;
    auto made = std::make_unique<Block>();
    Block& block = *made;
    block.launch = &launch, block.number = number;
    block.fibers.resize(kernel.threads);
    block.waves.resize(kernel.threads / kWave);
    block.order = threads_in_order(launch, number);
    block.memory.assign(kernel.lds + 2 * kFence + 128, kUnwritten);
    block.lds = block.memory.data() + kFence + (128 - reinterpret_cast<size_t>(block.memory.data()) % 128);
    block.left = kernel.threads;
    block.slabs.reserve(block.waves.size());
    for (u32 i = 0; i < kernel.threads; ++i) {
        const u32 lane = i % kWave;
        if (lane == 0)
            block.slabs.push_back(stacks().take());
        Fiber& fiber = block.fibers[i];
        fiber.place = {i, number, launch.blocks};
        fiber.block = &block, fiber.wave = &block.waves[i / kWave];
        fiber.stack = block.slabs.back() + lane * kStack;
        mark(fiber.stack);
        // Lanes begin 64 bytes apart: all at the same offset of a page would share a few lines of the cache.
        fiber.sp = prepare(fiber.stack, kStack - lane * 64, enter);
    }
    return made;
}

// What a block may not have done, seen at its end.
const char* fault_of(const Block& block) {
    const u8* const first = block.lds - kFence;
    const u8* const behind = block.lds + block.launch->kernel->lds;
    for (size_t i = 0; i < kFence; ++i)
        if (first[i] != kUnwritten || behind[i] != kUnwritten)
            return "a thread wrote local memory beyond what the kernel declares";
    return nullptr;
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

// Lets a fiber run as far as it can; whether it gets on, which a wait does not.
bool resume(Fiber& fiber) {
    current = &fiber, here = &fiber.place;
    fiber.state = Fiber::ready;
    switch_to(&scheduler, fiber.sp);
    const bool ended = fiber.state == Fiber::finished;
    if (static_cast<u8*>(fiber.sp) < fiber.stack + kContext + kSpare || (ended && !marked(fiber.stack)))
        fiber.block->failure = "a thread's stack was too small";
    if (ended) {
        --fiber.block->left;
        return true;
    }
    if (fiber.state == Fiber::paused) {
        fiber.since_pause = 0;
        return false;
    }
    fiber.since_pause = least(fiber.since_pause + 1, kMeetings + 1);
    return fiber.since_pause > kMeetings;
}

// Lets every fiber run once as far as it can, or a wave at a time as long as it can; whether one of them got on.
bool turn(Block& block) {
    const bool apart = waves_apart(*block.launch);
    const size_t together = apart ? kWave : block.order.size();
    bool moved = false, ran = false;
    for (size_t first = 0; first < block.order.size(); first += together)
        for (bool again = true; again;) {
            again = false;
            for (size_t i = first; i < first + together; ++i) {
                Fiber& fiber = block.fibers[block.order[i]];
                if (!can_go_on(fiber))
                    continue;
                ran = true;
                moved |= resume(fiber);
                again |= apart && fiber.state != Fiber::paused;
                if (block.failure != nullptr)
                    return false;
            }
        }
    if (!ran && block.left > 0)
        block.failure = "threads wait for others of their wave or block that have ended or wait elsewhere";
    else if (block.left == 0)
        block.failure = fault_of(block);
    return moved;
}

// Where the threads of a block are, for the message of a failure.
std::string whereabouts(const Block& block) {
    u32 count[5] = {};
    for (const Fiber& fiber : block.fibers)
        ++count[fiber.state];
    return "block " + std::to_string(block.number) + " of " + std::to_string(block.launch->blocks) +
           "; of its threads " + std::to_string(count[Fiber::wave_end]) + " wait for their wave, " +
           std::to_string(count[Fiber::block_end]) + " for their block, " +
           std::to_string(count[Fiber::paused]) + " have paused, " + std::to_string(count[Fiber::finished]) +
           " have ended";
}

struct Run {
    const Launch& launch;
    u64 patience;  // nanoseconds
    std::atomic<u32> next{0};
    std::atomic<u64> moved_at{nanoseconds()};
    std::atomic<bool> failed{false};
    std::mutex lock{};
    std::string failure{};

    void fail(const std::string& why) {
        const std::lock_guard<std::mutex> hold(lock);
        if (!failed.exchange(true))
            failure = why;
    }
};

// What a worker does while all of its blocks wait for another worker or another process: it gives the processor away,
// and then sleeps, nine times as long as looking at its blocks takes or 2 ms, but no more than an eighth of the wait so
// far, so that no wait is much longer than it has to be.
class Idleness {
  public:
    void rest(Run& run, u64 visit_began) {
        const u64 now = nanoseconds(), looked = now - visit_began;
        if (since_ == 0)
            since_ = now;
        const u64 last = run.moved_at;
        if (now > last && now - last > run.patience)
            run.fail("all blocks have only paused for " + std::to_string(run.patience / 1000000) + " ms");
        else if (now - since_ < 100000)
            sched_yield();
        else
            std::this_thread::sleep_for(
                std::chrono::nanoseconds(least((now - since_) / 8, most(u64{2000000}, 9 * looked))));
    }
    void end() { since_ = 0; }

  private:
    u64 since_ = 0;
};

// Several turns of a block, as many as tell a thread that waits from one that has just ceased to; whether it got on.
bool visit(Run& run, Block& block) {
    const u32 turns = run.launch.seed == 0 ? kTurns : kMeetings + 1;
    bool moved = false;
    for (u32 i = 0, quiet = 0; i < turns && quiet <= kMeetings && block.left > 0; ++i) {
        const bool on = turn(block);
        if (block.failure != nullptr)
            break;
        moved |= on;
        quiet = on ? 0 : quiet + 1;
    }
    if (block.failure != nullptr)
        run.fail(std::string(block.failure) + " (" + whereabouts(block) + ")");
    return moved;
}

// One worker: gives each of its blocks its turn, and starts another one where they do not get on.
void work(Run& run, u32 most_live) {
    const u32 together = run.launch.seed == 0 ? 1 : kTogether;
    std::vector<std::unique_ptr<Block>> live;
    Idleness idleness;
    u32 visits = 0;
    bool more = true;
    while ((more || !live.empty()) && !run.failed) {
        const u64 began = nanoseconds();
        bool moved = false;
        for (const auto& block : live)
            moved |= visit(run, *block);
        live.erase(std::remove_if(live.begin(), live.end(), [](const auto& x) { return x->left == 0; }),
                   live.end());
        // Where all wait, for blocks that have not started perhaps, a few at once: each start looks at all again.
        const bool one_more = live.size() < together || ++visits % kVisits == 0;
        size_t wanted = moved ? one_more : 1 + live.size() / 4;
        for (; more && wanted > 0 && live.size() < most_live; --wanted) {
            const u32 number = run.next.fetch_add(1);
            more = number < run.launch.blocks;
            if (more)
                live.push_back(start(run.launch, number));
            moved = true;
        }
        if (moved) {
            idleness.end();
            run.moved_at = began;
        } else if (!live.empty()) {
            idleness.rest(run, began);
        }
    }
}

void work_or_fail(Run& run, u32 most_live) {
    try {
        work(run, most_live);
    } catch (const std::exception& error) {
        run.fail(std::string("there is no memory for this launch: ") + error.what());
    }
}

std::atomic<u32> wanted_workers{0};
std::atomic<u64> patience{600ull * 1000000000};

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

std::string run(const Launch& launch) {
    const u32 resident = launch.resident == 0 ? launch.blocks : least(launch.resident, launch.blocks);
    const u32 count = least(workers(), resident);
    Run state{launch, patience};
    std::vector<std::thread> threads;
    try {
        for (u32 i = 1; i < count; ++i)
            threads.emplace_back(work_or_fail, std::ref(state), resident / count + (i < resident % count));
    } catch (const std::exception& error) {
        state.fail(std::string("a worker does not start: ") + error.what());
    }
    work_or_fail(state, resident / count + (0 < resident % count));
    for (std::thread& thread : threads)
        thread.join();
    stacks().trim();
    return state.failure;
}

void set_workers(u32 count) {
    wanted_workers = count;
}

void set_patience(u32 milliseconds) {
    patience = milliseconds * 1000000ull;
}

}  // namespace dg_hip::host
