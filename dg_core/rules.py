"""Rules of arguments for functions that compute by themselves, without the table of operations.

``takes(x=tensor(axes=(2,)), gran_k=integer(1))`` above a function checks what it is given under these names.
A rule gets the function's name, the argument's and its value; it returns the value that the function sees
(NumPy's integers as Python's) or raises an error that names all of them and what was expected.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Sequence
from numbers import Integral
from typing import Any, TypeVar

import torch
from torch import Tensor

from .errors import ArgumentError, DeviceError, DTypeError, ShapeError

Rule = Callable[[str, str, Any], Any]
Function = TypeVar("Function", bound=Callable[..., Any])


def takes(**rules: Rule) -> Callable[[Function], Function]:
    """A decorator that holds arguments against their rules. Its errors speak of the function by its name.

    Arguments without a rule, and those that are left out, pass: the defaults keep the rules, and a missing
    argument is Python's own error.
    """

    def decorate(function: Function) -> Function:
        names = tuple(inspect.signature(function).parameters)
        op = function.__name__

        @functools.wraps(function)
        def checked(*args: Any, **kwargs: Any) -> Any:
            held = [
                rules[name](op, name, value) if name in rules else value
                for name, value in zip(names, args, strict=False)
            ]
            named = {
                name: rules[name](op, name, value) if name in rules else value
                for name, value in kwargs.items()
            }
            # What is beyond the parameters goes on, so that Python says that there are too many.
            return function(*held, *args[len(held) :], **named)

        return checked  # type: ignore[return-value]

    return decorate


def is_integer(value: object) -> bool:
    """True for an integer of Python or NumPy, or one that a trace leaves open; a bool is none."""
    return isinstance(value, (Integral, torch.SymInt)) and not isinstance(value, bool)


def dtype_name(dtype: torch.dtype) -> str:
    """``float32`` rather than ``torch.float32``: how messages and tables write a dtype."""
    return str(dtype).removeprefix("torch.")


def _shown(value: object) -> str:
    plain = value is None or isinstance(value, (str, bytes, int, float, list, tuple))
    return f"{value!r:.60}" if plain else f"a {type(value).__name__}"


def _python_integer(value: Any) -> Any:
    return value if isinstance(value, (int, torch.SymInt)) else int(value)


def integer(low: int | None = None) -> Rule:
    """An integer of at least ``low``."""
    words = "an integer" + ("" if low is None else f" of at least {low}")

    def rule(op: str, name: str, value: Any) -> Any:
        # An open integer of a trace is not compared: that would bind the graph to one side of the limit.
        if not is_integer(value) or (low is not None and not isinstance(value, torch.SymInt) and value < low):
            raise ArgumentError(f"{op}: {name} is {_shown(value)}; it must be {words}")
        return _python_integer(value)

    return rule


def integers(op: str, name: str, value: Any) -> Any:
    """The rule of a sequence of integers; text and bytes are none."""
    sequence = isinstance(value, Sequence) and not isinstance(value, (str, bytes))
    if not sequence or not all(is_integer(v) for v in value):
        raise ArgumentError(f"{op}: {name} is {_shown(value)}; it must be a sequence of integers")
    return tuple(_python_integer(v) for v in value)


def flag(op: str, name: str, value: Any) -> Any:
    """The rule of a flag: True or False, or 1 or 0 for them."""
    if not isinstance(value, (bool, int)) or value not in (0, 1):
        raise ArgumentError(f"{op}: {name} is {_shown(value)}; it must be True or False")
    return value


def optional(rule: Rule) -> Rule:
    """What ``rule`` takes, or None."""
    return lambda op, name, value: None if value is None else rule(op, name, value)


def tensor(
    *dtypes: torch.dtype, axes: tuple[int, ...] = (), floating: bool = False, least_axes: int = 0
) -> Rule:
    """A tensor.

    Args:
        dtypes: the dtypes that it may have; any if left out.
        axes: how many axes it may have; any number from ``least_axes`` on if left out.
        floating: only floating-point dtypes whose elements are whole bytes.
    """

    def rule(op: str, name: str, value: Any) -> Any:
        if not isinstance(value, Tensor):
            raise DTypeError(f"{op}: {name} is {_shown(value)}; it must be a tensor")
        if value.layout is not torch.strided:
            raise DTypeError(f"{op}: {name} has layout {value.layout}; it must be torch.strided")
        if dtypes and value.dtype not in dtypes:
            words = " or ".join(map(dtype_name, dtypes))
            raise DTypeError(f"{op}: {name} has dtype {dtype_name(value.dtype)}; it must be {words}")
        if floating and (not value.dtype.is_floating_point or value.dtype == torch.float4_e2m1fn_x2):
            raise DTypeError(
                f"{op}: {name} has dtype {dtype_name(value.dtype)}; it must be a floating-point type "
                "(of whole bytes)"
            )
        if (axes and value.dim() not in axes) or value.dim() < least_axes:
            words = " or ".join(map(str, axes)) if axes else f"at least {least_axes}"
            raise ShapeError(f"{op}: {name} has shape {tuple(value.shape)}; it must have {words} axes")
        return value

    return rule


def one_device(op: str, **tensors: Tensor) -> None:
    """Refuse tensors of different devices.

    Raises:
        DeviceError: one lives elsewhere than the first.
    """
    (first, x), *others = tensors.items()
    for name, other in others:
        if other.device != x.device:
            raise DeviceError(
                f"{op}: {name} is on {other.device} but {first} is on {x.device}; one call, one device"
            )
