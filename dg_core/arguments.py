"""Small readers of arguments that public functions share: operands with their scales, tuples of integers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from . import rules
from .errors import DTypeError

Scaled = tuple[Tensor, Tensor] | Sequence[Tensor]
ScaledOrPlain = tuple[Tensor, Tensor | None] | Sequence[Tensor | None]
Recipe = Sequence[int]


def pair(op: str, name: str, value: Any) -> tuple[Any, Any]:
    """An operand and its scales out of a tuple or list of two.

    Raises:
        DTypeError: ``value`` is something else; the message names operation and operand.
    """
    if isinstance(value, (tuple, list)) and len(value) == 2:
        return value[0], value[1]
    what = f"a {type(value).__name__}"
    if isinstance(value, (tuple, list)):
        what += f" of length {len(value)}"
    raise DTypeError(f"{op}: {name} is {what}; it must be a pair ({name}, scales of {name})")


def integers(op: str, name: str, value: Any) -> tuple[int, ...] | None:
    """A tuple or list of integers as a tuple of Python's own (plan keys must be hashable); None stays None.

    Raises:
        ArgumentError: ``value`` is something else, or holds something else.
    """
    found: tuple[int, ...] | None = None if value is None else rules.integers(op, name, value)
    return found
