"""What the problems share: tensors and options by name, and the views from a call to its primitive."""

from __future__ import annotations

from collections.abc import Callable
from operator import itemgetter
from typing import Any

import torch
from torch import Tensor

from ..errors import DTypeError
from ..layout import dtype_name
from ..opspec import Op, Options, Tensors

View = Callable[[Tensors], Tensors]


def option(op: Op, options: Options, name: str) -> Any:
    """The value of one option of a call, None where the operation has no such option."""
    for declared, value in zip(op.options, options, strict=True):
        if declared.name == name:
            return value
    return None


def tensor(op: Op, tensors: Tensors, name: str) -> Tensor | None:
    """The tensor of a call that the table declares under ``name``; None where there is none."""
    position = op.positions.get(name)
    return None if position is None else tensors[position]


def require(value: Tensor | None) -> Tensor:
    """A tensor that the generated check has proven to be there."""
    assert value is not None
    return value


# Memory -----------------------------------------------------------------------------------------------------


def same_view(x: Tensor | None, y: Tensor | None) -> bool:
    """True when both tensors are the same elements in the same order."""
    if x is None or y is None:
        return False
    return x is y or (x.data_ptr() == y.data_ptr() and x.shape == y.shape and x.stride() == y.stride())


def span(x: Tensor) -> int:
    """Bytes from a tensor's first element to the end of its last."""
    if not x.numel():
        return 0
    last = sum((size - 1) * stride for size, stride in zip(x.shape, x.stride(), strict=True))
    return (last + 1) * x.element_size()


def spans_meet(x: Tensor, y: Tensor) -> bool:
    """True when the address ranges of two tensors meet; they may still interleave."""
    return x.data_ptr() < y.data_ptr() + span(y) and y.data_ptr() < x.data_ptr() + span(x)


def share_elements(x: Tensor, y: Tensor) -> bool:
    """True when two tensors have an address in common; where their spans meet, bytes are marked to tell."""
    if not spans_meet(x, y):
        return False
    first = min(x.data_ptr(), y.data_ptr())
    last = max(x.data_ptr() + span(x), y.data_ptr() + span(y))
    marks = torch.zeros(last - first, dtype=torch.bool, device="cpu")

    def bytes_of(t: Tensor) -> Tensor:
        size = t.element_size()
        strides = (*(stride * size for stride in t.stride()), 1)
        return marks.as_strided((*t.shape, size), strides, t.data_ptr() - first)

    bytes_of(x).fill_(True)
    return bool(bytes_of(y).any())


def accumulation(op: Op, tensors: Tensors) -> tuple[bool, bool]:
    """Whether c is given, and whether it is d itself."""
    c, d = tensor(op, tensors, "c"), require(tensor(op, tensors, "d"))
    if c is not None and c.dtype != d.dtype:
        raise DTypeError(
            f"{op.name}: c has dtype {dtype_name(c.dtype)} but d has {dtype_name(d.dtype)}; they must be the "
            "same"
        )
    return c is not None, same_view(c, d)


# Views ------------------------------------------------------------------------------------------------------


def stored_view(op: Op, tensors: Tensors) -> View | None:
    """Exchange the last two axes of every operand that the caller stores transposed, and of its scales.

    Scales that have an axis less than their operand (one for each row) have no second axis to exchange.
    """
    flips = []
    for arg, value in zip(op.args, tensors, strict=True):
        operand = tensor(op, tensors, arg.scale_of or arg.name)
        flips.append(
            arg.transposed and value is not None and operand is not None and value.dim() == operand.dim()
        )
    if not any(flips):
        return None
    return lambda t: tuple(
        x.transpose(-1, -2) if flip and x is not None else x for flip, x in zip(flips, t, strict=True)
    )


def primitive_positions(op: Op) -> tuple[int, ...]:
    """Where a, sfa, b, sfb, d, c and layout of a GEMM are among the operation's tensors; -1 for none."""
    layout = op.positions.get("grouped_layout", op.positions.get("masked_m", -1))
    return (*(op.positions.get(name, -1) for name in ("a", "sfa", "b", "sfb", "d", "c")), layout)


def primitive_view(op: Op) -> View:
    """The tensors a, sfa, b, sfb, d, c, layout of a GEMM, each None where the operation has none."""
    pick = itemgetter(*primitive_positions(op))  # -1 is the None that is appended
    return lambda t: pick((*t, None))


def chain(*views: View | None) -> View | None:
    """One view after the other; None where there is none."""
    steps = [view for view in views if view is not None]
    if len(steps) <= 1:
        return steps[0] if steps else None

    def apply(tensors: Tensors) -> Tensors:
        for step in steps:
            tensors = step(tensors)
        return tensors

    return apply
