// Which tiles of D a block computes, in which order, and which part of K.
#pragma once

#include <dg/impls/sm90_layout.cuh>

namespace dg::sm90 {

// A tile of D: its first rows of P and of Q, and the K blocks of it that a block multiplies.
struct Tile {
    u32 row_p, row_q;
    u32 first_k, last_k;
    u32 group;
    Shared rows;  // where its Rows are, of products in groups
};

// Tile `t` of tiles_p x tiles_q in an order that keeps what neighbours share in the L2: bands of so many tiles
// along P, walked along Q.
template <class C>
struct Band {
    // Of a column of a band.
    static constexpr u32 kMostTiles = C::kSwap              ? 1
                                      : Layout<C>::kGrouped ? kBandRows / Layout<C>::kBlockP
                                                            : kBand;

    u32 p, q;

    __device__ __forceinline__ Band(u32 t, u32 tiles_p, u32 tiles_q) {
        const u32 in_band = kMostTiles * tiles_q;
        const u32 band = t / in_band, rest = t % in_band;
        const u32 height = min(kMostTiles, tiles_p - band * kMostTiles);
        p = band * kMostTiles + rest % height, q = rest / height;
    }
};

// The tiles of one block, one after the other.
//
// Tiles go over the grid in waves. With kSplit the blocks of a cluster share one tile, a part of K each.
//
// With kStream the waves end a whole one early, and the tiles that are left, one to two for each block, are cut
// along K into equal parts, so that all blocks are busy to the end. A team of as many blocks as a column of a band
// has tiles takes the columns end to end, a tile each: so they read the same rows of Q at the same time. What each
// block for itself would take from the row of all tiles is read anew by each, which costs more than is gained.
// A tile that is cut belongs to the block that has its end; those before it hand their sums over (parts.cuh).
// A block takes its part from the end to the beginning: what it gives is done first and what it waits for last,
// and blocks wait for lower ones alone, which the card starts before them.
template <class C>
struct Tiles {
    static constexpr u32 kLeastPart = 4;  // K blocks: less of a tile is not worth handing over

    const Params& params;
    u32 first_k, last_k;  // of tiles that are not cut
    // With kStream alone:
    u32 size, teams;  // blocks of a team; teams
    u32 team;         // of this block; a block beyond the last team has nothing to do
    u32 whole;        // tiles of the block that are not cut
    u32 begin, end;   // of the team's part of the rest, in K blocks of columns from its beginning
    u32 items;        // tiles that the block works on

    // `rank` is the block's place in its cluster: which part of K it has.
    __device__ __forceinline__ Tiles(const Params& all, u32 rank) : params(all) {
        first_k = params.k_blocks * rank / C::kSplit;
        last_k = params.k_blocks * (rank + 1) / C::kSplit;
        if constexpr (C::kStream) {
            const u32 height = min(Band<C>::kMostTiles, params.tiles_p);
            size = params.tiles_p % height == 0 && height <= gridDim.x ? height : 1;
            teams = gridDim.x / size, team = blockIdx.x / size;
            const u32 waves = columns() / teams;
            whole = waves > 1 ? waves - 1 : 0;
            begin = cut(team), end = cut(team + 1);
            items =
                team >= teams ? 0 : whole + (begin < end ? last_column() - begin / params.k_blocks + 1 : 0);
        }
    }

    __device__ __forceinline__ u32 columns() const { return params.tiles_p * params.tiles_q / size; }
    // Of those that are cut, the one in which the team's part ends.
    __device__ __forceinline__ u32 last_column() const { return (end - 1) / params.k_blocks; }

    // Where the part of a team begins, and that of the one before it ends.
    __device__ __forceinline__ u32 cut(u32 of) const {
        const u32 k_blocks = params.k_blocks;
        const u64 all = static_cast<u64>(columns() - whole * teams) * k_blocks;
        const u32 at = static_cast<u32>(all * of / teams), within = at % k_blocks;
        if (within < kLeastPart)
            return at - within;
        return k_blocks - within < kLeastPart ? at - within + k_blocks : at;
    }

    __device__ __forceinline__ Tile at(u32 t, u32 first_k, u32 last_k) const {
        const Band<C> place(t, params.tiles_p, params.tiles_q);
        return {place.p * Layout<C>::kBlockP, place.q * C::kBlockQ, first_k, last_k};
    }

    // A tile of the block: by its number, or, with kStream, by its place in the order of the block.
    __device__ __forceinline__ Tile item(u32 i) const {
        if constexpr (C::kStream) {
            const u32 place = blockIdx.x - team * size;
            if (i >= whole) {
                const u32 column = last_column() - (i - whole), start = column * params.k_blocks;
                return at((whole * teams + column) * size + place, max(begin, start) - start,
                          min(end - start, params.k_blocks));
            }
            i = (i * teams + team) * size + place;
        }
        return at(i, first_k, last_k);
    }

    // Tells, when called, which tile comes next.
    struct Next {
        const Tiles& tiles;
        u32 i, limit;
        Tile& tile;

        // The same one at the end.
        __device__ __forceinline__ Tile operator()() const {
            if (i < limit)
                tile = tiles.item(i);
            return tile;
        }
    };

    // Calls `body` with each tile of this block and a Next, which it calls once; in one thread, or in all of a warp.
    // kHeld is for products in groups.
    template <bool kWarp, bool kHeld = false, class Body>
    __device__ __forceinline__ void for_each(Body body) const {
        const u32 limit = C::kStream ? items : params.tiles_p * params.tiles_q,
                  step = C::kStream ? 1 : gridDim.x / C::kSplit;
        u32 i = C::kStream ? 0 : blockIdx.x / C::kSplit;
        if (i >= limit)
            return;
        for (Tile tile = item(i);;) {
            i += step;
            Tile next = tile;
            body(tile, Next{*this, i, limit, next});
            if (i >= limit)
                return;
            tile = next;
        }
    }
};

}  // namespace dg::sm90
