"""The exchange of ranks that can read and write each other's memory: words in control memory, nothing else.

A rank that has arrived stores the generation into its own word at every rank, and then looks at the words
that the others have stored here; it never reads far away to wait. Words are 4 bytes and aligned, so a store
is seen whole or not at all. Each has one writer, with one exception: any rank may tell any other that they
cannot go on. That is told in one aligned store of 8 bytes, so of two ranks that do so at once, one is heard.

A backend's kernels may do the same by themselves: they find peers by the addresses in control memory, and
count generations in the same word as this class.
"""

from __future__ import annotations

import contextlib
import ctypes
import threading
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import astuple, replace
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor

from ..errors import CommError
from ..symm import LOCAL_WORDS, OPS, PHASES, Memory, Published, RankFacts
from .waiting import ENDED_BY, LIFE_S, Record, Wait, gone, unlike

if TYPE_CHECKING:
    from ..mega.layout import Slice, SymmLayout
    from .meeting import Meeting

_GENERATION = LOCAL_WORDS.index("generation")
_lock = threading.Lock()


def fence() -> None:
    """Order this thread's loads and stores before it against those after it, for other processes too.

    Taking and giving back a lock is a release and an acquire; x86 keeps stores in order anyway, ARM does not.
    """
    with _lock:
        pass


def words_of(control: Tensor, part: Slice, dtype: torch.dtype | None = None) -> memoryview | Tensor:
    """A region of integers in control memory, flat: ``words[i]`` reads one, ``words[i] = n`` stores one.
    ``dtype``: int32 or int64, where the words are to be of another size than the region's.

    On a CPU a view of the memory itself. On a device a tensor: each access is a copy, in order with the
    stream's kernels.
    """
    dtype = dtype or part.dtype
    if control.device.type != "cpu":
        return part.view(control).reshape(-1).view(dtype)
    code = {torch.int32: "i", torch.int64: "q"}[dtype]
    place = (ctypes.c_byte * part.nbytes).from_address(control.data_ptr() + part.offset)
    return memoryview(place).cast("B").cast(code)  # type: ignore[call-overload, no-any-return]


def packed(record: Record) -> int:
    """A record in 64 bits: cause (3), rank (7), peer (7) and phase (8) in the low half, which is not 0 as no
    cause is; the generation in the high one."""
    low = ENDED_BY.index(record.cause) | record.rank << 3 | record.peer << 10
    low |= PHASES.index(record.phase) << 17
    return _signed((record.generation % 2**32) << 32 | low, 64)


def unpacked(word: int) -> Record:
    """What ``packed`` was given, without its words."""
    cause, phase = ENDED_BY[word & 7], PHASES[word >> 17 & 255]
    return Record(cause, word >> 3 & 127, word >> 10 & 127, phase, _signed(word >> 32))


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
    """An ``Exchange`` over direct memory; needs no process group.

    Attributes:
        seconds, uniform: the limit of waits, and whether ranks' paths are compared, for kernels that open
            calls.
    """

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
        self.failure: CommError | None = None
        self._memory: Memory | None = memory
        self._facts = tuple(facts)
        self.seconds, self.uniform = float(settings.timeout_s), bool(settings.check_uniform)
        everyone = range(self.ranks)
        self._data = [memory.peer_data(r)[: layout.input_bytes] for r in everyone]
        self._combine = [layout["combine"].view(memory.peer_data(r)) for r in everyone]
        controls = [memory.peer_control(r) for r in everyone]
        self._keep = controls  # words on a CPU are addresses, so somebody has to hold the memory
        self._arrive = [words_of(control, layout["arrive"]) for control in controls]
        self._done = [words_of(control, layout["done"]) for control in controls]
        self._published = [words_of(control, layout["published"]) for control in controls]
        self._abort = [words_of(control, layout["abort"], torch.int64) for control in controls]
        self._local: memoryview | Tensor | list[int] = words_of(controls[rank], layout["local"])
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

    @property
    def generation(self) -> int:
        return int(self._local[_GENERATION])

    @generation.setter
    def generation(self, number: int) -> None:
        self._local[_GENERATION] = _signed(number)

    # Calls --------------------------------------------------------------------------------------------------

    def begin(self, op: str, words: Published) -> tuple[Published, ...]:
        published = self._arrive_together(op, "dispatch", words)
        if self.uniform:
            record = unlike(self.rank, published, self.generation)
            if record is not None:
                # Ranks that do not compare would wait for this one, so they are told.
                raise self._end(record, op)
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
            words[self.rank] = self.generation
        self._wait(op, "combine", self._done[self.rank])

    def barrier(self, op: str) -> None:
        self._arrive_together(op, "barrier", Published(0, 0, 0, -1, OPS.index("barrier"), 0))

    def _arrive_together(self, op: str, phase: str, words: Published) -> tuple[Published, ...]:
        self._stand(op)
        self.generation += 1
        number = self.generation
        # Two rows in turn: a rank may begin its next call while a slower one still reads this one's words.
        at = (self.generation & 1) * self._row
        own = self._published[self.rank]
        for i, word in enumerate(astuple(replace(words, generation=number))):
            own[at + i] = word
        fence()
        for arrived in self._arrive:
            arrived[self.rank] = number
        self._wait(op, phase, self._arrive[self.rank])
        return self._published_in(self.generation)

    def _published_in(self, generation: int) -> tuple[Published, ...]:
        at = (generation & 1) * self._row
        return tuple(Published(*(int(there[at + i]) for i in range(6))) for there in self._published)

    def _wait(self, op: str, phase: str, words: memoryview | Tensor) -> None:
        wait = Wait(self.seconds)
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
            word = int(self._abort[self.rank][0])
            if word:
                fence()
                record = unpacked(word)
                if record.cause == "uniform":
                    # All have published, or nobody could have compared; it is said in the same words here.
                    told = self._published_in(record.generation)
                    record = unlike(record.rank, told, record.generation) or record
                self.failure = self._error(record, op, missing if record.cause == "timeout" else ())
        if self.failure is not None:
            raise self.failure.with_traceback(None)

    def _end(self, record: Record, op: str, missing: Sequence[int] = ()) -> CommError:
        """End the exchange for every rank; each is told that it is the missing one where it is."""
        if self.failure is None:
            self.failure = self._error(record, op, missing)
        fence()
        for r, word in enumerate(self._abort):
            # A word of a device that is in error can be neither read nor written; the other ranks' can.
            with contextlib.suppress(Exception):
                if not int(word[0]):
                    word[0] = packed(replace(record, peer=r if r in missing else record.peer))
        return self.failure

    def _error(self, record: Record, op: str, missing: Sequence[int]) -> CommError:
        pid = self._facts[record.peer].pid
        return record.error(op, self.rank, seconds=self.seconds, missing=missing, pid=pid)

    def abort(self, op: str, phase: str) -> None:
        # Whoever calls it has an error of its own, which is the one to be seen.
        with contextlib.suppress(Exception):
            if self.failure is None and self._memory is not None:
                self._end(Record("failed", self.rank, self.rank, phase, self.generation), op)

    def check(self, op: str = "sym_buffer") -> None:
        self._look_for_abort(op, ())

    @contextlib.contextmanager
    def watching(self, op: str, *phases: str) -> Iterator[None]:
        """While kernels on this processor wait for ranks, in the phases dispatch and combine or one of them:
        end the exchange where a rank that is missing there has no process any more. Kernels cannot see that,
        but they see the exchange end. Ask ``check`` afterwards."""
        over = threading.Event()

        def look() -> None:
            while not over.wait(LIFE_S) and self.failure is None:
                for phase in phases:
                    words = {"dispatch": self._arrive, "combine": self._done}[phase][self.rank]
                    lost = gone(self._facts, self.rank, self._missing(words))
                    if lost is not None and lost.rank in self._missing(words):
                        self._end(Record("lost", self.rank, lost.rank, phase, self.generation), op)

        if self.ranks == 1:
            yield
            return
        watcher = threading.Thread(target=look, daemon=True)
        watcher.start()
        try:
            yield
        finally:
            over.set()
            watcher.join()

    def close(self) -> None:
        if self._memory is None:
            return
        # A failure stands in ``failure`` from now on; a device in error has no words that could be read.
        with contextlib.suppress(Exception):
            self.check()
        last = [0] * len(LOCAL_WORDS)
        with contextlib.suppress(Exception):
            last[_GENERATION] = self.generation  # which can still be asked for
        self._local = last
        memory, self._memory = self._memory, None
        # Words are addresses: none may outlive the memory.
        for part in (self._arrive, self._done, self._published, self._abort):
            part.clear()
        self._data.clear()
        self._combine.clear()
        self._keep = cast("list[Tensor]", [])
        try:
            memory.close()
        except Exception:
            if self.failure is None:  # else that is what the caller is to hear
                raise
