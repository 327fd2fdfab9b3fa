"""Which architecture a device has, and its library: built files, looked at before they are loaded."""

from __future__ import annotations

import functools
import platform
from collections.abc import Mapping
from pathlib import Path

import torch

from dg_core import config
from dg_core.backend import Availability
from dg_core.errors import BackendUnavailable

from . import code_object, manifest
from .code_object import EM_AMDGPU, EM_CUDA, PROCESSORS, About, FormatError
from .device import CUDA, HIP, DeviceLibrary, Runtime, open_runtime
from .library import HostLibrary, Library
from .manifest import Row

#: What build_dcu.sh builds, with the kind of its files.
ARCHES = ("host", "gfx950", "gfx938", "cuda")
HOST_FILE = "libdg_hip_host.so"


def lib_dir() -> Path:
    """Where the built files are: DG_HIP_LIB_DIR, else ``lib`` beside this module; a folder for each
    architecture."""
    asked = config.env("DG_HIP_LIB_DIR")
    return Path(asked) if asked else Path(__file__).parent / "lib"


def full_arch_of(device: torch.device) -> str:
    """``host``, ``cuda``, or the name of the AMD or Hygon architecture with its features,
    ``gfx938:sramecc+:xnack-``."""
    if device.type == "cpu":
        return "host"
    if torch.version.hip is None:
        return "cuda"
    return str(getattr(torch.cuda.get_device_properties(device), "gcnArchName", "unknown"))


def arch_of(device: torch.device) -> str:
    """``host``, ``cuda``, or the name of the AMD or Hygon architecture without its features."""
    return full_arch_of(device).partition(":")[0]


def available(device: torch.device | None) -> Availability:
    """Whether there is a library for the device (left out: the processor's), made for its architecture."""
    if device is not None and device.type not in ("cpu", "cuda"):
        return Availability(False, f"it needs tensors of a CPU or a GPU, not ones on {device}")
    return state_of(full_arch_of(device or torch.device("cpu")))


def state_of(full_arch: str) -> Availability:
    """The same for an architecture, of which no device need be here."""
    arch = full_arch.partition(":")[0]
    if arch not in ARCHES:
        return Availability(
            False,
            f"there are no kernels for {arch}, only for {', '.join(ARCHES)}",
            "use DG_BACKEND=reference",
        )
    folder = lib_dir() / arch
    path = folder / (HOST_FILE if arch == "host" else manifest.NAME)
    remedy = f"build_dcu.sh --target {arch} builds it"
    if not path.is_file():
        return Availability(False, f"{path} is not built", remedy)
    try:
        _look(str(folder), full_arch, path.stat().st_mtime_ns)
    except (FormatError, OSError) as error:
        return Availability(False, str(error), remedy)
    return Availability(True)


def details() -> dict[str, str]:
    """Architecture -> what is built for it, or why that cannot be used; no device need be here."""
    return {arch: _detail(arch) for arch in ARCHES}


def _detail(arch: str) -> str:
    state, path = state_of(arch), lib_dir() / arch / manifest.NAME
    if state.ok:
        try:
            count = f"{len(manifest.read(path))} kernels" if path.is_file() else "kernels"
        except FormatError as error:  # of the host's, which is not needed
            count = f"kernels, and a manifest that cannot be read ({error}),"
        return f"{count} in {path.parent}"
    return f"{state.reason if path.parent.is_dir() else 'not built'} ({state.remedy})"


def library(device: torch.device) -> Library:
    """The kernels for a device, loaded once.

    Raises:
        BackendUnavailable: there are none, they are another architecture's, or they do not load.
    """
    state = available(device)
    if not state.ok:
        raise BackendUnavailable(f"hip: {state.reason} ({state.remedy})")
    folder = lib_dir() / arch_of(device)
    if device.type == "cpu":
        return _open(str(folder / HOST_FILE))
    index = torch.cuda.current_device() if device.index is None else device.index
    return _open_device(str(folder), full_arch_of(device), index)


@functools.lru_cache(maxsize=8)
def _open(path: str) -> HostLibrary:
    return HostLibrary(path)


@functools.lru_cache(maxsize=64)
def _open_device(folder: str, full_arch: str, index: int) -> DeviceLibrary:
    rows, images = read_folder(Path(folder), full_arch)
    names = CUDA if full_arch == "cuda" else HIP
    return DeviceLibrary(
        full_arch.partition(":")[0],
        rows.values(),
        images,
        Runtime(open_runtime(names), names),
        functools.partial(torch._C._cuda_getCurrentRawStream, index),
        functools.partial(torch.cuda.device, index),
    )


# Looking at files before they are loaded --------------------------------------------------------------------


@functools.lru_cache(maxsize=64)
def _look(folder: str, full_arch: str, stamp: int) -> None:
    """Raises what is wrong with a folder; once for each state of it."""
    if full_arch == "host":
        check_host(Path(folder, HOST_FILE))
    else:
        read_folder(Path(folder), full_arch)


def check_host(path: Path) -> None:
    """Raises:
    FormatError: the file is no library for this processor.
    """
    try:
        found = code_object.read_elf(path.read_bytes()).machine
    except FormatError as error:
        raise FormatError(f"{path}: {error}") from error
    wanted = PROCESSORS.get(platform.machine(), found)
    if found != wanted:
        names = code_object.machine_name(found), code_object.machine_name(wanted)
        raise FormatError(f"{path} is built for {names[0]}, and this processor is {names[1]}")


def read_folder(folder: Path, full_arch: str) -> tuple[Mapping[str, Row], Mapping[str, bytes]]:
    """The manifest of a device's folder, and the contents of the files that it names.

    Raises:
        FormatError: a file is for another architecture, or another one than the manifest tells of.
        OSError: a file cannot be read.
    """
    rows = manifest.read(folder / manifest.NAME)
    images = {name: (folder / name).read_bytes() for name in sorted({row.file for row in rows.values()})}
    for name, image in images.items():
        try:
            check_image(image, full_arch, [row for row in rows.values() if row.file == name])
        except FormatError as error:
            raise FormatError(f"{folder / name}: {error}") from error
    return rows, images


def check_image(image: bytes, full_arch: str, rows: list[Row]) -> None:
    """Raises:
    FormatError: a file is not for this architecture, or its kernels are not those of the rows.
    """
    told = code_object.read(image)
    arch, *features = full_arch.split(":")
    if told.machine != (EM_CUDA if arch == "cuda" else EM_AMDGPU):
        raise FormatError(f"it is a file for {code_object.machine_name(told.machine)}, not for {arch}")
    own, *bound = told.target.split(":")
    if told.machine == EM_AMDGPU and own != arch:
        raise FormatError(f"it is built for {own}, and the device is {arch}")
    wrong = [feature for feature in bound if feature not in features]
    if wrong:
        raise FormatError(f"it is built for {told.target}, and the device is {full_arch}")
    for row in rows:
        if row.arch != arch:
            raise FormatError(f"the manifest has {row.kernel} for {row.arch}, not for {arch}")
        about = told.about.get(row.kernel)
        if about is None:
            raise FormatError(f"it has no kernel {row.kernel}, which the manifest names")
        if (about.threads, about.nbytes, about.fields) != (row.threads, row.kernargs, row.fields):
            raise FormatError(f"the manifest tells of another {row.kernel}: {_told(row)}, here {about}")


def _told(row: Row) -> About:
    return About(row.threads, row.kernargs, row.lds, row.fields)
