"""Memory of HIP devices of one host that ranks map through IPC handles of the runtime.

It is allocated uncached: a kernel that runs on sees at once what a peer has stored while it ran, which cached
memory promises only at the end of a kernel.
"""

from __future__ import annotations

import contextlib
import ctypes
from ctypes import byref
from typing import TYPE_CHECKING, Any, ClassVar

import torch

from .devices import Calls, DeviceProvider, MappedMemory, open_first, share

if TYPE_CHECKING:
    from .meeting import Meeting

NAME = "hip-ipc"
LIBRARIES = ("libamdhip64.so", "libamdhip64.so.6", "libamdhip64.so.5")
HANDLE_BYTES = 64  # hipIpcMemHandle_t

MALLOC_UNCACHED = 3
IPC_LAZY_ENABLE_PEER_ACCESS = 1


class Handle(ctypes.Structure):
    """hipIpcMemHandle_t, which the runtime takes by value."""

    _fields_: ClassVar = [("reserved", ctypes.c_char * HANDLE_BYTES)]


def _error_name(library: Any, code: int) -> str:
    function = library.hipGetErrorName
    with contextlib.suppress(AttributeError):
        function.restype = ctypes.c_char_p
    text = function(ctypes.c_int(code))
    library.hipGetLastError()  # it was told here; otherwise torch would find it after its next call
    return text.decode(errors="replace") if isinstance(text, bytes) else ""


class IpcForm:
    """An allocation of the runtime, and an IPC handle of it."""

    def __init__(self, api: Any = None) -> None:
        self._api = api

    def calls(self, rank: int) -> Calls:
        library = open_first(LIBRARIES, "HIP runtime") if self._api is None else self._api
        return Calls(library, NAME, rank, _error_name)

    def allocate(self, calls: Calls, nbytes: int, device: int) -> tuple[int, int, bytes]:
        address, handle = ctypes.c_void_p(), Handle()
        calls.call(
            "allocate", "hipExtMallocWithFlags", byref(address), ctypes.c_size_t(nbytes),
            ctypes.c_uint(MALLOC_UNCACHED),
        )  # fmt: skip
        calls.later("hipFree", ctypes.c_void_p(address.value))
        calls.call("allocate", "hipIpcGetMemHandle", byref(handle), address)
        return address.value or 0, nbytes, ctypes.string_at(ctypes.addressof(handle), HANDLE_BYTES)

    def map(self, calls: Calls, exported: bytes, nbytes: int, device: int, peer: int) -> int:
        address, handle = ctypes.c_void_p(), Handle.from_buffer_copy(exported)
        flags = ctypes.c_uint(IPC_LAZY_ENABLE_PEER_ACCESS)
        calls.call("map", "hipIpcOpenMemHandle", byref(address), handle, flags, peer=peer)
        calls.later("hipIpcCloseMemHandle", ctypes.c_void_p(address.value), peer=peer)
        return address.value or 0


class HipIpc(DeviceProvider):
    """The provider, over the runtime that torch has loaded."""

    name = NAME
    vendor, libraries, what = "HIP", LIBRARIES, "HIP runtime"
    builds = "a HIP build", "another build than HIP's"
    remedy = "install ROCm or DTK"

    def allocate(
        self, data_bytes: int, control_bytes: int, device: torch.device, meeting: Meeting
    ) -> MappedMemory:
        """Memory on ``device`` for every rank.

        Raises:
            CommError: a step failed on some rank; the message names the function and its return code.
        """
        return share(NAME, IpcForm(self._api), data_bytes, control_bytes, device, meeting)


PROVIDER = HipIpc()
