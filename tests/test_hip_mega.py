"""Mega MoE's kernels on the host target: each stage against float64, whole calls against the oracle, and the
one launch against the stages, bit for bit."""

from __future__ import annotations

import itertools
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from dg_core import symm
from dg_core.peers import waiting
from dg_core.testing import assert_bitwise_equal, calc_diff
from dg_core.testing.mega import data, oracle

from . import hip_mega
from .hip_mega import STAGED, TOKENS, Case, Cases, launches, sizes_of
from .test_reference_mega import check_quantised, decoded, routes_by_hand, weights64

HEADERS = Path(__file__).resolve().parent.parent / "csrc_hip" / "include" / "dg_hip" / "mega"
STAGE_BOUND = 3e-6
cases = hip_mega.cases


def same(ys: list[Tensor], others: list[Tensor], label: str = "") -> None:
    for rank, (y, other) in enumerate(zip(ys, others, strict=True)):
        assert_bitwise_equal(y, other, f"rank {rank} {label}")


# Whole calls ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("ranks", "routes"),
    [*itertools.product((1, 3), data.ROUTES), (2, "hostile"), (8, "hostile"), (8, "crowd")],
)
def test_both_paths_are_the_oracle(cases: Cases, ranks: int, routes: str) -> None:
    """Uneven ranks, one of them without tokens; with 3 ranks experts do not divide evenly."""
    made = cases(sizes_of(ranks), routes)
    fused = made.run()
    made.check(fused)
    same(made.run(STAGED), fused)


@pytest.mark.parametrize(
    ("experts", "ranks", "topk", "tokens"),
    [
        (5, 4, 2, (9, 3, 0, 6)),  # two experts a rank, so rank 2 has one and rank 3 none
        (3, 2, 8, (11, 4)),  # more slots than experts
        (8, 2, 32, (3, 5)),
        (8, 2, 2, (0, 0)),
        (40, 2, 3, (130, 7)),
    ],
)
def test_odd_numbers(cases: Cases, experts: int, ranks: int, topk: int, tokens: tuple[int, ...]) -> None:
    made = cases(sizes_of(ranks, num_experts=experts, topk=topk), "hostile", tokens)
    fused = made.run()
    made.check(fused)
    same(made.run(STAGED), fused)


@pytest.mark.parametrize(("hidden", "intermediate"), [(256, 384), (640, 128), (128, 768)])
def test_widths(cases: Cases, hidden: int, intermediate: int) -> None:
    """7: each product has its own K, and neither is a power of two."""
    made = cases(sizes_of(2, hidden=hidden, intermediate=intermediate), "hostile", (9, 4))
    fused = made.run()
    made.check(fused)
    same(made.run(STAGED), fused)


def test_more_rows_of_an_expert_than_a_tile(cases: Cases) -> None:
    """330 rows of one expert: two whole tiles, and one of 74."""
    made = cases(sizes_of(2, num_experts=2, topk=1), "crowd", (200, 130))
    fused = made.run()
    made.check(fused)
    same(made.run(STAGED), fused)


def test_weights_in_plain_order_give_the_same_bits(cases: Cases) -> None:
    tiles = cases(sizes_of(2), "hostile").run()
    made = cases(sizes_of(2), "hostile", plain_order=True)
    same(made.run(), tiles)
    same(made.run(STAGED), tiles)
    # Not contiguous, and beside a multiple of 16 bytes: copied.
    for rank, (l1, (values, sf)) in enumerate(made.weights):
        raw = values.view(torch.uint8)
        beside = torch.zeros(raw.numel() + 1, dtype=torch.uint8)[1:].view(raw.shape).copy_(raw)
        turned = l1[0].view(torch.uint8).transpose(1, 2).contiguous().transpose(1, 2)
        made.weights[rank] = (
            (turned.view(values.dtype), l1[1][..., None]),
            (beside.view(values.dtype), sf.repeat(1, 2)[:, : sf.shape[1]]),
        )
    same(made.run(), tiles)


@pytest.mark.parametrize("prebuild", ["asm", "asm_route", "auto", "compact"])
def test_no_bit_depends_on_how_routes_are_found(cases: Cases, prebuild: str, on_hip: Any) -> None:
    made = cases(sizes_of(3), "hostile")
    want = made.run()
    made.prebuild = prebuild
    with launches(on_hip) as seen:
        same(made.run(STAGED), want, prebuild)
    assert ("mega_emit_routes" in dict(seen)) is (prebuild == "compact")


@pytest.mark.parametrize("seed", [1, 2, 3])
@pytest.mark.parametrize("resident", [1, 2, 3])
def test_no_bit_depends_on_the_order_of_threads_and_blocks(
    cases: Cases, seed: int, resident: int, on_hip: Any
) -> None:
    made = cases(sizes_of(2, intermediate=256), "hostile", (40, 13))
    want = made.run(STAGED)
    made.check(want)
    on_hip.seed = seed
    for rank in made.world.ranks:
        rank.stages.resident = resident
    same(made.run(STAGED), want)
    same(made.run(), want)
    made.prebuild = "asm"
    same(made.run(STAGED), want)


def test_y_may_have_any_row_stride_and_address(cases: Cases) -> None:
    made = cases(sizes_of(2), "hostile")
    want = made.run()
    for stride, first in ((128, 0), (136, 8), (131, 0), (160, 3)):
        counts = [len(rank.x) for rank in made.held]
        wide = [torch.full(((count + 1) * stride,), 7.0).bfloat16() for count in counts]
        ys = [w.as_strided((n, 128), (stride, 1), first) for w, n in zip(wide, counts, strict=True)]
        made.world.run(("fused",), made.calls(ys))
        same(ys, want, f"stride {stride}")
        for w, y in zip(wide, ys, strict=True):
            y.fill_(7.0)
            assert (w == 7).all(), "something beside y was written"


def test_without_the_tail(cases: Cases, on_hip: Any) -> None:
    """46: with and without it in turn, and with few threads that add."""
    made = cases(sizes_of(2), "hostile")
    want = made.run(STAGED)
    for tail, threads in ((False, 64), (True, 128), (False, 256), (True, 64)):
        made.launch = {"reduce_threads": threads}
        with launches(on_hip) as seen:
            same(made.run(STAGED, tail_reduce=tail), want)
        assert ("mega_close" in dict(seen)) is ("mega_reduce" in dict(seen)) is not tail


def test_statistics_add_live_routes(cases: Cases) -> None:
    made = cases(sizes_of(3), "hostile")
    stats = [torch.full((count + 1,), 100, dtype=torch.int32) for count in (3, 3, 2)]  # of 8 on 3 ranks
    routes = oracle.recv_stats([(rank.topk_idx, rank.topk_weights) for rank in made.held], 8)
    given = [count[:-1] for count in stats]
    made.run(stats=given)
    assert torch.equal(torch.cat(given), routes + 100)
    made.prebuild = "asm"
    made.run(STAGED, stats=given)
    assert torch.equal(torch.cat(given), 2 * routes + 100)
    assert [int(count[-1]) for count in stats] == [100] * 3
    assert routes.sum() > 10


def test_launches_by_name(cases: Cases, on_hip: Any) -> None:
    made = cases(sizes_of(1), tokens=(4,))
    with launches(on_hip) as seen:
        made.run()
    assert seen == [("mega_persistent", 4)]
    for prebuild, routing in (("asm", []), ("compact", [("mega_gather_routes", 4), ("mega_emit_routes", 4)])):
        made.prebuild = prebuild
        with launches(on_hip) as seen:
            made.run(STAGED)
        assert seen == [
            ("mega_open", 1), *routing, ("mega_k1_dispatch_l1", 4), ("mega_k2_swiglu_quant", 4),
            ("mega_k3_l2_combine", 68),
        ]  # fmt: skip


# What stages leave ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("prebuild", ["compact", "asm"])
@pytest.mark.parametrize("routes", ["hostile", "crowd"])
def test_every_stage_alone(cases: Cases, prebuild: str, routes: str) -> None:
    """Routes bit for bit, and each stage's rows from what the stage before it left, in float64 on decoded
    operands."""
    made = cases(sizes_of(3, hidden=256, intermediate=256), routes)
    made.prebuild = prebuild
    made.run(STAGED)
    for rank in range(3):
        check_stages(made, rank, least=10 if routes == "hostile" else 0)


def check_stages(made: Case, rank: int, least: int) -> None:
    any_made: Any = made
    views, routes = made.world.ranks[rank].views, routes_by_hand(any_made, rank)
    count = len(routes)
    assert count >= least
    per = made.world.layout.experts_per_rank
    assert views["runtime_tokens"].tolist() == list(TOKENS[:3])
    if not count:
        assert views["expert_offsets"].tolist() == [0] * (per + 1)
        return
    expert, source, token, slot = (torch.tensor(column) for column in list(zip(*routes, strict=True))[:4])
    assert torch.equal(views["row_source"][:count].long(), torch.stack([source, token, slot, expert], 1))
    assert views["row_weight"][:count].tolist() == [route[4] for route in routes]
    assert views["expert_offsets"].tolist() == [0, *torch.bincount(expert, minlength=per).cumsum(0).tolist()]
    for name, kept in (("x", views["l1_acts"]), ("x_sf", views["l1_acts_sf"])):
        picked = [getattr(made.held[r], name)[t] for r, t in zip(source, token, strict=True)]
        assert_bitwise_equal(kept[:count], torch.stack(picked), name)
    x, gu = decoded(views["l1_acts"][:count], views["l1_acts_sf"], "w8a8"), views["l1_out"][:count]
    l1, l2 = (weights64(made.held[rank], which, "w8a8") for which in ("l1", "l2"))
    want = torch.stack([w @ row for row, w in zip(x, l1[expert], strict=True)])
    assert calc_diff(gu, want) < STAGE_BOUND
    check_quantised(views, gu.double(), views["row_weight"][:count].double(), "w8a8")
    a = decoded(views["l2_acts"][:count], views["l2_acts_sf"], "w8a8")
    p = torch.stack([w @ row for row, w in zip(a, l2[expert], strict=True)])
    got = [made.world.view(r, "combine")[s, t] for r, t, s in zip(source, token, slot, strict=True)]
    assert calc_diff(torch.stack(got), p) < STAGE_BOUND


@pytest.mark.parametrize("fast_math", [True, False])
def test_the_second_stage_on_rows_of_any_size(cases: Cases, fast_math: bool) -> None:
    """Gate and up from tiny to huge, in float64; the exponential over- and underflows on both sides."""
    made = cases(sizes_of(1, intermediate=640), tokens=(60,))
    made.run(("k1",))
    views = made.world.ranks[0].views
    count = int(views["expert_offsets"][-1])
    g = torch.Generator().manual_seed(3)
    size = torch.logspace(-6, 2.2, count)[:, None]
    views["l1_out"][:count].copy_(torch.randn(count, 1280, generator=g) * size)
    views["l1_out"][0, :4] = torch.tensor([-200.0, 200.0, -88.5, -104.5])
    made.world.run(("k2",), made.calls([None], fast_math=fast_math))
    gu, weight = views["l1_out"][:count].double(), views["row_weight"][:count].double()
    check_quantised(views, gu, weight, "w8a8")


def test_slots_are_added_in_their_order_in_float32(cases: Cases) -> None:
    """1 + 2^24 is 2^24 in float32, so the order shows; bfloat16 sums would lose 257."""
    made = cases(sizes_of(1, topk=4), tokens=(2,))
    made.run()
    own = made.world.ranks[0]
    own.views["topk_idx"][:2] = torch.tensor([[0, 1, 2, -1], [-1, 2, 1, 0]])
    own.views["topk_weights"][:2] = 1.0
    rows = [torch.tensor([one, other]) for one, other in ((1.0, 256.0), (2.0**24, 1.0), (-(2.0**24), 256.0))]
    for token, order in enumerate(((0, 1, 2, None), (None, 2, 1, 0))):
        for slot, which in enumerate(order):
            row = torch.full((2,), float("nan")) if which is None else rows[which]
            own.views["combine"][slot, token] = row.repeat(64).bfloat16()
    y = torch.zeros(2, 128, dtype=torch.bfloat16)
    own.stages._launch("mega_reduce", 3, own.stages._told(made.calls([y])[0], reduce_threads=64))
    assert y.tolist() == [[0.0, 512.0] * 64, [1.0, 512.0] * 64]


def test_a_stage_may_be_repeated(cases: Cases) -> None:
    made = cases(sizes_of(2), "hostile")
    want = made.run(STAGED)
    same(made.run(("k1", "k1", "k2", "k2", "k3")), want)


# What Python and C++ both write down ------------------------------------------------------------------------


def enum(header: str, name: str) -> list[tuple[str, int]]:
    body = re.search(rf"enum {name} \{{([^}}]*)\}}", (HEADERS / header).read_text())
    assert body is not None
    found, number = [], 0
    for part in body[1].replace("\n", " ").split(","):
        word, _, value = part.strip().partition(" = ")
        number = int(value) if value else number
        found.append((word, number))
        number += 1
    return found


def test_codes_of_kernels_are_those_of_python() -> None:
    def camel(word: str) -> str:
        return "k" + "".join(part.capitalize() for part in word.split("_"))

    assert enum("control.h", "Local") == [(camel(word), i) for i, word in enumerate(symm.LOCAL_WORDS)]
    for word, number in enum("control.h", "Cause"):
        assert camel(waiting.ENDED_BY[number]) == word
    for word, number in enum("control.h", "Phase"):
        assert camel(symm.PHASES[number]) == word
    columns = ("generation", "num_tokens", "path", "dispatch", "op", "graph")
    assert tuple(symm.Published.__dataclass_fields__) == columns
    names = (
        "kPublishedGeneration",
        "kTokens",
        "kPath",
        "kDispatchTokens",
        "kOp",
        "kGraph",
        "kPublishedWords",
    )
    assert [word for word, _ in enum("control.h", "Published")] == list(names)
