"""A call of an operation from its sizes alone, without storage: enough to check it and to count its cost."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import torch

from .. import ops
from ..backend import Gemm, Problem
from ..errors import ArgumentError, DGError
from ..layout import BLOCK_1X128, BLOCK_128X128, PACKED_128, PACKED_FP4, PER_ROW, ScaleFormat, ceil_div
from ..opspec import Arg, Cost, Op, Options, Tensors, check_options, cost

Made = TypeVar("Made")

SCALES: Mapping[str, tuple[ScaleFormat, ScaleFormat]] = {
    "block": (BLOCK_1X128, BLOCK_128X128),
    "block_1d1d": (BLOCK_1X128, BLOCK_1X128),
    "packed": (PACKED_128, PACKED_128),
    "channelwise": (PER_ROW, PER_ROW),
}
FP4 = ("a", "b", "ab")
GRAN_K = (32, 128)
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
class Storage:
    """How the tensors of a call are stored, where its operation leaves that open. A choice that is made for
    an operation without it is a wrong call.

    Attributes:
        scales: a name of ``SCALES``; left out, ``block`` where operands have scales. An operand of packed FP4
            has a scale for each row, never for 128 of them.
        gran_k: values along K that share a scale, 32 or 128; left out, 128 (channelwise: all of K).
        fp4: the operands that hold packed FP4, along K: a name of ``FP4``, or none.
        psum: the layout of groups holds end rows.
        alignment: rows at whose multiples groups start; left out, the process-wide number.

    Raises:
        ArgumentError: a value that no operation has.
    """

    scales: str | None = None
    gran_k: int | None = None
    fp4: str = ""
    psum: bool = False
    alignment: int | None = None

    def __post_init__(self) -> None:
        if self.scales not in (None, *SCALES):
            raise ArgumentError(f"no scales are called {self.scales!r}; known: {', '.join(SCALES)}")
        if self.gran_k not in (None, *GRAN_K):
            raise ArgumentError(f"gran_k is {self.gran_k}; it must be {' or '.join(map(str, GRAN_K))}")
        if self.fp4 not in ("", *FP4):
            raise ArgumentError(f"fp4 is {self.fp4!r}; it must be one of {', '.join(FP4)}")

    @property
    def words(self) -> tuple[str, ...]:
        """The choices that are made, as a line of ``precompile --shapes`` has them."""
        named = {"fp4": self.fp4, "gran_k": self.gran_k, "alignment": self.alignment}
        told = (f"{name}={value}" for name, value in named.items() if value)
        return (*([self.scales] if self.scales else []), *(["psum"] if self.psum else []), *told)


USUAL = Storage()


@dataclass(frozen=True)
class Call:
    """A checked call: its tensors have shapes and dtypes but no storage (torch's device ``meta``).

    Attributes:
        called: the name that the caller used, which errors have; ``op`` may have others.
        storage: as the tensors have it: scales are named where there are any.
    """

    op: Op
    called: str
    sizes: Mapping[str, int]
    storage: Storage
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


def call_of(
    name: str, given: Mapping[str, int] | None = None, storage: Storage = USUAL, expression: str | None = None
) -> Call:
    """The call of the operation that ``find`` has for this name.

    Raises:
        ArgumentError, ShapeError, DTypeError: as ``find`` and ``make_call`` do, of this name.
    """
    return make_call(find(name, expression), given, storage, name)


def make_call(
    op: Op, given: Mapping[str, int] | None = None, storage: Storage = USUAL, called: str = ""
) -> Call:
    """The call of ``op`` with these sizes (others are ``DEFAULTS``), stored like this.

    Args:
        called: the name of ``op`` that errors have; its first one if left out.

    Raises:
        ArgumentError: the operation has no such size or choice of storage, a size is negative, or a tensor
            has 2**63 bytes or more.
        ShapeError, DTypeError: what the operation itself refuses.
    """
    named = replace(op, name=called) if called not in ("", op.name) else op
    names = size_names(op)
    for name, value in (given or {}).items():
        if name not in names:
            raise ArgumentError(f"{named.name} has no size {name}; it has {', '.join(names)}")
        if value < 0:
            raise ArgumentError(f"{named.name}: {name} is {value}; a size is at least 0")
    sizes = {name: (given or {}).get(name, DEFAULTS[name]) for name in names}
    storage = _checked(named, storage, sizes)
    derived = {name: rule(sizes) for name, (parts, rule) in _DERIVED.items() if set(parts) <= set(sizes)}
    every = {**sizes, **derived, **({"L": sizes["G"]} if storage.psum else {})}
    tensors = tuple(_tensor(named, arg, every, storage) for arg in op.args)
    options = tuple(_option(op, option.name, option.default, every, storage) for option in op.options)
    check_options(named, options)
    dims = named.check(*tensors)
    problem, _ = op.prepare(named, dims, tensors, options)
    problem = replace(problem, op=op.name)  # what backends know it by
    fake = op.fake
    result = () if fake is None else (_within_addresses(named, lambda: fake(tensors, options)),)
    work = _work(op, {**every, **dims}, (*tensors, *result), problem)
    return Call(op, named.name, sizes, storage, tensors, options, problem, work)


def has_scales(op: Op) -> bool:
    """Whether ``a`` and ``b`` have scales, of a family that a caller chooses."""
    return any(arg.scale_of in ("a", "b") for arg in op.args)


def has_option(op: Op, name: str) -> bool:
    return any(option.name == name for option in op.options)


def _checked(op: Op, storage: Storage, sizes: Mapping[str, int]) -> Storage:
    """``storage`` with its scales named.

    Raises:
        ArgumentError: the operation leaves no such choice.
    """
    for name, value in (("scales", storage.scales), ("gran_k", storage.gran_k)):
        if value is not None and not has_scales(op):
            raise ArgumentError(f"{op.name}: {name} is {value!r}, but it has no scales of operands a and b")
    for name, value, option in (
        ("psum", storage.psum, "use_psum_layout"),
        ("alignment", storage.alignment is not None, "alignment"),
    ):
        if value and not has_option(op, option):
            raise ArgumentError(f"{op.name}: {name} is given, but it has no option {option}")
    for side in storage.fp4:
        if side not in op.positions or not op.args[op.positions[side]].packed:
            raise ArgumentError(
                f"{op.name}: fp4 is {storage.fp4!r}, but it has no operand {side} that may be packed FP4"
            )
        if sizes["K"] % 2:
            raise ArgumentError(
                f"{op.name}: K is {sizes['K']}; packed FP4 takes an even K, two values a byte"
            )
    if not has_scales(op):
        return storage
    scales = storage.scales or "block"
    if op.sampler == "k_grouped" and scales == "channelwise":
        raise ArgumentError(f"{op.name}: scales is {scales!r}, but one along K would cover several groups")
    if storage.gran_k is not None and scales == "channelwise":
        raise ArgumentError(f"{op.name}: gran_k is {storage.gran_k}, but a channelwise scale covers all of K")
    return replace(storage, scales=scales)


# Work -------------------------------------------------------------------------------------------------------


def _work(op: Op, dims: Mapping[str, int], tensors: Tensors, problem: Problem) -> Cost:
    """The work of a call in which every row is valid and as many groups have rows as can.

    Weights of groups without rows stay where they are; where nothing is multiplied so do all operands, and
    rows of no group are left as they were.
    """
    moved: dict[str, torch.Tensor | None] = dict(zip(op.positions, tensors, strict=False))
    returned = tensors[len(moved) :]
    if isinstance(problem, Gemm) and problem.grouping in ("contiguous", "psum"):
        groups = problem.groups_with_rows
        if not groups:
            return Cost(0, 0)
        for name in ("b", "sfb"):
            weights = moved.get(name)
            moved[name] = None if weights is None else weights[:groups]
    work = cost(op, dims, (*moved.values(), *returned))
    if op.flops and not work.flops:
        return cost(op, dims, (*(moved[arg.name] for arg in op.args if arg.out), *returned))
    return work


# Tensors and options ----------------------------------------------------------------------------------------


def _tensor(op: Op, arg: Arg, sizes: Mapping[str, int], storage: Storage) -> torch.Tensor | None:
    if arg.optional and not (storage.psum and arg.name == "grouped_layout"):
        return None
    if arg.name in tuple(storage.fp4):
        return _within_addresses(op, lambda: _packed(op, arg, sizes))
    if arg.scale_of and not arg.axes:
        shape, dtype = _scale(op, arg, sizes, storage)
    else:
        text = arg.axes or _SHAPES[op.sampler, arg.name]
        shape, dtype = tuple(_size(axis, sizes) for axis in text.split()), arg.dtypes[0]
    return _within_addresses(op, lambda: torch.empty(shape, dtype=dtype, device="meta"))


def _packed(op: Op, arg: Arg, sizes: Mapping[str, int]) -> torch.Tensor:
    """An operand of FP4, two values of K a byte: K is its contiguous axis, whichever the caller's is last."""
    inner = contracted(op)
    axes = [axis for axis in op.axis_names(arg.name) if axis != inner]
    x = torch.empty(*(sizes[axis] for axis in axes), sizes[inner] // 2, dtype=PACKED_FP4, device="meta")
    return x.transpose(-1, -2) if arg.transposed else x


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


def formats(op: Op, storage: Storage) -> tuple[ScaleFormat, ScaleFormat]:
    """What one scale of a and one of b cover."""
    chosen = SCALES[storage.scales or "block"]
    if op.sampler == "k_grouped":  # one scale a row, group after group along K, whatever the family
        chosen = (PACKED_128, PACKED_128) if chosen[0].packed else (BLOCK_1X128, BLOCK_1X128)
    a, b = (
        replace(fmt, gran_mn=1 if side in storage.fp4 else fmt.gran_mn, gran_k=storage.gran_k or fmt.gran_k)
        for side, fmt in zip("ab", chosen, strict=True)
    )
    return a, b


def _scale(
    op: Op, arg: Arg, sizes: Mapping[str, int], storage: Storage
) -> tuple[tuple[int, ...], torch.dtype]:
    """Shape and dtype of an operand's scales: every axis divided by what one scale covers of it."""
    side = arg.scale_of
    fmt = formats(op, storage)["ab".index(side)]
    if op.sampler == "k_grouped":
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


def _option(op: Op, name: str, default: Any, sizes: Mapping[str, int], storage: Storage) -> Any:
    if name == "ks_cpu":
        return (sizes["K"],) * sizes["G"]
    if name == "head_splits":
        return (sizes["N"], 0, 0)
    if name == "use_psum_layout":
        return storage.psum
    if name == "alignment":
        return storage.alignment
    if name == "recipe" and storage.gran_k is not None:
        a, b = formats(op, storage)
        return a.gran_mn, b.gran_mn, storage.gran_k
    return sizes.get(name, default)


def problem_type(op: Op) -> type:
    """The primitive that an operation normalises to."""
    return type(make_call(op).problem)


def find(name: str, expression: str | None = None) -> Op:
    """The operation of a public name (``einsum`` and ``fp8_einsum`` need an expression).

    Raises:
        ArgumentError: there is none (the message lists near names), or it has no expression.
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
    if expression is not None:
        raise ArgumentError(f"{name} has no expression; {' and '.join(table)} have one")
    return known_names[name]


def dims_text(sizes: Mapping[str, int]) -> str:
    return " ".join(f"{name}={value}" for name, value in sizes.items())
