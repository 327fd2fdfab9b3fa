"""``d = a @ b.T`` in TF32 with the squared norms of a's rows."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from dg_core.backend import HcPrenorm
from dg_core.layout import split_k_ranges

from .operand import K_STEP, TILE, Operand, Rows, steps, write_product

_TF32_DROPPED_BITS = 13  # float32 has 23 mantissa bits, TF32 has 10


def round_to_tf32(x: Tensor) -> Tensor:
    """float32 rounded to 10 mantissa bits, to nearest with ties to even: of the roundings that there are, the
    one that explains the public library's values on an H200 best (calc_diff 3e-12; ties away 6e-12,
    truncation 1e-7)."""
    bits = x.contiguous().view(torch.int32)
    half = (1 << (_TF32_DROPPED_BITS - 1)) - 1 + ((bits >> _TF32_DROPPED_BITS) & 1)
    rounded = (bits + half) & -(1 << _TF32_DROPPED_BITS)
    return torch.where(x.isfinite(), rounded.view(torch.float32), x)


@dataclass(frozen=True)
class Tf32Operand:
    """A float32 matrix that is rounded to TF32 where it is read."""

    values: Tensor

    def block(self, rows: Rows, columns: slice) -> Tensor:
        return round_to_tf32(self.values[rows, columns])


def hc_prenorm(p: HcPrenorm, a: Tensor, b: Tensor, d: Tensor, sqr_sum: Tensor) -> None:
    """Solve one problem: whole results, or one partial result for each of ``splits`` ranges of K."""
    products, norms = (d, sqr_sum) if p.splits else (d.unsqueeze(0), sqr_sum.unsqueeze(0))
    for part, (first, last) in enumerate(split_k_ranges(p.k, max(p.splits, 1))):
        # bfloat16 has 7 mantissa bits, so a is a TF32 matrix as it is.
        left, right = Operand(a[:, first:last]), Tf32Operand(b[:, first:last])
        write_product([(left, right)], last - first, products[part])
        for rows in steps(p.m, TILE):
            total = torch.zeros_like(norms[part, rows])
            for columns in steps(last - first, K_STEP):
                total += left.block(rows, columns).square().sum(1)
            norms[part, rows] = total
