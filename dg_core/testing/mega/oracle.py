"""Mega MoE in float64, from the meaning of the operation alone: what every backend is compared with.

Nothing here uses a backend, `dg_core.quant` or `dg_core.mega.weights`: number formats are decoded by tables
that are built from their definitions, values are rounded by arithmetic, routes are walked one expert at a
time. Products and elementwise steps are float64 on dequantised operands; what is rounded is what the
operation rounds: in ``w8a8`` g and u to bfloat16, then h to its format, the product of the second layer to
bfloat16, and y to bfloat16.

A float32 implementation differs from this by a few 1e-7 of a row's values, so an h that lies that close to a
midpoint of e4m3 may round to the other side, and one such byte moves y by several percent of its rms. Such
tokens are *fragile*: found by adding 5e-7 of the row's rms to g and u with several patterns of signs, 5e-7 of
itself to h, and rounding again.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from ..numeric import calc_diff

#: End to end against another implementation of the same rounding points.
MAX_DIFF = 5e-5
MAX_ABS_OVER_RMS = 0.05
#: How far, over the rms of a row, float32 sums are taken to lie from float64 ones, and the patterns of signs
#: tried.
JITTER = 5e-7
PATTERNS = 6


class Tokens(Protocol):
    """One rank's inputs, as ``RankData`` describes them."""

    @property
    def x(self) -> Tensor: ...
    @property
    def x_sf(self) -> Tensor | None: ...
    @property
    def topk_idx(self) -> Tensor: ...
    @property
    def topk_weights(self) -> Tensor: ...


@dataclass(frozen=True)
class RankData:
    """What one rank holds, weights untransformed, gate rows (0..I-1) before up rows.

    Attributes:
        x: ``[n, H]``, e4m3 or (bf16xbf16) bfloat16.
        x_sf: float32 ``[n]`` (w8a8), float32 ``[n, H/128]`` (fp8_block), int32 ``[n, H/128]`` with four
            exponents of 32 columns a word (fp8xfp4), or None.
        topk_idx: int64 ``[n, K]``, global expert ids. topk_weights: float32 ``[n, K]``.
        l1, l2: ``[E_local, 2I, H]`` and ``[E_local, H, I]``: e4m3, int8 with two e2m1 codes a byte along K
            (fp8xfp4), or bfloat16.
        l1_sf, l2_sf: float32 ``[E_local, rows]`` (w8a8), float32 ``[E_local, rows/128, K/128]`` (fp8_block),
            int32 ``[E_local, rows, K/128]`` or float32 ``[E_local, rows, K/32]`` (fp8xfp4), or None.
    """

    x: Tensor
    x_sf: Tensor | None
    topk_idx: Tensor
    topk_weights: Tensor
    l1: Tensor
    l1_sf: Tensor | None
    l2: Tensor
    l2_sf: Tensor | None


@dataclass(frozen=True)
class Expert:
    """One expert's weights, as ``RankData`` describes them without the first axis."""

    l1: Tensor
    l1_sf: Tensor | None
    l2: Tensor
    l2_sf: Tensor | None


@dataclass(frozen=True)
class Expected:
    """``y`` float64 ``[n, H]`` holding bfloat16 values, ``fragile`` bool ``[n]``, and the routes served."""

    y: Tensor
    fragile: Tensor
    routes: int


# Number formats ---------------------------------------------------------------------------------------------


def _e4m3_table() -> Tensor:
    """float64 of every byte: sign, four bits of exponent with bias 7, three of mantissa; 127 alone is NaN."""
    values = []
    for byte in range(256):
        exponent, mantissa = byte % 128 // 8, byte % 8
        size = mantissa * 2.0**-9 if exponent == 0 else (8 + mantissa) * 2.0 ** (exponent - 10)
        values.append((-1.0 if byte >= 128 else 1.0) * (math.nan if byte % 128 == 127 else size))
    return torch.tensor(values, dtype=torch.float64)


E4M3 = _e4m3_table()
E2M1 = torch.tensor(
    [sign * size for sign in (1.0, -1.0) for size in (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)],
    dtype=torch.float64,
)


def _bytes(x: Tensor) -> Tensor:
    return x.contiguous().view(torch.uint8).to(torch.int32)


def _looked_up(table: Tensor, codes: Tensor, dtype: torch.dtype) -> Tensor:
    return table.to(dtype).index_select(0, codes.flatten()).view(codes.shape)


def decode(x: Tensor, dtype: torch.dtype = torch.float64) -> Tensor:
    """e4m3, packed e2m1 (int8, low nibble first) or bfloat16 -> ``dtype``, exactly."""
    if x.dtype == torch.float8_e4m3fn:
        return _looked_up(E4M3, _bytes(x), dtype)
    if x.dtype == torch.int8:
        codes = _bytes(x)
        return _looked_up(E2M1, torch.stack((codes % 16, codes // 16), -1).flatten(-2), dtype)
    return x.to(dtype)


def decode_exponents(words: Tensor) -> Tensor:
    """int32 ``[.., n]`` with four biased exponents each, lowest byte first -> float64 ``[.., 4 n]``."""
    exponents = _bytes(words[..., None]).flatten(-2)
    return torch.where(exponents == 0, 0.0, torch.exp2(exponents.double() - 127))


def round_e4m3(x: Tensor) -> Tensor:
    """The nearest e4m3 value, ties to the even mantissa, saturating at 448; in x's dtype."""
    exponent = torch.frexp(x.abs())[1] - 1
    step = torch.exp2((exponent.clamp(min=-6) - 3).to(x.dtype))
    # torch.round takes halves to even, and an even count of steps is an even mantissa.
    return (torch.round(x / step) * step).clamp(-448, 448)


def round_bf16(x: Tensor) -> Tensor:
    """The nearest bfloat16 value, ties to even, in x's dtype."""
    exponent = torch.frexp(x)[1] - 1
    step = torch.exp2(
        (exponent.clamp(min=-119) - 7).to(x.dtype)
    )  # 2^-126 and its steps are normal in float32
    return torch.round(x / step) * step


# One layer's operands ---------------------------------------------------------------------------------------


def dequantise_rows(x: Tensor, sf: Tensor | None, dtype: torch.dtype = torch.float64) -> Tensor:
    """Rows ``[n, K]`` with scales a row, per 128 columns, or packed per 32 -> ``[n, K]``."""
    values = decode(x, dtype)
    if sf is None:
        return values
    scales = (decode_exponents(sf) if sf.dtype == torch.int32 else sf).to(dtype)
    scales = scales.reshape(len(x), -1 if len(x) else 1)
    columns = torch.arange(values.shape[1]) * scales.shape[1] // values.shape[1]
    return values * scales[:, columns]


def dequantise_weight(w: Tensor, sf: Tensor | None, dtype: torch.dtype = torch.float64) -> Tensor:
    """One expert's ``[rows, K]`` with scales per row, per 128 x 128 or per row and 32 columns."""
    values = decode(w, dtype)
    if sf is None:
        return values
    scales = (decode_exponents(sf) if sf.dtype == torch.int32 else sf).to(dtype)
    scales = scales.reshape(scales.shape[0], -1)
    # A view by blocks: each scale covers as many rows and columns as the shapes say.
    (rows, columns), (down, across) = values.shape, scales.shape
    blocks = values.view(down, rows // down, across, columns // across)
    return blocks.mul_(scales[:, None, :, None]).view(rows, columns)


def activate(gu: Tensor, weight: Tensor, clamp: float | None) -> Tensor:
    """``silu(g) * u * w`` of ``[n, 2I]`` -> float64 ``[n, I]``; a clamp bounds g above and u on both
    sides."""
    gate, up = gu.chunk(2, -1)
    if clamp is not None:
        gate, up = gate.clamp(max=clamp), up.clamp(-clamp, clamp)
    return gate / (1 + torch.exp(-gate)) * up * weight[:, None]


def requantise(h: Tensor, mma_type: str) -> Tensor:
    """h as the second layer sees it, dequantised: float64 ``[n, I]``."""
    if mma_type == "bf16xbf16":
        return round_bf16(h)
    columns = {"w8a8": h.shape[1], "fp8_block": 128, "fp8xfp4": 32}[mma_type]
    blocks = h.reshape(len(h), h.shape[1] // columns, columns)
    sf = blocks.abs().amax(-1, keepdim=True).clamp(min=1e-4) / 448
    if mma_type != "w8a8":
        mantissa, exponent = torch.frexp(sf)  # mantissa in [0.5, 1): 0.5 is a power of two already
        sf = torch.exp2((exponent - (mantissa == 0.5).int()).to(h.dtype))
    return (round_e4m3(blocks / sf) * sf).reshape(h.shape)


def _activated(gu: Tensor, weight: Tensor, mma_type: str, clamp: float | None) -> Tensor:
    return activate(round_bf16(gu) if mma_type == "w8a8" else gu, weight, clamp)


def _fragile_rows(gu: Tensor, a: Tensor, weight: Tensor, mma_type: str, clamp: float | None) -> Tensor:
    """Rows whose second operand changes visibly when g and u move by float32's error."""
    if mma_type == "bf16xbf16":
        return torch.zeros(len(gu), dtype=torch.bool)  # a step of bfloat16 is nothing that a bound would see
    if not len(gu):
        return torch.zeros(0, dtype=torch.bool)
    generator = torch.Generator().manual_seed(len(gu))
    reach = JITTER * gu.square().mean(-1, keepdim=True).sqrt()
    fragile = torch.zeros(len(gu), dtype=torch.bool)
    for _ in range(PATTERNS):
        signs = torch.randint(0, 2, gu.shape, generator=generator).to(gu.dtype) * 2 - 1
        # h moves by as much again: it is a few roundings away from g and u, which w8a8 rounds to bfloat16.
        h = _activated(gu + reach * signs, weight, mma_type, clamp) * (1 + JITTER * signs[:, : a.shape[1]])
        moved = requantise(h, mma_type)
        # A flipped byte moves an element by 1/16 to 1/8 of it. With 128 products a sum, 1 % of the row's
        # largest h is at most 0.02 of the rms of y.
        fragile |= ((moved - a).abs() > 1e-2 * a.abs().amax(-1, keepdim=True)).any(-1)
    return fragile


def expert_rows(
    x: Tensor, x_sf: Tensor | None, weight: Tensor, expert: Expert, mma_type: str, clamp: float | None,
    dtype: torch.dtype = torch.float64,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """All rows that one expert serves: p ``[n, H]`` rounded to bfloat16, and which rows are fragile."""
    gu = dequantise_rows(x, x_sf, dtype) @ dequantise_weight(expert.l1, expert.l1_sf, dtype).T
    a = requantise(_activated(gu, weight.to(dtype), mma_type, clamp), mma_type)
    p = round_bf16(a @ dequantise_weight(expert.l2, expert.l2_sf, dtype).T)
    return p, _fragile_rows(gu, a, weight.to(dtype), mma_type, clamp)


# The operation ----------------------------------------------------------------------------------------------


def live(topk_idx: Tensor, topk_weights: Tensor, num_experts: int) -> Tensor:
    """bool ``[n, K]``: the routes that exist. Any id outside ``[0, num_experts)`` and any weight 0 drops
    one."""
    return (topk_idx >= 0) & (topk_idx < num_experts) & (topk_weights != 0)


def combined(
    rank: Tokens, experts: Callable[[int], Expert], num_experts: int, mma_type: str, clamp: float | None,
    dtype: torch.dtype = torch.float64,
) -> Expected:  # fmt: skip
    """y of one rank's own tokens; ``experts`` gives any expert of the group by its global id.

    float32 takes a fifth of the time at full size; it is close enough to show what is wrong, and no more.
    """
    tokens, topk = rank.topk_idx.shape
    hidden = rank.x.shape[1]
    slots = torch.zeros(tokens, topk, hidden, dtype=torch.float64)
    fragile = torch.zeros(tokens, dtype=torch.bool)
    alive = live(rank.topk_idx, rank.topk_weights, num_experts)
    for expert in sorted(set(rank.topk_idx[alive].tolist())):
        token, slot = ((rank.topk_idx == expert) & alive).nonzero(as_tuple=True)
        sf = None if rank.x_sf is None else rank.x_sf[token]
        weight = rank.topk_weights[token, slot]
        x = rank.x.view(torch.uint8)[token].view(rank.x.dtype)  # torch 2.9 takes no e4m3 by index
        p, shaky = expert_rows(x, sf, weight, experts(expert), mma_type, clamp, dtype)
        slots[token, slot] = p.double()
        fragile[token[shaky]] = True
    # Sums of K bfloat16 values are exact in float64, in any order, up to spreads that no sum here has.
    return Expected(round_bf16(slots.sum(1)), fragile, int(alive.sum()))


def owned(ranks: Sequence[RankData]) -> Iterator[Expert]:
    """The experts of all ranks in the order of their global ids: ranks own consecutive ranges of them."""
    for rank in ranks:
        for i in range(len(rank.l1)):
            sf = [None if scales is None else scales[i] for scales in (rank.l1_sf, rank.l2_sf)]
            yield Expert(rank.l1[i], sf[0], rank.l2[i], sf[1])


def expected(ranks: Sequence[RankData], mma_type: str, clamp: float | None = None) -> list[Expected]:
    """Every rank's y with its fragile tokens."""
    experts = list(owned(ranks))
    return [combined(rank, experts.__getitem__, len(experts), mma_type, clamp) for rank in ranks]


def mega_moe(ranks: Sequence[RankData], mma_type: str, clamp: float | None = None) -> list[Tensor]:
    """Every rank's y, bfloat16 ``[n, H]``; dropped routes contribute exactly nothing."""
    return [result.y.bfloat16() for result in expected(ranks, mma_type, clamp)]


def recv_stats(topk: Sequence[tuple[Tensor, Tensor]], num_experts: int) -> Tensor:
    """int32 ``[E]``: live routes of every expert over all ranks' ``(topk_idx, topk_weights)``."""
    counts = torch.zeros(num_experts, dtype=torch.int32)
    for topk_idx, topk_weights in topk:
        chosen = topk_idx[live(topk_idx, topk_weights, num_experts)]
        counts += torch.bincount(chosen, minlength=num_experts).to(torch.int32)
    return counts


def check(y: Tensor, want: Expected, label: str = "y") -> float:
    """Assert that y is what the oracle expects, and return calc_diff.

    All tokens together within ``MAX_DIFF``; tokens that are not fragile within ``MAX_ABS_OVER_RMS`` of the
    rms; at most a tenth (or two) of the tokens fragile; tokens without a live route exactly zero.
    """
    assert y.dtype == torch.bfloat16, f"{label} is {y.dtype}"
    assert y.shape == want.y.shape, f"{label} has shape {tuple(y.shape)}, expected {tuple(want.y.shape)}"
    if not want.y.numel():
        return 0.0
    empty = (want.y == 0).all(-1)
    assert not y[empty].any(), f"{label}: tokens without a live route must be exactly 0"
    diff = calc_diff(y, want.y)
    assert diff <= MAX_DIFF, f"{label}: calc_diff {diff:.3g} is over {MAX_DIFF}"
    count = int(want.fragile.sum())
    assert count <= max(2, len(y) // 10), (
        f"{label}: {count} of {len(y)} tokens are fragile, so little is shown"
    )
    firm = ~want.fragile
    error, rms = (y.double() - want.y).abs(), float(want.y.square().mean().sqrt())
    worst = float(error[firm].max()) if firm.any() else 0.0
    assert worst <= MAX_ABS_OVER_RMS * rms, f"{label}: max_abs {worst:.3g} at rms {rms:.3g}"
    return diff
