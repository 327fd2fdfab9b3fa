"""Operands of the reference: matrices that become float32 a block at a time."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from dg_core.layout import PACKED_FP4, ScaleFormat, unpack_ue8m0_from_int
from dg_core.quant import dequantise_fp4, unpack_fp4

from .precision import matmul

# A product is computed in tiles of TILE x TILE elements, K_STEP of the contracted axis at a time. A float32
# block of an operand, and a tile, then take 4 MiB, little beside operands for which memory matters, and are
# large enough that unpacking costs less than multiplying: on two cores of a Xeon (AVX-512) an FP8 product of
# 1024 x 4096 x 4096 takes 0.26 s, the float32 product 0.19 s. K_STEP is a multiple of every scale granularity
# and of what a word of four UE8M0 scales covers (512).
TILE = 1024
K_STEP = 1024

Rows = slice | Tensor  # a range of rows, or an int64 tensor of row numbers


class Source(Protocol):
    """What a product takes its operands from."""

    def block(self, rows: Rows, columns: slice) -> Tensor:
        """Float32 ``[rows, columns]`` with scales applied; ``columns`` starts at a multiple of ``K_STEP``."""
        ...


def steps(stop: int, step: int) -> Iterator[slice]:
    """``range(stop)`` in slices of at most ``step``."""
    return (slice(start, min(start + step, stop)) for start in range(0, stop, step))


def row_numbers(rows: Rows, device: torch.device) -> Tensor:
    """``rows`` as a tensor of row numbers."""
    return torch.arange(rows.start, rows.stop, device=device) if isinstance(rows, slice) else rows


def pick(x: Tensor, index: Tensor) -> Tensor:
    """``x[index]`` of any dtype: not every device indexes 8-bit floats by a tensor, every one indexes
    bytes."""
    return x[index] if x.element_size() > 1 else x.view(torch.uint8)[index].view(x.dtype)


def select(x: Tensor, rows: Rows) -> Tensor:
    """``x[rows]``, a view where ``rows`` is a range."""
    return x[rows] if isinstance(rows, slice) else pick(x, rows)


def multiply_blocks(values: Tensor, scales: Tensor, gran_k: int) -> None:
    """``values[n, k] *= scales[n, cdiv(k, gran_k)]`` in place, each scale over ``gran_k`` columns."""
    whole = values.shape[1] // gran_k
    values[:, : whole * gran_k].view(len(values), whole, gran_k).mul_(scales[:, :whole, None])
    values[:, whole * gran_k :].mul_(scales[:, whole:])


@dataclass(frozen=True)
class Operand:
    """A stored matrix ``[mn, k]`` (packed FP4: half as many along ``packed_axis``) with scales ``sf`` of
    format ``fmt``."""

    values: Tensor
    sf: Tensor | None = None
    fmt: ScaleFormat | None = None
    packed_axis: int = -1

    def block(self, rows: Rows, columns: slice) -> Tensor:
        values = self._values(rows, columns)
        if self.sf is not None and self.fmt is not None:
            scales = self._scales(self.sf, self.fmt, rows, columns)
            if self.fmt.gran_k == 0:
                values.mul_(scales)
            else:
                multiply_blocks(values, scales, self.fmt.gran_k)
        return values

    def _values(self, rows: Rows, columns: slice) -> Tensor:
        x = self.values
        if x.dtype != PACKED_FP4:
            return select(x[:, columns], rows).float()
        if self.packed_axis == -1:
            return dequantise_fp4(unpack_fp4(select(x[:, columns.start // 2 : columns.stop // 2], rows)))
        number = row_numbers(rows, x.device)
        raw = x[:, columns].index_select(0, number // 2).view(torch.uint8)
        return dequantise_fp4((raw >> (number % 2 * 4)[:, None].to(torch.uint8)) & 0xF)

    def _scales(self, sf: Tensor, fmt: ScaleFormat, rows: Rows, columns: slice) -> Tensor:
        """Float32 ``[rows, scales along these columns]``."""
        if isinstance(rows, slice) and fmt.gran_mn == 1:
            picked = sf[rows]
        else:
            picked = sf.index_select(0, row_numbers(rows, sf.device) // fmt.gran_mn)
        if fmt.gran_k == 0:
            return picked if sf.dim() == 2 else picked[:, None]
        unit = fmt.gran_k * (4 if fmt.packed else 1)
        picked = picked[:, columns.start // unit : -(-columns.stop // unit)]
        if not fmt.packed:
            return picked
        return unpack_ue8m0_from_int(picked)[:, : fmt.blocks(columns.stop - columns.start)]


Pairs = Sequence[tuple[Source, Source]]


def product(pairs: Pairs, rows: Rows, columns: slice, k: int, device: torch.device) -> Tensor:
    """Float32 sum over ``pairs`` (A, B) of ``A[rows] @ B[columns].T``, ``k`` long along the contracted
    axis."""
    count = rows.stop - rows.start if isinstance(rows, slice) else rows.numel()
    total = torch.zeros(count, columns.stop - columns.start, dtype=torch.float32, device=device)
    for a, b in pairs:
        for part in steps(k, K_STEP):
            total += matmul(a.block(rows, part), b.block(columns, part).t())
    return total


def write_product(
    pairs: Pairs, k: int, d: Tensor, c: Tensor | None = None, target: Tensor | None = None
) -> None:
    """``d = c + sum over pairs of A @ B.T``, tile by tile, with one rounding into d.

    ``target`` holds the column of d for every column of the product, where they are not the same.
    """
    n = d.shape[1] if target is None else target.numel()
    for columns in steps(n, TILE):
        place = columns if target is None else target[columns]
        for rows in steps(d.shape[0], TILE):
            total = product(pairs, rows, columns, k, d.device)
            if c is not None:
                total += c[rows, place]
            d[rows, place] = total.to(d.dtype)


def on_host(x: Tensor) -> bool:
    """True where values may be read without waiting for a device."""
    return x.device.type == "cpu"
