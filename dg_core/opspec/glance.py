"""What a warm call reads of its tensors: two functions that are generated from the declaration.

A loop over the tensors of a call costs a third more than the same reads written out one after the other, so
they are written out here, by ``make_glance`` and ``make_addresses``, as the check is in ``check.py``.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

if TYPE_CHECKING:
    from .declaration import Op, Options, Tensors

# The classes of tensors that may go straight to a plan; any other has a meaning of its own.
PLAIN = frozenset((Tensor, torch.nn.Parameter))

# Two values of these kinds may be equal while one is legal and the other is not: 1, 1.0 and True.
_NUMBERS = ("bool", "int", "SymInt")

Glance = Callable[["Tensors", "Options", "str | None", int], tuple[Hashable, tuple[Any, ...]]]
Addresses = Callable[["Tensors"], tuple[list[int], Hashable]]


def glance_source(op: Op) -> str:
    """Python source of the glance at a call of ``op``.

    It takes tensors, options, the backend that the thread asked for and the epoch. It returns a hint, which
    narrows the known calls down to those that may be like this one, and the tensors that are left to compare:
    each one once, since c that is d has nothing of its own. It raises TypeError where an operand is no plain
    tensor.
    """
    required = [arg.name for arg in op.args if not arg.optional]
    operands = [arg.name for arg in op.args if not (arg.optional or arg.out or arg.scale_of)]
    leading = operands[:2] or required[:1]
    optional = [arg.name for arg in op.args if arg.optional]
    numbers = [i for i, o in enumerate(op.options) if o.schema.removesuffix("?") in _NUMBERS]
    wrong = " or ".join(f"(type({name}) is not Tensor and type({name}) not in PLAIN)" for name in leading)
    lines = [
        "def glance(tensors, options, asked, epoch):",
        f"    {', '.join(arg.name for arg in op.args)}, = tensors",
        f"    if {wrong}: raise TypeError",
        f"    present = ({', '.join(required)},)",
    ]
    for name in optional:
        lines.append(f"    has_{name} = {name} is not None")
        if name == "c":
            lines.append("    if c is d: has_c = 'd'")
        lines.append(f"    {'elif' if name == 'c' else 'if'} has_{name}: present = (*present, {name})")
    hint = [
        "NAME", "asked", "epoch", "options", *(f"type(options[{i}])" for i in numbers),
        *(f"{name}.shape" for name in leading), *(f"has_{name}" for name in optional),
    ]  # fmt: skip
    lines.append(f"    return ({', '.join(hint)}), present")
    return "\n".join(lines)


def addresses_source(op: Op) -> str:
    """Python source of the function that returns the addresses of a call's tensors, 0 for None, and how they
    lie: false where all are multiples of 16 and c, unless it is d, has an address of its own."""
    names = [arg.name for arg in op.args]
    lines = ["def addresses(tensors):", f"    {', '.join(names)}, = tensors"]
    for arg in op.args:
        name = arg.name
        absent = f"0 if {name} is None else " if arg.optional else ""
        same = "at_d if c is d else " if name == "c" else ""
        lines.append(f"    at_{name} = {absent}{same}{name}.data_ptr()")
    every = [f"at_{name}" for name in names]
    odd, each = f"({' | '.join(every)}) & 15", [f"{name} & 15" for name in every]
    if "c" in names:
        odd, each = f"({odd} or (at_c == at_d and c is not d))", [*each, "at_c == at_d"]
    lines.append(f"    return [{', '.join(every)}], {odd} and ({', '.join(each)},)")
    return "\n".join(lines)


def make_glance(op: Op) -> Glance:
    """Compile the glance at a call of ``op``."""
    scope: dict[str, Any] = {"NAME": op.name, "PLAIN": PLAIN, "Tensor": Tensor}
    exec(compile(glance_source(op), f"<glance at {op.name}>", "exec"), scope)
    glance: Glance = scope["glance"]
    return glance


def make_addresses(op: Op) -> Addresses:
    """Compile the reader of the addresses of a call of ``op``."""
    scope: dict[str, Any] = {}
    exec(compile(addresses_source(op), f"<addresses of {op.name}>", "exec"), scope)
    addresses: Addresses = scope["addresses"]
    return addresses
