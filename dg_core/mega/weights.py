"""Expert weights of Mega MoE: casts, the orders in which kernels want them, and the way back.

Plain order is ``[experts, rows, K]`` with K contiguous; the first product has ``2 * intermediate`` rows, gate
first and then up, and K = hidden; the second has ``hidden`` rows and K = intermediate. What each format's
``transform_...`` makes of it:

=========  ==========================================  ====================================================
format     values                                      scales
=========  ==========================================  ====================================================
w8a8       tiles of 16 x 16 bytes (or plain order)     float32, one a row
fp8_block  plain order                                 float32, one for 128 x 128
fp8xfp4    packed FP4, gate and up interleaved by 8    packed UE8M0 of 32, in 4 x 32 order, rows contiguous
bf16xbf16  gate and up interleaved by 8                none
=========  ==========================================  ====================================================
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..errors import ArgumentError, DTypeError, ShapeError
from ..layout import (
    BLOCK_128X128,
    PACKED_32,
    PACKED_FP4,
    PER_ROW,
    ScaleFormat,
    dtype_name,
    mn_major_aligned,
    pack_scales,
)
from ..quant import per_token_cast_to_fp8
from ..rules import integer, optional, takes, tensor
from . import routing
from .layout import SIZE_ALIGNMENT, SymmLayout, check_activation, local_experts

GATE_UP_GROUP = 8  # rows of gate, then as many of up: a lane of the kernel holds both of one column
MARLIN_TILE = 16
SF_BLOCK, SF_WARP = (
    128,
    32,
)  # scales of 128 rows are stored as 32 groups of 4: what tensor memory copies at once

_F8 = torch.float8_e4m3fn

Pair = tuple[Tensor, Tensor]


# Casts ------------------------------------------------------------------------------------------------------


def _cast_rows(x: Tensor) -> Pair:
    """``[rows, K]`` -> e4m3 and float32 ``[rows]``; a row of nothing has the scale of zeros."""
    k = x.shape[1]
    source = x if k else x.new_zeros(len(x), 1)
    values, sf = per_token_cast_to_fp8(source, False, gran_k=max(k, 1))
    return values[:, :k], sf.squeeze(1)


@takes(x=tensor(floating=True, axes=(2,)))
def cast_to_fp8_channelwise(x: Tensor) -> Pair:
    """``x`` ``[rows, K]`` of a floating-point dtype -> e4m3fn ``[rows, K]`` and float32 scales ``[rows]``.

    The scale of a row is ``max(amax|row|, 1e-4) / 448``, as ``per_token_cast_to_fp8`` takes it.

    Raises:
        ShapeError, DTypeError: ``x`` is not a floating-point matrix.
    """
    return _cast_rows(x)


@takes(weights=tensor(floating=True, axes=(3,)), chunk_rows=optional(integer()))
def cast_grouped_weight_to_fp8_channelwise(weights: Tensor, chunk_rows: int | None = None) -> Pair:
    """``weights`` ``[groups, rows, K]`` -> e4m3fn of that shape and float32 scales ``[groups, rows]``.

    Args:
        chunk_rows: rows that are cast at a time, which bounds the float32 copies; 0 or less casts all at
            once. None takes ``DG_MEGA_WEIGHT_CAST_CHUNK_ROWS`` or ``MEGAMOE_DCU_WEIGHT_CAST_CHUNK_ROWS`` as
            the environment has it now. The result is the same for every number.

    Raises:
        ShapeError, DTypeError: ``weights`` is not a floating-point tensor of three axes.
    """
    step = routing.weight_cast_chunk_rows() if chunk_rows is None else chunk_rows
    groups, rows, k = weights.shape
    flat = weights.reshape(groups * rows, k)
    if step <= 0:
        step = max(len(flat), 1)
    values = torch.empty(flat.shape, dtype=_F8, device=weights.device)
    sf = torch.empty(len(flat), dtype=torch.float32, device=weights.device)
    for start in range(0, len(flat), step):
        part = slice(start, start + step)
        values[part], sf[part] = _cast_rows(flat[part])
    return values.view(groups, rows, k), sf.view(groups, rows)


# Orders -----------------------------------------------------------------------------------------------------


@takes(weight=tensor(axes=(3,)), k_tile=integer(), n_tile=integer())
def weight8bit_nt_kpack2_marlin(weight: Tensor, k_tile: int = 16, n_tile: int = 16) -> Tensor:
    """``weight`` ``[groups, rows, K]`` of a one-byte dtype -> the same bytes in tiles, ``[groups, rows / 16,
    K * 16]``.

    Byte order: group, n / 16, k / 16, n % 16, k % 16, so that a tile of 16 rows x 16 columns is 256 bytes in
    a row and a strip of 16 rows is contiguous.

    Raises:
        ShapeError: there are not three axes, or rows or K are not multiples of 16.
        DTypeError: an element is not one byte.
        ArgumentError: a tile other than 16 x 16.
    """
    op, tile = "weight8bit_nt_kpack2_marlin", MARLIN_TILE
    if (k_tile, n_tile) != (tile, tile):
        raise ArgumentError(f"{op}: k_tile is {k_tile} and n_tile is {n_tile}; both must be {tile}")
    _check_bytes(op, "weight", weight)
    groups, rows, k = weight.shape
    for axis, size in ((1, rows), (2, k)):
        if size % tile:
            raise ShapeError(
                f"{op}: weight has shape {tuple(weight.shape)}; axis {axis} is {size} but must be a multiple "
                f"of {tile}"
            )
    raw = weight.contiguous().view(torch.uint8).view(groups, rows // tile, tile, k // tile, tile)
    return raw.transpose(2, 3).contiguous().view(groups, rows // tile, k * tile).view(weight.dtype)


@takes(packed=tensor(axes=(3,)), rows=integer(0), k=integer(0))
def unpack_marlin(packed: Tensor, rows: int, k: int) -> Tensor:
    """The inverse of ``weight8bit_nt_kpack2_marlin``: ``[groups, rows / 16, K * 16]`` -> ``[groups, rows,
    K]``.

    Raises:
        ShapeError: ``packed`` does not hold ``rows`` x ``k``.
        DTypeError: an element is not one byte.
    """
    op, tile = "unpack_marlin", MARLIN_TILE
    _check_bytes(op, "packed", packed)
    groups = packed.shape[0]
    if rows % tile or k % tile or tuple(packed.shape[1:]) != _marlin_shape(rows, k):
        raise ShapeError(
            f"{op}: packed has shape {tuple(packed.shape)}; [groups, {rows}, {k}] in tiles of {tile} x "
            f"{tile} is {(groups, *_marlin_shape(rows, k))}"
        )
    raw = packed.contiguous().view(torch.uint8).view(groups, rows // tile, k // tile, tile, tile)
    return raw.transpose(2, 3).contiguous().view(groups, rows, k).view(packed.dtype)


def _marlin_shape(rows: int, k: int) -> tuple[int, int]:
    return rows // MARLIN_TILE, k * MARLIN_TILE


def _check_bytes(op: str, name: str, x: Tensor) -> None:
    if x.element_size() != 1:
        raise DTypeError(f"{op}: {name} has dtype {dtype_name(x.dtype)}; its elements must be one byte")


def _check_rows(op: str, name: str, x: Tensor, multiple: int) -> None:
    if x.shape[-2] % multiple:
        raise ShapeError(
            f"{op}: {name} has shape {tuple(x.shape)}; axis -2 is {x.shape[-2]} but must be a multiple of "
            f"{multiple}"
        )


def _reorder(x: Tensor, blocks: int, outer: int, inner: int, group: int) -> Tensor:
    """The rows of ``x`` (axis -2), counted as ``blocks`` of ``outer`` x ``inner`` x ``group``, with ``inner``
    slowest in each block; a contiguous copy."""
    *lead, _, columns = x.shape
    split = x.view(*lead, blocks, outer, inner, group, columns).transpose(-4, -3)
    return split.clone(memory_format=torch.contiguous_format).view(x.shape)


@takes(w=tensor(least_axes=2), group=integer(1))
def interleave_gate_up(w: Tensor, group: int = GATE_UP_GROUP) -> Tensor:
    """``w`` ``[.., 2 I, K]``, gate rows and then up rows -> alternately ``group`` rows of each.

    Row ``2 * group * j + i`` of the result is gate row ``group * j + i``, and row ``2 * group * j + group +
    i`` is up row ``group * j + i``. Scales with a row for each row of weights are moved in the same way.

    Raises:
        ShapeError: the number of rows is not a multiple of ``2 * group``.
    """
    _check_rows("interleave_gate_up", "w", w, 2 * group)
    return _reorder(w, 1, 2, w.shape[-2] // (2 * group), group)


@takes(w=tensor(least_axes=2), group=integer(1))
def split_gate_up(w: Tensor, group: int = GATE_UP_GROUP) -> Tensor:
    """The inverse of ``interleave_gate_up``: all gate rows, then all up rows.

    Raises:
        ShapeError: the number of rows is not a multiple of ``2 * group``.
    """
    _check_rows("split_gate_up", "w", w, 2 * group)
    return _reorder(w, 1, w.shape[-2] // (2 * group), 2, group)


@takes(sf=tensor(least_axes=2))
def transpose_sf_4x32(sf: Tensor) -> Tensor:
    """``sf`` ``[.., rows, k]`` -> row ``32 a + b`` of every 128 at row ``4 b + a``.

    Raises:
        ShapeError: the number of rows is not a multiple of 128.
    """
    _check_rows("transpose_sf_4x32", "sf", sf, SF_BLOCK)
    return _reorder(sf, sf.shape[-2] // SF_BLOCK, SF_BLOCK // SF_WARP, SF_WARP, 1)


@takes(sf=tensor(least_axes=2))
def untranspose_sf_4x32(sf: Tensor) -> Tensor:
    """The inverse of ``transpose_sf_4x32``.

    Raises:
        ShapeError: the number of rows is not a multiple of 128.
    """
    _check_rows("untranspose_sf_4x32", "sf", sf, SF_BLOCK)
    return _reorder(sf, sf.shape[-2] // SF_BLOCK, SF_WARP, SF_BLOCK // SF_WARP, 1)


# Transforms -------------------------------------------------------------------------------------------------


def _sizes(op: str, l1: Any, l2: Any, names: tuple[str, str], packing: int = 1) -> tuple[int, int, int]:
    """Experts, hidden and intermediate of ``[E, 2 I, H / packing]`` and ``[E, H, I / packing]``."""
    for name, x in zip(names, (l1, l2), strict=True):
        tensor(axes=(3,))(op, name, x)
    experts, hidden, intermediate = l1.shape[0], l1.shape[2] * packing, l2.shape[2] * packing
    if tuple(l1.shape[:2]) != (experts, 2 * intermediate) or tuple(l2.shape[:2]) != (experts, hidden):
        width = "" if packing == 1 else f" / {packing}"
        raise ShapeError(
            f"{op}: {names[0]} has shape {tuple(l1.shape)} and {names[1]} {tuple(l2.shape)}; they must be "
            f"[experts, 2 * intermediate, hidden{width}] and [experts, hidden, intermediate{width}]"
        )
    for name, size in (("hidden", hidden), ("intermediate", intermediate)):
        if size <= 0 or size % SIZE_ALIGNMENT:
            raise ShapeError(
                f"{op}: {names[0]} {tuple(l1.shape)} and {names[1]} {tuple(l2.shape)} have {name} {size}; it "
                f"must be a positive multiple of {SIZE_ALIGNMENT}"
            )
    return experts, hidden, intermediate


def _pair(op: str, name: str, value: Any) -> Pair:
    if not isinstance(value, Sequence) or len(value) != 2:
        what = f"a {type(value).__name__}" + (f" of {len(value)}" if isinstance(value, Sequence) else "")
        raise DTypeError(f"{op}: {name} is {what}; it must be a pair (weights, scales)")
    values, sf = value
    tensor()(op, f"{name}[0]", values)
    tensor()(op, f"{name}[1]", sf)
    return values, sf


def _exact(op: str, name: str, x: Any, dtype: torch.dtype, *shapes: tuple[int, ...], words: str = "") -> None:
    tensor(dtype)(op, name, x)
    if tuple(x.shape) not in shapes:
        raise ShapeError(
            f"{op}: {name} has shape {tuple(x.shape)}; it must be {' or '.join(map(str, shapes))}{words}"
        )


def transform_weights_for_mega_moe(
    l1_weights: Any, l2_weights: Any, activation: str = "swiglu"
) -> tuple[Any, Any]:
    """Weights of ``fp8_fp4_mega_moe`` or ``bf16_mega_moe`` in plain order -> in the order of the kernels.

    Args:
        l1_weights, l2_weights: for FP4, pairs of packed int8 ``[experts, 2 I, H / 2]`` and ``[experts, H, I /
            2]`` with their scales: float32 powers of two ``[experts, rows, K / 32]``, or int32 words of four
            UE8M0 exponents ``[experts, rows, K / 128]``. For bf16, the two tensors ``[experts, 2 I, H]`` and
            ``[experts, H, I]``.
        activation: ``swiglu``.

    Returns:
        The same two. The first one's gate and up rows alternate in groups of 8, those of its scales as well.
        All scales are packed int32 of the same shape with contiguous rows, 128 of them in 4 x 32 order. The
        second one's values are not touched.

    Raises:
        ShapeError, DTypeError: a tensor is not of that shape or dtype; the message names it.
        ArgumentError: another activation, or float32 scales that are no powers of two.
    """
    op = "transform_weights_for_mega_moe"
    check_activation(op, activation)
    if isinstance(l1_weights, Tensor) and isinstance(l2_weights, Tensor):
        for name, x in (("l1_weights", l1_weights), ("l2_weights", l2_weights)):
            tensor(torch.bfloat16)(op, name, x)
        _sizes(op, l1_weights, l2_weights, ("l1_weights", "l2_weights"))
        return interleave_gate_up(l1_weights), l2_weights
    l1, l1_sf = _pair(op, "l1_weights", l1_weights)
    l2, l2_sf = _pair(op, "l2_weights", l2_weights)
    for name, x in (("l1_weights[0]", l1), ("l2_weights[0]", l2)):
        tensor(PACKED_FP4)(op, name, x)
    experts, hidden, intermediate = _sizes(op, l1, l2, ("l1_weights[0]", "l2_weights[0]"), 2)
    words1 = _packed_scales(op, "l1_weights[1]", l1_sf, experts, 2 * intermediate, hidden)
    words2 = _packed_scales(op, "l2_weights[1]", l2_sf, experts, hidden, intermediate)
    return (
        (interleave_gate_up(l1), mn_major_aligned(transpose_sf_4x32(interleave_gate_up(words1)))),
        (l2, mn_major_aligned(transpose_sf_4x32(words2))),
    )


def _packed_scales(op: str, name: str, sf: Tensor, experts: int, rows: int, k: int) -> Tensor:
    """int32 ``[experts, rows, k / 128]`` out of that or of float32 ``[experts, rows, k / 32]``."""
    gran = PACKED_32.gran_k
    if sf.dtype == torch.int32:
        _exact(op, name, sf, torch.int32, (experts, *PACKED_32.shape(rows, k)))
        return sf
    if sf.dtype != torch.float32:
        raise DTypeError(
            f"{op}: {name} has dtype {dtype_name(sf.dtype)}; it must be int32 of packed UE8M0 or float32"
        )
    _exact(op, name, sf, torch.float32, (experts, *ScaleFormat(1, gran).shape(rows, k)))
    return pack_scales(op, sf, name)


def transform_weights_for_mega_moe_sm90(
    l1_weights: Any, l2_weights: Any, activation: str = "swiglu"
) -> tuple[Pair, Pair]:
    """Weights of ``fp8_block_mega_moe``: checked and made contiguous; their order stays, gate and then up.

    Args:
        l1_weights, l2_weights: pairs of e4m3fn ``[experts, 2 I, H]`` and ``[experts, H, I]`` with float32
            scales of 128 x 128, ``[experts, rows / 128, K / 128]``.
        activation: ``swiglu``.

    Raises:
        ShapeError, DTypeError: a tensor is not of that shape or dtype; the message names it.
        ArgumentError: another activation.
    """
    op = "transform_weights_for_mega_moe_sm90"
    check_activation(op, activation)
    l1, l1_sf = _pair(op, "l1_weights", l1_weights)
    l2, l2_sf = _pair(op, "l2_weights", l2_weights)
    for name, x in (("l1_weights[0]", l1), ("l2_weights[0]", l2)):
        tensor(_F8)(op, name, x)
    experts, hidden, inter = _sizes(op, l1, l2, ("l1_weights[0]", "l2_weights[0]"))
    for name, sf, rows, k in (
        ("l1_weights[1]", l1_sf, 2 * inter, hidden),
        ("l2_weights[1]", l2_sf, hidden, inter),
    ):
        _exact(op, name, sf, torch.float32, (experts, *BLOCK_128X128.shape(rows, k)))
    return (l1.contiguous(), l1_sf.contiguous()), (l2.contiguous(), l2_sf.contiguous())


@takes(l1_weights=tensor(floating=True, axes=(3,)), l2_weights=tensor(floating=True, axes=(3,)))
def transform_fp8_weights_for_mega_moe(l1_weights: Tensor, l2_weights: Tensor) -> tuple[Pair, Pair]:
    """Weights of ``fp8_w8a8_mega_moe`` out of floating-point ones: cast to FP8 row by row, then put in tiles.

    Args:
        l1_weights, l2_weights: ``[experts, 2 I, H]``, gate rows and then up rows, and ``[experts, H, I]``.

    Returns:
        ``(l1, l1_scales), (l2, l2_scales)``: e4m3fn ``[experts, 2 I / 16, H * 16]`` and float32 ``[experts, 2
        I]``, and e4m3fn ``[experts, H / 16, I * 16]`` and float32 ``[experts, H]``.

    Raises:
        ShapeError, DTypeError: a tensor is not of that shape or dtype; the message names it.
    """
    _sizes("transform_fp8_weights_for_mega_moe", l1_weights, l2_weights, ("l1_weights", "l2_weights"))
    l1, l1_sf = cast_grouped_weight_to_fp8_channelwise(l1_weights)
    l2, l2_sf = cast_grouped_weight_to_fp8_channelwise(l2_weights)
    return (weight8bit_nt_kpack2_marlin(l1), l1_sf), (weight8bit_nt_kpack2_marlin(l2), l2_sf)


# The way back, and what a call checks -----------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class ExpertWeights:
    """One expert's weights in plain order, gate rows first.

    ``values`` are ``[rows, K]`` (packed FP4: ``[rows, K / 2]``), ``sf`` their scales, of format ``fmt``; bf16
    has neither of these two.
    """

    values: Tensor
    sf: Tensor | None
    fmt: ScaleFormat | None


def _rows_and_k(which: str, hidden: int, intermediate: int) -> tuple[int, int]:
    if which not in ("l1", "l2"):
        raise ArgumentError(f"plain_weights: which is {which!r}; it must be 'l1' or 'l2'")
    return (2 * intermediate, hidden) if which == "l1" else (hidden, intermediate)


def plain_weights(
    mma_type: str, which: str, pair: Any, expert: int, hidden: int, intermediate: int
) -> ExpertWeights:
    """What ``check_weights`` has passed, of one local expert and in plain order; memory is one expert's.

    Args:
        which: ``l1`` or ``l2``.
        pair: the weights as a call takes them: a pair of tensors of all local experts, or one for bf16.
        expert: counted from the rank's first one.

    Raises:
        ArgumentError: ``which`` is another word, or there is no such expert.
    """
    rows, k = _rows_and_k(which, hidden, intermediate)
    values = pair if mma_type == "bf16xbf16" else pair[0]
    if not 0 <= expert < len(values):
        raise ArgumentError(f"plain_weights: expert is {expert}; {which} holds {len(values)} of them")
    own = values[expert]
    if mma_type == "bf16xbf16":
        return ExpertWeights(split_gate_up(own) if which == "l1" else own, None, None)
    sf = pair[1][expert]
    if mma_type == "fp8_block":
        return ExpertWeights(own, sf, BLOCK_128X128)
    if mma_type == "w8a8":
        if tuple(own.shape) == _marlin_shape(rows, k):
            own = unpack_marlin(own[None], rows, k)[0]
        return ExpertWeights(own, sf.reshape(PER_ROW.shape(rows, k)), PER_ROW)
    words = untranspose_sf_4x32(sf)
    if which == "l1":
        own, words = split_gate_up(own), split_gate_up(words)
    return ExpertWeights(own, words, PACKED_32)


_TRANSFORMS = {
    "w8a8": "transform_fp8_weights_for_mega_moe",
    "fp8_block": "transform_weights_for_mega_moe_sm90",
    "fp8xfp4": "transform_weights_for_mega_moe",
    "bf16xbf16": "transform_weights_for_mega_moe",
}
# What functions take that do not take both.
_TAKEN: dict[str, tuple[str, ...]] = {"mega_moe_k1": ("l1",), "mega_moe_k2": (), "mega_moe_k3": ("l2",)}


def check_weights(op: str, layout: SymmLayout, rank: int, l1: Any, l2: Any) -> None:
    """Hold the weights of a call against what its buffer was made for.

    ``l1`` and ``l2`` are the arguments ``l1_weights`` and ``l2_weights``, transformed, of the experts that
    ``rank`` owns; what a single stage does not take is not looked at. No shape tells whether gate and up rows
    alternate, so that is not checked.

    Raises:
        ShapeError, DTypeError: a tensor has another shape or dtype, or tiles that are not contiguous; the
            message names it, what it must be, and the function that makes it.
    """
    experts = len(local_experts(layout.num_experts, layout.ranks, rank))
    for name, which, value in (("l1_weights", "l1", l1), ("l2_weights", "l2", l2)):
        if which in _TAKEN.get(op, ("l1", "l2")):
            rows, k = _rows_and_k(which, layout.hidden, layout.intermediate)
            _check_operand(op, layout.mma_type, name, value, experts, rows, k)


def _check_operand(op: str, mma_type: str, name: str, value: Any, experts: int, rows: int, k: int) -> None:
    words = f" (transformed by {_TRANSFORMS[mma_type]})"
    plain = experts, rows, k
    if mma_type == "bf16xbf16":
        _exact(op, name, value, torch.bfloat16, plain, words=words)
        return
    values, sf = _pair(op, name, value)
    if mma_type == "w8a8":
        tiles = (experts, *_marlin_shape(rows, k))
        _exact(op, f"{name}[0]", values, _F8, tiles, plain, words=f"{words}, or in plain order")
        if tuple(values.shape) == tiles and not values.is_contiguous():
            raise ShapeError(
                f"{op}: {name}[0] {tiles} has strides {values.stride()}; tiles must be contiguous{words}"
            )
        _exact(op, f"{name}[1]", sf, torch.float32, (experts, rows), (experts, rows, 1), words=words)
    elif mma_type == "fp8_block":
        _exact(op, f"{name}[0]", values, _F8, plain, words=words)
        scales = (experts, *BLOCK_128X128.shape(rows, k))
        _exact(op, f"{name}[1]", sf, torch.float32, scales, words=words)
    else:
        _exact(op, f"{name}[0]", values, PACKED_FP4, (experts, rows, k // 2), words=words)
        _exact(op, f"{name}[1]", sf, torch.int32, (experts, *PACKED_32.shape(rows, k)), words=words)
