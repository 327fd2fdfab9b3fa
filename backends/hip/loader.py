"""Which architecture a device has, and its library: prebuilt files, looked at before they are loaded."""

from __future__ import annotations

import functools
from pathlib import Path

import torch

from dg_core import config
from dg_core.backend import Availability
from dg_core.errors import BackendUnavailable

from .library import HostLibrary, Library

_REMEDY = "build_dcu.sh --target host builds it"


def lib_dir() -> Path:
    """Where the built files are: DG_HIP_LIB_DIR, else ``lib`` beside this module; a folder for each
    architecture."""
    asked = config.env("DG_HIP_LIB_DIR")
    return Path(asked) if asked else Path(__file__).parent / "lib"


def arch_of(device: torch.device) -> str:
    """``host``, ``cuda``, or the name of the AMD or Hygon architecture without its features."""
    if device.type == "cpu":
        return "host"
    if torch.version.hip is None:
        return "cuda"
    name = str(getattr(torch.cuda.get_device_properties(device), "gcnArchName", "unknown"))
    return name.partition(":")[0]


def available(device: torch.device | None) -> Availability:
    """Whether there is a library for the device (left out: the processor's)."""
    arch = arch_of(device or torch.device("cpu"))
    path = lib_dir() / arch / f"libdg_hip_{arch}.so"
    if arch != "host":
        return Availability(False, f"there is no loader for {arch} yet", "use DG_BACKEND=reference")
    if not path.is_file():
        return Availability(False, f"{path} is not built", _REMEDY)
    return Availability(True)


def library(device: torch.device) -> Library:
    """The kernels for a device, loaded once.

    Raises:
        BackendUnavailable: there are none, or they do not load.
    """
    state = available(device)
    if not state.ok:
        raise BackendUnavailable(f"hip: {state.reason} ({state.remedy})")
    arch = arch_of(device)
    return _open(str(lib_dir() / arch / f"libdg_hip_{arch}.so"))


@functools.lru_cache(maxsize=8)
def _open(path: str) -> HostLibrary:
    return HostLibrary(path)
