"""Logits of the lightning indexer:
``out[i, j] = kv_scale[j] * sum_h relu(q[i, h] . kv[j]) * weights[i, h]``."""

from __future__ import annotations

import torch
from torch import Tensor

from . import ops
from .arguments import ScaledOrPlain, pair
from .dispatch import run


def fp8_fp4_mqa_logits(
    q: ScaledOrPlain, kv: ScaledOrPlain, weights: Tensor, cu_seq_len_k_start: Tensor,
    cu_seq_len_k_end: Tensor, clean_logits: bool = True, max_seqlen_k: int = 0,
    logits_dtype: torch.dtype = torch.float32,
) -> Tensor:  # fmt: skip
    """Logits of every query row against its range of keys.

    Args:
        q: ``(q[S, H, D], None)`` float8_e4m3fn, or ``(packed e2m1 int8, q_sf[S, H] int32)`` with UE8M0 scales
            per 32.
        kv: ``(kv[SKV, D], kv_sf[SKV])``: float8_e4m3fn and float32, or packed e2m1 and int32.
        weights: ``weights[S, H]`` float32, bfloat16 or float16.
        cu_seq_len_k_start, cu_seq_len_k_end: int32 ``[S]``; keys ``start[i] <= j < end[i]`` count, clipped to
            [0, SKV].
        clean_logits: write -inf outside the range; otherwise those elements are unspecified.
        max_seqlen_k: above 0 the result has so many columns and column j of row i is key ``start[i] + j``.
        logits_dtype: float32 or bfloat16; sums are float32 and rounded once.

    Returns:
        ``[S, SKV]`` (or ``[S, max_seqlen_k]``), a view whose rows start on multiples of 256 bytes.

    Raises:
        ShapeError: H is not 8, 16, 32, 64 or 128, or D not 32, 64 or 128 (FP4: 64 or 128), or sizes disagree.
    """
    op = ops.fp8_fp4_mqa_logits
    tensors = (
        *pair(op.name, "q", q),
        *pair(op.name, "kv", kv),
        weights,
        cu_seq_len_k_start,
        cu_seq_len_k_end,
    )
    result: Tensor = run(op, tensors, (clean_logits, max_seqlen_k, logits_dtype))
    return result


def fp8_mqa_logits(
    q: Tensor, kv: ScaledOrPlain, weights: Tensor, cu_seq_len_k_start: Tensor, cu_seq_len_k_end: Tensor,
    clean_logits: bool = True, max_seqlen_k: int = 0,
) -> Tensor:  # fmt: skip
    """``fp8_fp4_mqa_logits`` with a plain FP8 ``q[S, H, D]`` and float32 logits."""
    return fp8_fp4_mqa_logits(
        (q, None), kv, weights, cu_seq_len_k_start, cu_seq_len_k_end, clean_logits, max_seqlen_k
    )


def get_paged_mqa_logits_metadata(
    context_lens: Tensor, block_kv: int, num_sms: int, indices: Tensor | None = None
) -> Tensor:
    """How the paged logits spread over processors.

    Args:
        context_lens: int32 ``[B]`` or ``[B, next_n]``, any stride; any batch size.
        block_kv: tokens a page, 32 or 64.
        num_sms: processors to spread over.
        indices: int32 ``[B]``, the request of each row where next_n is 1; a hint.

    Returns:
        int32 ``[num_sms + 1, 2]``: where each processor starts, as (batch row, block of 256 keys).
    """
    result: Tensor = run(ops.get_paged_mqa_logits_metadata, (context_lens, indices), (block_kv, num_sms))
    return result


def fp8_fp4_paged_mqa_logits(
    q: ScaledOrPlain, kv_cache: Tensor, weights: Tensor, context_lens: Tensor, block_table: Tensor,
    schedule_meta: Tensor | None, max_context_len: int, clean_logits: bool = False,
    logits_dtype: torch.dtype = torch.float32, indices: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """Logits of decoding queries against a paged cache of keys.

    Args:
        q: ``(q[B, NN, H, D], None)`` float8_e4m3fn, or ``(packed e2m1 int8, q_sf[B, NN, H] int32)``; NN is
            next_n, any number.
        kv_cache: uint8 ``kv_cache[PAGES, P, 1, W]``, ``W = D + 4`` (FP4: ``D / 2 + 4``), P 32 or 64. Within a
            page all P * (W - 4) value bytes come first, then the P scales of 4 bytes.
        weights: ``weights[ROWS, H]`` with ``ROWS = B * next_n``, float32, bfloat16 or float16.
        context_lens: int32 ``[B, next_n]``: keys that each query sees; or ``[B]``: keys of the request, of
            which query i of next_n sees the first ``context_lens - (next_n - 1 - i)``. Any stride.
        block_table: int32 ``block_table[B, MAXP]``, the page of each P keys; any stride; entries out of range
            are clipped.
        schedule_meta: from ``get_paged_mqa_logits_metadata``, or None.
        max_context_len: columns of the result.
        clean_logits: write -inf at and past each query's context; otherwise those elements are unspecified.
        logits_dtype: float32 or bfloat16; sums are float32 and rounded once.
        indices: int32 ``[B]``, a scheduling hint (see the metadata).

    Returns:
        ``[B * next_n, max_context_len]``, a view whose rows start on multiples of 256 bytes.
    """
    op = ops.fp8_fp4_paged_mqa_logits
    tensors = (*pair(op.name, "q", q), kv_cache, weights, context_lens, block_table, schedule_meta, indices)
    result: Tensor = run(op, tensors, (max_context_len, clean_logits, logits_dtype))
    return result


def fp8_paged_mqa_logits(
    q: Tensor, kv_cache: Tensor, weights: Tensor, context_lens: Tensor, block_table: Tensor,
    schedule_meta: Tensor | None, max_context_len: int, clean_logits: bool = False,
    indices: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """``fp8_fp4_paged_mqa_logits`` with a plain FP8 ``q[B, NN, H, D]`` and float32 logits."""
    return fp8_fp4_paged_mqa_logits(
        (q, None), kv_cache, weights, context_lens, block_table, schedule_meta, max_context_len, clean_logits,
        indices=indices,
    )  # fmt: skip
