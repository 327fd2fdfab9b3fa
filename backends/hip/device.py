"""The library of a device: code objects, loaded and launched by the vendor's own interface through ctypes.

The HIP runtime and the CUDA driver have the same functions under other names. Not run on hardware: the tests
call a stand-in that notes what it is asked.
"""

from __future__ import annotations

import contextlib
import ctypes
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

from dg_core.errors import BackendUnavailable, DGError

from .library import Kernel, sized
from .manifest import Row

_MOST_THREADS = 2**32 - 1  # of a launch, as the runtimes count them
_DYNAMIC_MEMORY = 8  # CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES


@dataclass(frozen=True)
class Names:
    """How a vendor calls what is needed.

    Attributes:
        end: ends the list of a launch's extras.
        attribute: the function that allows a kernel its local memory, where that is given at the launch;
            empty where it stands in the kernel.
    """

    vendor: str
    files: tuple[str, ...]
    load: str
    function: str
    launch: str
    error: str
    end: int
    attribute: str = ""


HIP = Names(
    "the HIP runtime", ("libamdhip64.so", "libamdhip64.so.7", "libamdhip64.so.6", "libamdhip64.so.5"),
    "hipModuleLoadData", "hipModuleGetFunction", "hipModuleLaunchKernel", "hipGetErrorName", 3,
)  # fmt: skip
CUDA = Names(
    "the CUDA driver", ("libcuda.so.1", "libcuda.so"),
    "cuModuleLoadData", "cuModuleGetFunction", "cuLaunchKernel", "cuGetErrorName", 0, "cuFuncSetAttribute",
)  # fmt: skip


def open_runtime(names: Names) -> ctypes.CDLL:
    """The vendor's library: the one that torch has loaded, since a second copy would not know its streams.

    Raises:
        BackendUnavailable: there is none.
    """
    stem = re.escape(names.files[0].partition(".so")[0])
    with contextlib.suppress(OSError):
        found = re.search(
            rf"\S*/{stem}[^/\s]*\.so[^/\s]*$", Path("/proc/self/maps").read_text(), re.MULTILINE
        )
        if found:
            return ctypes.CDLL(found[0])
    reason = ""
    for name in names.files:
        try:
            return ctypes.CDLL(name)
        except OSError as error:
            reason = reason or str(error)
    raise BackendUnavailable(f"hip: {names.vendor} does not load: {reason}")


class Runtime:
    """The functions of a vendor's library, every return code looked at."""

    def __init__(self, native: Any, names: Names) -> None:
        self._native, self.names = native, names

    def _call(self, function: str, what: str, *arguments: Any) -> None:
        code = getattr(self._native, function)(*arguments)
        if code:
            raise DGError(f"{what}: {function} returned {code}{self._explain(code)}")

    def _explain(self, code: int) -> str:
        explain = getattr(self._native, self.names.error)
        text = ctypes.c_char_p()
        if self.names is CUDA:
            explain(code, ctypes.byref(text))
        else:
            explain.restype = ctypes.c_char_p
            text.value = explain(code)
        return f" ({text.value.decode()})" if text.value else ""

    def load(self, image: bytes, what: str) -> ctypes.c_void_p:
        module = ctypes.c_void_p()
        self._call(self.names.load, what, ctypes.byref(module), image)
        return module

    def function(self, module: ctypes.c_void_p, kernel: Kernel) -> ctypes.c_void_p:
        found = ctypes.c_void_p()
        name = kernel.name
        self._call(self.names.function, name, ctypes.byref(found), module, name.encode())
        if self.names.attribute:
            self._call(self.names.attribute, name, found, _DYNAMIC_MEMORY, kernel.lds)
        return found

    def launch(
        self,
        kernel: Kernel,
        function: ctypes.c_void_p,
        blocks: int,
        stream: int,
        argument: ctypes.Structure,
    ) -> None:
        """One argument, as a buffer: its fields are where the kernel's struct has them."""
        size = ctypes.c_size_t(ctypes.sizeof(argument))
        # The buffer and its size, by their marks.
        extras = (ctypes.c_void_p * 5)(
            1, ctypes.addressof(argument), 2, ctypes.addressof(size), self.names.end
        )
        lds = kernel.lds if self.names.attribute else 0
        sizes = [ctypes.c_uint(n) for n in (blocks, 1, 1, kernel.threads, 1, 1, lds)]
        self._call(self.names.launch, kernel.name, function, *sizes, ctypes.c_void_p(stream), None, extras)


class DeviceLibrary:
    """The kernels of one device.

    Args:
        rows: the manifest. images: the contents of its files, by their names; loaded at once, since a stream
            that is being captured allows no loading later.
        stream: gives the stream to launch on.
        guard: makes the device the current one.
    """

    def __init__(
        self,
        arch: str,
        rows: Iterable[Row],
        images: Mapping[str, bytes],
        runtime: Runtime,
        stream: Callable[[], int],
        guard: Callable[[], contextlib.AbstractContextManager[Any]] = contextlib.nullcontext,
    ) -> None:
        self.arch, self._runtime, self._stream, self._guard = arch, runtime, stream, guard
        kernels, self._functions = {}, {}
        with guard():
            modules = {name: runtime.load(image, name) for name, image in images.items()}
            for index, row in enumerate(rows):
                kernel = Kernel(row.kernel, index, row.threads, row.lds, row.fields, row.kernargs)
                kernels[row.kernel] = sized(kernel, row.file)
                self._functions[row.kernel] = runtime.function(modules[row.file], kernel)
        self.kernels: Mapping[str, Kernel] = MappingProxyType(kernels)

    def launch(self, name: str, blocks: int, *, resident: int = 0, **fields: Any) -> None:
        kernel = self.kernels[name]
        argument = kernel.pack(fields)
        if blocks * kernel.threads > _MOST_THREADS:
            raise DGError(
                f"{name}: {blocks} blocks of {kernel.threads} threads are more than {_MOST_THREADS} threads"
            )
        if blocks:
            with self._guard():
                self._runtime.launch(kernel, self._functions[name], blocks, self._stream(), argument)
