"""``cublaslt_gemm_*``: the vendor's own product through torch, a baseline for speed and for values."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch
from torch import Tensor

from dg_core.backend import Gemm

_PREFIX = "cublaslt_gemm"
# Sums of a split K that are kept in 16 bits would round more than once.
_REDUCED = ("allow_bf16_reduced_precision_reduction", "allow_fp16_reduced_precision_reduction")


def is_blas(op: str) -> bool:
    """True for the operations that are the vendor's product by name."""
    return op.startswith(_PREFIX)


@contextlib.contextmanager
def _whole_sums() -> Iterator[None]:
    options = torch.backends.cuda.matmul
    before = [getattr(options, name) for name in _REDUCED]
    try:
        for name in _REDUCED:
            setattr(options, name, False)
        yield
    finally:
        for name, value in zip(_REDUCED, before, strict=True):
            setattr(options, name, value)


class BlasPlan:
    """The plan of one product without scales, on operands of any strides."""

    def __init__(self, problem: Gemm) -> None:
        self.accumulate, self.in_place = problem.accumulate, problem.in_place

    def __call__(
        self, a: Tensor, sfa: None, b: Tensor, sfb: None, d: Tensor, c: Tensor | None, layout: None = None
    ) -> None:
        with torch.no_grad(), torch.autocast(d.device.type, enabled=False), _whole_sums():
            if a.itemsize == 1:  # torch multiplies FP8 with scales only; bfloat16 holds every value of it
                a, b = a.bfloat16(), b.bfloat16()
            self._multiply(a, b.t(), d, c)

    def _multiply(self, a: Tensor, b: Tensor, d: Tensor, c: Tensor | None) -> None:
        if a.dtype == d.dtype:
            if c is None:
                torch.mm(a, b, out=d)
            else:
                torch.addmm(c, a, b, out=d)
            return
        product = torch.mm(a, b) if a.dtype == torch.float32 else torch.mm(a, b, out_dtype=torch.float32)
        d.copy_(product if c is None else product.add_(c))
