"""DeepGEMM's ``legacy`` names (``_tl``), whose BF16 kernels gather rows of an operand while they load it.

Here the rows are gathered first and a public grouped product follows, so they run wherever that runs. An
index out of range counts as padding: it neither reads nor changes anything.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from dg_core import (
    k_grouped_bf16_gemm_tn_contiguous,
    m_grouped_bf16_gemm_nn_contiguous,
    m_grouped_bf16_gemm_nt_contiguous,
)
from dg_core.errors import DTypeError, ShapeError
from dg_core.rules import flag, one_device, takes, tensor

__all__ = [
    "a_fused_k_grouped_bf16_gemm_tn_contiguous_tl", "a_fused_m_grouped_bf16_gemm_nn_contiguous_tl",
    "a_fused_m_grouped_bf16_gemm_nt_contiguous_tl", "b_fused_k_grouped_bf16_gemm_tn_contiguous_tl",
    "m_grouped_bf16_gemm_nn_contiguous_tl", "m_grouped_bf16_gemm_nt_contiguous_tl",
]  # fmt: skip

RowHandle = tuple[Tensor, Tensor]
GroupHandle = tuple[Tensor, Tensor, Tensor]


def m_grouped_bf16_gemm_nt_contiguous_tl(a: Tensor, b: Tensor, d: Tensor, m_indices: Tensor) -> None:
    """``m_grouped_bf16_gemm_nt_contiguous``: ``d[i] = a[i] @ b[m_indices[i]].T``."""
    m_grouped_bf16_gemm_nt_contiguous(a, b, d, m_indices)


def m_grouped_bf16_gemm_nn_contiguous_tl(a: Tensor, b: Tensor, d: Tensor, m_indices: Tensor) -> None:
    """``m_grouped_bf16_gemm_nn_contiguous``: ``d[i] = a[i] @ b[m_indices[i]]``."""
    m_grouped_bf16_gemm_nn_contiguous(a, b, d, m_indices)


# Rows are gathered from a and b before a public function sees them, so these hold them against its rules.
_m_gathers = takes(a=tensor(torch.bfloat16, axes=(2,)), b=tensor(torch.bfloat16, axes=(3,)), d=tensor())
_k_gathers = takes(
    a=tensor(torch.bfloat16, axes=(2,)), b=tensor(torch.bfloat16, axes=(2,)), d=tensor(), acc=flag
)


def _handle(op: str, handle: Any, operand: Tensor, *axes: str) -> tuple[Tensor, ...]:
    """The vectors of a handle; ``axes`` are their signatures, such as ``k_start[G]``."""
    vectors = tuple(handle) if isinstance(handle, (tuple, list)) else ()
    if len(vectors) != len(axes) or not all(
        isinstance(x, Tensor) and x.dtype == torch.int32 for x in vectors
    ):
        raise DTypeError(f"{op}: handle is {handle!r:.80}; it must be the int32 tensors ({', '.join(axes)})")
    named = {axis.partition("[")[0]: x for axis, x in zip(axes, vectors, strict=True)}
    one_device(op, operand=operand, **named)
    sizes: dict[str, int] = {}
    for x, signature in zip(vectors, axes, strict=True):
        name, _, axis = signature.rstrip("]").partition("[")
        if x.dim() != 1 or sizes.setdefault(axis, x.shape[0]) != x.shape[0]:
            raise ShapeError(
                f"{op}: {name} has shape {tuple(x.shape)}; it must be [{axis}], {axis} = {sizes.get(axis)}"
            )
    return vectors


def _gather(x: Tensor, rows: Tensor) -> tuple[Tensor, Tensor]:
    """``x[rows]``, and which of the rows exist; where one does not, some other row stands in for it."""
    exists = (rows >= 0) & (rows < x.shape[0])
    if x.shape[0] == 0:
        return x.new_zeros((rows.shape[0], *x.shape[1:])), exists
    return x.index_select(0, rows.clamp(0, x.shape[0] - 1)), exists


def _m_grouped(op: str, a: Tensor, handle: RowHandle) -> tuple[Tensor, Tensor]:
    """The gathered rows of a, and their groups: -1 where the row does not exist."""
    m_indices, m_row_indices = _handle(op, handle, a, "m_indices[M]", "m_row_indices[M]")
    rows, exists = _gather(a, m_row_indices)
    return rows, torch.where(exists, m_indices, -1)


@_m_gathers
def a_fused_m_grouped_bf16_gemm_nt_contiguous_tl(a: Tensor, b: Tensor, d: Tensor, handle: RowHandle) -> None:
    """``d[i] = a[m_row_indices[i]] @ b[m_indices[i]].T``.

    Args:
        a: bfloat16 ``[rows, K]``, any number of rows.
        b: bfloat16 ``[G, N, K]``.
        d: ``[M, N]``; rows whose label or row index is out of range stay as they were.
        handle: int32 ``(m_indices[M], m_row_indices[M])``: the group of each row of d, and its row of a.

    Raises:
        DTypeError, ShapeError: the handle is not such a pair, or a tensor breaks the signature.
    """
    rows, labels = _m_grouped("a_fused_m_grouped_bf16_gemm_nt_contiguous_tl", a, handle)
    m_grouped_bf16_gemm_nt_contiguous(rows, b, d, labels)


@_m_gathers
def a_fused_m_grouped_bf16_gemm_nn_contiguous_tl(a: Tensor, b: Tensor, d: Tensor, handle: RowHandle) -> None:
    """``a_fused_m_grouped_bf16_gemm_nt_contiguous_tl`` with ``b[G, K, N]``."""
    rows, labels = _m_grouped("a_fused_m_grouped_bf16_gemm_nn_contiguous_tl", a, handle)
    m_grouped_bf16_gemm_nn_contiguous(rows, b, d, labels)


def _k_grouped(op: str, fused: Tensor, plain: Tensor, handle: GroupHandle) -> tuple[Tensor, Tensor, Tensor]:
    """Rows of both operands without the gaps between groups, and the groups' sizes, all on the device.

    Position p of the result lies in the group whose sizes, added up, first exceed p; it stands for row
    ``start + (p - sizes before)`` of the plain operand, and the row of the fused one that k_indices names.
    """
    k_indices, k_start, k_end = _handle(op, handle, plain, "k_indices[K]", "k_start[G]", "k_end[G]")
    total = k_indices.shape[0]
    if plain.shape[:1] != (total,):
        raise ShapeError(
            f"{op}: k_indices has K = {total} entries, but its plain operand has shape {tuple(plain.shape)}"
        )
    start = k_start.to(torch.int64).clamp(0, total)
    sizes = (k_end.to(torch.int64).clamp(0, total) - start).clamp(min=0)
    ends = sizes.cumsum(0)
    position = torch.arange(total, device=k_indices.device)
    if total == 0 or sizes.numel() == 0:
        return fused[:0], plain[:0], sizes.to(torch.int32)
    group = torch.searchsorted(ends, position, right=True).clamp(max=sizes.shape[0] - 1)
    source = (start + sizes - ends)[group] + position
    rows, inside = _gather(plain, source)
    gathered, exists = _gather(fused, k_indices.index_select(0, source.clamp(0, total - 1)))
    # Both rows become zero: a zero on one side alone would still turn an infinity on the other into NaN.
    keep = (inside & exists)[:, None]
    zero = torch.zeros((), dtype=fused.dtype, device=fused.device)
    return torch.where(keep, gathered, zero), torch.where(keep, rows, zero), sizes.to(torch.int32)


@_k_gathers
def a_fused_k_grouped_bf16_gemm_tn_contiguous_tl(
    a: Tensor, b: Tensor, d: Tensor, handle: GroupHandle, acc: bool = False
) -> None:
    """``d[g] (+)= sum over k in [k_start[g], k_end[g]) of outer(a[k_indices[k]], b[k])``.

    Args:
        a: bfloat16 ``[rows, M]``, any number of rows.
        b: bfloat16 ``[K, N]``.
        d: ``[G, M, N]``, float32 or bfloat16.
        handle: int32 ``(k_indices[K], k_start[G], k_end[G])``; the groups' ranges may not overlap.
        acc: add to d instead of overwriting it.

    Raises:
        DTypeError, ShapeError: the handle is not such a triple, or a tensor breaks the signature.
    """
    rows_a, rows_b, sizes = _k_grouped("a_fused_k_grouped_bf16_gemm_tn_contiguous_tl", a, b, handle)
    k_grouped_bf16_gemm_tn_contiguous(rows_a, rows_b, d, None, sizes, d if acc else None)


@_k_gathers
def b_fused_k_grouped_bf16_gemm_tn_contiguous_tl(
    a: Tensor, b: Tensor, d: Tensor, handle: GroupHandle, acc: bool = False
) -> None:
    """The same with ``a[K, M]`` as it is, and ``k_indices`` naming rows of ``b[rows, N]``."""
    rows_b, rows_a, sizes = _k_grouped("b_fused_k_grouped_bf16_gemm_tn_contiguous_tl", b, a, handle)
    k_grouped_bf16_gemm_tn_contiguous(rows_a, rows_b, d, None, sizes, d if acc else None)
