"""Memory that several ranks see, and calls that they make together: the interface, the choice, the failures.

A *provider* gives every rank two pieces of memory, data and control, and where it can a mapping of every
other rank's. An *exchange* runs on top: it counts generations, waits for ranks, moves rows where memory
cannot be mapped, and is the one place that knows why ranks cannot go on. Stages see the exchange only.

A provider is the module ``dg_core.peers.<name>`` (``-`` written ``_``) with an object ``PROVIDER``. Where its
memory is not ``direct`` the module also has ``exchange(memory, layout, meeting, facts, settings, reason)``;
direct memory is served by ``dg_core.peers.direct``. Both are found by name, never imported from here.
"""

from __future__ import annotations

import importlib
import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor

from . import config
from .errors import ArgumentError, BackendUnavailable, CommError, DeviceError

if TYPE_CHECKING:
    from .backend import Availability
    from .mega.layout import SymmLayout
    from .peers.meeting import Meeting

__all__ = [
    "LOCAL_WORDS",
    "MAKER",
    "OPS",
    "PATHS",
    "PHASES",
    "PROVIDERS",
    "Exchange",
    "Memory",
    "Provider",
    "Published",
    "RankFacts",
    "alive",
    "choose",
    "connect",
    "local_facts",
    "obstacle",
    "probe",
    "start_ticks",
]

PROVIDERS = ("torch-symmetric", "cuda-ipc", "hip-ipc", "posix-shm", "all-to-all")
# The index of a phase, a path or an operation is its code in control memory and in messages between ranks.
PHASES = (
    "agree",
    "choose",
    "allocate",
    "map",
    "zero",
    "ready",
    "dispatch",
    "k1",
    "k2",
    "k3",
    "combine",
    "barrier",
)
PATHS = ("persistent", "staged")
OPS = (
    "barrier",
    "fp8_w8a8_mega_moe",
    "fp8_block_mega_moe",
    "fp8_fp4_mega_moe",
    "bf16_mega_moe",
    "mega_moe_k1",
    "mega_moe_k2",
    "mega_moe_k3",
)
# The words of ``local``, a rank's own, by index. The exchange and kernels count generations in one word, so
# that either may open the next call; the others are a kernel's: whether the call has ended early, blocks that
# have met and how often they did, pieces of work that are taken, and blocks that are through.
LOCAL_WORDS = ("generation", "stop", "blocks_arrived", "blocks_sense", "l1_items", "l2_items", "finished")

#: What a user calls to have memory shared, so what errors of construction speak of.
MAKER = "get_symm_buffer_for_mega_moe"


@dataclass(frozen=True)
class RankFacts:
    """What others need to know of a rank's process.

    Attributes:
        start_ticks: when the process started, in clock ticks since boot: tells it from a later one with the
            same pid. 0 where the system does not say; the process then counts as alive.
        host: boot id and namespaces: ranks with the same text see the same files and process ids.
        device: ``cpu`` or ``cuda:3``. build: what torch was built for, ``cpu``, ``cuda 13.0`` or ``hip 6.3``.
        domain: devices with the same text can map each other's memory: an NVLink fabric, else the host.
    """

    rank: int
    pid: int
    start_ticks: int
    host: str
    device: str
    build: str
    domain: str

    @property
    def kind(self) -> str:
        """``cpu``, ``cuda`` or ``hip``: whose memory it is."""
        return "cpu" if self.device == "cpu" else self.build.partition(" ")[0]


@dataclass(frozen=True)
class Published:
    """What a rank tells all others at the start of a call: codes are indices of PATHS and OPS, ``dispatch``
    is ``dispatch_num_tokens`` (-1: not given), ``graph`` 1 for a recorded launch."""

    generation: int
    num_tokens: int
    path: int
    dispatch: int
    op: int
    graph: int


# The interface ----------------------------------------------------------------------------------------------


class Memory(Protocol):
    """One rank's mapping.

    Attributes:
        data, control: this rank's own, int8 ``[data_bytes]`` and ``[control_bytes]``, zero at first.
        direct: the memory of every rank is mapped here.
        pointers: addresses of all ranks' data, and of their control, for kernels; both empty where memory is
            not ``direct``, and after ``close``.
    """

    name: str
    direct: bool
    data: Tensor
    control: Tensor
    pointers: tuple[tuple[int, ...], tuple[int, ...]]

    def peer_data(self, rank: int) -> Tensor:
        """int8 ``[data_bytes]`` of ``rank``; only where ``direct``."""
        ...

    def peer_control(self, rank: int) -> Tensor:
        """int8 ``[control_bytes]`` of ``rank``; only where ``direct``."""
        ...

    def close(self) -> None:
        """Give the memory back; may be called again, talks to nobody."""
        ...


class Provider(Protocol):
    """A way to have such memory."""

    name: str

    def available(self, device: torch.device, facts: Sequence[RankFacts]) -> Availability:
        """Whether what it needs is there in this process; which ranks can use it is ``obstacle``'s answer."""
        ...

    def allocate(self, data_bytes: int, control_bytes: int, device: torch.device, meeting: Meeting) -> Memory:
        """Called by all ranks together; runs the steps allocate, map and zero of the meeting, and leaves
        nothing behind where one of them fails on any rank."""
        ...


class Exchange(Protocol):
    """Calls that all ranks make together. Every method that waits ends: with all ranks there, or with a
    CommError after at most DG_COMM_TIMEOUT_S seconds, and from then on with the same error at once.

    Attributes:
        generation: the number of opening barriers so far, modulo 2^32 where kernels count along.
        provider, reason: whose memory it is, and why that one.
    """

    rank: int
    ranks: int
    direct: bool
    generation: int
    provider: str
    reason: str

    @property
    def failure(self) -> CommError | None:
        """What has ended the exchange; ``check`` and ``close`` look for failures of other ranks."""
        ...

    def begin(self, op: str, words: Published) -> tuple[Published, ...]:
        """The opening barrier, phase dispatch: all ranks' words, in order of ranks; the generation of
        ``words`` is filled in here. From now on until ``finish`` inputs may be read by others.

        Raises:
            CommError: and its kinds; with DG_COMM_CHECK_UNIFORM=1 also where two ranks' path, operation or
                graph flag differ.
        """
        ...

    def fetch(self) -> None:
        """Make the inputs of other ranks readable here; nothing to do where memory is direct."""
        ...

    def inputs(self, rank: int) -> Tensor:
        """int8 ``[input_bytes]`` of ``rank``, valid after ``fetch``. Where memory is not direct it holds only
        the tokens with a live route to an expert of this rank, and other tokens' ids are -1."""
        ...

    def put(self, rank: int, slots: Tensor, tokens: Tensor, rows: Tensor) -> None:
        """Store ``rows`` bf16 ``[n, hidden]`` as the combine rows (slot, token) of ``rank``; ``slots`` and
        ``tokens`` are integers ``[n]``, and no pair occurs twice in a call."""
        ...

    def finish(self, op: str) -> None:
        """The closing barrier, phase combine: all rows of all ranks are stored, all inputs were read."""
        ...

    def barrier(self, op: str) -> None:
        """Wait for all ranks."""
        ...

    def abort(self, op: str, phase: str) -> None:
        """Tell every rank that can be told that this one failed in ``phase``; never raises."""
        ...

    def check(self) -> None:
        """Raise the failure that ended the exchange, as often as asked."""
        ...

    def close(self) -> None:
        """Let go of the memory; may be called again, waits for nobody."""
        ...


# Processes --------------------------------------------------------------------------------------------------


def _stat(pid: int | str) -> tuple[str, int] | None:
    """State and start ticks of a process, from /proc; None where it is gone."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            # The name in parentheses may hold blanks and parentheses; what follows it starts at field 3.
            fields = file.read().rpartition(b")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return None
    return fields[0].decode(), int(fields[19])


def start_ticks() -> int:
    """When this process started, in clock ticks since boot; 0 where the system does not say."""
    found = _stat("self")
    return 0 if found is None else found[1]


def alive(facts: RankFacts) -> bool:
    """Whether a rank's process runs, as seen from its host. A process that has ended and waits for its parent
    to notice (state Z) has ended; one with other start ticks is another one with the same number."""
    if not facts.start_ticks:
        return True
    found = _stat(facts.pid)
    return found is not None and found[0] not in "ZX" and found[1] == facts.start_ticks


def _host() -> str:
    """A text that two processes share where they see the same files, shared memory and process ids."""
    try:
        with open("/proc/sys/kernel/random/boot_id", encoding="ascii") as file:
            parts = [file.read().strip()]
    except OSError:
        parts = [os.uname().nodename]
    for space in ("ipc", "mnt", "pid"):
        try:
            parts.append(os.readlink(f"/proc/self/ns/{space}"))
        except OSError:
            continue
    return " ".join(parts)


def _build() -> str:
    if torch.version.hip is not None:
        return f"hip {torch.version.hip}"
    return "cpu" if torch.version.cuda is None else f"cuda {torch.version.cuda}"


def local_facts(device: torch.device, rank: int = 0) -> RankFacts:
    """What this process tells other ranks of itself."""
    host, build = _host(), _build()
    place, domain = "cpu", host
    if device.type != "cpu":
        index = torch.cuda.current_device() if device.index is None else device.index
        place = f"{device.type}:{index}"
        if build.startswith("cuda"):
            # Fabrics of devices are that provider's business; without one, memory ends at the host.
            fabric: str | None = _module("cuda-ipc").fabric_domain(torch.device(device.type, index))
            domain = fabric or host
    return RankFacts(rank, os.getpid(), start_ticks(), host, place, build, domain)


# Which provider ---------------------------------------------------------------------------------------------

# What a provider's ranks need: the kind of device, and what they have to share ("": nothing).
_NEEDS = {
    "torch-symmetric": ("cuda", "host"),
    "cuda-ipc": ("cuda", "domain"),
    "hip-ipc": ("hip", "host"),
    "posix-shm": ("cpu", "host"),
    "all-to-all": ("", ""),
}


def _module(name: str) -> Any:
    return importlib.import_module("dg_core.peers." + name.replace("-", "_"))


def obstacle(name: str, facts: Sequence[RankFacts]) -> str:
    """Why ranks with these facts cannot use a provider, whatever is installed; empty where they can."""
    kind, shared = _NEEDS[name]
    first = facts[0]
    for other in facts:
        if kind and other.kind != kind:
            return f"{name} shares {kind} memory; rank {other.rank} is on {other.device} ({other.build})"
        if shared == "host" and other.host != first.host:
            return (
                f"{name} maps memory of one host; rank {first.rank} is on {first.host!r} (domain "
                f"{first.domain!r}), rank {other.rank} on {other.host!r} (domain {other.domain!r})"
            )
        if shared == "domain" and other.host != first.host and other.domain != first.domain:
            return (
                f"{name} maps memory of one domain; rank {first.rank} is in {first.domain!r}, rank "
                f"{other.rank} in {other.domain!r}"
            )
    return ""


def _available(name: str, device: torch.device, facts: Sequence[RankFacts]) -> Availability:
    answer: Availability = _module(name).PROVIDER.available(device, facts)
    reason = obstacle(name, facts)
    return replace(answer, ok=False, reason=reason) if reason else answer


def probe(device: torch.device, facts: Sequence[RankFacts] | None = None) -> dict[str, Availability]:
    """Every provider's name, and whether these ranks (default: this process alone) can use it."""
    known = facts or (local_facts(device),)
    return {name: _available(name, device, known) for name in PROVIDERS}


def choose(device: torch.device, facts: Sequence[RankFacts], asked: str = "auto") -> tuple[str, str]:
    """The provider for these ranks, and why it is that one. All ranks that know the same facts, with the same
    things installed, choose the same.

    auto takes the first of PROVIDERS that the ranks' devices and hosts allow and that is there; all-to-all
    is always possible.

    Raises:
        ArgumentError: ``asked`` names no provider.
        BackendUnavailable: the provider that was asked for by name cannot serve these ranks.
        DeviceError: the ranks' devices are of different kinds.
    """
    if asked != "auto" and asked not in PROVIDERS:
        known = ", ".join(("auto", *PROVIDERS))
        raise ArgumentError(f"{MAKER}: provider is {asked!r}; it must be one of {known}")
    first = facts[0]
    for other in facts:
        if other.kind != first.kind:
            raise DeviceError(
                f"{MAKER}: rank {first.rank} is on {first.device} ({first.build}), rank {other.rank} on "
                f"{other.device} ({other.build}); all ranks of a buffer need the same kind of device"
            )
    if asked != "auto":
        # The ranks' places come first: nothing of a vendor is loaded to say that hosts are different.
        reason, remedy = obstacle(asked, facts), "all-to-all needs no mapping"
        if not reason:
            state = _module(asked).PROVIDER.available(device, facts)
            if state.ok:
                return asked, "asked for by name"
            reason, remedy = state.reason, state.remedy
        ending = f" ({remedy})" if remedy else ""
        raise BackendUnavailable(f"{MAKER}: provider {asked!r} was asked for: {reason}{ending}")
    passed: list[str] = []
    for name in PROVIDERS[:-1]:
        if first.kind != _NEEDS[name][0]:
            continue
        reason = obstacle(name, facts)
        if not reason:
            state = _module(name).PROVIDER.available(device, facts)
            if state.ok:
                return name, "; ".join((*passed, f"{len(facts)} {first.kind} rank(s) can map memory"))
            reason = f"{name}: {state.reason}"
        passed.append(reason)
    return PROVIDERS[-1], "; ".join(passed) or f"nothing else serves {first.kind}"


def connect(
    op: str, layout: SymmLayout, device: torch.device, meeting: Meeting, settings: Any, provider: str | None
) -> tuple[Memory, Exchange]:
    """Memory for ``layout`` and the exchange on it, made by all ranks of ``meeting`` together.

    ``settings`` has ``timeout_s`` and ``check_uniform``; ``provider`` None reads DG_SYMM_PROVIDER. Runs the
    steps agree, choose, allocate, map, zero and ready. Whatever is raised is raised on every rank, and
    leaves no memory behind.

    Raises:
        ArgumentError, BackendUnavailable, DeviceError: as ``choose``.
        CommError: a step failed on a rank, a rank did not come, or ranks chose differently.
    """
    facts = meeting.step("agree", lambda: replace(local_facts(device), rank=meeting.rank))
    meeting.know(facts)
    name, reason = _choose_together(device, facts, meeting, provider)
    module = _module(name)
    memory: Memory = module.PROVIDER.allocate(layout.data_bytes, layout.control_bytes, device, meeting)
    made: list[Exchange] = []
    maker = importlib.import_module("dg_core.peers.direct") if memory.direct else module
    try:
        # Others may write words here as soon as they are through, so all are ready before any is.
        meeting.step(
            "ready",
            lambda: made.append(maker.exchange(memory, layout, meeting, facts, settings, reason)),
        )
    except BaseException:
        memory.close()
        raise
    return memory, made[0]


def _choose_together(
    device: torch.device, facts: Sequence[RankFacts], meeting: Meeting, provider: str | None
) -> tuple[str, str]:
    """``choose``, and that every rank chose the same; an error of this rank keeps its type."""
    errors: list[Exception] = []

    def work() -> tuple[str, str]:
        try:
            asked = config.fresh("DG_SYMM_PROVIDER") if provider is None else provider
            return choose(device, facts, asked)
        except (ArgumentError, BackendUnavailable, DeviceError) as error:
            errors.append(error)
            return "", f"{type(error).__name__}: {error}"

    choices = meeting.step("choose", work)
    if errors:
        raise errors[0]
    name, reason = choices[meeting.rank]
    for rank, (other, words) in enumerate(choices):
        if other != name:
            raise CommError(
                f"{MAKER}: rank {meeting.rank} chose provider {name!r} ({reason}), rank {rank} "
                f"{f'{other!r} ({words})' if other else f'none ({words})'}; all ranks need the same one",
                rank=meeting.rank,
                peer=rank,
                phase="choose",
            )
    return name, reason
