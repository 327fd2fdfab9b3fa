"""The CUDA driver through ctypes: load cubins, encode tensor maps, launch.

The library is looked for when it is first used, so that this module imports anywhere. Nothing here starts a
context: torch has made one for whoever holds a CUDA tensor, and its current one is used.
"""

from __future__ import annotations

import contextlib
import ctypes
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from dg_core import config
from dg_core.errors import ArgumentError, BackendUnavailable, DGError

from . import structs

LIBRARIES = ("libcuda.so.1", "libcuda.so")
# The functions that every driver of CUDA 12 has, with their parameters' types; all return a CUresult.
_POINTER, _INT, _UINT = ctypes.c_void_p, ctypes.c_int, ctypes.c_uint
_CONFIG = ctypes.POINTER(structs.LaunchConfig)
_SIGNATURES: dict[str, tuple[Any, ...]] = {
    "cuInit": (_UINT,),
    "cuDriverGetVersion": (ctypes.POINTER(_INT),),
    "cuGetErrorName": (_INT, ctypes.POINTER(ctypes.c_char_p)),
    "cuGetErrorString": (_INT, ctypes.POINTER(ctypes.c_char_p)),
    "cuCtxGetCurrent": (ctypes.POINTER(_POINTER),),
    "cuCtxPushCurrent_v2": (_POINTER,),
    "cuCtxPopCurrent_v2": (ctypes.POINTER(_POINTER),),
    "cuThreadExchangeStreamCaptureMode": (ctypes.POINTER(_INT),),
    "cuModuleLoadData": (ctypes.POINTER(_POINTER), ctypes.c_char_p),
    "cuModuleUnload": (_POINTER,),
    "cuModuleGetFunction": (ctypes.POINTER(_POINTER), _POINTER, ctypes.c_char_p),
    "cuFuncSetAttribute": (_POINTER, _INT, _INT),
    "cuTensorMapEncodeTiled": (
        _POINTER, _INT, ctypes.c_uint32, _POINTER, ctypes.POINTER(ctypes.c_uint64),
        ctypes.POINTER(ctypes.c_uint64), ctypes.POINTER(ctypes.c_uint32), ctypes.POINTER(ctypes.c_uint32),
        _INT, _INT, _INT, _INT,
    ),
    "cuLaunchKernelEx": (_CONFIG, _POINTER, ctypes.POINTER(_POINTER), _POINTER),
    "cuOccupancyMaxActiveClusters": (ctypes.POINTER(_INT), _POINTER, _CONFIG),
}  # fmt: skip
# Since CUDA 12.4: loads a function now where modules load lazily, and not at its first launch.
_OPTIONAL: dict[str, tuple[Any, ...]] = {"cuFuncLoad": (_POINTER,)}


class DriverError(DGError):
    """A call of the driver failed; ``code`` and ``name`` are CUDA's, the message holds its text too."""

    def __init__(self, call: str, code: int, name: str, text: str, hint: str = "") -> None:
        super().__init__(f"{call} failed: {name} ({code}): {text}{f'; {hint}' if hint else ''}")
        self.call, self.code, self.name = call, code, name


_HINTS = {
    "CUDA_ERROR_INVALID_CONTEXT": "no CUDA context is current; torch.cuda.init() makes one",
    "CUDA_ERROR_NO_BINARY_FOR_GPU": "the kernel was compiled for another architecture",
    "CUDA_ERROR_INVALID_IMAGE": "the cubin is damaged, or of a newer CUDA than the driver serves",
    "CUDA_ERROR_UNSUPPORTED_PTX_VERSION": "the compiler is of a newer CUDA than the driver serves",
}


@dataclass(frozen=True)
class Function:
    """A loaded kernel; it lives as long as the driver object that loaded it and its context."""

    name: str
    handle: int
    module: int
    shared_bytes: int
    driver: Driver
    context: int  # the handle of the context that it was loaded in


class Driver:
    """One driver library.

    Args:
        library: the loaded library, or anything with its functions.

    Raises:
        BackendUnavailable: it lacks a function, or does not start (no card, no permission).
    """

    def __init__(self, library: Any) -> None:
        self._library = library
        #: What the loader knows the library by; empty for an object that is no library.
        self.path = str(getattr(library, "_name", None) or "")
        self._loaded: dict[tuple[int, str], Function] = {}
        self._guard = threading.Lock()
        try:
            for name, parameters in _SIGNATURES.items():
                getattr(library, name).argtypes = parameters
        except AttributeError as error:
            raise BackendUnavailable(
                f"the CUDA driver is too old: {error}; kernels need one of CUDA 12.3 or newer"
            ) from error
        for name, parameters in _OPTIONAL.items():
            with contextlib.suppress(AttributeError):
                getattr(library, name).argtypes = parameters
        try:
            self.call("cuInit", 0)
        except DriverError as error:
            raise BackendUnavailable(f"the CUDA driver does not start: {error}") from error

    # Calls and errors ---------------------------------------------------------------------------------------

    def call(self, function: str, *arguments: Any) -> None:
        """Call a function of the driver.

        Raises:
            DriverError: it returns anything but CUDA_SUCCESS.
        """
        code = getattr(self._library, function)(*arguments)
        if code:
            raise self.error(function, code)

    def error(self, function: str, code: int) -> DriverError:
        """The error for a code that ``function`` returned."""
        name, text = self._text("cuGetErrorName", code), self._text("cuGetErrorString", code)
        return DriverError(function, code, name or "unknown", text or "no text", _HINTS.get(name, ""))

    def _text(self, function: str, code: int) -> str:
        text = ctypes.c_char_p()
        if getattr(self._library, function)(code, ctypes.byref(text)) or text.value is None:
            return ""
        return text.value.decode(errors="replace")

    def version(self) -> tuple[int, int]:
        """The release of CUDA that the driver serves."""
        return _version(self._library)

    def context(self) -> int:
        """The current context's handle; 0 where there is none."""
        handle = _POINTER()
        self.call("cuCtxGetCurrent", ctypes.byref(handle))
        return handle.value or 0

    @contextlib.contextmanager
    def in_context(self, context: int) -> Iterator[None]:
        """Make a context the current one of this thread for as long as the block lasts."""
        if self.context() == context:
            yield
            return
        self.call("cuCtxPushCurrent_v2", context)
        try:
            yield
        finally:
            self.call("cuCtxPopCurrent_v2", ctypes.byref(_POINTER()))

    @contextlib.contextmanager
    def relaxed_capture(self) -> Iterator[None]:
        """Let this thread load modules while a stream captures: such calls touch no stream, yet the driver
        refuses them in the other capture modes, and the capture is lost."""
        mode = _INT(structs.CAPTURE_RELAXED)
        self.call("cuThreadExchangeStreamCaptureMode", ctypes.byref(mode))
        try:
            yield
        finally:
            self.call("cuThreadExchangeStreamCaptureMode", ctypes.byref(mode))

    # Loading ------------------------------------------------------------------------------------------------

    def load(
        self, image: bytes, name: str, key: str, shared_bytes: int = 0, non_portable_cluster: bool = False
    ) -> Function:
        """The function ``name`` of a cubin, once for each ``key`` and context; works inside graph capture.

        Args:
            key: what tells this kernel from all others (its cache key).
            shared_bytes: dynamic shared memory of a launch; allowed for here, once.
            non_portable_cluster: allow clusters of more than eight blocks.

        Raises:
            DriverError: the driver refuses it; nothing stays loaded then.
        """
        place = (self.context(), key)
        with self._guard:
            if place not in self._loaded:
                start = time.perf_counter()
                with self.relaxed_capture():
                    module, function = self._load(image, name, shared_bytes, non_portable_cluster)
                self._loaded[place] = Function(name, function, module, shared_bytes, self, place[0])
                if config.env("DG_JIT_PRINT_LOAD_TIME"):
                    took = (time.perf_counter() - start) * 1e3
                    print(f"JIT {name}: loaded in {took:.2f} ms ({len(image)} bytes)", flush=True)
            return self._loaded[place]

    def _load(
        self, image: bytes, name: str, shared_bytes: int, non_portable_cluster: bool
    ) -> tuple[int, int]:
        """The handles of the module and of the function."""
        module, function = _POINTER(), _POINTER()
        self.call("cuModuleLoadData", ctypes.byref(module), image)
        try:
            self.call("cuModuleGetFunction", ctypes.byref(function), module, name.encode())
            if hasattr(self._library, "cuFuncLoad"):
                self.call("cuFuncLoad", function)
            if shared_bytes:
                attribute = structs.FUNCTION_MAX_DYNAMIC_SHARED_BYTES
                self.call("cuFuncSetAttribute", function, attribute, shared_bytes)
            if non_portable_cluster:
                attribute = structs.FUNCTION_NON_PORTABLE_CLUSTER_SIZE_ALLOWED
                self.call("cuFuncSetAttribute", function, attribute, 1)
        except DriverError:
            with contextlib.suppress(DriverError):  # the first error is the one to tell
                self.call("cuModuleUnload", module)
            raise
        return module.value or 0, function.value or 0

    # Tensor maps --------------------------------------------------------------------------------------------

    def encode_2d(
        self, at: int, address: int, dtype: str, shape: tuple[int, int], row_bytes: int, box: tuple[int, int],
        swizzle: int = 128, l2_promotion: int = 256, what: str = "tensor", groups: int = 0,
        group_bytes: int = 0,
    ) -> None:  # fmt: skip
        """Encode the tensor map of a matrix with rows that are contiguous, at host address ``at``.

        With ``groups`` it is the map of so many matrices of that shape, a third axis, and a box lies inside
        one of them: what it holds beyond the matrix's rows arrives as zeros, not as the next one's rows.

        Args:
            at: where the 128 bytes of the map go; 64-byte aligned (``structs.aligned``).
            address: the matrix's device address, with groups that of the first one.
            dtype: ``uint8`` (also for FP8), ``bfloat16``, ``float16``, ``float32`` or ``int32``.
            shape: rows and columns of the matrix; what a box holds beyond them arrives as zeros.
            row_bytes: distance of rows, a multiple of 16, less than 2^40.
            box: rows and columns of what one copy moves.
            swizzle: 0, 32, 64 or 128: the bytes of a row of the box in shared memory, at most.
            l2_promotion: 0, 64, 128 or 256: the bytes that the L2 fetches at once.
            what: the tensor's name, for errors.
            groups: how many matrices there are, in [1, 2^32]; 0 for a map of two axes.
            group_bytes: distance of the matrices, a multiple of 16, less than 2^40. Matrices may lie between
                each other's rows. 0 is for one group; without groups it is not read.

        Raises:
            ArgumentError: a rule of the hardware is broken; the message says which.
            DriverError: the driver refuses it all the same.
        """
        check_map(dtype, shape, row_bytes, box, swizzle, l2_promotion, what, groups, group_bytes)
        check_address(address, what)
        if at % structs.TENSOR_MAP_ALIGNMENT:
            raise ArgumentError(
                f"tensor map of {what}: the map's address is {at:#x}; it must be 64-byte aligned"
            )
        arguments = structs.tiled(dtype, shape, row_bytes, box, swizzle, l2_promotion, groups, group_bytes)
        self.encode(at, address, arguments, what)

    def encode(self, at: int, address: int, arguments: structs.Tiled, what: str) -> None:
        """Encode a tensor map from what ``structs.tiled`` made of rules that ``check_map`` has seen.

        Raises:
            DriverError: the driver refuses it.
        """
        before, after = arguments
        code = self._library.cuTensorMapEncodeTiled(at, *before, address, *after)
        if code:
            raise self.error(f"tensor map of {what}: cuTensorMapEncodeTiled", code)

    # Launching ----------------------------------------------------------------------------------------------

    def prepare(
        self, function: Function, grid: tuple[int, int, int], block: tuple[int, int, int],
        parameters: ctypes.Structure, cluster: tuple[int, int, int] = (1, 1, 1), pdl: bool = False,
    ) -> Launch:  # fmt: skip
        """A launch with one structure as the kernel's only parameter, to be run any number of times."""
        return Launch(self, function, grid, block, parameters, cluster, pdl)

    def max_active_clusters(self, launch: Launch) -> int:
        """How many clusters of a launch fit on the card at once.

        One H200 with one block to an SM holds 66 clusters of 2, 30 of 4, 15 of 8: fewer than 132 / size.
        """
        count = _INT()
        self.call(
            "cuOccupancyMaxActiveClusters", ctypes.byref(count), launch.function.handle,
            ctypes.byref(launch.config),
        )  # fmt: skip
        return count.value


class Launch:
    """A kernel with its grid, attributes and parameters; ``run`` is one call of the driver.

    ``parameters`` may be written to between runs: the driver copies it at each.
    """

    def __init__(
        self, driver: Driver, function: Function, grid: tuple[int, int, int], block: tuple[int, int, int],
        parameters: ctypes.Structure, cluster: tuple[int, int, int], pdl: bool,
    ) -> None:  # fmt: skip
        check_grid(function.name, grid, cluster)
        self.driver, self.function, self.parameters = driver, function, parameters
        self._attributes = (structs.Attribute * 2)()
        count = 0
        if cluster != (1, 1, 1):
            self._attributes[count].id = structs.ATTRIBUTE_CLUSTER_DIMENSION
            self._attributes[count].value.cluster = structs.ClusterDimension(*cluster)
            count += 1
        if pdl:
            self._attributes[count].id = structs.ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
            self._attributes[count].value.programmatic = 1
            count += 1
        # The structure holds the array's address alone, so the array is kept above.
        first = ctypes.cast(self._attributes, ctypes.POINTER(structs.Attribute))
        self.config = structs.LaunchConfig(*grid, *block, function.shared_bytes, None, first, count)
        self._pointers = (_POINTER * 1)(ctypes.addressof(parameters))
        self._call = driver._library.cuLaunchKernelEx
        self._config_reference = ctypes.byref(self.config)

    def run(self, stream: int) -> None:
        """Launch on a stream (its handle; 0 is the default one).

        A launch object belongs to one thread at a time.

        Raises:
            DriverError: the driver refuses the launch.
        """
        self.config.stream = stream
        code = self._call(self._config_reference, self.function.handle, self._pointers, None)
        if code:
            raise self.driver.error(f"{self.function.name}: cuLaunchKernelEx", code)


def check_grid(name: str, grid: tuple[int, int, int], cluster: tuple[int, int, int]) -> None:
    """The rule for clusters: along each axis they divide the grid.

    Raises:
        ArgumentError: they do not; the message names the kernel, the axis and both sizes.
    """
    for axis, size, blocks in zip("xyz", cluster, grid, strict=True):
        if size < 1 or blocks % size or blocks < 1:
            raise ArgumentError(
                f"{name}: the grid has {blocks} blocks along {axis} and clusters have {size}; "
                "the first must be a positive multiple of the second"
            )


def check_address(address: int, what: str) -> None:
    """The rule for the address of a tensor that is reached through a map.

    Raises:
        ArgumentError: it is not aligned.
    """
    if address % structs.MAPPED_ALIGNMENT:
        raise ArgumentError(
            f"tensor map of {what}: the address is {address:#x}; "
            f"it must be {structs.MAPPED_ALIGNMENT}-byte aligned"
        )


def check_map(
    dtype: str, shape: tuple[int, int], row_bytes: int, box: tuple[int, int], swizzle: int, l2_promotion: int,
    what: str, groups: int = 0, group_bytes: int = 0,
) -> None:  # fmt: skip
    """The hardware's rules for a tensor map of two or three axes, not interleaved, but for its addresses.

    The driver checks them too and names none of them. They are those of ``cuTensorMapEncodeTiled`` in
    NVIDIA's reference of the driver API.

    Raises:
        ArgumentError: one is broken; the message says which, and by what.
    """
    choices: tuple[tuple[str, str | int, tuple[str | int, ...]], ...] = (
        ("dtype", dtype, tuple(structs.DATA_TYPES)),
        ("swizzle", swizzle, tuple(structs.SWIZZLES)),
        ("l2_promotion", l2_promotion, tuple(structs.L2_PROMOTIONS)),
    )
    for name, value, known in choices:
        if value not in known:
            allowed = ", ".join(map(str, known))
            raise ArgumentError(f"tensor map of {what}: {name} is {value!r}; it must be one of {allowed}")
    size = structs.ELEMENT_BYTES[dtype]
    box_bytes = box[1] * size
    apart = f"rows are {row_bytes} bytes apart"
    rules = (
        (row_bytes % structs.MAPPED_ALIGNMENT == 0, f"{apart}; it must be a multiple of 16"),
        (0 <= row_bytes < structs.MAPPED_BYTES, f"{apart}; it must be less than 2^40"),
        (all(0 < n <= 1 << 32 for n in shape), f"the shape is {shape}; each size must be in [1, 2^32]"),
        (all(0 < n <= 256 for n in box), f"the box is {box}; each size must be in [1, 256]"),
        (box_bytes % 16 == 0, f"a row of the box has {box_bytes} bytes; it must be a multiple of 16"),
        (
            not swizzle or box_bytes <= swizzle,
            f"a row of the box has {box_bytes} bytes; the swizzle holds at most {swizzle}",
        ),
    )
    for ok, words in (*rules, *_group_rules(groups, group_bytes)):
        if not ok:
            raise ArgumentError(f"tensor map of {what}: {words}")


def _group_rules(groups: int, group_bytes: int) -> tuple[tuple[bool, str], ...]:
    """The rules for the third axis of a map: whether each holds, and the words for where it does not."""
    if groups == 0:
        return ()
    least = 0 if groups == 1 else structs.MAPPED_ALIGNMENT
    apart = f"the groups are {group_bytes} bytes apart"
    return (
        (0 < groups <= 1 << 32, f"there are {groups} groups; it must be in [1, 2^32], or 0 for two axes"),
        (group_bytes % structs.MAPPED_ALIGNMENT == 0, f"{apart}; it must be a multiple of 16"),
        (group_bytes < structs.MAPPED_BYTES, f"{apart}; it must be less than 2^40"),
        (group_bytes >= least, f"{apart}; it must be at least {least} where groups is {groups}"),
    )


# The library ------------------------------------------------------------------------------------------------

_driver: Driver | None = None
_driver_guard = threading.Lock()


def open_library(names: tuple[str, ...] = LIBRARIES) -> Any:
    """The driver's library as the loader finds it.

    Raises:
        BackendUnavailable: there is none; the message holds the loader's reasons.
    """
    reasons = []
    for name in names:
        try:
            return ctypes.CDLL(name)
        except OSError as error:
            reasons.append(str(error))
    raise BackendUnavailable(
        f"no CUDA driver: {'; '.join(reasons)}. It comes with NVIDIA's kernel driver; "
        "a container gets it when it is started with the GPUs (docker run --gpus all)"
    )


def _version(library: Any) -> tuple[int, int]:
    value = _INT()
    code = library.cuDriverGetVersion(ctypes.byref(value))
    if code:
        raise BackendUnavailable(
            f"the CUDA driver does not tell its version: cuDriverGetVersion returned {code}"
        )
    return value.value // 1000, value.value % 1000 // 10


def version() -> tuple[int, int] | None:
    """The release of CUDA that the driver serves, None without one; starts neither driver nor context."""
    try:
        return _version(open_library())
    except BackendUnavailable:
        return None


def driver() -> Driver:
    """The driver of this process.

    Raises:
        BackendUnavailable: there is none, or it does not start; the message says why.
    """
    global _driver
    with _driver_guard:
        if _driver is None:
            _driver = Driver(open_library())
        return _driver
