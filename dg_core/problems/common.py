"""What the problems share: tensors and options by name, and the views from a call to its primitive."""

from __future__ import annotations

from collections.abc import Callable
from operator import itemgetter
from typing import Any

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


def _extent(x: Tensor) -> tuple[int, int]:
    last = (
        sum((size - 1) * stride for size, stride in zip(x.shape, x.stride(), strict=True))
        if x.numel()
        else -1
    )
    return x.data_ptr(), x.data_ptr() + (last + 1) * x.element_size()


def may_share_memory(x: Tensor, y: Tensor) -> bool:
    """True when the address ranges of two tensors meet (they may interleave without sharing any)."""
    (x0, x1), (y0, y1) = _extent(x), _extent(y)
    return x0 < y1 and y0 < x1


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


def shared_view(op: Op, tensors: Tensors) -> View | None:
    """Copy c first where it shares memory with d without being d, since d is written while c is read."""
    c, d = tensor(op, tensors, "c"), tensor(op, tensors, "d")
    if c is None or d is None or same_view(c, d) or not may_share_memory(c, d):
        return None
    position = op.positions["c"]
    return lambda t: (*t[:position], require(t[position]).clone(), *t[position + 1 :])


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


def primitive_view(op: Op) -> View:
    """The tensors a, sfa, b, sfb, d, c, layout of a GEMM, each None where the operation has none."""
    absent = len(op.args)  # the position of the None that is appended below
    layout = op.positions.get("grouped_layout", op.positions.get("masked_m", absent))
    names = ("a", "sfa", "b", "sfb", "d", "c")
    pick = itemgetter(*(op.positions.get(name, absent) for name in names), layout)
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
