"""Who may use a buffer: the process that made it, one call at a time; and nobody may copy it."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NoReturn

from ..errors import ArgumentError


class Use:
    """The right to use a buffer, of the process that makes this object."""

    def __init__(self) -> None:
        self._pid, self._busy = os.getpid(), threading.Lock()

    @contextmanager
    def of(self, op: str) -> Iterator[None]:
        """One call.

        Raises:
            ArgumentError: the process is a fork of the one that the other ranks know, or another thread is in
                a call. Nothing has happened then.
        """
        if os.getpid() != self._pid:
            raise ArgumentError(
                f"{op}: sym_buffer was made by process {self._pid}; process {os.getpid()} is a fork of it, "
                "which the other ranks do not know"
            )
        if not self._busy.acquire(blocking=False):
            raise ArgumentError(
                f"{op}: sym_buffer is in use by another thread; calls of one buffer come one after the other"
            )
        try:
            yield
        finally:
            self._busy.release()


class Unique:
    """An object that neither ``copy`` nor ``pickle`` takes: a copy would free its memory too."""

    def __reduce_ex__(self, protocol: object) -> NoReturn:
        raise TypeError(f"a {type(self).__name__} cannot be copied or pickled: each rank makes its own")
