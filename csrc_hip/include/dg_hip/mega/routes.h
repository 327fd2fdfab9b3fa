// Which rows this rank computes: every live route to one of its experts, by expert, then source rank, token and slot.
//
// First all blocks read each slot of each rank once and note its local expert (gather); then a block for each expert
// finds its rows (emit). Nothing is counted by atomics and no room is estimated: the order of rows is the same in each
// call, and there is a row for every route that can be.
#pragma once

#include <dg_hip/mega/control.h>

namespace dg_hip::mega {

// A slot as gather notes it; expert -1 is none of this rank's. Notes lie where K1 stores later, which has 512 bytes and
// more for each slot, and K1's flags, one for each tile of rows, where K2 does.
struct Note {
    i32 expert;
    f32 weight;
};
DG_DEVICE u8* note_at(const Args& args, i64 slot) {
    return args.l1_out + slot * static_cast<i64>(sizeof(Note));
}
DG_DEVICE u32* ready_flag(const Args& args, i64 tile) {
    return reinterpret_cast<u32*>(args.l2_acts_sf) + tile;
}

DG_DEVICE i64 all_slots(const Args& args) {
    i64 slots = 0;
    for (i32 rank = 0; rank < args.ranks; ++rank)
        slots += static_cast<i64>(tokens_of(args, rank)) * args.topk;
    return slots;
}

// Block `which` of `of` takes its share.
DG_DEVICE void gather_routes(const Args& args, u32 which, u32 of) {
    i64 before = 0;
    for (i32 rank = 0; rank < args.ranks; ++rank) {
        const u8* const data = data_of(args, rank);
        const i64 slots = static_cast<i64>(tokens_of(args, rank)) * args.topk;
        for (i64 i = static_cast<i64>(which) * kThreads + thread(); i < slots;
             i += static_cast<i64>(of) * kThreads) {
            const i64 id = static_cast<i64>(load_peer<u64>(data + args.ids_at + i * 8));
            const f32 weight = bits<f32>(load_peer<u32>(data + args.weights_at + i * 4));
            // A weight of NaN is not 0. Ids may be anything, so they are compared before one is subtracted from.
            const bool live = id >= args.first_expert &&
                              id < static_cast<i64>(args.first_expert) + args.local_experts && weight != 0.0f;
            store(note_at(args, before + i),
                  Note{live ? static_cast<i32>(id - args.first_expert) : -1, weight});
            store<u32>(ready_flag(args, before + i), 0);
        }
        before += slots;
    }
}

// Rank, token and slot of a slot's number.
DG_DEVICE Source locate(const Args& args, i64 slot, i32 expert) {
    i32 rank = 0;
    for (; rank < args.ranks; ++rank) {
        const i64 slots = static_cast<i64>(tokens_of(args, rank)) * args.topk;
        if (slot < slots)
            break;
        slot -= slots;
    }
    return {rank, static_cast<i32>(slot / args.topk), static_cast<i32>(slot % args.topk), expert};
}

// One expert's rows. Each wave has a stretch of the slots: what it counts in a first pass tells where its rows begin.
DG_DEVICE void emit_expert(const Args& args, i32 expert, i64 slots, u8* lds) {
    struct Counts {
        u32 own, lower;
    };
    const i64 stretch = ceil_div(ceil_div(slots, kWave), kWaves) * kWave;
    const i64 from = least(static_cast<i64>(wave()) * stretch, slots), to = least(from + stretch, slots);
    Counts counts = {0, 0};
    for (i64 at = from; at < to; at += kWave) {
        const i64 slot = at + lane();
        const i32 found = slot < to ? load<Note>(note_at(args, slot)).expert : -1;
        counts.own += static_cast<u32>(__builtin_popcountll(ballot(found == expert)));
        counts.lower += static_cast<u32>(__builtin_popcountll(ballot(found >= 0 && found < expert)));
    }
    if (lane() == 0)
        store(lds + wave() * sizeof(Counts), counts);
    sync();
    i64 first = 0, row = 0;
    u32 count = 0;
    for (u32 i = 0; i < kWaves; ++i) {
        const Counts other = load<Counts>(lds + i * sizeof(Counts));
        first += other.lower;
        row += i < wave() ? other.own : 0;
        count += other.own;
    }
    row += first;
    for (i64 at = from; at < to; at += kWave) {
        const i64 slot = at + lane();
        const Note note = slot < to ? load<Note>(note_at(args, slot)) : Note{-1, 0.0f};
        const u64 mine = ballot(note.expert == expert);
        if (note.expert == expert) {
            const i64 own = row + __builtin_popcountll(mine & ((1ull << lane()) - 1));
            store(args.row_source + own * 16, bits<U32x4>(locate(args, slot, expert)));
            store<f32>(args.row_weight + own * 4, note.weight);
        }
        row += __builtin_popcountll(mine);
    }
    if (thread() == 0) {
        store<i32>(args.expert_offsets + static_cast<i64>(expert) * 4, static_cast<i32>(first));
        if (expert == args.experts_per_rank - 1)
            store<i32>(args.expert_offsets + static_cast<i64>(expert + 1) * 4,
                       static_cast<i32>(first + count));
        if (args.stats != nullptr && expert < args.local_experts) {
            u8* const stat = args.stats + static_cast<i64>(expert) * 4;
            store<u32>(stat, load<u32>(stat) + count);
        }
    }
    sync();
}

DG_DEVICE void emit_routes(const Args& args, u32 which, u32 of, u8* lds) {
    const i64 slots = all_slots(args);
    for (i64 expert = which; expert < args.experts_per_rank; expert += of)
        emit_expert(args, static_cast<i32>(expert), slots, lds);
}

// Tiles of rows, none with rows of two experts, in the order of rows.
struct RowTile {
    i32 expert, rows;
    i64 first;
};

// Finds tiles by their numbers, each at least as large as the one before it.
struct Tiles {
    i32 expert;
    i64 before;  // tiles of experts before this one

    DG_DEVICE bool find(const Args& args, i64 number, RowTile& tile) {
        while (expert < args.experts_per_rank) {
            const i64 start = row_offset(args, expert), stop = row_offset(args, expert + 1);
            const i64 first = start + (number - before) * Large::kP;
            if (first < stop) {
                tile = {expert, static_cast<i32>(least<i64>(stop - first, Large::kP)), first};
                return true;
            }
            before += ceil_div(stop - start, Large::kP);
            ++expert;
        }
        return false;
    }
};

}  // namespace dg_hip::mega
