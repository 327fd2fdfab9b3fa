// Which tiles of D a block computes, in which order, and which part of K.
#pragma once

#include <dg/impls/sm90_layout.cuh>

namespace dg::sm90 {

struct Tile {
    u32 p, q;
};

// Tiles in waves over the grid. With kSplit the blocks of a cluster share one tile, a part of K each.
template <class C>
struct Tiles {
    const Params& params;
    u32 first_k, last_k;

    // `rank` is the block's place in its cluster: which part of K it has.
    __device__ __forceinline__ Tiles(const Params& all, u32 rank) : params(all) {
        first_k = params.k_blocks * rank / C::kSplit;
        last_k = params.k_blocks * (rank + 1) / C::kSplit;
    }

    // Tile `t` in an order that keeps what neighbours share in the L2: bands of kBand tiles along P, walked along Q.
    __device__ __forceinline__ Tile at(u32 t) const {
        constexpr u32 kBand = C::kSwap ? 1 : 16;
        const u32 in_band = kBand * params.tiles_q;
        const u32 band = t / in_band, rest = t % in_band;
        const u32 height = min(kBand, params.tiles_p - band * kBand);
        return {band * kBand + rest % height, rest / height};
    }

    // Calls `body` with each tile of this block and the one that comes after it, or the same one at the end.
    template <class Body>
    __device__ __forceinline__ void for_each(Body body) const {
        const u32 tiles = params.tiles_p * params.tiles_q, clusters = gridDim.x / C::kSplit;
        u32 t = blockIdx.x / C::kSplit;
        if (t >= tiles)
            return;
        for (Tile tile = at(t);;) {
            t += clusters;
            const Tile next = t < tiles ? at(t) : tile;
            body(tile, next);
            if (t >= tiles)
                return;
            tile = next;
        }
    }
};

}  // namespace dg::sm90
