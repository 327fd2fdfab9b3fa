// Kernels for tests, one for each thing that dg_hip/arch.h lists, and some that do what a kernel must not do. They are
// built into a library of their own and never shipped.
#include <dg_hip/convert.h>
#include <dg_hip/kernel.h>

using namespace dg_hip;

namespace {

// Thread of the whole launch.
DG_DEVICE i64 own_number(u32 threads) {
    return static_cast<i64>(block()) * threads + thread();
}

// Where an element of a flat array lies.
template <class T>
DG_DEVICE u8* element(ptr base, i64 index) {
    return base + index * static_cast<i64>(sizeof(T));
}

}  // namespace

// Places and waves ---------------------------------------------------------------------------------------------

#define OUT_FIELDS(X) X(ptr, out)
DG_ARGS(OutArgs, OUT_FIELDS)

// out[.., 5]: thread, block, blocks, lane, wave.
DG_KERNEL(check_place, OutArgs, 192, 0) {
    const i64 own = own_number(192) * 5;
    const u32 told[5] = {thread(), block(), blocks(), lane(), wave()};
    for (int i = 0; i < 5; ++i)
        store<u32>(element<u32>(args.out, own + i), told[i]);
}

#define SHUFFLE_FIELDS(X) X(ptr, values) X(ptr, from) X(ptr, out)
DG_ARGS(ShuffleArgs, SHUFFLE_FIELDS)

DG_KERNEL(check_shuffle, ShuffleArgs, 128, 0) {
    const i64 own = own_number(128);
    const u32 value = load<u32>(element<u32>(args.values, own)),
              from = load<u32>(element<u32>(args.from, own));
    store<u32>(element<u32>(args.out, own), shuffle(value, from));
}

DG_KERNEL(check_shuffle_f32, ShuffleArgs, 128, 0) {
    const i64 own = own_number(128);
    const f32 value = load<f32>(element<f32>(args.values, own));
    store<f32>(element<f32>(args.out, own), shuffle_f32(value, load<u32>(element<u32>(args.from, own))));
}

#define IN_OUT_FIELDS(X) X(ptr, x) X(ptr, out)
DG_ARGS(InOutArgs, IN_OUT_FIELDS)

DG_KERNEL(check_ballot, InOutArgs, 128, 0) {
    const i64 own = own_number(128);
    store<u64>(element<u64>(args.out, own), ballot(load<u32>(element<u32>(args.x, own)) != 0));
}

// Each block turns its 256 values round, through local memory.
DG_KERNEL(check_sync, InOutArgs, 256, 256 * 4) {
    const i64 own = own_number(256);
    store<u32>(lds + thread() * 4, load<u32>(element<u32>(args.x, own)));
    sync();
    store<u32>(element<u32>(args.out, own), load<u32>(lds + (255 - thread()) * 4));
}

// Each wave does, twice, without a sync of the block.
DG_KERNEL(check_sync_wave, InOutArgs, 256, 256 * 4) {
    const i64 own = own_number(256);
    u8* const mine = lds + wave() * kWave * 4;
    u32 value = load<u32>(element<u32>(args.x, own));
    for (u32 round = 0; round < 3; ++round) {
        store<u32>(mine + lane() * 4, value + round);
        sync_wave();
        value = load<u32>(mine + (kWave - 1 - lane()) * 4);
        sync_wave();
    }
    store<u32>(element<u32>(args.out, own), value);
}

// Matrix instructions ------------------------------------------------------------------------------------------

#define MULTIPLY_FIELDS(X) X(ptr, p) X(ptr, q) X(ptr, acc)
DG_ARGS(MultiplyArgs, MULTIPLY_FIELDS)

namespace {

// What lanes hold, as it is: p and q [.., 64] of 8 bytes, acc [.., 64, 4].
template <class Element>
DG_DEVICE void multiply_lanes(const MultiplyArgs& args) {
    const i64 own = own_number(kWave);
    F32x4 acc = load<F32x4>(element<F32x4>(args.acc, own));
    multiply<Element>(acc, load<u64>(element<u64>(args.p, own)), load<u64>(element<u64>(args.q, own)));
    store(element<F32x4>(args.acc, own), acc);
}

// acc [.., 16, 16] += p [.., 16, 32 bytes] x q^T, by the maps of dg_hip/layout.h.
template <class Element>
DG_DEVICE void multiply_rows(const MultiplyArgs& args) {
    const int own = static_cast<int>(lane()), row = operand_row(own), k = operand_k(own);
    const i64 first = static_cast<i64>(block()) * kTile;
    F32x4 acc;
    for (int slot = 0; slot < 4; ++slot) {
        const Coord at = result(kResultMap, own, slot);
        acc.v[slot] = load<f32>(element<f32>(args.acc, (first + at.row) * kTile + at.col));
    }
    multiply<Element>(acc, load<u64>(args.p + (first + row) * kMmaK + k),
                      load<u64>(args.q + (first + q_row(row)) * kMmaK + k));
    for (int slot = 0; slot < 4; ++slot) {
        const Coord at = result(kResultMap, own, slot);
        store<f32>(element<f32>(args.acc, (first + at.row) * kTile + at.col), acc.v[slot]);
    }
}

}  // namespace

DG_KERNEL(check_multiply_fp8, MultiplyArgs, 64, 0) {
    multiply_lanes<Fp8>(args);
}
DG_KERNEL(check_multiply_bf16, MultiplyArgs, 64, 0) {
    multiply_lanes<Bf16>(args);
}
DG_KERNEL(check_rows_fp8, MultiplyArgs, 64, 0) {
    multiply_rows<Fp8>(args);
}
DG_KERNEL(check_rows_bf16, MultiplyArgs, 64, 0) {
    multiply_rows<Bf16>(args);
}

// Numbers ------------------------------------------------------------------------------------------------------

#define COUNT_FIELDS(X) X(ptr, x) X(ptr, out) X(i64, count)
DG_ARGS(CountArgs, COUNT_FIELDS)

#define DG_CHECK_EACH(name, In, Out, expression)                        \
    DG_KERNEL(name, CountArgs, 64, 0) {                                 \
        const i64 step = static_cast<i64>(blocks()) * 64;               \
        for (i64 own = own_number(64); own < args.count; own += step) { \
            const In x = load<In>(element<In>(args.x, own));            \
            store<Out>(element<Out>(args.out, own), expression);        \
        }                                                               \
    }

DG_CHECK_EACH(check_fp8x4, F32x4, u32, fp8x4(x.v[0], x.v[1], x.v[2], x.v[3]))
DG_CHECK_EACH(check_exponential, f32, f32, exponential(x))
DG_CHECK_EACH(check_from_fp8, u8, f32, from_fp8(x))
DG_CHECK_EACH(check_from_bf16, u16, f32, from_bf16(x))
DG_CHECK_EACH(check_from_f16, u16, f32, from_f16(x))
DG_CHECK_EACH(check_to_bf16, f32, u16, to_bf16(x))
DG_CHECK_EACH(check_from_ue8m0, u8, f32, from_ue8m0(x))
DG_CHECK_EACH(check_fp8_of_fp4, u32, u32, fp8_of_fp4(x))

#define PAIR_FIELDS(X) X(ptr, low) X(ptr, high) X(ptr, out)
DG_ARGS(PairArgs, PAIR_FIELDS)

DG_KERNEL(check_bf16_pair, PairArgs, 64, 0) {
    const i64 own = own_number(64);
    store<u32>(element<u32>(args.out, own),
               bf16_pair(load<f32>(element<f32>(args.low, own)), load<f32>(element<f32>(args.high, own))));
}

// Memory -------------------------------------------------------------------------------------------------------

#define COPY_FIELDS(X) X(ptr, x) X(ptr, out) X(i32, peer)
DG_ARGS(CopyArgs, COPY_FIELDS)

#define DG_CHECK_COPY(name, T)                                     \
    DG_KERNEL(name, CopyArgs, 64, 0) {                             \
        const u8* const from = element<T>(args.x, own_number(64)); \
        u8* const to = element<T>(args.out, own_number(64));       \
        if (args.peer)                                             \
            store_peer<T>(to, load_peer<T>(from));                 \
        else                                                       \
            store<T>(to, load<T>(from));                           \
    }

DG_CHECK_COPY(check_copy_1, u8)
DG_CHECK_COPY(check_copy_2, u16)
DG_CHECK_COPY(check_copy_4, u32)
DG_CHECK_COPY(check_copy_8, u64)
DG_CHECK_COPY(check_copy_16, U32x4)
DG_CHECK_COPY(check_copy_f32, f32)
DG_CHECK_COPY(check_copy_f32x4, F32x4)

// Four float32 are stored, sixteen bytes loaded, of what is the same memory and another type.
DG_KERNEL(check_retyped, InOutArgs, 64, 64 * 16) {
    u8* const own = lds + thread() * 16;
    for (int i = 0; i < 4; ++i)
        store<f32>(own + i * 4, load<f32>(element<f32>(args.x, own_number(64) * 4 + i)));
    store(element<U32x4>(args.out, own_number(64)), load<U32x4>(own));
}

// Local memory as a block finds it.
DG_KERNEL(check_lds, OutArgs, 64, 2000) {
    for (u32 i = thread(); i < 2000; i += 64)
        store<u8>(args.out + static_cast<i64>(block()) * 2000 + i, load<u8>(lds + i));
}

DG_KERNEL(check_ticks, OutArgs, 64, 0) {
    const u64 start = ticks();
    u64 now = start;
    while (now - start < kTicksPerSecond / 100) {
        pause();
        now = ticks();
    }
    store<u64>(element<u64>(args.out, own_number(64)), now - start);
}

// Between blocks -----------------------------------------------------------------------------------------------

#define COUNTER_FIELDS(X) X(ptr, counter) X(ptr, out) X(i32, rounds)
DG_ARGS(CounterArgs, COUNTER_FIELDS)

// Every thread adds its lane + 1 so often; out is the last sum that it found.
#define DG_CHECK_ADD(name, T, kScope)                                                          \
    DG_KERNEL(name, CounterArgs, 64, 0) {                                                      \
        T old = 0;                                                                             \
        for (i32 i = 0; i < args.rounds; ++i)                                                  \
            old = add<kScope>(reinterpret_cast<T*>(args.counter), static_cast<T>(lane() + 1)); \
        store<T>(element<T>(args.out, own_number(64)), old);                                   \
    }

DG_CHECK_ADD(check_add_u32, u32, Scope::agent)
DG_CHECK_ADD(check_add_u64, u64, Scope::system)

// A lock: the first thread of a block holds it while it counts up without an atomic.
template <Scope kScope, class T>
DG_DEVICE void count_under_lock(const CounterArgs& args) {
    T* const lock = reinterpret_cast<T*>(args.counter);
    for (i32 i = 0; thread() == 0 && i < args.rounds; ++i) {
        while (swap_if<kScope>(lock, static_cast<T>(0), static_cast<T>(block() + 1)) != 0)
            pause();
        store<u32>(args.out, load<u32>(args.out) + 1);
        store_release<kScope>(lock, static_cast<T>(0));
    }
}
DG_KERNEL(check_lock_u32, CounterArgs, 64, 0) {
    count_under_lock<Scope::agent, u32>(args);
}
DG_KERNEL(check_lock_u64, CounterArgs, 64, 0) {
    count_under_lock<Scope::system, u64>(args);
}

// A block that goes on for long without waiting for another one. out [blocks]: how often its threads have met.
DG_KERNEL(check_long, CounterArgs, 256, 4) {
    u32 met = 0;
    for (i32 i = 0; i < args.rounds; ++i) {
        sync();
        ++met;
    }
    if (thread() == 0)
        store<u32>(element<u32>(args.out, block()), met);
}

// The number of blocks that have started before.
DG_KERNEL(check_order, CounterArgs, 64, 0) {
    if (thread() == 0)
        store<u32>(element<u32>(args.out, block()),
                   add<Scope::agent>(reinterpret_cast<u32*>(args.counter), 1u));
}

#define RING_FIELDS(X) X(ptr, flags) X(ptr, data) X(ptr, late) X(i64, deadline) X(i32, rounds) X(i32, step)
DG_ARGS(RingArgs, RING_FIELDS)

namespace {

// Each block waits for its neighbour's flag and takes the neighbour's 64 numbers, one more each: data [blocks, 64]. The
// block without a neighbour starts. `step` 1: block b waits for b - 1; -1: for b + 1, which starts later. A wait that is
// longer than the deadline is counted in `late`.
template <Scope kScope>
DG_DEVICE void pass_round(const RingArgs& args) {
    const i64 own = block(), other = own - args.step;
    const bool first = other < 0 || other >= blocks();
    const i64 from = first ? static_cast<i64>(args.step > 0 ? blocks() - 1 : 0) : other;
    u32* const flags = reinterpret_cast<u32*>(args.flags);
    for (i32 round = 0; round < args.rounds; ++round) {
        const u32 wanted = static_cast<u32>(first ? round : round + 1);
        if (thread() == 0) {
            const u64 start = ticks();
            while (load_acquire<kScope>(flags + from) < wanted) {
                if (ticks() - start > static_cast<u64>(args.deadline)) {
                    add<kScope>(reinterpret_cast<u32*>(args.late), 1u);
                    break;
                }
                pause();
            }
        }
        sync();
        const u32 value = load_peer<u32>(element<u32>(args.data, from * kWave + lane()));
        store_peer<u32>(element<u32>(args.data, own * kWave + lane()), value + 1);
        publish();
        sync();
        if (thread() == 0)
            store_release<kScope>(flags + own, static_cast<u32>(round + 1));
    }
}

}  // namespace

DG_KERNEL(check_ring, RingArgs, 64, 0) {
    pass_round<Scope::system>(args);
}
DG_KERNEL(check_ring_agent, RingArgs, 64, 0) {
    pass_round<Scope::agent>(args);
}

#define WAIT_FIELDS(X) X(ptr, flag) X(ptr, out)
DG_ARGS(WaitArgs, WAIT_FIELDS)

// Waits for a number that somebody else stores, whole waves at a time.
DG_KERNEL(check_wait, WaitArgs, 128, 0) {
    u32 value = 0;
    while (ballot((value = load_acquire<Scope::system>(reinterpret_cast<u32*>(args.flag))) != 0) == 0)
        pause();
    store<u32>(element<u32>(args.out, own_number(128)), shuffle(value, 0));
}

// What a kernel must not do ------------------------------------------------------------------------------------

// A sync is missing between the store and the load: a thread may come before the one whose value it takes.
DG_KERNEL(wrong_race, InOutArgs, 128, 128 * 4) {
    const i64 own = own_number(128);
    store<u32>(lds + thread() * 4, load<u32>(element<u32>(args.x, own)));
    store<u32>(element<u32>(args.out, own), load<u32>(lds + (thread() == 0 ? 0 : thread() - 1) * 4));
}

// The same between the load and the store of the next round.
DG_KERNEL(wrong_reuse, InOutArgs, 128, 128 * 4) {
    const i64 own = own_number(128);
    u32 value = load<u32>(element<u32>(args.x, own));
    for (int round = 0; round < 2; ++round) {
        store<u32>(lds + thread() * 4, value);
        sync();
        value = load<u32>(lds + (thread() == 0 ? 0 : thread() - 1) * 4) + 1;
    }
    store<u32>(element<u32>(args.out, own), value);
}

#define WRONG_FIELDS(X) X(i32, block) X(i32, kind)
DG_ARGS(WrongArgs, WRONG_FIELDS)

// One block goes wrong, all others wait for each other first.
DG_KERNEL(wrong_meetings, WrongArgs, 128, 256) {
    for (int i = 0; i < 4; ++i)
        sync();
    if (block() != static_cast<u32>(args.block))
        return;
    if (args.kind == 0 && thread() == 77)  // misses a sync of the block
        return;
    if (args.kind == 1 && lane() == 5)  // another instruction than the rest of the wave
        ballot(true);
    else if (args.kind == 1)
        shuffle(0, 0);
    if (args.kind == 2 && wave() == 1 && lane() > 0)  // does not take part in one
        ballot(true);
    if (args.kind == 3 && thread() == 0)  // local memory that is not this kernel's
        store<u32>(lds + 256, 7u);
    sync();
}

// One block goes wrong, all others wait for it.
DG_KERNEL(wrong_and_awaited, WaitArgs, 128, 0) {
    if (block() == blocks() / 2) {
        if (thread() == 3)
            return;
        sync();
        store_release<Scope::agent>(reinterpret_cast<u32*>(args.flag), 1u);
    }
    while (load_acquire<Scope::agent>(reinterpret_cast<u32*>(args.flag)) == 0)
        pause();
}
