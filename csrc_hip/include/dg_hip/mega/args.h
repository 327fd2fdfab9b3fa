// What every kernel of Mega MoE is told: one struct for all of them. Regions of peers' memory lie at the same offsets
// on all ranks (dg_core/mega/layout.py), so a rank needs a table of addresses and one offset for each region.
#pragma once

#include <dg_hip/kernel.h>

// clang-format off
#define DG_MEGA_FIELDS(X)                                                                                     \
    /* Control memory of this rank: tables of all ranks' addresses, its own words, the graph's scalar. */     \
    X(ptr, peer_data) X(ptr, peer_control) X(ptr, local) X(ptr, scalar)                                       \
    /* Memory of the host: 8 bytes, not 0 as soon as ranks cannot go on. */                                   \
    X(ptr, record)                                                                                            \
    /* Offsets in bytes: inputs and combine rows in data, words in control. */                                \
    X(i64, x_at) X(i64, x_sf_at) X(i64, ids_at) X(i64, weights_at) X(i64, combine_at)                         \
    X(i64, published_at) X(i64, published_row) X(i64, arrive_at) X(i64, done_at) X(i64, abort_at)             \
    /* Sizes, and limits of waits for ranks and for blocks (0: none); `experts` of all ranks together, `experts_per_rank` of the ranks that own most. */              \
    X(i32, rank) X(i32, ranks) X(i32, experts) X(i32, experts_per_rank) X(i32, first_expert)                  \
    X(i32, local_experts) X(i32, max_tokens) X(i32, topk) X(i32, hidden) X(i32, intermediate)                 \
    X(f32, seconds) X(f32, meet_seconds) X(i32, check_uniform)                                                                     \
    /* Scratch of this rank. */                                                                               \
    X(ptr, expert_offsets) X(ptr, runtime_tokens) X(ptr, row_source) X(ptr, row_weight) X(ptr, l1_acts)       \
    X(ptr, l1_acts_sf) X(ptr, l1_out) X(ptr, l2_acts) X(ptr, l2_acts_sf)                                      \
    /* The call. `num_tokens` is the bucket where `graph`; `y_stride` counts elements. */                     \
    X(i32, num_tokens) X(i32, path) X(i32, dispatch) X(i32, op) X(i32, graph) X(f32, clamp) X(i32, fast_math) \
    X(ptr, l1) X(ptr, l1_sf) X(i32, l1_packed) X(ptr, l2) X(ptr, l2_sf) X(i32, l2_packed)                     \
    X(ptr, y) X(i64, y_stride) X(ptr, stats)                                                                  \
    /* The launch: whether K1 routes, how many blocks of K3 multiply, threads of a block that add slots. */   \
    X(i32, route_inside) X(i32, product_blocks) X(i32, reduce_threads)
// clang-format on

namespace dg_hip::mega {

DG_ARGS(Args, DG_MEGA_FIELDS)

// The memory of a rank, from one of the two tables.
DG_DEVICE u8* of_rank(const u8* table, i32 rank) {
    return reinterpret_cast<u8*>(load<u64>(table + rank * 8));
}
DG_DEVICE u8* data_of(const Args& args, i32 rank) {
    return of_rank(args.peer_data, rank);
}
DG_DEVICE u8* control_of(const Args& args, i32 rank) {
    return of_rank(args.peer_control, rank);
}

// Tokens of a rank in this call, as it has said itself.
DG_DEVICE i32 tokens_of(const Args& args, i32 rank) {
    return load<i32>(args.runtime_tokens + rank * 4);
}
DG_DEVICE i32 row_offset(const Args& args, i32 expert) {
    return load<i32>(args.expert_offsets + static_cast<i64>(expert) * 4);
}
DG_DEVICE i32 rows_in_use(const Args& args) {
    return row_offset(args, args.experts_per_rank);
}

// A row of expert_offsets' order and where it came from.
struct Source {
    i32 rank, token, slot, expert;
};
DG_DEVICE Source source_of(const Args& args, i64 row) {
    return bits<Source>(load<U32x4>(args.row_source + row * 16));
}

}  // namespace dg_hip::mega
