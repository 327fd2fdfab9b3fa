"""Faults that are on record for the public DCU kernels, by the numbers that they have in docs/dcu.md: none of
them is possible on the hip backend. Those that need processes are cases of ``mega_cases``; speed is not
tested here."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

import dg_core
from dg_core.mega.graph import RecordedGraph
from dg_core.symm import LOCAL_WORDS
from dg_core.testing import assert_bitwise_equal, calc_diff
from dg_core.testing.mega import data, oracle

from . import hip_mega
from .hip_mega import STAGED, Case, Cases, launches, load, sizes_of
from .test_hip_mega import same
from .test_reference_mega import routes_by_hand

cases = hip_mega.cases
PATHS = {"persistent": ("fused",), "staged": STAGED}


def poison(made: Case) -> None:
    """Scratch and counters as an earlier call with other sizes, or one that ended early, may leave them:
    every flag says that its rows are ready, and every counter that all work is taken."""
    for rank in made.world.ranks:
        rank.scratch.view(torch.int32)[: 2**16].fill_(1)
        rank.views["l2_acts_sf"].view(torch.int32).fill_(1)
        for name in ("l1_items", "l2_items", "finished", "stop"):
            rank.views["local"][LOCAL_WORDS.index(name)] = 99


# Routes and room --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("prebuild", ["compact", "asm"])
@pytest.mark.parametrize("path", PATHS)
def test_room_follows_from_no_rank_s_own_count(cases: Cases, path: str, prebuild: str) -> None:
    """14, 15, 16, 48: a rank with one token, or none, serves all routes of its busy peers; so no expert's
    rows are cut, the last one's neither."""
    for routes, tokens in (("crowd", (140, 1, 0)), ("plain", (0, 133, 0))):
        made = cases(sizes_of(3, num_experts=6), routes, tokens)
        made.prebuild = prebuild
        made.check(made.run(PATHS[path]))
        rows = sum(int(made.world.view(rank, "expert_offsets")[-1]) for rank in range(3))
        assert rows == sum(tokens) * 3


def test_a_route_of_weight_zero_costs_no_row(cases: Cases) -> None:
    """43: it is neither counted nor given a row, and stays out of the statistics."""
    made = cases(sizes_of(2), "plain", (20, 9))
    for rank, held in enumerate(made.held):
        held.topk_weights[::2] = 0.0
        held.topk_weights[1::4, 1] = -0.0
        load(made.world, rank, held)
    any_made: Any = made
    want = [len(routes_by_hand(any_made, rank)) for rank in range(2)]
    for path in PATHS.values():
        stats = [torch.zeros(4, dtype=torch.int32) for _ in range(2)]
        made.check(made.run(path, stats=stats))
        assert [int(made.world.view(rank, "expert_offsets")[-1]) for rank in range(2)] == want
        assert [int(count.sum()) for count in stats] == want


@pytest.mark.parametrize("path", PATHS)
def test_rows_of_slots_that_are_dropped_now_add_nothing(cases: Cases, path: str) -> None:
    """44: served before and dropped now, by an id or by weight 0; and nobody stores a row for them."""
    made = cases(sizes_of(2), "plain", (12, 7))
    made.run(PATHS[path])
    for rank, held in enumerate(made.held):
        held.topk_idx[:, 0] = torch.tensor([-1, 8, -(2**63), 2**63 - 1])[torch.arange(len(held.x)) % 4]
        held.topk_weights[::2, 1] = 0.0
        load(made.world, rank, held)
    ys = [torch.full((len(held.x), 128), math.nan).bfloat16() for held in made.held]
    made.world.run(PATHS[path], made.calls(ys))
    made.check(ys)
    made.check(made.run(PATHS[path]))  # which has NaN there
    for rank, held in enumerate(made.held):
        combine = made.world.view(rank, "combine")[:, : len(held.x)].transpose(0, 1)
        dropped = ~oracle.live(held.topk_idx, held.topk_weights, 8)
        assert dropped.sum() > len(held.x)
        assert combine[dropped].isnan().all()
        assert not combine[~dropped].isnan().any()
        held.topk_idx.fill_(-1)
        load(made.world, rank, held)
    for y in made.run(PATHS[path]):
        assert_bitwise_equal(y, torch.zeros_like(y))


@pytest.mark.parametrize("path", PATHS)
def test_rows_beyond_those_in_use_are_left_alone(cases: Cases, path: str) -> None:
    """17, 32: K2 and the products work on the rows that there are, not on the room."""
    made = cases(sizes_of(2), "hostile", (12, 7))
    made.run(PATHS[path])
    for rank in range(2):
        views = made.world.ranks[rank].views
        count = int(views["expert_offsets"][-1])
        assert count < 19 * 3
        behind = views["l2_acts"].view(torch.uint8)[count : 19 * 3]
        assert (behind == 255).all()


def test_more_ranks_and_more_experts_than_tables_were_made_for(cases: Cases) -> None:
    """12, 13: words, signals and addresses for 12 ranks; 16 experts a rank found inside K1."""
    made = cases(sizes_of(12, num_experts=12), "hostile", (3, 0, 5))
    fused = made.run()
    made.check(fused)
    same(made.run(STAGED), fused)
    made = cases(sizes_of(2, num_experts=32), "hostile", (40, 21))
    made.prebuild = "asm_route"
    made.check(made.run(STAGED))


@pytest.mark.parametrize("path", PATHS)
def test_a_weight_that_is_no_number_shows_in_its_token_alone(cases: Cases, path: str) -> None:
    made = cases(sizes_of(2))
    made.world.view(0, "topk_weights")[3, 1] = math.nan
    y = made.run(PATHS[path])[0]
    assert y[3].isnan().all()
    assert not torch.cat([y[:3], y[4:]]).isnan().any()


# One meaning of both paths ----------------------------------------------------------------------------------


def test_clamps_are_those_of_both_paths(cases: Cases) -> None:
    """33, 45: gate is held from above only, up on both sides, on either path."""
    made = cases(sizes_of(2), "hostile")
    wide = made.run()
    narrow = made.run(clamp=0.5)
    made.check(narrow, 0.5)
    assert max(calc_diff(a, b) for a, b in zip(wide, narrow, strict=True) if len(a)) > 1e-2
    same(made.run(STAGED, clamp=0.5), narrow)
    # Gates far below -c: a clamp on both sides would leave silu(-c), which is no small number.
    views = made.world.ranks[0].views
    count = int(views["expert_offsets"][-1])
    views["l1_out"][:count, :128], views["l1_out"][:count, 128:] = -30.0, 1.0
    made.world.ranks[0].stages.k2(made.calls([None, None], clamp=0.5)[0])
    assert torch.equal(views["l2_acts_sf"][:count], torch.full((count,), 1e-4) * (1 / 448))


@pytest.mark.parametrize("path", PATHS)
def test_the_floor_is_one_of_the_largest_value(cases: Cases, path: str) -> None:
    """45: rows of tiny numbers have the scale 1e-4 / 448, not 1e-4."""
    made = cases(sizes_of(1), tokens=(6,))
    assert made.held[0].x_sf is not None
    made.held[0].x_sf[3:] = 1e-9
    load(made.world, 0, made.held[0])
    made.check(made.run(PATHS[path]))
    views = made.world.ranks[0].views
    rows = views["row_source"][: int(views["expert_offsets"][-1])]
    scales = views["l2_acts_sf"][: len(rows)]
    floor = torch.tensor(1e-4) * (1 / 448)
    assert (scales[rows[:, 1] >= 3] == floor).all()
    assert (scales[rows[:, 1] < 3] > floor).all()


# Graphs and counters ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", PATHS)
def test_a_graph_reads_its_number_of_tokens_when_it_runs(cases: Cases, path: str) -> None:
    """8, 9, 17, 22, 24: replays with any scalar and with what other calls have left in flags and counters;
    rows past the scalar stay as they were."""
    made = cases(sizes_of(2), "hostile", (20, 20))
    want = made.run()
    for scalars in ((20, 20), (7, 0), (-3, 12), (0, 0), (99, 1)):
        poison(made)
        for rank, scalar in enumerate(scalars):
            made.world.view(rank, "cuda_graph_num_tokens").fill_(scalar)
        ys = [torch.full((24, 128), math.nan).bfloat16() for _ in scalars]
        made.world.run(PATHS[path], made.calls(ys, path=path, graph=True))
        counts = [min(max(scalar, 0), 20) for scalar in scalars]
        for y, whole, count in zip(ys, want, counts, strict=True):
            assert_bitwise_equal(y[:count], whole[:count])
            assert y[count:].isnan().all()
        assert made.world.view(0, "runtime_tokens").tolist() == counts


def test_calls_leave_nothing_behind_that_counts(cases: Cases) -> None:
    """8, 9, 46: both paths, both ways to find routes, with and without the tail, in turn, and each after what
    the others left and after what none of them would."""
    made = cases(sizes_of(2), "hostile")
    want = made.run()
    for turn in range(8):
        made.prebuild = ("compact", "asm")[turn % 2]
        if turn > 3:
            poison(made)
        same(made.run(STAGED, tail_reduce=turn % 3 != 0), want, f"turn {turn}")
        same(made.run(), want, f"turn {turn}")


def test_a_replay_does_not_read_what_an_eager_call_was_told(on_hip: Any) -> None:
    """47: an eager call with other weights, tokens and y lies between two replays."""
    sizes = sizes_of(1)
    buf = dg_core.get_symm_buffer_for_mega_moe(None, 8, 40, 3, 128, 128, mma_type="w8a8", device="cpu")
    first, second = (data.rank_data(seed, 0, sizes, 30, "plain") for seed in (1, 2))
    for big in (False, True):
        replayed, other = (torch.full((40, 128), math.nan).bfloat16() for _ in range(2))
        graph = RecordedGraph()
        with graph:
            dg_core.fp8_w8a8_mega_moe(
                replayed, *data.prepared(first, "w8a8"), buf, big_fused_cuda_graph=big,
                stages_fused_cuda_graph=not big,
            )  # fmt: skip
        for turn in range(2):
            for held, run in ((first, graph.replay), (second, None)):
                for name in ("x", "x_sf", "topk_idx", "topk_weights"):
                    getattr(buf, name)[:30].copy_(getattr(held, name))
                buf.cuda_graph_num_tokens.fill_(30)
                if run is not None:
                    run()
                    continue
                weights = data.prepared(second, "w8a8")
                dg_core.fp8_w8a8_mega_moe(other[:30], *weights, buf, dispatch_num_tokens=turn * 384)
        oracle.check(replayed[:30], oracle.expected([first], "w8a8")[0])
        oracle.check(other[:30], oracle.expected([second], "w8a8")[0])
        assert replayed[30:].isnan().all()
    buf.destroy()


@pytest.mark.parametrize(("requested", "reducers"), [(2048, 64), (2049, 128)])
def test_reducers_are_counted_from_what_was_asked_for(on_hip: Any, requested: int, reducers: int) -> None:
    """49: 2048 tokens a rank are room for 2304, and still 64 reducers."""
    buf = dg_core.get_symm_buffer_for_mega_moe(None, 4, requested, 1, 128, 128, mma_type="w8a8", device="cpu")
    assert buf.num_max_tokens_per_rank == 2304
    held = data.rank_data(3, 0, data.Sizes("w8a8", 1, 4, 1, 128), 5)
    for name in ("x", "x_sf", "topk_idx", "topk_weights"):
        getattr(buf, name)[:5].copy_(getattr(held, name))
    y = torch.empty(5, 128, dtype=torch.bfloat16)
    with launches(on_hip) as seen:
        dg_core.fp8_w8a8_mega_moe(y, *data.prepared(held, "w8a8"), buf, dispatch_num_tokens=2048)
    assert seen[-1] == ("mega_k3_l2_combine", 4 + reducers)
    oracle.check(y, oracle.expected([held], "w8a8")[0])
    buf.destroy()
