"""Changes of scale-factor layout on a card: one launch each, for scales of any strides.

Values, shapes and strides are those of ``dg_core.layout``. Packing refuses what is no power of two by one
word that the kernel sets and the host reads back; inside a graph capture nobody reads, and the kernel's NaN
bytes stand.
"""

from __future__ import annotations

import ctypes
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from dg_core.backend import Plan, SfTransform
from dg_core.layout import (
    ceil_div,
    empty_mn_major,
    get_tma_aligned_size,
    is_mn_major_aligned,
    packed_k_rows,
    packed_ue8m0_k_grouped,
    packed_ue8m0_mn_major,
)

from . import jit
from .driver import driver
from .launch import LaunchSpec, current_stream, make_launcher

MOVE, PACK, PACK_K_GROUPED = "sf_mn_major", "sf_pack", "sf_pack_k_grouped"
# kernel -> the type of its parameters and its body, in dg::sf_pack
_BODIES = {
    MOVE: ("Params", "move"),
    PACK: ("Params", "pack"),
    PACK_K_GROUPED: ("GroupedParams", "pack_k_grouped"),
}
# As in dg/impls/sf_pack.cuh.
TILE, THREADS = 32, 256
PIECE = 4 * THREADS  # words of a line that a block of the K-grouped kernel writes
HELD = 256  # groups whose sizes travel with a launch
# Blocks walk over the tiles that are more than this: 256 MiB of scales, far more than is at work at once.
MAX_BLOCKS = 65536

#: A launch on the current stream, given the addresses of its pointers.
Launch = Callable[[Sequence[int]], None]


class Params(ctypes.Structure):
    """``dg::sf_pack::Params``."""

    _fields_ = (
        ("source", ctypes.c_void_p),
        ("result", ctypes.c_void_p),
        ("ends", ctypes.c_void_p),
        ("flag", ctypes.c_void_p),
        ("group_stride", ctypes.c_int64),
        ("row_stride", ctypes.c_int64),
        ("k_stride", ctypes.c_int64),
        ("pitch", ctypes.c_int64),
        ("groups", ctypes.c_int64),
        ("rows", ctypes.c_int64),
        ("columns", ctypes.c_int64),
        ("num_ends", ctypes.c_int64),
        ("end_stride", ctypes.c_int64),
        ("alignment", ctypes.c_int64),
        ("psum", ctypes.c_uint32),
        ("along_k", ctypes.c_uint32),
    )


class GroupedParams(ctypes.Structure):
    """``dg::sf_pack::GroupedParams``."""

    _fields_ = (
        ("source", ctypes.c_void_p),
        ("result", ctypes.c_void_p),
        ("sizes", ctypes.c_void_p),
        ("flag", ctypes.c_void_p),
        ("block_stride", ctypes.c_int64),
        ("column_stride", ctypes.c_int64),
        ("size_stride", ctypes.c_int64),
        ("blocks", ctypes.c_int64),
        ("columns", ctypes.c_int64),
        ("rows", ctypes.c_int64),
        ("groups", ctypes.c_int64),
        ("alignment", ctypes.c_int64),
        ("gran_shift", ctypes.c_uint32),
        ("psum", ctypes.c_uint32),
        ("held", ctypes.c_int64 * HELD),
    )


# Launches ---------------------------------------------------------------------------------------------------


def source(name: str) -> str:
    """The source of one of the kernels."""
    kind, body = _BODIES[name]
    return (
        "#include <dg/impls/sf_pack.cuh>\n\n"
        'extern "C" __global__ void __launch_bounds__(dg::sf_pack::kThreads)\n'
        f"{name}(const __grid_constant__ dg::sf_pack::{kind} params) {{\n"
        f"    dg::sf_pack::{body}(params);\n"
        "}\n"
    )


def sources(problem: SfTransform) -> dict[str, str]:
    """Name -> source of the kernel that ``problem`` needs, whatever its sizes."""
    name = {"mn_major": MOVE, "pack": PACK, "pack_k_grouped": PACK_K_GROUPED}[problem.kind]
    return {name: source(name)}


def launcher(
    name: str, text: str, params: ctypes.Structure, pointers: Sequence[str], blocks: int, device: torch.device
) -> Launch:
    """A launch of a kernel of 256 threads a block, without tensor maps.

    Args:
        name, text: the kernel and its source.
        pointers: the fields of ``params`` that a call's addresses go to, in their order.

    Raises:
        BuildError, DriverError: the kernel does not compile, or does not load.
    """
    major, minor = torch.cuda.get_device_capability(device)
    places = tuple((getattr(type(params), field).offset, slot) for slot, field in enumerate(pointers))
    with torch.cuda.device(device):  # kernels are loaded in the current context
        kernel = jit.default().build(name, text, f"sm{major}{minor}a")
        function = driver().load(kernel.image, name, kernel.key)
        grid, block = (blocks, 1, 1), (THREADS, 1, 1)
        run = make_launcher(LaunchSpec(function, grid, block, (1, 1, 1), False, bytes(params), (), places))
    stream = current_stream(device)
    return lambda addresses: run(addresses, stream())


def _launcher(name: str, params: ctypes.Structure, tiles: int, device: torch.device) -> Launch:
    pointers = [field for field, kind, *_ in type(params)._fields_ if kind is ctypes.c_void_p]
    return launcher(name, source(name), params, pointers, min(tiles, MAX_BLOCKS), device)


def row_params(sf: Tensor, ends: Tensor | None = None, alignment: int = 1) -> Params:
    """What the kernels of whole rows read, but for the addresses; ``sf`` is ``[mn, k]`` or ``[groups, mn,
    k]``."""
    *lead, rows, columns = sf.shape
    row_stride, k_stride = sf.stride()[-2:]
    pitch = get_tma_aligned_size(rows, sf.element_size())
    return Params(
        None, None, None, None, sf.stride(0) if lead else 0, row_stride, k_stride,
        pitch, lead[0] if lead else 1, rows, columns,
        0 if ends is None else len(ends), 0 if ends is None else ends.stride(0), alignment,
        ends is not None, 0 < k_stride < row_stride,
    )  # fmt: skip


def row_tiles(params: Params) -> int:
    """Tiles of the kernels of whole rows."""
    return int(params.groups * ceil_div(params.rows, TILE) * ceil_div(params.columns, TILE))


# Plans ------------------------------------------------------------------------------------------------------


def plan(problem: SfTransform, tensors: Sequence[Tensor | None]) -> Plan:
    """A function of ``(sf, layout)`` that solves ``problem`` for tensors on a card that are stored like
    these.

    Raises:
        BuildError, DriverError: the kernel does not compile, or does not load.
        ArgumentError: (from a call) packing meets a value that is no power of two, outside of a capture.
    """
    sf, layout = (*tensors, None)[:2]
    assert sf is not None
    if problem.kind == "mn_major":
        return _itself if is_mn_major_aligned(sf) else _moving(sf)
    if problem.kind == "pack":
        return _Packing(sf, layout, problem.alignment)
    assert layout is not None
    return _KGroupedPacking(problem, sf, layout)


def _itself(sf: Tensor, layout: Tensor | None = None) -> Tensor:
    """Scales that lie as they should."""
    return sf


def _moving(like: Tensor) -> Plan:
    params = row_params(like)
    launch = _launcher(MOVE, params, row_tiles(params), like.device)

    def run(sf: Tensor, layout: Tensor | None = None) -> Tensor:
        out = empty_mn_major(sf.shape, sf.dtype, sf.device)
        launch([sf.data_ptr(), out.data_ptr(), 0, 0])
        return out

    return run


class _Strict(ABC):
    """Packing that refuses what is no power of two.

    A call's kernel sets a word where it meets such a value. The word is read after the launch, and never
    cleared: once it is set, later calls get another one, and calls that run beside find the old one set and
    ask the definition, which raises for their own values alone.
    """

    def __init__(self) -> None:
        self._word: Tensor | None = None

    def __call__(self, sf: Tensor, layout: Tensor | None = None) -> Tensor:
        if torch.cuda.is_current_stream_capturing():
            return self._run(sf, layout, 0)
        word = self._word
        if word is None:
            word = self._word = torch.zeros(1, dtype=torch.int32, device=sf.device)
            if sf.is_cuda:  # calls on other streams find it cleared
                torch.cuda.current_stream(sf.device).synchronize()
        out = self._run(sf, layout, word.data_ptr())
        if word.item():
            self._word = None
            return self._definition(sf, layout)
        return out

    @abstractmethod
    def _run(self, sf: Tensor, layout: Tensor | None, flag: int) -> Tensor:
        """Pack; ``flag`` is the address of the word, 0 for none."""

    @abstractmethod
    def _definition(self, sf: Tensor, layout: Tensor | None) -> Tensor:
        """The same in plain torch, which raises for a value that is no power of two."""


class _Packing(_Strict):
    """``packed_ue8m0_mn_major`` for scales that are stored like ``sf``."""

    def __init__(self, sf: Tensor, layout: Tensor | None, alignment: int) -> None:
        super().__init__()
        self._alignment = alignment
        params = row_params(sf, layout, alignment)
        self._launch = _launcher(PACK, params, row_tiles(params), sf.device) if sf.numel() else None

    def __call__(self, sf: Tensor, layout: Tensor | None = None) -> Tensor:
        return super().__call__(sf, layout) if self._launch else self._result(sf)

    @staticmethod
    def _result(sf: Tensor) -> Tensor:
        return empty_mn_major((*sf.shape[:-1], ceil_div(sf.shape[-1], 4)), torch.int32, sf.device)

    def _run(self, sf: Tensor, layout: Tensor | None, flag: int) -> Tensor:
        out = self._result(sf)
        assert self._launch is not None
        self._launch([sf.data_ptr(), out.data_ptr(), 0 if layout is None else layout.data_ptr(), flag])
        return out

    def _definition(self, sf: Tensor, layout: Tensor | None) -> Tensor:
        return packed_ue8m0_mn_major(sf, layout, self._alignment)


def grouped_params(
    problem: SfTransform, sf: Tensor, layout: Tensor, rows: int
) -> list[tuple[int, int, GroupedParams]]:
    """What the launches of the K-grouped kernel read, but for the addresses, and the first block and the
    first row of each.

    One launch is enough where the device has the sizes, and for up to 256 groups that the host knows.
    """
    shift = problem.gran_k.bit_length() - 1
    blocks, columns = sf.shape

    def params(first: int, rows: int, groups: int, held: Sequence[int]) -> GroupedParams:
        return GroupedParams(
            None, None, None, None, *sf.stride(), layout.stride(0), max(blocks - first, 0), columns, rows,
            groups, problem.alignment, shift, problem.psum, (ctypes.c_int64 * HELD)(*held),
        )  # fmt: skip

    if problem.ks is None:
        return [(0, 0, params(0, rows, len(layout), ()))]
    block_ends = [0, *accumulate(ceil_div(k, problem.gran_k) for k in problem.ks)]
    row_ends = [0, *accumulate(ceil_div(k, 4 * problem.gran_k) for k in problem.ks)]
    launches = []
    for start in range(0, len(problem.ks), HELD):
        held = problem.ks[start : start + HELD]
        end = start + len(held)
        first, at = block_ends[start], row_ends[start]
        launches.append((first, at, params(first, row_ends[end] - at, len(held), held)))
    return launches


class _KGroupedPacking(_Strict):
    """``packed_ue8m0_k_grouped`` for scales ``[blocks, mn]`` and a layout that are stored like these."""

    def __init__(self, problem: SfTransform, sf: Tensor, layout: Tensor) -> None:
        super().__init__()
        self._problem = problem
        self._rows = packed_k_rows(len(sf), len(layout), problem.ks, problem.gran_k)
        self._launches: list[tuple[int, int, Launch]] = []
        self._on_device = problem.ks is None
        # Where no group has a block, every word is spare.
        if not self._rows or not sf.numel() or not len(layout if problem.ks is None else problem.ks):
            return
        for first, row, params in grouped_params(problem, sf, layout, self._rows):
            pieces = params.rows * ceil_div(params.columns, PIECE)
            if pieces:
                launch = _launcher(PACK_K_GROUPED, params, pieces, sf.device)
                self._launches.append((4 * first * sf.stride(0), 4 * row * sf.shape[1], launch))

    def __call__(self, sf: Tensor, layout: Tensor | None = None) -> Tensor:
        if not self._launches:
            return sf.new_zeros(self._rows, sf.shape[1], dtype=torch.int32)
        return super().__call__(sf, layout)

    def _run(self, sf: Tensor, layout: Tensor | None, flag: int) -> Tensor:
        assert layout is not None
        out = sf.new_empty(self._rows, sf.shape[1], dtype=torch.int32)
        sizes = layout.data_ptr() if self._on_device else 0
        for skipped, written, launch in self._launches:
            launch([sf.data_ptr() + skipped, out.data_ptr() + written, sizes, flag])
        return out

    def _definition(self, sf: Tensor, layout: Tensor | None) -> Tensor:
        p = self._problem
        sizes: Any = layout if self._on_device else p.ks
        return packed_ue8m0_k_grouped(sf, sizes, p.gran_k, p.psum, p.alignment, self._rows)
