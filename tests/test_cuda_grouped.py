"""Grouped and batched products on a card: any layout, size, storage and scale family, against float64 on the
decoded operands; and that kernels of the CUDA backend computed them.

What the harness itself is worth, ``test_cuda_grouped_harness.py`` shows without a card.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given
from torch import Tensor

import dg_core
from dg_core.backends.cuda import gemm
from dg_core.backends.cuda.launch import LaunchSpec
from dg_core.backends.cuda.plans import Choice, GemmTask, Settings, candidates, choose
from dg_core.backends.cuda.source import GemmConfig

from . import formulas
from .cuda_grouped import (
    BF16,
    BLOCK,
    FP4_KINDS,
    FP4_WEIGHTS,
    FP8_KINDS,
    OUT,
    Case,
    Kind,
    cases,
    examples,
    hopper_alone,
    specs,
)
from .cuda_grouped_layouts import (
    GROUPINGS,
    INT_MAX,
    Layout,
    labels,
    layout_of,
    random_counts,
    random_ends,
    random_labels,
    runs,
)
from .cuda_products import hopper, needs_card

__all__ = ["hopper", "hopper_alone", "specs"]
pytestmark = [pytest.mark.gpu, needs_card, pytest.mark.usefixtures("hopper_alone")]

CARD = "cuda"
common, fewer = examples(40), examples(20)


def orders(grouping: str) -> tuple[str, ...]:
    return ("nt", "nn") if grouping in ("contiguous", "psum") else ("nt",)


# Anything ---------------------------------------------------------------------------------------------------


@common
@given(case=cases("contiguous", FP8_KINDS, ("nt", "nn")))
def test_fp8_labels(case: Case) -> None:
    """R9, R10, R11, R13, R24, R48: labels in any order, of no group, of no row; rows at any stride."""
    case.on(CARD).run().check()


@common
@given(case=cases("psum", FP8_KINDS, ("nt", "nn")))
def test_fp8_ends(case: Case) -> None:
    """R48, R54: end rows at any alignment, with and without zeros between groups, and ends out of range."""
    case.on(CARD).run().check()


@common
@given(case=cases("masked", FP8_KINDS))
def test_fp8_counts(case: Case) -> None:
    """R8, R48: groups of no rows, of all, of counts out of range; any hint."""
    case.on(CARD).run().check()


@common
@given(case=cases("batched", FP8_KINDS))
def test_fp8_batches(case: Case) -> None:
    """R57: batches, with C, and in place."""
    case.on(CARD).run().check()


@fewer
@given(case=cases("contiguous", FP4_KINDS, ("nt", "nn")))
def test_fp4_labels(case: Case) -> None:
    """R59: FP4 on either side or both, packed along K or along the rows."""
    case.on(CARD).run().check()


@fewer
@given(case=cases("psum", FP4_KINDS, ("nt", "nn")))
def test_fp4_ends(case: Case) -> None:
    """R59."""
    case.on(CARD).run().check()


@fewer
@given(case=cases("masked", FP4_KINDS))
def test_fp4_counts(case: Case) -> None:
    """R8, R59."""
    case.on(CARD).run().check()


@fewer
@given(case=cases("batched", FP4_KINDS))
def test_fp4_batches(case: Case) -> None:
    """R57, R59."""
    case.on(CARD).run().check()


@fewer
@given(case=cases("contiguous", (BF16,), ("nt", "nn")))
def test_bf16_labels(case: Case) -> None:
    """R9, R10, R11, R13, R48."""
    case.on(CARD).run().check()


@fewer
@given(case=cases("psum", (BF16,), ("nt", "nn")))
def test_bf16_ends(case: Case) -> None:
    """R48, R54."""
    case.on(CARD).run().check()


@fewer
@given(case=cases("masked", (BF16,)))
def test_bf16_counts(case: Case) -> None:
    """R8, R42, R48."""
    case.on(CARD).run().check()


@fewer
@given(case=cases("batched", (BF16,)))
def test_bf16_batches(case: Case) -> None:
    """R57."""
    case.on(CARD).run().check()


# Every family, number format and grouping -------------------------------------------------------------------


@pytest.mark.parametrize("grouping", GROUPINGS)
@pytest.mark.parametrize("kind", [*FP8_KINDS, *FP4_KINDS, BF16], ids=str)
def test_families(kind: Kind, grouping: str) -> None:
    """R25, R46, R59: K ends inside a block and inside a word of four exponents; both outputs and orders."""
    for order in orders(grouping):
        for dtype in OUT:
            Case(kind, layout_of(grouping), 140, 330, order, dtype, seed=1).on(CARD).run().check()


@pytest.mark.parametrize("grouping", GROUPINGS)
@pytest.mark.parametrize("kind", [BLOCK, Kind("row", "row"), BF16], ids=str)
def test_larger_products(kind: Kind, grouping: str) -> None:
    """More tiles than a card has processors, and more K than a kernel has stages."""
    layout = {
        "contiguous": labels(runs(*((g, 90 + 67 * g) for g in range(8)), pad_to=128), 8),
        "psum": Layout("psum", 6, 3000, (500, 1024, 1030, 1030, 2048 + 700, 2816 + 100), 128, True),
        "masked": Layout("masked", 9, 400, (400, 300, 0, 129, 128, 64, 65, 1, 260), expected_m=150),
        "batched": Layout("batched", 7, 300),
    }[grouping]
    for order in orders(grouping):
        for dtype in OUT:
            Case(kind, layout, 1160, 2064, order, dtype, seed=2).on(CARD).run().check()


@pytest.mark.parametrize("addend", ["other", "in place"])
@pytest.mark.parametrize("kind", [BLOCK, Kind("packed128", "packed128"), FP4_WEIGHTS, BF16], ids=str)
def test_batches_with_an_addend(kind: Kind, addend: str) -> None:
    """R57: C that is D and C that is not, in every storage of D."""
    for dtype in OUT:
        for out_how in ("plain", "padded", "offset", "wide", "interleaved"):
            case = Case(kind, Layout("batched", 3, 70), 136, 300, "nt", dtype, out_how=out_how, addend=addend)
            case.on(CARD).run().check()


@pytest.mark.parametrize("sizes", [(0, 0), (24, 0), (0, 128), (40, 0), (40, 1)], ids=str)
@pytest.mark.parametrize("grouping", GROUPINGS)
@pytest.mark.parametrize("kind", [BLOCK, FP4_WEIGHTS, BF16], ids=str)
def test_sizes_of_zero(kind: Kind, grouping: str, sizes: tuple[int, int]) -> None:
    """R8: no columns, no K, no rows, no groups. Without K the rows of groups become 0, and no others."""
    without_rows = {
        "contiguous": (labels([], 3), labels([-1] * 70, 0)),
        "psum": (Layout("psum", 2, 0, (0, 0)), Layout("psum", 0, 70, (), zero=True)),
        "masked": (Layout("masked", 2, 0, (0, INT_MAX)), Layout("masked", 0, 70)),
        "batched": (Layout("batched", 2, 0), Layout("batched", 0, 70)),
    }[grouping]
    for layout in (layout_of(grouping), *without_rows):
        for dtype in OUT:
            Case(kind, layout, *sizes, "nt", dtype, out_how="padded", seed=3).on(CARD).run().check()


@pytest.mark.parametrize("rows", [1, 5, 70, 300])
@pytest.mark.parametrize("alignment", [1, 2, 3])
@pytest.mark.parametrize("kind", [BLOCK, Kind("row", "row"), FP4_WEIGHTS, BF16], ids=str)
def test_groups_begin_anywhere(kind: Kind, alignment: int, rows: int) -> None:
    """Groups that begin at every row of four: row scales come by copies that begin at multiples of 16 bytes,
    and a tile's other rows are its neighbours'."""
    ends = formulas.psum_ends([rows, rows + 1, rows + 2, 1, rows, 0, 2], alignment)
    for zero in (False, True):
        layout = Layout("psum", len(ends), ends[-1] + 3, tuple(ends), alignment, zero)
        for dtype, how in zip(OUT, ("plain", "column"), strict=True):
            Case(kind, layout, 136, 300, dtype=dtype, how=(how,) * 4).on(CARD).run().check()


@pytest.mark.parametrize("grouping", ["contiguous", "psum", "masked"])
@pytest.mark.parametrize("kind", [BLOCK, BF16], ids=str)
def test_layouts_that_are_strided(kind: Kind, grouping: str) -> None:
    """Labels, ends and counts two elements apart, as a column of a caller's table."""
    Case(kind, layout_of(grouping), 136, 256, strided=True).on(CARD).run().check()


# Small cases that stand for all kernels ---------------------------------------------------------------------

#: What ``compute-sanitizer python -m pytest -p no:xdist tests/test_cuda_grouped.py -k test_small`` goes
#: through: every grouping and number format, sizes off every tile, rows of nobody, tensors not aligned.
SMALL: dict[str, Callable[[], Case]] = {
    "labels": lambda: Case(BLOCK, labels(runs((1, 33), (0, 90), (2, 7), pad_to=16), 4), 71, 210),
    "labels, shuffled": lambda: Case(
        Kind("1x128", "1x128"), labels([g % 5 - 1 for g in range(67)], 3), 130, 129, out_how="padded"
    ),
    "labels, nn, channels": lambda: Case(
        Kind("row", "row"), labels(runs((2, 65), (0, 3)), 3), 72, 97, "nn", torch.float32, ("padded",) * 4
    ),
    "labels, bf16 nn": lambda: Case(BF16, labels(runs((1, 40), (0, 31), pad_to=32), 2), 65, 75, "nn"),
    "labels, fp8 x fp4": lambda: Case(FP4_WEIGHTS, labels(runs((0, 17), (3, 64)), 4), 136, 200),
    "ends, zeros": lambda: Case(
        BLOCK, Layout("psum", 3, 210, (33, 70, 161), 64, True), 129, 257, out_how="padded"
    ),
    "ends, bf16, no zeros": lambda: Case(
        BF16, Layout("psum", 3, 150, (16, 16, 99), 32), 40, 130, "nt", torch.float32
    ),
    "counts": lambda: Case(
        BLOCK, Layout("masked", 4, 70, (0, 70, 33, 1), expected_m=30), 200, 384, out_how="interleaved"
    ),
    "counts, packed scales": lambda: Case(
        Kind("packed32", "packed32", stated=True), Layout("masked", 3, 33, (INT_MAX, -1, 8)), 65, 290,
        how=("interleaved", "column", "wide", "padded"),
    ),
    "counts, fp4 x fp4": lambda: Case(
        Kind("packed32", "packed32", "fp4", "fp4", True), Layout("masked", 2, 19, (19, 5)), 33, 98
    ),
    "batch": lambda: Case(BLOCK, Layout("batched", 3, 37), 75, 161, addend="other", out_how="offset"),
    "batch, bf16, in place": lambda: Case(
        BF16, Layout("batched", 2, 66), 30, 65, "nt", torch.float32, ("offset",) * 4, addend="in place"
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", SMALL)
def test_small(name: str) -> None:
    """One small case for every grouping and number format: what a sanitizer is to look at."""
    SMALL[name]().on(CARD).run().check()


# Every kind of tile -----------------------------------------------------------------------------------------


def _tiles() -> dict[str, GemmConfig]:
    """Of what groups may be given, by FP8 with block scales: for each way to fill a tile the narrowest and
    the widest."""
    found: dict[str, GemmConfig] = {}
    for grouping in GROUPINGS:
        kinds: dict[tuple[int | bool, ...], list[GemmConfig]] = {}
        for each in candidates(GemmTask(1024, 4096, 4096, grouping=grouping, groups=4)):
            key = (each.consumers, each.subs, each.pairs, each.swap, each.tma_store)
            kinds.setdefault(key, []).append(each)
        for same in kinds.values():
            same.sort(key=lambda each: each.block_q)
            found |= {each.name: each for each in (same[0], same[-1])}
    return found


TILES = _tiles()


@pytest.mark.parametrize("k", [128, 3 * 128 - 16, 13 * 128])
@pytest.mark.parametrize("name", TILES)
def test_tiles(name: str, k: int, monkeypatch: pytest.MonkeyPatch, specs: list[LaunchSpec]) -> None:
    """Each kind of tile, whatever would be chosen: few blocks that take many tiles one after another, of one
    K block, of three and of many, groups that end and begin in a tile."""
    config = TILES[name]

    def chosen(task: GemmTask, processors: int, settings: Settings) -> Choice:
        return choose(task, processors, settings)._replace(config=config, blocks=processors)

    monkeypatch.setattr(gemm, "choose", chosen)
    dg_core.set_num_sms(3 + k // 128)
    rows = [
        layout_of(config.grouping),
        *(random_labels(style, 4, 500, k) for style in ("aligned 128", "aligned 64", "runs", "shuffled")),
        random_ends(128, 4, 500, True, False, None, k),
        random_ends(20, 4, 500, True, True, None, k),
        random_counts(410, 4, 300, k),
        Layout("batched", 3, 389),
    ]
    for layout in (each for each in rows if each.grouping == config.grouping and each.rows):
        Case(BLOCK, layout, 528, k).on(CARD).run().check()
    assert name in {spec.function.name for spec in specs}


# What ran ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("grouping", GROUPINGS)
@pytest.mark.parametrize("kind", [BLOCK, FP4_WEIGHTS, BF16], ids=str)
def test_kernels_of_the_cuda_backend_run(specs: list[LaunchSpec], kind: Kind, grouping: str) -> None:
    """The backend describes a launch for the first call; in the second the profiler sees a kernel of this
    library, and none of torch's."""
    how = ("plain", "wide column", "plain", "plain")
    placed = Case(kind, layout_of(grouping), 256, 512, how=how).on(CARD)
    placed.run()
    assert specs, "no launch was described"
    torch.cuda.synchronize()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA], acc_events=True) as seen:
        placed.run()
        torch.cuda.synchronize()
    names = [event.key for event in seen.key_averages() if event.device_type.name == "CUDA"]
    assert any(name.startswith("sm90_") and "gemm" in name for name in names), names
    assert not any("at::" in name or "cutlass" in name or "cublas" in name for name in names), names
    placed.check()


def test_the_reference_cannot_stand_in() -> None:
    """Asked for by name it refuses: no test here passes without kernels of the CUDA backend."""
    x = torch.ones(16, 16, dtype=torch.bfloat16, device=CARD)
    with dg_core.use_backend("reference"), pytest.raises(AssertionError, match="in place of"):
        dg_core.bf16_gemm_nt(x, x, torch.empty_like(x))


# Values of the public library -------------------------------------------------------------------------------


def valid_rows(name: str, x: Any) -> Tensor:
    """Which rows of D a golden case compares."""
    if name == "masked":
        counts: Tensor = x.masked_m
        return torch.arange(x.d.shape[1]) < counts[:, None]
    owned, start = torch.zeros(len(x.d), dtype=torch.bool), 0
    if name == "contiguous":
        owned |= x.labels >= 0
        return owned
    for end in x.ends.tolist():
        owned[start:end] = True
        start = formulas.align_up(end, 128)
    return owned


@pytest.mark.parametrize("name", ["contiguous", "psum", "masked"])
def test_golden(name: str) -> None:
    """What deep_gemm 2.6.1 computed on an H200, within the sum of both bounds."""
    pytest.importorskip("safetensors", reason='pip install "dg_core[test]"')
    from .test_golden import FP8_TO_BF16, GROUPED, check_close
    from .test_golden import Case as Golden

    x = Golden("grouped", name)
    rows, golden = valid_rows(name, x), x.d
    x.tensors = {key: tensor.to(CARD) for key, tensor in x.tensors.items()}
    d = torch.zeros_like(x.d)
    a, b = (x.a, x.sfa), (x.b, x.sfb)
    if name == "masked":
        dg_core.m_grouped_fp8_gemm_nt_masked(a, b, d, x.masked_m, 50)
    elif name == "psum":
        dg_core.m_grouped_fp8_gemm_nt_contiguous(a, b, d, x.ends, use_psum_layout=True)
    else:
        dg_core.m_grouped_fp8_gemm_nt_contiguous(a, b, d, x.labels)
    assert name in GROUPED
    assert int(rows.sum()) > 0
    check_close(d.cpu()[rows], golden[rows], FP8_TO_BF16)
