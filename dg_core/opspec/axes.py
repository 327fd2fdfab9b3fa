"""Axis expressions: a name, an integer, ``cdiv(X,Y)``, ``align(X,Y)``, or ``_`` for any size."""

from __future__ import annotations

import re
from collections.abc import Mapping

from torch import Tensor

from ..layout import PACKED_FP4, align, ceil_div, packed_axis

Dims = Mapping[str, int]

_CALL = re.compile(r"^(cdiv|align)\((\w+),(\w+)\)$")


def axis_value(expression: str, dims: Dims) -> int:
    """The value of an axis expression under ``dims``."""
    call = _CALL.match(expression)
    if call:
        function = ceil_div if call[1] == "cdiv" else align
        return function(axis_value(call[2], dims), axis_value(call[3], dims))
    return int(expression) if expression.lstrip("-").isdigit() else dims[expression]


def axis_source(expression: str) -> str:
    """The same expression as Python source, for the generated check."""
    call = _CALL.match(expression)
    return f"{'ceil_div' if call[1] == 'cdiv' else 'align'}({call[2]}, {call[3]})" if call else expression


def logical_shape(x: Tensor, transposed: bool = False) -> tuple[int, ...]:
    """The shape in values: int8 tensors hold two e2m1 values a byte along their contiguous axis.
    ``transposed``: the last axis but one is K."""
    shape = list(x.shape)
    if x.dtype == PACKED_FP4 and len(shape) >= 2:
        shape[packed_axis(x, -2 if transposed else -1)] *= 2
    return tuple(shape)
