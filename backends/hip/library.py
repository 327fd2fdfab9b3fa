"""Kernels of one architecture: the interface that plans launch through, and the host library behind it.

A kernel takes one struct. Its fields come with it as text (``ptr a;i64 rows;``), so a launch names its
arguments and no second declaration of the struct exists. Needs no torch: the build loads the host library
too.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Protocol

from dg_core.errors import BackendUnavailable, DGError

_TYPES: dict[str, Any] = {
    "ptr": ctypes.c_uint64, "i64": ctypes.c_int64, "i32": ctypes.c_int32, "f32": ctypes.c_float,
}  # fmt: skip


@functools.lru_cache(maxsize=1024)
def arguments_of(fields: str) -> type[ctypes.Structure]:
    """The struct that ``fields`` describes, as the C++ compiler lays it out."""
    pairs = [part.split() for part in fields.split(";") if part]
    members = [(name, _TYPES[kind]) for kind, name in pairs]
    return type("Arguments", (ctypes.Structure,), {"_fields_": members})


@dataclass(frozen=True)
class Kernel:
    """One kernel of a library.

    Attributes:
        index: its number there. threads: of a block. lds: bytes of local memory of a block.
        fields: the members of its argument, ``type name;`` each. nbytes: what the compiler says of its size.
    """

    name: str
    index: int
    threads: int
    lds: int
    fields: str
    nbytes: int

    def pack(self, values: Mapping[str, Any]) -> ctypes.Structure:
        """The argument struct; a tensor gives its address, None the address 0.

        Raises:
            TypeError: a field is missing, or there is one more.
        """
        kind = arguments_of(self.fields)
        names = {name for name, _ in kind._fields_}  # type: ignore[misc]
        if names != values.keys():
            raise TypeError(f"{self.name} takes {sorted(names)}, not {sorted(values)}")
        return kind(**{name: _plain(value) for name, value in values.items()})


def _plain(value: Any) -> Any:
    if hasattr(value, "data_ptr"):
        return value.data_ptr()
    return 0 if value is None else value


def sized(kernel: Kernel, origin: str) -> Kernel:
    """``kernel``, if its fields make a struct of the size that the compiler gave it.

    Raises:
        BackendUnavailable: they do not; ``origin`` is the file in the message.
    """
    size = ctypes.sizeof(arguments_of(kernel.fields))
    if size != kernel.nbytes:
        raise BackendUnavailable(
            f"hip: {origin}: the argument of {kernel.name} has {kernel.nbytes} bytes, not the {size} of its "
            "fields"
        )
    return kernel


class Library(Protocol):
    """The kernels of one architecture, loaded."""

    arch: str
    kernels: Mapping[str, Kernel]

    def launch(self, name: str, blocks: int, *, resident: int = 0, **fields: Any) -> None:
        """Run a kernel on the current stream.

        Args:
            blocks: how many; 0 launches nothing.
            resident: blocks that are started and not at their end at a time, at most; 0 for all of them, as a
                kernel needs whose blocks wait for each other. A device decides this by itself.
            fields: the members of the kernel's argument by name.

        Raises:
            DGError: the launch failed; the message names kernel and reason.
        """
        ...


class _Info(ctypes.Structure):
    _fields_ = (
        ("name", ctypes.c_char_p),
        ("fields", ctypes.c_char_p),
        ("threads", ctypes.c_uint32),
        ("bytes", ctypes.c_uint32),
        ("lds", ctypes.c_uint32),
    )


class HostLibrary:
    """The ``host`` architecture: kernels compiled for the processor, on CPU tensors. A launch returns when
    all of its blocks have ended.

    Attributes:
        seed: the order in which a block's threads run; 0 is that of their numbers, odd ones let a wave run
            ahead of the others. Results may not depend on it.
    """

    arch = "host"

    def __init__(self, path: str) -> None:
        try:
            native = ctypes.CDLL(path)
            native.dg_hip_kernel_at, native.dg_hip_launch  # noqa: B018, raises where it is another library
        except (OSError, AttributeError) as error:
            raise BackendUnavailable(f"the HIP host library does not load: {error}") from error
        native.dg_hip_kernel_at.restype = ctypes.POINTER(_Info)
        native.dg_hip_kernel_at.argtypes = [ctypes.c_uint32]
        native.dg_hip_launch.restype = ctypes.c_char_p
        native.dg_hip_launch.argtypes = [
            ctypes.c_uint32, ctypes.c_uint32, ctypes.c_void_p, ctypes.c_uint32, ctypes.c_uint64,
        ]  # fmt: skip
        self._native = native
        self.seed = 0
        self.path = path
        self.kernels: Mapping[str, Kernel] = MappingProxyType(self._read())

    def _read(self) -> dict[str, Kernel]:
        found: dict[str, Kernel] = {}
        while info := self._native.dg_hip_kernel_at(len(found)):
            told = info.contents
            kernel = Kernel(
                told.name.decode(), len(found), told.threads, told.lds, told.fields.decode(), told.bytes
            )
            found[kernel.name] = sized(kernel, self.path)
        return found

    def launch(self, name: str, blocks: int, *, resident: int = 0, **fields: Any) -> None:
        kernel = self.kernels[name]
        argument = kernel.pack(fields)
        failure = self._native.dg_hip_launch(
            kernel.index, blocks, ctypes.byref(argument), resident, self.seed
        )
        if failure is not None:
            raise DGError(f"{name}: {failure.decode()}")
