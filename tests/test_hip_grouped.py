"""Products grouped along M on the hip backend's kernels, run on the processor, against float64: any labels,
end rows and counts, rows of nobody that hold NaN, and D outside of groups as it was."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import dg_core
from dg_core.backends.hip import gemm as hip_gemm
from dg_core.backends.hip.library import HostLibrary

from . import formulas, test_golden, test_reported_inputs
from .cuda_grouped import (
    BF16,
    BLOCK,
    FP4_KINDS,
    FP4_WEIGHTS,
    FP8_KINDS,
    OUT,
    OUT_STORAGE,
    STORAGE,
    Case,
    Kind,
)
from .cuda_grouped_layouts import (
    GROUPINGS,
    INT_MAX,
    INT_MIN,
    LABEL_STYLES,
    Layout,
    labels,
    layout_of,
    random_counts,
    random_ends,
    random_labels,
    runs,
)
from .grouped_reported import REPORTED
from .hip_cases import alone, at_a_page_end, examples, launched
from .operands import FP8_BOUND, check_close, generator, random_e4m3, random_scales, scaled

__all__ = ["alone", "launched"]
pytestmark = pytest.mark.usefixtures("alone")

PROCESSOR = "cpu"
KINDS = (*FP8_KINDS, *FP4_KINDS[:5], FP4_WEIGHTS, BF16)
seeds = st.integers(0, 2**16)


def orders(grouping: str) -> tuple[str, ...]:
    return ("nt", "nn") if grouping in ("contiguous", "psum") else ("nt",)


# Anything ---------------------------------------------------------------------------------------------------


@st.composite
def layouts(draw: st.DrawFn, grouping: str) -> Layout:
    """Layouts of a few hundred rows; groups of more than 64 are looked at in two goes."""
    groups, seed = draw(st.sampled_from([0, 1, 2, 3, 5, 7, 40, 70])), draw(seeds)
    most = draw(st.sampled_from([1, 5] if groups > 7 else [1, 8, 40, 130]))
    if grouping == "contiguous":
        return random_labels(draw(st.sampled_from(LABEL_STYLES[2:])), groups, most, seed)
    if grouping == "psum":
        alignment = draw(st.sampled_from([1, 5, 16, 24] if groups > 7 else [1, 5, 16, 24, 32, 64, 100, 128]))
        return random_ends(alignment, groups, most, draw(st.booleans()), draw(st.booleans()), 0, seed)
    rows = draw(st.sampled_from([0, 1, 17] if groups > 7 else [0, 1, 17, 33, 64, 129]))
    return random_counts(rows, groups, draw(st.sampled_from([-3, 0, 1, 50, INT_MAX])), seed)


@st.composite
def cases(draw: st.DrawFn, grouping: str) -> Case:
    kind, n = draw(st.sampled_from(KINDS)), draw(st.sampled_from([0, 1, 17, 64, 129, 140]))
    k = draw(st.sampled_from([0, 1, 16, 64, 130, 257]))
    if (
        not kind.bf16 and "fp4" in kind.a + kind.b
    ):  # one byte or none does not say along which axis it is packed
        n, k = max(n, 2), max(k, 4)
    how = st.sampled_from(STORAGE)
    return Case(
        kind, draw(layouts(grouping)), n, k, draw(st.sampled_from(orders(grouping))),
        draw(st.sampled_from(OUT)), draw(st.tuples(how, how, how, how)), draw(st.sampled_from(OUT_STORAGE)),
        "none", draw(seeds), draw(st.booleans()),
    )  # fmt: skip


@examples(60)
@given(case=cases("contiguous"))
def test_labels(case: Case) -> None:
    """R9, R10, R11, R13, R24, R48, R59: labels in any order, of no group, of no row; any storage."""
    case.on(PROCESSOR).run().check()


@examples(60)
@given(case=cases("psum"))
def test_ends(case: Case) -> None:
    """R48, R54, R59: end rows at any alignment, with zeros between groups and without, and ends out of range
    or out of order."""
    case.on(PROCESSOR).run().check()


@examples(60)
@given(case=cases("masked"))
def test_counts(case: Case) -> None:
    """R8, R48, R59: groups of no rows, of all, of counts out of range; any hint."""
    case.on(PROCESSOR).run().check()


# Every family, number format and grouping -------------------------------------------------------------------


def smaller(layout: Layout) -> Layout:
    """Fewer rows than ``layout_of`` has, of as many kinds."""
    if layout.grouping == "contiguous":
        return labels([*runs((3, 40), (0, 9), (4, 64), pad_to=16), *runs((1, 5), (3, 9)), *[-1] * 20], 5)
    if layout.grouping == "psum":
        return Layout("psum", 5, 200, (35, 64 + 17, 81, 128 + 50, 192 + 5), 64, True, None)
    return replace(layout, rows=67, values=tuple(min(value, 67) for value in layout.values))


@pytest.mark.parametrize("grouping", GROUPINGS)
@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_families(kind: Kind, grouping: str) -> None:
    """R25, R46, R59: K ends inside a block and inside a word of four exponents; both outputs and orders."""
    for order, dtype in zip(orders(grouping) * 2, OUT, strict=False):
        Case(kind, smaller(layout_of(grouping)), 132, 170, order, dtype, seed=1).on(PROCESSOR).run().check()


@pytest.mark.parametrize(
    ("kind", "kernel"),
    [(BLOCK, "gemm_fp8_block"), (Kind("row", "row"), "gemm_fp8"), (FP4_WEIGHTS, "gemm_fp4_block32"),
     (BF16, "gemm_bf16")],
    ids=str,
)  # fmt: skip
@pytest.mark.parametrize("grouping", GROUPINGS)
def test_several_tiles(kind: Kind, kernel: str, grouping: str, launched: list[str]) -> None:
    """Groups of more rows than a tile, and columns of several; the kernel that ran has the large tile."""
    layout = {
        "contiguous": labels(runs((1, 150), (0, 70), (2, 131)), 3),
        "psum": Layout("psum", 3, 420, (150, 160 + 70, 240 + 131), 16, True),
        "masked": Layout("masked", 3, 200, (140, 0, 33), expected_m=140),
        "batched": Layout("batched", 2, 135),
    }[grouping]
    Case(kind, layout, 270, 150, "nt", OUT[0], seed=2).on(PROCESSOR).run().check()
    assert launched == [f"{kernel}_128x128"]


@pytest.mark.parametrize("kind", [BLOCK, FP4_WEIGHTS, Kind("row", "row"), BF16], ids=str)
def test_lists_of_rows(kind: Kind) -> None:
    """Groups whose rows are scattered over a tile, more of them than a wave has lanes, or one."""
    layout = labels([*[0, 0, 1] * 60, *[2, -1, 0] * 20, 1, 2], 3)
    Case(kind, layout, 140, 200, seed=4).on(PROCESSOR).run().check()


@pytest.mark.parametrize("seed", [0, 3])
@pytest.mark.parametrize("grouping", GROUPINGS)
def test_fewer_blocks_than_tiles(
    grouping: str, seed: int, alone: HostLibrary, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Blocks that go on to further tiles find nothing of the ones before."""
    monkeypatch.setattr(hip_gemm, "MOST_BLOCKS", 2)
    alone.seed = seed
    layout = {
        "contiguous": random_labels("shuffled", 12, 40, 1),
        "psum": Layout("psum", 4, 420, (150, 160 + 70, 240 + 131, 384 + 1), 16, True),
        "masked": Layout("masked", 5, 50, (40, 0, 33, 50, 1)),
        "batched": Layout("batched", 5, 35),
    }[grouping]
    for kind in (BLOCK, BF16):
        Case(kind, layout, 270, 100, "nt", OUT[0], seed=2).on(PROCESSOR).run().check()


def test_small_tile(launched: list[str]) -> None:
    """Few rows in a group, by the hint or by the number of groups, take the small tile; it covers any
    number."""
    Case(BLOCK, Layout("masked", 3, 80, (80, 0, 7), expected_m=20), 136, 256).on(PROCESSOR).run().check()
    Case(BLOCK, labels(runs((4, 70), (0, 9), (7, 33)), 8), 136, 256).on(PROCESSOR).run().check()
    assert launched == ["gemm_fp8_block_32x128"] * 2


@pytest.mark.parametrize("grouping", ["contiguous", "psum", "masked"])
@pytest.mark.parametrize("kind", [BLOCK, BF16], ids=str)
def test_layouts_that_are_strided(kind: Kind, grouping: str) -> None:
    """Labels, ends and counts two elements apart, as a column of a caller's table."""
    Case(kind, smaller(layout_of(grouping)), 136, 128, strided=True).on(PROCESSOR).run().check()


@pytest.mark.parametrize("sizes", [(24, 0), (0, 128), (40, 1)], ids=str)
@pytest.mark.parametrize("grouping", GROUPINGS)
def test_sizes_of_zero(grouping: str, sizes: tuple[int, int]) -> None:
    """R8: no columns, no K, no rows, no groups. Without K the rows of groups become 0, and no others."""
    without_rows = {
        "contiguous": (labels([], 3), labels([-1] * 70, 0)),
        "psum": (Layout("psum", 2, 0, (0, 0)), Layout("psum", 0, 70, (), zero=True)),
        "masked": (Layout("masked", 2, 0, (0, INT_MAX)), Layout("masked", 0, 70)),
        "batched": (Layout("batched", 2, 0), Layout("batched", 0, 70)),
    }[grouping]
    for kind in (BLOCK, BF16):
        for layout in (smaller(layout_of(grouping)), *without_rows):
            Case(kind, layout, *sizes, "nt", out_how="padded", seed=3).on(PROCESSOR).run().check()


# What callers should not pass -------------------------------------------------------------------------------

WILD = {
    "ends beyond the rows": Layout("psum", 2, 100, (40, 900), 64, True),
    "all beyond": Layout("psum", 2, 50, (INT_MAX, INT_MAX), 64, True),
    "negative": Layout("psum", 2, 64, (-5, 30), 16, True),
    "an end within the last gap": Layout("psum", 2, 200, (70, 100), 128, True),
    "an end within the last group": Layout("psum", 3, 200, (100, 50, 180), 64, True),
    "descending": Layout("psum", 4, 200, (180, 130, 60, 10), 16, True),
    "many that do not ascend": Layout("psum", 130, 150, tuple(range(140, 10, -1)), 8, True),
    "the least and the greatest": Layout("psum", 3, 90, (INT_MIN, INT_MAX, 3), 128, True),
    "labels of no group": labels([INT_MIN, -2, 0, 5, INT_MAX, 2, 3] * 12, 3),
    "counts of no group": Layout("masked", 4, 40, (41, -1, INT_MIN, INT_MAX)),
}


@pytest.mark.parametrize("zero", [True, False], ids=["zeroed", "untouched"])
@pytest.mark.parametrize("name", WILD)
def test_values_are_not_trusted(name: str, zero: bool) -> None:
    """Ends are clipped, and where they do not ascend the last group has a row; nothing else is written."""
    layout = replace(WILD[name], zero=zero and WILD[name].zero)
    for kind in (BLOCK, BF16):
        Case(kind, layout, 40, 130, out_how="padded", seed=1).on(PROCESSOR).run().check()


@pytest.mark.parametrize("value", [torch.inf, -torch.inf, torch.nan], ids=str)
@pytest.mark.parametrize("kind", [BLOCK, FP4_WEIGHTS, BF16], ids=str)
def test_pads_of_infinity_and_nan(kind: Kind, value: float) -> None:
    """R48: pads never reach valid rows, and gaps that must be 0 are 0 whatever A holds there."""
    case = Case(kind, Layout("psum", 2, 200, (30, 128), 64, True, None), 136, 264)
    pads = case.owners < 0
    if kind.bf16:
        case.tensors["a"][pads] = value
    elif case.tensors["sfa"].dtype == torch.float32:
        case.tensors["sfa"][pads] = value
    case.on(PROCESSOR).run().check()


@pytest.mark.parametrize("grouping", GROUPINGS)
def test_nothing_beside_the_tensors_is_touched(grouping: str) -> None:
    """Tensors end where a page ends, layouts included, and what follows may not be read or written."""
    for kind in (BLOCK, Kind("packed32", "packed32", stated=True), Kind("row", "row"), FP4_WEIGHTS, BF16):
        case = Case(kind, smaller(layout_of(grouping)), 131, 90)
        placed = case.on(PROCESSOR)
        placed.x = {name: at_a_page_end(x) for name, x in placed.x.items()}
        placed.run()
        owned = case.owners >= 0
        exact, magnitude = case._product(owned)
        check_close(placed.x["d"][owned], exact, magnitude, 3e-6)


@pytest.mark.parametrize("grouping", GROUPINGS)
@pytest.mark.parametrize("kind", [BLOCK, BF16], ids=str)
def test_any_order_of_threads(kind: Kind, grouping: str, alone: HostLibrary) -> None:
    """The same bits whichever thread runs first; labels are shuffled, so that tiles are lists of rows."""
    layout = random_labels("shuffled", 5, 60, 3) if grouping == "contiguous" else smaller(layout_of(grouping))
    placed = Case(kind, layout, 140, 200, seed=5).on(PROCESSOR)
    bits = []
    for seed in (0, 0, 1, 977):
        alone.seed = seed
        bits.append(placed.reset().run().bits())
        placed.check()
    assert all(torch.equal(bits[0], other) for other in bits[1:])


# Groups and rows beyond 32 bits -----------------------------------------------------------------------------


def far_apart(shape: tuple[int, ...], dtype: torch.dtype, apart: int) -> Any:
    """A contiguous shape but for its first axis, whose entries lie ``apart`` elements from each other; memory
    between them is reserved and never touched."""
    size = 1
    for each in shape[1:]:
        size *= each
    try:
        whole = torch.empty((shape[0] - 1) * apart + size, dtype=dtype)
    except RuntimeError as error:  # an allocator that refuses what is only reserved
        pytest.skip(f"cannot reserve {apart * shape[0] >> 30} Gi elements of address space: {error}")
    strides = [1]
    for each in shape[:1:-1]:
        strides.insert(0, strides[0] * each)
    return whole.as_strided(shape, (apart, *strides))


def test_groups_beyond_32_bits() -> None:
    """R2, R20, R21: groups of A, B and D lie more than 2^32 elements from each other."""
    rng, (g, m, n, k), apart = generator(1), (2, 20, 24, 128), 2**32 + 48
    a, b = random_e4m3((g, m, k), rng), random_e4m3((g, n, k), rng)
    sfa, sfb = random_scales((g, m, 1), rng), random_scales((g, 1, 1), rng)
    far_a, far_b = (far_apart(tuple(x.shape), torch.uint8, apart) for x in (a, b))
    for far, x in ((far_a, a), (far_b, b)):
        far.copy_(x.view(torch.uint8))
    d = far_apart((g, m, n), torch.bfloat16, apart)
    d.fill_(torch.nan)
    left, right = ((x.view(torch.float8_e4m3fn), sf) for x, sf in ((far_a, sfa), (far_b, sfb)))
    counts = torch.tensor([20, 13], dtype=torch.int32)
    dg_core.m_grouped_fp8_gemm_nt_masked(left, right, d, counts, 20)
    for group, rows in enumerate(counts.tolist()):
        x = formulas.decode_e4m3(a[group]) * formulas.spread(sfa[group], m, k, 1, 128)
        y = formulas.decode_e4m3(b[group]) * formulas.spread(sfb[group], n, k, 128, 128)
        exact, magnitude = formulas.product(x, y)[:rows], formulas.product(x.abs(), y.abs())[:rows]
        check_close(d[group, :rows], exact, magnitude, FP8_BOUND[torch.bfloat16])
        assert d[group, rows:].isnan().all()


# Reported and golden ----------------------------------------------------------------------------------------


def smaller_sizes(n: int, k: int) -> tuple[int, int]:
    """Sizes that fibers get through, as long along K where that was the fault (R5)."""
    return (40, k) if k > 8192 else (min(n, 256), min(k, 2048))


@pytest.mark.parametrize("name", REPORTED)
def test_reported(name: str) -> None:
    """R3, R4, R5, R7, R8, R9, R10, R11, R13, R25, R54, R59: the alignment of the process is 128."""
    assert dg_core.get_mk_alignment_for_contiguous_layout() == 128
    kind, layout, n, k = REPORTED[name]()
    Case(kind, layout, *smaller_sizes(n, k)).on(PROCESSOR).run().check()


def test_reported_alignment() -> None:
    """R9, R54: an alignment for the process and one for a call."""
    test_reported_inputs.test_alignment_is_documented_and_a_smaller_one_can_be_chosen()


@pytest.mark.parametrize("expected_m", [-1, 0, 1, 1000])
def test_reported_hints(expected_m: int) -> None:
    """R8: groups of 0 rows, and hints of 0 and below."""
    for m in (0, 64):
        test_reported_inputs.test_masked_groups_without_rows(m, expected_m)


@pytest.mark.parametrize("name", ["contiguous", "psum", "masked"])
def test_golden_grouped(name: str) -> None:
    test_golden.test_grouped(name)


def test_groupings_share_one_definition() -> None:
    """A group's rows have the bits that the dense product of them has, in every grouping."""
    rng = generator(9)
    a, b = scaled(rng, (70, 200)), scaled(rng, (2, 140, 200), "128x128")
    dense = torch.empty(70, 140)
    dg_core.fp8_gemm_nt(a.pair, (b.values[1], b.sf[1]), dense)
    ones = torch.full((70,), 1, dtype=torch.int32)
    found = [torch.empty(70, 140) for _ in range(3)]
    dg_core.m_grouped_fp8_gemm_nt_contiguous(a.pair, b.pair, found[0], ones)
    ends = torch.tensor([0, 70], dtype=torch.int32)
    dg_core.m_grouped_fp8_gemm_nt_contiguous(
        a.pair, b.pair, found[1], ends, use_psum_layout=True, ensure_zero_padding=False
    )
    both = [torch.stack((x, x)) for x in a.pair]
    d = torch.empty(2, 70, 140)
    dg_core.m_grouped_fp8_gemm_nt_masked((both[0], both[1]), b.pair, d, torch.tensor([0, 70]).int(), 70)
    found[2] = d[1]
    assert all(torch.equal(dense, other) for other in found)
