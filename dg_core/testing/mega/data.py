"""Inputs, routes and weights of any rank from a seed: every process knows what all others hold without
asking.

An expert costs a copy, not a random draw: its values are a pool of the seed's, rolled along both axes by
offsets of its own, and its scales are drawn anew. At full size (hidden 4096, intermediate 2048) that is about
20 ms an expert.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ... import quant
from ...layout import ceil_div
from ...mega import weights as mega_weights
from ...mega.layout import local_experts
from .oracle import Expert, RankData

#: Standard deviation of an FP8 value before its scale: 448 is nearly five of them.
FP8_SPREAD = 96.0
#: Root mean square of the 16 e2m1 values.
FP4_SPREAD = 2.93

Pair = Any  # what the public functions take for one layer: a tensor, or values with scales


@dataclass(frozen=True)
class Sizes:
    """One problem: ``mma_type`` and the sizes that all ranks share."""

    mma_type: str
    ranks: int
    num_experts: int = 8
    topk: int = 3
    hidden: int = 256
    intermediate: int = 128
    input_scale: float = 0.5
    weight_scale: float = 0.2


@dataclass(frozen=True)
class Inputs:
    """One rank's tokens: bfloat16 ``raw`` and what it is quantised to, ids int64 and weights float32."""

    raw: Tensor
    x: Tensor
    x_sf: Tensor | None
    topk_idx: Tensor
    topk_weights: Tensor


def generator(*parts: int) -> torch.Generator:
    """A generator of its own for every tuple of integers."""
    state = 0
    for part in parts:
        state = (state * 1_000_003 + part + 1) % 2**62
    return torch.Generator().manual_seed(state)


# Tokens -----------------------------------------------------------------------------------------------------


def quantised(x: Tensor, mma_type: str) -> tuple[Tensor, Tensor | None]:
    """bfloat16 ``[n, H]`` as a buffer of that format stores it."""
    if mma_type == "bf16xbf16":
        return x, None
    if mma_type == "w8a8":
        values, sf = quant.per_token_cast_to_fp8(x, False, gran_k=x.shape[1])
        return values, sf[:, 0]
    if mma_type == "fp8_block":
        return quant.per_token_cast_to_fp8(x, False)
    return quant.per_token_cast_to_fp8(x, True, gran_k=32, use_packed_ue8m0=True)


def _chosen(scores: Tensor, topk: int) -> Tensor:
    """The best ``topk`` experts of each row, in no order; over again where there are fewer experts."""
    rounds = [scores.topk(min(topk, scores.shape[1]), sorted=False)[1]] * ceil_div(topk, scores.shape[1])
    return torch.cat(rounds, 1)[:, :topk]


def _softmax(g: torch.Generator, tokens: int, topk: int) -> Tensor:
    return torch.softmax(torch.randn(tokens, topk, generator=g), -1)


def _plain(g: torch.Generator, s: Sizes, tokens: int) -> tuple[Tensor, Tensor]:
    return _chosen(torch.randn(tokens, s.num_experts, generator=g), s.topk), _softmax(g, tokens, s.topk)


def _hostile(g: torch.Generator, s: Sizes, tokens: int) -> tuple[Tensor, Tensor]:
    """Plain routes of which about two in five are dropped: by id, or by a weight of zero."""
    idx, weight = _plain(g, s, tokens)
    bad = torch.tensor([-1, s.num_experts, 2**40, -7, -(2**50)])
    drawn = torch.rand(idx.shape, generator=g)
    idx = torch.where(drawn < 0.25, bad[torch.randint(0, len(bad), idx.shape, generator=g)], idx)
    weight = torch.where((drawn > 0.25) & (drawn < 0.4), 0.0, weight)
    if tokens:
        idx[-1] = -1  # a token that goes nowhere
    return idx, weight


def _crowd(g: torch.Generator, s: Sizes, tokens: int) -> tuple[Tensor, Tensor]:
    """Every slot of every token goes to the last expert."""
    return torch.full((tokens, s.topk), s.num_experts - 1), _softmax(g, tokens, s.topk)


def _duplicates(g: torch.Generator, s: Sizes, tokens: int) -> tuple[Tensor, Tensor]:
    """A token's slots all name one expert, expert 0 for every other token."""
    idx = torch.randint(0, s.num_experts, (tokens, 1), generator=g)
    idx[::2] = 0
    return idx.expand(-1, s.topk).contiguous(), _softmax(g, tokens, s.topk)


def _nowhere(g: torch.Generator, s: Sizes, tokens: int) -> tuple[Tensor, Tensor]:
    """Every route is dropped."""
    return torch.full((tokens, s.topk), -1), _softmax(g, tokens, s.topk)


ROUTES: dict[str, Callable[[torch.Generator, Sizes, int], tuple[Tensor, Tensor]]] = {
    "plain": _plain,
    "hostile": _hostile,
    "crowd": _crowd,
    "duplicates": _duplicates,
    "nowhere": _nowhere,
}


def routes_of(
    seed: int, rank: int, sizes: Sizes, tokens: int, routes: str = "plain"
) -> tuple[Tensor, Tensor]:
    """topk_idx int64 and topk_weights float32 ``[tokens, K]`` of any rank, without its tokens."""
    return ROUTES[routes](generator(seed, 4, rank), sizes, tokens)


def inputs(seed: int, rank: int, sizes: Sizes, tokens: int, routes: str = "plain") -> Inputs:
    """The tokens of one rank; ``routes`` is a key of ``ROUTES``."""
    values = torch.randn(tokens, sizes.hidden, generator=generator(seed, 1, rank))
    raw = (values * sizes.input_scale).bfloat16()
    return Inputs(raw, *quantised(raw, sizes.mma_type), *routes_of(seed, rank, sizes, tokens, routes))


# Weights ----------------------------------------------------------------------------------------------------


@lru_cache(maxsize=8)
def _pool(seed: int, mma_type: str, rows: int, columns: int, weight_scale: float) -> Tensor:
    """Values of one layer of an expert before it is rolled."""
    g = generator(seed, 2, rows, columns)
    if mma_type == "fp8xfp4":
        return torch.randint(-128, 128, (rows, columns // 2), generator=g, dtype=torch.int8)
    values = torch.randn(rows, columns, generator=g)
    if mma_type == "bf16xbf16":
        return (values * weight_scale).bfloat16()
    return (values * FP8_SPREAD).clamp(-448, 448).to(torch.float8_e4m3fn)


def _rolled(pool: Tensor, g: torch.Generator) -> Tensor:
    rows, columns = (int(torch.randint(0, size, (), generator=g)) for size in pool.shape)
    raw = pool.view(torch.int16 if pool.dtype == torch.bfloat16 else torch.uint8)
    return torch.roll(raw, (rows, columns), (0, 1)).view(pool.dtype)


def _layer(seed: int, sizes: Sizes, expert: int, rows: int, columns: int) -> tuple[Tensor, Tensor | None]:
    mma_type = sizes.mma_type
    g = generator(seed, 3, expert, rows, columns)
    values = _rolled(_pool(seed, mma_type, rows, columns, sizes.weight_scale), g)
    if mma_type == "bf16xbf16":
        return values, None
    if mma_type == "fp8xfp4":
        exponent = round(float(torch.log2(torch.tensor(sizes.weight_scale / FP4_SPREAD))))
        near = torch.randint(-1, 2, (rows, columns // 128, 4), generator=g) + exponent + 127
        return values, near.to(torch.uint8).view(torch.int32).squeeze(-1)
    shape = (rows,) if mma_type == "w8a8" else (rows // 128, columns // 128)
    return values, (0.5 + torch.rand(shape, generator=g)) * (sizes.weight_scale / FP8_SPREAD)


def expert(seed: int, sizes: Sizes, number: int) -> Expert:
    """The weights of one expert by its global id, gate rows first, in no kernel's order."""
    hidden, intermediate = sizes.hidden, sizes.intermediate
    l1 = _layer(seed, sizes, number, 2 * intermediate, hidden)
    l2 = _layer(seed, sizes, number, hidden, intermediate)
    return Expert(*l1, *l2)


def _stack(parts: Sequence[Tensor | None], empty: Tensor | None) -> Tensor | None:
    if empty is None:
        return None
    return torch.stack([part for part in parts if part is not None]) if parts else empty[None][:0]


def rank_weights(seed: int, rank: int, sizes: Sizes) -> dict[str, Tensor | None]:
    """l1, l1_sf, l2, l2_sf of the experts that ``rank`` owns, which may be none."""
    mine = [expert(seed, sizes, i) for i in local_experts(sizes.num_experts, sizes.ranks, rank)]
    one = mine[0] if mine else expert(seed, sizes, 0)
    return {name: _stack([getattr(e, name) for e in mine], getattr(one, name)) for name in vars(one)}


def rank_data(seed: int, rank: int, sizes: Sizes, tokens: int, routes: str = "plain") -> RankData:
    """All that one rank holds, as the oracle takes it."""
    given = inputs(seed, rank, sizes, tokens, routes)
    held: dict[str, Any] = rank_weights(seed, rank, sizes)
    return RankData(given.x, given.x_sf, given.topk_idx, given.topk_weights, **held)


def prepared(held: RankData, mma_type: str) -> tuple[Pair, Pair]:
    """The weights of a rank as the public function of that format takes them."""
    if mma_type == "bf16xbf16":
        return tuple(mega_weights.transform_weights_for_mega_moe(held.l1, held.l2))
    if mma_type == "w8a8":
        marlin = mega_weights.weight8bit_nt_kpack2_marlin
        return (marlin(held.l1), held.l1_sf), (marlin(held.l2), held.l2_sf)
    transform = {
        "fp8_block": mega_weights.transform_weights_for_mega_moe_sm90,
        "fp8xfp4": mega_weights.transform_weights_for_mega_moe,
    }[mma_type]
    return tuple(transform((held.l1, held.l1_sf), (held.l2, held.l2_sf)))


def prepared_by_expert(seed: int, rank: int, sizes: Sizes) -> tuple[Pair, Pair]:
    """``prepared`` of this rank's experts, one at a time: at full size only one is held twice."""
    if sizes.mma_type != "w8a8":
        held: dict[str, Any] = rank_weights(seed, rank, sizes)
        empty = torch.empty(0)
        return prepared(RankData(empty, None, empty, empty, **held), sizes.mma_type)
    local = local_experts(sizes.num_experts, sizes.ranks, rank)
    hidden, rows = sizes.hidden, 2 * sizes.intermediate
    l1 = torch.empty(len(local), rows // 16, hidden * 16, dtype=torch.float8_e4m3fn)
    l2 = torch.empty(len(local), hidden // 16, sizes.intermediate * 16, dtype=torch.float8_e4m3fn)
    l1_sf, l2_sf = torch.empty(len(local), rows), torch.empty(len(local), hidden)
    for i, number in enumerate(local):
        one = expert(seed, sizes, number)
        l1[i], l2[i] = (mega_weights.weight8bit_nt_kpack2_marlin(w[None])[0] for w in (one.l1, one.l2))
        assert one.l1_sf is not None
        assert one.l2_sf is not None
        l1_sf[i], l2_sf[i] = one.l1_sf, one.l2_sf
    return (l1, l1_sf), (l2, l2_sf)


# The golden of the public kernel ----------------------------------------------------------------------------


def golden(folder: Path) -> tuple[list[RankData], list[Tensor]]:
    """Both ranks' data and y of the public kernel (fp8_block, two H200).

    ``folder`` holds either the two whole files or their cut, ``mega.safetensors``. The cut keeps the first
    columns of y and rows of the second layer; the missing rows of that layer come back as zeros here, and y
    as short as it is.

    Raises:
        FileNotFoundError: it holds neither.
    """
    from safetensors.torch import load_file

    cut = folder / "mega.safetensors"
    ranks, outputs = [], []
    for rank in range(2):
        name = f"mega_fp8_block_ep2_rank{rank}"
        tensors = load_file(cut if cut.exists() else folder / f"{name}.safetensors")
        prefix = f"fp8_block_ep2_rank{rank}/" if cut.exists() else ""
        held = {key.split("/")[-1]: t for key, t in tensors.items() if key.startswith(prefix)}
        outputs.append(held.pop("y"))
        hidden = held["x"].shape[1]
        whole = torch.zeros(len(held["l2"]), hidden, held["l2"].shape[2]).to(held["l2"].dtype)
        whole[:, : held["l2"].shape[1]] = held["l2"]
        sf = torch.ones(len(whole), hidden // 128, held["l2_sf"].shape[2])
        sf[:, : held["l2_sf"].shape[1]] = held["l2_sf"]
        ranks.append(RankData(**{**held, "l2": whole, "l2_sf": sf}))
    return ranks, outputs
