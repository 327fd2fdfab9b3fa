"""The declaration of an operation: plain data."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from .check import make_check
from .glance import Addresses, Glance, make_addresses, make_glance

Tensors = tuple["Tensor | None", ...]
Options = tuple[Any, ...]


@dataclass(frozen=True)
class Arg:
    """One tensor of an operation.

    Attributes:
        axes: the axis expressions, separated by blanks; empty where only ``Op.prepare`` can tell the shape.
        storage: ``matrix`` (one of the last two strides is 1), ``rows`` (the last stride is 1), ``any``,
            ``flat`` (contiguous). Strides of axes of size 0 or 1 never matter.
        packed: dtype int8 is allowed and holds two e2m1 values a byte along the contiguous axis; ``axes``
            count values.
        scale_of: the operand that this tensor scales: public functions take the two as a pair. Where ``axes``
            is empty its shape is recognised by ``layout.recognise_scale``.
        transposed: the caller stores this operand (and its scales) with the last two axes exchanged.
    """

    name: str
    axes: str
    dtypes: tuple[torch.dtype, ...]
    words: str = ""
    out: bool = False
    optional: bool = False
    storage: str = "any"
    packed: bool = False
    scale_of: str = ""
    transposed: bool = False

    @property
    def signature(self) -> str:
        """``a[M, K]``, as messages and docs write it."""
        if self.axes:
            return f"{self.name}[{', '.join(self.axes.split())}]"
        return f"{self.name} (scales of {self.scale_of})" if self.scale_of else self.name


@dataclass(frozen=True)
class Option:
    """One argument that is not a tensor.

    Attributes:
        schema: its type in a torch schema, such as ``int[]?``.
        low: the lowest legal integer, each one of a sequence included; None where every integer is legal.
        high: the highest one, where there is a lowest one too.
        choices: the legal values, where they are few.
        letters: the letters that a string may be made of.
    """

    name: str
    schema: str
    default: Any
    words: str = ""
    low: int | None = None
    high: int | None = None
    choices: tuple[Any, ...] = ()
    letters: str = ""


@dataclass(frozen=True)
class Op:
    """One operation: its tensors, options and words.

    Attributes:
        name: the name of the operation, in messages and for torch's dispatcher.
        public: the public functions that run it; left out, the one of its own name.
        prepare: checks what axes cannot say and returns ``(problem, view)``: the frozen problem for the
            backend, and a function that maps the caller's tensors to the primitive's, or None where they are
            the same.
        flops: a product of axis expressions, such as ``2 M N K``.
        sampler: the name of the function of ``samples`` that makes valid inputs.
        fake: for an operation that returns a tensor, makes an empty one of the right shape; None for in-place
            ones.
    """

    name: str
    words: str
    args: tuple[Arg, ...]
    options: tuple[Option, ...]
    prepare: Callable[..., Any]
    flops: str
    sampler: str
    public: tuple[str, ...] = ()
    fake: Callable[[Tensors, Options], Any] | None = None
    check: Callable[..., dict[str, int]] = field(init=False, repr=False, compare=False)
    glance: Glance = field(init=False, repr=False, compare=False)
    addresses: Addresses = field(init=False, repr=False, compare=False)
    positions: dict[str, int] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "positions", {arg.name: i for i, arg in enumerate(self.args)})
        object.__setattr__(self, "check", make_check(self))
        object.__setattr__(self, "glance", make_glance(self))
        object.__setattr__(self, "addresses", make_addresses(self))

    def __hash__(self) -> int:
        return hash(self.name)

    @property
    def names(self) -> tuple[str, ...]:
        """Every public name that runs the operation, the one that documents it first."""
        return self.public or (self.name,)

    @property
    def outputs(self) -> tuple[int, ...]:
        """Positions of the tensors that the operation writes."""
        return tuple(i for i, arg in enumerate(self.args) if arg.out)

    def axis_names(self, name: str) -> list[str]:
        """The axis expressions of one tensor."""
        return self.args[self.positions[name]].axes.split()
