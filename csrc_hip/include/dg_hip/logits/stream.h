// Weighted-ReLU logits of a few rows over a stream of keys: the one main loop of the plain and the paged form.
//
//   out[i, j] = kv_scale[j] * sum over h of relu(q[i, h] . kv[j]) * weights[i, h]
//
// A block has as many rows as make 128 pairs of a row and a head. It keeps their queries in local memory, and each of
// its waves takes 64 keys at a time, which it loads while it multiplies those before. Keys are P of the matrix
// instruction and pairs are Q, so a lane holds one key's products with four heads: the sum over heads stays within the
// lane, in a fixed order, until a row has ended, and then crosses the four lanes that share a key. No sum depends on
// how keys are shared.
#pragma once

#include <dg_hip/logits/format.h>

namespace dg_hip::logits {

constexpr int kPairs = 128, kTiles = kPairs / kTile;  // tiles are what one instruction takes
constexpr int kMostRows = kPairs / 8;
constexpr int kThreads = 256, kChunk = kWave, kStrips = kChunk / kTile;

// Keys `first` .. `last - 1` are a row's, and key j has column j - `shift`.
struct Range {
    i64 first, last, shift;

    // The part of it that exists: there are `count` keys, and columns 0 .. `columns - 1`.
    DG_DEVICE static Range clipped(i64 first, i64 last, i64 shift, i64 count, i64 columns) {
        const i64 low = most<i64>(first, most<i64>(shift, 0));
        const i64 high = least(least(last, count), shift + columns);
        return low < high ? Range{low, high, shift} : Range{shift, shift, shift};
    }
};

enum Dtype { kFloat32, kBfloat16, kFloat16 };  // of weights and logits, as the launching side numbers them

// The rows of a block. Pointers are those of its first row; distances are in bytes.
struct Rows {
    const u8 *q, *q_sf, *weights;
    ptr out;
    i64 q_row, q_head, sf_row, sf_head, weights_row, weights_head, out_row;
    i64 columns;
    i32 count, head_bits;  // rows, and the binary logarithm of the number of heads
    i32 weights_dtype, out_dtype;
    bool clean;

    DG_DEVICE i32 row_of(i32 pair) const { return pair >> head_bits; }
    DG_DEVICE i32 head_of(i32 pair) const { return pair & ((1 << head_bits) - 1); }

    DG_DEVICE f32 weight(i32 pair) const {
        const u8* const at = weights + row_of(pair) * weights_row + head_of(pair) * weights_head;
        return weights_dtype == kFloat32    ? load<f32>(at)
               : weights_dtype == kBfloat16 ? from_bf16(load<u16>(at))
                                            : from_f16(load<u16>(at));
    }
    DG_DEVICE void put(i32 row, i64 column, f32 value) const {
        const ptr own = out + row * out_row;
        if (out_dtype == kFloat32)
            store(own + column * 4, value);
        else
            store(own + column * 2, to_bf16(value));
    }
};

// What the waves of a block read of its rows: the pairs of each tile as operands, in the order of lanes; weights and
// the scales of FP4, in the order in which a lane takes those of its four pairs of a tile. Pairs beyond the rows are
// zeros.
template <class F>
struct Local {
    u64 pairs[kTiles][F::kSteps][kWave];
    F32x4 weights[kTiles][4];
    F32x4 scales[F::kFp4 ? kTiles : 1][F::kFp4 ? F::kSteps : 1][4];
    Range ranges[kMostRows];

    // All threads of the block take part.
    template <class Ranges>
    DG_DEVICE void write(const Rows& rows, const Ranges& range) {
        const i32 own = static_cast<i32>(thread());
        if (own < rows.count)
            ranges[own] = range(own);
        if (own < kPairs)
            write_factors(rows, own);
        for (u32 tile = wave(); tile < kTiles; tile += kThreads / kWave) {
            const i32 pair = static_cast<i32>(tile) * kTile + q_row(static_cast<i32>(lane() % kTile));
            const i32 row = rows.row_of(pair);
            const u8* const at = rows.q + row * rows.q_row + rows.head_of(pair) * rows.q_head;
            const Operand<F> values = operand<F>(row < rows.count ? load_words<F>(at) : no_words<F>());
            for (int step = 0; step < F::kSteps; ++step)
                pairs[tile][step][lane()] = values.v[step];
        }
        sync();
    }

    DG_DEVICE void write_factors(const Rows& rows, i32 number) {
        const i32 tile = number / kTile, group = number % kTile / 4, slot = number % 4;
        const i32 pair = tile * kTile + result(ResultMap::mmac, group * kTile, slot).col;
        const i32 row = rows.row_of(pair);
        weights[tile][group].v[slot] = row < rows.count ? rows.weight(pair) : 0.0f;
        if constexpr (F::kFp4) {
            const u8* const at = rows.q_sf + row * rows.sf_row + rows.head_of(pair) * rows.sf_head;
            const u32 word = row < rows.count ? load<u32>(at) : 0;
            for (int step = 0; step < F::kSteps; ++step)
                scales[tile][step][group].v[slot] = from_ue8m0(word >> 8 * step & 255);
        }
    }
};

// 64 keys as they were loaded, and the scale of key `lane` among them.
template <class F>
struct Chunk {
    Words<F> words[kStrips];
    u32 scale;

    template <class Keys>
    DG_DEVICE void fetch(const Keys& keys, i64 first) {
        const i64 last = keys.count - 1;
        for (int strip = 0; strip < kStrips; ++strip) {
            const i64 key = first + strip * kTile + lane() % kTile;
            words[strip] = load_words<F>(keys.at(least(key, last)));
        }
        scale = load<u32>(keys.scale_at(least<i64>(first + lane(), last)));
    }
};

// Not fmax, which would make a number of a NaN.
DG_DEVICE f32 relu(f32 x) {
    return x < 0 ? 0.0f : x;
}

// The sums of four strips, each spread over the four lanes of a key -> the sum of key `lane` of all 64.
DG_DEVICE f32 sum_of_lanes(const f32 (&parts)[kStrips]) {
    const u32 own = lane();
    const bool upper = own & 32, odd = own & 16;
    f32 kept[2];
    for (int i = 0; i < 2; ++i)
        kept[i] = (upper ? parts[2 + i] : parts[i]) + shuffle_f32(upper ? parts[i] : parts[2 + i], own ^ 32);
    return (odd ? kept[1] : kept[0]) + shuffle_f32(odd ? kept[0] : kept[1], own ^ 16);
}

// The logits of one chunk of keys.
template <class F>
struct Scorer {
    const Rows& rows;
    const Local<F>& local;

    DG_DEVICE bool meets(i32 row, i64 first) const {
        return local.ranges[row].first < first + kChunk && local.ranges[row].last > first;
    }

    DG_DEVICE void put(i32 row, i64 first, f32 sum, f32 scale) const {
        const Range range = local.ranges[row];
        const i64 key = first + lane();
        if (key >= range.first && key < range.last)
            rows.put(row, key - range.shift, F::kFp4 ? sum : sum * scale);
    }

    DG_DEVICE void score(const Chunk<F>& chunk, i64 first) const {
        const i32 own = static_cast<i32>(lane());
        sync_wave();  // else compilers keep all that LDS holds in registers, which are few enough
        const u64 wanted = ballot(own < rows.count && meets(own, first));
        if (wanted == 0)
            return;
        Operand<F> keys[kStrips];
        f32 key_scales[kStrips][F::kSteps];
        for (int strip = 0; strip < kStrips; ++strip) {
            keys[strip] = operand<F>(chunk.words[strip]);
            if constexpr (F::kFp4) {
                const u32 word = shuffle(chunk.scale, strip * kTile + own % kTile);
                for (int step = 0; step < F::kSteps; ++step)
                    key_scales[strip][step] = from_ue8m0(word >> 8 * step & 255);
            }
        }
        const f32 scale = bits<f32>(chunk.scale);
        const bool two_rows = rows.head_bits == 3;  // in one tile, the second one in the upper two slots
        f32 low[kStrips] = {}, high[kStrips] = {};
        for (i32 tile = 0; tile * kTile < rows.count << rows.head_bits; ++tile) {
            const i32 row = rows.row_of(tile * kTile);
            if ((wanted >> row & (two_rows ? 3 : 1)) == 0)
                continue;
            add_tile(tile, keys, key_scales, low, high);
            if (rows.head_of((tile + 1) * kTile) != 0)
                continue;  // the row has more heads
            if (!two_rows)
                for (int strip = 0; strip < kStrips; ++strip)
                    low[strip] += high[strip];
            put(row, first, sum_of_lanes(low), scale);
            if (two_rows) {
                const f32 sum = sum_of_lanes(high);
                if (row + 1 < rows.count)
                    put(row + 1, first, sum, scale);
            }
            for (int strip = 0; strip < kStrips; ++strip)
                low[strip] = high[strip] = 0;
        }
    }

    // Adds the weighted products of a tile's pairs to the sums of slots 0 and 1, and to those of slots 2 and 3.
    DG_DEVICE void add_tile(i32 tile, const Operand<F> (&keys)[kStrips],
                            const f32 (&key_scales)[kStrips][F::kSteps], f32 (&low)[kStrips],
                            f32 (&high)[kStrips]) const {
        const u32 group = lane() / kTile;
        F32x4 x[kStrips] = {};
        for (int step = 0; step < F::kSteps; ++step) {
            const u64 pairs = local.pairs[tile][step][lane()];
            if constexpr (!F::kFp4) {
                for (int strip = 0; strip < kStrips; ++strip)
                    multiply<Fp8>(x[strip], keys[strip].v[step], pairs);
            } else {
                // Each step has scales of its own: first the key's, then the pair's, so that neither a large nor a
                // small one meets the other without a value between them.
                F32x4 part[kStrips] = {};
                for (int strip = 0; strip < kStrips; ++strip)
                    multiply<Fp8>(part[strip], keys[strip].v[step], pairs);
                const F32x4 scales = local.scales[tile][step][group];
                for (int strip = 0; strip < kStrips; ++strip)
                    for (int slot = 0; slot < 4; ++slot)
                        x[strip].v[slot] = __builtin_fmaf(part[strip].v[slot] * key_scales[strip][step],
                                                          scales.v[slot], x[strip].v[slot]);
            }
        }
        const F32x4 weights = local.weights[tile][group];
        for (int strip = 0; strip < kStrips; ++strip)
            for (int slot = 0; slot < 2; ++slot) {
                low[strip] = __builtin_fmaf(relu(x[strip].v[slot]), weights.v[slot], low[strip]);
                high[strip] = __builtin_fmaf(relu(x[strip].v[2 + slot]), weights.v[2 + slot], high[strip]);
            }
    }
};

// -inf in all columns outside of the rows' ranges.
DG_DEVICE void fill_outside(const Rows& rows, const Range* ranges, i64 part, i64 parts) {
    const f32 nothing = bits<f32>(0xff800000u);
    const i64 own = part * kThreads + thread(), stride = parts * kThreads;
    for (i32 row = 0; row < rows.count; ++row) {
        const i64 start = ranges[row].first - ranges[row].shift, end = ranges[row].last - ranges[row].shift;
        for (i64 column = own; column < start; column += stride)
            rows.put(row, column, nothing);
        for (i64 column = end + own; column < rows.columns; column += stride)
            rows.put(row, column, nothing);
    }
}

// The block's share, number `part` of `parts`, of the logits of its rows. `range(i)` is that of row i.
template <class F, class Keys, class Ranges>
DG_DEVICE void stream(const Rows& rows, const Keys& keys, const Ranges& range, i64 part, i64 parts, u8* lds) {
    Local<F>& local = *reinterpret_cast<Local<F>*>(lds);
    local.write(rows, range);
    if (rows.clean)
        fill_outside(rows, local.ranges, part, parts);
    i64 low = 0, high = 0;  // all that any row wants
    for (i32 row = 0; row < rows.count; ++row) {
        const Range own = local.ranges[row];
        if (own.first == own.last)
            continue;
        low = low == high ? own.first : least(low, own.first);
        high = most(high, own.last);
    }
    const i64 stride = parts * kThreads;  // 64 keys a wave
    i64 first = low / kChunk * kChunk + (part * (kThreads / kWave) + wave()) * kChunk;
    if (first >= high)
        return;  // nothing of the block waits for this wave any more
    const Scorer<F> scorer{rows, local};
    Chunk<F> chunk;
    chunk.fetch(keys, first);
    for (; first < high; first += stride) {
        Chunk<F> next = chunk;
        if (first + stride < high)
            next.fetch(keys, first + stride);
        scorer.score(chunk, first);
        chunk = next;
    }
}

}  // namespace dg_hip::logits
