"""Products on Hopper, dense and in groups: a configuration and the forms of the operands become a launch.

What is launched is known from shapes, strides, dtypes and alignment alone; a call brings addresses. Where
every operand is loaded as it is, a plan can be bound to the addresses of a call, and nothing else happens in
it.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from dg_core import config as settings
from dg_core.backend import Gemm
from dg_core.layout import PACKED_FP4, ceil_div

from . import jit, structs
from .driver import Function, driver
from .launch import Launcher, LaunchSpec, MapSpec, current_stream, make_launcher, raw_stream
from .operands import BLOCK, NONE, K, Operands, Stored, plan_operands
from .plans import Choice, GemmTask, Settings, choose
from .source import SCALE_ROW, SMEM_BYTES, GemmConfig, gemm_source
from .tiling import BOX_COLUMNS, CHUNK_ROWS, FP4_BYTES, K_BYTES, OWN_A, rows_loaded
from .workspace import workspace, workspace_bytes

BOX = (16, BOX_COLUMNS)  # rows and columns of D that a warp stores at once
ARCH = "sm90a"
# Positions in the primitive's tensors.
A, SFA, B, SFB, D, C, LAYOUT = range(7)
LAID_OUT = ("contiguous", "psum", "masked")  # and those whose rows a tensor on the device tells of


class Scale(ctypes.Structure):
    """``dg::sm90::Scale``."""

    _fields_ = (
        ("values", ctypes.c_void_p),
        ("row_stride", ctypes.c_int64),
        ("k_stride", ctypes.c_int64),
        ("group_stride", ctypes.c_int64),
    )


class Params(ctypes.Structure):
    """``dg::sm90::Params``; the tensor maps stand first, so that an aligned structure aligns them."""

    _fields_ = (
        ("p_map", structs.TensorMap),
        ("q_map", structs.TensorMap),
        ("p_scale_map", structs.TensorMap),
        ("q_scale_map", structs.TensorMap),
        ("d_map", structs.TensorMap),
        ("p_scale", Scale),
        ("q_scale", Scale),
        ("d", ctypes.c_void_p),
        ("c", ctypes.c_void_p),
        ("workspace", ctypes.c_void_p),
        ("layout", ctypes.c_void_p),
        ("d_stride", ctypes.c_int64),
        ("c_stride", ctypes.c_int64),
        ("d_group_stride", ctypes.c_int64),
        ("c_group_stride", ctypes.c_int64),
        ("rows_p", ctypes.c_uint32),
        ("rows_q", ctypes.c_uint32),
        ("k_blocks", ctypes.c_uint32),
        ("tiles_p", ctypes.c_uint32),
        ("tiles_q", ctypes.c_uint32),
        ("groups", ctypes.c_uint32),
        ("alignment", ctypes.c_uint32),
        ("zero_gaps", ctypes.c_uint32),
        ("head_left", ctypes.c_uint32),
        ("head_hole", ctypes.c_uint32),
        ("head_width", ctypes.c_uint32),
        ("wide", ctypes.c_uint32),
        ("even", ctypes.c_uint32),
        ("pad", ctypes.c_uint32 * 3),  # to a multiple of a tensor map's alignment
    )


# The task ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Output:
    """How D and C lie: elements between rows (of one row: 0) and between groups (of one: 0), which pieces of
    a row of D are aligned, and whether it has to leave piece by piece (``plain``), since bulk copies know
    neither C nor heads."""

    d_stride: int
    d_apart: int
    c_stride: int | None
    c_apart: int
    itemsize: int
    heads: tuple[int, int, int]
    wide: bool
    even: bool
    plain: bool


def output(problem: Gemm, d: Tensor, c: Tensor | None) -> Output:
    """How the tensors of a problem lie. Rows are contiguous, which the front has checked."""
    size = d.element_size()
    stride, apart = _outer_strides(d)
    heads = problem.head_splits or (0, 0, 0)
    address = d.data_ptr()
    whole = not any(heads)
    wide = whole and all(x % 16 == 0 for x in (address, stride * size, apart * size))
    even = address % (2 * size) == 0 and not any(x % 2 for x in (stride, apart, *heads))
    added, added_apart = (None, 0) if c is None else _outer_strides(c)
    plain = size != 2 or c is not None or not wide
    return Output(stride, apart, added, added_apart, size, heads, wide, even, plain)


def _outer_strides(x: Tensor) -> tuple[int, int]:
    """Elements from row to row and from group to group; 0 where there is one."""
    rows = x.stride(-2) if x.shape[-2] > 1 else 0
    return rows, x.stride(0) if x.dim() == 3 and x.shape[0] > 1 else 0


def expected_rows(problem: Gemm) -> int:
    """Rows to expect in a group: the caller's hint where it can be true, else what there is room for. A group
    that has rows at all has those up to the next one's beginning, whether or not some of them are pads."""
    if problem.grouping in ("dense", "batched"):
        return problem.m
    if 0 < problem.expected_m <= problem.m:
        return problem.expected_m
    if problem.grouping == "masked":
        return problem.m
    return max(ceil_div(problem.m, problem.groups), min(problem.alignment, problem.m), 1)


def grouping_of(problem: Gemm) -> dict[str, Any]:
    """What the chooser is told of groups: no more than can have rows, and one at least."""
    return {
        "grouping": problem.grouping,
        "groups": max(problem.groups_with_rows, 1),
        "alignment": problem.alignment if problem.grouping == "contiguous" else 0,
    }


def task_of(problem: Gemm, operands: Operands, out: Output) -> GemmTask:
    """What the chooser is asked."""
    a, b = operands.a.result, operands.b.result
    return GemmTask(
        expected_rows(problem), problem.n, problem.k,
        element_bytes=a.dtype.itemsize,
        d_bytes=out.itemsize,
        scales=operands.family,
        a_mn=_is_mn(a),
        b_mn=_is_mn(b),
        sfa_k_major=operands.family == BLOCK and operands.sfa is not None and operands.sfa.result.major == K,
        plain_store=out.plain,
        a_fp4=a.dtype == PACKED_FP4,
        b_fp4=b.dtype == PACKED_FP4,
        **grouping_of(problem),
    )  # fmt: skip


def _is_mn(x: Stored) -> bool:
    return x.dtype.itemsize == 2 and x.major is not None and x.major != K


# The launch -------------------------------------------------------------------------------------------------


def _apart(x: Stored, grouped: bool) -> dict[str, int]:
    """What a map says of groups, for an operand that has them."""
    return {"groups": x.groups, "group_bytes": x.apart * x.dtype.itemsize} if grouped else {}


def _operand_map(field: str, slot: int, x: Stored, rows: int, what: str, grouped: bool) -> MapSpec:
    """The map of P or Q; ``rows`` is what one copy loads where K is contiguous."""
    dtype, elements = ("uint8", K_BYTES) if x.dtype.itemsize == 1 else ("bfloat16", K_BYTES // 2)
    swizzle = K_BYTES
    if x.dtype == PACKED_FP4:
        elements, swizzle = FP4_BYTES, 0
    offset = getattr(Params, field).offset
    if _is_mn(x):
        shape, apart, box = (x.shape[1], x.shape[0]), x.strides[1], (elements, CHUNK_ROWS)
    else:
        shape, apart, box = x.shape, x.strides[0], (rows, elements)
    row_bytes = apart * x.dtype.itemsize
    return MapSpec(offset, slot, dtype, shape, row_bytes, box, swizzle, 256, what, **_apart(x, grouped))


def _scale_map(
    field: str, slot: int, x: Stored, config: GemmConfig, rows: int, what: str, grouped: bool
) -> MapSpec:
    """The map of scales of single rows, of which a copy loads those of ``rows`` rows."""
    offset = getattr(Params, field).offset
    if config.scale_k_major:
        shape, apart, box = x.shape, x.strides[0], (rows, 4)
    else:
        shape, apart, box = (x.shape[1], x.shape[0]), x.strides[1], (config.scale_steps, rows)
    return MapSpec(offset, slot, "float32", shape, apart * 4, box, 0, 128, what, **_apart(x, grouped))


def _d_map(slot: int, problem: Gemm, out: Output) -> MapSpec:
    """The map of D for bulk copies."""
    row_bytes = (out.d_stride or ceil_div(problem.n, 8) * 8) * out.itemsize
    grouped = problem.grouping in OWN_A
    groups = {"groups": problem.groups, "group_bytes": out.d_apart * out.itemsize} if grouped else {}
    shape = problem.m, problem.n
    return MapSpec(Params.d_map.offset, slot, "bfloat16", shape, row_bytes, BOX, 128, 0, "d", **groups)


def launch_spec(
    config: GemmConfig, blocks: int, problem: Gemm, operands: Operands, out: Output, function: Function,
    slots: Sequence[int], pdl: bool, workspace_slot: int | None = None,
) -> LaunchSpec:  # fmt: skip
    """One launch of a product, or of the products of all groups.

    Args:
        blocks: of the grid, whole clusters.
        slots: for each of the primitive's tensors, where its address stands among those of a call.
        workspace_slot: the same of the workspace, where the kernel takes one.
    """
    params = structs.aligned(Params)
    sides = {"a": (operands.a.result, operands.sfa, A, SFA), "b": (operands.b.result, operands.sfb, B, SFB)}
    order = ("b", "a") if config.swap else ("a", "b")
    grouped = {"a": problem.grouping in OWN_A, "b": problem.grouping != "dense"}
    maps, pointers = [], [(Params.d.offset, slots[D])]
    for side, name, loaded, rows, kind in (
        ("p", order[0], rows_loaded(config), config.block_p, config.scale_p),
        ("q", order[1], config.block_q, config.block_q, config.scale_q),
    ):
        x, sf, slot, sf_slot = sides[name]
        maps.append(_operand_map(f"{side}_map", slots[slot], x, loaded, name, grouped[name]))
        setattr(params, f"rows_{side}", x.shape[0])
        setattr(params, f"tiles_{side}", ceil_div(x.shape[0], rows))
        if sf is None:
            continue
        if kind == SCALE_ROW:
            what = f"sf{name}"
            maps.append(
                _scale_map(f"{side}_scale_map", slots[sf_slot], sf.result, config, rows, what, grouped[name])
            )
        else:
            field = getattr(Params, f"{side}_scale")
            setattr(params, f"{side}_scale", Scale(None, *sf.result.strides, sf.result.apart))
            pointers.append((field.offset + Scale.values.offset, slots[sf_slot]))
    if config.tma_store:
        maps.append(_d_map(slots[D], problem, out))
    if out.c_stride is not None:
        pointers.append((Params.c.offset, slots[C]))
        params.c_stride, params.c_group_stride = out.c_stride, out.c_apart
    if problem.grouping in LAID_OUT:
        pointers.append((Params.layout.offset, slots[LAYOUT]))
    if workspace_slot is not None:
        pointers.append((Params.workspace.offset, workspace_slot))
    params.d_stride, params.d_group_stride = out.d_stride, out.d_apart
    params.groups, params.alignment = problem.groups, max(problem.alignment, 1)
    params.zero_gaps = problem.zero_padding
    params.k_blocks = ceil_div(problem.k * config.element_bytes, K_BYTES)
    left, hole, right = out.heads
    params.head_left, params.head_hole, params.head_width = left, hole, left + right
    params.wide, params.even = out.wide, out.even
    return LaunchSpec(
        function, (blocks, 1, 1), (config.threads, 1, 1), (config.split, 1, 1), pdl, bytes(params),
        tuple(maps), tuple(pointers),
    )  # fmt: skip


def load(config: GemmConfig) -> Function:
    """The kernel of a configuration in the current context, compiled where no cache holds it."""
    kernel = jit.default().build(config.name, gemm_source(config), ARCH)
    return driver().load(kernel.image, config.name, kernel.key, kernel.constant(SMEM_BYTES))


# Plans ------------------------------------------------------------------------------------------------------


def wishes() -> Settings:
    """What the caller has restricted by settings."""
    return Settings(settings.get_block_size_multiple_of(), settings.get_batch_invariant())


def decide(problem: Gemm, operands: Operands, out: Output, processors: int) -> Choice:
    """The configuration for a problem under the settings of now."""
    return choose(task_of(problem, operands, out), processors, wishes())


# Of bfloat16: values of K that the tensor core may add to a float32 D. It rounds its sums towards zero, which
# over 147456 random products is a calc_diff of 1.6e-9 on one H200; parts of this length stay below 1e-9.
LONG_K = 65536


def plan(problem: Gemm, tensors: Sequence[Tensor | None]) -> ProductPlan | LongPlan:
    """The plan of a product with M, N, K and groups above zero, under the settings of now."""
    d = tensors[D]
    assert d is not None
    operands = plan_operands(problem, tensors)
    if operands.family == NONE and d.dtype == torch.float32 and problem.k > LONG_K:
        return LongPlan(problem, tensors)
    out = output(problem, d, tensors[C])
    choice = decide(problem, operands, out, settings.get_num_sms())
    layout = tensors[LAYOUT] if problem.grouping in LAID_OUT else None
    return ProductPlan(problem, operands, out, choice.config, choice.blocks, d.device, layout)


class LongPlan:
    """A product whose K is taken in parts, each added to D in place."""

    def __init__(self, problem: Gemm, tensors: Sequence[Tensor | None]) -> None:
        self._parts: list[tuple[int, int, ProductPlan | LongPlan]] = []
        for start in range(0, problem.k, LONG_K):
            size = min(LONG_K, problem.k - start)
            part = replace(problem, k=size)
            if start:
                part = replace(part, accumulate=True, in_place=True)
            self._parts.append((start, size, plan(part, self._views(tensors, start, size))))

    @staticmethod
    def _views(tensors: Sequence[Tensor | None], start: int, size: int) -> list[Tensor | None]:
        """The tensors of one part; after the first one D is C."""
        views = list(tensors)
        for position in (A, B):
            x = tensors[position]
            views[position] = None if x is None else x.narrow(-1, start, size)
        if start:
            views[C] = tensors[D]
        return views

    def __call__(self, *tensors: Tensor | None) -> None:
        for start, size, part in self._parts:
            part(*self._views(tensors, start, size))  # type: ignore[arg-type]  # a and b are there


class ProductPlan:
    """The plan of one product, or of the products of all groups, with M, N and K above zero."""

    def __init__(
        self, problem: Gemm, operands: Operands, out: Output, config: GemmConfig, blocks: int,
        device: torch.device, layout: Tensor | None = None,
    ) -> None:  # fmt: skip
        self.operands, self.config, self.device = operands, config, device
        self._compact = layout is not None and not layout.is_contiguous()
        with torch.cuda.device(device):
            function = load(config)
        pdl = settings.get_pdl()
        self._shared_bytes = shared = workspace_bytes(config, blocks)
        # The workspace, where there is one, stands before the tensors.
        first, workspace_slot = (1, 0) if shared else (0, None)

        def launcher(slots: Sequence[int]) -> Launcher:
            slots = [slot + first for slot in slots]
            spec = launch_spec(config, blocks, problem, operands, out, function, slots, pdl, workspace_slot)
            return make_launcher(spec)

        self._launcher = launcher
        self._launch = launcher(range(LAYOUT + 1))
        if operands.as_is and not self._compact:
            self.bind = self._bind

    def __call__(
        self, a: Tensor, sfa: Tensor | None, b: Tensor, sfb: Tensor | None, d: Tensor, c: Tensor | None,
        layout: Tensor | None = None,
    ) -> None:  # fmt: skip
        if layout is not None and self._compact:
            layout = layout.contiguous()
        tensors = (*self.operands.apply(a, sfa, b, sfb), d, c, layout)
        addresses = [0 if x is None else x.data_ptr() for x in tensors]
        self._start(self._launch, addresses, raw_stream(self.device))

    def _start(self, launch: Launcher, addresses: list[int], stream: int) -> None:
        """One launch, with a workspace where the kernel takes one."""
        if self._shared_bytes:
            with torch.cuda.device(self.device):
                shared = workspace(self.device, stream, self._shared_bytes)
                launch([shared.data_ptr(), *addresses], stream)
        else:
            launch(addresses, stream)

    def _bind(self, positions: Sequence[int]) -> Callable[[list[int]], None]:
        """The same for the addresses of a call, of which the primitive's tensors have ``positions``."""
        launch = self._launcher(positions)
        stream = current_stream(self.device)
        if self._shared_bytes:
            return lambda addresses: self._start(launch, addresses, stream())
        return lambda addresses: launch(addresses, stream())
