"""How matrices lie in memory, the rule by which a product loads them as they are, and the form of workspaces.

A tensor map takes a 16-byte aligned address, lines that are contiguous and a multiple of 16 bytes apart, and
matrices a multiple of 16 bytes apart where there are several. Whether a tensor fits is asked here alone.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from dg_core.layout import TMA_BYTES, ceil_div, empty_mn_major

ROWS, K = 0, 1  # the axes of an operand


@dataclass(frozen=True)
class Stored:
    """How matrices ``[rows, K]`` (or their scales) lie in memory: strides in elements, and whether the first
    one's address is 16-byte aligned.

    ``major`` is the axis along which a product loads them, ``ROWS`` or ``K``; that axis has stride 1 and the
    other one a multiple of 16 bytes, where they have one element too. None: read element by element.

    There are ``groups`` of them, ``apart`` elements from one to the next: 0 where there is one, a positive
    multiple of 16 bytes where a product loads several along ``major``.
    """

    shape: tuple[int, int]
    strides: tuple[int, int]
    dtype: torch.dtype
    aligned: bool = True
    major: int | None = None
    groups: int = 1
    apart: int = 0

    @property
    def nbytes(self) -> int:
        """Bytes of a workspace of this form."""
        line = ROWS if self.major == K else K
        return self.groups * self.shape[line] * self.strides[line] * self.dtype.itemsize


def stored(x: Tensor, grouped: bool = False) -> Stored:
    """How ``x[rows, columns]`` lies, or ``x[G, rows, columns]`` where ``grouped``; without its last axis it
    counts as one column."""
    sizes, strides = tuple(x.shape), x.stride()
    groups, apart = 1, 0
    if grouped:
        groups, apart = sizes[0], strides[0] if sizes[0] > 1 else 0
        sizes, strides = sizes[1:], strides[1:]
    rows, columns = sizes if len(sizes) == 2 else (sizes[0], 1)
    along_rows, along_columns = strides if len(sizes) == 2 else (strides[0], 1)
    aligned = x.data_ptr() % TMA_BYTES == 0
    return Stored((rows, columns), (along_rows, along_columns), x.dtype, aligned, groups=groups, apart=apart)


# The rule ---------------------------------------------------------------------------------------------------


def contiguous(x: Stored, axis: int) -> bool:
    """True where neighbours along ``axis`` are neighbours in memory."""
    return x.shape[axis] <= 1 or x.strides[axis] == 1


def misfit(x: Stored, major: int) -> str:
    """Why ``x`` cannot be loaded along ``major``; empty where it can."""
    line = "rows" if major == K else "columns"
    if not contiguous(x, major):
        return f"it is not contiguous along its {'K' if major == K else 'rows'}"
    if not x.aligned:
        return f"its address is not a multiple of {TMA_BYTES} bytes"
    other, size = 1 - major, x.dtype.itemsize
    if x.shape[other] > 1:
        apart, length = x.strides[other] * size, x.shape[major] * size
        if apart % TMA_BYTES:
            return f"its {line} are {apart} bytes apart, not a multiple of {TMA_BYTES}"
        if apart < length:
            return f"its {line} of {length} bytes are {apart} apart and overlap"
    if x.groups > 1:
        # Matrices may take turns line by line, or overlap: they are only read. But a map has no stride of 0.
        if x.apart * size % TMA_BYTES:
            return f"its matrices are {x.apart * size} bytes apart, not a multiple of {TMA_BYTES}"
        if x.apart == 0:
            return f"its {x.groups} matrices are one and the same memory"
    return ""


def loadable(x: Stored, major: int) -> Stored:
    """``x``, which fits, with strides that a tensor map takes where an axis of one element has odd ones."""
    other = 1 - major
    apart = x.strides[other] if x.shape[other] > 1 else _padded(x.shape[major], x.dtype)
    return replace(x, strides=(apart, 1) if major == K else (1, apart), aligned=True, major=major)


# Workspaces -------------------------------------------------------------------------------------------------


def _padded(length: int, dtype: torch.dtype) -> int:
    """Elements from one line of a workspace to the next: whole units of 16 bytes."""
    unit = TMA_BYTES // dtype.itemsize
    return ceil_div(length, unit) * unit


def workspace(shape: tuple[int, int], dtype: torch.dtype, major: int, groups: int = 1) -> Stored:
    """The form of a workspace for matrices of ``shape``, one behind the other: lines along ``major``, padded
    to 16 bytes."""
    line = _padded(shape[major], dtype)
    apart = shape[1 - major] * line if groups > 1 else 0
    return Stored(shape, (line, 1) if major == K else (1, line), dtype, True, major, groups, apart)


def empty(form: Stored, device: torch.device, grouped: bool = False) -> Tensor:
    """Uninitialised memory of a form that ``workspace`` gave: ``[rows, K]``, or ``[groups, rows, K]`` where
    ``grouped``."""
    lead = (form.groups,) if grouped else ()
    if form.major == K:
        return empty_mn_major((*lead, *form.shape[::-1]), form.dtype, device).transpose(-1, -2)
    return empty_mn_major((*lead, *form.shape), form.dtype, device)
