"""The check of a call: generated from the declaration for its tensors, walked for its options."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ..errors import ArgumentError, DeviceError, DTypeError, ShapeError
from ..layout import PACKED_FP4, align, ceil_div, dtype_name, overlaps_itself
from ..rules import is_integer
from .axes import axis_source, logical_shape

if TYPE_CHECKING:
    from .declaration import Arg, Op, Option, Options

# Failures of the generated check ----------------------------------------------------------------------------


def fail_not_tensor(op: str, arg: Arg, value: object) -> None:
    plain = value is None or isinstance(value, (str, bytes, int, float))
    shown = f"{value!r:.60}" if plain else f"a {type(value).__name__}"
    raise DTypeError(f"{op}: {arg.name} is {shown}; it must be a tensor (signature: {arg.signature})")


def fail_rank(op: str, arg: Arg, x: Tensor) -> None:
    raise ShapeError(
        f"{op}: {arg.name} has shape {tuple(x.shape)}, {x.dim()} axes; it must have {len(arg.axes.split())} "
        f"(signature: {arg.signature})"
    )


def fail_dtype(op: str, arg: Arg, x: Tensor) -> None:
    allowed = " or ".join(dtype_name(d) for d in arg.dtypes)
    raise DTypeError(
        f"{op}: {arg.name} has dtype {dtype_name(x.dtype)}; it must be {allowed} (signature: {arg.signature})"
    )


def fail_axis(op: str, arg: Arg, x: Tensor, axis: int, expected: int) -> None:
    expression = arg.axes.split()[axis]
    rule = f"must be {expected}" if expression.isdigit() else f"{expression} = {expected}"
    unit = " values (two a byte)" if x.dtype == PACKED_FP4 and arg.packed else ""
    raise ShapeError(
        f"{op}: {arg.name} has shape {tuple(x.shape)}; axis {axis} is "
        f"{logical_shape(x, arg.transposed)[axis]}{unit} but "
        f"{rule} (signature: {arg.signature})"
    )


def fail_device(op: str, arg: Arg, x: Tensor, first: Arg, device: torch.device) -> None:
    raise DeviceError(
        f"{op}: {arg.name} is on {x.device} but {first.name} is on {device}; one call, one device"
    )


def check_layout(op: str, arg: Arg, x: Tensor) -> None:
    if x.layout is not torch.strided:
        raise DTypeError(
            f"{op}: {arg.name} has layout {x.layout}; it must be torch.strided (signature: {arg.signature})"
        )


def check_storage(op: str, arg: Arg, x: Tensor) -> None:
    """Refuse strides that the declared storage rules out, and tensors that have none."""
    check_layout(op, arg, x)
    shape, stride = tuple(x.shape), x.stride()
    unit = [st == 1 or size <= 1 for size, st in zip(shape, stride, strict=True)]
    rule = ""
    if arg.storage == "matrix" and not (unit[-1] or unit[-2]):
        rule = "one of its last two strides must be 1"
    elif arg.storage == "rows" and not unit[-1]:
        rule = "its last stride must be 1"
    elif arg.storage == "flat" and not x.is_contiguous():
        rule = "it must be contiguous"
    elif arg.out and overlaps_itself(x):
        rule = "it is written, so no two of its elements may share an address"
    if rule:
        raise ShapeError(
            f"{op}: {arg.name} has shape {shape} and strides {stride}; {rule} (signature: {arg.signature})"
        )


_USED_BY_CHECKS: tuple[Any, ...] = (
    Tensor, align, ceil_div, logical_shape, check_layout, check_storage,
    fail_axis, fail_device, fail_dtype, fail_not_tensor, fail_rank,
)  # fmt: skip

# The check --------------------------------------------------------------------------------------------------


def check_source(op: Op) -> str:
    """Python source of the flat check of ``op``: it takes the tensors in order and returns the dimensions."""
    lines = [f"def check({', '.join(arg.name for arg in op.args)}):"]
    bound: list[str] = []
    for position, arg in enumerate(op.args):
        lines += [f"    {line}" for line in _check_lines(op, position, arg, bound)]
    lines.append("    return {" + ", ".join(f"{name!r}: {name}" for name in bound) + "}")
    return "\n".join(lines)


def _check_lines(op: Op, position: int, arg: Arg, bound: list[str]) -> Iterator[str]:
    name, spec, indent = arg.name, f"ARGS[{position}]", ""
    if arg.optional:
        yield f"if {name} is not None:"
        indent = "    "
    yield f"{indent}if not isinstance({name}, Tensor): fail_not_tensor(OP, {spec}, {name})"
    if position == 0:
        yield f"{indent}device = {name}.device"
    else:
        yield f"{indent}if {name}.device != device: fail_device(OP, {spec}, {name}, ARGS[0], device)"
    yield f"{indent}if {name}.dtype not in DTYPES[{position}]: fail_dtype(OP, {spec}, {name})"
    axes = arg.axes.split()
    if axes:
        yield f"{indent}if {name}.dim() != {len(axes)}: fail_rank(OP, {spec}, {name})"
        shape = f"logical_shape({name}, {arg.transposed})" if arg.packed else f"{name}.shape"
        yield f"{indent}shape = {shape}"
    for axis, expression in enumerate(axes):
        if expression == "_":
            continue
        if expression.isidentifier() and expression not in bound:
            if arg.optional:
                raise ValueError(f"{op.name}: optional {name} cannot bind {expression}")
            bound.append(expression)
            yield f"{indent}{expression} = shape[{axis}]"
        else:
            source = axis_source(expression)
            yield f"{indent}if shape[{axis}] != {source}: fail_axis(OP, {spec}, {name}, {axis}, {source})"
    check = "storage" if arg.out or arg.storage != "any" else "layout"
    yield f"{indent}check_{check}(OP, {spec}, {name})"


def make_check(op: Op) -> Callable[..., dict[str, int]]:
    """Compile the flat check of ``op``."""
    scope: dict[str, Any] = {
        "OP": op.name,
        "ARGS": op.args,
        "DTYPES": [frozenset(arg.dtypes) for arg in op.args],
    }
    scope.update((f.__name__, f) for f in _USED_BY_CHECKS)
    exec(compile(check_source(op), f"<check of {op.name}>", "exec"), scope)
    check: Callable[..., dict[str, int]] = scope["check"]
    return check


# Options ----------------------------------------------------------------------------------------------------


def option_rule(option: Option) -> str:
    """What a legal value is, in words."""
    kind = option.schema.removesuffix("?")
    if option.choices:
        words = " or ".join(dtype_name(c) if isinstance(c, torch.dtype) else repr(c) for c in option.choices)
    elif option.letters:
        words = f"a string of the letters {', '.join(option.letters)}"
    elif kind.endswith("[]"):
        words = "a sequence of integers" + ("" if option.low is None else f" of at least {option.low}")
    elif kind in ("int", "SymInt"):
        words = "an integer" + ("" if option.low is None else f" of at least {option.low}")
        if option.high is not None:
            words = f"an integer in [{option.low}, {option.high}]"
    else:
        words = {"bool": "True or False", "str": "a string", "ScalarType": "a dtype"}[kind]
    return f"{words} or None" if option.schema.endswith("?") else words


def _is_legal(option: Option, value: Any) -> bool:
    kind = option.schema.removesuffix("?")
    if value is None:
        return option.schema.endswith("?")
    if kind == "bool":
        return isinstance(value, (bool, int)) and value in (0, 1)
    if kind == "str":
        return isinstance(value, str) and (not option.letters or not set(value) - set(option.letters))
    if kind == "ScalarType":
        return value in option.choices if option.choices else isinstance(value, torch.dtype)
    values = value if kind.endswith("[]") else (value,)
    if not isinstance(values, (tuple, list)) or not all(is_integer(v) for v in values):
        return False
    if option.choices:
        return value in option.choices
    low_enough = option.high is None or all(v <= option.high for v in values)
    return low_enough and (option.low is None or all(v >= option.low for v in values))


def check_options(op: Op, options: Options) -> None:
    """Hold every option against its declared type and limits.

    Raises:
        DTypeError: a dtype outside its choices.
        ArgumentError: any other wrong value.
    """
    for option, value in zip(op.options, options, strict=True):
        if not _is_legal(option, value):
            kind = DTypeError if option.schema == "ScalarType" else ArgumentError
            shown = dtype_name(value) if isinstance(value, torch.dtype) else f"{value!r:.60}"
            raise kind(f"{op.name}: {option.name} is {shown}; it must be {option_rule(option)}")
