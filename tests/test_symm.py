"""Peer memory: which provider, how ranks meet, and a world of three processes.

Meetings are tested with threads that share a store; what needs processes is in ``symm_ranks``. The calls on
shared memory have a file of their own, test_symm_exchange.
"""

from __future__ import annotations

import json
import os
import pickle
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed import HashStore, TCPStore  # type: ignore[attr-defined]

from dg_core import symm
from dg_core.backend import Availability
from dg_core.errors import (
    ArgumentError,
    BackendUnavailable,
    CommError,
    CommTimeoutError,
    DeviceError,
    PeerLostError,
)
from dg_core.peers import waiting
from dg_core.peers.meeting import Meeting
from dg_core.symm import RankFacts

from . import symm_ranks
from .symm_ranks import CPU, together

ROOT = Path(__file__).resolve().parent.parent
OP = "fp8_block_mega_moe"


def facts(*places: tuple[str, str, str, str]) -> list[RankFacts]:
    """A rank for each (host, device, build, domain)."""
    return [RankFacts(i, 100 + i, 1, *place) for i, place in enumerate(places)]


# Which provider ---------------------------------------------------------------------------------------------

A, B = ("a", "cpu", "cpu", "a"), ("b", "cpu", "cpu", "b")
CUDA = ("a", "cuda:0", "cuda 13.0", "a")
CUDA_B = ("b", "cuda:0", "cuda 13.0", "b")
FABRIC_A, FABRIC_B = ("a", "cuda:0", "cuda 13.0", "nvl"), ("b", "cuda:0", "cuda 13.0", "nvl")
HIP, HIP_B = ("a", "cuda:0", "hip 6.3", "a"), ("b", "cuda:0", "hip 6.3", "b")


class Told:
    """The providers, each as available as the test says."""

    def __init__(self, absent: tuple[str, ...]) -> None:
        self.absent = absent

    def __call__(self, name: str) -> Any:
        state = (
            Availability(False, f"no {name} here", "install it")
            if name in self.absent
            else Availability(True)
        )
        provider = type("Fake", (), {"name": name, "available": lambda *_: state})()
        return type("Module", (), {"PROVIDER": provider})()


@pytest.mark.parametrize(
    ("places", "absent", "expected"),
    [
        ((A,), (), "posix-shm"),
        ((A, A, A), (), "posix-shm"),
        ((A, A), ("posix-shm",), "all-to-all"),
        ((A, A, B), (), "all-to-all"),
        ((CUDA,), (), "torch-symmetric"),
        ((CUDA, CUDA), (), "torch-symmetric"),
        ((CUDA, CUDA), ("torch-symmetric",), "cuda-ipc"),
        ((CUDA, CUDA), ("torch-symmetric", "cuda-ipc"), "all-to-all"),
        ((CUDA, CUDA_B), (), "all-to-all"),
        ((FABRIC_A, FABRIC_B), (), "cuda-ipc"),
        ((FABRIC_A, FABRIC_B), ("cuda-ipc",), "all-to-all"),
        ((FABRIC_A, FABRIC_B, CUDA_B), (), "all-to-all"),
        ((HIP, HIP), (), "hip-ipc"),
        ((HIP, HIP), ("hip-ipc",), "all-to-all"),
        ((HIP, HIP_B), (), "all-to-all"),
    ],
)
def test_the_provider_follows_from_devices_hosts_and_what_is_there(
    places: tuple[Any, ...], absent: tuple[str, ...], expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(symm, "_module", Told(absent))
    ranks = facts(*places)
    device = torch.device(ranks[0].device)
    name, reason = symm.choose(device, ranks)
    assert name == expected
    for missing in absent:
        assert f"no {missing} here" in reason  # what would have come first, and why it did not
    if len({place[0] for place in places}) > 1 and name == "all-to-all" and not absent:
        assert "rank 0" in reason
        assert f"rank {len(places) - 1}" in reason
    assert symm.choose(device, ranks, "all-to-all") == ("all-to-all", "asked for by name")
    assert symm.choose(device, ranks, name) == (name, "asked for by name")


@pytest.mark.parametrize(
    ("places", "asked", "parts"),
    [
        ((A, A, B), "posix-shm", ("rank 0 is on 'a' (domain 'a')", "rank 2 on 'b' (domain 'b')")),
        ((CUDA, CUDA_B), "torch-symmetric", ("rank 0 is on 'a'", "rank 1 on 'b'", "all-to-all")),
        ((FABRIC_A, CUDA_B), "cuda-ipc", ("rank 0 is in 'nvl'", "rank 1 in 'b'")),
        ((HIP, HIP_B), "hip-ipc", ("rank 0", "rank 1", "'a'", "'b'")),
        ((CUDA,), "posix-shm", ("cpu memory", "cuda:0")),
        ((HIP,), "cuda-ipc", ("cuda memory", "hip 6.3")),
        ((A,), "hip-ipc", ("hip memory", "rank 0 is on cpu")),
    ],
)
def test_a_provider_asked_for_by_name_that_cannot_serve_says_why(
    places: tuple[Any, ...], asked: str, parts: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(symm, "_module", Told(()))
    ranks = facts(*places)
    with pytest.raises(BackendUnavailable) as caught:
        symm.choose(torch.device(ranks[0].device), ranks, asked)
    for part in (repr(asked), *parts):
        assert part in str(caught.value)


def test_what_is_asked_for_and_not_installed_is_an_error_with_the_remedy(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(symm, "_module", Told(("cuda-ipc",)))
    with pytest.raises(BackendUnavailable, match=r"no cuda-ipc here \(install it\)"):
        symm.choose(torch.device("cuda:0"), facts(CUDA, CUDA), "cuda-ipc")
    with pytest.raises(ArgumentError, match="provider is 'nccl'; it must be one of auto, torch-symmetric, "):
        symm.choose(CPU, facts(A), "nccl")
    with pytest.raises(DeviceError, match=r"rank 0 is on cpu \(cpu\), rank 1 on cuda:0 \(cuda 13.0\)"):
        symm.choose(CPU, facts(A, CUDA))


def test_probe_on_a_cpu_finds_the_two_that_need_no_card(
    tmp_path: Path, environment: Callable[..., None]
) -> None:
    shm = tmp_path / "shm"
    shm.mkdir()
    environment(DG_SHM_DIR=str(shm))
    found = symm.probe(CPU)
    assert tuple(found) == symm.PROVIDERS
    assert [name for name, state in found.items() if state.ok] == ["posix-shm", "all-to-all"]
    assert all(state.ok or state.reason for state in found.values())
    shm.rmdir()
    state = symm.probe(CPU)["posix-shm"]
    assert not state.ok
    assert str(shm) in state.reason
    assert "DG_SHM_DIR" in state.remedy
    name, reason = symm.choose(CPU, [symm.local_facts(CPU)])
    assert name == "all-to-all"
    assert str(shm) in reason


# Processes --------------------------------------------------------------------------------------------------


def test_a_process_lives_until_it_ends_reaped_or_not() -> None:
    own = symm.local_facts(CPU)
    assert own.pid == os.getpid()
    assert own.start_ticks > 0
    assert own.kind == "cpu"
    assert symm.alive(own)
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    state = Path(f"/proc/{child.pid}/stat").read_text()
    ticks = int(state.rpartition(")")[2].split()[19])
    facts_of_child = replace(own, pid=child.pid, start_ticks=ticks)
    assert symm.alive(facts_of_child)
    assert not symm.alive(replace(facts_of_child, start_ticks=ticks - 1))  # a later one with the same number
    assert symm.alive(replace(facts_of_child, pid=2**22 + 1, start_ticks=0))  # nothing is known of it
    child.kill()
    deadline = time.monotonic() + 5
    while symm.alive(facts_of_child) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert Path(f"/proc/{child.pid}/stat").exists()  # nobody has waited for it yet
    assert not symm.alive(facts_of_child)
    child.wait()
    assert not symm.alive(facts_of_child)


# Meetings ---------------------------------------------------------------------------------------------------


def test_a_step_hands_every_result_to_every_rank() -> None:
    store, names = HashStore(), ("agree", "map", "zero", "ready")

    def tag(me: int, name: str) -> tuple[int, str]:
        return me, name

    def rank(me: int) -> list[Any]:
        meeting = Meeting.over(store, me, 3, 5)
        return [meeting.step(name, partial(tag, me, name)) for name in names]

    expected = [[(r, name) for r in range(3)] for name in names]
    assert together(3, rank) == [expected] * 3
    steps = [store.check([f"dg_core/store/1/{number}/{r}"]) for number in range(1, 5) for r in range(3)]
    assert steps == [False] * 6 + [True] * 6  # what two steps ago was said is gone


def test_a_step_that_fails_on_one_rank_fails_on_all_at_once() -> None:
    store = HashStore()

    def rank(me: int) -> None:
        meeting = Meeting.over(store, me, 3, 20)
        meeting.step("agree", lambda: me)
        begun = time.monotonic()
        try:
            meeting.step("map", lambda: 1 // (me - 2))
        finally:
            assert time.monotonic() - begun < 2
            with pytest.raises(CommError, match="step 'map'"):
                meeting.step("zero", lambda: me)

    said = "get_symm_buffer_for_mega_moe: step 'map' failed on rank 2: ZeroDivisionError: integer "
    for me, error in enumerate(together(3, rank)):
        assert type(error) is CommError
        assert str(error).startswith(said)
        assert (error.rank, error.peer, error.phase) == (me, 2, "map")


def test_ranks_that_do_not_come_are_named_and_level_with_the_others_at_the_next_attempt() -> None:
    store = HashStore()

    def attempt(me: int) -> Any:
        try:
            return Meeting.over(store, me, 4, 0.3).step("agree", lambda: me)
        except CommError as error:
            return error

    outcomes = together(2, attempt)
    for error in outcomes:
        assert type(error) is CommTimeoutError
        assert isinstance(error, TimeoutError)
        assert "waited 0.3 s for ranks 2, 3 in phase 'agree' (DG_COMM_TIMEOUT_S)" in str(error)
        assert error.peer == 2
    for me in (2, 3):
        late = attempt(me)
        assert type(late) is CommError
        assert f"rank {me} came too late: the others gave up waiting in phase 'agree'" in str(late)
    assert together(4, attempt) == [[0, 1, 2, 3]] * 4


def test_a_process_that_ended_is_noticed_before_time_is_over() -> None:
    store, own = HashStore(), symm.local_facts(CPU)
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait()
    known = [replace(own, rank=r) for r in range(3)]
    known[2] = replace(known[2], pid=ended.pid)

    def rank(me: int) -> Any:
        meeting = Meeting.over(store, me, 3, 20)
        meeting.know(known)
        begun = time.monotonic()
        try:
            return meeting.step("map", lambda: me)
        finally:
            assert time.monotonic() - begun < 1

    for error in together(2, rank):
        assert type(error) is PeerLostError
        assert isinstance(error, ConnectionError)
        assert f"rank 2 (pid {ended.pid}) is gone, noticed by rank " in str(error)
    # One of another host cannot be looked after: there the limit of time ends the wait.
    known[2] = replace(known[2], host="elsewhere")
    far = Meeting.over(HashStore(), 0, 3, 0.2)
    far.know(known)
    with pytest.raises(CommTimeoutError, match="for ranks 1, 2"):
        far.step("map", lambda: 0)


def test_a_rank_that_came_and_then_ended_is_not_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    store, own = HashStore(), symm.local_facts(CPU)
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait()
    looked: list[RankFacts | None] = []

    def gone(*arguments: Any) -> Any:
        looked.append(waiting.gone(*arguments))
        # It comes between two looks at the store.
        store.set("dg_core/store/1/1/1", pickle.dumps(("agree", "came")))  # type: ignore[arg-type]
        return looked[-1]

    monkeypatch.setattr("dg_core.peers.meeting.gone", gone)
    meeting = Meeting.over(store, 0, 2, 5)
    meeting.know([own, replace(own, rank=1, pid=ended.pid)])
    assert meeting.step("agree", lambda: "here") == ["here", "came"]
    assert looked[0] is not None
    assert looked[0].pid == ended.pid


def test_ranks_at_different_steps_are_told_so() -> None:
    store = HashStore()

    def rank(me: int) -> Any:
        return Meeting.over(store, me, 2, 5).step(("map", "zero")[me], lambda: me)

    outcomes = together(2, rank)
    assert all(type(error) is CommError for error in outcomes)
    assert all("'map'" in str(error) and "'zero'" in str(error) for error in outcomes)


def test_a_meeting_of_one_needs_nobody() -> None:
    for meeting in (Meeting.alone(), Meeting(None)):
        assert (meeting.rank, meeting.ranks, meeting.group) == (0, 1, None)
        assert meeting.step("agree", lambda: "x") == ["x"]
        with pytest.raises(CommError, match="step 'map' failed on rank 0: ValueError: no"):
            meeting.step("map", _refuse)


def _refuse() -> None:
    raise ValueError("no")


# A world of processes ---------------------------------------------------------------------------------------


def test_three_processes(tmp_path: Path) -> None:
    """Real processes over gloo: values by both ways, hosts, a late rank, and two that are killed."""
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    ranks, shm = 3, tmp_path / "shm"
    shm.mkdir()
    shared = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    shared |= {"STORE_PORT": str(store.port), "DG_SHM_DIR": str(shm)}
    command = [sys.executable, "-m", "tests.symm_ranks", str(tmp_path)]
    processes = [
        subprocess.Popen(
            command,
            cwd=ROOT,
            env={**shared, "RANK": str(rank), "WORLD_SIZE": str(ranks)},
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(ranks)
    ]
    try:
        deadline = time.monotonic() + 60
        # Nobody is waited for before all have ended: a killed rank stays a process without a life till then.
        while any(not _ended(process.pid) for process in processes) and time.monotonic() < deadline:
            time.sleep(0.05)
    finally:
        for process in processes:
            process.kill()
        errors = [process.communicate()[1] for process in processes]
    told: list[dict[str, Any]] = []
    for rank in range(ranks):
        path = tmp_path / f"rank{rank}.json"
        assert path.exists(), errors[rank]
        told.append(json.loads(path.read_text()))
    dead: set[int] = set()
    for name in symm_ranks.CASES:
        if name in symm_ranks.KILLED:
            dead.add(symm_ranks.KILLED[name])
        for rank in range(ranks):
            if rank in dead:
                assert name not in told[rank]
                continue
            assert name in told[rank], (name, rank, told[rank], errors[rank])
            assert told[rank][name]["ok"], (name, rank, told[rank][name]["words"])
    assert [process.returncode for process in processes] == [0, -9, -9]
    assert list(shm.iterdir()) == []  # killed ranks leave nothing either


def _ended(pid: int) -> bool:
    state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    return state == "Z"
