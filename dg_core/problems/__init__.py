"""From the checked tensors of a call to the problem that a backend solves: the ``prepare`` functions of the
op table.

Each takes ``(op, dims, tensors, options)`` with the caller's tensors and returns ``(problem, view)``. Rules
that neither axis expressions nor the limits of one option can say are checked here: scale formats, the
lengths of layouts, what c and d share.
"""

from .common import View, primitive_positions, require, same_view, share_elements, span, spans_meet
from .gemm import batched, contiguous, dense, einsum, masked, skip_head_mid
from .k_grouped import k_grouped_flat, k_grouped_rows
from .logits import LOGITS_DTYPES, PAGE_SIZES, mqa_logits, paged_metadata, paged_mqa_logits
from .transforms import hc_prenorm, sf_mn_major, sf_pack, sf_pack_k_grouped

__all__ = [
    "LOGITS_DTYPES",
    "PAGE_SIZES",
    "View",
    "batched",
    "contiguous",
    "dense",
    "einsum",
    "hc_prenorm",
    "k_grouped_flat",
    "k_grouped_rows",
    "masked",
    "mqa_logits",
    "paged_metadata",
    "paged_mqa_logits",
    "primitive_positions",
    "require",
    "same_view",
    "sf_mn_major",
    "sf_pack",
    "sf_pack_k_grouped",
    "share_elements",
    "skip_head_mid",
    "span",
    "spans_meet",
]
