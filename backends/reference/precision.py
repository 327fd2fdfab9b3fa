"""Float32 products that stay float32, whatever else the process allows."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator

import torch
from torch import Tensor

_lock = threading.Lock()
_inside = 0
_allowed_outside = "highest"


def _setting() -> str | None:
    """The process's precision of float32 products; None where its old and new settings contradict each
    other."""
    try:
        return torch.get_float32_matmul_precision()
    except RuntimeError:
        return None


@contextlib.contextmanager
def exact_float32() -> Iterator[None]:
    """Keep TF32 and bfloat16 out of float32 products that ``set_float32_matmul_precision`` may have allowed.

    The setting belongs to the process, so the first thread that enters takes it away and the last one that
    leaves puts it back; meanwhile products of other threads are at worst more precise than they asked for.
    """
    global _inside, _allowed_outside
    with _lock:
        if _inside == 0:
            _allowed_outside = _setting() or "highest"
            if _allowed_outside != "highest":
                torch.set_float32_matmul_precision("highest")
        _inside += 1
    try:
        yield
    finally:
        with _lock:
            _inside -= 1
            if _inside == 0 and _allowed_outside != "highest":
                torch.set_float32_matmul_precision(_allowed_outside)


def without_autocast(device_type: str) -> contextlib.AbstractContextManager[object]:
    """Keep an autocast region around the call from casting its products."""
    if not torch.amp.is_autocast_available(device_type):
        return contextlib.nullcontext()
    return torch.autocast(device_type, enabled=False)


def matmul(x: Tensor, y: Tensor) -> Tensor:
    """``x @ y`` of float32 matrices, summed in float32 or better.

    A process that allowed less through ``torch.backends.*.fp32_precision`` cannot be told otherwise here
    without losing what it had set (a backend's own value cannot be read apart from the inherited one). Its
    products are done in float64.
    """
    if _setting() is None:
        return (x.double() @ y.double()).float()
    return x @ y
