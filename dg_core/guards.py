"""Whether tensors are of the same kind as others were, asked in one call.

Shape, strides, dtype and device of five tensors cost 1.5 us to read from Python one after the other, and 0.5
us more to hash and compare. torch has the same comparison in C++, where it guards compiled functions: 0.45 us
for the five. It is no public interface, and wrong arguments end the process instead of raising. So it is used
with those versions of torch alone that it was tried with, and only if it tells apart what it has to; without
it a call looks up its plan by a key, which takes longer and gives the same plan.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

# The first and the last version that were tried.
TRIED = (2, 9), (2, 13)

Guard = Callable[..., bool]


def _tensor_guards() -> Any:
    """torch's class of guards; None where this torch is not one that was tried."""
    version = re.match(r"(\d+)\.(\d+)", torch.__version__)
    if version is None or not TRIED[0] <= (int(version[1]), int(version[2])) <= TRIED[1]:
        return None
    guards = getattr(getattr(torch._C, "_dynamo", None), "guards", None)
    return getattr(guards, "TensorGuards", None)


_guards = _tensor_guards()


def guard(tensors: tuple[Tensor, ...]) -> Guard | None:
    """A function of as many arguments that is true where each is a tensor of the same class, shape, strides,
    dtype and device as that of ``tensors`` in its place, which it does not keep alive.

    It is false also where one tensor is given twice, or where something differs that no plan depends on: what
    records gradients, the modes of torch's dispatcher. None where there is no such function.
    """
    if _guards is None:
        return None
    made: Guard = _guards(*tensors, dynamic_dims_sizes=None, dynamic_dims_strides=None).check
    return made if made(*tensors) else None


def tells_apart() -> bool:
    """True when guards tell apart everything that a plan may depend on."""
    x, y = torch.zeros(4, 6, device="cpu"), torch.zeros(2, device="cpu")
    same = guard((x, y))
    others: tuple[Any, ...] = (
        x[:3], x[:, :5], x.view(4, 6, 1), x.view(6, 4).t(), torch.empty_strided((4, 6), (7, 1), device="cpu"),
        x.double(), x.int(), x.to("meta"), torch.nn.Parameter(x), x.as_subclass(_Derived), None, "x", y,
    )  # fmt: skip
    return (
        same is not None
        and same(torch.ones(4, 6, device="cpu"), torch.ones(2, device="cpu"))
        and not any(same(other, y) or same(x, other) for other in others if other is not y)
    )


class _Derived(Tensor):
    """A tensor of a class of its own."""


if _guards is not None and not tells_apart():
    _guards = None
