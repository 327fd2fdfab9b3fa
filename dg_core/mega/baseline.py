"""The unfused way to the same result, in pieces: what a program does that dispatches with DeepEP, multiplies
with grouped products and combines again. Programs compare the fused call with it.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .. import config
from ..errors import ShapeError
from ..rules import flag, integer, one_device, takes, tensor
from . import routing
from .layout import FORMATS, MAX_RANKS, MAX_TOPK, SIZE_ALIGNMENT, Format
from .weights import cast_to_fp8_channelwise

_IDS = (torch.int32, torch.int64)
_OPERATOR = "fp8_w8a8_mega_moe"
_MODE, _THRESHOLD = "MEGAMOE_DCU_USE_LARGE_OPT_3STAGE", "MEGAMOE_DCU_LARGE_OPT_3STAGE_TOKEN_THRESHOLD"


def _axis(op: str, **named: tuple[Tensor, tuple[int, ...], str]) -> None:
    """Hold tensors against their shapes: (tensor, the shape, how the signature writes it)."""
    for name, (x, shape, signature) in named.items():
        if tuple(x.shape) != shape:
            raise ShapeError(f"{op}: {name} has shape {tuple(x.shape)}; it must be {signature} = {shape}")
    one_device(op, **{name: x for name, (x, _, _) in named.items()})


@takes(
    recv_x=tensor(torch.float8_e4m3fn, axes=(2,)),
    recv_x_scale=tensor(torch.float32, axes=(1, 2)),
    recv_topk_ids=tensor(*_IDS, axes=(2,)),
    recv_topk_weights=tensor(torch.float32, axes=(2,)),
    num_recv_tokens_per_expert=tensor(torch.int32, axes=(1,)),
    all_tokens=integer(0),
)
def deepep_deepgemm_preprocess_channelwise(
    recv_x: Tensor,
    recv_x_scale: Tensor,
    recv_topk_ids: Tensor,
    recv_topk_weights: Tensor,
    num_recv_tokens_per_expert: Tensor,
    all_tokens: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Scatter received tokens to rows sorted by local expert, for a grouped product with rows contiguous.

    Expert e has the rows from the sum of the counts before it on, as many as its own count (which may be
    rounded up by whoever counted). Its routes take them in order of (token, slot). Rows that no route takes
    are 0 with scale 0, weight 0 and label -1. No value is read on the host.

    Args:
        recv_x: e4m3fn ``[rows, hidden]``. recv_x_scale: float32 ``[rows]`` or ``[rows, 1]``.
        recv_topk_ids: int32 or int64 ``[rows, topk]``, local ids; one that is negative or too large is no
            route, nor is one past its expert's count.
        recv_topk_weights: float32 ``[rows, topk]``.
        num_recv_tokens_per_expert: int32 ``[experts]``.
        all_tokens: the sum of these counts.

    Returns:
        e4m3fn ``[max(all_tokens, 1), hidden]``, its scales float32, route weights float32, labels
        ``m_indices`` int32, and ``output_index`` int32 ``[rows, topk]``: the row of each route, -1 for none.

    Raises:
        ShapeError, DTypeError, DeviceError, ArgumentError: an argument breaks its signature.
    """
    op, counts = "deepep_deepgemm_preprocess_channelwise", num_recv_tokens_per_expert
    (rows, hidden), topk = recv_x.shape, recv_topk_ids.shape[1]
    scale_shape = (rows,) if recv_x_scale.dim() == 1 else (rows, 1)
    _axis(
        op,
        recv_x=(recv_x, (rows, hidden), "[rows, hidden]"),
        recv_x_scale=(recv_x_scale, scale_shape, "[rows] or [rows, 1]"),
        recv_topk_ids=(recv_topk_ids, (rows, topk), "[rows, topk]"),
        recv_topk_weights=(recv_topk_weights, (rows, topk), "[rows, topk]"),
        num_recv_tokens_per_expert=(
            num_recv_tokens_per_expert,
            (len(num_recv_tokens_per_expert),),
            "[experts]",
        ),
    )
    device, total = recv_x.device, max(all_tokens, 1)
    row = _rows_of_routes(recv_topk_ids, counts, all_tokens)
    taken = row >= 0
    # What takes no row goes to one behind the last, which is cut off.
    place = torch.where(taken, row, total)
    token = torch.arange(rows, device=device).repeat_interleave(topk)
    x8 = torch.zeros(total + 1, hidden, dtype=torch.uint8, device=device)
    x8[place] = recv_x.view(torch.uint8)[token]
    scale = torch.zeros(total + 1, dtype=torch.float32, device=device)
    scale[place] = recv_x_scale.reshape(-1)[token]
    weights = torch.zeros(total + 1, dtype=torch.float32, device=device)
    weights[place] = recv_topk_weights.reshape(-1)
    m_indices = torch.full((total + 1,), -1, dtype=torch.int32, device=device)
    m_indices[place] = recv_topk_ids.reshape(-1).to(torch.int32)
    output_index = row.to(torch.int32).view(rows, topk)
    return x8[:total].view(recv_x.dtype), scale[:total], weights[:total], m_indices[:total], output_index


def _rows_of_routes(ids: Tensor, counts: Tensor, total: int) -> Tensor:
    """int64 ``[rows * topk]``: the grouped row of each route, -1 where it has none."""
    flat, experts = ids.reshape(-1).to(torch.int64), counts.shape[0]
    key = torch.where((flat >= 0) & (flat < experts), flat, experts)
    order = key.argsort(stable=True)
    ordered = key[order]
    room = torch.cat((counts.to(torch.int64).clamp(min=0), counts.new_zeros(1, dtype=torch.int64)))
    ends = room.cumsum(0)
    first = torch.searchsorted(ordered, torch.arange(experts + 1, device=ids.device))
    place = torch.arange(flat.shape[0], device=ids.device) - first[ordered]
    row = (ends - room)[ordered] + place
    row = torch.where((place < room[ordered]) & (row < total), row, -1)
    return torch.empty_like(row).scatter_(0, order, row)


@takes(
    recv_y=tensor(torch.bfloat16, axes=(2,)),
    l2_out=tensor(torch.bfloat16, axes=(2,)),
    recv_topk_ids=tensor(*_IDS, axes=(2,)),
    recv_topk_weights=tensor(torch.float32, axes=(2,)),
    output_index=tensor(torch.int32, axes=(2,)),
    apply_topk_weights=flag,
)
def deepep_deepgemm_postprocess_channelwise(
    recv_y: Tensor,
    l2_out: Tensor,
    recv_topk_ids: Tensor,
    recv_topk_weights: Tensor,
    output_index: Tensor,
    apply_topk_weights: bool = False,
) -> None:
    """Add up the rows of each received token: ``recv_y[t] = sum over s of l2_out[output_index[t, s]]``, in
    float32 in the order of slots, rounded to bfloat16 once.

    Args:
        recv_y: bfloat16 ``[rows, hidden]``, written; 0 where a token has no route.
        l2_out: bfloat16 ``[any, hidden]``.
        recv_topk_ids, recv_topk_weights: ``[rows, topk]``, as for the preprocess; a negative id is no route.
        output_index: int32 ``[rows, topk]``, from the preprocess; one out of range is no route.
        apply_topk_weights: multiply each row by its route's weight; where SwiGLU has done that, leave it.

    Raises:
        ShapeError, DTypeError, DeviceError, ArgumentError: an argument breaks its signature.
    """
    (rows, hidden), topk = recv_y.shape, recv_topk_ids.shape[1]
    _axis(
        "deepep_deepgemm_postprocess_channelwise",
        recv_y=(recv_y, (rows, hidden), "[rows, hidden]"),
        l2_out=(l2_out, (l2_out.shape[0], hidden), "[any, hidden]"),
        recv_topk_ids=(recv_topk_ids, (rows, topk), "[rows, topk]"),
        recv_topk_weights=(recv_topk_weights, (rows, topk), "[rows, topk]"),
        output_index=(output_index, (rows, topk), "[rows, topk]"),
    )
    count = l2_out.shape[0]
    total = torch.zeros(rows, hidden, dtype=torch.float32, device=recv_y.device)
    with torch.no_grad():
        for slot in range(topk if count else 0):
            index = output_index[:, slot].to(torch.int64)
            live = ((index >= 0) & (index < count) & (recv_topk_ids[:, slot] >= 0)).unsqueeze(1)
            part = l2_out[index.clamp(0, count - 1)].float()
            if apply_topk_weights:
                part = part * recv_topk_weights[:, slot, None]
            # Not a product with 0: what a dead slot points at may be anything, NaN included.
            total += torch.where(live, part, 0.0)
        recv_y.copy_(total)


@takes(
    x=tensor(floating=True, axes=(2,)),
    topk_idx=tensor(*_IDS, axes=(2,)),
    topk_weights=tensor(torch.float32, axes=(2,)),
    out_fp8=tensor(torch.float8_e4m3fn, axes=(2,)),
    out_scale=tensor(torch.float32, axes=(1,)),
    out_topk_idx=tensor(*_IDS, axes=(2,)),
    out_topk_weights=tensor(torch.float32, axes=(2,)),
)
def pre_dispatch_fp8_channelwise_out(
    x: Tensor,
    topk_idx: Tensor,
    topk_weights: Tensor,
    out_fp8: Tensor,
    out_scale: Tensor,
    out_topk_idx: Tensor,
    out_topk_weights: Tensor,
) -> None:
    """Cast ``x`` with one scale a row, and copy ids and weights, into the first rows of given tensors.

    For a ``SymmBuffer`` of any format ``mega_moe_pre_dispatch`` does the same.

    Args:
        x: floating point ``[n, hidden]``. topk_idx, topk_weights: ``[n, topk]``.
        out_fp8, out_scale, out_topk_idx, out_topk_weights: ``[n or more, hidden]``, ``[n or more]`` and ``[n
            or more, topk]``; rows past n stay as they were.

    Raises:
        ShapeError, DTypeError, DeviceError: a tensor breaks its signature.
    """
    op = "pre_dispatch_fp8_channelwise_out"
    (n, hidden), topk = x.shape, topk_idx.shape[1]
    for name, out in (
        ("out_fp8", out_fp8), ("out_scale", out_scale), ("out_topk_idx", out_topk_idx),
        ("out_topk_weights", out_topk_weights),
    ):  # fmt: skip
        if out.shape[0] < n:
            raise ShapeError(f"{op}: {name} has {out.shape[0]} rows but x has {n}; it needs at least as many")
    _axis(
        op,
        x=(x, (n, hidden), "[n, hidden]"),
        topk_idx=(topk_idx, (n, topk), "[n, topk]"),
        topk_weights=(topk_weights, (n, topk), "[n, topk]"),
        out_fp8=(out_fp8, (out_fp8.shape[0], hidden), "[.., hidden]"),
        out_scale=(out_scale, (out_scale.shape[0],), "[..]"),
        out_topk_idx=(out_topk_idx, (out_topk_idx.shape[0], topk), "[.., topk]"),
        out_topk_weights=(out_topk_weights, (out_topk_weights.shape[0], topk), "[.., topk]"),
    )
    if n == 0:
        return
    with torch.no_grad():
        values, scale = cast_to_fp8_channelwise(x)
        out_fp8[:n].copy_(values)
        out_scale[:n].copy_(scale)
        out_topk_idx[:n].copy_(topk_idx)
        out_topk_weights[:n].copy_(topk_weights)


def _scale_mode(fmt: Format) -> str:
    """How one scale of ``fmt`` is called: channelwise_fp32, block_fp32, or packed."""
    if fmt.sf_gran is None:
        return "none"
    return "packed_ue8m0" if fmt.sf_packed else "channelwise_fp32" if fmt.sf_gran == 0 else "block_fp32"


def get_mega_moe_hip_build_config() -> dict[str, Any]:
    """What ``import megamoe`` offers, under the keys that the DCU library answers with.

    ``large_opt_3stage_shape`` holds limits here instead of one shape, since no path is bound to a shape.
    """
    fmt = next(fmt for fmt in FORMATS.values() if _OPERATOR in fmt.functions)
    mode = _scale_mode(fmt)
    variables = config.VARIABLES
    return {
        "operator": _OPERATOR,
        "package": "megamoe",
        "weight_scale_mode": mode,
        "input_scale_mode": mode,
        "l2_act_scale_mode": mode,
        "has_fp8_api": fmt.act_dtype == torch.float8_e4m3fn,
        "has_fp4_api": False,  # of this package of names; dg_core itself has fp8_fp4_mega_moe
        "fusion_boundary": "dispatch_pool_l1_swiglu_quant_l2_combine",
        "large_opt_3stage_env": variables[_MODE].name,
        "large_opt_3stage_auto_values": tuple(sorted(routing.AUTO_WORDS)),
        "large_opt_3stage_threshold_env": variables[_THRESHOLD].name,
        "large_opt_3stage_default_threshold": variables[_THRESHOLD].default,
        "large_opt_3stage_shape": {
            "max_ranks": MAX_RANKS,
            "max_topk": MAX_TOPK,
            "hidden_multiple_of": SIZE_ALIGNMENT,
            "intermediate_hidden_multiple_of": SIZE_ALIGNMENT,
        },
        "cuda_graph_max_tokens_source": "requested num_max_tokens_per_rank",
        "cuda_graph_execution": "explicit_big_fused_or_large_opt_3stage",
    }
