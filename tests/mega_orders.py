"""Orders of expert weights once more, as lists of indices, and bits that tests compare."""

from __future__ import annotations

import itertools

import torch
from torch import Tensor

from .operands import generator


def same_bits(x: Tensor, y: Tensor) -> bool:
    def raw(t: Tensor) -> Tensor:
        return t.clone(memory_format=torch.contiguous_format).view(torch.uint8)

    return x.dtype == y.dtype and x.shape == y.shape and torch.equal(raw(x), raw(y))


def random_bytes(seed: int, *shape: int) -> Tensor:
    return torch.randint(0, 256, shape, generator=generator(seed), dtype=torch.uint8)


def interleaved_rows(rows: int, group: int) -> list[int]:
    """The plain row of every row: so many of gate, then as many of up."""
    half = rows // 2
    return [
        start + side * half + i for start in range(0, half, group) for side in (0, 1) for i in range(group)
    ]


def sf_rows(rows: int) -> list[int]:
    """The plain row of every row in 4 x 32 order."""
    order = [0] * rows
    for block, a, b in itertools.product(range(rows // 128), range(4), range(32)):
        order[block * 128 + 4 * b + a] = block * 128 + 32 * a + b
    return order
