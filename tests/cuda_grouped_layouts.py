"""Layouts of groups for tests: labels, end rows and counts of every kind, and which rows they make whose."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from hypothesis import strategies as st
from torch import Tensor

from . import formulas

GROUPINGS = ("contiguous", "psum", "masked", "batched")
INT_MAX, INT_MIN = 2**31 - 1, -(2**31)


@dataclass(frozen=True)
class Layout:
    """Which rows are whose.

    Attributes:
        grouping: ``contiguous`` (``values`` are labels of the rows), ``psum`` (end rows of the groups),
            ``masked`` (counts of valid rows) or ``batched`` (no values: all rows of all groups).
        rows: M, of all groups together or, masked and batched, of each.
        alignment: of psum; passed with the call where ``stated``, else the process's setting.
        zero: psum: the call asks for zeros between groups.
        expected_m: the hint; None where a psum call gives none.
    """

    grouping: str
    groups: int
    rows: int
    values: tuple[int, ...] = ()
    alignment: int = 128
    zero: bool = False
    expected_m: int | None = 0
    stated: bool = True

    @property
    def lead(self) -> tuple[int, ...]:
        """Shape of the rows of A and D."""
        return (self.rows,) if self.grouping in ("contiguous", "psum") else (self.groups, self.rows)

    def owners(self) -> Tensor:
        """int64 of shape ``lead``: the group of each row, -1 for none."""
        found = torch.full(self.lead, -1, dtype=torch.int64)
        if self.grouping == "contiguous":
            groups = formulas.row_groups(self.values, self.groups)
            return torch.tensor([-1 if g is None else g for g in groups], dtype=torch.int64)
        if self.grouping == "psum":
            for group, rows in enumerate(formulas.psum_groups(self.values, self.alignment, self.rows)):
                found[rows.start : rows.stop] = group
        else:
            counts = self.values if self.grouping == "masked" else (self.rows,) * self.groups
            for group, count in enumerate(counts):
                found[group, : max(count, 0)] = group
        return found

    def zeroed(self) -> Tensor:
        """bool of shape ``lead``: rows of no group that have to become exactly 0."""
        found = torch.zeros(self.lead, dtype=torch.bool)
        for value in self.values if self.grouping == "psum" and self.zero else ():
            end = min(max(value, 0), self.rows)
            found[end : formulas.align_up(end, self.alignment)] = True
        return found & (self.owners() < 0)


def labels(values: Sequence[int], groups: int) -> Layout:
    return Layout("contiguous", groups, len(values), tuple(values))


def runs(*groups: tuple[int, int], pad_to: int = 1) -> list[int]:
    """Labels of runs ``(group, rows)``, each filled up with -1 to a multiple of ``pad_to``."""
    found: list[int] = []
    for group, rows in groups:
        found += [group] * rows + [-1] * (-rows % pad_to)
    return found


def layout_of(grouping: str) -> Layout:
    """Five groups, one of them empty, and rows of nobody."""
    if grouping == "contiguous":
        return labels([*runs((3, 70), (0, 33), (4, 128), pad_to=32), *runs((1, 5), (3, 9)), *[-1] * 40], 5)
    if grouping == "psum":
        return Layout("psum", 5, 400, (70, 128 + 33, 161, 256 + 100, 384 + 5), 128, True, None)
    if grouping == "masked":
        return Layout("masked", 5, 131, (70, 0, 131, 1, 128), expected_m=66)
    return Layout("batched", 3, 131)


def counts_of(rng: random.Random, groups: int, most: int) -> list[int]:
    """Rows of each group: none for about a third of them."""
    return [rng.choice((0, rng.randint(0, most), rng.randint(0, most), most)) for _ in range(groups)]


LABEL_STYLES = (
    "aligned 16", "aligned 32", "aligned 64", "aligned 128", "aligned 256", "runs", "shuffled", "wild",
    "pads",
)  # fmt: skip
MOST_ROWS = 1600


def random_labels(style: str, groups: int, most: int, seed: int) -> Layout:
    """Labels of one style, cut at ``MOST_ROWS``.

    ``aligned``: groups in order, each start a multiple of so many rows. ``runs``: of any length, in any
    order, a group more than once, pads between. ``shuffled``: neighbours need not be of one group. ``wild``:
    runs, some of them with labels that no group has. ``pads``: no row is anybody's.
    """
    rng = random.Random(seed)
    counts = counts_of(rng, groups, most)
    if style.startswith("aligned"):
        found = runs(*enumerate(counts), pad_to=int(style.split()[1]))
    elif style == "pads":
        found = [-1] * sum(counts)
    else:
        wild = [-1, -7, groups, groups + 3, INT_MAX, INT_MIN] if style == "wild" else [-1]
        pieces = [[g] * part for g, n in enumerate(counts) for part in (n // 3, n - n // 3)]
        pieces += [[rng.choice(wild)] * rng.choice((1, 7, most)) for _ in range(max(groups // 4, 2))]
        rng.shuffle(pieces)
        found = [label for piece in pieces for label in piece]
        if style == "shuffled":
            rng.shuffle(found)
    return labels((found + [-1] * rng.choice((0, 0, 3, 200)))[:MOST_ROWS], groups)


def random_ends(
    alignment: int, groups: int, most: int, zero: bool, wild: bool, hint: int | None, seed: int
) -> Layout:
    """End rows of groups behind each other; ``wild`` ends may lie before a start, or beyond the rows."""
    rng = random.Random(seed)
    ends = formulas.psum_ends(counts_of(rng, groups, most), alignment, rng.random() < 0.5)
    rows = min((ends[-1] if ends else 0) + rng.choice((0, 0, 5, alignment, 300)), MOST_ROWS)
    if wild:
        strange = (-5, INT_MIN, rows + 1, INT_MAX, rows // 2)
        ends = [rng.choice(strange) if rng.random() < 0.3 else end for end in ends]
    return Layout("psum", groups, rows, tuple(ends), alignment, zero, hint)


def random_counts(rows: int, groups: int, expected_m: int, seed: int) -> Layout:
    """Counts of valid rows: 0, all, some, or numbers that no group can have."""
    rng = random.Random(seed)
    some = (0, 0, rows, rng.randint(0, rows), rng.randint(0, rows), rows + 1, -1, INT_MIN, INT_MAX)
    return Layout(
        "masked", groups, rows, tuple(rng.choice((*some, rng.randint(0, rows))) for _ in range(groups)),
        expected_m=expected_m,
    )  # fmt: skip


# Strategies -------------------------------------------------------------------------------------------------

seeds = st.integers(0, 2**16)
_groups = st.one_of(st.integers(1, 7), st.sampled_from([0, 1, 8, 16, 33, 40, 65, 80]))
_hints = st.sampled_from([-3, 0, 1, 50, 4096, INT_MAX])


@st.composite
def layouts(draw: st.DrawFn, grouping: str) -> Layout:
    """Any layout of one grouping: 0 to 80 groups, the more of them the fewer rows each."""
    groups, seed = draw(_groups), draw(seeds)
    most = draw(st.sampled_from([1, 8, 40] if groups > 8 else [1, 8, 40, 130, 300]))
    if grouping == "contiguous":
        return random_labels(draw(st.sampled_from(LABEL_STYLES)), groups, most, seed)
    if grouping == "psum":
        alignment = draw(st.sampled_from([1, 16, 24, 32, 64, 128, 256]))
        hint = draw(st.one_of(st.none(), _hints))
        return random_ends(alignment, groups, most, draw(st.booleans()), draw(st.booleans()), hint, seed)
    rows = draw(st.sampled_from([0, 1, 17, 33] if groups > 8 else [0, 1, 17, 64, 129, 300]))
    if grouping == "masked":
        return random_counts(rows, groups, draw(_hints), seed)
    return Layout("batched", groups, rows)


def strange(layout: Layout, share: float, rng: random.Random) -> Layout:
    """Some of the values replaced by others, most of which no layout should have."""
    edges = (INT_MIN, INT_MIN + 1, -129, -2, -1, 0, INT_MAX - 1, INT_MAX)
    bound = layout.groups if layout.grouping == "contiguous" else layout.rows
    found: list[int] = []
    for value in layout.values:
        last = min(max(found[-1], 0), bound) if found else 0
        some = (*edges, bound - 1, bound, bound + 1, last - 1, last, last + 1, rng.randint(-9, bound + 9))
        found.append(rng.choice(some) if rng.random() < share else value)
    return replace(layout, values=tuple(found))
