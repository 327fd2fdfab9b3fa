"""Wrong calls of the public functions, as data; run as a script, it prints each call and the message that it
raises.

    python tests/wrong_calls.py
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

import dg_core
from dg_core import errors

M, N, K, G = 128, 256, 512, 4


@dataclass(frozen=True)
class WrongCall:
    """``words`` says what is wrong; the message must hold each of ``needles``."""

    words: str
    call: Callable[[], Any]
    error: type[Exception]
    needles: tuple[str, ...]


def fp8(*shape: int) -> torch.Tensor:
    return torch.zeros(shape, dtype=torch.float8_e4m3fn)


def f32(*shape: int) -> torch.Tensor:
    return torch.ones(shape)


def bf16(*shape: int) -> torch.Tensor:
    return torch.zeros(shape, dtype=torch.bfloat16)


def i32(*shape: int) -> torch.Tensor:
    return torch.zeros(shape, dtype=torch.int32)


def a(m: int = M, k: int = K) -> tuple[torch.Tensor, torch.Tensor]:
    """An operand of rows with one scale for each 1 x 128."""
    return fp8(m, k), f32(m, -(-k // 128))


def b(n: int = N, k: int = K) -> tuple[torch.Tensor, torch.Tensor]:
    """An operand with one scale for each 128 x 128."""
    return fp8(n, k), f32(-(-n // 128), -(-k // 128))


def experts() -> tuple[torch.Tensor, torch.Tensor]:
    return fp8(G, N, K), f32(G, N // 128, K // 128)


def mqa(**changes: Any) -> Any:
    arguments = {
        "q": (fp8(16, 32, 128), None),
        "kv": (fp8(64, 128), f32(64)),
        "weights": f32(16, 32),
        "cu_seq_len_k_start": i32(16),
        "cu_seq_len_k_end": i32(16),
    }
    return dg_core.fp8_fp4_mqa_logits(**{**arguments, **changes})


def paged(**changes: Any) -> Any:
    arguments = {
        "q": (fp8(2, 1, 32, 128), None),
        "kv_cache": torch.zeros(8, 64, 1, 132, dtype=torch.uint8),
        "weights": f32(2, 32),
        "context_lens": i32(2, 1),
        "block_table": i32(2, 4),
        "schedule_meta": None,
        "max_context_len": 256,
    }
    return dg_core.fp8_fp4_paged_mqa_logits(**{**arguments, **changes})


CALLS = [
    WrongCall(
        "fp8_gemm_nt: K of B differs",
        lambda: dg_core.fp8_gemm_nt(a(), b(k=500), bf16(M, N)),
        errors.ShapeError,
        ("fp8_gemm_nt: b has shape (256, 500); axis 1 is 500 but K = 512 (signature: b[N, K])",),
    ),
    WrongCall(
        "fp8_gemm_nt: D is too narrow",
        lambda: dg_core.fp8_gemm_nt(a(), b(), bf16(M, 255)),
        errors.ShapeError,
        ("fp8_gemm_nt: d has shape (128, 255); axis 1 is 255 but N = 256 (signature: d[M, N])",),
    ),
    WrongCall(
        "fp8_gemm_nt: one scale for the whole tensor",
        lambda: dg_core.fp8_gemm_nt((fp8(M, K), f32(1)), b(), bf16(M, N)),
        errors.ShapeError,
        (
            "fp8_gemm_nt: sfa has shape (1,) and dtype float32",
            "operand of shape (128, 512)",
            "(128, 4) per 1 x 128",
        ),
    ),
    WrongCall(
        "fp8_gemm_nt: scales of four axes",
        lambda: dg_core.fp8_gemm_nt(a(), (fp8(N, K), f32(2, 4, 1, 1)), bf16(M, N)),
        errors.ShapeError,
        ("fp8_gemm_nt: sfb has shape (2, 4, 1, 1)", "operand of shape (256, 512)", "(2, 4) per 128 x 128"),
    ),
    WrongCall(
        "fp8_gemm_nt: the recipe does not fit the scales",
        lambda: dg_core.fp8_gemm_nt(a(), b(), bf16(M, N), recipe=(1, 1, 128)),
        errors.ShapeError,
        ("fp8_gemm_nt: sfb has shape (2, 4)", "under recipe (1, 128)", "(256, 4) per 1 x 128"),
    ),
    WrongCall(
        "fp8_gemm_nt: a granularity that no format has",
        lambda: dg_core.fp8_gemm_nt(a(), b(), bf16(M, N), recipe=(1, 64, 128)),
        errors.ArgumentError,
        ("fp8_gemm_nt: recipe is (1, 64, 128)", "along M and N are 1 or 128, along K 32 or 128"),
    ),
    WrongCall(
        "fp8_gemm_nt: A without its scales",
        lambda: dg_core.fp8_gemm_nt(fp8(M, K), b(), bf16(M, N)),  # type: ignore[arg-type]
        errors.DTypeError,
        ("fp8_gemm_nt: a is a Tensor", "it must be a pair (a, scales of a)"),
    ),
    WrongCall(
        "fp8_gemm_nt: D in float16",
        lambda: dg_core.fp8_gemm_nt(a(), b(), torch.zeros(M, N, dtype=torch.float16)),
        errors.DTypeError,
        ("fp8_gemm_nt: d has dtype float16; it must be bfloat16 or float32 (signature: d[M, N])",),
    ),
    WrongCall(
        "fp8_gemm_nt: C of another dtype than D",
        lambda: dg_core.fp8_gemm_nt(a(), b(), bf16(M, N), c=f32(M, N)),
        errors.DTypeError,
        ("fp8_gemm_nt: c has dtype float32 but d has bfloat16; they must be the same",),
    ),
    WrongCall(
        "fp8_gemm_nt: B on another device",
        lambda: dg_core.fp8_gemm_nt(a(), (fp8(N, K).to("meta"), f32(2, 4)), bf16(M, N)),
        errors.DeviceError,
        ("fp8_gemm_nt: b is on meta but a is on cpu; one call, one device",),
    ),
    WrongCall(
        "bf16_gemm_nn: D is an expanded row",
        lambda: dg_core.bf16_gemm_nn(bf16(M, K), bf16(K, N), bf16(1, N).expand(M, N)),
        errors.ShapeError,
        (
            "bf16_gemm_nn: d has shape (128, 256) and strides (0, 1)",
            "no two of its elements may share an address",
        ),
    ),
    WrongCall(
        "bf16_gemm_nt: A with a step in both axes",
        lambda: dg_core.bf16_gemm_nt(bf16(2 * M, 2 * K)[::2, ::2], bf16(N, K), bf16(M, N)),
        errors.ShapeError,
        (
            "bf16_gemm_nt: a has shape (128, 512) and strides (2048, 2)",
            "one of its last two strides must be 1",
        ),
    ),
    WrongCall(
        "bf16_gemm_nt: a letter that is no dimension",
        lambda: dg_core.bf16_gemm_nt(bf16(M, K), bf16(N, K), bf16(M, N), compiled_dims="nkx"),
        errors.ArgumentError,
        ("bf16_gemm_nt: compiled_dims is 'nkx'; it must be a string of the letters m, n, k",),
    ),
    WrongCall(
        "fp8_gemm_nt_skip_head_mid: heads that do not divide N",
        lambda: dg_core.fp8_gemm_nt_skip_head_mid(a(), b(), bf16(M, 512), (128, 64, 64)),
        errors.ArgumentError,
        ("fp8_gemm_nt_skip_head_mid: head_splits is (128, 64, 64); left + right = 192 must divide N = 256",),
    ),
    WrongCall(
        "m_grouped_fp8_gemm_nt_contiguous: one label too few",
        lambda: dg_core.m_grouped_fp8_gemm_nt_contiguous(a(), experts(), bf16(M, N), i32(127)),
        errors.ShapeError,
        (
            "m_grouped_fp8_gemm_nt_contiguous: grouped_layout has shape (127,); axis 0 is 127 but M = 128",
            "(one label a row)",
        ),
    ),
    WrongCall(
        "m_grouped_fp8_gemm_nt_masked: a mask in int64",
        lambda: dg_core.m_grouped_fp8_gemm_nt_masked(
            (fp8(G, M, K), f32(G, M, 4)), experts(), bf16(G, M, N), i32(G).long(), M
        ),
        errors.DTypeError,
        (
            "m_grouped_fp8_gemm_nt_masked: masked_m has dtype int64; it must be int32",
            "(signature: masked_m[G])",
        ),
    ),
    WrongCall(
        "k_grouped_bf16_gemm_tn_contiguous: sizes that exceed K",
        lambda: dg_core.k_grouped_bf16_gemm_tn_contiguous(bf16(K, M), bf16(K, N), f32(2, M, N), [256, 384]),
        errors.ShapeError,
        ("k_grouped_bf16_gemm_tn_contiguous: ks_cpu sums to 640, but a and b have only SK = 512 rows",),
    ),
    WrongCall(
        "einsum: an expression that it does not have",
        lambda: dg_core.einsum("bij,bjk->bik", bf16(2, 3, 4), bf16(2, 4, 5), bf16(2, 3, 5)),
        errors.ArgumentError,
        ("einsum: expr is 'bij,bjk->bik'; it must be one of 'bmk,bnk->mn', 'bhr,hdr->bhd', 'bhd,hdr->bhr'",),
    ),
    WrongCall(
        "fp8_fp4_mqa_logits: a number of heads that no kernel has",
        lambda: mqa(q=(fp8(16, 24, 128), None), weights=f32(16, 24)),
        errors.ShapeError,
        (
            "fp8_fp4_mqa_logits: q has H = 24 heads; it must be one of 8, 16, 32, 64, 128",
            "(signature: q[S, H, D])",
        ),
    ),
    WrongCall(
        "fp8_fp4_mqa_logits: logits in float16",
        lambda: mqa(logits_dtype=torch.float16),
        errors.DTypeError,
        ("fp8_fp4_mqa_logits: logits_dtype is float16; it must be float32 or bfloat16",),
    ),
    WrongCall(
        "fp8_fp4_paged_mqa_logits: a cache without room for the scales",
        lambda: paged(kv_cache=torch.zeros(8, 64, 1, 128, dtype=torch.uint8)),
        errors.ShapeError,
        (
            "fp8_fp4_paged_mqa_logits: kv_cache has shape (8, 64, 1, 128); axis 3 is 128 but W = 132",
            "128 value bytes and 4 scale bytes a token for D = 128",
        ),
    ),
    WrongCall(
        "tf32_hc_prenorm_gemm: D without the axis of parts",
        lambda: dg_core.tf32_hc_prenorm_gemm(bf16(M, K), f32(24, K), f32(M, 24), f32(4, M), num_splits=4),
        errors.ShapeError,
        ("tf32_hc_prenorm_gemm: d has shape (128, 24); with num_splits = 4 it must be (4, 128, 24)",),
    ),
    WrongCall(
        "get_mn_major_tma_aligned_packed_ue8m0_tensor: a scale that is no power of two",
        lambda: dg_core.get_mn_major_tma_aligned_packed_ue8m0_tensor(torch.full((M, 4), 0.3)),
        errors.ArgumentError,
        ("get_mn_major_tma_aligned_packed_ue8m0_tensor: sf holds 0.3", "not a power of two"),
    ),
    WrongCall(
        "transform_sf_into_required_layout: three granularities, but which operand?",
        lambda: dg_core.transform_sf_into_required_layout(f32(M, 4), M, K, (1, 128, 128)),
        errors.ArgumentError,
        ("transform_sf_into_required_layout: recipe is (1, 128, 128) and is_sfa is None",),
    ),
    WrongCall(
        "set_num_sms: a negative number",
        lambda: dg_core.set_num_sms(-2),
        errors.ArgumentError,
        ("set_num_sms: num_sms is -2; it must be in [0, ",),
    ),
    WrongCall(
        "use_backend: a backend that nobody registered",
        lambda: dg_core.use_backend("vulkan").__enter__(),
        errors.BackendUnavailable,
        ("no backend is called 'vulkan'; known: auto, cuda, hip, reference",),
    ),
]


def message(wrong: WrongCall) -> str:
    """The error that a wrong call raises, as Python would print it."""
    try:
        wrong.call()
    except wrong.error as error:
        return f"{type(error).__name__}: {error}"
    return "nothing was raised"


if __name__ == "__main__":
    for number, wrong in enumerate(CALLS, 1):
        print(f"{number:2}. {wrong.words}\n    {message(wrong)}\n")
