"""How the tensors of a product are handed to its kernel, and what has to be brought into another form first.

Kernels read rows of K from any address at any distance (16 bytes at a time where both allow it), scales at
any strides, and FP4 that is packed along K. What has its rows contiguous, or FP4 that is packed along them,
is written anew in a workspace for the one call.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from dg_core.layout import PACKED_FP4, ScaleFormat, align, dtype_name

AS_IS, COPY, UNPACK = "as it is", "copy", "unpack"
LOAD_BYTES = 16  # of one load
NO_SHIFT = 62  # every part of K divided by 2 to the power of this is 0


def outer_strides(x: Tensor) -> tuple[int, int]:
    """Elements from row to row and from group to group of ``[.., rows, columns]``; 0 where there is one."""
    rows = x.stride(-2) if x.shape[-2] > 1 else 0
    return rows, x.stride(0) if x.dim() == 3 and x.shape[0] > 1 else 0


def rows_contiguous(x: Tensor) -> bool:
    """True where the last axis lies without gaps."""
    return x.stride(-1) == 1 or x.shape[-1] <= 1


def empty_rows(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """An uninitialised tensor whose rows start at multiples of 16 bytes."""
    pitch = align(shape[-1] * dtype.itemsize, LOAD_BYTES) // dtype.itemsize
    return torch.empty((*shape[:-1], pitch), dtype=dtype, device=device)[..., : shape[-1]]


def fp8_of_codes(codes: Tensor) -> Tensor:
    """e2m1 codes 0 .. 15 (uint8) -> the bytes of e4m3fn of the same values.

    Both formats have their mantissa below their exponent, and their biases differ by 6. So from 1.0 on a byte
    is a code shifted by two more bits of mantissa, plus 6 << 3; the one subnormal, 0.5, is normal in e4m3.
    """
    magnitude = codes & 7
    return torch.where(magnitude > 1, magnitude * 4 + 0x30, magnitude * 0x30) | (codes & 8) << 4


@dataclass(frozen=True)
class Values:
    """What becomes of ``a`` or ``b``.

    Attributes:
        kind: ``as it is``, ``copy`` (K becomes contiguous) or ``unpack`` (FP4 packed along rows becomes FP8).
        row, group: bytes from row to row and from group to group, as the kernel finds them.
        aligned: every row starts at a multiple of 16 bytes.
        fp4: two values a byte along K.
        words: what is done and why; empty where nothing is.
    """

    kind: str
    row: int
    group: int
    aligned: bool
    fp4: bool
    words: str = ""

    def run(self, x: Tensor) -> Tensor:
        """``x`` as the kernel reads it."""
        if self.kind == AS_IS:
            return x
        if self.kind == UNPACK:
            return _unpacked(x)
        result = empty_rows(tuple(x.shape), x.dtype, x.device)
        if x.element_size() == 1:  # torch copies bytes wherever it copies anything
            result.view(torch.uint8).copy_(x.view(torch.uint8))
        else:
            result.copy_(x)
        return result

    def fields(self, name: str) -> dict[str, int]:
        return {
            f"{name}_row": self.row, f"{name}_group": self.group, f"{name}_aligned": int(self.aligned),
            f"{name}_fp4": int(self.fp4),
        }  # fmt: skip


def _unpacked(x: Tensor) -> Tensor:
    """int8 ``[.., rows / 2, K]``, two rows a byte, the first in its low half -> e4m3fn ``[.., rows, K]``."""
    *lead, half, k = x.shape
    result = empty_rows((*lead, 2 * half, k), torch.float8_e4m3fn, x.device)
    raw, out = x.view(torch.uint8), result.view(torch.uint8)
    out[..., 0::2, :] = fp8_of_codes(raw & 15)
    out[..., 1::2, :] = fp8_of_codes(raw >> 4)
    return result


def values(name: str, x: Tensor, packed_axis: int) -> Values:
    """What ``a`` or ``b``, ``[.., rows, K]`` in its storage, needs; ``packed_axis`` as in ``Gemm``."""
    fp4 = x.dtype == PACKED_FP4
    size = x.element_size()
    if fp4 and packed_axis == -2:
        kind, words = UNPACK, f"{name} is FP4 packed along its rows: unpacked to FP8 in a workspace"
    elif not rows_contiguous(x):
        kind, words = COPY, f"{name} is MN-major {dtype_name(x.dtype)}: copied with K contiguous"
    else:
        row, group = (stride * size for stride in outer_strides(x))
        aligned = x.data_ptr() % LOAD_BYTES == 0 and row % LOAD_BYTES == 0 and group % LOAD_BYTES == 0
        words = "" if aligned or fp4 else f"{name} is not aligned to 16 bytes: loaded byte by byte"
        return Values(AS_IS, row, group, aligned, fp4, words)
    rows, row = x.shape[-2] * (2 if kind == UNPACK else 1), align(x.shape[-1] * size, LOAD_BYTES)
    return Values(kind, row, rows * row if x.dim() == 3 else 0, True, fp4 and kind == COPY, words)


def scales(
    name: str, sf: Tensor | None, fmt: ScaleFormat | None, axes: int, k: int, unit: int
) -> dict[str, int]:
    """The fields of ``sfa`` or ``sfb``, scales of format ``fmt`` of an operand of so many axes that is ``k``
    long, for a kernel whose partial sums cover ``unit`` of K (0: scales of rows alone)."""
    if sf is None or fmt is None:
        row = k_step = group = parts = row_shift = part_shift = packed = 0
    else:
        whole_rows = sf.dim() < axes  # [.., mn] without an axis of K
        row = sf.stride(-1) if whole_rows else sf.stride(-2)
        k_step = 0 if whole_rows else sf.stride(-1)
        group = sf.stride(0) if axes == 3 and sf.shape[0] > 1 else 0
        parts = fmt.blocks(k)
        row_shift = fmt.gran_mn.bit_length() - 1
        part_shift = (fmt.gran_k // unit).bit_length() - 1 if unit and fmt.gran_k else NO_SHIFT
        packed = int(fmt.packed)
    return {
        f"{name}_row": row, f"{name}_k": k_step, f"{name}_group": group, f"{name}_parts": parts,
        f"{name}_row_shift": row_shift, f"{name}_part_shift": part_shift, f"{name}_packed": packed,
    }  # fmt: skip
