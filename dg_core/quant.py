"""Casts to FP8 and FP4 with their scale factors, in plain torch.

Every cast takes ``amax = max(|x|)`` over the elements that share a scale, clamped to at least 1e-4, and the
scale ``sf = amax / 448`` (e4m3fn) or ``amax / 6`` (e2m1). With ``use_ue8m0`` it is rounded up to a power of
two. FP8 rounds to nearest even and saturates; FP4 rounds midpoints towards zero and never gives a negative
zero.

NaN and infinity have no scale that would keep the rest of their block, so the scale tells of them: it is NaN
where the block holds a NaN; where it holds an infinity it is infinity in float32, and NaN in UE8M0, which has
no infinity (byte 255 once packed). Either way the whole block is NaN when it is scaled back, and no other
block changes.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .errors import ArgumentError, ShapeError
from .layout import (
    FP4_MAX,
    FP8_MAX,
    PACKED_FP4,
    ScaleFormat,
    align,
    ceil_div,
    ceil_to_ue8m0,
    empty_mn_major,
    pack_own_scales,
    unpack_ue8m0_from_int,
)
from .rules import flag, integer, integers, one_device, takes, tensor

AMAX_FLOOR = 1e-4
# Halfway between the magnitudes 0, 0.5, 1, 1.5, 2, 3, 4 and 6 of codes 0..7.
FP4_MIDPOINTS = (0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0)


# What the casts of a matrix take.
matrix_cast = takes(
    x=tensor(floating=True, axes=(2,)),
    use_ue8m0=flag,
    gran_k=integer(1),
    use_packed_ue8m0=flag,
    mn_major=flag,
)


def _scale(amax: Tensor, limit: float, use_ue8m0: bool) -> Tensor:
    # A product with the float32 reciprocal, not a division: it is what a GPU computes for a division by a
    # constant, and so the scales agree bit for bit with those of the public library whatever device casts.
    sf = amax.clamp(AMAX_FLOOR) * (1.0 / limit)
    if not use_ue8m0:
        return sf
    return ceil_to_ue8m0(torch.where(sf.isinf(), torch.nan, sf))


def _to_fp8(x: Tensor, sf: Tensor) -> Tensor:
    return (x * (1.0 / sf)).clamp(-FP8_MAX, FP8_MAX).to(torch.float8_e4m3fn)


def _within(gran: int, size: int) -> int:
    """As many values as share a scale along an axis of this size: one scale is enough for all of it."""
    return min(gran, max(size, 1))


def _pad(x: Tensor, rows: int, columns: int) -> Tensor:
    """``x`` in float32, zero-padded to multiples of ``rows`` x ``columns``."""
    m, n = x.shape
    # Not torch.nn.functional.pad: torch 2.9 refuses empty tensors there.
    padded = torch.zeros(align(m, rows), align(n, columns), dtype=torch.float32, device=x.device)
    padded[:m, :n] = x
    return padded


def check_packing(op: str, use_ue8m0: bool, use_packed_ue8m0: bool) -> None:
    """Refuse packed scales that are no powers of two.

    Raises:
        ArgumentError: they are asked for without ``use_ue8m0``.
    """
    if use_packed_ue8m0 and not use_ue8m0:
        raise ArgumentError(f"{op}: use_packed_ue8m0 is True but use_ue8m0 is False; packed scales are UE8M0")


@matrix_cast
def per_token_cast_to_fp8(
    x: Tensor, use_ue8m0: bool, gran_k: int = 128, use_packed_ue8m0: bool = False, *, mn_major: bool = False
) -> tuple[Tensor, Tensor]:
    """``x`` ``[m, k]`` -> e4m3fn ``[m, k]`` and one scale for every ``gran_k`` columns of a row.

    Args:
        mn_major: give the scales in the layout of ``layout.empty_mn_major``, which kernels load without a
            copy, instead of row after row.

    Returns:
        The values and the scales, float32 ``[m, cdiv(k, gran_k)]``, or int32 ``[m, cdiv(k, 4 * gran_k)]``
        when packed.

    Raises:
        ShapeError, DTypeError: ``x`` is not a floating-point matrix.
        ArgumentError: packed scales are asked for without ``use_ue8m0``.
    """
    check_packing("per_token_cast_to_fp8", use_ue8m0, use_packed_ue8m0)
    m, k = x.shape
    gran_k = _within(gran_k, k)
    blocks = _pad(x, 1, gran_k).view(m, ceil_div(k, gran_k), gran_k)
    sf = _scale(blocks.abs().amax(2), FP8_MAX, use_ue8m0)
    values = _to_fp8(blocks, sf.unsqueeze(2)).flatten(1)[:, :k].contiguous()
    scales = pack_own_scales(sf) if use_packed_ue8m0 else sf
    if mn_major:
        scales = empty_mn_major(scales.shape, scales.dtype, scales.device).copy_(scales)
    return values, scales


@matrix_cast
def per_channel_cast_to_fp8(x: Tensor, use_ue8m0: bool, gran_k: int = 128) -> tuple[Tensor, Tensor]:
    """``x`` ``[k, n]`` -> e4m3fn ``[k, n]`` and float32 scales ``[k / gran_k, n]``: K runs along the rows.

    Raises:
        ShapeError: the number of rows is not a multiple of ``gran_k``.
    """
    k, n = x.shape
    if k % gran_k:
        raise ShapeError(
            f"per_channel_cast_to_fp8: x has shape {(k, n)}; axis 0 is {k} but must be a multiple of "
            f"gran_k = {gran_k}"
        )
    blocks = x.float().reshape(k // gran_k, gran_k, n)
    sf = _scale(blocks.abs().amax(1), FP8_MAX, use_ue8m0)
    return _to_fp8(blocks, sf.unsqueeze(1)).view(k, n), sf


@matrix_cast
def per_block_cast_to_fp8(x: Tensor, use_ue8m0: bool, gran_k: int = 128) -> tuple[Tensor, Tensor]:
    """``x`` ``[n, k]`` -> e4m3fn ``[n, k]`` and float32 scales ``[cdiv(n, gran_k), cdiv(k, gran_k)]``."""
    n, k = x.shape
    height, width = _within(gran_k, n), _within(gran_k, k)
    padded = _pad(x, height, width)
    tiles = padded.view(ceil_div(n, height), height, ceil_div(k, width), width)
    sf = _scale(tiles.abs().amax((1, 3)), FP8_MAX, use_ue8m0)
    values = _to_fp8(tiles, sf[:, None, :, None]).view_as(padded)[:n, :k].contiguous()
    return values, sf


@takes(x=tensor(floating=True), dims=integers, use_ue8m0=flag)
def per_custom_dims_cast_to_fp8(x: Tensor, dims: tuple[int, ...], use_ue8m0: bool) -> tuple[Tensor, Tensor]:
    """``x`` -> e4m3fn of the same shape and one float32 scale for each index along ``dims``.

    Returns:
        The values, and the scales with the axes of ``dims`` only (the others are reduced away).

    Raises:
        DTypeError: ``x`` is not a floating-point tensor.
        ArgumentError: ``dims`` names an axis that ``x`` has not; negative ones count from the end.
    """
    if any(not -x.dim() <= d < x.dim() for d in dims):
        raise ArgumentError(
            f"per_custom_dims_cast_to_fp8: dims is {dims} but x has shape {tuple(x.shape)}; each must be an "
            f"axis of x, at least {-x.dim()} and below {x.dim()}"
        )
    kept = {d % x.dim() for d in dims}
    reduced = tuple(d for d in range(x.dim()) if d not in kept)
    values = x.float()
    amax = values.abs()
    if values.numel() == 0:  # amax refuses an empty axis
        amax = values.new_zeros([size if d in kept else 1 for d, size in enumerate(x.shape)])
    elif reduced:
        amax = amax.amax(reduced, keepdim=True)
    sf = _scale(amax, FP8_MAX, use_ue8m0)
    return _to_fp8(values, sf), sf.squeeze(reduced)


# FP4 --------------------------------------------------------------------------------------------------------


def quantise_fp4(x: Tensor) -> Tensor:
    """float32 values -> e2m1 codes 0..15 (uint8): sign in bit 3, midpoints round towards zero, no negative
    zero."""
    magnitude, code = x.abs(), torch.zeros(x.shape, dtype=torch.uint8, device=x.device)
    for midpoint in FP4_MIDPOINTS:
        code += magnitude > midpoint
    return torch.where((x < 0) & (code != 0), code | 8, code)


def dequantise_fp4(codes: Tensor) -> Tensor:
    """e2m1 codes 0..15 (uint8) -> float32: a sign, two bits of exponent, and one of mantissa."""
    # In halves, so in integers, and without a table: none can be sent to a device while a graph is captured.
    exponent, mantissa = (codes >> 1) & 3, codes & 1
    halves = torch.where(exponent == 0, mantissa, ((mantissa | 2) << exponent) >> 1)
    magnitude = halves.to(torch.float32).mul_(0.5)
    return torch.where(codes >= 8, -magnitude, magnitude)


def pack_fp4(codes: Tensor) -> Tensor:
    """Codes ``[.., 2 n]`` (uint8) -> int8 ``[.., n]``, the even element in the low nibble."""
    return (codes[..., 0::2] | (codes[..., 1::2] << 4)).view(PACKED_FP4)


def unpack_fp4(packed: Tensor) -> Tensor:
    """int8 ``[.., n]`` -> codes ``[.., 2 n]`` (uint8) along the last axis, low nibble first."""
    raw = packed.contiguous().view(torch.uint8)
    return torch.stack((raw & 0xF, raw >> 4), dim=-1).flatten(-2)


@matrix_cast
def per_token_cast_to_fp4(
    x: Tensor, use_ue8m0: bool, gran_k: int = 128, use_packed_ue8m0: bool = False
) -> tuple[Tensor, Tensor]:
    """``x`` ``[m, k]`` -> packed e2m1 int8 ``[m, k / 2]`` and one scale for every ``gran_k`` columns of a
    row.

    Raises:
        ShapeError: ``k`` is odd.
        ArgumentError: packed scales are asked for without ``use_ue8m0``.
    """
    op = "per_token_cast_to_fp4"
    check_packing(op, use_ue8m0, use_packed_ue8m0)
    m, k = x.shape
    if k % 2:
        raise ShapeError(
            f"{op}: x has shape {(m, k)}; axis 1 is {k} but two values share a byte, so it must be even"
        )
    gran_k = _within(gran_k, k)
    blocks = _pad(x, 1, gran_k).view(m, ceil_div(k, gran_k), gran_k)
    sf = _scale(blocks.abs().amax(2), FP4_MAX, use_ue8m0)
    codes = quantise_fp4(blocks * (1.0 / sf.unsqueeze(2))).flatten(1)[:, :k]
    return pack_fp4(codes), pack_own_scales(sf) if use_packed_ue8m0 else sf


@takes(a=tensor(PACKED_FP4, axes=(2,)))
def transpose_packed_fp4(a: Tensor) -> Tensor:
    """Packed e2m1 ``[m, n / 2]`` -> packed e2m1 of the transpose, ``[n, m / 2]``.

    Raises:
        ShapeError: ``a`` is not a matrix, or has an odd number of rows.
        DTypeError: ``a`` is not int8.
    """
    if a.shape[0] % 2:
        raise ShapeError(
            f"transpose_packed_fp4: a has shape {tuple(a.shape)}; it must be a matrix of even height"
        )
    return pack_fp4(unpack_fp4(a).t().contiguous())


@takes(
    packed=tensor(PACKED_FP4, axes=(2,)), sf=tensor(torch.float32, torch.int32, axes=(2,)),
    gran_k=integer(1), use_packed_ue8m0=flag,
)  # fmt: skip
def cast_back_from_fp4(
    packed: Tensor, sf: Tensor, gran_k: int = 128, use_packed_ue8m0: bool = False
) -> Tensor:
    """Packed e2m1 ``[m, k / 2]`` and its scales -> float32 ``[m, k]``.

    Args:
        packed: int8, the even element in the low nibble.
        sf: float32 ``[m, cdiv(k, gran_k)]``; int32 ``[m, cdiv(k, 4 * gran_k)]`` with ``use_packed_ue8m0``.

    Raises:
        DTypeError, ShapeError: a tensor is not of that dtype or shape.
        DeviceError: the two live on different devices.
    """
    op = "cast_back_from_fp4"
    tensor(torch.int32 if use_packed_ue8m0 else torch.float32)(op, "sf", sf)
    one_device(op, packed=packed, sf=sf)
    m, k = packed.shape[0], 2 * packed.shape[1]
    expected = ScaleFormat(1, gran_k, use_packed_ue8m0).shape(m, k)
    if tuple(sf.shape) != expected:
        raise ShapeError(
            f"{op}: sf has shape {tuple(sf.shape)}; packed {tuple(packed.shape)} holds [{m}, {k}], whose "
            f"scales at gran_k = {gran_k} are {expected}"
        )
    values = dequantise_fp4(unpack_fp4(packed))
    scales = unpack_ue8m0_from_int(sf) if use_packed_ue8m0 else sf
    return values * scales.repeat_interleave(_within(gran_k, k), dim=1)[:, : values.shape[1]]
