"""The cases of the benchmarks: which operation, at which sizes, stored how. Data only.

``H200`` holds the layers of DeepSeek-V3 and its like at decoding and prefill batches: what a Hopper card is
judged by. ``SMALL`` holds one or two sizes of every family that a machine without a card gets through in
about a minute.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

__all__ = ["H200", "MODELS", "SETS", "SMALL", "Case", "Layer"]


@dataclass(frozen=True)
class Case:
    """One row of a benchmark.

    Attributes:
        kind: the family, as rows are labelled and chosen.
        op: name in the op table.
        sizes: what the label shows, in the family's usual order.
        dims: sizes for ``dg_core.samples.sample``.
        choices: storage and options for it.
    """

    kind: str
    op: str
    sizes: tuple[int, ...]
    dims: Mapping[str, int]
    choices: Mapping[str, Any] = field(default_factory=dict)

    @property
    def label(self) -> str:
        return " ".join(map(str, (self.kind, *self.sizes)))


# Weight gradients accumulate in float32, with one scale for 128 values along K on both sides.
_WGRAD = {"scales": "block_1d1d", "addend": "in_place", "out_dtype": torch.float32}


def dense(m: int, n: int, k: int) -> Case:
    return Case("dense", "fp8_gemm_nt", (m, n, k), {"M": m, "N": n, "K": k})


def w8a8(m: int, n: int, k: int) -> Case:
    return Case("w8a8", "fp8_gemm_nt", (m, n, k), {"M": m, "N": n, "K": k}, {"scales": "channelwise"})


def bf16(m: int, n: int, k: int) -> Case:
    return Case("bf16", "bf16_gemm_nt", (m, n, k), {"M": m, "N": n, "K": k})


def wgrad(m: int, n: int, k: int) -> Case:
    return Case(
        "wgrad", "fp8_gemm_nt", (m, n, k), {"M": m, "N": n, "K": k}, {**_WGRAD, "recipe": (1, 1, 128)}
    )


def contiguous(groups: int, rows: int, n: int, k: int) -> Case:
    dims = {"G": groups, "M": groups * rows, "N": n, "K": k}
    return Case("contig", "m_grouped_fp8_gemm_nt_contiguous", (groups, rows, n, k), dims)


def masked(groups: int, expected: int, n: int, k: int) -> Case:
    # Samples draw from half of M to M valid rows, so that three quarters of M are expected.
    dims = {"G": groups, "M": -(-expected * 4 // 3), "N": n, "K": k}
    choices = {"expected_m": expected}
    return Case("masked", "m_grouped_fp8_gemm_nt_masked", (groups, expected, n, k), dims, choices)


def k_grouped(groups: int, m: int, n: int, k: int) -> Case:
    dims = {"G": groups, "M": m, "N": n, "SK": groups * k}
    return Case("kgrouped", "k_grouped_fp8_gemm_nt_contiguous", (groups, m, n, k), dims, _WGRAD)


def mqa(s: int, skv: int, heads: int, head_dim: int) -> Case:
    dims = {"S": s, "SKV": skv, "H": heads, "D": head_dim}
    return Case("mqa", "fp8_fp4_mqa_logits", (s, skv, heads, head_dim), dims, {"clean_logits": False})


def paged(batch: int, next_n: int, context: int) -> Case:
    pages = -(-context // 64)
    dims = {
        "B": batch, "NN": next_n, "H": 64, "D": 128, "P": 64, "PAGES": batch * pages, "MAXP": pages,
        "max_context_len": context,
    }  # fmt: skip
    return Case("paged", "fp8_fp4_paged_mqa_logits", (batch, next_n, context), dims)


def prenorm(m: int, n: int, k: int) -> Case:
    return Case("prenorm", "tf32_hc_prenorm_gemm", (m, n, k), {"M": m, "N": n, "K": k})


# (N, K) of the linear layers of a model, and of the two products of an expert.
_LAYERS = ((2112, 7168), (576, 7168), (24576, 1536), (32768, 512), (7168, 16384), (4096, 7168), (7168, 2048))
_EXPERTS = ((6144, 7168), (7168, 3072), (4096, 4096), (4096, 2048))


def _h200() -> Iterator[Case]:
    yield from (dense(m, n, k) for m in (1, 64, 128, 1024, 4096) for n, k in _LAYERS)
    yield from (bf16(m, n, k) for m in (128, 4096) for n, k in _LAYERS)
    yield from (contiguous(g, rows, n, k) for g, rows in ((4, 8192), (8, 4096)) for n, k in _EXPERTS)
    yield from (
        masked(g, rows, n, k) for g, rows in ((32, 192), (6, 1024), (32, 20), (6, 20)) for n, k in _EXPERTS
    )
    yield from (wgrad(*sizes) for sizes in ((2112, 4096, 7168), (4096, 4096, 7168), (7168, 4096, 2048)))
    yield from (k_grouped(*s) for s in ((4, 4096, 7168, 8192), (4, 7168, 2048, 8192), (16, 4096, 7168, 2048)))
    yield from (mqa(2048, keys, heads, 128) for keys in (8192, 65536) for heads in (32, 64))
    yield from (paged(*sizes) for sizes in ((64, 1, 8192), (64, 2, 8192), (128, 1, 32768)))


H200 = tuple(_h200())
SMALL = (
    dense(1, 2112, 1024), dense(64, 576, 1024), dense(512, 1024, 1024), w8a8(512, 1024, 1024), bf16(64, 576,
    1024), bf16(512, 1024, 1024), wgrad(512, 1024, 1024), contiguous(4, 128, 1024, 512), masked(4, 96, 1024,
    512), k_grouped(4, 512, 512, 256), mqa(128, 1024, 32, 128), paged(8, 1, 1024), prenorm(512, 24, 1024),
)  # fmt: skip


@dataclass(frozen=True)
class Layer:
    """A call of a model, at any M: an operation and the other sizes of its problem."""

    op: str
    sizes: Mapping[str, int]


def _deepseek_v3() -> Iterator[Layer]:
    """Linear layers, then the two products of a routed expert, prefilled and decoded."""
    yield from (Layer("fp8_gemm_nt", {"N": n, "K": k}) for n, k in _LAYERS)
    for op in ("m_grouped_fp8_gemm_nt_contiguous", "m_grouped_fp8_gemm_nt_masked"):
        yield from (Layer(op, {"N": n, "K": k}) for n, k in ((4096, 7168), (7168, 2048)))


#: Model -> its calls, by the names that `precompile --model` takes.
MODELS: Mapping[str, tuple[Layer, ...]] = dict.fromkeys(("deepseek-v3", "dsv3"), tuple(_deepseek_v3()))
SETS: Mapping[str, tuple[Case, ...]] = {"small": SMALL, "h200": H200}
