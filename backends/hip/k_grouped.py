"""Products grouped along K: the kernels of ``gemm``, with a group's stretch of K as its operands.

Each block finds its group's stretch among the sizes or ends by itself, so sizes may be known to the device
alone.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from dg_core.backend import KGrouped, Plan
from dg_core.errors import UnsupportedError
from dg_core.layout import FP8_DTYPES, ceil_div, dtype_name

from .gemm import BF16, FEW_ROWS, FP8, GROUPINGS, LARGE, MOST_ROWS, SMALL, Choice, GemmPlan, output_fields
from .library import Library
from .operands import AS_IS, LOAD_BYTES, Values, rows_contiguous, scales, values

_ELEMENTS = {torch.bfloat16: BF16, **dict.fromkeys(FP8_DTYPES, FP8)}


def choose(p: KGrouped, element: str) -> Choice:
    """The kernel for a problem on operands of ``element``, and its tiles."""
    tile = SMALL if p.m <= FEW_ROWS else LARGE
    rows, columns = ceil_div(p.m, tile[0]), ceil_div(p.n, tile[1])
    return Choice(element, p.sf.gran_k if p.sf else 0, tile, (rows, columns, rows * columns * p.groups))


def obstacle(problem: KGrouped, tensors: tuple[Tensor | None, ...]) -> str:
    """What of the tensors has no kernel, as the end of a sentence about the backend; empty if nothing."""
    a, b = tensors[0], tensors[2]
    assert a is not None
    assert b is not None
    if a.dtype != b.dtype or a.dtype not in _ELEMENTS:
        return f"multiplies bfloat16 and float8_e4m3fn, not {dtype_name(a.dtype)} with {dtype_name(b.dtype)}"
    if max(problem.m, problem.n, *choose(problem, FP8).tiles) > MOST_ROWS:
        return f"counts rows, columns and tiles up to {MOST_ROWS}"
    return ""


def explain(p: KGrouped) -> str:
    choice = choose(p, FP8 if p.sf else BF16)
    if choice.blocks == 0:
        return "no kernel: there is nothing to write"
    rows, columns = choice.tile
    operands = (
        "each group's operands lie with K contiguous" if p.k_major
        else "operands are copied with K contiguous"
    )  # fmt: skip
    return (
        f"{choice.kernel}: {choice.blocks} blocks of 256 threads, a tile of {rows} x {columns} of one group "
        f"each; {operands}; a block adds up the sizes of the groups before its own"
    )


@dataclass(frozen=True)
class KGroupedPlan:
    """A launch of ``gemm``, and the sizes where the host had them."""

    gemm: GemmPlan
    k_major: bool
    sizes: Tensor | None

    def __call__(
        self, a: Tensor, sfa: Tensor | None, b: Tensor, sfb: Tensor | None, d: Tensor, c: Tensor | None,
        layout: Tensor | None,
    ) -> None:  # fmt: skip
        left, right = (x.reshape(-1) if self.k_major else x.t() for x in (a, b))
        self.gemm(left, sfa, right, sfb, d, c, layout if self.sizes is None else self.sizes)


def _values(name: str, x: Tensor, k_major: bool) -> Values:
    if not k_major:
        return values(name, x.t(), 0)
    aligned = not x.is_contiguous() or x.data_ptr() % LOAD_BYTES == 0  # a copy is
    return Values(AS_IS, 0, 0, aligned, False)


@functools.cache
def _on_device(ks: tuple[int, ...], device: torch.device) -> Tensor:
    """Sizes of groups, kept for good: a captured graph reads them, whatever becomes of the plan."""
    if device.type != "cpu" and torch.cuda.is_current_stream_capturing():
        raise UnsupportedError(
            f"k_grouped: sizes {ks} that only the host knows cannot be copied to {device} inside a capture; "
            "make one such call before it, or give the sizes on the device"
        )
    return torch.tensor(ks, dtype=torch.int32, device=device)


def plan(problem: KGrouped, tensors: tuple[Tensor | None, ...], library: Library) -> Plan:
    """A function of (a, sfa, b, sfb, d, c, layout) for tensors with these shapes, strides and dtypes."""
    a, sfa, b, sfb, d, c, layout = tensors
    assert a is not None
    assert b is not None
    assert d is not None
    p, choice = problem, choose(problem, _ELEMENTS[a.dtype])
    sizes = None
    if p.ks is not None and not p.psum:
        sizes = _on_device(p.ks, d.device)
    left, right = _values("a", a, p.k_major), _values("b", b, p.k_major)
    fields: dict[str, Any] = {
        "m": p.m, "n": p.n, "k": p.sum_k, **left.fields("a"), **right.fields("b"),
        **scales("sfa", sfa, p.sf, 2, p.sum_k, choice.unit),
        **scales("sfb", sfb, p.sf, 2, p.sum_k, choice.unit),
        **output_fields(d, c, choice),
        "layout_step": layout.stride(0) if sizes is None and layout is not None else 1,
        "grouping": GROUPINGS.index("k_grouped"), "groups": p.groups,
        "alignment": p.alignment if p.psum else 0, "zero_gaps": 0,
        "head_left": 0, "head_hole": 0, "head_width": 0,
        "k_flat": int(p.k_major), "k_gran": p.sf.gran_k if p.sf else 1,
    }  # fmt: skip
    for name, sf in (("sfa_parts", sfa), ("sfb_parts", sfb)):
        fields[name] = 0 if sf is None else sf.shape[1]  # of all groups; a group's own are clipped to them
    launch = GemmPlan(library, choice, fields, left, right, not rows_contiguous(d))
    return KGroupedPlan(launch, p.k_major, sizes)
