"""Comparing tensors: one number for the distance, the elements that differ most, bits, and bytes."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..errors import DTypeError, ShapeError

__all__ = [
    "WorstElement",
    "WorstElements",
    "assert_bitwise_equal",
    "calc_diff",
    "count_bytes",
    "worst_elements",
]


def _same_shape(op: str, x: Tensor, y: Tensor) -> None:
    # Broadcasting would let a result of the wrong shape pass, so it is refused.
    if x.shape != y.shape:
        raise ShapeError(
            f"{op}: x has shape {tuple(x.shape)} but y has {tuple(y.shape)}; they must be the same"
        )


def _flat64(x: Tensor, device: torch.device) -> Tensor:
    return x.detach().to(device).to(torch.float64).reshape(-1)


def calc_diff(x: Tensor, y: Tensor) -> float:
    """``1 - 2 * sum(x * y) / sum(x^2 + y^2)`` in float64: 0 for equal tensors, 2 for ``x = -y``.

    For a small relative error e it is about ``e^2 / 2`` (e taken as the norm of the difference over the
    norm), so 3e-6 stands for errors of 0.25 %.

    Args:
        x, y: tensors of one shape, any real dtypes and devices.

    Returns:
        0 where both are zero everywhere or empty. Infinity where either holds a NaN or an infinity: neither
        ``diff < bound`` nor ``not diff > bound`` can then pass. Compare masks of infinities first and leave
        them out.

    Raises:
        ShapeError: the shapes differ.
    """
    _same_shape("calc_diff", x, y)
    if x.numel() == 0:
        return 0.0
    a, b = _flat64(x, x.device), _flat64(y, x.device)
    largest = float(torch.maximum(a.abs().amax(), b.abs().amax()))
    if not math.isfinite(largest):  # amax passes NaN on
        return math.inf
    if largest == 0.0:
        return 0.0
    # A power of two near the largest value keeps the squares of huge and tiny numbers inside float64, and
    # costs no bit. Its own exponent must stay below 1024; the smallest subnormal, 2^-1074, is then still
    # lifted to 2^-74.
    scale = 2.0 ** -max(math.frexp(largest)[1], -1000)
    a, b = a * scale, b * scale
    similarity = 2.0 * float(torch.dot(a, b)) / float(torch.dot(a, a) + torch.dot(b, b))
    return max(0.0, 1.0 - similarity)  # 2 xy <= x^2 + y^2, so what is below zero is rounding


@dataclass(frozen=True)
class WorstElement:
    """An element of two tensors; ``error`` is ``|x - y|``, 0 for equal infinities, infinity for a NaN."""

    index: tuple[int, ...]
    x: float
    y: float
    error: float


@dataclass(frozen=True)
class WorstElements:
    """The elements in which two tensors differ most, the worst first; ``str()`` gives a line for each.

    Attributes:
        rms: root mean square of y's finite values, the yardstick for the errors.
        total: number of elements that were compared.
        differing: number of elements with an error above 0.
    """

    elements: tuple[WorstElement, ...]
    rms: float
    total: int
    differing: int

    def __str__(self) -> str:
        lines = [f"{self.differing} of {self.total} elements differ; rms(y) = {self.rms:.6g}"]
        if self.elements:
            lines.append(f"{'index':>20} {'x':>16} {'y':>16} {'|x - y|':>12} {'/ rms(y)':>10}")
        for e in self.elements:
            index = "[" + ", ".join(map(str, e.index)) + "]"
            ratio = f"{e.error / self.rms:10.3g}" if self.rms else f"{'-':>10}"
            lines.append(f"{index:>20} {e.x:16.8g} {e.y:16.8g} {e.error:12.4g} {ratio}")
        return "\n".join(lines)


def worst_elements(x: Tensor, y: Tensor, n: int = 10) -> WorstElements:
    """The ``n`` elements of largest ``|x - y|``, with positions and both values, without equal ones.

    Raises:
        ShapeError: the shapes differ.
    """
    _same_shape("worst_elements", x, y)
    a, b = _flat64(x, x.device), _flat64(y, x.device)
    # inf - inf is NaN, and so is a difference with NaN: the first is no error, the second the largest one.
    error = torch.where(a == b, 0.0, (a - b).abs()).nan_to_num(nan=math.inf, posinf=math.inf)
    finite = b[b.isfinite()]
    rms = float(finite.square().mean().sqrt()) if finite.numel() else 0.0
    differing = int((error > 0).sum())
    values, positions = torch.topk(error, min(n, differing))
    elements = tuple(
        WorstElement(_unravel(position, tuple(x.shape)), float(a[position]), float(b[position]), value)
        for value, position in zip(values.tolist(), positions.tolist(), strict=True)
    )
    return WorstElements(elements, rms, x.numel(), differing)


def _unravel(position: int, shape: tuple[int, ...]) -> tuple[int, ...]:
    index = []
    for size in reversed(shape):
        position, here = divmod(position, size)
        index.append(here)
    return tuple(reversed(index))


def _bits(x: Tensor) -> Tensor:
    """The bytes of each element, ``[numel, element size]``."""
    flat = x.detach().contiguous().reshape(-1)
    return flat.view(torch.uint8).reshape(flat.numel(), x.element_size())


def assert_bitwise_equal(x: Tensor, y: Tensor, label: str = "") -> None:
    """Pass only when both tensors hold the same bits: 0 and -0 differ, a NaN equals one of the same bits.

    Strides do not count.

    Raises:
        AssertionError: shapes, dtypes or bits differ; the message counts them and shows five.
    """
    name = f"{label}: " if label else ""
    if x.shape != y.shape or x.dtype != y.dtype:
        raise AssertionError(
            f"{name}x is {x.dtype} of shape {tuple(x.shape)}, y is {y.dtype} of shape {tuple(y.shape)}"
        )
    left, right = _bits(x), _bits(y).to(x.device)
    wrong = (left != right).any(1).nonzero().flatten()
    if wrong.numel() == 0:
        return
    shown = []
    for position in wrong[:5].tolist():
        index = _unravel(position, tuple(x.shape))
        words = [bytes(bits[position].cpu().tolist()[::-1]).hex() for bits in (left, right)]
        shown.append(
            f"{list(index)}: {x[index].item()!r} (0x{words[0]}) and {y[index].item()!r} (0x{words[1]})"
        )
    raise AssertionError(
        f"{name}{wrong.numel()} of {x.numel()} elements differ in their bits; " + "; ".join(shown)
    )


def count_bytes(*tensors: Any) -> int:
    """Bytes that the elements of all tensors take, each counted as often as it is given.

    Args:
        tensors: tensors, None, or tuples and lists of them, nested at will (``(a, sfa)`` as it is, say).

    Raises:
        DTypeError: something else is among them.
    """
    total = 0
    for item in tensors:
        if isinstance(item, Tensor):
            total += item.numel() * item.element_size()
        elif isinstance(item, Iterable) and not isinstance(item, (str, bytes)):
            total += count_bytes(*item)
        elif item is not None:
            raise DTypeError(
                f"count_bytes: got {item!r:.80}; it takes tensors, None, and tuples or lists of them"
            )
    return total
