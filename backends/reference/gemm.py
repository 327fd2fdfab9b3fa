"""``D = C + A @ B.T`` in all its groupings."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from dg_core.backend import Gemm
from dg_core.layout import aligned_rows, psum_rows

from .operand import TILE, Operand, on_host, product, steps, write_product


def gemm(
    p: Gemm, a: Tensor, sfa: Tensor | None, b: Tensor, sfb: Tensor | None, d: Tensor, c: Tensor | None,
    layout: Tensor | None,
) -> None:  # fmt: skip
    """Solve one problem; see ``dg_core.backend.Gemm`` for the shapes under each grouping."""

    def left(g: int) -> Operand:
        return Operand(a[g], None if sfa is None else sfa[g], p.sfa, p.packed_axes[0])

    def right(g: int) -> Operand:
        return Operand(b[g], None if sfb is None else sfb[g], p.sfb, p.packed_axes[1])

    if p.m == 0 or p.n == 0:
        return
    if p.grouping == "dense":
        target = None if p.head_splits is None else _scattered(p.n, p.head_splits, d.device)
        pair = Operand(a, sfa, p.sfa, p.packed_axes[0]), Operand(b, sfb, p.sfb, p.packed_axes[1])
        write_product([pair], p.k, d, c, target)
    elif p.grouping == "batch_sum":
        write_product([(left(g), right(g)) for g in range(p.groups)], p.k, d, c)
    elif p.grouping == "batched":
        for g in range(p.groups):
            write_product([(left(g), right(g))], p.k, d[g], None if c is None else c[g])
    elif layout is not None and p.grouping == "masked":
        row = torch.arange(p.m, device=d.device)
        for g in range(p.groups):
            _write_rows(p, left(g), right(g), d[g], row < layout[g])
    elif layout is not None:
        _labelled(p, Operand(a, sfa, p.sfa, p.packed_axes[0]), [right(g) for g in range(p.groups)], d, layout)


def _scattered(n: int, splits: tuple[int, int, int], device: torch.device) -> Tensor:
    """Where each column of the product goes in d: heads of left + right columns with a hole of mid between
    the two."""
    left, mid, right = splits
    column = torch.arange(n, device=device)
    head, within = column // (left + right), column % (left + right)
    return head * (left + mid + right) + within + torch.where(within >= left, mid, 0)


def _write_rows(p: Gemm, a: Operand, b: Operand, d: Tensor, wanted: Tensor) -> None:
    """``d[i] = A[i] @ B.T`` for the rows where ``wanted`` is true; the others stay as they are.

    On the host only those rows are computed. Elsewhere nothing may be read back, so all rows are, and
    selected.
    """
    picked = wanted.nonzero().squeeze(1) if on_host(d) else None
    for columns in steps(p.n, TILE):
        for part in steps(p.m if picked is None else picked.numel(), TILE):
            rows = part if picked is None else picked[part]
            value = product([(a, b)], rows, columns, p.k, d.device).to(d.dtype)
            if picked is None:
                value = torch.where(wanted[part, None], value, d[part, columns])
            d[rows, columns] = value


def _write_range(p: Gemm, a: Operand, b: Operand, d: Tensor, start: int, stop: int) -> None:
    """``d[i] = A[i] @ B.T`` for the rows from ``start`` to ``stop``."""
    for columns in steps(p.n, TILE):
        for part in steps(max(stop - start, 0), TILE):
            rows = slice(start + part.start, start + part.stop)
            d[rows, columns] = product([(a, b)], rows, columns, p.k, d.device).to(d.dtype)


def _labelled(p: Gemm, a: Operand, weights: Sequence[Operand], d: Tensor, layout: Tensor) -> None:
    """Rows that belong to groups by label or, under a psum layout, by the group's end row."""
    if p.grouping == "contiguous":
        for g, b in enumerate(weights):
            _write_rows(p, a, b, d, layout == g)
        return
    starts, ends = psum_rows(layout, p.alignment, p.m)
    gap_ends = aligned_rows(ends, p.alignment)
    # Group by group, since a table of rows x groups may take more memory than the operands. Gaps come first:
    # where ends are not in order, one may lie over the rows of a group, which then are written.
    if on_host(d):
        ranges = list(zip(starts.tolist(), ends.tolist(), gap_ends.tolist(), strict=True))
        for _, end, gap_end in ranges if p.zero_padding else ():
            d[end:gap_end] = 0
        for b, (start, end, _) in zip(weights, ranges, strict=True):
            _write_range(p, a, b, d, start, end)
        return
    row = torch.arange(p.m, dtype=torch.int32, device=d.device)
    for g in range(len(weights) if p.zero_padding else 0):
        d.masked_fill_(((row >= ends[g]) & (row < gap_ends[g]))[:, None], 0)
    for g, b in enumerate(weights):
        _write_rows(p, a, b, d, (row >= starts[g]) & (row < ends[g]))
