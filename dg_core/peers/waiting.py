"""Waiting for other ranks, and the words in which ranks tell each other why they cannot go on.

Shared by the meeting, whose ranks wait at a store, and the exchange of direct memory, whose ranks wait at
words of control memory: both end in the same errors.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from ..errors import CommError, CommTimeoutError, PeerLostError
from ..symm import OPS, PATHS, Published, RankFacts, alive

LIFE_S = 0.05  # seconds between two looks at the processes of missing ranks

ENDED_BY = ("", "timeout", "lost", "failed", "uniform")  # in an abort word: an index of this

_KINDS: dict[str, type[CommError]] = {"timeout": CommTimeoutError, "lost": PeerLostError}


@dataclass(frozen=True)
class Record:
    """Why an exchange has ended, as ranks tell each other: what they write into abort words.

    Attributes:
        cause: a name of ENDED_BY. rank: who noticed. peer: the rank that is missing, lost, failed, or on
            another path than rank 0; -1 where it is not one rank.
        words: what is said instead of the usual words, where there is room for it.
    """

    cause: str
    rank: int
    peer: int
    phase: str
    generation: int
    words: str = ""

    def error(
        self, op: str, me: int, *, seconds: float, missing: Iterable[int] = (), pid: int = 0
    ) -> CommError:
        """What rank ``me`` raises about it. ``seconds`` is the limit of waits, ``missing`` the ranks that
        ``me`` waits for itself, ``pid`` the process of ``peer`` where it is known."""
        where = f"in phase {self.phase!r}"
        if self.generation:
            where += f", generation {self.generation}"
        kind = _KINDS.get(self.cause, CommError)
        if self.words:
            words = self.words
        elif self.cause == "timeout" and self.peer == me:
            kind = CommError  # it has waited for nobody
            words = (
                f"rank {me} came too late: the others gave up waiting {where} (rank {self.rank} waited "
                f"{seconds:g} s, DG_COMM_TIMEOUT_S)"
            )
        elif self.cause == "timeout":
            ranks = named({self.peer, *missing})
            words = f"rank {self.rank} waited {seconds:g} s for {ranks} {where} (DG_COMM_TIMEOUT_S)"
        elif self.cause == "uniform":
            words = f"rank {self.peer} is not on the path of rank 0 {where} (DG_COMM_CHECK_UNIFORM)"
        elif self.cause == "lost":
            process = f" (pid {pid})" if pid else ""
            words = f"rank {self.peer}{process} is gone, noticed by rank {self.rank} {where}"
        else:
            words = f"rank {self.peer} failed {where}"
        return kind(f"{op}: {words}", rank=me, peer=self.peer, phase=self.phase, generation=self.generation)


def named(ranks: Iterable[int]) -> str:
    """``rank 3``, or ``ranks 1, 3``."""
    found = sorted(set(ranks))
    return f"rank{'s' if len(found) > 1 else ''} {', '.join(map(str, found))}"


def unlike(rank: int, published: Sequence[Published], generation: int) -> Record | None:
    """What ``rank`` says of the first rank whose path, operation or graph flag is not that of rank 0; None
    where all agree. The barrier itself compares nothing."""
    first = published[0]
    for peer, other in enumerate(published):
        if (other.path, other.op, other.graph) == (first.path, first.op, first.graph):
            continue
        told = [
            f"rank {who} runs {_named(OPS, words.op)} on the {_named(PATHS, words.path)} path"
            f"{' of a graph' if words.graph else ''} ({words.num_tokens} tokens, dispatch_num_tokens "
            f"{'not given' if words.dispatch < 0 else words.dispatch})"
            for who, words in ((0, first), (peer, other))
        ]
        words = f"{told[0]}, {told[1]}; give all ranks the same dispatch_num_tokens (DG_COMM_CHECK_UNIFORM)"
        return Record("uniform", rank, peer, "dispatch", generation, words)
    return None


def _named(names: Sequence[str], code: int) -> str:
    return names[code] if 0 <= code < len(names) else f"code {code}"


class Wait:
    """One wait with a limit: how long to sleep, and when to look after the processes of missing ranks.

    200 turns give the processor away only; then a turn sleeps 0.2 ms, growing to 2 ms, so that a late rank
    costs no core.
    """

    def __init__(
        self, seconds: float, spins: int = 200, shortest: float = 0.0002, longest: float = 0.002
    ) -> None:
        self._deadline = time.monotonic() + seconds
        self._spins, self._sleep, self._longest = spins, shortest, longest
        self._look = time.monotonic() + LIFE_S
        self.over = False

    @property
    def left(self) -> float:
        """Seconds to the deadline."""
        return max(0.0, self._deadline - time.monotonic())

    def turn(self) -> bool:
        """Sleep a little; True where it is time to look at processes. Sets ``over`` at the deadline."""
        if self._spins > 0:
            self._spins -= 1
            time.sleep(0)
        else:
            time.sleep(self._sleep)
            self._sleep = min(self._sleep * 1.25, self._longest)
        now = time.monotonic()
        self.over = now >= self._deadline
        if now < self._look and not self.over:
            return False
        self._look = now + LIFE_S
        return True


def gone(facts: Sequence[RankFacts], me: int, ranks: Iterable[int]) -> RankFacts | None:
    """The first of ``ranks`` on this host whose process has ended."""
    for rank in ranks:
        if rank < len(facts) and facts[rank].host == facts[me].host and not alive(facts[rank]):
            return facts[rank]
    return None
