"""Recorded graphs of Mega MoE: what they keep, replay and refuse, and whose capture is asked for."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch

from dg_core.backend import MegaCall
from dg_core.errors import ArgumentError
from dg_core.mega import graph, routing
from dg_core.mega.routing import choose

OP = "fp8_w8a8_mega_moe"


def call(op: str = OP, **flags: bool) -> MegaCall:
    launch = choose(
        op, routing.settings(), num_tokens=5, capacity=384, requested=5, bucket=5, **(flags or {"big": True})
    )
    return MegaCall(op, launch, 5, None, None, None, None, float("inf"), True)


class Runs:
    """A ``run`` that notes its arguments, and fails for buffers that are destroyed."""

    def __init__(self) -> None:
        self.seen: list[tuple[Any, MegaCall]] = []
        self.destroyed: set[Any] = set()

    def __call__(self, buffer: Any, made_call: MegaCall) -> None:
        if buffer in self.destroyed:
            raise ArgumentError(f"{made_call.op}: sym_buffer was destroyed")
        self.seen.append((buffer, made_call))


def test_calls_are_kept_and_run_at_each_replay() -> None:
    runs, first, second = Runs(), call(), call(stages=True)
    with graph.RecordedGraph() as recorded:
        assert graph.current() is recorded
        recorded.add("a", first, runs)
        recorded.add("b", second, runs)
    assert graph.current() is None
    assert runs.seen == []
    assert [(kept.buffer, kept.call) for kept in recorded.launches] == [("a", first), ("b", second)]
    recorded.replay()
    recorded.replay()
    assert runs.seen == [("a", first), ("b", second)] * 2


def test_replay_after_destroy_is_an_error() -> None:
    runs = Runs()
    with graph.RecordedGraph() as recorded:
        recorded.add("a", call(), runs)
    recorded.replay()
    runs.destroyed.add("a")
    with pytest.raises(ArgumentError, match="sym_buffer was destroyed"):
        recorded.replay()


def test_graphs_do_not_nest_and_record_once() -> None:
    with graph.RecordedGraph() as recorded:
        with pytest.raises(ArgumentError, match="do not nest"), graph.RecordedGraph():
            pass
        assert graph.current() is recorded
    with pytest.raises(ArgumentError, match="has recorded"), recorded:
        pass
    assert graph.current() is None


def _breaks(recorded: graph.RecordedGraph) -> None:
    with recorded:
        recorded.add("a", call(), Runs())
        raise OSError("inside")


def test_a_graph_that_cannot_be_replayed_says_why() -> None:
    recorded = graph.RecordedGraph()
    with pytest.raises(ArgumentError, match="nothing was recorded"):
        recorded.replay()
    with recorded, pytest.raises(ArgumentError, match="still recording"):
        recorded.replay()
    recorded.replay()  # an empty one is a graph too
    broken = graph.RecordedGraph()
    with pytest.raises(OSError, match="inside"):
        _breaks(broken)
    assert graph.current() is None
    with pytest.raises(ArgumentError, match="ended in an error"):
        broken.replay()


def test_only_graph_calls_inside_the_block_are_kept() -> None:
    recorded = graph.RecordedGraph()
    with pytest.raises(ArgumentError, match="does not record"):
        recorded.add("a", call(), Runs())
    eager = replace(
        call(), launch=choose(OP, routing.settings(), num_tokens=5, capacity=384, requested=5, bucket=5)
    )
    with recorded, pytest.raises(ArgumentError, match="needs big_fused_cuda_graph=True or stages"):
        recorded.add("a", eager, Runs())
    assert recorded.launches == ()


def _in_a_thread(work: Callable[[], Any]) -> Any:
    found: list[Any] = []
    thread = threading.Thread(target=lambda: found.append(work()))
    thread.start()
    thread.join()
    return found[0]


def test_other_threads_do_not_record() -> None:
    cpu = torch.device("cpu")
    assert not graph.is_capturing(cpu)
    with graph.RecordedGraph():
        assert graph.is_capturing(cpu)
        assert _in_a_thread(graph.current) is None
        assert _in_a_thread(lambda: graph.is_capturing(cpu)) is False
    assert not graph.is_capturing(cpu)


@pytest.mark.parametrize("capturing", [None, 0, 3])
def test_a_stream_capture_is_asked_of_the_device_that_is_meant(
    capturing: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """torch answers for the current device, so that has to be the buffer's while it is asked."""
    current = [0]

    @contextlib.contextmanager
    def device(meant: torch.device) -> Iterator[None]:
        before, current[0] = current[0], meant.index
        yield
        current[0] = before

    monkeypatch.setattr(torch.cuda, "device", device)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: current[0] == capturing)
    for index in (0, 3):
        assert graph.is_captured(torch.device("cuda", index)) is (index == capturing)
        assert graph.is_capturing(torch.device("cuda", index)) is (index == capturing)
    assert current == [0]
    assert graph.is_capturing(torch.device("cpu")) is False
    with graph.RecordedGraph():
        assert graph.is_captured(torch.device("cpu")) is False
