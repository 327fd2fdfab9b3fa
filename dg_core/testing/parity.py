"""The same input on two backends: whether it means the same output."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from ..dispatch import run, use_backend
from ..opspec import Op, Options, Tensors
from .numeric import calc_diff, worst_elements
from .tolerances import bound_of

__all__ = ["Parity", "Side", "compare", "outputs"]


@dataclass(frozen=True)
class Side:
    """A backend, and the device on which it gets its tensors."""

    backend: str
    device: str = "cpu"


@dataclass(frozen=True)
class Parity:
    """One output on two sides.

    Attributes:
        diff: calc_diff of the two; infinity where one has a finite element and the other has not, or where
            the infinities differ.
        bound: what it may be: the sum of both sides' bounds against float64.
        worst: the elements that differ most, in words.
    """

    op: str
    output: str
    diff: float
    bound: float
    worst: str

    @property
    def passed(self) -> bool:
        return self.diff <= self.bound


def _copied(x: Tensor | None, device: str, made: dict[int, Tensor]) -> Tensor | None:
    """A copy with the same strides; a tensor that stands twice among the operands is copied once."""
    if x is None:
        return None
    if id(x) not in made:
        place = torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device=device)
        made[id(x)] = place.copy_(x)
    return made[id(x)]


def outputs(side: Side, op: Op, tensors: Tensors, options: Options) -> dict[str, Tensor]:
    """What one side makes of copies of these tensors, by the names of the outputs; on the CPU.

    Raises:
        UnsupportedError: the backend lacks the operation.
    """
    made: dict[int, Tensor] = {}
    copies = tuple(_copied(x, side.device, made) for x in tensors)
    with use_backend(side.backend):
        result = run(op, copies, options)
    found = {op.args[i].name: copies[i] for i in op.outputs} or {"result": result}
    return {name: x.cpu() for name, x in found.items() if x is not None}


def compare(one: Side, other: Side, op: Op, tensors: Tensors, options: Options = ()) -> list[Parity]:
    """Run one call on both sides and compare each output, what the call leaves alone included: both sides
    start from the same bits.

    Raises:
        UnsupportedError: a backend lacks the operation.
    """
    left, right = (outputs(side, op, tensors, options) for side in (one, other))
    return [_parity(op, name, left[name], right[name]) for name in left]


def _parity(op: Op, name: str, x: Tensor, y: Tensor) -> Parity:
    bound = 2 * bound_of(op, x.dtype)
    if bound == 0:
        diff = 0.0 if x.shape == y.shape and torch.equal(x, y) else math.inf
    else:
        known = x.isfinite() & y.isfinite()
        alike = torch.equal(x[~known].nan_to_num(), y[~known].nan_to_num())
        diff = calc_diff(x[known], y[known]) if alike else math.inf
    return Parity(op.name, name, diff, bound, str(worst_elements(x, y, 5)))
