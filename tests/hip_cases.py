"""What tests of the hip backend share: which kernels ran, a reference that refuses to stand in, and memory
that ends where a page ends."""

from __future__ import annotations

import ctypes
import mmap
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, settings
from torch import Tensor

from dg_core import dispatch
from dg_core.backends.hip.library import HostLibrary

PAGE = mmap.PAGESIZE


def examples(count: int) -> settings:
    """Of so many random cases; the fixtures of a test hold for all of them."""
    checks = [HealthCheck.function_scoped_fixture, HealthCheck.too_slow]
    return settings(max_examples=count, deadline=None, suppress_health_check=checks)


@pytest.fixture
def alone(on_hip: HostLibrary, monkeypatch: pytest.MonkeyPatch) -> HostLibrary:
    """Operations on CPU tensors go to the hip backend; the reference backend raises where it is asked."""

    def refuse(*arguments: Any) -> Any:
        raise AssertionError("the reference backend was asked in place of the hip backend")

    monkeypatch.setattr(type(dispatch.load_backend("reference")), "plan", refuse)
    return on_hip


@pytest.fixture
def launched(alone: HostLibrary, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of the kernels that have run, in order."""
    names: list[str] = []
    original = HostLibrary.launch

    def noted(self: HostLibrary, name: str, blocks: int, **fields: Any) -> None:
        names.append(name)
        original(self, name, blocks, **fields)

    monkeypatch.setattr(HostLibrary, "launch", noted)
    return names


def at_a_page_end(x: Tensor) -> Tensor:
    """A contiguous copy whose last byte is the last one before memory that nobody may touch, and whose first
    byte is as near to such memory as whole pages allow. The process dies where a kernel goes beyond."""
    size = x.numel() * x.element_size()
    pages = -(-size // PAGE) or 1
    whole = mmap.mmap(-1, (pages + 2) * PAGE)
    start = ctypes.addressof(ctypes.c_char.from_buffer(whole))
    protect = ctypes.CDLL(None, use_errno=True).mprotect
    protect.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    for guard in (start, start + (pages + 1) * PAGE):
        assert protect(guard, PAGE, mmap.PROT_READ & 0) == 0, ctypes.get_errno()
    first = (pages + 1) * PAGE - size
    flat = torch.frombuffer(whole, dtype=torch.uint8, count=size, offset=first) if size else torch.empty(0)
    copy = flat.view(x.dtype).view(x.shape) if size else x
    copy.copy_(x)
    return copy
