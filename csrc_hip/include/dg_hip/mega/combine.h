// The sum of each token's slots, slot after slot in float32, rounded once.
#pragma once

#include <dg_hip/mega/control.h>

namespace dg_hip::mega {

constexpr int kVector = 8;  // bf16 in 16 bytes

// Eight columns of one token. A dropped slot's row may hold anything, so it is not read.
DG_DEVICE void add_slots(const Args& args, i64 token, i64 column, u64 live, bool aligned) {
    const u8* const rows = data_of(args, args.rank) + args.combine_at;
    f32 total[kVector] = {};
    for (i32 slot = 0; slot < args.topk; ++slot) {
        if ((live >> slot & 1) == 0)
            continue;
        const i64 at = (static_cast<i64>(slot) * args.max_tokens + token) * args.hidden + column;
        const U32x4 row = load_peer<U32x4>(rows + at * 2);
        for (int i = 0; i < kVector; ++i)
            total[i] += from_bf16(static_cast<u16>(row.v[i / 2] >> i % 2 * 16));
    }
    u8* const y = args.y + (token * args.y_stride + column) * 2;
    U32x4 sum;
    for (int i = 0; i < kVector; i += 2)
        sum.v[i / 2] = bf16_pair(total[i], total[i + 1]);
    if (aligned)
        store(y, sum);
    else
        for (int i = 0; i < kVector; ++i)
            store<u16>(y + i * 2, static_cast<u16>(sum.v[i / 2] >> i % 2 * 16));
}

// Which slots of a token are live, a bit each; a wave's lanes look at one slot each, of which there are 32 at most.
DG_DEVICE u64 live_slots(const Args& args, i64 token) {
    bool live = false;
    if (static_cast<i32>(lane()) < args.topk) {
        const u8* const own = data_of(args, args.rank);
        const i64 at = token * args.topk + lane();
        const i64 id = load<i64>(own + args.ids_at + at * 8);
        live = id >= 0 && id < args.experts && load<f32>(own + args.weights_at + at * 4) != 0.0f;
    }
    return ballot(live);
}

// Reducer `which` of `of`: a wave takes 512 columns of a token at a time.
DG_DEVICE void reduce_slots(const Args& args, u32 which, u32 of, u32 threads) {
    const i64 waves = threads / kWave, width = kWave * kVector;
    if (wave() >= waves)
        return;
    const bool aligned = reinterpret_cast<u64>(args.y) % 16 == 0 && args.y_stride % kVector == 0;
    const i64 parts = ceil_div(args.hidden, width), pieces = tokens_of(args, args.rank) * parts;
    for (i64 piece = which * waves + wave(); piece < pieces; piece += of * waves) {
        const i64 token = piece / parts, column = piece % parts * width + static_cast<i64>(lane()) * kVector;
        const u64 live = live_slots(args, token);
        if (column < args.hidden)
            add_slots(args, token, column, live, aligned);
    }
}

}  // namespace dg_hip::mega
