"""Wrong calls made from a valid one, and the errors that they must raise."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..errors import ArgumentError, DeviceError, DTypeError, ShapeError
from ..layout import dtype_name
from .axes import logical_shape
from .check import option_rule
from .declaration import Arg, Op, Option, Options, Tensors


@dataclass(frozen=True)
class Fault:
    """One wrong way to call an operation, the error that must come, and what its message must hold."""

    label: str
    tensors: tuple[Any, ...]
    options: Options
    error: type[Exception]
    needles: tuple[str, ...]


def faults(op: Op, tensors: Tensors, options: Options) -> Iterator[Fault]:
    """Wrong variants of a valid call: each tensor of a wrong type, dtype, layout, rank, device, size and
    storage, or missing, and each option outside its limits."""
    seen: set[str] = set()
    for position, arg in enumerate(op.args):
        axes = arg.axes.split()
        bound = [axis != "_" and (not axis.isidentifier() or axis in seen) for axis in axes]
        seen.update(axes)
        x = tensors[position]
        if x is None:
            continue
        for label, value, error, needles in _tensor_faults(arg, x, position > 0, bound):
            wrong = (*tensors[:position], value, *tensors[position + 1 :])
            yield Fault(f"{arg.name} {label}", wrong, options, error, (f"{op.name}: {arg.name} ", *needles))
    for position, option in enumerate(op.options):
        error = DTypeError if option.schema == "ScalarType" else ArgumentError
        for value in _wrong_values(option):
            wrong = (*options[:position], value, *options[position + 1 :])
            shown = dtype_name(value) if isinstance(value, torch.dtype) else repr(value)
            needles = (f"{op.name}: {option.name} is {shown}; ", option_rule(option))
            yield Fault(f"{option.name} = {shown}", tensors, wrong, error, needles)


def _tensor_faults(
    arg: Arg, x: Tensor, other: bool, bound: list[bool]
) -> Iterator[tuple[str, Any, type[Exception], tuple[str, ...]]]:
    """Label, wrong value, error and needles; ``other``: it is not the first argument."""
    yield "is a string", "x", DTypeError, ("'x'", "must be a tensor", arg.signature)
    if not arg.optional:
        yield "missing", None, DTypeError, ("None", "must be a tensor", arg.signature)
    dtype = x.to(torch.complex64) if x.dtype.itemsize > 1 else x.to(torch.int16)
    yield "dtype", dtype, DTypeError, (dtype_name(dtype.dtype), *map(dtype_name, arg.dtypes))
    if other:
        yield "device", x.to("meta"), DeviceError, ("meta", str(x.device))
    sparse = torch.empty(x.shape, dtype=x.dtype, device=x.device, layout=torch.sparse_coo)
    yield "layout", sparse, DTypeError, ("torch.sparse_coo", "torch.strided", arg.signature)
    if arg.axes:
        yield "rank", x.unsqueeze(0), ShapeError, (str((1, *x.shape)), arg.signature)
    for axis, named in enumerate(bound):
        if named and x.shape[axis] > 0:
            shape = [size + (i == axis) for i, size in enumerate(x.shape)]
            grown = torch.empty_strided(
                shape, _dense_strides(shape, x.stride()), dtype=x.dtype, device=x.device
            )
            needles = (
                f"has shape {tuple(shape)}",
                f"axis {axis} is {logical_shape(grown, arg.transposed)[axis]}",
                arg.signature,
            )
            yield f"axis {axis}", grown, ShapeError, needles
    if arg.storage != "any" and x.dim() and min(x.shape) > 1:
        spaced = x.new_empty([2 * size for size in x.shape])[(slice(None, None, 2),) * x.dim()]
        yield "strides", spaced, ShapeError, (str(tuple(x.shape)), str(spaced.stride()), arg.signature)
    if arg.out and x.dim() > 1 and min(x.shape) > 1:
        overlapping = x[:1].expand(x.shape)
        yield (
            "overlap",
            overlapping,
            ShapeError,
            (str(tuple(x.shape)), str(overlapping.stride()), "share an address"),
        )


def _wrong_values(option: Option) -> Iterator[Any]:
    kind = option.schema.removesuffix("?")
    if kind == "str":
        yield from (7, "nkx") if option.letters else (7,)
        return
    if kind == "ScalarType":
        yield torch.int8
        return
    yield "x"
    if kind == "bool":
        yield 2
        return
    wrap = (lambda v: (v,)) if kind.endswith("[]") else (lambda v: v)
    yield wrap(1.5)
    if option.low is not None:
        yield wrap(option.low - 1)
    if option.high is not None:
        yield wrap(option.high + 1)
    if option.choices:
        yield max(option.choices) + 1


def _dense_strides(shape: list[int], like: tuple[int, ...]) -> list[int]:
    """Strides of a dense tensor of ``shape`` whose axes nest in the same order as strides ``like``."""
    strides, step = [0] * len(shape), 1
    for axis in sorted(range(len(shape)), key=lambda i: (like[i], -i)):
        strides[axis] = step
        step *= max(shape[axis], 1)
    return strides
