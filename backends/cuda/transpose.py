"""Matrices of bytes with their rows contiguous, written with K contiguous: as wgmma takes 8-bit operands.

On a card the kernel of ``dg/impls/transpose.cuh`` does it, for all groups in one launch; torch copies tensors
of the CPU.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass, field

import torch
from torch import Tensor

from dg_core.errors import ArgumentError
from dg_core.layout import ceil_div

from .forms import ROWS, K, Stored, contiguous
from .transforms import MAX_BLOCKS, Launch, launcher

TRANSPOSE_BYTES = "transpose_bytes"
# Six blocks of 256 threads have 96 KiB of loads on their way in an SM; that leaves a thread 40 registers.
SOURCE = (
    "#include <dg/impls/transpose.cuh>\n\n"
    'extern "C" __global__ void __launch_bounds__(dg::transpose::kThreads, 6)\n'
    f"{TRANSPOSE_BYTES}(const __grid_constant__ dg::transpose::Params params) {{\n"
    "    dg::transpose::run(params);\n"
    "}\n"
)
TILE = 128  # as in dg/impls/transpose.cuh


class Params(ctypes.Structure):
    """``dg::transpose::Params``."""

    _fields_ = (
        ("source", ctypes.c_void_p),
        ("result", ctypes.c_void_p),
        ("line", ctypes.c_int64),
        ("apart", ctypes.c_int64),
        ("pitch", ctypes.c_int64),
        ("result_apart", ctypes.c_int64),
        ("rows", ctypes.c_int64),
        ("columns", ctypes.c_int64),
        ("groups", ctypes.c_int64),
    )


@dataclass(frozen=True)
class Transposition:
    """Matrices ``[rows, K]`` that lie as ``source``, rows contiguous, to be written as ``result``, K
    contiguous. Both have one shape, one number of groups and one byte an element; their addresses may be any.

    Raises:
        ArgumentError: the two are no such forms.
    """

    source: Stored
    result: Stored
    launchers: dict[int, Launch] = field(default_factory=dict, compare=False, repr=False)  # by device

    def __post_init__(self) -> None:
        one, other = self.source, self.result
        alike = (one.shape, one.groups) == (other.shape, other.groups)
        if not alike or one.dtype.itemsize != 1 or other.dtype.itemsize != 1:
            raise ArgumentError(
                f"matrices of bytes are transposed into others of their shape, not {one} into {other}"
            )
        if not contiguous(one, ROWS) or not contiguous(other, K):
            raise ArgumentError(f"rows contiguous are transposed into K contiguous, not {one} into {other}")

    @property
    def blocks(self) -> int:
        """Blocks of a launch, which walk over the tiles that are more; 0 where there is nothing to write."""
        rows, columns = self.source.shape
        return min(self.source.groups * ceil_div(rows, TILE) * ceil_div(columns, TILE), MAX_BLOCKS)

    def parameters(self) -> Params:
        """What the kernel reads, but for the addresses."""
        one, other = self.source, self.result
        return Params(
            None, None, one.strides[K], one.apart, other.strides[ROWS], other.apart, *one.shape, one.groups
        )

    def run(self, x: Tensor, out: Tensor) -> None:
        """Write ``out``, which has the form ``result``, on the current stream; both have an axis of groups in
        front, or neither.

        Raises:
            BuildError, DriverError: the kernel does not compile, or does not load.
        """
        if not x.is_cuda:
            out.view(torch.uint8).copy_(x.view(torch.uint8))  # which torch copies wherever it copies anything
            return
        if not self.blocks:
            return
        device = x.get_device()
        launch = self.launchers.get(device)
        if launch is None:
            launch = self.launchers[device] = launcher(
                TRANSPOSE_BYTES, SOURCE, self.parameters(), ("source", "result"), self.blocks, x.device
            )
        launch([x.data_ptr(), out.data_ptr()])
