"""Ranks that fail on purpose: a stage that raises, a process that is killed between two stores, a late one.

Faults are put between a buffer and its backend's stages, so any backend can be tried.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any


class Injected(RuntimeError):  # noqa: N818 - it is no error of the program
    """What a stage raises that was told to fail."""


@contextmanager
def before_stage(buffer: Any, stage: str, action: Callable[[], None]) -> Iterator[None]:
    """Run ``action`` as ``stage`` (k1, k2, k3 or fused) of ``buffer`` begins, then the stage."""
    stages = buffer._stages
    original = getattr(stages, stage)

    def changed(call: Any) -> None:
        action()
        original(call)

    buffer._stages = _With(stages, stage, changed)
    try:
        yield
    finally:
        if buffer._stages is not None:
            buffer._stages = stages


@contextmanager
def before_finish(buffer: Any, action: Callable[[], None]) -> Iterator[None]:
    """Run ``action`` in the middle of the third stage: all rows are stored, and nobody was told so."""
    exchange = buffer.exchange
    original = exchange.finish

    def changed(op: str) -> None:
        action()
        original(op)

    exchange.finish = changed
    try:
        yield
    finally:
        del exchange.finish


class _With:
    """Stages of which one is another function."""

    def __init__(self, stages: Any, name: str, function: Callable[[Any], None]) -> None:
        self._stages = stages
        setattr(self, name, function)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stages, name)


def fail() -> None:
    """Raise, as a stage with a fault does."""
    raise Injected("this stage was told to fail")


def die() -> None:
    """End this process at once, without a last word: what the kernel's memory killer does."""
    os.kill(os.getpid(), signal.SIGKILL)
