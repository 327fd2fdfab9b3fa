"""Mega MoE on rows: which routes are live, the two products, what stands between them, and the sum of slots.

Pure functions on a few rows at a time. All rounding points of the operation are here: gate and up (to bf16 in
``w8a8`` alone), the cast between the products, the rows that go back (bf16), and the sum (float32, in the
order of the slots, rounded once).
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from dg_core.mega.layout import Format, live
from dg_core.mega.weights import ExpertWeights
from dg_core.quant import per_token_cast_to_fp8

from .operand import TILE, Operand, product, steps


def live_routes(idx: Tensor, weight: Tensor, count: int, experts: range) -> Tensor:
    """The routes of one rank's first ``count`` tokens to ``experts``, by token and slot.

    Args:
        idx: int64 ``[>= count, topk]``, any values; ids of no expert drop the slot.
        weight: float32, like ``idx``; 0 drops the slot.
        experts: ids of consecutive experts, none if empty.

    Returns:
        int32 ``[n, 3]``: token, slot, and the expert counted from the first of ``experts``.
    """
    places = live(idx[:count], weight[:count], experts).nonzero()
    local = idx[places[:, 0], places[:, 1]] - experts.start
    return torch.cat([places, local[:, None]], 1).to(torch.int32)


def _multiply(a: Tensor, sf: Tensor | None, w: ExpertWeights, fmt: Format, dtype: torch.dtype) -> Tensor:
    """``a @ W.T`` with both sides' scales, float32 sums rounded once to ``dtype``."""
    left, right = Operand(a, sf, fmt.row_scales), Operand(w.values, w.sf, w.fmt)
    out = torch.empty(a.shape[0], w.values.shape[0], dtype=dtype, device=a.device)
    for columns in steps(out.shape[1], TILE):
        out[:, columns] = product([(left, right)], slice(0, len(a)), columns, a.shape[1], a.device).to(dtype)
    return out


def l1_rows(x: Tensor, x_sf: Tensor | None, w: ExpertWeights, fmt: Format) -> Tensor:
    """Gate and up of some rows of one expert.

    Args:
        x: ``[n, H]`` in the format's dtype; x_sf: its scales, None in ``bf16xbf16``.
        w: ``[2I, H]``, gate rows first.

    Returns:
        ``[n, 2I]``, gate columns first, in the format's ``gu_dtype``.
    """
    return _multiply(x, x_sf, w, fmt, fmt.gu_dtype)


def swiglu_rows(gu: Tensor, weight: Tensor, clamp: float) -> Tensor:
    """``silu(gate) * up * weight`` in float32.

    Args:
        gu: ``[n, 2I]``, gate columns first. weight: float32 ``[n]``, the routing weights.
        clamp: gate is held below it, up within plus and minus it; inf for neither.

    Returns:
        float32 ``[n, I]``.
    """
    gate, up = gu.float().chunk(2, 1)
    if clamp != math.inf:
        gate, up = gate.clamp(max=clamp), up.clamp(-clamp, clamp)
    return gate / (1 + torch.exp(-gate)) * up * weight.float()[:, None]


def quantise_rows(h: Tensor, fmt: Format) -> tuple[Tensor, Tensor | None]:
    """The rows between the products, float32 ``[n, I]``, as the second product takes them.

    Returns:
        The rows in the format's ``act_dtype`` and their scales: float32 ``[n]`` (``w8a8``), powers of two in
        float32 ``[n, I / 128]`` (``fp8_block``) or packed in int32 ``[n, I / 128]`` (``fp8xfp4``), or None.
    """
    if fmt.sf_gran is None:
        return h.to(fmt.act_dtype), None
    if fmt.sf_gran == 0:
        values, sf = per_token_cast_to_fp8(h, False, gran_k=h.shape[1])
        return values, sf.squeeze(1)
    return per_token_cast_to_fp8(h, True, gran_k=fmt.sf_gran, use_packed_ue8m0=fmt.sf_packed)


def l2_rows(a: Tensor, sf: Tensor | None, w: ExpertWeights, fmt: Format) -> Tensor:
    """What goes back to the tokens: ``a`` ``[n, I]`` times one expert's ``[H, I]``, bf16 ``[n, H]``."""
    return _multiply(a, sf, w, fmt, torch.bfloat16)


def combine_rows(combine: Tensor, idx: Tensor, weight: Tensor, count: int, num_experts: int) -> Tensor:
    """The sum of each token's slots, slot after slot in float32, rounded once.

    Args:
        combine: bf16 ``[topk, >= count, H]``. Rows of dropped slots may hold anything, NaN included; they
            count as exactly 0.
        idx, weight: ``[>= count, topk]``, which slots are live.

    Returns:
        bf16 ``[count, H]``.
    """
    kept = live(idx[:count], weight[:count], range(num_experts))
    total = torch.zeros(count, combine.shape[2], dtype=torch.float32, device=combine.device)
    for slot, rows in enumerate(combine):
        total += torch.where(kept[:, slot, None], rows[:count].float(), 0.0)
    return total.to(torch.bfloat16)
