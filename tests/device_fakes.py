"""Fakes of the libraries that device memory comes from: the CUDA driver and the HIP runtime by one class,
NVML, and torch's symmetric memory. They hand out host memory and note what was opened and not given back."""

# ruff: noqa: N802, N815 -- the fakes have the names of the vendors' functions
from __future__ import annotations

import ctypes
import itertools
import os
import threading
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from dg_core.peers import devices

DATA, CONTROL = 4096, 256
ERROR = 201  # CUDA_ERROR_INVALID_CONTEXT
EXTRA = 1 << 16  # what makes the fakes' granularity no power of two


class Machine:
    """The memory behind all fakes of one test: blocks by address, and what handles stand for."""

    def __init__(self) -> None:
        self.blocks: dict[int, Any] = {}
        self.handles: dict[bytes, int] = {}
        self.numbers = itertools.count(1)

    def new(self, nbytes: int) -> int:
        block = (ctypes.c_ubyte * nbytes)(*([0xA5] * min(nbytes, DATA + CONTROL)))
        self.blocks[ctypes.addressof(block)] = block
        return ctypes.addressof(block)

    def export(self, address: int) -> bytes:
        handle = b"handle %d" % next(self.numbers)
        self.handles[handle.ljust(64, b"x")] = address
        return handle.ljust(64, b"x")


class Fake:
    """One rank's library. ``open`` lists what was opened and not given back; ``fail`` is the number of the
    call (from 0) that returns an error instead of doing anything, or the name of a function that always
    does."""

    def __init__(self, machine: Machine, fail: int | str | None = None) -> None:
        self.machine, self.fail = machine, fail
        self.calls: list[str] = []
        self.open: list[tuple[str, int]] = []
        self.last_error = 0

    def __getattr__(self, name: str) -> Callable[..., Any]:
        if not name.startswith(("cu", "hip")):
            raise AttributeError(name)
        if name.endswith("ErrorName") or name == "hipGetLastError":
            function: Callable[..., Any] = getattr(self, "_" + name)
            return function

        def call(*arguments: Any) -> int:
            number = len(self.calls)
            self.calls.append(name)
            if self.fail in (number, name):
                self.last_error = ERROR
                return ERROR
            getattr(self, "_" + name)(*[getattr(a, "_obj", a) for a in arguments])  # what byref holds
            return 0

        return call

    def _opened(self, kind: str, value: int) -> None:
        self.open.append((kind, value))

    def _closed(self, kind: str, value: int) -> None:
        self.open.remove((kind, value))

    def _cuGetErrorName(self, code: Any, text: Any) -> int:
        text._obj.value = b"CUDA_ERROR_INVALID_CONTEXT"
        return 0

    def _hipGetErrorName(self, code: Any) -> bytes:
        return b"hipErrorInvalidContext"

    def _hipGetLastError(self) -> int:
        self.last_error, code = 0, self.last_error
        return code

    # IPC ----------------------------------------------------------------------------------------------------

    def _cuMemAlloc_v2(self, address: Any, nbytes: Any) -> None:
        assert nbytes.value % devices.BLOCK == 0
        address.value = self.machine.new(nbytes.value)
        self._opened("memory", address.value)

    def _cuMemFree_v2(self, address: Any) -> None:
        self._closed("memory", address.value)

    def _cuIpcGetMemHandle(self, handle: Any, address: Any) -> None:
        ctypes.memmove(ctypes.addressof(handle), self.machine.export(address.value), 64)

    def _cuIpcOpenMemHandle_v2(self, address: Any, handle: Any, flags: Any) -> None:
        assert flags.value == 1
        address.value = self.machine.handles[ctypes.string_at(ctypes.addressof(handle), 64)]
        self._opened("mapping", address.value)

    def _cuIpcCloseMemHandle(self, address: Any) -> None:
        self._closed("mapping", address.value)

    def _hipExtMallocWithFlags(self, address: Any, nbytes: Any, flags: Any) -> None:
        assert flags.value == 3
        self._cuMemAlloc_v2(address, nbytes)

    _hipFree = _cuMemFree_v2
    _hipIpcGetMemHandle = _cuIpcGetMemHandle
    _hipIpcOpenMemHandle = _cuIpcOpenMemHandle_v2
    _hipIpcCloseMemHandle = _cuIpcCloseMemHandle

    # Fabric -------------------------------------------------------------------------------------------------

    def _cuMemGetAllocationGranularity(self, unit: Any, properties: Any, which: Any) -> None:
        unit.value = devices.BLOCK + EXTRA  # not a power of two, so that rounding up shows

    def _cuMemCreate(self, memory: Any, nbytes: Any, properties: Any, flags: Any) -> None:
        assert (properties.type, properties.handle_types) == (1, 8)
        assert (properties.location.type, properties.location.id) == (1, 0)
        assert nbytes.value % (devices.BLOCK + EXTRA) == 0
        memory.value = self.machine.new(nbytes.value)
        self._opened("physical", memory.value)

    def _cuMemRelease(self, memory: Any) -> None:
        self._closed("physical", memory.value)

    def _cuMemExportToShareableHandle(self, handle: Any, memory: Any, kind: Any, flags: Any) -> None:
        assert kind.value == 8
        ctypes.memmove(ctypes.addressof(handle), self.machine.export(memory.value), 64)

    def _cuMemImportFromShareableHandle(self, memory: Any, handle: Any, kind: Any) -> None:
        memory.value = self.machine.handles[ctypes.string_at(ctypes.addressof(handle), 64)]
        self._opened("physical", memory.value)

    def _cuMemAddressReserve(self, address: Any, nbytes: Any, *rest: Any) -> None:
        # The fake cannot map: what is reserved next to be mapped is the memory that came last.
        address.value = self.open[-1][1]
        self._opened("address", address.value)

    def _cuMemAddressFree(self, address: Any, nbytes: Any) -> None:
        self._closed("address", address.value)

    def _cuMemMap(self, address: Any, nbytes: Any, offset: Any, memory: Any, flags: Any) -> None:
        assert address.value == memory.value
        self._opened("mapping", address.value)

    def _cuMemUnmap(self, address: Any, nbytes: Any) -> None:
        self._closed("mapping", address.value)

    def _cuMemSetAccess(self, address: Any, nbytes: Any, access: Any, count: Any) -> None:
        assert (access.location.type, access.location.id, access.flags, count.value) == (1, 0, 3, 1)


class Nvml:
    """A fake of NVML that knows one fabric."""

    def __init__(self, cluster: bytes, state: int = 3, code: int = 0) -> None:
        self.cluster, self.state, self.code, self.users = cluster, state, code, 0

    def nvmlInit_v2(self) -> int:
        self.users += 1
        return 0

    def nvmlShutdown(self) -> int:
        self.users -= 1
        return 0

    def nvmlDeviceGetHandleByUUID(self, uuid: bytes, handle: Any) -> int:
        assert uuid == b"GPU-1234"
        return 0

    def nvmlDeviceGetGpuFabricInfo(self, handle: Any, info: Any) -> int:
        info._obj.cluster[:] = list(self.cluster)
        info._obj.state, info._obj.clique = self.state, 7
        return self.code


class Symmetric:
    """A fake of torch's module: ranks are threads that know each other's tensors."""

    def __init__(self, ranks: int = 1, multicast: int = 0, fail: str = "") -> None:
        self.tensors: dict[int, Tensor] = {}
        self.barrier = threading.Barrier(ranks)
        self.multicast, self.fail = multicast, fail
        self.variable: list[str | None] = []
        self.multicast_ptr = multicast

    def empty(self, nbytes: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        self.variable.append(os.environ.get("TORCH_SYMM_MEM_DISABLE_MULTICAST"))
        if self.fail == "empty":
            raise RuntimeError("out of memory")
        return torch.full((nbytes,), 0x5A, dtype=dtype, device=device)

    def rendezvous(self, tensor: Tensor, group: Any) -> Any:
        assert group.name == "experts"
        self.tensors[group.rank] = tensor
        self.barrier.wait()
        if self.fail == "rendezvous" and group.rank == 1:
            raise RuntimeError("no peer access")
        return SymmetricHandle(self)


class SymmetricHandle:
    def __init__(self, module: Symmetric) -> None:
        self.module, self.multicast_ptr = module, module.multicast
        self.buffer_ptrs = [module.tensors[rank].data_ptr() for rank in sorted(module.tensors)]

    def get_buffer(self, rank: int, sizes: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        return self.module.tensors[rank].view(dtype)[: sizes[0]]


class Group:
    name = "experts"

    def __init__(self, rank: int) -> None:
        self.rank = rank
