"""All ranks of Mega MoE in one process, on plain tensors: 72 of them need neither processes nor a launcher.

Each rank runs its stage in a thread of its own, one at a time: a rank computes until it has to wait for the
others, and then the next one does. So the stages are those of a real run, waits included, and what they share
is a tensor for each rank.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, cast

import torch
from torch import Tensor

from ... import dispatch
from ...backend import MegaCall, MegaCapable, MegaMoe, MegaStages
from ...errors import ArgumentError, CommError
from ...mega import routing
from ...mega.layout import FORMATS, SymmLayout, local_experts
from ...symm import Published

__all__ = ["STAGES", "LocalExchange", "LocalWorld", "local_call"]

STAGES = ("k1", "k2", "k3", "fused")
_AFTER = {"k2": "k1", "k3": "k2"}  # the others may follow anything


class _Meeting:
    """Where the ranks of one run meet: who arrives gives the turn away until all have."""

    def __init__(self, ranks: int) -> None:
        self._barrier = threading.Barrier(ranks)
        self.turn = threading.Lock()
        self.failure: BaseException | None = None

    def wait(self) -> None:
        """Called with the turn, and returns with it.

        Raises:
            CommError: a rank has failed, so it will never come.
        """
        self.turn.release()
        try:
            self._barrier.wait()
        except threading.BrokenBarrierError as error:
            raise CommError(f"LocalWorld: another rank failed: {self.failure!r}") from error
        finally:
            self.turn.acquire()

    def fail(self, error: BaseException) -> None:
        self.failure = self.failure or error
        self._barrier.abort()


class LocalExchange:
    """One rank's ``symm.Exchange`` in a ``LocalWorld``.

    Attributes:
        published: what all ranks said when they last met for a call.
        puts: for each ``put`` since then, the rank that got the rows and their number.
        barriers: how often ``barrier`` was called.
    """

    direct, provider, reason = True, "local", "all ranks are in this process"

    def __init__(self, world: LocalWorld, rank: int) -> None:
        self.rank, self.ranks, self._world = rank, world.layout.ranks, world
        self.generation, self.barriers = 0, 0
        self.failure: CommError | None = None
        self.published: tuple[Published, ...] = ()
        self.puts: list[tuple[int, int]] = []

    def begin(self, op: str, words: Published) -> tuple[Published, ...]:
        self.generation += 1
        self.puts = []
        self._world.said[self.rank] = replace(words, generation=self.generation)
        self._world.meeting.wait()
        self.published = tuple(self._world.said)
        return self.published

    def fetch(self) -> None:
        """Nothing: the inputs of all ranks are read where they lie."""

    def inputs(self, rank: int) -> Tensor:
        return self._world.data[rank][: self._world.layout.input_bytes]

    def put(self, rank: int, slots: Tensor, tokens: Tensor, rows: Tensor) -> None:
        self.puts.append((rank, len(rows)))
        self._world.layout["combine"].view(self._world.data[rank])[slots, tokens] = rows

    def finish(self, op: str) -> None:
        self._world.meeting.wait()

    def barrier(self, op: str) -> None:
        self.barriers += 1
        self._world.meeting.wait()

    def abort(self, op: str, phase: str) -> None:
        """Nothing: a rank that fails ends the run of all."""

    def check(self) -> None:
        """Nothing: a run that fails raises."""

    def close(self) -> None:
        """Nothing to give back."""


class LocalWorld:
    """The buffers of all ranks, and a backend's stages on them.

    Args:
        layout: of every rank's buffer.
        device: where the memory lies.
        backend: whose stages run.

    Attributes:
        data, control, scratch: int8, a tensor for each rank; zeros, but scratch holds anything.
        exchanges, said: each rank's exchange, and what it published last.

    Raises:
        BackendUnavailable: there is no such backend.
        ArgumentError: it has no Mega MoE.
    """

    def __init__(self, layout: SymmLayout, *, device: str = "cpu", backend: str = "reference") -> None:
        found = dispatch.load_backend(backend)
        if not isinstance(found, MegaCapable):
            raise ArgumentError(f"LocalWorld: backend is {backend!r}; it has no Mega MoE")
        ranks = range(layout.ranks)
        self.layout = layout
        self.data = [torch.zeros(layout.data_bytes, dtype=torch.int8, device=device) for _ in ranks]
        self.control = [torch.zeros(layout.control_bytes, dtype=torch.int8, device=device) for _ in ranks]
        self.scratch = [torch.empty(layout.scratch_bytes, dtype=torch.int8, device=device) for _ in ranks]
        self.said = [Published(0, 0, 0, 0, 0, 0) for _ in ranks]
        self.exchanges = [LocalExchange(self, rank) for rank in ranks]
        self.meeting = _Meeting(layout.ranks)
        self._last = ""
        op = FORMATS[layout.mma_type].functions[0]
        self._stages: list[MegaStages] = [
            found.mega(
                MegaMoe(op, layout.mma_type, rank, layout),
                cast(Any, self.exchanges[rank]),
                self.views(rank),
            )
            for rank in ranks
        ]

    def views(self, rank: int) -> Mapping[str, Tensor]:
        """All regions of a rank's buffer by their names."""
        segments = (
            (self.layout.data, self.data),
            (self.layout.control, self.control),
            (self.layout.scratch, self.scratch),
        )
        return {part.name: part.view(storage[rank]) for parts, storage in segments for part in parts}

    def view(self, rank: int, name: str) -> Tensor:
        """One region of a rank's buffer.

        Raises:
            KeyError: the layout has no region of that name.
        """
        return self.views(rank)[name]

    def experts(self, rank: int) -> range:
        """The ids of the experts that a rank owns."""
        return local_experts(self.layout.num_experts, self.layout.ranks, rank)

    def load(self, rank: int, x: Tensor, x_sf: Tensor | None, topk_idx: Tensor, topk_weights: Tensor) -> None:
        """Write a rank's inputs, as a program does before a call; rows behind them stay as they are."""
        views = self.views(rank)
        given = {"x": x, "x_sf": x_sf, "topk_idx": topk_idx, "topk_weights": topk_weights}
        for name, value in given.items():
            if value is not None:
                views[name][: len(value)].copy_(value)

    def run(self, stage: str, calls: Sequence[MegaCall]) -> None:
        """Run a stage on all ranks, each with its own call.

        Raises:
            ArgumentError: there is no such stage, not one call for each rank, or the stage before it has not
                run.
            Exception: what the first rank that failed has raised.
        """
        if stage not in STAGES or len(calls) != self.layout.ranks:
            raise ArgumentError(
                f"LocalWorld.run: stage is {stage!r} with {len(calls)} calls; it takes one of "
                f"{', '.join(STAGES)} and a call for each of {self.layout.ranks} ranks"
            )
        if self._last != _AFTER.get(stage, self._last):
            raise ArgumentError(
                f"LocalWorld.run: stage is {stage!r} and the last one to run was {self._last or 'none'!r}; "
                f"it must be {_AFTER[stage]!r}"
            )
        self.meeting, self._last = _Meeting(self.layout.ranks), "a run that failed"
        threads = [
            threading.Thread(target=self._run, args=(stage, rank, call), name=f"rank {rank}")
            for rank, call in enumerate(calls)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if self.meeting.failure is not None:
            raise self.meeting.failure
        self._last = stage

    def _run(self, stage: str, rank: int, call: MegaCall) -> None:
        with self.meeting.turn:
            try:
                getattr(self._stages[rank], stage)(call)
            except BaseException as error:  # told to whoever called run
                self.meeting.fail(error)


def local_call(
    layout: SymmLayout,
    num_tokens: int,
    l1: Any,
    l2: Any,
    y: Tensor | None,
    *,
    path: str = "persistent",
    graph: bool = False,
    tail_reduce: bool = True,
    stats: Tensor | None = None,
    clamp: float = math.inf,
) -> MegaCall:
    """A call as the public functions make it after their checks.

    Args:
        num_tokens: this rank's tokens; the bucket where ``graph``.
        l1, l2: weights as the format's transform gives them.
        y: bf16 ``[>= num_tokens, hidden]``; None for stages that write none.
    """
    launch = routing.Launch(
        path=path,
        graph=graph,
        rows=num_tokens,
        selector=num_tokens,
        skip_rows=False,
        tail_reduce=tail_reduce,
        prebuild="compact",
        reduce_blocks=64,
        reduce_threads=128,
        reason="asked for",
    )
    op = FORMATS[layout.mma_type].functions[0]
    return MegaCall(op, launch, num_tokens, l1, l2, y, stats, clamp, fast_math=True)
