"""``D[g] = C[g] + A_g @ B_g.T``: every group owns a stretch of K."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from dg_core.backend import KGrouped
from dg_core.layout import ScaleFormat, ceil_div, k_scale_starts, k_stretches, unpack_ue8m0_from_int

from .operand import Operand, Rows, Source, on_host, pick, row_numbers, select, write_product


def k_grouped(
    p: KGrouped, a: Tensor, sfa: Tensor | None, b: Tensor, sfb: Tensor | None, d: Tensor, c: Tensor | None,
    layout: Tensor | None,
) -> None:  # fmt: skip
    """Solve one problem; see ``dg_core.backend.KGrouped`` for the layouts."""
    if p.m == 0 or p.n == 0:
        return
    sizes = layout if p.psum or p.ks is None else p.ks
    assert sizes is not None
    starts, ends = k_stretches(sizes, p.sum_k, p.psum, p.alignment)
    entries = starts if p.sf is None else k_scale_starts(starts, ends, p.sf.gran_k, p.sf.packed, p.psum)
    for g in range(p.groups):
        pair: tuple[Source, Source]
        if p.ks is not None or on_host(d):
            start, k, entry = int(starts[g]), max(int(ends[g] - starts[g]), 0), int(entries[g])
            pair = (
                _stretch(a, sfa, p.sf, p.m, p.k_major, start, k, entry),
                _stretch(b, sfb, p.sf, p.n, p.k_major, start, k, entry),
            )
        else:
            where, k = (starts[g], ends[g], entries[g]), p.sum_k
            pair = (
                UnreadStretch(a, sfa, p.sf, p.m, p.k_major, *where),
                UnreadStretch(b, sfb, p.sf, p.n, p.k_major, *where),
            )
        write_product([pair], k, d[g], None if c is None else c[g])


def _entries(sf: Tensor, index: Tensor) -> Tensor:
    """Columns ``index`` of the scales, 0 where there is none: sizes on the device may ask for more scales
    than there are."""
    count = sf.shape[1]
    if not count:
        return sf.new_zeros(len(sf), len(index))
    return sf.index_select(1, index.clamp(max=count - 1)).masked_fill_(index >= count, 0)


def _stretch(
    x: Tensor,
    sf: Tensor | None,
    fmt: ScaleFormat | None,
    mn: int,
    k_major: bool,
    start: int,
    k: int,
    entry: int,
) -> Operand:
    """The operand ``[mn, k]`` of a group whose place is known, with its own scales."""
    values = x.reshape(-1)[mn * start : mn * (start + k)].view(mn, k) if k_major else x[start : start + k].t()
    if sf is None or fmt is None:
        return Operand(values)
    count = ceil_div(k, fmt.gran_k * (4 if fmt.packed else 1))
    return Operand(values, _entries(sf, torch.arange(entry, entry + count, device=sf.device)), fmt)


@dataclass(frozen=True)
class UnreadStretch:
    """A group of which only the device knows the place: every position is visited, and those of others count
    as zero."""

    values: Tensor
    sf: Tensor | None
    fmt: ScaleFormat | None
    mn: int
    k_major: bool
    start: Tensor
    end: Tensor
    entry: Tensor

    def block(self, rows: Rows, columns: slice) -> Tensor:
        position = torch.arange(columns.start, columns.stop, device=self.values.device)
        inside = (position >= self.start) & (position < self.end)
        within = torch.where(inside, position - self.start, 0)
        if self.k_major:
            row = row_numbers(rows, self.values.device)[:, None]
            index = self.mn * self.start + row * (self.end - self.start) + within
            values = pick(self.values.reshape(-1), torch.where(inside, index, 0)).float()
        else:
            values = pick(select(self.values.t(), rows).t(), torch.where(inside, position, 0)).t().float()
        if self.sf is not None and self.fmt is not None:
            values *= self._scales(select(self.sf, rows), self.fmt, within)
        return torch.where(inside, values, 0.0)  # a pad position may hold anything, NaN included

    def _scales(self, sf: Tensor, fmt: ScaleFormat, within: Tensor) -> Tensor:
        """Float32 scales for positions ``within`` the group, ``[rows, positions]``."""
        block = within // fmt.gran_k
        if not fmt.packed:
            return _entries(sf, self.entry + block)
        four = unpack_ue8m0_from_int(_entries(sf, self.entry + block // 4)).view(len(sf), -1, 4)
        return four.gather(2, (block % 4).expand(len(four), -1)[..., None]).squeeze(2)
