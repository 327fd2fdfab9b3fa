"""What ranks hear when one of them is not there, fails, or cannot be reached, and what is left afterwards.

Ranks are threads that share a store; ``symm_ranks`` has what needs processes.
"""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.distributed import HashStore  # type: ignore[attr-defined]

from dg_core import symm
from dg_core.errors import CommError, CommTimeoutError, DGError, PeerLostError
from dg_core.peers import direct, posix_shm
from dg_core.peers.line import Line, StoreSilent
from dg_core.peers.meeting import Meeting
from dg_core.peers.waiting import ENDED_BY, Record

from .symm_ranks import CPU, call, check, fill, layout_for, settings, together, words

OP = "fp8_block_mega_moe"


@pytest.fixture(autouse=True)
def shm(tmp_path: Path, environment: Callable[..., None]) -> Path:
    """A folder of the test's own for shared memory."""
    folder = tmp_path / "shm"
    folder.mkdir()
    environment(DG_SHM_DIR=str(folder))
    return folder


def world(
    ranks: int, provider: str, work: Callable[[int, Any, Any], Any], timeout_s: float = 20,
    store: Any = None, checks: tuple[int, ...] = (),
) -> list[Any]:  # fmt: skip
    """``work(rank, memory, exchange)`` on threads; the ranks ``checks`` have DG_COMM_CHECK_UNIFORM."""
    store, layout = HashStore() if store is None else store, layout_for(ranks)

    def rank(me: int) -> Any:
        meeting, chosen = Meeting.over(store, me, ranks, timeout_s), settings(timeout_s, me in checks)
        memory, exchange = symm.connect(OP, layout, CPU, meeting, chosen, provider)
        try:
            return work(me, memory, exchange)
        finally:
            exchange.close()

    return together(ranks, rank)


def values(me: int, memory: Any, exchange: symm.Exchange) -> int:
    """A call that gives the right rows."""
    layout = layout_for(exchange.ranks)
    fill(layout, me, memory.data, 9)
    call(exchange, layout, 9)
    check(layout, memory.data, 9)
    return me


def raised(work: Callable[[], Any], within: float = 1.5) -> CommError:
    begun = time.monotonic()
    with pytest.raises(CommError) as caught:
        work()
    waited = time.monotonic() - begun
    assert waited < within, waited
    return caught.value


# Attempts ---------------------------------------------------------------------------------------------------


def attempt(store: Any, ranks: int, me: int, work: Callable[[], Any] = int) -> Any:
    try:
        return Meeting.over(store, me, ranks, 0.4).step("agree", work)
    except CommError as error:
        return type(error)


def _refuse() -> None:
    raise ValueError("no")


@pytest.mark.parametrize("first", [(0, 1), (2,)], ids=["the others first", "the late rank first"])
@pytest.mark.parametrize("missed", [1, 3])
@pytest.mark.parametrize("failing", [False, True], ids=["in time", "by an error"])
def test_a_rank_that_missed_attempts_is_level_when_all_try_again(
    failing: bool, missed: int, first: tuple[int, ...]
) -> None:
    """Rank 2 misses some; then all try together, once more than one wait of the others for it takes."""
    store, outcomes = HashStore(), []
    for _ in range(missed):
        gone = together(2, partial(attempt, store, 3, work=_refuse if failing else int))
        assert set(gone) <= {CommError, CommTimeoutError}

    def late(me: int) -> Any:
        time.sleep(0.0 if me in first else 0.1)
        return attempt(store, 3, me)

    for _ in range(missed + 3 if failing else 3):
        outcomes.append(together(3, late))
    good = [[[0, 0, 0]] * 3] * 2
    assert outcomes[-2:] == good, outcomes
    assert failing or outcomes[1:] == good, outcomes


def test_an_attempt_that_ended_for_another_reason_is_heard_of_by_who_comes_later() -> None:
    """Programs whose ranks fail and try again without waiting for each other stay in step."""
    store = HashStore()
    assert attempt(store, 2, 0, _refuse) is CommError

    def rank(me: int) -> list[Any]:
        return [attempt(store, 2, me) for _ in range(2 - (me == 0))]

    assert together(2, rank) == [[[0, 0]], [CommError, [0, 0]]]


# A store that does not answer -------------------------------------------------------------------------------


class Stopped:
    """A store whose host can be stopped: calls wait until it goes on."""

    def __init__(self) -> None:
        self.store, self.runs = HashStore(), threading.Event()
        self.runs.set()

    def __getattr__(self, name: str) -> Any:
        function = getattr(self.store, name)

        def asked(*arguments: Any) -> Any:
            self.runs.wait(30)
            return function(*arguments)

        return asked


def test_no_call_waits_for_a_stopped_store_past_its_limit() -> None:
    stopped = Stopped()
    meetings = together(2, lambda me: Meeting.over(stopped, me, 2, 0.5))  # type: ignore[arg-type]
    stopped.runs.clear()
    try:
        said = raised(lambda: meetings[0].step("map", int), within=2.5)
        assert type(said) is CommTimeoutError
        assert "rank 0 waited 0.5 s for an answer of the group's store in phase 'map'" in str(said)
        assert "not seen there: rank 1" in str(said)
        assert raised(lambda: meetings[0].step("zero", int), within=0.3) is said
        late = raised(lambda: Meeting.over(stopped, 1, 2, 0.5), within=2.5)  # type: ignore[arg-type]
        assert type(late) is CommTimeoutError
        line = Line(stopped, 0.1)  # type: ignore[arg-type]
        with pytest.raises(StoreSilent):
            line.check("key")
        begun = time.monotonic()
        with pytest.raises(StoreSilent):  # it is not asked twice
            line.check("key")
        assert time.monotonic() - begun < 0.1
    finally:
        stopped.runs.set()


@pytest.mark.parametrize("provider", ["posix-shm", "all-to-all"])
def test_an_exchange_is_closed_and_ended_without_an_answer_of_the_store(provider: str) -> None:
    stopped, gate = Stopped(), threading.Barrier(2)

    def work(me: int, memory: Any, exchange: symm.Exchange) -> Any:
        assert values(me, memory, exchange) == me
        gate.wait(10)
        if me == 0:
            stopped.runs.clear()
        gate.wait(10)
        if me == 0:
            begun = time.monotonic()
            with pytest.raises(CommTimeoutError):
                exchange.begin(OP, words(1))
            exchange.abort(OP, "k1")
            assert time.monotonic() - begun < 3.5
        begun = time.monotonic()
        exchange.close()
        assert time.monotonic() - begun < 0.5  # not even for the first time
        return me

    try:
        assert world(2, provider, work, timeout_s=0.6, store=stopped) == [0, 1]
    finally:
        stopped.runs.set()


def test_a_line_hands_on_what_the_store_raises_and_its_thread_ends_with_it() -> None:
    class Broken:
        def check(self, keys: list[str]) -> bool:
            raise RuntimeError("connection reset")

    before = threading.active_count()
    line = Line(Broken(), 5)  # type: ignore[arg-type]
    with pytest.raises(RuntimeError, match="connection reset"):
        line.check("key")
    del line
    deadline = time.monotonic() + 5
    while threading.active_count() > before and time.monotonic() < deadline:
        time.sleep(0.01)
    assert threading.active_count() <= before


# Rows that do not come --------------------------------------------------------------------------------------


def test_a_rank_that_does_not_enter_the_collective_is_named() -> None:
    gate = threading.Barrier(3)

    def work(me: int, memory: Any, exchange: symm.Exchange) -> Any:
        fill(layout_for(3), me, memory.data, 9)
        exchange.begin(OP, words(9))
        error = None if me == 1 else raised(exchange.fetch, within=3)
        gate.wait(10)
        return error or raised(exchange.check)

    outcomes = world(3, "all-to-all", work, timeout_s=0.6)
    for me in (0, 2):
        assert type(outcomes[me]) is CommTimeoutError, outcomes[me]
        assert "waited 0.6 s for rank 1 in phase 'dispatch', generation 1" in str(outcomes[me])
        assert outcomes[me].peer == 1
    assert "rank 1 came too late" in str(outcomes[1])


def test_a_rank_of_another_host_whose_connections_close_is_named_at_the_limit() -> None:
    """Its process cannot be looked after, so what is known is that it does not answer any more."""
    gate = threading.Barrier(3)

    def work(me: int, memory: Any, exchange: symm.Exchange) -> Any:
        fill(layout_for(3), me, memory.data, 9)
        exchange.begin(OP, words(9))
        error = None
        if me == 2:
            memory.group = None  # as if it had been killed
        else:
            error = raised(exchange.fetch, within=4)
        gate.wait(10)
        return error

    for me, error in enumerate(world(3, "all-to-all", work, timeout_s=1)[:2]):
        assert type(error) is CommTimeoutError, error
        assert "for rank 2 in phase 'dispatch'" in str(error), (me, error)
        assert error.peer == 2


class Nothing:
    """A group whose rows never come, or which fails at once."""

    def __init__(self, error: str = "") -> None:
        self.error = error

    def alltoall_base(self, *_: Any) -> Any:
        if self.error:
            raise RuntimeError(self.error)
        return SimpleNamespace(is_completed=lambda: False)


@pytest.mark.parametrize("broken", ["", "connection reset"])
def test_where_all_ranks_are_there_no_rank_is_blamed(broken: str) -> None:
    def work(me: int, memory: Any, exchange: symm.Exchange) -> Any:
        exchange.begin(OP, words(0))
        memory.group = Nothing(broken)
        return raised(exchange.fetch, within=3)

    for error in world(2, "all-to-all", work, timeout_s=1):
        assert type(error) is (CommError if broken else CommTimeoutError), error
        assert error.peer == -1
        assert broken in str(error)
        assert "there" in str(error)


def test_a_rank_that_fails_before_the_collective_ends_it_at_once_and_a_new_exchange_works() -> None:
    store = HashStore()

    def work(me: int, memory: Any, exchange: symm.Exchange) -> Any:
        fill(layout_for(3), me, memory.data, 9)
        exchange.begin(OP, words(9))
        if me == 1:
            exchange.abort(OP, "dispatch")
            return None
        return raised(exchange.fetch)

    outcomes = world(3, "all-to-all", work, store=store)
    assert ["rank 1 failed in phase 'dispatch'" in str(error) for error in outcomes] == [True, False, True]
    assert world(3, "all-to-all", values, store=store) == [0, 1, 2]


def test_a_rank_that_is_lost_while_the_group_is_made_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait()
    real = Meeting.know

    def know(self: Meeting, facts: Any) -> None:
        real(self, [replace(one, pid=ended.pid) if one.rank == 1 else one for one in facts])

    monkeypatch.setattr(Meeting, "know", know)
    step = Meeting.step

    def taken(self: Meeting, name: str, work: Any, **more: Any) -> Any:
        if name == "map" and self.rank == 1:
            raise SystemError("killed")
        return step(self, name, work, **more)

    monkeypatch.setattr(Meeting, "step", taken)
    begun = time.monotonic()
    outcomes = world(2, "all-to-all", values, timeout_s=10)
    assert type(outcomes[0]) is PeerLostError, outcomes
    assert time.monotonic() - begun < 3


# Words ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("provider", ["posix-shm", "all-to-all"])
@pytest.mark.parametrize("checks", [(0,), (2,), (0, 1, 2)])
def test_a_rank_that_compares_paths_tells_those_that_do_not(provider: str, checks: tuple[int, ...]) -> None:
    def work(me: int, memory: Any, exchange: symm.Exchange) -> Any:
        def both() -> None:
            exchange.begin(OP, words(me, path=int(me == 1)))
            exchange.fetch()
            exchange.finish(OP)

        return raised(both)

    outcomes = world(3, provider, work, timeout_s=10, checks=checks)
    assert {type(error) for error in outcomes} == {CommError}
    assert len({str(error) for error in outcomes}) == 1, outcomes
    assert f"{OP}: rank 0 runs {OP} on the persistent path (0 tokens" in str(outcomes[0])
    assert f"rank 1 runs {OP} on the staged path" in str(outcomes[0])


def test_a_record_fits_a_word_that_is_not_zero_in_its_first_half() -> None:
    for cause in ENDED_BY[1:]:
        for rank, peer in ((0, 71), (71, 0)):
            for phase in symm.PHASES:
                for generation in (0, 1, 2**31 - 1, -(2**31), -1):
                    record = Record(cause, rank, peer, phase, generation)
                    assert direct.unpacked(direct.packed(record)) == record
                    assert torch.tensor([direct.packed(record)]).view(torch.int32)[0] != 0
    assert direct.unpacked(direct.packed(Record("lost", 1, 2, "k3", 2**33 + 5))).generation == 5


class Words:
    """One abort word; something happens between the look at it and the store, or it is out of reach."""

    def __init__(self, word: Any, meanwhile: Callable[[], object]) -> None:
        self.word, self.meanwhile = word, meanwhile

    def __getitem__(self, at: int) -> int:
        return int(self.word[at])

    def __setitem__(self, at: int, value: int) -> None:
        self.meanwhile()
        self.word[at] = value


def exchanges(ranks: int, close: Callable[[], None] = lambda: None) -> list[Any]:
    layout = layout_for(ranks)
    sizes = (layout.data_bytes, layout.control_bytes)
    data, control = ([torch.zeros(size, dtype=torch.int8) for _ in range(ranks)] for size in sizes)
    memory: Any = SimpleNamespace(
        name="fake", pointers=((), ()), peer_data=data.__getitem__, peer_control=control.__getitem__,
        close=close,
    )  # fmt: skip
    facts = [symm.local_facts(CPU, r) for r in range(ranks)]
    return [
        direct.exchange(memory, layout, SimpleNamespace(rank=r), facts, settings(2), "")  # type: ignore[arg-type]
        for r in range(ranks)
    ]


def test_of_two_ranks_that_end_an_exchange_at_once_one_is_heard() -> None:
    ranks = exchanges(4)
    other = Record("failed", 1, 1, "k1", 7)
    ranks[0]._abort[3] = Words(ranks[0]._abort[3], lambda: ranks[1]._end(other, OP))
    ranks[0]._end(Record("timeout", 0, 2, "combine", 9), OP, [2])
    heard = str(raised(ranks[3].check))
    assert heard.partition(": ")[2] in (
        "rank 1 failed in phase 'k1', generation 7",
        "rank 0 waited 2 s for rank 2 in phase 'combine', generation 9 (DG_COMM_TIMEOUT_S)",
    )


class Error:
    """A word of a device in error."""

    def __getitem__(self, at: int) -> int:
        raise RuntimeError("CUDA error: device-side assert triggered")

    def __setitem__(self, at: int, value: int) -> None:
        raise RuntimeError("CUDA error: device-side assert triggered")


def test_abort_and_close_go_on_where_words_cannot_be_reached() -> None:
    closed: list[int] = []
    ranks = exchanges(3, lambda: closed.append(1))
    ranks[0]._abort[0] = ranks[0]._abort[1] = Error()
    ranks[0].abort(OP, "k2")
    assert "rank 0 failed in phase 'k2'" in str(ranks[0].failure)
    assert "rank 0 failed in phase 'k2'" in str(raised(ranks[2].check))  # the words of others are written
    ranks[0].close()
    ranks[1]._abort[1] = Error()
    ranks[1].close()
    ranks[1].close()
    assert closed == [1, 1]


def test_close_tells_of_memory_that_cannot_be_given_back_unless_there_is_worse_to_tell() -> None:
    def refuse() -> None:
        raise DGError("cuMemFree_v2: error 700")

    ranks = exchanges(2, refuse)
    with pytest.raises(DGError, match="error 700"):
        ranks[0].close()
    ranks[0].close()
    ranks[1].abort(OP, "k1")
    ranks[1].close()
    assert "rank 1 failed" in str(ranks[1].failure)


# Files ------------------------------------------------------------------------------------------------------


def test_files_of_a_rank_that_is_killed_go_with_the_others(shm: Path) -> None:
    theirs = [shm / "dg_core-killed-data", shm / "dg_core-killed-control"]

    class Two:
        rank, ranks = 0, 2

        def step(self, name: str, work: Callable[[], Any]) -> list[Any]:
            if name == "map":
                raise PeerLostError("rank 1 is gone")
            own = work()
            for path in theirs:
                path.touch()
            return [own, [str(path) for path in theirs]]

    with pytest.raises(PeerLostError):
        posix_shm.PROVIDER.allocate(256, 256, CPU, Two())  # type: ignore[arg-type]
    assert list(shm.iterdir()) == []


def test_files_of_processes_that_ended_go_when_memory_is_made_and_no_others(shm: Path) -> None:
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait()
    own = symm.local_facts(CPU)
    dead, reused = replace(own, pid=ended.pid), replace(own, start_ticks=own.start_ticks - 1)
    far = replace(dead, host="another container")
    kept = {
        posix_shm._name(own) + "12",
        posix_shm._name(far) + "34",
        "somebody's",
        f"dg_core-x-{ended.pid}-1",
    }
    kept.add(posix_shm._name(dead).replace(f"-{os.getuid()}-", f"-{os.getuid() + 1}-") + "56")
    for name in (*kept, posix_shm._name(dead) + "78", posix_shm._name(reused) + "9a"):
        (shm / name).touch()
    memory = posix_shm.PROVIDER.allocate(256, 256, CPU, Meeting.alone())
    assert {path.name for path in shm.iterdir()} == kept
    memory.close()
