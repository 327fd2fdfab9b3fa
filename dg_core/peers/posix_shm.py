"""Memory of ranks on CPUs of one host: files in shared memory that every rank maps.

A rank makes one file for data and one for control, the others open them by name, and as soon as all are
mapped the names are gone: the memory lives for as long as somebody maps it. Names of a rank that is killed
before that are removed by the others, or, where they do not know them yet, by whoever makes memory next.
"""

from __future__ import annotations

import contextlib
import errno
import mmap
import os
import secrets
import shutil
import zlib
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from .. import config
from ..backend import Availability
from ..symm import RankFacts, alive, local_facts

if TYPE_CHECKING:
    from .meeting import Meeting

_DEFAULT_FOLDER = "/dev/shm"


def folder() -> str:
    """Where the files are made: DG_SHM_DIR, else /dev/shm."""
    return str(config.fresh("DG_SHM_DIR") or _DEFAULT_FOLDER)


@dataclass
class ShmMemory:
    """Mappings of all ranks' files; a view that a user keeps stays readable after ``close``."""

    rank: int
    pairs: list[tuple[Tensor, Tensor]] = field(repr=False)
    name: str = "posix-shm"
    direct: bool = True

    @property
    def pointers(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        data, control = ([pair[i].data_ptr() for pair in self.pairs] for i in range(2))
        return tuple(data), tuple(control)

    @property
    def data(self) -> Tensor:
        return self.pairs[self.rank][0]

    @property
    def control(self) -> Tensor:
        return self.pairs[self.rank][1]

    def peer_data(self, rank: int) -> Tensor:
        return self.pairs[rank][0]

    def peer_control(self, rank: int) -> Tensor:
        return self.pairs[rank][1]

    def close(self) -> None:
        # A tensor holds its mapping, so memory goes with the last of them.
        self.pairs.clear()


class PosixShm:
    """The provider."""

    name = "posix-shm"

    def available(self, device: torch.device, facts: Sequence[RankFacts]) -> Availability:
        """Whether there is a folder for the files; who can share it is ``symm.obstacle``'s answer."""
        place = folder()
        if not os.path.isdir(place) or not os.access(place, os.R_OK | os.W_OK | os.X_OK):
            return Availability(False, f"{place} is no folder that can be written", "set DG_SHM_DIR")
        return Availability(True)

    def allocate(
        self, data_bytes: int, control_bytes: int, device: torch.device, meeting: Meeting
    ) -> ShmMemory:
        """Memory that all ranks have mapped, without a name in the folder any more."""
        made: dict[int, Tensor] = {}
        names: list[str] = []
        everybody: list[list[str]] = []
        sizes = (data_bytes, control_bytes)

        def make() -> list[str]:
            place, own = folder(), local_facts(device)
            _sweep(place, own)
            for i, size in enumerate(sizes):
                path = os.path.join(place, _name(own) + secrets.token_hex(8))
                made[i] = _create(path, size, names)
            return names

        def attach(theirs: Sequence[str]) -> tuple[Tensor, Tensor]:
            data, control = (_open(path, size) for path, size in zip(theirs, sizes, strict=True))
            return data, control

        pairs: list[tuple[Tensor, Tensor]] = []
        try:
            everybody.extend(meeting.step("allocate", make))

            def attach_all() -> None:
                for rank, theirs in enumerate(everybody):
                    pairs.append((made[0], made[1]) if rank == meeting.rank else attach(theirs))

            meeting.step("map", attach_all)
        finally:
            # Whether all are mapped or one failed, nobody opens these names any more; one that still tries
            # hears of the failure that came first. Those of a rank that was killed go with the others'.
            for path in {*names, *(path for theirs in everybody for path in theirs)}:
                with contextlib.suppress(OSError):
                    os.unlink(path)
        # A new file reads as zero, so the step only says that all ranks have come so far.
        meeting.step("zero", lambda: None)
        return ShmMemory(meeting.rank, pairs)


def _name(owner: RankFacts) -> str:
    """What names of a process's files begin with: user, process, when it started, and where that counts."""
    host = zlib.crc32(owner.host.encode())
    return f"dg_core-{os.getuid()}-{owner.pid}-{owner.start_ticks}-{host:08x}-"


def _sweep(place: str, own: RankFacts) -> None:
    """Remove this user's files of processes that have ended. Names that another host or container has given
    in a folder that is shared with it stay: its processes cannot be looked after from here."""
    for name in os.listdir(place):
        parts = name.split("-")
        if len(parts) != 6 or not all(part.isdecimal() for part in parts[1:4]):
            continue
        owner = replace(own, pid=int(parts[2]), start_ticks=int(parts[3]))
        if name.startswith(_name(owner)) and not alive(owner):
            with contextlib.suppress(OSError):
                os.unlink(os.path.join(place, name))


def _create(path: str, size: int, names: list[str]) -> Tensor:
    file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    names.append(path)  # from here on it has to be removed
    try:
        # Takes the pages now: a full folder is an error here, not a bus error at some later store.
        os.posix_fallocate(file, 0, size)
        return _map(file, size)
    except OSError as error:
        if error.errno != errno.ENOSPC:
            raise
        place = os.path.dirname(path)
        free = shutil.disk_usage(place).free
        raise OSError(
            errno.ENOSPC,
            f"{size} bytes wanted in {place}, which has {free} free; make it larger (in a container: "
            "--shm-size), or have DG_SHM_DIR name another folder",
        ) from error
    finally:
        os.close(file)


def _open(path: str, size: int) -> Tensor:
    file = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    try:
        found = os.fstat(file).st_size
        if found != size:
            raise OSError(errno.EINVAL, f"{path} has {found} bytes; {size} are shared")
        return _map(file, size)
    finally:
        os.close(file)


def _map(file: int, size: int) -> Tensor:
    return torch.frombuffer(mmap.mmap(file, size), dtype=torch.int8)


PROVIDER = PosixShm()
