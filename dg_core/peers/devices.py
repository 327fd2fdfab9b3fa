"""What the providers of device memory share: one allocation a rank, mapped by all others, and its way back.

A provider has a *form*: the functions of the vendor's library that allocate, export and map. The order of
steps is here. Every return code is checked; whatever has been opened is noted as it is opened, so a failure
at any point gives all of it back, in reverse order.
"""

from __future__ import annotations

import contextlib
import ctypes
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Protocol, cast

import torch
from torch import Tensor

from ..backend import Availability
from ..errors import BackendUnavailable, DGError
from ..layout import align

if TYPE_CHECKING:
    from ..symm import RankFacts
    from .meeting import Meeting

# An exported handle stands for a whole block of the driver, and smaller allocations share blocks of 2 MiB:
# with whole blocks the address that a peer gets is that of the memory, not of a neighbour.
BLOCK = 2 << 20


@dataclass(frozen=True)
class Undo:
    """A function that gives something back, with its arguments, and whose it was."""

    function: str
    arguments: tuple[Any, ...]
    peer: int | None


class Calls:
    """The functions of a vendor's library, as one rank calls them.

    Args:
        library: the loaded library, or anything with its functions.
        explain: the name that the vendor has for a return code, empty where unknown.
    """

    def __init__(self, library: Any, provider: str, rank: int, explain: Callable[[Any, int], str]) -> None:
        self._library, self._provider, self._rank, self._explain = library, provider, rank, explain
        self._undo: list[Undo] = []

    def call(self, step: str, function: str, *arguments: Any, peer: int | None = None) -> None:
        """Call a function; ``peer`` is the rank whose memory it is about, None for one's own.

        Raises:
            DGError: it returns anything but 0.
        """
        code = getattr(self._library, function)(*arguments)
        if code:
            name = self._explain(self._library, code)
            raise DGError(
                f"provider {self._provider}, rank {self._rank}, step {step!r}, {function}"
                f"{'' if peer is None else f' of rank {peer}'}: error {code}{f' ({name})' if name else ''}"
            )

    def later(self, function: str, *arguments: Any, peer: int | None = None) -> None:
        """Have ``close`` call a function, before those that were noted earlier."""
        self._undo.append(Undo(function, arguments, peer))

    @property
    def open(self) -> int:
        """How many calls of ``close`` are to come."""
        return len(self._undo)

    def close(self) -> None:
        """Give everything back, the last opened first; nothing the second time.

        Raises:
            DGError: what the first call that failed returned; the others were made all the same.
        """
        failures = []
        while self._undo:
            undo = self._undo.pop()
            try:
                self.call("close", undo.function, *undo.arguments, peer=undo.peer)
            except DGError as error:
                failures.append(error)
        if failures:
            raise failures[0]


class Form(Protocol):
    """How a provider's memory is made and shared."""

    def calls(self, rank: int) -> Calls:
        """The library, loaded.

        Raises:
            BackendUnavailable: there is none.
        """
        ...

    def allocate(self, calls: Calls, nbytes: int, device: int) -> tuple[int, int, bytes]:
        """Address and bytes of own memory of at least ``nbytes``, and what others need to map it."""
        ...

    def map(self, calls: Calls, exported: bytes, nbytes: int, device: int, peer: int) -> int:
        """The address here of a peer's memory of ``nbytes``."""
        ...


def tensor_at(address: int, nbytes: int, device: torch.device) -> Tensor:
    """int8 ``[nbytes]`` at an address, which has to stay valid for as long as the tensor is used.

    The device is stated, not asked for: the runtime names another one for memory of a peer.
    """
    construct = cast(Any, torch._C)._construct_storage_from_data_pointer
    return torch.empty(0, dtype=torch.int8, device=device).set_(construct(address, device, nbytes))


@contextlib.contextmanager
def current(device: torch.device) -> Iterator[None]:
    """Make ``device`` the current one, with a context and nothing that still runs."""
    if device.type != "cuda":
        yield
        return
    with torch.cuda.device(device):
        torch.cuda.synchronize()
        yield


def settle(device: torch.device) -> None:
    """Wait for what this process has asked of the device."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


class MappedMemory:
    """A rank's mapping of all ranks' memory; data comes first, control behind it. See ``symm.Memory``.

    Args:
        name: the provider.
        views: int8, one a rank, at least ``data_bytes + control_bytes`` long.
        addresses: where they begin.
        give_back: called once by ``close``.
    """

    direct = True

    def __init__(
        self,
        name: str,
        rank: int,
        views: Sequence[Tensor],
        addresses: Sequence[int],
        data_bytes: int,
        control_bytes: int,
        give_back: Callable[[], None],
    ) -> None:
        self.name = name
        end = data_bytes + control_bytes
        self._data = [view[:data_bytes] for view in views]
        self._control = [view[data_bytes:end] for view in views]
        self.data, self.control = self._data[rank], self._control[rank]
        self.pointers: tuple[tuple[int, ...], tuple[int, ...]] = (
            tuple(addresses),
            tuple(address + data_bytes for address in addresses),
        )
        self._give_back: Callable[[], None] | None = give_back

    def peer_data(self, rank: int) -> Tensor:
        """int8 ``[data_bytes]`` of ``rank``."""
        return self._data[rank]

    def peer_control(self, rank: int) -> Tensor:
        """int8 ``[control_bytes]`` of ``rank``."""
        return self._control[rank]

    def zero(self) -> None:
        """Fill one's own with zeros, and wait until it is."""
        self.data.zero_()
        self.control.zero_()
        settle(self.data.device)

    def close(self) -> None:
        """Unmap the peers' memory and free one's own; nothing the second time.

        Tensors that were made from it must not be used any more. Ranks that still read or write this rank's
        memory lose it, so programs wait for each other before.

        Raises:
            DGError: a call of the library failed; everything else was given back.
        """
        give_back, self._give_back = self._give_back, None
        if give_back is None:
            return
        gone = torch.empty(0, dtype=torch.int8, device=self.data.device)
        self._data, self._control, self.data, self.control, self.pointers = [], [], gone, gone, ((), ())
        give_back()


def share(
    name: str, form: Form, data_bytes: int, control_bytes: int, device: torch.device, meeting: Meeting
) -> MappedMemory:
    """The steps allocate, map and zero of a provider, on all ranks of ``meeting`` together.

    Raises:
        CommError: a step failed on some rank; nothing of it is left on any.
    """
    number: int | None = device.index
    if device.type == "cuda" and number is None:
        number = torch.cuda.current_device()
        device = torch.device("cuda", number)
    index, wanted = number or 0, align(data_bytes + control_bytes, BLOCK)
    opened: list[Calls] = []

    def give_back() -> None:
        with current(device):
            for calls in opened:
                calls.close()

    def allocate() -> tuple[int, int, bytes]:
        opened.append(form.calls(meeting.rank))
        with current(device):
            return form.allocate(opened[0], wanted, index)

    addresses: list[int] = []
    views: list[Tensor] = []

    def map_peers(exports: Sequence[tuple[int, int, bytes]]) -> None:
        with current(device):
            for rank, (address, nbytes, exported) in enumerate(exports):
                own = rank == meeting.rank
                addresses.append(address if own else form.map(opened[0], exported, nbytes, index, rank))
        views.extend(tensor_at(address, data_bytes + control_bytes, device) for address in addresses)

    try:
        exports = meeting.step("allocate", allocate)
        meeting.step("map", lambda: map_peers(exports))
        memory = MappedMemory(name, meeting.rank, views, addresses, data_bytes, control_bytes, give_back)
        # Nobody writes here yet: peers do after the step ready.
        meeting.step("zero", memory.zero)
    except BaseException:
        with contextlib.suppress(Exception):  # the first error is the one to tell
            give_back()
        raise
    return memory


class DeviceProvider:
    """What the providers of a vendor's memory have in common: the library, and whether it is there.

    Args:
        api: the library; None finds it at the first use.
    """

    vendor: ClassVar[str]
    builds: ClassVar[tuple[str, str]]  # a HIP build of torch, and any other, in words
    libraries: ClassVar[tuple[str, ...]]
    what: ClassVar[str]  # the library in words
    remedy: ClassVar[str]

    def __init__(self, api: Any = None) -> None:
        self._api = api

    def available(self, device: torch.device, facts: Sequence[RankFacts]) -> Availability:
        """Whether the library is there; whose memory ranks can map is ``symm.obstacle``'s answer."""
        hip = torch.version.hip is not None
        if device.type != "cuda" or hip != (self.vendor == "HIP"):
            build = self.builds[0] if hip else self.builds[1]
            reason = f"it shares memory of {self.vendor} devices, not of {device} in {build}"
            return Availability(False, reason)
        try:
            if self._api is None:
                open_first(self.libraries, self.what)
        except BackendUnavailable as error:
            return Availability(False, str(error), self.remedy)
        return Availability(True)


def open_first(names: Sequence[str], what: str) -> Any:
    """The first of these libraries that the loader finds, the one that is in the process already if any is:
    a second copy of a runtime would not know the first one's devices.

    Raises:
        BackendUnavailable: there is none; the message holds the loader's reasons.
    """
    reasons = []
    for name in (*_loaded(names), *names):
        try:
            return ctypes.CDLL(name)
        except OSError as error:
            reasons.append(str(error))
    raise BackendUnavailable(f"no {what}: {'; '.join(reasons)}")


def _loaded(names: Sequence[str]) -> list[str]:
    """Paths of libraries in this process that are called like one of these."""
    stems = tuple(name.partition(".so")[0] + ".so" for name in names)
    with contextlib.suppress(OSError), open("/proc/self/maps", encoding="utf-8", errors="replace") as maps:
        paths = {line.split(maxsplit=5)[5].strip() for line in maps if line.count("/")}
        return sorted(path for path in paths if path.rpartition("/")[2].startswith(stems))
    return []
