"""Ranks that take the steps of a construction together.

Each step runs a piece of work on every rank and hands all results to all ranks. What one rank cannot do, all
hear of: every rank raises, and names the step, the rank and its reason.

Ranks meet at the store of their process group, not in a collective of it. A store knows exactly who has not
come, works before there is any memory to share, and leaves the group fit for use when somebody stays away;
a collective that lost a rank gives one survivor an error at once and has the other wait for the group's
limit.
"""

from __future__ import annotations

import contextlib
import json
import pickle
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from typing import TYPE_CHECKING, Any, TypeVar, cast

import torch.distributed as dist

from ..errors import ArgumentError, CommError
from ..symm import RankFacts
from .waiting import Record, Wait, gone

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store

T = TypeVar("T")

_MAKER = "get_symm_buffer_for_mega_moe"
# A store is asked over a socket: the first look after 1 ms, later ones every 10 ms.
_FIRST_LOOK_S, _LOOK_S = 0.001, 0.010


class Meeting:
    """The ranks of ``group`` (None: the default group where there is one, else this process alone).

    One Meeting is one attempt to make something: after a failure it stays ended, and another attempt is
    another Meeting. Attempts are counted in the store, so a rank that comes late to one that was given up
    raises too, and is level with the others at the next.

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
            raise ArgumentError(f"{_MAKER}: this process is not a rank of group {group!r}")
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
        self._store, self._number = store, 0
        if store is not None:
            try:
                attempt = store.add(f"dg_core/{name}/attempts/{rank}", 1)
            except RuntimeError as error:
                raise CommError(
                    f"{_MAKER}: rank {rank} cannot reach the group's store: {error}", rank=rank
                ) from error
            self._prefix = f"dg_core/{name}/{attempt}"

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

    def step(self, name: str, work: Callable[[], T], *, op: str = _MAKER, generation: int = 0) -> list[T]:
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
            words = f"step {name!r} failed on rank {self.rank}: {type(error).__name__}: {error}"
            record = Record("failed", self.rank, self.rank, name, generation, words)
            failure = self.end(record, op)
            if self._store is None and self.ranks > 1:
                self._gather((record, None))
            if isinstance(error, Exception):
                raise failure from error
            raise
        if self.ranks == 1:
            return [mine]
        if self._store is None:
            return self._through_the_group(mine, op)
        try:
            return self._collect(name, text, mine, op, generation)
        except CommError:
            raise
        except RuntimeError as error:  # what a store raises that cannot be reached
            raise self._unreachable(error, name, op, generation) from error

    def _key(self, number: int, rank: int) -> str:
        return f"{self._prefix}/{number}/{rank}"

    def _collect(self, name: str, text: bytes, mine: T, op: str, generation: int) -> list[T]:
        store = cast("Store", self._store)
        store.set(self._key(self._number, self.rank), text)  # type: ignore[arg-type]  # the stub lacks bytes
        if self._number > 2:
            # Every rank has come to the last step, so every rank has read the one before it.
            with contextlib.suppress(RuntimeError):  # not every kind of store can delete
                store.delete_key(self._key(self._number - 2, self.rank))
        results: dict[int, T] = {self.rank: mine}
        missing = [rank for rank in range(self.ranks) if rank != self.rank]
        wait = Wait(self.timeout_s, spins=0, shortest=_FIRST_LOOK_S, longest=_LOOK_S)
        while missing:
            if store.check([self._key(self._number, missing[0])]):
                rank = missing.pop(0)
                results[rank] = self._read(rank, name, op, generation)
                continue
            failure = self.ended(op)
            if failure is not None:
                raise failure.with_traceback(None)
            if wait.turn():
                self._look_after(missing, name, op, generation, wait.over)
        return [results[rank] for rank in range(self.ranks)]

    def _read(self, rank: int, name: str, op: str, generation: int) -> Any:
        theirs, value = pickle.loads(cast("Store", self._store).get(self._key(self._number, rank)))
        if theirs != name:
            words = (
                f"rank {self.rank} came to step {name!r}, rank {rank} to {theirs!r}; all ranks must make the "
                "same calls in the same order"
            )
            raise self.end(Record("failed", self.rank, rank, name, generation, words), op)
        return value

    def _look_after(self, missing: list[int], name: str, op: str, generation: int, over: bool) -> None:
        """Raise where a missing rank's process has ended, or where time is over."""
        store = cast("Store", self._store)
        lost = gone(self._facts, self.rank, missing)
        # It may have come before it ended, so the store is asked after the process.
        if lost is not None and not store.check([self._key(self._number, lost.rank)]):
            raise self.end(Record("lost", self.rank, lost.rank, name, generation), op)
        if over:
            absent = [rank for rank in missing if not store.check([self._key(self._number, rank)])]
            if absent:
                raise self.end(Record("timeout", self.rank, absent[0], name, generation), op, absent)

    def _unreachable(self, error: Exception, name: str, op: str, generation: int) -> CommError:
        """The store cannot be reached: most often because the rank that hosted it is gone."""
        others = [rank for rank in range(self.ranks) if rank != self.rank]
        wait = Wait(2.0)
        while not wait.over:  # a process takes a moment to end after its sockets have
            lost = gone(self._facts, self.rank, others) if wait.turn() else None
            if lost is not None:
                return self.end(Record("lost", self.rank, lost.rank, name, generation), op)
        words = f"rank {self.rank} cannot reach the group's store in step {name!r}: {error}"
        return self.end(Record("failed", self.rank, self.rank, name, generation, words), op)

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

    def end(self, record: Record, op: str = _MAKER, missing: Sequence[int] = ()) -> CommError:
        """End the attempt for all ranks; the error that this rank raises. The first record stands."""
        if self.failure is None:
            if self._store is not None:
                told = json.dumps({"record": asdict(record), "missing": list(missing)})
                with contextlib.suppress(RuntimeError):  # who cannot be told finds out by itself
                    self._store.compare_set(f"{self._prefix}/abort", "", told)
            self.failure = self._error(record, op, missing)
        return self.failure

    def ended(self, op: str = _MAKER) -> CommError | None:
        """What has ended the attempt on this rank or another; None while it goes on."""
        if self.failure is None and self._store is not None:
            with contextlib.suppress(RuntimeError):
                if self._store.check([f"{self._prefix}/abort"]):
                    told = json.loads(self._store.get(f"{self._prefix}/abort"))
                    record = Record(**told["record"])
                    if self.rank in told["missing"]:
                        record = replace(record, peer=self.rank)
                    self.failure = self._error(record, op, told["missing"])
        return self.failure

    def _error(self, record: Record, op: str, missing: Sequence[int]) -> CommError:
        pid = self._facts[record.peer].pid if self._facts else 0
        return record.error(op, self.rank, seconds=self.timeout_s, missing=missing, pid=pid)


def _store_of(group: dist.ProcessGroup) -> Store | None:
    """The store that a group was made with; None where this torch does not tell."""
    find = getattr(dist.distributed_c10d, "_get_process_group_store", None)
    try:
        return None if find is None else find(group)
    except (KeyError, AttributeError, RuntimeError):
        return None
