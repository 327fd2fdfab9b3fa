"""How Mega MoE's kernels wait for other ranks: with the exchange's own words, not for ever, and never where
the others wait for them."""

from __future__ import annotations

import math
import re
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch

from dg_core.backend import MegaMoe
from dg_core.backends.hip import mega
from dg_core.errors import CommError, CommTimeoutError, UnsupportedError
from dg_core.peers.direct import unpacked, words_of
from dg_core.symm import LOCAL_WORDS, OPS, Published
from dg_core.testing import assert_bitwise_equal
from dg_core.testing.mega.local import LocalExchange, LocalWorld

from . import hip_mega
from .hip_mega import OP, STAGED, Case, Cases, sizes_of
from .symm_ranks import together
from .test_hip_mega import same

cases = hip_mega.cases
PATHS = {"persistent": ("fused",), "staged": STAGED}


def blank(made: Case) -> list[torch.Tensor]:
    return [torch.full((len(held.x), 128), math.nan).bfloat16() for held in made.held]


def on_ranks(made: Case, work: Callable[[int, Any], object]) -> list[Any]:
    """``work(rank, what it has)`` in a thread for each rank: what each returned or raised."""
    return together(len(made.held), lambda rank: work(rank, made.world.ranks[rank]))


@pytest.mark.parametrize("path", PATHS)
def test_ranks_that_do_not_come(cases: Cases, path: str) -> None:
    """50: the call ends with an error that names rank, phase and generation; y is as it was, the late rank
    hears of it at once, and the process lives."""
    made = cases(sizes_of(3), tokens=(3, 4, 5), timeout_s=1.5)
    made.run(PATHS[path])
    ys = blank(made)
    errors = made.world.outcomes(PATHS[path], made.calls(ys), late={2: 2.5})
    for rank, error in enumerate(errors[:2]):
        assert type(error) is CommTimeoutError
        said = f"{OP}: rank [01] waited 1.5 s for rank 2 in phase 'dispatch', generation 2 "
        assert re.match(said, str(error)), error
        assert (error.rank, error.peer, error.generation) == (rank, 2, 2)
    assert type(errors[2]) is CommError
    assert "rank 2 came too late: the others gave up waiting" in str(errors[2])
    for own in made.world.ranks:  # what a device leaves for its host
        left = unpacked(int(own.stages._record))
        assert (left.cause, left.peer, left.phase, left.generation) == ("timeout", 2, "dispatch", 2)
    assert all(y.isnan().all() for y in ys)
    again = made.world.outcomes(PATHS[path], made.calls(ys))
    assert [str(error) for error in again] == [str(error) for error in errors]


def test_each_of_several_late_ranks_is_told_that_it_was_late(cases: Cases) -> None:
    made = cases(sizes_of(3), tokens=(3, 4, 5), timeout_s=0.5)
    errors = made.world.outcomes(("fused",), made.calls(blank(made)), late={1: 1.5, 2: 1.5})
    assert type(errors[0]) is CommTimeoutError
    for rank in (1, 2):
        assert f"rank {rank} came too late: the others gave up waiting" in str(errors[rank])


def test_a_rank_that_does_not_come_to_the_end(cases: Cases) -> None:
    made = cases(sizes_of(2), tokens=(3, 4), timeout_s=1.5)
    ys = blank(made)
    calls = made.calls(ys)
    made.world.run(("k1", "k2"), calls)

    def work(rank: int, own: Any) -> None:
        if rank == 0:
            own.stages.k3(calls[0])

    error = on_ranks(made, work)[0]
    assert type(error) is CommTimeoutError
    assert "rank 0 waited 1.5 s for rank 1 in phase 'combine', generation 1" in str(error)
    assert ys[0].isnan().all()


def test_later_kernels_of_a_call_that_ended_early_do_nothing(cases: Cases, on_hip: Any) -> None:
    made = cases(sizes_of(2), tokens=(3, 4), timeout_s=1.5)
    made.run(STAGED)
    own = made.world.ranks[0]
    calls = made.calls(blank(made))
    error = on_ranks(made, lambda rank, own: own.stages.k1(calls[0]) if rank == 0 else None)[0]
    assert type(error) is CommTimeoutError
    assert own.views["local"][LOCAL_WORDS.index("stop")] == 1
    before = own.scratch.clone(), own.memory.data.clone()
    told = own.stages._told(calls[0], route_inside=1, product_blocks=4, reduce_threads=128)
    for name in sorted(on_hip.kernels):
        if name.startswith("mega_") and name != "mega_open":
            own.stages._launch(name, 6, told, meet=True)
    assert torch.equal(own.scratch, before[0])
    assert torch.equal(own.memory.data, before[1])
    assert calls[0].y is not None
    assert calls[0].y.isnan().all()


def test_a_failure_of_another_rank_ends_a_wait_at_once(cases: Cases) -> None:
    made = cases(sizes_of(2), tokens=(3, 4))
    calls = made.calls(blank(made))

    def work(rank: int, own: Any) -> float:
        start = time.monotonic()
        if rank == 1:
            time.sleep(0.3)  # rank 0 waits by now
            own.exchange.abort(OP, "k2")
            return 0
        with pytest.raises(CommError, match="rank 1 failed in phase 'k2'"):
            own.stages.fused(calls[0])
        return time.monotonic() - start

    assert on_ranks(made, work)[0] < 2


@pytest.mark.parametrize("path", PATHS)
def test_blocks_that_cannot_all_be_resident(
    cases: Cases, path: str, on_hip: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """50: something else holds the places of blocks that meet. After a limit of its own the launch ends with
    an error on every rank, y is as it was, and blocks that start late do nothing."""
    made = cases(sizes_of(1), tokens=(5,))
    made.run(PATHS[path])
    real = on_hip.launch
    monkeypatch.setattr(on_hip, "launch", lambda *a, **rest: real(*a, **{**rest, "resident": 2}))
    own = made.world.ranks[0]
    own.stages._fixed["meet_seconds"] = 0.3
    made.prebuild = "asm"  # K1 finds its routes, and its blocks meet
    ys = blank(made)
    (error,) = made.world.outcomes(PATHS[path], made.calls(ys))
    assert type(error) is CommError
    assert "rank 0 failed in phase 'barrier', generation 2" in str(error)
    assert ys[0].isnan().all()


@pytest.mark.parametrize("resident", [1, 4])
def test_products_wait_for_no_rank(cases: Cases, resident: int) -> None:
    """10: rank 1 begins its third stage when rank 0's rows have come and rank 0 has said so; if a block that
    multiplies waited for rank 1, they would wait for each other."""
    made = cases(sizes_of(2), "hostile", (20, 9))
    want = made.run(STAGED)
    ys = blank(made)
    calls = made.calls(ys)
    made.world.run(("k1", "k2"), calls)

    def work(rank: int, own: Any) -> None:
        own.stages.resident = resident
        limit = time.monotonic() + 10
        while rank == 1 and own.views["done"][0] != own.exchange.generation:
            assert time.monotonic() < limit
            time.sleep(0.001)
        own.stages.k3(calls[rank])

    assert on_ranks(made, work) == [None, None]
    same(ys, want)


@pytest.mark.parametrize("compare", [True, False])
def test_ranks_on_different_paths(cases: Cases, compare: bool) -> None:
    """48: the paths keep to the same words, so such ranks understand each other; where it is asked for, they
    are told instead, and no y is written."""
    made = cases(sizes_of(3), "hostile", (4, 13, 0), check_uniform=compare)
    want = made.run()
    ys = blank(made)
    calls = [made.calls(ys, path="staged" if rank == 1 else "persistent")[rank] for rank in range(3)]

    def work(rank: int, own: Any) -> None:
        for stage in PATHS[("persistent", "staged")[rank == 1]]:
            getattr(own.stages, stage)(calls[rank])

    outcomes = on_ranks(made, work)
    if not compare:
        assert outcomes == [None] * 3
        same(ys, want)
        return
    for error in outcomes:
        assert type(error) is CommError
        assert str(error) == (
            f"{OP}: rank 0 runs {OP} on the persistent path (4 tokens, dispatch_num_tokens not given), rank "
            f"1 runs {OP} on the staged path (13 tokens, dispatch_num_tokens not given); give all ranks the "
            "same dispatch_num_tokens (DG_COMM_CHECK_UNIFORM)"
        )
    assert all(y.isnan().all() for y in ys)


def test_kernels_and_the_exchange_count_together(cases: Cases) -> None:
    """Barriers and calls of the exchange itself between launches: one generation, one set of words."""
    made = cases(sizes_of(2), "hostile")
    want = made.run()

    def between(rank: int, own: Any) -> int:
        own.exchange.barrier(OP)
        told = own.exchange.begin(OP, Published(0, 7 + rank, 0, -1, OPS.index(OP), 0))
        own.exchange.finish(OP)
        assert [words.num_tokens for words in told] == [7, 8]
        assert [words.generation for words in told] == [own.exchange.generation] * 2
        return int(own.exchange.generation)

    for turn in range(3):
        assert on_ranks(made, between) == [3 * (turn + 1)] * 2  # a launch and two of the exchange
        same(made.run((("fused",), STAGED)[turn % 2]), want)


@pytest.mark.parametrize(("start", "end"), [(2**31 - 3, -(2**31) + 3), (-3, 3)])
def test_generations_pass_the_end_of_32_bits(cases: Cases, start: int, end: int) -> None:
    made = cases(sizes_of(2), "hostile", timeout_s=5)
    want = made.run()
    for own in made.world.ranks:
        own.exchange.generation = start
        for name in ("arrive", "done"):
            own.views[name].fill_(start)
    for turn in range(6):
        same(made.run((("fused",), STAGED)[turn % 2]), want)
    for own in made.world.ranks:
        assert own.exchange.generation == end
        assert own.views["done"].tolist() == own.views["arrive"].tolist() == [end] * 2
        # Two rows in turn, so that a slower rank can still read those of the call before.
        assert [int(own.views["published"][number & 1, 0]) for number in (end - 1, end)] == [end - 1, end]


def test_inputs_may_be_rewritten_as_soon_as_a_call_is_done(cases: Cases) -> None:
    """25: each rank overwrites its inputs when its own call is done, whatever the others still do."""
    made = cases(sizes_of(3), "hostile", (9, 2, 30))
    want = made.run()

    def work(rank: int, own: Any) -> None:
        for turn in range(6):
            hip_mega.load(made.world, rank, made.held[rank])
            y = torch.full_like(want[rank], math.nan)
            call = made.calls([y] * 3)[rank]
            for stage in (("fused",), STAGED)[turn % 2]:
                getattr(own.stages, stage)(call)
            own.views["x"].view(torch.uint8).fill_(127)
            own.views["topk_idx"].fill_(0)
            own.views["topk_weights"].fill_(math.nan)
            assert_bitwise_equal(y, want[rank], f"turn {turn}")

    assert on_ranks(made, work) == [None] * 3


def test_addresses_of_peers_stand_in_control_memory(cases: Cases) -> None:
    made = cases(sizes_of(3))
    for own in made.world.ranks:
        for name, addresses, memory in zip(
            ("peer_data", "peer_control"),
            own.memory.pointers,
            (own.memory.peer_data, own.memory.peer_control),
            strict=True,
        ):
            assert list(addresses) == [memory(rank).data_ptr() for rank in range(3)]
            assert list(words_of(own.memory.control, made.world.layout[name])) == list(addresses)


def test_memory_without_addresses_is_refused(cases: Cases, on_hip: Any) -> None:
    made = cases(sizes_of(2))
    other = LocalWorld(made.world.layout)
    problem = MegaMoe(OP, "w8a8", 0, made.world.layout)
    with pytest.raises(UnsupportedError, match=r"provider 'local' .* does not give; use posix-shm"):
        mega.stages(problem, LocalExchange(other, 0), other.views(0), on_hip)
