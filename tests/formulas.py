"""What the operations mean, once more and independently of dg_core: plain float64 on decoded operands.

Nothing here uses dg_core. Number formats are decoded by ml_dtypes (e4m3), by the table of the OCP
Microscaling specification (e2m1) and by the definition of an exponent (UE8M0); scales are spread by indexing
with ``row // gran_mn`` and ``column // gran_k``; groups, ranges and pages are Python loops over one index at
a time.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import ml_dtypes
import numpy as np
import torch
from torch import Tensor

E4M3 = torch.from_numpy(np.arange(256, dtype=np.uint8).view(ml_dtypes.float8_e4m3fn).astype(np.float64))
E2M1 = torch.tensor(
    [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0],
    dtype=torch.float64,
)
# Byte 0 stands for 0, as the public library takes it (the MX specification has 2^-127 there), 255 for NaN.
UE8M0 = torch.tensor([0.0, *(math.ldexp(1.0, e - 127) for e in range(1, 255)), math.nan], dtype=torch.float64)


def ceil_div(x: int, y: int) -> int:
    return -(-x // y)


def align_up(x: int, y: int) -> int:
    return -(-x // y) * y


# Number formats ---------------------------------------------------------------------------------------------


def decode_e4m3(x: Tensor) -> Tensor:
    """float8_e4m3fn -> float64."""
    return E4M3[x.contiguous().view(torch.uint8).long()]


def decode_e2m1(packed: Tensor, axis: int = -1) -> Tensor:
    """int8 with two values a byte along ``axis``, low nibble first -> float64."""
    codes = packed.movedim(axis, -1).contiguous().view(torch.uint8).long()
    both = torch.stack((codes % 16, codes // 16), -1).flatten(-2)
    return E2M1[both].movedim(-1, axis)


def decode_ue8m0(words: Tensor) -> Tensor:
    """int32 ``[.., n]`` -> float64 ``[.., 4 n]``, lowest byte first."""
    unsigned = words.long() % 2**32
    return UE8M0[torch.stack([unsigned // 256**byte % 256 for byte in range(4)], -1).flatten(-2)]


def round_to_tf32(x: Tensor) -> Tensor:
    """float32 -> float64 with 11 significant bits, to nearest, ties to even."""
    mantissa, exponent = torch.frexp(x.double())
    return torch.ldexp(torch.round(mantissa * 2**11), exponent - 11)


# Scales -----------------------------------------------------------------------------------------------------


def spread(sf: Tensor, mn: int, k: int, gran_mn: int, gran_k: int) -> Tensor:
    """Float64 scales ``[.., mn, k]`` of every element out of ``[.., cdiv(mn, gran_mn), cdiv(k, gran_k)]``, or
    out of int32 words of four UE8M0 exponents ``[.., mn, cdiv(k, 4 * gran_k)]``."""
    scales = decode_ue8m0(sf) if sf.dtype == torch.int32 else sf.double()
    rows, columns = torch.arange(mn) // gran_mn, torch.arange(k) // gran_k
    return scales.index_select(-2, rows).index_select(-1, columns)


# Products ---------------------------------------------------------------------------------------------------


def product(a: Tensor, b: Tensor) -> Tensor:
    """``A @ B.T`` of float64 ``[.., M, K]`` and ``[.., N, K]``."""
    return a @ b.transpose(-1, -2)


def psum_groups(ends: Sequence[int], alignment: int, rows: int) -> list[range]:
    """The rows of every group under a psum layout; what lies outside ``[0, rows)`` does not exist."""
    groups, start = [], 0
    for end in ends:
        end = min(max(end, 0), rows)
        groups.append(range(start, max(end, start)))
        start = min(align_up(end, alignment), rows)
    return groups


def psum_ends(counts: Sequence[int], alignment: int, repeat: bool = False) -> list[int]:
    """End rows of groups of so many rows. An empty group ends where it would start or, with ``repeat``, where
    the group before it ended, which is before its own aligned start."""
    ends: list[int] = []
    for count in counts:
        last = ends[-1] if ends else 0
        ends.append(last if repeat and count == 0 else align_up(last, alignment) + count)
    return ends


def k_groups(sizes: Sequence[int], sum_k: int) -> list[range]:
    """The stretch of K of every group, one behind the other; what lies outside ``[0, sum_k)`` does not
    exist."""
    groups, start = [], 0
    for size in sizes:
        end = min(start + min(max(size, 0), sum_k), sum_k)
        groups.append(range(start, end))
        start = end
    return groups


def row_groups(labels: Sequence[int], groups: int) -> list[int | None]:
    """The group of every row, None where its label names none."""
    return [label if 0 <= label < groups else None for label in labels]


def scattered_columns(n: int, splits: tuple[int, int, int]) -> list[int]:
    """Where each column of the product goes when every head of left + right columns gets a hole of mid."""
    left, mid, right = splits
    heads = n // (left + right)
    places = []
    for head in range(heads):
        first = head * (left + mid + right)
        places += [*range(first, first + left), *range(first + left + mid, first + left + mid + right)]
    return places


def split_ranges(k: int, splits: int) -> list[range]:
    """K in parts of whole blocks of 64, as even as they go, the longer ones first."""
    blocks = [range(start, min(start + 64, k)) for start in range(0, k, 64)]
    parts, first = [], 0
    for part in range(splits):
        count = len(blocks) // splits + (1 if part < len(blocks) % splits else 0)
        mine = blocks[first : first + count]
        parts.append(range(mine[0].start, mine[-1].stop) if mine else range(0))
        first += count
    return parts


# Logits -----------------------------------------------------------------------------------------------------


def logits_row(q: Tensor, keys: Tensor, weights: Tensor) -> Tensor:
    """``sum_h relu(q[h] . keys[j]) * weights[h]`` for float64 ``q[H, D]``, ``keys[J, D]`` (scaled),
    ``weights[H]``."""
    return ((q @ keys.t()).clamp(min=0) * weights[:, None]).sum(0)


def logits(
    q: Tensor,
    keys: Tensor,
    weights: Tensor,
    starts: Sequence[int],
    ends: Sequence[int],
    max_seqlen_k: int = 0,
) -> Tensor:
    """Float64 ``[S, SKV]`` or ``[S, max_seqlen_k]`` with -inf outside each row's range."""
    columns = max_seqlen_k or len(keys)
    out = torch.full((len(q), columns), -torch.inf, dtype=torch.float64)
    for i, (start, end) in enumerate(zip(starts, ends, strict=True)):
        row = logits_row(q[i], keys, weights[i].double())
        for key in range(max(start, 0), min(end, len(keys))):
            column = key - start if max_seqlen_k else key
            if column < columns:
                out[i, column] = row[key]
    return out


def paged_keys(pages: Tensor, head_dim: int, fp4: bool) -> Tensor:
    """Float64 keys ``[pages, page size, D]``, scaled, from uint8 pages ``[pages, page size, 1, W]``: in every
    page the value bytes of all tokens come first, then four scale bytes of each."""
    count, size = pages.shape[:2]
    width = head_dim // 2 if fp4 else head_dim
    raw = pages.flatten(1)
    values = raw[:, : size * width].reshape(count, size, width)
    scale_bytes = np.ascontiguousarray(raw[:, size * width :].numpy()).reshape(count, size, 4)
    if fp4:
        scales = decode_ue8m0(torch.from_numpy(scale_bytes.view(np.int32)))
        return decode_e2m1(values) * scales[..., torch.arange(head_dim) // 32]
    return decode_e4m3(values) * torch.from_numpy(scale_bytes.view(np.float32)).double()


def keys_seen(context_lens: Tensor, batch: int, next_n: int) -> list[list[int]]:
    """How many keys each query sees: stated for each, or the request's without the queries that come after
    it."""
    if context_lens.dim() == 2:
        seen: list[list[int]] = context_lens.tolist()
        return seen
    lens = context_lens.tolist()
    return [[lens[b] - (next_n - 1 - i) for i in range(next_n)] for b in range(batch)]
