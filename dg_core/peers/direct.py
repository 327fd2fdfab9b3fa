"""The exchange of ranks that can read and write each other's memory: words in control memory, nothing else.

A word has one writer. A rank that has arrived stores the generation into its own word at every rank, and then
looks at the words that the others have stored here; it never reads far away to wait. Words are 4 bytes and
aligned, so a store is seen whole or not at all.
"""

from __future__ import annotations

import contextlib
import ctypes
import threading
import zlib
from collections.abc import Sequence
from dataclasses import astuple, replace
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor

from ..errors import CommError
from ..symm import OPS, PHASES, Memory, Published, RankFacts
from .waiting import ENDED_BY, Record, Wait, gone, uniform

if TYPE_CHECKING:
    from ..mega.layout import Slice, SymmLayout
    from .meeting import Meeting

_lock = threading.Lock()


def fence() -> None:
    """Order this thread's loads and stores before it against those after it, for other processes too.

    Taking and giving back a lock is a release and an acquire; x86 keeps stores in order anyway, ARM does not.
    """
    with _lock:
        pass


def words_of(control: Tensor, part: Slice) -> memoryview | Tensor:
    """A region of integers in control memory, flat: ``words[i]`` reads one, ``words[i] = n`` stores one.

    On a CPU a view of the memory itself. On a device a tensor: each access is a copy, in order with the
    stream's kernels.
    """
    if control.device.type != "cpu":
        return part.view(control).reshape(-1)
    code = {torch.int32: "i", torch.int64: "q"}[part.dtype]
    place = (ctypes.c_byte * part.nbytes).from_address(control.data_ptr() + part.offset)
    return memoryview(place).cast("B").cast(code)  # type: ignore[call-overload, no-any-return]


def _signed(number: int, bits: int = 32) -> int:
    """``number`` modulo 2^bits, as a signed integer of so many bits holds it."""
    half = 1 << (bits - 1)
    return (number + half) % (1 << bits) - half


def exchange(
    memory: Memory,
    layout: SymmLayout,
    meeting: Meeting,
    facts: Sequence[RankFacts],
    settings: Any,
    reason: str,
) -> DirectExchange:
    """The exchange of a rank whose memory is mapped; all ranks must be through before one begins."""
    return DirectExchange(memory, layout, meeting.rank, facts, settings, reason)


class DirectExchange:
    """An ``Exchange`` over direct memory; needs no process group."""

    direct = True

    def __init__(
        self,
        memory: Memory,
        layout: SymmLayout,
        rank: int,
        facts: Sequence[RankFacts],
        settings: Any,
        reason: str,
    ) -> None:
        self.rank, self.ranks = rank, len(facts)
        self.provider, self.reason = memory.name, reason
        self.generation = 0
        self.failure: CommError | None = None
        self._memory: Memory | None = memory
        self._facts = tuple(facts)
        self._seconds, self._uniform = float(settings.timeout_s), bool(settings.check_uniform)
        everyone = range(self.ranks)
        self._data = [memory.peer_data(r)[: layout.input_bytes] for r in everyone]
        self._combine = [layout["combine"].view(memory.peer_data(r)) for r in everyone]
        controls = [memory.peer_control(r) for r in everyone]
        self._keep = controls  # words on a CPU are addresses, so somebody has to hold the memory
        self._arrive = [words_of(control, layout["arrive"]) for control in controls]
        self._done = [words_of(control, layout["done"]) for control in controls]
        self._published = [words_of(control, layout["published"]) for control in controls]
        self._abort = [words_of(control, layout["abort"]) for control in controls]
        self._row = layout["published"].shape[1]
        self._introduce(layout, memory)

    def _introduce(self, layout: SymmLayout, memory: Memory) -> None:
        """The words that the owner writes once: addresses for kernels, and who this process is."""
        own, control = self._facts[self.rank], self._keep[self.rank]
        for name, pointers in zip(("peer_data", "peer_control"), memory.pointers, strict=True):
            words = words_of(control, layout[name])
            for r, address in enumerate(pointers):
                words[r] = _signed(address, 64)
        host = zlib.crc32(own.host.encode()) << 31 | zlib.adler32(own.host.encode()) >> 1  # 63 bits
        words = words_of(control, layout["process"])
        for i, word in enumerate((own.pid, own.start_ticks, host)):
            words[i] = word

    # Calls --------------------------------------------------------------------------------------------------

    def begin(self, op: str, words: Published) -> tuple[Published, ...]:
        published = self._arrive_together(op, "dispatch", words)
        if self._uniform:
            # All ranks compare the same words, so all raise or none does.
            failure = uniform(op, self.rank, published)
            if failure is not None:
                self.failure = failure
                raise failure
        return published

    def fetch(self) -> None:
        pass

    def inputs(self, rank: int) -> Tensor:
        return self._data[rank]

    def put(self, rank: int, slots: Tensor, tokens: Tensor, rows: Tensor) -> None:
        self._combine[rank][slots.long(), tokens.long()] = rows

    def finish(self, op: str) -> None:
        self._stand(op)
        fence()
        for words in self._done:
            words[self.rank] = _signed(self.generation)
        self._wait(op, "combine", self._done[self.rank])

    def barrier(self, op: str) -> None:
        self._arrive_together(op, "barrier", Published(0, 0, 0, -1, OPS.index("barrier"), 0))

    def _arrive_together(self, op: str, phase: str, words: Published) -> tuple[Published, ...]:
        self._stand(op)
        self.generation += 1
        number = _signed(self.generation)
        # Two rows in turn: a rank may begin its next call while a slower one still reads this one's words.
        at = (self.generation & 1) * self._row
        own = self._published[self.rank]
        for i, word in enumerate(astuple(replace(words, generation=number))):
            own[at + i] = word
        fence()
        for arrived in self._arrive:
            arrived[self.rank] = number
        self._wait(op, phase, self._arrive[self.rank])
        return tuple(Published(*(int(there[at + i]) for i in range(6))) for there in self._published)

    def _wait(self, op: str, phase: str, words: memoryview | Tensor) -> None:
        wait = Wait(self._seconds)
        while True:
            missing = self._missing(words)
            if not missing:
                fence()
                return
            self._look_for_abort(op, missing)
            if not wait.turn():
                continue
            lost = gone(self._facts, self.rank, missing)
            # A rank may store its word and end; so its word is read again after its process.
            if lost is not None and lost.rank in self._missing(words):
                raise self._end(Record("lost", self.rank, lost.rank, phase, self.generation), op)
            missing = self._missing(words)
            if wait.over and missing:
                record = Record("timeout", self.rank, missing[0], phase, self.generation)
                raise self._end(record, op, missing)

    def _missing(self, words: memoryview | Tensor) -> list[int]:
        return [r for r in range(self.ranks) if _signed(int(words[r]) - self.generation) < 0]

    # The end ------------------------------------------------------------------------------------------------

    def _stand(self, op: str) -> None:
        self._look_for_abort(op, ())
        if self._memory is None:
            raise CommError(f"{op}: the exchange was closed", rank=self.rank)

    def _look_for_abort(self, op: str, missing: Sequence[int]) -> None:
        """Raise what has ended the exchange, here or at another rank."""
        if self.failure is None and self._memory is not None:
            own = self._abort[self.rank]
            code = int(own[0])
            if code:
                fence()
                rank, peer, phase, generation = (int(own[i]) for i in range(1, 5))
                record = Record(ENDED_BY[code], rank, peer, PHASES[phase], generation)
                self.failure = self._error(record, op, missing if record.cause == "timeout" else ())
        if self.failure is not None:
            raise self.failure.with_traceback(None)

    def _end(self, record: Record, op: str, missing: Sequence[int] = ()) -> CommError:
        """End the exchange for every rank; each is told that it is the missing one where it is."""
        if self.failure is None:
            self.failure = self._error(record, op, missing)
        for r, words in enumerate(self._abort):
            if int(words[0]):
                continue
            peer = r if r in missing else record.peer
            told = (record.rank, peer, PHASES.index(record.phase), _signed(record.generation))
            for i, word in enumerate(told):
                words[i + 1] = word
            fence()
            words[0] = ENDED_BY.index(record.cause)
        return self.failure

    def _error(self, record: Record, op: str, missing: Sequence[int]) -> CommError:
        pid = self._facts[record.peer].pid
        return record.error(op, self.rank, seconds=self._seconds, missing=missing, pid=pid)

    def abort(self, op: str, phase: str) -> None:
        if self.failure is None and self._memory is not None:
            self._end(Record("failed", self.rank, self.rank, phase, self.generation), op)

    def check(self) -> None:
        self._look_for_abort("sym_buffer", ())

    def close(self) -> None:
        if self._memory is None:
            return
        with contextlib.suppress(CommError):  # it stands in ``failure``
            self.check()
        memory, self._memory = self._memory, None
        # Words are addresses: none may outlive the memory.
        for part in (self._arrive, self._done, self._published, self._abort):
            part.clear()
        self._data.clear()
        self._combine.clear()
        self._keep = cast("list[Tensor]", [])
        memory.close()
