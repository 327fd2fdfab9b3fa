"""Casts to FP8 on a card in one pass over the values, bit for bit as ``dg_core.quant`` defines them.

A kernel is for a dtype, a granularity, a form of scales and a width of its tiles; a launch is known from
sizes, strides and alignment, and a call brings addresses.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Hashable
from dataclasses import dataclass

import torch
from torch import Tensor

from dg_core.layout import TMA_BYTES, ScaleFormat, ceil_div, empty_mn_major

from .transforms import THREADS, Launch, launcher

TYPES = {torch.bfloat16: "bf16", torch.float16: "f16", torch.float32: "f32"}
GRANULARITIES = (32, 128)
F32, UE8M0, PACKED = "f32", "ue8m0", "packed"  # forms of the scales
# As in dg/impls/cast.cuh.
CHUNK, LOADS, VALUES, WARPS = 256, 4, 8, THREADS // 32
WIDTHS = (4, 2, 1)  # chunks across a tile, the best first where they cover the columns alike
MAX_TILES = 2**31 - 1  # blocks of a launch
MAX_LAUNCHES = 4096  # a serving process sees each number of rows up to its batch limit on a few widths

_launches: dict[Hashable, tuple[CastTask, Launch]] = {}


class Params(ctypes.Structure):
    """``dg::cast::Params``."""

    _fields_ = (
        ("x", ctypes.c_void_p),
        ("values", ctypes.c_void_p),
        ("scales", ctypes.c_void_p),
        ("row_stride", ctypes.c_int64),
        ("column_stride", ctypes.c_int64),
        ("rows", ctypes.c_int64),
        ("columns", ctypes.c_int64),
        ("scale_row_stride", ctypes.c_int64),
        ("scale_column_stride", ctypes.c_int64),
        ("tiles_across", ctypes.c_uint32),
        ("mn_major", ctypes.c_uint32),
    )


@dataclass(frozen=True)
class CastConfig:
    """A kernel: the type of the values, columns of a scale, the scales' form, chunks across a tile, and
    whether a lane's eight values are loaded and stored at once."""

    type: str
    gran_k: int
    form: str
    width: int
    vector: bool

    @property
    def name(self) -> str:
        storage = "" if self.vector else "_strided"
        return f"per_token_cast_{self.type}_{self.gran_k}_{self.form}_x{self.width}{storage}"

    @property
    def source(self) -> str:
        vector = "true" if self.vector else "false"
        shape = f"Type::{self.type}, {self.gran_k}, {self.width}, {vector}, Form::{self.form}"
        return (
            "#include <dg/impls/cast.cuh>\n\n"
            "using dg::cast::Form, dg::cast::Type;\n\n"
            'extern "C" __global__ void __launch_bounds__(dg::cast::kThreads)\n'
            f"{self.name}(const __grid_constant__ dg::cast::Params params) {{\n"
            f"    dg::cast::per_token<dg::cast::Shape<{shape}>>(params);\n"
            "}\n"
        )

    @property
    def tile(self) -> tuple[int, int]:
        """Rows and columns of a block."""
        return WARPS * LOADS // self.width, CHUNK * self.width


@dataclass(frozen=True)
class CastTask:
    """All of a cast that its launch depends on. ``aligned``: the address is a multiple of 16 bytes."""

    dtype: torch.dtype
    shape: tuple[int, int]
    strides: tuple[int, int]
    aligned: bool
    gran_k: int
    form: str
    mn_major: bool

    @property
    def config(self) -> CastConfig:
        """The kernel: the widest tile among those that cover the columns with the fewest chunks."""
        rows, columns = self.shape
        chunks = ceil_div(columns, CHUNK)
        widths = [width for width in WIDTHS if self._holds_words(width)]
        width = min(widths, key=lambda width: ceil_div(chunks, width) * width)
        vector = (
            self.aligned
            and columns % VALUES == 0
            and self.strides[1] == 1
            and (rows == 1 or self.strides[0] * self.dtype.itemsize % TMA_BYTES == 0)
        )
        return CastConfig(TYPES[self.dtype], self.gran_k, self.form, width, vector)

    def _holds_words(self, width: int) -> bool:
        """Whether no word of packed scales lies in two tiles."""
        columns = width * CHUNK
        return self.form != PACKED or columns % (4 * self.gran_k) == 0 or columns >= self.shape[1]

    @property
    def tiles(self) -> tuple[int, int]:
        """Tiles along the rows and across the columns."""
        (rows, columns), (tile_rows, tile_columns) = self.shape, self.config.tile
        return ceil_div(rows, tile_rows), ceil_div(columns, tile_columns)

    @functools.cached_property
    def scales(self) -> tuple[tuple[int, int], torch.dtype]:
        """Shape and dtype of the scales."""
        packed = self.form == PACKED
        shape = ScaleFormat(1, self.gran_k, packed).shape(*self.shape)
        return shape, torch.int32 if packed else torch.float32

    def empty(self, device: torch.device) -> tuple[Tensor, Tensor]:
        """Values and scales, uninitialised."""
        values = torch.empty(self.shape, dtype=torch.float8_e4m3fn, device=device)
        shape, dtype = self.scales
        if self.mn_major:
            return values, empty_mn_major(shape, dtype, device)
        return values, torch.empty(shape, dtype=dtype, device=device)

    def parameters(self) -> Params:
        """What the kernel reads, but for the addresses."""
        _, scales = self.empty(torch.device("meta"))
        across = self.tiles[1]
        return Params(
            None, None, None, *self.strides, *self.shape, *scales.stride(), across, self.mn_major
        )  # fmt: skip


def per_token_cast_to_fp8(
    x: Tensor, use_ue8m0: bool, gran_k: int, use_packed_ue8m0: bool, mn_major: bool
) -> tuple[Tensor, Tensor] | None:
    """``x`` ``[m, k]`` on a card -> e4m3fn ``[m, k]`` and its scales, on the current stream; None where this
    backend has no kernel for it: bfloat16, float16 and float32 with ``gran_k`` 32 and 128, not empty.

    Raises:
        BuildError, DriverError: the kernel does not compile, or does not load.
    """
    if x.dtype not in TYPES or gran_k not in GRANULARITIES or not x.numel():
        return None
    form = PACKED if use_packed_ue8m0 else UE8M0 if use_ue8m0 else F32
    address, device = x.data_ptr(), x.device
    aligned = address % TMA_BYTES == 0
    key = x.dtype, x.shape, x.stride(), aligned, gran_k, form, bool(mn_major), device
    known = _launches.get(key)
    if known is None:
        (rows, columns), (row_stride, column_stride) = x.shape, x.stride()
        strides = row_stride, column_stride
        task = CastTask(x.dtype, (rows, columns), strides, aligned, gran_k, form, bool(mn_major))
        down, across = task.tiles
        if down * across > MAX_TILES:
            return None
        config, fields = task.config, ("x", "values", "scales")
        launch = launcher(config.name, config.source, task.parameters(), fields, down * across, device)
        if len(_launches) >= MAX_LAUNCHES:
            _launches.clear()
        known = _launches[key] = task, launch
    task, launch = known
    values, scales = task.empty(device)
    launch([address, values.data_ptr(), scales.data_ptr()])
    return values, scales
