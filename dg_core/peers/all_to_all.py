"""The exchange of ranks that cannot map each other's memory: rows travel by an all-to-all of bytes.

A call costs two of them, and before each the ranks meet at the store: there a rank that is missing is named,
and everybody learns how many rows will come. A collective that a rank does not enter after all, because it
fails on its way there, ruins the process group that it runs in; so a buffer has a group of its own, of Gloo,
and goes with it. Rows of a device travel through memory of the CPU: a group of Gloo gives up, where one of
NCCL would end the process. Results are those of direct memory, bit for bit: the same rows lie at the same
places.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from dataclasses import astuple, dataclass, field, replace
from datetime import timedelta
from threading import Thread
from typing import TYPE_CHECKING, Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from ..backend import Availability
from ..errors import CommError
from ..symm import OPS, Published, RankFacts
from .line import StoreSilent
from .waiting import Record, Wait, gone, named, unlike

if TYPE_CHECKING:
    from ..mega.layout import SymmLayout
    from .meeting import Meeting

T = TypeVar("T")

CPU = torch.device("cpu")
# After its limit a rank waits so long for the others to say that they are there, to name those that are not.
_ANSWER_S = 0.5


@dataclass
class OwnMemory:
    """A rank's own memory and nobody else's, and the group of Gloo that rows travel by (None: one rank)."""

    data: Tensor
    control: Tensor
    group: Any = field(default=None, repr=False)
    name: str = "all-to-all"
    direct: bool = False
    pointers: tuple[tuple[int, ...], tuple[int, ...]] = ((), ())

    def peer_data(self, rank: int) -> Tensor:
        raise CommError(f"{self.name}: the data of rank {rank} is not mapped", peer=rank)

    def peer_control(self, rank: int) -> Tensor:
        raise CommError(f"{self.name}: the control words of rank {rank} are not mapped", peer=rank)

    def close(self) -> None:
        self.data = self.control = torch.empty(0, dtype=torch.int8)
        group, self.group = self.group, None
        if group is not None:
            _let_go([group])


class AllToAll:
    """The provider."""

    name = "all-to-all"

    def available(self, device: torch.device, facts: Sequence[RankFacts]) -> Availability:
        if len(facts) > 1 and not dist.is_available():
            return Availability(False, "this torch was built without torch.distributed")
        if len(facts) > 1 and not dist.is_gloo_available():
            return Availability(False, "this torch was built without Gloo")
        return Availability(True)

    def allocate(
        self, data_bytes: int, control_bytes: int, device: torch.device, meeting: Meeting
    ) -> OwnMemory:
        made: list[OwnMemory] = []

        def make() -> None:
            data, control = (
                torch.zeros(size, dtype=torch.int8, device=device) for size in (data_bytes, control_bytes)
            )
            made.append(OwnMemory(data, control))

        def join() -> None:
            made[0].group = _own_group(meeting)

        try:
            meeting.step("allocate", make)
            meeting.step("map", join)
            meeting.step("zero", lambda: None)
        except BaseException:
            for memory in made:
                memory.close()
            raise
        return made[0]


def _own_group(meeting: Meeting) -> Any:
    """A group of Gloo of the ranks of ``meeting``, known to nobody else; None for one rank.

    Its making waits for the other ranks, so a thread does that while this one looks after them.
    """
    if meeting.ranks == 1:
        return None
    if meeting.store is None:
        raise RuntimeError("all-to-all needs a process group whose store torch tells of")
    # A connection of its own, for the rank has to reach the store meanwhile.
    clone = getattr(meeting.store, "clone", None)
    store = dist.PrefixStore(f"{meeting.prefix}/gloo", clone() if clone else meeting.store)  # type: ignore[attr-defined]
    # Nobody waits for this limit: it only ends what a closed exchange has left behind.
    limit = timedelta(seconds=2 * meeting.timeout_s + 5)
    made: list[Any] = []
    failed: list[Exception] = []

    def make() -> None:
        try:
            made.append(dist.ProcessGroupGloo(store, meeting.rank, meeting.ranks, limit))
        except Exception as error:
            failed.append(error)

    thread = Thread(target=make, name="dg_core gloo", daemon=True)
    meeting.note("joins")
    thread.start()
    wait = Wait(meeting.timeout_s)
    with meeting.within(meeting.timeout_s):
        while thread.is_alive():
            if wait.turn():
                meeting.look("map", range(meeting.ranks), "joins", over=wait.over)
    if failed:
        raise failed[0]
    return made[0]


def _let_go(held: list[Any]) -> None:
    """Drop a group. That waits for its collectives, one of which may have to wait for its limit; so nobody
    waits for that."""
    with contextlib.suppress(RuntimeError):  # at the end of the process no thread can be started
        Thread(target=held.clear, name="dg_core gloo", daemon=True).start()


def exchange(
    memory: OwnMemory,
    layout: SymmLayout,
    meeting: Meeting,
    facts: Sequence[RankFacts],
    settings: Any,
    reason: str,
) -> AllToAllExchange:
    """The exchange of a rank that moves rows."""
    return AllToAllExchange(memory, layout, meeting, facts, settings, reason)


class AllToAllExchange:
    """An ``Exchange`` over a store, which it needs for as long as calls are made, and a group of its own."""

    direct = False

    def __init__(
        self,
        memory: OwnMemory,
        layout: SymmLayout,
        meeting: Meeting,
        facts: Sequence[RankFacts],
        settings: Any,
        reason: str,
    ) -> None:
        self.rank, self.ranks = meeting.rank, meeting.ranks
        self.provider, self.reason = memory.name, reason
        self.generation = 0
        self._memory: OwnMemory | None = memory
        self._layout, self._meeting, self._facts = layout, meeting, tuple(facts)
        self._seconds, self._uniform = float(settings.timeout_s), bool(settings.check_uniform)
        self._inputs = [part for part in layout.data if part.offset < layout.input_bytes]
        # The mirrors of other ranks' inputs are made once; pages come when rows do.
        self._mirrors = [
            memory.data[: layout.input_bytes] if r == self.rank else _mirror(layout, memory.data.device)
            for r in range(self.ranks)
        ]
        self._queues: list[list[Tensor]] = [[] for _ in range(self.ranks)]
        self._leaving: list[Tensor] = []  # rows of this call's tokens that each rank gets
        self._coming: list[int] = []
        self._op = ""

    @property
    def failure(self) -> CommError | None:
        """What has ended the exchange on this rank."""
        return self._meeting.failure

    # Calls --------------------------------------------------------------------------------------------------

    def begin(self, op: str, words: Published) -> tuple[Published, ...]:
        mine = replace(words, generation=self._next(op))
        self._op = op  # what a message about ``fetch`` names

        def work() -> tuple[tuple[int, ...], list[int]]:
            self._leaving = self._tokens_for_ranks(words.num_tokens)
            return astuple(mine), [len(tokens) for tokens in self._leaving]

        told = self._step("dispatch", work, op)
        self._coming = [counts[self.rank] for _, counts in told]
        published = tuple(Published(*words) for words, _ in told)
        if self._uniform:
            record = unlike(self.rank, published, self.generation)
            if record is not None:
                # Ranks that do not compare would wait for this one, so they are told.
                raise self._meeting.end(record, op)
        return published

    def fetch(self) -> None:
        columns = [_rows(part.view(self._mirrors[self.rank])) for part in self._inputs]
        packed = [
            torch.cat([_bytes(tokens), *(rows[tokens] for rows in columns)], dim=1)
            if r != self.rank
            else self._nothing(8 + sum(rows.shape[1] for rows in columns))
            for r, tokens in enumerate(self._leaving)
        ]
        coming = [0 if r == self.rank else count for r, count in enumerate(self._coming)]
        for r, rows in enumerate(self._move(packed, coming, self._op, "dispatch")):
            if r == self.rank:
                continue
            mirror = self._mirrors[r]
            # Only routed tokens have come; the others' ids say that they have no route here.
            self._layout["topk_idx"].view(mirror).fill_(-1)
            tokens, at = _integers(rows[:, :8]), 8
            for part in self._inputs:
                there = _rows(part.view(mirror))
                there[tokens] = rows[:, at : at + there.shape[1]]
                at += there.shape[1]

    def inputs(self, rank: int) -> Tensor:
        return self._mirrors[rank]

    def put(self, rank: int, slots: Tensor, tokens: Tensor, rows: Tensor) -> None:
        place = slots.long() * self._layout.max_tokens + tokens.long()
        # Packed now: the caller may reuse its rows.
        self._queues[rank].append(torch.cat([_bytes(place), _rows(rows.contiguous())], dim=1))

    def finish(self, op: str) -> None:
        memory, part = self._stand(op), self._layout["combine"]
        width = 8 + part.shape[2] * part.dtype.itemsize
        packed = [torch.cat(queue) if queue else self._nothing(width) for queue in self._queues]
        self._queues = [[] for _ in range(self.ranks)]
        told = self._step("combine", lambda: [len(rows) for rows in packed], op)
        combine = _rows(part.view(memory.data).view(-1, part.shape[2]))
        for rows in self._move(packed, [counts[self.rank] for counts in told], op, "combine"):
            combine[_integers(rows[:, :8])] = rows[:, 8:]
        self._step("combine", lambda: None, op)

    def barrier(self, op: str) -> None:
        words = astuple(Published(self._next(op), 0, 0, -1, OPS.index("barrier"), 0))
        self._step("barrier", lambda: words, op)

    def _step(self, phase: str, work: Callable[[], T], op: str) -> list[T]:
        return self._meeting.step(phase, work, op=op, generation=self.generation)

    def _next(self, op: str) -> int:
        self._stand(op)
        self.generation += 1
        return (self.generation + 2**31) % 2**32 - 2**31

    def _tokens_for_ranks(self, count: int) -> list[Tensor]:
        """int64 ids of the tokens that have a live route to an expert of each rank, ascending."""
        own, layout = self._mirrors[self.rank], self._layout
        ids = layout["topk_idx"].view(own)[:count]
        weights = layout["topk_weights"].view(own)[:count]
        owners = layout.owners(ids, weights)
        return [(owners == r).any(dim=1).nonzero()[:, 0] for r in range(self.ranks)]

    # Moving -------------------------------------------------------------------------------------------------

    def _nothing(self, width: int) -> Tensor:
        return torch.empty(0, width, dtype=torch.uint8, device=self._mirrors[self.rank].device)

    def _move(self, leaving: list[Tensor], coming: list[int], op: str, phase: str) -> list[Tensor]:
        """uint8 ``[n, width]`` for each rank -> the same from each rank, ``coming`` rows of each."""
        memory = self._stand(op)
        if self.ranks == 1:
            return leaving
        width, device = leaving[0].shape[1], leaving[0].device
        out = torch.empty(sum(coming) * width, dtype=torch.uint8)
        inward = torch.cat(leaving).reshape(-1).to(CPU)
        splits = [rows.numel() for rows in leaving]
        wait = Wait(self._seconds)
        try:
            with self._meeting.within(self._seconds):
                work = memory.group.alltoall_base(out, inward, [n * width for n in coming], splits)
                self._await(work, op, phase, wait)
                self._meeting.note("moved")
        except CommError:
            raise
        except RuntimeError as error:  # of the group, which has lost a rank, or of the store
            raise self._broken(error, op, phase, wait) from error
        return list(torch.split(out.to(device).view(-1, width), coming))

    def _await(self, work: Any, op: str, phase: str, wait: Wait) -> None:
        """Wait for a collective; a rank that is lost meanwhile, or time that is over, ends the exchange."""
        said = False
        while not work.is_completed():
            if not wait.turn():
                continue
            self._look(op, phase)
            if work.is_completed():
                break
            if not said and self._meeting.called_out():
                said = True
                self._meeting.note("here")
            if wait.over:
                raise self._unmoved(op, phase)
        work.wait()

    def _look(self, op: str, phase: str) -> None:
        """Raise what has ended the exchange elsewhere, or a rank whose process has ended."""
        failure = self._meeting.ended(op)
        if failure is not None:
            raise failure.with_traceback(None)
        lost = gone(self._facts, self.rank, self._others())
        # One that has got all its rows may end: what it had to send is on its way.
        if lost is not None and not self._meeting.noted("moved", lost.rank):
            raise self._meeting.end(Record("lost", self.rank, lost.rank, phase, self.generation), op)

    def _others(self) -> list[int]:
        return [r for r in range(self.ranks) if r != self.rank]

    def _absent(self) -> list[int]:
        """The ranks that neither have their rows nor say that they wait for them."""
        noted = self._meeting.noted
        return [r for r in self._others() if not (noted("here", r) or noted("moved", r))]

    def _unmoved(self, op: str, phase: str) -> CommError:
        """Rows have not come in time. Who is there is asked for, so that the others can be named."""
        self._meeting.note("here")
        self._meeting.call_out()
        wait, absent = Wait(_ANSWER_S), self._absent()
        while absent and not wait.over:
            if wait.turn():
                self._look(op, phase)
                absent = self._absent()
        if absent:
            record = Record("timeout", self.rank, absent[0], phase, self.generation)
            return self._meeting.end(record, op, absent)
        words = (
            f"rank {self.rank} waited {self._seconds:g} s for rows of {named(self._others())} in phase "
            f"{phase!r}, generation {self.generation} (DG_COMM_TIMEOUT_S); all of them are there, so it is "
            "the network"
        )
        return self._meeting.end(Record("timeout", self.rank, -1, phase, self.generation, words), op)

    def _broken(self, error: Exception, op: str, phase: str, wait: Wait) -> CommError:
        """The error where a collective failed. Most often a rank is gone: its sockets close before its
        process ends, and one of another host is known by its silence alone, for the rest of the limit."""
        if isinstance(error, StoreSilent):
            return self._meeting.unreachable(error, self._others(), phase, op, self.generation)
        try:
            with self._meeting.within(wait.left):
                self._meeting.note("here")
                self._meeting.call_out()
                absent = self._absent()
                while absent:
                    if wait.turn():
                        self._look(op, phase)
                        absent = self._absent()
                    if wait.over and absent:
                        return self._unmoved(op, phase)
        except CommError as failure:
            return failure
        except RuntimeError as silent:  # the store was the lost rank's
            return self._meeting.unreachable(silent, self._others(), phase, op, self.generation)
        words = f"rows did not come through in phase {phase!r}, generation {self.generation}, though all "
        words += f"ranks are there; rank {self.rank} was told: {error}"
        return self._meeting.end(Record("failed", self.rank, -1, phase, self.generation, words), op)

    # The end ------------------------------------------------------------------------------------------------

    def _stand(self, op: str) -> OwnMemory:
        failure = self._meeting.ended(op)
        if failure is not None:
            raise failure.with_traceback(None)
        if self._memory is None:
            raise CommError(f"{op}: the exchange was closed", rank=self.rank)
        return self._memory

    def abort(self, op: str, phase: str) -> None:
        # Whoever calls it has an error of its own, which is the one to be seen.
        with contextlib.suppress(Exception):
            if self._memory is not None:
                self._meeting.end(Record("failed", self.rank, self.rank, phase, self.generation), op)

    def check(self) -> None:
        failure = self._meeting.ended("sym_buffer")
        if failure is not None:
            raise failure.with_traceback(None)

    def close(self) -> None:
        if self._memory is None:
            return
        # The store is not asked for failures of others: its host may be the one that is lost.
        memory, self._memory = self._memory, None
        self._mirrors.clear()
        self._queues.clear()
        self._leaving.clear()
        memory.close()


def _mirror(layout: SymmLayout, device: torch.device) -> Tensor:
    mirror = torch.empty(layout.input_bytes, dtype=torch.int8, device=device)
    layout["topk_idx"].view(mirror).fill_(-1)
    return mirror


def _rows(values: Tensor) -> Tensor:
    """uint8 ``[rows, bytes]`` over the same memory, for a contiguous tensor of any dtype."""
    return (values.flatten(1) if values.dim() > 1 else values[:, None]).view(torch.uint8)


def _bytes(numbers: Tensor) -> Tensor:
    """int64 ``[n]`` -> uint8 ``[n, 8]``."""
    return numbers.contiguous().view(-1, 1).view(torch.uint8)


def _integers(rows: Tensor) -> Tensor:
    """uint8 ``[n, 8]`` -> int64 ``[n]``."""
    # A copy in any case: a single row of wider ones counts as contiguous, wherever it begins.
    return rows.clone(memory_format=torch.contiguous_format).view(torch.int64)[:, 0]


PROVIDER = AllToAll()
