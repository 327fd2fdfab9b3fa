"""What the tests of grouped products on a card are worth, without a card: the reference passes them, results
with one mistake do not, and random layouts are as odd as they are meant to be."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given
from torch import Tensor

from .cuda_grouped import (
    BF16,
    BLOCK,
    FP4_KINDS,
    FP8_KINDS,
    OUT_STORAGE,
    STORAGE,
    Case,
    Kind,
    cases,
    check_repeats,
    empty_view,
    examples,
)
from .cuda_grouped_layouts import (
    GROUPINGS,
    LABEL_STYLES,
    Layout,
    labels,
    layout_of,
    random_counts,
    random_ends,
    random_labels,
    runs,
)
from .cuda_products import memory, moved
from .test_cuda_grouped import SMALL

ALL = (*FP8_KINDS, *FP4_KINDS, BF16)
few = examples(30)


@few
@given(case=cases("contiguous", ALL, ("nt", "nn")))
def test_labels(case: Case) -> None:
    case.on("cpu").run().check()


@few
@given(case=cases("psum", ALL, ("nt", "nn")))
def test_ends(case: Case) -> None:
    case.on("cpu").run().check()


@few
@given(case=cases("masked", ALL))
def test_counts(case: Case) -> None:
    case.on("cpu").run().check()


@few
@given(case=cases("batched", ALL))
def test_batches(case: Case) -> None:
    case.on("cpu").run().check()


@pytest.mark.parametrize("name", SMALL)
def test_small(name: str) -> None:
    """The list for a sanitizer: twelve right cases, of every grouping and number format."""
    SMALL[name]().on("cpu").run().check()


def test_the_list_for_a_sanitizer_holds_every_kind() -> None:
    made = [case() for case in SMALL.values()]
    assert len(made) == 12
    assert {case.layout.grouping for case in made} == set(GROUPINGS)
    assert {case.kind.dtype for case in made} == {"fp8", "bf16", "fp8_fp4"}
    assert {case.order for case in made} == {"nt", "nn"}
    assert any(case.kind.a == "fp4" for case in made)
    assert all(case.n % 128 or case.k % 128 for case in made)


def test_repeats() -> None:
    check_repeats(Case(BLOCK, layout_of("psum"), 70, 130), "cpu", 3)


# Mistakes ---------------------------------------------------------------------------------------------------


def with_d(case: Case, change: Callable[[Tensor], Any]) -> Tensor:
    """The memory of D after a right call and one change."""
    bits = case.on("cpu").run().bits()
    like = case.tensors["d"]
    change(bits.view(case.dtype).as_strided(like.shape, like.stride(), like.storage_offset()))
    return bits


def touch(d: Tensor, *row: int) -> None:
    """Another bit in the last element of a row."""
    last = (*row, -1)
    d.view(torch.int16)[last] ^= 1


# name -> (grouping, what is done to D)
MISTAKES: dict[str, tuple[str, Callable[[Tensor], Any]]] = {
    "a row of nobody is written": ("contiguous", lambda d: touch(d, len(d) - 1)),
    "a row past the count is written": ("masked", lambda d: touch(d, 0, 70)),
    "an empty group is written": ("masked", lambda d: touch(d, 1, 0)),
    "a row is left out": ("contiguous", lambda d: d[3].fill_(torch.nan)),
    "a row is of another group": ("contiguous", lambda d: d[0].copy_(d[100])),
    "two rows are exchanged": ("masked", lambda d: d[0, :2].copy_(d[0, :2].flip(0))),
    "one element is wrong": ("batched", lambda d: d[1, 5, 7].add_(d[1, 5, 7] * 0.05)),
    "all is a little wrong": ("batched", lambda d: d.mul_(1.004)),
    "a gap is not written": ("psum", lambda d: d[75].fill_(3.0)),
    "a gap is minus zero": ("psum", lambda d: d[75].fill_(-0.0)),
    "a row behind the gap is zero": ("psum", lambda d: d[399].zero_()),
}


@pytest.mark.parametrize("out_how", ["plain", "interleaved"])
@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake_is_seen(name: str, out_how: str) -> None:
    grouping, change = MISTAKES[name]
    layout = layout_of(grouping)
    if grouping == "psum":  # rows behind the last gap
        layout = Layout("psum", 3, 400, (70, 128 + 33, 256 + 5), 128, True, None)
    case = Case(BLOCK, layout, 140, 330, out_how=out_how)
    case.check(with_d(case, lambda d: None))
    with pytest.raises(AssertionError):
        case.check(with_d(case, change))


@pytest.mark.parametrize("out_how", [how for how in OUT_STORAGE if how != "plain"])
def test_a_write_around_d_is_seen(out_how: str) -> None:
    case = Case(BF16, layout_of("masked"), 24, 64, out_how=out_how)
    bits = case.on("cpu").run().bits()
    like = case.tensors["d"]
    inside = torch.zeros(len(bits) // 2, dtype=torch.bool)
    inside.as_strided(like.shape, like.stride(), like.storage_offset()).fill_(True)
    outside = (~inside).nonzero().flatten().tolist()
    for at in (outside[0], outside[len(outside) // 2], outside[-1]):
        wrong = bits.clone()
        wrong[2 * at + 1] ^= 0x80
        with pytest.raises(AssertionError, match="not the operation's to write"):
            case.check(wrong)


@pytest.mark.parametrize("grouping", ["contiguous", "psum", "masked"])
@pytest.mark.parametrize("kind", [BLOCK, Kind("packed32", "packed32", stated=True), BF16], ids=str)
def test_unused_parts_are_nan(kind: Kind, grouping: str) -> None:
    """Rows of nobody and groups without rows: values and scales; nothing that a row needs."""
    layout = layout_of(grouping)
    case = Case(kind, layout, 140, 330)
    owned, idle = case.owners >= 0, torch.tensor([g not in case.owners for g in range(layout.groups)])
    assert idle.any()
    assert not owned.all()
    for side, used in (("a", owned), ("b", ~idle)):
        for name in (side, f"sf{side}"):
            x = case.tensors.get(name)
            if x is None:
                assert kind.bf16
                continue
            nan = x == -1 if x.dtype == torch.int32 else x.float().isnan()
            assert nan[~used].all(), name
            assert not nan[used].any(), name


# Storage and random layouts ---------------------------------------------------------------------------------


@pytest.mark.parametrize("how", STORAGE)
@pytest.mark.parametrize("shape", [(3, 5, 7), (5, 7), (1, 1, 1), (0, 5, 7)], ids=str)
def test_storage(how: str, shape: tuple[int, ...]) -> None:
    """Views of one shape, in memory that moves with them."""
    x = empty_view(shape, torch.bfloat16, how)
    assert tuple(x.shape) == shape
    x.copy_(torch.arange(x.numel()).view(shape))
    y = moved(x, "cpu")
    assert torch.equal(x, y)
    assert y.stride() == x.stride()
    assert memory(y).data_ptr() != memory(x).data_ptr() or not x.numel()
    if how == "interleaved" and shape == (3, 5, 7):
        assert x.stride(0) < x.stride(1)


def test_labels_are_of_every_style() -> None:
    for style in LABEL_STYLES:
        made = [random_labels(style, 40, 40, seed) for seed in range(20)]
        found = [[label for label in layout.values if 0 <= label < 40] for layout in made]
        in_order = [labels == sorted(labels) for labels in found]
        if style.startswith("aligned"):
            assert all(in_order)
            unit = int(style.split()[1])
            for layout in made:
                starts = [
                    i for i, g in enumerate(layout.values) if g >= 0 and (g,) != layout.values[i - 1 : i]
                ]
                assert all(start % unit == 0 for start in starts)
        elif style == "pads":
            assert not any(found)
        else:
            assert not any(in_order)
        assert any(-1 in layout.values for layout in made)
        assert any(max(layout.values) >= 40 for layout in made) == (style == "wild")


def test_ends_and_counts_go_out_of_range() -> None:
    ends = [random_ends(64, 8, 130, True, True, None, seed) for seed in range(20)]
    assert any(min(layout.values) < 0 for layout in ends)
    assert any(max(layout.values) > layout.rows for layout in ends)
    assert any(layout.zeroed().any() for layout in ends)
    counts = [random_counts(17, 80, 0, seed).values for seed in range(3)]
    for values in counts:
        assert min(values) < 0 < values.count(0)
        assert max(values) > 17
    assert not Layout("batched", 2, 3).zeroed().any()
    assert labels(runs((1, 2), (0, 1), pad_to=4), 2).values == (1, 1, -1, -1, 0, -1, -1, -1)
