// The two products, and how rows come to them and leave them: pull, multiply by L1; multiply by L2, hand back.
#pragma once

#include <dg_hip/mega/routes.h>

namespace dg_hip::mega {

// One expert's rows of weights from `first` on, K contiguous, in plain order or in tiles; sizes are multiples of 128.
struct Weights {
    const u8* base;
    i64 first, bytes;
    bool packed;

    DG_DEVICE bool direct() const { return true; }
    DG_DEVICE const u8* line(i32 row) const {
        const i64 n = first + row;
        return base + (packed ? kpack2_offset(n, 0, bytes) : n * bytes);
    }
    DG_DEVICE U32x4 part(const u8* line, i64 k) const { return k < bytes ? piece(line, k) : kZeros16; }
    DG_DEVICE U32x4 piece(const u8* line, i64 k) const {
        return load<U32x4>(line + (packed ? k * kTile : k));
    }
};

// Sixteen float32 products, scaled, as bf16.
DG_DEVICE void rounded(const f32 (&values)[kTile], f32 row_scale, const u8* scales, U32x4 (&out)[2]) {
    for (int i = 0; i < kTile; i += 2) {
        const f32 low = values[i] * (row_scale * load<f32>(scales + i * 4));
        const f32 high = values[i + 1] * (row_scale * load<f32>(scales + i * 4 + 4));
        out[i / 8].v[i / 2 % 4] = bf16_pair(low, high);
    }
}

// To l1_out.
struct StoreL1 {
    const Args& args;
    RowTile tile;
    i64 column;
    const u8* scales;  // of the first column

    DG_DEVICE void operator()(i32 row, i32 at, const f32 (&values)[kTile]) const {
        U32x4 out[2];
        rounded(values, load<f32>(args.l1_acts_sf + (tile.first + row) * 4), scales + at * 4, out);
        u8* const there = args.l1_out + ((tile.first + row) * 2 * args.intermediate + column + at) * 2;
        store(there, out[0]);
        store(there + 16, out[1]);
    }
};

// To the combine row of the rank that the row came from.
struct StoreL2 {
    const Args& args;
    RowTile tile;
    i64 column;
    const u8* scales;

    DG_DEVICE void operator()(i32 row, i32 at, const f32 (&values)[kTile]) const {
        U32x4 out[2];
        rounded(values, load<f32>(args.l2_acts_sf + (tile.first + row) * 4), scales + at * 4, out);
        const Source from = source_of(args, tile.first + row);
        const i64 there =
            (static_cast<i64>(from.slot) * args.max_tokens + from.token) * args.hidden + column + at;
        u8* const combine = data_of(args, from.rank) + args.combine_at + there * 2;
        store_peer(combine, out[0]);
        store_peer(combine + 16, out[1]);
    }
};

template <class S, class Out>
DG_DEVICE void multiply_rows(const Rows& rows, const Weights& weights, u8* lds, const Out& out) {
    Accumulators<S> acc;
    multiply_tile<Fp8>(acc, rows, weights, rows.bytes, rows.rows, Unscaled(), lds);
    put_tile(acc, rows.rows, lds, out);
}

// Both shapes add along K in the same order, so which one it is changes no bit.
template <class Out>
DG_DEVICE void multiply_either(const Rows& rows, const Weights& weights, u8* lds, const Out& out) {
    if (rows.rows <= Small::kP)
        multiply_rows<Small>(rows, weights, lds, out);
    else
        multiply_rows<Large>(rows, weights, lds, out);
}

// K1 -----------------------------------------------------------------------------------------------------------------

// Copies a tile's rows and their scales from the ranks that hold them, a wave a row, and says that they are there.
DG_DEVICE void pull(const Args& args, i64 number, const RowTile& tile) {
    for (i32 i = static_cast<i32>(wave()); i < tile.rows; i += kWaves) {
        const i64 row = tile.first + i;
        const Source from = source_of(args, row);
        const u8* const data = data_of(args, from.rank);
        const u8* const x = data + args.x_at + static_cast<i64>(from.token) * args.hidden;
        u8* const own = args.l1_acts + row * args.hidden;
        for (i64 at = static_cast<i64>(lane()) * 16; at < args.hidden; at += kWave * 16)
            store(own + at, load_peer<U32x4>(x + at));
        if (lane() == 0)
            store<u32>(args.l1_acts_sf + row * 4,
                       load_peer<u32>(data + args.x_sf_at + static_cast<i64>(from.token) * 4));
    }
    publish();
    sync();
    if (thread() == 0)
        store_release<Scope::agent>(ready_flag(args, number), 1u);
}

DG_DEVICE void await_rows(const Args& args, i64 number) {
    if (thread() == 0)
        while (load_acquire<Scope::agent>(ready_flag(args, number)) == 0)
            pause();
    sync();
    acquire<Scope::agent>();
}

DG_DEVICE void l1_tile(const Args& args, const RowTile& tile, i64 column, u8* lds) {
    const i64 hidden = args.hidden, width = 2 * static_cast<i64>(args.intermediate);
    const Rows rows = {args.l1_acts + tile.first * hidden, hidden, hidden, tile.rows, true};
    const Weights weights = {args.l1 + tile.expert * width * hidden, column, hidden, args.l1_packed != 0};
    const u8* const scales = args.l1_sf + (tile.expert * width + column) * 4;
    multiply_either(rows, weights, lds, StoreL1{args, tile, column, scales});
}

// All pieces of K1 that this block gets. Rows of a tile are pulled once, by whoever claims that, some tiles ahead of the
// products that wait for them: pull(0) .. pull(ahead - 1), then for each tile t pull(t + ahead) and its products.
DG_DEVICE void dispatch_and_l1(const Args& kernel, u8* lds) {
    const i64 columns = 2 * static_cast<i64>(kernel.intermediate) / Large::kQ;
    const i64 ahead = most<i64>(1, ceil_div(blocks(), columns));
    Tiles pulled = {0, 0}, multiplied = {0, 0};
    RowTile tile = {};
    while (true) {
        const Args& args = again(kernel);
        const i64 item = claim(args, kL1Items, lds);
        const i64 number = (item - ahead) / (columns + 1), part = (item - ahead) % (columns + 1);
        if (item < ahead || part == 0) {
            const i64 next = item < ahead ? item : number + ahead;
            if (pulled.find(args, next, tile))
                pull(args, next, tile);
            continue;
        }
        if (!multiplied.find(args, number, tile))
            return;
        await_rows(args, number);
        l1_tile(again(kernel), tile, (part - 1) * Large::kQ, lds);
    }
}

// K3 -----------------------------------------------------------------------------------------------------------------

DG_DEVICE void l2_tile(const Args& args, const RowTile& tile, i64 column, u8* lds) {
    const i64 hidden = args.hidden, k = args.intermediate;
    const Rows rows = {args.l2_acts + tile.first * k, k, k, tile.rows, true};
    const Weights weights = {args.l2 + tile.expert * hidden * k, column, k, args.l2_packed != 0};
    const u8* const scales = args.l2_sf + (tile.expert * hidden + column) * 4;
    multiply_either(rows, weights, lds, StoreL2{args, tile, column, scales});
}

// All pieces of K3 that this block gets; no block waits here. The last of `of` blocks tells every rank that this one's
// rows are stored: each thread has published its own by then.
DG_DEVICE void l2_and_signal(const Args& kernel, u32 of, u8* lds) {
    const i64 columns = kernel.hidden / Large::kQ;
    Tiles tiles = {0, 0};
    RowTile tile = {};
    while (true) {
        const Args& args = again(kernel);
        const i64 item = claim(args, kL2Items, lds);
        if (!tiles.find(args, item / columns, tile))
            break;
        l2_tile(again(kernel), tile, item % columns * Large::kQ, lds);
    }
    publish();
    sync();
    const Args& args = again(kernel);
    if (thread() == 0 && add<Scope::agent>(local_word(args, kFinished), 1u) == of - 1)
        signal_ranks(args, args.done_at, load<u32>(local_word(args, kGeneration)));
}

}  // namespace dg_hip::mega
