"""A launch that is prepared once and called many times: ``launcher(addresses, stream)``.

Two implementations stand behind ``make_launcher``: the native module ``_C`` (csrc_cuda/host), and Python over
the driver through ctypes where that module is not built. They call the same functions of the driver with the
same values, and raise the same errors. ``which`` tells which one is in use, and why.
"""

from __future__ import annotations

import ctypes
import functools
import importlib
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from dg_core import config
from dg_core.errors import ArgumentError

from . import structs
from .driver import Function, check_address, check_grid, check_map

Launcher = Callable[[Sequence[int], int], None]
#: What a kernel's parameters may take on every card and driver of CUDA 12 (CUDA C++ programming guide).
MAX_PARAMETER_BYTES = 4096
MAX_SLOTS = 64  # of one call; an operation has seven tensors at most
POINTER_BYTES = 8
_WORD = 1 << 64
_INTERFACE = 2  # as in csrc_cuda/host/module.cpp
_HOW = "build_cuda.sh builds it in a checkout, pip install does where a C++ compiler is"


@dataclass(frozen=True)
class MapSpec:
    """A tensor map inside the kernel's parameters.

    Args:
        offset: its place in the parameters in bytes, a multiple of 64.
        slot: which of a call's addresses is the tensor's.
        dtype, shape, row_bytes, box, swizzle, l2_promotion, groups, group_bytes: as for ``Driver.encode_2d``;
            the map has three axes where ``groups`` is not 0.
        what: the tensor's name, for errors.
    """

    offset: int
    slot: int
    dtype: str
    shape: tuple[int, int]
    row_bytes: int
    box: tuple[int, int]
    swizzle: int
    l2_promotion: int
    what: str
    groups: int = 0
    group_bytes: int = 0


@dataclass(frozen=True)
class LaunchSpec:
    """All of a launch but the addresses of its tensors and its stream.

    Args:
        parameters: the kernel's only parameter, a structure with every constant filled in.
        maps: the tensor maps inside it.
        pointers: (offset, slot): that address of a call is written there, 64 bits, 8-byte aligned.
    """

    function: Function
    grid: tuple[int, int, int]
    block: tuple[int, int, int]
    cluster: tuple[int, int, int]
    pdl: bool
    parameters: bytes
    maps: tuple[MapSpec, ...]
    pointers: tuple[tuple[int, int], ...]

    @functools.cached_property
    def slots(self) -> int:
        """How many addresses a call must have at least."""
        taken = [each.slot for each in self.maps] + [slot for _, slot in self.pointers]
        return max(taken, default=-1) + 1


def make_launcher(spec: LaunchSpec) -> Launcher:
    """A function of a call's addresses (an int for each tensor, 0 for none) and its stream's handle.

    It runs in the function's context, whichever is current where it is called. A tensor map is encoded again
    only when its address differs from that launcher's last call. Threads may call one launcher at once.

    Raises:
        ArgumentError: the specification breaks a rule of the hardware, or of the parameters' layout. From a
            call: too few addresses, one that is no address, or one of a mapped tensor that is not aligned.
        DriverError: (from a call) the driver refuses a map or the launch.
    """
    check_spec(spec)
    module, _ = _choice()
    # The native module opens the library by itself, so it needs a name that the loader knows.
    if module is None or not spec.function.driver.path:
        return PythonLauncher(spec)
    return native_launcher(module, spec)


def raw_stream(device: torch.device) -> int:
    """The current stream's handle; torch's public property takes 4.7 us, this 0.1 (host of one H200)."""
    return current_stream(device)()


def current_stream(device: torch.device) -> Callable[[], int]:
    """A function that gives the handle of the stream that is current when it is called."""
    return functools.partial(torch._C._cuda_getCurrentRawStream, device.index or 0)


def which() -> tuple[str, str]:
    """The implementation that ``make_launcher`` takes, ``native`` or ``python``, and the reason."""
    module, reason = _choice()
    return ("python" if module is None else "native"), reason


def _choice() -> tuple[Any, str]:
    if not config.env("DG_NATIVE_LAUNCHER"):
        return None, "DG_NATIVE_LAUNCHER is 0"
    return native_module()


@functools.cache
def native_module() -> tuple[Any, str]:
    """The native module and what it was built with; None and the reason where there is none."""
    try:
        module: Any = importlib.import_module("._C", __package__)
    except ImportError as error:
        return None, f"the native launcher does not import: {error}; {_HOW}"
    if module.INTERFACE != _INTERFACE:
        return None, f"{module.__file__} was built from other sources; {_HOW}"
    return module, f"{module.__file__}, built with pybind11 {module.PYBIND11} and {module.FORMATTER}"


# Rules ------------------------------------------------------------------------------------------------------


def check_spec(spec: LaunchSpec) -> None:
    """Every rule for a launch that does not depend on a call.

    Raises:
        ArgumentError: one is broken; the message names the kernel or the tensor, the values and the rule.
    """
    name, size = spec.function.name, len(spec.parameters)
    check_grid(name, spec.grid, spec.cluster)
    if not 0 < size <= MAX_PARAMETER_BYTES:
        raise ArgumentError(f"{name}: {size} bytes of parameters; it must be in [1, {MAX_PARAMETER_BYTES}]")
    end, last = 0, ""
    for offset, length, alignment, slot, what in sorted(_places(spec)):
        if offset % alignment or offset < 0 or offset + length > size:
            raise ArgumentError(
                f"{name}: {what} takes {length} bytes at offset {offset} of {size} bytes of parameters; "
                f"it must lie inside, at a multiple of {alignment}"
            )
        if offset < end:
            raise ArgumentError(f"{name}: {what} at offset {offset} overlaps {last}, which ends at {end}")
        if not 0 <= slot < MAX_SLOTS:
            raise ArgumentError(f"{name}: {what} has slot {slot}; it must be in [0, {MAX_SLOTS})")
        end, last = offset + length, what
    for each in spec.maps:
        check_map(
            each.dtype, each.shape, each.row_bytes, each.box, each.swizzle, each.l2_promotion, each.what,
            each.groups, each.group_bytes,
        )  # fmt: skip


def _places(spec: LaunchSpec) -> Iterator[tuple[int, int, int, int, str]]:
    """Offset, bytes, alignment, slot and name of whatever a call writes into the parameters."""
    for each in spec.maps:
        what = f"the tensor map of {each.what}"
        yield each.offset, structs.TENSOR_MAP_BYTES, structs.TENSOR_MAP_ALIGNMENT, each.slot, what
    for offset, slot in spec.pointers:
        yield offset, POINTER_BYTES, POINTER_BYTES, slot, f"the pointer of slot {slot}"


def check_call(spec: LaunchSpec, addresses: Sequence[int], stream: int) -> None:
    """Every rule for the arguments of a call.

    Raises:
        ArgumentError: one is broken; the message names the kernel or the tensor, the value and the rule.
    """
    name = spec.function.name
    if len(addresses) < spec.slots:
        raise ArgumentError(f"{name}: the call has {len(addresses)} addresses; it must have {spec.slots}")
    for slot, address in enumerate(addresses[: spec.slots]):
        if not isinstance(address, int) or not 0 <= address < _WORD:
            raise ArgumentError(f"{name}: address {slot} is {address!r}; it must be an integer in [0, 2^64)")
    if not isinstance(stream, int) or not 0 <= stream < _WORD:
        raise ArgumentError(f"{name}: the stream is {stream!r}; it must be an integer in [0, 2^64)")
    for each in spec.maps:
        check_address(addresses[each.slot], each.what)


# Native -----------------------------------------------------------------------------------------------------


def native_launcher(module: Any, spec: LaunchSpec) -> Launcher:
    """The launcher of the native module; ``spec`` has passed ``check_spec``."""
    function, maps = spec.function, []
    for each in spec.maps:
        dtype, swizzle = structs.DATA_TYPES[each.dtype], structs.SWIZZLES[each.swizzle]
        l2_promotion = structs.L2_PROMOTIONS[each.l2_promotion]
        axes = structs.axes(each.shape, each.row_bytes, each.box, each.groups, each.group_bytes)
        maps.append((each.offset, each.slot, dtype, *axes, swizzle, l2_promotion, each.what))
    launcher: Launcher = module.plan(
        library=function.driver.path, name=function.name, function=function.handle, context=function.context,
        grid=spec.grid, block=spec.block, cluster=spec.cluster, shared_bytes=function.shared_bytes,
        pdl=spec.pdl, parameters=spec.parameters, maps=maps, pointers=spec.pointers,
        error=function.driver.error, refuse=functools.partial(check_call, spec),
    )  # fmt: skip
    return launcher


# Python -----------------------------------------------------------------------------------------------------


class PythonLauncher:
    """The launcher without the native module; ``spec`` has passed ``check_spec``.

    The parameters are shared by all calls, so a call holds a lock until the driver has copied them. What
    takes time is kept ready: a call of the driver with twelve arguments takes 2 us through ctypes.
    """

    def __init__(self, spec: LaunchSpec) -> None:
        function = spec.function
        self._spec, self._driver, self._context = spec, function.driver, function.context
        self._guard = threading.Lock()

        class Parameters(ctypes.Structure):
            _fields_ = (("bytes", ctypes.c_char * len(spec.parameters)),)

        self._parameters = structs.aligned(Parameters)
        start = ctypes.addressof(self._parameters)
        ctypes.memmove(start, spec.parameters, len(spec.parameters))
        self._launch = self._driver.prepare(
            function, spec.grid, spec.block, self._parameters, spec.cluster, spec.pdl
        )
        self._maps = [
            (
                start + each.offset, each,
                structs.tiled(
                    each.dtype, each.shape, each.row_bytes, each.box, each.swizzle, each.l2_promotion,
                    each.groups, each.group_bytes,
                ),
            )
            for each in spec.maps
        ]  # fmt: skip
        self._encoded: list[int | None] = [None] * len(spec.maps)
        self._pointers = [
            (ctypes.c_uint64.from_buffer(self._parameters, offset), slot) for offset, slot in spec.pointers
        ]
        self._last: list[int] | None = None  # what the parameters hold; None where they hold nothing whole
        self._current = ctypes.c_void_p()
        self._current_reference = ctypes.byref(self._current)

    def __call__(self, addresses: Sequence[int], stream: int) -> None:
        with self._guard:
            changed = addresses != self._last
            if changed or type(stream) is not int or not 0 <= stream < _WORD:
                check_call(self._spec, addresses, stream)
            self._driver.call("cuCtxGetCurrent", self._current_reference)
            if self._current.value == self._context:
                self._run(addresses, stream, changed)
            else:
                with self._driver.in_context(self._context):
                    self._run(addresses, stream, changed)

    def _run(self, addresses: Sequence[int], stream: int, changed: bool) -> None:
        if changed:
            self._bind(addresses)
        self._launch.run(stream)

    def __repr__(self) -> str:
        return f"<Python launcher of {self._spec.function.name}>"

    def _bind(self, addresses: Sequence[int]) -> None:
        """Bring maps and pointers to these addresses."""
        self._last = None
        for index, (at, each, arguments) in enumerate(self._maps):
            address = addresses[each.slot]
            if address != self._encoded[index]:
                self._encoded[index] = None  # what a failed call leaves behind is not to be relied upon
                self._driver.encode(at, address, arguments, each.what)
                self._encoded[index] = address
        for place, slot in self._pointers:
            place.value = addresses[slot]
        self._last = list(addresses)
