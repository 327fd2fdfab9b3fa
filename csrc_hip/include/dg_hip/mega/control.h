// How ranks and blocks wait for each other: the protocol of dg_core/peers/direct.py, word for word.
//
// A rank publishes its words, stores the generation into its word at every rank (`arrive` at the start of a call, `done`
// when its combine rows are stored), and polls its own memory. Who waits also watches the abort word and a limit of
// time; whoever gives up tells all ranks why in one word of 8 bytes, leaves the same in memory of the host, sets the
// word `stop` of this rank so that the call's later kernels do nothing, and ends as any kernel does.
#pragma once

#include <dg_hip/mega/args.h>
#include <dg_hip/tile.h>

namespace dg_hip::mega {

// Words of `local`, in the order of LOCAL_WORDS in dg_core/symm.py. All but the first are a call's own.
enum Local { kGeneration, kStop, kBlocksArrived, kBlocksSense, kL1Items, kL2Items, kFinished };
// Indices of ENDED_BY in dg_core/peers/waiting.py, and of PHASES in dg_core/symm.py.
enum Cause { kTimeout = 1, kFailed = 3, kUniform = 4 };
enum Phase { kDispatch = 6, kCombine = 10, kBarrier = 11 };
// Columns of a row of `published`.
enum Published { kPublishedGeneration, kTokens, kPath, kDispatchTokens, kOp, kGraph, kPublishedWords };

// Words that a block's threads tell each other lie where a product's slabs do: never both at once, and 16 bytes more
// would leave room for one block of 64 KB in place of two.
constexpr int kWordAt = 0;
constexpr int kMegaLds = Large::kLds, kFewLds = 16;

DG_DEVICE u32* local_word(const Args& args, Local which) {
    return reinterpret_cast<u32*>(args.local) + which;
}

// What thread 0 has, in every thread of the block.
DG_DEVICE u32 from_first(u32 value, u8* lds) {
    if (thread() == 0)
        store<u32>(lds + kWordAt, value);
    sync();
    const u32 told = load<u32>(lds + kWordAt);
    sync();
    return told;
}

// Whether this call has ended early on this rank: then its kernels leave everything as it is.
DG_DEVICE bool stopped(const Args& args, u8* lds) {
    return from_first(thread() == 0 ? load_acquire<Scope::agent>(local_word(args, kStop)) : 0, lds) != 0;
}

// Ranks --------------------------------------------------------------------------------------------------------------

DG_DEVICE u64* abort_word(const Args& args, i32 rank) {
    return reinterpret_cast<u64*>(control_of(args, rank) + args.abort_at);
}

// `rank`'s word of an array with one word for each rank, in the memory of `at`.
DG_DEVICE u32* word_of(const Args& args, i64 array_at, i32 at, i32 rank) {
    return reinterpret_cast<u32*>(control_of(args, at) + array_at) + rank;
}

// Generations count on past the end of 32 bits, so what counts is the sign of a difference.
DG_DEVICE bool is_missing(const Args& args, i64 array_at, i32 rank, u32 generation) {
    const u32 word = load_acquire<Scope::system>(word_of(args, array_at, args.rank, rank));
    return static_cast<i32>(word - generation) < 0;
}

DG_DEVICE i32 first_missing(const Args& args, i64 array_at, u32 generation) {
    i32 rank = 0;
    while (rank < args.ranks && !is_missing(args, array_at, rank, generation))
        ++rank;
    return rank;
}

DG_DEVICE u64 packed(Cause cause, i32 rank, i32 peer, Phase phase, u32 generation) {
    const u32 low = static_cast<u32>(cause) | static_cast<u32>(rank) << 3 | static_cast<u32>(peer) << 10 |
                    static_cast<u32>(phase) << 17;
    return static_cast<u64>(generation) << 32 | low;
}

// By thread 0: end the call on this rank, for the reason that its abort word tells.
DG_DEVICE void stop_here(const Args& args) {
    store_release<Scope::system>(reinterpret_cast<u64*>(args.record),
                                 load_acquire<Scope::system>(abort_word(args, args.rank)));
    store_release<Scope::agent>(local_word(args, kStop), 1u);
}
DG_DEVICE bool is_aborted(const Args& args) {
    return load_acquire<Scope::system>(abort_word(args, args.rank)) != 0;
}

// By thread 0: end the call on all ranks. A rank that is waited for is told that it is the one.
DG_DEVICE void tell_all(const Args& args, Cause cause, i32 peer, Phase phase, u32 generation, i64 array_at) {
    for (i32 rank = 0; rank < args.ranks; ++rank) {
        const bool itself = cause == kTimeout && is_missing(args, array_at, rank, generation);
        const u64 word = packed(cause, args.rank, itself ? rank : peer, phase, generation);
        swap_if<Scope::system>(abort_word(args, rank), static_cast<u64>(0), word);
    }
    stop_here(args);
}

// By thread 0: wait until every rank's word has come to this generation.
DG_DEVICE bool wait_for_ranks(const Args& args, i64 array_at, Phase phase, u32 generation) {
    const u64 start = ticks();
    const u64 limit = static_cast<u64>(static_cast<double>(args.seconds) * kTicksPerSecond);
    while (true) {
        const i32 missing = first_missing(args, array_at, generation);
        if (missing == args.ranks)
            return true;
        if (is_aborted(args)) {
            stop_here(args);
            return false;
        }
        if (ticks() - start >= limit) {
            tell_all(args, kTimeout, missing, phase, generation, array_at);
            return false;
        }
        pause();
    }
}

// By thread 0: say to every rank that this one has come to `generation`. What it and, before a meeting, other threads
// have published is seen first.
DG_DEVICE void signal_ranks(const Args& args, i64 array_at, u32 generation) {
    publish();
    for (i32 rank = 0; rank < args.ranks; ++rank)
        store_release<Scope::system>(word_of(args, array_at, rank, args.rank), generation);
}

// The tokens that this rank brings: in a graph the scalar, as it stands when the launch runs.
DG_DEVICE i32 own_tokens(const Args& args) {
    if (args.graph == 0)
        return args.num_tokens;
    return most(0, least(load<i32>(args.scalar), args.num_tokens));
}

DG_DEVICE const u8* published_by(const Args& args, i32 rank, u32 generation) {
    return control_of(args, rank) + args.published_at + (generation & 1) * args.published_row;
}
DG_DEVICE u32 published_word(const Args& args, i32 rank, u32 generation, Published which) {
    return load_peer<u32>(published_by(args, rank, generation) + which * 4);
}

// The first rank whose path, operation or graph flag is not that of rank 0; `ranks` where all agree.
DG_DEVICE i32 first_unlike(const Args& args, u32 generation) {
    const Published compared[] = {kPath, kOp, kGraph};
    for (i32 rank = 1; rank < args.ranks; ++rank)
        for (const Published which : compared)
            if (published_word(args, rank, generation, which) != published_word(args, 0, generation, which))
                return rank;
    return args.ranks;
}

// By thread 0: the opening barrier. Afterwards runtime_tokens holds every rank's tokens, and inputs of all ranks may be
// read; or this rank has stopped.
DG_DEVICE void open_call(const Args& args) {
    store<u32>(local_word(args, kStop), 0);
    // A call counts from 0, also where the one before it ended early or a graph replays it.
    store<u32>(local_word(args, kL1Items), 0);
    store<u32>(local_word(args, kL2Items), 0);
    store<u32>(local_word(args, kFinished), 0);
    if (is_aborted(args)) {
        stop_here(args);
        return;
    }
    const u32 generation = load<u32>(local_word(args, kGeneration)) + 1;
    store<u32>(local_word(args, kGeneration), generation);
    const u32 words[kPublishedWords] = {
        generation,
        static_cast<u32>(own_tokens(args)),
        static_cast<u32>(args.path),
        static_cast<u32>(args.dispatch),
        static_cast<u32>(args.op),
        static_cast<u32>(args.graph),
    };
    // Two rows in turn: a rank may begin its next call while a slower one still reads this one's words.
    u8* const row = control_of(args, args.rank) + args.published_at + (generation & 1) * args.published_row;
    for (int i = 0; i < kPublishedWords; ++i)
        store_peer<u32>(row + i * 4, words[i]);
    signal_ranks(args, args.arrive_at, generation);
    if (!wait_for_ranks(args, args.arrive_at, kDispatch, generation))
        return;
    if (args.check_uniform != 0) {
        const i32 unlike = first_unlike(args, generation);
        if (unlike < args.ranks) {
            tell_all(args, kUniform, unlike, kDispatch, generation, args.arrive_at);
            return;
        }
    }
    for (i32 rank = 0; rank < args.ranks; ++rank) {
        const i32 said = static_cast<i32>(published_word(args, rank, generation, kTokens));
        store<i32>(args.runtime_tokens + rank * 4, most(0, least(said, args.max_tokens)));
    }
}

// Whether all ranks have stored all combine rows of this call; waits for them. By the whole block.
DG_DEVICE bool all_done(const Args& args, u8* lds) {
    bool done = false;
    if (thread() == 0)
        done = wait_for_ranks(args, args.done_at, kCombine, load<u32>(local_word(args, kGeneration)));
    return from_first(done, lds) != 0;
}

// Blocks -------------------------------------------------------------------------------------------------------------

// By thread 0: wait until all blocks have come, unless ranks cannot go on. Blocks that are not all resident, since
// something else holds their places, would wait for ever; so there is a limit, where the device has none of its own.
DG_DEVICE bool wait_for_blocks(const Args& args) {
    u32* const arrived = local_word(args, kBlocksArrived);
    u32* const sense = local_word(args, kBlocksSense);
    const u32 before = load_acquire<Scope::agent>(sense);
    if (add<Scope::agent>(arrived, 1u) == blocks() - 1) {
        store_release<Scope::agent>(arrived, 0u);
        store_release<Scope::agent>(sense, before + 1);
        return true;
    }
    const u64 start = ticks();
    const u64 limit = static_cast<u64>(static_cast<double>(args.meet_seconds) * kTicksPerSecond);
    while (load_acquire<Scope::agent>(sense) == before) {
        const bool late = limit > 0 && ticks() - start >= limit;
        if (late)
            tell_all(args, kFailed, args.rank, kBarrier, load<u32>(local_word(args, kGeneration)),
                     args.arrive_at);
        else if (is_aborted(args))
            stop_here(args);
        if (late || is_aborted(args))
            return false;
        pause();
    }
    return true;
}

// All blocks of a launch meet, so all of them have to be resident. What each thread stored before is seen by all. False
// in a block that has to end, since the call has: others may be past this meeting, and end at their next one.
DG_DEVICE bool meet_blocks(const Args& args, u8* lds) {
    publish();
    sync();
    const bool met = from_first(thread() == 0 ? wait_for_blocks(args) : 0, lds) != 0;
    acquire<Scope::agent>();
    return met;
}

// The next piece of work of a launch. Numbers are given in order, so whoever waits for a lower number waits for a block
// that runs already, however few are resident.
DG_DEVICE u32 claim(const Args& args, Local counter, u8* lds) {
    return from_first(thread() == 0 ? add<Scope::agent>(local_word(args, counter), 1u) : 0, lds);
}

}  // namespace dg_hip::mega
