"""Products with an axis of no elements: there is nothing to multiply, and no kernel runs."""

from __future__ import annotations

import torch
from torch import Tensor

from dg_core.backend import Gemm
from dg_core.layout import aligned_rows, in_a_group, psum_rows


def nothing(*tensors: Tensor | None) -> None:
    """Without rows, columns or groups nothing is written."""


def without_product(
    problem: Gemm, a: Tensor, sfa: Tensor | None, b: Tensor, sfb: Tensor | None, d: Tensor, c: Tensor | None,
    layout: Tensor | None = None,
) -> None:  # fmt: skip
    """K is zero: D is C, or zeros, in the rows that belong to a group; holes between heads stay."""
    if layout is not None:
        rows = written_rows(problem, layout, d)
        d.masked_fill_(rows[..., None], 0)
    elif c is None and problem.head_splits is not None:
        left, hole, right = problem.head_splits
        heads = d.view(d.shape[0], -1, left + hole + right)
        heads[:, :, :left].zero_()
        heads[:, :, left + hole :].zero_()
    elif c is None:
        d.zero_()
    elif not problem.in_place:
        d.copy_(c)


def written_rows(problem: Gemm, layout: Tensor, d: Tensor) -> Tensor:
    """bool ``[M]``, or ``[G, M]`` under ``masked``: the rows of D that the problem writes. Nothing is read
    back."""
    row = torch.arange(problem.m, device=d.device)
    if problem.grouping == "masked":
        return row < layout[:, None]
    if problem.grouping == "contiguous":
        return (layout >= 0) & (layout < problem.groups)
    starts, ends = psum_rows(layout, problem.alignment, problem.m)
    if problem.zero_padding:
        ends = aligned_rows(ends, problem.alignment)
    return in_a_group(starts, ends.clamp(max=problem.m), problem.m)
