"""The names of DeepGEMM's first year, kept for the programs that still call them.

They took FP8 pairs with float32 scales per 1 x 128 of the left side, and wrote bfloat16; the weight-gradient
forms take 1 x 128 on both sides and add to a float32 output.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

import dg_core
from dg_core.arguments import Scaled, pair
from dg_core.testing import bench, bench_kineto, calc_diff

__all__ = [
    "bench", "bench_kineto", "calc_diff", "gemm_fp8_fp8_bf16_nt", "get_col_major_tma_aligned_tensor",
    "k_grouped_wgrad_gemm_fp8_fp8_fp32_nt", "m_grouped_gemm_fp8_fp8_bf16_nt_contiguous",
    "m_grouped_gemm_fp8_fp8_bf16_nt_masked", "wgrad_gemm_fp8_fp8_fp32_nt",
]  # fmt: skip

WGRAD_RECIPE = (1, 1, 128)

get_col_major_tma_aligned_tensor = dg_core.get_mn_major_tma_aligned_tensor


def gemm_fp8_fp8_bf16_nt(lhs: Scaled, rhs: Scaled, out: Tensor) -> None:
    """``out = lhs @ rhs.T``: ``fp8_gemm_nt``."""
    dg_core.fp8_gemm_nt(lhs, rhs, out)


def m_grouped_gemm_fp8_fp8_bf16_nt_contiguous(
    lhs: Scaled, rhs: Scaled, out: Tensor, m_indices: Tensor
) -> None:
    """``m_grouped_fp8_gemm_nt_contiguous`` with int32 ``m_indices[M]``, the group of each row."""
    dg_core.m_grouped_fp8_gemm_nt_contiguous(lhs, rhs, out, m_indices)


def m_grouped_gemm_fp8_fp8_bf16_nt_masked(
    lhs: Scaled, rhs: Scaled, out: Tensor, masked_m: Tensor, expected_m: int
) -> None:
    """``m_grouped_fp8_gemm_nt_masked`` with int32 ``masked_m[G]``, the valid rows of each group."""
    dg_core.m_grouped_fp8_gemm_nt_masked(lhs, rhs, out, masked_m, expected_m)


def wgrad_gemm_fp8_fp8_fp32_nt(lhs: Scaled, rhs: Scaled, out: Tensor) -> None:
    """``out += lhs @ rhs.T`` into float32 ``out[M, N]``, one scale per 1 x 128 on both sides."""
    dg_core.fp8_gemm_nt(lhs, rhs, out, out, WGRAD_RECIPE)


def k_grouped_wgrad_gemm_fp8_fp8_fp32_nt(
    lhs: Scaled, rhs: Scaled, out: Tensor, batch_sizes: Sequence[int]
) -> None:
    """``out[g] += lhs_g @ rhs_g.T`` into float32 ``out[G, M, N]``.

    Args:
        lhs: ``(values, scales)``: every group's contiguous ``[M, K_g]`` in one flat buffer, and scales
            ``[sum of cdiv(K_g, 128), M]``, with the blocks of K first.
        rhs: likewise with N.
        batch_sizes: K of each group.
    """
    name = "k_grouped_wgrad_gemm_fp8_fp8_fp32_nt"
    (a, sfa), (b, sfb) = pair(name, "lhs", lhs), pair(name, "rhs", rhs)
    dg_core.k_grouped_fp8_gemm_nt_contiguous(
        (a, _blocks_last(sfa)), (b, _blocks_last(sfb)), out, batch_sizes, c=out, recipe=WGRAD_RECIPE
    )


def _blocks_last(sf: Any) -> Any:
    # Anything but a matrix goes on as it is, to the check that says what is wrong with it.
    return sf.t() if isinstance(sf, Tensor) and sf.dim() == 2 else sf
