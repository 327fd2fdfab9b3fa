"""Calls on shared memory: values, the words that ranks wait for, and what they say when one is gone.

The ranks are threads of one process, which share a store; ``symm_ranks`` runs the same calls in processes.
"""

from __future__ import annotations

import errno
import os
import re
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed import HashStore  # type: ignore[attr-defined]

from dg_core import symm
from dg_core.errors import ArgumentError, CommError, CommTimeoutError
from dg_core.peers import all_to_all, direct
from dg_core.peers.direct import DirectExchange, words_of
from dg_core.peers.meeting import Meeting
from dg_core.symm import LOCAL_WORDS, Published

from .symm_ranks import CPU, call, check, fill, layout_for, settings, together, words

OP = "fp8_block_mega_moe"


@pytest.fixture
def shm(tmp_path: Path, environment: Callable[..., None]) -> Path:
    """A folder of the test's own for shared memory."""
    folder = tmp_path / "shm"
    folder.mkdir()
    environment(DG_SHM_DIR=str(folder))
    return folder


def world(
    ranks: int, work: Callable[[int, Any, Any, Any], Any], timeout_s: float = 20, **more: Any
) -> list[Any]:
    """``work(rank, layout, memory, exchange)`` on threads whose memory is shared."""
    store, layout = HashStore(), layout_for(ranks)

    def rank(me: int) -> Any:
        meeting = Meeting.over(store, me, ranks, timeout_s)
        memory, exchange = symm.connect(OP, layout, CPU, meeting, settings(timeout_s, **more), None)
        try:
            return work(me, layout, memory, exchange)
        finally:
            exchange.close()

    return together(ranks, rank)


@pytest.mark.parametrize("ranks", [1, 2, 5])
def test_ranks_read_and_write_each_other_and_leave_no_file(ranks: int, shm: Path) -> None:
    def work(me: int, layout: Any, memory: Any, exchange: symm.Exchange) -> int:
        assert exchange.provider == "posix-shm"
        assert exchange.direct
        assert list(shm.iterdir()) == []  # gone as soon as all have mapped it
        assert not memory.data.any()
        for turn in range(3):
            count = (11 * me + 7 * turn) % 40
            fill(layout, me, memory.data, count, turn)
            call(exchange, layout, count)
            check(layout, memory.data, count)
        assert exchange.generation == 3
        process = words_of(memory.control, layout["process"])
        assert tuple(process[:2]) == (os.getpid(), symm.start_ticks())
        for name, addresses, peer in zip(
            ("peer_data", "peer_control"),
            memory.pointers,
            (memory.peer_data, memory.peer_control),
            strict=True,
        ):
            assert list(addresses) == [peer(r).data_ptr() for r in range(ranks)]
            assert list(words_of(memory.control, layout[name])) == list(addresses)
        local = words_of(memory.control, layout["local"])
        assert local[LOCAL_WORDS.index("generation")] == 3  # where kernels count along
        assert len(LOCAL_WORDS) <= layout["local"].shape[0]
        kept = layout["x"].view(memory.data)
        before = kept.float()
        exchange.barrier(OP)
        exchange.close()
        exchange.close()
        memory.close()
        assert memory.pointers == ((), ())
        assert exchange.generation == 4
        assert torch.equal(kept.float().nan_to_num(), before.nan_to_num())  # a view that was kept stays
        with pytest.raises(CommError, match="closed"):
            exchange.begin(OP, words(0))
        return 1

    assert world(ranks, work) == [1] * ranks
    assert list(shm.iterdir()) == []


def test_a_full_folder_is_an_error_that_says_what_was_wanted(
    shm: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, layout = os.posix_fallocate, layout_for(2)
    calls: Iterator[int] = iter(range(100))

    def full(file: int, offset: int, size: int) -> None:
        if next(calls) == 2:  # of four: one rank's data or control
            raise OSError(errno.ENOSPC, "No space left on device")
        real(file, offset, size)

    monkeypatch.setattr(os, "posix_fallocate", full)
    outcomes = world(2, lambda *_: None)
    assert all(type(error) is CommError for error in outcomes)
    for error in outcomes:
        assert "step 'allocate' failed on rank " in str(error)
        assert str(shm) in str(error)
        assert "--shm-size" in str(error)
        assert f"{layout.data_bytes} bytes wanted" in str(error) or f"{layout.control_bytes} bytes" in str(
            error
        )
    assert list(shm.iterdir()) == []
    assert world(2, lambda me, *_: me) == [0, 1]  # the folder has room again


@pytest.mark.parametrize("step", ["allocate", "map", "zero", "ready"])
def test_a_failing_step_leaves_no_file_and_a_second_attempt_works(
    step: str, shm: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, failing = Meeting.step, [True]

    def broken(self: Meeting, name: str, work: Callable[[], Any], **more: Any) -> Any:
        def refuse() -> Any:
            work()
            raise OSError("it broke")

        return real(self, name, refuse if name == step and self.rank == 1 and failing[0] else work, **more)

    monkeypatch.setattr(Meeting, "step", broken)
    for error in world(3, lambda *_: None):
        assert (
            str(error) == f"get_symm_buffer_for_mega_moe: step '{step}' failed on rank 1: OSError: it broke"
        )
    assert list(shm.iterdir()) == []
    failing[0] = False
    assert world(3, lambda me, *_: me) == [0, 1, 2]


@pytest.mark.parametrize("late", [(1,), (1, 2)])
def test_ranks_that_do_not_come_to_a_call(late: tuple[int, ...], shm: Path) -> None:
    gate = threading.Barrier(3)

    def work(me: int, layout: Any, memory: Any, exchange: symm.Exchange) -> Any:
        call(exchange, layout, 0)
        if me in late:
            time.sleep(0.8)
        with pytest.raises(CommError) as caught:
            exchange.begin(OP, words(0))
        with pytest.raises(CommError, match=re.escape(str(caught.value))):
            exchange.check()
        exchange.abort(OP, "k1")  # says nothing new
        assert exchange.failure is caught.value
        gate.wait(10)
        return caught.value

    named = "rank 1" if len(late) == 1 else "ranks 1, 2"
    for me, error in enumerate(world(3, work, timeout_s=0.4)):
        if me in late:
            assert type(error) is CommError
            assert f"rank {me} came too late: the others gave up waiting" in str(error)
            continue
        assert type(error) is CommTimeoutError
        assert str(error).startswith(f"{OP}: rank ")
        said = f"waited 0.4 s for {named} in phase 'dispatch', generation 2 (DG_COMM_TIMEOUT_S)"
        assert said in str(error)
        assert (error.peer, error.phase, error.generation) == (1, "dispatch", 2)


def test_a_rank_that_arrived_and_then_ended_is_not_lost(shm: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def work(me: int, layout: Any, memory: Any, exchange: symm.Exchange) -> Any:
        if me == 1:
            return None  # its words come from rank 0, just before that reads them again

        def gone(facts: Any, *_: Any) -> Any:
            for name in ("arrive", "done"):
                words_of(memory.control, layout[name])[1] = exchange.generation
            return facts[1]

        monkeypatch.setattr(direct, "gone", gone)
        published = exchange.begin(OP, words(3))
        exchange.finish(OP)
        return published[0].num_tokens

    assert world(2, work) == [3, None]


def test_words_of_a_call_stay_while_a_slow_rank_reads_them(
    shm: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A rank may be at its next opening barrier before a slower one has read the words of this one."""
    real = DirectExchange._wait

    def slow(self: Any, *arguments: Any) -> None:
        real(self, *arguments)
        if self.rank == 1:
            time.sleep(0.05)

    monkeypatch.setattr(DirectExchange, "_wait", slow)

    def work(me: int, layout: Any, memory: Any, exchange: symm.Exchange) -> Any:
        return [exchange.begin(OP, words(10 * turn + me))[0].num_tokens for turn in range(4)]

    assert world(2, work) == [[0, 10, 20, 30]] * 2


def test_a_rank_that_fails_inside_a_stage_ends_all_at_once(shm: Path) -> None:
    def work(me: int, layout: Any, memory: Any, exchange: symm.Exchange) -> Any:
        exchange.begin(OP, words(0))
        begun = time.monotonic()
        try:
            if me == 2:
                exchange.abort(OP, "k1")
                exchange.abort(OP, "k2")  # the first one stands
                exchange.check()
            exchange.finish(OP)
        except CommError as error:
            assert time.monotonic() - begun < 1
            return error
        return None

    for me, error in enumerate(world(3, work)):
        assert type(error) is CommError
        assert str(error).partition(": ")[2] == "rank 2 failed in phase 'k1', generation 1"
        assert (error.rank, error.peer) == (me, 2)


def test_close_tells_of_a_failure_that_nobody_asked_for(shm: Path) -> None:
    gate = threading.Barrier(2)

    def work(me: int, layout: Any, memory: Any, exchange: symm.Exchange) -> Any:
        if me == 1:
            exchange.abort(OP, "k3")
        gate.wait(10)
        assert exchange.failure is None or me == 1
        exchange.close()
        return exchange.failure

    assert ["rank 1 failed in phase 'k3'" in str(failure) for failure in world(2, work)] == [True, True]


@pytest.mark.parametrize("compare", [True, False])
def test_ranks_on_different_paths_are_named_where_that_is_asked(compare: bool, shm: Path) -> None:
    def work(me: int, layout: Any, memory: Any, exchange: symm.Exchange) -> Any:
        try:
            exchange.begin(OP, words(133 if me == 1 else 0, path=int(me == 1), dispatch=(-1, 133, -1)[me]))
            exchange.finish(OP)
        except CommError as error:
            return error
        return None

    outcomes = world(3, work, check_uniform=compare)
    if not compare:
        assert outcomes == [None] * 3
        return
    for error in outcomes:
        assert type(error) is CommError
        assert str(error) == (
            f"{OP}: rank 0 runs {OP} on the persistent path (0 tokens, dispatch_num_tokens not given), "
            f"rank 1 runs {OP} on the staged path (133 tokens, dispatch_num_tokens 133); give all ranks "
            "the same dispatch_num_tokens (DG_COMM_CHECK_UNIFORM)"
        )


def test_generations_pass_the_end_of_32_bits(shm: Path) -> None:
    gate = threading.Barrier(2)

    def work(me: int, layout: Any, memory: Any, exchange: Any) -> Any:
        exchange.generation = 2**31 - 3
        for name in ("arrive", "done"):
            there = words_of(memory.control, layout[name])
            for r in range(2):
                there[r] = 2**31 - 3
        gate.wait(10)
        seen = []
        for turn in range(6):
            published = exchange.begin(OP, words(10 * turn + me))
            seen += [(one.num_tokens, one.generation) for one in published]
            exchange.finish(OP)
        return seen

    numbers = [2**31 - 2, 2**31 - 1, -(2**31), -(2**31) + 1, -(2**31) + 2, -(2**31) + 3]
    expected = [(10 * turn + r, numbers[turn]) for turn in range(6) for r in range(2)]
    assert world(2, work) == [expected] * 2


def test_words_of_a_device_are_reached_through_tensors(shm: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What control memory of a card is read and written by; here over memory of the CPU."""

    def through_tensors(control: Any, part: Any, dtype: Any = None) -> Any:
        return part.view(control).reshape(-1).view(dtype or part.dtype)

    monkeypatch.setattr(direct, "words_of", through_tensors)

    def work(me: int, layout: Any, memory: Any, exchange: symm.Exchange) -> int:
        fill(layout, me, memory.data, 30)
        call(exchange, layout, 30)
        check(layout, memory.data, 30)
        return me

    assert world(2, work) == [0, 1]


def test_the_exchanges_are_what_stages_are_promised(shm: Path) -> None:
    meeting, layout = Meeting.alone(), layout_for(1)
    for provider in ("posix-shm", "all-to-all"):
        memory, exchange = symm.connect(OP, layout, CPU, meeting, settings(), provider)
        assert exchange.provider == memory.name == provider
        fill(layout, 0, memory.data, 50)
        call(exchange, layout, 50)
        assert len(check(layout, memory.data, 50)) > 50
        exchange.barrier(OP)
        exchange.close()
    own: symm.Exchange = DirectExchange.__new__(DirectExchange)  # mypy compares the two
    assert own.direct
    with pytest.raises(ArgumentError, match="provider is 'x'"):
        symm.connect(OP, layout, CPU, meeting, settings(), "x")


def test_published_words_fit_their_row() -> None:
    row = layout_for(2)["published"].shape
    assert row[0] == 2
    assert row[1] >= len(Published.__dataclass_fields__)
    assert layout_for(2)["abort"].shape[0] >= 5


def test_numbers_of_a_single_row() -> None:
    """A row that comes alone, out of messages of 556 bytes that begin anywhere in what was received."""
    numbers = torch.tensor([3, -1, 2**40, 7])
    message = torch.zeros(4, 556, dtype=torch.uint8)
    message[:, :8] = all_to_all._bytes(numbers)
    for first, last in ((0, 4), (1, 2), (3, 4), (2, 2)):
        assert torch.equal(all_to_all._integers(message[first:last, :8]), numbers[first:last])
