"""Mega MoE of the reference backend: each step against float64 on decoded operands, whole calls against the
oracle and the public kernel, and the fused call against the stages, bit for bit."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from dg_core.backend import MegaMoe
from dg_core.backends.reference import BACKEND, mega_rows, operand
from dg_core.errors import ArgumentError
from dg_core.mega.layout import FORMATS, local_experts, symm_layout
from dg_core.mega.weights import plain_weights
from dg_core.symm import OPS, Published
from dg_core.testing import assert_bitwise_equal, calc_diff
from dg_core.testing.mega import data, oracle
from dg_core.testing.mega.local import LocalWorld, local_call

from . import formulas

GOLDEN = Path(__file__).resolve().parent / "golden"
STAGED = ("k1", "k2", "k3")
TOKENS = (5, 0, 17, 33, 1)
# Two products of float32 sums against float64, one of them rounded to bfloat16: the bound of one stage.
STAGE_BOUND = 3e-6


@dataclass
class Case:
    """A world with its inputs in place, what each rank holds, and the calls."""

    world: LocalWorld
    held: list[oracle.RankData]
    weights: list[Any]

    def run(self, stages: Sequence[str], clamp: float = math.inf, **options: Any) -> list[Tensor]:
        """y of every rank; it is NaN where nothing was written."""
        for number in range(self.world.layout.ranks):
            self.world.view(number, "combine").fill_(math.nan)
        stats = options.pop("stats", [None] * len(self.held))
        ys = [torch.full((len(rank.x) + 2, rank.x.shape[1]), math.nan).bfloat16() for rank in self.held]
        calls = [
            local_call(self.world.layout, len(rank.x), l1, l2, y, stats=count, clamp=clamp, **options)
            for rank, (l1, l2), y, count in zip(self.held, self.weights, ys, stats, strict=True)
        ]
        for stage in stages:
            self.world.run(stage, calls)
        for rank, y in zip(self.held, ys, strict=True):
            assert y[len(rank.x) :].isnan().all()
        return [y[: len(rank.x)] for rank, y in zip(self.held, ys, strict=True)]


def case(sizes: data.Sizes, routes: str = "plain", tokens: Sequence[int] = TOKENS, seed: int = 7) -> Case:
    """Inputs and weights from a seed. What lies behind a rank's tokens are NaNs with weights of NaN for
    expert 0, which would show if anything read them."""
    layout = symm_layout(
        sizes.mma_type, sizes.ranks, sizes.num_experts, max(tokens) or 1, sizes.topk, sizes.hidden,
        sizes.intermediate,
    )  # fmt: skip
    world, held = LocalWorld(layout), list[oracle.RankData]()
    for rank in range(sizes.ranks):
        world.data[rank].fill_(-1)
        world.view(rank, "topk_idx").zero_()
        if sizes.ranks < 8:  # more would touch gigabytes
            world.scratch[rank].fill_(-1)
        held.append(data.rank_data(seed, rank, sizes, tokens[rank % len(tokens)], routes))
        world.load(rank, held[-1].x, held[-1].x_sf, held[-1].topk_idx, held[-1].topk_weights)
    return Case(world, held, [data.prepared(rank, sizes.mma_type) for rank in held])


def sizes_of(mma_type: str, ranks: int = 2, **changes: Any) -> data.Sizes:
    return data.Sizes(mma_type, ranks, **{"num_experts": max(8, ranks), "hidden": 128, **changes})


# Whole calls ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("ranks", "routes"),
    # 72 ranks take a second or more a case.
    [*itertools.product((1, 2, 3, 8), data.ROUTES), (72, "hostile"), (72, "crowd")],
)
@pytest.mark.parametrize("mma_type", FORMATS)
def test_stages_are_the_fused_call_and_both_the_oracle(mma_type: str, ranks: int, routes: str) -> None:
    """Uneven ranks, one of them without tokens; with 3 ranks experts do not divide evenly."""
    made = case(sizes_of(mma_type, ranks), routes, (1, 0, 2) if ranks == 72 else TOKENS)
    fused, staged = made.run(["fused"]), made.run(STAGED)
    for rank, (y, other) in enumerate(zip(fused, staged, strict=True)):
        assert_bitwise_equal(y, other, f"rank {rank}")
    for rank, want in enumerate(oracle.expected(made.held, mma_type)):
        oracle.check(fused[rank], want, f"rank {rank}")


@pytest.mark.parametrize("mma_type", FORMATS)
def test_more_rows_of_an_expert_than_a_tile(mma_type: str) -> None:
    """1152 rows of one expert are two tiles of the fused call and of the stages."""
    made = case(sizes_of(mma_type, 2, hidden=128), "crowd", (384, 200))
    assert operand.TILE < 3 * 384
    fused, staged = made.run(["fused"]), made.run(STAGED)
    for y, other, want in zip(fused, staged, oracle.expected(made.held, mma_type), strict=True):
        assert_bitwise_equal(y, other)
        oracle.check(y, want)


@pytest.mark.parametrize("mma_type", FORMATS)
@pytest.mark.parametrize(
    ("experts", "ranks", "topk", "tokens"),
    [
        (5, 4, 2, (9, 3, 0, 6)),  # two experts a rank, so rank 2 has one and rank 3 none
        (3, 2, 8, (11, 4)),  # more slots than experts
        (1, 3, 1, (4, 4, 4)),
        (8, 2, 32, (3, 5)),
        (8, 2, 2, (0, 0)),
        (8, 2, 2, (0, 384)),
        (8, 2, 1, (1100, 2)),  # more tokens than the sum takes at a time
    ],
)
def test_odd_numbers(mma_type: str, experts: int, ranks: int, topk: int, tokens: tuple[int, ...]) -> None:
    made = case(sizes_of(mma_type, ranks, num_experts=experts, topk=topk), "hostile", tokens)
    fused, staged = made.run(["fused"]), made.run(STAGED)
    for y, other, want in zip(fused, staged, oracle.expected(made.held, mma_type), strict=True):
        assert_bitwise_equal(y, other)
        oracle.check(y, want)


@pytest.mark.parametrize("mma_type", FORMATS)
def test_clamp(mma_type: str) -> None:
    made = case(sizes_of(mma_type))
    wide, narrow = made.run(["fused"]), made.run(["fused"], clamp=0.5)
    for y, other, want in zip(narrow, wide, oracle.expected(made.held, mma_type, 0.5), strict=True):
        oracle.check(y, want)
        assert not len(y) or calc_diff(y, other) > 1e-2  # it changes much
    for y, other in zip(made.run(STAGED, clamp=0.5), narrow, strict=True):
        assert_bitwise_equal(y, other)


def test_statistics_add_live_routes() -> None:
    made = case(sizes_of("fp8_block", 3), "hostile")
    experts = [made.world.layout.experts_per_rank, 3, 2]  # of 8 on 3 ranks
    stats = [torch.full((count,), 100, dtype=torch.int32) for count in experts]
    routes = oracle.recv_stats([(rank.topk_idx, rank.topk_weights) for rank in made.held], 8)
    made.run(["fused"], stats=stats)
    assert torch.equal(torch.cat(stats), routes + 100)
    made.run(STAGED, stats=stats)
    assert torch.equal(torch.cat(stats), 2 * routes + 100)
    assert routes.sum() > 10


def test_a_weight_that_is_no_number_shows_in_its_token_alone() -> None:
    made = case(sizes_of("fp8_block"))
    made.world.view(0, "topk_weights")[3, 1] = math.nan
    y = made.run(["fused"])[0]
    assert y[3].isnan().all()
    assert not torch.cat([y[:3], y[4:]]).isnan().any()


def test_repeats_have_the_same_bits_and_later_inputs_count() -> None:
    made = case(sizes_of("fp8xfp4"), "hostile")
    first = made.run(["fused"])
    for _ in range(3):
        for y, other in zip(made.run(["fused"]), first, strict=True):
            assert_bitwise_equal(y, other)
    later = case(sizes_of("fp8xfp4"), "plain", seed=8)
    for rank, held in enumerate(later.held):
        made.world.load(rank, held.x, held.x_sf, held.topk_idx, held.topk_weights)
    made.weights = later.weights
    for y, want in zip(made.run(["fused"]), later.run(["fused"]), strict=True):
        assert_bitwise_equal(y, want)


def test_without_the_tail_a_barrier_comes_before_the_sum() -> None:
    made = case(sizes_of("w8a8"), "hostile")
    tail = made.run(["fused"])
    assert [exchange.barriers for exchange in made.world.exchanges] == [0, 0]
    apart = made.run(["fused"], tail_reduce=False)
    assert [exchange.barriers for exchange in made.world.exchanges] == [1, 1]
    for y, other in zip(tail, apart, strict=True):
        assert_bitwise_equal(y, other)


def test_a_call_means_the_same_whatever_surrounds_it() -> None:
    made = case(sizes_of("bf16xbf16"))
    want = made.run(["fused"])
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("medium")
    try:
        with torch.autocast("cpu", torch.bfloat16), torch.enable_grad():
            got = made.run(["fused"])
    finally:
        torch.set_float32_matmul_precision(before)
    for y, other in zip(got, want, strict=True):
        assert_bitwise_equal(y, other)


def test_values_of_the_public_kernel() -> None:
    """The kernel of sgl-deep-gemm on two H200. A float64 formula lies at 1.06e-5 of it on rank 1: in each of
    its worst tokens one value of h is within 3e-4 of the midpoint of two FP8 values, and the tensor cores'
    sums take the other side. So the maximum is held to 0.1 of the rms (0.056 was seen on the whole case), not
    to the 0.05 that holds between sums of one kind."""
    held, outputs = data.golden(GOLDEN)
    topk, hidden, inter = held[0].topk_idx.shape[1], held[0].x.shape[1], held[0].l2.shape[2]
    world = LocalWorld(symm_layout("fp8_block", 2, 2 * len(held[0].l1), 64, topk, hidden, inter))
    for rank, given_ in enumerate(held):
        world.load(rank, given_.x, given_.x_sf, given_.topk_idx, given_.topk_weights)
    made = Case(world, held, [data.prepared(rank, "fp8_block") for rank in held])
    for whole, want in zip(made.run(["fused"]), outputs, strict=True):
        y = whole[:, : want.shape[1]]
        assert calc_diff(y, want) <= 2e-5
        assert (y.float() - want.float()).abs().max() <= 0.1 * want.float().square().mean().sqrt()


# Graphs -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", ["persistent", "staged"])
def test_a_graph_reads_its_number_of_tokens_when_it_runs(path: str) -> None:
    made = case(sizes_of("fp8_block"), tokens=(20, 20))
    want, stages = made.run(["fused"]), STAGED if path == "staged" else ("fused",)
    for scalars in ((20, 20), (7, 0), (-3, 12), (0, 0), (99, 1)):
        ys = [torch.full((24, 128), math.nan).bfloat16() for _ in scalars]
        for rank, scalar in enumerate(scalars):
            made.world.view(rank, "cuda_graph_num_tokens").fill_(scalar)
        calls = [
            local_call(made.world.layout, 20, l1, l2, y, path=path, graph=True)
            for (l1, l2), y in zip(made.weights, ys, strict=True)
        ]
        for stage in stages:
            made.world.run(stage, calls)
        for y, whole, scalar in zip(ys, want, scalars, strict=True):
            count = min(max(scalar, 0), 20)
            assert_bitwise_equal(y[:count], whole[:count])
            assert y[count:].isnan().all()
        assert made.world.view(0, "runtime_tokens").tolist() == [min(max(s, 0), 20) for s in scalars]
        published = made.world.exchanges[0].published
        assert {words.graph for words in published} == {1}


def test_what_ranks_publish() -> None:
    made = case(sizes_of("bf16xbf16"))
    made.run(["fused"])
    made.run(["k1"], path="staged")
    op = OPS.index("bf16_mega_moe")
    assert made.world.exchanges[1].published == (Published(2, 5, 1, -1, op, 0), Published(2, 0, 1, -1, op, 0))


# What stages leave ------------------------------------------------------------------------------------------


def routes_by_hand(made: Case, rank: int) -> list[tuple[int, int, int, int, float]]:
    """expert, rank, token, slot and weight of the routes to a rank's experts, in the order of rows."""
    mine = local_experts(made.world.layout.num_experts, made.world.layout.ranks, rank)
    found = []
    for source, held in enumerate(made.held):
        for token, ids in enumerate(held.topk_idx.tolist()):
            for slot, expert in enumerate(ids):
                weight = float(held.topk_weights[token, slot])
                if expert in mine and weight != 0:
                    found.append((mine.index(expert), source, token, slot, weight))
    return sorted(found)


@pytest.mark.parametrize("mma_type", FORMATS)
def test_every_stage_alone(mma_type: str) -> None:
    """Each stage's rows from what the stage before it left, in float64 on decoded operands."""
    sizes = sizes_of(mma_type, 3, hidden=256, intermediate=256)
    made = case(sizes, "hostile")
    made.run(STAGED)
    for rank in range(3):
        views, routes = made.world.views(rank), routes_by_hand(made, rank)
        count = len(routes)
        assert count > 10
        expert, source, token, slot = (torch.tensor(column) for column in list(zip(*routes, strict=True))[:4])
        want_source = torch.stack([source, token, slot, expert], 1)
        assert torch.equal(views["row_source"][:count].long(), want_source)
        assert views["row_weight"][:count].tolist() == [route[4] for route in routes]
        per = made.world.layout.experts_per_rank
        ends = [0, *torch.bincount(expert, minlength=per).cumsum(0).tolist()]
        assert views["expert_offsets"].tolist() == ends
        assert views["runtime_tokens"].tolist() == list(TOKENS[:3])
        for name in ("x", "x_sf"):
            if (kept := views.get("l1_acts" if name == "x" else "l1_acts_sf")) is not None:
                picked = [getattr(made.held[r], name)[t] for r, t in zip(source, token, strict=True)]
                assert_bitwise_equal(kept[:count], torch.stack(picked), name)
        x = decoded(views["l1_acts"][:count], views.get("l1_acts_sf"), mma_type)
        gu = views["l1_out"][:count]
        l1, l2 = (weights64(made.held[rank], which, mma_type) for which in ("l1", "l2"))
        assert (
            calc_diff(gu, torch.stack([w @ row for row, w in zip(x, l1[expert], strict=True)])) < STAGE_BOUND
        )
        check_quantised(views, gu.double(), views["row_weight"][:count].double(), mma_type)
        a = decoded(views["l2_acts"][:count], views.get("l2_acts_sf"), mma_type)
        p = torch.stack([w @ row for row, w in zip(a, l2[expert], strict=True)])
        got = [made.world.view(r, "combine")[s, t] for r, t, s in zip(source, token, slot, strict=True)]
        assert calc_diff(torch.stack(got), p) < STAGE_BOUND


def decoded(values: Tensor, sf: Tensor | None, mma_type: str) -> Tensor:
    """float64 rows with their scales applied."""
    rows, columns = values.shape
    if sf is None:
        return values.double()
    gran = {"w8a8": columns, "fp8_block": 128, "fp8xfp4": 32}[mma_type]
    scales = sf[:rows].view(rows, -1)
    exact: Tensor = formulas.decode_e4m3(values) * formulas.spread(scales, rows, columns, 1, gran)
    return exact


def weights64(held: oracle.RankData, which: str, mma_type: str) -> Tensor:
    """float64 ``[experts, rows, K]`` of what a rank holds, untransformed."""
    values: Tensor = getattr(held, which)
    sf: Tensor | None = getattr(held, f"{which}_sf")
    if sf is None:
        return values.double()
    exact = formulas.decode_e2m1(values) if mma_type == "fp8xfp4" else formulas.decode_e4m3(values)
    if mma_type == "w8a8":
        return exact * sf.double()[..., None]
    grans = (1, 32) if mma_type == "fp8xfp4" else (128, 128)
    return exact * formulas.spread(sf, exact.shape[1], exact.shape[2], *grans)


def check_quantised(views: Any, gu: Tensor, weight: Tensor, mma_type: str) -> None:
    """l2_acts against the formula in float64: scales within 2 ulp, at most one FP8 byte in 1000 off, and then
    by one step."""
    gate, up = gu.chunk(2, 1)
    h = gate / (1 + torch.exp(-gate)) * up * weight[:, None]
    rows, columns = h.shape
    if mma_type == "bf16xbf16":
        assert calc_diff(views["l2_acts"][:rows], h) < STAGE_BOUND
        return
    gran = {"w8a8": columns, "fp8_block": 128, "fp8xfp4": 32}[mma_type]
    sf = h.view(rows, -1, gran).abs().amax(2).clamp(min=1e-4) / 448
    if mma_type != "w8a8":
        sf = torch.exp2(torch.ceil(torch.log2(sf)))
    stored = views["l2_acts_sf"][:rows].view(rows, -1)
    got = formulas.decode_ue8m0(stored) if mma_type == "fp8xfp4" else stored.double()
    assert ((got - sf).abs() <= 2 * 2.0**-23 * sf).all()
    exact = (h.view(rows, -1, gran) / sf[..., None]).view(rows, columns).clamp(-448, 448)
    nearest = exact.to(torch.float8_e4m3fn)
    bytes_got, bytes_want = (
        x.contiguous().view(torch.uint8).int() for x in (views["l2_acts"][:rows], nearest)
    )
    off = bytes_got != bytes_want
    assert off.sum() <= max(off.numel() // 1000, 1)
    # Neighbouring values are neighbouring bytes, but for the two zeros.
    assert ((bytes_got - bytes_want).abs()[off] == 1).all()


# Rows -------------------------------------------------------------------------------------------------------


@given(
    st.lists(
        st.tuples(
            st.sampled_from([-(2**50), -1, 0, 1, 2, 3, 4, 5, 2**40]), st.sampled_from([0.0, -0.0, 0.5])
        ),
        max_size=24,
    ),
    st.integers(0, 5),
    st.integers(0, 3),
    st.integers(0, 12),
)
def test_live_routes(slots: list[tuple[int, float]], first: int, number: int, count: int) -> None:
    slots = slots[: len(slots) // 2 * 2]
    idx = torch.tensor([slot[0] for slot in slots], dtype=torch.int64).view(-1, 2)
    weight = torch.tensor([slot[1] for slot in slots], dtype=torch.float32).view(-1, 2)
    count, experts = min(count, len(idx)), range(first, first + number)
    got = mega_rows.live_routes(idx, weight, count, experts)
    want = [
        [at // 2, at % 2, expert - first]
        for at, (expert, w) in enumerate(slots[: 2 * count])
        if expert in experts and w != 0
    ]
    assert got.dtype == torch.int32
    assert got.shape == (len(want), 3)
    assert got.tolist() == want


def test_slots_are_added_in_their_order_in_float32() -> None:
    """1 + 2^24 is 2^24 in float32, so the order shows; bfloat16 sums would lose 257."""
    combine = torch.tensor([[[1.0, 256.0]], [[2.0**24, 1.0]], [[-(2.0**24), 256.0]], [[math.nan, math.nan]]])
    idx, weight = torch.tensor([[0, 1, 2, -1]]), torch.ones(1, 4)
    got = mega_rows.combine_rows(combine.bfloat16(), idx, weight, 1, 3)
    assert got.tolist() == [[0.0, 512.0]]
    back = mega_rows.combine_rows(combine.bfloat16().flip(0), idx.flip(1), weight, 1, 3)
    assert back.tolist() == [[1.0, 512.0]]
    nothing = mega_rows.combine_rows(combine.bfloat16(), idx, torch.zeros(1, 4), 1, 3)
    assert nothing.tolist() == [[0.0, 0.0]]


def test_swiglu_at_its_ends() -> None:
    gu = torch.tensor([[-200.0, 0.0, 200.0, 8.0, 3.0, -3.0, 5.0, -9.0]])
    got = mega_rows.swiglu_rows(gu, torch.tensor([2.0]), math.inf)
    assert got[0, :3].tolist() == [-0.0, 0.0, 2000.0]
    assert got[0, 3] == pytest.approx(-9 * 2 * 8 / (1 + math.exp(-8)))
    clamped = mega_rows.swiglu_rows(gu, torch.tensor([2.0]), 4.0)
    assert clamped[0, 2] == pytest.approx(2 * 4 * 4 / (1 + math.exp(-4)))
    assert clamped[0, 3] == pytest.approx(2 * 4 * -4 / (1 + math.exp(-4)))


@pytest.mark.parametrize("mma_type", FORMATS)
def test_rows_of_no_number_stay_among_themselves(mma_type: str) -> None:
    fmt, held = FORMATS[mma_type], case(sizes_of(mma_type, 1)).held[0]
    pair = data.prepared(held, mma_type)
    h = torch.randn(4, 128)
    h[2, 5] = math.nan
    values, sf = mega_rows.quantise_rows(h, fmt)
    rows = mega_rows.l2_rows(values, sf, plain_weights(mma_type, "l2", pair[1], 0, 128, 128), fmt)
    assert rows[2].isnan().any()
    assert not rows[[0, 1, 3]].isnan().any()


# The backend, and worlds in one process ---------------------------------------------------------------------


def test_the_backend_has_mega_moe() -> None:
    assert BACKEND.supports(MegaMoe, "fp8_block_mega_moe").ok
    assert not BACKEND.supports(int, "fp8_block_mega_moe").ok


def test_a_stage_needs_the_one_before_it() -> None:
    made = case(sizes_of("fp8_block"))
    with pytest.raises(ArgumentError, match="stage is 'k2' and the last one to run was 'none'"):
        made.run(["k2"])
    made.run(["k1"])
    with pytest.raises(ArgumentError, match="stage is 'k3' and the last one to run was 'k1'"):
        made.run(["k3"])
    made.run(["fused"])
    with pytest.raises(ArgumentError, match="must be 'k1'"):
        made.run(["k2"])


def test_a_rank_that_fails_ends_the_run_of_all() -> None:
    made = case(sizes_of("fp8_block", 3))
    made.weights[1] = ((torch.zeros(0), None), (torch.zeros(0), None))
    with pytest.raises(ArgumentError, match="expert is 0; l1 holds 0"):
        made.run(["fused"])
