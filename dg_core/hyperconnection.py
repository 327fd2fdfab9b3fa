"""The projection before a hyper-connection's normalisation, fused with the row norms it needs."""

from __future__ import annotations

from torch import Tensor

from . import ops
from .dispatch import run


def tf32_hc_prenorm_gemm(
    a: Tensor, b: Tensor, d: Tensor, sqr_sum: Tensor, num_splits: int | None = None
) -> None:
    """``d = a @ b.T`` in TF32 and ``sqr_sum[m] = sum_k a[m, k]^2``, both accumulated in float32.

    Args:
        a: ``a[M, K]`` bfloat16.
        b: ``b[N, K]`` float32, rounded to TF32 (10 mantissa bits) before the product.
        d: float32 ``[M, N]``, or ``[num_splits, M, N]``: one partial sum for each part of K, exact zeros for
            empty parts.
        sqr_sum: float32 ``[M]``, or ``[num_splits, M]``.
        num_splits: number of parts of K; the caller adds them up.

    Raises:
        ShapeError: d or sqr_sum has another shape than num_splits asks for.
    """
    run(ops.tf32_hc_prenorm_gemm, (a, b, d, sqr_sum), (num_splits,))
