"""Products in all groupings: a problem becomes a choice of kernel, and that a launch.

A choice is made from the problem alone. Strides, dtypes and alignment become the arguments of the launch when
the plan is made; a call brings addresses.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from dg_core.backend import Gemm, Plan
from dg_core.layout import FP8_DTYPES, PACKED_FP4, PER_ROW, ceil_div, dtype_name

from .library import Library
from .operands import Values, outer_strides, rows_contiguous, scales, values

# In the order of csrc_hip/include/dg_hip/groups.h.
GROUPINGS = ("dense", "batched", "batch_sum", "contiguous", "psum", "masked", "k_grouped")
# Groupings whose groups have rows of their own: a grid goes through all of them.
OWN_ROWS = ("batched", "masked", "k_grouped")
LARGE, SMALL = (128, 128), (32, 128)  # rows and columns of a block's tile
FEW_ROWS = 32  # of one group, up to which the small tile is taken
MOST_BLOCKS = 1 << 20  # each goes on to further tiles
MOST_ROWS = 2**31 - 256  # the end of the last tile is an int32, too
BF16, FP8, FP4 = "bf16", "fp8", "fp4"
ALONG_K = -1  # packed FP4 that the kernels unpack themselves


# The choice -------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Choice:
    """A kernel and its grid.

    Attributes:
        element: ``bf16``, ``fp8``, or ``fp4`` where one operand or both are packed FP4.
        unit: of K that a partial sum covers before it is scaled; 0 where scales, if there are any, are of
            whole rows and columns and applied on the way out.
        tile: rows and columns of a block.
        tiles: along M, along N, and of all groups that have their own.
    """

    element: str
    unit: int
    tile: tuple[int, int]
    tiles: tuple[int, int, int]

    @property
    def blocks(self) -> int:
        return min(self.tiles[2], MOST_BLOCKS)

    @property
    def kernel(self) -> str:
        scaled = {0: "", 128: "_block", 32: "_block32"}[self.unit]
        return f"gemm_{self.element}{scaled}_{self.tile[0]}x{self.tile[1]}"


def expected_rows(p: Gemm) -> int:
    """Rows to expect in one group: the caller's hint where it can be true."""
    if p.grouping in ("dense", "batched", "batch_sum"):
        return p.m
    if 0 < p.expected_m <= p.m:
        return p.expected_m
    return p.m if p.grouping == "masked" else ceil_div(p.m, max(p.groups, 1))


def scale_unit(p: Gemm) -> int:
    """The ``unit`` of a choice: the least granularity along K of the two, if any is applied inside."""
    if p.sfa is None or p.sfb is None:
        return 0
    if p.sfa == p.sfb == PER_ROW and p.grouping != "batch_sum":  # whose summands have scales of their own
        return 0
    return min((x.gran_k for x in (p.sfa, p.sfb) if x.gran_k), default=128)


def choose(p: Gemm, element: str) -> Choice:
    """The kernel for a problem on operands of ``element``, and how many blocks run it."""
    tile = SMALL if expected_rows(p) <= FEW_ROWS else LARGE
    groups = p.groups if p.grouping in OWN_ROWS else 1
    rows, columns = ceil_div(p.m, tile[0]), ceil_div(p.n, tile[1])
    return Choice(element, scale_unit(p), tile, (rows, columns, rows * columns * groups))


_WORDS = {
    "contiguous": "a tile is multiplied once for each group that its labels name",
    "psum": "rows find their group among the end rows, 64 of them at a time",
    "masked": "tiles behind a group's count are left at once",
    "batch_sum": "a block adds all summands of its tile, in their order",
}


def explain(p: Gemm) -> str:
    """What would run, as far as a problem tells; where the dtype decides between two kernels, both."""
    if p.sfa is not None:
        elements = [FP4 if ALONG_K in p.packed_axes else FP8]
    else:
        elements = [BF16, FP8] if p.op.startswith("cublaslt") else [BF16]
    choices = [choose(p, element) for element in elements]
    rows, columns = choices[0].tile
    if choices[0].blocks == 0:
        return "no kernel: there is nothing to write"
    kernels, blocks = " or ".join(choice.kernel for choice in choices), choices[0].blocks
    parts = [f"{kernels}: {blocks} blocks of 256 threads, a tile of {rows} x {columns} each"]
    if choices[0].unit:
        parts.append(f"partial sums of {choices[0].unit} along K are scaled one by one")
    elif p.sfa is not None:
        parts.append("scales are applied on the way out")
    if p.grouping in _WORDS:
        parts.append(_WORDS[p.grouping])
    if p.grouping in ("contiguous", "psum", "masked"):
        parts.append(f"{expected_rows(p)} rows are expected in a group")
    if any(part in ("nn", "tn", "tt") for part in p.op.split("_")):
        parts.append("an operand that has its rows contiguous is copied with K contiguous first")
    return "; ".join(parts)


# What it cannot take ----------------------------------------------------------------------------------------


def _element(a: Tensor, b: Tensor) -> str | None:
    pair = {a.dtype, b.dtype}
    if pair == {torch.bfloat16}:
        return BF16
    if pair <= {*FP8_DTYPES, PACKED_FP4}:
        return FP4 if PACKED_FP4 in pair else FP8
    return None


def obstacle(problem: Gemm, tensors: tuple[Tensor | None, ...]) -> str:
    """What of the tensors has no kernel, as the end of a sentence about the backend; empty if nothing."""
    a, _, b, _, d, c, _ = tensors
    assert a is not None
    assert b is not None
    assert d is not None
    if _element(a, b) is None:
        return (
            f"multiplies bfloat16, float8_e4m3fn and packed FP4, not {dtype_name(a.dtype)} with "
            f"{dtype_name(b.dtype)}; the reference backend has them"
        )
    if max(problem.m, problem.n, *choose(problem, FP8).tiles) > MOST_ROWS:
        return f"counts rows, columns and tiles up to {MOST_ROWS}"
    for name, x in (("d", d), ("c", c)):
        if x is not None and x.dtype not in (torch.bfloat16, torch.float32):
            return (
                f"has {name} in bfloat16 and float32, not {dtype_name(x.dtype)}; the reference backend has it"
            )
    return ""


# The plan ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class GemmPlan:
    """One launch for tensors that lie as those that it was made for.

    Attributes:
        fields: the arguments that are no addresses.
        scattered: D has no contiguous rows, so a contiguous copy is written, and copied back.
    """

    library: Library
    choice: Choice
    fields: dict[str, int]
    a: Values
    b: Values
    scattered: bool

    def __call__(
        self, a: Tensor, sfa: Tensor | None, b: Tensor, sfb: Tensor | None, d: Tensor, c: Tensor | None,
        layout: Tensor | None,
    ) -> None:  # fmt: skip
        if self.choice.blocks == 0:
            return
        out = d.contiguous() if self.scattered else d
        if c is not None and not rows_contiguous(c):
            c = c.contiguous()
        self.library.launch(
            self.choice.kernel, self.choice.blocks,
            a=self.a.run(a), sfa=sfa, b=self.b.run(b), sfb=sfb, d=out, c=c, layout=layout, **self.fields,
        )  # fmt: skip
        if self.scattered:
            d.copy_(out)


def _outer_strides(x: Tensor) -> tuple[int, int]:
    """Elements between rows and between groups; of a contiguous copy where rows are not contiguous."""
    return outer_strides(x) if rows_contiguous(x) else outer_strides(x.new_empty(x.shape, device="meta"))


def output_fields(d: Tensor, c: Tensor | None, choice: Choice) -> dict[str, int]:
    """The fields of D, C and the grid."""
    d_row, d_group = _outer_strides(d)
    c_row, c_group = (0, 0) if c is None else _outer_strides(c)
    return {
        "d_row": d_row, "d_group": d_group, "d_f32": int(d.dtype == torch.float32),
        "c_row": c_row, "c_group": c_group, "c_f32": int(c is not None and c.dtype == torch.float32),
        "tiles_p": choice.tiles[0], "tiles_q": choice.tiles[1], "tiles": choice.tiles[2],
        "grid": choice.blocks,
    }  # fmt: skip


def plan(problem: Gemm, tensors: tuple[Tensor | None, ...], library: Library) -> Plan:
    """A function of (a, sfa, b, sfb, d, c, layout) for tensors with these shapes, strides and dtypes."""
    a, sfa, b, sfb, d, c, layout = tensors
    assert a is not None
    assert b is not None
    assert d is not None
    element = _element(a, b)
    assert element is not None
    left = values("a", a, problem.packed_axes[0])
    right = values("b", b, problem.packed_axes[1])
    if element == FP4 and not (left.fp4 or right.fp4):
        element = FP8  # what was packed along rows is FP8 by then
    choice = choose(problem, element)
    heads = problem.head_splits or (0, 0, 0)
    fields: dict[str, Any] = {
        "m": problem.m, "n": problem.n, "k": problem.k * (2 if element == BF16 else 1),
        **left.fields("a"), **right.fields("b"),
        **scales("sfa", sfa, problem.sfa, a.dim(), problem.k, choice.unit),
        **scales("sfb", sfb, problem.sfb, b.dim(), problem.k, choice.unit),
        **output_fields(d, c, choice),
        "layout_step": 0 if layout is None else layout.stride(0),
        "grouping": GROUPINGS.index(problem.grouping), "groups": problem.groups,
        "alignment": problem.alignment, "zero_gaps": int(problem.zero_padding),
        "head_left": heads[0], "head_hole": heads[1], "head_width": heads[0] + heads[2],
        "k_flat": 0, "k_gran": 1,
    }  # fmt: skip
    return GemmPlan(library, choice, fields, left, right, not rows_contiguous(d))
