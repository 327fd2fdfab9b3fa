// The scheduler of grouped products on a CPU: its device code, and what that needs of a card.
//
// A block is the scheduler's warp, the thread that loads, one warp that stores and, where tiles have one, the carrier's,
// each lane a fiber of its own.
// Lanes run in an order that a seed gives, as far as the next operation of their warp or the next barrier, and one of
// them as late as can be; so the code meets orders of events that a card may seldom show. Where nobody can go on, the
// run ends and says so.
//
// The tests append configurations to this text, and a function `run_0`, `run_1`, .. for each. Two headers are not
// the project's in this build but empty: dg/ptx/copy.cuh, with the instructions on shared memory, and
// dg/mma/multiply.cuh.
#undef _FORTIFY_SOURCE  // its longjmp takes another fiber's stack for a frame that has returned

#include <setjmp.h>
#include <signal.h>
#include <ucontext.h>

#include <cstddef>
#include <cstring>
#include <vector>

#define __device__
#define __forceinline__ inline

#include <dg/common/types.cuh>

using dg::i32, dg::i64, dg::u32, dg::u64, dg::u8;

// Fibers -----------------------------------------------------------------------------------------------------

constexpr u32 kLanes = 32, kAll = 0xffffffff;

struct Index {
    u32 x;
};
Index threadIdx, blockIdx, gridDim;

struct Barrier {
    u32 arrivals, pending, phase;
    bool done(u32 parity) const { return phase % 2 != parity; }
};

struct Warp {
    u32 lanes, arrived, round;
    const char* operation;
    u32 values[2][kLanes];  // of this operation and of the one before, which slow lanes still read
};

struct Fiber {
    std::vector<char> stack = std::vector<char>(1 << 16);
    ucontext_t start;
    jmp_buf here;
    void (*body)();
    Warp* warp;
    u32 lane, thread;
    bool started, finished;
    u32 round;               // of the warp, that it waits for the end of
    const Barrier* barrier;  // or this one's phase of a parity
    u32 parity;

    bool ready() const {
        return !finished && round != warp->round && (barrier == nullptr || barrier->done(parity));
    }
};

Fiber fibers[3 * kLanes + 1];
Warp warps[4];
Fiber* current;
jmp_buf chooser;
const char* failure;  // why the run ended early
u64 operations, random_state;

void switch_away() {
    if (_setjmp(current->here) == 0)
        _longjmp(chooser, 1);
}

// Ends the whole run.
void fail(const char* why) {
    if (!failure)
        failure = why;
    for (;;)
        switch_away();
}

// On a card a division by zero gives some number.
void divided(int) {
    fail("a division by zero");
}

void enter() {
    current->body();
    current->finished = true;
    switch_away();
}

void resume(Fiber& fiber) {
    current = &fiber;
    threadIdx.x = fiber.thread;
    if (_setjmp(chooser) != 0)
        return;
    if (fiber.started)
        _longjmp(fiber.here, 1);
    fiber.started = true;
    setcontext(&fiber.start);
}

void start(Fiber& fiber, Warp& warp, u32 lane, u32 thread, void (*body)()) {
    fiber.body = body, fiber.warp = &warp, fiber.lane = lane, fiber.thread = thread;
    fiber.started = fiber.finished = false;
    fiber.round = kAll, fiber.barrier = nullptr;
    getcontext(&fiber.start);
    fiber.start.uc_stack.ss_sp = fiber.stack.data();
    fiber.start.uc_stack.ss_size = fiber.stack.size();
    fiber.start.uc_link = nullptr;
    makecontext(&fiber.start, enter, 0);
}

u32 random_number() {
    random_state = random_state * 6364136223846793005ull + 1442695040888963407ull;
    return random_state >> 33;
}

// Runs all of a block's fibers to their ends. One of them goes on only where no other can: what it has not read
// yet must not be overwritten.
void run_fibers() {
    constexpr u32 kCount = sizeof(fibers) / sizeof(fibers[0]);
    const u32 slow = random_number() % kCount;
    for (u32 left = kCount; left > 0;) {
        const u32 first = random_number();
        bool moved = false;
        auto go_on = [&](u32 index) {
            if (failure || !fibers[index].ready())
                return;
            resume(fibers[index]);
            moved = true, left -= fibers[index].finished;
        };
        for (u32 i = 0; i < kCount; ++i)
            if (const u32 index = (first + i) % kCount; index != slow)
                go_on(index);
        if (!moved)
            go_on(slow);
        if (!moved && !failure)
            failure = "every thread waits";
        if (failure)
            return;
    }
}

// A warp's operations ----------------------------------------------------------------------------------------

// The largest grid of the tests has about 10 million.
void count_operation() {
    if (++operations > 1u << 26)
        fail("there is no end to it");
}

// What the lanes of the warp bring, once all of them are here.
const u32* meet(const char* operation, u32 mask, u32 value) {
    Warp& warp = *current->warp;
    if (mask != kAll || warp.lanes != kLanes)
        fail("an operation of some lanes alone");
    if (warp.arrived == 0)
        warp.operation = operation;
    else if (warp.operation != operation)
        fail("lanes of a warp meet in different operations");
    count_operation();
    u32* values = warp.values[warp.round % 2];
    values[current->lane] = value;
    if (++warp.arrived == kLanes) {
        warp.arrived = 0, ++warp.round;
    } else {
        current->round = warp.round;
        switch_away();
    }
    return values;
}

constexpr const char *kShuffle = "shfl", *kShuffleUp = "shfl_up", *kVote = "vote", *kLeast = "min",
                     *kMost = "max", *kSync = "syncwarp";

u32 __shfl_sync(u32 mask, u32 value, u32 from) {
    const u32* values = meet(kShuffle, mask, value);
    if (from >= kLanes)
        fail("a shuffle from a lane that there is not");
    return values[from];
}
u32 __shfl_up_sync(u32 mask, u32 value, u32 by) {
    const u32* values = meet(kShuffleUp, mask, value);
    return values[current->lane >= by ? current->lane - by : current->lane];
}
u32 __ballot_sync(u32 mask, bool value) {
    const u32* values = meet(kVote, mask, value);
    u32 found = 0;
    for (u32 i = 0; i < kLanes; ++i)
        found |= values[i] << i;
    return found;
}
int __any_sync(u32 mask, bool value) {
    return __ballot_sync(mask, value) != 0;
}
int __all_sync(u32 mask, bool value) {
    return __ballot_sync(mask, value) == kAll;
}
u32 __reduce_min_sync(u32 mask, u32 value) {
    const u32* values = meet(kLeast, mask, value);
    u32 least = values[0];
    for (u32 i = 1; i < kLanes; ++i)
        least = values[i] < least ? values[i] : least;
    return least;
}
u32 __reduce_max_sync(u32 mask, u32 value) {
    const u32* values = meet(kMost, mask, value);
    u32 most = values[0];
    for (u32 i = 1; i < kLanes; ++i)
        most = values[i] > most ? values[i] : most;
    return most;
}
void __syncwarp() {
    meet(kSync, kAll, 0);
}
int __clz(u32 bits) {
    return bits == 0 ? 32 : __builtin_clz(bits);
}
int __ffs(u32 bits) {
    return __builtin_ffs(static_cast<int>(bits));
}

int __popc(u32 bits) {
    return __builtin_popcount(bits);
}
template <class T>
T min(T a, T b) {
    return b < a ? b : a;
}
template <class T>
T max(T a, T b) {
    return a < b ? b : a;
}

// Global memory: the labels, counts or ends and nothing else.
const i32 *layout_begin, *layout_end;

i32 __ldg(const i32* from) {
    if (from < layout_begin || from >= layout_end)
        fail("a read beyond the layout");
    return *from;
}

// Those that only code which does not run here calls.
struct float2 {
    float x, y;
};
struct float4 {
    float x, y, z, w;
};
struct uint4 {
    u32 x, y, z, w;
};
float __ldg(const float*);
float __fmul_rn(float, float);
float __uint_as_float(u32);

// Shared memory ----------------------------------------------------------------------------------------------

namespace dg::ptx {

using Shared = u32;
constexpr Shared kBase = 1024;  // where a block's shared memory begins

std::vector<u8> shared;
std::vector<Barrier> barriers;  // one for each 8 bytes of shared memory; without arrivals: there is none

inline u8* at(Shared address, u32 bytes) {
    if (address < kBase || address + bytes > kBase + shared.size() || address % bytes)
        fail("an access beyond shared memory, or a misaligned one");
    for (u32 i = address / 8; i < (address + bytes) / 8; ++i)
        if (barriers[i - kBase / 8].arrivals)
            fail("an access to a barrier's memory");
    return &shared[address - kBase];
}
inline uint4 load_shared4(Shared address) {
    uint4 v;
    std::memcpy(&v, at(address, sizeof(v)), sizeof(v));
    return v;
}
inline void store_shared4(Shared address, uint4 v) {
    std::memcpy(at(address, sizeof(v)), &v, sizeof(v));
}
inline Barrier& barrier(Shared address) {
    if (address < kBase || address % 8 || address / 8 - kBase / 8 >= barriers.size())
        fail("a barrier beyond shared memory, or a misaligned one");
    return barriers[address / 8 - kBase / 8];
}
inline void mbarrier_arrive(Shared address) {
    Barrier& on = barrier(address);
    if (on.arrivals == 0)
        fail("an arrival at no barrier");
    if (--on.pending == 0)
        on.pending = on.arrivals, ++on.phase;
}
inline void mbarrier_wait(Shared address, u32 parity) {
    const Barrier& on = barrier(address);
    if (on.arrivals == 0)
        fail("a wait at no barrier");
    count_operation();
    if (on.done(parity))
        return;
    current->barrier = &on, current->parity = parity;
    switch_away();
    current->barrier = nullptr;
}

struct alignas(64) TensorMap {
    u64 opaque[16];
};

}  // namespace dg::ptx

namespace dg::sm90 {
template <class C, class Instruction>
struct Multiplier;
template <class C>
struct Promotion;
}  // namespace dg::sm90

#include <dg/scheduler/groups.cuh>
// After it, which has the tiles.
#include <dg/epilogue/output.cuh>

// A grid -----------------------------------------------------------------------------------------------------

// A tile as the warp that stores got it. The tests have the same fields.
struct Record {
    u32 block, row_p, row_q, first_k, last_k, group, mixed;
    u32 next_p, next_q, next_k, next_group;  // the tile that was named as the next one
};
// A row of a tile.
struct RowRecord {
    i64 d, c;
    u32 wanted, zero;
    u32 whole, any;  // of the 16 rows from the last multiple of 16 on
    u32 loaded, unused;
};

std::vector<Record> records;
std::vector<RowRecord> row_records;

template <class C>
struct Block {
    using L = dg::sm90::Layout<C>;
    static constexpr u32 kRowsA = dg::sm90::Scheduler<C>::kRowsA;

    static inline const dg::sm90::Params* params;
    static inline dg::sm90::Room<C> room;
    static inline std::vector<Record> loaded;  // tiles as the thread that loads got them

    static Record record(const dg::sm90::Tile& tile, const dg::sm90::Tile& next) {
        return {blockIdx.x, tile.row_p, tile.row_q, tile.first_k, tile.last_k, tile.group,
                0,          next.row_p, next.row_q, next.last_k,  next.group};
    }

    static void schedule() { dg::sm90::Scheduler<C>(*params, room).run(); }

    static void load() {
        dg::sm90::Queue<C>{room}.template for_each<false>(
            [](dg::sm90::Tile tile, typename dg::sm90::Queue<C>::Next next) {
                loaded.push_back(record(tile, next()));
            });
    }

    static void store() {
        const dg::sm90::Output<C> out(*params);
        const u32 lane = threadIdx.x % 32;
        u64 count = first_record;
        u32 free = 1;
        auto leave = [&](const dg::sm90::Tile& tile, const dg::sm90::Tile& next) {
            if constexpr (L::kCarries) {
                dg::ptx::mbarrier_wait(room.free(0), free);
                free ^= 1;
            }
            const dg::sm90::Rows of = dg::sm90::Rows::of(tile);
            Record mine = record(tile, next);
            mine.mixed = of.mixed;
            if (records.size() == count) {
                records.push_back(mine);
                row_records.resize(row_records.size() + kRowsA);
            } else if (std::memcmp(&records[count], &mine, sizeof(mine)) != 0) {
                fail("lanes of a warp see different tiles");
            }
            const u32 first = C::kSwap ? tile.row_q : tile.row_p;
            const auto parts = dg::sm90::Loaded<C>::of(tile);
            for (u32 i = lane; i < kRowsA; i += kLanes) {
                const dg::sm90::Line line = out.line(first + i, tile, of);
                row_records[count * kRowsA + i] = {
                    line.d,
                    line.c,
                    line.wanted,
                    line.zero,
                    out.whole(first + i / 16 * 16, of),
                    out.any(first + i / 16 * 16, of),
                    !L::kPartLoads || (parts.from <= i / 64 && i / 64 < parts.to),
                    0};
            }
            ++count;
            if constexpr (L::kCarries) {
                __syncwarp();
                if (lane == 0)
                    dg::ptx::mbarrier_arrive(room.filled(0));
            }
        };
        bool any = false;
        dg::sm90::Tile before{}, after{};
        dg::sm90::Queue<C>{room}.template for_each<true, L::kBehind>(
            [&](dg::sm90::Tile tile, typename dg::sm90::Queue<C>::Next next) {
                if (!L::kBehind)
                    return leave(tile, next());
                if (any)
                    leave(before, after);
                any = true, before = tile, after = next();
            });
        if (any)
            leave(before, after);
    }
    static inline u64 first_record;

    // In the place of the carrier: it sees the tile that has just been stored, and its rows.
    static void carry() {
        if constexpr (L::kCarries) {
            u64 count = first_record;
            u32 parity = 0;
            dg::sm90::Queue<C>{room}.template for_each<true>(
                [&](dg::sm90::Tile tile, typename dg::sm90::Queue<C>::Next next) {
                    Record mine = record(tile, next());
                    dg::ptx::mbarrier_wait(room.filled(0), parity);
                    mine.mixed = dg::sm90::Rows::of(tile).mixed;
                    if (records.size() != count + 1 || std::memcmp(&records[count], &mine, sizeof(mine)) != 0)
                        fail("who carries sees another tile than who has stored");
                    ++count, parity ^= 1;
                    __syncwarp();
                    if (threadIdx.x % 32 == 0)
                        dg::ptx::mbarrier_arrive(room.free(0));
                });
        }
    }

    static void init(dg::ptx::Shared address, u32 arrivals) {
        Barrier& on = dg::ptx::barrier(address);
        if (on.arrivals)
            failure = "two barriers in one place";
        on = {arrivals, arrivals, 0};
    }

    // As make_barriers does it, but for the one warp that stores.
    static void make_barriers() {
        dg::ptx::shared.assign(L::kBytes - 1024, 0xA5);
        dg::ptx::barriers.assign(dg::ptx::shared.size() / 8, Barrier{});
        const u32 full = dg::ptx::kBase + L::kBarrierOffset;
        room = {dg::ptx::kBase, full, full + C::kStages * 8, full + C::kStages * 16, 0};
        for (u32 s = 0; s < C::kStages; ++s) {
            init(room.full + s * 8, 1), init(room.empty + s * 8, 1);
            if (L::kUnpacks)
                init(room.packed() + s * 8, 1);
        }
        init(room.parts, 1);
        for (u32 s = 0; s < dg::sm90::kSlots; ++s)
            init(room.given() + s * 8, 1), init(room.taken() + s * 8, 2 + L::kCarries);
        if (L::kCarries)
            init(room.filled(0), 1), init(room.free(0), 1);
    }

    static void run(u32 index) {
        blockIdx.x = index;
        loaded.clear();
        first_record = records.size();
        make_barriers();
        for (Warp& warp : warps)
            warp = Warp{kLanes, 0, 0, nullptr, {}};
        warps[0].lanes = 1;
        start(fibers[0], warps[0], 0, 0, load);
        for (u32 lane = 0; lane < kLanes; ++lane) {
            start(fibers[1 + lane], warps[1], lane, kLanes + lane, schedule);
            start(fibers[1 + kLanes + lane], warps[2], lane, 4 * kLanes + lane, store);
            start(fibers[1 + 2 * kLanes + lane], warps[3], lane, 2 * kLanes + lane, carry);
        }
        if (!failure)
            run_fibers();
        if (failure)
            return;
        bool same = loaded.size() == records.size() - first_record;
        for (u64 i = 0; same && i < loaded.size(); ++i) {
            loaded[i].mixed = records[first_record + i].mixed;
            same = std::memcmp(&loaded[i], &records[first_record + i], sizeof(Record)) == 0;
        }
        if (!same)
            failure = "who loads and who stores see different tiles";
    }

    // All blocks of a grid, one after the other; the layout has `values` numbers. Returns the tiles, or -1.
    static i64 run_grid(const dg::sm90::Params* all, u32 values, u32 blocks, u64 seed) {
        params = all;
        layout_begin = all->layout, layout_end = all->layout + values;
        gridDim.x = blocks, random_state = seed, operations = 0;
        failure = nullptr, records.clear(), row_records.clear();
        struct sigaction divides = {}, before;
        divides.sa_handler = divided, divides.sa_flags = SA_NODEFER;  // it is left by a jump
        sigaction(SIGFPE, &divides, &before);
        for (u32 index = 0; index < blocks && !failure; ++index)
            run(index);
        sigaction(SIGFPE, &before, nullptr);
        return failure ? -1 : static_cast<i64>(records.size());
    }
};

extern "C" const char* why() {
    return failure;
}
extern "C" const Record* tiles() {
    return records.data();
}
extern "C" const RowRecord* rows() {
    return row_records.data();
}
