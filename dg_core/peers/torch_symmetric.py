"""Memory of CUDA devices of one host that torch's symmetric memory allocates and maps.

Multicast is never used: objects of it may not be made on every machine, and torch makes them when ranks meet.
So it is switched off before anything is allocated, and looked for afterwards.
"""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from .. import config
from ..backend import Availability
from ..errors import DGError
from ..symm import RankFacts
from .devices import MappedMemory

if TYPE_CHECKING:
    from .meeting import Meeting

NAME = "torch-symmetric"
_MODULE = "torch.distributed._symmetric_memory"
_NEEDED = ("empty", "rendezvous")


class TorchSymmetric:
    """The provider.

    Args:
        api: what has ``empty`` and ``rendezvous``; None finds torch's at the first use.
    """

    name = NAME

    def __init__(self, api: Any = None) -> None:
        self._api = api

    def _load(self) -> Any:
        return importlib.import_module(_MODULE) if self._api is None else self._api

    def available(self, device: torch.device, facts: Sequence[RankFacts]) -> Availability:
        """Whether this torch has it for such a device."""
        if device.type != "cuda" or torch.version.hip is not None:
            build = "a HIP build of torch" if torch.version.hip is not None else "a CUDA build of torch"
            return Availability(False, f"it shares memory of CUDA devices, not of {device} in {build}")
        try:
            module = self._load()
        except Exception as error:  # a private module of torch may fail in ways of its own
            return Availability(False, f"{_MODULE} does not import: {type(error).__name__}: {error}")
        missing = [name for name in _NEEDED if not hasattr(module, name)]
        if missing:
            return Availability(False, f"torch {torch.__version__}: {_MODULE} has no {', '.join(missing)}")
        return Availability(True)

    def allocate(
        self, data_bytes: int, control_bytes: int, device: torch.device, meeting: Meeting
    ) -> MappedMemory:
        """Memory on ``device`` for every rank of the meeting's group.

        Raises:
            CommError: a step failed on some rank: torch refused it, or made a multicast object all the same.
        """
        config.disable_multicast()
        total = data_bytes + control_bytes
        held: list[Any] = []  # what keeps the memory and the mappings: torch's tensor, then its handle

        def allocate() -> None:
            held.append(self._load().empty(total, dtype=torch.int8, device=device))

        where = f"provider {NAME}, rank {meeting.rank}, step 'map'"
        addresses: list[int] = []
        views: list[Tensor] = []

        def map_peers() -> None:
            own = held[0]
            if meeting.ranks == 1:  # a rank alone has nobody to meet
                addresses.append(own.data_ptr())
                views.append(own)
                return
            if meeting.group is None:
                raise DGError(f"{where}: ranks have no process group")
            handle = self._load().rendezvous(own, meeting.group)
            held.append(handle)
            if handle.multicast_ptr:
                raise DGError(
                    f"{where}: torch made a multicast object; export TORCH_SYMM_MEM_DISABLE_MULTICAST=1 "
                    "before the process starts"
                )
            addresses.extend(handle.buffer_ptrs)
            for rank in range(meeting.ranks):
                mine = rank == meeting.rank
                views.append(own if mine else handle.get_buffer(rank, (total,), torch.int8))

        def give_back() -> None:
            views.clear()
            held.clear()

        try:
            meeting.step("allocate", allocate)
            meeting.step("map", map_peers)
            memory = MappedMemory(NAME, meeting.rank, views, addresses, data_bytes, control_bytes, give_back)
            meeting.step("zero", memory.zero)
        except BaseException:
            give_back()
            raise
        return memory


PROVIDER = TorchSymmetric()
