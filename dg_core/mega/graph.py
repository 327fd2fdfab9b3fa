"""Calls that are recorded and replayed: what a CUDA graph does, where there is no card.

Inside ``with RecordedGraph() as graph:`` a call with one of the graph flags is checked and kept, not run;
``graph.replay()`` runs it. As with a captured launch, the number of tokens is then the scalar
``cuda_graph_num_tokens`` as it stands, and inputs, weights and y are the memory that the call was given.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass
from types import TracebackType
from typing import TYPE_CHECKING, Any

import torch

from ..errors import ArgumentError

if TYPE_CHECKING:
    from ..backend import MegaCall

_recording = threading.local()


@dataclass(frozen=True)
class Recorded:
    """A kept call. ``run(buffer, call)`` runs it, and raises where the buffer was destroyed or has failed."""

    buffer: Any
    call: MegaCall
    run: Callable[[Any, MegaCall], None]


class RecordedGraph:
    """Records the calls of a ``with`` block, of this thread alone, and replays them.

    Attributes:
        launches: the recorded calls in their order.
    """

    def __init__(self) -> None:
        self._launches: list[Recorded] = []
        self._state = "new"

    @property
    def launches(self) -> tuple[Recorded, ...]:
        return tuple(self._launches)

    def __enter__(self) -> RecordedGraph:
        if current() is not None:
            raise ArgumentError("RecordedGraph: another one records in this thread; they do not nest")
        if self._state != "new":
            raise ArgumentError("RecordedGraph: this one has recorded; make a new one for other calls")
        _recording.graph, self._state = self, "recording"
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        _recording.graph, self._state = None, "ready" if kind is None else "broken"

    def add(self, buffer: Any, call: MegaCall, run: Callable[[Any, MegaCall], None]) -> None:
        """Keep a call that was checked; ``run(buffer, call)`` is what each replay does.

        Raises:
            ArgumentError: the graph does not record, or the call's launch reads its number of tokens now.
        """
        if self._state != "recording":
            raise ArgumentError(
                f"{call.op}: this RecordedGraph does not record; calls go inside its with block"
            )
        if not call.launch.graph:
            raise ArgumentError(
                f"{call.op}: a recorded call needs big_fused_cuda_graph=True or stages_fused_cuda_graph=True"
            )
        self._launches.append(Recorded(buffer, call, run))

    def replay(self) -> None:
        """Run the recorded calls in their order.

        Raises:
            ArgumentError: nothing was recorded yet, recording ended in an error, or a buffer was destroyed.
            CommError: the ranks of a buffer cannot go on.
        """
        if self._state != "ready":
            why = {
                "new": "nothing was recorded",
                "recording": "it is still recording",
                "broken": "its with block ended in an error",
            }[self._state]
            raise ArgumentError(f"RecordedGraph.replay: {why}")
        for launch in self._launches:
            launch.run(launch.buffer, launch.call)


def current() -> RecordedGraph | None:
    """The graph that records in this thread."""
    return getattr(_recording, "graph", None)


def is_captured(device: torch.device) -> bool:
    """True where torch captures the stream that ``device`` has now, whichever device is the current one."""
    if device.type != "cuda":
        return False
    with torch.cuda.device(device):
        return torch.cuda.is_current_stream_capturing()


def is_capturing(device: torch.device) -> bool:
    """True where a call on ``device`` is recorded: by a RecordedGraph, or by a capture of its stream."""
    return current() is not None or is_captured(device)
