"""Memory of CUDA devices that ranks map through the driver: by IPC handles on one host, by fabric handles
where an NVLink domain spans several.

Only the driver's library is used, so no version of the runtime has to match torch's. Handles are bytes that
travel with the steps of the construction. There is no multicast in either form.
"""

from __future__ import annotations

import contextlib
import ctypes
from ctypes import byref
from typing import TYPE_CHECKING, Any, ClassVar

import torch

from ..errors import BackendUnavailable
from ..layout import align
from ..symm import local_facts
from .devices import Calls, DeviceProvider, Form, MappedMemory, open_first, share

if TYPE_CHECKING:
    from .meeting import Meeting

NAME = "cuda-ipc"
LIBRARIES = ("libcuda.so.1", "libcuda.so")
HANDLE_BYTES = 64  # CUipcMemHandle, and CUmemFabricHandle

IPC_LAZY_ENABLE_PEER_ACCESS = 1
ALLOCATION_PINNED = 1
LOCATION_DEVICE = 1
HANDLE_FABRIC = 8
ACCESS_READ_WRITE = 3
GRANULARITY_RECOMMENDED = 1
FABRIC_COMPLETED = 3  # nvmlGpuFabricInfo_t.state


class Handle(ctypes.Structure):
    """An exported handle; the driver takes it by value where it opens IPC memory."""

    _fields_: ClassVar = [("reserved", ctypes.c_char * HANDLE_BYTES)]


class Location(ctypes.Structure):
    """CUmemLocation."""

    _fields_: ClassVar = [("type", ctypes.c_int), ("id", ctypes.c_int)]


class AllocationProperties(ctypes.Structure):
    """CUmemAllocationProp."""

    _fields_: ClassVar = [
        ("type", ctypes.c_int),
        ("handle_types", ctypes.c_int),
        ("location", Location),
        ("win32_metadata", ctypes.c_void_p),
        ("compression", ctypes.c_ubyte),
        ("rdma_capable", ctypes.c_ubyte),
        ("usage", ctypes.c_ushort),
        ("reserved", ctypes.c_ubyte * 4),
    ]


class Access(ctypes.Structure):
    """CUmemAccessDesc."""

    _fields_: ClassVar = [("location", Location), ("flags", ctypes.c_int)]


class FabricInfo(ctypes.Structure):
    """nvmlGpuFabricInfo_t."""

    _fields_: ClassVar = [
        ("cluster", ctypes.c_ubyte * 16),
        ("status", ctypes.c_int),
        ("clique", ctypes.c_uint),
        ("state", ctypes.c_ubyte),
    ]


def _error_name(library: Any, code: int) -> str:
    text = ctypes.c_char_p()
    if library.cuGetErrorName(ctypes.c_int(code), byref(text)) or text.value is None:
        return ""
    return text.value.decode(errors="replace")


def _bytes_of(handle: Handle) -> bytes:
    return ctypes.string_at(ctypes.addressof(handle), HANDLE_BYTES)


class _Driver:
    """What both forms do with the driver's library."""

    def __init__(self, api: Any = None) -> None:
        self._api = api

    def calls(self, rank: int) -> Calls:
        library = open_first(LIBRARIES, "CUDA driver") if self._api is None else self._api
        return Calls(library, NAME, rank, _error_name)


class IpcForm(_Driver):
    """One host: an allocation of the driver, and an IPC handle of it."""

    def allocate(self, calls: Calls, nbytes: int, device: int) -> tuple[int, int, bytes]:
        address, handle = ctypes.c_uint64(), Handle()
        calls.call("allocate", "cuMemAlloc_v2", byref(address), ctypes.c_size_t(nbytes))
        calls.later("cuMemFree_v2", ctypes.c_uint64(address.value))
        calls.call("allocate", "cuIpcGetMemHandle", byref(handle), address)
        return address.value, nbytes, _bytes_of(handle)

    def map(self, calls: Calls, exported: bytes, nbytes: int, device: int, peer: int) -> int:
        address, handle = ctypes.c_uint64(), Handle.from_buffer_copy(exported)
        flags = ctypes.c_uint(IPC_LAZY_ENABLE_PEER_ACCESS)
        calls.call("map", "cuIpcOpenMemHandle_v2", byref(address), handle, flags, peer=peer)
        calls.later("cuIpcCloseMemHandle", ctypes.c_uint64(address.value), peer=peer)
        return address.value


class FabricForm(_Driver):
    """Several hosts of one NVLink domain: physical memory with a fabric handle, mapped at an address of each
    process's own. Physical memory stays as long as anybody has it mapped."""

    def allocate(self, calls: Calls, nbytes: int, device: int) -> tuple[int, int, bytes]:
        properties = AllocationProperties(
            type=ALLOCATION_PINNED, handle_types=HANDLE_FABRIC, location=Location(LOCATION_DEVICE, device)
        )
        unit, memory, handle = ctypes.c_size_t(), ctypes.c_uint64(), Handle()
        calls.call(
            "allocate", "cuMemGetAllocationGranularity", byref(unit), byref(properties),
            ctypes.c_int(GRANULARITY_RECOMMENDED),
        )  # fmt: skip
        nbytes = align(nbytes, unit.value)
        calls.call(
            "allocate", "cuMemCreate", byref(memory), ctypes.c_size_t(nbytes), byref(properties),
            ctypes.c_uint64(0),
        )  # fmt: skip
        calls.later("cuMemRelease", ctypes.c_uint64(memory.value))
        calls.call(
            "allocate", "cuMemExportToShareableHandle", byref(handle), memory, ctypes.c_int(HANDLE_FABRIC),
            ctypes.c_uint64(0),
        )  # fmt: skip
        return self._place(calls, "allocate", memory, nbytes, device, None), nbytes, _bytes_of(handle)

    def map(self, calls: Calls, exported: bytes, nbytes: int, device: int, peer: int) -> int:
        memory, handle = ctypes.c_uint64(), Handle.from_buffer_copy(exported)
        kind = ctypes.c_int(HANDLE_FABRIC)
        calls.call("map", "cuMemImportFromShareableHandle", byref(memory), byref(handle), kind, peer=peer)
        calls.later("cuMemRelease", ctypes.c_uint64(memory.value), peer=peer)
        return self._place(calls, "map", memory, nbytes, device, peer)

    def _place(
        self, calls: Calls, step: str, memory: ctypes.c_uint64, nbytes: int, device: int, peer: int | None
    ) -> int:
        """Reserve addresses, map physical memory there, and let this device read and write it."""
        address, size, none = ctypes.c_uint64(), ctypes.c_size_t(nbytes), ctypes.c_uint64(0)
        calls.call(
            step, "cuMemAddressReserve", byref(address), size, ctypes.c_size_t(0), none, none, peer=peer
        )
        place = ctypes.c_uint64(address.value)
        calls.later("cuMemAddressFree", place, size, peer=peer)
        calls.call(step, "cuMemMap", place, size, ctypes.c_size_t(0), memory, none, peer=peer)
        calls.later("cuMemUnmap", place, size, peer=peer)
        access = Access(Location(LOCATION_DEVICE, device), ACCESS_READ_WRITE)
        calls.call(step, "cuMemSetAccess", place, size, byref(access), ctypes.c_size_t(1), peer=peer)
        return place.value


class CudaIpc(DeviceProvider):
    """The provider, over the driver's library."""

    name = NAME
    vendor, libraries, what = "CUDA", LIBRARIES, "CUDA driver"
    builds = "a HIP build of torch", "a CUDA build of torch"
    remedy = "start the container with the GPUs"

    def allocate(
        self, data_bytes: int, control_bytes: int, device: torch.device, meeting: Meeting
    ) -> MappedMemory:
        """Memory on ``device`` for every rank; fabric handles where ranks are on several hosts.

        Raises:
            CommError: a step failed on some rank; the message names the function and its return code.
        """
        hosts = set(meeting.step("choose", lambda: local_facts(torch.device("cpu")).host))
        form: Form = IpcForm(self._api) if len(hosts) == 1 else FabricForm(self._api)
        return share(NAME, form, data_bytes, control_bytes, device, meeting)


def fabric_domain(device: torch.device, nvml: Any = None) -> str | None:
    """A text that devices share that one NVLink fabric joins across hosts; None without such a fabric, or
    where NVML does not tell."""
    with contextlib.suppress(BackendUnavailable, AttributeError, OSError, RuntimeError, AssertionError):
        library = open_first(("libnvidia-ml.so.1",), "NVML") if nvml is None else nvml
        uuid = f"GPU-{torch.cuda.get_device_properties(device).uuid}".encode()
        handle, info = ctypes.c_void_p(), FabricInfo()
        if library.nvmlInit_v2():
            return None
        try:
            failed = library.nvmlDeviceGetHandleByUUID(
                uuid, byref(handle)
            ) or library.nvmlDeviceGetGpuFabricInfo(handle, byref(info))
        finally:
            library.nvmlShutdown()
        # A host whose fabric ends at itself reports a cluster of zeros.
        if not failed and info.state == FABRIC_COMPLETED and not info.status and any(info.cluster):
            return f"fabric {bytes(info.cluster).hex()} clique {info.clique}"
    return None


PROVIDER = CudaIpc()
