"""A call of an operation from its sizes alone, without storage: enough to check it and to count its cost."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

import torch

from .. import ops
from ..backend import Problem
from ..errors import ArgumentError, DGError
from ..layout import BLOCK_1X128, BLOCK_128X128, PACKED_128, PER_ROW, ScaleFormat, ceil_div
from ..opspec import Arg, Cost, Op, Options, Tensors, cost

Made = TypeVar("Made")

SCALES: Mapping[str, tuple[ScaleFormat, ScaleFormat]] = {
    "block": (BLOCK_1X128, BLOCK_128X128),
    "block_1d1d": (BLOCK_1X128, BLOCK_1X128),
    "packed": (PACKED_128, PACKED_128),
    "channelwise": (PER_ROW, PER_ROW),
}
# Sizes that a caller gives, and what they are where none are given: a decoding batch on a large model's
# layer.
DEFAULTS = {
    "M": 128, "N": 4096, "K": 7168, "G": 8, "S": 1024, "SKV": 8192, "H": 64, "D": 128, "R": 512, "B": 64,
    "NN": 1, "P": 64, "CONTEXT": 8192,
}  # fmt: skip
# Axes that follow from those: what each is made of, and how.
_DERIVED: Mapping[str, tuple[tuple[str, ...], Any]] = {
    "SK": (("G", "K"), lambda s: s["G"] * s["K"]),
    "L": (("M",), lambda s: s["M"]),
    "ND": (("N",), lambda s: s["N"]),
    "W": (("D",), lambda s: s["D"] + 4),
    "ROWS": (("B", "NN"), lambda s: s["B"] * s["NN"]),
    "MAXP": (("CONTEXT", "P"), lambda s: ceil_div(s["CONTEXT"], s["P"])),
    "PAGES": (("B", "CONTEXT", "P"), lambda s: s["B"] * ceil_div(s["CONTEXT"], s["P"])),
    "max_context_len": (("CONTEXT",), lambda s: s["CONTEXT"]),
    "SFK": (("G", "K"), lambda s: s["G"] * ceil_div(s["K"], 128)),
    "MN": (("M",), lambda s: s["M"]),
}
# Shapes of tensors whose axes the table leaves to a function.
_SHAPES: Mapping[tuple[str, str], str] = {
    ("k_grouped", "a"): "SK*M",
    ("k_grouped", "b"): "SK*N",
    ("hc_prenorm", "d"): "M N",
    ("hc_prenorm", "sqr_sum"): "M",
    ("paged_mqa_logits", "context_lens"): "B NN",
    ("paged_metadata", "context_lens"): "B NN",
    ("sf", "sf"): "M K/128",
}


@dataclass(frozen=True)
class Call:
    """A checked call: its tensors have shapes and dtypes but no storage (torch's device ``meta``)."""

    op: Op
    sizes: Mapping[str, int]
    tensors: Tensors
    options: Options
    problem: Problem
    cost: Cost


def axes_of(op: Op, arg: Arg) -> list[str]:
    return (arg.axes or _SHAPES.get((op.sampler, arg.name), "")).replace("*", " ").replace("/128", "").split()


def size_names(op: Op) -> tuple[str, ...]:
    """The sizes that a call of the operation is made from, in the order of ``DEFAULTS``."""
    found: dict[str, None] = {}
    for arg in op.args:
        for axis in axes_of(op, arg):
            if axis.isidentifier() and axis != "_":
                found.update(dict.fromkeys(_DERIVED[axis][0] if axis in _DERIVED else (axis,)))
    return tuple(sorted(found, key=list(DEFAULTS).index))


def make_call(op: Op, given: Mapping[str, int] | None = None, scales: str = "block") -> Call:
    """The call of ``op`` with these sizes (others are ``DEFAULTS``) and this family of scales.

    Raises:
        ArgumentError: the operation has no such size, a size is negative, or a tensor has 2**63 bytes or
        more.
        ShapeError, DTypeError: what the operation itself refuses.
    """
    names = size_names(op)
    for name, value in (given or {}).items():
        if name not in names:
            raise ArgumentError(f"{op.name} has no size {name}; it has {', '.join(names)}")
        if value < 0:
            raise ArgumentError(f"{op.name}: {name} is {value}; a size is at least 0")
    sizes = {name: (given or {}).get(name, DEFAULTS[name]) for name in names}
    derived = {name: rule(sizes) for name, (parts, rule) in _DERIVED.items() if set(parts) <= set(sizes)}
    every = {**sizes, **derived}
    tensors = tuple(_tensor(op, arg, every, scales) for arg in op.args)
    options = tuple(_option(op, option.name, option.default, every) for option in op.options)
    dims = op.check(*tensors)
    problem, _ = op.prepare(op, dims, tensors, options)
    fake = op.fake
    result = () if fake is None else (_within_addresses(op, lambda: fake(tensors, options)),)
    work = cost(op, {**every, **dims}, (*tensors, *result))
    return Call(op, sizes, tensors, options, problem, work)


def _tensor(op: Op, arg: Arg, sizes: Mapping[str, int], scales: str) -> torch.Tensor | None:
    if arg.optional:
        return None
    if arg.scale_of and not arg.axes:
        shape, dtype = _scale(op, arg, sizes, scales)
    else:
        text = arg.axes or _SHAPES[op.sampler, arg.name]
        shape, dtype = tuple(_size(axis, sizes) for axis in text.split()), arg.dtypes[0]
    return _within_addresses(op, lambda: torch.empty(shape, dtype=dtype, device="meta"))


def _within_addresses(op: Op, make: Callable[[], Made]) -> Made:
    """What ``make`` returns, where torch can count its bytes in 64 bits.

    torch says in three ways that it cannot: a size past 63 bits, a number of elements, a number of bytes.

    Raises:
        ArgumentError: it cannot.
    """
    try:
        return make()
    except DGError:
        raise
    except (RuntimeError, TypeError, OverflowError) as error:
        raise ArgumentError(f"{op.name}: these sizes make a tensor of 2**63 bytes or more") from error


def _size(axis: str, sizes: Mapping[str, int]) -> int:
    if axis.isdigit():
        return int(axis)
    name, _, divisor = axis.partition("/")
    product = 1
    for factor in name.split("*"):
        product *= sizes[factor]
    return ceil_div(product, int(divisor)) if divisor else product


def contracted(op: Op) -> str:
    """The axis that is summed over, among those that both operands have."""
    a, b, d = (op.axis_names(name) for name in "abd")
    return [axis for axis in a if axis in b and axis not in d][-1]


def _scale(op: Op, arg: Arg, sizes: Mapping[str, int], scales: str) -> tuple[tuple[int, ...], torch.dtype]:
    """Shape and dtype of an operand's scales: every axis divided by what one scale covers of it."""
    side = arg.scale_of
    fmt = SCALES[scales]["ab".index(side)]
    if op.sampler == "k_grouped":  # one scale a row, group after group along K, whatever the family
        fmt = PACKED_128 if fmt.packed else BLOCK_1X128
        blocks = sizes["G"] * fmt.shape(1, sizes["K"])[1]
        rows = sizes["M" if side == "a" else "N"]
        shape: tuple[int, ...] = (blocks, rows) if arg.transposed else (rows, blocks)
    else:
        axes, other = op.axis_names(side), op.axis_names("b" if side == "a" else "a")
        inner = contracted(op)
        own = next(axis for axis in reversed(axes) if axis not in other)
        rows, blocks = fmt.shape(sizes[own], sizes[inner])
        if fmt == PER_ROW:
            axes = [axis for axis in axes if axis != inner]
        shape = tuple({own: rows, inner: blocks}.get(axis, sizes.get(axis, 0)) for axis in axes)
    return shape, torch.int32 if fmt.packed else torch.float32


def _option(op: Op, name: str, default: Any, sizes: Mapping[str, int]) -> Any:
    if name == "ks_cpu":
        return (sizes["K"],) * sizes["G"]
    if name == "head_splits":
        return (sizes["N"], 0, 0)
    return sizes.get(name, default)


def problem_type(op: Op) -> type:
    """The primitive that an operation normalises to."""
    return type(make_call(op).problem)


def find(name: str, expression: str | None = None) -> Op:
    """The operation of a public name (``einsum`` and ``fp8_einsum`` need an expression).

    Raises:
        ArgumentError: there is none; the message lists near names.
    """
    table = {"einsum": ops.einsums, "fp8_einsum": ops.fp8_einsums}
    if name in table:
        known = table[name]
        op = known.get((expression or "").replace(" ", ""))
        if op is None:
            raise ArgumentError(f"{name} needs an expression (--expr), one of {', '.join(known)}")
        return op
    known_names = {**ops.TABLE, **ops.names()}
    if name not in known_names:
        words = name.split("_")
        near = [known for known in known_names if all(word in known for word in words)] or sorted(known_names)
        raise ArgumentError(f"no operation is called {name!r}; known: {', '.join(near)}")
    return known_names[name]


def dims_text(sizes: Mapping[str, int]) -> str:
    return " ".join(f"{name}={value}" for name, value in sizes.items())
