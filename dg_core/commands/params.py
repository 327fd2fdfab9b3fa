"""Kinds of arguments that several commands take. What cannot be used is a wrong call, and is refused before
any work."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Mapping
from pathlib import Path

import click
import torch

from ..dispatch import candidates, default_device, load_backend
from ..errors import BackendUnavailable

#: Architecture -> the backend that is written for it. The one list: what it lacks is no architecture here,
#: unless the device at hand has it. The reference takes them all.
ARCHS: Mapping[str, str] = {
    "cpu": "reference", "sm90a": "cuda", "sm100a": "cuda", "gfx938": "hip", "gfx950": "hip",
}  # fmt: skip


def arch_at_hand() -> tuple[str, torch.device]:
    """The architecture of the default device, whichever backend can name it."""
    device = default_device()
    for name in candidates(device):
        try:
            return load_backend(name).target(device).arch, device
        except BackendUnavailable:
            continue
    return device.type, device


def arch(value: str) -> str:
    """An architecture of ``ARCHS``, or that of the device at hand."""
    if value not in ARCHS and value != arch_at_hand()[0]:
        raise click.BadParameter(f"no architecture is called {value!r}; known: {', '.join(ARCHS)}")
    return value


def device(value: str) -> torch.device:
    """A device that torch can put a tensor on, now."""
    try:
        found = torch.device(value)
        if found.type == "meta":
            raise RuntimeError("a tensor there has no values")
        torch.empty(1, device=found)
    # What torch raises for a name, a build or a card that is not there is an AssertionError for some devices,
    # an ImportError where one needs a package, else a RuntimeError.
    except (RuntimeError, AssertionError, ImportError) as error:
        reason = next(iter(str(error).splitlines()), type(error).__name__)
        raise click.BadParameter(f"{value!r} cannot be used here: {reason}") from error
    return found


def new_file(value: str) -> Path:
    """A file that can be written. Its absence is no error, that of its folder is."""
    path = Path(value)
    if path.is_dir():
        raise click.BadParameter(f"{value!r} is a folder")
    if path.exists():
        if not os.access(path, os.W_OK):
            raise click.BadParameter(f"{value!r} cannot be written: permission denied")
        return path
    try:
        # Permissions do not tell it all: root may write anywhere, but not on a read-only system.
        with tempfile.TemporaryFile(dir=path.parent):
            return path
    except OSError as error:
        raise click.BadParameter(f"{value!r} cannot be written: {error.strerror or error}") from error
