"""Logits of the indexer: ``out[i, j] = kv_scale[j] * sum_h relu(q[i, h] . kv[j]) * weights[i, h]``."""

from __future__ import annotations

import torch
from torch import Tensor

from dg_core.backend import MqaLogits, PagedMetadata, PagedMqaLogits
from dg_core.layout import ceil_div, empty_logits, unpack_ue8m0_from_int
from dg_core.quant import dequantise_fp4, unpack_fp4

from .operand import multiply_blocks, on_host, steps
from .precision import matmul

FP4_GRAN = 32  # one UE8M0 exponent for 32 values along D
METADATA_KEYS = 256  # keys in one unit of the paged work split
KEY_STEP = 8192  # keys that are dequantised at once: at most 4 MiB of float32 for D = 128
VALUES = 2 * 1024 * 1024  # scores, or values of queries, held at once: 8 MiB, unless one row alone is longer


def _values(x: Tensor, sf: Tensor | None) -> Tensor:
    """FP8 values as float32 ``[n, D]``, or packed FP4 ``[n, D / 2]`` times its exponents ``sf[n]``."""
    if sf is None:
        return x.float()
    values = dequantise_fp4(unpack_fp4(x))
    multiply_blocks(values, unpack_ue8m0_from_int(sf[:, None])[:, : values.shape[1] // FP4_GRAN], FP4_GRAN)
    return values


def _queries(q: Tensor, q_sf: Tensor | None) -> Tensor:
    """Float32 queries ``[rows, H, D]``."""
    flat = _values(q.flatten(0, 1), None if q_sf is None else q_sf.flatten())
    return flat.view(*q.shape[:2], flat.shape[1])


def _scores(q: Tensor, keys: Tensor, weights: Tensor, key_scales: Tensor | None) -> Tensor:
    """``key_scales[j] * sum_h relu(q[i, h] . keys[j]) * weights[i, h]``, float32 ``[rows, keys]``, head by
    head."""
    total = torch.zeros(len(q), len(keys), dtype=torch.float32, device=q.device)
    for h in range(q.shape[1]):
        total += matmul(q[:, h], keys.t()).relu_() * weights[:, h, None]
    return total if key_scales is None else total * key_scales


def mqa_logits(
    p: MqaLogits,
    q: Tensor,
    q_sf: Tensor | None,
    kv: Tensor,
    kv_sf: Tensor,
    weights: Tensor,
    start: Tensor,
    end: Tensor,
) -> Tensor:
    """The logits of every row over its keys; columns outside are -inf when clean, else whatever the product
    gives."""
    out = empty_logits(p.rows, p.columns, p.out_dtype, q.device)
    start, end = start.to(torch.int64), end.to(torch.int64).clamp(max=p.keys)
    column = torch.arange(p.columns, device=q.device)
    for rows in steps(p.rows, max(VALUES // max(p.keys, p.heads * p.head_dim), 1)):
        queries = _queries(q[rows], None if q_sf is None else q_sf[rows])
        # One column more than there are keys, so that a row over no keys still has something to gather.
        score = torch.zeros(len(queries), p.keys + 1, dtype=torch.float32, device=q.device)
        for part in steps(p.keys, KEY_STEP):
            keys = _values(kv[part], kv_sf[part] if p.fp4 else None)
            score[:, part] = _scores(queries, keys, weights[rows].float(), None if p.fp4 else kv_sf[part])
        key = (column + start[rows, None]) if p.compressed else column.expand(len(queries), -1)
        value = score.gather(1, key.clamp(0, p.keys)) if p.compressed else score[:, : p.keys]
        if p.clean:
            inside = (key >= start[rows, None].clamp(min=0)) & (key < end[rows, None])
            value = torch.where(inside, value, -torch.inf)
        out[rows] = value.to(p.out_dtype)
    return out


def paged_mqa_logits(
    p: PagedMqaLogits, q: Tensor, q_sf: Tensor | None, cache: Tensor, weights: Tensor, context_lens: Tensor,
    block_table: Tensor, schedule_meta: Tensor | None, indices: Tensor | None,
) -> Tensor:  # fmt: skip
    """The same with keys gathered from pages; ``schedule_meta`` and ``indices`` only spread work, so they are
    not read."""
    out = empty_logits(p.batch * p.next_n, p.columns, p.out_dtype, q.device)
    # A context cannot be longer than its row of the block table, nor any key be where there are no pages.
    stored = min(p.columns, block_table.shape[1] * p.page_size if p.pages else 0)
    seen = _keys_seen(p, context_lens).clamp(max=stored)
    column = torch.arange(p.columns, device=q.device)
    weights = weights.float().reshape(p.batch, p.next_n, p.heads)
    for request in range(p.batch):
        rows = out[request * p.next_n : (request + 1) * p.next_n]
        queries = _queries(q[request], None if q_sf is None else q_sf[request])
        # Past its longest context a request has no logits; a context that only a device knows is not read.
        keys_here = max(int(seen[request].amax()), 0) if on_host(seen) and p.next_n else stored
        # Filled even where logits need not be clean, so that equal calls give equal bits.
        rows[:, keys_here:] = -torch.inf
        for part in steps(keys_here, KEY_STEP):
            pages = block_table[request, part.start // p.page_size : ceil_div(part.stop, p.page_size)]
            keys, scales = _gather_pages(p, cache[pages.to(torch.int64).clamp(0, p.pages - 1)])
            score = _scores(queries, keys, weights[request], scales)
            rows[:, part] = score[:, : part.stop - part.start].to(p.out_dtype)
        if p.clean:
            rows.masked_fill_(column >= seen[request, :, None], -torch.inf)
    return out


def _keys_seen(p: PagedMqaLogits, context_lens: Tensor) -> Tensor:
    """Keys that each query sees, ``[B, next_n]``: stated, or the request's less the queries that come
    after."""
    lens = context_lens.to(torch.int64)
    if lens.dim() == 2:
        return lens
    after = torch.arange(p.next_n - 1, -1, -1, device=lens.device)
    return lens[:, None] - after


def _gather_pages(p: PagedMqaLogits, pages: Tensor) -> tuple[Tensor, Tensor | None]:
    """Keys ``[tokens, D]`` in float32 and their scales ``[tokens]`` (None for FP4, whose scales are in the
    keys).

    A page holds the value bytes of all its tokens, then the four scale bytes of each.
    """
    width = p.head_dim // 2 if p.fp4 else p.head_dim
    raw = pages.flatten(1)
    values = raw[:, : p.page_size * width].reshape(-1, width)
    words = raw[:, p.page_size * width :].contiguous()
    if p.fp4:
        return _values(values.view(torch.int8), words.view(torch.int32).flatten()), None
    return values.view(torch.float8_e4m3fn).float(), words.view(torch.float32).flatten()


def paged_metadata(p: PagedMetadata, context_lens: Tensor, indices: Tensor | None) -> Tensor:
    """Where each processor starts when units of ``METADATA_KEYS`` keys are dealt out evenly, in order.

    Row i is (request, unit within the request); the last row is (batch, 0). Requests without keys have no
    unit.
    """
    out = torch.zeros(p.num_sms + 1, 2, dtype=torch.int32, device=context_lens.device)
    if p.batch == 0 or p.next_n == 0:
        out[:, 0] = p.batch
        return out
    lens = context_lens if context_lens.dim() == 2 else context_lens[:, None]
    longest = lens.to(torch.int64).clamp(min=0).amax(1)
    ends = ((longest + METADATA_KEYS - 1) // METADATA_KEYS).cumsum(0)
    share, rest = ends[-1] // p.num_sms, ends[-1] % p.num_sms
    processor = torch.arange(p.num_sms + 1, device=out.device)
    unit = processor * share + torch.minimum(processor, rest)
    request = torch.searchsorted(ends, unit, right=True)
    before = torch.nn.functional.pad(ends, (1, 0))
    out[:, 0] = request.to(torch.int32)
    out[:, 1] = torch.where(request < p.batch, unit - before[request], 0).to(torch.int32)
    return out
