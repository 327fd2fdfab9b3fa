"""Ranks that take the steps of a construction together.

Each step runs a piece of work on every rank and hands all results to all ranks. What one rank cannot do, all
hear of: every rank raises, and names the step, the rank and its reason.

Ranks meet at the store of their process group, not in a collective of it. A store knows exactly who has not
come, works before there is any memory to share, and leaves the group fit for use when somebody stays away;
a collective that lost a rank gives one survivor an error at once and has the other wait for the group's
limit. Its calls go over a ``Line``, so that they end where its host is stopped.
"""

from __future__ import annotations

import contextlib
import json
import pickle
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from typing import TYPE_CHECKING, Any, TypeVar

import torch.distributed as dist

from ..errors import ArgumentError, CommError, CommTimeoutError
from ..symm import MAKER, RankFacts
from .line import Line, StoreSilent
from .waiting import Record, Wait, gone, named

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store

T = TypeVar("T")

# A store is asked over a socket: the first look after 1 ms, later ones every 10 ms.
_FIRST_LOOK_S, _LOOK_S = 0.001, 0.010


class Meeting:
    """The ranks of ``group`` (None: the default group where there is one, else this process alone).

    One Meeting is one attempt to make something: after a failure it stays ended, and another attempt is
    another Meeting. Each rank counts its attempts in the store, so a rank that comes late to one that was
    given up raises too, and is level with the others at the next. One that missed several goes past all that
    gave it up; see ``_attempt``.

    Attributes:
        rank, ranks: of this process, and how many. group: None for a process alone.
        timeout_s: seconds that a step waits for the others.
        failure: what has ended the attempt.
    """

    def __init__(self, group: dist.ProcessGroup | None = None, timeout_s: float = 60) -> None:
        if group is None and dist.is_available() and dist.is_initialized():
            group = dist.group.WORLD
        if group is None:
            self._enter(None, "", 0, 1, timeout_s)
            return
        rank = dist.get_rank(group)
        if rank < 0:
            raise ArgumentError(f"{MAKER}: this process is not a rank of group {group!r}")
        ranks = dist.get_world_size(group)
        self._enter(_store_of(group), group.group_name, rank, ranks, timeout_s, group)

    def _enter(
        self,
        store: Store | None,
        name: str,
        rank: int,
        ranks: int,
        timeout_s: float,
        group: dist.ProcessGroup | None = None,
    ) -> None:
        self.group = group
        self.rank, self.ranks, self.timeout_s = rank, ranks, float(timeout_s)
        self.failure: CommError | None = None
        self._facts: Sequence[RankFacts] = ()
        self._number = 0
        self._notes: list[tuple[int, str]] = []  # keys of notes that were set, each with its step
        self._line = None if store is None else Line(store, self.timeout_s)
        if store is not None:
            try:
                with self._asking().within(self.timeout_s):
                    self._prefix = f"dg_core/{name}/{self._attempt(f'dg_core/{name}')}"
            except RuntimeError as error:
                kind = CommTimeoutError if isinstance(error, StoreSilent) else CommError
                raise kind(
                    f"{MAKER}: rank {rank} cannot reach the group's store: {error}", rank=rank
                ) from error

    def _attempt(self, base: str) -> int:
        """The number of the attempt that this rank comes to: its own next one, as a rule.

        Where the others gave it up in that one, or in later ones, it goes on to the one behind the last of
        these if somebody is there already, or if it was told so the last time: then all are trying again.
        """
        line = self._asking()
        counter, told = f"{base}/attempts/{self.rank}", f"{base}/told/{self.rank}"
        own = number = line.add(counter, 1)
        if not line.check(f"{base}/{own}/abort"):
            return own
        newest = max(line.add(f"{base}/attempts/{rank}", 0) for rank in range(self.ranks))
        for last in range(newest, own - 1, -1):
            if self._gave_up(f"{base}/{last}/abort"):
                before = line.check(told) and int(line.get(told)) == own - 1
                number = last + 1 if before or newest > last else last
                line.add(counter, number - own)
                break
        if line.check(f"{base}/{number}/abort"):
            line.set(told, str(number))
        return number

    def _gave_up(self, key: str) -> bool:
        """Whether an attempt ended because this rank did not come."""
        line = self._asking()
        return line.check(key) and self.rank in json.loads(line.get(key))["missing"]

    def _asking(self) -> Line:
        assert self._line is not None, "ranks have no store"
        return self._line

    @property
    def store(self) -> Store | None:
        """Where the ranks meet; None where they have only a group."""
        return None if self._line is None else self._line.store

    @property
    def prefix(self) -> str:
        """What the keys of this attempt begin with; only where there is a store."""
        return self._prefix

    @classmethod
    def alone(cls, timeout_s: float = 60) -> Meeting:
        """A world of one, whatever groups there are."""
        return cls.over(None, 0, 1, timeout_s)

    @classmethod
    def over(
        cls, store: Store | None, rank: int, ranks: int, timeout_s: float = 60, name: str = "store"
    ) -> Meeting:
        """Ranks that share a store and no process group."""
        self = cls.__new__(cls)
        self._enter(store, name, rank, ranks, timeout_s)
        return self

    def know(self, facts: Sequence[RankFacts]) -> None:
        """Tell it of the ranks' processes: from now on a step also ends when one of them does."""
        self._facts = tuple(facts)

    def step(self, name: str, work: Callable[[], T], *, op: str = MAKER, generation: int = 0) -> list[T]:
        """Run ``work`` on every rank; all results, in order of ranks. They travel pickled.

        Raises:
            CommError: ``work`` failed on a rank; the same on every rank.
            CommTimeoutError: ranks did not come within ``timeout_s``; names all of them.
            PeerLostError: the process of a rank that had not come has ended.
        """
        failure = self.ended(op)
        if failure is not None:
            raise failure.with_traceback(None)
        self._number += 1
        try:
            mine = work()
            text = pickle.dumps((name, mine)) if self.ranks > 1 else b""
        except BaseException as error:
            if error is self.failure:  # the work waited for other ranks, and the attempt has ended
                raise
            words = f"step {name!r} failed on rank {self.rank}: {type(error).__name__}: {error}"
            record = Record("failed", self.rank, self.rank, name, generation, words)
            failure = self.end(record, op)
            if self._line is None and self.ranks > 1:
                self._gather((record, None))
            if isinstance(error, Exception):
                raise failure from error
            raise
        if self.ranks == 1:
            return [mine]
        if self._line is None:
            return self._through_the_group(mine, op)
        missing = [rank for rank in range(self.ranks) if rank != self.rank]
        try:
            with self._line.within(self.timeout_s):
                return self._collect(name, text, mine, missing, op, generation)
        except CommError:
            raise
        except RuntimeError as error:  # what a store raises that cannot be reached
            raise self.unreachable(error, missing, name, op, generation) from error

    def _key(self, number: int, rank: int) -> str:
        return f"{self._prefix}/{number}/{rank}"

    def _collect(
        self, name: str, text: bytes, mine: T, missing: list[int], op: str, generation: int
    ) -> list[T]:
        """The results of all ranks; those that have not come yet are in ``missing``, which is emptied."""
        line = self._asking()
        line.set(self._key(self._number, self.rank), text)
        if self._number > 2:
            # Every rank has come to the last step, so every rank has read the one before it.
            self._forget(self._number - 2)
        results: dict[int, T] = {self.rank: mine}
        wait = Wait(self.timeout_s, spins=0, shortest=_FIRST_LOOK_S, longest=_LOOK_S)
        while missing:
            if line.check(self._key(self._number, missing[0])):
                rank = missing[0]
                results[rank] = self._read(rank, name, op, generation)
                missing.pop(0)
                continue
            failure = self.ended(op)
            if failure is not None:
                raise failure.with_traceback(None)
            if wait.turn():
                self._look_after(missing, name, op, generation, wait.over)
        return [results[rank] for rank in range(self.ranks)]

    def _forget(self, number: int) -> None:
        old = [key for step, key in self._notes if step <= number]
        self._notes = [(step, key) for step, key in self._notes if step > number]
        for key in (self._key(number, self.rank), *old):
            with contextlib.suppress(RuntimeError):  # not every kind of store can delete
                self._asking().delete_key(key)

    def _read(self, rank: int, name: str, op: str, generation: int) -> Any:
        theirs, value = pickle.loads(self._asking().get(self._key(self._number, rank)))
        if theirs != name:
            words = (
                f"rank {self.rank} came to step {name!r}, rank {rank} to {theirs!r}; all ranks must make the "
                "same calls in the same order"
            )
            raise self.end(Record("failed", self.rank, rank, name, generation, words), op)
        return value

    def _look_after(self, missing: list[int], name: str, op: str, generation: int, over: bool) -> None:
        """Raise where a missing rank's process has ended, or where time is over."""
        line = self._asking()
        lost = gone(self._facts, self.rank, missing)
        # It may have come before it ended, so the store is asked after the process.
        if lost is not None and not line.check(self._key(self._number, lost.rank)):
            raise self.end(Record("lost", self.rank, lost.rank, name, generation), op)
        if over:
            absent = [rank for rank in missing if not line.check(self._key(self._number, rank))]
            if absent:
                raise self.end(Record("timeout", self.rank, absent[0], name, generation), op, absent)

    def unreachable(
        self, error: Exception, missing: Sequence[int], name: str, op: str, generation: int
    ) -> CommError:
        """The error where the store does not answer, or cannot be reached: most often because the rank that
        hosted it is gone. ``missing`` are the ranks that were not seen there yet."""
        others = [rank for rank in range(self.ranks) if rank != self.rank]
        silent = isinstance(error, StoreSilent)
        wait = Wait(0.1 if silent else 2.0)
        while not wait.over:  # a process takes a moment to end after its sockets have
            lost = gone(self._facts, self.rank, others) if wait.turn() else None
            if lost is not None:
                return self.end(Record("lost", self.rank, lost.rank, name, generation), op)
        if silent:
            unseen = f"; not seen there: {named(missing)}" if missing else ""
            words = (
                f"rank {self.rank} waited {self.timeout_s:g} s for an answer of the group's store in phase "
                f"{name!r}{f', generation {generation}' if generation else ''} (DG_COMM_TIMEOUT_S){unseen}"
            )
            peer = missing[0] if len(missing) == 1 else -1
            return self.end(Record("timeout", self.rank, peer, name, generation, words), op)
        words = f"rank {self.rank} cannot reach the group's store in step {name!r}: {error}"
        return self.end(Record("failed", self.rank, self.rank, name, generation, words), op)

    # Inside a step ------------------------------------------------------------------------------------------

    def within(self, seconds: float) -> contextlib.AbstractContextManager[None]:
        """Calls of the store inside end about then; see ``Line``."""
        return self._asking().within(seconds)

    def note(self, what: str) -> None:
        """Say something about the step that this rank has come to last, or is at."""
        key = f"{self._key(self._number, self.rank)}/{what}"
        self._notes.append((self._number, key))
        self._asking().set(key, b"1")

    def noted(self, what: str, rank: int) -> bool:
        """Whether ``rank`` has said it of the same step."""
        return self._asking().check(f"{self._key(self._number, rank)}/{what}")

    def look(self, name: str, ranks: Sequence[int], what: str, over: bool, op: str = MAKER) -> None:
        """Raise what has ended the attempt, or a rank whose process has ended; where time is ``over``, also
        the ranks that have not noted ``what``, or all others where all have."""
        failure = self.ended(op)
        if failure is not None:
            raise failure.with_traceback(None)
        others = [rank for rank in ranks if rank != self.rank]
        lost = gone(self._facts, self.rank, others)
        if lost is not None:
            raise self.end(Record("lost", self.rank, lost.rank, name, 0), op)
        if over:
            absent = [rank for rank in others if not self.noted(what, rank)] or others
            raise self.end(Record("timeout", self.rank, absent[0], name, 0), op, absent)

    def call_out(self) -> None:
        """Ask all ranks of the step to say that they are there."""
        self._asking().set(f"{self._prefix}/{self._number}/call", b"1")

    def called_out(self) -> bool:
        """Whether a rank has asked so."""
        return self._asking().check(f"{self._prefix}/{self._number}/call")

    # Without a store ----------------------------------------------------------------------------------------

    def _gather(self, mine: tuple[Record | None, Any]) -> list[tuple[Record | None, Any]]:
        results: list[Any] = [None] * self.ranks
        dist.all_gather_object(results, mine, group=self.group)
        return results

    def _through_the_group(self, mine: T, op: str) -> list[T]:
        """The same without a store, by a collective of the group: its own limit of time holds."""
        results = self._gather((None, mine))
        for record, _ in results:
            if record is not None:
                raise self.end(record, op)
        return [value for _, value in results]

    # The end of an attempt ----------------------------------------------------------------------------------

    def end(self, record: Record, op: str = MAKER, missing: Sequence[int] = ()) -> CommError:
        """End the attempt for all ranks; the error that this rank raises. The first record stands."""
        if self.failure is None and self._line is not None:
            told = json.dumps({"record": asdict(record), "missing": list(missing)})
            with contextlib.suppress(RuntimeError):  # who cannot be told finds out by itself
                stands = self._line.compare_set(f"{self._prefix}/abort", "", told)
                self.failure = self._told(stands, op)
        if self.failure is None:
            self.failure = self._error(record, op, missing)
        return self.failure

    def ended(self, op: str = MAKER) -> CommError | None:
        """What has ended the attempt on this rank or another; None while it goes on."""
        if self.failure is None and self._line is not None:
            with contextlib.suppress(RuntimeError):
                if self._line.check(f"{self._prefix}/abort"):
                    self.failure = self._told(self._line.get(f"{self._prefix}/abort"), op)
        return self.failure

    def _told(self, text: bytes, op: str) -> CommError:
        """The error of this rank about what a rank, itself or another, has written."""
        told = json.loads(text)
        record = Record(**told["record"])
        if self.rank in told["missing"]:
            record = replace(record, peer=self.rank)
        return self._error(record, op, told["missing"])

    def _error(self, record: Record, op: str, missing: Sequence[int]) -> CommError:
        pid = self._facts[record.peer].pid if self._facts and record.peer >= 0 else 0
        return record.error(op, self.rank, seconds=self.timeout_s, missing=missing, pid=pid)


def _store_of(group: dist.ProcessGroup) -> Store | None:
    """The store that a group was made with; None where this torch does not tell."""
    find = getattr(dist.distributed_c10d, "_get_process_group_store", None)
    try:
        return None if find is None else find(group)
    except (KeyError, AttributeError, RuntimeError):
        return None
