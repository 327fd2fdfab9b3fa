"""Grouped products on a card in warm, cold and changed calls: the same bits, settings, addresses, streams,
graphs whose labels, ends and counts change between replays, and DG_CHECK_DEVICE."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import dg_core
from dg_core import config as process
from dg_core.backends.cuda import launch
from dg_core.backends.cuda.driver import driver
from dg_core.backends.cuda.launch import LaunchSpec
from dg_core.errors import ArgumentError

from .cuda_grouped import (
    BF16,
    BLOCK,
    FP4_WEIGHTS,
    OUT,
    Case,
    Kind,
    Placed,
    bits_of_rows,
    check_repeats,
    held,
    hopper_alone,
    specs,
)
from .cuda_grouped_layouts import (
    GROUPINGS,
    INT_MAX,
    INT_MIN,
    Layout,
    labels,
    layout_of,
    random_counts,
    random_ends,
    random_labels,
    runs,
)
from .cuda_products import hopper, moved, needs_card

__all__ = ["hopper", "hopper_alone", "specs"]
pytestmark = [pytest.mark.gpu, needs_card, pytest.mark.usefixtures("hopper_alone")]

CARD = "cuda"
KINDS = (BLOCK, Kind("row", "row"), Kind("packed32", "packed32", stated=True), FP4_WEIGHTS, BF16)
AS_LOADED = ("plain", "wide column", "plain", "plain")  # nothing is copied before the product
UNALIGNED = ("offset", "offset", "padded", "padded")
Environment = Callable[..., None]
cuda: Any = torch.cuda  # its streams and graphs have no annotations


def made(kind: Kind, grouping: str, seed: int = 0, how: tuple[str, ...] = AS_LOADED, **more: Any) -> Case:
    return Case(kind, layout_of(grouping), 392, 1040, how=how, seed=seed, **more)


# Bits -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("grouping", GROUPINGS)
@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_twenty_calls_give_the_same_bits(kind: Kind, grouping: str) -> None:
    for dtype in OUT:
        check_repeats(made(kind, grouping, dtype=dtype), CARD, 20)


#: Many small groups, a few large ones with ragged ends, and shuffled rows.
REPEATED: dict[str, Callable[[], Case]] = {
    "80 groups": lambda: Case(BLOCK, random_counts(33, 80, 16, 5), 520, 1040),
    "6 groups of unequal size": lambda: Case(
        BLOCK, Layout("psum", 6, 3000, (500, 1024, 1030, 1030, 2048 + 700, 2916), 128, True), 2120, 1552
    ),
    "shuffled rows": lambda: Case(BF16, random_labels("shuffled", 16, 40, 6), 776, 1040),
}  # fmt: skip


@pytest.mark.parametrize("name", REPEATED)
def test_a_hundred_calls_give_the_same_bits(name: str) -> None:
    check_repeats(REPEATED[name](), CARD, 100)


# Settings ---------------------------------------------------------------------------------------------------

# name -> (what is set, the most blocks that a launch may then have)
SETTINGS: dict[str, tuple[Callable[[], None], int]] = {
    "num_sms 1": (lambda: dg_core.set_num_sms(1), 1),
    "num_sms 7": (lambda: dg_core.set_num_sms(7), 7),
    "num_sms 20": (lambda: dg_core.set_num_sms(20), 20),
    "pdl": (lambda: dg_core.set_pdl(True), INT_MAX),
    "multiples of 64": (lambda: dg_core.set_block_size_multiple_of(64), INT_MAX),
    "batch_invariant": (lambda: dg_core.set_batch_invariant(True), INT_MAX),
    "mk_alignment": (lambda: dg_core.set_mk_alignment_for_contiguous_layout(64), INT_MAX),
    "tc_util": (lambda: dg_core.set_tc_util(50), INT_MAX),
}  # fmt: skip


@pytest.mark.parametrize("grouping", GROUPINGS)
@pytest.mark.parametrize("kind", [BLOCK, FP4_WEIGHTS, BF16], ids=str)
@pytest.mark.parametrize("name", SETTINGS)
def test_a_setting_that_changes_after_a_plan_is_kept(
    specs: list[LaunchSpec], name: str, kind: Kind, grouping: str
) -> None:
    change, most = SETTINGS[name]
    placed = made(kind, grouping).on(CARD)
    for _ in range(2):
        placed.run()
    placed.check()
    first = placed.bits()
    specs.clear()
    change()
    placed.reset().run().check()
    assert specs, "the plan of before was used"
    products = [spec for spec in specs if spec.maps]  # what writes scales anew has no tensor maps
    assert products
    assert all(spec.grid[0] * spec.grid[1] * spec.grid[2] <= most for spec in products)
    process.restore_defaults()
    assert torch.equal(placed.reset().run().bits(), first)


@pytest.mark.parametrize("grouping", GROUPINGS)
@pytest.mark.parametrize("kind", [BLOCK, BF16], ids=str)
def test_both_launchers_give_the_same_bits(environment: Environment, kind: Kind, grouping: str) -> None:
    found = []
    for value, wanted in (("0", "python"), ("1", "native")):
        environment(DG_NATIVE_LAUNCHER=value)
        which, reason = launch.which()
        if which != wanted:
            pytest.skip(f"no {wanted} launcher: {reason}")
        placed = made(kind, grouping).on(CARD)
        placed.run().reset().run().check()
        found.append(placed.bits())
    assert torch.equal(*found)


# Batch invariance -------------------------------------------------------------------------------------------


def picked(x: Tensor, rows: Tensor) -> Tensor:
    """Some rows; number formats of one byte are not indexed everywhere, so their bytes are."""
    return x.view(torch.uint8)[rows].view(x.dtype) if x.element_size() == 1 else x[rows]


def rows_alone(placed: Placed, layout: Layout) -> None:
    """Another layout of the same rows, in place: rows that keep their group keep their bits, whatever else is
    asked for."""
    before, owners = bits_of_rows(placed), placed.case.owners
    placed.x["layout"].copy_(torch.tensor(layout.values, dtype=torch.int32))
    placed.reset().run()
    kept = (layout.owners() == owners) & (owners >= 0)
    assert kept.any()
    assert torch.equal(bits_of_rows(placed)[kept], before[kept])


@pytest.mark.parametrize("dtype", OUT, ids=str)
@pytest.mark.parametrize("kind", [BLOCK, Kind("row", "row"), FP4_WEIGHTS, BF16], ids=str)
class TestBatchInvariance:
    """With the setting, the bits of a row do not depend on the rows and groups that come with it."""

    def start(self, kind: Kind, layout: Layout, dtype: torch.dtype) -> Placed:
        dg_core.set_batch_invariant(True)
        placed = Case(kind, layout, 584, 2064, dtype=dtype, how=AS_LOADED).on(CARD).run()
        placed.check()
        return placed

    def test_labels(self, kind: Kind, dtype: torch.dtype) -> None:
        layout = random_labels("runs", 6, 130, 3)
        placed = self.start(kind, layout, dtype)
        first = bits_of_rows(placed)
        some = [label if i % 7 == 0 else -1 for i, label in enumerate(layout.values)]
        rows_alone(placed, dataclasses.replace(layout, values=tuple(some)))
        # The same rows, shuffled, and a few of them.
        order = torch.randperm(layout.rows, generator=torch.Generator().manual_seed(1))
        for rows in (order, order[:9]):
            x = dict(placed.x, layout=torch.tensor(layout.values, dtype=torch.int32, device=CARD))
            for name, how in (("a", "plain"), ("sfa", "wide column"), ("layout", "plain")):
                if name in x:
                    x[name] = moved(held(picked(x[name].cpu(), rows), how), CARD)
            x["d"] = torch.zeros(len(rows), placed.case.n, dtype=dtype, device=CARD)
            placed.case.call(x)
            owned = placed.case.owners[rows] >= 0
            assert owned.any()
            got = x["d"].view(torch.int16 if dtype == torch.bfloat16 else torch.int32).cpu()
            assert torch.equal(got[owned], first[rows][owned])

    def test_counts(self, kind: Kind, dtype: torch.dtype) -> None:
        layout = Layout("masked", 5, 300, (300, 7, 129, 0, 64), expected_m=100)
        placed = self.start(kind, layout, dtype)
        for values in ((1, 7, 128, 0, 0), (0, 0, 33, 0, 64), (300, 1, 1, 1, 1)):
            rows_alone(placed, dataclasses.replace(layout, values=values))
            placed.load(placed.case)
            placed.run()

    def test_ends(self, kind: Kind, dtype: torch.dtype) -> None:
        layout = Layout("psum", 3, 600, (128, 256 + 77, 384 + 200), 128)
        placed = self.start(kind, layout, dtype)
        rows_alone(placed, dataclasses.replace(layout, values=(3, 128 + 128 + 50, 384 + 1)))

    def test_batches(self, kind: Kind, dtype: torch.dtype) -> None:
        placed = self.start(kind, Layout("batched", 4, 257), dtype)
        first, case = bits_of_rows(placed), placed.case
        for groups, rows in ((1, 257), (3, 64), (4, 1)):
            x = {name: t[:groups] for name, t in placed.reset().x.items()}
            for name in ("a", "sfa", "d"):
                if name in x:
                    x[name] = x[name][:, :rows]
            case.call(x)
            assert torch.equal(bits_of_rows(placed)[:groups, :rows], first[:groups, :rows])


# Addresses --------------------------------------------------------------------------------------------------


def behind(x: Tensor) -> Tensor:
    """The values of ``x``, contiguous, one element behind an aligned address."""
    whole = torch.empty(x.numel() + 1, dtype=x.dtype, device=x.device)
    view = whole[1:].view(x.shape)
    view.copy_(x)
    assert view.data_ptr() % 16
    return view


@pytest.mark.parametrize("grouping", GROUPINGS)
@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_unaligned_tensors_after_aligned_ones_and_back(kind: Kind, grouping: str) -> None:
    """Each tensor in turn, the layout too, in calls that differ in nothing but an address."""
    placed = made(kind, grouping, how=("plain",) * 4).on(CARD).run()
    placed.check()
    first = bits_of_rows(placed)
    owned = placed.case.owners >= 0
    for name, x in list(placed.x.items()):
        placed.x[name] = behind(x)
        placed.x["d"].zero_()
        placed.run()
        assert torch.equal(bits_of_rows(placed)[owned], first[owned]), name
        placed.x[name] = x
        assert torch.equal(bits_of_rows(placed.reset().run()), first), name


@pytest.fixture
def no_waiting() -> Iterator[Callable[[], None]]:
    """Makes torch raise wherever the host waits for the card."""
    yield lambda: torch.cuda.set_sync_debug_mode("error")
    torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("grouping", GROUPINGS)
@pytest.mark.parametrize("how", [AS_LOADED, UNALIGNED], ids=["aligned", "unaligned"])
@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_a_warm_call_does_not_wait(
    no_waiting: Callable[[], None], kind: Kind, how: tuple[str, ...], grouping: str
) -> None:
    placed = made(kind, grouping, how=how).on(CARD).run().reset()
    no_waiting()
    placed.run()
    torch.cuda.set_sync_debug_mode("default")
    placed.check()


# Streams and graphs -----------------------------------------------------------------------------------------


def test_two_streams_at_once() -> None:
    """Products of all groupings on both streams: no launch meets another one's state."""
    pairs = [
        [made(kind, grouping, seed, how).on(CARD).run() for seed in range(2)]
        for grouping in GROUPINGS
        for kind, how in ((BLOCK, AS_LOADED), (BLOCK, UNALIGNED), (FP4_WEIGHTS, AS_LOADED), (BF16, AS_LOADED))
    ]
    for pair in pairs:
        for placed in pair:
            placed.check()
    expected = [[placed.bits() for placed in pair] for pair in pairs]
    streams = [cuda.Stream() for _ in range(2)]
    for _ in range(20):
        for pair in pairs:
            for placed in pair:
                placed.reset()
        torch.cuda.synchronize()
        for pair in pairs:
            for stream, placed in zip(streams, pair, strict=True):
                with cuda.stream(stream):
                    placed.run()
        torch.cuda.synchronize()
        for pair, right in zip(pairs, expected, strict=True):
            assert all(torch.equal(placed.bits(), bits) for placed, bits in zip(pair, right, strict=True))


def replayed(grouping: str) -> list[Layout]:
    """Layouts of one shape that a graph sees one after another: in and out of order, all rows, no row."""
    if grouping == "contiguous":
        styles = ("aligned 64", "shuffled", "wild", "runs")
        several = [[*random_labels(style, 5, 130, 4).values, *[-1] * 400][:400] for style in styles]
        return [labels(each, 5) for each in (*several, [-1] * 400, [4] * 400, runs((2, 1), pad_to=400))]
    if grouping == "psum":
        wild = (False, True, True)
        ends = [random_ends(64, 5, 130, True, each, None, seed).values for seed, each in enumerate(wild)]
        ends += [(0,) * 5, (400,) * 5, (1, 65, 129, 193, 257), (INT_MIN, 70, 60, INT_MAX, 3)]
        return [Layout("psum", 5, 400, each, 64, True, None) for each in ends]
    counts = [random_counts(100, 5, 30, seed).values for seed in range(3)]
    counts += [(0,) * 5, (100,) * 5, (INT_MAX, -1, 3, 0, INT_MIN), (0, 0, 0, 0, 1)]
    return [Layout("masked", 5, 100, each, expected_m=30) for each in counts]


@pytest.mark.parametrize("grouping", ["contiguous", "psum", "masked"])
@pytest.mark.parametrize("cold", [False, True], ids=["warm", "cold"])
@pytest.mark.parametrize("how", [AS_LOADED, UNALIGNED], ids=["aligned", "unaligned"])
@pytest.mark.parametrize("kind", [BLOCK, FP4_WEIGHTS, BF16], ids=str)
def test_graphs(
    environment: Environment, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: Kind,
    how: tuple[str, ...], cold: bool, grouping: str,
) -> None:  # fmt: skip
    """R13, R38, R54: labels, ends and counts change in place between replays of one graph, which was captured
    after a call of the same plan, or compiled and loaded its kernels inside the capture."""
    several = [Case(kind, layout, 264, 656, how=how, seed=i) for i, layout in enumerate(replayed(grouping))]
    placed = several[0].on(CARD)
    if cold:
        environment(DG_JIT_CACHE_DIR=str(tmp_path))
        monkeypatch.setattr(driver(), "_loaded", {})
    else:
        placed.run().check()
        placed.reset()
    graph = cuda.CUDAGraph()
    with cuda.graph(graph):
        placed.run()
    assert torch.equal(placed.bits(), several[0].before), "the capture wrote D"
    for case in (*several, *several[::-1]):
        placed.load(case)
        graph.replay()
        placed.check()


@pytest.mark.parametrize("kind", [BLOCK, BF16], ids=str)
def test_graphs_of_batches(kind: Kind) -> None:
    """R57: captured, with C in place, replayed with other values."""
    several = [made(kind, "batched", seed, dtype=torch.float32, addend="in place") for seed in range(3)]
    placed = several[0].on(CARD).run()
    placed.reset()
    graph = cuda.CUDAGraph()
    with cuda.graph(graph):
        placed.run()
    for case in several:
        placed.load(case)
        graph.replay()
        placed.check()


def test_dependent_launches_keep_their_order() -> None:
    """With programmatic dependent launch a product begins before the one ends that writes its A: two layers
    of experts behind each other, 20 times."""
    dg_core.set_pdl(True)
    first = Case(BF16, Layout("masked", 6, 130, (130, 0, 65, 1, 129, 64), expected_m=60), 264, 512, seed=1)
    one = first.on(CARD).run()
    one.check()
    weights = torch.randn(6, 136, 264, dtype=torch.bfloat16, device=CARD)
    counts = one.x["layout"]
    expected = torch.zeros(6, 130, 136, dtype=torch.bfloat16, device=CARD)
    torch.cuda.synchronize()
    dg_core.m_grouped_bf16_gemm_nt_masked(one.x["d"], weights, expected, counts, 60)
    torch.cuda.synchronize()
    for _ in range(20):
        found = torch.zeros_like(expected)
        one.reset().run()
        dg_core.m_grouped_bf16_gemm_nt_masked(one.x["d"], weights, found, counts, 60)
        assert torch.equal(found, expected)


# DG_CHECK_DEVICE --------------------------------------------------------------------------------------------

# name -> (layout with a value that breaks its rule, what the error says)
WRONG: dict[str, tuple[Layout, str]] = {
    "a label beyond the groups": (labels([0, -1, 1, 2, 7], 3), r"grouped_layout\[4\] is 7 on the device"),
    "a count beyond the rows": (Layout("masked", 3, 8, (8, 0, 9)), r"masked_m\[2\] is 9 on the device"),
    "a negative count": (Layout("masked", 3, 8, (-1, 0, 8)), r"masked_m\[0\] is -1 on the device"),
    "an end beyond the rows": (
        Layout("psum", 2, 90, (10, 91), 64),
        r"grouped_layout\[1\] is 91 on the device",
    ),
    "ends that go back": (Layout("psum", 2, 90, (70, 10), 64), r"grouped_layout\[1\] is 10 on the device"),
}


@pytest.mark.parametrize("kind", [BLOCK, BF16], ids=str)
@pytest.mark.parametrize("name", WRONG)
def test_device_values_are_reported_where_asked(environment: Environment, name: str, kind: Kind) -> None:
    """R10: operation, tensor, position and value, and D as it was; unasked, such values are dropped."""
    layout, words = WRONG[name]
    case = Case(kind, layout, 72, 144)
    placed = case.on(CARD)
    environment(DG_CHECK_DEVICE="1")
    with pytest.raises(ArgumentError, match=f"gemm_nt_.*{words}"):
        placed.run()
    assert torch.equal(placed.bits(), case.before)
    environment(DG_CHECK_DEVICE=None)
    placed.run().check()


@pytest.mark.parametrize("grouping", GROUPINGS)
def test_right_device_values_pass_the_check(environment: Environment, grouping: str) -> None:
    """Pads, empty groups and whole ones break no rule."""
    environment(DG_CHECK_DEVICE="1")
    Case(BLOCK, layout_of(grouping), 72, 144).on(CARD).run().check()
