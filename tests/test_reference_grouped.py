"""Products grouped along M against float64, row by row: any labels, psum ends, masks, and pads that hold NaN.

Every test runs twice: as on a host, where the reference reads labels, and as on a device, where it may not.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import dg_core

from . import formulas
from .operands import (
    BF16_BOUND,
    FP8_BOUND,
    MATRIX_STORAGE,
    ROW_STORAGE,
    Output,
    check_close,
    generator,
    host_or_device,
    random_bf16,
    scaled,
)

INT_MAX = 2**31 - 1
OUT = (torch.bfloat16, torch.float32)
seeds = st.integers(0, 2**16)


@dataclass(frozen=True)
class Kind:
    """What A and B are made of, and which functions take them."""

    name: str
    family_a: str = ""
    family_b: str = ""
    kind_b: str = "fp8"
    stored_b: str = "nt"

    @property
    def bf16(self) -> bool:
        return not self.family_a

    @property
    def bound(self) -> dict[torch.dtype, float]:
        return BF16_BOUND if self.bf16 else FP8_BOUND

    def operands(self, rng: torch.Generator, a: tuple[int, ...], b: tuple[int, ...], how: str) -> Operands:
        if self.bf16:
            x, y = random_bf16(a, rng, how), random_bf16(b, rng, how)
            return Operands(
                self, x, y.transpose(-1, -2) if self.stored_b == "nn" else y, x.double(), y.double(), {}
            )
        left = scaled(rng, a, self.family_a, how=how)
        right = scaled(rng, b, self.family_b, self.kind_b, how)
        recipe = (
            {"recipe_a": left.recipe, "recipe_b": right.recipe}
            if "32" in self.family_a + self.family_b
            else {}
        )
        right_pair = right.transposed if self.stored_b == "nn" else right.pair
        return Operands(self, left.pair, right_pair, left.exact, right.exact, recipe)

    def contiguous(self) -> Callable[..., None]:
        dtype = "bf16" if self.bf16 else "fp8"
        function: Callable[..., None] = getattr(dg_core, f"m_grouped_{dtype}_gemm_{self.stored_b}_contiguous")
        return function

    def masked(self) -> Callable[..., None]:
        return dg_core.m_grouped_bf16_gemm_nt_masked if self.bf16 else dg_core.m_grouped_fp8_gemm_nt_masked


@dataclass(frozen=True)
class Operands:
    """A and B as a caller passes them, and their exact values ``[.., M, K]`` and ``[G, N, K]``."""

    kind: Kind
    a: Tensor | tuple[Tensor, Tensor]
    b: Tensor | tuple[Tensor, Tensor]
    exact_a: Tensor
    exact_b: Tensor
    recipe: dict[str, tuple[int, int]]

    def spoil(self, rows: Tensor) -> None:
        """Make these rows of A, values and scales, NaN."""
        for x in (self.a,) if isinstance(self.a, Tensor) else self.a:
            if x.element_size() == 1:
                x.view(torch.uint8)[rows] = 0x7F
            elif x.dtype == torch.int32:
                x[rows] = -1
            else:
                x[rows] = torch.nan


KINDS = [
    Kind("1x128", "1x128", "128x128"),
    Kind("1x128-both", "1x128", "1x128"),
    Kind("packed128", "packed128", "packed128"),
    Kind("row", "row", "row"),
    Kind("fp4-weights", "1x128", "packed32", "fp4"),
    Kind("nn", "1x128", "128x128", stored_b="nn"),
    Kind("bf16"),
    Kind("bf16-nn", stored_b="nn"),
]
MASKED_KINDS = [kind for kind in KINDS if kind.stored_b == "nt"]
kinds = st.sampled_from(KINDS)


def check_rows(out: Output, x: Operands, groups: list[int | None], zeroed: Tensor | None = None) -> None:
    """Row i of D is ``A[i] @ B[groups[i]].T``; rows without a group are untouched, or exactly 0 where
    ``zeroed``."""
    rows = [i for i, group in enumerate(groups) if group is not None]
    weights = x.exact_b[[groups[i] for i in rows]]  # [rows, N, K]
    a = x.exact_a[rows][:, None]
    exact, magnitude = formulas.product(a, weights)[:, 0], formulas.product(a.abs(), weights.abs())[:, 0]
    check_close(out.view[rows], exact, magnitude, x.kind.bound[out.view.dtype])
    written = torch.zeros(len(groups), dtype=torch.bool)
    written[rows] = True
    if zeroed is not None:
        assert torch.equal(out.view[zeroed], torch.zeros_like(out.view[zeroed]))
        assert not out.view[zeroed].signbit().any()
        written |= zeroed
    out.check_untouched(written[:, None])


# Labels -----------------------------------------------------------------------------------------------------


@st.composite
def label_rows(draw: st.DrawFn) -> tuple[int, list[int]]:
    """``(groups, labels)``: runs and single rows, in any order, with labels that name no group."""
    groups = draw(st.integers(0, 4))
    wild = st.sampled_from([-1, -7, groups, groups + 3, INT_MAX, -(2**31)])
    label = st.one_of(st.integers(0, groups - 1), wild) if groups else wild
    runs = draw(st.lists(st.tuples(label, st.one_of(st.just(1), st.integers(1, 40))), max_size=8))
    return groups, [value for value, count in runs for _ in range(count)]


@pytest.mark.parametrize("readable", [True, False], ids=["host", "device"])
@settings(max_examples=150, deadline=None)
@given(
    kind=kinds, labelled=label_rows(), n=st.integers(0, 140), k=st.integers(0, 270),
    how=st.sampled_from(MATRIX_STORAGE), out_how=st.sampled_from(ROW_STORAGE), dtype=st.sampled_from(OUT),
    seed=seeds,
)  # fmt: skip
def test_any_labels(
    readable: bool, kind: Kind, labelled: tuple[int, list[int]], n: int, k: int, how: str, out_how: str,
    dtype: torch.dtype, seed: int,
) -> None:  # fmt: skip
    groups, labels = labelled
    m, k = len(labels), k + k % 2 if kind.kind_b == "fp4" else k
    x = kind.operands(generator(seed), (m, k), (groups, n, k), how)
    owners = formulas.row_groups(labels, groups)
    x.spoil(torch.tensor([owner is None for owner in owners], dtype=torch.bool))
    out = Output((m, n), dtype, out_how)
    layout = torch.tensor(labels, dtype=torch.int64).to(torch.int32)
    with host_or_device(readable):
        kind.contiguous()(x.a, x.b, out.view, layout, **x.recipe)
    check_rows(out, x, owners)


# Psum -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("readable", [True, False], ids=["host", "device"])
@settings(max_examples=150, deadline=None)
@given(
    kind=kinds, counts=st.lists(st.one_of(st.just(0), st.integers(0, 70)), max_size=4),
    spare=st.integers(0, 40), alignment=st.sampled_from([1, 5, 16, 24, 64, 100, 128]), n=st.integers(0, 130),
    k=st.integers(0, 200), zero=st.booleans(), repeat=st.booleans(), dtype=st.sampled_from(OUT),
    out_how=st.sampled_from(ROW_STORAGE), seed=seeds,
)  # fmt: skip
def test_psum(
    readable: bool, kind: Kind, counts: list[int], spare: int, alignment: int, n: int, k: int, zero: bool,
    repeat: bool, dtype: torch.dtype, out_how: str, seed: int,
) -> None:  # fmt: skip
    """Groups of any size behind each other at any alignment; ``spare`` rows follow, fewer than the last gap
    or more."""
    ends = formulas.psum_ends(counts, alignment, repeat)
    m, k = (ends[-1] if ends else 0) + spare, k + k % 2 if kind.kind_b == "fp4" else k
    check_psum(kind, ends, m, n, k, alignment, zero, dtype, out_how, seed, readable)


def check_psum(
    kind: Kind, ends: list[int], m: int, n: int, k: int, alignment: int, zero: bool, dtype: torch.dtype,
    out_how: str, seed: int, readable: bool,
) -> None:  # fmt: skip
    owners: list[int | None] = [None] * m
    zeroed = torch.zeros(m, dtype=torch.bool)
    for group, rows in enumerate(formulas.psum_groups(ends, alignment, m)):
        owners[rows.start : rows.stop] = [group] * len(rows)
        zeroed[min(max(ends[group], 0), m) : formulas.align_up(min(max(ends[group], 0), m), alignment)] = zero
    owned = torch.tensor([owner is not None for owner in owners], dtype=torch.bool)
    zeroed &= ~owned
    x = kind.operands(generator(seed), (m, k), (len(ends), n, k), "plain")
    x.spoil(~owned)
    out = Output((m, n), dtype, out_how)
    layout = torch.tensor(ends, dtype=torch.int32)
    with host_or_device(readable):
        kind.contiguous()(
            x.a,
            x.b,
            out.view,
            layout,
            use_psum_layout=True,
            ensure_zero_padding=zero,
            alignment=alignment,
            **x.recipe,
        )
    check_rows(out, x, owners, zeroed)


# name -> (ends, rows, alignment): what no caller should pass, clipped to the rows that there are
WILD_ENDS = {
    "beyond the rows": ([40, 900], 100, 64),
    "all beyond": ([INT_MAX, INT_MAX], 50, 64),
    "negative": ([-5, 30], 64, 16),
    "an end within the last gap": ([70, 100], 200, 128),
    "an end within the last group": ([100, 50, 180], 200, 64),
    "no rows": ([0, 0], 0, 128),
    "no groups": ([], 30, 128),
}


@pytest.mark.parametrize("readable", [True, False], ids=["host", "device"])
@pytest.mark.parametrize("name", WILD_ENDS)
@pytest.mark.parametrize("zero", [True, False], ids=["zeroed", "untouched"])
def test_psum_of_wild_ends(name: str, zero: bool, readable: bool) -> None:
    ends, m, alignment = WILD_ENDS[name]
    check_psum(KINDS[0], ends, m, 40, 130, alignment, zero, torch.bfloat16, "padded", 1, readable)


def test_psum_uses_the_setting_without_an_alignment_of_its_own() -> None:
    """Left out, the alignment is the process's setting at the time of the call."""
    x = KINDS[0].operands(generator(1), (96, 128), (2, 32, 128), "plain")
    ends = torch.tensor([10, 60], dtype=torch.int32)
    before = dg_core.get_mk_alignment_for_contiguous_layout()
    try:
        for alignment in (16, 32):
            dg_core.set_mk_alignment_for_contiguous_layout(alignment)
            out = Output((96, 32), torch.float32)
            function = KINDS[0].contiguous()
            function(x.a, x.b, out.view, ends, use_psum_layout=True, ensure_zero_padding=False)
            check_rows(out, x, [0] * 10 + [None] * (alignment - 10) + [1] * (60 - alignment) + [None] * 36)
    finally:
        dg_core.set_mk_alignment_for_contiguous_layout(before)


# Masks ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("readable", [True, False], ids=["host", "device"])
@settings(max_examples=150, deadline=None)
@given(
    kind=st.sampled_from(MASKED_KINDS), m=st.integers(0, 80), n=st.integers(0, 130), k=st.integers(0, 200),
    masks=st.lists(st.sampled_from([0, 0, 1, 17, 64, 80, 81, INT_MAX, -1, -(2**31)]), max_size=4),
    expected_m=st.sampled_from([-3, 0, 1, 50, INT_MAX]), dtype=st.sampled_from(OUT),
    out_how=st.sampled_from(ROW_STORAGE), how=st.sampled_from(MATRIX_STORAGE), seed=seeds,
)  # fmt: skip
def test_masked(
    readable: bool, kind: Kind, m: int, n: int, k: int, masks: list[int], expected_m: int, dtype: torch.dtype,
    out_how: str, how: str, seed: int,
) -> None:  # fmt: skip
    groups, k = len(masks), k + k % 2 if kind.kind_b == "fp4" else k
    x = kind.operands(generator(seed), (groups, m, k), (groups, n, k), how)
    valid = torch.tensor([[row < count for row in range(m)] for count in masks], dtype=torch.bool).view(
        groups, m
    )
    x.spoil(~valid)
    out = Output((groups, m, n), dtype, out_how)
    with host_or_device(readable):
        kind.masked()(x.a, x.b, out.view, torch.tensor(masks, dtype=torch.int32), expected_m, **x.recipe)
    a = x.exact_a[valid]
    weights = x.exact_b[valid.nonzero()[:, 0]]
    exact = formulas.product(a[:, None], weights)[:, 0]
    magnitude = formulas.product(a[:, None].abs(), weights.abs())[:, 0]
    check_close(out.view[valid], exact, magnitude, kind.bound[dtype])
    out.check_untouched(valid[..., None])
